//! What a script says with `wingbeat.train`, over a socket that its environment names.
//!
//! A message is a line of JSON, and as many bytes after it as its `bytes` says. Each is answered with a line of JSON.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Error, ErrorKind, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc as answer;
use std::sync::{Arc, Mutex, PoisonError};

use rustix::event::{EventfdFlags, PollFd, PollFlags, poll};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;

use super::Event;

/// Names the socket.
pub(super) const VARIABLE: &str = "WINGBEAT_RANK_SOCKET";
/// The longest line of JSON.
const LINE_LIMIT: u64 = 16 << 20;

/// What a rank reports, and waits for the answer to.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Report {
    /// Which question this is, for its answer.
    pub id: u64,
    pub metrics: BTreeMap<String, f64>,
    /// A directory of its node that is to become part of a checkpoint.
    pub checkpoint: Option<String>,
    /// Whether it waits until the checkpoint is stored.
    pub waits: bool,
    /// Whether it comes from the middle of another of its process: from a signal's handler.
    pub is_nested: bool,
}

/// What a rank is told.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Answer(pub Result<Option<String>, String>);

/// Where answers go to.
#[derive(Clone, Default)]
pub(crate) struct Answers(Arc<AnswersState>);

#[derive(Default)]
struct AnswersState {
    last: AtomicU64,
    waiting: Mutex<BTreeMap<u64, Awaited>>,
}

/// Somebody waits for an answer, and for the end of the connection that it is for.
struct Awaited {
    sender: answer::SyncSender<Answer>,
    /// Ready once there is an answer, or there will be none.
    told: Arc<OwnedFd>,
}

impl Drop for Awaited {
    fn drop(&mut self) {
        // Fails only when it was told very often.
        let _ = rustix::io::write(&*self.told, &1_u64.to_ne_bytes());
    }
}

impl Answers {
    /// Asks with an id of its own, and waits for the answer. None if nobody answers any more, or whoever is at the other end
    /// of `stream` does not wait any more: then that is told.
    fn ask(
        &self,
        stream: &UnixStream,
        events: &mpsc::Sender<Event>,
        question: impl FnOnce(u64) -> Event,
    ) -> std::io::Result<Option<Answer>> {
        let id = self.0.last.fetch_add(1, Ordering::Relaxed);
        let told = Arc::new(rustix::event::eventfd(0, EventfdFlags::CLOEXEC)?);
        let (sender, receiver) = answer::sync_channel(1);
        let awaited = Awaited { sender, told: told.clone() };
        self.0.waiting.lock().unwrap_or_else(PoisonError::into_inner).insert(id, awaited);
        if events.blocking_send(question(id)).is_err() {
            self.forget(id);
            return Ok(None);
        }
        loop {
            let mut fds = [PollFd::new(&*told, PollFlags::IN), PollFd::new(stream, PollFlags::RDHUP)];
            match poll(&mut fds, None) {
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
                Ok(_) if !fds[0].revents().is_empty() => return Ok(receiver.recv().ok()),
                Ok(_) => {
                    self.forget(id);
                    // Nobody is left who needs to know.
                    let _ = events.blocking_send(Event::Withdrawn(id));
                    return Ok(None);
                }
            }
        }
    }

    fn forget(&self, id: u64) {
        self.0.waiting.lock().unwrap_or_else(PoisonError::into_inner).remove(&id);
    }

    /// Answers a report, unless nobody waits for that any more.
    pub(crate) fn give(&self, id: u64, answer: Answer) {
        let waiting = self.0.waiting.lock().unwrap_or_else(PoisonError::into_inner).remove(&id);
        if let Some(waiting) = waiting {
            let _ = waiting.sender.send(answer);
        }
    }

    /// Nobody answers any more.
    fn close(&self) {
        self.0.waiting.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }
}

/// A message, as the script writes it.
#[derive(Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
enum Message {
    Returned {
        bytes: usize,
    },
    Raised {
        bytes: usize,
    },
    /// Where is the newest checkpoint?
    Newest,
    Report {
        /// Numbers as text: JSON has no infinity.
        metrics: BTreeMap<String, String>,
        checkpoint: Option<String>,
        waits: bool,
        #[serde(default)]
        nested: bool,
    },
}

pub(super) struct Listener {
    listener: UnixListener,
    name: String,
}

impl Listener {
    pub(super) fn bind() -> std::io::Result<Listener> {
        let name = format!("wingbeat-rank-{}-{:016x}", std::process::id(), rand::random::<u64>());
        let listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(&name)?)?;
        Ok(Listener { listener, name })
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Hears connections while `work` runs.
    pub(super) fn serve<T>(
        &self,
        answers: &Answers,
        events: &mpsc::Sender<Event>,
        work: impl FnOnce() -> std::io::Result<T>,
    ) -> std::io::Result<T> {
        let (over, runs) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
        let over = &over;
        std::thread::scope(|scope| {
            let runs = runs; // dropped however this ends, so that the others end
            std::thread::Builder::new().name("reports".into()).spawn_scoped(scope, move || {
                while is_ready(&self.listener, over) {
                    let Ok((stream, _)) = self.listener.accept() else { break };
                    scope.spawn(move || hear(&stream, over, answers, events));
                }
            })?;
            let done = work();
            drop(runs);
            answers.close();
            done
        })
    }
}

/// Waits for something to read; false once it is over, and nothing is left to read.
fn is_ready(from: &impl AsFd, over: &OwnedFd) -> bool {
    loop {
        let mut fds = [PollFd::new(from, PollFlags::IN), PollFd::new(over, PollFlags::IN)];
        match poll(&mut fds, None) {
            Err(Errno::INTR) => {}
            Err(_) => return false,
            Ok(_) => return !fds[0].revents().is_empty(),
        }
    }
}

/// Hears one connection to its end. What makes no sense ends it, and the script has an error.
fn hear(stream: &UnixStream, over: &OwnedFd, answers: &Answers, events: &mpsc::Sender<Event>) {
    let uid = rustix::net::sockopt::socket_peercred(stream).map(|credentials| credentials.uid);
    if uid != Ok(rustix::process::geteuid()) {
        return;
    }
    let mut reader = BufReader::new(stream);
    while !reader.buffer().is_empty() || is_ready(stream, over) {
        let answered = match next(&mut reader) {
            Ok(Some(message)) => respond(message, stream, answers, events),
            Ok(None) => return,
            Err(error) => Answer(Err(error.to_string())),
        };
        let Ok(mut line) = serde_json::to_vec(&match answered {
            Answer(Ok(value)) => serde_json::json!({ "ok": value }),
            Answer(Err(why)) => serde_json::json!({ "error": why }),
        }) else {
            return;
        };
        line.push(b'\n');
        let mut stream = stream;
        if stream.write_all(&line).is_err() {
            return;
        }
    }
}

fn next(reader: &mut BufReader<&UnixStream>) -> std::io::Result<Option<(Message, Vec<u8>)>> {
    let mut line = String::new();
    if reader.by_ref().take(LINE_LIMIT).read_line(&mut line)? == 0 {
        return Ok(None);
    }
    let message: Message =
        serde_json::from_str(&line).map_err(|error| Error::new(ErrorKind::InvalidData, error.to_string()))?;
    let mut bytes = Vec::new();
    if let Message::Returned { bytes: length } | Message::Raised { bytes: length } = message {
        reader.by_ref().take(length as u64).read_to_end(&mut bytes)?;
        if bytes.len() != length {
            return Err(ErrorKind::UnexpectedEof.into());
        }
    }
    Ok(Some((message, bytes)))
}

fn respond(
    (message, bytes): (Message, Vec<u8>),
    stream: &UnixStream,
    answers: &Answers,
    events: &mpsc::Sender<Event>,
) -> Answer {
    let gone = || Answer(Err("the run is over".into()));
    let answered = |asked: std::io::Result<Option<Answer>>| match asked {
        Ok(answer) => answer.unwrap_or_else(gone),
        Err(error) => Answer(Err(error.to_string())),
    };
    let tell = |event| match events.blocking_send(event) {
        Ok(()) => Answer(Ok(None)),
        Err(_) => gone(),
    };
    match message {
        Message::Returned { .. } => tell(Event::Returned(bytes)),
        Message::Raised { .. } => tell(Event::Raised(bytes)),
        Message::Newest => answered(answers.ask(stream, events, Event::Newest)),
        Message::Report { metrics, checkpoint, waits, nested } => {
            let number = |(name, text): (String, String)| match text.parse() {
                Ok(value) => Ok((name, value)),
                Err(_) => Err(Answer(Err(format!("the metric {name} is not a number: {text}")))),
            };
            let metrics = match metrics.into_iter().map(number).collect() {
                Ok(metrics) => metrics,
                Err(refused) => return refused,
            };
            answered(
                answers.ask(stream, events, |id| {
                    Event::Report(Report { id, metrics, checkpoint, waits, is_nested: nested })
                }),
            )
        }
    }
}
