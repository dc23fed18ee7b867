//! Folders of a process, removed by the next one if it ends without a chance to clean up.
//!
//! Each holds a file that is locked as long as its process lives. Names are not enough: ids of processes are reused, and
//! containers that share a disk have the same ones.

use std::fs::File;
use std::io::Result;
use std::path::{Path, PathBuf};

const LOCK: &str = ".lock";
/// What is being made is called so, and not looked at.
const UNFINISHED: &str = ".new-";

/// A folder that is this process's own. It is removed when this is dropped.
#[derive(Debug)]
pub(crate) struct Locked {
    path: PathBuf,
    /// Locked.
    _lock: File,
}

impl Locked {
    /// Makes one in `parent`, and removes those of the same `prefix` whose processes have ended.
    pub(crate) fn make(parent: &Path, prefix: &str) -> Result<Locked> {
        sweep(parent, prefix);
        let made = tempfile::Builder::new().prefix(&format!("{UNFINISHED}{prefix}")).tempdir_in(parent)?;
        let lock = File::create_new(made.path().join(LOCK))?;
        lock.lock()?;
        std::fs::create_dir(within(made.path()))?;
        let name = made.path().file_name().and_then(|name| name.to_str()?.strip_prefix(UNFINISHED));
        let path = parent.join(name.unwrap_or(prefix));
        std::fs::rename(made.path(), &path)?;
        let _ = made.keep();
        Ok(Locked { path, _lock: lock })
    }

    /// Where files can be put.
    pub(crate) fn folder(&self) -> PathBuf {
        within(&self.path)
    }
}

impl Drop for Locked {
    fn drop(&mut self) {
        // What cannot be removed now is, by the next one.
        let _ = std::fs::remove_dir_all(&self.path);
    }
}

/// The lock is not among the files.
fn within(path: &Path) -> PathBuf {
    path.join("files")
}

fn sweep(parent: &Path, prefix: &str) {
    for entry in std::fs::read_dir(parent).into_iter().flatten().flatten() {
        if entry.file_name().to_string_lossy().starts_with(prefix)
            && let Ok(lock) = File::open(entry.path().join(LOCK))
            && lock.try_lock().is_ok()
        {
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_process_has_left_is_removed_and_what_one_has_is_not() {
        let parent = tempfile::tempdir().unwrap();
        let mine = Locked::make(parent.path(), "copy-").unwrap();
        // As a process leaves it that is killed.
        let left = parent.path().join("copy-left");
        std::fs::create_dir(&left).unwrap();
        File::create(left.join(LOCK)).unwrap();
        let others = parent.path().join("other-left");
        std::fs::create_dir(&others).unwrap();
        File::create(others.join(LOCK)).unwrap();
        let second = Locked::make(parent.path(), "copy-").unwrap();
        assert!(mine.folder().exists() && second.folder().exists() && others.exists());
        assert!(!left.exists());
        drop((mine, second));
        assert_eq!(std::fs::read_dir(parent.path()).unwrap().count(), 1);
    }
}
