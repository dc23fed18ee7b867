//! The protocol that counts refs across processes: a deterministic state machine without IO.
//!
//! A process that receives a ref *registers* with the object's owner. Each registration has a number, which is never used
//! again, so that a release ends exactly the registration that it names, in whatever order messages were queued:
//!
//! ```text
//!   borrower                                  owner
//!     register ──── Borrow(id, n) ───────────▶ the latest of this borrower is n
//!     acknowledged ◀── (batch taken in)
//!     release ───── Release(id, n) ──────────▶ forgets the borrower, if n is still its latest
//! ```
//!
//! Whoever sends a ref holds it until the receiver *confirms*. Four messages confirm: a task's result (its arguments),
//! `Received` (the refs in a result), `ItemReceived` (those in an item of a stream) and the release of an object (the refs in its
//! value). A confirmation leaves when, for each of the refs that it concerns and that this process still holds, the registration was acknowledged or the
//! owner is gone. It waits for nothing else: one owner that stands still delays only messages about its own objects.
//! Where the owner is also the receiver, order on the link does the same without waiting. A ref that is held no more is still waited for if its value was known
//! before its registration was acknowledged, as from a steward, and refers to objects of the same owner: nobody else may keep them until
//! their own registrations have arrived, behind it.

use std::collections::{BTreeMap, BTreeSet};

use wingbeat_core::{ObjectId, ProcessId};
use wingbeat_net::messages::Registration;

/// What a process knows of its registrations, and the messages that wait for them.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Borrowing<M> {
    /// The last number given.
    last: Registration,
    owners: BTreeMap<ProcessId, Owner>,
    /// Owners to which registrations are still to be sent.
    unsent: BTreeSet<ProcessId>,
    waiting: BTreeMap<u64, Waiting<M>>,
    next_waiting: u64,
    /// Releases that wait. One an object, so that a later release of it never overtakes an earlier one.
    releasing: BTreeMap<ObjectId, u64>,
    /// What was borrowed over contacts that were lost, while it is not known who answers for it now.
    unsettled: BTreeMap<ProcessId, Unsettled>,
}

/// What was borrowed from an owner with whom contact was lost.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
struct Unsettled {
    /// How many losses are not settled.
    losses: usize,
    /// What is held, and the messages that wait until it is registered again, or it is known that nobody answers for it.
    held: BTreeMap<ObjectId, Vec<u64>>,
}

impl<M> Default for Borrowing<M> {
    fn default() -> Self {
        Borrowing {
            last: Registration::default(),
            owners: BTreeMap::new(),
            unsent: BTreeSet::new(),
            waiting: BTreeMap::new(),
            next_waiting: 0,
            releasing: BTreeMap::new(),
            unsettled: BTreeMap::new(),
        }
    }
}

/// An owner of something borrowed. Dropped when nothing of it is held and nobody waits for it, or it is gone.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
struct Owner {
    /// The latest registration of each of its objects, until its release is sent.
    held: BTreeMap<ObjectId, Registration>,
    unsent: Vec<(ObjectId, Registration)>,
    sent: Registration,
    acknowledged: Registration,
    /// Whether somebody waits for an acknowledgement of what was sent.
    asked: bool,
    /// Messages that wait for a registration, by its number.
    awaited: BTreeMap<Registration, Vec<u64>>,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct Waiting<M> {
    /// Registrations that are not acknowledged.
    missing: usize,
    what: Ready<M>,
    /// Of a release: whether the value refers to other objects of its owner.
    is_nested: bool,
}

/// A message that need not wait (any more).
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Ready<M> {
    Message(M),
    /// To the object's owner.
    Release(ObjectId, Registration),
}

/// The registrations of one owner, in the order in which they must be sent.
pub(crate) type Unsent = (ProcessId, Vec<(ObjectId, Registration)>);

impl<M> Borrowing<M> {
    /// This process holds refs to `id` from now on. The registration is sent with [`Borrowing::take_unsent`].
    pub(crate) fn register(&mut self, id: ObjectId) -> Registration {
        self.last.0 += 1;
        let owner = self.owners.entry(id.owner()).or_default();
        owner.held.insert(id, self.last);
        owner.unsent.push((id, self.last));
        self.unsent.insert(id.owner());
        self.last
    }

    /// What was registered with an owner that is no more is registered again, with its steward. Of each object, only if it was
    /// not registered since.
    pub(crate) fn register_again(&mut self, owner: ProcessId, mut held: Vec<(ObjectId, Registration)>) {
        if held.is_empty() {
            return;
        }
        held.sort_unstable_by_key(|(_, number)| *number);
        let state = self.owners.entry(owner).or_default();
        for (id, number) in held {
            if state.held.get(&id).is_none_or(|later| *later <= number) {
                state.held.insert(id, number);
                state.unsent.push((id, number));
            }
        }
        self.unsent.insert(owner);
    }

    /// Whether [`Borrowing::take_unsent`] would answer with anything.
    pub(crate) fn has_unsent(&self) -> bool {
        !self.unsent.is_empty()
    }

    /// What must be sent now, before anything else is decided.
    pub(crate) fn take_unsent(&mut self) -> Vec<Unsent> {
        let mut taken = Vec::new();
        for process in std::mem::take(&mut self.unsent) {
            if let Some(owner) = self.owners.get_mut(&process) {
                let unsent = std::mem::take(&mut owner.unsent);
                owner.sent = unsent.last().map_or(owner.sent, |(_, number)| owner.sent.max(*number));
                taken.push((process, unsent));
            }
        }
        taken
    }

    /// The number up to which an acknowledgement of `owner` is to be waited for, unless somebody does already.
    pub(crate) fn ask(&mut self, owner: ProcessId) -> Option<Registration> {
        let owner = self.owners.get_mut(&owner)?;
        if owner.asked || owner.acknowledged >= owner.sent {
            return None;
        }
        owner.asked = true;
        Some(owner.sent)
    }

    /// `owner` has taken in every registration up to this number. Answers with the number to wait for next, if any.
    pub(crate) fn acknowledged(
        &mut self,
        owner: ProcessId,
        up_to: Registration,
        ready: &mut Vec<Ready<M>>,
    ) -> Option<Registration> {
        let state = self.owners.get_mut(&owner)?;
        state.acknowledged = state.acknowledged.max(up_to);
        state.asked = false;
        let later = state.awaited.split_off(&Registration(state.acknowledged.0 + 1));
        let met = std::mem::replace(&mut state.awaited, later);
        self.met(met.into_values().flatten().collect(), ready);
        let next = self.ask(owner);
        self.prune(owner);
        next
    }

    /// An owner is gone, and its objects with it: nothing waits for it. Answers with what was borrowed from it.
    pub(crate) fn gone(&mut self, owner: ProcessId, ready: &mut Vec<Ready<M>>) -> Vec<ObjectId> {
        self.unsent.remove(&owner);
        let Some(state) = self.owners.remove(&owner) else { return Vec::new() };
        self.met(state.awaited.into_values().flatten().collect(), ready);
        state.held.into_keys().collect()
    }

    /// Contact with an owner was lost: as [`Borrowing::gone`], but what concerns refs to its objects waits until that is
    /// [settled](Borrowing::settled). Another may answer for them, and is to know what is held first.
    pub(crate) fn lost(&mut self, owner: ProcessId, ready: &mut Vec<Ready<M>>) -> Vec<ObjectId> {
        let held = self.gone(owner, ready);
        let unsettled = self.unsettled.entry(owner).or_default();
        unsettled.losses += 1;
        for id in &held {
            unsettled.held.entry(*id).or_default();
        }
        held
    }

    /// It is known who answers for what was borrowed over a contact that was lost.
    pub(crate) fn settled(&mut self, owner: ProcessId, ready: &mut Vec<Ready<M>>) {
        let Some(unsettled) = self.unsettled.get_mut(&owner) else { return };
        unsettled.losses -= 1;
        if unsettled.losses == 0
            && let Some(unsettled) = self.unsettled.remove(&owner)
        {
            self.met(unsettled.held.into_values().flatten().collect(), ready);
        }
    }

    /// These waited for registrations with an owner that is no more. They wait for what was sent to its steward instead; answers
    /// with them if that is nothing.
    pub(crate) fn wait_again(&mut self, owner: ProcessId, ready: Vec<Ready<M>>) -> Vec<Ready<M>> {
        debug_assert!(!self.has_unsent(), "order on the links is the order of decisions");
        let Some(state) = self.owners.get_mut(&owner).filter(|state| state.acknowledged < state.sent) else {
            return ready;
        };
        for what in ready {
            state.awaited.entry(state.sent).or_default().push(self.next_waiting);
            self.waiting.insert(self.next_waiting, Waiting { missing: 1, what, is_nested: false });
            self.next_waiting += 1;
        }
        Vec::new()
    }

    /// Answers with `message` if it may be sent to `receiver` at once, which it confirms these refs to; otherwise keeps it
    /// until it may.
    pub(crate) fn confirm<'a>(
        &mut self,
        receiver: ProcessId,
        refs: impl IntoIterator<Item = &'a ObjectId>,
        message: M,
    ) -> Option<M> {
        match self.wait_for(receiver, refs, Ready::Message(message)) {
            Ok(Ready::Message(message)) => Some(message),
            _ => None,
        }
    }

    /// The last handle of `id` was dropped, and with it those of the refs in its value.
    pub(crate) fn release<'a>(
        &mut self,
        id: ObjectId,
        number: Registration,
        contained: impl IntoIterator<Item = &'a ObjectId>,
        ready: &mut Vec<Ready<M>>,
    ) {
        let mut is_nested = false;
        let contained = contained.into_iter().inspect(|inner| is_nested |= inner.owner() == id.owner());
        if let Some(waiting) = self.releasing.get(&id).copied() {
            // An earlier life of it here waits: both end with one message, when both may.
            let missing = self.await_all(id.owner(), contained, waiting);
            if let Some(waiting) = self.waiting.get_mut(&waiting) {
                waiting.missing += missing;
                waiting.what = Ready::Release(id, number);
                waiting.is_nested |= is_nested;
            }
            return;
        }
        match self.wait_for(id.owner(), contained, Ready::Release(id, number)) {
            Ok(release) => {
                let met = self.released(id, number, is_nested);
                ready.push(release);
                self.met(met, ready);
            }
            Err(number) => {
                self.releasing.insert(id, number);
                if let Some(waiting) = self.waiting.get_mut(&number) {
                    waiting.is_nested = is_nested;
                }
            }
        }
    }

    #[cfg(test)]
    pub(crate) fn what_is_left(&self) -> Vec<String> {
        let owners = self.owners.iter().map(|(owner, state)| format!("registered with {owner}: {state:?}"));
        let waiting = (!self.is_idle()).then(|| format!("{} messages wait", self.waiting.len()));
        owners.chain(waiting).collect()
    }

    /// Whether no message waits.
    pub(crate) fn is_idle(&self) -> bool {
        self.waiting.is_empty()
    }

    fn wait_for<'a>(
        &mut self,
        receiver: ProcessId,
        refs: impl IntoIterator<Item = &'a ObjectId>,
        what: Ready<M>,
    ) -> Result<Ready<M>, u64> {
        let number = self.next_waiting;
        let missing = self.await_all(receiver, refs, number);
        if missing == 0 {
            return Ok(what);
        }
        self.next_waiting += 1;
        self.waiting.insert(number, Waiting { missing, what, is_nested: false });
        Err(number)
    }

    /// Lists the message `waiting` with every registration that it must wait for; answers with how many those are.
    fn await_all<'a>(
        &mut self,
        receiver: ProcessId,
        refs: impl IntoIterator<Item = &'a ObjectId>,
        waiting: u64,
    ) -> usize {
        debug_assert!(!self.has_unsent(), "order on the links is the order of decisions");
        let mut missing = 0;
        for id in refs {
            if id.owner() == receiver {
                continue;
            }
            if let Some(owner) = self.owners.get_mut(&id.owner())
                && let Some(number) = owner.held.get(id)
            {
                if *number > owner.acknowledged {
                    owner.awaited.entry(*number).or_default().push(waiting);
                    missing += 1;
                }
            } else if let Some(waits) = self.unsettled.get_mut(&id.owner()).and_then(|lost| lost.held.get_mut(id)) {
                waits.push(waiting);
                missing += 1;
            }
        }
        missing
    }

    /// Each of these messages has one registration less to wait for. A list, because a release may let another go, and
    /// objects are nested as deeply as users like.
    fn met(&mut self, mut numbers: Vec<u64>, ready: &mut Vec<Ready<M>>) {
        while let Some(number) = numbers.pop() {
            let Some(waiting) = self.waiting.get_mut(&number) else { continue };
            waiting.missing -= 1;
            if waiting.missing > 0 {
                continue;
            }
            let Some(waiting) = self.waiting.remove(&number) else { continue };
            if let Ready::Release(id, released) = waiting.what {
                // A later life of it may wait by now.
                if self.releasing.get(&id) == Some(&number) {
                    self.releasing.remove(&id);
                }
                numbers.extend(self.released(id, released, waiting.is_nested));
            }
            ready.push(waiting.what);
        }
    }

    /// The release of `id` is about to be sent. Whoever waited for this registration waits for nothing, since this process
    /// relies on it no more; or for all that was registered since, if it may rely on what the value refers to.
    fn released(&mut self, id: ObjectId, number: Registration, is_nested: bool) -> Vec<u64> {
        let mut met = Vec::new();
        if let Some(lost) = self.unsettled.get_mut(&id.owner())
            && !is_nested
        {
            met = lost.held.remove(&id).unwrap_or_default();
        }
        let Some(owner) = self.owners.get_mut(&id.owner()) else { return met };
        if owner.held.get(&id) == Some(&number) {
            owner.held.remove(&id);
        }
        let waiting = owner.awaited.remove(&number).unwrap_or_default();
        match is_nested && owner.acknowledged < owner.sent && !waiting.is_empty() {
            true => owner.awaited.entry(owner.sent).or_default().extend(waiting),
            false => met.extend(waiting),
        }
        self.prune(id.owner());
        met
    }

    fn prune(&mut self, owner: ProcessId) {
        let unused = self.owners.get(&owner).is_some_and(|state| {
            state.held.is_empty() && state.awaited.is_empty() && !state.asked && state.unsent.is_empty()
        });
        if unused {
            self.owners.remove(&owner);
        }
    }
}

/// The processes that hold refs to an object, as its owner knows them: the latest registration of each. Saying
/// something twice does no harm.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub(crate) struct Borrowers(BTreeMap<ProcessId, Registration>);

impl Borrowers {
    pub(crate) fn borrow(&mut self, who: ProcessId, number: Registration) {
        let latest = self.0.entry(who).or_default();
        *latest = number.max(*latest);
    }

    /// Whether `who` holds nothing any more. It still does if it has registered again.
    pub(crate) fn release(&mut self, who: ProcessId, number: Registration) -> bool {
        let over = self.0.get(&who).is_none_or(|latest| *latest <= number);
        if over {
            self.0.remove(&who);
        }
        over
    }

    pub(crate) fn forget(&mut self, who: ProcessId) {
        self.0.remove(&who);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

#[cfg(test)]
mod explored;
#[cfg(test)]
mod tests;
