//! The control plane's decisions: a deterministic state machine without IO, clocks or randomness.
//!
//! [`State::step`] takes what happened and when, and answers with what is to be done. It never iterates a
//! randomly seeded map, so that the same events give the same actions.
//!
//! - `pool`, `nodes`, `index`: what there is, device by device; what of it is free; where a shape fits.
//! - `shapes`, `queue`, `placing`: who waits for what, in which order, and who is placed now.
//! - `presence`: nodes that join, are away or lost; `draining`: nodes that are to be free of work.
//! - `jobs`, `processes`: who has connected, what runs for whom, and what ends with them; `departed`: those that have ended.
//! - `hears`: what the head is told by whom.
//! - `lease`: the life of one; `leases`: who wants how many leases, and how a lease ends.
//! - `unfit`: nodes on which a job's program cannot be started.
//! - `fairness`: whose leases are recalled for whom; `keeping`: room for those who wait long.
//! - `quotas`: what a namespace may hold.
//! - `actors`: the lives of actors, and their names.
//! - `groups`, `gangs`: placement groups, and places for all bundles of one or for none.
//! - `waits`: executions that wait for each other in a circle.
//! - `facts`, `recovery`: what survives the head, and how a new one begins with it.
//! - `inputs`: all that changes the state from outside, to be recorded and played back.
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
mod inputs;
mod jobs;
mod keeping;
mod lease;
mod leases;
mod nodes;
mod picture;
mod placing;
mod pool;
mod presence;
mod processes;
mod queue;
mod quotas;
mod recovery;
mod shapes;
mod suspects;
mod unfit;
mod waits;
mod why;

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use wingbeat_core::spec::JobSpec;
use wingbeat_core::{ClusterId, JobId, NodeId, ProcessId};
use wingbeat_net::messages::{HeadEvent, HeadMessage, NodeInfo, NodeMessage, Running};

use actors::Actors;
use departed::Departed;
pub use facts::{BundlePlace, Drained, Fact, FactKey, KeptActor};
use fairness::Reservations;
use groups::Groups;
pub use hears::Speaker;
use inputs::Recorded;
pub use inputs::{Beginning, Input};
use jobs::Job;
use keeping::PATIENCE;
use leases::Leases;
use nodes::Nodes;
pub use picture::Taking;
pub(crate) use processes::the_one_with_pid;
use queue::Queue;
use quotas::Quotas;
pub(crate) use recovery::Absentee;
use shapes::Shapes;
use unfit::Unfit;
use waits::Waits;

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
    /// Nodes on which jobs could not be started.
    unfit: Unfit,
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
            unfit: Unfit::default(),
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
        let input = || Input::Event(event.clone());
        match event {
            Event::Tick => self.begin_tick(now, input),
            _ => self.begin(now, input),
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
        self.end_rests_of_nodes();
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
        let suspects = self.waits.suspects_due(self.now);
        let patient_since = self.now.checked_sub(PATIENCE).map_or(0, |at| at + 1);
        let patience_ends = self.queue.hungry_from(patient_since).map(|since| since + PATIENCE);
        let at = [
            self.actors.rest_ends(),
            self.unfit.rest_ends(),
            self.drain_deadline(),
            self.recovery_ends(),
            patience_ends,
        ];
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

    fn tell(&mut self, process: ProcessId, event: HeadEvent) {
        if self.connected.contains(&process) {
            self.out.push(Action::Tell(process, event));
        }
    }

    fn tell_all(&mut self, event: &HeadEvent) {
        self.out.extend(self.connected.iter().map(|process| Action::Tell(*process, event.clone())));
    }

    fn order(&mut self, node: NodeId, message: NodeMessage) {
        if self.nodes.get(node).is_some() {
            self.out.push(Action::Order(node, message));
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
