//! Daemons that have no descriptor left: what there is goes on, what is new waits or has an error, and nobody dies of it.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use common::Local;
use rustix::process::{Pid, Resource, Rlimit, getrlimit, prlimit};
use wingbeat_tests::{TestCluster, is_alive};

#[wingbeat::remote]
fn square(x: u64) -> u64 {
    x * x
}

/// Lets a daemon open nothing more, as long as this lives.
struct Exhausted {
    pid: u32,
    usual: Rlimit,
}

impl Exhausted {
    fn new(pid: u32) -> Exhausted {
        let open = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
        let highest = open.filter_map(|fd| fd.unwrap().file_name().to_str()?.parse::<u64>().ok()).max();
        // Those that are closed meanwhile are taken first; there are few.
        let limit = Rlimit { current: highest, maximum: getrlimit(Resource::Nofile).maximum };
        Exhausted { pid, usual: prlimit(Pid::from_raw(pid as i32), Resource::Nofile, limit).unwrap() }
    }
}

impl Drop for Exhausted {
    fn drop(&mut self) {
        let _ = prlimit(Pid::from_raw(self.pid as i32), Resource::Nofile, self.usual);
    }
}

/// How many commands ask at a time: more than a daemon has descriptors below its highest.
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
    let asked: Vec<_> = (0..ASKING).map(|_| ask()).collect();
    let results: Vec<_> = (0..200).map(square::remote).collect();
    assert_eq!(wingbeat::get_all_blocking(&results).unwrap()[199], 199 * 199);
    drop(exhausted);
    // They have waited, and are answered now, or had to give up and say so.
    for asked in asked {
        let answer = asked.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&answer.stderr);
        assert!(answer.status.success() || said.contains("cannot reach"), "{said}");
    }
    let state = cluster.state().unwrap();
    assert_eq!(state["nodes"].as_array().unwrap().len(), 2, "{state}");
    assert!(cluster.pids().into_iter().all(is_alive));
    assert_eq!(square::remote(4).get_blocking().unwrap(), 16);
}
