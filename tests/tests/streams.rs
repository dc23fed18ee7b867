//! Streams whose producers die, whose consumers are slow, and those of actors.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::path::PathBuf;
use std::time::Duration;

use common::Local;
use wingbeat::{Buffer, NodeId, ObjectRef, ObjectStream, current_node, put};
use wingbeat_tests::TestCluster;

/// Only what hangs takes so long.
const LIMIT: Duration = Duration::from_secs(60);
/// More than the limit for inline values.
const STORED: usize = 256 << 10;
/// Numbers that are so large.
const LENGTH: usize = STORED / 8;

fn dies_here() {
    let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
}

/// Items of `bytes` bytes. The first attempt makes `marker`, and dies before item `at`.
#[wingbeat::remote]
fn yields_and_dies(marker: PathBuf, at: u64, count: u64, bytes: usize) -> impl Iterator<Item = Vec<u8>> {
    (0..count).map(move |index| {
        if index == at && !marker.exists() {
            std::fs::write(&marker, "").unwrap();
            dies_here();
        }
        if index == at {
            std::fs::write(marker.with_extension("again"), "").unwrap();
        }
        vec![index as u8; bytes]
    })
}

#[test]
fn a_second_attempt_goes_on_while_its_consumer_has_not_taken_what_the_first_has_stored() {
    let _local = Local::start(2);
    let dir = tempfile::tempdir().unwrap();
    let marker = dir.path().join("died");
    let mut stream = yields_and_dies::remote(marker.clone(), 5, 10, STORED);
    for index in 0..10_u8 {
        // The second attempt has sent what is here already.
        while index == 1 && !marker.with_extension("again").exists() {
            std::thread::yield_now();
        }
        let item = stream.next_blocking().unwrap().unwrap();
        assert!(item.len() == STORED && item.iter().all(|byte| *byte == index), "item {index}");
    }
    assert!(stream.next_blocking().is_none());
}

#[derive(Debug, Clone, Copy)]
struct Case {
    at: u64,
    ahead: u32,
    bytes: usize,
    /// Takes nothing that the producer does not need to get to its death.
    is_slow: bool,
}

fn every_item_comes_once(case: Case) {
    let Case { at, ahead, bytes, is_slow } = case;
    let dir = tempfile::tempdir().unwrap();
    let marker = dir.path().join("died");
    let count = at + 40;
    let mut stream = yields_and_dies::options().stream_ahead(ahead).remote(marker.clone(), at, count, bytes);
    for index in 0..count {
        if is_slow && index + u64::from(ahead) > at {
            while !marker.exists() {
                std::thread::yield_now();
            }
        }
        let item = stream.next_blocking().unwrap_or_else(|| panic!("{case:?}: no item {index}"));
        let item = item.unwrap_or_else(|error| panic!("{case:?}: item {index}: {error}"));
        assert!(item.len() == bytes && item.iter().all(|byte| *byte == index as u8), "{case:?}: item {index}");
    }
    assert!(stream.next_blocking().is_none(), "{case:?}: an item too many");
    assert!(marker.exists(), "{case:?}: the producer did not die");
}

#[test]
fn a_producer_that_dies_goes_on_where_its_consumer_is() {
    let _local = Local::start(2);
    for at in [2, 15, 16, 20, 100] {
        for ahead in [1, 16, 100, u32::MAX] {
            for bytes in [8, STORED] {
                for is_slow in [false, true] {
                    every_item_comes_once(Case { at, ahead, bytes, is_slow });
                }
            }
        }
    }
}

/// Six items, which are longer when the first attempt has died: before the fifth.
#[wingbeat::remote]
fn yields_longer_ones_again(marker: PathBuf) -> impl Iterator<Item = Buffer<u64>> {
    let is_again = marker.exists();
    (0..6).map(move |index| {
        if index == 4 && !is_again {
            std::fs::write(&marker, "").unwrap();
            dies_here();
        }
        vec![index; LENGTH + usize::from(is_again)].into()
    })
}

#[test]
fn items_that_a_consumer_reads_stay_when_the_next_attempt_makes_others() {
    let _local = Local::start(2);
    let dir = tempfile::tempdir().unwrap();
    let mut stream = yields_longer_ones_again::options().stream_ahead(2).remote(dir.path().join("died"));
    let items: Vec<Buffer<u64>> = std::iter::from_fn(|| stream.next_blocking()).map(Result::unwrap).collect();
    assert_eq!(items.len(), 6);
    for (index, item) in items.iter().enumerate() {
        assert!(item.is_elsewhere() && item.iter().all(|number| *number == index as u64), "item {index}");
        match index {
            // The fifth was asked for when these were taken.
            0..=2 => assert_eq!(item.len(), LENGTH, "item {index}"),
            // It was stored, and has perhaps not arrived.
            3 => {}
            _ => assert_eq!(item.len(), LENGTH + 1, "item {index}"),
        }
    }
}

#[wingbeat::remote]
fn yields_refs(count: u64) -> impl Iterator<Item = ObjectRef<u64>> {
    (0..count).map(|index| put(&index).unwrap())
}

#[test]
fn refs_in_items_live_as_long_as_they_are_held() {
    let _local = Local::start(1);
    let mut stream = yields_refs::remote(100);
    let mut refs = Vec::new();
    while let Some(item) = stream.next_blocking() {
        refs.push(item.unwrap());
    }
    drop(stream);
    let values = wingbeat::get_all_blocking(&refs).unwrap();
    assert_eq!(values, (0..100).collect::<Vec<_>>());
}

struct Source {
    made: u64,
}

#[wingbeat::actor]
impl Source {
    fn new() -> Self {
        Source { made: 0 }
    }
    fn numbers(&self) -> impl Iterator<Item = u64> + use<> {
        0..
    }
    fn borrowed(&mut self, count: u64) -> impl Iterator<Item = u64> {
        (0..count).map(|_| {
            self.made += 1;
            self.made
        })
    }
    async fn made(&self) -> u64 {
        self.made
    }
    fn adds(&mut self) -> u64 {
        self.made += 100;
        self.made
    }
}

struct Reader {
    step: u64,
}

#[wingbeat::actor(concurrency_groups(other = 1))]
impl Reader {
    fn new() -> Self {
        Reader { step: 1 }
    }
    fn numbers(&self) -> impl Iterator<Item = u64> {
        // It borrows the actor.
        (0..).map(|number| number * self.step)
    }
    fn one(&self) -> u64 {
        1
    }
}

fn takes(stream: &mut ObjectStream<u64>, count: u64) -> Vec<u64> {
    (0..count).map(|_| stream.next_blocking().unwrap().unwrap()).collect()
}

#[test]
fn other_calls_of_an_actor_go_on_while_a_stream_that_borrows_nothing_waits_for_its_consumer() {
    let _local = Local::start(1);
    let source = Source::remote();
    let mut streams: Vec<_> = (0..3).map(|_| source.numbers()).collect();
    assert_eq!(takes(&mut streams[0], 1), [0]);
    assert_eq!(source.adds().get_blocking().unwrap(), 100);
    assert_eq!(source.made().get_blocking().unwrap(), 100);
    for stream in &mut streams {
        let already = takes(stream, 40);
        assert!(already.windows(2).all(|pair| pair[0] + 1 == pair[1]), "{already:?}");
    }
    drop(streams);
    assert_eq!(source.adds().get_blocking().unwrap(), 200);
}

#[test]
fn readers_of_a_concurrent_actor_go_on_beside_an_untaken_stream() {
    let _local = Local::start(1);
    let reader = Reader::remote();
    let mut stream = reader.numbers();
    assert_eq!(takes(&mut stream, 1), [0]);
    assert_eq!(reader.one().get_blocking().unwrap(), 1);
    assert_eq!(takes(&mut stream, 40).len(), 40);
}

#[test]
fn a_stream_that_borrows_its_actor_keeps_it_until_it_is_taken_or_dropped() {
    let _local = Local::start(1);
    let source = Source::remote();
    let mut stream = source.borrowed(40);
    let made = source.made();
    assert_eq!(takes(&mut stream, 40), (1..=40).collect::<Vec<_>>());
    assert!(stream.next_blocking().is_none());
    assert_eq!(made.get_blocking().unwrap(), 40);
    drop(source.borrowed(1_000));
    assert!(source.adds().get_blocking().unwrap() < 1_000);
}

#[wingbeat::remote]
fn counts(to: u64) -> impl Iterator<Item = u64> {
    0..to
}

#[wingbeat::remote]
async fn counts_slowly(to: u64) -> impl futures::Stream<Item = u64> {
    futures::stream::iter(0..to)
}

#[wingbeat::remote]
fn doubles(x: u64) -> u64 {
    2 * x
}

/// Runs a task for each item of a stream that is ahead, with as many CPUs.
fn a_task_for_each_item(mut stream: ObjectStream<u64>) {
    let mut sum = 0;
    while let Some(item) = stream.next_blocking() {
        sum += doubles::remote(item.unwrap()).get_timeout_blocking(LIMIT).unwrap();
    }
    assert_eq!(sum, 380);
}

#[test]
fn a_stream_that_waits_for_its_consumer_lends_its_cpu() {
    let _local = Local::start(1);
    a_task_for_each_item(counts::options().stream_ahead(2).remote(20));
    a_task_for_each_item(counts_slowly::options().stream_ahead(2).remote(20));
}

/// Items of 1 MiB, with the node where they are made, and then an error.
#[wingbeat::remote]
fn large_items(count: u8) -> impl Iterator<Item = Result<(NodeId, Vec<u8>), String>> {
    let here = current_node().unwrap();
    let items = (0..count).map(move |index| Ok((here, vec![index; 1 << 20])));
    items.chain(std::iter::once_with(|| Err("no more".to_owned())))
}

/// Where an item was made, where it is read, and what is in it.
#[wingbeat::remote]
fn read_there((made, item): (NodeId, Vec<u8>)) -> (NodeId, NodeId, u64) {
    (made, current_node().unwrap(), item.iter().map(|byte| u64::from(*byte)).sum())
}

#[test]
fn a_large_item_goes_on_to_another_node_by_its_ref() {
    let mut cluster = TestCluster::start(0, 0).unwrap();
    for name in ["left", "right"] {
        cluster.add_node(&["--num-cpus", "1", "--resource", &format!("{name}=1")]).unwrap();
    }
    let _driver = Local::from(wingbeat::init_at(cluster.address()).token(&cluster.token().unwrap()));
    let mut stream = large_items::options().resource("left", 1.0).stream_ahead(1).remote(4);
    let mut read = Vec::new();
    for _ in 0..3 {
        let item = stream.next_ref_blocking().unwrap().unwrap();
        read.push(read_there::options().resource("right", 1.0).remote(item));
    }
    // The two ways to take an item do not get in each other's way.
    let (made, item) = stream.next_blocking().unwrap().unwrap();
    assert_eq!(item.iter().map(|byte| u64::from(*byte)).sum::<u64>(), 3 << 20);
    for (index, sum) in wingbeat::get_all_blocking(&read).unwrap().into_iter().enumerate() {
        let (at, there, sum) = sum;
        assert_eq!((at, sum), (made, (index as u64) << 20));
        assert_ne!(there, made);
    }
    let error = stream.next_ref_blocking().unwrap().unwrap_err();
    assert_eq!(error.application::<String>().as_deref(), Some("no more"));
    assert!(stream.next_ref_blocking().is_none());
}
