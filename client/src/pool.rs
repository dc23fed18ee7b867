use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};

use futures::StreamExt;
use futures::stream::FuturesUnordered;
use parking_lot::Mutex;
use serde::de::DeserializeOwned;
use tokio::sync::Notify;
use tokio::sync::futures::Notified;
use wingbeat_core::ActorId;
use wingbeat_core::error::{Error, Result};
use wingbeat_process::{Handle, ReadyFuture, Session, Waiting};

use crate::{AnyRef, ObjectRef, current_task};

/// Spreads values over a set of actors, one call at a time each, also where several [`map`](Self::map)s and [`work`](Self::work)s
/// share the pool; which of them gets an actor that is free is not promised.
///
/// Members can be added and idle ones removed while work runs: [`push`](Self::push), [`pop_idle`](Self::pop_idle). An actor that has died
/// leaves the pool: the call that found it dead fails, and later ones go to the others. When none is left, calls fail with the
/// [`Error::ActorDied`] of the last.
///
/// ```no_run
/// # struct Worker; #[wingbeat::actor] impl Worker { fn new() -> Self { Worker } fn run(&mut self, x: u64) -> u64 { x } }
/// # async fn run() -> wingbeat::Result<()> {
/// let pool = wingbeat::ActorPool::new([Worker::remote(), Worker::remote()]);
/// let results = pool.map(0..10u64, |actor, x| actor.run(x)).await?;
/// # Ok(())
/// # }
/// ```
pub struct ActorPool<A> {
    members: Arc<Members<A>>,
}

/// The members of a pool, which its works share.
struct Members<A> {
    state: Mutex<State<A>>,
    /// A member is idle or busy that was not before, or one has died.
    changed: Notify,
}

struct State<A> {
    idle: VecDeque<Member<A>>,
    /// By the number of the call that each works on.
    busy: BTreeMap<u64, (Member<A>, AnyRef)>,
    /// How many are about to get a call, and are in neither.
    taken: usize,
    /// The number of the next call.
    next_call: u64,
    last_death: Option<Error>,
}

/// An actor of a pool.
struct Member<A> {
    actor: A,
    /// What the last call went to. Only its result says which actor a handle stands for.
    called: Option<(Session, ActorId)>,
}

impl<A> Member<A> {
    fn is(&self, actor: ActorId) -> bool {
        self.called.as_ref().is_some_and(|(_, called)| *called == actor)
    }

    /// Why it can work no more, if that is known.
    fn death(&self) -> Option<Error> {
        let (session, actor) = self.called.as_ref()?;
        let cause = || Box::new(Error::ActorEnded { by: "something else while it was idle".into() });
        let class = || std::any::type_name::<A>().to_owned();
        session.is_dead(*actor).then(|| Error::ActorDied { actor: *actor, class: class(), cause: cause() })
    }
}

impl<A> Members<A> {
    /// The member that worked on this call is free again, if it lives. Whoever sees the end of the call first says so.
    fn ended(&self, call: u64) {
        if self.state.lock().ended(call) {
            self.changed.notify_waiters();
        }
    }
}

impl<A> State<A> {
    /// Whether it was not known.
    fn ended(&mut self, call: u64) -> bool {
        let Some((member, object)) = self.busy.remove(&call) else { return false };
        match object.handle().failure() {
            // A call can fail with the death of another actor, from which an argument was to come.
            Some(error @ Error::ActorDied { actor, .. }) if member.is(actor) => self.last_death = Some(error),
            _ => self.idle.push_back(member),
        }
        true
    }

    /// A living member without a call.
    fn take_idle(&mut self) -> Option<Member<A>> {
        while let Some(member) = self.idle.pop_front() {
            match member.death() {
                None => return Some(member),
                Some(error) => self.last_death = Some(error),
            }
        }
        None
    }
}

/// A member that is about to get a call. If it gets none, as where user code panics, it is idle again.
struct Taken<A> {
    member: Option<Member<A>>,
    members: Arc<Members<A>>,
}

impl<A> Taken<A> {
    fn actor(&self) -> &A {
        #[allow(clippy::expect_used, reason = "it is there until `works_on` has consumed this")]
        let member = self.member.as_ref().expect("a member that is taken");
        &member.actor
    }

    /// The number of the call.
    fn works_on(mut self, object: AnyRef) -> u64 {
        let mut state = self.members.state.lock();
        let call = state.next_call;
        state.next_call += 1;
        state.taken -= 1;
        if let Some(mut member) = self.member.take() {
            let handle = object.handle();
            member.called = handle.session().zip(handle.producer().map(|call| call.actor));
            state.busy.insert(call, (member, object));
        }
        drop(state);
        // Whoever waits for a free one has this call to look at now.
        self.members.changed.notify_waiters();
        call
    }
}

impl<A> Drop for Taken<A> {
    fn drop(&mut self) {
        let Some(member) = self.member.take() else { return };
        let mut state = self.members.state.lock();
        state.taken -= 1;
        state.idle.push_back(member);
        drop(state);
        self.members.changed.notify_waiters();
    }
}

impl<A> fmt::Debug for ActorPool<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.members.state.lock();
        write!(f, "ActorPool({} idle, {} busy)", state.idle.len(), state.busy.len() + state.taken)
    }
}

impl<A: Clone> ActorPool<A> {
    /// A pool of these actors.
    pub fn new(actors: impl IntoIterator<Item = A>) -> Self {
        let idle = actors.into_iter().map(|actor| Member { actor, called: None }).collect();
        let state = State { idle, busy: BTreeMap::new(), taken: 0, next_call: 0, last_death: None };
        ActorPool { members: Arc::new(Members { state: Mutex::new(state), changed: Notify::new() }) }
    }

    /// The number of actors that are not known to be dead.
    pub fn len(&self) -> usize {
        let state = self.members.state.lock();
        state.idle.len() + state.busy.len() + state.taken
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Adds an actor. Work that waits for a free one, or runs later, uses it at once.
    ///
    /// ```no_run
    /// # struct Worker; #[wingbeat::actor] impl Worker { fn new() -> Self { Worker } fn run(&mut self, x: u64) -> u64 { x } }
    /// # async fn run() -> wingbeat::Result<()> {
    /// let pool = wingbeat::ActorPool::new([Worker::remote()]);
    /// let (results, ()) = futures::join!(
    ///     pool.map(0..1000u64, |actor, x| actor.run(x)),
    ///     async { pool.push(Worker::remote()) },   // helps with what is left
    /// );
    /// # Ok(())
    /// # }
    /// ```
    pub fn push(&self, actor: A) {
        self.members.state.lock().idle.push_back(Member { actor, called: None });
        self.members.changed.notify_waiters();
    }

    /// Removes an actor that has no call of this pool; none if all have one. Its caller has the last handle then, perhaps, and the actor
    /// ends with that.
    ///
    /// ```no_run
    /// # struct Worker; #[wingbeat::actor] impl Worker { fn new() -> Self { Worker } fn run(&mut self, x: u64) -> u64 { x } }
    /// # fn run(pool: wingbeat::ActorPool<WorkerHandle>) {
    /// while pool.len() > 2 {
    ///     let Some(actor) = pool.pop_idle() else { break };
    ///     actor.actor().terminate();
    /// }
    /// # }
    /// ```
    pub fn pop_idle(&self) -> Option<A> {
        let mut state = self.members.state.lock();
        // Nobody may be looking at the work to which these belong.
        let ended: Vec<u64> =
            state.busy.iter().filter(|(_, (_, object))| object.is_ready()).map(|(call, _)| *call).collect();
        let has_ended = !ended.is_empty();
        for call in ended {
            state.ended(call);
        }
        let member = state.take_idle();
        drop(state);
        if has_ended {
            self.members.changed.notify_waiters();
        }
        member.map(|member| member.actor)
    }

    /// Calls an actor with every value, and answers with the results in the order of the values. After a failure, and when this is
    /// dropped before it is done, no more calls are made, and those that run are cancelled.
    ///
    /// # Errors
    /// The first failure; or the pool is empty.
    pub async fn map<V, T>(
        &self,
        values: impl IntoIterator<Item = V>,
        call: impl Fn(&A, V) -> ObjectRef<T>,
    ) -> Result<Vec<T>>
    where
        T: DeserializeOwned + 'static,
    {
        let mut results = self.run(values, call).await?;
        results.sort_by_key(|(call, _)| *call);
        Ok(results.into_iter().map(|(_, value)| value).collect())
    }

    /// As [`map`](Self::map), with the results in the order in which they arrived.
    ///
    /// # Errors
    /// As `map`.
    pub async fn map_unordered<V, T>(
        &self,
        values: impl IntoIterator<Item = V>,
        call: impl Fn(&A, V) -> ObjectRef<T>,
    ) -> Result<Vec<T>>
    where
        T: DeserializeOwned + 'static,
    {
        let results = self.run(values, call).await?;
        Ok(results.into_iter().map(|(_, value)| value).collect())
    }

    /// Work that is given to the pool and taken from it one by one. What was submitted goes on when it is dropped.
    ///
    /// ```no_run
    /// # struct Worker; #[wingbeat::actor] impl Worker { fn new() -> Self { Worker } fn run(&mut self, x: u64) -> u64 { x } }
    /// # async fn run() -> wingbeat::Result<()> {
    /// let pool = wingbeat::ActorPool::new([Worker::remote(), Worker::remote()]);
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
    pub fn work<T>(&self) -> PoolWork<A, T> {
        let (calls, ended, watched) = (BTreeMap::new(), BTreeMap::new(), FuturesUnordered::new());
        PoolWork { members: self.members.clone(), calls, ended, ends: 0, watched, watched_to: 0 }
    }

    /// Results with the numbers of their calls, which ascend in the order of the values.
    async fn run<V, T>(
        &self,
        values: impl IntoIterator<Item = V>,
        call: impl Fn(&A, V) -> ObjectRef<T>,
    ) -> Result<Vec<(u64, T)>>
    where
        T: DeserializeOwned + 'static,
    {
        let mut work = CancelledWork(self.work());
        let work = &mut work.0;
        let mut results = Vec::new();
        for value in values {
            work.submit(|actor| call(actor, value)).await?;
            while let Some(ended) = work.first_ended() {
                results.push((ended, work.take(ended).await?));
            }
        }
        while let Some(ended) = work.next_ended().await? {
            results.push((ended, work.take(ended).await?));
        }
        Ok(results)
    }
}

/// Cancels what was not taken.
struct CancelledWork<A, T>(PoolWork<A, T>);

impl<A, T> Drop for CancelledWork<A, T> {
    fn drop(&mut self) {
        for (object, _) in self.0.calls.values() {
            object.cancel();
        }
    }
}

/// Calls that an [`ActorPool`] works on; see [`ActorPool::work`].
pub struct PoolWork<A, T> {
    members: Arc<Members<A>>,
    /// Its calls whose results were not taken, by their numbers, each with its place in `ended` if it is there.
    calls: BTreeMap<u64, (ObjectRef<T>, Option<u64>)>,
    /// Those of them that have ended, in the order in which they did.
    ended: BTreeMap<u64, u64>,
    /// How many of its calls have ended.
    ends: u64,
    /// Its calls that have not ended, and those of other works that this one has waited for: nobody else may be looking at them.
    watched: FuturesUnordered<Watched>,
    /// All calls before this one are watched, or were.
    watched_to: u64,
}

/// Answers with the number of a call when that has ended.
struct Watched {
    call: u64,
    ready: ReadyFuture,
}

impl Future for Watched {
    type Output = u64;
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<u64> {
        Pin::new(&mut self.ready).poll(cx).map(|()| self.call)
    }
}

impl<A, T: DeserializeOwned + 'static> PoolWork<A, T> {
    /// Calls an actor, when one is free.
    ///
    /// # Errors
    /// The pool is empty, or all its actors are dead: [`Error::ActorDied`].
    pub async fn submit(&mut self, call: impl FnOnce(&A) -> ObjectRef<T>) -> Result<()> {
        let taken = self.free().await?;
        let object = call(taken.actor());
        let ready = ReadyFuture::new(object.handle());
        let call = taken.works_on(object.any());
        self.calls.insert(call, (object, None));
        self.watched.push(Watched { call, ready });
        Ok(())
    }

    /// A living actor without a call, when there is one.
    async fn free(&mut self) -> Result<Taken<A>> {
        let members = self.members.clone();
        loop {
            let mut changed = pin!(members.changed.notified());
            // Before it looks, so that it misses nothing.
            changed.as_mut().enable();
            let on: Vec<Handle> = {
                let mut state = members.state.lock();
                if let Some(member) = state.take_idle() {
                    state.taken += 1;
                    return Ok(Taken { member: Some(member), members: members.clone() });
                }
                if state.busy.is_empty() && state.taken == 0 {
                    let what = || "the pool has no actors; make it of at least one".to_owned();
                    return Err(state.last_death.clone().unwrap_or_else(|| Error::InvalidArgument { what: what() }));
                }
                for (call, (_, object)) in state.busy.range(self.watched_to..) {
                    if !self.calls.contains_key(call) {
                        self.watched.push(Watched { call: *call, ready: ReadyFuture::new(object.handle()) });
                    }
                }
                self.watched_to = state.next_call;
                let about_to_be_busy = state.taken;
                // Any of them will do.
                let is_known = about_to_be_busy == 0 && current_task().is_some();
                let busy = state.busy.values().map(|(_, object)| object.handle().clone());
                if is_known { busy.collect() } else { Vec::new() }
            };
            self.an_end(&on, Some(changed)).await?;
        }
    }

    /// The result of the call that was submitted first of those that were not taken yet; none if there are no more.
    pub async fn next(&mut self) -> Option<Result<T>> {
        let (&call, (object, _)) = self.calls.first_key_value()?;
        let on = [object.handle().clone()];
        while !self.has_ended(call) {
            if let Err(error) = self.an_end(&on, None).await {
                return Some(Err(error));
            }
        }
        Some(self.take(call).await)
    }

    /// The result of the call that ended first of those that were not taken yet; none if there are no more.
    pub async fn next_unordered(&mut self) -> Option<Result<T>> {
        match self.next_ended().await {
            Ok(ended) => Some(self.take(ended?).await),
            Err(error) => Some(Err(error)),
        }
    }

    fn has_ended(&self, call: u64) -> bool {
        self.calls.get(&call).is_none_or(|(_, ended)| ended.is_some())
    }

    fn first_ended(&self) -> Option<u64> {
        self.ended.first_key_value().map(|(_, call)| *call)
    }

    /// The call that ended first of those that were not taken yet, when there is one; none if there are no more.
    async fn next_ended(&mut self) -> Result<Option<u64>> {
        while self.ended.is_empty() && !self.calls.is_empty() {
            let calls = self.calls.values().map(|(object, _)| object.handle().clone());
            let on = if current_task().is_some() { calls.collect() } else { Vec::new() };
            self.an_end(&on, None).await?;
        }
        Ok(self.first_ended())
    }

    /// The result of a call that has ended. It is taken only when it is here.
    async fn take(&mut self, call: u64) -> Result<T> {
        let Some((object, _)) = self.calls.get(&call) else { return Err(Error::NoSession) };
        let result = object.clone().get().await;
        if let Some((_, Some(ended))) = self.calls.remove(&call) {
            self.ended.remove(&ended);
        }
        result
    }

    /// Waits until a watched call ends, or the pool has `changed`. The running task waits for one of `on` meanwhile; for nobody, if there are none.
    async fn an_end(&mut self, on: &[Handle], mut changed: Option<Pin<&mut Notified<'_>>>) -> Result<()> {
        let mut waiting = None;
        std::future::poll_fn(|cx| {
            if let Poll::Ready(Some(call)) = self.watched.poll_next_unpin(cx) {
                self.members.ended(call);
                if let Some((_, ended)) = self.calls.get_mut(&call) {
                    *ended = Some(self.ends);
                    self.ended.insert(self.ends, call);
                    self.ends += 1;
                }
                return Poll::Ready(Ok(()));
            }
            if let Some(changed) = &mut changed
                && changed.as_mut().poll(cx).is_ready()
            {
                return Poll::Ready(Ok(()));
            }
            Waiting::keep_for_one(&mut waiting, on);
            match waiting.as_mut().map(|waiting| waiting.poll_interrupted(cx)) {
                Some(Poll::Ready(error)) => Poll::Ready(Err(error)),
                _ => Poll::Pending,
            }
        })
        .await
    }
}
