//! The actor of one rank. It sees a process through, or hears what the function of a rank asks.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::path::Path;
use std::process::Command;
use std::sync::{Mutex, OnceLock, PoisonError};

use futures::Stream;
use rustix::process::Signal;
use serde::{Deserialize, Serialize};
use wingbeat::ObjectRef;

use crate::environment::{self, DeviceNames, Environment};
use crate::error::ReportError;
use crate::interface;
use crate::own_folder::OwnFolder;
use crate::ports;
use crate::preflight::{self, NodeReport};
use crate::process::{self, Answer, Answers, Event, Greeting, Launch, Running, Shard, Target};
use crate::questions::Questions;
use crate::ras;
use crate::shipping::{self, Shipment};
use crate::storage::{Checkpoint, Listing, Storage};
use crate::warm::Kind;

/// What a rank's actor says about where it is.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Description {
    /// The node, as a key.
    pub node: u64,
    /// The node's name, for people.
    pub hostname: String,
    /// Where other nodes reach it.
    pub ip: Option<IpAddr>,
    /// Its devices.
    pub gpus: Vec<u32>,
    /// What programs call them.
    pub device_names: DeviceNames,
    /// Whether the script is there.
    pub has_script: bool,
    /// Python's version, or why it does not run; none if the node's warm Python is not there yet to tell.
    pub python: Option<Result<String, String>>,
    /// That its warm Python does not answer.
    pub is_warm_silent: bool,
    /// What its warm Python is.
    pub kind: Kind,
    /// Its working directory.
    pub working_dir: String,
}

/// What a rank's actor is asked about.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Wanted {
    pub python: String,
    /// What it is to run; none if its function is called.
    pub target: Option<Target>,
    /// What the user sets.
    pub env: Environment,
    /// Whether to fork it from a warm Python.
    pub warm: bool,
    /// What it runs in, if that was shipped: its hash.
    pub shipment: Option<String>,
}

pub(crate) struct Rank {
    running: Running,
    questions: Questions,
    answers: Answers,
    /// Where others try to reach it.
    listener: OnceLock<Option<TcpListener>>,
    /// Checkpoints that it has fetched for the ranks of its node.
    fetched: tokio::sync::Mutex<Vec<Fetched>>,
    /// Working directories of these ranks.
    folders: Mutex<Vec<OwnFolder>>,
}

/// A checkpoint that is on this node.
struct Fetched {
    number: u64,
    path: String,
    /// Where it had to be copied.
    copy: Option<OwnFolder>,
}

/// So many copies of checkpoints are kept while a run lasts.
const COPIES: usize = 2;

/// What its function asks waits apart: the run's own calls are not kept from it.
#[wingbeat::actor(max_concurrency = 8, concurrency_groups(reports = 16, stops = 256))]
impl Rank {
    pub(crate) fn new() -> Self {
        Rank {
            running: Running::default(),
            questions: Questions::new(),
            answers: Answers::default(),
            listener: OnceLock::new(),
            fetched: tokio::sync::Mutex::default(),
            folders: Mutex::default(),
        }
    }

    /// Where it is, and whether what it is to run is there.
    pub(crate) fn describe(&self, wanted: Wanted) -> Description {
        let session = wingbeat::Session::current().ok();
        let process = session.as_ref().map(|session| session.runtime().process());
        let storage = process.and_then(|process| process.storage());
        let node = storage.map_or(0, |storage| storage.node().0);
        let kind = Kind::of(&wanted.python, &wanted.env.complete());
        let greeting = wanted.warm.then(|| process::greet(&kind.socket(node)));
        let gpus = wingbeat::gpu_ids();
        Description {
            node,
            hostname: rustix::system::uname().nodename().to_string_lossy().into_owned(),
            ip: own_ip(),
            device_names: environment::device_names(&gpus, |name| std::env::var(name).ok()),
            gpus,
            has_script: match &wanted.target {
                // Within the folder that was shipped, or at a path of this node.
                Some(Target::Script(script)) => match &wanted.shipment {
                    Some(hash) => shipping::place(hash).is_ok_and(|folder| folder.join(script).is_file()),
                    None => script.is_file(),
                },
                Some(Target::Module(_) | Target::Program(_) | Target::Function(_)) | None => true,
            },
            python: match &greeting {
                _ if matches!(wanted.target, Some(Target::Program(_)) | None) => Some(Ok(String::new())),
                Some(Greeting::Ready(version)) => Some(Ok(version.clone())),
                Some(Greeting::Gone) => None,
                Some(Greeting::Refuses | Greeting::Silent) | None => Some(version_of(&wanted.python)),
            },
            is_warm_silent: matches!(greeting, Some(Greeting::Silent)),
            kind,
            working_dir: std::env::current_dir().map(|dir| dir.display().to_string()).unwrap_or_default(),
        }
    }

    /// Has the run's working directory lie on this node.
    pub(crate) fn unpack(&self, shipment: Vec<ObjectRef<Shipment>>) -> Result<(), String> {
        for shipment in shipment {
            let shipment = shipment.get_blocking().map_err(|error| error.to_string())?;
            shipment.unpack().map_err(|error| error.to_string())?;
        }
        Ok(())
    }

    /// Whether it lies there already.
    pub(crate) fn has(&self, hash: String) -> bool {
        shipping::is_there(&hash)
    }

    /// What the node's warm Python says.
    pub(crate) fn greet(&self, socket: String) -> Greeting {
        process::greet(&socket)
    }

    /// The version of this Python.
    pub(crate) fn version(&self, python: String) -> Version {
        Version(version_of(&python))
    }

    /// A port that is free now. A port lost to somebody else before it is used fails the attempt.
    pub(crate) fn free_port(&self) -> Result<u16, String> {
        ports::free().map_err(|error| error.to_string())
    }

    /// The network interface that leads to rank 0's node.
    pub(crate) fn interface_to(&self, peer: IpAddr) -> Option<String> {
        interface::to(peer)
    }

    /// What its node knows of itself.
    pub(crate) fn node_report(&self, python: String) -> NodeReport {
        let (report, listener) = preflight::node_report(&python, own_ip());
        // Others connect to it while this actor lives.
        let _ = self.listener.set(listener);
        report
    }

    /// Why other nodes cannot be reached from here; none of those that can.
    pub(crate) fn reach(&self, others: Vec<Option<SocketAddr>>) -> Vec<Option<String>> {
        preflight::reach(&others)
    }

    /// Runs the script to its end. Dropping the stream ends it.
    pub(crate) fn run(&self, launch: Launch, shards: Vec<Shard>) -> impl Stream<Item = Event> {
        process::start(launch, shards, &self.running, &self.answers)
    }

    /// What its function asks, from now on: the run hears it once.
    pub(crate) fn questions(&self) -> impl Stream<Item = Event> {
        self.questions.events(&self.answers)
    }

    /// Its function reports, from a process with these devices.
    #[method(group = "reports")]
    pub(crate) async fn report(
        &self,
        metrics: BTreeMap<String, f64>,
        checkpoint: Option<String>,
        gpus: Vec<u32>,
    ) -> Result<(), ReportError> {
        self.questions.report(&self.answers, metrics, checkpoint, gpus).await
    }

    /// Its function asks where the newest checkpoint is; none if that is the one with which it has begun.
    #[method(group = "reports")]
    pub(crate) async fn newest(&self) -> Result<Option<String>, ReportError> {
        self.questions.newest(&self.answers).await
    }

    /// Its function waits to be asked to end.
    #[method(group = "stops")]
    pub(crate) async fn stopped(&self) {
        self.questions.stopped().await;
    }

    /// Answers what the rank has reported.
    pub(crate) fn answer(&self, report: u64, answer: Answer) {
        self.answers.give(report, answer);
    }

    /// What a checkpoint is that the script has made, to be stored there.
    pub(crate) fn listing(&self, path: String, url: String) -> Result<Listing, String> {
        if Storage::open(&url)?.lies_in(Path::new(&path)) {
            return Err(format!(
                "{path}: the storage {url} lies in it, and each checkpoint would hold all before it; report a folder of its own"
            ));
        }
        Listing::of(Path::new(&path)).map_err(|error| format!("{path}: {error}"))
    }

    /// Answers what the driver has written into the storage, if that is the same here.
    pub(crate) async fn answer_probe(&self, url: String, name: String) -> Result<(), String> {
        Storage::open(&url)?.answer_probe(&name).await
    }

    /// Writes a part of a checkpoint into the run's storage.
    pub(crate) async fn upload(&self, url: String, number: u64, from: String, part: Listing) -> Result<(), String> {
        Storage::open(&url)?.upload(number, Path::new(&from), &part).await
    }

    /// Fetches a checkpoint, once for all ranks of its node: where it is.
    pub(crate) async fn fetch(&self, url: String, checkpoint: Checkpoint) -> Result<String, String> {
        let mut fetched = self.fetched.lock().await;
        if let Some(there) = fetched.iter().find(|there| there.number == checkpoint.number) {
            return Ok(there.path.clone());
        }
        let (path, copy) = Storage::open(&url)?.fetch(&checkpoint).await?;
        let path = path.display().to_string();
        // A script may still read the one before.
        let old = fetched.len().saturating_sub(COPIES - 1);
        fetched.drain(..old).filter_map(|old| old.copy).for_each(OwnFolder::remove);
        fetched.push(Fetched { number: checkpoint.number, path: path.clone(), copy });
        Ok(path)
    }

    /// Makes a folder with the run's working directory, for all ranks of its node: where it is.
    pub(crate) fn unfold(&self, hash: String, run: String) -> Result<String, String> {
        let session = wingbeat::Session::current().map_err(|error| error.to_string())?;
        let node = session.runtime().process().storage().map_or(0, |storage| storage.node().0);
        let folder = shipping::unfold(&hash, &shipping::of_run(&run, node))
            .map_err(|error| format!("the working directory: {error}"))?;
        let path = folder.folder().display().to_string();
        self.folders.lock().unwrap_or_else(PoisonError::into_inner).push(folder);
        Ok(path)
    }

    /// Removes what was made for its attempt, and if the run `ends` here, for that. Whether there was something of the run.
    pub(crate) async fn clean_up(&self, ends: bool) -> bool {
        self.fetched.lock().await.drain(..).filter_map(|old| old.copy).for_each(OwnFolder::remove);
        let folders = std::mem::take(&mut *self.folders.lock().unwrap_or_else(PoisonError::into_inner));
        let had_some = !folders.is_empty();
        match ends {
            true => folders.into_iter().for_each(OwnFolder::remove),
            false => folders.iter().for_each(OwnFolder::leave),
        }
        had_some
    }

    /// What the process does now: the stacks of its threads.
    pub(crate) fn stacks(&self) -> String {
        self.running.stacks()
    }

    /// What NCCL says of all ranks.
    pub(crate) fn ras(&self, port: u16) -> Result<ras::Status, String> {
        ras::status(port)
    }

    /// Ends what runs by a signal. False if its function does not hear of it: whoever has called that is to end it.
    pub(crate) fn stop(&self, signal: i32) -> bool {
        self.running.stop(Signal::from_named_raw(signal).unwrap_or(Signal::TERM));
        self.questions.stop()
    }
}

/// Where other machines reach this process.
fn own_ip() -> Option<IpAddr> {
    let session = wingbeat::Session::current().ok()?;
    session.runtime().process().address().tcp.map(|tcp| tcp.ip())
}

/// Python's version, or why it does not run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Version(pub Result<String, String>);

pub(crate) fn version_of(python: &str) -> Result<String, String> {
    let script = "import sys; print('.'.join(map(str, sys.version_info[:2])))";
    let path = Path::new(python);
    let output = Command::new(path).args(["-c", script]).output().map_err(|error| error.to_string())?;
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).trim().to_owned());
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}
