//! Who wants how many leases, who gets one, and who must give one back.
//!
//! An *asker* is a process and a shape. Askers with the fewest leases are served first, the longest waiting
//! among them first, so that one greedy owner starves nobody.

use std::collections::{BTreeMap, BTreeSet};

use wingbeat_core::error::Error;
use wingbeat_core::resources::{CPU, GPU};
use wingbeat_core::spec::{Address, Shape};
use wingbeat_core::{ActorId, Amount, JobId, LeaseId, NodeId, ProcessId, ResourceSet};
use wingbeat_net::messages::{HeadEvent, LeaseStart, NodeMessage, WorkerDeath};

use super::nodes::Taken;
use super::{Millis, State};

/// A lease is not recalled before its owner had this long to use it, or leases would go back and forth
/// faster than tasks.
const RECALL_AFTER: Millis = 50;
/// Failures to start a worker process, one after another, after which its tasks fail too.
const GIVE_UP_AFTER: u32 = 3;

type Asker = (ProcessId, Shape);

struct Demand {
    wanted: u32,
    name: String,
    held: BTreeSet<LeaseId>,
    /// Order of service among equals.
    served: u64,
    failures: u32,
    since: Millis,
}

/// Who a lease is for.
#[derive(Clone)]
pub(super) enum Holder {
    Tasks(Asker),
    Actor(ActorId),
}

pub(super) struct Lease {
    pub taken: Taken,
    pub holder: Holder,
    pub job: JobId,
    pub worker: Option<ProcessId>,
    granted_at: Millis,
    recalled: bool,
    /// Executions on it that wait.
    waiting: u32,
    /// The node was told to end it; its devices are not free yet.
    ending: bool,
    /// Its non-device resources were given back already.
    returned: bool,
}

pub(super) struct Leases {
    next: u64,
    served: u64,
    demands: BTreeMap<Asker, Demand>,
    leases: BTreeMap<LeaseId, Lease>,
    /// Something changed that may let a demand be met.
    changed: bool,
}

impl Leases {
    pub(super) fn new(first: u64) -> Leases {
        Leases { next: first, served: 0, demands: BTreeMap::new(), leases: BTreeMap::new(), changed: false }
    }

    pub(super) fn get(&self, lease: LeaseId) -> Option<&Lease> {
        self.leases.get(&lease)
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

    pub(super) fn has_unmet_demand(&self) -> bool {
        self.demands.values().any(Demand::is_unmet)
    }

    pub(super) fn unmet(&self) -> impl Iterator<Item = (&Shape, &str, u32)> {
        let unmet = self.demands.iter().filter(|(_, demand)| demand.is_unmet());
        unmet.map(|((_, shape), demand)| (shape, demand.name.as_str(), demand.wanted - demand.held.len() as u32))
    }

    pub(super) fn note_change(&mut self) {
        self.changed = true;
    }
}

impl Demand {
    fn is_unmet(&self) -> bool {
        (self.held.len() as u32) < self.wanted
    }
}

impl State {
    pub(super) fn demand(&mut self, process: ProcessId, shape: Shape, wanted: u32, name: String) {
        let now = self.now;
        let asker = (process, shape);
        let demand = self.leases.demands.entry(asker.clone()).or_insert_with(|| Demand {
            wanted: 0,
            name: name.clone(),
            held: BTreeSet::new(),
            served: 0,
            failures: 0,
            since: now,
        });
        if !demand.is_unmet() {
            demand.since = now;
        }
        demand.wanted = wanted;
        demand.name = name;
        if wanted == 0 && demand.held.is_empty() {
            self.leases.demands.remove(&asker);
            return;
        }
        self.leases.changed = true;
        if wanted == 0 || self.nodes.is_empty() {
            return;
        }
        if let Some(nearest) = self.nodes.infeasible(&asker.1) {
            let what = self.leases.demands.remove(&asker).map(|demand| demand.name).unwrap_or_default();
            let asked = asker.1.resources.to_string();
            let error = Error::Infeasible { what, asked, nearest };
            self.tell(process, HeadEvent::Refused { shape: asker.1, error });
        }
    }

    /// Grants until nothing more fits. Cheap when nothing changed.
    pub(super) fn grant_what_fits(&mut self) {
        if !std::mem::take(&mut self.leases.changed) {
            return;
        }
        // Shapes that did not fit once do not fit for anybody else in this round.
        let mut too_large: BTreeSet<Shape> = BTreeSet::new();
        loop {
            let next = self
                .leases
                .demands
                .iter()
                .filter(|((_, shape), demand)| demand.is_unmet() && !too_large.contains(shape))
                .min_by_key(|(_, demand)| (demand.held.len(), demand.served))
                .map(|(asker, _)| asker.clone());
            let Some(asker) = next else { return };
            if !self.grant(&asker) {
                too_large.insert(asker.1);
            }
        }
    }

    fn grant(&mut self, asker: &Asker) -> bool {
        let Some(job) = self.job_of(asker.0).and_then(|job| self.jobs.get(&job)).cloned() else { return false };
        let Some(node) = self.nodes.place(&asker.1, Some(job.driver.machine)) else { return false };
        let Some(taken) = self.nodes.take(node, &asker.1.resources) else { return false };
        let id = self.new_lease(taken.clone(), Holder::Tasks(asker.clone()), job.id);
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
        let id = LeaseId(self.leases.next);
        self.leases.next = self.leases.next.wrapping_add(1);
        let lease = Lease {
            taken,
            holder,
            job,
            worker: None,
            granted_at: self.now,
            recalled: false,
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
        let (holder, node, job) = (lease.holder.clone(), lease.taken.node, lease.job);
        self.worker_jobs.insert(worker.process, job);
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
        let Some(holder) = self.leases.leases.get(&id).map(|lease| lease.holder.clone()) else { return };
        self.forget_lease(id);
        match holder {
            Holder::Actor(actor) => self.actor_failed_to_start(actor, error),
            Holder::Tasks(asker) => {
                let Some(demand) = self.leases.demands.get_mut(&asker) else { return };
                demand.failures += 1;
                if demand.failures >= GIVE_UP_AFTER && demand.held.is_empty() {
                    self.leases.demands.remove(&asker);
                    self.tell(asker.0, HeadEvent::Refused { shape: asker.1, error });
                }
            }
        }
    }

    /// The owner has no more use for a lease.
    pub(super) fn returned(&mut self, process: ProcessId, id: LeaseId) {
        let ours = self.leases.leases.get(&id).is_some_and(|lease| match &lease.holder {
            Holder::Tasks((owner, _)) => *owner == process,
            Holder::Actor(_) => false,
        });
        if ours {
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

    /// Asks owners that have more for leases that others wait for.
    pub(super) fn recall_for_the_starved(&mut self) {
        self.leases.changed = true;
        let starved: Vec<(Asker, usize)> = self
            .leases
            .demands
            .iter()
            .filter(|(_, demand)| demand.is_unmet())
            .map(|(asker, demand)| (asker.clone(), demand.held.len()))
            .collect();
        for (asker, has) in starved {
            self.recall_one_for(Some(&asker), &asker.1.resources, has);
        }
        for needed in self.actors.pending_resources() {
            self.recall_one_for(None, &needed, 0);
        }
    }

    fn recall_one_for(&mut self, asker: Option<&Asker>, needed: &ResourceSet, has: usize) {
        // One at a time for each: what is on its way back may be enough.
        let on_its_way = self.leases.leases.values().any(|lease| {
            (lease.recalled || lease.ending) && overlaps(&lease.taken.resources, needed) && lease.waiting == 0
        });
        if on_its_way {
            return;
        }
        let now = self.now;
        let candidate = self
            .leases
            .leases
            .iter()
            .filter(|(_, lease)| !lease.recalled && !lease.ending && lease.waiting == 0 && lease.worker.is_some())
            .filter(|(_, lease)| now >= lease.granted_at + RECALL_AFTER)
            .filter(|(_, lease)| overlaps(&lease.taken.resources, needed))
            .filter_map(|(id, lease)| match &lease.holder {
                Holder::Tasks(holder) if Some(holder) != asker => {
                    let held = self.leases.demands.get(holder).map_or(0, |demand| demand.held.len());
                    Some((held, *id, holder.0))
                }
                _ => None,
            })
            .filter(|(held, ..)| *held > has)
            .max_by_key(|(held, id, _)| (*held, std::cmp::Reverse(*id)));
        // Somebody who has as many as we is left alone, unless we have none.
        let Some((held, id, owner)) = candidate else { return };
        if held <= has + 1 && has > 0 {
            return;
        }
        if let Some(lease) = self.leases.leases.get_mut(&id) {
            lease.recalled = true;
        }
        self.tell(owner, HeadEvent::Recall(id));
    }
}

/// Whether giving one back could help the other.
fn overlaps(held: &ResourceSet, needed: &ResourceSet) -> bool {
    needed.iter().any(|(name, _)| !held.get(name).is_zero())
}

impl Lease {
    /// What is to be given back: without the CPUs that a waiting execution gave back already.
    fn still_taken(&self) -> Taken {
        let mut taken = self.taken.clone();
        if self.waiting > 0 {
            taken.resources.set(CPU, Amount::ZERO);
        }
        taken
    }

    /// Whether devices are held.
    pub(super) fn has_devices(&self) -> bool {
        !self.taken.resources.get(GPU).is_zero()
    }
}
