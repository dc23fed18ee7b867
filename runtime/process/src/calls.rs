//! Calls on their way to actors: a deterministic state machine without IO.
//!
//! Each actor has one queue in each calling process. Calls leave it in the order of submission: a call
//! whose arguments are not there yet holds back this caller's later ones, and nobody else's.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use wingbeat_core::error::Error;
use wingbeat_core::spec::{ActorState, Address, Arg, TaskSpec};
use wingbeat_core::{ActorId, Incarnation, ProcessId, TaskId};

use crate::name::Name;
use crate::object::Held;

/// Calls in flight to one actor at most; more stay with the caller. Bounds the memory of the actor.
const IN_FLIGHT: usize = 8_192;
/// And bytes of their arguments, unless one call alone has more. Arguments over 100 KiB are in shared memory and do not
/// count; of smaller ones this is more than a network has under way in a round trip.
const IN_FLIGHT_BYTES: usize = 16 << 20;
/// What a call takes beside its arguments, about.
const CALL_BYTES: usize = 256;

/// A call that is not done.
pub(crate) struct Call {
    pub spec: Arc<TaskSpec>,
    pub name: Name,
    /// Whether its arguments are all there.
    pub resolved: bool,
    /// Attempts that the actor's restarts may still cost.
    pub retries: u32,
    /// With so many calls of this process pending, it fails.
    pub limit: Option<u32>,
    pub cancelled: bool,
    /// Arguments and the actor's own handle, held until the call is done.
    pub held: Held,
}

/// What is to be done.
pub(crate) enum Action {
    Push {
        worker: Address,
        actor: ActorId,
        incarnation: Incarnation,
        calls: Vec<Arc<TaskSpec>>,
    },
    Watch(ActorId),
    /// Every call of this process is done: the actor may end.
    Terminate(ActorId),
    Cancel {
        worker: ProcessId,
        task: TaskId,
        force: bool,
    },
    Fail {
        call: Call,
        error: Error,
    },
    /// The call goes on, and its caller does not wait for it any more.
    Answer {
        spec: Arc<TaskSpec>,
        error: Error,
    },
}

enum Phase {
    /// The head has not said anything yet.
    Unknown,
    Alive {
        address: Address,
        incarnation: Incarnation,
    },
    /// Between two lives, or its connection ended and the head has not said why yet.
    Away,
    Dead(Error),
}

struct Target {
    class_name: Arc<str>,
    phase: Phase,
    /// The latest life that ended, so that news which crossed its end is not believed.
    gone: Option<Incarnation>,
    queue: VecDeque<Call>,
    in_flight: VecDeque<Call>,
    /// What [`weight`] says of those.
    in_flight_bytes: usize,
    watching: bool,
    /// It is to end when the calls before this are done; later ones fail.
    ending: bool,
}

/// About what a call takes in the memory of the actor.
fn weight(spec: &TaskSpec) -> usize {
    let bytes = |arg: &Arg| if let Arg::Value(packed) = arg { packed.bytes.0.len() } else { 0 };
    CALL_BYTES + spec.args.iter().map(bytes).sum::<usize>()
}

impl Target {
    /// How many of the queued calls can be sent now.
    fn sendable(&self) -> usize {
        let room = IN_FLIGHT.saturating_sub(self.in_flight.len());
        let mut bytes = self.in_flight_bytes;
        let fits = |call: &&Call| {
            // Whatever its size, one call can be sent when nothing else is.
            let first = bytes == 0;
            bytes += weight(&call.spec);
            call.resolved && (first || bytes <= IN_FLIGHT_BYTES)
        };
        self.queue.iter().take(room).take_while(fits).count()
    }

    fn end_if_done(&self, actor: ActorId, out: &mut Vec<Action>) {
        if self.ending && self.queue.is_empty() && self.in_flight.is_empty() {
            out.push(Action::Terminate(actor));
        }
    }
}

/// The state.
#[derive(Default)]
pub(crate) struct Calls {
    targets: BTreeMap<ActorId, Target>,
    by_worker: BTreeMap<ProcessId, ActorId>,
    session_over: Option<Error>,
}

/// Where a call is; see [`Calls::standing`].
pub(crate) enum CallStanding {
    /// It was not sent yet.
    Queued { before: usize, is_resolved: bool },
    /// It was sent, and has not returned.
    Sent { before: usize },
}

impl Calls {
    /// Where a call that is not done is, with its name and its actor.
    pub(crate) fn standing(&self, id: TaskId) -> Option<(String, ActorId, CallStanding)> {
        self.targets.iter().find_map(|(actor, target)| {
            let at = |calls: &VecDeque<Call>| calls.iter().position(|call| call.spec.id == id);
            if let Some(before) = at(&target.in_flight) {
                return Some((target.in_flight[before].name.to_string(), *actor, CallStanding::Sent { before }));
            }
            let before = at(&target.queue)?;
            let call = &target.queue[before];
            Some((call.name.to_string(), *actor, CallStanding::Queued { before, is_resolved: call.resolved }))
        })
    }

    /// A new call, the last of its caller.
    pub(crate) fn submit(&mut self, actor: ActorId, class_name: &Arc<str>, call: Call, out: &mut Vec<Action>) {
        if let Some(error) = &self.session_over {
            out.push(Action::Fail { call, error: error.clone() });
            return;
        }
        let target = self.targets.entry(actor).or_insert_with(|| Target {
            class_name: class_name.clone(),
            phase: Phase::Unknown,
            gone: None,
            queue: VecDeque::new(),
            in_flight: VecDeque::new(),
            in_flight_bytes: 0,
            watching: false,
            ending: false,
        });
        if target.ending {
            let cause = Box::new(Error::ActorEnded { by: "terminate".into() });
            let error = Error::ActorDied { actor, class: class_name.to_string(), cause };
            out.push(Action::Fail { call, error });
            return;
        }
        if let Some(limit) = call.limit
            && target.queue.len() + target.in_flight.len() >= limit as usize
        {
            let error = Error::TooManyPendingCalls { actor, class: class_name.to_string(), limit };
            out.push(Action::Fail { call, error });
            return;
        }
        if !target.watching {
            target.watching = true;
            out.push(Action::Watch(actor));
        }
        target.queue.push_back(call);
    }

    /// The actor is to end after the calls that this process has made.
    pub(crate) fn terminate(&mut self, actor: ActorId, out: &mut Vec<Action>) {
        match self.targets.get_mut(&actor) {
            None => out.push(Action::Terminate(actor)),
            Some(target) => {
                if !std::mem::replace(&mut target.ending, true) {
                    target.end_if_done(actor, out);
                }
            }
        }
    }

    /// The arguments of a call are all there; `change` puts them in.
    pub(crate) fn resolved(&mut self, actor: ActorId, id: TaskId, change: impl FnOnce(&mut Call)) {
        let call =
            self.targets.get_mut(&actor).and_then(|target| target.queue.iter_mut().find(|call| call.spec.id == id));
        if let Some(call) = call {
            change(call);
            call.resolved = true;
        }
    }

    /// The call fails unrun: one of its arguments did, or it was cancelled.
    pub(crate) fn fail_queued(&mut self, actor: ActorId, id: TaskId, error: Error, out: &mut Vec<Action>) {
        let Some(target) = self.targets.get_mut(&actor) else { return };
        if let Some(at) = target.queue.iter().position(|call| call.spec.id == id)
            && let Some(call) = target.queue.remove(at)
        {
            out.push(Action::Fail { call, error });
        }
    }

    /// Pushes what can be pushed to one actor.
    pub(crate) fn settle(&mut self, actor: ActorId, out: &mut Vec<Action>) {
        let Some(target) = self.targets.get_mut(&actor) else { return };
        match &target.phase {
            Phase::Unknown | Phase::Away => {}
            Phase::Dead(cause) => {
                let cause = cause.clone();
                for call in target.queue.drain(..) {
                    out.push(Action::Fail { call, error: cause.clone() });
                }
            }
            Phase::Alive { address, incarnation } => {
                if target.in_flight.is_empty() {
                    target.in_flight_bytes = 0;
                }
                let count = target.sendable();
                if count == 0 {
                    return target.end_if_done(actor, out);
                }
                let mut calls = Vec::with_capacity(count);
                for call in target.queue.drain(..count) {
                    calls.push(call.spec.clone());
                    target.in_flight_bytes += weight(&call.spec);
                    target.in_flight.push_back(call);
                }
                out.push(Action::Push { worker: address.clone(), actor, incarnation: *incarnation, calls });
            }
        }
        target.end_if_done(actor, out);
    }

    /// A result arrived from `worker`. Answers with the call and its actor, unless nobody waits for it.
    pub(crate) fn finished(&mut self, worker: ProcessId, id: TaskId) -> Option<(ActorId, Call)> {
        let actor = *self.by_worker.get(&worker)?;
        let target = self.targets.get_mut(&actor)?;
        let at = target.in_flight.iter().position(|call| call.spec.id == id)?;
        let call = target.in_flight.remove(at)?;
        target.in_flight_bytes = target.in_flight_bytes.saturating_sub(weight(&call.spec));
        Some((actor, call))
    }

    /// What the head says of an actor.
    pub(crate) fn actor_is(&mut self, actor: ActorId, state: ActorState, out: &mut Vec<Action>) {
        let Some(target) = self.targets.get_mut(&actor) else { return };
        if matches!(target.phase, Phase::Dead(_)) {
            return;
        }
        let class = target.class_name.to_string();
        match state {
            ActorState::Starting => {}
            ActorState::Alive { address, incarnation } => {
                if target.gone.is_some_and(|gone| incarnation <= gone) {
                    return;
                }
                self.by_worker.insert(address.process, actor);
                target.phase = Phase::Alive { address, incarnation };
            }
            ActorState::Restarting { cause } => {
                Self::leave(&mut self.by_worker, target);
                target.phase = Phase::Away;
                // What may be tried again goes first in line, in its old order.
                for mut call in std::mem::take(&mut target.in_flight).into_iter().rev() {
                    if call.retries > 0 && !call.cancelled {
                        call.retries = call.retries.saturating_sub(1);
                        Arc::make_mut(&mut call.spec).attempt += 1;
                        target.queue.push_front(call);
                    } else {
                        let error = match call.cancelled {
                            true => Error::Cancelled { task: call.name.to_string() },
                            false => Error::ActorUnavailable { actor, class: class.clone(), cause: cause.clone() },
                        };
                        out.push(Action::Fail { call, error });
                    }
                }
            }
            ActorState::Dead { cause } => {
                Self::leave(&mut self.by_worker, target);
                let error = Error::ActorDied { actor, class, cause };
                for call in target.in_flight.drain(..).chain(target.queue.drain(..)) {
                    out.push(Action::Fail { call, error: error.clone() });
                }
                target.phase = Phase::Dead(error);
            }
        }
        self.settle(actor, out);
    }

    fn leave(by_worker: &mut BTreeMap<ProcessId, ActorId>, target: &mut Target) {
        if let Phase::Alive { address, incarnation } = &target.phase {
            by_worker.remove(&address.process);
            target.gone = Some(*incarnation);
        }
    }

    /// The connection to a process ended. The head will say why; until then its actor takes no calls.
    pub(crate) fn connection_lost(&mut self, worker: ProcessId) {
        let Some(actor) = self.by_worker.remove(&worker) else { return };
        if let Some(target) = self.targets.get_mut(&actor)
            && let Phase::Alive { incarnation, .. } = &target.phase
        {
            target.gone = Some(*incarnation);
            target.phase = Phase::Away;
        }
    }

    /// The user wants the call not to run; with `force`, its caller has its answer at once. Answers false when it is not
    /// one of ours.
    pub(crate) fn cancel(&mut self, id: TaskId, force: bool, out: &mut Vec<Action>) -> bool {
        for (actor, target) in &mut self.targets {
            if let Some(at) = target.queue.iter().position(|call| call.spec.id == id) {
                if let Some(call) = target.queue.remove(at) {
                    let error = Error::Cancelled { task: call.name.to_string() };
                    out.push(Action::Fail { call, error });
                }
                target.end_if_done(*actor, out);
                return true;
            }
            if let Some(call) = target.in_flight.iter_mut().find(|call| call.spec.id == id) {
                call.cancelled = true;
                if let Phase::Alive { address, .. } = &target.phase {
                    // Never by force, which would end the actor with the state that it has for everybody else.
                    out.push(Action::Cancel { worker: address.process, task: id, force: false });
                }
                if force {
                    let error = Error::Cancelled { task: call.name.to_string() };
                    out.push(Action::Answer { spec: call.spec.clone(), error });
                }
                return true;
            }
        }
        false
    }

    /// Whether the head has said that the actor is dead.
    pub(crate) fn is_dead(&self, actor: ActorId) -> bool {
        self.targets.get(&actor).is_some_and(|target| matches!(target.phase, Phase::Dead(_)))
    }

    /// Calls that `parent` made.
    pub(crate) fn children_of(&self, parent: TaskId) -> Vec<TaskId> {
        self.targets
            .values()
            .flat_map(|target| target.queue.iter().chain(&target.in_flight))
            .filter(|call| call.spec.parent == Some(parent))
            .map(|call| call.spec.id)
            .collect()
    }

    /// Forgets an actor that nobody here holds a handle of.
    pub(crate) fn forget(&mut self, actor: ActorId) {
        let unused =
            self.targets.get(&actor).is_some_and(|target| target.queue.is_empty() && target.in_flight.is_empty());
        if unused && let Some(mut target) = self.targets.remove(&actor) {
            Self::leave(&mut self.by_worker, &mut target);
        }
    }

    /// The session is over.
    pub(crate) fn end(&mut self, error: &Error, out: &mut Vec<Action>) {
        self.session_over = Some(error.clone());
        self.by_worker.clear();
        for (_, mut target) in std::mem::take(&mut self.targets) {
            for call in target.in_flight.drain(..).chain(target.queue.drain(..)) {
                out.push(Action::Fail { call, error: error.clone() });
            }
        }
    }
}

#[cfg(test)]
#[path = "calls_tests.rs"]
mod tests;
