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

/// Nothing is kept for others, and the head's answer is not waited for, when neither a lease nor an answer has come for so long:
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
    /// When it did, or a lease came.
    since_ms: u64,
    /// How many pushes there were.
    pub pushes: u64,
}

impl Spreading {
    /// Of a shape that is to be spread.
    pub(super) fn of(shape: &Shape) -> Option<Box<Spreading>> {
        (shape.strategy == Strategy::Spread).then(Box::default)
    }

    pub(super) fn is_asked(&mut self, now_ms: u64) {
        self.since_ms = now_ms;
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
        if now_ms < self.keeps_until() { self.starting * self.share } else { 0 }
    }

    /// As few leases as are needed, or one for each node: with more than that, the first to come may be on the same nodes.
    pub(super) fn rounded(wanted: usize, nodes: usize) -> usize {
        wanted.next_power_of_two().min(wanted.max(nodes))
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
    pub(crate) fn starting(&mut self, shape: &Arc<Shape>, wanted: u32, leases: u32, now_ms: u64) {
        let Some(queue) = self.queues.get_mut(shape) else { return };
        self.touched.add(shape, queue);
        let tasks = queue.ready.len() + queue.standings.tasks();
        let Some(spreading) = &mut queue.spreading else { return };
        spreading.starting = leases as usize;
        spreading.share = tasks.div_ceil((queue.standings.held + spreading.starting).max(1));
        spreading.answered = wanted;
        spreading.since_ms = now_ms;
    }

    /// Notes whether time alone may have tasks of this queue pushed.
    pub(super) fn note_keeping(&mut self, shape: &Arc<Shape>, now_ms: u64) {
        let keeps = |queue: &Queue| {
            let Some(spreading) = &queue.spreading else { return false };
            let is_unanswered = spreading.is_unanswered(queue.announced, &queue.standings, now_ms);
            !queue.ready.is_empty() && (is_unanswered || spreading.kept(now_ms) > 0)
        };
        match self.queues.get(shape) {
            Some(queue) if keeps(queue) => drop(self.keeping.insert(shape.clone())),
            _ => drop(self.keeping.remove(shape)),
        }
    }

    /// Time passes for what is kept. Answers in how many milliseconds it is not kept any more.
    pub(super) fn keep(&mut self, now_ms: u64) -> Option<u64> {
        let mut next: Option<u64> = None;
        for shape in &self.keeping {
            let Some(queue) = self.queues.get_mut(shape) else { continue };
            let Some(until) = queue.spreading.as_ref().map(|spreading| spreading.keeps_until()) else { continue };
            match until.checked_sub(now_ms).filter(|ms| *ms > 0) {
                Some(ms) => next = Some(next.map_or(ms, |known| known.min(ms))),
                None => self.touched.add(shape, queue),
            }
        }
        next
    }
}

#[cfg(test)]
#[path = "spreading_tests.rs"]
mod tests;
