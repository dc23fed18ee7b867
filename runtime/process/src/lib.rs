//! One participating process of Wingbeat, driver or worker process: what it owns, what it submits, and
//! what it waits for. Three layers, each of which knows only those before it:
//!
//! - `owner`: what the process owns and waits for, without IO: objects and refs, which task goes to which lease and which call to
//!   which actor, making lost objects again.
//! - `wire`: its connections, to other processes, the head and its node.
//! - `session`: what users call.
//!
//! Beside them, [`work`]: what a worker process has to do; [`programs`]: what it has started and can ask where it is;
//! [`recorded`]: what a process heard and said, if that is written down; and [`note()`]: what the runtime itself says.

mod note;
mod owner;
pub mod programs;
pub mod recorded;
mod session;
#[cfg(test)]
mod simulator;
mod user_thread;
mod wire;
pub mod work;

pub use note::note;
pub use owner::object::Handle;
pub use owner::outbound::Outbound;
pub use session::actor::ActorHandle;
pub use session::arguments::{Arguments, CallArgs};
pub use session::beside::UnderWay;
pub use session::blocking::block_on;
pub use session::get::{ReadyFuture, Value, ValueFuture};
pub use session::pressure::memory_is;
pub use session::session::{Entered, Session};
pub use session::stream::StreamHandle;
pub use session::submit::Submitted;
pub use session::turn::{Held, with_state};
pub use session::waiting::Waiting;
pub use session::worker_side::ForAnotherThread;
pub use session::{actor, arguments, context, groups, options, registry, submit, values};
pub use wingbeat_net::messages::{ClusterState, Explanation, Work};
pub use wingbeat_net::panics::said as text_of_panic;
pub use wire::executor::{EXITS, Executor};
pub use wire::head_link::HeadLink;
pub use wire::io::{Io, does_io};
pub use wire::node_link::NodeLink;
pub use wire::process::{Assigned, Config, Prepared, Process};
pub use wire::service::PeerService;
pub use wire::steward::Steward;
pub use wire::view::ObjectView;
