//! How one thread goes on with calls that are not done at once, and where user code runs.
//!
//! User code that is not asynchronous runs *outside*: on the bare thread, as in any program, so that it may block and may
//! start runtimes of its own (a tokio runtime refuses to run inside of another). Futures of user code are polled
//! *inside* the thread's runtime. A call changes between the two with [`outside`] and [`inside`]; the thread follows it
//! in [`UnderWay::go_on`].

use std::cell::Cell;
use std::future::Future;
use std::pin::pin;
use std::task::{Context, Poll};

use futures::StreamExt;
use futures::future::LocalBoxFuture;
use futures::stream::FuturesUnordered;
use tokio::runtime::Runtime;

thread_local! {
    /// Whether the thread's runtime is polling.
    static IS_INSIDE: Cell<bool> = const { Cell::new(false) };
    /// Whether a call cannot go on before the thread is outside.
    static WANTS_OUTSIDE: Cell<bool> = const { Cell::new(false) };
}

/// Whether the thread's runtime is polling: what waits now lets the thread go on with something else.
pub(crate) fn is_inside() -> bool {
    IS_INSIDE.get()
}

/// Polls `future` outside only.
pub(crate) async fn polled_outside<F: Future>(future: F) -> F::Output {
    let mut future = pin!(future);
    std::future::poll_fn(|cx| {
        if IS_INSIDE.get() {
            WANTS_OUTSIDE.set(true);
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        future.as_mut().poll(cx)
    })
    .await
}

/// Runs `body` outside; at once if the call is there.
pub(crate) async fn outside<R>(body: impl FnOnce() -> R) -> R {
    polled_outside(async { body() }).await
}

/// Polls `future` inside only.
pub(crate) async fn inside<F: Future>(future: F) -> F::Output {
    let mut future = pin!(future);
    std::future::poll_fn(|cx| {
        if !IS_INSIDE.get() {
            // The thread goes inside before it sleeps.
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        future.as_mut().poll(cx)
    })
    .await
}

/// The calls of a thread that have begun and are not done.
#[derive(Default)]
pub(crate) struct UnderWay<'a> {
    calls: FuturesUnordered<LocalBoxFuture<'a, ()>>,
    /// How many were begun in place of others since they had a turn inside.
    pub begun_since_turn: u32,
    /// Whether the last turn inside ended before something else was looked for.
    is_other_due: bool,
}

impl<'a> UnderWay<'a> {
    pub(crate) fn is_empty(&self) -> bool {
        self.calls.is_empty()
    }

    pub(crate) fn len(&self) -> usize {
        self.calls.len()
    }

    /// More calls, if they are not done at once.
    pub(crate) fn extend(&mut self, calls: impl IntoIterator<Item = LocalBoxFuture<'a, ()>>) {
        self.calls.extend(calls);
    }

    /// Goes on until one of the calls is done, or `other` is ready. Must be called outside.
    pub(crate) fn go_on<T>(
        &mut self,
        runtime: &Runtime,
        mut other: impl FnMut(&mut Context<'_>) -> Poll<T>,
    ) -> Option<T> {
        loop {
            // Whoever is woken from now on is polled again below, and there the runtime is woken. One round ends after
            // two that want to be inside; so many rounds reach everyone.
            for _ in 0..self.calls.len().div_ceil(2) {
                if self.calls.poll_next_unpin(&mut Context::from_waker(std::task::Waker::noop())).is_ready() {
                    return None;
                }
            }
            let mut ended = None;
            let polled = runtime.block_on(std::future::poll_fn(|cx| {
                if let Some(ended) = ended.take() {
                    return Poll::Ready(ended);
                }
                let polled = std::task::ready!(self.poll_inside(cx, &mut other));
                if polled.leaves_none {
                    return Poll::Ready(polled.outcome);
                }
                // A call that yielded, as by `yield_now`, is woken by the runtime at its next turn, and never if there
                // is none.
                ended = Some(polled.outcome);
                cx.waker().wake_by_ref();
                Poll::Pending
            }));
            if let Some(outcome) = polled {
                return outcome;
            }
        }
    }

    /// One turn inside. Ready if the thread has to go outside.
    fn poll_inside<T>(
        &mut self,
        cx: &mut Context<'_>,
        other: &mut impl FnMut(&mut Context<'_>) -> Poll<T>,
    ) -> Poll<Turn<T>> {
        self.begun_since_turn = 0;
        if std::mem::take(&mut self.is_other_due)
            && let Poll::Ready(value) = other(cx)
        {
            return Poll::Ready(Turn { outcome: Some(Some(value)), leaves_none: false });
        }
        IS_INSIDE.set(true);
        let restore = Outside;
        let is_done = self.calls.poll_next_unpin(cx).is_ready();
        drop(restore);
        if is_done {
            return Poll::Ready(Turn { outcome: Some(None), leaves_none: self.calls.is_empty() });
        }
        if WANTS_OUTSIDE.take() {
            // Two that go outside in turn would keep the thread from ever looking.
            self.is_other_due = true;
            return Poll::Ready(Turn { outcome: None, leaves_none: self.calls.len() == 1 });
        }
        other(cx).map(|value| Turn { outcome: Some(Some(value)), leaves_none: false })
    }

    /// Goes on until all are done.
    pub(crate) fn finish(&mut self, runtime: &Runtime) {
        while !self.is_empty() {
            self.go_on(runtime, |_| Poll::<()>::Pending);
        }
    }
}

/// How a turn inside ended.
struct Turn<T> {
    /// What [`UnderWay::go_on`] answers, if it is done.
    outcome: Option<Option<T>>,
    /// Whether there is no call left that waits inside.
    leaves_none: bool,
}

/// The thread is outside again when this is dropped.
struct Outside;

impl Drop for Outside {
    fn drop(&mut self) {
        IS_INSIDE.set(false);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tokio::runtime::{Builder, Handle};

    use super::*;

    fn boxed<'a>(call: impl Future<Output = ()> + 'a) -> Option<LocalBoxFuture<'a, ()>> {
        Some(Box::pin(call))
    }

    fn runtime() -> Runtime {
        Builder::new_current_thread().enable_all().build().unwrap()
    }

    fn runs_another_runtime() -> u32 {
        runtime().block_on(async {
            tokio::time::sleep(std::time::Duration::from_millis(1)).await;
            7
        })
    }

    #[test]
    fn a_call_changes_between_outside_and_inside() {
        let (runtime, done) = (runtime(), Cell::new(0));
        let _entered = runtime.enter();
        let mut calls = UnderWay::default();
        for _ in 0..3 {
            calls.extend(boxed(async {
                for _ in 0..10 {
                    assert_eq!(outside(runs_another_runtime).await, 7);
                    inside(async { tokio::task::spawn(async { tokio::task::yield_now().await }).await.unwrap() }).await;
                }
                done.set(done.get() + 1);
            }));
        }
        calls.finish(&runtime);
        assert_eq!(done.get(), 3);
    }

    #[test]
    fn a_call_that_yields_goes_on_when_others_leave_and_end() {
        let (runtime, ended) = (runtime(), Cell::new(0));
        let (_entered, ended) = (runtime.enter(), &ended);
        let mut calls = UnderWay::default();
        calls.extend(boxed(inside(async {
            while ended.get() < 10 {
                tokio::task::yield_now().await;
            }
        })));
        for turns in 0..10u32 {
            calls.extend(boxed(async move {
                for _ in 0..turns {
                    inside(tokio::task::yield_now()).await;
                    outside(|| ()).await;
                }
                inside(async { ended.set(ended.get() + 1) }).await;
            }));
        }
        calls.finish(&runtime);
        assert_eq!(ended.get(), 10);
    }

    #[test]
    fn a_call_that_yields_goes_on_when_something_else_comes() {
        let runtime = runtime();
        let mut calls = UnderWay::default();
        calls.extend(boxed(inside(tokio::task::yield_now())));
        assert_eq!(calls.go_on(&runtime, |_| Poll::Ready("came")), Some("came"));
        calls.finish(&runtime);
        assert!(calls.is_empty());
    }

    #[test]
    fn outside_a_call_that_waits_is_woken_by_another() {
        let (runtime, mutex) = (runtime(), Arc::new(tokio::sync::Mutex::new(0)));
        let mut calls = UnderWay::default();
        for _ in 0..4 {
            let mutex = mutex.clone();
            calls.extend(boxed(async move {
                let mut state = polled_outside(mutex.lock()).await;
                inside(tokio::task::yield_now()).await;
                *state += outside(runs_another_runtime).await;
            }));
        }
        calls.finish(&runtime);
        assert_eq!(*mutex.try_lock().unwrap(), 28);
    }

    #[test]
    fn something_else_can_come_while_calls_wait() {
        let runtime = runtime();
        let (send, receive) = std::sync::mpsc::channel::<std::task::Waker>();
        let mut calls = UnderWay::default();
        calls.extend(boxed(std::future::pending()));
        let waking = std::thread::spawn(move || receive.recv().unwrap().wake());
        let mut asked = false;
        let came = calls.go_on(&runtime, |cx| {
            if std::mem::replace(&mut asked, true) {
                return Poll::Ready("came");
            }
            send.send(cx.waker().clone()).unwrap();
            Poll::Pending
        });
        waking.join().unwrap();
        assert_eq!((came, calls.len()), (Some("came"), 1));
        assert!(Handle::try_current().is_err());
    }
}
