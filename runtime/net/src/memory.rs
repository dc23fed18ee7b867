//! Memory that was needed for a while, and is given back.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::threads::on_a_thread;

/// How long freed memory is kept, since it may be needed again at once.
pub const KEEP: Duration = Duration::from_secs(1);

/// The name of a thread on which the allocator gives memory back.
const TRIMS: &str = "wingbeat-trim";

/// What a buffer may hold for good, in bytes.
const LITTLE: usize = 256 << 10;

/// A buffer from which on the allocator asks the system for memory, in bytes.
#[cfg(target_env = "gnu")]
const LARGE: libc::c_int = 1 << 20;

/// Has the allocator give back what it does not need.
fn trim() {
    #[cfg(target_env = "gnu")]
    // SAFETY: it takes no pointers, and may be called at any time from any thread.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Has the allocator give large buffers back as soon as they are freed, for the rest of this process. Without this, glibc keeps twice the
/// size of the largest one that was ever freed (up to 64 MiB), in each of its arenas: a node that had spilled once in pieces of 8 MiB
/// stayed that much larger. For processes that run no code of users; theirs may prefer speed.
/// <https://man7.org/linux/man-pages/man3/mallopt.3.html>, `M_MMAP_THRESHOLD`.
pub fn give_back_large_buffers() {
    #[cfg(target_env = "gnu")]
    // SAFETY: it takes no pointers, and may be called at any time from any thread.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, LARGE);
        libc::mallopt(libc::M_TRIM_THRESHOLD, LARGE);
    }
}

/// How often a daemon looks at what its allocator keeps.
const LOOK: Duration = Duration::from_secs(5);

/// What may be in memory beside what is in use, in bytes: stacks and the program itself are in there.
const KEPT: u64 = 6 << 20;

/// Has the allocator give back what it keeps, for as long as this process runs: what thousands of small values have left in pieces is
/// given back by nobody else. For daemons, on a runtime of theirs.
pub async fn give_back_now_and_then() {
    let mut floor = 0;
    loop {
        tokio::time::sleep(LOOK).await;
        floor = on_a_thread(TRIMS, move || give_back_above(floor)).await.unwrap_or(floor);
    }
}

/// Gives back what is kept if that is much more than was left the last time: what lies between pieces that are in use cannot be given
/// back, and to look at it again and again would hold up whoever needs memory. How much is left.
fn give_back_above(floor: u64) -> u64 {
    let kept = kept();
    if kept <= floor + KEPT {
        return floor.min(kept);
    }
    trim();
    self::kept()
}

/// What is in memory, and not in use. Nothing where that cannot be said.
fn kept() -> u64 {
    #[cfg(target_env = "gnu")]
    {
        // Pages: all, those that are there, and those of files.
        let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
        let mut pages = statm.split(' ').skip(1).map_while(|pages| pages.parse::<u64>().ok());
        let (Some(resident), Some(of_files)) = (pages.next(), pages.next()) else { return 0 };
        let resident = resident.saturating_sub(of_files) * rustix::param::page_size() as u64;
        resident.saturating_sub(in_use().unwrap_or(resident))
    }
    #[cfg(not(target_env = "gnu"))]
    0
}

/// What the allocator has given and not got back, in bytes. None before glibc 2.33, which has no such sum: a program that was linked to the
/// function could not be started there.
#[cfg(target_env = "gnu")]
fn in_use() -> Option<u64> {
    // SAFETY: the name ends with a zero.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"mallinfo2".as_ptr()) };
    // SAFETY: it is glibc's function, of this type, or null, which is None.
    let mallinfo2: Option<unsafe extern "C" fn() -> libc::mallinfo2> = unsafe { std::mem::transmute(found) };
    // SAFETY: it takes no pointers, and may be called at any time from any thread.
    let heap = unsafe { mallinfo2?() };
    Some((heap.uordblks + heap.hblkhd) as u64)
}

/// Has the allocator give back what it does not need, after a while, once for all who ask meanwhile, and on a thread where nobody waits for it: it looks at
/// everything that is free.
pub fn trim_soon() {
    static IS_PLANNED: AtomicBool = AtomicBool::new(false);
    /// Also when its runtime ends before.
    struct Planned;
    impl Drop for Planned {
        fn drop(&mut self) {
            IS_PLANNED.store(false, Ordering::Release);
        }
    }
    if IS_PLANNED.swap(true, Ordering::AcqRel) {
        return;
    }
    let planned = Planned;
    tokio::spawn(async move {
        tokio::time::sleep(KEEP).await;
        drop(planned);
        let _ = on_a_thread(TRIMS, trim).await;
    });
}

/// When a buffer was last needed for something large.
#[derive(Default)]
pub(crate) struct Ebb {
    large_at: Option<Instant>,
}

impl Ebb {
    /// So many bytes are in the buffer.
    pub(crate) fn holds(&mut self, bytes: usize) {
        if bytes > LITTLE {
            self.large_at = Some(Instant::now());
        }
    }

    /// How long the buffer is still kept as large as it is; none if that is little.
    pub(crate) fn keeps(&self) -> Option<Duration> {
        self.large_at.map(|at| KEEP.saturating_sub(at.elapsed()))
    }

    /// The buffer is gone. On a tokio runtime, the allocator gives its memory back soon.
    pub(crate) fn is_over(&mut self) {
        self.large_at = None;
        trim_soon();
    }
}
