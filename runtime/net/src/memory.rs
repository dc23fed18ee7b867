//! Memory that was needed for a while, and is given back.

use std::time::{Duration, Instant};

/// How long freed memory is kept, since it may be needed again at once.
pub const KEEP: Duration = Duration::from_secs(1);

/// What a buffer may hold for good, in bytes.
const LITTLE: usize = 256 << 10;

/// Has the allocator give back what it does not need.
pub fn trim() {
    #[cfg(target_env = "gnu")]
    // SAFETY: it takes no pointers, and may be called at any time from any thread.
    unsafe {
        libc::malloc_trim(0);
    }
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

    /// The buffer is gone.
    pub(crate) fn is_over(&mut self) {
        self.large_at = None;
        trim();
    }
}
