//! Which nodes have room for what, in the order in which they would be chosen.
//!
//! For each requirement that is asked for, an ordered set of the nodes with room is kept. Changes of nodes are noted
//! in a log, and a set catches up with the log when it is asked the next time. So a decision costs the logarithm of
//! the number of nodes, and what nobody asks about costs nothing.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};

use wingbeat_core::labels::Selector;
use wingbeat_core::{NodeId, ResourceSet};

use super::nodes::Node;

/// Sets that are kept at a time. Each holds an entry a node: at 10,000 nodes half a megabyte.
const KEPT: usize = 64;

/// The place of a node among all nodes; used again when the node is gone.
pub(super) type Slot = usize;

/// What a node must have room for.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(super) struct Requirement {
    pub resources: ResourceSet,
    pub gpu_memory: u64,
    pub selector: Option<Selector>,
    pub order: Order,
    /// Sums alone count, and not whether single devices have room: the sum of several bundles.
    pub is_sum: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) enum Order {
    /// Pack to half a node, then spread; work without devices avoids nodes that have some.
    Pack,
    /// The nodes with the fewest leases first.
    Spread,
    /// Where the least is left over of what is asked for. "Pack to half a node, then spread" leaves something of every
    /// node in use; for what lives long, wholly free nodes are worth more.
    BestFit,
}

/// The smaller, the sooner.
pub(super) type Cost = u64;

/// A requirement that somebody has; see [`Index::add`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct RequirementId(u32);

#[derive(Default)]
pub(super) struct Index {
    /// Never iterated: its order is random.
    ids: HashMap<Requirement, RequirementId>,
    known: BTreeMap<RequirementId, Known>,
    next: u32,
    log: VecDeque<Slot>,
    /// How many entries of the log are gone.
    forgotten: u64,
    /// Up to where some set has read the log.
    read: u64,
    asked: u64,
    /// Requirements that nobody has, and that are kept.
    unused: usize,
    /// How often one became so.
    unused_times: u64,
    /// Those that became so, with that count then; some of them somebody has again.
    unused_order: VecDeque<(u64, RequirementId)>,
    /// Those whose nodes are kept.
    built: Vec<RequirementId>,
}

struct Known {
    requirement: Requirement,
    uses: u32,
    /// By the count of those that became so: no two entries of the order are for the same time.
    unused_since: u64,
    built: Option<Built>,
}

struct Built {
    /// Up to where in the log.
    caught_up: u64,
    asked: u64,
    fits: BTreeSet<(Cost, Slot)>,
    entries: Vec<Entry>,
    /// Nodes that could hold it if nothing else were on them.
    possible: usize,
}

#[derive(Clone, Copy, Default)]
struct Entry {
    version: u64,
    joined: u64,
    cost: Option<Cost>,
    is_possible: bool,
}

impl Built {
    fn look_at(&mut self, requirement: &Requirement, slot: Slot, node: Option<&Node>) {
        if self.entries.len() <= slot {
            self.entries.resize(slot + 1, Entry::default());
        }
        let version = node.map_or(0, |node| node.version);
        let old = self.entries[slot];
        if version != 0 && old.version == version {
            return;
        }
        let cost = node.and_then(|node| node.cost_of(requirement));
        // What a node has does not change while it is there.
        let joined = node.map_or(0, |node| node.joined);
        let is_possible = match node {
            Some(_) if joined == old.joined => old.is_possible,
            _ => node.is_some_and(|node| node.could_hold(requirement)),
        };
        if old.cost != cost {
            if let Some(cost) = old.cost {
                self.fits.remove(&(cost, slot));
            }
            if let Some(cost) = cost {
                self.fits.insert((cost, slot));
            }
        }
        self.possible = self.possible + usize::from(is_possible) - usize::from(old.is_possible);
        self.entries[slot] = Entry { version, joined, cost, is_possible };
    }
}

impl Index {
    /// Somebody asks for this from now on, until [`Index::remove`].
    pub(super) fn add(&mut self, requirement: Requirement) -> RequirementId {
        if let Some(id) = self.ids.get(&requirement) {
            if let Some(known) = self.known.get_mut(id) {
                self.unused -= usize::from(known.uses == 0);
                known.uses += 1;
            }
            return *id;
        }
        let id = RequirementId(self.next);
        self.next += 1;
        self.ids.insert(requirement.clone(), id);
        self.known.insert(id, Known { requirement, uses: 1, unused_since: 0, built: None });
        id
    }

    /// Somebody asks for it no more. It is kept for a while: somebody else may ask for the same in a moment.
    pub(super) fn remove(&mut self, id: RequirementId) {
        let Some(known) = self.known.get_mut(&id) else { return };
        known.uses -= 1;
        if known.uses > 0 {
            return;
        }
        self.unused_times += 1;
        known.unused_since = self.unused_times;
        self.unused += 1;
        self.unused_order.push_back((self.unused_times, id));
        let is_unused = |known: &BTreeMap<RequirementId, Known>, (since, id): (u64, RequirementId)| {
            known.get(&id).is_some_and(|known| known.uses == 0 && known.unused_since == since)
        };
        while self.unused > KEPT
            && let Some((since, oldest)) = self.unused_order.pop_front()
        {
            if is_unused(&self.known, (since, oldest))
                && let Some(known) = self.known.remove(&oldest)
            {
                self.ids.remove(&known.requirement);
                self.built.retain(|other| *other != oldest);
                self.unused -= 1;
            }
        }
        if self.unused_order.len() > 16 * KEPT {
            self.unused_order.retain(|entry| is_unused(&self.known, *entry));
        }
    }

    pub(super) fn requirement(&self, id: RequirementId) -> Option<&Requirement> {
        self.known.get(&id).map(|known| &known.requirement)
    }

    /// A node changed, came or went.
    pub(super) fn changed(&mut self, slot: Slot, nodes: usize) {
        if self.log.back() == Some(&slot) && self.read < self.end_of_log() {
            return;
        }
        self.log.push_back(slot);
        // A set that lags further behind is cheaper made anew.
        while self.log.len() > nodes + 1024 {
            self.log.pop_front();
            self.forgotten += 1;
        }
    }

    fn end_of_log(&self) -> u64 {
        self.forgotten + self.log.len() as u64
    }

    fn caught_up(&mut self, id: RequirementId, nodes: &[Option<Node>]) -> Option<&Built> {
        self.asked += 1;
        let now = self.end_of_log();
        self.read = now;
        let known = self.known.get_mut(&id)?;
        let is_new = known.built.is_none();
        let built = known.built.get_or_insert_with(|| Built {
            caught_up: 0,
            asked: 0,
            fits: BTreeSet::new(),
            entries: Vec::with_capacity(nodes.len()),
            possible: 0,
        });
        built.asked = self.asked;
        let node = |slot: Slot| nodes.get(slot).and_then(Option::as_ref);
        if is_new || built.caught_up < self.forgotten {
            for slot in 0..nodes.len() {
                built.look_at(&known.requirement, slot, node(slot));
            }
        } else {
            let unseen = (built.caught_up - self.forgotten) as usize;
            for slot in self.log.range(unseen..) {
                built.look_at(&known.requirement, *slot, node(*slot));
            }
        }
        built.caught_up = now;
        if is_new {
            self.built.push(id);
            self.drop_the_least_asked();
        }
        self.known.get(&id)?.built.as_ref()
    }

    fn drop_the_least_asked(&mut self) {
        if self.built.len() <= KEPT {
            return;
        }
        let asked = |id: &RequirementId| self.known.get(id)?.built.as_ref().map(|built| built.asked);
        let least = self.built.iter().enumerate().min_by_key(|(_, id)| asked(id)).map(|(at, _)| at);
        if let Some(at) = least
            && let Some(known) = self.known.get_mut(&self.built.swap_remove(at))
        {
            known.built = None;
        }
    }

    /// How often somebody asked where there is room.
    #[cfg(test)]
    pub(super) fn questions(&self) -> u64 {
        self.asked
    }

    /// The nodes with room, the best first.
    pub(super) fn fitting(&mut self, id: RequirementId, nodes: &[Option<Node>]) -> impl Iterator<Item = (Cost, Slot)> {
        let fits = self.caught_up(id, nodes).map(|built| built.fits.iter().copied());
        fits.into_iter().flatten()
    }

    /// How many nodes could hold it if nothing else were on them.
    pub(super) fn possible(&mut self, id: RequirementId, nodes: &[Option<Node>]) -> usize {
        self.caught_up(id, nodes).map_or(0, |built| built.possible)
    }

    /// How many have room now.
    pub(super) fn count(&mut self, id: RequirementId, nodes: &[Option<Node>]) -> usize {
        self.caught_up(id, nodes).map_or(0, |built| built.fits.len())
    }
}

/// Where a node is; only looked up.
pub(super) type Slots = BTreeMap<NodeId, Slot>;

#[cfg(test)]
mod tests {
    use wingbeat_core::Amount;

    use super::*;

    #[test]
    fn what_comes_and_goes_without_a_question_is_not_counted_again_and_again() {
        let mut index = Index::default();
        let asked = |cpus| Requirement {
            resources: ResourceSet::cpus(Amount::whole(cpus)),
            gpu_memory: 0,
            selector: None,
            order: Order::Pack,
            is_sum: false,
        };
        for turn in 0..100 * KEPT {
            let id = index.add(asked(1 + turn as u32 % 2));
            index.remove(id);
            assert!(index.unused_order.len() <= 16 * KEPT, "after {turn} times");
        }
        assert_eq!((index.unused, index.known.len()), (2, 2));
    }
}
