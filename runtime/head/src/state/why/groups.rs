//! Where the bundles of a placement group are, or why they are nowhere.

use std::collections::{BTreeMap, BTreeSet};

use wingbeat_core::spec::PlacementStrategy::{Pack, Spread, StrictPack, StrictSpread};
use wingbeat_core::spec::{BundleSpec, Shape};
use wingbeat_core::{NodeId, PlacementGroupId};
use wingbeat_net::messages::Explanation;

use super::titles::{first_of, suspicion};
use super::waiting::{node_for, scarce_of};
use crate::state::State;
use crate::state::groups::Group;
use crate::state::nodes::{Node, requirements_of};
use crate::state::queue::Waiter;

impl State {
    pub(super) fn explain_group(&self, id: PlacementGroupId) -> Option<Explanation> {
        let Some(group) = self.groups.get(id) else {
            let cause = self.groups.cause_of_end(id)?;
            let state = "is gone".into();
            return Some(Explanation {
                subject: id.to_string(),
                state,
                reasons: vec![cause.to_string()],
                ..Explanation::default()
            });
        };
        let (asked, job) = (crate::state::gangs::shown(&group.spec), self.title_of_job(group.spec.job));
        let mut explanation =
            Explanation { subject: format!("{} of {job}: {asked}", group.spec.title()), ..Explanation::default() };
        let waiter = Waiter::Group(id);
        if group.is_placed() {
            self.explain_placed(group, &mut explanation);
            return Some(explanation);
        }
        explanation.state = "waits for its bundles to be placed, all at once".into();
        explanation.since_ms = self.queue.since(waiter);
        if !self.queue.contains(waiter) {
            explanation
                .reasons
                .push("nodes that were there before the head was started again may still come back".into());
            return Some(explanation);
        }
        if self.explain_hold(waiter, &mut explanation) {
            return Some(explanation);
        }
        let with_room = self.explain_kinds(group, &mut explanation);
        explanation.reasons.extend(strategy_says(group, with_room.len()));
        let kept = self.reservations.nodes_of(waiter);
        if !kept.is_empty() {
            let kept = kept.into_iter().map(|node| self.node_title(node)).collect();
            let kept = first_of(kept, "nodes").join(", ");
            explanation.reasons.push(format!("room is kept for it on {kept}, until what runs there is done"));
        }
        let missing = |node: &&Node| !with_room.contains(&node.info.id) || group.spec.strategy == StrictPack;
        let nodes: Vec<&Node> = self.nodes.iter().filter(missing).collect();
        let apart = group.spec.strategy == StrictSpread;
        let needed = needed(group.missing().map(|index| &group.spec.bundles[index]), apart);
        self.explain_nodes(waiter, &needed, &nodes, &mut explanation);
        explanation.holders = self.holders(&nodes, &scarce_of(&needed));
        if !explanation.holders.is_empty() {
            explanation.help.push("wait for one of the holders, or end it".into());
        }
        let short = group.missing().count().saturating_sub(with_room.len()).max(1);
        explanation.help.push(match short {
            count if apart && count > 1 => format!("add {count} nodes, each with {}", node_for(&needed)),
            _ => format!("add a node with {}", node_for(&needed)),
        });
        Some(explanation)
    }

    fn explain_placed(&self, group: &Group, explanation: &mut Explanation) {
        explanation.state = "is placed".into();
        for (index, placed) in group.placed.iter().enumerate() {
            let Some(placed) = placed else { continue };
            let held = self.held_by_lease(placed.taken.node, &placed.taken.resources, &placed.taken.devices);
            explanation.reasons.push(format!("bundle {index}: {held} on {}", self.node_title(placed.taken.node)));
        }
        explanation.reasons = first_of(std::mem::take(&mut explanation.reasons), "bundles");
        for (node, (devices, span)) in group.spans(&self.nodes) {
            let devices: Vec<String> = devices.iter().map(u32::to_string).collect();
            let text = format!("its GPUs {} on {} are {}", devices.join(", "), self.node_title(node), span.shown());
            explanation.reasons.push(text);
        }
    }

    /// Of each kind of bundle, how many nodes have room for one now. Answers with all of those nodes.
    fn explain_kinds(&self, group: &Group, explanation: &mut Explanation) -> BTreeSet<NodeId> {
        let mut kinds: BTreeMap<String, (Vec<usize>, usize)> = BTreeMap::new();
        let mut with_room = BTreeSet::new();
        for index in group.missing() {
            let bundle = &group.spec.bundles[index];
            let shape = Shape {
                resources: bundle.resources.clone(),
                gpu_memory: bundle.gpu_memory,
                labels: bundle.labels.clone(),
                ..Shape::default()
            };
            let kind = kinds.entry(shape.to_string()).or_default();
            if kind.0.is_empty() {
                let requirements = requirements_of(&shape);
                let fits = |node: &&Node| requirements.iter().any(|asked| node.cost_of(asked).is_some());
                let fitting: Vec<NodeId> = self.nodes.iter().filter(fits).map(|node| node.info.id).collect();
                kind.1 = fitting.len();
                with_room.extend(fitting);
            }
            kind.0.push(index);
        }
        let nodes = self.nodes.len();
        for (kind, (bundles, room)) in &kinds {
            explanation.reasons.push(match bundles.len() {
                1 => format!("a bundle of {kind}: {room} of {nodes} nodes have room for it"),
                count => format!("{count} bundles of {kind}: {room} of {nodes} nodes have room for one"),
            });
        }
        with_room
    }

    pub(super) fn explain_bundle(
        &self,
        group: PlacementGroupId,
        index: Option<u32>,
        shape: &Shape,
        explanation: &mut Explanation,
    ) {
        let Some(known) = self.groups.get(group) else {
            explanation.reasons.push(format!("{group}, in which it must be, is gone"));
            return;
        };
        if !known.is_placed() {
            explanation.reasons.push(format!("{} is not placed", known.spec.title()));
            explanation.help.push(format!("`wingbeat why {group}` says what the group waits for"));
        }
        for (at, placed) in
            known.placed.iter().enumerate().filter(|(at, _)| index.is_none_or(|index| index as usize == *at))
        {
            let Some(placed) = placed else { continue };
            let node = placed.taken.node;
            let missing = placed.pool.missing(&shape.resources);
            let known = self.nodes.get(node);
            let lacks = match known.and_then(|node| node.draining.as_ref()) {
                _ if known.is_some_and(|node| node.suspect.is_some()) => {
                    known.and_then(|node| suspicion(node, self.now)).unwrap_or_default()
                }
                Some(drain) => format!("is on a node that is being drained ({})", drain.as_asked.why),
                None if missing.is_empty() => "has room for this".into(),
                None => format!("has {}", missing.join(", ")),
            };
            explanation.reasons.push(format!("bundle {at} on {} {lacks}", self.node_title(node)));
            let inside = Some((group, at as u32));
            let leases = self.nodes.get(node).into_iter().flat_map(|node| node.leases.iter());
            let leases =
                leases.filter_map(|id| self.leases.leases.get(id)).filter(|lease| lease.taken.bundle == inside);
            let holders: Vec<String> = leases.map(|lease| self.holder_line(lease)).collect();
            explanation.holders.extend(first_of(holders, "holders"));
        }
        explanation.help.push("wait for what runs in the bundle, or make the group larger".into());
    }
}

/// Why room for each bundle is not enough, where nodes have room for any of them.
fn strategy_says(group: &Group, with_room: usize) -> Option<String> {
    if group.missing().count() == 1 {
        return None;
    }
    Some(match group.spec.strategy {
        StrictPack => "all of them must fit on one node together".into(),
        StrictSpread => format!("each needs a node of its own, and {with_room} nodes have room for any"),
        Pack | Spread => "they do not all fit at the same time".into(),
    })
}

/// What one more node must have for all of these bundles to fit, whatever else there is; or, where they are to be apart, for any of them.
fn needed<'a>(bundles: impl Iterator<Item = &'a BundleSpec>, apart: bool) -> Shape {
    let mut needed = Shape::default();
    let mut labels = None;
    for bundle in bundles {
        for (name, amount) in bundle.resources.iter() {
            let so_far = needed.resources.get(name);
            let amount = if apart { so_far.max(amount) } else { so_far + amount };
            needed.resources.set(name, amount);
        }
        needed.gpu_memory = needed.gpu_memory.max(bundle.gpu_memory);
        labels = Some(match labels {
            Some(others) if others != bundle.labels => Vec::new(),
            _ => bundle.labels.clone(),
        });
    }
    needed.labels = labels.unwrap_or_default();
    needed
}

#[cfg(test)]
mod tests {
    use wingbeat_core::{Amount, ResourceSet};

    use super::*;

    #[test]
    fn one_more_node_needs_the_sum_of_the_bundles_or_the_largest_where_they_are_apart() {
        let bundle = |cpus, labels: &[&str]| BundleSpec {
            resources: ResourceSet::cpus(Amount::whole(cpus)),
            labels: labels.iter().map(|rules| rules.parse().unwrap()).collect(),
            ..BundleSpec::default()
        };
        let alike = [bundle(1, &["zone=a"]), bundle(2, &["zone=a"])];
        let together = needed(alike.iter(), false);
        assert_eq!(together.resources, ResourceSet::cpus(Amount::whole(3)));
        assert_eq!(together.labels, alike[0].labels);
        assert_eq!(needed(alike.iter(), true).resources, ResourceSet::cpus(Amount::whole(2)));
        assert!(needed([bundle(1, &["zone=a"]), bundle(1, &["zone=b"])].iter(), false).labels.is_empty());
    }
}
