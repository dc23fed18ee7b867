//! One object: its state, and what follows from it.

use wingbeat_core::{ObjectId, ProcessId};

use super::candidates::Standing;
use crate::allocator::taken_for;
use crate::extent::Extent;

/// The name of one copy of an object on disk. No two are equal, also when an object is written twice or
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
    /// In memory. Since it never changes, a copy that it has on disk stays good: with one, it leaves memory without
    /// another write.
    Sealed {
        extent: Extent,
        copy: Option<SpillFile>,
    },
    /// In memory and readable, while its copy is written.
    Writing {
        extent: Extent,
        file: SpillFile,
    },
    /// On disk only.
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
    /// When it was used last, while nobody reads it: larger is later.
    pub(super) last_used: Option<u64>,
}

impl Object {
    pub(super) fn extent(&self) -> Option<Extent> {
        match self.state {
            State::Reserving { extent, .. }
            | State::Unsealed { extent, .. }
            | State::Sealed { extent, .. }
            | State::Writing { extent, .. }
            | State::Restoring { extent, .. } => Some(extent),
            State::Spilled { .. } | State::Nowhere => None,
        }
    }

    pub(super) fn file(&self) -> Option<SpillFile> {
        match self.state {
            State::Writing { file, .. } | State::Spilled { file } | State::Restoring { file, .. } => Some(file),
            State::Sealed { copy, .. } => copy,
            State::Reserving { .. } | State::Unsealed { .. } | State::Nowhere => None,
        }
    }

    pub(super) fn is_unsealed(&self) -> bool {
        matches!(self.state, State::Reserving { .. } | State::Unsealed { .. })
    }

    pub(super) fn is_idle(&self) -> bool {
        self.pins == 0 && matches!(self.state, State::Sealed { .. } | State::Spilled { .. })
    }

    /// Whether it is complete in memory, and nobody reads it.
    pub(super) fn is_unread(&self) -> bool {
        self.pins == 0 && matches!(self.state, State::Sealed { .. } | State::Writing { .. })
    }

    /// What stands between its memory and another object; `None` if it has none.
    pub(super) fn standing(&self) -> Option<(Extent, Standing)> {
        let has_copy = matches!(self.state, State::Sealed { copy: Some(_), .. });
        let standing = match (self.state, self.last_used) {
            (State::Writing { .. }, Some(_)) => Standing::Writing,
            (State::Sealed { copy: Some(_), .. }, Some(key)) => Standing::Clean(key),
            (State::Sealed { copy: None, .. }, Some(key)) => Standing::Dirty(key),
            _ => Standing::Held { has_copy },
        };
        self.extent().map(|extent| (taken_for(extent), standing))
    }
}

/// Sums over all objects, kept up to date by every transition.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Tally {
    pub(super) unsealed: u64,
    pub(super) pinned: u64,
    /// On their way back from the disk.
    pub(super) restoring: u64,
    /// On disk only.
    pub(super) spilled: u64,
    /// On their way to the disk.
    pub(super) writing: u64,
    /// In memory and on disk.
    pub(super) copies: u64,
    /// What can be freed at once, rounding included.
    pub(super) clean: u64,
}

impl Tally {
    pub(super) fn of(object: &Object) -> Self {
        let if_so = |so: bool| if so { object.size } else { 0 };
        Self {
            unsealed: if_so(object.is_unsealed()),
            pinned: if_so(object.pins > 0),
            restoring: if_so(matches!(object.state, State::Restoring { .. })),
            spilled: if_so(matches!(object.state, State::Spilled { .. } | State::Restoring { .. })),
            writing: if_so(matches!(object.state, State::Writing { .. })),
            copies: if_so(matches!(object.state, State::Sealed { copy: Some(_), .. })),
            clean: match object.standing() {
                Some((taken, Standing::Clean(_))) => taken.len,
                _ => 0,
            },
        }
    }

    /// What lies on the disk, or is on its way there.
    pub(super) fn files(&self) -> u64 {
        self.spilled + self.writing + self.copies
    }

    pub(super) fn replace(&mut self, before: Self, after: Self) {
        self.unsealed = self.unsealed - before.unsealed + after.unsealed;
        self.pinned = self.pinned - before.pinned + after.pinned;
        self.restoring = self.restoring - before.restoring + after.restoring;
        self.spilled = self.spilled - before.spilled + after.spilled;
        self.writing = self.writing - before.writing + after.writing;
        self.copies = self.copies - before.copies + after.copies;
        self.clean = self.clean - before.clean + after.clean;
    }
}
