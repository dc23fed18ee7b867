//! The three tarpc services: of the head, of a node daemon, and of every participating process.

use wingbeat_core::codec::Payload;
use wingbeat_core::spec::*;
use wingbeat_core::*;

use crate::handshake::Epoch;
use crate::messages::*;

/// Served by the head; called by drivers, worker processes, node daemons and the CLI.
#[tarpc::service]
pub trait Head {
    /// One-way messages, in order: a batch of this number. A batch may come again over another connection.
    async fn deliver(number: u64, messages: Vec<HeadMessage>);
    /// Why the head does not know any more who has connected again; none if it does. Asked before anything else is said over the new
    /// connection.
    async fn resume() -> Option<String>;
    /// A node daemon joins, with what runs on it if it knew a head before. It must do so before its other messages.
    async fn join_node(node: NodeInfo, running: Running) -> Result<ClusterView, Error>;
    /// A driver joins.
    async fn join_job(job: JobSpec) -> Result<ClusterView, Error>;
    /// Makes an actor, or answers with the one of that name when `or_get` is set.
    async fn create_actor(spec: ActorSpec, or_get: bool) -> Result<ActorInfo, Error>;
    /// Finds an actor by name.
    async fn find_actor(name: ScopedName, asks: JobId) -> Result<ActorInfo, Error>;
    /// Makes a placement group. The answer says that it is known, durably; not that it has its places.
    async fn create_placement_group(spec: PlacementGroupSpec) -> Result<PlacementGroupSpec, Error>;
    /// Removes a placement group and ends what runs in it; no error if it is gone already.
    async fn remove_placement_group(group: PlacementGroupId) -> Result<(), Error>;
    /// Finds a placement group by name.
    async fn find_placement_group(name: ScopedName) -> Result<PlacementGroupSpec, Error>;
    /// Sets what a namespace may hold at a time; anything if nothing is said.
    async fn set_quota(namespace: String, limit: Option<ResourceSet>) -> Result<(), Error>;
    /// Places nothing more on a node, moves what still runs there after so many milliseconds, and then ends its daemon
    /// if `stops`. With no time, the node takes work again.
    async fn drain_node(node: NodeId, within_ms: Option<u64>, why: String, stops: bool) -> Result<(), Error>;
    /// Why something waits, or where it runs.
    async fn explain(subject: Subject) -> Result<Explanation, Error>;
    /// What the threads of the worker process of a task, a call or an actor do.
    async fn stacks(subject: Subject) -> Result<ProcessStacks, Error>;
    /// The worker processes that run something of a job, but for its detached actors.
    async fn processes_of_job(job: JobId) -> Result<Vec<ProcessId>, Error>;
    /// Waits, for a moment, until the actors of a job that are about to end have ended and what its worker processes have printed so far was
    /// shown, on every node. Whether it was.
    async fn settle_output(job: JobId) -> bool;
    /// Whether the node is part of the cluster; none where this head may not lead, and cannot say. Asked by the node itself, by
    /// its worker processes when its daemon is silent, and by a node that it refuses when an object is fetched from it.
    async fn knows_node(node: NodeId) -> Option<bool>;
    /// Whether a process has certainly ended. Asked by those who cannot reach it.
    async fn has_ended(process: ProcessId) -> bool;
    /// A piece of a program that the head keeps for detached actors, from `offset`; empty at its end, and none if it is
    /// not kept.
    async fn read_program(hash: String, offset: u64) -> Result<Option<Payload>, Error>;
    /// A picture of the cluster.
    async fn state() -> ClusterState;
    /// A standby follows this head: it has written what it was sent so far, and is sent what is new. The answer comes when there is something
    /// new, and at the latest after a moment.
    async fn follow(asks: Follow) -> Result<Followed, Error>;
    /// Ends every job and node, and then the head itself.
    async fn stop();
}

/// Served by a node daemon; called by the head, by processes on its machine, and by owners of objects.
#[tarpc::service]
pub trait Node {
    /// One-way messages of a process, in order.
    async fn deliver(messages: Vec<NodeMessage>);
    /// One-way messages of the head, in order: a batch of this number. A batch may come again over another connection.
    async fn orders(number: u64, messages: Vec<NodeMessage>);
    /// A worker process that the daemon started reports.
    async fn register_worker(address: Address, pid: u32) -> Result<WorkerStart, Error>;
    /// Reserves memory for an object that the caller is about to write, unless it is there, complete, and not to be replaced.
    /// The steward answers for it when its owner is no more.
    async fn create(object: ObjectId, size: u64, replaces: bool, steward: Option<Box<Address>>)
    -> Result<Place, Error>;
    /// The object is complete and may be read.
    async fn seal(object: ObjectId) -> Result<(), Error>;
    /// What the threads of a worker process here do.
    async fn stacks(process: ProcessId) -> Result<ProcessStacks, Error>;
    /// The worker process here that has started the process with this id, or sees it through.
    async fn process_above(pid: u32) -> Option<ProcessId>;
    /// Waits until what the job's worker processes here have printed so far was shown. True when that is so.
    async fn settle_output(job: JobId) -> bool;
    /// Makes the object readable here, from another node or from disk if need be, and pins it for the
    /// caller. The second value says whether this node holds a copy that it did not hold before.
    async fn fetch(what: Fetch) -> Result<(Located, bool), Error>;
    /// A part of what the node has kept of what the last head knew: what follows this key, or the first. Empty at the end.
    async fn read_kept(after: Option<Payload>) -> Vec<(Payload, Payload)>;
    /// From the head: whether this node still accepts it, and which standby it has. Asked again and again while there may be one.
    async fn support(leads: Leadership) -> Support;
    /// From a standby: whether this node accepts it as the next head.
    async fn elect(ballot: Ballot) -> Vote;
}

/// Served by a standby; called by a head that is started again.
#[tarpc::service]
pub trait Standby {
    /// Whether the standby lets a head that is started again with the file of the last one lead with this epoch. No answer while that is
    /// not decided.
    async fn may_lead(epoch: Epoch) -> Leave;
}

/// Served by drivers and worker processes; called by each other, by the head and by node daemons.
#[tarpc::service]
pub trait Process {
    /// One-way messages from another process, in order: a batch of this number in a contact of that. A batch may come again.
    async fn deliver(contact: u64, number: u64, messages: Vec<PeerMessage>);
    /// What the head has to say, in order: a batch of this number. A batch may come again over another connection.
    async fn head_events(number: u64, events: Vec<HeadEvent>);
    /// What the daemon has to say to its worker process, in order.
    async fn commands(commands: Vec<WorkerCommand>);
    /// Output of user code of this driver's job.
    async fn logs(lines: Vec<LogLine>);
    /// What a task of this process waits for, or where it is.
    async fn explain_task(task: TaskId) -> TaskStanding;
    /// What the threads of this worker process do. Asked by its daemon.
    async fn stacks() -> Result<ProcessStacks, Error>;
    /// Of these objects, whose owners have ended, those for which this steward answers. If their jobs are over, too, it waits no longer for
    /// somebody to say that he refers to them.
    async fn keeps(objects: Vec<ObjectId>, are_jobs_over: bool) -> Vec<ObjectId>;
    /// A piece of this driver's executable, from `offset`; empty at its end.
    async fn read_executable(offset: u64) -> Result<Payload, Error>;
}
