//! The head's decisions alone, in a world of pretended nodes with faults. `cargo xtask simulate` runs real nodes and owners, too.

use std::process::ExitCode;
use std::time::Instant;

use clap::Parser;
use wingbeat_head::simulator::{self, Config};

/// Run the scheduler in a simulated cluster with faults, from a seed, and check after every event what must hold.
///
///     simulate --seed 1 --nodes 10000 --events 1000000
///     simulate --seeds 500 --nodes 6 --events 2000 --thorough
#[derive(Parser)]
#[command(verbatim_doc_comment)]
struct Simulate {
    /// The first seed.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// How many seeds, one after the other.
    #[arg(long, default_value_t = 1)]
    seeds: u64,
    /// Nodes.
    #[arg(long, default_value_t = 100)]
    nodes: usize,
    /// Events that the head takes in, of each seed.
    #[arg(long, default_value_t = 100_000)]
    events: u64,
    /// No deaths, no broken links, no lost or repeated messages, and no restarts of the head.
    #[arg(long)]
    no_faults: bool,
    /// Check everything after every event, and not only what it touched. For small clusters.
    #[arg(long)]
    thorough: bool,
    /// Write every event and what the head did about it to stderr.
    #[arg(long)]
    trace: bool,
}

fn main() -> ExitCode {
    let args = Simulate::parse();
    let begun = Instant::now();
    for seed in args.seed..args.seed + args.seeds {
        let config = Config {
            seed,
            nodes: args.nodes,
            events: args.events,
            faults: !args.no_faults,
            thorough: args.thorough,
            trace: args.trace,
        };
        let report = match simulator::run(config) {
            Ok(report) => report,
            Err(failure) => {
                eprintln!("error: {failure}");
                return ExitCode::FAILURE;
            }
        };
        let seconds = report.deciding.as_secs_f64();
        println!(
            "seed {seed}: {} events, {} decisions ({} tasks, {} actors, {} groups placed, {} nodes lost, {} restarts)",
            report.events,
            report.decisions,
            report.tasks,
            report.actors,
            report.groups,
            report.nodes_lost,
            report.restarts
        );
        println!(
            "  the head took {seconds:.2} s: {:.0} events/s, {:.0} decisions/s",
            report.events as f64 / seconds,
            report.decisions as f64 / seconds
        );
    }
    println!("invariants: ok ({:.1} s in all)", begun.elapsed().as_secs_f64());
    ExitCode::SUCCESS
}
