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
    /// Who sent the last item, and who did before that one. What an earlier attempt has sent may come late, between items of a later one.
    senders: [Option<ProcessId>; 2],
    pub waker: Option<Waker>,
    /// There is no consumer any more. The stream is gone when it is over, too.
    is_forgotten: bool,
    left: Vec<Left>,
}

impl State {
    /// Somebody has sent an item.
    pub(super) fn is_sent_by(&mut self, sender: ProcessId) {
        let [last, before] = &mut self.senders;
        if *last != Some(sender) {
            *before = last.replace(sender);
        }
    }

    /// Those who are to know how many items were taken: who sends them is among these.
    pub(crate) fn senders(&self) -> impl Iterator<Item = ProcessId> + use<> {
        self.senders.into_iter().flatten()
    }
}

/// Where an attempt that counts no more may have stored items that were never announced: a few from the beginning of the stream,
/// where it began, and a few after those that were taken, as far as it knew. They can be deleted when no other attempt writes items
/// any more.
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
    /// There is no consumer any more, or the stream has failed and what it has left may be deleted already.
    Nowhere,
}

impl Left {
    /// The indices of what may be there, of an attempt that was never more than `most` ahead.
    pub(super) fn indices(&self, most: u32) -> impl Iterator<Item = u32> + use<> {
        let ahead = self.ahead.min(most);
        (0..ahead.min(self.taken)).chain(self.taken..self.taken.saturating_add(ahead))
    }
}

impl State {
    /// Whether the next item, or that there is none, is known.
    pub(crate) fn has_next(&self) -> bool {
        self.failed || self.items.contains_key(&self.taken) || self.count.is_some_and(|count| self.taken >= count)
    }

    fn is_over(&self) -> bool {
        self.failed || self.count.is_some()
    }

    pub(super) fn place_of(&self, index: u32) -> Place {
        if self.is_forgotten || self.failed {
            Place::Nowhere
        } else if index < self.taken {
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
    /// Those that have a consumer or are not over.
    cells: DashMap<TaskId, Arc<Cell>>,
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
        self.look(task, |state| {
            state.is_forgotten = true;
            if state.is_over() {
                self.is_gone(task, state);
            }
        });
    }

    /// An attempt that counts no more may have stored items there. Answers with that if no other attempt writes any.
    pub(super) fn left_over(&self, task: TaskId, ahead: u32, at: &StoreNode) -> Option<Left> {
        let left = |taken| Left { at: at.clone(), ahead, taken };
        let Some(cell) = self.cells.get(&task).map(|cell| cell.clone()) else {
            return self.ended_early.lock().iter().find(|(ended, _)| *ended == task).map(|(_, taken)| left(*taken));
        };
        let mut state = cell.lock();
        let left = left(state.taken);
        if state.is_over() {
            return Some(left);
        }
        // If its consumer is gone, its task was cancelled, but another attempt may be under way.
        state.left.push(left);
        None
    }

    #[cfg(test)]
    pub(crate) fn what_is_left(&self) -> Vec<String> {
        self.cells.iter().map(|cell| format!("the stream of {}", cell.key())).collect()
    }

    /// Whether nobody here consumes one.
    pub(super) fn are_over(&self) -> bool {
        self.cells.is_empty()
    }

    /// Looks at a stream without waking its consumer.
    pub(super) fn look(&self, task: TaskId, look: impl FnOnce(&mut State)) {
        if let Some(cell) = self.cells.get(&task).map(|cell| cell.clone()) {
            look(&mut cell.lock());
        }
    }

    fn change(&self, task: TaskId, change: impl FnOnce(&mut State)) {
        let mut waker = None;
        self.look(task, |state| {
            change(state);
            waker = state.waker.take();
        });
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// An item that has a place.
    pub(super) fn put(&self, task: TaskId, index: u32, item: Handle) {
        let mut item = Some(item);
        self.change(task, |state| {
            if let Place::Wanted = state.place_of(index)
                && let Some(item) = item.take()
            {
                state.items.insert(index, item);
            }
        });
        // Outside of the lock: it frees the object.
        drop(item);
    }

    /// Whether all items of a stream of so many have come, as far as anybody wants them.
    pub(super) fn has_all(&self, task: TaskId, count: u32) -> bool {
        let mut has_all = true;
        self.look(task, |state| {
            has_all = state.is_forgotten || state.items.len() >= count.saturating_sub(state.taken) as usize;
        });
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
            if state.is_forgotten {
                self.is_gone(task, state);
            }
        });
        left
    }

    /// It is over, and nobody consumes it. Whoever has found it before finds that in it.
    fn is_gone(&self, task: TaskId, state: &State) {
        if state.failed || state.count.is_none_or(|count| state.taken < count) {
            let mut ended = self.ended_early.lock();
            if ended.len() == ENDED_EARLY {
                ended.pop_front();
            }
            ended.push_back((task, state.taken));
        }
        self.cells.remove(&task);
    }

    pub(crate) fn end(&self, error: &Error) {
        let all: Vec<TaskId> = self.cells.iter().map(|cell| *cell.key()).collect();
        for task in all {
            // The nodes delete what an owner that is gone has left.
            drop(self.failed(task, error.clone()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_sends_items_hears_what_was_taken_though_an_earlier_attempts_come_late() {
        let (first, second, third) = (ProcessId(1), ProcessId(2), ProcessId(3));
        let mut state = State::default();
        for (sender, hear) in [
            (first, vec![first]),
            (second, vec![second, first]),
            (first, vec![first, second]),
            (first, vec![first, second]),
        ] {
            state.is_sent_by(sender);
            assert_eq!(state.senders().collect::<Vec<_>>(), hear);
        }
        state.is_sent_by(third);
        assert!(state.senders().any(|sender| sender == third));
    }
}
