//! Which lease gets which tasks, and how many leases are wanted: once after a round of events, for the shapes that it has touched.

use std::collections::{HashSet, VecDeque};
use std::sync::Arc;

use wingbeat_core::NodeId;
use wingbeat_core::spec::Shape;
use wingbeat_net::messages::Weight;

use super::leases::Lease;
use super::spreading::Spreading;
use super::{
    AHEAD_BYTES, AHEAD_NANOS, AHEAD_TASKS, Action, Dispatch, LONG_NANOS, OVERHEAD_NANOS, Queue, Task, WANTED_LIMIT,
    lost_argument,
};

/// Shapes of which something has changed since they were dealt with.
#[derive(Default)]
pub(super) struct Touched {
    shapes: Vec<Arc<Shape>>,
    /// When that was done last, this process was expected to take tasks itself: time may have changed that.
    was_open: bool,
}

impl Touched {
    /// Something has changed in this queue.
    pub(super) fn add(&mut self, shape: &Arc<Shape>, queue: &mut Queue) {
        if !std::mem::replace(&mut queue.is_touched, true) {
            self.shapes.push(shape.clone());
        }
    }
}

impl Dispatch {
    /// Pushes what can be pushed and says how many leases are wanted. Called once after a round of events.
    pub(crate) fn settle(&mut self, now_ms: u64, out: &mut Vec<Action>) {
        self.offer_home(now_ms, out);
        self.renew_leases(now_ms);
        let is_open = self.at_home.is_open(now_ms);
        if std::mem::replace(&mut self.touched.was_open, is_open) || is_open {
            let ready = self.queues.iter_mut().filter(|(_, queue)| !queue.ready.is_empty());
            ready.for_each(|(shape, queue)| self.touched.add(shape, queue));
        }
        if self.touched.shapes.is_empty() {
            return;
        }
        // Always in the same order.
        self.touched.shapes.sort_unstable();
        let mut shapes = std::mem::take(&mut self.touched.shapes);
        for shape in shapes.drain(..) {
            let Some(queue) = self.queues.get_mut(&shape) else { continue };
            queue.is_touched = false;
            let before = out.len();
            let is_spread = queue.spreading.is_some();
            if is_spread {
                self.announce(&shape, now_ms, out);
            }
            self.fill(&shape, now_ms, out);
            self.rebalance(&shape, now_ms, out);
            if is_spread {
                self.note_keeping(&shape, now_ms);
            } else {
                self.announce(&shape, now_ms, out);
            }
            // Where something was done, there may be more to do the next time.
            if out.len() > before
                && let Some(queue) = self.queues.get_mut(&shape)
            {
                self.touched.add(&shape, queue);
            }
        }
        if self.touched.shapes.is_empty() {
            self.touched.shapes = shapes;
        }
        #[cfg(all(test, debug_assertions))]
        self.audit(now_ms);
    }

    /// What is kept of leases is what they come to.
    #[cfg(all(test, debug_assertions))]
    fn audit(&self, now_ms: u64) {
        for (shape, queue) in &self.queues {
            assert_eq!(queue.standings, self.leases.counted(shape, now_ms));
        }
        self.leases.audit(self.queues.values().map(|queue| &queue.standings));
    }

    /// Enters what has become of leases since the last time.
    pub(super) fn renew_leases(&mut self, now_ms: u64) {
        while let Some(id) = self.leases.changed(now_ms) {
            let Some(shape) = self.leases.get(id).map(|lease| lease.grant.shape.clone()) else { continue };
            let Some(queue) = self.queues.get_mut(&shape) else { continue };
            self.leases.enter(id, &mut queue.standings, now_ms);
            self.touched.add(&shape, queue);
        }
    }

    fn fill(&mut self, shape: &Arc<Shape>, now_ms: u64, out: &mut Vec<Action>) {
        let Some(queue) = self.queues.get_mut(shape) else { return };
        if queue.ready.is_empty() {
            queue.front_since_ms = None;
            return;
        }
        queue.front_since_ms.get_or_insert(now_ms);
        let mut depth = queue.depth();
        let mut available = queue.ready.len();
        if let Some(spreading) = &queue.spreading {
            // One that has had nothing yet is one of those for which some are kept.
            let at_least = usize::from(matches!(queue.standings.open_after(None), Some((0, 0, _)))).min(available);
            available = available.saturating_sub(spreading.kept(now_ms)).max(at_least);
            if spreading.is_unanswered(queue.announced, &queue.standings, now_ms) {
                depth = 1;
            }
        }
        // Refilled at half, so that tasks go in batches.
        let (open, in_flight) = queue.standings.open_up_to(depth / 2);
        if open == 0 {
            return;
        }
        // Filled up to one level, so that who has less gets more.
        let all = available + in_flight;
        let takers = open + usize::from(queue.left_to_home(&self.at_home, now_ms) > 0);
        let level = all.div_ceil(takers).min(depth);
        let Queue { ready, standings, front_since_ms, spreading, .. } = queue;
        let kept = ready.len() - available;
        let mut last = None;
        while let Some(next) = standings.open_after(last)
            && let (in_flight, turn, id) = next
            && in_flight <= depth / 2
            && in_flight < level
            && ready.len() > kept
        {
            last = Some(next);
            let mut level = level;
            if let Some(spreading) = spreading
                && turn == 0
            {
                // What was kept for it.
                level = level.max(spreading.share).min(depth);
            }
            let share = (level - in_flight).min(ready.len() - kept);
            self.leases.change_now(id, standings, now_ms, |lease| {
                if lease.in_flight.is_empty() {
                    lease.last_result_ms = now_ms;
                }
                if push(lease, share, ready, &self.dead_nodes, out) {
                    *front_since_ms = Some(now_ms);
                    if let Some(spreading) = spreading {
                        spreading.pushes += 1;
                        lease.turn = spreading.pushes;
                    }
                }
            });
        }
    }

    /// An idle lease gets half of what the fullest one has not started.
    fn rebalance(&mut self, shape: &Arc<Shape>, now_ms: u64, out: &mut Vec<Action>) {
        let Some(queue) = self.queues.get_mut(shape) else { return };
        if !queue.ready.is_empty() || !queue.standings.has_idle() {
            return;
        }
        let Some(id) = queue.standings.fullest() else { return };
        self.leases.change_now(id, &mut queue.standings, now_ms, |lease| {
            lease.taking_back = true;
            let most = (lease.in_flight.len() / 2).max(1) as u32;
            let worker = lease.grant.worker.process;
            out.push(Action::TakeBack { worker, lease: id, most, recalled: false });
        });
    }

    fn announce(&mut self, shape: &Arc<Shape>, now_ms: u64, out: &mut Vec<Action>) {
        let Some(queue) = self.queues.get_mut(shape) else { return };
        // A task in flight on each busy lease, and those that could start elsewhere. Leases whose process
        // waits are held but of no use.
        let standings = &queue.standings;
        let short = queue.average_nanos.is_some_and(|nanos| nanos < 20_000.0);
        let left_to_home = queue.left_to_home(&self.at_home, now_ms);
        let (soon_done, now_stuck) = match short {
            true => (standings.unstarted, standings.unstarted_behind_stuck),
            false => (0, standings.unstarted + standings.unstarted_behind_stuck),
        };
        let could_use = queue.ready.len() - left_to_home + now_stuck + soon_done / 64;
        let (held, waiting) = (standings.held, standings.waiting);
        let (mut wanted, mut coming) = (standings.busy + could_use, 0);
        if let Some(spreading) = &queue.spreading {
            // However short they are, each node is to have some.
            let all = queue.ready.len() - left_to_home + standings.tasks();
            wanted = wanted.max(all.min(self.nodes as usize));
            coming = spreading.coming(now_ms);
        }
        // In steps, so that the head hears of real changes only: none, what is held, or the next power of two.
        let wanted = match wanted.min(WANTED_LIMIT) + waiting {
            wanted if wanted <= held + coming => (held + coming) as u32,
            wanted if queue.spreading.is_some() => {
                Spreading::rounded(wanted, self.nodes as usize, queue.announced) as u32
            }
            wanted => wanted.next_power_of_two() as u32,
        };
        if wanted != queue.announced {
            queue.announced = wanted;
            if let Some(spreading) = &mut queue.spreading {
                spreading.is_asked(now_ms);
            }
            out.push(Action::Demand { shape: shape.clone(), wanted, name: queue.name.clone() });
        }
        if queue.ready.is_empty() && held == 0 && wanted == 0 {
            self.queues.remove(shape);
        }
    }
}

/// Pushes so many of the ready tasks, or as many as may be. Whether it were any.
fn push(
    lease: &mut Lease,
    share: usize,
    ready: &mut VecDeque<Task>,
    dead_nodes: &HashSet<NodeId>,
    out: &mut Vec<Action>,
) -> bool {
    let first = lease.next;
    let mut tasks = Vec::with_capacity(share);
    while tasks.len() < share {
        let Some(weight) = ready.front().map(|task| task.spec.weight()) else { break };
        if lease.bytes > 0 && lease.bytes + weight > AHEAD_BYTES {
            break;
        }
        let Some(task) = ready.pop_front() else { break };
        // A node that has joined since knows nothing of them, and would look for them in vain.
        if let Some(argument) = lost_argument(&task.spec, dead_nodes) {
            out.push(Action::ArgumentLost { task, argument });
            continue;
        }
        tasks.push(task.spec.clone());
        lease.bytes += weight;
        lease.in_flight.push_back((lease.next, task));
        lease.next += 1;
    }
    if tasks.is_empty() {
        return false;
    }
    out.push(Action::Push { worker: lease.grant.worker.clone(), lease: lease.grant.lease, first, tasks });
    true
}

impl Queue {
    /// How many tasks are pushed to a lease at most.
    fn depth(&self) -> usize {
        match self.average_nanos {
            None => 1,
            Some(nanos) => {
                // The next ones wait at hand, unless a round trip is nothing beside a task: among longer ones there
                // may be some that take no time at all.
                let least = if nanos < LONG_NANOS { 4 } else { 1 };
                ((AHEAD_NANOS / (nanos + OVERHEAD_NANOS)) as usize).clamp(least, AHEAD_TASKS)
            }
        }
    }
}
