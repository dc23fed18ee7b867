//! The objects that this process owns or has borrowed, and the handles that count them.
//!
//! An object is in the table while anybody needs it: a handle in this process, a borrower (if this
//! process owns it), or a task in flight. Handles count by clone and drop. A count goes from zero to one
//! only under the table's lock, which is what makes looking an object up and dropping its last handle safe
//! against each other.

use std::collections::{BTreeSet, HashSet};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, Waker};

use dashmap::DashMap;
use parking_lot::Mutex;
use smallvec::SmallVec;
use wingbeat_core::error::Error;
use wingbeat_core::value::{ObjectValue, StoreNode};
use wingbeat_core::{ActorId, NodeId, ObjectId, ProcessId};

use crate::lineage::Recipe;
use crate::session::Session;

/// Names a waiter of an object, so that one who does not wait any more can be forgotten.
pub(crate) type Place = u64;

/// What to do when an object becomes ready.
pub(crate) enum Waiter {
    /// Wake whoever polls.
    Waker(Waker),
    /// One of the arguments of a call is there.
    Dependent(Arc<dyn Fn() + Send + Sync>),
}

impl Waiter {
    fn call(self) {
        match self {
            Waiter::Waker(waker) => waker.wake(),
            Waiter::Dependent(then) => then(),
        }
    }
}

#[derive(Default)]
struct State {
    value: Option<ObjectValue>,
    waiters: SmallVec<[(Place, Waiter); 1]>,
    /// The place of the latest waiter.
    latest: Place,
    /// Processes that hold refs. A set, not a number, so that telling twice does no harm.
    borrowers: BTreeSet<ProcessId>,
    /// Borrowers that asked to be told.
    subscribers: BTreeSet<ProcessId>,
    /// Handles of the refs inside the value: they live as long as it does.
    contained: Vec<Handle>,
    /// Whether this process asked the owner to be told.
    subscribed: bool,
    /// How to make the value again, if it is stored and a task of ours made it.
    recipe: Option<Arc<Recipe>>,
}

impl State {
    fn add(&mut self, waiter: Waiter) -> Place {
        self.latest += 1;
        self.waiters.push((self.latest, waiter));
        self.latest
    }
}

/// What the loss of copies means for an object of ours.
pub(crate) enum Loss {
    /// There are others, or it is not stored.
    None,
    /// They were the last: it has no value any more. Here is how to make it again.
    All(Option<Arc<Recipe>>),
}

/// An object that is owned or borrowed here.
pub struct Object {
    id: ObjectId,
    /// The actor that the call which makes it was sent to.
    producer: Option<ActorId>,
    handles: AtomicU32,
    /// Whether there is a value, for who only asks that.
    ready: AtomicBool,
    state: Mutex<State>,
}

/// What is to be done after an object became ready.
#[derive(Default)]
pub(crate) struct Announce {
    /// Borrowers to tell.
    pub subscribers: Vec<ProcessId>,
}

impl Object {
    fn new(id: ObjectId, producer: Option<ActorId>) -> Object {
        Object { id, producer, handles: AtomicU32::new(0), ready: AtomicBool::new(false), state: Mutex::default() }
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
        let mine = state.waiters.iter_mut().find(|(known, _)| Some(*known) == *place);
        match mine {
            Some((_, Waiter::Waker(waker))) => waker.clone_from(cx.waker()),
            _ => *place = Some(state.add(Waiter::Waker(cx.waker().clone()))),
        }
        Poll::Pending
    }

    /// Calls `then` when the object is ready; answers with nothing, and does not call it, if it is already.
    pub(crate) fn when_ready(&self, then: &Arc<dyn Fn() + Send + Sync>) -> Option<Place> {
        let mut state = self.state.lock();
        if state.value.is_some() {
            return None;
        }
        Some(state.add(Waiter::Dependent(then.clone())))
    }

    /// Whoever had this place does not wait any more.
    pub(crate) fn forget(&self, place: Place) {
        let mut state = self.state.lock();
        let at = state.waiters.iter().position(|(known, _)| *known == place);
        let forgotten = at.map(|at| state.waiters.swap_remove(at));
        drop(state);
        drop(forgotten);
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
        state.contained = contained;
        let waiters = std::mem::take(&mut state.waiters);
        let subscribers = std::mem::take(&mut state.subscribers);
        drop(state);
        waiters.into_iter().for_each(|(_, waiter)| waiter.call());
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
        let given_up = (std::mem::take(&mut state.contained), state.recipe.take());
        let waiters = std::mem::take(&mut state.waiters);
        drop(state);
        drop(given_up);
        waiters.into_iter().for_each(|(_, waiter)| waiter.call());
    }

    pub(crate) fn recipe(&self) -> Option<Arc<Recipe>> {
        self.state.lock().recipe.clone()
    }

    pub(crate) fn set_recipe(&self, recipe: Arc<Recipe>) {
        let old = self.state.lock().recipe.replace(recipe);
        drop(old);
    }

    /// There are no copies at these nodes (any more). Answers also with those that were said to be there.
    pub(crate) fn lose(&self, at: &[NodeId]) -> (Loss, Vec<StoreNode>) {
        let mut state = self.state.lock();
        let Some(ObjectValue::Stored(stored)) = &mut state.value else { return (Loss::None, Vec::new()) };
        let (gone, left) = std::mem::take(&mut stored.nodes).into_iter().partition(|holder| at.contains(&holder.node));
        stored.nodes = left;
        if !stored.nodes.is_empty() {
            return (Loss::None, gone);
        }
        state.value = None;
        self.ready.store(false, Ordering::Release);
        let contained = std::mem::take(&mut state.contained);
        let recipe = state.recipe.clone();
        drop(state);
        drop(contained);
        (Loss::All(recipe), gone)
    }

    /// As [`Object::lose`], for an object that is borrowed: without copies, its owner is to be asked again.
    pub(crate) fn forget_copies(&self, at: &[NodeId]) {
        if let (Loss::All(_), _) = self.lose(at) {
            self.state.lock().subscribed = false;
        }
    }

    fn is_stored_at(&self, node: NodeId) -> bool {
        match &self.state.lock().value {
            Some(ObjectValue::Stored(stored)) => stored.nodes.iter().any(|holder| holder.node == node),
            _ => false,
        }
    }

    /// Changes where copies are.
    pub(crate) fn update_stored(&self, change: impl FnOnce(&mut wingbeat_core::value::Stored)) {
        if let Some(ObjectValue::Stored(stored)) = &mut self.state.lock().value {
            change(stored);
        }
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
            state.subscribers.insert(who);
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
        let task = wingbeat_core::TaskId { owner: ProcessId(0), seq: 0 };
        let object = Object::new(task.output(0), None);
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
    Borrowed,
}

/// The objects of a process.
#[derive(Default)]
pub(crate) struct ObjectTable {
    objects: DashMap<ObjectId, Arc<Object>>,
    /// What each borrower holds, so that its death is cheap to act on.
    borrowed_by: DashMap<ProcessId, HashSet<ObjectId>>,
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
        let object = Object::new(id, producer);
        object.handles.store(1, Ordering::Relaxed);
        let object = Arc::new(object);
        self.objects.insert(id, object.clone());
        if id.task.seq.is_multiple_of(SAMPLE) {
            self.peak.fetch_max(self.objects.len(), Ordering::Relaxed);
        }
        self.fail_if_ended(&object);
        Handle { object, session: Some(session.clone()) }
    }

    /// A handle to an object that is known, or is borrowed from now on (`true`).
    pub(crate) fn handle(&self, session: &Session, id: ObjectId) -> (Handle, bool) {
        let mut new = false;
        let entry = self.objects.entry(id).or_insert_with(|| {
            new = true;
            Arc::new(Object::new(id, None))
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
            object.handles.load(Ordering::Acquire) == 0 && object.state.lock().borrowers.is_empty()
        });
        match removed {
            None => Freed::Kept,
            Some((_, object)) if id.owner() == us => {
                let mut state = object.state.lock();
                let contained = std::mem::take(&mut state.contained);
                let value = state.value.take();
                let recipe = state.recipe.take();
                drop(state);
                drop((contained, recipe));
                Freed::Owned(value)
            }
            Some(_) => Freed::Borrowed,
        }
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
    pub(crate) fn borrow(&self, id: ObjectId, who: ProcessId) -> bool {
        let Some(object) = self.objects.get(&id) else { return false };
        object.state.lock().borrowers.insert(who);
        drop(object);
        self.borrowed_by.entry(who).or_default().insert(id);
        true
    }

    /// `who` no longer does; the object is to be looked at.
    pub(crate) fn unborrow(&self, id: ObjectId, who: ProcessId) {
        if let Some(object) = self.objects.get(&id) {
            let mut state = object.state.lock();
            state.borrowers.remove(&who);
            state.subscribers.remove(&who);
        }
        if let Some(mut held) = self.borrowed_by.get_mut(&who) {
            held.remove(&id);
        }
    }

    /// Everything that `who` held; it holds nothing any more.
    pub(crate) fn forget_borrower(&self, who: ProcessId) -> Vec<ObjectId> {
        let held = self.borrowed_by.remove(&who).map(|(_, held)| held).unwrap_or_default();
        let held: Vec<ObjectId> = held.into_iter().collect();
        for id in &held {
            self.unborrow(*id, who);
        }
        held
    }

    /// Objects of an owner that is gone and whose value is not known here.
    pub(crate) fn pending_of(&self, owner: ProcessId) -> Vec<Arc<Object>> {
        self.objects
            .iter()
            .filter(|entry| entry.key().owner() == owner && !entry.is_ready())
            .map(|entry| entry.value().clone())
            .collect()
    }

    /// Objects with a copy at this node.
    pub(crate) fn stored_at(&self, node: NodeId) -> Vec<ObjectId> {
        self.objects.iter().filter(|entry| entry.is_stored_at(node)).map(|entry| *entry.key()).collect()
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
