//! Values outlive the process that owns them, as long as its node lives and somebody refers to them.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use common::{Local, Started};
use rustix::process::{Pid, Signal, kill_process};
use wingbeat::{Error, ObjectRef, put};
use wingbeat_tests::TestCluster;

/// Only what hangs takes so long.
const LIMIT: Duration = Duration::from_secs(60);
/// How long what nobody has registered is kept, and how often nodes ask whose objects they have.
const ENV: &[(&str, &str)] = &[("WINGBEAT_ADOPTED_MS", "2000"), ("WINGBEAT_OWNERS_MS", "50")];
/// Says that this program is to be a driver, when the test starts itself again, and where it says that it is ready.
const DRIVER: &str = "WINGBEAT_TEST_DRIVER";
const NAMESPACE: &str = "keepers";
/// The sizes of values: none, some that travel with messages, and one that is stored.
const SIZES: [usize; 4] = [0, 1 << 10, 50 << 10, 1 << 20];
/// No two of this fit.
const MOST: usize = 40 << 20;

type Bytes = Vec<u8>;

struct Putter;

#[wingbeat::actor]
impl Putter {
    fn new() -> Self {
        Putter
    }
    fn pid(&self) -> u32 {
        std::process::id()
    }
    fn put(&self, len: usize) -> Vec<ObjectRef<Bytes>> {
        vec![put(&vec![len as u8; len]).unwrap()]
    }
    /// Refs inside of a value, which is stored or not.
    fn put_nested(&self, outer: usize) -> Vec<ObjectRef<(Vec<ObjectRef<Bytes>>, Bytes)>> {
        let inner = SIZES.map(|len| put(&vec![len as u8; len]).unwrap()).to_vec();
        vec![put(&(inner, vec![1; outer])).unwrap()]
    }
    /// Refs of others inside of a value.
    fn wraps(&self, refs: Vec<ObjectRef<Bytes>>) -> Vec<ObjectRef<Vec<ObjectRef<Bytes>>>> {
        vec![put(&refs).unwrap()]
    }
    /// What a task and another actor have made for this one.
    fn has_made(&self, other: PutterHandle) -> Vec<ObjectRef<Bytes>> {
        let made = vec![ones::remote(1 << 20), other.ones(1 << 20)];
        wingbeat::wait_blocking(made.clone(), 2, None).unwrap();
        made
    }
    /// What a task on the other node has made, and has there.
    fn has_made_far(&self) -> Vec<ObjectRef<Bytes>> {
        let made = vec![ones::options().resource("far", 1.0).remote(1 << 20)];
        wingbeat::wait_blocking(made.clone(), 1, None).unwrap();
        made
    }
    fn ones(&self, len: usize) -> Bytes {
        vec![1; len]
    }
    /// A ref to what never comes.
    fn lends(&self, started: PathBuf) -> Vec<ObjectRef<Bytes>> {
        vec![stays::remote(started)]
    }
}

#[wingbeat::remote]
fn ones(len: usize) -> Bytes {
    vec![1; len]
}

#[wingbeat::remote]
fn stays(started: PathBuf) -> Bytes {
    std::fs::write(started, "").unwrap();
    loop {
        std::thread::park();
    }
}

#[wingbeat::remote]
fn lengths(refs: Vec<ObjectRef<Bytes>>) -> Vec<usize> {
    refs.iter().map(|one| one.get_timeout_blocking(LIMIT).unwrap().len()).collect()
}

/// Two nodes, the first of which has `near` and the second `far`, and a driver on the first.
fn cluster() -> (TestCluster, Local) {
    let mut cluster = TestCluster::with_env(0, 0, ENV).unwrap();
    for has in ["near=100", "far=100"] {
        let store = ["--object-store-memory", "64MiB", "--spill-limit", "0"];
        cluster.add_node_with(&[&["--num-cpus", "4", "--resource", has][..], &store].concat(), ENV).unwrap();
    }
    let driver = join(&cluster);
    (cluster, driver)
}

fn join(cluster: &TestCluster) -> Local {
    Local::from(wingbeat::init_at(cluster.address()).token(&cluster.token().unwrap()).namespace(NAMESPACE))
}

/// An actor on the second node.
fn far() -> PutterHandle {
    Putter::options().resource("far", 1.0).remote()
}

/// Kills the process of an actor, and waits until it is gone.
fn kill(actor: &PutterHandle) {
    kill_pid(actor.pid().get_blocking().unwrap());
}

fn kill_pid(pid: u32) {
    kill_process(Pid::from_raw(pid as i32).unwrap(), Signal::KILL).unwrap();
    let begun = Instant::now();
    while std::fs::exists(format!("/proc/{pid}")).unwrap() {
        assert!(begun.elapsed() < LIMIT, "process {pid} does not end");
        std::thread::yield_now();
    }
}

/// Waits until the store of the second node has room for as much as an owner had there. An actor that has put it, and its value.
fn put_when_there_is_room_far() -> (PutterHandle, Vec<ObjectRef<Bytes>>) {
    let begun = Instant::now();
    loop {
        let putter = far();
        match putter.put(MOST).get_blocking() {
            Ok(value) => return (putter, value),
            Err(error) => assert!(begun.elapsed() < LIMIT, "the store stays full: {error}"),
        }
    }
}

#[test]
fn values_of_a_killed_actor_are_read_by_its_driver_and_by_a_task_on_another_node() {
    let (_cluster, _driver) = cluster();
    for actor in [far(), Putter::remote()] {
        let refs: Vec<_> = SIZES.iter().map(|len| actor.put(*len).get_blocking().unwrap().remove(0)).collect();
        kill(&actor);
        // Nobody has read them before.
        let of_task = [lengths::remote(refs.clone()), lengths::options().resource("far", 1.0).remote(refs.clone())];
        for task in of_task {
            assert_eq!(task.get_timeout_blocking(LIMIT).unwrap(), SIZES);
        }
        for (one, len) in refs.iter().zip(SIZES) {
            assert_eq!(one.get_timeout_blocking(LIMIT).unwrap(), vec![len as u8; len]);
        }
    }
}

#[test]
fn refs_inside_a_value_outlive_its_owner_too() {
    let (_cluster, _driver) = cluster();
    let theirs = put(&vec![7u8; 1 << 20]).unwrap();
    for outer in [0, 1 << 20] {
        let (actor, other) = (far(), Putter::remote());
        let nested = actor.put_nested(outer).get_blocking().unwrap().remove(0);
        let of_other = other.put(1 << 10).get_blocking().unwrap();
        let wrapped = actor.wraps(vec![theirs.clone(), of_other[0].clone()]).get_blocking().unwrap().remove(0);
        kill(&actor);
        let (inner, filler) = nested.get_timeout_blocking(LIMIT).unwrap();
        assert_eq!(filler.len(), outer);
        // The steward has answered, and so has what the other's value is for, too.
        drop(of_other);
        kill(&other);
        drop(nested);
        assert_eq!(lengths::remote(inner).get_timeout_blocking(LIMIT).unwrap(), SIZES);
        let wrapped = wrapped.get_timeout_blocking(LIMIT).unwrap();
        assert_eq!(lengths::remote(wrapped).get_timeout_blocking(LIMIT).unwrap(), [1 << 20, 1 << 10]);
    }
}

#[test]
fn results_of_tasks_and_actors_outlive_their_owner_and_what_is_not_ready_fails() {
    let (_cluster, _driver) = cluster();
    let (actor, other) = (far(), Putter::remote());
    let made = actor.has_made(other).get_timeout_blocking(LIMIT).unwrap();
    let started = Started::new();
    let lent = actor.lends(started.path()).get_timeout_blocking(LIMIT).unwrap();
    started.wait();
    kill(&actor);
    for one in made {
        assert_eq!(one.get_timeout_blocking(LIMIT).unwrap().len(), 1 << 20);
    }
    let error = lent[0].get_timeout_blocking(LIMIT).unwrap_err();
    assert!(matches!(error, Error::OwnerDied { .. }), "{error}");
}

#[test]
fn the_drop_of_the_last_ref_frees_what_was_adopted() {
    let (_cluster, _driver) = cluster();
    let actor = far();
    let value = actor.put(MOST).get_blocking().unwrap().remove(0);
    kill(&actor);
    assert_eq!(value.get_timeout_blocking(LIMIT).unwrap().len(), MOST);
    assert!(far().put(MOST).get_blocking().is_err(), "its value is there while somebody refers to it");
    drop(value);
    let (actor, value) = put_when_there_is_room_far();
    // Of this, nobody keeps a ref.
    drop(value);
    kill(&actor);
    put_when_there_is_room_far();
}

#[test]
fn the_end_of_the_owners_node_is_the_end_of_its_values() {
    let (mut cluster, _driver) = cluster();
    let actor = far();
    let refs: Vec<_> = SIZES.iter().map(|len| actor.put(*len).get_blocking().unwrap().remove(0)).collect();
    // One is adopted before.
    kill(&actor);
    assert_eq!(refs[0].get_timeout_blocking(LIMIT).unwrap().len(), 0);
    let later = far();
    let other = later.put(1 << 20).get_blocking().unwrap().remove(0);
    cluster.kill_node(1).unwrap();
    for one in refs[1..].iter().chain([&other]) {
        let error = one.get_timeout_blocking(LIMIT).unwrap_err();
        assert!(matches!(error, Error::OwnerDied { .. }), "{error}");
    }
}

#[test]
fn an_adopted_value_whose_last_copy_is_lost_is_not_made_again() {
    let (mut cluster, _driver) = cluster();
    let actor = Putter::options().resource("near", 1.0).remote();
    let made = actor.has_made_far().get_timeout_blocking(LIMIT).unwrap().remove(0);
    kill(&actor);
    cluster.kill_node(1).unwrap();
    let error = made.get_timeout_blocking(LIMIT).unwrap_err();
    assert!(matches!(error, Error::ObjectLost { .. }), "{error}");
}

struct Keeper(Vec<ObjectRef<Bytes>>);

#[wingbeat::actor]
impl Keeper {
    fn new(refs: Vec<ObjectRef<Bytes>>) -> Self {
        Keeper(refs)
    }
    fn is_there(&self) -> bool {
        true
    }
    fn lengths(&self) -> Vec<usize> {
        self.0.iter().map(|one| one.get_timeout_blocking(LIMIT).unwrap().len()).collect()
    }
}

fn is_driver() -> bool {
    let Some(ready) = std::env::var_os(DRIVER) else { return false };
    let _driver = Local::from(wingbeat::init().namespace(NAMESPACE));
    let refs = SIZES.map(|len| put(&vec![len as u8; len]).unwrap()).to_vec();
    let keeper = Keeper::options().name("keeper").detached().remote(refs);
    assert!(keeper.is_there().get_blocking().unwrap());
    std::fs::write(ready, "").unwrap();
    loop {
        std::thread::park();
    }
}

#[test]
fn a_detached_actor_reads_what_its_killed_driver_had_put() {
    if is_driver() {
        return;
    }
    let (cluster, _driver) = cluster();
    let ready = Started::new();
    let mut driver = Command::new(std::env::current_exe().unwrap());
    driver.args(["--exact", "a_detached_actor_reads_what_its_killed_driver_had_put"]).env(DRIVER, ready.path());
    driver.env("WINGBEAT_ADDRESS", cluster.address()).env("WINGBEAT_TOKEN", cluster.token().unwrap());
    let mut driver = driver.stdin(Stdio::null()).stdout(Stdio::null()).spawn().unwrap();
    ready.wait();
    driver.kill().unwrap();
    driver.wait().unwrap();
    let keeper = wingbeat::block_on(Keeper::named("keeper")).unwrap();
    assert_eq!(keeper.lengths().get_timeout_blocking(LIMIT).unwrap(), SIZES);
    keeper.actor().kill();
}

type Lent = (u32, Vec<ObjectRef<Bytes>>, Vec<ObjectRef<Vec<ObjectRef<Bytes>>>>);

/// Its process, values of its own, and one in which it passes on what it was lent. Several of these run in as many processes.
#[wingbeat::remote]
fn lends_when(begun: PathBuf, go_on: PathBuf, lent: Vec<ObjectRef<Bytes>>) -> Lent {
    std::fs::write(begun, "").unwrap();
    while !go_on.exists() {
        std::thread::sleep(Duration::from_millis(5));
    }
    let own = SIZES.map(|len| put(&vec![len as u8; len]).unwrap()).to_vec();
    (std::process::id(), own, vec![put(&lent).unwrap()])
}

#[test]
fn a_worker_process_that_is_not_needed_any_more_ends_and_what_it_owned_is_read() {
    const PROCESSES: usize = 4;
    let env = [ENV, &[("WINGBEAT_IDLE_MS", "50")]].concat();
    let mut cluster = TestCluster::with_env(0, 0, &env).unwrap();
    cluster.add_node(&["--num-cpus", "1", "--object-store-memory", "64MiB"]).unwrap();
    let init = wingbeat::init_at(cluster.address()).token(&cluster.token().unwrap());
    let _driver = Local::from(init.log_to_driver(false));
    let go_on = Started::new();
    let lent = put(&vec![7u8; 50 << 10]).unwrap();
    let begun: Vec<Started> = (0..PROCESSES).map(|_| Started::new()).collect();
    let tasks: Vec<_> = begun
        .iter()
        .map(|begun| lends_when::options().num_cpus(0.25).remote(begun.path(), go_on.path(), vec![lent.clone()]))
        .collect();
    begun.iter().for_each(Started::wait);
    std::fs::write(go_on.path(), "").unwrap();
    let made: Vec<Lent> = tasks.iter().map(|task| task.get_timeout_blocking(LIMIT).unwrap()).collect();
    drop((tasks, lent));
    let begun = Instant::now();
    let is_alive = |(pid, _, _): &&Lent| std::fs::exists(format!("/proc/{pid}")).unwrap();
    while made.iter().filter(is_alive).count() > 1 {
        assert!(begun.elapsed() < LIMIT, "of more processes than CPUs, the others own something and stay");
        std::thread::sleep(Duration::from_millis(5));
    }
    for (_, own, lends) in &made {
        for (one, len) in own.iter().zip(SIZES) {
            assert_eq!(one.get_timeout_blocking(LIMIT).unwrap(), vec![len as u8; len]);
        }
        let lent = lends[0].get_timeout_blocking(LIMIT).unwrap();
        assert_eq!(lent[0].get_timeout_blocking(LIMIT).unwrap(), vec![7; 50 << 10]);
    }
}
