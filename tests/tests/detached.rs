//! Detached actors live on without their driver: on nodes that never had its program, and under the next head.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use common::Local;
use wingbeat::Error;
use wingbeat_tests::TestCluster;

/// Only a cluster that hangs takes so long.
const LIMIT: Duration = Duration::from_secs(120);
/// Says that this program is to be the driver, when the test starts itself again.
const DRIVER: &str = "WINGBEAT_TEST_DRIVER";
const NAMESPACE: &str = "keepers";

struct Counter {
    count: u64,
}

#[wingbeat::actor]
impl Counter {
    fn new() -> Self {
        Counter { count: 0 }
    }

    fn add(&mut self) -> u64 {
        self.count += 1;
        self.count
    }
}

/// Runs a driver of its own that makes the detached actor, calls it and ends: then nothing of its program is left but
/// what the cluster keeps.
fn a_driver_comes_and_goes(cluster: &TestCluster, test: &str) {
    let mut driver = Command::new(std::env::current_exe().unwrap());
    driver.args(["--exact", test, "--nocapture"]).env(DRIVER, "1").stdin(Stdio::null());
    driver.env("WINGBEAT_ADDRESS", cluster.address()).env("WINGBEAT_TOKEN", cluster.token().unwrap());
    let output = driver.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

fn is_driver() -> bool {
    let is_driver = std::env::var_os(DRIVER).is_some();
    if is_driver {
        let _driver = Local::from(wingbeat::init().namespace(NAMESPACE));
        let counter = Counter::options().name("counter").detached().max_restarts(10).remote();
        assert_eq!(counter.add().get_blocking().unwrap(), 1);
    }
    is_driver
}

fn join(cluster: &TestCluster) -> Local {
    Local::from(wingbeat::init_at(cluster.address()).token(&cluster.token().unwrap()).namespace(NAMESPACE))
}

/// Waits until the head shows this of its actors.
fn wait_for_actors(cluster: &TestCluster, what: &str, is_so: impl Fn(&[serde_json::Value]) -> bool) {
    let begun = Instant::now();
    loop {
        let state = cluster.state().unwrap();
        let actors = state["actors"].as_array().unwrap();
        if is_so(actors) {
            return;
        }
        assert!(begun.elapsed() < LIMIT, "{what}: {actors:?}");
    }
}

fn lives_again(actors: &[serde_json::Value]) -> bool {
    assert!(!actors.is_empty(), "the actor was given up");
    actors[0]["state"] == "alive" && actors[0]["restarts"].as_u64() > Some(0)
}

#[test]
fn an_actor_lives_again_on_a_node_that_never_had_its_program() {
    if is_driver() {
        return;
    }
    let mut cluster = TestCluster::start(1, 1).unwrap();
    a_driver_comes_and_goes(&cluster, "an_actor_lives_again_on_a_node_that_never_had_its_program");
    cluster.add_node(&["--num-cpus", "1"]).unwrap();
    cluster.kill_node(0).unwrap();
    wait_for_actors(&cluster, "it does not live again", lives_again);
    let _driver = join(&cluster);
    let counter = wingbeat::block_on(Counter::named("counter")).unwrap();
    assert_eq!(counter.add().get_blocking().unwrap(), 1, "a new life counts from the beginning");
}

#[test]
fn an_actor_lives_again_under_the_next_head() {
    if is_driver() {
        return;
    }
    let mut cluster = TestCluster::with_journal(1, 1).unwrap();
    a_driver_comes_and_goes(&cluster, "an_actor_lives_again_under_the_next_head");
    cluster.kill_head().unwrap();
    cluster.kill_node(0).unwrap();
    cluster.start_head().unwrap();
    cluster.add_node(&["--num-cpus", "1"]).unwrap();
    wait_for_actors(&cluster, "it does not live again", |actors| !actors.is_empty() && lives_again(actors));
    let _driver = join(&cluster);
    let counter = wingbeat::block_on(Counter::named("counter")).unwrap();
    assert_eq!(counter.add().get_blocking().unwrap(), 1);
    // Its program goes with it.
    let programs = cluster.journal().with_file_name("journal.programs");
    assert_eq!(std::fs::read_dir(&programs).unwrap().count(), 1);
    counter.actor().kill();
    assert!(matches!(counter.add().get_blocking(), Err(Error::ActorDied { .. })));
    let begun = Instant::now();
    while programs.exists() {
        assert!(begun.elapsed() < LIMIT, "{programs:?} is still there");
        std::thread::yield_now();
    }
}

/// A head that took over the journal of one which was killed after the driver `name` had left its actor there; no node has joined yet.
fn under_the_next_head(name: &str) -> TestCluster {
    let mut cluster = TestCluster::with_journal(1, 1).unwrap();
    a_driver_comes_and_goes(&cluster, name);
    cluster.kill_head().unwrap();
    cluster.kill_node(0).unwrap();
    cluster.start_head().unwrap();
    cluster
}

#[test]
fn an_actor_goes_on_when_only_the_head_is_started_again() {
    if is_driver() {
        return;
    }
    let mut cluster = TestCluster::with_journal(1, 1).unwrap();
    a_driver_comes_and_goes(&cluster, "an_actor_goes_on_when_only_the_head_is_started_again");
    cluster.kill_head().unwrap();
    cluster.start_head().unwrap();
    let _driver = join(&cluster);
    let counter = wingbeat::block_on(Counter::named("counter")).unwrap();
    assert_eq!(counter.add().get_blocking().unwrap(), 2);
}

#[test]
fn an_actor_that_is_called_before_it_is_back_answers_when_it_is() {
    if is_driver() {
        return;
    }
    let mut cluster = under_the_next_head("an_actor_that_is_called_before_it_is_back_answers_when_it_is");
    let _driver = join(&cluster);
    let counter = wingbeat::block_on(Counter::named("counter")).unwrap();
    let early = counter.add();
    cluster.add_node(&["--num-cpus", "1"]).unwrap();
    assert_eq!(early.get_blocking().unwrap(), 1);
}

#[test]
fn an_actor_that_is_killed_before_it_is_back_stays_dead() {
    if is_driver() {
        return;
    }
    let cluster = under_the_next_head("an_actor_that_is_killed_before_it_is_back_stays_dead");
    let _driver = join(&cluster);
    let counter = wingbeat::block_on(Counter::named("counter")).unwrap();
    let early = counter.add();
    counter.actor().kill();
    assert!(matches!(early.get_blocking(), Err(Error::ActorDied { .. })));
    assert!(matches!(wingbeat::block_on(Counter::named("counter")), Err(Error::ActorNotFound { .. })));
}
