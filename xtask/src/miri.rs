//! `cargo xtask miri`: the pure parts of the store, and how values are written and read, under Miri.

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
    let of_store = [&["-p", "wingbeat-store", "--lib", "--"], &PURE[..]].concat();
    for (what, tests) in [("store", &of_store[..]), ("values", &["-p", "wingbeat-core", "--test", "values"])] {
        // By rustup, since the `cargo` that runs this is of one toolchain.
        let mut miri = Command::new("rustup");
        miri.args(["run", "nightly", "cargo", "miri", "test"]).args(tests);
        miri.current_dir(root()?).env_remove("RUSTUP_TOOLCHAIN").env_remove("CARGO").env_remove("RUSTC");
        step(what, miri.env("PROPTEST_CASES", args.cases.to_string()).env("MIRIFLAGS", "-Zmiri-disable-isolation"))?;
    }
    Ok(())
}
