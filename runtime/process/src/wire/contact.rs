//! Contact with other processes, which outlives connections.
//!
//! Two processes that talk to each other have a *contact*. What one says to the other goes over one link, which is carried by
//! one connection at a time: who has something to say dials, and either side may use what the other has dialled. A
//! connection that ends is no loss. Both sides look for each other, and what was not answered is sent again over the next one
//! ([`Link::carry`]); the receiver passes over what it has taken in (`Numbers::heard`).
//!
//! A contact is lost when the other process is certainly gone (nobody listens where it did, or the head says so), when it could
//! not be found for as long as [`wingbeat_net::limits::Limits::contact`], or when the other side has lost it. Then whatever
//! waits for that process is told. It may live all the same: who has something to say afterwards begins the next contact, of
//! a higher number. Every batch carries the number of its contact, so that a side that has not noticed the loss learns of
//! it with the first word of the other, and what it said in the old contact is not taken for part of the new one.

use std::panic::AssertUnwindSafe;
use std::time::{Duration, Instant};

use futures::FutureExt;
use wingbeat_core::ProcessId;
use wingbeat_core::error::Error;
use wingbeat_core::spec::Address;
use wingbeat_net::address::{self, DialError, Stream};
use wingbeat_net::handshake::{Hello, Purpose};
use wingbeat_net::limits::limits;
use wingbeat_net::messages::PeerMessage;
use wingbeat_net::mux::{self, Waiting};
use wingbeat_net::services::{Process as _, ProcessRequest, ProcessResponse};

use crate::recorded::Event;
use crate::wire::numbers::Receipt;
use crate::wire::peers::{Contact, Life};
use crate::wire::process::Process;
use crate::wire::service::PeerService;

/// The first pause before a process is looked for again, and the longest.
const PAUSES: (Duration, Duration) = (Duration::from_millis(5), Duration::from_secs(1));

impl Process {
    /// Begins a contact.
    pub(crate) async fn dial_peer(self, peer: ProcessId, number: u64) {
        let address = self.wire.peers.address(peer);
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
        let dialled = address::dial_known(to, "a process of the job", &self.wire.who.token, hello).await;
        // Whoever was dialled otherwise was dialled with a descriptor.
        *self.wire.peers.lacks_descriptors.lock() = match &dialled {
            Err(DialError::Failed(Error::OutOfDescriptors { why, .. })) => Some(why.clone()),
            _ => None,
        };
        let error = match dialled {
            Ok(stream) => return Some(stream),
            Err(error) => error,
        };
        tracing::debug!(%error, peer = %to.process, "cannot reach a peer");
        if matches!(error, DialError::Gone(_))
            && self.refusal_is_certain(to)
            && self.wire.peers.is_away(to.process, number)
        {
            self.wire.peers.certainly_gone(to.process);
        }
        None
    }

    /// Whether a process is gone if nobody listens where it did. On another machine, something between may refuse to let
    /// anybody in who comes from here: of one that has come by itself, the head knows.
    fn refusal_is_certain(&self, address: &Address) -> bool {
        address.machine == self.address().machine || !self.wire.peers.has_come(address.process)
    }

    /// Serves a connection that another process opened.
    pub(crate) async fn accept_peer(self, stream: Stream, hello: &Hello) {
        let process = hello.address.process;
        // Whoever connects lives. One that was taken for gone does not know that contact with it was lost.
        let lost = self.wire.peers.lives(process).unwrap_or_default();
        self.wire.peers.learn(&hello.address);
        let number = self.wire.peers.contacts.entry(process).or_insert_with(|| Contact::after(lost)).numbers.contact;
        if hello.losses > number {
            self.contact_over(process, number, hello.losses);
        }
        self.wire.peers.comes_by_itself(process);
        let (link, number, _) = self.wire.peers.link_or_new(process);
        if hello.losses < number {
            // It learns of the loss with the first word.
            link.send(PeerMessage::Borrow(Vec::new()));
        }
        self.see_peer_through(stream, process, number).await;
    }

    /// Serves a connection of somebody who only asks: a daemon, or the head.
    pub(crate) async fn serve_asker(self, stream: Stream, asker: ProcessId) {
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
    async fn see_peer_through(&self, stream: Stream, peer: ProcessId, number: u64) {
        let mut next = Some((stream, number));
        while let Some((stream, number)) = next {
            next = match AssertUnwindSafe(self.run_peer(stream, peer, number)).catch_unwind().await {
                Ok(None) => None,
                Ok(Some(number)) => self.look_for(peer, number).await.map(|stream| (stream, number)),
                Err(_) => {
                    tracing::error!(%peer, "a message of a peer could not be taken in; contact with it ends");
                    let present = self.wire.peers.contacts.get(&peer).map(|contact| contact.numbers.contact);
                    self.contact_lost(peer, present.unwrap_or(number));
                    None
                }
            };
        }
    }

    /// Answers with the contact that has no connection any more when this one has ended.
    async fn run_peer(&self, stream: Stream, peer: ProcessId, number: u64) -> Option<u64> {
        let (connection, _, server) =
            mux::connect::<ProcessRequest, ProcessResponse, ProcessRequest, ProcessResponse>(stream, Waiting::Awake);
        if !self.wire.peers.connected(peer, number, &connection) {
            // Contact was lost while this was dialled or introduced itself.
            connection.close();
            return None;
        }
        self.wire.record(|| Event::Connected(peer, number));
        let service = PeerService::new(self.clone(), peer);
        let before = self.wire.peers.progress(peer);
        let sending = async {
            // The contact may be lost, and the next one go over the same connection.
            while let Some((link, contact)) = self.wire.peers.carried_by(peer, &connection) {
                let request = |number, messages| ProcessRequest::Deliver { contact, number, messages };
                link.carry(&connection, request, messages_of).await;
                if !link.is_broken() {
                    return connection.closed().await;
                }
            }
        };
        mux::beside(mux::serve(server, service.serve()), sending).await;
        connection.close();
        self.wire.record(|| Event::Disconnected(peer));
        let (after, is_idle) =
            (self.wire.peers.progress(peer), self.wire.peers.link(peer).is_none_or(|link| link.is_idle()));
        let life = Life { was_silent: after == before, was_fruitless: !is_idle && after.0 == before.0 };
        self.wire.peers.disconnected(peer, &connection, life)
    }

    /// A contact has no connection: the process is looked for, until it has come by itself or contact is lost. One at a time
    /// does so.
    async fn look_for(&self, peer: ProcessId, number: u64) -> Option<Stream> {
        if !self.wire.peers.looks_for(peer, number, true) {
            return None;
        }
        let found = self.look_until_it_is_clear(peer, number).await;
        self.wire.peers.looks_for(peer, number, false);
        found
    }

    async fn look_until_it_is_clear(&self, peer: ProcessId, number: u64) -> Option<Stream> {
        let (mut pause, longest) = PAUSES;
        let (flaps, fruitless_since) = self.wire.peers.flaps(peer);
        let since = fruitless_since.unwrap_or_else(Instant::now);
        if flaps > 1 {
            pause = (pause * 2u32.saturating_pow(flaps - 1)).min(longest);
            tokio::time::sleep(pause).await;
        }
        loop {
            if since.elapsed() > limits().contact && self.wire.peers.is_away(peer, number) {
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
            if !self.wire.peers.is_away(peer, number) || self.is_shut_down() {
                return None;
            }
            // It may come back while the head is asked.
            let is_over = self.cannot_be_found(peer) || self.head_says_that_it_ended(peer, number).await;
            if is_over && self.wire.peers.is_away(peer, number) {
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
        self.wire.peers.is_gone(peer) || !self.wire.peers.address(peer).is_some_and(can_be_dialled)
    }

    /// Dials a process that is away; one of another machine when it is its turn within this time: a node can be lost with
    /// thousands of processes, and each look is a connection.
    async fn find(&self, peer: ProcessId, number: u64, limit: Duration) -> Option<Stream> {
        let address = self.wire.peers.address(peer)?;
        let _turn = match address.machine == self.address().machine {
            true => None,
            false => Some(tokio::time::timeout(limit, self.wire.peers.looks.away.acquire()).await.ok()?),
        };
        match self.wire.peers.is_away(peer, number) && !self.is_shut_down() {
            true => self.reach(&address, number).await,
            false => None,
        }
    }

    async fn until_the_head_says_that_it_ended(&self, peer: ProcessId, number: u64) {
        let (_, pause) = PAUSES;
        loop {
            tokio::time::sleep(pause).await;
            if self.head_says_that_it_ended(peer, number).await {
                return;
            }
        }
    }

    async fn head_says_that_it_ended(&self, peer: ProcessId, number: u64) -> bool {
        let Some(head) = self.connected_head() else { return false };
        let has_ended = matches!(head.has_ended(mux::within(limits().silence), peer).await, Ok(true));
        if has_ended && self.wire.peers.is_away(peer, number) {
            self.wire.peers.certainly_gone(peer);
        }
        has_ended
    }

    /// What is to be done with a batch that has come.
    pub(crate) fn hears(&self, peer: ProcessId, contact: u64, number: u64) -> Receipt {
        loop {
            match self.wire.peers.hear(peer, contact, number) {
                // The connection has carried what was said in the old contact, and ends with it. The new contact must have
                // one: nobody would notice that the other side is gone.
                Receipt::Lost(present) => {
                    self.contact_over(peer, present, contact);
                    let (link, number, is_new) = self.wire.peers.link_or_new(peer);
                    if is_new {
                        link.send(PeerMessage::Borrow(Vec::new()));
                        let process = self.clone();
                        self.vital("a contact", async move { process.dial_peer(peer, number).await });
                    }
                }
                heard => return heard,
            }
        }
    }

    /// Contact with a process was lost: the one of this number, if it is not over already.
    fn contact_lost(&self, peer: ProcessId, number: u64) {
        let next = self.wire.peers.contacts.get(&peer).map(|contact| contact.numbers.next());
        self.contact_over(peer, number, next.unwrap_or(number));
    }

    /// The contact of this number is over, and the next one has that number: everything that waits for the process must know.
    /// It may be gone, or may be reached again.
    fn contact_over(&self, peer: ProcessId, number: u64, next: u64) {
        let (link, connections) = {
            let Some(mut contact) =
                self.wire.peers.contacts.get_mut(&peer).filter(|contact| contact.numbers.contact == number)
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
        self.wire.record(|| Event::ContactLost(peer, number));
        link.broke();
        if self.is_shut_down() {
            return;
        }
        self.owner.borrower_lost(peer);
        let borrowed = self.owner.borrowed_over(peer);
        if self.wire.steward.get().is_some_and(|steward| steward.process == peer) {
            self.owner.shadow_anew();
        }
        let process = self.clone();
        self.vital("the loss of a contact", async move {
            if !process.wire.peers.is_gone(peer) {
                let _turn = match borrowed.is_empty() {
                    true => process.wire.peers.looks.lost.acquire().await.ok(),
                    false => None,
                };
                if let Some(address) = process.wire.peers.address(peer)
                    && address::is_gone(&address).await
                    && !process.wire.peers.is_connected(peer)
                {
                    match process.refusal_is_certain(&address) {
                        true => process.wire.peers.certainly_gone(peer),
                        false => drop(process.head_says_that_it_ended(peer, next).await),
                    }
                }
            }
            // Of one that is gone, nothing is kept.
            if process.wire.peers.is_gone(peer) {
                process.wire.peers.forget_contact(peer);
            }
            process.owner.settle_borrowed(peer, borrowed);
        });
        self.owner.connection_lost(peer);
        if let Some(executor) = self.executor() {
            executor.peer_lost(peer);
        }
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
