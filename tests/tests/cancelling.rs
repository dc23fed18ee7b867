//! Cancelling: by whom, of what, and at which time.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use common::{Local, Started, wait_for};
use futures::stream::FuturesUnordered;
use futures::{FutureExt, StreamExt};
use wingbeat::{Error, ObjectRef, Result};

/// Only what hangs takes so long.
const LIMIT: Duration = Duration::from_secs(60);

fn is_cancelled<T: std::fmt::Debug>(result: Result<T>) -> bool {
    match result {
        Err(Error::Cancelled { .. }) => true,
        other => panic!("not cancelled, but {other:?}"),
    }
}

#[wingbeat::remote]
async fn asleep(started: PathBuf) -> u64 {
    std::fs::write(started, "").unwrap();
    std::future::pending().await
}

/// Makes a file when it is dropped.
struct Dropped(PathBuf);

impl Drop for Dropped {
    fn drop(&mut self) {
        std::fs::write(&self.0, "").unwrap();
    }
}

#[wingbeat::remote]
async fn asks_again_after_each_error(started: PathBuf, dropped: PathBuf) {
    let _dropped = Dropped(dropped);
    loop {
        let _ = asleep::remote(started.clone()).get().await;
    }
}

#[wingbeat::remote]
async fn maps_again_after_each_error(started: PathBuf, dropped: PathBuf) {
    let _dropped = Dropped(dropped);
    loop {
        let _ = wingbeat::map([started.clone()], asleep::remote).collect().await;
    }
}

/// Looks at what its child gives without waiting for it.
#[wingbeat::remote]
fn looks_now_and_then(started: PathBuf) -> bool {
    let child = asleep::remote(started);
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(async {
        loop {
            if let Some(seen) = child.get().now_or_never() {
                return matches!(seen, Err(Error::Cancelled { .. }));
            }
            tokio::task::yield_now().await;
        }
    })
}

/// Counts what was let go.
struct Lock(u64);

#[wingbeat::actor]
impl Lock {
    fn new() -> Self {
        Lock(0)
    }
    fn release(&mut self) {
        self.0 += 1;
    }
    fn released(&self) -> u64 {
        self.0
    }
    fn is_busy_until(&self, there: PathBuf) {
        wait_for(&there);
    }
}

struct Guard(LockHandle);

impl Drop for Guard {
    fn drop(&mut self) {
        drop(self.0.release());
    }
}

#[wingbeat::remote]
async fn holds(lock: LockHandle, started: PathBuf) {
    let _guard = Guard(lock);
    asleep::remote(started).get().await.unwrap();
}

/// Lets the lock go when it hears, and is not done before a file is there.
#[wingbeat::remote]
fn releases_and_goes_on(lock: LockHandle, started: PathBuf, heard: PathBuf, there: PathBuf) {
    asleep::remote(started).get_blocking().unwrap_err();
    let _released = lock.release();
    std::fs::write(heard, "").unwrap();
    wait_for(&there);
}

/// Ends well when it is asked to stop.
#[wingbeat::remote]
async fn stops_by_itself(started: PathBuf) -> u64 {
    tokio::select! {
        () = wingbeat::cancelled() => 7,
        never = asleep::remote(started).get() => never.unwrap(),
    }
}

/// What waits for its cancellation is polled last, of several in a collection.
#[wingbeat::remote]
async fn stops_by_itself_among_others(started: Vec<PathBuf>, waits: PathBuf, stopped: PathBuf) {
    let mut all = FuturesUnordered::new();
    for started in started {
        all.push(asleep::remote(started).get().map(drop).boxed());
    }
    let hears = async move {
        let mut cancelled = std::pin::pin!(wingbeat::cancelled());
        assert!(futures::poll!(&mut cancelled).is_pending());
        std::fs::write(waits, "").unwrap();
        cancelled.await;
        std::fs::write(stopped, "").unwrap();
    };
    all.push(hears.boxed());
    while all.next().await.is_some() {}
}

#[wingbeat::remote]
fn holds_and_releases(lock: LockHandle, started: PathBuf) {
    asleep::remote(started).get_blocking().unwrap_err();
    let _ = lock.release().get_blocking();
}

#[wingbeat::remote]
fn next_one(x: u64) -> u64 {
    x + 1
}

#[wingbeat::remote]
fn deaf(started: PathBuf, release: PathBuf) -> u64 {
    std::fs::write(started, "").unwrap();
    wait_for(&release);
    1
}

#[wingbeat::remote]
async fn asleep_elsewhere(started: PathBuf) -> Vec<ObjectRef<u64>> {
    vec![asleep::remote(started)]
}

#[wingbeat::remote]
fn parent_of(started: PathBuf, ended: PathBuf) -> u64 {
    let child = asleep::remote(started);
    let result = child.get_blocking();
    // This wait was interrupted; the child is cancelled on its own account.
    while !child.is_ready() {
        std::thread::yield_now();
    }
    std::fs::write(ended, format!("{:?}", child.get_timeout_blocking(LIMIT))).unwrap();
    result.unwrap_or(0)
}

#[wingbeat::remote]
fn family_elsewhere(started: PathBuf, ended: PathBuf) -> Vec<ObjectRef<u64>> {
    vec![parent_of::remote(started, ended)]
}

#[wingbeat::remote]
fn cancels(refs: Vec<ObjectRef<u64>>, force: bool) {
    for object in refs {
        if force { object.cancel_force() } else { object.cancel() }
    }
}

#[wingbeat::remote]
fn marks(_after: u64, mark: PathBuf) -> u64 {
    std::fs::write(mark, "").unwrap();
    0
}

#[wingbeat::remote]
fn passes(x: u64) -> u64 {
    x
}

#[wingbeat::remote]
fn has_a_child_that_waits(gate: Vec<ObjectRef<u64>>, mark: PathBuf, started: PathBuf, ended: PathBuf) -> u64 {
    let child = marks::remote(&gate[0], mark);
    std::fs::write(started, "").unwrap();
    // The gate stays shut: the child is ready only if it was cancelled.
    while !child.is_ready() {
        std::thread::yield_now();
    }
    std::fs::write(ended, "").unwrap();
    0
}

struct Busy {
    calls: u64,
}

#[wingbeat::actor]
impl Busy {
    fn new() -> Self {
        Busy { calls: 0 }
    }
    fn busy(&mut self, started: PathBuf, release: PathBuf) -> u64 {
        std::fs::write(started, "").unwrap();
        // Those who cancel it have asked by then, also for what is queued behind it.
        while !(release.exists() && wingbeat::is_cancelled()) {
            std::thread::yield_now();
        }
        self.calls += 1;
        self.calls
    }
    fn calls(&self) -> u64 {
        self.calls
    }
    fn pid(&self) -> u32 {
        std::process::id()
    }
}

#[test]
fn who_borrows_a_ref_can_cancel_its_task() {
    let _local = Local::start(3);
    for force in [false, true] {
        let started = Started::new();
        let borrowed = asleep_elsewhere::remote(started.path()).get_blocking().unwrap().remove(0);
        wait_for(&started.path());
        if force {
            borrowed.cancel_force()
        } else {
            borrowed.cancel()
        }
        assert!(is_cancelled(borrowed.get_timeout_blocking(LIMIT)));
    }
}

#[test]
fn a_borrowed_task_is_cancelled_with_its_children() {
    let _local = Local::start(4);
    let (started, ended) = (Started::new(), Started::new());
    let borrowed = family_elsewhere::remote(started.path(), ended.path()).get_blocking().unwrap().remove(0);
    wait_for(&started.path());
    borrowed.cancel();
    wait_for(&ended.path());
    borrowed.get_timeout_blocking(LIMIT).ok();
}

#[test]
fn a_task_can_cancel_another_by_its_ref() {
    let _local = Local::start(3);
    for force in [false, true] {
        let (started, release) = (Started::new(), Started::new());
        // What does not listen can be cancelled by force alone.
        let running = if force { deaf::remote(started.path(), release.path()) } else { asleep::remote(started.path()) };
        wait_for(&started.path());
        cancels::remote(vec![running.clone()], force).get_blocking().unwrap();
        assert!(is_cancelled(running.get_timeout_blocking(LIMIT)));
    }
}

#[test]
fn a_task_that_waits_for_an_argument_can_be_cancelled_by_whoever_borrows_it() {
    let _local = Local::start(2);
    let (started, release, mark) = (Started::new(), Started::new(), Started::new());
    let gate = deaf::remote(started.path(), release.path());
    let waiting = marks::remote(&gate, mark.path());
    cancels::remote(vec![waiting.clone()], false).get_blocking().unwrap();
    assert!(is_cancelled(waiting.get_timeout_blocking(LIMIT)));
    std::fs::write(release.path(), "").unwrap();
    passes::remote(&gate).get_timeout_blocking(LIMIT).unwrap();
    assert!(!mark.path().exists());
}

#[test]
fn a_task_that_was_cancelled_before_its_arguments_were_there_never_runs_though_its_ref_is_gone() {
    let _local = Local::start(1);
    let (started, release, mark) = (Started::new(), Started::new(), Started::new());
    let gate = deaf::remote(started.path(), release.path());
    let waiting = marks::remote(&gate, mark.path());
    wait_for(&started.path());
    waiting.cancel();
    drop(waiting);
    // With one CPU it would run before what is submitted later.
    let after = passes::remote(&gate);
    std::fs::write(release.path(), "").unwrap();
    after.get_timeout_blocking(LIMIT).unwrap();
    assert!(!mark.path().exists());
}

#[test]
fn children_that_wait_for_their_arguments_are_cancelled_with_their_parent() {
    let _local = Local::start(3);
    let [started, release, mark, parent_started, ended] = std::array::from_fn(|_| Started::new());
    let gate = deaf::remote(started.path(), release.path());
    let parent = has_a_child_that_waits::remote(vec![gate.clone()], mark.path(), parent_started.path(), ended.path());
    wait_for(&parent_started.path());
    parent.cancel();
    wait_for(&ended.path());
    std::fs::write(release.path(), "").unwrap();
    gate.get_timeout_blocking(LIMIT).unwrap();
    assert!(!mark.path().exists());
}

#[test]
fn a_call_that_is_cancelled_by_force_is_answered_and_its_actor_lives() {
    let _local = Local::start(1);
    let (started, release) = (Started::new(), Started::new());
    let actor = Busy::remote();
    let pid = actor.pid().get_blocking().unwrap();
    let call = actor.busy(started.path(), release.path());
    let (queued, other) = (actor.busy(started.path(), release.path()), actor.calls());
    wait_for(&started.path());
    queued.cancel_force();
    call.cancel_force();
    assert!(is_cancelled(call.get_timeout_blocking(LIMIT)));
    assert!(is_cancelled(queued.get_timeout_blocking(LIMIT)));
    std::fs::write(release.path(), "").unwrap();
    assert_eq!(other.get_timeout_blocking(LIMIT).unwrap(), 1, "the method ran to its end, once");
    assert_eq!(actor.pid().get_timeout_blocking(LIMIT).unwrap(), pid);
}

#[test]
fn a_task_whose_time_is_over_never_runs() {
    let _local = Local::start(1);
    let (started, release, mark) = (Started::new(), Started::new(), Started::new());
    let gate = deaf::remote(started.path(), release.path());
    wait_for(&started.path());
    let late = marks::options().timeout(Duration::from_millis(1)).remote(&gate, mark.path());
    let error = late.get_timeout_blocking(LIMIT).unwrap_err();
    assert!(matches!(error, Error::TimedOut { limit_ms: 1, .. }), "{error}");
    let after = passes::remote(&gate);
    std::fs::write(release.path(), "").unwrap();
    after.get_timeout_blocking(LIMIT).unwrap();
    assert!(!mark.path().exists());
    // One that is in time is not touched by its limit.
    let punctual = passes::options().timeout(LIMIT).remote(3);
    assert_eq!(punctual.get_blocking().unwrap(), 3);
}

#[test]
fn a_wait_that_took_too_long_names_the_task() {
    let _local = Local::start(1);
    let started = Started::new();
    let running = asleep::remote(started.path());
    wait_for(&started.path());
    let text = running.get_timeout_blocking(Duration::from_millis(1)).unwrap_err().to_string();
    assert!(text.contains("asleep") && text.contains("object-"), "{text}");
}

#[test]
fn a_forced_cancel_takes_no_other_task_along() {
    let _local = Local::start(1);
    for round in 0..20 {
        let started = Started::new();
        let victim = asleep::remote(started.path());
        started.wait();
        let later: Vec<_> = (0..50).map(|x| next_one::options().max_retries(0).remote(x)).collect();
        victim.cancel_force();
        assert!(is_cancelled(victim.get_timeout_blocking(LIMIT)), "round {round}");
        assert_eq!(wingbeat::get_all_blocking(&later).unwrap(), (1..=50).collect::<Vec<u64>>(), "round {round}");
    }
}

/// Gives something else when its child fails.
#[wingbeat::remote]
async fn makes_do(started: PathBuf) -> u64 {
    asleep::remote(started).get().await.unwrap_or(999)
}

#[wingbeat::remote]
fn makes_do_at_once(started: PathBuf) -> u64 {
    asleep::remote(started).get_blocking().unwrap_or(999)
}

#[test]
fn a_task_that_is_cancelled_by_force_does_not_go_on_without_its_child() {
    let _local = Local::start(2);
    for round in 0..10 {
        let started = Started::new();
        let victim =
            if round % 2 == 0 { makes_do::remote(started.path()) } else { makes_do_at_once::remote(started.path()) };
        started.wait();
        victim.cancel_force();
        assert!(is_cancelled(victim.get_timeout_blocking(LIMIT)), "round {round}");
    }
}

/// Keeps standard error for itself, as a program may that writes its log there.
#[wingbeat::remote]
fn holds_its_errors(started: PathBuf) -> u64 {
    let _held = std::io::stderr().lock();
    std::fs::write(started, "").unwrap();
    loop {
        std::thread::park();
    }
}

#[test]
fn a_task_that_holds_standard_error_is_cancelled_by_force() {
    let _local = Local::start(1);
    let started = Started::new();
    let task = holds_its_errors::remote(started.path());
    started.wait();
    task.cancel_force();
    assert!(is_cancelled(task.get_timeout_blocking(LIMIT)));
    assert_eq!(next_one::remote(1).get_timeout_blocking(LIMIT).unwrap(), 2);
}

#[test]
fn an_asynchronous_task_that_goes_on_after_errors_is_dropped() {
    let _local = Local::start(2);
    let folder = tempfile::tempdir().unwrap();
    let [started, dropped] = ["started", "dropped"].map(|name| folder.path().join(name));
    let task = asks_again_after_each_error::remote(started.clone(), dropped.clone());
    wait_for(&started);
    task.cancel();
    assert!(is_cancelled(task.get_timeout_blocking(LIMIT)));
    wait_for(&dropped);
    std::fs::remove_file(&started).unwrap();
    std::fs::remove_file(&dropped).unwrap();
    let task = maps_again_after_each_error::remote(started.clone(), dropped.clone());
    wait_for(&started);
    task.cancel();
    wait_for(&dropped);
    // So is one whose time is over.
    std::fs::remove_file(&dropped).unwrap();
    let options = asks_again_after_each_error::options().timeout(Duration::from_millis(200));
    let late = options.remote(started, dropped.clone());
    assert!(matches!(late.get_timeout_blocking(LIMIT), Err(Error::TimedOut { .. })));
    wait_for(&dropped);
}

#[test]
fn a_task_that_only_looks_hears_that_it_is_cancelled() {
    let _local = Local::start(2);
    let folder = tempfile::tempdir().unwrap();
    let started = folder.path().join("started");
    let task = looks_now_and_then::remote(started.clone());
    wait_for(&started);
    task.cancel();
    assert!(task.get_timeout_blocking(LIMIT).unwrap());
}

#[test]
fn what_a_task_submits_when_it_hears_that_it_is_cancelled_is_carried_out() {
    let _local = Local::start(2);
    let folder = tempfile::tempdir().unwrap();
    let lock = Lock::remote();
    for number in 1..=20 {
        let started = folder.path().join(number.to_string());
        let holder = match number % 2 {
            0 => holds::remote(lock.clone(), started.clone()),
            _ => holds_and_releases::remote(lock.clone(), started.clone()),
        };
        wait_for(&started);
        holder.cancel();
        let begun = Instant::now();
        while lock.released().get_blocking().unwrap() < number {
            assert!(begun.elapsed() < LIMIT, "it holds the lock, the {number}th time");
        }
    }
}

#[test]
fn what_a_task_submits_when_it_hears_is_carried_out_however_often_it_is_told() {
    let _local = Local::start(3);
    let folder = tempfile::tempdir().unwrap();
    let [started, heard, there] = ["started", "heard", "there"].map(|name| folder.path().join(name));
    let lock = Lock::remote();
    let busy = lock.is_busy_until(there.clone());
    let holder = releases_and_goes_on::remote(lock.clone(), started.clone(), heard.clone(), there.clone());
    wait_for(&started);
    holder.cancel();
    wait_for(&heard);
    (0..100).for_each(|_| holder.cancel());
    std::fs::write(&there, "").unwrap();
    busy.get_timeout_blocking(LIMIT).unwrap();
    let _ = holder.get_timeout_blocking(LIMIT);
    // Calls of two callers come in any order.
    let begun = Instant::now();
    while lock.released().get_blocking().unwrap() == 0 {
        assert!(begun.elapsed() < LIMIT, "it holds the lock");
    }
}

#[test]
fn an_asynchronous_task_that_waits_for_its_cancellation_ends_by_itself() {
    let _local = Local::start(2);
    let folder = tempfile::tempdir().unwrap();
    for number in 0..20 {
        let started = folder.path().join(number.to_string());
        let task = stops_by_itself::remote(started.clone());
        wait_for(&started);
        task.cancel();
        assert_eq!(task.get_timeout_blocking(LIMIT).unwrap(), 7, "the {number}th time");
    }
}

#[test]
fn what_waits_for_the_cancellation_of_its_task_hears_of_it_beside_others() {
    let _local = Local::start(4);
    let folder = tempfile::tempdir().unwrap();
    let file = |number: u32, name: &str| folder.path().join(format!("{number} {name}"));
    for number in 0..20 {
        let started = ["a", "b", "c"].map(|name| file(number, name)).to_vec();
        let [waits, stopped] = ["waits", "stopped"].map(|name| file(number, name));
        let task = stops_by_itself_among_others::remote(started.clone(), waits.clone(), stopped.clone());
        started.iter().chain([&waits]).for_each(|begun| wait_for(begun));
        task.cancel();
        wait_for(&stopped);
        // It has ended or was dropped.
        let ended = task.get_timeout_blocking(LIMIT);
        assert!(matches!(ended, Ok(()) | Err(Error::Cancelled { .. })), "{ended:?}");
    }
}
