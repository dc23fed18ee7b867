//! Where the token of a user's clusters is kept.
//!
//! Whoever can read it can run code as this user, and whoever can *choose* it can have this user's head serve them. So a
//! token is taken from a file only if this user (or, where the file was named on purpose, root) owns it and nobody else
//! can read it. What is looked at is the open descriptor and not the path, which somebody could change in between.

use std::fs::{DirBuilder, File};
use std::io::{ErrorKind, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Mode, OFlags, openat};
use wingbeat_core::error::Error;
use wingbeat_net::Token;
use wingbeat_net::handshake::MAKE_A_TOKEN;

/// Holds the token itself.
pub const TOKEN_VARIABLE: &str = "WINGBEAT_TOKEN";
/// Holds the path of a file with the token.
pub const TOKEN_FILE_VARIABLE: &str = "WINGBEAT_TOKEN_FILE";

/// A token file is one line; what is longer is another file.
const LONGEST_FILE: u64 = 64 << 10;
/// The name of this user's own token in its folder.
const OWN_NAME: &str = "token";

/// The token that was given on purpose: as `file`, or by one of the variables.
///
/// # Errors
/// When it is empty or short, or a named file cannot be read, belongs to another user or can be read by others.
pub fn given(file: Option<&Path>) -> Result<Option<Token>, Error> {
    if let Some(file) = file {
        return named(file).map(Some);
    }
    if let Some(token) = std::env::var_os(TOKEN_VARIABLE) {
        let token = token.to_str().ok_or_else(|| Error::InvalidArgument {
            what: format!("the token from {TOKEN_VARIABLE} is no text; {MAKE_A_TOKEN}"),
        })?;
        return Token::checked(token, TOKEN_VARIABLE).map(Some);
    }
    std::env::var_os(TOKEN_FILE_VARIABLE).map(|file| of_variable(Path::new(&file))).transpose()
}

fn of_variable(file: &Path) -> Result<Token, Error> {
    if file.as_os_str().is_empty() {
        let what = format!(
            "{TOKEN_FILE_VARIABLE} is set and names no file; unset it to use your own token, or {MAKE_A_TOKEN}"
        );
        return Err(Error::InvalidArgument { what });
    }
    named(file)
}

fn reading(file: &Path) -> String {
    format!("reading the token from {}", file.display())
}

fn failed(file: &Path, why: impl Into<String>) -> Error {
    Error::Failed { what: reading(file), why: why.into() }
}

/// From a file that somebody named: links on the way are theirs to make (secrets are mounted so), and root may own it.
fn named(file: &Path) -> Result<Token, Error> {
    let open = openat(CWD, file, OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK, Mode::empty());
    let open = open.map_err(|error| Error::io(reading(file), &error.into()))?;
    read(open.into(), file, &[this_user(), 0])
}

/// The content of an open token file.
fn read(open: File, file: &Path, owners: &[u32]) -> Result<Token, Error> {
    let failed = |why: String| failed(file, why);
    let io = |error: std::io::Error| Error::io(reading(file), &error);
    let meta = open.metadata().map_err(io)?;
    if !meta.is_file() {
        return Err(failed("it is no file".into()));
    }
    if !owners.contains(&meta.uid()) {
        return Err(failed(format!("it belongs to user {}, and this is user {}", meta.uid(), this_user())));
    }
    if meta.mode() & 0o077 != 0 {
        return Err(failed("others can read the file; make it yours alone with chmod 600".into()));
    }
    let mut text = String::new();
    open.take(LONGEST_FILE).read_to_string(&mut text).map_err(io)?;
    Token::checked(&text, &file.display().to_string())
}

fn this_user() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// The folder that holds this user's own token: the one for clusters on this machine.
fn own_folder() -> PathBuf {
    let folder = |name: &str| std::env::var_os(name).filter(|path| Path::new(path).is_absolute()).map(PathBuf::from);
    let state = folder("XDG_STATE_HOME").or_else(|| Some(folder("HOME")?.join(".local/state")));
    match state {
        Some(state) => state.join("wingbeat"),
        // Services often have no HOME. Anybody may have made a folder of this name before: it is looked at.
        None => std::env::temp_dir().join(format!("wingbeat-{}", this_user())),
    }
}

/// This user's own token, made on first use, readable by nobody else.
///
/// # Errors
/// When the file or its folder cannot be made, belongs to another user, is a link, or is open to others.
pub fn own() -> Result<Token, Error> {
    own_in(&own_folder())
}

fn own_in(folder: &Path) -> Result<Token, Error> {
    let file = folder.join(OWN_NAME);
    let making = |error: std::io::Error| Error::io(format!("making the token file {}", file.display()), &error);
    let open = private_folder(folder)?;
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOFOLLOW;
    let existing = || match openat(&open, OWN_NAME, flags, Mode::empty()) {
        Ok(there) => read(there.into(), &file, &[this_user()]).map(Some),
        Err(rustix::io::Errno::NOENT) => Ok(None),
        Err(rustix::io::Errno::LOOP) => Err(failed(&file, "it is a link; remove it, and a new token is made")),
        Err(error) => Err(Error::io(reading(&file), &error.into())),
    };
    if let Some(token) = existing()? {
        return Ok(token);
    }
    // Written aside and linked into place, so that of two processes one wins and both read the same.
    let aside = format!("{OWN_NAME}.{}", std::process::id());
    let linked = write_new(&open, &aside).and_then(|()| {
        let linked = rustix::fs::linkat(&open, aside.as_str(), &open, OWN_NAME, AtFlags::empty());
        linked.map_err(std::io::Error::from)
    });
    let _ = rustix::fs::unlinkat(&open, aside.as_str(), AtFlags::empty());
    match linked {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => return Err(making(error)),
        _ => {}
    }
    existing()?.ok_or_else(|| failed(&file, "somebody removed it"))
}

fn write_new(folder: &impl AsFd, name: &str) -> std::io::Result<()> {
    // Left by a process of this id that was killed.
    let _ = rustix::fs::unlinkat(folder, name, AtFlags::empty());
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut out = File::from(openat(folder, name, flags, Mode::RUSR | Mode::WUSR)?);
    writeln!(out, "{}", Token::random().reveal())?;
    out.sync_all()
}

/// A folder of this user alone, made if it is not there.
fn private_folder(folder: &Path) -> Result<File, Error> {
    let what = || format!("the token's folder {}", folder.display());
    let failed = |why: String| Error::Failed { what: what(), why };
    let elsewhere = format!("set XDG_STATE_HOME or HOME to folders of your own, or {MAKE_A_TOKEN}");
    let io = |error: std::io::Error| failed(format!("{error}; {elsewhere}"));
    if let Some(parent) = folder.parent() {
        let made = DirBuilder::new().recursive(true).mode(0o700).create(parent);
        made.map_err(io)?;
    }
    match DirBuilder::new().mode(0o700).create(folder) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => return Err(io(error)),
        _ => {}
    }
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let open = openat(CWD, folder, flags, Mode::empty()).map(File::from).map_err(|error| match error {
        rustix::io::Errno::LOOP | rustix::io::Errno::NOTDIR => failed("it is a link or no folder".into()),
        error => io(error.into()),
    })?;
    let meta = open.metadata().map_err(io)?;
    if meta.uid() != this_user() {
        return Err(failed(format!(
            "it belongs to user {}, and this is user {}; {elsewhere}",
            meta.uid(),
            this_user()
        )));
    }
    if meta.mode() & 0o077 != 0 {
        return Err(failed(format!(
            "others can look into it; make it yours alone with chmod 700 {}",
            folder.display()
        )));
    }
    Ok(open)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    /// Somebody else, on every system.
    const NOBODY: u32 = 65_534;

    fn write(path: &Path, text: &str, mode: u32) {
        std::fs::write(path, text).unwrap();
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    }

    fn folder(mode: u32) -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("wingbeat");
        std::fs::create_dir(&folder).unwrap();
        std::fs::set_permissions(&folder, std::fs::Permissions::from_mode(mode)).unwrap();
        (dir, folder)
    }

    fn refusal(token: Result<Token, Error>) -> String {
        token.map(|_| "it was taken").unwrap_err().to_string()
    }

    #[test]
    fn a_file_with_no_token_or_a_short_one_is_refused_and_says_how_to_make_one() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        for text in ["", " \n\t", "secret", "fifteen bytes..\n"] {
            write(&path, text, 0o600);
            let error = refusal(named(&path));
            assert!(error.contains("/dev/urandom") && error.contains("--token-file"), "{text:?}: {error}");
        }
        write(&path, "sixteen bytes...\n", 0o600);
        assert_eq!(named(&path).unwrap().reveal(), "sixteen bytes...");
    }

    #[test]
    fn a_variable_that_names_no_file_is_refused_by_its_name() {
        let error = refusal(of_variable(Path::new("")));
        assert!(error.starts_with("WINGBEAT_TOKEN_FILE is set and names no file"), "{error}");
    }

    #[test]
    fn a_file_that_others_can_read_and_one_that_is_no_file_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        write(&path, "a token that is long enough", 0o640);
        assert!(refusal(named(&path)).contains("chmod 600"));
        assert!(refusal(named(dir.path())).contains("no file"));
        let fifo = dir.path().join("fifo");
        rustix::fs::mknodat(CWD, &fifo, rustix::fs::FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        assert!(refusal(named(&fifo)).contains("no file"), "and nobody waits for a writer");
    }

    #[test]
    fn the_own_token_is_made_once_and_for_this_user_alone() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("state/wingbeat");
        let token = own_in(&folder).unwrap();
        assert_eq!(own_in(&folder).unwrap().reveal(), token.reveal());
        let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&folder), mode(&folder.join("token"))), (0o700, 0o600));
        let left: Vec<_> = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(left, ["token"]);
    }

    #[test]
    fn no_link_is_followed_to_the_own_token() {
        let (dir, folder) = folder(0o700);
        let elsewhere = dir.path().join("elsewhere");
        write(&elsewhere, "attacker knows this token", 0o600);
        symlink(&elsewhere, folder.join("token")).unwrap();
        assert!(refusal(own_in(&folder)).contains("a link"));
        let link = dir.path().join("link");
        std::fs::remove_file(folder.join("token")).unwrap();
        symlink(&folder, &link).unwrap();
        assert!(refusal(own_in(&link)).contains("a link"));
    }

    #[test]
    fn a_folder_that_is_open_to_others_is_refused() {
        let (_dir, folder) = folder(0o755);
        assert!(refusal(own_in(&folder)).contains("chmod 700"));
    }

    #[test]
    fn what_another_user_planted_is_refused() {
        let (_dir, folder) = folder(0o700);
        let file = folder.join("token");
        write(&file, "attacker knows this token", 0o600);
        if this_user() != 0 {
            // Only root can give files away; the same test runs as another user in `tests/secrets.rs`.
            return;
        }
        std::os::unix::fs::chown(&file, Some(NOBODY), None).unwrap();
        assert!(refusal(own_in(&folder)).contains(&format!("belongs to user {NOBODY}")));
        assert!(refusal(named(&file)).contains(&format!("belongs to user {NOBODY}")));
        std::os::unix::fs::chown(&file, Some(0), None).unwrap();
        std::os::unix::fs::chown(&folder, Some(NOBODY), None).unwrap();
        assert!(refusal(own_in(&folder)).contains(&format!("belongs to user {NOBODY}")));
    }
}
