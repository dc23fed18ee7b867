//! What a symbolic link is to the folder in which it lies, when that is copied elsewhere.

use std::io::Result;
use std::path::{Component, Path, PathBuf};

/// A symbolic link.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Link {
    /// It leads to this path, relative to where it lies, within the folder.
    Within(String),
    /// It leads to a file elsewhere.
    File,
    /// It leads to this, which is a folder elsewhere, or nothing.
    Elsewhere(PathBuf),
}

/// What the link at this path, within the folder `root`, is.
///
/// # Errors
/// It cannot be read.
pub(crate) fn read(root: &Path, link: &Path) -> Result<Link> {
    let target = std::fs::read_link(link)?;
    let within = link.strip_prefix(root).unwrap_or(link);
    let depth = within.components().count().saturating_sub(1);
    // An absolute one may lead to the folder itself.
    let relative = match target.strip_prefix(root) {
        Ok(rest) => down(depth, &rest.to_string_lossy()),
        Err(_) => target.to_string_lossy().into_owned(),
    };
    if stays_within(within, Path::new(&relative)) {
        return Ok(Link::Within(relative));
    }
    // By another way, it may lead there all the same.
    if let (Ok(root), Ok(there)) = (root.canonicalize(), link.canonicalize())
        && let Ok(rest) = there.strip_prefix(&root)
        && let Some(rest) = rest.to_str()
    {
        return Ok(Link::Within(down(depth, rest)));
    }
    match std::fs::metadata(link) {
        Ok(there) if there.is_file() => Ok(Link::File),
        _ => Ok(Link::Elsewhere(target)),
    }
}

/// The way from so deep in a folder to what is in it.
fn down(depth: usize, to: &str) -> String {
    let way = "../".repeat(depth) + to;
    if way.is_empty() { ".".into() } else { way }
}

/// Whether a link at a path of a folder leads to what is in the folder, whatever other such links do: `..` may only be at
/// its beginning, since after a name that is a link itself it would be another folder.
pub(crate) fn stays_within(link: &Path, target: &Path) -> bool {
    let mut depth = link.components().count().saturating_sub(1);
    let mut is_down = false;
    target.components().all(|part| match part {
        Component::Normal(_) => {
            is_down = true;
            true
        }
        Component::CurDir => true,
        Component::ParentDir => {
            let may = !is_down && depth > 0;
            depth = depth.saturating_sub(1);
            may
        }
        Component::RootDir | Component::Prefix(_) => false,
    })
}

/// Whether a path names something in a folder, and nothing above or beside it.
pub(crate) fn is_within(path: &Path) -> bool {
    path.components().next().is_some() && path.components().all(|part| matches!(part, Component::Normal(_)))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn links_stay_links_where_they_lead_to_the_same_folder() {
        let (dir, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let root = dir.path();
        std::fs::create_dir_all(root.join("a/b")).unwrap();
        std::fs::write(other.path().join("file"), "").unwrap();
        let of = |name: &str, target: &Path| {
            let link = root.join(name);
            symlink(target, &link).unwrap();
            read(root, &link).unwrap()
        };
        let within = |target: &str| Link::Within(target.into());
        assert_eq!(of("latest", Path::new("a/b")), within("a/b"));
        assert_eq!(of("a/b/up", Path::new("../../a")), within("../../a"));
        assert_eq!(of("a/later", Path::new("./not-yet")), within("./not-yet"));
        assert_eq!(of("a/b/absolute", &root.join("a/x")), within("../../a/x"));
        assert_eq!(of("file", &other.path().join("file")), Link::File);
        for (name, target) in [("folder", other.path()), ("a/out", Path::new("../..")), ("none", Path::new("/no/such"))]
        {
            assert_eq!(of(name, target), Link::Elsewhere(target.to_owned()));
        }
        assert_eq!(of("a/round", Path::new("b/../later")), Link::Elsewhere("b/../later".into()), "it leads nowhere");
        std::fs::write(root.join("a/there"), "").unwrap();
        assert_eq!(of("a/again", Path::new("b/../there")), within("../a/there"));
        assert_eq!(of("self", root), within("."));
        assert_eq!(of("self-again", &Path::new("..").join(root.file_name().unwrap())), within("."));
        // `d` leads to the folder itself, and so this to what is beside it.
        assert_eq!(of("a/b/d", Path::new("../..")), within("../.."));
        assert_eq!(of("a/b/e", Path::new("d/../../secret")), Link::Elsewhere("d/../../secret".into()));
    }

    #[test]
    fn names_of_what_is_in_a_folder() {
        assert!(is_within(Path::new("a/b c")));
        for bad in ["", "/a", "../a", "a/../b", "a/.."] {
            assert!(!is_within(Path::new(bad)), "{bad}");
        }
    }
}
