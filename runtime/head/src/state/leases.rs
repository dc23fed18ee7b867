//! Who wants how many leases, who gets one, and how a lease ends.
//!
//! An *asker* is a process and a shape. Askers with the fewest leases are served first, the longest waiting
//! among them first, so that one greedy owner starves nobody.

use std::collections::{BTreeMap, BTreeSet};

use wingbeat_core::error::Error;
use wingbeat_core::resources::CPU;
use wingbeat_core::spec::{Address, Shape};
use wingbeat_core::{ActorId, Amount, JobId, LeaseId, NodeId, ProcessId};
use wingbeat_net::messages::{HeadEvent, LeaseStart, NodeMessage, WorkerDeath};

use super::nodes::Taken;
use super::{Millis, State};

/// Failures to start a worker process, one after another, after which its tasks fail too.
const GIVE_UP_AFTER: u32 = 3;

pub(super) type Asker = (ProcessId, Shape);

pub(super) struct Demand {
    wanted: u32,
    name: String,
    pub held: BTreeSet<LeaseId>,
    /// Order of service among equals.
    pub served: u64,
    failures: u32,
}

/// Who a lease is for.
#[derive(Clone, PartialEq)]
pub(super) enum Holder {
    Tasks(Asker),
    Actor(ActorId),
}

pub(super) struct Lease {
    pub taken: Taken,
    pub holder: Holder,
    pub job: JobId,
    pub worker: Option<ProcessId>,
    pub granted_at: Millis,
    /// When its owner was asked to give it back.
    pub recalled: Option<Millis>,
    /// Executions on it that wait.
    pub waiting: u32,
    /// The node was told to end it; its devices are not free yet.
    pub ending: bool,
    /// Its non-device resources were given back already.
    pub returned: bool,
}

pub(super) struct Leases {
    next: u64,
    served: u64,
    pub demands: BTreeMap<Asker, Demand>,
    pub leases: BTreeMap<LeaseId, Lease>,
    /// Something changed that may let a demand be met.
    changed: bool,
}

impl Leases {
    pub(super) fn new(first: u64) -> Leases {
        Leases { next: first, served: 0, demands: BTreeMap::new(), leases: BTreeMap::new(), changed: false }
    }

    pub(super) fn on_node(&self, node: NodeId) -> Vec<LeaseId> {
        self.leases.iter().filter(|(_, lease)| lease.taken.node == node).map(|(id, _)| *id).collect()
    }

    pub(super) fn leases_of(&self, process: ProcessId) -> Vec<LeaseId> {
        let range = self.demands.iter().filter(|((owner, _), _)| *owner == process);
        range.flat_map(|(_, demand)| demand.held.iter().copied()).collect()
    }

    pub(super) fn of_job(&self, job: JobId) -> u32 {
        self.leases.values().filter(|lease| lease.job == job).count() as u32
    }

    pub(super) fn forget_owner(&mut self, process: ProcessId) {
        self.demands.retain(|(owner, _), _| *owner != process);
        self.changed = true;
    }

    pub(super) fn unmet(&self) -> impl Iterator<Item = (&Shape, &str, u32)> {
        let unmet = self.demands.iter().filter(|(_, demand)| demand.is_unmet());
        unmet.map(|((_, shape), demand)| (shape, demand.name.as_str(), demand.wanted - demand.held.len() as u32))
    }

    /// Leases of a demand that are of use to it: not those whose process waits.
    pub(super) fn active(&self, demand: &Demand) -> usize {
        let waits = |id: &&LeaseId| self.leases.get(id).is_some_and(|lease| lease.waiting > 0);
        demand.held.len() - demand.held.iter().filter(waits).count()
    }

    pub(super) fn note_change(&mut self) {
        self.changed = true;
    }
}

impl Demand {
    pub(super) fn is_unmet(&self) -> bool {
        (self.held.len() as u32) < self.wanted
    }
}

impl State {
    pub(super) fn demand(&mut self, process: ProcessId, shape: Shape, wanted: u32, name: String) {
        let negative = shape.resources.iter().find(|(_, amount)| amount.units() < 0).map(|(name, _)| name);
        if let Some(why) = negative
            .map(|name| format!("less than no {name}"))
            .or_else(|| shape.resources.check().err().map(|invalid| invalid.to_string()))
        {
            let error = Error::InvalidArgument { what: format!("{name} asks for {}: {why}", shape.resources) };
            return self.tell(process, HeadEvent::Refused { shape, error });
        }
        let asker = (process, shape);
        let demand = self.leases.demands.entry(asker.clone()).or_insert_with(|| Demand {
            wanted: 0,
            name: name.clone(),
            held: BTreeSet::new(),
            served: 0,
            failures: 0,
        });
        demand.wanted = wanted;
        demand.name = name;
        if wanted == 0 && demand.held.is_empty() {
            self.leases.demands.remove(&asker);
            return;
        }
        self.leases.changed = true;
        self.refuse_demand_if_infeasible(&asker);
    }

    /// Called when a demand is new and when nodes come and go.
    pub(super) fn refuse_demand_if_infeasible(&mut self, asker: &Asker) {
        if self.nodes.is_empty() || !self.leases.demands.get(asker).is_some_and(Demand::is_unmet) {
            return;
        }
        let Some(nearest) = self.nodes.infeasible(&asker.1) else { return };
        let what = self.leases.demands.get(asker).map(|demand| demand.name.clone()).unwrap_or_default();
        let asked = asker.1.resources.to_string();
        self.refuse_demand(asker, Error::Infeasible { what, asked, nearest });
    }

    fn refuse_demand(&mut self, asker: &Asker, error: Error) {
        let Some(demand) = self.leases.demands.get_mut(asker) else { return };
        // What it holds, it keeps until it returns it.
        demand.wanted = 0;
        demand.failures = 0;
        if demand.held.is_empty() {
            self.leases.demands.remove(asker);
        }
        self.tell(asker.0, HeadEvent::Refused { shape: asker.1.clone(), error });
    }

    /// Grants until nothing more fits. Cheap when nothing changed.
    pub(super) fn grant_what_fits(&mut self) {
        if !std::mem::take(&mut self.leases.changed) {
            return;
        }
        let unmet = self.leases.demands.iter().filter(|(_, demand)| demand.is_unmet());
        let mut queue: BTreeSet<(usize, u64, Asker)> =
            unmet.map(|(asker, demand)| (self.leases.active(demand), demand.served, asker.clone())).collect();
        // Shapes that did not fit once do not fit for anybody else in this round.
        let mut too_large: BTreeSet<Shape> = BTreeSet::new();
        while let Some((has, _, asker)) = queue.pop_first() {
            if too_large.contains(&asker.1) {
                continue;
            }
            if self.grant(&asker, has) {
                if let Some(demand) = self.leases.demands.get(&asker).filter(|demand| demand.is_unmet()) {
                    queue.insert((has + 1, demand.served, asker));
                }
            } else if self.nodes.place(&asker.1, None).is_none() {
                too_large.insert(asker.1);
            }
        }
    }

    fn grant(&mut self, asker: &Asker, has: usize) -> bool {
        let Some(job) = self.job_of(asker.0).and_then(|job| self.jobs.get(&job)).cloned() else { return false };
        let holder = Holder::Tasks(asker.clone());
        let free_for = |node: &super::nodes::Node| !self.is_reserved_against(node, &holder, has, &asker.1.resources);
        let near = Some(job.driver.machine);
        let Some(node) = self.nodes.place_where(&asker.1, near, free_for) else { return false };
        let Some(taken) = self.nodes.take(node, &asker.1.resources) else { return false };
        let id = self.new_lease(taken.clone(), holder, job.id);
        self.leases.served += 1;
        if let Some(demand) = self.leases.demands.get_mut(asker) {
            demand.held.insert(id);
            demand.served = self.leases.served;
        }
        let start = LeaseStart { lease: id, job, resources: taken.resources, gpus: taken.devices, actor: None };
        self.order(node, NodeMessage::StartLease(Box::new(start)));
        true
    }

    pub(super) fn new_lease(&mut self, taken: Taken, holder: Holder, job: JobId) -> LeaseId {
        self.reservations.retain(|_, reservation| reservation.waiter != holder);
        let id = LeaseId(self.leases.next);
        self.leases.next = self.leases.next.wrapping_add(1);
        let lease = Lease {
            taken,
            holder,
            job,
            worker: None,
            granted_at: self.now,
            recalled: None,
            waiting: 0,
            ending: false,
            returned: false,
        };
        self.leases.leases.insert(id, lease);
        id
    }

    pub(super) fn lease_ready(&mut self, id: LeaseId, worker: Address, pid: u32) {
        let now = self.now;
        let Some(lease) = self.leases.leases.get_mut(&id) else { return };
        lease.worker = Some(worker.process);
        lease.granted_at = now;
        let (holder, node, job, ending) = (lease.holder.clone(), lease.taken.node, lease.job, lease.ending);
        self.worker_known(worker.process, job, node);
        if ending {
            return;
        }
        match holder {
            Holder::Actor(actor) => self.actor_has_process(actor, id, worker, pid),
            Holder::Tasks(asker) => {
                if let Some(demand) = self.leases.demands.get_mut(&asker) {
                    demand.failures = 0;
                }
                let (process, shape) = asker;
                self.tell(process, HeadEvent::Granted { shape, lease: id, worker, node, pid });
            }
        }
    }

    pub(super) fn lease_failed(&mut self, id: LeaseId, error: Error) {
        let Some(lease) = self.leases.leases.get(&id) else { return };
        let (holder, ending) = (lease.holder.clone(), lease.ending);
        self.forget_lease(id);
        match holder {
            Holder::Actor(actor) => self.actor_failed_to_start(actor, id, error),
            // Nobody wanted it any more.
            Holder::Tasks(_) if ending => {}
            Holder::Tasks(asker) => {
                let Some(demand) = self.leases.demands.get_mut(&asker) else { return };
                demand.failures += 1;
                if demand.failures >= GIVE_UP_AFTER {
                    self.refuse_demand(&asker, error);
                }
            }
        }
    }

    /// The owner has no more use for a lease. It wants one less until it says otherwise, or it would be
    /// granted another before its next word arrives.
    pub(super) fn returned(&mut self, process: ProcessId, id: LeaseId) {
        let ours = self.leases.leases.get(&id).is_some_and(|lease| match &lease.holder {
            Holder::Tasks((owner, _)) => *owner == process,
            Holder::Actor(_) => false,
        });
        if ours {
            let held = self.leases.demands.values_mut().find(|demand| demand.held.contains(&id));
            if let Some(demand) = held {
                demand.wanted = demand.wanted.saturating_sub(1);
            }
            self.end_lease(id, None);
        }
    }

    /// Tells the node that a lease is over. Its devices are free when the node says so; the rest is free at
    /// once if the process goes on to serve others.
    pub(super) fn end_lease(&mut self, id: LeaseId, kill: Option<String>) {
        let Some(lease) = self.leases.leases.get_mut(&id) else { return };
        if std::mem::replace(&mut lease.ending, true) {
            return;
        }
        let node = lease.taken.node;
        if let Holder::Tasks(asker) = lease.holder.clone() {
            self.unhold(&asker, id);
        }
        let Some(lease) = self.leases.leases.get_mut(&id) else { return };
        if kill.is_none() && lease.taken.devices.is_empty() && !lease.returned {
            lease.returned = true;
            let back = lease.still_taken();
            self.nodes.give_back(&back);
        }
        self.leases.changed = true;
        self.order(node, NodeMessage::EndLease { lease: id, kill });
    }

    fn unhold(&mut self, asker: &Asker, id: LeaseId) {
        if let Some(demand) = self.leases.demands.get_mut(asker) {
            demand.held.remove(&id);
            if demand.wanted == 0 && demand.held.is_empty() {
                self.leases.demands.remove(asker);
            }
        }
    }

    /// The node says that nothing of a lease is left.
    pub(super) fn lease_ended(&mut self, id: LeaseId) {
        let holder = self.leases.leases.get(&id).map(|lease| lease.holder.clone());
        self.forget_lease(id);
        if let Some(Holder::Actor(actor)) = holder {
            self.actor_lease_ended(actor, id);
        }
    }

    /// Gives back what is still taken, and forgets the lease.
    pub(super) fn forget_lease(&mut self, id: LeaseId) {
        let Some(lease) = self.leases.leases.remove(&id) else { return };
        if !lease.returned {
            let back = lease.still_taken();
            self.nodes.give_back(&back);
        }
        if let Some(worker) = lease.worker {
            self.waits.forget_process(worker);
        }
        if let Holder::Tasks(asker) = &lease.holder {
            self.unhold(asker, id);
        }
        self.leases.changed = true;
    }

    pub(super) fn worker_died(&mut self, death: WorkerDeath) {
        self.worker_jobs.remove(&death.process);
        let Some(id) = death.lease else { return };
        let Some(lease) = self.leases.leases.get(&id) else { return };
        match lease.holder.clone() {
            Holder::Actor(actor) => self.actor_process_died(actor, id, death),
            Holder::Tasks((owner, _)) => self.tell(owner, HeadEvent::WorkerDied(death)),
        }
    }

    /// An execution of the lease began or ended a wait: its CPUs are free meanwhile.
    pub(super) fn lease_waits(&mut self, id: LeaseId, begins: bool) {
        let Some(lease) = self.leases.leases.get_mut(&id) else { return };
        let cpus = lease.taken.resources.get(CPU);
        let changes = if begins {
            lease.waiting += 1;
            lease.waiting == 1
        } else {
            let was = lease.waiting;
            lease.waiting = was.saturating_sub(1);
            was == 1
        };
        if changes && !lease.returned && !cpus.is_zero() {
            self.nodes.adjust_cpus(lease.taken.node, cpus, begins);
            self.leases.changed |= begins;
        }
    }
}

impl Lease {
    /// What is to be given back: without the CPUs that a waiting execution gave back already.
    pub(super) fn still_taken(&self) -> Taken {
        let mut taken = self.taken.clone();
        if self.waiting > 0 {
            taken.resources.set(CPU, Amount::ZERO);
        }
        taken
    }
}
