//! Spilled objects on disk: one directory per daemon, one file per spilled object.
//!
//! The directory is called `wingbeat-spill-<pid>-<start time>-<n>` and is locked (`flock`) by its
//! daemon for as long as that lives, however it ends. The next daemon removes the directories whose
//! process is gone *and* whose lock is free: the second also holds for daemons in other pid
//! namespaces that share the disk.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use rustix::fs::{FlockOperation, Mode, OFlags, flock, open};

use crate::error::SpillError;
use crate::table::SpillFile;

const PREFIX: &str = "wingbeat-spill-";

/// Tells the directories of several stores in one process apart.
static NEXT_DIRECTORY: AtomicU64 = AtomicU64::new(0);

/// Where one daemon's spilled objects lie. Made when the first one is, removed when dropped.
#[derive(Debug)]
pub struct SpillDirectory {
    parent: PathBuf,
    /// The directory, once it was needed.
    made: Mutex<Option<Made>>,
}

#[derive(Debug)]
struct Made {
    path: PathBuf,
    /// Holds the lock that says that this daemon lives.
    _lock: OwnedFd,
}

impl SpillDirectory {
    /// A directory below `parent`, to be made when it is needed. Touches no disk.
    pub fn new(parent: impl Into<PathBuf>) -> Self {
        Self { parent: parent.into(), made: Mutex::new(None) }
    }

    /// Removes what daemons that are gone left below the parent. What cannot be examined or removed
    /// (another user's) stays.
    pub fn clear_leftovers(&self) {
        let Ok(entries) = fs::read_dir(&self.parent) else { return };
        for entry in entries.flatten() {
            let path = entry.path();
            if entry.file_name().to_str().and_then(daemon_of).is_some_and(is_gone) && lock(&path).is_ok() {
                match fs::remove_dir_all(&path) {
                    Ok(()) => tracing::info!(path = %path.display(), "removed what a dead daemon had spilled"),
                    Err(error) => {
                        tracing::debug!(path = %path.display(), %error, "left a dead daemon's spill directory")
                    }
                }
            }
        }
    }

    /// Writes an object's bytes. If that fails, there is no file.
    pub fn write(&self, file: SpillFile, bytes: &[u8]) -> Result<(), SpillError> {
        let path =
            self.make().map_err(|source| error("make a spill directory in", &self.parent, source))?.join(name(file));
        let written = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&path)
            .and_then(|mut file| file.write_all(bytes));
        written.map_err(|source| {
            let _ = fs::remove_file(&path);
            error("write the spill file", &path, source)
        })
    }

    /// Reads an object's bytes back; the file stays. `into` has the object's size.
    pub fn read(&self, file: SpillFile, into: &mut [u8]) -> Result<(), SpillError> {
        let path = self.path_of(file);
        File::open(&path)
            .and_then(|mut file| file.read_exact(into))
            .map_err(|source| error("read the spill file", &path, source))
    }

    /// Removes a file. A failure costs disk space until the daemon ends, and is only logged.
    pub fn remove(&self, file: SpillFile) {
        let path = self.path_of(file);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                tracing::warn!(path = %path.display(), %error, "cannot remove a spill file");
            }
            _ => {}
        }
    }

    /// The directory, if anything was spilled yet.
    pub fn path(&self) -> Option<PathBuf> {
        self.made.lock().as_ref().map(|made| made.path.clone())
    }

    fn path_of(&self, file: SpillFile) -> PathBuf {
        self.path().unwrap_or_else(|| self.parent.clone()).join(name(file))
    }

    fn make(&self) -> io::Result<PathBuf> {
        let mut made = self.made.lock();
        if let Some(made) = &*made {
            return Ok(made.path.clone());
        }
        fs::create_dir_all(&self.parent)?;
        let pid = std::process::id();
        let started = start_time(pid).ok_or(io::ErrorKind::NotFound)?;
        let n = NEXT_DIRECTORY.fetch_add(1, Ordering::Relaxed);
        let path = self.parent.join(format!("{PREFIX}{pid}-{started}-{n}"));
        DirBuilder::new().mode(0o700).create(&path)?;
        let lock = lock(&path)?;
        *made = Some(Made { path: path.clone(), _lock: lock });
        Ok(path)
    }
}

impl Drop for SpillDirectory {
    fn drop(&mut self) {
        if let Some(made) = self.made.get_mut()
            && let Err(error) = fs::remove_dir_all(&made.path)
        {
            tracing::warn!(path = %made.path.display(), %error, "cannot remove the spill directory");
        }
    }
}

fn name(file: SpillFile) -> String {
    format!("{}.{}", file.id, file.number)
}

fn error(doing: &'static str, path: &Path, source: io::Error) -> SpillError {
    SpillError { doing, path: path.to_owned(), source }
}

/// Opens and locks a directory, unless somebody else has it locked.
fn lock(path: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let directory = open(path, flags, Mode::empty())?;
    flock(&directory, FlockOperation::NonBlockingLockExclusive)?;
    Ok(directory)
}

/// Process id and start time from a spill directory's name.
fn daemon_of(name: &str) -> Option<(u32, u64)> {
    let mut parts = name.strip_prefix(PREFIX)?.split('-');
    let daemon = (parts.next()?.parse().ok()?, parts.next()?.parse().ok()?);
    let _n: u64 = parts.next()?.parse().ok()?;
    parts.next().is_none().then_some(daemon)
}

/// Whether no process has this id, or another one has it by now.
fn is_gone((pid, started): (u32, u64)) -> bool {
    start_time(pid) != Some(started)
}

/// When a process was started, in clock ticks since the machine was.
fn start_time(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The second field is the command's name in parentheses and may contain anything; the start
    // time is field 22.
    let (_, after_name) = stat.rsplit_once(')')?;
    after_name.split_ascii_whitespace().nth(22 - 3)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use wingbeat_core::{ObjectId, ProcessId, TaskId};

    use super::*;

    fn file(number: u64) -> SpillFile {
        SpillFile { id: ObjectId { task: TaskId { owner: ProcessId(7), seq: 1 }, index: 0 }, number }
    }

    #[test]
    fn what_was_written_is_read_back_until_it_is_removed() {
        let parent = tempfile::tempdir().unwrap();
        let spill = SpillDirectory::new(parent.path());
        spill.write(file(0), b"zero").unwrap();
        spill.write(file(1), b"one!").unwrap();
        spill.remove(file(1));
        let mut bytes = [0; 4];
        spill.read(file(0), &mut bytes).unwrap();
        assert_eq!(&bytes, b"zero");
        let error = spill.read(file(1), &mut bytes).unwrap_err();
        assert!(error.to_string().contains("object-000000000007.1.0.1"), "{error}");
    }

    #[test]
    fn the_directory_is_private_made_on_first_use_and_removed_at_the_end() {
        let parent = tempfile::tempdir().unwrap();
        let spill = SpillDirectory::new(parent.path().join("deeper"));
        assert!(!parent.path().join("deeper").exists());
        spill.write(file(0), b"x").unwrap();
        let path = spill.path().unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o700);
        drop(spill);
        assert!(!path.exists());
    }

    #[test]
    fn only_the_directories_of_dead_daemons_are_cleared() {
        let parent = tempfile::tempdir().unwrap();
        let mut child = std::process::Command::new("true").spawn().unwrap();
        child.wait().unwrap();
        let own = start_time(std::process::id()).unwrap();
        let directory = |name: String| {
            let path = parent.path().join(name);
            fs::create_dir(&path).unwrap();
            fs::write(path.join("object"), b"x").unwrap();
            path
        };
        let dead = directory(format!("{PREFIX}{}-12345-0", child.id()));
        let reused_pid = directory(format!("{PREFIX}{}-{}-0", std::process::id(), own + 1));
        let alive = directory(format!("{PREFIX}{}-{own}-99999", std::process::id()));
        let elsewhere = directory(format!("{PREFIX}{}-12345-1", child.id()));
        let unrelated = directory(format!("{PREFIX}notes"));
        let _held_by_another_namespace = lock(&elsewhere).unwrap();

        SpillDirectory::new(parent.path()).clear_leftovers();
        assert!(!dead.exists() && !reused_pid.exists());
        assert!(alive.exists() && elsewhere.exists() && unrelated.exists());
    }

    #[test]
    fn a_failed_write_leaves_no_file() {
        let spill = SpillDirectory::new("/proc/wingbeat-cannot-be-made");
        assert!(spill.write(file(0), b"x").is_err());
        assert_eq!(spill.path(), None);
    }
}
