//! What the head has given to whom, by its own words: an account of its own, compared with what there is. The head checks its
//! sums itself ([`wingbeat_head::state::State::audit_all`]); here it is not asked.

use std::collections::{BTreeMap, BTreeSet};

use wingbeat_core::resources::{CPU, GPU};
use wingbeat_core::spec::{PlacementGroupSpec, PlacementStrategy};
use wingbeat_core::{ActorId, Amount, Incarnation, LeaseId, NodeId, PlacementGroupId, ResourceSet};
use wingbeat_head::state::{BundlePlace, Event, Fact};
use wingbeat_net::messages::{HeadMessage, LeaseHolder, LeaseStart, NodeInfo, NodeMessage};

/// A lease as far as the head has said and heard of it.
struct Granted {
    node: NodeId,
    start: LeaseStart,
    /// Told to end, so that another life of its actor may begin.
    is_ending: bool,
    /// What it held is free, although the node has not said so: its process serves others.
    is_returned: bool,
    waiting: u32,
}

impl Granted {
    /// Whoever waits has lent its CPUs.
    fn held(&self) -> ResourceSet {
        let mut held = self.start.resources.clone();
        if self.waiting > 0 {
            held.set(CPU, Amount::ZERO);
        }
        held
    }
}

#[derive(Default)]
pub(super) struct Grants {
    leases: BTreeMap<LeaseId, Granted>,
    /// How many executions wait under leases whose nodes are not back.
    absent_waits: BTreeMap<LeaseId, u32>,
    /// The latest life of each actor.
    lives: BTreeMap<ActorId, Incarnation>,
    /// Placement groups that were asked for.
    groups: BTreeMap<PlacementGroupId, PlacementGroupSpec>,
    /// Where the bundles of each group are, as was written down.
    placed: BTreeMap<PlacementGroupId, Vec<Option<BundlePlace>>>,
    /// What all jobs together may hold.
    quota: Option<ResourceSet>,
}

fn add_devices(to: &mut BTreeMap<u32, Amount>, devices: &[(u32, Amount)]) {
    for (number, amount) in devices {
        let held = to.entry(*number).or_default();
        *held = *held + *amount;
    }
}

impl Grants {
    /// What the head is about to take in gives something back, or says what runs.
    pub(super) fn hears(&mut self, event: &Event) {
        match event {
            Event::Says(_, HeadMessage::LeaseEnded(lease) | HeadMessage::LeaseFailed { lease, .. }) => {
                self.leases.remove(lease);
            }
            Event::Says(_, HeadMessage::Waiting { lease: Some(lease), .. }) => match self.leases.get_mut(lease) {
                Some(granted) => granted.waiting += 1,
                None => *self.absent_waits.entry(*lease).or_default() += 1,
            },
            Event::Says(_, HeadMessage::Resumed { lease: Some(lease), .. }) => {
                let absent = self.absent_waits.get_mut(lease);
                if let Some(waiting) = self.leases.get_mut(lease).map(|granted| &mut granted.waiting).or(absent) {
                    *waiting = waiting.saturating_sub(1);
                }
            }
            Event::Says(_, HeadMessage::WorkerDied(death)) => {
                // Its process is gone, though not all that it had started.
                if let Some(granted) = death.lease.and_then(|lease| self.leases.get_mut(&lease)) {
                    granted.is_ending = true;
                }
            }
            Event::NodeLost(node, _) => self.leases.retain(|_, granted| granted.node != *node),
            Event::NodeJoined(info, running) => {
                for lease in &running.leases {
                    let (id, start) = (lease.start.lease, lease.start.clone());
                    if let LeaseHolder::Actor(spec, life, _) = &start.holder {
                        let known = self.lives.entry(spec.id).or_insert(*life);
                        *known = (*known).max(*life);
                    }
                    let waiting = self.absent_waits.remove(&id).unwrap_or(0);
                    let granted =
                        Granted { node: info.id, start, is_ending: lease.is_ending, is_returned: false, waiting };
                    self.leases.insert(id, granted);
                }
            }
            _ => {}
        }
    }

    /// The head was started again: it is told what runs. Of a life that nobody who is left knows of, nobody can tell.
    pub(super) fn begin_anew(&mut self) {
        self.leases.clear();
        self.lives.clear();
        self.absent_waits.clear();
    }

    pub(super) fn asks_for(&mut self, group: &PlacementGroupSpec) {
        self.groups.insert(group.id, group.clone());
    }

    pub(super) fn limited_to(&mut self, quota: Option<ResourceSet>) {
        self.quota = quota;
    }

    pub(super) fn writes(&mut self, fact: &Fact) {
        match fact {
            Fact::Group(spec, places) => drop(self.placed.insert(spec.id, places.clone())),
            Fact::GroupGone(id) => drop(self.placed.remove(id)),
            _ => {}
        }
    }

    /// What the head orders a node. Answers with the lease that it grants.
    pub(super) fn orders(&mut self, node: NodeId, message: &NodeMessage) -> Option<LeaseId> {
        match message {
            NodeMessage::StartLease(start) => {
                self.grants(node, start);
                return Some(start.lease);
            }
            NodeMessage::EndLease { lease, kill } => {
                if let Some(granted) = self.leases.get_mut(lease) {
                    granted.is_ending = true;
                    granted.is_returned = kill.is_none() && granted.start.gpus.is_empty();
                }
            }
            _ => {}
        }
        None
    }

    /// An actor lives once at a time, and a lease is granted once.
    fn grants(&mut self, node: NodeId, start: &LeaseStart) {
        let id = start.lease;
        if let LeaseHolder::Actor(spec, life, _) = &start.holder {
            let is_other = |other: &Granted| {
                !other.is_ending && matches!(&other.start.holder, LeaseHolder::Actor(other, ..) if other.id == spec.id)
            };
            assert!(!self.leases.values().any(is_other), "{} lives twice", spec.id);
            let before = self.lives.insert(spec.id, *life);
            // The same again, if a head that died could not tell the node.
            assert!(before.is_none_or(|before| before <= *life), "{} begins life {life:?} after {before:?}", spec.id);
        }
        let sum: i64 = start.gpus.iter().map(|(_, amount)| amount.units()).sum();
        assert_eq!(sum, start.resources.get(GPU).units(), "{id} holds {} and {:?}", start.resources, start.gpus);
        let granted = Granted { node, start: start.clone(), is_ending: false, is_returned: false, waiting: 0 };
        assert!(self.leases.insert(id, granted).is_none(), "{id} was granted twice");
    }

    /// Whether the CPUs of a lease are lent, since who has it waits.
    pub(super) fn are_lent(&self, lease: LeaseId) -> Option<bool> {
        self.leases.get(&lease).map(|granted| granted.waiting > 0)
    }

    /// All bundles have their places, as the strategy says.
    pub(super) fn check_placed(&self, id: PlacementGroupId, nodes: &[NodeId]) {
        let Some(spec) = self.groups.get(&id) else { panic!("{id} was placed and never asked for") };
        assert_eq!(nodes.len(), spec.bundles.len(), "bundles of {id}");
        let distinct: BTreeSet<&NodeId> = nodes.iter().collect();
        match spec.strategy {
            PlacementStrategy::StrictPack => assert_eq!(distinct.len(), 1, "{id} must be on one node"),
            PlacementStrategy::StrictSpread => assert_eq!(distinct.len(), nodes.len(), "bundles of {id} must be apart"),
            PlacementStrategy::Pack | PlacementStrategy::Spread => {}
        }
    }

    /// The node on which a lease was just granted has all that was given away of it.
    pub(super) fn check_node(&self, node: &NodeInfo, lease: LeaseId) {
        let Some(new) = self.leases.get(&lease) else { return };
        let (mut held, mut devices) = (ResourceSet::new(), BTreeMap::new());
        for granted in self.leases.values().filter(|granted| granted.node == node.id && !granted.is_returned) {
            if !self.is_in_bundle(granted) {
                held.add(&granted.held());
                add_devices(&mut devices, &granted.start.gpus);
            }
        }
        for place in self.placed.values().flatten().flatten().filter(|place| place.node == node.id) {
            held.add(&place.resources);
            add_devices(&mut devices, &place.devices);
        }
        for (name, _) in new.start.resources.iter().filter(|_| new.start.bundle.is_none()) {
            let (given, all) = (held.get(name), node.resources.get(name));
            assert!(given <= all, "{given} {name} of {} are given away, and it has {all}", node.id);
        }
        for (number, amount) in devices {
            assert!(amount <= Amount::ONE, "{amount} of device {number} of {} are given away", node.id);
        }
    }

    /// Whether a lease takes from what a placement group has where it is.
    fn is_in_bundle(&self, granted: &Granted) -> bool {
        granted.start.bundle.is_some_and(|(group, index)| {
            let place = self.placed.get(&group).and_then(|places| places.get(index as usize)?.as_ref());
            place.is_some_and(|place| place.node == granted.node)
        })
    }

    /// No more is held than the quota allows of what was granted just now. What was granted before may exceed it: the quota was
    /// lowered, or somebody goes on who had waited.
    pub(super) fn check_quota(&self, lease: LeaseId) {
        let (Some(new), Some(quota)) = (self.leases.get(&lease), &self.quota) else { return };
        if new.start.bundle.is_some() {
            return;
        }
        let mut held = ResourceSet::new();
        for granted in self.leases.values().filter(|granted| !granted.is_returned && !self.is_in_bundle(granted)) {
            held.add(&granted.held());
        }
        self.placed.values().flatten().flatten().for_each(|place| held.add(&place.resources));
        for (name, limit) in quota.iter().filter(|(name, _)| !new.start.resources.get(name).is_zero()) {
            assert!(held.get(name) <= limit, "{lease} takes all to {} {name} of {limit}", held.get(name));
        }
    }
}
