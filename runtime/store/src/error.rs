//! What can go wrong, by operation.

use std::io;
use std::path::PathBuf;

use wingbeat_core::{ObjectId, ProcessId};

use crate::extent::Extent;

/// There is no room in memory now, and spilling cannot make any.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "the object store is full: no {needed} bytes in a row ({free} of {capacity} free, {pinned} pinned by readers, \
     {unsealed} being written, {restoring} being read back from disk, {spill_room} left to spill to). Drop references or \
     views that are no longer needed, or start the node with a larger store or spill capacity"
)]
pub struct Full {
    /// Bytes that were asked for.
    pub needed: u64,
    /// Bytes of the arena.
    pub capacity: u64,
    /// Bytes that belong to nothing, though perhaps not in one run.
    pub free: u64,
    /// Bytes of objects that somebody reads at the moment.
    pub pinned: u64,
    /// Bytes of objects that are still being written.
    pub unsealed: u64,
    /// Bytes of objects that are on their way back from the disk.
    pub restoring: u64,
    /// Bytes that the spill directory may still take.
    pub spill_room: u64,
    /// Whether there would be room if somebody let go.
    pub held_by: HeldBy,
}

/// Who would have to be done with objects, as a reader or a writer, so that there is room for another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum HeldBy {
    /// Nobody: there would be no room then, either.
    Nobody,
    /// The process that asks, or one that waits for room itself, perhaps together with others.
    Asker,
    /// Others alone, none of which waits for room.
    Others,
}

/// How an object exists that was to be created.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum AlreadyExists {
    /// Somebody is writing it: wait for the seal.
    Unsealed,
    /// It is complete: there is nothing to write.
    Sealed,
    /// It is complete, and of another size.
    Different,
    /// It was deleted, and goes when its writer does: try again then.
    Deleting,
}

/// Why an object cannot be created.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CreateError {
    /// The store has the object.
    #[error("{id} exists in this store ({state:?}): use it, or delete it first")]
    AlreadyExists {
        /// The object.
        id: ObjectId,
        /// How far it is.
        state: AlreadyExists,
    },
    /// It is larger than the whole arena, so no amount of spilling helps.
    #[error(
        "{id} has {size} bytes, more than the object store of {capacity} bytes. Objects are written to memory first, so \
         the {spill_capacity} bytes of spill space do not help: split it, or start the node with a larger store"
    )]
    TooLarge {
        /// The object.
        id: ObjectId,
        /// Its bytes.
        size: u64,
        /// Bytes of the arena.
        capacity: u64,
        /// Bytes that may be spilled to disk.
        spill_capacity: u64,
    },
    /// It does not fit now.
    #[error(transparent)]
    Full(#[from] Full),
    /// The process was never attached to this store, or is gone.
    #[error("{by} is not attached to this node's object store: attach it first (a process that is gone cannot create)")]
    NotAttached {
        /// The process.
        by: ProcessId,
    },
    /// The machine has less memory than the store's capacity promises.
    #[error(
        "memory is short for {size} more bytes of the object store: {error}. Free some, or start the node with a smaller \
         --object-store-memory, so that objects are spilled earlier"
    )]
    OutOfMemory {
        /// Bytes that were asked for.
        size: u64,
        /// What the kernel said, or who limits the memory.
        error: io::Error,
    },
    /// Room had to be made by spilling, and the disk refused.
    #[error("the object store is full, and no object could be spilled to disk: {0}")]
    Spill(SpillError),
}

/// Why an object cannot be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GetError {
    /// The store does not have it, or it was deleted.
    #[error("{id} is not in this node's store: fetch it from a node that has it, or make it again")]
    Absent {
        /// The object.
        id: ObjectId,
    },
    /// It is being written.
    #[error("{id} is still being written: ask again once it is sealed")]
    Unsealed {
        /// The object.
        id: ObjectId,
    },
    /// It is on disk, and there is no room to restore it to.
    #[error(transparent)]
    Full(#[from] Full),
    /// The process was never attached to this store, or is gone.
    #[error("{by} is not attached to this node's object store: attach it first (a process that is gone cannot read)")]
    NotAttached {
        /// The process.
        by: ProcessId,
    },
    /// The machine has less memory than the store's capacity promises.
    #[error(
        "memory is short for {size} more bytes of the object store: {error}. Free some, or start the node with a smaller \
         --object-store-memory, so that objects are spilled earlier"
    )]
    OutOfMemory {
        /// Bytes that were asked for.
        size: u64,
        /// What the kernel said, or who limits the memory.
        error: io::Error,
    },
    /// Room had to be made by spilling, and the disk refused.
    #[error("the object store is full, and no object could be spilled to disk: {0}")]
    Spill(SpillError),
    /// It is on disk and could not be read: this copy is of no use.
    #[error("{id} could not be restored from disk: {error}")]
    Io {
        /// The object.
        id: ObjectId,
        /// What failed.
        error: SpillError,
    },
}

/// Why an object cannot be sealed or aborted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum UnsealedError {
    /// There is no such object here, perhaps because its process was thought to be gone.
    #[error("{id} is not in this node's store: create it again")]
    Absent {
        /// The object.
        id: ObjectId,
    },
    /// Another process creates it.
    #[error("{id} is written by {creator}: only that process may seal or abort it")]
    NotCreator {
        /// The object.
        id: ObjectId,
        /// The process that writes it.
        creator: ProcessId,
    },
    /// It is complete, and can only be deleted.
    #[error("{id} is sealed already: read it, or delete it")]
    Sealed {
        /// The object.
        id: ObjectId,
    },
}

/// The spill file could not be used.
#[derive(Debug, thiserror::Error)]
#[error("cannot {doing} {}: {}", path.display(), cause(error))]
pub struct SpillError {
    /// What was being done.
    pub doing: &'static str,
    /// The spill directory.
    pub path: PathBuf,
    /// What the system said.
    pub error: io::Error,
}

impl SpillError {
    /// Whether the disk has no more room.
    pub(crate) fn is_full(&self) -> bool {
        use io::ErrorKind::{FileTooLarge, QuotaExceeded, StorageFull};
        matches!(self.error.kind(), StorageFull | QuotaExceeded | FileTooLarge)
    }

    /// Whether what could not be read may be there all the same, as where a file server is away or memory is short for a moment.
    #[must_use]
    pub fn may_pass(&self) -> bool {
        use io::ErrorKind::{InvalidData, NotFound, UnexpectedEof};
        !matches!(self.error.kind(), InvalidData | NotFound | UnexpectedEof)
    }
}

fn cause(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::StorageFull => "the disk is full; free space there, or choose another --spill-dir".into(),
        io::ErrorKind::QuotaExceeded => {
            "the disk quota is used up; free space there, or choose another --spill-dir".into()
        }
        io::ErrorKind::FileTooLarge => {
            "no file may be larger there (ulimit -f); raise that, or name a smaller --spill-limit".into()
        }
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem | io::ErrorKind::NotFound => {
            format!("{error}; choose a --spill-dir that can be written")
        }
        _ => error.to_string(),
    }
}

/// An extent that this process cannot be given a view of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RegionError {
    /// It does not lie in the arena.
    #[error("{extent:?} is not within the arena of {capacity} bytes: use the extent as the daemon answered it")]
    OutOfBounds {
        /// The extent.
        extent: Extent,
        /// Bytes of the arena.
        capacity: u64,
    },
    /// This process is writing there.
    #[error("{extent:?} is being written by this process: finish or drop its WriteRegion first")]
    BeingWritten {
        /// The extent.
        extent: Extent,
    },
}
