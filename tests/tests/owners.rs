//! What becomes of stored values whose owner, or the attempt that made them, is gone.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use common::{Local, Started};
use serde::{Deserialize, Serialize, Serializer};
use wingbeat::{Error, ObjectRef, get_all_blocking, put};
use wingbeat_tests::TestCluster;

/// Only what hangs takes so long.
const LIMIT: Duration = Duration::from_secs(60);
/// Says that this program is to be a driver, when the test starts itself again, and where it says that it is ready.
const DRIVER: &str = "WINGBEAT_TEST_DRIVER";
/// The store of the only node. Nothing goes to disk.
const STORE: &[&str] = &["--num-cpus", "2", "--object-store-memory", "64MiB", "--spill-limit", "0"];
/// No two of this fit.
const MOST: usize = 40 << 20;

struct Putter;

#[wingbeat::actor]
impl Putter {
    fn new() -> Self {
        Putter
    }
    fn put(&self, len: usize) -> Vec<ObjectRef<Vec<u8>>> {
        vec![put(&vec![7; len]).unwrap()]
    }
}

/// Its owner is whoever calls this.
#[wingbeat::remote]
fn zeros(len: usize) -> Vec<u8> {
    vec![0; len]
}

fn cluster() -> TestCluster {
    let env = [("WINGBEAT_OWNERS_MS", "50"), ("WINGBEAT_ADOPTED_MS", "300"), ("WINGBEAT_ROOM_LIMIT_MS", "1")];
    let mut cluster = TestCluster::with_env(0, 0, &env).unwrap();
    cluster.add_node_with(STORE, &env).unwrap();
    cluster
}

fn join(cluster: &TestCluster) -> Local {
    Local::from(wingbeat::init_at(cluster.address()).token(&cluster.token().unwrap()))
}

/// Waits until the store has room for as much as one owner had there.
fn wait_for_room() {
    let begun = Instant::now();
    loop {
        match put(&vec![1u8; MOST]) {
            Ok(_) => return,
            Err(Error::StoreFull { .. }) => assert!(begun.elapsed() < LIMIT, "the store stays full"),
            Err(error) => panic!("{error}"),
        }
    }
}

fn is_driver() -> bool {
    let Some(ready) = std::env::var_os(DRIVER) else { return false };
    let _driver = Local::from(wingbeat::init());
    let (mine, theirs) = (put(&vec![1u8; MOST / 2]).unwrap(), zeros::remote(MOST / 2));
    wingbeat::wait_blocking(vec![theirs.clone()], 1, None).unwrap();
    std::fs::write(ready, "").unwrap();
    loop {
        std::thread::park();
        let _ = (&mine, &theirs);
    }
}

#[test]
fn a_killed_driver_leaves_nothing_in_the_store() {
    if is_driver() {
        return;
    }
    let cluster = cluster();
    let ready = Started::new();
    let mut driver = Command::new(std::env::current_exe().unwrap());
    driver.args(["--exact", "a_killed_driver_leaves_nothing_in_the_store"]).env(DRIVER, ready.path());
    driver.env("WINGBEAT_ADDRESS", cluster.address()).env("WINGBEAT_TOKEN", cluster.token().unwrap());
    let mut driver = driver.stdin(Stdio::null()).stdout(Stdio::null()).spawn().unwrap();
    ready.wait();
    let _other = join(&cluster);
    assert!(matches!(put(&vec![1u8; MOST]), Err(Error::StoreFull { .. })), "its values are there while it lives");
    driver.kill().unwrap();
    driver.wait().unwrap();
    wait_for_room();
}

#[test]
fn a_session_that_ends_leaves_nothing_in_the_store() {
    let cluster = cluster();
    let first = join(&cluster);
    let kept = put(&vec![1u8; MOST]).unwrap();
    drop(first);
    let _second = join(&cluster);
    wait_for_room();
    drop(kept);
}

#[test]
fn an_actor_that_ended_leaves_nothing_in_the_store() {
    let cluster = cluster();
    let _driver = join(&cluster);
    let putter = Putter::remote();
    let inner = putter.put(MOST).get_blocking().unwrap().remove(0);
    assert_eq!(inner.get_blocking().unwrap().len(), MOST);
    putter.actor().kill();
    // Nobody refers to it any more.
    drop(inner);
    wait_for_room();
}

/// Its process and what it owns, which keeps the process.
#[wingbeat::remote(num_returns = 2)]
fn owns(len: usize) -> (u32, Vec<ObjectRef<Vec<u8>>>) {
    (std::process::id(), vec![put(&vec![7; len]).unwrap()])
}

#[test]
fn a_worker_process_that_dies_idle_leaves_nothing_in_the_store() {
    let cluster = cluster();
    let driver = join(&cluster);
    let (pid, refs) = owns::remote(MOST);
    let (pid, kept) = (pid.get_blocking().unwrap(), refs.get_blocking().unwrap());
    drop(refs);
    let is_idle = || {
        let state = wingbeat::block_on(driver.session.runtime().cluster_state()).unwrap();
        state.nodes.iter().all(|node| node.leases == 0)
    };
    while !is_idle() {
        std::thread::yield_now();
    }
    assert!(matches!(put(&vec![1u8; MOST]), Err(Error::StoreFull { .. })), "its value is there while it lives");
    let process = rustix::process::Pid::from_raw(pid as i32).unwrap();
    rustix::process::kill_process(process, rustix::process::Signal::KILL).unwrap();
    drop(kept);
    wait_for_room();
}

/// Bytes whose encoding ends the process while a file is not there yet.
#[derive(Deserialize)]
struct Mine(Vec<u8>, PathBuf);

impl Serialize for Mine {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if !self.1.exists() {
            std::fs::write(&self.1, "").unwrap();
            std::process::abort();
        }
        (&self.0, &self.1).serialize(serializer)
    }
}

#[wingbeat::remote(num_returns = 2)]
fn two_outputs(dir: PathBuf) -> (Vec<ObjectRef<u64>>, Mine) {
    let filler = put(&(std::process::id() as u64)).unwrap();
    // The process dies when this is in the store, and before anybody hears of it.
    (vec![filler; 30_000], Mine(vec![1; 200_000], dir.join("tried")))
}

#[test]
fn a_second_attempt_replaces_what_the_first_left_in_the_store() {
    let _local = Local::start(1);
    let dir = tempfile::tempdir().unwrap();
    let (refs, bytes) = two_outputs::remote(dir.path().to_owned());
    assert_eq!(bytes.get_timeout_blocking(LIMIT).unwrap().0.len(), 200_000);
    let refs = refs.get_timeout_blocking(LIMIT).unwrap();
    // They are of the process that gave them, and not of the one that died.
    assert!(refs[0].get_timeout_blocking(LIMIT).unwrap() > 0);
}

/// What cannot be encoded.
#[derive(Deserialize)]
struct Unencodable;

impl Serialize for Unencodable {
    fn serialize<S: Serializer>(&self, _: S) -> Result<S::Ok, S::Error> {
        Err(serde::ser::Error::custom("not today"))
    }
}

#[wingbeat::remote(num_returns = 2)]
fn large_and_bad() -> (Vec<u8>, Unencodable) {
    (vec![1; 8 << 20], Unencodable)
}

#[test]
fn a_task_that_fails_while_its_outputs_are_stored_leaves_none_of_them() {
    let cluster = cluster();
    let _driver = join(&cluster);
    for _ in 0..20 {
        let (large, bad) = large_and_bad::remote();
        let error = bad.get_timeout_blocking(LIMIT).err().unwrap();
        assert!(error.to_string().contains("not today"), "{error}");
        assert!(large.get_timeout_blocking(LIMIT).is_err());
    }
    wait_for_room();
}

#[wingbeat::remote]
fn waits_for(path: PathBuf) -> u64 {
    while !Path::new(&path).exists() {
        std::thread::yield_now();
    }
    3
}

#[wingbeat::remote]
fn triple(x: u64) -> u64 {
    3 * x
}

struct Holder(u64);

#[wingbeat::actor]
impl Holder {
    fn new(value: u64) -> Self {
        Holder(value)
    }
    fn value(&self) -> u64 {
        self.0
    }
}

#[test]
fn an_actor_whose_argument_is_not_there_yet_lends_its_cpu_to_the_task_that_makes_it() {
    let _local = Local::start(1);
    let open = Started::new();
    let first = waits_for::remote(open.path());
    let value = triple::remote(&first);
    let holders: Vec<_> = (0..3).map(|_| Holder::options().num_cpus(1.0).remote(&value)).collect();
    std::fs::write(open.path(), "").unwrap();
    for holder in holders {
        assert_eq!(holder.value().get_timeout_blocking(LIMIT).unwrap(), 9);
        holder.actor().kill();
    }
    assert_eq!(get_all_blocking(&[first, value]).unwrap(), [3, 9]);
}
