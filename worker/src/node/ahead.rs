//! Objects are written to disk before others need their room, so that whoever does only waits for memory.

use std::sync::Arc;

use tokio::sync::Semaphore;

use super::Daemon;

/// Threads that write at once: one computes checksums while the disk is busy for the other.
const WRITERS: usize = 2;

/// Those that may write.
pub(super) struct Ahead(Arc<Semaphore>);

impl Default for Ahead {
    fn default() -> Self {
        Ahead(Arc::new(Semaphore::new(WRITERS)))
    }
}

impl Daemon {
    /// An object was sealed, given up, or is read no more.
    pub(super) fn object_settled(self: &Arc<Self>) {
        self.transfers.object_settled();
        self.write_ahead();
    }

    /// Has objects written to disk if the store is nearly full.
    pub(super) fn write_ahead(self: &Arc<Self>) {
        if !self.store.is_behind() {
            return;
        }
        let Ok(writer) = self.ahead.0.clone().try_acquire_owned() else { return };
        let daemon = self.clone();
        self.runtime.spawn_blocking(move || {
            while daemon.ending.ended.borrow().is_none() && daemon.store.write_ahead() {}
            drop(writer);
        });
    }
}
