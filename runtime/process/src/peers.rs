//! What is said to other processes, and which refs of theirs are registered.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;

use dashmap::DashMap;
use parking_lot::{Mutex, RwLock};
use tokio::sync::Semaphore;
use wingbeat_core::error::Error;
use wingbeat_core::spec::Address;
use wingbeat_core::value::ObjectValue;
use wingbeat_core::{ActorId, ObjectId, ProcessId};
use wingbeat_net::link::{IDS_A_MESSAGE, Link};
use wingbeat_net::messages::{PeerMessage, Registration};

use crate::borrowing::{Borrowing, Ready};
use crate::contact::Contact;
use crate::object::{Handle, Object, Released};
use crate::process::Process;
use crate::session::Session;

/// Processes that are remembered to be gone. Whoever is forgotten has no address any more either, so that only somebody who
/// still names it makes this process dial it, and find it gone again.
const GONE: usize = 4_096;

/// A message that confirms refs, and to whom it goes.
pub(crate) type Confirmation = (ProcessId, PeerMessage);

/// Everybody this process talks to, the head excepted.
#[derive(Default)]
pub(crate) struct Peers {
    addresses: DashMap<ProcessId, Address>,
    pub(crate) contacts: DashMap<ProcessId, Contact>,
    /// Processes of which it is certain that they are gone.
    pub(crate) gone: RwLock<Gone>,
    /// What is borrowed from others, and what waits until it is registered with them.
    pub(crate) borrowing: Mutex<Borrowing<Confirmation>>,
    /// Objects of each owner whose values it was asked for.
    asked: DashMap<ProcessId, HashSet<ObjectId>>,
    /// Says that nothing waits in `borrowing`.
    confirmed: tokio::sync::Notify,
    pub(crate) looks: Looks,
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
        if !self.addresses.contains_key(&address.process) && !self.is_gone(address.process) {
            self.addresses.insert(address.process, address.clone());
        }
    }

    pub(crate) fn address(&self, process: ProcessId) -> Option<Address> {
        self.addresses.get(&process).map(|address| address.clone())
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

    /// The owner of `id` is asked for its value: if contact with it is lost first, nobody may wait for that any more.
    pub(crate) fn asks_for(&self, id: ObjectId) {
        self.asked.entry(id.owner()).or_default().insert(id);
    }

    pub(crate) fn asks_no_more_for(&self, id: ObjectId) {
        self.asked.remove_if_mut(&id.owner(), |_, asked| {
            asked.remove(&id);
            asked.is_empty()
        });
    }

    /// Whether there is a contact with a process, or there can be one.
    pub(crate) fn can_reach(&self, process: ProcessId) -> bool {
        self.is_in_contact(process) || (self.addresses.contains_key(&process) && !self.is_gone(process))
    }

    /// Remembers that a process is certainly gone.
    pub(crate) fn certainly_gone(&self, process: ProcessId) {
        self.gone.write().insert(process, 0);
        self.addresses.remove(&process);
    }

    /// Waits until everything that was queued was taken in, or its receiver is gone.
    pub(crate) async fn flushed(&self) {
        loop {
            let confirmed = self.confirmed.notified();
            if self.borrowing.lock().is_idle() {
                break;
            }
            confirmed.await;
        }
        let links: Vec<Link<PeerMessage>> = self.contacts.iter().filter_map(|contact| contact.link.clone()).collect();
        for link in links {
            link.flushed().await;
        }
    }

    /// Waits until everything that was queued for one process was taken in. False when contact with it was lost first.
    pub(crate) async fn flushed_to(&self, process: ProcessId) -> bool {
        match self.link(process) {
            Some(link) => link.flushed().await,
            None => false,
        }
    }
}

impl Process {
    /// Queues a message to a process whose address is known. False when it is gone.
    pub(crate) fn send(self: &Arc<Self>, to: &Address, message: PeerMessage) -> bool {
        let Err(message) = self.peers.say(to.process, message) else { return true };
        if self.peers.is_gone(to.process) {
            if matches!(message, PeerMessage::Tasks { .. } | PeerMessage::Calls { .. }) {
                // Somebody waits for their results.
                let (process, gone) = (self.clone(), to.process);
                self.io.spawn(async move { process.submission.connection_lost(&process, gone) });
            }
            return false;
        }
        self.peers.learn(to);
        let (link, contact, is_new) = self.peers.link_or_new(to.process);
        link.send(message);
        if is_new {
            let (process, peer) = (self.clone(), to.process);
            self.io.spawn(async move { process.dial_peer(peer, contact).await });
        }
        true
    }

    /// Queues a message to a process by id. False when nobody knows where it is, or it is gone.
    pub(crate) fn send_to(self: &Arc<Self>, to: ProcessId, message: PeerMessage) -> bool {
        let Err(message) = self.peers.say(to, message) else { return true };
        self.peers.address(to).is_some_and(|address| self.send(&address, message))
    }

    /// Fails what was asked of an owner contact with which was lost.
    pub(crate) fn fail_pending(self: &Arc<Self>, owner: ProcessId, pending: Vec<Arc<Object>>) {
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
            self.resolve_object(&object, ObjectValue::Failed(Box::new(error)), Vec::new());
        }
    }

    /// Nobody knows where `owner` is.
    fn owner_gone(self: &Arc<Self>, owner: ProcessId) {
        for object in self.borrowed_pending(owner) {
            let error = self.ended().cloned().unwrap_or(Error::OwnerDied { object: object.id(), owner });
            self.resolve_object(&object, ObjectValue::Failed(Box::new(error)), Vec::new());
        }
    }

    /// Nothing waits for registrations with `owner` any more. Answers with its objects whose values are awaited here.
    pub(crate) fn borrowed_pending(self: &Arc<Self>, owner: ProcessId) -> Vec<Arc<Object>> {
        let mut ready = Vec::new();
        let borrowed = self.peers.borrowing.lock().gone(owner, &mut ready);
        // What was registered over an earlier contact can still be asked for.
        let mut awaited = self.peers.asked.remove(&owner).map(|(_, asked)| asked).unwrap_or_default();
        awaited.extend(borrowed);
        let objects = awaited.into_iter().filter_map(|id| self.objects.get(id));
        let pending = objects.filter(|object| !object.is_ready()).collect();
        self.send_ready(ready);
        pending
    }

    /// `handle` is the handle object of `actor`: what is known of the actor goes with it. An owner knows it already.
    pub(crate) fn know_actor(&self, handle: ObjectId, actor: ActorId) {
        if handle.owner() != self.id {
            self.handles.insert(handle, actor);
        }
    }

    /// A borrowed object, or one of ours that is referred to from outside.
    pub(crate) fn borrow(self: &Arc<Self>, session: &Session, id: ObjectId) -> Handle {
        let (handle, new) = self.hold(session, id);
        if new {
            self.send_registrations();
        }
        handle
    }

    /// Handles of several, which are registered together.
    pub(crate) fn borrow_all(self: &Arc<Self>, session: &Session, ids: &[ObjectId]) -> Vec<Handle> {
        let mut any_new = false;
        let handles = ids.iter().map(|id| {
            let (handle, new) = self.hold(session, *id);
            any_new |= new;
            handle
        });
        let handles = handles.collect();
        if any_new {
            self.send_registrations();
        }
        handles
    }

    /// As [`Process::borrow`], but the registration is not sent yet.
    fn hold(self: &Arc<Self>, session: &Session, id: ObjectId) -> (Handle, bool) {
        let owner = id.owner();
        if owner != self.id {
            return self.objects.handle(session, id, || self.peers.borrowing.lock().register(id));
        }
        let (handle, new) = self.objects.handle(session, id, Registration::default);
        if new {
            // Freed already: say so instead of waiting.
            let error = self.ended().cloned().unwrap_or(Error::OwnerDied { object: id, owner });
            self.resolve_object(handle.object(), ObjectValue::Failed(Box::new(error)), Vec::new());
        }
        (handle, false)
    }

    /// Sends what was registered and not sent yet, by whomever.
    fn send_registrations(self: &Arc<Self>) {
        let unreachable = self.send_unsent(&mut self.peers.borrowing.lock());
        for owner in unreachable {
            self.owner_gone(owner);
        }
    }

    /// Sends registrations while the lock is held, so that they are queued in the order of their numbers. Answers with
    /// owners that are gone, or of which nobody knows where they are.
    fn send_unsent(self: &Arc<Self>, borrowing: &mut Borrowing<Confirmation>) -> Vec<ProcessId> {
        if !borrowing.has_unsent() {
            return Vec::new();
        }
        let mut unreachable = Vec::new();
        for (owner, registrations) in borrowing.take_unsent() {
            let sent = registrations.chunks(IDS_A_MESSAGE).all(|batch| {
                let message = PeerMessage::Borrow(batch.to_vec());
                // Somebody will wait for the answer.
                match self.peers.link(owner) {
                    Some(link) => {
                        link.send_in_a_hurry(message);
                        true
                    }
                    None => self.send_to(owner, message),
                }
            });
            match self.peers.link(owner) {
                Some(link) if sent => {
                    if let Some(number) = borrowing.ask(owner) {
                        self.io.spawn(self.clone().see_registered(owner, link, number));
                    }
                }
                _ => unreachable.push(owner),
            }
        }
        unreachable
    }

    /// Waits until `owner` has taken in the registrations that were sent to it. If it is gone first, [`Process::contact_lost`]
    /// sees to the rest.
    async fn see_registered(self: Arc<Self>, owner: ProcessId, link: Link<PeerMessage>, mut number: Registration) {
        while link.flushed().await {
            let mut ready = Vec::new();
            let mut borrowing = self.peers.borrowing.lock();
            if link.is_broken() {
                // What is registered by now goes over the next link, and that is waited for by another.
                return;
            }
            let next = borrowing.acknowledged(owner, number, &mut ready);
            drop(borrowing);
            self.send_ready(ready);
            match next {
                Some(next) => number = next,
                None => return,
            }
        }
    }

    /// Sends `message` to `receiver`, which it confirms that the refs `ids` are registered to.
    pub(crate) fn confirm<'a>(
        self: &Arc<Self>,
        receiver: ProcessId,
        ids: impl IntoIterator<Item = &'a ObjectId>,
        message: PeerMessage,
    ) {
        let mut borrowing = self.peers.borrowing.lock();
        let unreachable = self.send_unsent(&mut borrowing);
        let confirmed = borrowing.confirm(receiver, ids, (receiver, message));
        drop(borrowing);
        if let Some((receiver, message)) = confirmed {
            self.send_to(receiver, message);
        }
        for owner in unreachable {
            self.owner_gone(owner);
        }
    }

    /// Reports borrowed objects that nobody here holds any more to their owners.
    pub(crate) fn release(self: &Arc<Self>, released: impl IntoIterator<Item = Released>) {
        let mut ready = Vec::new();
        let mut borrowing = self.peers.borrowing.lock();
        let unreachable = self.send_unsent(&mut borrowing);
        for object in released {
            borrowing.release(object.id, object.registration, &object.contained, &mut ready);
        }
        drop(borrowing);
        self.send_ready(ready);
        for owner in unreachable {
            self.owner_gone(owner);
        }
    }

    fn send_ready(self: &Arc<Self>, ready: Vec<Ready<Confirmation>>) {
        if ready.is_empty() {
            return;
        }
        let mut releases: std::collections::BTreeMap<ProcessId, Vec<(ObjectId, Registration)>> = Default::default();
        for ready in ready {
            match ready {
                Ready::Message((receiver, message)) => {
                    self.send_to(receiver, message);
                }
                Ready::Release(id, number) => releases.entry(id.owner()).or_default().push((id, number)),
            }
        }
        for (owner, releases) in releases {
            for batch in releases.chunks(IDS_A_MESSAGE) {
                self.send_to(owner, PeerMessage::Release(batch.to_vec()));
            }
        }
        self.peers.confirmed.notify_waiters();
    }
}
