//! Running other programs, and saying what is going on.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, bail};

/// The workspace's root.
pub(crate) fn root() -> Result<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().context("xtask lies in the workspace")?;
    Ok(root.to_owned())
}

/// `cargo` in the workspace's root.
pub(crate) fn cargo(args: &[&str]) -> Result<Command> {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(args).current_dir(root()?);
    Ok(command)
}

/// Runs a step, and says how long it took.
pub(crate) fn step(what: &str, command: &mut Command) -> Result<()> {
    timed(what, || {
        let status = command.status().with_context(|| format!("{what}: cannot start {:?}", command.get_program()))?;
        if !status.success() {
            bail!("{what}: failed ({status})");
        }
        Ok(())
    })
}

/// Says what begins, and how long it took.
pub(crate) fn timed(what: &str, run: impl FnOnce() -> Result<()>) -> Result<()> {
    eprintln!("── {what}");
    let begun = Instant::now();
    run()?;
    eprintln!("   {what}: ok in {:.1} s", begun.elapsed().as_secs_f64());
    Ok(())
}
