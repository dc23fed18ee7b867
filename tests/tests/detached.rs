//! Detached actors live on without their driver: on nodes that never had its program, and under the next head.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use common::Local;
use wingbeat::Error;
use wingbeat_tests::TestCluster;

/// Only a cluster that hangs takes so long.
const LIMIT: Duration = Duration::from_secs(120);
/// Says that this program is to be the driver, when the test starts itself again.
const DRIVER: &str = "WINGBEAT_TEST_DRIVER";
/// The driver makes the detached actor, or finds it.
const MAKES: &str = "makes";
const FINDS: &str = "finds";
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
    said_by_driver(cluster, &std::env::current_exe().unwrap(), test, MAKES);
}

/// What a driver has written to standard error when it has done this.
fn said_by_driver(cluster: &TestCluster, program: &Path, test: &str, what: &str) -> String {
    let mut driver = Command::new(program);
    driver.args(["--exact", test, "--nocapture"]).env(DRIVER, what).stdin(Stdio::null());
    driver.env("WINGBEAT_ADDRESS", cluster.address()).env("WINGBEAT_TOKEN", cluster.token().unwrap());
    let output = driver.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{said}");
    said
}

fn is_driver() -> bool {
    let Ok(what) = std::env::var(DRIVER) else { return false };
    let _driver = Local::from(wingbeat::init().namespace(NAMESPACE));
    if what == MAKES {
        let counter = Counter::options().name("counter").detached().max_restarts(10).remote();
        assert_eq!(counter.add().get_blocking().unwrap(), 1);
    } else {
        for _ in 0..2 {
            let counter = wingbeat::block_on(Counter::named("counter")).unwrap();
            assert!(counter.add().get_blocking().unwrap() > 1);
        }
        let counter = wingbeat::block_on(Counter::options().name("counter").get_or_create()).unwrap();
        assert!(counter.add().get_blocking().unwrap() > 3);
    }
    true
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

#[test]
fn a_program_of_another_build_than_the_actor_is_told_once() {
    if is_driver() {
        return;
    }
    let test = "a_program_of_another_build_than_the_actor_is_told_once";
    let cluster = TestCluster::start(1, 2).unwrap();
    a_driver_comes_and_goes(&cluster, test);
    let same = std::env::current_exe().unwrap();
    let told = "runs in another build";
    let said = said_by_driver(&cluster, &same, test, FINDS);
    assert!(!said.contains(told), "{said}");
    // What follows the program in its file changes nothing but what it is known by.
    let folder = tempfile::tempdir().unwrap();
    let other = folder.path().join("other");
    // By a process of its own: a file that a fork of this one has open for writing cannot be run.
    let mut copies = Command::new("sh");
    copies.args(["-c", "cp \"$0\" \"$1\" && echo >> \"$1\""]).arg(&same).arg(&other);
    assert!(copies.status().unwrap().success());
    let said = said_by_driver(&cluster, &other, test, FINDS);
    assert_eq!(said.matches(told).count(), 1, "{said}");
}

struct Table {
    rows: usize,
}

#[wingbeat::actor]
impl Table {
    fn new(rows: Vec<u8>) -> Self {
        Table { rows: rows.len() }
    }

    fn rows(&self) -> usize {
        self.rows
    }
}

#[test]
fn one_that_is_to_live_again_takes_no_argument_that_ends_with_its_program() {
    let cluster = TestCluster::start(1, 1).unwrap();
    let _driver = join(&cluster);
    let rows = vec![0; 200_000];
    let refused = Table::options().name("again").detached().max_restarts(1).remote(rows.clone());
    match refused.rows().get_blocking().unwrap_err() {
        Error::InvalidOption { option, why, .. } => assert!(option == "detached" && why.contains("100 KiB"), "{why}"),
        other => panic!("{other}"),
    }
    let small = Table::options().name("small").detached().max_restarts(1).remote(vec![0; 1_000]);
    assert_eq!(small.rows().get_blocking().unwrap(), 1_000);
    let once = Table::options().name("once").detached().remote(rows);
    assert_eq!(once.rows().get_blocking().unwrap(), 200_000);
}
