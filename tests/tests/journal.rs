//! A head whose disk is full says so, changes nothing, and goes on when there is room.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::fs::File;
use std::future::IntoFuture;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use common::Local;
use wingbeat::{Bundle, Error, placement_group};
use wingbeat_tests::{TestCluster, is_root};

fn mount(args: &[&str], at: &Path) -> bool {
    Command::new("mount").args(args).arg(at).status().unwrap().success()
}

/// A file system of a few hundred kilobytes, until it is dropped.
struct SmallDisk {
    dir: tempfile::TempDir,
}

impl SmallDisk {
    fn new() -> SmallDisk {
        let dir = tempfile::tempdir().unwrap();
        assert!(mount(&["-t", "tmpfs", "-o", "size=400k", "tmpfs"], dir.path()));
        SmallDisk { dir }
    }

    fn filler(&self) -> PathBuf {
        self.dir.path().join("filler")
    }

    /// Nobody writes there any more.
    fn is_read_only_now(&self) {
        assert!(mount(&["-o", "remount,ro"], self.dir.path()));
    }

    fn fill(&self) {
        let mut file = File::create(self.filler()).unwrap();
        while file.write_all(&[1; 512]).is_ok() {}
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").args(["-l"]).arg(self.dir.path()).status();
    }
}

fn join(cluster: &TestCluster) -> Result<Local, Error> {
    let init = wingbeat::init_at(cluster.address()).token(&cluster.token().unwrap()).namespace("disk");
    let session = wingbeat::block_on(init.clone().global(false).into_future())?;
    wingbeat::block_on(session.shutdown());
    Ok(Local::from(init))
}

#[test]
fn a_full_disk_refuses_changes_until_there_is_room_and_forgets_none() {
    if !is_root().unwrap() {
        return;
    }
    let disk = SmallDisk::new();
    let journal: &Path = &disk.dir.path().join("journal");
    let mut cluster = TestCluster::with_journal_at(journal, 1, 2).unwrap();
    let driver = join(&cluster).unwrap();
    let group = |name: String| {
        let group = placement_group([Bundle::new().num_cpus(0.001)]).name(&name).detached();
        wingbeat::block_on(group.into_future())
    };
    let named = |name: &str| wingbeat::block_on(wingbeat::PlacementGroup::named(name));
    group("before".into()).unwrap();
    disk.fill();
    // What is left within the journal's own pages is used up first.
    let refused = (0..1_000).find_map(|number| {
        let name = format!("{number} {}", "x".repeat(200));
        group(name.clone()).err().map(|error| (name, error))
    });
    let (name, error) = refused.unwrap();
    assert!(matches!(error, Error::Failed { .. }) && error.to_string().contains("journal"), "{error}");
    assert!(matches!(named(&name), Err(Error::PlacementGroupNotFound { .. })), "nothing was changed");
    assert!(join(&cluster).is_err(), "a driver that would be forgotten is not let in");
    // The head is alive, and says what keeps it from granting anything.
    let state = cluster.state().unwrap();
    assert!(state["nodes"].as_array().is_some_and(|nodes| nodes.len() == 1));
    assert!(state["journal_fails"].as_str().is_some_and(|why| why.contains("full")), "{state:#}");
    std::fs::remove_file(disk.filler()).unwrap();
    group(name.clone()).unwrap();
    assert!(cluster.state().unwrap()["journal_fails"].is_null());
    drop(driver);
    let driver = join(&cluster).unwrap();
    group("after".into()).unwrap();
    drop(driver);
    cluster.kill_head().unwrap();
    cluster.start_head().unwrap();
    let _driver = join(&cluster).unwrap();
    for name in ["before", &name, "after"] {
        named(name).unwrap();
    }
}

#[test]
fn a_run_that_starts_its_ranks_again_waits_until_the_journal_can_be_written() {
    if !is_root().unwrap() {
        return;
    }
    let disk = SmallDisk::new();
    let cluster = TestCluster::with_journal_at(&disk.dir.path().join("journal"), 1, 2).unwrap();
    let driver = join(&cluster).unwrap();
    let (script, fails) = (cluster.folder().join("script.py"), cluster.folder().join("fails"));
    std::fs::write(
        &script,
        "import os, sys\nprint('attempt', os.environ['TORCHELASTIC_RESTART_COUNT'], flush=True)\nif os.environ['TORCHELASTIC_RESTART_COUNT'] \
         == '0':\n    open(sys.argv[1]).read()\n    sys.exit(3)\n",
    )
    .unwrap();
    assert!(Command::new("mkfifo").arg(&fails).status().unwrap().success());
    let mut command = cluster.command().unwrap();
    command.args(["train", "--unprefixed", "--cold", "--max-failures", "1"]).arg(&script).arg(&fails);
    command.env("WINGBEAT_PYTHON", std::env::var("WINGBEAT_PYTHON").unwrap_or_else(|_| "python3".into()));
    let mut run = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut printed = BufReader::new(run.stdout.take().unwrap()).lines();
    let mut said = BufReader::new(run.stderr.take().unwrap()).lines();
    assert_eq!(printed.next().unwrap().unwrap(), "attempt 0");
    disk.fill();
    let group = |name: String| {
        let group = placement_group([Bundle::new().num_cpus(0.001)]).name(&name).detached();
        wingbeat::block_on(group.into_future())
    };
    assert!((0..1_000).any(|number| group(format!("{number} {}", "x".repeat(200))).is_err()));
    assert!((0..1_000).any(|number| group(number.to_string()).is_err()), "there is no room for a small one, either");
    // Whoever reads it is at its end.
    drop(File::options().write(true).open(&fails).unwrap());
    let waits = said.find(|line| line.as_ref().unwrap().contains("the head cannot write its journal"));
    assert!(waits.is_some(), "{:?}", run.wait());
    std::fs::remove_file(disk.filler()).unwrap();
    assert_eq!(printed.next().unwrap().unwrap(), "attempt 1");
    let left: Vec<String> = said.map(Result::unwrap).collect();
    assert!(run.wait().unwrap().success(), "{left:?}");
    drop(driver);
}

/// What a head with this journal says. It does not start.
fn refusal(journal: &Path) -> String {
    let mut head = Command::new(wingbeat_tests::binary().unwrap());
    let head = head.args(["head", "--port", "0", "--journal"]).arg(journal);
    let ended = head.env("WINGBEAT_TOKEN", "of-this-test-and-of-nobody-else").output().unwrap();
    assert!(!ended.status.success());
    String::from_utf8(ended.stderr).unwrap()
}

#[test]
fn a_head_that_may_not_write_its_journal_names_the_file_and_says_what_to_do() {
    let dir = tempfile::tempdir().unwrap();
    let said = |journal: &Path, why: &str| {
        let said = refusal(journal);
        assert!(said.contains(journal.to_str().unwrap()) && said.contains(why), "{why}: {said}");
        assert!(said.contains("name another with --journal"), "{why}: {said}");
    };
    said(&dir.path().join("none/journal"), "No such file or directory");
    said(dir.path(), "Is a directory");
    if !is_root().unwrap() {
        return;
    }
    let disk = SmallDisk::new();
    let [journal, bound] = ["journal", "bound"].map(|name| disk.dir.path().join(name));
    TestCluster::with_journal_at(&journal, 0, 0).unwrap().stop().unwrap();
    std::fs::write(&bound, "").unwrap();
    disk.is_read_only_now();
    said(&journal, "Read-only file system");
    said(&disk.dir.path().join("other"), "Read-only file system");
    // This file alone may be written.
    let file = tempfile::NamedTempFile::new().unwrap();
    assert!(mount(&["--bind", file.path().to_str().unwrap()], &bound));
    let refused = std::panic::catch_unwind(|| said(&bound, "unable to open database file"));
    assert!(Command::new("umount").arg(&bound).status().unwrap().success());
    refused.unwrap();
}
