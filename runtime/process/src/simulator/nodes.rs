//! Real nodes in a pretended machine: worker processes that start and end, and copies in stores.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use wingbeat_core::error::Error;
use wingbeat_core::spec::Outcome;
use wingbeat_core::{Incarnation, JobId, NodeId, ObjectId, ProcessId};
use wingbeat_head::state::{Event, Speaker};
use wingbeat_net::messages::{HeadMessage, NodeInfo, NodeMessage, WorkerCommand};
use wingbeat_net::recording::{self, Recording};
use wingbeat_node as node;
use wingbeat_node::term::Term;

use super::execution::{Ended, Execution, Number, Running};
use super::process::Process;
use super::programs;
use super::queue::Next;
use super::shapes;
use super::side::address;
use super::site::Site;
use super::size::IDLE;
use super::standing::{Finder, Standing};
use super::standstill;
use super::world::{Happening, World};
use crate::work::Become;

/// Who says what only the head may say.
const HEAD: ProcessId = ProcessId(0);
/// Worker processes with an id of this and more are of the first node.
const WORKERS: u64 = 1_000_000_000;

pub(super) struct Node {
    pub state: node::State,
    pub info: NodeInfo,
    /// It is in the zone of this number.
    number: u64,
    /// Devices that somebody uses without a lease.
    pub held: BTreeSet<u32>,
    pub standing: Standing,
    /// What the next head is to hear, when it is found.
    pub unsaid: Vec<HeadMessage>,
    /// Handed to the guard, and not there yet; of which job.
    starting: BTreeMap<ProcessId, JobId>,
    /// When the last order on its way to a worker process arrives: later ones come after it.
    orders_at: BTreeMap<ProcessId, u64>,
    /// What worker processes that have ended had begun.
    rest: BTreeMap<ProcessId, u64>,
    pub memory: Memory,
    /// Processes in which something is left, as they have said.
    left: BTreeSet<ProcessId>,
    /// Until when it may go on without a word from the head.
    pub term: Term,
}

/// The memory of a node.
#[derive(Default)]
pub(super) struct Memory {
    pub watch: node::memory::Watch,
    /// Until when it is short.
    pub short_until: u64,
    pub is_watched: bool,
}

/// What happens on the machine of a node.
pub(super) enum Machine {
    /// The program of a worker process is there, and the guard can be asked.
    HasProgram(ProcessId, JobId),
    /// It has started and reports.
    Up(ProcessId),
    /// It reads an order.
    Reads(ProcessId, Box<WorkerCommand>, Option<Box<HeadMessage>>),
    /// The guard kills it.
    Killed(ProcessId),
    /// A device is used no more by whoever had no lease on it.
    Released(u32),
    /// Something that the node hears.
    Node(Box<node::Event>),
}

impl Node {
    /// The devices that cannot be given on.
    pub(super) fn held(&self) -> Vec<(u32, String)> {
        self.held.iter().map(|device| (*device, "somebody".to_owned())).collect()
    }
}

impl World {
    pub(super) fn new_node(&mut self) {
        self.new_node_like(self.nodes_made);
    }

    /// One in the place of another, which is to end.
    pub(super) fn replace(&mut self, node: NodeId) {
        let number = self.nodes.get(&node).map_or(self.nodes_made, |node| node.number);
        self.new_node_like(number);
    }

    fn new_node_like(&mut self, number: u64) {
        let id = NodeId(self.shared.id());
        let info = shapes::node(id, number, self.machine_of(id));
        let first_process = ProcessId(WORKERS * (1 + self.nodes_made));
        self.nodes_made += 1;
        // None is kept only because it might be useful, so that more end.
        let idle = self.shared.config.large().map_or(IDLE, |large| large.idle);
        let config = node::Config { node: id, cpus: 0, idle, start: 10_000, first_process };
        let (held, starting, orders_at, rest) = Default::default();
        let mut state = node::State::new(config.clone());
        if self.shared.config.trace {
            state.record_with(Recording::asked_for(
                recording::Machine::Node,
                &format!("{id}-seed{}", self.shared.config.seed),
                config,
            ));
        }
        let standing = if self.is_head_away { Standing::Away } else { Standing::Here };
        self.nodes.insert(
            id,
            Node {
                state,
                info: info.clone(),
                number,
                held,
                standing,
                unsaid: Vec::new(),
                starting,
                orders_at,
                rest,
                memory: Memory::default(),
                left: BTreeSet::new(),
                term: standstill::term(self.shared.now()),
            },
        );
        self.shared.nodes.borrow_mut().insert(id);
        if self.shared.config.large().is_none() {
            self.new_process(id.steward(), (JobId(0), id), false);
        }
        match self.is_head_away {
            true => self.looks_for_head(Finder::Node(id), 2_000),
            false => self.step(Event::NodeJoined(Box::new(info), Default::default())),
        }
    }

    pub(super) fn node_hears(&mut self, id: NodeId, message: NodeMessage) {
        match message {
            NodeMessage::OwnersGone { owners, are_jobs_over } => {
                let is_gone = |object: &ObjectId| owners.contains(&object.owner());
                let is_kept = |object: &ObjectId| {
                    let steward = self.shared.stewards.lock().get(&object.owner()).copied();
                    let steward = steward.and_then(|steward| self.processes.get(&steward));
                    steward.is_some_and(|steward| !steward.owner.keeps(vec![*object], are_jobs_over).is_empty())
                };
                self.shared
                    .copies
                    .borrow_mut()
                    .retain(|(object, node), _| *node != id || !is_gone(object) || is_kept(object));
            }
            NodeMessage::Stop(_) => {
                self.shared.stopped.borrow_mut().insert(id);
                self.node_dies(id);
            }
            message => self.node_steps(id, node::Event::Says(HEAD, message)),
        }
    }

    /// A node takes an event in, and its machine does what it decides.
    pub(super) fn node_steps(&mut self, id: NodeId, event: node::Event) {
        let now = self.shared.now();
        let Some(node) = self.nodes.get_mut(&id) else { return };
        self.shared.trace(|| format!("{id} hears {event:?}"));
        if let node::Event::Says(by, NodeMessage::LeftBehind(is_left)) = &event {
            match is_left {
                true => node.left.insert(*by),
                false => node.left.remove(by),
            };
        }
        for action in node.state.step(now, event) {
            self.shared.trace(|| format!("  {id}: {action:?}"));
            self.node_acts(id, action);
        }
    }

    fn node_acts(&mut self, id: NodeId, action: node::Action) {
        let delay = 1 + self.shared.below(8);
        match action {
            node::Action::ToHead(message) => self.say_to_head(Speaker::Node(id), message),
            node::Action::Launch { process, job, .. } => {
                self.on_machine(id, 2 * delay, Machine::HasProgram(process, job.id));
            }
            node::Action::Kill(process) => self.on_machine(id, delay, Machine::Killed(process)),
            node::Action::Order { process, command, then, .. } => {
                let is_left = self.nodes.get(&id).is_some_and(|node| node.left.contains(&process));
                assert!(!is_left, "{process} gets {command:?}, and something is left there");
                if let Some(process) = self.alive(process) {
                    process.queue.borrow_mut().started = 0;
                }
                self.give_order(id, process, command, then);
            }
            node::Action::Tell(process, command) => self.give_order(id, process, command, None),
            node::Action::ReadRest(process) => {
                let started = self.nodes.get_mut(&id).and_then(|node| node.rest.remove(&process)).unwrap_or(0);
                let rest = node::Event::RestRead { process, stderr: Vec::new(), started };
                self.on_machine(id, delay, Machine::Node(Box::new(rest)));
            }
            node::Action::Forget(process) => {
                if let Some(node) = self.nodes.get_mut(&id) {
                    node.orders_at.remove(&process);
                }
            }
            node::Action::BeginJob(_) | node::Action::ForgetJob(_) => {}
            node::Action::FreeDevices { process, gpus } => self.free_devices(id, process, gpus),
            node::Action::Warn(why) => assert!(self.shared.config.faults, "{id} warns: {why}"),
        }
    }

    /// What a worker process had started may go on using a device.
    fn free_devices(&mut self, id: NodeId, process: ProcessId, gpus: Vec<u32>) {
        let after = self.shared.below(12);
        if let Some(device) = gpus.first().copied().filter(|_| self.shared.below(20) == 0) {
            if let Some(node) = self.nodes.get_mut(&id) {
                node.held.insert(device);
            }
            self.say_held(id);
            let later = after + self.shared.below(2_000);
            self.on_machine(id, later, Machine::Released(device));
        }
        self.on_machine(id, after, Machine::Node(Box::new(node::Event::DevicesFree(process))));
    }

    fn say_held(&mut self, id: NodeId) {
        if let Some(node) = self.nodes.get(&id) {
            let held = HeadMessage::DevicesHeld(node.held());
            self.say_to_head(Speaker::Node(id), held);
        }
    }

    pub(super) fn on_machine(&mut self, id: NodeId, after: u64, what: Machine) {
        self.schedule(after, Happening::Machine(id, what));
    }

    fn give_order(&mut self, id: NodeId, to: ProcessId, command: WorkerCommand, then: Option<HeadMessage>) {
        let (now, delay) = (self.shared.now(), self.shared.below(4));
        let Some(node) = self.nodes.get_mut(&id) else { return };
        let at = node.orders_at.entry(to).or_default();
        *at = (*at).max(now + delay);
        let after = *at - now;
        self.on_machine(id, after, Machine::Reads(to, Box::new(command), then.map(Box::new)));
    }

    pub(super) fn machine(&mut self, id: NodeId, what: Machine) {
        let Some(node) = self.nodes.get_mut(&id) else { return };
        match what {
            Machine::HasProgram(process, job) => {
                if !node.state.is_wanted(process) {
                    return;
                }
                let is_sick = self.shared.sick.borrow().contains(&id);
                if is_sick || self.shared.config.faults && self.shared.below(200) == 0 {
                    self.shared.report.borrow_mut().deaths += 1;
                    let error =
                        Error::Failed { what: "starting a worker process".into(), why: "the simulation".into() };
                    return self.node_steps(id, node::Event::NotStarted { process, error });
                }
                if let Some(node) = self.nodes.get_mut(&id) {
                    node.starting.insert(process, job);
                    self.node_steps(id, node::Event::HandedToGuard(process));
                    let after = 1 + self.shared.below(12);
                    self.on_machine(id, after, Machine::Up(process));
                }
            }
            Machine::Up(process) => {
                // It may have been killed meanwhile.
                let Some(job) = node.starting.remove(&process) else { return };
                self.new_process(process, (job, id), false);
                self.shared.report.borrow_mut().workers += 1;
                let pid = process.0 as u32;
                self.node_steps(id, node::Event::Started { process, pid });
                self.node_steps(id, node::Event::Reported { process, address: address(process), pid });
            }
            Machine::Reads(process, command, then) => self.takes_order(id, process, *command, then),
            Machine::Killed(process) => {
                if node.starting.remove(&process).is_some() {
                    return self.node_steps(id, node::Event::Exited { process, code: None, signal: Some(9) });
                }
                self.dies(process);
            }
            Machine::Released(device) => {
                node.held.remove(&device);
                self.say_held(id);
            }
            Machine::Node(event) => self.node_steps(id, *event),
        }
    }

    /// A worker process has an order of its node.
    fn takes_order(&mut self, id: NodeId, to: ProcessId, command: WorkerCommand, then: Option<Box<HeadMessage>>) {
        let Some(process) = self.alive(to) else { return };
        let is_done = process.owner.is_done();
        let mut queue = process.queue.borrow_mut();
        let lease = match &command {
            WorkerCommand::Lease { lease, .. } | WorkerCommand::StartActor { lease, .. } => Some(*lease),
            _ => None,
        };
        assert!(
            !(lease.is_some() && queue.work.has_ended()),
            "{to} is about to exit, because it was asked to, and gets {command:?}"
        );
        match command {
            WorkerCommand::Lease { lease, .. } => queue.work.lease(lease),
            WorkerCommand::StartActor { lease, spec, incarnation, .. } => {
                queue.work.start_actor(Become { lease, spec, incarnation });
            }
            WorkerCommand::Drain => queue.work.drain(),
            WorkerCommand::Patience(_) => {}
            // Simulated heads are where they were.
            WorkerCommand::Heads(_) => {}
            WorkerCommand::Exit if is_done => queue.work.end(),
            WorkerCommand::Exit if process.may_leave() && process.owner.asks_to_leave() => queue.work.would_leave(),
            WorkerCommand::Exit => {
                queue.work.stays();
                let stays = node::Event::Says(to, NodeMessage::Stays);
                self.on_machine(id, 1, Machine::Node(Box::new(stays)));
            }
        }
        drop(queue);
        if let Some(then) = then {
            self.say_to_head(Speaker::Node(id), *then);
        }
        if let Some(lease) = lease {
            self.node_steps(id, node::Event::OrdersTaken { process: to, lease });
        }
    }

    /// Begins what a worker process can begin.
    pub(super) fn begin(&mut self, process: &Rc<Process>, next: Next) {
        let (number, began) = (self.shared.id(), self.shared.now());
        let shared = self.shared.clone();
        let actor = process.queue.borrow().being.as_ref().map(|(spec, ..)| spec.id);
        let (execution, program): (_, std::pin::Pin<Box<dyn Future<Output = Ended>>>) = match next {
            Next::Become(spec) => {
                self.check_alone(process, spec.id);
                let site = Site { process: process.clone(), execution: None, shared };
                (None, Box::pin(programs::constructor(site, spec)))
            }
            Next::Attempt { spec, lease } => {
                let execution = Rc::new(Execution::new((number, began), spec, lease, actor, false));
                process.started(&execution);
                process.check_beside(&execution, &shared);
                let site = Site { process: process.clone(), execution: Some(execution.clone()), shared };
                (Some(execution), Box::pin(programs::attempt(site)))
            }
        };
        self.shared.begin(number, process, execution, program);
    }

    /// A program has ended.
    pub(super) fn ended(&mut self, number: Number, running: Running, ended: Ended) {
        let Running { process, execution, program, .. } = running;
        process.programs.borrow_mut().remove(&number);
        // What it holds may be the last that holds it.
        drop(program);
        if let Some(execution) = execution {
            process.queue.borrow_mut().streams.remove(&execution.spec.id);
            return process.done(&execution, ended, &self.shared);
        }
        if process.is_driver {
            return self.program_ended(&process);
        }
        let mut queue = process.queue.borrow_mut();
        queue.is_beginning = false;
        let being = queue.being.as_ref().map(|(spec, incarnation, _)| (spec.id, *incarnation));
        drop(queue);
        let (actor, incarnation): (_, Incarnation) = being.expect("it is an actor");
        let outcome = match ended.0 {
            Outcome::Failed(error) => Err(*error),
            _ => Ok(()),
        };
        let started = NodeMessage::ActorStarted { actor, incarnation, outcome };
        let says = node::Event::Says(process.id, started);
        self.on_machine(process.node.get(), 1, Machine::Node(Box::new(says)));
    }

    /// A worker process that is to do nothing more ends when what it has said was taken in.
    pub(super) fn let_exit(&mut self, process: &Process) {
        let queue = process.queue.borrow();
        let is_done = queue.work.has_ended() && queue.running.is_none();
        if process.is_driver || !(is_done || queue.killed_at.is_some()) || process.exits.replace(true) {
            return;
        }
        let until = queue.killed_at.unwrap_or(self.shared.now() + 5_000);
        self.schedule(1, Happening::Exits { process: process.id, until });
    }

    pub(super) fn exits(&mut self, id: ProcessId, until: u64) {
        let Some(process) = self.alive(id) else { return };
        // The head ends what still runs for it, with all that those worker processes own.
        let is_used = process.owner.submission.look(|dispatch, _| !dispatch.is_done());
        let is_used = is_used && process.queue.borrow().killed_at.is_none();
        process.owner.return_idle_leases();
        let is_handed_over = process.is_settled() && process.held.is_empty() && process.side.is_flushed();
        let is_heard = is_handed_over && self.has_told_head(&process);
        if self.shared.now() >= until || is_heard && !is_used {
            return self.dies(id);
        }
        self.schedule(3, Happening::Exits { process: id, until });
    }

    /// A worker process or a driver is no more.
    pub(super) fn dies(&mut self, id: ProcessId) {
        let Some(process) = self.processes.remove(&id) else { return };
        self.shared.trace(|| format!("{id} ends"));
        self.shared.ended.borrow_mut().insert(id);
        process.is_alive.set(false);
        self.shared.untold.borrow_mut().extend(process.side.untold());
        self.note_what_outlives(&process);
        process.side.end();
        self.drivers.remove(&id);
        self.note_what_died(&process);
        let programs = process.programs.take();
        let gone: Vec<Running> = programs.iter().filter_map(|program| self.running.remove(program)).collect();
        let started = process.queue.borrow().started;
        drop(gone);
        process.end();
        self.tell_peers_of_death(id);
        if process.standing.get() == Standing::Here || process.is_driver && !self.is_head_away {
            let job = process.is_driver.then_some(process.job);
            self.send_to_head(Speaker::Process(id), Event::ProcessLost(id, job));
        }
        let node = process.node.get();
        let Some(at) = self.nodes.get_mut(&node).filter(|_| !process.is_driver) else { return };
        at.rest.insert(id, started);
        let after = self.shared.below(3);
        let exited = node::Event::Exited { process: id, code: None, signal: Some(9) };
        self.on_machine(node, after, Machine::Node(Box::new(exited)));
    }

    /// What is to be readable after the end of a process.
    fn note_what_outlives(&self, process: &Process) {
        let steward = process.side.steward().filter(|_| self.nodes.contains_key(&process.node.get()));
        if let Some(steward) = steward.and_then(|steward| self.processes.get(&steward)) {
            // What it has freed is not said yet, perhaps.
            let is_there = |id: &ObjectId| process.owner.objects.get(*id).is_some();
            let shadowed = steward.owner.values_shadowed_of(process.id).into_iter().filter(is_there);
            self.shared.outlives.borrow_mut().extend(shadowed);
        }
    }

    /// A node is no more, with its worker processes and its store.
    pub(super) fn node_dies(&mut self, id: NodeId) {
        if self.nodes.remove(&id).is_none() {
            return;
        }
        self.shared.trace(|| format!("{id} dies"));
        self.shared.nodes.borrow_mut().remove(&id);
        self.shared.has_lost_a_node.set(true);
        self.shared.copies.borrow_mut().retain(|(_, at), _| *at != id);
        let workers = self.processes.values().filter(|process| !process.is_driver && process.node.get() == id);
        // Its steward, too.
        for process in workers.map(|process| process.id).collect::<Vec<_>>() {
            self.dies(process);
        }
        let nodes: Vec<NodeId> = self.nodes.keys().copied().collect();
        for process in self.processes.values().filter(|process| process.node.get() == id) {
            // The driver's connection with its node has ended: it uses another.
            process.node.set(nodes[self.shared.below(nodes.len() as u64) as usize]);
        }
        if !self.is_head_away {
            self.send_to_head(Speaker::Node(id), Event::NodeLost(id, "the simulation".into()));
        }
    }

    /// An owner has a node delete a copy. One that was made again there since is needed.
    pub(super) fn delete(&mut self, by: ProcessId, node: NodeId, object: ObjectId) {
        let Some(process) = self.alive(by) else { return };
        if process.node.get() != node && process.owner.objects.get(object).is_some_and(|known| known.is_stored_at(node))
        {
            return;
        }
        let after = self.shared.below(5);
        self.schedule(after, Happening::Deleted(node, object));
    }
}
