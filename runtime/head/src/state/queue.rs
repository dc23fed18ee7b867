//! Who waits to be placed, and in which order.
//!
//! Waiters that ask for the same are one *class*: when one of them does not fit, none does. A class that did not fit
//! is blocked until something is given back that it could use.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use wingbeat_core::{ActorId, PlacementGroupId, ProcessId};

use super::Millis;
use super::shapes::ShapeId;

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

impl Waiter {
    /// The process and its shape, if it is one.
    pub(super) fn asker(self) -> Option<(ProcessId, ShapeId)> {
        match self {
            Waiter::Tasks(process, shape) => Some((process, shape)),
            Waiter::Actor(_) | Waiter::Group(_) => None,
        }
    }
}

/// The order of service: the more important job, then who has least, then who waits longest.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct Rank {
    pub priority: Reverse<i32>,
    /// Leases that the waiter has already.
    pub has: u32,
    /// The order in which they began to wait, or were served last.
    pub turn: u64,
}

/// What asks for the same.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Class {
    Shape(ShapeId),
    /// A shape in a placement group: what nodes give back does not help it.
    InGroup(ShapeId),
    Group(PlacementGroupId),
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
    since: Millis,
}

#[derive(Default)]
struct Waiting {
    waiters: BTreeSet<(Rank, Waiter)>,
    is_blocked: bool,
    /// Who was its first when it did not fit. Room may be kept against that one, and not against one before it.
    tried: Option<(Rank, Waiter)>,
}

#[derive(Default)]
pub(super) struct Queue {
    entries: BTreeMap<Waiter, Entry>,
    classes: BTreeMap<Class, Waiting>,
    /// Classes that may fit, by their first waiter.
    ready: BTreeSet<(Rank, Class)>,
    blocked: BTreeSet<(Rank, Class)>,
    /// Blocked classes that wait for something in a placement group.
    blocked_in_groups: BTreeSet<(Rank, Class)>,
    /// Where the next tick goes on.
    retried: Option<(Rank, Class)>,
    /// Some were not looked at when something was given back, and ticks have not come to all of them since.
    has_skipped: bool,
    /// Waiters that something else than room holds back: they are in no class.
    parked: BTreeMap<Hold, BTreeSet<Waiter>>,
}

impl Queue {
    /// Begins to wait, or waits with another rank from now on.
    pub(super) fn put(&mut self, waiter: Waiter, rank: Rank, class: Class, now: Millis) {
        let since = self.entries.get(&waiter).map_or(now, |entry| entry.since);
        if let Some(entry) = self.entries.get(&waiter)
            && entry.rank == rank
            && entry.class == class
        {
            return;
        }
        self.leave_class(waiter);
        self.entries.insert(waiter, Entry { rank, class, since });
        self.change(class, |waiting| {
            waiting.waiters.insert((rank, waiter));
        });
    }

    /// Waits no more.
    pub(super) fn remove(&mut self, waiter: Waiter) {
        self.leave_class(waiter);
        self.entries.remove(&waiter);
    }

    /// It was served: what it waits for now, it waits for from now on.
    pub(super) fn served(&mut self, waiter: Waiter, now: Millis) {
        if let Some(entry) = self.entries.get_mut(&waiter) {
            entry.since = now;
        }
    }

    fn leave_class(&mut self, waiter: Waiter) {
        let Some(entry) = self.entries.get(&waiter) else { return };
        let (rank, class) = (entry.rank, entry.class);
        self.change(class, |waiting| {
            waiting.waiters.remove(&(rank, waiter));
        });
        if self.parked.is_empty() {
            return;
        }
        self.parked.retain(|_, waiters| {
            waiters.remove(&waiter);
            !waiters.is_empty()
        });
    }

    /// Every change of a class goes through here, so that it is listed under its first waiter.
    fn change(&mut self, class: Class, change: impl FnOnce(&mut Waiting)) {
        let waiting = self.classes.entry(class).or_default();
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
        let blocked = match class {
            Class::InGroup(_) => &mut self.blocked_in_groups,
            Class::Shape(_) | Class::Group(_) => &mut self.blocked,
        };
        if let Some(before) = before {
            let list = if was_blocked { &mut *blocked } else { &mut self.ready };
            list.remove(&before);
        }
        if let Some(after) = after {
            let list = if is_blocked { blocked } else { &mut self.ready };
            list.insert(after);
        }
    }

    /// Who is to be tried next.
    pub(super) fn next(&self) -> Option<(Waiter, Class)> {
        let (_, class) = self.ready.first()?;
        let (_, waiter) = self.classes.get(class)?.waiters.first()?;
        Some((*waiter, *class))
    }

    /// The class did not fit.
    pub(super) fn block(&mut self, class: Class) {
        self.change(class, |waiting| {
            waiting.is_blocked = true;
            waiting.tried = waiting.waiters.first().copied();
        });
    }

    /// The class may fit.
    pub(super) fn unblock(&mut self, class: Class) {
        if self.classes.contains_key(&class) {
            self.change(class, |waiting| waiting.is_blocked = false);
        }
    }

    /// Something was given back: those of the first blocked classes that `could_use` it.
    pub(super) fn blocked_where(&mut self, could_use: impl Fn(Class) -> bool) -> Vec<Class> {
        self.has_skipped |= self.blocked.len() > LOOKED_AT;
        self.blocked.iter().take(LOOKED_AT).map(|(_, class)| *class).filter(|class| could_use(*class)).collect()
    }

    /// Time passed: some more blocked classes are tried, each in its turn.
    pub(super) fn unblock_in_turn(&mut self) {
        use std::ops::Bound::{Excluded, Unbounded};
        let after = self.retried.map_or(Unbounded, Excluded);
        let turn: Vec<(Rank, Class)> = self.blocked.range((after, Unbounded)).take(RETRIED).copied().collect();
        if turn.len() < RETRIED && self.retried.is_none() {
            self.has_skipped = false;
        }
        self.retried = if turn.len() < RETRIED { None } else { turn.last().copied() };
        for (_, class) in turn {
            self.unblock(class);
        }
    }

    /// Sets a waiter aside until [`Queue::unpark`].
    pub(super) fn park(&mut self, waiter: Waiter, hold: Hold) {
        let Some(entry) = self.entries.get(&waiter) else { return };
        let (rank, class) = (entry.rank, entry.class);
        self.change(class, |waiting| {
            waiting.waiters.remove(&(rank, waiter));
        });
        self.parked.entry(hold).or_default().insert(waiter);
    }

    /// Nothing but room holds these back any more.
    pub(super) fn unpark(&mut self, hold: &Hold) {
        for waiter in self.parked.remove(hold).unwrap_or_default() {
            if let Some(entry) = self.entries.get(&waiter) {
                let (rank, class) = (entry.rank, entry.class);
                self.change(class, |waiting| {
                    waiting.waiters.insert((rank, waiter));
                });
            }
        }
    }

    /// What holds a waiter back besides room.
    pub(super) fn held_back(&self, waiter: Waiter) -> Option<&Hold> {
        self.parked.iter().find(|(_, waiters)| waiters.contains(&waiter)).map(|(hold, _)| hold)
    }

    pub(super) fn contains(&self, waiter: Waiter) -> bool {
        self.entries.contains_key(&waiter)
    }

    /// Since when it waits.
    pub(super) fn since(&self, waiter: Waiter) -> Option<Millis> {
        self.entries.get(&waiter).map(|entry| entry.since)
    }

    pub(super) fn rank(&self, waiter: Waiter) -> Option<Rank> {
        self.entries.get(&waiter).map(|entry| entry.rank)
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

    /// All classes with somebody in them.
    pub(super) fn classes(&self) -> Vec<Class> {
        self.classes.keys().copied().collect()
    }

    /// Everybody in a class, in order.
    pub(super) fn in_class(&self, class: Class) -> impl Iterator<Item = Waiter> {
        self.classes.get(&class).into_iter().flat_map(|waiting| waiting.waiters.iter().map(|(_, waiter)| *waiter))
    }

    /// The first `most` of all who do not fit now, in order, and as many of those in placement groups: of each class
    /// the first.
    pub(super) fn first_blocked(&self, most: usize) -> Vec<Waiter> {
        let classes = self.blocked.iter().take(most).chain(self.blocked_in_groups.iter().take(most));
        classes.filter_map(|(_, class)| self.classes.get(class)?.waiters.first()).map(|(_, waiter)| *waiter).collect()
    }

    /// Whether every blocked class was looked at since something was given back.
    pub(super) fn has_looked_at_all(&self) -> bool {
        !self.has_skipped
    }
}
