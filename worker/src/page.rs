//! The page that a worker process shares with its daemon: what it started last, what it is doing, and which program it sees through. The
//! daemon reads it after the process's death, for the prefix of its output, and when memory is short.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

const SIZE: usize = 4096;
/// Words of the page that hold the name of what runs, eight bytes each.
const NAME_WORDS: usize = 16;

#[repr(C)]
struct Layout {
    /// The owner's number of the last started task, plus 1.
    started: AtomicU64,
    /// 1 if that is tried again when it is ended for want of memory.
    yields_memory: AtomicU64,
    name_len: AtomicU64,
    name: [AtomicU64; NAME_WORDS],
    /// The process id of the program that it sees through, or 0.
    program: AtomicU64,
}

/// A mapping of the page.
pub(crate) struct Page {
    fd: OwnedFd,
    map: NonNull<Layout>,
}

// SAFETY: the page is only touched through atomics, and the mapping lives as long as the value.
unsafe impl Send for Page {}
// SAFETY: as above.
unsafe impl Sync for Page {}

impl Page {
    /// A new page.
    pub(crate) fn create() -> io::Result<Page> {
        let fd = memfd_create("wingbeat-page", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&fd, SIZE as u64)?;
        // Reading past the end of a file that somebody has made shorter would end the daemon.
        fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Page::open(fd)
    }

    /// The page behind a descriptor.
    pub(crate) fn open(fd: OwnedFd) -> io::Result<Page> {
        // SAFETY: a fresh shared mapping of a file that is `SIZE` long; zeroed memory is a valid `Layout`.
        let map =
            unsafe { mmap(std::ptr::null_mut(), SIZE, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, &fd, 0)? };
        let map = NonNull::new(map.cast()).ok_or_else(|| io::Error::other("a page mapped at zero"))?;
        Ok(Page { fd, map })
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    fn layout(&self) -> &Layout {
        // SAFETY: mapped until drop, aligned to a page, and valid for every bit pattern.
        unsafe { self.map.as_ref() }
    }

    /// Notes that the task of this number starts, or an actor's constructor, which has number 0.
    pub(crate) fn start(&self, number: u64, name: &str, yields_memory: bool) {
        let layout = self.layout();
        layout.yields_memory.store(yields_memory.into(), Ordering::Relaxed);
        layout.started.store(number + 1, Ordering::Release);
        self.rename(name);
    }

    /// Notes what runs.
    pub(crate) fn rename(&self, name: &str) {
        let layout = self.layout();
        let short = &name.as_bytes()[name.len().saturating_sub(NAME_WORDS * 8)..];
        for (word, chunk) in layout.name.iter().zip(short.chunks(8)) {
            let mut bytes = [0; 8];
            bytes[..chunk.len()].copy_from_slice(chunk);
            word.store(u64::from_le_bytes(bytes), Ordering::Relaxed);
        }
        layout.name_len.store(short.len() as u64, Ordering::Release);
    }

    /// Forgets what was started: the daemon does so before a process gets its next lease.
    pub(crate) fn reset(&self) {
        self.layout().started.store(0, Ordering::Release);
        self.sees_through(None);
    }

    /// Notes that a program whose parent may be another process belongs to this one, or no longer does.
    pub(crate) fn sees_through(&self, pid: Option<u32>) {
        self.layout().program.store(pid.unwrap_or(0).into(), Ordering::Relaxed);
    }

    /// That program, as the process says.
    pub(crate) fn program(&self) -> Option<u32> {
        u32::try_from(self.layout().program.load(Ordering::Relaxed)).ok().filter(|pid| *pid != 0)
    }

    pub(crate) fn started(&self) -> u64 {
        self.layout().started.load(Ordering::Acquire)
    }

    /// Whether what was started last is tried again when it is ended for want of memory.
    pub(crate) fn yields_memory(&self) -> bool {
        self.layout().yields_memory.load(Ordering::Relaxed) != 0
    }

    /// What runs or ran last. May be a mix of two names while they change; it is for people.
    pub(crate) fn name(&self) -> String {
        let layout = self.layout();
        let len = (layout.name_len.load(Ordering::Acquire) as usize).min(NAME_WORDS * 8);
        let bytes: Vec<u8> = layout.name.iter().flat_map(|word| word.load(Ordering::Relaxed).to_le_bytes()).collect();
        String::from_utf8_lossy(&bytes[..len]).into_owned()
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        // SAFETY: mapped in `open` with this size, and not used after this.
        let _ = unsafe { munmap(self.map.as_ptr().cast(), SIZE) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_process_cannot_cut_its_page_short() {
        let ours = Page::create().unwrap();
        let theirs = ours.fd().try_clone_to_owned().unwrap();
        assert!(ftruncate(&theirs, 0).is_err());
        assert_eq!(ours.started(), 0);
    }

    #[test]
    fn what_one_mapping_writes_the_other_reads() {
        let ours = Page::create().unwrap();
        let theirs = Page::open(ours.fd().try_clone_to_owned().unwrap()).unwrap();
        theirs.start(41, "crate::module::function", true);
        assert_eq!((ours.started(), ours.name().as_str()), (42, "crate::module::function"));
        assert!(ours.yields_memory());
        theirs.sees_through(Some(7));
        assert_eq!(ours.program(), Some(7));
        ours.reset();
        assert_eq!((theirs.started(), theirs.program()), (0, None));
    }
}
