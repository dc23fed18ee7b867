//! The head's decisions in a world of pretended nodes and drivers, from a seed.
//!
//! - `world`: time, and links that delay and repeat messages.
//! - `daemon` and `nodes`: nodes that start and end worker processes, slowly or not at all.
//! - `owner` and `owners`: drivers, and worker processes with tasks of their own.
//! - `chance`: what may happen at any time; `restart`: the head is started again.
//! - `checks`: what must hold after every step.
//!
//! The same seed gives the same run, so that a seed that fails is a complete report:
//!
//! ```text
//! cargo run --release -p wingbeat-head --example simulate -- --seed 17 --nodes 20 --events 5000
//! ```

mod chance;
mod checks;
mod daemon;
mod nodes;
mod owner;
mod owners;
mod restart;
mod world;

use std::time::Duration;

/// What to simulate.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// Where all chance comes from.
    pub seed: u64,
    /// Nodes at the beginning, and about as many all the time.
    pub nodes: usize,
    /// Events that the head takes in before everything is ended.
    pub events: u64,
    /// Whether nodes die, links break, messages are lost or repeated, and the head is started again.
    pub faults: bool,
    /// Whether all of the state is checked after every event, and not only what the event touched.
    pub thorough: bool,
    /// Whether every event and what the head did about it is written to stderr.
    pub trace: bool,
}

/// What happened.
#[derive(Clone, Copy, Debug, Default)]
pub struct Report {
    /// Events that the head took in.
    pub events: u64,
    /// Leases that it granted and bundles that it placed.
    pub decisions: u64,
    /// Time that it took for all of that.
    pub deciding: Duration,
    /// Tasks that were done.
    pub tasks: u64,
    /// Actors that were made.
    pub actors: u64,
    /// Placement groups that were placed.
    pub groups: u64,
    /// Nodes that died or were cut off.
    pub nodes_lost: u64,
    /// How often the head was started again from what it had written down.
    pub restarts: u64,
}

/// A rule that did not hold.
#[derive(Clone, Debug, thiserror::Error)]
#[error(
    "after event {event} of seed {}: {why}\nreproduce it with: cargo run --release -p wingbeat-head --example simulate -- --seed {} --nodes {} --events {}{}{}",
    .config.seed, .config.seed, .config.nodes, .config.events,
    if .config.faults { "" } else { " --no-faults" }, if .config.thorough { " --thorough" } else { "" }
)]
pub struct Failure {
    /// What was simulated.
    pub config: Config,
    /// After which event.
    pub event: u64,
    /// What is wrong.
    pub why: String,
}

/// Simulates, and checks after every event what must hold; at last everything is ended, and must be there again.
///
/// # Errors
/// The first rule that did not hold.
pub fn run(config: Config) -> Result<Report, Failure> {
    let mut world = world::World::new(config);
    world.run().map_err(|why| Failure { config, event: world.report.events, why })?;
    Ok(world.report)
}

#[cfg(test)]
mod tests;
