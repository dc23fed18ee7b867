//! `cargo xtask test`: everything that must hold before a change lands.

use std::process::Command;

use anyhow::Result;

use crate::python;
use crate::steps::{cargo, root, step};

pub(crate) fn run() -> Result<()> {
    step("formatting", cargo(&["fmt", "--all", "--check"])?.arg("--quiet"))?;
    step("lints", &mut cargo(&["clippy", "--quiet", "--workspace", "--all-targets", "--", "-D", "warnings"])?)?;
    step(
        "the command and the examples",
        &mut cargo(&["build", "--quiet", "-p", "wingbeat-cli", "-p", "wingbeat-examples", "--bins", "--examples"])?,
    )?;
    let python = python::interpreter()?;
    let binary = root()?.join("target/debug/wingbeat");
    let mut tests = cargo(&["test", "--workspace", "--exclude", "xtask"])?;
    step("tests", tests.env("WINGBEAT_BIN", &binary).env("WINGBEAT_PYTHON", &python))?;
    let mut pytest = Command::new(&python);
    pytest.args(["-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"]).current_dir(root()?.join("python"));
    step("python tests", &mut pytest)?;
    Ok(())
}
