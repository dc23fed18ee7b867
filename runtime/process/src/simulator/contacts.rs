//! Links between processes, and how contact is lost.

use wingbeat_core::value::StoreNode;
use wingbeat_core::{NodeId, ObjectId, ProcessId};
use wingbeat_net::messages::PeerMessage;

use super::side::{Awaited, Line, Parcel, address};
use super::world::{Happening, World};
use crate::owner::borrows::Lost;
use crate::wire::numbers::Receipt;

/// The pause before an owner is told again of a copy.
const TOLD_AGAIN: u64 = 1_000;
/// How long a word may take between two that are far from each other.
pub(super) const SLOW: u64 = 150;

fn pair(one: ProcessId, other: ProcessId) -> (ProcessId, ProcessId) {
    (one.min(other), one.max(other))
}

impl World {
    /// What a process has to say to another sets out, if there is a connection. It comes after what was said before.
    pub(super) fn send(&mut self, from: ProcessId, to: ProcessId) {
        let line = self.line(from, to);
        let (connection, is_up) = (line.connection, line.is_up);
        let Some(process) = self.alive(from).filter(|_| is_up) else { return };
        // What is said at once may go together or not.
        let most = 1 + self.shared.below(8) as usize;
        while let Some(parcel) = process.side.next_parcel(to, connection, most) {
            let delay = match self.shared.below(20) {
                // Some are far from each other.
                _ if self.is_slow(from.0, to.0) => self.shared.below(SLOW),
                0 => self.shared.below(60),
                _ => self.shared.below(4),
            };
            let after = self.arrival((from, to), delay);
            self.shared.trace(|| format!("{from} says to {to} in {}: {:?}", parcel.contact, parcel.batch));
            self.schedule(after, Happening::Deliver { from, to, parcel: Box::new(parcel) });
        }
    }

    fn line(&mut self, one: ProcessId, other: ProcessId) -> &mut Line {
        self.lines.entry(pair(one, other)).or_insert_with(|| {
            self.met.entry(one).or_default().insert(other);
            self.met.entry(other).or_default().insert(one);
            Line::default()
        })
    }

    /// After how long something arrives that takes so long: not before what is on its way.
    fn arrival(&mut self, way: (ProcessId, ProcessId), delay: u64) -> u64 {
        let now = self.shared.now();
        let at = self.links.entry(way).or_default();
        *at = (*at).max(now + delay);
        *at - now
    }

    /// The connection between two breaks. What is under way over it is lost, in both directions; what was not answered comes
    /// again over the next, which is there after a while.
    pub(super) fn breaks(&mut self, one: ProcessId, other: ProcessId) {
        if one == other || self.are_of_one_node(one, other) {
            return;
        }
        let line = self.line(one, other);
        if !std::mem::replace(&mut line.is_up, false) {
            return;
        }
        line.connection += 1;
        self.shared.report.borrow_mut().cuts += 1;
        self.shared.trace(|| format!("the connection between {one} and {other} breaks"));
        let after = match self.shared.below(4) {
            0 => self.shared.below(2_000),
            _ => self.shared.below(50),
        };
        self.schedule(after, Happening::Reconnect { one, other });
    }

    pub(super) fn reconnect(&mut self, one: ProcessId, other: ProcessId) {
        self.line(one, other).is_up = true;
        for (from, to) in [(one, other), (other, one)] {
            self.links.remove(&(from, to));
            if let Some(process) = self.alive(from) {
                process.side.resume(to);
                self.send(from, to);
            }
        }
    }

    /// Whether a connection between two has ended.
    fn is_over(&self, from: ProcessId, to: ProcessId, connection: u64) -> bool {
        self.lines.get(&pair(from, to)).is_some_and(|line| line.connection != connection)
    }

    /// Whether two are far from each other: one pair of eight, others with every seed.
    pub(super) fn is_slow(&self, one: u64, other: u64) -> bool {
        let mixed = (self.shared.config.seed ^ one.wrapping_mul(31) ^ other).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        mixed >> 61 == 0
    }

    pub(super) fn deliver(&mut self, from: ProcessId, to: ProcessId, parcel: Parcel) {
        let is_dropped = self.dropped.get(&(from, to)).is_some_and(|contact| parcel.contact <= *contact);
        if is_dropped || self.is_over(from, to, parcel.connection) {
            return;
        }
        let Some(process) = self.alive(to) else {
            // Nobody listens where it did.
            return self.schedule(1, Happening::Lose { at: from, peer: to, number: parcel.contact });
        };
        if let Some(sender) = self.alive(from) {
            sender.side.connected(to, parcel.contact);
        } else {
            // This may be the first that is heard of it.
            let after = 1 + self.shared.below(20);
            self.schedule(after, Happening::Lose { at: to, peer: from, number: parcel.contact });
        }
        let mut heard = process.side.hear(from, &parcel);
        if let Receipt::Lost(present) = heard {
            let greets = self.contact_over(to, from, present, parcel.contact);
            if greets {
                process.side.greet(from);
            }
            heard = process.side.hear(from, &parcel);
        }
        let Parcel { contact, connection, batch } = parcel;
        let number = batch.number;
        self.shared.trace(|| format!("{to} hears {from} in {contact}: {heard:?} {batch:?}"));
        if heard == Receipt::TakeIn {
            for message in batch.messages {
                process.take_in(from, message, &self.shared);
            }
        }
        if matches!(heard, Receipt::TakeIn | Receipt::Again) {
            // The answer goes over the same connection, after what was said before it.
            let delay = if self.shared.below(10) == 0 { self.shared.below(60) } else { self.shared.below(4) };
            let after = self.arrival((to, from), delay);
            self.schedule(after, Happening::Answered { at: from, by: to, contact, connection, number });
        }
    }

    /// A process hears that another has taken a batch in.
    pub(super) fn answered(&mut self, at: ProcessId, by: ProcessId, contact: u64, connection: u64, number: u64) {
        let Some(process) = self.alive(at) else { return };
        let is_dropped = self.dropped.get(&(by, at)).is_some_and(|dropped| contact <= *dropped);
        if is_dropped || self.is_over(at, by, connection) {
            return;
        }
        for awaited in process.side.answered(by, contact, number) {
            let Awaited::Registered(with, mut registered) = awaited else { continue };
            while let Some(next) = process.owner.registered(with, registered, || true) {
                registered = next;
                // What was sent together was taken in together.
                if !process.side.is_flushed_to(by) {
                    process.side.await_all(by, Awaited::Registered(with, next));
                    break;
                }
            }
        }
        self.send(at, by);
    }

    /// A process loses its contact with another, of this number.
    pub(super) fn contact_lost(&mut self, at: ProcessId, peer: ProcessId, number: u64) {
        let Some(process) = self.alive(at) else { return };
        if process.side.contact_with(peer) != Some(number) {
            return;
        }
        if !self.processes.contains_key(&peer) && self.shared.below(2) == 0 {
            process.side.certainly_gone(peer);
        }
        let next = process.side.next_contact(peer);
        self.contact_over(at, peer, number, next);
    }

    /// The contact of this number is over, and the next one has that number. Whether anything was said in it.
    fn contact_over(&mut self, at: ProcessId, peer: ProcessId, number: u64, next: u64) -> bool {
        let Some(process) = self.alive(at) else { return false };
        let Some(awaited) = process.side.end_contact(peer, number, next) else { return false };
        self.shared.trace(|| format!("{at} loses contact {number} with {peer}"));
        for awaited in awaited {
            if let Awaited::Copied(object, StoreNode { node, .. }) = awaited {
                self.schedule(TOLD_AGAIN, Happening::TellOfCopy { at, object, node });
            }
        }
        process.owner.borrower_lost(peer);
        let borrowed = process.owner.borrowed_over(peer);
        if process.side.steward() == Some(peer) {
            process.owner.shadow_anew();
        }
        let after = self.shared.below(5);
        self.schedule(after, Happening::SettleBorrowed { at, peer, borrowed });
        process.owner.connection_lost(peer);
        process.peer_lost(peer, &self.shared);
        true
    }

    pub(super) fn settle_borrowed(&mut self, at: ProcessId, peer: ProcessId, borrowed: Lost) {
        let Some(process) = self.alive(at) else { return };
        if !self.processes.contains_key(&peer) {
            process.side.certainly_gone(peer);
        }
        process.owner.settle_borrowed(peer, borrowed);
    }

    pub(super) fn tell_of_copy(&mut self, at: ProcessId, object: ObjectId, node: NodeId) {
        let Some(process) = self.alive(at) else {
            self.shared.untold.borrow_mut().insert((object, node));
            return;
        };
        let holder = StoreNode { node, address: address(ProcessId(node.0)) };
        if process.say(object.owner(), PeerMessage::Copied { object, at: holder.clone() }) {
            process.side.await_all(object.owner(), Awaited::Copied(object, holder));
        }
    }

    /// Contact between two processes ends: one notices at once, and the other later, or with the first word of the next.
    pub(super) fn cut(&mut self, one: ProcessId, other: ProcessId) {
        let (Some(first), Some(second)) = (self.alive(one), self.alive(other)) else { return };
        let Some(number) = first.side.contact_with(other) else { return };
        if one == other
            || self.are_of_one_node(one, other)
            || !first.side.is_connected(other)
            || !second.side.is_connected(one)
        {
            return;
        }
        self.shared.report.borrow_mut().cuts += 1;
        self.shared.cut.borrow_mut().extend([one, other]);
        self.shared.trace(|| format!("contact {number} between {one} and {other} is cut"));
        for pair in [(one, other), (other, one)] {
            if self.shared.below(2) == 0 {
                self.dropped.insert(pair, number);
            }
        }
        self.contact_lost(one, other, number);
        // It looks for the other side, and is told of the loss; or it does not find it for long.
        let after = self.shared.below(40);
        let what = match self.shared.below(2) {
            0 => Happening::Greet { at: one, peer: other },
            _ => Happening::Lose { at: other, peer: one, number },
        };
        self.schedule(after, what);
        self.schedule(after + 200, Happening::Greet { at: one, peer: other });
    }

    /// Whether one is the steward of the other: what is between them on one machine does not break, and what a process has said
    /// before it ended is taken in.
    fn are_of_one_node(&self, one: ProcessId, other: ProcessId) -> bool {
        let stewards = self.shared.stewards.lock();
        stewards.get(&one) == Some(&other) || stewards.get(&other) == Some(&one)
    }

    /// A process is gone: whoever is in contact with it notices.
    pub(super) fn tell_peers_of_death(&mut self, gone: ProcessId) {
        for peer in self.met.remove(&gone).unwrap_or_default() {
            let contact = self.alive(peer).and_then(|process| process.side.contact_with(gone));
            let Some(number) = contact else { continue };
            if self.shared.config.faults && self.shared.below(2) == 0 && !self.are_of_one_node(gone, peer) {
                self.dropped.insert((gone, peer), number);
            }
            let arrives = self.links.get(&(gone, peer)).map_or(0, |at| at.saturating_sub(self.shared.now()));
            let after = arrives + self.shared.below(20);
            self.schedule(after, Happening::Lose { at: peer, peer: gone, number });
        }
    }
}
