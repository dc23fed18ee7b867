//! Executions that wait for each other in a circle: a deadlock that nobody would ever report.
//!
//! An execution that waits for a task waits for the execution of that task. A call of an actor cannot start while all executions of its
//! concurrency group wait, or while the constructor does, so it waits for those. A circle in this graph never ends.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

use wingbeat_core::{ActorId, LeaseId, ProcessId, TaskId};
use wingbeat_net::messages::{Callee, HeadEvent, Wait, WaitsFor, Within};

use super::{Millis, State};

/// A circle is believed when it is still there after this long: the news that somebody goes on may be on its way, and a
/// real circle stays.
pub(super) const CONFIRM_AFTER: Millis = 200;

/// Executions that wait, each until it goes on or its process is lost.
#[derive(Default)]
pub(super) struct Waits {
    /// What each waits for, and the process in which it runs.
    waits: BTreeMap<TaskId, (ProcessId, Wait)>,
    /// The same by process, which may end.
    of_process: BTreeMap<ProcessId, BTreeSet<TaskId>>,
    /// For how many executions each task, and each actor, is among what they wait for.
    awaited: BTreeMap<TaskId, u32>,
    awaited_of_actor: BTreeMap<ActorId, u32>,
    /// The same by the actor in which they run. Without those that wait for nobody, as streams for their consumers.
    of_actor: BTreeMap<ActorId, Inside>,
    /// Executions that closed a circle, and when. For [`CONFIRM_AFTER`], or until they go on.
    suspects: BTreeMap<TaskId, Millis>,
    /// How often it was looked what an execution waits for.
    #[cfg(test)]
    looks: std::cell::Cell<usize>,
}

/// Executions that wait in one actor, by their concurrency group, none for the constructor, and by how many of them keep another call from
/// running there.
type Inside = BTreeMap<Option<Box<str>>, BTreeMap<u32, BTreeSet<TaskId>>>;

/// Executions that wait for each other.
pub(super) struct Circle {
    /// Where the execution runs that closed it.
    pub process: ProcessId,
    pub task: TaskId,
    /// Which of the things that it waits for is in the circle.
    pub on: TaskId,
    /// By name.
    pub members: Vec<String>,
}

impl Waits {
    /// An execution waits for this, whatever it waited for before. Whether it closes a circle, which [`Waits::confirmed`] will tell if it lasts.
    pub(super) fn begin(&mut self, now: Millis, process: ProcessId, wait: Wait) -> bool {
        let task = wait.task;
        // Said again, as where there is room for more or fewer.
        let is_same = self.waits.get(&task).is_some_and(|(_, before)| before.on == wait.on);
        let since = self.suspects.get(&task).copied().filter(|_| is_same).unwrap_or(now);
        self.end(task);
        self.of_process.entry(process).or_default().insert(task);
        if let Some(Within { actor, group, room }) = &wait.within
            && !wait.on.is_empty()
        {
            let inside = self.of_actor.entry(*actor).or_default();
            inside.entry(group.clone()).or_default().entry(*room).or_default().insert(task);
        }
        for (on, callee) in &wait.on {
            *self.awaited.entry(*on).or_default() += 1;
            if let Some(callee) = callee {
                *self.awaited_of_actor.entry(callee.actor).or_default() += 1;
            }
        }
        // Whoever nobody waits for closes no circle: all that it waits for need not be looked through.
        let is_in_awaited = |within: &Within| self.awaited_of_actor.contains_key(&within.actor);
        let is_awaited = self.awaited.contains_key(&task) || wait.within.as_ref().is_some_and(is_in_awaited);
        self.waits.insert(task, (process, wait));
        let closes = is_awaited && self.circle_of(task).is_some();
        if closes {
            self.suspects.insert(task, since);
        }
        closes
    }

    /// Whether time must pass to tell a circle from a coincidence.
    pub(super) fn has_suspects(&self) -> bool {
        !self.suspects.is_empty()
    }

    /// The circles that lasted.
    pub(super) fn confirmed(&mut self, now: Millis) -> Vec<Circle> {
        let due: Vec<TaskId> =
            self.suspects.iter().filter(|(_, since)| now >= **since + CONFIRM_AFTER).map(|(task, _)| *task).collect();
        let mut circles = Vec::new();
        for task in due {
            self.suspects.remove(&task);
            circles.extend(self.circle_of(task).and_then(|members| self.told(members)));
        }
        circles
    }

    /// The first of a circle that can be told that it waits in vain, as whoever waits for its turn or its thread cannot, and what it is told.
    fn told(&self, mut circle: Vec<TaskId>) -> Option<Circle> {
        let can_be_told =
            |task: &TaskId| self.waits.get(task).is_some_and(|(_, wait)| wait.waits_for == WaitsFor::Results);
        let first = circle.iter().position(can_be_told)?;
        circle.rotate_left(first);
        let task = circle[0];
        let next = circle.get(1).copied().unwrap_or(task);
        let (on, _) = self.blockers(task).into_iter().find(|(_, executions)| executions.contains(&next))?;
        let (process, _) = self.waits.get(&task)?;
        let members = circle.iter().chain([&task]).map(|task| self.name(*task)).collect();
        Some(Circle { process: *process, task, on, members })
    }

    /// The shortest circle through an execution, which is its first.
    fn circle_of(&self, task: TaskId) -> Option<Vec<TaskId>> {
        let blocked = self.blocked_with(task)?;
        // By whom each was reached first.
        let mut reached: BTreeMap<TaskId, TaskId> = BTreeMap::new();
        let mut next = VecDeque::from([task]);
        while let Some(from) = next.pop_front() {
            for execution in self.blockers(from).into_iter().flat_map(|(_, executions)| executions) {
                if blocked.contains(&execution) && !reached.contains_key(&execution) {
                    reached.insert(execution, from);
                    next.push_back(execution);
                }
            }
            if reached.contains_key(&task) {
                break;
            }
        }
        let back = std::iter::successors(Some(*reached.get(&task)?), |member| {
            reached.get(member).copied().filter(|_| *member != task)
        });
        let mut circle: Vec<TaskId> = back.collect();
        circle.reverse();
        Some(circle)
    }

    pub(super) fn end(&mut self, task: TaskId) {
        self.suspects.remove(&task);
        let Some((process, wait)) = self.waits.remove(&task) else { return };
        for (on, callee) in &wait.on {
            one_less(&mut self.awaited, *on);
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
        tasks.filter_map(|task| self.waits.get(task)).map(|(_, wait)| wait)
    }

    pub(super) fn forget_process(&mut self, process: ProcessId) {
        for task in self.of_process.get(&process).cloned().unwrap_or_default() {
            self.end(task);
        }
    }

    fn name(&self, task: TaskId) -> String {
        let Some((_, wait)) = self.waits.get(&task) else { return task.to_string() };
        match wait.waits_for {
            WaitsFor::Thread => format!("{} (whose thread is blocked)", wait.name),
            WaitsFor::Results | WaitsFor::Turn => wait.name.clone(),
        }
    }

    /// The executions that `task` waits for, through others, and that can never go on; none if it can.
    ///
    /// A full actor has room again as soon as *one* of its executions goes on. So it blocks only if all of
    /// them are blocked, which is found by taking away, again and again, whoever is not.
    fn blocked_with(&self, task: TaskId) -> Option<BTreeSet<TaskId>> {
        let mut blocked = BTreeSet::new();
        // Groups of executions of which one must go on first: for whom, and in which groups each execution is.
        let mut waiters = Vec::new();
        let mut groups_with: BTreeMap<TaskId, Vec<usize>> = BTreeMap::new();
        let mut groups_of: BTreeMap<TaskId, usize> = BTreeMap::new();
        let mut free = Vec::new();
        let mut next = vec![task];
        while let Some(task) = next.pop() {
            if !self.waits.contains_key(&task) || !blocked.insert(task) {
                continue;
            }
            let blockers = self.blockers(task);
            if blockers.is_empty() {
                free.push(task);
            }
            groups_of.insert(task, blockers.len());
            for (_, executions) in blockers {
                for execution in &executions {
                    groups_with.entry(*execution).or_default().push(waiters.len());
                }
                waiters.push(Some(task));
                next.extend(executions);
            }
        }
        // A group with somebody who goes on holds nobody up, and who is held up by none goes on.
        while let Some(task) = free.pop() {
            blocked.remove(&task);
            for group in groups_with.remove(&task).into_iter().flatten() {
                let Some(waiter) = waiters[group].take() else { continue };
                if let Some(groups) = groups_of.get_mut(&waiter) {
                    *groups -= 1;
                    if *groups == 0 {
                        free.push(waiter);
                    }
                }
            }
        }
        blocked.contains(&task).then_some(blocked)
    }

    /// What `task` waits for, each with the executions of which at least one must go on first.
    fn blockers(&self, task: TaskId) -> Vec<(TaskId, Vec<TaskId>)> {
        #[cfg(test)]
        self.looks.set(self.looks.get() + 1);
        let Some((_, wait)) = self.waits.get(&task) else { return Vec::new() };
        let mut blockers = Vec::new();
        for (on, callee) in &wait.on {
            if self.waits.contains_key(on) {
                blockers.push((*on, vec![*on]));
            } else if let Some(callee) = callee {
                let executions = self.if_full(callee);
                if !executions.is_empty() {
                    blockers.push((*on, executions));
                }
            }
        }
        blockers
    }

    /// The executions of which one must go on before a call of this group begins, if no more can.
    fn if_full(&self, callee: &Callee) -> Vec<TaskId> {
        let Some(inside) = self.of_actor.get(&callee.actor) else { return Vec::new() };
        let (constructor, group) = (inside.get(&None), inside.get(&Some(callee.group.clone())));
        constructor.into_iter().chain(group).map(all_if_full).find(|all| !all.is_empty()).unwrap_or_default()
    }
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
    }

    pub(super) fn resumed(&mut self, lease: Option<LeaseId>, task: TaskId) {
        self.waits.end(task);
        if let Some(lease) = lease {
            self.note_absent_wait(lease, task, false);
            self.lease_waits(lease, task, false);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn task(seq: u64) -> TaskId {
        TaskId { owner: ProcessId(1), seq }
    }

    fn wait(seq: u64, actor: Option<(u64, u32)>, on: &[(u64, Option<u64>)]) -> Wait {
        Wait {
            task: task(seq),
            name: format!("execution {seq}"),
            within: actor.map(|(actor, room)| Within { actor: ActorId(actor), group: Some("".into()), room }),
            waits_for: WaitsFor::Results,
            on: on.iter().map(|(seq, actor)| (task(*seq), actor.map(|actor| callee(actor, "")))).collect(),
        }
    }

    fn callee(actor: u64, group: &str) -> Callee {
        Callee { actor: ActorId(actor), group: group.into() }
    }

    /// An execution in the actor 100, in a group that runs two at a time, which waits for a call of a group of it.
    fn inside(seq: u64, group: Option<&str>, on: (u64, &str)) -> Wait {
        let within =
            Within { actor: ActorId(100), group: group.map(Into::into), room: if group.is_some() { 2 } else { 1 } };
        let on = vec![(task(on.0), Some(callee(100, on.1)))];
        Wait {
            task: task(seq),
            name: format!("execution {seq}"),
            within: Some(within),
            waits_for: WaitsFor::Results,
            on,
        }
    }

    #[test]
    fn two_actors_that_call_each_other_and_wait_are_a_circle() {
        let mut waits = Waits::default();
        // A runs 1 and waits for 2, sent to B; B runs 2 and waits for 3, sent to A.
        assert!(!waits.begin(0, ProcessId(10), wait(1, Some((100, 1)), &[(2, Some(200))])));
        assert!(waits.begin(0, ProcessId(20), wait(2, Some((200, 1)), &[(3, Some(100))])));
        // Believed only when it lasts.
        assert!(waits.confirmed(CONFIRM_AFTER - 1).is_empty());
        let [circle] = &waits.confirmed(CONFIRM_AFTER)[..] else { panic!("no circle") };
        assert_eq!((circle.process, circle.task, circle.on), (ProcessId(20), task(2), task(3)));
        assert_eq!(circle.members, ["execution 2", "execution 1", "execution 2"]);
        assert!(!waits.has_suspects());
    }

    #[test]
    fn of_several_things_that_somebody_waits_for_the_one_in_the_circle_is_named() {
        let mut waits = Waits::default();
        waits.begin(0, ProcessId(10), wait(1, Some((100, 1)), &[(2, Some(200)), (7, None), (8, Some(300))]));
        assert!(waits.begin(0, ProcessId(20), wait(2, Some((200, 1)), &[(6, None), (3, Some(100)), (9, Some(300))])));
        let on: Vec<TaskId> = waits.confirmed(CONFIRM_AFTER).iter().map(|circle| circle.on).collect();
        assert_eq!(on, [task(3)]);
    }

    #[test]
    fn an_actor_with_room_for_another_call_is_no_circle() {
        let mut waits = Waits::default();
        assert!(!waits.begin(0, ProcessId(10), wait(1, Some((100, 2)), &[(2, Some(200))])));
        assert!(!waits.begin(0, ProcessId(20), wait(2, Some((200, 1)), &[(3, Some(100))])));
    }

    #[test]
    fn an_actor_all_of_whose_threads_are_blocked_is_full_though_it_may_run_more() {
        let mut waits = Waits::default();
        // One waits and blocks nothing, and two block the two threads. A call can begin on none.
        assert!(!waits.begin(0, ProcessId(10), wait(1, Some((100, 9)), &[(11, Some(100))])));
        assert!(!waits.begin(0, ProcessId(10), wait(2, Some((100, 2)), &[(12, Some(100))])));
        assert!(waits.begin(0, ProcessId(10), wait(3, Some((100, 2)), &[(13, Some(100))])));
        let circles = waits.confirmed(CONFIRM_AFTER);
        assert_eq!(circles.iter().map(|circle| circle.task).collect::<Vec<_>>(), [task(3)]);
        waits.end(task(3));
        assert!(waits.circle_of(task(1)).is_none());
    }

    #[test]
    fn of_many_that_wait_in_a_full_actor_each_is_told_of_itself_alone() {
        let mut waits = Waits::default();
        for seq in 1..=64 {
            waits.begin(0, ProcessId(10), wait(seq, Some((100, 64)), &[(100 + seq, Some(100))]));
        }
        let circles = waits.confirmed(CONFIRM_AFTER);
        let [circle] = &circles[..] else { panic!("{} circles", circles.len()) };
        assert_eq!((circle.task, circle.on), (task(64), task(164)));
        assert_eq!(circle.members, ["execution 64", "execution 64"]);
    }

    #[test]
    fn of_a_circle_through_the_state_of_an_actor_whoever_holds_it_is_told() {
        let mut waits = Waits::default();
        // 1 has the state, and waits for 2, which waits for its turn.
        assert!(!waits.begin(0, ProcessId(10), wait(1, Some((100, 8)), &[(2, Some(100))])));
        assert!(waits.begin(
            0,
            ProcessId(10),
            Wait { waits_for: WaitsFor::Turn, ..wait(2, Some((100, 8)), &[(1, None)]) }
        ));
        let circles = waits.confirmed(CONFIRM_AFTER);
        let [circle] = &circles[..] else { panic!("{} circles", circles.len()) };
        assert_eq!((circle.task, circle.on), (task(1), task(2)));
        assert_eq!(circle.members, ["execution 1", "execution 2", "execution 1"]);
    }

    #[test]
    fn a_group_is_full_whatever_runs_in_others() {
        let mut waits = Waits::default();
        // Each waits for the other group, which has room.
        assert!(!waits.begin(0, ProcessId(10), inside(1, Some("io"), (11, ""))));
        assert!(!waits.begin(0, ProcessId(10), inside(2, Some("io"), (12, ""))));
        // One waits for its own group, which has room; then none has.
        assert!(!waits.begin(0, ProcessId(10), inside(3, Some(""), (13, ""))));
        assert!(waits.begin(0, ProcessId(10), inside(4, Some(""), (14, ""))));
        let circles = waits.confirmed(CONFIRM_AFTER);
        assert_eq!(circles.iter().map(|circle| circle.task).collect::<Vec<_>>(), [task(4)]);
        (1..=4).for_each(|seq| waits.end(task(seq)));
        assert!(waits.of_actor.is_empty() && waits.awaited_of_actor.is_empty());
    }

    #[test]
    fn two_groups_that_wait_for_each_other_are_a_circle() {
        let mut waits = Waits::default();
        assert!(!waits.begin(0, ProcessId(10), inside(1, Some("io"), (11, ""))));
        assert!(!waits.begin(0, ProcessId(10), inside(2, Some("io"), (12, ""))));
        assert!(!waits.begin(0, ProcessId(10), inside(3, Some(""), (13, "io"))));
        assert!(waits.begin(0, ProcessId(10), inside(4, Some(""), (14, "io"))));
    }

    #[test]
    fn no_call_of_any_group_begins_beside_a_constructor() {
        let mut waits = Waits::default();
        assert!(waits.begin(0, ProcessId(10), inside(1, None, (11, "io"))));
    }

    #[test]
    fn a_circle_through_a_task_is_found() {
        let mut waits = Waits::default();
        assert!(!waits.begin(0, ProcessId(10), wait(1, Some((100, 1)), &[(2, None)])));
        assert!(waits.begin(0, ProcessId(30), wait(2, None, &[(3, Some(100))])));
    }

    /// Each waits for the one before, and says so after that, as where messages of many processes come in any order.
    #[test]
    fn a_long_chain_is_looked_through_once_and_only_by_whoever_somebody_waits_for() {
        const LENGTH: u64 = 2_000;
        let mut waits = Waits::default();
        for seq in 1..LENGTH {
            assert!(!waits.begin(0, ProcessId(10), wait(seq, None, &[(seq - 1, None)])));
        }
        assert_eq!(waits.looks.get(), 0, "nobody waits for the last one");
        // Somebody waits for the last one, which says again what it waits for.
        waits.begin(0, ProcessId(10), wait(LENGTH + 1, None, &[(LENGTH - 1, None)]));
        waits.begin(0, ProcessId(10), wait(LENGTH - 1, None, &[(LENGTH - 2, None)]));
        assert!(waits.looks.get() <= LENGTH as usize, "{}", waits.looks.get());
        (1..LENGTH + 2).for_each(|seq| waits.end(task(seq)));
        assert!(waits.awaited.is_empty() && waits.of_process.is_empty());
    }

    #[test]
    fn a_wait_that_ended_is_forgotten() {
        let mut waits = Waits::default();
        waits.begin(0, ProcessId(10), wait(1, Some((100, 1)), &[(2, Some(200))]));
        waits.end(task(1));
        assert!(!waits.begin(0, ProcessId(20), wait(2, Some((200, 1)), &[(3, Some(100))])));
    }

    #[test]
    fn a_circle_that_is_said_again_lasts() {
        let mut waits = Waits::default();
        let last = || wait(2, Some((200, 1)), &[(3, Some(100))]);
        waits.begin(0, ProcessId(10), wait(1, Some((100, 1)), &[(2, Some(200))]));
        assert!(waits.begin(0, ProcessId(20), last()));
        assert!(waits.begin(CONFIRM_AFTER - 1, ProcessId(20), last()));
        assert_eq!(waits.confirmed(CONFIRM_AFTER).len(), 1);
    }

    #[test]
    fn whoever_blocks_the_thread_of_one_that_it_waits_for_is_told() {
        let mut waits = Waits::default();
        waits.begin(0, ProcessId(10), wait(1, None, &[(2, None)]));
        let on_its_thread = Wait { waits_for: WaitsFor::Thread, ..wait(2, None, &[(1, None)]) };
        assert!(waits.begin(0, ProcessId(10), on_its_thread));
        let circle = waits.confirmed(CONFIRM_AFTER).remove(0);
        assert_eq!((circle.task, circle.on), (task(1), task(2)));
        assert_eq!(circle.members, ["execution 1", "execution 2 (whose thread is blocked)", "execution 1"]);
    }

    #[test]
    fn a_circle_that_the_news_dissolves_is_none() {
        let mut waits = Waits::default();
        waits.begin(0, ProcessId(10), wait(1, Some((100, 1)), &[(2, Some(200))]));
        assert!(waits.begin(5, ProcessId(20), wait(4, Some((200, 1)), &[(5, Some(100))])));
        // The result of 2 had been on its way: 1 goes on.
        waits.end(task(1));
        assert!(waits.confirmed(5 + CONFIRM_AFTER).is_empty());
    }
}
