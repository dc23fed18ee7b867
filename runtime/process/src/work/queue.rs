//! The unstarted tasks and calls of a worker process, and who they are for.
//!
//! Whatever is given back was not started and never will be here. `R` is how the user of the queue knows something that runs.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use wingbeat_core::spec::{ActorSpec, TaskSpec};
use wingbeat_core::{ActorId, Incarnation, LeaseId, ProcessId, TaskId};

use super::group::{ByGroup, DEFAULT_GROUP, Group, Takes, ThreadCalls, group_of};

/// Something to start.
pub enum Next {
    /// A task, with its number on its lease.
    Task {
        /// Of the task.
        lease: LeaseId,
        /// Tasks with lower numbers have begun, or were given back.
        number: u64,
        /// What to run.
        spec: Arc<TaskSpec>,
    },
    /// A call of the actor that the process is.
    Call {
        /// What to run.
        spec: Arc<TaskSpec>,
        /// Whether another thread is to be started for the next one: none is empty, and there may be more.
        starts_thread: bool,
    },
    /// The process is to become an actor.
    Become(Box<Become>),
    /// There will be nothing more.
    End,
}

/// An actor to become.
pub struct Become {
    /// Its lease.
    pub lease: LeaseId,
    /// What it is.
    pub spec: Arc<ActorSpec>,
    /// Which of its lives.
    pub incarnation: Incarnation,
}

/// The actor that the process is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Actor {
    /// Its id.
    pub id: ActorId,
    /// Which of its lives.
    pub incarnation: Incarnation,
}

/// Why calls are not taken.
pub enum Refused {
    /// They are for another actor, or another life of this one.
    Another(Vec<Arc<TaskSpec>>),
    /// The actor has no such concurrency groups.
    UnknownGroup(Vec<Arc<TaskSpec>>),
    /// The actor has asked for its end.
    Exits(Vec<Arc<TaskSpec>>),
}

/// Unstarted tasks that their owner is to run elsewhere.
#[derive(Debug, PartialEq, Eq)]
pub struct GaveBack {
    /// Their owner.
    pub to: ProcessId,
    /// Of which lease they are.
    pub lease: LeaseId,
    /// The tasks, perhaps none.
    pub tasks: Vec<TaskId>,
    /// Whether more of them would come back, too: the code that runs waits, or the lease is over.
    pub waiting: bool,
}

/// What cancelling has found.
pub enum Cancelled<R> {
    /// It is not here, or not found yet.
    Nothing,
    /// It had not been started, and will not be.
    Unstarted(Arc<TaskSpec>),
    /// It runs.
    Running(R),
}

/// What a worker process has to do. Lives as long as the process. Its many fields are one state: what may begin, and what goes back, depends
/// on most of them.
pub struct Queue<R> {
    /// With who sent them, their lease and their number on it.
    tasks: VecDeque<(ProcessId, LeaseId, u64, Arc<TaskSpec>)>,
    /// Of the actor, by name. None before it is one.
    groups: ByGroup<Group>,
    /// The actor that it is to become, until the main thread takes it out.
    to_become: Option<Box<Become>>,
    /// Set once: an actor ends with its process.
    actor: Option<Actor>,
    /// The last; its end is not told, another replaces it.
    lease: Option<LeaseId>,
    /// The owner that sent the last tasks, to whom readiness is told.
    owner: Option<ProcessId>,
    /// What runs, so that cancelling finds it. Until it is done.
    running: BTreeMap<TaskId, R>,
    /// What was taken out and is not done. Not all of it runs yet.
    busy: usize,
    /// What was cancelled, with or without force, while something was taken out and not begun: it may have been this.
    cancelled_early: Vec<(TaskId, bool)>,
    /// Executions of tasks that were sent here, and that wait in user code.
    waiting: u32,
    /// Whether the task that was taken out last shares this process while it waits.
    shares: bool,
    /// Whether others need its lease: then nothing more begins at home.
    is_recalled: bool,
    /// Tasks of this very process that have begun and are not done, and whether each waits.
    at_home: BTreeMap<TaskId, bool>,
    /// Those of them that were cancelled by force: nobody waits for them, and their code runs on until it ends.
    given_up: BTreeSet<TaskId>,
    /// Whether tasks were given back that may not begin beside those.
    gave_back_for_home: bool,
    /// Whether the node knows that something runs on which an earlier task has left behind.
    are_left: bool,
    /// Only goes forward.
    phase: Phase,
    /// Nothing is started meanwhile: it may have been started elsewhere.
    is_held: bool,
    /// It ends when its steward agrees.
    leaves: bool,
    /// The actor has asked for its end: no further call begins, and the head says when the process ends.
    exits: bool,
}

/// How far the process is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    Open,
    /// An actor that is to end when its calls are done.
    Draining,
    /// The process is about to be killed, and nothing is started any more: it would be killed with it.
    Killed,
    /// There will be nothing more.
    Ended,
}

impl<R> Default for Queue<R> {
    fn default() -> Self {
        Queue {
            tasks: VecDeque::new(),
            groups: ByGroup::default(),
            to_become: None,
            actor: None,
            lease: None,
            owner: None,
            running: BTreeMap::new(),
            busy: 0,
            cancelled_early: Vec::new(),
            waiting: 0,
            shares: false,
            is_recalled: false,
            at_home: BTreeMap::new(),
            given_up: BTreeSet::new(),
            gave_back_for_home: false,
            are_left: false,
            phase: Phase::Open,
            is_held: false,
            leaves: false,
            exits: false,
        }
    }
}

impl<R: Clone> Queue<R> {
    /// Takes in tasks of a lease; the first has this number. Those that cannot be taken go back.
    pub fn add_tasks(
        &mut self,
        from: ProcessId,
        lease: LeaseId,
        first: u64,
        tasks: Vec<Arc<TaskSpec>>,
    ) -> Option<GaveBack> {
        if self.takes_nothing(lease) {
            return Some(self.give_back(from, lease, tasks.iter().map(|task| task.id).collect()));
        }
        self.owner = Some(from);
        // What an earlier task has left here may end the process.
        if self.runs_at_home() && tasks.iter().any(|task| !task.shares_process) {
            self.gave_back_for_home = true;
            let tasks = tasks.iter().map(|task| task.id).collect();
            return Some(GaveBack { to: from, lease, tasks, waiting: true });
        }
        self.tasks.extend((first..).zip(tasks).map(|(number, spec)| (from, lease, number, spec)));
        None
    }

    /// Takes in calls of an actor, those of known groups.
    ///
    /// # Errors
    /// The calls that will not be run here.
    pub fn add_calls(&mut self, actor: Actor, calls: Vec<Arc<TaskSpec>>) -> Result<(), Refused> {
        if self.actor != Some(actor) {
            return Err(Refused::Another(calls));
        }
        if self.phase == Phase::Ended {
            // The process is about to end, and the head says what becomes of the actor and of these calls.
            return Ok(());
        }
        if self.exits {
            return Err(Refused::Exits(calls));
        }
        let mut unknown = Vec::new();
        for spec in calls {
            match self.groups.get_mut(group_of(&spec)) {
                Some(group) => group.waiting.push_back(spec),
                None => unknown.push(spec),
            }
        }
        match unknown.is_empty() {
            true => Ok(()),
            false => Err(Refused::UnknownGroup(unknown)),
        }
    }

    /// Gives back the last unstarted tasks of a lease, so many at most. Of this lease alone: a late message must not take
    /// another owner's.
    pub fn take_back(&mut self, from: ProcessId, lease: LeaseId, most: u32) -> GaveBack {
        let of_lease = self.tasks.iter().filter(|(_, of, ..)| *of == lease).count();
        let mut kept = of_lease.saturating_sub(most as usize);
        let mut back = Vec::new();
        self.tasks.retain(|(_, of, _, spec)| {
            if *of != lease {
                return true;
            }
            if kept == 0 {
                back.push(spec.id);
                return false;
            }
            kept -= 1;
            true
        });
        self.give_back(from, lease, back)
    }

    /// The next thing for a process that is no actor (yet); none if that is to be waited for.
    pub fn next_task(&mut self) -> Option<Next> {
        if let Some(rest) = self.starts_nothing() {
            return rest;
        }
        if let Some(actor) = self.to_become.take() {
            return Some(Next::Become(actor));
        }
        if self.runs_at_home() && self.tasks.front().is_some_and(|(_, _, _, spec)| !spec.shares_process) {
            return None;
        }
        let (_, lease, number, spec) = self.tasks.pop_front()?;
        self.busy += 1;
        self.shares = spec.shares_process;
        Some(Next::Task { lease, number, spec })
    }

    /// Whether tasks wait that were sent here.
    pub fn has_tasks(&self) -> bool {
        !self.tasks.is_empty()
    }

    /// Whether calls of a concurrency group wait.
    pub fn has_calls(&self, group: &str) -> bool {
        self.groups.get(group).is_some_and(|group| !group.waiting.is_empty())
    }

    /// If a call of a group waits that may begin: which threads of the group may take it.
    pub fn wants(&self, group: &str) -> Option<Takes> {
        // Nobody is to look as long as there is nothing to be had.
        self.starts_nothing().is_none().then(|| self.groups.get(group)?.wants())?
    }

    /// Whether an actor is to end when its calls are done, and they are.
    pub fn ends_now(&self) -> bool {
        self.phase == Phase::Draining && self.busy == 0 && self.groups.values().all(|group| group.waiting.is_empty())
    }

    /// Another thread takes calls of a group from now on, if one is to be started.
    pub fn starts_thread(&mut self, group: &str) -> bool {
        self.groups.get_mut(group).is_some_and(Group::starts_thread)
    }

    /// That thread could not be started. How many the group has.
    pub fn has_no_thread(&mut self, group: &str) -> u32 {
        self.groups.get_mut(group).map_or(0, Group::has_no_thread)
    }

    /// Whether a task of this process may begin here: the one that was sent here waits, and so do all that run at home.
    pub fn takes_home(&self) -> bool {
        self.all_wait()
            && self.shares
            && !self.is_recalled
            && self.actor.is_none()
            && self.phase == Phase::Open
            && !self.is_held
    }

    /// Takes in a task of this process, which begins now.
    pub fn took_home(&mut self, task: TaskId) {
        self.at_home.insert(task, false);
        self.busy += 1;
    }

    /// One that was taken in by [`Queue::took_home`] begins to wait, or goes on. Whether it still counts: not after it was cancelled
    /// by force.
    pub fn waits_at_home(&mut self, task: TaskId, waits: bool) -> bool {
        let known = self.at_home.get_mut(&task);
        known.map(|known| *known = waits).is_some()
    }

    /// Whether something of this process's own runs here and does not wait.
    pub fn computes_at_home(&self) -> bool {
        self.at_home.values().any(|waits| !waits)
    }

    /// Whether code of a task of this process runs here, also of one that was given up. It may end the process: nothing begins beside it
    /// that may not run twice.
    fn runs_at_home(&self) -> bool {
        !self.at_home.is_empty() || !self.given_up.is_empty()
    }

    /// Who is to know that more is taken, if tasks were given back because something was left here, and nothing is now.
    pub fn ready_after_home(&mut self) -> Option<(ProcessId, LeaseId)> {
        if self.runs_at_home() || self.waiting > 0 || !std::mem::take(&mut self.gave_back_for_home) {
            return None;
        }
        self.owner.zip(self.lease)
    }

    /// How many tasks of this process have begun here.
    pub fn at_home(&self) -> usize {
        self.at_home.len()
    }

    /// Whether something goes on here also when no task does that was sent here: what one has left behind, or a wait that it has not ended.
    pub fn goes_on_without_task(&self) -> bool {
        self.actor.is_none() && (self.waiting > 0 || self.runs_at_home())
    }

    /// What the node is told, if anything, when a task that was sent here has ended, or something that one has left behind, which keeps
    /// other leases away; `has_task`: one that was sent here runs.
    pub fn leftovers(&mut self, has_task: bool) -> Option<bool> {
        let goes_on = self.goes_on_without_task();
        let are_left = goes_on && !has_task;
        let is_news = are_left && !self.are_left || self.are_left && !goes_on;
        is_news.then(|| {
            self.are_left = are_left;
            are_left
        })
    }

    /// Whether the task that was sent here waits, and all that was begun beside it.
    pub fn all_wait(&self) -> bool {
        self.waiting > 0 && self.at_home.values().all(|waits| *waits)
    }

    /// The next call of a concurrency group, for one of its threads, which has others under way; none if it is to be waited for.
    pub fn next_call(&mut self, group: &str, thread: ThreadCalls) -> Option<Next> {
        if let Some(rest) = self.starts_nothing() {
            return rest;
        }
        if let Some((spec, starts_thread)) = self.groups.get_mut(group).and_then(|group| group.take(thread)) {
            self.busy += 1;
            return Some(Next::Call { spec, starts_thread });
        }
        if self.ends_now() {
            self.phase = Phase::Ended;
            return Some(Next::End);
        }
        None
    }

    fn starts_nothing(&self) -> Option<Option<Next>> {
        match self.phase {
            Phase::Ended => Some(Some(Next::End)),
            Phase::Killed => Some(None),
            Phase::Open | Phase::Draining => self.is_held.then_some(None),
        }
    }

    /// What was taken out runs: cancelling finds it from now on. Answers whether it was cancelled already, and then whether by
    /// force.
    #[must_use]
    pub fn started(&mut self, task: TaskId, execution: R) -> Option<bool> {
        self.running.insert(task, execution);
        let early: Vec<_> = self.cancelled_early.extract_if(.., |(cancelled, _)| *cancelled == task).collect();
        let force = early.iter().any(|(_, force)| *force);
        if force && !self.gives_up(task) {
            self.kill();
        }
        (!early.is_empty()).then_some(force)
    }

    /// What runs.
    pub fn running(&self) -> impl Iterator<Item = &R> {
        self.running.values()
    }

    /// Nobody waits any more for a task that runs at home. False if it does not.
    fn gives_up(&mut self, task: TaskId) -> bool {
        let is_at_home = self.at_home.remove(&task).is_some();
        if is_at_home {
            self.given_up.insert(task);
        }
        is_at_home
    }

    /// A call begins to wait for the consumer of its stream, and another one may run in its place, or it goes on; `beside`: what else its
    /// thread has under way. How many of its group run beyond those that may, if that has changed.
    pub fn pauses(&mut self, call: &TaskSpec, pauses: bool, beside: ThreadCalls) -> Option<u32> {
        self.groups.get_mut(group_of(call))?.pauses(pauses, beside)
    }

    /// A call that was taken out is done; `beside`: what else its thread has under way. How many of its group run beyond those that may, if that
    /// has changed.
    pub fn call_done(&mut self, call: &TaskSpec, beside: ThreadCalls) -> Option<u32> {
        self.groups.get_mut(group_of(call))?.done(beside)
    }

    /// What was taken out is done. A later attempt at the same task may have begun since, which is not `this`.
    pub fn done(&mut self, task: TaskId, is_this: impl FnOnce(&R) -> bool) {
        let is_this = self.running.get(&task).is_some_and(is_this);
        if is_this {
            self.running.remove(&task);
        }
        if !is_this || self.at_home.remove(&task).is_none() {
            self.given_up.remove(&task);
        }
        self.busy -= 1;
        if self.busy == self.running.len() {
            self.cancelled_early.clear();
        }
    }

    /// Takes out what is cancelled, or says that it runs.
    pub fn cancel(&mut self, task: TaskId, force: bool) -> Cancelled<R> {
        if let Some(at) = self.tasks.iter().position(|(_, _, _, spec)| spec.id == task)
            && let Some((_, _, _, spec)) = self.tasks.remove(at)
        {
            return Cancelled::Unstarted(spec);
        }
        for group in self.groups.values_mut() {
            if let Some(at) = group.waiting.iter().position(|spec| spec.id == task)
                && let Some(spec) = group.waiting.remove(at)
            {
                return Cancelled::Unstarted(spec);
            }
        }
        if let Some(running) = self.running.get(&task).cloned() {
            // At home, the process is that of its owner, too, and lives on.
            if force && !self.gives_up(task) {
                // At once: what runs may end by itself, and nothing else is to begin and be killed in its place.
                self.kill();
            }
            return Cancelled::Running(running);
        }
        if self.busy > self.running.len() {
            self.cancelled_early.push((task, force));
        }
        Cancelled::Nothing
    }

    /// Forgets what a process wanted that is gone. Answers with what runs for it.
    pub fn peer_lost(&mut self, peer: ProcessId) -> Vec<R> {
        self.tasks.retain(|(owner, ..)| *owner != peer);
        for group in self.groups.values_mut() {
            group.waiting.retain(|spec| spec.id.owner != peer);
        }
        self.running.iter().filter(|(task, _)| task.owner == peer).map(|(_, running)| running.clone()).collect()
    }

    /// Others need this lease: what was submitted here goes to leases that are shared fairly.
    pub fn recalled(&mut self, lease: LeaseId) {
        self.is_recalled |= self.lease == Some(lease);
    }

    /// Has tasks of a lease from now on.
    pub fn lease(&mut self, lease: LeaseId) {
        (self.leaves, self.is_recalled) = (false, false);
        self.lease = Some(lease);
    }

    /// The process ends when its steward agrees, unless it is leased before.
    pub fn would_leave(&mut self) {
        self.leaves = true;
    }

    /// It does not. Whether it would have.
    pub fn stays(&mut self) -> bool {
        std::mem::take(&mut self.leaves)
    }

    /// Is an actor from now on. Calls that come while it is made wait.
    pub fn start_actor(&mut self, actor: Become) {
        (self.lease, self.leaves) = (Some(actor.lease), false);
        self.actor = Some(Actor { id: actor.spec.id, incarnation: actor.incarnation });
        let mut main = Group::new(actor.spec.max_concurrency);
        // The main thread, which makes the actor, takes its calls.
        main.starts_thread();
        self.groups.insert(DEFAULT_GROUP, main);
        for (name, most) in &actor.spec.groups {
            self.groups.insert(name, Group::new(*most));
        }
        self.to_become = Some(Box::new(actor));
    }

    /// An actor ends when its calls are done.
    pub fn drain(&mut self) {
        if self.phase == Phase::Open {
            self.phase = Phase::Draining;
        }
    }

    /// The actor has asked for its end: no further call begins, and those that wait are given back. It waits to be drained, so that the head
    /// knows why it ends.
    pub fn exit_actor(&mut self) -> Vec<Arc<TaskSpec>> {
        self.exits = true;
        self.groups.values_mut().flat_map(|group| std::mem::take(&mut group.waiting)).collect()
    }

    /// Nothing is started any more.
    pub fn end(&mut self) {
        self.phase = Phase::Ended;
    }

    /// The process is about to be killed.
    fn kill(&mut self) {
        if self.phase != Phase::Ended {
            self.phase = Phase::Killed;
        }
    }

    /// Starts nothing while it is held; what arrives waits.
    pub fn hold(&mut self, is_held: bool) {
        self.is_held = is_held;
    }

    /// The code that runs begins to wait: unstarted tasks go back.
    pub fn begin_wait(&mut self) -> Option<GaveBack> {
        if self.actor.is_some() {
            return None;
        }
        self.waiting += 1;
        if self.waiting > 1 {
            return None;
        }
        let back = self.tasks.drain(..).map(|(_, _, _, spec)| spec.id).collect();
        Some(self.give_back(self.owner?, self.lease?, back))
    }

    /// It goes on. Answers with who is to know that more is taken.
    pub fn end_wait(&mut self) -> Option<(ProcessId, LeaseId)> {
        if self.actor.is_some() {
            return None;
        }
        self.waiting -= 1;
        if self.waiting > 0 { None } else { self.owner.zip(self.lease) }
    }

    /// Whether an actor waits for its calls to be done.
    pub fn is_draining(&self) -> bool {
        self.phase == Phase::Draining
    }

    /// Whether there will be nothing more.
    pub fn has_ended(&self) -> bool {
        self.phase == Phase::Ended
    }

    fn takes_nothing(&self, lease: LeaseId) -> bool {
        self.waiting > 0 || self.lease != Some(lease) || self.phase == Phase::Ended
    }

    fn give_back(&self, to: ProcessId, lease: LeaseId, tasks: Vec<TaskId>) -> GaveBack {
        // One that is no longer leased, or is about to end, takes nothing either.
        GaveBack { to, lease, tasks, waiting: self.takes_nothing(lease) }
    }
}

#[cfg(test)]
#[path = "queue_tests.rs"]
mod tests;
