//! Daemons that have no descriptor left: what there is goes on, what is new waits or has an error, and nobody dies of it.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Duration;

use common::Local;
use rustix::process::{Pid, Resource, Rlimit, getrlimit, prlimit};
use wingbeat_tests::{TestCluster, is_alive, poll};

/// Only something that hangs takes so long.
const LIMIT: Duration = Duration::from_secs(60);

#[wingbeat::remote]
fn square(x: u64) -> u64 {
    x * x
}

#[wingbeat::remote(isolated)]
fn holds_its_process(begun: PathBuf, may_end: PathBuf) -> u64 {
    std::fs::write(begun, "").unwrap();
    while !may_end.exists() {
        std::thread::yield_now();
    }
    1
}

/// Lets a daemon open nothing more, as long as this lives.
struct Exhausted {
    pid: u32,
    usual: Rlimit,
    /// The first number that it may not use.
    limit: u64,
}

impl Exhausted {
    fn new(pid: u32) -> Exhausted {
        let open = open(pid);
        let limit = (0..).find(|number| !open.contains(number)).unwrap();
        let limits = Rlimit { current: Some(limit), maximum: getrlimit(Resource::Nofile).maximum };
        let usual = prlimit(Pid::from_raw(pid as i32), Resource::Nofile, limits).unwrap();
        let exhausted = Exhausted { pid, usual, limit };
        assert!(poll(LIMIT, || exhausted.is_out().then_some(())).is_some(), "it has descriptors left");
        exhausted
    }

    /// Whether it uses all that it may.
    fn is_out(&self) -> bool {
        if self.pid == std::process::id() {
            return std::fs::File::open("/dev/null").is_err();
        }
        let open = open(self.pid);
        (0..self.limit).all(|number| open.contains(&number))
    }
}

fn open(pid: u32) -> BTreeSet<u64> {
    let folder = format!("/proc/{pid}/fd");
    let mut open: BTreeSet<u64> =
        std::fs::read_dir(&folder).unwrap().filter_map(|fd| fd.unwrap().file_name().to_str()?.parse().ok()).collect();
    // Of this process, the look itself was among them.
    open.retain(|number| std::fs::symlink_metadata(format!("{folder}/{number}")).is_ok());
    open
}

impl Drop for Exhausted {
    fn drop(&mut self) {
        let _ = prlimit(Pid::from_raw(self.pid as i32), Resource::Nofile, self.usual);
    }
}

/// How many commands ask at a time.
const ASKING: usize = 20;

#[test]
fn a_head_without_descriptors_keeps_its_cluster_and_answers_when_it_has_some_again() {
    let cluster = TestCluster::start(2, 1).unwrap();
    let _driver = Local::from(wingbeat::init_at(cluster.address()).token(&cluster.token().unwrap()));
    assert_eq!(square::remote(3).get_blocking().unwrap(), 9);
    let exhausted = Exhausted::new(cluster.head_pid().unwrap());
    let ask = || {
        let mut command = cluster.command().unwrap();
        command.arg("status").stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped()).spawn().unwrap()
    };
    let refused = ask().wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && said.contains("cannot reach"), "{said}");
    let mut asked: Vec<_> = (0..ASKING).map(|_| ask()).collect();
    let results: Vec<_> = (0..200).map(square::remote).collect();
    assert_eq!(wingbeat::get_all_blocking(&results).unwrap()[199], 199 * 199);
    assert!(exhausted.is_out());
    assert!(asked.iter_mut().any(|asked| asked.try_wait().unwrap().is_none()), "nobody waits");
    drop(exhausted);
    // They have waited, and are answered now, or had to give up and say so.
    let mut answered = 0;
    for asked in asked {
        let answer = asked.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&answer.stderr);
        assert!(answer.status.success() || said.contains("cannot reach"), "{said}");
        answered += usize::from(answer.status.success());
    }
    assert!(answered > 0, "all of them gave up");
    let state = cluster.state().unwrap();
    assert_eq!(state["nodes"].as_array().unwrap().len(), 2, "{state}");
    assert!(cluster.pids().into_iter().all(is_alive));
    assert_eq!(square::remote(4).get_blocking().unwrap(), 16);
}

/// A process of its own for the driver, which is without descriptors for a while.
#[test]
fn a_driver_without_descriptors_is_told_so_and_goes_on_when_it_has_some_again() {
    const NAME: &str = "a_driver_without_descriptors_is_told_so_and_goes_on_when_it_has_some_again";
    if common::runs_again_with(NAME, &[("WINGBEAT_CONTACT_MS", "2000"), ("WINGBEAT_DIAL_MS", "1000")]) {
        return;
    }
    let cluster = TestCluster::start(1, 2).unwrap();
    let _driver = Local::from(wingbeat::init_at(cluster.address()).token(&cluster.token().unwrap()));
    let (begun, may_end) = (common::Started::new(), common::Started::new());
    let held = holds_its_process::remote(begun.path(), may_end.path());
    begun.wait();
    let exhausted = Exhausted::new(std::process::id());
    // It needs a worker process to which there is no connection yet.
    let task = square::options().max_retries(0).remote(3);
    let result = task.get_timeout_blocking(LIMIT);
    drop(exhausted);
    std::fs::write(may_end.path(), "").unwrap();
    let error = result.unwrap_err();
    assert!(matches!(error, wingbeat::Error::OutOfDescriptors { .. }), "{error:?}");
    assert!(error.to_string().contains("ulimit"), "{error}");
    assert_eq!(held.get_blocking().unwrap(), 1);
    assert!(cluster.pids().into_iter().all(is_alive));
    assert_eq!(square::options().isolated(true).remote(4).get_blocking().unwrap(), 16);
}
