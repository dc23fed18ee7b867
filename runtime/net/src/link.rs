//! An ordered, batching queue of one-way messages to a peer.
//!
//! Whatever queued while the last batch was on its way goes out as the next; nothing ever waits to fill
//! one. A few batches may be in flight at a time, so that a round trip is never waited for.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use futures::future::BoxFuture;
use futures::stream::{FuturesUnordered, StreamExt};
use parking_lot::Mutex;
use tokio::sync::{Notify, watch};

/// Batches in flight: enough to cover a round trip between machines.
const BATCHES: usize = 16;

/// Messages in a batch; keeps frames far below the limit (inline values are at most 100 KiB).
const BATCH: usize = 512;

struct Shared<M> {
    queue: Mutex<VecDeque<M>>,
    wake: Notify,
    queued: AtomicU64,
    acknowledged: watch::Sender<Progress>,
}

#[derive(Clone, Copy, Default)]
struct Progress {
    count: u64,
    broken: bool,
}

/// The sending end. Cheap to clone; the loop ends when the connection does.
pub struct Link<M> {
    shared: Arc<Shared<M>>,
}

impl<M> Clone for Link<M> {
    fn clone(&self) -> Self {
        Link { shared: self.shared.clone() }
    }
}

impl<M: Send + 'static> Default for Link<M> {
    fn default() -> Self {
        Self::new()
    }
}

impl<M: Send + 'static> Link<M> {
    /// A link that queues until [`Link::run`] is given a way to send.
    pub fn new() -> Self {
        Link {
            shared: Arc::new(Shared {
                queue: Mutex::new(VecDeque::new()),
                wake: Notify::new(),
                queued: AtomicU64::new(0),
                acknowledged: watch::Sender::new(Progress::default()),
            }),
        }
    }

    /// Queues a message. Never waits: what bounds the queue is what bounds the callers (leases in flight,
    /// live objects). After the link broke, messages are dropped: whoever cares watches the connection.
    pub fn send(&self, message: M) {
        let mut queue = self.shared.queue.lock();
        queue.push_back(message);
        self.shared.queued.fetch_add(1, Ordering::Relaxed);
        let first = queue.len() == 1;
        drop(queue);
        if first {
            self.shared.wake.notify_one();
        }
    }

    /// Queues several messages, in order.
    pub fn send_all(&self, messages: impl IntoIterator<Item = M>) {
        for message in messages {
            self.send(message);
        }
    }

    /// Waits until the peer has taken in everything that was queued before this call.
    /// False when the link broke first.
    pub async fn flushed(&self) -> bool {
        let target = {
            let _queue = self.shared.queue.lock();
            self.shared.queued.load(Ordering::Relaxed)
        };
        let mut progress = self.shared.acknowledged.subscribe();
        match progress.wait_for(|progress| progress.broken || progress.count >= target).await {
            Ok(progress) => progress.count >= target,
            Err(_) => false,
        }
    }

    /// Number of messages that wait to be sent.
    pub fn queued(&self) -> usize {
        self.shared.queue.lock().len()
    }

    /// Whether everything queued was taken in.
    pub fn is_idle(&self) -> bool {
        let progress = *self.shared.acknowledged.borrow();
        progress.broken || progress.count >= self.shared.queued.load(Ordering::Relaxed)
    }

    /// Marks the link as broken: waits end, and what is queued is dropped.
    pub fn broke(&self) {
        self.shared.queue.lock().clear();
        self.shared.acknowledged.send_modify(|progress| progress.broken = true);
        self.shared.wake.notify_one();
    }

    /// Sends until `send` fails or [`Link::broke`] is called. `send` must put the batch on the wire before it first waits
    /// (tarpc clients do), so that batches leave in order.
    pub async fn run<F, E>(&self, send: F)
    where
        F: Fn(Vec<M>) -> BoxFuture<'static, Result<(), E>>,
    {
        let mut in_flight = FuturesUnordered::new();
        loop {
            if self.shared.acknowledged.borrow().broken {
                return;
            }
            let batch = if in_flight.len() < BATCHES { self.take_batch() } else { Vec::new() };
            if !batch.is_empty() {
                let count = batch.len() as u64;
                let mut sending = send(batch);
                // The first poll hands the batch to the connection; without it, order would be left to chance.
                match futures::poll!(&mut sending) {
                    std::task::Poll::Ready(Ok(())) => self.acknowledge(count),
                    std::task::Poll::Ready(Err(_)) => return self.broke(),
                    std::task::Poll::Pending => {
                        in_flight.push(async move { sending.await.map(|()| count) });
                    }
                }
                continue;
            }
            tokio::select! {
                biased;
                Some(done) = in_flight.next(), if !in_flight.is_empty() => match done {
                    Ok(count) => self.acknowledge(count),
                    Err(_) => return self.broke(),
                },
                () = self.shared.wake.notified(), if in_flight.len() < BATCHES => {}
            }
        }
    }

    fn acknowledge(&self, count: u64) {
        self.shared.acknowledged.send_modify(|progress| progress.count += count);
    }

    fn take_batch(&self) -> Vec<M> {
        let mut queue = self.shared.queue.lock();
        let count = queue.len().min(BATCH);
        queue.drain(..count).collect()
    }
}
