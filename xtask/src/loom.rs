//! `cargo xtask loom`: what threads and processes share without a lock, with every order in which they may see each other's writes.

use anyhow::Result;
use clap::Args;

use crate::steps::{cargo, step};

#[derive(Args)]
pub(crate) struct Loom {
    /// How often, at most, a thread is interrupted by another where it could go on. Each more takes many times as long.
    #[arg(long, default_value_t = 3)]
    preemptions: u32,
}

pub(crate) fn run(args: &Loom) -> Result<()> {
    let test = ["test", "--quiet", "--release", "-p", "wingbeat-collective", "--features", "loom", "--lib", "phase::"];
    let mut loom = cargo(&test)?;
    step("phases of a group", loom.env("LOOM_MAX_PREEMPTIONS", args.preemptions.to_string()))
}
