//! Python environments, from pinned requirements.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::room;
use crate::steps::{root, step};

/// What an environment takes while it is made.
const GIB: u64 = 5;

/// The interpreter of `.venv`, made if it is not there or was made from other requirements.
pub(crate) fn interpreter() -> Result<PathBuf> {
    // The requirements are complete: following torch's own would bring gigabytes that CPUs have no use for.
    environment(".venv", "python/requirements.txt", false)
}

/// The interpreter of an environment in the workspace's root, made if it is not there or was made from other
/// requirements. `complete`: with what the requirements themselves require.
pub(crate) fn environment(name: &str, requirements: &str, complete: bool) -> Result<PathBuf> {
    let root = root()?;
    let venv = root.join(name);
    let python = venv.join("bin/python");
    let stamp = venv.join("requirements.txt");
    let pinned = root.join(requirements);
    let wanted = std::fs::read_to_string(&pinned).with_context(|| format!("reading {requirements}"))?;
    if python.exists() && std::fs::read_to_string(&stamp).is_ok_and(|made| made == wanted) {
        return Ok(python);
    }
    let system = ["python3.11", "python3"].into_iter().find(|name| is_311(name));
    let Some(system) = system else { bail!("Python 3.11 is not on the PATH; install it and try again") };
    room::ensure(GIB, &root, "the Python environment")?;
    eprintln!("   making {name} from {requirements}; this downloads much once");
    step("python environment", Command::new(system).args(["-m", "venv", "--clear"]).arg(&venv))?;
    let mut pip = Command::new(&python);
    pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-cache-dir"]);
    if !complete {
        pip.arg("--no-deps");
    }
    step("python packages", pip.arg("-r").arg(&pinned))?;
    std::fs::write(stamp, wanted)?;
    Ok(python)
}

fn is_311(name: &str) -> bool {
    let output = Command::new(name).args(["-c", "import sys; print(sys.version_info[:2])"]).output();
    output.is_ok_and(|output| String::from_utf8_lossy(&output.stdout).trim() == "(3, 11)")
}
