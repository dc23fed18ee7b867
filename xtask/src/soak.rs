//! `cargo xtask soak`: a mixed load for minutes or hours, and what it leaves behind.

use anyhow::Result;
use clap::Args;

use crate::compiling::compile;
use crate::steps::{cargo, root, step};

#[derive(Args)]
pub(crate) struct Soak {
    /// How long the load lasts.
    #[arg(long, default_value_t = 10.0)]
    minutes: f64,
    /// Which load: the same seed gives the same operations in the same order.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Training runs beside each other, while packages change, nodes come and go, and ranks and warm Pythons are killed.
    #[arg(long)]
    train: bool,
}

pub(crate) fn run(soak: &Soak) -> Result<()> {
    let built = ["build", "--release", "--quiet", "-p", "wingbeat-cli", "-p", "wingbeat-shapes", "--bins"];
    compile("release build", &cargo(&built)?)?;
    let release = root()?.join("target/release");
    let mut command = match soak.train {
        true => {
            let mut python = std::process::Command::new(crate::python::interpreter()?);
            python.arg(root()?.join("python/soak/soak_train.py"));
            python
        }
        false => std::process::Command::new(release.join("soak")),
    };
    command.args(["--minutes", &soak.minutes.to_string(), "--seed", &soak.seed.to_string()]);
    step("soak", command.env("WINGBEAT_BIN", release.join("wingbeat")))
}
