//! Streams that this process consumes: the items of tasks that are still running.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::task::Waker;

use dashmap::DashMap;
use parking_lot::Mutex;
use wingbeat_core::error::Error;
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
}

impl Streams {
    /// A stream that is consumed from now on.
    pub(crate) fn begin(&self, task: TaskId) -> Arc<Cell> {
        let cell = Arc::new(Cell::default());
        self.cells.insert(task, cell.clone());
        cell
    }

    /// Nobody consumes it any more.
    pub(crate) fn forget(&self, task: TaskId) {
        let cell = self.cells.remove(&task);
        drop(cell);
    }

    #[cfg(test)]
    pub(crate) fn what_is_left(&self) -> Vec<String> {
        self.cells.iter().map(|cell| format!("the stream of {}", cell.key())).collect()
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

    pub(crate) fn ended(&self, task: TaskId, count: u32) {
        self.change(task, |state| state.count = Some(count));
    }

    pub(crate) fn failed(&self, task: TaskId, error: Error) {
        self.change(task, |state| {
            if state.count.is_none() && !state.failed {
                state.error = Some(error);
                state.failed = true;
            }
        });
    }

    pub(crate) fn end(&self, error: &Error) {
        let all: Vec<TaskId> = self.cells.iter().map(|cell| *cell.key()).collect();
        for task in all {
            self.failed(task, error.clone());
        }
    }
}
