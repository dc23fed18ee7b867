//! What a script says with `wingbeat.train`, over a socket that its environment names.
//!
//! A message is a line of JSON, and as many bytes after it as its `bytes` says. Each is answered with a line of JSON.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Error, ErrorKind, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use serde::Deserialize;
use tokio::sync::mpsc;

use super::Event;
use super::answers::{Answer, Answers, Report};
use crate::error::ReportError;

/// Names the socket.
pub(super) const VARIABLE: &str = "WINGBEAT_RANK_SOCKET";
/// The longest line of JSON.
const LINE_LIMIT: u64 = 16 << 20;

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
            let over_with = Over { runs: Some(runs), answers }; // dropped however this ends, so that the others end
            std::thread::Builder::new().name("reports".into()).spawn_scoped(scope, move || {
                while is_ready(&self.listener, over) {
                    let Ok((stream, _)) = self.listener.accept() else { break };
                    let hearing = move || hear(&stream, over, answers, events);
                    // Without a thread the connection ends here, and the script has an error.
                    let _ = std::thread::Builder::new().name("report".into()).spawn_scoped(scope, hearing);
                }
            })?;
            let done = work();
            drop(over_with);
            done
        })
    }
}

/// When it is dropped, nothing more is heard or answered.
struct Over<'a> {
    runs: Option<OwnedFd>,
    answers: &'a Answers,
}

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.runs = None;
        self.answers.close();
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

/// Hears one connection to its end. To what makes no sense the answer is an error.
fn hear(stream: &UnixStream, over: &OwnedFd, answers: &Answers, events: &mpsc::Sender<Event>) {
    let uid = rustix::net::sockopt::socket_peercred(stream).map(|credentials| credentials.uid);
    if uid != Ok(rustix::process::geteuid()) {
        return;
    }
    let mut reader = BufReader::new(stream);
    let mut is_cut = false;
    while !is_cut && (!reader.buffer().is_empty() || is_ready(stream, over)) {
        let answered = match next(&mut reader) {
            Ok(Some(message)) => respond(message, stream, answers, events),
            Ok(None) => return,
            Err(error) => {
                // What follows a whole line that makes no sense is the next message; of one that is cut, nobody knows.
                is_cut = error.kind() != ErrorKind::InvalidInput;
                Answer(Err(ReportError::Invalid(error.to_string())))
            }
        };
        let Ok(mut line) = serde_json::to_vec(&match answered {
            Answer(Ok(value)) => serde_json::json!({ "ok": value }),
            Answer(Err(why)) => serde_json::json!({ "error": why.to_string() }),
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
    if !line.ends_with('\n') {
        let why = format!("a message is cut, or its line is longer than {LINE_LIMIT} bytes");
        return Err(Error::new(ErrorKind::UnexpectedEof, why));
    }
    let message: Message =
        serde_json::from_str(&line).map_err(|error| Error::new(ErrorKind::InvalidInput, error.to_string()))?;
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
    let gone = || Answer(Err(ReportError::Over));
    let answered = |asked: std::io::Result<Option<Answer>>| match asked {
        Ok(answer) => answer.unwrap_or_else(gone),
        Err(error) => Answer(Err(ReportError::Invalid(error.to_string()))),
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
                Err(_) => Err(Answer(Err(ReportError::Invalid(format!("the metric {name} is not a number: {text}"))))),
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
