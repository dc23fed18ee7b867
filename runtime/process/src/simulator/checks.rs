//! What must hold.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use wingbeat_core::error::Error;
use wingbeat_core::spec::TaskSpec;
use wingbeat_core::{ActorId, JobId, LeaseId, NodeId, ObjectId, ProcessId, TaskId};
use wingbeat_head::state::{Event, FactKey, Speaker};
use wingbeat_net::messages::HeadMessage;

use super::changed::Changed;
use super::execution::{Execution, Shared};
use super::process::Process;
use super::queue::refs_of;
use super::site::Site;
use super::value::Plan;
use super::world::{Happening, World};

/// How often all of the head's state is checked in a large cluster, in steps of the head.
const CHECK_ALL_EVERY: u64 = 5_000;
/// How long all in a process may wait before its CPU is free.
const IDLE_LIMIT: u64 = 200;

impl Shared {
    /// Whether what has happened explains an error.
    fn explains(&self, error: &Error) -> bool {
        let report = *self.report.borrow();
        let broke = report.deaths > 0 || report.cuts > 0;
        match error {
            Error::OwnerDied { object, owner } if self.must_outlive(*object, *owner) => false,
            Error::ObjectLost { object, .. } if self.must_outlive(*object, object.owner()) => {
                self.has_lost_a_node.get()
            }
            Error::Cancelled { task } => {
                self.is_asked(task) || broke || self.gave_back() || self.is_part_of_cancelled(task)
            }
            Error::WorkerCrashed { process, .. } => {
                (broke || self.gave_back()) && self.ended.borrow().contains(process)
            }
            // What was still on a node that is told to end was moved, and has not failed; unless its owner had lost contact with it
            // before, and had given the lease up.
            Error::Application { task, .. } => {
                // What is cancelled is not tried again.
                let costs = broke || self.gave_back() || report.fills > 0;
                self.explains_failure(task, costs || self.is_asked(task) || self.is_part_of_cancelled(task))
            }
            Error::TimedOut { what, .. } => self.timed_out.borrow().contains(what),
            Error::OutOfMemory { .. } => self.explains_shortage(error),
            Error::NodeDied { node, .. } => {
                !self.nodes.borrow().contains(node) && (report.cuts > 0 || !self.stopped.borrow().contains(node))
            }
            // With faults, calls also give what the actor owns, which ends with it.
            Error::OwnerDied { owner, .. } => {
                // What ran in a group that was given back has ended.
                let ends = self.config.faults || self.gave_back()
                    // A lease that was given back to a head which died before it could tell the node, and whose owner has ended, too,
                    // looks to the next one as if something still ran under it.
                    || report.restarts > 1;
                ends && self.ended.borrow().contains(owner) || report.cuts > 0
            }
            Error::ObjectLost { .. } | Error::ContactLost { .. } | Error::ActorEnded { .. } => {
                broke || self.gave_back()
            }
            // Its last handle was dropped before the one that was found was registered.
            Error::ActorDied { actor, cause, .. } if matches!(&**cause, Error::ActorEnded { by } if by.contains("drop") || by.contains("does not know")) => {
                broke || self.found.borrow().contains(actor)
            }
            Error::ActorDied { actor, cause, .. } if matches!(**cause, Error::NodeDied { .. }) => {
                self.explains(cause) || report.deaths > 0 && self.yielding.borrow().contains(actor)
            }
            // A drained node does not wait for this one, nor for calls that it runs.
            Error::ActorUnavailable { actor, cause, .. } if matches!(&**cause, Error::NodeDied { .. }) => {
                self.explains(cause) || self.yielding.borrow().contains(actor)
            }
            Error::ActorUnavailable { cause, .. } | Error::ActorDied { cause, .. } => self.explains(cause),
            // A quota that was too low for it, or a node that is not there.
            Error::Infeasible { .. } => broke || self.was_limited.get() || report.restarts > 0,
            Error::Failed { .. } => broke,
            Error::StoreFull { .. } => report.fills > 0,
            Error::PlacementGroupGone { .. } => broke || self.gave_back(),
            _ => false,
        }
    }

    /// Whether an object must be readable after its owner's end, by whoever refers to it.
    fn must_outlive(&self, object: ObjectId, owner: ProcessId) -> bool {
        let Some(steward) = self.stewards.lock().get(&owner).copied() else { return false };
        let lives = self.nodes.borrow().iter().any(|node| node.steward() == steward);
        // Whoever has lost contact with the owner, or with its steward, holds nothing.
        let is_cut = [owner, steward].iter().any(|process| self.cut.borrow().contains(process));
        lives && !is_cut && self.outlives.borrow().contains(&object)
    }

    /// Whether a placement group was given back, which ends what runs in it.
    fn gave_back(&self) -> bool {
        !self.given_back.borrow().is_empty()
    }

    /// Whether a task was to fail with this, and was not to be tried again. Where something has broken, that has cost retries.
    fn explains_failure(&self, task: &str, broke: bool) -> bool {
        let failing = self.failing.borrow();
        failing.get(task).is_some_and(|failing| !failing.is_retried || failing.retries < failing.attempts || broke)
    }

    fn is_asked(&self, task: &str) -> bool {
        self.cancelled.borrow().iter().any(|known| known.to_string() == *task)
    }

    fn is_part_of_cancelled(&self, task: &str) -> bool {
        let known: Vec<_> = self.parents.borrow().keys().copied().filter(|known| known.to_string() == task).collect();
        known.into_iter().any(|known| self.was_cancelled(known))
    }
}

impl Site {
    /// An object has failed: something must explain it.
    pub(super) fn check_error(&self, object: ObjectId, error: &Error) {
        self.shared.report.borrow_mut().errors += 1;
        self.shared.trace(|| format!("{} finds that {object} failed: {error}", self.process.id));
        let is_of_given_up = |execution: &Rc<Execution>| {
            execution.is_at_home && (execution.is_given_up.get() || self.shared.was_cancelled(execution.spec.id))
        };
        // Cancelled by force at home, it is over for its owner at once, which may free its arguments; it hears of that later.
        if self.execution.as_ref().is_some_and(is_of_given_up) {
            return;
        }
        assert!(self.shared.explains(error), "{object} failed, and nothing explains it: {error:?}");
    }

    /// Calls of one caller begin in order, and each once. One that is made again comes before those after it.
    pub(super) fn check_order(&self, actor: ActorId, plan: &Plan, spec: &TaskSpec) {
        let life = self.process.queue.borrow().being.as_ref().map_or(0, |(_, incarnation, _)| incarnation.0);
        let mut calls = self.shared.calls.borrow_mut();
        let last = calls.entry((actor, life, spec.id.owner)).or_default();
        assert!(plan.number > *last || spec.attempt > 0, "{} is call {}, and {last} was before", spec.id, plan.number);
        *last = plan.number;
    }
}

impl Process {
    /// Whether it is an actor that was given a ref of this object at first.
    fn was_made_with(&self, object: ObjectId) -> bool {
        let queue = self.queue.borrow();
        queue.being.as_ref().is_some_and(|(spec, ..)| spec.args.iter().flat_map(refs_of).any(|id| *id == object))
    }
}

/// Beside which of the others something runs, and what of that is known to be dangerous.
impl Process {
    /// Those that run here, but for those of whom nobody waits for the end.
    fn counting(&self) -> impl Iterator<Item = Rc<Execution>> {
        self.executions().into_iter().filter(|execution| !execution.is_given_up.get())
    }

    /// Something begins here. Beside others runs only what may end with them, and what has ended with its process is alone from then on.
    pub(super) fn check_beside(&self, begins: &Execution, shared: &Shared) {
        let (id, spec) = (self.id, &begins.spec);
        shared.begun_in.borrow_mut().insert((spec.id, spec.attempt), id);
        let before = spec.attempt.checked_sub(1).map(|attempt| (spec.id, attempt));
        if let Some(crashed) = before.and_then(|before| shared.crashed.borrow().get(&before).copied())
            && !shared.moved.borrow().contains(&crashed)
        {
            assert!(!spec.shares_process, "{} ended with {crashed}, and shares {id}", spec.id);
        }
        if begins.place.is_some() {
            return;
        }
        for other in self.counting().filter(|other| other.number != begins.number) {
            let may = spec.shares_process && other.spec.shares_process;
            assert!(may, "{} begins in {id} beside {}, and one of them has its own process", spec.id, other.spec.id);
        }
    }

    /// A task here is about to end the process. Whatever was beside such a task before runs alone.
    pub(super) fn check_fatal(&self, fatal: TaskId, shared: &Shared) {
        for other in self.counting().filter(|other| other.spec.id != fatal) {
            let before = shared.beside_fatal.borrow_mut().insert(other.spec.id, self.id);
            if let Some(before) = before.filter(|before| *before != self.id) {
                let is_moved = shared.moved.borrow().contains(&before);
                assert!(is_moved, "{} ended with {before}, and ends with {} for {fatal}", other.spec.id, self.id);
            }
        }
    }

    /// A task of this process's own begins: not where others need the lease.
    pub(super) fn check_recalled(&self, task: TaskId) {
        let queue = self.queue.borrow();
        let lease = queue.running.as_ref().and_then(|base| base.lease);
        assert!(lease.is_some() && lease != queue.recalled, "{task} begins in {} under {lease:?}", self.id);
    }

    /// What is left here is said.
    fn check_left(&self) {
        let queue = self.queue.borrow();
        if queue.running.is_some() || queue.being.is_some() || queue.is_beginning {
            return;
        }
        if let Some(left) = self.counting().find(|_| !queue.says_left) {
            panic!("{} is left in {}, and its node was not told", left.spec.id, self.id);
        }
    }

    /// CPUs are lent while nothing here computes, and only then.
    fn check_cpus(&self, now: u64) {
        let mut queue = self.queue.borrow_mut();
        let Some(base) = queue.running.clone().filter(|base| base.place.is_none()) else {
            queue.idle_since = None;
            return;
        };
        let frees = base.waits.borrow().frees_cpus();
        if frees && let Some(other) = self.counting().find(|execution| !execution.waits.borrow().has_any()) {
            panic!("{} has lent the CPUs of {}, and {} computes there", self.id, base.spec.id, other.spec.id);
        }
        match queue.work.all_wait() && !frees {
            true => {
                let since = *queue.idle_since.get_or_insert(now);
                assert!(
                    now - since < IDLE_LIMIT,
                    "all in {} have waited since {since}, and its CPU is not free",
                    self.id
                );
            }
            false => queue.idle_since = None,
        }
    }
}

impl World {
    /// The head lends the CPUs of a process that has said so, and of no other, as far as it has heard all that was said.
    fn check_lent(&self, process: &Process) {
        let base = process.queue.borrow().running.clone().filter(|base| base.place.is_none());
        let Some((base, lease)) = base.and_then(|base| base.lease.map(|lease| (base, lease))) else { return };
        let heard_at = self.to_head_at.get(&Speaker::Process(process.id)).copied().unwrap_or(0);
        if self.is_head_away || heard_at.max(self.went_on_at) >= self.shared.now() || !self.has_told_head(process) {
            return;
        }
        if let Some(are_lent) = self.grants.are_lent(lease) {
            let frees = base.waits.borrow().frees_cpus();
            assert_eq!(are_lent, frees, "whether the CPUs of {lease} in {} are lent, and may be", process.id);
        }
    }

    /// A process ends with what runs there.
    pub(super) fn note_what_died(&self, process: &Process) {
        let here = process.counting().map(|execution| ((execution.spec.id, execution.spec.attempt), process.id));
        self.shared.crashed.borrow_mut().extend(here);
    }

    /// The head is about to take this in.
    pub(super) fn note_changes(&mut self, event: &Event) {
        let Event::Says(by, message) = event else { return };
        match *by {
            Speaker::Node(node) => self.changed.nodes.extend([node]),
            Speaker::Process(process) => self.changed.processes.extend([process]),
        }
        if let HeadMessage::ReturnLease(lease)
        | HeadMessage::AbandonLease(lease)
        | HeadMessage::Waiting { lease: Some(lease), .. }
        | HeadMessage::Resumed { lease: Some(lease), .. } = message
        {
            self.changed.nodes.extend(self.state.node_of(*lease));
        }
    }

    /// After the head has decided: all of its state in a small cluster. In a large one what has changed, and all now and then.
    pub(super) fn check_head(&mut self) {
        let Changed { nodes, processes } = std::mem::take(&mut self.changed);
        self.head_steps += 1;
        let is_due = self.shared.config.large().is_none() || self.head_steps.is_multiple_of(CHECK_ALL_EVERY);
        let checked = match is_due {
            true => self.state.audit_all(),
            false => self.state.audit(nodes).and_then(|()| self.state.audit_owners(processes)),
        };
        if let Err(why) = checked {
            panic!("the head's state is wrong: {why}");
        }
        if self.shared.config.large().is_none()
            && let Some(who) = self.state.overlooked()
        {
            panic!("somebody waits for nothing: {who}");
        }
    }

    /// By the head's own words, nothing was given twice.
    pub(super) fn check_grants(&self, granted: &[(NodeId, LeaseId)]) {
        for (node, lease) in granted {
            if let Some(node) = self.nodes.get(node) {
                self.grants.check_node(&node.info, *lease);
            }
            // Of a quota that only those know who have kept it, the head knows when they are back.
            if self.kept.is_none() {
                self.grants.check_quota(*lease);
            }
        }
    }

    /// What was written down is what the head's state is.
    pub(super) fn check_facts(&self) {
        let mut durable: BTreeMap<FactKey, String> = BTreeMap::new();
        for fact in self.state.durable() {
            durable.insert(fact.key(), format!("{fact:?}"));
        }
        for (key, fact) in &self.facts {
            assert_eq!(durable.remove(key), Some(format!("{fact:?}")), "what was written down, and what is");
        }
        assert!(durable.is_empty(), "never written down: {durable:?}");
    }

    /// What a process has freed, nobody holds. Where contact was lost, readers find out.
    pub(super) fn check_freed(&self, process: &Process) {
        let owned = process.owner.objects.owned_by(process.id);
        let before = process.owned.replace(owned.clone());
        let report = self.shared.report.borrow();
        if report.deaths + report.cuts > 0 || self.shared.gave_back() {
            return;
        }
        // Whoever finds an actor by its name may be late.
        let found = self.shared.found_handles.borrow();
        for freed in before.difference(&owned).filter(|freed| !found.contains(freed)) {
            // An actor whose last handle was dropped is about to end, and so is what it was made with.
            // A steward lets go of the refs in a value that was freed when it hears so.
            let holds = |other: &&Rc<Process>| {
                other.owner.objects.get(*freed).is_some() && !other.was_made_with(*freed) && !other.is_steward
            };
            if let Some(holder) = self.processes.values().find(holds) {
                panic!("{} has freed {freed}, and {} holds it", process.id, holder.id);
            }
        }
    }

    /// A life of an actor begins when no other is left. On a machine that stands still, and was given up, it does nothing more.
    pub(super) fn check_alone(&self, begins: &Process, actor: ActorId) {
        let is_it = |process: &&Rc<Process>| {
            process.id != begins.id
                && !self.is_still(process.id)
                && process.queue.borrow().being.as_ref().is_some_and(|(spec, ..)| spec.id == actor)
        };
        if let Some(other) = self.processes.values().find(is_it) {
            panic!("{actor} begins to live in {}, and is alive in {}", begins.id, other.id);
        }
    }

    /// Processes that were not looked at have nothing to do.
    pub(super) fn check_settled(&self) {
        for process in self.processes.values() {
            if self.is_still(process.id) {
                process.queue.borrow_mut().idle_since = None;
                continue;
            }
            let is_planned = !process.has_released() || process.releases_planned.get();
            assert!(is_planned && !process.was_woken(), "{} has something to do, and nobody looks at it", process.id);
            assert!(process.next().is_none(), "{} could begin something, and nobody looks at it", process.id);
            process.check_cpus(self.shared.now());
            self.check_lent(process);
            process.check_left();
        }
    }

    /// Nothing is under way and nobody holds anything: nothing is left.
    pub(super) fn check_at_rest(&mut self) {
        for process in self.processes.values() {
            let left = process.owner.what_is_left();
            assert!(left.is_empty(), "everything is over, and {} has {left:?}", process.id);
            let held = process.held.what_is_left();
            assert!(held.is_empty(), "everything is over, and {} holds the refs in {held:?}", process.id);
        }
        self.ask_for_owners();
        let has_broken = self.shared.config.faults || self.shared.gave_back();
        let copies = self.shared.copies.borrow();
        // An item of one of several attempts may be left, and a copy of which a process could not tell before it was ended for its
        // devices, or died. They go with their owner.
        let is_of_stream = |copy: &(ObjectId, NodeId)| self.shared.streams.borrow().contains(&copy.0.task);
        let is_untold = |copy: &(ObjectId, NodeId)| self.shared.untold.borrow().contains(copy);
        let is_left = |copy: &&(ObjectId, NodeId)| !(is_untold(copy) || has_broken && is_of_stream(copy));
        let left: Vec<_> = copies.keys().filter(is_left).collect();
        assert!(left.is_empty(), "everything is over, and copies are left: {left:?}");
        drop(copies);
        self.check_facts();
        let picture = self.state.picture();
        for node in &picture.nodes {
            let (free, all) = (&node.available, &node.info.resources);
            assert!(node.leases == 0 && free == all, "everything is over, and {free} of {all} are free");
        }
        assert!(picture.pending.is_empty(), "everything is over, and somebody waits: {:?}", picture.pending);
        assert!(picture.actors.is_empty(), "everything is over, and actors live: {:?}", picture.actors);
    }

    /// Nodes ask the head whose objects nobody owns any more.
    fn ask_for_owners(&mut self) {
        for node in self.nodes.keys().copied().collect::<Vec<_>>() {
            let mut owners: BTreeMap<JobId, BTreeSet<ProcessId>> = BTreeMap::new();
            for ((object, _), (job, _)) in self.shared.copies.borrow().iter().filter(|((_, at), _)| *at == node) {
                owners.entry(*job).or_default().insert(object.owner());
            }
            if !owners.is_empty() {
                self.say_to_head(Speaker::Node(node), HeadMessage::Owners(owners));
            }
        }
        self.come_to_rest();
    }

    /// Worker processes and drivers end in order.
    pub(super) fn end_everything(&mut self) {
        // Longer than idle worker processes are kept.
        let idle = self.shared.config.large().map_or(0, |large| large.idle);
        self.schedule(1_000 + idle, Happening::HeadTick);
        self.come_to_rest();
        self.retire_idle_workers();
        self.come_to_rest();
        let drivers: Vec<_> =
            self.processes.values().filter(|process| !process.is_steward).map(|process| process.id).collect();
        for driver in drivers {
            let process = &self.processes[&driver];
            assert!(process.is_driver, "{driver} has not ended");
            self.dies(driver);
        }
        self.come_to_rest();
        self.ask_for_owners();
        assert!(self.shared.copies.borrow().is_empty(), "everything is over, and copies are left");
        assert!(self.state.picture().jobs.is_empty(), "everything is over, and the head knows of jobs");
        assert!(self.running.is_empty(), "everything is over, and programs run");
        for steward in self.processes.values() {
            let left = steward.owner.what_is_left();
            assert!(left.is_empty(), "everything is over, and {} has {left:?}", steward.id);
        }
    }

    /// Who waits for what, for a run that hangs.
    pub(super) fn what_waits(&self) -> String {
        let mut lines = Vec::new();
        for running in self.running.values() {
            let task = running.execution.as_ref().map(|execution| execution.spec.id);
            lines.push(format!("{} runs {task:?}", running.process.id));
        }
        for process in self.processes.values() {
            let left = process.owner.what_is_left();
            if !left.is_empty() {
                lines.push(format!("{} has {left:?}", process.id));
            }
        }
        let mut picture = self.state.picture();
        if self.shared.config.large().is_some() {
            picture.nodes.clear();
            picture.jobs.clear();
        }
        lines.push(format!("{picture:?}"));
        lines.join("\n")
    }
}
