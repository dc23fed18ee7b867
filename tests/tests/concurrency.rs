//! How many calls of an actor run at a time, and what that takes.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use common::Local;
use wingbeat::{Error, ObjectRef, get_all_blocking};

/// Only something that hangs takes so long.
const LIMIT: Duration = Duration::from_secs(60);
const MEMBERS: usize = 5;

struct Meeting {
    members: Barrier,
}

#[wingbeat::actor(max_concurrency = 64)]
impl Meeting {
    fn new() -> Self {
        Meeting { members: Barrier::new(MEMBERS) }
    }
    /// Returns when all members are there.
    fn meet(&self) {
        self.members.wait();
    }
    /// Threads of this process that run calls, beside the main one.
    fn lanes(&self) -> usize {
        let threads = std::fs::read_dir("/proc/self/task").unwrap();
        let names = threads.map(|thread| std::fs::read_to_string(thread.unwrap().path().join("comm")).unwrap());
        names.filter(|name| name.starts_with("lane")).count()
    }
}

/// More than an actor has threads, and no multiple of those.
const CROWD: u32 = 100;

struct Crowd {
    there: AtomicUsize,
    most: AtomicUsize,
    members: tokio::sync::Barrier,
    /// Beside one that blocks its thread.
    others: tokio::sync::Barrier,
    others_are_there: Barrier,
}

#[wingbeat::actor(max_concurrency = 100)]
impl Crowd {
    fn new() -> Self {
        let members = tokio::sync::Barrier::new(CROWD as usize);
        let others = tokio::sync::Barrier::new(CROWD as usize - 1);
        let (there, most) = (AtomicUsize::new(0), AtomicUsize::new(0));
        Crowd { there, most, members, others, others_are_there: Barrier::new(2) }
    }
    /// Returns when as many are there as may be. How many there were at most.
    async fn meet(&self) -> usize {
        let there = self.there.fetch_add(1, Ordering::SeqCst) + 1;
        self.most.fetch_max(there, Ordering::SeqCst);
        self.members.wait().await;
        self.there.fetch_sub(1, Ordering::SeqCst);
        self.most.load(Ordering::SeqCst)
    }
    /// Blocks its thread until the others are there.
    fn wait_for_others(&self) {
        self.others_are_there.wait();
    }
    /// Returns when all that may run are there, but one.
    async fn is_another(&self) {
        if self.others.wait().await.is_leader() {
            self.others_are_there.wait();
        }
    }
}

struct Serial;

#[wingbeat::actor]
impl Serial {
    fn new() -> Self {
        Serial
    }
    fn hello(&self) {}
}

fn meet(meeting: &MeetingHandle) -> Vec<ObjectRef<()>> {
    (0..MEMBERS).map(|_| meeting.meet()).collect()
}

#[test]
fn an_actor_has_as_many_threads_as_calls_ran_at_once_and_not_as_many_as_may() {
    let _local = Local::start(1);
    let meeting = Meeting::remote();
    // The next call may come before the lane of the last one waits again.
    const SPARE: usize = 10;
    for _ in 0..1_000 {
        assert!(meeting.lanes().get_timeout_blocking(LIMIT).unwrap() <= SPARE);
    }
    for _ in 0..20 {
        get_all_blocking(&meet(&meeting)).unwrap();
    }
    let lanes = meeting.lanes().get_timeout_blocking(LIMIT).unwrap();
    assert!((MEMBERS - 1..MEMBERS + SPARE).contains(&lanes), "{lanes} lanes for {MEMBERS} calls at once");
}

#[test]
fn as_many_asynchronous_calls_run_at_a_time_as_may_and_no_more() {
    let _local = Local::start(1);
    let crowd = Crowd::remote();
    let calls: Vec<_> = (0..4 * CROWD).map(|_| crowd.meet()).collect();
    for call in calls {
        assert_eq!(call.get_timeout_blocking(LIMIT).unwrap(), CROWD as usize);
    }
}

#[test]
fn a_call_that_blocks_takes_the_place_of_one_and_no_more() {
    let _local = Local::start(1);
    let crowd = Crowd::remote();
    // Of 64 threads each has a call, and one of them blocks.
    let blocks = crowd.wait_for_others();
    let calls: Vec<_> = (1..CROWD).map(|_| crowd.is_another()).collect();
    for call in calls.into_iter().chain([blocks]) {
        call.get_timeout_blocking(LIMIT).unwrap();
    }
}

#[test]
fn an_option_changes_how_many_calls_of_a_concurrent_class_run_at_a_time() {
    let _local = Local::start(1);
    let meeting = Meeting::options().max_concurrency(MEMBERS as u32).remote();
    get_all_blocking(&meet(&meeting)).unwrap();
    let meeting = Meeting::options().max_concurrency(MEMBERS as u32 - 1).remote();
    let stuck = meet(&meeting);
    let error = stuck[0].get_timeout_blocking(Duration::from_millis(500)).unwrap_err();
    assert!(matches!(error, Error::TimedOut { .. }), "{error}");
    meeting.actor().kill();
}

#[test]
fn an_option_that_a_class_was_not_compiled_for_is_an_error() {
    let _local = Local::start(1);
    let error = Serial::options().max_concurrency(8).remote().hello().get_timeout_blocking(LIMIT).unwrap_err();
    assert!(error.to_string().contains("#[wingbeat::actor(max_concurrency = 8)]"), "{error}");
    Serial::options().max_concurrency(1).remote().hello().get_timeout_blocking(LIMIT).unwrap();
}
