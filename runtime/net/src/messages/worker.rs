//! Between a worker process and its daemon.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use wingbeat_core::spec::*;
use wingbeat_core::*;

use crate::patience::Patience;

/// What a worker process learns when it reports to its daemon.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct WorkerStart {
    /// The cluster.
    pub cluster: ClusterId,
    /// The job it works for.
    pub job: JobId,
    /// The job's namespace for names.
    pub namespace: String,
    /// Its node.
    pub node: NodeId,
    /// The daemon's own address, which readers on other nodes use.
    pub daemon: Address,
    /// Where the head is.
    pub head: Address,
    /// Where its standby would serve, if it has one.
    pub standby: Option<Address>,
    /// Capacity of the arena whose descriptor it inherited, in bytes.
    pub arena_bytes: u64,
    /// The driver, where output and panics are shown.
    pub driver: Address,
    /// How long silence is borne in the cluster.
    pub patience: Patience,
}

/// What the daemon tells a worker process.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum WorkerCommand {
    /// From now on it works under this lease.
    Lease {
        /// The lease.
        lease: LeaseId,
        /// Its devices.
        gpus: Vec<u32>,
        /// What the lease holds.
        resources: ResourceSet,
        /// The placement group in which what it submits runs too.
        captures: Option<PlacementGroupId>,
    },
    /// Become this actor.
    StartActor {
        /// The lease.
        lease: LeaseId,
        /// What to start.
        spec: Arc<ActorSpec>,
        /// Which life.
        incarnation: Incarnation,
        /// Its devices.
        gpus: Vec<u32>,
        /// What the lease holds.
        resources: ResourceSet,
        /// The placement group in which what it submits runs too.
        captures: Option<PlacementGroupId>,
    },
    /// Finish what was sent and end.
    Drain,
    /// End now, in order.
    Exit,
    /// The head, which was started again, says so from now on.
    Patience(Patience),
    /// Where the head may be: the one that leads, and its standby.
    Heads(Vec<Address>),
}

/// A line of output of user code.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct LogLine {
    /// Which worker process.
    pub pid: u32,
    /// The task or actor that ran, as far as known.
    pub source: String,
    /// The node's host name.
    pub node: String,
    /// Whether it was written to standard error.
    pub is_stderr: bool,
    /// The line, without its end.
    pub text: String,
}
