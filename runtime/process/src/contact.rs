//! Contact with other processes, which outlives connections.
//!
//! Two processes that talk to each other have a *contact*. What one says to the other goes over one link, which is carried by
//! one connection at a time: who has something to say dials, and either side may use what the other has dialled. A
//! connection that ends is no loss. Both sides look for each other, and what was not answered is sent again over the next one
//! ([`Link::carry`]); the receiver passes over what it has taken in (`Contact::heard`).
//!
//! A contact is lost when the other process is certainly gone (nobody listens where it did, or the head says so), when it could
//! not be found for as long as [`wingbeat_net::limits::Limits::contact`], or when the other side has lost it. Then whatever
//! waits for that process is told. It may live all the same: who has something to say afterwards begins the next contact, of
//! a higher number. Every batch carries the number of its contact, so that a side that has not noticed the loss learns of
//! it with the first word of the other, and what it said in the old contact is not taken for part of the new one.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::FutureExt;
use wingbeat_core::ProcessId;
use wingbeat_core::spec::Address;
use wingbeat_net::address::{self, DialError, Stream};
use wingbeat_net::handshake::{Hello, Purpose};
use wingbeat_net::limits::limits;
use wingbeat_net::link::Link;
use wingbeat_net::messages::PeerMessage;
use wingbeat_net::mux::{self, Connection, Waiting};
use wingbeat_net::services::{Process as _, ProcessRequest, ProcessResponse};

use crate::peers::Peers;
use crate::process::Process;
use crate::service::PeerService;

/// The first pause before a process is looked for again, and the longest.
const PAUSES: (Duration, Duration) = (Duration::from_millis(5), Duration::from_secs(1));

/// Connections in a row over which nothing is answered, though something was sent: the next would end as they did.
const FRUITLESS: u32 = 5;

/// What this process knows of its contact with another. Entries stay while the other may live.
#[derive(Default)]
pub(crate) struct Contact {
    /// How often contact was lost before, as far as either side has said.
    number: u64,
    /// What is said in it; none before anything was, and after a loss.
    pub link: Option<Link<PeerMessage>>,
    /// The number of the next batch of the other side.
    heard: u64,
    /// Those that live: two if both sides dialled at once, and none while the other side is looked for.
    connections: Vec<Connection>,
    /// See [`FRUITLESS`].
    fruitless: u32,
}

impl Peers {
    /// Says something to a process with which there is contact, or gives the message back.
    pub(crate) fn say(&self, process: ProcessId, message: PeerMessage) -> Result<(), PeerMessage> {
        match self.contacts.get(&process).as_ref().and_then(|contact| contact.link.as_ref()) {
            Some(link) => {
                link.send(message);
                Ok(())
            }
            None => Err(message),
        }
    }

    /// What is said to a process with which there is contact.
    pub(crate) fn link(&self, process: ProcessId) -> Option<Link<PeerMessage>> {
        self.contacts.get(&process)?.link.clone()
    }

    pub(crate) fn is_in_contact(&self, process: ProcessId) -> bool {
        self.contacts.get(&process).is_some_and(|contact| contact.link.is_some())
    }

    /// The same, in a new contact if there is none: with its number, and whether it is new.
    pub(crate) fn link_or_new(&self, process: ProcessId) -> (Link<PeerMessage>, u64, bool) {
        let mut contact = self.contacts.entry(process).or_default();
        let is_new = contact.link.is_none();
        let link = contact.link.get_or_insert_with(Link::new).clone();
        (link, contact.number, is_new)
    }

    pub(crate) fn close(&self) {
        for contact in &self.contacts {
            for connection in &contact.connections {
                connection.close();
            }
        }
    }

    /// Keeps nothing of a contact that is over. One that somebody is dialling is not: its loss must be told.
    fn forget_contact(&self, process: ProcessId) {
        self.contacts.remove_if(&process, |_, contact| contact.link.is_none() && contact.connections.is_empty());
    }

    /// Enters a connection of the contact of this number; false if that is over.
    fn connected(&self, process: ProcessId, number: u64, connection: &Connection) -> bool {
        let mut contact = self.contacts.entry(process).or_default();
        let is_present = contact.number == number;
        if is_present {
            contact.connections.push(connection.clone());
        }
        is_present
    }

    /// What is said over a connection, and in which contact; none if it belongs to none any more.
    fn carried_by(&self, process: ProcessId, connection: &Connection) -> Option<(Link<PeerMessage>, u64)> {
        let mut contact = self.contacts.get_mut(&process)?;
        contact.connections.iter().any(|other| other.is(connection)).then(|| {
            let link = contact.link.get_or_insert_with(Link::new).clone();
            (link, contact.number)
        })
    }

    /// A connection has ended. Answers with the contact that has none any more, if it is not over.
    fn disconnected(&self, process: ProcessId, connection: &Connection, was_fruitless: bool) -> Option<u64> {
        let mut contact = self.contacts.get_mut(&process)?;
        let at = contact.connections.iter().position(|other| other.is(connection))?;
        contact.connections.swap_remove(at);
        contact.fruitless = if was_fruitless { contact.fruitless + 1 } else { 0 };
        contact.connections.is_empty().then_some(contact.number)
    }

    /// Whether a process must be looked for: its contact goes on, and has no connection.
    fn is_away(&self, process: ProcessId, number: u64) -> bool {
        let contact = self.contacts.get(&process);
        contact.is_some_and(|contact| contact.number == number && contact.connections.is_empty())
    }

    fn is_fruitless(&self, process: ProcessId) -> bool {
        self.contacts.get(&process).is_some_and(|contact| contact.fruitless >= FRUITLESS)
    }
}

/// What is to be done with a batch.
enum Heard {
    TakeIn,
    PassOver,
    /// The other side has lost this contact.
    Lost(u64),
}

impl Process {
    /// Begins a contact.
    pub(crate) async fn dial_peer(self: Arc<Self>, peer: ProcessId, number: u64) {
        let address = self.peers.address(peer);
        let stream = match address {
            Some(address) => self.reach(&address, number).await,
            None => None,
        };
        let found = match stream {
            Some(stream) => Some(stream),
            None => self.look_for(peer, number).await,
        };
        if let Some(stream) = found {
            self.see_peer_through(stream, peer, number).await;
        }
    }

    async fn reach(&self, to: &Address, number: u64) -> Option<Stream> {
        let hello = Hello { losses: number, ..self.hello(Purpose::Control) };
        let error = match address::dial_known(to, "a process of the job", &self.token, hello).await {
            Ok(stream) => return Some(stream),
            Err(error) => error,
        };
        tracing::debug!(%error, peer = %to.process, "cannot reach a peer");
        // One that has come by itself lives, whatever stands between.
        if matches!(error, DialError::Gone(_)) && self.peers.is_away(to.process, number) {
            self.peers.certainly_gone(to.process);
        }
        None
    }

    /// Serves a connection that another process opened.
    pub(crate) async fn accept_peer(self: Arc<Self>, stream: Stream, hello: &Hello) {
        let process = hello.address.process;
        // Whoever connects lives.
        self.peers.gone.write().remove(process);
        self.peers.learn(&hello.address);
        let number = self.peers.contacts.entry(process).or_default().number;
        if hello.losses > number {
            self.contact_over(process, number, hello.losses, true);
        }
        let (link, number, _) = self.peers.link_or_new(process);
        if hello.losses < number {
            // It learns of the loss with the first word.
            link.send(PeerMessage::Borrow(Vec::new()));
        }
        self.see_peer_through(stream, process, number).await;
    }

    /// Serves a connection until it ends, and looks for the other side then. A panic while a message is taken in ends the
    /// contact: the message would come again.
    async fn see_peer_through(self: &Arc<Self>, stream: Stream, peer: ProcessId, number: u64) {
        let mut next = Some((stream, number));
        while let Some((stream, number)) = next {
            next = match AssertUnwindSafe(self.run_peer(stream, peer, number)).catch_unwind().await {
                Ok(None) => None,
                Ok(Some(number)) => self.look_for(peer, number).await.map(|stream| (stream, number)),
                Err(_) => {
                    tracing::error!(%peer, "a message of a peer could not be taken in; contact with it ends");
                    let present = self.peers.contacts.get(&peer).map(|contact| contact.number);
                    self.contact_lost(peer, present.unwrap_or(number));
                    None
                }
            };
        }
    }

    /// Answers with the contact that has no connection any more when this one has ended.
    async fn run_peer(self: &Arc<Self>, stream: Stream, peer: ProcessId, number: u64) -> Option<u64> {
        let (connection, _, server) =
            mux::connect::<ProcessRequest, ProcessResponse, ProcessRequest, ProcessResponse>(stream, Waiting::Awake);
        if !self.peers.connected(peer, number, &connection) {
            // Contact was lost while this was dialled or introduced itself.
            connection.close();
            return None;
        }
        let service = PeerService::new(self.clone(), peer);
        let before = self.peers.link(peer).map(|link| link.taken_in());
        let sending = async {
            // The contact may be lost, and the next one go over the same connection.
            while let Some((link, contact)) = self.peers.carried_by(peer, &connection) {
                let request = |number, messages| ProcessRequest::Deliver { contact, number, messages };
                link.carry(&connection, request, messages_of).await;
                if !link.is_broken() {
                    return connection.closed().await;
                }
            }
        };
        tokio::select! {
            () = mux::serve(server, service.serve()) => {}
            () = sending => {}
        }
        connection.close();
        let after = self.peers.link(peer);
        let was_fruitless = after.is_some_and(|link| !link.is_idle() && Some(link.taken_in()) == before);
        self.peers.disconnected(peer, &connection, was_fruitless)
    }

    /// A contact has no connection: the process is looked for, until it has come by itself or contact is lost.
    async fn look_for(self: &Arc<Self>, peer: ProcessId, number: u64) -> Option<Stream> {
        let (since, (mut pause, longest)) = (Instant::now(), PAUSES);
        loop {
            // Of one that is gone nobody knows where it is any more.
            if let Some(stream) = self.find(peer, number, longest).await {
                return Some(stream);
            }
            if !self.peers.is_away(peer, number) || self.is_shut_down() {
                return None;
            }
            let cannot_be_found = self.peers.address(peer).is_none() || self.peers.is_fruitless(peer);
            let is_over = cannot_be_found || self.peers.is_gone(peer) || since.elapsed() > limits().contact;
            if is_over || self.head_says_that_it_ended(peer).await {
                self.contact_lost(peer, number);
                return None;
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(longest);
        }
    }

    /// Dials a process that is away, when it is its turn within this time: a node can be lost with thousands of processes, and
    /// each look is a connection.
    async fn find(self: &Arc<Self>, peer: ProcessId, number: u64, limit: Duration) -> Option<Stream> {
        let address = self.peers.address(peer)?;
        let _turn = tokio::time::timeout(limit, self.peers.looks.0.acquire()).await.ok()?;
        match self.peers.is_away(peer, number) && !self.is_shut_down() {
            true => self.reach(&address, number).await,
            false => None,
        }
    }

    async fn head_says_that_it_ended(self: &Arc<Self>, peer: ProcessId) -> bool {
        let Ok(head) = self.head_client().await else { return false };
        let has_ended = matches!(head.has_ended(mux::within(limits().silence), peer).await, Ok(true));
        if has_ended {
            self.peers.certainly_gone(peer);
        }
        has_ended
    }

    /// Whether a batch that has come is to be taken in.
    pub(crate) fn hears(self: &Arc<Self>, peer: ProcessId, contact: u64, number: u64) -> bool {
        loop {
            match self.peers.hear(peer, contact, number) {
                Heard::TakeIn => return true,
                Heard::PassOver => return false,
                Heard::Lost(present) => self.contact_over(peer, present, contact, false),
            }
        }
    }

    /// Contact with a process was lost: the one of this number, if it is not over already.
    fn contact_lost(self: &Arc<Self>, peer: ProcessId, number: u64) {
        self.contact_over(peer, number, number + 1, true);
    }

    /// The contact of this number is over, and the next one has that number: everything that waits for the process must know.
    /// It may be gone, or may be reached again. Its connections are closed if they are dead.
    fn contact_over(self: &Arc<Self>, peer: ProcessId, number: u64, next: u64, are_dead: bool) {
        let (link, dead) = {
            let Some(mut contact) = self.peers.contacts.get_mut(&peer).filter(|contact| contact.number == number)
            else {
                return;
            };
            (contact.number, contact.heard, contact.fruitless) = (next, 0, 0);
            let dead = if are_dead { std::mem::take(&mut contact.connections) } else { Vec::new() };
            (contact.link.take(), dead)
        };
        for connection in dead {
            connection.close();
        }
        let Some(link) = link else { return };
        link.broke();
        if self.is_shut_down() {
            return;
        }
        for id in self.objects.forget_borrower(peer) {
            self.free_if_unneeded(id);
        }
        let pending = self.borrowed_pending(peer);
        let process = self.clone();
        self.io.spawn(async move {
            if !process.peers.is_gone(peer) {
                let _turn = match pending.is_empty() {
                    true => process.peers.looks.0.acquire().await.ok(),
                    false => None,
                };
                if let Some(address) = process.peers.address(peer)
                    && address::is_gone(&address).await
                {
                    process.peers.certainly_gone(peer);
                }
            }
            // Of one that is gone, nothing is kept.
            if process.peers.is_gone(peer) {
                process.peers.forget_contact(peer);
            }
            process.fail_pending(peer, pending);
        });
        self.submission.connection_lost(self, peer);
        if let Some(executor) = self.executor() {
            executor.peer_lost(peer);
        }
    }
}

impl Peers {
    fn hear(&self, peer: ProcessId, number: u64, batch: u64) -> Heard {
        let mut contact = self.contacts.entry(peer).or_default();
        if number > contact.number {
            return Heard::Lost(contact.number);
        }
        if number < contact.number {
            // It does not know yet that this contact is over.
            if let Some(link) = &contact.link {
                link.send(PeerMessage::Borrow(Vec::new()));
            }
            return Heard::PassOver;
        }
        contact.fruitless = 0;
        if batch < contact.heard {
            return Heard::PassOver;
        }
        contact.heard = batch + 1;
        Heard::TakeIn
    }
}

fn messages_of(request: ProcessRequest) -> Vec<PeerMessage> {
    match request {
        ProcessRequest::Deliver { messages, .. } => messages,
        _ => Vec::new(),
    }
}

#[cfg(test)]
#[path = "contact_tests.rs"]
mod tests;
