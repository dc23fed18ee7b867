//! What is done on a thread of its own, because it may take long: to write where nobody reads.

use std::sync::mpsc::{SyncSender, sync_channel};
use std::time::Duration;

/// What may wait; more is left out.
const WAITING: usize = 256;
/// How long the end waits for what was to be done.
const END_LIMIT: Duration = Duration::from_secs(1);

enum Message<T> {
    Do(T),
    End(SyncSender<()>),
}

/// The way to such a thread.
pub(crate) struct Aside<T>(SyncSender<Message<T>>);

impl<T> Clone for Aside<T> {
    fn clone(&self) -> Self {
        Aside(self.0.clone())
    }
}

impl<T: Send + 'static> Aside<T> {
    /// # Errors
    /// The process may have no more threads.
    pub(crate) fn start(mut work: impl FnMut(T) + Send + 'static) -> std::io::Result<Aside<T>> {
        let (queue, told) = sync_channel(WAITING);
        std::thread::Builder::new().name("aside".into()).spawn(move || {
            for told in told {
                match told {
                    Message::Do(what) => work(what),
                    Message::End(done) => drop(done.try_send(())),
                }
            }
        })?;
        Ok(Aside(queue))
    }

    /// Has something done; never waits.
    pub(crate) fn tell(&self, what: T) {
        let _ = self.0.try_send(Message::Do(what));
    }

    /// Waits until all is done, but not for ever.
    pub(crate) fn end(&self) {
        let (done, ended) = sync_channel(1);
        if self.0.try_send(Message::End(done)).is_ok() {
            let _ = ended.recv_timeout(END_LIMIT);
        }
    }
}
