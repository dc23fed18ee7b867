//! What a worker process does with the work that it is sent: what its executor does, in one thread.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Waker;

use wingbeat_core::error::Error;
use wingbeat_core::spec::{ActorSpec, Arg, Outcome, Outputs, TaskResult, TaskSpec};
use wingbeat_core::value::ObjectValue;
use wingbeat_core::{Incarnation, LeaseId, ObjectId, ProcessId, TaskId};
use wingbeat_net::messages::{PeerMessage, Work};

use super::execution::{Ended, Execution, Shared};
use super::process::Process;
use crate::owner::object::Handle;
use crate::work::{self, Actor, Cancelled, DEFAULT_GROUP, GaveBack, Refused, ThreadCalls};

/// How long a forced cancel waits for owners to take in the results of other tasks.
const FORCED_LIMIT: u64 = 500;

/// How many items of a stream its consumer has taken.
#[derive(Default)]
pub(super) struct Credit {
    pub taken: Cell<u32>,
    pub waker: Cell<Option<Waker>>,
}

/// What is to be begun.
pub(super) enum Next {
    Attempt { spec: Arc<TaskSpec>, lease: Option<LeaseId> },
    Become(Arc<ActorSpec>),
}

#[derive(Default)]
pub(super) struct Queue {
    pub work: work::Queue<Rc<Execution>>,
    /// What was sent here, and runs.
    pub running: Option<Rc<Execution>>,
    /// Somebody looks in a moment whether all wait.
    pub is_watched: bool,
    /// The lease that others need, as far as it was told.
    pub recalled: Option<LeaseId>,
    /// Whether its node was told that something is left here.
    pub says_left: bool,
    /// Since when all have waited, and the CPU was not free.
    pub idle_since: Option<u64>,
    /// The actor that it is, from when its constructor begins; and the life and lease of that.
    pub being: Option<(Arc<ActorSpec>, Incarnation, LeaseId)>,
    pub is_beginning: bool,
    /// It is about to be killed, at this time at the latest.
    pub killed_at: Option<u64>,
    /// As the head is told when the process dies.
    pub started: u64,
    pub streams: BTreeMap<TaskId, Rc<Credit>>,
}

/// The objects that an argument refers to, itself included.
pub(super) fn refs_of(arg: &Arg) -> impl Iterator<Item = &ObjectId> {
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
            PeerMessage::Work(work) => self.deliver(from, work, shared),
            message => self.owner.hears(from, message),
        }
    }

    fn deliver(&self, from: ProcessId, work: Work, shared: &Shared) {
        match work {
            Work::Tasks { lease, first, tasks } => {
                let gave = self.queue.borrow_mut().work.add_tasks(from, lease, first, tasks);
                self.give_back(gave);
            }
            Work::Calls { actor, incarnation, calls } => {
                let actor = Actor { id: actor, incarnation };
                let added = self.queue.borrow_mut().work.add_calls(actor, calls);
                let refused = match added {
                    Ok(()) => return,
                    Err(Refused::Another(calls)) => calls,
                    Err(Refused::UnknownGroup(calls)) => panic!("{calls:?} are for groups, which no program here has"),
                    Err(Refused::Exits(calls)) => {
                        panic!("{calls:?} are for an actor that ends itself, which none here does")
                    }
                };
                for spec in refused {
                    let cause = Box::new(Error::ActorEnded { by: "a restart".into() });
                    let error = Error::ActorUnavailable { actor: actor.id, class: "actor".into(), cause };
                    self.answer(&spec, (Outcome::Failed(Box::new(error)), Vec::new()), 0);
                }
            }
            Work::TakeBack { lease, most, recalled } => {
                if recalled {
                    self.is_recalled(lease, shared);
                }
                let gave = self.queue.borrow_mut().work.take_back(from, lease, most);
                self.give_back(Some(gave));
            }
            Work::Cancel { task, force } => self.cancel(task, force, shared),
            Work::StreamTaken { task, count } => {
                if let Some(credit) = self.queue.borrow().streams.get(&task) {
                    credit.taken.set(credit.taken.get().max(count));
                    if let Some(waker) = credit.waker.take() {
                        waker.wake();
                    }
                }
            }
            Work::ItemReceived(item) => self.held.item_received(item),
            Work::Received(tasks) => self.held.results_received(tasks),
            Work::MayLeave => self.leaves(),
        }
    }

    /// Whether the steward of its node can answer for all that it owns.
    pub(super) fn may_leave(&self) -> bool {
        self.side.steward().is_some_and(|steward| self.owner.may_leave(steward))
    }

    /// The steward says that it can.
    fn leaves(&self) {
        let mut queue = self.queue.borrow_mut();
        if !queue.work.stays() {
            return;
        }
        match self.may_leave() {
            true => queue.work.end(),
            false => self.side.stays(),
        }
    }

    pub(super) fn say(&self, to: ProcessId, message: PeerMessage) -> bool {
        self.owner.outside.send_to(&self.owner, to, message, false)
    }

    pub(super) fn give_back(&self, gave: Option<GaveBack>) {
        if let Some(GaveBack { to, lease, tasks, waiting }) = gave {
            self.say(to, PeerMessage::GaveBack { lease, tasks, waiting });
        }
    }

    /// What can begin now of what was sent here. There is one thread for that, and room for one call.
    pub(super) fn next(&self) -> Option<Next> {
        let mut queue = self.queue.borrow_mut();
        if queue.running.is_some() || queue.is_beginning {
            return None;
        }
        let next = if queue.being.is_some() {
            queue.work.next_call(DEFAULT_GROUP, ThreadCalls::default())
        } else {
            queue.work.next_task()
        };
        match next? {
            work::Next::Become(actor) => {
                queue.being = Some((actor.spec.clone(), actor.incarnation, actor.lease));
                queue.started = 1;
                queue.is_beginning = true;
                Some(Next::Become(actor.spec))
            }
            work::Next::Call { spec, .. } => {
                let lease = queue.being.as_ref().map(|(_, _, lease)| *lease);
                Some(Next::Attempt { spec, lease })
            }
            work::Next::Task { lease, number, spec } => {
                queue.started = number + 1;
                Some(Next::Attempt { spec, lease: Some(lease) })
            }
            work::Next::End => None,
        }
    }

    /// Something runs.
    pub(super) fn started(&self, execution: &Rc<Execution>) {
        let mut queue = self.queue.borrow_mut();
        if !execution.is_at_home {
            queue.running = Some(execution.clone());
        }
        self.executions.borrow_mut().insert(execution.number, execution.clone());
        let cancelled = queue.work.started(execution.spec.id, execution.clone());
        assert!(cancelled.is_none(), "it was taken out in the same moment");
    }

    /// What runs has ended.
    pub(super) fn done(&self, execution: &Rc<Execution>, ended: Ended, shared: &Shared) {
        let is_of_attempt = matches!(ended.0, Outcome::Failed(_) | Outcome::StreamEnded(_));
        if !execution.is_at_home {
            let running = self.queue.borrow_mut().running.take();
            assert!(running.is_some_and(|running| Rc::ptr_eq(&running, execution)), "something else runs");
            if execution.place.is_none() {
                self.look_for_leftovers(shared);
            }
        }
        if !(execution.is_disowned.get() && is_of_attempt) {
            let waited = execution.waits.borrow().waited(shared.instant()).as_millis() as u64;
            let ran_nanos = (shared.now() - execution.began).saturating_sub(waited) * 1_000_000 + 1_000;
            self.answer(&execution.spec, ended, ran_nanos);
        }
        self.executions.borrow_mut().remove(&execution.number);
        let mut queue = self.queue.borrow_mut();
        if execution.place.is_some() {
            queue.work.call_done(&execution.spec, ThreadCalls::default());
        }
        queue.work.done(execution.spec.id, |running| Rc::ptr_eq(running, execution));
        drop(queue);
        if execution.is_at_home {
            self.done_at_home(shared);
        }
    }

    /// Sends a result, after the refs in the arguments that are still held here are registered.
    fn answer(&self, spec: &TaskSpec, (outcome, held): Ended, ran_nanos: u64) {
        let result = TaskResult { id: spec.id, attempt: spec.attempt, outcome, ran_nanos };
        let owner = spec.id.owner;
        let is_plain = spec.args.iter().all(|arg| matches!(arg, Arg::Value(packed) if packed.refs.is_none()));
        let is_alone = !spec.remakes && matches!(spec.outputs, Outputs::Fixed(_)) && !result.outcome.has_refs();
        let send = || {
            let mut result = result;
            if owner == self.id && is_plain && is_alone {
                match self.owner.result_at_home(result) {
                    Ok(()) => return,
                    Err(back) => result = back,
                }
            }
            let message = PeerMessage::Results(vec![result]);
            if is_plain {
                self.say(owner, message);
            } else {
                self.owner.confirm(owner, spec.args.iter().flat_map(refs_of), message);
            }
        };
        self.held.result(spec.id, held, send, || self.side.can_reach(owner));
    }

    pub(super) fn send_item(&self, task: TaskId, index: u32, value: ObjectValue, held: Vec<Handle>) {
        let send = || {
            self.say(task.owner, PeerMessage::StreamItem { task, index, value });
        };
        self.held.item(task.output(index), held, send, || self.side.can_reach(task.owner));
    }

    fn cancel(&self, task: TaskId, force: bool, shared: &Shared) {
        let cancelled = self.queue.borrow_mut().work.cancel(task, force);
        match cancelled {
            Cancelled::Nothing => {}
            Cancelled::Unstarted(spec) => {
                let error = Error::Cancelled { task: task.to_string() };
                self.answer(&spec, (Outcome::Failed(Box::new(error)), Vec::new()), 0);
            }
            // Its owner has given it up, and lives here itself.
            Cancelled::Running(execution) if execution.is_at_home && force => self.give_up_at_home(&execution, shared),
            Cancelled::Running(_) if force => {
                // What else was finished here is handed over first.
                let mut queue = self.queue.borrow_mut();
                queue.killed_at = Some(shared.now() + FORCED_LIMIT);
            }
            Cancelled::Running(execution) => {
                execution.cancels_children(&self.owner);
                execution.cancel(shared);
            }
        }
    }

    /// Contact with a process was lost: what runs for it is pointless.
    pub(super) fn peer_lost(&self, peer: ProcessId, shared: &Shared) {
        let running = self.queue.borrow_mut().work.peer_lost(peer);
        for execution in running {
            execution.cancels_children(&self.owner);
            execution.is_disowned.set(true);
            execution.cancel(shared);
        }
        self.held.peer_lost(peer);
    }
}
