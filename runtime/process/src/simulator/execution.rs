//! What runs: programs as futures, woken by owners, timers and the world.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Wake, Waker};
use std::time::Instant;

use bytes::Bytes;
use parking_lot::Mutex;
use rand::RngExt;
use rand::rngs::StdRng;
use wingbeat_core::error::Error;
use wingbeat_core::spec::{ActorInfo, ActorSpec, Outcome, PlacementGroupSpec, ScopedName, TaskSpec};
use wingbeat_core::{ActorId, JobId, LeaseId, NodeId, ObjectId, PlacementGroupId, ProcessId, TaskId};

use super::failing::Failing;
use super::planned::Planned;
use super::process::Process;
use super::side::{Said, Stewards};
use super::{Config, Report};
use crate::owner::Owner;
use crate::owner::object::Handle;
use crate::work::{Doing, Place, Waiter, Waits};

/// Names a program that runs.
pub(super) type Number = u64;

/// Programs that are to be looked at again.
pub(super) type Ready = Arc<Mutex<Vec<Number>>>;

/// How an attempt ended, and handles of the refs in what it gave.
pub(super) type Ended = (Outcome, Vec<Handle>);

/// A program; that of a driver ends with nothing.
pub(super) type Program = Pin<Box<dyn Future<Output = Ended>>>;

/// An attempt at a task or call. A field for each thing that a real worker process knows of an execution, and it is one: what belongs to its program alone is
/// in [`Running`].
pub(super) struct Execution {
    pub number: Number,
    pub spec: Arc<TaskSpec>,
    pub lease: Option<LeaseId>,
    pub place: Option<Place>,
    pub began: u64,
    /// Its task, in words.
    pub name: String,
    /// Whether it runs in the process of the task that submitted it.
    pub is_at_home: bool,
    pub is_cancelled: Cell<bool>,
    /// Whether what it had submitted then was cancelled.
    pub is_told: Cell<bool>,
    /// Whether its program has begun: its arguments are here.
    pub has_begun: Cell<bool>,
    /// When it hears that it is to stop: what computes does not look all the time.
    pub hears_at: Cell<u64>,
    /// Contact with its caller was lost, or nobody waits for it any more.
    pub is_disowned: Cell<bool>,
    /// It runs at home, and was cancelled by force.
    pub is_given_up: Cell<bool>,
    pub waits: RefCell<Waits>,
}

/// A program that runs.
pub(super) struct Running {
    pub process: Rc<Process>,
    /// None for that of a driver.
    pub execution: Option<Rc<Execution>>,
    pub program: Program,
    pub waker: Waker,
}

struct Woken(Number, Ready);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.1.lock().push(self.0);
    }
}

/// What a program asks of the head, which answers later.
pub(super) struct Question {
    pub by: ProcessId,
    pub asked: Asked,
    pub answer: Rc<RefCell<Option<Answer>>>,
    pub waker: Waker,
}

pub(super) enum Asked {
    Create(Box<ActorSpec>),
    Find(ScopedName, JobId),
    Reserve(Box<PlacementGroupSpec>),
    GiveBack(PlacementGroupId),
}

/// An actor, where one was asked for.
pub(super) type Answer = Result<Option<ActorInfo>, Error>;

/// What everything in the world shares. Its many fields are one for each kind of thing that happens to all of it, or that checks ask about.
pub(super) struct Shared {
    pub config: Config,
    pub clock: Arc<AtomicU64>,
    /// The instant of time 0.
    pub began: Instant,
    pub said: Said,
    pub ready: Ready,
    pub random: RefCell<StdRng>,
    pub next: Cell<u64>,
    pub begun: RefCell<Vec<(Number, Running)>>,
    /// Processes that were looked at since the world settled: only they may have something to do.
    pub touched: RefCell<BTreeSet<ProcessId>>,
    pub timers: RefCell<Vec<(u64, Waker)>>,
    pub questions: RefCell<Vec<Question>>,
    /// What processes plan to do at home.
    pub planned: RefCell<Vec<Planned>>,
    /// Processes that what runs in them ends.
    pub ends: RefCell<Vec<ProcessId>>,
    /// What lies in the stores of living nodes, and for which job it was made.
    pub copies: RefCell<BTreeMap<(ObjectId, NodeId), (JobId, Bytes)>>,
    pub nodes: RefCell<BTreeSet<NodeId>>,
    /// Nodes that were told to end, because nothing was left on them.
    pub stopped: RefCell<BTreeSet<NodeId>>,
    /// Those in whose stores there is no room now.
    pub full: RefCell<BTreeSet<NodeId>>,
    /// Those on which no worker process can be started now.
    pub sick: RefCell<BTreeSet<NodeId>>,
    /// Worker processes and drivers that have ended.
    pub ended: RefCell<BTreeSet<ProcessId>>,
    /// Attempts that have begun.
    pub attempts: RefCell<BTreeSet<(TaskId, u32)>>,
    /// Attempts that ended with these processes.
    pub crashed: RefCell<BTreeMap<(TaskId, u32), ProcessId>>,
    /// The last process that each task was in when another task ended that.
    pub beside_fatal: RefCell<BTreeMap<TaskId, ProcessId>>,
    /// Tasks that fail by themselves, by their names.
    pub failing: RefCell<BTreeMap<String, Failing>>,
    /// Tasks whose time was over before they were done, by their names.
    pub timed_out: RefCell<BTreeSet<String>>,
    /// Where each attempt has begun.
    pub begun_in: RefCell<BTreeMap<(TaskId, u32), ProcessId>>,
    /// Processes that nodes ended because memory was short.
    pub ended_for_memory: RefCell<BTreeSet<ProcessId>>,
    /// How often each task that asks for nothing is tried again after that, by its name.
    pub memory_retries: RefCell<BTreeMap<String, u32>>,
    /// Processes of drained nodes, whose tasks were moved.
    pub moved: RefCell<BTreeSet<ProcessId>>,
    pub parents: RefCell<BTreeMap<TaskId, TaskId>>,
    pub cancelled: RefCell<BTreeSet<TaskId>>,
    /// Tasks that give streams.
    pub streams: RefCell<BTreeSet<TaskId>>,
    /// Copies of which the process that made them could not tell before it died.
    pub untold: RefCell<BTreeSet<(ObjectId, NodeId)>>,
    /// Actors that somebody has found by name, perhaps when they were about to end.
    pub found: RefCell<BTreeSet<ActorId>>,
    /// Their handles.
    pub found_handles: RefCell<BTreeSet<ObjectId>>,
    /// Actors for which a drained node does not wait, and which end with it.
    pub yielding: RefCell<BTreeSet<ActorId>>,
    /// The last call that each actor has begun, by its life and its caller.
    pub calls: RefCell<BTreeMap<(ActorId, u32, ProcessId), u64>>,
    /// Placement groups that were given back.
    pub given_back: RefCell<BTreeSet<PlacementGroupId>>,
    /// Whether there has ever been a quota.
    pub was_limited: Cell<bool>,
    /// All jobs that there were.
    pub jobs: RefCell<Vec<JobId>>,
    pub stewards: Stewards,
    /// Objects with a value that were known to a living steward when their owners ended.
    pub outlives: RefCell<BTreeSet<ObjectId>>,
    /// Processes that have lost contact with another that lives: they hold nothing of it.
    pub cut: RefCell<BTreeSet<ProcessId>>,
    pub has_lost_a_node: Cell<bool>,
    pub report: RefCell<Report>,
}

impl Shared {
    pub(super) fn now(&self) -> u64 {
        self.clock.load(Ordering::Relaxed)
    }

    pub(super) fn below(&self, limit: u64) -> u64 {
        self.random.borrow_mut().random_range(0..limit)
    }

    pub(super) fn id(&self) -> u64 {
        self.next.set(self.next.get() + 1);
        self.next.get()
    }

    pub(super) fn trace(&self, what: impl FnOnce() -> String) {
        if self.config.trace {
            eprintln!("{:>7} {}", self.now(), what());
        }
    }

    pub(super) fn waker(&self, number: Number) -> Waker {
        Waker::from(Arc::new(Woken(number, self.ready.clone())))
    }

    /// Begins a program.
    pub(super) fn begin(
        &self,
        number: Number,
        process: &Rc<Process>,
        execution: Option<Rc<Execution>>,
        program: Program,
    ) {
        process.programs.borrow_mut().insert(number);
        let waker = self.waker(number);
        let running = Running { process: process.clone(), execution, program, waker: waker.clone() };
        self.begun.borrow_mut().push((number, running));
        waker.wake();
    }

    /// Whether the task or one that it is part of was cancelled.
    pub(super) fn was_cancelled(&self, mut task: TaskId) -> bool {
        loop {
            if self.cancelled.borrow().contains(&task) {
                return true;
            }
            match self.parents.borrow().get(&task) {
                Some(parent) => task = *parent,
                None => return false,
            }
        }
    }
}

impl Execution {
    pub(super) fn new(
        (number, began): (Number, u64),
        spec: Arc<TaskSpec>,
        lease: Option<LeaseId>,
        actor: Option<ActorId>,
        is_at_home: bool,
    ) -> Execution {
        let name = spec.id.to_string();
        let (is_cancelled, is_told, has_begun, hears_at, is_disowned, is_given_up, waits) = Default::default();
        Execution {
            number,
            spec,
            lease,
            place: actor.map(Place::alone),
            began,
            name,
            is_at_home,
            is_cancelled,
            is_told,
            has_begun,
            hears_at,
            is_disowned,
            is_given_up,
            waits,
        }
    }

    /// As the head is told of it.
    pub(super) fn waiter(&self) -> Waiter<'_> {
        let doing = Doing::default();
        Waiter { task: self.spec.id, name: &self.name, place: self.place.as_ref(), lease: self.lease, doing }
    }

    /// Cancels what it has submitted so far, when it is told to stop for the first time.
    pub(super) fn cancels_children(&self, owner: &Owner) {
        if !self.is_told.replace(true) {
            owner.cancel_children(self.spec.id, owner.next_number());
        }
    }

    /// It is to stop.
    pub(super) fn cancel(&self, shared: &Shared) {
        self.is_cancelled.set(true);
        match self.hears_at.get() > shared.now() {
            true => shared.timers.borrow_mut().push((self.hears_at.get(), shared.waker(self.number))),
            false => shared.ready.lock().push(self.number),
        }
    }
}
