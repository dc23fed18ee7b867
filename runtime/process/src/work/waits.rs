//! What an execution waits for, and what the head is told of that.
//!
//! An execution may wait for several things at once, as with `join!`. It waits as long as any of these waits lasts. The head is told of
//! the first wait of a task that was sent here at once. It is told of others only if they last, since it needs them for deadlocks alone.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use wingbeat_core::{LeaseId, TaskId};
use wingbeat_net::messages::{Callee, HeadMessage, Wait, Within};

use super::group::Place;
use crate::owner::object::Producer;

/// The head is told of so many tasks at most: the first ones, which a deadlock leaves over when others are done.
const TOLD: usize = 256;

/// A task that is waited for, and what it is a call of.
pub(crate) type On = (TaskId, Option<Producer>);

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
    count: usize,
    /// Since when there is any.
    since: Option<Instant>,
    /// For how long there was, before.
    waited: Duration,
    /// Whether the head counts the CPUs as free.
    frees_cpus: bool,
    /// How many of them block the thread.
    blocking: usize,
    /// How often it has blocked the thread before.
    was_blocked: u32,
    /// Whether the head was told of any of them.
    is_told: bool,
    /// Of one at home that was not told: whether it was looked at before.
    was_seen: bool,
    on: BTreeMap<TaskId, Awaited>,
    /// It waits for its turn at the state of its actor, and for nothing else.
    pub(crate) is_for_turn: bool,
    /// Whether the head does not know all of this.
    changed: bool,
    /// Whether it may wait for less than the head knows.
    is_stale: bool,
    /// What is waited for changes, and the head was told that it does not know it.
    is_in_flux: bool,
    /// Whether somebody will tell it.
    is_told_later: bool,
    /// It waits for the consumer of its stream, and others run in its place: what else it waits for holds up nobody.
    is_paused: bool,
    /// What the head was told of the room where it runs.
    room: u32,
    /// The execution has ended: it waits for nothing, whatever it has left behind.
    is_over: bool,
}

/// A task that is waited for.
struct Awaited {
    /// How many of the waits are for it, and how many of these block the thread.
    count: usize,
    blocking: usize,
    producer: Option<Producer>,
}

/// By which number a wait blocks its thread, if it does: see [`Waits::blocks`].
pub(crate) type Blocks = Option<u32>;

/// What the head is told that waits changed.
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
    pub(crate) fn is_for(&self, task: TaskId) -> bool {
        self.on.contains_key(&task)
    }

    pub(crate) fn waited(&self, now: Instant) -> Duration {
        self.waited + self.since.map_or(Duration::ZERO, |since| now.saturating_duration_since(since))
    }

    /// What is added now blocks the thread, until [`Waits::blocks_no_more`].
    pub(crate) fn blocks(&self) -> Blocks {
        Some(self.was_blocked)
    }

    /// The thread goes on, also if something is left that was waited for while it was blocked. Whether somebody is to call [`Waits::told_later`] in
    /// a while.
    pub(crate) fn blocks_no_more(&mut self) -> bool {
        self.was_blocked = self.was_blocked.wrapping_add(1);
        if std::mem::take(&mut self.blocking) == 0 {
            return false;
        }
        self.on.values_mut().for_each(|awaited| awaited.blocking = 0);
        self.is_stale = true;
        self.has_changed()
    }

    /// One more, which blocks the thread or not. Whether it is the first: then one of [`Waits::begun`] and [`Waits::begun_at_home`] follows, else
    /// [`Waits::has_changed`].
    pub(crate) fn add(&mut self, on: &[On], blocks: Blocks, now: Instant) -> bool {
        let blocking = usize::from(blocks.is_some());
        self.count += 1;
        self.blocking += blocking;
        if self.count == 1 {
            self.since = Some(now);
            (self.changed, self.is_stale, self.is_in_flux) = (false, false, false);
        }
        for (task, producer) in on {
            let awaited = self.on.entry(*task).or_insert(Awaited { count: 0, blocking: 0, producer: *producer });
            awaited.count += 1;
            awaited.blocking += blocking;
        }
        self.count == 1
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
        self.changed = true;
        self.is_told && !std::mem::replace(&mut self.is_told_later, true)
    }

    /// The execution has ended. What it has left behind, in a variable of its process, is no wait of it any more. If it was waiting, this is what
    /// follows from its going on.
    pub(crate) fn end(&mut self, of: &Waiter<'_>, now: Instant) -> Option<Left> {
        self.is_over = true;
        if self.count == 0 {
            return None;
        }
        (self.waited, self.since, self.count, self.blocking) = (self.waited(now), None, 0, 0);
        self.on.clear();
        Some(Left::None(self.is_told.then_some(HeadMessage::Resumed { lease: of.lease, task: of.task })))
    }

    pub(crate) fn is_over(&self) -> bool {
        self.is_over
    }

    /// One less, which was added with these words.
    pub(crate) fn remove(&mut self, of: &Waiter<'_>, on: &[On], blocks: Blocks, now: Instant) -> Left {
        if self.is_over {
            return Left::Some(false);
        }
        let blocking = usize::from(blocks == self.blocks());
        self.count -= 1;
        self.blocking -= blocking;
        if self.count == 0 {
            self.waited = self.waited(now);
            self.since = None;
        }
        for (task, _) in on {
            if let Some(awaited) = self.on.get_mut(task) {
                awaited.count -= 1;
                awaited.blocking -= blocking;
                if awaited.count == 0 {
                    self.on.remove(task);
                }
            }
        }
        self.is_stale = true;
        match self.count {
            0 => Left::None(self.is_told.then_some(HeadMessage::Resumed { lease: of.lease, task: of.task })),
            _ => Left::Some(self.has_changed()),
        }
    }

    /// It begins to wait for the consumer of its stream, or goes on: what the head is told.
    pub(crate) fn pauses(&mut self, of: &Waiter<'_>, pauses: bool) -> Option<HeadMessage> {
        let is_news = self.is_paused != pauses && self.count > 0 && self.is_told;
        self.is_paused = pauses;
        is_news.then(|| HeadMessage::Waiting { lease: None, wait: self.describe(of) })
    }

    /// There may be room for more, or else fewer, where it runs: what the head is told.
    pub(crate) fn room_has_changed(&mut self, of: &Waiter<'_>) -> Option<HeadMessage> {
        if self.count == 0 || !self.is_told || self.room == 0 {
            return None;
        }
        let is_as_told = self.room == of.place?.room_told(self.blocking > 0);
        (!is_as_told).then(|| HeadMessage::Waiting { lease: None, wait: self.describe(of) })
    }

    /// What the head is told that does not know of it any more.
    pub(crate) fn told_anew(&mut self, of: &Waiter<'_>) -> Option<HeadMessage> {
        (self.count > 0 && self.is_told).then(|| self.told(of))
    }

    /// What the head is told of one at home that was waited for and not told when this was called last, and whether it is to be called
    /// again.
    pub(crate) fn told_if_it_lasts(&mut self, of: &Waiter<'_>) -> (Option<HeadMessage>, bool) {
        if self.count == 0 || self.is_told {
            return (None, false);
        }
        if !std::mem::replace(&mut self.was_seen, true) {
            return (None, true);
        }
        self.is_told = true;
        self.changed = false;
        (Some(self.told(of)), false)
    }

    /// What the head is told when some time has passed since [`Waits::has_changed`], or was before. What it knows and is over is taken back at once,
    /// since it may see a circle in that. What is new has time: it `is_due` after a while.
    pub(crate) fn told_later(&mut self, of: &Waiter<'_>, is_due: bool) -> Later {
        if self.count == 0 || !self.is_told || !(self.changed || self.is_in_flux) {
            self.is_told_later = false;
            return Later::Nothing;
        }
        if !is_due && (self.is_in_flux || !self.is_stale) {
            return Later::Ask;
        }
        self.is_in_flux = !is_due;
        self.changed = false;
        // Without a lease: that its CPUs are free is known already.
        Later::Tell(HeadMessage::Waiting { lease: None, wait: self.describe(of) })
    }

    /// While all of this is waited for, the process runs something else, or no longer: what the head is told.
    pub(crate) fn cpus_are_free(&mut self, of: &Waiter<'_>, are_free: bool) -> Vec<HeadMessage> {
        if self.count == 0 || self.frees_cpus == are_free {
            return Vec::new();
        }
        self.frees_cpus = are_free;
        let resumed = (!are_free).then_some(HeadMessage::Resumed { lease: of.lease, task: of.task });
        resumed.into_iter().chain([self.told(of)]).collect()
    }

    fn told(&mut self, of: &Waiter<'_>) -> HeadMessage {
        HeadMessage::Waiting { lease: of.lease.filter(|_| self.frees_cpus), wait: self.describe(of) }
    }

    fn describe(&mut self, of: &Waiter<'_>) -> Wait {
        let callee = |call: &Producer| Callee { actor: call.actor, group: call.group.into() };
        let most = if self.is_paused { 0 } else { TOLD };
        // While the thread is blocked, it is what blocks it that must go on first.
        let is_first = |awaited: &Awaited| self.blocking == 0 || awaited.blocking > 0;
        let on = self.on.iter().filter(|(_, awaited)| is_first(awaited)).take(most);
        let on: Vec<_> = on.map(|(task, awaited)| (*task, awaited.producer.as_ref().map(callee))).collect();
        self.is_stale = false;
        // One that waits for nobody takes no room.
        self.room = of.place.filter(|_| !on.is_empty()).map_or(0, |place| place.room_told(self.blocking > 0));
        let within = of.place.map(|place| Within { actor: place.actor, group: place.group.clone(), room: self.room });
        let (is_for_turn, is_in_flux) = (self.is_for_turn, self.is_in_flux);
        Wait { task: of.task, name: of.name.to_owned(), within, is_for_turn, is_in_flux, on }
    }

    /// Whether there is any.
    #[cfg(test)]
    pub(crate) fn has_any(&self) -> bool {
        self.count > 0
    }

    /// Whether the head counts the CPUs as free.
    #[cfg(test)]
    pub(crate) fn frees_cpus(&self) -> bool {
        self.count > 0 && self.frees_cpus
    }
}

#[cfg(test)]
mod tests {
    use wingbeat_core::{ActorId, ProcessId};

    use super::super::group::{Room, RoomNews};
    use super::*;

    #[test]
    fn an_execution_that_has_ended_waits_for_nothing_that_it_has_left_behind() {
        let task = |seq| TaskId { owner: ProcessId(1), seq };
        let waiter = Waiter { task: task(0), name: "loads", place: None, lease: Some(LeaseId(1)) };
        let begun = Instant::now();
        let after = |ms| begun + Duration::from_millis(ms);
        let mut waits = Waits::default();
        for seq in [1, 2] {
            waits.add(&[(task(seq), None)], None, begun);
        }
        waits.begun(&waiter, false);
        assert!(waits.frees_cpus());

        let left = waits.end(&waiter, after(10));
        assert!(matches!(left, Some(Left::None(Some(HeadMessage::Resumed { lease: Some(LeaseId(1)), .. })))));
        assert!(!waits.has_any() && !waits.is_for(task(1)));
        // Each is dropped some time, and nobody hears of it.
        assert!(matches!(waits.remove(&waiter, &[(task(1), None)], None, after(20)), Left::Some(false)));
        assert_eq!(waits.waited(after(30)), Duration::from_millis(10));
        assert!(waits.end(&waiter, after(40)).is_none());
    }

    #[test]
    fn what_a_paused_stream_waits_for_beside_its_consumer_holds_up_nobody() {
        let task = |seq| TaskId { owner: ProcessId(1), seq };
        let waiter = Waiter { task: task(0), name: "items", place: None, lease: None };
        let now = Instant::now();
        let mut waits = Waits::default();
        let told = |message: Option<HeadMessage>| match message {
            Some(HeadMessage::Waiting { wait, .. }) => Some(wait.on.len()),
            _ => None,
        };
        assert_eq!(told(waits.pauses(&waiter, true)), None);
        assert_eq!(told(waits.pauses(&waiter, false)), None);
        waits.add(&[(task(1), None)], None, now);
        waits.begun(&waiter, false);
        assert_eq!(told(waits.pauses(&waiter, false)), None, "that is no news");
        assert_eq!(told(waits.pauses(&waiter, true)), Some(0));
        assert_eq!(told(waits.pauses(&waiter, false)), Some(1));
    }

    #[test]
    fn what_runs_beyond_those_that_may_leaves_room() {
        let place = Place::of(ActorId(1), "io", 1);
        let task = |seq| TaskId { owner: ProcessId(1), seq };
        let waiter = Waiter { task: task(0), name: "items", place: Some(&place), lease: None };
        let room = |message| match message {
            Some(HeadMessage::Waiting { wait, .. }) => wait.within.map(|within| within.room),
            _ => None,
        };
        let mut waits = Waits::default();
        assert_eq!(place.runs_beyond(1), RoomNews::None, "nobody was told");
        waits.add(&[(task(1), None)], None, Instant::now());
        assert_eq!(room(Some(waits.begun(&waiter, false))), Some(2));
        assert_eq!(place.runs_beyond(0), RoomNews::Soon);
        assert_eq!(room(waits.room_has_changed(&waiter)), Some(1));
        assert_eq!(room(waits.room_has_changed(&waiter)), None, "it was told");
        assert_eq!(place.runs_beyond(1), RoomNews::AtOnce);
        assert_eq!(place.runs_beyond(2), RoomNews::None, "it will be told of both");
        assert_eq!(room(waits.room_has_changed(&waiter)), Some(3));
        // As many as block all threads are too many, whatever runs beside them.
        let blocks = waits.blocks();
        waits.add(&[(task(2), None)], blocks, Instant::now());
        assert_eq!(room(waits.room_has_changed(&waiter)), Some(1));
    }

    #[test]
    fn what_was_told_and_is_over_is_taken_back_before_what_is_new_is_told() {
        let task = |seq| TaskId { owner: ProcessId(1), seq };
        let waiter = Waiter { task: task(0), name: "loops", place: None, lease: None };
        let now = Instant::now();
        let mut waits = Waits::default();
        let told = |later| match later {
            Later::Tell(HeadMessage::Waiting { wait, .. }) => Some((wait.is_in_flux, wait.on.len())),
            _ => None,
        };
        let add = |waits: &mut Waits, seq| waits.add(&[(task(seq), None)], None, now);
        let remove = |waits: &mut Waits, seq| waits.remove(&waiter, &[(task(seq), None)], None, now);
        add(&mut waits, 1);
        waits.begun(&waiter, false);
        add(&mut waits, 2);
        assert!(waits.has_changed());
        assert!(matches!(waits.told_later(&waiter, false), Later::Ask), "what is new has time");
        assert!(matches!(remove(&mut waits, 1), Left::Some(false)), "somebody looks");
        assert_eq!(told(waits.told_later(&waiter, false)), Some((true, 1)));
        add(&mut waits, 3);
        waits.has_changed();
        remove(&mut waits, 2);
        assert!(matches!(waits.told_later(&waiter, false), Later::Ask), "the head knows that it does not know");
        assert_eq!(told(waits.told_later(&waiter, true)), Some((false, 1)));
        assert!(matches!(waits.told_later(&waiter, false), Later::Nothing));
        assert!(waits.has_changed(), "nobody looks any more");
    }

    #[test]
    fn what_was_waited_for_on_a_blocked_thread_blocks_it_no_more_when_that_goes_on() {
        let task = |seq| TaskId { owner: ProcessId(1), seq };
        let place = Place::with(ActorId(1), Some("io".into()), Room { calls: 1_000, threads: 64 });
        let waiter = Waiter { task: task(0), name: "loads", place: Some(&place), lease: None };
        let now = Instant::now();
        let mut waits = Waits::default();
        let told = |later| match later {
            Later::Tell(HeadMessage::Waiting { wait, .. }) => wait.within.map(|within| (within.room, wait.on.len())),
            _ => None,
        };
        // As in `join!(a.get(), async { select(b.get(), c.get()) on a blocked thread })`, of which `b` is kept.
        waits.add(&[(task(1), None)], None, now);
        waits.begun(&waiter, false);
        let blocks = waits.blocks();
        for seq in [2, 3] {
            waits.add(&[(task(seq), None)], blocks, now);
        }
        waits.has_changed();
        assert_eq!(told(waits.told_later(&waiter, true)), Some((64, 2)), "what blocks it must go on first");
        waits.remove(&waiter, &[(task(3), None)], blocks, now);
        waits.blocks_no_more();
        assert_ne!(waits.blocks(), blocks);
        assert_eq!(told(waits.told_later(&waiter, true)), Some((1_000, 2)));
        waits.remove(&waiter, &[(task(2), None)], blocks, now);
        assert!(matches!(waits.remove(&waiter, &[(task(1), None)], None, now), Left::None(_)));
    }

    #[test]
    fn an_execution_blocks_its_thread_as_long_as_one_of_its_waits_does() {
        let task = |seq| TaskId { owner: ProcessId(1), seq };
        let room = Room { calls: 1_000, threads: 64 };
        let place = Place::with(ActorId(1), Some("io".into()), room);
        let waiter = Waiter { task: task(0), name: "loads", place: Some(&place), lease: None };
        let now = Instant::now();
        let mut waits = Waits::default();
        let room_told = |waits: &mut Waits| match waits.told_later(&waiter, true) {
            Later::Tell(HeadMessage::Waiting { wait, .. }) => wait.within.map(|within| within.room),
            _ => None,
        };
        // As in `join!(a.get(), async { b.get_blocking() })`.
        waits.add(&[(task(1), None)], None, now);
        waits.begun(&waiter, false);
        let blocks = waits.blocks();
        waits.add(&[(task(2), None)], blocks, now);
        assert!(waits.has_changed());
        assert_eq!(room_told(&mut waits), Some(64));
        waits.remove(&waiter, &[(task(2), None)], blocks, now);
        assert_eq!(room_told(&mut waits), Some(1_000));
    }
}
