//! `wingbeat::testing`: clusters for users' tests. They have what they were asked for, break where they are told to, and leave nothing.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use common::Started;
use wingbeat::testing::{TestCluster, TestNode};
use wingbeat::{NodeId, get_all_blocking};
use wingbeat_tests::{Process, daemon_of, is_root, poll};

/// Only something that hangs takes so long.
const LIMIT: Duration = Duration::from_secs(90);

#[wingbeat::remote]
fn total(upto: u64) -> u64 {
    (0..upto).sum()
}

#[wingbeat::remote]
fn length(data: Vec<u8>) -> usize {
    data.len()
}

#[wingbeat::remote]
fn pid() -> u32 {
    std::process::id()
}

/// The process id of the daemon of the node on which it runs.
#[wingbeat::remote]
fn daemon() -> u32 {
    daemon_of(std::process::id())
}

#[wingbeat::remote]
fn variable(name: String) -> Option<String> {
    std::env::var(name).ok()
}

#[wingbeat::remote]
fn prints(text: String) {
    println!("{text}");
}

/// Says that it has begun, and returns when it may: its node's daemon.
#[wingbeat::remote]
fn holds(place: PathBuf) -> u32 {
    let own = std::process::id();
    std::fs::write(place.join(format!("writing-{own}")), "").unwrap();
    std::fs::rename(place.join(format!("writing-{own}")), place.join(format!("began-{own}"))).unwrap();
    while !place.join("go").exists() {
        std::thread::yield_now();
    }
    daemon_of(own)
}

/// Starts a process that outlives everybody who lets it, and stays.
#[wingbeat::remote]
#[allow(clippy::zombie_processes, reason = "whoever ends the task must end its child too")]
fn leaves_a_child(started: PathBuf) {
    let child = Command::new("setsid").args(["sleep", "1000"]).spawn().unwrap();
    std::fs::write(started.with_extension("tmp"), child.id().to_string()).unwrap();
    std::fs::rename(started.with_extension("tmp"), started).unwrap();
    loop {
        std::thread::park();
    }
}

struct Counter {
    n: u64,
}

#[wingbeat::actor]
impl Counter {
    fn new() -> Self {
        Counter { n: 0 }
    }
    fn add(&mut self) -> u64 {
        self.n += 1;
        self.n
    }
}

/// The worker processes that hold something there.
fn began(place: &Path) -> Vec<Process> {
    let names = std::fs::read_dir(place).unwrap().flatten().map(|entry| entry.file_name().into_string().unwrap());
    names.filter_map(|name| Process::of(name.strip_prefix("began-")?.parse().ok()?)).collect()
}

fn wait_until_began(place: &Path, count: usize) -> Vec<Process> {
    poll(LIMIT, || Some(began(place)).filter(|began| began.len() == count)).unwrap()
}

/// The state of a process, as `ps` shows it.
fn state(pid: u32) -> String {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    stat.rsplit(')').next().unwrap().split_whitespace().next().unwrap().to_owned()
}

/// Begins another test of this file in a process of its own, with this variable set.
fn begin(test: &str, variable: &str, value: &Path) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--test-threads=2"]).env(variable, value).stdin(Stdio::null());
    command
}

/// The processes in whose environment this is.
fn with(variable: &str, value: &Path) -> Vec<Process> {
    let entry = format!("{variable}={}", value.display());
    let has_it = |pid: &u32| {
        let environ = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        environ.split(|byte| *byte == 0).any(|other| other == entry.as_bytes())
    };
    let entries = std::fs::read_dir("/proc").unwrap().flatten();
    entries
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter(has_it)
        .filter_map(Process::of)
        .collect()
}

#[test]
fn survives_the_loss_of_a_node() -> wingbeat::Result<()> {
    let cluster = TestCluster::builder().nodes(2).num_cpus(2).start()?;
    let sums: Vec<_> = (0..100).map(|_| total::remote(100)).collect();
    cluster.kill_node(0)?;
    assert_eq!(get_all_blocking(&sums)?, vec![4950; 100]);
    Ok(())
}

#[test]
fn nodes_have_what_they_were_asked_for() {
    let cluster = TestCluster::builder()
        .nodes(2)
        .num_cpus(3)
        .label("zone", "a")
        .node(TestNode::default().num_gpus(2).label("zone", "b").resource("license", 1.0))
        .env("WINGBEAT_TEST_GREETING", "hello")
        .start()
        .unwrap();
    let state = wingbeat::block_on(cluster.session().runtime().cluster_state()).unwrap();
    let has = |node: usize, resource: &str| {
        let id = cluster.node_id(node).unwrap();
        state.nodes.iter().find(|node| node.info.id == id).unwrap().info.resources.get(resource).as_f64()
    };
    assert_eq!([0, 1, 2].map(|node| has(node, "CPU")), [3.0, 3.0, 1.0]);
    assert_eq!([0, 1, 2].map(|node| has(node, "GPU")), [0.0, 0.0, 2.0]);
    assert_eq!([0, 2].map(|node| has(node, "license")), [0.0, 1.0]);
    let visible = variable::options().num_gpus(2.0).remote("CUDA_VISIBLE_DEVICES".to_owned());
    assert_eq!(visible.get_blocking().unwrap().as_deref(), Some("0,1"));
    let there = daemon::options().labels("zone=b").remote().get_blocking().unwrap();
    assert_eq!(there, cluster.node_pid(2).unwrap());
    let greeting = variable::remote("WINGBEAT_TEST_GREETING".to_owned());
    assert_eq!(greeting.get_blocking().unwrap().as_deref(), Some("hello"));
    let added = cluster.add_node(TestNode::default().label("zone", "c")).unwrap();
    assert_eq!((added, cluster.nodes()), (3, 4));
    let there = daemon::options().labels("zone=c").remote().get_blocking().unwrap();
    assert_eq!(there, cluster.node_pid(3).unwrap());
}

#[test]
fn clusters_of_tests_that_run_at_the_same_time_do_not_see_each_other() {
    let both = std::sync::Barrier::new(2);
    let test = || {
        let cluster = TestCluster::builder().start().unwrap();
        both.wait();
        let counter = Counter::options().name("counter").namespace("tests").remote();
        assert_eq!(counter.add().get_blocking().unwrap(), 1);
        both.wait();
        let same = wingbeat::block_on(Counter::named_in("tests", "counter")).unwrap();
        assert_eq!(same.add().get_blocking().unwrap(), 2);
        assert_eq!(daemon::remote().get_blocking().unwrap(), cluster.node_pid(0).unwrap());
        both.wait();
    };
    std::thread::scope(|threads| {
        threads.spawn(test);
        threads.spawn(test);
    });
}

#[test]
fn of_two_clusters_of_a_thread_the_last_is_used_whichever_ends_first() {
    let on = |cluster: &TestCluster| daemon::remote().get_blocking().unwrap() == cluster.node_pid(0).unwrap();
    let first = TestCluster::builder().start().unwrap();
    let second = TestCluster::builder().start().unwrap();
    assert!(on(&second));
    drop(first);
    assert!(on(&second));
    let third = TestCluster::builder().start().unwrap();
    assert!(on(&third));
    drop(third);
    assert!(on(&second));
    drop(second);
    assert!(matches!(daemon::remote().get_blocking(), Err(wingbeat::Error::NoSession)));
}

#[test]
fn a_killed_node_is_gone_with_all_that_ran_there_and_its_tasks_run_elsewhere() {
    let place = tempfile::tempdir().unwrap();
    let cluster = TestCluster::builder().nodes(2).start().unwrap();
    let held: Vec<_> = (0..2).map(|_| holds::remote(place.path().to_owned())).collect();
    let workers = wait_until_began(place.path(), 2);
    let killed = cluster.node_pid(0).unwrap();
    let its_own: Vec<_> = workers.into_iter().filter(|worker| daemon_of(worker.pid) == killed).collect();
    assert_eq!(its_own.len(), 1);
    cluster.kill_node(0).unwrap();
    assert!(!its_own[0].is_alive() && Process::of(killed).is_none());
    std::fs::write(place.path().join("go"), "").unwrap();
    let left = cluster.node_pid(1).unwrap();
    assert_eq!(get_all_blocking(&held).unwrap(), [left, left]);
    for refused in [cluster.kill_node(0), cluster.kill_node(2), cluster.cut(1).map(drop)] {
        let why = refused.unwrap_err().to_string();
        assert!(why.contains("was killed before") || why.contains("no node 2") || why.contains("machines()"), "{why}");
    }
}

#[test]
fn what_the_test_has_put_is_not_lost_with_a_node() {
    let cluster = TestCluster::builder().nodes(2).start().unwrap();
    let data = wingbeat::put(&vec![7_u8; 1 << 20]).unwrap();
    assert_eq!(length::remote(&data).get_blocking().unwrap(), 1 << 20);
    cluster.kill_node(0).unwrap();
    cluster.kill_node(1).unwrap();
    cluster.add_node(TestNode::default()).unwrap();
    assert_eq!(length::remote(&data).get_blocking().unwrap(), 1 << 20);
}

#[test]
fn a_paused_node_stands_still_and_goes_on() {
    let place = tempfile::tempdir().unwrap();
    let cluster = TestCluster::builder().start().unwrap();
    let held = holds::remote(place.path().to_owned());
    let worker = wait_until_began(place.path(), 1)[0].pid;
    let daemon = cluster.node_pid(0).unwrap();
    let are =
        |wanted: bool| poll(LIMIT, || [worker, daemon].iter().all(|pid| (state(*pid) == "T") == wanted).then_some(()));
    let paused = cluster.pause(0).unwrap();
    are(true).unwrap();
    drop(paused);
    are(false).unwrap();
    std::fs::write(place.path().join("go"), "").unwrap();
    assert_eq!(held.get_blocking().unwrap(), daemon);
}

/// In a process of its own, since that has the times of the cluster.
#[test]
fn a_node_that_stands_still_for_too_long_is_lost() {
    if common::runs_again_with("a_node_that_stands_still_for_too_long_is_lost", &[]) {
        return;
    }
    let place = tempfile::tempdir().unwrap();
    let cluster = TestCluster::builder().nodes(2).lost_after(Duration::from_secs(3)).start().unwrap();
    let there: NodeId = cluster.node_id(0).unwrap();
    let held = holds::options().prefer_node(there).remote(place.path().to_owned());
    wait_until_began(place.path(), 1);
    let _paused = cluster.pause(0).unwrap();
    std::fs::write(place.path().join("go"), "").unwrap();
    assert_eq!(held.get_blocking().unwrap(), cluster.node_pid(1).unwrap());
}

/// In a process of its own, as above.
#[test]
fn a_node_that_is_cut_off_is_lost_and_one_that_is_back_in_time_goes_on() {
    if !is_root().unwrap()
        || common::runs_again_with("a_node_that_is_cut_off_is_lost_and_one_that_is_back_in_time_goes_on", &[])
    {
        return;
    }
    let place = tempfile::tempdir().unwrap();
    let cluster = TestCluster::builder().nodes(2).machines().lost_after(Duration::from_secs(3)).start().unwrap();
    let on = |node: usize| holds::options().prefer_node(cluster.node_id(node).unwrap()).remote(place.path().to_owned());
    let (lost, back) = (on(0), on(1));
    wait_until_began(place.path(), 2);
    let _cut = cluster.cut(0).unwrap();
    drop(cluster.cut(1).unwrap());
    std::fs::write(place.path().join("go"), "").unwrap();
    let left = cluster.node_pid(1).unwrap();
    assert_eq!([back, lost].map(|held| held.get_blocking().unwrap()), [left, left]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn asynchronous_tests_use_it_on_their_thread_and_elsewhere_within_it() {
    let cluster = TestCluster::builder().start().unwrap();
    assert_eq!(total::remote(4).get().await.unwrap(), 6);
    let elsewhere = tokio::spawn(cluster.within(async { total::remote(5).get().await }));
    assert_eq!(elsewhere.await.unwrap().unwrap(), 10);
    let session = cluster.session().clone();
    let thread = std::thread::spawn(move || {
        let _entered = session.enter();
        total::remote(6).get_blocking()
    });
    assert_eq!(thread.join().unwrap().unwrap(), 15);
    let another = cluster.init().name("another").await.unwrap();
    assert_eq!(another.cluster(), cluster.session().cluster());
    another.shutdown().await;
}

#[test]
fn the_logs_have_what_daemons_and_tasks_write() {
    let cluster = TestCluster::builder().env("WINGBEAT_LOG", "wingbeat=debug").start().unwrap();
    prints::remote("a line of a task".to_owned()).get_blocking().unwrap();
    for wanted in ["[head] ", "[node 0] ", "[task] (prints pid="] {
        assert!(
            poll(LIMIT, || cluster.logs().contains(wanted).then_some(())).is_some(),
            "{wanted}: {}",
            cluster.logs()
        );
    }
    assert!(poll(LIMIT, || cluster.logs().contains("a line of a task").then_some(())).is_some());
}

/// In the environment of a process whose test is to end in this way.
const ENDS: &str = "WINGBEAT_TEST_ENDS";

/// What the next test does in the process that it starts.
#[test]
fn ends_as_it_is_told() -> Result<(), String> {
    let Ok(how) = std::env::var(ENDS) else { return Ok(()) };
    let cluster = TestCluster::builder().start().unwrap();
    prints::remote("a line of a task".to_owned()).get_blocking().unwrap();
    poll(LIMIT, || cluster.logs().contains("a line of a task").then_some(())).unwrap();
    match how.as_str() {
        "panic" => panic!("as it was told"),
        "error" => Err("as it was told".into()),
        _ => Ok(()),
    }
}

#[test]
fn a_failing_test_prints_the_logs_and_another_does_not() {
    let ends = |how: &str, more: &[&str]| -> (bool, bool) {
        let Output { status, stdout, stderr } =
            begin("ends_as_it_is_told", ENDS, how.as_ref()).args(more).output().unwrap();
        let said = String::from_utf8_lossy(&[stdout, stderr].concat()).into_owned();
        (status.success(), said.contains("a line of a task"))
    };
    assert_eq!(ends("panic", &[]), (false, true));
    assert_eq!(ends("error", &[]), (false, true));
    assert_eq!(ends("well", &[]), (true, false));
    assert_eq!(ends("panic", &["--nocapture"]), (false, true));
    assert_eq!(ends("well", &["--nocapture"]), (true, false));
}

#[test]
fn a_node_that_cannot_start_is_an_error_with_what_it_wrote() {
    let failed = TestCluster::builder().nodes(1).env("WINGBEAT_MEMORY_THRESHOLD", "much").start().unwrap_err();
    let said = failed.to_string();
    assert!(said.contains("starting the node 0 of a test cluster") && said.contains("memory threshold"), "{said}");
    // The loader says that there is no such file, and goes on.
    let writes = TestCluster::builder().env("LD_PRELOAD", "/no/such/file").env("WINGBEAT_MEMORY_THRESHOLD", "much");
    let said = writes.start().unwrap_err().to_string();
    assert!(said.contains("; it wrote:\n[node 0] ") && said.contains("/no/such/file"), "{said}");
    let failed = TestCluster::builder().lost_after(Duration::from_millis(1)).start().unwrap_err().to_string();
    assert!(failed.contains("lost_after"), "{failed}");
}

/// In the environment of a process whose test is to be killed: where it says that it has begun.
const KILLED: &str = "WINGBEAT_TEST_KILLED";

/// Set where its nodes are to have machines of their own.
const MACHINES: &str = "WINGBEAT_TEST_MACHINES";

/// What the next tests do in the process that they start.
#[test]
fn is_killed() {
    let Ok(place) = std::env::var(KILLED) else { return };
    let place = PathBuf::from(place);
    let builder = TestCluster::builder().nodes(2);
    let builder = if std::env::var_os(MACHINES).is_some() { builder.machines() } else { builder };
    let cluster = builder.start().unwrap();
    std::fs::write(place.join("address"), cluster.address()).unwrap();
    let there = cluster.node_id(0).unwrap();
    let _left = leaves_a_child::options().on_node(there).remote(place.join("child"));
    poll(LIMIT, || place.join("child").exists().then_some(())).unwrap();
    // It sees nothing of what becomes of the others.
    let _paused = cluster.pause(0).unwrap();
    std::fs::write(place.join("begun"), "").unwrap();
    loop {
        std::thread::park();
    }
}

fn is_gone(place: &Path) -> bool {
    poll(LIMIT, || with(KILLED, place).is_empty().then_some(())).is_some()
}

#[test]
fn nothing_stays_of_a_test_that_is_killed() {
    let place = tempfile::tempdir().unwrap();
    let files = tempfile::tempdir().unwrap();
    let mut command = begin("is_killed", KILLED, place.path());
    let mut test = command.env("TMPDIR", files.path()).stdout(Stdio::null()).spawn().unwrap();
    poll(LIMIT, || place.path().join("begun").exists().then_some(())).unwrap();
    let child = std::fs::read_to_string(place.path().join("child")).unwrap().parse().unwrap();
    let child = Process::of(child).unwrap();
    assert!(with(KILLED, place.path()).len() > 6);
    test.kill().unwrap();
    test.wait().unwrap();
    assert!(is_gone(place.path()), "{:?}", with(KILLED, place.path()));
    assert!(!child.is_alive());
    assert_eq!(std::fs::read_dir(files.path()).unwrap().count(), 0);
}

#[test]
fn no_network_stays_of_a_test_that_is_killed() {
    if !is_root().unwrap() {
        return;
    }
    let place = tempfile::tempdir().unwrap();
    let mut command = begin("is_killed", KILLED, place.path());
    let mut test = command.env(MACHINES, "1").stdout(Stdio::null()).spawn().unwrap();
    poll(LIMIT, || place.path().join("begun").exists().then_some(())).unwrap();
    let address = std::fs::read_to_string(place.path().join("address")).unwrap();
    let interface = format!(" {}/", address.split_once(':').unwrap().0);
    let is_there = || {
        let output = Command::new("ip").args(["-o", "addr"]).output().unwrap();
        String::from_utf8_lossy(&output.stdout).contains(&interface)
    };
    assert!(is_there());
    test.kill().unwrap();
    test.wait().unwrap();
    assert!(is_gone(place.path()), "{:?}", with(KILLED, place.path()));
    poll(LIMIT, || (!is_there()).then_some(())).unwrap();
}

#[test]
fn nothing_stays_of_a_test_that_is_killed_while_its_cluster_starts() {
    // With so many processes: those of the test itself, a supervisor, a head, and so on.
    for count in [2, 3, 5, 8] {
        let place = tempfile::tempdir().unwrap();
        let mut test = begin("is_killed", KILLED, place.path()).stdout(Stdio::null()).spawn().unwrap();
        poll(LIMIT, || (with(KILLED, place.path()).len() >= count).then_some(())).unwrap();
        test.kill().unwrap();
        test.wait().unwrap();
        assert!(is_gone(place.path()), "{count}: {:?}", with(KILLED, place.path()));
    }
}

#[test]
fn nothing_stays_of_a_cluster_that_is_dropped() {
    let started = Started::new();
    let cluster =
        TestCluster::builder().env("WINGBEAT_TEST_DROPPED", started.path().to_str().unwrap()).start().unwrap();
    let _left = leaves_a_child::remote(started.path());
    started.wait();
    let worker = pid::options().num_cpus(0.0).remote().get_blocking().unwrap();
    assert!(Process::of(worker).is_some());
    let _paused = cluster.pause(0).unwrap();
    drop(cluster);
    assert_eq!(with("WINGBEAT_TEST_DROPPED", &started.path()), []);
}
