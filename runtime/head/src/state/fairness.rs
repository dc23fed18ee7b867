//! Whose leases are recalled for whom.
//!
//! A *waiter* is an asker with unmet demand, or an actor that waits for its place. Somebody who has none gets
//! a lease from anybody who has one, and somebody who has some gets one from those who have at least two more,
//! so that leases do not go back and forth between equals.

use std::collections::BTreeMap;

use wingbeat_core::spec::Shape;
use wingbeat_core::{LeaseId, NodeId, ProcessId, ResourceSet};
use wingbeat_net::messages::HeadEvent;

use super::leases::{Asker, Holder};
use super::nodes::{Node, Nodes};
use super::{Millis, State};

/// A lease is not recalled before its owner had this long to use it, or leases would go back and forth
/// faster than tasks.
const RECALL_AFTER: Millis = 50;
/// A recalled lease that is not back by then runs a long task, and another is recalled. Ten times
/// [`RECALL_AFTER`]: a hundred short tasks, and not yet long for a person who waits.
const RECALL_PATIENCE: Millis = 500;

/// A node on which room is being made for somebody. Without it, whoever has many small leases would take
/// what comes back one by one, and a large request would never fit.
pub(super) struct Reservation {
    pub waiter: Holder,
    has: usize,
    needed: ResourceSet,
}

struct Waiter {
    holder: Holder,
    has: usize,
    shape: Shape,
}

fn may_take_from(has: usize, other_has: usize) -> bool {
    if has == 0 { other_has > 0 } else { other_has >= has + 2 }
}

impl State {
    /// Whether somebody waits who could get from somebody else. Only then must time pass.
    pub(super) fn is_contended(&self) -> bool {
        let counts: Vec<(&Asker, usize, bool)> = self
            .leases
            .demands
            .iter()
            .map(|(asker, demand)| (asker, self.leases.active(demand), demand.is_unmet()))
            .collect();
        // The two that have most are enough: a waiter is at most one of them.
        let mut most: Vec<(usize, &Asker)> = counts.iter().map(|(asker, has, _)| (*has, *asker)).collect();
        most.sort_unstable_by(|a, b| b.cmp(a));
        most.truncate(2);
        let could_get = |waiter: Option<&Asker>, has: usize| {
            most.iter().any(|(other_has, other)| Some(*other) != waiter && may_take_from(has, *other_has))
        };
        counts.iter().any(|(asker, has, unmet)| *unmet && could_get(Some(asker), *has))
            || (self.actors.has_pending() && could_get(None, 0))
    }

    /// Whether a lease for `asker` would take what is being made free for somebody who has less.
    pub(super) fn is_reserved_against(&self, node: &Node, asker: &Holder, has: usize, asked: &ResourceSet) -> bool {
        self.reservations.get(&node.info.id).is_some_and(|reserved| {
            // Somebody who has no more is never held back: what the waiter waits for may itself wait for that.
            reserved.waiter != *asker
                && has > reserved.has
                && asked.iter().any(|(name, amount)| {
                    let needed = reserved.needed.get(name);
                    !needed.is_zero() && node.available.get(name) - amount < needed
                })
        })
    }

    /// Asks owners that have more for leases that others wait for.
    pub(super) fn recall_for_the_starved(&mut self) {
        self.leases.note_change();
        self.reservations.clear();
        let mut counts: BTreeMap<Asker, usize> = BTreeMap::new();
        for (asker, demand) in &self.leases.demands {
            counts.insert(asker.clone(), self.leases.active(demand));
        }
        let mut expected = self.expected();
        for waiter in self.waiters(&counts) {
            let room = expected.place(&waiter.shape, None);
            let node = match room {
                Some(node) => node,
                None => {
                    let Some((node, plan)) = self.recall_plan(&waiter, &expected, &counts) else { continue };
                    for id in plan {
                        self.recall(id, &mut expected, &mut counts);
                    }
                    node
                }
            };
            expected.take(node, &waiter.shape.resources);
            let reservation = Reservation { waiter: waiter.holder, has: waiter.has, needed: waiter.shape.resources };
            self.reservations.entry(node).or_insert(reservation);
        }
    }

    /// The nodes as they will be once everything that is on its way back is there.
    fn expected(&self) -> Nodes {
        let mut expected = self.nodes.clone();
        for lease in self.leases.leases.values() {
            let recalled = lease.recalled.is_some_and(|at| self.now < at + RECALL_PATIENCE);
            if (lease.ending || recalled) && !lease.returned {
                expected.give_back(&lease.still_taken());
            }
        }
        expected
    }

    /// Those who have least first.
    fn waiters(&self, counts: &BTreeMap<Asker, usize>) -> Vec<Waiter> {
        let actors = self.actors.pending_shapes();
        let actors = actors.map(|(id, shape)| (0, Waiter { holder: Holder::Actor(id), has: 0, shape }));
        let askers =
            self.leases.demands.iter().filter(|(asker, demand)| demand.is_unmet() && self.job_of(asker.0).is_some());
        let askers = askers.map(|(asker, demand)| {
            let has = counts.get(asker).copied().unwrap_or_default();
            let shape = asker.1.clone();
            (demand.served, Waiter { holder: Holder::Tasks(asker.clone()), has, shape })
        });
        let mut waiters: Vec<(u64, Waiter)> = actors.chain(askers).collect();
        waiters.sort_by_key(|(served, waiter)| (waiter.has, *served));
        waiters.into_iter().map(|(_, waiter)| waiter).collect()
    }

    /// The node on which the fewest recalls make room, and these.
    fn recall_plan(
        &self,
        waiter: &Waiter,
        expected: &Nodes,
        counts: &BTreeMap<Asker, usize>,
    ) -> Option<(NodeId, Vec<LeaseId>)> {
        let nodes = expected.iter().filter(|node| node.could_hold(&waiter.shape));
        let plans = nodes.filter_map(|node| Some((node.info.id, self.recall_plan_on(node, waiter, counts)?)));
        plans.min_by_key(|(_, plan)| plan.len())
    }

    fn recall_plan_on(&self, node: &Node, waiter: &Waiter, counts: &BTreeMap<Asker, usize>) -> Option<Vec<LeaseId>> {
        let needed = &waiter.shape.resources;
        let mut node = node.clone();
        let mut counts = counts.clone();
        let mut plan = Vec::new();
        while !node.has_room(needed) {
            let candidates = self.leases.leases.iter().filter(|(id, lease)| {
                lease.taken.node == node.info.id
                    && !plan.contains(*id)
                    && lease.recalled.is_none()
                    && !lease.ending
                    && lease.worker.is_some()
                    && self.now >= lease.granted_at + RECALL_AFTER
                    && node.would_help(&lease.still_taken().resources, needed)
            });
            let candidates = candidates.filter_map(|(id, lease)| match &lease.holder {
                Holder::Tasks(asker) if lease.holder != waiter.holder => {
                    let has = counts.get(asker).copied().unwrap_or_default();
                    may_take_from(waiter.has, has).then_some((has, *id, asker, lease))
                }
                _ => None,
            });
            let (has, id, asker, lease) = candidates.max_by_key(|(has, id, ..)| (*has, std::cmp::Reverse(*id)))?;
            node.give_back(&lease.still_taken());
            counts.insert(asker.clone(), has - 1);
            plan.push(id);
        }
        Some(plan)
    }

    fn recall(&mut self, id: LeaseId, expected: &mut Nodes, counts: &mut BTreeMap<Asker, usize>) {
        let now = self.now;
        let Some(lease) = self.leases.leases.get_mut(&id) else { return };
        lease.recalled = Some(now);
        expected.give_back(&lease.still_taken());
        let Holder::Tasks(asker) = lease.holder.clone() else { return };
        if let Some(count) = counts.get_mut(&asker) {
            *count = count.saturating_sub(1);
        }
        let owner: ProcessId = asker.0;
        self.tell(owner, HeadEvent::Recall(id));
    }
}
