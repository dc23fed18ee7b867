//! A process that takes part in a cluster: what it is, what it holds, and how it ends.
//!
//! A [`Process`] owns a private tokio runtime, on which every connection, timer and queue lives. One thread at a time runs it: the IO
//! thread, or one that only waits (`wire/io.rs`). User code never runs meanwhile on that thread, and what it calls from its own
//! threads encodes, queues and waits.
//!
//! It ends by [`Session::shutdown`], by the loss of the head (a driver), or with its daemon (a worker process).
//! Then everything that is pending fails with the reason, connections close after what was queued is
//! written, and the IO thread is joined.

use std::any::Any;
use std::collections::BTreeMap;
use std::future::Future;
use std::net::SocketAddr;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};
use std::time::Duration;

use dashmap::{DashMap, DashSet};
use futures::future::BoxFuture;
use parking_lot::{Mutex, RwLock};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::task::AbortHandle;
use wingbeat_core::error::Error;
use wingbeat_core::spec::{ActorSpec, Address, PlacementGroupState};
use wingbeat_core::{ActorId, ClusterId, JobId, ObjectId, PlacementGroupId, ProcessId, ResourceSet, TaskId};
use wingbeat_net::address::Listener;
use wingbeat_net::handshake::{Hello, Purpose, Resumes, Role, Token, Welcome};
use wingbeat_net::messages::{HeadEvent, HeadMessage, LogLine, PeerMessage};
use wingbeat_net::moment::Moment;
#[cfg(test)]
use wingbeat_net::transport::memory::Network;
use wingbeat_net::{memory, panics};

use crate::note::note;
use crate::owner::table::Released;
use crate::owner::{Outside, Owner};
use crate::recorded::{Beginning, Event, Recorded};
use crate::user_thread::UserThread;
use crate::wire::executor::{Executor, ForTurn, HoldsUp, Interrupt};
use crate::wire::head_link::HeadLink;
use crate::wire::io::Io;
use crate::wire::looks::Looks;
use crate::wire::node_link::HomeNode;
use crate::wire::peers::Peers;
use crate::wire::to_delete::Deletions;
use crate::wire::watched::{Watched, ready_value};

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

/// Who a process is. Nothing of it changes.
#[derive(Clone)]
pub(crate) struct Identity {
    pub job: JobId,
    pub namespace: String,
    pub token: Token,
    pub role: Role,
    pub address: Address,
    pub cluster: ClusterId,
}

/// How a process ends.
pub(crate) struct Life {
    shut_down: AtomicBool,
    over: tokio::sync::watch::Sender<bool>,
    /// What must outlive the session, such as an embedded head and node.
    keep: Mutex<Vec<Box<dyn Any + Send>>>,
}

/// What a worker process was assigned with its lease. Each lease replaces that of the one before.
#[derive(Default)]
pub struct Assigned {
    /// Devices that user code may use.
    pub gpus: Vec<u32>,
    /// What the lease holds.
    pub resources: ResourceSet,
    /// The placement group in which what is submitted here runs, unless told otherwise.
    pub captures: Option<PlacementGroupId>,
    /// The actor that the process is.
    pub actor: Option<Arc<ActorSpec>>,
}

/// A function that shows what user code has printed.
type LogSink = Box<dyn Fn(Vec<LogLine>) -> BoxFuture<'static, ()> + Send + Sync>;

/// The connections of a process, and what runs beside them: a field for each, most of which have a type and a file of their own. All of it
/// lives until the process is shut down.
pub(crate) struct Wire {
    pub who: Identity,
    /// The thread on which all connections live.
    pub(super) io: Arc<Io>,
    /// Other processes, while they may live.
    pub peers: Peers,
    /// What nodes are yet to delete, while they live.
    pub(super) deletions: Deletions,
    /// Set once, when the process has a node: who answers for its objects when it is no more.
    pub(super) steward: OnceLock<Address>,
    /// Set once, when the head is known.
    pub(super) head: OnceLock<HeadLink>,
    /// The node whose store this process uses, if it has joined one.
    pub(super) home: HomeNode,
    /// Set once, in a worker process.
    pub(super) executor: OnceLock<Arc<dyn Executor>>,
    /// Results that wait for others; set once, in a worker process.
    pub(super) moment: OnceLock<Arc<Moment>>,
    /// Set once, when the actor that runs here has asked for its end.
    pub(super) exits: OnceLock<ActorId>,
    /// What waits, by task, so that the head's word of a deadlock finds it; until it goes on.
    pub waits: DashMap<TaskId, Arc<dyn Interrupt>>,
    /// Whether somebody looks which of those last.
    pub looks_at_waits: Looks,
    /// Whether somebody tells when there is less room in groups of the actor, and whether there is.
    pub looks_at_room: Looks,
    pub has_less_room: AtomicBool,
    /// Threads that are blocked while others are under way there, by address, until they go on; and whether somebody looks which of those last.
    pub blocked_threads: Mutex<BTreeMap<usize, Arc<dyn HoldsUp>>>,
    pub looks_at_blocked_threads: Looks,
    /// Calls of the actor that the process is which wait for their turn at its state.
    pub turns: Mutex<BTreeMap<TaskId, Arc<dyn ForTurn>>>,
    /// Whether somebody looks for whom they wait.
    pub looks_at_turns: Looks,
    /// Whether the head may know of one.
    pub turns_are_told: AtomicBool,
    /// What this process says to itself, in order: as the owner of tasks, and as who runs them.
    pub(super) to_itself: UnboundedSender<PeerMessage>,
    /// Placement groups that somebody here waits for, until they are gone.
    pub groups: Watched,
    /// Placement groups that were made here and end with this process, until they are removed, by whomever; with whether the head has
    /// answered that it has made them.
    pub own_groups: DashMap<PlacementGroupId, bool>,
    pub assigned: RwLock<Assigned>,
    /// Actors of another build, of which whoever runs this program was told; each once.
    pub other_builds: DashSet<ActorId>,
    /// Set once, in a driver.
    log_sink: OnceLock<LogSink>,
    /// What is heard and said is written down here, if the environment asks for that; until the end of the session.
    recorded: Option<Arc<Recorded>>,
    /// Which tasks that have failed are tried again, where user code says so.
    pub(super) questions: UserThread,
    life: Life,
}

/// One participating process: what it owns, and its connections. Cheap to clone. Users hold it as a session.
#[derive(Clone)]
pub struct Process {
    pub(crate) owner: Arc<Owner>,
    pub(crate) wire: Arc<Wire>,
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

    /// As [`Prepared::bind`], in a pretended network.
    #[cfg(test)]
    pub(crate) async fn bind_in(network: &Network, config: Config) -> Result<Prepared, Error> {
        let listener = Listener::bind_in(network, config.id, config.listen).await?;
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
            resumes: Resumes::Nothing,
            epoch: None,
        }
    }

    /// Takes part from now on, as a process of `job`. The head and the node are attached afterwards.
    pub(crate) fn start_process(self, io: &Arc<Io>, job: JobId, namespace: String, cluster: ClusterId) -> Process {
        let is_driver = matches!(self.config.role, Role::Driver(_));
        let recorded = Recorded::begin(Beginning { process: self.config.id, is_driver, job, cluster });
        self.start_recorded(recorded, io, (job, namespace, cluster))
    }

    /// The same, recorded by this.
    pub(super) fn start_recorded(
        self,
        recorded: Option<Recorded>,
        io: &Arc<Io>,
        (job, namespace, cluster): (JobId, String, ClusterId),
    ) -> Process {
        let Prepared { config, listener } = self;
        let address = listener.address().clone();
        let (to_itself, said) = unbounded_channel();
        let wire = Arc::new(Wire {
            who: Identity { job, namespace, token: config.token, role: config.role, address, cluster },
            io: io.clone(),
            peers: Peers::default(),
            deletions: Deletions::default(),
            steward: OnceLock::new(),
            head: OnceLock::new(),
            home: HomeNode::default(),
            executor: OnceLock::new(),
            moment: OnceLock::new(),
            exits: OnceLock::new(),
            waits: DashMap::new(),
            looks_at_waits: Looks::default(),
            looks_at_room: Looks::default(),
            has_less_room: AtomicBool::new(false),
            blocked_threads: Mutex::default(),
            looks_at_blocked_threads: Looks::default(),
            turns: Mutex::default(),
            looks_at_turns: Looks::default(),
            turns_are_told: AtomicBool::new(false),
            to_itself,
            groups: Watched::default(),
            own_groups: DashMap::new(),
            other_builds: DashSet::new(),
            assigned: RwLock::default(),
            log_sink: OnceLock::new(),
            recorded: recorded.map(Arc::new),
            questions: UserThread::new("wingbeat-asks"),
            life: Life {
                shut_down: AtomicBool::new(false),
                over: tokio::sync::watch::Sender::new(false),
                keep: Mutex::default(),
            },
        });
        let (owner, to_release) = Owner::new(config.id, cluster, wire.clone());
        let process = Process { owner, wire };
        process.know(process.address());
        process.vital("its releases", process.clone().release_loop(to_release));
        process.vital("its submissions", process.clone().submission_loop());
        process.vital("what it says to itself", process.clone().hear_itself(said));
        process.accept_peers(listener);
        process
    }
}

/// Apart, so that nothing but a branch is in the way where nothing is recorded.
#[cold]
#[inline(never)]
fn write_down(recorded: &Recorded, event: impl FnOnce() -> Event) {
    recorded.record(event());
}

impl Wire {
    /// Has what happens written down, if anything is: before others can answer to it.
    #[inline]
    pub(crate) fn record(&self, event: impl FnOnce() -> Event) {
        if let Some(recorded) = &self.recorded {
            write_down(recorded, event);
        }
    }

    /// Where this process is, and who answers for its objects when it is no more.
    pub(super) fn address(&self) -> Address {
        Address { steward: self.steward.get().cloned().map(Box::new), ..self.who.address.clone() }
    }

    /// For those who live as long as a connection.
    pub(super) fn recorded(&self) -> Option<Arc<Recorded>> {
        self.recorded.clone()
    }
}

impl Process {
    /// The process of an owner; none if that is part of no process.
    pub(crate) fn of(owner: &Arc<Owner>) -> Option<Process> {
        let outside: Arc<dyn Any + Send + Sync> = owner.outside.clone();
        let wire = outside.downcast().ok()?;
        Some(Process { owner: owner.clone(), wire })
    }

    /// The cluster is known by the time that anybody asks.
    fn accept_peers(&self, listener: Listener) {
        let accepting = self.clone();
        self.vital("taking connections", async move {
            let mut over = accepting.wire.life.over.subscribe();
            let Identity { token, cluster, .. } = accepting.wire.who.clone();
            let welcome =
                Welcome { address: accepting.wire.address(), cluster, epoch: None, patience: None, stands_by: None };
            let served = accepting.clone();
            let serving = listener.serve(token, welcome, move |stream, hello| {
                let process = served.clone();
                served.vital("serving a process", async move {
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
        let _ = self.wire.head.set(head);
    }

    /// Remembers where a process is.
    pub fn know(&self, address: &Address) {
        self.wire.peers.learn(address);
    }

    /// Makes this a worker process.
    pub fn set_executor(&self, executor: Arc<dyn Executor>) {
        let _ = self.wire.executor.set(executor);
        // Without a descriptor for it, nothing waits for others.
        let Ok(moment) = Moment::new().map(Arc::new) else { return };
        let _ = self.wire.moment.set(moment.clone());
        self.vital("waking who waits for others", async move { moment.run().await });
    }

    /// Says where output of user code goes (drivers); no lines: those before were the last. What is given is waited for until the lines are shown,
    /// and must not hold up the thread.
    pub fn set_log_sink(&self, sink: LogSink) {
        let _ = self.wire.log_sink.set(sink);
    }

    /// Says what this worker process works with from now on.
    pub fn assign(&self, assigned: Assigned) {
        *self.wire.assigned.write() = assigned;
    }

    /// Keeps something alive until the session has ended.
    pub fn keep(&self, what: Box<dyn std::any::Any + Send>) {
        self.wire.life.keep.lock().push(what);
    }

    pub(crate) async fn log(&self, lines: Vec<LogLine>) {
        if let Some(sink) = self.wire.log_sink.get() {
            sink(lines).await;
        }
    }

    /// Tells whoever runs the program what it should know. What a worker process writes is shown by its driver.
    pub(crate) fn notice(&self, text: &str) {
        note(text);
    }

    /// The objects for which user code waits here.
    pub fn awaited(&self) -> Vec<ObjectId> {
        let pending = self.owner.objects.pending();
        pending.iter().filter(|object| object.is_awaited()).map(|object| object.id()).collect()
    }

    /// Whether user code waits here for this one.
    pub fn is_awaited(&self, id: ObjectId) -> bool {
        self.owner.objects.get(id).is_some_and(|object| object.is_awaited())
    }

    /// Its id.
    pub fn id(&self) -> ProcessId {
        self.owner.id
    }

    /// Where it listens.
    pub fn address(&self) -> &Address {
        &self.wire.who.address
    }

    pub(crate) fn address_of(&self, process: ProcessId) -> Option<Address> {
        Outside::address_of(&*self.wire, process)
    }

    pub(crate) fn cluster(&self) -> ClusterId {
        self.wire.who.cluster
    }

    pub(crate) fn executor(&self) -> Option<&Arc<dyn Executor>> {
        self.wire.executor.get()
    }

    /// The private runtime, for something that is to be done now.
    pub fn io(&self) -> &tokio::runtime::Handle {
        self.attend();
        self.wire.io.handle()
    }

    /// Has the IO done now, if it rests for a moment.
    pub fn attend(&self) {
        self.wire.io.attend();
    }

    /// Whether the IO rests for a moment.
    pub(crate) fn rests(&self) -> bool {
        self.wire.io.rests()
    }

    /// Waits on this thread, which does the IO meanwhile, until `poll` is ready. None if that cannot be. See `Io::drive` for what
    /// is not to be done in `poll`.
    pub fn drive<T>(&self, poll: impl FnMut(&mut Context<'_>) -> Poll<T>) -> Option<T> {
        self.wire.io.drive(std::pin::pin!(std::future::poll_fn(poll)))
    }

    /// How it introduces itself.
    pub fn hello(&self, purpose: Purpose) -> Hello {
        let who = &self.wire.who;
        Hello {
            address: self.wire.address(),
            role: who.role,
            purpose,
            cluster: Some(who.cluster),
            version: env!("CARGO_PKG_VERSION").into(),
            losses: 0,
            to: None,
            resumes: Resumes::Nothing,
            epoch: None,
        }
    }

    /// Runs `future` on the IO thread, blocking this one.
    pub(crate) fn on_io<T, F>(&self, future: F) -> Result<T, Error>
    where
        F: Future<Output = Result<T, Error>> + Send + 'static,
        T: Send + 'static,
    {
        match self.wire.io.run(future) {
            Some(answer) => answer,
            None => Err(self.no_answer()),
        }
    }

    /// After many objects were freed, and a moment in which the rest of them are: without this, the table and the
    /// allocator would keep their memory for good.
    pub(super) fn give_memory_back(self) {
        self.clone().vital("giving memory back", async move {
            tokio::time::sleep(memory::KEEP).await;
            self.owner.objects.shrink();
            memory::trim_soon();
        });
    }

    /// Reports dropped borrowed objects to their owners.
    async fn release_loop(self, mut released: UnboundedReceiver<Released>) {
        let mut batch = Vec::new();
        while released.recv_many(&mut batch, 4096).await > 0 {
            self.owner.release(batch.drain(..));
        }
    }

    /// Hears what it says to itself, until the session is over.
    async fn hear_itself(self, mut said: UnboundedReceiver<PeerMessage>) {
        let mut over = self.wire.life.over.subscribe();
        loop {
            let message = tokio::select! {
                message = said.recv() => message,
                _ = over.wait_for(|over| *over) => None,
            };
            match (message, self.executor()) {
                (Some(PeerMessage::Work(work)), Some(executor)) => executor.deliver(self.id(), work),
                (Some(message), _) => self.owner.hears(self.id(), message),
                (None, _) => return,
            }
        }
    }

    /// Takes requests in and lets time pass, until the session is over.
    async fn submission_loop(self) {
        let mut next_tick: Option<u64> = None;
        loop {
            let woken = self.owner.submission.wake.notified();
            match next_tick {
                None => woken.await,
                Some(ms) => {
                    let _ = tokio::time::timeout(Duration::from_millis(ms.max(1)), woken).await;
                }
            }
            if self.is_shut_down() {
                return;
            }
            next_tick = self.owner.take_requests();
        }
    }

    /// Runs a part on the IO thread without which everything would wait for ever: if it panics, the session ends.
    pub fn vital(&self, part: &'static str, running: impl Future<Output = ()> + Send + 'static) -> AbortHandle {
        let process = self.clone();
        let running = async move {
            if let Err(said) = panics::caught(running).await {
                process.broken("Wingbeat's IO thread", part, &said);
            }
        };
        self.io().spawn(running).abort_handle()
    }

    /// As [`Process::vital`], for a thread that runs tasks of users, whose own panics it catches.
    pub fn vital_thread(&self, part: &str, running: impl FnOnce()) {
        if let Err(panic) = catch_unwind(AssertUnwindSafe(running)) {
            self.broken("a thread of Wingbeat's", part, panics::said(&*panic));
        }
    }

    /// What to say where the IO thread gives no answer: the session is over, or else what was to answer has panicked.
    pub(crate) fn no_answer(&self) -> Error {
        self.ended().cloned().unwrap_or_else(|| Error::SessionEnded {
            why: panics::defect("Wingbeat's IO thread", "what this waited for", "see above"),
        })
    }

    /// A panic of the runtime's own, which was printed where it happened, is a defect of Wingbeat's.
    fn broken(&self, of: &str, part: &str, said: &str) {
        let why = panics::defect(of, part, said);
        self.end(&Error::SessionEnded { why: why.clone() });
        if self.executor().is_some() {
            // A worker process that lacks a thread is of no use, and its daemon and owners act on its end.
            note(format_args!("this worker process ends: {why}"));
            self.end_recording();
            // SAFETY: ends the process without running user code's exit handlers.
            unsafe { libc::_exit(101) }
        }
    }

    /// What the head has to say.
    pub(crate) fn head_event(&self, event: HeadEvent) {
        match event {
            HeadEvent::SayAgain { question, tasks } => {
                for task in tasks {
                    let waiting = self.wire.waits.get(&task).map(|waiting| waiting.clone());
                    if let Some(waiting) = waiting {
                        waiting.say_again(question);
                    }
                }
                self.tell_head(HeadMessage::SaidAgain { question, wait: None });
            }
            HeadEvent::Deadlock { task, on, cycle } => {
                // Not held while it is told: who is woken may begin another wait at once.
                let waiting = self.wire.waits.get(&task).map(|waiting| waiting.clone());
                if let Some(waiting) = waiting {
                    waiting.deadlocked(on, Error::Deadlock { cycle });
                }
            }
            HeadEvent::NodeDied { node, why } => {
                // A stopped daemon closes no connection. A driver finds another node, and a worker process ends: what it
                // runs may run elsewhere already.
                if let Some(storage) = self.storage().filter(|storage| storage.node() == node) {
                    storage.connection().close();
                }
                self.wire.deletions.forget(node);
                self.owner.node_died(node, &why);
            }
            HeadEvent::Stops => {
                if let Some(head) = self.wire.head.get() {
                    head.stops();
                }
            }
            HeadEvent::Standby(standby) => {
                if let (Some(head), Some(standby)) = (self.wire.head.get(), standby) {
                    head.learn(standby);
                }
            }
            HeadEvent::PlacementGroup { group, state } => {
                if let PlacementGroupState::Gone { .. } = state {
                    self.wire.own_groups.remove(&group);
                }
                for handle in self.wire.groups.is_now(group, &state) {
                    self.owner.resolve_object(handle.object(), ready_value(&state), Vec::new());
                }
            }
            other => self.owner.hears_head(other),
        }
    }

    /// Whether a batch of what the head says is to be taken in, and has not come before.
    pub(super) fn hears_head(&self, number: u64) -> bool {
        self.wire.head.get().is_some_and(|head| head.hears(number))
    }

    pub(crate) fn is_shut_down(&self) -> bool {
        self.wire.life.shut_down.load(Ordering::Acquire)
    }

    /// Whether the session is over. It is from the moment on in which the first of what is pending fails for it.
    pub fn is_over(&self) -> bool {
        self.owner.ended().is_some()
    }

    /// Waits until the session is over.
    pub async fn over(&self) {
        let mut over = self.wire.life.over.subscribe();
        let _ = over.wait_for(|over| *over).await;
    }

    /// Why nothing is taken any more, once the session is over.
    pub fn ended(&self) -> Option<&Error> {
        self.owner.ended()
    }

    /// Fails everything that is pending; nothing new is taken. The process can still be shut down. Only the first
    /// reason counts.
    pub fn end(&self, error: &Error) {
        if !self.is_over() {
            self.wire.record(|| Event::Ended(error.clone()));
        }
        self.owner.end(error);
        let watched = self.wire.groups.end();
        drop(watched);
        let _ = self.wire.life.over.send(true);
    }

    /// Before the process ends: what is recorded is written to its end.
    pub fn end_recording(&self) {
        if let Some(recorded) = &self.wire.recorded {
            recorded.end();
        }
    }

    /// Leaves the cluster; blocks until the IO thread has ended.
    pub fn shut_down(&self, why: &str) {
        if self.wire.life.shut_down.swap(true, Ordering::AcqRel) {
            return;
        }
        self.end(&Error::SessionEnded { why: why.into() });
        self.owner.clear();
        if let Some(head) = self.wire.head.get() {
            head.close();
        }
        self.wire.peers.close();
        if let Some(storage) = self.storage() {
            storage.connection().close();
        }
        let kept = std::mem::take(&mut *self.wire.life.keep.lock());
        drop(kept);
        self.wire.io.stop();
        // Nobody attaches another node now. What is left of the mapping belongs to the views that live.
        self.wire.home.link.send_replace(None);
        self.end_recording();
    }
}

#[cfg(test)]
#[path = "process_tests.rs"]
pub(crate) mod tests;
