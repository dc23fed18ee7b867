//! What processes and nodes say to the head.

use serde::{Deserialize, Serialize};
use wingbeat_core::{NodeId, ProcessId};
use wingbeat_net::messages::HeadMessage;

use super::State;
use super::recovery::Absent;

/// Who says something.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub enum Speaker {
    /// A driver or a worker process.
    Process(ProcessId),
    /// A node.
    Node(NodeId),
}

/// Why the worker process of an abandoned lease ends.
pub(super) const ABANDONED: &str = "the owner of its tasks has lost contact with it";

impl From<ProcessId> for Speaker {
    fn from(process: ProcessId) -> Speaker {
        Speaker::Process(process)
    }
}

impl From<NodeId> for Speaker {
    fn from(node: NodeId) -> Speaker {
        Speaker::Node(node)
    }
}

impl State {
    /// Whether it is for this one to say that.
    pub fn may_say(&self, by: Speaker, message: &HeadMessage) -> bool {
        // A lease that is unknown here is over, and nothing is said of it any more.
        let serves = |node, lease| self.node_of(lease).is_none_or(|of| of == node);
        match (by, message) {
            (
                Speaker::Node(node),
                HeadMessage::LeaseReady { lease, .. }
                | HeadMessage::LeaseFailed { lease, .. }
                | HeadMessage::LeaseEnded(lease),
            ) => serves(node, *lease),
            (Speaker::Node(node), HeadMessage::WorkerDied(death)) => death.node == node,
            (
                Speaker::Node(_),
                HeadMessage::ActorStarted { .. }
                | HeadMessage::DevicesHeld(_)
                | HeadMessage::MemoryShort(_)
                | HeadMessage::StoreUsed(_)
                | HeadMessage::Owners(_)
                | HeadMessage::NodeEnds(_),
            )
            | (
                Speaker::Process(_),
                HeadMessage::Demand { .. }
                | HeadMessage::ReturnLease(_)
                | HeadMessage::AbandonLease(_)
                | HeadMessage::Waiting { .. }
                | HeadMessage::Resumed { .. }
                | HeadMessage::SaidAgain { .. }
                | HeadMessage::WatchActor(_)
                | HeadMessage::WatchPlacementGroup(_)
                | HeadMessage::KillActor { .. }
                | HeadMessage::TerminateActor { .. }
                | HeadMessage::Holds { .. }
                | HeadMessage::LifeOver { .. }
                | HeadMessage::Leaves,
            ) => true,
            (Speaker::Process(by), HeadMessage::Made { spec, .. }) => spec.owner.process == by,
            _ => false,
        }
    }

    pub(super) fn hears(&mut self, by: Speaker, message: HeadMessage) {
        match (by, message) {
            (Speaker::Process(by), HeadMessage::Demand { shape, wanted, name }) => self.demand(by, shape, wanted, name),
            (Speaker::Process(by), HeadMessage::ReturnLease(lease)) => {
                self.note_absent_return(by, lease, false);
                self.returned(by, lease, None);
            }
            (Speaker::Process(by), HeadMessage::AbandonLease(lease)) => {
                self.note_absent_return(by, lease, true);
                self.returned(by, lease, Some(ABANDONED.into()));
            }
            (Speaker::Process(by), HeadMessage::Waiting { lease, wait }) => self.waiting(by, lease, wait),
            (Speaker::Process(by), HeadMessage::Resumed { lease, task }) => self.resumed(by, lease, task),
            (Speaker::Process(by), HeadMessage::SaidAgain { question, wait }) => self.said_again(by, question, wait),
            (Speaker::Process(by), HeadMessage::WatchActor(actor)) => self.watch(by, actor),
            (Speaker::Process(by), HeadMessage::WatchPlacementGroup(group)) => self.watch_group(by, group),
            (Speaker::Process(_), HeadMessage::KillActor { actor, may_restart }) => {
                self.kill_actor(actor, may_restart);
            }
            (Speaker::Process(_), HeadMessage::TerminateActor { actor, by }) => self.terminate_actor(actor, by),
            (Speaker::Process(by), HeadMessage::Holds { leases, actors, is_all }) => {
                self.holds(by, leases, actors, is_all);
            }
            (Speaker::Process(_), HeadMessage::LifeOver { actor, life }) => self.life_over(actor, life),
            (Speaker::Process(_), HeadMessage::Made { spec, life, moves, place }) => {
                self.actor_was_made(Absent { spec, life, moves, place, ends: None, earlier: None });
            }
            (Speaker::Node(_), HeadMessage::LeaseReady { lease, worker, pid }) => self.lease_ready(lease, worker, pid),
            (Speaker::Node(_), HeadMessage::LeaseFailed { lease, error }) => self.lease_failed(lease, error),
            (Speaker::Node(_), HeadMessage::LeaseEnded(lease)) => self.lease_ended(lease),
            (Speaker::Node(_), HeadMessage::WorkerDied(death)) => self.worker_died(death),
            (Speaker::Node(_), HeadMessage::ActorStarted { actor, incarnation, outcome }) => {
                self.actor_started(actor, incarnation, outcome);
            }
            (Speaker::Node(node), HeadMessage::DevicesHeld(held)) => self.devices_held(node, held),
            (Speaker::Node(node), HeadMessage::MemoryShort(usage)) => {
                self.nodes.change(node, |node| node.memory_short = usage);
            }
            (Speaker::Node(node), HeadMessage::StoreUsed(store)) => {
                self.nodes.set_store(node, store);
            }
            (Speaker::Node(node), HeadMessage::Owners(owners)) => self.owners_on(node, owners),
            (Speaker::Node(node), HeadMessage::NodeEnds(why)) => self.node_lost(node, &why),
            // Who leaves is lost when its connection ends, which is next. Nobody else may say the rest.
            _ => {}
        }
    }
}
