//! What names may be, and what a terminal gets to see of others.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::future::IntoFuture;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use common::Local;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use wingbeat::{Bundle, Error, placement_group};
use wingbeat_tests::TestCluster;

#[wingbeat::remote]
fn square(x: u64) -> u64 {
    x * x
}

/// How many descriptors this process may have, and could.
#[wingbeat::remote]
fn descriptors() -> Vec<Option<u64>> {
    let limit = getrlimit(Resource::Nofile);
    vec![limit.current, limit.maximum]
}

struct Counter;

#[wingbeat::actor]
impl Counter {
    fn new() -> Self {
        Counter
    }

    fn ping(&self) -> bool {
        true
    }
}

fn bad_names() -> Vec<String> {
    let long = "x".repeat(1 << 20);
    ["\u{1b}[31mred", "two\nlines", "nul\0", "\u{202e}txt.exe", &long].map(str::to_owned).into()
}

/// An error that can be shown: short, and without what a terminal obeys.
fn is_plain(text: &str) -> bool {
    text.len() < 2_000 && !text.chars().any(|letter| letter.is_control() && letter != '\n')
}

fn assert_refused<T>(name: &str, outcome: Result<T, Error>) {
    let error = outcome.map(drop).unwrap_err();
    assert!(matches!(error, Error::InvalidOption { .. } | Error::InvalidArgument { .. }), "{error}");
    let shown: String = name.chars().take(20).collect();
    assert!(is_plain(&error.to_string()), "{shown:?}: {error:?}");
}

#[test]
fn names_that_terminals_obey_and_names_without_end_are_refused() {
    let _local = Local::start(2);
    for name in bad_names() {
        assert_refused(&name, square::options().name(&name).remote(2).get_blocking());
        assert_refused(&name, square::options().resource(&name, 1.0).remote(2).get_blocking());
        assert_refused(&name, square::options().labels(&format!("zone={name}")).remote(2).get_blocking());
        assert_refused(&name, Counter::options().name(&name).remote().ping().get_blocking());
        assert_refused(&name, Counter::options().name("a").namespace(&name).remote().ping().get_blocking());
        assert_refused(&name, wingbeat::block_on(Counter::options().name(&name).get_or_create()));
        assert_refused(&name, wingbeat::block_on(Counter::named(&name)));
        let group = placement_group([Bundle::new().num_cpus(1.0)]).name(&name);
        assert_refused(&name, wingbeat::block_on(group.into_future()));
        assert_refused(&name, wingbeat::block_on(wingbeat::PlacementGroup::named(&name)));
        for init in
            [wingbeat::init().name(&name), wingbeat::init().namespace(&name), wingbeat::init().resource(&name, 1.0)]
        {
            assert_refused(&name, wingbeat::block_on(init.global(false).into_future()));
        }
    }
    // The session is as it was.
    assert_eq!(square::options().name("größer als 東京").remote(3).get_blocking().unwrap(), 9);
}

#[test]
fn a_rule_about_labels_of_ten_megabytes_is_refused() {
    let _local = Local::start(1);
    let rule = format!("zone in ({})", vec!["somewhere"; 1 << 20].join(", "));
    assert_refused("rule", square::options().labels(&rule).remote(2).get_blocking());
    assert_eq!(square::remote(3).get_blocking().unwrap(), 9);
}

#[test]
fn the_head_refuses_what_a_client_should_not_have_sent() {
    let cluster = TestCluster::start(0, 1).unwrap();
    // Of arguments, the operating system refuses what has a zero or a megabyte.
    for name in ["\u{1b}[31mred".to_owned(), "two\nlines".into(), "x".repeat(1_000)] {
        let quota = cluster.command().unwrap().args(["quota", &name, "CPU=1"]).output().unwrap();
        let said = String::from_utf8(quota.stderr).unwrap();
        assert!(!quota.status.success() && said.contains("namespace") && is_plain(&said), "{said:?}");
        let label = format!("zone={name}");
        let mut worker = Command::new("timeout");
        worker.args(["60", wingbeat_tests::binary().unwrap().to_str().unwrap(), "worker", "--label", &label]);
        worker.env("WINGBEAT_ADDRESS", cluster.address()).env("WINGBEAT_TOKEN", cluster.token().unwrap());
        let worker = worker.stdin(Stdio::null()).output().unwrap();
        let said = String::from_utf8(worker.stderr).unwrap();
        assert!(worker.status.code() == Some(2) && said.contains("label") && is_plain(&said), "{said:?}");
    }
}

#[test]
fn a_command_whose_output_nobody_reads_ends_in_order() {
    let cluster = TestCluster::start(1, 1).unwrap();
    for arguments in [&["status"][..], &["status", "--json"], &["quota"], &["devices"]] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let command =
            cluster.command().unwrap().args(arguments).stdout(writer).stderr(Stdio::piped()).output().unwrap();
        let said = String::from_utf8_lossy(&command.stderr);
        assert!(command.status.success() && !said.contains("panicked"), "{arguments:?}: {said}");
    }
}

#[test]
fn a_head_lives_on_when_nobody_reads_what_it_says() {
    let dir = tempfile::tempdir().unwrap();
    let mut command = Command::new(wingbeat_tests::binary().unwrap());
    command.args(["head", "--port", "0"]).env("WINGBEAT_TOKEN", "a token for this test alone").current_dir(dir.path());
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut head = command.stdin(Stdio::null()).stdout(writer).stderr(Stdio::piped()).spawn().unwrap();
    let id = head.id();
    let pid = rustix::process::Pid::from_raw(id as i32).unwrap();
    // It has installed its handlers when it listens; until then the signal would end it another way.
    let listens = || {
        let sockets = std::fs::read_to_string(format!("/proc/{id}/net/unix")).unwrap_or_default();
        let fds = std::fs::read_dir(format!("/proc/{id}/fd")).unwrap();
        let links: Vec<String> = fds
            .filter_map(|fd| Some(std::fs::read_link(fd.ok()?.path()).ok()?.to_string_lossy().into_owned()))
            .collect();
        sockets.lines().filter(|line| line.contains("@wingbeat-")).any(|line| {
            let inode = line.split_whitespace().nth(6).unwrap_or_default();
            links.iter().any(|link| *link == format!("socket:[{inode}]"))
        })
    };
    while !listens() {
        assert!(head.try_wait().unwrap().is_none(), "it ended");
        std::thread::yield_now();
    }
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    let said = BufReader::new(head.stderr.take().unwrap()).lines().map_while(Result::ok).collect::<Vec<_>>().join("\n");
    head.wait().unwrap();
    assert!(!said.contains("panicked"), "{said}");
}

/// A pipe with no room left, and who could read it.
fn full_pipe() -> (std::io::PipeReader, std::io::PipeWriter) {
    let (reader, writer) = std::io::pipe().unwrap();
    rustix::io::ioctl_fionbio(&writer, true).unwrap();
    while rustix::io::write(&writer, &[0; 4096]).is_ok() {}
    rustix::io::ioctl_fionbio(&writer, false).unwrap();
    (reader, writer)
}

#[test]
fn a_head_and_a_node_live_on_when_their_standard_error_takes_nothing() {
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let (reader, nobody_reads) = std::io::pipe().unwrap();
    drop(reader);
    let (_reads_nothing, stands_still) = full_pipe();
    for (what, stderr) in [
        ("a full disk", full.into()),
        ("a pipe without a reader", nobody_reads.into()),
        ("a full pipe", stands_still.into()),
    ] {
        let stderr: std::os::fd::OwnedFd = stderr;
        let begin = |args: &[&str]| {
            let mut command = Command::new(wingbeat_tests::binary().unwrap());
            command.args(args).env("WINGBEAT_TOKEN", "a token for this test alone").stdin(Stdio::null());
            let mut daemon = command.stdout(Stdio::piped()).stderr(stderr.try_clone().unwrap()).spawn().unwrap();
            let mut line = String::new();
            BufReader::new(daemon.stdout.take().unwrap()).read_line(&mut line).unwrap();
            (daemon, line)
        };
        let (mut head, line) = begin(&["head", "--port", "0"]);
        let address = line.trim_end().rsplit(' ').next().unwrap();
        let (mut node, line) = begin(&["worker", "--head", address, "--num-cpus", "1"]);
        assert!(line.contains("joined"), "{what}: {line}");
        let status = |token: &str| {
            let mut command = Command::new(wingbeat_tests::binary().unwrap());
            command.args(["status", "--json", "--address", address]).env("WINGBEAT_TOKEN", token).output().unwrap()
        };
        // The head logs whom it refuses, and is asked again after that.
        assert!(!status("another token than that of this test").status.success());
        let said = status("a token for this test alone");
        assert!(said.status.success(), "{what}: {}", String::from_utf8_lossy(&said.stderr));
        for daemon in [&mut node, &mut head] {
            let pid = rustix::process::Pid::from_child(daemon);
            rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
            assert!(daemon.wait().unwrap().success(), "{what}");
        }
    }
}

#[test]
fn drivers_and_worker_processes_may_have_as_many_descriptors_as_the_system_allows() {
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: Some(512), maximum: limit.maximum }).unwrap();
    let _local = Local::start(1);
    assert_eq!(getrlimit(Resource::Nofile).current, limit.maximum);
    assert_eq!(descriptors::remote().get_blocking().unwrap(), [limit.maximum; 2]);
}

#[test]
fn daemons_raise_their_limit_of_descriptors() {
    let binary = wingbeat_tests::binary().unwrap();
    let mut head = Command::new("bash");
    head.args(["-c", "ulimit -Sn 256; exec \"$0\" head --port 0"]).arg(binary);
    head.env("WINGBEAT_TOKEN", "a token for this test alone").stdin(Stdio::null()).stdout(Stdio::piped());
    let mut head = head.spawn().unwrap();
    let mut line = String::new();
    BufReader::new(head.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let limits = std::fs::read_to_string(format!("/proc/{}/limits", head.id())).unwrap();
    head.kill().unwrap();
    head.wait().unwrap();
    let limit = limits.lines().find(|line| line.starts_with("Max open files")).unwrap();
    let words: Vec<&str> = limit.split_whitespace().collect();
    assert_eq!(words[3], words[4], "{limit}");
}

#[test]
fn named_actors_are_listed_by_namespace_and_others_are_not() {
    let _local = Local::start(1);
    let zero = || Counter::options().num_cpus(0.0);
    let second = zero().name("second").remote();
    let first = zero().name("first").remote();
    let elsewhere = zero().name("first").namespace("elsewhere").remote();
    let unnamed = zero().remote();
    for actor in [&second, &first, &elsewhere, &unnamed] {
        assert!(actor.ping().get_blocking().unwrap());
    }
    let names = |actors: Vec<wingbeat::NamedActor>| actors.into_iter().map(|actor| actor.name).collect::<Vec<_>>();
    let mine = wingbeat::block_on(wingbeat::list_named_actors()).unwrap();
    assert!(mine.iter().all(|actor| actor.state == "alive" && actor.class_name.ends_with("Counter")), "{mine:?}");
    assert_eq!(names(mine), ["first", "second"]);
    let all = wingbeat::block_on(wingbeat::list_named_actors_everywhere()).unwrap();
    assert_eq!(all.iter().filter(|actor| actor.namespace == "elsewhere").count(), 1);
    assert_eq!(names(all).len(), 3);
}
