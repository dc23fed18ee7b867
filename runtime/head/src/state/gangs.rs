//! Places for all bundles of a group, or for none.

use std::collections::{BTreeMap, BTreeSet};

use wingbeat_core::spec::{PlacementGroupSpec, PlacementStrategy};
use wingbeat_core::{NodeId, ResourceSet};

use super::groups::Group;
use super::index::RequirementId;
use super::nodes::{Node, Nodes, Taken};
use super::pool::{Pool, Span};

/// Nodes that are looked at for the one whose devices are closest to each other.
const COMPARED: usize = 8;
/// More bundles than this are placed one after the other only.
const MATCHED: usize = 512;
/// Nodes that are tried for all bundles together: those that have enough in sum may still have it in pieces.
const TRIED: usize = 64;

/// Attempts to place one bundle in a search for all of them: exact for half a dozen bundles on as many nodes, and a few
/// milliseconds.
const SEARCHED: usize = 4_096;
/// Bundles and nodes with which a search begins at all: with many, single bundles seldom decide.
const SEARCHED_BUNDLES: usize = 64;
const SEARCHED_NODES: usize = 64;

/// How much may be searched until the next tick, for all groups together.
pub(super) struct Budget {
    left: usize,
    /// A search ended because others had used the budget: the group is to be tried again.
    pub is_cut_short: bool,
}

impl Default for Budget {
    fn default() -> Budget {
        Budget { left: SEARCHED, is_cut_short: false }
    }
}

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

/// Takes places for the bundles that have none. Either all are taken, or nothing is. Where one after the other does not
/// fit, all of them together are tried, as long as `budget` lasts.
pub(super) fn place(
    group: &Group,
    nodes: &mut Nodes,
    budget: &mut Budget,
    free_for: impl Fn(&Node, &ResourceSet) -> bool,
) -> Option<Vec<(usize, Taken)>> {
    let mut attempt = Placing { group, nodes, free_for, taken: Vec::new(), used: BTreeMap::new() };
    for placed in group.placed.iter().flatten() {
        let devices = placed.taken.devices.iter().map(|(number, _)| *number);
        attempt.used.entry(placed.taken.node).or_default().extend(devices);
    }
    let is_placed = match group.spec.strategy {
        PlacementStrategy::StrictPack => attempt.on_one_node() || attempt.by_search(budget),
        PlacementStrategy::Pack => attempt.on_one_node() || attempt.on_few_nodes() || attempt.by_search(budget),
        PlacementStrategy::Spread => attempt.on_many_nodes(false) || attempt.by_search(budget),
        PlacementStrategy::StrictSpread => attempt.on_many_nodes(true) || attempt.by_matching(),
    };
    if is_placed {
        return Some(attempt.taken);
    }
    attempt.give_up();
    None
}

/// Whether there is no way to place a group that has no place yet, even if nothing else were on the nodes. Says so only
/// when all ways were tried: not with many bundles or nodes.
pub(super) fn never_fits(group: &Group, nodes: &Nodes) -> bool {
    // Nodes whose GPUs differ in memory alone count as the same in the search.
    let has_memory = group.spec.bundles.iter().any(|bundle| bundle.gpu_memory > 0);
    if group.spec.bundles.len() > SEARCHED_BUNDLES || nodes.len() > SEARCHED_NODES || has_memory {
        return false;
    }
    let mut empty = Nodes::default();
    for info in nodes.infos() {
        empty.join(info);
    }
    let (group, mut budget) = (group.among(&mut empty), Budget::default());
    place(&group, &mut empty, &mut budget, |_, _| true).is_none() && budget.left > 0
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

    /// Tries places for one bundle after the other, and goes back when one has none: exact for small groups, where
    /// taking the best node for each may leave none for the last, and bounded for large ones.
    fn by_search(&mut self, budget: &mut Budget) -> bool {
        let order = self.missing();
        let is_strict = self.group.spec.strategy == PlacementStrategy::StrictPack;
        if order.len() > SEARCHED_BUNDLES || order.len() < 2 || !self.could_hold_the_sum(&order) {
            return false;
        }
        let nodes: Vec<Option<NodeId>> = match self.used.keys().next() {
            _ if !is_strict => vec![None],
            Some(node) => vec![Some(*node)],
            None => {
                let sum = self.nodes.index.requirement(self.group.sum).map(|sum| sum.resources.clone());
                let sum = sum.unwrap_or_default();
                let fitting =
                    self.nodes.first_fitting(self.group.sum, SEARCHED_NODES, |node| (self.free_for)(node, &sum));
                fitting.into_iter().map(Some).collect()
            }
        };
        let was_whole = budget.left == SEARCHED;
        // What the devices of one node cannot hold one way, they may hold another.
        let found = nodes.into_iter().any(|node| self.search(&order, node, &mut budget.left));
        budget.is_cut_short |= !found && !was_whole && budget.left == 0;
        found
    }

    /// Whether the nodes that have room for any of the bundles have as much as all of them ask for.
    fn could_hold_the_sum(&mut self, order: &[usize]) -> bool {
        let mut kinds: BTreeSet<&[RequirementId]> = BTreeSet::new();
        let mut nodes = BTreeSet::new();
        let mut sum = ResourceSet::new();
        for index in order {
            let asked = &self.group.spec.bundles[*index].resources;
            sum.add(asked);
            let requirements = &self.group.requirements[*index][..];
            if !kinds.insert(requirements) {
                continue;
            }
            let mut is_possible = false;
            for id in requirements {
                let found = self.nodes.first_fitting(*id, SEARCHED_NODES, |node| (self.free_for)(node, asked));
                is_possible |= !found.is_empty();
                nodes.extend(found);
            }
            if !is_possible {
                return false;
            }
        }
        let mut free = ResourceSet::new();
        for node in nodes.iter().filter_map(|id| self.nodes.get(*id)) {
            for (name, amount) in node.pool.available.iter().filter(|(_, amount)| amount.units() > 0) {
                free.set(name, free.get(name) + amount);
            }
        }
        free.covers(&sum)
    }

    fn search(&mut self, order: &[usize], on: Option<NodeId>, left: &mut usize) -> bool {
        let Some((index, rest)) = order.split_first() else { return true };
        let nodes = match on {
            Some(node) => vec![node],
            None => self.candidates(*index),
        };
        for id in nodes {
            for choice in self.choices(*index, id) {
                if *left == 0 {
                    return false;
                }
                *left -= 1;
                if !self.take_exactly(*index, id, choice) {
                    continue;
                }
                if self.search(rest, on, left) {
                    return true;
                }
                self.give_up_last();
            }
        }
        false
    }

    /// The nodes with room for a bundle: those that the group uses already come first, or last if it is to be spread.
    /// Of nodes that are all the same to it, one is as good as another.
    fn candidates(&mut self, index: usize) -> Vec<NodeId> {
        let asked = self.asked(index).clone();
        let mut found: Vec<NodeId> = Vec::new();
        for id in &self.group.requirements[index] {
            found.extend(self.nodes.first_fitting(*id, SEARCHED_NODES, |node| (self.free_for)(node, &asked)));
        }
        let spread = self.group.spec.strategy == PlacementStrategy::Spread;
        found.sort_by_key(|node| self.used.contains_key(node) == spread);
        let mut kinds: Vec<(bool, Pool)> = Vec::new();
        found.retain(|id| {
            let Some(node) = self.nodes.get(*id) else { return false };
            let kind = (self.used.contains_key(id), node.pool.clone());
            let is_new = node.info.labels.is_empty() && kinds.contains(&kind);
            kinds.push(kind);
            !is_new
        });
        found
    }

    /// The devices from which a bundle's fraction of one may come: any of them, those with the least room first. None
    /// stands for what is taken by itself.
    fn choices(&self, index: usize, id: NodeId) -> Vec<Option<u32>> {
        let bundle = &self.group.spec.bundles[index];
        let Some(node) = self.nodes.get(id) else { return Vec::new() };
        let Some(needed) = node.amounts(&bundle.resources, bundle.gpu_memory) else { return Vec::new() };
        let gpu = needed.get(wingbeat_core::resources::GPU);
        if gpu.is_zero() || gpu >= wingbeat_core::Amount::ONE {
            return vec![None];
        }
        let mut devices: Vec<_> = node.pool.usable().filter(|(_, free)| *free >= gpu).collect();
        devices.sort_by_key(|(number, free)| (*free, *number));
        devices.dedup_by_key(|(_, free)| *free);
        devices.into_iter().map(|(number, _)| Some(number)).collect()
    }

    fn take_exactly(&mut self, index: usize, id: NodeId, device: Option<u32>) -> bool {
        let Some(device) = device else { return self.take(index, id) };
        let bundle = &self.group.spec.bundles[index];
        let Some(node) = self.nodes.get(id).filter(|node| (self.free_for)(node, &bundle.resources)) else {
            return false;
        };
        let Some(amounts) = node.amounts(&bundle.resources, bundle.gpu_memory).map(|amounts| amounts.into_owned())
        else {
            return false;
        };
        if !node.takes_more() || !node.pool.has_room(&amounts) {
            return false;
        }
        let devices = vec![(device, amounts.get(wingbeat_core::resources::GPU))];
        self.nodes.change(id, |node| node.pool.take_exactly(&amounts, &devices));
        self.used.entry(id).or_default().push(device);
        self.taken.push((index, Taken { node: id, bundle: None, resources: amounts, devices }));
        true
    }

    /// Gives back the place that was taken last.
    fn give_up_last(&mut self) {
        let Some((_, taken)) = self.taken.pop() else { return };
        self.nodes.change(taken.node, |node| node.pool.give_back(&taken.resources, &taken.devices));
        let was_there = self.group.placed.iter().flatten().any(|placed| placed.taken.node == taken.node);
        let still_there = was_there || self.taken.iter().any(|(_, other)| other.node == taken.node);
        if !still_there {
            self.used.remove(&taken.node);
        } else if let Some(used) = self.used.get_mut(&taken.node) {
            for (device, _) in &taken.devices {
                if let Some(at) = used.iter().rposition(|other| other == device) {
                    used.remove(at);
                }
            }
        }
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
