//! Where a journal's files are, and whether those that are open are still there.

use std::fs::{File, OpenOptions};
use std::io::ErrorKind;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use wingbeat_core::error::Error;

use super::{NEEDED, failed};
use crate::files::{beside, real_path, sync_folder};

/// The files, and which they were when they were opened: device and inode.
pub(super) struct Place([(PathBuf, (u64, u64)); 2]);

impl Place {
    /// Of a journal that is open and has been written: before that, its log may not be there.
    pub(super) fn of(journal: &Path) -> std::io::Result<Place> {
        let [file, log] = [journal.to_owned(), log_of(journal)].map(|path| which(&path).map(|which| (path, which)));
        Ok(Place([file?, log?]))
    }

    /// What was removed can be written as long as it is open, and nobody finds it afterwards.
    pub(super) fn is_kept(&self) -> Result<(), String> {
        self.0.iter().try_for_each(|(path, opened)| match which(path) {
            Ok(found) if found == *opened => Ok(()),
            Err(error) if error.kind() != ErrorKind::NotFound => Err(format!("{}: {error}", path.display())),
            _ => Err(format!(
                "{} was removed or replaced while the head ran, and a head that is started again would know nothing of what is \
                 written now. Stop the cluster, or move the same file back: a copy is another",
                path.display()
            )),
        })
    }
}

/// So many copies of what has led are kept. After that, only the last of them is replaced.
const KEPT: usize = 16;

/// Copies a journal that nobody has open to `FILE.led`, or to the first of `FILE.led-2`, … that is free: what was kept earlier stays.
///
/// # Errors
/// It cannot be read, or the copy not written.
pub(crate) fn keep_aside(journal: &Path) -> Result<PathBuf, Error> {
    let real = real_path(journal);
    let name = |number: usize| beside(&real, &if number == 1 { ".led".to_owned() } else { format!(".led-{number}") });
    let aside = (1..KEPT).map(name).find(|path| is_free(path)).unwrap_or_else(|| name(KEPT));
    // What is only half written when the disk is full, or the machine loses its power, has another name.
    let partial = beside(&real, ".led-partial");
    let copied = copied(&real, &partial).and_then(|()| std::fs::rename(&partial, &aside));
    if let Err(error) = copied {
        let _ = std::fs::remove_file(&partial);
        return Err(failed(journal, format!("it cannot be copied to {}: {error}", aside.display())));
    }
    sync_folder(aside.parent().unwrap_or(Path::new("")));
    Ok(aside)
}

/// Whether a journal of that name would have nothing beside it: SQLite would take the log of another one for its own.
fn is_free(path: &Path) -> bool {
    ["", "-wal", "-shm", "-count"].iter().all(|end| std::fs::symlink_metadata(beside(path, end)).is_err())
}

/// Copies a file onto the disk, in the place of an unfinished copy.
fn copied(from: &Path, to: &Path) -> std::io::Result<()> {
    match std::fs::remove_file(to) {
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut copy = OpenOptions::new().write(true).create_new(true).mode(0o600).open(to)?;
    std::io::copy(&mut File::open(from)?, &mut copy)?;
    copy.sync_all()
}

/// SQLite's write-ahead log. Most of a small journal is in it while a head runs.
pub(super) fn log_of(journal: &Path) -> PathBuf {
    beside(&real_path(journal), "-wal")
}

/// Waits until the count lies on the disk and in its folder: without it, what a machine without power leaves would look damaged.
pub(super) fn settle(journal: &Path, count: &File) -> std::io::Result<()> {
    count.sync_all()?;
    sync_folder(journal.parent().unwrap_or(Path::new("")));
    Ok(())
}

fn which(path: &Path) -> std::io::Result<(u64, u64)> {
    let meta = std::fs::metadata(path)?;
    Ok((meta.dev(), meta.ino()))
}

/// Opens a file, or makes it, that is nobody else's and is read by nobody else: it holds arguments of actors and environments
/// of jobs. SQLite gives the mode to the files that it makes beside it.
pub(super) fn open_private(path: &Path) -> Result<File, Error> {
    let failed = |why: String| failed(path, why);
    let mut options = File::options();
    let open = options.read(true).write(true).create(true).truncate(false).mode(0o600);
    let file = open.open(path).map_err(|error| failed(format!("{error}: {NEEDED}")))?;
    let meta = file.metadata().map_err(|error| failed(error.to_string()))?;
    if !meta.is_file() {
        return Err(failed("it is no file".into()));
    }
    let ours = rustix::process::geteuid().as_raw();
    if meta.uid() != ours {
        // What it says would be run.
        return Err(failed(format!("it belongs to user {}, and this is user {ours}", meta.uid())));
    }
    if meta.mode() & 0o077 != 0 {
        let private = std::fs::Permissions::from_mode(0o600);
        file.set_permissions(private).map_err(|error| failed(format!("others can read it: {error}")))?;
    }
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_journal_may_lie_in_a_folder_that_cannot_be_synced() {
        let count = tempfile::tempfile().unwrap();
        assert!(File::open("/proc/self").unwrap().sync_all().is_err());
        settle(Path::new("/proc/self/journal"), &count).unwrap();
    }

    #[test]
    fn what_is_kept_stays_and_half_a_copy_is_none() {
        let folder = tempfile::tempdir().unwrap();
        let (journal, kept) = (folder.path().join("led"), |end: &str| folder.path().join(format!("led.led{end}")));
        std::fs::write(&journal, "first").unwrap();
        // Somebody's link is no copy, wherever it leads, and a log that a copy has left is not another one's.
        std::os::unix::fs::symlink("nowhere", kept("")).unwrap();
        std::fs::write(kept("-2-wal"), "log").unwrap();
        std::fs::write(kept("-partial"), "fir").unwrap();
        assert_eq!(keep_aside(&journal).unwrap(), kept("-3"));
        assert!(kept("").is_symlink() && !kept("-2").exists() && !kept("-partial").exists());
        for number in 4..=KEPT + 2 {
            std::fs::write(&journal, number.to_string()).unwrap();
            keep_aside(&journal).unwrap();
        }
        let last = std::fs::read(kept(&format!("-{KEPT}"))).unwrap();
        assert_eq!(last, (KEPT + 2).to_string().as_bytes(), "the last alone is replaced");
        assert_eq!(std::fs::read(kept("-3")).unwrap(), b"first");
        std::fs::remove_file(&journal).unwrap();
        std::fs::create_dir(&journal).unwrap();
        assert!(keep_aside(&journal).is_err());
        assert!(!kept("-partial").exists());
    }
}
