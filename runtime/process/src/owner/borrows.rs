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

/// What was borrowed over a contact that was lost.
pub(crate) struct Lost {
    objects: Vec<Arc<Object>>,
    /// What waited for registrations over it. It is sent when it is known who answers for the objects now, and that one has taken in
    /// what is held of them.
    ready: Vec<Ready<Confirmation>>,
    /// From whom. What concerns their objects waits until this is settled.
    owners: Vec<ProcessId>,
}

impl Lost {
    /// Whether nobody here waits for the end of this.
    pub(crate) fn is_empty(&self) -> bool {
        self.objects.is_empty() && self.ready.is_empty()
    }
}

impl Owner {
    /// Contact with a process was lost over which these were borrowed: from itself, or from processes that are no more and for which
    /// it answers. If it is known to have ended, its steward is asked for its objects. Where nobody answers for them, who waits
    /// for them is told.
    pub(crate) fn settle_borrowed(self: &Arc<Self>, peer: ProcessId, mut lost: Lost) {
        let is_gone = self.outside.is_gone(peer);
        if is_gone {
            self.adopt(peer);
        }
        let mut borrowing = self.registrations.borrowing.lock();
        for owner in lost.owners {
            borrowing.settled(owner, &mut lost.ready);
        }
        drop(borrowing);
        let has_steward = is_gone && self.outside.has_steward(peer);
        let (its_own, of_others): (Vec<_>, Vec<_>) =
            lost.objects.into_iter().partition(|object| object.id().owner() == peer);
        let ready = match has_steward {
            true => self.ask_steward(peer, &its_own, lost.ready),
            false => {
                self.fail_pending(peer, is_gone, its_own);
                lost.ready
            }
        };
        self.fail_pending(peer, is_gone, of_others);
        self.send_ready(ready);
    }

    /// The steward of a process that is no more is told what is held here, and asked for what was awaited. Answers with what need not
    /// wait for it.
    fn ask_steward(
        self: &Arc<Self>,
        gone: ProcessId,
        borrowed: &[Arc<Object>],
        ready: Vec<Ready<Confirmation>>,
    ) -> Vec<Ready<Confirmation>> {
        let is_held = |object: &&Arc<Object>| self.objects.has(object);
        let held = borrowed.iter().filter(is_held).map(|object| (object.id(), object.registration())).collect();
        let mut borrowing = self.registrations.borrowing.lock();
        borrowing.register_again(gone, held);
        let unreachable = self.send_unsent(&mut borrowing);
        let ready = borrowing.wait_again(gone, ready);
        drop(borrowing);
        for owner in unreachable {
            self.owner_gone(owner);
        }
        let awaited = borrowed.iter().filter(|object| object.is_asked_for()).map(|object| object.id());
        let awaited: Vec<ObjectId> = awaited.inspect(|id| self.registrations.asks_for(*id)).collect();
        for ids in awaited.chunks(IDS_A_MESSAGE) {
            if !self.send_to(gone, PeerMessage::Subscribe(ids.to_vec())) {
                self.owner_gone(gone);
            }
        }
        ready
    }

    fn fail_pending(self: &Arc<Self>, peer: ProcessId, is_gone: bool, borrowed: Vec<Arc<Object>>) {
        for object in borrowed.into_iter().filter(|object| !object.is_ready()) {
            let owner = object.id().owner();
            let error = if is_gone {
                Error::OwnerDied { object: object.id(), owner }
            } else if owner != peer {
                Error::ContactLost {
                    what: format!("getting {}", object.id()),
                    who: format!("{peer}, which answers for it since its owner, {owner}, has ended"),
                    why: "the connection broke before the value arrived".into(),
                    attempts: 1,
                }
            } else {
                Error::ContactLost {
                    what: format!("getting {}", object.id()),
                    who: format!("its owner, {owner}"),
                    why: "the connection broke before the value arrived".into(),
                    attempts: 1,
                }
            };
            self.resolve_object(&object, ObjectValue::Failed(Box::new(error)), Vec::new());
        }
    }

    /// Contact with a borrower was lost: it holds nothing any more.
    pub(crate) fn borrower_lost(self: &Arc<Self>, who: ProcessId) {
        self.adoptions.forget_said_by(who);
        let mut borrowed = self.objects.forget_borrower(who);
        borrowed.sort_unstable();
        for id in borrowed {
            self.free_if_unneeded(id);
        }
    }

    /// Nobody knows where `owner` is.
    fn owner_gone(self: &Arc<Self>, owner: ProcessId) {
        let mut ready = Vec::new();
        let borrowed = self.registrations.borrowing.lock().gone(owner, &mut ready);
        let objects = self.borrowed_and_awaited(owner, borrowed);
        self.send_ready(ready);
        for object in objects.into_iter().filter(|object| !object.is_ready()) {
            let error = self.ended().cloned().unwrap_or(Error::OwnerDied { object: object.id(), owner });
            self.resolve_object(&object, ObjectValue::Failed(Box::new(error)), Vec::new());
        }
    }

    /// Contact with a process was lost: nothing waits for registrations with it any more. Answers with what was borrowed from it,
    /// and from those for which it answers.
    pub(crate) fn borrowed_over(self: &Arc<Self>, peer: ProcessId) -> Lost {
        let mut lost = Lost { objects: Vec::new(), ready: Vec::new(), owners: vec![peer] };
        lost.owners.extend(self.outside.left_to(peer));
        for owner in &lost.owners {
            let borrowed = self.registrations.borrowing.lock().lost(*owner, &mut lost.ready);
            lost.objects.extend(self.borrowed_and_awaited(*owner, borrowed));
        }
        lost
    }

    /// What was borrowed from an owner, and what it was asked for.
    fn borrowed_and_awaited(&self, owner: ProcessId, borrowed: Vec<ObjectId>) -> Vec<Arc<Object>> {
        // What was registered over an earlier contact can still be asked for.
        let mut awaited = self.registrations.asked.remove(&owner).map(|(_, asked)| asked).unwrap_or_default();
        awaited.extend(borrowed);
        sorted(awaited).into_iter().filter_map(|id| self.objects.get(id)).collect()
    }

    /// `handle` is the handle object of `actor`: what is known of the actor goes with it. An owner knows it already.
    pub(crate) fn know_actor(&self, handle: &Handle, actor: ActorId) {
        if handle.id().owner() != self.id {
            self.actors.holds(handle.object(), actor);
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

    /// As [`Owner::borrow`], but the registration is not sent yet.
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
            if !sent {
                unreachable.push(owner);
            } else if let Some(number) = borrowing.ask(owner) {
                // Without contact, it was lost since: whoever sees to that waits for this lock, and finds what is held.
                self.outside.when_taken_in(self, owner, number);
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
