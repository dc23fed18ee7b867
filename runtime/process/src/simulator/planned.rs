//! What processes plan to do, as data.

use wingbeat_core::spec::Outputs;
use wingbeat_core::{ProcessId, TaskId};

/// What a thread of a worker process does at some time.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum AtHome {
    /// It looks for a task to run at home.
    Take,
    /// It looks whether all that runs there waits.
    AllWait,
    /// It looks at what has waited for long.
    Waits,
}

/// What a process plans to do, after so many milliseconds, and tells its node.
pub(super) enum Planned {
    AtHome(u64, ProcessId, AtHome),
    LeftBehind(ProcessId, bool),
    TimesOut(TimesOut),
}

/// A task that may take a limited time.
pub(super) struct TimesOut {
    pub after: u64,
    pub at: ProcessId,
    pub task: TaskId,
    pub outputs: Outputs,
}
