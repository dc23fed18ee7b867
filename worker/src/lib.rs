//! The node daemon, and the executor inside a worker process.
//!
//! - [`entry`]: how the program's own executable becomes a worker process or a guard, before `main`.
//! - [`environment`]: which variables of a driver go where.
//! - [`node`]: the daemon of a machine.
//! - `guard`: the small process that starts worker processes and outlives none of them.
//! - [`gpus`]: the GPUs of this machine.
//! - `executor`: a worker process.
//! - `home`: the node whose store a driver uses.
//! - `machine`: what memory and CPUs this process may use.
//! - [`join`]: how a driver joins a cluster, or starts a private one inside itself.
//! - [`offer`]: what a node offers, as people say it.
//! - `log` (feature of that name): what daemons write about themselves; `aside`: what is done beside the rest, on a thread of its own.
//! - `testing` (feature of that name): clusters of processes of a test's own executable.

#[cfg(feature = "log")]
pub mod aside;
pub mod entry;
pub mod environment;
mod executor;
pub mod gpus;
mod guard;
mod home;
pub mod join;
#[cfg(feature = "log")]
pub mod log;
mod long_waits;
mod machine;
pub mod node;
pub mod offer;
mod page;
mod start;
mod terminal;
#[cfg(feature = "testing")]
pub mod testing;
pub mod token;
