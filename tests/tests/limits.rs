//! Time limits that are usually too long for a test, shortened, and outlived.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::time::{Duration, Instant};

use common::Local;
use rustix::process::{Pid, Resource, Rlimit, Signal, getrlimit, kill_process, prlimit};
use wingbeat::{Bundle, Error, get_all_blocking, placement_group};
use wingbeat_tests::{TestCluster, wait_for_end};

/// Only something that hangs takes so long.
const LIMIT: Duration = Duration::from_secs(60);
/// A file: the worker process that can remove it never becomes one.
const STUCK: &str = "WINGBEAT_TEST_STUCK";

/// Before worker processes begin.
#[used]
#[unsafe(link_section = ".init_array.00050")]
static BEFORE: extern "C" fn() = stick;

extern "C" fn stick() {
    let is_worker = std::env::var("WINGBEAT_CHILD").is_ok_and(|kind| kind.starts_with("worker"));
    if is_worker && std::env::var_os(STUCK).is_some_and(|file| std::fs::remove_file(file).is_ok()) {
        loop {
            std::thread::park();
        }
    }
}

fn join(cluster: &TestCluster) -> Local {
    Local::from(wingbeat::init_at(cluster.address()).token(&cluster.token().unwrap()))
}

#[wingbeat::remote]
fn pid() -> u32 {
    std::process::id()
}

/// Waits for others of its kind, each in a process of its own, and answers with all of these.
#[wingbeat::remote(isolated)]
async fn nested(depth: u32) -> Vec<u32> {
    let mut pids = match depth {
        0 => Vec::new(),
        _ => nested::remote(depth - 1).await.unwrap(),
    };
    pids.push(std::process::id());
    pids
}

#[test]
fn idle_processes_beyond_the_cpus_end_and_those_that_are_kept_serve() {
    let limits = [("WINGBEAT_IDLE_MS", "200"), ("WINGBEAT_HOUSEKEEPING_MS", "50")];
    let cluster = TestCluster::with_env(1, 1, &limits).unwrap();
    let _driver = join(&cluster);
    for _ in 0..3 {
        let pids = nested::remote(4).get_blocking().unwrap();
        assert_eq!(pids.len(), 5, "each waits in a process of its own");
        let begun = Instant::now();
        while pids.iter().filter(|pid| wingbeat_tests::is_alive(**pid)).count() > 1 {
            assert!(begun.elapsed() < LIMIT, "those that nobody needs stay");
            std::thread::yield_now();
        }
        get_all_blocking(&(0..10).map(|_| pid::remote()).collect::<Vec<_>>()).unwrap();
    }
}

#[test]
fn a_process_that_never_begins_is_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let stuck = folder.path().join("stuck");
    std::fs::write(&stuck, "").unwrap();
    let limits = [("WINGBEAT_START_MS", "3000"), ("WINGBEAT_HOUSEKEEPING_MS", "50")];
    let cluster = TestCluster::with_env(1, 1, &limits).unwrap();
    let init = wingbeat::init_at(cluster.address()).token(&cluster.token().unwrap());
    let _driver = Local::from(init.env(STUCK, stuck.to_str().unwrap()));
    assert_ne!(pid::remote().get_blocking().unwrap(), 0, "the next one serves");
    std::fs::write(&stuck, "").unwrap();
    let actor = Once::options().remote();
    assert_ne!(actor.pid().get_blocking().unwrap(), 0, "an actor has not lived before");
}

#[test]
fn a_process_that_stands_still_and_does_not_take_its_lease_is_replaced() {
    let limits = [("WINGBEAT_START_MS", "3000"), ("WINGBEAT_HOUSEKEEPING_MS", "50")];
    let cluster = TestCluster::with_env(1, 1, &limits).unwrap();
    let _driver = join(&cluster);
    let first = pid::remote().get_blocking().unwrap();
    // It is idle once its lease is over.
    let is_idle = || (cluster.state().unwrap()["nodes"][0]["leases"] == 0).then_some(());
    assert!(wingbeat_tests::poll(LIMIT, is_idle).is_some(), "its lease is not given back");
    kill_process(Pid::from_raw(first as i32).unwrap(), Signal::STOP).unwrap();
    let next = wingbeat::block_on(pid::remote().get_timeout(LIMIT)).unwrap();
    assert_ne!(next, first);
    assert!(!wingbeat_tests::is_alive(first));
}

struct Once;

#[wingbeat::actor]
impl Once {
    fn new() -> Self {
        Once
    }
    fn pid(&self) -> u32 {
        std::process::id()
    }
}

#[test]
fn a_launch_without_descriptors_fails_after_a_while_and_says_so() {
    let limits = [("WINGBEAT_DESCRIPTORS_MS", "300")];
    let cluster = TestCluster::with_env(1, 1, &limits).unwrap();
    let _driver = join(&cluster);
    let first = Once::options().num_cpus(0.0).remote();
    let before = first.pid().get_blocking().unwrap();
    // What was started ahead of need is at work, so that the next needs a launch.
    let busy = Once::options().num_cpus(1.0).remote();
    busy.pid().get_blocking().unwrap();
    let node = Pid::from_raw(cluster.node_pid(0).unwrap() as i32);
    let maximum = getrlimit(Resource::Nofile).maximum;
    let set = |current| prlimit(node, Resource::Nofile, Rlimit { current, maximum }).unwrap();
    let usual = set(Some(3));
    let begun = Instant::now();
    let error = Once::options().num_cpus(0.0).remote().pid().get_timeout_blocking(LIMIT).unwrap_err();
    assert!(error.to_string().contains("Too many open files"), "{error}");
    assert!(begun.elapsed() >= Duration::from_millis(300), "it was waited for some");
    set(usual.current);
    assert_eq!(first.pid().get_blocking().unwrap(), before, "what lives is not disturbed");
    Once::options().num_cpus(0.0).remote().pid().get_blocking().unwrap();
}

#[test]
fn what_is_asked_of_a_head_that_stands_still_fails_and_what_runs_goes_on() {
    const THIS: &str = "what_is_asked_of_a_head_that_stands_still_fails_and_what_runs_goes_on";
    // The limit is of this process, which reads it once.
    if std::env::var_os("WINGBEAT_HEAD_MS").is_none() {
        let mut again = std::process::Command::new(std::env::current_exe().unwrap());
        let again = again.args(["--exact", THIS]).env("WINGBEAT_HEAD_MS", "2000").env("WINGBEAT_SILENCE_MS", "600000");
        let ended = again.output().unwrap();
        assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stdout));
        return;
    }
    let cluster = TestCluster::with_env(1, 2, &[("WINGBEAT_SILENCE_MS", "600000"), ("WINGBEAT_HEAD_MS", "")]).unwrap();
    let driver = join(&cluster);
    let actor = Once::options().remote();
    let first = actor.pid().get_blocking().unwrap();
    let head = Pid::from_raw(cluster.head_pid().unwrap() as i32).unwrap();
    kill_process(head, Signal::STOP).unwrap();
    let mut failed = vec![
        wingbeat::block_on(driver.session.runtime().cluster_state()).map(drop),
        wingbeat::block_on(async { placement_group([Bundle::new().num_cpus(0.5)]).await }).map(drop),
    ];
    failed.push(wingbeat::block_on(Once::options().name("late").get_or_create()).map(drop));
    assert_eq!(actor.pid().get_blocking().unwrap(), first, "a call needs no head");
    kill_process(head, Signal::CONT).unwrap();
    for failed in failed {
        let error = failed.unwrap_err();
        assert!(matches!(&error, Error::Unreachable { what, .. } if what == "the head"), "{error}");
    }
    pid::remote().get_blocking().unwrap();
    let begun = Instant::now();
    while wingbeat::block_on(driver.session.runtime().cluster_state()).is_err() {
        assert!(begun.elapsed() < LIMIT, "the head serves again");
    }
    drop(driver);
    assert!(wait_for_end(first, LIMIT));
}

#[test]
fn a_cluster_whose_head_does_not_come_back_ends_with_its_processes() {
    let limits = [("WINGBEAT_SILENCE_MS", "1000"), ("WINGBEAT_LOST_MS", "3000")];
    let mut cluster = TestCluster::with_journal_and_env(1, 1, &limits).unwrap();
    let _driver = join(&cluster);
    let worker = pid::remote().get_blocking().unwrap();
    cluster.kill_head().unwrap();
    assert!(!cluster.wait_for_node_end(0).unwrap(), "it has waited in vain");
    assert!(wait_for_end(worker, LIMIT));
}
