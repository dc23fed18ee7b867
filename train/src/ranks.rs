//! Ranks that are Rust functions.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures::FutureExt;
use serde::de::DeserializeOwned;
use wingbeat::ObjectRef;

use crate::context::{Called, RankContext};
use crate::error::TrainError;
use crate::own_runtime::in_a_runtime;
use crate::plan::{Plan, Program};
use crate::progress::Progress;
use crate::result::TrainResult;
use crate::scaling::Scaling;
use crate::stopper::Stopper;
use crate::storage::CheckpointConfig;
use crate::trainer::TorchTrainer;

/// A function that reports nothing and prints nothing may well work.
const NEVER: Duration = Duration::from_secs(u32::MAX as u64);

/// A group of ranks, each a call of a Rust function, all placed at once or not at all: see [`TorchTrainer::function`].
#[must_use = "nothing runs until `fit()`"]
pub struct Ranks<T> {
    plan: Plan,
    values: Values<T>,
}

/// What functions have returned, by rank.
type Values<T> = Arc<Mutex<BTreeMap<u32, T>>>;

impl<T> fmt::Debug for Ranks<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ranks").field("scaling", &self.plan.scaling).finish_non_exhaustive()
    }
}

/// What Rust functions have returned, and what came of their run.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Returned<T> {
    /// In the order of ranks.
    pub values: Vec<T>,
    /// The rest: metrics, checkpoints, attempts.
    pub result: TrainResult,
}

impl TorchTrainer {
    /// Runs Rust functions as ranks. `start` calls the function of one rank: with the rank's context, and whatever else it takes.
    ///
    /// ```no_run
    /// use std::error::Error;
    ///
    /// use wingbeat_collective::Op;
    /// use wingbeat_train::{BestCheckpoints, CheckpointConfig, RankContext, Scaling, ScoreOrder, TorchTrainer};
    ///
    /// #[wingbeat::remote]
    /// fn train(context: RankContext, rate: f32) -> Result<f32, Box<dyn Error + Send + Sync>> {
    ///     let mut group = context.join()?;
    ///     let (mut first, mut weight) = (0, 1.0_f32);
    ///     if let Some(checkpoint) = context.checkpoint()? {
    ///         let text = std::fs::read_to_string(checkpoint.join("state"))?;
    ///         let (step, saved) = text.split_once(' ').ok_or("no state")?;
    ///         (first, weight) = (step.parse::<u32>()? + 1, saved.parse()?);
    ///     }
    ///     let folder = std::env::temp_dir().join(format!("state-of-rank-{}-{}", context.rank, std::process::id()));
    ///     for step in first..100 {
    ///         let mut gradient = [weight * (1.0 + context.rank as f32)];
    ///         group.all_reduce(&mut gradient, Op::Avg)?;
    ///         weight -= rate * gradient[0];
    ///         // Rank 0 saves for all; a report returns when every rank has made it.
    ///         let is_due = context.rank == 0 && step % 10 == 9;
    ///         if is_due {
    ///             std::fs::create_dir_all(&folder)?;
    ///             std::fs::write(folder.join("state"), format!("{step} {weight}"))?;
    ///         }
    ///         context.report([("loss", f64::from(weight.abs()))], is_due.then_some(folder.as_path()))?;
    ///     }
    ///     Ok(weight)
    /// }
    ///
    /// # async fn run() -> Result<(), wingbeat_train::TrainError> {
    /// wingbeat::init().await?;
    /// let trainer = TorchTrainer::function(|context| train::remote(context, 0.1))
    ///     .scaling(Scaling::workers(4).cpus_per_worker(2.0))
    ///     .storage("/shared/runs/weights")
    ///     .checkpoints(CheckpointConfig::newest(1).best(BestCheckpoints::of("loss", ScoreOrder::Min)))
    ///     .max_failures(1)
    ///     .on_progress(|progress| println!("{} reports", progress.reports));
    /// let returned = trainer.fit().await?;
    /// assert!(returned.values.iter().all(|weight| *weight == returned.values[0]));
    /// println!("the best of {} attempts: {:?}", returned.result.attempts, returned.result.best_checkpoint);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// The call runs in the rank's place and holds what [`Ranks::scaling`] says of each rank. What the function's attribute says of that
    /// gives way; what the call itself says, as with `train::options().num_cpus(1.0).remote(context)`, counts. The same holds for other
    /// remote functions that `start` calls: they run in the rank's place, too, so that one which goes on holds what the rank needs. What else a
    /// rank is to be given is made before. Where the call itself says to be placed does not count. Custom resources and labels that an
    /// attribute asks for are to be in [`Scaling`], too. A call is never made again by itself, whatever its options say: see
    /// [`Ranks::max_failures`].
    pub fn function<T, F>(start: F) -> Ranks<T>
    where
        T: DeserializeOwned + Send + 'static,
        F: Fn(RankContext) -> ObjectRef<T> + Send + Sync + 'static,
    {
        let values = Values::default();
        let kept = values.clone();
        let make = move |context: RankContext| {
            let (rank, values) = (context.rank, kept.clone());
            let value = start(context);
            let call = value.any();
            let ended = async move {
                let value = value.get().await?;
                values.lock().unwrap_or_else(PoisonError::into_inner).insert(rank, value);
                Ok(())
            };
            Called { call, ended: ended.boxed() }
        };
        let plan = Plan { hang_timeout: NEVER, ..Plan::new(Program::Call(Arc::new(make))) };
        Ranks { plan, values }
    }
}

impl<T> Ranks<T> {
    /// How many ranks there are, and what each holds; one with a CPU, if nothing is said.
    pub fn scaling(mut self, scaling: Scaling) -> Self {
        self.plan.scaling = scaling;
        self
    }

    /// How often the group may be started again after a failure, of a function or of what it runs on; never if nothing is said. It goes on
    /// from its newest checkpoint, where [`RankContext::checkpoint`] is read.
    pub fn max_failures(mut self, failures: u32) -> Self {
        self.plan.max_failures = failures;
        self
    }

    /// Whether an error that the function returns, or its panic, is a failure to start again after, as a crash or a lost node is; it is if
    /// nothing is said.
    pub fn retry_errors(mut self, retry: bool) -> Self {
        self.plan.retry_exceptions = retry;
        self
    }

    /// As [`TorchTrainer::storage`].
    pub fn storage(mut self, url: &str) -> Self {
        self.plan.storage = Some(url.to_owned());
        self
    }

    /// As [`TorchTrainer::checkpoints`].
    pub fn checkpoints(mut self, config: CheckpointConfig) -> Self {
        self.plan.keep = config;
        self
    }

    /// As [`TorchTrainer::run_id`]: who uses the storage.
    pub fn run_id(mut self, id: &str) -> Self {
        self.plan.run_id = Some(id.to_owned());
        self
    }

    /// How long functions that look at [`RankContext::should_stop`] have to save what they have, when the run is stopped or moved, or
    /// another rank has failed; 30 s if nothing is said.
    pub fn grace(mut self, grace: Duration) -> Self {
        self.plan.grace = grace;
        self
    }

    /// As [`TorchTrainer::wait_for_room`].
    pub fn wait_for_room(mut self, limit: Duration) -> Self {
        self.plan.wait_for_room = Some(limit);
        self
    }

    /// As [`TorchTrainer::on_notice`].
    pub fn on_notice(mut self, show: impl Fn(&str) + Send + Sync + 'static) -> Self {
        self.plan.on_notice = Arc::new(show);
        self
    }

    /// As [`TorchTrainer::on_progress`].
    pub fn on_progress(mut self, tell: impl Fn(&Progress) + Send + Sync + 'static) -> Self {
        self.plan.on_progress = Arc::new(tell);
        self
    }

    /// A way to end the run from elsewhere. `fit()` is then [`TrainError::Stopped`], with how far the run had come.
    pub fn stopper(&self) -> Stopper {
        self.plan.stopper.clone()
    }

    /// Runs it to its end, and gives what the functions returned. The first that fails ends the others. When a node is drained, all
    /// start again elsewhere, with the next checkpoint or when the drain's time is over, and that is no failure; that the node goes before is one. If this
    /// is dropped, the calls are ended.
    ///
    /// # Errors
    /// The group cannot be placed, the storage cannot be used, a rank failed more often than allowed, or the run was stopped.
    pub async fn fit(self) -> Result<Returned<T>, TrainError> {
        self.plan.check()?;
        let result = in_a_runtime(self.plan.fit()).await??;
        let values = std::mem::take(&mut *self.values.lock().unwrap_or_else(PoisonError::into_inner));
        // An earlier attempt may have had more ranks.
        Ok(Returned { values: values.into_values().take(result.ranks as usize).collect(), result })
    }
}
