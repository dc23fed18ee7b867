//! Tasks that are to be spread: as many nodes as there are get some, however fast the first one is.
//!
//! Worker processes that are there already would have run all short tasks before the others have started. So nothing more than one
//! task goes to each until the head has said how many leases there will be, and the share of those whose processes are being
//! started is kept for them. Of leases that have equally many tasks, the one that was given some longest ago comes first.

use std::collections::BTreeSet;
use std::sync::Arc;

use wingbeat_core::spec::{Shape, Strategy};

use super::leases::Standings;
use super::{Dispatch, Queue};

/// Nothing is kept for others, and the head's answer is not waited for, when no lease has come for so long since leases were asked for:
/// a few times what a worker process needs to start on a busy machine.
const KEEP_MS: u64 = 5_000;

/// What is known of the leases of a shape that is to be spread.
#[derive(Default)]
pub(super) struct Spreading {
    /// Leases that have a place, and whose processes are being started.
    pub starting: usize,
    /// How many tasks are kept for each of them.
    pub share: usize,
    /// The number of leases that the head has answered to.
    answered: u32,
    /// When tasks began to wait, or the last lease came.
    since_ms: u64,
    /// Whether tasks wait since then.
    is_waiting: bool,
    /// How many pushes there were.
    pub pushes: u64,
}

impl Spreading {
    /// Of a shape that is to be spread.
    pub(super) fn of(shape: &Shape) -> Option<Box<Spreading>> {
        (shape.strategy == Strategy::Spread).then(Box::default)
    }

    /// Leases are asked for, since tasks wait. What is asked for afterwards gives nobody more time.
    pub(super) fn is_asked(&mut self, now_ms: u64) {
        if !std::mem::replace(&mut self.is_waiting, true) {
            self.since_ms = now_ms;
        }
    }

    /// Leases that will come: none any more where they were waited for too long.
    pub(super) fn coming(&self, now_ms: u64) -> usize {
        if now_ms < self.keeps_until() { self.starting } else { 0 }
    }

    /// A lease has come.
    pub(super) fn came(&mut self, now_ms: u64) {
        self.starting = self.starting.saturating_sub(1);
        self.since_ms = now_ms;
    }

    fn keeps_until(&self) -> u64 {
        self.since_ms + KEEP_MS
    }

    /// Whether more leases may come than are known of.
    pub(super) fn is_unanswered(&self, announced: u32, standings: &Standings, now_ms: u64) -> bool {
        let asks_for_more = announced > self.answered && announced as usize > standings.held + self.starting;
        asks_for_more && now_ms < self.keeps_until()
    }

    /// How many tasks are kept for leases that are to come.
    pub(super) fn kept(&self, now_ms: u64) -> usize {
        self.coming(now_ms) * self.share
    }

    /// As few leases as are needed, or one for each node: with more than that, the first to come may be on the same nodes. What was asked
    /// for stays while that is less than twice as much, since the head answers each time.
    pub(super) fn rounded(wanted: usize, nodes: usize, announced: u32) -> usize {
        let announced = announced as usize;
        match wanted <= announced && announced < 2 * wanted && wanted > nodes {
            true => announced,
            false => wanted.next_power_of_two().min(wanted.max(nodes)),
        }
    }
}

/// Shapes whose tasks are kept for leases that are to come.
pub(super) type Keeping = BTreeSet<Arc<Shape>>;

impl Dispatch {
    /// There are so many nodes.
    pub(crate) fn nodes_are(&mut self, nodes: u32) {
        self.nodes = nodes;
    }

    /// The head has answered to a demand for leases that are to be spread, or that has changed: so many are being started.
    pub(crate) fn starting(&mut self, shape: &Arc<Shape>, wanted: u32, leases: u32) {
        let Some(queue) = self.queues.get_mut(shape) else { return };
        self.touched.add(shape, queue);
        let tasks = queue.ready.len() + queue.standings.tasks();
        let Some(spreading) = &mut queue.spreading else { return };
        // What has run meanwhile was the share of others: that of those to come does not shrink.
        let at_least = if spreading.starting > 0 { spreading.share } else { 1 };
        spreading.starting = leases as usize;
        spreading.share = (tasks / (queue.standings.held + spreading.starting).max(1)).max(at_least);
        spreading.answered = wanted;
    }

    /// Whether leases of this shape are kept, though nothing runs under them: tasks wait, which may be for these.
    pub(super) fn keeps_leases_of(&self, shape: &Arc<Shape>) -> bool {
        self.keeping.contains(shape)
    }

    /// Notes whether time alone may have tasks of this queue pushed.
    pub(super) fn note_keeping(&mut self, shape: &Arc<Shape>, now_ms: u64) {
        let keeps = |queue: &Queue| {
            let Some(spreading) = &queue.spreading else { return false };
            let is_unanswered = spreading.is_unanswered(queue.announced, &queue.standings, now_ms);
            !queue.ready.is_empty() && (is_unanswered || spreading.kept(now_ms) > 0)
        };
        if let Some(queue) = self.queues.get_mut(shape)
            && queue.ready.is_empty()
            && let Some(spreading) = &mut queue.spreading
        {
            spreading.is_waiting = false;
        }
        match self.queues.get(shape) {
            Some(queue) if keeps(queue) => drop(self.keeping.insert(shape.clone())),
            _ => drop(self.keeping.remove(shape)),
        }
    }

    /// Time passes for what is kept: what is kept no longer is dealt.
    pub(super) fn touch_kept(&mut self, now_ms: u64) {
        for shape in &self.keeping {
            let Some(queue) = self.queues.get_mut(shape) else { continue };
            if queue.spreading.as_ref().is_some_and(|spreading| spreading.keeps_until() <= now_ms) {
                self.touched.add(shape, queue);
            }
        }
    }

    /// In how many milliseconds the first of them is no longer kept.
    pub(super) fn kept_for(&self, now_ms: u64) -> Option<u64> {
        let queues = self.keeping.iter().filter_map(|shape| self.queues.get(shape)?.spreading.as_ref());
        queues.filter_map(|spreading| spreading.keeps_until().checked_sub(now_ms).filter(|ms| *ms > 0)).min()
    }
}

#[cfg(test)]
#[path = "spreading_tests.rs"]
mod tests;
