//! What a worker process adds to a process: it runs tasks.

use std::sync::Arc;

use futures::future::BoxFuture;
use wingbeat_core::error::Error;
use wingbeat_core::{ActorId, ProcessId, TaskId};
use wingbeat_net::messages::{ProcessStacks, Work, WorkerCommand};

/// By what an actor was ended that has asked for it.
pub const EXITS: &str = "its own call of exit_actor()";

/// What a worker process adds to a process: it runs tasks. Implemented by `wingbeat-worker`. Nothing
/// here may wait. Waits begin and end on the threads of who waits; all else is called from the IO thread.
pub trait Executor: Send + Sync {
    /// Something to run, or to give back, cancel or continue, from the process `from`.
    fn deliver(&self, from: ProcessId, work: Work);
    /// A process is gone: what runs for it is pointless.
    fn peer_lost(&self, peer: ProcessId);
    /// The daemon has something to say.
    fn command(&self, command: WorkerCommand);
    /// The task that was sent here is about to wait: every unstarted task goes back to its owner. Answers whether the process goes on
    /// at home.
    fn begin_wait(&self) -> bool;
    /// It goes on.
    fn end_wait(&self);
    /// A task is about to wait that runs at home: in the process of the one that submitted it. With `blocks`, its thread does nothing
    /// else meanwhile.
    fn begin_wait_at_home(&self, task: TaskId, blocks: bool);
    /// It goes on.
    fn end_wait_at_home(&self, task: TaskId);
    /// There is something to run at home.
    fn has_work_at_home(&self);
    /// Time has passed: whoever was to go on at home with something else may be stuck. Answers whether to look again.
    fn look_at_home(&self) -> bool;
    /// The actor that runs here has asked for its end: none of its calls begins any more, and those that wait fail ([`EXITS`]).
    fn exit_actor(&self, actor: ActorId);
    /// Which of the calls that run here have the state of the actor.
    fn holders_of_state(&self) -> Vec<TaskId>;
    /// Looks what the threads of this process do.
    fn stacks(&self) -> BoxFuture<'static, Result<ProcessStacks, Error>>;
}

/// Something that waits for a task, and can be told that it does so in vain.
pub(crate) trait Interrupt: Send + Sync {
    /// Its wait for `on` can never end.
    fn deadlocked(&self, on: TaskId, error: Error);
    /// There may be room for fewer where it runs.
    fn has_less_room(self: Arc<Self>);
    /// The head asks what it waits for, if it still does.
    fn say_again(self: Arc<Self>, question: u64);
    /// The head does not know any more what is waited for.
    fn tell_anew(self: Arc<Self>);
    /// Tells the head what is waited for if it was, and was not told, when this was called last. Answers whether it is to be called
    /// again.
    fn tell_if_it_lasts(self: Arc<Self>) -> bool;
}

/// Something that blocks a thread on which others are under way.
pub(crate) trait HoldsUp: Send + Sync {
    /// The head is to know of the others if that lasts. Whether to look again.
    fn look(&self) -> bool;
    /// Whether it is to be looked at.
    fn is_looked_at(&self) -> bool;
}

/// A call that waits for its turn at the state of its actor.
pub(crate) trait ForTurn: Send + Sync {
    /// The head is to know that it waits for these, which hold the state, and for nobody else.
    fn waits_for(&self, holders: &[TaskId]);
    /// This one holds the state no more.
    fn let_go(&self, by: TaskId);
}
