//! Objects that this process has freed, on their way to the nodes that have copies. What a broken connection did not carry is
//! said again over the next one, until the head says that the node is gone: nobody else would ever delete it.

use std::sync::Arc;
use std::time::Duration;

use dashmap::mapref::entry::Entry;
use wingbeat_core::value::StoreNode;
use wingbeat_core::{NodeId, ObjectId};
use wingbeat_net::address::{self, DialError};
use wingbeat_net::handshake::Purpose;
use wingbeat_net::link::{IDS_A_MESSAGE, Link};
use wingbeat_net::messages::NodeMessage;
use wingbeat_net::mux::{self, Connection, Waiting};
use wingbeat_net::services::{NodeRequest, NodeResponse, ProcessRequest, ProcessResponse};

use crate::recorded::Event;
use crate::wire::process::Process;
use crate::wire::to_delete::AtNode;

/// The pause before a node is dialled again; it doubles up to the limit.
const PAUSE: Duration = Duration::from_millis(100);
const PAUSE_LIMIT: Duration = Duration::from_secs(5);

impl Process {
    /// Has a node delete its copy of an object.
    pub(crate) fn delete_at(&self, at: &StoreNode, id: ObjectId) {
        if let Some(storage) = self.storage()
            && storage.daemon() == at.address.process
        {
            storage.send(NodeMessage::Delete(vec![id]));
            return;
        }
        let deletions = match self.wire.deletions.nodes.entry(at.node) {
            Entry::Occupied(known) => known.get().clone(),
            Entry::Vacant(_) if self.wire.deletions.gone.contains(&at.node) => return,
            Entry::Vacant(new) => {
                let deletions = new.insert(Arc::default()).clone();
                let (process, at, of_node) = (self.clone(), at.clone(), deletions.clone());
                self.vital("deletions", async move { process.delete_loop(&at, &of_node).await });
                deletions
            }
        };
        deletions.queue.lock().push(id);
        deletions.wake.notify_one();
    }

    /// Tells one node, over as many connections as it takes.
    async fn delete_loop(self, at: &StoreNode, deletions: &AtNode) {
        let mut pause = PAUSE;
        while self.wire.deletions.nodes.contains_key(&at.node) && !self.is_shut_down() {
            let hello = self.hello(Purpose::Control);
            match address::dial_known(&at.address, "a node", &self.wire.who.token, hello).await {
                Ok(stream) => {
                    pause = PAUSE;
                    let (connection, _, _) = mux::connect::<NodeRequest, NodeResponse, ProcessRequest, ProcessResponse>(
                        stream,
                        Waiting::Asleep,
                    );
                    let link = Link::new();
                    let sending = link.run(&connection, |messages| NodeRequest::Deliver { messages });
                    tokio::join!(sending, self.delete_over(&connection, &link, at.node, deletions));
                }
                Err(DialError::Gone(_)) => {
                    self.wire.deletions.forget(at.node);
                    return;
                }
                Err(DialError::Failed(error)) => tracing::debug!(%error, "cannot reach a node"),
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(PAUSE_LIMIT);
        }
    }

    /// Until the connection ends, or the node is gone.
    async fn delete_over(&self, connection: &Connection, link: &Link<NodeMessage>, node: NodeId, deletions: &AtNode) {
        while self.wire.deletions.nodes.contains_key(&node) && !link.is_broken() {
            let mut ids = std::mem::take(&mut *deletions.queue.lock());
            // They may have waited for long. One that was made again since, at the same node, is needed.
            ids.retain(|id| !self.owner.objects.get(*id).is_some_and(|object| object.is_stored_at(node)));
            if ids.is_empty() {
                tokio::select! {
                    () = deletions.wake.notified() => continue,
                    () = connection.closed() => break,
                }
            }
            self.wire.record(|| Event::ToNode(node, NodeMessage::Delete(ids.clone())));
            link.send_all(ids.chunks(IDS_A_MESSAGE).map(|ids| NodeMessage::Delete(ids.to_vec())));
            if !link.flushed().await {
                // Some may be deleted already, which does no harm.
                deletions.queue.lock().extend(ids);
            }
        }
        connection.close();
    }
}

#[cfg(test)]
#[path = "deletions_tests.rs"]
mod tests;
