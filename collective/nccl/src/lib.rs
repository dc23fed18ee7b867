//! Collective operations between the GPUs of ranked actors, by NCCL.
//!
//! NCCL is opened when it is first used, from PyTorch's own wheel if there is one: nothing is needed to build this.
//!
//! - [`DeviceGroup`]: the operations, on a `wingbeat_collective::Group` whose members have a device each.
//! - `communicator`: NCCL's communicator, with deadlines, and a thread that aborts it when a member dies.
//! - [`Library`]: NCCL itself.

mod communicator;
mod element;
mod error;
mod group;
mod library;
#[cfg(test)]
#[path = "../tests/support/mod.rs"]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
mod support;

pub use cudarc;
pub use element::DeviceElement;
pub use error::NcclError;
pub use group::{DeviceGroup, Settings, device};
pub use library::Library;
