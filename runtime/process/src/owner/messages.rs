//! What other processes say to an owner.

use std::sync::Arc;

use wingbeat_core::ProcessId;
use wingbeat_core::error::Error;
use wingbeat_core::value::ObjectValue;
use wingbeat_net::messages::PeerMessage;

use crate::owner::Owner;

impl Owner {
    /// Takes in a message of another process.
    pub(crate) fn hears(self: &Arc<Self>, from: ProcessId, message: PeerMessage) {
        let Some(message) = self.adoptions.may_be_answered(from, message) else { return self.look_after_owners() };
        match message {
            PeerMessage::Results(results) => self.results(from, results),
            PeerMessage::GaveBack { lease, tasks, waiting } => {
                self.gave_back(lease, &tasks, waiting);
            }
            PeerMessage::Ready(lease) => self.lease_ready(lease),
            PeerMessage::StreamItem { task, index, value } => self.stream_item(from, task, index, value),
            PeerMessage::Subscribe(ids) => {
                for id in ids {
                    let value = match self.objects.get(id) {
                        Some(object) => object.subscribe(from),
                        // It was never referred to, as far as its owner had said, or is not any more.
                        None if id.owner() != self.id => {
                            let owner = id.owner();
                            Some(ObjectValue::Failed(Box::new(Error::OwnerDied { object: id, owner })))
                        }
                        None => Some(ObjectValue::Failed(Box::new(Error::ObjectLost {
                            object: id,
                            why: "its owner has freed it".into(),
                        }))),
                    };
                    if let Some(value) = value {
                        self.send_value(from, id, value);
                    }
                }
            }
            PeerMessage::Resolved(values) => {
                for (id, value) in values {
                    self.registrations.asks_no_more_for(id);
                    if let Some(object) = self.objects.get(id) {
                        let contained = self.hold_refs(value.refs());
                        self.resolve_object(&object, value, contained);
                    }
                }
            }
            PeerMessage::Borrow(ids) => {
                // Nothing would ever take out what somebody who is gone registers.
                if self.outside.is_gone(from) {
                    return;
                }
                let mut unshadowed = Vec::new();
                for (id, number) in ids {
                    match self.objects.borrow(id, from, number) {
                        Some(object) if object.is_shadowed() => {}
                        Some(object) => unshadowed.push(object),
                        None => tracing::debug!(object = %id, "somebody borrows an object that is freed already"),
                    }
                }
                self.shadow(unshadowed.iter());
            }
            PeerMessage::Release(ids) => {
                for (id, number) in ids {
                    self.objects.unborrow(id, from, number);
                    self.free_if_unneeded(id);
                }
            }
            PeerMessage::Copied { object, at } => self.copied(object, at),
            PeerMessage::Lost { object, at, why } => self.object_lost(object, &at, &why),
            PeerMessage::Shadows(shadows) => self.hears_shadows(from, shadows),
            PeerMessage::CancelObject { object, force } => self.cancel_object(object, force),
            PeerMessage::Work(work) => {
                tracing::warn!(%from, ?work, "this is no worker process, and was sent work, which it drops");
            }
        }
    }
}
