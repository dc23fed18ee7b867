//! What a node decides: which worker processes serve the head's leases, which are started for that, and how they end.
//!
//! Nothing here does IO or reads a clock. [`State::step`] takes what the head, the guard and worker processes say, and what
//! the daemon has done, and answers with what the daemon must do. So the same code runs in the daemon and in the
//! simulator.
//!
//! - `stage`: the life of one worker process; `workers`: all of them, and who can take a lease.
//! - `voter`: which head it supports.
//! - [`term`]: until when the node may go on without a word from the head.
//! - `state`: what happens to them; `memory`: who is ended when memory is short.

mod clock;
pub mod memory;
mod stage;
mod state;
pub mod term;
pub mod voter;
mod workers;

pub use self::clock::Millis;
pub use self::state::{Action, Config, Event, Job, State};

#[cfg(test)]
mod tests;
