//! `cargo xtask miri`: the pure parts of the store under Miri.

use std::process::Command;

use anyhow::Result;
use clap::Args;

use crate::steps::{root, step};

/// It needs `rustup component add --toolchain nightly miri rust-src`.
#[derive(Args)]
pub(crate) struct Miri {
    /// How many random programs each property is tried with. One takes seconds.
    #[arg(long, default_value_t = 4)]
    cases: u32,
}

/// What knows neither shared memory nor the disk.
const PURE: [&str; 3] = ["allocator::", "ranges::", "table::"];

pub(crate) fn run(args: &Miri) -> Result<()> {
    // By rustup, since the `cargo` that runs this is of one toolchain.
    let mut miri = Command::new("rustup");
    miri.args(["run", "nightly", "cargo", "miri", "test", "-p", "wingbeat-store", "--lib", "--"]).args(PURE);
    miri.current_dir(root()?).env_remove("RUSTUP_TOOLCHAIN").env_remove("CARGO").env_remove("RUSTC");
    step("store", miri.env("PROPTEST_CASES", args.cases.to_string()).env("MIRIFLAGS", "-Zmiri-disable-isolation"))
}
