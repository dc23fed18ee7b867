//! How often a task is tried again that was ended because memory was short.

/// How often a task is tried again after it was ended because memory was short, if nothing is said. With the pauses, one that never
/// fits fails after 45 s and the time that its attempts take.
pub(crate) const MEMORY_RETRIES: u32 = 8;
/// The first pause in milliseconds; each later one is twice as long as that before, up to the limit.
const PAUSE_MS: u64 = 500;
const PAUSE_LIMIT_MS: u64 = 10_000;

/// How often a task may still be tried again after it was ended because memory was short. Apart from its other retries: it has not
/// failed, and may have been in the way of others only.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct MemoryRetries {
    left: u32,
    used: u32,
}

impl MemoryRetries {
    /// So many. A task that may not run twice has none.
    pub(crate) fn of(most: u32, retries: u32) -> MemoryRetries {
        MemoryRetries { left: if retries == 0 { 0 } else { most }, used: 0 }
    }

    /// Whether there are any.
    pub(crate) fn has_any(self) -> bool {
        self.left > 0
    }

    /// One less, after a pause of so many milliseconds.
    pub(super) fn take(&mut self) -> u64 {
        let pause = (PAUSE_MS << self.used.min(10)).min(PAUSE_LIMIT_MS);
        (self.left, self.used) = (self.left.saturating_sub(1), self.used.saturating_add(1));
        pause
    }
}
