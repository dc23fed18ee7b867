//! What ranks report and ask, and the answers to that.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc as answer;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::event::{EventfdFlags, PollFd, PollFlags, poll};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use tokio::sync::{mpsc, oneshot};

use super::Event;
use crate::error::ReportError;

/// What a rank reports, and waits for the answer to.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Report {
    /// Which question this is, for its answer.
    pub id: u64,
    pub metrics: BTreeMap<String, f64>,
    /// A directory of its node that is to become part of a checkpoint.
    pub checkpoint: Option<String>,
    /// Whether it waits until the checkpoint is stored.
    pub waits: bool,
    /// Whether it comes from the middle of another of its process: from a signal's handler.
    pub is_nested: bool,
}

/// What a rank is told.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Answer(pub Result<Option<String>, ReportError>);

/// Where answers go to.
#[derive(Clone, Default)]
pub(crate) struct Answers(Arc<AnswersState>);

#[derive(Default)]
struct AnswersState {
    last: AtomicU64,
    waiting: Mutex<BTreeMap<u64, Waiter>>,
}

/// Who waits for an answer.
enum Waiter {
    /// The thread that hears a script.
    Thread(Awaited),
    /// A call of a rank's function.
    Call(oneshot::Sender<Answer>),
}

/// Somebody waits for an answer, and for the end of the connection that it is for.
struct Awaited {
    sender: answer::SyncSender<Answer>,
    /// Ready once there is an answer, or there will be none.
    told: Arc<OwnedFd>,
}

impl Drop for Awaited {
    fn drop(&mut self) {
        // Fails only when it was told very often.
        let _ = rustix::io::write(&*self.told, &1_u64.to_ne_bytes());
    }
}

impl Answers {
    /// Asks with an id of its own for a script, and waits for the answer. None if nobody answers any more, or whoever is at the other end
    /// of `stream` does not wait any more: then that is told.
    pub(super) fn ask(
        &self,
        stream: &UnixStream,
        events: &mpsc::Sender<Event>,
        question: impl FnOnce(u64) -> Event,
    ) -> std::io::Result<Option<Answer>> {
        let told = Arc::new(rustix::event::eventfd(0, EventfdFlags::CLOEXEC)?);
        let (sender, receiver) = answer::sync_channel(1);
        let awaited = Awaited { sender, told: told.clone() };
        let id = self.wait(Waiter::Thread(awaited));
        if events.blocking_send(question(id)).is_err() {
            self.forget(id);
            return Ok(None);
        }
        loop {
            let mut fds = [PollFd::new(&*told, PollFlags::IN), PollFd::new(stream, PollFlags::RDHUP)];
            match poll(&mut fds, None) {
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
                Ok(_) if !fds[0].revents().is_empty() => return Ok(receiver.recv().ok()),
                Ok(_) => {
                    self.forget(id);
                    // Nobody is left who needs to know.
                    let _ = events.blocking_send(Event::Withdrawn(id));
                    return Ok(None);
                }
            }
        }
    }

    /// As `ask`, for a rank's function. None if nobody answers any more.
    pub(crate) async fn ask_for_call(
        &self,
        events: &mpsc::Sender<Event>,
        question: impl FnOnce(u64) -> Event,
    ) -> Option<Answer> {
        let (sender, receiver) = oneshot::channel();
        let id = self.wait(Waiter::Call(sender));
        if events.send(question(id)).await.is_err() {
            self.forget(id);
            return None;
        }
        receiver.await.ok()
    }

    fn wait(&self, waiter: Waiter) -> u64 {
        let id = self.0.last.fetch_add(1, Ordering::Relaxed);
        self.waiting().insert(id, waiter);
        id
    }

    fn forget(&self, id: u64) {
        self.waiting().remove(&id);
    }

    /// Answers a report, unless nobody waits for that any more.
    pub(crate) fn give(&self, id: u64, answer: Answer) {
        let waiter = self.waiting().remove(&id);
        match waiter {
            Some(Waiter::Thread(waiting)) => drop(waiting.sender.send(answer)),
            Some(Waiter::Call(sender)) => drop(sender.send(answer)),
            None => {}
        }
    }

    /// Nobody answers any more.
    pub(crate) fn close(&self) {
        self.waiting().clear();
    }

    fn waiting(&self) -> MutexGuard<'_, BTreeMap<u64, Waiter>> {
        self.0.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
