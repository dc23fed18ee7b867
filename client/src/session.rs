//! A program's membership in a cluster.

use std::collections::BTreeMap;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use wingbeat_core::error::Result;
use wingbeat_core::{ClusterId, JobId, NodeId};

use crate::cluster::{self, Explanation, Node, Subject};
use crate::named::{self, NamedActor};
use crate::{ActorHandle, ActorRef, ObjectRef};

/// A process's membership in a cluster, as [`init`](crate::init) gives it. Cheap to clone.
///
/// Most programs have one, and need not mention it: the functions of this crate use the session of the whole process, or the one
/// that was entered last. A program that has joined several clusters says which:
///
/// ```no_run
/// # #[wingbeat::remote] fn square(x: u64) -> u64 { x * x }
/// # async fn run() -> wingbeat::Result<()> {
/// let small = wingbeat::init().private().num_cpus(1).global(false).await?;
/// let large = wingbeat::init_at("10.0.0.1:6420").global(false).await?;
/// let here = small.scope(async { square::remote(3).get().await }).await?;
/// let there = large.scope(async { square::remote(3).get().await }).await?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Session {
    runtime: wingbeat_process::Session,
}

impl Session {
    pub(crate) fn new(runtime: wingbeat_process::Session) -> Session {
        Session { runtime }
    }

    /// The runtime's session, for Wingbeat's own crates. Nothing of it is promised.
    #[doc(hidden)]
    pub fn runtime(&self) -> &wingbeat_process::Session {
        &self.runtime
    }

    /// The session that calls of this thread use: the one that was entered last, else the one of the whole process.
    ///
    /// # Errors
    /// [`Error::NoSession`](crate::Error::NoSession).
    pub fn current() -> Result<Session> {
        wingbeat_process::Session::current().map(Session::new)
    }

    /// Makes this the session of this thread until the guard is dropped. In asynchronous code, whose thread changes, use
    /// [`scope`](Self::scope).
    ///
    /// ```no_run
    /// # fn run(session: wingbeat::Session) -> wingbeat::Result<()> {
    /// let guard = session.enter();
    /// let number = wingbeat::put(&7)?;   // in the cluster of this session
    /// drop(guard);
    /// # Ok(())
    /// # }
    /// ```
    pub fn enter(&self) -> SessionGuard {
        SessionGuard { _entered: self.runtime.enter() }
    }

    /// The same future, in this session on whatever thread it runs.
    ///
    /// ```no_run
    /// # #[wingbeat::remote] fn square(x: u64) -> u64 { x * x }
    /// # async fn run(session: wingbeat::Session) {
    /// let task = tokio::spawn(session.scope(async { square::remote(3).get().await }));
    /// # }
    /// ```
    pub fn scope<F: Future>(&self, future: F) -> Scope<F> {
        Scope { session: self.clone(), future: Some(Box::pin(future)) }
    }

    /// As [`put`](crate::put), in this session.
    ///
    /// # Errors
    /// As `put`.
    pub fn put<T: Serialize + Send + 'static>(&self, value: &T) -> Result<ObjectRef<T>> {
        self.runtime.put(value).map(ObjectRef::new)
    }

    /// As [`get_all`](crate::get_all).
    ///
    /// # Errors
    /// As `get_all`.
    pub async fn get_all<'a, T, I>(&self, refs: I) -> Result<Vec<T>>
    where
        T: DeserializeOwned + 'static,
        I: IntoIterator<Item = &'a ObjectRef<T>>,
    {
        // Refs know their session.
        crate::get_all(refs).await
    }

    /// The actor of this name in the session's namespace, by the type of its handle; as `Class::named` in this session.
    ///
    /// ```no_run
    /// # struct Tally { n: u64 }
    /// # #[wingbeat::actor] impl Tally { fn new(n: u64) -> Self { Tally { n } } fn add(&mut self, by: u64) -> u64 { self.n += by; self.n } }
    /// # async fn run(session: wingbeat::Session) -> wingbeat::Result<()> {
    /// let tally: TallyHandle = session.named("visits").await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// There is none, or it is of another class.
    pub async fn named<H: ActorHandle>(&self, name: &str) -> Result<H> {
        let found = self.runtime.find_actor(name, None, Some(H::class())).await?;
        Ok(H::from(ActorRef::new(found)))
    }

    /// The actor of this name in the session's namespace, whatever its class; as [`ActorRef::named`] in this session.
    ///
    /// # Errors
    /// There is none.
    pub async fn named_actor(&self, name: &str) -> Result<ActorRef> {
        self.runtime.find_actor(name, None, None).await.map(ActorRef::new)
    }

    /// As [`list_named_actors`](crate::list_named_actors), in this session.
    ///
    /// # Errors
    /// The head is gone.
    pub async fn named_actors(&self) -> Result<Vec<NamedActor>> {
        named::in_namespace(&self.runtime).await
    }

    /// The nodes of the cluster, by id.
    ///
    /// ```no_run
    /// # async fn run(session: wingbeat::Session) -> wingbeat::Result<()> {
    /// for node in session.nodes().await? {
    ///     println!("{} ({}): {:?} of {:?} are free", node.id, node.hostname, node.available, node.resources);
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// The head is gone.
    pub async fn nodes(&self) -> Result<Vec<Node>> {
        cluster::nodes(&self.runtime).await
    }

    /// What all nodes together have, by name: `CPU`, `GPU`, `memory` in bytes, and custom resources. Nodes that are being
    /// drained or are suspect count, too.
    ///
    /// ```no_run
    /// # async fn run(session: wingbeat::Session) -> wingbeat::Result<()> {
    /// println!("{} CPUs", session.cluster_resources().await?["CPU"]);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// The head is gone.
    pub async fn cluster_resources(&self) -> Result<BTreeMap<String, f64>> {
        Ok(cluster::sum(self.nodes().await?.into_iter().map(|node| node.resources)))
    }

    /// What is free on all nodes together now, by name.
    ///
    /// # Errors
    /// The head is gone.
    pub async fn available_resources(&self) -> Result<BTreeMap<String, f64>> {
        Ok(cluster::sum(self.nodes().await?.into_iter().map(|node| node.available)))
    }

    /// Why something waits, or where it runs: the answer of `wingbeat why`. Takes the id of an object (its task is
    /// meant), a task, an actor, a placement group or a node.
    ///
    /// ```no_run
    /// # #[wingbeat::remote(num_gpus = 8)] fn train() {}
    /// # async fn run(session: wingbeat::Session) -> wingbeat::Result<()> {
    /// let done = train::remote();
    /// println!("{}", session.why(done.id()).await?);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// Nobody knows it, or the head is gone.
    pub async fn why(&self, subject: impl Into<Subject>) -> Result<Explanation> {
        let subject: Subject = subject.into();
        self.runtime.why(subject.into_message()).await.map(Explanation::from_message)
    }

    /// Sets what all jobs of a namespace together may hold at a time; `None` for anything. Resources that are not named
    /// are not limited.
    ///
    /// ```no_run
    /// # async fn run(session: wingbeat::Session) -> wingbeat::Result<()> {
    /// session.set_quota("research", Some(&[("CPU", 64.0), ("GPU", 8.0)])).await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// An amount that cannot be, or the head is gone.
    pub async fn set_quota(&self, namespace: &str, limit: Option<&[(&str, f64)]>) -> Result<()> {
        self.runtime.set_quota(namespace, limit).await
    }

    /// Places nothing more on a node; what still runs there after `within` is ended and runs again elsewhere, as far as
    /// it may be tried again.
    ///
    /// # Errors
    /// There is no such node, or the head is gone.
    pub async fn drain_node(&self, node: NodeId, within: Duration, why: &str) -> Result<()> {
        self.runtime.drain_node(node, within, why).await
    }

    /// A node that was being drained takes work again.
    ///
    /// # Errors
    /// There is no such node, or the head is gone.
    pub async fn end_drain(&self, node: NodeId) -> Result<()> {
        self.runtime.end_drain(node).await
    }

    /// The namespace of the actors that this job names.
    pub fn namespace(&self) -> &str {
        self.runtime.namespace()
    }

    /// The job of this process.
    pub fn job(&self) -> JobId {
        self.runtime.job()
    }

    /// The cluster.
    pub fn cluster(&self) -> ClusterId {
        self.runtime.cluster()
    }

    /// Whether the session has ended, because it was shut down or the cluster is gone.
    pub fn is_over(&self) -> bool {
        self.runtime.process().is_over()
    }

    /// Leaves the cluster; a private one ends. Refs to small values that have arrived can still be read. Every other
    /// ref, stream and call of the session, also a pending one, fails with
    /// [`Error::SessionEnded`](crate::Error::SessionEnded).
    pub async fn shutdown(&self) {
        self.runtime.shutdown().await;
    }

    /// As [`shutdown`](Self::shutdown), blocking this thread.
    pub fn shutdown_blocking(&self) {
        wingbeat_process::block_on(self.shutdown());
    }
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.runtime.fmt(f)
    }
}

/// While it lives, its session is the one that this thread's calls use. Of several, it is the one that was entered last. They may
/// be dropped in any order.
#[must_use = "the session is left when this is dropped"]
pub struct SessionGuard {
    _entered: wingbeat_process::Entered,
}

impl fmt::Debug for SessionGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SessionGuard")
    }
}

/// A future in a session; see [`Session::scope`].
#[must_use = "a future does nothing before it is awaited"]
pub struct Scope<F> {
    session: Session,
    /// None once it was dropped, which also happens in the session.
    future: Option<Pin<Box<F>>>,
}

impl<F> Drop for Scope<F> {
    fn drop(&mut self) {
        let _entered = self.session.enter();
        self.future = None;
    }
}

impl<F: Future> Future for Scope<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<F::Output> {
        let _entered = self.session.enter();
        match &mut self.future {
            Some(future) => future.as_mut().poll(context),
            None => Poll::Pending,
        }
    }
}

impl<F> fmt::Debug for Scope<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Scope({:?})", self.session)
    }
}
