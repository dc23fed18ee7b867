//! What becomes of objects: they get a value, are freed, and have copies on nodes.

use std::collections::BTreeSet;
use std::sync::Arc;

use wingbeat_core::error::Error;
use wingbeat_core::spec::{Outcome, Outputs, TaskSpec};
use wingbeat_core::value::{ObjectValue, Refs, StoreNode, Stored};
use wingbeat_core::{ObjectId, TaskId};
use wingbeat_net::messages::{HeadMessage, MESSAGE_LIMIT, PeerMessage, Shadow, Weight};

use crate::owner::Owner;
use crate::owner::object::{Handle, Object};
use crate::owner::streams::Left;
use crate::owner::submission::Request;
use crate::owner::table::Freed;

/// Of how many items of a stream it is looked whether an attempt has left them; more would be stored ahead of their consumer
/// only on purpose.
const MOST_LEFT: u32 = 1_024;

impl Owner {
    pub(super) fn freed_while_stored(self: &Arc<Self>, object: &Object) {
        let Some(stored) = object.take_stored() else { return };
        self.objects.not_stored(object.id(), &stored.nodes);
        if self.owns(object) {
            self.delete_stored(object.id(), &stored);
        }
    }

    /// Handles of the refs in a value that arrived.
    pub(crate) fn hold_refs(self: &Arc<Self>, refs: Option<&Refs>) -> Vec<Handle> {
        let Some(refs) = refs else { return Vec::new() };
        for owner in &refs.owners {
            self.outside.learn(owner);
        }
        self.borrow_all(&refs.ids)
    }

    /// The refs of `held` as they travel.
    pub(crate) fn describe(&self, held: &[Handle]) -> Option<Box<Refs>> {
        if held.is_empty() {
            return None;
        }
        let mut refs = Refs::default();
        let mut owners = BTreeSet::new();
        let mut unshadowed = Vec::new();
        for handle in held {
            let id = handle.id();
            refs.ids.push(id);
            if id.owner() == self.id && !handle.object().is_shadowed() {
                unshadowed.push(handle);
            }
            if owners.insert(id.owner())
                && let Some(address) = self.outside.address_of(id.owner())
            {
                refs.owners.push(address);
            }
        }
        if let Some(owner) = unshadowed.first().and_then(|handle| Owner::of(handle)) {
            owner.shadow(unshadowed.iter().map(|handle| handle.object()));
        }
        Some(Box::new(refs))
    }

    /// The last handle of an object here was dropped, or a borrower has left.
    pub(crate) fn free_if_unneeded(self: &Arc<Self>, id: ObjectId) {
        if self.objects.has_ebbed(id) {
            self.outside.has_ebbed(self);
        }
        match self.objects.free_if_unneeded(id, self.id) {
            Freed::Kept => {}
            Freed::Borrowed(object, released) => {
                self.registrations.asks_no_more_for(id);
                if object.is_an_actors()
                    && let Some(actor) = self.actors.forget(id)
                {
                    self.submission.request(Request::Forget(actor));
                }
                // Fails only when the session is over, and then nobody needs to know.
                let _ = self.released.send(released);
            }
            Freed::Owned(object, value) => {
                if object.is_shadowed() {
                    self.tell_steward(vec![Shadow::Freed(id)]);
                }
                if let Some(ObjectValue::Stored(stored)) = value {
                    self.delete_stored(id, &stored);
                }
                self.is_freed(id);
                if object.is_an_actors()
                    && let Some(actor) = self.actors.forget(id)
                    && !self.submission.is_closed()
                {
                    let by = "the drop of its last handle".to_owned();
                    self.tell_head(HeadMessage::TerminateActor { actor, by });
                    self.submission.request(Request::Forget(actor));
                }
            }
        }
    }

    /// Asks the owner of a borrowed object to say when it is there, once.
    pub(crate) fn subscribe(self: &Arc<Self>, handle: &Handle) {
        let id = handle.id();
        if id.owner() == self.id || !handle.object().must_subscribe() {
            return;
        }
        self.registrations.asks_for(id);
        if !self.send_to(id.owner(), PeerMessage::Subscribe(vec![id])) {
            let error = Error::OwnerDied { object: id, owner: id.owner() };
            self.resolve_object(handle.object(), ObjectValue::Failed(Box::new(error)), Vec::new());
        }
    }

    /// A node has a copy of one of our objects now.
    pub(crate) fn copied(self: &Arc<Self>, id: ObjectId, at: StoreNode) {
        if let Some(object) = self.objects.get(id) {
            self.objects.stored(id, std::slice::from_ref(&at));
            // Looked at afterwards: whoever frees it from here on finds the copy.
            if object.add_copy(&at) && self.objects.has(&object) {
                self.shadow_changed(&object);
                return;
            }
            self.objects.not_stored(id, std::slice::from_ref(&at));
        }
        // Freed meanwhile, or lost and made again.
        self.delete_at(&at, id);
    }

    /// Of these copies, those that do not belong to the object's value.
    pub(crate) fn delete_other_copies(self: &Arc<Self>, id: ObjectId, stored: &Stored, value: &ObjectValue) {
        for holder in stored.nodes.iter().filter(|holder| !value.is_stored_at(holder.node)) {
            self.delete_at(holder, id);
        }
    }

    /// What an attempt has stored whose result came when another's counted already.
    pub(crate) fn discard_late(self: &Arc<Self>, task: TaskId, outcome: Outcome) {
        let values = match outcome {
            Outcome::One(value) => vec![value],
            Outcome::Many(values) => values,
            Outcome::StreamEnded(_) | Outcome::Failed(_) => return,
        };
        for (index, value) in values.iter().enumerate() {
            let (id, ObjectValue::Stored(stored)) = (task.output(index as u32), value) else { continue };
            for holder in &stored.nodes {
                self.left_over(id, holder);
            }
        }
    }

    /// An attempt that counts no more may have stored these there.
    pub(super) fn outputs_left_over(self: &Arc<Self>, task: TaskId, outputs: Outputs, at: &StoreNode) {
        match outputs {
            Outputs::Fixed(count) => (0..count).for_each(|index| self.left_over(task.output(index), at)),
            Outputs::Stream { ahead } => self.delete_left(task, self.streams.left_over(task, ahead, at)),
        }
    }

    /// Deletes what attempts may have stored of a stream to which nobody adds any more.
    pub(super) fn delete_left(self: &Arc<Self>, task: TaskId, left: impl IntoIterator<Item = Left>) {
        for left in left {
            for index in left.indices(MOST_LEFT) {
                self.left_over(task.output(index), &left.at);
            }
        }
    }

    /// A copy of an object of ours may lie there that does not count.
    pub(crate) fn left_over(self: &Arc<Self>, id: ObjectId, at: &StoreNode) {
        self.leftovers.note(id, at);
        // Looked at afterwards: whoever sets the value or frees the object from here on finds the note.
        match self.objects.get(id).map(|object| object.value()) {
            Some(Some(value)) => self.delete_leftovers(id, Some(&value)),
            // The next attempt may be writing it there.
            Some(None) => {}
            None => self.delete_leftovers(id, None),
        }
    }

    /// The object has a value now.
    pub(crate) fn value_is_known(self: &Arc<Self>, object: &Object) {
        if self.leftovers.are_any()
            && let Some(value) = object.value()
        {
            self.delete_leftovers(object.id(), Some(&value));
        }
    }

    /// Nobody needs the object any more.
    pub(crate) fn is_freed(self: &Arc<Self>, id: ObjectId) {
        if self.leftovers.are_any() {
            self.delete_leftovers(id, None);
        }
    }

    fn delete_leftovers(self: &Arc<Self>, id: ObjectId, value: Option<&ObjectValue>) {
        for node in self.leftovers.take(id) {
            if !value.is_some_and(|value| value.is_stored_at(node.node)) {
                self.delete_at(&node, id);
            }
        }
    }

    /// Deletes the outputs of a task that fails after it has stored them. A task that makes lost outputs again may have
    /// found them, and its owner has them then.
    pub(crate) fn discard(self: &Arc<Self>, spec: &TaskSpec, outputs: &[ObjectValue]) {
        for (index, value) in (0..).zip(outputs) {
            if let ObjectValue::Stored(stored) = value
                && !spec.remakes
            {
                self.delete_stored(spec.id.output(index), stored);
            }
        }
    }

    /// Nobody needs these copies.
    pub(crate) fn delete_stored(self: &Arc<Self>, id: ObjectId, stored: &Stored) {
        for node in &stored.nodes {
            self.delete_at(node, id);
        }
    }
}

/// Why a value cannot be sent, if it cannot: its own bytes are few or elsewhere, the refs in it are not.
pub(crate) fn too_many(value: &ObjectValue, what: impl FnOnce() -> String) -> Option<Error> {
    let weight = value.weight();
    (weight > MESSAGE_LIMIT).then(|| Error::InvalidArgument {
        what: format!(
            "the refs in {} need {weight} bytes in one message, over the limit of {MESSAGE_LIMIT}; spread them over several objects",
            what()
        ),
    })
}
