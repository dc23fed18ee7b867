//! Which process it is, for whoever finds what it has left.

use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};
use serde::{Deserialize, Serialize};

/// A process, as no other ever was or will be: its id alone is another's later, or in a container.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Identity(String);

/// What can be said here of another process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Life {
    Runs,
    Gone,
    /// It is or was on another machine, or in another container.
    Elsewhere,
}

impl Identity {
    /// Boot, namespace of process ids, host, start, id; none without `/proc`. Machines that were started from one picture of
    /// a running machine differ in their names alone.
    pub(crate) fn of(pid: u32) -> Option<Identity> {
        let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
        let namespace = std::fs::read_link("/proc/self/ns/pid").ok()?;
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The 22nd field; the second may hold anything, but ends with the last parenthesis.
        let start = stat.rsplit_once(')')?.1.split_whitespace().nth(19)?.to_owned();
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        Some(Identity(format!("{} {} {host} {start} {pid}", boot.trim(), namespace.display())))
    }

    /// That of a process of another machine.
    #[cfg(test)]
    pub(crate) fn elsewhere() -> Identity {
        Identity("boot pid:[1] elsewhere 5 7".into())
    }

    fn machine(&self) -> Option<&str> {
        self.0.rsplitn(3, ' ').nth(2)
    }

    pub(crate) fn life(&self) -> Life {
        let here = Identity::of(std::process::id());
        let (Some(machine), Some(here)) = (self.machine(), here.as_ref().and_then(Identity::machine)) else {
            return Life::Elsewhere;
        };
        if machine != here {
            return Life::Elsewhere;
        }
        let Some(pid) = self.0.rsplit_once(' ').and_then(|(_, pid)| pid.parse::<u32>().ok()) else {
            return Life::Elsewhere;
        };
        let is_gone = match Identity::of(pid) {
            Some(now) => now != *self,
            // Another user's may be hidden.
            None => {
                let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
                pid.is_some_and(|pid| test_kill_process(pid) == Err(Errno::SRCH))
            }
        };
        if is_gone { Life::Gone } else { Life::Runs }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_known_while_it_runs_and_once_it_is_gone() {
        let own = Identity::of(std::process::id()).unwrap();
        assert_eq!(own.life(), Life::Runs);
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let other = Identity::of(child.id()).unwrap();
        assert_eq!(other.life(), Life::Runs);
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(other.life(), Life::Gone);
        let words: Vec<&str> = other.0.split(' ').collect();
        let copy = format!("{} {} another {} {}", words[0], words[1], words[3], words[4]);
        assert_eq!(Identity(copy).life(), Life::Elsewhere, "a copy of this machine");
        assert_eq!(Identity::elsewhere().life(), Life::Elsewhere);
    }
}
