//! The process between a test and one daemon of its cluster.
//!
//! It is a subreaper, and waits for everything below it: when it has ended, nothing of the daemon is left. It ends the daemon with SIGKILL
//! when the test is gone. The daemon cannot see that itself while it is stopped (SIGSTOP).

use std::io;
use std::os::fd::OwnedFd;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, WaitOptions, getppid, kill_process, pidfd_open, wait};

use super::{Start, daemon};

/// The supervisor, and in a copy of it the daemon. Returns when everything below it is gone.
pub(super) fn main(start: Start, lifeline: OwnedFd) -> io::Result<()> {
    // Whoever started the test may ignore SIGCHLD, which is inherited: the kernel would reap what ends, and say nothing of it.
    // SAFETY: sets what is usual; there is one thread.
    if unsafe { libc::signal(libc::SIGCHLD, libc::SIG_DFL) } == libc::SIG_ERR {
        return Err(io::Error::last_os_error());
    }
    rustix::process::set_child_subreaper(Some(rustix::process::getpid()))?;
    let supervisor = rustix::process::getpid();
    // SAFETY: this process has one thread, so that its copy is whole.
    match unsafe { libc::fork() } {
        ..0 => Err(io::Error::last_os_error()),
        0 => {
            rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
            if rustix::process::getppid() != Some(supervisor) {
                return Err(io::Error::other("its supervisor has ended"));
            }
            daemon::main(start, lifeline)
        }
        daemon => {
            rustix::thread::set_name(c"wingbeat-test")?;
            // What was inherited of it is the daemon's.
            drop(start);
            supervise(
                Pid::from_raw(daemon).ok_or_else(|| io::Error::other("fork answered with no process"))?,
                &lifeline,
            )
        }
    }
}

fn supervise(daemon: Pid, lifeline: &OwnedFd) -> io::Result<()> {
    let end = pidfd_open(daemon, PidfdFlags::empty())?;
    // The lifeline says nothing of the test's end while a process that the test has forked has it open, too.
    let test = match getppid().map(|test| pidfd_open(test, PidfdFlags::empty())) {
        Some(Ok(test)) => Some(test),
        // It has ended since.
        Some(Err(Errno::SRCH)) | None => None,
        Some(Err(error)) => return Err(error.into()),
    };
    if test.is_none() {
        let _ = kill_process(daemon, Signal::KILL);
    }
    while let Some(test) = &test {
        let polled = [&end, lifeline, test];
        let mut ready = polled.map(|fd| PollFd::new(fd, PollFlags::IN));
        match poll(&mut ready, None) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let [has_ended, is_over, is_alone] = ready.map(|fd| !fd.revents().is_empty());
        let is_alone = is_alone || is_over;
        if is_alone {
            let _ = kill_process(daemon, Signal::KILL);
        }
        if has_ended || is_alone {
            break;
        }
    }
    // What the daemon has left falls to this process: its guard, which ends the rest.
    loop {
        match wait(WaitOptions::empty()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(Errno::CHILD) => return Ok(()),
            Err(error) => return Err(error.into()),
        }
    }
}
