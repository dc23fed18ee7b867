//! The object store of one node: shared memory that every process of the node maps.
//!
//! The node daemon alone holds a [`NodeStore`], and with it all knowledge of which bytes belong to
//! what. The other processes hold a [`Mapping`] of the same memory and use the [`Extent`]s that the
//! daemon answers them. An object's life:
//!
//! 1. a process asks to *create* it and is given an extent that is its alone to fill;
//! 2. it *seals* the object, which never changes again;
//! 3. readers *pin* it, read it in place, and *release* it; pinned memory neither moves nor spills;
//! 4. its owner *deletes* it; the memory is free when the last pin is gone.
//!
//! A store that is full *spills* its least recently used objects to disk and restores them when
//! they are asked for. Where the daemon has it [write ahead](NodeStore::write_ahead), most of them are
//! written before that. A process that is gone loses its unsealed extents and its pins.
//!
//! ```
//! # use wingbeat_core::{ObjectId, ProcessId, TaskId};
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use wingbeat_store::{Mapping, NodeStore, StoreConfig};
//!
//! // In the node daemon:
//! let store = NodeStore::new(StoreConfig { capacity: 1 << 20, spill_dir: None, spill_capacity: 0, write_ahead_above: u64::MAX })?;
//! let (process, id) = (ProcessId(1), ObjectId { task: TaskId { owner: ProcessId(1), seq: 0 }, index: 0 });
//! let descriptor = store.attach(process).try_clone_to_owned()?;
//! let extent = store.create(id, 5, process)?;
//!
//! // In the process, which was sent the descriptor and the extent:
//! let mapping = Mapping::open(descriptor, store.capacity())?;
//! // SAFETY: the extent is the answer to `create`, and it is sealed when the view is gone.
//! unsafe { mapping.write_region(extent)? }.copy_from_slice(b"hello");
//!
//! // And so on:
//! store.seal(id, process)?;
//! let extent = store.get(id, process)?;
//! // SAFETY: `get` has pinned it, and it is released when the view is gone.
//! let region = unsafe { mapping.region(extent)? };
//! assert_eq!(&*region, b"hello");
//! drop(region);
//! store.release(id, process);
//! store.delete(id);
//! # Ok(()) }
//! ```
//!
//! From the bottom up: [`arena`] is the memory and [`mapping`] a process's view of it; [`allocator`]
//! divides it, [`table`] knows the objects (both are pure: no IO, no clock), [`spill`] is the
//! space on disk, [`store`] puts the four together.
//!
//! This crate never speaks to a network, never starts a thread, and knows no async runtime: calls
//! that may touch the disk say so, and belong on a thread that may block.

#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
compile_error!("Wingbeat's object store needs 64-bit Linux (5.10 or newer): build it there");

pub mod allocator;
pub mod arena;
mod error;
mod extent;
pub mod mapping;
mod ranges;
pub mod spill;
pub mod store;
pub mod table;

pub use arena::Arena;
pub use error::{AlreadyExists, CreateError, Full, GetError, HeldBy, RegionError, SpillError, UnsealedError};
pub use extent::Extent;
pub use mapping::{Mapping, Region, WriteRegion};
pub use store::{NodeStore, Spilled, StoreConfig};
pub use table::StoreStats;
