//! What a worker process does with the work that it is sent.

use std::cell::Cell;
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;
use std::sync::Arc;
use std::task::Waker;

use wingbeat_core::error::Error;
use wingbeat_core::spec::{ActorSpec, Arg, Outcome, TaskResult, TaskSpec};
use wingbeat_core::value::ObjectValue;
use wingbeat_core::{Incarnation, LeaseId, ObjectId, ProcessId, TaskId};
use wingbeat_net::messages::PeerMessage;

use super::execution::{Ended, Execution, Shared};
use super::process::Process;
use crate::owner::object::Handle;

/// How long a forced cancel waits for owners to take in the results of other tasks.
const FORCED_LIMIT: u64 = 500;

/// The actor that a process is.
#[derive(Clone)]
pub(super) struct Being {
    pub spec: Arc<ActorSpec>,
    pub incarnation: Incarnation,
    pub has_begun: bool,
}

/// How many items of a stream its consumer has taken.
#[derive(Default)]
pub(super) struct Credit {
    pub taken: Cell<u32>,
    pub waker: Cell<Option<Waker>>,
}

/// What is to be begun.
pub(super) enum Next {
    Attempt { spec: Arc<TaskSpec>, lease: Option<LeaseId> },
    Become(Being),
}

#[derive(Default)]
pub(super) struct Queue {
    pub lease: Option<LeaseId>,
    owner: Option<ProcessId>,
    tasks: VecDeque<(ProcessId, LeaseId, u64, Arc<TaskSpec>)>,
    calls: VecDeque<Arc<TaskSpec>>,
    pub being: Option<Being>,
    pub running: Option<Rc<Execution>>,
    pub is_beginning: bool,
    waiting: u32,
    pub draining: bool,
    pub ended: bool,
    /// It is about to be killed, at this time at the latest: nothing is begun any more.
    pub killed_at: Option<u64>,
    /// As the head is told when the process dies.
    pub started: u64,
    /// Handles of refs in results and items, until the owner has registered them.
    pub returned: BTreeMap<TaskId, Vec<Handle>>,
    pub sent_items: BTreeMap<ObjectId, Vec<Handle>>,
    pub streams: BTreeMap<TaskId, Rc<Credit>>,
}

/// The objects that an argument refers to, itself included.
fn refs_of(arg: &Arg) -> impl Iterator<Item = &ObjectId> {
    let (itself, refs) = match arg {
        Arg::Value(packed) => (None, packed.refs.as_deref()),
        Arg::Stored(id, stored) => (Some(id), stored.refs.as_deref()),
        Arg::Ref(id, _) => (Some(id), None),
    };
    itself.into_iter().chain(refs.into_iter().flat_map(|refs| &refs.ids))
}

impl Process {
    /// Takes in a message: work, or what is for the owner.
    pub(super) fn take_in(&self, from: ProcessId, message: PeerMessage, shared: &Shared) {
        match message {
            PeerMessage::Tasks { lease, first, tasks } => {
                let mut queue = self.queue.borrow_mut();
                if queue.waiting > 0 || queue.lease != Some(lease) || queue.ended {
                    let back = tasks.iter().map(|task| task.id).collect();
                    return self.give_back(&queue, from, lease, back);
                }
                queue.owner = Some(from);
                queue.tasks.extend((first..).zip(tasks).map(|(number, spec)| (from, lease, number, spec)));
            }
            PeerMessage::Calls { actor, incarnation, calls } => {
                let mut queue = self.queue.borrow_mut();
                let is_ours = |being: &Being| being.spec.id == actor && being.incarnation == incarnation;
                if queue.being.as_ref().is_some_and(is_ours) {
                    if !queue.ended {
                        queue.calls.extend(calls);
                    }
                    return;
                }
                drop(queue);
                for spec in calls {
                    let cause = Box::new(Error::ActorEnded { by: "a restart".into() });
                    let error = Error::ActorUnavailable { actor, class: "actor".into(), cause };
                    self.answer(&spec, (Outcome::Failed(Box::new(error)), Vec::new()), 0);
                }
            }
            PeerMessage::TakeBack { lease, most } => {
                let mut queue = self.queue.borrow_mut();
                let of_lease = queue.tasks.iter().filter(|(_, of, ..)| *of == lease).count();
                let mut kept = of_lease.saturating_sub(most as usize);
                let mut back = Vec::new();
                queue.tasks.retain(|(_, of, _, spec)| {
                    if *of != lease {
                        return true;
                    }
                    if kept == 0 {
                        back.push(spec.id);
                        return false;
                    }
                    kept -= 1;
                    true
                });
                self.give_back(&queue, from, lease, back);
            }
            PeerMessage::Cancel { task, force } => self.cancel(task, force, shared),
            PeerMessage::StreamTaken { task, count } => {
                if let Some(credit) = self.queue.borrow().streams.get(&task) {
                    credit.taken.set(credit.taken.get().max(count));
                    if let Some(waker) = credit.waker.take() {
                        waker.wake();
                    }
                }
            }
            PeerMessage::ItemReceived(item) => drop(self.queue.borrow_mut().sent_items.remove(&item)),
            PeerMessage::Received(tasks) => {
                for task in tasks {
                    drop(self.queue.borrow_mut().returned.remove(&task));
                }
            }
            message => self.owner.hears(from, message),
        }
    }

    pub(super) fn say(&self, to: ProcessId, message: PeerMessage) -> bool {
        self.owner.outside.send_to(&self.owner, to, message, false)
    }

    fn give_back(&self, queue: &Queue, owner: ProcessId, lease: LeaseId, tasks: Vec<TaskId>) {
        let waiting = queue.waiting > 0 || queue.lease != Some(lease) || queue.ended;
        self.say(owner, PeerMessage::GaveBack { lease, tasks, waiting });
    }

    /// What can begin now.
    pub(super) fn next(&self) -> Option<Next> {
        let mut queue = self.queue.borrow_mut();
        if queue.ended || queue.killed_at.is_some() || queue.running.is_some() || queue.is_beginning {
            return None;
        }
        if let Some(being) = &mut queue.being {
            if !being.has_begun {
                being.has_begun = true;
                let being = being.clone();
                queue.started = 1;
                queue.is_beginning = true;
                return Some(Next::Become(being));
            }
            let lease = queue.lease;
            if let Some(spec) = queue.calls.pop_front() {
                return Some(Next::Attempt { spec, lease });
            }
            queue.ended = queue.draining;
            return None;
        }
        let (_, lease, number, spec) = queue.tasks.pop_front()?;
        queue.started = number + 1;
        Some(Next::Attempt { spec, lease: Some(lease) })
    }

    /// What runs has ended.
    pub(super) fn done(&self, execution: &Rc<Execution>, ended: Ended, shared: &Shared) {
        let is_of_attempt = matches!(ended.0, Outcome::Failed(_) | Outcome::StreamEnded(_));
        if !(execution.is_disowned.get() && is_of_attempt) {
            let ran_nanos = (shared.now() - execution.began) * 1_000_000 + 1_000;
            self.answer(&execution.spec, ended, ran_nanos);
        }
        let running = self.queue.borrow_mut().running.take();
        assert!(running.is_some_and(|running| Rc::ptr_eq(&running, execution)), "something else runs");
    }

    /// Sends a result, after the refs in the arguments that are still held here are registered.
    fn answer(&self, spec: &TaskSpec, (outcome, held): Ended, ran_nanos: u64) {
        let result = TaskResult { id: spec.id, attempt: spec.attempt, outcome, ran_nanos };
        let owner = spec.id.owner;
        let holds = !held.is_empty();
        if holds {
            let before = self.queue.borrow_mut().returned.insert(spec.id, held);
            drop(before);
        }
        let message = PeerMessage::Results(vec![result]);
        if spec.args.iter().all(|arg| matches!(arg, Arg::Value(packed) if packed.refs.is_none())) {
            self.say(owner, message);
        } else {
            self.owner.confirm(owner, spec.args.iter().flat_map(refs_of), message);
        }
        if holds && !self.side.can_reach(owner) {
            drop(self.queue.borrow_mut().returned.remove(&spec.id));
        }
    }

    pub(super) fn send_item(&self, task: TaskId, index: u32, value: ObjectValue, held: Vec<Handle>) {
        let (item, holds) = (task.output(index), !held.is_empty());
        if holds {
            let before = self.queue.borrow_mut().sent_items.insert(item, held);
            drop(before);
        }
        self.say(task.owner, PeerMessage::StreamItem { task, index, value });
        if holds && !self.side.can_reach(task.owner) {
            drop(self.queue.borrow_mut().sent_items.remove(&item));
        }
    }

    fn cancel(&self, task: TaskId, force: bool, shared: &Shared) {
        let mut queue = self.queue.borrow_mut();
        let queued = queue.tasks.iter().position(|(_, _, _, spec)| spec.id == task);
        let mut taken = queued.and_then(|at| queue.tasks.remove(at)).map(|(_, _, _, spec)| spec);
        if let Some(at) = queue.calls.iter().position(|spec| spec.id == task) {
            taken = queue.calls.remove(at);
        }
        let running = queue.running.clone().filter(|running| running.spec.id == task);
        drop(queue);
        if let Some(spec) = taken {
            let error = Error::Cancelled { task: task.to_string() };
            self.answer(&spec, (Outcome::Failed(Box::new(error)), Vec::new()), 0);
        }
        if let Some(execution) = running {
            if force {
                // What else was finished here is handed over first.
                self.queue.borrow_mut().killed_at = Some(shared.now() + FORCED_LIMIT);
                return;
            }
            self.owner.cancel_children(task);
            execution.cancel(shared);
        }
    }

    /// Contact with a process was lost: what runs for it is pointless.
    pub(super) fn peer_lost(&self, peer: ProcessId, shared: &Shared) {
        let mut queue = self.queue.borrow_mut();
        queue.tasks.retain(|(owner, ..)| *owner != peer);
        queue.calls.retain(|spec| spec.id.owner != peer);
        let running = queue.running.clone().filter(|running| running.spec.id.owner == peer);
        let (gone, kept) = std::mem::take(&mut queue.returned).into_iter().partition(|(task, _)| task.owner == peer);
        let gone: BTreeMap<TaskId, Vec<Handle>> = gone;
        queue.returned = kept;
        let (items, kept) =
            std::mem::take(&mut queue.sent_items).into_iter().partition(|(item, _)| item.owner() == peer);
        let items: BTreeMap<ObjectId, Vec<Handle>> = items;
        queue.sent_items = kept;
        drop(queue);
        drop((gone, items));
        if let Some(execution) = running {
            self.owner.cancel_children(execution.spec.id);
            execution.is_disowned.set(true);
            execution.cancel(shared);
        }
    }

    /// What runs begins to wait: unstarted tasks go back.
    pub(super) fn begin_wait(&self) {
        let mut queue = self.queue.borrow_mut();
        if queue.being.is_some() {
            return;
        }
        queue.waiting += 1;
        let back = queue.tasks.drain(..).map(|(_, _, _, spec)| spec.id).collect();
        if let (1, Some(owner), Some(lease)) = (queue.waiting, queue.owner, queue.lease) {
            self.give_back(&queue, owner, lease, back);
        }
    }

    pub(super) fn end_wait(&self) {
        let mut queue = self.queue.borrow_mut();
        if queue.being.is_some() {
            return;
        }
        queue.waiting -= 1;
        if let (0, Some(owner), Some(lease)) = (queue.waiting, queue.owner, queue.lease) {
            self.say(owner, PeerMessage::Ready(lease));
        }
    }
}
