//! Processes that have ended, for nodes that ask whose objects nobody owns any more.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use wingbeat_core::{JobId, NodeId, ProcessId};
use wingbeat_net::messages::NodeMessage;

use super::State;

/// So many are remembered. What the one before them owned is deleted when its job is over.
const REMEMBERED: usize = 1 << 17;

#[derive(Default)]
pub(super) struct Departed {
    /// Of worker processes, whose job they were of.
    known: BTreeMap<ProcessId, Option<JobId>>,
    order: VecDeque<ProcessId>,
}

impl Departed {
    pub(super) fn insert(&mut self, process: ProcessId, job: Option<JobId>) {
        let is_new = !self.known.contains_key(&process);
        let known = self.known.entry(process).or_default();
        *known = known.or(job);
        if !is_new {
            return;
        }
        self.order.push_back(process);
        if self.order.len() > REMEMBERED
            && let Some(first) = self.order.pop_front()
        {
            self.known.remove(&first);
        }
    }
}

impl State {
    /// Whether a process has certainly ended: a driver, a worker process, or the steward of a node.
    pub(crate) fn has_ended(&self, process: ProcessId) -> bool {
        self.departed.known.contains_key(&process) || self.ended_before(process)
    }

    /// Whether this head has seen the end of a process, or given it up.
    pub(crate) fn has_seen_the_end_of(&self, process: ProcessId) -> bool {
        self.departed.known.contains_key(&process)
    }

    /// Whether a process ended before the head was started again: whoever lives has come back, or its node has said that it is there.
    fn ended_before(&self, process: ProcessId) -> bool {
        self.was_recovered && self.recovering.is_none() && !self.is_there(process)
    }

    /// Whether a process is a driver, a worker process or the steward of a node that this head knows to be there.
    fn is_there(&self, process: ProcessId) -> bool {
        let is_steward = self.nodes.get(NodeId(process.0)).is_some_and(|node| node.info.id.steward() == process);
        is_steward || self.worker_jobs.contains_key(&process) || self.drivers.contains_key(&process)
    }

    fn may_live(&self, process: ProcessId) -> bool {
        self.is_there(process) || self.connected.contains(&process)
    }

    /// A node has objects of these processes in its store, made for these jobs.
    pub(super) fn owners_on(&mut self, node: NodeId, owners: BTreeMap<JobId, BTreeSet<ProcessId>>) {
        if self.recovering.is_some() {
            // Jobs are still coming back.
            return;
        }
        let (mut gone, mut over) = (BTreeSet::new(), BTreeSet::new());
        for (job, owners) in owners {
            match self.jobs.contains_key(&job) {
                true => gone.extend(owners.into_iter().filter(|process| self.has_ended(*process))),
                // One of another job, which has passed a value here, may live on; or may have been referred to by others of that job, who
                // have time to say so.
                false => {
                    for process in owners.into_iter().filter(|process| !self.may_live(*process)) {
                        let own = self.departed.known.get(&process).copied().flatten();
                        let goes_on = own.is_some_and(|job| self.jobs.contains_key(&job));
                        if goes_on {
                            gone.insert(process)
                        } else {
                            over.insert(process)
                        };
                    }
                }
            }
        }
        // Somebody of a job that goes on may be about to say that he refers to what such an owner had.
        let over: BTreeSet<ProcessId> = over.difference(&gone).copied().collect();
        for (owners, are_jobs_over) in [(gone, false), (over, true)] {
            let owners: Vec<ProcessId> = owners.into_iter().collect();
            if !owners.is_empty() {
                self.order(node, NodeMessage::OwnersGone { owners, are_jobs_over });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_are_remembered() {
        let mut departed = Departed::default();
        for process in 0..=REMEMBERED as u64 {
            departed.insert(ProcessId(process), None);
            departed.insert(ProcessId(process), Some(JobId(1)));
        }
        assert_eq!((departed.known.len(), departed.order.len()), (REMEMBERED, REMEMBERED));
        assert!(
            !departed.known.contains_key(&ProcessId(0)) && departed.known.contains_key(&ProcessId(REMEMBERED as u64))
        );
    }
}
