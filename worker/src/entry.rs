//! Worker mode: the program's own executable, started to be a child of a node daemon.
//!
//! It is entered before `main`, by a function in the init array, when the variable `VARIABLE` names
//! inherited descriptors. So it works alike in binaries, examples and test harnesses, and user `main`
//! never runs twice. The variable is removed at once, or children of user code would become workers too.

use std::io;
use std::os::fd::RawFd;

use crate::start::{self, TUNABLES, VARIABLE};
use crate::{executor, guard};

/// Keeps the entry linked: whoever uses the crate refers to this.
#[used]
#[unsafe(link_section = ".init_array")]
static ENTRY: extern "C" fn() = enter;

/// Does nothing; calling it makes sure that the entry is part of the executable.
pub fn linked() {
    std::hint::black_box(&ENTRY);
}

extern "C" fn enter() {
    if let Ok(value) = std::env::var(VARIABLE) {
        become_child(VARIABLE, &value, "a worker", run);
    }
}

/// Makes this process what the variable of this name says, and ends it. Called before `main`, when the process has one thread.
pub(crate) fn become_child(variable: &str, value: &str, what: &str, run: fn(&str, &[RawFd]) -> io::Result<()>) -> ! {
    let ours = std::env::var(TUNABLES.0).is_ok_and(|value| value == TUNABLES.1);
    // SAFETY: this runs before `main`, when the process has one thread.
    unsafe {
        std::env::remove_var(variable);
        if ours {
            std::env::remove_var(TUNABLES.0);
        }
        // What Rust does before `main`: writing to a pipe that nobody reads is an error, and not the end.
        libc::signal(libc::SIGPIPE, libc::SIG_IGN);
    }
    let outcome = std::panic::catch_unwind(|| {
        let bad = || io::Error::other(format!("{variable}={value} is not what a parent of such a process sets"));
        let (kind, numbers) = value.split_once(':').ok_or_else(bad)?;
        let fds: Vec<RawFd> = numbers.split(',').map(str::parse).collect::<Result<_, _>>().map_err(|_| bad())?;
        run(kind, &fds)
    });
    let code = match outcome {
        Ok(Ok(())) => 0,
        Ok(Err(error)) => {
            eprintln!("wingbeat: this process was started as {what}, and could not become one: {error}");
            1
        }
        Err(_) => 101,
    };
    // SAFETY: `_exit` ends the process without running handlers of a `main` that never ran.
    unsafe { libc::_exit(code) }
}

fn run(kind: &str, fds: &[RawFd]) -> io::Result<()> {
    match (kind, fds) {
        ("guard", [socket, listening @ ..]) => {
            // Both are started by a path or a descriptor, by which they would be called in `top`.
            let _ = rustix::thread::set_name(c"wingbeat-guard");
            let listening = listening.iter().map(|fd| start::inherited(*fd)).collect::<io::Result<_>>()?;
            guard::main(start::inherited(*socket)?, listening)
        }
        ("worker", [start, arena, page]) => {
            let _ = rustix::thread::set_name(c"wingbeat-worker");
            wingbeat_process::memory_is(|| crate::machine::HERE.memory());
            let info = start::from_memfd(start::inherited(*start)?)?;
            executor::main(info, start::inherited(*arena)?, start::inherited(*page)?)
        }
        _ => Err(io::Error::other(format!("{kind} with {} descriptors is no such process", fds.len()))),
    }
}
