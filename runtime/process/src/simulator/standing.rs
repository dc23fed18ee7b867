//! How processes and nodes stand with the head, and what they say to the next one.

use wingbeat_core::{NodeId, ProcessId};
use wingbeat_net::messages::HeadMessage;

/// How a process or a node stands with the head.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) enum Standing {
    /// It has said nothing yet.
    #[default]
    Never,
    Here,
    /// It was connected with an earlier head.
    Away,
}

/// Who looks for the head.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Finder {
    Process(ProcessId),
    Node(NodeId),
}

/// What is said to the next head all the same.
pub(super) fn is_kept(message: &HeadMessage) -> bool {
    matches!(
        message,
        HeadMessage::AbandonLease(_)
            | HeadMessage::KillActor { .. }
            | HeadMessage::TerminateActor { .. }
            | HeadMessage::Leaves
    )
}

/// What a node says to the next head all the same.
pub(super) fn is_death(message: &HeadMessage) -> bool {
    matches!(message, HeadMessage::WorkerDied(_))
}
