//! What becomes of a task when an attempt at it has ended: done, failed, tried again now or after a pause, or whatever user code says.

use std::sync::Arc;

use wingbeat_core::TaskId;
use wingbeat_core::error::Error;

use super::{Action, Dispatch, Task};
use crate::owner::retrying::{RetryOn, Verdict, one_less, pause_ms};

/// What became of a result.
pub(crate) enum Settled {
    /// The task is done, with this result.
    Done(Task),
    /// It will be tried again.
    Retried,
    /// User code says whether it is: [`Dispatch::decided`].
    Asks(RetryOn),
    /// Nobody waits for it: a result of an attempt that was given up.
    Unknown,
}

/// What became of the last attempt at a task that is tried again.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum After {
    /// It was never begun.
    Nothing,
    /// It was begun, and moved to another node: it costs no retry.
    Move,
    /// It was ended for that, and has paid with a retry of those for that.
    MemoryShortage,
    Failure,
}

impl Task {
    /// Whether it may not begin a second time, whatever becomes of the first.
    pub(super) fn runs_at_most_once(&self) -> bool {
        self.retries == 0 && self.spec.attempt == 0
    }

    /// It has failed with this, and is not tried again: the error says how often it was.
    pub(crate) fn gives_up(&self, error: Error) -> Error {
        error.after_attempts(&self.name, self.spec.attempt.saturating_add(1))
    }

    /// It is tried again after this.
    pub(super) fn costs(&mut self, after: After) {
        if after != After::Nothing {
            let spec = Arc::make_mut(&mut self.spec);
            spec.attempt = spec.attempt.saturating_add(1);
            spec.yields_memory = self.memory_retries.has_any();
            // What has ended its process may have been what that has run for it: now each has its own, and the cause is known.
            spec.shares_process &= after == After::Move;
        }
        if after == After::Failure {
            self.retries = one_less(self.retries);
        }
        if let Some(remaking) = &self.remaking {
            remaking.goes_on(self.spec.attempt, self.retries);
        }
    }
}

impl Dispatch {
    /// An attempt has ended: what becomes of the task.
    pub(super) fn settled(&mut self, task: Task, failed: Option<&Error>, now_ms: u64) -> Settled {
        match failed {
            Some(error) if Self::has_retries(&task, error) && self.can_retry(&task) => match verdict(&task, error) {
                Verdict::Retry => {
                    self.failed(task, error.clone(), now_ms);
                    Settled::Retried
                }
                Verdict::Fail => Settled::Done(task),
                Verdict::Ask => {
                    let asks = Settled::Asks(task.retry_on.clone());
                    self.undecided.insert(task.spec.id, task);
                    asks
                }
            },
            _ => Settled::Done(task),
        }
    }

    /// User code has said whether a task that has failed is tried again. It is none if it was cancelled meanwhile.
    pub(crate) fn decided(&mut self, id: TaskId, again: bool, error: Error, now_ms: u64, out: &mut Vec<Action>) {
        match self.undecided.remove(&id) {
            Some(task) if again => self.failed(task, error, now_ms),
            Some(task) => out.push(Action::Fail { task, error }),
            None => {}
        }
    }

    pub(super) fn can_retry(&self, task: &Task) -> bool {
        !task.cancelled && self.session_over.is_none()
    }

    /// Of what has happened to its process.
    pub(super) fn may_retry(&self, task: &Task, error: &Error) -> bool {
        Self::has_retries(task, error) && self.can_retry(task) && matches!(verdict(task, error), Verdict::Retry)
    }

    /// Whether attempts are left of those that such a failure may cost.
    pub(super) fn has_retries(task: &Task, error: &Error) -> bool {
        match error {
            Error::OutOfMemory { .. } => task.memory_retries.has_any(),
            _ => task.retries > 0,
        }
    }

    /// Tries a task again that may be: after a pause, unless it is the first failure and memory was not short.
    pub(super) fn failed(&mut self, mut task: Task, error: Error, now_ms: u64) {
        let pause = match error {
            Error::OutOfMemory { .. } => {
                let pause = task.memory_retries.take();
                task.costs(After::MemoryShortage);
                pause
            }
            _ => {
                let pause = pause_ms(task.failures);
                task.failures = task.failures.saturating_add(1);
                task.costs(After::Failure);
                pause
            }
        };
        match pause {
            0 => self.again(task, After::Nothing),
            pause => self.resting.rests(task, error, pause, now_ms),
        }
    }

    /// Puts a task at the front of its queue.
    pub(super) fn again(&mut self, mut task: Task, after: After) {
        task.costs(after);
        self.queue_of(&task).push_front(task);
    }
}

fn verdict(task: &Task, error: &Error) -> Verdict {
    match error {
        // A lost argument must be there again first; that costs no attempt.
        Error::ObjectLost { .. } => Verdict::Fail,
        error if error.is_system_failure() => Verdict::Retry,
        error => task.retry_on.verdict(error),
    }
}
