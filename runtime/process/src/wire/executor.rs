//! What a worker process adds to a process: it runs tasks.

use futures::future::BoxFuture;
use wingbeat_core::error::Error;
use wingbeat_core::{ProcessId, TaskId};
use wingbeat_net::messages::{ProcessStacks, Work, WorkerCommand};

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
    /// Looks what the threads of this process do.
    fn stacks(&self) -> BoxFuture<'static, Result<ProcessStacks, Error>>;
}

/// Something that waits for a task, and can be told that it does so in vain.
pub(crate) trait Interrupt: Send + Sync {
    /// Its wait for `on` can never end.
    fn deadlocked(&self, on: TaskId, error: Error);
    /// The head does not know any more what is waited for.
    fn tell_anew(&self);
}
