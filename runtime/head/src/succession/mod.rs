//! Which of a head and its standby leads: every decision, without IO or clock.
//!
//! - [`leading`]: the head: which standby may take over by whose votes, when it may do without it, and when it must end itself.
//! - [`standing_by`]: the standby: when it asks for votes, and when it leads.
//!
//! What a node decides is in `wingbeat_node::voter`. The argument why there is one head is in `docs/protocol.md`.

pub(crate) mod leading;
#[cfg(feature = "journal")]
pub(crate) mod standing_by;

/// Milliseconds on the clock of whoever decides.
pub(crate) type Millis = u64;

/// Votes that a standby needs.
pub(crate) fn majority(voters: usize) -> usize {
    voters / 2 + 1
}

/// Votes without which no standby has a majority.
pub(crate) fn blocking(voters: usize) -> usize {
    voters - voters / 2
}

#[cfg(all(test, feature = "journal"))]
mod simulation;
