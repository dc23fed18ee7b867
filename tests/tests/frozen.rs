//! Processes that are stopped and have not ended: nobody waits for them for ever, and no actor lives twice.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::future::IntoFuture;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use wingbeat::{Session, put};
use wingbeat_tests::{TestCluster, is_alive, wait_for_end};

/// Only something that hangs takes so long.
const LIMIT: Duration = Duration::from_secs(90);
/// Of all daemons and worker processes here.
const SILENCE: (&str, &str) = ("WINGBEAT_SILENCE_MS", "2000");

struct Counter {
    n: u64,
}

/// The process that answers, and how often it has.
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize, serde::Deserialize)]
struct Answer {
    pid: u32,
    n: u64,
}

#[wingbeat::actor(max_restarts = 3)]
impl Counter {
    fn new() -> Self {
        Counter { n: 0 }
    }
    fn add(&mut self) -> Answer {
        self.n += 1;
        Answer { pid: std::process::id(), n: self.n }
    }
}

/// Keeps every CPU of the machine busy for so many milliseconds.
#[wingbeat::remote]
fn keeps_busy(ms: u64) -> u32 {
    let until = Instant::now() + Duration::from_millis(ms);
    let threads: Vec<_> = (0..8)
        .map(|_| {
            std::thread::spawn(move || {
                while Instant::now() < until {
                    std::hint::spin_loop();
                }
            })
        })
        .collect();
    for thread in threads {
        thread.join().unwrap();
    }
    std::process::id()
}

#[wingbeat::remote]
fn len(data: Vec<u8>) -> u64 {
    data.len() as u64
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

/// Calls until a life other than `before` answers.
fn next_life(actor: &CounterHandle, before: u32) -> Answer {
    let begun = Instant::now();
    loop {
        match wingbeat::block_on(actor.add().get_timeout(LIMIT)) {
            Ok(answer) if answer.pid != before => return answer,
            other => assert!(begun.elapsed() < LIMIT, "no other life answers, but {other:?}"),
        }
    }
}

/// The number of the node on which a process of this id runs.
fn node_of(cluster: &TestCluster, pid: u32) -> usize {
    let daemon = wingbeat_tests::daemon_of(pid);
    (0..cluster.nodes()).find(|node| cluster.node_pid(*node) == Some(daemon)).unwrap()
}

#[test]
fn an_actor_on_a_node_that_is_stopped_goes_on_elsewhere() {
    let mut cluster = TestCluster::with_env(2, 2, &[SILENCE]).unwrap();
    let session = join(&cluster);
    let _entered = session.enter();
    let actor = Counter::options().remote();
    let Answer { pid: first, n } = actor.add().get_blocking().unwrap();
    assert_eq!(n, 1);
    let node = node_of(&cluster, first);
    let daemon = Stopped::new(cluster.node_pid(node).unwrap());
    let worker = Stopped::new(first);
    let Answer { pid: second, n } = next_life(&actor, first);
    assert_eq!(n, 1, "a new life");
    assert_ne!(node_of(&cluster, second), node);
    // The driver finds another store when its node was the one that is stopped.
    let large = put(&vec![7u8; 1 << 20]).unwrap();
    assert_eq!(len::remote(&large).get_blocking().unwrap(), 1 << 20);
    // When it goes on, it has been given up.
    drop(daemon);
    drop(worker);
    assert!(wait_for_end(first, LIMIT), "the old life goes on");
    assert!(!cluster.wait_for_node_end(node).unwrap());
    assert_eq!(actor.add().get_blocking().unwrap(), Answer { pid: second, n: 2 });
    wingbeat::block_on(session.shutdown());
}

/// Who dials a node that was killed is refused when all that ran there has ended, and not before.
#[test]
fn an_actor_of_a_killed_node_lives_again_after_its_last_life_has_ended() {
    // Longer than all that is waited for.
    let times = ["--suspect-after", "1s", "--lost-after", "180s"];
    let mut cluster = TestCluster::with_head_args(2, 2, false, &times).unwrap();
    let session = join(&cluster);
    let _entered = session.enter();
    let actor = Counter::options().remote();
    let first = actor.add().get_blocking().unwrap().pid;
    let node = node_of(&cluster, first);
    let keeper = wingbeat_tests::parent(first);
    let guard = wingbeat_tests::parent(keeper);
    let stopped = [guard, keeper, first].map(Stopped::new);
    // The kernel lets stopped processes go on whose group loses its last tie to the session. This is another one.
    let group = rustix::process::getpgid(Pid::from_raw(guard as i32)).unwrap().as_raw_nonzero().get();
    let mut tie = Command::new("sleep").arg("1000").process_group(group).spawn().unwrap();
    cluster.kill_node(node).unwrap();
    let is_noticed = || {
        let state = cluster.state().unwrap();
        let nodes = state["nodes"].as_array().unwrap();
        (nodes.len() < 2 || nodes.iter().any(|node| !node["suspect_secs"].is_null())).then_some(())
    };
    assert!(wingbeat_tests::poll(LIMIT, is_noticed).is_some(), "the head does not notice");
    let next = std::thread::scope(|scope| {
        let next = scope.spawn(|| {
            let _entered = session.enter();
            let next = next_life(&actor, first);
            (next, is_alive(first))
        });
        assert_eq!(cluster.state().unwrap()["nodes"].as_array().unwrap().len(), 2, "it was given up too early");
        drop(stopped);
        next.join().unwrap()
    });
    assert_eq!(next.0.n, 1, "a new life");
    assert!(!next.1, "the last life goes on beside it");
    // The guard may have ended it with its group.
    let _ = tie.kill();
    tie.wait().unwrap();
    wingbeat::block_on(session.shutdown());
}

#[test]
fn a_worker_process_whose_daemon_is_stopped_ends_when_it_was_replaced() {
    let cluster = TestCluster::with_env(2, 2, &[SILENCE]).unwrap();
    let session = join(&cluster);
    let _entered = session.enter();
    let actor = Counter::options().remote();
    let first = actor.add().get_blocking().unwrap().pid;
    let daemon = Stopped::new(cluster.node_pid(node_of(&cluster, first)).unwrap());
    // Its daemon still stands.
    assert!(wait_for_end(first, LIMIT), "the old life goes on");
    assert_eq!(next_life(&actor, first).n, 1, "a new life");
    drop(daemon);
    wingbeat::block_on(session.shutdown());
}

#[test]
fn a_daemon_that_is_stopped_for_a_moment_loses_nothing() {
    let cluster = TestCluster::with_env(1, 2, &[("WINGBEAT_SILENCE_MS", "60000")]).unwrap();
    let session = join(&cluster);
    let _entered = session.enter();
    let actor = Counter::options().remote();
    let first = actor.add().get_blocking().unwrap().pid;
    let daemon = Stopped::new(cluster.node_pid(0).unwrap());
    assert_eq!(actor.add().get_blocking().unwrap(), Answer { pid: first, n: 2 });
    drop(daemon);
    assert_eq!(actor.add().get_blocking().unwrap(), Answer { pid: first, n: 3 });
    wingbeat::block_on(session.shutdown());
}

#[test]
fn a_node_that_is_busy_is_not_given_up() {
    // Suspect after 2 s, and lost after 7 s; with `WINGBEAT_TEST_BUSY_S=600` ten minutes of the usual times.
    let long = std::env::var("WINGBEAT_TEST_BUSY_S").ok().map(|seconds| seconds.parse::<u64>().unwrap() * 1000);
    let env: &[(&str, &str)] = if long.is_some() { &[] } else { &[("WINGBEAT_SILENCE_MS", "2000")] };
    let cluster = TestCluster::with_env(1, 2, env).unwrap();
    let session = join(&cluster);
    let _entered = session.enter();
    let before = cluster.node_numbers().unwrap();
    let busy: Vec<_> = (0..2).map(|_| keeps_busy::options().max_retries(0).remote(long.unwrap_or(10_000))).collect();
    while !busy.iter().all(|task| task.is_ready()) {
        let state = cluster.state().unwrap();
        let [node] = &state["nodes"].as_array().unwrap()[..] else { panic!("it is lost: {state}") };
        assert!(node["suspect_secs"].is_null(), "it is suspect: {state}");
    }
    for task in busy {
        task.get_blocking().unwrap();
    }
    assert!(is_alive(cluster.node_pid(0).unwrap()));
    assert_eq!(cluster.node_numbers().unwrap(), before);
    assert!(!cluster.head_errors().contains("is suspect"), "{}", cluster.head_errors());
    wingbeat::block_on(session.shutdown());
}

#[test]
fn a_cluster_is_stopped_in_order_also_when_one_of_its_nodes_stands_still() {
    let mut cluster = TestCluster::start(2, 1).unwrap();
    let numbers = cluster.node_numbers().unwrap();
    // The one that would be told first.
    let (frozen, other) = if numbers[0] < numbers[1] { (0, 1) } else { (1, 0) };
    let stopped = Stopped::new(cluster.node_pid(frozen).unwrap());
    let output = cluster.command().unwrap().arg("stop").output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(cluster.wait_for_node_end(other).unwrap(), "it was not told to end");
    drop(stopped);
}

/// Runs as a driver of its own, in which the head and the node are.
const INSIDE: &str = "WINGBEAT_TEST_INSIDE";

#[test]
fn a_private_cluster_goes_on_after_its_driver_was_stopped_for_longer_than_any_limit() {
    const NAME: &str = "a_private_cluster_goes_on_after_its_driver_was_stopped_for_longer_than_any_limit";
    if std::env::var_os(INSIDE).is_some() {
        return before_and_after_a_stop();
    }
    let mut driver = Command::new(std::env::current_exe().unwrap());
    driver.args(["--exact", NAME, "--nocapture"]).env(INSIDE, "1").env("WINGBEAT_SILENCE_MS", "3000");
    let mut driver = driver.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut said = BufReader::new(driver.stdout.take().unwrap());
    let mut text = String::new();
    while !text.ends_with("it is up\n") {
        assert!(said.read_line(&mut text).unwrap() > 0, "{text}");
    }
    // As Ctrl-Z, a debugger and a paused container do. The head would give a node up after 10.5 s.
    let stopped = Stopped::new(driver.id());
    std::thread::sleep(Duration::from_secs(12));
    drop(stopped);
    driver.stdin.take().unwrap().write_all(b"\n").unwrap();
    said.read_to_string(&mut text).unwrap();
    assert!(driver.wait().unwrap().success(), "{text}");
}

fn before_and_after_a_stop() {
    let init = wingbeat::init().private().num_cpus(1).global(false);
    let session = wingbeat::block_on(init.into_future()).unwrap();
    let _entered = session.enter();
    let actor = Counter::options().num_cpus(0.0).remote();
    let first = actor.add().get_blocking().unwrap();
    println!("it is up");
    std::io::stdin().read_line(&mut String::new()).unwrap();
    assert_eq!(actor.add().get_blocking().unwrap(), Answer { n: 2, ..first });
    // What is over by then, if anything is.
    assert_eq!(len::remote(put(&vec![7u8; 1 << 20]).unwrap()).get_blocking().unwrap(), 1 << 20);
    wingbeat::block_on(session.shutdown());
}
