//! The control plane's decisions: a deterministic state machine without IO, clocks or randomness.
//!
//! [`State::step`] takes what happened and when, and answers with what is to be done. It never iterates a
//! randomly seeded map, so that the same events give the same actions.
//!
//! - `pool`, `nodes`, `index`: what there is, device by device; what of it is free; where a shape fits.
//! - `shapes`, `queue`, `placing`: who waits for what, in which order, and who is placed now.
//! - `hears`: what the head is told by whom.
//! - `lease`: the life of one; `leases`: who wants how many leases, and how a lease ends.
//! - `fairness`: whose leases are recalled for whom; `keeping`: room for those who wait long.
//! - `quotas`: what a namespace may hold.
//! - `actors`: the lives of actors, and their names.
//! - `groups`, `gangs`: placement groups, and places for all bundles of one or for none.
//! - `draining`: nodes that are to be free of work.
//! - `waits`: executions that wait for each other in a circle.
//! - `facts`, `recovery`: what survives the head, and how a new one begins with it.
//! - `recorded`: all that changes the state, to be written down and played back.
//! - `why`, `picture`: the state, for people; `audit`: what must always hold, for the simulator.

mod actors;
mod audit;
mod departed;
mod draining;
mod facts;
mod fairness;
mod gangs;
mod groups;
mod hears;
mod index;
mod keeping;
mod lease;
mod leases;
mod nodes;
mod picture;
mod placing;
mod pool;
mod processes;
mod queue;
mod quotas;
mod recorded;
mod recovery;
mod shapes;
mod waits;
mod why;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use wingbeat_core::error::Error;
use wingbeat_core::spec::{ActorInfo, ActorSpec, Executable, JobSpec, PlacementGroupSpec, ScopedName};
use wingbeat_core::{ActorId, ClusterId, JobId, LeaseId, NodeId, PlacementGroupId, ProcessId, ResourceSet};
use wingbeat_net::messages::{ClusterState, ClusterView, HeadEvent, HeadMessage, NodeInfo, NodeMessage, Running, Wait};

use actors::Actors;
use departed::Departed;
pub use facts::{BundlePlace, Drained, Fact, FactKey, KeptActor};
use fairness::Reservations;
use groups::Groups;
pub use hears::Speaker;
use keeping::PATIENCE;
use lease::Holder;
use leases::Leases;
use nodes::Nodes;
pub use picture::Taking;
pub(crate) use processes::the_one_with_pid;
use queue::{Hold, Queue};
use quotas::Quotas;
use recorded::Recorded;
pub use recorded::{Beginning, Input};
pub(crate) use recovery::Absentee;
use shapes::Shapes;
use waits::{Circle, Waits};

/// Milliseconds since the head started.
pub type Millis = u64;

/// How often unmet demand is looked at: half of what a recalled lease is left with its owner.
const TICK: Millis = 25;
/// Ticks without effect after which the next comes later, up to [`SLOW_TICK`].
const TICKS_AT_SPEED: u32 = 40;
const SLOW_TICK: Millis = 400;

/// What happened.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Event {
    /// A node joined; these leases run on it, if it knew a head before.
    NodeJoined(Box<NodeInfo>, Running),
    /// A node's connection ended. It may come back.
    NodeAway(NodeId),
    /// It has another, and goes on where it was.
    NodeBack(NodeId),
    /// A node is gone, or was away for too long.
    NodeLost(NodeId, String),
    /// A driver joined.
    JobJoined(Box<JobSpec>),
    /// A driver or worker process connected.
    ProcessConnected(ProcessId),
    /// It is gone, or was away for too long. For a driver, its job is over.
    ProcessLost(ProcessId, Option<JobId>),
    /// Somebody says this; see [`State::may_say`].
    Says(Speaker, HeadMessage),
    /// The journal cannot be written, and why; or it is written again.
    JournalFails(Option<String>),
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

/// A driver's session.
struct Job {
    spec: Arc<JobSpec>,
    /// When this head first knew of it.
    began: Millis,
    /// The driver is gone; it is known as long as something of it is left.
    is_over: bool,
    /// Leases, living actors and placement groups.
    holds: u32,
    /// Living detached actors, which need its program also when it is over.
    detached: u32,
    /// Nodes that were told of its end, and may have kept it for a detached actor.
    ended_on: BTreeSet<NodeId>,
    /// What its leases and placement groups hold, and how much of the cluster that is: see [`State::share_of`].
    used: ResourceSet,
    share: u64,
}

/// The state of the cluster. Its fields are many because each subject has a type and a file of its own; what is left here belongs to
/// several of them.
pub struct State {
    cluster: ClusterId,
    /// When the present step happens, or the last one.
    now: Millis,
    /// Those that have joined, until they are lost; and what some that were lost had.
    nodes: Nodes,
    /// What somebody asks for, numbered for as long as somebody does.
    shapes: Shapes,
    /// Who waits for a place, until it has one or wants none.
    queue: Queue,
    /// Counts up with everybody who begins to wait or is served.
    turns: u64,
    /// Where room is kept, until its time is over.
    reservations: Reservations,
    /// What may still be searched for groups until the next tick.
    searches: gangs::Budget,
    /// Of namespaces that have one.
    quotas: Quotas,
    /// Placement groups until they are gone, and why the latest of those are.
    groups: Groups,
    /// Until the driver is gone and nothing of the job is left.
    jobs: BTreeMap<JobId, Job>,
    /// The job of every driver.
    drivers: BTreeMap<ProcessId, JobId>,
    /// Processes that are connected, so that nobody else is told anything.
    connected: BTreeSet<ProcessId>,
    /// The job and the node of every worker process that has served and runs. Its node says when it has ended, also of one that
    /// was idle. An idle one is neither leased nor connected, and may still ask for leases: to make again what it owns.
    worker_jobs: BTreeMap<ProcessId, (JobId, NodeId)>,
    /// Processes that have ended, the latest ones.
    departed: Departed,
    /// Who wants how many, until it wants none and has none; and leases, until their node says that they are over, or is lost.
    leases: Leases,
    /// Living actors, and why the latest dead ones are dead.
    actors: Actors,
    /// Executions that wait, until they go on or their process is gone.
    waits: Waits,
    /// Counts changes of which jobs have detached actors.
    programs_version: u64,
    /// Nodes that are being drained.
    draining: BTreeSet<NodeId>,
    /// Until when those that were there before the head was started again may come back.
    recovering: Option<recovery::Recovering>,
    /// What was said of actors of which nothing else is known, as long as somebody may still tell.
    unheard: Option<recovery::Unheard>,
    /// Whether an earlier head knew more of what was before.
    was_recovered: bool,
    /// Nodes that were lost since the head was started again, and why, as long as somebody may come back, who is told.
    never_back: Vec<(NodeId, String)>,
    /// Whether somebody writes facts down.
    keeps_facts: bool,
    /// Why they cannot be written now. Nothing new is granted then: the next head would not know on which nodes that is, and
    /// could start it once more.
    cannot_write: Option<String>,
    /// What has become true since [`State::take_facts`].
    facts: Vec<Fact>,
    /// Ticks since something else happened, or a tick had an effect.
    idle_ticks: u32,
    /// What follows from the present step, until it answers.
    out: Vec<Action>,
    /// Who is told of each step, if somebody is.
    recorded: Recorded,
}

impl State {
    /// An empty cluster. `first_lease` makes the lease numbers of two heads differ.
    pub fn new(cluster: ClusterId, first_lease: u64) -> State {
        State {
            cluster,
            now: 0,
            nodes: Nodes::default(),
            shapes: Shapes::default(),
            queue: Queue::default(),
            turns: 0,
            reservations: Reservations::default(),
            searches: gangs::Budget::default(),
            quotas: Quotas::default(),
            groups: Groups::default(),
            jobs: BTreeMap::new(),
            drivers: BTreeMap::new(),
            connected: BTreeSet::new(),
            worker_jobs: BTreeMap::new(),
            departed: Departed::default(),
            leases: Leases::new(first_lease),
            actors: Actors::default(),
            waits: Waits::default(),
            programs_version: 0,
            draining: BTreeSet::new(),
            recovering: None,
            unheard: None,
            was_recovered: false,
            never_back: Vec::new(),
            keeps_facts: false,
            cannot_write: None,
            facts: Vec::new(),
            idle_ticks: 0,
            out: Vec::new(),
            recorded: Recorded::default(),
        }
    }

    /// Takes in what happened at `now`, and answers with what is to be done, in order.
    pub fn step(&mut self, now: Millis, event: Event) -> Vec<Action> {
        self.begin(now, || Input::Event(event.clone()));
        if !matches!(event, Event::Tick) {
            self.idle_ticks = 0;
        }
        match event {
            Event::NodeJoined(info, running) => self.node_joined(*info, running),
            Event::NodeAway(node) => self.node_away(node),
            Event::NodeBack(node) => self.node_back(node),
            Event::NodeLost(node, why) => self.node_lost(node, &why),
            Event::JobJoined(job) => self.job_joined(*job),
            Event::ProcessConnected(process) => {
                self.connected.insert(process);
                self.tell(process, HeadEvent::Nodes(self.nodes.len() as u32));
                self.tell_of_lost_nodes(process);
            }
            Event::ProcessLost(process, job) => self.process_lost(process, job),
            Event::Says(by, message) => self.hears(by, message),
            Event::JournalFails(why) => {
                self.cannot_write = why;
                self.queue.unblock_all_in_turn();
            }
            Event::Tick => self.tick(),
        }
        self.act()
    }

    /// Places whoever fits now, and answers with everything that is to be done.
    fn act(&mut self) -> Vec<Action> {
        self.serve();
        self.tell_of_starts();
        let actions = std::mem::take(&mut self.out);
        self.done(actions)
    }

    fn tick(&mut self) {
        self.end_recovery_when_due();
        self.wake_the_rested();
        self.enforce_drains();
        self.searches = gangs::Budget::default();
        if self.reservations.is_empty() {
            self.queue.unblock_in_turn();
        } else {
            // Against whom room is kept may change without anything being given back.
            self.queue.unblock_all_in_turn();
        }
        self.serve();
        if self.cannot_write.is_none() {
            self.recall_for_the_starved();
        }
        self.tell_of_deadlocks();
        self.idle_ticks = if self.out.is_empty() { self.idle_ticks.saturating_add(1) } else { 0 };
    }

    /// When time must have passed for something to happen, in milliseconds from now; none if nothing will.
    pub fn next_tick(&self) -> Option<Millis> {
        let pace = if self.idle_ticks < TICKS_AT_SPEED { TICK } else { SLOW_TICK };
        let waiting = (!self.queue.is_empty() || !self.reservations.is_empty()).then_some(pace);
        let suspects = self.waits.has_suspects().then_some(TICK);
        let patient_since = self.now.checked_sub(PATIENCE).map_or(0, |at| at + 1);
        let patience_ends = self.queue.hungry_from(patient_since).map(|since| since + PATIENCE);
        let at = [self.actors.rest_ends(), self.drain_deadline(), self.recovery_ends(), patience_ends];
        let due = at.into_iter().flatten().min().map(|at| at.saturating_sub(self.now).max(1));
        [waiting, suspects, due].into_iter().flatten().min()
    }

    /// From now on, durable changes are kept for [`State::take_facts`].
    pub fn keep_facts(&mut self) {
        self.keeps_facts = true;
    }

    /// What must be written down since this was last asked, in order.
    pub fn take_facts(&mut self) -> Vec<Fact> {
        std::mem::take(&mut self.facts)
    }

    fn record(&mut self, fact: Fact) {
        if self.keeps_facts {
            self.facts.push(fact);
        }
    }

    /// Makes a placement group.
    ///
    /// # Errors
    /// It makes no sense, its name is taken, or no nodes could ever hold it.
    pub fn create_group(
        &mut self,
        now: Millis,
        spec: PlacementGroupSpec,
    ) -> (Result<PlacementGroupSpec, Error>, Vec<Action>) {
        self.begin(now, || Input::CreateGroup(Box::new(spec.clone())));
        self.idle_ticks = 0;
        let answer = self.new_group(spec);
        let actions = self.act();
        // One that has its places was recorded with them.
        if let Ok(spec) = &answer
            && !self.placed(spec.id)
        {
            self.record_group(spec.id);
        }
        (answer, actions)
    }

    /// Removes a placement group, and ends what runs in it. Nothing happens when it is gone already.
    pub fn remove_placement_group(&mut self, now: Millis, group: PlacementGroupId) -> Vec<Action> {
        self.begin(now, || Input::RemoveGroup(group));
        self.idle_ticks = 0;
        self.group_removed(group);
        self.act()
    }

    /// Whether a placement group is there and has its places.
    pub fn placed(&self, group: PlacementGroupId) -> bool {
        self.groups.get(group).is_some_and(groups::Group::is_placed)
    }

    /// The placement group of this name.
    ///
    /// # Errors
    /// [`Error::PlacementGroupNotFound`].
    pub fn find_group(&self, name: &ScopedName) -> Result<PlacementGroupSpec, Error> {
        self.groups.find_by_name(name)
    }

    /// Sets what a namespace may hold at a time; anything if nothing is said.
    pub fn quota(&mut self, now: Millis, namespace: &str, limit: Option<ResourceSet>) -> Vec<Action> {
        self.begin(now, || Input::Quota(namespace.to_owned(), limit.clone()));
        self.idle_ticks = 0;
        self.record(match &limit {
            Some(limit) => Fact::Quota(namespace.to_owned(), limit.clone()),
            None => Fact::QuotaGone(namespace.to_owned()),
        });
        self.set_quota(namespace, limit);
        self.act()
    }

    /// Places nothing more on a node; what runs there is moved after `within` milliseconds, and then, if `stops`, the
    /// daemon is told to end. With no `within`, the node takes work again.
    ///
    /// # Errors
    /// There is no such node.
    pub fn drain(
        &mut self,
        now: Millis,
        node: NodeId,
        within: Option<Millis>,
        why: String,
        stops: bool,
    ) -> (Result<(), Error>, Vec<Action>) {
        self.begin(now, || Input::Drain(node, within, why.clone(), stops));
        self.idle_ticks = 0;
        let answer = match within {
            Some(within) => self.drain_node(node, Drained { within, why, stops }),
            None => self.end_drain(node),
        };
        (answer, self.act())
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
        self.begin(now, || Input::CreateActor(Box::new(spec.clone()), or_get));
        self.idle_ticks = 0;
        let answer = self.new_actor(spec, or_get);
        (answer, self.act())
    }

    /// Whether this would be a new actor.
    pub fn is_new_actor(&self, spec: &ActorSpec) -> bool {
        let may_be_back = self.recovering.as_ref().is_some_and(|recovering| recovering.may_be_back(spec.id));
        !may_be_back
            && self.actors.spec(spec.id).is_none()
            && spec.name.as_ref().is_none_or(|name| self.find_actor(name).is_err())
    }

    /// The cluster, for somebody who joins; with nodes that may still come back, which most likely live.
    pub fn view(&self) -> ClusterView {
        let absent = self.recovering.iter().flat_map(|recovering| recovering.infos());
        ClusterView { cluster: self.cluster, nodes: self.nodes.infos().into_iter().chain(absent.cloned()).collect() }
    }

    /// Everything, for people, as of when something has happened last.
    pub fn picture(&self) -> ClusterState {
        self.picture_at(self.now)
    }

    /// The same as of now: nothing may have happened for long.
    pub fn picture_at(&self, now: Millis) -> ClusterState {
        let mut taking = self.begin_picture(now);
        while self.take_part(&mut taking, now) {}
        taking.picture()
    }

    /// Begins to take a picture in parts, each with [`State::take_part`].
    pub fn begin_picture(&self, now: Millis) -> Taking {
        Taking::begin(self, now.max(self.now))
    }

    /// Takes the next part of a picture. Whether there are more.
    pub fn take_part(&self, taking: &mut Taking, now: Millis) -> bool {
        taking.go_on(self, now.max(self.now))
    }

    /// Every living node.
    pub fn node_ids(&self) -> Vec<NodeId> {
        self.nodes.ids()
    }

    /// Whether a node is there, and has anything for work.
    pub fn offers_work(&self, node: NodeId) -> bool {
        self.nodes.get(node).is_some_and(|node| !node.info.resources.is_empty())
    }

    /// The nodes that offer something for work.
    pub(crate) fn nodes_for_work(&self) -> impl Iterator<Item = &NodeInfo> {
        self.nodes.iter().map(|node| &node.info).filter(|info| !info.resources.is_empty())
    }

    /// The machine on which a node is.
    pub fn machine_of(&self, node: NodeId) -> Option<wingbeat_core::spec::MachineId> {
        self.nodes.get(node).map(|node| node.info.address.machine)
    }

    /// The node on which a lease is.
    pub fn node_of(&self, lease: LeaseId) -> Option<NodeId> {
        self.leases.leases.get(&lease).map(|lease| lease.taken.node)
    }

    /// Whether a process has a connection to this head.
    pub fn is_connected(&self, process: ProcessId) -> bool {
        self.connected.contains(&process)
    }

    /// The driver of a job.
    pub fn driver_of(&self, job: JobId) -> Option<ProcessId> {
        self.jobs.get(&job).map(|job| job.spec.driver.process)
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

    fn tell_all(&mut self, event: &HeadEvent) {
        self.out.extend(self.connected.iter().map(|process| Action::Tell(*process, event.clone())));
    }

    /// While nodes come back, there are too many changes of that for everybody to hear of each.
    fn tell_how_many_nodes(&mut self) {
        if self.recovering.is_none() {
            self.tell_all(&HeadEvent::Nodes(self.nodes.len() as u32));
        }
    }

    fn order(&mut self, node: NodeId, message: NodeMessage) {
        if self.nodes.get(node).is_some() {
            self.out.push(Action::Order(node, message));
        }
    }

    fn node_joined(&mut self, info: NodeInfo, running: Running) {
        let id = info.id;
        let was_nothing_offered = self.nodes.offer_nothing();
        self.nodes.join(info);
        self.record_node(id);
        self.devices_held(id, running.held.clone());
        self.nodes.change(id, |node| node.memory_short.clone_from(&running.memory_short));
        self.shares_changed();
        self.tell_how_many_nodes();
        self.adopt(id, running);
        self.freed_on(id);
        self.queue.unblock_all_in_turn();
        // Whoever waited when there was no node for work is told what could never be.
        if was_nothing_offered && !self.nodes.offer_nothing() {
            self.refuse_the_infeasible();
        }
    }

    fn node_lost(&mut self, id: NodeId, why: &str) {
        self.departed.insert(id.steward(), None);
        let Some(node) = self.nodes.remove(id) else { return self.absent_node_lost(id, why) };
        self.record(Fact::NodeGone(id));
        self.note_lost_node(id, why);
        self.tell_all(&HeadEvent::NodeDied { node: id, why: why.to_owned() });
        // Their transfers from it end now, and not when a connection is found to be broken.
        for other in self.nodes.ids() {
            self.order(other, NodeMessage::NodeDied(id));
        }
        self.tell_how_many_nodes();
        let of_actors: Vec<(LeaseId, ActorId)> = node
            .leases
            .iter()
            .filter_map(|lease| match self.leases.leases.get(lease)?.holder {
                Holder::Actor(actor) => Some((*lease, actor)),
                Holder::Tasks(_) | Holder::Nobody => None,
            })
            .collect();
        self.nodes.remember(node.clone(), self.now, why);
        for lease in node.leases {
            self.forget_lease(lease);
        }
        self.draining.remove(&id);
        self.reservation_lost(id);
        self.bundles_lost(node.bundles);
        self.actors_lost_with(&of_actors, id, why);
        self.worker_jobs.retain(|process, (job, of)| {
            if *of == id {
                self.departed.insert(*process, Some(*job));
            }
            *of != id
        });
        self.shares_changed();
        self.refuse_the_infeasible();
    }

    fn devices_held(&mut self, id: NodeId, held: Vec<(u32, String)>) {
        self.nodes.change(id, |node| {
            node.held = held.into_iter().collect();
            let held = &node.held;
            node.pool.hold_devices(|device| held.contains_key(&device));
        });
        self.freed_on(id);
    }

    fn worker_known(&mut self, worker: ProcessId, job: JobId, node: NodeId) {
        if self.worker_jobs.insert(worker, (job, node)).is_none() {
            self.job_is_known(worker);
        }
    }

    fn job_joined(&mut self, spec: JobSpec) {
        let count = 4;
        let (id, driver, machine) = (spec.id, spec.driver.process, spec.driver.machine);
        self.record(Fact::Job(Box::new(spec.without_local()), true));
        self.insert_job(spec);
        for (node, cpus) in self.nodes.on_machine(machine) {
            if cpus > 0 {
                self.tell_of_job(node, id);
                self.order(node, NodeMessage::Prestart { job: id, count: cpus.min(count) });
            }
        }
        self.job_is_known(driver);
    }

    /// For which job a process works is known now.
    fn job_is_known(&mut self, process: ProcessId) {
        self.queue.unpark(&Hold::UnknownJob(process));
        for asker in self.leases.asked_by(process) {
            self.requeue(&asker);
        }
    }

    fn insert_job(&mut self, spec: JobSpec) {
        self.drivers.insert(spec.driver.process, spec.id);
        let id = spec.id;
        let spec = Arc::new(spec);
        match self.jobs.get_mut(&id) {
            Some(job) => {
                (job.spec, job.is_over) = (spec, false);
                job.ended_on.clear();
            }
            None => {
                let job = Job {
                    spec,
                    began: self.now,
                    is_over: false,
                    holds: 0,
                    detached: 0,
                    ended_on: BTreeSet::new(),
                    used: ResourceSet::new(),
                    share: 0,
                };
                self.jobs.insert(id, job);
            }
        }
    }

    /// Since when a job's requests count as possible that a node could have held which is gone now.
    fn job_began(&self, job: Option<JobId>) -> Millis {
        job.and_then(|job| self.jobs.get(&job)).map_or(0, |job| job.began)
    }

    /// A detached actor of a job began or ended.
    fn job_detached(&mut self, id: JobId, change: i32) {
        let Some(job) = self.jobs.get_mut(&id) else { return };
        let before = job.detached;
        job.detached = before.saturating_add_signed(change);
        if (before == 0) != (job.detached == 0) {
            self.programs_version += 1;
        }
    }

    /// Changes whenever [`State::programs`] may have.
    pub fn programs_version(&self) -> u64 {
        self.programs_version
    }

    /// The hashes of the programs that detached actors need to live again.
    pub fn programs(&self) -> BTreeSet<String> {
        let recovering = self.recovering.iter().flat_map(|recovering| recovering.detached());
        let recovering = recovering.filter_map(|job| self.jobs.get(&job));
        let living = self.jobs.values().filter(|job| job.detached > 0);
        living.chain(recovering).map(|job| job.spec.executable.hash.clone()).collect()
    }

    /// The program of a job.
    pub fn program_of(&self, job: JobId) -> Option<Executable> {
        self.jobs.get(&job).map(|job| job.spec.executable.clone())
    }

    /// Whether the driver of a job is there, or may come back.
    pub(crate) fn is_job_running(&self, job: JobId) -> bool {
        self.jobs.get(&job).is_some_and(|job| !job.is_over)
    }

    fn job_priority(&self, job: JobId) -> i32 {
        self.jobs.get(&job).map_or(0, |job| job.spec.priority)
    }

    /// Something of a job began or ended.
    fn job_holds(&mut self, id: JobId, change: i32) {
        if let Some(job) = self.jobs.get_mut(&id) {
            job.holds = job.holds.saturating_add_signed(change);
        }
        self.forget_job_if_over(id);
    }

    fn forget_job_if_over(&mut self, id: JobId) {
        if self.jobs.get(&id).is_some_and(|job| job.is_over && job.holds == 0)
            // What it holds may still come back.
            && self.recovering.is_none()
            && let Some(job) = self.jobs.remove(&id)
        {
            self.drivers.remove(&job.spec.driver.process);
            self.record(Fact::JobGone(id));
            // Those that kept it for a detached actor, or heard of it only then.
            for node in self.nodes.ids() {
                let knows = self.nodes.get(node).is_some_and(|node| node.jobs.contains(&id));
                if knows {
                    self.nodes.change(node, |node| node.jobs.remove(&id));
                }
                if knows || job.ended_on.contains(&node) {
                    self.order(node, NodeMessage::EndJob { job: id });
                }
            }
        }
    }

    /// A node hears of a job before it hears of its first lease.
    fn tell_of_job(&mut self, node: NodeId, job: JobId) {
        let is_new = self.nodes.get(node).is_some_and(|node| !node.jobs.contains(&job));
        if is_new && let Some(spec) = self.jobs.get(&job).map(|job| job.spec.clone()) {
            let is_local = self.nodes.get(node).is_some_and(|node| node.info.address.machine == spec.driver.machine);
            let spec = if is_local { spec } else { Arc::new(spec.without_local()) };
            self.nodes.change(node, |node| node.jobs.insert(job));
            self.order(node, NodeMessage::BeginJob(spec));
        }
    }

    fn job_of(&self, process: ProcessId) -> Option<JobId> {
        self.drivers.get(&process).copied().or_else(|| self.worker_jobs.get(&process).map(|(job, _)| *job))
    }

    fn process_lost(&mut self, process: ProcessId, job: Option<JobId>) {
        self.connected.remove(&process);
        self.waits.forget_process(process);
        self.actors.unwatch(process);
        self.groups.unwatch(process);
        if let Some(recovering) = &mut self.recovering {
            recovering.process_lost(process);
        }
        if let Some(unheard) = &mut self.unheard {
            unheard.process_lost(process);
        }
        for asker in self.leases.asked_by(process) {
            let Some(demand) = self.leases.demands.get_mut(&asker) else { continue };
            demand.wanted = 0;
            let held = demand.held.clone();
            for lease in held {
                // Under one that was never granted nothing runs, and its process may own what others need.
                let is_granted = self.leases.leases.get(&lease).is_some_and(|lease| lease.server().is_some());
                self.end_lease(lease, is_granted.then(|| "its owner is gone".into()));
            }
            self.requeue(&asker);
        }
        self.actors_orphaned_by(process);
        self.groups_orphaned_by(process);
        let Some(id) = job else { return };
        if self.jobs.get(&id).is_none_or(|job| job.spec.driver.process != process || job.is_over) {
            return;
        }
        self.departed.insert(process, Some(id));
        self.actors_of_job_end(id);
        self.groups_of_job_end(id);
        let mut ended_on = BTreeSet::new();
        for node in self.nodes.ids() {
            let knows = self.nodes.get(node).is_some_and(|node| node.jobs.contains(&id));
            if knows {
                self.nodes.change(node, |node| node.jobs.remove(&id));
                self.order(node, NodeMessage::EndJob { job: id });
                ended_on.insert(node);
            }
        }
        if let Some(job) = self.jobs.get_mut(&id) {
            job.is_over = true;
            job.ended_on = ended_on;
            let spec = Box::new(job.spec.without_local());
            self.record(Fact::Job(spec, false));
        }
        self.forget_job_if_over(id);
    }

    fn waiting(&mut self, process: ProcessId, lease: Option<LeaseId>, wait: Wait) {
        let task = wait.task;
        self.waits.begin(self.now, process, wait);
        if let Some(lease) = lease {
            self.note_absent_wait(lease, task, true);
            self.lease_waits(lease, task, true);
        }
    }

    fn tell_of_deadlocks(&mut self) {
        for Circle { process, task, on, members } in self.waits.confirmed(self.now) {
            self.tell(process, HeadEvent::Deadlock { task, on, cycle: members });
        }
    }

    fn resumed(&mut self, lease: Option<LeaseId>, task: wingbeat_core::TaskId) {
        self.waits.end(task);
        if let Some(lease) = lease {
            self.note_absent_wait(lease, task, false);
            self.lease_waits(lease, task, false);
        }
    }
}

/// Everything that comes after a key, or all.
fn after<K: Ord, V>(map: &BTreeMap<K, V>, last: Option<K>) -> impl Iterator<Item = (&K, &V)> {
    use std::ops::Bound::{Excluded, Unbounded};
    map.range((last.map_or(Unbounded, Excluded), Unbounded))
}

#[cfg(test)]
mod tests;
