//! One object that this process owns or has borrowed, and the handles that count it.

use std::any::Any;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::task::{Context, Poll};

use parking_lot::Mutex;
use smallvec::SmallVec;
use wingbeat_core::error::Error;
use wingbeat_core::value::{ObjectValue, StoreNode};
use wingbeat_core::{ActorId, NodeId, ObjectId, ProcessId};
use wingbeat_net::messages::Registration;

use crate::owner::borrowing::Borrowers;
use crate::owner::recipe::Recipe;
use crate::owner::waiters::{Place, Waiters};
use crate::owner::worklist::{self, Step};

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

/// Whoever keeps an object for its handles.
pub(crate) trait Home: Any + Send + Sync {
    /// The last handle of the object was dropped.
    fn unreferenced(self: Arc<Self>, object: &Object);
}

/// An object that is owned or borrowed here. What each clone and drop of a handle touches lies together, behind the counts of
/// its [`Arc`]: with 10,000 refs in a value, each further cache line shows.
#[repr(C)]
pub(crate) struct Object {
    handles: AtomicU32,
    /// Whether there is a value, for who only asks that.
    ready: AtomicBool,
    /// Whether the steward of this process's node knows of it.
    is_shadowed: AtomicBool,
    /// Whether its owner is no more, and this process answers for it.
    is_adopted: AtomicBool,
    /// Whether it is what an actor's handles count: it is looked up among the actors when it is freed.
    is_an_actors: AtomicBool,
    id: ObjectId,
    /// What makes it, if that is a call.
    producer: Option<Producer>,
    /// With its owner, if it is borrowed.
    registration: Registration,
    /// None for a call that failed before it had a session.
    home: Option<Arc<dyn Home>>,
    state: Mutex<State>,
}

/// A call of an actor, as what makes an object.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Producer {
    /// The actor that it was sent to.
    pub actor: ActorId,
    /// Its concurrency group; empty for the default one.
    pub group: &'static str,
}

/// What is to be done after an object became ready.
#[derive(Default)]
pub(crate) struct Announce {
    /// Borrowers to tell.
    pub subscribers: Vec<ProcessId>,
}

impl Object {
    pub(super) fn new(
        id: ObjectId,
        producer: Option<Producer>,
        registration: Registration,
        home: Option<Arc<dyn Home>>,
    ) -> Object {
        Object::of(id, producer, registration, home, State::default())
    }

    /// One of ours that has its value from the start. `contained` are the refs in it.
    pub(super) fn ready(id: ObjectId, home: Arc<dyn Home>, value: ObjectValue, contained: Vec<Handle>) -> Object {
        let ties = (!contained.is_empty()).then(|| Box::new(Ties { contained, ..Ties::default() }));
        let state = State { value: Some(value), ties, ..State::default() };
        Object::of(id, None, Registration::default(), Some(home), state)
    }

    fn of(
        id: ObjectId,
        producer: Option<Producer>,
        registration: Registration,
        home: Option<Arc<dyn Home>>,
        state: State,
    ) -> Object {
        Object {
            handles: AtomicU32::new(0),
            ready: AtomicBool::new(state.value.is_some()),
            is_shadowed: AtomicBool::new(false),
            is_adopted: AtomicBool::new(false),
            is_an_actors: AtomicBool::new(false),
            id,
            producer,
            registration,
            home,
            state: Mutex::new(state),
        }
    }

    /// Whether the steward is told of what becomes of it.
    pub(super) fn is_shadowed(&self) -> bool {
        self.is_shadowed.load(Ordering::Acquire)
    }

    /// The steward is told of it from now on. False if it is already.
    pub(super) fn begin_shadow(&self) -> bool {
        !self.is_shadowed() && !self.is_shadowed.swap(true, Ordering::AcqRel)
    }

    /// Whether its owner is no more, and this process answers for it.
    pub(super) fn is_adopted(&self) -> bool {
        self.is_adopted.load(Ordering::Acquire)
    }

    /// This process answers for it from now on.
    pub(super) fn adopt(&self) {
        self.is_adopted.store(true, Ordering::Release);
    }

    /// Whether it is what an actor's handles count.
    pub(super) fn is_an_actors(&self) -> bool {
        self.is_an_actors.load(Ordering::Acquire)
    }

    /// It is what an actor's handles count.
    pub(super) fn becomes_an_actors(&self) {
        self.is_an_actors.store(true, Ordering::Release);
    }

    pub(crate) fn id(&self) -> ObjectId {
        self.id
    }

    /// Who keeps it; none for a call that failed before it had a session.
    pub(crate) fn home(&self) -> Option<&Arc<dyn Home>> {
        self.home.as_ref()
    }

    pub(crate) fn producer(&self) -> Option<Producer> {
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

    /// Whether user code waits for it.
    pub(crate) fn is_awaited(&self) -> bool {
        let state = self.state.lock();
        state.value.is_none() && state.waiters.is_polled()
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

    /// If it has failed, it has not.
    pub(super) fn forget_failure(&self) {
        let mut state = self.state.lock();
        if matches!(state.value, Some(ObjectValue::Failed(_))) {
            state.value = None;
            self.ready.store(false, Ordering::Release);
        }
    }

    /// The session is over: a value that lies here stays readable, anything else becomes `error`. The refs inside the
    /// value are given up, since they hold the session.
    pub(super) fn conclude(&self, error: &Error) {
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

    /// Whether neither a handle here nor a borrower needs it. Under the table's lock.
    pub(super) fn is_unneeded(&self) -> bool {
        self.handles.load(Ordering::Acquire) == 0 && !self.state.lock().has_borrowers()
    }

    /// Takes everything out of an object that was freed: its value and the refs in it.
    pub(super) fn empty(&self) -> (Option<ObjectValue>, Vec<Handle>) {
        let mut state = self.state.lock();
        let value = state.value.take();
        let (contained, recipe) = state.take_held();
        drop(state);
        drop(recipe);
        (value, contained)
    }

    /// With its owner.
    pub(super) fn registration(&self) -> Registration {
        self.registration
    }

    /// `who` holds refs.
    pub(super) fn borrow(&self, who: ProcessId, number: Registration) {
        self.state.lock().ties().borrowers.borrow(who, number);
    }

    /// `who` does not any more. False if it has registered again since.
    pub(super) fn unborrow(&self, who: ProcessId, number: Registration) -> bool {
        let mut state = self.state.lock();
        let Some(ties) = &mut state.ties else { return true };
        if !ties.borrowers.release(who, number) {
            return false;
        }
        ties.subscribers.remove(&who);
        true
    }

    /// `who` is gone.
    pub(super) fn forget_borrower(&self, who: ProcessId) {
        if let Some(ties) = &mut self.state.lock().ties {
            ties.borrowers.forget(who);
            ties.subscribers.remove(&who);
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

    /// Whether the owner was asked, and has not answered.
    pub(super) fn is_asked_for(&self) -> bool {
        let state = self.state.lock();
        state.value.is_none() && state.subscribed
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

    #[cfg(test)]
    pub(super) fn describe(&self) -> String {
        let state = self.state.lock();
        let borrowers = state.ties.as_ref().map(|ties| format!("{:?}", ties.borrowers)).unwrap_or_default();
        let handles = self.handles.load(Ordering::Relaxed);
        format!("{} with {handles} handles, {borrowers}, {:?}", self.id, state.value)
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
}

impl Handle {
    /// The first handle of an object that nobody else has yet.
    pub(super) fn first(object: Object) -> Handle {
        object.handles.store(1, Ordering::Relaxed);
        Handle { object: Arc::new(object) }
    }

    /// One more handle of an object. Under the table's lock, if there may be none.
    pub(super) fn more(object: &Arc<Object>) -> Handle {
        object.handles.fetch_add(1, Ordering::Relaxed);
        Handle { object: object.clone() }
    }

    /// The object's id.
    pub fn id(&self) -> ObjectId {
        self.object.id
    }

    /// Whether its value, or the reason why there is none, is known.
    pub fn is_ready(&self) -> bool {
        self.object.is_ready()
    }

    /// What makes the value, if it is the result of a call which this process made.
    pub fn producer(&self) -> Option<Producer> {
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
        let object = Object::new(task.output(0), None, Registration::default(), None);
        object.resolve(ObjectValue::Failed(Box::new(error)), Vec::new());
        Handle::first(object)
    }

    pub(crate) fn object(&self) -> &Arc<Object> {
        &self.object
    }
}

impl Clone for Handle {
    fn clone(&self) -> Self {
        self.object.handles.fetch_add(1, Ordering::Relaxed);
        Handle { object: self.object.clone() }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        if self.object.handles.fetch_sub(1, Ordering::AcqRel) == 1
            && let Some(home) = &self.object.home
        {
            home.clone().unreferenced(&self.object);
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

/// Drops handles of which each may be the last one of an object that holds others.
pub(super) fn drop_all(handles: Vec<Handle>) {
    if !handles.is_empty() {
        worklist::take(Step::Drop(handles));
    }
}
