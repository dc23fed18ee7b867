//! What a worker process has to do, without threads and IO: who takes things out, and what is said of them, is decided here;
//! the executor runs it, and so does the simulator.

mod held;
mod queue;
mod waits;

pub use held::Held;
pub use queue::{
    Actor, Become, Cancelled, DEFAULT_GROUP, GaveBack, Next, Queue, Refused, Room, Takes, ThreadCalls, group_of,
};
pub(crate) use waits::{Left, On, Waiter, Waits};
