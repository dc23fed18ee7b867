//! `cargo xtask matrix`: every kind of message lost, its answer lost, repeated, late, and with the connection cut after it.

use anyhow::Result;
use clap::Args;

use crate::compiling::compile;
use crate::steps::{cargo, root, step};

/// What each fault is says `wingbeat_net::faults`, and which program sends a message `tests/tests/matrix`.
#[derive(Args)]
pub(crate) struct Matrix {
    /// Only kinds whose name contains this, such as `HeadMessage` or `PeerMessage::Results`.
    #[arg(long, default_value = "")]
    kind: String,
    /// Only this fault: lose, lose-answer, repeat, delay or cut.
    #[arg(long, default_value = "")]
    fault: String,
    /// Do it to the message of this number of each process, from 1. Later ones are not sent for certain.
    #[arg(long, default_value_t = 1)]
    at: u32,
    /// How many cells run at a time.
    #[arg(long, default_value_t = 4)]
    jobs: u32,
}

pub(crate) fn run(args: &Matrix) -> Result<()> {
    compile("the command", &cargo(&["build", "--quiet", "-p", "wingbeat-cli"])?)?;
    let mut matrix = cargo(&["test", "--quiet", "-p", "wingbeat-tests", "--test", "matrix", "every_cell"])?;
    matrix
        .args(["--", "--exact", "--ignored", "--nocapture"])
        .env("WINGBEAT_BIN", root()?.join("target/debug/wingbeat"));
    matrix.env("WINGBEAT_MATRIX", format!("{} {}", args.kind, args.fault));
    for (name, value) in [("AT", args.at), ("JOBS", args.jobs)] {
        matrix.env(format!("WINGBEAT_MATRIX_{name}"), value.to_string());
    }
    step("matrix", &mut matrix)
}
