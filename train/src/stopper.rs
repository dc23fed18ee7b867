//! Ending a run from outside.

use rustix::process::Signal;
use tokio::sync::watch;

/// Ends a run: its ranks get a signal, and time to save what they have.
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
pub struct Stopper(watch::Sender<Option<Signal>>);

impl Stopper {
    pub(crate) fn new() -> Stopper {
        Stopper(watch::Sender::new(None))
    }

    /// Ends the run by SIGTERM. It then fails with [`TrainError::Stopped`](crate::TrainError::Stopped). No error if it is
    /// over.
    pub fn stop(&self) {
        self.stop_with(Signal::TERM.as_raw());
    }

    /// As [`Stopper::stop`], by another signal, as torchrun passes on what it gets itself: with SIGINT, Python raises
    /// `KeyboardInterrupt`. The first signal counts; what is no signal is SIGTERM.
    pub fn stop_with(&self, signal: i32) {
        let signal = Signal::from_named_raw(signal).unwrap_or(Signal::TERM);
        self.0.send_if_modified(|told| match told {
            Some(_) => false,
            None => {
                *told = Some(signal);
                true
            }
        });
    }

    /// By which signal ranks are to end.
    pub(crate) fn signal(&self) -> Signal {
        self.0.borrow().unwrap_or(Signal::TERM)
    }

    /// Waits until it is told to stop.
    pub(crate) async fn stopped(&self) {
        // It is never closed while somebody waits for it.
        let _ = self.0.subscribe().wait_for(Option::is_some).await;
    }
}
