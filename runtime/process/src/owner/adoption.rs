//! How a steward answers for the objects of processes that are no more.
//!
//! Every node has a *steward*, a process in its daemon. While an owner of its node lives, the steward keeps a shadow of each
//! object to which others may refer. When the owner has ended, the steward *adopts* them: it enters them into its own table, and
//! from then on borrowers register with it, ask it, and release to it as they did with the owner. What was not ready has failed
//! with the owner.
//!
//! ```text
//!   owner                 steward                        borrower
//!     Shadows ────────────▶ shadowed                        │
//!     (ends)                │◀── Borrow, Subscribe, … ──────┤ it has noticed sooner: these wait
//!                           adopted ── Resolved ───────────▶│
//!                           │◀────────────── Release ───────┤ freed when nobody holds it
//! ```
//!
//! A steward learns of the end as everybody does, by the loss of contact. Refs may be under way when the owner ends, so
//! everything adopted is kept for a while, until whoever holds it has had time to say so.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::Bytes;

use parking_lot::Mutex;
use wingbeat_core::codec::Payload;
use wingbeat_core::error::Error;
use wingbeat_core::value::{ObjectValue, Packed, Refs};
use wingbeat_core::{ObjectId, ProcessId};
use wingbeat_net::messages::{PeerMessage, Registration, Shadow, Work};

use crate::owner::Owner;
use crate::owner::object::{Handle, drop_all};

/// What a steward has of other owners. Of a process that is no steward, nothing.
#[derive(Default)]
pub(super) struct Adoptions {
    is_steward: AtomicBool,
    estates: Mutex<BTreeMap<ProcessId, Estate>>,
}

/// What was said, and by whom, before the end of an owner was noticed here.
type Early = Vec<(ProcessId, PeerMessage)>;

/// What is known of one owner's objects.
enum Estate {
    /// It lives, as far as is known here.
    Shadowed {
        objects: BTreeMap<ObjectId, Shadowed>,
        /// While all is said again: what was not yet.
        unsaid: Option<BTreeSet<ObjectId>>,
        /// What those have said of its objects who have noticed its end sooner.
        early: Early,
    },
    /// It has ended, and these are being entered into the table.
    Adopting(BTreeSet<ObjectId>),
    /// It has ended. These handles keep its objects until everybody has had time to register.
    Adopted(Vec<Handle>),
}

#[derive(Default)]
struct Shadowed {
    value: Option<ObjectValue>,
    /// The refs in the value that are of other owners. Those of the same owner are in its estate.
    contained: Vec<Handle>,
}

/// Whose objects a message of a borrower is about.
fn is_about(message: &PeerMessage) -> Option<ProcessId> {
    let object = match message {
        PeerMessage::Borrow(registrations) | PeerMessage::Release(registrations) => registrations.first()?.0,
        PeerMessage::Subscribe(ids) => *ids.first()?,
        PeerMessage::Copied { object, .. } | PeerMessage::Lost { object, .. } => *object,
        _ => return None,
    };
    Some(object.owner())
}

/// The same value, which does not keep the message alive in which it came.
fn apart(value: ObjectValue) -> ObjectValue {
    match value {
        ObjectValue::Inline(packed) => {
            ObjectValue::Inline(Packed { bytes: Payload(Bytes::copy_from_slice(&packed.bytes)), ..packed })
        }
        other => other,
    }
}

impl Adoptions {
    /// Gives a message back, unless it is about objects of somebody whose end was not noticed here yet: then it waits for that.
    pub(super) fn may_be_answered(&self, from: ProcessId, message: PeerMessage) -> Option<PeerMessage> {
        let Some(owner) = is_about(&message) else { return Some(message) };
        match self.estates.lock().get_mut(&owner) {
            Some(Estate::Shadowed { early, .. }) => {
                early.push((from, message));
                None
            }
            Some(Estate::Adopting(_) | Estate::Adopted(_)) | None => Some(message),
        }
    }

    /// Contact with `who` was lost: what it said over it is void, as all that it had registered.
    pub(super) fn forget_said_by(&self, who: ProcessId) {
        self.estates.lock().retain(|_, estate| match estate {
            Estate::Shadowed { objects, early, .. } => {
                early.retain(|(from, _)| *from != who);
                !objects.is_empty() || !early.is_empty()
            }
            Estate::Adopting(_) | Estate::Adopted(_) => true,
        });
    }

    /// Whether an owner has said what it has, and has not ended as far as is known here.
    fn has_shadows_of(&self, owner: ProcessId) -> bool {
        matches!(self.estates.lock().get(&owner), Some(Estate::Shadowed { .. }))
    }

    /// The refs in an owner's values that are of others.
    fn foreign_refs_of(&self, owner: ProcessId) -> Vec<ObjectId> {
        match self.estates.lock().get(&owner) {
            Some(Estate::Shadowed { objects, .. }) => {
                objects.values().flat_map(|shadowed| shadowed.contained.iter().map(Handle::id)).collect()
            }
            Some(Estate::Adopting(_) | Estate::Adopted(_)) | None => Vec::new(),
        }
    }

    /// Those about whose objects somebody has said something, and who have not ended as far as is known here.
    fn awaited(&self) -> Vec<ProcessId> {
        let is_awaited = |estate: &Estate| matches!(estate, Estate::Shadowed { early, .. } if !early.is_empty());
        let estates = self.estates.lock();
        estates.iter().filter(|(_, estate)| is_awaited(estate)).map(|(owner, _)| *owner).collect()
    }

    /// Sets what is known of an object. Answers with what is to be dropped when no lock is held.
    fn set(&self, owner: ProcessId, id: ObjectId, value: Option<ObjectValue>, contained: Vec<Handle>) -> Vec<Handle> {
        let mut estates = self.estates.lock();
        let estate = estates.entry(owner).or_insert_with(|| Estate::Shadowed {
            objects: BTreeMap::new(),
            unsaid: None,
            early: Vec::new(),
        });
        let Estate::Shadowed { objects, unsaid, .. } = estate else { return contained };
        if let Some(unsaid) = unsaid {
            unsaid.remove(&id);
        }
        let known = objects.entry(id).or_default();
        // While a value is made again, the refs in it are the same.
        if value.is_none() {
            return contained;
        }
        known.value = value;
        std::mem::replace(&mut known.contained, contained)
    }

    fn forget(&self, owner: ProcessId, id: ObjectId) -> Option<Shadowed> {
        let mut estates = self.estates.lock();
        let Some(Estate::Shadowed { objects, early, .. }) = estates.get_mut(&owner) else { return None };
        let forgotten = objects.remove(&id);
        if objects.is_empty() && early.is_empty() {
            estates.remove(&owner);
        }
        forgotten
    }

    /// An owner says all again.
    fn says_again(&self, owner: ProcessId) {
        if let Some(Estate::Shadowed { objects, unsaid, .. }) = self.estates.lock().get_mut(&owner) {
            *unsaid = Some(objects.keys().copied().collect());
        }
    }

    /// It has. Answers with what it has not said.
    fn all_said(&self, owner: ProcessId) -> Vec<ObjectId> {
        match self.estates.lock().get_mut(&owner) {
            Some(Estate::Shadowed { unsaid, .. }) => unsaid.take().into_iter().flatten().collect(),
            Some(Estate::Adopting(_) | Estate::Adopted(_)) | None => Vec::new(),
        }
    }

    /// The shadows of an owner that has ended, and what was said of them too early. It counts as adopted from now on.
    fn take(&self, owner: ProcessId) -> Option<(BTreeMap<ObjectId, Shadowed>, Early)> {
        match self.estates.lock().entry(owner) {
            Entry::Occupied(mut known) => {
                let Estate::Shadowed { objects, .. } = known.get() else { return None };
                let ids = objects.keys().copied().collect();
                match known.insert(Estate::Adopting(ids)) {
                    Estate::Shadowed { objects, early, .. } => Some((objects, early)),
                    Estate::Adopting(_) | Estate::Adopted(_) => None,
                }
            }
            Entry::Vacant(_) => None,
        }
    }

    /// Keeps what was adopted.
    fn keep(&self, owner: ProcessId, handles: Vec<Handle>) {
        self.estates.lock().insert(owner, Estate::Adopted(handles));
    }

    fn is_shadowed(&self, id: ObjectId) -> bool {
        match self.estates.lock().get(&id.owner()) {
            Some(Estate::Shadowed { objects, .. }) => objects.contains_key(&id),
            Some(Estate::Adopting(ids)) => ids.contains(&id),
            Some(Estate::Adopted(_)) | None => false,
        }
    }

    #[cfg(test)]
    fn values_shadowed_of(&self, owner: ProcessId) -> Vec<ObjectId> {
        let is_value =
            |shadowed: &Shadowed| matches!(shadowed.value, Some(ObjectValue::Inline(_) | ObjectValue::Stored(_)));
        match self.estates.lock().get(&owner) {
            Some(Estate::Shadowed { objects, .. }) => {
                objects.iter().filter(|(_, shadowed)| is_value(shadowed)).map(|(id, _)| *id).collect()
            }
            Some(Estate::Adopting(_) | Estate::Adopted(_)) | None => Vec::new(),
        }
    }

    #[cfg(test)]
    pub(super) fn what_is_left(&self) -> Vec<String> {
        let estates = self.estates.lock();
        let left = estates.iter().map(|(owner, estate)| match estate {
            Estate::Shadowed { objects, early, .. } => {
                format!("shadows of {owner}: {:?}, and {} messages wait", objects.keys(), early.len())
            }
            Estate::Adopting(ids) => format!("being adopted from {owner}: {ids:?}"),
            Estate::Adopted(kept) => format!("adopted from {owner}, and kept for a while: {kept:?}"),
        });
        left.collect()
    }
}

impl Owner {
    /// From now on, others may say what is to be known of their objects.
    pub(crate) fn serve_as_steward(&self) {
        self.adoptions.is_steward.store(true, Ordering::Relaxed);
    }

    /// An owner says what is to be known of its objects when it is no more.
    pub(super) fn hears_shadows(self: &Arc<Self>, from: ProcessId, shadows: Vec<Shadow>) {
        if !self.adoptions.is_steward.load(Ordering::Relaxed) {
            return tracing::warn!(%from, "this process is the steward of nobody");
        }
        for shadow in shadows {
            match shadow {
                Shadow::Kept(id, value) if id.owner() == from => {
                    let value = value.map(apart);
                    let contained = self.hold_foreign_refs(from, value.as_ref().and_then(ObjectValue::refs));
                    drop_all(self.adoptions.set(from, id, value, contained));
                }
                Shadow::Freed(id) => self.forget_shadow(from, id),
                Shadow::Again => self.adoptions.says_again(from),
                Shadow::AllSaid => {
                    for id in self.adoptions.all_said(from) {
                        self.forget_shadow(from, id);
                    }
                }
                Shadow::Leaves => self.may_leave_its_objects(from),
                Shadow::Kept(id, _) => tracing::warn!(%from, object = %id, "only its owner may say this"),
            }
        }
    }

    fn forget_shadow(&self, owner: ProcessId, id: ObjectId) {
        let forgotten = self.adoptions.forget(owner, id);
        drop_all(forgotten.map(|shadowed| shadowed.contained).unwrap_or_default());
    }

    /// An owner would end in order. What it refers to must not be freed with it.
    fn may_leave_its_objects(self: &Arc<Self>, from: ProcessId) {
        self.confirm(from, &self.adoptions.foreign_refs_of(from), Work::MayLeave.into());
    }

    /// Of the refs in a value, those that its owner does not own: it holds them now, and will not when it has ended.
    fn hold_foreign_refs(self: &Arc<Self>, owner: ProcessId, refs: Option<&Refs>) -> Vec<Handle> {
        let Some(refs) = refs else { return Vec::new() };
        for address in refs.owners.iter().filter(|address| address.process != owner) {
            self.outside.learn(address);
        }
        let foreign: Vec<ObjectId> = refs.ids.iter().copied().filter(|id| id.owner() != owner).collect();
        self.borrow_all(&foreign)
    }

    /// Somebody says that owners have ended of which it is not known here: they are spoken to, so that it shows.
    pub(super) fn look_after_owners(self: &Arc<Self>) {
        self.look_after(self.adoptions.awaited());
    }

    fn look_after(self: &Arc<Self>, owners: Vec<ProcessId>) {
        for owner in owners {
            if !self.send_to(owner, PeerMessage::Borrow(Vec::new())) {
                self.adopt(owner);
            }
        }
    }

    /// An owner has certainly ended: this process answers for what it had said of its objects.
    pub(super) fn adopt(self: &Arc<Self>, gone: ProcessId) {
        let Some((objects, early)) = self.adoptions.take(gone) else { return };
        tracing::debug!(%gone, count = objects.len(), "answers for the objects of a process that has ended");
        // All are known before the first has its value, since that may refer to others.
        let handle = |id: ObjectId| {
            let (handle, _) = self.objects.handle(self.clone(), id, Registration::default);
            handle.object().adopt();
            handle
        };
        let kept: Vec<Handle> = objects.keys().map(|id| handle(*id)).collect();
        for (handle, shadowed) in kept.iter().zip(objects.into_values()) {
            let mut contained = shadowed.contained;
            let refs = shadowed.value.as_ref().and_then(ObjectValue::refs).into_iter().flat_map(|refs| &refs.ids);
            // One of which nothing was said is lost with its owner.
            contained.extend(refs.filter(|id| id.owner() == gone).filter_map(|id| self.objects.handle_of_known(*id)));
            let died = || Error::OwnerDied { object: handle.id(), owner: gone };
            let value = shadowed.value.unwrap_or_else(|| ObjectValue::Failed(Box::new(died())));
            // What could not be read of it while it was borrowed does not stand against its value.
            handle.object().forget_failure();
            self.resolve_object(handle.object(), value, contained);
        }
        self.adoptions.keep(gone, kept);
        self.outside.keeps_for_a_while(self, gone);
        for (from, message) in early {
            self.hears(from, message);
        }
    }

    /// Whoever holds an object of a process that has ended has had time to say so: what nobody has registered is freed.
    pub(crate) fn let_go_of(self: &Arc<Self>, gone: ProcessId) {
        let estate = {
            let mut estates = self.adoptions.estates.lock();
            match estates.get(&gone) {
                Some(Estate::Adopted(_)) => estates.remove(&gone),
                Some(Estate::Shadowed { .. } | Estate::Adopting(_)) | None => None,
            }
        };
        if let Some(Estate::Adopted(kept)) = estate {
            drop_all(kept);
        }
    }

    /// Objects of a process that are to be readable when it has ended.
    #[cfg(test)]
    pub(crate) fn values_shadowed_of(&self, owner: ProcessId) -> Vec<ObjectId> {
        self.adoptions.values_shadowed_of(owner)
    }

    /// Of these objects of others who have ended, those for which this process answers, or is about to. If the jobs of their owners are over,
    /// nobody is left who could say yet that he refers to them.
    pub(crate) fn keeps(self: &Arc<Self>, ids: Vec<ObjectId>, are_jobs_over: bool) -> Vec<ObjectId> {
        let owners: BTreeSet<ProcessId> = ids.iter().map(|id| id.owner()).collect();
        // What this process has missed.
        self.look_after(owners.iter().copied().filter(|owner| self.adoptions.has_shadows_of(*owner)).collect());
        if are_jobs_over {
            owners.into_iter().for_each(|owner| self.let_go_of(owner));
        }
        let keeps = |id: &ObjectId| {
            self.adoptions.is_shadowed(*id) || self.objects.get(*id).is_some_and(|object| object.is_adopted())
        };
        ids.into_iter().filter(keeps).collect()
    }
}

#[cfg(test)]
#[path = "adoption_tests.rs"]
mod tests;
