//! The thread on which everything of a process happens but user code.

use std::future::Future;
use std::time::Instant;

use parking_lot::Mutex;
use wingbeat_core::error::Error;

/// A process's private tokio runtime, on a thread of its own.
pub struct Io {
    handle: tokio::runtime::Handle,
    stop: tokio::sync::watch::Sender<bool>,
    thread: Mutex<Option<std::thread::JoinHandle<()>>>,
    started: Instant,
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
        Ok(Io { handle, stop, thread: Mutex::new(Some(thread)), started: Instant::now() })
    }

    /// The runtime.
    pub fn handle(&self) -> &tokio::runtime::Handle {
        &self.handle
    }

    /// Milliseconds since it was started.
    pub(super) fn now_ms(&self) -> u64 {
        self.started.elapsed().as_millis() as u64
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
