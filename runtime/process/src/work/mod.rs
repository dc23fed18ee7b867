//! What a worker process has to do, without threads and IO: who takes things out, and what is said of them, is decided here;
//! the executor runs it, and so does the simulator.

mod awaited;
mod group;
mod held;
mod queue;
mod waits;

pub(crate) use awaited::{Awaited, On};
pub use group::{ByGroup, DEFAULT_GROUP, Place, Takes, ThreadCalls, group_of};
pub use held::Held;
pub use queue::{Actor, Become, Cancelled, GaveBack, Next, Queue, Refused};
pub(crate) use waits::{Coming, Doing, Later, Left, Manner, Waiter, Waits};
