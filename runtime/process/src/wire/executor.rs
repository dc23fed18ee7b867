//! What a worker process adds to a process: it runs tasks.

use std::sync::Arc;

use wingbeat_core::error::Error;
use wingbeat_core::{ActorId, LeaseId, ObjectId, ProcessId, TaskId};
use wingbeat_net::messages::WorkerCommand;

/// What a worker process adds to a process: it runs tasks. Implemented by `wingbeat-worker`, called from
/// the IO thread; nothing here may wait.
pub trait Executor: Send + Sync {
    /// Something to run, or to give back, cancel or continue, from the process `from`.
    fn deliver(&self, from: ProcessId, work: Work);
    /// A process is gone: what runs for it is pointless.
    fn peer_lost(&self, peer: ProcessId);
    /// The daemon has something to say.
    fn command(&self, command: WorkerCommand);
    /// The code that runs is about to wait: every unstarted task goes back to its owner.
    fn begin_wait(&self);
    /// It goes on.
    fn end_wait(&self);
}

/// See [`Executor::deliver`].
#[derive(Debug)]
pub enum Work {
    /// Tasks of a lease; the first has this number.
    Tasks(LeaseId, u64, Vec<Arc<wingbeat_core::spec::TaskSpec>>),
    /// Calls of the actor that this process is.
    Calls(ActorId, wingbeat_core::Incarnation, Vec<Arc<wingbeat_core::spec::TaskSpec>>),
    /// Up to so many unstarted tasks are to go back.
    TakeBack(LeaseId, u32),
    /// A task is not wanted any more.
    Cancel(TaskId, bool),
    /// The consumer of a stream took so many items.
    StreamTaken(TaskId, u32),
    /// Results arrived, and the refs in them are registered.
    Received(Vec<TaskId>),
    /// An item of a stream arrived, and the refs in it are registered.
    ItemReceived(ObjectId),
}

/// Something that waits for a task, and can be told that it does so in vain.
pub(crate) trait Interrupt: Send + Sync {
    /// Its wait for `on` can never end.
    fn deadlocked(&self, on: TaskId, error: Error);
}
