//! The thread on which everything of a process happens but user code, and how other threads wait.

use std::future::Future;
use std::sync::Arc;

use parking_lot::Mutex;
use wingbeat_core::error::Error;
use wingbeat_net::spin::Resting;

/// A process's private tokio runtime, on a thread of its own.
pub struct Io {
    handle: tokio::runtime::Handle,
    stop: tokio::sync::watch::Sender<bool>,
    thread: Mutex<Option<std::thread::JoinHandle<()>>>,
}

impl Io {
    /// Starts the thread.
    ///
    /// # Errors
    /// When the system has no thread or descriptor left.
    pub fn start() -> Result<Io, Error> {
        wingbeat_net::descriptors::raise_limit();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|error| Error::io("starting the IO runtime", &error))?;
        let handle = runtime.handle().clone();
        let (stop, mut stopped) = tokio::sync::watch::channel(false);
        let thread = std::thread::Builder::new()
            .name("wingbeat-io".into())
            .spawn(move || {
                runtime.block_on(async {
                    let _ = stopped.wait_for(|stop| *stop).await;
                });
                // Connections that still have something to write get a moment, and no more.
                runtime.shutdown_timeout(std::time::Duration::from_millis(100));
            })
            .map_err(|error| Error::io("starting the IO thread", &error))?;
        Ok(Io { handle, stop, thread: Mutex::new(Some(thread)) })
    }

    /// The runtime.
    pub fn handle(&self) -> &tokio::runtime::Handle {
        &self.handle
    }

    /// Runs `future` on the IO thread and waits for it, blocking this thread.
    pub fn run<F>(&self, future: F) -> Option<F::Output>
    where
        F: Future + Send + 'static,
        F::Output: Send + 'static,
    {
        let (send, receive) = std::sync::mpsc::sync_channel(1);
        self.handle.spawn(async move {
            let _ = send.send(future.await);
        });
        receive.recv().ok()
    }

    /// Ends the thread and waits for it, unless this is it.
    pub fn stop(&self) {
        let _ = self.stop.send(true);
        let thread = self.thread.lock().take();
        if let Some(thread) = thread
            && thread.thread().id() != std::thread::current().id()
        {
            // A panic there was printed there.
            let _ = thread.join();
        }
    }
}

/// Blocks this thread until `future` is done. Works inside and outside of any tokio runtime. Inside, nothing else of that
/// runtime's thread goes on meanwhile: a `future` that waits for a timer or task of the same thread never ends.
pub fn block_on<F: Future>(future: F) -> F::Output {
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
    loop {
        if let std::task::Poll::Ready(done) = future.as_mut().poll(&mut cx) {
            return done;
        }
        let resting = crate::context::current().map(|_| Resting::begin());
        std::thread::park();
        drop(resting);
    }
}
