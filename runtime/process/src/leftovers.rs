//! Where attempts that count no more may have left outputs: a process died between storing one and telling its owner, or its
//! result came after it was given up. They are deleted as soon as it is known where the value lies, or that there is none.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;
use wingbeat_core::ObjectId;
use wingbeat_core::value::{ObjectValue, StoreNode};

use crate::object::Object;
use crate::process::Process;

/// The nodes at which there may be some, by object. An entry ends when its object has a value or is freed.
#[derive(Default)]
pub(crate) struct Leftovers {
    /// How many objects: nearly always none.
    count: AtomicUsize,
    nodes: Mutex<HashMap<ObjectId, Vec<StoreNode>>>,
}

impl Leftovers {
    fn note(&self, id: ObjectId, at: &StoreNode) {
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
    fn are_any(&self) -> bool {
        self.count.load(Ordering::SeqCst) > 0
    }

    fn take(&self, id: ObjectId) -> Vec<StoreNode> {
        let mut nodes = self.nodes.lock();
        let taken = nodes.remove(&id).unwrap_or_default();
        self.count.store(nodes.len(), Ordering::SeqCst);
        taken
    }
}

impl Process {
    /// A copy of an object of ours may lie there that does not count.
    pub(crate) fn left_over(self: &Arc<Self>, id: ObjectId, at: &StoreNode) {
        self.leftovers.note(id, at);
        // Looked at afterwards: whoever sets the value or frees the object from here on finds the note.
        match self.objects.get(id).map(|object| object.value()) {
            Some(Some(value)) => self.delete_leftovers(id, Some(&value)),
            // The next attempt may be writing it there.
            Some(None) => {}
            None => self.delete_leftovers(id, None),
        }
    }

    /// The object has a value now.
    pub(crate) fn value_is_known(self: &Arc<Self>, object: &Object) {
        if self.leftovers.are_any()
            && let Some(value) = object.value()
        {
            self.delete_leftovers(object.id(), Some(&value));
        }
    }

    /// Nobody needs the object any more.
    pub(crate) fn is_freed(self: &Arc<Self>, id: ObjectId) {
        if self.leftovers.are_any() {
            self.delete_leftovers(id, None);
        }
    }

    fn delete_leftovers(self: &Arc<Self>, id: ObjectId, value: Option<&ObjectValue>) {
        for node in self.leftovers.take(id) {
            if !value.is_some_and(|value| value.is_stored_at(node.node)) {
                self.delete_at(&node, id);
            }
        }
    }
}
