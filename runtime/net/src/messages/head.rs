//! To and from the head: what processes and nodes tell it, and what it tells processes.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use wingbeat_core::memory::MemoryUsage;
use wingbeat_core::spec::*;
use wingbeat_core::value::StoreNode;
use wingbeat_core::*;

use super::node::{NodeInfo, StoreUse};
use super::state::Explanation;

/// What a process learns when it joins.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ClusterView {
    /// The cluster.
    pub cluster: ClusterId,
    /// Its living nodes.
    pub nodes: Vec<NodeInfo>,
}

/// Says what an execution waits for, when it begins to wait.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Wait {
    /// The execution that waits.
    pub task: TaskId,
    /// What to call it.
    pub name: String,
    /// Where it runs, if in an actor.
    pub within: Option<Within>,
    /// What it waits for that these have.
    pub waits_for: WaitsFor,
    /// Its waits, as of futures that are polled together. It goes on as soon as one of them is over.
    pub awaits: Vec<Await>,
}

/// One wait of an execution.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Await {
    /// The tasks that it is for. Those whose results are there are none of them.
    pub on: Vec<AwaitedTask>,
    /// It never ends if so many of these cannot: one where all are waited for, all where one is enough.
    pub ends_without: u32,
}

/// A task that an execution waits for.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct AwaitedTask {
    /// Which.
    pub task: TaskId,
    /// What it is a call of.
    pub callee: Option<Callee>,
    /// It begins when these are done, whose results are its arguments, and of each what it is a call of.
    pub after: Vec<(TaskId, Option<Callee>)>,
}

/// What an execution waits for.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum WaitsFor {
    /// The results of tasks. It can be told that it does so in vain.
    Results,
    /// Its turn at the state of its actor, which these have.
    Turn,
    /// Its thread, which another blocks.
    Thread,
}

/// Where in an actor an execution runs.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Within {
    /// The actor.
    pub actor: ActorId,
    /// The concurrency group; none of a constructor or `Drop`, beside which no call runs.
    pub group: Option<Box<str>>,
    /// How many that wait as this one does keep another call from running there: as many as run there at a time, or, if this one blocks its
    /// thread, as have a thread each.
    pub room: u32,
}

/// What a call was sent to.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Callee {
    /// The actor.
    pub actor: ActorId,
    /// The concurrency group; empty for the default one.
    pub group: Box<str>,
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
    /// The owner has lost contact with the worker process of a lease, which may still run tasks of it. So nobody else can use
    /// that process: the head ends it.
    AbandonLease(LeaseId),
    /// An execution waits for others, so that a circle among them is found. Said again when it waits for something else.
    Waiting {
        /// The lease whose CPUs are free from now on. None where they are not, since the process runs something else, and where that is
        /// known already.
        lease: Option<LeaseId>,
        /// What it waits for.
        wait: Wait,
    },
    /// It goes on, and uses the CPUs of its lease again.
    Resumed {
        /// The lease under which it runs. None for what a process has submitted itself.
        lease: Option<LeaseId>,
        /// The execution.
        task: TaskId,
    },
    /// The answer to [`HeadEvent::SayAgain`]: one for each execution that still waits, and a last one.
    SaidAgain {
        /// To which question.
        question: u64,
        /// What it waits for now; none if that was all.
        wait: Option<Wait>,
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
    /// Nobody holds a handle any more, or the user asked for an orderly end and this process's calls are done: the actor
    /// finishes what it was sent and ends.
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
    /// From a node: its memory is short, and so much is used; or it is not any more. The latest word counts.
    MemoryShort(Option<Box<MemoryUsage>>),
    /// From a node: what its object store holds. The latest word counts.
    StoreUsed(StoreUse),
    /// From a node: a worker process that had reported has ended, whoever wanted that, and also one without a lease. Comes before the
    /// `LeaseEnded` of its lease.
    WorkerDied(WorkerDeath),
    /// From a node: in its store are objects of these processes, made for these jobs. It asks who of them is gone.
    Owners(BTreeMap<JobId, BTreeSet<ProcessId>>),
    /// From a node: it ends, and why. Its connection ends next.
    NodeEnds(String),
    /// A driver leaves: the end of its connection is its end.
    Leaves,
    /// To a head that was started again: what this process has. Said before all else, in several parts if it is much.
    Holds {
        /// Its leases.
        leases: Vec<LeaseId>,
        /// Actors that it made and that somebody may hold.
        actors: Vec<ActorId>,
        /// Whether this is the last part.
        is_all: bool,
    },
    /// This life of the actor is over, since this process kills it; or, to a head that was started again, since it was told so or
    /// has killed it. The actor may live again.
    LifeOver {
        /// The actor.
        actor: ActorId,
        /// Which life.
        life: Incarnation,
    },
    /// To a head that was started again: an actor that this process made, and of which it has not heard that it is dead.
    Made {
        /// As it was made.
        spec: Arc<ActorSpec>,
        /// Its latest life, if any has begun.
        life: Option<Incarnation>,
        /// How many moves so far have cost it no restart.
        moves: u32,
        /// The node and the process of that life, unless it is known to be over.
        place: Option<(NodeId, ProcessId)>,
    },
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

impl HeadMessage {
    /// Whether it is said also to a head that was started again since, after which who says it tells all that it has: it ends something,
    /// or tells of an end, and what is left does not show that.
    #[must_use]
    pub fn outlives_head(&self) -> bool {
        matches!(
            self,
            HeadMessage::AbandonLease(_)
                | HeadMessage::KillActor { .. }
                // Said twice, it ends the same life.
                | HeadMessage::LifeOver { .. }
                | HeadMessage::TerminateActor { .. }
                | HeadMessage::WorkerDied(_)
                | HeadMessage::Leaves
                | HeadMessage::NodeEnds(_)
        )
    }
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
    /// The worker process with this process id, on this node if one is named.
    Pid(u32, Option<NodeId>),
}

impl std::fmt::Display for Subject {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Subject::Task(task) => task.fmt(f),
            Subject::Actor(actor) => actor.fmt(f),
            Subject::PlacementGroup(group) => group.fmt(f),
            Subject::Node(node) => node.fmt(f),
            Subject::Process(process) => process.fmt(f),
            Subject::Pid(pid, None) => pid.fmt(f),
            Subject::Pid(pid, Some(node)) => write!(f, "{pid}@{node}"),
        }
    }
}

impl std::str::FromStr for Subject {
    type Err = InvalidId;

    fn from_str(text: &str) -> Result<Self, InvalidId> {
        let (pid, node) = text.split_once('@').map_or((text, None), |(pid, node)| (pid, Some(node)));
        if let Ok(pid) = pid.parse() {
            return Ok(Subject::Pid(pid, node.map(str::parse).transpose()?));
        }
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
                expected: "task-…, object-…, actor-…, group-…, node-…, process-… or the process id of a worker process",
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
    /// It runs in this process, which has submitted it.
    InProcess(Explanation, ProcessId),
}

/// How a worker process ended.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct WorkerDeath {
    /// The process.
    pub process: ProcessId,
    /// Its process id.
    pub pid: u32,
    /// Its job: a head that was started again has not heard of it otherwise.
    pub job: JobId,
    /// Its node.
    pub node: NodeId,
    /// What it was leased for.
    pub lease: Option<LeaseId>,
    /// How it ended.
    pub exit: Exit,
    /// The owner's number of the last task that it started for this lease (see `Work::Tasks::first`) plus 1: tasks
    /// after it were never touched. 1 if an actor's constructor had begun. 0 if nothing had begun.
    pub started: u64,
    /// Whether the head had moved what ran there to other nodes: what had begun begins again at no cost.
    pub is_moved: bool,
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
        node: StoreNode,
        /// Its process id.
        pid: u32,
    },
    /// What a demand for leases that are to be spread has come to: an answer to each, and to each change. Who has tasks for all of
    /// them does not push all to the first.
    Starting {
        /// Which demand.
        shape: Arc<Shape>,
        /// What was wanted.
        wanted: u32,
        /// How many leases have a place, and their processes are being started: `Granted` follows for each.
        leases: u32,
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
    /// The cluster is stopped: no other head will follow.
    Stops,
    /// Where the head's standby would serve, if it has one.
    Standby(Option<Address>),
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
    /// These executions of this process are in what looks like a circle: what do they wait for now?
    SayAgain {
        /// The number of the question.
        question: u64,
        /// The executions.
        tasks: Vec<TaskId>,
    },
    /// The wait that this process announced closes a circle.
    Deadlock {
        /// The execution that waits.
        task: TaskId,
        /// What it waits for in the circle; the execution may wait for other things, too.
        on: TaskId,
        /// The circle.
        cycle: Vec<String>,
    },
}
