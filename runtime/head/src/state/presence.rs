//! Nodes that join, are away and come back, or are lost.

use wingbeat_core::spec::MachineId;
use wingbeat_core::{ActorId, JobId, LeaseId, NodeId};
use wingbeat_net::messages::{HeadEvent, NodeInfo, NodeMessage, Running};

use super::lease::Holder;
use super::why::{suspicion, title};
use super::{Fact, Millis, State};

impl State {
    pub(super) fn node_joined(&mut self, info: NodeInfo, running: Running) {
        let id = info.id;
        let was_nothing_offered = self.nodes.offer_nothing();
        self.nodes.join(info);
        self.record_node(id);
        self.devices_held(id, running.held.clone());
        self.nodes.change(id, |node| {
            node.memory_short.clone_from(&running.memory_short);
            node.store = running.store;
        });
        self.shares_changed();
        self.tell_how_many_nodes();
        self.adopt(id, running);
        self.freed_on(id);
        self.queue.unblock_all_in_turn();
        // Whoever waited when there was no node for work is told what could never be.
        if was_nothing_offered && !self.nodes.offer_nothing() {
            self.refuse_the_infeasible();
        }
    }

    pub(super) fn node_lost(&mut self, id: NodeId, why: &str) {
        self.departed.insert(id.steward(), None);
        let Some(node) = self.nodes.remove(id) else { return self.absent_node_lost(id, why) };
        self.record(Fact::NodeGone(id));
        self.note_lost_node(id, why);
        self.tell_all(&HeadEvent::NodeDied { node: id, why: why.to_owned() });
        // Their transfers from it end now, and not when a connection is found to be broken.
        for other in self.nodes.ids() {
            self.order(other, NodeMessage::NodeDied(id));
        }
        self.tell_how_many_nodes();
        let of_actors: Vec<(LeaseId, ActorId)> = node
            .leases
            .iter()
            .filter_map(|lease| match self.leases.leases.get(lease)?.holder {
                Holder::Actor(actor) => Some((*lease, actor)),
                Holder::Tasks(_) | Holder::Nobody => None,
            })
            .collect();
        self.nodes.remember(node.clone(), self.now, why);
        for lease in node.leases {
            self.forget_lease(lease);
        }
        self.draining.remove(&id);
        self.reservation_lost(id);
        self.unfit.forget_node(id);
        self.bundles_lost(node.bundles);
        self.actors_lost_with(&of_actors, id, why);
        self.worker_jobs.retain(|process, (job, of)| {
            if *of == id {
                self.departed.insert(*process, Some(*job));
            }
            *of != id
        });
        self.shares_changed();
        self.refuse_the_infeasible();
    }

    pub(super) fn devices_held(&mut self, id: NodeId, held: Vec<(u32, String)>) {
        self.nodes.change(id, |node| {
            node.held = held.into_iter().collect();
            let held = &node.held;
            node.pool.hold_devices(|device| held.contains_key(&device));
        });
        self.freed_on(id);
    }

    /// While nodes come back, there are too many changes of that for everybody to hear of each.
    pub(super) fn tell_how_many_nodes(&mut self) {
        if self.recovering.is_none() {
            self.tell_all(&HeadEvent::Nodes(self.nodes.len() as u32));
        }
    }

    /// Whether a node of this id is there.
    pub fn has_node(&self, node: NodeId) -> bool {
        self.nodes.get(node).is_some()
    }

    /// Whether an actor of a job is about to end in order, and runs still.
    pub fn has_ending_actors(&self, job: JobId) -> bool {
        self.actors.has_ending(job)
    }

    /// Whether a node is there, and has anything for work.
    pub fn offers_work(&self, node: NodeId) -> bool {
        self.nodes.get(node).is_some_and(|node| !node.info.resources.is_empty())
    }

    /// The nodes that offer something for work.
    pub(crate) fn nodes_for_work(&self) -> impl Iterator<Item = &NodeInfo> {
        self.nodes.iter().map(|node| &node.info).filter(|info| !info.resources.is_empty())
    }

    /// The machine on which a node is.
    pub fn machine_of(&self, node: NodeId) -> Option<MachineId> {
        self.nodes.get(node).map(|node| node.info.address.machine)
    }

    /// A node that has no connection is suspect: nothing new is placed there, and what runs there goes on.
    pub(super) fn node_away(&mut self, id: NodeId) {
        let now = self.now;
        self.nodes.change(id, |node| node.suspect = Some(now));
    }

    /// The node takes work again.
    pub(super) fn node_back(&mut self, id: NodeId) {
        if self.nodes.change(id, |node| node.suspect = None).is_some() {
            self.free_again(id);
        }
    }

    /// What is said of a node that has no connection to the head, with its host; none of others.
    pub(crate) fn suspicion_of(&self, now: Millis, node: NodeId) -> Option<String> {
        let node = self.nodes.get(node)?;
        Some(format!("{} {}", title(node), suspicion(node, now)?))
    }

    /// Why a node is lost, as far as that is remembered.
    pub(crate) fn why_lost(&self, node: NodeId) -> Option<&str> {
        self.nodes.lost(node).map(|lost| lost.why.as_str())
    }
}
