//! The control plane's decisions: a deterministic state machine without IO, clocks or randomness.
//!
//! [`State::step`] takes what happened and when, and answers with what is to be done. It never iterates a
//! randomly seeded map, so that the same events give the same actions.
//!
//! - `nodes`: what each node has and has given away, device by device; where a shape fits.
//! - `leases`: who wants how many leases, who gets one, and how a lease ends.
//! - `fairness`: whose leases are recalled for whom.
//! - `actors`: the lives of actors, and their names.
//! - `waits`: executions that wait for each other in a circle.
//! - `picture`: the state, for people.

mod actors;
mod fairness;
mod leases;
mod nodes;
mod picture;
mod waits;

use std::collections::{BTreeMap, BTreeSet};

use wingbeat_core::error::Error;
use wingbeat_core::spec::{ActorInfo, ActorName, ActorSpec, Address, JobSpec, Shape};
use wingbeat_core::{ActorId, ClusterId, Incarnation, JobId, LeaseId, NodeId, ProcessId};
use wingbeat_net::messages::{ClusterState, ClusterView, HeadEvent, NodeInfo, NodeMessage, Wait, WorkerDeath};

use actors::Actors;
use leases::Leases;
use nodes::Nodes;
use waits::Waits;

/// Milliseconds since the head started.
pub type Millis = u64;

/// Nodes do not say when they retire an idle worker process. Records of such go when this many more are known
/// than are connected or leased, so that the cost of looking is shared by as many.
const FORMER_WORKERS: usize = 1024;

/// What happened.
#[derive(Clone, Debug)]
pub enum Event {
    /// A node joined.
    NodeJoined(Box<NodeInfo>),
    /// A node's connection ended.
    NodeLost(NodeId, String),
    /// A driver joined.
    JobJoined(Box<JobSpec>),
    /// A driver or worker process connected.
    ProcessConnected(ProcessId),
    /// Its connection ended. For a driver, its job is over.
    ProcessLost(ProcessId, Option<JobId>),
    /// See [`wingbeat_net::messages::HeadMessage::Demand`].
    Demand(ProcessId, Shape, u32, String),
    /// The owner gives a lease back.
    Returned(ProcessId, LeaseId),
    /// The node has a worker process for a lease.
    Ready(LeaseId, Address, u32),
    /// The node could not start one.
    Failed(LeaseId, Error),
    /// The lease's process is gone or free, and so are its devices.
    Ended(LeaseId),
    /// A worker process ended.
    WorkerDied(WorkerDeath),
    /// An execution waits.
    Waiting(ProcessId, Option<LeaseId>, Wait),
    /// It goes on.
    Resumed(Option<LeaseId>, wingbeat_core::TaskId),
    /// Somebody wants to know about an actor.
    Watch(ProcessId, ActorId),
    /// An actor is to end at once.
    Kill(ActorId, bool),
    /// An actor is to finish and end.
    Terminate(ActorId, String),
    /// A constructor returned.
    ActorStarted(ActorId, Incarnation, Result<(), Error>),
    /// Time passed.
    Tick,
}

/// What is to be done.
#[derive(Clone, Debug)]
pub enum Action {
    /// Tell a process.
    Tell(ProcessId, HeadEvent),
    /// Tell a node.
    Order(NodeId, NodeMessage),
}

/// The state of the cluster.
pub struct State {
    cluster: ClusterId,
    now: Millis,
    nodes: Nodes,
    jobs: BTreeMap<JobId, JobSpec>,
    /// Processes that are connected, so that nobody else is told anything.
    connected: BTreeSet<ProcessId>,
    /// The job and the node of every worker process that runs.
    worker_jobs: BTreeMap<ProcessId, (JobId, NodeId)>,
    /// Nodes on which room is being made for somebody.
    reservations: BTreeMap<NodeId, fairness::Reservation>,
    leases: Leases,
    actors: Actors,
    waits: Waits,
    out: Vec<Action>,
}

impl State {
    /// An empty cluster. `first_lease` makes the lease numbers of two heads differ.
    pub fn new(cluster: ClusterId, first_lease: u64) -> State {
        State {
            cluster,
            now: 0,
            nodes: Nodes::default(),
            jobs: BTreeMap::new(),
            connected: BTreeSet::new(),
            worker_jobs: BTreeMap::new(),
            reservations: BTreeMap::new(),
            leases: Leases::new(first_lease),
            actors: Actors::default(),
            waits: Waits::default(),
            out: Vec::new(),
        }
    }

    /// Takes in what happened at `now`, and answers with what is to be done, in order.
    pub fn step(&mut self, now: Millis, event: Event) -> Vec<Action> {
        self.now = now;
        match event {
            Event::NodeJoined(info) => self.node_joined(*info),
            Event::NodeLost(node, why) => self.node_lost(node, &why),
            Event::JobJoined(job) => self.job_joined(*job),
            Event::ProcessConnected(process) => {
                self.connected.insert(process);
            }
            Event::ProcessLost(process, job) => self.process_lost(process, job),
            Event::Demand(process, shape, wanted, name) => self.demand(process, shape, wanted, name),
            Event::Returned(process, lease) => self.returned(process, lease),
            Event::Ready(lease, worker, pid) => self.lease_ready(lease, worker, pid),
            Event::Failed(lease, error) => self.lease_failed(lease, error),
            Event::Ended(lease) => self.lease_ended(lease),
            Event::WorkerDied(death) => self.worker_died(death),
            Event::Waiting(process, lease, wait) => self.waiting(process, lease, wait),
            Event::Resumed(lease, task) => self.resumed(lease, task),
            Event::Watch(process, actor) => self.watch(process, actor),
            Event::Kill(actor, may_restart) => self.kill_actor(actor, may_restart),
            Event::Terminate(actor, by) => self.terminate_actor(actor, by),
            Event::ActorStarted(actor, incarnation, outcome) => self.actor_started(actor, incarnation, outcome),
            Event::Tick => {
                self.recall_for_the_starved();
                self.tell_of_deadlocks();
            }
        }
        self.place_actors();
        self.grant_what_fits();
        if !self.reservations.is_empty() && !self.is_contended() {
            self.reservations.clear();
            self.leases.note_change();
            self.grant_what_fits();
        }
        std::mem::take(&mut self.out)
    }

    /// Makes an actor, or finds the one of its name.
    ///
    /// # Errors
    /// The name is taken, or no node could ever hold it.
    pub fn create_actor(
        &mut self,
        now: Millis,
        spec: ActorSpec,
        or_get: bool,
    ) -> (Result<ActorInfo, Error>, Vec<Action>) {
        self.now = now;
        let answer = self.new_actor(spec, or_get);
        self.place_actors();
        (answer, std::mem::take(&mut self.out))
    }

    /// The actor of this name.
    ///
    /// # Errors
    /// [`Error::ActorNotFound`].
    pub fn find_actor(&self, name: &ActorName) -> Result<ActorInfo, Error> {
        self.actors.find(name)
    }

    /// The cluster, for somebody who joins.
    pub fn view(&self) -> ClusterView {
        ClusterView { cluster: self.cluster, nodes: self.nodes.infos() }
    }

    /// Whether time must pass for something to happen.
    pub fn needs_ticks(&self) -> bool {
        self.is_contended() || self.waits.has_suspects() || self.actors_rest()
    }

    /// Everything, for people.
    pub fn picture(&self) -> ClusterState {
        picture::of(self)
    }

    /// Every living node.
    pub fn node_ids(&self) -> Vec<NodeId> {
        self.nodes.ids()
    }

    /// The node on which a lease is.
    pub fn node_of(&self, lease: LeaseId) -> Option<NodeId> {
        self.leases.leases.get(&lease).map(|lease| lease.taken.node)
    }

    /// The driver of a job.
    pub fn driver_of(&self, job: JobId) -> Option<ProcessId> {
        self.jobs.get(&job).map(|job| job.driver.process)
    }

    /// Whether a node of this id is there.
    pub fn has_node(&self, node: NodeId) -> bool {
        self.nodes.get(node).is_some()
    }

    fn tell(&mut self, process: ProcessId, event: HeadEvent) {
        if self.connected.contains(&process) {
            self.out.push(Action::Tell(process, event));
        }
    }

    fn order(&mut self, node: NodeId, message: NodeMessage) {
        if self.nodes.get(node).is_some() {
            self.out.push(Action::Order(node, message));
        }
    }

    fn node_joined(&mut self, info: NodeInfo) {
        self.nodes.join(info);
        self.leases.note_change();
        self.refuse_the_infeasible();
    }

    fn node_lost(&mut self, node: NodeId, why: &str) {
        if !self.nodes.remove(node) {
            return;
        }
        let told: Vec<ProcessId> = self.connected.iter().copied().collect();
        for process in told {
            self.tell(process, HeadEvent::NodeDied { node, why: why.to_owned() });
        }
        for lease in self.leases.on_node(node) {
            self.forget_lease(lease);
        }
        self.actors_lost_with(node, why);
        self.reservations.remove(&node);
        self.worker_jobs.retain(|_, (_, of)| *of != node);
        self.refuse_the_infeasible();
    }

    /// What nodes there are has changed.
    fn refuse_the_infeasible(&mut self) {
        let askers: Vec<_> = self.leases.demands.keys().cloned().collect();
        for asker in askers {
            self.refuse_demand_if_infeasible(&asker);
        }
        self.refuse_infeasible_actors();
    }

    fn worker_known(&mut self, worker: ProcessId, job: JobId, node: NodeId) {
        self.worker_jobs.insert(worker, (job, node));
        let leased: BTreeSet<ProcessId> = match self.leases.leases.len() + self.connected.len() + FORMER_WORKERS {
            limit if self.worker_jobs.len() <= limit => return,
            _ => self.leases.leases.values().filter_map(|lease| lease.worker).collect(),
        };
        self.worker_jobs.retain(|id, _| leased.contains(id) || self.connected.contains(id));
    }

    fn job_joined(&mut self, job: JobSpec) {
        let count = 4;
        for (node, cpus) in self.nodes.on_machine(job.driver.machine) {
            if cpus > 0 {
                let job = Box::new(job.clone());
                self.order(node, NodeMessage::Prestart { job, count: cpus.min(count) });
            }
        }
        self.jobs.insert(job.id, job);
    }

    fn job_of(&self, process: ProcessId) -> Option<JobId> {
        self.worker_jobs
            .get(&process)
            .map(|(job, _)| *job)
            .or_else(|| self.jobs.values().find(|job| job.driver.process == process).map(|job| job.id))
    }

    fn process_lost(&mut self, process: ProcessId, job: Option<JobId>) {
        self.connected.remove(&process);
        self.waits.forget_process(process);
        self.actors.unwatch(process);
        for lease in self.leases.leases_of(process) {
            self.end_lease(lease, Some("its owner is gone".into()));
        }
        self.leases.forget_owner(process);
        self.actors_orphaned_by(process);
        let Some(job) = job else { return };
        if self.jobs.get(&job).is_some_and(|job| job.driver.process == process) {
            self.actors_of_job_end(job);
            for node in self.nodes.ids() {
                self.order(node, NodeMessage::EndJob { job });
            }
            if !self.actors.has_of_job(job) {
                self.jobs.remove(&job);
            }
        }
    }

    fn waiting(&mut self, process: ProcessId, lease: Option<LeaseId>, wait: Wait) {
        self.waits.begin(self.now, process, wait);
        if let Some(lease) = lease {
            self.lease_waits(lease, true);
        }
    }

    fn tell_of_deadlocks(&mut self) {
        for (process, task, cycle) in self.waits.confirmed(self.now) {
            self.tell(process, HeadEvent::Deadlock { task, cycle });
        }
    }

    fn resumed(&mut self, lease: Option<LeaseId>, task: wingbeat_core::TaskId) {
        self.waits.end(task);
        if let Some(lease) = lease {
            self.lease_waits(lease, false);
        }
    }
}

#[cfg(test)]
mod tests;
