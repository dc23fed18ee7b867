//! A head with a standby: when it is killed or cut off, the standby takes over, and whoever runs notices nothing. There is one head at a time.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;
#[path = "standby/cut_off.rs"]
mod cut_off;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use common::Local;
use rustix::process::{Pid, Signal, kill_process};
use serde::{Deserialize, Serialize};
use wingbeat::{Bundle, get_all_blocking, placement_group};
use wingbeat_tests::{Daemon, TestCluster, poll, wait_for_end};

#[wingbeat::remote]
fn double(number: u64) -> u64 {
    2 * number
}

#[derive(Serialize, Deserialize)]
struct Counter {
    count: u64,
}

#[wingbeat::actor]
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
}

fn join(cluster: &TestCluster) -> Local {
    Local::from(wingbeat::init_at(cluster.address()).token(&cluster.token().unwrap()).namespace("standby"))
}

/// Waits until the head says so of its standby.
fn until_standby(cluster: &TestCluster, is: impl Fn(&serde_json::Value) -> bool) {
    let begun = Instant::now();
    loop {
        let state = cluster.state().unwrap();
        if is(&state["standby"]) {
            return;
        }
        assert!(begun.elapsed() < Duration::from_secs(120), "{state:#}");
    }
}

/// Tasks and calls, one batch after the other, until it is dropped.
struct Load {
    ends: Arc<AtomicBool>,
    batches: Arc<AtomicU64>,
    thread: Option<std::thread::JoinHandle<u64>>,
}

impl Load {
    fn start(driver: &Local, counter: CounterHandle) -> Load {
        let (ends, batches) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (session, stops, done) = (driver.session.clone(), ends.clone(), batches.clone());
        let thread = std::thread::spawn(move || {
            let _entered = session.enter();
            let mut calls = 0;
            while !stops.load(Ordering::Relaxed) {
                let batch = done.load(Ordering::Relaxed);
                // Another shape now and then, for which nobody has a lease.
                let cpus = [1.0, 0.5, 0.25][(batch % 3) as usize];
                let tasks: Vec<_> = (0..50).map(|number| double::options().num_cpus(cpus).remote(number)).collect();
                let adds: Vec<_> = (0..10).map(|_| counter.add()).collect();
                assert_eq!(get_all_blocking(&tasks).unwrap()[49], 98);
                calls += adds.len() as u64;
                assert_eq!(*get_all_blocking(&adds).unwrap().last().unwrap(), calls, "every call ran once");
                done.fetch_add(1, Ordering::Relaxed);
            }
            calls
        });
        Load { ends, batches, thread: Some(thread) }
    }

    /// Waits for so many more batches.
    fn goes_on(&self, batches: u64) {
        let until = self.batches.load(Ordering::Relaxed) + batches;
        let begun = Instant::now();
        while self.batches.load(Ordering::Relaxed) < until {
            assert!(!self.thread.as_ref().unwrap().is_finished(), "something has failed");
            assert!(begun.elapsed() < Duration::from_secs(120), "nothing is done any more");
            std::thread::yield_now();
        }
    }

    /// How many calls were made.
    fn end(mut self) -> u64 {
        self.ends.store(true, Ordering::Relaxed);
        self.thread.take().unwrap().join().unwrap()
    }
}

#[test]
fn a_head_that_is_killed_under_load_is_taken_over_from_and_nothing_fails() {
    let mut cluster = TestCluster::with_journal(2, 2).unwrap();
    cluster.start_standby("second").unwrap();
    let first = (cluster.address().to_owned(), cluster.journal());
    let driver = join(&cluster);
    let counter = wingbeat::block_on(Counter::options().name("counter").detached().get_or_create()).unwrap();
    let pid = counter.pid().get_blocking().unwrap();
    let group = placement_group([Bundle::new().num_cpus(0.5)]).create_blocking().unwrap();
    let places = group.ready().get_blocking().unwrap();
    let load = Load::start(&driver, counter.clone());
    load.goes_on(3);
    cluster.kill_head().unwrap();
    cluster.wait_for_takeover().unwrap();
    load.goes_on(10);
    assert_eq!(counter.pid().get_blocking().unwrap(), pid, "it is the same life");
    assert_eq!(group.ready().get_blocking().unwrap(), places);
    let found = wingbeat::block_on(Counter::named("counter")).unwrap();
    assert_eq!(found.pid().get_blocking().unwrap(), pid);
    // The last head is refused with its journal, and says what to do.
    let port = first.0.rsplit(':').next().unwrap();
    for certain in [None, Some("--without-standby")] {
        let mut again = cluster.command().unwrap();
        let again = again.args(["head", "--port", port, "--journal"]).arg(&first.1).args(certain).output().unwrap();
        let said = String::from_utf8_lossy(&again.stderr).into_owned();
        assert!(!again.status.success() && said.contains(&format!("--standby-of {}", cluster.address())), "{said}");
    }
    load.goes_on(3);
    // It becomes the standby of the one that has taken over, and takes over in its turn.
    cluster.start_standby("journal").unwrap();
    load.goes_on(3);
    cluster.kill_head().unwrap();
    cluster.wait_for_takeover().unwrap();
    load.goes_on(10);
    assert_eq!(counter.pid().get_blocking().unwrap(), pid);
    let calls = load.end();
    assert_eq!(counter.add().get_blocking().unwrap(), calls + 1);
}

#[test]
fn a_node_that_starts_after_a_takeover_finds_the_head_among_several_addresses() {
    let mut cluster = TestCluster::with_journal(1, 1).unwrap();
    let first = cluster.address().to_owned();
    cluster.start_standby("second").unwrap();
    let driver = join(&cluster);
    cluster.kill_head().unwrap();
    cluster.wait_for_takeover().unwrap();
    let heads = format!("{first},{}", cluster.address());
    cluster.add_node(&["--head", &heads, "--num-cpus", "1", "--resource", "late=1"]).unwrap();
    let late = double::options().resource("late", 1.0).remote(4);
    assert_eq!(late.get_blocking().unwrap(), 8);
    drop(driver);
}

#[test]
fn a_head_that_stands_still_is_taken_over_from_and_what_runs_on_its_machine_goes_on() {
    let mut cluster = TestCluster::with_journal(2, 2).unwrap();
    cluster.start_standby("second").unwrap();
    let driver = join(&cluster);
    let counter = wingbeat::block_on(Counter::options().name("counter").detached().get_or_create()).unwrap();
    let pid = counter.pid().get_blocking().unwrap();
    let load = Load::start(&driver, counter.clone());
    load.goes_on(3);
    let last = cluster.take_head().unwrap();
    let stopped = Pid::from_raw(last.pid() as i32).unwrap();
    kill_process(stopped, Signal::STOP).unwrap();
    cluster.wait_for_takeover().unwrap();
    load.goes_on(10);
    assert_eq!(counter.pid().get_blocking().unwrap(), pid, "it is the same life");
    // It notices that it leads no more, and nobody goes back to it.
    kill_process(stopped, Signal::CONT).unwrap();
    assert!(wait_for_end(last.pid(), Duration::from_secs(60)));
    let said = last.wait_for_error("this head ends").unwrap();
    assert!(said.matches("this head ends").count() == 1 && said.ends_with("--journal FILE`)"), "{said}");
    load.goes_on(3);
    let calls = load.end();
    assert_eq!(counter.add().get_blocking().unwrap(), calls + 1);
}

#[test]
fn a_driver_that_begins_in_the_moment_of_a_takeover_waits_for_it() {
    let mut cluster = TestCluster::with_journal(1, 1).unwrap();
    cluster.start_standby("second").unwrap();
    until_standby(&cluster, |standby| standby["voters"] == 1);
    let both = format!("{},{}", cluster.address(), cluster.standby_address().unwrap());
    cluster.kill_head().unwrap();
    let token = cluster.token().unwrap();
    let _driver = Local::from(wingbeat::init_at(&both).token(&token).namespace("standby"));
    assert_eq!(double::remote(4).get_blocking().unwrap(), 8);
    cluster.wait_for_takeover().unwrap();
}

#[test]
fn a_head_whose_standby_is_killed_goes_on_and_says_so_and_the_next_standby_knows_everything() {
    let mut cluster = TestCluster::with_journal(1, 2).unwrap();
    cluster.start_standby("second").unwrap();
    until_standby(&cluster, |standby| standby["is_current"] == true);
    let _driver = join(&cluster);
    cluster.kill_standby().unwrap();
    // It is written down by the head alone.
    let counter = wingbeat::block_on(Counter::options().name("meanwhile").detached().get_or_create()).unwrap();
    assert_eq!(counter.add().get_blocking().unwrap(), 1);
    until_standby(&cluster, serde_json::Value::is_null);
    cluster.start_standby("second").unwrap();
    until_standby(&cluster, |standby| standby["is_current"] == true);
    cluster.kill_head().unwrap();
    cluster.wait_for_takeover().unwrap();
    let found = wingbeat::block_on(Counter::named("meanwhile")).unwrap();
    assert_eq!(found.add().get_blocking().unwrap(), 2, "the same life");
}

#[test]
fn a_second_standby_is_refused_before_it_says_that_it_stands_by_and_leaves_no_file() {
    let mut cluster = TestCluster::with_journal(1, 1).unwrap();
    cluster.start_standby("second").unwrap();
    let mut command = cluster.command().unwrap();
    let folder = tempfile::tempdir().unwrap();
    command
        .args(["head", "--port", "0", "--standby-of", cluster.address(), "--journal"])
        .arg(folder.path().join("third"));
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("has a standby already"), "{said}");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "");
    let left: Vec<_> = std::fs::read_dir(folder.path()).unwrap().collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn a_head_that_is_started_again_before_its_standby_has_taken_over_asks_it() {
    // The standby does not even notice.
    let slow = [("WINGBEAT_TAKEOVER_MS", "60000")];
    let mut cluster = TestCluster::with_journal_and_env(1, 1, &slow).unwrap();
    cluster.start_standby("second").unwrap();
    let _driver = join(&cluster);
    assert_eq!(double::remote(4).get_blocking().unwrap(), 8);
    // Whoever of the two is the head then, there is one.
    cluster.kill_head().unwrap();
    let leads = cluster.start_head().is_ok();
    if !leads {
        cluster.wait_for_takeover().unwrap();
    }
    assert_eq!(double::options().num_cpus(0.5).remote(5).get_blocking().unwrap(), 10);
}

#[test]
fn the_last_head_is_refused_also_where_the_one_that_has_taken_over_does_not_answer() {
    let mut cluster = TestCluster::with_journal(2, 1).unwrap();
    cluster.start_standby("second").unwrap();
    let (address, journal) = (cluster.address().to_owned(), cluster.journal());
    let _driver = join(&cluster);
    let counter = Counter::remote();
    assert_eq!(counter.add().get_blocking().unwrap(), 1);
    cluster.kill_head().unwrap();
    cluster.wait_for_takeover().unwrap();
    assert_eq!(counter.add().get_blocking().unwrap(), 2);
    let leader = Pid::from_raw(cluster.head_pid().unwrap() as i32).unwrap();
    kill_process(leader, Signal::STOP).unwrap();
    let port = address.rsplit(':').next().unwrap();
    // Its number would be later than that of the other, and what is in its file is older.
    let mut again = cluster.command().unwrap();
    let again = again.args(["head", "--port", port, "--journal"]).arg(&journal).output().unwrap();
    kill_process(leader, Signal::CONT).unwrap();
    assert!(!again.status.success(), "{}", String::from_utf8_lossy(&again.stderr));
    assert_eq!(counter.add().get_blocking().unwrap(), 3);
}

#[test]
fn a_head_that_is_stopped_before_it_may_lead_ends_at_once() {
    let mut cluster = TestCluster::with_journal(1, 1).unwrap();
    cluster.start_standby("second").unwrap();
    // It takes nothing over, and is in the journal: who starts the head again waits for an answer.
    let standby = Pid::from_raw(cluster.standby_pid().unwrap() as i32).unwrap();
    kill_process(standby, Signal::STOP).unwrap();
    cluster.kill_node(0).unwrap();
    cluster.kill_head().unwrap();
    cluster.kill_standby().unwrap();
    let mut again = cluster.command().unwrap();
    let mut again = Daemon::start(again.args(["head", "--port", "0", "--journal"]).arg(cluster.journal())).unwrap();
    let hears_signals = || {
        let status = std::fs::read_to_string(format!("/proc/{}/status", again.pid())).unwrap_or_default();
        let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:"))?.trim();
        (u64::from_str_radix(caught, 16).unwrap() & (1 << (libc::SIGTERM - 1)) != 0).then_some(())
    };
    assert!(poll(Duration::from_secs(60), hears_signals).is_some(), "{}", again.errors());
    kill_process(Pid::from_raw(again.pid() as i32).unwrap(), Signal::TERM).unwrap();
    again.wait_for_error("terminated; it ends before it has begun").unwrap();
    assert!(again.wait_for_end().unwrap(), "{}", again.errors());
}

/// Starts a head as where the head's machine was put back from an image, on another one: with a copy of the journal. What it says when it
/// is refused.
fn refused_with_a_copy(cluster: &TestCluster) -> String {
    let (journal, copy) = (cluster.journal(), cluster.folder().join("image"));
    std::fs::create_dir(&copy).unwrap();
    for ending in ["", "-wal", "-count"] {
        let name = format!("journal{ending}");
        std::fs::copy(journal.with_file_name(&name), copy.join(&name)).unwrap();
    }
    let mut other = cluster.command().unwrap();
    let output = other.args(["head", "--port", "0", "--journal"]).arg(copy.join("journal")).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success(), "{said}");
    said
}

#[test]
fn a_copy_of_the_journal_is_refused_beside_its_head_and_the_standby_takes_over_as_before() {
    let mut cluster = TestCluster::with_journal(2, 1).unwrap();
    cluster.start_standby("second").unwrap();
    let _driver = join(&cluster);
    until_standby(&cluster, |standby| standby["voters"] == 2);
    let said = refused_with_a_copy(&cluster);
    assert!(said.contains(&format!("hear, or have just heard, another head of it at {}", cluster.address())), "{said}");
    assert_eq!(double::remote(4).get_blocking().unwrap(), 8);
    cluster.kill_head().unwrap();
    cluster.wait_for_takeover().unwrap();
    assert_eq!(double::remote(5).get_blocking().unwrap(), 10);
}

#[test]
fn where_no_node_could_say_so_the_standby_refuses_a_copy_of_the_journal() {
    let mut cluster = TestCluster::with_journal(0, 0).unwrap();
    cluster.start_standby("second").unwrap();
    until_standby(&cluster, |standby| standby["voters"] == 0);
    let said = refused_with_a_copy(&cluster);
    assert!(said.contains(&format!("names follows another head of it at {}", cluster.address())), "{said}");
    cluster.kill_head().unwrap();
    cluster.wait_for_takeover().unwrap();
    cluster.add_node(&["--num-cpus", "1"]).unwrap();
    let _driver = join(&cluster);
    assert_eq!(double::remote(5).get_blocking().unwrap(), 10);
}

#[test]
fn a_head_without_standby_is_refused_while_the_standby_answers() {
    let mut cluster = TestCluster::with_journal(1, 1).unwrap();
    cluster.start_standby("second").unwrap();
    let (address, journal) = (cluster.address().to_owned(), cluster.journal());
    let _driver = join(&cluster);
    until_standby(&cluster, |standby| standby["voters"] == 1);
    // Without its vote the standby goes on standing by.
    let voter = Pid::from_raw(cluster.node_pid(0).unwrap() as i32).unwrap();
    kill_process(voter, Signal::STOP).unwrap();
    cluster.kill_head().unwrap();
    let mut again = cluster.command().unwrap();
    let port = address.rsplit(':').next().unwrap();
    let again = again.args(["head", "--without-standby", "--port", port, "--journal"]).arg(&journal).output().unwrap();
    kill_process(voter, Signal::CONT).unwrap();
    let said = String::from_utf8_lossy(&again.stderr).into_owned();
    assert!(!again.status.success() && said.contains("runs, and may take over"), "{said}");
    cluster.wait_for_takeover().unwrap();
    assert_eq!(double::remote(4).get_blocking().unwrap(), 8);
}

#[test]
fn a_cluster_that_is_stopped_ends_with_its_standby() {
    let mut cluster = TestCluster::with_journal(1, 1).unwrap();
    cluster.start_standby("second").unwrap();
    let standby = cluster.standby_pid().unwrap();
    cluster.stop().unwrap();
    assert!(wait_for_end(standby, Duration::from_secs(60)));
}

#[test]
fn a_head_without_a_journal_and_one_that_is_not_there_have_no_standby() {
    let cluster = TestCluster::start(0, 0).unwrap();
    let stand_by = |of: &str, file: &str| {
        let mut command = cluster.command().unwrap();
        command.args(["head", "--port", "0", "--standby-of", of, "--journal"]).arg(cluster.folder().join(file));
        let output = command.output().unwrap();
        assert!(!output.status.success());
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let said = stand_by(cluster.address(), "one");
    assert!(said.contains("keeps no journal") && said.contains("--journal FILE"), "{said}");
    let said = stand_by("127.0.0.1:1", "other");
    assert!(said.contains("is the head running"), "{said}");
}
