//! What the head is told of waits, and when.

use wingbeat_core::error::Error;
use wingbeat_core::{ActorId, ProcessId};

use super::super::awaited::On;
use super::super::group::Room;
use super::*;
use crate::owner::object::Handle;

const ASYNCHRONOUS: Manner = Manner { blocks: false, has_limit: false };
const BLOCKING: Manner = Manner { blocks: true, has_limit: false };

fn task(seq: u64) -> TaskId {
    TaskId { owner: ProcessId(1), seq }
}

fn of_task(place: Option<&Place>) -> Waiter<'_> {
    Waiter { task: task(0), name: "loads", place, lease: Some(LeaseId(1)), doing: Doing::default() }
}

/// What goes on when these tasks do.
fn all(tasks: &[u64]) -> Awaited {
    Awaited::all(tasks.iter().map(|seq| On::task(task(*seq))))
}

impl Waits {
    fn begins(&mut self, tasks: &[u64], manner: Manner) -> u64 {
        self.add(all(tasks), manner, Instant::now()).0
    }

    fn ends(&mut self, of: &Waiter<'_>, number: u64) -> Left {
        self.remove(of, number, Instant::now())
    }

    /// What is told when it was looked twice, and nothing has changed between.
    fn lasts(&mut self, of: &Waiter<'_>) -> Option<Wait> {
        assert!(matches!(self.told_later(of), Later::Ask(_)), "what is new must last");
        wait_in(self.told_later(of))
    }
}

fn wait_in(later: Later) -> Option<Wait> {
    match later {
        Later::Tell(message) => said(Some(message)),
        Later::Ask(_) | Later::Nothing => None,
    }
}

fn first(told: Option<(HeadMessage, bool)>) -> Option<HeadMessage> {
    told.map(|(message, _)| message)
}

fn said(message: Option<HeadMessage>) -> Option<Wait> {
    match message {
        Some(HeadMessage::Waiting { wait, .. }) => Some(wait),
        _ => None,
    }
}

/// What is answered to a question.
fn asked(waits: &mut Waits, of: &Waiter<'_>) -> Option<Wait> {
    waits.asked_again(of).map(|(wait, _)| wait)
}

/// The tasks in each of its waits.
fn tasks_in(wait: Option<Wait>) -> Option<Vec<Vec<u64>>> {
    wait.map(|wait| wait.awaits.iter().map(|one| one.on.iter().map(|on| on.task.seq).collect()).collect())
}

fn room_in(wait: Option<Wait>) -> Option<u32> {
    wait?.within.map(|within| within.room)
}

#[test]
fn an_execution_that_has_ended_waits_for_nothing_that_it_has_left_behind() {
    let waiter = of_task(None);
    let begun = Instant::now();
    let after = |ms| begun + Duration::from_millis(ms);
    let mut waits = Waits::default();
    let (number, _) = waits.add(all(&[1]), ASYNCHRONOUS, begun);
    waits.add(all(&[2]), ASYNCHRONOUS, begun);
    waits.begun(&waiter, false);
    assert!(waits.frees_cpus());

    let left = waits.end(&waiter, after(10));
    assert!(matches!(left, Some(Left::None(Some(HeadMessage::Resumed { lease: Some(LeaseId(1)), .. })))));
    assert!(!waits.has_any() && waits.is_hopeless(task(1)).is_none());
    // Each is dropped some time, and nobody hears of it.
    assert!(matches!(waits.remove(&waiter, number, after(20)), Left::Some(false)));
    assert_eq!(waits.waited(after(30)), Duration::from_millis(10));
    assert!(waits.end(&waiter, after(40)).is_none());
}

#[test]
fn what_a_paused_stream_waits_for_beside_its_consumer_holds_up_nobody() {
    let waiter = of_task(None);
    let mut waits = Waits::default();
    assert!(waits.pauses(&waiter, true).is_none());
    assert!(waits.pauses(&waiter, false).is_none());
    waits.begins(&[1], ASYNCHRONOUS);
    waits.begun(&waiter, false);
    assert!(waits.pauses(&waiter, false).is_none(), "that is no news");
    assert_eq!(tasks_in(said(first(waits.pauses(&waiter, true)))), Some(vec![]));
    assert_eq!(tasks_in(said(first(waits.pauses(&waiter, false)))), Some(vec![vec![1]]));
}

#[test]
fn a_stream_that_waits_for_its_consumer_needs_its_thread_and_takes_no_room() {
    let place = Place::of(ActorId(1), "io", 2);
    let waiter = of_task(Some(&place));
    let mut waits = Waits::default();
    let told = |wait: Option<Wait>| wait.map(|wait| (wait.waits_for, wait.within.map(|within| within.room)));
    let begins = |waits: &mut Waits| {
        let number = waits.begins(&[1], ASYNCHRONOUS);
        waits.waits_for(WaitsFor::Thread, &all(&[1]), true);
        number
    };
    let ends = |waits: &mut Waits, number| {
        waits.waits_for(WaitsFor::Thread, &all(&[1]), false);
        waits.ends(&waiter, number)
    };
    for is_paused in [false, true] {
        waits.has_place(false);
        waits.pauses(&waiter, is_paused);
        let number = begins(&mut waits);
        assert_eq!(told(said(Some(waits.begun(&waiter, true).0))), Some((WaitsFor::Thread, None)));
        ends(&mut waits, number);
    }
    // What it waits for beside its consumer matters no more when the thread goes on.
    waits.begins(&[], ASYNCHRONOUS);
    waits.begun(&waiter, true);
    let number = begins(&mut waits);
    waits.has_changed();
    assert_eq!(told(waits.lasts(&waiter)), Some((WaitsFor::Thread, None)));
    ends(&mut waits, number);
    assert_eq!(told(waits.lasts(&waiter)), Some((WaitsFor::Results, Some(0))));
    waits.end(&waiter, Instant::now());
    waits.has_place(true);
    waits.pauses(&waiter, false);
    // Twice, as by a `block_on` within another.
    begins(&mut waits);
    let number = begins(&mut waits);
    ends(&mut waits, number);
    assert_eq!(told(said(Some(waits.begun(&waiter, true).0))), Some((WaitsFor::Thread, Some(2))));
}

#[test]
fn that_there_is_less_room_is_told_and_that_there_is_more_is_asked() {
    let place = Place::of(ActorId(1), "io", 1);
    let waiter = of_task(Some(&place));
    let mut waits = Waits::default();
    assert!(!place.runs_beyond(1), "nobody was told");
    waits.begins(&[1], ASYNCHRONOUS);
    assert_eq!(room_in(said(Some(waits.begun(&waiter, false).0))), Some(2));
    assert!(place.runs_beyond(0));
    assert_eq!(room_in(said(first(waits.has_less_room(&waiter)))), Some(1));
    assert!(waits.has_less_room(&waiter).is_none(), "it was told");
    assert!(!place.runs_beyond(2));
    assert_eq!(room_in(asked(&mut waits, &waiter)), Some(3));
    // As many as block all threads are too many, whatever runs beside them.
    waits.begins(&[2], BLOCKING);
    waits.has_changed();
    assert_eq!(room_in(waits.lasts(&waiter)), Some(1));
}

#[test]
fn what_lasts_from_one_look_to_the_next_is_told() {
    let waiter = of_task(None);
    let mut waits = Waits::default();
    let first = waits.begins(&[1], ASYNCHRONOUS);
    waits.begun(&waiter, false);
    waits.begins(&[2, 3], ASYNCHRONOUS);
    assert!(waits.has_changed());
    assert!(!waits.has_changed(), "somebody looks");
    assert_eq!(tasks_in(waits.lasts(&waiter)), Some(vec![vec![1], vec![2, 3]]));
    assert!(matches!(waits.told_later(&waiter), Later::Ask(_)), "one of the two may be over some time");
    assert!(matches!(waits.ends(&waiter, first), Left::Some(false)), "somebody looks");
    assert!(matches!(waits.told_later(&waiter), Later::Ask(_)));
    // One that waits for one thing after the other is not stuck.
    waits.begins(&[4], ASYNCHRONOUS);
    waits.has_changed();
    assert_eq!(tasks_in(waits.lasts(&waiter)), Some(vec![vec![2, 3], vec![4]]));
}

#[test]
fn who_is_asked_says_what_it_waits_for_now() {
    let waiter = of_task(None);
    let mut waits = Waits::default();
    assert!(asked(&mut waits, &waiter).is_none());
    let first = waits.begins(&[1], ASYNCHRONOUS);
    waits.begins(&[2], ASYNCHRONOUS);
    waits.begun(&waiter, false);
    waits.has_changed();
    waits.ends(&waiter, first);
    assert_eq!(tasks_in(asked(&mut waits, &waiter)), Some(vec![vec![2]]));
    assert!(matches!(waits.told_later(&waiter), Later::Nothing), "it was told");
    waits.end(&waiter, Instant::now());
    assert!(asked(&mut waits, &waiter).is_none());
}

#[test]
fn what_is_here_is_waited_for_no_more() {
    let here = On::value(&Handle::failed(Error::NoSession));
    let ends_without = |awaited: &Awaited| {
        let (told, _) = awaited.told(TOLD_AT_MOST);
        (told.on.len(), told.ends_without)
    };
    // One that is missing is enough for a wait for all, and for a wait for two of three, two must be.
    assert_eq!(ends_without(&Awaited::all([here.clone(), On::task(task(1))])), (1, 1));
    let some = |count| Awaited::some(count, [here.clone(), On::task(task(1)), On::task(task(2))]);
    assert_eq!(ends_without(&some(3)), (2, 1));
    assert_eq!(ends_without(&some(2)), (2, 2));
    assert_eq!(ends_without(&some(1)), (2, 3), "it is over");
    assert_eq!(ends_without(&Awaited::some(1, [])), (0, 1), "it is for nobody");
}

#[test]
fn a_wait_with_a_limit_ends() {
    let waiter = of_task(None);
    let mut waits = Waits::default();
    waits.begins(&[1], Manner { has_limit: true, ..ASYNCHRONOUS });
    let wait = said(Some(waits.begun(&waiter, false).0)).unwrap();
    assert_eq!((wait.awaits[0].on.len(), wait.awaits[0].ends_without), (1, NEVER));
}

#[test]
fn one_that_waits_for_too_many_things_beside_each_other_is_not_told_as_stuck() {
    let waiter = of_task(None);
    let mut waits = Waits::default();
    for seq in 0..=TOLD_AT_MOST as u64 {
        waits.begins(&[seq], ASYNCHRONOUS);
    }
    let wait = said(Some(waits.begun(&waiter, false).0)).unwrap();
    assert_eq!(wait.awaits.len(), 1);
    assert_eq!(wait.awaits[0].ends_without, NEVER);
}

#[test]
fn a_wait_for_one_of_many_is_told_if_it_lasts() {
    let waiter = of_task(None);
    let mut waits = Waits::default();
    let one_of_many = Awaited::some(1, (0..100).map(|seq| On::task(task(seq))));
    waits.add(one_of_many, ASYNCHRONOUS, Instant::now());
    let (first, later) = waits.begun(&waiter, false);
    assert!(later, "somebody looks");
    assert_eq!(said(Some(first)).unwrap().awaits[0].ends_without, NEVER);
    let wait = waits.lasts(&waiter).unwrap();
    assert_eq!((wait.awaits[0].on.len(), wait.awaits[0].ends_without), (100, 100));
    assert!(matches!(waits.told_later(&waiter), Later::Nothing));
}

#[test]
fn what_could_not_all_be_told_is_told_again() {
    let waiter = of_task(None);
    let mut waits = Waits::default();
    waits.add(Awaited::all((0..1_000).map(|seq| On::task(task(seq)))), ASYNCHRONOUS, Instant::now());
    let (first, later) = waits.begun(&waiter, false);
    assert_eq!((said(Some(first)).unwrap().awaits[0].on.len(), later), (256, true));
    for _ in 0..TOLD_AGAIN_IF_CUT {
        assert!(matches!(waits.told_later(&waiter), Later::Ask(LOOKS_AGAIN)));
    }
    assert!(matches!(waits.told_later(&waiter), Later::Tell(_)));
}

#[test]
fn what_is_here_and_is_not_looked_at_lets_nobody_go_on() {
    let waiter = of_task(None);
    let (mut waits, now) = (Waits::default(), Instant::now());
    waits.add(Awaited::all([On::value(&Handle::failed(Error::NoSession))]), ASYNCHRONOUS, now);
    waits.begins(&[1], ASYNCHRONOUS);
    let can_go_on = |wait: &Wait| wait.awaits.iter().any(|one| one.ends_without == NEVER);
    let wait = waits.describe_at(&waiter, now);
    assert!(can_go_on(&wait) && waits.is_to_be_polled(), "it is about to be looked at");
    assert!(can_go_on(&waits.describe_at(&waiter, now + KEPT)), "its thread is busy");
    let polled = Waiter { doing: Doing { runs: false, polls: 1 }, ..of_task(None) };
    let wait = waits.describe_at(&polled, now + KEPT);
    assert!(!can_go_on(&wait));
    assert_eq!(tasks_in(Some(wait)), Some(vec![vec![1]]));
}

#[test]
fn whoever_computes_or_has_a_value_on_its_way_goes_on() {
    let waiter = of_task(None);
    let mut waits = Waits::default();
    waits.begins(&[1], ASYNCHRONOUS);
    waits.begun(&waiter, false);
    let can_go_on = |wait: Wait| wait.awaits.iter().any(|one| one.ends_without == NEVER);
    let computes = Waiter { doing: Doing { runs: true, polls: 0 }, ..of_task(None) };
    let (wait, later) = waits.asked_again(&computes).unwrap();
    assert!(can_go_on(wait) && later, "it is told again when it waits");
    for _ in 0..10 {
        assert!(matches!(waits.told_later(&computes), Later::Ask(LOOKS_AT_NEWS)), "and not before");
    }
    assert!(matches!(waits.told_later(&waiter), Later::Tell(_)));
    let coming = Arc::new(Coming::new(ASYNCHRONOUS));
    waits.begins_to_come(&coming);
    assert!(can_go_on(asked(&mut waits, &waiter).unwrap()));
    // It has come, and is kept.
    coming.comes();
    assert!(waits.has_what_is_here());
    let later = Instant::now() + KEPT;
    assert!(can_go_on(asked(&mut waits, &waiter).unwrap()));
    assert!(!can_go_on(waits.describe_at(&waiter, later)));
    drop(coming);
    assert!(!can_go_on(asked(&mut waits, &waiter).unwrap()));
}

#[test]
fn while_the_thread_is_blocked_what_blocks_it_is_all_that_counts() {
    let place = Place::with(ActorId(1), Some("io".into()), Room { calls: 1_000, threads: 64 });
    let waiter = of_task(Some(&place));
    let mut waits = Waits::default();
    let told = |wait: Option<Wait>| (room_in(wait.clone()), tasks_in(wait));
    // As in `join!(a.get(), async { block_on(select(b.get(), c.get())) })`, of which `b` is kept.
    waits.begins(&[1], ASYNCHRONOUS);
    waits.begun(&waiter, false);
    waits.begins(&[2], BLOCKING);
    let c = waits.begins(&[3], BLOCKING);
    waits.has_changed();
    assert_eq!(told(waits.lasts(&waiter)), (Some(64), Some(vec![vec![2], vec![3]])));
    waits.ends(&waiter, c);
    waits.thread_is_blocked(false);
    assert_eq!(told(waits.lasts(&waiter)), (Some(1_000), Some(vec![vec![1], vec![2]])));
    // The next `block_on` is for something else, and polls nothing of that.
    waits.thread_is_blocked(true);
    let wait = waits.begins(&[], BLOCKING);
    waits.has_changed();
    assert_eq!(told(waits.lasts(&waiter)), (Some(64), Some(vec![vec![2], vec![]])));
    waits.ends(&waiter, wait);
}

#[test]
fn whoever_was_told_that_it_waits_in_vain_has_time_to_hear_it() {
    let waiter = of_task(None);
    let mut waits = Waits::default();
    let kept = waits.begins(&[1], ASYNCHRONOUS);
    let awaited = waits.begins(&[2], ASYNCHRONOUS);
    waits.begun(&waiter, false);
    assert_eq!(waits.is_hopeless(task(3)), None);
    assert_eq!(waits.is_hopeless(task(2)), Some(awaited));
    assert_eq!(asked(&mut waits, &waiter).unwrap().awaits[0].ends_without, NEVER);
    let later = Instant::now() + HEARS;
    assert_eq!(tasks_in(Some(waits.describe_at(&waiter, later))), Some(vec![vec![1], vec![2]]));
    // What it was told of is over, though it was for all.
    waits.ends(&waiter, awaited);
    assert!(waits.is_hopeless_no_more());
    assert!(!waits.is_hopeless_no_more());
    waits.ends(&waiter, kept);
}
