//! Paths of the files that a head keeps.

use std::path::{Path, PathBuf};

/// Links that lead to one file at most, as in Linux.
const LINKS: usize = 40;

/// Another file that belongs to one: its name with an ending.
pub(crate) fn beside(file: &Path, ending: &str) -> PathBuf {
    let mut path = file.as_os_str().to_owned();
    path.push(ending);
    path.into()
}

/// Where a file lies, or will lie: not where a link to it does. SQLite keeps its log there, and so everything else is kept there.
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
