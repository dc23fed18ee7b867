use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use crate::error::TrainError;
use crate::group::Group;
use crate::process::{Line, Target};

/// Names the interpreter of ranks.
const PYTHON_VARIABLE: &str = "WINGBEAT_PYTHON";

/// What carries tensors between ranks. Told to the script as `WINGBEAT_BACKEND`.
///
/// ```
/// use wingbeat_train::{Backend, TorchTrainer};
/// let on_cpus = TorchTrainer::script("train.py").workers(2).backend(Backend::Gloo);
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

type OnOutput = Arc<dyn Fn(u32, &Line) + Send + Sync>;

#[derive(Clone)]
pub(crate) struct Plan {
    pub target: Target,
    pub args: Vec<String>,
    pub workers: u32,
    pub cpus_per_worker: f64,
    pub gpus_per_worker: f64,
    pub python: String,
    pub env: BTreeMap<String, String>,
    pub max_failures: u32,
    pub backend: Backend,
    pub on_output: OnOutput,
}

impl Plan {
    pub(crate) fn each(&self) -> String {
        match self.gpus_per_worker {
            0.0 => format!("{} CPU", self.cpus_per_worker),
            gpus => format!("{} CPU and {gpus} GPU", self.cpus_per_worker),
        }
    }
}

/// A training run: a group of ranks, each an unmodified PyTorch script with torchrun's environment.
///
/// All ranks run, or none; the first that fails ends the others, and its error, with the Python traceback, is the
/// run's. With `max_failures`, the group is then started again.
///
/// ```no_run
/// # use wingbeat_train::{TorchTrainer, TrainError};
/// # async fn run() -> Result<(), TrainError> {
/// wingbeat::init().await?;
/// let trainer = TorchTrainer::script("train.py")
///     .args(["--epochs", "3"])
///     .workers(4)
///     .gpus_per_worker(1.0)
///     .max_failures(2)
///     .on_output(|rank, line| println!("{rank} | {}", line.text));
/// match trainer.fit().await {
///     Ok(result) => println!("{} ranks, {} attempts, {:.1} s", result.ranks, result.attempts, result.seconds),
///     Err(TrainError::RankFailed { rank, node, python_error: Some(error), .. }) => {
///         eprintln!("rank {rank} on {node} raised {}: {}", error.kind, error.message);
///     }
///     Err(error) => return Err(error),
/// }
/// # Ok(())
/// # }
/// ```
#[must_use = "nothing runs until `fit()`"]
#[derive(Clone)]
pub struct TorchTrainer {
    plan: Plan,
    python: Option<String>,
}

/// A run that succeeded.
#[derive(Clone, Debug, PartialEq)]
pub struct TrainResult {
    /// Number of ranks.
    pub ranks: u32,
    /// Attempts that it took; 1 if nothing failed.
    pub attempts: u32,
    /// Seconds from `fit()` to its end.
    pub seconds: f64,
}

impl TorchTrainer {
    fn new(target: Target) -> Self {
        let plan = Plan {
            target,
            args: Vec::new(),
            workers: 1,
            cpus_per_worker: 1.0,
            gpus_per_worker: 0.0,
            python: String::new(),
            env: BTreeMap::new(),
            max_failures: 0,
            backend: Backend::Auto,
            on_output: Arc::new(|rank, line| {
                // Training goes on when nobody reads any more, as under `| head`.
                let _ = if line.is_stderr {
                    writeln!(std::io::stderr(), "[rank {rank}] {}", line.text)
                } else {
                    writeln!(std::io::stdout(), "[rank {rank}] {}", line.text)
                };
            }),
        };
        TorchTrainer { plan, python: None }
    }

    /// Runs `python script args…` on every rank.
    pub fn script(path: impl Into<PathBuf>) -> Self {
        Self::new(Target::Script(path.into()))
    }

    /// Runs `python -m name args…` on every rank.
    ///
    /// ```
    /// let trainer = wingbeat_train::TorchTrainer::module("package.train").workers(2);
    /// ```
    pub fn module(name: &str) -> Self {
        Self::new(Target::Module(name.to_owned()))
    }

    /// Arguments of the script.
    pub fn args<S: Into<String>>(mut self, args: impl IntoIterator<Item = S>) -> Self {
        self.plan.args = args.into_iter().map(Into::into).collect();
        self
    }

    /// Number of ranks; 1 if nothing is said.
    pub fn workers(mut self, workers: u32) -> Self {
        self.plan.workers = workers;
        self
    }

    /// CPUs of each rank; 1 if nothing is said.
    pub fn cpus_per_worker(mut self, cpus: f64) -> Self {
        self.plan.cpus_per_worker = cpus;
        self
    }

    /// GPUs of each rank; none if nothing is said.
    pub fn gpus_per_worker(mut self, gpus: f64) -> Self {
        self.plan.gpus_per_worker = gpus;
        self
    }

    /// The interpreter; else `WINGBEAT_PYTHON`, `.venv/bin/python` of the working directory, or `python3`.
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

    /// What carries tensors between ranks.
    pub fn backend(mut self, backend: Backend) -> Self {
        self.plan.backend = backend;
        self
    }

    /// What to do with a line that a rank printed, instead of printing it with its rank.
    pub fn on_output(mut self, show: impl Fn(u32, &Line) + Send + Sync + 'static) -> Self {
        self.plan.on_output = Arc::new(show);
        self
    }

    /// Runs it.
    ///
    /// # Errors
    /// The group cannot be placed, a node lacks the script or the interpreter, or a rank failed more often than allowed.
    pub async fn fit(mut self) -> Result<TrainResult, TrainError> {
        if self.plan.workers == 0 {
            return Err(TrainError::Invalid("a training run needs at least one worker".into()));
        }
        self.plan.python = self.python.take().unwrap_or_else(default_python);
        if let Target::Script(script) = &mut self.plan.target {
            // Ranks run in the driver's working directory, or where it does not exist, in another.
            *script = std::path::absolute(&script).unwrap_or_else(|_| script.clone());
        }
        let begun = Instant::now();
        let run_id = format!("wingbeat-{}", std::process::id());
        let mut attempt = 0;
        loop {
            let outcome = self.attempt(attempt, &run_id).await;
            attempt += 1;
            match outcome {
                Ok(()) => {
                    let seconds = begun.elapsed().as_secs_f64();
                    return Ok(TrainResult { ranks: self.plan.workers, attempts: attempt, seconds });
                }
                Err(error @ (TrainError::RankFailed { .. } | TrainError::RankLost { .. } | TrainError::Runtime(_)))
                    if attempt <= self.plan.max_failures =>
                {
                    eprintln!(
                        "wingbeat: attempt {attempt} of {} failed, trying again: {error}",
                        self.plan.max_failures + 1
                    );
                }
                Err(error) => return Err(error),
            }
        }
    }

    async fn attempt(&self, attempt: u32, run_id: &str) -> Result<(), TrainError> {
        let group = Group::place(&self.plan).await?;
        let outcome = match group.check(&self.plan) {
            Ok(()) => group.run(&self.plan, attempt, run_id).await,
            Err(error) => Err(error),
        };
        group.release().await;
        outcome
    }
}

fn default_python() -> String {
    if let Ok(python) = std::env::var(PYTHON_VARIABLE) {
        return python;
    }
    let venv = Path::new(".venv/bin/python");
    if venv.exists() {
        return std::path::absolute(venv).unwrap_or_else(|_| venv.to_owned()).display().to_string();
    }
    "python3".into()
}
