//! Hands what ranks print to whoever shows it, on a thread of its own: a terminal that nobody reads must not keep the run
//! from hearing that it is to stop.

use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};

use crate::output::RankOutput;
use crate::process::Printed;
use crate::stopper::Stopper;

/// Parts that wait to be shown: with those on their way, what ranks may be ahead.
const WAITING: usize = 16;
/// How long what ranks printed last is waited for once the run was stopped: nobody may be reading.
const STOP_LIMIT: Duration = Duration::from_secs(2);

/// What happens.
pub(crate) enum Message {
    Begun(u32),
    Printed(u32, Printed),
    Paused,
    /// With what it wrote into torchelastic's error file.
    Ended(u32, Option<String>),
}

/// The thread, and the way to it.
pub(crate) struct Printer {
    queue: mpsc::Sender<Message>,
    done: oneshot::Receiver<()>,
    thread: JoinHandle<()>,
}

/// As a trainer and its clones share it.
pub(crate) type Shared = Arc<Mutex<dyn RankOutput>>;

impl Printer {
    /// # Errors
    /// The process may have no more threads.
    pub(crate) fn start(output: Shared) -> std::io::Result<Printer> {
        let (queue, mut messages) = mpsc::channel(WAITING);
        let (ending, done) = oneshot::channel::<()>();
        let thread = std::thread::Builder::new().name("output".into()).spawn(move || {
            let _ending = ending;
            while let Some(message) = messages.blocking_recv() {
                let mut output = output.lock().unwrap_or_else(PoisonError::into_inner);
                match message {
                    Message::Begun(attempt) => output.begun(attempt),
                    Message::Printed(rank, Printed { is_stderr, bytes }) => output.printed(rank, is_stderr, &bytes),
                    Message::Paused => output.paused(),
                    Message::Ended(rank, error_file) => {
                        output.ended(rank);
                        if let Some(text) = error_file {
                            output.failed(rank, &text);
                        }
                    }
                }
            }
        })?;
        Ok(Printer { queue, done, thread })
    }

    pub(crate) fn queue(&self) -> &mpsc::Sender<Message> {
        &self.queue
    }

    /// Waits until everything is shown; not for long if the run `was_stopped`, or is now. A panic of whoever shows it is
    /// continued here.
    pub(crate) async fn end(self, was_stopped: bool, stopper: &Stopper) {
        drop(self.queue);
        let too_long = async {
            if !was_stopped {
                stopper.stopped().await;
            }
            tokio::time::sleep(STOP_LIMIT).await;
        };
        tokio::select! {
            biased;
            // It is dropped when the thread ends, however that is.
            _ = self.done => {
                if let Err(panic) = self.thread.join() {
                    std::panic::resume_unwind(panic);
                }
            }
            () = too_long => {}
        }
    }
}
