//! What the steward of this process's node is told, so that it can answer for objects when this process is no more: those to
//! which others may refer, and what becomes of them. An object to which nobody else refers costs nothing.
//!
//! A ref is *handed out* when it is written into a value or message, or when a borrower registers. From then on the object has a
//! *shadow* at the steward, until it is freed.

use std::sync::Arc;

use wingbeat_net::messages::{MESSAGE_LIMIT, PeerMessage, Shadow, Weight};

use crate::owner::Owner;
use crate::owner::object::Object;

/// A message with more than this, in bytes, is sent before more is added to it.
const BYTES_A_MESSAGE: usize = 256 << 10;

impl Owner {
    /// Others may refer to these objects of ours.
    pub(super) fn shadow<'a>(self: &Arc<Self>, objects: impl Iterator<Item = &'a Arc<Object>>) {
        // An actor ends with the process that made it, unless that is a driver's, and its handle with it.
        let is_value = |object: &&Arc<Object>| object.id().owner() == self.id && !self.actors.has(object.id());
        let new = objects.filter(is_value).filter(|object| object.begin_shadow());
        self.tell_of(new.map(|object| &**object));
    }

    /// An object has got its value, or a copy more or less.
    pub(super) fn shadow_changed(self: &Arc<Self>, object: &Object) {
        // What fails with the session fails with its owner.
        if !object.is_shadowed() || self.ended().is_some() {
            return;
        }
        self.tell_of(std::iter::once(object));
        // It may have been freed in the same moment, or by whoever waited for its value.
        if !self.objects.has(object) {
            self.tell_steward(vec![Shadow::Freed(object.id())]);
        }
    }

    /// Contact with the steward was lost: it may not have heard all.
    pub(crate) fn shadow_anew(self: &Arc<Self>) {
        // Before they are looked up: what is freed meanwhile is said after it, and again after all.
        self.tell_steward(vec![Shadow::Again]);
        let shadowed = self.objects.shadowed();
        self.tell_of(shadowed.iter().map(|object| &**object));
        let is_freed = |object: &&Arc<Object>| !self.objects.has(object);
        let mut last: Vec<Shadow> = shadowed.iter().filter(is_freed).map(|object| Shadow::Freed(object.id())).collect();
        last.push(Shadow::AllSaid);
        self.tell_steward(last);
    }

    /// Gets into contact with the steward.
    pub(crate) fn greet_steward(self: &Arc<Self>) {
        self.tell_steward(Vec::new());
    }

    fn tell_of<'a>(self: &Arc<Self>, objects: impl Iterator<Item = &'a Object>) {
        let (mut shadows, mut weight) = (Vec::new(), 0);
        for object in objects {
            // One that cannot be sent can be read by nobody else.
            let value = object.value().filter(|value| value.weight() <= MESSAGE_LIMIT);
            let shadow = Shadow::Kept(object.id(), value);
            weight += shadow.weight();
            shadows.push(shadow);
            if weight > BYTES_A_MESSAGE {
                weight = 0;
                self.tell_steward(std::mem::take(&mut shadows));
            }
        }
        if !shadows.is_empty() {
            self.tell_steward(shadows);
        }
    }

    pub(super) fn tell_steward(self: &Arc<Self>, shadows: Vec<Shadow>) {
        self.outside.tell_steward(self, PeerMessage::Shadows(shadows));
    }
}
