//! What is borrowed from other processes, and what they were asked for.

use std::collections::HashSet;

use dashmap::DashMap;
use parking_lot::Mutex;
use tokio::sync::Notify;
use wingbeat_core::{ObjectId, ProcessId};
use wingbeat_net::messages::PeerMessage;

use crate::owner::borrowing::Borrowing;

/// A message that confirms refs, and to whom it goes.
pub(super) type Confirmation = (ProcessId, PeerMessage);

/// What is registered with other owners, and what waits for that.
#[derive(Default)]
pub(crate) struct Registrations {
    /// What is borrowed from others, and what waits until it is registered with them.
    pub(super) borrowing: Mutex<Borrowing<Confirmation>>,
    /// Objects of each owner whose values it was asked for.
    pub(super) asked: DashMap<ProcessId, HashSet<ObjectId>>,
    /// Says that nothing waits in `borrowing`.
    pub(super) confirmed: Notify,
}

impl Registrations {
    /// The owner of `id` is asked for its value: if contact with it is lost first, nobody may wait for that any more.
    pub(super) fn asks_for(&self, id: ObjectId) {
        self.asked.entry(id.owner()).or_default().insert(id);
    }

    pub(super) fn asks_no_more_for(&self, id: ObjectId) {
        self.asked.remove_if_mut(&id.owner(), |_, asked| {
            asked.remove(&id);
            asked.is_empty()
        });
    }

    #[cfg(test)]
    pub(crate) fn what_is_left(&self) -> Vec<String> {
        let mut left = self.borrowing.lock().what_is_left();
        left.extend(self.asked.iter().map(|asked| format!("{} is asked for {:?}", asked.key(), asked.value())));
        left
    }

    /// Waits until no message waits for a registration.
    pub(crate) async fn settled(&self) {
        loop {
            let confirmed = self.confirmed.notified();
            if self.borrowing.lock().is_idle() {
                return;
            }
            confirmed.await;
        }
    }
}
