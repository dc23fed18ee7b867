//! A tokio runtime for those who have none: a run needs its timers, and who waits for the run may do so with any executor, or with
//! [`wingbeat::block_on`].

use std::pin::Pin;
use std::sync::LazyLock;
use std::task::{Context, Poll};

use tokio::runtime::{Builder, Handle, Runtime};
use wingbeat::Error;

/// Of the whole process. It is never ended: what a run leaves to it, such as a storage that is given back, goes on.
static OWN: LazyLock<std::io::Result<Runtime>> =
    LazyLock::new(|| Builder::new_multi_thread().worker_threads(1).thread_name("wingbeat-run").enable_all().build());

/// Does something within the caller's runtime, or if there is none, within that of the process.
///
/// # Errors
/// The process may have no more threads.
pub(crate) async fn in_a_runtime<T>(work: impl Future<Output = T>) -> Result<T, Error> {
    if Handle::try_current().is_ok() {
        return Ok(work.await);
    }
    let runtime = OWN.as_ref().map_err(|error| Error::io("starting a runtime for a run", error))?;
    Ok(Within { runtime: runtime.handle(), work: Some(Box::pin(work)) }.await)
}

/// Work that is polled and dropped within a runtime.
struct Within<'a, F> {
    runtime: &'a Handle,
    /// None once it was dropped.
    work: Option<Pin<Box<F>>>,
}

impl<F: Future> Future for Within<'_, F> {
    type Output = F::Output;
    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<F::Output> {
        let runtime = self.runtime;
        let _entered = runtime.enter();
        match &mut self.work {
            Some(work) => work.as_mut().poll(context),
            None => Poll::Pending,
        }
    }
}

impl<F> Drop for Within<'_, F> {
    fn drop(&mut self) {
        let runtime = self.runtime;
        let _entered = runtime.enter();
        self.work = None;
    }
}
