//! `wingbeat stack` shows where a task or an actor is, whatever it does.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::io::Read;
use std::path::PathBuf;

use common::{Local, Started};
use wingbeat_tests::TestCluster;

/// What `wingbeat stack` says of something, and whether it succeeded.
fn stack(cluster: &TestCluster, id: &str) -> (bool, String) {
    let output = cluster.command().unwrap().args(["stack", id, "--address", cluster.address()]).output().unwrap();
    let text = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8(text).unwrap())
}

#[inline(never)]
fn spins_for_ever(begun: PathBuf) -> u32 {
    std::fs::write(begun, "").unwrap();
    loop {
        std::hint::spin_loop();
    }
}

#[wingbeat::remote(max_retries = 0)]
fn spinner(begun: PathBuf) -> u32 {
    spins_for_ever(begun)
}

#[inline(never)]
fn reads_for_ever(begun: PathBuf) -> u32 {
    let (mut from, _to) = std::io::pipe().unwrap();
    std::fs::write(begun, "").unwrap();
    from.read(&mut [0; 1]).unwrap() as u32
}

struct Reader;

#[wingbeat::actor]
impl Reader {
    fn new() -> Self {
        Reader
    }

    fn pid(&self) -> u32 {
        std::process::id()
    }

    fn read(&mut self, begun: PathBuf) -> u32 {
        reads_for_ever(begun)
    }
}

/// Starts a program, and waits for it.
#[inline(never)]
fn waits_for_a_program(begun: PathBuf) -> u32 {
    let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
    let aside = begun.with_extension("aside");
    std::fs::write(&aside, child.id().to_string()).unwrap();
    std::fs::rename(aside, begun).unwrap();
    child.wait().unwrap();
    1
}

#[wingbeat::remote(max_retries = 0)]
fn starter(begun: PathBuf) -> u32 {
    waits_for_a_program(begun)
}

#[wingbeat::remote]
fn quick() -> u32 {
    1
}

#[test]
fn the_function_in_which_a_task_spins_or_an_actor_sleeps_is_named() {
    let cluster = TestCluster::start(1, 2).unwrap();
    let _driver = Local::from(wingbeat::init_at(cluster.address()).token(&cluster.token().unwrap()));
    let (spins, reads) = (Started::new(), Started::new());
    let spinning = spinner::remote(spins.path());
    let reader = Reader::remote();
    let pid = reader.pid().get_blocking().unwrap();
    let reading = reader.read(reads.path());
    spins.wait();
    reads.wait();

    let (found, text) = stack(&cluster, &spinning.id().to_string());
    assert!(found && text.contains("spins_for_ever") && text.contains("spinner"), "{text}");
    assert!(text.contains("tests/stack.rs:"), "{text}");
    // A call, its actor, and the actor's process.
    let actor = cluster.state().unwrap()["actors"][0]["id"].as_str().unwrap().to_owned();
    for id in [reading.id().to_string(), actor, pid.to_string()] {
        // It may be on its way into the system call.
        let text = loop {
            let (found, text) = stack(&cluster, &id);
            assert!(found && text.contains("reads_for_ever"), "{id}: {text}");
            if text.contains("sleeps in the kernel") {
                break text;
            }
        };
        assert!(text.contains(&format!("pid {pid}")) && text.contains("Reader"), "{text}");
    }
    // Both go on; what has ended or waits has no stack.
    let waiting = quick::options().num_cpus(2.0).remote();
    let (found, text) = stack(&cluster, &waiting.id().to_string());
    assert!(!found && text.contains("no process now"), "{text}");
    drop(waiting);
    let done = quick::remote();
    done.get_blocking().unwrap();
    let (found, text) = stack(&cluster, &done.id().to_string());
    assert!(!found && text.contains("no process now"), "{text}");
    for (id, why) in [("nonsense", "expected"), ("4000000000", "process id"), ("actor-00000000000000ff", "not known")] {
        let (found, text) = stack(&cluster, id);
        assert!(!found && text.contains(why), "{text}");
    }
    spinning.cancel_force();
}

#[test]
fn a_process_that_is_stopped_and_one_on_a_node_that_is_suspect_are_named_with_their_host() {
    let cluster = TestCluster::with_head_args(1, 1, false, &["--suspect-after", "1s", "--lost-after", "90s"]).unwrap();
    let _driver = Local::from(wingbeat::init_at(cluster.address()).token(&cluster.token().unwrap()));
    let reader = Reader::remote();
    let pid = reader.pid().get_blocking().unwrap();
    let signal = |pid: u32, signal| {
        rustix::process::kill_process(rustix::process::Pid::from_raw(pid as i32).unwrap(), signal).unwrap();
    };
    signal(pid, rustix::process::Signal::STOP);
    let (text, took) = loop {
        let begun = std::time::Instant::now();
        let (found, text) = stack(&cluster, &pid.to_string());
        // The kernel stops it in a moment.
        if !found {
            break (text, begun.elapsed());
        }
    };
    assert!(
        text.contains(&format!("pid {pid} on ")) && text.contains("it is stopped") && text.contains("state T"),
        "{text}"
    );
    assert!(took < std::time::Duration::from_secs(10), "nobody is waited for");
    signal(pid, rustix::process::Signal::CONT);
    let node = cluster.node_pid(0).unwrap();
    signal(node, rustix::process::Signal::STOP);
    let actor = cluster.state().unwrap()["actors"][0]["id"].as_str().unwrap().to_owned();
    while cluster.state().unwrap()["nodes"][0]["state"] != "suspect" {
        std::thread::yield_now();
    }
    let answers = [actor, pid.to_string(), "4000000000".to_owned()].map(|id| stack(&cluster, &id));
    signal(node, rustix::process::Signal::CONT);
    for (found, text) in answers {
        assert!(
            !found && text.contains("is suspect: it has had no connection to the head for") && text.contains("(node-"),
            "{text}"
        );
    }
}

#[test]
fn a_job_is_all_of_its_processes_and_a_process_below_one_is_found() {
    let cluster = TestCluster::start(1, 3).unwrap();
    let _driver = Local::from(wingbeat::init_at(cluster.address()).token(&cluster.token().unwrap()));
    let (spins, starts, reads) = (Started::new(), Started::new(), Started::new());
    let spinning = spinner::remote(spins.path());
    let starting = starter::remote(starts.path());
    let detached = Reader::options().name("stays").detached().remote();
    let reading = detached.read(reads.path());
    [&spins, &starts, &reads].into_iter().for_each(Started::wait);
    let child = std::fs::read_to_string(starts.path()).unwrap();
    let node = cluster.state().unwrap()["nodes"][0]["info"]["id"].as_str().unwrap().to_owned();
    for pid in [child.clone(), format!("{child}@{node}")] {
        let (found, text) = stack(&cluster, &pid);
        assert!(found && text.contains("waits_for_a_program"), "{text}");
    }
    let job = cluster.state().unwrap()["jobs"][0]["id"].as_str().unwrap().to_owned();
    let (found, text) = stack(&cluster, &job);
    assert!(found && text.contains("waits_for_a_program") && text.contains("spins_for_ever"), "{text}");
    assert!(!text.contains("reads_for_ever"), "a detached actor outlives the job: {text}");
    let (found, text) = stack(&cluster, "job-00000000000000ff");
    assert!(!found && text.contains("not known"), "{text}");
    detached.actor().kill();
    drop(reading);
    spinning.cancel_force();
    starting.cancel_force();
}
