//! The time limits of tasks and calls that are not done.

use std::sync::atomic::{AtomicUsize, Ordering};

use dashmap::DashMap;
use wingbeat_core::TaskId;

/// Stops a timer that runs.
pub(crate) type Stop = Box<dyn FnOnce() + Send + Sync>;

/// The timers of tasks and calls that are not done. Each ends with its task.
#[derive(Default)]
pub(crate) struct Timeouts {
    timers: DashMap<TaskId, Stop>,
    /// As many as there are, for results that have none.
    count: AtomicUsize,
}

impl Timeouts {
    /// `start` starts the timer of a task that was not submitted yet. The timer cannot end before it is known here.
    pub(crate) fn begin(&self, task: TaskId, start: impl FnOnce() -> Stop) {
        self.count.fetch_add(1, Ordering::Release);
        self.timers.entry(task).or_insert_with(start);
    }

    /// The task is done, or its time is over. Whether its timer still ran.
    pub(crate) fn end(&self, task: TaskId) -> bool {
        if self.count.load(Ordering::Acquire) == 0 {
            return false;
        }
        let Some((_, stop)) = self.timers.remove(&task) else { return false };
        self.count.fetch_sub(1, Ordering::Release);
        stop();
        true
    }
}
