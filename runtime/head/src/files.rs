//! Paths of the files that a head keeps.

use std::fs::File;
use std::path::Path;
#[cfg(any(feature = "journal", test))]
use std::path::PathBuf;

/// Links that lead to one file at most, as in Linux.
#[cfg(any(feature = "journal", test))]
const LINKS: usize = 40;

/// Another file that belongs to one: its name with an ending.
#[cfg(any(feature = "journal", test))]
pub(crate) fn beside(file: &Path, ending: &str) -> PathBuf {
    let mut path = file.as_os_str().to_owned();
    path.push(ending);
    path.into()
}

/// Where a file lies, or will lie: not where a link to it does. SQLite keeps its log there, and so everything else is kept there.
#[cfg(any(feature = "journal", test))]
pub(crate) fn real_path(file: &Path) -> PathBuf {
    if let Ok(real) = std::fs::canonicalize(file) {
        return real;
    }
    // It is not there yet.
    let mut path = file.to_owned();
    for _ in 0..LINKS {
        let Ok(target) = std::fs::read_link(&path) else { break };
        path = path.parent().unwrap_or(Path::new("")).join(target);
    }
    path
}

/// Waits until the folder's entries lie on the disk. Whoever may not read the folder cannot, and some file systems cannot at all: SQLite goes
/// on then, too.
pub(crate) fn sync_folder(folder: &Path) {
    let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    if let Ok(folder) = File::open(folder) {
        let _ = folder.sync_all();
    }
}
