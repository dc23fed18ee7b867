//! What must hold after every step, by the simulation's own account and by the state's.

use std::collections::{BTreeMap, BTreeSet};

use wingbeat_core::resources::{CPU, GPU};
use wingbeat_core::spec::PlacementStrategy;
use wingbeat_core::{Amount, LeaseId, NodeId, PlacementGroupId, ResourceSet, labels};
use wingbeat_net::messages::{HeadMessage, LeaseHolder, LeaseStart};

use super::world::{Granted, World};
use crate::state::{Event, FactKey};

/// Everything is checked so often in a run that is not thorough.
const CHECK_ALL_EVERY: u64 = 20_000;

impl World {
    /// Keeps its own account of what an event gives back.
    pub(super) fn note(&mut self, event: &Event) {
        match event {
            Event::Says(_, HeadMessage::LeaseEnded(lease) | HeadMessage::LeaseFailed { lease, .. }) => {
                if let Some(granted) = self.granted.remove(lease) {
                    self.touched.insert(granted.node);
                }
            }
            Event::Says(_, HeadMessage::Waiting { lease: Some(lease), .. }) => {
                if let Some(granted) = self.granted.get_mut(lease) {
                    granted.waiting += 1;
                    self.touched.insert(granted.node);
                } else {
                    // Its node is not back.
                    *self.absent_waits.entry(*lease).or_default() += 1;
                }
            }
            Event::Says(_, HeadMessage::Resumed { lease: Some(lease), .. }) => {
                if let Some(granted) = self.granted.get_mut(lease) {
                    granted.waiting = granted.waiting.saturating_sub(1);
                    self.touched.insert(granted.node);
                } else if let Some(waiting) = self.absent_waits.get_mut(lease) {
                    *waiting = waiting.saturating_sub(1);
                }
            }
            Event::Says(_, HeadMessage::WorkerDied(death)) => {
                // Its process is gone, though not all that it had started.
                if let Some(granted) = death.lease.and_then(|lease| self.granted.get_mut(&lease)) {
                    granted.is_ending = true;
                }
            }
            Event::NodeLost(node, _) => self.granted.retain(|_, granted| granted.node != *node),
            _ => {}
        }
    }

    pub(super) fn check(&mut self) -> Result<(), String> {
        let is_due = self.report.events.is_multiple_of(CHECK_ALL_EVERY);
        if self.config.thorough || is_due {
            self.touched.clear();
            self.state.audit_all()?;
        } else {
            self.state.audit(std::mem::take(&mut self.touched))?;
        }
        if self.config.thorough
            && let Some(who) = self.state.overlooked()
        {
            return Err(who);
        }
        if is_due || (self.config.thorough && self.report.events.is_multiple_of(50)) {
            self.check_facts()?;
        }
        Ok(())
    }

    /// What was written down is what the state is.
    pub(super) fn check_facts(&self) -> Result<(), String> {
        let mut durable: BTreeMap<FactKey, String> = BTreeMap::new();
        for fact in self.state.durable() {
            durable.insert(fact.key(), format!("{fact:?}"));
        }
        for (key, fact) in &self.facts {
            match durable.remove(key) {
                Some(now) if now == format!("{fact:?}") => {}
                Some(now) => return Err(format!("written down was {fact:?}, and it is {now}")),
                None => return Err(format!("written down was {fact:?}, which is no more")),
            }
        }
        match durable.into_values().next() {
            Some(unwritten) => Err(format!("never written down was {unwritten}")),
            None => Ok(()),
        }
    }

    /// All bundles have their places, as the strategy and their labels say.
    pub(super) fn check_placed(&mut self, id: PlacementGroupId, nodes: &[NodeId]) -> Result<(), String> {
        let Some(spec) = self.groups.get(&id) else { return Err(format!("{id} was placed and never asked for")) };
        if nodes.len() != spec.bundles.len() {
            return Err(format!("{} of {} bundles of {id} were placed", nodes.len(), spec.bundles.len()));
        }
        let distinct: BTreeSet<&NodeId> = nodes.iter().collect();
        match spec.strategy {
            PlacementStrategy::StrictPack if distinct.len() > 1 => {
                return Err(format!("{id} must be on one node, and is on {}", distinct.len()));
            }
            PlacementStrategy::StrictSpread if distinct.len() < nodes.len() => {
                return Err(format!("the bundles of {id} must be apart, and are on {} nodes", distinct.len()));
            }
            _ => {}
        }
        for (bundle, node) in spec.bundles.iter().zip(nodes) {
            let Some(daemon) = self.nodes.get(node) else {
                return Err(format!("{id} was placed on {node}, which is gone"));
            };
            let matches = |selector: &labels::Selector| selector.matches(&daemon.info.labels);
            if !bundle.labels.is_empty() && !bundle.labels.iter().any(matches) {
                return Err(format!("a bundle of {id} is on {node}, whose labels it does not want"));
            }
        }
        self.report.groups += 1;
        self.report.decisions += nodes.len() as u64;
        self.touched.extend(nodes);
        Ok(())
    }

    /// A grant by the head's own words: nothing is given twice, and an actor lives once at a time.
    pub(super) fn check_grant(&mut self, node: NodeId, start: &LeaseStart) -> Result<(), String> {
        let id = start.lease;
        self.report.decisions += 1;
        if let LeaseHolder::Actor(spec, life) = &start.holder {
            let other = self.granted.values().find(|other| {
                !other.is_ending && matches!(&other.start.holder, LeaseHolder::Actor(other, _) if other.id == spec.id)
            });
            if other.is_some() {
                return Err(format!("{} lives twice", spec.id));
            }
            if self.lives.insert(spec.id, *life).is_some_and(|before| before > *life) {
                return Err(format!("{} goes back to an earlier life", spec.id));
            }
        }
        if self.granted.contains_key(&id) {
            return Err(format!("{id} was granted twice"));
        }
        let granted = Granted { node, start: start.clone(), is_ending: false, is_returned: false, waiting: 0 };
        self.granted.insert(id, granted);
        let sum: i64 = start.gpus.iter().map(|(_, amount)| amount.units()).sum();
        if sum != start.resources.get(GPU).units() {
            return Err(format!("{id} holds {} and other devices: {:?}", start.resources, start.gpus));
        }
        Ok(())
    }

    /// By the head's own words, a namespace holds no more than its quota of what was granted just now. What was granted
    /// before may exceed it: the quota was lowered, or somebody goes on who had waited.
    pub(super) fn check_quota(&self, lease: LeaseId) -> Result<(), String> {
        let Some(new) = self.granted.get(&lease).filter(|new| new.start.bundle.is_none()) else { return Ok(()) };
        let Some(namespace) = self.namespaces.get(&new.start.job) else { return Ok(()) };
        let Some(limit) = self.quotas.get(namespace) else { return Ok(()) };
        let is_of = |job| self.namespaces.get(&job) == Some(namespace);
        let is_inside = |granted: &Granted| {
            granted.start.bundle.is_some_and(|(group, index)| {
                let places = self.placed.get(&group).and_then(|places| places.get(index as usize)?.as_ref());
                places.is_some_and(|place| place.node == granted.node)
            })
        };
        let mut held = ResourceSet::new();
        let held_now = self.granted.values().filter(|granted| !granted.is_returned && is_of(granted.start.job));
        for granted in held_now.filter(|granted| !is_inside(granted)) {
            let mut resources = granted.start.resources.clone();
            if granted.waiting > 0 {
                resources.set(CPU, Amount::ZERO);
            }
            held.add(&resources);
        }
        for (group, places) in &self.placed {
            if self.groups.get(group).is_some_and(|spec| is_of(spec.job)) {
                places.iter().flatten().for_each(|place| held.add(&place.resources));
            }
        }
        let over = |name: &str, limit| !new.start.resources.get(name).is_zero() && held.get(name) > limit;
        match limit.iter().find(|(name, limit)| over(name, *limit)) {
            Some((name, limit)) => Err(format!("{lease} takes {namespace} to {} {name} of {limit}", held.get(name))),
            None => Ok(()),
        }
    }

    /// By the head's own words, a node on which it granted something has it all.
    pub(super) fn check_node(&self, node: NodeId, lease: LeaseId) -> Result<(), String> {
        let (Some(daemon), Some(new)) = (self.nodes.get(&node), self.granted.get(&lease)) else { return Ok(()) };
        let mut held = ResourceSet::new();
        let mut devices: BTreeMap<u32, Amount> = BTreeMap::new();
        let bundle_at = |group: PlacementGroupId, index: u32| {
            let place = self.placed.get(&group).and_then(|places| places.get(index as usize)?.as_ref());
            place.filter(|place| place.node == node)
        };
        for granted in self.granted.values().filter(|granted| granted.node == node && !granted.is_returned) {
            if granted.start.bundle.is_some_and(|(group, index)| bundle_at(group, index).is_some()) {
                continue;
            }
            let mut resources = granted.start.resources.clone();
            if granted.waiting > 0 {
                resources.set(CPU, Amount::ZERO);
            }
            held.add(&resources);
            for (number, amount) in &granted.start.gpus {
                let of = devices.entry(*number).or_default();
                *of = *of + *amount;
            }
        }
        for place in self.placed.values().flatten().flatten().filter(|place| place.node == node) {
            held.add(&place.resources);
            for (number, amount) in &place.devices {
                let of = devices.entry(*number).or_default();
                *of = *of + *amount;
            }
        }
        let total = &daemon.info.resources;
        for (name, _) in new.start.resources.iter().filter(|_| new.start.bundle.is_none()) {
            if held.get(name) > total.get(name) {
                return Err(format!("{} {name} of {node} are given away, and it has {total}", held.get(name)));
            }
        }
        match devices.iter().find(|(_, amount)| **amount > Amount::ONE) {
            Some((number, amount)) => Err(format!("{amount} of device {number} of {node} are given away")),
            None => Ok(()),
        }
    }
}
