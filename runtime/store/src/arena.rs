//! The memory of the store: one anonymous file that every process of the node maps.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, ftruncate, memfd_create};

use crate::extent::{Extent, PAGE};

/// The arena of a node. It has no name in any file system, so it ends with the last process that
/// holds or maps it, however those end.
///
/// It is sparse: bytes cost memory once they are [reserved](Arena::reserve), until they are
/// [punched out](Arena::punch).
#[derive(Debug)]
pub struct Arena {
    fd: OwnedFd,
    /// Length of the file; fixed for the arena's life by seals.
    capacity: u64,
}

impl Arena {
    /// Makes an arena of `capacity_bytes`, rounded up to whole pages.
    ///
    /// Its size is sealed: no process that is given the descriptor can shorten the file and so make
    /// the others die of SIGBUS.
    pub fn create(capacity_bytes: u64) -> io::Result<Arena> {
        let capacity = capacity_bytes.max(1).checked_next_multiple_of(PAGE).ok_or(io::ErrorKind::InvalidInput)?;
        let fd = memfd_create("wingbeat-store", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&fd, capacity)?;
        fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Ok(Arena { fd, capacity })
    }

    /// The descriptor that other processes are sent, to [map](crate::Mapping::open) the arena.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Size in bytes.
    pub fn capacity(&self) -> u64 {
        self.capacity
    }

    /// Puts memory behind the extent, so that writing there cannot fail later.
    ///
    /// A shortage is `ENOMEM` or `ENOSPC` here, instead of a SIGBUS in whoever writes.
    pub fn reserve(&self, extent: Extent) -> io::Result<()> {
        self.fallocate(FallocateFlags::empty(), extent)
    }

    /// Gives the memory behind the extent's whole pages back to the system. Its content is lost.
    pub fn punch(&self, extent: Extent) -> io::Result<()> {
        self.fallocate(FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, extent.pages_within())
    }

    /// How many bytes of memory the arena takes at the moment.
    pub fn resident_bytes(&self) -> io::Result<u64> {
        // The kernel counts st_blocks in units of 512 bytes, whatever the page size.
        Ok(u64::try_from(rustix::fs::fstat(&self.fd)?.st_blocks).unwrap_or(0) * 512)
    }

    fn fallocate(&self, flags: FallocateFlags, extent: Extent) -> io::Result<()> {
        if extent.len == 0 {
            return Ok(());
        }
        // shmem gives up when a signal is pending; it undoes what it did, so starting again is right.
        rustix::io::retry_on_intr(|| fallocate(&self.fd, flags, extent.offset, extent.len))?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_taken_when_reserved_and_given_back_when_punched() {
        let arena = Arena::create(64 * PAGE).unwrap();
        assert_eq!(arena.resident_bytes().unwrap(), 0);
        arena.reserve(Extent { offset: PAGE, len: 8 * PAGE }).unwrap();
        assert_eq!(arena.resident_bytes().unwrap(), 8 * PAGE);
        arena.punch(Extent { offset: PAGE, len: 8 * PAGE }).unwrap();
        assert_eq!(arena.resident_bytes().unwrap(), 0);
    }

    #[test]
    fn nobody_can_shorten_the_arena() {
        let arena = Arena::create(PAGE).unwrap();
        assert!(ftruncate(arena.fd(), 0).is_err());
        assert!(arena.reserve(Extent { offset: 0, len: 2 * PAGE }).is_err());
    }
}
