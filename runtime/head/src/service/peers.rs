//! Processes and nodes that talk to the head, each over any number of connections.
//!
//! The end of a connection is not the end of who was behind it. A peer that has no connection is *away*: what the head says to
//! it is kept, and it may come back and go on where it was. It is lost when it said that it leaves, when its machine says that
//! nobody listens there any more, or when it does not come back in time.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;
use wingbeat_core::spec::Address;
use wingbeat_net::address;
use wingbeat_net::limits::limits;
use wingbeat_net::link::Link;
use wingbeat_net::liveness::{Liveness, Verdict};
use wingbeat_net::messages::Weight;
use wingbeat_net::mux::Connection;

/// The first pause before an absent peer's machine is asked whether somebody listens, and the longest.
const PAUSES: (Duration, Duration) = (Duration::from_millis(5), Duration::from_secs(1));

/// A process or node, from its first connection until it is lost.
pub(super) struct Peer<C, M> {
    /// What the head says to it.
    pub link: Link<M>,
    /// For questions to it, over its latest connection.
    pub client: C,
    /// The number of its next batch.
    heard: u64,
    leaves: bool,
    presence: Presence,
}

enum Presence {
    Here(Connection),
    /// Whoever waits for it is told when it is back.
    Away(Arc<Notify>),
}

/// How somebody was connected before.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Before {
    Never,
    /// With this head.
    WithThis,
    /// With an earlier one of its cluster.
    WithEarlier,
    /// With one whose nodes and processes had time to come back, and do not any more.
    TooLongAgo,
}

/// Who has connected.
pub(super) enum Entered<M> {
    New(Link<M>),
    /// It goes on where it was.
    Back(Link<M>),
    /// It was given up, or this head never knew it.
    Unknown,
    /// Another has its name already.
    Taken,
}

/// A peer that has no connection any more.
pub(super) struct Absence {
    back: Arc<Notify>,
    leaves: bool,
    was_silent: bool,
}

/// How an absence ends.
#[derive(PartialEq, Eq, Debug)]
pub(super) enum Return {
    Back,
    /// Nobody listens where it did, or it has said that it leaves.
    Ended,
    TooLate,
}

/// Enters a connection of a peer.
pub(super) fn enter<K: Ord, C, M: Weight + Send + 'static>(
    peers: &mut BTreeMap<K, Peer<C, M>>,
    id: K,
    client: C,
    connection: &Connection,
    before: Before,
) -> Entered<M> {
    match peers.entry(id) {
        Entry::Vacant(_) if matches!(before, Before::WithThis | Before::TooLongAgo) => Entered::Unknown,
        Entry::Vacant(free) => {
            let presence = Presence::Here(connection.clone());
            let peer = free.insert(Peer { link: Link::new(), client, heard: 0, leaves: false, presence });
            Entered::New(peer.link.clone())
        }
        // Who comes from an earlier head may not have heard that it was let in.
        Entry::Occupied(mut known) if before != Before::Never => {
            let peer = known.get_mut();
            peer.client = client;
            match std::mem::replace(&mut peer.presence, Presence::Here(connection.clone())) {
                // Its end was not noticed here.
                Presence::Here(old) => old.close(),
                Presence::Away(back) => back.notify_one(),
            }
            Entered::Back(peer.link.clone())
        }
        Entry::Occupied(_) => Entered::Taken,
    }
}

/// A connection has ended. None if the peer has another by now, or is lost.
pub(super) fn leave<K: Ord, C, M>(
    peers: &mut BTreeMap<K, Peer<C, M>>,
    id: &K,
    connection: &Connection,
) -> Option<Absence> {
    let peer = peers.get_mut(id)?;
    if !matches!(&peer.presence, Presence::Here(here) if here.is(connection)) {
        return None;
    }
    let back = Arc::new(Notify::new());
    peer.presence = Presence::Away(back.clone());
    let was_silent = *connection.silence().borrow();
    Some(Absence { back, leaves: peer.leaves, was_silent })
}

/// Takes out a peer whose absence lasts too long. None if it is back after all.
pub(super) fn lose<K: Ord, C, M>(peers: &mut BTreeMap<K, Peer<C, M>>, id: &K, absence: &Absence) -> Option<Peer<C, M>> {
    let peer = peers.get(id)?;
    match &peer.presence {
        Presence::Away(back) if Arc::ptr_eq(back, &absence.back) => peers.remove(id),
        _ => None,
    }
}

/// Whether a batch of this number is to be taken in: it is of somebody who is known, and has not come before.
pub(super) fn hears<K: Ord, C, M>(peers: &mut BTreeMap<K, Peer<C, M>>, id: &K, number: u64) -> bool {
    let Some(peer) = peers.get_mut(id).filter(|peer| number >= peer.heard) else { return false };
    peer.heard = number + 1;
    true
}

/// What the head says to those that have a connection.
pub(super) fn links_of_present<K, C, M>(peers: &BTreeMap<K, Peer<C, M>>) -> Vec<Link<M>> {
    let present = peers.values().filter(|peer| matches!(peer.presence, Presence::Here(_)));
    present.map(|peer| peer.link.clone()).collect()
}

/// A peer has said that it leaves.
pub(super) fn leaves<K: Ord, C, M>(peers: &mut BTreeMap<K, Peer<C, M>>, id: &K) {
    if let Some(peer) = peers.get_mut(id) {
        peer.leaves = true;
    }
}

impl Absence {
    /// Whether it has said that it leaves.
    pub(super) fn is_leaving(&self) -> bool {
        self.leaves
    }

    /// Waits until the peer is back, or lost. A refusal says little of one on another machine that nobody else may be able to
    /// dial: something between may let nobody in. It is given time to come by itself, and all of it if it was silent. It is lost after as
    /// much silence as `lost_after` says; time in which the head stood still itself does not count.
    pub(super) async fn ends(&self, address: &Address, may_hide: bool, lost_after: impl Fn() -> Duration) -> Return {
        if self.leaves {
            return Return::Ended;
        }
        let hides = may_hide && address.machine != address::this_machine();
        let listening = async {
            let silence = if self.was_silent { limits().silence } else { Duration::ZERO };
            let mut liveness = Liveness::silent_for(silence);
            while liveness.verdict(Duration::ZERO, lost_after()) != Verdict::Lost {
                let (begun, planned) = (Instant::now(), liveness.left(lost_after()).min(limits().probe));
                tokio::time::sleep(planned).await;
                liveness.heard_nothing(planned, begun.elapsed());
            }
        };
        let asking = async {
            let (mut pause, longest) = PAUSES;
            if hides && self.was_silent {
                return std::future::pending().await;
            }
            if hides {
                tokio::time::sleep(limits().silence / 2).await;
            }
            loop {
                if address::is_gone(address).await {
                    return Return::Ended;
                }
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(longest);
            }
        };
        tokio::select! {
            () = self.back.notified() => Return::Back,
            ended = asking => ended,
            () = listening => Return::TooLate,
        }
    }
}
