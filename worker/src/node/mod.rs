//! The node daemon: it starts worker processes for the head's leases, and keeps the node's objects.
//!
//! - `head`: the connection to the head, over any number of connections; `succession`: which head is supported, where there is a standby.
//! - `pool`: the worker processes, about which [`wingbeat_node`] decides; `launch`: how they are started by the `guard`;
//!   `exits`: how they end.
//! - `service`: what it answers to the head, to processes of this machine, and to owners elsewhere.
//! - `loans`: the store's memory in drivers.
//! - `transfer`: object bytes between nodes; `wire`: the connections that carry them; `owners`: what becomes of objects whose
//!   owner is gone; `disk_work`: when objects are written to disk, and files removed; `room`: how room in the store is waited for.
//! - `executables`: the programs of jobs, which may come from other machines.
//! - `output`: what user code prints.
//! - `memory`: who uses how much of it, and who is ended for that.
//! - `release`: when devices can be given on.
//!
//! It ends when the head says so or is lost, or when its handle is shut down: then worker processes are
//! ended by the guard, connections close, and the memory vanishes with its last descriptor. After kill -9,
//! the guard does the same, and the head learns of it: the connection ends, and nobody listens there any more.

mod disk_work;
mod executables;
mod exits;
mod head;
mod kept;
mod launch;
mod lingering;
mod loans;
mod memory;
mod objects;
mod output;
mod owners;
mod pool;
mod release;
mod room;
mod service;
mod succession;
mod term;
mod transfer;
mod wire;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use rustix::process::{Resource, getrlimit};
use tokio::sync::{mpsc, watch};
use wingbeat_core::error::Error;
use wingbeat_core::spec::Address;
use wingbeat_core::{ByteSize, ClusterId, NodeId, ProcessId, ResourceSet};
use wingbeat_net::address::Listener;
use wingbeat_net::handshake::{Epoch, Hello, Purpose, Resumes, Role, Token, Welcome};
use wingbeat_net::messages::{HeadMessage, NodeInfo, NodeMessage};
use wingbeat_net::mux::Connection;
use wingbeat_net::panics;
use wingbeat_process::Steward;
use wingbeat_store::{NodeStore, StoreConfig};

pub use self::memory::MemoryConfig;
use crate::gpus::Gpus;
use crate::guard::Guard;
pub use crate::guard::spare_this_process;

/// How long worker processes may take to be gone once they were killed, and the head to hear why the node ends.
const FAREWELL: Duration = Duration::from_secs(2);

/// Launches under way at a time. Each has seven descriptors in flight to the guard, of which the kernel allows a user as
/// many as it may have open, which may be 256; and the guard starts one after the other anyway.
const LAUNCHES: usize = 16;

/// What a node is. Its many fields are the options of a node, with what the head has answered to whoever starts it.
pub struct NodeConfig {
    /// Where the head is.
    pub head: Address,
    /// Where it may be, too.
    pub others: Vec<Address>,
    /// Which head of its cluster it is, if another will follow.
    pub epoch: Option<Epoch>,
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
    /// The part of the store above which objects go there before others need their room.
    pub spill_ahead: f64,
    /// How it watches its memory.
    pub memory: MemoryConfig,
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
        &self.daemon.who.address
    }

    /// The node.
    pub fn id(&self) -> NodeId {
        self.daemon.who.id
    }

    /// Waits until the daemon has ended and the head knows it, and says why: because it was told to, or else the error.
    ///
    /// # Errors
    /// It had to end.
    pub fn ended(&self) -> impl Future<Output = Result<String, String>> + Send + use<> {
        let daemon = self.daemon.clone();
        async move {
            let mut left = daemon.ending.left.subscribe();
            let _ = left.wait_for(|left| *left).await;
            let why = daemon.ending.ended.borrow().clone().unwrap_or_default();
            if daemon.ending.was_told.load(Ordering::Acquire) { Ok(why) } else { Err(why) }
        }
    }

    /// Ends the daemon and every worker process, and waits for them. Blocks.
    pub fn shut_down(&self) {
        self.daemon.end("it was shut down");
        self.daemon.guard.stop();
        self.daemon.owners.steward.shut_down();
        for connection in self.daemon.ending.connections.lock().drain(..) {
            connection.close();
        }
    }
}

/// Who the daemon is. Nothing of it changes.
struct Identity {
    id: NodeId,
    process: ProcessId,
    cluster: ClusterId,
    address: Address,
    hostname: String,
    token: Token,
    cpus: usize,
    listen_ip: Option<std::net::IpAddr>,
}

/// How the daemon ends.
struct Ending {
    /// Why, once it does.
    ended: watch::Sender<Option<String>>,
    /// Whether it ends because somebody wanted it to.
    was_told: AtomicBool,
    /// Whether it has ended, and has told the head why as far as it could.
    left: watch::Sender<bool>,
    /// To be closed then.
    connections: Mutex<Vec<Connection>>,
}

/// The node's GPUs, and who uses them without a lease.
struct Devices {
    gpus: Gpus,
    questions: release::Questions,
    held: release::Held,
}

/// The daemon, a field for each of its parts. All of it lives until it has ended.
pub(crate) struct Daemon {
    who: Identity,
    /// What it says to the head, over one connection after another. The daemon ends when the head is lost.
    head: head::HeadLink,
    /// Which head it supports.
    succession: succession::Succession,
    /// What it keeps of what the head knows.
    kept: Mutex<kept::Kept>,
    /// The one on which it was started: its parts run there, whichever thread begins them.
    runtime: tokio::runtime::Handle,
    /// The node's objects. The memory is gone with the last descriptor, which a process that maps it has, too.
    pub(crate) store: NodeStore,
    /// Starts and ends worker processes. When it ends without being told, so does the daemon.
    guard: Guard,
    /// The worker processes, each from its launch until [`wingbeat_node::Action::Forget`].
    pool: Mutex<pool::Pool>,
    /// Bounds the launches that the guard has not answered.
    launches: Arc<tokio::sync::Semaphore>,
    /// The store's memory in drivers, until they have nothing mapped any more.
    loans: loans::Loans,
    /// Objects that come from other nodes or go there, and the connections for that until they are idle.
    transfers: transfer::Transfers,
    /// Who waits for room in the store that others hold.
    room: room::Room,
    /// Who writes objects to disk ahead of need, and removes files.
    disk_work: disk_work::DiskWork,
    /// Whose objects lie here, as long as any do; and the steward, which is shut down last.
    owners: owners::Owners,
    /// Programs, each until no job of it is left here.
    executables: executables::Executables,
    devices: Devices,
    /// How it watches memory, and what the last look has shown.
    memory: memory::Memory,
    ending: Ending,
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
    // Before all else: it starts while the rest of this is done.
    let (reports, incoming) = mpsc::unbounded_channel();
    let guard = Guard::start(&listener.sockets(), move |report| {
        let _ = reports.send(report);
    })
    .map_err(|error| Error::io("starting the guard of worker processes", &error))?;
    let for_objects = config.memory.for_objects();
    let listen_ip = config.listen.map(|listen| listen.ip());
    let steward = Steward::start(
        (id, config.cluster),
        config.head.clone(),
        config.token.clone(),
        listen_ip.map(|ip| SocketAddr::new(ip, 0)),
    )
    .await?;
    let address = Address { steward: Some(Box::new(steward.address().clone())), ..listener.address().clone() };
    fits(config.store_bytes)?;
    ignore_the_limit_of_files();
    let store = NodeStore::new(StoreConfig {
        capacity: config.store_bytes,
        spill_dir: config.spill_dir.clone(),
        spill_capacity: config.spill_bytes.min(may_be_spilled()),
        write_ahead_above: (config.store_bytes as f64 * config.spill_ahead) as u64,
    })
    .map_err(|error| not_made(config.store_bytes, &error))?
    .limited_by(move || crate::machine::HERE.memory_left(for_objects));
    store.attach(process);
    let hostname = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let who = Identity {
        id,
        process,
        cluster: config.cluster,
        address: address.clone(),
        hostname: hostname.clone(),
        token: config.token.clone(),
        cpus: (config.resources.get(wingbeat_core::resources::CPU).as_f64() as usize).max(1),
        listen_ip,
    };
    let pool = pool::Pool::new(id, who.cpus);
    let daemon = Arc::new(Daemon {
        who,
        head: head::HeadLink::new(config.head.clone(), config.others.clone(), config.epoch),
        succession: succession::Succession::default(),
        kept: Mutex::default(),
        runtime: tokio::runtime::Handle::current(),
        store,
        guard,
        pool: Mutex::new(pool),
        launches: Arc::new(tokio::sync::Semaphore::new(LAUNCHES)),
        loans: loans::Loans::default(),
        transfers: transfer::Transfers::default(),
        room: room::Room::new(process),
        disk_work: disk_work::DiskWork::default(),
        owners: owners::Owners::new(steward),
        executables: executables::Executables::default(),
        devices: Devices {
            gpus: config.gpus.clone(),
            questions: release::Questions::default(),
            held: release::Held::default(),
        },
        memory: memory::Memory::new(config.memory),
        ending: Ending {
            ended: watch::Sender::new(None),
            was_told: AtomicBool::new(false),
            left: watch::Sender::new(false),
            connections: Mutex::default(),
        },
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
    let welcome = Welcome {
        address: daemon.who.address.clone(),
        cluster: daemon.who.cluster,
        epoch: None,
        patience: None,
        stands_by: None,
    };
    daemon.vital("taking connections", async move {
        let serving = accepting.clone();
        let listen = listener.serve(accepting.who.token.clone(), welcome, move |stream, hello| {
            let daemon = serving.clone();
            serving.vital("serving a connection", async move { daemon.accept(stream, hello).await });
        });
        accepting.until_ended(listen).await;
    });
    daemon.vital("hearing the guard", daemon.clone().hear_guard(incoming));
    daemon.vital("keeping house", daemon.clone().keep_house());
    daemon.vital("watching memory", daemon.clone().watch_memory());
    daemon.vital("asking for owners", daemon.clone().ask_for_owners());
    let (ending, steward_over) = (daemon.clone(), daemon.owners.steward.over());
    daemon.vital("its steward", async move {
        steward_over.await;
        ending.end("its steward, which answers for the objects of processes that have ended, has failed");
    });
    let leaving = daemon.clone();
    tokio::spawn(async move {
        // Whoever waits for the end hears of it in any case.
        let _ = panics::caught(leaving.clone().leave()).await;
        leaving.ending.left.send_replace(true);
    });
    Ok(NodeHandle { daemon })
}

impl Daemon {
    fn hello(&self, purpose: Purpose) -> Hello {
        Hello {
            address: self.who.address.clone(),
            role: Role::Node(self.who.id),
            purpose,
            cluster: Some(self.who.cluster),
            version: env!("CARGO_PKG_VERSION").into(),
            losses: 0,
            to: None,
            resumes: Resumes::Nothing,
            epoch: None,
        }
    }

    /// Runs a part without which something here would never happen: if it panics, which was printed there, the node ends.
    fn vital(self: &Arc<Self>, part: &'static str, running: impl Future<Output = ()> + Send + 'static) {
        let daemon = self.clone();
        self.runtime.spawn(async move {
            if let Err(said) = panics::caught(running).await {
                daemon.end(&panics::defect("this node", part, &said));
            }
        });
    }

    async fn until_ended(&self, work: impl Future<Output = ()>) {
        let mut ended = self.ending.ended.subscribe();
        tokio::select! {
            () = work => {}
            _ = ended.wait_for(Option::is_some) => {}
        }
    }

    /// When the daemon has ended, it ends the worker processes, tells the head why, and leaves: whatever waits for this
    /// node must not wait for ever, and what is started again elsewhere must not be alive here.
    async fn leave(self: Arc<Self>) {
        let mut ended = self.ending.ended.subscribe();
        let why = match ended.wait_for(Option::is_some).await {
            Ok(why) => why.clone().unwrap_or_default(),
            Err(_) => return,
        };
        if self.all_end().await {
            self.head.link.send(HeadMessage::NodeEnds(why));
            // Where the head is the cause, it does not answer.
            let _ = tokio::time::timeout(FAREWELL, self.head.link.flushed()).await;
        }
        // Else the head finds out when they have ended: until then they hold the sockets at which it looks for this node.
        for connection in self.ending.connections.lock().drain(..) {
            connection.close();
        }
        let daemon = self.clone();
        let _ = tokio::task::spawn_blocking(move || daemon.owners.steward.shut_down()).await;
    }

    /// Ends all worker processes. Whether they are gone: the kernel may need longer, and who was a process with much memory, or waits for a
    /// disk, still holds files and ports that its next life needs.
    async fn all_end(self: &Arc<Self>) -> bool {
        let (daemon, (done, stopped)) = (self.clone(), tokio::sync::oneshot::channel());
        // On a thread of its own: all of the runtime's may wait for a disk.
        let stops = std::thread::Builder::new().name("wingbeat-farewell".into()).spawn(move || {
            let _ = done.send(daemon.guard.stop());
        });
        stops.is_ok() && matches!(tokio::time::timeout(FAREWELL, stopped).await, Ok(Ok(true)))
    }

    /// The head wants it to end.
    fn told_to_end(&self, why: &str) {
        self.ending.was_told.store(true, Ordering::Release);
        self.end(why);
    }

    fn end(&self, why: &str) {
        self.ending.ended.send_if_modified(|ended| {
            let first = ended.is_none();
            if first {
                *ended = Some(why.to_owned());
            }
            first
        });
    }
}

/// Bytes of objects for which one file has room here: they lie in whole blocks, with gaps. What is above that is refused before the kernel does.
fn may_be_spilled() -> u64 {
    getrlimit(Resource::Fsize).current.map_or(u64::MAX, |largest| largest / 8 * 7)
}

/// A spill file that may not be larger is an error, and not the end; unless the program has a handler of its own.
fn ignore_the_limit_of_files() {
    // SAFETY: it is asked for what there is, into memory of that type, and no handler is installed that could run.
    unsafe {
        let mut before: libc::sigaction = std::mem::zeroed();
        let is_known = libc::sigaction(libc::SIGXFSZ, std::ptr::null(), &raw mut before) == 0;
        if is_known && before.sa_sigaction == libc::SIG_DFL {
            libc::signal(libc::SIGXFSZ, libc::SIG_IGN);
        }
    }
}

fn making_a_store(bytes: u64) -> String {
    format!("making an object store of {}", ByteSize::from(bytes))
}

/// Whether there may be a store of so many bytes. To make a file beyond the limit would end the process by a signal.
fn fits(bytes: u64) -> Result<(), Error> {
    match getrlimit(Resource::Fsize).current {
        Some(largest) if largest < bytes => Err(Error::Failed {
            what: making_a_store(bytes),
            why: format!(
                "no file may be larger than {} here (ulimit -f): raise that, or name a smaller size with --object-store-memory",
                ByteSize::from(largest)
            ),
        }),
        _ => Ok(()),
    }
}

fn not_made(bytes: u64, error: &std::io::Error) -> Error {
    let why = format!("{error}; a smaller one may be named with --object-store-memory");
    Error::Io { what: making_a_store(bytes), why, code: error.raw_os_error() }
}

/// Sends the arena's descriptor over a fresh connection.
pub(crate) fn send_arena(socket: &impl AsFd, arena: impl AsFd) -> std::io::Result<()> {
    crate::guard::send_with(socket.as_fd(), &[1], &[arena.as_fd()])
}

/// What the head tells this node; see [`NodeMessage`].
fn is_from_head(message: &NodeMessage) -> bool {
    match message {
        NodeMessage::BeginJob(_)
        | NodeMessage::StartLease(_)
        | NodeMessage::EndLease { .. }
        | NodeMessage::DrainActor { .. }
        | NodeMessage::EndJob { .. }
        | NodeMessage::Stop(_)
        | NodeMessage::Prestart { .. }
        | NodeMessage::NodeDied(_)
        | NodeMessage::OwnersGone { .. }
        | NodeMessage::Keep(_) => true,
        NodeMessage::Unpin(_)
        | NodeMessage::Delete(_)
        | NodeMessage::ActorStarted { .. }
        | NodeMessage::Stays
        | NodeMessage::LeftBehind(_)
        | NodeMessage::LostHead => false,
    }
}
