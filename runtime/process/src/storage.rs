//! This process's side of its node's shared-memory store.

use std::sync::Arc;

use futures::FutureExt;
use wingbeat_core::codec::Encoded;
use wingbeat_core::error::Error;
use wingbeat_core::spec::Address;
use wingbeat_core::value::{StoreNode, Stored};
use wingbeat_core::{NodeId, ObjectId, ProcessId};
use wingbeat_net::link::Link;
use wingbeat_net::messages::{Fetch, Located, NodeMessage, PeerMessage};
use wingbeat_net::mux::{self, Connection};
use wingbeat_net::services::NodeClient;
use wingbeat_store::{Extent, Mapping};

use crate::session::Process;
use crate::view::{Bits, Pinned};

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
        let (sending, sender, closed) = (link.clone(), client.clone(), connection.clone());
        tokio::spawn(async move {
            tokio::select! {
                () = sending.run(move |batch| {
                    let client = sender.clone();
                    async move { client.deliver(mux::no_deadline(), batch).await }.boxed()
                }) => {}
                () = closed.closed() => {}
            }
            sending.broke();
        });
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

    async fn create(&self, object: ObjectId, size: u64) -> Result<Located, Error> {
        let answer = self.shared.client.create(mux::no_deadline(), object, size).await;
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
    /// Writes an encoded value into the node's store. Blocks the calling thread for two round trips to the
    /// daemon and the copy.
    pub(crate) fn store(self: &Arc<Self>, id: ObjectId, encoded: &Encoded<'_>) -> Result<Stored, Error> {
        let Some(storage) = self.storage() else {
            return Err(Error::StoreFull {
                what: id.to_string(),
                why: "this process has joined no node, so it has no shared memory to put it in".into(),
            });
        };
        let size = encoded.len() as u64;
        let node = storage.clone();
        let located = self.on_io(async move { node.create(id, size).await })?;
        let mut region = storage
            .shared
            .mapping
            .write_region(Extent { offset: located.offset, len: located.len })
            .map_err(|error| Error::Io { what: "writing to the node's store".into(), why: error.to_string() })?;
        encoded.copy_to(&mut region);
        drop(region);
        let node = storage.clone();
        self.on_io(async move { node.seal(id).await })?;
        Ok(Stored { size, nodes: vec![storage.here()], refs: None })
    }

    /// Brings a stored value into reach, from another node or disk if need be, and pins it.
    pub(crate) async fn fetch(self: &Arc<Self>, id: ObjectId, stored: Stored) -> Result<Bits, Error> {
        let Some(storage) = self.storage() else {
            return Err(Error::ObjectLost {
                object: id,
                why: "this process has no node whose store could hold it".into(),
            });
        };
        let (located, new) = storage.fetch(id, stored).await?;
        if new {
            let at = storage.here();
            if id.owner() == self.id {
                self.copied(id, at);
            } else {
                self.send_to(id.owner(), PeerMessage::Copied { object: id, at });
            }
        }
        let region = storage
            .shared
            .mapping
            .region(Extent { offset: located.offset, len: located.len })
            .map_err(|error| Error::Io { what: "reading from the node's store".into(), why: error.to_string() })?;
        Ok(Bits::Shared(Arc::new(Pinned::new(region, id, storage.clone()))))
    }

    /// A node has a copy of one of our objects now.
    pub(crate) fn copied(self: &Arc<Self>, id: ObjectId, at: StoreNode) {
        match self.objects.get(id) {
            Some(object) => object.update_stored(|stored| {
                if !stored.nodes.iter().any(|known| known.node == at.node) {
                    stored.nodes.push(at);
                }
            }),
            // Freed meanwhile.
            None => self.send_to_node(&at.address, NodeMessage::Delete(vec![id])),
        }
    }

    /// Nobody needs these copies.
    pub(crate) fn delete_stored(self: &Arc<Self>, id: ObjectId, stored: &Stored) {
        for node in &stored.nodes {
            self.send_to_node(&node.address, NodeMessage::Delete(vec![id]));
        }
    }
}
