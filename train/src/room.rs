//! What a cluster has left for a group of ranks, as the head sees it.

use std::collections::BTreeSet;

use wingbeat::{Error, PlacementGroupId, PlacementStrategy, Session};
use wingbeat_core::resources::ResourceSet;

use crate::scaling::Scaling;

/// The nodes on which ranks may be, and what the run may have of them.
#[derive(Debug)]
pub(crate) struct Room {
    pub nodes: Vec<Node>,
    pub quota: Option<Quota>,
    /// Whether the head grants what is free: not while it cannot write its journal.
    pub is_granted: bool,
}

/// A node that takes new work.
#[derive(Debug)]
pub(crate) struct Node {
    pub id: u64,
    pub free: ResourceSet,
    pub total: ResourceSet,
    /// Whether another placement group waits that may lie here: the head keeps what is free, or becomes free, for it.
    pub is_awaited: bool,
}

/// What a namespace may hold at a time, and what it holds. A resource that the limit does not name is not limited.
#[derive(Clone, Debug)]
pub(crate) struct Quota {
    pub limit: ResourceSet,
    pub used: ResourceSet,
}

impl Quota {
    fn allows(&self, asked: &ResourceSet) -> bool {
        self.limit
            .iter()
            .all(|(name, limit)| asked.get(name).is_zero() || self.used.get(name) + asked.get(name) <= limit)
    }
}

/// A placement group that waits.
#[derive(Debug)]
struct Waiting {
    /// What has no place yet.
    bundles: Vec<ResourceSet>,
    strategy: PlacementStrategy,
    /// That of its namespace.
    quota: Option<Quota>,
}

impl Waiting {
    /// Whether room is all that it waits for: it may have more under its quota, and these nodes could hold it.
    fn waits_for_room(&self, nodes: &[ResourceSet]) -> bool {
        self.quota.as_ref().is_none_or(|quota| quota.allows(&self.sum())) && self.fits(nodes)
    }

    fn sum(&self) -> ResourceSet {
        let mut sum = ResourceSet::new();
        self.bundles.iter().for_each(|bundle| sum.add(bundle));
        sum
    }

    fn fits(&self, nodes: &[ResourceSet]) -> bool {
        if self.strategy == PlacementStrategy::StrictPack {
            return nodes.iter().any(|node| self.may_lie_on(node));
        }
        let mut left = nodes.to_vec();
        self.bundles.iter().all(|bundle| {
            let Some(at) = left.iter().position(|node| node.covers(bundle)) else { return false };
            match self.strategy {
                PlacementStrategy::StrictSpread => drop(left.swap_remove(at)),
                _ => left[at].subtract(bundle),
            }
            true
        })
    }

    fn may_lie_on(&self, node: &ResourceSet) -> bool {
        match self.strategy {
            PlacementStrategy::StrictPack => node.covers(&self.sum()),
            _ => self.bundles.iter().any(|bundle| node.covers(bundle)),
        }
    }
}

impl Room {
    /// What there is now for ranks as these. `own`: the group that asks.
    ///
    /// # Errors
    /// The head is gone.
    pub(crate) async fn look(
        session: &Session,
        scaling: &Scaling,
        own: Option<PlacementGroupId>,
    ) -> Result<Room, Error> {
        let state = session.runtime().cluster_state().await?;
        let quota_of = |namespace: &str| {
            let quota = state.quotas.iter().find(|quota| quota.namespace == namespace)?;
            Some(Quota { limit: quota.limit.clone(), used: quota.used.clone() })
        };
        let priority = state.jobs.iter().find(|job| job.id == session.job()).map_or(0, |job| job.priority);
        // One with a lower priority is behind.
        let others = state
            .placement_groups
            .iter()
            .filter(|group| group.state == "pending" && Some(group.id) != own && group.job.priority >= priority);
        let waiting = others.map(|group| Waiting {
            bundles: group.bundles.iter().filter(|(_, at)| at.is_none()).map(|(bundle, _)| bundle.clone()).collect(),
            strategy: group.strategy,
            quota: quota_of(&group.job.namespace),
        });
        let waiting: Vec<Waiting> = waiting.collect();
        let quota = quota_of(session.namespace());
        let is_granted = state.journal_fails.is_none();
        let open: Vec<_> = state.nodes.into_iter().filter(|node| node.draining.is_none()).collect();
        let totals: Vec<ResourceSet> = open.iter().map(|node| node.info.resources.clone()).collect();
        let awaited = nodes_awaited(&waiting, &totals);
        let nodes = open.into_iter().zip(awaited).filter(|(node, _)| scaling.accepts(&node.info.labels));
        let nodes = nodes.map(|(node, is_awaited)| Node {
            id: node.info.id.0,
            free: node.available,
            total: node.info.resources,
            is_awaited,
        });
        Ok(Room { nodes: nodes.collect(), quota, is_granted })
    }

    /// How many units could begin now.
    pub(crate) fn now(&self, scaling: &Scaling) -> u32 {
        let left = self.quota.as_ref().map_or(scaling.most, |quota| scaling.within(&quota.limit, &quota.used));
        scaling.fits(self.nodes.iter().map(|node| &node.free)).min(left)
    }

    /// How many could, if nobody else held anything.
    pub(crate) fn ever(&self, scaling: &Scaling) -> u32 {
        let may = self.quota.as_ref().map_or(scaling.most, |quota| scaling.within(&quota.limit, &ResourceSet::new()));
        scaling.fits(self.nodes.iter().map(|node| &node.total)).min(may)
    }

    /// How many could begin now where nobody else waits for room.
    pub(crate) fn unawaited(&self, scaling: &Scaling) -> u32 {
        let left = self.quota.as_ref().map_or(scaling.most, |quota| scaling.within(&quota.limit, &quota.used));
        let nodes = self.nodes.iter().filter(|node| !node.is_awaited);
        scaling.fits(nodes.map(|node| &node.free)).min(left)
    }

    /// How many units could be added to a group that is on nodes `own`. None where another group waits for room there: it would get
    /// what this one gives back.
    pub(crate) fn beside(mut self, scaling: &Scaling, own: &BTreeSet<u64>) -> u32 {
        if !self.is_granted || self.nodes.iter().any(|node| node.is_awaited && own.contains(&node.id)) {
            return 0;
        }
        // What the group holds is not free, and whatever else is, is room for more; but nodes as units count once.
        if scaling.per_node.is_some() {
            self.nodes.retain(|node| !own.contains(&node.id));
        }
        self.unawaited(scaling)
    }
}

/// On which of the nodes, by what each has in all, one of those who wait for room may lie.
fn nodes_awaited(waiting: &[Waiting], nodes: &[ResourceSet]) -> Vec<bool> {
    let waiting: Vec<&Waiting> = waiting.iter().filter(|group| group.waits_for_room(nodes)).collect();
    nodes.iter().map(|node| waiting.iter().any(|group| group.may_lie_on(node))).collect()
}

#[cfg(test)]
mod tests {
    use wingbeat_core::resources::Amount;

    use super::*;

    fn cpus(count: u32) -> ResourceSet {
        ResourceSet::cpus(Amount::whole(count))
    }

    fn node(id: u64, free: u32, total: u32) -> Node {
        Node { id, free: cpus(free), total: cpus(total), is_awaited: false }
    }

    fn room(nodes: Vec<Node>) -> Room {
        Room { nodes, quota: None, is_granted: true }
    }

    fn waiting(bundles: &[u32]) -> Waiting {
        let bundles = bundles.iter().map(|count| cpus(*count)).collect();
        Waiting { bundles, strategy: PlacementStrategy::Pack, quota: None }
    }

    #[test]
    fn a_group_grows_and_begins_within_the_quota_of_its_namespace() {
        let four = Scaling::workers(4).elastic(1..=4);
        let mut room = room(vec![node(1, 2, 4), node(2, 4, 4)]);
        assert_eq!((room.now(&four), room.ever(&four)), (4, 4));
        // It holds two of three.
        room.quota = Some(Quota { limit: cpus(3), used: cpus(2) });
        assert_eq!((room.now(&four), room.ever(&four)), (1, 3));
        let more = four.beyond(2).unwrap();
        assert_eq!(room.beside(&more, &BTreeSet::from([1])), 1);
    }

    #[test]
    fn nodes_as_units_of_a_group_have_no_room_for_more_of_it() {
        let nodes = Scaling::nodes(3, 2).elastic(1..=3).beyond(1).unwrap();
        assert_eq!(room(vec![node(1, 2, 4), node(2, 2, 2)]).beside(&nodes, &BTreeSet::from([1])), 1);
    }

    #[test]
    fn what_another_group_waits_for_is_no_room_for_more() {
        let more = Scaling::workers(4).elastic(1..=4).beyond(2).unwrap();
        let own = BTreeSet::from([1]);
        let beside = |awaited: [bool; 2]| {
            let mut nodes = vec![node(1, 2, 4), node(2, 2, 2)];
            nodes.iter_mut().zip(awaited).for_each(|(node, is_awaited)| node.is_awaited = is_awaited);
            room(nodes).beside(&more, &own)
        };
        assert_eq!(beside([false, false]), 2);
        assert_eq!(beside([false, true]), 2, "there is room on its own node");
        assert_eq!(beside([true, false]), 0, "the other group would get what this one gives back");
        let journal_fails = Room { is_granted: false, ..room(vec![node(2, 2, 2)]) };
        assert_eq!(journal_fails.beside(&more, &own), 0);
    }

    #[test]
    fn a_group_waits_for_the_nodes_that_could_hold_it() {
        let nodes = [cpus(2), cpus(4)];
        let awaited = |group: Waiting| nodes_awaited(&[group], &nodes);
        assert_eq!(awaited(waiting(&[2, 2])), [true, true]);
        assert_eq!(awaited(waiting(&[4])), [false, true]);
        assert_eq!(awaited(waiting(&[4, 4])), [false, false], "for which others must come");
        let strict = |strategy, bundles| Waiting { strategy, ..waiting(bundles) };
        assert_eq!(awaited(strict(PlacementStrategy::StrictPack, &[2, 2])), [false, true]);
        assert_eq!(awaited(strict(PlacementStrategy::StrictPack, &[2, 2, 2])), [false, false]);
        assert_eq!(awaited(strict(PlacementStrategy::StrictSpread, &[1, 1, 1])), [false, false]);
        let quota = Some(Quota { limit: cpus(2), used: cpus(1) });
        assert_eq!(awaited(Waiting { quota, ..waiting(&[2]) }), [false, false], "it waits for its quota");
    }
}
