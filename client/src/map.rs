use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll};

use futures::stream::{FuturesOrdered, FuturesUnordered};
use futures::{Stream, StreamExt};
use serde::de::DeserializeOwned;
use wingbeat_core::error::Result;
use wingbeat_process::block_on;

use crate::{GetFuture, ObjectRef};

/// How many calls of a [`Map`] are under way unless told otherwise: enough for many CPUs, and little to remember.
const IN_FLIGHT: usize = 256;

/// Submits a task or call for each item, a bounded number at a time, and gives their results as a stream.
///
/// For inputs that are many or endless: an item is taken only when there is room for it, and only the results that are under way are in
/// memory. The results come in the order of the items, or with [`unordered`](Map::unordered) in the order in which they arrive.
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
    Map { items: Some(items.into_iter()), call, in_flight: IN_FLIGHT, calls: Calls::InOrder(FuturesOrdered::new()) }
}

/// The results of [`map`](fn@map). Dropped, it cancels what is not done.
#[must_use = "nothing is submitted before the first result is asked for"]
pub struct Map<I, F, T: DeserializeOwned + 'static> {
    /// None after the last.
    items: Option<I>,
    call: F,
    in_flight: usize,
    calls: Calls<T>,
}

enum Calls<T: DeserializeOwned + 'static> {
    InOrder(FuturesOrdered<Call<T>>),
    AsTheyCome(FuturesUnordered<Call<T>>),
}

impl<I, F, T: DeserializeOwned + 'static> Map<I, F, T> {
    /// At most so many are submitted of which the result was not taken: 256 unless told otherwise, and at least 1.
    pub fn in_flight(mut self, most: usize) -> Self {
        self.in_flight = most.max(1);
        self
    }

    /// Gives results in the order in which they arrive. To be said before the first is asked for: what is under way is cancelled.
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
    pub async fn next(&mut self) -> Option<Result<T>> {
        StreamExt::next(self).await
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

    /// Submits as many as there is room for.
    fn submit(&mut self) {
        while self.calls.len() < self.in_flight
            && let Some(items) = &mut self.items
        {
            match items.next() {
                Some(item) => self.calls.push(Call::of((self.call)(item))),
                // An iterator need not go on saying so.
                None => self.items = None,
            }
        }
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
        this.submit();
        match &mut this.calls {
            Calls::InOrder(calls) => calls.poll_next_unpin(cx),
            Calls::AsTheyCome(calls) => calls.poll_next_unpin(cx),
        }
    }
}

impl<T: DeserializeOwned + 'static> Calls<T> {
    fn len(&self) -> usize {
        match self {
            Calls::InOrder(calls) => calls.len(),
            Calls::AsTheyCome(calls) => calls.len(),
        }
    }

    fn push(&mut self, call: Call<T>) {
        match self {
            Calls::InOrder(calls) => calls.push_back(call),
            Calls::AsTheyCome(calls) => calls.push(call),
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
        let get = object.get();
        Call { object, get, is_done: false }
    }
}

impl<T: DeserializeOwned + 'static> Future for Call<T> {
    type Output = Result<T>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<T>> {
        let result = Pin::new(&mut self.get).poll(cx);
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
