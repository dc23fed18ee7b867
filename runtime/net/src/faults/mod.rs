//! Faults of real connections between real processes, for the matrix of faults (`tests/matrix`). Release builds have none of it.
//!
//! `WINGBEAT_FAULT` names what happens to which kind of message: `lose HeadMessage::Demand`, with several after another by `;`. A
//! connection of a process that has the variable goes through a relay inside that process, which knows the frames that the process
//! sends:
//!
//! With a number after it (`lose HeadMessage::Demand@3`) it is the third such frame of a process, and not the first.
//!
//! | fault | what happens to the frame | when that happens |
//! |---|---|---|
//! | `lose` | it is not sent, and the connection ends | a cable, a switch or a machine fails |
//! | `lose-answer` | it arrives, its answer does not, and the connection ends | the same, a little later |
//! | `repeat` | it arrives twice | who lost an answer says it again |
//! | `delay` | it arrives, with all after it, five seconds later (`WINGBEAT_FAULT_MS`) | congestion, a process that stands still |
//! | `cut` | it arrives, and the connection ends at once | the other side is busy with it when that is noticed |
//!
//! `WINGBEAT_FAULT_DIR` names a folder in which whoever is the first of a cluster to do a fault leaves a file of that name, so that
//! no other process does it too, and whoever asks knows that it was done. With `note` as the fault and no kind, each kind leaves such a
//! file, and nothing happens to it.
//!
//! A stream loses nothing in its middle and repeats nothing: so a loss ends the connection, and of a repeated request the second
//! answer goes nowhere.

mod kinds;
#[cfg(debug_assertions)]
mod relay;

pub use kinds::{Carries, all};

use crate::stream::Stream;

/// The stream that a connection is to use: this one, unless faults are asked for.
#[cfg(debug_assertions)]
pub(crate) fn between<Asks: Carries>(stream: Stream) -> Stream {
    match relay::asked_for() {
        Some(plan) => relay::relayed::<Asks>(stream, plan),
        None => stream,
    }
}

/// There are no faults in a release build.
#[cfg(not(debug_assertions))]
pub(crate) fn between<Asks: Carries>(stream: Stream) -> Stream {
    stream
}
