//! A node's warm Python: a process with torch imported, from which ranks are forked.
//!
//! Its actor is detached: it outlives the run that asked for it first, and ends when it has been idle for long. Ranks
//! reach it by a socket whose name says what it is, so that no run has to be told about another's. One whose packages have
//! changed retires: it lives until its last rank has ended, and the next one takes the socket.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use wingbeat::{ActorRef, Error, NodeId};
use wingbeat_core::spec::is_secret;

use crate::package;
use crate::process::as_outside;
use crate::rank;

/// Where the actors are named.
const NAMESPACE: &str = "wingbeat-train";
/// How long a warm Python may go unused.
const IDLE_SECONDS: &str = "600";
/// Another time for that.
const IDLE: &str = "WINGBEAT_WARM_IDLE";
/// How long one that has failed can say why.
const TOLD: Duration = Duration::from_secs(1);
/// So many on a node may be about to end, of one kind.
const LIVES: u32 = 64;
/// What nearly every script imports, where it is there.
const MODULES: [&str; 4] = ["torch?", "torch.distributed?", "torch.nn.parallel?", "numpy?"];
/// Further modules to import, with commas between.
const MORE_MODULES: &str = "WINGBEAT_WARM_IMPORTS";
/// Variables that are read when Python starts or when a module is imported begin with one of these.
const READ_AT_START: [&str; 25] = [
    "PYTHON",
    "LD_",
    "TORCH",
    "PYTORCH",
    "CUDA_",
    "MALLOC_",
    "GLIBC_",
    "LC_",
    "LANG",
    "MKL_",
    "KMP_",
    "GOMP_",
    "OPENBLAS_",
    "HF_",
    "TRANSFORMERS_",
    "XDG_",
    "HOME",
    "PATH",
    "VIRTUAL_ENV",
    "CONDA_",
    "WINGBEAT_WARM_",
    "OMP_",
    "ATEN_",
    "TMP",
    "TEMP",
];
/// These whole names are read then, too: who the user is, where no file says so (`getpass.getuser`).
const USER: [&str; 4] = ["USER", "USERNAME", "LOGNAME", "LNAME"];
/// And these, of them, are read later, or set again in the fork.
const READ_LATER: [&str; 7] = [
    "TORCHELASTIC_",
    "TORCH_NCCL_",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
];

/// What a warm Python is: two ranks that agree on it can be forked from one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Kind {
    python: String,
    settings: BTreeMap<String, String>,
    modules: Vec<String>,
}

/// Whether a variable says where a secret lies, or that none is to be used: modules read that when they are imported.
fn is_about_a_secret(name: &str) -> bool {
    ["_PATH", "_FILE", "_DIR"].iter().any(|end| name.ends_with(end)) || name.contains("_DISABLE_")
}

impl Kind {
    /// That of a rank with this interpreter and environment.
    pub(crate) fn of(python: &str, environment: &BTreeMap<String, String>) -> Kind {
        let settings = environment
            .iter()
            .filter(|(name, _)| is_read_at_start(name) && !starts_with_any(name, &READ_LATER))
            // The head writes down what its actor is made of. A rank has its whole environment from its own actor, in any case.
            .filter(|(name, _)| !is_secret(name) || is_about_a_secret(name))
            .map(|(name, value)| (name.clone(), value.clone()));
        let more = environment.get(MORE_MODULES).map(String::as_str).unwrap_or_default();
        let more = more.split(',').map(str::trim).filter(|name| !name.is_empty());
        Kind {
            python: python.to_owned(),
            settings: settings.collect(),
            modules: MODULES.into_iter().chain(more).map(str::to_owned).collect(),
        }
    }

    /// The name of its socket on a node.
    pub(crate) fn socket(&self, node: u64) -> String {
        let mut hasher = blake3::Hasher::new();
        hasher.update(package::identity().as_bytes());
        for text in [&self.python].into_iter().chain(&self.modules) {
            hasher.update(text.as_bytes()).update(&[0]);
        }
        for (name, value) in &self.settings {
            hasher.update(name.as_bytes()).update(b"=").update(value.as_bytes()).update(&[0]);
        }
        let hash = hasher.finalize().to_hex();
        format!("wingbeat-python-{node:016x}-{}", &hash.as_str()[..16])
    }
}

/// How the start of a warm Python went.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Started {
    /// Its version, or why there is none.
    pub version: Result<String, String>,
    /// Why it does not listen. Another may, that was started at the same time.
    pub failed: Option<String>,
    /// It takes no new ranks.
    retired: bool,
}

/// The actor of a warm Python.
pub(crate) struct WarmPython {
    version: Result<String, String>,
    failed: Option<String>,
    retired: Arc<AtomicBool>,
}

#[wingbeat::actor]
impl WarmPython {
    pub(crate) fn new(kind: Kind, socket: String) -> Self {
        let retired = Arc::default();
        let version = rank::version_of(&kind.python);
        let failed = version.as_ref().ok().and_then(|_| spawn(&kind, &socket, &retired).err());
        WarmPython { version, failed, retired }
    }

    /// Whether ranks can connect now; they wait until it has imported what it is to.
    pub(crate) fn started(&self) -> Started {
        let retired = self.retired.load(Ordering::Relaxed);
        Started { version: self.version.clone(), failed: self.failed.clone(), retired }
    }
}

/// Starts it, by a thread that waits for it: its parent-death signal fires when that thread ends. This process ends
/// with it.
fn spawn(kind: &Kind, socket: &str, retired: &Arc<AtomicBool>) -> Result<(), String> {
    let (sender, receiver) = std::sync::mpsc::sync_channel(1);
    let (kind, socket, retired) = (kind.clone(), socket.to_owned(), retired.clone());
    let waiting = std::thread::Builder::new().name("warm-python".into()).spawn(move || {
        let mut child = match start(&kind, &socket) {
            Ok(child) => child,
            Err(error) => {
                let _ = sender.send(Err(error.to_string()));
                return end();
            }
        };
        let mut listens = false;
        let said = child.stdout.take().map(BufReader::new);
        for line in said.into_iter().flat_map(BufRead::lines).map_while(Result::ok) {
            match line.as_str() {
                "listening" => {
                    listens = true;
                    let _ = sender.send(Ok(()));
                }
                "taken" => drop(sender.try_send(Err("another listens on its socket".to_owned()))),
                "retired" => retired.store(true, Ordering::Relaxed),
                _ => {}
            }
        }
        let _ = sender.try_send(Err("it ended before it listened".to_owned()));
        let _ = child.wait();
        if listens { std::process::exit(0) } else { end() }
    });
    waiting.map_err(|error| error.to_string())?;
    receiver.recv().unwrap_or_else(|_| Err("its thread has ended".into()))
}

/// Nothing is left for this actor, and its name is to be free for the next one; but whoever asked is to hear why.
fn end() {
    std::thread::sleep(TOLD);
    std::process::exit(0);
}

fn start(kind: &Kind, socket: &str) -> std::io::Result<Child> {
    let script = package::folder()?.join("_warm.py");
    let mut command = Command::new(&kind.python);
    let idle = kind.settings.get(IDLE).map_or(IDLE_SECONDS, String::as_str);
    command.arg("-u").arg(script).arg(socket).arg(idle).args(&kind.modules);
    for (name, _) in std::env::vars_os() {
        let name = name.to_string_lossy();
        if is_read_at_start(&name) || name == "OMP_NUM_THREADS" {
            command.env_remove(&*name);
        }
    }
    // Threads that a library starts when it is imported would not be there in a fork.
    command.envs(&kind.settings).env("OPENBLAS_NUM_THREADS", "1");
    command.env("WINGBEAT_RANK_PARENT", std::process::id().to_string());
    // What ranks inherit from it must be what they would have as new processes.
    as_outside(&mut command);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::inherit()).spawn()
}

fn is_read_at_start(name: &str) -> bool {
    starts_with_any(name, &READ_AT_START) || USER.contains(&name)
}

fn starts_with_any(name: &str, prefixes: &[&str]) -> bool {
    prefixes.iter().any(|prefix| name.starts_with(prefix))
}

/// Has a node start its warm Python, unless it has one.
pub(crate) async fn start_on(node: u64, kind: Kind, socket: &str) -> Result<Started, Error> {
    let mut life = 0;
    loop {
        let name = format!("{socket}-{life}");
        let made = WarmPython::options()
            .name(&name)
            .namespace(NAMESPACE)
            .detached()
            .yields_to_drain()
            .num_cpus(0.0)
            .on_node(NodeId(node))
            .remote(kind.clone(), socket.to_owned());
        let started = match made.started().get().await {
            Ok(started) => started,
            // Another run was first: perhaps one of another build, which is as good here.
            Err(_) => WarmPythonHandle::from(ActorRef::named_in(NAMESPACE, &name).await?).started().get().await?,
        };
        if !started.retired || life == LIVES {
            return Ok(started);
        }
        life += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_no_part_of_what_a_warm_python_is() {
        let environment = |token: &str| {
            let pairs = [("HF_TOKEN", token), ("HF_HOME", "/models"), ("TORCH_API_KEY", token), ("LANG", "C.UTF-8")];
            BTreeMap::from(pairs.map(|(name, value)| (name.to_owned(), value.to_owned())))
        };
        let kind = Kind::of("python3", &environment("hf_secret"));
        assert_eq!(kind.settings.keys().collect::<Vec<_>>(), ["HF_HOME", "LANG"]);
        assert_eq!(kind, Kind::of("python3", &environment("another")), "both are forked from one");
    }
}
