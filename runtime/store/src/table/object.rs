//! One object: its state, and what follows from it.

use wingbeat_core::{ObjectId, ProcessId};

use crate::allocator::taken_for;
use crate::extent::Extent;

/// The name of one spilling of an object. No two are equal, also when an object is spilled twice or
/// made again, so a late removal never hits a newer file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct SpillFile {
    /// The object.
    pub id: ObjectId,
    /// Running number within the store.
    pub number: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    /// Pages are being put behind the extent; nobody else knows it yet. `None` when the creator is
    /// gone already: then the extent is freed once the pages are there.
    Reserving {
        extent: Extent,
        by: Option<ProcessId>,
    },
    Unsealed {
        extent: Extent,
        by: ProcessId,
    },
    Sealed {
        extent: Extent,
    },
    /// Still readable. If it is pinned meanwhile, it stays in memory.
    Spilling {
        extent: Extent,
        file: SpillFile,
    },
    Spilled {
        file: SpillFile,
    },
    Restoring {
        extent: Extent,
        file: SpillFile,
    },
    /// Neither in memory nor on disk: before the first transition and after the last.
    Nowhere,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Object {
    pub(super) size: u64,
    pub(super) state: State,
    /// Of all processes together.
    pub(super) pins: u64,
    /// It was deleted, and goes when it is idle.
    pub(super) doomed: bool,
    /// Its key in `ObjectTable::evictable`, while it may be spilled.
    pub(super) last_used: Option<u64>,
}

impl Object {
    pub(super) fn extent(&self) -> Option<Extent> {
        match self.state {
            State::Reserving { extent, .. }
            | State::Unsealed { extent, .. }
            | State::Sealed { extent }
            | State::Spilling { extent, .. }
            | State::Restoring { extent, .. } => Some(extent),
            State::Spilled { .. } | State::Nowhere => None,
        }
    }

    pub(super) fn file(&self) -> Option<SpillFile> {
        match self.state {
            State::Spilling { file, .. } | State::Spilled { file } | State::Restoring { file, .. } => Some(file),
            State::Reserving { .. } | State::Unsealed { .. } | State::Sealed { .. } | State::Nowhere => None,
        }
    }

    pub(super) fn is_unsealed(&self) -> bool {
        matches!(self.state, State::Reserving { .. } | State::Unsealed { .. })
    }

    pub(super) fn is_idle(&self) -> bool {
        self.pins == 0 && matches!(self.state, State::Sealed { .. } | State::Spilled { .. })
    }

    /// Where it lies, if it may be spilled.
    pub(super) fn evictable(&self) -> Option<Extent> {
        self.extent().filter(|_| self.is_evictable())
    }

    pub(super) fn is_evictable(&self) -> bool {
        self.pins == 0 && matches!(self.state, State::Sealed { .. })
    }
}

/// Sums over all objects, kept up to date by every transition.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Tally {
    pub(super) unsealed: u64,
    pub(super) pinned: u64,
    pub(super) spilled: u64,
    /// What could be freed by spilling, rounding included.
    pub(super) evictable: u64,
}

impl Tally {
    pub(super) fn of(object: &Object) -> Self {
        let if_so = |so: bool| if so { object.size } else { 0 };
        Self {
            unsealed: if_so(object.is_unsealed()),
            pinned: if_so(object.pins > 0),
            spilled: if_so(object.file().is_some()),
            evictable: object.evictable().map_or(0, |extent| taken_for(extent).len),
        }
    }

    pub(super) fn replace(&mut self, before: Self, after: Self) {
        self.unsealed = self.unsealed - before.unsealed + after.unsealed;
        self.pinned = self.pinned - before.pinned + after.pinned;
        self.spilled = self.spilled - before.spilled + after.spilled;
        self.evictable = self.evictable - before.evictable + after.evictable;
    }
}
