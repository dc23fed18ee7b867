//! Calls on their way to actors: a deterministic state machine without IO.
//!
//! Each actor has one queue in each calling process. Calls leave it in the order of submission: a call
//! whose arguments are not there yet holds back this caller's later ones, and nobody else's.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use wingbeat_core::error::Error;
use wingbeat_core::spec::{ActorState, Address, Arg, Outputs, TaskSpec};
use wingbeat_core::value::StoreNode;
use wingbeat_core::{ActorId, Incarnation, ProcessId, TaskId};
use wingbeat_net::limits::limits;
use wingbeat_net::messages::Weight;

use crate::owner::argument_bytes::ArgumentBytes;
use crate::owner::call_queue::CallQueue;
use crate::owner::dispatch::{CAUSE_LIMIT_MS, too_large};
use crate::owner::name::Name;
use crate::owner::object::Held;
use crate::owner::retrying::one_less;
use crate::owner::wanted::Wanted;

/// Calls in flight to one actor at most; more stay with the caller. Bounds the memory of the actor.
const IN_FLIGHT: usize = 8_192;
/// And so many bytes of arguments, unless one call alone has more: enough for a fast network's round trip.
const IN_FLIGHT_BYTES: usize = 16 << 20;

/// When contact with an actor is lost and the head reports no end of it within this time, the connection broke and the actor
/// lives. More than the time after which the head itself takes a silent machine for lost.
fn contact_limit_ms() -> u64 {
    limits().silence.as_millis() as u64 + CAUSE_LIMIT_MS
}

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
    #[expect(dead_code, reason = "they count until this is dropped")]
    pub bytes: ArgumentBytes,
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
    /// This life is over, which the head may not know.
    Over(ActorId, Incarnation),
    /// It is dead, which the head may not know.
    Kill(ActorId),
    /// Every call of this process is done: the actor may end.
    Terminate(ActorId),
    Cancel {
        worker: ProcessId,
        task: TaskId,
        force: bool,
    },
    /// An attempt that may have stored its outputs there does not count any more.
    Left {
        task: TaskId,
        outputs: Outputs,
        at: StoreNode,
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
    /// The connection to this life ended, and the head has not said why yet.
    Lost {
        address: Address,
        incarnation: Incarnation,
        since_ms: u64,
    },
    /// Between two lives.
    Away,
    Dead(Error),
}

/// What calls that were given up may still store, by the process that they were sent to.
type Leaving = BTreeMap<ProcessId, Vec<(TaskId, Outputs, StoreNode)>>;

/// An actor, from the first call of this process until its handle is freed.
struct Target {
    /// For people.
    class_name: Arc<str>,
    /// Changed by what the head says, by a loss of contact, and by who kills it here. `Dead` is the last.
    phase: Phase,
    /// Where what was sent stores its outputs: the node of the present life, or of the last one.
    node: Option<StoreNode>,
    /// The latest life that ended, so that news which crossed its end is not believed.
    gone: Option<Incarnation>,
    /// It was killed while its life was not known: the next one of which the head says that it is alive may be the one that was meant.
    is_killed: bool,
    /// Calls that were not sent yet.
    queue: CallQueue,
    /// Calls that were sent to the present life, until their results, or its end.
    in_flight: VecDeque<Call>,
    /// What those weigh.
    bytes: usize,
    /// The head was asked to say what becomes of it: from the first call on.
    watching: bool,
    /// It is to end when the calls before this are done; later ones fail.
    ending: bool,
}

impl Target {
    /// Its present life and the process that lives it, as far as they are known.
    fn place(&self) -> Option<(Incarnation, ProcessId)> {
        match &self.phase {
            Phase::Alive { address, incarnation } | Phase::Lost { address, incarnation, .. } => {
                Some((*incarnation, address.process))
            }
            Phase::Unknown | Phase::Away | Phase::Dead(_) => None,
        }
    }

    fn life(&self) -> Option<Incarnation> {
        self.place().map(|(life, _)| life)
    }

    /// Calls in flight that may be tried again go first in line, in their old order; the others fail.
    fn give_up_in_flight(&mut self, actor: ActorId, cause: &Error, leaving: &mut Leaving, out: &mut Vec<Action>) {
        self.bytes = 0;
        self.leave_outputs(leaving, out);
        for mut call in std::mem::take(&mut self.in_flight).into_iter().rev() {
            if call.retries > 0 && !call.cancelled {
                call.retries = one_less(call.retries);
                let spec = Arc::make_mut(&mut call.spec);
                spec.attempt = spec.attempt.saturating_add(1);
                self.queue.push_front(call);
            } else {
                let class = self.class_name.to_string();
                let error = match call.cancelled {
                    true => Error::Cancelled { task: call.name.to_string() },
                    false => Error::ActorUnavailable { actor, class, cause: Box::new(cause.clone()) },
                };
                out.push(Action::Fail { call, error });
            }
        }
    }

    /// Calls in flight may have stored what they give, or may do so as long as there is contact: a process that is killed may
    /// live a little longer than the news of it travels.
    fn leave_outputs(&self, leaving: &mut Leaving, out: &mut Vec<Action>) {
        let Some(at) = &self.node else { return };
        let left = self.in_flight.iter().map(|call| (call.spec.id, call.spec.outputs, at.clone()));
        match &self.phase {
            Phase::Alive { address, .. } if !self.in_flight.is_empty() => {
                leaving.entry(address.process).or_default().extend(left);
            }
            _ => out.extend(left.map(|(task, outputs, at)| Action::Left { task, outputs, at })),
        }
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
    /// Until the handle here is freed ([`Calls::forget`]), or else until the session ends: handles of detached actors are not
    /// counted.
    targets: BTreeMap<ActorId, Target>,
    /// The actors whose present life is known, by its process.
    by_worker: BTreeMap<ProcessId, ActorId>,
    /// Until contact with the process is lost.
    leaving: Leaving,
    /// Actors contact with which was lost. Seldom any.
    lost: Vec<ActorId>,
    /// Set at the end of the session: every call fails from then on.
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
    /// How many actors there are to which this process has a handle.
    pub(crate) fn actors(&self) -> usize {
        self.targets.len()
    }

    /// How many are not done.
    pub(crate) fn pending(&self) -> usize {
        self.targets.values().map(|target| target.queue.len() + target.in_flight.len()).sum()
    }

    /// Where a call that is not done is, with its name and its actor.
    pub(crate) fn standing(&self, id: TaskId) -> Option<(String, ActorId, CallStanding)> {
        self.targets.iter().find_map(|(actor, target)| {
            if let Some(before) = target.in_flight.iter().position(|call| call.spec.id == id) {
                return Some((target.in_flight[before].name.to_string(), *actor, CallStanding::Sent { before }));
            }
            let (before, call) = target.queue.iter().enumerate().find(|(_, call)| call.spec.id == id)?;
            Some((call.name.to_string(), *actor, CallStanding::Queued { before, is_resolved: call.resolved }))
        })
    }

    #[cfg(test)]
    pub(crate) fn what_is_left(&self) -> Vec<String> {
        let leaving = self.leaving.keys().map(|process| format!("what {process} may still store"));
        let targets = self.targets.iter().map(|(actor, target)| {
            let calls: Vec<TaskId> =
                target.in_flight.iter().chain(target.queue.iter()).map(|call| call.spec.id).collect();
            format!("{actor} with {calls:?}")
        });
        targets.chain(leaving).collect()
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
            node: None,
            gone: None,
            is_killed: false,
            queue: CallQueue::default(),
            in_flight: VecDeque::new(),
            bytes: 0,
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

    /// The arguments of a call are all there.
    pub(crate) fn resolved(&mut self, actor: ActorId, id: TaskId, args: Vec<Arg>) {
        if let Some(target) = self.targets.get_mut(&actor) {
            target.queue.resolved(id, args);
        }
    }

    /// The call fails unrun: one of its arguments did, or it was cancelled before they were all there.
    pub(crate) fn fail_unresolved(&mut self, actor: ActorId, id: TaskId, error: Error, out: &mut Vec<Action>) {
        let Some(target) = self.targets.get_mut(&actor) else { return };
        if let Some(call) = target.queue.take_unresolved(id) {
            out.push(Action::Fail { call, error });
        }
    }

    /// Pushes what can be pushed to one actor.
    pub(crate) fn settle(&mut self, actor: ActorId, out: &mut Vec<Action>) {
        let Some(target) = self.targets.get_mut(&actor) else { return };
        match &target.phase {
            Phase::Unknown | Phase::Lost { .. } | Phase::Away => {}
            Phase::Dead(cause) => {
                let cause = cause.clone();
                for call in target.queue.drain() {
                    out.push(Action::Fail { call, error: cause.clone() });
                }
            }
            Phase::Alive { address, incarnation } => {
                let mut calls = Vec::new();
                while let Some(call) = target.queue.front()
                    && call.resolved
                    && target.in_flight.len() < IN_FLIGHT
                {
                    let weight = call.spec.weight();
                    let error = too_large(&call.spec, &call.name);
                    if error.is_none() && target.bytes > 0 && target.bytes + weight > IN_FLIGHT_BYTES {
                        break;
                    }
                    let Some(call) = target.queue.pop_front() else { break };
                    if let Some(error) = error {
                        out.push(Action::Fail { call, error });
                        continue;
                    }
                    target.bytes += weight;
                    calls.push(call.spec.clone());
                    target.in_flight.push_back(call);
                }
                if !calls.is_empty() {
                    out.push(Action::Push { worker: address.clone(), actor, incarnation: *incarnation, calls });
                }
            }
        }
        target.end_if_done(actor, out);
    }

    /// The result of an attempt arrived from `worker`. Answers with the call and its actor, unless nobody waits for it.
    pub(crate) fn finished(&mut self, worker: ProcessId, id: TaskId, attempt: u32) -> Option<(ActorId, Call)> {
        let actor = *self.by_worker.get(&worker)?;
        let target = self.targets.get_mut(&actor)?;
        let at = target.in_flight.iter().position(|call| call.spec.id == id && call.spec.attempt == attempt)?;
        let call = target.in_flight.remove(at)?;
        target.bytes = target.bytes.saturating_sub(call.spec.weight());
        Some((actor, call))
    }

    /// The head was started again, and does not know who is to be told what becomes of actors, or that it was told to end some.
    pub(crate) fn watch_anew(&self, out: &mut Vec<Action>) {
        for (actor, target) in self.targets.iter().filter(|(_, target)| target.watching) {
            match (&target.phase, target.gone) {
                (Phase::Dead(_), _) => {
                    out.push(Action::Kill(*actor));
                    continue;
                }
                (_, Some(life)) => out.push(Action::Over(*actor, life)),
                (_, None) => {}
            }
            out.push(Action::Watch(*actor));
        }
    }

    /// The life that an actor is in, as far as is known here.
    pub(crate) fn life_of(&self, actor: ActorId) -> Option<Incarnation> {
        self.targets.get(&actor)?.life()
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
            ActorState::Alive { address, node, incarnation, .. } => {
                let place = target.place();
                // A head that was started again may know an earlier life only. Of one that it has written down for the second time,
                // since it did not know of the first, the process is another.
                let is_over = target.gone.is_some_and(|gone| incarnation <= gone);
                if place.map_or(is_over, |(known, _)| known > incarnation) {
                    return;
                }
                if std::mem::take(&mut target.is_killed) {
                    target.gone = target.gone.max(Some(incarnation));
                    out.push(Action::Over(actor, incarnation));
                    return;
                }
                match place {
                    // Known; calls that were in flight when contact was lost have their time.
                    Some(known) if known == (incarnation, address.process) => {
                        if matches!(target.phase, Phase::Lost { .. }) {
                            return;
                        }
                    }
                    // The head was started again, and its news of the end of this process was lost.
                    Some((known, process)) => {
                        self.by_worker.remove(&process);
                        if known < incarnation {
                            target.gone = target.gone.max(Some(known));
                        }
                        let cause = Error::ActorEnded { by: "a restart while the head was away".into() };
                        target.give_up_in_flight(actor, &cause, &mut self.leaving, out);
                    }
                    None => {}
                }
                self.by_worker.insert(address.process, actor);
                target.node = Some(node);
                target.phase = Phase::Alive { address, incarnation };
            }
            ActorState::Restarting { life, cause, .. } => {
                if target.life() > Some(life) {
                    return;
                }
                target.gone = target.gone.max(Some(life));
                target.is_killed = false;
                return self.life_ended(actor, &cause, out);
            }
            ActorState::Dead { cause } => {
                Self::leave(&mut self.by_worker, target);
                let error = Error::ActorDied { actor, class, cause };
                target.bytes = 0;
                target.leave_outputs(&mut self.leaving, out);
                for call in target.in_flight.drain(..).chain(target.queue.drain()) {
                    out.push(Action::Fail { call, error: error.clone() });
                }
                target.phase = Phase::Dead(error);
            }
        }
        self.settle(actor, out);
    }

    /// The user has killed an actor in this life, if it was known then: calls that are made from now on do not reach that one.
    pub(crate) fn killed(&mut self, actor: ActorId, life: Option<Incarnation>, cause: &Error, out: &mut Vec<Action>) {
        let Some(target) = self.targets.get_mut(&actor) else { return };
        match life {
            // It has ended by itself meanwhile, and the next one has begun.
            Some(life) if target.life() > Some(life) || target.gone >= Some(life) => return,
            Some(_) => {}
            None => target.is_killed = true,
        }
        self.life_ended(actor, cause, out);
    }

    /// The present life of an actor has ended, and another is on its way.
    pub(crate) fn life_ended(&mut self, actor: ActorId, cause: &Error, out: &mut Vec<Action>) {
        let Some(target) = self.targets.get_mut(&actor) else { return };
        if matches!(target.phase, Phase::Dead(_)) {
            return;
        }
        Self::leave(&mut self.by_worker, target);
        target.give_up_in_flight(actor, cause, &mut self.leaving, out);
        target.phase = Phase::Away;
        self.settle(actor, out);
    }

    fn leave(by_worker: &mut BTreeMap<ProcessId, ActorId>, target: &mut Target) {
        if let Phase::Alive { address, incarnation } | Phase::Lost { address, incarnation, .. } = &target.phase {
            by_worker.remove(&address.process);
            target.gone = target.gone.max(Some(*incarnation));
        }
    }

    /// Contact with a process was lost. The head says why if it ended; until then, and for a while, its actor takes no calls.
    pub(crate) fn connection_lost(&mut self, worker: ProcessId, now_ms: u64, out: &mut Vec<Action>) {
        let left = self.leaving.remove(&worker).into_iter().flatten();
        out.extend(left.map(|(task, outputs, at)| Action::Left { task, outputs, at }));
        let Some(actor) = self.by_worker.get(&worker).copied() else { return };
        if let Some(target) = self.targets.get_mut(&actor)
            && let Phase::Alive { address, incarnation } = &target.phase
        {
            target.phase = Phase::Lost { address: address.clone(), incarnation: *incarnation, since_ms: now_ms };
            self.lost.push(actor);
        }
    }

    /// Whether it waits for the cause of a lost connection.
    pub(crate) fn waits_for_causes(&self) -> bool {
        !self.lost.is_empty()
    }

    /// There is no head that could have told a cause: the time for that begins anew.
    pub(crate) fn no_cause_is_told(&mut self, now_ms: u64) {
        for actor in &self.lost {
            if let Some(Target { phase: Phase::Lost { since_ms, .. }, .. }) = self.targets.get_mut(actor) {
                *since_ms = now_ms;
            }
        }
    }

    /// Time passes; `is_gone` says of which processes it is certain that they have ended. Answers in how many milliseconds it wants to be
    /// called again.
    pub(crate) fn tick(
        &mut self,
        now_ms: u64,
        is_gone: impl Fn(ProcessId) -> bool,
        out: &mut Vec<Action>,
    ) -> Option<u64> {
        if self.lost.is_empty() {
            return None;
        }
        let limit_ms = contact_limit_ms();
        let mut next: Option<u64> = None;
        for actor in std::mem::take(&mut self.lost) {
            let Some(target) = self.targets.get_mut(&actor) else { continue };
            let Phase::Lost { address, incarnation, since_ms } = &target.phase else { continue };
            let left = (since_ms + limit_ms).saturating_sub(now_ms);
            if left > 0 {
                next = Some(next.map_or(left, |known| known.min(left)));
                self.lost.push(actor);
                continue;
            }
            let (address, incarnation) = (address.clone(), *incarnation);
            let cause = Error::ContactLost {
                what: format!("the call of {}", target.class_name),
                who: format!("its process, {}", address.process),
                why: format!("the connection broke, and no exit was reported within {} s", limit_ms / 1000),
                attempts: 1,
            };
            if is_gone(address.process) {
                // The head will say what becomes of the actor. What is not in flight waits for that: sent there, it would be lost again.
                self.life_ended(actor, &cause, out);
                continue;
            }
            // It lives, or the head would have said otherwise. What was in flight is lost with the connection; what comes
            // now goes over another.
            target.give_up_in_flight(actor, &cause, &mut self.leaving, out);
            target.phase = Phase::Alive { address, incarnation };
            self.settle(actor, out);
        }
        next
    }

    /// The user wants these calls not to run; with force, their caller has its answer at once. Those that are found are
    /// taken out of `wanted`.
    pub(crate) fn cancel(&mut self, wanted: &mut Wanted, out: &mut Vec<Action>) {
        for (actor, target) in &mut self.targets {
            if wanted.is_empty() {
                return;
            }
            let queued = target.queue.take_wanted(wanted);
            if !queued.is_empty() {
                for call in queued {
                    let error = Error::Cancelled { task: call.name.to_string() };
                    out.push(Action::Fail { call, error });
                }
                target.end_if_done(*actor, out);
            }
            for call in &mut target.in_flight {
                let id = call.spec.id;
                let Some(force) = wanted.take(id) else { continue };
                call.cancelled = true;
                if let Phase::Alive { address, .. } = &target.phase {
                    // Never by force, which would end the actor with the state that it has for everybody else.
                    out.push(Action::Cancel { worker: address.process, task: id, force: false });
                }
                if force {
                    let error = Error::Cancelled { task: call.name.to_string() };
                    out.push(Action::Answer { spec: call.spec.clone(), error });
                }
            }
        }
    }

    /// Whether the head has said that the actor is dead.
    pub(crate) fn is_dead(&self, actor: ActorId) -> bool {
        self.targets.get(&actor).is_some_and(|target| matches!(target.phase, Phase::Dead(_)))
    }

    /// Calls that `parent` made, but for those that run and were asked to stop.
    pub(crate) fn children_of(&self, parent: TaskId) -> Vec<TaskId> {
        self.targets
            .values()
            .flat_map(|target| target.queue.iter().chain(&target.in_flight))
            .filter(|call| call.spec.parent == Some(parent) && !call.cancelled)
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

    /// Whether there are no calls.
    pub(crate) fn is_done(&self) -> bool {
        self.targets.values().all(|target| target.queue.is_empty() && target.in_flight.is_empty())
    }

    /// The session is over.
    pub(crate) fn end(&mut self, error: &Error, out: &mut Vec<Action>) {
        self.session_over = Some(error.clone());
        self.by_worker.clear();
        self.leaving.clear();
        for (_, mut target) in std::mem::take(&mut self.targets) {
            for call in target.in_flight.drain(..).chain(target.queue.drain()) {
                out.push(Action::Fail { call, error: error.clone() });
            }
        }
    }
}

#[cfg(test)]
#[path = "calls_tests.rs"]
mod tests;
