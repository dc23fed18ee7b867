//! A line on standard error that waits for nobody: user code may hold the lock of `std::io::stderr()` while it waits for the very thread
//! that has something to say, and nobody may read.

use std::fmt::Display;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Says this of the runtime itself, on a line of its own.
pub fn note(text: impl Display) {
    let line = format!("wingbeat: {text}\n");
    let stderr = std::io::stderr();
    let mut room = [PollFd::new(&stderr, PollFlags::OUT)];
    // Where there is room at all, a pipe takes a line whole.
    if poll(&mut room, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })) == Ok(1) && room[0].revents().contains(PollFlags::OUT)
    {
        return write(&line);
    }
    // Fails only in a process that has no more threads.
    let _ = std::thread::Builder::new().name("wingbeat-note".into()).spawn(move || write(&line));
}

fn write(line: &str) {
    // Nobody may be left who reads.
    let _ = rustix::io::write(std::io::stderr(), line.as_bytes());
}
