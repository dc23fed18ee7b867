//! Tasks that run in this very process: while a task waits for what it has submitted, its process runs that.
//!
//! The process takes them one at a time, the newest first, and goes on with the oldest when others ask for work: what was
//! submitted first has the most below it, and is worth a journey. So a recursion uses as many processes as there are CPUs, and goes
//! down in each of them.

use std::collections::BTreeMap;
use std::sync::Arc;

use wingbeat_core::TaskId;
use wingbeat_core::error::Error;
use wingbeat_core::spec::{Shape, Strategy, TaskSpec};

use super::{Action, Dispatch, LONG_NANOS, Queue, Task, lost_argument};
use crate::owner::wanted::Wanted;

/// What is ready is left to this process for so long, if it has just taken something: then others are asked for, too.
const LEFT_MS: u64 = 2;
/// A process that has taken nothing for so long takes nothing more: the task that waited goes on.
const OPEN_MS: u64 = 10;

/// The tasks that run in this process, until their results are there.
#[derive(Default)]
pub(super) struct AtHome {
    tasks: BTreeMap<TaskId, Task>,
    /// The process would run another one, and there was none.
    is_hungry: bool,
    /// When it took the last one, or was told that there is one.
    took_ms: Option<u64>,
}

impl AtHome {
    /// Whether the process has taken something lately, so that it is expected to go on.
    pub(super) fn is_open(&self, now_ms: u64) -> bool {
        self.took_ms.is_some_and(|took| now_ms < took + OPEN_MS)
    }

    pub(super) fn len(&self) -> usize {
        self.tasks.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.tasks.is_empty()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Task> {
        self.tasks.values()
    }

    pub(super) fn get(&self, id: TaskId) -> Option<&Task> {
        self.tasks.get(&id)
    }

    pub(super) fn remove(&mut self, id: TaskId) -> Option<Task> {
        self.tasks.remove(&id)
    }

    pub(super) fn take_all(&mut self) -> impl Iterator<Item = Task> + use<> {
        std::mem::take(&mut self.tasks).into_values()
    }

    /// Asks those to stop that are to be cancelled. One that is not asked, but ended by force, is over for those who wait for it: its
    /// process is this one, and lives on, so that it may run for a while yet.
    pub(super) fn cancel(&mut self, wanted: &mut Wanted, out: &mut Vec<Action>) {
        let found: Vec<(TaskId, bool)> =
            self.tasks.keys().filter_map(|id| wanted.take(*id).map(|force| (*id, force))).collect();
        for (id, force) in found {
            out.push(Action::CancelAtHome { task: id });
            if force && let Some(task) = self.tasks.remove(&id) {
                let error = Error::Cancelled { task: task.name.to_string() };
                out.push(Action::Fail { task, error });
            } else if let Some(task) = self.tasks.get_mut(&id) {
                task.cancelled = true;
            }
        }
    }
}

impl Queue {
    /// Whether its newest task may run in this process. Those that take long have processes of their own: what starts one is nothing
    /// beside them, and who waits goes on as soon as it can.
    fn has_for_home(&self, shape: &Shape) -> bool {
        let goes_anywhere = shape.strategy == Strategy::Default && shape.labels.is_empty();
        let is_short = self.average_nanos.is_none_or(|nanos| nanos < LONG_NANOS);
        goes_anywhere && is_short && self.ready.back().is_some_and(|task| task.spec.shares_process)
    }

    /// How many of its tasks the process is expected to take itself.
    pub(super) fn left_to_home(&self, home: &AtHome, now_ms: u64) -> usize {
        let is_new = self.front_since_ms.is_none_or(|since| now_ms < since + LEFT_MS);
        if is_new && home.is_open(now_ms) { self.ready.len() } else { 0 }
    }
}

impl Dispatch {
    /// The next task to run in this process, if there is one. Otherwise [`Action::AtHome`] says when there is.
    /// Answers also whether [`Dispatch::left_until`] is to be asked: it was not while nothing was taken.
    pub(crate) fn take_home(&mut self, now_ms: u64) -> Option<(Arc<TaskSpec>, bool)> {
        let task = self.next_at_home();
        self.at_home.is_hungry = task.is_none();
        let task = task?;
        let opens = !self.at_home.is_open(now_ms);
        self.at_home.took_ms = Some(now_ms);
        let spec = task.spec.clone();
        self.at_home.tasks.insert(spec.id, task);
        Some((spec, opens))
    }

    fn next_at_home(&mut self) -> Option<Task> {
        if self.session_over.is_some() {
            return None;
        }
        let (_, queue) = self.queues.iter_mut().find(|(shape, queue)| queue.has_for_home(shape))?;
        let newest = queue.ready.back()?;
        // Another lease has it made again.
        if lost_argument(&newest.spec, &self.dead_nodes).is_some() {
            return None;
        }
        queue.ready.pop_back()
    }

    /// Whether there is a task to run in this process. If not, [`Action::AtHome`] says when there is.
    pub(crate) fn asks_for_home(&mut self) -> bool {
        let has_any = self.session_over.is_none() && self.queues.iter().any(|(shape, queue)| queue.has_for_home(shape));
        self.at_home.is_hungry = !has_any;
        has_any
    }

    /// The process takes nothing more for now: the task that waited goes on.
    pub(crate) fn home_is_closed(&mut self) {
        self.at_home.is_hungry = false;
    }

    /// Says that there is something to run here, if the process has asked for that.
    pub(super) fn offer_home(&mut self, now_ms: u64, out: &mut Vec<Action>) {
        if self.at_home.is_hungry && self.queues.iter().any(|(shape, queue)| queue.has_for_home(shape)) {
            self.at_home.is_hungry = false;
            self.at_home.took_ms = Some(now_ms);
            out.push(Action::AtHome);
        }
    }

    /// In how many milliseconds what is ready is too old to be left to this process.
    pub(crate) fn left_until(&self, now_ms: u64) -> Option<u64> {
        let has_ready = || self.queues.values().any(|queue| !queue.ready.is_empty());
        (self.at_home.is_open(now_ms) && has_ready()).then_some(LEFT_MS)
    }
}
