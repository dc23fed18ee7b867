use std::fmt;
use std::marker::PhantomData;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use serde::de::DeserializeOwned;
use wingbeat_core::error::Result;
use wingbeat_process::{StreamHandle, Waiting, block_on};

use crate::ObjectRef;

/// The items of a task that is still running, in order. A failure of the task is the last item, and so is an `Err` of its
/// iterator: where an error is one item among others, wrap it (`Item = MyItem`, an enum of one's own). An item that is there and
/// cannot be fetched now is [`Error::ObjectUnavailable`](crate::Error::ObjectUnavailable); the next call tries the same one again.
///
/// The task runs at most `stream_ahead` items (16 unless told otherwise) ahead of what was taken, and then waits.
/// Dropping the stream cancels the task. A task that is cancelled while it waits for an item gets that as its last item, and so does one whose wait can never end
/// ([`Error::Deadlock`](crate::Error::Deadlock)).
///
/// Polled as a [`Stream`](futures::Stream), by a combinator or a `timeout` around `StreamExt::next`, it has nothing to say when it is no
/// longer awaited: the running task counts as waiting from a poll that gives nothing to the next one. [`next`](Self::next) knows.
///
/// The items of an actor's method may borrow the actor's state. So the actor's other calls wait until such a stream is
/// taken to its end or dropped; in an actor that runs several calls at a time, those with `&mut self` do. If the items
/// borrow nothing, say so with `+ use<>` in the method's return type: then the other calls go on while the stream waits
/// for its consumer.
///
/// ```no_run
/// #[wingbeat::remote]
/// fn lines(path: String) -> impl Iterator<Item = Result<String, String>> {
///     let text = std::fs::read_to_string(&path);
///     let lines = text.map(|text| text.lines().map(str::to_owned).collect::<Vec<_>>());
///     match lines {
///         Ok(lines) => lines.into_iter().map(Ok).collect::<Vec<_>>().into_iter(),
///         Err(error) => vec![Err(error.to_string())].into_iter(),
///     }
/// }
///
/// # async fn run() -> wingbeat::Result<()> {
/// let mut stream = lines::remote("/etc/hosts".to_owned());
/// while let Some(line) = stream.next().await {
///     println!("{}", line?);
/// }
/// # Ok(())
/// # }
/// ```
pub struct ObjectStream<T> {
    handle: StreamHandle,
    /// While it is polled as a stream and has nothing.
    waiting: Option<Waiting>,
    item: PhantomData<fn() -> T>,
}

impl<T> ObjectStream<T> {
    pub(crate) fn new(handle: StreamHandle) -> Self {
        ObjectStream { handle, waiting: None, item: PhantomData }
    }
}

impl<T: DeserializeOwned + 'static> ObjectStream<T> {
    /// The next item; none after the last.
    pub async fn next(&mut self) -> Option<Result<T>> {
        // The task waits only as long as this is awaited, however long the stream lives.
        self.waiting = None;
        let mut waiting = None;
        std::future::poll_fn(|cx| self.poll_item(&mut waiting, cx)).await
    }

    /// As [`next`](Self::next), blocking this thread.
    pub fn next_blocking(&mut self) -> Option<Result<T>> {
        block_on(self.next())
    }

    /// As [`next`](Self::next), for at most `limit`. Then it is [`Error::TimedOut`](crate::Error::TimedOut), and the stream goes on: the
    /// next call waits for the same item.
    pub async fn next_timeout(&mut self, limit: Duration) -> Option<Result<T>> {
        // Of what is nothing but an error, that is there.
        let Some(session) = self.handle.session().cloned() else { return self.next().await };
        let what = || "the next item of a stream".to_owned();
        session.within(limit, what, async { Ok(self.next().await) }).await.unwrap_or_else(|error| Some(Err(error)))
    }

    /// A ref to the next item, which stays where it is, unread; none after the last. Pass the ref on to have a large item read where it is
    /// used. An item that is an error is a ref that fails with it. An error here is that of the stream itself, and the last.
    ///
    /// The item counts as taken: the task goes on, and the item is kept as long as somebody has its ref.
    ///
    /// ```no_run
    /// #[wingbeat::remote]
    /// fn frames(video: String) -> impl Iterator<Item = Vec<u8>> { (0..100).map(|_| vec![0; 1 << 20]) }
    ///
    /// #[wingbeat::remote]
    /// fn faces(frame: Vec<u8>) -> u64 { 0 }
    ///
    /// # async fn run() -> wingbeat::Result<()> {
    /// let mut stream = frames::remote("a.mp4".to_owned());
    /// let mut found = Vec::new();
    /// while let Some(frame) = stream.next_ref().await {
    ///     found.push(faces::remote(frame?));       // no frame comes here
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub async fn next_ref(&mut self) -> Option<Result<ObjectRef<T>>> {
        self.waiting = None;
        let mut waiting = None;
        std::future::poll_fn(|cx| self.handle.poll_handle(&mut waiting, cx)).await.map(|item| item.map(ObjectRef::new))
    }

    /// As [`next_ref`](Self::next_ref), blocking this thread.
    pub fn next_ref_blocking(&mut self) -> Option<Result<ObjectRef<T>>> {
        block_on(self.next_ref())
    }

    /// As [`next_ref`](Self::next_ref), for at most `limit`. Then it is [`Error::TimedOut`](crate::Error::TimedOut), and the stream goes on.
    pub async fn next_ref_timeout(&mut self, limit: Duration) -> Option<Result<ObjectRef<T>>> {
        let Some(session) = self.handle.session().cloned() else { return self.next_ref().await };
        let what = || "the next item of a stream".to_owned();
        session.within(limit, what, async { Ok(self.next_ref().await) }).await.unwrap_or_else(|error| Some(Err(error)))
    }

    fn poll_item(&mut self, waiting: &mut Option<Waiting>, cx: &mut Context<'_>) -> Poll<Option<Result<T>>> {
        self.handle.poll_item(waiting, cx).map(|item| item.map(|value| value.and_then(|value| value.decode())))
    }
}

impl<T: DeserializeOwned + 'static> futures::Stream for ObjectStream<T> {
    type Item = Result<T>;
    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<T>>> {
        let this = self.get_mut();
        let mut waiting = this.waiting.take();
        let item = this.poll_item(&mut waiting, cx);
        if item.is_pending() {
            this.waiting = waiting;
        }
        item
    }
}

impl<T> fmt::Debug for ObjectStream<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ObjectStream<{}>", std::any::type_name::<T>())
    }
}
