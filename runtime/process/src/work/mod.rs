//! What a worker process has to do, without threads and IO: who takes things out, and what is said of them, is decided here;
//! the executor runs it, and so does the simulator.

mod group;
mod held;
mod queue;
mod waits;

pub use group::{ByGroup, DEFAULT_GROUP, Place, RoomNews, Takes, ThreadCalls, group_of};
pub use held::Held;
pub use queue::{Actor, Become, Cancelled, GaveBack, Next, Queue, Refused};
pub(crate) use waits::{Later, Left, On, Waiter, Waits};
