//! A pretended driver, or a worker process with tasks of its own.

use std::collections::{BTreeMap, BTreeSet};

use wingbeat_core::spec::{JobSpec, Shape};
use wingbeat_core::{ActorId, LeaseId, NodeId};

use crate::state::Millis;

pub(super) struct Owner {
    /// Its job, if it is a driver.
    pub job: Option<JobSpec>,
    /// The lease under which it runs, if it is a worker process.
    pub lease: Option<LeaseId>,
    pub demands: BTreeMap<Shape, Backlog>,
    pub actors: BTreeSet<ActorId>,
    /// When its last message arrives: later ones come after it.
    pub to_head_at: Millis,
    pub from_head_at: Millis,
}

/// Tasks of one shape.
#[derive(Default)]
pub(super) struct Backlog {
    pub left: u32,
    pub held: BTreeMap<LeaseId, Held>,
}

pub(super) struct Held {
    pub node: NodeId,
    pub is_recalled: bool,
}

impl Owner {
    pub(super) fn new(job: Option<JobSpec>, lease: Option<LeaseId>) -> Owner {
        Owner { job, lease, demands: BTreeMap::new(), actors: BTreeSet::new(), to_head_at: 0, from_head_at: 0 }
    }

    pub(super) fn holds(&self) -> BTreeSet<LeaseId> {
        self.demands.values().flat_map(|backlog| backlog.held.keys().copied()).collect()
    }

    /// The backlog that has a lease.
    pub(super) fn backlog_of(&mut self, lease: LeaseId) -> Option<(&Shape, &mut Backlog)> {
        self.demands.iter_mut().find(|(_, backlog)| backlog.held.contains_key(&lease))
    }
}

impl Backlog {
    pub(super) fn wanted(&self) -> u32 {
        self.left + self.held.len() as u32
    }
}
