//! The nodes: what each has and has given away, and which one is chosen for what.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

use wingbeat_core::memory::MemoryUsage;
use wingbeat_core::resources::{CPU, GPU};
use wingbeat_core::spec::{MachineId, Shape, Strategy};
use wingbeat_core::{Amount, JobId, LeaseId, NodeId, PlacementGroupId, ResourceSet};
use wingbeat_net::messages::{NodeInfo, StoreUse};

use super::facts::{Drained, Fact};
use super::index::{Cost, Index, Order, Requirement, RequirementId, Slot, Slots};
use super::pool::{Devices, Pool};
use super::{Millis, after};

/// Nodes of one machine that are looked at because they are near: there are several only in tests.
const NEAR: usize = 8;

/// Nodes that are gone and remembered: for what they could have held, and for why they are.
const FORMER: usize = 1_024;

/// A node and what is free on it.
#[derive(Clone)]
pub(super) struct Node {
    pub info: NodeInfo,
    /// What is in no bundle.
    pub pool: Pool,
    /// Leases that are not in a bundle, and those that are.
    pub leases: BTreeSet<LeaseId>,
    /// Bundles that lie here.
    pub bundles: BTreeSet<(PlacementGroupId, u32)>,
    /// Jobs that it was told of.
    pub jobs: BTreeSet<JobId>,
    pub draining: Option<Drain>,
    /// Since when it is suspect: it has no connection to the head, and may come back.
    pub suspect: Option<Millis>,
    /// Devices that somebody without a lease still uses, and who, in words.
    pub held: BTreeMap<u32, String>,
    /// How much of its memory was used when it became short, until there is enough.
    pub memory_short: Option<Box<MemoryUsage>>,
    /// What its object store holds.
    pub store: StoreUse,
    /// Different after every change, and never 0.
    pub version: u64,
    /// The first version.
    pub joined: u64,
}

/// A node on which nothing new is placed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Drain {
    pub as_asked: Drained,
    /// When what still runs is ended.
    pub deadline: Millis,
    /// What still ran was ended.
    pub is_enforced: bool,
}

/// What a lease or a bundle took, and from where.
#[derive(Clone, Debug)]
pub(super) struct Taken {
    pub node: NodeId,
    /// The bundle it was taken from; none for the node itself.
    pub bundle: Option<(PlacementGroupId, u32)>,
    pub resources: ResourceSet,
    pub devices: Devices,
}

/// What is said of a node that is gone.
pub(super) struct LostNode {
    id: NodeId,
    pub hostname: String,
    pub at: Millis,
    pub why: String,
}

/// The nodes of the cluster, each from its join until its loss, and what is remembered of those that are gone.
#[derive(Default)]
pub(super) struct Nodes {
    /// A slot holds one node at a time. There are as many as there ever were nodes at once.
    slots: Vec<Option<Node>>,
    /// The slots without a node; the next nodes get them.
    free_slots: Vec<Slot>,
    /// The slot of each node.
    by_id: Slots,
    /// The slots of the nodes of each machine.
    by_machine: BTreeMap<MachineId, Vec<Slot>>,
    /// What all of them have.
    total: ResourceSet,
    /// The version of the node that was changed last.
    version: u64,
    /// Nodes that are gone, and since when: one of each kind, the latest last, as many as [`FORMER`].
    former: Vec<(Millis, Node)>,
    /// Why the latest of those are gone, for people, the latest last, as many as [`FORMER`].
    lost: VecDeque<LostNode>,
    /// For each requirement that somebody has, the nodes with room for it.
    pub index: Index,
}

/// What a shape requires of a node: one requirement for each of its selectors, in order.
pub(super) fn requirements_of(shape: &Shape) -> Vec<Requirement> {
    let order = match shape.strategy {
        Strategy::Spread => Order::Spread,
        Strategy::BestFit => Order::BestFit,
        Strategy::Default | Strategy::Node { .. } | Strategy::Bundle { .. } => Order::Pack,
    };
    let with = |selector| Requirement {
        resources: shape.resources.clone(),
        gpu_memory: shape.gpu_memory,
        selector,
        order,
        is_sum: false,
    };
    if shape.labels.is_empty() {
        return vec![with(None)];
    }
    shape.labels.iter().map(|selector| with(Some(selector.clone()))).collect()
}

impl Nodes {
    pub(super) fn join(&mut self, info: NodeInfo) -> Slot {
        self.version += 1;
        let slot = self.free_slots.pop().unwrap_or(self.slots.len());
        if slot == self.slots.len() {
            self.slots.push(None);
        }
        self.by_id.insert(info.id, slot);
        self.total.add(&info.resources);
        self.by_machine.entry(info.address.machine).or_default().push(slot);
        self.slots[slot] = Some(Node::of(info, self.version));
        self.index.changed(slot, self.slots.len());
        slot
    }

    pub(super) fn remove(&mut self, id: NodeId) -> Option<Node> {
        let slot = self.by_id.remove(&id)?;
        let node = self.slots.get_mut(slot).and_then(Option::take)?;
        let machine = node.info.address.machine;
        if let Some(slots) = self.by_machine.get_mut(&machine) {
            slots.retain(|other| *other != slot);
            if slots.is_empty() {
                self.by_machine.remove(&machine);
            }
        }
        self.total.subtract(&node.info.resources);
        self.free_slots.push(slot);
        self.index.changed(slot, self.slots.len());
        Some(node)
    }

    /// The same of one that was there before the head was started again.
    pub(super) fn remember_info(&mut self, info: NodeInfo, now: Millis, why: &str) {
        self.remember(Node::of(info, self.version), now, why);
    }

    /// Remembers what a node that is gone could have held, and why it is.
    pub(super) fn remember(&mut self, mut node: Node, now: Millis, why: &str) {
        if self.lost.len() == FORMER {
            self.lost.pop_front();
        }
        let (id, hostname) = (node.info.id, node.info.hostname.clone());
        self.lost.push_back(LostNode { id, hostname, at: now, why: why.to_owned() });
        let kind = |node: &Node| (node.info.resources.clone(), node.info.labels.clone(), node.info.devices.clone());
        let mine = kind(&node);
        self.former.retain(|(_, other)| kind(other) != mine);
        if self.former.len() == FORMER {
            self.former.remove(0);
        }
        node.leases.clear();
        node.bundles.clear();
        node.jobs.clear();
        self.former.push((now, node));
    }

    /// The last node that could have held this and was lost at `since` or later, and when.
    pub(super) fn former(&self, shape: &Shape, since: Millis) -> Option<(Millis, &Node)> {
        let requirements = requirements_of(shape);
        let lost = self.former.iter().rev().take_while(|(at, _)| *at >= since);
        let mut able = lost.filter(|(_, node)| requirements.iter().any(|asked| node.could_hold(asked)));
        able.next().map(|(at, node)| (*at, node))
    }

    /// A node that is gone, as long as it is remembered.
    pub(super) fn lost(&self, id: NodeId) -> Option<&LostNode> {
        self.lost.iter().rev().find(|lost| lost.id == id)
    }

    pub(super) fn get(&self, id: NodeId) -> Option<&Node> {
        self.at(*self.by_id.get(&id)?)
    }

    pub(super) fn at(&self, slot: Slot) -> Option<&Node> {
        self.slots.get(slot).and_then(Option::as_ref)
    }

    pub(super) fn slot(&self, id: NodeId) -> Option<Slot> {
        self.by_id.get(&id).copied()
    }

    /// Changes a node.
    pub(super) fn change<R>(&mut self, id: NodeId, change: impl FnOnce(&mut Node) -> R) -> Option<R> {
        let slot = *self.by_id.get(&id)?;
        let node = self.slots.get_mut(slot).and_then(Option::as_mut)?;
        self.version += 1;
        node.version = self.version;
        let result = change(node);
        self.index.changed(slot, self.slots.len());
        Some(result)
    }

    /// What the store of a node holds, which decides nothing.
    pub(super) fn set_store(&mut self, id: NodeId, store: StoreUse) {
        let slot = self.by_id.get(&id).copied();
        if let Some(node) = slot.and_then(|slot| self.slots.get_mut(slot)).and_then(Option::as_mut) {
            node.store = store;
        }
    }

    pub(super) fn ids(&self) -> Vec<NodeId> {
        self.by_id.keys().copied().collect()
    }

    pub(super) fn infos(&self) -> Vec<NodeInfo> {
        self.iter().map(|node| node.info.clone()).collect()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Node> {
        self.by_id.values().filter_map(|slot| self.at(*slot))
    }

    /// Those that come after this one, by id, or all.
    pub(super) fn after(&self, last: Option<NodeId>) -> impl Iterator<Item = &Node> {
        after(&self.by_id, last).filter_map(|(_, slot)| self.at(*slot))
    }

    pub(super) fn len(&self) -> usize {
        self.by_id.len()
    }

    /// What all of them have.
    pub(super) fn total(&self) -> &ResourceSet {
        &self.total
    }

    /// Whether there is no node for work. A driver without a node on its machine brings one that has a store, and offers
    /// nothing.
    pub(super) fn offer_nothing(&self) -> bool {
        self.total.is_empty()
    }

    /// Slots from `from` on, going round.
    pub(super) fn going_round(&self, from: Slot) -> impl Iterator<Item = (Slot, &Node)> {
        let count = self.slots.len();
        (0..count).map(move |step| (from + step) % count).filter_map(|slot| Some((slot, self.at(slot)?)))
    }

    /// Nodes of a machine with their whole CPUs.
    pub(super) fn on_machine(&self, machine: MachineId) -> Vec<(NodeId, u32)> {
        let cpus = |node: &Node| (node.info.resources.get(CPU).units() / Amount::ONE.units()).max(0) as u32;
        let slots = self.by_machine.get(&machine).into_iter().flatten();
        slots.filter_map(|slot| self.at(*slot)).map(|node| (node.info.id, cpus(node))).collect()
    }

    /// The best node with room that is `free_for` whoever asks.
    ///
    /// Packs to half a node, then spreads, or whatever its order says; CPU work avoids nodes with devices; `near` is better
    /// on ties.
    pub(super) fn find(
        &mut self,
        id: RequirementId,
        near: Option<MachineId>,
        free_for: impl Fn(&Node) -> bool,
    ) -> Option<NodeId> {
        let slots = &self.slots;
        let at = |slot: Slot| slots.get(slot).and_then(Option::as_ref);
        let allowed = |slot: Slot| at(slot).is_some_and(&free_for);
        let (cost, best) = self.index.fitting(id, slots).find(|(_, slot)| allowed(*slot))?;
        let nearer = near.and_then(|machine| self.by_machine.get(&machine)).and_then(|slots| {
            let requirement = self.index.requirement(id)?;
            let is_a_tie = |near_cost: Cost| match requirement.order {
                Order::Pack => near_cost >> TIER <= cost >> TIER,
                Order::BestFit => near_cost <= cost,
                Order::Spread => false,
            };
            let costs = slots.iter().take(NEAR).filter_map(|slot| Some((at(*slot)?.cost_of(requirement)?, *slot)));
            costs.filter(|(near_cost, slot)| is_a_tie(*near_cost) && allowed(*slot)).min()
        });
        at(nearer.map_or(best, |(_, slot)| slot)).map(|node| node.info.id)
    }

    /// The first nodes with room, the best first.
    pub(super) fn first_fitting(
        &mut self,
        id: RequirementId,
        most: usize,
        allowed: impl Fn(&Node) -> bool,
    ) -> Vec<NodeId> {
        let slots = &self.slots;
        let nodes = self.index.fitting(id, slots).filter_map(|(_, slot)| slots.get(slot).and_then(Option::as_ref));
        nodes.filter(|node| allowed(node)).take(most).map(|node| node.info.id).collect()
    }

    /// How many nodes could hold it if nothing else were on them.
    pub(super) fn possible(&mut self, id: RequirementId) -> usize {
        self.index.possible(id, &self.slots)
    }

    /// How many nodes have room now.
    pub(super) fn count_fitting(&mut self, id: RequirementId) -> usize {
        self.index.count(id, &self.slots)
    }

    /// Takes `resources` from a node, its devices close to `beside`. None if there is no room.
    pub(super) fn take(&mut self, id: NodeId, resources: &ResourceSet, beside: &[u32]) -> Option<Taken> {
        let devices = self.change(id, |node| node.pool.take(resources, &node.info.devices, beside))??;
        Some(Taken { node: id, bundle: None, resources: resources.clone(), devices })
    }

    /// The nearest node to one that could hold `shape`, and what it lacks. None if one could.
    pub(super) fn infeasible(&self, shape: &Shape) -> Option<String> {
        if let Some(node) = shape.required_node().filter(|node| self.get(*node).is_none()) {
            return Some(format!("{node}, where it must be, is not there"));
        }
        let requirements = requirements_of(shape);
        let nodes = self.iter().filter(|node| node.may_serve(shape));
        let gaps = nodes.flat_map(|node| requirements.iter().map(move |requirement| (node.gap(requirement), node)));
        let ((count, _, lack), node) = gaps.min_by_key(|((count, gap, _), node)| (*count, *gap, node.info.id))?;
        (count > 0).then(|| format!("the nearest node {} ({}) {lack}", node.info.hostname, node.info.id))
    }
}

/// Of the cost of packing, the bits below this do not count for whether a nearer node is as good.
const TIER: u32 = 32;
/// Work without devices is the last to get a node that has some.
const WASTES_DEVICES: Cost = 1 << 63;

impl Node {
    /// Whether a shape may be here, as far as it names a node.
    pub(super) fn may_serve(&self, shape: &Shape) -> bool {
        shape.required_node().is_none_or(|node| node == self.info.id)
    }

    /// Whether it could serve a shape that asks for one of these, if nothing were on it.
    pub(super) fn could_serve<'a>(&self, shape: &Shape, mut asked: impl Iterator<Item = &'a Requirement>) -> bool {
        self.may_serve(shape) && self.takes_more() && asked.any(|asked| self.could_hold(asked))
    }

    fn of(info: NodeInfo, version: u64) -> Node {
        Node {
            pool: Pool::of_node(&info.resources),
            leases: BTreeSet::new(),
            bundles: BTreeSet::new(),
            jobs: BTreeSet::new(),
            draining: None,
            suspect: None,
            held: BTreeMap::new(),
            memory_short: None,
            store: StoreUse::default(),
            version,
            joined: version,
            info,
        }
    }

    /// What must be written down of it.
    pub(super) fn fact(&self) -> Fact {
        Fact::Node(Box::new(self.info.clone()), self.draining.as_ref().map(|drain| drain.as_asked.clone()))
    }

    /// What `resources`, and memory of one device, come to here. None if the devices' memory is not known or too
    /// small.
    pub(super) fn amounts<'a>(&self, resources: &'a ResourceSet, gpu_memory: u64) -> Option<Cow<'a, ResourceSet>> {
        if gpu_memory == 0 {
            return Some(Cow::Borrowed(resources));
        }
        let smallest = self.info.devices.iter().map(|device| device.memory).min().filter(|memory| *memory > 0)?;
        let whole = u128::from(Amount::ONE.units() as u64);
        let units = (u128::from(gpu_memory) * whole).div_ceil(u128::from(smallest));
        (units <= whole).then(|| Cow::Owned(resources.clone().with(GPU, Amount::from_units(units as i64))))
    }

    fn is_eligible(&self, requirement: &Requirement) -> bool {
        requirement.selector.as_ref().is_none_or(|selector| selector.matches(&self.info.labels))
    }

    /// Whether it could hold this if nothing else were on it.
    pub(super) fn could_hold(&self, requirement: &Requirement) -> bool {
        if !self.is_eligible(requirement) {
            return false;
        }
        let Some(needed) = self.amounts(&requirement.resources, requirement.gpu_memory) else { return false };
        if requirement.is_sum {
            self.info.resources.covers(&needed)
        } else {
            Pool::of_node(&self.info.resources).could_hold(&needed)
        }
    }

    /// What it is, in a word.
    pub(super) fn standing(&self) -> &'static str {
        match (self.suspect, &self.draining) {
            (Some(_), _) => "suspect",
            (None, Some(_)) => "draining",
            (None, None) => "alive",
        }
    }

    /// Whether anything new may be placed on it.
    pub(super) fn takes_more(&self) -> bool {
        self.draining.is_none() && self.suspect.is_none()
    }

    /// How soon it is chosen; none if it has no room.
    pub(super) fn cost_of(&self, requirement: &Requirement) -> Option<Cost> {
        if !self.takes_more() || !self.is_eligible(requirement) {
            return None;
        }
        let needed = self.amounts(&requirement.resources, requirement.gpu_memory)?;
        let has_room =
            if requirement.is_sum { self.pool.available.covers(&needed) } else { self.pool.has_room(&needed) };
        if !has_room {
            return None;
        }
        let load = self.pool.load_permille().clamp(0, 1_000) as Cost;
        let wastes_devices = needed.get(GPU).is_zero() && self.pool.has_devices();
        let waste = if wastes_devices { WASTES_DEVICES } else { 0 };
        Some(match requirement.order {
            Order::Spread => (self.leases.len() as Cost) << 10 | load,
            // Up to half, the fuller the better; beyond it, the emptier the better.
            Order::Pack if load < 500 => waste | (500 - load),
            Order::Pack => waste | 1 << TIER | load,
            Order::BestFit => waste | self.pool.left_over(&needed),
        })
    }

    /// How many things are missing for it ever to hold this, by how much, and in words.
    fn gap(&self, requirement: &Requirement) -> (usize, i64, String) {
        let mut lacks = Vec::new();
        let mut gap = 0;
        for (name, asked) in requirement.resources.iter() {
            let has = self.info.resources.get(name);
            if has < asked {
                lacks.push(format!("has {} {name} of the {} asked for", has.shown(name), asked.shown(name)));
                gap += (asked - has).units();
            }
        }
        if self.amounts(&requirement.resources, requirement.gpu_memory).is_none() {
            lacks.push("has no GPU that is known to have so much memory".into());
        }
        let label = requirement.selector.as_ref().and_then(|selector| {
            Some(format!("does not match `{selector}`: {}", selector.failing(&self.info.labels)?))
        });
        lacks.extend(label);
        (lacks.len(), gap, lacks.join(" and "))
    }
}
