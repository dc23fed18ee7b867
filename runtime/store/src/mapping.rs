//! A process's view of the arena.
//!
//! The arena is mapped twice: once to read, where the hardware refuses every write, and once to fill
//! the extents that the daemon gave this process. What keeps readers and writers apart is the
//! store's protocol, and every `unsafe` below leans on its two rules:
//!
//! - an extent is written by one process only, from `create` until `seal`, and read by nobody then;
//! - from `seal` on nobody writes it, and it is not given to anybody else while it is pinned.
//!
//! Both hold for as long as the process can touch the bytes. So pins and unsealed extents are taken back from a process only
//! when it has ended, or has nothing mapped any more, which its [lease](Mapping::open_leased) tells the daemon.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::ops::{Deref, DerefMut};
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::Arc;

use bytes::Bytes;
use parking_lot::Mutex;
use rustix::fs::SealFlags;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};

use crate::error::RegionError;
use crate::extent::Extent;

/// One mapping of the whole arena. Unmapped when dropped.
struct Window {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: a window is an address and a length; who may use the bytes behind it is decided by
// `Region` and `WriteRegion`, not by the thread.
unsafe impl Send for Window {}
// SAFETY: as above; a window has no state that changes.
unsafe impl Sync for Window {}

impl Window {
    fn map(fd: &OwnedFd, len: usize, protection: ProtFlags) -> io::Result<Self> {
        // SAFETY: a new mapping at an address of the kernel's choosing touches no existing one.
        let base =
            unsafe { mmap(std::ptr::null_mut(), len, protection, MapFlags::SHARED | MapFlags::NORESERVE, fd, 0)? };
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::AddrNotAvailable)?;
        let window = Self { base, len };
        // A crashing worker should not write the whole node's objects into its core file. Kernels
        // that do not know the advice still work.
        // SAFETY: the range is the mapping just made; the advice changes no content.
        let _ = unsafe { madvise(window.base.as_ptr().cast(), len, Advice::LinuxDontDump) };
        Ok(window)
    }

    /// The address of an extent that was checked to lie in the arena.
    fn at(&self, extent: Extent) -> *mut u8 {
        debug_assert!(extent.end() <= self.len as u64, "{extent:?} was not checked");
        // SAFETY: `extent` ends within the mapping, so the offset stays in the same allocation.
        unsafe { self.base.as_ptr().add(extent.offset as usize) }
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        // SAFETY: this is the mapping that `map` made; every region keeps the `Mapping` alive, so
        // nothing refers to it any more.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.len) };
    }
}

/// The arena as one process sees it. Shared by all regions of the process; unmapped when the last
/// of them is dropped.
pub struct Mapping {
    read: Window,
    write: Window,
    capacity: u64,
    /// Offset → end of every live [`WriteRegion`], so that no two views of this process alias.
    writing: Mutex<BTreeMap<u64, u64>>,
    /// See [`Mapping::open_leased`]. The last field, since fields are dropped in order: closed when nothing is mapped any more.
    _lease: Option<OwnedFd>,
}

impl Mapping {
    /// Maps the arena whose descriptor the daemon sent. `capacity` is its size in bytes.
    ///
    /// Fails with `InvalidInput` if the descriptor is not such an arena: shorter than `capacity`, or
    /// not sealed against shrinking.
    pub fn open(fd: OwnedFd, capacity: u64) -> io::Result<Arc<Mapping>> {
        Mapping::open_with(fd, capacity, None)
    }

    /// As [`Mapping::open`], for a process that may live on without the arena. `lease` is this end of the socket over which the
    /// daemon sent the descriptor. It is closed when the last view is gone, with the process at the latest, and until then
    /// the daemon takes nothing back.
    pub fn open_leased(fd: OwnedFd, capacity: u64, lease: OwnedFd) -> io::Result<Arc<Mapping>> {
        Mapping::open_with(fd, capacity, Some(lease))
    }

    fn open_with(fd: OwnedFd, capacity: u64, lease: Option<OwnedFd>) -> io::Result<Arc<Mapping>> {
        let not_an_arena = || {
            io::Error::new(
                io::ErrorKind::InvalidInput,
                "the descriptor is not an object store's arena: pass on the one that the node daemon sent, with its capacity",
            )
        };
        let size = u64::try_from(rustix::fs::fstat(&fd)?.st_size).unwrap_or(0);
        let seals = rustix::fs::fcntl_get_seals(&fd).map_err(|_| not_an_arena())?;
        if capacity == 0 || size < capacity || !seals.contains(SealFlags::SHRINK) {
            return Err(not_an_arena());
        }
        let len = usize::try_from(capacity).map_err(|_| not_an_arena())?;
        Ok(Arc::new(Mapping {
            read: Window::map(&fd, len, ProtFlags::READ)?,
            write: Window::map(&fd, len, ProtFlags::READ | ProtFlags::WRITE)?,
            capacity,
            writing: Mutex::new(BTreeMap::new()),
            _lease: lease,
        }))
    }

    /// Size of the arena in bytes.
    pub fn capacity(&self) -> u64 {
        self.capacity
    }

    /// A view of a sealed object.
    ///
    /// # Safety
    /// The extent is the daemon's answer to a request of this process for the object, which is thereby pinned, and the pin
    /// is released only after the last clone of the view is dropped. Without a pin the daemon may give the memory to
    /// somebody who writes there.
    pub unsafe fn region(self: &Arc<Self>, extent: Extent) -> Result<Region, RegionError> {
        self.check(extent)?;
        if overlaps_any(&self.writing.lock(), extent) {
            return Err(RegionError::BeingWritten { extent });
        }
        Ok(Region { mapping: Arc::clone(self), extent })
    }

    /// The extent of an unsealed object, to be filled. Within this process a second such view of the same bytes is
    /// refused.
    ///
    /// # Safety
    /// The extent is the daemon's answer to a `create` of this process, and the object is sealed or aborted only after the
    /// view is dropped: until then nobody else is given these bytes.
    pub unsafe fn write_region(self: &Arc<Self>, extent: Extent) -> Result<WriteRegion, RegionError> {
        self.check(extent)?;
        let mut writing = self.writing.lock();
        if overlaps_any(&writing, extent) {
            return Err(RegionError::BeingWritten { extent });
        }
        if extent.len > 0 {
            writing.insert(extent.offset, extent.end());
        }
        drop(writing);
        Ok(WriteRegion { mapping: Arc::clone(self), extent })
    }

    fn check(&self, extent: Extent) -> Result<(), RegionError> {
        match extent.offset.checked_add(extent.len) {
            Some(end) if end <= self.capacity => Ok(()),
            _ => Err(RegionError::OutOfBounds { extent, capacity: self.capacity }),
        }
    }
}

impl fmt::Debug for Mapping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mapping").field("capacity", &self.capacity).finish_non_exhaustive()
    }
}

/// Live write regions are disjoint, so only the last one that starts before the end can reach in.
fn overlaps_any(writing: &BTreeMap<u64, u64>, extent: Extent) -> bool {
    extent.len > 0 && writing.range(..extent.end()).next_back().is_some_and(|(_, &end)| end > extent.offset)
}

/// The bytes of a sealed object, in place and read-only. Cheap to clone; keeps the arena mapped.
///
/// It does not pin: see [`Mapping::region`].
#[derive(Clone)]
pub struct Region {
    mapping: Arc<Mapping>,
    extent: Extent,
}

impl Region {
    /// Where the bytes lie in the arena.
    pub fn extent(&self) -> Extent {
        self.extent
    }
}

impl Deref for Region {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the extent was checked against the mapping's size, which cannot shrink (sealed);
        // the mapping lives as long as `self`; the object is sealed and pinned, so by the store's
        // protocol nobody writes these bytes.
        unsafe { std::slice::from_raw_parts(self.mapping.read.at(self.extent), self.extent.len as usize) }
    }
}

impl AsRef<[u8]> for Region {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

/// Without a copy: the `Bytes` and all its slices keep the region.
impl From<Region> for Bytes {
    fn from(region: Region) -> Bytes {
        Bytes::from_owner(region)
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Region").field(&self.extent).finish()
    }
}

/// The bytes of an object that this process is writing. Unique within the process; by the store's
/// protocol, unique on the node.
pub struct WriteRegion {
    mapping: Arc<Mapping>,
    extent: Extent,
}

impl WriteRegion {
    /// Where the bytes lie in the arena.
    pub fn extent(&self) -> Extent {
        self.extent
    }
}

impl Deref for WriteRegion {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: as in `deref_mut`.
        unsafe { std::slice::from_raw_parts(self.mapping.write.at(self.extent), self.extent.len as usize) }
    }
}

impl DerefMut for WriteRegion {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: the extent was checked against the mapping's size, which cannot shrink (sealed);
        // the mapping lives as long as `self`; `Mapping::writing` lets one view of these bytes exist
        // in this process, and the store's protocol gives the unsealed extent to no other.
        unsafe { std::slice::from_raw_parts_mut(self.mapping.write.at(self.extent), self.extent.len as usize) }
    }
}

impl AsMut<[u8]> for WriteRegion {
    fn as_mut(&mut self) -> &mut [u8] {
        self
    }
}

impl Drop for WriteRegion {
    fn drop(&mut self) {
        if self.extent.len > 0 {
            self.mapping.writing.lock().remove(&self.extent.offset);
        }
    }
}

impl fmt::Debug for WriteRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("WriteRegion").field(&self.extent).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arena::Arena;
    use crate::extent::PAGE;

    /// A mapping that one test has to itself.
    impl Mapping {
        fn reading(self: &Arc<Self>, extent: Extent) -> Result<Region, RegionError> {
            // SAFETY: these tests write nowhere that they have a view of.
            unsafe { self.region(extent) }
        }

        fn writing(self: &Arc<Self>, extent: Extent) -> Result<WriteRegion, RegionError> {
            // SAFETY: as above.
            unsafe { self.write_region(extent) }
        }
    }

    fn arena_and_mapping() -> (Arena, Arc<Mapping>) {
        let arena = Arena::create(16 * PAGE).unwrap();
        let mapping = Mapping::open(arena.fd().try_clone_to_owned().unwrap(), arena.capacity()).unwrap();
        (arena, mapping)
    }

    #[test]
    fn what_one_mapping_writes_another_reads() {
        let (arena, writer) = arena_and_mapping();
        let reader = Mapping::open(arena.fd().try_clone_to_owned().unwrap(), arena.capacity()).unwrap();
        let extent = Extent { offset: PAGE + 64, len: 5 };
        arena.reserve(extent).unwrap();
        writer.writing(extent).unwrap().copy_from_slice(b"hello");
        assert_eq!(&*reader.reading(extent).unwrap(), b"hello");
    }

    #[test]
    fn a_region_outlives_the_handle_it_came_from() {
        let (arena, mapping) = arena_and_mapping();
        let extent = Extent { offset: 0, len: 3 };
        mapping.writing(extent).unwrap().copy_from_slice(b"abc");
        let bytes = Bytes::from(mapping.reading(extent).unwrap());
        drop((arena, mapping));
        assert_eq!(bytes.slice(1..), &b"bc"[..]);
    }

    #[test]
    fn a_lease_ends_with_the_last_view() {
        let (arena, _) = arena_and_mapping();
        let (lease, daemon) = std::os::unix::net::UnixStream::pair().unwrap();
        daemon.set_nonblocking(true).unwrap();
        let fd = arena.fd().try_clone_to_owned().unwrap();
        let mapping = Mapping::open_leased(fd, arena.capacity(), lease.into()).unwrap();
        let has_ended = || match io::Read::read(&mut &daemon, &mut [0]) {
            Ok(read) => read == 0,
            Err(error) => error.kind() != io::ErrorKind::WouldBlock,
        };
        let reading = mapping.reading(Extent { offset: 0, len: 1 }).unwrap();
        let writing = mapping.writing(Extent { offset: PAGE, len: 1 }).unwrap();
        drop(mapping);
        assert!(!has_ended());
        drop(reading);
        assert!(!has_ended());
        drop(writing);
        assert!(has_ended());
    }

    #[test]
    fn an_extent_outside_the_arena_is_refused() {
        let (arena, mapping) = arena_and_mapping();
        for extent in [
            Extent { offset: arena.capacity(), len: 1 },
            Extent { offset: arena.capacity() - 1, len: 2 },
            Extent { offset: u64::MAX, len: 2 },
        ] {
            assert!(matches!(mapping.reading(extent), Err(RegionError::OutOfBounds { .. })));
            assert!(matches!(mapping.writing(extent), Err(RegionError::OutOfBounds { .. })));
        }
        assert!(mapping.reading(Extent { offset: arena.capacity(), len: 0 }).unwrap().is_empty());
    }

    #[test]
    fn a_process_cannot_alias_what_it_writes() {
        let (_arena, mapping) = arena_and_mapping();
        let writing = mapping.writing(Extent { offset: 64, len: 64 }).unwrap();
        let across = Extent { offset: 100, len: 100 };
        assert!(matches!(mapping.writing(across), Err(RegionError::BeingWritten { .. })));
        assert!(matches!(mapping.reading(across), Err(RegionError::BeingWritten { .. })));
        assert!(mapping.reading(Extent { offset: 128, len: 64 }).is_ok());
        drop(writing);
        assert!(mapping.reading(across).is_ok());
    }

    #[test]
    fn a_file_that_could_shrink_is_no_arena() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(PAGE).unwrap();
        assert_eq!(Mapping::open(file.into(), PAGE).unwrap_err().kind(), io::ErrorKind::InvalidInput);
    }
}
