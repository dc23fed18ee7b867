//! Actors: order, concurrency, lifetimes, names, and what happens when they end.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::io::Write;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use common::{Local, Started};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use wingbeat::{ActorPool, Error, ErrorKind, ObjectRef, Queue, QueueError, get_all_blocking};

/// Only something that hangs takes so long.
const LIMIT: Duration = Duration::from_secs(60);

struct Tally {
    n: u64,
}

#[wingbeat::actor(max_restarts = 0)]
impl Tally {
    fn new(start: u64) -> Self {
        Tally { n: start }
    }
    fn add(&mut self, by: u64) -> u64 {
        self.n += by;
        self.n
    }
    async fn add_later(&mut self, by: u64) -> u64 {
        tokio::task::yield_now().await;
        self.n += by;
        self.n
    }
    fn checked(&self, limit: u64) -> Result<u64, String> {
        if self.n <= limit { Ok(self.n) } else { Err(format!("{} is over {limit}", self.n)) }
    }
    fn up_to(&self) -> impl Iterator<Item = u64> {
        0..self.n
    }
    fn pid(&self) -> u32 {
        std::process::id()
    }
    fn exit(&self) {
        std::process::exit(9)
    }
}

struct Picky;

#[wingbeat::actor]
impl Picky {
    fn new(ok: bool) -> Result<Self, String> {
        if ok { Ok(Picky) } else { Err("not today".to_owned()) }
    }
    fn hello(&self) -> String {
        "hello".into()
    }
}

struct Rooms {
    gate: tokio::sync::Notify,
}

#[wingbeat::actor(concurrency_groups(io = 1, compute = 1), max_concurrency = 2)]
impl Rooms {
    fn new() -> Self {
        Rooms { gate: tokio::sync::Notify::new() }
    }
    #[method(group = "io")]
    async fn blocked(&self) -> u64 {
        self.gate.notified().await;
        1
    }
    #[method(group = "compute")]
    fn compute(&self) -> u64 {
        2
    }
    async fn open(&self) {
        self.gate.notify_one();
    }
}

struct Caller;

#[wingbeat::actor]
impl Caller {
    fn new() -> Self {
        Caller
    }
    fn ask(&mut self, other: CallerHandle, me: CallerHandle) -> Result<u64, String> {
        other.answer(me).get_blocking().map_err(|error| error.to_string())
    }
    fn answer(&mut self, back: CallerHandle) -> Result<u64, String> {
        back.simple().get_blocking().map_err(|error| error.to_string())
    }
    fn simple(&self) -> u64 {
        1
    }
    /// Waits for several things at once, of which one is soon there and one closes a circle.
    fn ask_several(&mut self, other: CallerHandle, me: CallerHandle, third: CallerHandle) -> Vec<Result<u64, String>> {
        let waits = futures::future::join3(third.simple().get(), other.answer(me).get(), async {
            let mut sum = 0;
            for _ in 0..100 {
                sum += third.simple().get().await?;
            }
            Ok(sum)
        });
        let (soon, circle, others) = wingbeat::block_on(waits);
        [soon, circle, others].into_iter().map(|result| result.map_err(|error: Error| error.to_string())).collect()
    }
}

#[wingbeat::remote]
fn add_through(tally: TallyHandle, by: u64) -> u64 {
    tally.add(by).get_blocking().unwrap()
}

#[wingbeat::remote]
fn waits_for(file: PathBuf) -> u64 {
    while !file.exists() {
        std::thread::yield_now();
    }
    1
}

#[wingbeat::remote]
fn crash() -> u64 {
    std::process::abort()
}

#[test]
fn calls_of_one_caller_run_in_its_order() {
    let _local = Local::start(1);
    let tally = Tally::remote(0);
    let results: Vec<_> = (1..=1000u64).map(|_| tally.add(1)).collect();
    assert_eq!(get_all_blocking(&results).unwrap(), (1..=1000).collect::<Vec<u64>>());
    assert_eq!(tally.add_later(1).get_blocking().unwrap(), 1001);
}

#[test]
fn a_call_waits_for_its_argument_and_holds_back_the_later_ones() {
    let _local = Local::start(2);
    let started = Started::new();
    let tally = Tally::remote(0);
    let first = tally.add(waits_for::remote(started.path()));
    let second = tally.add(10);
    std::fs::write(started.path(), "").unwrap();
    assert_eq!((first.get_blocking().unwrap(), second.get_blocking().unwrap()), (1, 11));
}

/// Waits until the head says so of its cluster.
fn wait_until(local: &Local, holds: impl Fn(&wingbeat_net::messages::ClusterState) -> bool) {
    let begun = Instant::now();
    loop {
        let state = wingbeat::block_on(local.session.runtime().cluster_state()).unwrap();
        if holds(&state) {
            return;
        }
        assert!(begun.elapsed() < Duration::from_secs(60), "it does not come to that: {state:?}");
        std::thread::yield_now();
    }
}

#[test]
fn a_process_that_dies_before_the_constructor_begins_costs_the_actor_no_life() {
    let local = Local::start(2);
    let started = Started::new();
    // It has a process, in which it waits for its argument.
    let tally = Tally::remote(waits_for::remote(started.path()));
    let pid_of = |state: &wingbeat_net::messages::ClusterState| state.actors.iter().find_map(|actor| actor.pid);
    wait_until(&local, |state| pid_of(state).is_some());
    let pid = pid_of(&wingbeat::block_on(local.session.runtime().cluster_state()).unwrap()).unwrap();
    let process = rustix::process::Pid::from_raw(pid as i32).unwrap();
    rustix::process::kill_process(process, rustix::process::Signal::KILL).unwrap();
    std::fs::write(started.path(), "").unwrap();
    assert_ne!(tally.pid().get_blocking().unwrap(), pid);
    assert_eq!(tally.add(1).get_blocking().unwrap(), 2);
}

#[test]
fn a_failed_argument_fails_the_call_unrun_with_the_same_cause() {
    let _local = Local::start(1);
    let tally = Tally::remote(5);
    let error = tally.add(crash::options().max_retries(0).remote()).get_blocking().unwrap_err();
    assert!(matches!(&error, Error::WorkerCrashed { exit, .. } if exit.signal == Some(6)), "{error}");
    assert_eq!(tally.add(0).get_blocking().unwrap(), 5);
}

#[test]
fn errors_streams_and_shared_methods_work_as_in_functions() {
    let _local = Local::start(1);
    let tally = Tally::remote(3);
    assert_eq!(tally.checked(3).get_blocking().unwrap(), 3);
    let error = tally.checked(2).get_blocking().unwrap_err();
    assert_eq!(error.application::<String>().unwrap(), "3 is over 2");
    let mut items = tally.up_to();
    let mut seen = Vec::new();
    while let Some(item) = items.next_blocking() {
        seen.push(item.unwrap());
    }
    assert_eq!(seen, [0, 1, 2]);
}

#[test]
fn a_constructor_error_surfaces_on_the_first_call() {
    let _local = Local::start(1);
    assert_eq!(Picky::remote(true).hello().get_blocking().unwrap(), "hello");
    let error = Picky::remote(false).hello().get_blocking().unwrap_err();
    assert!(matches!(error, Error::ActorDied { .. }), "{error}");
    assert_eq!(error.application::<String>().unwrap(), "not today");
}

#[test]
fn handles_go_into_tasks() {
    let _local = Local::start(2);
    let tally = Tally::remote(0);
    let sums: Vec<_> = (0..20u64).map(|_| add_through::remote(tally.clone(), 1)).collect();
    get_all_blocking(&sums).unwrap();
    assert_eq!(tally.add(0).get_blocking().unwrap(), 20);
}

#[test]
fn a_temporary_handle_is_enough_for_its_call() {
    let _local = Local::start(1);
    assert_eq!(Tally::remote(41).add(1).get_blocking().unwrap(), 42);
}

#[test]
fn an_actor_ends_with_its_last_handle_after_its_calls() {
    let _local = Local::start(1);
    let tally = Tally::remote(0);
    let pid = tally.pid().get_blocking().unwrap();
    let calls: Vec<_> = (0..100u64).map(|_| tally.add(1)).collect();
    drop(tally);
    assert_eq!(get_all_blocking(&calls).unwrap(), (1..=100).collect::<Vec<u64>>());
    assert!(wingbeat_tests::wait_for_end(pid, std::time::Duration::from_secs(30)));
}

#[test]
fn a_blocked_concurrency_group_blocks_no_other() {
    let _local = Local::start(1);
    let rooms = Rooms::remote();
    let blocked = rooms.blocked();
    assert_eq!(rooms.compute().get_blocking().unwrap(), 2);
    assert!(!blocked.is_ready());
    rooms.open().get_blocking().unwrap();
    assert_eq!(blocked.get_blocking().unwrap(), 1);
}

#[test]
fn named_actors_are_found_and_made_once() {
    let _local = Local::start(2);
    let first = Tally::options().name("tally").remote(1);
    assert_eq!(first.add(1).get_blocking().unwrap(), 2);
    let same = wingbeat::block_on(Tally::named("tally")).unwrap();
    assert_eq!(same.add(1).get_blocking().unwrap(), 3);
    let taken = Tally::options().name("tally").remote(1).add(1).get_blocking().unwrap_err();
    assert!(matches!(taken, Error::ActorNameTaken { .. }), "{taken}");
    let nobody = wingbeat::block_on(Tally::named("nobody")).unwrap_err();
    assert!(matches!(nobody, Error::ActorNotFound { .. }), "{nobody}");
    let others = wingbeat::block_on(futures::future::join_all(
        (0..8u64).map(|_| Tally::options().name("race").get_or_create(100)),
    ));
    let ids: std::collections::BTreeSet<_> = others.iter().map(|tally| tally.as_ref().unwrap().actor().id()).collect();
    assert_eq!(ids.len(), 1);
}

#[test]
fn a_killed_actor_is_dead_with_the_cause() {
    let _local = Local::start(1);
    let tally = Tally::remote(0);
    tally.add(1).get_blocking().unwrap();
    tally.actor().kill();
    let error = tally.add(1).get_blocking().unwrap_err();
    assert!(matches!(&error, Error::ActorDied { cause, .. } if matches!(**cause, Error::ActorEnded { .. })), "{error}");
}

#[test]
fn a_terminated_actor_finishes_what_it_was_sent() {
    let _local = Local::start(1);
    let tally = Tally::remote(0);
    let pid = tally.pid().get_blocking().unwrap();
    let calls: Vec<_> = (0..100u64).map(|_| tally.add(1)).collect();
    get_all_blocking(&calls).unwrap();
    tally.actor().terminate();
    assert!(wingbeat_tests::wait_for_end(pid, std::time::Duration::from_secs(30)));
    assert!(matches!(tally.add(1).get_blocking(), Err(Error::ActorDied { .. })));
}

/// Writes down its constructors, its calls and its `Drop`.
struct Diary {
    path: PathBuf,
}

impl Diary {
    fn write(&self, line: &str) {
        let mut file = std::fs::File::options().append(true).create(true).open(&self.path).unwrap();
        writeln!(file, "{line}").unwrap();
    }
}

impl Drop for Diary {
    fn drop(&mut self) {
        self.write(&format!("dropped in an actor: {}", wingbeat::current_actor().is_some()));
    }
}

#[wingbeat::actor(max_restarts = 5, max_task_retries = 5)]
impl Diary {
    fn new(path: PathBuf, leave: bool) -> wingbeat::Result<Self> {
        let diary = Diary { path };
        diary.write("made");
        if leave {
            wingbeat::exit_actor()?;
        }
        Ok(diary)
    }
    fn note(&self, line: String) {
        self.write(&line);
    }
    /// Asks for the end, and goes on until `go` is there.
    fn leave(&mut self, go: PathBuf) -> wingbeat::Result<u32> {
        wingbeat::exit_actor()?;
        self.write("asked");
        wingbeat_tests::poll(Duration::from_secs(120), || go.exists().then_some(()));
        self.write("done");
        Ok(std::process::id())
    }
    fn pid(&self) -> u32 {
        std::process::id()
    }
}

#[wingbeat::remote]
fn leave_without_an_actor() -> wingbeat::Result<()> {
    wingbeat::exit_actor()
}

/// The lines of a diary, once they are so many.
fn lines(path: &std::path::Path, count: usize) -> Vec<String> {
    let read = || std::fs::read_to_string(path).unwrap_or_default().lines().map(str::to_owned).collect::<Vec<_>>();
    wingbeat_tests::poll(Duration::from_secs(120), || Some(read()).filter(|lines| lines.len() >= count))
        .unwrap_or_else(read)
}

#[test]
fn an_actor_that_exits_ends_its_call_begins_no_other_and_is_dropped() {
    let _local = Local::start(2);
    let dir = tempfile::tempdir().unwrap();
    let (path, go) = (dir.path().join("diary"), dir.path().join("go"));
    let diary = Diary::remote(path.clone(), false);
    diary.note("first").get_blocking().unwrap();
    let last = diary.leave(go.clone());
    let waits = diary.note("waits");
    assert_eq!(lines(&path, 3), ["made", "first", "asked"]);
    let late = diary.note("late");
    std::fs::write(&go, "").unwrap();
    let pid = last.get_blocking().unwrap();
    for call in [waits, late, diary.note("later")] {
        let error = call.get_blocking().unwrap_err();
        assert!(matches!(error, Error::ActorDied { .. }), "{error}");
        assert!(error.to_string().ends_with(" is dead: it was ended by its own call of exit_actor()"), "{error}");
    }
    assert!(wingbeat_tests::wait_for_end(pid, Duration::from_secs(30)));
    assert_eq!(lines(&path, 5), ["made", "first", "asked", "done", "dropped in an actor: true"]);
}

#[test]
fn a_constructor_may_exit_and_what_is_no_actor_may_not() {
    let _local = Local::start(2);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("diary");
    let diary = Diary::remote(path.clone(), true);
    let error = diary.note("never").get_blocking().unwrap_err();
    assert!(error.to_string().contains("its own call of exit_actor()"), "{error}");
    assert_eq!(lines(&path, 2), ["made", "dropped in an actor: true"]);
    for error in [wingbeat::exit_actor().unwrap_err(), leave_without_an_actor::remote().get_blocking().unwrap_err()] {
        assert!(error.to_string().contains("outside of an actor"), "{error}");
    }
}

#[test]
fn a_terminated_actor_and_one_without_handles_are_dropped_after_their_last_call() {
    let _local = Local::start(2);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("diary");
    let diary = Diary::remote(path.clone(), false);
    drop(diary.note("last"));
    diary.actor().terminate();
    assert_eq!(lines(&path, 3), ["made", "last", "dropped in an actor: true"]);
    let other = dir.path().join("other");
    let diary = Diary::remote(other.clone(), false);
    diary.pid().get_blocking().unwrap();
    drop(diary);
    assert_eq!(lines(&other, 2), ["made", "dropped in an actor: true"]);
}

#[test]
fn a_terminated_actor_that_is_not_there_yet_does_what_it_was_asked_before() {
    let _local = Local::start(1);
    let first = Tally::options().num_cpus(1.0).remote(0);
    first.pid().get_blocking().unwrap();
    // It waits for the CPU that the first one has.
    let tally = Tally::options().num_cpus(1.0).remote(5);
    let calls: Vec<_> = (0..3u64).map(|_| tally.add(1)).collect();
    tally.actor().terminate();
    let late = tally.add(1);
    first.actor().terminate();
    assert_eq!(get_all_blocking(&calls).unwrap(), [6, 7, 8]);
    assert!(matches!(late.get_blocking(), Err(Error::ActorDied { .. })));
}

#[test]
fn a_crashed_actor_is_unavailable_then_back_then_dead() {
    let _local = Local::start(1);
    let tally = Tally::options().max_restarts(1).remote(7);
    let first = tally.pid().get_blocking().unwrap();
    let error = tally.exit().get_blocking().unwrap_err();
    match &error {
        Error::ActorUnavailable { cause, .. } => {
            assert!(matches!(&**cause, Error::WorkerCrashed { exit, .. } if exit.code == Some(9)), "{cause}");
        }
        other => panic!("{other}"),
    }
    // Its state is new, and so is its process.
    assert_eq!(tally.add(1).get_blocking().unwrap(), 8);
    assert_ne!(tally.pid().get_blocking().unwrap(), first);
    assert!(tally.exit().get_blocking().is_err());
    let error = tally.add(1).get_blocking().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Actor, "{error}");
    assert!(matches!(error.cause(), Some(Error::WorkerCrashed { .. })), "{error}");
}

#[test]
fn a_call_after_a_kill_reaches_the_next_life() {
    // Few: an actor that dies soon after its start rests before the next.
    const LIVES: u32 = 3;
    let _local = Local::start(1);
    let tally = Tally::options().max_restarts(LIVES).remote(7);
    let mut pid = tally.pid().get_blocking().unwrap();
    for _ in 0..LIVES {
        tally.actor().kill_may_restart();
        let next = tally.pid().get_blocking().unwrap();
        assert_ne!(next, pid);
        pid = next;
    }
}

#[test]
fn actors_that_wait_for_each_other_in_a_circle_are_told() {
    let _local = Local::start(2);
    let (a, b) = (Caller::remote(), Caller::remote());
    let error = a.ask(b.clone(), a.clone()).get_blocking().unwrap_err();
    assert!(error.to_string().contains("deadlock"), "{error}");
    // Nothing else is lost.
    assert_eq!(a.simple().get_blocking().unwrap() + b.simple().get_blocking().unwrap(), 2);
}

#[test]
fn of_several_waits_the_one_in_the_circle_is_told() {
    let _local = Local::start(3);
    let (a, b, third) = (Caller::remote(), Caller::remote(), Caller::remote());
    third.simple().get_blocking().unwrap();
    let results = a.ask_several(b.clone(), a.clone(), third).get_blocking().unwrap();
    assert_eq!((&results[0], &results[2]), (&Ok(1), &Ok(100)));
    assert!(results[1].as_ref().is_err_and(|error| error.contains("deadlock")), "{results:?}");
    assert_eq!(a.simple().get_blocking().unwrap() + b.simple().get_blocking().unwrap(), 2);
}

#[test]
fn a_member_that_is_about_to_get_a_call_is_one_of_its_pool() {
    let _local = Local::start(2);
    let pool = ActorPool::new([Tally::remote(0)]);
    std::thread::scope(|threads| {
        let session = wingbeat::Session::current().unwrap();
        let pool = &pool;
        let (held, holds) = std::sync::mpsc::channel();
        // Dropped first when this fails, so that the thread ends.
        let (goes_on, waits) = std::sync::mpsc::channel::<()>();
        threads.spawn(move || {
            let _entered = session.enter();
            let mut work = pool.work::<u64>();
            let submits = work.submit(|tally| {
                held.send(()).unwrap();
                waits.recv().unwrap();
                tally.add(1)
            });
            wingbeat::block_on(submits).unwrap();
            wingbeat::block_on(work.next()).unwrap().unwrap();
        });
        holds.recv().unwrap();
        assert_eq!((pool.len(), pool.pop_idle().is_some()), (1, false));
        let mut work = pool.work::<u64>();
        // The first poll looks for a member.
        let mut submits = Box::pin(work.submit(|tally| tally.add(1)));
        let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
        assert!(submits.as_mut().poll(&mut cx).is_pending(), "it waits for the only one");
        goes_on.send(()).unwrap();
        wingbeat::block_on(submits).unwrap();
        wingbeat::block_on(work.next()).unwrap().unwrap();
    });
    let panics = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        wingbeat::block_on(pool.work::<u64>().submit(|_| panic!("before there is a call"))).unwrap();
    }));
    assert!(panics.is_err());
    assert_eq!(wingbeat::block_on(pool.map(0..3u64, |tally, _| tally.add(1))).unwrap().len(), 3);
}

#[test]
fn a_pool_spreads_work_in_order_and_out_of_it() {
    let _local = Local::start(2);
    let pool = ActorPool::new([Tally::remote(0), Tally::remote(0)]);
    let results = wingbeat::block_on(pool.map(0..50u64, |tally, _| tally.checked(u64::MAX))).unwrap();
    assert_eq!(results.len(), 50);
    let mut unordered = wingbeat::block_on(pool.map_unordered(0..50u64, |tally, x| {
        let _: &TallyHandle = tally;
        let object: ObjectRef<u64> = tally.with(wingbeat::CallOptions::new().name("x")).checked(u64::MAX);
        let _ = x;
        object
    }))
    .unwrap();
    unordered.sort_unstable();
    assert_eq!(unordered, vec![0; 50]);
}

#[test]
fn a_queue_is_first_in_first_out_and_bounded() {
    let _local = Local::start(1);
    wingbeat::block_on(async {
        let queue = Queue::<String>::bounded(2);
        queue.put(&"a".to_owned()).await.unwrap();
        queue.put(&"b".to_owned()).await.unwrap();
        let full = queue.put_timeout(&"c".to_owned(), std::time::Duration::from_millis(10)).await.unwrap_err();
        assert_eq!(full.application::<QueueError>(), Some(QueueError::Full));
        assert_eq!(queue.size().await.unwrap(), 2);
        assert_eq!(queue.get().await.unwrap(), "a");
        assert_eq!(queue.get().await.unwrap(), "b");
        let empty = queue.get_timeout(std::time::Duration::from_millis(10)).await.unwrap_err();
        assert_eq!(empty.application::<QueueError>(), Some(QueueError::Empty));
    });
}

struct Background;

#[wingbeat::actor]
impl Background {
    fn new() -> Self {
        Background
    }
    async fn begin(&self, done: PathBuf) {
        goes_on(done);
    }
    fn begin_at_once(&self, done: PathBuf) {
        goes_on(done);
    }
    fn is_there(&self, path: PathBuf) -> bool {
        path.exists()
    }
    fn wait_for(&self, path: PathBuf) {
        while !path.exists() {
            std::thread::yield_now();
        }
    }
}

/// Something that needs many turns of the runtime, and says when it is done.
fn goes_on(done: PathBuf) {
    tokio::spawn(async move {
        for _ in 0..1_000 {
            tokio::task::yield_now().await;
        }
        std::fs::write(done, "").unwrap();
    });
}

#[wingbeat::remote(max_retries = 0)]
async fn leaves_something(done: PathBuf) {
    goes_on(done);
}

#[test]
fn what_was_spawned_goes_on_between_calls() {
    let _local = Local::start(1);
    let dir = tempfile::tempdir().unwrap();
    let [first, second, third] = ["first", "second", "third"].map(|name| dir.path().join(name));
    let actor = Background::remote();
    actor.begin(first.clone()).get_blocking().unwrap();
    actor.begin_at_once(second.clone()).get_blocking().unwrap();
    drop(leaves_something::remote(third.clone()).get_blocking());
    let begun = Instant::now();
    for done in [&first, &second, &third] {
        while !done.exists() {
            assert!(begun.elapsed() < LIMIT, "{} stands still", done.display());
            std::thread::yield_now();
        }
    }
}

#[test]
fn what_was_spawned_has_its_turn_between_calls_that_are_queued() {
    let _local = Local::start(1);
    let dir = tempfile::tempdir().unwrap();
    let (done, all_are_queued) = (dir.path().join("done"), dir.path().join("queued"));
    let actor = Background::remote();
    drop(actor.begin_at_once(done.clone()));
    drop(actor.wait_for(all_are_queued.clone()));
    let looks: Vec<_> = (0..5_000).map(|_| actor.is_there(done.clone())).collect();
    std::fs::write(all_are_queued, "").unwrap();
    assert_eq!(wingbeat::get_all_blocking(&looks).unwrap().pop(), Some(true), "it stands still");
}

/// Has connections to something that sends back what it gets.
struct Connections(tokio::sync::Mutex<Vec<tokio::net::UnixStream>>);

#[wingbeat::actor(max_concurrency = 8)]
impl Connections {
    async fn new(count: usize) -> anyhow::Result<Self> {
        let connection = || {
            let (mine, theirs) = tokio::net::UnixStream::pair()?;
            let theirs = theirs.into_std()?;
            theirs.set_nonblocking(false)?;
            std::thread::spawn(move || std::io::copy(&mut &theirs, &mut &theirs));
            std::io::Result::Ok(mine)
        };
        Ok(Connections((0..count).map(|_| connection()).collect::<std::io::Result<Vec<_>>>()?.into()))
    }

    async fn ask(&self, text: String) -> anyhow::Result<String> {
        let mut connection = loop {
            match self.0.lock().await.pop() {
                Some(connection) => break connection,
                None => tokio::task::yield_now().await,
            }
        };
        connection.write_all(text.as_bytes()).await?;
        let mut answer = vec![0; text.len()];
        connection.read_exact(&mut answer).await?;
        self.0.lock().await.push(connection);
        Ok(String::from_utf8_lossy(&answer).into_owned())
    }
}

#[test]
fn what_a_constructor_has_opened_serves_calls_on_every_thread() {
    let _local = Local::start(1);
    let connections = Connections::remote(4);
    let answers: Vec<_> = (0..200).map(|n| connections.ask(n.to_string())).collect();
    for (n, answer) in answers.iter().enumerate() {
        assert_eq!(answer.get_timeout_blocking(LIMIT).unwrap(), n.to_string());
    }
}
