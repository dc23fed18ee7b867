//! The Python that ranks run with, carried along: a node needs no package installed.
//!
//! It lies in the user's cache, in a folder that is named by its content, and is written there once.

use std::path::PathBuf;
use std::sync::OnceLock;

use crate::cache;

const FILES: [(&str, &str); 6] = [
    ("__init__.py", include_str!("../../python/wingbeat/__init__.py")),
    ("_rank_main.py", include_str!("../../python/wingbeat/_rank_main.py")),
    ("_warm.py", include_str!("../../python/wingbeat/_warm.py")),
    ("_exceptions.py", include_str!("../../python/wingbeat/_exceptions.py")),
    ("_function.py", include_str!("../../python/wingbeat/_function.py")),
    ("train.py", include_str!("../../python/wingbeat/train.py")),
];

/// Changes with the content.
pub(crate) fn identity() -> &'static str {
    static IDENTITY: OnceLock<String> = OnceLock::new();
    IDENTITY.get_or_init(|| {
        let mut hasher = blake3::Hasher::new();
        for (name, text) in FILES {
            hasher.update(name.as_bytes()).update(&[0]).update(text.as_bytes()).update(&[0]);
        }
        hasher.finalize().to_hex()[..16].to_owned()
    })
}

/// The folder of the package on this node.
pub(crate) fn folder() -> std::io::Result<PathBuf> {
    let cache = cache::folder()?;
    let folder = cache.join(format!("python-{}", identity()));
    let package = folder.join("wingbeat");
    if package.exists() {
        return Ok(package);
    }
    let made = tempfile::Builder::new().prefix("python-").tempdir_in(cache)?;
    std::fs::create_dir(made.path().join("wingbeat"))?;
    for (name, text) in FILES {
        std::fs::write(made.path().join("wingbeat").join(name), text)?;
    }
    // All of it is there, or nothing; and if another was first, that is as good.
    if std::fs::rename(made.path(), &folder).is_err() && !package.exists() {
        return Err(std::io::Error::other(format!("cannot write {}", folder.display())));
    }
    Ok(package)
}
