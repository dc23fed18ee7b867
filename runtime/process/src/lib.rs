//! One participating process of Wingbeat, driver or worker process: what it owns, what it submits, and
//! what it waits for.
//!
//! - `process`: what takes part, its start and its end; `session`: the same as users hold it; `io`: the IO thread, and how
//!   others wait.
//! - [`registry`]: the functions and classes of this executable.
//! - [`arguments`], [`refs`], [`view`]: values on their way in and out, and the refs inside them.
//! - `object`: owned and borrowed objects, and the handles that count them; `borrowing`: how refs are counted across processes,
//!   pure; `worklist`: freeing what is nested deeply.
//! - `dispatch` and `calls`: the pure decisions: which task goes to which lease, which call to which actor.
//! - `submission` and `submit`: the shell around them; `lineage`: making lost objects again.
//! - [`groups`]: placement groups; `locality`: tasks go to their data; `standing`: what a task waits for;
//!   `cluster`: questions to the head.
//! - `peers`, [`head`], [`storage`], `service`: the connections.
//! - [`get`], [`stream`], [`context`]: waiting for values, streams, and the running task; `waiting`: what its waits mean for
//!   others.

pub mod actor;
pub mod arguments;
mod borrowing;
mod call_queue;
mod calls;
mod cluster;
mod contact;
pub mod context;
mod deletions;
mod dispatch;
pub mod get;
pub mod groups;
pub mod head;
mod io;
mod leftovers;
mod lineage;
mod locality;
mod name;
pub mod object;
pub mod options;
mod peers;
mod process;
pub mod refs;
pub mod registry;
mod service;
mod session;
mod standing;
pub mod storage;
pub mod stream;
mod submission;
pub mod submit;
pub mod view;
mod waiters;
mod waiting;
mod wanted;
mod worker_side;
mod worklist;

pub use actor::ActorHandle;
pub use arguments::{Arguments, CallArgs, Outbound};
pub use get::{Value, ValueFuture};
pub use io::{Io, block_on};
pub use object::Handle;
pub use process::{Config, Executor, Prepared, Process, Work};
pub use service::PeerService;
pub use session::{Entered, Session};
pub use stream::StreamHandle;
pub use submit::Submitted;
pub use view::ObjectView;
pub use waiting::Waiting;
pub use wingbeat_net::messages::{ClusterState, Explanation};
