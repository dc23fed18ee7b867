//! An ordered, batching queue of one-way messages to a peer.
//!
//! Whatever queued while the last batch was on its way goes out as the next; nothing ever waits to fill
//! one. Many batches may be in flight at a time, so that a round trip is never waited for.
//!
//! To the peer, a batch is an ordinary tarpc request. On this side there is no future for its answer: the
//! request ids of links have their highest bit set, and the connection tells the link which were answered. So nothing
//! is woken by an answer, and it can be late.

use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::Mutex;
use serde::Serialize;
use tarpc::{ClientMessage, Request};
use tokio::sync::{Notify, watch};

use crate::messages::Weight;
use crate::mux::{self, Connection, HURRY, LINK, REQUEST};
use crate::outbox::{Answers, PushError, Urgency};

/// Batches in flight. Answers may be a millisecond late.
const BATCHES: usize = 64;

/// Messages in a batch.
const BATCH: usize = 512;

/// Ids that one message lists at most: keeps frames far below their limit.
pub const IDS_A_MESSAGE: usize = 4_096;

/// About so many bytes in a batch, unless its first message has more: with [`BATCHES`] it bounds what a peer that takes
/// nothing in must keep, and it keeps frames far below their limit.
const BATCH_BYTES: usize = 1 << 20;

struct Shared<M> {
    state: Mutex<State<M>>,
    wake: Notify,
    acknowledged: watch::Sender<Progress>,
}

struct State<M> {
    queue: VecDeque<M>,
    /// Messages ever queued.
    queued: u64,
    /// After the end of the connection: nothing is queued any more.
    broken: bool,
    /// Whether somebody waits for one of those in the queue to be taken in.
    hurry: bool,
    /// Ids and sizes of the batches that are not answered.
    in_flight: VecDeque<(u64, u64)>,
    next: u64,
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

impl<M: Weight + Send + 'static> Default for Link<M> {
    fn default() -> Self {
        Self::new()
    }
}

impl<M: Weight + Send + 'static> Link<M> {
    /// A link that queues until [`Link::run`] is given a connection.
    pub fn new() -> Self {
        let state = State {
            queue: VecDeque::new(),
            queued: 0,
            broken: false,
            hurry: false,
            in_flight: VecDeque::new(),
            next: 0,
        };
        let shared = Shared { state: Mutex::new(state), wake: Notify::new(), acknowledged: watch::Sender::default() };
        Link { shared: Arc::new(shared) }
    }

    /// Queues a message. Does not wait, and the queue has no bound of its own: callers are bounded by what they have in
    /// flight (leases, calls, live objects), whose bytes they hold anyway. After the link broke the message is dropped.
    pub fn send(&self, message: M) {
        let mut state = self.shared.state.lock();
        let first = state.push(message);
        drop(state);
        if first {
            self.shared.wake.notify_one();
        }
    }

    /// As [`Link::send`], for a message that somebody will wait for with [`Link::flushed`].
    pub fn send_in_a_hurry(&self, message: M) {
        let mut state = self.shared.state.lock();
        state.hurry = true;
        let first = state.push(message);
        drop(state);
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
        let target = self.shared.state.lock().queued;
        let mut progress = self.shared.acknowledged.subscribe();
        match progress.wait_for(|progress| progress.broken || progress.count >= target).await {
            Ok(progress) => progress.count >= target,
            Err(_) => false,
        }
    }

    /// Number of messages that wait to be sent.
    pub fn queued(&self) -> usize {
        self.shared.state.lock().queue.len()
    }

    /// Whether everything queued was taken in.
    pub fn is_idle(&self) -> bool {
        let queued = self.shared.state.lock().queued;
        let progress = *self.shared.acknowledged.borrow();
        progress.broken || progress.count >= queued
    }

    /// Whether its connection has ended: nothing that is queued arrives any more.
    pub fn is_broken(&self) -> bool {
        self.shared.state.lock().broken
    }

    /// Marks the link as broken: waits end, and what is queued is dropped.
    pub fn broke(&self) {
        let mut state = self.shared.state.lock();
        state.broken = true;
        let dropped = std::mem::take(&mut state.queue);
        state.in_flight.clear();
        self.shared.acknowledged.send_modify(|progress| progress.broken = true);
        drop(state);
        drop(dropped);
        self.shared.wake.notify_one();
    }

    /// Sends over `connection`, as the tarpc request that `request` makes of a batch, until the connection ends or
    /// [`Link::broke`] is called. A connection carries one link.
    pub async fn run<R, F>(&self, connection: &Connection, request: F)
    where
        R: Serialize,
        F: Fn(Vec<M>) -> R,
    {
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
                let Some((id, batch)) = self.next_batch() else {
                    self.shared.wake.notified().await;
                    continue;
                };
                let request = Request { context: mux::no_deadline(), id, message: request(batch) };
                match outbox.push(REQUEST, &ClientMessage::Request(request), Urgency::Soon) {
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
        self.broke();
    }

    /// What goes next, if there is something and it may be sent.
    fn next_batch(&self) -> Option<(u64, Vec<M>)> {
        let mut state = self.shared.state.lock();
        if state.queue.is_empty() || state.in_flight.len() >= BATCHES {
            return None;
        }
        let mut bytes = 0;
        let fits = |message: &&M| {
            bytes += message.weight();
            bytes <= BATCH_BYTES
        };
        let count = state.queue.iter().take(BATCH).take_while(fits).count().max(1);
        let batch: Vec<M> = state.queue.drain(..count).collect();
        let mut id = LINK | state.next;
        if state.hurry {
            id |= HURRY;
            state.hurry = !state.queue.is_empty();
        }
        state.next += 1;
        state.in_flight.push_back((id, count as u64));
        Some((id, batch))
    }
}

impl<M> State<M> {
    /// Whether it is the first in the queue.
    fn push(&mut self, message: M) -> bool {
        // What was dropped counts as queued: whoever waits for it learns that it was not taken in.
        self.queued += 1;
        if self.broken {
            return false;
        }
        self.queue.push_back(message);
        self.queue.len() == 1
    }
}

impl<M: Send> Answers for Shared<M> {
    fn answered(&self, id: u64, taken_in: bool) {
        let mut state = self.state.lock();
        let full = state.in_flight.len() >= BATCHES;
        let Some(at) = state.in_flight.iter().position(|(sent, _)| *sent == id) else { return };
        let Some((_, count)) = state.in_flight.remove(at) else { return };
        self.acknowledged.send_modify(|progress| {
            progress.count += count;
            progress.broken |= !taken_in;
        });
        drop(state);
        if full || !taken_in {
            self.wake.notify_one();
        }
    }
}
