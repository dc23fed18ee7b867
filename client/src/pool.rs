use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use parking_lot::Mutex;
use serde::de::DeserializeOwned;
use wingbeat_core::ActorId;
use wingbeat_core::error::{Error, Result};
use wingbeat_process::Session;

use crate::{ObjectRef, wait};

/// Spreads values over a set of actors, one call at a time each.
///
/// An actor that has died leaves the pool: the call that found it dead fails, and later ones go to the others. When none is
/// left, calls fail with the [`Error::ActorDied`] of the last.
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
    dead: Arc<Dead>,
}

/// The members of a pool that have died, by their number, with the error that said so.
#[derive(Default)]
struct Dead(Mutex<BTreeMap<usize, Error>>);

/// An actor of a pool.
struct Member<A> {
    number: usize,
    actor: A,
    /// What the last call went to. Only its result says which actor a handle stands for.
    called: Option<(Session, ActorId)>,
}

impl<A> Member<A> {
    fn is(&self, actor: ActorId) -> bool {
        self.called.as_ref().is_some_and(|(_, called)| *called == actor)
    }

    fn is_known_to_be_dead(&self) -> bool {
        self.called.as_ref().is_some_and(|(session, actor)| session.is_dead(*actor))
    }
}

impl<A> std::fmt::Debug for ActorPool<A> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ActorPool({} actors, {} of them dead)", self.actors.len(), self.dead.0.lock().len())
    }
}

impl<A: Clone> ActorPool<A> {
    /// A pool of these actors.
    pub fn new(actors: impl IntoIterator<Item = A>) -> Self {
        ActorPool { actors: actors.into_iter().collect(), dead: Arc::default() }
    }

    /// The number of actors that are not known to be dead.
    pub fn len(&self) -> usize {
        self.actors.len() - self.dead.0.lock().len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
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
        let dead = self.dead.0.lock();
        let living = self.actors.iter().enumerate().filter(|(number, _)| !dead.contains_key(number));
        let idle = living.map(|(number, actor)| Member { number, actor: actor.clone(), called: None }).collect();
        PoolWork { idle, busy: Vec::new(), done: VecDeque::new(), submitted: 0, dead: self.dead.clone() }
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
    idle: VecDeque<Member<A>>,
    /// Calls under way, by the order in which they were submitted.
    busy: Vec<(usize, Member<A>, ObjectRef<T>)>,
    /// Calls that are over and were not taken yet.
    done: VecDeque<(usize, ObjectRef<T>)>,
    submitted: usize,
    /// The pool's.
    dead: Arc<Dead>,
}

impl<A, T: DeserializeOwned + 'static> PoolWork<A, T> {
    /// Calls an actor, when one is free.
    ///
    /// # Errors
    /// The pool is empty, or all its actors are dead: [`Error::ActorDied`].
    pub async fn submit(&mut self, call: impl FnOnce(&A) -> ObjectRef<T>) -> Result<()> {
        let mut member = self.free().await?;
        let object = call(&member.actor);
        let handle = object.handle();
        member.called = handle.session().zip(handle.producer());
        self.busy.push((self.submitted, member, object));
        self.submitted += 1;
        Ok(())
    }

    /// A living actor without a call, when there is one.
    async fn free(&mut self) -> Result<Member<A>> {
        loop {
            while let Some(member) = self.idle.pop_front() {
                match &member.called {
                    Some((_, actor)) if member.is_known_to_be_dead() => {
                        let cause = Box::new(Error::ActorEnded { by: "something else while it was idle".into() });
                        let class = std::any::type_name::<A>().to_owned();
                        let error = Error::ActorDied { actor: *actor, class, cause };
                        self.dead.0.lock().entry(member.number).or_insert(error);
                    }
                    _ => return Ok(member),
                }
            }
            if self.busy.is_empty() {
                let last = self.dead.0.lock().values().next_back().cloned();
                let what = || "the pool has no actors; make it of at least one".to_owned();
                return Err(last.unwrap_or_else(|| Error::InvalidArgument { what: what() }));
            }
            self.finish_one().await?;
        }
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

    /// Waits until a call ends, if there is one; its actor is free again, if it lives.
    async fn finish_one(&mut self) -> Result<()> {
        if self.busy.is_empty() {
            return Ok(());
        }
        let refs = self.busy.iter().map(|(_, _, object)| object.clone()).collect();
        let (ready, _) = wait(refs, 1, None).await?;
        let ended = |ready: &ObjectRef<T>| self.busy.iter().position(|(_, _, object)| object.id() == ready.id());
        if let Some(at) = ready.first().and_then(ended) {
            let (position, member, object) = self.busy.swap_remove(at);
            match object.handle().failure() {
                // A call can fail with the death of another actor, from which an argument was to come.
                Some(error @ Error::ActorDied { actor, .. }) if member.is(actor) => {
                    self.dead.0.lock().insert(member.number, error);
                }
                _ => self.idle.push_back(member),
            }
            self.done.push_back((position, object));
        }
        Ok(())
    }
}
