//! What a process prints, as it comes.

use std::io::{ErrorKind, Read};
use std::os::fd::{AsFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tokio::sync::mpsc;

use super::{Event, Exit, Printed};

/// What is read at a time: as much as a message holds at best.
const CHUNK: usize = 64 * 1024;
/// What the pipe is to hold.
const PIPE: usize = 4 * CHUNK;

/// How long is waited after a little has come: nobody sees it, and a pipe is not full before.
const NAP: Timespec = Timespec { tv_sec: 0, tv_nsec: 2_000_000 };

/// Tells what comes out of these pipes while `wait` waits for the process's end, and what is in them then.
pub(super) fn follow(
    stdout: Option<impl Read + AsFd + Send>,
    stderr: Option<impl Read + AsFd + Send>,
    events: &mpsc::Sender<Event>,
    wait: impl FnOnce() -> std::io::Result<Exit>,
) -> std::io::Result<Exit> {
    let (ended, alive) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
    let ended = &ended;
    std::thread::scope(move |scope| {
        let alive = alive; // dropped however this ends, so that the readers end
        let spawn = |name: &str| std::thread::Builder::new().name(name.into());
        let out = spawn("stdout").spawn_scoped(scope, move || stdout.map(|pipe| read(pipe, ended, false, events)))?;
        let err = spawn("stderr").spawn_scoped(scope, move || stderr.map(|pipe| read(pipe, ended, true, events)))?;
        let exit = wait()?;
        drop(alive);
        let _ = out.join();
        let tail = err.join().ok().flatten().unwrap_or_default();
        Ok(Exit { stderr: tail.lines(), ..exit })
    })
}

/// Tells what comes out of a pipe until its end, or once the other end of `ended` is closed, what is in it. Whoever reads
/// slowly gets more at a time. Answers the end of standard error.
fn read(mut pipe: impl Read + AsFd, ended: &OwnedFd, is_stderr: bool, events: &mpsc::Sender<Event>) -> Tail {
    let mut tail = Tail::default();
    // Without it, a pipe that others hold open would be waited for.
    if rustix::io::ioctl_fionbio(&pipe, true).is_err() {
        return tail;
    }
    // Whoever prints much waits less often. The system may allow no more than there is.
    let _ = rustix::pipe::fcntl_setpipe_size(&pipe, PIPE);
    let mut chunk = vec![0; CHUNK];
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
                let bytes = &chunk[..count];
                if is_stderr {
                    tail.add(bytes);
                }
                // Read on without a listener: the process must not block before it is ended.
                let _ = events.blocking_send(Event::Printed(Printed { is_stderr, bytes: bytes.to_vec() }));
                left = left.map(|left| left.saturating_sub(count as u64));
                let is_little = count < CHUNK / 4 && rustix::io::ioctl_fionread(&pipe).unwrap_or_default() == 0;
                if is_little && left.is_none() {
                    // Many short lines come together: each that is waited for costs the process more than to print it.
                    let _ = poll(&mut [PollFd::new(ended, PollFlags::IN)], Some(&NAP));
                }
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock && left.is_none() => {
                // An interruption is as good as something to read: the next read tells.
                let _ = poll(&mut [PollFd::new(&pipe, PollFlags::IN), PollFd::new(ended, PollFlags::IN)], None);
            }
            Err(_) => break,
        }
    }
    tail
}

pub(super) fn has_ended(ended: &OwnedFd) -> bool {
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    matches!(poll(&mut [PollFd::new(ended, PollFlags::IN)], Some(&now)), Ok(1..))
}

/// The last of what was printed.
#[derive(Default)]
struct Tail(Vec<u8>);

impl Tail {
    /// Bytes that are kept, and lines that are shown.
    const BYTES: usize = 16 * 1024;
    const LINES: usize = 20;

    fn add(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
        if self.0.len() > 2 * (Self::BYTES + CHUNK) {
            self.0.drain(..self.0.len() - Self::BYTES);
        }
    }

    /// Its last lines; of a progress bar, its last state.
    fn lines(&self) -> Vec<String> {
        let kept = &self.0[self.0.len().saturating_sub(Self::BYTES)..];
        let kept = kept.strip_suffix(b"\n").unwrap_or(kept);
        if kept.is_empty() {
            return Vec::new();
        }
        let lines: Vec<&[u8]> = kept.split(|byte| *byte == b'\n').collect();
        let last = &lines[lines.len().saturating_sub(Self::LINES)..];
        last.iter().map(|line| String::from_utf8_lossy(crate::output::last_state(line)).into_owned()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tail_is_the_last_lines_and_the_last_state_of_bars() {
        let mut tail = Tail::default();
        assert_eq!(tail.lines(), Vec::<String>::new());
        for line in 0..100_000 {
            tail.add(format!("line {line}\n").as_bytes());
        }
        tail.add(b"\r 1%\r 50%\r100%\n");
        tail.add(b"no end \xff");
        let lines = tail.lines();
        assert_eq!((lines.len(), lines[0].as_str()), (20, "line 99982"));
        assert_eq!(lines[18..], ["100%".to_owned(), "no end \u{fffd}".to_owned()]);
        tail.add(&vec![b'x'; 1 << 20]);
        assert_eq!(tail.lines(), ["x".repeat(Tail::BYTES)], "what is kept is bounded");
    }
}
