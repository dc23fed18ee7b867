//! What an execution waits for, and what the head is told of that.
//!
//! An execution may wait for several things at once, as with `join!` or `select!`. It goes on as soon as one of these waits is over. The head is told of
//! the first wait of a task that was sent here at once. It is told of others only if they last, since it needs them for deadlocks alone. What it was
//! told may be over: it asks again before it believes in a circle.

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use wingbeat_core::{LeaseId, TaskId};
use wingbeat_net::messages::{Await, AwaitedTask, HeadMessage, Wait, WaitsFor, Within};

use super::awaited::Awaited;
use super::group::Place;

/// The head is told of so many tasks at most. One that waits for more things beside each other is not found in a circle before it waits for fewer.
const TOLD_AT_MOST: usize = 1_024;

/// Of no number of tasks: whatever becomes of them, the wait ends.
pub(super) const NEVER: u32 = u32::MAX;

/// What is here for so long, and was not looked at, belongs to a future that is kept and not polled: it lets nobody go on.
const KEPT: Duration = Duration::from_secs(1);

/// What has changed is looked at this often, and told when it has not changed from one look to the next.
const LOOKS_AT_NEWS: Duration = Duration::from_millis(100);

/// What was told is looked at this often, while there is more to be told some time.
const LOOKS_AGAIN: Duration = Duration::from_secs(1);

/// After so many of these looks it is told again where something was here that was not looked at, where it was told that it waits in vain, and where not
/// all could be told: the first may be done by then.
const TOLD_AGAIN_IF_HERE: u32 = 2;
const TOLD_AGAIN_IF_HOPELESS: u32 = 4;
/// Whoever was told that it waits in vain may take so long to hear it.
const HEARS: Duration = Duration::from_secs(4);
const TOLD_AGAIN_IF_CUT: u32 = 10;

/// An execution, as the head is told of it.
pub(crate) struct Waiter<'a> {
    pub task: TaskId,
    pub name: &'a str,
    /// Where it runs, if in an actor.
    pub place: Option<&'a Place>,
    pub lease: Option<LeaseId>,
    pub doing: Doing,
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
    /// Values that are on their way here.
    coming: Vec<Weak<Coming>>,
    /// After so many looks the head is told again, since what it was told is not all, or will not be all. How often it was looked since.
    told_again_after: Option<u32>,
    looks: u32,
    /// It was told that it waits for this in vain, and for all else, up to the wait with that number.
    hopeless: Option<(u64, TaskId, Instant)>,
    /// Somebody is to have it polled: something is here that it has not looked at.
    is_to_be_polled: bool,
    /// The execution has ended: it waits for nothing, whatever it has left behind.
    is_over: bool,
}

struct OneWait {
    awaited: Awaited,
    manner: Manner,
    /// Since when it was seen that it is over, and is not looked at, and how often its execution had been polled then.
    here_since: Option<(Instant, u32)>,
}

/// A value on its way here. The wait for it is over, and it ends by itself.
pub(crate) struct Coming {
    /// Whether the thread is blocked for it.
    blocks: bool,
    /// It is here, and perhaps not looked at.
    has_come: OnceLock<Instant>,
}

impl Coming {
    pub(crate) fn new(manner: Manner) -> Coming {
        Coming { blocks: manner.blocks, has_come: OnceLock::new() }
    }

    /// It is here, or will not come.
    pub(crate) fn comes(&self) {
        self.has_come.get_or_init(Instant::now);
    }
}

/// What an execution does while somebody looks at what it waits for.
#[derive(Clone, Copy, Default)]
pub(crate) struct Doing {
    /// Its code runs.
    pub runs: bool,
    /// How often it was polled.
    pub polls: u32,
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
    /// Nothing yet: somebody looks again after this time.
    Ask(Duration),
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

    /// It waits for this in vain, and for all else. The number of the last wait that is; none if it does not wait for it any more.
    pub(crate) fn is_hopeless(&mut self, on: TaskId) -> Option<u64> {
        self.hopeless = Some((self.latest, on, Instant::now())).filter(|_| self.is_for(on));
        self.hopeless.map(|(up_to, ..)| up_to)
    }

    /// Whether it was told that it waits in vain for something, and what it waited for then is over.
    pub(crate) fn is_hopeless_no_more(&mut self) -> bool {
        let Some((up_to, on, _)) = self.hopeless else { return false };
        let lasts = self.lasting.range(..=up_to).any(|(_, one)| one.awaited.is_for(on));
        if !lasts {
            self.hopeless = None;
        }
        !lasts
    }

    /// A value is on its way here. Whether somebody is to call [`Waits::told_later`] in a while.
    pub(crate) fn begins_to_come(&mut self, coming: &Arc<Coming>) -> bool {
        self.coming.retain(|one| one.strong_count() > 0);
        self.coming.push(Arc::downgrade(coming));
        self.has_changed()
    }

    /// Whether somebody is to have it polled, so that it looks at what is here.
    pub(crate) fn is_to_be_polled(&mut self) -> bool {
        std::mem::take(&mut self.is_to_be_polled)
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
        self.lasting.insert(self.latest, OneWait { awaited, manner, here_since: None });
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

    /// The first of a task that was sent here. Its process goes on with something at home, or its CPUs are free. What the head is told, and whether somebody
    /// is to call [`Waits::told_later`] in a while.
    pub(crate) fn begun(&mut self, of: &Waiter<'_>, goes_on: bool) -> (HeadMessage, bool) {
        self.is_told = true;
        self.frees_cpus = !goes_on;
        let is_soon_over = self.lasting.values().any(|one| one.awaited.is_for_some_of_many());
        let wait = if is_soon_over { self.described_as_soon_over(of) } else { self.describe(of) };
        let told = HeadMessage::Waiting { lease: of.lease.filter(|_| self.frees_cpus), wait };
        (told, self.is_to_be_looked_at())
    }

    /// The first of one at home. Most of these are over at once.
    pub(crate) fn begun_at_home(&mut self) {
        (self.is_told, self.was_seen) = (false, false);
    }

    /// What is waited for is not what the head was told. Whether somebody is to call [`Waits::told_later`] in a while.
    pub(crate) fn has_changed(&mut self) -> bool {
        self.changes += 1;
        self.is_to_be_looked_at()
    }

    /// Whether somebody is to begin to look: something is not told, or not for good.
    pub(crate) fn is_to_be_looked_at(&mut self) -> bool {
        self.is_known() && self.has_more_to_tell() && !std::mem::replace(&mut self.is_told_later, true)
    }

    fn has_more_to_tell(&self) -> bool {
        let is_told = self.changes == self.changes_told;
        !is_told || self.told_again_after.is_some() || self.lasting.len() > 1 || !self.coming.is_empty()
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

    /// It begins to wait for the consumer of its stream, or goes on: what the head is told, and whether somebody is to call [`Waits::told_later`] in a
    /// while.
    pub(crate) fn pauses(&mut self, of: &Waiter<'_>, pauses: bool) -> Option<(HeadMessage, bool)> {
        let is_news = self.is_paused != pauses && self.is_known();
        self.is_paused = pauses;
        is_news.then(|| (self.said_again(of), self.is_to_be_looked_at()))
    }

    /// There is less room where it runs: as [`Waits::pauses`].
    pub(crate) fn has_less_room(&mut self, of: &Waiter<'_>) -> Option<(HeadMessage, bool)> {
        if !self.is_known() || self.room == 0 {
            return None;
        }
        let is_as_told = self.room == of.place?.room_told(self.is_blocked);
        (!is_as_told).then(|| (self.said_again(of), self.is_to_be_looked_at()))
    }

    /// For a head that does not know of it any more: as [`Waits::pauses`].
    pub(crate) fn told_anew(&mut self, of: &Waiter<'_>) -> Option<(HeadMessage, bool)> {
        self.is_known().then(|| (self.told(of), self.is_to_be_looked_at()))
    }

    /// What the head is told that asks, since this looks stuck, and whether somebody is to call [`Waits::told_later`] in a while.
    pub(crate) fn asked_again(&mut self, of: &Waiter<'_>) -> Option<(Wait, bool)> {
        if !self.is_known() {
            return None;
        }
        let wait = if self.is_busy(of) { self.described_as_soon_over(of) } else { self.describe(of) };
        Some((wait, self.is_to_be_looked_at()))
    }

    /// Whether its code runs, and is not blocked: it waits for nothing.
    fn is_busy(&self, of: &Waiter<'_>) -> bool {
        of.doing.runs && !self.is_blocked
    }

    /// What the head is told of one at home that was waited for and not told when this was called last, with whether somebody is to call
    /// [`Waits::told_later`] in a while; and whether this is to be called again.
    pub(crate) fn told_if_it_lasts(&mut self, of: &Waiter<'_>) -> (Option<(HeadMessage, bool)>, bool) {
        if self.lasting.is_empty() || self.is_told {
            return (None, false);
        }
        if !std::mem::replace(&mut self.was_seen, true) {
            return (None, true);
        }
        self.is_told = true;
        let message = self.told(of);
        (Some((message, self.is_to_be_looked_at())), false)
    }

    /// What the head is told when some time has passed since [`Waits::has_changed`], or since this was called last: what has not changed meanwhile, and
    /// was not told. One that waits for one thing after the other is not stuck.
    pub(crate) fn told_later(&mut self, of: &Waiter<'_>) -> Later {
        if !self.is_known() || !self.has_more_to_tell() {
            self.is_told_later = false;
            return Later::Nothing;
        }
        let is_told = self.changes == self.changes_told;
        let has_changed = std::mem::replace(&mut self.changes_seen, self.changes) != self.changes;
        let is_due = match (is_told, self.told_again_after) {
            (false, _) => !has_changed && !self.is_busy(of),
            (true, Some(after)) => self.looks >= after,
            (true, None) => self.has_what_is_here(),
        };
        self.looks += u32::from(is_told);
        match is_due {
            true => Later::Tell(self.said_again(of)),
            false => Later::Ask(if is_told { LOOKS_AGAIN } else { LOOKS_AT_NEWS }),
        }
    }

    /// Whether something that the head was told of is here, and is not looked at.
    fn has_what_is_here(&self) -> bool {
        let is_told_of_others = self.thread_is_with.is_none() && !self.is_paused;
        let has_come = |coming: &Weak<Coming>| coming.upgrade().is_some_and(|coming| coming.has_come.get().is_some());
        let is_here = |one: &OneWait| one.here_since.is_none() && one.awaited.is_here();
        is_told_of_others
            && !self.counting().any(|one| one.manner.has_limit)
            && (self.counting().any(is_here) || self.coming.iter().any(has_come))
    }

    /// The waits of which one must be over for it to go on.
    fn counting(&self) -> impl Iterator<Item = &OneWait> {
        self.lasting.values().filter(|one| !self.is_blocked || one.manner.blocks)
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
        let wait = self.describe(of);
        HeadMessage::Waiting { lease: of.lease.filter(|_| self.frees_cpus), wait }
    }

    /// Without a lease: that its CPUs are free is known already.
    fn said_again(&mut self, of: &Waiter<'_>) -> HeadMessage {
        HeadMessage::Waiting { lease: None, wait: self.describe(of) }
    }

    fn describe(&mut self, of: &Waiter<'_>) -> Wait {
        self.describe_at(of, Instant::now())
    }

    fn describe_at(&mut self, of: &Waiter<'_>, now: Instant) -> Wait {
        (self.changes_told, self.told_again_after, self.looks) = (self.changes, None, 0);
        let awaits = match self.thread_is_with {
            Some(by) => {
                vec![Await { on: vec![AwaitedTask { task: by, callee: None, after: Vec::new() }], ends_without: 1 }]
            }
            None if self.is_paused => Vec::new(),
            None => self.awaits(now, of.doing.polls),
        };
        self.described(of, awaits)
    }

    /// For people: what will be over soon, or is told when it is not. It is in no circle.
    fn described_as_soon_over(&mut self, of: &Waiter<'_>) -> Wait {
        // Not told yet.
        self.changes += 1;
        let awaits = self.lasting.values().next().map(|one| one.awaited.first_few());
        self.described(of, awaits.into_iter().collect())
    }

    fn described(&mut self, of: &Waiter<'_>, awaits: Vec<Await>) -> Wait {
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
    fn awaits(&mut self, now: Instant, polls: u32) -> Vec<Await> {
        if self.hopeless.is_some_and(|(.., at)| now.saturating_duration_since(at) < HEARS) {
            self.told_again_after = Some(TOLD_AGAIN_IF_HOPELESS);
            return vec![Awaited::nobody().first_few()];
        }
        let is_blocked = self.is_blocked;
        let (mut awaits, mut left, mut goes_on) = (Vec::new(), TOLD_AT_MOST, false);
        for one in self.lasting.values_mut().filter(|one| !is_blocked || one.manner.blocks) {
            if one.awaited.is_here() {
                // It is about to be looked at, or belongs to a future that is kept. Which of these is seen when it was polled.
                self.is_to_be_polled |= one.here_since.is_none();
                let (since, polls_then) = *one.here_since.get_or_insert((now, polls));
                let was_polled = is_blocked || polls != polls_then;
                goes_on |= !was_polled || now.saturating_duration_since(since) < KEPT;
                continue;
            }
            one.here_since = None;
            if one.manner.has_limit {
                return vec![one.awaited.first_few()];
            }
            let (told, is_all) = one.awaited.told(left);
            left -= told.on.len();
            awaits.push(told);
            if !is_all || left == 0 {
                self.told_again_after = Some(TOLD_AGAIN_IF_CUT);
            }
            if left == 0 {
                // What is not told may be over.
                return vec![one.awaited.first_few()];
            }
        }
        if goes_on {
            self.told_again_after = Some(TOLD_AGAIN_IF_HERE);
        }
        if goes_on || self.something_comes(now) {
            awaits.push(Await { on: Vec::new(), ends_without: NEVER });
        }
        awaits
    }

    /// Whether a value is on its way here, or has just come.
    fn something_comes(&mut self, now: Instant) -> bool {
        self.coming.retain(|one| one.strong_count() > 0);
        let (mut comes, mut has_just_come) = (false, false);
        for coming in self.coming.iter().filter_map(Weak::upgrade).filter(|one| !self.is_blocked || one.blocks) {
            match coming.has_come.get() {
                None => comes = true,
                Some(at) => has_just_come |= now.saturating_duration_since(*at) < KEPT,
            }
        }
        if has_just_come {
            self.told_again_after = Some(TOLD_AGAIN_IF_HERE);
        }
        comes || has_just_come
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
