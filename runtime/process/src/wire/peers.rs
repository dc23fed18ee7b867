//! What is known of other processes: where they are, and the contact with each.

use std::collections::{HashMap, VecDeque};
use std::time::Instant;

use dashmap::DashMap;
use parking_lot::{Mutex, RwLock};
use tokio::sync::Semaphore;
use wingbeat_core::ProcessId;
use wingbeat_core::spec::Address;
use wingbeat_net::link::Link;
use wingbeat_net::messages::PeerMessage;
use wingbeat_net::mux::Connection;

use crate::wire::numbers::{Numbers, Receipt};

/// Processes that are remembered to be gone. Whoever is forgotten has no address any more either, so that only somebody who
/// still names it makes this process dial it, and find it gone again.
const GONE: usize = 4_096;
/// Of so many it is remembered who answers for their objects: many more, since refs to those may be held for long.
const LEFT: usize = 1 << 16;

/// Everybody this process talks to, the head excepted.
#[derive(Default)]
pub(crate) struct Peers {
    /// Until it is certain that they are gone ([`Peers::certainly_gone`]): of those with whom there never was contact, nobody
    /// finds that out.
    addresses: DashMap<ProcessId, Address>,
    /// From the first word until it is certain that the other is gone ([`Peers::forget_contact`]).
    pub(crate) contacts: DashMap<ProcessId, Contact>,
    /// Processes of which it is certain that they are gone.
    pub(crate) gone: RwLock<Gone>,
    /// Where those of them were whose stewards are known. Others learn from here whom to ask for their objects.
    left: DashMap<ProcessId, Address>,
    /// The longest gone first.
    left_in_order: Mutex<VecDeque<ProcessId>>,
    pub(crate) looks: Looks,
    /// What the system said when somebody was dialled last, and this process could open nothing more.
    pub(crate) lacks_descriptors: Mutex<Option<String>>,
}

/// Looks for processes, so many at a time: each is a connection, and a node can be lost with thousands.
pub(crate) struct Looks {
    /// For those on other machines with whom there is contact.
    pub away: Semaphore,
    /// For those with whom contact was lost, so that nothing is kept of the dead. The others do not wait for these.
    pub lost: Semaphore,
}

const LOOKS: usize = 64;

impl Default for Looks {
    fn default() -> Looks {
        Looks { away: Semaphore::new(LOOKS), lost: Semaphore::new(LOOKS) }
    }
}

/// Ids are never used again, so that who is gone stays gone.
#[derive(Default)]
pub(crate) struct Gone {
    /// Each with how often contact with it was lost.
    known: HashMap<ProcessId, u64>,
    /// The longest gone first.
    order: VecDeque<ProcessId>,
}

impl Gone {
    pub(crate) fn insert(&mut self, process: ProcessId, losses: u64) {
        if let Some(known) = self.known.get_mut(&process) {
            *known = losses.max(*known);
            return;
        }
        self.known.insert(process, losses);
        self.order.push_back(process);
        if self.order.len() > GONE
            && let Some(oldest) = self.order.pop_front()
        {
            self.known.remove(&oldest);
        }
    }

    pub(crate) fn remove(&mut self, process: ProcessId) -> Option<u64> {
        let losses = self.known.remove(&process)?;
        self.order.retain(|other| *other != process);
        Some(losses)
    }
}

impl Peers {
    /// Remembers where a process is.
    pub(crate) fn learn(&self, address: &Address) {
        if self.is_gone(address.process) {
            if address.steward.is_some() {
                self.has_left(address.process, address.clone());
            }
            return;
        }
        // A driver has its node, and so a steward, only after it has joined.
        let knows_all = |known: &Address| known.steward.is_some() || address.steward.is_none();
        if !self.addresses.get(&address.process).is_some_and(|known| knows_all(&known)) {
            self.addresses.insert(address.process, address.clone());
        }
    }

    pub(crate) fn address(&self, process: ProcessId) -> Option<Address> {
        self.addresses.get(&process).map(|address| address.clone())
    }

    /// Where a process is, or was.
    pub(crate) fn last_address(&self, process: ProcessId) -> Option<Address> {
        self.address(process).or_else(|| self.left.get(&process).map(|address| address.clone()))
    }

    /// Who answers for the objects of a process that is certainly gone, if somebody does.
    pub(crate) fn steward_of(&self, gone: ProcessId) -> Option<Address> {
        let steward = self.left.get(&gone)?.steward.as_deref()?.clone();
        (!self.is_gone(steward.process)).then_some(steward)
    }

    /// Those who are gone and whose steward this is.
    pub(crate) fn left_to(&self, steward: ProcessId) -> Vec<ProcessId> {
        let is_its = |address: &Address| address.steward.as_ref().is_some_and(|its| its.process == steward);
        let mut left: Vec<_> = self.left.iter().filter(|left| is_its(left)).map(|left| *left.key()).collect();
        left.sort_unstable();
        left
    }

    /// What is said to a process, or to the steward of one that is gone.
    pub(crate) fn link_for(&self, process: ProcessId) -> Option<Link<PeerMessage>> {
        self.link(process).or_else(|| self.link(self.steward_of(process)?.process))
    }

    /// Numbers of addresses that are known, and of processes that are known to be gone.
    #[cfg(test)]
    pub(crate) fn size(&self) -> (usize, usize) {
        (self.addresses.len(), self.gone.read().known.len())
    }

    /// Whether anything is kept of connections with a process.
    #[cfg(test)]
    pub(crate) fn has_contact(&self, process: ProcessId) -> bool {
        self.contacts.contains_key(&process)
    }

    pub(crate) fn is_gone(&self, process: ProcessId) -> bool {
        self.gone.read().known.contains_key(&process)
    }

    /// Whether there is a contact with a process, or there can be one.
    pub(crate) fn can_reach(&self, process: ProcessId) -> bool {
        self.is_in_contact(process) || (self.addresses.contains_key(&process) && !self.is_gone(process))
    }

    /// Remembers that a process is certainly gone.
    pub(crate) fn certainly_gone(&self, process: ProcessId) {
        let address = self.addresses.remove(&process).map(|(_, address)| address);
        if let Some(address) = address.filter(|address| address.steward.is_some()) {
            self.has_left(process, address);
        }
        // Afterwards: whoever finds it gone finds its steward.
        self.remember_gone(process, 0);
    }

    fn has_left(&self, process: ProcessId, address: Address) {
        if self.left.insert(process, address).is_some() {
            return;
        }
        let mut order = self.left_in_order.lock();
        order.push_back(process);
        let oldest = if order.len() > LEFT { order.pop_front() } else { None };
        drop(order);
        if let Some(oldest) = oldest {
            self.left.remove(&oldest);
        }
    }

    fn remember_gone(&self, process: ProcessId, losses: u64) {
        self.gone.write().insert(process, losses);
    }

    /// Whoever connects lives. Answers with how often contact with it was lost, if it was taken for gone.
    pub(crate) fn lives(&self, process: ProcessId) -> Option<u64> {
        let losses = self.gone.write().remove(process)?;
        if self.left.remove(&process).is_some() {
            self.left_in_order.lock().retain(|other| *other != process);
        }
        Some(losses)
    }

    /// Waits until everything that was said was taken in, or its receiver is gone.
    pub(crate) async fn flushed(&self) {
        let links: Vec<Link<PeerMessage>> = self.contacts.iter().filter_map(|contact| contact.link.clone()).collect();
        for link in links {
            link.flushed().await;
        }
    }

    /// Waits until everything that was queued for one process, or for the steward of one that is gone, was taken in. False when
    /// contact with it was lost first.
    pub(crate) async fn flushed_to(&self, process: ProcessId) -> bool {
        match self.link_for(process) {
            Some(link) => link.flushed().await,
            None => false,
        }
    }
}

/// What this process knows of its contact with another. Entries stay while the other may live.
#[derive(Default)]
pub(crate) struct Contact {
    pub numbers: Numbers,
    /// What is said in it; none before anything was, and after a loss.
    pub link: Option<Link<PeerMessage>>,
    /// Those that live: two if both sides dialled at once, and none while the other side is looked for.
    pub connections: Vec<Connection>,
    /// Whether the other side has dialled, in this contact or an earlier one. It may be one that nobody else can dial.
    pub has_come: bool,
    /// Somebody looks for the other side.
    pub is_looked_for: bool,
    /// Connections in a row over which nothing was heard. The next is not dialled at once.
    pub flaps: u32,
    /// Since when connections have ended without any answer to what was sent: the next may end as they did.
    pub fruitless_since: Option<Instant>,
}

impl Contact {
    /// After so many losses.
    pub(super) fn after(number: u64) -> Contact {
        Contact { numbers: Numbers::after(number), ..Contact::default() }
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
        (link, contact.numbers.contact, is_new)
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
    pub(super) fn forget_contact(&self, process: ProcessId) {
        let is_over = |_: &ProcessId, contact: &Contact| contact.link.is_none() && contact.connections.is_empty();
        if let Some((_, contact)) = self.contacts.remove_if(&process, is_over) {
            self.remember_gone(process, contact.numbers.contact);
        }
    }

    pub(super) fn comes_by_itself(&self, process: ProcessId) {
        self.contacts.entry(process).or_default().has_come = true;
    }

    pub(super) fn has_come(&self, process: ProcessId) -> bool {
        self.contacts.get(&process).is_some_and(|contact| contact.has_come)
    }

    pub(super) fn is_connected(&self, process: ProcessId) -> bool {
        self.contacts.get(&process).is_some_and(|contact| !contact.connections.is_empty())
    }

    /// Enters a connection of the contact of this number; false if that is over.
    pub(super) fn connected(&self, process: ProcessId, number: u64, connection: &Connection) -> bool {
        let Some(mut contact) = self.contacts.get_mut(&process).filter(|contact| contact.numbers.contact == number)
        else {
            return false;
        };
        contact.connections.push(connection.clone());
        contact.numbers.was_connected = true;
        true
    }

    /// Somebody begins to look for the process of this contact, or ends that; false if somebody does already, or it is over.
    pub(super) fn looks_for(&self, process: ProcessId, number: u64, begins: bool) -> bool {
        let contact = self.contacts.get_mut(&process).filter(|contact| contact.numbers.contact == number);
        contact.is_some_and(|mut contact| std::mem::replace(&mut contact.is_looked_for, begins) != begins)
    }

    /// What is said over a connection, and in which contact; none if it belongs to none any more.
    pub(super) fn carried_by(&self, process: ProcessId, connection: &Connection) -> Option<(Link<PeerMessage>, u64)> {
        let mut contact = self.contacts.get_mut(&process)?;
        contact.connections.iter().any(|other| other.is(connection)).then(|| {
            let link = contact.link.get_or_insert_with(Link::new).clone();
            (link, contact.numbers.contact)
        })
    }

    /// A connection has ended. Answers with the contact that has none any more, if it is not over.
    pub(super) fn disconnected(&self, process: ProcessId, connection: &Connection, life: Life) -> Option<u64> {
        let mut contact = self.contacts.get_mut(&process)?;
        let at = contact.connections.iter().position(|other| other.is(connection))?;
        contact.connections.swap_remove(at);
        contact.flaps = if life.was_silent { contact.flaps.saturating_add(1) } else { 0 };
        let since = contact.fruitless_since.unwrap_or_else(Instant::now);
        contact.fruitless_since = life.was_fruitless.then_some(since);
        contact.connections.is_empty().then_some(contact.numbers.contact)
    }

    /// Whether a process must be looked for: its contact goes on, and has no connection.
    pub(super) fn is_away(&self, process: ProcessId, number: u64) -> bool {
        let contact = self.contacts.get(&process);
        contact.is_some_and(|contact| contact.numbers.contact == number && contact.connections.is_empty())
    }

    /// How many messages were answered in this contact, and how many batches heard.
    pub(super) fn progress(&self, process: ProcessId) -> (u64, u64) {
        let contact = self.contacts.get(&process);
        contact.map_or((0, 0), |contact| (contact.link.as_ref().map_or(0, Link::taken_in), contact.numbers.heard))
    }

    /// How many connections have ended in silence, and since when without fruit.
    pub(super) fn flaps(&self, process: ProcessId) -> (u32, Option<Instant>) {
        self.contacts.get(&process).map(|contact| (contact.flaps, contact.fruitless_since)).unwrap_or_default()
    }
}

impl Peers {
    pub(super) fn hear(&self, peer: ProcessId, number: u64, batch: u64) -> Receipt {
        // Nothing is kept of one that is gone: this came over a connection that ended with the contact.
        let Some(mut contact) = self.contacts.get_mut(&peer) else { return Receipt::Stale };
        let heard = contact.numbers.hear(number, batch);
        match heard {
            Receipt::TakeIn | Receipt::Again => contact.fruitless_since = None,
            Receipt::Stale => {
                // It does not know yet that this contact is over.
                if let Some(link) = &contact.link {
                    link.send(PeerMessage::Borrow(Vec::new()));
                }
            }
            Receipt::Lost(_) => {}
        }
        heard
    }
}

/// How a connection ended.
pub(super) struct Life {
    /// Nothing was answered, or said by the other side.
    pub was_silent: bool,
    /// Something was sent over it, and nothing was answered.
    pub was_fruitless: bool,
}
