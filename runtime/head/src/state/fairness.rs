//! Whose leases are recalled for whom, and for whom room is kept.
//!
//! Somebody of a more important job gets a lease from anybody of a less important one. Among equals, a job gets leases
//! from jobs that hold more of the cluster, as long as it does not hold more than they do afterwards, so that leases do
//! not go back and forth between them; within a job, an asker that has nothing gets one from any that has some, and one
//! that has some from those that have at least two more.
//!
//! Who needs much at once would starve beside many who need little and come and go: `keeping` is about those.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use wingbeat_core::spec::Shape;
use wingbeat_core::{Amount, JobId, LeaseId, NodeId, PlacementGroupId, ResourceSet};
use wingbeat_net::messages::HeadEvent;

use super::index::{RequirementId, Slot};
use super::keeping::Keep;
use super::lease::{Asker, Holder, Lease};
use super::nodes::Node;
use super::pool::Pool;
use super::queue::{Standing, Waiter};
use super::shapes::ShapeId;
use super::{Millis, State};

/// A lease is not recalled before its owner had this long to use it, or leases would go back and forth
/// faster than tasks.
const RECALL_AFTER: Millis = 50;
/// A recalled lease that is not back by then runs a long task, and another is recalled. Ten times
/// [`RECALL_AFTER`]: a hundred short tasks, and not yet long for a person who waits.
const RECALL_PATIENCE: Millis = 500;
/// Waiters that are helped in one tick: the first in order, and as many of those that began to wait last, which may need
/// little.
const HELPED: usize = 32;
/// Leases for which one waiter is helped in one tick.
const AT_A_TIME: u32 = 8;
/// Nodes that are looked at for one waiter in one tick; the next tick goes on with the others.
pub(super) const LOOKED_AT: usize = 128;
/// Room that is kept for a task or an actor is kept until the second tick from now, which keeps it again.
const KEPT: Millis = 60;
/// Nodes on which room is being made for somebody. Without it, whoever has many small leases would take what comes
/// back one by one, and a large request would never fit.
#[derive(Default)]
pub(super) struct Reservations {
    pub by_node: BTreeMap<NodeId, Reservation>,
    /// For whom room is or was kept because they wait long.
    pub keeps: BTreeMap<Waiter, Keep>,
    /// Where the next look at the nodes begins.
    pub cursor: Slot,
}

pub(super) struct Reservation {
    pub waiter: Waiter,
    pub standing: Standing,
    /// Since when the waiter has had nothing, if room is kept because of that.
    pub hungry: Option<Millis>,
    pub needed: ResourceSet,
    pub until: Millis,
}

impl Reservations {
    /// Whether a lease for `waiter` would take what is being made free for somebody before it.
    pub(super) fn is_against(
        &self,
        node: &Node,
        waiter: Waiter,
        standing: Option<Standing>,
        asked: &ResourceSet,
    ) -> bool {
        if self.by_node.is_empty() {
            return false;
        }
        let Some(reserved) = self.by_node.get(&node.info.id) else { return false };
        let is_behind = standing.is_none_or(|standing| reserved.is_before(standing));
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

    /// Where room is kept for somebody who waits long.
    pub(super) fn nodes_of(&self, waiter: Waiter) -> Vec<NodeId> {
        if !self.keeps.contains_key(&waiter) {
            return Vec::new();
        }
        let kept = self.by_node.iter().filter(|(_, reserved)| reserved.waiter == waiter && reserved.hungry.is_some());
        kept.map(|(node, _)| *node).collect()
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

impl Reservation {
    /// Whether the room is kept against somebody.
    fn is_before(&self, other: Standing) -> bool {
        match other.rank.priority.cmp(&self.standing.rank.priority) {
            std::cmp::Ordering::Less => return false,
            std::cmp::Ordering::Greater => return true,
            std::cmp::Ordering::Equal => {}
        }
        match self.hungry {
            Some(mine) => other.hungry.is_none_or(|other| other > mine),
            // Somebody who has no more is never held back for now: what the waiter waits for may itself wait for that.
            None if self.standing.job == other.job => other.rank.has > self.standing.rank.has,
            None => other.share > self.standing.share,
        }
    }
}

/// What is on its way back to nodes and will be taken by those who were helped before.
pub(super) type Planned = BTreeMap<NodeId, ResourceSet>;

/// What somebody who wants leases of others has, and will have.
#[derive(Clone, Copy)]
pub(super) struct Claim {
    pub standing: Standing,
    /// What it asks for, as a share of the cluster.
    pub asks: u64,
    /// It has waited so long that it gets a lease from anybody who is not more important.
    pub is_urgent: bool,
}

/// Somebody with a lease.
#[derive(Clone, Copy)]
struct Owner {
    priority: Reverse<i32>,
    job: JobId,
    /// What its job holds, and the lease alone, as shares of the cluster.
    share: u64,
    gives: u64,
    /// Leases of the asker.
    has: u32,
}

impl Claim {
    /// Shares are rounded down.
    const ROUNDED: u64 = 4;

    fn may_take_from(&self, owner: Owner) -> bool {
        let Standing { rank, job, share, .. } = self.standing;
        match rank.priority.cmp(&owner.priority) {
            std::cmp::Ordering::Less => return true,
            std::cmp::Ordering::Greater => return false,
            std::cmp::Ordering::Equal if self.is_urgent => return true,
            std::cmp::Ordering::Equal => {}
        }
        if job == Some(owner.job) {
            return if rank.has == 0 { owner.has > 0 } else { owner.has >= rank.has + 2 };
        }
        let left = owner.share.saturating_sub(owner.gives) + Claim::ROUNDED;
        if share == 0 { owner.share > 0 } else { left >= share + self.asks }
    }
}

impl State {
    pub(super) fn end_reservation(&mut self, waiter: Waiter) {
        if !self.reservations.keeps.is_empty() {
            self.reservations.keeps.remove(&waiter);
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

    /// Asks owners that have more for leases that others wait for.
    pub(super) fn recall_for_the_starved(&mut self) {
        self.expire_reservations();
        let mut planned = Planned::new();
        self.keep_room_for_the_hungry(&mut planned);
        let mut seen = BTreeSet::new();
        let latest: Vec<Waiter> = self.queue.latest(HELPED).filter(|waiter| self.queue.is_blocked(*waiter)).collect();
        for waiter in self.queue.first_blocked(HELPED).into_iter().chain(latest) {
            if seen.insert(waiter) && self.reservations.nodes_of(waiter).is_empty() {
                self.help_waiter(waiter, &mut planned);
            }
        }
    }

    /// Somebody begins to wait: what may be recalled is recalled at once.
    pub(super) fn help_at_once(&mut self, waiter: Waiter) {
        if self.queue.is_blocked(waiter) {
            self.help_waiter(waiter, &mut Planned::new());
        }
    }

    fn help_waiter(&mut self, waiter: Waiter, planned: &mut Planned) {
        let Some(standing) = self.queue.standing(waiter) else { return };
        match waiter {
            // It may need many at a time, and gets them when it has waited long.
            Waiter::Group(_) => {}
            Waiter::Tasks(process, id) => {
                let Some(demand) = self.leases.demands.get(&(process, id)) else { return };
                let more = (demand.wanted - demand.held.len() as u32).min(AT_A_TIME);
                let Some(shape) = self.shapes.get(id).cloned() else { return };
                let mut claim = self.claim(standing, &shape);
                for _ in 0..more {
                    if !self.help(waiter, claim, id, &shape, planned) {
                        break;
                    }
                    claim.standing.rank.has += 1;
                    claim.standing.share += claim.asks;
                }
            }
            Waiter::Actor(actor) => {
                let Some(id) = self.actors.shape_of(actor) else { return };
                let Some(shape) = self.shapes.get(id).cloned() else { return };
                self.help(waiter, self.claim(standing, &shape), id, &shape, planned);
            }
        }
    }

    fn claim(&self, standing: Standing, shape: &Shape) -> Claim {
        Claim { standing, asks: self.share_of(&shape.resources), is_urgent: false }
    }

    /// Recalls what makes room for one lease of a shape. Says whether there is or will be such room.
    fn help(&mut self, waiter: Waiter, claim: Claim, id: ShapeId, shape: &Arc<Shape>, planned: &mut Planned) -> bool {
        if let Some((group, index)) = shape.bundle() {
            self.help_in_bundle(waiter, claim, group, index, &shape.resources);
            return false;
        }
        let Some((node, plan, needed)) = self.recall_plan(waiter, claim, id, shape, planned) else { return false };
        for id in plan {
            self.recall(id);
        }
        planned.entry(node).or_default().add(&needed);
        let until = self.now + KEPT;
        let reservation = Reservation { waiter, standing: claim.standing, hungry: None, needed, until };
        self.reservations.by_node.entry(node).or_insert(reservation);
        true
    }

    /// Whether a node could serve a shape if nothing were on it.
    pub(super) fn is_candidate(&self, node: &Node, requirements: &[RequirementId], shape: &Shape) -> bool {
        node.could_serve(shape, requirements.iter().filter_map(|id| self.nodes.index.requirement(*id)))
    }

    /// The node on which the fewest recalls make room, and these.
    fn recall_plan(
        &mut self,
        waiter: Waiter,
        claim: Claim,
        id: ShapeId,
        shape: &Shape,
        planned: &Planned,
    ) -> Option<(NodeId, Vec<LeaseId>, ResourceSet)> {
        let requirements = self.shapes.requirements(id);
        let cursor = self.reservations.cursor;
        let mut looked_at = 0;
        let mut last = cursor;
        let mut best: Option<(NodeId, Vec<LeaseId>, ResourceSet)> = None;
        for (slot, node) in self.nodes.going_round(cursor) {
            let is_kept = self.reservations.on(node.info.id).is_some_and(|other| other != waiter);
            if is_kept || self.is_unfit(node, waiter) || !self.is_candidate(node, requirements, shape) {
                continue;
            }
            looked_at += 1;
            last = slot;
            let Some(needed) = node.amounts(&shape.resources, shape.gpu_memory) else { continue };
            let mut pool = node.pool.clone();
            if let Some(planned) = planned.get(&node.info.id) {
                pool.available.subtract(planned);
            }
            let leases = self.leases_on(node, None);
            if let Some(plan) = self.recalls_that_make_room(&pool, &leases, waiter, claim, &needed, false)
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

    /// The leases of a node that are in this bundle, or in none.
    pub(super) fn leases_on(&self, node: &Node, bundle: Option<(PlacementGroupId, u32)>) -> Vec<(LeaseId, &Lease)> {
        let leases = node.leases.iter().filter_map(|id| Some((*id, self.leases.leases.get(id)?)));
        leases.filter(|(_, lease)| lease.taken.bundle == bundle).collect()
    }

    /// The recalls after which a pool, with all that is on its way back, has room. If it will not have, none, or those
    /// that bring it nearer if that is what is wanted.
    pub(super) fn recalls_that_make_room(
        &self,
        pool: &Pool,
        leases: &[(LeaseId, &Lease)],
        waiter: Waiter,
        claim: Claim,
        needed: &ResourceSet,
        also_some: bool,
    ) -> Option<Vec<LeaseId>> {
        let mut pool = pool.clone();
        let mut candidates: Vec<(LeaseId, Asker, &Lease, Owner)> = Vec::new();
        for (id, lease) in leases {
            let recalled = lease.recalled().is_some_and(|at| self.now < at + RECALL_PATIENCE);
            if lease.is_ending() || recalled {
                if !lease.is_returned() {
                    let back = lease.still_taken();
                    pool.give_back(&back.resources, &back.devices);
                }
                continue;
            }
            let is_old = lease.server().is_some() && self.now >= lease.since + RECALL_AFTER;
            if let Holder::Tasks(asker) = lease.holder
                && lease.recalled().is_none()
                && is_old
                && lease.holder.waiter() != Some(waiter)
            {
                let owner = Owner {
                    priority: Reverse(self.job_priority(lease.job)),
                    job: lease.job,
                    share: self.jobs.get(&lease.job).map_or(0, |job| job.share),
                    gives: self.share_of(&lease.still_taken().resources),
                    has: self.leases.demands.get(&asker).map_or(0, |demand| demand.active),
                };
                candidates.push((*id, asker, *lease, owner));
            }
        }
        let mut plan = Vec::new();
        while !pool.has_room(needed) {
            let best = candidates.iter().enumerate().filter(|(_, (_, _, lease, owner))| {
                claim.may_take_from(*owner) && pool.would_help(&lease.still_taken().resources, needed)
            });
            let best = best.max_by_key(|(_, (id, _, _, owner))| (owner.priority, owner.share, owner.has, Reverse(*id)));
            let Some(at) = best.map(|(at, _)| at) else { return also_some.then_some(plan) };
            let (id, asker, lease, owner) = candidates.swap_remove(at);
            let back = lease.still_taken();
            pool.give_back(&back.resources, &back.devices);
            for (_, other, _, rest) in &mut candidates {
                if rest.job == owner.job {
                    rest.share = rest.share.saturating_sub(owner.gives);
                }
                if *other == asker {
                    rest.has = rest.has.saturating_sub(1);
                }
            }
            plan.push(id);
        }
        Some(plan)
    }

    fn help_in_bundle(
        &mut self,
        waiter: Waiter,
        claim: Claim,
        group: PlacementGroupId,
        index: Option<u32>,
        needed: &ResourceSet,
    ) {
        let Some(known) = self.groups.get(group) else { return };
        let bundles = known.placed.iter().enumerate().filter(|(at, _)| index.is_none_or(|index| index as usize == *at));
        let mut plans = bundles.filter_map(|(at, placed)| {
            let placed = placed.as_ref()?;
            let node = self.nodes.get(placed.taken.node)?;
            let leases = self.leases_on(node, Some((group, at as u32)));
            self.recalls_that_make_room(&placed.pool, &leases, waiter, claim, needed, false)
        });
        if let Some(plan) = plans.next() {
            drop(plans);
            for id in plan {
                self.recall(id);
            }
        }
    }

    pub(super) fn recall(&mut self, id: LeaseId) {
        let now = self.now;
        let Some(lease) = self.leases.leases.get_mut(&id) else { return };
        if lease.recall(now)
            && let Holder::Tasks((owner, _)) = lease.holder
        {
            self.tell(owner, HeadEvent::Recall(id));
        }
    }

    /// Recalls what a namespace holds above its quota, of the least important jobs first, and of those the latest.
    pub(super) fn recall_over_quota(&mut self, namespace: &str) {
        let mut excess = self.quotas.excess(namespace);
        if excess.is_empty() {
            return;
        }
        let is_of = |lease: &Lease| {
            let is_held = lease.taken.bundle.is_none() && !lease.is_returned();
            is_held && self.jobs.get(&lease.job).is_some_and(|job| job.spec.namespace == namespace)
        };
        let mut candidates = Vec::new();
        for (id, lease) in self.leases.leases.iter().filter(|(_, lease)| is_of(lease)) {
            if lease.is_going() {
                // It is on its way back.
                excess.subtract(&lease.still_taken().resources);
            } else if lease.server().is_some() && matches!(lease.holder, Holder::Tasks(_)) {
                candidates.push((self.job_priority(lease.job), Reverse(lease.since), *id));
            }
        }
        candidates.sort_unstable();
        let mut recalled = Vec::new();
        for (_, _, id) in candidates {
            let Some(lease) = self.leases.leases.get(&id) else { continue };
            let held = lease.still_taken().resources;
            if held.iter().any(|(name, _)| excess.get(name) > Amount::ZERO) {
                excess.subtract(&held);
                recalled.push(id);
            }
        }
        for id in recalled {
            self.recall(id);
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
}
