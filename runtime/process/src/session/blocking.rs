//! How threads of users wait.

use std::future::Future;
use std::sync::Arc;

use wingbeat_net::spin::Resting;

use crate::session::beside::Blocks;
use crate::session::context::{self, Execution};
use crate::session::manner::{Polls, is_blocked};
use crate::session::session::Session;

/// Blocks this thread until `future` is done. Works inside and outside of any tokio runtime. Inside, nothing else of that
/// runtime's thread goes on meanwhile: a `future` that waits for a timer or task of the same thread never ends.
pub fn block_on<F: Future>(future: F) -> F::Output {
    /// The execution whose thread goes on when this is dropped, unless it is blocked from outside of it.
    struct Blocked {
        execution: Option<Arc<Execution>>,
        holds_up: Option<Blocks>,
    }
    impl Drop for Blocked {
        fn drop(&mut self) {
            drop(self.holds_up.take());
            if let Some(execution) = self.execution.take().filter(|_| !is_blocked()) {
                execution.thread_is_blocked(false);
            }
        }
    }
    struct Unpark(std::thread::Thread);
    impl std::task::Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Arc::new(Unpark(std::thread::current())).into();
    let mut cx = std::task::Context::from_waker(&waker);
    // Inside of a runtime, tokio gives a task a budget of 128 steps, and then has it yield. Nothing renews the budget while
    // this thread blocks, so that the 129th wait would never end.
    let mut future = std::pin::pin!(tokio::task::coop::unconstrained(future));
    let mut blocked = Blocked { execution: context::current(), holds_up: None };
    loop {
        let polls = Polls::blocking();
        let polled = future.as_mut().poll(&mut cx);
        drop(polls);
        if let std::task::Poll::Ready(done) = polled {
            return done;
        }
        if let Blocked { execution: Some(execution), holds_up } = &mut blocked {
            execution.thread_is_blocked(true);
            if holds_up.is_none() {
                *holds_up = Blocks::begin(execution);
            }
        }
        let resting = blocked.execution.is_some().then(Resting::begin);
        std::thread::park();
        drop(resting);
    }
}

impl Session {
    /// Blocks this thread until `future` is done. Works inside and outside of any tokio runtime.
    pub fn block_on<F: Future>(&self, future: F) -> F::Output {
        block_on(future)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_on_which_a_wait_has_panicked_is_not_blocked() {
        let panics = || block_on(async { panic!("as in somebody's Deserialize") });
        assert!(std::panic::catch_unwind(panics).is_err());
        assert!(!is_blocked());
    }
}
