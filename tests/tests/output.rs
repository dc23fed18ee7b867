//! What tasks print, however they print it.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use wingbeat_tests::TestCluster;

/// Says which driver this program is to be, when the test starts itself again.
const DRIVER: &str = "WINGBEAT_TEST_DRIVER";
/// The process of the node, for a driver of another.
const NODE: &str = "WINGBEAT_TEST_NODE";
/// Only something that hangs takes so long.
const LIMIT: std::time::Duration = std::time::Duration::from_secs(60);
/// A file by which the test lets a task go on.
const GO_ON: &str = "WINGBEAT_TEST_GO_ON";

#[wingbeat::remote]
fn prints_an_unfinished_line() {
    print!("half a line");
}

#[wingbeat::remote]
fn asks(go_on: PathBuf) {
    print!("may I? ");
    std::io::stdout().flush().unwrap();
    while !go_on.exists() {
        std::thread::yield_now();
    }
    println!("thank you");
}

#[wingbeat::remote]
fn floods() {
    let line = vec![b'y'; 1 << 20];
    for _ in 0..64 {
        std::io::stdout().write_all(&line).unwrap();
    }
    println!();
    println!("the next line");
}

/// The most memory that this process has had, in KiB. A private cluster's node is a part of its driver.
fn peak() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

/// Says in its last moment who it was.
struct Parting(u32);

#[wingbeat::actor]
impl Parting {
    fn new(number: u32) -> Parting {
        Parting(number)
    }
    fn is_here(&self) {}
}

impl Drop for Parting {
    fn drop(&mut self) {
        // It takes longer than the program's end would without it.
        std::thread::sleep(std::time::Duration::from_millis(20));
        println!("farewell of {}", self.0);
    }
}

struct SaysItsProcess;

#[wingbeat::actor]
impl SaysItsProcess {
    fn new() -> SaysItsProcess {
        println!("pid {}", std::process::id());
        SaysItsProcess
    }
    fn is_here(&self) {}
}

/// Ends an actor once the test has seen to it that its process stays, and stays until the test has seen what is said of that.
fn drive_with_a_process_that_stays() {
    wingbeat::init_blocking().unwrap();
    let actor = SaysItsProcess::remote();
    actor.is_here().get_blocking().unwrap();
    let go_on = PathBuf::from(std::env::var(GO_ON).unwrap());
    while !go_on.exists() {
        std::thread::yield_now();
    }
    actor.actor().kill();
    while go_on.exists() {
        std::thread::yield_now();
    }
    wingbeat::shutdown_blocking();
}

fn drive(what: &str) {
    let init = wingbeat::init().num_cpus(1);
    wingbeat::block_on(std::future::IntoFuture::into_future(init)).unwrap();
    match what {
        "unfinished" => prints_an_unfinished_line::remote().get_blocking().unwrap(),
        "begins" => {}
        "asks" => asks::remote(PathBuf::from(std::env::var(GO_ON).unwrap())).get_blocking().unwrap(),
        "waits" => {
            let first = asks::remote(PathBuf::from(std::env::var(GO_ON).unwrap()));
            says::remote("at last".to_owned()).get_blocking().unwrap();
            first.get_blocking().unwrap();
        }
        "drops" => {
            let actors: Vec<PartingHandle> = (0..8).map(Parting::remote).collect();
            actors.iter().for_each(|actor| actor.is_here().get_blocking().unwrap());
        }
        "holds" => {
            // Held while the session ends, so that not even the first line can be shown.
            let held = std::io::stdout().lock();
            let said: Vec<_> = (0..3_000).map(|n| says::remote(format!("line {n}"))).collect();
            wingbeat::get_all_blocking(&said).unwrap();
            wingbeat::shutdown_blocking();
            drop(held);
            return;
        }
        "floods" => {
            let before = peak();
            floods::remote().get_blocking().unwrap();
            wingbeat::shutdown_blocking();
            println!("grew by {} KiB", peak() - before);
            return;
        }
        other => panic!("{other}"),
    }
    wingbeat::shutdown_blocking();
}

fn driver(test: &str, what: &str, go_on: Option<PathBuf>) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture"]).env(DRIVER, what).env_remove("WINGBEAT_ADDRESS");
    if let Some(go_on) = go_on {
        command.env(GO_ON, go_on);
    }
    command.stdout(Stdio::piped()).stderr(if matches!(what, "holds" | "drops") {
        Stdio::piped()
    } else {
        Stdio::inherit()
    });
    command.spawn().unwrap()
}

#[wingbeat::remote]
fn says(what: String) {
    println!("{what}");
}

/// Cuts the connections that a process on this machine has made to this one.
fn cut_connections_from(pid: i32) -> usize {
    use rustix::net::{Shutdown, SocketAddrUnix, getsockname, shutdown, sockopt::socket_peercred};
    use rustix::process::{PidfdFlags, PidfdGetfdFlags, getpid, pidfd_getfd, pidfd_open};
    let own = pidfd_open(getpid(), PidfdFlags::empty()).unwrap();
    let numbers: Vec<i32> = std::fs::read_dir("/proc/self/fd")
        .unwrap()
        .map(|entry| entry.unwrap().file_name().to_str().unwrap().parse().unwrap())
        .collect();
    let is_from = |fd: &std::os::fd::OwnedFd| {
        let is_named = getsockname(fd).ok().and_then(|name| SocketAddrUnix::try_from(name).ok());
        let is_ours = is_named.is_some_and(|name| name.abstract_name().is_some());
        is_ours && socket_peercred(fd).is_ok_and(|peer| peer.pid.as_raw_nonzero().get() == pid)
    };
    let sockets = numbers.into_iter().filter_map(|number| pidfd_getfd(&own, number, PidfdGetfdFlags::empty()).ok());
    sockets.filter(is_from).map(|fd| shutdown(fd, Shutdown::Both).unwrap()).count()
}

/// Loses its connections to a node of another process after the first line, and says more until the test has seen it.
fn drive_with_broken_connections() {
    wingbeat::init_blocking().unwrap();
    let go_on = PathBuf::from(std::env::var(GO_ON).unwrap());
    says::remote("before".to_owned()).get_blocking().unwrap();
    while !go_on.exists() {
        std::thread::yield_now();
    }
    assert_ne!(cut_connections_from(std::env::var(NODE).unwrap().parse().unwrap()), 0);
    let begun = std::time::Instant::now();
    while go_on.exists() {
        assert!(begun.elapsed() < LIMIT, "no line arrives any more");
        says::remote("after".to_owned()).get_blocking().unwrap();
    }
    wingbeat::shutdown_blocking();
}

#[test]
fn lines_arrive_again_after_the_connection_of_their_node_broke() {
    if std::env::var_os(DRIVER).is_some() {
        return drive_with_broken_connections();
    }
    let cluster = TestCluster::start(1, 1).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let go_on = dir.path().join("go_on");
    let mut command = Command::new(std::env::current_exe().unwrap());
    let name = "lines_arrive_again_after_the_connection_of_their_node_broke";
    command.args(["--exact", name, "--nocapture"]).env(DRIVER, "breaks").env(GO_ON, &go_on);
    command.env("WINGBEAT_ADDRESS", cluster.address()).env("WINGBEAT_TOKEN", cluster.token().unwrap());
    command.env(NODE, cluster.node_pid(0).unwrap().to_string());
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
    assert!(lines.any(|line| line.ends_with("before")));
    std::fs::write(&go_on, "").unwrap();
    assert!(lines.any(|line| line.ends_with("after")), "nothing arrives");
    std::fs::remove_file(&go_on).unwrap();
    lines.for_each(drop);
    assert!(child.wait().unwrap().success());
}

#[test]
fn a_line_that_a_task_did_not_finish_is_shown() {
    if let Ok(what) = std::env::var(DRIVER) {
        return drive(&what);
    }
    let output = driver("a_line_that_a_task_did_not_finish_is_shown", "unfinished", None).wait_with_output().unwrap();
    let out = String::from_utf8_lossy(&output.stdout);
    assert!(out.lines().any(|line| line.ends_with("half a line")), "{out}");
}

#[test]
fn what_actors_print_when_their_program_drops_them_last_is_shown() {
    if let Ok(what) = std::env::var(DRIVER) {
        return drive(&what);
    }
    let test = "what_actors_print_when_their_program_drops_them_last_is_shown";
    let output = driver(test, "drops", None).wait_with_output().unwrap();
    let (out, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    let has_said_so = |number: u32| out.lines().any(|line| line.ends_with(&format!("farewell of {number}")));
    // On a slow machine it takes longer than the program waits, which says so then.
    assert!((0..8).all(has_said_so) || errors.contains("printed last is not shown"), "{out}{errors}");
}

#[test]
fn a_program_that_ends_before_all_was_shown_says_so() {
    if let Ok(what) = std::env::var(DRIVER) {
        return drive(&what);
    }
    let mut child = driver("a_program_that_ends_before_all_was_shown_says_so", "holds", None);
    let (out, errors) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
    let reading = std::thread::spawn(|| std::io::read_to_string(out).unwrap());
    let errors = std::io::read_to_string(errors).unwrap();
    let out = reading.join().unwrap();
    assert!(child.wait().unwrap().success());
    let shown = out.lines().filter(|line| line.contains(") line ")).count();
    assert!(shown == 3_000 || errors.contains("printed last is not shown"), "{shown} lines: {errors}");
}

#[test]
fn a_question_is_shown_while_the_task_waits_for_the_answer() {
    if let Ok(what) = std::env::var(DRIVER) {
        return drive(&what);
    }
    let dir = tempfile::tempdir().unwrap();
    let go_on = dir.path().join("go_on");
    let mut child = driver("a_question_is_shown_while_the_task_waits_for_the_answer", "asks", Some(go_on.clone()));
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
    assert!(lines.any(|line| line.contains("may I?")));
    std::fs::write(go_on, "").unwrap();
    assert!(lines.any(|line| line.ends_with("thank you")));
    assert!(child.wait().unwrap().success());
}

#[test]
fn output_without_an_end_of_line_fills_no_memory() {
    if let Ok(what) = std::env::var(DRIVER) {
        return drive(&what);
    }
    let output = driver("output_without_an_end_of_line_fills_no_memory", "floods", None).wait_with_output().unwrap();
    let out = String::from_utf8_lossy(&output.stdout);
    let end = |line: &str| line.chars().rev().take(80).collect::<Vec<_>>().into_iter().rev().collect::<String>();
    let ends: Vec<String> = out.lines().map(end).collect();
    assert!(ends.iter().any(|line| line.contains("is not shown: it is longer than")), "{ends:?}");
    assert!(ends.iter().any(|line| line.ends_with("the next line")), "{ends:?}");
    let grew = ends.iter().find_map(|line| line.split("grew by ").nth(1)).unwrap();
    let grew: u64 = grew.trim_end_matches(" KiB").parse().unwrap();
    assert!(grew < 32 << 10, "the node's process grew by {grew} KiB");
}

#[test]
fn a_value_that_is_waited_for_long_is_told_of_once_with_the_reason() {
    if let Ok(what) = std::env::var(DRIVER) {
        return drive(&what);
    }
    let dir = tempfile::tempdir().unwrap();
    let go_on = dir.path().join("go_on");
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "a_value_that_is_waited_for_long_is_told_of_once_with_the_reason", "--nocapture"]);
    command.env(DRIVER, "waits").env(GO_ON, &go_on).env("WINGBEAT_WAIT_TOLD_MS", "300").env_remove("WINGBEAT_ADDRESS");
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map_while(Result::ok);
    let told = lines.find(|line| line.starts_with("(wingbeat)")).expect("nothing was told");
    assert!(told.contains("says") && told.contains("300ms"), "{told}");
    let because = lines.next().unwrap();
    assert!(because.contains("because"), "{because}");
    std::fs::write(go_on, "").unwrap();
    let again: Vec<String> = lines.filter(|line| line.starts_with("(wingbeat)")).collect();
    assert!(again.iter().all(|line| !line.contains("says")), "{again:?}");
    assert!(child.wait().unwrap().success());
}

#[test]
fn a_program_on_a_cluster_without_nodes_says_so_at_once() {
    if let Ok(what) = std::env::var(DRIVER) {
        return drive(&what);
    }
    let cluster = TestCluster::start(0, 0).unwrap();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "a_program_on_a_cluster_without_nodes_says_so_at_once", "--nocapture"]);
    command
        .env(DRIVER, "begins")
        .env("WINGBEAT_ADDRESS", cluster.address())
        .env("WINGBEAT_TOKEN", cluster.token().unwrap());
    let told = String::from_utf8(command.output().unwrap().stderr).unwrap();
    assert!(
        told.contains(&format!(
            "has no nodes yet: tasks and actors wait for one; add it with `wingbeat worker --head {}`",
            cluster.address()
        )),
        "{told}"
    );
}

/// Holds on to a thread of a process as a debugger does: the process does not end before it is let go of.
struct Held(i32);

impl Held {
    fn a_thread_of(pid: i32) -> Held {
        let threads = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
        let mut threads = threads.map(|entry| entry.unwrap().file_name().to_str().unwrap().parse::<i32>().unwrap());
        let thread = threads.find(|thread| *thread != pid).unwrap();
        // SAFETY: it takes no pointers.
        assert_eq!(unsafe { libc::ptrace(libc::PTRACE_SEIZE, thread, 0, 0) }, 0, "{}", std::io::Error::last_os_error());
        Held(thread)
    }

    fn let_go(self) {
        let mut status = 0;
        // SAFETY: the status is a number of this function's own.
        assert_eq!(unsafe { libc::waitpid(self.0, &raw mut status, libc::__WALL) }, self.0);
        assert!(libc::WIFSIGNALED(status));
    }
}

#[test]
fn a_killed_process_that_does_not_end_is_told_of_with_the_reason() {
    if std::env::var_os(DRIVER).is_some() {
        return drive_with_a_process_that_stays();
    }
    let cluster = TestCluster::start(1, 1).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let go_on = dir.path().join("go_on");
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "a_killed_process_that_does_not_end_is_told_of_with_the_reason", "--nocapture"]);
    command.env(DRIVER, "stays").env(GO_ON, &go_on);
    command.env("WINGBEAT_ADDRESS", cluster.address()).env("WINGBEAT_TOKEN", cluster.token().unwrap());
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
    let pid = lines.find_map(|line| line.rsplit_once("pid ")?.1.parse().ok()).expect("the actor says its process");
    let held = Held::a_thread_of(pid);
    std::fs::write(&go_on, "").unwrap();
    let mut told = BufReader::new(child.stderr.take().unwrap()).lines().map_while(Result::ok);
    let stays = told.find(|line| line.contains("has not ended")).expect("nothing is told");
    let debugger = rustix::thread::gettid().as_raw_nonzero();
    let because = format!("process {debugger} debugs it, and has not let go of it");
    assert!(stays.contains(&format!("process {pid} was killed")) && stays.contains(&because), "{stays}");
    held.let_go();
    assert!(told.any(|line| line.contains(&format!("process {pid} has ended,"))), "its end is not told");
    std::fs::remove_file(&go_on).unwrap();
    assert!(child.wait().unwrap().success());
}
