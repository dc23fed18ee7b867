//! What a program of the matrix works with, and what it waits for.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use wingbeat::{Error, Session, block_on};
use wingbeat_tests::TestCluster;

use crate::common::Local;

/// Only what hangs takes so long. It is longer than the limit of a cell (90 s), which is the one that says so.
pub(crate) const LIMIT: Duration = Duration::from_secs(100);

/// More than what messages carry.
pub(crate) const LARGE: usize = 400 << 10;

/// What a scenario works with.
pub(crate) struct World {
    pub(crate) cluster: TestCluster,
    pub(crate) driver: Option<Local>,
    /// The fault ends a worker process: its work may fail with an error that says so, or be done again.
    pub(crate) ends_process: bool,
    pub(crate) dir: tempfile::TempDir,
}

/// The variables of every cluster: what usually happens after a while happens soon.
pub(crate) const ENV: [(&str, &str); 3] =
    [("WINGBEAT_OWNERS_MS", "200"), ("WINGBEAT_IDLE_MS", "300"), ("WINGBEAT_HOUSEKEEPING_MS", "50")];

impl World {
    /// A cluster whose head keeps a journal, with a node for the driver and one more.
    pub(crate) fn new(ends_process: bool) -> World {
        let mut cluster = TestCluster::with_journal_and_env(0, 0, &ENV).unwrap();
        cluster.add_node(&["--num-cpus", "1", "--resource", "home=100"]).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let mut world = World { cluster, driver: None, ends_process, dir };
        world.driver = Some(world.join());
        world.cluster.add_node(&["--num-cpus", "1", "--resource", "far=100"]).unwrap();
        world
    }

    pub(crate) fn join(&self) -> Local {
        let token = self.cluster.token().unwrap();
        Local::from(wingbeat::init_at(self.cluster.address()).token(&token).namespace("matrix"))
    }

    pub(crate) fn session(&self) -> Session {
        self.driver.as_ref().unwrap().session.clone()
    }

    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Whether a message that comes only now and then has come, if the cell is about that.
    pub(crate) fn has_come(&self, kind: &str) -> bool {
        let is_asked =
            std::env::var("WINGBEAT_FAULT").is_ok_and(|asked| asked.split([' ', ';', '@']).any(|word| word == kind));
        let folder = std::env::var_os("WINGBEAT_FAULT_DIR").map(PathBuf::from);
        !is_asked || folder.is_none_or(|folder| folder.join(kind).exists())
    }

    /// The right value; or, where a worker process ends for the fault, an error that says what has ended.
    pub(crate) fn right<T: PartialEq + std::fmt::Debug>(&self, got: wingbeat::Result<T>, expected: T) -> bool {
        match got {
            Ok(got) => assert_eq!(got, expected),
            Err(error) if self.ends_process && tells_of_an_end(&error) => return false,
            Err(error) => panic!("{error:?}"),
        }
        true
    }

    /// Everything that was leased is free again: nothing was granted twice or is held for nobody.
    pub(crate) fn is_clean(&self) {
        let Some(driver) = &self.driver else { return };
        let begun = Instant::now();
        loop {
            let state = block_on(driver.session.runtime().cluster_state()).unwrap();
            if state.nodes.iter().all(|node| node.leases == 0 && node.available == node.info.resources) {
                return;
            }
            assert!(begun.elapsed() < LIMIT, "not everything is free again: {:?}", state.nodes);
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

pub(crate) fn tells_of_an_end(error: &Error) -> bool {
    match error {
        Error::WorkerCrashed { .. }
        | Error::ActorUnavailable { .. }
        | Error::ActorDied { .. }
        | Error::OwnerDied { .. }
        | Error::ObjectLost { .. }
        | Error::ContactLost { .. } => true,
        Error::Panicked { message, .. } => {
            ["WorkerCrashed", "OwnerDied", "ActorDied"].iter().any(|end| message.contains(end))
        }
        _ => false,
    }
}

pub(crate) fn wait_for(what: &str, mut is_so: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < LIMIT, "{what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

pub(crate) fn exists(path: &Path) {
    wait_for(&format!("{} was never made", path.display()), || path.exists());
}

pub(crate) fn wait_for_text(file: &Path) -> String {
    loop {
        let text = std::fs::read_to_string(file).unwrap();
        if !text.is_empty() {
            return text;
        }
    }
}

pub(crate) fn is_stopped(pid: i32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(')').next().is_some_and(|rest| rest.trim_start().starts_with('T'))
}

/// Runs a command of the cluster's, again if it is answered with an error: whoever types it would.
pub(crate) fn command(world: &World, args: &[&str]) -> String {
    let mut said = String::new();
    for _ in 0..3 {
        let output = world.cluster.command().unwrap().args(args).output().unwrap();
        said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
        if output.status.success() {
            return said;
        }
    }
    panic!("{args:?}: {said}");
}

/// Whether each of the lines is there once.
pub(crate) fn once_each(world: &World, file: &Path, count: u64, done: u64) {
    let text = std::fs::read_to_string(file).unwrap_or_default();
    let mut lines: Vec<u64> = text.lines().map(|line| line.parse().unwrap()).collect();
    let all = lines.len();
    lines.sort_unstable();
    lines.dedup();
    assert_eq!(all, lines.len(), "something ran twice");
    assert!(all as u64 >= done && (world.ends_process || all as u64 == count), "{all} of {count} ran");
}
