//! Ending a run from outside.

use tokio::sync::watch;

/// Ends a run: its ranks get SIGTERM, and time to save what they have.
///
/// ```no_run
/// # use wingbeat_train::TorchTrainer;
/// # async fn run() -> Result<(), wingbeat_train::TrainError> {
/// let trainer = TorchTrainer::script("train.py");
/// let stopper = trainer.stopper();
/// tokio::spawn(async move {
///     tokio::time::sleep(std::time::Duration::from_secs(3600)).await;
///     stopper.stop();
/// });
/// trainer.fit().await?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Stopper(watch::Sender<bool>);

impl Stopper {
    pub(crate) fn new() -> Stopper {
        Stopper(watch::Sender::new(false))
    }

    /// Ends the run, which then fails with [`TrainError::Stopped`](crate::TrainError::Stopped). No error if it is over.
    pub fn stop(&self) {
        self.0.send_replace(true);
    }

    /// Waits until it is told to stop.
    pub(crate) async fn stopped(&self) {
        // It is never closed while somebody waits for it.
        let _ = self.0.subscribe().wait_for(|stopped| *stopped).await;
    }
}
