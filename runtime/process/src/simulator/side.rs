//! What lies between an owner and the world: it writes down what the owner says, and keeps what its process knows of others.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use wingbeat_core::spec::{Address, MachineId};
use wingbeat_core::value::StoreNode;
use wingbeat_core::{NodeId, ObjectId, ProcessId};
use wingbeat_net::messages::{HeadMessage, PeerMessage, Registration, Work};

use crate::owner::{Outside, Owner};

/// What owners have said and the world has not carried yet, in order.
pub(super) type Said = Arc<Mutex<VecDeque<(ProcessId, Word)>>>;

/// One thing that an owner has said.
pub(super) enum Word {
    Peer(ProcessId, Parcel),
    Head(HeadMessage),
    Delete(StoreNode, ObjectId),
    /// Work was sent to a process that is gone: its results will never come.
    InVain(ProcessId),
}

/// A message of a contact.
pub(super) struct Parcel {
    pub contact: u64,
    pub number: u64,
    pub message: PeerMessage,
}

/// What waits until something was taken in.
pub(super) enum Awaited {
    Registered(Registration),
    Copied(ObjectId, StoreNode),
}

/// What is to be done with a message.
#[derive(PartialEq, Debug)]
pub(super) enum Heard {
    TakeIn,
    /// It is of a contact that is over here.
    Stale,
    /// The other side has lost this contact.
    Lost(u64),
}

/// What a process knows of its contact with another.
#[derive(Default)]
struct Contact {
    /// How often contact was lost before.
    number: u64,
    /// Whether anything may be said or heard in it.
    is_open: bool,
    was_connected: bool,
    said: u64,
    taken_in: u64,
    heard: u64,
    awaited: Vec<(u64, Awaited)>,
}

#[derive(Default)]
struct Known {
    addresses: BTreeMap<ProcessId, Address>,
    gone: BTreeSet<ProcessId>,
    contacts: BTreeMap<ProcessId, Contact>,
    /// The process has ended.
    is_over: bool,
}

/// The outside of one owner.
pub(super) struct Side {
    pub id: ProcessId,
    clock: Arc<AtomicU64>,
    said: Said,
    known: Mutex<Known>,
}

/// Where a process is.
pub(super) fn address(process: ProcessId) -> Address {
    Address { process, machine: MachineId(1), unix: String::new(), tcp: None }
}

impl Side {
    pub(super) fn new(id: ProcessId, clock: Arc<AtomicU64>, said: Said) -> Side {
        Side { id, clock, said, known: Mutex::default() }
    }

    fn say(&self, word: Word) {
        self.said.lock().push_back((self.id, word));
    }

    fn say_in(&self, known: &mut Known, to: ProcessId, message: PeerMessage) {
        let contact = known.contacts.entry(to).or_default();
        contact.is_open = true;
        let parcel = Parcel { contact: contact.number, number: contact.said, message };
        contact.said += 1;
        self.say(Word::Peer(to, parcel));
    }

    /// Says nothing any more.
    pub(super) fn end(&self) {
        self.known.lock().is_over = true;
    }

    /// It is certain that a process has ended.
    pub(super) fn certainly_gone(&self, process: ProcessId) {
        let mut known = self.known.lock();
        known.gone.insert(process);
        known.addresses.remove(&process);
    }

    /// What is to be done with a message of another process, which lives if it is heard.
    pub(super) fn hear(&self, from: ProcessId, parcel: &Parcel) -> Heard {
        let mut known = self.known.lock();
        known.gone.remove(&from);
        known.addresses.entry(from).or_insert_with(|| address(from));
        let contact = known.contacts.entry(from).or_default();
        if parcel.contact > contact.number {
            return Heard::Lost(contact.number);
        }
        if parcel.contact < contact.number {
            // The answer tells it of the loss.
            self.say_in(&mut known, from, PeerMessage::Borrow(Vec::new()));
            return Heard::Stale;
        }
        assert_eq!(parcel.number, contact.heard, "{} hears {from} out of order", self.id);
        contact.heard += 1;
        contact.is_open = true;
        contact.was_connected = true;
        Heard::TakeIn
    }

    /// The other side has taken in so many messages. Answers with what waited for that.
    pub(super) fn taken_in(&self, by: ProcessId, number: u64, count: u64) -> Vec<Awaited> {
        let mut known = self.known.lock();
        let Some(contact) = known.contacts.get_mut(&by).filter(|contact| contact.number == number) else {
            return Vec::new();
        };
        contact.was_connected = true;
        contact.taken_in = contact.taken_in.max(count);
        let (met, awaited) =
            std::mem::take(&mut contact.awaited).into_iter().partition(|(count, _)| *count <= contact.taken_in);
        contact.awaited = awaited;
        met.into_iter().map(|(_, awaited): (u64, Awaited)| awaited).collect()
    }

    /// Something waits until all that was said so far was taken in. False without contact.
    pub(super) fn await_all(&self, by: ProcessId, what: Awaited) -> bool {
        let mut known = self.known.lock();
        let Some(contact) = known.contacts.get_mut(&by).filter(|contact| contact.is_open) else { return false };
        contact.awaited.push((contact.said, what));
        true
    }

    /// The contact of this number, if there is one in which anything may have been said.
    pub(super) fn contact_with(&self, peer: ProcessId) -> Option<u64> {
        let known = self.known.lock();
        known.contacts.get(&peer).filter(|contact| contact.is_open).map(|contact| contact.number)
    }

    /// A connection carries the contact of this number.
    pub(super) fn connected(&self, peer: ProcessId, number: u64) {
        let mut known = self.known.lock();
        if let Some(contact) = known.contacts.get_mut(&peer).filter(|contact| contact.number == number) {
            contact.was_connected = true;
        }
    }

    pub(super) fn is_connected(&self, peer: ProcessId) -> bool {
        self.known.lock().contacts.get(&peer).is_some_and(|contact| contact.is_open && contact.was_connected)
    }

    /// How the next contact is numbered if the present one is lost now.
    pub(super) fn next_contact(&self, peer: ProcessId) -> u64 {
        let known = self.known.lock();
        known.contacts.get(&peer).map_or(0, |contact| contact.number + u64::from(contact.was_connected))
    }

    /// The contact of this number is over. Answers with what waited in it, unless nothing was ever said.
    pub(super) fn end_contact(&self, peer: ProcessId, number: u64, next: u64) -> Option<Vec<Awaited>> {
        let mut known = self.known.lock();
        let contact = known.contacts.get_mut(&peer).filter(|contact| contact.number == number)?;
        let over = std::mem::replace(contact, Contact { number: next, ..Contact::default() });
        over.is_open.then(|| over.awaited.into_iter().map(|(_, awaited)| awaited).collect())
    }

    /// Begins a contact if there is none, so that the other side learns its number.
    pub(super) fn greet(&self, peer: ProcessId) {
        let mut known = self.known.lock();
        if !known.is_over {
            self.say_in(&mut known, peer, PeerMessage::Borrow(Vec::new()));
        }
    }

    /// Those with whom there is contact.
    pub(super) fn peers(&self) -> Vec<ProcessId> {
        let known = self.known.lock();
        known.contacts.iter().filter(|(_, contact)| contact.is_open).map(|(peer, _)| *peer).collect()
    }

    /// Whether everything that was said was taken in.
    pub(super) fn is_flushed(&self) -> bool {
        let known = self.known.lock();
        known.contacts.values().all(|contact| !contact.is_open || contact.taken_in == contact.said)
    }

    /// Copies of which their owners may not have heard.
    pub(super) fn untold(&self) -> Vec<(ObjectId, NodeId)> {
        let known = self.known.lock();
        let awaited = known.contacts.values().flat_map(|contact| &contact.awaited);
        let copies = awaited.filter_map(|(_, awaited)| match awaited {
            Awaited::Copied(object, at) => Some((*object, at.node)),
            Awaited::Registered(_) => None,
        });
        copies.collect()
    }

    pub(super) fn can_reach(&self, process: ProcessId) -> bool {
        self.is_in_contact(process) || self.address_of(process).is_some() && !self.is_gone(process)
    }
}

impl Outside for Side {
    fn now_ms(&self) -> u64 {
        self.clock.load(Ordering::Relaxed)
    }

    fn learn(&self, address: &Address) {
        let mut known = self.known.lock();
        if !known.gone.contains(&address.process) {
            known.addresses.entry(address.process).or_insert_with(|| address.clone());
        }
    }

    fn address_of(&self, process: ProcessId) -> Option<Address> {
        match process == self.id {
            true => Some(address(process)),
            false => self.known.lock().addresses.get(&process).cloned(),
        }
    }

    fn is_gone(&self, process: ProcessId) -> bool {
        self.known.lock().gone.contains(&process)
    }

    fn send(&self, _: &Arc<Owner>, to: &Address, message: PeerMessage) -> bool {
        let mut known = self.known.lock();
        if known.is_over {
            return false;
        }
        let peer = to.process;
        let is_open = known.contacts.get(&peer).is_some_and(|contact| contact.is_open);
        if !is_open && known.gone.contains(&peer) {
            if matches!(message, PeerMessage::Work(Work::Tasks { .. } | Work::Calls { .. })) {
                self.say(Word::InVain(peer));
            }
            return false;
        }
        known.addresses.entry(peer).or_insert_with(|| to.clone());
        self.say_in(&mut known, peer, message);
        true
    }

    fn send_to(&self, owner: &Arc<Owner>, to: ProcessId, message: PeerMessage, _: bool) -> bool {
        let address = match self.is_in_contact(to) {
            true => Some(address(to)),
            false => self.address_of(to),
        };
        address.is_some_and(|address| self.send(owner, &address, message))
    }

    fn when_taken_in(&self, _: &Arc<Owner>, by: ProcessId, number: Registration) -> bool {
        self.await_all(by, Awaited::Registered(number))
    }

    fn is_in_contact(&self, process: ProcessId) -> bool {
        self.contact_with(process).is_some()
    }

    fn tell_head(&self, _: &Arc<Owner>, message: HeadMessage) {
        if !self.known.lock().is_over {
            self.say(Word::Head(message));
        }
    }

    fn delete_at(&self, _: &Arc<Owner>, at: &StoreNode, object: ObjectId) {
        if !self.known.lock().is_over {
            self.say(Word::Delete(at.clone(), object));
        }
    }

    fn has_ebbed(&self, _: &Arc<Owner>) {}
}
