//! The execution that the current thread or future belongs to.

use std::borrow::Cow;
use std::cell::RefCell;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use parking_lot::Mutex;
use wingbeat_core::error::Error;
use wingbeat_core::{ActorId, LeaseId, TaskId};
use wingbeat_net::spin::Working;

use crate::session::Session;

thread_local! {
    static CURRENT: RefCell<Option<Arc<Execution>>> = const { RefCell::new(None) };
}

/// One run of a task or an actor call in a worker process.
pub struct Execution {
    /// The task.
    pub task: TaskId,
    /// Its name, for people.
    pub name: Cow<'static, str>,
    /// The actor it runs in, and how many calls that runs at a time.
    pub actor: Option<(ActorId, u32)>,
    /// The lease under which the process works.
    pub lease: Option<LeaseId>,
    /// The session of the process.
    pub session: Session,
    asked: Mutex<Asked>,
}

#[derive(Default)]
struct Asked {
    cancelled: bool,
    /// The wait of this execution can never end.
    deadlock: Option<Error>,
    wakers: Vec<Waker>,
}

impl Asked {
    /// Has `cx` woken at the next change, once however often it is polled.
    fn wake_later(&mut self, cx: &Context<'_>) {
        if !self.wakers.iter().any(|waker| waker.will_wake(cx.waker())) {
            self.wakers.push(cx.waker().clone());
        }
    }
}

impl Execution {
    /// A run that begins now.
    pub fn new(
        task: TaskId,
        name: Cow<'static, str>,
        actor: Option<(ActorId, u32)>,
        lease: Option<LeaseId>,
        session: Session,
    ) -> Arc<Self> {
        Arc::new(Execution { task, name, actor, lease, session, asked: Mutex::default() })
    }

    /// Asks the run to stop.
    pub fn cancel(&self) {
        self.tell(|asked| asked.cancelled = true);
    }

    /// Whether it was asked to stop.
    pub fn is_cancelled(&self) -> bool {
        self.asked.lock().cancelled
    }

    /// Ends its wait with an error.
    pub fn deadlocked(&self, error: Error) {
        self.tell(|asked| asked.deadlock = Some(error));
    }

    fn tell(&self, change: impl FnOnce(&mut Asked)) {
        let mut asked = self.asked.lock();
        change(&mut asked);
        let wakers = std::mem::take(&mut asked.wakers);
        drop(asked);
        wakers.into_iter().for_each(Waker::wake);
    }

    /// Why the current wait must end, if it must; otherwise `cx` is woken when it must.
    pub(crate) fn poll_interrupted(&self, cx: &mut Context<'_>) -> Poll<Error> {
        let mut asked = self.asked.lock();
        if let Some(error) = asked.deadlock.take() {
            return Poll::Ready(error);
        }
        if asked.cancelled {
            return Poll::Ready(Error::Cancelled { task: self.name.to_string() });
        }
        asked.wake_later(cx);
        Poll::Pending
    }

    /// Runs `body` as part of this execution.
    pub fn run<R>(self: &Arc<Self>, body: impl FnOnce() -> R) -> R {
        let _entered = self.session.enter();
        let _working = Working::begin();
        let outer = CURRENT.replace(Some(self.clone()));
        let restore = Restore(outer);
        let result = body();
        drop(restore);
        result
    }

    /// A future all of whose polls are part of this execution.
    pub fn scope<F: Future>(self: &Arc<Self>, future: F) -> InExecution<F> {
        InExecution { execution: self.clone(), future: Box::pin(future) }
    }
}

struct Restore(Option<Arc<Execution>>);

impl Drop for Restore {
    fn drop(&mut self) {
        CURRENT.set(self.0.take());
    }
}

/// See [`Execution::scope`].
pub struct InExecution<F> {
    execution: Arc<Execution>,
    future: Pin<Box<F>>,
}

impl<F: Future> Future for InExecution<F> {
    type Output = F::Output;
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        let execution = self.execution.clone();
        execution.run(|| self.future.as_mut().poll(cx))
    }
}

pub(crate) fn current() -> Option<Arc<Execution>> {
    CURRENT.with_borrow(Clone::clone)
}

/// Whether the running task was asked to stop. Long computations should look now and then.
pub fn is_cancelled() -> bool {
    current().is_some_and(|execution| execution.is_cancelled())
}

/// Waits until the running task is asked to stop; for ever outside of a task.
pub async fn cancelled() {
    let Some(execution) = current() else { return std::future::pending().await };
    std::future::poll_fn(|cx| {
        let mut asked = execution.asked.lock();
        if asked.cancelled {
            return Poll::Ready(());
        }
        asked.wake_later(cx);
        Poll::Pending
    })
    .await;
}

/// The running task.
pub fn current_task() -> Option<TaskId> {
    current().map(|execution| execution.task)
}

/// The actor that this code runs in.
pub fn current_actor() -> Option<ActorId> {
    current().and_then(|execution| execution.actor.map(|(actor, _)| actor))
}

#[cfg(test)]
mod tests {
    use wingbeat_core::{ClusterId, JobId, ProcessId};
    use wingbeat_net::handshake::{Role, Token};

    use super::*;
    use crate::io::Io;
    use crate::process::{Config, Prepared};

    fn session() -> Session {
        let io = Arc::new(Io::start().unwrap());
        let id = ProcessId::random();
        let config = Config { id, token: Token::new("a token of a test"), role: Role::Worker, listen: None };
        let prepared = io.run(Prepared::bind(config)).unwrap().unwrap();
        prepared.start(&io, JobId::random(), String::new(), ClusterId::random())
    }

    struct Woken;

    impl std::task::Wake for Woken {
        fn wake(self: Arc<Self>) {}
    }

    #[test]
    fn however_often_a_task_is_polled_one_waker_is_kept() {
        let session = session();
        let task = TaskId { owner: ProcessId::random(), seq: 1 };
        let execution = Execution::new(task, "f".into(), None, None, session.clone());
        let mut waiting = std::pin::pin!(execution.scope(cancelled()));
        let waker = Waker::from(Arc::new(Woken));
        let mut cx = Context::from_waker(&waker);
        for _ in 0..10_000 {
            assert!(waiting.as_mut().poll(&mut cx).is_pending());
            assert!(execution.poll_interrupted(&mut cx).is_pending());
        }
        assert_eq!(execution.asked.lock().wakers.len(), 1);
        execution.cancel();
        assert!(waiting.as_mut().poll(&mut cx).is_ready());
        session.process().shut_down("the test is over");
    }
}
