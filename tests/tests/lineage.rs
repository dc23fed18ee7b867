//! Objects whose last copy died with its node are made again, with what they were made from.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::path::{Path, PathBuf};

use common::Local;
use wingbeat::testing::{TestCluster, TestNode};
use wingbeat::{Error, ObjectRef, get_all, put, wait_blocking};

/// Numbers that go to shared memory, not into messages.
const MANY: u64 = 100_000;

/// A line for every time that something ran, and the node's daemon.
fn note(log: &Path, what: &str) {
    use std::io::Write;
    // It names the node.
    let daemon = wingbeat_tests::daemon_of(std::process::id());
    let mut file = std::fs::OpenOptions::new().create(true).append(true).open(log).unwrap();
    writeln!(file, "{what} {daemon}").unwrap();
}

fn runs(log: &Path, what: &str) -> Vec<u32> {
    let text = std::fs::read_to_string(log).unwrap();
    text.lines().filter_map(|line| line.strip_prefix(what)?.trim().parse().ok()).collect()
}

#[wingbeat::remote]
fn numbers(from: u64, log: PathBuf) -> Vec<u64> {
    note(&log, "numbers");
    (from..from + MANY).collect()
}

#[wingbeat::remote]
fn doubled(numbers: Vec<u64>, log: PathBuf) -> Vec<u64> {
    note(&log, "doubled");
    numbers.into_iter().map(|n| 2 * n).collect()
}

#[wingbeat::remote(num_returns = 2)]
fn halves(log: PathBuf) -> (Vec<u64>, Vec<u64>) {
    note(&log, "halves");
    ((0..MANY).collect(), (MANY..2 * MANY).collect())
}

/// Two items, of which each goes to shared memory.
#[wingbeat::remote]
fn items(log: PathBuf) -> impl Iterator<Item = Vec<u64>> {
    note(&log, "items");
    (0..2).map(|item| vec![item; MANY as usize])
}

#[wingbeat::remote]
fn sum(numbers: Vec<u64>) -> u64 {
    numbers.iter().sum()
}

#[wingbeat::remote]
async fn sum_of_refs(parts: Vec<ObjectRef<Vec<u64>>>) -> u64 {
    get_all(&parts).await.unwrap().iter().flatten().sum()
}

struct Holder {
    numbers: Option<ObjectRef<Vec<u64>>>,
}

#[wingbeat::actor]
impl Holder {
    fn new() -> Self {
        Holder { numbers: None }
    }
    fn make(&mut self, log: PathBuf) -> u64 {
        let made = numbers::options().resource("far", 1.0).remote(0, log);
        let done = wait_blocking(vec![made.clone()], 1, None).unwrap();
        self.numbers = Some(made);
        done.0.len() as u64
    }
    fn lend(&self) -> Option<ObjectRef<Vec<u64>>> {
        self.numbers.clone()
    }
    fn fresh(&self, log: PathBuf) -> Vec<u64> {
        note(&log, "fresh");
        (0..MANY).collect()
    }
    fn total(&self, numbers: Vec<u64>) -> u64 {
        numbers.iter().sum()
    }
}

const SUM: u64 = MANY * (MANY - 1) / 2;

/// A node for small things, and two for what is to be lost.
struct Far {
    cluster: TestCluster,
    dir: tempfile::TempDir,
}

impl Far {
    fn new() -> Far {
        let far = TestNode::default().resource("far", 2.0);
        let cluster = TestCluster::builder().nodes(1).num_cpus(2).resource("home", 1.0).node(far.clone()).node(far);
        Far { cluster: cluster.start().unwrap(), dir: tempfile::tempdir().unwrap() }
    }

    fn log(&self) -> PathBuf {
        self.dir.path().join("runs")
    }

    /// Ends the node where `what` ran last.
    fn kill_where(&self, what: &str) {
        let daemon = *runs(&self.log(), what).last().unwrap();
        let node =
            (0..self.cluster.nodes()).find(|node| self.cluster.node_pid(*node).is_ok_and(|pid| pid == daemon)).unwrap();
        self.cluster.kill_node(node).unwrap();
    }
}

fn ready<T>(object: &ObjectRef<T>) {
    wait_blocking(vec![object.clone()], 1, None).unwrap();
}

#[test]
fn a_result_that_was_lost_is_made_again() {
    let far = Far::new();
    let object = numbers::options().resource("far", 1.0).remote(0, far.log());
    ready(&object);
    far.kill_where("numbers");
    assert_eq!(object.get_blocking().unwrap().iter().sum::<u64>(), SUM);
    assert_eq!(runs(&far.log(), "numbers").len(), 2);
}

#[test]
fn a_lost_argument_is_made_again_before_its_task_runs() {
    let far = Far::new();
    let object = numbers::options().resource("far", 1.0).remote(0, far.log());
    ready(&object);
    far.kill_where("numbers");
    assert_eq!(sum::remote(&object).get_blocking().unwrap(), SUM);
    assert_eq!(sum_of_refs::remote(vec![object]).get_blocking().unwrap(), SUM);
}

#[test]
fn what_a_lost_object_was_made_from_is_made_again_although_it_was_freed() {
    let far = Far::new();
    let object = {
        let first = numbers::options().resource("far", 1.0).remote(0, far.log());
        doubled::options().resource("far", 1.0).remote(first, far.log())
    };
    ready(&object);
    far.kill_where("doubled");
    assert_eq!(sum::remote(&object).get_blocking().unwrap(), 2 * SUM);
    assert_eq!(runs(&far.log(), "numbers").len(), 2);
    assert_eq!(runs(&far.log(), "doubled").len(), 2);
}

#[test]
fn the_outputs_that_are_left_stay_as_they_are() {
    let far = Far::new();
    let (low, high) = halves::options().resource("far", 1.0).remote(far.log());
    // The driver has a copy of one of them.
    let view = low.view_blocking().unwrap();
    ready(&high);
    far.kill_where("halves");
    assert_eq!(high.get_blocking().unwrap()[0], MANY);
    assert_eq!(low.get_blocking().unwrap()[..], view[..]);
}

#[test]
fn without_retries_it_is_lost_and_says_why() {
    let far = Far::new();
    let object = numbers::options().resource("far", 1.0).max_retries(0).remote(0, far.log());
    ready(&object);
    far.kill_where("numbers");
    let error = object.get_blocking().unwrap_err();
    assert!(matches!(&error, Error::ObjectLost { why, .. } if why.contains("cannot be made again")), "{error}");
}

#[test]
fn a_result_of_an_actor_is_lost_with_the_only_node_that_has_it() {
    let far = Far::new();
    // Neither lives of the actor nor retries of the call make it again.
    let holder = Holder::options().resource("far", 1.0).max_restarts(3).max_task_retries(3).remote();
    let object = holder.fresh(far.log());
    ready(&object);
    far.kill_where("fresh");
    let error = object.get_blocking().unwrap_err();
    assert!(matches!(error, Error::ObjectLost { .. }), "{error}");
    assert_eq!(holder.fresh(far.log()).get_blocking().unwrap().iter().sum::<u64>(), SUM, "it lives again");
    assert_eq!(runs(&far.log(), "fresh").len(), 2);
}

#[test]
fn an_item_of_a_stream_is_lost_with_the_only_node_that_has_it() {
    let far = Far::new();
    let mut stream = items::options().resource("far", 1.0).remote(far.log());
    let item = stream.next_ref_blocking().unwrap().unwrap();
    let last = stream.next_ref_blocking().unwrap().unwrap();
    assert!(stream.next_ref_blocking().is_none());
    // One of them has a copy where the driver is.
    assert_eq!(last.get_blocking().unwrap()[0], 1);
    far.kill_where("items");
    let error = item.get_blocking().unwrap_err();
    assert!(matches!(error, Error::ObjectLost { .. }), "{error}");
    assert_eq!(last.get_blocking().unwrap()[0], 1);
    assert_eq!(runs(&far.log(), "items").len(), 1);
}

#[test]
fn a_value_that_was_put_is_there_while_one_of_the_nodes_that_have_it_is() {
    let mut cluster = wingbeat_tests::TestCluster::start(1, 1).unwrap();
    let _driver = Local::from(wingbeat::init_at(cluster.address()).token(&cluster.token().unwrap()));
    cluster.add_node(&["--num-cpus", "1", "--resource", "far=1"]).unwrap();
    let value = put(&vec![7u64; MANY as usize]).unwrap();
    // It is copied to whoever reads it.
    assert_eq!(sum::options().resource("far", 1.0).remote(&value).get_blocking().unwrap(), 7 * MANY);
    cluster.kill_node(0).unwrap();
    assert_eq!(value.get_blocking().unwrap(), vec![7u64; MANY as usize]);
    assert_eq!(sum::remote(&value).get_blocking().unwrap(), 7 * MANY);
}

#[test]
fn an_object_of_another_owner_is_made_again_for_its_borrower() {
    let far = Far::new();
    let holder = Holder::options().resource("home", 1.0).remote();
    assert_eq!(holder.make(far.log()).get_blocking().unwrap(), 1);
    let object = holder.lend().get_blocking().unwrap().unwrap();
    far.kill_where("numbers");
    assert_eq!(holder.total(&object).get_blocking().unwrap(), SUM);
    assert_eq!(object.get_blocking().unwrap().iter().sum::<u64>(), SUM);
    assert_eq!(runs(&far.log(), "numbers").len(), 2);
}

#[test]
fn a_driver_whose_node_dies_goes_on_with_another() {
    let mut cluster = wingbeat_tests::TestCluster::start(1, 1).unwrap();
    let _driver = Local::from(wingbeat::init_at(cluster.address()).token(&cluster.token().unwrap()));
    let lost = put(&vec![7u64; MANY as usize]).unwrap();
    cluster.add_node(&["--num-cpus", "1"]).unwrap();
    cluster.kill_node(0).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let made = numbers::remote(0, dir.path().join("runs"));
    assert_eq!(made.get_blocking().unwrap().iter().sum::<u64>(), SUM);
    let again = put(&vec![7u64; MANY as usize]).unwrap();
    assert_eq!(sum::remote(&again).get_blocking().unwrap(), 7 * MANY);
    let error = lost.get_blocking().unwrap_err();
    assert!(matches!(error, Error::ObjectLost { .. }), "{error}");
}
