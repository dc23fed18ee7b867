//! What an execution waits for, and what the head is told of that.
//!
//! An execution may wait for several things at once, as with `join!`. It waits as long as any of these waits lasts. The head is told of
//! the first wait of a task that was sent here at once. It is told of others only if they last, since it needs them for deadlocks alone.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use wingbeat_core::{LeaseId, TaskId};
use wingbeat_net::messages::{Callee, HeadMessage, Wait, WaitsFor, Within};

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
    /// How many of them are waits of a thread that is blocked for them.
    blocking: usize,
    /// Whether it is right now.
    is_blocked: bool,
    /// Whether the head was told of any of them.
    is_told: bool,
    /// Of one at home that was not told: whether it was looked at before.
    was_seen: bool,
    on: BTreeMap<TaskId, Awaited>,
    /// Which of these the head was told of, in order, and whether one of them may be over, or the thread goes on.
    told: Vec<TaskId>,
    is_stale: bool,
    /// It waits for its turn at the state of its actor, and for nothing else but its thread.
    is_for_turn: bool,
    /// Whoever blocks its thread: until that goes on, nothing else matters.
    thread_is_with: Option<TaskId>,
    /// How many of the waits are for it.
    for_thread: usize,
    /// It is not one of those that run at a time in its group, as a stream while it waits for its consumer.
    has_no_place: bool,
    /// Whether there is something that the head was not told of.
    changed: bool,
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
    /// How many of the waits are for it, and for how many of these the thread is blocked.
    count: usize,
    blocking: usize,
    /// Whether it was waited for when it was looked before.
    was_seen: bool,
    producer: Option<Producer>,
}

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

    /// The thread does nothing else as long as these waits last that it is blocked for, or goes on, though some may be left. Whether somebody is to
    /// call [`Waits::told_later`] in a while.
    pub(crate) fn thread_is_blocked(&mut self, is_blocked: bool) -> bool {
        let was_held_up = self.is_held_up();
        self.is_blocked = is_blocked;
        let is_news = was_held_up != self.is_held_up();
        self.is_stale |= is_news;
        is_news && self.has_changed()
    }

    /// One more, for which the thread is blocked or not. Whether it is the first: then one of [`Waits::begun`] and [`Waits::begun_at_home`] follows,
    /// else [`Waits::has_changed`].
    pub(crate) fn add(&mut self, on: &[On], blocks: bool, now: Instant) -> bool {
        let was_held_up = self.is_held_up();
        self.count += 1;
        self.blocking += usize::from(blocks);
        self.is_blocked |= blocks;
        // What else it waits for must wait.
        self.is_stale |= was_held_up != self.is_held_up();
        if self.count == 1 {
            self.since = Some(now);
            (self.changed, self.is_stale) = (false, false);
            self.told.clear();
        }
        for (task, producer) in on {
            let new = Awaited { count: 0, blocking: 0, was_seen: false, producer: *producer };
            let awaited = self.on.entry(*task).or_insert(new);
            awaited.count += 1;
            awaited.blocking += usize::from(blocks);
        }
        self.count == 1
    }

    /// What was added is more than a wait for results, or was.
    pub(crate) fn waits_for(&mut self, what: WaitsFor, on: &[On], waits: bool) {
        match what {
            WaitsFor::Results => {}
            WaitsFor::Turn => self.is_for_turn = waits,
            WaitsFor::Thread => {
                self.for_thread = if waits { self.for_thread + 1 } else { self.for_thread.saturating_sub(1) };
                self.thread_is_with = on.first().filter(|_| self.for_thread > 0).map(|(by, _)| *by);
                self.is_stale = true;
            }
        }
    }

    /// Whether it is one of those that run at a time in its group.
    pub(crate) fn has_place(&mut self, has_place: bool) {
        self.has_no_place = !has_place;
    }

    /// Whether it waits for its consumer alone.
    fn holds_up_nobody(&self) -> bool {
        self.is_paused && self.thread_is_with.is_none()
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
    pub(crate) fn remove(&mut self, of: &Waiter<'_>, on: &[On], blocks: bool, now: Instant) -> Left {
        if self.is_over {
            return Left::Some(false);
        }
        self.count -= 1;
        self.blocking -= usize::from(blocks);
        if self.count == 0 {
            self.waited = self.waited(now);
            self.since = None;
        }
        for (task, _) in on {
            let Some(awaited) = self.on.get_mut(task) else { continue };
            awaited.count -= 1;
            awaited.blocking -= usize::from(blocks);
            let is_over = awaited.count == 0;
            if is_over || blocks && awaited.blocking == 0 {
                self.is_stale |= self.told.binary_search(task).is_ok();
            }
            if is_over {
                self.on.remove(task);
            }
        }
        match self.count {
            0 => Left::None(self.is_told.then_some(HeadMessage::Resumed { lease: of.lease, task: of.task })),
            _ => Left::Some(self.has_changed()),
        }
    }

    /// It begins to wait for the consumer of its stream, or goes on: what the head is told.
    pub(crate) fn pauses(&mut self, of: &Waiter<'_>, pauses: bool) -> Option<HeadMessage> {
        let is_news = self.is_paused != pauses && self.count > 0 && self.is_told;
        self.is_paused = pauses;
        is_news.then(|| self.said_again(of, |_, _| true))
    }

    /// There may be room for more, or else fewer, where it runs: what the head is told.
    pub(crate) fn room_has_changed(&mut self, of: &Waiter<'_>) -> Option<HeadMessage> {
        if self.count == 0 || !self.is_told || self.room == 0 {
            return None;
        }
        let is_as_told = self.room == of.place?.room_told(self.is_held_up());
        (!is_as_told).then(|| self.said_again(of, |awaited, was_told| was_told || awaited.was_seen))
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

    /// What the head is told when some time has passed since [`Waits::has_changed`], or since this was called last. What it was told and is over is taken
    /// back at once, since it may see a circle in that. What is new is told if it lasts, and only if that `is_due`.
    pub(crate) fn told_later(&mut self, of: &Waiter<'_>, is_due: bool) -> Later {
        // All is said when a stream goes on. Until then it has nothing new to say.
        let has_news = self.is_stale || self.changed && !self.holds_up_nobody();
        if self.count == 0 || !self.is_told || !has_news {
            self.is_told_later = false;
            return Later::Nothing;
        }
        let is_over = self.is_stale;
        let before = (self.told.clone(), self.room);
        let news = match (is_due, is_over) {
            (true, _) => Some(self.said_again(of, |awaited, was_told| was_told || awaited.was_seen)),
            (false, true) => Some(self.said_again(of, |_, was_told| was_told)),
            (false, false) => None,
        };
        let (told, must_go_on_first) = (&self.told, self.must_go_on_first());
        let named = self.on.iter_mut().filter(|(task, awaited)| must_go_on_first(task, awaited)).take(TOLD);
        let mut are_untold = named.filter(|(task, _)| told.binary_search(task).is_err()).peekable();
        if is_due {
            self.changed = are_untold.peek().is_some();
        }
        are_untold.for_each(|(_, awaited)| awaited.was_seen = true);
        // Said again sometimes, since the head may have told of a circle when this was not waited for.
        let is_news = is_due && is_over || before != (self.told.clone(), self.room);
        match news.filter(|_| is_news) {
            Some(news) => Later::Tell(news),
            None => Later::Ask,
        }
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
        HeadMessage::Waiting { lease: of.lease.filter(|_| self.frees_cpus), wait: self.describe(of, |_, _| true) }
    }

    /// Without a lease: that its CPUs are free is known already.
    fn said_again(&mut self, of: &Waiter<'_>, which: impl Fn(&Awaited, bool) -> bool) -> HeadMessage {
        HeadMessage::Waiting { lease: None, wait: self.describe(of, which) }
    }

    /// Whether nothing goes on before what its thread is blocked for.
    fn is_held_up(&self) -> bool {
        self.is_blocked && self.blocking > 0
    }

    /// Of what is waited for, whether the rest can only go on after it.
    fn must_go_on_first(&self) -> impl Fn(&TaskId, &Awaited) -> bool + use<> {
        let (thread_is_with, is_held_up) = (self.thread_is_with, self.is_held_up());
        move |task, awaited| match thread_is_with {
            Some(by) => *task == by,
            None => !is_held_up || awaited.blocking > 0,
        }
    }

    /// With those for which `which` says so, given whether the head was told of each before.
    fn describe(&mut self, of: &Waiter<'_>, which: impl Fn(&Awaited, bool) -> bool) -> Wait {
        let callee = |call: &Producer| Callee { actor: call.actor, group: call.group.into() };
        let (most, must_go_on_first) = (if self.holds_up_nobody() { 0 } else { TOLD }, self.must_go_on_first());
        let first = self.on.iter().filter(|(task, awaited)| must_go_on_first(task, awaited)).take(most);
        let named = first.filter(|(task, awaited)| which(awaited, self.told.binary_search(task).is_ok()));
        let on: Vec<_> = named.map(|(task, awaited)| (*task, awaited.producer.as_ref().map(callee))).collect();
        self.told = on.iter().map(|(task, _)| *task).collect();
        self.is_stale = false;
        // One that waits for nobody takes no room.
        let place = of.place.filter(|_| !(self.has_no_place && self.thread_is_with.is_some()));
        self.room = place.filter(|_| !on.is_empty()).map_or(0, |place| place.room_told(self.is_held_up()));
        let within = place.map(|place| Within { actor: place.actor, group: place.group.clone(), room: self.room });
        let waits_for = match (self.thread_is_with, self.is_for_turn) {
            (Some(_), _) => WaitsFor::Thread,
            (None, true) => WaitsFor::Turn,
            (None, false) => WaitsFor::Results,
        };
        Wait { task: of.task, name: of.name.to_owned(), within, waits_for, on }
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
            waits.add(&[(task(seq), None)], false, begun);
        }
        waits.begun(&waiter, false);
        assert!(waits.frees_cpus());

        let left = waits.end(&waiter, after(10));
        assert!(matches!(left, Some(Left::None(Some(HeadMessage::Resumed { lease: Some(LeaseId(1)), .. })))));
        assert!(!waits.has_any() && !waits.is_for(task(1)));
        // Each is dropped some time, and nobody hears of it.
        assert!(matches!(waits.remove(&waiter, &[(task(1), None)], false, after(20)), Left::Some(false)));
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
        waits.add(&[(task(1), None)], false, now);
        waits.begun(&waiter, false);
        assert_eq!(told(waits.pauses(&waiter, false)), None, "that is no news");
        assert_eq!(told(waits.pauses(&waiter, true)), Some(0));
        assert_eq!(told(waits.pauses(&waiter, false)), Some(1));
    }

    #[test]
    fn a_stream_that_waits_for_its_consumer_needs_its_thread_and_takes_no_room() {
        let place = Place::of(ActorId(1), "io", 2);
        let task = |seq| TaskId { owner: ProcessId(1), seq };
        let waiter = Waiter { task: task(0), name: "items", place: Some(&place), lease: None };
        let now = Instant::now();
        let mut waits = Waits::default();
        let said = |message| match message {
            HeadMessage::Waiting { wait, .. } => (wait.waits_for, wait.within.map(|within| within.room), wait.on.len()),
            _ => panic!("it waits"),
        };
        let by = [(task(1), None)];
        for is_paused in [false, true] {
            waits.has_place(false);
            waits.pauses(&waiter, is_paused);
            waits.add(&by, false, now);
            waits.waits_for(WaitsFor::Thread, &by, true);
            assert_eq!(said(waits.begun(&waiter, true)), (WaitsFor::Thread, None, 1));
            waits.waits_for(WaitsFor::Thread, &by, false);
            waits.remove(&waiter, &by, false, now);
        }
        // What it waits for beside its consumer matters no more when the thread goes on.
        waits.add(&[], false, now);
        waits.begun(&waiter, true);
        waits.add(&by, false, now);
        waits.waits_for(WaitsFor::Thread, &by, true);
        waits.has_changed();
        let told = |later| match later {
            Later::Tell(message) => said(message),
            _ => panic!("it is told"),
        };
        assert!(matches!(waits.told_later(&waiter, true), Later::Tell(_) | Later::Ask));
        assert_eq!(told(waits.told_later(&waiter, true)), (WaitsFor::Thread, None, 1));
        waits.waits_for(WaitsFor::Thread, &by, false);
        waits.remove(&waiter, &by, false, now);
        assert_eq!(told(waits.told_later(&waiter, false)), (WaitsFor::Results, Some(0), 0));
        assert!(matches!(waits.told_later(&waiter, false), Later::Nothing));
        waits.remove(&waiter, &[], false, now);
        waits.has_place(true);
        waits.pauses(&waiter, false);
        // Twice, as by a `block_on` within another.
        for _ in 0..2 {
            waits.add(&by, false, now);
            waits.waits_for(WaitsFor::Thread, &by, true);
        }
        waits.waits_for(WaitsFor::Thread, &by, false);
        waits.remove(&waiter, &by, false, now);
        assert_eq!(said(waits.begun(&waiter, true)), (WaitsFor::Thread, Some(2), 1));
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
        waits.add(&[(task(1), None)], false, Instant::now());
        assert_eq!(room(Some(waits.begun(&waiter, false))), Some(2));
        assert_eq!(place.runs_beyond(0), RoomNews::Soon);
        assert_eq!(room(waits.room_has_changed(&waiter)), Some(1));
        assert_eq!(room(waits.room_has_changed(&waiter)), None, "it was told");
        assert_eq!(place.runs_beyond(2), RoomNews::AtOnce);
        assert_eq!(room(waits.room_has_changed(&waiter)), Some(3));
        // As many as block all threads are too many, whatever runs beside them.
        waits.add(&[(task(2), None)], true, Instant::now());
        assert_eq!(room(waits.room_has_changed(&waiter)), Some(0), "whether that lasts is not known yet");
        waits.has_changed();
        assert!(matches!(waits.told_later(&waiter, true), Later::Ask));
        let Later::Tell(lasts) = waits.told_later(&waiter, true) else { panic!("it has lasted") };
        assert_eq!(room(Some(lasts)), Some(1));
    }

    #[test]
    fn what_was_told_and_is_over_is_taken_back_before_what_is_new_is_told() {
        let task = |seq| TaskId { owner: ProcessId(1), seq };
        let waiter = Waiter { task: task(0), name: "loops", place: None, lease: None };
        let now = Instant::now();
        let mut waits = Waits::default();
        let told = |later| match later {
            Later::Tell(HeadMessage::Waiting { wait, .. }) => Some(wait.on.iter().map(|(on, _)| on.seq).collect()),
            Later::Ask => Some(Vec::new()),
            _ => None,
        };
        let add = |waits: &mut Waits, seq| waits.add(&[(task(seq), None)], false, now);
        let remove = |waits: &mut Waits, seq| waits.remove(&waiter, &[(task(seq), None)], false, now);
        let nothing = Some(Vec::new());
        add(&mut waits, 1);
        waits.begun(&waiter, false);
        add(&mut waits, 2);
        assert!(waits.has_changed());
        assert_eq!(told(waits.told_later(&waiter, true)), nothing, "what is new must last");
        add(&mut waits, 3);
        assert_eq!(told(waits.told_later(&waiter, false)), nothing, "and be due");
        assert_eq!(told(waits.told_later(&waiter, true)), Some(vec![1, 2, 3]));
        add(&mut waits, 4);
        assert!(matches!(remove(&mut waits, 2), Left::Some(false)), "somebody looks");
        assert_eq!(told(waits.told_later(&waiter, false)), Some(vec![1, 3]));
        remove(&mut waits, 4);
        add(&mut waits, 5);
        assert_eq!(told(waits.told_later(&waiter, false)), nothing, "what was not told is not taken back");
        remove(&mut waits, 5);
        assert_eq!(told(waits.told_later(&waiter, true)), nothing);
        assert_eq!(told(waits.told_later(&waiter, true)), None);
        assert!(waits.has_changed(), "nobody looks any more");
    }

    #[test]
    fn what_a_thread_was_blocked_for_holds_up_the_rest_only_while_it_is_blocked() {
        let task = |seq| TaskId { owner: ProcessId(1), seq };
        let place = Place::with(ActorId(1), Some("io".into()), Room { calls: 1_000, threads: 64 });
        let waiter = Waiter { task: task(0), name: "loads", place: Some(&place), lease: None };
        let now = Instant::now();
        let mut waits = Waits::default();
        let told = |waits: &mut Waits, is_due| match waits.told_later(&waiter, is_due) {
            Later::Tell(HeadMessage::Waiting { wait, .. }) => wait.within.map(|within| (within.room, wait.on.len())),
            _ => None,
        };
        let looks_twice = |waits: &mut Waits| told(waits, true).or_else(|| told(waits, true));
        // As in `join!(a.get(), async { block_on(select(b.get(), c.get())) })`, of which `b` is kept.
        waits.add(&[(task(1), None)], false, now);
        waits.begun(&waiter, false);
        for seq in [2, 3] {
            waits.add(&[(task(seq), None)], true, now);
        }
        waits.has_changed();
        assert_eq!(told(&mut waits, true), Some((0, 0)), "it waits for none of those that the head knows");
        assert_eq!(told(&mut waits, true), Some((64, 2)));
        waits.remove(&waiter, &[(task(3), None)], true, now);
        waits.thread_is_blocked(false);
        assert_eq!(told(&mut waits, false), Some((1_000, 1)), "that there is more room is told at once");
        assert_eq!(looks_twice(&mut waits), Some((1_000, 2)));
        // The next `block_on` need not poll what is kept.
        waits.thread_is_blocked(true);
        assert_eq!(looks_twice(&mut waits), Some((64, 1)));
        waits.remove(&waiter, &[(task(2), None)], true, now);
        assert!(matches!(waits.remove(&waiter, &[(task(1), None)], false, now), Left::None(_)));
    }

    #[test]
    fn an_execution_blocks_its_thread_as_long_as_one_of_its_waits_does() {
        let task = |seq| TaskId { owner: ProcessId(1), seq };
        let room = Room { calls: 1_000, threads: 64 };
        let place = Place::with(ActorId(1), Some("io".into()), room);
        let waiter = Waiter { task: task(0), name: "loads", place: Some(&place), lease: None };
        let now = Instant::now();
        let mut waits = Waits::default();
        let look = |waits: &mut Waits| match waits.told_later(&waiter, true) {
            Later::Tell(HeadMessage::Waiting { wait, .. }) => wait.within.map(|within| within.room),
            _ => None,
        };
        // What is new must last from one look to the next.
        let room_told = |waits: &mut Waits| [look(waits), look(waits)];
        // As in `join!(a.get(), async { b.get_blocking() })`.
        waits.add(&[(task(1), None)], false, now);
        waits.begun(&waiter, false);
        waits.add(&[(task(2), None)], true, now);
        assert!(waits.has_changed());
        assert_eq!(room_told(&mut waits), [Some(0), Some(64)]);
        waits.remove(&waiter, &[(task(2), None)], true, now);
        assert_eq!(room_told(&mut waits), [Some(0), Some(1_000)]);
    }
}
