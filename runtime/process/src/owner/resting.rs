//! Tasks that were ended because memory was short, and rest before they are tried again: what used the memory may be done by then, and
//! what needs too much of it does not come back at once, again and again.

use std::collections::BTreeMap;
use std::sync::Arc;

use wingbeat_core::TaskId;
use wingbeat_core::error::Error;

use crate::owner::dispatch::Task;
use crate::owner::wanted::Wanted;

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

    pub(crate) fn len(&self) -> usize {
        self.tasks.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.tasks.is_empty()
    }

    pub(crate) fn take_all(&mut self) -> impl Iterator<Item = Task> + use<> {
        std::mem::take(&mut self.tasks).into_values().map(|(task, _)| task)
    }
}
