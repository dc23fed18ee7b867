//! `cargo xtask simulate` and `explore`: real owners, real nodes and the real head in simulated clusters, large ones and many
//! small ones.

use anyhow::Result;
use clap::Args;

use crate::steps::{cargo, step};

/// A seed that fails is named, with the command that repeats it.
#[derive(Args)]
pub(crate) struct Simulate {
    /// The first seed.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// How many seeds, one after the other.
    #[arg(long, default_value_t = 1)]
    seeds: u64,
    /// Nodes.
    #[arg(long, default_value_t = 100)]
    nodes: u64,
    /// Events, of each seed, after which drivers begin no new programs and nothing breaks any more.
    #[arg(long, default_value_t = 100_000)]
    events: u64,
    /// No deaths, no broken connections, no lost contacts and no drains.
    #[arg(long)]
    no_faults: bool,
    /// Write everything that happens to stderr.
    #[arg(long)]
    trace: bool,
}

pub(crate) fn run(args: &Simulate) -> Result<()> {
    let test = ["test", "--quiet", "--release", "-p", "wingbeat-process", "--lib", "simulator::tests::large"];
    let mut simulate = cargo(&test)?;
    simulate.args(["--", "--exact", "--ignored", "--nocapture"]);
    for (name, value) in [("SEED", args.seed), ("SEEDS", args.seeds), ("NODES", args.nodes), ("EVENTS", args.events)] {
        simulate.env(format!("WINGBEAT_{name}"), value.to_string());
    }
    for (name, is_set) in [("NO_FAULTS", args.no_faults), ("TRACE", args.trace)] {
        let name = format!("WINGBEAT_{name}");
        match is_set {
            true => simulate.env(name, "1"),
            false => simulate.env_remove(name),
        };
    }
    step("simulation", &mut simulate)
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
