//! What lies between an owner and the world: it writes down what the owner says, and keeps what its process knows of others.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::Mutex;
use wingbeat_core::spec::{Address, MachineId};
use wingbeat_core::value::StoreNode;
use wingbeat_core::{NodeId, ObjectId, ProcessId};
use wingbeat_net::messages::{HeadMessage, PeerMessage, Registration, Work};
use wingbeat_net::sequence::{Batch, Sequence};

use crate::owner::{Outside, Owner};
use crate::wire::numbers::{Numbers, Receipt};

/// What owners have said and the world has not carried yet, in order.
pub(super) type Said = Arc<Mutex<VecDeque<(ProcessId, Word)>>>;

/// One thing that an owner has said.
pub(super) enum Word {
    /// There is something to be sent to a process.
    Peer(ProcessId),
    Head(HeadMessage),
    Delete(StoreNode, ObjectId),
    /// Work was sent to a process that is gone: its results will never come.
    InVain(ProcessId),
    /// The objects of a process that is gone are kept for some time.
    KeepsForAWhile(ProcessId),
    /// It was asked to end, and does not.
    Stays,
    /// There is something to run in its process.
    HasWorkAtHome,
}

/// The connection between two processes.
pub(super) struct Line {
    /// How many have broken.
    pub connection: u64,
    pub is_up: bool,
}

impl Default for Line {
    fn default() -> Line {
        Line { connection: 0, is_up: true }
    }
}

/// A batch of messages of a contact, on its way over a connection.
pub(super) struct Parcel {
    pub contact: u64,
    pub connection: u64,
    pub batch: Batch<PeerMessage>,
}

/// What waits until something was taken in.
pub(super) enum Awaited {
    /// With this owner, or with the steward of it.
    Registered(ProcessId, Registration),
    Copied(ObjectId, StoreNode),
}

/// What a process knows of its contact with another.
#[derive(Default)]
struct Contact {
    numbers: Numbers,
    /// What is said in it; none while nothing may be said or heard.
    said: Option<Sequence<PeerMessage>>,
    /// Messages that were taken in.
    taken_in: u64,
    awaited: Vec<(u64, Awaited)>,
}

impl Contact {
    fn is_open(&self) -> bool {
        self.said.is_some()
    }
}

#[derive(Default)]
struct Known {
    addresses: BTreeMap<ProcessId, Address>,
    gone: BTreeSet<ProcessId>,
    contacts: BTreeMap<ProcessId, Contact>,
    /// The process has ended.
    is_over: bool,
}

/// The steward of each process that has one: everybody learns it with the address.
pub(super) type Stewards = Arc<Mutex<BTreeMap<ProcessId, ProcessId>>>;

/// The outside of one owner.
pub(super) struct Side {
    pub id: ProcessId,
    stewards: Stewards,
    clock: Arc<AtomicU64>,
    said: Said,
    known: Mutex<Known>,
    pub has_head: AtomicBool,
}

/// Where a process is.
pub(super) fn address(process: ProcessId) -> Address {
    Address { process, machine: MachineId(1), unix: String::new(), tcp: None, steward: None }
}

impl Side {
    pub(super) fn new(id: ProcessId, stewards: Stewards, clock: Arc<AtomicU64>, said: Said) -> Side {
        Side { id, stewards, clock, said, known: Mutex::default(), has_head: AtomicBool::new(true) }
    }

    pub(super) fn steward(&self) -> Option<ProcessId> {
        self.stewards.lock().get(&self.id).copied()
    }

    pub(super) fn stays(&self) {
        self.say(Word::Stays);
    }

    /// Who answers for the objects of a process that is gone.
    fn steward_of(&self, gone: ProcessId) -> Option<ProcessId> {
        let steward = self.stewards.lock().get(&gone).copied()?;
        let known = self.known.lock();
        (known.gone.contains(&gone) && !known.gone.contains(&steward) && steward != self.id).then_some(steward)
    }

    fn say(&self, word: Word) {
        self.said.lock().push_back((self.id, word));
    }

    fn say_in(&self, known: &mut Known, to: ProcessId, message: PeerMessage) {
        let contact = known.contacts.entry(to).or_default();
        contact.said.get_or_insert_default().push(message);
        self.say(Word::Peer(to));
    }

    /// The next batch for a process, of so many messages at most.
    pub(super) fn next_parcel(&self, to: ProcessId, connection: u64, most: usize) -> Option<Parcel> {
        let mut known = self.known.lock();
        let contact = known.contacts.get_mut(&to)?;
        let said = contact.said.as_mut()?;
        let batch = said.next_batch(most)?;
        said.keep(batch.number, batch.messages.clone());
        Some(Parcel { contact: contact.numbers.contact, connection, batch })
    }

    /// The next connection with a process begins.
    pub(super) fn resume(&self, peer: ProcessId) {
        if let Some(said) = self.known.lock().contacts.get_mut(&peer).and_then(|contact| contact.said.as_mut()) {
            said.resume();
        }
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
    pub(super) fn hear(&self, from: ProcessId, parcel: &Parcel) -> Receipt {
        let mut known = self.known.lock();
        let is_of_an_earlier_contact =
            known.contacts.get(&from).is_some_and(|contact| parcel.contact < contact.numbers.contact);
        if is_of_an_earlier_contact && known.gone.contains(&from) {
            // It was under way over a connection that was closed when its sender was known to have ended.
            return Receipt::Stale;
        }
        known.gone.remove(&from);
        known.addresses.entry(from).or_insert_with(|| address(from));
        let contact = known.contacts.entry(from).or_default();
        let expected = contact.numbers.heard;
        let heard = contact.numbers.hear(parcel.contact, parcel.batch.number);
        match heard {
            // The answer tells it of the loss.
            Receipt::Stale => self.say_in(&mut known, from, PeerMessage::Borrow(Vec::new())),
            Receipt::TakeIn => {
                assert_eq!(parcel.batch.number, expected, "{} misses what {from} has said", self.id);
                contact.said.get_or_insert_default();
            }
            Receipt::Again | Receipt::Lost(_) => {}
        }
        heard
    }

    /// The other side has taken a batch in. Answers with what waited for that.
    pub(super) fn answered(&self, by: ProcessId, number: u64, batch: u64) -> Vec<Awaited> {
        let mut known = self.known.lock();
        let contact = known.contacts.get_mut(&by).filter(|contact| contact.numbers.contact == number);
        let Some(contact) = contact else { return Vec::new() };
        contact.numbers.was_connected = true;
        let answered = contact.said.as_mut().and_then(|said| said.answered(batch));
        contact.taken_in += answered.map_or(0, |answered| answered.count);
        let (met, awaited) =
            std::mem::take(&mut contact.awaited).into_iter().partition(|(count, _)| *count <= contact.taken_in);
        contact.awaited = awaited;
        met.into_iter().map(|(_, awaited): (u64, Awaited)| awaited).collect()
    }

    /// Something waits until all that was said so far was taken in. False without contact.
    pub(super) fn await_all(&self, by: ProcessId, what: Awaited) -> bool {
        let mut known = self.known.lock();
        let Some(contact) = known.contacts.get_mut(&by) else { return false };
        let Some(said) = &contact.said else { return false };
        contact.awaited.push((said.queued(), what));
        true
    }

    /// The contact of this number, if there is one in which anything may have been said.
    pub(super) fn contact_with(&self, peer: ProcessId) -> Option<u64> {
        let known = self.known.lock();
        known.contacts.get(&peer).filter(|contact| contact.is_open()).map(|contact| contact.numbers.contact)
    }

    /// A connection carries the contact of this number.
    pub(super) fn connected(&self, peer: ProcessId, number: u64) {
        let mut known = self.known.lock();
        if let Some(contact) = known.contacts.get_mut(&peer).filter(|contact| contact.numbers.contact == number) {
            contact.numbers.was_connected = true;
        }
    }

    pub(super) fn is_connected(&self, peer: ProcessId) -> bool {
        self.known.lock().contacts.get(&peer).is_some_and(|contact| contact.is_open() && contact.numbers.was_connected)
    }

    /// How the next contact is numbered if the present one is lost now.
    pub(super) fn next_contact(&self, peer: ProcessId) -> u64 {
        let known = self.known.lock();
        known.contacts.get(&peer).map_or(0, |contact| contact.numbers.next())
    }

    /// The contact of this number is over. Answers with what waited in it, unless nothing was ever said.
    pub(super) fn end_contact(&self, peer: ProcessId, number: u64, next: u64) -> Option<Vec<Awaited>> {
        let mut known = self.known.lock();
        let contact = known.contacts.get_mut(&peer).filter(|contact| contact.numbers.contact == number)?;
        let over = std::mem::replace(contact, Contact { numbers: Numbers::after(next), ..Contact::default() });
        over.said.is_some().then(|| over.awaited.into_iter().map(|(_, awaited)| awaited).collect())
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
        known.contacts.iter().filter(|(_, contact)| contact.is_open()).map(|(peer, _)| *peer).collect()
    }

    /// Whether everything that was said to one was taken in.
    fn is_flushed_in(contact: &Contact) -> bool {
        contact.said.as_ref().is_none_or(|said| contact.taken_in == said.queued())
    }

    pub(super) fn is_flushed_to(&self, peer: ProcessId) -> bool {
        self.known.lock().contacts.get(&peer).is_none_or(Self::is_flushed_in)
    }

    /// Whether everything that was said was taken in.
    pub(super) fn is_flushed(&self) -> bool {
        self.known.lock().contacts.values().all(Self::is_flushed_in)
    }

    /// Copies of which their owners may not have heard.
    pub(super) fn untold(&self) -> Vec<(ObjectId, NodeId)> {
        let known = self.known.lock();
        let awaited = known.contacts.values().flat_map(|contact| &contact.awaited);
        let copies = awaited.filter_map(|(_, awaited)| match awaited {
            Awaited::Copied(object, at) => Some((*object, at.node)),
            Awaited::Registered(..) => None,
        });
        copies.collect()
    }

    pub(super) fn can_reach(&self, process: ProcessId) -> bool {
        // It knows where it is itself from its start.
        process == self.id || self.is_in_contact(process) || self.knows(process)
    }

    fn is_in_contact(&self, process: ProcessId) -> bool {
        self.contact_with(process).is_some()
    }

    fn knows(&self, process: ProcessId) -> bool {
        self.address_of(process).is_some() && !self.is_gone(process)
    }
}

impl Outside for Side {
    fn has_work_at_home(&self) {
        self.say(Word::HasWorkAtHome);
    }

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
            false if self.steward_of(process).is_some() => Some(address(process)),
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
        let is_open = known.contacts.get(&peer).is_some_and(Contact::is_open);
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
        let address = match self.contact_with(to) {
            Some(_) => Some(address(to)),
            None if message.is_for_owner() && self.has_steward(to) => self.steward_of(to).map(address),
            None => self.address_of(to),
        };
        address.is_some_and(|address| self.send(owner, &address, message))
    }

    fn when_taken_in(&self, _: &Arc<Owner>, by: ProcessId, number: Registration) -> bool {
        let awaited = || Awaited::Registered(by, number);
        self.await_all(by, awaited()) || self.steward_of(by).is_some_and(|steward| self.await_all(steward, awaited()))
    }

    fn lacks_descriptors(&self) -> Option<String> {
        None
    }

    fn has_head(&self) -> bool {
        self.has_head.load(Ordering::Relaxed)
    }

    fn has_steward(&self, gone: ProcessId) -> bool {
        self.steward_of(gone).is_some()
    }

    fn left_to(&self, steward: ProcessId) -> Vec<ProcessId> {
        let stewards = self.stewards.lock();
        let known = self.known.lock();
        let left = stewards.iter().filter(|(gone, its)| **its == steward && known.gone.contains(gone));
        left.map(|(gone, _)| *gone).collect()
    }

    fn tell_steward(&self, owner: &Arc<Owner>, message: PeerMessage) -> bool {
        self.steward().is_some_and(|steward| self.send(owner, &address(steward), message))
    }

    fn keeps_for_a_while(&self, _: &Arc<Owner>, gone: ProcessId) {
        self.say(Word::KeepsForAWhile(gone));
    }

    fn run(&self, code: Box<dyn FnOnce() + Send>) {
        code();
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
