//! A pretended node.

use std::collections::{BTreeMap, BTreeSet};

use wingbeat_core::error::Error;
use wingbeat_core::spec::{Address, MachineId};
use wingbeat_core::{JobId, LeaseId, ProcessId};
use wingbeat_net::messages::{LeaseHolder, LeaseStart, NodeInfo, Running, RunningLease};

use crate::state::Millis;

pub(super) struct Daemon {
    pub info: NodeInfo,
    pub jobs: BTreeSet<JobId>,
    pub leases: BTreeMap<LeaseId, Serving>,
    /// Whether the head hears it.
    pub is_connected: bool,
    /// When the last message on its way to the head, and to it, arrives: later ones come after it.
    pub to_head_at: Millis,
    pub to_node_at: Millis,
    /// How many times slower it is than others.
    pub slowness: u64,
    /// Devices that somebody uses without a lease.
    pub held: BTreeSet<u32>,
}

pub(super) struct Serving {
    pub start: LeaseStart,
    pub phase: Phase,
    pub has_started: Option<Result<(), Error>>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Phase {
    Starting,
    Ready,
    Dying,
}

/// The process that runs a lease.
pub(super) fn worker_of(lease: LeaseId) -> ProcessId {
    ProcessId(1 << 62 | lease.0)
}

pub(super) fn address(process: ProcessId) -> Address {
    Address { process, machine: MachineId(process.0), unix: String::new(), tcp: None }
}

impl Daemon {
    pub(super) fn new(info: NodeInfo, slowness: u64) -> Daemon {
        Daemon {
            info,
            jobs: BTreeSet::new(),
            leases: BTreeMap::new(),
            is_connected: true,
            to_head_at: 0,
            to_node_at: 0,
            slowness,
            held: BTreeSet::new(),
        }
    }

    /// What it tells a head that was started again.
    pub(super) fn running(&self) -> Running {
        let running = self.leases.iter().map(|(id, serving)| RunningLease {
            start: serving.start.clone(),
            worker: (serving.phase == Phase::Ready).then(|| (address(worker_of(*id)), 7)),
            started: serving.has_started.clone(),
            terminated: None,
            is_ending: serving.phase == Phase::Dying,
        });
        Running {
            leases: running.collect(),
            jobs: self.jobs.iter().copied().collect(),
            workers: Vec::new(),
            held: Vec::new(),
        }
    }
}

impl Serving {
    pub(super) fn is_detached(&self) -> bool {
        matches!(&self.start.holder, LeaseHolder::Actor(spec, _) if spec.detached)
    }
}
