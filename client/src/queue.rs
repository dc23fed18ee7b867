use std::collections::VecDeque;
use std::fmt;
use std::marker::PhantomData;
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::sync::Notify;
use wingbeat_core::error::{Error, Result};
use wingbeat_process::values::KeptRef;
use wingbeat_process::{block_on, context, values};

use crate::ObjectRef;

/// Why a queue did not do what it was asked to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum QueueError {
    /// There is no room (now, or within the time allowed).
    Full,
    /// There is nothing in it (now, or within the time allowed).
    Empty,
    /// It was closed: nothing more is put into it, and of [`get`](Queue::get), nothing is left in it.
    Closed,
    /// These items can never be put together: the queue holds at most `capacity`.
    BatchTooLarge {
        /// Items that were to be put.
        items: u64,
        /// Items that the queue holds at most.
        capacity: u64,
    },
}

impl fmt::Display for QueueError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            QueueError::Full => f.write_str("the queue is full"),
            QueueError::Empty => f.write_str("the queue is empty"),
            QueueError::Closed => f.write_str("the queue is closed"),
            QueueError::BatchTooLarge { items, capacity } => {
                write!(f, "a batch of {items} items never fits into a queue that holds {capacity}; put fewer at a time")
            }
        }
    }
}

impl std::error::Error for QueueError {}

/// How long the answer of a queue may take, beside the wait that was asked for: as long as a machine may be silent before it is lost, since
/// an item may be large, and whoever asks again has it sent again.
const ANSWER: Duration = Duration::from_secs(30);

fn in_ms(limit: Duration) -> u64 {
    u64::try_from(limit.as_millis()).unwrap_or(u64::MAX)
}

/// An item as it is queued: encoded, with what it refers to. The actor keeps it in its own memory, so nothing of it is read in place.
#[derive(Serialize, Deserialize)]
struct Item {
    #[serde(with = "serde_bytes")]
    bytes: Vec<u8>,
    refs: Vec<KeptRef>,
    /// Its place among all that were put, which the queue gives.
    number: u64,
}

/// So much is sent to a consumer at a time, but for an item that alone is more: what finds no room on the way could not go back.
const BATCH_BYTES: usize = 16 << 20;
/// So much of that is an item without its own bytes.
const ITEM_BYTES: usize = 32;
/// The same of refs.
const BATCH_REFS: usize = 1_000;

/// How many of these items are sent at a time; the first in any case.
fn sent_at_a_time<'a>(items: impl IntoIterator<Item = &'a Item>) -> usize {
    let (mut bytes, mut refs) = (0, 0);
    let fits = items.into_iter().take_while(|item| {
        bytes += item.bytes.len() + ITEM_BYTES;
        refs += item.refs.len();
        bytes <= BATCH_BYTES && refs <= BATCH_REFS
    });
    fits.count().max(1)
}

#[derive(Default)]
struct QueueState {
    /// In the order of their numbers.
    items: VecDeque<Item>,
    next: u64,
    is_closed: bool,
    /// Puts that wait for room, in the order in which they arrived. The first goes first, so that a batch gets its room although
    /// smaller puts would fit before.
    turns: VecDeque<u64>,
    next_turn: u64,
}

struct QueueActor {
    state: Mutex<QueueState>,
    capacity: usize,
    changed: Notify,
}

// Those who wait for items and those who wait for room, so many at a time, have places of their own: neither keeps the
// others from what they wait for.
#[crate::actor(concurrency_groups(get = 1000, put = 1000))]
impl QueueActor {
    fn new(capacity: u64) -> Self {
        QueueActor { state: Mutex::default(), capacity: capacity as usize, changed: Notify::new() }
    }

    /// All of them, or none.
    #[method(group = "put")]
    async fn put(&self, items: Vec<Item>, wait_ms: Option<u64>) -> Result<(), QueueError> {
        let mut put = Put { queue: self, items, turn: None };
        self.within(wait_ms, || put.attempt()).await.unwrap_or(Err(QueueError::Full))
    }

    /// At least one, and at most `count`.
    #[method(group = "get")]
    async fn get(&self, count: u64, wait_ms: Option<u64>) -> Result<Vec<Item>, QueueError> {
        self.within(wait_ms, || self.try_get(count)).await.unwrap_or(Err(QueueError::Empty))
    }

    /// Whoever does not wait needs none of the places of those that do, however many these are.
    async fn get_now(&self, count: u64) -> Result<Vec<Item>, QueueError> {
        self.get(count, Some(0)).await
    }

    /// Items that were taken for somebody who did not wait for them any more.
    async fn give_back(&self, returned: Vec<Item>) {
        {
            let items = &mut self.state.lock().items;
            for item in returned {
                let place = items.partition_point(|later| later.number < item.number);
                items.insert(place, item);
            }
        }
        self.changed.notify_waiters();
    }

    async fn close(&self) {
        self.state.lock().is_closed = true;
        self.changed.notify_waiters();
    }

    async fn size(&self) -> u64 {
        self.state.lock().items.len() as u64
    }
}

/// Items that are being put.
struct Put<'a> {
    queue: &'a QueueActor,
    items: Vec<Item>,
    /// Its turn, while it waits for room.
    turn: Option<u64>,
}

impl Put<'_> {
    /// None if it has to wait.
    fn attempt(&mut self) -> Option<Result<(), QueueError>> {
        let capacity = self.queue.capacity;
        let mut state = self.queue.state.lock();
        if state.is_closed {
            return Some(Err(QueueError::Closed));
        }
        let is_bounded = capacity > 0;
        if is_bounded && self.items.len() > capacity {
            let (items, capacity) = (self.items.len() as u64, capacity as u64);
            return Some(Err(QueueError::BatchTooLarge { items, capacity }));
        }
        let is_first = state.turns.front().is_none_or(|first| Some(*first) == self.turn);
        if is_bounded && !(is_first && state.items.len() + self.items.len() <= capacity) {
            if self.turn.is_none() {
                self.turn = Some(state.next_turn);
                let turn = state.next_turn;
                state.turns.push_back(turn);
                state.next_turn += 1;
            }
            return None;
        }
        for item in self.items.drain(..) {
            let number = state.next;
            state.next += 1;
            state.items.push_back(Item { number, ..item });
        }
        // Whoever comes next finds room, if there is some.
        if let Some(turn) = self.turn.take() {
            state.turns.retain(|other| *other != turn);
        }
        Some(Ok(()))
    }
}

/// The turn ends with the put, also with one that is cancelled or has waited long enough: the next one has room then, perhaps.
impl Drop for Put<'_> {
    fn drop(&mut self) {
        let Some(turn) = self.turn else { return };
        self.queue.state.lock().turns.retain(|other| *other != turn);
        self.queue.changed.notify_waiters();
    }
}

impl QueueActor {
    /// None if it has to wait.
    fn try_get(&self, count: u64) -> Option<Result<Vec<Item>, QueueError>> {
        let mut state = self.state.lock();
        let count = state.items.len().min(usize::try_from(count).unwrap_or(usize::MAX));
        match count {
            0 if state.is_closed => Some(Err(QueueError::Closed)),
            0 => None,
            count => {
                let count = sent_at_a_time(state.items.iter().take(count));
                Some(Ok(state.items.drain(..count).collect()))
            }
        }
    }

    /// Tries until it works; with `wait_ms`, for at most so long.
    async fn within<T>(&self, wait_ms: Option<u64>, mut attempt: impl FnMut() -> Option<T>) -> Option<T> {
        let trying = async {
            loop {
                let changed = self.changed.notified();
                tokio::pin!(changed);
                // Registered before the attempt, so that a change in between is not missed.
                changed.as_mut().enable();
                if crate::is_cancelled() {
                    // Nobody waits for what this would do; the call ends now.
                    std::future::pending::<()>().await;
                }
                if let Some(done) = attempt() {
                    self.changed.notify_waiters();
                    return done;
                }
                changed.await;
            }
        };
        match wait_ms {
            None => Some(trying.await),
            Some(limit) => tokio::time::timeout(Duration::from_millis(limit), trying).await.ok(),
        }
    }
}

/// The result of a call; if this is dropped before that is there, `abandon` says what becomes of the call.
async fn awaited<T, F>(call: ObjectRef<T>, abandon: F) -> Result<T>
where
    T: DeserializeOwned + 'static,
    F: FnOnce(ObjectRef<T>),
{
    struct Awaited<T, F: FnOnce(ObjectRef<T>)>(Option<(ObjectRef<T>, F)>);
    impl<T, F: FnOnce(ObjectRef<T>)> Drop for Awaited<T, F> {
        fn drop(&mut self) {
            if let Some((call, abandon)) = self.0.take() {
                abandon(call);
            }
        }
    }
    let result = call.get();
    let mut awaited = Awaited(Some((call, abandon)));
    let result = result.await;
    // A wait of a task can be interrupted. That is not the end of the call.
    if result.is_ok() || awaited.0.as_ref().is_some_and(|(call, _)| call.handle().failure().is_some()) {
        awaited.0 = None;
    }
    result
}

/// A first-in, first-out queue that any process of the job can put into and get from. It can be sent like a ref, and so
/// can refs and handles inside its items: what they refer to lives at least as long as the item is queued.
///
/// Items are copied into the queue and out of it, also their [buffers](crate::Buffer). Queue refs to what is large (`put`): that
/// stays in shared memory, and is read there.
///
/// ```no_run
/// # async fn run() -> wingbeat::Result<()> {
/// let queue = wingbeat::Queue::<u64>::bounded(100);
/// queue.put(&1).await?;
/// assert_eq!(queue.get().await?, 1);
/// # Ok(())
/// # }
/// ```
///
/// Producers [`close`](Self::close) it when there is nothing more to come, and its consumers end when they have taken what is left:
///
/// ```no_run
/// # async fn run(queue: wingbeat::Queue<u64>) -> wingbeat::Result<()> {
/// use wingbeat::QueueError;
/// loop {
///     match queue.get().await {
///         Ok(item) => println!("{item}"),
///         Err(error) if error.application() == Some(QueueError::Closed) => break,
///         Err(error) => return Err(error),
///     }
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Serialize, Deserialize)]
#[serde(bound = "")]
pub struct Queue<T> {
    actor: QueueActorHandle,
    item: PhantomData<fn() -> T>,
}

impl<T> Clone for Queue<T> {
    fn clone(&self) -> Self {
        Queue { actor: self.actor.clone(), item: PhantomData }
    }
}

impl<T> Queue<T> {
    /// A queue that holds at most `capacity` items. A capacity of 0 is taken for 1: a queue hands items over by holding them.
    pub fn bounded(capacity: usize) -> Self {
        Self::of(capacity.max(1) as u64)
    }

    /// A queue without a bound: producers are never held up, and memory is what limits them.
    pub fn unbounded() -> Self {
        Self::of(0)
    }

    fn of(capacity: u64) -> Self {
        // It has room also where others hold every CPU, and takes next to none.
        Queue { actor: QueueActor::options().num_cpus(0.0).remote(capacity), item: PhantomData }
    }

    /// The number of items.
    ///
    /// # Errors
    /// The queue's actor is gone.
    pub async fn size(&self) -> Result<u64> {
        self.actor.size().get().await
    }

    /// Takes no more items, from anybody: to put one is [`QueueError::Closed`], also for those who wait for room. What is in the
    /// queue can still be taken. When nothing is left, to get one is [`QueueError::Closed`], also for those who wait for an item.
    /// To close a queue again does nothing.
    ///
    /// An item that goes back to the queue, because whoever took it did not wait for it any more, may be there only after others
    /// have heard that nothing is left.
    ///
    /// # Errors
    /// The queue's actor is gone.
    pub async fn close(&self) -> Result<()> {
        self.actor.close().get().await
    }

    /// As [`close`](Self::close), blocking this thread.
    ///
    /// # Errors
    /// As `close`.
    pub fn close_blocking(&self) -> Result<()> {
        block_on(self.close())
    }
}

impl<T: Serialize + DeserializeOwned + 'static> Queue<T> {
    /// Puts an item at the end, when there is room.
    ///
    /// If this is dropped before it is done, as by a timeout or `select!`, it waits for room no longer. The item is in the
    /// queue only if there was room already.
    ///
    /// # Errors
    /// The item cannot be encoded, or the queue's actor is gone; `error.application::<QueueError>()` is [`QueueError::Closed`]; or
    /// [`ActorUnavailable`](crate::Error::ActorUnavailable) if contact with it was lost: then the item may be in the queue.
    pub async fn put(&self, item: &T) -> Result<()> {
        self.putting([item], None).await
    }

    /// As [`put`](Self::put), for at most `limit`, counted from when the queue's process is asked.
    ///
    /// # Errors
    /// As `put`; `error.application::<QueueError>()` is [`QueueError::Full`]; or [`TimedOut`](crate::Error::TimedOut) if the queue has not answered 30 s
    /// later, as one that has no process yet: then the item may be in the queue.
    pub async fn put_timeout(&self, item: &T, limit: Duration) -> Result<()> {
        self.putting([item], Some(limit)).await
    }

    /// As [`put`](Self::put), if there is room now.
    ///
    /// # Errors
    /// As [`put_timeout`](Self::put_timeout).
    pub async fn try_put(&self, item: &T) -> Result<()> {
        self.put_timeout(item, Duration::ZERO).await
    }

    /// As [`put`](Self::put), blocking this thread. For the others, there is [`block_on`].
    ///
    /// # Errors
    /// As `put`.
    pub fn put_blocking(&self, item: &T) -> Result<()> {
        block_on(self.put(item))
    }

    /// The first item, when there is one.
    ///
    /// Nothing is lost if this is dropped before it is done, as by a timeout or `select!`: an item that was on its way goes
    /// back to its place at the front of the queue. Whoever gets before it is back there gets the one behind it first: where order counts, wait
    /// with one future until it is done, and do not begin anew after each timeout.
    ///
    /// # Errors
    /// The queue's actor is gone; `error.application::<QueueError>()` is [`QueueError::Closed`]; or [`ActorUnavailable`](crate::Error::ActorUnavailable) if contact with it was lost (a cut of
    /// more than 35 s): then an item that was on its way is lost with it.
    pub async fn get(&self) -> Result<T> {
        self.getting_one(None).await
    }

    /// As [`get`](Self::get), for at most `limit`, counted from when the queue's process is asked.
    ///
    /// # Errors
    /// As `get`; `error.application::<QueueError>()` is [`QueueError::Empty`]; or [`TimedOut`](crate::Error::TimedOut) if the queue has not answered 30 s
    /// later, as one that has no process yet.
    pub async fn get_timeout(&self, limit: Duration) -> Result<T> {
        self.getting_one(Some(limit)).await
    }

    /// As [`get`](Self::get), if there is an item now.
    ///
    /// # Errors
    /// As [`get_timeout`](Self::get_timeout).
    pub async fn try_get(&self) -> Result<T> {
        self.get_timeout(Duration::ZERO).await
    }

    /// As [`get`](Self::get), blocking this thread. For the others, there is [`block_on`].
    ///
    /// # Errors
    /// As `get`.
    pub fn get_blocking(&self) -> Result<T> {
        block_on(self.get())
    }

    /// Puts items at the end, one behind another, when there is room for all of them: all are put, or none. They are one message, which is
    /// much faster than one for each item. To put no items does nothing.
    ///
    /// Whoever waits for room has it in the order in which the queue was asked: a batch is not overtaken by what would fit before.
    ///
    /// ```no_run
    /// # async fn run() -> wingbeat::Result<()> {
    /// let queue = wingbeat::Queue::<u64>::bounded(100);
    /// queue.put_many(&[1, 2, 3]).await?;
    /// assert_eq!(queue.get_many(10).await?, [1, 2, 3]);   // what there is, up to 10
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// If this is dropped before it is done, it waits for room no longer. The items are in the queue only if there was room already, and
    /// then all of them.
    ///
    /// # Errors
    /// As [`put`](Self::put); or `error.application::<QueueError>()` is [`QueueError::BatchTooLarge`] for more items than a bounded queue
    /// holds at most.
    pub async fn put_many<'a>(&self, items: impl IntoIterator<Item = &'a T>) -> Result<()> {
        self.putting(items, None).await
    }

    /// As [`put_many`](Self::put_many), for at most `limit`, as [`put_timeout`](Self::put_timeout).
    ///
    /// # Errors
    /// As `put_many` and `put_timeout`.
    pub async fn put_many_timeout<'a>(&self, items: impl IntoIterator<Item = &'a T>, limit: Duration) -> Result<()> {
        self.putting(items, Some(limit)).await
    }

    /// As [`put_many`](Self::put_many), if there is room for all of them now.
    ///
    /// # Errors
    /// As [`put_many_timeout`](Self::put_many_timeout).
    pub async fn try_put_many<'a>(&self, items: impl IntoIterator<Item = &'a T>) -> Result<()> {
        self.put_many_timeout(items, Duration::ZERO).await
    }

    /// The first items, when there is one: at least one, and at most `count`. With a count of 0, none at once. Fewer than there are come
    /// where they are more than 16 MiB, or refer to more than 1,000 objects: what is sent at a time.
    ///
    /// ```no_run
    /// # async fn run(queue: wingbeat::Queue<String>) -> wingbeat::Result<()> {
    /// use wingbeat::QueueError;
    /// loop {
    ///     match queue.get_many(1000).await {
    ///         Ok(lines) => println!("{} lines", lines.len()),
    ///         Err(error) if error.application() == Some(QueueError::Closed) => break,
    ///         Err(error) => return Err(error),
    ///     }
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// As of [`get`](Self::get), nothing is lost if this is dropped before it is done: all items go back to their places.
    ///
    /// # Errors
    /// As `get`. An item that cannot be decoded is the error of the get that finds it first.
    pub async fn get_many(&self, count: usize) -> Result<Vec<T>> {
        self.getting(count, None).await
    }

    /// As [`get_many`](Self::get_many), for at most `limit`, as [`get_timeout`](Self::get_timeout).
    ///
    /// # Errors
    /// As `get_many` and `get_timeout`.
    pub async fn get_many_timeout(&self, count: usize, limit: Duration) -> Result<Vec<T>> {
        self.getting(count, Some(limit)).await
    }

    /// As [`get_many`](Self::get_many), if there is an item now.
    ///
    /// # Errors
    /// As [`get_many_timeout`](Self::get_many_timeout).
    pub async fn try_get_many(&self, count: usize) -> Result<Vec<T>> {
        self.get_many_timeout(count, Duration::ZERO).await
    }

    async fn putting<'a>(&self, items: impl IntoIterator<Item = &'a T>, limit: Option<Duration>) -> Result<()> {
        let items = items.into_iter().map(|item| self.encode(item)).collect::<Result<Vec<Item>>>()?;
        if items.is_empty() {
            return Ok(());
        }
        let call = self.actor.put(items, limit.map(in_ms));
        self.answered(limit, awaited(call, |call| call.cancel())).await
    }

    async fn getting_one(&self, limit: Option<Duration>) -> Result<T> {
        let mut items = self.getting(1, limit).await?;
        let none = || Error::InvalidArgument { what: "a queue answered without an item".into() };
        items.pop().ok_or_else(none)
    }

    async fn getting(&self, count: usize, limit: Option<Duration>) -> Result<Vec<T>> {
        if count == 0 {
            return Ok(Vec::new());
        }
        let actor = self.actor.clone();
        let then = |call: ObjectRef<Vec<Item>>| {
            call.cancel();
            // Runs with the items if the call took any, and fails with the call if not. As a call of this task's it would be
            // cancelled with that.
            context::without_parent(|| actor.give_back(call));
        };
        let call = match limit {
            Some(Duration::ZERO) => self.actor.get_now(count as u64),
            limit => self.actor.get(count as u64, limit.map(in_ms)),
        };
        self.decode_all(self.answered(limit, awaited(call, then)).await?)
    }

    /// What the queue answers, which has the limit, too; it may be out of reach.
    async fn answered<R>(&self, limit: Option<Duration>, answer: impl Future<Output = Result<R>>) -> Result<R> {
        match limit {
            None => answer.await,
            Some(limit) => {
                let session = self.actor.actor().session_or_error()?;
                session.within(limit.saturating_add(ANSWER), || "the answer of a queue".into(), answer).await
            }
        }
    }

    fn encode(&self, item: &T) -> Result<Item> {
        let (bytes, refs) = values::encode_kept(&self.actor.actor().session_or_error()?, item)?;
        Ok(Item { bytes: bytes.into(), refs, number: 0 })
    }

    /// The values of the items before the first that cannot be decoded. That is the error of whoever gets it as the first of its items,
    /// and those behind it go back.
    fn decode_all(&self, items: Vec<Item>) -> Result<Vec<T>> {
        let session = self.actor.actor().session_or_error()?;
        let mut values = Vec::with_capacity(items.len());
        let mut items = items.into_iter();
        while let Some(mut item) = items.next() {
            let bytes = Bytes::from(std::mem::take(&mut item.bytes));
            match values::decode_kept(&session, bytes.clone()) {
                Ok(value) => values.push(value),
                Err(error) => {
                    let failed = (!values.is_empty()).then(|| Item { bytes: bytes.into(), ..item });
                    let returned: Vec<Item> = failed.into_iter().chain(items).collect();
                    if !returned.is_empty() {
                        context::without_parent(|| drop(self.actor.give_back(returned)));
                    }
                    return if values.is_empty() { Err(error) } else { Ok(values) };
                }
            }
        }
        Ok(values)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn empty() -> Item {
        Item { bytes: Vec::new(), refs: Vec::new(), number: 0 }
    }

    #[test]
    fn what_is_sent_at_a_time_is_bounded_whatever_items_are_like() {
        let many: Vec<Item> = std::iter::repeat_with(empty).take(1_000_000).collect();
        assert_eq!(sent_at_a_time(&many), BATCH_BYTES / ITEM_BYTES, "items without bytes");
        let large = || Item { bytes: vec![0; BATCH_BYTES], ..empty() };
        assert_eq!(sent_at_a_time(&[large(), empty()]), 1, "the first goes alone, however large it is");
        assert_eq!(sent_at_a_time(&[empty(), large(), empty()]), 1);
        assert_eq!(sent_at_a_time(&[]), 1);
    }
}
