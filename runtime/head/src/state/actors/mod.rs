//! The lives of actors, and their names.
//!
//! ```text
//!   Pending ──placed──▶ Starting ──constructor──▶ Alive ──process ends──▶ Pending (restarts left) or Dead
//! ```

mod lives;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use wingbeat_core::error::Error;
use wingbeat_core::spec::{ActorInfo, ActorSpec, ActorState, Address, ScopedName};
use wingbeat_core::value::StoreNode;
use wingbeat_core::{ActorId, Incarnation, JobId, LeaseId, NodeId, ProcessId};

use super::facts::{Fact, KeptActor};
use super::nodes::Nodes;
use super::shapes::ShapeId;
use super::{Millis, after};

/// Dead actors that are remembered, so that whoever asks late learns the cause.
const TOMBSTONES: usize = 10_000;
/// A life that was shorter than this counts as quick; the first quick one is followed by the next at once.
const QUICK_MS: Millis = 1_000;
/// The pause after the second quick life in a row; it doubles with each further one, up to the limit.
const PAUSE_MS: Millis = 100;
const PAUSE_LIMIT_MS: Millis = 10_000;
/// So many lives in a row that cannot have the constructor's arguments are the last: what an argument has failed with may have
/// come from elsewhere, and then it stays so. Those that are short rest in between, which makes four minutes.
const ARGUMENTS_TRIED: u32 = 30;

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

/// An actor, until it is one of too many dead ones. Most of its many fields say whether, when and after what it lives again.
struct Actor {
    spec: Arc<ActorSpec>,
    /// What it needs to be placed; only while it is pending.
    shape: Option<ShapeId>,
    phase: Phase,
    /// Since when it is in this phase.
    since: Millis,
    incarnation: Incarnation,
    /// How often it was moved, which has cost no restart.
    moves: u32,
    /// Worker processes that could not be started, or were gone before its constructor began, since it lived last.
    failures: u32,
    /// Lives in a row that could not have the constructor's arguments.
    without_arguments: u32,
    /// When it was placed last.
    placed_at: Millis,
    /// Lives in a row that were quick.
    quick: u32,
    /// It rests until then.
    not_before: Millis,
    /// The lease of its last life, while that may not have ended: it has been told to, and the next life waits for it.
    earlier: Option<LeaseId>,
    /// It is to end in order, because of this.
    terminating: Option<String>,
    /// Processes that are told of each change, until they are lost.
    watchers: BTreeSet<ProcessId>,
}

/// All actors, and those of the dead that are remembered.
#[derive(Default)]
pub(super) struct Actors {
    /// Until they are no longer among the remembered dead (`dead`), or their present life may be elsewhere ([`Left`]).
    actors: BTreeMap<ActorId, Actor>,
    /// Those that are not dead, as far as they have a name.
    names: BTreeMap<ScopedName, ActorId>,
    /// Those that rest before their next life, by when they are done.
    resting: BTreeSet<(Millis, ActorId)>,
    /// Those that end with their creator.
    by_owner: BTreeMap<ProcessId, BTreeSet<ActorId>>,
    /// Those that are not dead.
    by_job: BTreeMap<JobId, BTreeSet<ActorId>>,
    /// Which actors a process is told of, until the process is lost or the actor is dead.
    watched_by: BTreeMap<ProcessId, BTreeSet<ActorId>>,
    /// Those that are dead, the longest dead first, as many as [`TOMBSTONES`].
    dead: VecDeque<ActorId>,
    /// Given up before they were asked for: the two words come on different ways. Until they are asked for, as many as
    /// [`TOMBSTONES`].
    never: BTreeMap<ActorId, ToEnd>,
    /// The same actors, the earliest given up first.
    never_order: VecDeque<ActorId>,
}

/// What is left of an actor whose present life may be elsewhere.
pub(super) struct Left {
    /// Why it is to end in order, if it is.
    pub ends: Option<String>,
    /// The lease of a life that was told to end, and may not have ended.
    pub earlier: Option<LeaseId>,
}

/// How an actor is to end as soon as it is known.
pub(super) enum ToEnd {
    /// At once.
    Kill,
    /// In order, because of this.
    Terminate(String),
}

impl ToEnd {
    pub(super) fn by(self) -> String {
        match self {
            ToEnd::Kill => "kill".into(),
            ToEnd::Terminate(by) => by,
        }
    }
}

/// An actor for people.
pub(super) struct Row<'a> {
    pub spec: &'a Arc<ActorSpec>,
    pub state: &'static str,
    pub node: Option<NodeId>,
    pub pid: Option<u32>,
    pub restarts: u32,
}

/// What an actor does, for people.
pub(super) enum Standing<'a> {
    Pending {
        after: Option<&'a Error>,
    },
    Resting {
        until: Millis,
        quick: u32,
        after: Option<&'a Error>,
    },
    /// Its last life has been told to end, and has not said that it has.
    Awaiting {
        earlier: LeaseId,
    },
    Starting {
        node: NodeId,
        lease: LeaseId,
        has_process: bool,
    },
    Alive {
        lease: LeaseId,
    },
    Dead {
        cause: &'a Error,
    },
}

impl Actors {
    /// Processes that have made actors which end with them.
    pub(super) fn makers(&self) -> impl Iterator<Item = &ProcessId> {
        self.by_owner.keys()
    }

    /// Those that end with this process.
    pub(super) fn made_by(&self, process: ProcessId) -> impl Iterator<Item = ActorId> {
        self.by_owner.get(&process).into_iter().flatten().copied()
    }

    /// Which life a known actor is in, or will be.
    pub(super) fn life_of(&self, id: ActorId) -> Option<Incarnation> {
        self.actors.get(&id).map(|actor| actor.incarnation)
    }

    /// How often a known actor was moved.
    pub(super) fn moves_of(&self, id: ActorId) -> u32 {
        self.actors.get(&id).map_or(0, |actor| actor.moves)
    }

    /// The latest life of a known actor, if any has begun.
    pub(super) fn latest_life_of(&self, id: ActorId) -> Option<Incarnation> {
        self.actors.get(&id).and_then(Actor::latest_life)
    }

    pub(super) fn knows(&self, id: ActorId) -> bool {
        self.actors.contains_key(&id)
    }

    /// Whether another has its name.
    pub(super) fn is_taken(&self, spec: &ActorSpec) -> bool {
        spec.name.as_ref().and_then(|name| self.names.get(name)).is_some_and(|other| *other != spec.id)
    }

    pub(super) fn standing(&self, id: ActorId) -> Option<(&Arc<ActorSpec>, Standing<'_>, Millis)> {
        let actor = self.actors.get(&id)?;
        let standing = match (&actor.phase, actor.earlier) {
            (Phase::Pending { .. }, Some(earlier)) => Standing::Awaiting { earlier },
            (Phase::Pending { after }, None) if self.resting.contains(&(actor.not_before, id)) => {
                Standing::Resting { until: actor.not_before, quick: actor.quick, after: after.as_ref() }
            }
            (Phase::Pending { after }, None) => Standing::Pending { after: after.as_ref() },
            (Phase::Starting { lease, node, process }, _) => {
                Standing::Starting { node: *node, lease: *lease, has_process: process.is_some() }
            }
            (Phase::Alive { lease, .. }, _) => Standing::Alive { lease: *lease },
            (Phase::Dead(cause), _) => Standing::Dead { cause },
        };
        Some((&actor.spec, standing, actor.since))
    }

    pub(super) fn unwatch(&mut self, process: ProcessId) {
        for id in self.watched_by.remove(&process).unwrap_or_default() {
            if let Some(actor) = self.actors.get_mut(&id) {
                actor.watchers.remove(&process);
            }
        }
    }

    pub(super) fn spec(&self, id: ActorId) -> Option<&Arc<ActorSpec>> {
        self.actors.get(&id).map(|actor| &actor.spec)
    }

    /// Why the last life of an actor ended that waits for its next.
    pub(super) fn last_end(&self, id: ActorId) -> Option<&Error> {
        match &self.actors.get(&id)?.phase {
            Phase::Pending { after } => after.as_ref(),
            Phase::Starting { .. } | Phase::Alive { .. } | Phase::Dead(_) => None,
        }
    }

    /// The job of every actor that is not dead.
    pub(super) fn jobs_of_living(&self) -> impl Iterator<Item = JobId> {
        self.by_job.iter().flat_map(|(job, actors)| std::iter::repeat_n(*job, actors.len()))
    }

    /// Whether one of a job is about to end in order, and runs still.
    pub(super) fn has_ending(&self, job: JobId) -> bool {
        let mut actors = self.by_job.get(&job).into_iter().flatten().filter_map(|id| self.actors.get(id));
        actors.any(|actor| actor.terminating.is_some() && actor.lease().is_some())
    }

    /// What must be written down of them.
    pub(super) fn durable(&self) -> impl Iterator<Item = Fact> {
        let living = self.by_job.values().flatten().filter_map(|id| self.actors.get(id));
        let kept = living.filter(|actor| actor.spec.is_kept());
        kept.map(Actor::fact)
    }

    /// What a pending actor waits to be placed with.
    pub(super) fn shape_of(&self, id: ActorId) -> Option<ShapeId> {
        self.actors.get(&id)?.shape
    }

    /// When the first that rests is done.
    pub(super) fn rest_ends(&self) -> Option<Millis> {
        self.resting.first().map(|(until, _)| *until)
    }

    /// Arguments that dead actors hold on to.
    #[cfg(test)]
    pub(super) fn arguments_kept(&self) -> usize {
        let dead = self.actors.values().filter(|actor| matches!(actor.phase, Phase::Dead(_)));
        dead.map(|actor| actor.spec.args.len()).sum()
    }

    /// Those that live or are to live and come after this one, by id, or all.
    pub(super) fn rows_after(&self, last: Option<ActorId>) -> impl Iterator<Item = Row<'_>> {
        after(&self.actors, last).filter_map(|(_, actor)| {
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

/// What a process of another, or of the same, build is told of an actor.
fn info(spec: &ActorSpec, is_of_another_build: bool) -> ActorInfo {
    ActorInfo {
        id: spec.id,
        class: spec.class,
        class_name: spec.class_name.clone(),
        handle: spec.handle,
        owner: spec.owner.clone(),
        detached: spec.detached,
        max_task_retries: spec.max_task_retries,
        max_pending_calls: spec.max_pending_calls,
        is_of_another_build,
    }
}

impl Actor {
    /// What is to be written down of it.
    fn fact(&self) -> Fact {
        let (life, moves, ends) = (self.latest_life(), self.moves, self.terminating.clone());
        Fact::Actor(KeptActor { spec: Box::new((*self.spec).clone()), life, moves, ends })
    }

    /// How often it may still be made again after this life.
    fn restarts_left(&self) -> u32 {
        match self.spec.max_restarts {
            u32::MAX => u32::MAX,
            most => most.saturating_sub(self.incarnation.0.saturating_sub(self.moves)),
        }
    }

    /// Its latest life, if any has begun.
    fn latest_life(&self) -> Option<Incarnation> {
        match &self.phase {
            Phase::Alive { .. } | Phase::Starting { process: Some(_), .. } => Some(self.incarnation),
            _ => self.incarnation.0.checked_sub(1).map(Incarnation),
        }
    }

    fn shown(&self, nodes: &Nodes) -> ActorState {
        match &self.phase {
            Phase::Pending { after: Some(cause) } => {
                let life = Incarnation(self.incarnation.0.saturating_sub(1));
                ActorState::Restarting { life, moves: self.moves, cause: Box::new(cause.clone()) }
            }
            Phase::Pending { after: None } | Phase::Starting { .. } => ActorState::Starting,
            Phase::Alive { address, node, .. } => match nodes.get(*node) {
                Some(at) => {
                    let node = StoreNode { node: *node, address: at.info.address.clone() };
                    let (incarnation, moves) = (self.incarnation, self.moves);
                    ActorState::Alive { address: address.clone(), node, incarnation, moves }
                }
                // Its loss is being told.
                None => ActorState::Starting,
            },
            Phase::Dead(cause) => ActorState::Dead { cause: Box::new(cause.clone()) },
        }
    }

    fn lease(&self) -> Option<LeaseId> {
        match &self.phase {
            Phase::Starting { lease, .. } | Phase::Alive { lease, .. } => Some(*lease),
            Phase::Pending { .. } | Phase::Dead(_) => None,
        }
    }
}

/// Takes `value` out of the set under `key`, and the set away when it is empty.
fn remove_from<K: Ord, V: Ord>(sets: &mut BTreeMap<K, BTreeSet<V>>, key: K, value: V) {
    if let Some(set) = sets.get_mut(&key) {
        set.remove(&value);
        if set.is_empty() {
            sets.remove(&key);
        }
    }
}
