//! How actors are made, placed, started again and ended.

use std::collections::BTreeSet;
use std::collections::btree_map::Entry;
use std::sync::Arc;

use wingbeat_core::error::Error;
use wingbeat_core::spec::{ActorInfo, ActorSpec, ActorState, Address, ScopedName, Shape, Strategy};
use wingbeat_core::{ActorId, Incarnation, JobId, LeaseId, NodeId, PlacementGroupId, ProcessId};
use wingbeat_net::messages::{HeadEvent, LeaseHolder, NodeMessage, WorkerDeath};

use super::*;
use crate::state::State;
use crate::state::facts::Fact;
use crate::state::lease::Holder;
use crate::state::placing::Attempt;
use crate::state::queue::{Class, Waiter};
use crate::state::unfit::GIVE_UP_AFTER;

/// Why a lease ends whose actor has a later life.
const LATER_LIFE: &str = "a later life of its actor is known";

impl State {
    /// Whether this would be a new actor.
    pub fn is_new_actor(&self, spec: &ActorSpec) -> bool {
        let may_be_back = self.recovering.as_ref().is_some_and(|recovering| recovering.may_be_back(spec.id));
        !may_be_back
            && self.actors.spec(spec.id).is_none()
            && spec.name.as_ref().is_none_or(|name| self.actor_named(name).is_none())
    }

    /// The actor of this name, also one that may still come back after the head was started again.
    fn actor_named(&self, name: &ScopedName) -> Option<&ActorSpec> {
        let known = self.actors.names.get(name).and_then(|id| self.actors.actors.get(id)).map(|actor| &*actor.spec);
        known.or_else(|| self.recovering.as_ref()?.actor_named(name))
    }

    /// The actor of this name, for a process of this job.
    ///
    /// # Errors
    /// [`Error::ActorNotFound`].
    pub fn find_actor(&self, name: &ScopedName, asks: JobId) -> Result<ActorInfo, Error> {
        self.actor_named(name)
            .map(|spec| info(spec, self.are_of_two_builds(spec.job, asks)))
            .ok_or_else(|| Error::ActorNotFound { name: name.name.clone(), namespace: name.namespace.clone() })
    }

    pub(in crate::state) fn new_actor(&mut self, spec: ActorSpec, or_get: bool) -> Result<ActorInfo, Error> {
        if let Some(known) = self.actors.actors.get(&spec.id) {
            return Ok(info(&known.spec, false));
        }
        // It was asked for before the head was started again.
        if self.recovering.as_ref().is_some_and(|recovering| recovering.may_be_back(spec.id)) {
            return Ok(info(&spec, false));
        }
        spec.placement.check().map_err(|why| Error::InvalidArgument {
            what: format!("actor {} asks for what cannot be: {why}", spec.class_name),
        })?;
        if !self.is_job_running(spec.job) {
            let why = format!("actor {} is of {}, which is over", spec.class_name, spec.job);
            return Err(Error::Refused { who: "the head".into(), why });
        }
        if let Some(name) = &spec.name
            && let Some(existing) = self.actor_named(name)
        {
            let name = name.clone();
            if !or_get {
                return Err(Error::ActorNameTaken { name: name.name, namespace: name.namespace });
            }
            if existing.class != spec.class {
                let what =
                    format!("the actor named `{}` is a {}, not a {}", name.name, existing.class_name, spec.class_name);
                return Err(Error::InvalidArgument { what });
            }
            return Ok(info(existing, self.are_of_two_builds(existing.job, spec.job)));
        }
        let (id, answer) = (spec.id, info(&spec, false));
        self.insert_actor(spec, Incarnation(0), 0, None);
        match self.is_to_end(id) {
            Some(end) => self.bury_actor(id, Error::ActorEnded { by: end.by() }),
            None => self.refuse_actor_if_infeasible(id),
        }
        Ok(answer)
    }

    pub(in crate::state) fn insert_actor(
        &mut self,
        spec: ActorSpec,
        incarnation: Incarnation,
        moves: u32,
        after: Option<Error>,
    ) {
        let (id, job) = (spec.id, spec.job);
        if let Some(name) = &spec.name {
            self.actors.names.insert(name.clone(), id);
        }
        let mut watchers = BTreeSet::new();
        if !spec.detached {
            // It ends with whoever made it, who says what it was to a head that is started again.
            let maker = spec.owner.process;
            self.actors.by_owner.entry(maker).or_default().insert(id);
            self.actors.watched_by.entry(maker).or_default().insert(id);
            watchers.insert(maker);
        }
        self.actors.by_job.entry(job).or_default().insert(id);
        self.job_holds(job, 1);
        if spec.detached {
            self.job_detached(job, 1);
        }
        let actor = Actor {
            moves,
            spec: Arc::new(spec),
            shape: None,
            phase: Phase::Pending { after },
            since: self.now,
            incarnation,
            failures: 0,
            without_arguments: 0,
            placed_at: 0,
            quick: 0,
            not_before: 0,
            earlier: None,
            terminating: None,
            watchers,
        };
        self.actors.actors.insert(id, actor);
        self.record_actor(id);
        self.wait_for_place(id);
    }

    /// A life that a node has served already. Whether it is the actor's present one.
    pub(in crate::state) fn adopt_actor(
        &mut self,
        (spec, incarnation, moves): (&Arc<ActorSpec>, Incarnation, u32),
        lease: LeaseId,
        node: NodeId,
        worker: Option<(Address, u32)>,
        started: bool,
    ) -> bool {
        let id = spec.id;
        let mut earlier = None;
        match self.actors.actors.get(&id) {
            Some(known) if Some(incarnation) <= known.latest_life() || matches!(known.phase, Phase::Dead(_)) => {
                return false;
            }
            // A node that was away when that ended has brought it back; or the next life was to begin elsewhere.
            Some(known) => earlier = known.lease(),
            None if spec.name.as_ref().is_some_and(|name| self.actors.names.contains_key(name)) => return false,
            None => self.insert_actor((**spec).clone(), incarnation, moves, None),
        }
        self.waits_no_more(id);
        let now = self.now;
        if let Some(actor) = self.actors.actors.get_mut(&id) {
            actor.incarnation = incarnation;
            actor.moves = moves;
            actor.placed_at = now;
            actor.phase = match worker {
                Some((address, pid)) if started => Phase::Alive { lease, node, address, pid },
                process => Phase::Starting { lease, node, process },
            };
        }
        if let Some(earlier) = earlier {
            self.end_lease(earlier, Some(LATER_LIFE.into()));
        }
        self.record_actor(id);
        self.announce_actor(id);
        true
    }

    /// Named and detached actors are found again after the head was started again.
    fn record_actor(&mut self, id: ActorId) {
        let Some(actor) = self.actors.actors.get(&id) else { return };
        if actor.spec.is_kept() {
            let fact = actor.fact();
            self.record(fact);
        }
    }

    /// A pending actor queues for its place, at once or when it has rested.
    fn wait_for_place(&mut self, id: ActorId) {
        let Some(actor) = self.actors.actors.get(&id) else { return };
        if !matches!(actor.phase, Phase::Pending { .. }) || actor.earlier.is_some() {
            return;
        }
        if self.now < actor.not_before {
            self.actors.resting.insert((actor.not_before, id));
            return;
        }
        let (shape, job) = (Self::placement_of(&actor.spec), actor.spec.job);
        let shape = match actor.shape {
            Some(shape) => shape,
            None => self.shapes.add(shape, &mut self.nodes),
        };
        let turn = self.next_turn();
        let standing = self.standing(Some(job), 0, turn);
        if let Some(actor) = self.actors.actors.get_mut(&id) {
            actor.shape = Some(shape);
        }
        self.queue.put(Waiter::Actor(id), standing, self.shapes.class_of(shape, standing.job), self.now);
    }

    /// It waits for no place any more.
    fn waits_no_more(&mut self, id: ActorId) {
        self.queue.remove(Waiter::Actor(id));
        self.end_reservation(Waiter::Actor(id));
        let Some(actor) = self.actors.actors.get_mut(&id) else { return };
        self.actors.resting.remove(&(actor.not_before, id));
        if let Some(shape) = actor.shape.take() {
            self.shapes.remove(shape, &mut self.nodes);
        }
    }

    /// A life is told to end, wherever it is: the next one, if it has not begun, begins when that has. Until then there might be two.
    pub(in crate::state) fn next_life_waits_for(&mut self, id: ActorId, lease: Option<LeaseId>) {
        let Some(lease) = lease.filter(|lease| self.leases.leases.contains_key(lease)) else { return };
        let actor = self.actors.actors.get_mut(&id).filter(|actor| matches!(actor.phase, Phase::Pending { .. }));
        if let Some(actor) = actor {
            actor.earlier = Some(lease);
            self.waits_no_more(id);
        }
    }

    /// The process of a lease is gone: the next life of its actor may begin.
    pub(in crate::state) fn earlier_life_over(&mut self, id: ActorId, lease: LeaseId) {
        let Some(actor) = self.actors.actors.get_mut(&id).filter(|actor| actor.earlier == Some(lease)) else { return };
        actor.earlier = None;
        self.wait_for_place(id);
        self.refuse_actor_if_infeasible(id);
    }

    /// Those that have rested queue for their places.
    pub(in crate::state) fn wake_the_rested(&mut self) {
        while let Some((until, id)) = self.actors.resting.first().copied().filter(|(until, _)| *until <= self.now) {
            self.actors.resting.remove(&(until, id));
            self.wait_for_place(id);
            // While it rested, it was in no queue in which somebody would have seen that its place is gone.
            self.refuse_actor_if_infeasible(id);
        }
    }

    /// What a node must have room for: to be placed, and to live. One that holds something for life goes where the least is
    /// left over. One that holds nothing leaves no mark on a node's room: all of them would pile up on one node.
    pub(in crate::state) fn placement_of(spec: &ActorSpec) -> Shape {
        let mut shape = spec.placement.clone();
        if shape.strategy == Strategy::Default {
            shape.strategy = if spec.holds.is_empty() { Strategy::Spread } else { Strategy::BestFit };
        }
        for (name, amount) in spec.holds.iter() {
            if shape.resources.get(name) < amount {
                shape.resources.set(name, amount);
            }
        }
        shape
    }

    pub(in crate::state) fn refuse_actor_if_infeasible(&mut self, id: ActorId) {
        let Some(actor) = self.actors.actors.get(&id) else { return };
        let Some(shape) = actor.shape else { return };
        let what = format!("actor {}", actor.spec.class_name);
        // It has lived: what was possible then may be again.
        let since = if actor.incarnation.0 > 0 { 0 } else { self.job_began(Some(actor.spec.job)) };
        let error = self.shape_infeasible(shape, what, since).or_else(|| self.quota_error(Waiter::Actor(id)));
        if let Some(error) = error {
            self.bury_actor(id, error);
        }
    }

    pub(in crate::state) fn try_actor(&mut self, id: ActorId) -> Attempt {
        let waiter = Waiter::Actor(id);
        let found = self.actors.actors.get(&id).and_then(|actor| Some((actor, actor.shape?)));
        let Some((actor, shape)) = found else {
            self.queue.remove(waiter);
            return Attempt::Done;
        };
        let (spec, incarnation, moves) = (actor.spec.clone(), actor.incarnation, actor.moves);
        let taken = match self.take_place(waiter, shape, &spec.holds, spec.placement.gpu_memory, spec.job) {
            Ok(taken) => taken,
            Err(attempt) => return attempt,
        };
        self.waits_no_more(id);
        let node = taken.node;
        let lease = self.new_lease(taken, Holder::Actor(id), spec.job, LeaseHolder::Actor(spec, incarnation, moves));
        let now = self.now;
        if let Some(actor) = self.actors.actors.get_mut(&id) {
            actor.phase = Phase::Starting { lease, node, process: None };
            actor.since = now;
            actor.placed_at = now;
        }
        Attempt::Done
    }

    pub(in crate::state) fn actor_has_process(&mut self, id: ActorId, ready: LeaseId, address: Address, pid: u32) {
        let Some(actor) = self.actors.actors.get_mut(&id) else { return };
        if let Phase::Starting { lease, process, .. } = &mut actor.phase
            && *lease == ready
        {
            *process = Some((address, pid));
            self.record_actor(id);
        }
    }

    pub(in crate::state) fn actor_started(
        &mut self,
        id: ActorId,
        incarnation: Incarnation,
        outcome: Result<(), Error>,
    ) {
        let Some(actor) = self.actors.actors.get_mut(&id) else { return };
        if actor.incarnation != incarnation {
            return;
        }
        let Phase::Starting { lease, node, process: Some((address, pid)) } = &actor.phase else { return };
        let (lease, node) = (*lease, *node);
        match outcome {
            Ok(()) => {
                (actor.failures, actor.without_arguments) = (0, 0);
                actor.phase = Phase::Alive { lease, node, address: address.clone(), pid: *pid };
                actor.since = self.now;
                let (draining, job) = (actor.terminating.clone(), actor.spec.job);
                self.starts_on(node, job);
                self.announce_actor(id);
                if let Some(by) = draining {
                    self.order(node, NodeMessage::DrainActor { lease, by });
                }
            }
            // Its arguments could not be had, there or then. Of those that are refs, the error may be their own: then each life would end so.
            Err(
                error @ (Error::StoreFull { .. }
                | Error::ObjectUnavailable { .. }
                | Error::OutOfDescriptors { .. }
                | Error::ContactLost { .. }),
            ) if actor.without_arguments + 1 < ARGUMENTS_TRIED => {
                actor.without_arguments += 1;
                self.live_again_or_die(id, error);
                self.next_life_waits_for(id, Some(lease));
                self.end_lease(lease, Some("the arguments of the actor's constructor could not be had".into()));
            }
            Err(error) => {
                self.bury_actor(id, error);
                self.end_lease(lease, Some("the actor's constructor failed".into()));
            }
        }
    }

    /// The node could not start a process for it, or the process was gone before the constructor began.
    pub(in crate::state) fn actor_failed_to_start(
        &mut self,
        id: ActorId,
        failed: LeaseId,
        not_on: Option<NodeId>,
        error: Error,
    ) {
        let Some(actor) = self.actors.actors.get_mut(&id) else { return };
        // The lease may be that of a life that was ended before.
        if actor.lease() != Some(failed) {
            return;
        }
        let was_under_way = not_on.is_some_and(|node| self.was_under_way(node, Waiter::Actor(id)));
        let Some(actor) = self.actors.actors.get_mut(&id) else { return };
        actor.failures += u32::from(!was_under_way);
        let seen = actor.failures;
        if let Some(by) = actor.terminating.clone() {
            return self.bury_actor(id, Error::ActorEnded { by });
        }
        let is_tried_again = match not_on {
            Some(_) if was_under_way => true,
            Some(node) => self.start_failed(node, Waiter::Actor(id), seen, &error),
            None => seen < GIVE_UP_AFTER,
        };
        if !is_tried_again {
            return self.bury_actor(id, error);
        }
        let Some(actor) = self.actors.actors.get_mut(&id) else { return };
        actor.phase = Phase::Pending { after: (actor.incarnation.0 > 0).then_some(error) };
        actor.since = self.now;
        self.wait_for_place(id);
        self.refuse_actor_if_infeasible(id);
    }

    pub(in crate::state) fn actor_process_died(&mut self, id: ActorId, lease: LeaseId, death: WorkerDeath) {
        self.earlier_life_over(id, lease);
        let Some(actor) = self.actors.actors.get(&id).filter(|actor| actor.lease() == Some(lease)) else { return };
        let has_begun = (death.started > 0 && !death.is_moved) || matches!(actor.phase, Phase::Alive { .. });
        let cause = match &actor.terminating {
            Some(by) => Error::ActorEnded { by: by.clone() },
            None => death.exit.into_error(format!("actor {}", actor.spec.class_name), death.process, death.pid),
        };
        if has_begun {
            self.live_again_or_die(id, cause);
        } else {
            // It was given to a process that was dying already, or that died of something else than of this actor.
            self.actor_failed_to_start(id, lease, None, cause);
        }
    }

    /// The lease is over without news of the process: it was ended in order.
    pub(in crate::state) fn actor_lease_ended(&mut self, id: ActorId, lease: LeaseId) {
        let Some(actor) = self.actors.actors.get(&id).filter(|actor| actor.lease() == Some(lease)) else { return };
        let by = actor.terminating.clone().unwrap_or_else(|| "its node".into());
        self.live_again_or_die(id, Error::ActorEnded { by });
    }

    /// Leases on a node that is gone were of these actors.
    pub(in crate::state) fn actors_lost_with(&mut self, leases: &[(LeaseId, ActorId)], node: NodeId, why: &str) {
        for (lease, id) in leases {
            let Some(actor) = self.actors.actors.get(id).filter(|actor| actor.lease() == Some(*lease)) else {
                continue;
            };
            let what = format!("actor {}", actor.spec.class_name);
            self.live_again_or_die(*id, Error::NodeDied { what, node, why: why.to_owned(), attempts: 1 });
        }
    }

    /// Actors of a placement group that is gone.
    pub(in crate::state) fn actors_of_group_end(&mut self, group: PlacementGroupId, gone: impl Fn(String) -> Error) {
        let inside = |spec: &ActorSpec| spec.placement.bundle().is_some_and(|(of, _)| of == group);
        let leases = self.groups.nodes_of(group);
        let on_nodes = leases.iter().filter_map(|node| self.nodes.get(*node)).flat_map(|node| node.leases.iter());
        let alive = on_nodes.filter_map(|lease| match self.leases.leases.get(lease)?.holder {
            Holder::Actor(actor) => Some(actor),
            Holder::Tasks(_) | Holder::Nobody => None,
        });
        let waiting =
            self.shapes.in_group(group).into_iter().flat_map(|shape| self.queue.for_all(Class::InGroup(shape, None)));
        let waiting = waiting.filter_map(|waiter| match waiter {
            Waiter::Actor(actor) => Some(actor),
            _ => None,
        });
        let resting = self.actors.resting.iter().map(|(_, id)| *id);
        let ended: BTreeSet<ActorId> = alive.chain(waiting).chain(resting).collect();
        for id in ended {
            let Some(spec) = self.actors.spec(id).filter(|spec| inside(spec)) else { continue };
            let cause = gone(format!("actor {}", spec.class_name));
            let is_dead = self.actors.actors.get(&id).is_none_or(|actor| matches!(actor.phase, Phase::Dead(_)));
            if !is_dead {
                self.bury_actor(id, cause);
            }
        }
    }

    fn live_again_or_die(&mut self, id: ActorId, cause: Error) {
        let Some(actor) = self.actors.actors.get_mut(&id) else { return };
        if matches!(actor.phase, Phase::Dead(_)) {
            return;
        }
        if actor.terminating.is_some() || actor.restarts_left() == 0 {
            return self.bury_actor(id, cause);
        }
        // One that is killed while it rests or queues does so under another rank from now on.
        self.waits_no_more(id);
        let Some(actor) = self.actors.actors.get_mut(&id) else { return };
        actor.quick = if self.now < actor.placed_at + QUICK_MS { actor.quick + 1 } else { 0 };
        if let Some(doublings) = actor.quick.checked_sub(2) {
            actor.not_before = self.now + (PAUSE_MS << doublings.min(10)).min(PAUSE_LIMIT_MS);
        }
        actor.incarnation = Incarnation(actor.incarnation.0.saturating_add(1));
        actor.phase = Phase::Pending { after: Some(cause) };
        actor.since = self.now;
        self.record_actor(id);
        self.announce_actor(id);
        self.wait_for_place(id);
        self.refuse_actor_if_infeasible(id);
    }

    /// A later life than the known one has begun, and is over.
    pub(in crate::state) fn later_life_ended(&mut self, id: ActorId, life: Incarnation, moves: u32, cause: Error) {
        let Some(actor) = self.actors.actors.get_mut(&id).filter(|actor| !matches!(actor.phase, Phase::Dead(_))) else {
            return;
        };
        let earlier = actor.lease();
        (actor.incarnation, actor.moves) = (life, moves);
        self.live_again_or_die(id, cause);
        self.next_life_waits_for(id, earlier);
        if let Some(earlier) = earlier {
            self.end_lease(earlier, Some(LATER_LIFE.into()));
        }
    }

    /// Forgets what is known of an actor whose present life may be elsewhere, and ends the earlier one that is here. Answers with who
    /// wants to know what becomes of it, and what is left of it; with none if it is dead.
    pub(in crate::state) fn unknow_actor(&mut self, id: ActorId) -> Option<(BTreeSet<ProcessId>, Left)> {
        if matches!(self.actors.actors.get(&id)?.phase, Phase::Dead(_)) {
            return None;
        }
        self.waits_no_more(id);
        let watchers = self.unlist_actor(id);
        let actor = self.actors.actors.remove(&id)?;
        if actor.spec.detached {
            self.job_detached(actor.spec.job, -1);
        }
        self.job_holds(actor.spec.job, -1);
        let lease = actor.lease();
        if let Some(earlier) = lease {
            self.end_lease(earlier, Some(LATER_LIFE.into()));
        }
        Some((watchers, Left { ends: actor.terminating, earlier: lease.or(actor.earlier) }))
    }

    /// Takes an actor out of all lists of those that live. Answers with who wanted to know what becomes of it.
    fn unlist_actor(&mut self, id: ActorId) -> BTreeSet<ProcessId> {
        let Some(actor) = self.actors.actors.get_mut(&id) else { return BTreeSet::new() };
        let (spec, watchers) = (actor.spec.clone(), std::mem::take(&mut actor.watchers));
        if let Some(name) = &spec.name
            && self.actors.names.get(name) == Some(&id)
        {
            self.actors.names.remove(name);
        }
        for watcher in &watchers {
            remove_from(&mut self.actors.watched_by, *watcher, id);
        }
        remove_from(&mut self.actors.by_owner, spec.owner.process, id);
        remove_from(&mut self.actors.by_job, spec.job, id);
        watchers
    }

    pub(in crate::state) fn bury_actor(&mut self, id: ActorId, cause: Error) {
        self.waits_no_more(id);
        let Some(actor) = self.actors.actors.get_mut(&id) else { return };
        actor.phase = Phase::Dead(cause);
        actor.since = self.now;
        // Up to a hundred KiB each, and never needed again.
        Arc::make_mut(&mut actor.spec).args = Vec::new();
        let spec = actor.spec.clone();
        self.announce_actor(id);
        self.unlist_actor(id);
        self.actors.dead.push_back(id);
        if self.actors.dead.len() > TOMBSTONES
            && let Some(oldest) = self.actors.dead.pop_front()
        {
            self.actors.actors.remove(&oldest);
        }
        if spec.is_kept() {
            self.record(Fact::ActorGone(id));
        }
        if spec.detached {
            self.job_detached(spec.job, -1);
        }
        self.job_holds(spec.job, -1);
    }

    fn announce_actor(&mut self, id: ActorId) {
        let Some(actor) = self.actors.actors.get(&id) else { return };
        let (state, watchers) = (actor.shown(&self.nodes), actor.watchers.clone());
        for watcher in watchers {
            self.tell(watcher, HeadEvent::Actor { actor: id, state: state.clone() });
        }
    }

    pub(in crate::state) fn watch(&mut self, process: ProcessId, id: ActorId) {
        if let Some(unheard) = self.unheard.as_mut().filter(|_| !self.actors.knows(id)) {
            // Nothing is said before its node, and whoever made it, had time to come back.
            return unheard.watch(process, id);
        }
        let state = match self.actors.actors.get_mut(&id) {
            Some(actor) => {
                if !matches!(actor.phase, Phase::Dead(_)) {
                    actor.watchers.insert(process);
                    self.actors.watched_by.entry(process).or_default().insert(id);
                }
                actor.shown(&self.nodes)
            }
            None => ActorState::Dead {
                cause: Box::new(Error::ActorEnded { by: "something this head does not know of".into() }),
            },
        };
        self.tell(process, HeadEvent::Actor { actor: id, state });
    }

    pub(in crate::state) fn kill_actor(&mut self, id: ActorId, may_restart: bool) {
        if !may_restart {
            self.end_absent_actor(id, Error::ActorEnded { by: "kill".into() });
        }
        if !may_restart && self.unheard.is_some() && !self.actors.actors.contains_key(&id) {
            self.never_begins(id, ToEnd::Kill);
        }
        let Some(actor) = self.actors.actors.get_mut(&id) else {
            if may_restart {
                self.unheard_is_killed(id);
            }
            return;
        };
        let lease = actor.lease();
        let cause = Error::ActorEnded { by: "kill".into() };
        if may_restart {
            self.live_again_or_die(id, cause);
            self.next_life_waits_for(id, lease);
        } else if !matches!(actor.phase, Phase::Dead(_)) {
            self.bury_actor(id, cause);
        }
        if let Some(lease) = lease {
            self.end_lease(lease, Some("its actor was killed".into()));
        }
    }

    pub(in crate::state) fn terminate_actor(&mut self, id: ActorId, by: String) {
        // One that may be back finishes first what it was sent, as it does else.
        let Some(actor) = self.actors.actors.get_mut(&id) else {
            if !self.absent_actor_ends(id, &by) {
                self.never_begins(id, ToEnd::Terminate(by));
            }
            return;
        };
        match &actor.phase {
            Phase::Dead(_) => {}
            // Nobody waits for a call, or it would not be unheld.
            Phase::Pending { .. } => self.bury_actor(id, Error::ActorEnded { by }),
            Phase::Starting { .. } => {
                actor.terminating = Some(by);
                self.record_actor(id);
            }
            Phase::Alive { lease, node, .. } => {
                let (lease, node) = (*lease, *node);
                actor.terminating = Some(by.clone());
                self.record_actor(id);
                self.order(node, NodeMessage::DrainActor { lease, by });
            }
        }
    }

    /// An actor of which nothing is known is to end when it is made, or comes back.
    fn never_begins(&mut self, id: ActorId, end: ToEnd) {
        match self.actors.never.entry(id) {
            Entry::Vacant(entry) => {
                entry.insert(end);
                self.actors.never_order.push_back(id);
            }
            // Whoever was killed does not finish what it does.
            Entry::Occupied(mut entry) if matches!(end, ToEnd::Kill) => drop(entry.insert(end)),
            Entry::Occupied(_) => {}
        }
        if self.actors.never_order.len() > TOMBSTONES
            && let Some(oldest) = self.actors.never_order.pop_front()
        {
            self.actors.never.remove(&oldest);
        }
    }

    /// How an actor is to end as soon as it is known, if somebody has said so.
    pub(in crate::state) fn is_to_end(&mut self, id: ActorId) -> Option<ToEnd> {
        let end = self.actors.never.remove(&id)?;
        self.actors.never_order.retain(|other| *other != id);
        Some(end)
    }

    /// The creator of these actors is gone.
    pub(in crate::state) fn actors_orphaned_by(&mut self, process: ProcessId) {
        let orphans = self.actors.by_owner.get(&process).cloned().unwrap_or_default();
        self.end_actors(orphans, &format!("the end of its creator, {process}"), "its actor's creator is gone");
    }

    pub(in crate::state) fn actors_of_job_end(&mut self, job: JobId) {
        let mut mine = self.actors.by_job.get(&job).cloned().unwrap_or_default();
        mine.retain(|id| self.actors.spec(*id).is_some_and(|spec| !spec.detached));
        self.end_actors(mine, "the end of its job", "its actor's job has ended");
    }

    /// Ends these actors by something, and their leases for that reason.
    fn end_actors(&mut self, which: BTreeSet<ActorId>, by: &str, why: &str) {
        for id in which {
            let Some(actor) = self.actors.actors.get(&id) else { continue };
            let lease = actor.lease();
            self.bury_actor(id, Error::ActorEnded { by: by.to_owned() });
            if let Some(lease) = lease {
                self.end_lease(lease, Some(why.to_owned()));
            }
        }
    }

    /// A node that is drained gives its actors to others. A life that ends so costs none.
    pub(in crate::state) fn move_actor(&mut self, id: ActorId, lease: LeaseId, why: &str) {
        let Some(actor) = self.actors.actors.get_mut(&id).filter(|actor| actor.lease() == Some(lease)) else { return };
        if actor.restarts_left() > 0 && actor.terminating.is_none() {
            actor.moves += 1;
        }
        self.live_again_or_die(id, Error::ActorEnded { by: format!("the draining of its node ({why})") });
        self.next_life_waits_for(id, Some(lease));
    }
}
