//! Labels, priorities, quotas, draining and explanations in clusters of real processes.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::future::IntoFuture;
use std::io::Write;
use std::path::PathBuf;
use std::time::Duration;

use common::{Local, Started};
use wingbeat::{Error, NodeId, get_all_blocking, put};
use wingbeat_tests::{TestCluster, poll};

/// Only something that hangs takes so long.
const LIMIT: Duration = Duration::from_secs(60);

#[wingbeat::remote]
fn node() -> String {
    wingbeat::current_node().unwrap().to_string()
}

#[wingbeat::remote]
fn node_with(data: Vec<u8>) -> String {
    format!("{} bytes on {}", data.len(), node())
}

#[wingbeat::remote]
fn bytes(n: usize) -> Vec<u8> {
    vec![7; n]
}

/// Stays until its marker is gone.
#[wingbeat::remote]
fn stay(started: PathBuf) -> String {
    std::fs::write(&started, "").unwrap();
    while started.exists() {
        std::thread::yield_now();
    }
    node()
}

/// Stays the first time, until it is ended; the second time it answers.
#[wingbeat::remote]
fn stay_once(started: PathBuf) -> String {
    if !started.exists() {
        std::fs::write(&started, "").unwrap();
        loop {
            std::thread::park();
        }
    }
    node()
}

/// Adds its line to a file.
#[wingbeat::remote]
fn notes(file: PathBuf, line: String) {
    let mut file = std::fs::OpenOptions::new().create(true).append(true).open(file).unwrap();
    file.write_all(format!("{line}\n").as_bytes()).unwrap();
}

#[wingbeat::remote]
fn square(x: u64) -> u64 {
    x * x
}

struct Tally;

#[wingbeat::actor]
impl Tally {
    fn new() -> Self {
        Tally
    }
    fn node(&self) -> String {
        node()
    }
}

fn join(cluster: &TestCluster) -> Local {
    Local::from(wingbeat::init_at(cluster.address()).token(&cluster.token().unwrap()))
}

fn wingbeat(cluster: &TestCluster, args: &[&str]) -> (bool, String) {
    let output = cluster.command().unwrap().args(args).output().unwrap();
    let text = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8(text).unwrap())
}

#[test]
fn labels_choose_the_node_and_the_next_rules_where_the_first_match_nothing_with_room() {
    let mut cluster = TestCluster::start(0, 0).unwrap();
    for zone in ["a", "b"] {
        cluster.add_node(&["--num-cpus", "1", "--label", &format!("zone={zone}")]).unwrap();
    }
    let ids = cluster.node_numbers().unwrap();
    let _joined = join(&cluster);
    for (rules, at) in [("zone=a", 0), ("zone!=a", 1), ("zone in (b, c)", 1), ("zone not in (b)", 0)] {
        assert_eq!(node::options().labels(rules).remote().get_timeout_blocking(LIMIT).unwrap(), ids[at], "{rules}");
    }
    let started = Started::new();
    let stays = stay::options().labels("zone=a").remote(started.path());
    started.wait();
    let elsewhere = node::options().labels("zone=a").labels("zone").remote();
    assert_eq!(elsewhere.get_timeout_blocking(LIMIT).unwrap(), ids[1]);
    let never = node::options().labels("zone=c").remote().get_timeout_blocking(LIMIT).unwrap_err();
    assert!(matches!(never, Error::Infeasible { .. }), "{never}");
    let bad = node::options().labels("zone==").remote().get_timeout_blocking(LIMIT).unwrap_err();
    assert!(matches!(bad, Error::InvalidOption { .. }), "{bad}");
    std::fs::remove_file(started.path()).unwrap();
    assert_eq!(stays.get_timeout_blocking(LIMIT).unwrap(), ids[0]);
}

#[test]
fn a_request_that_is_to_wait_for_its_node_gets_it_when_it_comes() {
    let mut cluster = TestCluster::start(1, 1).unwrap();
    let _joined = join(&cluster);
    let waits = node::options().num_cpus(2.0).wait_until_feasible().remote();
    assert!(waits.get_timeout_blocking(Duration::from_millis(50)).is_err());
    cluster.add_node(&["--num-cpus", "2"]).unwrap();
    assert_eq!(waits.get_timeout_blocking(LIMIT).unwrap(), cluster.node_numbers().unwrap()[1]);
}

#[test]
fn a_task_goes_to_its_data() {
    let cluster = TestCluster::start(2, 2).unwrap();
    let _joined = join(&cluster);
    for id in cluster.node_numbers().unwrap() {
        let there: NodeId = id.parse().unwrap();
        let data = bytes::options().on_node(there).remote(32 << 20);
        let found = node_with::remote(&data).get_timeout_blocking(LIMIT).unwrap();
        assert_eq!(found, format!("{} bytes on {id}", 32 << 20));
    }
}

#[test]
fn a_drained_node_gives_its_work_to_others_and_ends() {
    let mut cluster = TestCluster::start(1, 3).unwrap();
    let _joined = join(&cluster);
    let (started, once_started) = (Started::new(), Started::new());
    let task = stay_once::options().max_retries(1).remote(started.path());
    let once = stay_once::options().max_retries(0).remote(once_started.path());
    started.wait();
    once_started.wait();
    let tally = Tally::options().max_restarts(1).remote();
    let drained = tally.node().get_timeout_blocking(LIMIT).unwrap();
    cluster.add_node(&["--num-cpus", "2"]).unwrap();
    let other = cluster.node_numbers().unwrap()[1].clone();
    let (ok, text) = wingbeat(&cluster, &["drain", &drained, "--within", "0s", "--reason", "new kernel", "--stop"]);
    assert!(ok && text.contains("takes no new work"), "{text}");
    assert_eq!(task.get_timeout_blocking(LIMIT).unwrap(), other);
    let ended = once.get_timeout_blocking(LIMIT).unwrap_err().to_string();
    assert!(ended.contains("new kernel"), "it may not begin twice, and hears why: {ended}");
    // A call that was on its way fails with the life that it was sent to, which may answer until its process has ended.
    let elsewhere = || tally.node().get_timeout_blocking(LIMIT).ok().filter(|node| *node != drained);
    assert_eq!(poll(LIMIT, elsewhere), Some(other));
    assert!(cluster.wait_for_node_end(0).unwrap(), "the daemon ends in order");
}

#[test]
fn a_drain_can_be_taken_back_and_an_unknown_node_is_an_error() {
    let cluster = TestCluster::start(1, 1).unwrap();
    let joined = join(&cluster);
    let id = cluster.node_numbers().unwrap()[0].clone();
    let (ok, text) = wingbeat(&cluster, &["drain", &id, "--within", "1h"]);
    assert!(ok, "{text}");
    let waits = square::remote(3);
    let why = wingbeat::block_on(joined.session.why(waits.id())).unwrap();
    assert!(why.reasons.iter().any(|reason| reason.contains("is being drained (maintenance)")), "{why:?}");
    let (ok, text) = wingbeat(&cluster, &["drain", &id, "--undo"]);
    assert!(ok, "{text}");
    assert_eq!(waits.get_timeout_blocking(LIMIT).unwrap(), 9);
    // Whole: the beginning of an id names the node that has it.
    let (ok, text) = wingbeat(&cluster, &["drain", "node-000000000001"]);
    assert!(!ok && text.contains("there is no node-000000000001"), "{text}");
}

#[test]
fn a_quota_holds_one_user_back_and_the_other_goes_on() {
    let cluster = TestCluster::start(1, 3).unwrap();
    let (ok, text) = wingbeat(&cluster, &["quota", "greedy", "CPU=1"]);
    assert!(ok && text.contains("greedy may hold 1 CPU"), "{text}");
    let init = |namespace: &str| {
        let init = wingbeat::init_at(cluster.address()).token(&cluster.token().unwrap()).namespace(namespace);
        wingbeat::block_on(init.global(false).log_to_driver(false).into_future()).unwrap()
    };
    let (greedy, modest) = (init("greedy"), init("modest"));
    let started: Vec<Started> = (0..2).map(|_| Started::new()).collect();
    let (first, second) = {
        let _entered = greedy.enter();
        let first = stay::remote(started[0].path());
        started[0].wait();
        (first, stay::remote(started[1].path()))
    };
    let why = wingbeat::block_on(greedy.why(second.id())).unwrap();
    assert!(why.reasons.iter().any(|reason| reason.contains("`greedy` may hold 1 CPU at a time")), "{why:?}");
    assert!(why.help.iter().any(|help| help.contains("wingbeat quota greedy")), "{why:?}");
    let other = {
        let _entered = modest.enter();
        (0..20).map(square::remote).collect::<Vec<_>>()
    };
    get_all_blocking(&other).unwrap();
    std::fs::remove_file(started[0].path()).unwrap();
    first.get_timeout_blocking(LIMIT).unwrap();
    started[1].wait();
    std::fs::remove_file(started[1].path()).unwrap();
    second.get_timeout_blocking(LIMIT).unwrap();
    let (_, text) = wingbeat(&cluster, &["quota"]);
    assert!(text.contains("greedy:") && text.contains("of 1 CPU"), "{text}");
    assert!(wingbeat(&cluster, &["quota", "greedy", "--remove"]).0);
    for session in [greedy, modest] {
        wingbeat::block_on(session.shutdown());
    }
}

#[test]
fn a_head_that_was_killed_knows_its_cluster_its_quotas_and_its_groups_again() {
    let mut cluster = TestCluster::with_journal(1, 1).unwrap();
    assert!(wingbeat(&cluster, &["quota", "team", "CPU=3"]).0);
    let before = {
        let joined =
            Local::from(wingbeat::init_at(cluster.address()).token(&cluster.token().unwrap()).namespace("team"));
        let group = |name: &str| {
            let group = wingbeat::placement_group([wingbeat::Bundle::new().num_cpus(0.5)]).name(name).detached();
            group.create_blocking().unwrap()
        };
        let (kept, removed) = (group("kept"), group("removed"));
        kept.ready().get_timeout_blocking(LIMIT).unwrap();
        removed.remove_blocking().unwrap();
        let id = joined.session.cluster();
        // The head is killed while the driver is there; what it acknowledged is on the disk.
        cluster.kill_head().unwrap();
        id
    };
    cluster.start_head().unwrap();
    let state = cluster.state().unwrap();
    assert_eq!(state["cluster"], serde_json::json!(before));
    let groups = state["placement_groups"].as_array().unwrap();
    assert_eq!(groups.len(), 1, "{groups:?}");
    assert_eq!(groups[0]["name"]["name"], "kept");
    assert!(wingbeat(&cluster, &["quota"]).1.lines().any(|line| line.contains("team:") && line.contains("of 3 CPU")));
}

#[test]
fn the_more_important_job_goes_first() {
    let cluster = TestCluster::start(1, 1).unwrap();
    let init = |priority: i32| {
        let init = wingbeat::init_at(cluster.address()).token(&cluster.token().unwrap()).priority(priority);
        wingbeat::block_on(init.global(false).log_to_driver(false).into_future()).unwrap()
    };
    let (holds, low, high) = (init(1), init(-1), init(1));
    let started = Started::new();
    let dir = tempfile::tempdir().unwrap();
    let order = dir.path().join("order");
    let held = {
        let _entered = holds.enter();
        let held = stay::remote(started.path());
        started.wait();
        held
    };
    // The less important job asks first. Both wait for the one CPU, which the head knows before it is free.
    let asks = |session: &wingbeat::Session, what: &str, count: usize| {
        let _entered = session.enter();
        let tasks: Vec<_> = (0..count).map(|_| notes::remote(order.clone(), what.to_owned())).collect();
        let why = || wingbeat::block_on(session.why(tasks[0].id())).unwrap();
        let waits = || why().reasons.iter().any(|reason| reason.contains("has 0 CPU free of 1")).then_some(());
        assert!(poll(LIMIT, waits).is_some(), "{:?}", why());
        tasks
    };
    let (later, first) = (asks(&low, "low", 5), asks(&high, "high", 1));
    std::fs::remove_file(started.path()).unwrap();
    held.get_timeout_blocking(LIMIT).unwrap();
    get_all_blocking(&first).unwrap();
    get_all_blocking(&later).unwrap();
    let order = std::fs::read_to_string(&order).unwrap();
    assert_eq!(order.lines().collect::<Vec<_>>(), ["high", "low", "low", "low", "low", "low"]);
    for session in [holds, low, high] {
        wingbeat::block_on(session.shutdown());
    }
}

#[test]
fn why_answers_for_a_task_from_its_arguments_to_its_worker_process() {
    let cluster = TestCluster::start(1, 1).unwrap();
    let joined = join(&cluster);
    let started = Started::new();
    let runs = stay::remote(started.path());
    started.wait();
    let text = |id: String| {
        let (ok, text) = wingbeat(&cluster, &["why", &id]);
        assert!(ok, "{text}");
        text
    };
    let running = text(runs.id().to_string());
    assert!(running.contains("runs in the worker process with pid") && running.contains("holds 1 CPU"), "{running}");
    let waits = square::remote(3);
    let after = square::remote(&waits);
    let queued = text(waits.id().to_string());
    assert!(queued.contains("square") && queued.contains("waits for a lease"), "{queued}");
    assert!(queued.contains("has 0 CPU free of 1") && queued.contains("stay of process-"), "{queued}");
    let blocked = text(after.id().to_string());
    assert!(blocked.contains("waits for its arguments") && blocked.contains(&waits.id().to_string()), "{blocked}");
    let tally = Tally::remote();
    let call = tally.node();
    // The head hears of the actor in a moment.
    let called = poll(LIMIT, || Some(text(call.id().to_string())).filter(|text| text.contains("waits to be placed")));
    assert!(called.is_some_and(|text| text.contains("actor")), "{}", text(call.id().to_string()));
    std::fs::remove_file(started.path()).unwrap();
    assert_eq!(after.get_timeout_blocking(LIMIT).unwrap(), 81);
    assert!(text(after.id().to_string()).contains("is done"));
    let there = put(&1u64).unwrap();
    assert!(text(there.id().to_string()).contains("is done"));
    let (ok, bad) = wingbeat(&cluster, &["why", "nothing"]);
    assert!(!ok && bad.contains("task-…"), "{bad}");
    drop(joined);
}

/// Answers at once, or when its marker is gone.
#[wingbeat::remote]
fn stay_if(started: Option<PathBuf>) {
    if let Some(started) = started {
        std::fs::write(&started, "").unwrap();
        while started.exists() {
            std::thread::yield_now();
        }
    }
}

#[test]
fn a_short_task_that_was_sent_behind_one_that_turns_out_to_be_long_runs_elsewhere() {
    let _local = Local::start(2);
    for _ in 0..200 {
        // One after another, they need one worker process, and are known to be short.
        stay_if::remote(None).get_blocking().unwrap();
    }
    for _ in 0..10 {
        let started = Started::new();
        let long = stay_if::remote(Some(started.path()));
        started.wait();
        // Sent when nobody can know yet that the other is long.
        stay_if::remote(None).get_timeout_blocking(LIMIT).unwrap();
        std::fs::remove_file(started.path()).unwrap();
        long.get_timeout_blocking(LIMIT).unwrap();
        for _ in 0..200 {
            stay_if::remote(None).get_blocking().unwrap();
        }
    }
}
