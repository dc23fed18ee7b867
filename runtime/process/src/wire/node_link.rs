//! The connection to this process's node.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use tarpc::client::RpcError;
use tokio::sync::watch;
use wingbeat_core::error::Error;
use wingbeat_core::spec::Address;
use wingbeat_core::value::StoreNode;
use wingbeat_core::{NodeId, ObjectId, ProcessId};
use wingbeat_net::link::Link;
use wingbeat_net::messages::{Fetch, Located, NodeMessage, Place};
use wingbeat_net::mux::{self, Connection};
use wingbeat_net::panics;
use wingbeat_net::services::{NodeClient, NodeRequest};
use wingbeat_store::Mapping;

use crate::recorded::{Event, Recorded};

/// The connection to the daemon of this process's node, and its mapped memory.
#[derive(Clone)]
pub struct NodeLink {
    shared: Arc<Shared>,
    /// What is said is written down here, if anything is.
    recorded: Option<Arc<Recorded>>,
}

/// All of it belongs to one connection, and nothing arrives any more when that has ended. Lives as long as a clone of the link.
struct Shared {
    /// The node.
    node: NodeId,
    /// Where its daemon is, and its steward.
    daemon: Address,
    /// For questions.
    client: NodeClient,
    /// For one-way messages.
    link: Link<NodeMessage>,
    /// The node's shared memory. Views keep it, too, and may outlive this.
    mapping: Arc<Mapping>,
    /// What carries both.
    connection: Connection,
}

/// The node of this process. A driver moves to another one when the first dies.
#[derive(Default)]
pub(crate) struct HomeNode {
    /// None before the first is attached, and after the session: views that live on keep the memory of theirs.
    pub link: watch::Sender<Option<NodeLink>>,
    /// Somebody attaches another node when this one dies.
    pub moves: AtomicBool,
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
        tokio::spawn(async move {
            let run = sending.run(&over, |messages| NodeRequest::Deliver { messages });
            if panics::caught(run).await.is_err() {
                // A worker process ends with this connection, and a driver finds another node.
                over.close();
            }
        });
        let shared = Shared { node, daemon, client, link, mapping, connection };
        NodeLink { shared: Arc::new(shared), recorded: None }
    }

    pub(super) fn recorded_by(self, recorded: Option<Arc<Recorded>>) -> NodeLink {
        NodeLink { recorded, ..self }
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
        if let Some(recorded) = &self.recorded {
            recorded.record(Event::ToNode(self.shared.node, message.clone()));
        }
        self.shared.link.send(message);
    }

    pub(crate) fn unpin(&self, object: ObjectId) {
        self.send(NodeMessage::Unpin(vec![object]));
    }

    /// The connection to the daemon.
    pub fn connection(&self) -> &Connection {
        &self.shared.connection
    }

    pub(super) fn here(&self) -> StoreNode {
        // Whoever reads there does not ask the steward.
        StoreNode { node: self.shared.node, address: Address { steward: None, ..self.shared.daemon.clone() } }
    }

    /// Who answers there for the objects of processes that are no more.
    pub(super) fn steward(&self) -> Option<Address> {
        self.shared.daemon.steward.as_deref().cloned()
    }

    /// The node's shared memory.
    pub(crate) fn mapping(&self) -> &Arc<Mapping> {
        &self.shared.mapping
    }

    pub(super) async fn create(
        &self,
        object: ObjectId,
        size: u64,
        replaces: bool,
        steward: Option<Box<Address>>,
    ) -> Result<Place, Error> {
        self.answered(self.shared.client.create(mux::no_deadline(), object, size, replaces, steward).await).await
    }

    pub(super) async fn seal(&self, object: ObjectId) -> Result<(), Error> {
        self.answered(self.shared.client.seal(mux::no_deadline(), object).await).await
    }

    pub(super) async fn fetch(&self, what: Fetch) -> Result<(Located, bool), Error> {
        self.answered(self.shared.client.fetch(mux::no_deadline(), what).await).await
    }

    /// What the daemon has answered. A call can fail before its connection is known to have ended, and whoever asked moves
    /// to another node only when that is so.
    async fn answered<T>(&self, answer: Result<Result<T, Error>, RpcError>) -> Result<T, Error> {
        if matches!(answer, Err(RpcError::Shutdown | RpcError::Send(_) | RpcError::Channel(_))) {
            self.shared.connection.close();
            self.shared.connection.closed().await;
        }
        mux::answered(answer, "the node's store")?
    }
}

#[cfg(test)]
mod tests {
    use wingbeat_core::TaskId;
    use wingbeat_core::spec::MachineId;
    use wingbeat_net::address::Stream;
    use wingbeat_net::mux::Waiting;
    use wingbeat_net::services::{NodeResponse, ProcessRequest, ProcessResponse};
    use wingbeat_store::Arena;

    use super::*;

    #[tokio::test]
    async fn when_a_call_has_failed_its_connection_has_ended() {
        let (ours, _theirs) = tokio::net::UnixStream::pair().unwrap();
        let (connection, _client, _server) = mux::connect::<NodeRequest, NodeResponse, ProcessRequest, ProcessResponse>(
            Stream::Unix(ours),
            Waiting::Asleep,
        );
        // As when a call is made in the moment in which the connection breaks: only the call has noticed.
        let (transport, gone) = tarpc::transport::channel::unbounded();
        drop(gone);
        let client = NodeClient::new(mux::client_config(), transport).spawn();
        let arena = Arena::create(1 << 20).unwrap();
        let mapping = Mapping::open(arena.fd().try_clone_to_owned().unwrap(), arena.capacity()).unwrap();
        let daemon =
            Address { process: ProcessId(1), machine: MachineId(1), unix: String::new(), tcp: None, steward: None };
        let link = NodeLink::start(NodeId(1), daemon, client, mapping, connection);
        let object = ObjectId { task: TaskId { owner: ProcessId(2), seq: 1 }, index: 0 };
        assert!(!link.connection().is_closed());
        assert!(matches!(link.seal(object).await, Err(Error::Unreachable { .. })));
        assert!(link.connection().is_closed());
    }
}
