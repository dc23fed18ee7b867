use std::collections::VecDeque;
use std::fmt;
use std::marker::PhantomData;
use std::time::Duration;

use parking_lot::Mutex;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::sync::Notify;
use wingbeat_core::error::Result;
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
}

impl fmt::Display for QueueError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            QueueError::Full => "the queue is full",
            QueueError::Empty => "the queue is empty",
            QueueError::Closed => "the queue is closed",
        })
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

#[derive(Default)]
struct QueueState {
    /// In the order of their numbers.
    items: VecDeque<Item>,
    next: u64,
    is_closed: bool,
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

    #[method(group = "put")]
    async fn put(&self, item: Item, wait_ms: Option<u64>) -> Result<(), QueueError> {
        let mut item = Some(item);
        self.within(wait_ms, || self.try_put(&mut item)).await.unwrap_or(Err(QueueError::Full))
    }

    #[method(group = "get")]
    async fn get(&self, wait_ms: Option<u64>) -> Result<Item, QueueError> {
        self.within(wait_ms, || self.try_get()).await.unwrap_or(Err(QueueError::Empty))
    }

    /// An item that was taken for somebody who did not wait for it any more.
    async fn give_back(&self, item: Item) {
        {
            let items = &mut self.state.lock().items;
            let place = items.partition_point(|later| later.number < item.number);
            items.insert(place, item);
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

impl QueueActor {
    /// None if it has to wait.
    fn try_put(&self, item: &mut Option<Item>) -> Option<Result<(), QueueError>> {
        let mut state = self.state.lock();
        if state.is_closed {
            return Some(Err(QueueError::Closed));
        }
        if self.capacity > 0 && state.items.len() >= self.capacity {
            return None;
        }
        let item = Item { number: state.next, ..item.take()? };
        state.next += 1;
        state.items.push_back(item);
        Some(Ok(()))
    }

    /// None if it has to wait.
    fn try_get(&self) -> Option<Result<Item, QueueError>> {
        let mut state = self.state.lock();
        match state.items.pop_front() {
            Some(item) => Some(Ok(item)),
            None if state.is_closed => Some(Err(QueueError::Closed)),
            None => None,
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
        self.putting(item, None).await
    }

    /// As [`put`](Self::put), for at most `limit`, counted from when the queue's process is asked.
    ///
    /// # Errors
    /// As `put`; `error.application::<QueueError>()` is [`QueueError::Full`]; or [`TimedOut`](crate::Error::TimedOut) if the queue has not answered 30 s
    /// later, as one that has no process yet: then the item may be in the queue.
    pub async fn put_timeout(&self, item: &T, limit: Duration) -> Result<()> {
        self.putting(item, Some(limit)).await
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
    /// back to its place at the front of the queue.
    ///
    /// # Errors
    /// The queue's actor is gone; `error.application::<QueueError>()` is [`QueueError::Closed`]; or [`ActorUnavailable`](crate::Error::ActorUnavailable) if contact with it was lost (a cut of
    /// more than 35 s): then an item that was on its way is lost with it.
    pub async fn get(&self) -> Result<T> {
        self.getting(None).await
    }

    /// As [`get`](Self::get), for at most `limit`, counted from when the queue's process is asked.
    ///
    /// # Errors
    /// As `get`; `error.application::<QueueError>()` is [`QueueError::Empty`]; or [`TimedOut`](crate::Error::TimedOut) if the queue has not answered 30 s
    /// later, as one that has no process yet.
    pub async fn get_timeout(&self, limit: Duration) -> Result<T> {
        self.getting(Some(limit)).await
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

    async fn putting(&self, item: &T, limit: Option<Duration>) -> Result<()> {
        let call = self.actor.put(self.encode(item)?, limit.map(in_ms));
        self.answered(limit, awaited(call, |call| call.cancel())).await
    }

    async fn getting(&self, limit: Option<Duration>) -> Result<T> {
        let actor = self.actor.clone();
        let then = |call: ObjectRef<Item>| {
            call.cancel();
            // Runs with the item if the call took one, and fails with the call if not. As a call of this task's it would be
            // cancelled with that.
            context::without_parent(|| actor.give_back(call));
        };
        self.decode(self.answered(limit, awaited(self.actor.get(limit.map(in_ms)), then)).await?)
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

    fn decode(&self, item: Item) -> Result<T> {
        let Item { bytes, refs, .. } = item;
        let decoded = values::decode_kept(&self.actor.actor().session_or_error()?, bytes.into());
        drop(refs);
        decoded
    }
}
