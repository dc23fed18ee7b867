//! What is done to a cluster. Plain data.

use std::fmt;
use std::time::Duration;

/// The nodes of a cluster, each on a machine of its own: 1 to 4. The head is on machine 0.
pub const NODES: usize = 4;

/// The machine of each driver. The first shares nothing with a node; the others lie beside one.
pub const DRIVER_MACHINES: [usize; 3] = [NODES + 1, 1, 2];

/// Machines: that of the head, of each node, and of a driver alone.
pub const MACHINES: usize = NODES + 2;

/// A process of a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// The head.
    Head,
    /// The daemon of a node, by its machine.
    Node(usize),
    /// One of the two guards of a node: the one that starts worker processes, or its parent.
    Guard {
        /// The node's machine.
        node: usize,
        /// The parent.
        outer: bool,
    },
    /// A worker process of a node.
    WorkerProcess {
        /// The node's machine.
        node: usize,
        /// Which, of those that there are when it happens.
        pick: usize,
    },
    /// A driver, by its number.
    Driver(usize),
}

/// A disk that can be full.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Disk {
    /// The one to which this node spills.
    Spill(usize),
    /// The one with the head's journal.
    Journal,
}

/// One thing that goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// SIGKILL. A daemon or driver is started again after `away`.
    Kill {
        /// What is killed.
        target: Target,
        /// How long it is away.
        away: Duration,
    },
    /// SIGSTOP, and later SIGCONT.
    Stop {
        /// What is stopped.
        target: Target,
        /// How long.
        lasts: Duration,
    },
    /// Nothing reaches a machine, and nothing leaves it.
    Cut {
        /// The machine.
        machine: usize,
        /// How long.
        lasts: Duration,
    },
    /// What one machine sends to another vanishes.
    CutWay {
        /// The machine that sends.
        from: usize,
        /// The machine that hears nothing.
        to: usize,
        /// How long.
        lasts: Duration,
    },
    /// A machine's link is slow.
    Slow {
        /// The machine.
        machine: usize,
        /// How long.
        lasts: Duration,
    },
    /// Somebody else uses all memory that a node has, and a little more.
    Eat {
        /// The node.
        node: usize,
        /// How long.
        lasts: Duration,
    },
    /// A disk is full.
    Fill {
        /// The disk.
        disk: Disk,
        /// How long.
        lasts: Duration,
    },
}

impl Fault {
    /// Its kind, as the summary counts it.
    pub fn kind(&self) -> &'static str {
        match self {
            Fault::Kill { target: Target::Head, .. } => "head killed",
            Fault::Kill { target: Target::Node(_), .. } => "node killed",
            Fault::Kill { target: Target::Guard { .. }, .. } => "guard killed",
            Fault::Kill { target: Target::WorkerProcess { .. }, .. } => "worker process killed",
            Fault::Kill { target: Target::Driver(_), .. } => "driver killed",
            Fault::Stop { target: Target::Head, .. } => "head stopped",
            Fault::Stop { target: Target::Node(_), .. } => "node stopped",
            Fault::Stop { target: Target::Guard { .. }, .. } => "guard stopped",
            Fault::Stop { target: Target::WorkerProcess { .. }, .. } => "worker process stopped",
            Fault::Stop { target: Target::Driver(_), .. } => "driver stopped",
            Fault::Cut { .. } => "machine cut off",
            Fault::CutWay { .. } => "one way cut",
            Fault::Slow { .. } => "link slowed",
            Fault::Eat { .. } => "memory eaten",
            Fault::Fill { disk: Disk::Spill(_), .. } => "spill disk full",
            Fault::Fill { disk: Disk::Journal, .. } => "journal disk full",
        }
    }

    /// How long it lasts.
    pub fn lasts(&self) -> Duration {
        match self {
            Fault::Kill { away: lasts, .. }
            | Fault::Stop { lasts, .. }
            | Fault::Cut { lasts, .. }
            | Fault::CutWay { lasts, .. }
            | Fault::Slow { lasts, .. }
            | Fault::Eat { lasts, .. }
            | Fault::Fill { lasts, .. } => *lasts,
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} for {:.1?}", self.kind(), self.lasts())?;
        match self {
            Fault::Kill { target, .. } | Fault::Stop { target, .. } => write!(f, ": {target:?}"),
            Fault::Cut { machine, .. } | Fault::Slow { machine, .. } => write!(f, ": machine {machine}"),
            Fault::CutWay { from, to, .. } => write!(f, ": from machine {from} to {to}"),
            Fault::Eat { node, .. } => write!(f, ": node {node}"),
            Fault::Fill { disk, .. } => write!(f, ": {disk:?}"),
        }
    }
}
