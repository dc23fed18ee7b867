//! The memory that members of one machine share: how far each has come, and where it writes.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::mm::munmap;

use crate::header::Header;
use crate::phase::Phase;

/// What every member tells the others.
#[repr(C, align(128))]
pub(crate) struct Control {
    pub phase: Phase,
    /// How often something has moved between this member and another machine.
    pub moves: AtomicU32,
    /// What is called, by the half that the first part is in.
    pub headers: [Header; 2],
}

/// The memory that all map.
pub(crate) struct Memory {
    pub base: *mut u8,
    pub length: usize,
}

// SAFETY: the memory is used through atomics, and through halves that the phases give to one side at a time.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    pub(crate) fn control(&self, rank: usize) -> &Control {
        // SAFETY: inside of the mapping, aligned, and made of atomics and numbers.
        unsafe { &*self.base.cast::<Control>().add(rank) }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: the mapping is this one's own, and nothing borrows from it any more.
        let _ = unsafe { munmap(self.base.cast(), self.length) };
    }
}

/// Where a member shows those of its machine that something moves between it and other machines.
#[derive(Clone)]
pub(crate) struct Moves {
    pub memory: Arc<Memory>,
    pub rank: usize,
}

impl Moves {
    pub(crate) fn note(&self) {
        self.memory.control(self.rank).moves.fetch_add(1, Ordering::Relaxed);
    }
}
