//! What a run is to do: what a [`TorchTrainer`](crate::TorchTrainer) was told, for those who do it.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_bytes::ByteBuf;
use wingbeat::ObjectRef;

use crate::context::MakeCall;
use crate::environment::Layout;
use crate::output::Prefixed;
use crate::printer::Shared;
use crate::process::{Stdin, Target};
use crate::progress::Progress;
use crate::scaling::Scaling;
use crate::shipping::Shipment;
use crate::shown::notice;
use crate::stopper::Stopper;
use crate::storage::CheckpointConfig;

/// What carries tensors between ranks. Told to the script as `WINGBEAT_BACKEND`.
///
/// ```
/// use wingbeat_train::{Backend, TorchTrainer};
/// let on_cpus = TorchTrainer::script("train.py").backend(Backend::Gloo);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Backend {
    /// NCCL where GPUs were assigned, gloo otherwise.
    #[default]
    Auto,
    /// NCCL.
    Nccl,
    /// gloo.
    Gloo,
}

/// Which ranks say what a Python function returned.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Returns {
    /// Rank 0.
    #[default]
    First,
    /// All.
    All,
}

type OnNotice = Arc<dyn Fn(&str) + Send + Sync>;
type OnProgress = Arc<dyn Fn(&Progress) + Send + Sync>;

/// A working directory that was shipped.
#[derive(Clone)]
pub(crate) struct Shipped {
    pub hash: String,
    pub content: ObjectRef<Shipment>,
    /// By which the run's own copies of it are found again.
    pub run: String,
}

/// What ranks are.
#[derive(Clone)]
pub(crate) enum Program {
    /// Each is a process.
    Process(Target),
    /// Each is a call of a Rust function.
    Call(MakeCall),
}

/// What a trainer was told: a field for each of its options.
#[derive(Clone)]
pub(crate) struct Plan {
    pub program: Program,
    /// Of a Python function: whose values are wanted.
    pub returns: Returns,
    pub args: Vec<String>,
    pub scaling: Scaling,
    pub python: String,
    pub env: BTreeMap<String, String>,
    pub role: String,
    pub run_id: Option<String>,
    pub working_dir: Option<PathBuf>,
    pub shipment: Option<Shipped>,
    pub master_port: Option<u16>,
    pub warm: bool,
    pub max_failures: u32,
    pub retry_exceptions: bool,
    pub grace: Duration,
    pub hang_timeout: Duration,
    pub restart_on_hang: bool,
    pub backend: Backend,
    pub datasets: BTreeMap<String, Vec<ObjectRef<Vec<u8>>>>,
    /// Of every rank, by name.
    pub files: BTreeMap<String, ByteBuf>,
    pub storage: Option<String>,
    pub keep: CheckpointConfig,
    pub stopper: Stopper,
    /// Makes what shows what the ranks of a run print.
    pub output: Arc<dyn Fn() -> Shared + Send + Sync>,
    pub wait_for_room: Option<Duration>,
    pub layout: Layout,
    /// What rank 0 reads.
    pub stdin: Option<Stdin>,
    /// Whether there is a standard input that no rank can open.
    pub stdin_is_lost: bool,
    /// The script as it was given: what `sys.argv[0]` is where it leads to the same.
    pub as_given: Option<PathBuf>,
    pub on_notice: OnNotice,
    pub on_progress: OnProgress,
}

impl Plan {
    /// One of which nothing else was said.
    pub(crate) fn new(program: Program) -> Plan {
        Plan {
            program,
            args: Vec::new(),
            scaling: Scaling::workers(1),
            python: String::new(),
            env: BTreeMap::new(),
            role: "default".into(),
            returns: Returns::First,
            run_id: None,
            working_dir: None,
            shipment: None,
            master_port: None,
            warm: true,
            max_failures: 0,
            retry_exceptions: true,
            grace: Duration::from_secs(30),
            hang_timeout: Duration::from_secs(600),
            restart_on_hang: false,
            backend: Backend::Auto,
            datasets: BTreeMap::new(),
            files: BTreeMap::new(),
            storage: None,
            keep: CheckpointConfig::default(),
            stopper: Stopper::new(),
            on_notice: Arc::new(notice),
            on_progress: Arc::new(|_| {}),
            output: Arc::new(|| Arc::new(Mutex::new(Prefixed::default()))),
            wait_for_room: None,
            layout: Layout::default(),
            stdin: None,
            stdin_is_lost: false,
            as_given: None,
        }
    }

    /// Whether a rank is to say what its function returned.
    pub(crate) fn must_return(&self, rank: u32) -> bool {
        matches!(self.program, Program::Process(Target::Function(_))) && (rank == 0 || self.returns == Returns::All)
    }
}
