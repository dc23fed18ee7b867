//! What a process owns and waits for: a state machine without connections, clocks or threads of its own.
//!
//! An [`Owner`] counts objects and refs, decides which task goes to which lease and which call to which actor, makes lost
//! objects again, and keeps the items of streams. Whatever it wants done beyond its own memory it asks of an [`Outside`]:
//! a process does that over connections, and a test or a simulation writes it down.
//!
//! Many threads use one owner at once: users' threads submit and drop handles, and the IO thread takes in what others say. So
//! it has no single entrance, but small locks of its own, none of which is held while user code runs. What is said to an [`Outside`] is
//! said after them, but for registrations (`borrows`), which leave in the order of their numbers.
//!
//! - Objects: [`object`], [`table`], `waiters`, `worklist` (freeing what is nested deeply); `objects` and `borrows` (what becomes of
//!   them), `borrowing` (the protocol that counts refs across processes), `leftovers`.
//! - `actors`: those whose handles are held here, and those that were made here.
//! - Tasks and calls: `outbound`, `unresolved`, `resolving` (arguments that are not there yet), [`submission`], `timeouts`,
//!   `dispatch`, `calls` (the decisions), `retrying` (which errors are tried again), `results`; `recipe`, `lineage` (making lost objects again);
//!   `streams`, `items`; `locality` (tasks go to their data); `resting` (tasks that were ended for want of memory).
//! - `shadows`: what the steward of the node is told of objects that others refer to; `adoption`: how a steward answers for them when
//!   their owner is no more; `leaving`: an owner that ends in order.
//! - `messages`: what other processes say; `rejoining`: what a head that was started again is told; `standing`: what a task waits for.

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use wingbeat_core::error::Error;
use wingbeat_core::spec::Address;
use wingbeat_core::value::{ObjectValue, Packed, StoreNode};
use wingbeat_core::{ClusterId, ObjectId, ProcessId, TaskId};
use wingbeat_net::messages::{HeadMessage, PeerMessage, Registration};

use crate::owner::actors::Actors;
use crate::owner::adoption::Adoptions;
use crate::owner::leftovers::Leftovers;
use crate::owner::object::{Handle, Home, Object, Producer};
use crate::owner::recipe::Lineage;
use crate::owner::registrations::Registrations;
use crate::owner::streams::Streams;
use crate::owner::submission::Submission;
use crate::owner::table::{ObjectTable, Released};

mod actors;
mod adoption;
pub(crate) mod argument_bytes;
mod borrowing;
pub(crate) mod borrows;
mod call_queue;
pub(crate) mod calls;
pub(crate) mod dispatch;
mod items;
mod leaving;
mod leftovers;
mod lineage;
pub(crate) mod locality;
pub(crate) mod memory_retries;
mod messages;
pub(crate) mod name;
pub(crate) mod object;
pub(crate) mod objects;
pub(crate) mod outbound;
mod recipe;
mod registrations;
mod rejoining;
mod resolving;
pub(crate) mod resting;
mod results;
pub(crate) mod retrying;
mod shadows;
mod standing;
pub(crate) mod streams;
pub(crate) mod submission;
pub(crate) mod table;
mod timeouts;
mod unresolved;
pub(crate) mod waiters;
mod wanted;
mod worklist;

/// What an [`Owner`] has others do. Nothing here may wait, or call the owner back before it has answered.
pub(crate) trait Outside: Any + Send + Sync {
    /// Milliseconds of a clock that only goes forward.
    fn now_ms(&self) -> u64;
    /// Remembers where a process is.
    fn learn(&self, address: &Address);
    /// There is something for this process to run: [`Owner::take_home`].
    fn has_work_at_home(&self);
    /// Where a process is, as far as anybody has said.
    fn address_of(&self, process: ProcessId) -> Option<Address>;
    /// Whether it is certain that a process has ended.
    fn is_gone(&self, process: ProcessId) -> bool;
    /// Says something to a process, after all that was said to it before. False when it is gone.
    fn send(&self, owner: &Arc<Owner>, to: &Address, message: PeerMessage) -> bool;
    /// The same by id; false also when nobody knows where it is. In a hurry, somebody waits for the answer.
    fn send_to(&self, owner: &Arc<Owner>, to: ProcessId, message: PeerMessage, in_a_hurry: bool) -> bool;
    /// Whether somebody answers for the objects of a process that is gone. What is said to that about them is said to its steward.
    fn has_steward(&self, gone: ProcessId) -> bool;
    /// Those who are gone and whose steward this is.
    fn left_to(&self, steward: ProcessId) -> Vec<ProcessId>;
    /// Says something to the steward of this process's node, after all that was said to it before. False if there is none.
    fn tell_steward(&self, owner: &Arc<Owner>, message: PeerMessage) -> bool;
    /// Has [`Owner::let_go_of`] called when whoever holds an object of a process that has ended has had time to say so.
    fn keeps_for_a_while(&self, owner: &Arc<Owner>, gone: ProcessId);
    /// Has [`Owner::registered`] called when a process has taken in all that was said to it so far. False when there is no
    /// contact with it.
    fn when_taken_in(&self, owner: &Arc<Owner>, by: ProcessId, number: Registration) -> bool;
    /// What the system has said, while this process can open no connection to others for want of descriptors.
    fn lacks_descriptors(&self) -> Option<String>;
    /// Whether there is contact with the head now.
    fn has_head(&self) -> bool;
    /// Says something to the head.
    fn tell_head(&self, owner: &Arc<Owner>, message: HeadMessage);
    /// Has a node delete its copy of an object.
    fn delete_at(&self, owner: &Arc<Owner>, at: &StoreNode, object: ObjectId);
    /// Runs user code after all that was given here before, on a thread where it may take its time. Drops it where it cannot run.
    fn run(&self, code: Box<dyn FnOnce() + Send>);
    /// Many objects were freed, and the rest of them will be in a moment: memory can be given back then.
    fn has_ebbed(&self, owner: &Arc<Owner>);
}

/// What one process owns, has borrowed, and has asked others for: a field for each kind, most with a type, a file and locks of their own.
/// After [`Owner::end`] nothing waits, and after [`Owner::clear`] nothing is held.
pub(crate) struct Owner {
    pub id: ProcessId,
    pub cluster: ClusterId,
    /// Does what is decided here.
    pub outside: Arc<dyn Outside>,
    /// Owned and borrowed objects, until nobody needs them.
    pub objects: ObjectTable,
    /// What is registered with other owners, until its release is sent.
    pub registrations: Registrations,
    /// Tasks and calls, until they are done.
    pub submission: Submission,
    /// Streams that are consumed here, until their handles are dropped.
    pub streams: Streams,
    /// Actors whose handles somebody here holds, until those are freed.
    pub actors: Actors,
    /// What all recipes hold together.
    lineage: Lineage,
    /// Copies that do not count, until they are deleted.
    leftovers: Leftovers,
    /// What this process answers for when the owners are no more, if it is a steward.
    adoptions: Adoptions,
    /// Borrowed objects that nobody here holds any more, until [`Owner::release`] has reported them.
    released: UnboundedSender<Released>,
    /// The number of the next task or put.
    next: AtomicU64,
}

impl Owner {
    /// An owner of nothing. Whoever made it is to call [`Owner::release`] with what the answer's second half receives, and
    /// [`Owner::take_requests`] when [`Submission::wake`] is notified or time has passed.
    pub(crate) fn new(
        id: ProcessId,
        cluster: ClusterId,
        outside: Arc<dyn Outside>,
    ) -> (Arc<Owner>, UnboundedReceiver<Released>) {
        let (released, to_release) = unbounded_channel();
        let owner = Owner {
            id,
            cluster,
            outside,
            objects: ObjectTable::default(),
            registrations: Registrations::default(),
            submission: Submission::default(),
            streams: Streams::default(),
            actors: Actors::default(),
            lineage: Lineage::default(),
            leftovers: Leftovers::default(),
            adoptions: Adoptions::default(),
            released,
            next: AtomicU64::new(1),
        };
        (Arc::new(owner), to_release)
    }

    /// Whose object this handle counts; none for a call that failed before it had a session.
    pub(crate) fn of(handle: &Handle) -> Option<Arc<Owner>> {
        Owner::of_object(handle.object())
    }

    /// Whose object this is; none for a call that failed before it had a session.
    pub(crate) fn of_object(object: &Object) -> Option<Arc<Owner>> {
        let home: Arc<dyn Any + Send + Sync> = object.home()?.clone();
        home.downcast().ok()
    }

    /// Whether this process answers for an object: it is its own, or its owner is no more.
    pub(crate) fn owns(&self, object: &Object) -> bool {
        object.id().owner() == self.id || object.is_adopted()
    }

    /// The next number of this process, for a task or a put.
    pub(crate) fn next_task(&self) -> TaskId {
        TaskId { owner: self.id, seq: self.next.fetch_add(1, Ordering::Relaxed) }
    }

    /// All tasks so far have lower numbers.
    pub(crate) fn next_number(&self) -> u64 {
        self.next.load(Ordering::Relaxed)
    }

    /// A new object of ours, with its first handle.
    pub(crate) fn new_object(self: &Arc<Self>, id: ObjectId, producer: Option<Producer>) -> Handle {
        self.objects.insert(self.clone(), id, producer)
    }

    /// A new object of ours that is this value, with its first handle. `contained` are the refs in it.
    pub(crate) fn new_inline(self: &Arc<Self>, value: Packed, contained: Vec<Handle>) -> Handle {
        let id = self.next_task().output(0);
        self.objects.insert_ready(self.clone(), id, ObjectValue::Inline(value), contained)
    }

    #[cfg(test)]
    pub(crate) fn has_no_leftovers(&self) -> bool {
        self.leftovers.is_empty()
    }

    /// Whether the process can end without anybody's loss: nobody can ask for what it owns, and nothing runs for it.
    pub(crate) fn is_done(&self) -> bool {
        let nothing_runs = self.submission.look(|dispatch, calls| dispatch.is_done() && calls.is_done());
        nothing_runs && self.objects.len() == 0
    }

    /// What is not done, waited for or held, in words. Nothing, if whoever uses this owner is done with it.
    #[cfg(test)]
    pub(crate) fn what_is_left(&self) -> Vec<String> {
        let mut left = self.objects.what_is_left();
        left.extend(self.submission.what_is_left());
        left.extend(self.registrations.what_is_left());
        left.extend(self.streams.what_is_left());
        left.extend(self.actors.what_is_left());
        if !self.leftovers.is_empty() {
            left.push("leftovers".into());
        }
        left.extend(self.adoptions.what_is_left());
        left
    }

    /// Why nothing is taken any more, once the session is over.
    pub(crate) fn ended(&self) -> Option<&Error> {
        self.objects.ended()
    }

    /// Why nothing is taken any more; to be asked when it is over.
    pub(crate) fn over_error(&self) -> Error {
        self.ended().cloned().unwrap_or_else(|| Error::SessionEnded { why: "it was shut down".into() })
    }

    /// Fails everything that is pending; nothing new is taken. Only the first reason counts.
    pub(crate) fn end(self: &Arc<Self>, error: &Error) {
        // First, so that what another thread is submitting right now fails too: whatever it enters from here on fails at
        // once, and what it has entered before is found below.
        self.objects.end(error);
        let error = self.over_error();
        self.end_submissions(&error);
        self.streams.end(&error);
        for object in self.objects.pending() {
            self.resolve_object(&object, ObjectValue::Failed(Box::new(error.clone())), Vec::new());
        }
    }

    /// Lets go of everything, after the end. Small values that are here can still be read.
    pub(crate) fn clear(&self) {
        self.submission.close();
        self.actors.clear();
        self.objects.clear(&self.over_error());
    }

    fn send_to(self: &Arc<Self>, to: ProcessId, message: PeerMessage) -> bool {
        self.outside.send_to(self, to, message, false)
    }

    fn tell_head(self: &Arc<Self>, message: HeadMessage) {
        self.outside.tell_head(self, message);
    }

    fn delete_at(self: &Arc<Self>, at: &StoreNode, id: ObjectId) {
        self.outside.delete_at(self, at, id);
    }
}

impl Home for Owner {
    fn unreferenced(self: Arc<Self>, object: &Object) {
        self.free_if_unneeded(object.id());
    }
}
