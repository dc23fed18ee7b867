//! Nodes inside control groups, as containers and services are: they offer what they may use, and outlive its end.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use common::Local;
use wingbeat::{EndedBy, Error, put};
use wingbeat_tests::{TestCluster, is_alive};

const MIB: usize = 1 << 20;
/// Bytes of memory that the group may use, beside one CPU's time.
const LIMIT: u64 = 300 << 20;

/// A control group of this test, of either version. Removed when dropped, after its processes have ended.
struct Group {
    folders: Vec<PathBuf>,
}

impl Group {
    fn new(name: &str) -> Option<Group> {
        let name = format!("wingbeat-test-{name}-{}", std::process::id());
        let of_all = Path::new("/sys/fs/cgroup");
        let make = |folder: PathBuf, limits: &[(&str, String)]| {
            std::fs::create_dir(&folder).ok()?;
            let group = Group { folders: vec![folder.clone()] };
            let set = limits.iter().all(|(file, value)| std::fs::write(folder.join(file), value).is_ok());
            set.then_some(group)
        };
        if of_all.join("cgroup.controllers").exists() {
            return make(of_all.join(&name), &[("memory.max", LIMIT.to_string()), ("cpu.max", "100000 100000".into())]);
        }
        let mut memory = make(of_all.join("memory").join(&name), &[("memory.limit_in_bytes", LIMIT.to_string())])?;
        let mut cpu = make(of_all.join("cpu").join(&name), &[("cpu.cfs_quota_us", "100000".into())])?;
        memory.folders.append(&mut cpu.folders);
        Some(memory)
    }

    /// A `wingbeat` whose nodes start inside.
    fn binary(&self, dir: &Path) -> PathBuf {
        let script = dir.join("wingbeat");
        let enter: Vec<String> =
            self.folders.iter().map(|folder| format!("  echo $$ > {}/cgroup.procs\n", folder.display())).collect();
        let real = wingbeat_tests::binary().unwrap();
        let text =
            format!("#!/bin/sh\nif [ \"$1\" = worker ]; then\n{}fi\nexec {} \"$@\"\n", enter.concat(), real.display());
        let written = dir.join("text");
        std::fs::write(&written, text).unwrap();
        // By a process of its own: what another test starts meanwhile would have it open for writing, and it could not be started.
        let copied = std::process::Command::new("cp").arg(&written).arg(&script).status();
        assert!(copied.unwrap().success());
        std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755)).unwrap();
        script
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        for folder in &self.folders {
            let begun = std::time::Instant::now();
            while std::fs::remove_dir(folder).is_err() && begun.elapsed().as_secs() < 10 {
                std::thread::yield_now();
            }
        }
    }
}

/// Dropped in this order: the cluster's processes leave the group before it goes.
struct Contained {
    driver: Option<Local>,
    cluster: TestCluster,
    _dir: tempfile::TempDir,
    _group: Group,
}

impl Contained {
    /// A node with these arguments; without any, one that offers what it finds.
    fn new(name: &str, args: &[&str]) -> Option<Contained> {
        let Some(group) = Group::new(name) else {
            eprintln!("skipped: needs to be root, and control groups that can be made");
            return None;
        };
        let dir = tempfile::tempdir().unwrap();
        let mut cluster = TestCluster::with_binary(group.binary(dir.path()), 0, 0).unwrap();
        match args {
            [] => cluster.add_default_node().unwrap(),
            args => cluster.add_node(args).unwrap(),
        };
        let driver = Local::from(wingbeat::init_at(cluster.address()).token(&cluster.token().unwrap()));
        Some(Contained { driver: Some(driver), cluster, _dir: dir, _group: group })
    }

    fn assert_alive(&self) {
        assert!(is_alive(self.cluster.node_pid(0).unwrap()), "the kernel killed the node");
    }
}

impl Drop for Contained {
    fn drop(&mut self) {
        self.driver.take();
    }
}

#[test]
fn a_node_offers_what_its_group_may_use() {
    let Some(contained) = Contained::new("offer", &[]) else { return };
    let node = &contained.cluster.state().unwrap()["nodes"][0];
    let resources = serde_json::json!({ "CPU": 1.0, "memory": (LIMIT / 10 * 7) as f64 });
    assert_eq!(node["info"]["resources"], resources, "{node}");
    assert_eq!(node["info"]["store_bytes"], LIMIT / 10 * 3, "{node}");
}

#[test]
fn a_store_that_is_larger_than_its_group_spills_instead_of_having_its_node_killed() {
    let Some(contained) = Contained::new("spill", &["--num-cpus", "1", "--object-store-memory", "2GiB"]) else {
        return;
    };
    let objects: Vec<_> = (0..24).map(|n| put(&vec![n as u8; 32 * MIB]).unwrap()).collect();
    contained.assert_alive();
    for (n, object) in objects.iter().enumerate() {
        let data = object.view_blocking().unwrap();
        assert!(data.len() == 32 * MIB && data.iter().all(|byte| *byte == n as u8));
    }
    contained.assert_alive();
}

#[test]
fn without_a_disk_a_put_says_that_memory_is_short_and_kills_nobody() {
    let args = ["--num-cpus", "1", "--object-store-memory", "2GiB", "--spill-limit", "0"];
    let Some(contained) = Contained::new("short", &args) else { return };
    let mut objects = Vec::new();
    let error = loop {
        match put(&vec![objects.len() as u8; 32 * MIB]) {
            Ok(object) => objects.push(object),
            Err(error) => break error,
        }
        assert!(objects.len() < 10, "more than the group has");
    };
    assert!(matches!(error, Error::StoreFull { .. }), "{error}");
    assert!(error.to_string().contains("memory is short"), "{error}");
    contained.assert_alive();
    for (n, object) in objects.iter().enumerate() {
        assert_eq!(object.get_blocking().unwrap()[0], n as u8);
    }
    // What is dropped makes room, for which a put waits.
    objects.clear();
    put(&vec![1u8; 32 * MIB]).unwrap();
}

/// Takes memory until it is ended: the last third slowly, so that its node can look, or all at once.
#[wingbeat::remote(max_retries = 0)]
fn eat(is_slow: bool) -> usize {
    let mut eaten = Vec::new();
    while eaten.len() < 400 {
        eaten.push(vec![1u8; MIB]);
        if is_slow && eaten.len() > 200 {
            std::thread::sleep(Duration::from_millis(20));
        }
    }
    eaten.len()
}

#[wingbeat::remote]
fn hello() -> u32 {
    std::process::id()
}

#[test]
fn a_task_that_would_fill_its_group_is_ended_by_its_node() {
    let Some(contained) = Contained::new("hog", &["--num-cpus", "2", "--memory-threshold", "0.75"]) else { return };
    let error = eat::remote(true).get_blocking().unwrap_err();
    let Error::OutOfMemory { shortage, .. } = &error else { panic!("{error}") };
    assert_eq!((shortage.by, shortage.usage.limit), (EndedBy::Node, LIMIT), "{error}");
    assert!(error.to_string().contains("control group"), "{error}");
    contained.assert_alive();
    hello::remote().get_blocking().unwrap();
}

#[test]
fn a_task_that_the_kernel_killed_says_so_and_who_was_killed_by_others_does_not() {
    let args = ["--num-cpus", "2", "--memory-threshold", "0"];
    let Some(contained) = Contained::new("kernel", &args) else { return };
    let error = eat::remote(false).get_blocking().unwrap_err();
    let Error::OutOfMemory { shortage, .. } = &error else { panic!("{error}") };
    assert_eq!(shortage.by, EndedBy::Kernel, "{error}");
    contained.assert_alive();
    let error = killed::remote().get_blocking().unwrap_err();
    assert!(matches!(error, Error::WorkerCrashed { .. }), "{error}");
}

#[wingbeat::remote(max_retries = 0)]
fn killed() {
    rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL).unwrap();
}
