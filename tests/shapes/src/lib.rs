//! Every operation in every shape.
//!
//! A [`Cell`] is one operation with a payload, a count, a pace and a fault. [`run`] runs it and says whether every result
//! was right, or failed with a typed error where an error is allowed. [`cells`] chooses cells: all of them, or as many as
//! cover every pair of values, by a seed.
//!
//! `tests/matrix.rs` runs cells in a private cluster, on a node apart, and on two machines; the `soak` program runs them
//! for as long as it is told, and then compares what the cluster's processes hold with what they held at the start.

mod cell;
mod choice;
mod operations;
mod run;
pub mod usage;
mod watchdog;

pub use cell::{Cell, Fault, Operation, Pace, Place};
pub use choice::{Chance, Size, cells};
pub use run::run;
pub use watchdog::Watchdog;
