//! What a process prints, line by line.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read};
use std::os::fd::{AsFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, poll};
use tokio::sync::mpsc;

use super::{Event, Exit, Line};

/// Lines of standard error that an error shows.
const TAIL: usize = 20;

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
        Ok(Exit { stderr: err.join().ok().flatten().unwrap_or_default(), ..exit })
    })
}

/// Tells the lines of a pipe until its end, or once the other end of `ended` is closed, what is in it. Answers the last
/// ones of standard error.
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

pub(super) fn has_ended(ended: &OwnedFd) -> bool {
    let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
    matches!(poll(&mut [PollFd::new(ended, PollFlags::IN)], Some(&now)), Ok(1..))
}
