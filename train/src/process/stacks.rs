//! What the threads of a rank do now: as py-spy sees it, or as Python itself tells it.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use super::scratch::Scratch;

/// Tells the rank which signal asks it, and where to write.
pub(super) const VARIABLE: &str = "WINGBEAT_STACKS";
/// Python writes its stacks at once: two looks of the same length are the end.
const STEP: Duration = Duration::from_millis(20);
const LIMIT: Duration = Duration::from_secs(3);
/// What is said of a process that says nothing.
pub(super) const SILENT: &str = "it does not tell its stacks: it is not Python, or has not begun yet";

pub(super) struct Stacks {
    told: Scratch,
    py_spy: PathBuf,
}

impl Stacks {
    /// For a rank that runs with this interpreter.
    pub(super) fn new(python: &str) -> std::io::Result<Stacks> {
        let beside = Path::new(python).with_file_name("py-spy");
        let py_spy = if beside.is_file() { beside } else { "py-spy".into() };
        Ok(Stacks { told: Scratch::new("stacks")?, py_spy })
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

    /// What py-spy sees, where it is installed and may look: it also sees threads that Python's own handler cannot reach.
    pub(super) fn seen(&self, pid: i32) -> Option<String> {
        let seen = Command::new(&self.py_spy).args(["dump", "--pid", &pid.to_string()]).output().ok()?;
        let text = String::from_utf8_lossy(&seen.stdout).into_owned();
        (seen.status.success() && text.contains("Thread")).then_some(text)
    }

    /// Where Python will write when it is asked next.
    pub(super) fn end(&self) -> u64 {
        self.told.len()
    }

    /// What Python has written from there on, once it has been asked. Says why if that is nothing.
    pub(super) fn told(&self, from: u64) -> String {
        let begun = Instant::now();
        let mut last = from;
        loop {
            std::thread::sleep(STEP);
            let now = self.end();
            if now > from && now == last {
                return self.told.read(from).unwrap_or_else(|error| error.to_string());
            }
            if begun.elapsed() > LIMIT {
                return SILENT.into();
            }
            last = now;
        }
    }
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
}
