//! Where the token of a user's clusters is kept.

use std::fs::{DirBuilder, OpenOptions, Permissions};
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use wingbeat_core::error::Error;
use wingbeat_net::Token;

/// Holds the token itself.
pub const TOKEN_VARIABLE: &str = "WINGBEAT_TOKEN";
/// Holds the path of a file with the token.
pub const TOKEN_FILE_VARIABLE: &str = "WINGBEAT_TOKEN_FILE";

/// The token that was given on purpose: as `file`, or by one of the variables.
///
/// # Errors
/// When a named file cannot be read, or others can read it too.
pub fn given(file: Option<&Path>) -> Result<Option<Token>, Error> {
    if let Some(file) = file {
        return read(file).map(Some);
    }
    if let Ok(token) = std::env::var(TOKEN_VARIABLE) {
        return Ok(Some(Token::new(token.trim())));
    }
    match std::env::var(TOKEN_FILE_VARIABLE) {
        Ok(file) => read(Path::new(&file)).map(Some),
        Err(_) => Ok(None),
    }
}

fn read(file: &Path) -> Result<Token, Error> {
    let failed = |why: String| Error::Io { what: format!("reading the token from {}", file.display()), why };
    let meta = std::fs::metadata(file).map_err(|error| failed(error.to_string()))?;
    if meta.permissions().mode() & 0o077 != 0 {
        return Err(failed("others can read the file; make it yours alone with chmod 600".into()));
    }
    let text = std::fs::read_to_string(file).map_err(|error| failed(error.to_string()))?;
    match text.trim() {
        "" => Err(failed("the file is empty".into())),
        token => Ok(Token::new(token)),
    }
}

/// The file that holds this user's own token: the one for clusters on this machine.
pub fn own_file() -> PathBuf {
    let base = std::env::var_os("XDG_STATE_HOME").map(PathBuf::from);
    let base = base.or_else(|| std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".local/state")));
    base.unwrap_or_else(|| std::env::temp_dir().join(format!("wingbeat-{}", rustix::process::geteuid().as_raw())))
        .join("wingbeat/token")
}

/// This user's own token, made on first use, readable by nobody else.
///
/// # Errors
/// When the file cannot be made.
pub fn own() -> Result<Token, Error> {
    let file = own_file();
    if file.exists() {
        return read(&file);
    }
    let failed = |error: std::io::Error| Error::io(format!("making the token file {}", file.display()), &error);
    if let Some(dir) = file.parent() {
        DirBuilder::new().recursive(true).mode(0o700).create(dir).map_err(failed)?;
    }
    // Written aside and linked into place, so that of two processes one wins and both read the same.
    let aside = file.with_extension(format!("{}", std::process::id()));
    let mut out =
        OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&aside).map_err(failed)?;
    std::fs::set_permissions(&aside, Permissions::from_mode(0o600)).map_err(failed)?;
    writeln!(out, "{}", Token::random().reveal()).map_err(failed)?;
    drop(out);
    let linked = std::fs::hard_link(&aside, &file);
    let _ = std::fs::remove_file(&aside);
    match linked {
        Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => Err(failed(error)),
        _ => read(&file),
    }
}
