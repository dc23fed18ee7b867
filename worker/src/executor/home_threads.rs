//! The threads of [`at_home`](super::at_home), as the queue knows them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::task::Waker;

use wingbeat_process::context::Execution;

/// What of the queue concerns tasks at home.
#[derive(Default)]
pub(super) struct AtHome {
    /// The number of the last thread.
    pub last: u64,
    /// Threads, and those of them that wait for a task.
    pub threads: usize,
    pub idle: usize,
    /// Those that have tasks under way and would take another, by number, and how each is told.
    pub takers: BTreeMap<u64, Waker>,
    /// The task that was sent here, while it runs.
    pub base: Option<Arc<Execution>>,
    /// Somebody looks in a moment whether all wait.
    pub is_watched: bool,
    /// Whether there was something to run when `Queue::look_for_stuck_threads` looked last, and nobody who took it.
    pub seems_stuck: bool,
}
