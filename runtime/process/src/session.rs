//! A process's membership in a cluster, as users hold it.

use std::cell::RefCell;
use std::future::Future;
use std::sync::Arc;

use parking_lot::RwLock;
use wingbeat_core::error::Error;
use wingbeat_core::value::ObjectValue;
use wingbeat_core::{ClusterId, JobId};
use wingbeat_net::handshake::Role;
use wingbeat_net::mux;
use wingbeat_net::services::HeadClient;

use crate::io::block_on;
use crate::object::Handle;
use crate::process::Process;

/// A process's membership in a cluster. Cheap to clone; refs and handles carry it.
#[derive(Clone)]
pub struct Session {
    process: Arc<Process>,
}

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Session({}, {})", self.process.job, self.process.id)
    }
}

static GLOBAL: RwLock<Option<Session>> = RwLock::new(None);

thread_local! {
    static ENTERED: RefCell<Vec<Session>> = const { RefCell::new(Vec::new()) };
}

/// While it lives, its session is the one that this thread's calls use.
pub struct Entered {
    _not_send: std::marker::PhantomData<*const ()>,
}

impl Drop for Entered {
    fn drop(&mut self) {
        ENTERED.with_borrow_mut(Vec::pop);
    }
}

impl Session {
    /// The innermost entered session of this thread, else the one of the whole process.
    ///
    /// # Errors
    /// [`Error::NoSession`].
    pub fn current() -> Result<Session, Error> {
        if let Some(session) = ENTERED.with_borrow(|entered| entered.last().cloned()) {
            return Ok(session);
        }
        GLOBAL.read().clone().ok_or(Error::NoSession)
    }

    /// Makes this the session of this thread until the guard is dropped.
    pub fn enter(&self) -> Entered {
        ENTERED.with_borrow_mut(|entered| entered.push(self.clone()));
        Entered { _not_send: std::marker::PhantomData }
    }

    /// Makes `session` the one of the whole process.
    pub fn set_global(session: Option<Session>) {
        let old = std::mem::replace(&mut *GLOBAL.write(), session);
        drop(old);
    }

    pub(crate) fn from_process(process: Arc<Process>) -> Session {
        Session { process }
    }

    /// The process behind the session, for Wingbeat's own crates.
    pub fn process(&self) -> &Arc<Process> {
        &self.process
    }

    /// The namespace of the actors that this job names.
    pub fn namespace(&self) -> &str {
        &self.process.namespace
    }

    /// The devices that were assigned to this worker process.
    pub fn gpu_ids(&self) -> Vec<u32> {
        self.process.gpus.read().clone()
    }

    /// The job.
    pub fn job(&self) -> JobId {
        self.process.job
    }

    /// The cluster.
    pub fn cluster(&self) -> ClusterId {
        self.process.cluster()
    }

    pub(crate) fn check_ours(&self, handle: &Handle) -> Result<(), Error> {
        match handle.session() {
            None => match handle.object().value() {
                Some(ObjectValue::Failed(error)) => Err(*error),
                _ => Err(Error::NoSession),
            },
            Some(theirs) if theirs.cluster() == self.cluster() => Ok(()),
            Some(theirs) => {
                Err(Error::ForeignRef { what: handle.id().to_string(), theirs: theirs.cluster(), ours: self.cluster() })
            }
        }
    }

    /// Puts a value into the cluster; this process owns it.
    ///
    /// # Errors
    /// [`Error::Encode`], [`Error::ForeignRef`], or what the store answers.
    pub fn put<T: serde::Serialize + Send + 'static>(&self, value: &T) -> Result<Handle, Error> {
        use crate::refs::{Content, PackError};
        if let Some(error) = self.process.ended() {
            return Err(error.clone());
        }
        let packed = crate::refs::pack(self, value).map_err(|error| match error {
            PackError::Codec(error) => {
                Error::Encode { what: format!("a value of type {}", std::any::type_name::<T>()), why: error.0 }
            }
            PackError::Other(error) => error,
        })?;
        match packed.content {
            Content::Stored(handle) => Ok(handle),
            Content::Inline(bytes) => {
                let handle = self.process.objects.insert(self, self.process.next_task().output(0), None);
                let refs = crate::refs::describe(self, &packed.held);
                let value = wingbeat_core::value::Packed { bytes: bytes.into(), refs };
                self.process.resolve_object(handle.object(), ObjectValue::Inline(value), packed.held);
                Ok(handle)
            }
        }
    }

    /// Blocks this thread until `future` is done. Works inside and outside of any tokio runtime.
    pub fn block_on<F: Future>(&self, future: F) -> F::Output {
        block_on(future)
    }

    /// Asks the head something, on the IO thread.
    pub(crate) async fn ask_head<T, Q, F>(&self, question: Q) -> Result<T, Error>
    where
        Q: FnOnce(HeadClient) -> F + Send,
        F: Future<Output = Result<T, tarpc::client::RpcError>> + Send + 'static,
        T: Send + 'static,
    {
        let head = self.process.head_client().await?;
        let asking = self.process.io.spawn(question(head));
        let answer = asking.await.map_err(|_| self.process.over_error())?;
        mux::answered(answer, "the head").map_err(|error| self.process.ended().cloned().unwrap_or(error))
    }

    /// Leaves the cluster; a private one ends. Refs to small values that have arrived can still be read. Every other
    /// ref, stream and call of the session, also a pending one, fails with [`Error::SessionEnded`].
    pub async fn shutdown(&self) {
        let process = self.process.clone();
        let mine = GLOBAL.read().as_ref().is_some_and(|global| Arc::ptr_eq(&global.process, &process));
        if mine {
            Session::set_global(None);
        }
        if matches!(process.role, Role::Driver(_)) && !process.is_over() {
            process.last_output().await;
        }
        // Joining threads blocks; the caller's runtime must not.
        let (done, finished) = tokio::sync::oneshot::channel();
        let spawned = std::thread::Builder::new().name("wingbeat-shutdown".into()).spawn(move || {
            process.shut_down("it was shut down");
            let _ = done.send(());
        });
        match spawned {
            Ok(_) => drop(finished.await),
            Err(_) => self.process.shut_down("it was shut down"),
        }
    }
}
