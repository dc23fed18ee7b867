//! How a head that was started again begins with what the last one wrote down.
//!
//! Facts say which nodes, jobs, groups, quotas and named actors there were. What runs where, the nodes say when they come
//! back: they are the authority for it. What they have and want, and which actors they have made, processes say. Until all had
//! time to do so, nothing that may still run is started again. That time ends when nobody is missing who is known to have been
//! there; at the latest when whoever has not come back has ended by itself.
//!
//! - `facts`: what was written down becomes the state.
//! - `adoption`: what a node that comes back runs; `claims`: what a process says it has.
//! - `absent`: who is not back; `actors`: actors that nobody has reported yet.

use std::collections::{BTreeMap, BTreeSet};

use wingbeat_core::spec::{ActorSpec, ScopedName};
use wingbeat_core::{ActorId, ClusterId, JobId, LeaseId, NodeId, PlacementGroupId, ProcessId, TaskId};
use wingbeat_net::messages::{NodeInfo, WorkerDeath};

use super::facts::{BundlePlace, Drained, Fact};
use super::queue::Hold;
use super::{Millis, State};

mod absent;
mod actors;
mod adoption;
mod claims;
mod facts;

use absent::AWAY;
pub(crate) use absent::Absentee;
pub(super) use actors::{Absent, Unheard};
use claims::Claim;

/// How often it is looked whether everybody is back.
const LOOK: Millis = 250;

/// What was there before, until everybody is back or the time for that is over.
pub(super) struct Recovering {
    until: Millis,
    /// Whether this head has what the last one knew, and so knows who was there.
    knows_who: bool,
    /// Whether it has what the last one had written down before it told any driver that it had joined.
    knows_all_jobs: bool,
    /// Nodes that are not back.
    nodes: BTreeMap<NodeId, (NodeInfo, Option<Drained>)>,
    /// Processes that have something here: they are back when they have said what.
    owners: BTreeSet<ProcessId>,
    /// Actors that no node has reported yet.
    actors: BTreeMap<ActorId, Absent>,
    /// Bundles by the node on which they were.
    places: BTreeMap<NodeId, Vec<(PlacementGroupId, u32, BundlePlace)>>,
    /// What processes say they have.
    claims: BTreeMap<ProcessId, Claim>,
    /// Executions that wait under leases that no node has reported yet.
    waiting: BTreeMap<LeaseId, BTreeSet<TaskId>>,
    /// Leases of those that their owners gave up while something may still run under them.
    abandoned: BTreeSet<LeaseId>,
    /// Worker processes of such leases that have ended: their owners are told when they say that they have them.
    deaths: BTreeMap<LeaseId, WorkerDeath>,
}

impl Recovering {
    pub(super) fn place_of(&self, group: PlacementGroupId, index: u32) -> Option<&BundlePlace> {
        let mut places = self.places.values().flatten();
        places.find(|(id, at, _)| (*id, *at) == (group, index)).map(|(_, _, place)| place)
    }

    /// What must be remembered of those that may still come back.
    pub(super) fn actors(&self) -> impl Iterator<Item = Fact> {
        let kept = self.actors.values().filter(|absent| absent.spec.is_kept());
        kept.map(Absent::fact)
    }

    /// Nodes that may still come back.
    pub(super) fn absent_nodes(&self) -> impl Iterator<Item = Fact> {
        self.nodes.values().map(|(info, drained)| Fact::Node(Box::new(info.clone()), drained.clone()))
    }

    /// And what they have.
    pub(super) fn infos(&self) -> impl Iterator<Item = &NodeInfo> {
        self.nodes.values().map(|(info, _)| info)
    }

    /// Whether an actor may still come back.
    pub(super) fn may_be_back(&self, actor: ActorId) -> bool {
        self.actors.contains_key(&actor)
    }

    /// The jobs of detached actors that may still come back.
    pub(super) fn detached(&self) -> impl Iterator<Item = JobId> {
        self.actors.values().filter(|absent| absent.spec.detached).map(|absent| absent.spec.job)
    }

    pub(super) fn process_lost(&mut self, process: ProcessId) {
        // Who has said that it has nothing, and ended, has nothing still: what its nodes report of it was given back.
        self.claims.retain(|by, claim| *by != process || claim.is_complete);
        self.owners.remove(&process);
        // Those that nobody has reported yet end with whoever made them, too.
        self.actors.retain(|_, absent| absent.spec.is_kept() || absent.spec.owner.process != process);
    }

    /// Whether nobody is missing who is known to have been there, where this says who may be alive.
    fn is_everybody_back(&self, may_live: impl Fn(&ProcessId) -> bool) -> bool {
        self.knows_who
            && self.nodes.is_empty()
            && self.owners.iter().all(|owner| self.has_spoken(*owner) || !may_live(owner))
    }

    pub(super) fn actor_named(&self, name: &ScopedName) -> Option<&ActorSpec> {
        let mut specs = self.actors.values().map(|absent| &*absent.spec);
        specs.find(|spec| spec.name.as_ref() == Some(name))
    }
}

impl State {
    /// A cluster with what an earlier head wrote down. Its nodes and processes have so long from now on to come back: whoever has
    /// not by then has ended by itself.
    pub fn recover(cluster: ClusterId, first_lease: u64, facts: Vec<Fact>, grace: Millis) -> State {
        let mut state = State::new(cluster, first_lease);
        state.begin_recovery(grace);
        state.take_back(facts);
        if let Some(recovering) = &mut state.recovering {
            recovering.knows_all_jobs = true;
        }
        state
    }

    /// Those who knew an earlier head may come back from now on.
    pub(super) fn begin_recovery(&mut self, until: Millis) {
        (self.quotas.is_use_unknown, self.was_recovered) = (true, true);
        let (nodes, owners, actors, places, claims) = Default::default();
        let (waiting, abandoned, deaths) = Default::default();
        let (knows_who, knows_all_jobs) = (false, false);
        self.recovering = Some(Recovering {
            until,
            knows_who,
            knows_all_jobs,
            nodes,
            owners,
            actors,
            places,
            claims,
            waiting,
            abandoned,
            deaths,
        });
        let (watchers, over) = Default::default();
        self.unheard = Some(Unheard { until, watchers, over });
    }

    /// It is known now until when those that an earlier head knew may go on.
    pub(super) fn wait_until(&mut self, until: Millis) {
        if let Some(recovering) = &mut self.recovering {
            recovering.until = until;
        }
        if let Some(unheard) = &mut self.unheard {
            unheard.until = until;
        }
    }

    /// Whether those that were there before the head was started again may still come back.
    pub fn is_recovering(&self) -> bool {
        self.recovering.is_some()
    }

    /// When it is to be looked whether everybody is back, or could not be any more.
    pub(super) fn recovery_ends(&self) -> Option<Millis> {
        let unheard = self.unheard.as_ref().map(|unheard| unheard.until);
        let recovering = self.recovering.as_ref().map(|recovering| recovering.until.min(self.now + LOOK));
        unheard.into_iter().chain(recovering).min()
    }

    /// Ends the time in which those that were there before may come back.
    pub(super) fn end_recovery_when_due(&mut self) {
        self.end_recovery_of_the_rest();
        if self.unheard.as_ref().is_some_and(|unheard| self.now >= unheard.until)
            && let Some(unheard) = self.unheard.take()
        {
            self.never_back.clear();
            for (id, watchers) in unheard.watchers {
                for watcher in watchers {
                    self.watch(watcher, id);
                }
            }
        }
    }

    fn end_recovery_of_the_rest(&mut self) {
        // Every node that is back has said which worker processes it has.
        let may_live = |process: &ProcessId| {
            let is_driver = self.drivers.get(process).is_some_and(|job| self.is_job_running(*job));
            is_driver || self.worker_jobs.contains_key(process) || self.connected.contains(process)
        };
        let is_due = |recovering: &Recovering| self.now >= recovering.until || recovering.is_everybody_back(may_live);
        if !self.recovering.as_ref().is_some_and(is_due) {
            return;
        }
        let Some(recovering) = self.recovering.take() else { return };
        self.programs_version += 1;
        for (node, (info, _)) in recovering.nodes {
            self.nodes.remember_info(info, self.now, AWAY);
            self.never_back(node, AWAY);
        }
        self.tell_how_many_nodes();
        // One that has lived keeps its name.
        let (have_lived, others): (Vec<_>, Vec<_>) =
            recovering.actors.into_values().partition(|absent| absent.life.is_some());
        for absent in have_lived.into_iter().chain(others) {
            self.lives_again(absent, &recovering.deaths);
        }
        for id in self.groups.ids() {
            if self.groups.get(id).is_some_and(|group| !group.is_placed()) {
                self.wait_for_places(id);
            }
        }
        let askers = self.leases.demands.keys().map(|(owner, _)| owner);
        let makers = self.actors.makers().chain(self.groups.makers());
        let owners: BTreeSet<ProcessId> = self.drivers.keys().chain(askers).chain(makers).copied().collect();
        for owner in owners {
            if !self.connected.contains(&owner) {
                let job = self.drivers.get(&owner).copied();
                self.process_lost(owner, job);
            }
        }
        for job in self.jobs.keys().copied().collect::<Vec<_>>() {
            self.forget_job_if_over(job);
        }
        self.quotas.is_use_unknown = false;
        let namespaces: Vec<String> = self.quotas.iter().map(|(namespace, _)| namespace.to_owned()).collect();
        for namespace in namespaces {
            self.queue.unpark(&Hold::Quota(namespace));
        }
        // Until now, a node that could hold it might have come back.
        self.refuse_the_infeasible();
    }
}
