//! What lies in a folder that is reported as a checkpoint: files, and what belongs to them and is no content.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::Permissions;
use std::io::{Error, ErrorKind, Result};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::OWN;
use crate::links::{self, Link};

/// The mode of a file of which nothing else is said.
const USUAL: u32 = 0o644;

/// The files of a folder, and its shape.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Listing {
    /// By their paths in it; of a file, its name.
    pub files: Vec<String>,
    pub shape: Shape,
}

/// What a folder has beside the contents of its files. Paths are within it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Shape {
    /// Of files that others may write or run, or not read.
    modes: BTreeMap<String, u32>,
    /// Those in which nothing lies.
    empty_folders: BTreeSet<String>,
    /// Symbolic links, and where they lead to.
    links: BTreeMap<String, String>,
}

impl Listing {
    /// Of a folder, or of one file.
    ///
    /// # Errors
    /// Something in it cannot be read, or could not be kept: a name that is not UTF-8, a socket, a link to nothing or to a
    /// folder elsewhere.
    pub(crate) fn of(path: &Path) -> Result<Listing> {
        let mut listing = Listing::default();
        if path.is_file() {
            let name = path.file_name().unwrap_or_default();
            listing.add_file(name_within(Path::new(name), Path::new(""))?, path)?;
            return Ok(listing);
        }
        let mut folders = vec![path.to_owned()];
        while let Some(folder) = folders.pop() {
            let mut is_empty = true;
            for entry in std::fs::read_dir(&folder)? {
                let entry = entry?;
                let (at, kind) = (entry.path(), entry.file_type()?);
                let name = name_within(&at, path)?;
                // It is itself a checkpoint that was stored before.
                if OWN.contains(&name.as_str()) {
                    continue;
                }
                is_empty = false;
                if kind.is_dir() {
                    folders.push(at);
                } else if kind.is_file() {
                    listing.add_file(name, &at)?;
                } else if kind.is_symlink() {
                    match links::read(path, &at)? {
                        Link::Within(target) => drop(listing.shape.links.insert(name, target)),
                        Link::File => listing.add_file(name, &at)?,
                        Link::Elsewhere(target) => {
                            return Err(refused(&at, &format!("is a link to {}, which is no file", target.display())));
                        }
                    }
                } else {
                    return Err(refused(&at, "is neither a file nor a folder"));
                }
            }
            if is_empty && folder != path {
                listing.shape.empty_folders.insert(name_within(&folder, path)?);
            }
        }
        listing.files.sort();
        Ok(listing)
    }

    fn add_file(&mut self, name: String, at: &Path) -> Result<()> {
        let mode = std::fs::metadata(at)?.permissions().mode() & 0o777;
        if mode != USUAL {
            self.shape.modes.insert(name.clone(), mode);
        }
        self.files.push(name);
        Ok(())
    }

    /// Whether every name in it, and every link, stays in the folder: it may have been written by anybody.
    pub(crate) fn is_safe(&self) -> bool {
        let Shape { links, .. } = &self.shape;
        self.names()
            .all(|name| links::is_within(Path::new(name)) && above(name).all(|folder| !links.contains_key(folder)))
            && links.iter().all(|(name, target)| links::stays_within(Path::new(name), Path::new(target)))
    }

    /// Adds what another listing has and this one has not: that part of the other. What would lie below a file or a link of
    /// this one, or take the place of one of its folders, this one has.
    pub(crate) fn take_in(&mut self, other: Listing) -> Listing {
        let there: BTreeSet<&str> = self.names().map(String::as_str).collect();
        let folders: BTreeSet<&str> = there.iter().copied().flat_map(above).collect();
        let ends: BTreeSet<&str> = self.files.iter().chain(self.shape.links.keys()).map(String::as_str).collect();
        let is_new = |name: &str| {
            !there.contains(name) && !folders.contains(name) && above(name).all(|folder| !ends.contains(folder))
        };
        let Shape { mut modes, mut empty_folders, mut links } = other.shape;
        modes.retain(|name, _| is_new(name));
        empty_folders.retain(|name| is_new(name));
        links.retain(|name, _| is_new(name));
        let files = other.files.into_iter().filter(|name| is_new(name)).collect();
        let new = Listing { files, shape: Shape { modes, empty_folders, links } };
        self.files.extend(new.files.iter().cloned());
        self.files.sort();
        self.shape.modes.extend(new.shape.modes.clone());
        self.shape.empty_folders.extend(new.shape.empty_folders.iter().cloned());
        self.shape.links.extend(new.shape.links.clone());
        new
    }

    fn names(&self) -> impl Iterator<Item = &String> {
        self.files.iter().chain(&self.shape.empty_folders).chain(self.shape.links.keys())
    }

    /// Gives a folder with its files their modes, and what else there was.
    pub(crate) fn lay_out(&self, folder: &Path) -> Result<()> {
        let Shape { modes, empty_folders, links } = &self.shape;
        let named = |at: &Path, error: Error| Error::new(error.kind(), format!("{}: {error}", at.display()));
        for name in &self.files {
            let (at, mode) = (folder.join(name), modes.get(name).copied().unwrap_or(USUAL));
            let is = std::fs::metadata(&at).map_err(|error| named(&at, error))?.permissions().mode() & 0o777;
            if is != mode {
                // Some disks know no modes.
                let _ = std::fs::set_permissions(&at, Permissions::from_mode(mode));
            }
        }
        for name in empty_folders {
            let at = folder.join(name);
            std::fs::create_dir_all(&at).map_err(|error| named(&at, error))?;
        }
        for (name, target) in links {
            let at = folder.join(name);
            let made = at.parent().map_or(Ok(()), std::fs::create_dir_all).and_then(|()| symlink(target, &at));
            made.map_err(|error| named(&at, error))?;
        }
        Ok(())
    }
}

/// The folders in which a path lies, but for the outermost.
fn above(name: &str) -> impl Iterator<Item = &str> {
    name.match_indices('/').map(|(at, _)| &name[..at])
}

fn refused(at: &Path, why: &str) -> Error {
    Error::new(ErrorKind::InvalidInput, format!("{} {why}; leave it out", at.display()))
}

fn name_within(path: &Path, root: &Path) -> Result<String> {
    let within = path.strip_prefix(root).unwrap_or(path);
    let why = || Error::new(ErrorKind::InvalidInput, format!("{} is not UTF-8; rename it", path.display()));
    within.to_str().map(str::to_owned).ok_or_else(why)
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStrExt;

    use super::*;

    #[test]
    fn a_folder_is_laid_out_as_it_was() {
        let (dir, copy) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let root = dir.path();
        std::fs::create_dir_all(root.join("logs/none")).unwrap();
        std::fs::create_dir(root.join("step-5")).unwrap();
        for (name, mode) in [("run.sh", 0o755), ("step-5/key", 0o600), ("plain", 0o644)] {
            std::fs::write(root.join(name), name).unwrap();
            std::fs::set_permissions(root.join(name), Permissions::from_mode(mode)).unwrap();
        }
        symlink("step-5", root.join("latest")).unwrap();
        std::fs::write(root.join(OWN[0]), "of an earlier one").unwrap();
        let listing = Listing::of(root).unwrap();
        assert_eq!(listing.files, ["plain", "run.sh", "step-5/key"]);
        for name in &listing.files {
            let to = copy.path().join(name);
            std::fs::create_dir_all(to.parent().unwrap()).unwrap();
            std::fs::write(&to, name).unwrap();
        }
        listing.lay_out(copy.path()).unwrap();
        assert_eq!(Listing::of(copy.path()).unwrap(), listing);
        assert_eq!(std::fs::read(copy.path().join("latest/key")).unwrap(), b"step-5/key");
        assert!(copy.path().join("logs/none").is_dir());
    }

    #[test]
    fn what_cannot_be_kept_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let refused = |name: &std::ffi::OsStr| {
            let error = Listing::of(dir.path()).unwrap_err().to_string();
            std::fs::remove_file(dir.path().join(name)).unwrap();
            error
        };
        let bytes = std::ffi::OsStr::from_bytes(b"\xff");
        std::fs::write(dir.path().join(bytes), "").unwrap();
        assert!(refused(bytes).contains("is not UTF-8"));
        let _socket = std::os::unix::net::UnixListener::bind(dir.path().join("socket")).unwrap();
        assert!(refused("socket".as_ref()).contains("socket is neither a file nor a folder"));
        symlink("/usr", dir.path().join("far")).unwrap();
        assert!(refused("far".as_ref()).contains("far is a link to /usr"));
    }

    #[test]
    fn of_equal_names_the_first_is_taken() {
        let of = |files: &[&str], mode| Listing {
            files: files.iter().map(|name| (*name).to_owned()).collect(),
            shape: Shape { modes: files.iter().map(|name| ((*name).to_owned(), mode)).collect(), ..Shape::default() },
        };
        let mut all = of(&["a", "b"], 0o600);
        let new = all.take_in(of(&["b", "c"], 0o755));
        assert_eq!(new, of(&["c"], 0o755));
        assert_eq!(all.files, ["a", "b", "c"]);
        assert_eq!((all.shape.modes["b"], all.shape.modes["c"]), (0o600, 0o755));
        // What a link or a file of the first stands for, others do not write through.
        let mut first = of(&["step-5/key", "note"], 0o644);
        first.shape.links.insert("latest".into(), "step-5".into());
        let mut second = of(&["latest/key", "note/x", "step-5/more"], 0o644);
        second.shape.links.insert("step-5".into(), "elsewhere".into());
        let new = first.take_in(second);
        assert_eq!(new.files, ["step-5/more"]);
        assert!(new.shape.links.is_empty());
    }

    #[test]
    fn names_that_lead_out_of_the_folder_are_seen() {
        let of = |file: &str| Listing { files: vec![file.to_owned()], ..Listing::default() };
        assert!(of("a/b").is_safe() && !of("/home/u/.bashrc").is_safe() && !of("../x").is_safe());
        let mut linked = Listing::default();
        linked.shape.links.insert("a/up".into(), "../b".into());
        assert!(linked.is_safe());
        let mut below = linked.clone();
        below.shape.links.insert("a/up/c".into(), "d".into());
        assert!(!below.is_safe(), "it would be made where the other link leads");
        linked.shape.links.insert("out".into(), "../b".into());
        assert!(!linked.is_safe());
    }
}
