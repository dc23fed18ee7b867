//! Who wants how many leases, and how a lease ends.
//!
//! An *asker* is a process and a shape.

use std::collections::{BTreeMap, BTreeSet};

use wingbeat_core::error::Error;
use wingbeat_core::resources::CPU;
use wingbeat_core::spec::{Address, Shape, Strategy};
use wingbeat_core::value::StoreNode;
use wingbeat_core::{JobId, LeaseId, NodeId, PlacementGroupId, ProcessId, ResourceSet, TaskId};
use wingbeat_net::messages::{HeadEvent, LeaseHolder, LeaseStart, NodeMessage, WorkerDeath};

use super::lease::{Asker, Holder, Lease};
use super::nodes::Taken;
use super::queue::Waiter;
use super::shapes::ShapeId;
use super::{Millis, State};

/// What an asker wants and holds, until it wants nothing and holds nothing.
pub(super) struct Demand {
    /// How many leases are of use to it, those that it holds included. Its latest word counts.
    pub wanted: u32,
    /// The name of one of its tasks, for people.
    pub name: String,
    /// Its leases, until their node is told to end them, or has said that they failed, or is lost.
    pub held: BTreeSet<LeaseId>,
    /// How many of those were not ready yet, of those that this head has granted.
    starting: u32,
    /// Leases that are of use: not those whose process waits.
    pub active: u32,
    /// Order of service among equals.
    turn: u64,
    /// Starts that have failed since the last that has not.
    failures: u32,
    /// Its owner has not said how many it wants since the head was started again: as many as nodes have said that it has, and
    /// no more. What was granted before its word would be taken for something that it does not know of.
    pub is_guessed: bool,
}

/// All leases, and who wants some.
pub(super) struct Leases {
    /// The id of the next lease.
    next: u64,
    /// Until an asker wants nothing and holds nothing ([`State::requeue`]).
    pub demands: BTreeMap<Asker, Demand>,
    /// Who has a demand for a shape in a placement group: also those who hold what they want, or are set aside.
    in_groups: BTreeSet<(ShapeId, ProcessId)>,
    /// From the order to their node until it has said that they have ended or failed, or is lost.
    pub leases: BTreeMap<LeaseId, Lease>,
    /// Whose demand is to be spread, and who is yet to hear how many of its leases are being started.
    unanswered: BTreeSet<Asker>,
}

impl Leases {
    pub(super) fn new(first: u64) -> Leases {
        Leases {
            next: first,
            demands: BTreeMap::new(),
            in_groups: BTreeSet::new(),
            leases: BTreeMap::new(),
            unanswered: BTreeSet::new(),
        }
    }

    pub(super) fn next_id(&mut self) -> LeaseId {
        let id = LeaseId(self.next);
        self.next = self.next.wrapping_add(1);
        id
    }

    /// What a process asks for.
    pub(super) fn asked_by(&self, process: ProcessId) -> Vec<Asker> {
        let mine = self.demands.range((process, ShapeId::FIRST)..).map(|(asker, _)| *asker);
        mine.take_while(|(owner, _)| *owner == process).collect()
    }
}

impl Demand {
    pub(super) fn is_unmet(&self) -> bool {
        (self.held.len() as u32) < self.wanted
    }
}

impl State {
    /// The node on which a lease is.
    pub fn node_of(&self, lease: LeaseId) -> Option<NodeId> {
        self.leases.leases.get(&lease).map(|lease| lease.taken.node)
    }

    pub(super) fn demand(&mut self, process: ProcessId, shape: Shape, wanted: u32, name: String) {
        if let Err(why) = shape.check() {
            let error = Error::InvalidArgument { what: format!("{name} asks for what cannot be: {why}") };
            return self.tell(process, HeadEvent::Refused { shape, error });
        }
        let known = self.shapes.id_of(&shape).map(|id| (process, id));
        let asker = match known.filter(|asker| self.leases.demands.contains_key(asker)) {
            Some(asker) => asker,
            None if wanted == 0 => return,
            None => {
                let is_in_group = shape.bundle().is_some();
                let asker = (process, self.shapes.add(shape, &mut self.nodes));
                self.new_demand(asker, is_in_group);
                asker
            }
        };
        if let Some(demand) = self.leases.demands.get_mut(&asker) {
            demand.wanted = wanted;
            demand.is_guessed = false;
            demand.name = name;
        }
        self.starts_change(asker);
        let waiter = Waiter::Tasks(asker.0, asker.1);
        let waited = self.queue.contains(waiter);
        self.requeue(&asker);
        self.refuse_if_infeasible(waiter);
        if !waited && self.queue.contains(waiter) {
            self.serve();
            self.help_at_once(waiter);
        }
    }

    /// A lease of tasks that the node has served already.
    pub(super) fn adopt_demand(&mut self, owner: ProcessId, shape: Shape, lease: LeaseId) -> ShapeId {
        let is_in_group = shape.bundle().is_some();
        let known = self.shapes.id_of(&shape).filter(|id| self.leases.demands.contains_key(&(owner, *id)));
        let id = match known {
            Some(id) => id,
            None => {
                let id = self.shapes.add(shape, &mut self.nodes);
                self.new_demand((owner, id), is_in_group);
                let is_guessed = !self.has_claimed(owner);
                self.leases.demands.entry((owner, id)).and_modify(|demand| demand.is_guessed = is_guessed);
                id
            }
        };
        let has_spoken = self.has_claimed(owner);
        if let Some(demand) = self.leases.demands.get_mut(&(owner, id)) {
            demand.held.insert(lease);
            demand.active += 1;
            // Until its owner says what it wants.
            if !has_spoken {
                demand.wanted = demand.wanted.max(demand.held.len() as u32);
            }
        }
        id
    }

    fn new_demand(&mut self, asker: Asker, is_in_group: bool) {
        let turn = self.next_turn();
        let demand = Demand {
            wanted: 0,
            name: String::new(),
            held: BTreeSet::new(),
            starting: 0,
            active: 0,
            turn,
            failures: 0,
            is_guessed: false,
        };
        self.leases.demands.insert(asker, demand);
        if is_in_group {
            self.leases.in_groups.insert((asker.1, asker.0));
        }
    }

    pub(super) fn next_turn(&mut self) -> u64 {
        self.turns += 1;
        self.turns
    }

    /// Brings the queue up to date with a demand, or forgets a demand that is over.
    pub(super) fn requeue(&mut self, asker: &Asker) {
        let waiter = Waiter::Tasks(asker.0, asker.1);
        if let Some(demand) = self.leases.demands.get(asker).filter(|demand| demand.is_unmet()) {
            let standing = self.standing(self.job_of(asker.0), demand.active, demand.turn);
            let class = self.shapes.class_of(asker.1, standing.job);
            return self.queue.put(waiter, standing, class, self.now);
        }
        self.queue.remove(waiter);
        self.end_reservation(waiter);
        let is_over = |demand: &Demand| demand.wanted == 0 && demand.held.is_empty();
        if self.leases.demands.get(asker).is_some_and(is_over) {
            self.leases.demands.remove(asker);
            if !self.leases.in_groups.is_empty() {
                self.leases.in_groups.remove(&(asker.1, asker.0));
            }
            self.shapes.remove(asker.1, &mut self.nodes);
        }
    }

    /// Nothing of this can be had: what waits fails.
    pub(super) fn refuse_demand(&mut self, asker: &Asker, error: Error) {
        let Some(shape) = self.shapes.get(asker.1).cloned() else { return };
        let Some(demand) = self.leases.demands.get_mut(asker) else { return };
        // What it holds, it keeps until it returns it.
        demand.wanted = 0;
        demand.failures = 0;
        self.requeue(asker);
        self.tell(asker.0, HeadEvent::Refused { shape: (*shape).clone(), error });
    }

    /// A lease for `asker` out of what was `taken` for it.
    pub(super) fn grant(&mut self, asker: Asker, taken: Taken) {
        let Some((job, shape)) = self.job_of(asker.0).zip(self.shapes.get(asker.1).cloned()) else { return };
        let turn = self.next_turn();
        let id = self.new_lease(taken, Holder::Tasks(asker), job, LeaseHolder::Tasks(asker.0, shape));
        if let Some(demand) = self.leases.demands.get_mut(&asker) {
            demand.held.insert(id);
            demand.starting += 1;
            demand.active += 1;
            demand.turn = turn;
        }
        self.starts_change(asker);
        self.queue.served(Waiter::Tasks(asker.0, asker.1), self.now);
        self.requeue(&asker);
    }

    pub(super) fn new_lease(&mut self, taken: Taken, holder: Holder, job: JobId, named: LeaseHolder) -> LeaseId {
        if let Some(waiter) = holder.waiter() {
            self.end_reservation(waiter);
        }
        let id = self.leases.next_id();
        let (node, bundle) = (taken.node, taken.bundle);
        let start = LeaseStart {
            lease: id,
            job,
            resources: taken.resources.clone(),
            gpus: taken.devices.clone(),
            bundle,
            captures: bundle.map(|(group, _)| group).filter(|group| self.groups.captures(*group)),
            holder: named,
        };
        if bundle.is_none() {
            self.charge(job, &taken.resources);
        }
        self.leases.leases.insert(id, Lease::new(taken, holder, job, self.now));
        self.job_holds(job, 1);
        self.nodes.change(node, |node| node.leases.insert(id));
        self.tell_of_job(node, job);
        self.order(node, NodeMessage::StartLease(Box::new(start)));
        id
    }

    pub(super) fn lease_ready(&mut self, id: LeaseId, worker: Address, pid: u32) {
        let now = self.now;
        let Some(lease) = self.leases.leases.get_mut(&id) else { return };
        let is_starting = lease.is_starting();
        lease.ready((worker.process, pid), now);
        let (holder, node, job, ending) = (lease.holder, lease.taken.node, lease.job, lease.is_ending());
        let was_before = lease.was_before;
        self.worker_known(worker.process, job, node);
        if let Holder::Tasks(_) = holder {
            self.starts_on(node, job);
        }
        if ending {
            return;
        }
        match holder {
            Holder::Nobody => {}
            Holder::Actor(actor) => self.actor_has_process(actor, id, worker, pid),
            // Its owner does not know of it, and has said so, or is about to.
            Holder::Tasks(_) if was_before => self.end_lease(id, None),
            Holder::Tasks(asker) => {
                if let Some(demand) = self.leases.demands.get_mut(&asker) {
                    demand.failures = 0;
                    demand.starting -= u32::from(is_starting);
                }
                let Some(shape) = self.shapes.get(asker.1).cloned() else { return };
                let Some(at) = self.nodes.get(node) else { return };
                let is_drained = at.draining.is_some();
                let node = StoreNode { node, address: at.info.address.clone() };
                self.tell(asker.0, HeadEvent::Granted { shape, lease: id, worker, node, pid });
                if is_drained {
                    // It was being started when all leases there were recalled.
                    self.recall(id);
                }
                self.recall_over_quota_of(job);
            }
        }
    }

    pub(super) fn lease_failed(&mut self, id: LeaseId, error: Error) {
        let Some(lease) = self.leases.leases.get(&id) else { return };
        let (holder, node, ending) = (lease.holder, lease.taken.node, lease.is_ending());
        self.forget_lease(id);
        match holder {
            Holder::Actor(actor) => self.actor_failed_to_start(actor, id, Some(node), error),
            // Nobody wanted it any more.
            Holder::Tasks(_) if ending => {}
            Holder::Nobody => {}
            Holder::Tasks(asker) => {
                let waiter = Waiter::Tasks(asker.0, asker.1);
                if self.was_under_way(node, waiter) {
                    return;
                }
                let Some(demand) = self.leases.demands.get_mut(&asker) else { return };
                demand.failures += 1;
                let seen = demand.failures;
                let is_served = demand.held.len() as u32 > demand.starting;
                let is_tried_again = self.start_failed(node, waiter, seen, &error);
                // What runs well elsewhere goes on.
                let goes_on = is_tried_again || (is_served && self.another_could_serve(node, waiter));
                if !goes_on {
                    self.refuse_demand(&asker, error);
                }
            }
        }
    }

    /// The owner has no more use for a lease, whose process must end where `kill` says why. It wants one less until it says
    /// otherwise, or it would be granted another before its next word arrives.
    pub(super) fn returned(&mut self, process: ProcessId, id: LeaseId, kill: Option<String>) {
        let Some(Holder::Tasks(asker)) = self.leases.leases.get(&id).map(|lease| lease.holder) else { return };
        if asker.0 != process {
            return;
        }
        if let Some(demand) = self.leases.demands.get_mut(&asker)
            && demand.held.contains(&id)
        {
            demand.wanted = demand.wanted.saturating_sub(1);
        }
        self.end_lease(id, kill);
    }

    /// Tells the node that a lease is over. Its devices are free when the node says so; the rest is free at
    /// once if the process goes on to serve others.
    pub(super) fn end_lease(&mut self, id: LeaseId, kill: Option<String>) {
        let Some(lease) = self.leases.leases.get_mut(&id) else { return };
        if !lease.end() {
            return;
        }
        let (node, holder) = (lease.taken.node, lease.holder);
        if let Holder::Tasks(asker) = holder {
            self.unhold(&asker, id);
        }
        let Some(lease) = self.leases.leases.get(&id) else { return };
        if kill.is_none() && lease.taken.devices.is_empty() {
            self.release(id);
        }
        self.order(node, NodeMessage::EndLease { lease: id, kill });
    }

    /// The owner of a demand that is to be spread hears what it has come to.
    fn starts_change(&mut self, asker: Asker) {
        if self.shapes.get(asker.1).is_some_and(|shape| shape.strategy == Strategy::Spread) {
            self.leases.unanswered.insert(asker);
        }
    }

    /// Once all who fit have their places.
    pub(super) fn tell_of_starts(&mut self) {
        while let Some((process, shape)) = self.leases.unanswered.pop_first() {
            let Some(demand) = self.leases.demands.get(&(process, shape)) else { continue };
            let (wanted, leases) = (demand.wanted, demand.starting);
            let Some(shape) = self.shapes.get(shape).cloned() else { continue };
            self.tell(process, HeadEvent::Starting { shape, wanted, leases });
        }
    }

    fn unhold(&mut self, asker: &Asker, id: LeaseId) {
        let waits = self.leases.leases.get(&id).is_some_and(|lease| !lease.waiting.is_empty());
        let is_starting = self.leases.leases.get(&id).is_some_and(Lease::is_starting);
        if let Some(demand) = self.leases.demands.get_mut(asker)
            && demand.held.remove(&id)
        {
            demand.active -= u32::from(!waits);
            demand.starting -= u32::from(is_starting);
            if demand.is_guessed {
                demand.wanted = demand.held.len() as u32;
            }
            self.requeue(asker);
            if is_starting {
                self.starts_change(*asker);
            }
        }
    }

    /// Gives back what a lease still has taken.
    fn release(&mut self, id: LeaseId) {
        let Some(lease) = self.leases.leases.get_mut(&id) else { return };
        let Some(back) = lease.give_back() else { return };
        let job = lease.job;
        if back.bundle.is_none() {
            self.uncharge(job, &back.resources);
        }
        self.give_back(&back);
    }

    /// The node says that nothing of a lease is left.
    pub(super) fn lease_ended(&mut self, id: LeaseId) {
        let holder = self.leases.leases.get(&id).map(|lease| lease.holder);
        self.forget_lease(id);
        if let Some(Holder::Actor(actor)) = holder {
            self.actor_lease_ended(actor, id);
        }
    }

    /// Gives back what is still taken, and forgets the lease.
    pub(super) fn forget_lease(&mut self, id: LeaseId) {
        let Some(holder) = self.leases.leases.get(&id).map(|lease| lease.holder) else { return };
        if let Holder::Tasks(asker) = holder {
            self.unhold(&asker, id);
        }
        self.release(id);
        let Some(lease) = self.leases.leases.remove(&id) else { return };
        self.nodes.change(lease.taken.node, |node| node.leases.remove(&id));
        if let Some((worker, _)) = lease.server() {
            self.waits.forget_process(worker);
        }
        if let Holder::Actor(actor) = lease.holder {
            self.earlier_life_over(actor, id);
        }
        self.note_if_drained(lease.taken.node);
        self.job_holds(lease.job, -1);
    }

    pub(super) fn worker_died(&mut self, mut death: WorkerDeath) {
        self.worker_jobs.remove(&death.process);
        self.departed.insert(death.process, Some(death.job));
        if self.recovering.is_some() && !self.connected.contains(&death.process) {
            // No connection will tell of its end.
            self.process_lost(death.process, None);
        }
        let Some(id) = death.lease else { return };
        let lease = self.leases.leases.get(&id);
        let is_moved = |node: &super::nodes::Node| node.draining.as_ref().is_some_and(|drain| drain.is_enforced);
        if lease.is_none_or(Lease::is_ending) && self.nodes.get(death.node).is_some_and(is_moved) {
            // Whoever is moved away from a node that is drained has not failed; also where an earlier head had ended the lease.
            death.is_moved = true;
        }
        let Some(lease) = lease else { return self.absent_worker_died(id, death) };
        match lease.holder {
            Holder::Nobody => self.absent_worker_died(id, death),
            Holder::Actor(actor) => self.actor_process_died(actor, id, death),
            Holder::Tasks((owner, _)) if !self.connected.contains(&owner) => self.absent_worker_died(id, death),
            Holder::Tasks((owner, _)) => self.tell(owner, HeadEvent::WorkerDied(death)),
        }
    }

    /// An execution of the lease began or ended a wait: its CPUs are free meanwhile.
    pub(super) fn lease_waits(&mut self, id: LeaseId, task: TaskId, begins: bool) {
        let Some(lease) = self.leases.leases.get_mut(&id) else { return };
        let was_waiting = !lease.waiting.is_empty();
        // A head that was started again may hear of each twice.
        match begins {
            true => lease.waiting.insert(task),
            false => lease.waiting.remove(&task),
        };
        if was_waiting != lease.waiting.is_empty() {
            return;
        }
        let (holder, returned, job) = (lease.holder, lease.is_returned(), lease.job);
        let cpus = Taken { resources: lease.taken.cpus(), devices: Vec::new(), ..lease.taken.clone() };
        if let Holder::Tasks(asker) = holder
            && let Some(demand) = self.leases.demands.get_mut(&asker)
            && demand.held.contains(&id)
        {
            demand.active = if begins { demand.active - 1 } else { demand.active + 1 };
            self.requeue(&asker);
        }
        if returned || cpus.resources.is_empty() {
            return;
        }
        // The quota counts what the node counts: else nested tasks wait for the CPUs of those who wait for them.
        if cpus.bundle.is_none() && begins {
            self.uncharge(job, &cpus.resources);
        } else if cpus.bundle.is_none() {
            self.charge(job, &cpus.resources);
        }
        self.adjust(&cpus, begins);
        if !begins {
            self.recall_over_quota_of(job);
        }
    }

    /// Ends whatever runs in a placement group that is gone, and refuses what waits for it. What the group had
    /// reserved goes back to the nodes, the part in use when it is free.
    pub(super) fn evict(&mut self, group: PlacementGroupId, why: &str) {
        let Some(title) = self.groups.get(group).map(|group| group.spec.title()) else { return };
        let inside = |lease: &Lease| lease.taken.bundle.is_some_and(|(of, _)| of == group);
        let nodes = self.groups.nodes_of(group);
        let here: BTreeSet<LeaseId> = nodes
            .iter()
            .filter_map(|node| self.nodes.get(*node))
            .flat_map(|node| node.leases.iter().copied())
            .collect();
        let occupants: Vec<LeaseId> =
            here.into_iter().filter(|id| self.leases.leases.get(id).is_some_and(inside)).collect();
        let gone = |what: String| Error::PlacementGroupGone { what, group: title.clone(), why: why.to_owned() };
        for shape in self.shapes.in_group(group) {
            // Also those who have what they want: when their leases end, they would wait for what is gone.
            let asking = self.leases.in_groups.range((shape, ProcessId(0))..=(shape, ProcessId(u64::MAX)));
            let askers: Vec<Asker> = asking.map(|(shape, process)| (*process, *shape)).collect();
            for asker in askers {
                let what = self.leases.demands.get(&asker).map(|demand| demand.name.clone()).unwrap_or_default();
                self.refuse_demand(&asker, gone(what));
            }
        }
        self.actors_of_group_end(group, gone);
        for id in occupants {
            // What was in the bundle is now the node's; the quota goes on counting it until it is free.
            let Some(lease) = self.leases.leases.get_mut(&id) else { continue };
            lease.taken.bundle = None;
            let (job, held) = (lease.job, lease.still_taken().resources);
            if !lease.is_returned() {
                self.charge(job, &held);
            }
            self.end_lease(id, Some(format!("its {title} {why}")));
        }
    }

    /// The error of somebody who asks for what can never be had. What a node could have held that was lost at `since`
    /// or later waits for another such node.
    pub(super) fn shape_infeasible(&mut self, id: ShapeId, what: String, since: Millis) -> Option<Error> {
        let shape = self.shapes.get(id)?.clone();
        if let Some((group, index)) = shape.bundle() {
            if self.may_be_told_of_group(group) {
                return None;
            }
            return self.groups.infeasible(group, index, &shape, what);
        }
        if self.recovering.is_some() {
            return None;
        }
        // No node ever comes back under its id, however long one waits.
        let must_be_on = shape.required_node();
        let must_be_on_none = must_be_on.is_some_and(|node| self.nodes.get(node).is_none());
        if !must_be_on_none && (self.nodes.offer_nothing() || shape.patient) {
            return None;
        }
        let possible = match must_be_on {
            Some(_) => 0,
            None => self.shapes.requirements(id).iter().map(|id| self.nodes.possible(*id)).sum::<usize>(),
        };
        if possible > 0 {
            return None;
        }
        if must_be_on.is_none() && self.nodes.former(&shape, since).is_some() {
            return None;
        }
        let nearest = self.nodes.infeasible(&shape)?;
        Some(Error::Infeasible { what, asked: shape.to_string(), nearest })
    }
}

impl Taken {
    /// Its CPUs alone.
    pub(super) fn cpus(&self) -> ResourceSet {
        ResourceSet::cpus(self.resources.get(CPU))
    }
}
