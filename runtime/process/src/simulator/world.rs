//! Time, and what happens next.

use std::cell::{Cell, RefCell};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::Instant;

use rand::SeedableRng;
use rand::rngs::StdRng;
use wingbeat_core::spec::Outputs;
use wingbeat_core::{ClusterId, JobId, NodeId, ObjectId, ProcessId, TaskId};
use wingbeat_head::state::{Event, Fact, FactKey, Speaker, State};
use wingbeat_net::messages::{HeadEvent, NodeMessage};

use super::changed::Changed;
use super::execution::{Answer, Execution, Number, Question, Running, Shared};
use super::grants::Grants;
use super::nodes::{Machine, Node};
use super::planned::AtHome;
use super::process::Process;
use super::schedule::Strike;
use super::side::{Line, Parcel, Word};
use super::site::Site;
use super::standing::Finder;
use super::standstill::Standstill;
use super::{Config, Report, encoded, programs, schedule};
use crate::owner::borrows::Lost;

/// Drivers at the beginning.
const DRIVERS: u64 = 2;
/// How long a steward keeps what nobody has registered.
const ADOPTED: u64 = 10_000;
/// Whatever waits ends long before this.
const HANGS_AFTER: u64 = 3_600_000;

/// What happens at some time.
pub(super) enum Happening {
    Deliver {
        from: ProcessId,
        to: ProcessId,
        parcel: Box<Parcel>,
    },
    Answered {
        at: ProcessId,
        by: ProcessId,
        contact: u64,
        connection: u64,
        number: u64,
    },
    Reconnect {
        one: ProcessId,
        other: ProcessId,
    },
    Lose {
        at: ProcessId,
        peer: ProcessId,
        number: u64,
    },
    Greet {
        at: ProcessId,
        peer: ProcessId,
    },
    SettleBorrowed {
        at: ProcessId,
        peer: ProcessId,
        borrowed: Lost,
    },
    LetGo {
        at: ProcessId,
        of: ProcessId,
    },
    InVain {
        at: ProcessId,
        peer: ProcessId,
    },
    TellOfCopy {
        at: ProcessId,
        object: ObjectId,
        node: NodeId,
    },
    ToHead(Speaker, Box<Event>),
    ToProcess(ProcessId, Box<HeadEvent>),
    ToNode(NodeId, Box<NodeMessage>),
    HeadTick,
    HeadAnswers(Box<Question>),
    Told(Box<Question>, Answer),
    HeadBegins,
    FindsHead(Finder, u64),
    Requests(ProcessId),
    Releases(ProcessId),
    Poll(Number),
    Timer(Waker),
    Machine(NodeId, Machine),
    Exits {
        process: ProcessId,
        until: u64,
    },
    Delete {
        by: ProcessId,
        node: NodeId,
        object: ObjectId,
    },
    Deleted(NodeId, ObjectId),
    EndDrain(NodeId),
    EndQuota,
    HasRoom(NodeId),
    IsWell(NodeId),
    GoesOn,
    TermOver(NodeId),
    GivenUp(NodeId),
    CanWrite,
    /// Whoever has kept what the last head knew is back by then, or another has kept it.
    IsTold,
    /// What a thread of a worker process does that runs its own tasks.
    AtHome(ProcessId, AtHome),
    TimesOut(ProcessId, TaskId, Outputs),
    Strikes(Strike),
    LooksAtMemory(NodeId),
}

pub(super) struct Scheduled {
    pub at: u64,
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

/// Everything that there is, and what happens next. Its many fields are one for each kind of thing in it.
pub(super) struct World {
    pub shared: Rc<Shared>,
    pub state: State,
    turn: u64,
    pub clock: BinaryHeap<Reverse<Scheduled>>,
    pub ticks_at: Option<u64>,
    pub processes: BTreeMap<ProcessId, Rc<Process>>,
    pub running: BTreeMap<Number, Running>,
    planned: BTreeSet<Number>,
    /// When the last word on its way arrives: later ones come after it.
    pub links: BTreeMap<(ProcessId, ProcessId), u64>,
    pub lines: BTreeMap<(ProcessId, ProcessId), Line>,
    /// With whom each process may have had contact.
    pub met: BTreeMap<ProcessId, BTreeSet<ProcessId>>,
    pub to_head_at: BTreeMap<Speaker, u64>,
    pub from_head_at: BTreeMap<Speaker, u64>,
    /// What is under way of this contact, or an earlier one, never arrives.
    pub dropped: BTreeMap<(ProcessId, ProcessId), u64>,
    pub nodes: BTreeMap<NodeId, Node>,
    pub nodes_made: u64,
    pub jobs: BTreeMap<ProcessId, JobId>,
    /// Drivers whose programs run.
    pub drivers: BTreeSet<ProcessId>,
    /// What may break, and what of it does not, by its number.
    pub strikes: Vec<Strike>,
    pub left_out: BTreeSet<usize>,
    /// When the last program of a driver ended.
    pub program_ended_at: u64,
    /// Nodes of which the head's state may have changed, and processes of which it may have, since it was checked.
    pub changed: Changed,
    pub head_steps: u64,
    pub grants: Grants,
    /// What the head has written down.
    pub facts: BTreeMap<FactKey, Fact>,
    /// What the last head had nodes keep, until one of them has told it to the present one: where there is no journal.
    pub kept: Option<BTreeMap<FactKey, Fact>>,
    pub head_began: u64,
    pub is_head_away: bool,
    /// What stands still now, if anything does.
    pub still: Option<Standstill>,
    /// When the last that did went on: what was held back happens then.
    pub went_on_at: u64,
}

impl World {
    pub(super) fn new(config: Config) -> World {
        let shared = Shared {
            config,
            clock: Arc::new(AtomicU64::new(1)),
            began: Instant::now(),
            said: Arc::default(),
            ready: Arc::default(),
            random: RefCell::new(StdRng::seed_from_u64(config.seed)),
            next: Cell::new(0),
            begun: RefCell::default(),
            touched: RefCell::default(),
            timers: RefCell::default(),
            questions: RefCell::default(),
            planned: RefCell::default(),
            ends: RefCell::default(),
            crashed: RefCell::default(),
            beside_fatal: RefCell::default(),
            ended_for_memory: RefCell::default(),
            begun_in: RefCell::default(),
            failing: RefCell::default(),
            timed_out: RefCell::default(),
            memory_retries: RefCell::default(),
            moved: RefCell::default(),
            copies: RefCell::default(),
            nodes: RefCell::default(),
            full: RefCell::default(),
            sick: RefCell::default(),
            stopped: RefCell::default(),
            ended: RefCell::default(),
            attempts: RefCell::default(),
            parents: RefCell::default(),
            cancelled: RefCell::default(),
            streams: RefCell::default(),
            untold: RefCell::default(),
            found: RefCell::default(),
            yielding: RefCell::default(),
            found_handles: RefCell::default(),
            calls: RefCell::default(),
            given_back: RefCell::default(),
            was_limited: Cell::default(),
            jobs: RefCell::default(),
            stewards: Arc::default(),
            outlives: RefCell::default(),
            cut: RefCell::default(),
            has_lost_a_node: Cell::default(),
            report: RefCell::default(),
        };
        let mut state = State::new(ClusterId(config.seed), 1);
        state.keep_facts();
        World {
            shared: Rc::new(shared),
            state,
            turn: 0,
            clock: BinaryHeap::new(),
            ticks_at: None,
            processes: BTreeMap::new(),
            running: BTreeMap::new(),
            planned: BTreeSet::new(),
            links: BTreeMap::new(),
            lines: BTreeMap::new(),
            met: BTreeMap::new(),
            to_head_at: BTreeMap::new(),
            from_head_at: BTreeMap::new(),
            dropped: BTreeMap::new(),
            nodes: BTreeMap::new(),
            nodes_made: 0,
            jobs: BTreeMap::new(),
            drivers: BTreeSet::new(),
            strikes: schedule::schedule(&config),
            left_out: BTreeSet::new(),
            program_ended_at: 0,
            changed: Changed::default(),
            head_steps: 0,
            grants: Grants::default(),
            facts: BTreeMap::new(),
            kept: None,
            head_began: 0,
            is_head_away: false,
            still: None,
            went_on_at: 0,
        }
    }

    pub(super) fn run(&mut self) -> Report {
        let (nodes, drivers) = match self.shared.config.large() {
            None => (2 + self.shared.below(2), DRIVERS),
            Some(large) => (large.nodes, large.drivers),
        };
        for _ in 0..nodes {
            self.new_node();
        }
        for _ in 0..drivers {
            self.new_driver();
        }
        self.plan_faults();
        self.settle();
        while !self.drivers.is_empty() {
            let is_hung = self.shared.now() > self.program_ended_at + HANGS_AFTER;
            if is_hung || !self.go_on() {
                panic!("nothing ever happens again: {}", self.what_waits());
            }
        }
        self.shared.trace(|| "every program has ended".into());
        self.come_to_rest();
        // Actors may keep handles of each other, and of themselves.
        for process in self.processes.values() {
            self.shared.touched.borrow_mut().insert(process.id);
            drop(process.kept.take());
        }
        self.come_to_rest();
        self.kill_detached_actors();
        self.check_at_rest();
        self.end_everything();
        let mut report = *self.shared.report.borrow();
        report.ended_at = self.shared.now();
        report
    }

    /// Until nothing is under way.
    pub(super) fn come_to_rest(&mut self) {
        let began = self.shared.now();
        self.settle();
        while self.go_on() {
            assert!(self.shared.now() < began + HANGS_AFTER, "it never comes to rest: {}", self.what_waits());
        }
    }

    pub(super) fn new_driver(&mut self) {
        let id = ProcessId(self.shared.id());
        let nodes: Vec<NodeId> = self.nodes.keys().copied().collect();
        let node = nodes[self.shared.below(nodes.len() as u64) as usize];
        let job = JobId(id.0);
        let process = self.new_process(id, (job, node), true);
        self.jobs.insert(id, job);
        self.shared.jobs.borrow_mut().push(job);
        self.drivers.insert(id);
        self.driver_joins(&process);
        self.begin_program(&process);
    }

    /// A driver begins a random program.
    pub(super) fn begin_program(&mut self, process: &Rc<Process>) {
        let site = Site { process: process.clone(), execution: None, shared: self.shared.clone() };
        let (number, seed) = (self.shared.id(), self.shared.below(u64::MAX));
        self.shared.begin(number, process, None, Box::pin(programs::driver(site, seed)));
    }

    pub(super) fn new_process(&mut self, id: ProcessId, of: (JobId, NodeId), is_driver: bool) -> Rc<Process> {
        let process = Process::new(id, of, is_driver, ClusterId(self.shared.config.seed), &self.shared);
        self.processes.insert(id, process.clone());
        self.shared.touched.borrow_mut().insert(id);
        process
    }

    /// A process, which may have something to do after this.
    pub(super) fn alive(&self, id: ProcessId) -> Option<Rc<Process>> {
        let process = self.processes.get(&id)?;
        self.shared.touched.borrow_mut().insert(id);
        Some(process.clone())
    }

    pub(super) fn schedule(&mut self, after: u64, what: Happening) {
        self.turn += 1;
        self.clock.push(Reverse(Scheduled { at: self.shared.now() + after, turn: self.turn, what }));
    }

    /// The next happening, if there is any.
    fn go_on(&mut self) -> bool {
        let Some(Reverse(next)) = self.clock.pop() else { return false };
        self.shared.clock.fetch_max(next.at, Ordering::Relaxed);
        let is_notice = match &next.what {
            Happening::ToNode(_, message) => matches!(**message, NodeMessage::NodeDied(_)),
            Happening::ToProcess(_, event) => matches!(**event, HeadEvent::NodeDied { .. } | HeadEvent::Nodes(_)),
            _ => false,
        };
        let mut report = self.shared.report.borrow_mut();
        report.notices += u64::from(is_notice);
        report.happenings += u64::from(!is_notice);
        drop(report);
        match is_notice {
            true => self.happen_and_settle(next.what),
            false => {
                self.happen(next.what);
                self.keep_pace();
                self.settle();
            }
        }
        true
    }

    pub(super) fn happen_and_settle(&mut self, what: Happening) {
        self.happen(what);
        self.settle();
    }

    fn happen(&mut self, what: Happening) {
        let Some(what) = self.hold(what) else { return };
        let what = if self.shared.config.encodes() { received(what) } else { what };
        match what {
            Happening::Deliver { from, to, parcel } => self.deliver(from, to, *parcel),
            Happening::Answered { at, by, contact, connection, number } => {
                self.answered(at, by, contact, connection, number);
            }
            Happening::Reconnect { one, other } => self.reconnect(one, other),
            Happening::Lose { at, peer, number } => self.contact_lost(at, peer, number),
            Happening::Greet { at, peer } => {
                if let (Some(process), true) = (self.alive(at), self.processes.contains_key(&peer)) {
                    process.side.greet(peer);
                }
            }
            Happening::SettleBorrowed { at, peer, borrowed } => self.settle_borrowed(at, peer, borrowed),
            Happening::LetGo { at, of } => {
                if let Some(process) = self.alive(at) {
                    process.owner.let_go_of(of);
                }
            }
            Happening::InVain { at, peer } => {
                if let Some(process) = self.alive(at) {
                    process.owner.connection_lost(peer);
                }
            }
            Happening::TellOfCopy { at, object, node } => self.tell_of_copy(at, object, node),
            Happening::ToHead(from, event) => self.head_hears(from, *event),
            Happening::ToProcess(process, event) => self.process_hears(process, *event),
            Happening::ToNode(node, message) => self.node_hears(node, *message),
            Happening::HeadTick => {
                self.ticks_at = None;
                self.step(Event::Tick);
            }
            Happening::HeadAnswers(question) => self.head_answers(*question),
            Happening::Told(question, answer) => self.told(*question, answer),
            Happening::HeadBegins => self.head_begins(),
            Happening::FindsHead(who, life) => self.finds_head(who, life),
            Happening::Requests(id) => self.take_requests(id),
            Happening::Releases(id) => {
                if let Some(process) = self.alive(id) {
                    process.releases_planned.set(false);
                    process.release();
                }
            }
            Happening::Poll(number) => self.poll(number),
            Happening::Timer(waker) => waker.wake(),
            Happening::Machine(node, what) => self.machine(node, what),
            Happening::Exits { process, until } => self.exits(process, until),
            Happening::Delete { by, node, object } => self.delete(by, node, object),
            Happening::Deleted(node, object) => drop(self.shared.copies.borrow_mut().remove(&(object, node))),
            Happening::EndDrain(node) => self.end_drain(node),
            Happening::EndQuota => self.end_quota(),
            Happening::HasRoom(node) => drop(self.shared.full.borrow_mut().remove(&node)),
            Happening::IsWell(node) => drop(self.shared.sick.borrow_mut().remove(&node)),
            Happening::GoesOn => self.goes_on_again(),
            Happening::TermOver(node) => self.node_dies(node),
            Happening::GivenUp(node) => self.given_up(node),
            Happening::CanWrite => self.can_write(),
            Happening::IsTold => self.comes_back(true),
            Happening::AtHome(process, what) => self.at_home(process, what),
            Happening::TimesOut(at, task, outputs) => self.times_out(at, task, outputs),
            Happening::Strikes(strike) => self.strikes(strike),
            Happening::LooksAtMemory(node) => self.looks_at_memory(node),
        }
    }

    fn take_requests(&mut self, id: ProcessId) {
        let Some(process) = self.alive(id) else { return };
        if process.requests_at.get().is_none_or(|at| at > self.shared.now()) {
            // An earlier look has taken its place.
            return;
        }
        process.requests_at.set(None);
        if let Some(ms) = process.owner.take_requests() {
            self.plan_requests(&process, ms.max(1));
        }
    }

    fn plan_requests(&mut self, process: &Process, after: u64) {
        let at = self.shared.now() + after;
        if process.requests_at.get().is_none_or(|planned| at < planned) {
            process.requests_at.set(Some(at));
            self.schedule(after, Happening::Requests(process.id));
        }
    }

    /// Carries what was said, and plans what was woken, until nothing is left to plan.
    fn settle(&mut self) {
        loop {
            let mut is_done = true;
            while let Some((by, word)) = { self.shared.said.lock().pop_front() } {
                is_done = false;
                self.carry(by, word);
            }
            let begun = std::mem::take(&mut *self.shared.begun.borrow_mut());
            self.running.extend(begun);
            let woken = std::mem::take(&mut *self.shared.ready.lock());
            for number in woken {
                if self.planned.insert(number) {
                    let after = self.shared.below(3) / 2;
                    self.schedule(after, Happening::Poll(number));
                }
            }
            let timers = std::mem::take(&mut *self.shared.timers.borrow_mut());
            for (at, waker) in timers {
                self.schedule(at.saturating_sub(self.shared.now()), Happening::Timer(waker));
            }
            is_done &= !self.carry_planned();
            let ends = std::mem::take(&mut *self.shared.ends.borrow_mut());
            for process in ends {
                is_done = false;
                self.shared.report.borrow_mut().deaths += 1;
                self.dies(process);
            }
            let questions = std::mem::take(&mut *self.shared.questions.borrow_mut());
            for question in questions {
                let after = 1 + self.shared.below(4);
                self.schedule(after, Happening::HeadAnswers(Box::new(question)));
            }
            let touched = std::mem::take(&mut *self.shared.touched.borrow_mut());
            for id in touched {
                if let Some(process) = self.processes.get(&id).cloned() {
                    is_done &= !self.go_on_with(&process);
                }
            }
            if is_done {
                break;
            }
        }
        if self.shared.config.large().is_none() {
            self.check_settled();
        }
    }

    /// Plans what a process has to do. Whether there was anything.
    fn go_on_with(&mut self, process: &Rc<Process>) -> bool {
        if self.is_still(process.id) {
            return false;
        }
        if self.shared.config.large().is_none() {
            self.check_freed(process);
        }
        let mut is_busy = false;
        if process.was_woken() {
            is_busy = true;
            let after = self.shared.below(4) / 2;
            self.plan_requests(process, after);
        }
        if process.has_released() && !process.releases_planned.replace(true) {
            let after = self.shared.below(4);
            self.schedule(after, Happening::Releases(process.id));
        }
        while let Some(next) = process.next() {
            is_busy = true;
            self.begin(process, next);
        }
        self.let_exit(process);
        if is_busy {
            self.shared.touched.borrow_mut().insert(process.id);
        }
        is_busy
    }

    fn poll(&mut self, number: Number) {
        self.planned.remove(&number);
        let Some(mut running) = self.running.remove(&number) else { return };
        self.shared.touched.borrow_mut().insert(running.process.id);
        let polled = running.program.as_mut().poll(&mut Context::from_waker(&running.waker));
        let now = self.shared.now();
        let hears = |execution: &Rc<Execution>| execution.is_cancelled.get() && execution.hears_at.get() <= now;
        let is_cancelled = running.execution.as_ref().is_some_and(hears);
        match polled {
            Poll::Ready(ended) => self.ended(number, running, ended),
            Poll::Pending if is_cancelled => {
                let ended = programs::cancelled(&running);
                self.ended(number, running, ended);
            }
            Poll::Pending => drop(self.running.insert(number, running)),
        }
    }

    /// Carries one thing that a process has said.
    fn carry(&mut self, by: ProcessId, word: Word) {
        match word {
            Word::Peer(to) => self.send(by, to),
            Word::Head(message) => self.tell_head(by, message),
            Word::Delete(at, object) => {
                let after = self.shared.below(5);
                self.schedule(after, Happening::Delete { by, node: at.node, object });
            }
            Word::HasWorkAtHome => {
                if let Some(process) = self.alive(by) {
                    process.has_work_at_home(&self.shared);
                }
            }
            Word::Stays => {
                if let Some(process) = self.alive(by) {
                    let stays = wingbeat_node::Event::Says(by, NodeMessage::Stays);
                    self.on_machine(process.node.get(), 1, Machine::Node(Box::new(stays)));
                }
            }
            Word::KeepsForAWhile(of) => self.schedule(ADOPTED, Happening::LetGo { at: by, of }),
            Word::InVain(peer) => self.schedule(1, Happening::InVain { at: by, peer }),
        }
    }
}

/// What happens, as its receiver has it: its messages were bytes on the way.
fn received(what: Happening) -> Happening {
    match what {
        Happening::Deliver { from, to, mut parcel } => {
            encoded::parcel(&mut parcel);
            Happening::Deliver { from, to, parcel }
        }
        Happening::ToProcess(to, event) => Happening::ToProcess(to, Box::new(encoded::event(*event))),
        Happening::ToNode(to, message) => Happening::ToNode(to, Box::new(encoded::order(*message))),
        Happening::Machine(at, Machine::Reads(to, command, then)) => {
            Happening::Machine(at, Machine::Reads(to, Box::new(encoded::command(*command)), then))
        }
        Happening::Machine(at, Machine::Node(event)) => {
            Happening::Machine(at, Machine::Node(Box::new(encoded::of_process(*event))))
        }
        Happening::Told(question, answer) => Happening::Told(question, encoded::through(&answer)),
        other => other,
    }
}
