//! What the Rust function of a rank asks the rank's actor: it goes to the run as events, as what a script says does.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use futures::Stream;
use tokio::sync::{mpsc, watch};

use crate::error::ReportError;
use crate::process::{Answer, Answers, Event, Report};

/// Questions on the way to the run. A function waits for the answer, so that there are more than one only by its threads.
const QUESTIONS: usize = 16;

/// What is asked, for the run.
struct Heard {
    receiver: mpsc::Receiver<Event>,
    answers: Answers,
}

impl Drop for Heard {
    fn drop(&mut self) {
        // First, so that nothing is asked behind the last that is told so.
        self.receiver.close();
        self.answers.close();
    }
}

pub(crate) struct Questions {
    events: mpsc::Sender<Event>,
    /// Until the run takes it.
    heard: Mutex<Option<mpsc::Receiver<Event>>>,
    has_devices: AtomicBool,
    stopped: watch::Sender<bool>,
}

impl Questions {
    pub(crate) fn new() -> Questions {
        let (events, heard) = mpsc::channel(QUESTIONS);
        Questions {
            events,
            heard: Mutex::new(Some(heard)),
            has_devices: AtomicBool::new(false),
            stopped: watch::Sender::new(false),
        }
    }

    /// All of them, for the first who asks. When that is dropped, nobody is answered any more.
    pub(crate) fn events(&self, answers: &Answers) -> impl Stream<Item = Event> + Send + use<> {
        let receiver = self.heard.lock().unwrap_or_else(PoisonError::into_inner).take();
        let heard = receiver.map(|receiver| Heard { receiver, answers: answers.clone() });
        futures::stream::unfold(heard, |heard| async move {
            let mut heard = heard?;
            let event = heard.receiver.recv().await?;
            Some((event, Some(heard)))
        })
    }

    pub(crate) async fn report(
        &self,
        answers: &Answers,
        metrics: BTreeMap<String, f64>,
        checkpoint: Option<String>,
        gpus: Vec<u32>,
    ) -> Result<(), ReportError> {
        if !self.has_devices.swap(true, Ordering::Relaxed) {
            // Nobody hears it any more if the run is over, and then the report fails, too.
            let _ = self.events.send(Event::Devices(gpus)).await;
        }
        let report = |id| Event::Report(Report { id, metrics, checkpoint, waits: true, is_nested: false });
        self.ask(answers, report).await.map(drop)
    }

    pub(crate) async fn newest(&self, answers: &Answers) -> Result<Option<String>, ReportError> {
        self.ask(answers, Event::Newest).await
    }

    async fn ask(&self, answers: &Answers, question: impl FnOnce(u64) -> Event) -> Result<Option<String>, ReportError> {
        let Answer(answer) = answers.ask_for_call(&self.events, question).await.ok_or(ReportError::Over)?;
        answer
    }

    /// Waits until the function is asked to end.
    pub(crate) async fn stopped(&self) {
        // It is never closed while somebody waits for it.
        let _ = self.stopped.subscribe().wait_for(|stopped| *stopped).await;
    }

    /// Asks the function to end. Whether it hears of it.
    pub(crate) fn stop(&self) -> bool {
        let is_heard = self.stopped.receiver_count() > 0;
        self.stopped.send_replace(true);
        is_heard
    }
}

#[cfg(test)]
mod tests {
    use futures::StreamExt;

    use super::*;

    #[tokio::test]
    async fn who_has_asked_is_told_when_the_run_hears_no_more() {
        for is_taken in [false, true] {
            let (questions, answers) = (Questions::new(), Answers::default());
            let mut events = Box::pin(questions.events(&answers));
            let mut asked = Box::pin(questions.newest(&answers));
            assert!(futures::poll!(&mut asked).is_pending());
            if is_taken {
                assert!(matches!(events.next().await, Some(Event::Newest(_))));
            }
            drop(events);
            assert_eq!(asked.await, Err(ReportError::Over), "taken: {is_taken}");
            assert_eq!(questions.newest(&answers).await, Err(ReportError::Over), "and whoever asks later");
        }
    }
}
