//! A process's membership in a cluster, as users hold it.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::RwLock;
use tarpc::client::RpcError;
use wingbeat_core::error::Error;
use wingbeat_core::{ClusterId, JobId, ResourceSet};
use wingbeat_net::handshake::Role;
use wingbeat_net::messages::HeadMessage;
use wingbeat_net::mux;
use wingbeat_net::services::HeadClient;

use crate::note::note;
use crate::owner::Owner;
use crate::owner::object::Handle;
use crate::wire::io::Io;
use crate::wire::process::{Prepared, Process};

/// A process's membership in a cluster. Cheap to clone; refs and handles carry it.
#[derive(Clone)]
pub struct Session {
    process: Process,
}

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Session({}, {})", self.process.wire.who.job, self.process.id())
    }
}

static GLOBAL: RwLock<Option<Session>> = RwLock::new(None);

thread_local! {
    /// Each with the number of its guard.
    static ENTERED: RefCell<Vec<(u64, Session)>> = const { RefCell::new(Vec::new()) };
    static NEXT_ENTERED: Cell<u64> = const { Cell::new(0) };
}

/// While it lives, its session is the one that this thread's calls use. Of several, it is the one that was entered last.
pub struct Entered {
    /// Guards may be dropped in any order.
    number: u64,
    _not_send: std::marker::PhantomData<*const ()>,
}

impl Drop for Entered {
    fn drop(&mut self) {
        let left = ENTERED.with_borrow_mut(|entered| {
            let at = entered.iter().rposition(|(number, _)| *number == self.number)?;
            Some(entered.remove(at))
        });
        // Outside of the borrow: it may be the last of its session.
        drop(left);
    }
}

/// Why a session is over whose program has ended it.
const SHUT_DOWN: &str = "it was shut down";

impl Session {
    /// The innermost entered session of this thread, else the one of the whole process.
    ///
    /// # Errors
    /// [`Error::NoSession`].
    pub fn current() -> Result<Session, Error> {
        if let Some(session) = ENTERED.with_borrow(|entered| entered.last().map(|(_, session)| session.clone())) {
            return Ok(session);
        }
        GLOBAL.read().clone().ok_or(Error::NoSession)
    }

    /// The session of the whole process, if it has one that lasts.
    pub fn of_process() -> Option<Session> {
        GLOBAL.read().clone().filter(|session| !session.process.is_over())
    }

    /// Whether it is that of a worker process: its job's, and not that of what runs there.
    pub fn is_of_worker(&self) -> bool {
        self.process.executor().is_some()
    }

    /// Makes this the session of this thread until the guard is dropped.
    pub fn enter(&self) -> Entered {
        let number = NEXT_ENTERED.get();
        NEXT_ENTERED.set(number + 1);
        ENTERED.with_borrow_mut(|entered| entered.push((number, self.clone())));
        Entered { number, _not_send: std::marker::PhantomData }
    }

    /// Makes `session` the one of the whole process.
    pub fn set_global(session: Option<Session>) {
        let old = std::mem::replace(&mut *GLOBAL.write(), session);
        drop(old);
    }

    pub(crate) fn from_process(process: Process) -> Session {
        Session { process }
    }

    /// The process behind the session, for Wingbeat's own crates.
    pub fn process(&self) -> &Process {
        &self.process
    }

    /// What the process owns.
    pub(crate) fn owner(&self) -> &Arc<Owner> {
        &self.process.owner
    }

    /// The namespace of the actors that this job names.
    pub fn namespace(&self) -> &str {
        &self.process.wire.who.namespace
    }

    /// The devices that were assigned to this worker process.
    pub fn gpu_ids(&self) -> Vec<u32> {
        self.process.wire.assigned.read().gpus.clone()
    }

    /// What the lease of this worker process holds.
    pub fn assigned_resources(&self) -> ResourceSet {
        self.process.wire.assigned.read().resources.clone()
    }

    /// The job.
    pub fn job(&self) -> JobId {
        self.process.wire.who.job
    }

    /// The cluster.
    pub fn cluster(&self) -> ClusterId {
        self.process.cluster()
    }

    /// Asks the head something; see [`Process::ask_head`].
    pub(crate) async fn ask_head<T, Q, F>(&self, question: Q) -> Result<T, Error>
    where
        Q: Fn(HeadClient) -> F + Send,
        F: Future<Output = Result<T, RpcError>> + Send + 'static,
        T: Send + 'static,
    {
        self.process.ask_head(question).await
    }

    /// Leaves the cluster; a private one ends. Refs to small values that have arrived can still be read. Every other
    /// ref, stream and call of the session, also a pending one, fails with [`Error::SessionEnded`]. What runs in a worker process has the
    /// session of its job, which it cannot end.
    pub async fn shutdown(&self) {
        if self.is_of_worker() {
            return;
        }
        let process = self.process.clone();
        let mine = GLOBAL.read().as_ref().is_some_and(|global| Arc::ptr_eq(global.owner(), &process.owner));
        if mine {
            Session::set_global(None);
        }
        let (done, finished) = tokio::sync::oneshot::channel();
        let leaving = Leaving { process: process.clone(), done: Some(done) };
        if matches!(process.wire.who.role, Role::Driver(_)) {
            let is_over = process.is_over();
            if !is_over {
                process.tell_head(HeadMessage::Leaves);
            }
            self.last_output(is_over).await;
        }
        drop(leaving);
        let _ = finished.await;
    }

    /// Waits, for a moment at most, until what this job's worker processes have printed was shown.
    async fn last_output(&self, is_over: bool) {
        // Output that takes longer than this is lost; leaving must not depend on it.
        let limit = Duration::from_secs(3);
        let begun = Instant::now();
        let settled = match self.process.connected_head() {
            Some(head) if !is_over => head.settle_output(mux::within(limit), self.job()).await,
            _ => Ok(true),
        };
        let process = self.process.clone();
        let left = limit.saturating_sub(begun.elapsed());
        let last = async move { tokio::time::timeout(left, process.log(Vec::new())).await };
        let is_shown = !matches!(self.process.io().spawn(last).await, Ok(Err(_)));
        if !is_shown || matches!(settled, Ok(false) | Err(RpcError::DeadlineExceeded)) {
            note(
                "some of what tasks and actors have printed last is not shown: it took too long to write it here, or an actor to end",
            );
        }
    }
}

/// A process that leaves its cluster. When this is dropped, it does: also where whoever waits for that gives up.
struct Leaving {
    process: Process,
    /// Told when it has left.
    done: Option<tokio::sync::oneshot::Sender<()>>,
}

impl Drop for Leaving {
    fn drop(&mut self) {
        let (process, done) = (self.process.clone(), self.done.take());
        // Joining threads blocks; the caller's runtime must not.
        let spawned = std::thread::Builder::new().name("wingbeat-shutdown".into()).spawn(move || {
            process.shut_down(SHUT_DOWN);
            done.map(|done| done.send(()))
        });
        if spawned.is_err() {
            self.process.shut_down(SHUT_DOWN);
        }
    }
}

impl Prepared {
    /// Takes part from now on, as a process of `job`. The head and the node are attached afterwards.
    pub fn start(self, io: &Arc<Io>, job: JobId, namespace: String, cluster: ClusterId) -> Session {
        Session { process: self.start_process(io, job, namespace, cluster) }
    }
}

impl Handle {
    /// The session that the object belongs to; none for a call that failed before it had one.
    pub fn session(&self) -> Option<Session> {
        Process::of(&Owner::of(self)?).map(Session::from_process)
    }
}
