//! Functions over several refs.

use std::time::Duration;

use futures::stream::FuturesUnordered;
use futures::{FutureExt, StreamExt};
use serde::Serialize;
use serde::de::DeserializeOwned;
use wingbeat_core::error::Result;
use wingbeat_process::{Session, block_on};

use crate::ObjectRef;

/// Puts a value into the cluster, to be sent as a ref. A large one goes into the node's shared memory.
///
/// ```no_run
/// # #[wingbeat::remote] fn mean(data: Vec<f32>) -> f32 { 0.5 }
/// # async fn run() -> wingbeat::Result<()> {
/// let table = wingbeat::put(&vec![0.5f32; 1 << 20])?;  // once, however many tasks read it
/// let means: Vec<_> = (0..8).map(|_| mean::remote(&table)).collect();
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// There is no session, the value cannot be encoded, or the store has no room.
pub fn put<T: Serialize + Send + 'static>(value: &T) -> Result<ObjectRef<T>> {
    Session::current()?.put(value).map(ObjectRef::new)
}

/// The values of all refs, in their order. A ref may occur more than once.
///
/// ```no_run
/// # #[wingbeat::remote] fn square(x: u64) -> u64 { x * x }
/// # async fn run() -> wingbeat::Result<()> {
/// let refs: Vec<_> = (0..100u64).map(square::remote).collect();
/// assert_eq!(wingbeat::get_all(&refs).await?[9], 81);
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// The first failure, without waiting for the rest.
pub async fn get_all<'a, T, I>(refs: I) -> Result<Vec<T>>
where
    T: DeserializeOwned + 'static,
    I: IntoIterator<Item = &'a ObjectRef<T>>,
{
    // Not `try_join_all`: beyond 30 futures, it sees a failure only when all before it are done.
    let mut waiting: FuturesUnordered<_> =
        refs.into_iter().map(ObjectRef::get).enumerate().map(|(at, get)| get.map(move |value| (at, value))).collect();
    let mut values: Vec<Option<T>> = (0..waiting.len()).map(|_| None).collect();
    while let Some((at, value)) = waiting.next().await {
        values[at] = Some(value?);
    }
    Ok(values.into_iter().flatten().collect())
}

/// As [`get_all`], for at most `limit` in all.
///
/// ```no_run
/// # #[wingbeat::remote] fn square(x: u64) -> u64 { x * x }
/// # async fn run() -> wingbeat::Result<()> {
/// let refs: Vec<_> = (0..100u64).map(square::remote).collect();
/// let squares = wingbeat::get_all_timeout(&refs, std::time::Duration::from_secs(10)).await?;
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// As `get_all`, or [`Error::TimedOut`](crate::Error::TimedOut); the tasks go on.
pub async fn get_all_timeout<'a, T, I>(refs: I, limit: Duration) -> Result<Vec<T>>
where
    T: DeserializeOwned + 'static,
    I: IntoIterator<Item = &'a ObjectRef<T>>,
{
    let refs: Vec<&ObjectRef<T>> = refs.into_iter().collect();
    let count = refs.len();
    match refs.iter().find_map(|object| object.handle().session()) {
        Some(session) => session.within(limit, || format!("getting {count} values"), get_all(refs)).await,
        None => get_all(refs).await,
    }
}

/// As [`get_all`], blocking this thread.
///
/// # Errors
/// As `get_all`.
pub fn get_all_blocking<'a, T, I>(refs: I) -> Result<Vec<T>>
where
    T: DeserializeOwned + 'static,
    I: IntoIterator<Item = &'a ObjectRef<T>>,
{
    block_on(get_all(refs))
}

/// The refs that are ready, and the others.
pub type Waited<T> = (Vec<ObjectRef<T>>, Vec<ObjectRef<T>>);

/// Waits until `count` of `refs` are ready (or have failed), at most `timeout`. Answers with the ready ones, at most
/// `count`, and the others, both in the given order. For refs of several types, see [`AnyRef`](crate::AnyRef).
///
/// ```no_run
/// # #[wingbeat::remote] fn square(x: u64) -> u64 { x * x }
/// # async fn run() -> wingbeat::Result<()> {
/// let mut rest: Vec<_> = (0..100u64).map(square::remote).collect();
/// while !rest.is_empty() {
///     let (ready, waiting) = wingbeat::wait(rest, 1, None).await?;
///     println!("{}", ready[0].get().await?);
///     rest = waiting;
/// }
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// A ref occurs twice, or `count` is more than there are. No refs are never an error: all of them are ready.
pub async fn wait<T>(refs: Vec<ObjectRef<T>>, count: usize, timeout: Option<Duration>) -> Result<Waited<T>> {
    if refs.is_empty() {
        return Ok((refs, Vec::new()));
    }
    // Mostly enough are ready, and no two are the same since they are in the order in which they were made.
    if refs.windows(2).all(|pair| pair[0].id() < pair[1].id()) {
        let ready: Vec<usize> = (0..refs.len()).filter(|at| refs[*at].is_ready()).take(count).collect();
        if ready.len() == count {
            return Ok(split(refs, &ready));
        }
    }
    let session = match refs.iter().find_map(|object| object.handle().session()) {
        Some(session) => session.clone(),
        None => Session::current()?,
    };
    let handles: Vec<_> = refs.iter().map(ObjectRef::handle).collect();
    let waiting = session.wait(&handles, count, timeout);
    drop(handles);
    let mut ready = waiting.await?;
    ready.truncate(count);
    Ok(split(refs, &ready))
}

/// Those at these ascending positions, and the others.
fn split<T>(mut refs: Vec<ObjectRef<T>>, positions: &[usize]) -> Waited<T> {
    if let [position] = *positions {
        return (vec![refs.remove(position)], refs);
    }
    let mut positions = positions.iter().copied().peekable();
    let taken = refs.iter().enumerate().map(|(at, _)| positions.next_if_eq(&at).is_some());
    let taken: Vec<bool> = taken.collect();
    let (mut ready, mut rest) = (Vec::new(), Vec::new());
    for (object, taken) in refs.drain(..).zip(taken) {
        if taken { ready.push(object) } else { rest.push(object) }
    }
    (ready, rest)
}

/// As [`wait`](fn@wait), blocking this thread.
///
/// # Errors
/// As `wait`.
pub fn wait_blocking<T>(refs: Vec<ObjectRef<T>>, count: usize, timeout: Option<Duration>) -> Result<Waited<T>> {
    block_on(wait(refs, count, timeout))
}
