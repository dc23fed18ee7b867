//! A head may be killed and started again, with a journal and without: whoever runs goes on, and notices nothing.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::path::PathBuf;
use std::process::Stdio;
use std::time::{Duration, Instant};

use common::{Local, Started};
use serde::{Deserialize, Serialize};
use tokio::io::AsyncReadExt;
use wingbeat::{Bundle, Error, PlacementStrategy, get_all_blocking, placement_group};
use wingbeat_net::address::{Listener, Stream, dial_text};
use wingbeat_net::handshake::{Hello, Resumes, Role, Token, Welcome};
use wingbeat_tests::{Daemon, TestCluster};

#[wingbeat::remote]
fn double(number: u64) -> u64 {
    2 * number
}

/// Says that it has begun, and ends when it is told to.
#[wingbeat::remote]
fn gated(begun: PathBuf, go_on: PathBuf) -> u32 {
    std::fs::write(begun, "").unwrap();
    while !go_on.exists() {
        std::thread::sleep(Duration::from_millis(5));
    }
    std::process::id()
}

/// A task that waits for one of its own, which is made while the head is away.
#[wingbeat::remote]
async fn nested(begun: PathBuf, go_on: PathBuf) -> u64 {
    let inner = gated::remote(begun, go_on.clone());
    inner.await.unwrap();
    double::remote(4).await.unwrap()
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

    fn gated(&mut self, begun: PathBuf, go_on: PathBuf) -> u64 {
        std::fs::write(begun, "").unwrap();
        while !go_on.exists() {
            std::thread::sleep(Duration::from_millis(5));
        }
        self.add()
    }
}

/// Says that the tests are about a head without a journal.
const WITHOUT: &str = "WINGBEAT_TEST_WITHOUT_JOURNAL";

/// A driver of a cluster whose head keeps a journal, or not, where that is asked for.
fn cluster(nodes: usize, cpus: u32) -> (TestCluster, Local) {
    let cluster = match std::env::var_os(WITHOUT) {
        None => TestCluster::with_journal(nodes, cpus).unwrap(),
        Some(_) => TestCluster::start(nodes, cpus).unwrap(),
    };
    let init = wingbeat::init_at(cluster.address()).token(&cluster.token().unwrap()).namespace("restarted");
    let driver = Local::from(init);
    (cluster, driver)
}

fn restart(cluster: &mut TestCluster) {
    cluster.kill_head().unwrap();
    cluster.start_head().unwrap();
}

/// Two files: one that says that something has begun, and one that lets it go on.
struct Gate {
    begun: Started,
    go_on: Started,
}

impl Gate {
    fn new() -> Gate {
        Gate { begun: Started::new(), go_on: Started::new() }
    }

    fn open(&self) {
        std::fs::write(self.go_on.path(), "").unwrap();
    }
}

#[test]
fn what_runs_goes_on_and_what_is_submitted_meanwhile_is_done() {
    let (mut cluster, _driver) = cluster(2, 2);
    let gate = Gate::new();
    let running = gated::remote(gate.begun.path(), gate.go_on.path());
    let counter = Counter::remote();
    assert_eq!(counter.add().get_blocking().unwrap(), 1);
    let pid = counter.pid().get_blocking().unwrap();
    gate.begun.wait();
    cluster.kill_head().unwrap();
    let meanwhile: Vec<_> = (0..100).map(double::remote).collect();
    assert_eq!(counter.add().get_blocking().unwrap(), 2, "calls need no head");
    cluster.start_head().unwrap();
    assert_eq!(get_all_blocking(&meanwhile).unwrap(), (0..100).map(|number| 2 * number).collect::<Vec<_>>());
    gate.open();
    running.get_blocking().unwrap();
    assert_eq!(counter.add().get_blocking().unwrap(), 3);
    assert_eq!(counter.pid().get_blocking().unwrap(), pid, "it is the same life");
}

#[test]
fn a_call_that_runs_meanwhile_gives_its_result_and_the_actor_ends_with_its_handle() {
    let (mut cluster, _driver) = cluster(1, 2);
    let gate = Gate::new();
    let counter = Counter::remote();
    let call = counter.gated(gate.begun.path(), gate.go_on.path());
    gate.begun.wait();
    restart(&mut cluster);
    gate.open();
    assert_eq!(call.get_blocking().unwrap(), 1);
    let pid = counter.pid().get_blocking().unwrap();
    drop(counter);
    assert!(wingbeat_tests::wait_for_end(pid, std::time::Duration::from_secs(60)), "nobody holds it any more");
}

#[test]
fn a_task_that_waits_for_its_own_tasks_lends_its_cpu_to_the_next_head_too() {
    let (mut cluster, _driver) = cluster(1, 1);
    let gate = Gate::new();
    let outer = nested::remote(gate.begun.path(), gate.go_on.path());
    gate.begun.wait();
    restart(&mut cluster);
    gate.open();
    assert_eq!(outer.get_blocking().unwrap(), 8);
}

#[test]
fn an_actor_whose_node_ends_while_the_head_is_away_lives_again_elsewhere() {
    let (mut cluster, _driver) = cluster(1, 1);
    let counter = Counter::options().max_restarts(1).remote();
    assert_eq!(counter.add().get_blocking().unwrap(), 1);
    let pid = counter.pid().get_blocking().unwrap();
    cluster.kill_head().unwrap();
    cluster.kill_node(0).unwrap();
    cluster.start_head().unwrap();
    cluster.add_node(&["--num-cpus", "1"]).unwrap();
    let again = loop {
        match counter.pid().get_blocking() {
            Ok(again) => break again,
            Err(Error::ActorUnavailable { .. }) => {}
            Err(error) => panic!("{error}"),
        }
    };
    assert_ne!(again, pid);
}

#[test]
fn groups_and_what_is_in_them_stay_where_they_are() {
    let (mut cluster, _driver) = cluster(2, 2);
    let bundles = [Bundle::new().num_cpus(1.0), Bundle::new().num_cpus(1.0)];
    let group = placement_group(bundles).strategy(PlacementStrategy::StrictSpread).create_blocking().unwrap();
    let before = group.ready().get_blocking().unwrap();
    let counter = Counter::options().num_cpus(1.0).in_bundle(&group, 1).remote();
    let pid = counter.pid().get_blocking().unwrap();
    restart(&mut cluster);
    assert_eq!(group.ready().get_blocking().unwrap(), before);
    assert_eq!(double::options().in_bundle(&group, 0).remote(2).get_blocking().unwrap(), 4);
    assert_eq!(counter.pid().get_blocking().unwrap(), pid);
    group.remove_blocking().unwrap();
    // Its process ends in a moment, and may answer until then.
    let end = loop {
        if let Err(error) = counter.add().get_blocking() {
            break error;
        }
    };
    assert!(matches!(end, Error::ActorDied { .. }), "{end:?}");
}

#[test]
fn a_node_that_is_drained_is_drained_by_the_next_head_too() {
    let (mut cluster, driver) = cluster(1, 1);
    let node = cluster.node_numbers().unwrap().remove(0);
    let drain = |cluster: &TestCluster, how: &[&str]| {
        let output = cluster.command().unwrap().args(["drain", &node]).args(how).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    };
    drain(&cluster, &["--within", "1h", "--reason", "new kernel"]);
    restart(&mut cluster);
    let waits = double::remote(4);
    let begun = Instant::now();
    loop {
        let why = wingbeat::block_on(driver.session.why(waits.id())).unwrap();
        if why.reasons.iter().any(|reason| reason.contains("is being drained (new kernel)")) {
            break;
        }
        assert!(begun.elapsed() < Duration::from_secs(60), "{why:?}");
        std::thread::yield_now();
    }
    drain(&cluster, &["--undo"]);
    assert_eq!(waits.get_blocking().unwrap(), 8);
}

#[test]
fn a_head_that_a_supervisor_stops_leaves_its_cluster_to_the_next() {
    let (mut cluster, _driver) = cluster(1, 2);
    let counter = Counter::remote();
    assert_eq!(counter.add().get_blocking().unwrap(), 1);
    cluster.terminate_head().unwrap();
    assert_eq!(counter.add().get_blocking().unwrap(), 2);
    cluster.start_head().unwrap();
    assert_eq!(double::remote(4).get_blocking().unwrap(), 8);
    assert_eq!(counter.add().get_blocking().unwrap(), 3);
}

fn is_hang_up_ignored() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).unwrap();
    u64::from_str_radix(ignored.trim(), 16).unwrap() & 1 != 0
}

#[test]
fn a_head_whose_terminal_is_closed_leaves_its_cluster_to_the_next() {
    // Below `nohup` nobody hears of that.
    if std::env::var_os(WITHOUT).is_some() || is_hang_up_ignored() {
        return;
    }
    let (mut cluster, _driver) = cluster(1, 2);
    let counter = Counter::remote();
    assert_eq!(counter.add().get_blocking().unwrap(), 1);
    let mut last = cluster.take_head().unwrap();
    let pid = rustix::process::Pid::from_raw(last.pid() as i32).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::HUP).unwrap();
    assert!(last.wait_for_end().unwrap());
    last.wait_for_error("nodes and programs wait").unwrap();
    cluster.start_head().unwrap();
    assert_eq!(double::remote(4).get_blocking().unwrap(), 8);
    assert_eq!(counter.add().get_blocking().unwrap(), 2);
}

/// As where the disk of the head is lost, and a backup is put back.
#[test]
fn a_head_with_a_copy_of_the_journal_from_before_the_last_head_goes_on_with_what_is_in_the_copy() {
    if std::env::var_os(WITHOUT).is_some() {
        return;
    }
    let (mut cluster, _driver) = cluster(1, 2);
    let counter = Counter::remote();
    assert_eq!(counter.add().get_blocking().unwrap(), 1);
    let (journal, copy) = (cluster.journal(), cluster.folder().join("copy"));
    cluster.terminate_head().unwrap();
    std::fs::copy(&journal, &copy).unwrap();
    cluster.start_head().unwrap();
    assert_eq!(Counter::remote().add().get_blocking().unwrap(), 1, "all are with the next head");
    cluster.terminate_head().unwrap();
    // After a clean stop the file is complete by itself.
    std::fs::remove_file(journal.with_file_name("journal-count")).unwrap();
    std::fs::rename(&copy, &journal).unwrap();
    cluster.start_head().unwrap();
    assert_eq!(Counter::remote().add().get_blocking().unwrap(), 1);
    assert_eq!(counter.add().get_blocking().unwrap(), 2, "it is the same life");
    // Its lines are read by a thread of their own.
    let said =
        || Some(cluster.head_errors()).filter(|said| said.contains("an earlier head, which had 1 node and 1 program"));
    let said =
        wingbeat_tests::poll(Duration::from_secs(60), said).unwrap_or_else(|| panic!("{}", cluster.head_errors()));
    assert!(!said.contains("given up"), "{said}");
}

/// As where a machine was put back from an image, and its head starts by itself.
#[test]
fn a_head_with_a_copy_of_the_journal_is_refused_while_nodes_hear_another_one() {
    if std::env::var_os(WITHOUT).is_some() {
        return;
    }
    let (mut cluster, _driver) = cluster(2, 1);
    assert_eq!(double::remote(4).get_blocking().unwrap(), 8);
    let (journal, copy) = (cluster.journal(), cluster.folder().join("copy"));
    cluster.terminate_head().unwrap();
    std::fs::copy(&journal, &copy).unwrap();
    cluster.start_head().unwrap();
    // A task may be done by a node that is not back yet.
    let begun = Instant::now();
    while cluster.state().unwrap()["nodes"].as_array().map_or(0, Vec::len) < 2 {
        assert!(begun.elapsed() < Duration::from_secs(60), "the nodes are not back");
    }
    for more in [None, Some("--without-standby")] {
        let mut other = cluster.command().unwrap();
        let output = other.args(["head", "--port", "0", "--journal"]).arg(&copy).args(more).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && said.contains("another head of it at"), "{more:?}: {said}");
        assert!(said.contains(cluster.address()), "{said}");
    }
    assert_eq!(double::remote(5).get_blocking().unwrap(), 10);
}

#[test]
fn a_head_with_a_copy_of_the_journal_that_was_started_between_two_heads_ends_when_nodes_hear_another_one() {
    if std::env::var_os(WITHOUT).is_some() {
        return;
    }
    let (mut cluster, _driver) = cluster(2, 1);
    assert_eq!(double::remote(4).get_blocking().unwrap(), 8);
    let (journal, copy) = (cluster.journal(), cluster.folder().join("copy"));
    cluster.terminate_head().unwrap();
    std::fs::copy(&journal, &copy).unwrap();
    let mut command = cluster.command().unwrap();
    let mut other = Daemon::start(command.args(["head", "--port", "0", "--journal"]).arg(&copy)).unwrap();
    other.wait_for("wingbeat head listening at").unwrap();
    cluster.start_head().unwrap();
    let said = other.wait_for_error("another head of it at").unwrap();
    assert!(said.contains(cluster.address()), "{said}");
    assert!(!other.wait_for_end().unwrap(), "it is no success");
    assert_eq!(double::remote(5).get_blocking().unwrap(), 10);
}

#[test]
fn a_cluster_that_is_stopped_while_it_comes_back_ends_in_order() {
    let (mut cluster, driver) = cluster(2, 1);
    assert_eq!(double::remote(4).get_blocking().unwrap(), 8);
    restart(&mut cluster);
    let output = cluster.command().unwrap().arg("stop").output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    for node in 0..2 {
        assert!(cluster.wait_for_node_end(node).unwrap(), "it was not told");
    }
    let error = double::remote(4).get_blocking().unwrap_err();
    assert!(error.to_string().contains("stopped"), "{error}");
    drop(driver);
}

#[test]
fn a_cluster_outlives_one_head_after_the_other() {
    let (mut cluster, _driver) = cluster(2, 2);
    let counter = Counter::remote();
    for life in 1..=5 {
        assert_eq!(counter.add().get_blocking().unwrap(), life);
        restart(&mut cluster);
        let tasks: Vec<_> = (0..50).map(double::remote).collect();
        assert_eq!(get_all_blocking(&tasks).unwrap()[49], 98);
    }
}

#[test]
fn all_of_that_holds_without_a_journal_too() {
    if std::env::var_os(WITHOUT).is_some() {
        return;
    }
    let mut again = std::process::Command::new(std::env::current_exe().unwrap());
    // A head without a journal that a supervisor stops ends its cluster.
    again.args(["--skip", "supervisor", "--skip", "joining", "--test-threads", "2"]).env(WITHOUT, "1");
    // Where all who have kept what it knew are gone, all of this time is waited.
    again.env("WINGBEAT_LOST_MS", "5000");
    let ended = again.output().unwrap();
    let said = [ended.stdout, ended.stderr].concat();
    assert!(ended.status.success(), "{}", String::from_utf8_lossy(&said));
}

#[test]
fn names_quotas_and_jobs_whose_drivers_are_gone_are_known_without_a_journal() {
    let mut cluster = TestCluster::start(2, 2).unwrap();
    let join = |cluster: &TestCluster| {
        Local::from(wingbeat::init_at(cluster.address()).token(&cluster.token().unwrap()).namespace("kept"))
    };
    let quota = cluster.command().unwrap().args(["quota", "kept", "CPU=3"]).status().unwrap();
    assert!(quota.success());
    let (pid, group) = {
        let _driver = join(&cluster);
        let counter = wingbeat::block_on(Counter::options().name("counter").detached().get_or_create()).unwrap();
        assert_eq!(counter.add().get_blocking().unwrap(), 1);
        let group = placement_group([Bundle::new().num_cpus(1.0)]).name("group").detached().create_blocking().unwrap();
        group.ready().get_blocking().unwrap();
        (counter.pid().get_blocking().unwrap(), group.id())
    };
    for calls in 2..4 {
        restart(&mut cluster);
        let _driver = join(&cluster);
        let counter = wingbeat::block_on(Counter::named("counter")).unwrap();
        assert_eq!(counter.add().get_blocking().unwrap(), calls, "the same life");
        assert_eq!(counter.pid().get_blocking().unwrap(), pid);
        let state = cluster.state().unwrap();
        assert_eq!(state["placement_groups"][0]["id"], serde_json::json!(group));
        assert_eq!(state["quotas"][0]["namespace"], "kept");
    }
}

#[test]
#[ignore = "prints how long it takes: `cargo test --release -p wingbeat-tests --test restarted -- --ignored --nocapture`"]
fn how_soon_the_next_head_schedules_under_load() {
    let (mut cluster, driver) = cluster(2, 2);
    let is_over = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let (session, ends) = (driver.session.clone(), is_over.clone());
    let load = std::thread::spawn(move || {
        let _entered = session.enter();
        let mut done = 0;
        while !ends.load(std::sync::atomic::Ordering::Relaxed) {
            let tasks: Vec<_> = (0..200).map(double::remote).collect();
            done += get_all_blocking(&tasks).unwrap().len();
        }
        done
    });
    for number in 1..=10_u32 {
        cluster.kill_head().unwrap();
        let killed = Instant::now();
        cluster.start_head().unwrap();
        let starts = killed.elapsed();
        // Nobody has a lease of this shape.
        let shape = f64::from(number) / 100.0;
        assert_eq!(double::options().num_cpus(shape).remote(4).get_blocking().unwrap(), 8);
        println!("the next head listens after {starts:?}, and has scheduled after {:?}", killed.elapsed());
    }
    is_over.store(true, std::sync::atomic::Ordering::Relaxed);
    println!("{} tasks, none failed", load.join().unwrap());
}

/// In the place of the head, takes in somebody who wants to join, hears the question, and ends without an answer.
fn hear_a_join_and_end(cluster: &mut TestCluster, joining: impl FnOnce(&TestCluster)) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let (token, address) = (Token::new(cluster.token().unwrap().trim()), cluster.address().to_owned());
    let known = runtime.block_on(dial_text(&address, "the head", &token, Hello::of_tool())).unwrap().1;
    cluster.kill_head().unwrap();
    let (asks, asked) = std::sync::mpsc::channel();
    let listening = Listener::bind(known.address.process, Some(address.parse().unwrap()));
    let listener = runtime.block_on(listening).unwrap();
    runtime.spawn(async move {
        let welcome = Welcome { address: listener.address().clone(), ..known };
        let accept = move |mut stream: Stream, hello: Hello| {
            let asks = asks.clone();
            tokio::spawn(async move {
                // Others come back.
                let is_new = hello.resumes == Resumes::Nothing;
                if is_new && matches!(hello.role, Role::Driver(_) | Role::Node(_)) {
                    stream.read_u8().await.unwrap();
                    asks.send(stream).unwrap();
                }
            });
        };
        listener.serve(token, welcome, accept).await;
    });
    joining(cluster);
    let open = asked.recv_timeout(Duration::from_secs(60)).unwrap();
    runtime.shutdown_timeout(Duration::from_secs(60));
    drop(open);
}

#[test]
fn who_is_joining_when_the_head_is_killed_joins_the_next_one() {
    let (mut cluster, driver) = cluster(0, 0);
    let mut node = None;
    hear_a_join_and_end(&mut cluster, |cluster| {
        let mut command = cluster.command().unwrap();
        command.args(["worker", "--head", cluster.address(), "--num-cpus", "1", "--object-store-memory", "64MiB"]);
        node = Some(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap());
    });
    cluster.start_head().unwrap();
    assert_eq!(double::remote(4).get_blocking().unwrap(), 8, "the node has joined");
    let (address, token) = (cluster.address().to_owned(), cluster.token().unwrap());
    let mut second = None;
    hear_a_join_and_end(&mut cluster, |_| {
        second = Some(std::thread::spawn(move || {
            let init = wingbeat::init_at(&address).token(&token).namespace("second");
            let _driver = Local::from(init);
            double::remote(5).get_blocking().unwrap()
        }));
    });
    cluster.start_head().unwrap();
    assert_eq!(second.unwrap().join().unwrap(), 10, "the driver has joined");
    assert_eq!(double::remote(6).get_blocking().unwrap(), 12);
    drop(driver);
    let mut node = node.unwrap();
    node.kill().unwrap();
    node.wait().unwrap();
}
