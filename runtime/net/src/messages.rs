//! What the parties say to each other.
//!
//! One-way messages travel in batches, in order, through each service's `deliver`: what queued while
//! the last batch was being sent goes out as the next. The acknowledgement of a batch says that its
//! messages were taken in, in order; it never waits for user code.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use wingbeat_core::codec::Payload;
use wingbeat_core::spec::*;
use wingbeat_core::value::{ObjectValue, StoreNode, Stored};
use wingbeat_core::*;

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

/// What a process learns when it joins.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ClusterView {
    /// The cluster.
    pub cluster: ClusterId,
    /// Its living nodes.
    pub nodes: Vec<NodeInfo>,
}

/// Says what an execution waits for, when it begins to wait.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Wait {
    /// The execution that waits.
    pub task: TaskId,
    /// What to call it.
    pub name: String,
    /// The actor it runs in, and how many calls that actor runs at a time.
    pub actor: Option<(ActorId, u32)>,
    /// The tasks whose results it waits for, with the actor each was sent to.
    pub on: Vec<(TaskId, Option<ActorId>)>,
}

/// One-way messages to the head.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum HeadMessage {
    /// A process can use this many leases of a shape, those that it has included. The latest word counts.
    Demand {
        /// The shape.
        shape: Shape,
        /// How many.
        wanted: u32,
        /// The name of a task of this shape, for people.
        name: String,
    },
    /// The owner is done with a lease; nothing of it runs on the worker process.
    ReturnLease(LeaseId),
    /// The worker process of this lease (none for a driver) waits, and gives its CPUs back meanwhile.
    Waiting {
        /// The lease under which it runs.
        lease: Option<LeaseId>,
        /// What it waits for.
        wait: Wait,
    },
    /// It goes on.
    Resumed {
        /// The lease under which it runs.
        lease: Option<LeaseId>,
        /// The execution.
        task: TaskId,
    },
    /// Tell this process about the actor, now and whenever it changes.
    WatchActor(ActorId),
    /// Tell this process about the placement group, now and whenever it changes.
    WatchPlacementGroup(PlacementGroupId),
    /// End the actor.
    KillActor {
        /// Which.
        actor: ActorId,
        /// Whether it may be restarted within its budget.
        may_restart: bool,
    },
    /// Nobody holds a handle any more and all calls are done (`unheld`), or the user asked for an orderly
    /// end: the actor finishes what it was sent and ends.
    TerminateActor {
        /// Which.
        actor: ActorId,
        /// What to call the cause.
        by: String,
    },

    /// From a node: the worker process for a lease is ready.
    LeaseReady {
        /// The lease.
        lease: LeaseId,
        /// The process.
        worker: Address,
        /// Its process id.
        pid: u32,
    },
    /// From a node: no worker process could be started.
    LeaseFailed {
        /// The lease, which is thereby over.
        lease: LeaseId,
        /// Why.
        error: Error,
    },
    /// From a node: the lease is over and the last process that had its devices is gone or clean.
    LeaseEnded(LeaseId),
    /// From a node: these devices cannot be given on, and what holds each, in words. The latest word counts.
    DevicesHeld(Vec<(u32, String)>),
    /// From a node: a worker process ended unasked. Comes before the `LeaseEnded` of its lease.
    WorkerDied(WorkerDeath),
    /// From a node: an actor's constructor returned.
    ActorStarted {
        /// The actor.
        actor: ActorId,
        /// Which life.
        incarnation: Incarnation,
        /// Nothing, or the constructor's error.
        outcome: Result<(), Error>,
    },
}

/// What can be asked about with `wingbeat why`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Subject {
    /// A task or a call.
    Task(TaskId),
    /// An actor.
    Actor(ActorId),
    /// A placement group.
    PlacementGroup(PlacementGroupId),
    /// A node.
    Node(NodeId),
    /// Whatever a process waits for.
    Process(ProcessId),
}

impl std::str::FromStr for Subject {
    type Err = InvalidId;

    fn from_str(text: &str) -> Result<Self, InvalidId> {
        let kind = text.split_once('-').map_or("", |(kind, _)| kind);
        match kind {
            "task" => text.parse().map(Subject::Task),
            "object" => text.parse().map(|object: ObjectId| Subject::Task(object.task)),
            "actor" => text.parse().map(Subject::Actor),
            "group" => text.parse().map(Subject::PlacementGroup),
            "node" => text.parse().map(Subject::Node),
            "process" => text.parse().map(Subject::Process),
            _ => Err(InvalidId {
                text: text.to_owned(),
                expected: "task-…, object-…, actor-…, group-…, node-… or process-…",
            }),
        }
    }
}

impl From<ObjectId> for Subject {
    fn from(object: ObjectId) -> Self {
        Subject::Task(object.task)
    }
}

impl From<ActorId> for Subject {
    fn from(actor: ActorId) -> Self {
        Subject::Actor(actor)
    }
}

impl From<PlacementGroupId> for Subject {
    fn from(group: PlacementGroupId) -> Self {
        Subject::PlacementGroup(group)
    }
}

impl From<NodeId> for Subject {
    fn from(node: NodeId) -> Self {
        Subject::Node(node)
    }
}

/// What a process says about a task of its own.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum TaskStanding {
    /// The explanation is complete.
    Known(Explanation),
    /// It waits for a lease of this shape.
    WaitsForLease(Explanation, Shape),
    /// It waits for this actor.
    WaitsForActor(Explanation, ActorId),
    /// It runs, or is queued, on the worker process of this lease.
    OnLease(Explanation, LeaseId),
}

/// How a worker process ended.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct WorkerDeath {
    /// The process.
    pub process: ProcessId,
    /// Its process id.
    pub pid: u32,
    /// Its node.
    pub node: NodeId,
    /// What it was leased for.
    pub lease: Option<LeaseId>,
    /// How it ended.
    pub exit: Exit,
    /// The owner's number of the last task that it started (see `PeerMessage::Tasks::first`) plus 1, 0 for none: tasks
    /// after it were never touched.
    pub started: u64,
}

/// What the head tells a process.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum HeadEvent {
    /// A lease.
    Granted {
        /// For which demand.
        shape: Arc<Shape>,
        /// The lease.
        lease: LeaseId,
        /// The worker process.
        worker: Address,
        /// Its node.
        node: NodeId,
        /// Its process id.
        pid: u32,
    },
    /// Others need the lease: finish what runs, then return it.
    Recall(LeaseId),
    /// No node could ever hold this shape; its tasks fail.
    Refused {
        /// The shape.
        shape: Shape,
        /// Why.
        error: Error,
    },
    /// So many nodes there are now.
    Nodes(u32),
    /// A worker process that this process has a lease on is gone.
    WorkerDied(WorkerDeath),
    /// A node is gone with all that was on it.
    NodeDied {
        /// The node.
        node: NodeId,
        /// How that was found out.
        why: String,
    },
    /// An actor that this process watches.
    Actor {
        /// Which.
        actor: ActorId,
        /// Its state now.
        state: ActorState,
    },
    /// A placement group that this process watches.
    PlacementGroup {
        /// Which.
        group: PlacementGroupId,
        /// Its state now.
        state: PlacementGroupState,
    },
    /// The wait that this process announced closes a circle.
    Deadlock {
        /// The execution that waits.
        task: TaskId,
        /// The circle.
        cycle: Vec<String>,
    },
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
    /// From an owner: end this worker process (a forced cancel).
    KillWorker {
        /// The process.
        process: ProcessId,
        /// Why, for people.
        why: String,
    },
    /// From a worker process: its actor's constructor returned.
    ActorStarted {
        /// The actor.
        actor: ActorId,
        /// Which life.
        incarnation: Incarnation,
        /// Nothing, or the constructor's error.
        outcome: Result<(), Error>,
    },
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
    /// An actor's life.
    Actor(Arc<ActorSpec>, Incarnation),
}

/// A lease that a node serves, as it tells a head that was started again.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RunningLease {
    /// As it was granted.
    pub start: LeaseStart,
    /// The worker process, once it is there.
    pub worker: Option<(Address, u32)>,
    /// For an actor, whether its constructor has returned.
    pub started: bool,
    /// It was told to end, and its process is not gone yet.
    pub is_ending: bool,
}

/// What processes say to each other.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum PeerMessage {
    /// Owner to worker process: run these, in order.
    Tasks {
        /// Under this lease.
        lease: LeaseId,
        /// The owner's number of the first on this lease; the others follow.
        first: u64,
        /// The tasks.
        tasks: Vec<Arc<TaskSpec>>,
    },
    /// Caller to actor: run these, in order.
    Calls {
        /// The actor.
        actor: ActorId,
        /// The life that the caller means.
        incarnation: Incarnation,
        /// The calls.
        calls: Vec<Arc<TaskSpec>>,
    },
    /// Worker process to owner.
    Results(Vec<TaskResult>),
    /// Owner to worker process: give up to this many unstarted tasks back, the latest first.
    TakeBack {
        /// Of this lease.
        lease: LeaseId,
        /// At most.
        most: u32,
    },
    /// Worker process to owner: these were not started and never will be here.
    GaveBack {
        /// The lease.
        lease: LeaseId,
        /// The tasks.
        tasks: Vec<TaskId>,
        /// Whether the process waits now, and takes no tasks until `Ready`.
        waiting: bool,
    },
    /// Worker process to owner: it takes tasks of this lease again.
    Ready(LeaseId),
    /// Owner to worker process.
    Cancel {
        /// The task.
        task: TaskId,
        /// Whether the worker process ends if it runs now.
        force: bool,
    },
    /// Worker process to owner: the next item of a stream.
    StreamItem {
        /// The stream.
        task: TaskId,
        /// Its number from 0.
        index: u32,
        /// The item.
        value: ObjectValue,
    },
    /// Owner to worker process: the consumer took items up to here.
    StreamTaken {
        /// The stream.
        task: TaskId,
        /// Number of items taken.
        count: u32,
    },
    /// Borrower to owner: say when these are there.
    Subscribe(Vec<ObjectId>),
    /// Owner to borrower.
    Resolved(Vec<(ObjectId, ObjectValue)>),
    /// Receiver to owner: this process holds refs to these objects.
    Borrow(Vec<ObjectId>),
    /// Borrower to owner: it no longer does.
    Release(Vec<ObjectId>),
    /// Reader to owner: this node has a copy now.
    Copied {
        /// The object.
        object: ObjectId,
        /// The node.
        at: StoreNode,
    },
    /// Reader to owner: the copies at these nodes could not be read.
    Lost {
        /// The object.
        object: ObjectId,
        /// The nodes.
        at: Vec<NodeId>,
        /// What was tried.
        why: String,
    },
    /// Owner to worker process: the results of these tasks arrived, and the refs in them are registered.
    Received(Vec<TaskId>),
}

/// A value's place in the shared memory of the node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Located {
    /// Where it begins.
    pub offset: u64,
    /// Its length.
    pub len: u64,
}

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
    /// Capacity of the arena whose descriptor it inherited, in bytes.
    pub arena_bytes: u64,
    /// The driver, where output and panics are shown.
    pub driver: Address,
}

/// What the daemon tells a worker process.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum WorkerCommand {
    /// From now on it works under this lease.
    Lease {
        /// The lease.
        lease: LeaseId,
        /// What it holds.
        resources: ResourceSet,
        /// Its devices.
        gpus: Vec<u32>,
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
        /// The placement group in which what it submits runs too.
        captures: Option<PlacementGroupId>,
    },
    /// Finish what was sent and end.
    Drain,
    /// End now, in order.
    Exit,
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

/// A picture of the cluster, for people and tools.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct ClusterState {
    /// The cluster.
    pub cluster: Option<ClusterId>,
    /// Seconds since the head started.
    pub uptime_secs: u64,
    /// Living nodes.
    pub nodes: Vec<NodeState>,
    /// Running jobs.
    pub jobs: Vec<JobState>,
    /// Actors that are not dead.
    pub actors: Vec<ActorRow>,
    /// Placement groups.
    pub placement_groups: Vec<PlacementGroupRow>,
    /// What each namespace may hold, and what it holds.
    pub quotas: Vec<QuotaRow>,
    /// Demands that are not met.
    pub pending: Vec<PendingRow>,
}

/// A node in [`ClusterState`].
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct NodeState {
    /// As it introduced itself.
    pub info: NodeInfo,
    /// What is free.
    pub available: ResourceSet,
    /// Leases on it.
    pub leases: u32,
    /// Why nothing new is placed here, if so.
    pub draining: Option<String>,
    /// Devices that are not given to anybody, because of what still holds them.
    pub held_devices: Vec<String>,
}

/// A placement group in [`ClusterState`].
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PlacementGroupRow {
    /// The group.
    pub id: PlacementGroupId,
    /// Its name.
    pub name: Option<ScopedName>,
    /// `pending` or `placed`.
    pub state: String,
    /// How its bundles lie to each other.
    pub strategy: PlacementStrategy,
    /// What each bundle holds, and its node once it has one.
    pub bundles: Vec<(ResourceSet, Option<NodeId>)>,
}

/// A quota in [`ClusterState`].
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct QuotaRow {
    /// Of whom.
    pub namespace: String,
    /// What it may hold at a time.
    pub limit: ResourceSet,
    /// What it holds.
    pub used: ResourceSet,
}

/// A job in [`ClusterState`].
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct JobState {
    /// The job.
    pub id: JobId,
    /// Its name.
    pub name: String,
    /// Leases that it holds.
    pub leases: u32,
}

/// An actor in [`ClusterState`].
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ActorRow {
    /// The actor.
    pub id: ActorId,
    /// Its class.
    pub class_name: String,
    /// Its name.
    pub name: Option<ScopedName>,
    /// `starting`, `alive` or `restarting`.
    pub state: String,
    /// Its node.
    pub node: Option<NodeId>,
    /// Its process id.
    pub pid: Option<u32>,
    /// How often it was started again.
    pub restarts: u32,
}

/// An unmet demand in [`ClusterState`].
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PendingRow {
    /// A task's or actor's name.
    pub name: String,
    /// What `wingbeat why` takes: the actor, the placement group, or the process whose tasks wait.
    pub id: String,
    /// What each needs.
    pub resources: ResourceSet,
    /// How many wait.
    pub count: u32,
    /// Why, in words.
    pub why: String,
}

/// Why something waits, or where it runs; the answer of `wingbeat why`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Explanation {
    /// What was asked about, as people know it.
    pub subject: String,
    /// What it does now, such as `waits for a worker process to start`.
    pub state: String,
    /// Since when, in milliseconds before now, where that is known.
    pub since_ms: Option<u64>,
    /// What must come true first, and for each node why it is not there yet.
    pub reasons: Vec<String>,
    /// Who holds what is missing: what, how much, where, since when.
    pub holders: Vec<String>,
    /// What would help.
    pub help: Vec<String>,
}

/// Where an object's copies are, for a node that is to fetch it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Fetch {
    /// The object.
    pub object: ObjectId,
    /// Size and holders.
    pub stored: Stored,
}

/// A piece of an executable.
pub type Chunk = Payload;
