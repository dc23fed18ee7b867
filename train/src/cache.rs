//! Where this user's files lie that can be made again: the Python that ranks run with, and shipped code.

use std::io::{Error, ErrorKind, Result};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// The folder, made if it is not there: in the user's cache, or where that cannot be written, in one below `/tmp` that
/// is nobody else's.
pub(crate) fn folder() -> Result<PathBuf> {
    let of_user = |name: &str| std::env::var_os(name).filter(|path| !path.is_empty()).map(PathBuf::from);
    let cache = of_user("XDG_CACHE_HOME").or_else(|| Some(of_user("HOME")?.join(".cache")));
    if let Some(folder) = cache.map(|cache| cache.join("wingbeat"))
        && std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&folder).is_ok()
        && rustix::fs::access(&folder, rustix::fs::Access::WRITE_OK).is_ok()
        && is_nobody_elses(&folder)
    {
        return Ok(folder);
    }
    private(&std::env::temp_dir().join(format!("wingbeat-cache-{}", rustix::process::geteuid().as_raw())))
}

/// Whether it is this user's, and nobody else may write what lies in it, which is run. Where others could, whatever the umask was, they
/// reach nothing in it any more: what was made below it may be open to them, too.
fn is_nobody_elses(folder: &Path) -> bool {
    let Ok(there) = std::fs::metadata(folder) else { return false };
    let for_us = std::fs::Permissions::from_mode(there.mode() & 0o7700);
    there.uid() == rustix::process::geteuid().as_raw()
        && (there.mode() & 0o022 == 0 || std::fs::set_permissions(folder, for_us).is_ok() && is_private(folder))
}

/// On some mounts modes cannot be changed, and to change them is no error.
fn is_private(folder: &Path) -> bool {
    std::fs::metadata(folder).is_ok_and(|there| there.mode() & 0o022 == 0)
}

/// Whether that is there and can be run: this user has made it, and nobody else could have changed it. What others could write is removed,
/// so that it is made again.
pub(crate) fn holds(folder: &Path) -> Result<bool> {
    let Ok(there) = std::fs::symlink_metadata(folder) else { return Ok(false) };
    let is_ours = there.is_dir() && there.uid() == rustix::process::geteuid().as_raw();
    if is_ours && there.mode() & 0o022 == 0 {
        return Ok(true);
    }
    let removed = if is_ours { removed(folder, &there) } else { Err(ErrorKind::PermissionDenied.into()) };
    match removed {
        Ok(()) => Ok(false),
        // Another was first.
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
        Err(error) => Err(Error::new(
            error.kind(),
            format!(
                "{} is somebody else's, or others could write it, and what lies in it would be run; remove it, or set XDG_CACHE_HOME",
                folder.display()
            ),
        )),
    }
}

/// Removes a folder that was looked at, by another name: nobody finds half of it. Another process may have removed it since, and have made
/// it again: what it has made is put back.
fn removed(folder: &Path, looked_at: &std::fs::Metadata) -> Result<()> {
    let parent = folder.parent().unwrap_or(Path::new("."));
    let aside = new_folder(parent, "part-")?;
    let removed = aside.path().join("removed");
    std::fs::rename(folder, &removed)?;
    let found = std::fs::symlink_metadata(&removed)?;
    if (found.dev(), found.ino()) != (looked_at.dev(), looked_at.ino()) {
        return match std::fs::rename(&removed, folder) {
            // A third one has made it meanwhile.
            Err(error) if matches!(error.kind(), ErrorKind::DirectoryNotEmpty | ErrorKind::AlreadyExists) => Ok(()),
            back => back,
        };
    }
    // What cannot be removed now is by `remove_unused`, some other time.
    drop(aside);
    Ok(())
}

/// A new folder in the cache that only this user reaches. It gets its name when all is in it.
pub(crate) fn new_folder(cache: &Path, prefix: &str) -> Result<tempfile::TempDir> {
    tempfile::Builder::new().prefix(prefix).permissions(std::fs::Permissions::from_mode(0o700)).tempdir_in(cache)
}

/// A folder that only this user can write. Anybody may have made one of its name before: what lies in it is run.
fn private(folder: &Path) -> Result<PathBuf> {
    match std::fs::DirBuilder::new().mode(0o700).create(folder) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    let there = std::fs::symlink_metadata(folder)?;
    let is_ours = there.is_dir() && there.uid() == rustix::process::geteuid().as_raw() && there.mode() & 0o022 == 0;
    match is_ours {
        true => Ok(folder.to_owned()),
        false => Err(Error::new(
            ErrorKind::PermissionDenied,
            format!("{} is somebody else's, or others may write it; set XDG_CACHE_HOME", folder.display()),
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_others_may_write_they_may_not_any_more() {
        let dir = tempfile::tempdir().unwrap();
        let mode = || std::fs::metadata(dir.path()).unwrap().mode() & 0o777;
        for (before, after) in [(0o777, 0o700), (0o755, 0o755), (0o770, 0o700), (0o700, 0o700)] {
            std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(before)).unwrap();
            assert!(is_nobody_elses(dir.path()));
            assert_eq!(mode(), after, "{before:o}");
        }
        assert!(!is_nobody_elses(&dir.path().join("missing")));
    }

    #[test]
    fn what_others_could_have_changed_is_made_again() {
        let dir = tempfile::tempdir().unwrap();
        let made = new_folder(dir.path(), "made-").unwrap();
        assert_eq!(std::fs::metadata(made.path()).unwrap().mode() & 0o777, 0o700, "whatever the umask is");
        assert!(holds(made.path()).unwrap() && !holds(&dir.path().join("missing")).unwrap());
        std::fs::write(made.path().join("train.py"), "").unwrap();
        std::fs::set_permissions(made.path(), std::fs::Permissions::from_mode(0o775)).unwrap();
        assert!(!holds(made.path()).unwrap() && !made.path().exists());
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(dir.path(), &link).unwrap();
        assert!(holds(&link).unwrap_err().to_string().contains("XDG_CACHE_HOME"));
    }

    #[test]
    fn what_another_has_made_meanwhile_is_left_there() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("code");
        std::fs::create_dir(&folder).unwrap();
        let looked_at = std::fs::symlink_metadata(&folder).unwrap();
        std::fs::rename(&folder, dir.path().join("removed by another")).unwrap();
        std::fs::create_dir(&folder).unwrap();
        std::fs::write(folder.join("train.py"), "").unwrap();
        removed(&folder, &looked_at).unwrap();
        assert!(folder.join("train.py").exists());
        removed(&folder, &std::fs::symlink_metadata(&folder).unwrap()).unwrap();
        assert!(!folder.exists());
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "nothing else is left");
    }

    #[test]
    fn a_folder_that_others_may_write_is_not_taken() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("cache");
        assert_eq!(private(&folder).unwrap(), folder);
        assert_eq!(std::fs::metadata(&folder).unwrap().permissions().mode() & 0o777, 0o700);
        assert_eq!(private(&folder).unwrap(), folder, "and it is found again");
        std::fs::set_permissions(&folder, std::fs::Permissions::from_mode(0o777)).unwrap();
        assert!(private(&folder).unwrap_err().to_string().contains("XDG_CACHE_HOME"));
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(dir.path(), &link).unwrap();
        assert!(private(&link).is_err(), "nor one that a link leads to");
    }
}
