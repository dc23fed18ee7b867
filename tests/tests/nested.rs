//! Tasks that submit tasks and wait for them: the process of the one that waits runs the others.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::time::Duration;

use common::{Local, wait_for};
use wingbeat::{Error, ObjectRef, get_all, get_all_blocking, put};

/// Only what hangs takes so long.
const LIMIT: Duration = Duration::from_secs(60);

#[wingbeat::remote]
fn pid() -> u32 {
    std::process::id()
}

#[wingbeat::remote(isolated)]
fn pid_alone() -> u32 {
    std::process::id()
}

#[wingbeat::remote]
async fn fib(n: u64, pids: bool) -> (u64, Vec<u32>) {
    let mut all = if pids { vec![std::process::id()] } else { Vec::new() };
    if n < 2 {
        return (n, all);
    }
    let (a, b) = (fib::remote(n - 1, pids), fib::remote(n - 2, pids));
    let mut sum = 0;
    for part in [a, b] {
        let (value, there) = part.get().await.unwrap();
        sum += value;
        all.extend(there);
    }
    (sum, all.into_iter().collect::<BTreeSet<u32>>().into_iter().collect())
}

/// Blocks its thread while it waits for the second: what is under way there does not go on.
#[wingbeat::remote]
async fn fib_that_blocks(n: u64) -> wingbeat::Result<u64> {
    if n < 2 {
        tokio::time::sleep(Duration::from_millis(1)).await;
        return Ok(n);
    }
    let (a, b) = (fib_that_blocks::remote(n - 1), fib_that_blocks::remote(n - 2));
    Ok(a.await? + b.get_blocking()?)
}

#[wingbeat::remote]
fn fib_blocking(n: u64) -> u64 {
    if n < 2 {
        return n;
    }
    let both = [fib_blocking::remote(n - 1), fib_blocking::remote(n - 2)];
    get_all_blocking(&both).unwrap().iter().sum()
}

#[test]
fn a_recursion_needs_few_processes() {
    let _local = Local::start(2);
    let (value, pids) = fib::remote(14, true).get_blocking().unwrap();
    assert_eq!(value, 377);
    assert!(pids.len() <= 64, "1,219 tasks ran in {} processes", pids.len());
    assert_eq!(fib_blocking::remote(11).get_blocking().unwrap(), 89);
}

#[test]
fn asynchronous_tasks_that_block_threads_on_which_others_are_that_they_wait_for_are_told_so() {
    let _local = Local::start(2);
    for _ in 0..4 {
        match fib_that_blocks::remote(6).get_timeout_blocking(LIMIT) {
            Ok(sum) => assert_eq!(sum, 8),
            Err(error) => assert!(error.to_string().contains("(whose thread is blocked)"), "{error}"),
        }
    }
}

#[wingbeat::remote]
fn wide(count: u64) -> u64 {
    let all: Vec<_> = (0..count).map(|_| fib_blocking::remote(3)).collect();
    get_all_blocking(&all).unwrap().iter().sum()
}

#[test]
fn thousands_wait_at_once() {
    let _local = Local::start(2);
    let both = [wide::remote(2_000), wide::remote(2_000)];
    assert_eq!(get_all_blocking(&both).unwrap(), [4_000, 4_000]);
}

#[wingbeat::remote]
async fn pids_below() -> (u32, u32, u32) {
    (std::process::id(), pid::remote().get().await.unwrap(), pid_alone::remote().get().await.unwrap())
}

#[wingbeat::remote(isolated)]
fn pids_below_one_alone() -> (u32, u32) {
    (std::process::id(), pid::remote().get_blocking().unwrap())
}

#[test]
fn what_is_isolated_has_a_process_of_its_own() {
    let _local = Local::start(1);
    let (own, below, alone) = pids_below::remote().get_blocking().unwrap();
    assert_eq!(below, own, "it runs where the task waits that has submitted it");
    assert_ne!(alone, own);
    let (own, below) = pids_below_one_alone::remote().get_blocking().unwrap();
    assert_ne!(below, own);
    let (own, below, _) = pids_below::options().isolated(true).remote().get_blocking().unwrap();
    assert_ne!(below, own);
}

#[wingbeat::remote(max_retries = 1)]
fn ends_its_process(runs: PathBuf) -> u64 {
    let run = std::fs::read_dir(&runs).unwrap().count();
    std::fs::write(runs.join(run.to_string()), "").unwrap();
    std::process::abort()
}

#[wingbeat::remote]
fn above_one_that_ends_its_process(runs: PathBuf) -> String {
    format!("{:?}", ends_its_process::remote(runs).get_blocking().unwrap_err().kind())
}

#[test]
fn who_has_ended_a_process_is_told_from_who_waited_in_it() {
    let _local = Local::start(1);
    let runs = tempfile::tempdir().unwrap();
    let kind = above_one_that_ends_its_process::remote(runs.path().to_owned()).get_blocking().unwrap();
    assert_eq!(kind, "Lost");
    // Once beside the one that waited, which is then tried again with what it submits in processes of their own: there it has its two
    // attempts.
    assert_eq!(std::fs::read_dir(runs.path()).unwrap().count(), 3);
}

#[wingbeat::remote]
fn fails(how: u32) -> Result<u64, String> {
    match how {
        0 => Err("as asked".into()),
        1 => panic!("as asked"),
        how => Ok(u64::from(how)),
    }
}

#[wingbeat::remote]
async fn above_failures() -> Vec<String> {
    let all = [fails::remote(0), fails::remote(1), fails::options().max_retries(2).retry_errors(true).remote(0)];
    let mut said = Vec::new();
    for one in all {
        said.push(one.get().await.unwrap_err().to_string());
    }
    assert_eq!(fails::remote(7).get().await.unwrap(), 7);
    said
}

#[test]
fn errors_and_panics_are_errors_for_who_waits() {
    let _local = Local::start(1);
    let said = above_failures::remote().get_blocking().unwrap();
    assert!(said.iter().all(|text| text.contains("as asked")), "{said:?}");
}

#[wingbeat::remote]
fn holds_on(begun: PathBuf, release: PathBuf) -> u64 {
    std::fs::write(begun, "").unwrap();
    wait_for(&release);
    5
}

/// Goes on while what it has submitted computes.
#[wingbeat::remote]
async fn looks_after(begun: PathBuf, release: PathBuf) -> u64 {
    let slow = holds_on::remote(begun.clone(), release.clone());
    loop {
        match slow.get_timeout(Duration::from_millis(20)).await {
            Err(Error::TimedOut { .. }) if begun.exists() => std::fs::write(&release, "").unwrap(),
            Err(Error::TimedOut { .. }) => {}
            done => return done.unwrap(),
        }
    }
}

#[test]
fn who_waits_goes_on_while_others_compute_in_its_process() {
    let _local = Local::start(1);
    let dir = tempfile::tempdir().unwrap();
    let done = looks_after::remote(dir.path().join("begun"), dir.path().join("release"));
    assert_eq!(done.get_timeout_blocking(LIMIT).unwrap(), 5);
}

#[wingbeat::remote]
async fn above_one_that_looks_after(begun: PathBuf, release: PathBuf) -> u64 {
    looks_after::remote(begun, release).get().await.unwrap()
}

#[test]
fn a_task_at_home_goes_on_while_another_there_blocks_its_thread() {
    let _local = Local::start(1);
    let dir = tempfile::tempdir().unwrap();
    let done = above_one_that_looks_after::remote(dir.path().join("begun"), dir.path().join("release"));
    assert_eq!(done.get_timeout_blocking(LIMIT).unwrap(), 5);
}

#[wingbeat::actor(num_cpus = 1.0)]
impl Holder {
    fn new() -> Self {
        Holder
    }
    async fn waits_for_a_task(&self) -> u64 {
        seven::remote().get().await.unwrap()
    }
}

struct Holder;

#[wingbeat::remote]
fn above_one_that_is_spared(begun: PathBuf, release: PathBuf) -> u64 {
    let after = pid_alone::remote();
    let deaf = holds_on::remote(begun.clone(), release.clone());
    while let Err(Error::TimedOut { .. }) = deaf.get_timeout_blocking(Duration::from_millis(20)) {
        if begun.exists() {
            break;
        }
    }
    deaf.cancel_force();
    // There is one CPU, and the code that was cancelled goes on.
    let pid = after.get_blocking().unwrap();
    std::fs::write(release, "").unwrap();
    u64::from(pid)
}

#[test]
fn whoever_waits_lends_the_cpu_where_nothing_can_run_at_home() {
    let _local = Local::start(1);
    let holder = Holder::remote();
    assert_eq!(holder.waits_for_a_task().get_timeout_blocking(LIMIT).unwrap(), 7);
    drop(holder);
    let dir = tempfile::tempdir().unwrap();
    let spared = above_one_that_is_spared::remote(dir.path().join("begun"), dir.path().join("release"));
    assert_ne!(spared.get_timeout_blocking(LIMIT).unwrap(), 0);
}

/// Ends while what it has submitted runs, in its own process. Answers with that.
#[wingbeat::remote]
fn leaves_one_behind(begun: PathBuf, release: PathBuf) -> ObjectRef<u64> {
    let left = holds_on::remote(begun.clone(), release);
    while !begun.exists() {
        let _ = left.get_timeout_blocking(Duration::from_millis(20));
    }
    left
}

#[test]
fn what_a_task_leaves_behind_keeps_nothing_from_running() {
    let _local = Local::start(1);
    let dir = tempfile::tempdir().unwrap();
    let [begun, release] = ["begun", "release"].map(|name| dir.path().join(name));
    let left = leaves_one_behind::remote(begun, release.clone()).get_timeout_blocking(LIMIT).unwrap();
    // What shares no process, though there is one CPU and the process is known to be ready.
    let apart = || seven::options().isolated(true).remote().get_timeout_blocking(LIMIT);
    assert_eq!(apart().unwrap(), 7);
    assert_eq!(seven::options().max_retries(0).remote().get_timeout_blocking(LIMIT).unwrap(), 7);
    std::fs::write(release, "").unwrap();
    assert_eq!(left.get_timeout_blocking(LIMIT).unwrap(), 5);
    assert_eq!(apart().unwrap(), 7);
}

#[wingbeat::remote]
fn prints(what: u64) -> u64 {
    println!("{what}");
    what
}

/// Keeps the output for itself while it waits.
#[wingbeat::remote]
fn holds_the_output() -> u64 {
    let mut out = std::io::stdout().lock();
    let seven = seven::remote().get_timeout_blocking(LIMIT).unwrap();
    writeln!(out, "{seven}").unwrap();
    drop(out);
    prints::remote(seven).get_timeout_blocking(LIMIT).unwrap()
}

#[test]
fn a_task_may_hold_the_output_while_it_waits() {
    let _local = Local::start(1);
    assert_eq!(holds_the_output::remote().get_timeout_blocking(2 * LIMIT).unwrap(), 7);
}

#[test]
fn a_program_may_hold_its_output_while_it_waits_for_tasks_that_print() {
    let _local = Local::start(1);
    let out = std::io::stdout().lock();
    // What they print comes here before the last result does.
    for what in 0..100 {
        assert_eq!(prints::remote(what).get_timeout_blocking(LIMIT).unwrap(), what);
    }
    drop(out);
}

/// Needs more stack than Rust's threads have by default, and less than a main thread has.
#[wingbeat::remote]
fn goes_deep(left: u64) -> u64 {
    let page = std::hint::black_box([left; 512]);
    match left {
        0 => page[511],
        left => goes_deep(left - 1) + page[1] - page[2],
    }
}

#[wingbeat::remote]
fn above_one_that_goes_deep() -> u64 {
    goes_deep::remote(640).get_blocking().unwrap()
}

#[test]
fn a_task_at_home_has_the_stack_of_one_that_was_sent() {
    let _local = Local::start(1);
    assert_eq!(above_one_that_goes_deep::remote().get_timeout_blocking(LIMIT).unwrap(), 0);
}

/// Submits tasks and waits for them, without end.
#[wingbeat::remote]
async fn goes_on_until(release: PathBuf) -> u64 {
    let mut sum = 0;
    while !release.exists() {
        sum += fib::remote(6, false).get().await.unwrap().0;
    }
    sum
}

#[test]
fn a_program_that_waits_for_its_own_tasks_shares_the_cpus_with_others() {
    const CHILD: &str = "WINGBEAT_TEST_SHARES";
    if let Ok(at) = std::env::var(CHILD) {
        let (address, rest) = at.split_once('\n').unwrap();
        let (token, release) = rest.split_once('\n').unwrap();
        let _driver = Local::from(wingbeat::init_at(address).token(token));
        let both = [goes_on_until::remote(PathBuf::from(release)), goes_on_until::remote(PathBuf::from(release))];
        println!("submitted");
        get_all_blocking(&both).unwrap();
        return;
    }
    let cluster = wingbeat_tests::TestCluster::start(1, 1).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let (token, release) = (cluster.token().unwrap(), dir.path().join("release"));
    let told = format!("{}\n{token}\n{}", cluster.address(), release.display());
    let this = "a_program_that_waits_for_its_own_tasks_shares_the_cpus_with_others";
    let mut greedy = std::process::Command::new(std::env::current_exe().unwrap());
    let greedy = greedy.args([this, "--exact", "--nocapture"]).env(CHILD, told);
    let mut greedy = greedy.stdout(std::process::Stdio::piped()).spawn().unwrap();
    let mut said = BufReader::new(greedy.stdout.take().unwrap()).lines().map_while(Result::ok);
    assert!(said.any(|line| line.ends_with("submitted")), "it has ended");
    let _driver = Local::from(wingbeat::init_at(cluster.address()).token(&token));
    for n in 0..20 {
        assert_eq!(fails::remote(2 + n).get_timeout_blocking(LIMIT).unwrap(), u64::from(2 + n));
    }
    std::fs::write(&release, "").unwrap();
    said.for_each(drop);
    assert!(greedy.wait().unwrap().success());
}

#[wingbeat::remote]
fn seven() -> u64 {
    7
}

/// Waits in a runtime of its own.
#[wingbeat::remote]
fn in_its_own_runtime(depth: u32) -> u64 {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(async {
        match depth {
            0 => seven::remote().get().await.unwrap(),
            _ => in_its_own_runtime::remote(depth - 1).get().await.unwrap(),
        }
    })
}

/// Blocks the thread on which others are under way.
#[wingbeat::remote]
async fn blocks_where_it_should_not(depth: u32) -> u64 {
    let alone = pid_alone::remote().get().await.unwrap();
    assert_ne!(alone, std::process::id());
    match depth {
        0 => seven::remote().get_blocking().unwrap(),
        1 => futures::executor::block_on(async { blocks_where_it_should_not::remote(0).get().await.unwrap() }),
        _ => blocks_where_it_should_not::remote(depth - 1).get().await.unwrap(),
    }
}

#[test]
fn whatever_way_user_code_waits_another_thread_goes_on() {
    let _local = Local::start(1);
    assert_eq!(in_its_own_runtime::remote(5).get_timeout_blocking(LIMIT).unwrap(), 7);
    assert_eq!(blocks_where_it_should_not::remote(4).get_timeout_blocking(LIMIT).unwrap(), 7);
}

#[wingbeat::remote]
async fn asleep(begun: PathBuf) -> u64 {
    std::fs::write(begun, "").unwrap();
    std::future::pending().await
}

#[wingbeat::remote]
fn cancels(dir: PathBuf) -> Vec<String> {
    let wait_and_cancel = |name: &str, force: bool, task: ObjectRef<u64>| {
        // It has begun once this waits.
        while let Err(Error::TimedOut { .. }) = task.get_timeout_blocking(Duration::from_millis(20)) {
            if dir.join(name).exists() {
                if force {
                    task.cancel_force()
                } else {
                    task.cancel()
                }
                break;
            }
        }
        format!("{:?}", task.get_timeout_blocking(LIMIT).unwrap_err().kind())
    };
    let release = dir.join("release");
    let said = vec![
        wait_and_cancel("asleep", false, asleep::remote(dir.join("asleep"))),
        wait_and_cancel("forced", true, holds_on::remote(dir.join("forced"), release.clone())),
    ];
    std::fs::write(release, "").unwrap();
    said
}

#[test]
fn what_is_cancelled_at_home_is_over_for_who_waits_and_the_process_lives() {
    let _local = Local::start(1);
    let dir = tempfile::tempdir().unwrap();
    let said = cancels::remote(dir.path().to_owned()).get_timeout_blocking(LIMIT).unwrap();
    assert_eq!(said, ["Cancelled", "Cancelled"]);
}

#[wingbeat::remote]
async fn cancelled_with_what_it_has_submitted(begun: PathBuf) -> Result<u64, Error> {
    asleep::remote(begun).get().await
}

#[wingbeat::remote]
fn is_free() -> bool {
    true
}

#[test]
fn a_task_is_cancelled_with_what_runs_in_its_process() {
    let _local = Local::start(1);
    let dir = tempfile::tempdir().unwrap();
    let begun = dir.path().join("begun");
    let task = cancelled_with_what_it_has_submitted::remote(begun.clone());
    wait_for(&begun);
    task.cancel();
    assert_eq!(task.get_timeout_blocking(LIMIT).unwrap_err().kind(), wingbeat::ErrorKind::Cancelled);
    assert!(is_free::remote().get_timeout_blocking(LIMIT).unwrap());
}

#[wingbeat::remote]
fn counts(to: u64) -> impl Iterator<Item = u64> {
    0..to
}

#[wingbeat::remote]
fn counts_and_fails(to: u64) -> impl Iterator<Item = Result<u64, String>> {
    (0..to).map(Ok).chain([Err("no more".to_owned())])
}

#[wingbeat::remote]
async fn above_streams(to: u64) -> (u64, u64) {
    let mut sum = 0;
    let mut stream = counts::remote(to);
    while let Some(item) = stream.next().await {
        sum += item.unwrap();
    }
    let (mut good, mut stream) = (0, counts_and_fails::remote(to));
    while let Some(item) = stream.next().await {
        match item {
            Ok(_) => good += 1,
            Err(error) => assert!(error.to_string().contains("no more"), "{error}"),
        }
    }
    (sum, good)
}

#[test]
fn streams_are_consumed_where_they_are_made() {
    let _local = Local::start(1);
    assert_eq!(above_streams::remote(1_000).get_blocking().unwrap(), (499_500, 1_000));
}

#[wingbeat::remote]
fn makes(len: usize) -> Vec<u8> {
    vec![7; len]
}

#[wingbeat::remote]
fn len(value: Vec<u8>, refs: Vec<ObjectRef<u64>>) -> Vec<ObjectRef<u64>> {
    let mut all = refs;
    all.push(put(&(value.len() as u64)).unwrap());
    all
}

/// Values of all sizes, made and read at home, and refs that go in and out.
#[wingbeat::remote]
async fn above_values() -> u64 {
    let mut refs = vec![put(&1u64).unwrap()];
    let mut expected = 1;
    for size in [0, 1 << 10, 50 << 10, 1 << 20, 20 << 20] {
        refs = len::remote(makes::remote(size), refs).get().await.unwrap();
        expected += size as u64;
    }
    let sum: u64 = get_all(&refs).await.unwrap().iter().sum();
    assert_eq!(sum, expected);
    sum
}

#[test]
fn values_and_refs_of_all_sizes_stay_at_home() {
    let _local = Local::start(1);
    above_values::remote().get_timeout_blocking(LIMIT).unwrap();
}

struct Counter(u64);

#[wingbeat::actor]
impl Counter {
    fn new() -> Self {
        Counter(0)
    }
    async fn add(&mut self, n: u64) -> u64 {
        // An actor lends its process to nobody.
        self.0 += fib_blocking::remote(n).get().await.unwrap();
        self.0
    }
}

#[wingbeat::remote]
async fn above_an_actor() -> u64 {
    let counter = Counter::remote();
    let mut last = 0;
    for n in [5, 6, 7] {
        last = counter.add(n).get().await.unwrap();
    }
    last
}

#[test]
fn actors_are_made_and_called_by_tasks_that_share_a_process() {
    let _local = Local::start(2);
    let all: Vec<_> = (0..4).map(|_| above_an_actor::remote()).collect();
    assert_eq!(get_all_blocking(&all).unwrap(), [26; 4]);
}

#[wingbeat::remote]
async fn waits_for_its_ancestor(me: Vec<ObjectRef<u64>>) -> u64 {
    me[0].get().await.unwrap_or(99)
}

struct Place(Vec<ObjectRef<u64>>);

#[wingbeat::actor(num_cpus = 0.0)]
impl Place {
    fn new() -> Self {
        Place(Vec::new())
    }
    fn keep(&mut self, it: Vec<ObjectRef<u64>>) {
        self.0 = it;
    }
    async fn take(&self) -> Vec<ObjectRef<u64>> {
        self.0.clone()
    }
}

#[test]
fn a_circle_of_waits_through_one_process_is_found() {
    let _local = Local::start(2);
    let place = Place::remote();
    let gate = tempfile::tempdir().unwrap();
    let opened = gate.path().join("open");
    let own = opens::remote(opened.clone(), vec![place.clone()]);
    place.keep(vec![own.clone()]).get_blocking().unwrap();
    std::fs::write(opened, "").unwrap();
    assert_eq!(own.get_timeout_blocking(LIMIT).unwrap(), 99, "the one that waited for its ancestor had an error");
}

#[wingbeat::remote]
async fn opens(gate: PathBuf, place: Vec<PlaceHandle>) -> u64 {
    wait_for(&gate);
    let own = place[0].take().get().await.unwrap();
    waits_for_its_ancestor::remote(own).get().await.unwrap()
}
