//! What an execution waits for, and what the head is told of that.
//!
//! An execution may wait for several things at once, as with `join!` or `select!`. It goes on as soon as one of these waits is over. The head is told of
//! the first wait of a task that was sent here at once. It is told of others only if they last, since it needs them for deadlocks alone. What it was
//! told may be over: it asks again before it believes in a circle.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use wingbeat_core::{LeaseId, TaskId};
use wingbeat_net::messages::{Await, AwaitedTask, HeadMessage, Wait, WaitsFor, Within};

use super::awaited::Awaited;
use super::group::Place;

/// The head is told of so many tasks at most. One that waits for more things beside each other is not found in a circle before it waits for fewer.
const TOLD_AT_MOST: usize = 1_024;

/// Of no number of tasks: whatever becomes of them, the wait ends.
const NEVER: u32 = u32::MAX;

/// An execution, as the head is told of it.
pub(crate) struct Waiter<'a> {
    pub task: TaskId,
    pub name: &'a str,
    /// Where it runs, if in an actor.
    pub place: Option<&'a Place>,
    pub lease: Option<LeaseId>,
}

/// The waits of an execution.
#[derive(Default)]
pub(crate) struct Waits {
    /// Those that last, by number.
    lasting: BTreeMap<u64, OneWait>,
    latest: u64,
    /// Since when there is any.
    since: Option<Instant>,
    /// For how long there was, before.
    waited: Duration,
    /// Whether the head counts the CPUs as free.
    frees_cpus: bool,
    /// Whether its thread does nothing else.
    is_blocked: bool,
    /// Whether the head was told of any of them.
    is_told: bool,
    /// Of one at home that was not told: whether it was looked at before.
    was_seen: bool,
    /// How often that has changed which the head is told, and how often it had when the head was told, and when it was looked at last.
    changes: u64,
    changes_told: u64,
    changes_seen: u64,
    /// Whether somebody will look.
    is_told_later: bool,
    /// It waits for its turn at the state of its actor, and for nothing else but its thread.
    is_for_turn: bool,
    /// Whoever blocks its thread: until that goes on, nothing else matters.
    thread_is_with: Option<TaskId>,
    /// Manner many of the waits are for it.
    for_thread: usize,
    /// It is not one of those that run at a time in its group, as a stream while it waits for its consumer.
    has_no_place: bool,
    /// It waits for the consumer of its stream, and others run in its place: what else it waits for holds up nobody.
    is_paused: bool,
    /// What the head was told of the room where it runs.
    room: u32,
    /// It was told that it waits for this in vain.
    hopeless: Option<TaskId>,
    /// The execution has ended: it waits for nothing, whatever it has left behind.
    is_over: bool,
}

struct OneWait {
    awaited: Awaited,
    manner: Manner,
}

/// How somebody waits.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Manner {
    /// The thread is blocked for it.
    pub blocks: bool,
    /// It ends after some time, whatever becomes of what is waited for.
    pub has_limit: bool,
}

/// What the head is told when somebody looks.
pub(crate) enum Later {
    Tell(HeadMessage),
    /// Nothing yet.
    Ask,
    /// Nothing, until something changes again.
    Nothing,
}

/// What became of the waits of an execution.
pub(crate) enum Left {
    /// It waits for less. Whether somebody is to call [`Waits::told_later`] in a while.
    Some(bool),
    /// It goes on, and the head is told this.
    None(Option<HeadMessage>),
}

impl Waits {
    fn is_for(&self, task: TaskId) -> bool {
        self.lasting.values().any(|one| one.awaited.is_for(task))
    }

    /// It waits for this in vain. False if it does not wait for it any more.
    pub(crate) fn is_hopeless(&mut self, on: TaskId) -> bool {
        let waits = self.is_for(on);
        if waits {
            self.hopeless = Some(on);
        }
        waits
    }

    /// What it waited for in vain, if that is over.
    pub(crate) fn hopeless_that_is_over(&mut self) -> Option<TaskId> {
        let on = self.hopeless.filter(|on| !self.is_for(*on))?;
        self.hopeless.take().map(|_| on)
    }

    pub(crate) fn waited(&self, now: Instant) -> Duration {
        self.waited + self.since.map_or(Duration::ZERO, |since| now.saturating_duration_since(since))
    }

    /// The thread does nothing else, or goes on, though some of the waits may be left for which it was blocked. Whether somebody is to call
    /// [`Waits::told_later`] in a while.
    pub(crate) fn thread_is_blocked(&mut self, is_blocked: bool) -> bool {
        std::mem::replace(&mut self.is_blocked, is_blocked) != is_blocked && self.has_changed()
    }

    /// One more, for which the thread is blocked or not. Its number, and whether it is the first: then one of [`Waits::begun`] and
    /// [`Waits::begun_at_home`] follows, else [`Waits::has_changed`].
    pub(crate) fn add(&mut self, awaited: Awaited, manner: Manner, now: Instant) -> (u64, bool) {
        let is_first = self.lasting.is_empty();
        self.latest += 1;
        self.lasting.insert(self.latest, OneWait { awaited, manner });
        self.is_blocked |= manner.blocks;
        if is_first {
            self.since = Some(now);
        }
        (self.latest, is_first)
    }

    /// What was added is more than a wait for results, or was.
    pub(crate) fn waits_for(&mut self, what: WaitsFor, awaited: &Awaited, waits: bool) {
        match what {
            WaitsFor::Results => {}
            WaitsFor::Turn => self.is_for_turn = waits,
            WaitsFor::Thread => {
                self.for_thread = if waits { self.for_thread + 1 } else { self.for_thread.saturating_sub(1) };
                self.thread_is_with = awaited.first().filter(|_| self.for_thread > 0);
            }
        }
    }

    /// Whether it is one of those that run at a time in its group.
    pub(crate) fn has_place(&mut self, has_place: bool) {
        self.has_no_place = !has_place;
    }

    /// The first of a task that was sent here. Its process goes on with something at home, or its CPUs are free.
    pub(crate) fn begun(&mut self, of: &Waiter<'_>, goes_on: bool) -> HeadMessage {
        self.is_told = true;
        self.frees_cpus = !goes_on;
        self.told(of)
    }

    /// The first of one at home. Most of these are over at once.
    pub(crate) fn begun_at_home(&mut self) {
        (self.is_told, self.was_seen) = (false, false);
    }

    /// What is waited for is not what the head was told. Whether somebody is to call [`Waits::told_later`] in a while.
    pub(crate) fn has_changed(&mut self) -> bool {
        self.changes += 1;
        self.is_told && !std::mem::replace(&mut self.is_told_later, true)
    }

    /// The execution has ended. What it has left behind, in a variable of its process, is no wait of it any more. If it was waiting, this is what
    /// follows from its going on.
    pub(crate) fn end(&mut self, of: &Waiter<'_>, now: Instant) -> Option<Left> {
        self.is_over = true;
        if self.lasting.is_empty() {
            return None;
        }
        (self.waited, self.since) = (self.waited(now), None);
        self.lasting.clear();
        Some(Left::None(self.is_told.then_some(HeadMessage::Resumed { lease: of.lease, task: of.task })))
    }

    pub(crate) fn is_over(&self) -> bool {
        self.is_over
    }

    /// One less.
    pub(crate) fn remove(&mut self, of: &Waiter<'_>, number: u64, now: Instant) -> Left {
        if self.lasting.remove(&number).is_none() {
            return Left::Some(false);
        }
        if !self.lasting.is_empty() {
            return Left::Some(self.has_changed());
        }
        self.waited = self.waited(now);
        self.since = None;
        Left::None(self.is_told.then_some(HeadMessage::Resumed { lease: of.lease, task: of.task }))
    }

    /// It begins to wait for the consumer of its stream, or goes on: what the head is told.
    pub(crate) fn pauses(&mut self, of: &Waiter<'_>, pauses: bool) -> Option<HeadMessage> {
        let is_news = self.is_paused != pauses && self.is_known();
        self.is_paused = pauses;
        is_news.then(|| self.said_again(of))
    }

    /// There is less room where it runs: what the head is told.
    pub(crate) fn has_less_room(&mut self, of: &Waiter<'_>) -> Option<HeadMessage> {
        if !self.is_known() || self.room == 0 {
            return None;
        }
        let is_as_told = self.room == of.place?.room_told(self.is_blocked);
        (!is_as_told).then(|| self.said_again(of))
    }

    /// What the head is told that does not know of it any more.
    pub(crate) fn told_anew(&mut self, of: &Waiter<'_>) -> Option<HeadMessage> {
        self.is_known().then(|| self.told(of))
    }

    /// What the head is told that asks, since this looks stuck.
    pub(crate) fn asked_again(&mut self, of: &Waiter<'_>) -> Option<Wait> {
        self.is_known().then(|| self.describe(of))
    }

    /// What the head is told of one at home that was waited for and not told when this was called last, and whether it is to be called
    /// again.
    pub(crate) fn told_if_it_lasts(&mut self, of: &Waiter<'_>) -> (Option<HeadMessage>, bool) {
        if self.lasting.is_empty() || self.is_told {
            return (None, false);
        }
        if !std::mem::replace(&mut self.was_seen, true) {
            return (None, true);
        }
        self.is_told = true;
        (Some(self.told(of)), false)
    }

    /// What the head is told when some time has passed since [`Waits::has_changed`], or since this was called last: what has not changed meanwhile, and
    /// was not told. One that waits for one thing after the other is not stuck.
    pub(crate) fn told_later(&mut self, of: &Waiter<'_>) -> Later {
        if !self.is_known() || self.changes == self.changes_told {
            self.is_told_later = false;
            return Later::Nothing;
        }
        if std::mem::replace(&mut self.changes_seen, self.changes) != self.changes {
            return Later::Ask;
        }
        self.is_told_later = false;
        Later::Tell(self.said_again(of))
    }

    /// While all of this is waited for, the process runs something else, or no longer: what the head is told.
    pub(crate) fn cpus_are_free(&mut self, of: &Waiter<'_>, are_free: bool) -> Vec<HeadMessage> {
        if self.lasting.is_empty() || self.frees_cpus == are_free {
            return Vec::new();
        }
        self.frees_cpus = are_free;
        let resumed = (!are_free).then_some(HeadMessage::Resumed { lease: of.lease, task: of.task });
        resumed.into_iter().chain([self.told(of)]).collect()
    }

    /// Whether it waits, and the head knows.
    fn is_known(&self) -> bool {
        self.is_told && !self.lasting.is_empty()
    }

    fn told(&mut self, of: &Waiter<'_>) -> HeadMessage {
        HeadMessage::Waiting { lease: of.lease.filter(|_| self.frees_cpus), wait: self.describe(of) }
    }

    /// Without a lease: that its CPUs are free is known already.
    fn said_again(&mut self, of: &Waiter<'_>) -> HeadMessage {
        HeadMessage::Waiting { lease: None, wait: self.describe(of) }
    }

    fn describe(&mut self, of: &Waiter<'_>) -> Wait {
        self.changes_told = self.changes;
        let awaits = match self.thread_is_with {
            Some(by) => {
                vec![Await { on: vec![AwaitedTask { task: by, callee: None, after: Vec::new() }], ends_without: 1 }]
            }
            None if self.is_paused => Vec::new(),
            None => self.awaits(),
        };
        // One that waits for nobody takes no room.
        let place = of.place.filter(|_| !(self.has_no_place && self.thread_is_with.is_some()));
        self.room = place.filter(|_| !awaits.is_empty()).map_or(0, |place| place.room_told(self.is_blocked));
        let within = place.map(|place| Within { actor: place.actor, group: place.group.clone(), room: self.room });
        let waits_for = match (self.thread_is_with, self.is_for_turn) {
            (Some(_), _) => WaitsFor::Thread,
            (None, true) => WaitsFor::Turn,
            (None, false) => WaitsFor::Results,
        };
        Wait { task: of.task, name: of.name.to_owned(), within, waits_for, awaits }
    }

    /// Those of which one must be over for it to go on. Where the thread is blocked, that is one for which it is blocked: there may be none.
    fn awaits(&self) -> Vec<Await> {
        let (mut awaits, mut left) = (Vec::new(), TOLD_AT_MOST);
        for OneWait { awaited, manner } in self.lasting.values().filter(|one| !self.is_blocked || one.manner.blocks) {
            let told = awaited.told(left);
            left -= told.on.len();
            awaits.push(Await { ends_without: if manner.has_limit { NEVER } else { told.ends_without }, ..told });
            if left == 0 {
                // One that is not told may be over.
                awaits.push(Await { on: Vec::new(), ends_without: NEVER });
                break;
            }
        }
        awaits
    }

    /// Whether there is any.
    #[cfg(test)]
    pub(crate) fn has_any(&self) -> bool {
        !self.lasting.is_empty()
    }

    /// Whether the head counts the CPUs as free.
    #[cfg(test)]
    pub(crate) fn frees_cpus(&self) -> bool {
        !self.lasting.is_empty() && self.frees_cpus
    }
}

#[cfg(test)]
#[path = "waits_tests.rs"]
mod tests;
