//! `cargo xtask <command>`: what developers run.

mod bench;
mod chaos;
mod compiling;
mod demo;
mod docs;
mod fuzz;
mod loom;
mod matrix;
mod miri;
mod package;
mod python;
mod room;
mod simulate;
mod soak;
mod steps;
mod test;

use std::process::ExitCode;

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
    /// How fast it is on this machine, beside what the machine can do and what peers do.
    Bench(bench::Bench),
    /// The guide as a book in target/book, where mdBook is installed; and where its pages are.
    Docs,
    /// A large simulated cluster of real owners, real nodes and the real head, with faults: `--nodes 10000 --events 1000000`.
    Simulate(simulate::Simulate),
    /// Small simulated clusters of real owners, real nodes and the real head, each with and without faults; the tests run 3,400.
    Explore(simulate::Explore),
    /// A mixed load with checks on a cluster of real processes, and a comparison of what they hold before and after.
    Soak(soak::Soak),
    /// A cluster of several machines under load, while processes are killed and stopped, links cut and slowed, and disks filled.
    /// Needs root.
    Chaos(chaos::Chaos),
    /// Clusters of real processes in which each kind of message is lost, repeated, late, or the last of its connection.
    Matrix(matrix::Matrix),
    /// What members of a group share without a lock, in every order in which they may see each other's writes.
    Loom(loom::Loom),
    /// The pure parts of the store, and how values are written and read, under Miri.
    Miri(miri::Miri),
    /// The crates as they would be published: whether each is complete. Nothing is published.
    Package(package::Package),
    /// The decoders of outside bytes and the handshake, with libFuzzer. Needs a C++ compiler.
    Fuzz(fuzz::Fuzz),
    /// Formatting, lints, unit and doc tests, clusters of real processes, a minute of the soak, a minute of chaos, Python.
    Test {
        /// The clusters of real processes alone, of the release build.
        #[arg(long)]
        release: bool,
    },
}

fn main() -> ExitCode {
    let done = match Cli::parse().command {
        Command::Bench(bench) => bench::run(&bench),
        Command::Chaos(chaos) => chaos::run(&chaos),
        Command::Demo => demo::run(),
        Command::Docs => docs::run(),
        Command::Explore(explore) => simulate::explore(&explore),
        Command::Fuzz(fuzz) => fuzz::run(&fuzz),
        Command::Loom(loom) => loom::run(&loom),
        Command::Matrix(matrix) => matrix::run(&matrix),
        Command::Miri(miri) => miri::run(&miri),
        Command::Package(package) => package::run(&package),
        Command::Simulate(simulate) => simulate::run(&simulate),
        Command::Soak(soak) => soak::run(&soak),
        Command::Test { release } => test::run(release),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
