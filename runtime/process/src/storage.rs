//! This process's side of its node's shared-memory store.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::sync::watch;
use wingbeat_core::codec::Encoded;
use wingbeat_core::error::Error;
use wingbeat_core::spec::{Address, Outcome};
use wingbeat_core::value::{ObjectValue, StoreNode, Stored};
use wingbeat_core::{NodeId, ObjectId, ProcessId, TaskId};
use wingbeat_net::link::Link;
use wingbeat_net::messages::{Fetch, Located, NodeMessage, PeerMessage};
use wingbeat_net::mux::{self, Connection};
use wingbeat_net::services::{NodeClient, NodeRequest};
use wingbeat_store::{Extent, Mapping};

use crate::process::Process;
use crate::view::{Bits, Pinned};

/// The pause before an owner is told again of a copy, when contact with it was lost.
const TOLD_AGAIN: Duration = Duration::from_secs(1);

/// The connection to the daemon of this process's node, and its mapped memory.
#[derive(Clone)]
pub struct NodeLink {
    shared: Arc<Shared>,
}

struct Shared {
    node: NodeId,
    daemon: Address,
    client: NodeClient,
    link: Link<NodeMessage>,
    mapping: Arc<Mapping>,
    connection: Connection,
}

/// The node of this process. A driver moves to another one when the first dies.
#[derive(Default)]
pub(crate) struct Home {
    link: watch::Sender<Option<NodeLink>>,
    moves: AtomicBool,
}

impl NodeLink {
    /// Starts the queue of one-way messages on the current (IO) runtime.
    pub fn start(
        node: NodeId,
        daemon: Address,
        client: NodeClient,
        mapping: Arc<Mapping>,
        connection: Connection,
    ) -> Self {
        let link = Link::new();
        let (sending, over) = (link.clone(), connection.clone());
        tokio::spawn(async move { sending.run(&over, |messages| NodeRequest::Deliver { messages }).await });
        NodeLink { shared: Arc::new(Shared { node, daemon, client, link, mapping, connection }) }
    }

    /// The node.
    pub fn node(&self) -> NodeId {
        self.shared.node
    }

    pub(crate) fn daemon(&self) -> ProcessId {
        self.shared.daemon.process
    }

    /// Queues a message to the daemon.
    pub fn send(&self, message: NodeMessage) {
        self.shared.link.send(message);
    }

    pub(crate) fn unpin(&self, object: ObjectId) {
        self.send(NodeMessage::Unpin(vec![object]));
    }

    /// The connection to the daemon.
    pub fn connection(&self) -> &Connection {
        &self.shared.connection
    }

    fn here(&self) -> StoreNode {
        StoreNode { node: self.shared.node, address: self.shared.daemon.clone() }
    }

    /// None if it is there already.
    async fn create(&self, object: ObjectId, size: u64, replaces: bool) -> Result<Option<Located>, Error> {
        let answer = self.shared.client.create(mux::no_deadline(), object, size, replaces).await;
        mux::answered(answer, "the node's store")?
    }

    async fn seal(&self, object: ObjectId) -> Result<(), Error> {
        mux::answered(self.shared.client.seal(mux::no_deadline(), object).await, "the node's store")?
    }

    async fn fetch(&self, object: ObjectId, stored: Stored) -> Result<(Located, bool), Error> {
        let answer = self.shared.client.fetch(mux::no_deadline(), Fetch { object, stored }).await;
        mux::answered(answer, "the node's store")?
    }
}

impl Process {
    /// Attaches the store of a node, the first one or, after that one died, another.
    pub fn set_storage(&self, storage: NodeLink) {
        self.home.link.send_replace(Some(storage));
    }

    /// Somebody attaches another node when this one dies: who uses it meanwhile waits.
    pub fn will_move(&self) {
        self.home.moves.store(true, Ordering::Release);
    }

    /// The node's store, if this process has a node.
    pub fn storage(&self) -> Option<NodeLink> {
        self.home.link.borrow().clone()
    }

    /// Asks the node, or the one after it if it dies before it has answered.
    async fn ask_node<T, F>(&self, ask: impl Fn(NodeLink) -> F) -> Result<(NodeLink, T), Error>
    where
        F: Future<Output = Result<T, Error>>,
    {
        let mut homes = self.home.link.subscribe();
        loop {
            let Some(node) = homes.borrow_and_update().clone() else {
                let what = "shared memory is of no use to a process that has joined no node".to_owned();
                return Err(Error::InvalidArgument { what });
            };
            match ask(node.clone()).await {
                Ok(answer) => return Ok((node, answer)),
                Err(_) if node.connection().is_closed() && self.home.moves.load(Ordering::Acquire) => {
                    tokio::select! {
                        _ = homes.changed() => {}
                        () = self.over() => return Err(self.over_error()),
                    }
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Writes an encoded value into the node's store. Blocks the calling thread for two round trips to the
    /// daemon and the copy. What an earlier attempt at the same task has left there is kept, unless this `replaces` it.
    pub(crate) fn store(
        self: &Arc<Self>,
        id: ObjectId,
        encoded: &Encoded<'_>,
        replaces: bool,
    ) -> Result<Stored, Error> {
        let size = encoded.len() as u64;
        loop {
            let process = self.clone();
            let create =
                async move { process.ask_node(move |node| async move { node.create(id, size, replaces).await }).await };
            let (node, located) = self.on_io(create)?;
            let stored = Stored { size, nodes: vec![node.here()], refs: None };
            // Without a place, it is there.
            if let Some(located) = located
                && let Err(error) = self.fill(&node, id, located, encoded)
            {
                match node.connection().is_closed() && self.home.moves.load(Ordering::Acquire) {
                    true => continue,
                    false => return Err(error),
                }
            }
            return Ok(stored);
        }
    }

    fn fill(&self, node: &NodeLink, id: ObjectId, located: Located, encoded: &Encoded<'_>) -> Result<(), Error> {
        let extent = Extent { offset: located.offset, len: located.len };
        // SAFETY: the daemon answered the extent to `create` for this process; the object is sealed below, after the region
        // is dropped, and aborted nowhere while it lives.
        let region = unsafe { node.shared.mapping.write_region(extent) };
        let mut region =
            region.map_err(|error| Error::Io { what: "writing to the node's store".into(), why: error.to_string() })?;
        encoded.copy_to(&mut region);
        drop(region);
        let node = node.clone();
        self.on_io(async move { node.seal(id).await })
    }

    /// Brings a stored value into reach, from another node or disk if need be, and pins it.
    pub(crate) async fn fetch(self: &Arc<Self>, id: ObjectId, stored: Stored) -> Result<Bits, Error> {
        let ask = move |node: NodeLink| {
            let stored = stored.clone();
            async move { node.fetch(id, stored).await }
        };
        let (storage, (located, new)) = self.ask_node(ask).await?;
        if new {
            let at = storage.here();
            if id.owner() == self.id {
                self.copied(id, at);
            } else {
                self.tell_of_copy(id, at);
            }
        }
        let extent = Extent { offset: located.offset, len: located.len };
        // SAFETY: the daemon answered the extent to `fetch`, with a pin for this process, which `Pinned` releases when the
        // region is dropped with it; it gives the region to nobody.
        let region = unsafe { storage.shared.mapping.region(extent) };
        let region = region
            .map_err(|error| Error::Io { what: "reading from the node's store".into(), why: error.to_string() })?;
        Ok(Bits::Shared(Arc::new(Pinned::new(region, id, storage.clone()))))
    }

    /// Tells the owner of an object that a node has a copy, over as many contacts as it takes: nobody else would ever have it
    /// deleted.
    fn tell_of_copy(self: &Arc<Self>, id: ObjectId, at: StoreNode) {
        let process = self.clone();
        let tell = move || process.send_to(id.owner(), PeerMessage::Copied { object: id, at: at.clone() });
        if !tell() {
            return;
        }
        let process = self.clone();
        self.io.spawn(async move {
            while !process.peers.flushed_to(id.owner()).await && !process.is_shut_down() {
                tokio::time::sleep(TOLD_AGAIN).await;
                if !tell() {
                    return;
                }
            }
        });
    }

    /// A node has a copy of one of our objects now.
    pub(crate) fn copied(self: &Arc<Self>, id: ObjectId, at: StoreNode) {
        if let Some(object) = self.objects.get(id) {
            self.objects.stored(id, std::slice::from_ref(&at));
            // Looked at afterwards: whoever frees it from here on finds the copy.
            if object.add_copy(&at) && self.objects.has(&object) {
                return;
            }
            self.objects.not_stored(id, std::slice::from_ref(&at));
        }
        // Freed meanwhile, or lost and made again.
        self.delete_at(&at, id);
    }

    /// Of these copies, those that do not belong to the object's value.
    pub(crate) fn delete_other_copies(self: &Arc<Self>, id: ObjectId, stored: &Stored, value: &ObjectValue) {
        for holder in stored.nodes.iter().filter(|holder| !value.is_stored_at(holder.node)) {
            self.delete_at(holder, id);
        }
    }

    /// What an attempt has stored whose result came when another's counted already.
    pub(crate) fn discard_late(self: &Arc<Self>, task: TaskId, outcome: Outcome) {
        let values = match outcome {
            Outcome::One(value) => vec![value],
            Outcome::Many(values) => values,
            Outcome::StreamEnded(_) | Outcome::Failed(_) => return,
        };
        for (index, value) in values.iter().enumerate() {
            let (id, ObjectValue::Stored(stored)) = (task.output(index as u32), value) else { continue };
            for holder in &stored.nodes {
                self.left_over(id, holder);
            }
        }
    }

    /// Nobody needs these copies.
    pub(crate) fn delete_stored(self: &Arc<Self>, id: ObjectId, stored: &Stored) {
        for node in &stored.nodes {
            self.delete_at(node, id);
        }
    }
}
