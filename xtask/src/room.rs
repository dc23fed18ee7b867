//! Room on the disk, asked for before work that takes minutes and then needs it.

use std::path::Path;

use anyhow::{Context, Result, bail};

const GIB: u64 = 1 << 30;

/// There is room for so many GiB more in this folder.
///
/// # Errors
/// There is not; with how much there is.
pub(crate) fn ensure(gib: u64, folder: &Path, what: &str) -> Result<()> {
    let disk = rustix::fs::statvfs(folder).with_context(|| format!("asking how full {} is", folder.display()))?;
    let free = disk.f_bavail * disk.f_frsize;
    if free < gib * GIB {
        bail!(
            "{what} needs {gib} GiB on the disk of {}, where {:.1} GiB are free: make room there, or build elsewhere",
            folder.display(),
            free as f64 / GIB as f64
        );
    }
    Ok(())
}
