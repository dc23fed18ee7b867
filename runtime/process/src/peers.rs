//! Connections to other processes: one a pair, dialled on first use, and watched for their end.

use std::sync::Arc;

use dashmap::{DashMap, DashSet};
use parking_lot::Mutex;
use wingbeat_core::ProcessId;
use wingbeat_core::error::Error;
use wingbeat_core::spec::Address;
use wingbeat_net::address::{self, Stream};
use wingbeat_net::handshake::Purpose;
use wingbeat_net::link::Link;
use wingbeat_net::messages::{NodeMessage, PeerMessage};
use wingbeat_net::mux::{self, Connection, Waiting};
use wingbeat_net::services::{NodeRequest, NodeResponse, Process as _, ProcessRequest, ProcessResponse};

use crate::process::Process;
use crate::service::PeerService;
use crate::session::Session;

/// Everybody this process talks to, the head excepted.
#[derive(Default)]
pub(crate) struct Peers {
    links: DashMap<ProcessId, Link<PeerMessage>>,
    nodes: DashMap<ProcessId, Link<NodeMessage>>,
    addresses: DashMap<ProcessId, Address>,
    connections: DashMap<ProcessId, Connection>,
    /// Ids are never used again, so that who is gone stays gone.
    gone: DashSet<ProcessId>,
    /// Links with registrations of borrowed objects that are not acknowledged yet.
    borrowing: Mutex<Vec<(ProcessId, Link<PeerMessage>)>>,
}

impl Peers {
    /// Remembers where a process is.
    pub(crate) fn learn(&self, address: &Address) {
        if !self.addresses.contains_key(&address.process) {
            self.addresses.insert(address.process, address.clone());
        }
    }

    pub(crate) fn address(&self, process: ProcessId) -> Option<Address> {
        self.addresses.get(&process).map(|address| address.clone())
    }

    pub(crate) fn is_gone(&self, process: ProcessId) -> bool {
        self.gone.contains(&process)
    }

    /// Notes that something was registered with `owner`, for [`Peers::borrows_registered`].
    pub(crate) fn borrowed_from(&self, owner: ProcessId) {
        let Some(link) = self.links.get(&owner).map(|link| link.clone()) else { return };
        let mut borrowing = self.borrowing.lock();
        if !borrowing.iter().any(|(known, _)| *known == owner) {
            borrowing.push((owner, link));
        }
    }

    /// Whether registrations with processes other than `except` are on their way.
    pub(crate) fn is_borrowing_elsewhere(&self, except: ProcessId) -> bool {
        let mut borrowing = self.borrowing.lock();
        borrowing.retain(|(_, link)| !link.is_idle());
        borrowing.iter().any(|(owner, _)| *owner != except)
    }

    /// Waits until every registration so far was taken in (or its owner is gone, and nothing matters).
    pub(crate) async fn borrows_registered(&self) {
        let waiting = std::mem::take(&mut *self.borrowing.lock());
        for (_, link) in waiting {
            link.flushed().await;
        }
    }

    /// Waits until everything that was queued was taken in, or its receiver is gone.
    pub(crate) async fn flushed(&self) {
        let links: Vec<Link<PeerMessage>> = self.links.iter().map(|link| link.value().clone()).collect();
        for link in links {
            link.flushed().await;
        }
    }

    pub(crate) fn close(&self) {
        for connection in &self.connections {
            connection.close();
        }
    }
}

/// The link to `process`, and whether it is new.
fn link_of<M: Send + 'static>(links: &DashMap<ProcessId, Link<M>>, process: ProcessId) -> (Link<M>, bool) {
    let mut new = false;
    let link = links.entry(process).or_insert_with(|| {
        new = true;
        Link::new()
    });
    (link.clone(), new)
}

impl Process {
    /// Queues a message to a process whose address is known.
    pub(crate) fn send(self: &Arc<Self>, to: &Address, message: PeerMessage) {
        if let Some(link) = self.peers.links.get(&to.process) {
            link.send(message);
            return;
        }
        if self.peers.is_gone(to.process) {
            return;
        }
        self.peers.learn(to);
        let (link, new) = link_of(&self.peers.links, to.process);
        link.send(message);
        if new {
            let (process, to) = (self.clone(), to.clone());
            self.io.spawn(async move { process.dial_peer(to, link).await });
        }
    }

    /// Queues a message to a process by id. False when nobody knows where it is, or it is gone.
    pub(crate) fn send_to(self: &Arc<Self>, to: ProcessId, message: PeerMessage) -> bool {
        if let Some(link) = self.peers.links.get(&to) {
            link.send(message);
            return true;
        }
        match self.peers.address(to) {
            Some(address) if !self.peers.is_gone(to) => {
                self.send(&address, message);
                true
            }
            _ => false,
        }
    }

    /// Tells an owner that this process holds refs to `id`; what is sent in return waits for its answer.
    fn send_borrow(self: &Arc<Self>, owner: ProcessId, id: wingbeat_core::ObjectId) -> bool {
        let message = PeerMessage::Borrow(vec![id]);
        if let Some(link) = self.peers.links.get(&owner) {
            link.send_in_a_hurry(message);
            return true;
        }
        self.send_to(owner, message)
    }

    async fn dial_peer(self: Arc<Self>, to: Address, link: Link<PeerMessage>) {
        let hello = self.hello(Purpose::Control);
        match address::dial(&to, "a process of the job", &self.token, hello).await {
            Ok(stream) => self.run_peer(stream, to.process, Some(link)).await,
            Err(error) => {
                tracing::debug!(%error, peer = %to.process, "cannot reach a peer");
                link.broke();
            }
        }
        self.peer_lost(to.process);
    }

    /// Serves a connection that another process opened.
    pub(crate) async fn accept_peer(self: Arc<Self>, stream: Stream, from: Address) {
        self.peers.learn(&from);
        let process = from.process;
        let (link, first) = link_of(&self.peers.links, process);
        // If we are dialling it at the same time, our own connection carries what we say.
        self.run_peer(stream, process, first.then_some(link)).await;
        self.peer_lost(process);
    }

    async fn run_peer(self: &Arc<Self>, stream: Stream, peer: ProcessId, link: Option<Link<PeerMessage>>) {
        let (connection, _, server) =
            mux::connect::<ProcessRequest, ProcessResponse, ProcessRequest, ProcessResponse>(stream, Waiting::Awake);
        self.peers.connections.insert(peer, connection.clone());
        let service = PeerService::new(self.clone(), peer);
        let serving = mux::serve(server, service.serve());
        let sending = async {
            match link {
                Some(link) => link.run(&connection, |messages| ProcessRequest::Deliver { messages }).await,
                None => connection.closed().await,
            }
        };
        tokio::select! {
            () = serving => {}
            () = sending => {}
        }
        connection.close();
        self.peers.connections.remove(&peer);
    }

    /// Queues a message to a node daemon, dialling it if need be.
    pub(crate) fn send_to_node(self: &Arc<Self>, to: &Address, message: NodeMessage) {
        if let Some(storage) = self.storage()
            && storage.daemon() == to.process
        {
            storage.send(message);
            return;
        }
        let (link, new) = link_of(&self.peers.nodes, to.process);
        link.send(message);
        if new {
            let (process, to) = (self.clone(), to.clone());
            self.io.spawn(async move {
                if let Err(error) = process.run_node(&to, &link).await {
                    tracing::debug!(%error, "cannot reach a node");
                }
                link.broke();
                process.peers.nodes.remove(&to.process);
            });
        }
    }

    async fn run_node(self: &Arc<Self>, to: &Address, link: &Link<NodeMessage>) -> Result<(), Error> {
        let hello = self.hello(Purpose::Control);
        let stream = address::dial(to, "a node", &self.token, hello).await?;
        let (connection, _, _) =
            mux::connect::<NodeRequest, NodeResponse, ProcessRequest, ProcessResponse>(stream, Waiting::Asleep);
        link.run(&connection, |messages| NodeRequest::Deliver { messages }).await;
        connection.close();
        Ok(())
    }

    /// A process is gone: everything that waits for it must know.
    pub(crate) fn peer_lost(self: &Arc<Self>, peer: ProcessId) {
        if !self.peers.gone.insert(peer) {
            return;
        }
        if let Some((_, link)) = self.peers.links.remove(&peer) {
            link.broke();
        }
        if self.is_shut_down() {
            return;
        }
        for id in self.objects.forget_borrower(peer) {
            self.free_if_unneeded(id);
        }
        for object in self.objects.pending_of(peer) {
            let error = Error::OwnerDied { object: object.id(), owner: peer };
            self.resolve_object(&object, wingbeat_core::value::ObjectValue::Failed(Box::new(error)), Vec::new());
        }
        self.submission.connection_lost(self, peer);
        if let Some(executor) = self.executor() {
            executor.peer_lost(peer);
        }
    }

    /// A borrowed object, or one of ours that is referred to from outside.
    pub(crate) fn borrow(self: &Arc<Self>, session: &Session, id: wingbeat_core::ObjectId) -> crate::object::Handle {
        let (handle, new) = self.objects.handle(session, id);
        if !new {
            return handle;
        }
        let owner = id.owner();
        let told = owner != self.id && self.send_borrow(owner, id);
        if told {
            self.peers.borrowed_from(owner);
        } else {
            // Either ours and freed already, or its owner is gone or unknown: say so instead of waiting.
            let error = self.ended().cloned().unwrap_or(Error::OwnerDied { object: id, owner });
            self.resolve_object(
                handle.object(),
                wingbeat_core::value::ObjectValue::Failed(Box::new(error)),
                Vec::new(),
            );
        }
        handle
    }
}
