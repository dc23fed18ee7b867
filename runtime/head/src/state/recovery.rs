//! How a head that was started again begins with what the last one wrote down.
//!
//! Facts say which jobs, groups, quotas and named actors there are. What runs where, the nodes say when they come
//! back: they are the authority for it. Until they had time to do so, nothing that may still run is started again.

use std::collections::{BTreeMap, BTreeSet};

use wingbeat_core::error::Error;
use wingbeat_core::spec::{ActorSpec, ScopedName};
use wingbeat_core::{ActorId, ClusterId, Incarnation, JobId, LeaseId, NodeId, PlacementGroupId, ProcessId};
use wingbeat_net::messages::{LeaseHolder, LeaseStart, RunningLease};

use super::facts::{BundlePlace, Fact};
use super::leases::{Holder, Lease};
use super::nodes::Taken;
use super::queue::Hold;
use super::{Millis, State};

/// How long nodes and drivers have to come back: their connections break at once, and they try every second.
const GRACE: Millis = 10_000;

/// What was there before, until [`GRACE`] is over.
pub(super) struct Recovering {
    until: Millis,
    /// Actors that nobody has reported yet.
    actors: BTreeMap<ActorId, (ActorSpec, Incarnation)>,
    /// Who wants to know what becomes of them.
    watchers: BTreeMap<ActorId, BTreeSet<ProcessId>>,
    /// Bundles by the node on which they were.
    places: BTreeMap<NodeId, Vec<(PlacementGroupId, u32, BundlePlace)>>,
    /// Leases that owners say they have. Others are ended: the news of a grant or of a return was lost.
    claimed: BTreeMap<ProcessId, BTreeSet<LeaseId>>,
}

impl Recovering {
    pub(super) fn place_of(&self, group: PlacementGroupId, index: u32) -> Option<&BundlePlace> {
        let mut places = self.places.values().flatten();
        places.find(|(id, at, _)| (*id, *at) == (group, index)).map(|(_, _, place)| place)
    }

    /// What must be remembered of those that may still come back.
    pub(super) fn actors(&self) -> impl Iterator<Item = Fact> {
        self.actors.values().map(|(spec, incarnation)| Fact::Actor(Box::new(spec.clone()), *incarnation))
    }

    /// The jobs of detached actors that may still come back.
    pub(super) fn detached(&self) -> impl Iterator<Item = JobId> {
        self.actors.values().filter(|(spec, _)| spec.detached).map(|(spec, _)| spec.job)
    }

    /// Notes who wants to know about an actor, if it may still come back.
    pub(super) fn watch(&mut self, process: ProcessId, actor: ActorId) -> bool {
        let is_there = self.actors.contains_key(&actor);
        if is_there {
            self.watchers.entry(actor).or_default().insert(process);
        }
        is_there
    }

    pub(super) fn unwatch(&mut self, process: ProcessId) {
        for watchers in self.watchers.values_mut() {
            watchers.remove(&process);
        }
    }

    pub(super) fn actor_named(&self, name: &ScopedName) -> Option<&ActorSpec> {
        let mut specs = self.actors.values().map(|(spec, _)| spec);
        specs.find(|spec| spec.name.as_ref() == Some(name))
    }
}

impl State {
    /// A cluster with what an earlier head wrote down. Drivers and nodes have some seconds from now on to come back.
    pub fn recover(cluster: ClusterId, first_lease: u64, facts: Vec<Fact>) -> State {
        let mut state = State::new(cluster, first_lease);
        let mut actors = BTreeMap::new();
        let mut places: BTreeMap<NodeId, Vec<(PlacementGroupId, u32, BundlePlace)>> = BTreeMap::new();
        let mut latest = BTreeMap::new();
        for fact in facts {
            latest.insert(fact.key(), fact);
        }
        for fact in latest.into_values() {
            match fact {
                Fact::Job(spec) => state.insert_job(*spec),
                Fact::Quota(namespace, limit) => state.set_quota(&namespace, Some(limit)),
                // The last head ended between writing that it was to be made and making it, and its job is over.
                Fact::Group(spec, _) if !state.jobs.contains_key(&spec.job) => {
                    state.facts.push(Fact::GroupGone(spec.id));
                }
                Fact::Group(spec, bundles) => {
                    let id = spec.id;
                    state.insert_group(*spec);
                    if bundles.iter().any(Option::is_some) {
                        state.groups.note_possible(id);
                    }
                    for (index, place) in bundles.into_iter().enumerate() {
                        if let Some(place) = place {
                            places.entry(place.node).or_default().push((id, index as u32, place));
                        }
                    }
                }
                Fact::Actor(spec, incarnation) => {
                    actors.insert(spec.id, (*spec, incarnation));
                }
                Fact::JobGone(_) | Fact::ActorGone(_) | Fact::GroupGone(_) | Fact::QuotaGone(_) => {}
            }
        }
        state.quotas.is_use_unknown = true;
        state.recovering =
            Some(Recovering { until: GRACE, actors, watchers: BTreeMap::new(), places, claimed: BTreeMap::new() });
        state
    }

    pub(super) fn recovery_ends(&self) -> Option<Millis> {
        self.recovering.as_ref().map(|recovering| recovering.until)
    }

    /// Takes in what runs on a node that knew a head before.
    pub(super) fn adopt(&mut self, node: NodeId, running: Vec<RunningLease>) {
        let places = self.recovering.as_mut().and_then(|recovering| recovering.places.remove(&node));
        self.bundles_are_back(node, places.unwrap_or_default());
        for lease in running {
            self.adopt_lease(node, lease);
        }
    }

    /// Whatever runs, holds what it holds until the node says that it is gone. Whether it may go on, is another question.
    fn adopt_lease(&mut self, node: NodeId, lease: RunningLease) {
        let RunningLease { start, worker, started, is_ending } = lease;
        let LeaseStart { lease: id, job, resources, gpus, bundle, holder, .. } = start;
        if self.leases.leases.contains_key(&id) {
            return;
        }
        let is_there = |(group, index): &(PlacementGroupId, u32)| {
            let placed = self.groups.get(*group).and_then(|group| group.placed.get(*index as usize)?.as_ref());
            placed.is_some_and(|placed| placed.taken.node == node)
        };
        let is_lost = bundle.is_some_and(|bundle| !is_there(&bundle));
        let bundle = bundle.filter(is_there);
        let taken = Taken { node, bundle, resources, devices: gpus };
        match bundle {
            None => {
                self.nodes.change(node, |node| node.pool.take_exactly(&taken.resources, &taken.devices));
                self.charge(job, &taken.resources);
            }
            Some((group, index)) => self.groups.take_exactly(group, index, &taken.resources, &taken.devices),
        }
        let may_go_on = self.jobs.contains_key(&job) && !is_ending && !is_lost;
        let known = match &holder {
            _ if !may_go_on => Holder::Nobody,
            LeaseHolder::Tasks(owner, shape) => {
                Holder::Tasks((*owner, self.adopt_demand(*owner, (**shape).clone(), id)))
            }
            LeaseHolder::Actor(spec, _) => Holder::Actor(spec.id),
        };
        let entry = Lease {
            taken,
            holder: known,
            job,
            worker: worker.as_ref().map(|(address, pid)| (address.process, *pid)),
            granted_at: self.now,
            recalled: None,
            waiting: 0,
            ending: is_ending,
            returned: false,
        };
        self.leases.leases.insert(id, entry);
        self.job_holds(job, 1);
        self.nodes.change(node, |node| node.leases.insert(id));
        self.tell_of_job(node, job);
        if let Some((address, _)) = &worker {
            self.worker_known(address.process, job, node);
        }
        if let Holder::Tasks(asker) = known {
            self.requeue(&asker);
        }
        if !may_go_on {
            return self.end_lease(id, Some("the head that was started again has no place for it".into()));
        }
        match holder {
            LeaseHolder::Tasks(owner, _) => {
                if self.is_claimed_by_nobody(owner, id) {
                    self.end_lease(id, Some("its owner does not know it".into()));
                }
            }
            LeaseHolder::Actor(spec, incarnation) => {
                let absent = self.recovering.as_mut();
                let watchers = absent.and_then(|recovering| {
                    recovering.actors.remove(&spec.id);
                    recovering.watchers.remove(&spec.id)
                });
                if !self.adopt_actor(&spec, incarnation, id, node, worker, started) {
                    self.end_lease(id, Some("another life of its actor is known".into()));
                }
                for watcher in watchers.unwrap_or_default() {
                    self.watch(watcher, spec.id);
                }
            }
        }
    }

    /// An actor that may still come back is to end. If it comes, its life is over.
    pub(super) fn end_absent_actor(&mut self, id: ActorId, cause: Error) {
        let Some(recovering) = &mut self.recovering else { return };
        let Some((spec, incarnation)) = recovering.actors.remove(&id) else { return };
        let watchers = recovering.watchers.remove(&id).unwrap_or_default();
        self.insert_actor(spec, incarnation, None);
        self.bury_actor(id, cause);
        for watcher in watchers {
            self.watch(watcher, id);
        }
    }

    /// An owner says which leases it has.
    pub(super) fn holds(&mut self, process: ProcessId, leases: BTreeSet<LeaseId>) {
        let Some(recovering) = &mut self.recovering else { return };
        let mut extra = Vec::new();
        for asker in self.leases.asked_by(process) {
            if let Some(demand) = self.leases.demands.get(&asker) {
                extra.extend(demand.held.difference(&leases).copied());
            }
        }
        recovering.claimed.insert(process, leases);
        for lease in extra {
            self.end_lease(lease, Some("its owner does not know it".into()));
        }
    }

    fn is_claimed_by_nobody(&self, owner: ProcessId, lease: LeaseId) -> bool {
        let claimed = self.recovering.as_ref().and_then(|recovering| recovering.claimed.get(&owner));
        claimed.is_some_and(|claimed| !claimed.contains(&lease))
    }

    /// Ends the time in which those that were there before may come back.
    pub(super) fn end_recovery_when_due(&mut self) {
        if self.recovering.as_ref().is_none_or(|recovering| self.now < recovering.until) {
            return;
        }
        let Some(recovering) = self.recovering.take() else { return };
        self.programs_version += 1;
        for (id, (spec, incarnation)) in recovering.actors {
            // Its last life ended with its node.
            let next = Incarnation(incarnation.0.saturating_add(1));
            let may_live = spec.max_restarts == u32::MAX || next.0 <= spec.max_restarts;
            let cause = Error::ActorEnded { by: "the end of its node while the head was away".into() };
            if !self.jobs.contains_key(&spec.job) {
                self.record(Fact::ActorGone(id));
            } else if may_live {
                self.insert_actor(spec, next, Some(cause));
            } else {
                self.insert_actor(spec, incarnation, Some(cause.clone()));
                self.bury_actor(id, cause);
            }
        }
        for (id, watchers) in recovering.watchers {
            for watcher in watchers {
                self.watch(watcher, id);
            }
        }
        for id in self.groups.ids() {
            if self.groups.get(id).is_some_and(|group| !group.is_placed()) {
                self.wait_for_places(id);
            }
        }
        let gone: Vec<ProcessId> =
            self.drivers.keys().copied().filter(|driver| !self.connected.contains(driver)).collect();
        for driver in gone {
            let job = self.drivers.get(&driver).copied();
            self.process_lost(driver, job);
        }
        let owners: Vec<ProcessId> = self.leases.demands.keys().map(|(owner, _)| *owner).collect();
        for owner in owners {
            if !self.connected.contains(&owner) {
                self.process_lost(owner, None);
            }
        }
        self.quotas.is_use_unknown = false;
        let namespaces: Vec<String> = self.quotas.iter().map(|(namespace, _)| namespace.to_owned()).collect();
        for namespace in namespaces {
            self.queue.unpark(&Hold::Quota(namespace));
        }
        // Until now, a node that could hold it might have come back.
        self.refuse_the_infeasible();
    }
}
