//! Room that is kept for whoever waits long.
//!
//! Fairness alone would starve who needs much at once beside many who need little and come and go. So whoever has had
//! nothing for [`PATIENCE`] gets room kept: on nodes where everything in the way is either tasks, whose leases are
//! recalled from anybody, or was placed after that one began to wait and may end as soon. It is kept against everybody
//! who began to have nothing later. What somebody waits for may itself wait for those who are held back, in ways that
//! the head does not see: so room is kept for some time, then not, then for longer.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use wingbeat_core::resources::GPU;
use wingbeat_core::{Amount, NodeId, PlacementGroupId, ResourceSet};

use super::fairness::{Claim, LOOKED_AT, Planned, Reservation};
use super::gangs::Budget;
use super::lease::Holder;
use super::nodes::{Node, Nodes};
use super::pool::Pool;
use super::queue::{Standing, Waiter};
use super::{Millis, State, gangs};

/// Who has had nothing for so long gets room kept: until then, it may fit by itself.
pub(super) const PATIENCE: Millis = 1_000;
/// For how long room is kept at first ...
const KEEP: Millis = 5_000;
/// ... and at most, after it was in vain; something in the way that has been there for longer is there to stay.
const KEEP_LIMIT: Millis = 60_000;
/// The part of that time for which it is then not kept.
const PAUSE_PART: Millis = 5;
/// Of so many that wait long ...
const LOOKED_THROUGH: usize = 1_024;
/// ... room is looked for in one tick for at most so many.
const LONG: usize = 64;
/// For whom none was found, it is looked for again after this time.
const LOOK_AGAIN: Millis = 250;
/// Groups for which room is looked for in one tick: each looks at many nodes.
const GANGS_HELPED: usize = 2;

/// When room is kept for somebody.
pub(super) struct Keep {
    /// Room is kept until then.
    until: Millis,
    /// And then not until then.
    pause: Millis,
    /// How long it is kept the next time.
    next: Millis,
}

impl State {
    /// Keeps room for those who have had nothing for long, the longest first.
    pub(super) fn keep_room_for_the_hungry(&mut self, planned: &mut Planned) {
        let Some(until) = self.now.checked_sub(PATIENCE) else { return };
        let hungry: Vec<(Millis, Waiter)> = self.queue.hungry_until(until).take(LOOKED_THROUGH).collect();
        let mut gangs = 0;
        let mut helped = 0;
        for (since, waiter) in hungry {
            if !self.queue.is_blocked(waiter) {
                continue;
            }
            if let Some(keep) = self.reservations.keeps.get(&waiter) {
                if self.now < keep.until {
                    self.recall_where_room_is_kept(waiter, planned);
                    continue;
                }
                if self.now < keep.pause {
                    continue;
                }
            }
            let is_group = matches!(waiter, Waiter::Group(_));
            if helped == LONG || (is_group && gangs == GANGS_HELPED) {
                continue;
            }
            gangs += usize::from(is_group);
            helped += 1;
            let places = self.places_to_keep(waiter, since);
            let Some(standing) = self.queue.standing(waiter) else { continue };
            let keep = self.reservations.keeps.entry(waiter).or_insert(Keep { until: 0, pause: 0, next: KEEP });
            if places.is_empty() {
                // Meanwhile others are looked at.
                (keep.until, keep.pause) = (self.now, self.now + LOOK_AGAIN);
                continue;
            }
            keep.until = self.now + keep.next;
            keep.pause = keep.until + keep.next / PAUSE_PART;
            keep.next = (2 * keep.next).min(KEEP_LIMIT);
            let until = keep.until;
            for (node, needed) in places {
                let reservation = Reservation { waiter, standing, hungry: Some(since), needed, until };
                if self.reservations.by_node.insert(node, reservation).is_some() {
                    // What was kept for another for a moment may be enough already.
                    self.freed_on(node);
                }
            }
            self.recall_where_room_is_kept(waiter, planned);
        }
    }

    fn recall_where_room_is_kept(&mut self, waiter: Waiter, planned: &mut Planned) {
        let Some(standing) = self.queue.standing(waiter) else { return };
        let claim = Claim { standing, asks: 0, is_urgent: true };
        let mut recalled = Vec::new();
        for id in self.reservations.nodes_of(waiter) {
            let (Some(node), Some(reserved)) = (self.nodes.get(id), self.reservations.by_node.get(&id)) else {
                continue;
            };
            let leases = self.leases_on(node, None);
            let needed = &reserved.needed;
            let plan = match waiter {
                // Several bundles together may be no request that one lease could make: then sums alone count.
                Waiter::Group(_) => {
                    self.recalls_that_make_room(&node.pool, &leases, waiter, claim, needed, false).or_else(|| {
                        let mut sum = needed.clone();
                        sum.set(GPU, Amount::ZERO);
                        self.recalls_that_make_room(&node.pool, &leases, waiter, claim, &sum, true)
                    })
                }
                _ => self.recalls_that_make_room(&node.pool, &leases, waiter, claim, needed, true),
            };
            planned.entry(id).or_default().add(needed);
            recalled.extend(plan.unwrap_or_default());
        }
        for id in recalled {
            self.recall(id);
        }
    }

    /// Where room can be made for somebody who has had nothing since `since`, and how much of it on each node.
    fn places_to_keep(&mut self, waiter: Waiter, since: Millis) -> Vec<(NodeId, ResourceSet)> {
        let Some(standing) = self.queue.standing(waiter) else { return Vec::new() };
        if let Waiter::Group(id) = waiter {
            return self.places_for_gang(id, standing, since);
        }
        let Some((id, shape)) = self.shape_of(waiter).and_then(|id| Some((id, self.shapes.get(id)?.clone()))) else {
            return Vec::new();
        };
        if shape.bundle().is_some() {
            return Vec::new();
        }
        let requirements = self.shapes.requirements(id);
        let cursor = self.reservations.cursor;
        let mut looked_at = 0;
        let mut last = cursor;
        let mut best: Option<(usize, NodeId, ResourceSet)> = None;
        for (slot, node) in self.nodes.going_round(cursor) {
            let is_taken = self.reservations.by_node.get(&node.info.id).is_some_and(|other| other.hungry.is_some());
            // A more fleeting reservation yields.
            if is_taken || self.is_unfit(node, waiter) || !self.is_candidate(node, requirements, &shape) {
                continue;
            }
            looked_at += 1;
            last = slot;
            let Some(needed) = node.amounts(&shape.resources, shape.gpu_memory) else { continue };
            let (pool, in_the_way) = self.without_what_goes(node, standing, since);
            if pool.has_room(&needed) && best.as_ref().is_none_or(|(least, ..)| in_the_way < *least) {
                best = Some((in_the_way, node.info.id, needed.into_owned()));
            }
            if looked_at == LOOKED_AT {
                break;
            }
        }
        self.reservations.cursor = if looked_at == LOOKED_AT { last + 1 } else { cursor };
        best.into_iter().map(|(_, node, needed)| (node, needed)).collect()
    }

    /// What a node has free once everything is gone that can be recalled or may end by itself, and how much of that
    /// cannot be recalled. A process that waits gives nothing back before the others it waits for are done, which room
    /// that is kept may hold back.
    fn without_what_goes(&self, node: &Node, standing: Standing, since: Millis) -> (Pool, usize) {
        let passed_by = |at: Millis| at >= since && self.now < at + KEEP_LIMIT;
        let mut pool = node.pool.clone();
        let mut in_the_way = 0;
        for (_, lease) in self.leases_on(node, None).into_iter().filter(|(_, lease)| !lease.is_returned()) {
            let (goes, counts) = match lease.holder {
                _ if lease.is_ending() => (true, false),
                Holder::Nobody => (true, false),
                Holder::Tasks(_) => {
                    let mine = standing.rank.priority;
                    (lease.waiting.is_empty() && mine <= Reverse(self.job_priority(lease.job)), false)
                }
                Holder::Actor(_) => (passed_by(lease.since), true),
            };
            if goes {
                in_the_way += usize::from(counts);
                let back = lease.still_taken();
                pool.give_back(&back.resources, &back.devices);
            }
        }
        for (group, index) in &node.bundles {
            let placed = self.groups.get(*group).and_then(|group| group.placed.get(*index as usize)?.as_ref());
            if let Some(placed) = placed.filter(|placed| passed_by(placed.at)) {
                in_the_way += 1;
                pool.give_back(&placed.taken.resources, &placed.taken.devices);
            }
        }
        (pool, in_the_way)
    }

    /// Nodes on which a group would fit once what goes is gone. What it cannot use stays free for others.
    fn places_for_gang(
        &mut self,
        id: PlacementGroupId,
        standing: Standing,
        since: Millis,
    ) -> Vec<(NodeId, ResourceSet)> {
        let mut idle = Nodes::default();
        let cursor = self.reservations.cursor;
        let mut looked_at = 0;
        let mut last = cursor;
        for (slot, node) in self.nodes.going_round(cursor) {
            let is_taken = self.reservations.by_node.get(&node.info.id).is_some_and(|other| other.hungry.is_some());
            if !node.takes_more() || is_taken {
                continue;
            }
            let (pool, _) = self.without_what_goes(node, standing, since);
            idle.join(node.info.clone());
            idle.change(node.info.id, |there| there.pool = pool);
            last = slot;
            looked_at += 1;
            if looked_at == 2 * LOOKED_AT {
                break;
            }
        }
        self.reservations.cursor = if looked_at == 2 * LOOKED_AT { last + 1 } else { cursor };
        let Some(group) = self.groups.get(id).map(|group| group.among(&mut idle)) else { return Vec::new() };
        let mut needed: BTreeMap<NodeId, ResourceSet> = BTreeMap::new();
        for (_, taken) in gangs::place(&group, &mut idle, &mut Budget::default(), |_, _| true).unwrap_or_default() {
            needed.entry(taken.node).or_default().add(&taken.resources);
        }
        needed.into_iter().collect()
    }
}
