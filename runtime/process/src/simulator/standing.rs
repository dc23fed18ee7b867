//! How processes and nodes stand with the head.

use wingbeat_core::{NodeId, ProcessId};

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
