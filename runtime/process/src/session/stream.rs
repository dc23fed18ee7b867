//! Streams: the items of a task that is still running, as its consumer sees them.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use wingbeat_core::error::Error;
use wingbeat_core::spec::Outputs;
use wingbeat_core::{ProcessId, TaskId};
use wingbeat_net::messages::Work;

use crate::owner::object::{Handle, Producer};
use crate::owner::streams::Cell;
use crate::owner::submission::Cancel;
use crate::session::context;
use crate::session::get::{Value, ValueFuture};
use crate::session::session::Session;
use crate::session::waiting::Waiting;
use crate::work::{Awaited, On};

/// The consumer's end of a stream. Dropping it cancels the task.
pub struct StreamHandle {
    session: Result<Session, Option<Error>>,
    task: TaskId,
    producer: Option<Producer>,
    cell: Arc<Cell>,
    /// An item that was taken, and whose value is not here: nobody has waited for it to the end, or it cannot be fetched now.
    /// It is still the next.
    next: Option<Handle>,
    /// Its value, while that is brought here.
    fetching: Option<Box<ValueFuture>>,
    /// The last task whose wait was interrupted.
    interrupted: Option<TaskId>,
}

impl StreamHandle {
    pub(crate) fn new(session: &Session, task: TaskId, producer: Option<Producer>) -> Self {
        let owner = session.owner();
        let cell = owner.streams.begin(task);
        if let Some(error) = owner.ended() {
            drop(owner.streams.failed(task, error.clone()));
        }
        StreamHandle::of(Ok(session.clone()), task, producer, cell)
    }

    /// A stream that is nothing but an error.
    pub fn failed(error: Error) -> Self {
        let task = TaskId { owner: ProcessId(0), seq: 0 };
        StreamHandle::of(Err(Some(error)), task, None, Arc::default())
    }

    fn of(session: Result<Session, Option<Error>>, task: TaskId, producer: Option<Producer>, cell: Arc<Cell>) -> Self {
        let (next, fetching, interrupted) = (None, None, None);
        StreamHandle { session, task, producer, cell, next, fetching, interrupted }
    }

    /// The task that makes the items.
    pub fn task(&self) -> TaskId {
        self.task
    }

    /// Whose it is; none of a stream that is nothing but an error.
    pub fn session(&self) -> Option<&Session> {
        self.session.as_ref().ok()
    }

    /// The next item, when it is there; none after the last. An error is the last item, but for one that says that the item
    /// cannot be fetched now ([`Error::ObjectUnavailable`], [`Error::StoreFull`], [`Error::OutOfDescriptors`]): the next call
    /// tries again. An item that was lost is passed over after its error. To a task that is cancelled while it waits, or whose wait can never
    /// end, that is the last item; whoever goes on with the stream, as an actor's next call, has the rest.
    ///
    /// The running task waits as long as there is something in `waiting`: whoever awaits no more drops that.
    pub fn poll_item(
        &mut self,
        waiting: &mut Option<Waiting>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Value, Error>>> {
        let session = match &mut self.session {
            Ok(session) => session.clone(),
            Err(error) => return Poll::Ready(error.take().map(Err)),
        };
        if self.next.is_none() {
            match ready!(self.poll_next(&session, waiting, cx)) {
                Some(Ok(handle)) => self.next = Some(handle),
                Some(Err(error)) => return Poll::Ready(Some(Err(error))),
                None => return Poll::Ready(None),
            }
            *waiting = None;
        }
        let Some(handle) = &self.next else { return Poll::Ready(None) };
        let fetching = self.fetching.get_or_insert_with(|| Box::new(ValueFuture::among_others(handle)));
        let Poll::Ready(value) = Pin::new(fetching).poll(cx) else {
            if handle.is_ready() {
                // It is on its way here, and nobody's to wait for.
                *waiting = None;
                return Poll::Pending;
            }
            // Its value was lost, and is made again.
            if self.has_ended_for_this_task() {
                return Poll::Ready(None);
            }
            Waiting::keep(waiting, &[handle]);
            return self.unless_interrupted(waiting, cx);
        };
        self.fetching = None;
        let is_temporary = matches!(
            value,
            Err(Error::ObjectUnavailable { .. } | Error::StoreFull { .. } | Error::OutOfDescriptors { .. })
        );
        if !is_temporary {
            self.next = None;
        }
        Poll::Ready(Some(value))
    }

    /// The next item as an object, whose value stays where it is; none after the last. An item that was being brought here is still the
    /// next. What is an error of the item is one of the object.
    ///
    /// The running task waits as long as there is something in `waiting`, as in [`poll_item`](Self::poll_item).
    pub fn poll_handle(
        &mut self,
        waiting: &mut Option<Waiting>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Handle, Error>>> {
        let session = match &mut self.session {
            Ok(session) => session.clone(),
            Err(error) => return Poll::Ready(error.take().map(Err)),
        };
        self.fetching = None;
        match self.next.take() {
            Some(handle) => Poll::Ready(Some(Ok(handle))),
            None => self.poll_next(&session, waiting, cx),
        }
    }

    fn poll_next(
        &mut self,
        session: &Session,
        waiting: &mut Option<Waiting>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Handle, Error>>> {
        let mut state = self.cell.lock();
        let index = state.taken;
        if let Some(handle) = state.items.remove(&index) {
            state.taken += 1;
            for sender in state.senders() {
                session.process().send_to(sender, Work::StreamTaken { task: self.task, count: state.taken }.into());
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
        session.process().attend();
        // Nothing is told of its wait: a task that passes over errors would go round without end.
        if self.has_ended_for_this_task() {
            return Poll::Ready(None);
        }
        Waiting::keep_on(waiting, || Awaited::all([On::next_item(self.task, self.producer, &self.cell)]));
        self.unless_interrupted(waiting, cx)
    }

    fn has_ended_for_this_task(&self) -> bool {
        self.interrupted.is_some() && self.interrupted == context::current_task()
    }

    fn unless_interrupted<T>(
        &mut self,
        waiting: &mut Option<Waiting>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<T, Error>>> {
        let Some(Poll::Ready(error)) = waiting.as_mut().map(|waiting| waiting.poll_interrupted(cx)) else {
            return Poll::Pending;
        };
        self.interrupted = context::current_task();
        *waiting = None;
        Poll::Ready(Some(Err(error)))
    }

    /// Asks the task to stop.
    pub fn cancel(&self, force: bool) {
        if let Ok(session) = &self.session {
            let outputs = Outputs::Stream { ahead: 0 };
            session.owner().cancel(Cancel { task: self.task, outputs, force, again: false });
        }
    }
}

impl Drop for StreamHandle {
    fn drop(&mut self) {
        let Ok(session) = &self.session else { return };
        session.owner().streams.forget(self.task);
        let (over, items) = {
            let mut state = self.cell.lock();
            (state.failed || state.count.is_some(), std::mem::take(&mut state.items))
        };
        drop(items);
        if !over && !session.process().is_shut_down() {
            self.cancel(false);
        }
    }
}
