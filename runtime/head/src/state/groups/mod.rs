//! Placement groups: what they reserve, and their lives.
//!
//! ```text
//!   Pending ──all bundles fit──▶ Placed ──a node dies──▶ Pending for what was there ──▶ Placed …
//!      └───────────────── removed, its job over, or impossible ──▶ Gone
//! ```

mod lives;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use wingbeat_core::error::Error;
use wingbeat_core::spec::{
    BundleSpec, Draining, PlacementGroupSpec, PlacementGroupState, PlacementStrategy, ScopedName, Shape,
};
use wingbeat_core::{Amount, JobId, NodeId, PlacementGroupId, ProcessId, ResourceSet};
use wingbeat_net::messages::DeviceInfo;

use super::facts::Drained;
use super::index::{Order, Requirement, RequirementId, Slot};
use super::nodes::{Drain, Nodes, Taken, requirements_of};
use super::pool::{Devices, Pool, Span};
use super::{Millis, State, after};

/// Groups that are gone and remembered, so that whoever asks late learns the cause.
const TOMBSTONES: usize = 10_000;
/// More bundles than any cluster has nodes; a mistake in a program must not fill the head's memory.
const BUNDLES: usize = 100_000;

/// All groups, and why the latest of those that are gone are.
#[derive(Default)]
pub(super) struct Groups {
    /// Until they are removed ([`State::remove_group`]).
    groups: BTreeMap<PlacementGroupId, Group>,
    /// The same groups, as far as they have a name.
    names: BTreeMap<ScopedName, PlacementGroupId>,
    /// Those that end with their creator.
    by_owner: BTreeMap<ProcessId, BTreeSet<PlacementGroupId>>,
    /// All of them.
    by_job: BTreeMap<JobId, BTreeSet<PlacementGroupId>>,
    /// Why groups are gone; of as many as [`TOMBSTONES`].
    gone: BTreeMap<PlacementGroupId, Error>,
    /// The same groups, the longest gone first.
    gone_order: VecDeque<PlacementGroupId>,
}

pub(super) struct Group {
    pub spec: PlacementGroupSpec,
    /// What each bundle requires: one requirement for each of its selectors.
    pub requirements: Vec<Vec<RequirementId>>,
    /// What all of them together require of one node.
    pub sum: RequirementId,
    /// The bundles that have a place.
    pub placed: Vec<Option<Placed>>,
    /// How many have none.
    missing: usize,
    /// Whether the nodes that there were could hold it at some time.
    was_possible: bool,
    /// Processes that are told of each change, until they are lost.
    watchers: BTreeSet<ProcessId>,
    /// How often it was asked for, less how often that could not be written.
    asked: u32,
}

pub(super) struct Placed {
    pub taken: Taken,
    pub pool: Pool,
    /// When.
    pub at: Millis,
}

/// The shape of a lease that would hold what a bundle holds.
fn shape_of(bundle: &BundleSpec) -> Shape {
    Shape {
        resources: bundle.resources.clone(),
        gpu_memory: bundle.gpu_memory,
        labels: bundle.labels.clone(),
        ..Shape::default()
    }
}

/// Checks what no group may be.
fn check(spec: &PlacementGroupSpec) -> Result<(), Error> {
    let invalid = |why: String| Error::InvalidArgument { what: format!("{}: {why}", spec.title()) };
    if spec.bundles.is_empty() {
        return Err(invalid("it has no bundles".into()));
    }
    if spec.bundles.len() > BUNDLES {
        return Err(invalid(format!("it has {} bundles, and {BUNDLES} are the most", spec.bundles.len())));
    }
    for (index, bundle) in spec.bundles.iter().enumerate() {
        let shape = shape_of(bundle);
        shape.check().map_err(|why| invalid(format!("bundle {index}: {why}")))?;
        if shape.resources.is_empty() && shape.gpu_memory == 0 {
            return Err(invalid(format!("bundle {index} reserves nothing")));
        }
    }
    Ok(())
}

impl Groups {
    /// Processes that have made groups which end with them.
    pub(super) fn makers(&self) -> impl Iterator<Item = &ProcessId> {
        self.by_owner.keys()
    }

    pub(super) fn get(&self, id: PlacementGroupId) -> Option<&Group> {
        self.groups.get(&id)
    }

    /// Why a group is gone.
    pub(super) fn cause_of_end(&self, id: PlacementGroupId) -> Option<&Error> {
        self.gone.get(&id)
    }

    /// The nodes that there were could hold this group at some time.
    pub(super) fn note_possible(&mut self, id: PlacementGroupId) {
        if let Some(group) = self.groups.get_mut(&id) {
            group.was_possible = true;
        }
    }

    pub(super) fn ids(&self) -> Vec<PlacementGroupId> {
        self.groups.keys().copied().collect()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Group> {
        self.groups.values()
    }

    /// Those that come after this one, by id, or all.
    pub(super) fn after(&self, last: Option<PlacementGroupId>) -> impl Iterator<Item = &Group> {
        after(&self.groups, last).map(|(_, group)| group)
    }

    pub(super) fn captures(&self, id: PlacementGroupId) -> bool {
        self.groups.get(&id).is_some_and(|group| group.spec.captures_children)
    }

    pub(super) fn find_by_name(&self, name: &ScopedName) -> Result<PlacementGroupSpec, Error> {
        let group = self.names.get(name).and_then(|id| self.groups.get(id));
        group
            .map(|group| group.spec.clone())
            .ok_or_else(|| Error::PlacementGroupNotFound { name: name.name.clone(), namespace: name.namespace.clone() })
    }

    /// What a group asks for, and the sum.
    pub(super) fn asked(&self, id: PlacementGroupId) -> Option<(&PlacementGroupSpec, ResourceSet)> {
        let group = self.groups.get(&id)?;
        Some((&group.spec, sum_of(&group.spec)))
    }

    /// What the groups of some jobs have reserved.
    pub(super) fn reserved_where(&self, is_of: impl Fn(JobId) -> bool) -> Vec<ResourceSet> {
        let groups = self.groups.values().filter(|group| is_of(group.spec.job));
        groups.flat_map(|group| group.placed.iter().flatten()).map(|placed| placed.taken.resources.clone()).collect()
    }

    pub(super) fn nodes_of(&self, id: PlacementGroupId) -> BTreeSet<NodeId> {
        let placed = self.groups.get(&id).into_iter().flat_map(|group| group.placed.iter().flatten());
        placed.map(|placed| placed.taken.node).collect()
    }

    /// A bundle with room for a shape.
    pub(super) fn find(
        &self,
        id: PlacementGroupId,
        index: Option<u32>,
        shape: &Shape,
        nodes: &Nodes,
    ) -> Option<(u32, NodeId)> {
        let group = self.groups.get(&id)?;
        let fits = |index: u32| {
            let placed = group.placed.get(index as usize)?.as_ref()?;
            let node = nodes.get(placed.taken.node).filter(|node| node.takes_more())?;
            let needed = node.amounts(&shape.resources, shape.gpu_memory)?;
            placed.pool.has_room(&needed).then_some((index, placed.taken.node))
        };
        match index {
            Some(index) => fits(index),
            None => (0..group.placed.len() as u32).find_map(fits),
        }
    }

    /// Why a shape can never run in a group.
    pub(super) fn infeasible(
        &self,
        id: PlacementGroupId,
        index: Option<u32>,
        shape: &Shape,
        what: String,
    ) -> Option<Error> {
        let Some(group) = self.groups.get(&id) else {
            let (group, why) = match self.gone.get(&id) {
                Some(Error::PlacementGroupGone { group, why, .. }) => (group.clone(), why.clone()),
                Some(cause) => (id.to_string(), cause.to_string()),
                None => (id.to_string(), "is not known to this head".into()),
            };
            return Some(Error::PlacementGroupGone { what, group, why });
        };
        let asked = shape.resources.to_string();
        let bundles = &group.spec.bundles;
        let could = |bundle: &BundleSpec| {
            bundle.resources.covers(&shape.resources)
                && bundle.gpu_memory >= shape.gpu_memory.min(bundle.gpu_memory.max(1))
        };
        let nearest = match index {
            Some(index) => match bundles.get(index as usize) {
                None => format!("{} has only {} bundles, numbered from 0", group.spec.title(), bundles.len()),
                Some(bundle) if !could(bundle) => {
                    format!("bundle {index} of {} has {}", group.spec.title(), bundle.resources)
                }
                Some(_) => return None,
            },
            None if bundles.iter().any(could) => return None,
            None => format!("no bundle of {} has so much", group.spec.title()),
        };
        Some(Error::Infeasible { what, asked, nearest })
    }

    pub(super) fn take(
        &mut self,
        id: PlacementGroupId,
        index: u32,
        resources: &ResourceSet,
        known: &[DeviceInfo],
    ) -> Option<Devices> {
        self.pool(id, index)?.take(resources, known, &[])
    }

    pub(super) fn take_exactly(
        &mut self,
        id: PlacementGroupId,
        index: u32,
        resources: &ResourceSet,
        devices: &[(u32, Amount)],
    ) {
        if let Some(pool) = self.pool(id, index) {
            pool.take_exactly(resources, devices);
        }
    }

    pub(super) fn give_back(
        &mut self,
        id: PlacementGroupId,
        index: u32,
        resources: &ResourceSet,
        devices: &[(u32, Amount)],
    ) {
        if let Some(pool) = self.pool(id, index) {
            pool.give_back(resources, devices);
        }
    }

    fn pool(&mut self, id: PlacementGroupId, index: u32) -> Option<&mut Pool> {
        Some(&mut self.groups.get_mut(&id)?.placed.get_mut(index as usize)?.as_mut()?.pool)
    }

    /// Whether the node in this place has room for one of the bundles that have none.
    pub(super) fn could_use(&self, id: PlacementGroupId, nodes: &Nodes, slot: Slot) -> bool {
        let (Some(group), Some(node)) = (self.groups.get(&id), nodes.at(slot)) else { return false };
        let missing = group.placed.iter().zip(&group.requirements).filter(|(placed, _)| placed.is_none());
        let mut requirements = missing.flat_map(|(_, requirements)| requirements);
        let fits = |id: &RequirementId| nodes.index.requirement(*id).is_some_and(|asked| node.cost_of(asked).is_some());
        requirements.any(fits)
    }

    pub(super) fn unwatch(&mut self, process: ProcessId) {
        // Few processes watch groups, and each of them few.
        for group in self.groups.values_mut() {
            group.watchers.remove(&process);
        }
    }
}

/// What each bundle requires of a node, and what all of them together would of one.
fn requirements_of_group(spec: &PlacementGroupSpec, nodes: &mut Nodes) -> (Vec<Vec<RequirementId>>, RequirementId) {
    let spread = matches!(spec.strategy, PlacementStrategy::Spread | PlacementStrategy::StrictSpread);
    let order = if spread { Order::Spread } else { Order::BestFit };
    let mut add = |asked: Requirement| nodes.index.add(Requirement { order, ..asked });
    let of_bundles =
        spec.bundles.iter().map(|bundle| requirements_of(&shape_of(bundle)).into_iter().map(&mut add).collect());
    let of_bundles = of_bundles.collect();
    // Where all bundles want the same label, so does their sum.
    let labels = spec.bundles.first().map_or(&[][..], |bundle| &bundle.labels);
    let selector = match labels {
        [only] if spec.bundles.iter().all(|bundle| bundle.labels == labels) => Some(only.clone()),
        _ => None,
    };
    let resources = sum_of(spec);
    let sum = add(Requirement { resources, gpu_memory: 0, selector, order: Order::BestFit, is_sum: true });
    (of_bundles, sum)
}

fn sum_of(spec: &PlacementGroupSpec) -> ResourceSet {
    let mut sum = ResourceSet::new();
    for bundle in &spec.bundles {
        sum.add(&bundle.resources);
    }
    sum
}

impl Group {
    fn new(spec: PlacementGroupSpec, requirements: Vec<Vec<RequirementId>>, sum: RequirementId) -> Group {
        let count = spec.bundles.len();
        let placed = (0..count).map(|_| None).collect();
        Group {
            requirements,
            sum,
            placed,
            missing: count,
            was_possible: false,
            watchers: BTreeSet::new(),
            asked: 1,
            spec,
        }
    }

    /// The same group, with its places, among other nodes.
    pub(super) fn among(&self, nodes: &mut Nodes) -> Group {
        let (requirements, sum) = requirements_of_group(&self.spec, nodes);
        let mut group = Group::new(self.spec.clone(), requirements, sum);
        for (place, placed) in group.placed.iter_mut().zip(&self.placed) {
            *place = placed.as_ref().map(|placed| Placed {
                taken: placed.taken.clone(),
                pool: Pool::default(),
                at: placed.at,
            });
        }
        group.missing = self.missing;
        group
    }

    /// The bundles without a place.
    pub(super) fn missing(&self) -> impl Iterator<Item = usize> {
        self.placed.iter().enumerate().filter(|(_, placed)| placed.is_none()).map(|(index, _)| index)
    }

    pub(super) fn is_placed(&self) -> bool {
        self.missing == 0
    }

    fn shown(&self, known: &Nodes, now: Millis) -> PlacementGroupState {
        if !self.is_placed() {
            return PlacementGroupState::Pending;
        }
        let nodes: Vec<NodeId> = self.placed.iter().flatten().map(|placed| placed.taken.node).collect();
        let distinct: BTreeSet<NodeId> = nodes.iter().copied().collect();
        let draining = distinct.into_iter().filter_map(|node| {
            let Drain { as_asked: Drained { why, .. }, deadline, .. } = known.get(node)?.draining.clone()?;
            Some(Draining { node, why, left_ms: deadline.saturating_sub(now) })
        });
        PlacementGroupState::Placed { draining: draining.collect(), nodes }
    }

    /// How close the group's devices are to each other on each of its nodes.
    pub(super) fn spans(&self, nodes: &Nodes) -> BTreeMap<NodeId, (Vec<u32>, Span)> {
        let mut devices: BTreeMap<NodeId, Vec<u32>> = BTreeMap::new();
        for placed in self.placed.iter().flatten() {
            let here = devices.entry(placed.taken.node).or_default();
            here.extend(placed.taken.devices.iter().map(|(number, _)| *number));
        }
        let with_devices = devices.into_iter().filter(|(_, devices)| !devices.is_empty());
        with_devices
            .map(|(id, mut devices)| {
                devices.sort_unstable();
                devices.dedup();
                let known = nodes.get(id).map(|node| node.info.devices.clone()).unwrap_or_default();
                let span = Span::of(&devices, &known);
                (id, (devices, span))
            })
            .collect()
    }
}

impl State {
    /// Whether a placement group is there and has its places.
    pub fn placed(&self, group: PlacementGroupId) -> bool {
        self.groups.get(group).is_some_and(Group::is_placed)
    }

    /// The placement group of this name.
    ///
    /// # Errors
    /// [`Error::PlacementGroupNotFound`].
    pub fn find_group(&self, name: &ScopedName) -> Result<PlacementGroupSpec, Error> {
        self.groups.find_by_name(name)
    }
}
