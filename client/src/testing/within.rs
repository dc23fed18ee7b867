//! A future that uses a cluster on whatever thread it runs.

use std::pin::Pin;
use std::task::{Context, Poll};

use wingbeat_process::Session;

/// What [`TestCluster::within`](super::TestCluster::within) returns.
#[must_use = "a future does nothing before it is awaited"]
pub struct Within<F> {
    session: Session,
    future: Pin<Box<F>>,
}

impl<F> Within<F> {
    pub(super) fn new(session: Session, future: F) -> Within<F> {
        Within { session, future: Box::pin(future) }
    }
}

impl<F: Future> Future for Within<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<F::Output> {
        let _entered = self.session.enter();
        self.future.as_mut().poll(context)
    }
}

impl<F> std::fmt::Debug for Within<F> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Within({:?})", self.session)
    }
}
