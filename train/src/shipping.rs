//! A run's working directory, carried to nodes that may lack it.
//!
//! It is packed once, lies in the object store while it is fetched, and is unpacked on each node into the user's cache, in
//! a folder that is named by its content: the next run with the same files finds it there.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, SystemTime};

use ignore::gitignore::Gitignore;
use ignore::{DirEntry, WalkBuilder};
use serde::{Deserialize, Serialize};
use serde_bytes::ByteBuf;

use crate::cache;
use crate::links::{self, Link};
use crate::own_folder::OwnFolder;

/// What no script needs from elsewhere, also where git is not told to leave it out.
const SKIPPED: [&str; 3] = [".git", "__pycache__", "node_modules"];
/// A folder with one of these is an environment of Python, or a cache (<https://bford.info/cachedir/>).
const MARKS: [&str; 3] = ["pyvenv.cfg", "conda-meta", "CACHEDIR.TAG"];
/// Has rules as `.gitignore` has, which win over that.
const IGNORE: &str = ".wingbeatignore";
const PREFIX: &str = "work-";
/// The working directory of one run.
const OF_RUN: &str = "run-";
/// For how long it is kept when its run may have another attempt on this node.
const BETWEEN: Duration = Duration::from_secs(24 * 3600);
/// What is being unpacked.
const PART: &str = "part-";
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
    links: Vec<SymbolicLink>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct SymbolicLink {
    path: String,
    target: String,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct File {
    path: String,
    mode: u32,
    content: ByteBuf,
}

impl Shipment {
    /// Packs a folder: what git would have in it, and neither environments nor caches.
    ///
    /// # Errors
    /// Something cannot be read or has no name in UTF-8, a link leads to a folder elsewhere, or there is more than code.
    pub(crate) fn pack(folder: &Path) -> Result<Shipment, String> {
        let folder = &folder.canonicalize().map_err(|error| format!("{}: {error}", folder.display()))?;
        let (mut files, mut links) = (Vec::new(), Vec::new());
        let mut total = 0;
        for path in &paths(folder)? {
            let failed = |error: std::io::Error| format!("{}: {error}", path.display());
            let kind = std::fs::symlink_metadata(path).map_err(failed)?.file_type();
            // Sockets and pipes are nobody's code.
            if !kind.is_file() && !kind.is_symlink() {
                continue;
            }
            let within = path.strip_prefix(folder).unwrap_or(path).to_str();
            let name = within.ok_or_else(|| format!("{} is not UTF-8; rename it", path.display()))?.to_owned();
            if kind.is_symlink() {
                // One that leads elsewhere is as good there, on disks that machines share.
                let target = match links::read(folder, path).map_err(failed)? {
                    Link::Within(target) => Some(target),
                    Link::Elsewhere(target) => Some(path.parent().unwrap_or(folder).join(target).display().to_string()),
                    Link::File => None,
                };
                if let Some(target) = target {
                    links.push(SymbolicLink { path: name, target });
                    continue;
                }
            }
            let metadata = std::fs::metadata(path).map_err(failed)?;
            total += metadata.len();
            if total > LIMIT {
                return Err(format!(
                    "{} holds more than {} MiB that git would take in; ship code, put data where all nodes reach it, and \
                     name in {IGNORE} what is to be left out",
                    folder.display(),
                    LIMIT >> 20
                ));
            }
            let content = ByteBuf::from(std::fs::read(path).map_err(failed)?);
            files.push(File { path: name, mode: metadata.permissions().mode() & 0o777, content });
        }
        if files.is_empty() {
            return Err(format!(
                "{} has no file that git would take in (see .gitignore and {IGNORE})",
                folder.display()
            ));
        }
        files.sort_by(|a, b| a.path.cmp(&b.path));
        links.sort_by(|a, b| a.path.cmp(&b.path));
        let mut hasher = blake3::Hasher::new();
        let mut add = |bytes: &[u8]| {
            hasher.update(&(bytes.len() as u64).to_le_bytes()).update(bytes);
        };
        for file in &files {
            add(file.path.as_bytes());
            add(&file.mode.to_le_bytes());
            add(&file.content);
        }
        for link in &links {
            add(link.path.as_bytes());
            add(link.target.as_bytes());
        }
        Ok(Shipment { hash: hasher.finalize().to_hex()[..32].to_owned(), files, links })
    }

    /// Writes the files into the cache, unless they are there: all of them, or nothing.
    pub(crate) fn unpack(&self) -> std::io::Result<PathBuf> {
        let folder = place(&self.hash)?;
        if cache::holds(&folder)? {
            return Ok(folder);
        }
        remove_unused();
        let made = cache::new_folder(&cache::folder()?, PART)?;
        for file in &self.files {
            let path = made.path().join(&file.path);
            if let Some(parent) = path.parent() {
                std::fs::create_dir_all(parent)?;
            }
            std::fs::write(&path, &file.content)?;
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(file.mode))?;
        }
        for link in &self.links {
            let path = made.path().join(&link.path);
            if let Some(parent) = path.parent() {
                std::fs::create_dir_all(parent)?;
            }
            symlink(&link.target, path)?;
        }
        // If another was first, that is as good.
        if std::fs::rename(made.path(), &folder).is_err() && !folder.exists() {
            return Err(std::io::Error::other(format!("cannot write {}", folder.display())));
        }
        Ok(folder)
    }
}

/// What is to be shipped of a folder.
fn paths(folder: &Path) -> Result<BTreeSet<PathBuf>, String> {
    let is_repository = folder.ancestors().any(|folder| folder.join(".git").exists());
    let mut walk = WalkBuilder::new(folder);
    walk.hidden(false).ignore(false).add_custom_ignore_filename(IGNORE).filter_entry(is_wanted);
    // Outside of a repository, what lies above the folder says nothing about it.
    walk.require_git(is_repository).parents(is_repository);
    let mut paths = BTreeSet::new();
    for entry in walk.build() {
        let entry = entry.map_err(|error| error.to_string())?;
        if entry.depth() > 0 && !entry.file_type().is_some_and(|kind| kind.is_dir()) {
            paths.insert(entry.into_path());
        }
    }
    if is_repository {
        paths.extend(tracked(folder));
    }
    Ok(paths)
}

/// What git keeps though it would not take it in; nothing where there is no git.
fn tracked(folder: &Path) -> Vec<PathBuf> {
    let mut git = Command::new("git");
    git.arg("-C").arg(folder).args(["ls-files", "-z", "--cached", "--ignored", "--exclude-standard"]);
    let Ok(said) = git.stderr(Stdio::null()).stdin(Stdio::null()).output() else { return Vec::new() };
    let (own, _) = Gitignore::new(folder.join(IGNORE));
    let names = said.stdout.split(|byte| *byte == 0).filter(|name| !name.is_empty());
    let paths = names.map(|name| folder.join(OsStr::from_bytes(name)));
    let lies_in_a_link = |path: &PathBuf| {
        let above = path.ancestors().skip(1).take_while(|above| *above != folder);
        above.into_iter().any(|above| above.is_symlink())
    };
    paths
        .filter(|path| {
            path.exists() && !lies_in_a_link(path) && !own.matched_path_or_any_parents(path, false).is_ignore()
        })
        .collect()
}

fn is_wanted(entry: &DirEntry) -> bool {
    let is_skipped = SKIPPED.iter().any(|name| entry.file_name() == *name);
    let is_marked = || entry.path().is_dir() && MARKS.iter().any(|mark| entry.path().join(mark).exists());
    entry.depth() == 0 || !(is_skipped || is_marked())
}

/// A run's own copy of a shipment that lies on this node: what its ranks write there, its next attempt finds, and no other
/// run sees.
pub(crate) fn unfold(hash: &str, run: &str) -> std::io::Result<OwnFolder> {
    let shipped = place(hash)?;
    OwnFolder::again(&cache::folder()?, (OF_RUN, run), BETWEEN, |folder| copy(&shipped, folder))
}

/// Removes a run's own copy from this node, if it is there.
pub(crate) fn forget(run: &str) {
    let copy = cache::folder().and_then(|folder| OwnFolder::again(&folder, (OF_RUN, run), BETWEEN, |_| Ok(())));
    if let Ok(copy) = copy {
        copy.remove();
    }
}

/// What the copy of a run on a node is called. Nodes may have one disk.
pub(crate) fn of_run(run: &str, node: u64) -> String {
    format!("{run}-{node:016x}")
}

fn copy(from: &Path, to: &Path) -> std::io::Result<()> {
    for entry in std::fs::read_dir(from)? {
        let entry = entry?;
        let (from, to, kind) = (entry.path(), to.join(entry.file_name()), entry.file_type()?);
        if kind.is_dir() {
            std::fs::create_dir(&to)?;
            copy(&from, &to)?;
        } else if kind.is_symlink() {
            symlink(std::fs::read_link(&from)?, &to)?;
        } else {
            std::fs::copy(&from, &to)?;
        }
    }
    Ok(())
}

/// Removes what no run has used for long. What cannot be removed now is, some other time.
fn remove_unused() {
    let Ok(entries) = cache::folder().and_then(std::fs::read_dir) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let is_shipment = [PREFIX, PART].iter().any(|prefix| name.to_string_lossy().starts_with(prefix));
        let used = entry.metadata().and_then(|metadata| metadata.modified()).ok();
        if is_shipment && used.and_then(|used| used.elapsed().ok()).is_some_and(|unused| unused > UNUSED) {
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
}

/// Whether a shipment lies on this node; a run is about to use it then.
pub(crate) fn is_there(hash: &str) -> bool {
    // What unpacks it says why it cannot be used.
    let Ok(Some(folder)) = place(hash).and_then(|folder| Ok(cache::holds(&folder)?.then_some(folder))) else {
        return false;
    };
    let used = std::fs::File::open(folder).and_then(|folder| folder.set_modified(SystemTime::now()));
    used.is_ok()
}

/// Where a shipment lies on this node.
pub(crate) fn place(hash: &str) -> std::io::Result<PathBuf> {
    Ok(cache::folder()?.join(format!("{PREFIX}{hash}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(folder: &Path, name: &str, text: &str) {
        std::fs::create_dir_all(folder.join(name).parent().unwrap()).unwrap();
        std::fs::write(folder.join(name), text).unwrap();
    }

    #[test]
    fn what_git_would_take_in_is_packed() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| write(dir.path(), name, text);
        write("train.py", "print()");
        write("package/part.py", "x = 1");
        write("package/target/labels.py", "y = 1");
        write(".hidden/settings.toml", "");
        write(".git/HEAD", "ref");
        write("package/__pycache__/part.pyc", "compiled");
        write("env/pyvenv.cfg", "");
        write("env/lib/torch.py", "");
        write("build/CACHEDIR.TAG", "");
        write(".gitignore", "*.log\n/data/\n/local.toml\n");
        write("a.log", "");
        write("data/large.bin", "");
        write("local.toml", "");
        write(".wingbeatignore", "!/local.toml\nnotes/\n");
        write("notes/today.md", "");
        symlink("package", dir.path().join("linked")).unwrap();
        let first = Shipment::pack(dir.path()).unwrap();
        let names: Vec<&str> = first.files.iter().map(|file| file.path.as_str()).collect();
        let expected = [
            ".gitignore",
            ".hidden/settings.toml",
            ".wingbeatignore",
            "local.toml",
            "package/part.py",
            "package/target/labels.py",
            "train.py",
        ];
        assert_eq!(names, expected);
        assert_eq!(first.links.len(), 1);
        assert_eq!(Shipment::pack(dir.path()).unwrap().hash, first.hash);
        write("train.py", "print(1)");
        assert_ne!(Shipment::pack(dir.path()).unwrap().hash, first.hash);
    }

    #[test]
    fn a_run_s_copy_is_its_own() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), "package/part.py", &format!("x = {}", std::process::id()));
        symlink("package", dir.path().join("linked")).unwrap();
        let shipment = Shipment::pack(dir.path()).unwrap();
        let place = shipment.unpack().unwrap();
        let (first, second) = (unfold(&shipment.hash, "test-a").unwrap(), unfold(&shipment.hash, "test-b").unwrap());
        std::fs::write(first.folder().join("linked/part.py"), "x = 2").unwrap();
        for untouched in [place.clone(), second.folder()] {
            assert_eq!(Shipment::pack(&untouched).unwrap().hash, shipment.hash);
        }
        assert_eq!(unfold(&shipment.hash, "test-a").unwrap().folder(), first.folder(), "as the next attempt finds it");
        assert_eq!(std::fs::read(first.folder().join("package/part.py")).unwrap(), b"x = 2");
        first.remove();
        second.remove();
        std::fs::remove_dir_all(place).unwrap();
    }

    #[test]
    fn rules_above_the_repository_and_of_other_tools_do_not_count_and_what_git_keeps_does() {
        let home = tempfile::tempdir().unwrap();
        let project = home.path().join("project");
        write(home.path(), ".gitignore", "*\n");
        write(&project, "train.py", "");
        write(&project, ".ignore", "*.json\n");
        write(&project, "settings.json", "{}");
        let names = |folder: &Path| -> Vec<String> {
            Shipment::pack(folder).unwrap().files.into_iter().map(|file| file.path).collect()
        };
        assert_eq!(names(&project), [".ignore", "settings.json", "train.py"]);
        write(&project, ".gitignore", "data/\n");
        write(&project, "data/labels.py", "");
        write(&project, "data/large.bin", "");
        let git = |arguments: &[&str]| {
            let done = Command::new("git").arg("-C").arg(&project).args(arguments).output();
            done.is_ok_and(|done| done.status.success())
        };
        if git(&["init", "-q"]) && git(&["add", "-f", "data/labels.py"]) {
            assert_eq!(names(&project), [".gitignore", ".ignore", "data/labels.py", "settings.json", "train.py"]);
        }
        // A folder that a link leads to, and what leads out of it.
        let link = home.path().join("link");
        symlink(&project, &link).unwrap();
        symlink("../../usr", project.join("far")).unwrap();
        let shipment = Shipment::pack(&link).unwrap();
        assert!(shipment.files.iter().any(|file| file.path == "train.py"));
        let far = project.canonicalize().unwrap().join("../../usr");
        assert_eq!(shipment.links[0].target, far.display().to_string(), "it leads there from anywhere");
        let empty = tempfile::tempdir().unwrap();
        assert!(Shipment::pack(empty.path()).unwrap_err().contains("no file"));
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
