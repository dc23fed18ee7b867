//! Streams that this process consumes: the items of tasks that are still running.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::task::Waker;

use dashmap::DashMap;
use parking_lot::Mutex;
use wingbeat_core::error::Error;
use wingbeat_core::value::StoreNode;
use wingbeat_core::{ProcessId, TaskId};

use crate::owner::object::Handle;

/// What the consumer has of a stream.
#[derive(Default)]
pub(crate) struct State {
    /// Items that arrived and were not taken. A second attempt sends the first ones again; those are dropped.
    pub items: BTreeMap<u32, Handle>,
    /// Number of items taken.
    pub taken: u32,
    /// Number of items in all, once known.
    pub count: Option<u32>,
    /// How it ended, if not well. Given after the last item.
    pub error: Option<Error>,
    pub failed: bool,
    /// Who sends the items.
    pub worker: Option<ProcessId>,
    pub waker: Option<Waker>,
    left: Vec<Left>,
}

/// Where an attempt that counts no more may have stored items that were never announced: a few after those that were taken. They
/// can be deleted when no other attempt writes items any more.
pub(crate) struct Left {
    pub at: StoreNode,
    /// How many may be there.
    pub ahead: u32,
    /// How many items had been taken.
    pub taken: u32,
}

/// What an item that arrives is to its stream.
pub(super) enum Place {
    /// It is the first of this index.
    Wanted,
    /// It is there already, and the consumer has not come to it.
    Arrived,
    /// The consumer has taken so many, and it is one of them.
    Taken(u32),
    /// There is no consumer any more.
    Nowhere,
}

impl State {
    fn is_over(&self) -> bool {
        self.failed || self.count.is_some()
    }

    pub(super) fn place_of(&self, index: u32) -> Place {
        if index < self.taken {
            Place::Taken(self.taken)
        } else if self.items.contains_key(&index) {
            Place::Arrived
        } else {
            Place::Wanted
        }
    }
}

/// A stream, shared by its consumer and by what arrives.
pub(crate) type Cell = Mutex<State>;

/// The streams that this process consumes.
#[derive(Default)]
pub(crate) struct Streams {
    cells: DashMap<TaskId, Arc<Cell>>,
    /// Of streams whose consumer is gone, and whose task is not done yet: how many items were taken, and what is left.
    abandoned: DashMap<TaskId, (u32, Vec<Left>)>,
    /// How many items were taken of the last streams that ended badly or were abandoned: a worker process that is killed may store
    /// an item after the news of its end.
    ended_early: Mutex<VecDeque<(TaskId, u32)>>,
}

/// So many of those are remembered.
const ENDED_EARLY: usize = 1_024;

impl Streams {
    /// A stream that is consumed from now on.
    pub(crate) fn begin(&self, task: TaskId) -> Arc<Cell> {
        let cell = Arc::new(Cell::default());
        self.cells.insert(task, cell.clone());
        cell
    }

    /// Nobody consumes it any more.
    pub(crate) fn forget(&self, task: TaskId) {
        self.look(task, |state| match state.is_over() {
            false => drop(self.abandoned.insert(task, (state.taken, std::mem::take(&mut state.left)))),
            true if state.failed => self.remember(task, state.taken),
            true => {}
        });
        let cell = self.cells.remove(&task);
        drop(cell);
    }

    /// An attempt that counts no more may have stored items there. Answers with that if no other attempt writes any.
    pub(super) fn left_over(&self, task: TaskId, ahead: u32, at: &StoreNode) -> Option<Left> {
        let left = |taken| Left { at: at.clone(), ahead, taken };
        if let Some(mut abandoned) = self.abandoned.get_mut(&task) {
            // Its task was cancelled, but another attempt may be under way.
            let left = left(abandoned.0);
            abandoned.1.push(left);
            return None;
        }
        let ended = self.ended_early.lock().iter().find(|(ended, _)| *ended == task).map(|(_, taken)| left(*taken));
        if ended.is_some() {
            return ended;
        }
        let mut now = None;
        self.look(task, |state| {
            let left = left(state.taken);
            match state.is_over() {
                true => now = Some(left),
                false => state.left.push(left),
            }
        });
        now
    }

    #[cfg(test)]
    pub(crate) fn what_is_left(&self) -> Vec<String> {
        let abandoned = self.abandoned.iter().map(|known| format!("what is left of the stream of {}", known.key()));
        self.cells.iter().map(|cell| format!("the stream of {}", cell.key())).chain(abandoned).collect()
    }

    /// Looks at a stream without waking its consumer.
    pub(super) fn look(&self, task: TaskId, look: impl FnOnce(&mut State)) {
        if let Some(cell) = self.cells.get(&task).map(|cell| cell.clone()) {
            look(&mut cell.lock());
        }
    }

    pub(super) fn change(&self, task: TaskId, change: impl FnOnce(&mut State)) -> bool {
        let Some(cell) = self.cells.get(&task).map(|cell| cell.clone()) else { return false };
        let mut state = cell.lock();
        change(&mut state);
        let waker = state.waker.take();
        drop(state);
        if let Some(waker) = waker {
            waker.wake();
        }
        true
    }

    /// Whether all items of a stream of so many have come, as far as anybody wants them.
    pub(super) fn has_all(&self, task: TaskId, count: u32) -> bool {
        let mut has_all = true;
        self.look(task, |state| has_all = state.items.len() >= count.saturating_sub(state.taken) as usize);
        has_all
    }

    /// All items were sent. Answers with what earlier attempts may have left.
    pub(super) fn ended(&self, task: TaskId, count: u32) -> Vec<Left> {
        self.over(task, |state| state.count = Some(count))
    }

    /// There will be no more items. Answers with what attempts may have left.
    pub(crate) fn failed(&self, task: TaskId, error: Error) -> Vec<Left> {
        self.over(task, |state| {
            if !state.is_over() {
                state.error = Some(error);
                state.failed = true;
            }
        })
    }

    fn over(&self, task: TaskId, change: impl FnOnce(&mut State)) -> Vec<Left> {
        let mut left = Vec::new();
        self.change(task, |state| {
            change(state);
            left = std::mem::take(&mut state.left);
        });
        if let Some((_, (taken, more))) = self.abandoned.remove(&task) {
            self.remember(task, taken);
            left.extend(more);
        }
        left
    }

    fn remember(&self, task: TaskId, taken: u32) {
        let mut ended = self.ended_early.lock();
        if ended.len() == ENDED_EARLY {
            ended.pop_front();
        }
        ended.push_back((task, taken));
    }

    pub(crate) fn end(&self, error: &Error) {
        let all: Vec<TaskId> = self.cells.iter().map(|cell| *cell.key()).collect();
        for task in all {
            // The nodes delete what an owner that is gone has left.
            drop(self.failed(task, error.clone()));
        }
        self.abandoned.clear();
    }
}
