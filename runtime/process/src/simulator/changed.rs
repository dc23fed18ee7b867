//! What is to be checked after the head has decided something.

use std::collections::BTreeSet;

use wingbeat_core::{NodeId, ProcessId};

/// Of which nodes and processes the head's state may have changed.
#[derive(Default)]
pub(super) struct Changed {
    pub nodes: BTreeSet<NodeId>,
    pub processes: BTreeSet<ProcessId>,
}
