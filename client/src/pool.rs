use std::collections::VecDeque;

use serde::de::DeserializeOwned;
use wingbeat_core::error::Result;

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

    async fn run<V, T>(
        &mut self,
        values: impl IntoIterator<Item = V>,
        call: impl Fn(&A, V) -> ObjectRef<T>,
    ) -> Result<Vec<(usize, T)>>
    where
        T: DeserializeOwned + 'static,
    {
        let mut idle: VecDeque<A> = self.actors.iter().cloned().collect();
        let mut busy: Vec<(usize, A, ObjectRef<T>)> = Vec::new();
        let mut results = Vec::new();
        for (position, value) in values.into_iter().enumerate() {
            if idle.is_empty() {
                idle.push_back(Self::take_one(&mut busy, &mut results).await?);
            }
            if let Some(actor) = idle.pop_front() {
                let object = call(&actor, value);
                busy.push((position, actor, object));
            }
        }
        while !busy.is_empty() {
            Self::take_one(&mut busy, &mut results).await?;
        }
        Ok(results)
    }

    /// Waits for a result, and answers with the actor that is free again.
    async fn take_one<T: DeserializeOwned + 'static>(
        busy: &mut Vec<(usize, A, ObjectRef<T>)>,
        results: &mut Vec<(usize, T)>,
    ) -> Result<A> {
        if busy.is_empty() {
            let what = "the pool has no actors; make it of at least one".into();
            return Err(crate::Error::InvalidArgument { what });
        }
        let refs = busy.iter().map(|(_, _, object)| object.clone()).collect();
        let (ready, _) = wait(refs, 1, None).await?;
        let at = ready.first().and_then(|ready| busy.iter().position(|(_, _, object)| object.id() == ready.id()));
        let (position, actor, object) = busy.swap_remove(at.unwrap_or(0));
        results.push((position, object.get().await?));
        Ok(actor)
    }
}
