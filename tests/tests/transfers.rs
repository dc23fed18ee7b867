//! Objects on their way between nodes: many at once, both ways, over connections that idle, break or fall silent.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on fails")]

mod common;

use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::Duration;

use common::Local;
use rustix::process::{Pid, Signal, kill_process};
use wingbeat::{Error, ObjectRef, get_all_blocking, wait_blocking};
use wingbeat_tests::hosts::{HostProcess, Hosts};
use wingbeat_tests::{TestCluster, poll};

/// Only something that hangs takes so long.
const LIMIT: Duration = Duration::from_secs(180);

/// Bytes that are stored, and not sent with messages.
const STORED: u64 = 110_000;

#[wingbeat::remote]
fn bytes(n: u64, byte: u8) -> Vec<u8> {
    vec![byte; n as usize]
}

#[wingbeat::remote]
fn sum(data: Vec<u8>) -> u64 {
    data.iter().map(|byte| u64::from(*byte)).sum()
}

#[wingbeat::remote]
fn sum_of_all(parts: Vec<ObjectRef<Vec<u8>>>) -> u64 {
    let parts = get_all_blocking(&parts).unwrap();
    parts.iter().flatten().map(|byte| u64::from(*byte)).sum()
}

fn join(cluster: &TestCluster) -> Local {
    Local::from(wingbeat::init_at(cluster.address()).token(&cluster.token().unwrap()))
}

/// Nodes with a resource of their names each, and a driver that uses the first one's store. The variables are in the
/// environment of the head, too.
fn cluster_of(names: &[&str], env: &[(&str, &str)]) -> (TestCluster, Local) {
    let mut cluster = TestCluster::with_env(0, 0, env).unwrap();
    let mut driver = None;
    for name in names {
        let resource = format!("{name}=1000");
        cluster.add_node(&["--num-cpus", "2", "--resource", &resource]).unwrap();
        // While it joins there is one node.
        driver.get_or_insert_with(|| join(&cluster));
    }
    (cluster, driver.unwrap())
}

/// So many objects on the node of this name.
fn made_on(name: &str, count: usize) -> Vec<ObjectRef<Vec<u8>>> {
    let objects: Vec<_> = (0..count).map(|n| bytes::options().resource(name, 0.001).remote(STORED, n as u8)).collect();
    wait_blocking(objects.clone(), count, None).unwrap();
    objects
}

fn sum_of(count: usize) -> u64 {
    (0..count).map(|n| STORED * u64::from(n as u8)).sum()
}

/// Runs `work` beside the test, which fails if it takes too long.
fn in_time<T: Send + 'static>(driver: &Local, work: impl FnOnce() -> T + Send + 'static) -> T {
    let (done, ended) = mpsc::channel();
    let session = driver.session.clone();
    std::thread::spawn(move || {
        let _entered = session.enter();
        let _ = done.send(work());
    });
    ended.recv_timeout(LIMIT).expect("it hangs, or panicked")
}

fn open_files(pid: u32) -> usize {
    std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count()
}

fn threads(pid: u32) -> usize {
    std::fs::read_dir(format!("/proc/{pid}/task")).unwrap().count()
}

fn wait_until(what: &str, holds: impl Fn() -> bool) {
    let begun = std::time::Instant::now();
    while !holds() {
        assert!(begun.elapsed() < LIMIT, "{what}");
        std::thread::yield_now();
    }
}

/// Reads again as long as the holder is not reached in time, which a busy machine may need several times for.
fn once_it_is_reached<T>(read: impl Fn() -> wingbeat::Result<T>) -> T {
    let answer = || match read() {
        Err(Error::ObjectUnavailable { .. }) => None,
        answer => Some(answer.unwrap()),
    };
    poll(LIMIT, answer).expect("the holder is never reached")
}

#[test]
fn a_thousand_objects_of_another_node_are_fetched_at_once_over_a_few_connections() {
    const COUNT: usize = 1000;
    let (cluster, driver) = cluster_of(&["home", "far"], &[("WINGBEAT_TRANSFER_IDLE_MS", "100")]);
    let objects = made_on("far", COUNT);
    let holder = cluster.node_pid(1).unwrap();
    let before = open_files(holder);
    // Not dropped before the end: the driver would connect to the holder to have them deleted.
    let fetched = objects.clone();
    let total = in_time(&driver, move || {
        let all = get_all_blocking(&fetched).unwrap();
        all.iter().flatten().map(|byte| u64::from(*byte)).sum::<u64>()
    });
    assert_eq!(total, sum_of(COUNT));
    assert!(threads(holder) < 100, "{} threads", threads(holder));
    wait_until("idle connections are closed", || open_files(holder) <= before);
    drop(objects);
}

#[test]
fn two_nodes_that_fetch_from_each_other_at_once_both_end() {
    const COUNT: usize = 600;
    let (_cluster, driver) = cluster_of(&["home", "here", "there"], &[]);
    let (of_here, of_there) = (made_on("here", COUNT), made_on("there", COUNT));
    let here = sum_of_all::options().resource("here", 1.0).remote(of_there);
    let there = sum_of_all::options().resource("there", 1.0).remote(of_here);
    let sums = in_time(&driver, move || get_all_blocking(&[here, there]).unwrap());
    assert_eq!(sums, [sum_of(COUNT); 2]);
}

#[test]
fn a_store_that_is_smaller_than_what_is_fetched_spills_and_goes_on() {
    const COUNT: usize = 600;
    let mut cluster = TestCluster::start(0, 0).unwrap();
    cluster.add_node(&["--num-cpus", "1", "--resource", "far=1000"]).unwrap();
    let driver = join(&cluster);
    cluster.add_node(&["--num-cpus", "1", "--resource", "small=1", "--object-store-memory", "16MiB"]).unwrap();
    let objects = made_on("far", COUNT);
    let sums: Vec<_> =
        objects.iter().map(|object| sum::options().resource("small", 0.001).num_cpus(0.1).remote(object)).collect();
    let total = in_time(&driver, move || get_all_blocking(&sums).unwrap().iter().sum::<u64>());
    assert_eq!(total, sum_of(COUNT));
}

#[test]
fn a_reader_that_is_out_of_descriptors_fails_alone_and_loses_nothing() {
    use rustix::process::{Resource, Rlimit, getrlimit, prlimit};
    let limits = [("WINGBEAT_TRANSFER_REACH_MS", "300"), ("WINGBEAT_TRANSFER_IDLE_MS", "1")];
    let (cluster, driver) = cluster_of(&["home", "far", "third"], &limits);
    let object = bytes::options().resource("far", 1.0).max_retries(0).remote(STORED, 1);
    wait_blocking(vec![object.clone()], 1, None).unwrap();
    let reader = cluster.node_pid(0).unwrap();
    let pid = Pid::from_raw(reader as i32);
    // The reader has inherited the hard limit, and only root could raise one that was lowered.
    let maximum = getrlimit(Resource::Nofile).maximum;
    let set = |current| prlimit(pid, Resource::Nofile, Rlimit { current, maximum }).unwrap();
    let before = set(Some(3));
    let read = object.clone();
    let error = in_time(&driver, move || read.get_blocking().unwrap_err());
    assert!(matches!(error, Error::ObjectUnavailable { .. }), "{error}");
    let holder = &cluster.node_numbers().unwrap()[1];
    assert!(error.to_string().contains(holder.as_str()), "{error} does not name {holder}");
    assert!(error.is_system_failure());
    // Everybody else has it still, and the reader as soon as it can.
    let read = object.clone();
    let elsewhere = move || sum::options().resource("third", 1.0).remote(&read).get_blocking();
    assert_eq!(in_time(&driver, move || once_it_is_reached(elsewhere)), STORED);
    set(before.current);
    assert_eq!(in_time(&driver, move || once_it_is_reached(|| object.get_blocking()).len()), STORED as usize);
}

#[test]
fn an_idle_connection_that_the_holder_has_closed_is_replaced() {
    // The holder closes what is idle long before the reader does.
    let mut cluster = TestCluster::start(0, 0).unwrap();
    cluster.add_node(&["--num-cpus", "1"]).unwrap();
    let driver = join(&cluster);
    let far = ["--num-cpus", "1", "--resource", "far=1000"];
    cluster.add_node_with(&far, &[("WINGBEAT_TRANSFER_IDLE_MS", "1")]).unwrap();
    let objects = made_on("far", 20);
    in_time(&driver, move || {
        for (n, object) in objects.iter().enumerate() {
            assert_eq!(object.get_blocking().unwrap()[0], n as u8);
        }
    });
}

/// Stops a process, so that it answers nobody and its connections stay open.
fn stop(pid: u32) {
    kill_process(Pid::from_raw(pid as i32).unwrap(), Signal::STOP).unwrap();
}

fn resume(pid: u32) {
    kill_process(Pid::from_raw(pid as i32).unwrap(), Signal::CONT).unwrap();
}

#[test]
fn a_frozen_holder_is_not_waited_for_for_ever() {
    // The reader gives up long before the head would declare the holder dead.
    let limits = [
        ("WINGBEAT_TRANSFER_REACH_MS", "300"),
        ("WINGBEAT_TRANSFER_SILENCE_MS", "300"),
        ("WINGBEAT_DIAL_MS", "3000"),
        ("WINGBEAT_SILENCE_MS", "600000"),
    ];
    let (cluster, driver) = cluster_of(&["home", "far"], &limits);
    let (warm, object) = (made_on("far", 1).remove(0), made_on("far", 1).remove(0));
    assert_eq!(in_time(&driver, move || once_it_is_reached(|| warm.get_blocking()).len()), STORED as usize);
    let holder = cluster.node_pid(1).unwrap();
    stop(holder);
    let read = object.clone();
    let error = in_time(&driver, move || read.get_blocking().unwrap_err());
    resume(holder);
    assert!(matches!(error, Error::ObjectUnavailable { .. }), "{error}");
    assert_eq!(in_time(&driver, move || once_it_is_reached(|| object.get_blocking()).len()), STORED as usize);
}

#[test]
fn an_object_whose_only_holder_stays_frozen_is_made_again_on_another_node() {
    // The head declares the holder dead long before the reader would give up.
    let limits = [("WINGBEAT_TRANSFER_REACH_MS", "600000"), ("WINGBEAT_SILENCE_MS", "2000")];
    let (mut cluster, driver) = cluster_of(&["home", "far"], &limits);
    let (warm, object) = (made_on("far", 1).remove(0), made_on("far", 1).remove(0));
    assert_eq!(warm.get_blocking().unwrap().len() as u64, STORED);
    stop(cluster.node_pid(1).unwrap());
    cluster.add_node(&["--num-cpus", "2", "--resource", "far=1000"]).unwrap();
    assert_eq!(in_time(&driver, move || object.get_blocking().unwrap().len()), STORED as usize);
}

#[test]
fn a_node_that_dies_in_mid_transfer_is_replaced_by_another_copy() {
    let (mut cluster, driver) = cluster_of(&["home", "far", "third"], &[]);
    let object = bytes::options().resource("far", 1.0).max_retries(0).remote(64 << 20, 1);
    // A copy on the third node.
    assert_eq!(sum::options().resource("third", 1.0).remote(&object).get_blocking().unwrap(), 64 << 20);
    let read = object.clone();
    let reading = std::thread::spawn({
        let session = driver.session.clone();
        move || {
            let _entered = session.enter();
            read.get_blocking().unwrap().len()
        }
    });
    cluster.kill_node(1).unwrap();
    assert_eq!(in_time(&driver, move || reading.join().unwrap()), 64 << 20);
}

#[test]
fn a_store_says_why_a_value_is_too_large() {
    let driver = Local::from(wingbeat::init().num_cpus(1).object_store_memory(16 << 20));
    let error = wingbeat::put(&vec![0u8; 32 << 20]).unwrap_err();
    assert!(matches!(error, Error::ObjectTooLarge { .. }), "{error}");
    assert!(error.to_string().contains("spill space do not help"), "{error}");
    drop(driver);
}

#[test]
fn a_killed_node_leaves_no_spill_files() {
    let dir = tempfile::tempdir().unwrap();
    let mut cluster = TestCluster::start(0, 0).unwrap();
    let spill = dir.path().to_str().unwrap();
    cluster.add_node(&["--num-cpus", "1", "--object-store-memory", "16MiB", "--spill-dir", spill]).unwrap();
    let _driver = join(&cluster);
    let objects: Vec<_> = (0..8).map(|n| wingbeat::put(&vec![n as u8; 4 << 20]).unwrap()).collect();
    assert_eq!(objects[0].get_blocking().unwrap()[0], 0);
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    cluster.kill_node(0).unwrap();
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

/// Runs inside the driver's namespace when the test starts itself again there: the folder for signs.
const INSIDE: &str = "WINGBEAT_TEST_INSIDE";

const LARGE: u64 = 48 << 20;

#[test]
fn a_holder_that_leaves_the_network_in_mid_transfer_is_given_up_and_the_object_is_made_again() {
    if let Some(signs) = std::env::var_os(INSIDE) {
        return inside(Path::new(&signs));
    }
    let Some(hosts) = Hosts::new(3).unwrap() else {
        return;
    };
    let (address, _head) = hosts.head().unwrap();
    let _first = hosts.node(1, &address, &["--object-store-memory", "256MiB"]).unwrap();
    // 80 Mbit/s towards the driver.
    let interface = hosts.interface(1);
    let shaped = std::process::Command::new("ip")
        .args(["netns", "exec", &hosts.names[1], "tc", "qdisc", "add", "dev", &interface, "root"])
        .args(["tbf", "rate", "80mbit", "burst", "64kb", "latency", "100ms"])
        .status();
    assert!(shaped.is_ok_and(|status| status.success()), "`tc` cannot make the network slow: is it installed?");
    let signs = tempfile::tempdir().unwrap();
    let mut driver = hosts.on(0, &std::env::current_exe().unwrap());
    let name = "a_holder_that_leaves_the_network_in_mid_transfer_is_given_up_and_the_object_is_made_again";
    driver.args(["--exact", name, "--nocapture"]);
    hosts.join(driver.env(INSIDE, signs.path()), &address);
    let mut driver = HostProcess::spawn(&mut driver).unwrap();
    let sign = |name: &str| signs.path().join(name);
    wait_until("the object is made", || sign("made").exists());
    let _second = hosts.node(2, &address, &["--object-store-memory", "256MiB"]).unwrap();
    let sent = PathBuf::from(format!("/sys/class/net/{}/statistics/rx_bytes", hosts.port(1)));
    let sent = || std::fs::read_to_string(&sent).unwrap().trim().parse::<u64>().unwrap();
    let before = sent();
    std::fs::write(sign("go"), "").unwrap();
    wait_until("the transfer is under way", || sent() > before + LARGE / 8);
    assert!(hosts.cut(1));
    assert!(!sign("done").exists());
    let begun = std::time::Instant::now();
    let ended = loop {
        match driver.exit_status().unwrap() {
            Some(status) => break status,
            None => assert!(begun.elapsed() < LIMIT, "get hangs"),
        }
        std::thread::yield_now();
    };
    assert!(ended.success());
    assert!(sign("done").exists());
}

fn inside(signs: &Path) {
    wingbeat::init_blocking().unwrap();
    let object = bytes::remote(LARGE, 3);
    wait_blocking(vec![object.clone()], 1, None).unwrap();
    std::fs::write(signs.join("made"), "").unwrap();
    wait_until("the second node is there", || signs.join("go").exists());
    let data = object.get_blocking().unwrap();
    assert!(data.len() as u64 == LARGE && data.iter().all(|byte| *byte == 3));
    std::fs::write(signs.join("done"), "").unwrap();
    wingbeat::shutdown_blocking();
}
