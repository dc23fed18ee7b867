//! Streams: the items of a task that is still running, as its consumer sees them.

use std::collections::BTreeMap;
use std::future::Future;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use dashmap::DashMap;
use parking_lot::Mutex;
use wingbeat_core::error::Error;
use wingbeat_core::spec::Outputs;
use wingbeat_core::value::ObjectValue;
use wingbeat_core::{ActorId, ProcessId, TaskId};
use wingbeat_net::messages::PeerMessage;

use crate::get::Value;
use crate::object::Handle;
use crate::process::Process;
use crate::session::Session;
use crate::submission::Cancel;
use crate::waiting::Waiting;

#[derive(Default)]
struct State {
    /// Items that arrived and were not taken. A second attempt sends the first ones again; those are dropped.
    items: BTreeMap<u32, Handle>,
    /// Number of items taken.
    taken: u32,
    /// Number of items in all, once known.
    count: Option<u32>,
    /// How it ended, if not well. Given after the last item.
    error: Option<Error>,
    failed: bool,
    worker: Option<ProcessId>,
    waker: Option<Waker>,
}

/// What an item that arrives is to its stream.
enum Place {
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
    fn place_of(&self, index: u32) -> Place {
        if index < self.taken {
            Place::Taken(self.taken)
        } else if self.items.contains_key(&index) {
            Place::Arrived
        } else {
            Place::Wanted
        }
    }
}

pub(crate) struct Cell {
    state: Mutex<State>,
}

/// The streams that this process consumes.
#[derive(Default)]
pub(crate) struct Streams {
    cells: DashMap<TaskId, Arc<Cell>>,
}

impl Streams {
    /// Looks at a stream without waking its consumer.
    fn look(&self, task: TaskId, look: impl FnOnce(&mut State)) {
        if let Some(cell) = self.cells.get(&task).map(|cell| cell.clone()) {
            look(&mut cell.state.lock());
        }
    }

    fn change(&self, task: TaskId, change: impl FnOnce(&mut State)) -> bool {
        let Some(cell) = self.cells.get(&task).map(|cell| cell.clone()) else { return false };
        let mut state = cell.state.lock();
        change(&mut state);
        let waker = state.waker.take();
        drop(state);
        if let Some(waker) = waker {
            waker.wake();
        }
        true
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

impl Process {
    pub(crate) fn stream_item(self: &Arc<Self>, from: ProcessId, task: TaskId, index: u32, value: ObjectValue) {
        let refs = value.refs().map(|refs| refs.ids.clone());
        self.place_item(from, task, index, value);
        // It holds the refs in the item until they are registered here, or until it hears that they are not needed.
        if let Some(refs) = refs {
            self.confirm(from, &refs, PeerMessage::ItemReceived(task.output(index)));
        }
    }

    fn place_item(self: &Arc<Self>, from: ProcessId, task: TaskId, index: u32, value: ObjectValue) {
        let mut place = Place::Nowhere;
        self.streams.look(task, |state| {
            state.worker = Some(from);
            place = state.place_of(index);
        });
        match place {
            Place::Wanted => {
                let session = Session::of(self);
                let handle = self.objects.insert(&session, task.output(index), None);
                let contained = self.hold_refs(&session, value.refs());
                self.resolve_object(handle.object(), value, contained);
                // Items arrive on this thread alone, so that nobody else has put one there.
                self.streams.change(task, |state| {
                    state.items.insert(index, handle);
                });
                return;
            }
            // Another attempt sends the first ones again. It must know how far the consumer is, or it would wait there for
            // room that nobody will make.
            Place::Taken(count) => {
                self.send_to(from, PeerMessage::StreamTaken { task, count });
            }
            Place::Arrived => {}
            Place::Nowhere => {
                self.send_to(from, PeerMessage::Cancel { task, force: false });
            }
        }
        // The first one's copies stand, as long as anybody needs them.
        if let ObjectValue::Stored(stored) = &value {
            let id = task.output(index);
            match self.objects.get(id).and_then(|object| object.value()) {
                Some(current) => self.delete_other_copies(id, stored, &current),
                None => self.delete_stored(id, stored),
            }
        }
    }
}

/// The consumer's end of a stream. Dropping it cancels the task.
pub struct StreamHandle {
    session: Result<Session, Option<Error>>,
    task: TaskId,
    producer: Option<ActorId>,
    cell: Arc<Cell>,
    /// An item that was taken, and whose value is not here: nobody has waited for it to the end, or it cannot be fetched now.
    /// It is still the next.
    next: Option<Handle>,
}

impl StreamHandle {
    pub(crate) fn new(session: &Session, task: TaskId, producer: Option<ActorId>) -> Self {
        let cell = Arc::new(Cell { state: Mutex::default() });
        session.process().streams.cells.insert(task, cell.clone());
        if let Some(error) = session.process().ended() {
            session.process().streams.failed(task, error.clone());
        }
        StreamHandle { session: Ok(session.clone()), task, producer, cell, next: None }
    }

    /// A stream that is nothing but an error.
    pub fn failed(error: Error) -> Self {
        let task = TaskId { owner: ProcessId(0), seq: 0 };
        StreamHandle {
            session: Err(Some(error)),
            task,
            producer: None,
            cell: Arc::new(Cell { state: Mutex::default() }),
            next: None,
        }
    }

    /// The task that makes the items.
    pub fn task(&self) -> TaskId {
        self.task
    }

    #[allow(clippy::should_implement_trait, clippy::manual_async_fn, reason = "it is asynchronous, and must be Send")]
    /// The next item, when it is there; none after the last. An error is the last item, but for one that says that the item
    /// cannot be fetched now: the next call tries again.
    pub fn next(&mut self) -> impl Future<Output = Option<Result<Value, Error>>> + Send + '_ {
        async move {
            let session = match &mut self.session {
                Ok(session) => session.clone(),
                Err(error) => return error.take().map(Err),
            };
            if self.next.is_none() {
                let mut waiting = None;
                let next = std::future::poll_fn(|cx| self.poll_next(&session, &mut waiting, cx)).await;
                drop(waiting);
                match next? {
                    Ok(handle) => self.next = Some(handle),
                    Err(error) => return Some(Err(error)),
                }
            }
            let value = session.value(self.next.as_ref()?).await;
            if !matches!(value, Err(Error::ObjectUnavailable { .. })) {
                self.next = None;
            }
            Some(value)
        }
    }

    fn poll_next(
        &self,
        session: &Session,
        waiting: &mut Option<Waiting>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Handle, Error>>> {
        let mut state = self.cell.state.lock();
        let index = state.taken;
        if let Some(handle) = state.items.remove(&index) {
            state.taken += 1;
            if let Some(worker) = state.worker {
                session.process().send_to(worker, PeerMessage::StreamTaken { task: self.task, count: state.taken });
            }
            return Poll::Ready(Some(Ok(handle)));
        }
        if state.count.is_some_and(|count| index >= count) {
            return Poll::Ready(None);
        }
        if state.failed {
            return Poll::Ready(state.error.take().map(Err));
        }
        let old = state.waker.replace(cx.waker().clone());
        drop(state);
        // Outside of the lock: it may be the last that holds this very stream.
        drop(old);
        if waiting.is_none() {
            *waiting = Waiting::begin(vec![(self.task, self.producer)]);
        }
        match waiting.as_mut().map(|waiting| waiting.poll_interrupted(cx)) {
            Some(Poll::Ready(error)) => Poll::Ready(Some(Err(error))),
            _ => Poll::Pending,
        }
    }

    /// Asks the task to stop.
    pub fn cancel(&self, force: bool) {
        if let Ok(session) = &self.session {
            let outputs = Outputs::Stream { ahead: 0 };
            session.process().submission.cancel(Cancel { task: self.task, outputs, force, again: false });
        }
    }
}

impl Drop for StreamHandle {
    fn drop(&mut self) {
        let Ok(session) = &self.session else { return };
        let cell = session.process().streams.cells.remove(&self.task);
        let (over, items) = {
            let mut state = self.cell.state.lock();
            (state.failed || state.count.is_some(), std::mem::take(&mut state.items))
        };
        drop((cell, items));
        if !over && !session.process().is_shut_down() {
            self.cancel(false);
        }
    }
}
