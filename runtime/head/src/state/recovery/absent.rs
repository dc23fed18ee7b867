//! Nodes and drivers that were there before and are not back.

use wingbeat_core::spec::Address;
use wingbeat_core::{JobId, NodeId, PlacementGroupId, ProcessId};
use wingbeat_net::messages::{HeadEvent, NodeMessage};

use crate::state::facts::Fact;
use crate::state::{Action, State};

/// Why a node is lost that does not come back.
pub(super) const AWAY: &str = "it did not come back when the head was started again";

/// A node, or the driver of a job, that was there before.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Absentee {
    /// Whether it offers anything.
    Node(NodeId, bool),
    Driver(ProcessId, JobId),
}

impl State {
    /// Whether a process that knew an earlier head may go on with this one: everybody while they come back, and later whoever is known
    /// to live, and was not waited for since it has nothing here.
    pub fn may_come_back(&self, process: ProcessId) -> bool {
        if self.is_job_of_over(process) {
            return false;
        }
        self.recovering.is_some() || self.was_recovered && self.worker_jobs.contains_key(&process)
    }

    /// Whether the last head has ended a job whose driver comes back: it had given that up, as one that stood still for too long.
    pub(crate) fn has_ended_before(&self, job: JobId) -> bool {
        let knows_all = self.recovering.as_ref().is_some_and(|recovering| recovering.knows_all_jobs);
        knows_all && !self.jobs.contains_key(&job)
    }

    /// Whether a group is not known to this head, and may be to somebody who can tell what the last one knew.
    pub(in crate::state) fn may_be_told_of_group(&self, group: PlacementGroupId) -> bool {
        let is_unknown = self.groups.get(group).is_none() && self.groups.cause_of_end(group).is_none();
        is_unknown && self.recovering.as_ref().is_some_and(|recovering| !recovering.knows_who)
    }

    /// Nodes and drivers that may still come back, and where they listened.
    pub(crate) fn absent(&self) -> Vec<(Absentee, Address)> {
        let Some(recovering) = &self.recovering else { return Vec::new() };
        let nodes = recovering
            .nodes
            .iter()
            .map(|(node, (info, _))| (Absentee::Node(*node, !info.resources.is_empty()), info.address.clone()));
        let jobs = self.jobs.iter().filter(|(_, job)| !job.is_over);
        let drivers = jobs.map(|(id, job)| (Absentee::Driver(job.spec.driver.process, *id), job.spec.driver.clone()));
        nodes.chain(drivers).filter(|(who, _)| self.is_absent(*who)).collect()
    }

    /// Whether one of those may still come back.
    pub(crate) fn is_absent(&self, who: Absentee) -> bool {
        let Some(recovering) = &self.recovering else { return false };
        match who {
            Absentee::Node(node, _) => recovering.nodes.contains_key(&node),
            Absentee::Driver(process, _) => !self.connected.contains(&process) && recovering.owners.contains(&process),
        }
    }

    /// Whether one of those has come back, when all had time for that.
    pub(crate) fn is_back(&self, who: Absentee) -> bool {
        match who {
            Absentee::Node(node, _) => self.nodes.get(node).is_some(),
            Absentee::Driver(_, job) => self.is_job_running(job),
        }
    }

    /// A node that was there before will not come back.
    pub(in crate::state) fn absent_node_lost(&mut self, id: NodeId, why: &str) {
        let Some(recovering) = &mut self.recovering else { return };
        if let Some((info, _)) = recovering.nodes.remove(&id) {
            // What it could hold was possible.
            self.nodes.remember_info(info, self.now, why);
            self.never_back(id, why);
        }
    }

    pub(super) fn never_back(&mut self, node: NodeId, why: &str) {
        self.record(Fact::NodeGone(node));
        self.note_lost_node(node, why);
        self.tell_all(&HeadEvent::NodeDied { node, why: why.to_owned() });
        let others: Vec<NodeId> = self.nodes.iter().map(|other| other.info.id).collect();
        for other in others {
            self.order(other, NodeMessage::NodeDied(node));
        }
    }

    /// Whoever comes back later is to hear of it.
    pub(in crate::state) fn note_lost_node(&mut self, node: NodeId, why: &str) {
        if self.unheard.is_some() {
            self.never_back.push((node, why.to_owned()));
        }
    }

    /// Whether a node was written down, and may still come back.
    pub(crate) fn is_awaited(&self, node: NodeId) -> bool {
        self.recovering.as_ref().is_some_and(|recovering| recovering.nodes.contains_key(&node))
    }

    /// Whether others were told that a node is lost.
    pub(crate) fn will_not_come_back(&self, node: NodeId) -> bool {
        self.never_back.iter().any(|(lost, _)| *lost == node)
    }

    /// The same for a node that is back: it may be fetching from them.
    pub(super) fn tell_node_of_lost_nodes(&mut self, back: NodeId) {
        for node in self.never_back.iter().map(|(node, _)| *node).collect::<Vec<_>>() {
            self.order(back, NodeMessage::NodeDied(node));
        }
    }

    /// Tells a process that is back of the nodes that are not, and were lost before it was; and before that how worker processes
    /// there had ended: what was moved away from a drained node has not failed.
    pub(in crate::state) fn tell_of_lost_nodes(&mut self, process: ProcessId) {
        let deaths = self.recovering.iter().flat_map(|recovering| recovering.deaths.values());
        let there = deaths.filter(|death| self.never_back.iter().any(|(node, _)| *node == death.node));
        let deaths = there.map(|death| HeadEvent::WorkerDied(death.clone()));
        let nodes = self.never_back.iter().map(|(node, why)| HeadEvent::NodeDied { node: *node, why: why.clone() });
        self.out.extend(deaths.chain(nodes).map(|event| Action::Tell(process, event)));
    }

    /// Whether a bundle of this group is on a node that may still come back.
    pub(in crate::state) fn has_absent_bundles(&self, group: PlacementGroupId) -> bool {
        let places = self.recovering.iter().flat_map(|recovering| recovering.places.values().flatten());
        places.into_iter().any(|(id, ..)| *id == group)
    }
}
