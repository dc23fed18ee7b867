//! Nodes that are to be free of work: nothing new is placed there, and what runs finishes or, at the deadline, is moved.

use wingbeat_core::error::Error;
use wingbeat_core::{LeaseId, NodeId};
use wingbeat_net::messages::NodeMessage;

use super::facts::{Drained, Fact};
use super::lease::Holder;
use super::nodes::{Drain, Node};
use super::{Millis, State};

impl State {
    /// Begins to drain a node, or changes how it is drained.
    ///
    /// # Errors
    /// There is no such node.
    pub(super) fn drain_node(&mut self, id: NodeId, as_asked: Drained) -> Result<(), Error> {
        let deadline = self.now.saturating_add(as_asked.within);
        let known = self.nodes.change(id, |node| {
            node.draining = Some(Drain { as_asked, deadline, is_enforced: false });
        });
        if known.is_none() {
            return Err(self.no_such_node(id));
        }
        self.draining.insert(id);
        self.record_node(id);
        // What is queued for its worker processes goes back to its owners.
        self.recall_all_on(id);
        // Who uses a group as one moves it as one.
        self.announce_groups_on(id);
        self.note_if_drained(id);
        Ok(())
    }

    /// The node takes work again.
    pub(super) fn end_drain(&mut self, id: NodeId) -> Result<(), Error> {
        if self.nodes.change(id, |node| node.draining = None).is_none() {
            return Err(self.no_such_node(id));
        }
        self.draining.remove(&id);
        self.record_node(id);
        self.announce_groups_on(id);
        self.free_again(id);
        Ok(())
    }

    /// Whether somebody may have a node drained.
    ///
    /// # Errors
    /// It is what a program has brought for its values: nothing is placed there, and its end would be the program's.
    pub fn may_be_drained(&self, id: NodeId) -> Result<(), Error> {
        if self.has_node(id) && !self.offers_work(id) {
            let what = format!(
                "{id} is of a program, has nothing for work, and ends with that program: there is nothing to drain"
            );
            return Err(Error::InvalidArgument { what });
        }
        Ok(())
    }

    fn no_such_node(&self, id: NodeId) -> Error {
        let is_absent = self.recovering.as_ref().is_some_and(|recovering| recovering.infos().any(|info| info.id == id));
        Error::InvalidArgument {
            what: match is_absent {
                true => format!("{id} is not back since the head was started again; ask again in a moment"),
                false => format!("there is no {id}; `wingbeat status` shows the nodes"),
            },
        }
    }

    /// What would have to be written down for a node to be drained like this, or not to be; nothing if it is not there.
    pub fn drain_fact(&self, id: NodeId, drained: Option<Drained>) -> Option<Fact> {
        self.nodes.get(id).map(|node| Fact::Node(Box::new(node.info.clone()), drained))
    }

    pub(super) fn record_node(&mut self, id: NodeId) {
        if self.keeps_facts
            && let Some(fact) = self.nodes.get(id).map(Node::fact)
        {
            self.record(fact);
        }
    }

    /// What is free on a node, and in bundles that lie there, can be given again.
    pub(super) fn free_again(&mut self, id: NodeId) {
        self.freed_on(id);
        let groups: Vec<_> =
            self.nodes.get(id).map(|node| node.bundles.iter().map(|(group, _)| *group).collect()).unwrap_or_default();
        for group in groups {
            self.freed_in(group);
        }
    }

    /// The next deadline.
    pub(super) fn drain_deadline(&self) -> Option<Millis> {
        let drains = self.draining.iter().filter_map(|id| self.nodes.get(*id)?.draining.as_ref());
        drains.filter(|drain| !drain.is_enforced).map(|drain| drain.deadline).min()
    }

    /// Moves what still runs where the deadline is over.
    pub(super) fn enforce_drains(&mut self) {
        let due: Vec<(NodeId, String)> = self
            .draining
            .iter()
            .filter_map(|id| Some((*id, self.nodes.get(*id)?.draining.as_ref()?)))
            .filter(|(_, drain)| !drain.is_enforced && drain.deadline <= self.now)
            .map(|(id, drain)| (id, drain.as_asked.why.clone()))
            .collect();
        for (id, why) in due {
            self.nodes.change(id, |node| {
                if let Some(drain) = &mut node.draining {
                    // Nobody has time again when the head is started again.
                    (drain.is_enforced, drain.as_asked.within) = (true, 0);
                }
            });
            self.record_node(id);
            let reason = format!("its node was drained ({why})");
            let Some(node) = self.nodes.get(id) else { continue };
            let (leases, bundles) = (node.leases.clone(), node.bundles.clone());
            for lease in leases {
                let Some(known) = self.leases.leases.get(&lease) else { continue };
                if let Holder::Actor(actor) = known.holder {
                    self.move_actor(actor, lease, &why);
                }
                self.end_lease(lease, Some(reason.clone()));
            }
            self.move_bundles(id, bundles);
            self.note_if_drained(id);
        }
    }

    /// Tells the daemon to end, if that is wanted and nothing is left on it.
    pub(super) fn note_if_drained(&mut self, id: NodeId) {
        if !self.draining.contains(&id) {
            return;
        }
        let is_left = |lease: &LeaseId| !self.yields_to_drain(*lease);
        let free = |node: &&Node| !node.leases.iter().any(is_left) && node.bundles.is_empty();
        let Some(node) = self.nodes.get(id).filter(free) else { return };
        if let Some(drain) = node.draining.as_ref().map(|drain| &drain.as_asked).filter(|drain| drain.stops) {
            let why = format!("it was drained ({})", drain.why);
            self.order(id, NodeMessage::Stop(why));
        }
    }

    /// Whether a lease is that of an actor for which a drained node is not to wait.
    fn yields_to_drain(&self, lease: LeaseId) -> bool {
        let Some(known) = self.leases.leases.get(&lease) else { return false };
        let Holder::Actor(actor) = known.holder else { return false };
        self.actors.spec(actor).is_some_and(|spec| spec.yields_to_drain)
    }
}
