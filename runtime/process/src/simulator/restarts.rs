//! The head dies and is started again, from what it had written down; or without a journal, from what nodes have kept. Whoever lives
//! finds it, and says what it has.

use std::cmp::Reverse;
use std::rc::Rc;

use wingbeat_core::ClusterId;
use wingbeat_head::state::{Event, Fact, FactKey, Speaker, State};
use wingbeat_net::messages::{HeadMessage, Running};
use wingbeat_net::recording::{self, Recording};

use super::execution::Question;
use super::process::Process;
use super::standing::{Finder, Standing};
use super::world::{Happening, Scheduled, World};

/// How long those that an earlier head knew have to come back: whoever lives needs less.
const GRACE: u64 = 6_000;
/// How long it may take to find the next one.
const FINDS: u64 = 2_000;

impl World {
    /// What the head has decided is written down before anybody hears of it.
    pub(super) fn write_facts(&mut self) {
        for fact in self.state.take_facts() {
            self.grants.writes(&fact);
            match fact.is_end() {
                true => drop(self.facts.remove(&fact.key())),
                false => drop(self.facts.insert(fact.key(), fact)),
            }
        }
    }

    /// Now, as the head counts.
    pub(super) fn head_now(&self) -> u64 {
        self.shared.now() - self.head_began
    }

    /// The head is no more. What was on its way to it and from it is lost; what was asked of it is asked again.
    pub(super) fn head_dies(&mut self, back_after: u64) {
        if self.is_head_away {
            return;
        }
        self.check_facts();
        self.is_head_away = true;
        self.shared.report.borrow_mut().restarts += 1;
        self.shared.trace(|| "the head dies".into());
        // What is held back was said before what is under way.
        if let Some(mut still) = self.still.take() {
            let held = std::mem::take(&mut still.held);
            still.held = held.into_iter().filter_map(|what| self.without_head(what)).collect();
            self.still = Some(still);
        }
        let mut kept = Vec::new();
        for Reverse(scheduled) in std::mem::take(&mut self.clock).into_sorted_vec().into_iter().rev() {
            let (at, turn) = (scheduled.at, scheduled.turn);
            kept.extend(self.without_head(scheduled.what).map(|what| Reverse(Scheduled { at, turn, what })));
        }
        self.clock = kept.into();
        (self.ticks_at, self.to_head_at, self.from_head_at) = Default::default();
        self.schedule(back_after, Happening::HeadBegins);
        for process in self.processes.values().cloned().collect::<Vec<_>>() {
            if process.standing.get() == Standing::Here {
                process.stands(Standing::Away);
            }
            self.looks_for_head(Finder::Process(process.id), back_after);
        }
        for node in self.nodes.keys().copied().collect::<Vec<_>>() {
            if let Some(node) = self.nodes.get_mut(&node) {
                node.standing = Standing::Away;
            }
            self.looks_for_head(Finder::Node(node), back_after);
        }
    }

    /// What becomes of what was to happen when the head dies.
    fn without_head(&mut self, what: Happening) -> Option<Happening> {
        match what {
            Happening::ToHead(Speaker::Process(by), event) => {
                if let (Event::Says(_, message), Some(process)) = (*event, self.alive(by))
                    && message.outlives_head()
                {
                    process.unsaid.borrow_mut().push(message);
                }
            }
            Happening::ToHead(Speaker::Node(by), event) => {
                if let (Event::Says(_, message), Some(node)) = (*event, self.nodes.get_mut(&by)) {
                    node.unsaid.extend(message.outlives_head().then_some(message));
                }
            }
            Happening::ToProcess(..) | Happening::ToNode(..) | Happening::HeadTick => {}
            Happening::HeadAnswers(question) => self.shared.questions.borrow_mut().push(*question),
            Happening::Told(question, _) => self.shared.questions.borrow_mut().push(*question),
            what => return Some(what),
        }
        None
    }

    pub(super) fn looks_for_head(&mut self, who: Finder, after: u64) {
        let after = after + self.shared.below(FINDS);
        let life = self.shared.report.borrow().restarts;
        self.schedule(after, Happening::FindsHead(who, life));
    }

    /// The next head begins.
    pub(super) fn head_begins(&mut self) {
        let restarts = self.shared.report.borrow().restarts;
        self.shared.trace(|| format!("head {restarts} begins"));
        let cluster = ClusterId(self.shared.config.seed);
        // What was not told to the last head, nodes keep still.
        let has_journal = self.kept.is_none() && (!self.is_some_node_away() || self.shared.below(2) == 0);
        if !has_journal {
            let known = std::mem::take(&mut self.facts);
            self.kept.get_or_insert(known);
            self.schedule(GRACE / 2, Happening::IsTold);
        }
        let remembered = has_journal.then(|| self.facts.values().cloned().collect::<Vec<_>>());
        self.shared.trace(|| format!("it has {} journal", if has_journal { "a" } else { "no" }));
        let grace = if has_journal { GRACE } else { 0 };
        let begins = wingbeat_head::state::Beginning { cluster, first_lease: restarts << 40, remembered, grace };
        self.state = State::begun(begins.clone());
        self.state.keep_facts();
        self.grants.begin_anew();
        if self.shared.config.trace {
            let name = format!("head-seed{}-{restarts}", self.shared.config.seed);
            self.state.record_with(Recording::asked_for(recording::Machine::Head, &name, begins));
        }
        (self.is_head_away, self.head_began) = (false, self.shared.now());
        self.look_for_the_absent();
        self.act(Vec::new());
    }

    fn is_some_node_away(&self) -> bool {
        self.nodes.values().any(|node| node.standing == Standing::Away)
    }

    /// Somebody comes back to a head that has no journal. The first node tells it what the last one knew. Here, so does the last
    /// process when there is no such node: that all who have kept it die at once is not played.
    pub(super) fn comes_back(&mut self, is_node: bool) {
        if self.kept.is_none() || self.is_head_away {
            return;
        }
        let now = self.head_now();
        if now < GRACE {
            let actions = self.state.somebody_returns(now, GRACE);
            self.act(actions);
        }
        if is_node || !self.is_some_node_away() {
            self.is_told();
        }
    }

    /// The present head is told what the last one knew.
    fn is_told(&mut self) {
        let Some(kept) = self.kept.take() else { return };
        self.shared.trace(|| "it is told what the last head knew".into());
        let facts: Vec<Fact> = kept.values().cloned().collect();
        for (key, fact) in kept {
            self.facts.entry(key).or_insert(fact);
        }
        let actions = self.state.remember(self.head_now(), facts);
        self.act(actions);
        self.look_for_the_absent();
    }

    /// Whether who asks the head for something waits until it was told what the last one knew.
    pub(super) fn waits_for_the_kept(&mut self) -> bool {
        if self.kept.is_some() && !self.is_some_node_away() {
            self.comes_back(true);
        }
        self.kept.is_some()
    }

    /// Where nobody listens any more, that is found out; or it is not.
    fn look_for_the_absent(&mut self) {
        for fact in self.facts.values().cloned().collect::<Vec<_>>() {
            let (from, event) = match fact {
                Fact::Node(node, _) if !self.nodes.contains_key(&node.id) => {
                    (Speaker::Node(node.id), Event::NodeLost(node.id, "the simulation".into()))
                }
                Fact::Job(job, true) if !self.processes.contains_key(&job.driver.process) => {
                    let driver = job.driver.process;
                    (Speaker::Process(driver), Event::ProcessLost(driver, Some(job.id)))
                }
                _ => continue,
            };
            if self.shared.below(2) == 0 {
                let after = self.shared.below(500);
                self.schedule(after, Happening::ToHead(from, Box::new(event)));
            }
        }
    }

    /// Somebody has found the head of this life.
    pub(super) fn finds_head(&mut self, who: Finder, life: u64) {
        if life != self.shared.report.borrow().restarts || self.is_head_away {
            return;
        }
        let is_node = matches!(who, Finder::Node(_));
        self.comes_back(is_node);
        match who {
            Finder::Node(node) => {
                let Some(known) = self.nodes.get_mut(&node).filter(|node| node.standing == Standing::Away) else {
                    return;
                };
                let was_known = self.facts.values().any(|fact| matches!(fact, Fact::Node(info, _) if info.id == node));
                assert!(!was_known || self.state.is_recovering(), "{node} lives, and is not let in");
                known.standing = Standing::Here;
                let info = known.info.clone();
                let running = Running { held: known.held(), ..known.state.running() };
                let unsaid = std::mem::take(&mut known.unsaid);
                self.step(Event::NodeJoined(Box::new(info), running));
                for message in unsaid {
                    self.say_to_head(Speaker::Node(node), message);
                }
            }
            Finder::Process(process) => {
                let Some(process) = self.alive(process) else { return };
                let unsaid = std::mem::take(&mut *process.unsaid.borrow_mut());
                let before = process.standing.get();
                if before == Standing::Never && unsaid.is_empty() {
                    return;
                }
                // Whoever lives was waited for, or is known to live.
                let is_in = !process.is_driver || self.facts.contains_key(&FactKey::Job(process.job));
                let may_come_back = before == Standing::Never || !is_in || self.state.may_come_back(process.id);
                assert!(may_come_back, "{} lives, and is not let in", process.id);
                self.connect(&process);
                if before == Standing::Away && process.is_driver {
                    self.say_job(&process);
                }
                for message in unsaid {
                    self.say_to_head(Speaker::Process(process.id), message);
                }
                if before == Standing::Away {
                    self.rejoin(&process);
                }
            }
        }
    }

    fn rejoin(&mut self, process: &Rc<Process>) {
        process.owner.rejoin();
        for execution in process.executions() {
            let told = execution.waits.borrow_mut().told_anew(&execution.waiter());
            if let Some((message, _)) = told {
                process.owner.outside.tell_head(&process.owner, message);
            }
        }
    }

    /// A process has something to say to the head. False if it is not said now.
    pub(super) fn may_say_now(&mut self, process: &Rc<Process>, message: &HeadMessage) -> bool {
        match process.standing.get() {
            Standing::Here => return true,
            Standing::Never if !self.is_head_away => {
                self.connect(process);
                for earlier in std::mem::take(&mut *process.unsaid.borrow_mut()) {
                    self.say_to_head(Speaker::Process(process.id), earlier);
                }
                return true;
            }
            Standing::Never => process.unsaid.borrow_mut().push(message.clone()),
            Standing::Away if message.outlives_head() => process.unsaid.borrow_mut().push(message.clone()),
            // What it says when it is back stands for that.
            Standing::Away => {}
        }
        false
    }

    /// Whether the head has taken in what a process has said to it.
    pub(super) fn has_told_head(&self, process: &Process) -> bool {
        let said_at = self.to_head_at.get(&Speaker::Process(process.id)).copied().unwrap_or(0);
        let is_away = process.standing.get() == Standing::Away || !process.unsaid.borrow().is_empty();
        !is_away && said_at <= self.shared.now() && !self.is_cut_off(process.id)
    }

    /// A question is asked again when there is a head.
    pub(super) fn asks_later(&mut self, question: Question) {
        let after = 1 + self.shared.below(50);
        self.schedule(after, Happening::HeadAnswers(Box::new(question)));
    }
}
