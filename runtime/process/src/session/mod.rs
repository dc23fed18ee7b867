//! What users call, and what user code runs in.
//!
//! - [`session`]: a process's membership in a cluster; [`blocking`], `manner`: how threads of users wait; [`beside`]: who does
//!   not go on meanwhile.
//! - [`registry`], `outgoing`: the functions and classes of this executable.
//! - [`arguments`], [`values`]: values on their way in and out, and the refs inside them; [`actor`]: handles of actors.
//! - [`submit`], [`options`], [`groups`], `cluster`: what a session can be asked to do.
//! - [`get`], [`stream`], [`context`], [`waiting`]: waiting for values, streams, the running task, and what its waits mean for
//!   others; `worker_side`: what a worker process does; `looking`: what is looked at every so often.

pub mod actor;
pub mod arguments;
pub(crate) mod beside;
pub(crate) mod blocking;
mod cluster;
pub mod context;
pub(crate) mod get;
pub mod groups;
mod looking;
mod manner;
pub mod options;
mod outgoing;
pub(crate) mod pressure;
pub mod registry;
#[allow(clippy::module_inception, reason = "it is the session")]
pub(crate) mod session;
pub(crate) mod stream;
pub mod submit;
pub(crate) mod turn;
pub mod values;
pub(crate) mod waiting;
pub(crate) mod worker_side;
