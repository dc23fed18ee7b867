//! Tasks that run in the process of the one that submitted them, which waits: what the threads of a worker process do, in one thread.

use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use wingbeat_core::spec::TaskSpec;
use wingbeat_core::{LeaseId, ProcessId};
use wingbeat_net::messages::{NodeMessage, PeerMessage};
use wingbeat_node as node;

use super::execution::{Execution, Shared};
use super::nodes::Machine;
use super::planned::{AtHome, Planned, TimesOut};
use super::process::Process;
use super::programs;
use super::site::Site;
use super::world::{Happening, World};
use crate::owner::dispatch::TakenHome;

/// When all that runs in a process has waited for so long, its CPU is free for others.
const IDLE_FOR: u64 = 2;
/// How often is looked at what waits at home.
const LOOKS_EVERY: u64 = 100;

impl Shared {
    /// Now, for what counts in instants.
    pub(super) fn instant(&self) -> Instant {
        self.began + Duration::from_millis(self.now())
    }

    fn plan(&self, after: u64, process: &Process, what: AtHome) {
        self.planned.borrow_mut().push(Planned::AtHome(after, process.id, what));
    }
}

impl Process {
    /// Has somebody run something at home, if there is anything. Answers whether somebody will.
    fn goes_on_at_home(&self, shared: &Shared) -> bool {
        let goes_on = self.queue.borrow().work.takes_home() && self.owner.asks_for_home();
        if goes_on {
            shared.plan(shared.below(4) / 2, self, AtHome::Take);
        }
        goes_on
    }

    fn goes_on_or_is_watched(&self, shared: &Shared) {
        if !self.goes_on_at_home(shared) {
            self.look_whether_all_wait(shared);
        }
    }

    /// There is something to run at home.
    pub(super) fn has_work_at_home(&self, shared: &Shared) {
        let takes = self.queue.borrow().work.takes_home();
        match takes {
            true => drop(self.goes_on_at_home(shared)),
            false => self.owner.closes_home(),
        }
    }

    /// If all wait, and that lasts, the CPU is free for others.
    fn look_whether_all_wait(&self, shared: &Shared) {
        let mut queue = self.queue.borrow_mut();
        if queue.work.all_wait() && !std::mem::replace(&mut queue.is_watched, true) {
            shared.plan(IDLE_FOR, self, AtHome::AllWait);
        }
    }

    /// The CPUs of the task that was sent here are free, or not.
    fn cpus_are_free(&self, are_free: bool) {
        let base = self.queue.borrow().running.clone();
        let Some(base) = base else { return };
        let messages = base.waits.borrow_mut().cpus_are_free(&base.waiter(), are_free);
        for message in messages {
            self.owner.outside.tell_head(&self.owner, message);
        }
    }

    /// The task that was sent here begins to wait. Whether the process goes on at home.
    pub(super) fn begin_wait(&self, shared: &Shared) -> bool {
        let gave = self.queue.borrow_mut().work.begin_wait();
        self.give_back(gave);
        let computes = self.queue.borrow().work.computes_at_home();
        computes || self.goes_on_at_home(shared)
    }

    pub(super) fn end_wait(&self, shared: &Shared) {
        self.owner.closes_home();
        let ready = self.queue.borrow_mut().work.end_wait();
        self.say_ready(ready);
        self.look_for_leftovers(shared);
    }

    pub(super) fn begin_wait_at_home(&self, execution: &Execution, shared: &Shared) {
        self.queue.borrow_mut().work.waits_at_home(execution.spec.id, true);
        self.goes_on_or_is_watched(shared);
    }

    pub(super) fn end_wait_at_home(&self, execution: &Execution) {
        let counts = self.queue.borrow_mut().work.waits_at_home(execution.spec.id, false);
        if counts {
            self.cpus_are_free(false);
        }
    }

    fn say_ready(&self, ready: Option<(ProcessId, LeaseId)>) {
        if let Some((owner, lease)) = ready {
            self.say(owner, PeerMessage::Ready(lease));
        }
    }

    /// The lease is wanted back: nothing more begins at home.
    pub(super) fn is_recalled(&self, lease: LeaseId, shared: &Shared) {
        let mut queue = self.queue.borrow_mut();
        queue.work.recalled(lease);
        queue.recalled = Some(lease);
        drop(queue);
        self.owner.closes_home();
        self.look_whether_all_wait(shared);
    }

    /// Something that ran at home has ended, or is given up.
    pub(super) fn done_at_home(&self, shared: &Shared) {
        let ready = self.queue.borrow_mut().work.ready_after_home();
        self.say_ready(ready);
        self.look_for_leftovers(shared);
        shared.plan(shared.below(2), self, AtHome::Take);
    }

    pub(super) fn look_for_leftovers(&self, shared: &Shared) {
        let mut queue = self.queue.borrow_mut();
        let has_task = queue.running.is_some();
        if let Some(are_left) = queue.work.leftovers(has_task) {
            queue.says_left = are_left;
            shared.report.borrow_mut().leftovers += u64::from(are_left);
            shared.planned.borrow_mut().push(Planned::LeftBehind(self.id, are_left));
        }
    }

    /// A task that runs at home was cancelled by force. It is asked to stop, and may take a while.
    pub(super) fn give_up_at_home(&self, execution: &Rc<Execution>, shared: &Shared) {
        execution.cancels_children(&self.owner);
        shared.report.borrow_mut().given_up += 1;
        execution.is_given_up.set(true);
        execution.is_disowned.set(true);
        if execution.has_begun.get() && !execution.waits.borrow().has_any() && shared.below(2) == 0 {
            execution.hears_at.set(shared.now() + shared.below(60));
        }
        execution.cancel(shared);
        self.done_at_home(shared);
        self.goes_on_or_is_watched(shared);
    }

    /// Has the head told of the waits at home that last.
    pub(super) fn look_at_waits(&self, shared: &Shared) {
        if !self.looks_at_waits.replace(true) {
            shared.plan(LOOKS_EVERY, self, AtHome::Waits);
        }
    }

    /// Whether there are waits that have not lasted yet.
    fn tells_of_waits(&self) -> bool {
        let mut is_untold = false;
        for execution in self.executions() {
            let (message, again) = execution.waits.borrow_mut().told_if_it_lasts(&execution.waiter());
            if let Some((message, _)) = message {
                self.owner.outside.tell_head(&self.owner, message);
            }
            is_untold |= again;
        }
        is_untold
    }

    /// All that runs here, but for the constructor of an actor.
    pub(super) fn executions(&self) -> Vec<Rc<Execution>> {
        self.executions.borrow().values().cloned().collect()
    }
}

impl World {
    pub(super) fn carry_planned(&mut self) -> bool {
        let planned = std::mem::take(&mut *self.shared.planned.borrow_mut());
        let has_any = !planned.is_empty();
        for planned in planned {
            match planned {
                Planned::AtHome(after, process, what) => self.schedule(after, Happening::AtHome(process, what)),
                Planned::TimesOut(TimesOut { after, at, task, outputs }) => {
                    self.schedule(after, Happening::TimesOut(at, task, outputs));
                }
                Planned::LeftBehind(by, are_left) => {
                    if let Some(process) = self.alive(by) {
                        let says = node::Event::Says(by, NodeMessage::LeftBehind(are_left));
                        self.on_machine(process.node.get(), 1, Machine::Node(Box::new(says)));
                    }
                }
            }
        }
        has_any
    }

    pub(super) fn at_home(&mut self, id: ProcessId, what: AtHome) {
        let Some(process) = self.alive(id) else { return };
        match what {
            AtHome::Take => self.take_home(&process),
            AtHome::AllWait => {
                let mut queue = process.queue.borrow_mut();
                queue.is_watched = false;
                let are_free = queue.work.all_wait();
                drop(queue);
                if are_free {
                    process.cpus_are_free(true);
                }
            }
            AtHome::Waits => {
                let is_untold = process.tells_of_waits();
                let queue = process.queue.borrow();
                let (takes, may_be_stuck) =
                    (queue.work.takes_home(), queue.work.all_wait() && queue.work.at_home() > 0);
                drop(queue);
                match takes && process.owner.asks_for_home() {
                    true => self.take_home(&process),
                    false => process.look_whether_all_wait(&self.shared),
                }
                match is_untold || may_be_stuck {
                    true => self.schedule(LOOKS_EVERY, Happening::AtHome(id, AtHome::Waits)),
                    false => {
                        process.looks_at_waits.set(false);
                        if process.tells_of_waits() {
                            process.look_at_waits(&self.shared);
                        }
                    }
                }
            }
        }
    }

    fn take_home(&mut self, process: &Rc<Process>) {
        let takes = process.queue.borrow().work.takes_home();
        let taken = if takes { process.owner.take_home(|_| true) } else { TakenHome::Nothing };
        match taken {
            TakenHome::Task { spec, .. } => self.begin_at_home(process, spec),
            TakenHome::NotThis | TakenHome::Nothing => process.look_whether_all_wait(&self.shared),
        }
    }

    fn begin_at_home(&mut self, process: &Rc<Process>, spec: Arc<TaskSpec>) {
        self.shared.report.borrow_mut().at_home += 1;
        process.check_recalled(spec.id);
        process.queue.borrow_mut().work.took_home(spec.id);
        process.cpus_are_free(false);
        let number = self.shared.id();
        let execution = Rc::new(Execution::new((number, self.shared.now()), spec, None, None, true));
        process.started(&execution);
        process.check_beside(&execution, &self.shared);
        let site = Site { process: process.clone(), execution: Some(execution.clone()), shared: self.shared.clone() };
        self.shared.begin(number, process, Some(execution), Box::pin(programs::attempt(site)));
    }
}
