//! Where members find each other.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::{Arc, Mutex, PoisonError};

use serde::{Deserialize, Serialize};
use tokio::sync::Notify;

use crate::limits;
use crate::mesh::Card;

/// The actor that tells the members of one group about each other. Its handle goes to every member.
///
/// It can be used once: a group that is broken needs another.
pub struct Meeting {
    members: u32,
    cards: Mutex<BTreeMap<u32, Card>>,
    came: Arc<Notify>,
}

/// What a member is told.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Gathering {
    /// All are there.
    All(Vec<Card>),
    /// These did not come in time, of so many.
    Missing(Vec<u32>, u32),
    /// Another has this rank, or there is none such.
    Refused(String),
}

#[wingbeat::actor(max_concurrency = 4096)]
impl Meeting {
    /// For a group of as many members.
    pub fn new(members: u32) -> Self {
        Meeting { members, cards: Mutex::default(), came: Arc::default() }
    }

    /// A member has come; waits for the others.
    #[allow(private_interfaces, reason = "members call it through `Group::join`")]
    pub(crate) async fn come(&self, rank: u32, card: Card) -> Gathering {
        if rank >= self.members {
            return Gathering::Refused(format!("there is no rank {rank} in a group of {}", self.members));
        }
        let came = self.came.clone();
        match self.cards().entry(rank) {
            // The first stays: others connect to it.
            Entry::Occupied(_) => {
                return Gathering::Refused(format!("rank {rank} came twice; every group needs a meeting of its own"));
            }
            Entry::Vacant(free) => drop(free.insert(card)),
        }
        came.notify_waiters();
        let all = async {
            loop {
                let notified = came.notified();
                if self.cards().len() == self.members as usize {
                    return;
                }
                notified.await;
            }
        };
        let in_time = tokio::time::timeout(*limits::MEETING, all).await.is_ok();
        let cards = self.cards();
        match in_time {
            true => Gathering::All(cards.values().cloned().collect()),
            false => {
                let missing = (0..self.members).filter(|rank| !cards.contains_key(rank)).collect();
                Gathering::Missing(missing, self.members)
            }
        }
    }
}

impl Meeting {
    /// Starts one for as many members, 4096 at most, on no CPU of its own.
    pub fn of(members: u32) -> MeetingHandle {
        Meeting::options().num_cpus(0.0).remote(members)
    }

    fn cards(&self) -> std::sync::MutexGuard<'_, BTreeMap<u32, Card>> {
        self.cards.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
