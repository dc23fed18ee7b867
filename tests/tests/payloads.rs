//! Many arguments of ordinary sizes at once: more than a connection holds.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use common::Local;
use wingbeat::{ObjectRef, get_all_blocking};
use wingbeat_tests::TestCluster;

#[wingbeat::remote]
fn length(data: Vec<u8>) -> usize {
    data.len()
}

#[wingbeat::remote]
fn bytes(count: usize) -> Vec<u8> {
    vec![3; count]
}

struct Sum(usize);

#[wingbeat::actor]
impl Sum {
    /// Begins when it may, with many calls before it.
    fn new(begin: std::path::PathBuf) -> Self {
        while !begin.exists() {
            std::thread::yield_now();
        }
        Sum(0)
    }

    fn add(&mut self, data: Vec<u8>) -> usize {
        self.0 += data.len();
        self.0
    }
}

#[test]
fn a_thousand_arguments_of_fifty_kilobytes_arrive() {
    let _local = Local::start(2);
    for (count, size) in [(1_000, 50_000), (5_000, 10_000), (500, 90 << 10)] {
        let lengths: Vec<_> = (0..count).map(|_| length::remote(vec![1; size])).collect();
        let lengths = wingbeat::get_all_blocking(&lengths).unwrap();
        assert_eq!(lengths, vec![size; count]);
    }
}

#[test]
fn a_thousand_results_of_ninety_kilobytes_arrive() {
    let _local = Local::start(2);
    let results: Vec<_> = (0..1_000).map(|_| bytes::remote(90 << 10)).collect();
    for result in wingbeat::get_all_blocking(&results).unwrap() {
        assert_eq!(result.len(), 90 << 10);
    }
}

#[test]
fn calls_that_wait_for_an_actor_to_begin_arrive_however_large_they_are_together() {
    let _local = Local::start(2);
    let dir = tempfile::tempdir().unwrap();
    let begin = dir.path().join("begin");
    let sum = Sum::remote(begin.clone());
    // Three hundred megabytes: more than a frame holds.
    let sums: Vec<_> = (0..3_200).map(|_| sum.add(vec![1; 95 << 10])).collect();
    std::fs::write(begin, "").unwrap();
    let sums = wingbeat::get_all_blocking(&sums).unwrap();
    assert_eq!(sums, (1..=3_200).map(|calls| calls * (95 << 10)).collect::<Vec<usize>>());
}

/// More than half of the [`small_stores`].
const MOST: usize = 14 << 20;

/// Nodes on which two tasks at a time run, but not with two such values in memory; each with a resource of its name.
fn small_stores(names: &[&str], env: &[(&str, &str)]) -> (TestCluster, Local) {
    let mut cluster = TestCluster::start(0, 0).unwrap();
    for name in names {
        let resource = format!("{name}=1000");
        let args = ["--num-cpus", "2", "--object-store-memory", "24MiB", "--resource", &resource];
        cluster.add_node_with(&args, env).unwrap();
    }
    let driver = Local::from(wingbeat::init_at(cluster.address()).token(&cluster.token().unwrap()));
    (cluster, driver)
}

fn made_on(name: &str, count: usize) -> Vec<ObjectRef<Vec<u8>>> {
    (0..count).map(|_| bytes::options().resource(name, 0.001).remote(MOST)).collect()
}

fn lengths_on(name: &str, values: &[ObjectRef<Vec<u8>>]) -> Vec<ObjectRef<usize>> {
    values.iter().map(|value| length::options().resource(name, 0.001).remote(value)).collect()
}

#[test]
fn values_above_half_of_a_store_have_their_turns_there() {
    let (_cluster, driver) = small_stores(&["here"], &[]);
    let values = made_on("here", 8);
    let lengths = lengths_on("here", &values);
    // Each of them from a thread of its own, at the same time.
    std::thread::scope(|scope| {
        let read = |value: &ObjectRef<Vec<u8>>| {
            let _entered = driver.session.enter();
            value.get_blocking().unwrap().len() == MOST
        };
        let reads: Vec<_> = values.iter().map(|value| scope.spawn(move || read(value))).collect();
        assert!(reads.into_iter().all(|read| read.join().unwrap()));
    });
    assert_eq!(get_all_blocking(&lengths).unwrap(), [MOST; 8]);
}

#[test]
fn values_above_half_of_two_stores_are_exchanged_between_them() {
    let (_cluster, _driver) = small_stores(&["here", "there"], &[]);
    let (here, there) = (made_on("here", 4), made_on("there", 4));
    let lengths = [lengths_on("there", &here), lengths_on("here", &there)].concat();
    assert_eq!(get_all_blocking(&lengths).unwrap(), [MOST; 8]);
}

#[wingbeat::remote]
fn sum_of_lengths(one: Vec<u8>, other: Vec<u8>) -> usize {
    one.len() + other.len()
}

#[test]
fn tasks_that_each_have_one_of_two_large_arguments_do_not_wait_for_each_other_for_good() {
    const PART: usize = 9 << 20;
    let (_cluster, _driver) = small_stores(&["here"], &[("WINGBEAT_ROOM_LIMIT_MS", "5000")]);
    let parts: Vec<_> = (0..8).map(|_| bytes::remote(PART)).collect();
    let sums: Vec<_> = parts.chunks(2).map(|pair| sum_of_lengths::remote(&pair[0], &pair[1])).collect();
    assert_eq!(get_all_blocking(&sums).unwrap(), [2 * PART; 4]);
}

#[test]
fn arguments_that_are_together_larger_than_the_store_are_refused_at_once() {
    let (_cluster, _driver) = small_stores(&["here"], &[("WINGBEAT_ROOM_LIMIT_MS", "3600000")]);
    let [one, other] = [bytes::remote(MOST), bytes::remote(MOST)];
    let refused = sum_of_lengths::remote(&one, &other).get_blocking().unwrap_err();
    assert!(refused.to_string().contains("all arguments of a task"), "{refused}");
}
