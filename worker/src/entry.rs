//! Worker mode: the program's own executable, started to be a child of a node daemon.
//!
//! It is entered before `main`, by a function in the init array, when the variable `VARIABLE` names
//! inherited descriptors. So it works alike in binaries, examples and test harnesses, and user `main`
//! never runs twice. The variable is removed at once, or children of user code would become workers too.

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
    let Ok(value) = std::env::var(VARIABLE) else { return };
    let ours = std::env::var(TUNABLES.0).is_ok_and(|value| value == TUNABLES.1);
    // SAFETY: this runs before `main`, when the process has one thread.
    unsafe {
        std::env::remove_var(VARIABLE);
        if ours {
            std::env::remove_var(TUNABLES.0);
        }
        // What Rust does before `main`: writing to a pipe that nobody reads is an error, and not the end.
        libc::signal(libc::SIGPIPE, libc::SIG_IGN);
    }
    let outcome = std::panic::catch_unwind(|| run(&value));
    let code = match outcome {
        Ok(Ok(())) => 0,
        Ok(Err(error)) => {
            eprintln!("wingbeat: this process was started as a worker, and could not become one: {error}");
            1
        }
        Err(_) => 101,
    };
    // SAFETY: `_exit` ends the process without running handlers of a `main` that never ran.
    unsafe { libc::_exit(code) }
}

fn run(value: &str) -> std::io::Result<()> {
    let bad = || std::io::Error::other(format!("{VARIABLE}={value} is not what a node daemon sets"));
    let (kind, numbers) = value.split_once(':').ok_or_else(bad)?;
    let fds: Vec<RawFd> = numbers.split(',').map(str::parse).collect::<Result<_, _>>().map_err(|_| bad())?;
    match (kind, fds.as_slice()) {
        ("guard", [socket]) => guard::main(start::inherited(*socket)?),
        ("worker", [start, arena, page]) => {
            // It was started from a descriptor, by whose number it would be called in `top`.
            let _ = rustix::thread::set_name(c"wingbeat-worker");
            wingbeat_process::memory_is(|| crate::machine::HERE.memory());
            let info = start::from_memfd(start::inherited(*start)?)?;
            executor::main(info, start::inherited(*arena)?, start::inherited(*page)?)
        }
        _ => Err(bad()),
    }
}
