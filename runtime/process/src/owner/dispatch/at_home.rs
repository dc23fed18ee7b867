//! Tasks that run in this very process: while a task waits for what it has submitted, its process runs that.
//!
//! The process takes them one at a time, the newest first, and goes on with the oldest when others ask for work: what was
//! submitted first has the most below it, and is worth a journey. So a recursion uses as many processes as there are CPUs, and goes
//! down in each of them. Whoever submits more as results come would wait for ever so for what it has submitted first. So where all that is ready has one
//! parent, and there is nothing to go down in, the oldest is first; and else now and then the oldest of the newest's siblings, or of all.

use std::collections::BTreeMap;
use std::sync::Arc;

use wingbeat_core::error::Error;
use wingbeat_core::spec::{Shape, Strategy, TaskSpec};
use wingbeat_core::{FunctionId, TaskId};

use super::{Action, Dispatch, LONG_NANOS, Queue, Settled, Task, lost_argument, smoothed, too_large};
use crate::owner::submission::Request;
use crate::owner::wanted::Wanted;

/// What is ready is left to this process for so long, if it has just taken something: then others are asked for, too.
const LEFT_MS: u64 = 2;
/// A process that has taken nothing for so long takes nothing more: the task that waited goes on.
const OPEN_MS: u64 = 10;

/// Whatever is newer, what has been at the front for so long is next, and one so often. Of so many at the front, as some may not run here.
const FRONT_MS: u64 = 1_000;
const FRONT: usize = 8;
/// Beside tasks of other parents, one of so many is the oldest of its siblings, as far back as so many.
const OLDEST_OF: u32 = 16;
const LOOK_BACK: usize = 4_096;

/// The tasks that run in this process, until their results are there.
#[derive(Default)]
pub(super) struct AtHome {
    tasks: BTreeMap<TaskId, Task>,
    /// Smoothed run times of such tasks, by function.
    average_nanos: BTreeMap<FunctionId, f64>,
    /// The process would run another one, and there was none.
    is_hungry: bool,
    /// When it took the last one, or was told that there is one.
    took_ms: Option<u64>,
    /// How many it took.
    taken: u32,
    /// When it took the one at the front of a queue.
    took_front_ms: u64,
}

impl AtHome {
    /// Whether the process has taken something lately, so that it is expected to go on.
    pub(super) fn is_open(&self, now_ms: u64) -> bool {
        self.took_ms.is_some_and(|took| now_ms < took + OPEN_MS)
    }

    /// Whether tasks of this function are short, as far as is known.
    fn is_short(&self, function: FunctionId) -> bool {
        self.average_nanos.get(&function).is_none_or(|nanos| *nanos < LONG_NANOS)
    }

    /// A task of this function took so long, here or elsewhere. One alone, which may have been the first, says little.
    pub(super) fn took(&mut self, function: FunctionId, ran_nanos: u64) {
        let average = self.average_nanos.entry(function).or_default();
        *average = smoothed(Some(*average), ran_nanos);
    }

    pub(super) fn knows(&self, function: FunctionId) -> bool {
        self.average_nanos.contains_key(&function)
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

    pub(super) fn take_all(&mut self) -> impl Iterator<Item = Task> + use<> {
        std::mem::take(&mut self.tasks).into_values()
    }

    /// Asks those to stop that are to be cancelled. One that is not asked, but ended by force, is over for those who wait for it: its
    /// process is this one, and lives on, so that it may run for a while yet.
    pub(super) fn cancel(&mut self, wanted: &mut Wanted, out: &mut Vec<Action>) {
        let found: Vec<(TaskId, bool)> =
            self.tasks.keys().filter_map(|id| wanted.take(*id).map(|force| (*id, force))).collect();
        for (id, force) in found {
            out.push(Action::CancelAtHome { task: id, force });
            if force && let Some(task) = self.tasks.remove(&id) {
                let error = Error::Cancelled { task: task.name.to_string() };
                out.push(Action::Fail { task, error });
            } else if let Some(task) = self.tasks.get_mut(&id) {
                task.cancelled = true;
            }
        }
    }
}

/// Where the next task is that may run in this process.
enum Next {
    None,
    /// Among the requests that were not taken in yet.
    News(usize),
    /// Ready, of this shape, at this place.
    Ready(Arc<Shape>, usize),
    /// The same, for it has been at the front for long.
    Front(Arc<Shape>, usize),
}

/// What there was to run in this process.
pub(crate) enum TakenHome {
    /// This, and whether [`Dispatch::next_tick`] is to be asked: it says nothing of this while nothing was taken.
    Task {
        spec: Arc<TaskSpec>,
        opens: bool,
    },
    /// There is a task, for others.
    NotThis,
    Nothing,
}

impl Queue {
    /// Whether its tasks are short. Those that take long have processes of their own: what starts one is nothing beside them.
    fn is_short(&self) -> bool {
        self.average_nanos.is_none_or(|nanos| nanos < LONG_NANOS)
    }

    /// How many of its tasks the process is expected to take itself.
    pub(super) fn left_to_home(&self, home: &AtHome, now_ms: u64) -> usize {
        let is_new = self.front_since_ms.is_none_or(|since| now_ms < since + LEFT_MS);
        if is_new && home.is_open(now_ms) { self.ready.len() } else { 0 }
    }
}

/// Whether a task may run in the process of the one that submitted it, as far as where and how it runs goes.
fn goes_home(task: &Task) -> bool {
    task.spec.shares_process && task.shape.strategy == Strategy::Default && task.shape.labels.is_empty()
}

impl Dispatch {
    /// The next task to run in this process, if there is one that `accepts` takes: the newest of those that nobody has taken in
    /// (`news`), or of those that are ready, or the oldest of its siblings. If there is none, [`Action::AtHome`] says when there is.
    ///
    /// Nothing else is decided here, so that any thread may call it: what is decided is done by one thread, in order.
    pub(crate) fn take_home(
        &mut self,
        news: &mut Vec<Request>,
        now_ms: u64,
        accepts: impl Fn(&TaskSpec) -> bool,
    ) -> TakenHome {
        let next = self.next_for_home(news, now_ms);
        let is_front = matches!(next, Next::Front(..));
        let taken = match next {
            Next::None => None,
            next if !accepts(&self.spec_of(&next, news)) => return TakenHome::NotThis,
            Next::News(at) => match news.remove(at) {
                Request::Task(task) => Some(task),
                _ => None,
            },
            Next::Ready(shape, at) | Next::Front(shape, at) => self.queues.get_mut(&shape).and_then(|queue| {
                self.touched.add(&shape, queue);
                if is_front {
                    self.at_home.took_front_ms = now_ms;
                }
                queue.ready.remove(at)
            }),
        };
        self.at_home.is_hungry = taken.is_none();
        let Some(task) = taken else { return TakenHome::Nothing };
        let opens = !self.at_home.is_open(now_ms);
        self.at_home.took_ms = Some(now_ms);
        self.at_home.taken = self.at_home.taken.wrapping_add(1);
        let spec = task.spec.clone();
        self.at_home.tasks.insert(spec.id, task);
        TakenHome::Task { spec, opens }
    }

    /// Whether there is a task to run in this process. If not, [`Action::AtHome`] says when there is.
    pub(crate) fn asks_for_home(&mut self, news: &[Request]) -> bool {
        let has_any = !matches!(self.next_for_home(news, 0), Next::None);
        self.at_home.is_hungry = !has_any;
        has_any
    }

    fn next_for_home(&self, news: &[Request], now_ms: u64) -> Next {
        if self.session_over.is_some() {
            return Next::None;
        }
        let may = |task: &Task| {
            let is_short = self.at_home.is_short(task.spec.function);
            is_short && goes_home(task) && lost_argument(&task.spec, &self.dead_nodes).is_none()
        };
        let waits_at_front = |queue: &Queue| {
            let since = queue.front_since_ms.filter(|_| queue.is_short())?.max(self.at_home.took_front_ms);
            let is_due = now_ms >= since + FRONT_MS;
            is_due.then(|| queue.ready.iter().take(FRONT).position(may)).flatten()
        };
        let mut fronts = self.queues.iter().filter_map(|(shape, queue)| Some((shape, waits_at_front(queue)?)));
        if let Some((shape, at)) = fronts.next() {
            return Next::Front(shape.clone(), at);
        }
        let wants_oldest = self.at_home.taken % OLDEST_OF == OLDEST_OF - 1;
        // Where the oldest of its siblings is that is to run before it.
        let elder_sibling = |newest: &Task, queue: &Queue| {
            let is_sibling = |task: &Task| task.spec.parent == newest.spec.parent && may(task);
            if queue.ready.front().is_some_and(is_sibling) {
                return Some(0);
            }
            let siblings = || queue.ready.iter().rev().take(LOOK_BACK).take_while(|task| is_sibling(task)).count();
            let count = if wants_oldest { siblings() } else { 0 };
            (count > 0).then(|| queue.ready.len() - count)
        };
        if let Some(Request::Task(task)) = news.last()
            && may(task)
            && self.queues.get(&task.shape).is_none_or(Queue::is_short)
            && too_large(&task.spec, &task.name).is_none()
        {
            return match self.queues.get(&task.shape).and_then(|queue| elder_sibling(task, queue)) {
                Some(at) => Next::Ready(task.shape.clone(), at),
                None => Next::News(news.len() - 1),
            };
        }
        let mut queues = self.queues.iter().filter(|(_, queue)| queue.is_short());
        let found =
            queues.find_map(|(shape, queue)| Some((shape, queue, queue.ready.back().filter(|task| may(task))?)));
        found.map_or(Next::None, |(shape, queue, newest)| {
            Next::Ready(shape.clone(), elder_sibling(newest, queue).unwrap_or(queue.ready.len() - 1))
        })
    }

    fn spec_of(&self, next: &Next, news: &[Request]) -> Arc<TaskSpec> {
        match next {
            Next::News(at) => match &news[*at] {
                Request::Task(task) => task.spec.clone(),
                _ => unreachable!("it was a task"),
            },
            Next::Ready(shape, at) | Next::Front(shape, at) => self.queues[shape].ready[*at].spec.clone(),
            Next::None => unreachable!("it is something"),
        }
    }

    /// The process takes nothing more for now: the task that waited goes on.
    pub(crate) fn home_is_closed(&mut self) {
        self.at_home.is_hungry = false;
    }

    /// Says that there is something to run here, if the process has asked for that.
    pub(super) fn offer_home(&mut self, now_ms: u64, out: &mut Vec<Action>) {
        if self.at_home.is_hungry && !matches!(self.next_for_home(&[], now_ms), Next::None) {
            self.at_home.is_hungry = false;
            self.at_home.took_ms = Some(now_ms);
            out.push(Action::AtHome);
        }
    }

    /// In how many milliseconds what is ready is too old to be left to this process.
    pub(super) fn left_until(&self, now_ms: u64) -> Option<u64> {
        let has_ready = || self.queues.values().any(|queue| !queue.ready.is_empty());
        (self.at_home.is_open(now_ms) && has_ready()).then_some(LEFT_MS)
    }

    /// A task that runs in this process has a result; none if it does not run here. Nothing follows for other tasks.
    pub(crate) fn finished_at_home(
        &mut self,
        id: TaskId,
        failed: Option<&Error>,
        ran_nanos: u64,
        now_ms: u64,
    ) -> Option<Settled> {
        let task = self.at_home.tasks.remove(&id)?;
        self.at_home.took(task.spec.function, ran_nanos);
        Some(self.settled(task, failed, now_ms))
    }
}

#[cfg(test)]
#[path = "at_home_tests.rs"]
mod tests;
