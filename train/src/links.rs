//! What is done with a symbolic link in a folder that is copied elsewhere.

use std::io::{Error, ErrorKind, Result};
use std::path::{Component, Path};

/// A symbolic link, as another machine can have it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Link {
    /// It leads to this path, relative to where it lies, within the folder: it stays a link.
    Within(String),
    /// It leads to a file elsewhere, whose content is taken.
    File,
}

/// What a link is to the folder `root`, in which it lies at `link`.
///
/// # Errors
/// It leads to nothing, or to a folder elsewhere, which may be of any size and lead back.
pub(crate) fn read(root: &Path, link: &Path) -> Result<Link> {
    let target = std::fs::read_link(link)?;
    let depth = link.strip_prefix(root).map_or(0, |path| path.components().count()).saturating_sub(1);
    if let Some(text) = target.to_str().filter(|_| stays_within(depth, &target)) {
        return Ok(Link::Within(text.to_owned()));
    }
    let refused = |why: &str| {
        let text = format!("{} is a link to {}, {why}", link.display(), target.display());
        Error::new(ErrorKind::InvalidInput, text)
    };
    match std::fs::metadata(link) {
        Ok(there) if there.is_file() => Ok(Link::File),
        Ok(_) => Err(refused("which is no file and lies outside of the folder; put a copy there, or leave it out")),
        Err(error) => Err(refused(&format!("which cannot be read ({error}); leave it out"))),
    }
}

/// Whether a path never leads above the folder, from so many folders below it.
fn stays_within(mut depth: usize, target: &Path) -> bool {
    target.components().all(|part| {
        let next = match part {
            Component::Normal(_) => depth.checked_add(1),
            Component::CurDir => Some(depth),
            Component::ParentDir => depth.checked_sub(1),
            Component::RootDir | Component::Prefix(_) => None,
        };
        depth = next.unwrap_or_default();
        next.is_some()
    })
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
            read(root, &link)
        };
        assert_eq!(of("latest", Path::new("a/b")).unwrap(), Link::Within("a/b".into()));
        assert_eq!(of("a/b/up", Path::new("../../a")).unwrap(), Link::Within("../../a".into()));
        assert_eq!(of("a/later", Path::new("./not-yet")).unwrap(), Link::Within("./not-yet".into()));
        assert_eq!(of("file", &other.path().join("file")).unwrap(), Link::File);
        for (name, target) in [("folder", other.path()), ("a/out", Path::new("../..")), ("none", Path::new("/no/such"))]
        {
            let error = of(name, target).unwrap_err().to_string();
            assert!(error.contains(name) && error.contains("leave it out"), "{error}");
        }
    }
}
