//! Tasks that rest before they are tried again: those that were ended because memory was short, and those that have failed more than
//! once. What used the memory may be done by then, and what fails at once does not come back as often as the machine can run it.

use std::collections::BTreeMap;

use wingbeat_core::TaskId;
use wingbeat_core::error::Error;

use crate::owner::dispatch::Task;
use crate::owner::wanted::Wanted;

/// The tasks that rest, each with why, by when they have.
#[derive(Default)]
pub(crate) struct Resting {
    tasks: BTreeMap<(u64, TaskId), Rest>,
}

struct Rest {
    task: Task,
    why: Error,
    pause_ms: u64,
}

impl Resting {
    /// Takes in a task whose attempt has just ended with this.
    pub(crate) fn rests(&mut self, task: Task, why: Error, pause_ms: u64, now_ms: u64) {
        self.tasks.insert((now_ms + pause_ms, task.spec.id), Rest { task, why, pause_ms });
    }

    /// The next one that has rested.
    pub(crate) fn rested(&mut self, now_ms: u64) -> Option<Task> {
        let first = self.tasks.first_entry().filter(|first| first.key().0 <= now_ms)?;
        Some(first.remove().task)
    }

    /// In how many milliseconds there is one.
    pub(crate) fn next(&self, now_ms: u64) -> Option<u64> {
        self.tasks.first_key_value().map(|((until, _), _)| until.saturating_sub(now_ms))
    }

    /// The name of this task, why it rests, and for how many milliseconds in all.
    pub(crate) fn standing(&self, id: TaskId) -> Option<(String, String, u64)> {
        let (_, rest) = self.tasks.iter().find(|((_, other), _)| *other == id)?;
        Some((rest.task.name.to_string(), rest.why.to_string(), rest.pause_ms))
    }

    /// Takes out those that are to be cancelled.
    pub(crate) fn cancel(&mut self, wanted: &mut Wanted) -> Vec<Task> {
        let found: Vec<_> = self.tasks.keys().copied().filter(|(_, id)| wanted.take(*id).is_some()).collect();
        found.iter().filter_map(|key| self.tasks.remove(key)).map(|rest| rest.task).collect()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Task> {
        self.tasks.values().map(|rest| &rest.task)
    }

    pub(crate) fn len(&self) -> usize {
        self.tasks.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.tasks.is_empty()
    }

    pub(crate) fn take_all(&mut self) -> impl Iterator<Item = Task> + use<> {
        std::mem::take(&mut self.tasks).into_values().map(|rest| rest.task)
    }
}
