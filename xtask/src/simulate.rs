//! `cargo xtask simulate`: the scheduler in a world of pretended nodes, as fast as users run it. `cargo xtask explore`: owners,
//! nodes and the head in many small worlds.

use anyhow::Result;
use clap::Args;

use crate::steps::{cargo, step};

pub(crate) fn run(args: &[String]) -> Result<()> {
    let mut simulate = cargo(&["run", "--quiet", "--release", "-p", "wingbeat-head", "--example", "simulate", "--"])?;
    step("simulation", simulate.args(args))
}

/// A seed that fails is named, with the command that shows it.
#[derive(Args)]
pub(crate) struct Explore {
    /// The first seed.
    #[arg(long, default_value_t = 0)]
    first_seed: u64,
    /// How many seeds.
    #[arg(long, default_value_t = 20_000)]
    seeds: u64,
}

pub(crate) fn explore(args: &Explore) -> Result<()> {
    let mut explore = cargo(&["test", "--quiet", "-p", "wingbeat-process", "--lib", "simulator::tests::many"])?;
    explore.env("WINGBEAT_FIRST_SEED", args.first_seed.to_string()).env("WINGBEAT_SEEDS", args.seeds.to_string());
    step("exploration", &mut explore)
}
