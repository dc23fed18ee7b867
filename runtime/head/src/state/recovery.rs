//! How a head that was started again begins with what the last one wrote down.
//!
//! Facts say which nodes, jobs, groups, quotas and named actors there were. What runs where, the nodes say when they come
//! back: they are the authority for it. What they have and want, and which actors they have made, processes say. Until all had
//! time to do so, nothing that may still run is started again. That time ends when nobody is missing who is known to have been
//! there; at the latest when whoever has not come back has ended by itself.

mod actors;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use wingbeat_core::spec::{ActorSpec, Address, ScopedName};
use wingbeat_core::{ActorId, ClusterId, Incarnation, JobId, LeaseId, NodeId, PlacementGroupId, ProcessId, TaskId};
use wingbeat_net::messages::{
    HeadEvent, LeaseHolder, LeaseStart, NodeInfo, NodeMessage, Running, RunningLease, WorkerDeath,
};

use super::actors::ToEnd;
use super::facts::{BundlePlace, Drained, Fact, KeptActor};
use super::hears::ABANDONED;
use super::lease::{Holder, Lease};
use super::nodes::Taken;
use super::queue::Hold;
use super::recorded::Input;
use super::{Action, Millis, State};

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

/// What was said of actors of which a head that was started again knows nothing else. Whoever made one may be waited for by nobody,
/// and say what it was when the rest has gone on already.
pub(super) struct Unheard {
    /// When whoever has not come back has ended by itself.
    until: Millis,
    /// Who wants to know what becomes of them.
    watchers: BTreeMap<ActorId, BTreeSet<ProcessId>>,
    /// Lives that are over, as somebody knows.
    over: BTreeMap<ActorId, Over>,
}

/// What is known of the end of an actor that is not known.
#[derive(Clone, Copy, Default)]
struct Over {
    /// This life, and those before it.
    life: Option<Incarnation>,
    /// Whichever comes back, was killed by somebody who did not know which it was.
    is_killed: bool,
}

/// How often it is looked whether everybody is back.
const LOOK: Millis = 250;

/// Why an actor ends that its creator does not know any more.
const DROPPED: &str = "the drop of its last handle";

/// Why a node is lost that does not come back.
const AWAY: &str = "it did not come back when the head was started again";

/// A node, or the driver of a job, that was there before.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Absentee {
    /// Whether it offers anything.
    Node(NodeId, bool),
    Driver(ProcessId, JobId),
}

/// An actor that may be somewhere.
#[derive(Clone)]
pub(super) struct Absent {
    pub spec: Arc<ActorSpec>,
    /// Its latest life, if any has begun.
    pub life: Option<Incarnation>,
    /// How often it was moved, which has cost no restart.
    pub moves: u32,
    /// Where that life was, as far as somebody has said so.
    pub place: Option<(NodeId, ProcessId)>,
    /// Why it is to end in order, if it is.
    pub ends: Option<String>,
    /// The lease of an earlier life that a node has brought back, and that was told to end.
    pub earlier: Option<LeaseId>,
}

impl Absent {
    fn fact(&self) -> Fact {
        let (life, moves, ends) = (self.life, self.moves, self.ends.clone());
        Fact::Actor(KeptActor { spec: Box::new((*self.spec).clone()), life, moves, ends })
    }
}

/// What a process has. All else that was its own is ended: the news of a grant, of a return, or of the drop of a last handle
/// was lost.
#[derive(Default)]
struct Claim {
    leases: BTreeSet<LeaseId>,
    actors: BTreeSet<ActorId>,
    is_complete: bool,
}

fn is_kept(spec: &ActorSpec) -> bool {
    spec.detached || spec.name.is_some()
}

impl Recovering {
    pub(super) fn place_of(&self, group: PlacementGroupId, index: u32) -> Option<&BundlePlace> {
        let mut places = self.places.values().flatten();
        places.find(|(id, at, _)| (*id, *at) == (group, index)).map(|(_, _, place)| place)
    }

    /// What must be remembered of those that may still come back.
    pub(super) fn actors(&self) -> impl Iterator<Item = Fact> {
        let kept = self.actors.values().filter(|absent| is_kept(&absent.spec));
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

    fn has_spoken(&self, process: ProcessId) -> bool {
        self.claims.get(&process).is_some_and(|claim| claim.is_complete)
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
        self.actors.retain(|_, absent| is_kept(&absent.spec) || absent.spec.owner.process != process);
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

impl Unheard {
    /// Notes who wants to know about an actor: it may still be heard of.
    pub(super) fn watch(&mut self, process: ProcessId, actor: ActorId) {
        self.watchers.entry(actor).or_default().insert(process);
    }

    pub(super) fn process_lost(&mut self, process: ProcessId) {
        for watchers in self.watchers.values_mut() {
            watchers.remove(&process);
        }
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

    /// Somebody has come back who knew an earlier head, and this one knows nothing of what that knew. Whoever has not come back
    /// `until` then has ended by itself.
    pub fn somebody_returns(&mut self, now: Millis, until: Millis) -> Vec<Action> {
        self.begin(now, || Input::Returns(until));
        if !self.was_recovered {
            self.begin_recovery(until);
        }
        self.act()
    }

    /// What the last head knew, as a node has kept it. What is known here already counts: it has happened since.
    pub fn remember(&mut self, now: Millis, facts: Vec<Fact>) -> Vec<Action> {
        self.begin(now, || Input::Remembers(facts.clone()));
        self.take_back(facts);
        // Some wait for groups that are known now to be there, or not.
        self.refuse_the_infeasible();
        self.queue.unblock_all_in_turn();
        self.act()
    }

    /// Those who knew an earlier head may come back from now on.
    fn begin_recovery(&mut self, until: Millis) {
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
    fn wait_until(&mut self, until: Millis) {
        if let Some(recovering) = &mut self.recovering {
            recovering.until = until;
        }
        if let Some(unheard) = &mut self.unheard {
            unheard.until = until;
        }
    }

    /// Takes in what an earlier head knew, but for what is known by now. Nothing, when the time for that is over.
    fn take_back(&mut self, facts: Vec<Fact>) {
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

    /// Whether a process that knew an earlier head may go on with this one: everybody while they come back, and later whoever is known
    /// to live, and was not waited for since it has nothing here.
    pub fn may_come_back(&self, process: ProcessId) -> bool {
        if self.is_over(process) {
            return false;
        }
        self.recovering.is_some() || self.was_recovered && self.worker_jobs.contains_key(&process)
    }

    /// Whether the last head has ended a job whose driver comes back: it had given that up, as one that stood still for too long.
    pub(crate) fn has_ended_before(&self, job: JobId) -> bool {
        let knows_all = self.recovering.as_ref().is_some_and(|recovering| recovering.knows_all_jobs);
        knows_all && !self.jobs.contains_key(&job)
    }

    /// Whether a process is the driver of a job that is over: what it had was ended.
    pub(crate) fn is_over(&self, driver: ProcessId) -> bool {
        let job = self.drivers.get(&driver).and_then(|job| self.jobs.get(job));
        job.is_some_and(|job| job.is_over)
    }

    /// Whether those that were there before the head was started again may still come back.
    pub fn is_recovering(&self) -> bool {
        self.recovering.is_some()
    }

    /// Whether a group is not known to this head, and may be to somebody who can tell what the last one knew.
    pub(super) fn may_be_told_of_group(&self, group: PlacementGroupId) -> bool {
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
    pub(super) fn absent_node_lost(&mut self, id: NodeId, why: &str) {
        let Some(recovering) = &mut self.recovering else { return };
        if let Some((info, _)) = recovering.nodes.remove(&id) {
            // What it could hold was possible.
            self.nodes.remember_info(info, self.now, why);
            self.never_back(id, why);
        }
    }

    fn never_back(&mut self, node: NodeId, why: &str) {
        self.record(Fact::NodeGone(node));
        self.note_lost_node(node, why);
        self.tell_all(&HeadEvent::NodeDied { node, why: why.to_owned() });
        let others: Vec<NodeId> = self.nodes.iter().map(|other| other.info.id).collect();
        for other in others {
            self.order(other, NodeMessage::NodeDied(node));
        }
    }

    /// Whoever comes back later is to hear of it.
    pub(super) fn note_lost_node(&mut self, node: NodeId, why: &str) {
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
    fn tell_node_of_lost_nodes(&mut self, back: NodeId) {
        for node in self.never_back.iter().map(|(node, _)| *node).collect::<Vec<_>>() {
            self.order(back, NodeMessage::NodeDied(node));
        }
    }

    /// Tells a process that is back of the nodes that are not, and were lost before it was; and before that how worker processes
    /// there had ended: what was moved away from a drained node has not failed.
    pub(super) fn tell_of_lost_nodes(&mut self, process: ProcessId) {
        let deaths = self.recovering.iter().flat_map(|recovering| recovering.deaths.values());
        let there = deaths.filter(|death| self.never_back.iter().any(|(node, _)| *node == death.node));
        let deaths = there.map(|death| HeadEvent::WorkerDied(death.clone()));
        let nodes = self.never_back.iter().map(|(node, why)| HeadEvent::NodeDied { node: *node, why: why.clone() });
        self.out.extend(deaths.chain(nodes).map(|event| Action::Tell(process, event)));
    }

    /// Whether a bundle of this group is on a node that may still come back.
    pub(super) fn has_absent_bundles(&self, group: PlacementGroupId) -> bool {
        let places = self.recovering.iter().flat_map(|recovering| recovering.places.values().flatten());
        places.into_iter().any(|(id, ..)| *id == group)
    }

    /// When it is to be looked whether everybody is back, or could not be any more.
    pub(super) fn recovery_ends(&self) -> Option<Millis> {
        let unheard = self.unheard.as_ref().map(|unheard| unheard.until);
        let recovering = self.recovering.as_ref().map(|recovering| recovering.until.min(self.now + LOOK));
        unheard.into_iter().chain(recovering).min()
    }

    /// Takes in what runs on a node that knew a head before.
    pub(super) fn adopt(&mut self, node: NodeId, running: Running) {
        self.tell_node_of_lost_nodes(node);
        let (known, places) = match &mut self.recovering {
            Some(recovering) => (recovering.nodes.remove(&node), recovering.places.remove(&node)),
            None => (None, None),
        };
        self.bundles_are_back(node, places.unwrap_or_default());
        for job in running.jobs {
            match self.jobs.get(&job) {
                Some(known) if !known.is_over => drop(self.nodes.change(node, |node| node.jobs.insert(job))),
                // It may have detached actors, which the node keeps.
                _ => self.order(node, NodeMessage::EndJob { job }),
            }
        }
        for (process, job) in running.ended {
            self.departed.insert(process, Some(job));
        }
        for (worker, job) in running.workers {
            self.worker_known(worker, job, node);
        }
        for lease in running.leases {
            let owner = match &lease.start.holder {
                LeaseHolder::Tasks(owner, _) => Some(*owner),
                LeaseHolder::Actor(spec, ..) => (!spec.detached).then_some(spec.owner.process),
            };
            if let Some(recovering) = &mut self.recovering {
                recovering.owners.extend(owner);
            }
            self.adopt_lease(node, lease);
        }
        if let Some((_, Some(drained))) = known {
            // It is there.
            let _ = self.drain_node(node, drained);
        }
    }

    /// Whatever runs, holds what it holds until the node says that it is gone. Whether it may go on, is another question.
    fn adopt_lease(&mut self, node: NodeId, lease: RunningLease) {
        let RunningLease { start, worker, started, terminated, is_ending } = lease;
        let LeaseStart { lease: id, job, resources, gpus, bundle, holder, .. } = start;
        if self.leases.leases.contains_key(&id) {
            return;
        }
        let is_there = |(group, index): &(PlacementGroupId, u32)| {
            let placed = self.groups.get(*group).and_then(|group| group.placed.get(*index as usize)?.as_ref());
            placed.is_some_and(|placed| placed.taken.node == node)
        };
        let is_lost = bundle.is_some_and(|bundle| !is_there(&bundle));
        let bundle = bundle.filter(is_there);
        let taken = Taken { node, bundle, resources, devices: gpus };
        match bundle {
            None => {
                self.nodes.change(node, |node| node.pool.take_exactly(&taken.resources, &taken.devices));
                self.charge(job, &taken.resources);
            }
            Some((group, index)) => self.groups.take_exactly(group, index, &taken.resources, &taken.devices),
        }
        let outlives = matches!(&holder, LeaseHolder::Actor(spec, ..) if spec.detached);
        let has_job = self.jobs.get(&job).is_some_and(|job| !job.is_over || outlives);
        let may_go_on = has_job && !is_ending && !is_lost;
        let known = match &holder {
            _ if !may_go_on => Holder::Nobody,
            LeaseHolder::Tasks(owner, shape) => {
                Holder::Tasks((*owner, self.adopt_demand(*owner, (**shape).clone(), id)))
            }
            LeaseHolder::Actor(spec, ..) => Holder::Actor(spec.id),
        };
        let server = worker.as_ref().map(|(address, pid)| (address.process, *pid));
        let entry = Lease::of_earlier_head(Lease::new(taken, known, job, self.now), server, is_ending);
        self.leases.leases.insert(id, entry);
        self.job_holds(job, 1);
        self.nodes.change(node, |node| node.leases.insert(id));
        self.tell_of_job(node, job);
        if let Some((address, _)) = &worker {
            self.worker_known(address.process, job, node);
        }
        if let Holder::Tasks(asker) = known {
            self.requeue(&asker);
        }
        let waiting = self.recovering.as_mut().and_then(|recovering| recovering.waiting.remove(&id));
        for task in waiting.unwrap_or_default() {
            self.lease_waits(id, task, true);
        }
        if !may_go_on {
            if let (LeaseHolder::Actor(spec, ..), Some(by)) = (&holder, terminated) {
                self.terminate_actor(spec.id, by);
            }
            return self.end_lease(id, Some("the head that was started again has no place for it".into()));
        }
        match holder {
            LeaseHolder::Tasks(owner, _) => {
                if self.recovering.as_mut().is_none_or(|recovering| recovering.abandoned.remove(&id)) {
                    // Or its owner has said what it has to a head that could not know of this.
                    self.end_lease(id, Some(ABANDONED.into()));
                } else if self.is_claimed_by_nobody(owner, id) {
                    // It was returned, or the news of it was lost. Its process may own what others need.
                    self.end_lease(id, None);
                }
            }
            LeaseHolder::Actor(spec, incarnation, moves) => {
                if self.is_stale(&spec, incarnation) {
                    self.has_earlier_life(spec.id, id);
                    return self.end_lease(
                        id,
                        Some("this life of its actor was over before the head was started again".into()),
                    );
                }
                let absent = self.recovering.as_mut().and_then(|recovering| recovering.actors.remove(&spec.id));
                let terminated = terminated.or(absent.and_then(|absent| absent.ends));
                let is_up = matches!(started, Some(Ok(())));
                if !self.adopt_actor((&spec, incarnation, moves), id, node, worker, is_up) {
                    self.next_life_waits_for(spec.id, Some(id));
                    self.end_lease(id, Some("another life of its actor is known".into()));
                } else if let Some(Err(error)) = started {
                    self.actor_started(spec.id, incarnation, Err(error));
                }
                match self.is_to_end(spec.id).or_else(|| terminated.map(ToEnd::Terminate)) {
                    Some(ToEnd::Kill) => self.kill_actor(spec.id, false),
                    Some(ToEnd::Terminate(by)) => self.terminate_actor(spec.id, by),
                    None => {}
                }
                if self.is_held_by_nobody(&spec) {
                    self.terminate_actor(spec.id, DROPPED.into());
                }
                self.heard_of(spec.id);
            }
        }
    }

    /// Somebody waits, or goes on, under a lease that its node has not reported yet.
    pub(super) fn note_absent_wait(&mut self, lease: LeaseId, task: TaskId, begins: bool) {
        let Some(recovering) = &mut self.recovering else { return };
        if self.leases.leases.contains_key(&lease) {
            return;
        }
        let waiting = recovering.waiting.entry(lease).or_default();
        match begins {
            true => waiting.insert(task),
            false => waiting.remove(&task),
        };
    }

    /// The worker process of a lease has ended that its node has not reported, or never will; or whose owner is not known, or not
    /// back.
    pub(super) fn absent_worker_died(&mut self, lease: LeaseId, death: WorkerDeath) {
        let Some(recovering) = &mut self.recovering else { return };
        let owner = recovering.claims.iter().find(|(_, claim)| claim.leases.contains(&lease)).map(|(owner, _)| *owner);
        match owner.filter(|owner| self.connected.contains(owner)) {
            Some(owner) => self.tell(owner, HeadEvent::WorkerDied(death)),
            None => drop(recovering.deaths.insert(lease, death)),
        }
    }

    /// An owner has no more use for a lease that its node has not reported yet.
    pub(super) fn note_absent_return(&mut self, owner: ProcessId, lease: LeaseId, is_abandoned: bool) {
        let Some(recovering) = &mut self.recovering else { return };
        if self.leases.leases.contains_key(&lease) {
            return;
        }
        if let Some(claim) = recovering.claims.get_mut(&owner) {
            claim.leases.remove(&lease);
        }
        if is_abandoned {
            recovering.abandoned.insert(lease);
        }
    }

    /// A process says what it has.
    pub(super) fn holds(&mut self, process: ProcessId, leases: Vec<LeaseId>, actors: Vec<ActorId>, is_all: bool) {
        let Some(recovering) = &mut self.recovering else { return };
        let claim = recovering.claims.entry(process).or_default();
        if claim.is_complete {
            *claim = Claim::default();
        }
        claim.leases.extend(leases);
        claim.actors.extend(actors);
        claim.is_complete = is_all;
        if !is_all {
            return;
        }
        let mut extra = Vec::new();
        for asker in self.leases.asked_by(process) {
            if let Some(demand) = self.leases.demands.get_mut(&asker) {
                extra.extend(demand.held.difference(&claim.leases).copied());
                // What else it wants is said next.
                demand.wanted = demand.held.intersection(&claim.leases).count() as u32;
                demand.is_guessed = false;
            }
        }
        let absent = recovering.actors.values().map(|absent| &absent.spec);
        let absent = absent.filter(|spec| !spec.detached && spec.owner.process == process).map(|spec| spec.id);
        let made = self.actors.made_by(process).chain(absent);
        let dropped: Vec<ActorId> = made.filter(|id| !claim.actors.contains(id)).collect();
        let known: Vec<LeaseId> =
            claim.leases.iter().copied().filter(|id| recovering.deaths.contains_key(id)).collect();
        let deaths: Vec<WorkerDeath> = known.iter().filter_map(|id| recovering.deaths.remove(id)).collect();
        for death in deaths {
            self.tell(process, HeadEvent::WorkerDied(death));
        }
        for lease in extra {
            self.end_lease(lease, None);
        }
        for asker in self.leases.asked_by(process) {
            self.requeue(&asker);
        }
        for actor in dropped {
            self.terminate_actor(actor, DROPPED.into());
        }
    }

    /// Whether a process has said what it has.
    pub(super) fn has_claimed(&self, process: ProcessId) -> bool {
        self.claim_of(process).is_some()
    }

    fn claim_of(&self, process: ProcessId) -> Option<&Claim> {
        self.recovering.as_ref()?.claims.get(&process).filter(|claim| claim.is_complete)
    }

    fn is_claimed_by_nobody(&self, owner: ProcessId, lease: LeaseId) -> bool {
        self.claim_of(owner).is_some_and(|claim| !claim.leases.contains(&lease))
    }

    fn is_held_by_nobody(&self, spec: &ActorSpec) -> bool {
        let claim = self.claim_of(spec.owner.process);
        !spec.detached && claim.is_some_and(|claim| !claim.actors.contains(&spec.id))
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
        for absent in recovering.actors.into_values() {
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
