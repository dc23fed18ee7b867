//! Folders that a process makes for itself, and that the next one removes where it ended without a chance to.
//!
//! Each says which process uses it. A lock on a file would not do: on some shared disks each machine has its own.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{ErrorKind, Read, Result};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::OFlags;

use crate::identity::{Identity, Life};

const USER: &str = "used-by";
/// Where its files are: who uses it is not among them.
const FILES: &str = "files";
/// What is being made is called so.
const UNFINISHED: &str = ".new-";
/// And what is to be removed.
const OVER: &str = ".over-";
/// What processes of other machines have left on a shared disk is kept for so long, and what was never finished.
const ELSEWHERE: Duration = Duration::from_secs(30 * 24 * 3600);

/// Such a folder.
#[derive(Debug)]
pub(crate) struct OwnFolder {
    path: PathBuf,
}

impl OwnFolder {
    /// Makes one in `parent` that nobody else has, and removes those of the same `prefix` that nobody uses.
    pub(crate) fn make(parent: &Path, prefix: &str) -> Result<OwnFolder> {
        sweep(parent, prefix, Duration::ZERO);
        let name = format!("{prefix}{:016x}", rand::random::<u64>());
        OwnFolder::named(parent, &name, |_| Ok(()))
    }

    /// That of this name, which is filled before anybody sees it, or as an earlier process of its user's has left it.
    /// Removes those of the same `prefix` that nobody has used for `kept`.
    pub(crate) fn again(
        parent: &Path,
        (prefix, name): (&str, &str),
        kept: Duration,
        fill: impl FnOnce(&Path) -> Result<()>,
    ) -> Result<OwnFolder> {
        let name = format!("{prefix}{name}");
        let found = OwnFolder { path: parent.join(&name) };
        if found.folder().is_dir() {
            use_it(&found.path)?;
        }
        sweep(parent, prefix, kept);
        match found.folder().is_dir() {
            true => Ok(found),
            false => OwnFolder::named(parent, &name, fill),
        }
    }

    fn named(parent: &Path, name: &str, fill: impl FnOnce(&Path) -> Result<()>) -> Result<OwnFolder> {
        let made = parent.join(format!("{UNFINISHED}{name}-{:08x}", rand::random::<u32>()));
        let path = parent.join(name);
        DirBuilder::new().mode(0o700).create(&made)?;
        let done = (|| {
            use_it(&made)?;
            std::fs::create_dir(made.join(FILES))?;
            fill(&made.join(FILES))?;
            std::fs::rename(&made, &path)
        })();
        if done.is_err() {
            let _ = std::fs::remove_dir_all(&made);
        }
        // Another process of the same user may have been first.
        let was_there = || path.join(FILES).is_dir();
        match done {
            Err(error) if error.kind() != ErrorKind::DirectoryNotEmpty || !was_there() => Err(error),
            _ => Ok(OwnFolder { path }),
        }
    }

    /// Where files can be put.
    pub(crate) fn folder(&self) -> PathBuf {
        self.path.join(FILES)
    }

    /// It is not used now, and may be again: what it is kept for begins.
    pub(crate) fn leave(&self) {
        // Without it, that began earlier.
        let _ = use_it(&self.path);
    }

    /// Nobody needs it any more. What cannot be removed now is by the next one.
    pub(crate) fn remove(self) {
        let name = self.path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let over = self.path.with_file_name(format!("{OVER}{name}"));
        let path = if std::fs::rename(&self.path, &over).is_ok() { over } else { self.path };
        let _ = std::fs::remove_dir_all(path);
    }
}

fn use_it(path: &Path) -> Result<()> {
    let own = Identity::of(std::process::id());
    std::fs::write(path.join(USER), serde_json::to_vec(&own)?)
}

/// Removes folders of this user that no process uses: at once, or when they have been left for so long.
fn sweep(parent: &Path, prefix: &str, kept: Duration) {
    let own = rustix::process::geteuid().as_raw();
    for entry in std::fs::read_dir(parent).into_iter().flatten().flatten() {
        let (name, path) = (entry.file_name(), entry.path());
        let name = name.to_string_lossy();
        let is_over = name.strip_prefix(OVER).is_some_and(|name| name.starts_with(prefix));
        let begun = name.strip_prefix(UNFINISHED).unwrap_or(&name);
        if !begun.starts_with(prefix) && !is_over {
            continue;
        }
        // Others may have made something of that name, to be opened or removed here.
        let is_ours = std::fs::symlink_metadata(&path).is_ok_and(|stat| stat.is_dir() && stat.uid() == own);
        if !is_ours {
            continue;
        }
        let unused = match user_of(&path) {
            _ if is_over => true,
            Some((Life::Runs, _)) => continue,
            Some((Life::Gone, since)) => since > kept,
            Some((Life::Elsewhere, since)) => since > ELSEWHERE.max(kept),
            None => age(&path).is_some_and(|age| age > ELSEWHERE),
        };
        if unused {
            let _ = std::fs::remove_dir_all(&path);
        }
    }
}

/// Whether who has used it last lives, and since when it has been so.
fn user_of(path: &Path) -> Option<(Life, Duration)> {
    let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits() as i32;
    let mut file: File = OpenOptions::new().read(true).custom_flags(flags).open(path.join(USER)).ok()?;
    let mut text = String::new();
    file.read_to_string(&mut text).ok()?;
    let identity: Option<Identity> = serde_json::from_str(&text).ok()?;
    // Whoever uses it for long may have written something since it began.
    let files = std::fs::read_dir(path.join(FILES)).into_iter().flatten().flatten().map(|entry| entry.path());
    let since = files.chain([path.join(FILES), path.join(USER)]).filter_map(|path| age(&path)).min();
    Some((identity?.life(), since?))
}

fn age(path: &Path) -> Option<Duration> {
    // A clock that was set back makes it young.
    Some(std::fs::symlink_metadata(path).ok()?.modified().ok()?.elapsed().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As a process leaves it that was killed.
    fn left(parent: &Path, name: &str) -> PathBuf {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let identity = Identity::of(child.id());
        child.kill().unwrap();
        child.wait().unwrap();
        let path = parent.join(name);
        std::fs::create_dir_all(path.join(FILES)).unwrap();
        std::fs::write(path.join(USER), serde_json::to_vec(&identity).unwrap()).unwrap();
        path
    }

    #[test]
    fn what_a_process_has_left_is_removed_and_what_one_has_is_not() {
        let parent = tempfile::tempdir().unwrap();
        let mine = OwnFolder::make(parent.path(), "copy-").unwrap();
        let (gone, begun) = (left(parent.path(), "copy-1"), left(parent.path(), ".new-copy-2"));
        let others = left(parent.path(), "other-1");
        let over = left(parent.path(), ".over-copy-3");
        let second = OwnFolder::make(parent.path(), "copy-").unwrap();
        assert!(!over.exists());
        assert!(mine.folder().exists() && second.folder().exists() && others.exists());
        assert!(!gone.exists() && !begun.exists());
        mine.remove();
        second.remove();
        assert_eq!(std::fs::read_dir(parent.path()).unwrap().count(), 1);
    }

    #[test]
    fn one_with_a_name_is_found_again_with_what_is_in_it() {
        let parent = tempfile::tempdir().unwrap();
        let day = Duration::from_secs(24 * 3600);
        let fill = |folder: &Path| std::fs::write(folder.join("code"), "1");
        let first = OwnFolder::again(parent.path(), ("run-", "a"), day, fill).unwrap();
        std::fs::write(first.folder().join("snapshot"), "2").unwrap();
        let other = left(parent.path(), "run-b");
        let again = OwnFolder::again(parent.path(), ("run-", "a"), day, fill).unwrap();
        assert!(again.folder().join("snapshot").exists() && other.exists());
        again.remove();
        assert!(!OwnFolder::again(parent.path(), ("run-", "a"), day, fill).unwrap().folder().join("snapshot").exists());
        let refused = OwnFolder::again(parent.path(), ("run-", "c"), day, |_| Err(std::io::Error::other("full")));
        assert!(refused.is_err() && !parent.path().join("run-c").exists());
    }

    #[test]
    fn what_others_put_there_is_neither_waited_for_nor_followed() {
        let parent = tempfile::tempdir().unwrap();
        let (trap, far) = (parent.path().join("copy-x"), tempfile::tempdir().unwrap());
        std::fs::create_dir(&trap).unwrap();
        let pipe = std::ffi::CString::new(trap.join(USER).to_str().unwrap()).unwrap();
        // SAFETY: a path that ends with a zero.
        assert_eq!(unsafe { libc::mkfifo(pipe.as_ptr(), 0o600) }, 0);
        std::os::unix::fs::symlink(far.path(), parent.path().join("copy-link")).unwrap();
        OwnFolder::make(parent.path(), "copy-").unwrap().remove();
        assert!(trap.exists() && far.path().exists());
    }
}
