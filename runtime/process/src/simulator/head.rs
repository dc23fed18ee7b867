//! To and from the head.

use std::collections::BTreeMap;
use std::rc::Rc;

use wingbeat_core::spec::{Address, Executable, JobSpec, PlacementGroupState};
use wingbeat_core::{NodeId, ProcessId};
use wingbeat_head::state::{Action, Event, Speaker};
use wingbeat_net::messages::{HeadEvent, HeadMessage};

use super::contacts::SLOW;
use super::encoded;
use super::execution::{Answer, Asked, Question};
use super::process::Process;
use super::side::address;
use super::standing::{Finder, Standing};
use super::world::{Happening, World};

/// That of all jobs.
pub(super) const NAMESPACE: &str = "shared";

impl World {
    /// The head takes an event in.
    pub(super) fn step(&mut self, event: Event) {
        let event = if self.shared.config.encodes() { encoded::heard(event) } else { event };
        self.shared.trace(|| format!("the head hears {event:?}"));
        self.note_changes(&event);
        self.grants.hears(&event);
        let actions = self.state.step(self.head_now(), event);
        self.act(actions);
    }

    pub(super) fn act(&mut self, actions: Vec<Action>) {
        self.write_facts();
        let mut granted = Vec::new();
        for action in actions {
            self.shared.trace(|| format!("  the head: {action:?}"));
            match &action {
                Action::Order(node, message) => {
                    granted.extend(self.grants.orders(*node, message).map(|lease| (*node, lease)));
                }
                Action::Tell(_, HeadEvent::PlacementGroup { group, state }) => {
                    if let PlacementGroupState::Placed { nodes, .. } = state {
                        self.grants.check_placed(*group, nodes);
                    }
                }
                Action::Tell(..) => {}
            }
            let (to, number) = match &action {
                Action::Tell(process, _) => (Speaker::Process(*process), process.0),
                Action::Order(node, _) => (Speaker::Node(*node), node.0),
            };
            self.changed.nodes.extend(matches!(action, Action::Order(..)).then_some(NodeId(number)));
            let delay = self.shared.below(if self.is_slow(0, number) { SLOW } else { 4 });
            let at = self.from_head_at.entry(to).or_default();
            *at = (*at).max(self.shared.now() + delay);
            let after = *at - self.shared.now();
            self.schedule(
                after,
                match action {
                    Action::Tell(process, event) => Happening::ToProcess(process, Box::new(event)),
                    Action::Order(node, message) => Happening::ToNode(node, Box::new(message)),
                },
            );
        }
        self.check_grants(&granted);
        self.check_head();
        let next = self.state.next_tick().map(|after| self.shared.now() + after);
        if let Some(at) = next
            && self.ticks_at.is_none_or(|planned| at < planned)
        {
            self.ticks_at = Some(at);
            self.schedule(at - self.shared.now(), Happening::HeadTick);
        }
    }

    /// Something sets out for the head, after what its sender has said before.
    pub(super) fn send_to_head(&mut self, from: Speaker, event: Event) {
        let delay = self.shared.below(4);
        let at = self.to_head_at.entry(from).or_default();
        *at = (*at).max(self.shared.now() + delay);
        let after = *at - self.shared.now();
        self.schedule(after, Happening::ToHead(from, Box::new(event)));
    }

    pub(super) fn head_hears(&mut self, from: Speaker, event: Event) {
        if let Speaker::Node(node) = from
            && !self.nodes.contains_key(&node)
            && !self.shared.stopped.borrow().contains(&node)
            && !matches!(event, Event::NodeLost(..))
        {
            return;
        }
        self.step(event);
    }

    pub(super) fn tell_head(&mut self, by: ProcessId, message: HeadMessage) {
        let Some(process) = self.alive(by) else { return };
        if self.may_say_now(&process, &message) {
            self.say_to_head(Speaker::Process(by), message);
        }
    }

    /// A process or a node says something to the head.
    pub(super) fn say_to_head(&mut self, by: Speaker, message: HeadMessage) {
        if let Speaker::Node(node) = by
            && let Some(node) = self.nodes.get_mut(&node).filter(|node| node.standing == Standing::Away)
        {
            // What it says when it is back stands for the rest.
            return node.unsaid.extend(message.outlives_head().then_some(message));
        }
        assert!(self.state.may_say(by, &message), "{by:?} says {message:?}, which is not for it to say");
        self.send_to_head(by, Event::Says(by, message));
    }

    /// A process dials the head when it first has something to say.
    pub(super) fn connect(&mut self, process: &Process) {
        if process.stands(Standing::Here) != Standing::Here {
            self.send_to_head(Speaker::Process(process.id), Event::ProcessConnected(process.id));
        }
    }

    /// A driver enters the cluster.
    pub(super) fn driver_joins(&mut self, process: &Rc<Process>) {
        if self.is_head_away {
            process.stands(Standing::Away);
            let life = self.shared.report.borrow().restarts;
            let (id, after) = (process.id, self.shared.below(10));
            return self.schedule(2_000 + after, Happening::FindsHead(Finder::Process(id), life));
        }
        self.connect(process);
        self.say_job(process);
    }

    pub(super) fn say_job(&mut self, process: &Rc<Process>) {
        let (id, machine) = (process.job, self.machine_of(process.node.get()));
        let spec = JobSpec {
            id,
            name: format!("job{}", id.0),
            driver: Address { machine, ..address(process.id) },
            executable: Executable { hash: String::new(), size: 0, pid: 1, machine, path: String::new() },
            working_dir: String::new(),
            env: BTreeMap::new(),
            local_env: BTreeMap::new(),
            namespace: NAMESPACE.into(),
            priority: (id.0 % 3) as i32 - 1,
        };
        self.send_to_head(Speaker::Process(process.id), Event::JobJoined(Box::new(spec)));
    }

    pub(super) fn head_answers(&mut self, question: Question) {
        if !self.processes.contains_key(&question.by) {
            return;
        }
        let is_away = |asker: &Rc<Process>| asker.standing.get() == Standing::Away;
        let is_away = self.is_head_away || self.processes.get(&question.by).is_some_and(is_away);
        // What a process has is said to the next head before it asks.
        let said_at = self.to_head_at.get(&Speaker::Process(question.by));
        let was_restarted = self.shared.report.borrow().restarts > 0;
        if is_away || was_restarted && said_at.is_some_and(|at| *at >= self.shared.now()) {
            return self.asks_later(question);
        }
        if self.waits_for_the_kept() {
            return self.asks_later(question);
        }
        let now = self.head_now();
        let asked = self.shared.config.encodes().then(|| encoded::asked(&question.asked));
        let answer = match asked.as_ref().unwrap_or(&question.asked) {
            Asked::Create(spec) => {
                let (answer, actions) = self.state.create_actor(now, (**spec).clone(), false);
                self.act(actions);
                answer.map(Some)
            }
            Asked::Find(name, asks) => self.state.find_actor(name, *asks).map(Some),
            Asked::Reserve(spec) => {
                self.grants.asks_for(spec);
                let (answer, actions) = self.state.create_group(now, (**spec).clone());
                self.act(actions);
                answer.map(|_| None)
            }
            Asked::GiveBack(group) => {
                self.shared.given_back.borrow_mut().insert(*group);
                let actions = self.state.remove_placement_group(now, *group);
                self.act(actions);
                Ok(None)
            }
        };
        let after = 1 + self.shared.below(4);
        self.schedule(after, Happening::Told(Box::new(question), answer));
    }

    /// The head's answer has arrived.
    pub(super) fn told(&self, question: Question, answer: Answer) {
        self.shared.trace(|| format!("{} is answered {answer:?}", question.by));
        *question.answer.borrow_mut() = Some(answer);
        question.waker.wake();
    }

    pub(super) fn process_hears(&mut self, id: ProcessId, event: HeadEvent) {
        let Some(process) = self.alive(id) else { return };
        match event {
            HeadEvent::NodeDied { node, why } => {
                process.owner.node_died(node, &why);
            }
            HeadEvent::SayAgain { question, tasks } => {
                for execution in process.executions().iter().filter(|execution| tasks.contains(&execution.spec.id)) {
                    let asked = execution.waits.borrow_mut().asked_again(&execution.waiter());
                    if let Some((wait, _)) = asked {
                        let again = HeadMessage::SaidAgain { question, wait: Some(wait) };
                        process.owner.outside.tell_head(&process.owner, again);
                    }
                }
                process.owner.outside.tell_head(&process.owner, HeadMessage::SaidAgain { question, wait: None });
            }
            HeadEvent::Deadlock { cycle, .. } => panic!("programs wait for each other: {cycle:?}"),
            HeadEvent::PlacementGroup { .. } => {}
            HeadEvent::WorkerDied(death) if death.is_moved => {
                self.shared.moved.borrow_mut().insert(death.process);
                process.owner.hears_head(HeadEvent::WorkerDied(death));
            }
            other => process.owner.hears_head(other),
        }
    }
}
