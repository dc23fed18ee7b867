//! Placement groups: what they reserve, and their lives.
//!
//! ```text
//!   Pending ──all bundles fit──▶ Placed ──a node dies──▶ Pending for what was there ──▶ Placed …
//!      └───────────────── removed, its job over, or impossible ──▶ Gone
//! ```

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use wingbeat_core::error::Error;
use wingbeat_core::spec::{BundleSpec, PlacementGroupSpec, PlacementGroupState, PlacementStrategy, ScopedName, Shape};
use wingbeat_core::{Amount, JobId, NodeId, PlacementGroupId, ProcessId, ResourceSet};
use wingbeat_net::messages::{DeviceInfo, HeadEvent};

use super::facts::{BundlePlace, Fact};
use super::index::{Order, Requirement, RequirementId, Slot};
use super::nodes::{Nodes, Taken, requirements_of};
use super::placing::Attempt;
use super::pool::{Devices, Pool, Span};
use super::queue::{Class, Hold, Rank, Waiter};
use super::{State, gangs};

/// Groups that are gone and remembered, so that whoever asks late learns the cause.
const TOMBSTONES: usize = 10_000;
/// More bundles than any cluster has nodes; a mistake in a program must not fill the head's memory.
const BUNDLES: usize = 100_000;

#[derive(Default)]
pub(super) struct Groups {
    groups: BTreeMap<PlacementGroupId, Group>,
    names: BTreeMap<ScopedName, PlacementGroupId>,
    by_owner: BTreeMap<ProcessId, BTreeSet<PlacementGroupId>>,
    by_job: BTreeMap<JobId, BTreeSet<PlacementGroupId>>,
    gone: BTreeMap<PlacementGroupId, Error>,
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
    watchers: BTreeSet<ProcessId>,
}

pub(super) struct Placed {
    pub taken: Taken,
    pub pool: Pool,
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
    pub(super) fn get(&self, id: PlacementGroupId) -> Option<&Group> {
        self.groups.get(&id)
    }

    /// Why a group is gone.
    pub(super) fn cause_of_end(&self, id: PlacementGroupId) -> Option<&Error> {
        self.gone.get(&id)
    }

    pub(super) fn ids(&self) -> Vec<PlacementGroupId> {
        self.groups.keys().copied().collect()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Group> {
        self.groups.values()
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
            let node = nodes.get(placed.taken.node).filter(|node| node.draining.is_none())?;
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
            let why = match self.gone.get(&id) {
                Some(cause) => cause.to_string(),
                None => "is not known to this head".into(),
            };
            return Some(Error::PlacementGroupGone { what, group: id.to_string(), why });
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
    let order = if spread { Order::Spread } else { Order::Pack };
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
    let sum = add(Requirement { resources, gpu_memory: 0, selector, order: Order::Pack, is_sum: true });
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
        Group { requirements, sum, placed, missing: count, watchers: BTreeSet::new(), spec }
    }

    /// The same group, with its places, among other nodes.
    pub(super) fn among(&self, nodes: &mut Nodes) -> Group {
        let (requirements, sum) = requirements_of_group(&self.spec, nodes);
        let mut group = Group::new(self.spec.clone(), requirements, sum);
        for (place, placed) in group.placed.iter_mut().zip(&self.placed) {
            *place = placed.as_ref().map(|placed| Placed { taken: placed.taken.clone(), pool: Pool::default() });
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

    fn shown(&self) -> PlacementGroupState {
        if !self.is_placed() {
            return PlacementGroupState::Pending;
        }
        PlacementGroupState::Placed { nodes: self.placed.iter().flatten().map(|placed| placed.taken.node).collect() }
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
    /// Makes a placement group.
    pub(super) fn new_group(&mut self, spec: PlacementGroupSpec) -> Result<PlacementGroupSpec, Error> {
        if let Some(known) = self.groups.groups.get(&spec.id) {
            return Ok(known.spec.clone());
        }
        check(&spec)?;
        if !self.is_job_running(spec.job) {
            let why = format!("{} is of {}, which is over", spec.title(), spec.job);
            return Err(Error::Refused { who: "the head".into(), why });
        }
        if let Some(name) = &spec.name
            && self.groups.names.contains_key(name)
        {
            return Err(Error::PlacementGroupNameTaken { name: name.name.clone(), namespace: name.namespace.clone() });
        }
        self.insert_group(spec.clone());
        self.record_group(spec.id);
        self.wait_for_places(spec.id);
        self.refuse_group_if_infeasible(spec.id);
        if let Some(cause) = self.groups.gone.get(&spec.id) {
            return Err(cause.clone());
        }
        Ok(spec)
    }

    pub(super) fn insert_group(&mut self, spec: PlacementGroupSpec) {
        let id = spec.id;
        let (requirements, sum) = requirements_of_group(&spec, &mut self.nodes);
        if let Some(name) = &spec.name {
            self.groups.names.insert(name.clone(), id);
        }
        if !spec.detached {
            self.groups.by_owner.entry(spec.owner.process).or_default().insert(id);
        }
        self.groups.by_job.entry(spec.job).or_default().insert(id);
        self.job_holds(spec.job, 1);
        let group = Group::new(spec, requirements, sum);
        self.groups.groups.insert(id, group);
    }

    pub(super) fn try_group(&mut self, id: PlacementGroupId) -> Attempt {
        let waiter = Waiter::Group(id);
        let Some(group) = self.groups.groups.get(&id) else {
            self.queue.remove(waiter);
            return Attempt::Done;
        };
        let mut asked = ResourceSet::new();
        for index in group.missing() {
            asked.add(&group.spec.bundles[index].resources);
        }
        if let Some(namespace) = self.namespace_of(group.spec.job)
            && !self.quotas.allows(&namespace, &asked)
        {
            return Attempt::HeldBack(Hold::Quota(namespace));
        }
        let rank = self.queue.rank(waiter);
        let reservations = &self.reservations;
        let free_for =
            |node: &super::nodes::Node, asked: &ResourceSet| !reservations.is_against(node, waiter, rank, asked);
        let Some(places) = gangs::place(group, &mut self.nodes, free_for) else { return Attempt::NoRoom };
        self.group_placed(id, places);
        Attempt::Done
    }

    fn group_placed(&mut self, id: PlacementGroupId, places: Vec<(usize, Taken)>) {
        let waiter = Waiter::Group(id);
        self.end_reservation(waiter);
        self.queue.remove(waiter);
        let Some(job) = self.groups.groups.get(&id).map(|group| group.spec.job) else { return };
        for (index, taken) in places {
            self.charge(job, &taken.resources);
            self.nodes.change(taken.node, |node| node.bundles.insert((id, index as u32)));
            let Some(group) = self.groups.groups.get_mut(&id) else { return };
            let pool = Pool::new(&taken.resources, &taken.devices);
            group.placed[index] = Some(Placed { taken, pool });
            group.missing -= 1;
        }
        self.record_group(id);
        self.freed_in(id);
        self.announce_group(id);
    }

    fn record_group(&mut self, id: PlacementGroupId) {
        if self.keeps_facts
            && let Some(fact) = self.groups.groups.get(&id).map(|group| self.fact_of(group))
        {
            self.record(fact);
        }
    }

    /// What must be remembered of a group. A bundle whose node may still come back keeps its place.
    pub(super) fn fact_of(&self, group: &Group) -> Fact {
        let places = group.placed.iter().enumerate().map(|(index, placed)| match placed {
            None => self.recovering.as_ref()?.place_of(group.spec.id, index as u32).cloned(),
            Some(Placed { taken, .. }) => {
                let (resources, devices) = (taken.resources.clone(), taken.devices.clone());
                Some(BundlePlace { node: taken.node, resources, devices })
            }
        });
        Fact::Group(Box::new(group.spec.clone()), places.collect())
    }

    /// A node is back on which, as was recorded, these groups have bundles.
    pub(super) fn bundles_are_back(&mut self, node: NodeId, places: Vec<(PlacementGroupId, u32, BundlePlace)>) {
        for (id, index, place) in places {
            let Some(group) = self.groups.groups.get_mut(&id) else { continue };
            let Some(free @ None) = group.placed.get_mut(index as usize) else { continue };
            let taken = Taken { node, bundle: None, resources: place.resources, devices: place.devices };
            let pool = Pool::new(&taken.resources, &taken.devices);
            *free = Some(Placed { taken: taken.clone(), pool });
            group.missing -= 1;
            let (job, is_placed) = (group.spec.job, group.missing == 0);
            self.nodes.change(node, |node| {
                node.pool.take_exactly(&taken.resources, &taken.devices);
                node.bundles.insert((id, index));
            });
            self.charge(job, &taken.resources);
            self.freed_in(id);
            if is_placed {
                self.queue.remove(Waiter::Group(id));
                self.announce_group(id);
            }
        }
    }

    /// A node is gone, and its leases are forgotten already: what was reserved there is reserved anew elsewhere.
    pub(super) fn bundles_lost(&mut self, bundles: BTreeSet<(PlacementGroupId, u32)>) {
        let mut hit = BTreeSet::new();
        for (id, index) in bundles {
            let Some(group) = self.groups.groups.get_mut(&id) else { continue };
            let Some(placed) = group.placed.get_mut(index as usize).and_then(Option::take) else { continue };
            group.missing += 1;
            let job = group.spec.job;
            self.uncharge(job, &placed.taken.resources);
            hit.insert(id);
        }
        for id in hit {
            self.record_group(id);
            self.wait_for_places(id);
            self.announce_group(id);
            self.refuse_group_if_infeasible(id);
        }
    }

    /// A drained node's bundles are reserved anew elsewhere. What runs in them has been told to end.
    pub(super) fn move_bundles(&mut self, node: NodeId, bundles: BTreeSet<(PlacementGroupId, u32)>) {
        for (id, index) in &bundles {
            let inside = Some((*id, *index));
            let leases: Vec<_> =
                self.nodes.get(node).into_iter().flat_map(|node| node.leases.iter().copied()).collect();
            // What is in use comes back to the node with its lease.
            for lease in leases {
                let Some(lease) = self.leases.leases.get_mut(&lease).filter(|lease| lease.taken.bundle == inside)
                else {
                    continue;
                };
                lease.taken.bundle = None;
                if !lease.returned {
                    let (job, held) = (lease.job, lease.taken.resources.clone());
                    self.charge(job, &held);
                }
            }
            let placed = self.groups.groups.get_mut(id).and_then(|group| group.placed.get(*index as usize)?.as_ref());
            let Some(unused) = placed.map(|placed| Taken {
                node,
                bundle: None,
                resources: placed.pool.available.clone(),
                devices: placed.pool.free_devices(),
            }) else {
                continue;
            };
            self.nodes.change(node, |node| node.bundles.remove(&(*id, *index)));
            self.give_back(&unused);
        }
        self.bundles_lost(bundles);
    }

    pub(super) fn wait_for_places(&mut self, id: PlacementGroupId) {
        let Some(group) = self.groups.groups.get(&id) else { return };
        let priority = self.job_priority(group.spec.job);
        let rank = Rank { priority: std::cmp::Reverse(priority), has: 0, turn: self.next_turn() };
        self.queue.put(Waiter::Group(id), rank, Class::Group(id), self.now);
    }

    /// Removes a group: what runs in it is ended, and what it reserved is given back. Nothing happens when it is gone
    /// already.
    pub(super) fn remove_group(&mut self, id: PlacementGroupId, cause: Error, why: &str) {
        let Some(group) = self.groups.groups.get(&id) else { return };
        let title = group.spec.title();
        let job = group.spec.job;
        self.evict(id, &title, why);
        let Some(group) = self.groups.groups.remove(&id) else { return };
        self.queue.remove(Waiter::Group(id));
        self.end_reservation(Waiter::Group(id));
        for (index, placed) in group.placed.into_iter().enumerate() {
            let Some(Placed { taken, pool }) = placed else { continue };
            self.uncharge(job, &taken.resources);
            self.nodes.change(taken.node, |node| node.bundles.remove(&(id, index as u32)));
            // What is in use comes back with the leases, which belong to the node now.
            let unused = Taken {
                node: taken.node,
                bundle: None,
                resources: pool.available.clone(),
                devices: pool.free_devices(),
            };
            self.give_back(&unused);
            self.note_if_drained(taken.node);
        }
        for requirement in group.requirements.into_iter().flatten().chain([group.sum]) {
            self.nodes.index.remove(requirement);
        }
        if let Some(name) = &group.spec.name {
            self.groups.names.remove(name);
        }
        let forget = |index: &mut BTreeSet<PlacementGroupId>| {
            index.remove(&id);
            index.is_empty()
        };
        if self.groups.by_owner.get_mut(&group.spec.owner.process).is_some_and(forget) {
            self.groups.by_owner.remove(&group.spec.owner.process);
        }
        if self.groups.by_job.get_mut(&job).is_some_and(forget) {
            self.groups.by_job.remove(&job);
        }
        let state = PlacementGroupState::Gone { cause: Box::new(cause.clone()) };
        for watcher in group.watchers {
            self.tell(watcher, HeadEvent::PlacementGroup { group: id, state: state.clone() });
        }
        self.groups.gone.insert(id, cause);
        self.groups.gone_order.push_back(id);
        if self.groups.gone_order.len() > TOMBSTONES
            && let Some(oldest) = self.groups.gone_order.pop_front()
        {
            self.groups.gone.remove(&oldest);
        }
        self.record(Fact::GroupGone(id));
        self.job_holds(job, -1);
    }

    /// The user has no more use for a group.
    pub(super) fn group_removed(&mut self, id: PlacementGroupId) {
        let title = self.groups.get(id).map_or_else(|| id.to_string(), |group| group.spec.title());
        let gone = Error::PlacementGroupGone { what: "what needs it".into(), group: title, why: "was removed".into() };
        self.remove_group(id, gone, "was removed");
    }

    /// The creator of these groups is gone.
    pub(super) fn groups_orphaned_by(&mut self, process: ProcessId) {
        for id in self.groups.by_owner.remove(&process).unwrap_or_default() {
            let Some(title) = self.groups.get(id).map(|group| group.spec.title()) else { continue };
            let why = "was removed with its creator";
            let gone = Error::PlacementGroupGone { what: "what needs it".into(), group: title, why: why.into() };
            self.remove_group(id, gone, why);
        }
    }

    /// A job is over: the groups of its processes that do not outlive it are removed.
    pub(super) fn groups_of_job_end(&mut self, job: JobId) {
        let mine: Vec<PlacementGroupId> = self.groups.by_job.get(&job).into_iter().flatten().copied().collect();
        for id in mine {
            let Some(group) = self.groups.get(id).filter(|group| !group.spec.detached) else { continue };
            let why = "was removed with its job";
            let gone =
                Error::PlacementGroupGone { what: "what needs it".into(), group: group.spec.title(), why: why.into() };
            self.remove_group(id, gone, why);
        }
    }

    pub(super) fn watch_group(&mut self, process: ProcessId, id: PlacementGroupId) {
        let state = match self.groups.groups.get_mut(&id) {
            Some(group) => {
                group.watchers.insert(process);
                group.shown()
            }
            None => {
                let unknown = || Error::PlacementGroupGone {
                    what: "what needs it".into(),
                    group: id.to_string(),
                    why: "is not known to this head".into(),
                };
                let cause = self.groups.gone.get(&id).cloned().unwrap_or_else(unknown);
                PlacementGroupState::Gone { cause: Box::new(cause) }
            }
        };
        self.tell(process, HeadEvent::PlacementGroup { group: id, state });
    }

    fn announce_group(&mut self, id: PlacementGroupId) {
        let Some(group) = self.groups.groups.get(&id) else { return };
        let (state, watchers) = (group.shown(), group.watchers.clone());
        for watcher in watchers {
            self.tell(watcher, HeadEvent::PlacementGroup { group: id, state: state.clone() });
        }
    }

    pub(super) fn refuse_group_if_infeasible(&mut self, id: PlacementGroupId) {
        let waiter = Waiter::Group(id);
        if !self.queue.contains(waiter) {
            return;
        }
        if let Some(error) = self.group_infeasible(id).or_else(|| self.quota_error(waiter)) {
            self.remove_group(id, error, "can never be placed");
        }
    }

    /// Why a group can never be placed on the nodes that there are.
    pub(super) fn group_infeasible(&mut self, id: PlacementGroupId) -> Option<Error> {
        if self.nodes.is_empty() {
            return None;
        }
        let group = self.groups.groups.get(&id).filter(|group| !group.spec.patient)?;
        let (what, asked) = (group.spec.title(), gangs::shown(&group.spec));
        for (index, requirements) in group.requirements.iter().enumerate() {
            let possible: usize = requirements.iter().map(|id| self.nodes.possible(*id)).sum();
            if possible == 0 {
                let nearest = self.nodes.infeasible(&shape_of(&group.spec.bundles[index]))?;
                return Some(Error::Infeasible { what, asked, nearest: format!("for bundle {index}, {nearest}") });
            }
        }
        let nodes = self.nodes.len();
        let count = group.spec.bundles.len();
        match group.spec.strategy {
            PlacementStrategy::StrictSpread if count > nodes => {
                let nearest = format!("there are {nodes} nodes for {count} bundles that each need one of their own");
                Some(Error::Infeasible { what, asked, nearest })
            }
            PlacementStrategy::StrictPack if self.nodes.possible(group.sum) == 0 => {
                let sum = Shape::of(sum_of(&group.spec));
                let nearest = self.nodes.infeasible(&sum)?;
                Some(Error::Infeasible {
                    what,
                    asked,
                    nearest: format!("all of it must be on one node, and {nearest}"),
                })
            }
            // More than the whole cluster has will not fit however it is spread.
            _ => {
                let sum = sum_of(&group.spec);
                let mut all = ResourceSet::new();
                for node in self.nodes.iter() {
                    all.add(&node.info.resources);
                }
                let short = sum.iter().find(|(name, amount)| all.get(name) < *amount);
                let (name, amount) = short?;
                let nearest = format!("all nodes together have {} {name} of the {amount}", all.get(name));
                Some(Error::Infeasible { what, asked, nearest })
            }
        }
    }
}
