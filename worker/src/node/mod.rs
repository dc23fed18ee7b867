//! The node daemon: it starts worker processes for the head's leases, and keeps the node's objects.
//!
//! - [`pool`](self): which worker process serves which lease (here), started by the [`crate::guard`].
//! - `service`: what it answers to the head, to processes of this machine, and to owners elsewhere.
//! - `transfer`: object bytes between nodes.
//! - `executables`: programs of drivers on other machines.
//! - `output`: what user code prints.
//! - `release`: when devices can be given on.
//!
//! It ends when the head says so or is gone, or when its handle is shut down: then worker processes are
//! ended by the guard, connections close, and the memory vanishes with its last descriptor. After kill -9,
//! the guard does the same, and the head learns of it from the closed connection.

mod executables;
mod output;
mod release;
mod service;
mod transfer;

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::sync::mpsc;
use wingbeat_core::error::Error;
use wingbeat_core::spec::{Address, Exit, JobSpec};
use wingbeat_core::{ActorId, ClusterId, Incarnation, JobId, LeaseId, NodeId, ProcessId, ResourceSet};
use wingbeat_net::address::{self, Listener};
use wingbeat_net::handshake::{Hello, Purpose, Role, Token, Welcome};
use wingbeat_net::link::Link;
use wingbeat_net::messages::{
    HeadMessage, LeaseHolder, LeaseStart, LogLine, NodeInfo, NodeMessage, RunningLease, WorkerCommand, WorkerDeath,
};
use wingbeat_net::mux::{self, Connection, Waiting};
use wingbeat_net::services::{
    HeadClient, HeadRequest, HeadResponse, Node as _, NodeRequest, NodeResponse, ProcessRequest,
};
use wingbeat_store::{NodeStore, StoreConfig};

use crate::gpus::Gpus;
use crate::guard::{Guard, Launch, LaunchFds, Report};
use crate::page::Page;
use crate::start::{self, WorkerStartInfo};

/// Idle worker processes beyond the node's CPUs end after this long: starting one takes milliseconds,
/// and each holds a few megabytes.
const IDLE_LIMIT: Duration = Duration::from_secs(20);
/// How often idle processes and freed memory are looked at. Nothing else wakes an idle daemon.
const HOUSEKEEPING: Duration = Duration::from_secs(2);
/// How long the output of a dead process may take to arrive: a grandchild may hold the pipe open.
const OUTPUT_LIMIT: Duration = Duration::from_millis(300);
/// A worker process that has not reported so long after its start never will.
const START_LIMIT: Duration = Duration::from_secs(60);

/// What a node is.
pub struct NodeConfig {
    /// Where the head is.
    pub head: Address,
    /// The token of the cluster.
    pub token: Token,
    /// The cluster.
    pub cluster: ClusterId,
    /// What the node has.
    pub resources: ResourceSet,
    /// Its GPUs; as many as `resources` says.
    pub gpus: Gpus,
    /// `key=value` labels.
    pub labels: BTreeMap<String, String>,
    /// Capacity of the object store in bytes.
    pub store_bytes: u64,
    /// Where objects go when memory is short; none for nowhere.
    pub spill_dir: Option<PathBuf>,
    /// How much may go there, in bytes.
    pub spill_bytes: u64,
    /// Where to listen for other machines.
    pub listen: Option<SocketAddr>,
}

/// A running node daemon.
pub struct NodeHandle {
    daemon: Arc<Daemon>,
}

impl NodeHandle {
    /// Where it listens.
    pub fn address(&self) -> &Address {
        &self.daemon.address
    }

    /// The node.
    pub fn id(&self) -> NodeId {
        self.daemon.id
    }

    /// Waits until the daemon has ended, and says why: because it was told to, or else the error.
    ///
    /// # Errors
    /// It had to end.
    pub async fn ended(&self) -> Result<String, String> {
        let mut ended = self.daemon.ended.subscribe();
        let why = match ended.wait_for(Option::is_some).await {
            Ok(why) => why.clone().unwrap_or_default(),
            Err(_) => "it was dropped".into(),
        };
        if self.daemon.was_told_to_end.load(Ordering::Acquire) { Ok(why) } else { Err(why) }
    }

    /// Ends the daemon and every worker process, and waits for them. Blocks.
    pub fn shut_down(&self) {
        self.daemon.end("it was shut down");
        self.daemon.guard.stop();
        for connection in self.daemon.connections.lock().drain(..) {
            connection.close();
        }
    }
}

enum Phase {
    /// Started, and not heard of yet.
    Starting { since: Instant },
    /// It can take a lease.
    Idle { since: Instant },
    /// It works for somebody.
    Leased,
    /// It was told to end, or its exit is being wound up.
    Ending,
}

struct Assignment {
    /// As the head granted it.
    start: LeaseStart,
    /// For an actor, whether its constructor has returned.
    started: bool,
}

impl Assignment {
    fn lease(&self) -> LeaseId {
        self.start.lease
    }

    fn is_detached(&self) -> bool {
        matches!(&self.start.holder, LeaseHolder::Actor(spec, _) if spec.detached)
    }
}

struct Worker {
    job: JobId,
    gpus: Vec<u32>,
    phase: Phase,
    assigned: Option<Assignment>,
    pid: u32,
    address: Option<Address>,
    commands: Option<Link<WorkerCommand>>,
    /// Those who used its devices when it was started.
    users_before: BTreeSet<u32>,
    page: Arc<Page>,
    output: output::Tail,
    /// Why we ended it.
    reason: Option<String>,
    /// Whether the head no longer expects the lease.
    lease_over: bool,
}

#[derive(Default)]
struct Pool {
    workers: BTreeMap<ProcessId, Worker>,
    jobs: BTreeMap<JobId, Job>,
}

struct Job {
    spec: Arc<JobSpec>,
    log: Link<LogLine>,
    /// Ended by the head; only detached actors are left.
    over: bool,
}

/// The daemon.
pub(crate) struct Daemon {
    id: NodeId,
    process: ProcessId,
    cluster: ClusterId,
    address: Address,
    hostname: String,
    token: Token,
    head_address: Address,
    head: Link<HeadMessage>,
    runtime: tokio::runtime::Handle,
    pub(crate) store: NodeStore,
    guard: Guard,
    pool: Mutex<Pool>,
    transfers: transfer::Transfers,
    executables: executables::Executables,
    connections: Mutex<Vec<Connection>>,
    ended: tokio::sync::watch::Sender<Option<String>>,
    /// Whether it ends because somebody wanted it to.
    was_told_to_end: AtomicBool,
    cpus: usize,
    listen_ip: Option<std::net::IpAddr>,
    gpus: Gpus,
    held: release::Held,
}

/// Starts a node daemon on the current tokio runtime and joins the head.
///
/// # Errors
/// When the head refuses or cannot be reached, or the machine has no memory or port to give.
pub async fn start(config: NodeConfig) -> Result<NodeHandle, Error> {
    // The guard is this executable in another mode.
    crate::entry::linked();
    let process = ProcessId::random();
    let id = NodeId::random();
    let listener = Listener::bind(process, config.listen).await?;
    let address = listener.address().clone();
    let store = NodeStore::new(StoreConfig {
        capacity: config.store_bytes,
        spill_dir: config.spill_dir.clone(),
        spill_capacity: config.spill_bytes,
    })
    .map_err(|error| Error::io("making the object store", &error))?;
    store.attach(process);
    let (reports, incoming) = mpsc::unbounded_channel();
    let guard = Guard::start(move |report| {
        let _ = reports.send(report);
    })
    .map_err(|error| Error::io("starting the guard of worker processes", &error))?;
    let hostname = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let daemon = Arc::new(Daemon {
        id,
        process,
        cluster: config.cluster,
        hostname: hostname.clone(),
        token: config.token.clone(),
        head_address: config.head.clone(),
        head: Link::new(),
        runtime: tokio::runtime::Handle::current(),
        store,
        guard,
        pool: Mutex::default(),
        transfers: transfer::Transfers::default(),
        executables: executables::Executables::default(),
        connections: Mutex::default(),
        ended: tokio::sync::watch::Sender::new(None),
        was_told_to_end: AtomicBool::new(false),
        cpus: (config.resources.get(wingbeat_core::resources::CPU).as_f64() as usize).max(1),
        listen_ip: config.listen.map(|listen| listen.ip()),
        gpus: config.gpus.clone(),
        held: release::Held::default(),
        address: address.clone(),
    });
    let info = NodeInfo {
        id,
        address,
        hostname,
        resources: config.resources,
        devices: config.gpus.devices.clone(),
        labels: config.labels,
        store_bytes: config.store_bytes,
    };
    daemon.clone().join(info).await?;
    let accepting = daemon.clone();
    let welcome = Welcome { address: daemon.address.clone(), cluster: daemon.cluster };
    tokio::spawn(async move {
        let serving = accepting.clone();
        let listen = listener.serve(accepting.token.clone(), welcome, move |stream, hello| {
            let daemon = serving.clone();
            serving.runtime.spawn(async move { daemon.accept(stream, hello).await });
        });
        accepting.until_ended(listen).await;
    });
    tokio::spawn(daemon.clone().wind_up_exits(incoming));
    tokio::spawn(daemon.clone().keep_house());
    Ok(NodeHandle { daemon })
}

impl Daemon {
    fn hello(&self, purpose: Purpose) -> Hello {
        Hello {
            address: self.address.clone(),
            role: Role::Node(self.id),
            purpose,
            cluster: Some(self.cluster),
            version: env!("CARGO_PKG_VERSION").into(),
        }
    }

    async fn until_ended(&self, work: impl Future<Output = ()>) {
        let mut ended = self.ended.subscribe();
        tokio::select! {
            () = work => {}
            _ = ended.wait_for(Option::is_some) => {}
        }
    }

    /// The head wants it to end.
    fn told_to_end(&self, why: &str) {
        self.was_told_to_end.store(true, Ordering::Release);
        self.end(why);
    }

    fn end(&self, why: &str) {
        self.ended.send_if_modified(|ended| {
            let first = ended.is_none();
            if first {
                *ended = Some(why.to_owned());
            }
            first
        });
    }

    async fn join(self: Arc<Self>, info: NodeInfo) -> Result<(), Error> {
        let stream = address::dial(&self.head_address, "the head", &self.token, self.hello(Purpose::Control)).await?;
        let (connection, client, server) =
            mux::connect::<HeadRequest, HeadResponse, NodeRequest, NodeResponse>(stream, Waiting::Asleep);
        self.connections.lock().push(connection.clone());
        let client = HeadClient::new(mux::client_config(), client).spawn();
        let service = service::NodeService::new(self.clone(), self.head_address.process);
        tokio::spawn(mux::serve(server, service.serve()));
        let answer = client.join_node(mux::within(Duration::from_secs(30)), info, self.running()).await;
        mux::answered(answer, "the head")??;
        tokio::spawn(async move {
            self.head.run(&connection, |messages| HeadRequest::Deliver { messages }).await;
            self.end("the head is gone");
        });
        Ok(())
    }

    /// A lease to serve: an idle worker process takes it, or one that is starting, or a new one.
    fn start_lease(self: &Arc<Self>, start: LeaseStart) {
        let gpus: Vec<u32> = start.gpus.iter().map(|(device, _)| *device).collect();
        let mut pool = self.pool.lock();
        let Some(job) = pool.jobs.get(&start.job).map(|job| job.spec.clone()) else {
            let what = format!("starting a worker process of {}", start.job);
            let error = Error::Io { what, why: "the node was not told of the job".into() };
            return self.launch_failed(Some(start.lease), &error);
        };
        let assigned = Assignment { start, started: false };
        let free = |worker: &&mut Worker| {
            worker.job == job.id
                && worker.gpus == gpus
                && worker.assigned.is_none()
                && matches!(worker.phase, Phase::Idle { .. } | Phase::Starting { .. })
        };
        // One that has reported is ready now; one that is starting will be sooner than a new one.
        let mut candidates: Vec<(bool, &mut Worker)> = pool
            .workers
            .values_mut()
            .filter(|worker| free(worker))
            .map(|worker| (matches!(worker.phase, Phase::Starting { .. }), worker))
            .collect();
        candidates.sort_by_key(|(starting, _)| *starting);
        if let Some((_, worker)) = candidates.into_iter().next() {
            worker.assigned = Some(assigned);
            self.hand_over(worker);
            return;
        }
        self.launch(&mut pool, &job, gpus, Some(assigned));
    }

    /// Leases of a job may come.
    fn begin_job(self: &Arc<Self>, spec: Arc<JobSpec>) {
        let mut pool = self.pool.lock();
        if pool.jobs.contains_key(&spec.id) {
            return;
        }
        let log = Link::new();
        tokio::spawn(self.clone().forward_output(spec.driver.clone(), log.clone()));
        pool.jobs.insert(spec.id, Job { spec, log, over: false });
    }

    /// Gives an assigned worker process that has reported its orders.
    fn hand_over(&self, worker: &mut Worker) {
        let (Some(assigned), Some(address), Some(commands)) = (&worker.assigned, &worker.address, &worker.commands)
        else {
            return;
        };
        worker.phase = Phase::Leased;
        worker.lease_over = false;
        let (lease, gpus, captures) = (assigned.lease(), worker.gpus.clone(), assigned.start.captures);
        let ready = HeadMessage::LeaseReady { lease, worker: address.clone(), pid: worker.pid };
        match &assigned.start.holder {
            LeaseHolder::Actor(spec, incarnation) => {
                // Said first: nobody calls the actor before its constructor has returned, which is said next.
                self.head.send(ready);
                let (spec, incarnation) = (spec.clone(), *incarnation);
                commands.send(WorkerCommand::StartActor { lease, spec, incarnation, gpus, captures });
            }
            LeaseHolder::Tasks(..) => {
                let resources = assigned.start.resources.clone();
                commands.send(WorkerCommand::Lease { lease, resources, gpus, captures });
                let (link, head) = (commands.clone(), self.head.clone());
                // The owner must not reach the process before its orders have.
                self.runtime.spawn(async move {
                    if link.flushed().await {
                        head.send(ready);
                    }
                });
            }
        }
    }

    fn launch(self: &Arc<Self>, pool: &mut Pool, job: &Arc<JobSpec>, gpus: Vec<u32>, assigned: Option<Assignment>) {
        let process = ProcessId::random();
        let lease = assigned.as_ref().map(Assignment::lease);
        let page = match Page::create() {
            Ok(page) => Arc::new(page),
            Err(error) => return self.launch_failed(lease, &Error::io("making a worker process's page", &error)),
        };
        let worker = Worker {
            job: job.id,
            gpus: gpus.clone(),
            phase: Phase::Starting { since: Instant::now() },
            assigned,
            pid: 0,
            address: None,
            commands: None,
            users_before: self.users_of(&gpus),
            page: page.clone(),
            output: output::Tail::default(),
            reason: None,
            lease_over: false,
        };
        pool.workers.insert(process, worker);
        let (daemon, job) = (self.clone(), job.clone());
        self.runtime.spawn(async move {
            if let Err(error) = daemon.clone().launch_process(process, &job, &gpus, &page).await {
                daemon.forget_unstarted(process, &error);
            }
        });
    }

    fn launch_failed(&self, lease: Option<LeaseId>, error: &Error) {
        match lease {
            Some(lease) => self.head.send(HeadMessage::LeaseFailed { lease, error: error.clone() }),
            None => tracing::warn!(%error, "cannot start a worker process ahead of need"),
        }
    }

    fn forget_unstarted(&self, process: ProcessId, error: &Error) {
        let worker = self.pool.lock().workers.remove(&process);
        if let Some(worker) = worker {
            self.launch_failed(worker.assigned.map(|assigned| assigned.lease()), error);
        }
    }

    async fn launch_process(
        self: Arc<Self>,
        process: ProcessId,
        job: &JobSpec,
        gpus: &[u32],
        page: &Page,
    ) -> Result<(), Error> {
        let executable = self.executable(job).await?;
        let failed = |error: std::io::Error| Error::io("starting a worker process", &error);
        let info = WorkerStartInfo {
            process,
            daemon: self.address.clone(),
            token: self.token.reveal().to_owned(),
            listen: self.listen_ip,
        };
        let (stdout, stdout_end) = pipe().map_err(failed)?;
        let (stderr, stderr_end) = pipe().map_err(failed)?;
        let fds = LaunchFds {
            executable,
            start: start::to_memfd(&info).map_err(failed)?,
            arena: self.store.attach(process).try_clone_to_owned().map_err(failed)?,
            page: page.fd().try_clone_to_owned().map_err(failed)?,
            stdout: stdout_end,
            stderr: stderr_end,
        };
        let mut env = job.env.clone();
        env.extend(self.gpus.environment(gpus, &job.env));
        let launch = Launch {
            process,
            title: format!("wingbeat-worker: {}", job.name),
            env,
            working_dir: Some(job.working_dir.clone()),
        };
        if let Some(worker) = self.pool.lock().workers.get_mut(&process) {
            worker.output = self.clone().read_output(process, job.id, stdout, stderr).map_err(failed)?;
        }
        self.guard.launch(launch, fds).map_err(failed)
    }

    /// A worker process has reported: it is reached at `address` from now on.
    fn registered(
        self: &Arc<Self>,
        process: ProcessId,
        address: Address,
        pid: u32,
        connection: Connection,
    ) -> Option<Arc<JobSpec>> {
        let mut pool = self.pool.lock();
        let worker = pool.workers.get_mut(&process)?;
        let commands: Link<WorkerCommand> = Link::new();
        let link = commands.clone();
        self.runtime.spawn(async move {
            link.run(&connection, |commands| ProcessRequest::Commands { commands }).await;
        });
        worker.pid = pid;
        worker.address = Some(address);
        worker.commands = Some(commands);
        worker.phase = Phase::Idle { since: Instant::now() };
        self.hand_over(worker);
        let job = worker.job;
        pool.jobs.get(&job).map(|job| job.spec.clone())
    }

    /// What runs here, for a head that was started again.
    fn running(&self) -> Vec<RunningLease> {
        let pool = self.pool.lock();
        let running = pool.workers.values().filter_map(|worker| {
            let assigned = worker.assigned.as_ref()?;
            let is_ending = matches!(worker.phase, Phase::Ending);
            let worker = worker.address.clone().map(|address| (address, worker.pid));
            Some(RunningLease { start: assigned.start.clone(), worker, started: assigned.started, is_ending })
        });
        running.collect()
    }

    /// The constructor of an actor here has returned.
    fn actor_started(&self, actor: ActorId, incarnation: Incarnation, outcome: Result<(), Error>) {
        for worker in self.pool.lock().workers.values_mut() {
            if let Some(assigned) = &mut worker.assigned
                && matches!(&assigned.start.holder, LeaseHolder::Actor(spec, _) if spec.id == actor)
            {
                assigned.started = outcome.is_ok();
            }
        }
        self.head.send(HeadMessage::ActorStarted { actor, incarnation, outcome });
    }

    /// The head has no more use for a lease.
    fn end_lease(&self, lease: LeaseId, kill: Option<String>) {
        let mut pool = self.pool.lock();
        let found = pool
            .workers
            .iter_mut()
            .find(|(_, worker)| worker.assigned.as_ref().is_some_and(|assigned| assigned.lease() == lease));
        let Some((process, worker)) = found else {
            // Its process is gone already, and the head was told.
            drop(pool);
            self.head.send(HeadMessage::LeaseEnded(lease));
            return;
        };
        // Devices are given on only when the process that used them is gone.
        let reason = kill.or_else(|| (!worker.gpus.is_empty()).then(|| "its lease of devices is over".into()));
        match reason {
            None => {
                worker.assigned = None;
                if worker.address.is_some() {
                    worker.phase = Phase::Idle { since: Instant::now() };
                }
                drop(pool);
                self.head.send(HeadMessage::LeaseEnded(lease));
            }
            Some(reason) => {
                worker.lease_over = true;
                worker.reason = Some(reason);
                worker.phase = Phase::Ending;
                self.guard.kill(*process);
            }
        }
    }

    fn drain(&self, lease: LeaseId, by: String) {
        let mut pool = self.pool.lock();
        for worker in pool.workers.values_mut() {
            if worker.assigned.as_ref().is_some_and(|assigned| assigned.lease() == lease)
                && let Some(commands) = &worker.commands
            {
                worker.reason = Some(by.clone());
                commands.send(WorkerCommand::Drain);
            }
        }
    }

    fn end_job(&self, job: JobId) {
        let mut pool = self.pool.lock();
        let mut detached = false;
        for (process, worker) in &mut pool.workers {
            if worker.job != job {
                continue;
            }
            if worker.assigned.as_ref().is_some_and(Assignment::is_detached) {
                detached = true;
                continue;
            }
            worker.reason = Some("its job is over".into());
            worker.phase = Phase::Ending;
            self.guard.kill(*process);
        }
        if let Some(known) = pool.jobs.get_mut(&job) {
            known.over = true;
        }
        if !detached {
            pool.jobs.remove(&job);
        }
    }

    fn prestart(self: &Arc<Self>, job: JobId, count: u32) {
        let mut pool = self.pool.lock();
        let Some(job) = pool.jobs.get(&job).map(|job| job.spec.clone()) else { return };
        let have = pool.workers.values().filter(|worker| worker.job == job.id && worker.gpus.is_empty()).count();
        for _ in have..count as usize {
            self.launch(&mut pool, &job, Vec::new(), None);
        }
    }

    fn kill_worker(&self, process: ProcessId, why: String) {
        if let Some(worker) = self.pool.lock().workers.get_mut(&process) {
            worker.reason = Some(why);
            self.guard.kill(process);
        }
    }

    /// Reports from the guard, in order, until it is gone.
    async fn wind_up_exits(self: Arc<Self>, mut reports: mpsc::UnboundedReceiver<Report>) {
        while let Some(report) = reports.recv().await {
            match report {
                Report::Launched { process, pid } => {
                    if let Some(worker) = self.pool.lock().workers.get_mut(&process) {
                        worker.pid = pid;
                    }
                }
                Report::Failed { process, why } => {
                    let what = "starting a worker process".to_owned();
                    self.forget_unstarted(process, &Error::Io { what, why });
                }
                Report::Exited { process, code, signal } => {
                    let (daemon, gone) = (self.clone(), self.held.leaves(process));
                    // Its last output may still be on its way; others must not wait for it.
                    tokio::spawn(async move { daemon.exited(process, code, signal, gone).await });
                }
                Report::Gone { process } => self.held.is_gone(process),
            }
        }
        self.end("the guard of its worker processes is gone");
    }

    async fn exited(
        self: Arc<Self>,
        process: ProcessId,
        code: Option<i32>,
        signal: Option<i32>,
        gone: tokio::sync::oneshot::Receiver<()>,
    ) {
        self.store.process_gone(process);
        let tail = {
            let mut pool = self.pool.lock();
            let Some(worker) = pool.workers.get_mut(&process) else { return };
            worker.phase = Phase::Ending;
            worker.output.clone()
        };
        let _ = tokio::time::timeout(OUTPUT_LIMIT, tail.complete()).await;
        let Some(worker) = self.pool.lock().workers.remove(&process) else { return };
        let exit = Exit { code, signal, stderr: tail.last_lines(), reason: worker.reason };
        let Some(assigned) = worker.assigned else {
            if worker.address.is_none() {
                tracing::warn!(%process, %exit, "a worker process ended before it reported");
            }
            return;
        };
        let lease = assigned.lease();
        if worker.address.is_none() {
            if !worker.gpus.is_empty() {
                self.devices_released(&worker.gpus, &worker.users_before, gone).await;
            }
            let error = Error::Io { what: "a worker process ended before it reported".into(), why: exit.to_string() };
            self.head.send(HeadMessage::LeaseFailed { lease, error });
            return;
        }
        self.head.send(HeadMessage::WorkerDied(WorkerDeath {
            process,
            pid: worker.pid,
            node: self.id,
            lease: Some(lease),
            exit,
            started: worker.page.started(),
        }));
        // Devices are given on only when nothing of the last lease uses them.
        if !worker.gpus.is_empty() {
            self.devices_released(&worker.gpus, &worker.users_before, gone).await;
        }
        self.head.send(HeadMessage::LeaseEnded(lease));
    }

    /// Ends idle processes that are not worth keeping, and gives freed memory back.
    async fn keep_house(self: Arc<Self>) {
        let mut ended = self.ended.subscribe();
        loop {
            tokio::select! {
                () = tokio::time::sleep(HOUSEKEEPING) => {}
                _ = ended.wait_for(Option::is_some) => return,
            }
            self.store.trim(Instant::now());
            let mut pool = self.pool.lock();
            let mut idle_of: BTreeMap<JobId, usize> = BTreeMap::new();
            for (process, worker) in &mut pool.workers {
                match worker.phase {
                    Phase::Idle { since } => {
                        let count = idle_of.entry(worker.job).or_default();
                        *count += 1;
                        if *count > self.cpus
                            && since.elapsed() > IDLE_LIMIT
                            && let Some(commands) = &worker.commands
                        {
                            commands.send(WorkerCommand::Exit);
                        }
                    }
                    Phase::Starting { since } if since.elapsed() > START_LIMIT && worker.pid != 0 => {
                        worker.reason = Some(format!("it did not report within {} s", START_LIMIT.as_secs()));
                        worker.phase = Phase::Ending;
                        self.guard.kill(*process);
                    }
                    _ => {}
                }
            }
        }
    }
}

/// A pipe whose reading end is ours.
fn pipe() -> std::io::Result<(OwnedFd, OwnedFd)> {
    let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
    rustix::io::ioctl_fionbio(&read, true)?;
    Ok((read, write))
}

/// Sends the arena's descriptor over a fresh connection.
pub(crate) fn send_arena(socket: &impl AsFd, arena: impl AsFd) -> std::io::Result<()> {
    crate::guard::send_with(socket.as_fd(), &[1], &[arena.as_fd()])
}

/// What the head tells this node; see [`NodeMessage`].
fn is_from_head(message: &NodeMessage) -> bool {
    matches!(
        message,
        NodeMessage::BeginJob(_)
            | NodeMessage::StartLease(_)
            | NodeMessage::EndLease { .. }
            | NodeMessage::DrainActor { .. }
            | NodeMessage::EndJob { .. }
            | NodeMessage::Stop(_)
            | NodeMessage::Prestart { .. }
    )
}
