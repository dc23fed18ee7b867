//! What programs see that must not be, and could not report by their results: a file each, which ends the run.

use std::fs::File;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};

/// What is wrong. All machines see it.
const WRONG: &str = "/tmp/chaos/wrong";
/// What has happened, and who lives.
const SEEN: &str = "/tmp/chaos/seen";

/// Makes the folders for them.
///
/// # Errors
/// They cannot be made.
pub fn prepare() -> std::io::Result<()> {
    std::fs::create_dir(WRONG)?;
    std::fs::create_dir(SEEN)
}

/// What was said to be wrong.
pub fn look() -> Vec<String> {
    let signs = std::fs::read_dir(WRONG).into_iter().flatten().flatten();
    signs.map(|sign| std::fs::read_to_string(sign.path()).unwrap_or_default()).collect()
}

/// Says that something must not be. The last process that says so is enough.
fn wrong(what: &str) {
    let _ = std::fs::write(Path::new(WRONG).join(std::process::id().to_string()), what);
}

fn seen(what: &str) -> PathBuf {
    Path::new(SEEN).join(what)
}

/// Something happens that may happen once.
pub(crate) fn happens_once(what: &str) {
    if File::create_new(seen(what)).is_err() {
        wrong(&format!("{what} has happened twice"));
    }
}

/// Something lives that may live once at a time, for as long as the file is held.
pub(crate) fn is_alone(name: &str) -> Option<File> {
    let file = File::create(seen(name)).ok()?;
    if flock(file.as_fd(), FlockOperation::NonBlockingLockExclusive).is_err() {
        wrong(&format!("{name} lives twice at once"));
    }
    Some(file)
}
