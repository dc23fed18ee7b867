//! Connections that break between processes which both live: a worker process on another machine stands still for longer than
//! silence is borne (SIGSTOP), and goes on later. Nobody waits for ever, and afterwards everything works again.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use wingbeat::{CallOptions, Error};
use wingbeat_tests::hosts::Hosts;

/// Runs inside the driver's namespace when the test starts itself again there.
const INSIDE: &str = "WINGBEAT_TEST_INSIDE";
const TOKEN: &str = "a token for two hosts";

/// Says where it runs, and returns when it may.
fn hold_here(dir: &Path) {
    let written = dir.join(format!("writing-{}", std::process::id()));
    std::fs::write(&written, std::process::id().to_string()).unwrap();
    std::fs::rename(written, dir.join("pid")).unwrap();
    while !dir.join("go").exists() {
        std::thread::yield_now();
    }
}

#[wingbeat::remote]
fn hold(dir: PathBuf) {
    hold_here(&dir);
}

#[wingbeat::remote]
fn double(number: u64) -> u64 {
    2 * number
}

struct Holder;

#[wingbeat::actor(max_concurrency = 4)]
impl Holder {
    fn new() -> Self {
        Holder
    }

    fn hold(&self, dir: PathBuf) {
        hold_here(&dir);
    }

    /// As [`Holder::hold`], and can be interrupted.
    async fn hold_later(&self, dir: PathBuf) -> u64 {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_nanos();
        std::fs::write(dir.join(format!("began-{now}")), "").unwrap();
        while !dir.join("go").exists() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        7
    }

    fn pid(&self) -> u32 {
        std::process::id()
    }
}

fn ip(arguments: &str) -> bool {
    let status = Command::new("ip").args(arguments.split(' ')).stderr(Stdio::null()).status();
    status.is_ok_and(|status| status.success())
}

/// Two namespaces, joined by a cable.
struct Two {
    names: [String; 2],
    subnet: u32,
}

impl Two {
    fn new(number: u32) -> Option<Two> {
        let id = std::process::id() % 100_000 * 10 + number;
        let two = Two { names: [format!("wc{id}-0"), format!("wc{id}-1")], subnet: id % 250 };
        let [a, b] = &two.names;
        let made = ip(&format!("netns add {a}"))
            && ip(&format!("netns add {b}"))
            && ip(&format!("-n {a} link add c{id}-0 type veth peer name c{id}-1 netns {b}"));
        let up = |host: usize| {
            let name = &two.names[host];
            ip(&format!("-n {name} addr add {}/24 dev c{id}-{host}", two.address(host)))
                && ip(&format!("-n {name} link set c{id}-{host} up"))
                && ip(&format!("-n {name} link set lo up"))
        };
        (made && up(0) && up(1)).then_some(two)
    }

    fn address(&self, host: usize) -> String {
        format!("10.78.{}.{}", self.subnet, host + 1)
    }

    fn on(&self, host: usize, program: &Path) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.names[host]]).arg(program);
        // Long enough for a loaded machine, whose processes all live; the usual limit is five seconds.
        command.env("WINGBEAT_TOKEN", TOKEN).env("WINGBEAT_SILENCE_MS", "3000").env("WINGBEAT_DIAL_MS", "3000");
        // What is given up is given up soon.
        command.env("WINGBEAT_LOST_MS", "4000");
        command
    }
}

impl Drop for Two {
    fn drop(&mut self) {
        for name in &self.names {
            ip(&format!("netns del {name}"));
        }
    }
}

struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn start(command: &mut Command, sign: &str) -> Ended {
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let line = lines.by_ref().map_while(Result::ok).find(|line| line.contains(sign));
    // Somebody must read on, or the daemon would block on its next line.
    std::thread::spawn(move || lines.for_each(drop));
    line.unwrap();
    Ended(child)
}

/// Runs `inside` as a driver on the first machine, with a node of one CPU on the second.
fn driven(number: u32, test: &str, inside: impl FnOnce()) {
    if std::env::var_os(INSIDE).is_some() {
        wingbeat::init_blocking().unwrap();
        inside();
        return wingbeat::shutdown_blocking();
    }
    if !wingbeat_tests::is_root().unwrap() {
        return;
    }
    let Some(two) = Two::new(number) else { panic!("`ip` cannot make network namespaces") };
    let wingbeat = wingbeat_tests::binary().unwrap();
    let head = two.address(0);
    let _head = start(two.on(0, &wingbeat).args(["head", "--host", &head, "--port", "6420"]), "listening");
    let address = format!("{head}:6420");
    let worker = ["worker", "--head", &address, "--num-cpus", "1", "--object-store-memory", "64MiB"];
    let _worker = start(two.on(1, &wingbeat).args(worker), "joined");
    let mut driver = two.on(0, &std::env::current_exe().unwrap());
    driver.args(["--exact", test, "--nocapture"]).env(INSIDE, "1").env("WINGBEAT_ADDRESS", &address);
    let output = driver.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}");
}

/// The process in which something holds.
fn holding(dir: &Path) -> Pid {
    loop {
        if let Ok(text) = std::fs::read_to_string(dir.join("pid")) {
            return Pid::from_raw(text.parse().unwrap()).unwrap();
        }
        std::thread::yield_now();
    }
}

/// Goes on when dropped, so that a test which fails leaves nothing that stands still.
struct Stopped(Pid);

impl Stopped {
    fn new(pid: Pid) -> Stopped {
        kill_process(pid, Signal::STOP).unwrap();
        Stopped(pid)
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        let _ = kill_process(self.0, Signal::CONT);
    }
}

/// Does a little, and leaves a byte.
#[wingbeat::remote(max_retries = 0)]
fn leave_a_byte(file: PathBuf) {
    std::thread::sleep(Duration::from_millis(1));
    std::fs::OpenOptions::new().append(true).open(file).unwrap().write_all(b"x").unwrap();
}

#[wingbeat::remote]
fn numbers(count: u64) -> impl Iterator<Item = u64> {
    (0..count).inspect(|_| std::thread::sleep(Duration::from_millis(1)))
}

struct Counter(u64);

#[wingbeat::actor]
impl Counter {
    fn new() -> Self {
        Counter(0)
    }

    fn count(&mut self) -> u64 {
        std::thread::sleep(Duration::from_millis(1));
        self.0 += 1;
        self.0
    }
}

/// How long a cut lasts with short limits, and with the usual ones: two thirds of `--lost-after`.
const SHORT: Duration = Duration::from_secs(3);
const USUAL: Duration = Duration::from_secs(20);

/// Tells the driver how long the cut lasts.
const LASTS: &str = "WINGBEAT_TEST_CUT_S";

/// Runs [`across_a_cut`] on the third of three machines, whose head is on the first, and cuts and mends meanwhile.
fn cut_while_under_way(
    test: &str,
    env: &[(&'static str, &'static str)],
    lasts: Duration,
    cut: impl Fn(&Hosts),
    mend: impl Fn(&Hosts),
) {
    if std::env::var_os(INSIDE).is_some() {
        return across_a_cut();
    }
    let Some(mut hosts) = Hosts::new(3).unwrap() else { return };
    for (variable, value) in env {
        hosts = hosts.env(variable, value);
    }
    let (address, _head) = hosts.head().unwrap();
    let _nodes =
        [(1, "far=1"), (2, "near=1")].map(|(host, has)| hosts.node(host, &address, &["--resource", has]).unwrap());
    let mut driver = hosts.on(2, &std::env::current_exe().unwrap());
    driver.args(["--exact", test, "--nocapture"]).env(INSIDE, "1").stdout(Stdio::piped());
    driver.env(LASTS, lasts.as_secs().to_string());
    hosts.join(&mut driver, &address);
    let mut driver = driver.spawn().unwrap();
    let mut said = BufReader::new(driver.stdout.take().unwrap());
    let mut text = String::new();
    while !text.ends_with("it is under way\n") {
        assert!(said.read_line(&mut text).unwrap() > 0, "{text}");
    }
    cut(&hosts);
    // Longer than silence is borne: the connections end.
    std::thread::sleep(lasts);
    mend(&hosts);
    said.read_to_string(&mut text).unwrap();
    assert!(driver.wait().unwrap().success(), "{text}");
}

#[test]
fn a_cut_between_a_driver_and_a_worker_process_loses_no_task_call_or_item_and_repeats_none() {
    cut_while_under_way(
        "a_cut_between_a_driver_and_a_worker_process_loses_no_task_call_or_item_and_repeats_none",
        &[("WINGBEAT_SILENCE_MS", "1000"), ("WINGBEAT_CONTACT_MS", "60000")],
        SHORT,
        |hosts| assert!(hosts.cut_between(1, 2)),
        |hosts| assert!(hosts.mend_between(1, 2)),
    );
}

#[test]
fn a_machine_that_is_cut_off_from_everybody_and_comes_back_in_time_loses_nothing_and_repeats_nothing() {
    cut_while_under_way(
        "a_machine_that_is_cut_off_from_everybody_and_comes_back_in_time_loses_nothing_and_repeats_nothing",
        &[],
        USUAL,
        |hosts| assert!(hosts.cut(1)),
        |hosts| assert!(hosts.mend(1)),
    );
}

#[test]
fn a_driver_that_is_cut_off_from_everybody_and_comes_back_in_time_loses_nothing_and_repeats_nothing() {
    cut_while_under_way(
        "a_driver_that_is_cut_off_from_everybody_and_comes_back_in_time_loses_nothing_and_repeats_nothing",
        &[("WINGBEAT_SILENCE_MS", "1000"), ("WINGBEAT_LOST_MS", "60000"), ("WINGBEAT_CONTACT_MS", "60000")],
        SHORT,
        |hosts| assert!(hosts.cut(2)),
        |hosts| assert!(hosts.mend(2)),
    );
}

const LARGE: usize = 64 << 20;

/// A value that lies where it is made until somebody reads it. It cannot be made again.
#[wingbeat::remote(max_retries = 0)]
fn large() -> Vec<u8> {
    vec![7; LARGE]
}

/// Asks the head for one actor after the other, for longer than the cut lasts.
#[wingbeat::remote(max_retries = 0)]
fn make_actors(at_least: Duration) -> u64 {
    let begun = std::time::Instant::now();
    let mut sum = 0;
    while begun.elapsed() < at_least {
        let counter = Counter::options().num_cpus(0.0).resource("far", 0.1).remote();
        sum += counter.count().get_blocking().unwrap();
    }
    sum
}

fn across_a_cut() {
    const COUNT: usize = 3_000;
    let lasts = Duration::from_secs(std::env::var(LASTS).unwrap().parse().unwrap());
    wingbeat::init_blocking().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let bytes = dir.path().join("bytes");
    std::fs::write(&bytes, "").unwrap();
    let counter = Counter::options().num_cpus(0.0).resource("far", 0.1).remote();
    let made = make_actors::options().num_cpus(0.5).resource("far", 0.1).remote(lasts + Duration::from_secs(2));
    let mut items = numbers::options().num_cpus(0.5).resource("far", 0.1).remote(COUNT as u64);
    let calls: Vec<_> = (0..COUNT).map(|_| counter.count()).collect();
    let left: Vec<_> =
        (0..COUNT).map(|_| leave_a_byte::options().num_cpus(0.5).resource("far", 0.1).remote(bytes.clone())).collect();
    assert_eq!(items.next_blocking().unwrap().unwrap(), 0);
    left[0].get_blocking().unwrap();
    calls[0].get_blocking().unwrap();
    let large = large::options().num_cpus(0.1).resource("far", 0.1).remote();
    let (mut ready, _) = wingbeat::wait_blocking(vec![large], 1, None).unwrap();
    let large = ready.remove(0);
    println!("it is under way");
    let reads = std::thread::spawn(move || large.get_blocking().unwrap().len());
    // What is asked of the head from here, too.
    assert!(made.get_blocking().unwrap() > 0);
    let here: Vec<_> =
        (0..20).map(|_| Counter::options().num_cpus(0.0).resource("near", 0.01).remote().count()).collect();
    assert_eq!(wingbeat::get_all_blocking(&here).unwrap(), [1; 20]);
    assert_eq!(reads.join().unwrap(), LARGE);
    let counted = wingbeat::get_all_blocking(&calls).unwrap();
    assert_eq!(counted, (1..=COUNT as u64).collect::<Vec<_>>());
    for number in 1..COUNT as u64 {
        assert_eq!(items.next_blocking().unwrap().unwrap(), number);
    }
    assert!(items.next_blocking().is_none());
    wingbeat::get_all_blocking(&left).unwrap();
    assert_eq!(std::fs::read(&bytes).unwrap().len(), COUNT);
    wingbeat::shutdown_blocking();
}

#[test]
fn a_task_whose_worker_process_falls_silent_fails_by_name_and_holds_up_nobody_behind_it() {
    driven(1, "a_task_whose_worker_process_falls_silent_fails_by_name_and_holds_up_nobody_behind_it", || {
        let dir = tempfile::tempdir().unwrap();
        let held = hold::options().max_retries(0).remote(dir.path().to_owned());
        let stopped = Stopped::new(holding(dir.path()));
        let error = held.get_blocking().unwrap_err();
        assert!(matches!(error, Error::ContactLost { .. }), "{error}");
        let text = error.to_string();
        assert!(text.contains("lost contact with worker process") && text.contains("Check the network"), "{text}");
        // It goes on, and the task in it never returns.
        drop(stopped);
        // The only CPU there is.
        let numbers: Vec<_> = (0..20).map(|number| double::options().max_retries(20).remote(number)).collect();
        let doubled = wingbeat::get_all_blocking(&numbers).unwrap();
        assert_eq!(doubled, (0..20).map(|number| 2 * number).collect::<Vec<u64>>());
    });
}

#[test]
fn a_call_of_an_actor_that_falls_silent_fails_by_name_and_later_calls_reach_it() {
    driven(2, "a_call_of_an_actor_that_falls_silent_fails_by_name_and_later_calls_reach_it", || {
        let dir = tempfile::tempdir().unwrap();
        let holder = Holder::remote();
        let pid = holder.pid().get_blocking().unwrap();
        let held = holder.hold(dir.path().to_owned());
        let stopped = Stopped::new(holding(dir.path()));
        let error = held.get_blocking().unwrap_err();
        let Error::ActorUnavailable { cause, .. } = &error else { panic!("{error}") };
        assert!(matches!(**cause, Error::ContactLost { .. }), "{error}");
        std::fs::write(dir.path().join("go"), "").unwrap();
        drop(stopped);
        // The same life of it.
        assert_eq!(holder.pid().get_blocking().unwrap(), pid);
    });
}

/// Has the cluster do something before it holds, and after: in processes of their own, which only the head can give.
#[wingbeat::remote(max_retries = 1)]
fn ask_twice(dir: PathBuf) -> u64 {
    let first = double::options().isolated(true).remote(1).get_blocking().unwrap();
    hold_here(&dir);
    first + double::options().isolated(true).remote(2).get_blocking().unwrap()
}

#[test]
fn a_task_whose_process_the_head_has_given_up_is_tried_again_though_user_code_has_failed() {
    const NAME: &str = "a_task_whose_process_the_head_has_given_up_is_tried_again_though_user_code_has_failed";
    driven(4, NAME, || {
        let dir = tempfile::tempdir().unwrap();
        let asking = ask_twice::remote(dir.path().to_owned());
        let pid = holding(dir.path());
        let stopped = Stopped::new(pid);
        // Longer than the head waits for it, and shorter than its owner does.
        std::thread::sleep(Duration::from_secs(6));
        std::fs::write(dir.path().join("go"), "").unwrap();
        drop(stopped);
        assert_eq!(asking.get_blocking().unwrap(), 6);
        let pid = pid.as_raw_nonzero().get().unsigned_abs();
        assert!(wingbeat_tests::wait_for_end(pid, Duration::from_secs(60)), "it lives on without a head");
    });
}

#[test]
fn a_call_that_is_made_again_after_a_loss_of_contact_is_not_answered_by_what_the_loss_interrupted() {
    const NAME: &str = "a_call_that_is_made_again_after_a_loss_of_contact_is_not_answered_by_what_the_loss_interrupted";
    driven(3, NAME, || {
        let dir = tempfile::tempdir().unwrap();
        let began = || std::fs::read_dir(dir.path()).unwrap().count();
        let holder = Holder::remote();
        let pid = Pid::from_raw(holder.pid().get_blocking().unwrap() as i32).unwrap();
        let held = holder.with(CallOptions::new().max_retries(1)).hold_later(dir.path().to_owned());
        while began() < 1 {
            std::thread::yield_now();
        }
        let stopped = Stopped::new(pid);
        // It fails when the other is made again.
        assert!(holder.pid().get_blocking().is_err());
        drop(stopped);
        while began() < 2 {
            std::thread::yield_now();
        }
        // The first attempt was interrupted before the second could begin.
        assert_eq!(holder.pid().get_blocking().unwrap() as i32, pid.as_raw_nonzero().get());
        std::fs::write(dir.path().join("go"), "").unwrap();
        assert_eq!(held.get_blocking().unwrap(), 7);
    });
}
