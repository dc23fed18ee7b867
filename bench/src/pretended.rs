//! Nodes and a driver that speak to a real head over real connections, and have nothing behind them: as many actors as one likes,
//! without a process for each.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result};
use parking_lot::Mutex;
use tarpc::context::Context;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use wingbeat_core::codec::Payload;
use wingbeat_core::error::Error;
use wingbeat_core::spec::{ActorSpec, Address, Executable, JobSpec, ScopedName};
use wingbeat_core::{ActorId, Amount, ClusterId, JobId, NodeId, ObjectId, ProcessId, ResourceSet, TaskId};
use wingbeat_net::Token;
use wingbeat_net::address::{Listener, Stream, this_machine};
use wingbeat_net::handshake::{Epoch, Hello, Resumes, Role, Welcome};
use wingbeat_net::messages::{
    Ballot, ClusterState, Explanation, Fetch, HeadEvent, HeadMessage, Leadership, LeaseHolder, Located, LogLine,
    NodeInfo, NodeMessage, PeerMessage, Place, ProcessStacks, Running, RunningLease, Support, TaskStanding, Vote,
    WorkerCommand, WorkerStart,
};
use wingbeat_net::mux::{self, Waiting};
use wingbeat_net::seek;
use wingbeat_net::services::{
    HeadClient, HeadRequest, HeadResponse, Node, NodeRequest, NodeResponse, Process, ProcessRequest, ProcessResponse,
};
use wingbeat_net::silence::Probing;

use crate::head;

/// Where a head is, and what proves that one belongs to it.
pub(crate) struct Cluster {
    pub address: String,
    pub token: Token,
}

/// Who has been with a head says so to the next one.
type Was = Option<Epoch>;

impl Cluster {
    async fn dial(&self, role: Role, address: Address, was: Was) -> Result<(Stream, Was)> {
        let resumes = if was.is_some() { Resumes::Joined } else { Resumes::Nothing };
        let hello = Hello { address, role, resumes, epoch: was, ..Hello::of_tool() };
        let (stream, welcome) = seek::dial_head(&self.address, "the head", &self.token, hello).await?;
        Ok((stream, welcome.epoch))
    }

    /// What the head says of the cluster.
    pub(crate) async fn state(&self, client: &HeadClient) -> Result<ClusterState> {
        client.state(patiently()).await.context("asking for the state")
    }
}

fn patiently() -> Context {
    mux::within(Duration::from_secs(120))
}

fn address(process: u64) -> Address {
    Address { process: ProcessId(process), machine: this_machine(), unix: String::new(), tcp: None, steward: None }
}

/// Where nobody listens, nobody lives, as a head sees it.
async fn listener(process: u64) -> Result<Listener> {
    Ok(Listener::bind(ProcessId(process), None).await?)
}

/// A node whose worker processes are there as soon as they are asked for.
pub(crate) struct PretendedNode {
    info: NodeInfo,
    was: Was,
    leases: Arc<Mutex<Vec<RunningLease>>>,
    connection: Option<mux::Connection>,
}

impl PretendedNode {
    /// Answers a head that asks before it has joined, as a head that is started again does.
    pub(crate) async fn new(number: u64, token: Token) -> Result<PretendedNode> {
        let listener = listener(1_000_000 + number).await?;
        let info = NodeInfo {
            id: NodeId(number),
            address: listener.address().clone(),
            hostname: format!("node-{number}"),
            resources: ResourceSet::cpus(Amount::whole(64)),
            labels: BTreeMap::new(),
            devices: Vec::new(),
            store_bytes: 0,
        };
        let cluster = ClusterId(0);
        let welcome = Welcome { address: info.address.clone(), cluster, epoch: None, patience: None, stands_by: None };
        tokio::spawn(listener.serve(token, welcome, |stream, _| drop(tokio::spawn(asked(stream)))));
        Ok(PretendedNode { info, was: None, leases: Arc::default(), connection: None })
    }

    /// Joins the head with all that runs here.
    pub(crate) async fn join(&mut self, cluster: &Cluster, job: JobId) -> Result<()> {
        let (stream, epoch) = cluster.dial(Role::Node(self.info.id), self.info.address.clone(), self.was).await?;
        let (connection, client, server) = mux::connect_probing::<HeadRequest, HeadResponse, NodeRequest, NodeResponse>(
            stream,
            Waiting::Asleep,
            Probing::Both,
        );
        let client = HeadClient::new(mux::client_config(), client).spawn();
        let (says, said) = unbounded_channel();
        let service = NodeService { leases: self.leases.clone(), says };
        tokio::spawn(mux::serve(server, service.serve()));
        let running = Running { leases: self.leases.lock().clone(), jobs: vec![job], ..Running::default() };
        client.join_node(patiently(), self.info.clone(), running).await.context("joining as a node")??;
        tokio::spawn(deliver(client, said));
        (self.was, self.connection) = (epoch, Some(connection));
        Ok(())
    }

    /// The head is gone.
    pub(crate) fn leave(&mut self) {
        self.connection.take().inspect(mux::Connection::close);
    }
}

/// Answers until the asker leaves.
async fn asked(stream: Stream) {
    let (connection, _, server) =
        mux::connect::<ProcessRequest, ProcessResponse, NodeRequest, NodeResponse>(stream, Waiting::Asleep);
    let (says, _) = unbounded_channel();
    let service = NodeService { leases: Arc::default(), says };
    tokio::spawn(mux::serve(server, service.serve()));
    connection.closed().await;
}

/// Says one batch after the other.
async fn deliver(client: HeadClient, mut said: UnboundedReceiver<HeadMessage>) {
    let mut messages = Vec::new();
    for number in 0.. {
        if said.recv_many(&mut messages, 1_000).await == 0 {
            return;
        }
        let batch = std::mem::take(&mut messages);
        if client.deliver(patiently(), number, batch).await.is_err() {
            return;
        }
    }
}

#[derive(Clone)]
struct NodeService {
    leases: Arc<Mutex<Vec<RunningLease>>>,
    says: UnboundedSender<HeadMessage>,
}

impl Node for NodeService {
    async fn deliver(self, _: Context, _: Vec<NodeMessage>) {}

    async fn orders(self, _: Context, _: u64, messages: Vec<NodeMessage>) {
        for message in messages {
            let NodeMessage::StartLease(start) = message else { continue };
            let LeaseHolder::Actor(spec, incarnation, _) = start.holder.clone() else { continue };
            let (lease, worker) = (start.lease, address(1 << 40 | spec.id.0));
            let started = Some(Ok(()));
            let worker_here = Some((worker.clone(), 1));
            let running =
                RunningLease { start: *start, worker: worker_here, started, terminated: None, is_ending: false };
            self.leases.lock().push(running);
            let ready = HeadMessage::LeaseReady { lease, worker, pid: 1 };
            let started = HeadMessage::ActorStarted { actor: spec.id, incarnation, outcome: Ok(()) };
            let _ = (self.says.send(ready), self.says.send(started));
        }
    }

    async fn register_worker(self, _: Context, _: Address, _: u32) -> Result<WorkerStart, Error> {
        Err(nothing_here())
    }

    async fn create(self, _: Context, _: ObjectId, _: u64, _: bool, _: Option<Box<Address>>) -> Result<Place, Error> {
        Err(nothing_here())
    }

    async fn seal(self, _: Context, _: ObjectId) -> Result<(), Error> {
        Err(nothing_here())
    }

    async fn stacks(self, _: Context, _: ProcessId) -> Result<ProcessStacks, Error> {
        Err(nothing_here())
    }

    async fn process_above(self, _: Context, _: u32) -> Option<ProcessId> {
        None
    }

    async fn settle_output(self, _: Context, _: JobId) -> bool {
        true
    }

    async fn fetch(self, _: Context, _: Fetch) -> Result<(Located, bool), Error> {
        Err(nothing_here())
    }

    async fn read_kept(self, _: Context, _: Option<Payload>) -> Vec<(Payload, Payload)> {
        Vec::new()
    }

    async fn support(self, _: Context, _: Leadership) -> Support {
        Support::Given
    }

    async fn elect(self, _: Context, _: Ballot) -> Vote {
        Vote::HearsHead
    }
}

fn nothing_here() -> Error {
    Error::InvalidArgument { what: "a pretended node has nothing".into() }
}

/// A driver that makes actors, and holds them.
pub(crate) struct PretendedDriver {
    address: Address,
    job: JobId,
    was: Was,
    client: Option<(mux::Connection, HeadClient)>,
    made: AtomicU64,
    _listener: Listener,
}

impl PretendedDriver {
    pub(crate) async fn new(job: JobId) -> Result<PretendedDriver> {
        let listener = listener(1).await?;
        let (address, made) = (listener.address().clone(), AtomicU64::new(0));
        Ok(PretendedDriver { address, job, was: None, client: None, made, _listener: listener })
    }

    /// Joins the head with the actors that it holds.
    pub(crate) async fn join(&mut self, cluster: &Cluster) -> Result<HeadClient> {
        let (stream, epoch) = cluster.dial(Role::Driver(self.job), self.address.clone(), self.was).await?;
        let (connection, client, server) =
            mux::connect::<HeadRequest, HeadResponse, ProcessRequest, ProcessResponse>(stream, Waiting::Asleep);
        let client = HeadClient::new(mux::client_config(), client).spawn();
        tokio::spawn(mux::serve(server, ProcessService.serve()));
        let job = JobSpec {
            id: self.job,
            name: "pretended".into(),
            driver: self.address.clone(),
            executable: Executable::default(),
            working_dir: String::new(),
            env: BTreeMap::new(),
            local_env: BTreeMap::new(),
            namespace: "pretended".into(),
            priority: 0,
        };
        if self.was.is_some() {
            let actors: Vec<ActorId> = (0..self.made.load(Ordering::Relaxed)).map(actor).collect();
            let parts: Vec<HeadMessage> = actors
                .chunks(4_096)
                .map(|part| HeadMessage::Holds { leases: Vec::new(), actors: part.to_vec(), is_all: false })
                .chain([HeadMessage::Holds { leases: Vec::new(), actors: Vec::new(), is_all: true }])
                .collect();
            client.join_job(patiently(), job).await.context("joining as a driver")??;
            client.deliver(patiently(), 0, parts).await.context("saying what it holds")?;
        } else {
            client.join_job(patiently(), job).await.context("joining as a driver")??;
        }
        (self.was, self.client) = (epoch, Some((connection, client.clone())));
        Ok(client)
    }

    /// Has the head make a named actor, which it keeps in its journal.
    pub(crate) async fn make(&self, number: u64) -> Result<()> {
        let (_, client) = self.client.as_ref().context("it has not joined")?;
        let name = ScopedName { namespace: "pretended".into(), name: format!("counter-{number}") };
        let spec = ActorSpec { name: Some(name), ..head::actor(actor(number), self.job, self.address.clone()) };
        client.create_actor(patiently(), spec, false).await.context("making an actor")??;
        self.made.fetch_max(number + 1, Ordering::Relaxed);
        Ok(())
    }

    /// The head is gone.
    pub(crate) fn leave(&mut self) {
        if let Some((connection, _)) = self.client.take() {
            connection.close();
        }
    }
}

fn actor(number: u64) -> ActorId {
    ActorId(number + 1)
}

#[derive(Clone)]
struct ProcessService;

impl Process for ProcessService {
    async fn deliver(self, _: Context, _: u64, _: u64, _: Vec<PeerMessage>) {}
    async fn head_events(self, _: Context, _: u64, _: Vec<HeadEvent>) {}
    async fn commands(self, _: Context, _: Vec<WorkerCommand>) {}
    async fn logs(self, _: Context, _: Vec<LogLine>) {}

    async fn explain_task(self, _: Context, task: TaskId) -> TaskStanding {
        TaskStanding::Known(Explanation { subject: task.to_string(), ..Explanation::default() })
    }

    async fn stacks(self, _: Context) -> Result<ProcessStacks, Error> {
        Err(nothing_here())
    }

    async fn keeps(self, _: Context, _: Vec<ObjectId>, _: bool) -> Vec<ObjectId> {
        Vec::new()
    }

    async fn read_executable(self, _: Context, _: u64) -> Result<Payload, Error> {
        Err(nothing_here())
    }
}
