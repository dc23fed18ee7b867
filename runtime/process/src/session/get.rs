//! Waiting for values, and what a wait means for the task that waits.

use std::collections::BTreeSet;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicIsize, Ordering};
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures::future::BoxFuture;
use futures::task::AtomicWaker;
use serde::de::DeserializeOwned;
use wingbeat_core::codec::Number;
use wingbeat_core::error::Error;
use wingbeat_core::value::{ObjectValue, Stored};
use wingbeat_core::{ActorId, NodeId, ObjectId};

use crate::context::{self, GivesWay};
use crate::owner::Owner;
use crate::owner::object::Handle;
use crate::owner::waiters::Place;
use crate::session::blocking::block_on;
use crate::session::manner::Polls;
use crate::session::session::Session;
use crate::session::values;
use crate::session::waiting::{Waiting, begins_to_come};
use crate::wire::process::Process;
use crate::wire::view::{Bits, ObjectView};
use crate::work::{Awaited, Coming, On};

/// A value that is in reach of this process.
pub struct Value {
    bits: Bits,
    /// Keeps the object, and so the refs inside its value, while it is being decoded.
    handle: Handle,
}

impl Value {
    /// The value.
    ///
    /// # Errors
    /// [`Error::Decode`] when it is not a `T`.
    pub fn decode<T: DeserializeOwned + 'static>(&self) -> Result<T, Error> {
        let Some(owner) = Owner::of(&self.handle) else { return Err(Error::NoSession) };
        values::decode(&owner, &self.bits).map_err(|error| Error::Decode {
            what: format!("{} as {}", self.handle.id(), std::any::type_name::<T>()),
            why: error.0,
        })
    }

    /// The elements of a vector, where they lie.
    ///
    /// # Errors
    /// [`Error::Decode`] when it is no vector of `T`.
    pub fn view<T: Number>(self) -> Result<ObjectView<T>, Error> {
        ObjectView::new(self.bits).map_err(|error| Error::Decode {
            what: format!("{} as a view of {}", self.handle.id(), std::any::type_name::<T>()),
            why: error.0,
        })
    }

    /// The encoded bytes.
    pub fn bits(&self) -> &Bits {
        &self.bits
    }
}

enum Stage {
    Waiting,
    /// From one of these nodes. Whoever waits goes on when it is here.
    Fetching(Vec<NodeId>, BoxFuture<'static, Result<Bits, Error>>),
}

/// See [`Session::value`].
pub struct ValueFuture {
    /// Given to the value when that is there.
    handle: Option<Handle>,
    /// Among those that wait for the object.
    place: Option<Place>,
    stage: Stage,
    /// While it is awaited. Whoever awaits several sees to that itself.
    waiting: Option<Waiting>,
    is_among_others: bool,
    gives_way: GivesWay,
}

impl Future for ValueFuture {
    type Output = Result<Value, Error>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        loop {
            // It was asked again after it had answered.
            let Some(handle) = &this.handle else { return Poll::Ready(Err(Error::NoSession)) };
            match &mut this.stage {
                Stage::Waiting => {
                    let value = match handle.object().poll(&mut this.place, cx) {
                        Poll::Ready(value) => value,
                        Poll::Pending => return this.wait(cx).map(Err),
                    };
                    // A task of the running one that was cancelled with that.
                    if let ObjectValue::Failed(error) = &value
                        && matches!(**error, Error::Cancelled { .. })
                        && context::is_cancelled()
                    {
                        ready!(this.gives_way.poll(cx));
                    }
                    this.waiting = None;
                    match value {
                        ObjectValue::Inline(packed) => {
                            return Poll::Ready(this.done(Bits::Inline(packed.bytes.0)));
                        }
                        ObjectValue::Failed(error) => return Poll::Ready(Err(*error)),
                        ObjectValue::Stored(stored) => {
                            let process = Owner::of(handle).and_then(|owner| Process::of(&owner));
                            let Some(process) = process else { return Poll::Ready(Err(Error::NoSession)) };
                            let id = handle.id();
                            let from = stored.nodes.iter().map(|holder| holder.node).collect();
                            let coming = begins_to_come();
                            let fetching = Box::pin(async move { process.fetch_on_io(id, stored, coming).await });
                            this.stage = Stage::Fetching(from, fetching);
                        }
                    }
                }
                Stage::Fetching(from, fetching) => match fetching.as_mut().poll(cx) {
                    Poll::Pending => return Poll::Pending,
                    Poll::Ready(Err(Error::ObjectLost { object, why })) if !from.is_empty() => {
                        // The owner knows other copies, or makes it again.
                        let from = std::mem::take(from);
                        this.stage = Stage::Waiting;
                        if let Some(owner) = Owner::of(handle) {
                            owner.copies_lost(object, &from, &why);
                        }
                    }
                    Poll::Ready(bits) => return Poll::Ready(bits.and_then(|bits| this.done(bits))),
                },
            }
        }
    }
}

impl ValueFuture {
    /// Waits for a value and brings it into reach of this process.
    pub fn new(handle: &Handle) -> ValueFuture {
        let (place, waiting, gives_way) = Default::default();
        ValueFuture {
            handle: Some(handle.clone()),
            place,
            stage: Stage::Waiting,
            waiting,
            is_among_others: false,
            gives_way,
        }
    }

    /// As [`ValueFuture::new`], for one that awaits others beside it, and keeps a [`Waiting`] itself while it does.
    pub fn among_others(handle: &Handle) -> ValueFuture {
        let mut value = ValueFuture::new(handle);
        value.is_among_others = true;
        value
    }

    /// Blocks this thread until the value is there. Where that is all that this process waits for, the thread does the IO meanwhile.
    ///
    /// # Errors
    /// As the future.
    pub fn blocking(mut self) -> Result<Value, Error> {
        let process = self.handle.as_ref().filter(|handle| !handle.is_ready()).and_then(Owner::of);
        if let Some(process) = process.and_then(|owner| Process::of(&owner))
            && context::current().is_none()
            // Another runtime may be polling this thread, and none runs inside of another.
            && tokio::runtime::Handle::try_current().is_err()
            && process.owner.submission.is_at_most_one()
            && let Some(value) = process.drive(|cx| Pin::new(&mut self).poll(cx))
        {
            return value;
        }
        block_on(self)
    }

    fn done(&mut self, bits: Bits) -> Result<Value, Error> {
        self.handle.take().map(|handle| Value { bits, handle }).ok_or(Error::NoSession)
    }

    fn wait(&mut self, cx: &mut Context<'_>) -> Poll<Error> {
        let Some(handle) = &self.handle else { return Poll::Pending };
        await_value(handle);
        if !self.is_among_others {
            Waiting::keep(&mut self.waiting, &[handle]);
        }
        match &mut self.waiting {
            Some(waiting) => waiting.poll_interrupted(cx),
            None => Poll::Pending,
        }
    }
}

impl Drop for ValueFuture {
    fn drop(&mut self) {
        if let (Some(handle), Some(place)) = (&self.handle, self.place.take())
            && !handle.is_ready()
        {
            handle.object().forget(place);
        }
    }
}

/// Waits until an object is ready or has failed, without its value. For one that awaits others beside it, and keeps a [`Waiting`] itself
/// while it does.
pub struct ReadyFuture {
    handle: Handle,
    /// Among those that wait for the object.
    place: Option<Place>,
}

impl ReadyFuture {
    /// Waits for this object.
    pub fn new(handle: &Handle) -> ReadyFuture {
        ReadyFuture { handle: handle.clone(), place: None }
    }
}

impl Future for ReadyFuture {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let ReadyFuture { handle, place } = &mut *self;
        if handle.object().poll(place, cx).is_ready() {
            return Poll::Ready(());
        }
        await_value(handle);
        Poll::Pending
    }
}

impl Drop for ReadyFuture {
    fn drop(&mut self) {
        if let Some(place) = self.place.take()
            && !self.handle.is_ready()
        {
            self.handle.object().forget(place);
        }
    }
}

/// The value is awaited here. It is said with each poll: the value may have been there since the last, and lost.
fn await_value(handle: &Handle) {
    if let Some(owner) = Owner::of(handle) {
        owner.subscribe(handle);
        if let Some(process) = Process::of(&owner) {
            process.attend();
        }
    }
}

/// Counts the objects that become ready, and wakes who waits for so many of them. Each object knows of it once, for as
/// long as this lives.
struct Arrivals {
    handles: Vec<Handle>,
    places: Vec<Option<Place>>,
    count: usize,
    shared: Arc<Missing>,
}

struct Missing {
    /// Objects that must still become ready. Below zero when more are than need to be.
    count: AtomicIsize,
    waker: AtomicWaker,
}

impl Arrivals {
    fn new(handles: Vec<Handle>, count: usize) -> Arrivals {
        let places = vec![None; handles.len()];
        let shared = Arc::new(Missing { count: AtomicIsize::new(0), waker: AtomicWaker::new() });
        let mut arrivals = Arrivals { handles, places, count, shared };
        arrivals.register();
        arrivals
    }

    /// Starts to count anew.
    fn register(&mut self) {
        self.forget();
        let missing = Missing { count: AtomicIsize::new(self.count as isize), waker: AtomicWaker::new() };
        self.shared = Arc::new(missing);
        let shared = self.shared.clone();
        let arrived: Arc<dyn Fn() + Send + Sync> = Arc::new(move || {
            if shared.count.fetch_sub(1, Ordering::AcqRel) == 1 {
                shared.waker.wake();
            }
        });
        for (handle, place) in self.handles.iter().zip(&mut self.places) {
            *place = handle.object().when_ready(&arrived);
            match (&place, Owner::of(handle)) {
                (None, _) => arrived(),
                (Some(_), Some(owner)) => owner.subscribe(handle),
                (Some(_), None) => {}
            }
        }
    }

    fn forget(&mut self) {
        for (handle, place) in self.handles.iter().zip(&mut self.places) {
            if let Some(place) = place.take()
                && !handle.is_ready()
            {
                handle.object().forget(place);
            }
        }
    }

    fn ready(&self) -> Vec<usize> {
        (0..self.handles.len()).filter(|at| self.handles[*at].is_ready()).collect()
    }

    /// The positions of those that are ready, when so many are.
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Vec<usize>> {
        loop {
            self.shared.waker.register(cx.waker());
            if self.shared.count.load(Ordering::Acquire) > 0 {
                return Poll::Pending;
            }
            let ready = self.ready();
            if ready.len() >= self.count {
                return Poll::Ready(ready);
            }
            // One that was ready has lost its value since.
            self.register();
        }
    }
}

impl Drop for Arrivals {
    fn drop(&mut self) {
        self.forget();
    }
}

impl Process {
    /// [`Process::fetch`], which goes on when nobody waits for it any more: what it has pinned is then released, and a pin of which
    /// the answer is never read stays.
    pub(crate) async fn fetch_to_the_end(&self, id: ObjectId, stored: Stored) -> Result<Bits, Error> {
        self.fetch_and_then(id, stored, || {}).await
    }

    /// As [`Process::fetch_to_the_end`]. What is done then is done whether somebody waits or not.
    async fn fetch_and_then(
        &self,
        id: ObjectId,
        stored: Stored,
        then: impl FnOnce() + Send + 'static,
    ) -> Result<Bits, Error> {
        let process = self.clone();
        let fetching = self.io().spawn(async move {
            let fetched = process.fetch(id, stored).await;
            then();
            fetched
        });
        fetching.await.map_err(|_| self.no_answer())?
    }

    /// For somebody to whom it is `coming`.
    async fn fetch_on_io(self, id: ObjectId, stored: Stored, coming: Option<Arc<Coming>>) -> Result<Bits, Error> {
        // Not kept by who fetches: it is over when nobody waits for it any more.
        let comes = coming.as_ref().map(Arc::downgrade);
        let fetched = self.fetch_and_then(id, stored, move || {
            if let Some(coming) = comes.as_ref().and_then(Weak::upgrade) {
                coming.comes();
            }
        });
        let fetched = fetched.await;
        drop(coming);
        // Whatever it says went wrong then: the session closed its connections.
        fetched.map_err(|error| self.ended().cloned().unwrap_or(error))
    }
}

impl Session {
    /// Whether this process knows that an actor which it has called is dead.
    pub fn is_dead(&self, actor: ActorId) -> bool {
        self.owner().submission.look(|_, calls| calls.is_dead(actor))
    }

    /// Waits for a value and brings it into reach of this process.
    pub fn value(&self, handle: &Handle) -> ValueFuture {
        ValueFuture::new(handle)
    }

    /// Waits until `count` of the objects are ready (or have failed), at most `timeout`. Answers with the
    /// positions of those that are, in the given order; more than `count` may be.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when an object occurs twice, or `count` is more than there are.
    pub fn wait(
        &self,
        handles: &[&Handle],
        count: usize,
        timeout: Option<Duration>,
    ) -> impl Future<Output = Result<Vec<usize>, Error>> + Send + use<> {
        let handles: Vec<Handle> = handles.iter().map(|handle| (*handle).clone()).collect();
        let process = self.process().clone();
        async move {
            // Mostly they are in the order in which they were made.
            let ascend = handles.windows(2).all(|pair| pair[0].id() < pair[1].id());
            if !ascend && handles.iter().map(Handle::id).collect::<BTreeSet<_>>().len() != handles.len() {
                return Err(Error::InvalidArgument {
                    what: "wait was given the same ref twice; give each once".into(),
                });
            }
            if count > handles.len() {
                let what = format!("wait was asked for {count} of {} refs", handles.len());
                return Err(Error::InvalidArgument { what });
            }
            let mut arrivals = Arrivals::new(handles, count);
            let mut waiting = None;
            let mut timer = timeout.map(|limit| process.timer(limit));
            std::future::poll_fn(|cx| {
                if let Poll::Ready(ready) = arrivals.poll(cx) {
                    return Poll::Ready(Ok(ready));
                }
                if let Some(timer) = &mut timer
                    && timer.as_mut().poll(cx).is_ready()
                {
                    return Poll::Ready(Ok(arrivals.ready()));
                }
                process.attend();
                let polls = timer.is_some().then(Polls::with_limit);
                Waiting::keep_on(&mut waiting, || Awaited::some(count, arrivals.handles.iter().map(On::value)));
                drop(polls);
                match waiting.as_mut().map(|waiting| waiting.poll_interrupted(cx)) {
                    Some(Poll::Ready(error)) => Poll::Ready(Err(error)),
                    _ => Poll::Pending,
                }
            })
            .await
        }
    }

    /// The object as people know it: with the name of the task that makes it, if that is known here.
    pub fn title(&self, handle: &Handle) -> String {
        let (id, task) = (handle.id(), handle.id().task);
        let name = self.owner().submission.look(|dispatch, calls| {
            let of_task = dispatch.standing(task).map(|(name, _)| name);
            of_task.or_else(|| calls.standing(task).map(|(name, _, _)| name))
        });
        let waiting = || self.owner().submission.unresolved.get(&task).map(|waiting| waiting.name.to_string());
        match name.or_else(waiting) {
            Some(name) => format!("the result of {name} ({id})"),
            None => id.to_string(),
        }
    }

    /// Fails with [`Error::TimedOut`] if `future` takes longer than `limit`. Needs no tokio runtime of the caller.
    ///
    /// # Errors
    /// What `future` answers, or [`Error::TimedOut`].
    pub fn within<T, F, N>(
        &self,
        limit: Duration,
        what: N,
        future: F,
    ) -> impl Future<Output = Result<T, Error>> + use<T, F, N>
    where
        F: Future<Output = Result<T, Error>>,
        N: Fn() -> String,
    {
        let mut timer = self.process().timer(limit);
        async move {
            let mut future = std::pin::pin!(future);
            std::future::poll_fn(move |cx| {
                let polls = Polls::with_limit();
                let polled = future.as_mut().poll(cx);
                drop(polls);
                if let Poll::Ready(done) = polled {
                    return Poll::Ready(done);
                }
                timer
                    .as_mut()
                    .poll(cx)
                    .map(|()| Err(Error::TimedOut { what: what(), limit_ms: limit.as_millis() as u64 }))
            })
            .await
        }
    }
}

impl Process {
    /// Ends after `limit`; runs on the IO thread's clock.
    pub(crate) fn timer(&self, limit: Duration) -> BoxFuture<'static, ()> {
        let (fired, fires) = tokio::sync::oneshot::channel::<()>();
        let task = self.io().spawn(async move {
            let mut fired = fired;
            tokio::select! {
                () = tokio::time::sleep(limit) => {}
                () = fired.closed() => {}
            }
            drop(fired);
        });
        drop(task);
        Box::pin(async move {
            let _ = fires.await;
        })
    }
}
