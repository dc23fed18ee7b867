//! Who may use a cluster, and what of a driver leaves its machine or reaches a disk.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::future::IntoFuture;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use common::Local;
use wingbeat::Error;
use wingbeat_tests::{TestCluster, is_root};

/// Says that this program is to be the driver, when the test starts itself again.
const DRIVER: &str = "WINGBEAT_TEST_DRIVER";
/// A user who has nothing, on every system.
const NOBODY: u32 = 65_534;
/// A token that somebody else made, long enough to be one.
const PLANTED: &str = "attacker knows this token";

#[wingbeat::remote]
fn variable(name: String) -> Option<String> {
    std::env::var(name).ok()
}

struct Holder;

#[wingbeat::actor]
impl Holder {
    fn new() -> Self {
        Holder
    }

    fn ping(&self) -> bool {
        true
    }
}

/// A command that ends by itself, also where it would have served for ever.
fn limited(program: &Path) -> Command {
    let mut command = Command::new("timeout");
    command.arg("30").arg(program).stdin(Stdio::null());
    for name in ["WINGBEAT_TOKEN", "WINGBEAT_TOKEN_FILE", "WINGBEAT_ADDRESS"] {
        command.env_remove(name);
    }
    command
}

fn refusal(output: &Output) -> String {
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{error}");
    error
}

#[test]
fn a_token_that_could_be_guessed_is_refused_everywhere() {
    let cluster = TestCluster::start(0, 1).unwrap();
    let binary = wingbeat_tests::binary().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("token");
    for token in ["", "  \t", "secret", "fifteen letters"] {
        std::fs::write(&file, token).unwrap();
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o600)).unwrap();
        for arguments in [
            &["head", "--host", "0.0.0.0", "--port", "0"][..],
            &["head", "--port", "0"],
            &["worker", "--head", cluster.address()],
            &["status", "--address", cluster.address()],
            &["stop", "--address", cluster.address()],
        ] {
            let by_variable = limited(&binary).args(arguments).env("WINGBEAT_TOKEN", token).output().unwrap();
            let by_file = limited(&binary).args(arguments).arg("--token-file").arg(&file).output().unwrap();
            for output in [by_variable, by_file] {
                let error = refusal(&output);
                assert!(error.contains("/dev/urandom"), "{arguments:?} with {token:?}: {error}");
            }
        }
        for init in [wingbeat::init_at(cluster.address()), wingbeat::init()] {
            let joined = wingbeat::block_on(init.token(token).global(false).into_future());
            let error = joined.map(drop).unwrap_err();
            assert!(matches!(error, Error::InvalidArgument { .. }) && error.to_string().contains("/dev/urandom"));
        }
    }
}

/// A folder that everybody can look into, with the command in it, and a token that somebody planted for `user`.
fn planted(user: u32, by: u32) -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o777)).unwrap();
    let command = dir.path().join("wingbeat");
    // By a process of its own: what another test starts meanwhile would have it open for writing, and it could not be started.
    let copied = std::process::Command::new("cp").arg(wingbeat_tests::binary().unwrap()).arg(&command).status();
    assert!(copied.unwrap().success());
    std::fs::set_permissions(&command, std::fs::Permissions::from_mode(0o755)).unwrap();
    let folder = dir.path().join(format!("wingbeat-{user}"));
    std::fs::create_dir(&folder).unwrap();
    let token = folder.join("token");
    std::fs::write(&token, PLANTED).unwrap();
    for (path, mode) in [(&token, 0o600), (&folder, 0o700)] {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
        std::os::unix::fs::chown(path, Some(by), Some(by)).unwrap();
    }
    (dir, command)
}

#[test]
fn a_token_that_another_user_planted_is_not_taken() {
    if !is_root().unwrap() {
        return;
    }
    for (user, by) in [(0, NOBODY), (NOBODY, 0)] {
        let (dir, command) = planted(user, by);
        let mut head = limited(Path::new("setpriv"));
        head.args(["--reuid", &user.to_string(), "--clear-groups"]).arg(&command).args(["head", "--port", "0"]);
        head.env_remove("HOME").env_remove("XDG_STATE_HOME").env("TMPDIR", dir.path()).current_dir("/");
        let error = refusal(&head.output().unwrap());
        assert!(error.contains(&format!("belongs to user {by}")) || error.contains("ermission denied"), "{error}");
        assert!(error.contains("token"), "{error}");
    }
}

#[test]
fn a_user_without_a_home_has_a_token_that_nobody_else_can_read() {
    let dir = tempfile::tempdir().unwrap();
    let mut doomed = limited(&wingbeat_tests::binary().unwrap());
    // It makes the token before it finds that nobody is there.
    doomed.args(["status", "--address", "127.0.0.1:1"]).env_remove("HOME").env_remove("XDG_STATE_HOME");
    refusal(&doomed.env("TMPDIR", dir.path()).output().unwrap());
    let folder = std::fs::read_dir(dir.path()).unwrap().next().unwrap().unwrap().path();
    let mode = |path: &Path| std::fs::metadata(path).unwrap().mode() & 0o777;
    assert_eq!((mode(&folder), mode(&folder.join("token"))), (0o700, 0o600));
}

/// Whether any file in a folder contains a text, and that nobody else can read one of them.
fn is_in_files(folder: &Path, name: &str, text: &str) -> bool {
    let mut found = false;
    for entry in std::fs::read_dir(folder).unwrap() {
        let entry = entry.unwrap();
        if !entry.file_name().to_string_lossy().starts_with(name) {
            continue;
        }
        let meta = entry.metadata().unwrap();
        let mode = meta.mode() & 0o777;
        assert_eq!(mode, if meta.is_dir() { 0o700 } else { 0o600 }, "{:?}", entry.path());
        if meta.is_file() {
            let content = std::fs::read(entry.path()).unwrap();
            found |= content.windows(text.len()).any(|window| window == text.as_bytes());
        }
    }
    found
}

#[test]
fn secrets_of_the_environment_reach_workers_of_the_machine_and_no_disk() {
    if std::env::var_os(DRIVER).is_some() {
        let _driver = Local::from(wingbeat::init().env("NAMED", "a value that was named").namespace("secrets"));
        let seen = |name: &str| variable::remote(name.to_owned()).get_blocking().unwrap();
        assert_eq!(seen("AWS_SECRET_ACCESS_KEY").as_deref(), Some("S3cr3tKeyValue"));
        assert_eq!(seen("NAMED").as_deref(), Some("a value that was named"));
        assert_eq!(seen("WINGBEAT_TOKEN"), None);
        let holder = Holder::options().name("holder").detached().remote();
        assert!(holder.ping().get_blocking().unwrap());
        return;
    }
    let cluster = TestCluster::with_journal(1, 2).unwrap();
    let mut driver = Command::new(std::env::current_exe().unwrap());
    let test = "secrets_of_the_environment_reach_workers_of_the_machine_and_no_disk";
    driver.args(["--exact", test, "--nocapture"]).env(DRIVER, "1").env("AWS_SECRET_ACCESS_KEY", "S3cr3tKeyValue");
    driver.env("WINGBEAT_ADDRESS", cluster.address()).env("WINGBEAT_TOKEN", cluster.token().unwrap());
    let output = driver.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let journal = cluster.journal();
    let folder = journal.parent().unwrap();
    assert!(is_in_files(folder, "journal", "a value that was named"), "the journal holds the job");
    assert!(!is_in_files(folder, "journal", "S3cr3tKeyValue"));
    assert!(!is_in_files(folder, "journal", &cluster.token().unwrap()));
}
