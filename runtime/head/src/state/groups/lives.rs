//! How placement groups are made, placed, placed again and removed.

use std::collections::BTreeSet;

use wingbeat_core::error::Error;
use wingbeat_core::spec::{PlacementGroupSpec, PlacementGroupState, PlacementStrategy, Shape};
use wingbeat_core::{JobId, NodeId, PlacementGroupId, ProcessId, ResourceSet};
use wingbeat_net::messages::HeadEvent;

use super::*;
use crate::state::facts::{BundlePlace, Fact};
use crate::state::nodes::{Node, Taken};
use crate::state::placing::Attempt;
use crate::state::pool::Pool;
use crate::state::queue::{Class, Hold, Waiter};
use crate::state::{State, gangs};

impl State {
    /// Makes a placement group.
    pub(in crate::state) fn new_group(&mut self, spec: PlacementGroupSpec) -> Result<PlacementGroupSpec, Error> {
        if let Some(known) = self.groups.groups.get_mut(&spec.id) {
            known.asked += 1;
            return Ok(known.spec.clone());
        }
        if let Some(cause) = self.groups.gone.get(&spec.id) {
            return Err(cause.clone());
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
        self.wait_for_places(spec.id);
        self.refuse_group_if_infeasible(spec.id);
        if let Some(cause) = self.groups.gone.get(&spec.id) {
            return Err(cause.clone());
        }
        Ok(spec)
    }

    pub(in crate::state) fn insert_group(&mut self, spec: PlacementGroupSpec) {
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

    pub(in crate::state) fn try_group(&mut self, id: PlacementGroupId) -> Attempt {
        let waiter = Waiter::Group(id);
        let Some(group) = self.groups.groups.get(&id) else {
            self.queue.remove(waiter);
            return Attempt::Done;
        };
        let mut asked = ResourceSet::new();
        for index in group.missing() {
            asked.add(&group.spec.bundles[index].resources);
        }
        let namespace = self.namespace_of(group.spec.job);
        if let Some(namespace) = &namespace
            && !self.quotas.allows(namespace, &asked)
        {
            return Attempt::HeldBack(Hold::Quota(namespace.clone()));
        }
        let standing = self.queue.standing(waiter);
        let reservations = &self.reservations;
        let free_for = |node: &crate::state::nodes::Node, asked: &ResourceSet| {
            !reservations.is_against(node, waiter, standing, asked)
        };
        let Some(places) = gangs::place(group, &mut self.nodes, &mut self.searches, free_for) else {
            if std::mem::take(&mut self.searches.is_cut_short) {
                self.queue.try_again();
            }
            return Attempt::NoRoom;
        };
        // Which part of a GPU some memory is depends on the node.
        if let Some(namespace) = namespace {
            let mut taken = ResourceSet::new();
            for (_, place) in &places {
                taken.add(&place.resources);
            }
            if !self.quotas.allows(&namespace, &taken) {
                for (_, place) in places {
                    self.nodes.change(place.node, |node| node.pool.give_back(&place.resources, &place.devices));
                }
                return Attempt::HeldBack(Hold::Quota(namespace));
            }
        }
        self.group_placed(id, places);
        Attempt::Done
    }

    fn group_placed(&mut self, id: PlacementGroupId, places: Vec<(usize, Taken)>) {
        let waiter = Waiter::Group(id);
        self.end_reservation(waiter);
        self.queue.remove(waiter);
        let Some(job) = self.groups.groups.get(&id).map(|group| group.spec.job) else { return };
        let now = self.now;
        for (index, taken) in places {
            self.charge(job, &taken.resources);
            self.nodes.change(taken.node, |node| node.bundles.insert((id, index as u32)));
            let Some(group) = self.groups.groups.get_mut(&id) else { return };
            let pool = Pool::new(&taken.resources, &taken.devices);
            group.placed[index] = Some(Placed { taken, pool, at: now });
            group.missing -= 1;
            group.was_possible = true;
        }
        self.record_group(id);
        self.freed_in(id);
        self.announce_group(id);
    }

    pub(in crate::state) fn record_group(&mut self, id: PlacementGroupId) {
        if self.keeps_facts
            && let Some(fact) = self.groups.groups.get(&id).map(|group| self.fact_of(group))
        {
            self.record(fact);
        }
    }

    /// What must be remembered of a group. A bundle whose node may still come back keeps its place.
    pub(in crate::state) fn fact_of(&self, group: &Group) -> Fact {
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
    pub(in crate::state) fn bundles_are_back(
        &mut self,
        node: NodeId,
        places: Vec<(PlacementGroupId, u32, BundlePlace)>,
    ) {
        let now = self.now;
        for (id, index, place) in places {
            let Some(group) = self.groups.groups.get_mut(&id) else { continue };
            let Some(free @ None) = group.placed.get_mut(index as usize) else { continue };
            // What the group had may be somebody else's by now, where it was not known of it when the node came back.
            let has_room = |node: &Node| node.pool.has_exactly(&place.resources, &place.devices);
            if !self.nodes.get(node).is_some_and(has_room) {
                continue;
            }
            let taken = Taken { node, bundle: None, resources: place.resources, devices: place.devices };
            let pool = Pool::new(&taken.resources, &taken.devices);
            *free = Some(Placed { taken: taken.clone(), pool, at: now });
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
    pub(in crate::state) fn bundles_lost(&mut self, bundles: BTreeSet<(PlacementGroupId, u32)>) {
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
            // All that it lacks is placed at once, when it is known which of its nodes are back.
            if !self.has_absent_bundles(id) {
                self.wait_for_places(id);
            }
            self.announce_group(id);
            self.refuse_group_if_infeasible(id);
        }
    }

    /// A drained node's bundles are reserved anew elsewhere. What runs in them has been told to end.
    pub(in crate::state) fn move_bundles(&mut self, node: NodeId, bundles: BTreeSet<(PlacementGroupId, u32)>) {
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
                if !lease.is_returned() {
                    let (job, held) = (lease.job, lease.still_taken().resources);
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

    pub(in crate::state) fn wait_for_places(&mut self, id: PlacementGroupId) {
        let Some(group) = self.groups.groups.get(&id) else { return };
        let job = group.spec.job;
        let turn = self.next_turn();
        let standing = self.standing(Some(job), 0, turn);
        self.queue.put(Waiter::Group(id), standing, Class::Group(id), self.now);
    }

    /// Removes a group: what runs in it is ended, and what it reserved is given back. Nothing happens when it is gone
    /// already.
    pub(in crate::state) fn remove_group(&mut self, id: PlacementGroupId, cause: Error, why: &str) {
        let Some((spec, mut told)) = self.free_group(id, why) else { return };
        if !spec.detached {
            // Whoever has removed it: its maker stays for it, and may not watch it.
            told.insert(spec.owner.process);
        }
        self.tell_of_end(id, told, &cause);
        self.groups.gone.insert(id, cause);
        self.groups.gone_order.push_back(id);
        if self.groups.gone_order.len() > TOMBSTONES
            && let Some(oldest) = self.groups.gone_order.pop_front()
        {
            self.groups.gone.remove(&oldest);
        }
    }

    /// That somebody asked for a group could not be written, and is answered with an error. The group is removed unless somebody has asked for
    /// it again meanwhile, as a process does whose connection broke before the answer. Its maker is not told, and nothing is kept of it: it may
    /// ask once more.
    pub(in crate::state) fn group_not_written(&mut self, id: PlacementGroupId) {
        let Some(group) = self.groups.groups.get_mut(&id) else { return };
        group.asked = group.asked.saturating_sub(1);
        if group.asked > 0 {
            return;
        }
        let (maker, title) = (group.spec.owner.process, group.spec.title());
        let why = "could not be written to the head's journal";
        let Some((_, mut told)) = self.free_group(id, why) else { return };
        told.remove(&maker);
        let gone = Error::PlacementGroupGone { what: "what needs it".into(), group: title, why: why.into() };
        self.tell_of_end(id, told, &gone);
    }

    fn tell_of_end(&mut self, id: PlacementGroupId, told: BTreeSet<ProcessId>, cause: &Error) {
        for watcher in told {
            let state = PlacementGroupState::Gone { cause: Box::new(cause.clone()) };
            self.tell(watcher, HeadEvent::PlacementGroup { group: id, state });
        }
    }

    /// Ends what runs in a group, and gives back what it reserved. Answers with what it was, and who watched it.
    fn free_group(&mut self, id: PlacementGroupId, why: &str) -> Option<(PlacementGroupSpec, BTreeSet<ProcessId>)> {
        let job = self.groups.groups.get(&id)?.spec.job;
        self.evict(id, why);
        let group = self.groups.groups.remove(&id)?;
        self.queue.remove(Waiter::Group(id));
        self.end_reservation(Waiter::Group(id));
        for (index, placed) in group.placed.into_iter().enumerate() {
            let Some(Placed { taken, pool, .. }) = placed else { continue };
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
        self.record(Fact::GroupGone(id));
        self.job_holds(job, -1);
        Some((group.spec, group.watchers))
    }

    /// The user has no more use for a group.
    pub(in crate::state) fn group_removed(&mut self, id: PlacementGroupId) {
        let title = self.groups.get(id).map_or_else(|| id.to_string(), |group| group.spec.title());
        let gone = Error::PlacementGroupGone { what: "what needs it".into(), group: title, why: "was removed".into() };
        self.remove_group(id, gone, "was removed");
    }

    /// The creator of these groups is gone.
    pub(in crate::state) fn groups_orphaned_by(&mut self, process: ProcessId) {
        for id in self.groups.by_owner.remove(&process).unwrap_or_default() {
            let Some(title) = self.groups.get(id).map(|group| group.spec.title()) else { continue };
            let why = "was removed with its creator";
            let gone = Error::PlacementGroupGone { what: "what needs it".into(), group: title, why: why.into() };
            self.remove_group(id, gone, why);
        }
    }

    /// A job is over: the groups of its processes that do not outlive it are removed.
    pub(in crate::state) fn groups_of_job_end(&mut self, job: JobId) {
        let mine: Vec<PlacementGroupId> = self.groups.by_job.get(&job).into_iter().flatten().copied().collect();
        for id in mine {
            let Some(group) = self.groups.get(id).filter(|group| !group.spec.detached) else { continue };
            let why = "was removed with its job";
            let gone =
                Error::PlacementGroupGone { what: "what needs it".into(), group: group.spec.title(), why: why.into() };
            self.remove_group(id, gone, why);
        }
    }

    pub(in crate::state) fn watch_group(&mut self, process: ProcessId, id: PlacementGroupId) {
        let state = match self.groups.groups.get_mut(&id) {
            Some(group) => {
                group.watchers.insert(process);
                group.shown(&self.nodes, self.now)
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

    /// Those who watch the groups with bundles on a node are told how that is now.
    pub(in crate::state) fn announce_groups_on(&mut self, node: NodeId) {
        let bundles = self.nodes.get(node).map(|node| node.bundles.clone()).unwrap_or_default();
        let groups: BTreeSet<PlacementGroupId> = bundles.into_iter().map(|(group, _)| group).collect();
        for group in groups {
            self.announce_group(group);
        }
    }

    fn announce_group(&mut self, id: PlacementGroupId) {
        let Some(group) = self.groups.groups.get(&id) else { return };
        let (state, watchers) = (group.shown(&self.nodes, self.now), group.watchers.clone());
        for watcher in watchers {
            self.tell(watcher, HeadEvent::PlacementGroup { group: id, state: state.clone() });
        }
    }

    pub(in crate::state) fn refuse_group_if_infeasible(&mut self, id: PlacementGroupId) {
        let waiter = Waiter::Group(id);
        if !self.queue.contains(waiter) {
            return;
        }
        if let Some(error) = self.group_infeasible(id).or_else(|| self.quota_error(waiter)) {
            self.remove_group(id, error, "can never be placed");
        }
    }

    /// Why a group can never be placed on the nodes that there are. What once was possible waits for other nodes.
    pub(in crate::state) fn group_infeasible(&mut self, id: PlacementGroupId) -> Option<Error> {
        if self.nodes.offer_nothing() || self.recovering.is_some() {
            return None;
        }
        self.groups.groups.get(&id).filter(|group| !group.spec.patient && !group.was_possible)?;
        let error = self.group_impossible(id);
        if error.is_none()
            && let Some(group) = self.groups.groups.get_mut(&id)
        {
            group.was_possible = true;
        }
        error
    }

    fn group_impossible(&mut self, id: PlacementGroupId) -> Option<Error> {
        let nearest = self.lacks_for_group(id)?;
        let group = self.groups.groups.get(&id)?;
        Some(Error::Infeasible { what: group.spec.title(), asked: gangs::shown(&group.spec), nearest })
    }

    /// What there is too little of for a group ever to be placed, in words.
    fn lacks_for_group(&mut self, id: PlacementGroupId) -> Option<String> {
        let group = self.groups.groups.get(&id)?;
        let since = self.jobs.get(&group.spec.job).map_or(0, |job| job.began);
        for (index, requirements) in group.requirements.iter().enumerate() {
            let possible: usize = requirements.iter().map(|id| self.nodes.possible(*id)).sum();
            if possible == 0 {
                let shape = shape_of(&group.spec.bundles[index]);
                if self.nodes.former(&shape, since).is_some() {
                    return None;
                }
                let nearest = self.nodes.infeasible(&shape)?;
                return Some(format!("for bundle {index}, {nearest}"));
            }
        }
        let (nodes, count) = (self.nodes.len(), group.spec.bundles.len());
        match group.spec.strategy {
            PlacementStrategy::StrictSpread if count > nodes => {
                Some(format!("there are {nodes} nodes for {count} bundles that each need one of their own"))
            }
            PlacementStrategy::StrictPack if self.nodes.possible(group.sum) == 0 => {
                let sum = Shape::of(sum_of(&group.spec));
                Some(format!("all of it must be on one node, and {}", self.nodes.infeasible(&sum)?))
            }
            _ => {
                // More than the whole cluster has will not fit however it is spread.
                let (sum, all) = (sum_of(&group.spec), self.nodes.total());
                match sum.iter().find(|(name, amount)| all.get(name) < *amount) {
                    Some((name, amount)) => {
                        Some(format!("all nodes together have {} {name} of the {amount}", all.get(name)))
                    }
                    None => gangs::never_fits(group, &self.nodes).then(|| {
                        "the nodes have as much in sum, but not in such pieces: a bundle lies on one node, and a part of a \
                         GPU on one GPU"
                            .into()
                    }),
                }
            }
        }
    }
}
