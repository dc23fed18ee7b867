//! The objects that this process owns or has borrowed, and the handles that count them.
//!
//! An object is in the table while anybody needs it: a handle in this process, a borrower (if this
//! process owns it), or a task in flight. Handles count by clone and drop. A count goes from zero to one
//! only under the table's lock, which is what makes looking an object up and dropping its last handle safe
//! against each other.

use std::collections::{BTreeSet, HashSet};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};

use dashmap::DashMap;
use parking_lot::Mutex;
use smallvec::SmallVec;
use wingbeat_core::error::Error;
use wingbeat_core::value::{ObjectValue, StoreNode};
use wingbeat_core::{ActorId, NodeId, ObjectId, ProcessId};
use wingbeat_net::messages::Registration;

use crate::borrowing::Borrowers;
use crate::lineage::Recipe;
use crate::session::Session;
use crate::waiters::{Place, Waiters};
use crate::worklist::{self, Step};

#[derive(Default)]
struct State {
    value: Option<ObjectValue>,
    waiters: Waiters,
    /// Whether this process asked the owner to be told.
    subscribed: bool,
    ties: Option<Box<Ties>>,
}

/// What ties an object to other processes and objects. Most results have none of it, and a process may have a million
/// objects.
#[derive(Default)]
struct Ties {
    /// Processes that hold refs.
    borrowers: Borrowers,
    /// Borrowers that asked to be told.
    subscribers: BTreeSet<ProcessId>,
    /// Handles of the refs inside the value. They live as long as the object, even if its value is lost and made again:
    /// whoever has read the first one may not have registered them yet.
    contained: Vec<Handle>,
    /// How to make the value again, if it is stored and a task of ours made it.
    recipe: Option<Arc<Recipe>>,
}

impl State {
    fn ties(&mut self) -> &mut Ties {
        self.ties.get_or_insert_default()
    }

    fn recipe(&self) -> Option<Arc<Recipe>> {
        self.ties.as_ref()?.recipe.clone()
    }

    fn has_borrowers(&self) -> bool {
        self.ties.as_ref().is_some_and(|ties| !ties.borrowers.is_empty())
    }

    /// Takes what the object holds. It is dropped outside the lock: each may be the last of something large.
    fn take_held(&mut self) -> (Vec<Handle>, Option<Arc<Recipe>>) {
        let Some(ties) = &mut self.ties else { return (Vec::new(), None) };
        (std::mem::take(&mut ties.contained), ties.recipe.take())
    }
}

/// What the loss of copies means for an object of ours.
pub(crate) enum Loss {
    /// There are others, or it is not stored.
    None,
    /// They were the last: it has no value any more. Here is how to make it again.
    All(Option<Arc<Recipe>>),
}

/// An object that is owned or borrowed here. What each clone and drop of a handle touches lies together, behind the counts of
/// its [`Arc`]: with 10,000 refs in a value, each further cache line shows.
#[repr(C)]
pub struct Object {
    handles: AtomicU32,
    /// Whether there is a value, for who only asks that.
    ready: AtomicBool,
    id: ObjectId,
    /// The actor that the call which makes it was sent to.
    producer: Option<ActorId>,
    /// With its owner, if it is borrowed.
    registration: Registration,
    state: Mutex<State>,
}

/// What is to be done after an object became ready.
#[derive(Default)]
pub(crate) struct Announce {
    /// Borrowers to tell.
    pub subscribers: Vec<ProcessId>,
}

impl Object {
    fn new(id: ObjectId, producer: Option<ActorId>, registration: Registration) -> Object {
        let (handles, ready) = (AtomicU32::new(0), AtomicBool::new(false));
        Object { id, producer, registration, handles, ready, state: Mutex::default() }
    }

    pub(crate) fn id(&self) -> ObjectId {
        self.id
    }

    pub(crate) fn producer(&self) -> Option<ActorId> {
        self.producer
    }

    pub(crate) fn value(&self) -> Option<ObjectValue> {
        self.state.lock().value.clone()
    }

    pub(crate) fn is_ready(&self) -> bool {
        self.ready.load(Ordering::Acquire)
    }

    /// Answers with the value, or has `cx` woken when it is there. Whoever stops waiting before that has its `place`
    /// forgotten.
    pub(crate) fn poll(&self, place: &mut Option<Place>, cx: &mut Context<'_>) -> Poll<ObjectValue> {
        let mut state = self.state.lock();
        if let Some(value) = &state.value {
            return Poll::Ready(value.clone());
        }
        let left = state.waiters.wake(place, cx);
        drop(state);
        drop(left);
        Poll::Pending
    }

    /// Calls `then` when the object is ready; answers with nothing, and does not call it, if it is already.
    pub(crate) fn when_ready(&self, then: &Arc<dyn Fn() + Send + Sync>) -> Option<Place> {
        let mut state = self.state.lock();
        if state.value.is_some() {
            return None;
        }
        Some(state.waiters.call(then))
    }

    /// Whoever had this place does not wait any more.
    pub(crate) fn forget(&self, place: Place) {
        let left = self.state.lock().waiters.forget(place);
        drop(left);
    }

    /// Sets the value unless there is one. The waiters are called after the lock is gone.
    pub(crate) fn resolve(&self, value: ObjectValue, contained: Vec<Handle>) -> Announce {
        let mut state = self.state.lock();
        if state.value.is_some() {
            // A second attempt's result; the first one stands. Its refs are dropped outside the lock.
            drop(state);
            drop(contained);
            return Announce::default();
        }
        state.value = Some(value);
        self.ready.store(true, Ordering::Release);
        if !contained.is_empty() {
            state.ties().contained.extend(contained);
        }
        let waiters = state.waiters.take();
        let subscribers = state.ties.as_mut().map(|ties| std::mem::take(&mut ties.subscribers)).unwrap_or_default();
        drop(state);
        waiters.call_all();
        Announce { subscribers: subscribers.into_iter().collect() }
    }

    /// The session is over: a value that lies here stays readable, anything else becomes `error`. The refs inside the
    /// value are given up, since they hold the session.
    fn conclude(&self, error: &Error) {
        let mut state = self.state.lock();
        if !matches!(state.value, Some(ObjectValue::Inline(_) | ObjectValue::Failed(_))) {
            state.value = Some(ObjectValue::Failed(Box::new(error.clone())));
        }
        self.ready.store(true, Ordering::Release);
        let (contained, recipe) = state.take_held();
        let waiters = state.waiters.take();
        drop(state);
        drop(recipe);
        drop_all(contained);
        waiters.call_all();
    }

    /// The value, if it is in shared memory. Of those who find that the object was freed, one gets it and deletes the copies.
    pub(crate) fn take_stored(&self) -> Option<wingbeat_core::value::Stored> {
        let mut state = self.state.lock();
        match state.value.take() {
            Some(ObjectValue::Stored(stored)) => Some(stored),
            other => {
                state.value = other;
                None
            }
        }
    }

    pub(crate) fn recipe(&self) -> Option<Arc<Recipe>> {
        self.state.lock().recipe()
    }

    pub(crate) fn set_recipe(&self, recipe: Arc<Recipe>) {
        let old = self.state.lock().ties().recipe.replace(recipe);
        drop(old);
    }

    /// There are no copies at these nodes (any more). Answers also with those that were said to be there.
    pub(crate) fn lose(&self, at: &[NodeId]) -> (Loss, Vec<StoreNode>) {
        self.lose_in(&mut self.state.lock(), at)
    }

    fn lose_in(&self, state: &mut State, at: &[NodeId]) -> (Loss, Vec<StoreNode>) {
        let Some(ObjectValue::Stored(stored)) = &mut state.value else { return (Loss::None, Vec::new()) };
        let (gone, left) = std::mem::take(&mut stored.nodes).into_iter().partition(|holder| at.contains(&holder.node));
        stored.nodes = left;
        if !stored.nodes.is_empty() {
            return (Loss::None, gone);
        }
        state.value = None;
        self.ready.store(false, Ordering::Release);
        (Loss::All(state.recipe()), gone)
    }

    /// As [`Object::lose`], for an object that is borrowed: without copies, its owner is to be asked again.
    pub(crate) fn forget_copies(&self, at: &[NodeId]) -> Vec<StoreNode> {
        // Under one lock: who reads in between would neither find the value nor ask for it.
        let mut state = self.state.lock();
        let (loss, gone) = self.lose_in(&mut state, at);
        if let Loss::All(_) = loss {
            state.subscribed = false;
        }
        gone
    }

    pub(crate) fn is_stored_at(&self, node: NodeId) -> bool {
        match &self.state.lock().value {
            Some(ObjectValue::Stored(stored)) => stored.nodes.iter().any(|holder| holder.node == node),
            _ => false,
        }
    }

    /// There is a copy there, too. False if there is no value in shared memory (any more).
    pub(crate) fn add_copy(&self, at: &StoreNode) -> bool {
        let Some(ObjectValue::Stored(stored)) = &mut self.state.lock().value else { return false };
        if !stored.nodes.iter().any(|known| known.node == at.node) {
            stored.nodes.push(at.clone());
        }
        true
    }

    /// Whether the owner is yet to be asked; afterwards it is not.
    pub(crate) fn must_subscribe(&self) -> bool {
        let mut state = self.state.lock();
        if state.value.is_some() || state.subscribed {
            return false;
        }
        state.subscribed = true;
        true
    }

    /// The value for `who`, or a promise to tell it later.
    pub(crate) fn subscribe(&self, who: ProcessId) -> Option<ObjectValue> {
        let mut state = self.state.lock();
        if state.value.is_none() {
            state.ties().subscribers.insert(who);
        }
        state.value.clone()
    }
}

/// Counts one use of an object in this process.
pub struct Handle {
    object: Arc<Object>,
    session: Option<Session>,
}

impl Handle {
    /// The object's id.
    pub fn id(&self) -> ObjectId {
        self.object.id
    }

    /// The session that the object belongs to; none for a call that failed before it had one.
    pub fn session(&self) -> Option<&Session> {
        self.session.as_ref()
    }

    /// Whether its value, or the reason why there is none, is known.
    pub fn is_ready(&self) -> bool {
        self.object.is_ready()
    }

    /// The actor that makes the value, if it is the result of a call which this process made.
    pub fn producer(&self) -> Option<ActorId> {
        self.object.producer()
    }

    /// Why there will be no value, if that is known.
    pub fn failure(&self) -> Option<Error> {
        match self.object.value() {
            Some(ObjectValue::Failed(error)) => Some(*error),
            _ => None,
        }
    }

    /// A handle to nothing but an error.
    pub fn failed(error: Error) -> Handle {
        // Each is another object, although nobody owns it.
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let task = wingbeat_core::TaskId { owner: ProcessId(0), seq: NEXT.fetch_add(1, Ordering::Relaxed) };
        let object = Object::new(task.output(0), None, Registration::default());
        object.resolve(ObjectValue::Failed(Box::new(error)), Vec::new());
        object.handles.store(1, Ordering::Relaxed);
        Handle { object: Arc::new(object), session: None }
    }

    pub(crate) fn object(&self) -> &Arc<Object> {
        &self.object
    }
}

impl Clone for Handle {
    fn clone(&self) -> Self {
        self.object.handles.fetch_add(1, Ordering::Relaxed);
        Handle { object: self.object.clone(), session: self.session.clone() }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        if self.object.handles.fetch_sub(1, Ordering::AcqRel) == 1
            && let Some(session) = &self.session
        {
            session.process().unreferenced(&self.object);
        }
    }
}

impl std::fmt::Debug for Handle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.object.id)
    }
}

/// Handles that keep what a task or call needs; mostly its actor's alone.
pub(crate) type Held = SmallVec<[Handle; 2]>;

/// What remained to be done for an object that nobody needs any more.
pub(crate) enum Freed {
    /// It is still needed.
    Kept,
    /// It was ours: here is its last value, whose stored copies are to be deleted.
    Owned(Option<ObjectValue>),
    /// It was borrowed: tell its owner.
    Borrowed(Released),
}

/// A borrowed object that nobody here holds any more.
pub(crate) struct Released {
    pub id: ObjectId,
    pub registration: Registration,
    /// The refs in its value. They must be registered before its owner may let go of them.
    pub contained: Vec<ObjectId>,
}

/// Drops handles of which each may be the last one of an object that holds others.
fn drop_all(handles: Vec<Handle>) {
    if !handles.is_empty() {
        worklist::take(Step::Drop(handles));
    }
}

/// The objects of a process.
#[derive(Default)]
pub(crate) struct ObjectTable {
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

impl ObjectTable {
    /// A new object with its first handle.
    pub(crate) fn insert(&self, session: &Session, id: ObjectId, producer: Option<ActorId>) -> Handle {
        let object = Object::new(id, producer, Registration::default());
        object.handles.store(1, Ordering::Relaxed);
        let object = Arc::new(object);
        self.objects.insert(id, object.clone());
        if id.task.seq.is_multiple_of(SAMPLE) {
            self.peak.fetch_max(self.objects.len(), Ordering::Relaxed);
        }
        self.fail_if_ended(&object);
        Handle { object, session: Some(session.clone()) }
    }

    /// A handle to an object that is known, or is from now on (`true`). `register` is called under the table's lock, so
    /// that whoever finds the object finds it registered.
    pub(crate) fn handle(
        &self,
        session: &Session,
        id: ObjectId,
        register: impl FnOnce() -> Registration,
    ) -> (Handle, bool) {
        let mut new = false;
        let entry = self.objects.entry(id).or_insert_with(|| {
            new = true;
            Arc::new(Object::new(id, None, register()))
        });
        entry.handles.fetch_add(1, Ordering::Relaxed);
        let object = entry.clone();
        drop(entry);
        if new {
            self.fail_if_ended(&object);
        }
        (Handle { object, session: Some(session.clone()) }, new)
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
        let removed = self.objects.remove_if(&id, |_, object| {
            object.handles.load(Ordering::Acquire) == 0 && !object.state.lock().has_borrowers()
        });
        let Some((_, object)) = removed else { return Freed::Kept };
        let mut state = object.state.lock();
        let value = state.value.take();
        let (contained, recipe) = state.take_held();
        drop(state);
        drop(recipe);
        if let Some(ObjectValue::Stored(stored)) = &value {
            self.not_stored(id, &stored.nodes);
        }
        if id.owner() == us {
            drop_all(contained);
            return Freed::Owned(value);
        }
        let released =
            Released { id, registration: object.registration, contained: contained.iter().map(Handle::id).collect() };
        drop_all(contained);
        Freed::Borrowed(released)
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
    pub(crate) fn has(&self, object: &Arc<Object>) -> bool {
        self.objects.get(&object.id).is_some_and(|known| Arc::ptr_eq(&known, object))
    }

    /// Whether, with `id`, most of many objects have been freed: then their memory is to be given back, once.
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

    /// `who` holds refs to `id`. False when the object is gone already.
    pub(crate) fn borrow(&self, id: ObjectId, who: ProcessId, number: Registration) -> bool {
        let Some(object) = self.objects.get(&id) else { return false };
        object.state.lock().ties().borrowers.borrow(who, number);
        drop(object);
        self.borrowed_by.entry(who).or_default().insert(id);
        true
    }

    /// `who` no longer does, unless it has registered again; the object is to be looked at.
    pub(crate) fn unborrow(&self, id: ObjectId, who: ProcessId, number: Registration) {
        if let Some(object) = self.objects.get(&id) {
            let mut state = object.state.lock();
            if let Some(ties) = &mut state.ties {
                if !ties.borrowers.release(who, number) {
                    return;
                }
                ties.subscribers.remove(&who);
            }
        }
        if let Some(mut held) = self.borrowed_by.get_mut(&who) {
            held.remove(&id);
        }
    }

    /// Everything that `who` held; it holds nothing any more.
    pub(crate) fn forget_borrower(&self, who: ProcessId) -> Vec<ObjectId> {
        let held = self.borrowed_by.remove(&who).map(|(_, held)| held).unwrap_or_default();
        for id in &held {
            if let Some(object) = self.objects.get(id)
                && let Some(ties) = &mut object.state.lock().ties
            {
                ties.borrowers.forget(who);
                ties.subscribers.remove(&who);
            }
        }
        held.into_iter().collect()
    }

    /// Objects that had a copy at this node, which is gone.
    pub(crate) fn take_stored_at(&self, node: NodeId) -> Vec<ObjectId> {
        let stored = self.stored_at.remove(&node).map(|(_, stored)| stored).unwrap_or_default();
        stored.into_iter().filter(|id| self.get(*id).is_some_and(|object| object.is_stored_at(node))).collect()
    }

    /// Everything that is not ready.
    pub(crate) fn pending(&self) -> Vec<Arc<Object>> {
        self.objects.iter().filter(|entry| !entry.is_ready()).map(|entry| entry.value().clone()).collect()
    }

    /// Number of objects that somebody holds.
    pub(crate) fn len(&self) -> usize {
        self.objects.len()
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
