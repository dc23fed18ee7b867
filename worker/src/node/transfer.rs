//! Object bytes between nodes: raw, in one piece, from shared memory to shared memory.
//!
//! ```text
//! reader → holder   object id (fixed size)
//! holder → reader   WAIT, while the object is read from disk or others are sent;
//!                   then ABSENT, or UNREADABLE and a text, or the length: u64, and the bytes
//! ```
//!
//! Connections are kept for the next transfer, for a while. An idle one occupies no thread at either end (`wire`). A
//! reader has a bounded number of connections to each holder, and both ends make a bounded number of copies at once;
//! what is over waits its turn. Whoever has asked reads at once, and sending waits for nothing but the reader, so two
//! nodes that fetch from each other always go on. Several requests for one object wait for one transfer.
//!
//! What a reader cannot do says nothing about the copy: only a holder that answers ABSENT, or has died, has none. A
//! connection that fails is replaced once; then other holders are asked, and all of them again, until
//! [`Limits::reach`] is over. Then the object is [`Error::ObjectUnavailable`]: it is there, but not for this node.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::FutureExt;
use futures::future::{BoxFuture, Shared};
use parking_lot::Mutex;
use rand::seq::SliceRandom;
use tokio::sync::{Notify, Semaphore, SemaphorePermit, watch};
use wingbeat_core::error::Error;
use wingbeat_core::limits::limit;
use wingbeat_core::value::{StoreNode, Stored};
use wingbeat_core::{NodeId, ObjectId, ProcessId, TaskId};
use wingbeat_net::address::{self, DialError, Stream};
use wingbeat_net::handshake::Purpose;
use wingbeat_net::limits::limits;
use wingbeat_net::mux;
use wingbeat_store::{AlreadyExists, Extent, GetError, Spilled};

use super::Daemon;
use super::objects::{Destination, NoPlace, Present, thread_failed};
use super::wire::{self, Wire};

const ABSENT: u64 = u64::MAX;
const WAIT: u64 = u64::MAX - 1;
/// Followed by the length of a text (u32) and the text.
const UNREADABLE: u64 = u64::MAX - 2;

/// A longer text is not from a holder.
const TEXT: usize = 4096;

/// Connections from this node to another: enough to fill a network with small objects, and few enough that 1,000
/// nodes are not out of descriptors.
const CONNECTIONS: usize = 8;

/// Copies that a node receives at once, and as many that it sends: each may occupy a blocking thread, of which tokio has
/// 512, and spilling and restoring need some.
const COPIES: usize = 64;

/// The first pause before the same holders are asked again, and the longest.
const PAUSES: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(2));

/// After how long what could not be read from the disk is read again.
const AGAIN: Duration = Duration::from_millis(200);

/// How often somebody who creates an object looks whether the old one is gone from its memory.
const GOING_LOOK: Duration = Duration::from_millis(20);

/// What is waited for, and how long. Tests shorten it by the variables of a node's environment that are named here.
struct Limits {
    /// How long the other side of a transfer may send nothing: 10 s (`WINGBEAT_TRANSFER_SILENCE_MS`).
    silence: Duration,
    /// How long a connection may be idle at its reader; twice as long at its holder (`WINGBEAT_TRANSFER_IDLE_MS`).
    idle: Duration,
    /// How long holders that cannot be reached are asked again, if that is set (`WINGBEAT_TRANSFER_REACH_MS`); see [`Limits::reach`].
    reach: Option<Duration>,
    /// How long another writer of the same object is waited for (`WINGBEAT_WRITER_LIMIT_MS`).
    writer: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        let limit = |variable: &str, seconds: u64| limit(variable, Duration::from_secs(seconds));
        Limits {
            silence: limit("WINGBEAT_TRANSFER_SILENCE_MS", 10),
            idle: limit("WINGBEAT_TRANSFER_IDLE_MS", 30),
            reach: Some(limit("WINGBEAT_TRANSFER_REACH_MS", 0)).filter(|limit| !limit.is_zero()),
            writer: limit("WINGBEAT_WRITER_LIMIT_MS", 30),
        }
    }
}

impl Limits {
    /// How long holders that cannot be reached are asked again: half as long again as the head takes to give a node up, which then says
    /// whether they are dead.
    fn reach(&self) -> Duration {
        self.reach.unwrap_or_else(|| limits().lost * 3 / 2)
    }
}

/// A fetch, for all who wait for its object.
#[derive(Clone)]
struct Fetching {
    /// Whom it asks.
    holders: Arc<BTreeSet<NodeId>>,
    done: Shared<BoxFuture<'static, Result<(), Error>>>,
}

/// Transfers under way, and connections between them.
pub(super) struct Transfers {
    limits: Limits,
    under_way: Mutex<BTreeMap<ObjectId, Fetching>>,
    /// By the daemon's process. Entries go when nobody uses them and their connections have been idle for long enough.
    holders: Mutex<BTreeMap<ProcessId, Arc<Holder>>>,
    receiving: Semaphore,
    sending: Semaphore,
    /// Nodes that the head has given up, which is for ever: 8 bytes each.
    dead: watch::Sender<BTreeSet<NodeId>>,
    /// Notified when an object here was sealed or given up, or a reader is done.
    pub(super) settled: Notify,
}

impl Default for Transfers {
    fn default() -> Self {
        Transfers {
            limits: Limits::default(),
            under_way: Mutex::default(),
            holders: Mutex::default(),
            receiving: Semaphore::new(COPIES),
            sending: Semaphore::new(COPIES),
            dead: watch::Sender::default(),
            settled: Notify::new(),
        }
    }
}

/// How long the head's answer about a holder that refuses the dial holds for all who wait for an object from there.
const ANSWER_HOLDS: Duration = Duration::from_secs(1);

/// The connections to one daemon.
struct Holder {
    slots: Semaphore,
    /// Those that nothing is under way on, and since when; the latest last.
    idle: Mutex<Vec<(Arc<Wire>, Instant)>>,
    /// When the head was asked last whether it knows the daemon, and whether it does not. One asks at a time.
    unknown: tokio::sync::Mutex<Option<(Instant, bool)>>,
}

impl Transfers {
    fn holder(&self, process: ProcessId) -> Arc<Holder> {
        let new = || {
            let (idle, unknown) = Default::default();
            Arc::new(Holder { slots: Semaphore::new(CONNECTIONS), idle, unknown })
        };
        self.holders.lock().entry(process).or_insert_with(new).clone()
    }

    /// Closes the connections that have been idle for too long.
    pub(super) fn close_idle(&self) {
        self.close_idle_for(self.limits.idle);
    }

    fn close_idle_for(&self, limit: Duration) {
        self.holders.lock().retain(|_, holder| {
            let mut idle = holder.idle.lock();
            idle.retain(|(_, since)| since.elapsed() < limit);
            // Somebody else holds it while a transfer is under way or waits for a connection.
            !idle.is_empty() || Arc::strong_count(holder) > 1
        });
    }

    /// The head has given a node up: what is expected from it will not come.
    pub(super) fn node_died(&self, node: NodeId) {
        self.dead.send_modify(|dead| {
            dead.insert(node);
        });
    }

    /// Whoever waits for another writer or reader of an object looks again.
    pub(super) fn object_settled(&self) {
        self.settled.notify_waiters();
    }

    /// Waits for the fetch of an object that is under way, or else for one that `begin` makes from `holders`. A fetch that
    /// failed says nothing of holders that it did not ask: whoever has others in its list begins one with that.
    async fn fetched(
        &self,
        object: ObjectId,
        holders: BTreeSet<NodeId>,
        begin: impl Fn() -> BoxFuture<'static, Result<(), Error>>,
    ) -> Result<(), Error> {
        loop {
            let fetching = {
                let mut under_way = self.under_way.lock();
                // One that is over, and still there, has panicked.
                match under_way.get(&object).filter(|fetching| fetching.done.peek().is_none()) {
                    Some(fetching) => fetching.clone(),
                    None => {
                        let fetching = Fetching { holders: Arc::new(holders.clone()), done: begin().shared() };
                        under_way.insert(object, fetching.clone());
                        fetching
                    }
                }
            };
            match fetching.done.await {
                Err(_) if !holders.is_subset(&fetching.holders) => {}
                fetched => return fetched,
            }
        }
    }

    /// Waits until something is done about an object that another process writes or still reads, since when it is waited
    /// for. An error says what that does, when it takes too long.
    pub(super) async fn others_settle(
        &self,
        state: AlreadyExists,
        since: Instant,
        settled: impl Future<Output = ()>,
    ) -> Result<(), String> {
        let limit = self.limits.writer;
        let left = limit.saturating_sub(since.elapsed());
        // Nobody says that it has come to or from the disk. At the end of the limit it is looked at once more.
        let look = if state == AlreadyExists::Deleting { left.min(GOING_LOOK) } else { left };
        let _ = tokio::time::timeout(look, settled).await;
        if !left.is_zero() {
            return Ok(());
        }
        let doing = match state {
            AlreadyExists::Different | AlreadyExists::Deleting => "reading another value of it",
            _ => "writing it",
        };
        Err(format!("another process has been {doing} for {limit:?}"))
    }

    async fn until_dead(&self, node: NodeId) {
        let mut dead = self.dead.subscribe();
        // The sender lives as long as this.
        let _ = dead.wait_for(|dead| dead.contains(&node)).await;
    }
}

/// Where a copy that is here now has come from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Fetched {
    /// It was fetched.
    Copied,
    /// It was here already, or somebody else has made it meanwhile.
    Found,
}

/// Why an object did not come from a holder.
enum Failure {
    /// The holder has no copy, or has died.
    Absent(String),
    /// There is no place for it here: another holder would not help.
    Place(NoPlace),
    /// It could not be asked, or could not send it.
    Unreached(String),
    /// Nobody listens where it did, or another daemon does.
    Refused(String),
}

impl From<std::io::Error> for Failure {
    fn from(error: std::io::Error) -> Self {
        Failure::Unreached(error.to_string())
    }
}

fn encode(id: ObjectId) -> [u8; 20] {
    let mut bytes = [0; 20];
    bytes[..8].copy_from_slice(&id.task.owner.0.to_le_bytes());
    bytes[8..16].copy_from_slice(&id.task.seq.to_le_bytes());
    bytes[16..].copy_from_slice(&id.index.to_le_bytes());
    bytes
}

fn decode(bytes: [u8; 20]) -> ObjectId {
    let number = |at: usize| {
        let mut eight = [0; 8];
        eight.copy_from_slice(&bytes[at..at + 8]);
        u64::from_le_bytes(eight)
    };
    let index = u32::from_le_bytes([bytes[16], bytes[17], bytes[18], bytes[19]]);
    ObjectId { task: TaskId { owner: ProcessId(number(0)), seq: number(8) }, index }
}

impl Daemon {
    /// Makes sure that an object can be read here. True when a copy was made.
    pub(super) async fn obtain(self: &Arc<Self>, object: ObjectId, stored: &Stored) -> Result<bool, Error> {
        if self.store.contains(object) {
            return Ok(false);
        }
        let holders = stored.nodes.iter().map(|holder| holder.node).collect();
        self.transfers.fetched(object, holders, || self.begin_to_fetch(object, stored.clone())).await.map(|()| true)
    }

    /// A task of its own: it ends, and in bounded time, also when nobody waits for it any more.
    fn begin_to_fetch(self: &Arc<Self>, object: ObjectId, stored: Stored) -> BoxFuture<'static, Result<(), Error>> {
        let daemon = self.clone();
        let fetch = tokio::spawn(async move {
            let result = daemon.fetch_from_any(object, stored).await;
            let fetching = daemon.transfers.under_way.lock().remove(&object);
            let is_awaited = fetching.is_none_or(|fetching| fetching.done.strong_count() != Some(1));
            if !is_awaited && matches!(result, Ok(Fetched::Copied)) {
                // Nobody would tell its owner of this copy. One that others have made is not ours to delete.
                daemon.delete(vec![object]);
            }
            result.map(drop)
        });
        fetch.map(|fetched| fetched.unwrap_or_else(|error| Err(thread_failed("fetching an object", &error)))).boxed()
    }

    async fn fetch_from_any(self: &Arc<Self>, object: ObjectId, stored: Stored) -> Result<Fetched, Error> {
        let mut holders: Vec<StoreNode> =
            stored.nodes.into_iter().filter(|holder| holder.node != self.who.id).collect();
        // Whoever reads the same object begins elsewhere, so that not all ask its maker.
        holders.shuffle(&mut rand::rng());
        let mut absent = Vec::new();
        let mut pause = PAUSES.0;
        let mut failing_since = None;
        let mut wait = self.room.wait(self.who.process, &self.store);
        loop {
            let mut unreached = Vec::new();
            let mut left = Vec::new();
            for holder in holders {
                loop {
                    let settled = self.transfers.settled.notified();
                    match self.fetch_from(object, stored.size, &holder).await {
                        Ok(copy) => {
                            wait.got();
                            return Ok(copy);
                        }
                        // It has no turn while it waits: what others fetch may fit.
                        Err(Failure::Place(NoPlace::NoRoom(lacking))) => {
                            let changed = wait.until_changed(&lacking, settled).await;
                            changed.map_err(|why| self.store_full(object, why))?;
                            failing_since = None;
                            continue;
                        }
                        Err(Failure::Place(NoPlace::Failed(error))) => return Err(error),
                        Err(Failure::Absent(why)) => absent.push(format!("{}: {why}", holder.node)),
                        Err(Failure::Unreached(why) | Failure::Refused(why)) => {
                            tracing::info!(%object, node = %holder.node, why, "cannot fetch an object");
                            unreached.push(format!("{}: {why}", holder.node));
                            left.push(holder);
                        }
                    }
                    break;
                }
            }
            if left.is_empty() {
                let why = match absent.is_empty() {
                    true => "no node has a copy of it".to_owned(),
                    false => format!("none of its holders has a copy any more ({})", absent.join("; ")),
                };
                return Err(Error::ObjectLost { object, why });
            }
            let since = *failing_since.get_or_insert_with(Instant::now);
            if since.elapsed() + pause > self.transfers.limits.reach() {
                let why = format!("{} cannot fetch it ({})", self.who.id, unreached.join("; "));
                return Err(Error::ObjectUnavailable { object, why });
            }
            // The head may find out meanwhile that a holder has died.
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(PAUSES.1);
            holders = left;
        }
    }

    async fn fetch_from(self: &Arc<Self>, object: ObjectId, size: u64, holder: &StoreNode) -> Result<Fetched, Failure> {
        let connections = self.transfers.holder(holder.address.process);
        let fetched = self.fetch_through(&connections, object, size, holder).await;
        let Err(Failure::Refused(_)) = fetched else { return fetched };
        // Of one that had died before this node joined, or while the head was away, the head has told nobody here.
        match self.unless_dead(holder.node, self.is_unknown_to_the_head(&connections, holder.node)).await? {
            true => Err(Failure::Absent("the node is gone".into())),
            false => fetched,
        }
    }

    async fn fetch_through(
        self: &Arc<Self>,
        connections: &Holder,
        object: ObjectId,
        size: u64,
        holder: &StoreNode,
    ) -> Result<Fetched, Failure> {
        let (node, limit) = (holder.node, self.transfers.limits.silence);
        let _slot = self.unless_dead(node, slot_of(&connections.slots)).await??;
        let _copy = self.unless_dead(node, slot_of(&self.transfers.receiving)).await??;
        let idle = std::iter::from_fn(|| connections.idle.lock().pop()).find(|(wire, _)| !wire.is_stale());
        if let Some((wire, _)) = idle {
            match self.fetch_over(object, size, node, &wire).await {
                Ok(copy) => {
                    connections.idle.lock().push((wire, Instant::now()));
                    return Ok(copy);
                }
                Err(full @ Failure::Place(_)) => {
                    connections.idle.lock().push((wire, Instant::now()));
                    return Err(full);
                }
                // It may have been broken for as long as it was idle, and the others with it.
                Err(Failure::Unreached(why)) => {
                    tracing::debug!(%node, why, "an idle bulk connection was broken");
                    connections.idle.lock().clear();
                }
                Err(other) => return Err(other),
            }
        }
        let hello = self.hello(Purpose::Bulk);
        let dialled = address::dial_known(&holder.address, "a node that holds an object", &self.who.token, hello);
        let stream = match self.unless_dead(node, dialled).await? {
            Ok(stream) => stream,
            Err(error) => {
                // Perhaps descriptors are short.
                self.transfers.close_idle_for(Duration::ZERO);
                return Err(match error {
                    DialError::Gone(error) => Failure::Refused(error.to_string()),
                    DialError::Failed(error) => Failure::Unreached(error.to_string()),
                });
            }
        };
        let wire = Wire::new(stream, limit)?;
        let fetched = self.fetch_over(object, size, node, &wire).await;
        if matches!(fetched, Ok(_) | Err(Failure::Place(_))) {
            connections.idle.lock().push((wire, Instant::now()));
        }
        fetched
    }

    /// Whether the head says that a node is no part of the cluster. One that may not lead does not say it.
    async fn is_unknown_to_the_head(&self, holder: &Holder, node: NodeId) -> bool {
        let mut unknown = holder.unknown.lock().await;
        if let Some((asked, is_unknown)) = *unknown
            && asked.elapsed() < ANSWER_HOLDS
        {
            return is_unknown;
        }
        let Some(head) = self.head.client() else { return false };
        let answer = head.knows_node(mux::within(self.transfers.limits.silence), node).await;
        let is_unknown = matches!(answer, Ok(Some(false)));
        *unknown = Some((Instant::now(), is_unknown));
        is_unknown
    }

    /// What cannot be left undone halfway does not belong here.
    async fn unless_dead<T>(&self, node: NodeId, work: impl Future<Output = T>) -> Result<T, Failure> {
        tokio::select! {
            biased;
            () = self.transfers.until_dead(node) => Err(Failure::Absent("the node has died".into())),
            done = work => Ok(done),
        }
    }

    async fn fetch_over(
        self: &Arc<Self>,
        object: ObjectId,
        size: u64,
        node: NodeId,
        wire: &Arc<Wire>,
    ) -> Result<Fetched, Failure> {
        // The place first: what was asked for is then read without a pause, and the holder need not wait.
        let place = self.create_if_there_is_room(object, size, self.who.process, Present::Same).await;
        let destination = place.map_err(Failure::Place)?;
        let Destination::Free(extent) = destination else { return Ok(Fetched::Found) };
        let filled = match self.unless_dead(node, ask(object, size, wire)).await {
            Ok(Ok(())) => self.fill(extent, node, wire).await,
            Ok(Err(failure)) | Err(failure) => Err(failure),
        };
        let settled = match &filled {
            Ok(()) => self.store.seal(object, self.who.process),
            Err(_) => self.store.abort(object, self.who.process),
        };
        self.object_settled();
        settled.map_err(|error| Failure::Unreached(error.to_string())).and(filled).map(|()| Fetched::Copied)
    }

    async fn fill(&self, extent: Extent, node: NodeId, wire: &Arc<Wire>) -> Result<(), Failure> {
        // SAFETY: the store gave the extent to this daemon for this transfer, which seals or aborts it only after `received`
        // has given the region back.
        let region = unsafe { self.store.write_region(extent) }.map_err(std::io::Error::other)?;
        let mut received = std::pin::pin!(wire::receive_all(wire, region));
        tokio::select! {
            done = &mut received => Ok(done?),
            () = self.transfers.until_dead(node) => {
                wire.cut();
                // The last bytes may have been there already.
                received.await.map_err(|_| Failure::Absent("the node has died".into()))
            }
        }
    }

    /// Serves one bulk connection until the reader closes it, or has asked for nothing for a while.
    pub(super) async fn serve_bulk(self: Arc<Self>, stream: Stream) {
        let limits = &self.transfers.limits;
        let Ok(wire) = Wire::new(stream, limits.silence) else { return };
        // Both are over when either is: a transfer that ends in an error leaves nothing that could be gone on with.
        let served = async {
            let mut asked = [0; 20];
            while wire.receive(&mut asked, limits.idle * 2).await.is_ok() {
                if let Err(error) = self.send_object(decode(asked), &wire).await {
                    tracing::debug!(%error, "a bulk connection ended in mid-transfer");
                    return;
                }
            }
        };
        self.until_ended(served).await;
        wire.cut();
    }

    async fn send_object(self: &Arc<Self>, object: ObjectId, wire: &Arc<Wire>) -> std::io::Result<()> {
        let mut found = std::pin::pin!(async {
            let copy = slot_of(&self.transfers.sending).await.ok();
            (self.pin(object, self.who.process).await, copy)
        });
        let mut waits = Ok(());
        let (pinned, _copy) = loop {
            tokio::select! {
                biased;
                found = &mut found => break found,
                () = tokio::time::sleep(self.transfers.limits.silence / 4), if waits.is_ok() => {
                    // A pin that is being made must be taken back, also for a reader that is gone.
                    waits = wire.send(&WAIT.to_le_bytes()).await;
                }
            }
        };
        let extent = match pinned {
            Ok(Ok(extent)) => extent,
            Ok(Err(GetError::Absent { .. })) => return wire.send(&ABSENT.to_le_bytes()).await,
            Ok(Err(error @ GetError::Io { .. })) => {
                tracing::warn!(%error, %object, "a copy on disk is lost");
                self.delete(vec![object]);
                return wire.send(&ABSENT.to_le_bytes()).await;
            }
            Ok(Err(error @ (GetError::Full(_) | GetError::OutOfMemory { .. } | GetError::Spill(_)))) => {
                waits?;
                return match self.store.spilled(object) {
                    Some(spilled) => self.send_from_disk(spilled, object, wire).await,
                    None => refuse(wire, &error.to_string()).await,
                };
            }
            Ok(Err(error)) => return refuse(wire, &error.to_string()).await,
            Err(error) => return refuse(wire, &error.to_string()).await,
        };
        let sent = match waits {
            Ok(()) => self.send_region(extent, wire).await,
            Err(error) => Err(error),
        };
        self.store.release(object, self.who.process);
        self.object_settled();
        sent
    }

    /// Sends an object that is on disk and for which there is no room in memory: if two nodes waited for that, each for what the other has,
    /// neither would ever get it.
    async fn send_from_disk(
        self: &Arc<Self>,
        spilled: Spilled,
        object: ObjectId,
        wire: &Arc<Wire>,
    ) -> std::io::Result<()> {
        let (daemon, to) = (self.clone(), wire.clone());
        let sending = self.wait_for_disk("sending a spilled object", move || {
            // Not before the thread is there: from here on the reader waits for bytes.
            let mut sent = to.drain(&spilled.size.to_le_bytes());
            let mut read = daemon.store.read_spilled(spilled, |piece| {
                sent = std::mem::replace(&mut sent, Ok(())).and_then(|()| to.drain(piece));
                sent.is_ok()
            });
            if let Err(Some(error)) = &read
                && error.may_pass()
            {
                tracing::warn!(%error, %object, "it is read again in a moment");
                std::thread::sleep(AGAIN);
                // What can be read is sent when it is asked for again.
                read = daemon.store.read_spilled(spilled, |_| true).and(Err(None));
            }
            (read, sent)
        });
        let (read, sent) = sending.await.map_err(std::io::Error::other)?;
        match read {
            Ok(()) => sent,
            // The reader does not have all, and hears nothing more here.
            Err(None) => Err(std::io::Error::other("it was moved, or not read at once, while it was sent")),
            Err(Some(error)) => {
                tracing::warn!(%error, %object, "a copy on disk is lost");
                self.delete(vec![object]);
                Err(std::io::Error::other(error))
            }
        }
    }

    async fn send_region(&self, extent: Extent, wire: &Arc<Wire>) -> std::io::Result<()> {
        // SAFETY: `send_object` holds a pin, and releases it only after `send_all` has given the region back.
        let region = unsafe { self.store.region(extent) }.map_err(std::io::Error::other)?;
        wire.send(&(region.len() as u64).to_le_bytes()).await?;
        wire::send_all(wire, region).await
    }
}

/// A turn; nobody closes these semaphores.
async fn slot_of(slots: &Semaphore) -> Result<SemaphorePermit<'_>, Failure> {
    slots.acquire().await.map_err(|error| Failure::Unreached(error.to_string()))
}

/// Asks for an object, and waits until its bytes are next.
async fn ask(object: ObjectId, size: u64, wire: &Arc<Wire>) -> Result<(), Failure> {
    wire.send(&encode(object)).await?;
    loop {
        let mut word = [0; 8];
        wire.receive(&mut word, wire.silence()).await?;
        match u64::from_le_bytes(word) {
            WAIT => {}
            ABSENT => return Err(Failure::Absent("it has no copy".into())),
            UNREADABLE => {
                let mut length = [0; 4];
                wire.receive(&mut length, wire.silence()).await?;
                let mut text = vec![0; (u32::from_le_bytes(length) as usize).min(TEXT)];
                wire.receive(&mut text, wire.silence()).await?;
                return Err(Failure::Unreached(String::from_utf8_lossy(&text).into_owned()));
            }
            len if len == size => return Ok(()),
            len => return Err(Failure::Absent(format!("its copy has {len} bytes and not {size}"))),
        }
    }
}

async fn refuse(wire: &Arc<Wire>, why: &str) -> std::io::Result<()> {
    tracing::warn!(why, "cannot send an object");
    let text = &why.as_bytes()[..why.len().min(TEXT)];
    let mut answer = UNREADABLE.to_le_bytes().to_vec();
    answer.extend((text.len() as u32).to_le_bytes());
    answer.extend(text);
    wire.send(&answer).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_object_id_crosses_the_wire_unchanged() {
        let id = TaskId { owner: ProcessId(0x0123_4567_89ab_cdef), seq: 42 }.output(7);
        assert_eq!(decode(encode(id)), id);
    }

    #[tokio::test]
    async fn who_waited_for_a_fetch_that_failed_asks_the_holders_that_it_did_not_ask() {
        let transfers = Transfers::default();
        let object = TaskId { owner: ProcessId(1), seq: 1 }.output(0);
        let (x, y) = (BTreeSet::from([NodeId(1)]), BTreeSet::from([NodeId(2)]));
        let lost = || Error::ObjectLost { object, why: "it is not there".into() };
        let (fails, failing) = tokio::sync::oneshot::channel::<()>();
        let failing = Mutex::new(Some(failing));
        let from_y = || {
            let (failing, lost) = (failing.lock().take().unwrap(), lost());
            async move {
                let _ = failing.await;
                Err(lost)
            }
            .boxed()
        };
        let from_x = || async { Ok(()) }.boxed();
        let never = || panic!("it asks whom another has asked");
        let (first, same, other, ()) = tokio::join!(
            transfers.fetched(object, y.clone(), from_y),
            transfers.fetched(object, y.clone(), never),
            transfers.fetched(object, x, from_x),
            async { drop(fails) },
        );
        assert!(matches!(first, Err(Error::ObjectLost { .. })));
        assert!(matches!(same, Err(Error::ObjectLost { .. })));
        assert!(other.is_ok(), "{other:?}");
    }

    #[tokio::test]
    async fn a_writer_of_an_object_is_waited_for_until_the_limit_and_then_named() {
        let patient = Transfers::default();
        let settled = patient.settled.notified();
        patient.object_settled();
        patient.others_settle(AlreadyExists::Unsealed, Instant::now(), settled).await.unwrap();
        let transfers = Transfers {
            limits: Limits { writer: Duration::from_millis(50), ..Limits::default() },
            ..Transfers::default()
        };
        let begun = Instant::now();
        let why = loop {
            let waited = transfers.others_settle(AlreadyExists::Unsealed, begun, transfers.settled.notified());
            if let Err(why) = waited.await {
                break why;
            }
        };
        assert!(begun.elapsed() >= transfers.limits.writer);
        assert!(why.contains("has been writing it for 50ms"), "{why}");
    }

    async fn answered(answer: &[u8]) -> Result<(), Failure> {
        let (one, other) = tokio::net::UnixStream::pair().unwrap();
        let silence = Duration::from_secs(60);
        let (reader, holder) =
            (Wire::new(Stream::Unix(one), silence).unwrap(), Wire::new(Stream::Unix(other), silence).unwrap());
        let id = TaskId { owner: ProcessId(1), seq: 1 }.output(0);
        let answering = async move {
            holder.receive(&mut [0; 20], silence).await.unwrap();
            holder.send(answer).await.unwrap();
        };
        // What is cut short ends with the connection, and nobody waits for the rest.
        let (said, ()) = tokio::join!(ask(id, 5, &reader), answering);
        said
    }

    #[tokio::test]
    async fn only_a_holder_without_the_object_says_that_it_has_none() {
        let of = |words: &[u64]| words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<u8>>();
        assert!(matches!(answered(&of(&[5])).await, Ok(())));
        assert!(matches!(answered(&of(&[WAIT, WAIT, 5])).await, Ok(())));
        assert!(matches!(answered(&of(&[WAIT, ABSENT])).await, Err(Failure::Absent(_))));
        assert!(matches!(answered(&of(&[6])).await, Err(Failure::Absent(_))));
        let mut unreadable = of(&[UNREADABLE]);
        unreadable.extend(2u32.to_le_bytes());
        unreadable.extend(b"no");
        assert!(matches!(answered(&unreadable).await, Err(Failure::Unreached(why)) if why == "no"));
    }

    #[tokio::test]
    async fn whatever_a_holder_answers_is_the_object_or_a_failure() {
        let mut random = 1u64;
        let mut next = || {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            random >> 33
        };
        for round in 0..2_000 {
            let words = (0..next() % 4).map(|_| match next() % 6 {
                0 => WAIT,
                1 => ABSENT,
                2 => UNREADABLE,
                3 => 5,
                4 => u64::MAX - next() % 8,
                _ => next(),
            });
            let mut answer: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
            answer.extend((0..next() % 12).map(|_| next() as u8));
            // Words of waiting at the beginning, and then at least all of the one that the reader looks at.
            let mut words = answer.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().unwrap()));
            let is_object = words.find(|word| *word != WAIT) == Some(5);
            assert_eq!(answered(&answer).await.is_ok(), is_object, "round {round}: {answer:?}");
        }
    }
}
