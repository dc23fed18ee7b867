//! What the threads of a rank do now: as py-spy sees it, or as Python itself tells it.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use super::scratch::Scratch;

/// Tells the rank which signal asks it, and where to write.
pub(super) const VARIABLE: &str = "WINGBEAT_STACKS";
/// Python writes its stacks at once: two looks of the same length are the end.
const STEP: Duration = Duration::from_millis(20);
const LIMIT: Duration = Duration::from_secs(3);
/// How long py-spy may take. It has been seen to wait for ever for a process that does not stop. Whoever asks waits for longer than this
/// and [`LIMIT`] together.
const PY_SPY_LIMIT: Duration = Duration::from_secs(5);
/// What is said of a process that cannot be asked.
pub(super) const DEAF: &str = "it does not tell its stacks: it is not Python, or has not begun yet";
/// What is said of a process that has ended.
pub(crate) const ENDED: &str = "it has ended";
/// How what is said of a process begins that does not go on by itself.
pub(crate) const STOPPED: &str = "it is stopped";

pub(super) struct Stacks {
    /// Whose they are, for people.
    pub(super) name: String,
    told: Scratch,
    py_spy: PathBuf,
}

/// What py-spy has said.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Seen {
    Stacks(String),
    /// It is not installed, or may not look.
    Nothing,
    /// It did not end in time, and was ended.
    Late,
}

impl Stacks {
    /// For a rank of this name that runs with this interpreter.
    pub(super) fn new(python: &str, name: String) -> std::io::Result<Stacks> {
        let beside = Path::new(python).with_file_name("py-spy");
        let py_spy = if beside.is_file() { beside } else { "py-spy".into() };
        Ok(Stacks { name, told: Scratch::new("stacks")?, py_spy })
    }

    /// The signal that asks Python: one that nobody else uses.
    pub(super) fn signal() -> i32 {
        libc::SIGRTMAX() - 3
    }

    /// Whether a process has something to do when it is asked. One that is no Python, or is not that far, or has become another program since, would be
    /// ended by the signal.
    pub(super) fn listens(pid: i32) -> bool {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let caught = status.lines().find_map(|line| u64::from_str_radix(line.strip_prefix("SigCgt:")?.trim(), 16).ok());
        caught.is_some_and(|caught| caught & (1 << (Self::signal() - 1)) != 0)
    }

    /// What the rank is told.
    pub(super) fn variable(&self) -> String {
        format!("{}:{}", Self::signal(), self.told.path())
    }

    /// What py-spy sees, where it is installed and may look: it also sees threads that Python's own handler cannot reach. Where it was
    /// late and may have stopped the process, that is to go on.
    pub(super) fn seen(&self, pid: i32, go_on: impl FnOnce()) -> Seen {
        self.seen_within(pid, PY_SPY_LIMIT, go_on).unwrap_or(Seen::Nothing)
    }

    fn seen_within(&self, pid: i32, limit: Duration, go_on: impl FnOnce()) -> Option<Seen> {
        let was_stopped = is_stopped(pid);
        let mut command = Command::new(&self.py_spy);
        command.args(["dump", "--pid", &pid.to_string()]);
        let mut py_spy = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().ok()?;
        // It says more than a pipe holds.
        let mut said = py_spy.stdout.take()?;
        let reading = std::thread::spawn(move || {
            let mut text = Vec::new();
            said.read_to_end(&mut text).map(|_| text)
        });
        let begun = Instant::now();
        let status = loop {
            match py_spy.try_wait().ok()? {
                Some(status) => break status,
                None if begun.elapsed() < limit => std::thread::sleep(STEP),
                None => {
                    // The thread ends with the pipe, which a child of it may have, too.
                    py_spy.kill().ok()?;
                    py_spy.wait().ok()?;
                    // The stop that it has asked for, and nobody waits for any more, would come as soon as the process can stop.
                    if !was_stopped {
                        go_on();
                    }
                    return Some(Seen::Late);
                }
            }
        };
        let text = String::from_utf8_lossy(&reading.join().ok()?.ok()?).into_owned();
        Some(if status.success() && text.contains("Thread") { Seen::Stacks(text) } else { Seen::Nothing })
    }

    /// What is said before what Python says, where py-spy was late.
    pub(super) fn late() -> String {
        format!("py-spy has not answered for {} s and was ended; Python itself says:\n", PY_SPY_LIMIT.as_secs())
    }

    /// Where Python will write when it is asked next.
    pub(super) fn end(&self) -> u64 {
        self.told.len()
    }

    /// What Python has written from there on, once it has been asked. Says what the process does if that is nothing.
    pub(super) fn told(&self, pid: i32, from: u64) -> String {
        let begun = Instant::now();
        let mut last = from;
        loop {
            std::thread::sleep(STEP);
            let now = self.end();
            if now > from && now == last {
                return self.told.read(from).unwrap_or_else(|error| error.to_string());
            }
            if begun.elapsed() > LIMIT {
                let doing = wingbeat_process::programs::doing(&format!("/proc/{pid}"));
                let state = doing.map_or_else(|| "has ended".into(), |(_, state)| state);
                return format!("Python has not answered for {} s: it {state}", LIMIT.as_secs());
            }
            last = now;
        }
    }
}

/// Whether somebody has stopped the process on purpose.
pub(super) fn is_stopped(pid: i32) -> bool {
    wingbeat_process::programs::doing(&format!("/proc/{pid}")).is_some_and(|(_, state)| state.starts_with("is stopped"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_without_a_handler_does_not_listen() {
        let mut other = Command::new("cat").stdin(std::process::Stdio::piped()).spawn().unwrap();
        assert!(!Stacks::listens(other.id() as i32));
        drop(other.stdin.take());
        other.wait().unwrap();
        assert!(!Stacks::listens(-1));
    }

    /// How long a py-spy that never answers is waited for here, and one that does: only what hangs takes so long.
    const SILENT: Duration = Duration::from_millis(500);
    const ANSWERS: Duration = Duration::from_secs(60);

    /// What a py-spy that is this script says of a process.
    fn said_by(script: &str, pid: u32, limit: Duration) -> Option<Seen> {
        let folder = tempfile::tempdir().unwrap();
        let py_spy = folder.path().join("py-spy");
        // By a process of its own: what other threads fork would have this one's descriptor, and a file that is being written cannot be run.
        let mut writes = Command::new("sh");
        writes.args(["-c", "printf '#!/bin/sh\\n%s\\n' \"$1\" > \"$0\" && chmod 755 \"$0\""]).arg(&py_spy).arg(script);
        assert!(writes.status().unwrap().success());
        let python = folder.path().join("python").display().to_string();
        let go_on = || {
            let pid = rustix::process::Pid::from_raw(pid as i32).unwrap();
            rustix::process::kill_process(pid, rustix::process::Signal::CONT).unwrap();
        };
        Stacks::new(&python, "rank 0 of 1".into()).unwrap().seen_within(pid as i32, limit, go_on)
    }

    #[test]
    fn a_py_spy_that_does_not_answer_is_ended() {
        let mut other = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        assert_eq!(said_by("exec sleep 1000", other.id(), SILENT), Some(Seen::Late));
        let stacks = Seen::Stacks("Thread 1\nin f\n".into());
        assert_eq!(said_by("echo Thread 1; sleep 0.1; echo in f", other.id(), ANSWERS), Some(stacks));
        assert_eq!(said_by("echo 'Permission denied'; exit 1", other.id(), ANSWERS), Some(Seen::Nothing));
        // As one does that waits for a process which does not stop at once.
        assert_eq!(said_by("kill -STOP $3; exec sleep 1000", other.id(), SILENT), Some(Seen::Late));
        assert!(!is_stopped(other.id() as i32), "it stays stopped");
        drop(other.stdin.take());
        other.wait().unwrap();
    }
}
