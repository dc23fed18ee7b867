//! Time, links, faults, and what must hold.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use wingbeat_core::error::Error;
use wingbeat_core::resources::{CPU, GPU};
use wingbeat_core::spec::*;
use wingbeat_core::*;
use wingbeat_net::messages::{
    DeviceInfo, HeadEvent, LeaseHolder, LeaseStart, NodeInfo, NodeMessage, Wait, WorkerDeath,
};

use super::daemon::{Daemon, Phase, Serving, address, worker_of};
use super::owner::{Backlog, Held, Owner};
use super::{Config, Report};
use crate::state::{Action, BundlePlace, Event, Fact, FactKey, Millis, State};

/// Drivers at a time.
const DRIVERS: u64 = 12;
/// Everything is checked so often in a run that is not thorough.
const CHECK_ALL_EVERY: u64 = 20_000;
/// After so much time without anything new, whatever can end has ended.
const SETTLED: Millis = 600_000;

/// What happens at some time.
enum Happening {
    ToHead(NodeId, Event),
    ToNode(NodeId, NodeMessage),
    ToProcess(ProcessId, HeadEvent),
    FromProcess(ProcessId, Event),
    Started(NodeId, LeaseId),
    Gone(NodeId, LeaseId),
    TaskDone(ProcessId, LeaseId),
    Resumed(ProcessId, LeaseId, u64),
    Lost(NodeId),
    Join(Box<NodeInfo>),
    Back(NodeId),
    Reconnect(ProcessId),
    Released(NodeId, u32),
    Tick,
    Chance,
}

struct Scheduled {
    at: Millis,
    turn: u64,
    what: Happening,
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
struct Granted {
    node: NodeId,
    start: LeaseStart,
    /// Told to end, so that another life of its actor may begin.
    is_ending: bool,
    /// What it held is free, although the node has not said so: its process serves others.
    is_returned: bool,
    waiting: u32,
}

pub(super) struct World {
    config: Config,
    pub report: Report,
    random: StdRng,
    state: State,
    started_at: Millis,
    now: Millis,
    turn: u64,
    clock: BinaryHeap<Reverse<Scheduled>>,
    ticks_at: Option<Millis>,
    nodes: BTreeMap<NodeId, Daemon>,
    owners: BTreeMap<ProcessId, Owner>,
    next_id: u64,
    facts: BTreeMap<FactKey, Fact>,
    granted: BTreeMap<LeaseId, Granted>,
    /// What is free of every node, as the head's own words have it.
    lives: BTreeMap<ActorId, Incarnation>,
    groups: BTreeMap<PlacementGroupId, PlacementGroupSpec>,
    /// Where the bundles of each group are, as was written down.
    placed: BTreeMap<PlacementGroupId, Vec<Option<BundlePlace>>>,
    actors: Vec<ActorId>,
    touched: BTreeSet<NodeId>,
    is_ending: bool,
}

fn amount(value: f64) -> Amount {
    Amount::from_units((value * 10_000.0) as i64)
}

fn holding(cpus: f64, gpus: f64) -> ResourceSet {
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
            lives: BTreeMap::new(),
            groups: BTreeMap::new(),
            placed: BTreeMap::new(),
            actors: Vec::new(),
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

    fn id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    fn schedule(&mut self, after: Millis, what: Happening) {
        self.turn += 1;
        self.clock.push(Reverse(Scheduled { at: self.now + after, turn: self.turn, what }));
    }

    fn chance(&mut self, of: u32) -> bool {
        self.random.random_range(0..of) == 0
    }

    fn pick<T: Copy>(&mut self, of: &[T]) -> Option<T> {
        (!of.is_empty()).then(|| of[self.random.random_range(0..of.len())])
    }

    /// The next happening.
    fn go_on(&mut self) -> Result<(), String> {
        let Some(Reverse(next)) = self.clock.pop() else {
            return Err("nothing will ever happen again".into());
        };
        self.now = self.now.max(next.at);
        self.happen(next.what)
    }

    fn happen(&mut self, what: Happening) -> Result<(), String> {
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
                self.say(process, Event::Resumed(Some(lease), task));
            }
            Happening::Lost(node) => self.node_lost(node)?,
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

    // ---- the head ----

    /// The head takes an event in.
    fn deliver(&mut self, event: Event) -> Result<(), String> {
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
    fn ask<R>(&mut self, question: impl FnOnce(&mut State, Millis) -> (R, Vec<Action>)) -> Result<R, String> {
        let now = self.now - self.started_at;
        let begun = Instant::now();
        let (answer, actions) = question(&mut self.state, now);
        let took = begun.elapsed();
        self.after_step(actions, took)?;
        Ok(answer)
    }

    fn after_step(&mut self, actions: Vec<Action>, took: Duration) -> Result<(), String> {
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

    /// Keeps its own account of what an event gives back.
    fn note(&mut self, event: &Event) {
        match event {
            Event::Ended(lease) | Event::Failed(lease, _) => {
                if let Some(granted) = self.granted.remove(lease) {
                    self.touched.insert(granted.node);
                }
            }
            Event::Waiting(_, Some(lease), _) => {
                if let Some(granted) = self.granted.get_mut(lease) {
                    granted.waiting += 1;
                    self.touched.insert(granted.node);
                }
            }
            Event::Resumed(Some(lease), _) => {
                if let Some(granted) = self.granted.get_mut(lease) {
                    granted.waiting = granted.waiting.saturating_sub(1);
                    self.touched.insert(granted.node);
                }
            }
            Event::WorkerDied(death) => {
                // Its process is gone, though not all that it had started.
                if let Some(granted) = death.lease.and_then(|lease| self.granted.get_mut(&lease)) {
                    granted.is_ending = true;
                }
            }
            Event::NodeLost(node, _) => self.granted.retain(|_, granted| granted.node != *node),
            _ => {}
        }
    }

    fn check(&mut self) -> Result<(), String> {
        let is_due = self.report.events.is_multiple_of(CHECK_ALL_EVERY);
        if self.config.thorough || is_due {
            self.touched.clear();
            self.state.audit_all()?;
        } else {
            self.state.audit(std::mem::take(&mut self.touched))?;
        }
        if self.config.thorough
            && let Some(who) = self.state.overlooked()
        {
            return Err(who);
        }
        if is_due || (self.config.thorough && self.report.events.is_multiple_of(50)) {
            self.check_facts()?;
        }
        Ok(())
    }

    /// What was written down is what the state is.
    fn check_facts(&self) -> Result<(), String> {
        let mut durable: BTreeMap<FactKey, String> = BTreeMap::new();
        for fact in self.state.durable() {
            durable.insert(fact.key(), format!("{fact:?}"));
        }
        for (key, fact) in &self.facts {
            match durable.remove(key) {
                Some(now) if now == format!("{fact:?}") => {}
                Some(now) => return Err(format!("written down was {fact:?}, and it is {now}")),
                None => return Err(format!("written down was {fact:?}, which is no more")),
            }
        }
        match durable.into_values().next() {
            Some(unwritten) => Err(format!("never written down was {unwritten}")),
            None => Ok(()),
        }
    }

    fn head_tells(&mut self, process: ProcessId, event: HeadEvent) -> Result<(), String> {
        if let HeadEvent::PlacementGroup { group, state } = &event
            && let PlacementGroupState::Placed { nodes } = state
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

    /// All bundles have their places, as the strategy and their labels say.
    fn check_placed(&mut self, id: PlacementGroupId, nodes: &[NodeId]) -> Result<(), String> {
        let Some(spec) = self.groups.get(&id) else { return Err(format!("{id} was placed and never asked for")) };
        if nodes.len() != spec.bundles.len() {
            return Err(format!("{} of {} bundles of {id} were placed", nodes.len(), spec.bundles.len()));
        }
        let distinct: BTreeSet<&NodeId> = nodes.iter().collect();
        match spec.strategy {
            PlacementStrategy::StrictPack if distinct.len() > 1 => {
                return Err(format!("{id} must be on one node, and is on {}", distinct.len()));
            }
            PlacementStrategy::StrictSpread if distinct.len() < nodes.len() => {
                return Err(format!("the bundles of {id} must be apart, and are on {} nodes", distinct.len()));
            }
            _ => {}
        }
        for (bundle, node) in spec.bundles.iter().zip(nodes) {
            let Some(daemon) = self.nodes.get(node) else {
                return Err(format!("{id} was placed on {node}, which is gone"));
            };
            let matches = |selector: &labels::Selector| selector.matches(&daemon.info.labels);
            if !bundle.labels.is_empty() && !bundle.labels.iter().any(matches) {
                return Err(format!("a bundle of {id} is on {node}, whose labels it does not want"));
            }
        }
        self.report.groups += 1;
        self.report.decisions += nodes.len() as u64;
        self.touched.extend(nodes);
        Ok(())
    }

    fn head_orders(&mut self, node: NodeId, message: NodeMessage) -> Result<(), String> {
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

    /// A grant by the head's own words: nothing is given twice, and an actor lives once at a time.
    fn check_grant(&mut self, node: NodeId, start: &LeaseStart) -> Result<(), String> {
        let id = start.lease;
        self.report.decisions += 1;
        if let LeaseHolder::Actor(spec, life) = &start.holder {
            let other = self.granted.values().find(|other| {
                !other.is_ending && matches!(&other.start.holder, LeaseHolder::Actor(other, _) if other.id == spec.id)
            });
            if other.is_some() {
                return Err(format!("{} lives twice", spec.id));
            }
            if self.lives.insert(spec.id, *life).is_some_and(|before| before > *life) {
                return Err(format!("{} goes back to an earlier life", spec.id));
            }
        }
        if self.granted.contains_key(&id) {
            return Err(format!("{id} was granted twice"));
        }
        let granted = Granted { node, start: start.clone(), is_ending: false, is_returned: false, waiting: 0 };
        self.granted.insert(id, granted);
        let sum: i64 = start.gpus.iter().map(|(_, amount)| amount.units()).sum();
        if sum != start.resources.get(GPU).units() {
            return Err(format!("{id} holds {} and other devices: {:?}", start.resources, start.gpus));
        }
        Ok(())
    }

    /// By the head's own words, a node on which it granted something has it all.
    fn check_node(&self, node: NodeId, lease: LeaseId) -> Result<(), String> {
        let (Some(daemon), Some(new)) = (self.nodes.get(&node), self.granted.get(&lease)) else { return Ok(()) };
        let mut held = ResourceSet::new();
        let mut devices: BTreeMap<u32, Amount> = BTreeMap::new();
        let bundle_at = |group: PlacementGroupId, index: u32| {
            let place = self.placed.get(&group).and_then(|places| places.get(index as usize)?.as_ref());
            place.filter(|place| place.node == node)
        };
        for granted in self.granted.values().filter(|granted| granted.node == node && !granted.is_returned) {
            if granted.start.bundle.is_some_and(|(group, index)| bundle_at(group, index).is_some()) {
                continue;
            }
            let mut resources = granted.start.resources.clone();
            if granted.waiting > 0 {
                resources.set(CPU, Amount::ZERO);
            }
            held.add(&resources);
            for (number, amount) in &granted.start.gpus {
                let of = devices.entry(*number).or_default();
                *of = *of + *amount;
            }
        }
        for place in self.placed.values().flatten().flatten().filter(|place| place.node == node) {
            held.add(&place.resources);
            for (number, amount) in &place.devices {
                let of = devices.entry(*number).or_default();
                *of = *of + *amount;
            }
        }
        let total = &daemon.info.resources;
        for (name, _) in new.start.resources.iter().filter(|_| new.start.bundle.is_none()) {
            if held.get(name) > total.get(name) {
                return Err(format!("{} {name} of {node} are given away, and it has {total}", held.get(name)));
            }
        }
        match devices.iter().find(|(_, amount)| **amount > Amount::ONE) {
            Some((number, amount)) => Err(format!("{amount} of device {number} of {node} are given away")),
            None => Ok(()),
        }
    }

    // ---- nodes ----

    fn new_node(&mut self) -> NodeInfo {
        let id = self.id();
        let kind = self.random.random_range(0..10);
        let (cpus, gpus) = [(4, 0), (8, 0), (16, 0), (64, 0), (8, 0), (4, 0), (16, 2), (32, 4), (64, 8), (2, 0)][kind];
        let zone = ["a", "b", "c"][self.random.random_range(0..3)];
        let mut resources = holding(f64::from(cpus), f64::from(gpus)).with("memory", Amount::whole(cpus * 4));
        if kind == 4 {
            resources.set("license", Amount::whole(2));
        }
        let device = |number: u32| DeviceInfo {
            memory: 80 << 30,
            island: Some(number / 4),
            numa: Some(number / 4),
            ..DeviceInfo::default()
        };
        NodeInfo {
            id: NodeId(id),
            address: address(ProcessId(id)),
            hostname: format!("host{id}"),
            resources,
            devices: (0..gpus).map(device).collect(),
            labels: BTreeMap::from([("zone".to_owned(), zone.to_owned())]),
            store_bytes: 0,
        }
    }

    fn node_joins(&mut self, info: NodeInfo) -> Result<(), String> {
        let slowness = if self.chance(20) { 40 } else { 1 };
        self.nodes.insert(info.id, Daemon::new(info.clone(), slowness));
        self.deliver(Event::NodeJoined(Box::new(info), Vec::new()))
    }

    /// The head learns that a node is gone; the next time, it is another node.
    fn node_lost(&mut self, id: NodeId) -> Result<(), String> {
        let Some(daemon) = self.nodes.remove(&id) else { return Ok(()) };
        self.report.nodes_lost += 1;
        let workers: Vec<ProcessId> = daemon.leases.keys().map(|lease| worker_of(*lease)).collect();
        self.deliver(Event::NodeLost(id, "the simulation".into()))?;
        for worker in workers {
            self.process_gone(worker)?;
        }
        if !self.is_ending {
            let info = NodeInfo { ..self.new_node() };
            let after = self.random.random_range(100..5_000);
            self.schedule(after, Happening::Join(Box::new(info)));
        }
        Ok(())
    }

    fn send(&mut self, node: NodeId, event: Event) {
        let faults = self.config.faults;
        let delay = self.random.random_range(0..4);
        let is_repeated = faults && self.chance(100);
        let Some(daemon) = self.nodes.get_mut(&node) else { return };
        daemon.to_head_at = daemon.to_head_at.max(self.now + delay * if faults { daemon.slowness } else { 1 });
        let after = daemon.to_head_at - self.now;
        if is_repeated {
            self.schedule(after, Happening::ToHead(node, event.clone()));
        }
        self.schedule(after, Happening::ToHead(node, event));
    }

    fn node_hears(&mut self, node: NodeId, message: NodeMessage) -> Result<(), String> {
        let fails = self.config.faults && self.chance(200);
        let delay = self.random.random_range(1..8);
        let Some(daemon) = self.nodes.get_mut(&node) else { return Ok(()) };
        let delay = delay * daemon.slowness;
        match message {
            NodeMessage::BeginJob(spec) => drop(daemon.jobs.insert(spec.id)),
            NodeMessage::StartLease(start) => {
                if !daemon.jobs.contains(&start.job) {
                    return Err(format!("{node} was given {} of {}, of which it never heard", start.lease, start.job));
                }
                let lease = start.lease;
                if fails {
                    self.send(node, Event::Failed(lease, Error::NoSession));
                    return Ok(());
                }
                daemon.leases.insert(lease, Serving { start: *start, phase: Phase::Starting, has_started: false });
                self.schedule(delay, Happening::Started(node, lease));
            }
            NodeMessage::EndLease { lease, kill } => match daemon.leases.get_mut(&lease) {
                None => self.send(node, Event::Ended(lease)),
                Some(serving) if kill.is_some() || !serving.start.gpus.is_empty() => {
                    serving.phase = Phase::Dying;
                    self.schedule(delay, Happening::Gone(node, lease));
                }
                Some(_) => {
                    daemon.leases.remove(&lease);
                    self.send(node, Event::Ended(lease));
                    self.process_gone(worker_of(lease))?;
                }
            },
            NodeMessage::DrainActor { lease, .. } => {
                if let Some(serving) = daemon.leases.get_mut(&lease) {
                    serving.phase = Phase::Dying;
                    self.schedule(delay, Happening::Gone(node, lease));
                }
            }
            NodeMessage::EndJob { job } => {
                let ended =
                    daemon.leases.iter_mut().filter(|(_, serving)| serving.start.job == job && !serving.is_detached());
                let ended: Vec<LeaseId> = ended
                    .map(|(lease, serving)| {
                        serving.phase = Phase::Dying;
                        *lease
                    })
                    .collect();
                if !daemon.leases.values().any(|serving| serving.start.job == job && serving.is_detached()) {
                    daemon.jobs.remove(&job);
                }
                for lease in ended {
                    self.schedule(delay, Happening::Gone(node, lease));
                }
            }
            NodeMessage::Stop => self.schedule(1, Happening::Lost(node)),
            _ => {}
        }
        Ok(())
    }

    fn worker_started(&mut self, node: NodeId, lease: LeaseId) {
        let fails = self.chance(50);
        let Some(serving) = self.nodes.get_mut(&node).and_then(|daemon| daemon.leases.get_mut(&lease)) else { return };
        if serving.phase != Phase::Starting {
            return;
        }
        serving.phase = Phase::Ready;
        let holder = serving.start.holder.clone();
        serving.has_started = !fails;
        self.send(node, Event::Ready(lease, address(worker_of(lease)), 7));
        if let LeaseHolder::Actor(spec, life) = holder {
            let outcome = if fails { Err(Error::NoSession) } else { Ok(()) };
            self.send(node, Event::ActorStarted(spec.id, life, outcome));
        }
    }

    /// The worker process of a lease, and all that it started, is gone.
    fn worker_gone(&mut self, node: NodeId, lease: LeaseId) {
        let leaks = self.chance(50);
        let Some(daemon) = self.nodes.get_mut(&node) else { return };
        let Some(serving) = daemon.leases.remove(&lease) else { return };
        if serving.phase != Phase::Starting {
            let exit = Exit { code: None, signal: Some(9), stderr: Vec::new(), reason: None };
            let process = worker_of(lease);
            let death = WorkerDeath { process, pid: 7, node, lease: Some(lease), exit, started: 0 };
            self.send(node, Event::WorkerDied(death));
        }
        if leaks && let Some((device, _)) = serving.start.gpus.first() {
            let device = *device;
            if let Some(daemon) = self.nodes.get_mut(&node) {
                daemon.held.insert(device);
            }
            self.say_held(node);
            let after = self.random.random_range(10..2_000);
            self.schedule(after, Happening::Released(node, device));
        }
        self.send(node, Event::Ended(lease));
        // Its own connection breaks at about the same time.
        let worker = worker_of(lease);
        if self.owners.contains_key(&worker) {
            let after = self.random.random_range(0..5);
            self.say_after(worker, after, Event::ProcessLost(worker, None));
        }
    }

    fn say_held(&mut self, node: NodeId) {
        let Some(daemon) = self.nodes.get(&node) else { return };
        let held = daemon.held.iter().map(|device| (*device, "somebody".to_owned())).collect();
        self.send(node, Event::DevicesHeld(node, held));
    }

    // ---- drivers and worker processes ----

    fn say(&mut self, process: ProcessId, event: Event) {
        let delay = self.random.random_range(0..4);
        self.say_after(process, delay, event);
    }

    fn say_after(&mut self, process: ProcessId, delay: Millis, event: Event) {
        let Some(owner) = self.owners.get_mut(&process) else { return };
        owner.to_head_at = owner.to_head_at.max(self.now + delay);
        let after = owner.to_head_at - self.now;
        self.schedule(after, Happening::FromProcess(process, event));
    }

    fn new_driver(&mut self) -> Result<(), String> {
        let id = self.id();
        let namespace = format!("team{}", self.random.random_range(0..4));
        let priority = [0, 0, 0, 5, -5][self.random.random_range(0..5)];
        let executable =
            Executable { hash: String::new(), size: 0, pid: 1, machine: MachineId(1), path: String::new() };
        let spec = JobSpec {
            id: JobId(id),
            name: format!("job{id}"),
            driver: address(ProcessId(id)),
            executable,
            working_dir: String::new(),
            env: BTreeMap::new(),
            namespace,
            priority,
        };
        self.owners.insert(ProcessId(id), Owner::new(Some(spec.clone()), None));
        self.deliver(Event::ProcessConnected(ProcessId(id)))?;
        self.deliver(Event::JobJoined(Box::new(spec)))
    }

    fn process_gone(&mut self, process: ProcessId) -> Result<(), String> {
        let Some(owner) = self.owners.remove(&process) else { return Ok(()) };
        self.deliver(Event::ProcessLost(process, owner.job.map(|job| job.id)))
    }

    fn demand(&mut self, process: ProcessId, shape: &Shape) {
        let Some(wanted) = self.owners.get(&process).and_then(|owner| owner.demands.get(shape)).map(Backlog::wanted)
        else {
            return;
        };
        let event = Event::Demand(process, shape.clone(), wanted, "task".into());
        if self.config.faults && self.chance(100) {
            self.say(process, event.clone());
        }
        self.say(process, event);
    }

    fn process_hears(&mut self, process: ProcessId, event: HeadEvent) {
        let Some(owner) = self.owners.get_mut(&process) else { return };
        match event {
            HeadEvent::Granted { shape, lease, node, .. } => {
                let backlog = owner.demands.entry((*shape).clone()).or_default();
                if backlog.left == 0 {
                    self.say(process, Event::Returned(process, lease));
                    return;
                }
                backlog.left -= 1;
                backlog.held.insert(lease, Held { node, is_recalled: false });
                self.begin_task(process, lease);
            }
            HeadEvent::Recall(lease) => {
                if let Some((_, backlog)) = owner.backlog_of(lease)
                    && let Some(held) = backlog.held.get_mut(&lease)
                {
                    held.is_recalled = true;
                }
            }
            HeadEvent::Refused { shape, .. } => {
                if let Some(backlog) = owner.demands.get_mut(&shape) {
                    backlog.left = 0;
                }
            }
            HeadEvent::WorkerDied(death) => {
                if let Some(lease) = death.lease {
                    self.lease_broke(process, lease);
                }
            }
            HeadEvent::NodeDied { node, .. } => {
                let backlogs = owner.demands.values().flat_map(|backlog| backlog.held.iter());
                let lost: Vec<LeaseId> =
                    backlogs.filter(|(_, held)| held.node == node).map(|(lease, _)| *lease).collect();
                for lease in lost {
                    self.lease_broke(process, lease);
                }
            }
            _ => {}
        }
    }

    fn begin_task(&mut self, process: ProcessId, lease: LeaseId) {
        let lasts =
            if self.chance(30) { self.random.random_range(200..3_000) } else { self.random.random_range(1..60) };
        self.schedule(lasts, Happening::TaskDone(process, lease));
        let worker = worker_of(lease);
        if self.owners.contains_key(&worker) && self.chance(2) {
            let seq = self.id();
            let wait = Wait { task: TaskId { owner: worker, seq }, name: "t".into(), actor: None, on: Vec::new() };
            self.say(worker, Event::Waiting(worker, Some(lease), wait));
            let after = self.random.random_range(4..80);
            self.schedule(after, Happening::Resumed(worker, lease, seq));
        }
    }

    /// The worker process of a lease is gone: its task is tried again.
    fn lease_broke(&mut self, process: ProcessId, lease: LeaseId) {
        let Some(owner) = self.owners.get_mut(&process) else { return };
        let Some((shape, backlog)) = owner.backlog_of(lease) else { return };
        backlog.held.remove(&lease);
        backlog.left += 1;
        let shape = shape.clone();
        self.demand(process, &shape);
    }

    fn task_done(&mut self, process: ProcessId, lease: LeaseId) {
        let stops = self.is_ending;
        let Some(owner) = self.owners.get_mut(&process) else { return };
        let Some((shape, backlog)) = owner.backlog_of(lease) else { return };
        self.report.tasks += 1;
        let goes_on = backlog.left > 0 && !stops && backlog.held.get(&lease).is_some_and(|held| !held.is_recalled);
        if goes_on {
            backlog.left -= 1;
            return self.begin_task(process, lease);
        }
        backlog.held.remove(&lease);
        let shape = shape.clone();
        self.say(process, Event::Returned(process, lease));
        self.demand(process, &shape);
    }

    // ---- what may happen ----

    fn shape(&mut self) -> Shape {
        let resources = match self.random.random_range(0..14) {
            0..=5 => holding(1.0, 0.0),
            6 => holding(4.0, 0.0),
            7 => holding(0.5, 0.0),
            8 => holding(1.0, 1.0),
            9 => holding(0.0, 0.25),
            10 => holding(2.0, 2.0),
            11 => holding(1.0, 0.0).with("memory", Amount::whole(8)),
            12 => holding(1.0, 0.0).with("license", Amount::ONE),
            _ => holding(8.0, 4.0),
        };
        let mut shape = Shape { patient: self.chance(2), ..Shape::of(resources) };
        match self.random.random_range(0..12) {
            0 => shape.strategy = Strategy::Spread,
            1 => {
                let nodes: Vec<NodeId> = self.nodes.keys().copied().take(32).collect();
                if let Some(node) = self.pick(&nodes) {
                    shape.strategy = Strategy::Node { node, soft: self.chance(2) };
                }
            }
            2 => shape.labels = vec!["zone=a".parse().unwrap_or_default()],
            3 => {
                let rules = ["zone in (a)", "zone != a"].map(|rule| rule.parse().unwrap_or_default());
                shape.labels = rules.to_vec();
            }
            4 | 5 => {
                let groups: Vec<PlacementGroupId> = self.groups.keys().copied().collect();
                if let Some(group) = self.pick(&groups) {
                    let index = self.chance(2).then(|| self.random.random_range(0..3));
                    shape.strategy = Strategy::Bundle { group, index };
                }
            }
            6 if shape.resources.get(GPU).is_zero() => shape.gpu_memory = 20 << 30,
            _ => {}
        }
        shape
    }

    fn something_new(&mut self) -> Result<(), String> {
        let owners: Vec<ProcessId> = self.owners.keys().copied().collect();
        let Some(process) = self.pick(&owners) else { return self.new_driver() };
        let drivers: Vec<ProcessId> =
            self.owners.iter().filter(|(_, owner)| owner.job.is_some()).map(|(process, _)| *process).collect();
        // As much work as there are nodes for it.
        let scale = (self.config.nodes as u32 / 32).clamp(1, 100);
        match self.random.random_range(0..100) {
            0..=39 => {
                let shape = self.shape();
                let more =
                    self.random.random_range(1..20) * if self.owners[&process].job.is_some() { scale } else { 1 };
                if let Some(owner) = self.owners.get_mut(&process) {
                    let backlog = owner.demands.entry(shape.clone()).or_default();
                    // Nobody piles up work for ever.
                    backlog.left = (backlog.left + more).min(30 * scale);
                }
                self.demand(process, &shape);
            }
            40..=49 => self.new_actor(process)?,
            50..=54 => {
                if let Some(actor) = self.pick_actor() {
                    let may_restart = self.chance(2);
                    self.say(process, Event::Kill(actor, may_restart));
                }
            }
            55..=58 => {
                if let Some(actor) = self.pick_actor() {
                    self.say(process, Event::Terminate(actor, "the simulation".into()));
                }
            }
            59..=68 => self.new_group(process)?,
            69..=76 => {
                let groups: Vec<PlacementGroupId> = self.groups.keys().copied().collect();
                if let Some(group) = self.pick(&groups) {
                    self.ask(|state, now| ((), state.remove_placement_group(now, group)))?;
                }
            }
            77..=80 => self.new_owner()?,
            81 | 82 => {
                let namespace = format!("team{}", self.random.random_range(0..4));
                let cpus = f64::from(self.random.random_range(8..32 * scale));
                let limit = self.chance(2).then(|| holding(cpus, cpus / 8.0));
                self.ask(|state, now| ((), state.quota(now, &namespace, limit)))?;
            }
            83 | 84 => {
                let nodes: Vec<NodeId> = self.nodes.keys().copied().collect();
                if let Some(node) = self.pick(&nodes).filter(|node| self.nodes[node].is_connected) {
                    let within = (!self.chance(3)).then(|| self.random.random_range(0..2_000));
                    let stops = self.chance(4);
                    // The head may know already that the node is gone.
                    let _ = self.ask(|state, now| state.drain(now, node, within, "test".into(), stops))?;
                }
            }
            85 if drivers.len() > DRIVERS as usize / 2 => {
                if let Some(driver) = self.pick(&drivers) {
                    self.process_gone(driver)?;
                }
            }
            86 if drivers.len() < DRIVERS as usize => self.new_driver()?,
            87..=89 => self.crash_a_worker(),
            90 if self.config.faults => {
                let nodes: Vec<NodeId> = self.nodes.keys().copied().collect();
                if let Some(node) = self.pick(&nodes) {
                    self.cut_off(node);
                }
            }
            91 if self.config.faults && self.chance(40) => self.restart_head()?,
            _ => {}
        }
        Ok(())
    }

    fn pick_actor(&mut self) -> Option<ActorId> {
        let at = (!self.actors.is_empty()).then(|| self.random.random_range(0..self.actors.len()))?;
        Some(self.actors.swap_remove(at))
    }

    fn new_actor(&mut self, process: ProcessId) -> Result<(), String> {
        let Some(job) = self.job_of(process) else { return Ok(()) };
        let id = self.id();
        let mut placement = self.shape();
        let holds = if self.chance(3) { ResourceSet::new() } else { placement.resources.clone() };
        if placement.gpu_memory == 0 && holds.is_empty() {
            placement.resources.set(CPU, Amount::ONE);
            placement.resources.set(GPU, Amount::ZERO);
        }
        let name = self.chance(3).then(|| ScopedName { namespace: job.namespace.clone(), name: format!("actor{id}") });
        let spec = ActorSpec {
            id: ActorId(id),
            job: job.id,
            class: FunctionId(7),
            class_name: "Counter".into(),
            args: Vec::new(),
            placement,
            holds,
            max_restarts: [0, 1, 3, u32::MAX][self.random.random_range(0..4)],
            max_concurrency: 1,
            groups: BTreeMap::new(),
            detached: name.is_some() && self.chance(3),
            name,
            handle: TaskId { owner: process, seq: id }.output(0),
            owner: address(process),
        };
        self.report.actors += 1;
        self.actors.push(ActorId(id));
        if let Some(owner) = self.owners.get_mut(&process) {
            owner.actors.insert(ActorId(id));
        }
        // What can never be is refused: that is an answer, too.
        let _ = self.ask(|state, now| state.create_actor(now, spec, false))?;
        self.say(process, Event::Watch(process, ActorId(id)));
        Ok(())
    }

    fn job_of(&self, process: ProcessId) -> Option<JobSpec> {
        let owner = self.owners.get(&process)?;
        if let Some(job) = &owner.job {
            return Some(job.clone());
        }
        let job = self.granted.get(&owner.lease?)?.start.job;
        self.owners.values().filter_map(|owner| owner.job.as_ref()).find(|spec| spec.id == job).cloned()
    }

    fn new_group(&mut self, process: ProcessId) -> Result<(), String> {
        let Some(job) = self.job_of(process) else { return Ok(()) };
        let id = PlacementGroupId(self.id());
        let count = if self.chance(3) { 1 } else { self.random.random_range(1..6) };
        let each = match self.random.random_range(0..5) {
            0 | 1 => holding(1.0, 0.0),
            2 => holding(4.0, 0.0),
            3 => holding(1.0, 1.0),
            _ => holding(0.0, 0.5),
        };
        let labels = if self.chance(6) { vec!["zone=b".parse().unwrap_or_default()] } else { Vec::new() };
        let bundle = BundleSpec { resources: each, gpu_memory: 0, labels };
        let name =
            self.chance(3).then(|| ScopedName { namespace: job.namespace.clone(), name: format!("group{}", id.0) });
        let spec = PlacementGroupSpec {
            id,
            job: job.id,
            detached: name.is_some() && self.chance(3),
            name,
            strategy: [
                PlacementStrategy::Pack,
                PlacementStrategy::Spread,
                PlacementStrategy::StrictPack,
                PlacementStrategy::StrictSpread,
            ][self.random.random_range(0..4)],
            bundles: vec![bundle; count],
            captures_children: self.chance(2),
            patient: self.chance(2),
            owner: address(process),
        };
        self.groups.insert(id, spec.clone());
        // Heard by its first driver, so that every change is seen.
        self.ask(|state, now| {
            let (answer, mut actions) = state.create_group(now, spec);
            actions.extend(state.step(now, Event::WatchGroup(process, id)));
            (answer, actions)
        })?
        .map_or_else(
            |_| {
                self.groups.remove(&id);
                Ok(())
            },
            |_| Ok(()),
        )
    }

    /// A worker process begins to have tasks of its own.
    fn new_owner(&mut self) -> Result<(), String> {
        let ready = self.nodes.values().take(64).flat_map(|daemon| daemon.leases.iter());
        let ready: Vec<LeaseId> =
            ready.filter(|(_, serving)| serving.phase == Phase::Ready).map(|(lease, _)| *lease).collect();
        let Some(lease) = self.pick(&ready).filter(|lease| !self.owners.contains_key(&worker_of(*lease))) else {
            return Ok(());
        };
        self.owners.insert(worker_of(lease), Owner::new(None, Some(lease)));
        self.deliver(Event::ProcessConnected(worker_of(lease)))
    }

    fn crash_a_worker(&mut self) {
        let nodes: Vec<NodeId> = self.nodes.keys().copied().collect();
        let Some(node) = self.pick(&nodes) else { return };
        let serving = self.nodes[&node].leases.iter().filter(|(_, serving)| serving.phase == Phase::Ready);
        let ready: Vec<LeaseId> = serving.map(|(lease, _)| *lease).collect();
        if let Some(lease) = self.pick(&ready) {
            self.worker_gone(node, lease);
        }
    }

    /// A node hears and says nothing for some time; if it is long, the head gives it up.
    fn cut_off(&mut self, node: NodeId) {
        let long = self.chance(2);
        let lasts = self.random.random_range(10..500);
        let Some(daemon) = self.nodes.get_mut(&node) else { return };
        daemon.to_head_at = daemon.to_head_at.max(self.now + lasts);
        daemon.to_node_at = daemon.to_node_at.max(self.now + lasts);
        if long {
            self.schedule(lasts, Happening::Lost(node));
        }
    }

    // ---- the head is started again ----

    fn restart_head(&mut self) -> Result<(), String> {
        self.report.restarts += 1;
        self.check_facts()?;
        let facts: Vec<Fact> = self.facts.values().cloned().collect();
        self.state = State::recover(ClusterId(self.config.seed), self.report.restarts << 40, facts);
        self.state.keep_facts();
        self.started_at = self.now;
        self.ticks_at = None;
        // What was on its way is lost.
        let old = std::mem::take(&mut self.clock);
        for Reverse(scheduled) in old.into_sorted_vec().into_iter().rev() {
            let is_lost = matches!(
                scheduled.what,
                Happening::ToHead(..)
                    | Happening::ToNode(..)
                    | Happening::ToProcess(..)
                    | Happening::FromProcess(..)
                    | Happening::Lost(_)
                    | Happening::Tick
            );
            if !is_lost {
                self.clock.push(Reverse(scheduled));
            }
        }
        self.granted.clear();
        self.placed.clear();
        let nodes: Vec<NodeId> = self.nodes.keys().copied().collect();
        for node in nodes {
            if let Some(daemon) = self.nodes.get_mut(&node) {
                daemon.is_connected = false;
                (daemon.to_head_at, daemon.to_node_at) = (0, 0);
            }
            if self.chance(30) {
                // It died meanwhile: owners notice it by their own connections.
                let daemon = self.nodes.remove(&node);
                for lease in daemon.into_iter().flat_map(|daemon| daemon.leases.into_keys()) {
                    self.owners.remove(&worker_of(lease));
                    let owners: Vec<ProcessId> = self.owners.keys().copied().collect();
                    for owner in owners {
                        self.lease_broke(owner, lease);
                    }
                }
                let info = self.new_node();
                self.schedule(3_000, Happening::Join(Box::new(info)));
            } else {
                let after = self.random.random_range(0..8_000);
                self.schedule(after, Happening::Back(node));
            }
        }
        let owners: Vec<ProcessId> = self.owners.keys().copied().collect();
        for process in owners {
            if self.chance(20) {
                self.owners.remove(&process);
                continue;
            }
            if let Some(owner) = self.owners.get_mut(&process) {
                (owner.to_head_at, owner.from_head_at) = (0, 0);
            }
            let after = self.random.random_range(0..8_000);
            self.schedule(after, Happening::Reconnect(process));
        }
        if let Some(after) = self.state.next_tick() {
            self.ticks_at = Some(self.now + after);
            self.schedule(after, Happening::Tick);
        }
        Ok(())
    }

    fn node_is_back(&mut self, node: NodeId) -> Result<(), String> {
        let Some(daemon) = self.nodes.get_mut(&node).filter(|daemon| !daemon.is_connected) else { return Ok(()) };
        daemon.is_connected = true;
        let (info, running) = (daemon.info.clone(), daemon.running());
        for lease in &running {
            let start = lease.start.clone();
            let granted = Granted { node, start, is_ending: false, is_returned: false, waiting: 0 };
            self.granted.insert(lease.start.lease, granted);
        }
        // What died while the head was away is not on the list, and its end is not told again.
        self.deliver(Event::NodeJoined(Box::new(info), running))?;
        self.say_held(node);
        Ok(())
    }

    fn process_is_back(&mut self, process: ProcessId) -> Result<(), String> {
        let Some(owner) = self.owners.get(&process) else { return Ok(()) };
        let (job, holds) = (owner.job.clone(), owner.holds());
        let shapes: Vec<Shape> = owner.demands.keys().cloned().collect();
        let actors: Vec<ActorId> = owner.actors.iter().copied().collect();
        self.deliver(Event::ProcessConnected(process))?;
        if let Some(job) = job {
            self.deliver(Event::JobJoined(Box::new(job)))?;
        }
        self.deliver(Event::Holds(process, holds))?;
        for shape in shapes {
            self.demand(process, &shape);
        }
        for actor in actors {
            self.say(process, Event::Watch(process, actor));
        }
        let groups: Vec<PlacementGroupId> = self.groups.keys().copied().collect();
        for group in groups {
            self.say(process, Event::WatchGroup(process, group));
        }
        Ok(())
    }

    // ---- the end ----

    /// Ends everything, and finds everything free.
    fn end_everything(&mut self) -> Result<(), String> {
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
            self.deliver(Event::Kill(actor, false))?;
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
            self.deliver(Event::Kill(actor, false))?;
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
