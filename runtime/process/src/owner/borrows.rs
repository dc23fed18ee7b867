//! Objects of other processes: holding them, waiting until they are registered, and letting go of them.

use std::collections::BTreeMap;
use std::sync::Arc;

use wingbeat_core::error::Error;
use wingbeat_core::value::ObjectValue;
use wingbeat_core::{ActorId, ObjectId, ProcessId};
use wingbeat_net::link::IDS_A_MESSAGE;
use wingbeat_net::messages::{PeerMessage, Registration};

use crate::owner::Owner;
use crate::owner::borrowing::{Borrowing, Ready};
use crate::owner::object::{Handle, Object};
use crate::owner::registrations::Confirmation;
use crate::owner::table::{Released, sorted};

impl Owner {
    /// Fails what was asked of an owner contact with which was lost.
    pub(crate) fn fail_pending(self: &Arc<Self>, owner: ProcessId, pending: Vec<Arc<Object>>) {
        let is_gone = self.outside.is_gone(owner);
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

    /// Contact with a borrower was lost: it holds nothing any more.
    pub(crate) fn borrower_lost(self: &Arc<Self>, who: ProcessId) {
        for id in self.objects.forget_borrower(who) {
            self.free_if_unneeded(id);
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
        let borrowed = self.registrations.borrowing.lock().gone(owner, &mut ready);
        // What was registered over an earlier contact can still be asked for.
        let mut awaited = self.registrations.asked.remove(&owner).map(|(_, asked)| asked).unwrap_or_default();
        awaited.extend(borrowed);
        let objects = sorted(awaited).into_iter().filter_map(|id| self.objects.get(id));
        let pending = objects.filter(|object| !object.is_ready()).collect();
        self.send_ready(ready);
        pending
    }

    /// `handle` is the handle object of `actor`: what is known of the actor goes with it. An owner knows it already.
    pub(crate) fn know_actor(&self, handle: ObjectId, actor: ActorId) {
        if handle.owner() != self.id {
            self.actors.holds(handle, actor);
        }
    }

    /// A borrowed object, or one of ours that is referred to from outside.
    pub(crate) fn borrow(self: &Arc<Self>, id: ObjectId) -> Handle {
        let (handle, new) = self.hold(id);
        if new {
            self.send_registrations();
        }
        handle
    }

    /// Handles of several, which are registered together.
    pub(crate) fn borrow_all(self: &Arc<Self>, ids: &[ObjectId]) -> Vec<Handle> {
        let mut any_new = false;
        let handles = ids.iter().map(|id| {
            let (handle, new) = self.hold(*id);
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
    fn hold(self: &Arc<Self>, id: ObjectId) -> (Handle, bool) {
        let owner = id.owner();
        if owner != self.id {
            return self.objects.handle(self.clone(), id, || self.registrations.borrowing.lock().register(id));
        }
        let (handle, new) = self.objects.handle(self.clone(), id, Registration::default);
        if new {
            // Freed already: say so instead of waiting.
            let error = self.ended().cloned().unwrap_or(Error::OwnerDied { object: id, owner });
            self.resolve_object(handle.object(), ObjectValue::Failed(Box::new(error)), Vec::new());
        }
        (handle, false)
    }

    /// Sends what was registered and not sent yet, by whomever.
    fn send_registrations(self: &Arc<Self>) {
        let unreachable = self.send_unsent(&mut self.registrations.borrowing.lock());
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
                // Somebody will wait for the answer.
                self.outside.send_to(self, owner, PeerMessage::Borrow(batch.to_vec()), true)
            });
            let is_awaited = sent
                && match borrowing.ask(owner) {
                    Some(number) => self.outside.when_taken_in(self, owner, number),
                    None => self.outside.is_in_contact(owner),
                };
            if !is_awaited {
                unreachable.push(owner);
            }
        }
        unreachable
    }

    /// An owner has taken in what was registered with it up to this number, unless that does not hold any more (`is_valid`,
    /// which is asked under the lock). Answers with the number to wait for next, if any.
    pub(crate) fn registered(
        self: &Arc<Self>,
        with: ProcessId,
        number: Registration,
        is_valid: impl FnOnce() -> bool,
    ) -> Option<Registration> {
        let mut ready = Vec::new();
        let mut borrowing = self.registrations.borrowing.lock();
        if !is_valid() {
            // What is registered by now goes over the next link, and that is waited for by another.
            return None;
        }
        let next = borrowing.acknowledged(with, number, &mut ready);
        drop(borrowing);
        self.send_ready(ready);
        next
    }

    /// Sends `message` to `receiver`, which it confirms that the refs `ids` are registered to.
    pub(crate) fn confirm<'a>(
        self: &Arc<Self>,
        receiver: ProcessId,
        ids: impl IntoIterator<Item = &'a ObjectId>,
        message: PeerMessage,
    ) {
        let mut borrowing = self.registrations.borrowing.lock();
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
        let mut borrowing = self.registrations.borrowing.lock();
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
        let mut releases: BTreeMap<ProcessId, Vec<(ObjectId, Registration)>> = Default::default();
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
        self.registrations.confirmed.notify_waiters();
    }
}
