//! Several machines that share nothing but a network; the worker machines get the driver's executable by its hash.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on fails")]

use std::future::IntoFuture;
use std::io::{BufRead, BufReader};
use std::process::Stdio;

use wingbeat::{Bundle, PlacementStrategy, placement_group};
use wingbeat_collective::{Group, Meeting, MeetingHandle, Op};
use wingbeat_tests::hosts::{HostProcess, Hosts, ip};

/// Runs inside the driver's namespace when the test starts itself again there.
const INSIDE: &str = "WINGBEAT_TEST_INSIDE";

#[wingbeat::remote]
fn machine() -> String {
    std::fs::read_link("/proc/self/ns/net").unwrap().display().to_string()
}

#[wingbeat::remote]
fn bytes(n: u64) -> Vec<u8> {
    vec![3; n as usize]
}

#[wingbeat::remote]
fn sum(data: Vec<u8>) -> u64 {
    data.iter().map(|byte| u64::from(*byte)).sum()
}

struct Member;

#[wingbeat::actor]
impl Member {
    fn new() -> Self {
        Member
    }

    /// Its machine, and what it has after a sum of all.
    fn sum(&self, meeting: MeetingHandle, rank: u32) -> Result<(String, Vec<f64>), String> {
        let mut group = Group::join(&meeting, rank).map_err(|error| error.to_string())?;
        let mut data: Vec<f64> = (0..100_000).map(|index| f64::from(index) + f64::from(rank)).collect();
        group.all_reduce(&mut data, Op::Sum).map_err(|error| error.to_string())?;
        group.barrier().map_err(|error| error.to_string())?;
        Ok((std::fs::read_link("/proc/self/ns/net").unwrap().display().to_string(), data))
    }
}

#[test]
fn work_and_objects_cross_machines_that_share_nothing() {
    if std::env::var_os(INSIDE).is_some() {
        return inside();
    }
    let Some(hosts) = Hosts::new(3).unwrap() else {
        return;
    };
    let (address, _daemons) = hosts.cluster().unwrap();
    // The driver is this test, on the head's machine, where there is no node.
    let mut driver = hosts.on(0, &std::env::current_exe().unwrap());
    driver.args(["--exact", "work_and_objects_cross_machines_that_share_nothing", "--nocapture"]);
    hosts.join(&mut driver, &address);
    let output = driver.env(INSIDE, "1").output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}");
}

#[wingbeat::remote]
fn variable(name: String) -> Option<String> {
    std::env::var(name).ok()
}

#[test]
fn secrets_of_the_environment_stay_on_the_drivers_machine() {
    if std::env::var_os(INSIDE).is_some() {
        let session = wingbeat::block_on(wingbeat::init().env("NAMED", "for all").into_future()).unwrap();
        let seen = |name: &str| variable::remote(name.to_owned()).get_blocking().unwrap();
        assert_eq!(seen("AWS_SECRET_ACCESS_KEY"), None);
        assert_eq!(seen("NAMED").as_deref(), Some("for all"));
        assert_eq!(seen("RUST_BACKTRACE").as_deref(), Some("full"));
        return wingbeat::block_on(session.shutdown());
    }
    let Some(hosts) = Hosts::new(2).unwrap() else {
        return;
    };
    let (address, _daemons) = hosts.cluster().unwrap();
    let mut driver = hosts.on(0, &std::env::current_exe().unwrap());
    driver.args(["--exact", "secrets_of_the_environment_stay_on_the_drivers_machine", "--nocapture"]);
    hosts.join(driver.env(INSIDE, "1"), &address);
    driver.env("AWS_SECRET_ACCESS_KEY", "S3cr3tKeyValue").env("RUST_BACKTRACE", "full");
    let output = driver.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}");
}

fn inside() {
    wingbeat::init_blocking().unwrap();
    let here = machine();
    let mut machines: Vec<String> = Vec::new();
    // Until both have taken one: which does first is theirs.
    while machines.len() < 2 {
        let refs: Vec<_> = (0..4).map(|_| machine::options().spread().remote()).collect();
        machines.extend(wingbeat::get_all_blocking(&refs).unwrap());
        machines.sort();
        machines.dedup();
    }
    assert!(!machines.contains(&here));
    let object = bytes::remote(3_000_000);
    let sums: Vec<_> = (0..4).map(|_| sum::options().spread().remote(&object)).collect();
    assert_eq!(wingbeat::get_all_blocking(&sums).unwrap(), vec![9_000_000; 4]);
    assert_eq!(object.view_blocking().unwrap().len(), 3_000_000);
    assert_eq!(sum::remote(vec![1u8; 2_000_000]).get_blocking().unwrap(), 2_000_000);
    sums_of_two_members_on_each_of_two_machines();
    wingbeat::shutdown_blocking();
}

/// In memory on each, and over TCP between them.
fn sums_of_two_members_on_each_of_two_machines() {
    let bundles = vec![Bundle::new().num_cpus(1.0); 2];
    let group = wingbeat::block_on(placement_group(bundles).strategy(PlacementStrategy::StrictSpread).into_future());
    let group = group.unwrap();
    // Ranks that follow each other are on different machines.
    let members: Vec<MemberHandle> =
        (0..4).map(|rank| Member::options().num_cpus(0.5).in_bundle(&group, rank % 2).remote()).collect();
    let meeting = Meeting::of(4);
    let sums: Vec<_> = (0..4).map(|rank| members[rank as usize].sum(meeting.clone(), rank)).collect();
    let (machines, sums): (Vec<_>, Vec<_>) = wingbeat::get_all_blocking(&sums).unwrap().into_iter().unzip();
    let distinct: std::collections::BTreeSet<&String> = machines.iter().collect();
    assert_eq!(distinct.len(), 2, "{machines:?}");
    let expected: Vec<f64> = (0..100_000).map(|index| 4.0 * f64::from(index) + 6.0).collect();
    assert!(sums.iter().all(|sum| *sum == expected));
}

#[test]
fn ranks_of_several_machines_meet_over_the_interface_that_joins_them() {
    let python = wingbeat_tests::python().unwrap();
    let Some(hosts) = Hosts::new(3).unwrap() else {
        return;
    };
    // Each has another interface that leads nowhere, as a bridge of containers.
    for name in &hosts.names {
        assert!(ip(&format!("-n {name} link add docker0 type bridge")));
        assert!(ip(&format!("-n {name} addr add 172.17.0.1/16 dev docker0")));
        assert!(ip(&format!("-n {name} link set docker0 up")));
    }
    let (address, _daemons) = hosts.cluster().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let script = dir.path().join("script.py");
    let text = "import os, torch, torch.distributed as dist\ndist.init_process_group('gloo')\nones = torch.ones(1 << 20)\ndist.all_reduce(ones)\nassert ones[0] == 2\nprint(os.environ['GLOO_SOCKET_IFNAME'], os.environ['NCCL_SOCKET_IFNAME'], os.environ['MASTER_ADDR'])\n";
    std::fs::write(&script, text).unwrap();
    let mut train = hosts.on(0, &wingbeat_tests::binary().unwrap());
    train.args(["train", "--nodes", "2", "--unprefixed", "--address", &address]).arg(&script);
    hosts.join(&mut train, &address);
    let output = train.env("WINGBEAT_PYTHON", &python).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let mut lines: Vec<String> = String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect();
    lines.sort();
    let masters = [hosts.address(1), hosts.address(2)];
    let of = |host: usize| {
        let interface = hosts.interface(host);
        masters.clone().map(|master| format!("{interface} ={interface} {master}"))
    };
    assert!(of(1).contains(&lines[0]) && of(2).contains(&lines[1]), "{lines:?}");
}

#[test]
fn a_machine_that_another_does_not_reach_is_found_before_a_run() {
    let Some(hosts) = Hosts::new(3).unwrap() else {
        return;
    };
    let (address, _daemons) = hosts.cluster().unwrap();
    let command = |arguments: &[&str]| {
        let mut command = hosts.on(0, &wingbeat_tests::binary().unwrap());
        command.args(arguments);
        hosts.join(&mut command, &address);
        command.env("WINGBEAT_PYTHON", "python3").output().unwrap()
    };
    let healthy = command(&["doctor"]);
    let told = String::from_utf8_lossy(&healthy.stdout);
    assert!(healthy.status.success() && told.contains(&hosts.address(2)), "{told}");
    // The two workers lose their ways to each other, and keep those to the head.
    for (host, other) in [(1, 2), (2, 1)] {
        assert!(ip(&format!("-n {} route add unreachable {}/32", hosts.names[host], hosts.address(other))));
    }
    let sick = command(&["doctor"]);
    let told = String::from_utf8_lossy(&sick.stdout).into_owned();
    let expected =
        format!("does not reach {} at {}", rustix::system::uname().nodename().to_string_lossy(), hosts.address(2));
    assert!(!sick.status.success() && told.contains(&expected) && told.contains("open the ports"), "{told}");
    let script = std::env::current_exe().unwrap();
    let refused = command(&["train", "--nodes", "2", script.to_str().unwrap()]);
    let told = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(told.contains("the run would not work") && told.contains(&expected), "{told}");
}

#[test]
fn code_is_shipped_to_machines_that_lack_it() {
    let Some(hosts) = Hosts::new(2).unwrap() else {
        return;
    };
    let (address, _daemons) = hosts.cluster().unwrap();
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("part")).unwrap();
    std::fs::write(dir.path().join("part/of.py"), "word = 'shipped'\n").unwrap();
    std::fs::write(
        dir.path().join("train.py"),
        "import os, sys\nfrom part.of import word\nprint(word, sys.argv, os.getcwd())\n",
    )
    .unwrap();
    let run = |start: &[&str]| {
        let mut command = hosts.on(0, &wingbeat_tests::binary().unwrap());
        command.args(["train", "--unprefixed", "--working-dir"]).arg(dir.path()).args(start);
        command.args(["train.py", "--", "x", "y"]);
        hosts.join(&mut command, &address);
        command.env("WINGBEAT_PYTHON", "python3");
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let (cold, forked) = (run(&["--cold"]), run(&[]));
    for told in [&cold, &forked] {
        assert!(told.starts_with("shipped ['train.py', 'x', 'y'] ") && told.contains("/wingbeat/run-"), "{told}");
    }
    assert_ne!(cold, forked, "each run has a folder of its own");
}

#[test]
fn a_driver_that_stands_still_while_it_gives_its_program_is_asked_again() {
    const NAME: &str = "a_driver_that_stands_still_while_it_gives_its_program_is_asked_again";
    if std::env::var_os(INSIDE).is_some() {
        wingbeat::init_blocking().unwrap();
        assert!(!machine::remote().get_blocking().unwrap().is_empty());
        return wingbeat::shutdown_blocking();
    }
    let Some(hosts) = Hosts::new(2).unwrap() else { return };
    let hosts = hosts.env("WINGBEAT_CHUNK_MS", "1000");
    let (address, _head) = hosts.head().unwrap();
    let mut worker = hosts.on(1, &wingbeat_tests::binary().unwrap());
    worker.args(["worker", "--num-cpus", "1", "--object-store-memory", "128MiB"]).stderr(Stdio::piped());
    hosts.join(&mut worker, &address);
    let mut worker = worker.spawn().unwrap();
    let logged = BufReader::new(worker.stderr.take().unwrap());
    let mut fetches = logged.lines().map_while(Result::ok).filter(|line| line.contains("fetching the executable"));
    let worker = HostProcess::from(worker);
    let mut driver = hosts.on(0, &std::env::current_exe().unwrap());
    driver.args(["--exact", NAME]).env(INSIDE, "1");
    hosts.join(&mut driver, &address);
    let mut driver = HostProcess::spawn(&mut driver).unwrap();
    let pid = rustix::process::Pid::from_raw(driver.pid() as i32).unwrap();
    assert!(fetches.next().unwrap().contains("from the driver"));
    rustix::process::kill_process(pid, rustix::process::Signal::STOP).unwrap();
    // Nobody else has it.
    assert!(fetches.next().unwrap().contains("from the head"));
    rustix::process::kill_process(pid, rustix::process::Signal::CONT).unwrap();
    assert!(fetches.any(|line| line.contains("from the driver")));
    let status = loop {
        match driver.exit_status().unwrap() {
            Some(status) => break status,
            None => std::thread::yield_now(),
        }
    };
    assert!(status.success());
    drop(worker);
}

/// One of two members, on the machine that has what `Member::options` asks for.
struct Linked(std::sync::Mutex<Group>);

#[wingbeat::actor]
impl Linked {
    fn new(meeting: MeetingHandle, rank: u32) -> Self {
        let mut group = Group::join(&meeting, rank).unwrap();
        group.barrier().unwrap();
        Linked(std::sync::Mutex::new(group))
    }

    fn is_there(&self) {}

    /// Works with the other until that fails, or waits for it; says why.
    fn until_it_fails(&self, is_waiting: bool) -> String {
        let mut group = self.0.lock().unwrap();
        let mut data = vec![1.0f32; 1 << 20];
        let other = 1 - group.rank();
        loop {
            let done = match is_waiting {
                true => group.recv(&mut data, other),
                false => group.all_reduce(&mut data, Op::Max),
            };
            if let Err(error) = done {
                return error.to_string();
            }
        }
    }
}

#[test]
fn members_behind_a_cut_link_are_given_up() {
    const NAME: &str = "members_behind_a_cut_link_are_given_up";
    if std::env::var_os(INSIDE).is_some() {
        return on_both_sides_of_a_link();
    }
    let Some(hosts) = Hosts::new(3).unwrap() else {
        return;
    };
    let (address, _head) = hosts.head().unwrap();
    let _nodes =
        [(1, "left=4"), (2, "right=4")].map(|(host, has)| hosts.node(host, &address, &["--resource", has]).unwrap());
    let mut driver = hosts.on(0, &std::env::current_exe().unwrap());
    driver.args(["--exact", NAME, "--nocapture"]).env(INSIDE, "1").stdout(std::process::Stdio::piped());
    hosts.join(&mut driver, &address);
    let mut driver = driver.spawn().unwrap();
    let mut said = std::io::BufReader::new(driver.stdout.take().unwrap());
    let mut text = String::new();
    while !text.ends_with("they are linked\n") {
        assert!(std::io::BufRead::read_line(&mut said, &mut text).unwrap() > 0, "{text}");
    }
    assert!(hosts.cut(1));
    std::io::Read::read_to_string(&mut said, &mut text).unwrap();
    assert!(driver.wait().unwrap().success(), "{text}");
}

fn on_both_sides_of_a_link() {
    wingbeat::init_blocking().unwrap();
    // One pair has data on its way when the link is cut, and the other waits.
    let pairs = [false, true].map(|is_waiting| {
        let meeting = Meeting::of(2);
        let of =
            |rank: u32, side: &str| Linked::options().num_cpus(0.1).resource(side, 1.0).remote(meeting.clone(), rank);
        (is_waiting, [of(0, "left"), of(1, "right")])
    });
    for member in pairs.iter().flat_map(|(_, members)| members) {
        member.is_there().get_blocking().unwrap();
    }
    let ends: Vec<_> = pairs
        .iter()
        .map(|(is_waiting, members)| members.each_ref().map(|member| member.until_it_fails(*is_waiting)))
        .collect();
    println!("they are linked");
    for [_, right] in &ends {
        // Only a hang reaches it: a member that merely does nothing is waited for for half an hour.
        let error = right.get_timeout_blocking(std::time::Duration::from_secs(60)).unwrap();
        assert!(error.starts_with("rank 0 is gone"), "{error}");
    }
    wingbeat::shutdown_blocking();
}

/// Its process, which lives alone.
struct Alone(u32);

#[wingbeat::actor(max_restarts = 3)]
impl Alone {
    /// Leaves a sign if an earlier life goes on.
    fn new(signs: std::path::PathBuf) -> Self {
        let earlier = std::fs::read_to_string(signs.join("pid")).ok().map(|pid| pid.parse().unwrap());
        if earlier.is_some_and(wingbeat_tests::is_alive) {
            std::fs::write(signs.join("two lives"), "").unwrap();
        }
        std::fs::write(signs.join("pid"), std::process::id().to_string()).unwrap();
        Alone(std::process::id())
    }

    fn pid(&self) -> u32 {
        self.0
    }
}

/// Cuts the first node's machine off from the head's in one direction or both: it ends before what ran there is started again.
fn lives_once(test: &str, cut: impl Fn(&Hosts)) {
    if let Some(signs) = std::env::var_os(INSIDE) {
        return lives_again(std::path::Path::new(&signs));
    }
    let Some(hosts) = Hosts::new(3).unwrap() else { return };
    let hosts = hosts.env("WINGBEAT_SILENCE_MS", "2000");
    let (address, _head) = hosts.head().unwrap();
    let first = hosts.node(1, &address, &["--resource", "here=1"]).unwrap();
    let signs = tempfile::tempdir().unwrap();
    let mut driver = hosts.on(0, &std::env::current_exe().unwrap());
    driver.args(["--exact", test, "--nocapture"]).env(INSIDE, signs.path()).stdout(Stdio::piped());
    hosts.join(&mut driver, &address);
    let mut driver = driver.spawn().unwrap();
    let mut said = BufReader::new(driver.stdout.take().unwrap());
    let mut text = String::new();
    while !text.ends_with("it lives\n") {
        assert!(said.read_line(&mut text).unwrap() > 0, "{text}");
    }
    let _second = hosts.node(2, &address, &["--resource", "here=1"]).unwrap();
    cut(&hosts);
    std::io::Read::read_to_string(&mut said, &mut text).unwrap();
    assert!(driver.wait().unwrap().success(), "{text}");
    assert!(wingbeat_tests::wait_for_end(first.pid(), std::time::Duration::from_secs(30)), "the first node goes on");
}

fn lives_again(signs: &std::path::Path) {
    wingbeat::init_blocking().unwrap();
    let alone = Alone::options().num_cpus(0.0).resource("here", 1.0).remote(signs.to_owned());
    let first = alone.pid().get_blocking().unwrap();
    println!("it lives");
    // Calls fail while it is between two lives.
    let begun = std::time::Instant::now();
    while !alone.pid().get_blocking().is_ok_and(|pid| pid != first) {
        assert!(begun.elapsed() < std::time::Duration::from_secs(90), "it is not started again");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    assert!(!signs.join("two lives").exists(), "two of its lives went on at a time");
}

#[test]
fn a_node_that_the_head_does_not_hear_ends_before_what_ran_there_lives_again() {
    lives_once("a_node_that_the_head_does_not_hear_ends_before_what_ran_there_lives_again", |hosts| {
        assert!(hosts.cut_way(1, 0));
    });
}

#[test]
fn a_node_that_does_not_hear_the_head_ends_before_what_ran_there_lives_again() {
    lives_once("a_node_that_does_not_hear_the_head_ends_before_what_ran_there_lives_again", |hosts| {
        assert!(hosts.cut_way(0, 1));
    });
}

#[test]
fn a_node_that_is_cut_off_ends_before_what_ran_there_lives_again() {
    lives_once("a_node_that_is_cut_off_ends_before_what_ran_there_lives_again", |hosts| assert!(hosts.cut(1)));
}
