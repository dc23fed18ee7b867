//! The lives of actors, and their names.
//!
//! ```text
//!   Pending ──placed──▶ Starting ──constructor──▶ Alive ──process ends──▶ Pending (restarts left) or Dead
//! ```

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use wingbeat_core::error::Error;
use wingbeat_core::spec::{ActorInfo, ActorName, ActorSpec, ActorState, Address, Shape};
use wingbeat_core::{ActorId, Incarnation, JobId, LeaseId, NodeId, ProcessId};
use wingbeat_net::messages::{HeadEvent, LeaseStart, NodeMessage, WorkerDeath};

use super::Millis;
use super::State;
use super::leases::Holder;

/// Dead actors that are remembered, so that whoever asks late learns the cause.
const TOMBSTONES: usize = 10_000;
/// Failures to start its worker process, one after another, after which an actor is given up. They are the
/// node's failures and cost it no restart.
const GIVE_UP_AFTER: u32 = 3;
/// A life that was shorter than this counts as quick; the first quick one is followed by the next at once.
const QUICK_MS: Millis = 1_000;
/// The pause after the second quick life in a row; it doubles with each further one, up to the limit.
const PAUSE_MS: Millis = 100;
const PAUSE_LIMIT_MS: Millis = 10_000;

enum Phase {
    /// Waits for a node with room. `after` is why its last life ended, if it had one.
    Pending {
        after: Option<Error>,
    },
    /// A lease was granted; the process or the constructor is not there yet.
    Starting {
        lease: LeaseId,
        node: NodeId,
        process: Option<(Address, u32)>,
    },
    Alive {
        lease: LeaseId,
        node: NodeId,
        address: Address,
        pid: u32,
    },
    Dead(Error),
}

struct Actor {
    spec: ActorSpec,
    phase: Phase,
    incarnation: Incarnation,
    restarts_left: u32,
    /// Worker processes that could not be started, since one could.
    failures: u32,
    /// When it was placed last.
    placed_at: Millis,
    /// Lives in a row that were quick.
    quick: u32,
    /// It rests until then.
    not_before: Millis,
    /// It is to end in order, because of this.
    terminating: Option<String>,
    watchers: BTreeSet<ProcessId>,
}

#[derive(Default)]
pub(super) struct Actors {
    actors: BTreeMap<ActorId, Actor>,
    names: BTreeMap<ActorName, ActorId>,
    pending: BTreeSet<ActorId>,
    dead: VecDeque<ActorId>,
    /// Given up before they were asked for: the two words come on different ways.
    never: BTreeMap<ActorId, String>,
    never_order: VecDeque<ActorId>,
}

/// An actor for people.
pub(super) struct Row<'a> {
    pub spec: &'a ActorSpec,
    pub state: &'static str,
    pub node: Option<NodeId>,
    pub pid: Option<u32>,
    pub restarts: u32,
}

impl Actors {
    pub(super) fn find(&self, name: &ActorName) -> Result<ActorInfo, Error> {
        let id = self.names.get(name);
        id.and_then(|id| self.actors.get(id))
            .map(|actor| info(&actor.spec))
            .ok_or_else(|| Error::ActorNotFound { name: name.name.clone(), namespace: name.namespace.clone() })
    }

    pub(super) fn unwatch(&mut self, process: ProcessId) {
        for actor in self.actors.values_mut() {
            actor.watchers.remove(&process);
        }
    }

    pub(super) fn has_of_job(&self, job: JobId) -> bool {
        self.actors.values().any(|actor| actor.spec.job == job && !matches!(actor.phase, Phase::Dead(_)))
    }

    /// Arguments that dead actors hold on to.
    #[cfg(test)]
    pub(super) fn arguments_kept(&self) -> usize {
        let dead = self.actors.values().filter(|actor| matches!(actor.phase, Phase::Dead(_)));
        dead.map(|actor| actor.spec.args.len()).sum()
    }

    pub(super) fn has_pending(&self) -> bool {
        !self.pending.is_empty()
    }

    pub(super) fn pending_shapes(&self) -> impl Iterator<Item = (ActorId, Shape)> {
        self.pending_specs().map(|spec| (spec.id, State::placement_of(spec)))
    }

    pub(super) fn pending_specs(&self) -> impl Iterator<Item = &ActorSpec> {
        self.pending.iter().filter_map(|id| self.actors.get(id)).map(|actor| &actor.spec)
    }

    pub(super) fn rows(&self) -> impl Iterator<Item = Row<'_>> {
        self.actors.values().filter_map(|actor| {
            let (state, node, pid) = match &actor.phase {
                Phase::Pending { after: None } => ("starting", None, None),
                Phase::Pending { after: Some(_) } => ("restarting", None, None),
                Phase::Starting { node, process, .. } => {
                    ("starting", Some(*node), process.as_ref().map(|(_, pid)| *pid))
                }
                Phase::Alive { node, pid, .. } => ("alive", Some(*node), Some(*pid)),
                Phase::Dead(_) => return None,
            };
            Some(Row { spec: &actor.spec, state, node, pid, restarts: actor.incarnation.0 })
        })
    }
}

fn info(spec: &ActorSpec) -> ActorInfo {
    ActorInfo {
        id: spec.id,
        class: spec.class,
        class_name: spec.class_name.clone(),
        handle: spec.handle,
        owner: spec.owner.clone(),
        detached: spec.detached,
    }
}

impl Actor {
    fn shown(&self) -> ActorState {
        match &self.phase {
            Phase::Pending { after: Some(cause) } => ActorState::Restarting { cause: Box::new(cause.clone()) },
            Phase::Pending { after: None } | Phase::Starting { .. } => ActorState::Starting,
            Phase::Alive { address, .. } => {
                ActorState::Alive { address: address.clone(), incarnation: self.incarnation }
            }
            Phase::Dead(cause) => ActorState::Dead { cause: Box::new(cause.clone()) },
        }
    }

    fn lease(&self) -> Option<LeaseId> {
        match &self.phase {
            Phase::Starting { lease, .. } | Phase::Alive { lease, .. } => Some(*lease),
            Phase::Pending { .. } | Phase::Dead(_) => None,
        }
    }

    fn node(&self) -> Option<NodeId> {
        match &self.phase {
            Phase::Starting { node, .. } | Phase::Alive { node, .. } => Some(*node),
            Phase::Pending { .. } | Phase::Dead(_) => None,
        }
    }
}

impl State {
    pub(super) fn new_actor(&mut self, spec: ActorSpec, or_get: bool) -> Result<ActorInfo, Error> {
        if let Some(known) = self.actors.actors.get(&spec.id) {
            return Ok(info(&known.spec));
        }
        if !self.jobs.contains_key(&spec.job) {
            let why = format!("actor {} is of {}, which is over", spec.class_name, spec.job);
            return Err(Error::Refused { who: "the head".into(), why });
        }
        if let Some(name) = &spec.name {
            if let Some(existing) = self.actors.names.get(name).and_then(|id| self.actors.actors.get(id)) {
                if !or_get {
                    return Err(Error::ActorNameTaken { name: name.name.clone(), namespace: name.namespace.clone() });
                }
                if existing.spec.class != spec.class {
                    let what = format!(
                        "the actor named `{}` is a {}, not a {}",
                        name.name, existing.spec.class_name, spec.class_name
                    );
                    return Err(Error::InvalidArgument { what });
                }
                return Ok(info(&existing.spec));
            }
            self.actors.names.insert(name.clone(), spec.id);
        }
        let (id, answer) = (spec.id, info(&spec));
        let restarts_left = spec.max_restarts;
        let actor = Actor {
            spec,
            phase: Phase::Pending { after: None },
            incarnation: Incarnation(0),
            restarts_left,
            failures: 0,
            placed_at: 0,
            quick: 0,
            not_before: 0,
            terminating: None,
            watchers: BTreeSet::new(),
        };
        self.actors.actors.insert(id, actor);
        self.actors.pending.insert(id);
        match self.actors.never.remove(&id) {
            Some(by) => {
                self.actors.never_order.retain(|other| *other != id);
                self.bury_actor(id, Error::ActorEnded { by });
            }
            None => self.refuse_if_infeasible(id),
        }
        Ok(answer)
    }

    /// What a node must have room for: to be placed, and to live.
    pub(super) fn placement_of(spec: &ActorSpec) -> Shape {
        let mut shape = spec.placement.clone();
        for (name, amount) in spec.holds.iter() {
            if shape.resources.get(name) < amount {
                shape.resources.set(name, amount);
            }
        }
        shape
    }

    fn refuse_if_infeasible(&mut self, id: ActorId) {
        if self.nodes.is_empty() {
            return;
        }
        let Some(actor) = self.actors.actors.get(&id) else { return };
        let shape = Self::placement_of(&actor.spec);
        if let Some(nearest) = self.nodes.infeasible(&shape) {
            let what = format!("actor {}", actor.spec.class_name);
            let error = Error::Infeasible { what, asked: shape.resources.to_string(), nearest };
            self.bury_actor(id, error);
        }
    }

    pub(super) fn refuse_infeasible_actors(&mut self) {
        let waiting: Vec<ActorId> = self.actors.pending.iter().copied().collect();
        for id in waiting {
            self.refuse_if_infeasible(id);
        }
    }

    /// Whether an actor that died quickly rests before its next life.
    pub(super) fn actors_rest(&self) -> bool {
        let mut pending = self.actors.pending.iter().filter_map(|id| self.actors.actors.get(id));
        pending.any(|actor| self.now < actor.not_before)
    }

    pub(super) fn place_actors(&mut self) {
        let waiting: Vec<ActorId> = self.actors.pending.iter().copied().collect();
        for id in waiting {
            self.place_actor(id);
        }
    }

    fn place_actor(&mut self, id: ActorId) {
        let Some(actor) = self.actors.actors.get(&id) else { return };
        if self.now < actor.not_before {
            return;
        }
        let Some(job) = self.jobs.get(&actor.spec.job).cloned() else { return };
        let shape = Self::placement_of(&actor.spec);
        let Some(node) = self.nodes.place(&shape, Some(job.driver.machine)) else { return };
        let Some(taken) = self.nodes.take(node, &actor.spec.holds) else { return };
        let (spec, incarnation) = (actor.spec.clone(), actor.incarnation);
        let lease = self.new_lease(taken.clone(), Holder::Actor(id), job.id);
        if let Some(actor) = self.actors.actors.get_mut(&id) {
            actor.phase = Phase::Starting { lease, node, process: None };
            actor.placed_at = self.now;
        }
        self.actors.pending.remove(&id);
        let start = LeaseStart {
            lease,
            job,
            resources: taken.resources,
            gpus: taken.devices,
            actor: Some((spec, incarnation)),
        };
        self.order(node, NodeMessage::StartLease(Box::new(start)));
    }

    pub(super) fn actor_has_process(&mut self, id: ActorId, ready: LeaseId, address: Address, pid: u32) {
        let Some(actor) = self.actors.actors.get_mut(&id) else { return };
        if let Phase::Starting { lease, process, .. } = &mut actor.phase
            && *lease == ready
        {
            *process = Some((address, pid));
            actor.failures = 0;
        }
    }

    pub(super) fn actor_started(&mut self, id: ActorId, incarnation: Incarnation, outcome: Result<(), Error>) {
        let Some(actor) = self.actors.actors.get_mut(&id) else { return };
        if actor.incarnation != incarnation {
            return;
        }
        let Phase::Starting { lease, node, process: Some((address, pid)) } = &actor.phase else { return };
        let (lease, node) = (*lease, *node);
        match outcome {
            Ok(()) => {
                actor.phase = Phase::Alive { lease, node, address: address.clone(), pid: *pid };
                let draining = actor.terminating.clone();
                self.announce_actor(id);
                if let Some(by) = draining {
                    self.order(node, NodeMessage::DrainActor { lease, by });
                }
            }
            Err(error) => {
                self.bury_actor(id, error);
                self.end_lease(lease, Some("the actor's constructor failed".into()));
            }
        }
    }

    /// The node could not start a process for it.
    pub(super) fn actor_failed_to_start(&mut self, id: ActorId, failed: LeaseId, error: Error) {
        let Some(actor) = self.actors.actors.get_mut(&id) else { return };
        // The lease may be that of a life that was ended before.
        if actor.lease() != Some(failed) {
            return;
        }
        actor.failures += 1;
        if let Some(by) = actor.terminating.clone() {
            return self.bury_actor(id, Error::ActorEnded { by });
        }
        if actor.failures >= GIVE_UP_AFTER {
            return self.bury_actor(id, error);
        }
        actor.phase = Phase::Pending { after: (actor.incarnation.0 > 0).then_some(error) };
        self.actors.pending.insert(id);
        self.refuse_if_infeasible(id);
    }

    pub(super) fn actor_process_died(&mut self, id: ActorId, lease: LeaseId, death: WorkerDeath) {
        let Some(actor) = self.actors.actors.get(&id).filter(|actor| actor.lease() == Some(lease)) else { return };
        let cause = match &actor.terminating {
            Some(by) => Error::ActorEnded { by: by.clone() },
            None => Error::WorkerCrashed {
                task: format!("actor {}", actor.spec.class_name),
                process: death.process,
                pid: death.pid,
                exit: death.exit,
            },
        };
        self.live_again_or_die(id, cause);
    }

    /// The lease is over without news of the process: it was ended in order.
    pub(super) fn actor_lease_ended(&mut self, id: ActorId, lease: LeaseId) {
        let Some(actor) = self.actors.actors.get(&id).filter(|actor| actor.lease() == Some(lease)) else { return };
        let by = actor.terminating.clone().unwrap_or_else(|| "its node".into());
        self.live_again_or_die(id, Error::ActorEnded { by });
    }

    pub(super) fn actors_lost_with(&mut self, node: NodeId, why: &str) {
        let lost: Vec<(ActorId, String)> = self
            .actors
            .actors
            .iter()
            .filter(|(_, actor)| actor.node() == Some(node))
            .map(|(id, actor)| (*id, actor.spec.class_name.clone()))
            .collect();
        for (id, class) in lost {
            let error = Error::NodeDied { what: format!("actor {class}"), node, why: why.to_owned() };
            self.live_again_or_die(id, error);
        }
    }

    fn live_again_or_die(&mut self, id: ActorId, cause: Error) {
        let Some(actor) = self.actors.actors.get_mut(&id) else { return };
        if matches!(actor.phase, Phase::Dead(_)) {
            return;
        }
        if actor.terminating.is_some() || actor.restarts_left == 0 {
            return self.bury_actor(id, cause);
        }
        if actor.restarts_left != u32::MAX {
            actor.restarts_left -= 1;
        }
        actor.quick = if self.now < actor.placed_at + QUICK_MS { actor.quick + 1 } else { 0 };
        if let Some(doublings) = actor.quick.checked_sub(2) {
            actor.not_before = self.now + (PAUSE_MS << doublings.min(10)).min(PAUSE_LIMIT_MS);
        }
        actor.incarnation.0 += 1;
        actor.phase = Phase::Pending { after: Some(cause) };
        self.actors.pending.insert(id);
        self.announce_actor(id);
        self.refuse_if_infeasible(id);
    }

    fn bury_actor(&mut self, id: ActorId, cause: Error) {
        let Some(actor) = self.actors.actors.get_mut(&id) else { return };
        actor.phase = Phase::Dead(cause);
        // Up to a hundred KiB each, and never needed again.
        actor.spec.args = Vec::new();
        let (name, job) = (actor.spec.name.clone(), actor.spec.job);
        self.actors.pending.remove(&id);
        if let Some(name) = name
            && self.actors.names.get(&name) == Some(&id)
        {
            self.actors.names.remove(&name);
        }
        self.announce_actor(id);
        if let Some(actor) = self.actors.actors.get_mut(&id) {
            actor.watchers.clear();
        }
        self.actors.dead.push_back(id);
        if self.actors.dead.len() > TOMBSTONES
            && let Some(oldest) = self.actors.dead.pop_front()
        {
            self.actors.actors.remove(&oldest);
        }
        // A job that is over was kept for its detached actors alone.
        let over = self.jobs.get(&job).is_some_and(|spec| !self.connected.contains(&spec.driver.process));
        if over && !self.actors.has_of_job(job) {
            self.jobs.remove(&job);
        }
    }

    fn announce_actor(&mut self, id: ActorId) {
        let Some(actor) = self.actors.actors.get(&id) else { return };
        let (state, watchers) = (actor.shown(), actor.watchers.clone());
        for watcher in watchers {
            self.tell(watcher, HeadEvent::Actor { actor: id, state: state.clone() });
        }
    }

    pub(super) fn watch(&mut self, process: ProcessId, id: ActorId) {
        let state = match self.actors.actors.get_mut(&id) {
            Some(actor) => {
                if !matches!(actor.phase, Phase::Dead(_)) {
                    actor.watchers.insert(process);
                }
                actor.shown()
            }
            None => ActorState::Dead {
                cause: Box::new(Error::ActorEnded { by: "something this head does not know of".into() }),
            },
        };
        self.tell(process, HeadEvent::Actor { actor: id, state });
    }

    pub(super) fn kill_actor(&mut self, id: ActorId, may_restart: bool) {
        let Some(actor) = self.actors.actors.get_mut(&id) else { return };
        let lease = actor.lease();
        let cause = Error::ActorEnded { by: "kill".into() };
        if may_restart {
            self.live_again_or_die(id, cause);
        } else if !matches!(actor.phase, Phase::Dead(_)) {
            self.bury_actor(id, cause);
        }
        if let Some(lease) = lease {
            self.end_lease(lease, Some("its actor was killed".into()));
        }
    }

    pub(super) fn terminate_actor(&mut self, id: ActorId, by: String) {
        let Some(actor) = self.actors.actors.get_mut(&id) else {
            if self.actors.never.insert(id, by).is_none() {
                self.actors.never_order.push_back(id);
            }
            if self.actors.never_order.len() > TOMBSTONES
                && let Some(oldest) = self.actors.never_order.pop_front()
            {
                self.actors.never.remove(&oldest);
            }
            return;
        };
        match &actor.phase {
            Phase::Dead(_) => {}
            // Nobody waits for a call, or it would not be unheld.
            Phase::Pending { .. } => self.bury_actor(id, Error::ActorEnded { by }),
            Phase::Starting { .. } => actor.terminating = Some(by),
            Phase::Alive { lease, node, .. } => {
                let (lease, node) = (*lease, *node);
                actor.terminating = Some(by.clone());
                self.order(node, NodeMessage::DrainActor { lease, by });
            }
        }
    }

    /// The creator of these actors is gone.
    pub(super) fn actors_orphaned_by(&mut self, process: ProcessId) {
        let cause = |spec: &ActorSpec| Error::OwnerDied { object: spec.handle, owner: process };
        self.end_actors(|spec| spec.owner.process == process && !spec.detached, cause);
    }

    pub(super) fn actors_of_job_end(&mut self, job: JobId) {
        self.end_actors(
            |spec| spec.job == job && !spec.detached,
            |_| Error::ActorEnded { by: "the end of its job".into() },
        );
    }

    fn end_actors(&mut self, which: impl Fn(&ActorSpec) -> bool, cause: impl Fn(&ActorSpec) -> Error) {
        let ended: Vec<(ActorId, Error, Option<LeaseId>)> = self
            .actors
            .actors
            .iter()
            .filter(|(_, actor)| !matches!(actor.phase, Phase::Dead(_)) && which(&actor.spec))
            .map(|(id, actor)| (*id, cause(&actor.spec), actor.lease()))
            .collect();
        for (id, cause, lease) in ended {
            self.bury_actor(id, cause);
            if let Some(lease) = lease {
                self.end_lease(lease, Some("its actor's creator is gone".into()));
            }
        }
    }
}
