//! What tests share: a private cluster, entered by the test's thread, and a sign that something has started.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
#![allow(dead_code, reason = "each test binary uses its part")]

use std::future::IntoFuture;
use std::path::Path;
use std::time::Duration;

use wingbeat::Session;

/// Ends the cluster when dropped.
pub(crate) struct Local {
    pub(crate) session: Session,
    _entered: wingbeat::SessionGuard,
}

impl Local {
    /// A private cluster with so many CPUs.
    pub(crate) fn start(cpus: u32) -> Local {
        Self::from(wingbeat::init().num_cpus(cpus))
    }

    pub(crate) fn from(init: wingbeat::Init) -> Local {
        let session = wingbeat::block_on(init.global(false).log_to_driver(false).into_future()).unwrap();
        let _entered = session.enter();
        Local { session, _entered }
    }
}

impl Drop for Local {
    fn drop(&mut self) {
        wingbeat::block_on(self.session.shutdown());
    }
}

/// Runs this test again in a process of its own, with these variables: limits are read once. False in that process, where the test goes
/// on.
pub(crate) fn runs_again_with(test: &str, variables: &[(&str, &str)]) -> bool {
    const AGAIN: &str = "WINGBEAT_TEST_AGAIN";
    if std::env::var_os(AGAIN).is_some() {
        return false;
    }
    let mut again = std::process::Command::new(std::env::current_exe().unwrap());
    let again = again.args(["--exact", test]).env(AGAIN, "1").envs(variables.iter().copied()).output().unwrap();
    let said = [again.stdout, again.stderr].concat();
    assert!(again.status.success(), "{}", String::from_utf8_lossy(&said));
    true
}

/// Waits until a file is there. What makes it is on its way: only what hangs takes so long.
pub(crate) fn wait_for(file: &Path) {
    let made = wingbeat_tests::poll(Duration::from_secs(120), || file.exists().then_some(()));
    assert!(made.is_some(), "{} was never made", file.display());
}

/// A file that a task makes when it starts.
pub(crate) struct Started {
    dir: tempfile::TempDir,
}

impl Started {
    pub(crate) fn new() -> Started {
        Started { dir: tempfile::tempdir().unwrap() }
    }

    pub(crate) fn path(&self) -> std::path::PathBuf {
        self.dir.path().join("started")
    }

    /// Waits until the task has made it.
    pub(crate) fn wait(&self) {
        wait_for(&self.path());
    }
}
