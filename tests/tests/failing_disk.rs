//! The disk to which values are spilled is full, or loses what was written: whoever needs it has an error of that, and
//! everything else goes on.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::fs::OpenOptions;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use common::Local;
use wingbeat::{Error, ErrorKind, ObjectRef, put};
use wingbeat_tests::{TestCluster, is_alive, is_root, poll};

/// Only something that hangs takes so long.
const LIMIT: Duration = Duration::from_secs(60);
const VALUE: usize = 1 << 20;

#[wingbeat::remote]
fn made(number: u8) -> Vec<u8> {
    vec![number; VALUE]
}

#[wingbeat::remote]
fn square(x: u64) -> u64 {
    x * x
}

/// A small disk.
struct Disk<'a>(&'a Path);

impl Disk<'_> {
    fn mount(at: &Path) -> Disk<'_> {
        let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", "size=4M", "tmpfs"]).arg(at).status().unwrap();
        assert!(mounted.success());
        Disk(at)
    }
}

impl Drop for Disk<'_> {
    fn drop(&mut self) {
        // The node that has a file there may just be ending.
        let _ = Command::new("umount").arg("--lazy").arg(self.0).status();
    }
}

/// A cluster whose node has a small store, spills to this folder, and is joined.
fn spilling_to(folder: &Path) -> (TestCluster, Local) {
    let mut cluster = TestCluster::start(0, 1).unwrap();
    let folder = folder.to_str().unwrap();
    let store = ["--object-store-memory", "16MiB", "--spill-limit", "1GiB", "--spill-dir", folder];
    cluster.add_node(&[&["--num-cpus", "1"], &store[..]].concat()).unwrap();
    let driver = Local::from(wingbeat::init_at(cluster.address()).token(&cluster.token().unwrap()));
    (cluster, driver)
}

/// What is read or made once there is room: the node hears of what was dropped a moment later.
fn when_there_is_room(ask: impl Fn() -> wingbeat::Result<Vec<u8>>) -> Vec<u8> {
    let answer = || match ask() {
        Err(error) if error.kind() == ErrorKind::Full => None,
        answer => Some(answer),
    };
    poll(LIMIT, answer).unwrap_or_else(|| panic!("the disk stays full")).unwrap()
}

fn is(value: &[u8], number: u8) -> bool {
    value.len() == VALUE && value.iter().all(|byte| *byte == number)
}

#[test]
fn a_full_disk_is_an_error_of_whoever_needs_room_and_everything_else_goes_on() {
    if !is_root().unwrap() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let _disk = Disk::mount(folder.path());
    let (cluster, _driver) = spilling_to(folder.path());
    let node = cluster.node_pid(0).unwrap();
    let mut kept: Vec<ObjectRef<Vec<u8>>> = Vec::new();
    let error = loop {
        let number = kept.len() as u8;
        match put(&vec![number; VALUE]) {
            Ok(value) => kept.push(value),
            Err(error) => break error,
        }
        assert!(kept.len() < 100, "16 MiB of memory and 4 MiB of disk hold no 100 MiB");
    };
    assert!(matches!(error, Error::StoreFull { .. }) && error.kind() == ErrorKind::Full, "{error}");
    assert!(error.to_string().contains("the disk is full"), "{error}");
    let error = made::options().max_retries(0).remote(1).get_blocking().unwrap_err();
    assert!(error.to_string().contains("the disk is full"), "{error}");
    assert_eq!(square::remote(7).get_blocking().unwrap(), 49);
    // Some are in memory, and some on the disk; each reads one at a time.
    drop(kept.pop());
    for (number, value) in kept.iter().enumerate() {
        assert!(is(&when_there_is_room(|| value.get_blocking()), number as u8), "value {number}");
    }
    // There is room again.
    kept.truncate(4);
    assert!(is(&when_there_is_room(|| made::remote(9).get_blocking()), 9));
    assert!(is_alive(node));
}

#[test]
fn what_a_failing_disk_loses_is_made_again_or_lost_and_everything_else_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let (cluster, _driver) = spilling_to(folder.path());
    let node = cluster.node_pid(0).unwrap();
    let results: Vec<_> = (0..16).map(made::remote).collect();
    wingbeat::wait_blocking(results.clone(), results.len(), None).unwrap();
    let values: Vec<_> = (0..16).map(|number| put(&vec![number; VALUE]).unwrap()).collect();
    // Half of all lies on the disk, which loses it.
    let files = std::fs::read_dir(format!("/proc/{node}/fd")).unwrap().map(|file| file.unwrap().path());
    let spilled = files.filter(|file| std::fs::read_link(file).is_ok_and(|at| at.starts_with(folder.path())));
    let spilled: Vec<_> = spilled.collect();
    assert_eq!(spilled.len(), 1);
    let file = OpenOptions::new().write(true).open(&spilled[0]).unwrap();
    assert!(file.metadata().unwrap().len() >= 8 * VALUE as u64);
    file.set_len(0).unwrap();
    assert_eq!(square::remote(7).get_blocking().unwrap(), 49);
    for (number, result) in results.iter().enumerate() {
        assert!(is(&result.get_blocking().unwrap(), number as u8), "result {number}");
    }
    let mut lost = 0;
    for (number, value) in values.iter().enumerate() {
        match value.get_blocking() {
            Ok(value) => assert!(is(&value, number as u8), "value {number}"),
            Err(Error::ObjectLost { why, .. }) => {
                assert!(why.contains("spill"), "{why}");
                lost += 1;
            }
            Err(other) => panic!("value {number}: {other}"),
        }
    }
    assert!(lost < values.len(), "those in memory are there");
    assert!(is(&made::remote(9).get_blocking().unwrap(), 9) && is_alive(node));
}
