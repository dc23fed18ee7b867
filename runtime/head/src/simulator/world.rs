//! Time, links, faults, and what must hold.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use wingbeat_core::resources::GPU;
use wingbeat_core::spec::*;
use wingbeat_core::*;
use wingbeat_net::messages::{HeadEvent, HeadMessage, LeaseStart, NodeInfo, NodeMessage};

use super::daemon::Daemon;
use super::owner::Owner;
use super::{Config, Report};
use crate::state::{Action, BundlePlace, Event, Fact, FactKey, Millis, State};

/// Drivers at a time.
pub(super) const DRIVERS: u64 = 12;
/// After so much time without anything new, whatever can end has ended.
const SETTLED: Millis = 600_000;

/// What happens at some time.
pub(super) enum Happening {
    ToHead(NodeId, Event),
    ToNode(NodeId, NodeMessage),
    ToProcess(ProcessId, HeadEvent),
    FromProcess(ProcessId, Event),
    Started(NodeId, LeaseId),
    Gone(NodeId, LeaseId),
    TaskDone(ProcessId, LeaseId),
    Resumed(ProcessId, LeaseId, u64),
    Lost(NodeId),
    Here(NodeId),
    Join(Box<NodeInfo>),
    Back(NodeId),
    Reconnect(ProcessId),
    Released(NodeId, u32),
    Tick,
    Chance,
}

pub(super) struct Scheduled {
    pub at: Millis,
    pub turn: u64,
    pub what: Happening,
}

impl PartialEq for Scheduled {
    fn eq(&self, other: &Self) -> bool {
        (self.at, self.turn) == (other.at, other.turn)
    }
}
impl Eq for Scheduled {}
impl PartialOrd for Scheduled {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Scheduled {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.turn).cmp(&(other.at, other.turn))
    }
}

/// A lease as far as the head has said and heard of it.
pub(super) struct Granted {
    pub node: NodeId,
    pub start: LeaseStart,
    /// Told to end, so that another life of its actor may begin.
    pub is_ending: bool,
    /// What it held is free, although the node has not said so: its process serves others.
    pub is_returned: bool,
    pub waiting: u32,
}

/// Everything that there is, and what happens next. Its many fields are one for each kind of thing in it.
pub(super) struct World {
    pub config: Config,
    pub report: Report,
    pub random: StdRng,
    pub state: State,
    pub started_at: Millis,
    pub now: Millis,
    pub turn: u64,
    pub clock: BinaryHeap<Reverse<Scheduled>>,
    pub ticks_at: Option<Millis>,
    pub nodes: BTreeMap<NodeId, Daemon>,
    pub owners: BTreeMap<ProcessId, Owner>,
    pub next_id: u64,
    pub facts: BTreeMap<FactKey, Fact>,
    pub granted: BTreeMap<LeaseId, Granted>,
    /// How many executions wait under leases whose nodes are not back.
    pub absent_waits: BTreeMap<LeaseId, u32>,
    /// What is free of every node, as the head's own words have it.
    pub lives: BTreeMap<ActorId, Incarnation>,
    pub groups: BTreeMap<PlacementGroupId, PlacementGroupSpec>,
    /// Where the bundles of each group are, as was written down.
    pub placed: BTreeMap<PlacementGroupId, Vec<Option<BundlePlace>>>,
    pub actors: Vec<ActorId>,
    /// What each namespace may hold, and the namespace of each job.
    pub quotas: BTreeMap<String, ResourceSet>,
    pub namespaces: BTreeMap<JobId, String>,
    pub touched: BTreeSet<NodeId>,
    pub is_ending: bool,
}

fn amount(value: f64) -> Amount {
    Amount::from_units((value * 10_000.0) as i64)
}

pub(super) fn holding(cpus: f64, gpus: f64) -> ResourceSet {
    ResourceSet::cpus(amount(cpus)).with(GPU, amount(gpus))
}

impl World {
    pub(super) fn new(config: Config) -> World {
        let mut state = State::new(ClusterId(config.seed), 1);
        state.keep_facts();
        World {
            config,
            report: Report::default(),
            random: StdRng::seed_from_u64(config.seed),
            state,
            started_at: 0,
            now: 1,
            turn: 0,
            clock: BinaryHeap::new(),
            ticks_at: None,
            nodes: BTreeMap::new(),
            owners: BTreeMap::new(),
            next_id: 1,
            facts: BTreeMap::new(),
            granted: BTreeMap::new(),
            absent_waits: BTreeMap::new(),
            lives: BTreeMap::new(),
            groups: BTreeMap::new(),
            placed: BTreeMap::new(),
            actors: Vec::new(),
            quotas: BTreeMap::new(),
            namespaces: BTreeMap::new(),
            touched: BTreeSet::new(),
            is_ending: false,
        }
    }

    pub(super) fn run(&mut self) -> Result<(), String> {
        for _ in 0..self.config.nodes {
            let info = self.new_node();
            self.schedule(0, Happening::Join(Box::new(info)));
        }
        for _ in 0..DRIVERS {
            self.new_driver()?;
        }
        self.schedule(1, Happening::Chance);
        while self.report.events < self.config.events {
            self.go_on()?;
        }
        self.end_everything()
    }

    pub(super) fn id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    pub(super) fn schedule(&mut self, after: Millis, what: Happening) {
        self.turn += 1;
        self.clock.push(Reverse(Scheduled { at: self.now + after, turn: self.turn, what }));
    }

    pub(super) fn chance(&mut self, of: u32) -> bool {
        self.random.random_range(0..of) == 0
    }

    pub(super) fn pick<T: Copy>(&mut self, of: &[T]) -> Option<T> {
        (!of.is_empty()).then(|| of[self.random.random_range(0..of.len())])
    }

    /// The next happening.
    pub(super) fn go_on(&mut self) -> Result<(), String> {
        let Some(Reverse(next)) = self.clock.pop() else {
            return Err("nothing will ever happen again".into());
        };
        self.now = self.now.max(next.at);
        self.happen(next.what)
    }

    pub(super) fn happen(&mut self, what: Happening) -> Result<(), String> {
        match what {
            Happening::ToHead(node, event) => {
                if self.nodes.get(&node).is_some_and(|node| node.is_connected) {
                    self.deliver(event)?;
                }
            }
            Happening::ToNode(node, message) => self.node_hears(node, message)?,
            Happening::ToProcess(process, event) => self.process_hears(process, event),
            Happening::FromProcess(process, event) => {
                if self.owners.contains_key(&process) {
                    self.deliver(event)?;
                }
            }
            Happening::Started(node, lease) => self.worker_started(node, lease),
            Happening::Gone(node, lease) => self.worker_gone(node, lease),
            Happening::TaskDone(process, lease) => self.task_done(process, lease),
            Happening::Resumed(process, lease, seq) => {
                let task = TaskId { owner: process, seq };
                self.say(process, HeadMessage::Resumed { lease: Some(lease), task });
            }
            Happening::Lost(node) => self.node_lost(node)?,
            Happening::Here(node) => self.deliver(Event::NodeBack(node))?,
            Happening::Join(info) => self.node_joins(*info)?,
            Happening::Back(node) => self.node_is_back(node)?,
            Happening::Reconnect(process) => self.process_is_back(process)?,
            Happening::Released(node, device) => {
                if let Some(daemon) = self.nodes.get_mut(&node) {
                    daemon.held.remove(&device);
                    self.say_held(node);
                }
            }
            Happening::Tick => {
                self.ticks_at = None;
                self.deliver(Event::Tick)?;
            }
            Happening::Chance => {
                if !self.is_ending {
                    for _ in 0..self.random.random_range(1..4) {
                        self.something_new()?;
                    }
                    let pause = self.random.random_range(0..2);
                    self.schedule(pause, Happening::Chance);
                }
            }
        }
        Ok(())
    }

    /// The head takes an event in.
    pub(super) fn deliver(&mut self, event: Event) -> Result<(), String> {
        self.note(&event);
        if self.config.trace {
            eprintln!("{} at {} ms: {event:?}", self.report.events + 1, self.now);
        }
        let now = self.now - self.started_at;
        let (actions, took) = {
            let begun = Instant::now();
            let actions = self.state.step(now, event);
            (actions, begun.elapsed())
        };
        self.after_step(actions, took)
    }

    /// The head answers a question.
    pub(super) fn ask<R>(
        &mut self,
        question: impl FnOnce(&mut State, Millis) -> (R, Vec<Action>),
    ) -> Result<R, String> {
        let now = self.now - self.started_at;
        let begun = Instant::now();
        let (answer, actions) = question(&mut self.state, now);
        let took = begun.elapsed();
        self.after_step(actions, took)?;
        Ok(answer)
    }

    pub(super) fn after_step(&mut self, actions: Vec<Action>, took: Duration) -> Result<(), String> {
        self.report.events += 1;
        self.report.deciding += took;
        for fact in self.state.take_facts() {
            match &fact {
                Fact::Group(spec, places) => drop(self.placed.insert(spec.id, places.clone())),
                Fact::GroupGone(id) => drop(self.placed.remove(id)),
                _ => {}
            }
            if fact.is_end() {
                self.facts.remove(&fact.key());
            } else {
                self.facts.insert(fact.key(), fact);
            }
        }
        let mut granted = Vec::new();
        for action in actions {
            if self.config.trace {
                eprintln!("    {action:?}");
            }
            match action {
                Action::Tell(process, event) => self.head_tells(process, event)?,
                Action::Order(node, message) => {
                    if let NodeMessage::StartLease(start) = &message {
                        granted.push((node, start.lease));
                    }
                    self.head_orders(node, message)?;
                }
            }
        }
        for (node, lease) in granted {
            self.check_node(node, lease)?;
            self.check_quota(lease)?;
        }
        self.check()?;
        let next = self.state.next_tick().map(|after| self.now + after);
        if let Some(at) = next
            && self.ticks_at.is_none_or(|planned| at < planned)
        {
            self.ticks_at = Some(at);
            self.schedule(at - self.now, Happening::Tick);
        }
        Ok(())
    }

    pub(super) fn head_tells(&mut self, process: ProcessId, event: HeadEvent) -> Result<(), String> {
        if let HeadEvent::PlacementGroup { group, state } = &event
            && let PlacementGroupState::Placed { nodes, .. } = state
        {
            self.check_placed(*group, nodes)?;
        }
        let delay = self.random.random_range(0..5);
        let Some(owner) = self.owners.get_mut(&process) else { return Ok(()) };
        owner.from_head_at = owner.from_head_at.max(self.now + delay);
        let after = owner.from_head_at - self.now;
        self.schedule(after, Happening::ToProcess(process, event));
        Ok(())
    }

    pub(super) fn head_orders(&mut self, node: NodeId, message: NodeMessage) -> Result<(), String> {
        self.touched.insert(node);
        match &message {
            NodeMessage::StartLease(start) => self.check_grant(node, start)?,
            NodeMessage::EndLease { lease, kill } => {
                if let Some(granted) = self.granted.get_mut(lease) {
                    granted.is_ending = true;
                    granted.is_returned = kill.is_none() && granted.start.gpus.is_empty();
                }
            }
            _ => {}
        }
        let faults = self.config.faults;
        let delay = self.random.random_range(0..5);
        let Some(daemon) = self.nodes.get_mut(&node) else {
            return Err(format!("{node} is ordered, and is not there"));
        };
        daemon.to_node_at = daemon.to_node_at.max(self.now + delay * if faults { daemon.slowness } else { 1 });
        let after = daemon.to_node_at - self.now;
        self.schedule(after, Happening::ToNode(node, message));
        Ok(())
    }

    /// Ends everything, and finds everything free.
    pub(super) fn end_everything(&mut self) -> Result<(), String> {
        self.is_ending = true;
        let groups: Vec<PlacementGroupId> = self.groups.keys().copied().collect();
        for group in groups {
            self.ask(|state, now| ((), state.remove_placement_group(now, group)))?;
        }
        for process in self.owners.keys().copied().collect::<Vec<_>>() {
            self.process_gone(process)?;
        }
        let actors: Vec<ActorId> = self.state.picture().actors.iter().map(|row| row.id).collect();
        for actor in actors {
            let kill = HeadMessage::KillActor { actor, may_restart: false };
            self.deliver(Event::Says(ProcessId(0).into(), kill))?;
        }
        let end = self.now + SETTLED;
        while self.now < end && !self.clock.is_empty() {
            self.go_on()?;
            // A head that came back in the meantime may have found actors again.
            if self.state.next_tick().is_none() && self.clock.is_empty() {
                break;
            }
        }
        let actors: Vec<ActorId> = self.state.picture().actors.iter().map(|row| row.id).collect();
        for actor in actors {
            let kill = HeadMessage::KillActor { actor, may_restart: false };
            self.deliver(Event::Says(ProcessId(0).into(), kill))?;
        }
        while let Some(Reverse(next)) = self.clock.peek() {
            if next.at > end + SETTLED {
                break;
            }
            self.go_on()?;
        }
        self.state.audit_all()?;
        let picture = self.state.picture();
        for node in &picture.nodes {
            if !self.state.is_idle(node.info.id) {
                return Err(format!(
                    "everything is over, and {} has {} of {} free and {} leases",
                    node.info.id, node.available, node.info.resources, node.leases
                ));
            }
        }
        if let Some(row) = picture.pending.first() {
            return Err(format!("everything is over, and {} waits: {}", row.name, row.why));
        }
        if let Some(job) = picture.jobs.first() {
            return Err(format!("everything is over, and {} is still known", job.id));
        }
        if self.state.next_tick().is_some() {
            return Err("everything is over, and the head still wakes up".into());
        }
        self.check_facts()
    }
}
