//! What was written down becomes the state.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use wingbeat_core::spec::{ActorSpec, JobSpec, PlacementGroupSpec, ScopedName};
use wingbeat_core::{ActorId, NodeId, PlacementGroupId, ProcessId};
use wingbeat_net::messages::NodeInfo;

use super::actors::Absent;
use crate::state::State;
use crate::state::facts::{BundlePlace, Drained, Fact, KeptActor};

/// What is awaited from those who come back, by what was written down.
#[derive(Default)]
struct Awaited {
    nodes: BTreeMap<NodeId, (NodeInfo, Option<Drained>)>,
    /// Nodes that are here already, and were to be drained.
    drained_here: Vec<(NodeId, Drained)>,
    /// Processes that had something.
    owners: BTreeSet<ProcessId>,
    actors: BTreeMap<ActorId, Absent>,
    /// Those of them that have a name.
    names: BTreeMap<ScopedName, ActorId>,
    /// Bundles by the node on which they were.
    places: BTreeMap<NodeId, Vec<(PlacementGroupId, u32, BundlePlace)>>,
}

impl State {
    /// Takes in what an earlier head knew, but for what is known by now. Nothing, when the time for that is over.
    pub(in crate::state) fn take_back(&mut self, facts: Vec<Fact>) {
        if self.recovering.is_none() {
            return;
        }
        // In the order of their keys: jobs come before what is theirs.
        let latest: BTreeMap<_, _> = facts.into_iter().map(|fact| (fact.key(), fact)).collect();
        let mut awaited = Awaited::default();
        for fact in latest.into_values() {
            match fact {
                Fact::Job(spec, has_driver) => self.take_back_job(*spec, has_driver, &mut awaited),
                Fact::Quota(namespace, limit) => {
                    if self.quotas.iter().all(|(known, _)| known != namespace) {
                        self.set_quota(&namespace, Some(limit));
                    }
                }
                Fact::Group(spec, bundles) => self.take_back_group(*spec, bundles, &mut awaited),
                Fact::Actor(actor) => self.take_back_actor(actor, &mut awaited),
                Fact::Node(info, drained) => self.take_back_node(*info, drained, &mut awaited),
                Fact::Promise(until) => self.wait_until(until),
                // Of the head itself, which has looked at them before.
                Fact::Succession(_) | Fact::NoSuccession | Fact::Follows(_) | Fact::Leads => {}
                Fact::EarlierSuccession(_) | Fact::NoEarlierSuccession => {}
                Fact::JobGone(_) | Fact::ActorGone(_) | Fact::GroupGone(_) | Fact::QuotaGone(_) | Fact::NodeGone(_) => {
                }
            }
        }
        self.await_what_may_come_back(awaited);
    }

    fn take_back_job(&mut self, spec: JobSpec, has_driver: bool, awaited: &mut Awaited) {
        let id = spec.id;
        if has_driver {
            awaited.owners.insert(spec.driver.process);
        }
        if self.jobs.contains_key(&id) {
            return;
        }
        self.insert_job(spec);
        if let Some(job) = self.jobs.get_mut(&id) {
            job.is_over = !has_driver;
        }
    }

    fn take_back_group(&mut self, spec: PlacementGroupSpec, bundles: Vec<Option<BundlePlace>>, awaited: &mut Awaited) {
        let id = spec.id;
        if !self.jobs.contains_key(&spec.job) {
            // The last head ended between writing that it was to be made and making it, and its job is over.
            return self.facts.push(Fact::GroupGone(id));
        }
        let is_taken = spec.name.as_ref().is_some_and(|name| self.groups.find_by_name(name).is_ok());
        if self.groups.get(id).is_some() || is_taken {
            return;
        }
        if !spec.detached {
            awaited.owners.insert(spec.owner.process);
        }
        self.insert_group(spec);
        if bundles.iter().any(Option::is_some) {
            self.groups.note_possible(id);
        }
        for (index, place) in bundles.into_iter().enumerate() {
            if let Some(place) = place {
                awaited.places.entry(place.node).or_default().push((id, index as u32, place));
            }
        }
    }

    fn take_back_actor(&mut self, actor: KeptActor, awaited: &mut Awaited) {
        let KeptActor { spec, life, moves, ends } = actor;
        if self.actors.is_taken(&spec) {
            // Somebody was faster, who did not know that the name was taken.
            return self.facts.push(Fact::ActorGone(spec.id));
        }
        if self.actors.knows(spec.id) {
            return;
        }
        if let Some(name) = &spec.name {
            // Two asked for it at a time, and the last head ended before it took back what it had written for the slower one.
            let other = awaited.names.get(name).copied();
            if let Some(other) = other {
                let has_lived = |absent: &Absent| absent.life.is_some();
                if life.is_none() || awaited.actors.get(&other).is_some_and(has_lived) {
                    return self.facts.push(Fact::ActorGone(spec.id));
                }
                awaited.actors.remove(&other);
                self.facts.push(Fact::ActorGone(other));
            }
            awaited.names.insert(name.clone(), spec.id);
        }
        if !spec.detached {
            awaited.owners.insert(spec.owner.process);
        }
        let spec: Arc<ActorSpec> = Arc::from(spec);
        awaited.actors.insert(spec.id, Absent { spec, life, moves, place: None, ends, earlier: None });
    }

    fn take_back_node(&mut self, info: NodeInfo, drained: Option<Drained>, awaited: &mut Awaited) {
        if self.nodes.get(info.id).is_some() {
            awaited.drained_here.extend(drained.map(|drained| (info.id, drained)));
        } else if !self.will_not_come_back(info.id) {
            awaited.nodes.insert(info.id, (info, drained));
        }
    }

    fn await_what_may_come_back(&mut self, awaited: Awaited) {
        let Awaited { nodes, drained_here, owners, actors, names: _, mut places } = awaited;
        let here: Vec<NodeId> = places.keys().copied().filter(|node| self.nodes.get(*node).is_some()).collect();
        for node in here {
            let places = places.remove(&node).unwrap_or_default();
            self.bundles_are_back(node, places);
        }
        for (node, drained) in drained_here {
            // It is there.
            let _ = self.drain_node(node, drained);
        }
        if let Some(recovering) = &mut self.recovering {
            recovering.knows_who = true;
            recovering.nodes.extend(nodes);
            recovering.owners.extend(owners);
            for (id, absent) in actors {
                // What its maker has said may be later.
                let known = recovering.actors.entry(id).or_insert_with(|| absent.clone());
                if known.life < absent.life {
                    *known = Absent { earlier: known.earlier, ..absent };
                }
            }
            for (node, more) in places {
                recovering.places.entry(node).or_default().extend(more);
            }
        }
    }
}
