//! What nodes are yet to delete.

use std::sync::Arc;

use dashmap::{DashMap, DashSet};
use parking_lot::Mutex;
use tokio::sync::Notify;
use wingbeat_core::{NodeId, ObjectId};

/// What each node is yet to delete.
#[derive(Default)]
pub(crate) struct Deletions {
    pub(super) nodes: DashMap<NodeId, Arc<AtNode>>,
    /// Nodes that are gone: nobody dials them. Eight bytes each, for as long as the process lives.
    pub(super) gone: DashSet<NodeId>,
}

/// What one node is yet to delete.
#[derive(Default)]
pub(super) struct AtNode {
    pub queue: Mutex<Vec<ObjectId>>,
    pub wake: Notify,
}

impl Deletions {
    /// The node is gone, with all copies.
    pub(crate) fn forget(&self, node: NodeId) {
        // First, so that nobody who comes too late begins again.
        self.gone.insert(node);
        if let Some((_, deletions)) = self.nodes.remove(&node) {
            deletions.wake.notify_one();
        }
    }
}
