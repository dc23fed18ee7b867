//! Refs and actor handles on long ways: counted across processes so that nothing is freed early and nothing is kept.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::time::Duration;

use common::Local;
use serde::{Deserialize, Serialize};
use wingbeat::{ObjectRef, Session, put};

type Refs = Vec<ObjectRef<u64>>;

/// Long enough for any machine; a hang fails the test.
const LIMIT: Duration = Duration::from_secs(120);

#[wingbeat::remote]
fn seven() -> u64 {
    7
}

/// Goes down so many levels with some refs, and comes up with a new one.
#[wingbeat::remote]
fn fetched_below(levels: u32, refs: Refs) -> Refs {
    if levels == 1 {
        drop(refs);
        return vec![seven::remote()];
    }
    fetched_below::remote(levels - 1, refs).get_blocking().unwrap()
}

#[wingbeat::remote]
async fn fetched_below_later(levels: u32, refs: Refs) -> Refs {
    if levels == 1 {
        return vec![seven::remote()];
    }
    fetched_below_later::remote(levels - 1, refs).get().await.unwrap()
}

/// The same with the refs that were passed.
#[wingbeat::remote]
fn passed_below(levels: u32, refs: Refs) -> Refs {
    if levels == 1 { refs } else { passed_below::remote(levels - 1, refs).get_blocking().unwrap() }
}

struct Cell {
    value: u64,
    kept: Refs,
}

#[wingbeat::actor(num_cpus = 0.0, max_restarts = 0, max_concurrency = 2)]
impl Cell {
    fn new(value: u64) -> Self {
        Cell { value, kept: Vec::new() }
    }
    fn value(&self) -> u64 {
        self.value
    }
    fn pid(&self) -> u32 {
        std::process::id()
    }
    fn same(&self, refs: Refs) -> Refs {
        refs
    }
    fn both(&self, one: u64, other: u64) -> u64 {
        one + other
    }
    fn same_without(&self, refs: Refs, others: Refs) -> Refs {
        drop(others);
        refs
    }
    fn make(&self, count: u64) -> Refs {
        (0..count).map(|n| put(&n).unwrap()).collect()
    }
    fn keep(&mut self, refs: Refs) {
        self.kept = refs;
    }
    fn give(&self) -> Refs {
        self.kept.clone()
    }
    fn forget(&mut self) {
        self.kept.clear();
    }
    fn without_end(&self) -> impl Iterator<Item = ObjectRef<u64>> {
        (0..).map(|n: u64| put(&n).unwrap())
    }
    /// Objects that its process owns or has borrowed.
    fn live(&self) -> usize {
        Session::current().unwrap().runtime().process().live_objects()
    }
}

#[wingbeat::remote]
fn actor_from_below(levels: u32, refs: Refs) -> Vec<CellHandle> {
    if levels == 1 {
        drop(refs);
        return vec![Cell::remote(7)];
    }
    actor_from_below::remote(levels - 1, refs).get_blocking().unwrap()
}

#[wingbeat::remote]
fn value_through(levels: u32, cells: Vec<CellHandle>) -> u64 {
    if levels == 1 {
        return cells.iter().map(|cell| cell.value().get_blocking().unwrap()).sum();
    }
    value_through::remote(levels - 1, cells).get_blocking().unwrap()
}

fn read(mut refs: Refs) -> u64 {
    let one = refs.pop().unwrap();
    drop(refs);
    one.get_timeout_blocking(LIMIT).unwrap()
}

/// Every way at once, down and up through so many levels.
fn go_all_ways(levels: u32, round: u32) {
    let argument = put(&1u64).unwrap();
    let sync = fetched_below::remote(levels, vec![argument.clone()]);
    let later = fetched_below_later::remote(levels, vec![argument.clone(), argument.clone()]);
    let passed = passed_below::remote(levels, vec![argument]);
    let actor = actor_from_below::remote(levels, vec![put(&1u64).unwrap()]);
    let about = |what: &str| format!("{what}, {levels} levels, round {round}");
    assert_eq!(read(sync.get_timeout_blocking(LIMIT).unwrap()), 7, "{}", about("sync"));
    assert_eq!(read(later.get_timeout_blocking(LIMIT).unwrap()), 7, "{}", about("async"));
    assert_eq!(read(passed.get_timeout_blocking(LIMIT).unwrap()), 1, "{}", about("passed"));
    let cells = actor.get_timeout_blocking(LIMIT).unwrap();
    drop(actor);
    assert_eq!(cells[0].value().get_timeout_blocking(LIMIT).unwrap(), 7, "{}", about("actor"));
    let through = value_through::remote(levels, cells);
    assert_eq!(through.get_timeout_blocking(LIMIT).unwrap(), 7, "{}", about("an actor's handle, down again"));
}

fn wait_until_nothing_lives(local: &Local) {
    while local.session.runtime().process().live_objects() > 0 {
        std::thread::yield_now();
    }
}

#[wingbeat::remote]
fn never() -> u64 {
    loop {
        std::thread::park();
    }
}

#[test]
fn calls_that_failed_before_their_arguments_were_there_keep_nothing() {
    let local = Local::start(2);
    let never = never::remote();
    let value = put(&7u64).unwrap();
    let before = local.session.runtime().process().live_objects();
    for round in 0..100 {
        let cell = Cell::remote(7);
        let call = cell.both(never.clone(), value.clone());
        match round % 2 {
            0 => cell.actor().kill(),
            _ => call.cancel(),
        }
        assert!(call.get_timeout_blocking(LIMIT).is_err());
    }
    while local.session.runtime().process().live_objects() > before {
        std::thread::yield_now();
    }
    // What waited for it is gone with the calls.
    drop(value);
    while local.session.runtime().process().live_objects() >= before {
        std::thread::yield_now();
    }
    never.cancel_force();
}

#[test]
fn a_hundred_thousand_tasks_are_cancelled_the_newest_first() {
    let _local = Local::start(1);
    let gate = never::remote();
    let tasks: Vec<_> = (0..100_000u64).map(read_number::remote).collect();
    tasks.iter().rev().for_each(ObjectRef::cancel);
    let failed = tasks.iter().filter(|task| task.get_timeout_blocking(LIMIT).is_err()).count();
    assert!(failed > 99_000, "{failed}");
    gate.cancel_force();
}

#[wingbeat::remote]
fn read_number(number: u64) -> u64 {
    number
}

#[test]
fn refs_and_handles_go_down_and_up_through_processes_that_have_just_started() {
    for round in 0..20 {
        let local = Local::start(2);
        go_all_ways(1 + round % 4, round);
        wait_until_nothing_lives(&local);
    }
}

#[test]
fn refs_and_handles_go_down_and_up_through_processes_that_know_each_other() {
    let local = Local::start(4);
    for round in 0..20 {
        for levels in 1..=4 {
            go_all_ways(levels, round);
        }
    }
    wait_until_nothing_lives(&local);
}

#[test]
fn an_actor_keeps_refs_of_others_and_gives_them_to_others() {
    let local = Local::start(2);
    for _ in 0..20 {
        let (owner, keeper) = (Cell::remote(0), Cell::remote(0));
        let made = owner.make(3).get_blocking().unwrap();
        keeper.keep(made.clone()).get_blocking().unwrap();
        drop(made);
        let given = passed_below::remote(2, keeper.give().get_blocking().unwrap());
        keeper.forget().get_blocking().unwrap();
        let came_back = given.get_blocking().unwrap();
        drop(given);
        for (n, one) in (0..).zip(&came_back) {
            assert_eq!(one.get_timeout_blocking(LIMIT).unwrap(), n);
        }
        drop(came_back);
        while owner.live().get_blocking().unwrap() > 0 {
            std::thread::yield_now();
        }
    }
    wait_until_nothing_lives(&local);
}

#[test]
fn the_same_ref_passed_to_an_actor_thousands_of_times_is_still_there() {
    let local = Local::start(2);
    // With more than one call at a time, they would not run in order.
    let keeper = Cell::options().max_concurrency(1).remote(0);
    let mine = put(&5u64).unwrap();
    for _ in 0..3_000 {
        drop(keeper.keep(vec![mine.clone()]));
        drop(keeper.forget());
    }
    keeper.keep(vec![mine]).get_blocking().unwrap();
    assert_eq!(read(keeper.give().get_blocking().unwrap()), 5);
    drop(keeper);
    wait_until_nothing_lives(&local);
}

#[test]
fn refs_in_a_stream_live_as_long_as_somebody_holds_them_and_no_longer() {
    let local = Local::start(2);
    let cell = Cell::remote(0);
    let mut stream = cell.without_end();
    let first = stream.next_blocking().unwrap().unwrap();
    for n in 1..200 {
        assert_eq!(stream.next_blocking().unwrap().unwrap().get_timeout_blocking(LIMIT).unwrap(), n);
    }
    // What the stream is ahead by, and the first; not the two hundred that were taken.
    while cell.live().get_blocking().unwrap() > 60 {
        std::thread::yield_now();
    }
    drop(stream);
    while cell.live().get_blocking().unwrap() > 1 {
        std::thread::yield_now();
    }
    assert_eq!(first.get_timeout_blocking(LIMIT).unwrap(), 0);
    drop(first);
    drop(cell);
    wait_until_nothing_lives(&local);
}

fn all_threads_stand_still(pid: i32) -> bool {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    // One that has ended meanwhile does nothing, either.
    let mut stats = threads.filter_map(|thread| std::fs::read_to_string(thread.ok()?.path().join("stat")).ok());
    stats.all(|stat| {
        // Behind the name, which is in brackets.
        stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('T'))
    })
}

#[test]
fn an_owner_that_stands_still_holds_up_nobody_elses_results_and_releases() {
    let local = Local::start(1);
    let (still, lively, middle) = (Cell::remote(0), Cell::remote(0), Cell::remote(0));
    let pid = still.pid().get_blocking().unwrap();
    // Everybody has a connection to everybody.
    middle.same(still.make(1).get_blocking().unwrap()).get_blocking().unwrap();
    middle.same(lively.make(1).get_blocking().unwrap()).get_blocking().unwrap();
    let of_still = still.make(1).get_blocking().unwrap();
    let of_lively = lively.make(2).get_blocking().unwrap();
    let pid = rustix::process::Pid::from_raw(pid as i32).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::STOP).unwrap();
    // One thread takes the signal; until it runs, the others go on.
    let told = std::time::Instant::now();
    while !all_threads_stand_still(pid.as_raw_nonzero().get()) {
        assert!(told.elapsed() < LIMIT, "process {} does not stand still", pid.as_raw_nonzero());
        std::thread::yield_now();
    }
    let stopped = std::time::Instant::now();
    // Its result waits for the owner that stands still.
    let held_up = middle.same_without(of_still, lively.make(1).get_blocking().unwrap());
    // In the same process, after it.
    let others = middle.same(of_lively).get_timeout_blocking(LIMIT);
    let plain = middle.value().get_timeout_blocking(LIMIT);
    // It may have failed, which is another defect.
    let early = held_up.is_ready().then(|| (stopped.elapsed(), held_up.get_timeout_blocking(LIMIT)));
    let others = others.map(|refs| refs.into_iter().map(|one| one.get_timeout_blocking(LIMIT).unwrap()).sum::<u64>());
    let mut released = false;
    let begun = std::time::Instant::now();
    while !released && begun.elapsed() < LIMIT {
        // One is held as an argument until the result arrives.
        released = lively.live().get_blocking().unwrap() <= 1;
    }
    rustix::process::kill_process(pid, rustix::process::Signal::CONT).unwrap();
    assert_eq!((others.unwrap(), plain.unwrap()), (1, 0));
    assert!(released, "releases to the other owner were not sent");
    assert!(early.is_none(), "a result was sent before its refs were registered: {early:?}");
    assert_eq!(read(held_up.get_timeout_blocking(LIMIT).unwrap()), 0);
    drop((still, lively, middle, held_up));
    wait_until_nothing_lives(&local);
}

/// A value that refers to one of its kind.
#[derive(Serialize, Deserialize)]
struct Link(Option<ObjectRef<Link>>);

fn chain(length: u32) -> ObjectRef<Link> {
    let mut last = put(&Link(None)).unwrap();
    for _ in 1..length {
        last = put(&Link(Some(last))).unwrap();
    }
    last
}

#[wingbeat::remote]
fn chain_made_elsewhere(length: u32) -> Vec<ObjectRef<Link>> {
    vec![chain(length)]
}

#[wingbeat::remote]
fn drops_a_chain(length: u32) -> u64 {
    drop(chain(length));
    7
}

#[test]
fn a_chain_of_a_million_nested_refs_is_dropped_on_any_thread() {
    let local = Local::start(2);
    let last = chain(1_000_000);
    let small = std::thread::Builder::new().stack_size(64 << 10);
    small.spawn(move || drop(last)).unwrap().join().unwrap();
    wait_until_nothing_lives(&local);
    // In a task, and on the IO thread of the process that owns it.
    assert_eq!(drops_a_chain::remote(100_000).get_timeout_blocking(LIMIT).unwrap(), 7);
    let elsewhere = chain_made_elsewhere::remote(100_000).get_timeout_blocking(LIMIT).unwrap();
    assert!(elsewhere[0].get_timeout_blocking(LIMIT).unwrap().0.is_some());
    drop(elsewhere);
    assert_eq!(seven::remote().get_timeout_blocking(LIMIT).unwrap(), 7);
    wait_until_nothing_lives(&local);
}

#[wingbeat::remote]
fn refuses(go: u64) -> Result<u64, String> {
    Err(format!("refused {go}"))
}

#[wingbeat::remote]
fn next(n: u64) -> u64 {
    n + 1
}

#[wingbeat::remote]
fn waits_for(path: std::path::PathBuf) -> u64 {
    while !path.exists() {
        std::thread::yield_now();
    }
    0
}

#[test]
fn the_failure_of_the_first_of_many_chained_tasks_reaches_the_last() {
    let local = Local::start(1);
    let gate = common::Started::new();
    let first = waits_for::remote(gate.path());
    let mut last = next::remote(refuses::remote(&first));
    for _ in 0..100_000 {
        last = next::remote(last);
    }
    std::fs::write(gate.path(), "").unwrap();
    let error = last.get_timeout_blocking(LIMIT).unwrap_err();
    assert!(error.to_string().contains("refused 0"), "{error}");
    drop((first, last));
    wait_until_nothing_lives(&local);
}

#[derive(Serialize, Deserialize)]
struct Many {
    refs: Refs,
}

#[wingbeat::remote]
fn many(count: u64) -> Many {
    Many { refs: (0..count).map(|n| put(&n).unwrap()).collect() }
}

#[wingbeat::remote]
fn same(many: Many) -> Many {
    many
}

#[test]
fn a_struct_with_a_hundred_thousand_refs_goes_to_others_and_back() {
    const COUNT: u64 = 100_000;
    let local = Local::start(2);
    // Of this process, and of another one.
    let mine = Many { refs: (0..COUNT).map(|n| put(&n).unwrap()).collect() };
    let theirs = many::remote(COUNT).get_timeout_blocking(LIMIT).unwrap();
    for there in [mine, theirs] {
        let back = same::remote(there).get_timeout_blocking(LIMIT).unwrap();
        assert_eq!(back.refs.len() as u64, COUNT);
        for n in [0, 1, COUNT / 2, COUNT - 1] {
            assert_eq!(back.refs[n as usize].get_timeout_blocking(LIMIT).unwrap(), n);
        }
    }
    wait_until_nothing_lives(&local);
}

#[test]
fn thousands_of_actor_handles_are_counted_to_the_last_one() {
    // Each actor is a process: few by default.
    let actors: usize = std::env::var("WINGBEAT_TEST_ACTORS").map_or(8, |text| text.parse().unwrap());
    let local = Local::start(2);
    let cells: Vec<CellHandle> = (0..actors).map(|_| Cell::remote(1)).collect();
    let pids: Vec<u32> = cells.iter().map(|cell| cell.pid().get_blocking().unwrap()).collect();
    let handles: Vec<CellHandle> = cells.iter().cycle().take(5_000.max(actors)).cloned().collect();
    drop(cells);
    let sum = value_through::remote(2, handles.clone()).get_timeout_blocking(LIMIT).unwrap();
    assert_eq!(sum as usize, handles.len());
    let mut handles = handles;
    handles.truncate(actors);
    assert_eq!(value_through::remote(1, handles).get_timeout_blocking(LIMIT).unwrap() as usize, actors);
    wait_until_nothing_lives(&local);
    for pid in pids {
        assert!(wingbeat_tests::wait_for_end(pid, LIMIT), "the actor's process {pid} is still there");
    }
}

/// For a look at what the tests do not assert: `cargo test -p wingbeat-tests --release --test refs -- --ignored --nocapture`.
#[test]
#[ignore = "prints rates for a look, and asserts no more than the tests above"]
fn what_refs_in_arguments_cost() {
    let _local = Local::start(2);
    let cell = Cell::remote(1);
    let mine = put(&1u64).unwrap();
    for round in 0..3 {
        let begun = std::time::Instant::now();
        for _ in 0..2_000 {
            cell.value().get_blocking().unwrap();
        }
        let plain = begun.elapsed() / 2_000;
        let begun = std::time::Instant::now();
        for _ in 0..2_000 {
            cell.keep(vec![mine.clone()]).get_blocking().unwrap();
        }
        println!("round {round}: a call {plain:?}, with a ref {:?}", begun.elapsed() / 2_000);
    }
}
