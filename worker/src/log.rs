//! What daemons write about themselves. No part of a daemon waits until somebody reads it, or ends because nobody can: a thread of its own
//! writes, and what has no room before that is counted and left out.

use std::io::{self, Write};
use std::sync::OnceLock;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use tracing_subscriber::EnvFilter;

use crate::aside::{Aside, Told};

/// Lines that may wait to be written.
const LINES: usize = 2_048;

static STDERR: OnceLock<Aside<Vec<u8>>> = OnceLock::new();

/// Has this process write to its standard error what `filter` says, else `WINGBEAT_LOG`, else warnings and what Wingbeat has to say.
///
/// # Errors
/// The process may have no more threads.
pub fn to_stderr(filter: Option<&str>, has_colors: bool) -> io::Result<()> {
    let filter = match filter {
        Some(filter) => EnvFilter::new(filter),
        None => {
            EnvFilter::try_from_env("WINGBEAT_LOG").unwrap_or_else(|_| EnvFilter::new("warn,tarpc=off,wingbeat=info"))
        }
    };
    let lines = Aside::with_room_for(LINES, |told: Told<Vec<u8>>| match told {
        Told::Do(line) => write(&line),
        Told::LeftOut(count) => {
            write(format!("wingbeat: {count} lines are left out here, because nobody took them in\n").as_bytes());
        }
    })?;
    let _ = STDERR.set(lines);
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(|| Queue)
        // They would go to standard error by themselves, and panic.
        .log_internal_errors(false)
        .with_target(false)
        .with_ansi(has_colors)
        .init();
    Ok(())
}

/// Writes a line after those of the log, and waits for nothing.
pub fn line(line: Vec<u8>) {
    if let Some(lines) = STDERR.get() {
        lines.tell(line);
    }
}

/// Waits until what was said is written, but for a second at most.
pub fn written() {
    if let Some(lines) = STDERR.get() {
        lines.end();
    }
}

/// Waits for who reads, and holds no lock meanwhile. Nobody may be left, and the disk may be full.
fn write(mut line: &[u8]) {
    let stderr = io::stderr();
    while !line.is_empty() {
        match rustix::io::write(&stderr, line) {
            Ok(count) => line = &line[count..],
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) if poll(&mut [PollFd::new(&stderr, PollFlags::OUT)], None).is_ok() => {}
            Err(_) => return,
        }
    }
}

/// Takes each line of the log whole.
struct Queue;

impl Write for Queue {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        line(bytes.to_vec());
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
