//! A run's working directory, carried to nodes that may lack it.
//!
//! It is packed once, lies in the object store while it is fetched, and is unpacked on each node into the user's cache, in
//! a folder that is named by its content: the next run with the same files finds it there.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};
use serde_bytes::ByteBuf;

use crate::cache;

/// Folders that no script needs from elsewhere.
const SKIPPED: [&str; 8] =
    [".git", "__pycache__", ".venv", "venv", "node_modules", "target", ".mypy_cache", ".pytest_cache"];
const PREFIX: &str = "work-";
/// For how long a shipment is kept that no run uses.
const UNUSED: Duration = Duration::from_secs(30 * 24 * 3600);
/// More than this is data, and belongs into a storage that all nodes reach.
const LIMIT: u64 = 256 << 20;

/// A folder's files.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Shipment {
    /// Changes with what is in it.
    pub hash: String,
    files: Vec<File>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct File {
    path: String,
    mode: u32,
    content: ByteBuf,
}

impl Shipment {
    /// Packs a folder, but for what is made again (`.git`, `__pycache__`, environments, builds).
    pub(crate) fn pack(folder: &Path) -> Result<Shipment, String> {
        let mut files = Vec::new();
        let mut total = 0;
        let mut folders = vec![folder.to_owned()];
        let failed = |path: &Path, error: std::io::Error| format!("{}: {error}", path.display());
        while let Some(within) = folders.pop() {
            for entry in std::fs::read_dir(&within).map_err(|error| failed(&within, error))? {
                let entry = entry.map_err(|error| failed(&within, error))?;
                let (path, name) = (entry.path(), entry.file_name());
                let kind = entry.file_type().map_err(|error| failed(&path, error))?;
                if kind.is_dir() && !SKIPPED.iter().any(|skipped| name == *skipped) {
                    folders.push(path);
                    continue;
                }
                // What a link leads to, but no folder: it may lead anywhere. Sockets and pipes are none.
                let Ok(metadata) = std::fs::metadata(&path) else { continue };
                if !metadata.is_file() {
                    continue;
                }
                total += metadata.len();
                if total > LIMIT {
                    return Err(format!(
                        "{} holds more than {} MiB; ship code, and put data where all nodes reach it",
                        folder.display(),
                        LIMIT >> 20
                    ));
                }
                let content = std::fs::read(&path).map_err(|error| failed(&path, error))?;
                let Some(name) = path.strip_prefix(folder).ok().and_then(Path::to_str) else { continue };
                let mode = metadata.permissions().mode() & 0o777;
                files.push(File { path: name.to_owned(), mode, content: ByteBuf::from(content) });
            }
        }
        files.sort_by(|a, b| a.path.cmp(&b.path));
        let mut hasher = blake3::Hasher::new();
        for file in &files {
            hasher.update(&(file.path.len() as u64).to_le_bytes()).update(file.path.as_bytes());
            hasher.update(&file.mode.to_le_bytes());
            hasher.update(&(file.content.len() as u64).to_le_bytes()).update(&file.content);
        }
        Ok(Shipment { hash: hasher.finalize().to_hex()[..32].to_owned(), files })
    }

    /// Writes the files into the cache, unless they are there: all of them, or nothing.
    pub(crate) fn unpack(&self) -> std::io::Result<PathBuf> {
        let folder = place(&self.hash)?;
        if folder.exists() {
            return Ok(folder);
        }
        remove_unused();
        let made = tempfile::Builder::new().prefix("part-").tempdir_in(cache::folder()?)?;
        for file in &self.files {
            let path = made.path().join(&file.path);
            if let Some(parent) = path.parent() {
                std::fs::create_dir_all(parent)?;
            }
            std::fs::write(&path, &file.content)?;
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(file.mode))?;
        }
        // If another was first, that is as good.
        if std::fs::rename(made.path(), &folder).is_err() && !folder.exists() {
            return Err(std::io::Error::other(format!("cannot write {}", folder.display())));
        }
        Ok(folder)
    }
}

/// Removes what no run has used for long. What cannot be removed now is, some other time.
fn remove_unused() {
    let Ok(entries) = cache::folder().and_then(std::fs::read_dir) else { return };
    for entry in entries.flatten() {
        let is_shipment = entry.file_name().to_string_lossy().starts_with(PREFIX);
        let used = entry.metadata().and_then(|metadata| metadata.modified()).ok();
        if is_shipment && used.and_then(|used| used.elapsed().ok()).is_some_and(|unused| unused > UNUSED) {
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
}

/// Whether a shipment lies on this node; a run is about to use it then.
pub(crate) fn is_there(hash: &str) -> bool {
    let used = place(hash).and_then(std::fs::File::open).and_then(|folder| folder.set_modified(SystemTime::now()));
    used.is_ok()
}

/// Where a shipment lies on this node.
pub(crate) fn place(hash: &str) -> std::io::Result<PathBuf> {
    Ok(cache::folder()?.join(format!("{PREFIX}{hash}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_is_packed_without_what_is_made_again() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| {
            std::fs::create_dir_all(dir.path().join(name).parent().unwrap()).unwrap();
            std::fs::write(dir.path().join(name), text).unwrap();
        };
        write("train.py", "print()");
        write("package/part.py", "x = 1");
        write(".git/HEAD", "ref");
        write("package/__pycache__/part.pyc", "compiled");
        let first = Shipment::pack(dir.path()).unwrap();
        let names: Vec<&str> = first.files.iter().map(|file| file.path.as_str()).collect();
        assert_eq!(names, ["package/part.py", "train.py"]);
        assert_eq!(Shipment::pack(dir.path()).unwrap().hash, first.hash);
        write("train.py", "print(1)");
        assert_ne!(Shipment::pack(dir.path()).unwrap().hash, first.hash);
    }

    #[test]
    fn what_was_unpacked_is_there_and_the_same() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("run.sh"), format!("echo {}", std::process::id())).unwrap();
        std::fs::set_permissions(dir.path().join("run.sh"), std::fs::Permissions::from_mode(0o755)).unwrap();
        let shipment = Shipment::pack(dir.path()).unwrap();
        assert!(!is_there(&shipment.hash));
        let folder = shipment.unpack().unwrap();
        assert!(is_there(&shipment.hash));
        assert_eq!(Shipment::pack(&folder).unwrap().hash, shipment.hash);
        assert_eq!(shipment.unpack().unwrap(), folder, "it is unpacked once");
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn what_is_missing_is_named() {
        let error = Shipment::pack(Path::new("/no/such/folder")).unwrap_err();
        assert!(error.starts_with("/no/such/folder: "), "{error}");
    }
}
