//! One Python process, from its start to its end.
//!
//! It is started and waited for by a thread of its own: its parent-death signal fires when the thread that
//! started it ends. Its output and its end arrive as events. Dropping the stream of events ends it and its
//! process group.

use std::collections::{BTreeMap, VecDeque};
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};

use futures::Stream;
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;

use crate::error::PythonError;

/// Runs a script as `__main__`, and tells how it failed.
const RANK_MAIN: &str = include_str!("../../python/wingbeat/_rank_main.py");

/// Lines of standard error that an error shows.
const TAIL: usize = 20;
/// Events on the way to the driver. A full queue holds up the process's output, as a full pipe would.
const EVENTS: usize = 1024;

/// What a rank runs.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Launch {
    pub python: String,
    pub target: Target,
    pub args: Vec<String>,
    pub env: BTreeMap<String, String>,
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

/// The process id of what runs; 0 for nothing.
#[derive(Clone, Default)]
pub(crate) struct Running(Arc<AtomicI32>);

impl Running {
    /// Sends a signal to the whole process group.
    pub(crate) fn signal(&self, signal: rustix::process::Signal) {
        if let Some(group) = rustix::process::Pid::from_raw(self.0.load(Ordering::Acquire)) {
            // It may have ended just now.
            let _ = rustix::process::kill_process_group(group, signal);
        }
    }
}

struct KillOnDrop(Running);

impl Drop for KillOnDrop {
    fn drop(&mut self) {
        self.0.signal(rustix::process::Signal::KILL);
    }
}

/// Starts a process; its events end with [`Event::Ended`].
pub(crate) fn start(launch: Launch, running: &Running) -> impl Stream<Item = Event> + Send + use<> {
    let (events, receiver) = mpsc::channel(EVENTS);
    let guard = KillOnDrop(running.clone());
    let running = running.clone();
    let started = std::thread::Builder::new().name("rank".into()).spawn(move || {
        let outcome = supervise(&launch, &running, &events).unwrap_or_else(|error| Outcome {
            stderr: vec![format!("cannot run {}: {error}", launch.python)],
            ..Outcome::default()
        });
        running.0.store(0, Ordering::Release);
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
    let error_file = dir.path().join("error.json");
    let mut command = Command::new(&launch.python);
    match &launch.target {
        Target::Script(script) => command.args(["-c", RANK_MAIN]).arg(script),
        Target::Module(module) => command.args(["-m", module]),
    };
    command
        .args(&launch.args)
        .envs(&launch.env)
        .env("TORCHELASTIC_ERROR_FILE", &error_file)
        .env("WINGBEAT_RANK_PARENT", std::process::id().to_string())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0);
    let mut child = command.spawn()?;
    running.0.store(child.id() as i32, Ordering::Release);
    let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
    let errors = events.clone();
    let reader = std::thread::spawn(move || stderr.map(|pipe| read(pipe, true, &errors)).unwrap_or_default());
    if let Some(pipe) = stdout {
        read(pipe, false, events);
    }
    let tail = reader.join().unwrap_or_default();
    let status = child.wait()?;
    Ok(Outcome {
        code: status.code(),
        signal: status.signal(),
        error: std::fs::read_to_string(&error_file).ok().as_deref().and_then(parse_error),
        stderr: tail.into(),
    })
}

fn read(pipe: impl Read, is_stderr: bool, events: &mpsc::Sender<Event>) -> VecDeque<String> {
    let mut tail = VecDeque::new();
    let mut reader = BufReader::new(pipe);
    let mut bytes = Vec::new();
    loop {
        bytes.clear();
        match reader.read_until(b'\n', &mut bytes) {
            Ok(0) | Err(_) => return tail,
            Ok(_) => {}
        }
        let text = String::from_utf8_lossy(&bytes).trim_end_matches(['\n', '\r']).to_owned();
        if is_stderr {
            if tail.len() == TAIL {
                tail.pop_front();
            }
            tail.push_back(text.clone());
        }
        // Read on without a listener: the process must not block before it is ended.
        let _ = events.blocking_send(Event::Line(Line { is_stderr, text }));
    }
}

/// Reads torchelastic's error file, with the exception's type that `_rank_main` adds.
fn parse_error(text: &str) -> Option<PythonError> {
    let json: serde_json::Value = serde_json::from_str(text).ok()?;
    let inner = &json["message"];
    let traceback = inner["extraInfo"]["py_callstack"].as_str().unwrap_or_default();
    Some(PythonError {
        kind: json["type"].as_str().unwrap_or("Exception").to_owned(),
        message: inner["message"].as_str().unwrap_or_default().to_owned(),
        traceback: traceback.to_owned(),
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
        assert_eq!(parse_error("not json"), None);
    }
}
