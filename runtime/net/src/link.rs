//! An ordered, batching queue of one-way messages to a peer.
//!
//! Whatever queued while the last batch was on its way goes out as the next; nothing ever waits to fill
//! one. Many batches may be in flight at a time, so that a round trip is never waited for.
//!
//! To the peer, a batch is an ordinary tarpc request. On this side there is no future for its answer: the
//! request ids of links have their highest bit set, and the connection tells the link which were answered. So nothing
//! is woken by an answer, and it can be late.
//!
//! A link may outlive its connections ([`Link::carry`]): batches are numbered and kept until they are answered, and what was
//! not is sent again, under the same numbers, over the next connection. The peer passes over what it has taken in already,
//! so that every message arrives once and in order, over any number of connections.

use std::sync::Arc;

use parking_lot::Mutex;
use serde::Serialize;
use tarpc::{ClientMessage, Request};
use tokio::sync::{Notify, watch};

use crate::messages::Weight;
use crate::moment::{Moment, Ripens};
use crate::mux::{self, Connection, HURRY, LINK, REQUEST};
use crate::outbox::{Answers, PushError, Urgency};
use crate::sequence::{Answered, BATCH, Batch, Sequence, Waits};

/// Ids that one message lists at most: keeps frames far below their limit.
pub const IDS_A_MESSAGE: usize = 4_096;

/// What the clones of a link share. Lives as long as one of them.
struct Shared<M> {
    /// Messages until they are sent, and batches until they are answered.
    sequence: Mutex<Sequence<M>>,
    /// Told when there is something to send.
    wake: Notify,
    /// Held by what carries it: one connection at a time.
    carrier: tokio::sync::Mutex<()>,
    /// How many messages were taken in, and whether the link broke.
    acknowledged: watch::Sender<Progress>,
}

#[derive(Clone, Copy, Default)]
struct Progress {
    count: u64,
    broken: bool,
}

/// The sending end. Cheap to clone.
pub struct Link<M> {
    shared: Arc<Shared<M>>,
}

impl<M> Clone for Link<M> {
    fn clone(&self) -> Self {
        Link { shared: self.shared.clone() }
    }
}

impl<M: Weight + Send + 'static> Default for Link<M> {
    fn default() -> Self {
        Self::new()
    }
}

impl<M: Weight + Send + 'static> Link<M> {
    /// A link that queues until [`Link::run`] is given a connection.
    pub fn new() -> Self {
        let (wake, carrier, acknowledged) = Default::default();
        let shared = Shared { sequence: Mutex::default(), wake, carrier, acknowledged };
        Link { shared: Arc::new(shared) }
    }

    /// Queues a message. Does not wait, and the queue has no bound of its own: callers are bounded by what they have in
    /// flight (leases, calls, live objects), whose bytes they hold anyway. After the link broke the message is dropped.
    pub fn send(&self, message: M) {
        let first = self.shared.sequence.lock().push(message);
        if first {
            self.shared.wake.notify_one();
        }
    }

    /// As [`Link::send`], for a message that somebody will wait for with [`Link::flushed`].
    pub fn send_in_a_hurry(&self, message: M) {
        let mut sequence = self.shared.sequence.lock();
        sequence.hurry();
        let first = sequence.push(message);
        drop(sequence);
        if first {
            self.shared.wake.notify_one();
        }
    }

    /// As [`Link::send`], for a message that may wait a moment for others: of many short ones, several go together.
    pub fn send_with_others(&self, message: M, moment: &Moment) {
        let waits = self.shared.sequence.lock().push_with_others(message);
        match waits {
            Waits::Begins => moment.add(self.shared.clone()),
            Waits::Over => self.shared.wake.notify_one(),
            Waits::Nothing => {}
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
        self.shared.ripen();
        let target = self.shared.sequence.lock().queued();
        let mut progress = self.shared.acknowledged.subscribe();
        match progress.wait_for(|progress| progress.broken || progress.count >= target).await {
            Ok(progress) => progress.count >= target,
            Err(_) => false,
        }
    }

    /// Number of messages that wait to be sent.
    pub fn queued(&self) -> usize {
        self.shared.sequence.lock().waiting()
    }

    /// Whether everything queued was taken in.
    pub fn is_idle(&self) -> bool {
        let queued = self.shared.sequence.lock().queued();
        let progress = *self.shared.acknowledged.borrow();
        progress.broken || progress.count >= queued
    }

    /// Whether its last connection has ended: nothing that is queued arrives any more.
    pub fn is_broken(&self) -> bool {
        self.shared.sequence.lock().is_broken()
    }

    /// Marks the link as broken: waits end, and what is queued is dropped.
    pub fn broke(&self) {
        let mut sequence = self.shared.sequence.lock();
        let dropped = sequence.broke();
        self.shared.acknowledged.send_modify(|progress| progress.broken = true);
        drop(sequence);
        drop(dropped);
        self.shared.wake.notify_one();
    }

    /// The other side was started again, and knows nothing of what was said: what stands for all of that is said next. Of what
    /// was not answered, only what is to be kept is said again; all else counts as taken in.
    pub fn forget(&self, keep: impl Fn(&M) -> bool) {
        let mut sequence = self.shared.sequence.lock();
        let dropped = sequence.forget(keep);
        let said = sequence.queued() - sequence.waiting() as u64;
        self.shared.acknowledged.send_modify(|progress| progress.count = said);
        drop(sequence);
        drop(dropped);
    }

    /// How many messages were taken in.
    pub fn taken_in(&self) -> u64 {
        self.shared.acknowledged.borrow().count
    }

    /// Sends over `connection`, as the tarpc request that `request` makes of a batch, until the connection ends or
    /// [`Link::broke`] is called; the link is broken then. A connection carries one link.
    pub async fn run<R, F>(&self, connection: &Connection, request: F)
    where
        R: Serialize,
        F: Fn(Vec<M>) -> R,
    {
        self.send_over(connection, &|_, batch| request(batch), &|_| Vec::new()).await;
        self.broke();
    }

    /// As [`Link::run`], for a link that goes on over the next connection when this one has ended, and first sends what was
    /// not answered again. Waits while another connection carries it. `request` is told the number of a batch, and `kept`
    /// takes the messages back from a request.
    pub async fn carry<R, F, K>(&self, connection: &Connection, request: F, kept: K)
    where
        R: Serialize,
        F: Fn(u64, Vec<M>) -> R,
        K: Fn(R) -> Vec<M>,
    {
        let _carrier = tokio::select! {
            carrier = self.shared.carrier.lock() => carrier,
            () = connection.closed() => return,
        };
        self.shared.sequence.lock().resume();
        self.send_over(connection, &request, &kept).await;
    }

    async fn send_over<R: Serialize>(
        &self,
        connection: &Connection,
        request: &impl Fn(u64, Vec<M>) -> R,
        kept: &impl Fn(R) -> Vec<M>,
    ) {
        let outbox = connection.outbox().clone();
        outbox.tell(self.shared.clone());
        let sending = async {
            loop {
                if self.shared.acknowledged.borrow().broken {
                    return;
                }
                // A slow peer fills its own queue and nobody else's.
                if std::future::poll_fn(|cx| outbox.poll_room(cx)).await.is_err() {
                    return;
                }
                let next = self.shared.sequence.lock().next_batch(BATCH);
                let Some(Batch { number, is_hurried, messages }) = next else {
                    self.shared.wake.notified().await;
                    continue;
                };
                let id = LINK | number | if is_hurried { HURRY } else { 0 };
                let message = request(number, messages);
                let asked = ClientMessage::Request(Request { context: mux::no_deadline(), id, message });
                let pushed = outbox.push(REQUEST, &asked, Urgency::Soon);
                if let ClientMessage::Request(asked) = asked {
                    let messages = kept(asked.message);
                    if !messages.is_empty() {
                        self.shared.sequence.lock().keep(number, messages);
                    }
                }
                match pushed {
                    Ok(()) => {}
                    Err(PushError::Closed) => return tracing::debug!("a link broke"),
                    Err(PushError::Refused(why)) => {
                        // It can never arrive. The connection is everybody's, and goes on.
                        tracing::error!(%why, "dropped a message that cannot be sent");
                        self.shared.answered(id, true);
                    }
                }
            }
        };
        tokio::select! {
            () = sending => {}
            () = connection.closed() => {}
        }
    }
}

impl<M: Weight + Send> Ripens for Shared<M> {
    fn ripen(&self) {
        let wakes = self.sequence.lock().ripen();
        if wakes {
            self.wake.notify_one();
        }
    }
}

impl<M: Send> Answers for Shared<M> {
    fn answered(&self, id: u64, taken_in: bool) {
        let mut sequence = self.sequence.lock();
        let Some(Answered { count, was_full, messages }) = sequence.answered(id & !(LINK | HURRY)) else { return };
        self.acknowledged.send_modify(|progress| {
            progress.count += count;
            progress.broken |= !taken_in;
        });
        drop(sequence);
        drop(messages);
        if was_full || !taken_in {
            self.wake.notify_one();
        }
    }
}
