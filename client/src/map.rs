use std::collections::VecDeque;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use futures::stream::{FuturesOrdered, FuturesUnordered};
use futures::{Stream, StreamExt};
use serde::de::DeserializeOwned;
use wingbeat_core::ErrorKind;
use wingbeat_core::TaskId;
use wingbeat_core::error::{Error, Result};
use wingbeat_process::context::{self, GivesWay};
use wingbeat_process::{Handle, Waiting, block_on, text_of_panic};

use crate::{GetFuture, ObjectRef, Session, current_task};

/// How many calls of a [`Map`] are under way unless told otherwise: enough for many CPUs, and little to remember.
const IN_FLIGHT: usize = 256;

/// Submits a task or call for each item, a bounded number at a time, and gives their results as a stream.
///
/// For inputs that are many or endless: an item is taken only when there is room for it, and only what was submitted and not taken is in
/// memory. The results come in the order of the items, or with [`unordered`](Map::unordered) in the order in which they arrive.
///
/// Items are taken, and calls made, within [`next`](Map::next), in the session in which the map was made. So an iterator that takes long for an item holds results up meanwhile, and one
/// that waits for a result of the map waits for ever. An actor with `max_pending_calls` needs an [`in_flight`](Map::in_flight) of no more than that.
///
/// ```no_run
/// #[wingbeat::remote]
/// fn word_count(path: String) -> usize {
///     std::fs::read_to_string(path).map_or(0, |text| text.split_whitespace().count())
/// }
///
/// # async fn run(paths: Vec<String>) -> wingbeat::Result<()> {
/// let mut counts = wingbeat::map(paths, |path| word_count::remote(path)).in_flight(100);
/// while let Some(count) = counts.next().await {
///     println!("{}", count?);
/// }
/// # Ok(())
/// # }
/// ```
pub fn map<I, F, T>(items: I, call: F) -> Map<I::IntoIter, F, T>
where
    I: IntoIterator,
    F: FnMut(I::Item) -> ObjectRef<T>,
    T: DeserializeOwned + 'static,
{
    let (items, calls) = (Some(items.into_iter()), Calls::in_order());
    let (session, made_by) = (Session::current().ok(), current_task());
    let (waiting, interrupted, gives_way) = Default::default();
    Map { items, call, session, made_by, in_flight: IN_FLIGHT, calls, waiting, interrupted, gives_way }
}

/// The results of [`map`](fn@map). Dropped, it cancels what is not done.
///
/// What is submitted while the task runs that has made the map is cancelled with that task. An actor that keeps a map over its calls
/// makes it in its constructor: what the map submits then belongs to no call.
///
/// Polled as a [`Stream`], by a combinator or a `timeout` around `StreamExt::next`, it has nothing to say when it is no longer awaited: the
/// running task counts as waiting from a poll that gives nothing to the next one. [`next`](Self::next) knows.
#[must_use = "nothing is submitted before the first result is asked for"]
pub struct Map<I, F, T: DeserializeOwned + 'static> {
    /// None after the last.
    items: Option<I>,
    call: F,
    /// In which it was made; none if there was none yet.
    session: Option<Session>,
    /// The task that has made it. What is submitted for any other, as for an actor's later calls, is not cancelled with that.
    made_by: Option<TaskId>,
    in_flight: usize,
    calls: Calls<T>,
    /// While it is polled as a stream and has nothing.
    waiting: Option<Waiting>,
    /// The last task whose wait was interrupted.
    interrupted: Option<TaskId>,
    gives_way: GivesWay,
}

enum Calls<T: DeserializeOwned + 'static> {
    /// And what their results are, the next one first.
    InOrder(FuturesOrdered<Call<T>>, VecDeque<Handle>),
    AsTheyCome(FuturesUnordered<Call<T>>),
}

impl<I, F, T: DeserializeOwned + 'static> Map<I, F, T> {
    /// At most so many are submitted of which the result was not taken: 256 unless told otherwise, and at least 1.
    pub fn in_flight(mut self, most: usize) -> Self {
        self.in_flight = most.max(1);
        self
    }

    /// Gives results in the order in which they arrive. To be said before the first is asked for: what is under way is cancelled.
    /// Who waits for any of several is held up by none in particular: only when one is left can it be told that it waits for what waits for it.
    pub fn unordered(mut self) -> Self {
        self.calls = Calls::AsTheyCome(FuturesUnordered::new());
        self
    }
}

impl<I, F, T> Map<I, F, T>
where
    I: Iterator + Unpin,
    F: FnMut(I::Item) -> ObjectRef<T> + Unpin,
    T: DeserializeOwned + 'static,
{
    /// The next result, or why there is none; none after the last. A failure is one result among others: the rest goes on.
    /// A task that is cancelled meanwhile gets that as its last result, and so does one whose wait can never end
    /// ([`Error::Deadlock`](crate::Error::Deadlock)): the rest is cancelled then.
    pub async fn next(&mut self) -> Option<Result<T>> {
        // The task waits only as long as this is awaited, however long the map lives.
        self.waiting = None;
        let mut waiting = None;
        std::future::poll_fn(|cx| self.poll_result(&mut waiting, cx)).await
    }

    /// As [`next`](Self::next), blocking this thread.
    pub fn next_blocking(&mut self) -> Option<Result<T>> {
        block_on(self.next())
    }

    /// All results.
    ///
    /// ```no_run
    /// # #[wingbeat::remote] fn square(x: u64) -> u64 { x * x }
    /// # async fn run() -> wingbeat::Result<()> {
    /// let squares = wingbeat::map(0..1_000_000, |x| square::remote(x)).collect().await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// The first failure. What is under way then is cancelled, and no more is submitted.
    pub async fn collect(mut self) -> Result<Vec<T>> {
        let mut all = Vec::new();
        while let Some(result) = self.next().await {
            all.push(result?);
        }
        Ok(all)
    }

    /// As [`collect`](Self::collect), blocking this thread.
    ///
    /// # Errors
    /// As `collect`.
    pub fn collect_blocking(self) -> Result<Vec<T>> {
        block_on(self.collect())
    }

    /// Submits one more, if there is room for it, and anything to submit.
    fn submit(&mut self) -> bool {
        if self.calls.len() >= self.in_flight {
            return false;
        }
        // An iterator need not go on saying that it has no more.
        let Some(item) = self.items.as_mut().and_then(Iterator::next) else {
            self.items = None;
            return false;
        };
        let entered = self.session.as_ref().map(Session::enter);
        let object = match self.made_by == current_task() {
            true => (self.call)(item),
            false => context::without_parent(|| (self.call)(item)),
        };
        drop(entered);
        self.calls.push(object);
        true
    }

    fn poll_result(&mut self, waiting: &mut Option<Waiting>, cx: &mut Context<'_>) -> Poll<Option<Result<T>>> {
        // Nobody would cancel what a cancelled task submits from now on.
        if let Some(cancelled) = context::cancellation() {
            ready!(self.gives_way.poll(cx));
            return self.interrupt(cancelled);
        }
        loop {
            // A result that is there need not wait until all items are submitted for which there is room: the iterator may be slow. One
            // for one keeps as many under way as there were.
            let has_submitted = self.submit();
            match self.calls.poll(cx) {
                Poll::Ready(None) if has_submitted => {}
                Poll::Ready(Some(Err(error))) if self.is_cancelled_with(&error) => {
                    ready!(self.gives_way.poll(cx));
                    return self.interrupt(error);
                }
                Poll::Ready(result) => return Poll::Ready(result),
                // It waits for more than before.
                Poll::Pending if has_submitted => *waiting = None,
                Poll::Pending => break,
            }
        }
        self.calls.wait(waiting);
        let Some(Poll::Ready(error)) = waiting.as_mut().map(|waiting| waiting.poll_interrupted(cx)) else {
            return Poll::Pending;
        };
        if error.kind() == ErrorKind::Cancelled {
            return self.interrupt(error);
        }
        // A wait that can never end is the end of the map: what is behind it would be waited for in vain, too.
        (self.items, self.calls) = (None, Calls::in_order());
        Poll::Ready(Some(Err(error)))
    }

    /// Whether a call was cancelled because the running task is, which is told that once.
    fn is_cancelled_with(&self, error: &Error) -> bool {
        error.kind() == ErrorKind::Cancelled && self.made_by == current_task() && context::cancellation().is_some()
    }

    /// The wait of the running task is over, and no result is lost: whoever goes on with the map, as an actor's next call, has them. To the task
    /// itself this is the end, since it may pass over errors.
    fn interrupt(&mut self, error: Error) -> Poll<Option<Result<T>>> {
        let is_first = self.interrupted != current_task();
        self.interrupted = current_task();
        Poll::Ready(is_first.then_some(Err(error)))
    }
}

impl<I, F, T> Stream for Map<I, F, T>
where
    I: Iterator + Unpin,
    F: FnMut(I::Item) -> ObjectRef<T> + Unpin,
    T: DeserializeOwned + 'static,
{
    type Item = Result<T>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<T>>> {
        let this = self.get_mut();
        let mut waiting = this.waiting.take();
        let result = this.poll_result(&mut waiting, cx);
        if result.is_pending() {
            this.waiting = waiting;
        }
        result
    }
}

impl<T: DeserializeOwned + 'static> Calls<T> {
    fn in_order() -> Calls<T> {
        Calls::InOrder(FuturesOrdered::new(), VecDeque::new())
    }

    fn len(&self) -> usize {
        match self {
            Calls::InOrder(calls, _) => calls.len(),
            Calls::AsTheyCome(calls) => calls.len(),
        }
    }

    fn push(&mut self, object: ObjectRef<T>) {
        match self {
            Calls::InOrder(calls, handles) => {
                handles.push_back(object.handle().clone());
                calls.push_back(Call::of(object));
            }
            Calls::AsTheyCome(calls) => calls.push(Call::of(object)),
        }
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<T>>> {
        match self {
            Calls::InOrder(calls, handles) => {
                let result = calls.poll_next_unpin(cx);
                if result.is_ready() {
                    handles.pop_front();
                }
                result
            }
            Calls::AsTheyCome(calls) => calls.poll_next_unpin(cx),
        }
    }

    /// The running task waits for what is the next result.
    fn wait(&self, waiting: &mut Option<Waiting>) {
        match self {
            Calls::InOrder(_, handles) => Waiting::keep_for_one(waiting, handles.front()),
            Calls::AsTheyCome(calls) => Waiting::keep_for_one(waiting, calls.iter().map(|call| call.object.handle())),
        }
    }
}

impl<I, F, T: DeserializeOwned + 'static> fmt::Debug for Map<I, F, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Map<{}>", std::any::type_name::<T>())
    }
}

/// One of them, until its result is there.
struct Call<T> {
    object: ObjectRef<T>,
    get: GetFuture<T>,
    is_done: bool,
}

impl<T: DeserializeOwned + 'static> Call<T> {
    fn of(object: ObjectRef<T>) -> Call<T> {
        let get = object.get_among_others();
        Call { object, get, is_done: false }
    }
}

impl<T: DeserializeOwned + 'static> Future for Call<T> {
    type Output = Result<T>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<T>> {
        // A stream of futures loses one that panics, and waits for it.
        let polled = catch_unwind(AssertUnwindSafe(|| Pin::new(&mut self.get).poll(cx)));
        let result = polled.unwrap_or_else(|payload| {
            let why = format!("its Deserialize panicked: {}", text_of_panic(&*payload));
            Poll::Ready(Err(Error::Decode {
                what: format!("{} as {}", self.object.id(), std::any::type_name::<T>()),
                why,
            }))
        });
        self.is_done = result.is_ready();
        result
    }
}

impl<T> Drop for Call<T> {
    fn drop(&mut self) {
        if !self.is_done {
            self.object.cancel();
        }
    }
}
