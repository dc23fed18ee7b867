use serde::{Deserialize, Serialize};

/// Why a collective operation did not succeed. The group is of no use after it: its members no longer agree on what
/// comes next.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[non_exhaustive]
pub enum CollectiveError {
    /// A member is dead, or has left the group.
    #[error("rank {rank} is gone: its process has ended, it has left the group, or an operation has failed there")]
    PeerLost {
        /// The member.
        rank: u32,
    },
    /// Nothing was heard of a member for too long: see [`Group::set_timeout`](crate::Group::set_timeout).
    #[error(
        "rank {rank} has done nothing for {seconds} s that this member waits for; is it stopped, stuck, or elsewhere?"
    )]
    TimedOut {
        /// The member.
        rank: u32,
        /// For how long.
        seconds: u64,
    },
    /// Members have called different operations.
    #[error("rank {rank} calls {theirs}, and rank {own_rank} calls {own}; all members call the same in the same order")]
    Mismatch {
        /// Who differs.
        rank: u32,
        /// What it calls.
        theirs: String,
        /// This member.
        own_rank: u32,
        /// What this member calls.
        own: String,
    },
    /// Not all members came.
    #[error("{missing} of {members} members did not come to the meeting within {seconds} s (rank {first} is one)")]
    Missing {
        /// How many did not come.
        missing: u32,
        /// How many there are to be.
        members: u32,
        /// The first that did not.
        first: u32,
        /// How long the others waited.
        seconds: u64,
    },
    /// The options or arguments are invalid.
    #[error("{0}")]
    Invalid(String),
    /// An earlier operation has failed.
    #[error("an earlier operation of this group has failed; make a new group")]
    Broken,
    /// The system refused something.
    #[error("{what}: {why}")]
    Io {
        /// What was tried.
        what: String,
        /// What the system said.
        why: String,
    },
}

impl CollectiveError {
    pub(crate) fn io(what: &str, error: impl std::fmt::Display) -> Self {
        CollectiveError::Io { what: what.to_owned(), why: error.to_string() }
    }
}

pub(crate) type Result<T> = std::result::Result<T, CollectiveError>;
