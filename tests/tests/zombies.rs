//! What is told to end before it has begun: it never comes to life, and what it held is free again.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use common::Local;
use wingbeat::{Bundle, placement_group};
use wingbeat_tests::{is_alive, is_root};

/// Only something that hangs takes so long.
const LIMIT: Duration = Duration::from_secs(90);
const ROUNDS: u64 = 30;

/// Says that it has come to life, by a file with its process's id as its name.
struct Alive;

#[wingbeat::actor]
impl Alive {
    fn new(dir: PathBuf) -> Self {
        std::fs::write(dir.join(std::process::id().to_string()), "").unwrap();
        Alive
    }
    fn hello(&self) -> u32 {
        std::process::id()
    }
}

#[wingbeat::remote]
fn comes_to_life(dir: PathBuf) {
    std::fs::write(dir.join(std::process::id().to_string()), "").unwrap();
    loop {
        std::thread::park();
    }
}

/// Those that came to life so far.
fn lives(dir: &Path) -> Vec<u32> {
    let names = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut pids: Vec<u32> = names.map(|name| name.parse().unwrap()).collect();
    pids.sort_unstable();
    pids
}

/// Waits until the nodes have everything free again.
fn wait_until_all_is_free(local: &Local) {
    let begun = Instant::now();
    loop {
        let state = wingbeat::block_on(local.session.runtime().cluster_state()).unwrap();
        if state.nodes.iter().all(|node| node.leases == 0 && node.available == node.info.resources) {
            return;
        }
        assert!(begun.elapsed() < LIMIT, "not everything is free again: {:?}", state.nodes);
        std::thread::yield_now();
    }
}

/// Everything is free, nothing that ever lived is alive, and nothing comes to life any more while the whole cluster
/// works for somebody else.
fn assert_that_nothing_is_left(local: &Local, dir: &Path) {
    wait_until_all_is_free(local);
    let lived = lives(dir);
    for pid in &lived {
        assert!(!is_alive(*pid), "pid {pid} lives, and nobody knows");
    }
    let other = tempfile::tempdir().unwrap();
    let all = Alive::options().num_cpus(4.0).num_gpus(4.0).remote(other.path().to_owned());
    assert_eq!(vec![all.hello().get_blocking().unwrap()], lives(other.path()));
    assert_eq!(lives(dir), lived, "something came to life after everything was free");
}

fn spin(time: Duration) {
    let begun = Instant::now();
    while begun.elapsed() < time {
        std::hint::spin_loop();
    }
}

/// Starts processes that nobody but the kernel reaps, and stays.
struct Namespace {
    started: Option<std::process::Child>,
}

#[wingbeat::actor]
impl Namespace {
    fn new() -> Self {
        Namespace { started: None }
    }
    fn start(&mut self, started: PathBuf) {
        let script = "sleep 1000 & sleep 1000 & echo > $STARTED.tmp && mv $STARTED.tmp $STARTED; wait";
        // Not in the process group of the actor, with which they would end at once.
        let mut command = std::process::Command::new("setsid");
        command.args(["unshare", "--pid", "--fork", "sh", "-c", script]).env("STARTED", &started);
        self.started = Some(command.spawn().unwrap());
        while !started.exists() {
            std::thread::yield_now();
        }
    }
}

#[test]
fn a_gpu_is_free_again_after_processes_in_a_namespace_of_their_own() {
    if !is_root().unwrap() {
        return;
    }
    let local = Local::from(wingbeat::init().num_cpus(4).pretend_gpus(4));
    let dir = tempfile::tempdir().unwrap();
    let actor = Namespace::options().num_gpus(4.0).remote();
    actor.start(dir.path().join("started")).get_blocking().unwrap();
    actor.actor().kill();
    wait_until_all_is_free(&local);
}

#[test]
fn an_actor_that_is_killed_at_once_leaves_nothing() {
    let local = Local::from(wingbeat::init().num_cpus(4).pretend_gpus(4));
    let dir = tempfile::tempdir().unwrap();
    for round in 0..ROUNDS {
        let actor = Alive::options().num_gpus(0.5).remote(dir.path().to_owned());
        spin(Duration::from_micros(round % 3 * 500));
        actor.actor().kill();
    }
    assert_that_nothing_is_left(&local, dir.path());
}

/// In a cluster whose daemons are processes of their own, and at more moments: so it was that most were left over.
#[test]
fn an_actor_that_is_killed_at_once_leaves_nothing_on_a_node_apart() {
    let mut cluster = wingbeat_tests::TestCluster::start(0, 1).unwrap();
    cluster.add_node(&["--num-cpus", "4", "--pretend-gpus", "4"]).unwrap();
    let local = Local::from(wingbeat::init_at(cluster.address()).token(&cluster.token().unwrap()));
    let (dir, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    // Its program is there, and so is a process of it.
    let first = Alive::remote(other.path().to_owned());
    first.hello().get_blocking().unwrap();
    for round in 0..300 {
        let actor = Alive::options().num_gpus(0.5).remote(dir.path().to_owned());
        spin(Duration::from_micros(round % 30 * 100));
        actor.actor().kill();
    }
    drop(first);
    assert_that_nothing_is_left(&local, dir.path());
}

#[test]
fn an_actor_that_is_killed_at_once_and_may_restart_lives_once() {
    let local = Local::from(wingbeat::init().num_cpus(4).pretend_gpus(4));
    let dir = tempfile::tempdir().unwrap();
    for round in 0..ROUNDS {
        let actor = Alive::options().max_restarts(1).num_gpus(1.0).remote(dir.path().to_owned());
        spin(Duration::from_micros(round % 3 * 500));
        actor.actor().kill_may_restart();
        // Calls of the life that ended may fail; a later one finds the next life.
        let begun = Instant::now();
        let pid = loop {
            match actor.hello().get_blocking() {
                Ok(pid) => break pid,
                Err(error) => assert!(begun.elapsed() < LIMIT, "no further life: {error}"),
            }
        };
        assert!(is_alive(pid));
        actor.actor().kill();
    }
    assert_that_nothing_is_left(&local, dir.path());
}

#[test]
fn a_placement_group_that_is_removed_at_once_leaves_nothing() {
    let local = Local::from(wingbeat::init().num_cpus(4).pretend_gpus(4));
    let dir = tempfile::tempdir().unwrap();
    for round in 0..ROUNDS {
        let bundles = [Bundle::new().num_cpus(1.0).num_gpus(1.0), Bundle::new().num_cpus(1.0).num_gpus(0.5)];
        let group = placement_group(bundles).create_blocking().unwrap();
        let actor = Alive::options().num_cpus(1.0).num_gpus(1.0).in_bundle(&group, 0).remote(dir.path().to_owned());
        let task = comes_to_life::options().max_retries(0).in_bundle(&group, 1).remote(dir.path().to_owned());
        spin(Duration::from_micros(round % 5 * 500));
        group.remove_blocking().unwrap();
        drop((actor, task));
    }
    assert_that_nothing_is_left(&local, dir.path());
}
