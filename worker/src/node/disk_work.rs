//! What a node does on its disk beside its work, on few threads, so that a disk that hangs holds up these alone: objects are
//! written before others need their room, so that whoever does only waits for memory, and files that nobody needs are removed.

use std::sync::Arc;

use tokio::sync::Semaphore;
use wingbeat_net::panics;

use super::Daemon;

/// Threads that write at once: one computes checksums while the disk is busy for the other.
const WRITERS: usize = 2;

/// Threads that wait at once for the disk so that an object can be made or read: half of those that the runtime has, so that a disk that hangs
/// leaves some for the rest of what a node does.
const WAITING: usize = 256;

/// Those that may begin.
pub(super) struct DiskWork {
    writers: Arc<Semaphore>,
    remover: Arc<Semaphore>,
    waiting: Arc<Semaphore>,
}

impl Default for DiskWork {
    fn default() -> Self {
        DiskWork {
            writers: Arc::new(Semaphore::new(WRITERS)),
            remover: Arc::new(Semaphore::new(1)),
            waiting: Arc::new(Semaphore::new(WAITING)),
        }
    }
}

impl DiskWork {
    /// Does something for which objects may have to be written or read.
    pub(super) async fn wait_for<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, tokio::task::JoinError> {
        // It is never closed. The thread has it, and not who waits for the thread: that one may be gone before.
        let may = self.waiting.clone().acquire_owned().await;
        let working = move || {
            let _may = may;
            work()
        };
        tokio::task::spawn_blocking(working).await
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
        let Ok(writer) = self.disk_work.writers.clone().try_acquire_owned() else { return };
        let daemon = self.clone();
        self.runtime.spawn_blocking(move || {
            while daemon.ending.ended.borrow().is_none() && daemon.store.write_ahead() {}
            drop(writer);
        });
    }

    /// Gives disk space back that nobody needs. What comes while that is done is given back by the same thread, or by
    /// housekeeping.
    pub(super) fn remove_unneeded_files(self: &Arc<Self>) {
        if !self.store.has_unneeded_files() {
            return;
        }
        let Ok(remover) = self.disk_work.remover.clone().try_acquire_owned() else { return };
        let daemon = self.clone();
        self.runtime.spawn(async move {
            let node = daemon.clone();
            let removing = tokio::task::spawn_blocking(move || {
                while node.store.has_unneeded_files() {
                    node.store.remove_unneeded_files();
                }
            });
            if removing.await.is_err_and(|error| error.is_panic()) {
                daemon.end(&panics::defect("this node", "giving disk space back", "see above"));
            }
            drop(remover);
        });
    }
}
