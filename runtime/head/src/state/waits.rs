//! Executions that wait for each other in a circle: a deadlock that nobody would ever report.
//!
//! An execution that waits for a task waits for the execution of that task. A call of an actor cannot start while all executions of its
//! concurrency group wait, or while the constructor does, so it waits for those. A circle in this graph never ends.
//!
//! What is known here is what was last said, and may be over. Who looks stuck by that is asked again before it is believed: see
//! [`suspects`](super::suspects).

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

use wingbeat_core::{ActorId, LeaseId, ProcessId, TaskId};
use wingbeat_net::messages::{Await, AwaitedTask, Callee, HeadEvent, Wait, WaitsFor, Within};

use super::suspects::Suspects;
use super::{Millis, State};

/// Executions that wait, each until it goes on or its process is lost.
#[derive(Default)]
pub(super) struct Waits {
    waits: BTreeMap<TaskId, Waiting>,
    /// The same by process, which may end.
    of_process: BTreeMap<ProcessId, BTreeSet<TaskId>>,
    /// For how many executions each task, and each actor, is among what they wait for.
    awaited: BTreeMap<TaskId, u32>,
    awaited_of_actor: BTreeMap<ActorId, u32>,
    /// The same by the actor in which they run. Without those that wait for nobody, as streams for their consumers.
    of_actor: BTreeMap<ActorId, Inside>,
    /// Those that look stuck.
    pub(super) suspects: Suspects,
    /// How often it was looked what an execution waits for.
    #[cfg(test)]
    looks: std::cell::Cell<usize>,
}

/// An execution that waits.
struct Waiting {
    /// Where it runs.
    process: ProcessId,
    wait: Wait,
    /// The latest question that had been asked when this was said.
    said_after: u64,
    /// The latest question to which it was said again; 0 for none.
    answered: u64,
}

/// Executions that wait in one actor, by their concurrency group, none for the constructor, and by how many of them keep another call from
/// running there.
type Inside = BTreeMap<Option<Box<str>>, BTreeMap<u32, BTreeSet<TaskId>>>;

/// Executions that wait for each other.
pub(super) struct Circle {
    /// Where the execution runs that is told.
    pub process: ProcessId,
    pub task: TaskId,
    /// Which of the things that it waits for is in the circle.
    pub on: TaskId,
    /// By name.
    pub members: Vec<String>,
}

/// A task that somebody waits for, by what is in its way: of each of these, one must go on before it can be done.
struct Blocked {
    on: TaskId,
    by: Vec<Vec<TaskId>>,
}

/// One wait, by what is known to be in its way. It never ends if so many of these tasks are never done.
struct InVain {
    tasks: Vec<Blocked>,
    ends_without: usize,
}

/// What is left in the way of somebody while those are taken away who go on, by number: first of a task, then of a wait.
struct InTheWay {
    of: usize,
    left: usize,
}

impl InTheWay {
    /// One thing less. Whether that was the last.
    fn goes(&mut self) -> bool {
        self.left = self.left.saturating_sub(1);
        self.left == 0
    }
}

impl Waits {
    /// An execution waits for this, whatever it waited for before. Whether it closes a circle, of which it will be asked.
    pub(super) fn begin(&mut self, now: Millis, process: ProcessId, wait: Wait) -> bool {
        let task = wait.task;
        self.remove(task);
        self.of_process.entry(process).or_default().insert(task);
        if let Some(Within { actor, group, room }) = &wait.within
            && !wait.awaits.is_empty()
        {
            let inside = self.of_actor.entry(*actor).or_default();
            inside.entry(group.clone()).or_default().entry(*room).or_default().insert(task);
        }
        for (on, callee) in tasks_in(&wait) {
            *self.awaited.entry(on).or_default() += 1;
            if let Some(callee) = callee {
                *self.awaited_of_actor.entry(callee.actor).or_default() += 1;
            }
        }
        // Whoever nobody waits for closes no circle: all that it waits for need not be looked through.
        let is_in_awaited = |within: &Within| self.awaited_of_actor.contains_key(&within.actor);
        let is_awaited = self.awaited.contains_key(&task) || wait.within.as_ref().is_some_and(is_in_awaited);
        self.waits.insert(task, Waiting { process, wait, said_after: self.suspects.latest(), answered: 0 });
        let closes = is_awaited && self.stuck_with(task, |_| true).is_some();
        self.suspects.looks_stuck(task, closes, now);
        closes
    }

    /// It was asked, and says that it waits for this. Only if it has said so before, too, that is an answer.
    pub(super) fn again(&mut self, now: Millis, process: ProcessId, question: u64, wait: Wait) {
        let task = wait.task;
        let before = self.waits.get(&task).filter(|before| before.process == process);
        let said_after = before.filter(|before| is_among(&wait, &before.wait)).map(|before| before.said_after);
        if before.is_none_or(|before| before.wait != wait) {
            self.begin(now, process, wait);
        }
        if let (Some(said_after), Some(waiting)) = (said_after, self.waits.get_mut(&task)) {
            (waiting.said_after, waiting.answered) = (said_after, question);
        }
    }

    pub(super) fn end(&mut self, task: TaskId) {
        self.suspects.forget(task);
        self.remove(task);
    }

    /// It goes on, says this process. An attempt of the same task in another one may wait.
    pub(super) fn end_in(&mut self, process: ProcessId, task: TaskId) {
        if self.process_of(task) == Some(process) {
            self.end(task);
        }
    }

    fn remove(&mut self, task: TaskId) {
        let Some(Waiting { process, wait, .. }) = self.waits.remove(&task) else { return };
        for (on, callee) in tasks_in(&wait) {
            one_less(&mut self.awaited, on);
            if let Some(callee) = callee {
                one_less(&mut self.awaited_of_actor, callee.actor);
            }
        }
        forget(&mut self.of_process, process, task);
        if let Some(Within { actor, group, room }) = wait.within
            && let Entry::Occupied(mut inside) = self.of_actor.entry(actor)
        {
            if let Entry::Occupied(mut by_room) = inside.get_mut().entry(group) {
                forget(by_room.get_mut(), room, task);
                if by_room.get().is_empty() {
                    by_room.remove();
                }
            }
            if inside.get().is_empty() {
                inside.remove();
            }
        }
    }

    /// What the executions of a process wait for.
    pub(super) fn of(&self, process: ProcessId) -> impl Iterator<Item = &Wait> {
        let tasks = self.of_process.get(&process).into_iter().flatten();
        tasks.filter_map(|task| self.waits.get(task)).map(|waiting| &waiting.wait)
    }

    /// Where an execution runs that waits.
    pub(super) fn process_of(&self, task: TaskId) -> Option<ProcessId> {
        self.waits.get(&task).map(|waiting| waiting.process)
    }

    /// Whether it has said what it waits for before this question was asked, and again since.
    pub(super) fn has_answered(&self, task: TaskId, question: u64) -> bool {
        self.waits.get(&task).is_some_and(|waiting| waiting.said_after < question && waiting.answered >= question)
    }

    pub(super) fn forget_process(&mut self, process: ProcessId) {
        for task in self.of_process.get(&process).cloned().unwrap_or_default() {
            self.end(task);
        }
        self.suspects.forget_process(process);
    }

    fn name(&self, task: TaskId) -> String {
        let Some(Waiting { wait, .. }) = self.waits.get(&task) else { return task.to_string() };
        match wait.waits_for {
            WaitsFor::Thread => format!("{} (whose thread is blocked)", wait.name),
            WaitsFor::Results | WaitsFor::Turn => wait.name.clone(),
        }
    }

    /// A circle of those with which an execution is stuck by what those have said that `count`: the shortest through it, if there is one, or else one
    /// into which it waits. As the first of it is told that can be told that it waits in vain: whoever waits for its turn or its thread cannot.
    pub(super) fn circle_of(&self, task: TaskId, counts: impl Fn(TaskId) -> bool) -> Option<Circle> {
        let stuck = self.stuck_with(task, counts)?;
        let mut circle = self.circle_through(task, &stuck);
        let (mut at, mut seen) = (task, BTreeSet::new());
        while circle.is_none() {
            if !seen.insert(at) {
                circle = self.circle_through(at, &stuck);
                break;
            }
            at = self.in_the_way_of(at, &stuck).first()?.1;
        }
        let mut circle = circle?;
        let can_be_told =
            |task: &TaskId| self.waits.get(task).is_some_and(|waiting| waiting.wait.waits_for == WaitsFor::Results);
        let first = circle.iter().position(|(member, _)| can_be_told(member))?;
        circle.rotate_left(first);
        let (task, on) = circle[0];
        let members = circle.iter().map(|(member, _)| *member).chain([task]).map(|member| self.name(member)).collect();
        Some(Circle { process: self.process_of(task)?, task, on, members })
    }

    /// The shortest circle of stuck executions through one of them, which is its first, and what each waits for there.
    fn circle_through(&self, task: TaskId, stuck: &BTreeSet<TaskId>) -> Option<Vec<(TaskId, TaskId)>> {
        // By whom each was reached first, and for what that waits there.
        let mut reached: BTreeMap<TaskId, (TaskId, TaskId)> = BTreeMap::new();
        let mut next = VecDeque::from([task]);
        while let Some(from) = next.pop_front() {
            for (on, execution) in self.in_the_way_of(from, stuck) {
                if let Entry::Vacant(first) = reached.entry(execution) {
                    first.insert((from, on));
                    next.push_back(execution);
                }
            }
            if reached.contains_key(&task) {
                break;
            }
        }
        // From the last to the first.
        let last = reached.get(&task).copied()?;
        let back =
            std::iter::successors(Some(last), |(member, _)| reached.get(member).copied().filter(|_| *member != task));
        let mut circle: Vec<(TaskId, TaskId)> = back.collect();
        circle.reverse();
        Some(circle)
    }

    /// The stuck executions that keep a stuck one from going on, and the task of each that it waits for.
    fn in_the_way_of(&self, task: TaskId, stuck: &BTreeSet<TaskId>) -> Vec<(TaskId, TaskId)> {
        let all_stuck = |executions: &Vec<TaskId>| executions.iter().all(|execution| stuck.contains(execution));
        let mut found = Vec::new();
        for Blocked { on, by } in self.awaits_of(task).into_iter().flat_map(|one| one.tasks) {
            found.extend(by.into_iter().filter(all_stuck).flatten().map(|execution| (on, execution)));
        }
        found
    }

    /// The executions that `task` waits for, through others, and that can never go on by what those have said that `count`; none if it can.
    ///
    /// An execution goes on as soon as *one* of its waits is over, and a full actor has room again as soon as one of its executions goes on. So it is
    /// found who is stuck by taking away, again and again, whoever is not.
    pub(super) fn stuck_with(&self, task: TaskId, counts: impl Fn(TaskId) -> bool) -> Option<BTreeSet<TaskId>> {
        let mut stuck = BTreeSet::new();
        // What must go before each wait ends, and whose it is; and before each task is not in vain any more, and of which wait it is.
        let (mut waits, mut tasks): (Vec<(TaskId, usize)>, Vec<InTheWay>) = Default::default();
        // Groups of executions while none of each goes on: in the way of which task. And of each execution: in which groups it is.
        let mut groups: Vec<Option<usize>> = Vec::new();
        let mut groups_with: BTreeMap<TaskId, Vec<usize>> = BTreeMap::new();
        let mut free = Vec::new();
        let (mut next, mut seen) = (vec![task], BTreeSet::from([task]));
        while let Some(task) = next.pop() {
            let awaits = if counts(task) { self.awaits_of(task) } else { Vec::new() };
            // Whoever goes on anyway need not be looked through.
            if awaits.is_empty() || awaits.iter().any(|one| one.tasks.len() < one.ends_without) {
                free.push(task);
                continue;
            }
            stuck.insert(task);
            for InVain { tasks: in_vain, ends_without } in awaits {
                waits.push((task, in_vain.len() + 1 - ends_without));
                for Blocked { by, .. } in in_vain {
                    tasks.push(InTheWay { of: waits.len() - 1, left: by.len() });
                    for executions in by {
                        for execution in executions {
                            groups_with.entry(execution).or_default().push(groups.len());
                            if seen.insert(execution) {
                                next.push(execution);
                            }
                        }
                        groups.push(Some(tasks.len() - 1));
                    }
                }
            }
        }
        while let Some(task) = free.pop() {
            stuck.remove(&task);
            for group in groups_with.remove(&task).into_iter().flatten() {
                let Some(in_vain) = groups[group].take() else { continue };
                if !tasks[in_vain].goes() {
                    continue;
                }
                let (waiter, missing) = &mut waits[tasks[in_vain].of];
                *missing = missing.saturating_sub(1);
                if *missing == 0 {
                    free.push(*waiter);
                }
            }
        }
        stuck.contains(&task).then_some(stuck)
    }

    /// The waits of an execution, with what is in the way of each.
    fn awaits_of(&self, task: TaskId) -> Vec<InVain> {
        #[cfg(test)]
        self.looks.set(self.looks.get() + 1);
        let Some(Waiting { wait, .. }) = self.waits.get(&task) else { return Vec::new() };
        let in_vain = wait.awaits.iter().map(|one| InVain {
            tasks: one.on.iter().filter_map(|on| self.blocked(on)).collect(),
            ends_without: one.ends_without.max(1) as usize,
        });
        in_vain.collect()
    }

    /// A task, if anything is in its way.
    fn blocked(&self, on: &AwaitedTask) -> Option<Blocked> {
        let all = std::iter::once((&on.task, &on.callee)).chain(on.after.iter().map(|(task, callee)| (task, callee)));
        let by = all.map(|(task, callee)| match callee {
            _ if self.waits.contains_key(task) => vec![*task],
            Some(callee) => self.if_full(callee),
            None => Vec::new(),
        });
        let by: Vec<Vec<TaskId>> = by.filter(|executions| !executions.is_empty()).collect();
        (!by.is_empty()).then_some(Blocked { on: on.task, by })
    }

    /// The executions of which one must go on before a call of this group begins, if no more can.
    fn if_full(&self, callee: &Callee) -> Vec<TaskId> {
        let Some(inside) = self.of_actor.get(&callee.actor) else { return Vec::new() };
        let (constructor, group) = (inside.get(&None), inside.get(&Some(callee.group.clone())));
        constructor.into_iter().chain(group).map(all_if_full).find(|all| !all.is_empty()).unwrap_or_default()
    }
}

/// The tasks that must be done, and those before them, and of each what it is a call of.
fn tasks_in(wait: &Wait) -> impl Iterator<Item = (TaskId, Option<&Callee>)> {
    let on = wait.awaits.iter().flat_map(|one| &one.on);
    on.flat_map(|on| {
        let after = on.after.iter().map(|(task, callee)| (*task, callee.as_ref()));
        std::iter::once((on.task, on.callee.as_ref())).chain(after)
    })
}

/// Whether an execution that says this now has said so before, too: results may have come meanwhile, and nothing else.
fn is_among(now: &Wait, before: &Wait) -> bool {
    let is_same =
        (&before.within, before.waits_for, before.awaits.len()) == (&now.within, now.waits_for, now.awaits.len());
    let is_in = |(now, before): (&Await, &Await)| {
        let before_by_task: BTreeMap<TaskId, &AwaitedTask> = before.on.iter().map(|on| (on.task, on)).collect();
        let was_said = |now: &AwaitedTask| {
            before_by_task.get(&now.task).is_some_and(|before| now.after.iter().all(|on| before.after.contains(on)))
        };
        now.ends_without == before.ends_without && now.on.iter().all(was_said)
    };
    is_same && now.awaits.iter().zip(&before.awaits).all(is_in)
}

/// All that wait in a group, if nothing more can run there: as many wait as may run, or as many block a thread as there are.
fn all_if_full(by_room: &BTreeMap<u32, BTreeSet<TaskId>>) -> Vec<TaskId> {
    let mut count = 0;
    let full = by_room.iter().find(|(room, executions)| {
        // Those that block a thread count as those do that do not.
        count += executions.len();
        count >= **room as usize
    });
    full.map_or_else(Vec::new, |(room, _)| {
        by_room.range(..=room).flat_map(|(_, executions)| executions).copied().collect()
    })
}

fn one_less<K: Ord>(counts: &mut BTreeMap<K, u32>, key: K) {
    if let Entry::Occupied(mut count) = counts.entry(key) {
        *count.get_mut() -= 1;
        if *count.get() == 0 {
            count.remove();
        }
    }
}

fn forget<K: Ord + Copy>(index: &mut BTreeMap<K, BTreeSet<TaskId>>, key: K, task: TaskId) {
    if let Some(tasks) = index.get_mut(&key) {
        tasks.remove(&task);
        if tasks.is_empty() {
            index.remove(&key);
        }
    }
}

impl State {
    pub(super) fn waiting(&mut self, process: ProcessId, lease: Option<LeaseId>, wait: Wait) {
        let task = wait.task;
        self.waits.begin(self.now, process, wait);
        if let Some(lease) = lease {
            self.note_absent_wait(lease, task, true);
            self.lease_waits(lease, task, true);
        }
    }

    pub(super) fn tell_of_deadlocks(&mut self) {
        for Circle { process, task, on, members } in self.waits.confirmed(self.now) {
            self.tell(process, HeadEvent::Deadlock { task, on, cycle: members });
        }
        for (process, question, tasks) in self.waits.questions(self.now) {
            self.tell(process, HeadEvent::SayAgain { question, tasks });
        }
    }

    pub(super) fn said_again(&mut self, process: ProcessId, question: u64, wait: Option<Wait>) {
        match wait {
            // What another head had asked is no question here.
            Some(wait) if !self.waits.suspects.asks(question) => drop(self.waits.begin(self.now, process, wait)),
            Some(wait) => self.waits.again(self.now, process, question, wait),
            None => {
                self.waits.has_answered_all(process, question);
                self.tell_of_deadlocks();
            }
        }
    }

    pub(super) fn resumed(&mut self, process: ProcessId, lease: Option<LeaseId>, task: TaskId) {
        self.waits.end_in(process, task);
        if let Some(lease) = lease {
            self.note_absent_wait(lease, task, false);
            self.lease_waits(lease, task, false);
        }
    }
}

#[cfg(test)]
#[path = "waits_tests.rs"]
mod tests;
