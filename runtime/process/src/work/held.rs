//! Handles of the refs in what was sent, until the receiver has registered them.

use dashmap::DashMap;
use tokio::sync::Notify;
use wingbeat_core::{ObjectId, ProcessId, TaskId};

use crate::owner::object::Handle;

/// Handles of the refs in results and items of streams that a worker process has sent. Each is dropped when the receiver says that
/// it has them, or will never say so. A handle may free its object when it is dropped, so that is never done under a lock.
#[derive(Default)]
pub struct Held {
    results: DashMap<TaskId, Vec<Handle>>,
    items: DashMap<ObjectId, Vec<Handle>>,
    let_go: Notify,
}

impl Held {
    /// Sends a result. A receiver that cannot be reached then will never say that it has the refs.
    pub fn result(&self, task: TaskId, handles: Vec<Handle>, send: impl FnOnce(), can_reach: impl FnOnce() -> bool) {
        let holds = !handles.is_empty();
        if holds {
            let before = self.results.insert(task, handles);
            drop(before);
        }
        send();
        if holds && !can_reach() {
            self.results_received([task]);
        }
    }

    /// The same for an item of a stream.
    pub fn item(&self, item: ObjectId, handles: Vec<Handle>, send: impl FnOnce(), can_reach: impl FnOnce() -> bool) {
        let holds = !handles.is_empty();
        if holds {
            let before = self.items.insert(item, handles);
            drop(before);
        }
        send();
        if holds && !can_reach() {
            self.item_received(item);
        }
    }

    /// The refs in these results are registered.
    pub fn results_received(&self, tasks: impl IntoIterator<Item = TaskId>) {
        for task in tasks {
            let held = self.results.remove(&task);
            drop(held);
        }
        self.let_go.notify_waiters();
    }

    /// The refs in this item are registered.
    pub fn item_received(&self, item: ObjectId) {
        let held = self.items.remove(&item);
        drop(held);
        self.let_go.notify_waiters();
    }

    /// Waits until every receiver has registered what it was sent. The end of this process would free what it alone holds.
    pub async fn settled(&self) {
        loop {
            let let_go = self.let_go.notified();
            if self.is_empty() {
                return;
            }
            let_go.await;
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.results.is_empty() && self.items.is_empty()
    }

    /// What still holds refs.
    #[cfg(test)]
    pub(crate) fn what_is_left(&self) -> Vec<String> {
        let results = self.results.iter().map(|entry| entry.key().to_string());
        results.chain(self.items.iter().map(|entry| entry.key().to_string())).collect()
    }

    /// A process will say nothing more.
    pub fn peer_lost(&self, peer: ProcessId) {
        let mut results: Vec<TaskId> =
            self.results.iter().map(|entry| *entry.key()).filter(|task| task.owner == peer).collect();
        let mut items: Vec<ObjectId> =
            self.items.iter().map(|entry| *entry.key()).filter(|item| item.owner() == peer).collect();
        // Simulated, the same seed must give the same run.
        results.sort_unstable();
        items.sort_unstable();
        self.results_received(results);
        for item in items {
            self.item_received(item);
        }
    }
}
