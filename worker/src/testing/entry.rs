//! How the test's executable becomes a head or a node, as [`crate::entry`] has it for worker processes.

use std::io;
use std::os::fd::RawFd;

use super::supervisor;
use crate::{entry, start};

/// Names the inherited descriptors: `daemon:<start>,<lifeline>`.
pub(super) const VARIABLE: &str = "WINGBEAT_TEST_CHILD";

#[used]
#[unsafe(link_section = ".init_array")]
static ENTRY: extern "C" fn() = enter;

/// Does nothing; calling it makes sure that the entry is part of the executable.
pub(super) fn linked() {
    entry::linked();
    std::hint::black_box(&ENTRY);
}

extern "C" fn enter() {
    if let Ok(value) = std::env::var(VARIABLE) {
        entry::become_child(VARIABLE, &value, "a process of a test cluster", run);
    }
}

fn run(kind: &str, fds: &[RawFd]) -> io::Result<()> {
    match (kind, fds) {
        ("daemon", [start, lifeline]) => {
            supervisor::main(start::from_memfd(start::inherited(*start)?)?, start::inherited(*lifeline)?)
        }
        _ => Err(io::Error::other(format!("{kind} with {} descriptors is no such process", fds.len()))),
    }
}
