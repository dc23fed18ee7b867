//! Whose objects lie in the store. An owner deletes them when nobody needs them; when it is gone, nobody would.
//!
//! The head knows who is gone. It is asked now and then, so that nothing depends on the arrival of one message.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use parking_lot::Mutex;
use wingbeat_core::limits::limit;
use wingbeat_core::{JobId, ProcessId};
use wingbeat_net::messages::HeadMessage;

use super::Daemon;

/// How often the head is asked: 10 s, `WINGBEAT_OWNERS_MS`.
static ASKED_EVERY: LazyLock<Duration> = LazyLock::new(|| limit("WINGBEAT_OWNERS_MS", Duration::from_secs(10)));

/// The owners of objects that were stored here, by the job in whose name that was done.
#[derive(Default)]
pub(super) struct Owners {
    by_job: Mutex<BTreeMap<JobId, BTreeSet<ProcessId>>>,
}

impl Owners {
    pub(super) fn note(&self, job: JobId, owner: ProcessId) {
        self.by_job.lock().entry(job).or_default().insert(owner);
    }

    /// Forgets those for whom `has_objects` says no; answers with the others.
    fn with_objects(&self, has_objects: impl Fn(ProcessId) -> bool) -> BTreeMap<JobId, BTreeSet<ProcessId>> {
        let mut by_job = self.by_job.lock();
        by_job.retain(|_, owners| {
            owners.retain(|owner| has_objects(*owner));
            !owners.is_empty()
        });
        by_job.clone()
    }
}

impl Daemon {
    /// Asks who is gone until the daemon ends.
    pub(super) async fn ask_for_owners(self: Arc<Self>) {
        let mut ended = self.ending.ended.subscribe();
        loop {
            tokio::select! {
                () = tokio::time::sleep(*ASKED_EVERY) => {}
                _ = ended.wait_for(Option::is_some) => return,
            }
            let owners = self.owners.with_objects(|owner| self.store.has_objects_of(owner));
            if !owners.is_empty() {
                self.head.link.send(HeadMessage::Owners(owners));
            }
        }
    }

    /// Nobody owns the objects of these any more. What somebody reads goes when it was read.
    pub(super) fn owners_gone(self: &Arc<Self>, owners: &[ProcessId]) {
        for owner in owners {
            let objects = self.store.objects_of(*owner);
            tracing::debug!(%owner, count = objects.len(), "deleted the objects of a process that has ended");
            self.delete(objects);
        }
    }
}
