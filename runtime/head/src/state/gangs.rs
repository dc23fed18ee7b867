//! Places for all bundles of a group, or for none.

use std::collections::{BTreeMap, BTreeSet};

use wingbeat_core::spec::{PlacementGroupSpec, PlacementStrategy};
use wingbeat_core::{NodeId, ResourceSet};

use super::groups::Group;
use super::index::RequirementId;
use super::nodes::{Node, Nodes, Taken};
use super::pool::Span;

/// Nodes that are looked at for the one whose devices are closest to each other.
const COMPARED: usize = 8;
/// More bundles than this are placed one after the other only.
const MATCHED: usize = 512;
/// Nodes that are tried for all bundles together: those that have enough in sum may still have it in pieces.
const TRIED: usize = 64;

/// A group in words.
pub(super) fn shown(spec: &PlacementGroupSpec) -> String {
    let mut kinds: Vec<(String, usize)> = Vec::new();
    for bundle in &spec.bundles {
        let mut text = bundle.resources.to_string();
        if bundle.gpu_memory > 0 {
            text = format!("{} bytes of one GPU's memory, {text}", bundle.gpu_memory);
        }
        match kinds.iter_mut().find(|(known, _)| *known == text) {
            Some((_, count)) => *count += 1,
            None => kinds.push((text, 1)),
        }
    }
    let kinds: Vec<String> = kinds.into_iter().map(|(text, count)| format!("{count} × {{{text}}}")).collect();
    let how = match spec.strategy {
        PlacementStrategy::Pack => "packed",
        PlacementStrategy::Spread => "spread",
        PlacementStrategy::StrictPack => "on one node",
        PlacementStrategy::StrictSpread => "each on a node of its own",
    };
    format!("{}, {how}", kinds.join(" and "))
}

/// Takes places for the bundles that have none. Either all are taken, or nothing is.
pub(super) fn place(
    group: &Group,
    nodes: &mut Nodes,
    free_for: impl Fn(&Node, &ResourceSet) -> bool,
) -> Option<Vec<(usize, Taken)>> {
    let mut attempt = Placing { group, nodes, free_for, taken: Vec::new(), used: BTreeMap::new() };
    for placed in group.placed.iter().flatten() {
        let devices = placed.taken.devices.iter().map(|(number, _)| *number);
        attempt.used.entry(placed.taken.node).or_default().extend(devices);
    }
    let is_placed = match group.spec.strategy {
        PlacementStrategy::StrictPack => attempt.on_one_node(),
        PlacementStrategy::Pack => attempt.on_one_node() || attempt.on_few_nodes(),
        PlacementStrategy::Spread => attempt.on_many_nodes(false),
        PlacementStrategy::StrictSpread => attempt.on_many_nodes(true) || attempt.by_matching(),
    };
    if is_placed {
        return Some(attempt.taken);
    }
    attempt.give_up();
    None
}

struct Placing<'a, F> {
    group: &'a Group,
    nodes: &'a mut Nodes,
    free_for: F,
    taken: Vec<(usize, Taken)>,
    /// The group's nodes, and its devices on each.
    used: BTreeMap<NodeId, Vec<u32>>,
}

impl<F: Fn(&Node, &ResourceSet) -> bool> Placing<'_, F> {
    /// The bundles without a place, those that the fewest nodes can take first, and the largest of these first.
    fn missing(&mut self) -> Vec<usize> {
        let missing: Vec<usize> = self.group.missing().collect();
        if let [only] = missing[..] {
            return vec![only];
        }
        let mut counts: BTreeMap<&[RequirementId], usize> = BTreeMap::new();
        for index in &missing {
            let requirements = &self.group.requirements[*index];
            if !counts.contains_key(&requirements[..]) {
                let count = requirements.iter().map(|id| self.nodes.count_fitting(*id)).sum();
                counts.insert(requirements, count);
            }
        }
        let size = |index: usize| {
            let resources = &self.group.spec.bundles[index].resources;
            resources.iter().map(|(_, amount)| amount.units()).max().unwrap_or(0)
        };
        let count = |index: usize| counts.get(&self.group.requirements[index][..]).copied().unwrap_or(0);
        let mut order = missing;
        order.sort_by_key(|index| (count(*index), std::cmp::Reverse(size(*index)), *index));
        order
    }

    fn asked(&self, index: usize) -> &ResourceSet {
        &self.group.spec.bundles[index].resources
    }

    /// Takes a bundle's place on a node, if there is room.
    fn take(&mut self, index: usize, id: NodeId) -> bool {
        let bundle = &self.group.spec.bundles[index];
        let Some(node) = self.nodes.get(id).filter(|node| (self.free_for)(node, &bundle.resources)) else {
            return false;
        };
        let fits =
            |id: &RequirementId| self.nodes.index.requirement(*id).is_some_and(|asked| node.cost_of(asked).is_some());
        if !self.group.requirements[index].iter().any(fits) {
            return false;
        }
        let Some(amounts) = node.amounts(&bundle.resources, bundle.gpu_memory).map(|amounts| amounts.into_owned())
        else {
            return false;
        };
        let beside = self.used.get(&id).cloned().unwrap_or_default();
        let Some(taken) = self.nodes.take(id, &amounts, &beside) else { return false };
        self.used.entry(id).or_default().extend(taken.devices.iter().map(|(number, _)| *number));
        self.taken.push((index, taken));
        true
    }

    fn give_up(&mut self) {
        for (_, taken) in std::mem::take(&mut self.taken) {
            self.nodes.change(taken.node, |node| node.pool.give_back(&taken.resources, &taken.devices));
            let was_there = self.group.placed.iter().flatten().any(|placed| placed.taken.node == taken.node);
            if was_there {
                if let Some(devices) = self.used.get_mut(&taken.node) {
                    devices.retain(|device| !taken.devices.iter().any(|(number, _)| number == device));
                }
            } else {
                self.used.remove(&taken.node);
            }
        }
    }

    fn on_one_node(&mut self) -> bool {
        let order = self.missing();
        // Some bundles have their place: the others go beside them.
        if let Some(node) = self.used.keys().next().copied() {
            let fits = self.used.len() == 1 && order.iter().all(|index| self.take(*index, node));
            if !fits {
                self.give_up();
            }
            return fits;
        }
        if let [only] = order[..] {
            let asked = self.asked(only).clone();
            let best = self.group.requirements[only]
                .iter()
                .find_map(|id| self.nodes.find(*id, None, |node| (self.free_for)(node, &asked)));
            return best.is_some_and(|node| self.take(only, node));
        }
        let sum = self.nodes.index.requirement(self.group.sum).map(|asked| asked.resources.clone()).unwrap_or_default();
        let candidates = self.nodes.first_fitting(self.group.sum, TRIED, |node| (self.free_for)(node, &sum));
        let mut best: Option<(Span, NodeId)> = None;
        let has_devices = !sum.get(wingbeat_core::resources::GPU).is_zero();
        let mut compared = 0;
        for id in candidates {
            if !order.iter().all(|index| self.take(*index, id)) {
                self.give_up();
                continue;
            }
            if !has_devices {
                return true;
            }
            let span = self.nodes.get(id).map_or(Span::Node, |node| Span::of(&self.used[&id], &node.info.devices));
            if span <= Span::Island {
                return true;
            }
            self.give_up();
            if best.is_none_or(|(closest, _)| span < closest) {
                best = Some((span, id));
            }
            compared += 1;
            if compared == COMPARED {
                break;
            }
        }
        best.is_some_and(|(_, id)| order.iter().all(|index| self.take(*index, id)))
    }

    /// Fills one node after the other.
    fn on_few_nodes(&mut self) -> bool {
        for index in self.missing() {
            let known: Vec<NodeId> = self.used.keys().copied().collect();
            let fits = known.into_iter().any(|node| self.take(index, node)) || {
                let asked = self.asked(index).clone();
                let best = self.group.requirements[index]
                    .iter()
                    .find_map(|id| self.nodes.find(*id, None, |node| (self.free_for)(node, &asked)));
                best.is_some_and(|node| self.take(index, node))
            };
            if !fits {
                self.give_up();
                return false;
            }
        }
        true
    }

    /// Each on another node, as long as there are any; only so if `strictly`.
    fn on_many_nodes(&mut self, strictly: bool) -> bool {
        for index in self.missing() {
            let asked = self.asked(index).clone();
            let requirements = &self.group.requirements[index];
            let mut find = |only_new: bool| {
                requirements.iter().find_map(|id| {
                    let allowed = |node: &Node| {
                        (self.free_for)(node, &asked) && !(only_new && self.used.contains_key(&node.info.id))
                    };
                    self.nodes.find(*id, None, allowed)
                })
            };
            let place = find(true).or_else(|| if strictly { None } else { find(false) });
            if !place.is_some_and(|node| self.take(index, node)) {
                self.give_up();
                return false;
            }
        }
        true
    }

    /// A node of its own for each bundle, found by augmenting paths (Kuhn's algorithm): exact, where taking the best
    /// node for one bundle after the other may leave none for the last. As many candidates as there are bundles are
    /// enough for each of them.
    fn by_matching(&mut self) -> bool {
        let order = self.missing();
        if order.len() > MATCHED {
            return false;
        }
        let mut candidates: Vec<Vec<NodeId>> = Vec::with_capacity(order.len());
        for index in &order {
            let asked = self.asked(*index).clone();
            let mut nodes = Vec::new();
            for id in &self.group.requirements[*index] {
                let allowed = |node: &Node| (self.free_for)(node, &asked) && !self.used.contains_key(&node.info.id);
                nodes.extend(self.nodes.first_fitting(*id, order.len(), allowed));
            }
            candidates.push(nodes);
        }
        let mut taken_by: BTreeMap<NodeId, usize> = BTreeMap::new();
        for bundle in 0..order.len() {
            if !augment(bundle, &candidates, &mut taken_by, &mut BTreeSet::new()) {
                return false;
            }
        }
        let fits = taken_by.into_iter().all(|(node, bundle)| self.take(order[bundle], node));
        if !fits {
            self.give_up();
        }
        fits
    }
}

fn augment(
    bundle: usize,
    candidates: &[Vec<NodeId>],
    taken_by: &mut BTreeMap<NodeId, usize>,
    seen: &mut BTreeSet<NodeId>,
) -> bool {
    for node in &candidates[bundle] {
        if !seen.insert(*node) {
            continue;
        }
        let other = taken_by.get(node).copied();
        if other.is_none_or(|other| augment(other, candidates, taken_by, seen)) {
            taken_by.insert(*node, bundle);
            return true;
        }
    }
    false
}
