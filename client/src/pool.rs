use std::collections::VecDeque;

use serde::de::DeserializeOwned;
use wingbeat_core::error::{Error, Result};

use crate::{ObjectRef, wait};

/// Spreads values over a set of actors, one call at a time each.
///
/// ```no_run
/// # struct Worker; #[wingbeat::actor] impl Worker { fn new() -> Self { Worker } fn run(&mut self, x: u64) -> u64 { x } }
/// # async fn run() -> wingbeat::Result<()> {
/// let mut pool = wingbeat::ActorPool::new([Worker::remote(), Worker::remote()]);
/// let results = pool.map(0..10u64, |actor, x| actor.run(x)).await?;
/// # Ok(())
/// # }
/// ```
pub struct ActorPool<A> {
    actors: Vec<A>,
}

impl<A: Clone> ActorPool<A> {
    /// A pool of these actors.
    pub fn new(actors: impl IntoIterator<Item = A>) -> Self {
        ActorPool { actors: actors.into_iter().collect() }
    }

    /// The number of actors.
    pub fn len(&self) -> usize {
        self.actors.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.actors.is_empty()
    }

    /// Calls an actor with every value, and answers with the results in the order of the values.
    ///
    /// # Errors
    /// The first failure; or the pool is empty.
    pub async fn map<V, T>(
        &mut self,
        values: impl IntoIterator<Item = V>,
        call: impl Fn(&A, V) -> ObjectRef<T>,
    ) -> Result<Vec<T>>
    where
        T: DeserializeOwned + 'static,
    {
        let mut results = self.run(values, call).await?;
        results.sort_by_key(|(position, _)| *position);
        Ok(results.into_iter().map(|(_, value)| value).collect())
    }

    /// As [`map`](Self::map), with the results in the order in which they arrived.
    ///
    /// # Errors
    /// As `map`.
    pub async fn map_unordered<V, T>(
        &mut self,
        values: impl IntoIterator<Item = V>,
        call: impl Fn(&A, V) -> ObjectRef<T>,
    ) -> Result<Vec<T>>
    where
        T: DeserializeOwned + 'static,
    {
        let results = self.run(values, call).await?;
        Ok(results.into_iter().map(|(_, value)| value).collect())
    }

    /// Work that is given to the pool and taken from it one by one.
    ///
    /// ```no_run
    /// # struct Worker; #[wingbeat::actor] impl Worker { fn new() -> Self { Worker } fn run(&mut self, x: u64) -> u64 { x } }
    /// # async fn run() -> wingbeat::Result<()> {
    /// let mut pool = wingbeat::ActorPool::new([Worker::remote(), Worker::remote()]);
    /// let mut work = pool.work();
    /// for x in 0..10u64 {
    ///     work.submit(|actor| actor.run(x)).await?;
    /// }
    /// while let Some(result) = work.next().await {
    ///     println!("{}", result?);
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn work<T>(&mut self) -> PoolWork<A, T> {
        PoolWork { idle: self.actors.iter().cloned().collect(), busy: Vec::new(), done: VecDeque::new(), submitted: 0 }
    }

    async fn run<V, T>(
        &mut self,
        values: impl IntoIterator<Item = V>,
        call: impl Fn(&A, V) -> ObjectRef<T>,
    ) -> Result<Vec<(usize, T)>>
    where
        T: DeserializeOwned + 'static,
    {
        let mut work = self.work();
        let mut results = Vec::new();
        for value in values {
            work.submit(|actor| call(actor, value)).await?;
            while let Some((position, object)) = work.done.pop_front() {
                results.push((position, object.get().await?));
            }
        }
        while let Some((position, object)) = work.first_done().await? {
            results.push((position, object.get().await?));
        }
        Ok(results)
    }
}

/// Calls that an [`ActorPool`] works on; see [`ActorPool::work`].
pub struct PoolWork<A, T> {
    idle: VecDeque<A>,
    /// Calls under way, by the order in which they were submitted.
    busy: Vec<(usize, A, ObjectRef<T>)>,
    /// Calls that are over and were not taken yet.
    done: VecDeque<(usize, ObjectRef<T>)>,
    submitted: usize,
}

impl<A, T: DeserializeOwned + 'static> PoolWork<A, T> {
    /// Calls an actor, when one is free.
    ///
    /// # Errors
    /// The pool is empty.
    pub async fn submit(&mut self, call: impl FnOnce(&A) -> ObjectRef<T>) -> Result<()> {
        if self.idle.is_empty() {
            self.finish_one().await?;
        }
        let Some(actor) = self.idle.pop_front() else {
            return Err(Error::InvalidArgument { what: "the pool has no actors; make it of at least one".into() });
        };
        let object = call(&actor);
        self.busy.push((self.submitted, actor, object));
        self.submitted += 1;
        Ok(())
    }

    /// The result of the call that was submitted first of those that were not taken yet; none if there are no more.
    pub async fn next(&mut self) -> Option<Result<T>> {
        let done = self.done.iter().map(|(position, _)| position);
        let first = *self.busy.iter().map(|(position, _, _)| position).chain(done).min()?;
        loop {
            if let Some(at) = self.done.iter().position(|(position, _)| *position == first) {
                let (_, object) = self.done.remove(at)?;
                return Some(object.get().await);
            }
            if let Err(error) = self.finish_one().await {
                return Some(Err(error));
            }
        }
    }

    /// The result of the call that ended first of those that were not taken yet; none if there are no more.
    pub async fn next_unordered(&mut self) -> Option<Result<T>> {
        match self.first_done().await {
            Ok(Some((_, object))) => Some(object.get().await),
            Ok(None) => None,
            Err(error) => Some(Err(error)),
        }
    }

    async fn first_done(&mut self) -> Result<Option<(usize, ObjectRef<T>)>> {
        if self.done.is_empty() {
            self.finish_one().await?;
        }
        Ok(self.done.pop_front())
    }

    /// Waits until a call ends, if there is one; its actor is free again.
    async fn finish_one(&mut self) -> Result<()> {
        if self.busy.is_empty() {
            return Ok(());
        }
        let refs = self.busy.iter().map(|(_, _, object)| object.clone()).collect();
        let (ready, _) = wait(refs, 1, None).await?;
        let ended = |ready: &ObjectRef<T>| self.busy.iter().position(|(_, _, object)| object.id() == ready.id());
        if let Some(at) = ready.first().and_then(ended) {
            let (position, actor, object) = self.busy.swap_remove(at);
            self.idle.push_back(actor);
            self.done.push_back((position, object));
        }
        Ok(())
    }
}
