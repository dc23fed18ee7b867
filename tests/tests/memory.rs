//! A node whose memory runs short ends who takes it, and nobody else.
//!
//! The limit is pretended (`WINGBEAT_MEMORY_LIMIT`), so that no machine has to be filled; `containers` has a real one.
//! `WINGBEAT_TEST_HOGS=50` repeats the test of the hog so often.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::io::Write;
use std::path::{Path, PathBuf};

use common::Local;
use wingbeat::{CallOptions, Error, ErrorKind};
use wingbeat_tests::TestCluster;

const MIB: usize = 1 << 20;
const LIMIT: &str = "WINGBEAT_MEMORY_LIMIT";

fn cluster(limit_mib: usize, cpus: u32) -> (TestCluster, Local) {
    let limit = (limit_mib * MIB).to_string();
    let cluster = TestCluster::with_env(1, cpus, &[(LIMIT, &limit), ("WINGBEAT_MEMORY_CHECK_MS", "40")]).unwrap();
    let driver = Local::from(wingbeat::init_at(cluster.address()).token(&cluster.token().unwrap()));
    (cluster, driver)
}

/// Notes that somebody has begun, and answers with how often that is.
fn begins(file: &Path) -> usize {
    std::fs::File::options().create(true).append(true).open(file).unwrap().write_all(b".").unwrap();
    std::fs::read(file).unwrap().len()
}

/// Takes memory until it is ended.
fn eat() -> ! {
    let mut eaten = Vec::new();
    loop {
        if eaten.len() < 256 {
            eaten.push(vec![1u8; 8 * MIB]);
        }
        std::thread::yield_now();
    }
}

#[wingbeat::remote]
fn hog(file: PathBuf) -> usize {
    begins(&file);
    eat()
}

/// Takes memory only the first few times.
#[wingbeat::remote]
fn hog_at_first(file: PathBuf, times: usize) -> usize {
    let begun = begins(&file);
    if begun <= times { eat() } else { begun }
}

/// Has some memory of its own until the file is there.
#[wingbeat::remote]
fn bystander(begun: PathBuf, until: PathBuf) -> usize {
    let own = vec![1u8; 8 * MIB];
    let times = begins(&begun);
    while !until.exists() {
        std::thread::yield_now();
    }
    times + own.len() - 8 * MIB
}

struct Tally {
    count: u32,
    _own: Vec<u8>,
}

#[wingbeat::actor(max_restarts = 1)]
impl Tally {
    fn new() -> Self {
        Tally { count: 0, _own: vec![1u8; 8 * MIB] }
    }

    fn next(&mut self) -> u32 {
        self.count += 1;
        self.count
    }

    fn eat_all(&mut self) -> u32 {
        eat()
    }
}

fn assert_names_the_hog(error: &Error, name: &str) {
    let Error::OutOfMemory { task, pid, shortage, .. } = error else { panic!("{error}") };
    assert!(task.contains(name), "{error}");
    assert_eq!(shortage.largest[0].pid, *pid, "{error}");
    assert!(shortage.largest[0].what.contains(name), "{error}");
    let text = error.to_string();
    assert!(text.contains("What helps") && text.contains(LIMIT), "{text}");
}

#[test]
fn who_takes_all_memory_is_ended_and_those_beside_it_are_not() {
    let rounds = std::env::var("WINGBEAT_TEST_HOGS").map_or(1, |rounds| rounds.parse().unwrap());
    let (_cluster, _driver) = cluster(256, 8);
    let tally = Tally::remote();
    for round in 1..=rounds {
        let dir = tempfile::tempdir().unwrap();
        let [done, hogs] = ["done", "hogs"].map(|name| dir.path().join(name));
        let begun = |n: usize| dir.path().join(format!("begun-{n}"));
        let beside = |n: usize| bystander::remote(begun(n), done.clone());
        // Older ones, and newer ones.
        let older: Vec<_> = (0..2).map(beside).collect();
        while !begun(0).exists() || !begun(1).exists() {
            std::thread::yield_now();
        }
        let hog = hog::options().max_memory_retries(0).remote(hogs.clone());
        while !hogs.exists() {
            std::thread::yield_now();
        }
        let newer: Vec<_> = (2..4).map(beside).collect();
        assert_names_the_hog(&hog.get_blocking().unwrap_err(), "hog");
        std::fs::write(&done, "").unwrap();
        for beside in older.into_iter().chain(newer) {
            assert_eq!(beside.get_blocking().unwrap(), 1, "round {round}: it was not ended");
        }
        assert_eq!(tally.next().get_blocking().unwrap(), round, "round {round}: it was not ended");
        println!("round {round} of {rounds}: the hog was ended, and nobody else");
    }
}

#[test]
fn a_node_that_is_short_of_memory_is_shown_until_there_is_enough() {
    let (_cluster, driver) = cluster(192, 2);
    let dir = tempfile::tempdir().unwrap();
    let shown = || {
        let state = wingbeat::block_on(driver.session.runtime().cluster_state()).unwrap();
        state.nodes.iter().find_map(|node| node.memory_short.clone())
    };
    assert_eq!(shown(), None);
    hog::options().max_memory_retries(0).remote(dir.path().join("hog")).get_blocking().unwrap_err();
    let text = shown().unwrap();
    assert!(text.contains("192") && text.contains(LIMIT), "{text}");
    while shown().is_some() {
        std::thread::yield_now();
    }
}

#[test]
fn what_is_ended_for_want_of_memory_is_tried_again_apart_from_other_retries() {
    let (_cluster, _driver) = cluster(192, 2);
    let dir = tempfile::tempdir().unwrap();
    let [first, second, third] = ["first", "second", "third"].map(|name| dir.path().join(name));
    let again = hog_at_first::options().max_retries(1).remote(first, 2);
    assert_eq!(again.get_blocking().unwrap(), 3, "it has begun three times");
    let twice = hog_at_first::options().max_memory_retries(1).remote(second.clone(), 9);
    let error = twice.get_blocking().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::OutOfMemory);
    assert_names_the_hog(&error, "hog_at_first");
    assert_eq!(std::fs::read(second).unwrap().len(), 2);
    // What may not run twice does not.
    let once = hog_at_first::options().max_retries(0).remote(third.clone(), 9);
    assert_eq!(once.get_blocking().unwrap_err().kind(), ErrorKind::OutOfMemory);
    assert_eq!(std::fs::read(third).unwrap().len(), 1);
}

#[test]
fn an_actor_that_takes_all_memory_lives_again_and_says_why_it_ended() {
    let (_cluster, _driver) = cluster(192, 2);
    let tally = Tally::remote();
    assert_eq!(tally.next().get_blocking().unwrap(), 1);
    let error = tally.eat_all().get_blocking().unwrap_err();
    assert!(matches!(error, Error::ActorUnavailable { .. }), "{error}");
    assert_names_the_hog(error.cause().unwrap(), "Tally");
    let patient = tally.with(CallOptions::new().max_retries(3));
    assert_eq!(patient.next().get_blocking().unwrap(), 1, "it lives again");
    let error = tally.eat_all().get_blocking().unwrap_err();
    assert!(matches!(error, Error::ActorDied { .. }), "{error}");
    assert_names_the_hog(error.cause().unwrap(), "Tally");
}
