//! What a node is, and what it is told.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use wingbeat_core::codec::Payload;
use wingbeat_core::memory::MemoryUsage;
use wingbeat_core::spec::*;
use wingbeat_core::*;

use crate::handshake::Epoch;

/// A node, as it introduces itself to the head.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct NodeInfo {
    /// The life of the daemon.
    pub id: NodeId,
    /// Where the daemon listens.
    pub address: Address,
    /// The machine's name, for people.
    pub hostname: String,
    /// What it has. GPUs are whole devices, numbered from 0.
    pub resources: ResourceSet,
    /// What is known of its devices, in order; empty if nothing is.
    pub devices: Vec<DeviceInfo>,
    /// `key=value` labels.
    pub labels: BTreeMap<String, String>,
    /// Capacity of its object store in bytes.
    pub store_bytes: u64,
}

/// A GPU, or a part of one that is a device of its own.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceInfo {
    /// By this name CUDA takes it, whatever is visible; none if only its number is known.
    pub uuid: Option<String>,
    /// Such as `NVIDIA H200`.
    pub model: String,
    /// In bytes; 0 if that is not known.
    pub memory: u64,
    /// Devices of one island reach each other over NVLink.
    pub island: Option<u32>,
    /// The memory node of the machine that it is next to.
    pub numa: Option<u32>,
}

/// One-way messages to a node daemon.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum NodeMessage {
    /// From the head: leases of this job may come.
    BeginJob(Arc<JobSpec>),
    /// From the head: get a worker process ready.
    StartLease(Box<LeaseStart>),
    /// From the head: the lease is over.
    EndLease {
        /// The lease.
        lease: LeaseId,
        /// Why its process must end; otherwise it may be used again.
        kill: Option<String>,
    },
    /// From the head: let the actor of this lease finish what it was sent, then end it.
    DrainActor {
        /// The lease.
        lease: LeaseId,
        /// What to call the cause.
        by: String,
    },
    /// From the head: end everything that belongs to the job, except what is leased to detached actors.
    EndJob {
        /// The job.
        job: JobId,
    },
    /// From the head: the daemon is to end in order, because of this.
    Stop(String),
    /// From the head: start worker processes ahead of need.
    Prestart {
        /// Of this job, of which the node was told before.
        job: JobId,
        /// This many.
        count: u32,
    },

    /// From a process: it no longer reads these objects.
    Unpin(Vec<ObjectId>),
    /// From an owner: nobody needs these objects.
    Delete(Vec<ObjectId>),
    /// From a worker process: its actor's constructor returned.
    ActorStarted {
        /// The actor.
        actor: ActorId,
        /// Which life.
        incarnation: Incarnation,
        /// Nothing, or the constructor's error.
        outcome: Result<(), Error>,
    },

    /// From the head: this other node is gone, and every copy in its store.
    NodeDied(NodeId),
    /// From the head, which has no journal: keep this for the next one.
    Keep(Box<Keep>),
    /// From the head: these processes have ended, and their jobs too if that is said. Then nobody is left who could have a ref to
    /// what they owned and has not said so.
    OwnersGone {
        /// The processes.
        owners: Vec<ProcessId>,
        /// Whether the jobs in whose names they stored something are over.
        are_jobs_over: bool,
    },
    /// From a worker process: it was asked to exit, and goes on, because it owns objects.
    Stays,
    /// From a worker process: whether something runs on there that a task has left behind. While it does, the process takes no other
    /// lease.
    LeftBehind(bool),
    /// From a worker process: it has lost the head, and what it submits fails.
    LostHead,
}

/// What happened to a worker process that was started and never said where it is reached. Why follows, with what it printed.
pub const ENDED_UNREPORTED: &str = "a worker process ended before it reported";

/// Before the text of the error with which a task has failed whose process has lost the head.
pub const THEN_FAILED: &str = "the task then failed: ";

/// How much of what a head knows somebody has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Version {
    /// Which head it was.
    pub epoch: Epoch,
    /// How often that had something to keep.
    pub count: u64,
}

/// A part of what a node keeps for the next head.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Keep {
    /// What is known with it; none if nothing is to be kept here any more.
    pub version: Option<Version>,
    /// Whether it begins to replace what was kept before.
    pub begins: bool,
    /// Whether that is complete with it.
    pub is_complete: bool,
    /// Facts by their keys; none where nothing is left to know.
    pub changes: Vec<(Payload, Option<Payload>)>,
}

/// A lease as the head hands it to a node.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct LeaseStart {
    /// The lease.
    pub lease: LeaseId,
    /// The job on whose behalf; the node was told of it before.
    pub job: JobId,
    /// What the lease holds.
    pub resources: ResourceSet,
    /// The devices that it holds, and how much of each.
    pub gpus: Vec<(u32, Amount)>,
    /// The bundle in which it is, if it is in one.
    pub bundle: Option<(PlacementGroupId, u32)>,
    /// The placement group in which what it submits runs too.
    pub captures: Option<PlacementGroupId>,
    /// Who it is for.
    pub holder: LeaseHolder,
}

/// Who a lease is for.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum LeaseHolder {
    /// Tasks of this process and shape.
    Tasks(ProcessId, Arc<Shape>),
    /// An actor's life, and how many moves before it have cost no restart.
    Actor(Arc<ActorSpec>, Incarnation, u32),
}

/// What the object store of a node holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoreUse {
    /// Bytes in memory.
    pub used: u64,
    /// Bytes that are on disk only.
    pub spilled: u64,
    /// Objects that wait for room.
    pub waiting: u32,
}

/// What a node has, as it tells a head that was started again.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Running {
    /// The leases that it serves.
    pub leases: Vec<RunningLease>,
    /// The jobs that it knows.
    pub jobs: Vec<JobId>,
    /// The worker processes that have reported, each with its job: also one that serves nothing may own something.
    pub workers: Vec<(ProcessId, JobId)>,
    /// Worker processes that have ended here, the latest ones, each with its job: others may hold what they owned.
    pub ended: Vec<(ProcessId, JobId)>,
    /// Devices that cannot be given on, and what holds each, in words.
    pub held: Vec<(u32, String)>,
    /// How much of its memory is used, if that is short.
    pub memory_short: Option<Box<MemoryUsage>>,
    /// What its object store holds.
    pub store: StoreUse,
    /// What it has kept of what the last head knew, if it has.
    pub kept: Option<Version>,
}

/// A lease that a node serves.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RunningLease {
    /// As it was granted.
    pub start: LeaseStart,
    /// The worker process, once it is there.
    pub worker: Option<(Address, u32)>,
    /// For an actor, what its constructor has returned; none before it has.
    pub started: Option<Result<(), Error>>,
    /// An actor that finishes what it was sent and then ends: what has told it to.
    pub terminated: Option<String>,
    /// It was told to end, and its process is not gone yet.
    pub is_ending: bool,
}
