//! How a driver joins a cluster, or starts a private one inside its own process.

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use futures::FutureExt;
use rustix::process::{Resource, getrlimit};
use tokio::sync::oneshot;
use wingbeat_core::error::Error;
use wingbeat_core::names;
use wingbeat_core::resources::{CPU, GPU, MEMORY};
use wingbeat_core::spec::{Address, Executable, JobSpec, variable_names};
use wingbeat_core::{Amount, ClusterId, JobId, ProcessId, ResourceSet};
use wingbeat_net::Token;
use wingbeat_net::address::{self, Stream};
use wingbeat_net::handshake::{Epoch, Hello, Role};
use wingbeat_net::limits::limits;
use wingbeat_net::messages::ClusterView;
use wingbeat_net::mux;
use wingbeat_net::recording;
use wingbeat_net::seek;
use wingbeat_net::services::HeadClient;
use wingbeat_net::silence::Probing;
use wingbeat_net::threads::on_a_thread;
use wingbeat_process::HeadLink;
use wingbeat_process::Prepared;
use wingbeat_process::{Config, Io, Session};

use crate::environment;
use crate::gpus::Gpus;
use crate::home;
use crate::long_waits;
use crate::machine;
pub use crate::terminal::Output;
use crate::terminal::Terminal;
use crate::token;

/// Names the head to join, as `host:port`, or several places where it may be, as `host:port,host:port`.
pub const ADDRESS_VARIABLE: &str = "WINGBEAT_ADDRESS";

/// Where a token was given, for messages.
const TOKEN_OPTION: &str = "init().token(..)";

/// How a driver joins. A field for each option.
#[derive(Clone)]
pub struct InitOptions {
    /// The head, as `host:port` or a list of such; else `WINGBEAT_ADDRESS`; else a private cluster is started.
    pub address: Option<String>,
    /// Whether a private cluster is started whatever `WINGBEAT_ADDRESS` says.
    pub private: bool,
    /// The token; else `WINGBEAT_TOKEN`, `WINGBEAT_TOKEN_FILE`, or the user's own.
    pub token: Option<Token>,
    /// CPUs of a private cluster; as many as there are if nothing is said.
    pub num_cpus: Option<u32>,
    /// GPUs of a private cluster, the first that there are; all if nothing is said.
    pub num_gpus: Option<u32>,
    /// The same, of which those are pretended that are not there.
    pub pretend_gpus: Option<u32>,
    /// Custom resources of a private cluster.
    pub resources: BTreeMap<String, f64>,
    /// Capacity of a private cluster's object store in bytes; 30% of the memory if nothing is said.
    pub object_store_memory: Option<u64>,
    /// The part of all memory above which a private cluster's node ends processes, from 0 to 1; 0 for never.
    pub memory_threshold: Option<f64>,
    /// The namespace of actor names; one of its own if nothing is said.
    pub namespace: Option<String>,
    /// Whose waiting tasks are served first: those of the job with the larger number. 0 if nothing is said.
    pub priority: i32,
    /// What to call the job.
    pub name: Option<String>,
    /// Variables of worker processes, on every machine. Of the driver's own, other machines get those of
    /// [`crate::environment`] alone.
    pub env: BTreeMap<String, String>,
    /// Working directory of worker processes; the driver's if nothing is said.
    pub working_dir: Option<PathBuf>,
    /// Whether output of user code is shown on this terminal.
    pub log_to_driver: bool,
    /// Takes the output of user code in place of the terminal.
    pub output: Option<Output>,
    /// Whether the driver brings an object store of its own, of so many bytes, although its machine may have a node: then no end of a node
    /// costs it what it has put.
    pub own_store: Option<u64>,
    /// Whether the session becomes the one of the whole process.
    pub global: bool,
}

/// Without the values of variables, which may be secrets: programs write this to logs.
impl fmt::Debug for InitOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // All of them, so that a new one is not forgotten.
        let InitOptions {
            address,
            private,
            token,
            num_cpus,
            num_gpus,
            pretend_gpus,
            resources,
            object_store_memory,
            memory_threshold,
            namespace,
            priority,
            name,
            env,
            working_dir,
            log_to_driver,
            output,
            own_store,
            global,
        } = self;
        f.debug_struct("InitOptions")
            .field("address", address)
            .field("private", private)
            .field("token", token)
            .field("num_cpus", num_cpus)
            .field("num_gpus", num_gpus)
            .field("pretend_gpus", pretend_gpus)
            .field("resources", resources)
            .field("object_store_memory", object_store_memory)
            .field("memory_threshold", memory_threshold)
            .field("namespace", namespace)
            .field("priority", priority)
            .field("name", name)
            .field("env", &variable_names(env))
            .field("working_dir", working_dir)
            .field("log_to_driver", log_to_driver)
            .field("output", output)
            .field("own_store", own_store)
            .field("global", global)
            .finish()
    }
}

impl Default for InitOptions {
    fn default() -> Self {
        InitOptions {
            address: None,
            private: false,
            token: None,
            num_cpus: None,
            num_gpus: None,
            pretend_gpus: None,
            resources: BTreeMap::new(),
            object_store_memory: None,
            memory_threshold: None,
            namespace: None,
            priority: 0,
            name: None,
            env: BTreeMap::new(),
            working_dir: None,
            log_to_driver: true,
            output: None,
            own_store: None,
            global: true,
        }
    }
}

/// Joins a cluster, or starts a private one.
///
/// # Errors
/// Nobody answers at the address, or refuses; the options make no sense; the process has a session already.
pub async fn init(options: InitOptions) -> Result<Session, Error> {
    crate::entry::linked();
    wingbeat_process::memory_is(|| machine::HERE.memory());
    let _claim = options.global.then(Claim::take).transpose()?;
    for (option, name) in [("name", &options.name), ("namespace", &options.namespace)] {
        let checked = name.as_deref().map_or(Ok(()), names::check);
        let what = "init()".to_owned();
        checked.map_err(|why| Error::InvalidOption { what, option: option.into(), why })?;
    }
    // Also where a private cluster does not need it: the same program may join another one day.
    if let Some(token) = &options.token {
        Token::checked(token.reveal(), TOKEN_OPTION)?;
    }
    let of_environment = || std::env::var(ADDRESS_VARIABLE).ok().filter(|text| !text.is_empty() && !options.private);
    let address = options.address.clone().or_else(of_environment);
    if let Some(dir) = &options.working_dir {
        check_working_dir(dir, address.is_none())?;
    }
    let io = Arc::new(Io::start()?);
    let joining = options.clone();
    let (give, given) = oneshot::channel();
    let joins = io.clone();
    io.handle().spawn(async move {
        let outcome = match address {
            Some(address) => join_cluster(&joins, &address, &joining).await,
            None => private_cluster(&joins, &joining).await,
        };
        // Whoever has given it up takes nothing.
        drop(give.send(Given { io: joins, outcome: Some(outcome) }));
    });
    let session = match given.await {
        Ok(given) => given.take()?,
        Err(_) => {
            io.stop();
            return Err(Error::Failed { what: "joining".into(), why: "it has panicked".into() });
        }
    };
    if options.global {
        Session::set_global(Some(session.clone()));
    }
    Ok(session)
}

/// Refuses a folder in which no worker process could work. Of a cluster, it is not known which folders nodes have.
fn check_working_dir(dir: &Path, is_private: bool) -> Result<(), Error> {
    let why = match dir.to_str() {
        None => format!("{} is not UTF-8", dir.display()),
        Some(_) if is_private && !dir.is_dir() => format!("{} is no folder of this machine", dir.display()),
        Some(_) => return Ok(()),
    };
    Err(Error::InvalidOption { what: "init()".into(), option: "working_dir".into(), why })
}

/// Whether somebody joins for the whole process.
static IS_JOINING: AtomicBool = AtomicBool::new(false);

/// While it lives, nobody else joins for the whole process.
struct Claim;

impl Claim {
    fn take() -> Result<Claim, Error> {
        let refused = |what: &str| Err(Error::InvalidArgument { what: what.into() });
        if IS_JOINING.swap(true, Ordering::AcqRel) {
            return refused(
                "another init() of this process is joining a cluster; share its session, or join with global(false)",
            );
        }
        let claim = Claim;
        match Session::of_process() {
            None => Ok(claim),
            Some(session) if session.is_of_worker() => refused(
                "what runs in a worker process is in the session of its job already: init() is for the program that submits; \
                 join another cluster with global(false)",
            ),
            Some(_) => {
                refused("this process has joined a cluster already; call shutdown() first, or join with global(false)")
            }
        }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        IS_JOINING.store(false, Ordering::Release);
    }
}

/// What has come of joining. If nobody takes it, the session ends.
struct Given {
    io: Arc<Io>,
    outcome: Option<Result<Session, Error>>,
}

impl Given {
    fn take(mut self) -> Result<Session, Error> {
        let outcome = self.outcome.take().unwrap_or(Err(Error::NoSession));
        if outcome.is_err() {
            // Joining its thread blocks for a moment at most.
            self.io.stop();
        }
        outcome
    }
}

impl Drop for Given {
    fn drop(&mut self) {
        let Some(outcome) = self.outcome.take() else { return };
        let io = self.io.clone();
        // This may be the very thread that is to end. Without another one, it lasts as long as the process.
        let _ = std::thread::Builder::new().name("wingbeat-shutdown".into()).spawn(move || match outcome {
            // The head hears that it leaves, and does not wait for it.
            Ok(session) => wingbeat_process::block_on(session.shutdown()),
            Err(_) => io.stop(),
        });
    }
}

#[cfg(not(feature = "embedded"))]
async fn private_cluster(_: &Arc<Io>, _: &InitOptions) -> Result<Session, Error> {
    Err(Error::InvalidArgument {
        what: format!(
            "this program was built without the `embedded` feature and cannot start a cluster; set {ADDRESS_VARIABLE}"
        ),
    })
}

#[cfg(feature = "embedded")]
async fn private_cluster(io: &Arc<Io>, options: &InitOptions) -> Result<Session, Error> {
    let token = Token::random();
    let cluster = ClusterId::random();
    let gpus = Gpus::find(crate::gpus::Offered::of(options.num_gpus, options.pretend_gpus))?;
    let resources = machine_resources(options.num_cpus, gpus.count, &options.resources)?;
    let store_bytes = options.object_store_memory.unwrap_or_else(default_store_bytes);
    let memory = crate::node::MemoryConfig::given(options.memory_threshold, None)?;
    let (head_token, spill) = (token.clone(), default_spill());
    let ((head, address), embedded) = home::embed(async move || {
        let config = wingbeat_head::HeadConfig {
            tcp: None,
            token: head_token.clone(),
            cluster,
            patience: wingbeat_net::patience::Patience::USUAL,
        };
        let head = wingbeat_head::Head::start(config).await?;
        let address = head.address().clone();
        let node = crate::node::start(crate::node::NodeConfig {
            head: address.clone(),
            others: Vec::new(),
            epoch: None,
            token: head_token,
            cluster,
            resources,
            labels: labels_of(&gpus, BTreeMap::new()),
            gpus,
            store_bytes,
            spill_dir: Some(spill.0),
            spill_bytes: spill.1,
            spill_ahead: SPILL_AHEAD,
            memory,
            listen: None,
        })
        .await?;
        Ok(((head, address), node))
    })
    .await?;
    let joined = Joined {
        token,
        cluster,
        head: address,
        others: Vec::new(),
        epoch: None,
        listen: None,
        node: Probing::default(),
        own_store: None,
    };
    let executable = own_executable(None)?;
    let session = joined.enter(io, options, executable).await?;
    let ending = home::end_with(head.stopped(), embedded.node_ended(), session.clone());
    session.process().vital("the end of the private cluster", ending);
    // They end in this order.
    session.process().keep(Box::new(head.ends_with()));
    session.process().keep(Box::new(embedded));
    session.process().keep(Box::new(head));
    Ok(session)
}

async fn join_cluster(io: &Arc<Io>, text: &str, options: &InitOptions) -> Result<Session, Error> {
    let token = match &options.token {
        Some(token) => Token::checked(token.reveal(), TOKEN_OPTION)?,
        None => match token::given(None)? {
            Some(token) => token,
            None => token::own()?,
        },
    };
    let Found { head, others, cluster, ip, epoch } = find_head(text, &token).await?;
    let hashed = on_a_thread("wingbeat-hash", hash_own_executable).await;
    let hash = hashed.map_err(|error| Error::io("starting a thread that hashes the executable", &error))??;
    let executable = own_executable(Some(hash))?;
    let listen = ip.map(|ip| SocketAddr::new(ip, 0));
    let own_store = options.own_store;
    let joined = Joined { token, cluster, head, others, epoch, listen, node: Probing::Expects, own_store };
    let session = joined.enter(io, options, executable).await?;
    session.process().will_move();
    session.process().vital("staying with a node", home::stay_attached(joined, session.clone()));
    Ok(session)
}

/// Who is at a `host:port` that a person gave, or at one of several in a list.
///
/// # Errors
/// Nobody answers, or refuses.
pub async fn find_head(text: &str, token: &Token) -> Result<Found, Error> {
    let (stream, welcome) = seek::dial_head(text, "the head", token, Hello::of_tool()).await?;
    let ip = address::local_ip(&stream);
    let peer = match &stream {
        Stream::Tcp(tcp) => tcp.peer_addr().ok(),
        Stream::Unix(_) => None,
    };
    let others = seek::others(text, &welcome, peer).await;
    let mut head = welcome.address;
    // The way that worked is the way to take: the head may know itself by another address.
    if peer.is_some() {
        head.tcp = peer;
    }
    Ok(Found { head, others, cluster: welcome.cluster, ip, epoch: welcome.epoch })
}

/// A head that was found.
#[derive(Clone, Debug)]
pub struct Found {
    /// Where it is.
    pub head: Address,
    /// Where it may be, too.
    pub others: Vec<Address>,
    /// Its cluster.
    pub cluster: ClusterId,
    /// This machine's address on the way there, if that is over the network.
    pub ip: Option<std::net::IpAddr>,
    /// Which head of the cluster it is, if another will follow.
    pub epoch: Option<Epoch>,
}

/// What a driver knows of its cluster.
pub(crate) struct Joined {
    pub token: Token,
    pub cluster: ClusterId,
    pub head: Address,
    pub others: Vec<Address>,
    pub epoch: Option<Epoch>,
    /// Where to listen for other machines.
    pub listen: Option<SocketAddr>,
    /// Whether the node that it uses may be stopped while it is not: not where both are one process.
    pub node: Probing,
    /// Whether it brings a store of its own, of so many bytes, although its machine may have one.
    pub own_store: Option<u64>,
}

impl Joined {
    async fn enter(&self, io: &Arc<Io>, options: &InitOptions, executable: Executable) -> Result<Session, Error> {
        let job = JobId::random();
        let config =
            Config { id: ProcessId::random(), token: self.token.clone(), role: Role::Driver(job), listen: self.listen };
        let prepared = Prepared::bind(config).await?;
        let crosses_network = self.head.machine != prepared.address().machine;
        let spec = job_spec(job, prepared.address().clone(), executable, options, crosses_network);
        let terminal = options.log_to_driver.then(|| Terminal::start(options.output.clone())).transpose();
        let terminal =
            terminal.map_err(|error| Error::io("starting the thread that shows what tasks print", &error))?;
        let session = prepared.start(io, job, spec.namespace.clone(), self.cluster);
        let process = session.process();
        if let Some(terminal) = terminal.clone() {
            let shown = terminal.clone();
            process.set_log_sink(Box::new(move |lines| shown.show(lines).boxed()));
            let telling = long_waits::tell(session.clone(), self.head.tcp.is_none(), move |text| terminal.say(text));
            process.vital("telling of long waits", telling);
        }
        let head = HeadLink::new(self.head.clone());
        self.others.iter().for_each(|other| head.learn(other.clone()));
        head.found(self.epoch);
        process.set_head(head.clone());
        let entered = self.start_job(&session, &head, spec, terminal).await;
        match entered {
            Ok(()) => Ok(session),
            Err(error) => {
                process.end(&error);
                Err(error)
            }
        }
    }

    async fn start_job(
        &self,
        session: &Session,
        head: &HeadLink,
        spec: JobSpec,
        terminal: Option<Terminal>,
    ) -> Result<(), Error> {
        let job = spec.clone();
        let join = move |head: HeadClient| {
            let job = job.clone();
            async move { head.join_job(mux::within(limits().written), job).await }
        };
        let ClusterView { nodes, .. } = session.process().ask_head(join).await??;
        head.has_joined(spec);
        if let Some(terminal) = terminal
            && nodes.iter().all(|node| node.resources.is_empty())
        {
            let head = self.head.tcp.map_or_else(|| "<the head>".to_owned(), |tcp| tcp.to_string());
            terminal.say(&format!(
                "(wingbeat) the cluster has no nodes yet: tasks and actors wait for one; add it with `wingbeat worker --head {head}`"
            ));
        }
        home::attach(self, session, nodes).await
    }
}

fn job_spec(
    id: JobId,
    driver: Address,
    executable: Executable,
    options: &InitOptions,
    crosses_network: bool,
) -> JobSpec {
    let (mut env, mut local_env) = environment::split(std::env::vars_os());
    if crosses_network {
        local_env.clear();
    }
    // Worker processes may work in another folder.
    env.extend(recording::variables());
    env.extend(options.env.clone());
    // Nodes have working folders of their own, from which a relative one would lead elsewhere.
    let absolute = |dir: &PathBuf| std::path::absolute(dir).unwrap_or_else(|_| dir.clone());
    let working_dir =
        options.working_dir.as_ref().map(absolute).or_else(|| std::env::current_dir().ok()).unwrap_or_default();
    let name = options.name.clone().unwrap_or_else(|| {
        let path = std::path::Path::new(&executable.path);
        path.file_name().map_or_else(|| "job".into(), |name| names::made_of(&name.to_string_lossy()).into_owned())
    });
    JobSpec {
        id,
        name,
        driver,
        executable,
        working_dir: working_dir.to_string_lossy().into_owned(),
        env,
        local_env,
        namespace: options.namespace.clone().unwrap_or_else(|| id.to_string()),
        priority: options.priority,
    }
}

fn own_executable(hash: Option<String>) -> Result<Executable, Error> {
    let failed = |error: std::io::Error| Error::io("looking at this program's executable", &error);
    let size = std::fs::metadata("/proc/self/exe").map_err(failed)?.len();
    let path = std::env::current_exe().map_err(failed)?;
    let pid = std::process::id();
    Ok(Executable {
        // In a private cluster nobody fetches it.
        hash: hash.unwrap_or_else(|| format!("pid-{pid}")),
        size,
        pid,
        machine: address::this_machine(),
        path: path.to_string_lossy().into_owned(),
    })
}

fn hash_own_executable() -> Result<String, Error> {
    let mut hash = blake3::Hasher::new();
    let hashed = std::fs::File::open("/proc/self/exe").and_then(|file| hash.update_reader(file).map(drop));
    hashed.map_err(|error| Error::io("hashing this program's executable", &error))?;
    Ok(hash.finalize().to_hex().to_string())
}

/// The labels of a node: what was given, what its GPUs are, and its name.
pub fn labels_of(gpus: &Gpus, given: BTreeMap<String, String>) -> BTreeMap<String, String> {
    let mut labels = gpus.labels();
    let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
    labels.insert("hostname".to_owned(), name);
    labels.extend(given);
    labels
}

/// What this process may use of its machine, unless told otherwise.
///
/// # Errors
/// [`Error::InvalidOption`] for a custom resource that cannot be.
pub fn machine_resources(
    num_cpus: Option<u32>,
    num_gpus: u32,
    custom: &BTreeMap<String, f64>,
) -> Result<ResourceSet, Error> {
    let cpus = num_cpus.unwrap_or_else(|| machine::HERE.cpus());
    let mut set = ResourceSet::new().with(CPU, Amount::whole(cpus)).with(GPU, Amount::whole(num_gpus));
    let memory = machine::HERE.memory() / 10 * 7;
    set.set(MEMORY, Amount::from_units(i64::try_from(memory).unwrap_or(i64::MAX / 10_000).saturating_mul(10_000)));
    for (name, value) in custom {
        let invalid = |why: String| Error::InvalidOption {
            what: "the node".into(),
            option: format!("resource {}", names::shortened(name)),
            why,
        };
        names::check(name).map_err(invalid)?;
        if [CPU, GPU, MEMORY].contains(&name.as_str()) {
            return Err(invalid("this resource has an option of its own".into()));
        }
        if let Some(usual) = wingbeat_core::resources::misnamed(name) {
            return Err(invalid(format!(
                "it would be taken for {usual}, which has an option of its own: choose another name"
            )));
        }
        set.set(name, Amount::new(*value).map_err(|error| invalid(error.to_string()))?);
    }
    Ok(set)
}

/// 30% of the memory that this process may use; it is only taken as objects need it. Less where the system lets no file be so large
/// (`ulimit -f`), or where the addresses of a process, of which it takes as many, are limited (`ulimit -v`).
pub fn default_store_bytes() -> u64 {
    let [largest, addresses] = [Resource::Fsize, Resource::As].map(|of| getrlimit(of).current.unwrap_or(u64::MAX));
    (machine::HERE.memory() / 10 * 3).min(largest).min(addresses / 4)
}

/// The part of the store above which objects are written to disk before others need their room, unless told otherwise.
pub const SPILL_AHEAD: f64 = 0.8;

/// Where objects go when the store is full, and how much of the disk they may take.
pub fn default_spill() -> (PathBuf, u64) {
    let dir = default_spill_dir();
    let bytes = default_spill_bytes(&dir);
    (dir, bytes)
}

/// Where objects go when the store is full. A temporary folder that lies in memory is no help when memory is short: then `/var/tmp`,
/// which must not.
pub fn default_spill_dir() -> PathBuf {
    const TMPFS: u64 = 0x0102_1994;
    let is_disk = |dir: &PathBuf| {
        let in_memory = rustix::fs::statfs(dir).is_ok_and(|stat| stat.f_type as u64 == TMPFS);
        !in_memory && rustix::fs::access(dir, rustix::fs::Access::WRITE_OK).is_ok()
    };
    let candidates = [std::env::temp_dir(), PathBuf::from("/var/tmp")];
    candidates.into_iter().find(is_disk).unwrap_or_else(std::env::temp_dir)
}

/// How much of its disk objects in this folder may take, which need not be there yet: half of what is free.
pub fn default_spill_bytes(dir: &Path) -> u64 {
    let dir = std::path::absolute(dir).unwrap_or_else(|_| dir.to_owned());
    let disk = dir.ancestors().find_map(|dir| rustix::fs::statvfs(dir).ok());
    disk.map_or(0, |disk| disk.f_bavail.saturating_mul(disk.f_frsize) / 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objects_may_take_half_of_the_disk_that_they_go_to() {
        // A file system without blocks.
        assert_eq!(default_spill_bytes(Path::new("/proc/spilled/objects")), 0);
        let folder = tempfile::tempdir().unwrap();
        assert!(default_spill_bytes(&folder.path().join("not/there/yet")) > 0);
        assert!(default_spill_bytes(Path::new("relative")) > 0);
    }

    #[test]
    fn a_working_directory_that_cannot_be_is_refused() {
        use std::os::unix::ffi::OsStrExt;
        let folder = tempfile::tempdir().unwrap();
        let missing = folder.path().join("missing");
        assert!(check_working_dir(folder.path(), true).is_ok());
        let refused = check_working_dir(&missing, true).unwrap_err();
        assert!(refused.to_string().contains("is no folder of this machine"), "{refused}");
        assert!(check_working_dir(&missing, false).is_ok(), "nodes may have it");
        let odd = Path::new(std::ffi::OsStr::from_bytes(b"/tmp/\xff"));
        assert!(check_working_dir(odd, false).is_err());
    }

    #[test]
    fn a_node_offers_no_resource_that_would_be_taken_for_another() {
        let refused = |name: &str| machine_resources(Some(1), 0, &BTreeMap::from([(name.to_owned(), 1.0)]));
        for name in ["CPU", "cpu", "gpus", "Memory"] {
            assert!(refused(name).is_err(), "{name}");
        }
        assert!(refused("accelerators").is_ok());
    }
}
