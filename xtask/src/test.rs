//! `cargo xtask test`: everything that must hold before a change lands.

use std::process::Command;

use anyhow::Result;

use crate::compiling::compile;
use crate::steps::{cargo, root, step};
use crate::{package, python, room};

/// What the tests start as processes of their own.
const BUILT: [&str; 12] = [
    "build",
    "--quiet",
    "-p",
    "wingbeat-cli",
    "-p",
    "wingbeat-examples",
    "-p",
    "wingbeat-shapes",
    "-p",
    "wingbeat-chaos",
    "--bins",
    "--examples",
];

/// What all of it takes, from nothing, with the Python environment: measured.
const GIB: u64 = 24;

pub(crate) fn run(release: bool) -> Result<()> {
    if release {
        return of_release();
    }
    let root = root()?;
    if !root.join("target/debug/wingbeat").exists()
        && let Err(lacking) = room::ensure(GIB, &root, "what the tests build")
    {
        // It may do with less.
        eprintln!("   {lacking:#}");
    }
    step("formatting", cargo(&["fmt", "--all", "--check"])?.arg("--quiet"))?;
    compile("lints", &cargo(&["clippy", "--quiet", "--workspace", "--all-targets", "--", "-D", "warnings"])?)?;
    let mut documentation = cargo(&["doc", "--quiet", "--workspace", "--no-deps", "--features", "wingbeat/testing"])?;
    compile("documentation", documentation.env("RUSTDOCFLAGS", "-D warnings"))?;
    package::run(&package::Package::default())?;
    compile("the command and the examples", &cargo(&BUILT)?)?;
    let python = python::interpreter()?;
    let binary = root.join("target/debug/wingbeat");
    let tests = ["test", "--workspace", "--exclude", "xtask"];
    compile("build of the tests", cargo(&tests)?.args(["--quiet", "--no-run"]))?;
    let mut tests = cargo(&tests)?;
    let is_root = wingbeat_tests::is_root().is_ok();
    if !is_root {
        eprintln!("   not root: the tests of several machines and of other users are left out, and the chaos");
        tests.env("WINGBEAT_SKIP_HOSTS", "1");
    }
    // What somebody has in use on this machine is none of the tests'.
    step("tests", tests.env("WINGBEAT_CONTEXT", "none").env("WINGBEAT_BIN", &binary).env("WINGBEAT_PYTHON", &python))?;
    let mut soak = Command::new(root.join("target/debug/soak"));
    step("soak of a minute", soak.args(["--minutes", "1"]).env("WINGBEAT_BIN", &binary))?;
    if is_root {
        let mut chaos = Command::new(root.join("target/debug/chaos"));
        step("chaos of a minute", chaos.args(["--minutes", "1", "--seed", "1"]).env("WINGBEAT_BIN", &binary))?;
    }
    for (what, arguments) in
        [("python lints", &["ruff", "check", "--quiet", "--no-cache"][..]), ("python types", &["mypy"])]
    {
        let mut check = Command::new(&python);
        check.arg("-m").args(arguments).current_dir(root.join("python"));
        // It would write beside the sources.
        step(what, check.env("MYPY_CACHE_DIR", root.join("target/mypy")))?;
    }
    let mut pytest = Command::new(&python);
    pytest.args(["-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"]).current_dir(root.join("python"));
    pytest.env("WINGBEAT_BIN", &binary);
    step("python tests", &mut pytest)?;
    Ok(())
}

/// The clusters of real processes again, as fast as users run them.
fn of_release() -> Result<()> {
    let built =
        ["build", "--quiet", "--release", "-p", "wingbeat-cli", "-p", "wingbeat-examples", "--bins", "--examples"];
    compile("the command and the examples", &cargo(&built)?)?;
    let python = python::interpreter()?;
    let binary = root()?.join("target/release/wingbeat");
    let tests = ["test", "--release", "-p", "wingbeat-tests", "-p", "wingbeat", "-p", "wingbeat-train"];
    compile("build of the tests", cargo(&tests)?.args(["--quiet", "--no-run"]))?;
    let mut tests = cargo(&tests)?;
    step("tests of the release build", tests.env("WINGBEAT_BIN", &binary).env("WINGBEAT_PYTHON", &python))
}
