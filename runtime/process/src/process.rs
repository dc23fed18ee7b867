//! A process that takes part in a cluster: what it is, what it holds, and how it ends.
//!
//! A [`Process`] owns one IO thread (a private tokio runtime), on which every connection, timer and queue
//! lives. User code never runs there, and what it calls from its own threads only encodes, queues and waits.
//!
//! It ends by [`Session::shutdown`], by the loss of the head (a driver), or with its daemon (a worker process).
//! Then everything that is pending fails with the reason, connections close after what was queued is
//! written, and the IO thread is joined.

use std::future::Future;
use std::net::SocketAddr;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use dashmap::DashMap;
use futures::FutureExt;
use parking_lot::{Mutex, RwLock};
use wingbeat_core::codec::Encoded;
use wingbeat_core::error::Error;
use wingbeat_core::spec::Address;
use wingbeat_core::value::ObjectValue;
use wingbeat_core::{ActorId, ClusterId, JobId, LeaseId, ObjectId, PlacementGroupId, ProcessId, TaskId};
use wingbeat_net::address::Listener;
use wingbeat_net::handshake::{Hello, Purpose, Role, Token, Welcome};
use wingbeat_net::messages::{HeadEvent, HeadMessage, LogLine, PeerMessage, WorkerCommand};

use crate::context::Execution;
use crate::deletions::Deletions;
use crate::groups::Watched;
use crate::head::HeadLink;
use crate::io::Io;
use crate::leftovers::Leftovers;
use crate::lineage::Lineage;
use crate::object::{Freed, Handle, Object, ObjectTable, Released};
use crate::peers::Peers;
use crate::session::Session;
use crate::storage::Home;
use crate::stream::Streams;
use crate::submission::Submission;

/// How long freed memory is kept, since it may be needed again at once.
const EBB_KEEP: std::time::Duration = std::time::Duration::from_secs(1);

/// What a worker process adds to a process: it runs tasks. Implemented by `wingbeat-worker`, called from
/// the IO thread; nothing here may wait.
pub trait Executor: Send + Sync {
    /// Something to run, or to give back, cancel or continue, from the process `from`.
    fn deliver(&self, from: ProcessId, work: Work);
    /// A process is gone: what runs for it is pointless.
    fn peer_lost(&self, peer: ProcessId);
    /// The daemon has something to say.
    fn command(&self, command: WorkerCommand);
    /// The code that runs is about to wait: every unstarted task goes back to its owner.
    fn begin_wait(&self);
    /// It goes on.
    fn end_wait(&self);
}

/// See [`Executor::deliver`].
#[derive(Debug)]
pub enum Work {
    /// Tasks of a lease; the first has this number.
    Tasks(LeaseId, u64, Vec<Arc<wingbeat_core::spec::TaskSpec>>),
    /// Calls of the actor that this process is.
    Calls(ActorId, wingbeat_core::Incarnation, Vec<Arc<wingbeat_core::spec::TaskSpec>>),
    /// Up to so many unstarted tasks are to go back.
    TakeBack(LeaseId, u32),
    /// A task is not wanted any more.
    Cancel(TaskId, bool),
    /// The consumer of a stream took so many items.
    StreamTaken(TaskId, u32),
    /// Results arrived, and the refs in them are registered.
    Received(Vec<TaskId>),
    /// An item of a stream arrived, and the refs in it are registered.
    ItemReceived(ObjectId),
}

/// What a process must know to take part.
pub struct Config {
    /// Its id.
    pub id: ProcessId,
    /// The token of the cluster.
    pub token: Token,
    /// What it is.
    pub role: Role,
    /// Where to listen for other machines, if at all.
    pub listen: Option<SocketAddr>,
}

/// One participating process. Users hold it as [`Session`].
pub struct Process {
    pub(crate) id: ProcessId,
    pub(crate) job: JobId,
    pub(crate) namespace: String,
    pub(crate) token: Token,
    pub(crate) role: Role,
    pub(crate) io: tokio::runtime::Handle,
    io_thread: Arc<Io>,
    address: Address,
    cluster: ClusterId,
    pub(crate) objects: ObjectTable,
    pub(crate) peers: Peers,
    pub(crate) deletions: Deletions,
    pub(crate) leftovers: Leftovers,
    pub(crate) head: OnceLock<HeadLink>,
    pub(crate) home: Home,
    executor: OnceLock<Arc<dyn Executor>>,
    pub(crate) submission: Submission,
    pub(crate) lineage: Lineage,
    pub(crate) streams: Streams,
    /// Executions that wait, by task, so that the head's word of a deadlock finds them.
    pub(crate) waits: DashMap<TaskId, Arc<Execution>>,
    next: AtomicU64,
    /// Borrowed objects to report as dropped.
    released: tokio::sync::mpsc::UnboundedSender<Released>,
    /// Actors by their handle object, whether that is ours or borrowed.
    pub(crate) handles: DashMap<ObjectId, ActorId>,
    log_sink: OnceLock<Box<dyn Fn(Vec<LogLine>) + Send + Sync>>,
    pub(crate) gpus: RwLock<Vec<u32>>,
    /// The placement group in which what is submitted here runs, unless told otherwise.
    pub(crate) captures: RwLock<Option<PlacementGroupId>>,
    pub(crate) groups: Watched,
    /// How many nodes there are, as far as the head has said.
    pub(crate) nodes: AtomicU32,
    shut_down: AtomicBool,
    over: tokio::sync::watch::Sender<bool>,
    /// What must outlive the session, such as an embedded head and node.
    keep: Mutex<Vec<Box<dyn std::any::Any + Send>>>,
}

/// A process that listens already and has not joined yet: whoever it asks to join learns where it listens, and
/// connections that come early wait in the kernel's queue.
pub struct Prepared {
    config: Config,
    listener: Listener,
}

impl Prepared {
    /// Starts listening. Must be called on the IO runtime.
    ///
    /// # Errors
    /// When it cannot listen.
    pub async fn bind(config: Config) -> Result<Prepared, Error> {
        let listener = Listener::bind(config.id, config.listen).await?;
        Ok(Prepared { config, listener })
    }

    /// Where it listens.
    pub fn address(&self) -> &Address {
        self.listener.address()
    }

    /// How it introduces itself before it knows its cluster.
    pub fn hello(&self, purpose: Purpose) -> Hello {
        Hello {
            address: self.address().clone(),
            role: self.config.role,
            purpose,
            cluster: None,
            version: env!("CARGO_PKG_VERSION").into(),
            losses: 0,
            to: None,
        }
    }

    /// Takes part from now on, as a process of `job`. The head and the node are attached afterwards.
    pub fn start(self, io: &Arc<Io>, job: JobId, namespace: String, cluster: ClusterId) -> Session {
        let Prepared { config, listener } = self;
        let (released, to_release) = tokio::sync::mpsc::unbounded_channel();
        let process = Arc::new(Process {
            id: config.id,
            job,
            namespace,
            token: config.token,
            role: config.role,
            io: io.handle().clone(),
            io_thread: io.clone(),
            address: listener.address().clone(),
            cluster,
            objects: ObjectTable::default(),
            peers: Peers::default(),
            deletions: Deletions::default(),
            leftovers: Leftovers::default(),
            head: OnceLock::new(),
            home: Home::default(),
            executor: OnceLock::new(),
            submission: Submission::default(),
            lineage: Lineage::default(),
            streams: Streams::default(),
            waits: DashMap::new(),
            next: AtomicU64::new(1),
            released,
            handles: DashMap::new(),
            log_sink: OnceLock::new(),
            gpus: RwLock::default(),
            captures: RwLock::default(),
            groups: Watched::default(),
            nodes: AtomicU32::new(0),
            shut_down: AtomicBool::new(false),
            over: tokio::sync::watch::Sender::new(false),
            keep: Mutex::default(),
        });
        process.peers.learn(&process.address);
        process.vital("its releases", process.clone().release_loop(to_release));
        process.vital("its submissions", process.clone().submission_loop());
        process.accept_peers(listener, cluster);
        Session::from_process(process)
    }
}

impl Process {
    /// The cluster is known by the time that anybody asks.
    fn accept_peers(self: &Arc<Self>, listener: Listener, cluster: ClusterId) {
        let accepting = self.clone();
        self.io.spawn(async move {
            let mut over = accepting.over.subscribe();
            let welcome = Welcome { address: accepting.address.clone(), cluster };
            let token = accepting.token.clone();
            let served = accepting.clone();
            let serving = listener.serve(token, welcome, move |stream, hello| {
                let process = served.clone();
                process.io.clone().spawn(async move {
                    match hello.role {
                        Role::Driver(_) | Role::Worker => process.accept_peer(stream, &hello).await,
                        Role::Node(_) | Role::Head | Role::Tool => {
                            process.serve_asker(stream, hello.address.process).await;
                        }
                    }
                });
            });
            tokio::select! {
                () = serving => {}
                _ = over.wait_for(|over| *over) => {}
            }
        });
    }

    /// Says where the head is.
    pub fn set_head(&self, head: HeadLink) {
        let _ = self.head.set(head);
    }

    /// Remembers where a process is.
    pub fn know(&self, address: &Address) {
        self.peers.learn(address);
    }

    /// Makes this a worker process.
    pub fn set_executor(&self, executor: Arc<dyn Executor>) {
        let _ = self.executor.set(executor);
    }

    /// Says where output of user code goes (drivers).
    pub fn set_log_sink(&self, sink: Box<dyn Fn(Vec<LogLine>) + Send + Sync>) {
        let _ = self.log_sink.set(sink);
    }

    /// Says which devices user code may use.
    pub fn set_gpus(&self, gpus: Vec<u32>) {
        *self.gpus.write() = gpus;
    }

    /// Says in which placement group what is submitted here runs, unless told otherwise.
    pub fn set_captures(&self, group: Option<PlacementGroupId>) {
        *self.captures.write() = group;
    }

    /// Keeps something alive until the session has ended.
    pub fn keep(&self, what: Box<dyn std::any::Any + Send>) {
        self.keep.lock().push(what);
    }

    pub(crate) fn log(&self, lines: Vec<LogLine>) {
        if let Some(sink) = self.log_sink.get() {
            sink(lines);
        }
    }

    /// Its id.
    pub fn id(&self) -> ProcessId {
        self.id
    }

    /// Where it listens.
    pub fn address(&self) -> &Address {
        &self.address
    }

    pub(crate) fn address_of(&self, process: ProcessId) -> Option<Address> {
        if process == self.id { Some(self.address.clone()) } else { self.peers.address(process) }
    }

    pub(crate) fn cluster(&self) -> ClusterId {
        self.cluster
    }

    pub(crate) fn executor(&self) -> Option<&Arc<dyn Executor>> {
        self.executor.get()
    }

    /// How it introduces itself.
    pub fn hello(&self, purpose: Purpose) -> Hello {
        Hello {
            address: self.address.clone(),
            role: self.role,
            purpose,
            cluster: Some(self.cluster),
            version: env!("CARGO_PKG_VERSION").into(),
            losses: 0,
            to: None,
        }
    }

    /// The next number of this process, for a task or a put.
    pub(crate) fn next_task(&self) -> TaskId {
        TaskId { owner: self.id, seq: self.next.fetch_add(1, Ordering::Relaxed) }
    }

    /// Runs `future` on the IO thread, blocking this one.
    pub(crate) fn on_io<T, F>(&self, future: F) -> Result<T, Error>
    where
        F: Future<Output = Result<T, Error>> + Send + 'static,
        T: Send + 'static,
    {
        match self.io_thread.run(future) {
            Some(answer) => answer,
            None => Err(self.over_error()),
        }
    }

    /// Stores an encoded value as a new object of ours.
    pub(crate) fn put_encoded(
        self: &Arc<Self>,
        session: &Session,
        encoded: &Encoded<'_>,
        held: Vec<Handle>,
    ) -> Result<Handle, Error> {
        let id = self.next_task().output(0);
        let mut stored = self.store(id, encoded, false)?;
        stored.refs = crate::refs::describe(session, &held);
        let handle = self.objects.insert(session, id, None);
        self.resolve_object(handle.object(), ObjectValue::Stored(stored), held);
        Ok(handle)
    }

    /// Sets an object's value and tells everybody who waits for it.
    pub(crate) fn resolve_object(self: &Arc<Self>, object: &Arc<Object>, value: ObjectValue, contained: Vec<Handle>) {
        let is_stored = if let ObjectValue::Stored(stored) = &value {
            self.objects.stored(object.id(), &stored.nodes);
            true
        } else {
            false
        };
        let announce = object.resolve(value, contained);
        if is_stored && !self.objects.has(object) {
            // It was freed in the same moment, perhaps before its value was there to be deleted.
            self.freed_while_stored(object);
        }
        self.value_is_known(object);
        if announce.subscribers.is_empty() {
            return;
        }
        if let Some(value) = object.value() {
            for subscriber in announce.subscribers {
                self.send_value(subscriber, object.id(), value.clone());
            }
        }
    }

    /// Tells a borrower the value of an object of ours.
    pub(crate) fn send_value(self: &Arc<Self>, to: ProcessId, id: ObjectId, value: ObjectValue) {
        let value = match crate::refs::too_many(&value, || id.to_string()) {
            Some(error) => ObjectValue::Failed(Box::new(error)),
            None => value,
        };
        self.send_to(to, PeerMessage::Resolved(vec![(id, value)]));
    }

    fn freed_while_stored(self: &Arc<Self>, object: &Arc<Object>) {
        let Some(stored) = object.take_stored() else { return };
        self.objects.not_stored(object.id(), &stored.nodes);
        if object.id().owner() == self.id {
            self.delete_stored(object.id(), &stored);
        }
    }

    /// Handles of the refs in a value that arrived.
    pub fn hold_refs(self: &Arc<Self>, session: &Session, refs: Option<&wingbeat_core::value::Refs>) -> Vec<Handle> {
        let Some(refs) = refs else { return Vec::new() };
        for owner in &refs.owners {
            self.peers.learn(owner);
        }
        self.borrow_all(session, &refs.ids)
    }

    /// The last handle of an object here was dropped.
    pub(crate) fn unreferenced(self: &Arc<Self>, object: &Arc<Object>) {
        self.free_if_unneeded(object.id());
    }

    pub(crate) fn free_if_unneeded(self: &Arc<Self>, id: ObjectId) {
        if self.objects.has_ebbed(id) {
            self.clone().give_memory_back();
        }
        match self.objects.free_if_unneeded(id, self.id) {
            Freed::Kept => {}
            Freed::Borrowed(released) => {
                self.peers.asks_no_more_for(id);
                if let Some((_, actor)) = self.handles.remove(&id) {
                    self.submission.forget_actor(actor);
                }
                // Fails only when the session is over, and then nobody needs to know.
                let _ = self.released.send(released);
            }
            Freed::Owned(value) => {
                if let Some(ObjectValue::Stored(stored)) = value {
                    self.delete_stored(id, &stored);
                }
                self.is_freed(id);
                if let Some((_, actor)) = self.handles.remove(&id)
                    && !self.is_shut_down()
                {
                    let by = "the drop of its last handle".to_owned();
                    self.tell_head(HeadMessage::TerminateActor { actor, by });
                    self.submission.forget_actor(actor);
                }
            }
        }
    }

    /// After many objects were freed, and a moment in which the rest of them are: without this, the table and the
    /// allocator would keep their memory for good.
    fn give_memory_back(self: Arc<Self>) {
        self.io.clone().spawn(async move {
            tokio::time::sleep(EBB_KEEP).await;
            self.objects.shrink();
            #[cfg(target_env = "gnu")]
            // SAFETY: it takes no pointers, and may be called at any time from any thread.
            unsafe {
                libc::malloc_trim(0);
            }
        });
    }

    /// Reports dropped borrowed objects to their owners.
    async fn release_loop(self: Arc<Self>, mut released: tokio::sync::mpsc::UnboundedReceiver<Released>) {
        let mut batch = Vec::new();
        while released.recv_many(&mut batch, 4096).await > 0 {
            self.release(batch.drain(..));
        }
    }

    /// Runs a part on the IO thread without which everything would wait for ever: if it panics, the session ends.
    pub(crate) fn vital(self: &Arc<Self>, part: &'static str, running: impl Future<Output = ()> + Send + 'static) {
        let process = self.clone();
        self.io.spawn(async move {
            if let Err(panic) = AssertUnwindSafe(running).catch_unwind().await {
                process.broken(part, &*panic);
            }
        });
    }

    /// A panic on the IO thread, which was printed there, is a defect of Wingbeat's.
    fn broken(self: &Arc<Self>, part: &str, panic: &(dyn std::any::Any + Send)) {
        let message = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
        let message = message.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default();
        let why = format!("Wingbeat's IO thread panicked in {part} ({message}); this is a defect, please report it");
        self.end(&Error::SessionEnded { why: why.clone() });
        if self.executor().is_some() {
            // A worker process without its IO thread is of no use, and its daemon and owners act on its end.
            eprintln!("wingbeat: this worker process ends: {why}");
            // SAFETY: ends the process without running user code's exit handlers.
            unsafe { libc::_exit(101) }
        }
    }

    /// Waits, for a moment at most, until what this job's worker processes have printed was shown.
    pub(crate) async fn last_output(self: &Arc<Self>) {
        let Ok(head) = self.head_client().await else { return };
        // Output that takes longer than this is lost; leaving must not depend on it.
        let limit = std::time::Duration::from_secs(2);
        let _ = head.settle_output(wingbeat_net::mux::within(limit), self.job).await;
    }

    /// What the head has to say.
    pub(crate) fn head_event(self: &Arc<Self>, event: HeadEvent) {
        match event {
            HeadEvent::Deadlock { task, on, cycle } => {
                // Not held while it is told: who is woken may begin another wait at once.
                let execution = self.waits.get(&task).map(|execution| execution.clone());
                if let Some(execution) = execution {
                    execution.deadlocked(on, Error::Deadlock { cycle });
                }
            }
            HeadEvent::NodeDied { node, why } => {
                // A stopped daemon closes no connection. A driver finds another node, and a worker process ends: what it
                // runs may run elsewhere already.
                if let Some(storage) = self.storage().filter(|storage| storage.node() == node) {
                    storage.connection().close();
                }
                self.deletions.forget(node);
                self.copies_lost_with(node, &why);
                self.submission.node_died(self, node, &why);
            }
            HeadEvent::PlacementGroup { group, state } => self.group_is(group, &state),
            HeadEvent::Nodes(count) => self.nodes.store(count, Ordering::Relaxed),
            other => self.submission.head_event(self, other),
        }
    }

    pub(crate) fn is_shut_down(&self) -> bool {
        self.shut_down.load(Ordering::Acquire)
    }

    /// Whether the session is over.
    pub fn is_over(&self) -> bool {
        *self.over.borrow()
    }

    /// Waits until the session is over.
    pub async fn over(&self) {
        let mut over = self.over.subscribe();
        let _ = over.wait_for(|over| *over).await;
    }

    /// Why nothing is taken any more, once the session is over.
    pub fn ended(&self) -> Option<&Error> {
        self.objects.ended()
    }

    pub(crate) fn over_error(&self) -> Error {
        self.ended().cloned().unwrap_or_else(|| Error::SessionEnded { why: "it was shut down".into() })
    }

    /// Fails everything that is pending; nothing new is taken. The process can still be shut down. Only the first
    /// reason counts.
    pub fn end(self: &Arc<Self>, error: &Error) {
        // First, so that what another thread is submitting right now fails too: whatever it enters from here on fails at
        // once, and what it has entered before is found below.
        self.objects.end(error);
        let error = self.over_error();
        self.submission.end(self, &error);
        self.streams.end(&error);
        for object in self.objects.pending() {
            self.resolve_object(&object, ObjectValue::Failed(Box::new(error.clone())), Vec::new());
        }
        let watched = self.groups.end();
        drop(watched);
        let _ = self.over.send(true);
    }

    /// Leaves the cluster; blocks until the IO thread has ended.
    pub fn shut_down(self: &Arc<Self>, why: &str) {
        if self.shut_down.swap(true, Ordering::AcqRel) {
            return;
        }
        self.end(&Error::SessionEnded { why: why.into() });
        self.submission.close();
        self.objects.clear(&self.over_error());
        if let Some(head) = self.head.get() {
            head.close();
        }
        self.peers.close();
        if let Some(storage) = self.storage() {
            storage.connection().close();
        }
        let kept = std::mem::take(&mut *self.keep.lock());
        drop(kept);
        self.io_thread.stop();
    }
}

#[cfg(test)]
#[path = "process_tests.rs"]
pub(crate) mod tests;
