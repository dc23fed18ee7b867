//! Many arguments of ordinary sizes at once: more than a connection holds.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use common::Local;

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
