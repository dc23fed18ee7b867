//! `cargo xtask <command>`: what developers run.

mod demo;
mod python;
mod steps;
mod test;

use clap::{Parser, Subcommand};

/// What developers run.
#[derive(Parser)]
#[command(name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Build everything, start a small cluster, and run real work on it.
    Demo,
    /// Formatting, lints, unit and doc tests, clusters of real processes, Python.
    Test,
}

fn main() -> anyhow::Result<()> {
    match Cli::parse().command {
        Command::Demo => demo::run(),
        Command::Test => test::run(),
    }
}
