//! The steward of a node: a process in its daemon that runs nothing, and answers for the objects of processes of the node that
//! are no more (`owner/adoption.rs`).

use std::net::SocketAddr;
use std::sync::Arc;

use wingbeat_core::error::Error;
use wingbeat_core::spec::Address;
use wingbeat_core::{ClusterId, JobId, NodeId, ObjectId};
use wingbeat_net::handshake::{Role, Token};
use wingbeat_net::services::HeadClient;

use crate::wire::head_link::HeadLink;
use crate::wire::io::Io;
use crate::wire::process::{Config, Prepared, Process};

/// A node's steward, until it is shut down. It has a thread of its own.
pub struct Steward {
    process: Process,
    head: HeadLink,
}

impl Steward {
    /// Starts the steward of a node. It listens for other machines there, if at all.
    ///
    /// # Errors
    /// When it cannot listen, or the system has no thread left.
    pub async fn start(
        (node, cluster): (NodeId, ClusterId),
        head: Address,
        token: Token,
        listen: Option<SocketAddr>,
    ) -> Result<Steward, Error> {
        let io = Arc::new(Io::start()?);
        let config = Config { id: node.steward(), token, role: Role::Worker, listen };
        let bound = io.handle().spawn(Prepared::bind(config)).await;
        let prepared =
            bound.map_err(|error| Error::Failed { what: "starting the steward".into(), why: error.to_string() });
        let prepared = match prepared.and_then(|bound| bound) {
            Ok(prepared) => prepared,
            Err(error) => {
                io.stop();
                return Err(error);
            }
        };
        let process = prepared.start_recorded(None, &io, (JobId(0), String::new(), cluster));
        process.owner.serve_as_steward();
        let head = HeadLink::lent(head);
        process.set_head(head.clone());
        Ok(Steward { process, head })
    }

    /// Where it listens.
    pub fn address(&self) -> &Address {
        self.process.address()
    }

    /// It asks the head over the connection of its node, while there is one.
    pub fn lend_head(&self, client: Option<HeadClient>) {
        self.head.lend(client);
    }

    /// A node is gone with everything in its store.
    pub fn node_died(&self, node: NodeId) {
        self.process.owner.node_died(node, "its end was reported");
        self.process.wire.deletions.forget(node);
    }

    /// Of these objects, whose owners have ended, those for which it answers. If their jobs are over, too, what nobody has said that
    /// he refers to is freed.
    pub fn keeps(&self, objects: Vec<ObjectId>, are_jobs_over: bool) -> Vec<ObjectId> {
        self.process.owner.keeps(objects, are_jobs_over)
    }

    /// Waits until it is shut down, or a part of it has failed.
    pub fn over(&self) -> impl Future<Output = ()> + Send + use<> {
        let process = self.process.clone();
        async move { process.over().await }
    }

    /// Ends it, and waits for its thread.
    pub fn shut_down(&self) {
        self.process.shut_down("its node has ended");
    }
}

impl Drop for Steward {
    fn drop(&mut self) {
        self.shut_down();
    }
}
