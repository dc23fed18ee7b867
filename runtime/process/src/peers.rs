//! Connections to other processes: one a pair, dialled on first use, and watched for their end.

use std::sync::Arc;

use dashmap::{DashMap, DashSet};
use parking_lot::Mutex;
use wingbeat_core::ProcessId;
use wingbeat_core::error::Error;
use wingbeat_core::spec::Address;
use wingbeat_net::address::{self, DialError, Stream};
use wingbeat_net::handshake::{Hello, Purpose};
use wingbeat_net::link::Link;
use wingbeat_net::messages::{NodeMessage, PeerMessage, Weight};
use wingbeat_net::mux::{self, Connection, Waiting};
use wingbeat_net::services::{NodeRequest, NodeResponse, Process as _, ProcessRequest, ProcessResponse};

use crate::object::Object;
use crate::process::Process;
use crate::service::PeerService;
use crate::session::Session;

/// Everybody this process talks to, the head excepted.
#[derive(Default)]
pub(crate) struct Peers {
    links: DashMap<ProcessId, Link<PeerMessage>>,
    nodes: DashMap<ProcessId, Link<NodeMessage>>,
    addresses: DashMap<ProcessId, Address>,
    contacts: DashMap<ProcessId, Contact>,
    /// Processes of which it is certain that they are gone. Ids are never used again, so that they stay it.
    gone: DashSet<ProcessId>,
    /// Links with registrations of borrowed objects that are not acknowledged yet.
    borrowing: Mutex<Vec<(ProcessId, Link<PeerMessage>)>>,
}

/// What this process knows of its connections with another. A broken connection is a loss of contact and not of the
/// process: who has something to say afterwards dials again.
#[derive(Default)]
struct Contact {
    /// How often contact was lost. What belongs to an earlier contact does not end a later one.
    losses: u64,
    /// The same as far as the other side is known to count. When it says more, this side's connections are dead and it has
    /// not noticed. Too high a number only means that the limit for silence has to find that out.
    theirs: u64,
    /// Those of the present contact: two when both sides dialled at once. Each carries what its dialler says, so that the
    /// end of either is a loss.
    connections: Vec<Connection>,
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
        for contact in &self.contacts {
            for connection in &contact.connections {
                connection.close();
            }
        }
    }

    /// The link of the present contact with `peer`, whether it is new, and how many contacts were lost before it.
    fn link(&self, peer: ProcessId) -> (Link<PeerMessage>, bool, u64) {
        // Held until the link is entered, so that no loss comes between.
        let contact = self.contacts.entry(peer).or_default();
        let (link, new) = link_of(&self.links, peer);
        (link, new, contact.losses)
    }
}

/// The link to `process`, and whether it is new.
fn link_of<M: Weight + Send + 'static>(links: &DashMap<ProcessId, Link<M>>, process: ProcessId) -> (Link<M>, bool) {
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
            if matches!(message, PeerMessage::Tasks { .. } | PeerMessage::Calls { .. }) {
                // Somebody waits for their results.
                let (process, gone) = (self.clone(), to.process);
                self.io.spawn(async move { process.submission.connection_lost(&process, gone) });
            }
            return;
        }
        self.peers.learn(to);
        let (link, new, losses) = self.peers.link(to.process);
        link.send(message);
        if new {
            let (process, to) = (self.clone(), to.clone());
            self.io.spawn(async move { process.dial_peer(to, link, losses).await });
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

    async fn dial_peer(self: Arc<Self>, to: Address, link: Link<PeerMessage>, losses: u64) {
        let hello = Hello { losses, ..self.hello(Purpose::Control) };
        match address::dial_known(&to, "a process of the job", &self.token, hello).await {
            Ok(stream) => self.run_peer(stream, to.process, Some(link), losses).await,
            Err(error) => {
                tracing::debug!(%error, peer = %to.process, "cannot reach a peer");
                if matches!(error, DialError::Gone(_)) {
                    self.peers.gone.insert(to.process);
                }
                link.broke();
            }
        }
        self.contact_lost(to.process, losses);
    }

    /// Serves a connection that another process opened.
    pub(crate) async fn accept_peer(self: Arc<Self>, stream: Stream, hello: &Hello) {
        let process = hello.address.process;
        self.peers.learn(&hello.address);
        // Whoever connects lives.
        self.peers.gone.remove(&process);
        let dead = {
            let contact = self.peers.contacts.entry(process).or_default();
            let more = hello.losses > contact.theirs;
            let has_any = !contact.connections.is_empty() || self.peers.links.contains_key(&process);
            (more && has_any).then_some(contact.losses)
        };
        if let Some(losses) = dead {
            self.contact_lost(process, losses);
        }
        if let Some(mut contact) = self.peers.contacts.get_mut(&process) {
            contact.theirs = contact.theirs.max(hello.losses);
        }
        let (link, first, losses) = self.peers.link(process);
        // If we are dialling it at the same time, our own connection carries what we say.
        self.run_peer(stream, process, first.then_some(link), losses).await;
        self.contact_lost(process, losses);
    }

    async fn run_peer(self: &Arc<Self>, stream: Stream, peer: ProcessId, link: Option<Link<PeerMessage>>, losses: u64) {
        let (connection, _, server) =
            mux::connect::<ProcessRequest, ProcessResponse, ProcessRequest, ProcessResponse>(stream, Waiting::Awake);
        let is_present = {
            let mut contact = self.peers.contacts.entry(peer).or_default();
            let is_present = contact.losses == losses;
            if is_present {
                contact.connections.push(connection.clone());
            }
            is_present
        };
        if !is_present {
            // Contact was lost while this was dialled or introduced itself, and its link is broken.
            return connection.close();
        }
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

    /// Contact with a process was lost, after so many losses before: everything that waits for it must know. The process may
    /// be gone, or may be reached again.
    fn contact_lost(self: &Arc<Self>, peer: ProcessId, losses: u64) {
        let connections = {
            let Some(mut contact) = self.peers.contacts.get_mut(&peer) else { return };
            if contact.losses != losses {
                return;
            }
            contact.losses += 1;
            // The other side sees the end of a connection too, and both may dial next.
            contact.theirs += u64::from(!contact.connections.is_empty());
            if let Some((_, link)) = self.peers.links.remove(&peer) {
                link.broke();
            }
            std::mem::take(&mut contact.connections)
        };
        for connection in connections {
            connection.close();
        }
        if self.is_shut_down() {
            return;
        }
        for id in self.objects.forget_borrower(peer) {
            self.free_if_unneeded(id);
        }
        let pending = self.objects.pending_of(peer);
        if !pending.is_empty() {
            let process = self.clone();
            self.io.spawn(async move { process.fail_pending(peer, pending).await });
        }
        self.submission.connection_lost(self, peer);
        if let Some(executor) = self.executor() {
            executor.peer_lost(peer);
        }
    }

    /// Fails what was asked of an owner contact with which was lost.
    async fn fail_pending(self: &Arc<Self>, owner: ProcessId, pending: Vec<Arc<Object>>) {
        let address = self.peers.address(owner);
        if let Some(address) = &address
            && address::is_gone(address).await
        {
            self.peers.gone.insert(owner);
        }
        let is_gone = self.peers.is_gone(owner);
        for object in pending {
            let error = if is_gone {
                Error::OwnerDied { object: object.id(), owner }
            } else {
                Error::ContactLost {
                    what: format!("getting {}", object.id()),
                    who: format!("its owner, {owner}"),
                    why: "the connection broke before the value arrived".into(),
                }
            };
            self.resolve_object(&object, wingbeat_core::value::ObjectValue::Failed(Box::new(error)), Vec::new());
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
            let error = Error::OwnerDied { object: id, owner };
            self.resolve_object(
                handle.object(),
                wingbeat_core::value::ObjectValue::Failed(Box::new(error)),
                Vec::new(),
            );
        }
        handle
    }
}
