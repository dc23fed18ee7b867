//! Programs that together send every kind of message, and check what they get.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, getpid, kill_process};
use wingbeat::{
    Bundle, Error, ObjectRef, PlacementStrategy, Session, block_on, get_all_blocking, placement_group, put,
};
use wingbeat_net::messages::ENDED_UNREPORTED;
use wingbeat_tests::TestCluster;

use crate::common::Local;

/// Only what hangs takes so long; the watchdog of the cell is the one that says so.
const LIMIT: Duration = Duration::from_secs(100);
/// More than what messages carry.
const LARGE: usize = 400 << 10;

/// What a scenario works with.
pub(crate) struct World {
    pub(crate) cluster: TestCluster,
    pub(crate) driver: Option<Local>,
    /// The fault ends a worker process: its work may fail with an error that says so, or be done again.
    pub(crate) ends_process: bool,
    pub(crate) dir: tempfile::TempDir,
}

/// The variables of every cluster: what usually happens after a while happens soon.
const ENV: [(&str, &str); 3] =
    [("WINGBEAT_OWNERS_MS", "200"), ("WINGBEAT_IDLE_MS", "300"), ("WINGBEAT_HOUSEKEEPING_MS", "50")];

impl World {
    /// A cluster whose head keeps a journal, with a node for the driver and one more.
    pub(crate) fn new(ends_process: bool) -> World {
        let mut cluster = TestCluster::with_journal_and_env(0, 0, &ENV).unwrap();
        cluster.add_node(&["--num-cpus", "1", "--resource", "home=100"]).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let mut world = World { cluster, driver: None, ends_process, dir };
        world.driver = Some(world.join());
        world.cluster.add_node(&["--num-cpus", "1", "--resource", "far=100"]).unwrap();
        world
    }

    fn join(&self) -> Local {
        let token = self.cluster.token().unwrap();
        Local::from(wingbeat::init_at(self.cluster.address()).token(&token).namespace("matrix"))
    }

    fn session(&self) -> Session {
        self.driver.as_ref().unwrap().session.clone()
    }

    fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Whether a message that comes only now and then has come, if the cell is about that.
    fn has_come(&self, kind: &str) -> bool {
        let is_asked =
            std::env::var("WINGBEAT_FAULT").is_ok_and(|asked| asked.split([' ', ';', '@']).any(|word| word == kind));
        let folder = std::env::var_os("WINGBEAT_FAULT_DIR").map(PathBuf::from);
        !is_asked || folder.is_none_or(|folder| folder.join(kind).exists())
    }

    /// The right value; or, where a worker process ends for the fault, an error that says what has ended.
    fn right<T: PartialEq + std::fmt::Debug>(&self, got: wingbeat::Result<T>, expected: T) -> bool {
        match got {
            Ok(got) => assert_eq!(got, expected),
            Err(error) if self.ends_process && tells_of_an_end(&error) => return false,
            Err(error) => panic!("{error:?}"),
        }
        true
    }

    /// Everything that was leased is free again: nothing was granted twice or is held for nobody.
    pub(crate) fn is_clean(&self) {
        let Some(driver) = &self.driver else { return };
        let begun = Instant::now();
        loop {
            let state = block_on(driver.session.runtime().cluster_state()).unwrap();
            if state.nodes.iter().all(|node| node.leases == 0 && node.available == node.info.resources) {
                return;
            }
            assert!(begun.elapsed() < LIMIT, "not everything is free again: {:?}", state.nodes);
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

fn tells_of_an_end(error: &Error) -> bool {
    match error {
        Error::WorkerCrashed { .. }
        | Error::ActorUnavailable { .. }
        | Error::ActorDied { .. }
        | Error::OwnerDied { .. }
        | Error::ObjectLost { .. }
        | Error::ContactLost { .. } => true,
        Error::Panicked { message, .. } => {
            ["WorkerCrashed", "OwnerDied", "ActorDied"].iter().any(|end| message.contains(end))
        }
        _ => false,
    }
}

fn wait_for(what: &str, mut is_so: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < LIMIT, "{what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn exists(path: &Path) {
    wait_for(&format!("{} was never made", path.display()), || path.exists());
}

/// Leaves a line with its number.
#[wingbeat::remote(max_retries = 0)]
fn leaves_a_line(file: PathBuf, number: u64) -> u64 {
    let mut file = std::fs::OpenOptions::new().append(true).create(true).open(file).unwrap();
    file.write_all(format!("{number}\n").as_bytes()).unwrap();
    2 * number
}

#[wingbeat::remote(max_retries = 0)]
fn double(number: u64) -> u64 {
    2 * number
}

/// Has a task of its own done, and waits for it.
#[wingbeat::remote(max_retries = 0)]
fn asks_another(number: u64) -> u64 {
    double::remote(number).get_blocking().unwrap()
}

#[wingbeat::remote(max_retries = 0)]
fn waits_for_a_file(began: PathBuf, go_on: PathBuf) -> u64 {
    std::fs::write(began, "").unwrap();
    exists(&go_on);
    7
}

#[wingbeat::remote(max_retries = 0)]
async fn asleep(began: PathBuf) -> u64 {
    std::fs::write(began, "").unwrap();
    std::future::pending().await
}

#[wingbeat::remote(max_retries = 0)]
fn cancels(refs: Vec<ObjectRef<u64>>) {
    refs.iter().for_each(ObjectRef::cancel);
}

#[wingbeat::remote(max_retries = 0)]
fn large(byte: u8) -> Vec<u8> {
    vec![byte; LARGE]
}

#[wingbeat::remote(max_retries = 0)]
fn sum(bytes: Vec<u8>) -> u64 {
    bytes.iter().map(|byte| u64::from(*byte)).sum()
}

/// Waits for what is inside the refs, which somebody else makes.
#[wingbeat::remote(max_retries = 0)]
fn total(refs: Vec<ObjectRef<u64>>) -> u64 {
    get_all_blocking(&refs).unwrap().iter().sum()
}

#[wingbeat::remote(max_retries = 0)]
fn total_of_large(refs: Vec<ObjectRef<Vec<u8>>>) -> u64 {
    refs.iter().flat_map(|bytes| bytes.get_blocking().unwrap()).map(u64::from).sum()
}

/// New refs, of values that this process owns.
#[wingbeat::remote(max_retries = 0)]
fn makes_refs(count: u64) -> Vec<ObjectRef<u64>> {
    (0..count).map(|number| put(&number).unwrap()).collect()
}

type RefsOrActors = (Vec<ObjectRef<u64>>, Vec<CounterHandle>);

/// Refs of this process, or an actor of it.
#[wingbeat::remote(max_retries = 0)]
fn makes_when(began: PathBuf, go_on: PathBuf, refs: bool) -> RefsOrActors {
    std::fs::write(began, "").unwrap();
    exists(&go_on);
    match refs {
        true => (makes_refs(3), Vec::new()),
        false => (Vec::new(), vec![Counter::options().num_cpus(0.0).remote()]),
    }
}

/// Whether each of the lines is there once.
fn once_each(world: &World, file: &Path, count: u64, done: u64) {
    let text = std::fs::read_to_string(file).unwrap_or_default();
    let mut lines: Vec<u64> = text.lines().map(|line| line.parse().unwrap()).collect();
    let all = lines.len();
    lines.sort_unstable();
    lines.dedup();
    assert_eq!(all, lines.len(), "something ran twice");
    assert!(all as u64 >= done && (world.ends_process || all as u64 == count), "{all} of {count} ran");
}

/// Tasks: many short ones, some that wait for others, and some that are cancelled.
pub(crate) fn tasks(world: &mut World) {
    let file = world.file("lines");
    const COUNT: u64 = 60;
    let lines: Vec<_> = (0..COUNT).map(|number| leaves_a_line::remote(file.clone(), number)).collect();
    let asking: Vec<_> = (0..4).map(asks_another::remote).collect();
    let after: Vec<_> = (0..20).map(double::remote).collect();
    let done = (0..).zip(&lines).filter(|(number, line)| world.right(line.get_blocking(), 2 * number)).count();
    once_each(world, &file, COUNT, done as u64);
    for (number, asked) in (0..).zip(asking) {
        world.right(asked.get_blocking(), 2 * number);
    }
    for (number, after) in (0..).zip(after) {
        world.right(after.get_blocking(), 2 * number);
    }
    let spread: Vec<_> = (0..4).map(|number| double::options().spread().remote(number)).collect();
    for (number, spread) in (0..).zip(spread) {
        world.right(spread.get_blocking(), 2 * number);
    }
    // Short tasks are pushed ahead, behind one that is long; another node takes them over.
    for round in 0..20 {
        let (began, go_on) = (world.file(&format!("began {round}")), world.file(&format!("go on {round}")));
        let long = waits_for_a_file::options().max_retries(1).remote(began.clone(), go_on.clone());
        let behind: Vec<_> = (0..100).map(double::remote).collect();
        exists(&began);
        for (number, behind) in (0..).zip(behind) {
            world.right(behind.get_blocking(), 2 * number);
        }
        std::fs::write(&go_on, "").unwrap();
        world.right(long.get_blocking(), 7);
        if world.has_come("Work::TakeBack") {
            break;
        }
    }
    let asleep = [world.file("asleep"), world.file("also asleep")].map(|began| {
        let asleep = asleep::options().num_cpus(0.5).max_retries(1).remote(began.clone());
        exists(&began);
        asleep
    });
    asleep[0].cancel();
    cancels::options().max_retries(1).remote(vec![asleep[1].clone()]).get_blocking().unwrap();
    for asleep in asleep {
        let got = asleep.get_blocking();
        assert!(matches!(got, Err(Error::Cancelled { .. })) || world.ends_process, "{got:?}");
    }
}

/// Values: large and small, in their own process, in others, and in transit.
pub(crate) fn values(world: &mut World) {
    let far = |bytes: &ObjectRef<Vec<u8>>| sum::options().resource("far", 1.0).remote(bytes.clone());
    let here = put(&vec![3_u8; LARGE]).unwrap();
    world.right(far(&here).get_blocking(), 3 * LARGE as u64);
    let there = large::options().resource("far", 1.0).remote(5);
    world.right(there.get_blocking(), vec![5; LARGE]);
    let nested = total_of_large::options().resource("far", 1.0).remote(vec![here.clone(), there.clone()]);
    world.right(nested.get_blocking(), 8 * LARGE as u64);
    // A value that is not there when somebody else begins to wait for it.
    let (began, go_on) = (world.file("began"), world.file("go on"));
    let late = waits_for_a_file::options().resource("home", 1.0).remote(began.clone(), go_on.clone());
    exists(&began);
    let waiting = total::options().resource("far", 1.0).remote(vec![late.clone(), put(&1).unwrap()]);
    let large_here = large::options().resource("far", 1.0).num_cpus(0.0).remote(1);
    world.right(large_here.get_blocking(), vec![1; LARGE]);
    std::fs::write(go_on, "").unwrap();
    world.right(waiting.get_blocking(), 8);
    world.right(late.get_blocking(), 7);
    if let Ok(made) = makes_refs::options().resource("far", 1.0).remote(20).get_blocking() {
        let forth = total::options().resource("home", 1.0).remote(made.clone());
        world.right(forth.get_blocking(), 190);
        let numbers = get_all_blocking(&made);
        world.right(numbers, (0..20).collect::<Vec<u64>>());
    } else {
        assert!(world.ends_process);
    }
    drop((here, there, large_here));
}

struct Counter {
    count: u64,
}

#[wingbeat::actor(num_cpus = 0.0)]
impl Counter {
    fn new() -> Counter {
        Counter { count: 0 }
    }

    fn add(&mut self) -> u64 {
        self.count += 1;
        self.count
    }

    fn pid(&self) -> u32 {
        std::process::id()
    }

    /// Asks another actor to ask this one, which cannot answer meanwhile.
    fn asks(&mut self, other: CounterHandle, this: CounterHandle) -> u64 {
        other.passes_on(this).get_blocking().unwrap()
    }

    fn passes_on(&mut self, to: CounterHandle) -> u64 {
        to.add().get_blocking().unwrap()
    }

    fn numbers(&self, count: u64) -> impl Iterator<Item = u64> + use<> {
        0..count
    }

    fn puts(&self, len: usize) -> Vec<ObjectRef<Vec<u8>>> {
        vec![put(&vec![7; len]).unwrap()]
    }
}

/// Actors: their calls, names and ends.
pub(crate) fn actors(world: &mut World) {
    const CALLS: u64 = 50;
    let counter = Counter::options().resource("far", 1.0).remote();
    let calls: Vec<_> = (0..CALLS).map(|_| counter.add()).collect();
    for (number, call) in (1..).zip(&calls) {
        world.right(call.get_blocking(), number);
    }
    let named = block_on(Counter::options().name("one").get_or_create());
    if let Ok(named) = &named {
        world.right(named.add().get_blocking(), 1);
        let same = block_on(Counter::named("one")).map(|same| same.actor().id());
        world.right(same, named.actor().id());
        named.actor().terminate();
        let ended = loop {
            match named.add().get_blocking() {
                Err(error) => break error,
                Ok(_) => continue,
            }
        };
        assert!(matches!(ended, Error::ActorDied { .. }), "{ended:?}");
    }
    let killed = Counter::options().max_restarts(3).remote();
    let first = killed.pid().get_blocking();
    killed.actor().kill_may_restart();
    let second = killed.pid().get_blocking();
    if let (Ok(first), Ok(second)) = (&first, &second) {
        assert_ne!(first, second);
    } else {
        assert!(world.ends_process, "{first:?} {second:?}");
    }
    killed.actor().kill();
    let dead = killed.add().get_blocking();
    assert!(matches!(dead, Err(Error::ActorDied { .. })), "{dead:?}");
    let (one, other) = (Counter::remote(), Counter::remote());
    let circle = one.asks(other.clone(), one.clone()).get_blocking().unwrap_err();
    assert!(circle.to_string().to_lowercase().contains("deadlock") || world.ends_process, "{circle}");
    world.right(other.add().get_blocking(), 1);
    // The last handle ends an actor.
    let pid = counter.pid().get_blocking();
    drop((counter, calls));
    if let Ok(pid) = pid {
        assert!(wingbeat_tests::wait_for_end(pid, LIMIT), "nobody holds it any more");
    }
}

#[wingbeat::remote(max_retries = 0)]
fn yields_refs(count: u64) -> impl Iterator<Item = ObjectRef<u64>> {
    (0..count).map(|number| put(&number).unwrap())
}

/// Streams of tasks and of actors, with refs and without.
pub(crate) fn streams(world: &mut World) {
    const COUNT: u64 = 60;
    let mut refs = yields_refs::options().resource("far", 1.0).stream_ahead(4).remote(COUNT);
    for number in 0..COUNT {
        let item = refs.next_blocking().unwrap_or_else(|| panic!("no item {number}"));
        if !world.right(item.and_then(|item| item.get_blocking()), number) {
            break;
        }
    }
    let counter = Counter::remote();
    let mut numbers = counter.numbers(COUNT);
    for number in 0..COUNT {
        let item = numbers.next_blocking().unwrap_or_else(|| panic!("no item {number}"));
        if !world.right(item, number) {
            return;
        }
    }
    assert!(numbers.next_blocking().is_none());
}

/// Placement groups.
pub(crate) fn groups(world: &mut World) {
    let bundles = [Bundle::new().num_cpus(0.5), Bundle::new().num_cpus(0.5)];
    let group =
        placement_group(bundles).strategy(PlacementStrategy::StrictSpread).name("both").create_blocking().unwrap();
    assert_eq!(group.ready().get_blocking().unwrap().len(), 2);
    let inside = double::options().num_cpus(0.5).in_bundle(&group, 1).remote(4);
    world.right(inside.get_blocking(), 8);
    let named = block_on(wingbeat::PlacementGroup::named("both")).unwrap();
    assert_eq!(named.id(), group.id());
    let actor = Counter::options().in_bundle(&group, 0).remote();
    world.right(actor.add().get_blocking(), 1);
    group.remove_blocking().unwrap();
    // Its process ends in a moment, and may answer until then.
    let ended = wingbeat_tests::poll(LIMIT, || actor.add().get_blocking().err());
    assert!(matches!(ended, Some(Error::ActorDied { .. })), "{ended:?}");
}

#[wingbeat::remote(max_retries = 0)]
fn dies() -> u64 {
    let _ = kill_process(getpid(), Signal::KILL);
    0
}

#[wingbeat::remote(max_retries = 0)]
fn reads(refs: Vec<ObjectRef<Vec<u8>>>) -> String {
    match refs[0].get_blocking() {
        Ok(bytes) => format!("{} bytes", bytes.len()),
        Err(error) => format!("{:?}", error.kind()),
    }
}

#[wingbeat::remote(max_retries = 0)]
fn reads_when(refs: Vec<ObjectRef<Vec<u8>>>, began: PathBuf, go_on: PathBuf) -> String {
    std::fs::write(began, "").unwrap();
    exists(&go_on);
    reads(refs)
}

/// Processes and nodes that die, and what can never be had.
pub(crate) fn deaths(world: &mut World) {
    let dead = dies::remote().get_blocking().unwrap_err();
    assert!(matches!(dead, Error::WorkerCrashed { .. }), "{dead:?}");
    let never = double::options().resource("nowhere", 1.0).remote(1).get_blocking().unwrap_err();
    assert!(never.to_string().contains("nowhere"), "{never}");
    // A value whose only copy is lost with its node is made again for whoever reads it, and a value that was put is not.
    let node = world.cluster.add_node(&["--num-cpus", "1", "--resource", "lost=1"]).unwrap();
    let made = large::options().resource("lost", 0.1).max_retries(5).remote(1);
    let (ready, _) = wingbeat::wait_blocking(vec![made], 1, None).unwrap();
    let reader = Counter::options().resource("lost", 0.1).max_restarts(1).remote();
    world.right(reader.add().get_blocking(), 1);
    world.cluster.kill_node(node).unwrap();
    world.cluster.add_node(&["--num-cpus", "1", "--resource", "lost=1"]).unwrap();
    let read = reads::options().resource("far", 1.0).max_retries(3).remote(ready);
    world.right(read.get_blocking(), format!("{LARGE} bytes"));
    let again = loop {
        match reader.add().get_blocking() {
            Ok(count) => break count,
            Err(Error::ActorUnavailable { .. }) => {}
            Err(error) if world.ends_process && tells_of_an_end(&error) => break 1,
            Err(error) => panic!("{error:?}"),
        }
    };
    assert_eq!(again, 1, "a new life counts from the beginning");
}

/// So many worker processes end before they are one: more than are started ahead of need.
const NEVER: usize = 4;
/// A file, with a number after it: the worker process that can remove it ends before it is one.
const NEVER_BEGINS: &str = "WINGBEAT_MATRIX_NEVER_BEGINS";

/// Before worker processes begin.
#[used]
#[unsafe(link_section = ".init_array.00050")]
static BEFORE: extern "C" fn() = end_if_asked;

extern "C" fn end_if_asked() {
    let is_worker = std::env::var("WINGBEAT_CHILD").is_ok_and(|kind| kind.starts_with("worker"));
    let ends = |file: String| (0..NEVER).any(|number| std::fs::remove_file(format!("{file}{number}")).is_ok());
    if is_worker && std::env::var(NEVER_BEGINS).is_ok_and(ends) {
        std::process::abort();
    }
}

/// What a process owned and stored is kept when it has ended as long as others hold it, and goes then.
pub(crate) fn owners(world: &mut World) {
    /// No two of this fit.
    const MOST: usize = 40 << 20;
    let small = ["--num-cpus", "1", "--resource", "small=1", "--object-store-memory", "64MiB", "--spill-limit", "0"];
    world.cluster.add_node(&small).unwrap();
    let owner = Counter::options().resource("small", 0.1).remote();
    let owned = match owner.puts(MOST).get_blocking() {
        Ok(owned) => owned,
        Err(error) => return assert!(world.ends_process && tells_of_an_end(&error), "{error:?}"),
    };
    let (ready, _) = wingbeat::wait_blocking(owned, 1, None).unwrap();
    // A copy on another node than the owner's.
    let copied = ready.iter().map(|owned| owned.get_blocking()).collect::<Vec<_>>();
    owner.actor().kill();
    for kind in ["HeadMessage::Owners", "NodeMessage::OwnersGone", "ProcessRequest::Keeps"] {
        wait_for("nobody asks who has ended", || copied.iter().any(Result::is_err) || world.has_come(kind));
    }
    drop((ready, copied));
    let room = || {
        let next = Counter::options().resource("small", 0.1).remote();
        match next.puts(MOST).get_blocking() {
            Ok(_) => true,
            Err(Error::Panicked { message, .. }) if message.contains("StoreFull") => false,
            Err(error) if world.ends_process && tells_of_an_end(&error) => false,
            Err(error) => panic!("{error:?}"),
        }
    };
    wait_for("the store stays full", room);
}

/// A copy that a reader cannot have, of which its owner has not heard: the owner makes the value again.
pub(crate) fn lost(world: &mut World) {
    world.cluster.add_node(&["--num-cpus", "1", "--resource", "reads=1"]).unwrap();
    let lost = ["--num-cpus", "1", "--resource", "lost=1"];
    let mut node = world.cluster.add_node(&lost).unwrap();
    for round in 0..10 {
        let made = large::options().resource("lost", 0.1).max_retries(5).remote(1);
        let (ready, _) = wingbeat::wait_blocking(vec![made], 1, None).unwrap();
        let (began, go_on) = (world.file(&format!("began {round}")), world.file(&format!("go on {round}")));
        let reading = reads_when::options().resource("reads", 1.0).max_retries(3);
        let reading = reading.remote(ready, began.clone(), go_on.clone());
        exists(&began);
        // For a moment nobody hears of the node's end from the head.
        let head = Pid::from_raw(world.cluster.head_pid().unwrap() as i32).unwrap();
        kill_process(head, Signal::STOP).unwrap();
        world.cluster.kill_node(node).unwrap();
        std::fs::write(&go_on, "").unwrap();
        std::thread::sleep(Duration::from_millis(200));
        kill_process(head, Signal::CONT).unwrap();
        node = world.cluster.add_node(&lost).unwrap();
        world.right(reading.get_blocking(), format!("{LARGE} bytes"));
        if world.has_come("PeerMessage::Lost") {
            break;
        }
    }
}

/// A worker process that stands still after its connection has ended: nobody knows what runs there, and so it ends.
pub(crate) fn abandoned(world: &mut World) {
    let began = world.file("began");
    let still = stands_still::options().resource("far", 1.0).remote(began.clone());
    exists(&began);
    let pid: i32 = wait_for_text(&began).parse().unwrap();
    wait_for("it does not stand still", || is_stopped(pid));
    still.cancel();
    let error = still.get_blocking().unwrap_err();
    assert!(matches!(error, Error::ContactLost { .. } | Error::Cancelled { .. }) || world.ends_process, "{error:?}");
    assert!(wingbeat_tests::wait_for_end(pid as u32, LIMIT), "it is still there");
    world.right(double::options().resource("far", 1.0).remote(1).get_blocking(), 2);
}

#[wingbeat::remote(max_retries = 0)]
fn stands_still(began: PathBuf) {
    std::fs::write(began, std::process::id().to_string()).unwrap();
    let _ = kill_process(getpid(), Signal::STOP);
    loop {
        std::thread::park();
    }
}

fn wait_for_text(file: &Path) -> String {
    loop {
        let text = std::fs::read_to_string(file).unwrap();
        if !text.is_empty() {
            return text;
        }
    }
}

fn is_stopped(pid: i32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(')').next().is_some_and(|rest| rest.trim_start().starts_with('T'))
}

/// Worker processes that end before they are one.
pub(crate) fn unstarted(world: &mut World) {
    let file = world.file("never begins");
    for number in 0..NEVER {
        std::fs::write(format!("{}{number}", file.display()), "").unwrap();
    }
    let token = world.cluster.token().unwrap();
    let init = wingbeat::init_at(world.cluster.address()).token(&token).env(NEVER_BEGINS, file.to_str().unwrap());
    let driver = Local::from(init);
    let fails = |error: &Error| matches!(error, Error::Failed { what, .. } if what == ENDED_UNREPORTED);
    for round in 0.. {
        let tasks: Vec<_> = (0..4).map(double::remote).collect();
        let done = (0..).zip(tasks).filter(|(number, task)| match task.get_blocking() {
            Ok(got) => got == 2 * number,
            Err(error) if fails(&error) => false,
            Err(error) => panic!("{error:?}"),
        });
        if done.count() == 4 {
            break;
        }
        assert!(round < NEVER, "all processes begin by now");
    }
    drop(driver);
}

/// A head that is killed and started again.
pub(crate) fn restart(world: &mut World) {
    let counter = Counter::options().max_restarts(1).remote();
    world.right(counter.add().get_blocking(), 1);
    let killed = Counter::options().max_restarts(1).remote();
    world.right(killed.add().get_blocking(), 1);
    let group = placement_group([Bundle::new().resource("far", 1.0)]).create_blocking().unwrap();
    assert_eq!(group.ready().get_blocking().unwrap().len(), 1);
    let (began, go_on) = (world.file("began"), world.file("go on"));
    let running = waits_for_a_file::remote(began.clone(), go_on.clone());
    exists(&began);
    world.cluster.kill_head().unwrap();
    killed.actor().kill();
    let meanwhile: Vec<_> = (0..20).map(double::remote).collect();
    world.cluster.start_head().unwrap();
    for (number, meanwhile) in (0..).zip(meanwhile) {
        world.right(meanwhile.get_blocking(), 2 * number);
    }
    std::fs::write(go_on, "").unwrap();
    world.right(running.get_blocking(), 7);
    world.right(counter.add().get_blocking(), 2);
    let dead = killed.add().get_blocking();
    assert!(matches!(dead, Err(Error::ActorDied { .. })), "{dead:?}");
    group.remove_blocking().unwrap();
}

/// A node that is drained, and takes work again; one that is drained and ends; and what owns something when it should retire.
pub(crate) fn drain(world: &mut World) {
    let node = world.cluster.add_node(&["--num-cpus", "1", "--resource", "drained=1"]).unwrap();
    let id = world.cluster.node_numbers().unwrap()[node].clone();
    let actor = Counter::options().resource("drained", 0.1).max_restarts(0).remote();
    world.right(actor.add().get_blocking(), 1);
    let session = world.session();
    let node_id: wingbeat::NodeId = id.parse().unwrap();
    block_on(session.drain_node(node_id, Duration::from_secs(600), "to see what follows")).unwrap();
    let waiting = double::options().resource("drained", 0.1).remote(2);
    block_on(session.end_drain(node_id)).unwrap();
    world.right(waiting.get_blocking(), 4);
    command(world, &["drain", &id, "--within", "0s", "--reason", "to be rid of it", "--stop"]);
    assert!(world.cluster.wait_for_node_end(node).unwrap(), "it did not end in order");
    // There are more processes than CPUs: those that own values leave them, and those that have made an actor stay.
    let go_on = world.file("go on");
    let owners: Vec<_> = (0..6)
        .map(|number| {
            let began = world.file(&format!("began {number}"));
            let options = makes_when::options().num_cpus(0.1).resource("home", 1.0);
            let owner = options.remote(began.clone(), go_on.clone(), number % 2 == 0);
            exists(&began);
            owner
        })
        .collect();
    std::fs::write(&go_on, "").unwrap();
    let made: Vec<_> = owners.iter().filter_map(|owner| owner.get_blocking().ok()).collect();
    assert!(made.len() == 6 || world.ends_process);
    wait_for("no process is asked whether it can end", || {
        let kinds = ["NodeMessage::Stays", "WorkerCommand::Exit", "Work::MayLeave"];
        kinds.into_iter().all(|kind| world.has_come(kind))
    });
    leaves_something_behind(world);
    for (refs, actors) in made {
        world.right(get_all_blocking(&refs), (0..refs.len() as u64).collect::<Vec<_>>());
        for actor in actors {
            world.right(actor.add().get_blocking(), 1);
        }
    }
}

#[wingbeat::remote]
fn goes_on_when(began: PathBuf, go_on: PathBuf) -> u64 {
    std::fs::write(began, "").unwrap();
    exists(&go_on);
    3
}

/// Ends while what it has submitted runs, in its own process.
#[wingbeat::remote]
fn leaves_one_behind(began: PathBuf, go_on: PathBuf) -> ObjectRef<u64> {
    let left = goes_on_when::remote(began.clone(), go_on);
    while !began.exists() {
        let _ = left.get_timeout_blocking(Duration::from_millis(20));
    }
    left
}

fn leaves_something_behind(world: &mut World) {
    let [began, go_on] = ["left one behind", "what is left goes on"].map(|name| world.file(name));
    let left = leaves_one_behind::remote(began, go_on.clone()).get_blocking();
    std::fs::write(&go_on, "").unwrap();
    if let Ok(left) = left {
        world.right(left.get_blocking(), 3);
    }
}

/// Runs a command of the cluster's, again if it is answered with an error: whoever types it would.
fn command(world: &World, args: &[&str]) -> String {
    let mut said = String::new();
    for _ in 0..3 {
        let output = world.cluster.command().unwrap().args(args).output().unwrap();
        said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
        if output.status.success() {
            return said;
        }
    }
    panic!("{args:?}: {said}");
}

#[wingbeat::remote(max_retries = 0)]
fn prints(what: String) {
    println!("{what}");
}

/// What people ask, and the end of a driver and of the cluster.
pub(crate) fn tools(world: &mut World) {
    let session = world.session();
    let never = double::options().resource("nowhere", 1.0).wait_until_feasible().remote(1);
    // An answer that takes too long is an error, and the next question is answered.
    let why = (0..3).find_map(|_| block_on(session.why(never.id())).ok()).unwrap();
    assert!(format!("{why:?}").contains("nowhere"), "{why:?}");
    block_on(session.set_quota("matrix", Some(&[("CPU", 100.0)]))).unwrap();
    let status = command(world, &["status"]);
    assert!(status.contains("matrix"), "{status}");
    world.right(double::remote(1).get_blocking(), 2);
    let counter = Counter::remote();
    let pid = counter.pid().get_blocking().unwrap().to_string();
    let shown = || world.cluster.command().unwrap().args(["stack", &pid]).status().unwrap().success();
    // An answer that is lost is an error, and so may be the next question: the end of a connection is heard of after a moment.
    wait_for("nobody shows its stacks", || shown() || world.ends_process);
    let job = block_on(session.runtime().cluster_state()).unwrap().jobs[0].id.to_string();
    wait_for("nobody shows the stacks of the job", || {
        world.cluster.command().unwrap().args(["stack", &job]).status().unwrap().success() || world.ends_process
    });
    drop(counter);
    let token = world.cluster.token().unwrap();
    let init = wingbeat::init_at(world.cluster.address()).token(&token).global(false);
    let second = block_on(std::future::IntoFuture::into_future(init)).unwrap();
    let entered = second.enter();
    let printed = prints::remote("printed by a task");
    world.right(printed.get_blocking(), ());
    let made = large::remote(1);
    let _ = wingbeat::wait_blocking(vec![made.clone()], 1, None).unwrap();
    block_on(second.shutdown());
    drop((made, entered));
    // Its values are deleted though it has said nothing of them.
    wait_for("what a driver stored outlives it", || {
        let state = block_on(session.runtime().cluster_state()).unwrap();
        state.jobs.len() <= 1
    });
    never.cancel();
    assert!(matches!(never.get_blocking(), Err(Error::Cancelled { .. })));
    command(world, &["stop"]);
    let end = loop {
        match double::remote(1).get_blocking() {
            Ok(two) => assert_eq!(two, 2),
            // A node may end before the driver hears that the session has ended.
            Err(Error::NodeDied { why, .. }) if why == "the cluster was stopped" => {}
            Err(error) => break error,
        }
    };
    assert!(matches!(end, Error::SessionEnded { .. }), "{end:?}");
    world.driver = None;
    world.cluster.wait_for_stop().unwrap();
}

/// A head that is killed and started again before its standby leads, and then taken over from.
pub(crate) fn standby(world: &mut World) {
    let follows = |world: &World| {
        wait_for("the standby does not follow", || {
            world.cluster.state().is_ok_and(|state| state["standby"]["is_current"] == true)
        });
    };
    world.cluster.start_standby("second").unwrap();
    follows(world);
    let counter = Counter::options().max_restarts(0).remote();
    world.right(counter.add().get_blocking(), 1);
    world.cluster.kill_head().unwrap();
    // Whoever of the two leads then, there is one.
    if world.cluster.start_head().is_err() {
        world.cluster.wait_for_takeover().unwrap();
    }
    world.right(double::options().num_cpus(0.5).remote(5).get_blocking(), 10);
    world.right(counter.add().get_blocking(), 2);
    if world.cluster.standby_pid().is_some() {
        follows(world);
        world.cluster.kill_head().unwrap();
        world.cluster.wait_for_takeover().unwrap();
        world.right(double::options().num_cpus(0.25).remote(6).get_blocking(), 12);
        world.right(counter.add().get_blocking(), 3);
    }
    counter.actor().kill();
}

/// A head without a journal, which is started again with other times, and knows from its nodes what was there.
pub(crate) fn without_journal(world: &mut World) {
    world.driver = None;
    world.cluster = TestCluster::with_env(1, 1, &ENV).unwrap();
    command(world, &["quota", "matrix", "CPU=3"]);
    world.driver = Some(world.join());
    let counter = block_on(Counter::options().name("kept").detached().get_or_create()).unwrap();
    world.right(counter.add().get_blocking(), 1);
    world.cluster.kill_head().unwrap();
    world.cluster.set_head_args(&["--suspect-after", "4s", "--lost-after", "25s"]);
    world.cluster.start_head().unwrap();
    match block_on(Counter::named("kept")) {
        Ok(kept) => drop(world.right(kept.add().get_blocking(), 2)),
        Err(error) => assert!(world.ends_process, "{error:?}"),
    }
    world.right(double::options().num_cpus(0.5).remote(5).get_blocking(), 10);
    let state = world.cluster.state().unwrap();
    assert_eq!(state["quotas"][0]["namespace"], "matrix", "{state}");
    wait_for("the driver never hears of the other times", || {
        wingbeat_net::limits::limits().lost == Duration::from_secs(25)
    });
    counter.actor().kill();
}

/// Takes memory until it is ended.
#[wingbeat::remote(max_retries = 0, max_memory_retries = 0)]
fn eats_all() -> u64 {
    let mut eaten = Vec::new();
    loop {
        if eaten.len() < 256 {
            eaten.push(vec![1u8; 8 << 20]);
        }
        std::thread::yield_now();
    }
}

/// A node that is short of memory, and says so until it is not.
pub(crate) fn short(world: &mut World) {
    let limit = (192 << 20).to_string();
    let small = [("WINGBEAT_MEMORY_LIMIT", limit.as_str()), ("WINGBEAT_MEMORY_CHECK_MS", "40")];
    world.cluster.add_node_with(&["--num-cpus", "1", "--resource", "small=1"], &small).unwrap();
    let error = eats_all::options().resource("small", 1.0).remote().get_blocking().unwrap_err();
    assert!(matches!(error, Error::OutOfMemory { .. }), "{error:?}");
    let session = world.session();
    wait_for("the node is short of memory for ever", || {
        let state = block_on(session.runtime().cluster_state()).unwrap();
        state.nodes.iter().all(|node| node.memory_short.is_none())
    });
}

/// What makes a program the driver of [`detached`].
pub(crate) const COMES_AND_GOES: &str = "WINGBEAT_MATRIX_COMES_AND_GOES";

/// The driver that leaves an actor behind.
pub(crate) fn comes_and_goes() {
    let _driver = Local::from(wingbeat::init().namespace("matrix"));
    let counter = Counter::options().name("left").detached().max_restarts(10).resource("lost", 1.0).remote();
    assert_eq!(counter.add().get_blocking().unwrap(), 1);
}

/// An actor that outlives its driver and its node: nobody but the head has its program.
pub(crate) fn detached(world: &mut World) {
    let node = world.cluster.add_node(&["--num-cpus", "1", "--resource", "lost=1"]).unwrap();
    let mut driver = std::process::Command::new(std::env::current_exe().unwrap());
    driver.args(["--exact", crate::DRIVER, "--nocapture"]).env(COMES_AND_GOES, "1");
    driver.env("WINGBEAT_ADDRESS", world.cluster.address()).env("WINGBEAT_TOKEN", world.cluster.token().unwrap());
    let output = driver.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    world.cluster.kill_node(node).unwrap();
    world.cluster.add_node(&["--num-cpus", "1", "--resource", "lost=1"]).unwrap();
    let counter = block_on(Counter::named("left")).unwrap();
    let again = loop {
        match counter.add().get_blocking() {
            Ok(count) => break count,
            Err(Error::ActorUnavailable { .. }) => {}
            Err(error) => panic!("{error:?}"),
        }
    };
    assert_eq!(again, 1);
    counter.actor().kill();
}
