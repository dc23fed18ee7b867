//! What a node does on its disk beside its work, on few threads, so that a disk that hangs holds up these alone: objects are
//! written before others need their room, so that whoever does only waits for memory, and files that nobody needs are removed.

use std::sync::Arc;

use tokio::sync::Semaphore;
use tokio::task::{JoinError, JoinHandle};
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

/// Ends the node if its thread panics: an object that it was about to write or read would be neither here nor there, and whoever waits for
/// that would wait for ever.
struct Vital {
    daemon: Arc<Daemon>,
    part: &'static str,
}

impl Drop for Vital {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.daemon.end(&panics::defect("this node", self.part, "see above"));
        }
    }
}

impl Daemon {
    /// Does something on a thread of its own, for which objects may have to be written or read. If it panics, the node ends.
    pub(super) fn on_disk<T: Send + 'static>(
        self: &Arc<Self>,
        part: &'static str,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> JoinHandle<T> {
        let vital = Vital { daemon: self.clone(), part };
        self.runtime.spawn_blocking(move || {
            let _vital = vital;
            work()
        })
    }

    /// As [`Daemon::on_disk`], when few enough do so.
    pub(super) async fn wait_for_disk<T: Send + 'static>(
        self: &Arc<Self>,
        part: &'static str,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, JoinError> {
        // It is never closed. The thread has it, and not who waits for the thread: that one may be gone before.
        let may = self.disk_work.waiting.clone().acquire_owned().await;
        let working = move || {
            let _may = may;
            work()
        };
        self.on_disk(part, working).await
    }

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
        self.on_disk("writing objects", move || {
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
        self.on_disk("giving disk space back", move || {
            while daemon.store.has_unneeded_files() {
                daemon.store.remove_unneeded_files();
            }
            drop(remover);
        });
    }
}
