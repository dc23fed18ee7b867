//! Clusters of several processes: joining, failing, ending. Nothing hangs, and nothing is left behind.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::collections::BTreeSet;
use std::future::IntoFuture;
use std::path::PathBuf;
use std::time::Duration;

use common::{Local, Started};
use wingbeat::{Error, ObjectRef, get_all_blocking};
use wingbeat_tests::{TestCluster, is_alive, wait_for_end};

/// Only something that hangs takes so long.
const LIMIT: Duration = Duration::from_secs(60);

#[wingbeat::remote]
fn square(x: u64) -> u64 {
    x * x
}

#[wingbeat::remote]
fn parent_pid() -> u32 {
    // It names the node.
    wingbeat_tests::daemon_of(std::process::id())
}

#[wingbeat::remote]
fn own_pid() -> u32 {
    std::process::id()
}

#[wingbeat::remote]
fn bytes(n: u64) -> Vec<u8> {
    vec![7; n as usize]
}

#[wingbeat::remote]
fn sum(data: Vec<u8>) -> u64 {
    data.iter().map(|byte| u64::from(*byte)).sum()
}

#[wingbeat::remote]
fn dies_once(marker: PathBuf) -> u64 {
    if marker.exists() {
        return 5;
    }
    std::fs::write(marker, "").unwrap();
    std::process::abort()
}

#[wingbeat::remote]
#[allow(clippy::zombie_processes, reason = "whoever ends the task must end its child too")]
fn starts_a_child_and_stays(started: PathBuf) -> u64 {
    let child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
    std::fs::write(started.with_extension("tmp"), format!("{} {}", std::process::id(), child.id())).unwrap();
    std::fs::rename(started.with_extension("tmp"), started).unwrap();
    loop {
        std::thread::park();
    }
}

/// Waits until so many of these run at the same time, and answers with its node.
#[wingbeat::remote]
fn meets(place: PathBuf, number: usize, count: usize) -> u32 {
    std::fs::write(place.join(number.to_string()), "").unwrap();
    while std::fs::read_dir(&place).unwrap().count() < count {
        std::thread::yield_now();
    }
    parent_pid()
}

#[wingbeat::remote]
fn takes(time: Duration) {
    std::thread::sleep(time);
}

struct Counter {
    n: u64,
}

#[wingbeat::actor]
impl Counter {
    fn new() -> Self {
        Counter { n: 0 }
    }
    fn add(&mut self) -> u64 {
        self.n += 1;
        self.n
    }
    fn node(&self) -> u32 {
        parent_pid()
    }
    /// A ref to what never comes, and is the actor's own.
    fn lend(&self, started: PathBuf) -> Vec<ObjectRef<u64>> {
        vec![starts_a_child_and_stays::remote(started)]
    }
}

fn join(cluster: &TestCluster) -> Local {
    Local::from(wingbeat::init_at(cluster.address()).token(&cluster.token().unwrap()))
}

/// Twice, as no worker process is there the first time, and all are the second time.
#[test]
fn as_many_short_tasks_as_nodes_run_on_all_of_them_if_they_are_to_be_spread() {
    let cluster = TestCluster::start(4, 1).unwrap();
    let _session = join(&cluster);
    for _ in 0..2 {
        let nodes: Vec<_> = (0..4).map(|_| parent_pid::options().spread().remote()).collect();
        let nodes: BTreeSet<u32> = get_all_blocking(&nodes).unwrap().into_iter().collect();
        assert_eq!(nodes.len(), 4, "{nodes:?}");
    }
}

#[test]
fn work_spreads_over_the_nodes() {
    let cluster = TestCluster::start(2, 1).unwrap();
    let _driver = join(&cluster);
    let refs: Vec<_> = (0..1000u64).map(square::remote).collect();
    assert_eq!(get_all_blocking(&refs).unwrap()[31], 961);
    // Two that wait for each other cannot share a node of one CPU.
    let place = tempfile::tempdir().unwrap();
    let refs: Vec<_> = (0..2).map(|number| meets::remote(place.path().to_owned(), number, 2)).collect();
    let nodes: BTreeSet<u32> = get_all_blocking(&refs).unwrap().into_iter().collect();
    assert_eq!(nodes, (0..2).filter_map(|node| cluster.node_pid(node)).collect());
}

#[test]
fn objects_move_between_nodes() {
    let cluster = TestCluster::start(3, 1).unwrap();
    let _driver = join(&cluster);
    let object = bytes::options().spread().remote(5_000_000);
    let sums: Vec<_> = (0..6).map(|_| sum::options().spread().remote(&object)).collect();
    assert_eq!(get_all_blocking(&sums).unwrap(), vec![35_000_000; 6]);
    assert_eq!(object.view_blocking().unwrap().len(), 5_000_000);
}

#[test]
fn a_killed_worker_process_fails_only_its_own_task_which_runs_again() {
    let cluster = TestCluster::start(1, 2).unwrap();
    let _driver = join(&cluster);
    let dir = tempfile::tempdir().unwrap();
    let others: Vec<_> = (0..200u64).map(square::remote).collect();
    assert_eq!(dies_once::remote(dir.path().join("marker")).get_blocking().unwrap(), 5);
    assert_eq!(get_all_blocking(&others).unwrap().len(), 200);
}

#[test]
fn what_the_head_and_nodes_take_in_is_recorded_and_comes_out_the_same_when_it_is_played() {
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path().to_str().unwrap();
    let mut cluster = TestCluster::with_env(2, 2, &[("WINGBEAT_RECORD", place), ("SECRET", "xyzzy-7")]).unwrap();
    {
        let _driver = join(&cluster);
        let marker = folder.path().join("marker");
        assert_eq!(dies_once::remote(marker).get_blocking().unwrap(), 5);
        let counter = Counter::remote();
        assert_eq!(get_all_blocking(&(0..9).map(|_| counter.add()).collect::<Vec<_>>()).unwrap()[8], 9);
    }
    let played = cluster.command().unwrap().args(["replay", place, "--around", "LeaseReady"]).output().unwrap();
    let said = String::from_utf8(played.stdout).unwrap();
    assert!(played.status.success(), "{said}{}", String::from_utf8_lossy(&played.stderr));
    assert_eq!(said.matches("all came out the same").count(), 3, "a head and two nodes: {said}");
    assert!(said.contains("LeaseReady"), "{said}");
    cluster.stop().unwrap();
    let names = std::fs::read_dir(folder.path()).unwrap().map(|file| file.unwrap().file_name().into_string().unwrap());
    let (workers, drivers): (Vec<_>, Vec<_>) =
        names.filter(|name| !name.starts_with("head-")).partition(|name| name.starts_with("worker-"));
    assert!(workers.len() >= 2, "nodes have their worker processes record: {workers:?}");
    assert!(!drivers.iter().any(|name| name.starts_with("driver-")), "the driver was not asked to: {drivers:?}");
    for file in std::fs::read_dir(folder.path()).unwrap() {
        let recorded = std::fs::read(file.unwrap().path()).unwrap();
        assert!(!recorded.windows(7).any(|bytes| bytes == b"xyzzy-7"), "a variable of the environment was recorded");
    }
    // One that is damaged says so.
    let head = std::fs::read_dir(folder.path()).unwrap().map(|file| file.unwrap().path());
    let head = head.into_iter().find(|path| path.to_string_lossy().contains("head-")).unwrap();
    let mut bytes = std::fs::read(&head).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    std::fs::write(&head, bytes).unwrap();
    let played = cluster.command().unwrap().arg("replay").arg(&head).output().unwrap();
    assert!(!played.status.success() && String::from_utf8_lossy(&played.stderr).contains("damaged"));
}

#[test]
fn a_killed_node_takes_its_tasks_elsewhere_and_its_processes_with_it() {
    let mut cluster = TestCluster::start(1, 1).unwrap();
    let _driver = join(&cluster);
    let started = Started::new();
    let stuck = starts_a_child_and_stays::remote(started.path());
    started.wait();
    let pids: Vec<u32> =
        std::fs::read_to_string(started.path()).unwrap().split(' ').map(|pid| pid.parse().unwrap()).collect();
    cluster.add_node(&["--num-cpus", "1"]).unwrap();
    std::fs::remove_file(started.path()).unwrap();
    cluster.kill_node(0).unwrap();
    // It runs again on the other node.
    started.wait();
    for pid in pids {
        assert!(wait_for_end(pid, LIMIT), "process {pid} outlived its node");
    }
    stuck.cancel_force();
    assert!(matches!(stuck.get_blocking(), Err(Error::Cancelled { .. })));
    assert_eq!(square::remote(3).get_blocking().unwrap(), 9);
}

#[test]
fn an_actor_moves_to_another_node_when_its_own_is_killed() {
    let mut cluster = TestCluster::start(2, 1).unwrap();
    let _driver = join(&cluster);
    let counter = Counter::options().max_restarts(1).remote();
    let once = Counter::options().remote();
    let node = counter.node().get_blocking().unwrap();
    let number = (0..2).find(|n| cluster.node_pid(*n) == Some(node)).unwrap();
    let other = once.node().get_blocking().unwrap();
    cluster.kill_node(number).unwrap();
    // Calls that were made while it was away reach the new one, or say that it was away.
    loop {
        match counter.add().get_blocking() {
            Ok(count) => break assert!(count >= 1),
            Err(error) => assert!(matches!(error, Error::ActorUnavailable { .. }), "{error}"),
        }
    }
    assert_ne!(counter.node().get_blocking().unwrap(), node);
    let result = once.add().get_blocking();
    assert_eq!(result.is_err(), other == node, "{result:?}");
}

#[test]
fn a_dead_owner_is_an_error_and_not_a_hang() {
    let cluster = TestCluster::start(1, 2).unwrap();
    let _driver = join(&cluster);
    let counter = Counter::remote();
    let started = Started::new();
    let lent = counter.lend(started.path()).get_blocking().unwrap();
    started.wait();
    counter.actor().kill();
    let error = lent[0].get_blocking().unwrap_err();
    assert!(matches!(error, Error::OwnerDied { .. }), "{error}");
}

#[test]
fn a_job_ends_with_its_driver() {
    let cluster = TestCluster::start(1, 2).unwrap();
    let started = Started::new();
    let driver = join(&cluster);
    let _stuck = starts_a_child_and_stays::remote(started.path());
    started.wait();
    let pids = std::fs::read_to_string(started.path()).unwrap();
    drop(driver);
    for pid in pids.split(' ') {
        assert!(wait_for_end(pid.parse().unwrap(), LIMIT), "process {pid} outlived its job");
    }
}

#[test]
fn a_detached_actor_outlives_its_driver() {
    let cluster = TestCluster::start(1, 2).unwrap();
    {
        let _driver =
            Local::from(wingbeat::init_at(cluster.address()).token(&cluster.token().unwrap()).namespace("shared"));
        let counter = Counter::options().name("counter").detached().remote();
        assert_eq!(counter.add().get_blocking().unwrap(), 1);
    }
    let _driver =
        Local::from(wingbeat::init_at(cluster.address()).token(&cluster.token().unwrap()).namespace("shared"));
    let counter = wingbeat::block_on(Counter::named("counter")).unwrap();
    assert_eq!(counter.add().get_blocking().unwrap(), 2);
    counter.actor().kill();
    assert!(matches!(counter.add().get_blocking(), Err(Error::ActorDied { .. })));
}

/// So long is a head waited for that does not come back.
const SOON: [(&str, &str); 2] = [("WINGBEAT_SILENCE_MS", "1000"), ("WINGBEAT_LOST_MS", "3000")];

#[test]
fn the_loss_of_the_head_ends_everything_with_a_reason() {
    if common::runs_again_with("the_loss_of_the_head_ends_everything_with_a_reason", &SOON) {
        return;
    }
    let mut cluster = TestCluster::start(1, 1).unwrap();
    let _driver = join(&cluster);
    let worker = own_pid::remote().get_blocking().unwrap();
    let started = Started::new();
    let stuck = starts_a_child_and_stays::remote(started.path());
    started.wait();
    cluster.kill_head().unwrap();
    let error = stuck.get_blocking().unwrap_err();
    assert!(matches!(error, Error::SessionEnded { .. }) && error.to_string().contains("head"), "{error}");
    assert!(wait_for_end(worker, LIMIT));
    assert!(!is_alive(worker));
}

#[test]
fn stop_ends_every_daemon() {
    let mut cluster = TestCluster::start(2, 1).unwrap();
    cluster.stop().unwrap();
}

#[test]
fn tasks_with_retries_left_say_that_the_cluster_was_stopped() {
    let mut cluster = TestCluster::start(2, 1).unwrap();
    let _driver = join(&cluster);
    let started = [Started::new(), Started::new()];
    let running: Vec<_> = started
        .iter()
        .map(|started| starts_a_child_and_stays::options().max_retries(100).remote(started.path()))
        .collect();
    started.iter().for_each(Started::wait);
    let queued = square::options().max_retries(100).remote(3);
    let dependent = square::remote(&queued);
    cluster.stop().unwrap();
    for object in running.iter().chain([&queued, &dependent]) {
        let error = object.get_timeout_blocking(LIMIT).unwrap_err();
        assert!(
            matches!(error, Error::SessionEnded { .. }) && error.to_string().contains("the cluster was stopped"),
            "{error}"
        );
    }
}

#[test]
fn a_wrong_token_is_refused_and_a_dead_address_says_so() {
    let cluster = TestCluster::start(0, 1).unwrap();
    let joining = |address: &str, token: &str| {
        wingbeat::block_on(wingbeat::init_at(address).token(token).global(false).into_future()).unwrap_err()
    };
    let error = joining(cluster.address(), "a guess that is wrong");
    assert!(matches!(error, Error::Refused { .. }) && error.to_string().contains("token"), "{error}");
    let error = joining("127.0.0.1:1", "a guess that is wrong");
    assert!(matches!(error, Error::Unreachable { .. }) && error.to_string().contains("127.0.0.1:1"), "{error}");
    let error = joining("nonsense", "a guess that is wrong");
    assert!(matches!(error, Error::Unreachable { .. }) && error.to_string().contains("host:port"), "{error}");
}

#[test]
fn the_command_line_says_what_is_wrong() {
    let cluster = TestCluster::start(0, 1).unwrap();
    let port = cluster.address().rsplit(':').next().unwrap();
    let second = cluster.command().unwrap().args(["head", "--port", port]).output().unwrap();
    assert!(!second.status.success());
    assert!(String::from_utf8_lossy(&second.stderr).contains("in use"), "{second:?}");
    let open = cluster
        .command()
        .unwrap()
        .env_remove("WINGBEAT_TOKEN_FILE")
        .args(["head", "--host", "0.0.0.0", "--port", "0"])
        .output();
    let open = open.unwrap();
    assert!(!open.status.success() && String::from_utf8_lossy(&open.stderr).contains("token"), "{open:?}");
    let nobody = cluster.command().unwrap().args(["worker", "--head", "127.0.0.1:1"]).output().unwrap();
    assert!(!nobody.status.success() && String::from_utf8_lossy(&nobody.stderr).contains("127.0.0.1:1"), "{nobody:?}");
}

#[test]
fn two_drivers_share_the_cpus() {
    let cluster = TestCluster::start(1, 1).unwrap();
    let first = join(&cluster);
    // Much longer than anything here may take.
    let time = 2 * LIMIT / 10_000;
    let flood: Vec<_> = (0..10_000).map(|_| takes::remote(time)).collect();
    flood[0].get_blocking().unwrap();
    let second = join(&cluster);
    assert_eq!(square::remote(4).get_blocking().unwrap(), 16);
    assert!(!flood[9_999].is_ready(), "the second driver waited until the first had no more use for the CPU");
    drop(second);
    drop(flood);
    drop(first);
}
