//! Real owners, real nodes and the real head in a world of pretended machines and connections, from a seed.
//!
//! - `world`: time, and what happens next.
//! - `encoded`: a message is bytes on its way, as over real links, in every second seed.
//! - `side`: what an owner says, and what its process knows of others; `contacts`: links, and how contact is lost.
//! - `head`: to and from the head's decisions; `nodes`: nodes, and machines that start and end their worker processes
//!   and hold copies.
//! - `process`: a process with its owner; `queue`: what a worker process does with work; `at_home`: with tasks of its own; `planned`: later; `execution`: what
//!   runs.
//! - `site`, `actors`: what a program can do; `programs`: the random programs; `failing`: how tasks fail; `value`: what they pass, and how it is checked.
//! - `shapes`: what nodes have and programs ask for; `grants`: what the head has given, by its own words.
//! - `restarts`: the head dies, and is started again; `standing`: who knows the head; `standstill`: contact with it is cut, and machines
//!   stand still; `schedule`: what breaks when; `faults`: how; `memory`: there is not enough; `checks`: what must hold.
//! - `large`: clusters of thousands of nodes, which differ from the many small ones in what this says; `size`: how large.
//!
//! All is one thread, and the same seed gives the same run. One seed again, with all that happens on stderr:
//!
//! ```text
//! WINGBEAT_SEED=17 cargo test -p wingbeat-process --lib simulator::tests::one_seed
//! cargo xtask simulate --seed 1 --nodes 10000 --events 1000000
//! ```

mod actors;
mod at_home;
mod changed;
mod checks;
mod contacts;
mod encoded;
mod execution;
mod failing;
mod faults;
mod grants;
mod head;
mod large;
mod memory;
mod nodes;
mod planned;
mod process;
mod programs;
mod queue;
mod restarts;
mod schedule;
mod shapes;
mod side;
mod site;
mod size;
mod standing;
mod standstill;
mod tests;
mod value;
mod world;

pub(crate) use size::Large;

/// What to simulate.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Config {
    /// Where all chance comes from.
    pub seed: u64,
    /// Whether processes and nodes die, and contact is cut.
    pub faults: bool,
    /// Whether the head dies, and is started again.
    pub restarts: bool,
    /// Whether everything that happens is written to stderr.
    pub trace: bool,
    pub size: Size,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Size {
    /// Two or three nodes, and two drivers with a program each. Everything is checked after every step.
    Small,
    /// Thousands of nodes.
    Large(Large),
}

impl Config {
    pub(crate) fn small(seed: u64, faults: bool) -> Config {
        Config { seed, faults, restarts: faults, trace: false, size: Size::Small }
    }

    /// Whether messages are bytes on their way.
    fn encodes(&self) -> bool {
        self.seed.is_multiple_of(2)
    }

    /// Whether most tasks share their processes with what they submit, and submit much: in a quarter of the small clusters.
    fn shares_much(&self) -> bool {
        self.large().is_none() && (self.seed / 2).is_multiple_of(4)
    }

    fn large(&self) -> Option<Large> {
        match self.size {
            Size::Small => None,
            Size::Large(large) => Some(large),
        }
    }
}

/// What happened, counted. A field for each kind of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Report {
    pub happenings: u64,
    /// What the head tells everybody about nodes. It is no happening: one node that dies would be ten thousand.
    pub notices: u64,
    /// How often the head was started again.
    pub restarts: u64,
    /// Programs of drivers that have ended.
    pub programs: u64,
    /// Worker processes that were started.
    pub workers: u64,
    pub tasks: u64,
    /// Those of them that ran in the process of the one that submitted them, and how often one was left behind there.
    pub at_home: u64,
    pub leftovers: u64,
    /// How often one was cancelled by force while it ran there.
    pub given_up: u64,
    pub calls: u64,
    pub items: u64,
    pub values: u64,
    pub errors: u64,
    pub cancels: u64,
    pub cuts: u64,
    /// Processes that were ended because memory was short.
    pub shortages: u64,
    /// Tasks that took longer than they might.
    pub timeouts: u64,
    /// How often a store was full for some time.
    pub fills: u64,
    /// How often something stood still, or had no contact with the head.
    pub standstills: u64,
    pub deaths: u64,
    pub ended_at: u64,
}
