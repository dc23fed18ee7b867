//! The objects that this process owns or has borrowed.
//!
//! An object is in the table while anybody needs it: a handle in this process, a borrower (if this
//! process owns it), or a task in flight. Handles count by clone and drop. A count goes from zero to one
//! only under the table's lock, which is what makes looking an object up and dropping its last handle safe
//! against each other.

use std::collections::HashSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use dashmap::DashMap;
use wingbeat_core::error::Error;
use wingbeat_core::value::{ObjectValue, StoreNode};
use wingbeat_core::{NodeId, ObjectId, ProcessId};
use wingbeat_net::messages::Registration;

use crate::owner::object::{Handle, Home, Object, Producer, drop_all};

/// What remained to be done for an object that nobody needs any more.
pub(crate) enum Freed {
    /// It is still needed.
    Kept,
    /// It was ours: here it is, and its last value, whose stored copies are to be deleted.
    Owned(Arc<Object>, Option<ObjectValue>),
    /// It was borrowed: here it is, and what its owner is to be told.
    Borrowed(Arc<Object>, Released),
}

/// A borrowed object that nobody here holds any more.
pub(crate) struct Released {
    pub id: ObjectId,
    pub registration: Registration,
    /// The refs in its value. They must be registered before its owner may let go of them.
    pub contained: Vec<ObjectId>,
}

/// The objects of a process.
#[derive(Default)]
pub(crate) struct ObjectTable {
    /// Each while anybody needs it.
    objects: DashMap<ObjectId, Arc<Object>>,
    /// What each borrower holds, so that its death is cheap to act on.
    borrowed_by: DashMap<ProcessId, HashSet<ObjectId>>,
    /// Objects with a copy at each node, so that its death is cheap to act on.
    stored_at: DashMap<NodeId, HashSet<ObjectId>>,
    /// The most objects at a time since memory was given back, as far as samples tell.
    peak: AtomicUsize,
    /// Why the session is over, once it is: an object that is entered later is this error from the start.
    ended: OnceLock<Error>,
}

/// One of so many objects is looked at to know how many there are.
const SAMPLE: u64 = 4_096;
/// From so many on it is worth giving memory back.
const MANY: usize = 1 << 16;

/// Always in the same order, so that a simulated run can be had again.
pub(super) fn sorted(ids: HashSet<ObjectId>) -> Vec<ObjectId> {
    let mut ids: Vec<ObjectId> = ids.into_iter().collect();
    ids.sort_unstable();
    ids
}

impl ObjectTable {
    /// A new object with its first handle.
    pub(crate) fn insert(&self, home: Arc<dyn Home>, id: ObjectId, producer: Option<Producer>) -> Handle {
        let handle = Handle::first(Object::new(id, producer, Registration::default(), Some(home)));
        self.enter(&handle);
        self.fail_if_ended(handle.object());
        handle
    }

    /// A new object that has its value already, with its first handle.
    pub(crate) fn insert_ready(
        &self,
        home: Arc<dyn Home>,
        id: ObjectId,
        value: ObjectValue,
        contained: Vec<Handle>,
    ) -> Handle {
        let handle = Handle::first(Object::ready(id, home, value, contained));
        self.enter(&handle);
        if let Some(error) = self.ended.get() {
            handle.object().conclude(error);
        }
        handle
    }

    fn enter(&self, handle: &Handle) {
        let id = handle.id();
        self.objects.insert(id, handle.object().clone());
        if id.task.seq.is_multiple_of(SAMPLE) {
            self.peak.fetch_max(self.objects.len(), Ordering::Relaxed);
        }
    }

    /// A handle to an object that is known, or is from now on (`true`). `register` is called under the table's lock, so
    /// that whoever finds the object finds it registered.
    pub(crate) fn handle(
        &self,
        home: Arc<dyn Home>,
        id: ObjectId,
        register: impl FnOnce() -> Registration,
    ) -> (Handle, bool) {
        let mut new = false;
        let entry = self.objects.entry(id).or_insert_with(|| {
            new = true;
            Arc::new(Object::new(id, None, register(), Some(home)))
        });
        let handle = Handle::more(&entry);
        drop(entry);
        if new {
            self.fail_if_ended(handle.object());
        }
        (handle, new)
    }

    /// A handle to an object that is known.
    pub(super) fn handle_of_known(&self, id: ObjectId) -> Option<Handle> {
        self.objects.get(&id).map(|entry| Handle::more(&entry))
    }

    /// Checked after the object is in the table: either [`ObjectTable::end`] was before, or [`ObjectTable::pending`]
    /// still finds the object.
    fn fail_if_ended(&self, object: &Object) {
        if let Some(error) = self.ended.get() {
            object.resolve(ObjectValue::Failed(Box::new(error.clone())), Vec::new());
        }
    }

    /// From now on nobody can wait for a new object. The first reason stands.
    pub(crate) fn end(&self, error: &Error) {
        let _ = self.ended.set(error.clone());
    }

    /// Why the session is over, if it is.
    pub(crate) fn ended(&self) -> Option<&Error> {
        self.ended.get()
    }

    /// The object, if it is known.
    pub(crate) fn get(&self, id: ObjectId) -> Option<Arc<Object>> {
        self.objects.get(&id).map(|entry| entry.clone())
    }

    /// Called after the last handle was dropped, or a borrower left.
    pub(crate) fn free_if_unneeded(&self, id: ObjectId, us: ProcessId) -> Freed {
        let removed = self.objects.remove_if(&id, |_, object| object.is_unneeded());
        let Some((_, object)) = removed else { return Freed::Kept };
        let (value, contained) = object.empty();
        if let Some(ObjectValue::Stored(stored)) = &value {
            self.not_stored(id, &stored.nodes);
        }
        if id.owner() == us || object.is_adopted() {
            drop_all(contained);
            return Freed::Owned(object, value);
        }
        let contained_ids = contained.iter().map(Handle::id).collect();
        let released = Released { id, registration: object.registration(), contained: contained_ids };
        drop_all(contained);
        Freed::Borrowed(object, released)
    }

    /// Copies of `id` are at these nodes.
    pub(crate) fn stored(&self, id: ObjectId, nodes: &[StoreNode]) {
        for holder in nodes {
            self.stored_at.entry(holder.node).or_default().insert(id);
        }
    }

    /// There are none (any more).
    pub(crate) fn not_stored(&self, id: ObjectId, nodes: &[StoreNode]) {
        for holder in nodes {
            self.stored_at.remove_if_mut(&holder.node, |_, objects| {
                objects.remove(&id);
                objects.is_empty()
            });
        }
    }

    /// Whether this very object can still be found.
    pub(crate) fn has(&self, object: &Object) -> bool {
        self.objects.get(&object.id()).is_some_and(|known| std::ptr::eq(&**known, object))
    }

    /// True once when most of many objects have been freed: the table then returns their memory. `id` is the object that was freed last.
    pub(crate) fn has_ebbed(&self, id: ObjectId) -> bool {
        if !id.task.seq.is_multiple_of(SAMPLE) {
            return false;
        }
        let (peak, left) = (self.peak.load(Ordering::Relaxed), self.objects.len());
        let ebbed = peak > MANY && left < peak / 8;
        // Only one of those that see it acts.
        ebbed && self.peak.compare_exchange(peak, left, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }

    /// Gives back the room that the table does not need.
    pub(crate) fn shrink(&self) {
        self.objects.shrink_to_fit();
        self.borrowed_by.shrink_to_fit();
    }

    /// `who` holds refs to `id`. None when the object is gone already.
    pub(crate) fn borrow(&self, id: ObjectId, who: ProcessId, number: Registration) -> Option<Arc<Object>> {
        let entry = self.objects.get(&id)?;
        entry.borrow(who, number);
        let object = entry.clone();
        drop(entry);
        self.borrowed_by.entry(who).or_default().insert(id);
        Some(object)
    }

    /// `who` no longer does, unless it has registered again; the object is to be looked at.
    pub(crate) fn unborrow(&self, id: ObjectId, who: ProcessId, number: Registration) {
        if self.objects.get(&id).is_some_and(|object| !object.unborrow(who, number)) {
            return;
        }
        if let Some(mut held) = self.borrowed_by.get_mut(&who) {
            held.remove(&id);
        }
    }

    /// Everything that `who` held; it holds nothing any more.
    pub(crate) fn forget_borrower(&self, who: ProcessId) -> Vec<ObjectId> {
        let held = self.borrowed_by.remove(&who).map(|(_, held)| held).unwrap_or_default();
        for id in &held {
            if let Some(object) = self.objects.get(id) {
                object.forget_borrower(who);
            }
        }
        sorted(held)
    }

    /// Objects that had a copy at this node, which is gone.
    pub(crate) fn take_stored_at(&self, node: NodeId) -> Vec<ObjectId> {
        let stored = self.stored_at.remove(&node).map(|(_, stored)| stored).unwrap_or_default();
        let mut stored = sorted(stored);
        stored.retain(|id| self.get(*id).is_some_and(|object| object.is_stored_at(node)));
        stored
    }

    /// Everything that the steward knows of.
    pub(super) fn shadowed(&self) -> Vec<Arc<Object>> {
        let mut shadowed: Vec<_> =
            self.objects.iter().filter(|entry| entry.is_shadowed()).map(|entry| entry.value().clone()).collect();
        shadowed.sort_unstable_by_key(|object| object.id());
        shadowed
    }

    /// Everything that is not ready.
    pub(crate) fn pending(&self) -> Vec<Arc<Object>> {
        self.objects.iter().filter(|entry| !entry.is_ready()).map(|entry| entry.value().clone()).collect()
    }

    /// Whether this holds of all objects.
    pub(super) fn all(&self, holds: impl Fn(&Object) -> bool) -> bool {
        self.objects.iter().all(|entry| holds(&entry))
    }

    /// Number of objects that somebody holds.
    pub(crate) fn len(&self) -> usize {
        self.objects.len()
    }

    #[cfg(test)]
    pub(crate) fn owned_by(&self, us: ProcessId) -> std::collections::BTreeSet<ObjectId> {
        self.objects.iter().map(|entry| *entry.key()).filter(|id| id.owner() == us).collect()
    }

    #[cfg(test)]
    pub(crate) fn what_is_left(&self) -> Vec<String> {
        let mut left: Vec<String> = self.objects.iter().map(|entry| entry.describe()).collect();
        let borrowed = self.borrowed_by.iter().filter(|held| !held.is_empty());
        left.extend(borrowed.map(|held| format!("borrowed by {}: {:?}", held.key(), held.value())));
        left.extend(self.stored_at.iter().map(|held| format!("stored at {}: {:?}", held.key(), held.value())));
        left
    }

    /// Takes everything out, at the end of the session. Whoever still has a ref can ask it.
    pub(crate) fn clear(&self, error: &Error) {
        let all: Vec<Arc<Object>> = self.objects.iter().map(|entry| entry.value().clone()).collect();
        self.objects.clear();
        for object in all {
            object.conclude(error);
        }
    }
}
