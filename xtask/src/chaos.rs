//! `cargo xtask chaos`: a cluster of several machines under load, while everything that can break is broken.

use anyhow::Result;
use clap::Args;

use crate::compiling::compile;
use crate::steps::{cargo, root, step};

#[derive(Args)]
pub(crate) struct Chaos {
    /// How long faults happen.
    #[arg(long, default_value_t = 10.0)]
    minutes: f64,
    /// Which faults and which programs: the same seed chooses the same.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// So many seeds, one after the other, from the first.
    #[arg(long, default_value_t = 1)]
    seeds: u64,
    /// Have every process write down what it takes in, for `wingbeat replay`. It takes gigabytes.
    #[arg(long)]
    record: bool,
}

pub(crate) fn run(chaos: &Chaos) -> Result<()> {
    let built = ["build", "--release", "--quiet", "-p", "wingbeat-cli", "-p", "wingbeat-chaos", "--bins"];
    compile("release build", &cargo(&built)?)?;
    let release = root()?.join("target/release");
    for seed in chaos.seed..chaos.seed + chaos.seeds {
        let mut command = std::process::Command::new(release.join("chaos"));
        command.args(["--minutes", &chaos.minutes.to_string(), "--seed", &seed.to_string()]);
        if chaos.record {
            command.arg("--record");
        }
        step(&format!("chaos, seed {seed}"), command.env("WINGBEAT_BIN", release.join("wingbeat")))?;
    }
    Ok(())
}
