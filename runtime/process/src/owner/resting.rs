//! Tasks that were ended because memory was short, and rest before they are tried again: what used the memory may be done by then, and
//! what needs too much of it does not come back at once, again and again.

use std::collections::BTreeMap;
use std::sync::Arc;

use wingbeat_core::TaskId;
use wingbeat_core::error::Error;

use crate::owner::dispatch::Task;
use crate::owner::wanted::Wanted;

/// How often a task is tried again after it was ended because memory was short, if nothing is said. With the pauses, one that never
/// fits fails after 45 s and the time that its attempts take.
pub(crate) const MEMORY_RETRIES: u32 = 8;
/// The first pause in milliseconds; each later one is twice as long as that before, up to the limit.
const PAUSE_MS: u64 = 500;
const PAUSE_LIMIT_MS: u64 = 10_000;

/// How often a task may still be tried again after it was ended because memory was short. Apart from its other retries: it has not
/// failed, and may have been in the way of others only.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct MemoryRetries {
    left: u32,
    used: u32,
}

impl MemoryRetries {
    /// So many. A task that may not run twice has none.
    pub(crate) fn of(most: u32, retries: u32) -> MemoryRetries {
        MemoryRetries { left: if retries == 0 { 0 } else { most }, used: 0 }
    }

    /// Whether there are any.
    pub(crate) fn has_any(self) -> bool {
        self.left > 0
    }

    /// One less, after a pause of so many milliseconds.
    fn take(&mut self) -> u64 {
        let pause = (PAUSE_MS << self.used.min(10)).min(PAUSE_LIMIT_MS);
        (self.left, self.used) = (self.left.saturating_sub(1), self.used.saturating_add(1));
        pause
    }
}

/// The tasks that rest, each with why, by when they have.
#[derive(Default)]
pub(crate) struct Resting {
    tasks: BTreeMap<(u64, TaskId), (Task, Error)>,
}

impl Resting {
    /// Takes in a task that was just ended for this.
    pub(crate) fn rests(&mut self, mut task: Task, why: Error, now_ms: u64) {
        let pause = task.memory_retries.take();
        let spec = Arc::make_mut(&mut task.spec);
        spec.attempt += 1;
        spec.yields_memory = task.memory_retries.has_any();
        let key = (now_ms + pause, spec.id);
        self.tasks.insert(key, (task, why));
    }

    /// The next one that has rested.
    pub(crate) fn rested(&mut self, now_ms: u64) -> Option<Task> {
        let first = self.tasks.first_entry().filter(|first| first.key().0 <= now_ms)?;
        Some(first.remove().0)
    }

    /// In how many milliseconds there is one.
    pub(crate) fn next(&self, now_ms: u64) -> Option<u64> {
        self.tasks.first_key_value().map(|((until, _), _)| until.saturating_sub(now_ms))
    }

    /// The name of this task, and why it rests.
    pub(crate) fn standing(&self, id: TaskId) -> Option<(String, String)> {
        let (task, why) = self.tasks.iter().find(|((_, other), _)| *other == id)?.1;
        Some((task.name.to_string(), why.to_string()))
    }

    /// Takes out those that are to be cancelled.
    pub(crate) fn cancel(&mut self, wanted: &mut Wanted) -> Vec<Task> {
        let found: Vec<_> = self.tasks.keys().copied().filter(|(_, id)| wanted.take(*id).is_some()).collect();
        found.iter().filter_map(|key| self.tasks.remove(key)).map(|(task, _)| task).collect()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Task> {
        self.tasks.values().map(|(task, _)| task)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.tasks.is_empty()
    }

    pub(crate) fn take_all(&mut self) -> impl Iterator<Item = Task> + use<> {
        std::mem::take(&mut self.tasks).into_values().map(|(task, _)| task)
    }
}
