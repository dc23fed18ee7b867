//! Whose leases are recalled for whom, and for whom room is kept.
//!
//! Somebody of a more important job gets a lease from anybody of a less important one. Among equals, somebody who has
//! none gets one from anybody who has some, and somebody who has some gets one from those who have at least two more,
//! so that leases do not go back and forth between them.

use std::collections::BTreeMap;
use std::sync::Arc;

use wingbeat_core::spec::{Shape, Strategy};
use wingbeat_core::{LeaseId, NodeId, PlacementGroupId, ResourceSet};
use wingbeat_net::messages::HeadEvent;

use super::index::Slot;
use super::leases::{Asker, Holder, Lease};
use super::nodes::{Node, Nodes};
use super::pool::Pool;
use super::queue::{Rank, Waiter};
use super::{Millis, State, gangs};

/// A lease is not recalled before its owner had this long to use it, or leases would go back and forth
/// faster than tasks.
const RECALL_AFTER: Millis = 50;
/// A recalled lease that is not back by then runs a long task, and another is recalled. Ten times
/// [`RECALL_AFTER`]: a hundred short tasks, and not yet long for a person who waits.
const RECALL_PATIENCE: Millis = 500;
/// Waiters that are helped in one tick, the first in order.
const HELPED: usize = 32;
/// Leases for which one waiter is helped in one tick.
const AT_A_TIME: u32 = 8;
/// Nodes that are looked at for one waiter in one tick; the next tick goes on with the others.
const LOOKED_AT: usize = 128;
/// Room that is kept for a task or an actor is kept until the second tick from now, which keeps it again.
const KEPT: Millis = 60;
/// A group that waits this long gets room kept: until then, it may fit by itself.
const GANG_WAIT: Millis = 1_000;
/// How long room is kept for a group, against everybody who comes after it ...
const GANG_KEPT: Millis = 5_000;
/// ... and for how long then not: what the group waits for may itself wait for somebody who is held back.
const GANG_PAUSE: Millis = 1_000;
/// Groups that are helped in one tick.
const GANGS_HELPED: usize = 2;

/// Nodes on which room is being made for somebody. Without it, whoever has many small leases would take what comes
/// back one by one, and a large request would never fit.
#[derive(Default)]
pub(super) struct Reservations {
    by_node: BTreeMap<NodeId, Reservation>,
    /// Groups for which room was kept, and until when it is not kept again.
    paused: BTreeMap<PlacementGroupId, Millis>,
    /// Where the next look at the nodes begins.
    cursor: Slot,
}

struct Reservation {
    waiter: Waiter,
    rank: Rank,
    needed: ResourceSet,
    until: Millis,
}

impl Reservations {
    /// Whether a lease for `waiter` would take what is being made free for somebody before it.
    pub(super) fn is_against(&self, node: &Node, waiter: Waiter, rank: Option<Rank>, asked: &ResourceSet) -> bool {
        if self.by_node.is_empty() {
            return false;
        }
        let Some(reserved) = self.by_node.get(&node.info.id) else { return false };
        let is_behind = rank.is_none_or(|rank| match reserved.waiter {
            Waiter::Group(_) => rank > reserved.rank,
            // Somebody who has no more is never held back: what the waiter waits for may itself wait for that.
            _ => (rank.priority, rank.has) > (reserved.rank.priority, reserved.rank.has),
        });
        reserved.waiter != waiter
            && is_behind
            && asked.iter().any(|(name, amount)| {
                let needed = reserved.needed.get(name);
                !needed.is_zero() && node.pool.available.get(name) - amount < needed
            })
    }

    /// Everybody for whom room is kept.
    pub(super) fn waiters(&self) -> Vec<Waiter> {
        let mut waiters: Vec<Waiter> = self.by_node.values().map(|reservation| reservation.waiter).collect();
        waiters.dedup();
        waiters
    }

    /// For whom room is kept on a node.
    pub(super) fn on(&self, node: NodeId) -> Option<Waiter> {
        self.by_node.get(&node).map(|reservation| reservation.waiter)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.by_node.is_empty()
    }

    fn remove_where(&mut self, which: impl Fn(&Reservation) -> bool) -> Vec<NodeId> {
        if self.by_node.is_empty() {
            return Vec::new();
        }
        let ended: Vec<NodeId> =
            self.by_node.iter().filter(|(_, reservation)| which(reservation)).map(|(node, _)| *node).collect();
        for node in &ended {
            self.by_node.remove(node);
        }
        ended
    }
}

/// What is on its way back to nodes and will be taken by those who were helped before.
type Planned = BTreeMap<NodeId, ResourceSet>;

fn may_take_from(rank: Rank, other_priority: std::cmp::Reverse<i32>, other_has: u32) -> bool {
    use std::cmp::Ordering::{Equal, Greater, Less};
    match rank.priority.cmp(&other_priority) {
        Less => true,
        Greater => false,
        Equal if rank.has == 0 => other_has > 0,
        Equal => other_has >= rank.has + 2,
    }
}

impl State {
    pub(super) fn end_reservation(&mut self, waiter: Waiter) {
        if let Waiter::Group(group) = waiter {
            self.reservations.paused.remove(&group);
        }
        for node in self.reservations.remove_where(|reservation| reservation.waiter == waiter) {
            self.freed_on(node);
        }
    }

    pub(super) fn reservation_lost(&mut self, node: NodeId) {
        self.reservations.by_node.remove(&node);
    }

    fn expire_reservations(&mut self) {
        let now = self.now;
        let ended = self.reservations.remove_where(|reservation| reservation.until <= now);
        for node in ended {
            self.freed_on(node);
        }
    }

    /// Asks owners that have more for leases that others wait for. Says whether it did anything.
    pub(super) fn recall_for_the_starved(&mut self) -> bool {
        self.expire_reservations();
        let before = self.out.len();
        let mut gangs = 0;
        let mut planned = Planned::new();
        for waiter in self.queue.first_blocked(HELPED) {
            let Some(rank) = self.queue.rank(waiter) else { continue };
            match waiter {
                Waiter::Group(group) => {
                    if gangs < GANGS_HELPED && self.help_gang(group, rank) {
                        gangs += 1;
                    }
                }
                Waiter::Tasks(process, shape) => {
                    let Some(demand) = self.leases.demands.get(&(process, shape)) else { continue };
                    let more = (demand.wanted - demand.held.len() as u32).min(AT_A_TIME);
                    for has in rank.has..rank.has + more {
                        let shape = self.shapes.get(shape).cloned();
                        if !self.help(waiter, Rank { has, ..rank }, shape, &mut planned) {
                            break;
                        }
                    }
                }
                Waiter::Actor(actor) => {
                    let shape = self.actors.shape_of(actor).and_then(|id| self.shapes.get(id)).cloned();
                    self.help(waiter, rank, shape, &mut planned);
                }
            }
        }
        self.out.len() > before
    }

    /// Recalls what makes room for one lease of a shape. Says whether there is or will be such room.
    fn help(&mut self, waiter: Waiter, rank: Rank, shape: Option<Arc<Shape>>, planned: &mut Planned) -> bool {
        let Some(shape) = shape else { return false };
        if let Strategy::Bundle { group, index } = shape.strategy {
            self.help_in_bundle(waiter, rank, group, index, &shape.resources);
            return false;
        }
        let Some((node, plan, needed)) = self.recall_plan(waiter, rank, &shape, planned) else { return false };
        for id in plan {
            self.recall(id);
        }
        planned.entry(node).or_default().add(&needed);
        let reservation = Reservation { waiter, rank, needed, until: self.now + KEPT };
        self.reservations.by_node.entry(node).or_insert(reservation);
        true
    }

    /// The node on which the fewest recalls make room, and these.
    fn recall_plan(
        &mut self,
        waiter: Waiter,
        rank: Rank,
        shape: &Shape,
        planned: &Planned,
    ) -> Option<(NodeId, Vec<LeaseId>, ResourceSet)> {
        let requirements = super::nodes::requirements_of(shape);
        let cursor = self.reservations.cursor;
        let mut looked_at = 0;
        let mut last = cursor;
        let mut best: Option<(NodeId, Vec<LeaseId>, ResourceSet)> = None;
        for (slot, node) in self.nodes.going_round(cursor) {
            let allowed = match &shape.strategy {
                Strategy::Node { node: wanted, soft: false } => node.info.id == *wanted,
                _ => true,
            };
            let kept_for_another = self.reservations.on(node.info.id).is_some_and(|other| other != waiter);
            if !allowed
                || kept_for_another
                || node.draining.is_some()
                || !requirements.iter().any(|asked| node.could_hold(asked))
            {
                continue;
            }
            looked_at += 1;
            last = slot;
            let Some(needed) = node.amounts(&shape.resources, shape.gpu_memory) else { continue };
            let leases = node.leases.iter().filter_map(|id| Some((*id, self.leases.leases.get(id)?)));
            let leases: Vec<(LeaseId, &Lease)> = leases.filter(|(_, lease)| lease.taken.bundle.is_none()).collect();
            let mut pool = node.pool.clone();
            if let Some(planned) = planned.get(&node.info.id) {
                pool.available.subtract(planned);
            }
            if let Some(plan) = self.recalls_that_make_room(&pool, &leases, waiter, rank, &needed)
                && best.as_ref().is_none_or(|(_, other, _)| plan.len() < other.len())
            {
                let is_free = plan.is_empty();
                best = Some((node.info.id, plan, needed.into_owned()));
                if is_free {
                    break;
                }
            }
            if looked_at == LOOKED_AT {
                break;
            }
        }
        self.reservations.cursor = if looked_at == LOOKED_AT { last + 1 } else { cursor };
        best
    }

    /// The recalls after which a pool, with all that is on its way back, has room.
    fn recalls_that_make_room(
        &self,
        pool: &Pool,
        leases: &[(LeaseId, &Lease)],
        waiter: Waiter,
        rank: Rank,
        needed: &ResourceSet,
    ) -> Option<Vec<LeaseId>> {
        let mut pool = pool.clone();
        for (_, lease) in leases {
            let recalled = lease.recalled.is_some_and(|at| self.now < at + RECALL_PATIENCE);
            if (lease.ending || recalled) && !lease.returned {
                let back = lease.still_taken();
                pool.give_back(&back.resources, &back.devices);
            }
        }
        let mut counts: BTreeMap<Asker, u32> = BTreeMap::new();
        let mut plan = Vec::new();
        while !pool.has_room(needed) {
            let candidates = leases.iter().filter(|(id, lease)| {
                !plan.contains(id)
                    && lease.recalled.is_none()
                    && !lease.ending
                    && lease.worker.is_some()
                    && self.now >= lease.granted_at + RECALL_AFTER
                    && pool.would_help(&lease.still_taken().resources, needed)
            });
            let candidates = candidates.filter_map(|(id, lease)| match lease.holder {
                Holder::Tasks(asker) if lease.holder.waiter() != Some(waiter) => {
                    let active = || self.leases.demands.get(&asker).map_or(0, |demand| demand.active);
                    let has = counts.get(&asker).copied().unwrap_or_else(active);
                    let priority = std::cmp::Reverse(self.priority_of(asker.0));
                    may_take_from(rank, priority, has).then_some((priority, has, *id, asker, lease))
                }
                _ => None,
            });
            let (_, has, id, asker, lease) =
                candidates.max_by_key(|(priority, has, id, ..)| (*priority, *has, std::cmp::Reverse(*id)))?;
            let back = lease.still_taken();
            pool.give_back(&back.resources, &back.devices);
            counts.insert(asker, has.saturating_sub(1));
            plan.push(id);
        }
        Some(plan)
    }

    fn help_in_bundle(
        &mut self,
        waiter: Waiter,
        rank: Rank,
        group: PlacementGroupId,
        index: Option<u32>,
        needed: &ResourceSet,
    ) {
        let Some(known) = self.groups.get(group) else { return };
        let bundles = known.placed.iter().enumerate().filter(|(at, _)| index.is_none_or(|index| index as usize == *at));
        let mut plans = bundles.filter_map(|(at, placed)| {
            let placed = placed.as_ref()?;
            let node = self.nodes.get(placed.taken.node)?;
            let inside = Some((group, at as u32));
            let leases = node.leases.iter().filter_map(|id| Some((*id, self.leases.leases.get(id)?)));
            let leases: Vec<(LeaseId, &Lease)> = leases.filter(|(_, lease)| lease.taken.bundle == inside).collect();
            self.recalls_that_make_room(&placed.pool, &leases, waiter, rank, needed)
        });
        if let Some(plan) = plans.next() {
            drop(plans);
            for id in plan {
                self.recall(id);
            }
        }
    }

    fn recall(&mut self, id: LeaseId) {
        let now = self.now;
        let Some(lease) = self.leases.leases.get_mut(&id) else { return };
        if lease.recalled.is_some() || lease.ending {
            return;
        }
        lease.recalled = Some(now);
        if let Holder::Tasks((owner, _)) = lease.holder {
            self.tell(owner, HeadEvent::Recall(id));
        }
    }

    /// Recalls every lease of tasks on a node.
    pub(super) fn recall_all_on(&mut self, node: NodeId) {
        let leases: Vec<LeaseId> =
            self.nodes.get(node).into_iter().flat_map(|node| node.leases.iter().copied()).collect();
        for id in leases {
            self.recall(id);
        }
    }

    /// Keeps room for a group where it would fit once the tasks there are done, and recalls their leases. What the
    /// group cannot use stays free for others. Says whether it looked for room.
    fn help_gang(&mut self, id: PlacementGroupId, rank: Rank) -> bool {
        let waiter = Waiter::Group(id);
        let waits_long = self.queue.since(waiter).is_some_and(|since| self.now >= since + GANG_WAIT);
        let is_kept = self.reservations.by_node.values().any(|reservation| reservation.waiter == waiter);
        let is_paused = self.reservations.paused.get(&id).is_some_and(|until| self.now < *until);
        if !waits_long || is_kept || is_paused {
            return false;
        }
        self.reservations.paused.insert(id, self.now + GANG_KEPT + GANG_PAUSE);
        let mut idle = Nodes::default();
        for node in self.without_tasks(rank, waiter) {
            let pool = node.pool.clone();
            let id = node.info.id;
            idle.join(node.info);
            idle.change(id, |there| there.pool = pool);
        }
        let Some(group) = self.groups.get(id).map(|group| group.among(&mut idle)) else { return false };
        let Some(places) = gangs::place(&group, &mut idle, |_, _| true) else { return true };
        let mut needed: BTreeMap<NodeId, ResourceSet> = BTreeMap::new();
        for (_, taken) in places {
            needed.entry(taken.node).or_default().add(&taken.resources);
        }
        for (node, needed) in needed {
            self.recall_for_gang(node, rank, waiter, &needed);
            let until = self.now + GANG_KEPT;
            self.reservations.by_node.entry(node).or_insert(Reservation { waiter, rank, needed, until });
        }
        true
    }

    /// Some nodes as they would be without the tasks on them.
    fn without_tasks(&mut self, rank: Rank, waiter: Waiter) -> Vec<Node> {
        let mut found = Vec::new();
        let mut last = self.reservations.cursor;
        for (slot, node) in self.nodes.going_round(self.reservations.cursor) {
            if node.draining.is_some() || self.reservations.on(node.info.id).is_some_and(|other| other != waiter) {
                continue;
            }
            let mut node = node.clone();
            let leases = node.leases.iter().filter_map(|id| self.leases.leases.get(id));
            for lease in leases.filter(|lease| lease.taken.bundle.is_none() && !lease.returned) {
                let goes = match lease.holder {
                    Holder::Tasks((owner, _)) => rank.priority <= std::cmp::Reverse(self.priority_of(owner)),
                    Holder::Actor(_) | Holder::Nobody => lease.ending,
                };
                if goes {
                    let back = lease.still_taken();
                    node.pool.give_back(&back.resources, &back.devices);
                }
            }
            found.push(node);
            last = slot;
            if found.len() == 2 * LOOKED_AT {
                break;
            }
        }
        self.reservations.cursor = if found.len() == 2 * LOOKED_AT { last + 1 } else { self.reservations.cursor };
        found
    }

    fn recall_for_gang(&mut self, id: NodeId, rank: Rank, waiter: Waiter, needed: &ResourceSet) {
        let Some(node) = self.nodes.get(id) else { return };
        let leases = node.leases.iter().filter_map(|id| Some((*id, self.leases.leases.get(id)?)));
        let leases: Vec<(LeaseId, &Lease)> = leases.filter(|(_, lease)| lease.taken.bundle.is_none()).collect();
        // Several bundles together may be no request that one lease could make: sums alone count.
        let mut sum = needed.clone();
        sum.set(wingbeat_core::resources::GPU, wingbeat_core::Amount::ZERO);
        let plan = self
            .recalls_that_make_room(&node.pool, &leases, waiter, rank, needed)
            .or_else(|| self.recalls_that_make_room(&node.pool, &leases, waiter, rank, &sum));
        for id in plan.unwrap_or_default() {
            self.recall(id);
        }
    }
}
