//! What is asked for: tasks, actors, leases; and who and where the parties are.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use crate::error::{Attempts, Error};
use crate::ids::*;
use crate::labels::Selector;
use crate::memory::MemoryShortage;
use crate::names;
use crate::resources::{GPU, ResourceSet};
use crate::value::{ObjectValue, Packed, StoreNode, Stored};

/// Which machine (kernel, in the upper half, and network namespace) a process is on. Equal ids can use unix sockets.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default, Serialize, Deserialize)]
pub struct MachineId(pub u64);

impl MachineId {
    /// Whether both have one kernel, such as containers of one machine: they stand still together.
    pub fn shares_kernel(self, other: MachineId) -> bool {
        self.0 >> 32 == other.0 >> 32
    }
}

/// How to reach a process.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct Address {
    /// Who answers there.
    pub process: ProcessId,
    /// The machine on which the unix socket is.
    pub machine: MachineId,
    /// Name in the abstract socket namespace.
    pub unix: String,
    /// For other machines, where the process listens for them.
    pub tcp: Option<SocketAddr>,
    /// Who answers for its objects when the process is no more: the steward of its node. Of a driver or worker process, once it
    /// has a node, and of a node.
    pub steward: Option<Box<Address>>,
}

/// Where a lease may be granted.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default, Serialize, Deserialize)]
pub enum Strategy {
    /// Pack to half a node, then spread.
    #[default]
    Default,
    /// On as many nodes as there are.
    Spread,
    /// On one node.
    Node {
        /// That node.
        node: NodeId,
        /// Whether another will do when it cannot.
        soft: bool,
    },
    /// In what a placement group has reserved.
    Bundle {
        /// The group.
        group: PlacementGroupId,
        /// Which of its bundles, from 0; any with room if nothing is said.
        index: Option<u32>,
    },
    /// Where the least is left over of what it asks for: for what lives long, so that large things still fit beside it.
    BestFit,
}

/// Tasks of one shape can run on the same lease.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default, Serialize, Deserialize)]
pub struct Shape {
    /// What the lease holds.
    pub resources: ResourceSet,
    /// Memory of one device, in bytes, instead of a number of devices; 0 for none.
    pub gpu_memory: u64,
    /// Where it may be.
    pub strategy: Strategy,
    /// Which nodes will do: the first selector that a node with room matches. Any node if there is none.
    pub labels: Vec<Selector>,
    /// Whether it waits for a node that could hold it, when there is none.
    pub patient: bool,
}

impl Ord for Shape {
    /// By its fields, in order. What is kept by shape is looked up for each task, mostly by the very same one.
    fn cmp(&self, other: &Shape) -> Ordering {
        if std::ptr::eq(self, other) {
            return Ordering::Equal;
        }
        let Shape { resources, gpu_memory, strategy, labels, patient } = self;
        let ours = (resources, gpu_memory, strategy, labels, patient);
        ours.cmp(&(&other.resources, &other.gpu_memory, &other.strategy, &other.labels, &other.patient))
    }
}

impl PartialOrd for Shape {
    fn partial_cmp(&self, other: &Shape) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Shape {
    /// These resources, anywhere.
    pub fn of(resources: ResourceSet) -> Shape {
        Shape { resources, ..Shape::default() }
    }

    /// The node on which it must be; none where others will do, too.
    pub fn required_node(&self) -> Option<NodeId> {
        match self.strategy {
            Strategy::Node { node, soft: false } => Some(node),
            Strategy::Node { soft: true, .. } | Strategy::Bundle { .. } => None,
            Strategy::Default | Strategy::Spread | Strategy::BestFit => None,
        }
    }

    /// The placement group in which it must be, and in which of its bundles, if that is said.
    pub fn bundle(&self) -> Option<(PlacementGroupId, Option<u32>)> {
        match self.strategy {
            Strategy::Bundle { group, index } => Some((group, index)),
            Strategy::Default | Strategy::Spread | Strategy::Node { .. } | Strategy::BestFit => None,
        }
    }

    /// Checks what nobody may ask for.
    ///
    /// # Errors
    /// What is wrong, in words.
    pub fn check(&self) -> Result<(), String> {
        self.resources.check().map_err(|invalid| invalid.to_string())?;
        if self.gpu_memory > 0 && !self.resources.get(GPU).is_zero() {
            return Err("ask for GPUs or for memory of one, not for both".into());
        }
        names::check_resources(&self.resources)?;
        names::check_selectors(&self.labels)
    }
}

impl std::fmt::Display for Shape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.gpu_memory > 0 {
            write!(f, "{} bytes of one GPU's memory, ", self.gpu_memory)?;
        }
        write!(f, "{}", self.resources)?;
        match &self.strategy {
            Strategy::Default | Strategy::BestFit => {}
            Strategy::Spread => f.write_str(", spread")?,
            Strategy::Node { node, soft: false } => write!(f, " on {node}")?,
            Strategy::Node { node, soft: true } => write!(f, " on {node} if possible")?,
            Strategy::Bundle { group, index: Some(index) } => write!(f, " in bundle {index} of {group}")?,
            Strategy::Bundle { group, index: None } => write!(f, " in {group}")?,
        }
        for (i, selector) in self.labels.iter().enumerate() {
            write!(f, "{}{selector}", if i == 0 { " where " } else { ", else where " })?;
        }
        Ok(())
    }
}

/// What a placement group reserves on one node.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct BundleSpec {
    /// What it holds.
    pub resources: ResourceSet,
    /// Memory of one device, in bytes, instead of a number of devices; 0 for none.
    pub gpu_memory: u64,
    /// As [`Shape::labels`].
    pub labels: Vec<Selector>,
}

/// How the bundles of a placement group lie to each other.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub enum PlacementStrategy {
    /// On as few nodes as possible.
    #[default]
    Pack,
    /// On as many nodes as possible.
    Spread,
    /// All on one node.
    StrictPack,
    /// Each on a node of its own.
    StrictSpread,
}

/// A placement group as it is asked for.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct PlacementGroupSpec {
    /// Its id, chosen by the creator.
    pub id: PlacementGroupId,
    /// The job it belongs to.
    pub job: JobId,
    /// A name to find it by.
    pub name: Option<ScopedName>,
    /// How its bundles lie to each other.
    pub strategy: PlacementStrategy,
    /// What it reserves; all of it, or nothing.
    pub bundles: Vec<BundleSpec>,
    /// Whether it outlives its creator and its job.
    pub detached: bool,
    /// Whether tasks that its tasks and actors submit run in it too, unless told otherwise.
    pub captures_children: bool,
    /// Whether it waits for nodes that could hold it, when there are none.
    pub patient: bool,
    /// The creator.
    pub owner: Address,
}

impl PlacementGroupSpec {
    /// What to call it in messages.
    pub fn title(&self) -> String {
        match &self.name {
            Some(name) => format!("placement group `{}`", name.name),
            None => format!("placement group {}", self.id),
        }
    }
}

/// The state of a placement group, as the head tells it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum PlacementGroupState {
    /// Not all of its bundles have a place.
    Pending,
    /// Everything is reserved.
    Placed {
        /// The node of each bundle.
        nodes: Vec<NodeId>,
        /// Those of them that are drained.
        draining: Vec<Draining>,
    },
    /// Never again.
    Gone {
        /// Why.
        cause: Box<Error>,
    },
}

/// A node that is to be free of work.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Draining {
    /// The node.
    pub node: NodeId,
    /// Why, for people.
    pub why: String,
    /// When what still runs there is ended, in milliseconds from now.
    pub left_ms: u64,
}

/// An argument of a task.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Arg {
    /// The encoded value.
    Value(Packed),
    /// A value in shared memory; the worker process reads it there.
    Stored(ObjectId, Stored),
    /// The constructor argument of an actor that its worker process asks the owner for.
    Ref(ObjectId, Address),
}

/// How a task gives its result.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Outputs {
    /// This many objects.
    Fixed(u32),
    /// Items one after another, at most `ahead` of them not yet taken by the consumer.
    Stream {
        /// Items that may be on the way.
        ahead: u32,
    },
}

/// One attempt at a task or an actor call, as it is pushed to a worker process.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct TaskSpec {
    /// Its id; the owner is in it.
    pub id: TaskId,
    /// What to run.
    pub function: FunctionId,
    /// What the user called this task, if anything.
    pub name: Option<Box<str>>,
    /// The arguments, in order.
    pub args: Vec<Arg>,
    /// What comes back.
    pub outputs: Outputs,
    /// 0 for the first attempt.
    pub attempt: u32,
    /// Whether it makes lost outputs again: its owner may still have others of its outputs.
    pub remakes: bool,
    /// Whether it is tried again if it is ended because memory is short: such tasks are ended first.
    pub yields_memory: bool,
    /// Whether its process runs tasks that it has submitted while it waits, and whether it may itself run in the process of the
    /// task that submitted it.
    pub shares_process: bool,
    /// The concurrency group of an actor call; none for tasks and the default group.
    pub group: Option<Box<str>>,
    /// The task that submitted this one, for cancelling and for finding cycles.
    pub parent: Option<TaskId>,
}

/// The result of one attempt.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct TaskResult {
    /// The task.
    pub id: TaskId,
    /// Which attempt.
    pub attempt: u32,
    /// Its outputs in order, or why there are none.
    pub outcome: Outcome,
    /// How long user code ran, in nanoseconds.
    pub ran_nanos: u64,
}

impl Outcome {
    /// Whether there are refs in what it gave.
    pub fn has_refs(&self) -> bool {
        match self {
            Outcome::One(value) => value.refs().is_some(),
            Outcome::Many(values) => values.iter().any(|value| value.refs().is_some()),
            Outcome::StreamEnded(_) | Outcome::Failed(_) => false,
        }
    }
}

/// How an attempt ended.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Outcome {
    /// One output, the usual case.
    One(ObjectValue),
    /// Several outputs.
    Many(Vec<ObjectValue>),
    /// A stream that ended after so many items (the last may be an error).
    StreamEnded(u32),
    /// No output.
    Failed(Box<Error>),
}

/// The name of an actor or a placement group.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct ScopedName {
    /// Names are unique within a namespace.
    pub namespace: String,
    /// The name.
    pub name: String,
}

/// An actor as it is asked for. Its many fields are all that a head or a node needs to start it, also one that has never heard of its
/// creator.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ActorSpec {
    /// Its id, chosen by the creator.
    pub id: ActorId,
    /// The job it belongs to.
    pub job: JobId,
    /// The actor class: its constructor.
    pub class: FunctionId,
    /// The class, for people.
    pub class_name: String,
    /// Constructor arguments.
    pub args: Vec<Arg>,
    /// What is needed to be placed.
    pub placement: Shape,
    /// What it holds while it lives.
    pub holds: ResourceSet,
    /// How often it may be started again; `u32::MAX` is without limit.
    pub max_restarts: u32,
    /// Calls that run at a time in the default group.
    pub max_concurrency: u32,
    /// Attempts after the first that restarts may cost a call that says nothing itself; `u32::MAX` is without limit.
    pub max_task_retries: u32,
    /// Calls of one process that may be pending; more fail. Without limit if there is none.
    pub max_pending_calls: Option<u32>,
    /// Named concurrency groups.
    pub groups: BTreeMap<String, u32>,
    /// A name to find it by.
    pub name: Option<ScopedName>,
    /// Whether it outlives its creator and its job.
    pub detached: bool,
    /// Whether a drained node may end without it.
    pub yields_to_drain: bool,
    /// The object whose refs are the actor's handles; its owner decides when nobody holds one.
    pub handle: ObjectId,
    /// The creator.
    pub owner: Address,
}

impl ActorSpec {
    /// Whether it is written down, and lives again under the next head: others than its creator may find it or wait for it.
    pub fn is_kept(&self) -> bool {
        self.detached || self.name.is_some()
    }
}

/// What a process needs to know to use an actor that somebody else made.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ActorInfo {
    /// The actor.
    pub id: ActorId,
    /// Its class; a handle of another class is refused.
    pub class: FunctionId,
    /// The class, for people.
    pub class_name: String,
    /// The object that counts handles.
    pub handle: ObjectId,
    /// Its owner.
    pub owner: Address,
    /// A detached actor's handles are not counted.
    pub detached: bool,
    /// As in [`ActorSpec::max_task_retries`].
    pub max_task_retries: u32,
    /// As in [`ActorSpec::max_pending_calls`].
    pub max_pending_calls: Option<u32>,
    /// Whether its program is another build than that of the job that asks, as far as the head knows both.
    pub is_of_another_build: bool,
}

/// The state of an actor, as the head tells it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum ActorState {
    /// Waits for resources or for its process, for the first time.
    Starting,
    /// Takes calls.
    Alive {
        /// Its worker process.
        address: Address,
        /// Where that stores what it gives.
        node: StoreNode,
        /// Which life.
        incarnation: Incarnation,
        /// How many moves so far have cost it no restart.
        moves: u32,
    },
    /// Its process ended; another is on its way.
    Restarting {
        /// The life that ended.
        life: Incarnation,
        /// How many moves so far have cost it no restart.
        moves: u32,
        /// Why it ended.
        cause: Box<Error>,
    },
    /// Never again.
    Dead {
        /// Why.
        cause: Box<Error>,
    },
}

/// A driver, as it introduces itself.
#[derive(Clone, Serialize, Deserialize)]
pub struct JobSpec {
    /// Its id, chosen by the driver.
    pub id: JobId,
    /// What to call it.
    pub name: String,
    /// The driver process.
    pub driver: Address,
    /// The executable that worker processes run.
    pub executable: Executable,
    /// The working directory of worker processes, where it exists on their node.
    pub working_dir: String,
    /// Variables of worker processes that may be sent anywhere and written down: those that were named for them, and a
    /// short list of others.
    pub env: BTreeMap<String, String>,
    /// All other variables of the driver. They may be secrets: they stay on the driver's machine, and in memory.
    pub local_env: BTreeMap<String, String>,
    /// The namespace of the actors that it names.
    pub namespace: String,
    /// Whose waiting tasks are served first: those of the job with the larger number.
    pub priority: i32,
}

impl JobSpec {
    /// As it may leave the driver's machine, or be written to a disk.
    #[must_use]
    pub fn without_local(&self) -> JobSpec {
        JobSpec { local_env: BTreeMap::new(), ..self.clone() }
    }

    /// The whole environment of a worker process, as far as it is known here.
    pub fn environment(&self) -> BTreeMap<String, String> {
        let mut all = self.local_env.clone();
        all.extend(self.env.clone());
        all
    }
}

/// Without the values of variables, which may be secrets.
impl std::fmt::Debug for JobSpec {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let JobSpec { id, name, driver, executable, working_dir, env, local_env, namespace, priority } = self;
        f.debug_struct("JobSpec")
            .field("id", id)
            .field("name", name)
            .field("driver", driver)
            .field("executable", executable)
            .field("working_dir", working_dir)
            .field("env", &variable_names(env))
            .field("local_env", &variable_names(local_env))
            .field("namespace", namespace)
            .field("priority", priority)
            .finish()
    }
}

/// What `Debug` shows of variables, whose values may be secrets.
///
/// ```
/// use std::collections::BTreeMap;
/// use wingbeat_core::spec::variable_names;
///
/// let variables = BTreeMap::from([("API_KEY".to_owned(), "abc".to_owned())]);
/// assert_eq!(format!("{:?}", variable_names(&variables)), r#"["API_KEY"]"#);
/// ```
#[must_use]
pub fn variable_names(variables: &BTreeMap<String, String>) -> Vec<&str> {
    variables.keys().map(String::as_str).collect()
}

/// Whether the name of a variable says that its value is a secret, or where one lies.
///
/// ```
/// use wingbeat_core::spec::is_secret;
/// assert!(is_secret("HF_TOKEN") && is_secret("AWS_ACCESS_KEY_ID") && is_secret("db_password"));
/// assert!(is_secret("SERVICE_TOKEN_FILE") && !is_secret("PATH"));
/// ```
#[must_use]
pub fn is_secret(variable: &str) -> bool {
    let variable = variable.to_ascii_uppercase();
    ["TOKEN", "SECRET", "PASSW", "CREDENTIAL", "KEY"].iter().any(|secret| variable.contains(secret))
}

/// A program, known by its content.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Executable {
    /// BLAKE3 of the content, in hex.
    pub hash: String,
    /// Length in bytes.
    pub size: u64,
    /// The driver's process id on `machine`, whose `/proc/<pid>/exe` is the program.
    pub pid: u32,
    /// The driver's machine.
    pub machine: MachineId,
    /// What to call it in messages.
    pub path: String,
}

/// Why a worker process ended.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Exit {
    /// The exit code, if it exited.
    pub code: Option<i32>,
    /// The signal, if one killed it.
    pub signal: Option<i32>,
    /// The last lines that it wrote to standard error.
    pub stderr: Vec<String>,
    /// Why Wingbeat itself ended it, if it did.
    pub reason: Option<String>,
    /// That memory ran out, if it was ended for that.
    pub memory: Option<Box<MemoryShortage>>,
}

impl Exit {
    /// What this end means for a task or actor that ran in the process.
    #[must_use]
    pub fn into_error(self, task: String, process: ProcessId, pid: u32) -> Error {
        match self.memory {
            Some(shortage) => Error::OutOfMemory { task, process, pid, shortage, attempts: 1 },
            None => Error::WorkerCrashed { task, process, pid, exit: self, attempts: 1 },
        }
    }
}

impl std::fmt::Display for Exit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.write_after(1, f)
    }
}

impl Exit {
    /// How the process of a task ended that was tried so often.
    pub(crate) fn after(&self, attempts: u32) -> ExitAfter<'_> {
        ExitAfter(self, attempts)
    }

    fn write_after(&self, attempts: u32, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match (self.code, self.signal) {
            (_, Some(signal)) => write!(f, "was killed by signal {signal}{}", signal_name(signal))?,
            (Some(code), None) => write!(f, "exited with code {code}")?,
            (None, None) => f.write_str("ended without a known exit status")?,
        }
        if let Some(reason) = &self.reason {
            write!(f, " ({reason})")?;
        }
        if let Some(shortage) = &self.memory {
            write!(f, " ({shortage})")?;
        }
        write!(f, "{}", Attempts(attempts))?;
        if !self.stderr.is_empty() {
            write!(f, "; last lines of its stderr:\n    {}", self.stderr.join("\n    "))?;
        }
        Ok(())
    }
}

/// An [`Exit`] in the last of several attempts.
pub(crate) struct ExitAfter<'a>(&'a Exit, u32);

impl std::fmt::Display for ExitAfter<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.write_after(self.1, f)
    }
}

fn signal_name(signal: i32) -> &'static str {
    match signal {
        4 => " (SIGILL)",
        6 => " (SIGABRT)",
        7 => " (SIGBUS)",
        9 => " (SIGKILL)",
        11 => " (SIGSEGV: recursion that is too deep for its stack, or unsafe code)",
        15 => " (SIGTERM)",
        _ => "",
    }
}
