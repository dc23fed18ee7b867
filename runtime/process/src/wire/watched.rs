//! Placement groups that this process watches.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::sync::Notify;
use wingbeat_core::codec::encode_value;
use wingbeat_core::error::Error;
use wingbeat_core::spec::{Draining, PlacementGroupState};
use wingbeat_core::value::{ObjectValue, Packed};
use wingbeat_core::{NodeId, PlacementGroupId};

use crate::owner::object::Handle;

/// The longest that a node may be drained, in milliseconds: a hundred years.
const LONGEST: u64 = 100 * 365 * 86_400_000;

/// Groups that this process watches.
#[derive(Default)]
pub(crate) struct Watched {
    pub groups: Mutex<BTreeMap<PlacementGroupId, Watch>>,
    /// Something was said of one of them.
    pub told: Notify,
}

/// What becomes of a placed group one of whose nodes is to be free of work.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Drained {
    /// The node.
    pub node: NodeId,
    /// Why, for people.
    pub why: String,
    /// When what still runs there is ended.
    pub deadline: Instant,
}

impl Drained {
    /// Whether it says the same; deadlines are told as what is left, which takes a moment.
    pub(crate) fn is_as(&self, other: &Drained) -> bool {
        const TOLD_IN: Duration = Duration::from_secs(1);
        let between = self.deadline.max(other.deadline) - self.deadline.min(other.deadline);
        self.node == other.node && self.why == other.why && between < TOLD_IN
    }
}

/// What is known of a group, and who waits for it.
#[derive(Default)]
pub(crate) struct Watch {
    pub state: Option<PlacementGroupState>,
    /// The node of it that is drained first.
    pub drained: Option<Drained>,
    /// Refs that are there as soon as the group is placed.
    pub ready: Vec<Handle>,
}

impl Watched {
    /// The head's word on a group, for those who wait for it.
    pub(super) fn is_now(&self, id: PlacementGroupId, state: &PlacementGroupState) -> Vec<Handle> {
        let mut groups = self.groups.lock();
        let Some(watch) = groups.get_mut(&id) else { return Vec::new() };
        watch.state = Some(state.clone());
        if let PlacementGroupState::Placed { nodes, draining } = state {
            let first = draining.iter().min_by_key(|node| node.left_ms);
            let first = first.map(|Draining { node, why, left_ms }| Drained {
                node: *node,
                why: why.clone(),
                deadline: Instant::now() + Duration::from_millis((*left_ms).min(LONGEST)),
            });
            // A drain is over when it was taken back, and not because its node is gone.
            let is_over = watch.drained.as_ref().is_none_or(|known| nodes.contains(&known.node));
            if first.is_some() || is_over {
                watch.drained = first;
            }
        }
        self.told.notify_waiters();
        match state {
            PlacementGroupState::Pending => Vec::new(),
            PlacementGroupState::Placed { .. } => std::mem::take(&mut watch.ready),
            PlacementGroupState::Gone { .. } => groups.remove(&id).map(|watch| watch.ready).unwrap_or_default(),
        }
    }

    /// All that are watched.
    pub(super) fn ids(&self) -> Vec<PlacementGroupId> {
        self.groups.lock().keys().copied().collect()
    }

    /// The session is over: nobody will say anything of groups any more.
    pub(crate) fn end(&self) -> Vec<Handle> {
        let groups = std::mem::take(&mut *self.groups.lock());
        groups.into_values().flat_map(|watch| watch.ready).collect()
    }
}

/// What a ref to the readiness of a group gives.
pub(crate) fn ready_value(state: &PlacementGroupState) -> ObjectValue {
    let nodes = match state {
        PlacementGroupState::Gone { cause } => return ObjectValue::Failed(cause.clone()),
        PlacementGroupState::Placed { nodes, .. } => nodes,
        PlacementGroupState::Pending => &Vec::new(),
    };
    match encode_value(nodes) {
        Ok(encoded) => ObjectValue::Inline(Packed::plain(encoded.into_bytes())),
        Err(error) => {
            let what = "the nodes of a placement group".into();
            ObjectValue::Failed(Box::new(Error::Encode { what, why: error.0 }))
        }
    }
}
