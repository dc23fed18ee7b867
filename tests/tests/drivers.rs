//! Drivers as users run them: what they show, and what they leave behind when they end badly.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// Says which driver this program is to be, when the test starts itself again.
const DRIVER: &str = "WINGBEAT_TEST_DRIVER";

/// More lines than wait for a driver at most.
const FLOOD: u32 = 50_000;

#[wingbeat::remote]
fn greets(name: String) -> u32 {
    println!("hello {name}");
    eprintln!("a word aside");
    std::process::id()
}

#[wingbeat::remote]
fn repeats(times: u32) {
    for _ in 0..times {
        println!("again");
    }
    println!("at last");
}

/// Faster than anybody shows it.
#[wingbeat::remote]
fn floods(times: u32) {
    let mut out = std::io::stdout().lock();
    for _ in 0..times {
        out.write_all(b"again\n").unwrap();
    }
}

mod panicking {
    #[wingbeat::main]
    pub(super) async fn main() {
        wingbeat::init().await.unwrap();
        super::greets::remote("world".to_owned()).get().await.unwrap();
        panic!("after the result");
    }
}

#[wingbeat::remote]
#[allow(clippy::zombie_processes, reason = "whoever ends the task must end its child too")]
fn stays_with_a_child() -> u64 {
    // Its process group and session are its own: nothing but the guard would find it.
    let mut command = Command::new("setsid");
    let child = command.args(["sleep", "1000"]).spawn().unwrap();
    println!("pids {} {}", std::process::id(), child.id());
    loop {
        std::thread::park();
    }
}

/// What this program does when it was started as a driver.
fn drive(what: &str) {
    if what == "panics" {
        let _ = panicking::main();
        return;
    }
    wingbeat::init_blocking().unwrap();
    match what {
        "greets" => {
            greets::remote("world".to_owned()).get_blocking().unwrap();
            wingbeat::shutdown_blocking();
        }
        "repeats" => {
            repeats::remote(1_001).get_blocking().unwrap();
            wingbeat::shutdown_blocking();
        }
        "floods" => {
            floods::remote(FLOOD).get_blocking().unwrap();
            wingbeat::shutdown_blocking();
        }
        "stays" => {
            let _ = stays_with_a_child::remote().get_blocking();
        }
        "forks" => {
            // SAFETY: the copy does nothing but to wait; it takes no lock.
            let copy = unsafe { libc::fork() };
            if copy == 0 {
                loop {
                    // SAFETY: a plain call.
                    unsafe { libc::pause() };
                }
            }
            println!("copy {copy}");
            let _ = stays_with_a_child::remote().get_blocking();
        }
        other => panic!("{other}"),
    }
}

fn driver(test: &str, what: &str) -> Child {
    // Whoever runs tests in the background may have them ignore Ctrl-C.
    let mut command = Command::new("env");
    command
        .arg("--default-signal=INT")
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture"])
        .env(DRIVER, what)
        .env_remove("WINGBEAT_ADDRESS");
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

#[test]
fn output_of_tasks_is_shown_with_where_it_comes_from() {
    if let Ok(what) = std::env::var(DRIVER) {
        return drive(&what);
    }
    let output = driver("output_of_tasks_is_shown_with_where_it_comes_from", "greets").wait_with_output().unwrap();
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{out}\n{err}");
    assert!(out.lines().any(|line| line.starts_with("(greets pid=") && line.ends_with("hello world")), "{out}");
    assert!(err.lines().any(|line| line.starts_with("(greets pid=") && line.ends_with("a word aside")), "{err}");
}

#[test]
fn repeated_lines_are_folded() {
    if let Ok(what) = std::env::var(DRIVER) {
        return drive(&what);
    }
    let output = driver("repeated_lines_are_folded", "repeats").wait_with_output().unwrap();
    let out = String::from_utf8_lossy(&output.stdout);
    let of_task: Vec<&str> = out.lines().filter(|line| line.starts_with("(repeats")).collect();
    let (first, folded, last) = (of_task[0], &of_task[1..of_task.len() - 1], of_task[of_task.len() - 1]);
    assert!(first.ends_with(" again") && last.ends_with(" at last"), "{out}");
    let said = ["once", "10 times", "100 times", "1000 times"];
    let said = said.map(|times| format!("(repeats) … the last line came {times} more"));
    assert_eq!(folded, said, "{out}");
}

#[test]
fn of_more_lines_than_can_be_shown_each_is_counted() {
    if let Ok(what) = std::env::var(DRIVER) {
        return drive(&what);
    }
    let output = driver("of_more_lines_than_can_be_shown_each_is_counted", "floods").wait_with_output().unwrap();
    let out = String::from_utf8_lossy(&output.stdout);
    // A line that is shown, how often it came again, and how many were dropped after that; and again, perhaps.
    let (mut counted, mut repeated) = (0, 0);
    for line in out.lines().filter(|line| line.starts_with("(floods")) {
        if line.ends_with(" again") {
            counted += 1;
        } else if let Some((_, times)) = line.split_once("the last line came ") {
            let number = times.split(' ').next().unwrap();
            repeated = if number == "once" { 1 } else { number.parse().unwrap() };
            continue;
        } else if let Some((number, _)) = line.split_once(" lines were dropped here") {
            counted += number.rsplit('(').next().unwrap().parse::<u32>().unwrap();
        }
        counted += std::mem::take(&mut repeated);
    }
    assert_eq!(counted + repeated, FLOOD, "{out}");
}

#[test]
fn what_tasks_have_printed_is_shown_when_main_panics() {
    if let Ok(what) = std::env::var(DRIVER) {
        return drive(&what);
    }
    let output = driver("what_tasks_have_printed_is_shown_when_main_panics", "panics").wait_with_output().unwrap();
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(!output.status.success() && err.contains("after the result"), "{out}\n{err}");
    assert!(out.lines().any(|line| line.starts_with("(greets pid=") && line.ends_with("hello world")), "{out}");
}

fn a_driver_that_ends_by(signal: rustix::process::Signal, test: &str) {
    let mut child = driver(test, "stays");
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let line = lines.map_while(Result::ok).find(|line| line.contains("pids ")).unwrap();
    let pids: Vec<u32> = line.rsplit("pids ").next().unwrap().split(' ').map(|pid| pid.parse().unwrap()).collect();
    let driver = rustix::process::Pid::from_raw(child.id() as i32).unwrap();
    rustix::process::kill_process(driver, signal).unwrap();
    let status = child.wait().unwrap();
    assert_eq!(status.signal(), Some(signal.as_raw()));
    for pid in pids {
        assert!(wingbeat_tests::wait_for_end(pid, Duration::from_secs(60)), "process {pid} outlived its driver");
    }
}

#[test]
fn ctrl_c_leaves_nothing_behind() {
    if let Ok(what) = std::env::var(DRIVER) {
        return drive(&what);
    }
    a_driver_that_ends_by(rustix::process::Signal::INT, "ctrl_c_leaves_nothing_behind");
}

/// A pool of processes that a driver has forked (`multiprocessing`, a pre-fork server) goes on for a while, and has what the driver had open.
fn a_killed_driver_whose_copy_lives_on(mut child: Child, has_guard: bool) {
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
    let mut pids_after = |word: &str| -> Vec<u32> {
        let line = lines.find(|line| line.contains(word)).unwrap();
        line.rsplit(word).next().unwrap().split(' ').map(|pid| pid.parse().unwrap()).collect()
    };
    let copy = wingbeat_tests::Process::of(pids_after("copy ")[0]).unwrap();
    let mut pids = pids_after("pids ");
    if has_guard {
        let guard = wingbeat_tests::parent(wingbeat_tests::parent(pids[0]));
        pids.extend([guard, wingbeat_tests::parent(guard)]);
        // It cannot find by itself that its driver is gone.
        wingbeat_tests::Process::of(pids[0]).unwrap().signal(rustix::process::Signal::STOP);
    }
    child.kill().unwrap();
    child.wait().unwrap();
    let are_gone = || pids.iter().all(|pid| !wingbeat_tests::is_alive(*pid)).then_some(());
    wingbeat_tests::poll(Duration::from_secs(60), are_gone);
    let left: Vec<u32> = pids.iter().copied().filter(|pid| wingbeat_tests::is_alive(*pid)).collect();
    let lives_on = copy.is_alive();
    copy.signal(rustix::process::Signal::KILL);
    assert!(lives_on && left.is_empty(), "{left:?} outlived their driver");
}

#[test]
fn a_killed_driver_leaves_nothing_behind_also_where_its_copy_lives_on() {
    if let Ok(what) = std::env::var(DRIVER) {
        return drive(&what);
    }
    let name = "a_killed_driver_leaves_nothing_behind_also_where_its_copy_lives_on";
    a_killed_driver_whose_copy_lives_on(driver(name, "forks"), true);
}

#[test]
fn a_killed_driver_of_a_cluster_leaves_nothing_behind_also_where_its_copy_lives_on() {
    if let Ok(what) = std::env::var(DRIVER) {
        return drive(&what);
    }
    let cluster = wingbeat_tests::TestCluster::start(1, 1).unwrap();
    let name = "a_killed_driver_of_a_cluster_leaves_nothing_behind_also_where_its_copy_lives_on";
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", name, "--nocapture"]).env(DRIVER, "forks");
    command.env("WINGBEAT_ADDRESS", cluster.address()).env("WINGBEAT_TOKEN", cluster.token().unwrap());
    a_killed_driver_whose_copy_lives_on(command.stdout(Stdio::piped()).spawn().unwrap(), false);
}

#[test]
fn a_killed_driver_leaves_nothing_behind() {
    if let Ok(what) = std::env::var(DRIVER) {
        return drive(&what);
    }
    a_driver_that_ends_by(rustix::process::Signal::KILL, "a_killed_driver_leaves_nothing_behind");
}
