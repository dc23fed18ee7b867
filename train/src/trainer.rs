use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use wingbeat::ObjectRef;

use crate::environment::Layout;
use crate::error::TrainError;
use crate::output::{ByLine, Line, RankOutput};
use crate::own_runtime::in_a_runtime;
use crate::plan::{Backend, Plan, Program, Returns, Shipped};
use crate::printer::Shared;
use crate::process::{Stdin, Target};
use crate::progress::Progress;
use crate::result::TrainResult;
use crate::run::Run;
use crate::scaling::Scaling;
use crate::shipping::Shipment;
use crate::stopper::Stopper;
use crate::storage::CheckpointConfig;

/// Names the interpreter of ranks.
const PYTHON_VARIABLE: &str = "WINGBEAT_PYTHON";

/// A training run: a group of ranks, each an unmodified PyTorch script with torchrun's environment.
///
/// All ranks run, or none; the first that fails ends the others, and its error, with the Python traceback, is the
/// run's. With `max_failures`, the group is then started again.
///
/// ```no_run
/// # use wingbeat_train::{Scaling, TorchTrainer, TrainError};
/// # async fn run() -> Result<(), TrainError> {
/// wingbeat::init().await?;
/// let trainer = TorchTrainer::script("train.py")
///     .args(["--epochs", "3"])
///     .scaling(Scaling::workers(4).gpus_per_worker(1.0))
///     .max_failures(2)
///     .on_output(|rank, line| println!("{rank} | {}", line.text));
/// match trainer.fit().await {
///     Ok(result) => println!("{} ranks, {} attempts, {:.1?}", result.ranks, result.attempts, result.elapsed),
///     Err(TrainError::RankFailed { rank, node, python_error: Some(error), .. }) => {
///         eprintln!("rank {rank} on {node} raised {}: {}", error.kind, error.message);
///     }
///     Err(error) => return Err(error),
/// }
/// # Ok(())
/// # }
/// ```
#[must_use = "nothing runs until `fit()` or `start()`"]
pub struct TorchTrainer {
    pub(crate) plan: Plan,
    python: Option<String>,
}

/// A trainer of another run: what stops one does not stop the other.
impl Clone for TorchTrainer {
    fn clone(&self) -> Self {
        let plan = Plan { stopper: Stopper::new(), ..self.plan.clone() };
        TorchTrainer { plan, python: self.python.clone() }
    }
}

impl TorchTrainer {
    fn new(target: Target) -> Self {
        TorchTrainer { plan: Plan::new(Program::Process(target)), python: None }
    }

    /// Runs `python script args…` on every rank.
    pub fn script(path: impl Into<PathBuf>) -> Self {
        Self::new(Target::Script(path.into()))
    }

    /// Runs `python -m name args…` on every rank.
    ///
    /// ```
    /// let trainer = wingbeat_train::TorchTrainer::module("package.train");
    /// ```
    pub fn module(name: &str) -> Self {
        Self::new(Target::Module(name.to_owned()))
    }

    /// Runs any program, as `torchrun --no-python` does.
    pub fn program(name: &str) -> Self {
        Self::new(Target::Program(name.to_owned()))
    }

    #[doc(hidden)]
    /// Calls a Python function. `pickled` is two pickles, as `wingbeat.torch` writes them: what the function's module is
    /// found with, and the function with its arguments.
    pub fn python_function(pickled: Vec<u8>) -> Self {
        Self::new(Target::Function(pickled))
    }

    #[doc(hidden)]
    /// Of a Python function: which ranks say what it returned, as the first of the two pickles tells them; the first rank, if nothing is
    /// said. One of them that ends without has failed, also with exit code 0.
    pub fn returns(mut self, returns: Returns) -> Self {
        self.plan.returns = returns;
        self
    }

    /// Arguments of the script.
    pub fn args<S: Into<String>>(mut self, args: impl IntoIterator<Item = S>) -> Self {
        self.plan.args = args.into_iter().map(Into::into).collect();
        self
    }

    /// How many ranks there are, and what each holds; one, if nothing is said.
    pub fn scaling(mut self, scaling: Scaling) -> Self {
        self.plan.scaling = scaling;
        self
    }

    /// The interpreter; else `WINGBEAT_PYTHON`, that of an activated environment (`VIRTUAL_ENV`, `CONDA_PREFIX`),
    /// `.venv/bin/python` of the working directory, or `python3`.
    pub fn python(mut self, path: impl Into<String>) -> Self {
        self.python = Some(path.into());
        self
    }

    /// A variable of every rank's environment. It wins over what would be set.
    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.plan.env.insert(name.to_owned(), value.to_owned());
        self
    }

    /// How often the group may be started again after a failure; never if nothing is said.
    pub fn max_failures(mut self, failures: u32) -> Self {
        self.plan.max_failures = failures;
        self
    }

    /// Whether a script's exception is a failure to start again after, as a crash or a lost node is; it is if nothing is
    /// said.
    pub fn retry_exceptions(mut self, retry: bool) -> Self {
        self.plan.retry_exceptions = retry;
        self
    }

    /// How long ranks that handle SIGTERM have to save what they have, when the run is stopped or moved, or another rank has
    /// failed; 30 s if nothing is said.
    pub fn grace(mut self, grace: Duration) -> Self {
        self.plan.grace = grace;
        self
    }

    /// After how long without output or report the ranks' stacks are shown, and who keeps the others waiting; 10 minutes
    /// if nothing is said, and never 0. While ranks wait for the storage, that is said instead, and is no hang.
    pub fn hang_timeout(mut self, after: Duration) -> Self {
        self.plan.hang_timeout = after;
        self
    }

    /// A run that hangs for as long as [`hang_timeout`](Self::hang_timeout) has failed, and is started again if it may.
    pub fn restart_on_hang(mut self) -> Self {
        self.plan.restart_on_hang = true;
        self
    }

    /// Starts every rank as a new process, instead of forking it from one that has torch imported.
    pub fn cold(mut self) -> Self {
        self.plan.warm = false;
        self
    }

    /// Ships this folder to the nodes, once for each content, and runs there: a relative script is looked for in it. It is
    /// for code; more than 256 MiB are refused, and what scripts write there is not brought back.
    pub fn working_dir(mut self, folder: impl Into<PathBuf>) -> Self {
        self.plan.working_dir = Some(folder.into());
        self
    }

    /// The run's id, told to scripts as `TORCHELASTIC_RUN_ID`; one that no other run has if nothing is said.
    pub fn run_id(mut self, id: &str) -> Self {
        self.plan.run_id = Some(id.to_owned());
        self
    }

    /// The name of the ranks' role, told to scripts as `ROLE_NAME`; `default` if nothing is said.
    pub fn role(mut self, role: &str) -> Self {
        self.plan.role = role.to_owned();
        self
    }

    /// How the ranks of a node are told apart; as by torchrun if nothing is said.
    pub fn layout(mut self, layout: Layout) -> Self {
        self.plan.layout = layout;
        self
    }

    /// Has rank 0 read this process's standard input, if it runs on this machine. Other ranks, and those of trainers that
    /// do not say this, read nothing. Nor does it where this process reads a socket.
    pub fn stdin(mut self) -> Self {
        self.plan.stdin_is_lost = Stdin::is_out_of_reach();
        self.plan.stdin = Stdin::own().filter(|_| !self.plan.stdin_is_lost);
        self
    }

    /// The port where rank 0 listens, instead of a free one.
    pub fn master_port(mut self, port: u16) -> Self {
        self.plan.master_port = Some(port);
        self
    }

    /// What carries tensors between ranks.
    pub fn backend(mut self, backend: Backend) -> Self {
        self.plan.backend = backend;
        self
    }

    #[doc(hidden)]
    /// A dataset, with a part for each rank: an Arrow IPC file each, as `wingbeat.train.get_dataset_shard` reads it. Refs
    /// to large values are best made once, with `put`.
    pub fn dataset(mut self, name: &str, shards: Vec<ObjectRef<Vec<u8>>>) -> Self {
        self.plan.datasets.insert(name.to_owned(), shards);
        self
    }

    /// A small file that every rank has in memory, as a configuration: `{file:NAME}` in an argument becomes its path there.
    ///
    /// ```
    /// # use wingbeat_train::TorchTrainer;
    /// let trainer = TorchTrainer::script("train.py")
    ///     .file("settings.json", br#"{"rate": 0.1}"#.to_vec())
    ///     .args(["--settings", "{file:settings.json}"]);
    /// ```
    pub fn file(mut self, name: &str, content: Vec<u8>) -> Self {
        self.plan.files.insert(name.to_owned(), content.into());
        self
    }

    /// Where checkpoints are stored: a folder that all nodes share, or a URL of S3 (`s3://bucket/path`), GCS (`gs:`) or
    /// Azure (`az:`), with their usual settings in the environment. The next run there goes on from the newest one. If
    /// nothing is said and a checkpoint is reported, it is stored in a new folder of `$XDG_DATA_HOME/wingbeat/runs`, or of
    /// `~/.local/share/wingbeat/runs`, which is named in a notice.
    pub fn storage(mut self, url: &str) -> Self {
        self.plan.storage = Some(url.to_owned());
        self
    }

    /// Which checkpoints are kept; the two newest if nothing is said.
    pub fn checkpoints(mut self, config: CheckpointConfig) -> Self {
        self.plan.keep = config;
        self
    }

    /// What to do with a line that a rank printed, instead of printing it with its rank. A progress bar, which is drawn
    /// over itself with `\r`, is a line every 10 s, and when it is done.
    pub fn on_output(mut self, show: impl Fn(u32, &Line) + Send + Sync + 'static) -> Self {
        let show = Arc::new(show);
        self.plan.output = Arc::new(move || {
            let show = show.clone();
            Arc::new(Mutex::new(ByLine::new(move |rank, line: &Line| show(rank, line))))
        });
        self
    }

    /// Where what ranks print goes, byte by byte, instead of to this process's own standard output and standard error.
    /// Clones of the trainer have it in common.
    pub fn output(mut self, output: impl RankOutput + 'static) -> Self {
        let output: Shared = Arc::new(Mutex::new(output));
        self.plan.output = Arc::new(move || output.clone());
        self
    }

    /// How long the ranks may wait for their places, and also for nodes that are not there yet. If nothing is said, they
    /// wait as long as others hold what they need, and what no nodes could ever hold fails at once. What they wait for is a
    /// notice after 2 s, and now and then again.
    pub fn wait_for_room(mut self, limit: Duration) -> Self {
        self.plan.wait_for_room = Some(limit);
        self
    }

    /// What to do with what the run has to say about itself, instead of printing it to standard error.
    pub fn on_notice(mut self, show: impl Fn(&str) + Send + Sync + 'static) -> Self {
        self.plan.on_notice = Arc::new(show);
        self
    }

    /// What to do when an attempt begins, and each time that all ranks have reported.
    pub fn on_progress(mut self, tell: impl Fn(&Progress) + Send + Sync + 'static) -> Self {
        self.plan.on_progress = Arc::new(tell);
        self
    }

    /// A way to end the run from elsewhere.
    pub fn stopper(&self) -> Stopper {
        self.plan.stopper.clone()
    }

    /// Starts it on a thread of its own, to be watched and stopped.
    ///
    /// # Errors
    /// There is no session, or the process may have no more threads. What else goes wrong is its result.
    pub fn start(self) -> Result<Run, TrainError> {
        Run::begin(self)
    }

    /// Runs it to its end.
    ///
    /// If this is dropped before it is done, the ranks are ended at once, and what they held is given back.
    ///
    /// # Errors
    /// The group cannot be placed, a node lacks the script or the interpreter, or a rank failed more often than allowed.
    pub async fn fit(mut self) -> Result<TrainResult, TrainError> {
        self.plan.check()?;
        for (name, shards) in &self.plan.datasets {
            let ranks = self.plan.scaling.ranks();
            if shards.len() != ranks as usize || self.plan.scaling.is_elastic() {
                let parts = shards.len();
                let why = format!("the dataset {name} has {parts} parts, for {ranks} ranks whose number must not vary");
                return Err(TrainError::Invalid(why));
            }
        }
        self.plan.python = self.python.take().unwrap_or_else(default_python);
        if let Some(folder) = &self.plan.working_dir {
            let shipment = Shipment::pack(folder)
                .map_err(|why| TrainError::Invalid(format!("cannot ship the working directory: {why}")))?;
            let (hash, run) = (shipment.hash.clone(), format!("{:016x}", rand::random::<u64>()));
            self.plan.shipment = Some(Shipped { hash, content: wingbeat::put(&shipment)?, run });
        } else if let Program::Process(Target::Script(script)) = &mut self.plan.program {
            self.plan.as_given = Some(script.clone());
            // Ranks run in the driver's working directory, or where it does not exist, in another.
            *script = std::path::absolute(&script).unwrap_or_else(|_| script.clone());
        }
        let here = std::env::current_dir();
        if let Some(folder) = here.as_ref().ok().filter(|folder| folder.to_str().is_none()) {
            let why = format!(
                "the name of the working directory {} is not UTF-8; rename it, or run elsewhere",
                folder.display()
            );
            return Err(TrainError::Invalid(why));
        }
        if self.plan.stdin_is_lost {
            (self.plan.on_notice)("standard input is a socket, which no other process can open: rank 0 reads nothing");
        }
        in_a_runtime(self.plan.fit()).await?
    }
}

/// The interpreter of ranks for which none is named: `$WINGBEAT_PYTHON`, that of the environment that is activated, of `.venv` in the
/// current folder, or `python3` on the PATH.
///
/// ```
/// assert!(!wingbeat_train::default_python().is_empty());
/// ```
pub fn default_python() -> String {
    if let Ok(python) = std::env::var(PYTHON_VARIABLE)
        && !python.is_empty()
    {
        return python;
    }
    let activated = |name: &str| std::env::var_os(name).map(PathBuf::from);
    // That one is active in every shell, whoever wants it.
    let is_base = std::env::var_os("CONDA_DEFAULT_ENV").is_some_and(|name| name == "base");
    let conda = activated("CONDA_PREFIX");
    let (chosen, last) = if is_base { (None, conda) } else { (conda, None) };
    let environments = [activated("VIRTUAL_ENV"), chosen, Some(PathBuf::from(".venv")), last];
    let mut environments = environments.into_iter().flatten().map(|folder| folder.join("bin/python"));
    match environments.find(|python| python.exists()) {
        Some(python) => std::path::absolute(&python).unwrap_or(python).display().to_string(),
        None => "python3".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_can_go_on_on_another_thread() {
        fn is_send<T: Send>(_: T) {}
        is_send(TorchTrainer::script("train.py").fit());
    }

    #[tokio::test]
    async fn what_stops_one_trainer_does_not_stop_its_clone() {
        let first = TorchTrainer::script("train.py");
        let second = first.clone();
        first.stopper().stop();
        first.stopper().stopped().await;
        let others = second.plan.stopper.stopped();
        tokio::select! {
            biased;
            () = others => panic!("the clone was stopped"),
            () = std::future::ready(()) => {}
        }
    }
}
