//! `cargo xtask package`: the crates as they would be published, without publishing them.

use anyhow::Result;
use clap::Args;

use crate::compiling::compile;
use crate::steps::{cargo, step};

#[derive(Args, Default)]
pub(crate) struct Package {
    /// Also build each crate from its package alone. Takes minutes.
    #[arg(long)]
    build: bool,
}

/// What a package lacks is an error here, and not on the day of a release: a version of what it depends on, and with `--build` a file that lies outside of
/// it. Asks the registry, as each build does that has not fetched its dependencies yet.
pub(crate) fn run(args: &Package) -> Result<()> {
    let mut publish = cargo(&["publish", "--quiet", "--workspace", "--dry-run", "--allow-dirty"])?;
    if !args.build {
        publish.arg("--no-verify");
    }
    step("packages", publish.args(["--target-dir", "target/packages"]))?;
    // What users import, as it is without the parts that may be left out.
    let client = cargo(&["check", "--quiet", "-p", "wingbeat", "--no-default-features"])?;
    compile("a client that only joins clusters", &client)
}
