//! A run that goes on beside its caller.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use tokio::sync::{oneshot, watch};
use wingbeat::{Error, Session};

use crate::error::TrainError;
use crate::progress::Progress;
use crate::result::TrainResult;
use crate::stopper::Stopper;
use crate::trainer::TorchTrainer;

/// A run that goes on beside its caller, to be watched and stopped. Once it is dropped, the run is stopped.
///
/// ```no_run
/// # use wingbeat_train::{Scaling, TorchTrainer, TrainError};
/// # async fn run() -> Result<(), TrainError> {
/// let mut run = TorchTrainer::script("train.py").scaling(Scaling::workers(2)).start()?;
/// while let Some(progress) = run.changed().await {
///     let loss = progress.ranks.first().and_then(|rank| rank.metrics.get("loss"));
///     println!("attempt {}, {} reports, loss {loss:?}", progress.attempt, progress.reports);
///     if loss.is_some_and(|loss| loss.is_nan()) {
///         run.stop();
///     }
/// }
/// let result = run.result().await?;
/// # drop(result);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
#[must_use = "a run that is dropped is stopped"]
pub struct Run {
    stopper: Stopper,
    progress: watch::Receiver<Progress>,
    result: oneshot::Receiver<std::thread::Result<Result<TrainResult, TrainError>>>,
}

impl Run {
    /// Starts it on a thread of its own, in this thread's session.
    pub(crate) fn begin(mut trainer: TorchTrainer) -> Result<Run, TrainError> {
        const WHAT: &str = "starting a run";
        let io = |error: std::io::Error| TrainError::from(Error::io(WHAT, &error));
        let session = Session::current()?;
        let stopper = trainer.stopper();
        let (told, progress) = watch::channel(Progress::default());
        let tell = trainer.plan.on_progress.clone();
        trainer = trainer.on_progress(move |progress| {
            tell(progress);
            told.send_replace(progress.clone());
        });
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(io)?;
        let (done, result) = oneshot::channel();
        std::thread::Builder::new()
            .name("wingbeat-run".into())
            .spawn(move || {
                let _entered = session.enter();
                // Of one of the user's functions; it goes on where the result is waited for.
                let result = catch_unwind(AssertUnwindSafe(|| runtime.block_on(trainer.fit())));
                // Nobody listens any more if the handle was dropped.
                let _ = done.send(result);
            })
            .map_err(io)?;
        Ok(Run { stopper, progress, result })
    }

    /// How far it is.
    pub fn progress(&self) -> Progress {
        self.progress.borrow().clone()
    }

    /// Waits until it has come further; none once it is over.
    pub async fn changed(&mut self) -> Option<Progress> {
        self.progress.changed().await.ok()?;
        Some(self.progress.borrow_and_update().clone())
    }

    /// Stops it: its ranks get SIGTERM, and time to save what they have. No error if it is over.
    pub fn stop(&self) {
        self.stopper.stop();
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// As [`TorchTrainer::fit`].
    ///
    /// # Panics
    /// If one of the functions that the run was given has.
    pub async fn result(mut self) -> Result<TrainResult, TrainError> {
        match (&mut self.result).await {
            Ok(Ok(result)) => result,
            Ok(Err(panic)) => resume_unwind(panic),
            Err(_) => Err(TrainError::stopped()),
        }
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        self.stopper.stop();
    }
}
