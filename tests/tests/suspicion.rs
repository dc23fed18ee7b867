//! A node that says nothing is suspect first: nothing new is placed there, and nothing of it runs elsewhere. Later it is lost. How much later,
//! the head says.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::future::IntoFuture;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use wingbeat::Session;
use wingbeat_net::limits::limits;
use wingbeat_tests::{TestCluster, daemon_of, is_alive, wait_for_end};

/// Only something that hangs takes so long.
const LIMIT: Duration = Duration::from_secs(90);

/// The times of a process, in milliseconds: when others are suspect, and when they are lost.
fn times() -> [u128; 2] {
    [limits().silence.as_millis(), limits().lost.as_millis()]
}

struct Counter {
    n: u64,
}

/// The process that answers, how often it has, and which times it has.
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize, serde::Deserialize)]
struct Answer {
    pid: u32,
    n: u64,
    times: [u128; 2],
}

#[wingbeat::actor(max_restarts = 3)]
impl Counter {
    fn new() -> Self {
        Counter { n: 0 }
    }
    fn add(&mut self) -> Answer {
        self.n += 1;
        Answer { pid: std::process::id(), n: self.n, times: times() }
    }
}

#[wingbeat::remote]
fn pid() -> u32 {
    std::process::id()
}

#[wingbeat::remote]
fn times_there() -> [u128; 2] {
    times()
}

/// Leaves its process id in `dir`, and returns when there is `go`. Counts how often it was begun.
#[wingbeat::remote]
fn hold(dir: PathBuf) -> u32 {
    let me = std::process::id();
    std::fs::write(dir.join(format!("began-{me}")), "").unwrap();
    while !dir.join("go").exists() {
        std::thread::yield_now();
    }
    me
}

/// The process in which something holds, when there is one.
fn holding(dir: &Path) -> u32 {
    loop {
        if let Some(entry) = std::fs::read_dir(dir).unwrap().next() {
            let name = entry.unwrap().file_name().into_string().unwrap();
            return name.strip_prefix("began-").unwrap().parse().unwrap();
        }
        std::thread::yield_now();
    }
}

/// A process that is stopped until this is dropped.
struct Stopped(u32);

impl Stopped {
    fn new(pid: u32) -> Stopped {
        kill_process(Pid::from_raw(pid as i32).unwrap(), Signal::STOP).unwrap();
        Stopped(pid)
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        if is_alive(self.0) {
            let _ = kill_process(Pid::from_raw(self.0 as i32).unwrap(), Signal::CONT);
        }
    }
}

fn join(cluster: &TestCluster) -> Session {
    let init = wingbeat::init_at(cluster.address()).token(&cluster.token().unwrap());
    wingbeat::block_on(init.global(false).log_to_driver(false).into_future()).unwrap()
}

/// Calls until an answer is as `wanted`.
fn until(actor: &CounterHandle, what: &str, wanted: impl Fn(&Answer) -> bool) -> Answer {
    let begun = Instant::now();
    loop {
        match wingbeat::block_on(actor.add().get_timeout(LIMIT)) {
            Ok(answer) if wanted(&answer) => return answer,
            other => assert!(begun.elapsed() < LIMIT, "{what}: not so, but {other:?}"),
        }
    }
}

/// The node that has this id, as `wingbeat status` has it.
fn standing(cluster: &TestCluster, node: &str) -> serde_json::Value {
    let state = cluster.state().unwrap();
    let found = state["nodes"].as_array().unwrap().iter().find(|known| known["info"]["id"].to_string().contains(node));
    found.cloned().unwrap_or_default()
}

fn until_suspect(cluster: &TestCluster, is_suspect: bool) {
    let begun = Instant::now();
    loop {
        let state = cluster.state().unwrap();
        let any = state["nodes"].as_array().unwrap().iter().any(|node| !node["suspect_secs"].is_null());
        if any == is_suspect {
            return;
        }
        assert!(begun.elapsed() < LIMIT, "{state}");
    }
}

/// The number of the node on which a process of this id runs.
fn node_of(cluster: &TestCluster, pid: u32) -> usize {
    let daemon = daemon_of(pid);
    (0..cluster.nodes()).find(|node| cluster.node_pid(*node) == Some(daemon)).unwrap()
}

fn said(cluster: &TestCluster, arguments: &[&str]) -> String {
    let output = cluster.command().unwrap().args(arguments).output().unwrap();
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

#[test]
fn a_node_that_stands_still_is_suspect_and_goes_on_where_it_was() {
    const NAME: &str = "a_node_that_stands_still_is_suspect_and_goes_on_where_it_was";
    if common::runs_again_with(NAME, &[]) {
        return;
    }
    let times = ["--suspect-after", "1s", "--lost-after", "90s"];
    let mut cluster = TestCluster::with_head_args(1, 2, false, &times).unwrap();
    cluster.add_node(&["--num-cpus", "2", "--resource", "here=2"]).unwrap();
    let id = cluster.node_numbers().unwrap()[1].clone();
    let session = join(&cluster);
    let _entered = session.enter();
    let dir = tempfile::tempdir().unwrap();
    let held = hold::options().max_retries(0).resource("here", 1.0).remote(dir.path().to_owned());
    let actor = Counter::options().num_cpus(0.0).resource("here", 0.5).remote();
    let before = actor.add().get_blocking().unwrap();
    let worker = holding(dir.path());
    assert_eq!(node_of(&cluster, worker), 1);
    let stopped = [cluster.node_pid(1).unwrap(), worker, before.pid].map(Stopped::new);
    until_suspect(&cluster, true);
    assert!(!standing(&cluster, id.trim_start_matches("node-"))["suspect_secs"].is_null());
    let status = said(&cluster, &["status"]);
    assert!(status.lines().any(|line| line.contains(&id) && line.contains("suspect")), "{status}");
    assert!(status.contains("2 nodes (1 suspect)"), "{status}");
    let why = said(&cluster, &["why", &id]);
    assert!(why.contains("is suspect: it has had no connection to the head for"), "{why}");
    // Nothing new is placed there, and what can only run there waits.
    for _ in 0..10 {
        assert_eq!(node_of(&cluster, pid::remote().get_blocking().unwrap()), 0);
    }
    let late = Counter::options().num_cpus(0.0).resource("here", 0.5).remote();
    let answer = late.add();
    let begun = Instant::now();
    loop {
        let status = said(&cluster, &["status"]);
        if status.contains("Counter") && status.contains("is suspect") {
            break;
        }
        assert!(begun.elapsed() < LIMIT, "{status}");
    }
    assert!(answer.get_timeout_blocking(Duration::ZERO).is_err(), "it was placed");
    // It goes on.
    drop(stopped);
    until_suspect(&cluster, false);
    std::fs::write(dir.path().join("go"), "").unwrap();
    assert_eq!(held.get_blocking().unwrap(), worker, "the same process, and the first attempt");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 2, "it was begun once");
    let after = actor.add().get_blocking().unwrap();
    assert_eq!((after.pid, after.n), (before.pid, 2), "the same life");
    assert_eq!(node_of(&cluster, late.add().get_blocking().unwrap().pid), 1);
    wingbeat::block_on(session.shutdown());
}

#[test]
fn a_driver_goes_on_with_its_node_while_that_is_suspect() {
    if common::runs_again_with("a_driver_goes_on_with_its_node_while_that_is_suspect", &[]) {
        return;
    }
    let times = ["--suspect-after", "1s", "--lost-after", "90s"];
    let cluster = TestCluster::with_head_args(1, 1, false, &times).unwrap();
    let session = join(&cluster);
    let _entered = session.enter();
    let before = wingbeat::put(&vec![7u8; 1 << 20]).unwrap();
    let stopped = Stopped::new(cluster.node_pid(0).unwrap());
    let begun = Instant::now();
    // For longer than silence makes a suspect, at the driver, too.
    while cluster.state().unwrap()["nodes"][0]["suspect_secs"].as_u64().is_none_or(|secs| secs < 3) {
        assert!(begun.elapsed() < LIMIT, "{}", cluster.state().unwrap());
    }
    drop(stopped);
    until_suspect(&cluster, false);
    let after = wingbeat::put(&vec![7u8; 1 << 20]).unwrap();
    assert_eq!(before.get_blocking().unwrap(), after.get_blocking().unwrap());
    assert_eq!(cluster.state().unwrap()["nodes"].as_array().unwrap().len(), 1, "it has brought no node of its own");
    wingbeat::block_on(session.shutdown());
}

#[test]
fn a_node_that_stands_still_for_longer_is_lost_and_ends_itself() {
    if common::runs_again_with("a_node_that_stands_still_for_longer_is_lost_and_ends_itself", &[]) {
        return;
    }
    let mut cluster = TestCluster::with_head_args(2, 2, false, &["--lost-after", "3s"]).unwrap();
    let session = join(&cluster);
    let _entered = session.enter();
    let actor = Counter::options().remote();
    let first = actor.add().get_blocking().unwrap().pid;
    let node = node_of(&cluster, first);
    let begun = Instant::now();
    let stopped = [cluster.node_pid(node).unwrap(), first].map(Stopped::new);
    let second = until(&actor, "another life", |answer| answer.pid != first);
    let took = begun.elapsed();
    // It was heard last a moment before, from which the head counts. Its own term is 2.7 s.
    assert!(took >= Duration::from_millis(2_700), "{took:?}: nobody is lost before");
    assert!(took < Duration::from_secs(25), "{took:?}: the head was told 3 s");
    assert_eq!(second.n, 1, "a new life");
    assert_ne!(node_of(&cluster, second.pid), node);
    drop(stopped);
    assert!(wait_for_end(first, LIMIT), "the old life goes on");
    assert!(!cluster.wait_for_node_end(node).unwrap(), "it says why");
    assert_eq!(until(&actor, "the same life", |answer| answer.pid == second.pid).n, 2);
    wingbeat::block_on(session.shutdown());
}

#[test]
fn a_node_whose_head_stands_still_ends_itself_in_the_time_that_the_head_had_said() {
    let mut cluster = TestCluster::with_head_args(1, 1, false, &["--lost-after", "3s"]).unwrap();
    let begun = Instant::now();
    let head = Stopped::new(cluster.head_pid().unwrap());
    assert!(!cluster.wait_for_node_end(0).unwrap(), "it says why");
    let took = begun.elapsed();
    assert!(took < Duration::from_secs(25), "{took:?}: its term is 2.7 s");
    drop(head);
}

#[test]
fn a_killed_node_is_lost_at_once_whatever_the_times_are() {
    if common::runs_again_with("a_killed_node_is_lost_at_once_whatever_the_times_are", &[]) {
        return;
    }
    let mut cluster = TestCluster::with_head_args(2, 2, false, &["--lost-after", "10min"]).unwrap();
    let session = join(&cluster);
    let _entered = session.enter();
    let actor = Counter::options().remote();
    let first = actor.add().get_blocking().unwrap().pid;
    let begun = Instant::now();
    cluster.kill_node(node_of(&cluster, first)).unwrap();
    assert_eq!(until(&actor, "another life", |answer| answer.pid != first).n, 1);
    assert!(begun.elapsed() < LIMIT);
    wingbeat::block_on(session.shutdown());
}

#[test]
fn what_the_head_says_reaches_drivers_and_worker_processes() {
    if common::runs_again_with("what_the_head_says_reaches_drivers_and_worker_processes", &[]) {
        return;
    }
    assert_eq!(times(), [5_000, 30_000], "the usual times");
    let said = ["--suspect-after", "7s", "--lost-after", "21s"];
    let cluster = TestCluster::with_head_args(1, 2, false, &said).unwrap();
    let session = join(&cluster);
    let _entered = session.enter();
    assert_eq!(times(), [7_000, 21_000]);
    assert_eq!(times_there::remote().get_blocking().unwrap(), [7_000, 21_000]);
    assert_eq!(Counter::remote().add().get_blocking().unwrap().times, [7_000, 21_000]);
    wingbeat::block_on(session.shutdown());
}

/// Starts a head again with other times, while a node stands still that knows those of the first.
fn started_again_with_other_times(keeps_journal: bool) {
    let said = ["--suspect-after", "1s", "--lost-after", "12s"];
    let mut cluster = TestCluster::with_head_args(2, 2, keeps_journal, &said).unwrap();
    let session = join(&cluster);
    let _entered = session.enter();
    let [one, other] = [0; 2].map(|_| Counter::options().num_cpus(2.0).remote());
    let (stays, moves) = (one.add().get_blocking().unwrap(), other.add().get_blocking().unwrap());
    assert_eq!(stays.times, [1_000, 12_000]);
    let node = node_of(&cluster, moves.pid);
    assert_ne!(node_of(&cluster, stays.pid), node);
    let stopped = [cluster.node_pid(node).unwrap(), moves.pid].map(Stopped::new);
    cluster.kill_head().unwrap();
    cluster.set_head_args(&["--suspect-after", "1s", "--lost-after", "3s"]);
    let begun = Instant::now();
    cluster.start_head().unwrap();
    // Everybody who is there takes the new times: also a worker process that has nothing to say to the head.
    assert_eq!(until(&one, "the new times", |answer| answer.times == [1_000, 3_000]).pid, stays.pid);
    while times() != [1_000, 3_000] {
        assert!(begun.elapsed() < LIMIT, "the driver has {:?}", times());
        std::thread::yield_now();
    }
    // The other's place is free, and nothing of the node that stands still begins there before that must have ended itself.
    one.actor().kill();
    let next = until(&other, "another life", |answer| answer.pid != moves.pid);
    let took = begun.elapsed();
    assert_eq!(next.n, 1);
    assert!(took >= Duration::from_millis(11_500), "{took:?}: the first head had promised 12 s");
    drop(stopped);
    assert!(wait_for_end(moves.pid, LIMIT), "the old life goes on");
    wingbeat::block_on(session.shutdown());
}

#[test]
fn a_head_that_is_started_again_with_other_times_is_believed_and_keeps_the_promise_of_the_last() {
    const NAME: &str = "a_head_that_is_started_again_with_other_times_is_believed_and_keeps_the_promise_of_the_last";
    if !common::runs_again_with(NAME, &[]) {
        started_again_with_other_times(true);
    }
}

#[test]
fn so_does_one_without_a_journal() {
    if !common::runs_again_with("so_does_one_without_a_journal", &[]) {
        started_again_with_other_times(false);
    }
}

#[test]
fn times_that_make_no_sense_are_refused() {
    let cluster = TestCluster::start(0, 1).unwrap();
    let refused = |times: &[&str]| said(&cluster, &[&["head", "--port", "0"], times].concat());
    let soon = refused(&["--lost-after", "2s"]);
    assert!(soon.contains("--lost-after") && soon.contains("give at least 3s"), "{soon}");
    let close = refused(&["--suspect-after", "4s", "--lost-after", "5s"]);
    assert!(close.contains("are too close") && close.contains("suspect after 2.5s is the most"), "{close}");
    let unit = refused(&["--lost-after", "30"]);
    assert!(unit.contains("write 90s"), "{unit}");
}
