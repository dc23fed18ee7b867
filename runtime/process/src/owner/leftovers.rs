//! Where attempts that count no more may have left outputs: a process died between storing one and telling its owner, or its
//! result came after it was given up. They are deleted as soon as it is known where the value lies, or that there is none.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;
use wingbeat_core::ObjectId;
use wingbeat_core::value::StoreNode;

/// The nodes at which there may be some, by object. An entry ends when its object has a value or is freed.
#[derive(Default)]
pub(crate) struct Leftovers {
    /// How many objects: nearly always none.
    count: AtomicUsize,
    nodes: Mutex<HashMap<ObjectId, Vec<StoreNode>>>,
}

impl Leftovers {
    pub(super) fn note(&self, id: ObjectId, at: &StoreNode) {
        let mut nodes = self.nodes.lock();
        let known = nodes.entry(id).or_default();
        if !known.iter().any(|known| known.node == at.node) {
            known.push(at.clone());
        }
        self.count.store(nodes.len(), Ordering::SeqCst);
    }

    #[cfg(test)]
    pub(crate) fn is_empty(&self) -> bool {
        self.nodes.lock().is_empty()
    }

    /// Nearly never.
    pub(super) fn are_any(&self) -> bool {
        self.count.load(Ordering::SeqCst) > 0
    }

    pub(super) fn take(&self, id: ObjectId) -> Vec<StoreNode> {
        let mut nodes = self.nodes.lock();
        let taken = nodes.remove(&id).unwrap_or_default();
        self.count.store(nodes.len(), Ordering::SeqCst);
        taken
    }
}
