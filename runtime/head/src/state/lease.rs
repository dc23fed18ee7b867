//! The life of one lease as the head knows it: docs/protocol.md, "A lease".
//!
//! ```text
//!   Starting ── LeaseReady ──▶ Granted { recalled? } ── ReturnLease, AbandonLease, … ──▶ Ending { returned? } ── LeaseEnded ──▶ forgotten
//!      │                                                                                    ▲
//!      ├── nobody wants it any more ───────────────────────────────────────────────────────┘
//!      └── LeaseFailed ──▶ forgotten
//! ```

use std::collections::BTreeSet;

use wingbeat_core::resources::CPU;
use wingbeat_core::{ActorId, Amount, JobId, ProcessId, TaskId};

use super::Millis;
use super::nodes::Taken;
use super::queue::Waiter;
use super::shapes::ShapeId;

/// Who asks for leases: a process, and the shape of its tasks.
pub(super) type Asker = (ProcessId, ShapeId);

/// Who a lease is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Holder {
    Tasks(Asker),
    Actor(ActorId),
    /// It ends; a head that was started again found it so.
    Nobody,
}

impl Holder {
    pub(super) fn waiter(self) -> Option<Waiter> {
        match self {
            Holder::Tasks((process, shape)) => Some(Waiter::Tasks(process, shape)),
            Holder::Actor(actor) => Some(Waiter::Actor(actor)),
            Holder::Nobody => None,
        }
    }
}

/// The process that serves a lease, and its process id.
pub(super) type Server = (ProcessId, u32);

/// How far a lease has come.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Stage {
    /// The node was told to start it. Its holder does not know it yet.
    Starting,
    /// A process serves it.
    Granted {
        server: Server,
        /// When its owner was asked to give it back.
        recalled: Option<Millis>,
    },
    /// The node was told to end it; its devices are not free yet.
    Ending {
        /// The process that serves it still, if one did.
        server: Option<Server>,
        /// Whether what it had was given back already.
        is_returned: bool,
    },
}

impl Stage {
    pub(super) fn server(self) -> Option<Server> {
        match self {
            Stage::Starting => None,
            Stage::Granted { server, .. } => Some(server),
            Stage::Ending { server, .. } => server,
        }
    }
}

/// A lease that its node has not said to be over.
pub(super) struct Lease {
    /// What it has, and where.
    pub taken: Taken,
    pub holder: Holder,
    pub job: JobId,
    stage: Stage,
    /// When its stage began; of one that ends, the one before.
    pub since: Millis,
    /// Executions on it that wait.
    pub waiting: BTreeSet<TaskId>,
    /// It was granted by an earlier head.
    pub was_before: bool,
}

impl Lease {
    /// One that a node is about to be told of.
    pub(super) fn new(taken: Taken, holder: Holder, job: JobId, now: Millis) -> Lease {
        let stage = Stage::Starting;
        Lease { taken, holder, job, stage, since: now, waiting: BTreeSet::new(), was_before: false }
    }

    /// One that an earlier head had granted, as its node says.
    pub(super) fn of_earlier_head(lease: Lease, server: Option<Server>, is_ending: bool) -> Lease {
        let stage = match server {
            server if is_ending => Stage::Ending { server, is_returned: false },
            Some(server) => Stage::Granted { server, recalled: None },
            None => Stage::Starting,
        };
        Lease { stage, was_before: true, ..lease }
    }

    /// The process that serves it.
    pub(super) fn server(&self) -> Option<Server> {
        self.stage.server()
    }

    /// A process serves it. One that is ending goes on to end.
    pub(super) fn ready(&mut self, server: Server, now: Millis) {
        self.since = now;
        self.stage = match self.stage {
            Stage::Starting => Stage::Granted { server, recalled: None },
            Stage::Granted { recalled, .. } => Stage::Granted { server, recalled },
            Stage::Ending { is_returned, .. } => Stage::Ending { server: Some(server), is_returned },
        };
    }

    /// Its owner is to give it back. Whether it must be told: not one that does not know it yet, or that knows.
    pub(super) fn recall(&mut self, now: Millis) -> bool {
        match &mut self.stage {
            Stage::Granted { recalled: recalled @ None, .. } => {
                *recalled = Some(now);
                true
            }
            Stage::Starting | Stage::Granted { .. } | Stage::Ending { .. } => false,
        }
    }

    /// It must end. Whether the node is to be told, which it is once.
    pub(super) fn end(&mut self) -> bool {
        match self.stage {
            Stage::Ending { .. } => false,
            stage => {
                self.stage = Stage::Ending { server: stage.server(), is_returned: false };
                true
            }
        }
    }

    /// What it has is given back: what that is, unless it was given back before.
    pub(super) fn give_back(&mut self) -> Option<Taken> {
        if let Stage::Ending { is_returned, .. } = &mut self.stage
            && std::mem::replace(is_returned, true)
        {
            return None;
        }
        Some(self.still_taken())
    }

    /// Its owner is yet to hear of it.
    pub(super) fn is_starting(&self) -> bool {
        self.server().is_none() && !self.was_before
    }

    pub(super) fn is_ending(&self) -> bool {
        matches!(self.stage, Stage::Ending { .. })
    }

    /// Whether nothing of the node is held by it any more.
    pub(super) fn is_returned(&self) -> bool {
        matches!(self.stage, Stage::Ending { is_returned: true, .. })
    }

    /// When its owner was asked to give it back.
    pub(super) fn recalled(&self) -> Option<Millis> {
        match self.stage {
            Stage::Granted { recalled, .. } => recalled,
            Stage::Starting | Stage::Ending { .. } => None,
        }
    }

    /// Whether it is on its way back.
    pub(super) fn is_going(&self) -> bool {
        self.is_ending() || self.recalled().is_some()
    }

    /// What is to be given back: without the CPUs that a waiting execution gave back already.
    pub(super) fn still_taken(&self) -> Taken {
        let mut taken = self.taken.clone();
        if !self.waiting.is_empty() {
            taken.resources.set(CPU, Amount::ZERO);
        }
        taken
    }
}
