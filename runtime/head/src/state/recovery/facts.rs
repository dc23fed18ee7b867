//! What was written down becomes the state.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use wingbeat_core::spec::ActorSpec;
use wingbeat_core::{NodeId, PlacementGroupId};

use super::actors::Absent;
use crate::state::State;
use crate::state::facts::{BundlePlace, Fact, KeptActor};

impl State {
    /// Takes in what an earlier head knew, but for what is known by now. Nothing, when the time for that is over.
    pub(in crate::state) fn take_back(&mut self, facts: Vec<Fact>) {
        if self.recovering.is_none() {
            return;
        }
        let (mut nodes, mut actors, mut owners) = (BTreeMap::new(), BTreeMap::new(), BTreeSet::new());
        let mut places: BTreeMap<NodeId, Vec<(PlacementGroupId, u32, BundlePlace)>> = BTreeMap::new();
        let mut drained_here = Vec::new();
        let mut latest = BTreeMap::new();
        for fact in facts {
            latest.insert(fact.key(), fact);
        }
        for fact in latest.into_values() {
            match fact {
                Fact::Job(spec, has_driver) => {
                    let id = spec.id;
                    if has_driver {
                        owners.insert(spec.driver.process);
                    }
                    if self.jobs.contains_key(&id) {
                        continue;
                    }
                    self.insert_job(*spec);
                    if let Some(job) = self.jobs.get_mut(&id) {
                        job.is_over = !has_driver;
                    }
                }
                Fact::Quota(namespace, limit) => {
                    if self.quotas.iter().all(|(known, _)| known != namespace) {
                        self.set_quota(&namespace, Some(limit));
                    }
                }
                // The last head ended between writing that it was to be made and making it, and its job is over.
                Fact::Group(spec, _) if !self.jobs.contains_key(&spec.job) => {
                    self.facts.push(Fact::GroupGone(spec.id));
                }
                Fact::Group(spec, bundles) => {
                    let id = spec.id;
                    let is_taken = spec.name.as_ref().is_some_and(|name| self.groups.find_by_name(name).is_ok());
                    if self.groups.get(id).is_some() || is_taken {
                        continue;
                    }
                    if !spec.detached {
                        owners.insert(spec.owner.process);
                    }
                    self.insert_group(*spec);
                    if bundles.iter().any(Option::is_some) {
                        self.groups.note_possible(id);
                    }
                    for (index, place) in bundles.into_iter().enumerate() {
                        if let Some(place) = place {
                            places.entry(place.node).or_default().push((id, index as u32, place));
                        }
                    }
                }
                // Somebody was faster, who did not know that the name was taken.
                Fact::Actor(KeptActor { spec, .. }) if self.actors.is_taken(&spec) => {
                    self.facts.push(Fact::ActorGone(spec.id));
                }
                Fact::Actor(KeptActor { spec, life, moves, ends }) if !self.actors.knows(spec.id) => {
                    if !spec.detached {
                        owners.insert(spec.owner.process);
                    }
                    let spec: Arc<ActorSpec> = Arc::from(spec);
                    actors.insert(spec.id, Absent { spec, life, moves, place: None, ends, earlier: None });
                }
                Fact::Node(info, drained) if self.nodes.get(info.id).is_some() => {
                    drained_here.extend(drained.map(|drained| (info.id, drained)));
                }
                Fact::Node(info, drained) if !self.will_not_come_back(info.id) => {
                    nodes.insert(info.id, (*info, drained));
                }
                Fact::Promise(until) => self.wait_until(until),
                Fact::Actor(_) | Fact::Node(..) => {}
                // Of the head itself, which has looked at them before.
                Fact::Succession(_) | Fact::NoSuccession | Fact::Follows(_) | Fact::Leads => {}
                Fact::EarlierSuccession(_) | Fact::NoEarlierSuccession => {}
                Fact::JobGone(_) | Fact::ActorGone(_) | Fact::GroupGone(_) | Fact::QuotaGone(_) | Fact::NodeGone(_) => {
                }
            }
        }
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
