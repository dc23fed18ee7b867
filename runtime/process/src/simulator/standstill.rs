//! Contact with the head is cut, or a process or a whole machine stands still: what would happen there happens afterwards, in the
//! same order. For a short time nobody notices more than the delay. A node without contact gives itself up before the head does.

use std::time::Duration;

use wingbeat_core::{NodeId, ProcessId};
use wingbeat_head::state::{Event, Speaker};
use wingbeat_net::limits::Limits;
use wingbeat_node::term::{Heads, Moment, Term};

use super::nodes::Machine;
use super::schedule::pick;
use super::standing::{Finder, Standing};
use super::world::{Happening, World};

/// After how long without contact the head gives a node up.
const LOST: u64 = 4_000;

/// The limits of a node here: less than usual.
fn limits() -> Limits {
    let lost = Duration::from_millis(LOST);
    Limits { lost, margin: lost / 4, ..wingbeat_net::limits::limits() }
}

/// What both clocks of all machines show.
fn moment(now: u64) -> Moment {
    let now = Duration::from_millis(now);
    Moment { running: now, elapsed: now }
}

/// A node's term, which begins now. Its head is elsewhere.
pub(super) fn term(now: u64) -> Term {
    Term::new(Heads { present_is_here: false, all_are_here: false }, moment(now), &limits())
}

/// What stands still.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Still {
    /// The contact between somebody and the head.
    Contact(Speaker),
    Process(ProcessId),
    /// A node with its worker processes.
    Machine(NodeId),
}

/// It stands still, and this happens there afterwards.
pub(super) struct Standstill {
    pub what: Still,
    pub held: Vec<Happening>,
}

impl World {
    /// Something stands still for a short time, if nothing does.
    pub(super) fn something_stands_still(&mut self, what: u32, nth: u64, lasts: u64) {
        let processes: Vec<ProcessId> = self.processes.keys().copied().collect();
        let nodes: Vec<NodeId> = self.nodes.keys().copied().collect();
        let (Some(process), Some(node)) = (pick(&processes, nth), pick(&nodes, nth / 64)) else { return };
        let what = match what {
            0 => Still::Contact(Speaker::Node(node)),
            1 => Still::Contact(Speaker::Process(process)),
            2 => Still::Process(process),
            _ => Still::Machine(node),
        };
        self.stands_still(what, lasts);
    }

    /// A node is without contact for so long that it is given up.
    pub(super) fn is_given_up(&mut self, node: NodeId) {
        if self.still.is_some() || self.is_head_away {
            return;
        }
        self.shared.report.borrow_mut().deaths += 1;
        self.replace(node);
        let now = moment(self.shared.now());
        let Some(term) = self.nodes.get_mut(&node).map(|node| &mut node.term) else { return };
        // Its last question was answered just now.
        term.is_known(term.now(now), &limits());
        let left = term.left(now).as_millis() as u64;
        if self.shared.below(2) == 0 {
            // It ends in time, and cannot say so.
            self.stands_still(Still::Contact(Speaker::Node(node)), LOST);
            self.schedule(left, Happening::TermOver(node));
        } else {
            // It is given up while it cannot do anything, and ends when it can.
            let after = LOST + 1 + self.shared.below(LOST);
            self.stands_still(Still::Machine(node), after);
            self.schedule(LOST, Happening::GivenUp(node));
        }
    }

    fn stands_still(&mut self, what: Still, after: u64) {
        if self.still.is_some() || self.is_gone(what) {
            return;
        }
        self.shared.report.borrow_mut().standstills += 1;
        self.shared.trace(|| format!("{what:?} stands still"));
        self.still = Some(Standstill { what, held: Vec::new() });
        // A connection breaks at once, or its end is not noticed.
        if let (Some(node), true) = (what.node(), self.shared.below(3) > 0)
            && self.nodes.get(&node).is_some_and(|node| node.standing == Standing::Here)
        {
            self.step(Event::NodeAway(node));
        }
        self.schedule(after, Happening::GoesOn);
    }

    fn is_gone(&self, what: Still) -> bool {
        matches!(what, Still::Contact(Speaker::Process(id)) | Still::Process(id) if !self.processes.contains_key(&id))
    }

    /// The head gives a node up that it has not heard of for long.
    pub(super) fn given_up(&mut self, node: NodeId) {
        let now = moment(self.shared.now());
        if let Some(known) = self.nodes.get(&node).filter(|_| !self.is_head_away) {
            assert!(known.term.left(now).is_zero(), "the head gives {node} up, which may go on");
            self.shared.trace(|| format!("{node} is given up"));
            self.shared.nodes.borrow_mut().remove(&node);
            self.step(Event::NodeLost(node, "the simulation".into()));
        }
    }

    /// What stood still goes on.
    pub(super) fn goes_on_again(&mut self) {
        let Some(Standstill { what, held }) = self.still.take() else { return };
        self.went_on_at = self.shared.now();
        self.shared.trace(|| format!("{what:?} goes on"));
        if let Some(node) = what.node() {
            match self.nodes.get(&node).map(|node| node.standing) {
                // Its term is over.
                Some(_) if !self.shared.nodes.borrow().contains(&node) => self.node_dies(node),
                Some(Standing::Here) if !self.is_head_away => self.step(Event::NodeBack(node)),
                _ => {}
            }
        }
        self.shared.touched.borrow_mut().extend(self.processes.keys().copied());
        for happening in held {
            match &happening {
                // It had not arrived when whoever said it died.
                Happening::ToHead(Speaker::Process(by), event)
                    if matches!(**event, Event::Says(..)) && !self.processes.contains_key(by) => {}
                _ => self.happen_and_settle(happening),
            }
        }
    }

    /// What would happen where all stands still is kept for later. What is given back happens now.
    pub(super) fn hold(&mut self, happening: Happening) -> Option<Happening> {
        let Some(what) = self.still.as_ref().map(|still| still.what) else { return Some(happening) };
        let is_held = match what {
            Still::Contact(with) => happening.is_between_head_and(with),
            Still::Process(process) => self.place_of(&happening) == Some(process),
            Still::Machine(node) => match &happening {
                Happening::ToNode(at, _) | Happening::LooksAtMemory(at) => *at == node,
                Happening::FindsHead(Finder::Node(at), _) => *at == node,
                // Its guard, its daemon and all that starts there.
                Happening::Machine(at, machine) => *at == node && !matches!(machine, Machine::Released(_)),
                other => self.place_of(other).is_some_and(|process| self.is_on(process, node)),
            },
        };
        if !is_held {
            return Some(happening);
        }
        if let Some(still) = &mut self.still {
            still.held.push(happening);
        }
        None
    }

    pub(super) fn is_still(&self, process: ProcessId) -> bool {
        match self.still.as_ref().map(|still| still.what) {
            Some(Still::Process(still)) => still == process,
            Some(Still::Machine(node)) => self.is_on(process, node),
            Some(Still::Contact(_)) | None => false,
        }
    }

    /// Whether a process has no contact with the head.
    pub(super) fn is_cut_off(&self, process: ProcessId) -> bool {
        self.still.as_ref().is_some_and(|still| still.what == Still::Contact(Speaker::Process(process)))
    }

    /// Whether it is a worker process of a node.
    fn is_on(&self, process: ProcessId, node: NodeId) -> bool {
        self.processes.get(&process).is_some_and(|process| !process.is_driver && process.node.get() == node)
    }

    /// The process that does this.
    fn place_of(&self, happening: &Happening) -> Option<ProcessId> {
        match happening {
            Happening::Deliver { to: at, .. }
            | Happening::Answered { at, .. }
            | Happening::Lose { at, .. }
            | Happening::Greet { at, .. }
            | Happening::SettleBorrowed { at, .. }
            | Happening::LetGo { at, .. }
            | Happening::InVain { at, .. }
            | Happening::TellOfCopy { at, .. }
            | Happening::ToProcess(at, _)
            | Happening::FindsHead(Finder::Process(at), _)
            | Happening::Requests(at)
            | Happening::AtHome(at, _)
            | Happening::TimesOut(at, ..)
            | Happening::Releases(at)
            | Happening::Exits { process: at, .. }
            | Happening::Delete { by: at, .. } => Some(*at),
            Happening::Told(question, _) => Some(question.by),
            Happening::Poll(number) => self.running.get(number).map(|running| running.process.id),
            _ => None,
        }
    }
}

impl Still {
    /// The node that the head has no contact with.
    fn node(self) -> Option<NodeId> {
        match self {
            Still::Contact(Speaker::Node(node)) | Still::Machine(node) => Some(node),
            Still::Contact(Speaker::Process(_)) | Still::Process(_) => None,
        }
    }
}

impl Happening {
    fn is_between_head_and(&self, with: Speaker) -> bool {
        match (self, with) {
            (Happening::ToHead(from, _), with) => *from == with,
            (Happening::ToNode(to, _), Speaker::Node(node)) => *to == node,
            (Happening::FindsHead(Finder::Node(who), _), Speaker::Node(node)) => *who == node,
            (Happening::ToProcess(to, _), Speaker::Process(process)) => *to == process,
            (Happening::FindsHead(Finder::Process(who), _), Speaker::Process(process)) => *who == process,
            (Happening::HeadAnswers(question) | Happening::Told(question, _), Speaker::Process(process)) => {
                question.by == process
            }
            _ => false,
        }
    }
}
