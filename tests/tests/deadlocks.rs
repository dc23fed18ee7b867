//! Who waits in a circle is told of it, however it waits, and who is in none is not.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::pin::pin;
use std::time::Duration;

use common::Local;
use futures::{FutureExt, poll, select_biased};
use wingbeat::{ActorPool, Error, ErrorKind, ObjectRef};

/// Only something that hangs takes so long.
const LIMIT: Duration = Duration::from_secs(60);
/// Longer than it takes until somebody is told of a circle.
const LONG: Duration = Duration::from_secs(2);

/// Runs one call at a time: whoever waits for another of it, in one of its own, waits for ever.
struct Loner;

#[wingbeat::actor]
impl Loner {
    fn new() -> Self {
        Loner
    }
    fn answers(&self, number: u32) -> u32 {
        number
    }
    /// The call cannot begin, so the task that takes what it gives cannot either.
    fn needs_an_argument(&self) -> Result<u32, Error> {
        plus_one::remote(loner()?.answers(1)).get_blocking()
    }
    /// As many tasks after each other.
    fn needs_an_argument_of_an_argument(&self) -> Result<u32, Error> {
        plus_one::remote(plus_one::remote(plus_one::remote(loner()?.answers(1)))).get_blocking()
    }
    fn waits_for_one_of_several(&self) -> Result<u32, Error> {
        let loner = loner()?;
        let (ready, _) = wingbeat::wait_blocking((0..3).map(|number| loner.answers(number)).collect(), 1, None)?;
        ready[0].get_blocking()
    }
    /// One of these comes.
    fn waits_for_one_of_several_and_another(&self) -> Result<u32, Error> {
        let loner = loner()?;
        let several = (0..3).map(|number| loner.answers(number)).chain([answers_late::remote(7)]);
        let (ready, _) = wingbeat::wait_blocking(several.collect(), 1, None)?;
        ready[0].get_blocking()
    }
    fn maps_in_any_order(&self) -> Result<u32, Error> {
        let loner = loner()?;
        let mut answers = wingbeat::map(0..3, move |number| loner.answers(number)).unordered();
        answers.next_blocking().unwrap_or(Ok(0))
    }
    fn works_with_a_pool(&self) -> Result<u32, Error> {
        let pool = ActorPool::new([loner()?]);
        let answers = wingbeat::block_on(pool.map(0..3u32, |loner, number| loner.answers(number)))?;
        Ok(answers.into_iter().sum())
    }
    /// Goes on with whichever comes first.
    async fn takes_whichever_comes_first(&self) -> Result<u32, Error> {
        let (own, late) = (loner()?.answers(1), answers_late::remote(7));
        select_biased! {
            own = own.get().fuse() => own,
            late = late.get().fuse() => late,
        }
    }
    /// Waits for both beside each other.
    async fn takes_both(&self) -> Result<u32, Error> {
        let (own, late) = (loner()?.answers(1), answers_late::remote(7));
        let (own, late) = futures::join!(own.get(), late.get());
        own.or(late)
    }
    /// The call lacks its argument at first, and has no room when it has that.
    fn needs_what_takes_an_argument(&self) -> Result<u32, Error> {
        plus_one::remote(loner()?.answers(answers_late::remote(7))).get_blocking()
    }
    /// What has come is not looked at any more.
    async fn keeps_what_has_come(&self) -> Result<u32, Error> {
        let mut late = pin!(answers_late::remote(7).get());
        assert!(poll!(&mut late).is_pending());
        loner()?.answers(1).get().await
    }
    /// Of two that never come, one is looked at.
    async fn keeps_what_never_comes(&self) -> Result<u32, Error> {
        let own = loner()?;
        let mut first = pin!(own.answers(1).get());
        assert!(poll!(&mut first).is_pending());
        own.answers(2).get().await
    }
    /// As [`Self::keeps_what_has_come`], in a task that may run in this process meanwhile.
    fn asks_one_that_keeps_what_has_come(&self) -> Result<u32, Error> {
        keeps_what_has_come::remote(loner()?).get_blocking()
    }
    /// Somebody waits for this, and this for nobody, though it has begun to.
    async fn keeps_one_and_computes(&self) -> Result<u32, Error> {
        let mut asks = pin!(asks::remote(loner()?).get());
        assert!(poll!(&mut asks).is_pending());
        std::thread::sleep(LONG);
        Ok(7)
    }
    async fn waits_for_some_time(&self) -> Result<u32, Error> {
        loner()?.answers(1).get_timeout(LONG).await
    }
    /// Waits for a task that waits for this actor for some time.
    fn waits_for_one_that_waits_for_some_time(&self) -> Result<u32, Error> {
        asks_for_some_time::remote(loner()?).get_blocking()
    }
}

/// Of the actor that runs here.
fn loner() -> Result<LonerHandle, Error> {
    wingbeat::current_handle()
}

#[wingbeat::remote]
fn plus_one(number: u32) -> u32 {
    number + 1
}

#[wingbeat::remote]
fn answers_late(number: u32) -> u32 {
    std::thread::sleep(LONG);
    number
}

#[wingbeat::remote]
async fn keeps_what_has_come(loner: LonerHandle) -> Result<u32, String> {
    let mut late = pin!(answers_late::remote(7).get());
    assert!(poll!(&mut late).is_pending());
    loner.answers(1).get().await.map_err(|error| error.to_string())
}

#[wingbeat::remote]
fn asks(loner: LonerHandle) -> Result<u32, String> {
    loner.answers(1).get_blocking().map_err(|error| error.to_string())
}

#[wingbeat::remote]
fn asks_for_some_time(loner: LonerHandle) -> u32 {
    loner.answers(1).get_timeout_blocking(LONG).unwrap_or(0)
}

#[track_caller]
fn is_told_of_its_circle(call: ObjectRef<u32>) {
    let error = call.get_timeout_blocking(LIMIT).unwrap_err();
    assert!(error.to_string().contains("deadlock") && error.kind() != ErrorKind::TimedOut, "{error}");
}

#[track_caller]
fn answers(call: ObjectRef<u32>, expected: u32) {
    assert_eq!(call.get_timeout_blocking(LIMIT).unwrap(), expected);
}

#[test]
fn a_task_whose_argument_comes_from_a_call_that_cannot_begin_is_in_the_circle() {
    let _local = Local::start(2);
    let loner = Loner::remote();
    is_told_of_its_circle(loner.needs_an_argument());
    is_told_of_its_circle(loner.needs_an_argument_of_an_argument());
    answers(loner.answers(3), 3);
}

#[test]
fn whoever_waits_for_one_of_several_is_told_when_none_can_come() {
    let _local = Local::start(2);
    let loner = Loner::remote();
    is_told_of_its_circle(loner.waits_for_one_of_several());
    is_told_of_its_circle(loner.maps_in_any_order());
    is_told_of_its_circle(loner.works_with_a_pool());
    answers(loner.answers(3), 3);
}

#[test]
fn whoever_waits_for_one_of_several_is_told_of_nothing_while_one_can_come() {
    let _local = Local::start(2);
    let loner = Loner::remote();
    answers(loner.waits_for_one_of_several_and_another(), 7);
    answers(loner.takes_whichever_comes_first(), 7);
}

#[test]
fn of_two_waits_beside_each_other_the_one_in_the_circle_is_told_when_the_other_is_over() {
    let _local = Local::start(2);
    answers(Loner::remote().takes_both(), 7);
}

#[test]
fn a_wait_with_a_limit_is_in_no_circle() {
    let _local = Local::start(2);
    let loner = Loner::remote();
    let error = loner.waits_for_some_time().get_timeout_blocking(LIMIT).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
    answers(loner.waits_for_one_that_waits_for_some_time(), 0);
}

#[test]
fn a_call_that_cannot_begin_when_its_argument_has_come_is_in_the_circle() {
    let _local = Local::start(2);
    is_told_of_its_circle(Loner::remote().needs_what_takes_an_argument());
}

#[test]
fn futures_that_are_kept_and_not_polled_hide_no_circle() {
    let _local = Local::start(2);
    is_told_of_its_circle(Loner::remote().keeps_what_has_come());
    is_told_of_its_circle(Loner::remote().keeps_what_never_comes());
    is_told_of_its_circle(Loner::remote().asks_one_that_keeps_what_has_come());
}

#[test]
fn whoever_computes_is_in_no_circle() {
    let _local = Local::start(2);
    answers(Loner::remote().keeps_one_and_computes(), 7);
}
