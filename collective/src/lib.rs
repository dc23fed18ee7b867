//! Collective operations for groups of ranked actors.
//!
//! Every member calls the same operations in the same order, with the same type and length. Members on one machine meet
//! in shared memory, others over TCP; a member that dies or leaves is an error at the others within a second (within
//! eleven, while they still wait for another one to come), and an operation that does not match is one that names who does
//! what.
//!
//! - [`Meeting`]: where members find each other.
//! - [`Group`]: the operations.
//! - `header`: what members check of each other; `element`: what is reduced, and how; `halves`: of
//!   half precision.
//! - `mesh`: a connection to every other member; `shared`: shared memory on one machine; `ring`: the operations over
//!   connections; `machines`: both, on several machines with several members.
//!
//! ```no_run
//! use wingbeat_collective::{Group, Meeting, MeetingHandle, Op};
//!
//! struct Worker;
//!
//! #[wingbeat::actor]
//! impl Worker {
//!     fn new() -> Self {
//!         Worker
//!     }
//!
//!     fn sum(&self, meeting: MeetingHandle, rank: u32) -> Result<Vec<f32>, String> {
//!         let mut group = Group::join(&meeting, rank).map_err(|error| error.to_string())?;
//!         let mut values = vec![rank as f32; 4];
//!         group.all_reduce(&mut values, Op::Sum).map_err(|error| error.to_string())?;
//!         Ok(values)
//!     }
//! }
//!
//! # async fn run() -> wingbeat::Result<()> {
//! wingbeat::init().await?;
//! let meeting = Meeting::of(2);
//! let workers = [Worker::remote(), Worker::remote()];
//! let sums: Vec<_> = (0..2).map(|rank| workers[rank as usize].sum(meeting.clone(), rank)).collect();
//! assert_eq!(wingbeat::get_all(&sums).await?, [[1.0; 4]; 2]);
//! # Ok(())
//! # }
//! ```

mod element;
mod error;
mod group;
mod halves;
mod header;
mod limits;
#[cfg(test)]
mod local;
mod machines;
#[cfg(test)]
mod matrix;
mod meeting;
mod memory;
mod mesh;
mod phase;
mod ring;
mod shared;

pub use element::{Element, Op};
pub use error::CollectiveError;
pub use group::{Call, Group, Transport};
pub use half::{bf16, f16};
pub use meeting::{Meeting, MeetingHandle};
pub use mesh::Peers;
