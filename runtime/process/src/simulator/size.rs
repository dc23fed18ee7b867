//! How large a large cluster is.

/// Idle worker processes are asked to exit after this long, in a small cluster.
pub(super) const IDLE: u64 = 60;
/// Each driver may reserve a CPU, and there has to be one more.
const FEWEST_NODES: u64 = 4;
/// Idle worker processes of some clusters are asked to exit after this long only.
const LONG_IDLE: u64 = 20_000;
/// After one step of so many, a driver does much at once: one program of two does.
pub(super) const BURST_EVERY: u32 = 40;

/// What there is in a large cluster.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Large {
    pub nodes: u64,
    /// Drivers at a time.
    pub drivers: u64,
    /// Happenings after which no new programs begin and nothing breaks any more.
    pub events: u64,
    /// After how long idle worker processes are asked to exit.
    pub idle: u64,
}

impl Large {
    /// Few drivers or many, and idle worker processes that end soon or late: others with every seed.
    pub(crate) fn new(seed: u64, nodes: u64, events: u64) -> Large {
        let (nodes, nodes_a_driver) = (nodes.max(FEWEST_NODES), [250, 100, 40][seed as usize % 3]);
        let idle = if seed.is_multiple_of(2) { IDLE } else { LONG_IDLE };
        Large { nodes, drivers: (nodes / nodes_a_driver).clamp(4, 250), events, idle }
    }

    /// How many tasks a driver submits at once, at most.
    pub(super) fn burst(&self) -> u64 {
        (self.nodes / 20).max(100)
    }
}
