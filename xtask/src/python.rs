//! The Python environment: `.venv`, from pinned requirements.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::steps::{root, step};

/// The interpreter of `.venv`, made if it is not there or was made from other requirements.
pub(crate) fn interpreter() -> Result<PathBuf> {
    let root = root()?;
    let venv = root.join(".venv");
    let python = venv.join("bin/python");
    let stamp = venv.join("requirements.txt");
    let pinned = root.join("python/requirements.txt");
    let wanted = std::fs::read_to_string(&pinned).context("reading python/requirements.txt")?;
    if python.exists() && std::fs::read_to_string(&stamp).is_ok_and(|made| made == wanted) {
        return Ok(python);
    }
    let system = ["python3.11", "python3"].into_iter().find(|name| is_311(name));
    let Some(system) = system else { bail!("Python 3.11 is not on the PATH; install it and try again") };
    eprintln!("   making .venv from python/requirements.txt; this downloads some 2 GB once");
    step("python environment", Command::new(system).args(["-m", "venv", "--clear"]).arg(&venv))?;
    let mut pip = Command::new(&python);
    // The requirements are complete: following torch's own would bring gigabytes that CPUs have no use for.
    pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-cache-dir", "--no-deps", "-r"]);
    step("python packages", pip.arg(&pinned))?;
    std::fs::write(stamp, wanted)?;
    Ok(python)
}

fn is_311(name: &str) -> bool {
    let output = Command::new(name).args(["-c", "import sys; print(sys.version_info[:2])"]).output();
    output.is_ok_and(|output| String::from_utf8_lossy(&output.stdout).trim() == "(3, 11)")
}
