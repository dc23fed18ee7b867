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
    /// Whether the other side has dialled, in this contact or an earlier one. It may be one that nobody else can dial.
    has_come: bool,
    /// Whether there was a connection. Before that nothing can have been heard, and the end of a contact is no loss.
    was_connected: bool,
    /// Somebody looks for the other side.
    is_looked_for: bool,
    /// Connections in a row over which nothing was heard. The next is not dialled at once.
    flaps: u32,
    /// Since when connections have ended without any answer to what was sent: the next may end as they did.
    fruitless_since: Option<Instant>,
}

impl Contact {
    /// After so many losses.
    fn after(number: u64) -> Contact {
        Contact { number, ..Contact::default() }
    }
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

    /// Keeps nothing of a contact with a process that is gone but its number, for a while: it might come back after all. One
    /// that somebody is dialling is not over: its loss must be told.
    fn forget_contact(&self, process: ProcessId) {
        let is_over = |_: &ProcessId, contact: &Contact| contact.link.is_none() && contact.connections.is_empty();
        if let Some((_, contact)) = self.contacts.remove_if(&process, is_over) {
            self.gone.write().insert(process, contact.number);
        }
    }

    fn comes_by_itself(&self, process: ProcessId) {
        self.contacts.entry(process).or_default().has_come = true;
    }

    fn has_come(&self, process: ProcessId) -> bool {
        self.contacts.get(&process).is_some_and(|contact| contact.has_come)
    }

    fn is_connected(&self, process: ProcessId) -> bool {
        self.contacts.get(&process).is_some_and(|contact| !contact.connections.is_empty())
    }

    /// Enters a connection of the contact of this number; false if that is over.
    fn connected(&self, process: ProcessId, number: u64, connection: &Connection) -> bool {
        let Some(mut contact) = self.contacts.get_mut(&process).filter(|contact| contact.number == number) else {
            return false;
        };
        contact.connections.push(connection.clone());
        contact.was_connected = true;
        true
    }

    /// Somebody begins to look for the process of this contact, or ends that; false if somebody does already, or it is over.
    fn looks_for(&self, process: ProcessId, number: u64, begins: bool) -> bool {
        let contact = self.contacts.get_mut(&process).filter(|contact| contact.number == number);
        contact.is_some_and(|mut contact| std::mem::replace(&mut contact.is_looked_for, begins) != begins)
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
    fn disconnected(&self, process: ProcessId, connection: &Connection, life: Life) -> Option<u64> {
        let mut contact = self.contacts.get_mut(&process)?;
        let at = contact.connections.iter().position(|other| other.is(connection))?;
        contact.connections.swap_remove(at);
        contact.flaps = if life.was_silent { contact.flaps.saturating_add(1) } else { 0 };
        let since = contact.fruitless_since.unwrap_or_else(Instant::now);
        contact.fruitless_since = life.was_fruitless.then_some(since);
        contact.connections.is_empty().then_some(contact.number)
    }

    /// Whether a process must be looked for: its contact goes on, and has no connection.
    fn is_away(&self, process: ProcessId, number: u64) -> bool {
        let contact = self.contacts.get(&process);
        contact.is_some_and(|contact| contact.number == number && contact.connections.is_empty())
    }

    /// How many messages were answered in this contact, and how many batches heard.
    fn progress(&self, process: ProcessId) -> (u64, u64) {
        let contact = self.contacts.get(&process);
        contact.map_or((0, 0), |contact| (contact.link.as_ref().map_or(0, Link::taken_in), contact.heard))
    }

    /// How many connections have ended in silence, and since when without fruit.
    fn flaps(&self, process: ProcessId) -> (u32, Option<Instant>) {
        self.contacts.get(&process).map(|contact| (contact.flaps, contact.fruitless_since)).unwrap_or_default()
    }
}

/// How a connection ended.
struct Life {
    /// Nothing was answered, or said by the other side.
    was_silent: bool,
    /// Something was sent over it, and nothing was answered.
    was_fruitless: bool,
}

/// What is to be done with a batch.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Heard {
    TakeIn,
    /// It was taken in before.
    Again,
    /// It is of a contact that is over, which the other side does not know yet. It is not answered: it is not taken in.
    Stale,
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
        if matches!(error, DialError::Gone(_)) && self.refusal_is_certain(to) && self.peers.is_away(to.process, number)
        {
            self.peers.certainly_gone(to.process);
        }
        None
    }

    /// Whether a process is gone if nobody listens where it did. On another machine, something between may refuse to let
    /// anybody in who comes from here: of one that has come by itself, the head knows.
    fn refusal_is_certain(&self, address: &Address) -> bool {
        address.machine == self.address().machine || !self.peers.has_come(address.process)
    }

    /// Serves a connection that another process opened.
    pub(crate) async fn accept_peer(self: Arc<Self>, stream: Stream, hello: &Hello) {
        let process = hello.address.process;
        // Whoever connects lives. One that was taken for gone does not know that contact with it was lost.
        let lost = self.peers.gone.write().remove(process).unwrap_or_default();
        self.peers.learn(&hello.address);
        let number = self.peers.contacts.entry(process).or_insert_with(|| Contact::after(lost)).number;
        if hello.losses > number {
            self.contact_over(process, number, hello.losses);
        }
        self.peers.comes_by_itself(process);
        let (link, number, _) = self.peers.link_or_new(process);
        if hello.losses < number {
            // It learns of the loss with the first word.
            link.send(PeerMessage::Borrow(Vec::new()));
        }
        self.see_peer_through(stream, process, number).await;
    }

    /// Serves a connection of somebody who only asks: a daemon, or the head.
    pub(crate) async fn serve_asker(self: Arc<Self>, stream: Stream, asker: ProcessId) {
        let (connection, _, server) =
            mux::connect::<ProcessRequest, ProcessResponse, ProcessRequest, ProcessResponse>(stream, Waiting::Asleep);
        let service = PeerService::new(self.clone(), asker);
        tokio::select! {
            () = mux::serve(server, service.serve()) => {}
            () = self.over() => {}
        }
        connection.close();
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
        let before = self.peers.progress(peer);
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
        mux::beside(mux::serve(server, service.serve()), sending).await;
        connection.close();
        let (after, is_idle) = (self.peers.progress(peer), self.peers.link(peer).is_none_or(|link| link.is_idle()));
        let life = Life { was_silent: after == before, was_fruitless: !is_idle && after.0 == before.0 };
        self.peers.disconnected(peer, &connection, life)
    }

    /// A contact has no connection: the process is looked for, until it has come by itself or contact is lost. One at a time
    /// does so.
    async fn look_for(self: &Arc<Self>, peer: ProcessId, number: u64) -> Option<Stream> {
        if !self.peers.looks_for(peer, number, true) {
            return None;
        }
        let found = self.look_until_it_is_clear(peer, number).await;
        self.peers.looks_for(peer, number, false);
        found
    }

    async fn look_until_it_is_clear(self: &Arc<Self>, peer: ProcessId, number: u64) -> Option<Stream> {
        let (mut pause, longest) = PAUSES;
        let (flaps, fruitless_since) = self.peers.flaps(peer);
        let since = fruitless_since.unwrap_or_else(Instant::now);
        if flaps > 1 {
            pause = (pause * 2u32.saturating_pow(flaps - 1)).min(longest);
            tokio::time::sleep(pause).await;
        }
        loop {
            if since.elapsed() > limits().contact && self.peers.is_away(peer, number) {
                self.contact_lost(peer, number);
                return None;
            }
            // A machine that is gone does not answer for as long as dialling may take. The head knows sooner.
            let found = tokio::select! {
                found = self.find(peer, number, longest) => found,
                () = self.until_the_head_says_that_it_ended(peer, number) => None,
            };
            if found.is_some() {
                return found;
            }
            if !self.peers.is_away(peer, number) || self.is_shut_down() {
                return None;
            }
            // It may come back while the head is asked.
            let is_over = self.cannot_be_found(peer) || self.head_says_that_it_ended(peer, number).await;
            if is_over && self.peers.is_away(peer, number) {
                self.contact_lost(peer, number);
                return None;
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(longest);
        }
    }

    /// Whether looking for a process is in vain.
    fn cannot_be_found(&self, peer: ProcessId) -> bool {
        let can_be_dialled = |address: Address| address.tcp.is_some() || address.machine == self.address().machine;
        self.peers.is_gone(peer) || !self.peers.address(peer).is_some_and(can_be_dialled)
    }

    /// Dials a process that is away; one of another machine when it is its turn within this time: a node can be lost with
    /// thousands of processes, and each look is a connection.
    async fn find(self: &Arc<Self>, peer: ProcessId, number: u64, limit: Duration) -> Option<Stream> {
        let address = self.peers.address(peer)?;
        let _turn = match address.machine == self.address().machine {
            true => None,
            false => Some(tokio::time::timeout(limit, self.peers.looks.away.acquire()).await.ok()?),
        };
        match self.peers.is_away(peer, number) && !self.is_shut_down() {
            true => self.reach(&address, number).await,
            false => None,
        }
    }

    async fn until_the_head_says_that_it_ended(self: &Arc<Self>, peer: ProcessId, number: u64) {
        let (_, pause) = PAUSES;
        loop {
            tokio::time::sleep(pause).await;
            if self.head_says_that_it_ended(peer, number).await {
                return;
            }
        }
    }

    async fn head_says_that_it_ended(self: &Arc<Self>, peer: ProcessId, number: u64) -> bool {
        let Ok(head) = self.head_client().await else { return false };
        let has_ended = matches!(head.has_ended(mux::within(limits().silence), peer).await, Ok(true));
        if has_ended && self.peers.is_away(peer, number) {
            self.peers.certainly_gone(peer);
        }
        has_ended
    }

    /// What is to be done with a batch that has come.
    pub(crate) fn hears(self: &Arc<Self>, peer: ProcessId, contact: u64, number: u64) -> Heard {
        loop {
            match self.peers.hear(peer, contact, number) {
                // The connection has carried what was said in the old contact, and ends with it. The new contact must have
                // one: nobody would notice that the other side is gone.
                Heard::Lost(present) => {
                    self.contact_over(peer, present, contact);
                    let (link, number, is_new) = self.peers.link_or_new(peer);
                    if is_new {
                        link.send(PeerMessage::Borrow(Vec::new()));
                        let process = self.clone();
                        self.io.spawn(async move { process.dial_peer(peer, number).await });
                    }
                }
                heard => return heard,
            }
        }
    }

    /// Contact with a process was lost: the one of this number, if it is not over already.
    fn contact_lost(self: &Arc<Self>, peer: ProcessId, number: u64) {
        let was_connected = self.peers.contacts.get(&peer).is_some_and(|contact| contact.was_connected);
        self.contact_over(peer, number, number + u64::from(was_connected));
    }

    /// The contact of this number is over, and the next one has that number: everything that waits for the process must know.
    /// It may be gone, or may be reached again.
    fn contact_over(self: &Arc<Self>, peer: ProcessId, number: u64, next: u64) {
        let (link, connections) = {
            let Some(mut contact) = self.peers.contacts.get_mut(&peer).filter(|contact| contact.number == number)
            else {
                return;
            };
            let new = Contact { has_come: contact.has_come, ..Contact::after(next) };
            let over = std::mem::replace(&mut *contact, new);
            (over.link, over.connections)
        };
        for connection in connections {
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
                    true => process.peers.looks.lost.acquire().await.ok(),
                    false => None,
                };
                if let Some(address) = process.peers.address(peer)
                    && address::is_gone(&address).await
                    && !process.peers.is_connected(peer)
                {
                    match process.refusal_is_certain(&address) {
                        true => process.peers.certainly_gone(peer),
                        false => drop(process.head_says_that_it_ended(peer, next).await),
                    }
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
        // Nothing is kept of one that is gone: this came over a connection that ended with the contact.
        let Some(mut contact) = self.contacts.get_mut(&peer) else { return Heard::Stale };
        if number > contact.number {
            return Heard::Lost(contact.number);
        }
        if number < contact.number {
            // It does not know yet that this contact is over.
            if let Some(link) = &contact.link {
                link.send(PeerMessage::Borrow(Vec::new()));
            }
            return Heard::Stale;
        }
        contact.fruitless_since = None;
        if batch < contact.heard {
            return Heard::Again;
        }
        contact.heard = batch + 1;
        // It may have come over a connection that ended with the contact before.
        contact.was_connected = true;
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
