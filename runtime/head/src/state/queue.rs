//! Who waits to be placed, and in which order.
//!
//! Waiters of one job that ask for the same are one *class*: when one of them does not fit, none does. A class that did
//! not fit is blocked until something is given back that it could use. Jobs come first that have the smallest share of
//! the cluster; as what a job holds changes all the time, only the job moves then, and not all who wait in its name.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use wingbeat_core::{ActorId, JobId, PlacementGroupId, ProcessId};

use super::shapes::ShapeId;
use super::{Millis, after};

/// Blocked classes that are looked at when something was given back; the others are looked at as time passes.
const LOOKED_AT: usize = 64;
/// Blocked classes that are tried again in one tick.
const RETRIED: usize = 128;

/// Somebody who waits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Waiter {
    /// A process with tasks of a shape.
    Tasks(ProcessId, ShapeId),
    Actor(ActorId),
    Group(PlacementGroupId),
}

/// The job for which somebody waits; none if it is not known yet.
pub(super) type Account = Option<JobId>;

/// The order of service within a job: who has least, then who waits longest. Before that, the more important job comes
/// first, and then the one with the smaller share of the cluster.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct Rank {
    pub priority: Reverse<i32>,
    /// Leases that the waiter has already.
    pub has: u32,
    /// The order in which they began to wait, or were served last.
    pub turn: u64,
}

/// Everything that says who comes first.
#[derive(Clone, Copy, Debug)]
pub(super) struct Standing {
    pub rank: Rank,
    pub job: Account,
    /// What the job holds of the cluster, in millionths of what there is of its scarcest resource.
    pub share: u64,
    /// Since when the waiter has had nothing; none if it has something.
    pub hungry: Option<Millis>,
}

/// What asks for the same, in the name of one job.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Class {
    Shape(ShapeId, Account),
    /// A shape in a placement group: what nodes give back does not help it.
    InGroup(ShapeId, Account),
    Group(PlacementGroupId),
}

impl Class {
    /// The same shape, for all jobs.
    fn of_all_jobs(self) -> std::ops::RangeInclusive<Class> {
        let last = Some(JobId(u64::MAX));
        match self {
            Class::Shape(shape, _) => Class::Shape(shape, None)..=Class::Shape(shape, last),
            Class::InGroup(shape, _) => Class::InGroup(shape, None)..=Class::InGroup(shape, last),
            Class::Group(_) => self..=self,
        }
    }
}

/// What holds a waiter back, besides room.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Hold {
    /// This namespace holds as much as it may.
    Quota(String),
    /// The node has not yet said for which job this process works.
    UnknownJob(ProcessId),
}

struct Entry {
    rank: Rank,
    class: Class,
    job: Account,
    since: Millis,
    hungry: Option<Millis>,
    /// What holds it back besides room: then it is in no class.
    hold: Option<Hold>,
}

struct Waiting {
    job: Account,
    waiters: BTreeSet<(Rank, Waiter)>,
    is_blocked: bool,
    /// Who was its first when it did not fit. Room may be kept against that one, and not against one before it.
    tried: Option<(Rank, Waiter)>,
}

/// Lists of classes in the order of service: first by job, then by the first waiter of each class.
const READY: usize = 0;
const BLOCKED: usize = 1;
/// Blocked classes that wait for something in a placement group.
const BLOCKED_IN_GROUPS: usize = 2;

/// The order of jobs: the more important, then the one with less, then whose first waiter comes first.
type JobPlace = (Reverse<i32>, u64, Rank, Account);

/// What waits in the name of one job.
#[derive(Default)]
struct JobWaits {
    share: u64,
    /// How many wait, those that are set aside among them.
    count: usize,
    lists: [BTreeSet<(Rank, Class)>; 3],
}

impl JobWaits {
    fn place(&self, list: usize, job: Account) -> Option<JobPlace> {
        let (rank, _) = self.lists[list].first()?;
        Some((rank.priority, self.share, *rank, job))
    }
}

#[derive(Default)]
pub(super) struct Queue {
    entries: BTreeMap<Waiter, Entry>,
    classes: BTreeMap<Class, Waiting>,
    jobs: BTreeMap<Account, JobWaits>,
    /// The jobs that have something in each list, in order.
    orders: [BTreeSet<JobPlace>; 3],
    /// Blocked classes that wait for nodes, in the order in which ticks come to them.
    blocked: BTreeSet<Class>,
    /// Where the next tick goes on.
    retried: Option<Class>,
    /// Some were not looked at when something was given back ...
    has_skipped: bool,
    /// ... and ticks are on their way through all of them.
    is_going_round: bool,
    /// Those that have nothing, by since when.
    hungry: BTreeSet<(Millis, u64, Waiter)>,
    /// Waiters that something else than room holds back: they are in no class.
    parked: BTreeMap<Hold, BTreeSet<Waiter>>,
}

impl Queue {
    /// Begins to wait, or waits with another rank from now on.
    pub(super) fn put(&mut self, waiter: Waiter, standing: Standing, class: Class, now: Millis) {
        let Standing { rank, job, share, .. } = standing;
        let known = self.entries.get(&waiter);
        if known.is_some_and(|entry| entry.rank == rank && entry.class == class) {
            return;
        }
        let since = known.map_or(now, |entry| entry.since);
        let hungry = match known {
            _ if rank.has > 0 => None,
            Some(entry) => Some(entry.hungry.unwrap_or(now)),
            None => Some(now),
        };
        let before = match known {
            Some(entry) if entry.class == class && entry.hold.is_none() => {
                if let Some(since) = entry.hungry {
                    self.hungry.remove(&(since, entry.rank.turn, waiter));
                }
                Some(entry.rank)
            }
            _ => {
                self.leave_class(waiter);
                None
            }
        };
        match self.entries.insert(waiter, Entry { rank, class, job, since, hungry, hold: None }) {
            Some(before) if before.job == job => {}
            before => {
                self.jobs.entry(job).or_default().count += 1;
                self.uncount(before);
            }
        }
        if let Some(since) = hungry {
            self.hungry.insert((since, rank.turn, waiter));
        }
        self.set_share(job, share);
        self.change(class, job, |waiting| {
            if let Some(before) = before {
                waiting.waiters.remove(&(before, waiter));
            }
            waiting.waiters.insert((rank, waiter));
        });
    }

    /// What a job holds of the cluster has changed.
    pub(super) fn set_share(&mut self, job: Account, share: u64) {
        let Some(waits) = self.jobs.get_mut(&job) else { return };
        if waits.share == share {
            return;
        }
        for (list, order) in self.orders.iter_mut().enumerate() {
            if let Some(place) = waits.place(list, job) {
                order.remove(&place);
                order.insert((place.0, share, place.2, job));
            }
        }
        waits.share = share;
    }

    /// A class has another place in one list of its job, which may give the job another place.
    fn relist(&mut self, job: Account, list: usize, before: Option<(Rank, Class)>, after: Option<(Rank, Class)>) {
        let waits = self.jobs.entry(job).or_default();
        let place_before = waits.place(list, job);
        if let Some(before) = before {
            waits.lists[list].remove(&before);
        }
        if let Some(after) = after {
            waits.lists[list].insert(after);
        }
        let place_after = waits.place(list, job);
        if place_before != place_after {
            if let Some(before) = place_before {
                self.orders[list].remove(&before);
            }
            if let Some(after) = place_after {
                self.orders[list].insert(after);
            }
        }
    }

    /// Classes of a list, in the order of service.
    fn listed(&self, list: usize) -> impl Iterator<Item = Class> {
        let jobs = self.orders[list].iter().filter_map(move |(_, _, _, job)| self.jobs.get(job));
        jobs.flat_map(move |waits| waits.lists[list].iter().map(|(_, class)| *class))
    }

    /// Waits no more.
    pub(super) fn remove(&mut self, waiter: Waiter) {
        self.leave_class(waiter);
        let entry = self.entries.remove(&waiter);
        self.uncount(entry);
    }

    fn uncount(&mut self, entry: Option<Entry>) {
        let Some(job) = entry.map(|entry| entry.job) else { return };
        let Some(waits) = self.jobs.get_mut(&job) else { return };
        waits.count -= 1;
        if waits.count == 0 {
            self.jobs.remove(&job);
        }
    }

    /// It was served: what it waits for now, it waits for from now on.
    pub(super) fn served(&mut self, waiter: Waiter, now: Millis) {
        if let Some(entry) = self.entries.get_mut(&waiter) {
            entry.since = now;
        }
    }

    fn leave_class(&mut self, waiter: Waiter) {
        let Some(entry) = self.entries.get_mut(&waiter) else { return };
        let (rank, class, job) = (entry.rank, entry.class, entry.job);
        if let Some(since) = entry.hungry {
            self.hungry.remove(&(since, rank.turn, waiter));
        }
        let Some(hold) = entry.hold.take() else {
            return self.change(class, job, |waiting| {
                waiting.waiters.remove(&(rank, waiter));
            });
        };
        if let Some(waiters) = self.parked.get_mut(&hold) {
            waiters.remove(&waiter);
            if waiters.is_empty() {
                self.parked.remove(&hold);
            }
        }
    }

    /// Every change of a class goes through here, so that it is listed under its first waiter.
    fn change(&mut self, class: Class, job: Account, change: impl FnOnce(&mut Waiting)) {
        let none = || Waiting { job, waiters: BTreeSet::new(), is_blocked: false, tried: None };
        let waiting = self.classes.entry(class).or_insert_with(none);
        let head = |waiting: &Waiting| waiting.waiters.first().map(|(rank, _)| (*rank, class));
        let (before, was_blocked) = (head(waiting), waiting.is_blocked);
        change(waiting);
        if waiting.is_blocked && waiting.waiters.first().copied() < waiting.tried {
            waiting.is_blocked = waiting.waiters.is_empty();
        }
        let (after, is_blocked) = (head(waiting), waiting.is_blocked);
        if waiting.waiters.is_empty() {
            self.classes.remove(&class);
        }
        if (before, was_blocked) == (after, is_blocked) {
            return;
        }
        let blocked = if matches!(class, Class::InGroup(..)) { BLOCKED_IN_GROUPS } else { BLOCKED };
        let list_of = |is_blocked| if is_blocked { blocked } else { READY };
        if was_blocked == is_blocked {
            self.relist(job, list_of(is_blocked), before, after);
        } else {
            self.relist(job, list_of(was_blocked), before, None);
            self.relist(job, list_of(is_blocked), None, after);
        }
        if blocked == BLOCKED && is_blocked && after.is_some() {
            self.blocked.insert(class);
        } else if was_blocked {
            self.blocked.remove(&class);
        }
    }

    /// Who is to be tried next.
    pub(super) fn next(&self) -> Option<(Waiter, Class)> {
        let class = self.listed(READY).next()?;
        let (_, waiter) = self.classes.get(&class)?.waiters.first()?;
        Some((*waiter, class))
    }

    /// The class did not fit.
    pub(super) fn block(&mut self, class: Class) {
        let Some(job) = self.classes.get(&class).map(|waiting| waiting.job) else { return };
        self.change(class, job, |waiting| {
            waiting.is_blocked = true;
            waiting.tried = waiting.waiters.first().copied();
        });
    }

    /// A shape did not fit, whoever asks for it.
    pub(super) fn block_for_all(&mut self, class: Class) {
        let all: Vec<Class> = self.classes.range(class.of_all_jobs()).map(|(class, _)| *class).collect();
        for class in all {
            self.block(class);
        }
    }

    /// The class may fit.
    pub(super) fn unblock(&mut self, class: Class) {
        if let Some(job) = self.classes.get(&class).filter(|waiting| waiting.is_blocked).map(|waiting| waiting.job) {
            self.change(class, job, |waiting| waiting.is_blocked = false);
        }
    }

    /// A shape may fit, whoever asks for it.
    pub(super) fn unblock_for_all(&mut self, class: Class) {
        let all: Vec<Class> = self.classes.range(class.of_all_jobs()).map(|(class, _)| *class).collect();
        for class in all {
            self.unblock(class);
        }
    }

    /// Something was given back: those of the first blocked classes, and of those that began to wait last, that
    /// `could_use` it.
    pub(super) fn blocked_where(&mut self, could_use: impl Fn(Class) -> bool) -> Vec<Class> {
        self.has_skipped |= self.blocked.len() > LOOKED_AT;
        let mut found: Vec<Class> = self.listed(BLOCKED).take(LOOKED_AT).filter(|class| could_use(*class)).collect();
        if self.blocked.len() > LOOKED_AT {
            let latest = self.latest(LOOKED_AT).filter_map(|waiter| self.class(waiter));
            let latest = latest.filter(|class| self.blocked.contains(class) && could_use(*class));
            found.extend(latest.collect::<Vec<_>>());
        }
        found
    }

    /// Time passed: some more of the blocked classes that were not looked at are tried, each in its turn.
    pub(super) fn unblock_in_turn(&mut self) {
        use std::ops::Bound::{Excluded, Unbounded};
        if !self.is_going_round {
            if !self.has_skipped {
                return;
            }
            (self.has_skipped, self.is_going_round, self.retried) = (false, true, None);
        }
        let after = self.retried.map_or(Unbounded, Excluded);
        let turn: Vec<Class> = self.blocked.range((after, Unbounded)).take(RETRIED).copied().collect();
        self.retried = turn.last().copied();
        self.is_going_round = turn.len() == RETRIED;
        for class in turn {
            self.unblock(class);
        }
    }

    /// Some were not really tried: ticks come to them.
    pub(super) fn try_again(&mut self) {
        self.has_skipped = true;
    }

    /// Everybody is tried again, in turn.
    pub(super) fn unblock_all_in_turn(&mut self) {
        self.has_skipped = true;
        self.unblock_in_turn();
    }

    /// Sets a waiter aside until [`Queue::unpark`].
    pub(super) fn park(&mut self, waiter: Waiter, hold: Hold) {
        let Some(entry) = self.entries.get_mut(&waiter) else { return };
        let (rank, class, job) = (entry.rank, entry.class, entry.job);
        entry.hold = Some(hold.clone());
        self.change(class, job, |waiting| {
            waiting.waiters.remove(&(rank, waiter));
        });
        self.parked.entry(hold).or_default().insert(waiter);
    }

    /// Nothing but room holds these back any more.
    pub(super) fn unpark(&mut self, hold: &Hold) {
        if self.parked.is_empty() {
            return;
        }
        for waiter in self.parked.remove(hold).unwrap_or_default() {
            if let Some(entry) = self.entries.get_mut(&waiter) {
                let (rank, class, job) = (entry.rank, entry.class, entry.job);
                entry.hold = None;
                self.change(class, job, |waiting| {
                    waiting.waiters.insert((rank, waiter));
                });
            }
        }
    }

    /// Those that something else than room holds back.
    pub(super) fn set_aside(&self) -> Vec<Waiter> {
        self.parked.values().flatten().copied().collect()
    }

    /// What holds a waiter back besides room.
    pub(super) fn held_back(&self, waiter: Waiter) -> Option<&Hold> {
        self.entries.get(&waiter)?.hold.as_ref()
    }

    pub(super) fn contains(&self, waiter: Waiter) -> bool {
        self.entries.contains_key(&waiter)
    }

    /// Since when it waits.
    pub(super) fn since(&self, waiter: Waiter) -> Option<Millis> {
        self.entries.get(&waiter).map(|entry| entry.since)
    }

    pub(super) fn standing(&self, waiter: Waiter) -> Option<Standing> {
        let entry = self.entries.get(&waiter)?;
        let share = self.jobs.get(&entry.job).map_or(0, |waits| waits.share);
        Some(Standing { rank: entry.rank, job: entry.job, share, hungry: entry.hungry })
    }

    /// Those that have had nothing since `until` or longer, the longest first, and since when.
    pub(super) fn hungry_until(&self, until: Millis) -> impl Iterator<Item = (Millis, Waiter)> {
        let long = self.hungry.iter().take_while(move |(since, ..)| *since <= until);
        long.map(|(since, _, waiter)| (*since, *waiter))
    }

    /// Since when the longest of those has had nothing that began at `at` or later.
    pub(super) fn hungry_from(&self, at: Millis) -> Option<Millis> {
        let first = Waiter::Tasks(ProcessId(0), ShapeId::FIRST);
        self.hungry.range((at, 0, first)..).next().map(|(since, ..)| *since)
    }

    /// The `most` that began last to have nothing.
    pub(super) fn latest(&self, most: usize) -> impl Iterator<Item = Waiter> {
        self.hungry.iter().rev().take(most).map(|(_, _, waiter)| *waiter)
    }

    /// Those who are served before somebody.
    pub(super) fn served_before(&self, waiter: Waiter) -> impl Iterator<Item = Waiter> {
        let key = |standing: Standing| (standing.rank.priority, standing.share, standing.rank);
        let mine = self.standing(waiter).map(key);
        let others = self.entries.keys().copied().filter(move |other| *other != waiter);
        others.filter(move |other| self.standing(*other).map(key) < mine)
    }

    /// Whether a class waits for room.
    pub(super) fn is_blocked(&self, waiter: Waiter) -> bool {
        let Some(entry) = self.entries.get(&waiter).filter(|entry| entry.hold.is_none()) else { return false };
        self.classes.get(&entry.class).is_some_and(|waiting| waiting.is_blocked)
    }

    pub(super) fn class(&self, waiter: Waiter) -> Option<Class> {
        self.entries.get(&waiter).map(|entry| entry.class)
    }

    /// Where somebody stands, for whoever looks for a mistake.
    pub(super) fn shown(&self, waiter: Waiter) -> String {
        let Some(entry) = self.entries.get(&waiter) else { return "it does not wait".into() };
        let Some(waiting) = self.classes.get(&entry.class) else { return "its class is empty".into() };
        let before = waiting.waiters.iter().take_while(|(_, other)| *other != waiter).count();
        let is_there = waiting.waiters.iter().any(|(_, other)| *other == waiter);
        format!("in {:?}, blocked: {}, listed: {is_there}, behind {before}", entry.class, waiting.is_blocked)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Everybody, by name.
    pub(super) fn waiters(&self) -> impl Iterator<Item = Waiter> {
        self.entries.keys().copied()
    }

    /// Those who come after this one, or all.
    pub(super) fn waiters_after(&self, last: Option<Waiter>) -> impl Iterator<Item = Waiter> {
        after(&self.entries, last).map(|(waiter, _)| *waiter)
    }

    /// All classes with somebody in them.
    pub(super) fn classes(&self) -> Vec<Class> {
        self.classes.keys().copied().collect()
    }

    /// Everybody who waits for a shape.
    pub(super) fn for_all(&self, class: Class) -> impl Iterator<Item = Waiter> {
        let classes = self.classes.range(class.of_all_jobs());
        classes.flat_map(|(_, waiting)| waiting.waiters.iter().map(|(_, waiter)| *waiter))
    }

    /// Everybody in a class, in order.
    pub(super) fn in_class(&self, class: Class) -> impl Iterator<Item = Waiter> {
        self.classes.get(&class).into_iter().flat_map(|waiting| waiting.waiters.iter().map(|(_, waiter)| *waiter))
    }

    /// The first `most` of all who do not fit now, in order, and as many of those in placement groups: of each class
    /// the first.
    pub(super) fn first_blocked(&self, most: usize) -> Vec<Waiter> {
        let classes = self.listed(BLOCKED).take(most).chain(self.listed(BLOCKED_IN_GROUPS).take(most));
        classes.filter_map(|class| self.classes.get(&class)?.waiters.first()).map(|(_, waiter)| *waiter).collect()
    }

    /// Whether every blocked class was looked at since something was given back.
    pub(super) fn has_looked_at_all(&self) -> bool {
        !self.has_skipped && !self.is_going_round
    }
}
