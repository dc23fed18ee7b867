//! One Python process, from its start to its end.
//!
//! It is started and waited for by a thread of its own: its parent-death signal fires when the thread that
//! started it ends. Its output and its end arrive as events. Dropping the stream of events ends it and its
//! process group.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use futures::Stream;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions};
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;

use crate::environment::Environment;
use crate::error::PythonError;

/// Runs a script or a module as `__main__`, and tells how it failed.
const RANK_MAIN: &str = include_str!("../../python/wingbeat/_rank_main.py");

/// Lines of standard error that an error shows.
const TAIL: usize = 20;
/// Events on the way to the driver. A full queue holds up the process's output, as a full pipe would.
const EVENTS: usize = 1024;
const ERROR_FILE: &str = "TORCHELASTIC_ERROR_FILE";

/// What a rank runs.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Launch {
    pub python: String,
    pub target: Target,
    pub args: Vec<String>,
    pub env: Environment,
}

/// A script or a module.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Target {
    Script(PathBuf),
    Module(String),
}

/// A line that a rank printed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Line {
    /// Whether to standard error.
    pub is_stderr: bool,
    /// The line, without its end.
    pub text: String,
}

/// How a process ended.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Outcome {
    pub code: Option<i32>,
    pub signal: Option<i32>,
    pub error: Option<PythonError>,
    pub stderr: Vec<String>,
    /// Whether it had been asked to end: then its end says nothing about it.
    pub was_stopped: bool,
    /// When it ended, in microseconds since the epoch by its node's clock; 0 if it could not be started.
    pub ended_us: u64,
}

impl Outcome {
    pub(crate) fn is_success(&self) -> bool {
        self.code == Some(0)
    }

    pub(crate) fn shown(&self) -> String {
        match (self.code, self.signal) {
            (_, Some(signal)) => format!("was killed by signal {signal}"),
            (Some(code), None) => format!("exited with code {code}"),
            (None, None) => "could not be started".into(),
        }
    }
}

/// What happens to a process.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Event {
    Line(Line),
    Ended(Outcome),
}

/// The process of a rank, as those see it who may end it.
#[derive(Clone, Default)]
pub(crate) struct Running(Arc<Mutex<State>>);

#[derive(Clone, Copy, Default)]
enum State {
    #[default]
    Starting,
    /// It was asked to end before it was there.
    Cancelled,
    Runs {
        group: Pid,
        was_stopped: bool,
    },
    /// Its id may be another's by now.
    Ended,
}

impl Running {
    /// Sends a signal to the whole process group.
    pub(crate) fn signal(&self, signal: Signal) {
        let mut state = self.state();
        *state = match *state {
            State::Starting | State::Cancelled => State::Cancelled,
            State::Runs { group, .. } => {
                // It may have ended just now.
                let _ = rustix::process::kill_process_group(group, signal);
                State::Runs { group, was_stopped: true }
            }
            State::Ended => State::Ended,
        };
    }

    fn started(&self, group: Pid) {
        let mut state = self.state();
        let was_stopped = matches!(*state, State::Cancelled);
        *state = State::Runs { group, was_stopped };
        drop(state);
        if was_stopped {
            self.signal(Signal::KILL);
        }
    }

    /// Ends what is left of the process group, whose leader has ended and is not reaped yet: until then nobody else
    /// has its id. Answers whether it had been asked to end.
    fn ended(&self) -> bool {
        let mut state = self.state();
        let before = std::mem::replace(&mut *state, State::Ended);
        let State::Runs { group, was_stopped } = before else { return false };
        let _ = rustix::process::kill_process_group(group, Signal::KILL);
        was_stopped
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct KillOnDrop(Running);

impl Drop for KillOnDrop {
    fn drop(&mut self) {
        self.0.signal(Signal::KILL);
    }
}

/// Starts a process; [`Event::Ended`] is the last of its events.
pub(crate) fn start(launch: Launch, running: &Running) -> impl Stream<Item = Event> + Send + use<> {
    let (events, receiver) = mpsc::channel(EVENTS);
    let guard = KillOnDrop(running.clone());
    let running = running.clone();
    let started = std::thread::Builder::new().name("rank".into()).spawn(move || {
        let outcome = supervise(&launch, &running, &events).unwrap_or_else(|error| Outcome {
            stderr: vec![format!("cannot run {}: {error}", launch.python)],
            ..Outcome::default()
        });
        // Nobody listens any more when the stream was dropped.
        let _ = events.blocking_send(Event::Ended(outcome));
    });
    let failed = started.err().map(|error| Outcome { stderr: vec![error.to_string()], ..Outcome::default() });
    futures::stream::unfold((receiver, guard, failed), |(mut receiver, guard, mut failed)| async move {
        let event = match failed.take() {
            Some(outcome) => Event::Ended(outcome),
            None => receiver.recv().await?,
        };
        Some((event, (receiver, guard, failed)))
    })
}

fn supervise(launch: &Launch, running: &Running, events: &mpsc::Sender<Event>) -> std::io::Result<Outcome> {
    let dir = tempfile::tempdir()?;
    let error_file = match launch.env.set.get(ERROR_FILE) {
        Some(users) => PathBuf::from(users),
        None => dir.path().join("error.json"),
    };
    let before = modified(&error_file);
    let mut command = Command::new(&launch.python);
    command.args(["-c", RANK_MAIN]).env("WINGBEAT_RANK_PARENT", std::process::id().to_string());
    match &launch.target {
        Target::Script(script) => command.arg(script),
        Target::Module(module) => command.args(["-m", module]),
    };
    command.args(&launch.args).env(ERROR_FILE, &error_file);
    for (name, value) in &launch.env.unless_set {
        if std::env::var_os(name).is_none() {
            command.env(name, value);
        }
    }
    command.envs(&launch.env.set).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
    let mut child = command.spawn()?;
    let told = follow(&mut child, running, events);
    if told.is_err() {
        running.ended();
        let _ = child.kill();
    }
    let status = child.wait()?;
    let Followed { stderr, was_stopped, ended_us } = told?;
    let is_new = modified(&error_file) != before;
    let told = is_new.then(|| std::fs::read_to_string(&error_file).ok()).flatten();
    Ok(Outcome {
        code: status.code(),
        signal: status.signal(),
        error: told.as_deref().and_then(parse_error),
        stderr: stderr.into(),
        was_stopped,
        ended_us,
    })
}

fn modified(path: &Path) -> Option<SystemTime> {
    std::fs::metadata(path).and_then(|metadata| metadata.modified()).ok()
}

struct Followed {
    stderr: VecDeque<String>,
    was_stopped: bool,
    ended_us: u64,
}

/// Tells what the process prints until it ends. What it started may hold its pipes open for longer, and is not
/// waited for.
fn follow(child: &mut Child, running: &Running, events: &mpsc::Sender<Event>) -> std::io::Result<Followed> {
    let (ended, alive) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
    let id = Pid::from_child(child);
    running.started(id);
    let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
    let ended = &ended;
    std::thread::scope(move |scope| {
        let alive = alive; // dropped however this ends, so that the readers end
        let spawn = |name: &str| std::thread::Builder::new().name(name.into());
        let out = spawn("stdout").spawn_scoped(scope, move || stdout.map(|pipe| read(pipe, ended, false, events)))?;
        let err = spawn("stderr").spawn_scoped(scope, move || stderr.map(|pipe| read(pipe, ended, true, events)))?;
        wait_unreaped(id)?;
        let since_epoch = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let was_stopped = running.ended();
        drop(alive);
        let _ = out.join();
        let stderr = err.join().ok().flatten().unwrap_or_default();
        Ok(Followed { stderr, was_stopped, ended_us: since_epoch.as_micros() as u64 })
    })
}

/// Waits until the process has ended, and leaves it to be reaped.
fn wait_unreaped(id: Pid) -> std::io::Result<()> {
    loop {
        match rustix::process::waitid(WaitId::Pid(id), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT) {
            Err(rustix::io::Errno::INTR) => {}
            other => return other.map(drop).map_err(Into::into),
        }
    }
}

/// Tells the lines of a pipe until its end, or once the other end of `ended` is closed, what is in it. Answers the last ones of
/// standard error.
fn read(
    mut pipe: impl Read + AsFd,
    ended: &OwnedFd,
    is_stderr: bool,
    events: &mpsc::Sender<Event>,
) -> VecDeque<String> {
    let mut tail = VecDeque::new();
    let mut tell = |bytes: &[u8]| {
        let text = String::from_utf8_lossy(bytes).trim_end_matches(['\n', '\r']).to_owned();
        if is_stderr {
            if tail.len() == TAIL {
                tail.pop_front();
            }
            tail.push_back(text.clone());
        }
        // Read on without a listener: the process must not block before it is ended.
        let _ = events.blocking_send(Event::Line(Line { is_stderr, text }));
    };
    // Without it, a pipe that others hold open would be waited for.
    if rustix::io::ioctl_fionbio(&pipe, true).is_err() {
        return tail;
    }
    let mut line = Vec::new();
    let mut chunk = [0; 8192];
    // Once the process has ended: the bytes that were in the pipe then. What comes after them is not its own.
    let mut left: Option<u64> = None;
    loop {
        if left.is_none() && has_ended(ended) {
            left = Some(rustix::io::ioctl_fionread(&pipe).unwrap_or_default());
        }
        if left == Some(0) {
            break;
        }
        match pipe.read(&mut chunk) {
            Ok(0) => break,
            Ok(count) => {
                for part in chunk[..count].split_inclusive(|byte| *byte == b'\n') {
                    line.extend_from_slice(part);
                    if part.ends_with(b"\n") {
                        tell(&line);
                        line.clear();
                    }
                }
                left = left.map(|left| left.saturating_sub(count as u64));
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock && left.is_none() => {
                // An interruption is as good as something to read: the next read tells.
                let _ = poll(&mut [PollFd::new(&pipe, PollFlags::IN), PollFd::new(ended, PollFlags::IN)], None);
            }
            Err(_) => break,
        }
    }
    if !line.is_empty() {
        tell(&line);
    }
    tail
}

fn has_ended(ended: &OwnedFd) -> bool {
    let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
    matches!(poll(&mut [PollFd::new(ended, PollFlags::IN)], Some(&now)), Ok(1..))
}

/// Reads torchelastic's error file, with the exception's type that `_rank_main` adds.
fn parse_error(text: &str) -> Option<PythonError> {
    let json: serde_json::Value = serde_json::from_str(text).ok()?;
    let inner = &json["message"];
    let traceback = inner["extraInfo"]["py_callstack"].as_str().unwrap_or_default();
    // A script that writes the file itself may leave the text alone.
    let message = inner["message"].as_str().or(inner.as_str()).unwrap_or_default();
    Some(PythonError {
        kind: json["type"].as_str().unwrap_or("Exception").to_owned(),
        message: message.to_owned(),
        traceback: if traceback.is_empty() { message.to_owned() } else { traceback.to_owned() },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn torchelastics_error_file_is_understood() {
        let text = r#"{"message": {"message": "ValueError: no", "extraInfo": {"py_callstack": "Traceback…", "timestamp": "1"}}, "type": "ValueError"}"#;
        let error = parse_error(text).unwrap();
        assert_eq!((error.kind.as_str(), error.message.as_str()), ("ValueError", "ValueError: no"));
        assert_eq!(parse_error(r#"{"message": "plain words"}"#).unwrap().traceback, "plain words");
        assert_eq!(parse_error("not json"), None);
    }
}
