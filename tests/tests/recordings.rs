//! What drivers and worker processes write down of what they hear and say.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use common::Started;
use serde::{Deserialize, Serialize};
use wingbeat_tests::TestCluster;

/// Says which driver this program is to be, when the test starts itself again.
const DRIVER: &str = "WINGBEAT_TEST_DRIVER";
/// A file that the driver's task makes.
const MARKER: &str = "WINGBEAT_TEST_MARKER";

/// In no file as text: what is looked for is made at run time, and the program is not recorded.
fn secret() -> String {
    ["xyzzy", "plugh", "7"].join("-")
}

#[wingbeat::remote]
fn leaf(text: String) -> String {
    assert_eq!(text, secret());
    text
}

#[wingbeat::remote]
fn tree(depth: u32, text: String) -> Vec<String> {
    if depth == 0 {
        return vec![leaf::remote(text).get_blocking().unwrap()];
    }
    let children = [tree::remote(depth - 1, text.clone()), tree::remote(depth - 1, text)];
    children.iter().flat_map(|child| child.get_blocking().unwrap()).collect()
}

#[wingbeat::remote]
fn large(text: String) -> String {
    text.repeat(20_000)
}

#[derive(Debug, Serialize, Deserialize)]
struct Fault {
    text: String,
}

impl std::fmt::Display for Fault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "it failed with {}", self.text)
    }
}

impl std::error::Error for Fault {}

#[wingbeat::remote]
fn fails(text: String) -> Result<u64, Fault> {
    println!("{text}");
    Err(Fault { text })
}

#[wingbeat::remote]
fn panics(text: String) {
    panic!("{text}");
}

struct Refuses;

#[wingbeat::actor]
impl Refuses {
    fn new(text: String) -> Result<Refuses, Fault> {
        Err(Fault { text })
    }

    fn call(&self) {}
}

struct Keeper {
    text: String,
}

#[wingbeat::actor]
impl Keeper {
    fn new(text: String) -> Keeper {
        Keeper { text }
    }

    fn joined(&mut self, more: String) -> String {
        self.text += &more;
        self.text.clone()
    }
}

#[wingbeat::remote]
fn stays(marker: PathBuf) -> u64 {
    std::fs::write(marker, "").unwrap();
    loop {
        std::thread::park();
    }
}

/// What this program does when it was started as a driver. Worker processes work in another folder.
fn drive(what: &str) {
    let init = wingbeat::init().working_dir("/");
    wingbeat::block_on(std::future::IntoFuture::into_future(init)).unwrap();
    if what == "stays" {
        let _ = stays::remote(PathBuf::from(std::env::var(MARKER).unwrap())).get_blocking();
        return;
    }
    let keeper = Keeper::remote(secret());
    assert_eq!(keeper.joined(secret()).get_blocking().unwrap(), secret() + &secret());
    assert_eq!(tree::remote(2, secret()).get_blocking().unwrap().len(), 4);
    assert_eq!(large::remote(secret()).get_blocking().unwrap().len(), 20_000 * secret().len());
    let failed = fails::remote(secret()).get_blocking().unwrap_err();
    assert_eq!(failed.application::<Fault>().unwrap().text, secret());
    let panicked = panics::remote(secret()).get_blocking().unwrap_err();
    let refused = Refuses::remote(secret()).call().get_blocking().unwrap_err();
    assert!([panicked, refused].iter().all(|error| error.to_string().contains(&secret())));
    let object = leaf::remote(wingbeat::put(&secret()).unwrap());
    assert_eq!(object.get_blocking().unwrap(), secret());
    println!("\nobject {}", object.id());
    wingbeat::shutdown_blocking();
}

/// A driver that records in `recordings`, a folder of `folder`.
fn driver(cluster: &TestCluster, folder: &Path, test: &str, what: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", test, "--nocapture"])
        .env(DRIVER, what)
        .env(MARKER, folder.join("started"))
        .env("WINGBEAT_ADDRESS", cluster.address())
        .env("WINGBEAT_TOKEN", cluster.token().unwrap())
        .env("WINGBEAT_RECORD", "recordings")
        .current_dir(folder)
        .stdout(Stdio::piped());
    command
}

/// What `wingbeat replay` prints of the recordings; it must succeed.
fn replayed(cluster: &TestCluster, place: &Path, arguments: &[&str]) -> String {
    let output = cluster.command().unwrap().arg("replay").arg(place).args(arguments).output().unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    said
}

fn names(place: &Path) -> Vec<String> {
    let files = std::fs::read_dir(place).into_iter().flatten();
    files.map(|file| file.unwrap().file_name().into_string().unwrap()).collect()
}

/// The id of the process that wrote a recording: `driver-process-7a31-4711.wbrec`.
fn process_of(name: &str) -> &str {
    name.split_once('-').unwrap().1.rsplit_once('-').unwrap().0
}

#[test]
fn a_task_is_followed_from_driver_to_worker_process_and_no_value_is_written() {
    if let Ok(what) = std::env::var(DRIVER) {
        return drive(&what);
    }
    let mut cluster = TestCluster::start(1, 2).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let test = "a_task_is_followed_from_driver_to_worker_process_and_no_value_is_written";
    let output = driver(&cluster, folder.path(), test, "works").output().unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{said}");
    let object = said.lines().find_map(|line| line.strip_prefix("object object-")).unwrap();
    // No worker process is on its way any more.
    cluster.stop().unwrap();
    // The task that makes the object.
    let task = format!("task-{}", object.rsplit_once('.').unwrap().0);

    let place = folder.path().join("recordings");
    let names = names(&place);
    let driver = names.iter().find(|name| name.starts_with("driver-")).unwrap();
    let workers: BTreeSet<_> = names.iter().filter(|name| name.starts_with("worker-")).collect();
    assert!(workers.len() >= 2 && workers.len() + 1 == names.len(), "an actor and tasks, and one driver: {names:?}");
    for name in &names {
        let bytes = std::fs::read(place.join(name)).unwrap();
        assert!(!bytes.windows(secret().len()).any(|bytes| bytes == secret().as_bytes()), "a value is in {name}");
    }

    let shown = replayed(&cluster, &place, &["--around", &task]);
    assert_eq!(shown.matches("shown, and not checked").count(), names.len(), "{shown}");
    let of_driver = shown.split(driver.as_str()).nth(1).unwrap().split("shown, and not checked").next().unwrap();
    let sent = of_driver.find("Tasks {").unwrap();
    let answered = of_driver.find("Results(").unwrap();
    assert!(sent < answered, "{of_driver}");
    let worker = *workers
        .iter()
        .find(|name| of_driver.contains(&format!("to {}: Tasks", process_of(name))))
        .unwrap_or_else(|| panic!("to one of {workers:?}: {of_driver}"));
    let of_worker = shown.split(worker.as_str()).nth(1).unwrap().split("shown, and not checked").next().unwrap();
    let owner = process_of(driver);
    let taken_in = of_worker.find(&format!("from {owner}: Tasks")).unwrap();
    let result = of_worker.find(&format!("to {owner}: Results([{task}")).unwrap();
    assert!(taken_in < result, "{of_worker}");

    let merged = replayed(&cluster, &place, &["--around", &task, "--merged"]);
    let lines: Vec<_> = merged.lines().filter(|line| line.contains(&task)).collect();
    for name in [driver, worker] {
        assert!(lines.iter().any(|line| line.contains(name.trim_end_matches(".wbrec"))), "{name}: {merged}");
    }
    let every_step = replayed(&cluster, &place, &["--merged"]);
    assert!(every_step.lines().count() > merged.lines().count(), "{every_step}");
    let full = replayed(&cluster, &place, &["--around", &task, "--full"]);
    assert!(full.contains("Packed { bytes: ") && !full.contains("bytes: 0 bytes"), "sizes stay: {full}");
    let nobody = ["--around", "task-nobody"];
    let output = cluster.command().unwrap().arg("replay").arg(&place).args(nobody).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("names `task-nobody`"), "{said}");
}

/// Ended whatever becomes of the test.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_driver_that_is_killed_leaves_what_it_has_written() {
    if let Ok(what) = std::env::var(DRIVER) {
        return drive(&what);
    }
    let cluster = TestCluster::start(1, 1).unwrap();
    let started = Started::new();
    let folder = started.path().parent().unwrap().to_owned();
    let test = "a_driver_that_is_killed_leaves_what_it_has_written";
    let driver = Killed(driver(&cluster, &folder, test, "stays").spawn().unwrap());
    started.wait();
    let place = folder.join("recordings");
    // The task runs. What its driver said of it is on its way to the file.
    let is_sent = |line: &str| line.contains("  to process-") && line.contains(": Tasks {");
    while !replayed(&cluster, &place, &["--all"]).lines().any(is_sent) {
        std::thread::yield_now();
    }
    drop(driver);
    let shown = replayed(&cluster, &place, &["--all"]);
    assert!(shown.contains("driver-") && shown.lines().any(is_sent), "{shown}");
}
