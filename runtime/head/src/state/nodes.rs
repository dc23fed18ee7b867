//! What each node has and has given away, device by device, and where a shape fits.

use std::collections::BTreeMap;

use wingbeat_core::resources::{CPU, GPU};
use wingbeat_core::spec::{MachineId, Shape, Strategy};
use wingbeat_core::{Amount, NodeId, ResourceSet};
use wingbeat_net::messages::NodeInfo;

/// A node and what is free on it.
#[derive(Clone)]
pub(super) struct Node {
    pub info: NodeInfo,
    /// May be negative: who goes on after a wait over-commits the node.
    pub available: ResourceSet,
    /// What is free of each device.
    devices: Vec<Amount>,
    pub leases: u32,
}

/// What a lease took.
#[derive(Clone, Debug)]
pub(super) struct Taken {
    pub node: NodeId,
    pub resources: ResourceSet,
    pub devices: Vec<(u32, Amount)>,
}

#[derive(Clone, Default)]
pub(super) struct Nodes {
    nodes: BTreeMap<NodeId, Node>,
}

impl Nodes {
    pub(super) fn join(&mut self, info: NodeInfo) {
        let devices = (info.resources.get(GPU).units() / Amount::ONE.units()).max(0) as usize;
        let node = Node { available: info.resources.clone(), devices: vec![Amount::ONE; devices], leases: 0, info };
        self.nodes.insert(node.info.id, node);
    }

    pub(super) fn remove(&mut self, node: NodeId) -> bool {
        self.nodes.remove(&node).is_some()
    }

    pub(super) fn get(&self, node: NodeId) -> Option<&Node> {
        self.nodes.get(&node)
    }

    pub(super) fn ids(&self) -> Vec<NodeId> {
        self.nodes.keys().copied().collect()
    }

    pub(super) fn infos(&self) -> Vec<NodeInfo> {
        self.nodes.values().map(|node| node.info.clone()).collect()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Node> {
        self.nodes.values()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.nodes.is_empty()
    }

    /// Nodes of a machine with their whole CPUs.
    pub(super) fn on_machine(&self, machine: MachineId) -> Vec<(NodeId, u32)> {
        let cpus = |node: &Node| (node.info.resources.get(CPU).units() / Amount::ONE.units()).max(0) as u32;
        self.nodes
            .values()
            .filter(|node| node.info.address.machine == machine)
            .map(|node| (node.info.id, cpus(node)))
            .collect()
    }

    /// The node for a lease that needs `shape` to be placed, if one has room now.
    pub(super) fn place(&self, shape: &Shape, near: Option<MachineId>) -> Option<NodeId> {
        self.place_where(shape, near, |_| true)
    }

    /// [`Nodes::place`], on nodes that are `free_for` the one who asks.
    pub(super) fn place_where(
        &self,
        shape: &Shape,
        near: Option<MachineId>,
        free_for: impl Fn(&Node) -> bool,
    ) -> Option<NodeId> {
        let fits = |node: &&Node| node.has_room(&shape.resources) && free_for(node);
        match &shape.strategy {
            Strategy::Node { node, soft } => {
                if let Some(wanted) = self.nodes.get(node).filter(fits) {
                    return Some(wanted.info.id);
                }
                soft.then(|| self.best(shape, near, fits)).flatten()
            }
            Strategy::Spread => {
                let fewest = self.nodes.values().filter(fits).min_by_key(|node| (node.leases, node.load_permille()));
                fewest.map(|node| node.info.id)
            }
            Strategy::Default => self.best(shape, near, fits),
        }
    }

    /// Packs to half a node, then spreads; CPU work avoids nodes with devices; near is better on ties.
    fn best(&self, shape: &Shape, near: Option<MachineId>, fits: impl Fn(&&Node) -> bool) -> Option<NodeId> {
        let needs_gpu = !shape.resources.get(GPU).is_zero();
        let cost = |node: &&Node| {
            let wastes_devices = !needs_gpu && !node.devices.is_empty();
            let load = node.load_permille();
            let far = near.is_none_or(|near| near != node.info.address.machine);
            // Up to half, the fuller the better; beyond it, the emptier the better.
            let packed = if load < 500 { (0, 500 - load) } else { (1, load) };
            (wastes_devices, packed.0, far, packed.1, node.info.id)
        };
        self.nodes.values().filter(fits).min_by_key(cost).map(|node| node.info.id)
    }

    /// Takes what a lease holds from a node that was found by [`Nodes::place`].
    pub(super) fn take(&mut self, node: NodeId, resources: &ResourceSet) -> Option<Taken> {
        let devices = self.nodes.get_mut(&node)?.take(resources)?;
        Some(Taken { node, resources: resources.clone(), devices })
    }

    /// Gives everything back that [`Nodes::take`] took, less what was given back before.
    pub(super) fn give_back(&mut self, taken: &Taken) {
        if let Some(node) = self.nodes.get_mut(&taken.node) {
            node.give_back(taken);
        }
    }

    /// Gives back, or takes again, the CPUs of a lease whose process waits.
    pub(super) fn adjust_cpus(&mut self, node: NodeId, amount: Amount, back: bool) {
        let Some(node) = self.nodes.get_mut(&node) else { return };
        let free = node.available.get(CPU);
        node.available.set(CPU, if back { free + amount } else { free - amount });
    }

    /// Why no node could ever hold `resources`: the nearest one and what it lacks. None if one could.
    pub(super) fn infeasible(&self, shape: &Shape) -> Option<String> {
        let eligible = |node: &&Node| match &shape.strategy {
            Strategy::Node { node: wanted, soft: false } => node.info.id == *wanted,
            _ => true,
        };
        if let Strategy::Node { node, soft: false } = &shape.strategy
            && !self.nodes.contains_key(node)
        {
            return Some(format!("{node}, where it must be, is not there"));
        }
        let lacks = |node: &Node| -> Vec<(String, Amount, Amount)> {
            let missing = shape.resources.iter().filter(|(name, amount)| node.info.resources.get(name) < *amount);
            missing.map(|(name, amount)| (name.to_owned(), node.info.resources.get(name), amount)).collect()
        };
        let nearest =
            self.nodes.values().filter(eligible).map(|node| (lacks(node), node)).min_by_key(|(lack, node)| {
                let gap: i64 = lack.iter().map(|(_, has, asked)| (*asked - *has).units()).sum();
                (lack.len(), gap, node.info.id)
            });
        let (lack, node) = nearest?;
        if lack.is_empty() {
            return None;
        }
        let parts: Vec<String> =
            lack.iter().map(|(name, has, asked)| format!("{has} {name} of the {asked} asked for")).collect();
        Some(format!("the nearest node {} ({}) has {}", node.info.hostname, node.info.id, parts.join(", ")))
    }
}

impl Node {
    fn take(&mut self, resources: &ResourceSet) -> Option<Vec<(u32, Amount)>> {
        let devices = self.pick_devices(resources.get(GPU))?;
        for (device, amount) in &devices {
            if let Some(free) = self.devices.get_mut(*device as usize) {
                *free = *free - *amount;
            }
        }
        self.available.subtract(resources);
        self.leases += 1;
        Some(devices)
    }

    pub(super) fn give_back(&mut self, taken: &Taken) {
        for (device, amount) in &taken.devices {
            if let Some(free) = self.devices.get_mut(*device as usize) {
                *free = *free + *amount;
                debug_assert!(*free <= Amount::ONE, "a device was given back twice");
            }
        }
        self.available.add(&taken.resources);
        self.leases = self.leases.saturating_sub(1);
    }

    /// Whether it may and could hold `shape` if nothing else were on it.
    pub(super) fn could_hold(&self, shape: &Shape) -> bool {
        let allowed = match &shape.strategy {
            Strategy::Node { node, soft: false } => self.info.id == *node,
            _ => true,
        };
        allowed && self.info.resources.covers(&shape.resources)
    }

    /// Whether `held` has something that `needed` lacks here.
    pub(super) fn would_help(&self, held: &ResourceSet, needed: &ResourceSet) -> bool {
        needed.iter().any(|(name, amount)| {
            let lacks = self.available.get(name) < amount || (name == GPU && self.pick_devices(amount).is_none());
            lacks && !held.get(name).is_zero()
        })
    }

    pub(super) fn has_room(&self, needed: &ResourceSet) -> bool {
        self.available.covers(needed) && self.pick_devices(needed.get(GPU)).is_some()
    }

    /// A fraction shares the fullest device that still has room for it; whole ones are never shared.
    fn pick_devices(&self, amount: Amount) -> Option<Vec<(u32, Amount)>> {
        if amount.is_zero() {
            return Some(Vec::new());
        }
        let free = || self.devices.iter().enumerate().map(|(device, free)| (device as u32, *free));
        if amount < Amount::ONE {
            let (device, _) =
                free().filter(|(_, free)| *free >= amount).min_by_key(|(device, free)| (*free, *device))?;
            return Some(vec![(device, amount)]);
        }
        let whole = (amount.units() / Amount::ONE.units()) as usize;
        let picked: Vec<(u32, Amount)> = free()
            .filter(|(_, free)| *free == Amount::ONE)
            .take(whole)
            .map(|(device, _)| (device, Amount::ONE))
            .collect();
        (picked.len() == whole).then_some(picked)
    }

    /// How much of its scarcest resource is given away, in thousandths.
    fn load_permille(&self) -> i64 {
        let load = |name: &str, total: Amount| match total.units() {
            0 => 0,
            total => (total - self.available.get(name).units()) * 1000 / total,
        };
        self.info.resources.iter().map(|(name, total)| load(name, total)).max().unwrap_or(0)
    }
}
