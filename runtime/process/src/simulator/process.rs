//! A process: its owner, and what stands in for its threads.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Waker};

use tokio::sync::mpsc::UnboundedReceiver;
use wingbeat_core::error::Error;
use wingbeat_core::spec::Address;
use wingbeat_core::{ActorId, ClusterId, JobId, NodeId, ObjectId, ProcessId};
use wingbeat_net::messages::HeadMessage;

use super::execution::{Execution, Number, Shared};
use super::queue::Queue;
use super::side::Side;
use super::standing::Standing;
use super::value::Ref;
use crate::owner::Owner;
use crate::owner::table::Released;
use crate::work::Held;

/// A process: a driver, a worker process or a steward. Its many fields are the parts that a real one has, what it is about to do, and what
/// checks ask about.
pub(super) struct Process {
    pub id: ProcessId,
    pub job: JobId,
    /// Whose store it uses.
    pub node: Cell<NodeId>,
    pub is_driver: bool,
    /// It is in a node's daemon, and runs nothing.
    pub is_steward: bool,
    pub owner: Arc<Owner>,
    pub side: Arc<Side>,
    /// What it does as a worker process.
    pub queue: RefCell<Queue>,
    pub held: Held,
    /// Its own objects when it was looked at last.
    pub owned: RefCell<BTreeSet<ObjectId>>,
    /// What the actor that it is keeps, and in which order that was asked.
    pub kept: RefCell<Vec<(u64, Ref)>>,
    /// How many calls of each actor it has made.
    pub calls_made: RefCell<BTreeMap<ActorId, u64>>,
    released: RefCell<UnboundedReceiver<Released>>,
    /// When its owner is to take requests in next.
    pub requests_at: Cell<Option<u64>>,
    pub releases_planned: Cell<bool>,
    /// What runs.
    pub programs: RefCell<BTreeSet<Number>>,
    /// What runs of tasks and calls.
    pub executions: RefCell<BTreeMap<Number, Rc<Execution>>>,
    /// Whether somebody looks at what waits at home.
    pub looks_at_waits: Cell<bool>,
    pub is_alive: Cell<bool>,
    /// Whether it is about to exit.
    pub exits: Cell<bool>,
    pub standing: Cell<Standing>,
    /// What the next head is to hear, when it is found.
    pub unsaid: RefCell<Vec<HeadMessage>>,
}

impl Process {
    pub(super) fn new(
        id: ProcessId,
        (job, node): (JobId, NodeId),
        is_driver: bool,
        cluster: ClusterId,
        shared: &Shared,
    ) -> Rc<Process> {
        let is_steward = id == node.steward();
        let has_steward = !is_steward && shared.config.large().is_none();
        if has_steward {
            shared.stewards.lock().insert(id, node.steward());
        }
        let side = Arc::new(Side::new(id, shared.stewards.clone(), shared.clock.clone(), shared.said.clone()));
        let (owner, released) = Owner::new(id, cluster, side.clone());
        if is_steward {
            owner.serve_as_steward();
        }
        Rc::new(Process {
            id,
            job,
            node: Cell::new(node),
            is_driver,
            is_steward,
            owner,
            side,
            queue: RefCell::default(),
            held: Held::default(),
            owned: RefCell::default(),
            kept: RefCell::default(),
            calls_made: RefCell::default(),
            released: RefCell::new(released),
            requests_at: Cell::new(None),
            releases_planned: Cell::new(false),
            programs: RefCell::default(),
            executions: RefCell::default(),
            looks_at_waits: Cell::new(false),
            is_alive: Cell::new(true),
            exits: Cell::new(false),
            standing: Cell::default(),
            unsaid: RefCell::default(),
        })
    }

    /// How it stands with the head from now on. Answers with how it stood.
    pub(super) fn stands(&self, standing: Standing) -> Standing {
        self.side.has_head.store(standing != Standing::Away, Ordering::Relaxed);
        self.standing.replace(standing)
    }

    pub(super) fn is_worker(&self) -> bool {
        !self.is_driver && !self.is_steward
    }

    /// Whether somebody has asked for something since this was asked last.
    pub(super) fn was_woken(&self) -> bool {
        let woken = pin!(self.owner.submission.wake.notified());
        woken.poll(&mut Context::from_waker(Waker::noop())).is_ready()
    }

    pub(super) fn has_released(&self) -> bool {
        !self.released.borrow().is_empty()
    }

    pub(super) fn side_learns(&self, address: &Address) {
        self.owner.outside.learn(address);
    }

    /// Reports what was let go of.
    pub(super) fn release(&self) {
        let mut batch = Vec::new();
        while let Ok(released) = self.released.borrow_mut().try_recv() {
            batch.push(released);
        }
        self.owner.release(batch);
    }

    /// Whether nothing waits for a registration.
    pub(super) fn is_settled(&self) -> bool {
        pin!(self.owner.registrations.settled()).poll(&mut Context::from_waker(Waker::noop())).is_ready()
    }

    /// Its memory is gone. Nothing of it is heard any more.
    pub(super) fn end(&self) {
        self.is_alive.set(false);
        self.side.end();
        drop(self.queue.take());
        drop(self.kept.take());
        self.owner.end(&Error::SessionEnded { why: "the process has ended".into() });
        self.owner.clear();
    }
}
