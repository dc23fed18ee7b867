//! The life of a worker process as its node sees it.
//!
//! ```text
//!                 ┌──────────── Assigned ───────────┐
//!                 │                                 ▼
//!   Launching ─Reported─▶ Idle ◀── LeaseOver ──── Leased ── LeaseOver{kill}, End, Exited ─▶ Ending ── WoundUp ─▶ Gone
//!       │                  │ ▲                                                                ▲ │                  ▲
//!       │            Retire│ │Stays                                                           │ WoundUp{devices}   │
//!       │                  ▼ │                                                                │ ▼                  │
//!       │               Retiring ───────────────────────── Exited ────────────────────────────┤ Freeing ─DevicesFree
//!       ├── End, LeaseOver{kill}: the guard has it ───────────────────────────────────────────┘                    │
//!       └── End, LeaseOver{kill}: the guard does not have it yet; NotStarted ──────────────────────────────────────┘
//! ```
//!
//! The end of every assigned lease is reported exactly once: by [`Effect::LeaseEnded`], [`Effect::LeaseFailed`] or
//! [`Effect::NotStarted`]. Only who has devices is [`Stage::Freeing`].

use wingbeat_core::LeaseId;
use wingbeat_core::error::Error;
use wingbeat_core::spec::Address;
use wingbeat_net::messages::{LeaseHolder, LeaseStart};

use crate::clock::Millis;
use crate::memory::Work;

/// A lease that a worker process serves or will serve.
pub(crate) struct Assignment {
    /// As the head granted it.
    pub start: LeaseStart,
    /// For an actor, what its constructor has returned; none before it has.
    pub started: Option<Result<(), Error>>,
    /// For an actor that is to end when it has done what it was sent: what has told it to.
    pub terminated: Option<String>,
}

impl Assignment {
    pub(crate) fn lease(&self) -> LeaseId {
        self.start.lease
    }

    pub(crate) fn is_actor(&self) -> bool {
        matches!(&self.start.holder, LeaseHolder::Actor(..))
    }

    pub(crate) fn work(&self) -> Work {
        match &self.start.holder {
            LeaseHolder::Tasks(owner, _) => Work::Tasks { owner: *owner, yields: false },
            LeaseHolder::Actor(spec, life, moves) => {
                let lives_again = life.0.saturating_sub(*moves) < spec.max_restarts;
                Work::Actor { restarts: lives_again && self.terminated.is_none() }
            }
        }
    }

    pub(crate) fn is_detached(&self) -> bool {
        matches!(&self.start.holder, LeaseHolder::Actor(spec, ..) if spec.detached)
    }
}

/// How a worker process that has reported is reached.
pub(crate) struct Contact {
    pub address: Address,
    /// Whether it can take further leases; not once it has lost the head.
    pub is_fit: bool,
}

/// How a process ended, as the system says it.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Ended {
    pub code: Option<i32>,
    pub signal: Option<i32>,
}

/// What a worker process is doing.
pub(crate) enum Stage {
    /// It is being started, and has not reported.
    Launching {
        /// Since when; from the moment in which the guard was asked, that moment.
        since: Millis,
        /// Whether the guard was asked to start it. Before that, nothing has to be killed.
        with_guard: bool,
        /// The lease that it will serve, if there is one yet.
        assignment: Option<Assignment>,
    },
    /// It can take a lease.
    Idle { since: Millis, contact: Contact },
    /// It serves a lease.
    Leased { assignment: Assignment, contact: Contact },
    /// It was asked to exit, and takes no lease. It may decline, because it owns objects.
    Retiring { contact: Contact },
    /// It was told to end, or has ended.
    Ending {
        /// The lease whose end is still to be reported.
        assignment: Option<Assignment>,
        contact: Option<Contact>,
        /// Whether the head wanted the end.
        by_head: bool,
        /// Once it has ended.
        ended: Option<Ended>,
    },
    /// It is gone, and the devices of its lease are not free yet.
    Freeing {
        assignment: Assignment,
        /// Why its lease has failed, which the head hears then; else that it has ended.
        failure: Option<String>,
    },
    /// It was never started, or nothing of it is left: it is forgotten at once.
    Gone,
}

/// What happens to a worker process.
pub(crate) enum Event {
    /// It is to serve a lease.
    Assigned(Box<Assignment>),
    /// The guard was asked to start it.
    HandedToGuard,
    /// It says where it is reached.
    Reported(Contact),
    /// The head ended its lease; with `kill`, the process must end, too.
    LeaseOver { kill: bool },
    /// It must end.
    End { by_head: bool },
    /// It is not worth keeping.
    Retire,
    /// It was asked to exit, and declines.
    Stays,
    /// It cannot serve another lease.
    Unfit,
    /// The guard reports its exit.
    Exited(Ended),
    /// The guard could not start it.
    NotStarted,
    /// It has ended, and all is known of that: what a lease that it never served has failed with.
    WoundUp { had_devices: bool, failure: String },
    /// Nothing uses its devices any more.
    DevicesFree,
}

/// What must be done, in order.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Effect {
    /// Send it the orders of its lease.
    HandOver,
    /// Ask it to exit.
    AskToExit,
    /// Ask the guard to kill it.
    Kill,
    /// Report to the head.
    LeaseEnded(LeaseId),
    /// Report to the head why nobody has served it.
    LeaseFailed(LeaseId, String),
    /// Report to the head that the process for it could not be started.
    NotStarted(LeaseId),
    /// Report to the head that a process that others may know has ended, and under which lease.
    Died(Option<LeaseId>),
    /// It was started ahead of need, and never reported: somebody should know.
    NeverReported,
    /// See to it that nothing uses its devices any more.
    FreeDevices,
}

impl Effect {
    /// A lease is over.
    fn over(lease: LeaseId, failure: Option<String>) -> Effect {
        match failure {
            Some(why) => Effect::LeaseFailed(lease, why),
            None => Effect::LeaseEnded(lease),
        }
    }
}

impl Stage {
    pub(crate) fn launching(now: Millis, assignment: Option<Assignment>) -> Stage {
        Stage::Launching { since: now, with_guard: false, assignment }
    }

    /// Its lease, if it has one whose end was not reported.
    pub(crate) fn assignment(&self) -> Option<&Assignment> {
        match self {
            Stage::Leased { assignment, .. } | Stage::Freeing { assignment, .. } => Some(assignment),
            Stage::Launching { assignment, .. } | Stage::Ending { assignment, .. } => assignment.as_ref(),
            Stage::Idle { .. } | Stage::Retiring { .. } | Stage::Gone => None,
        }
    }

    pub(crate) fn assignment_mut(&mut self) -> Option<&mut Assignment> {
        match self {
            Stage::Leased { assignment, .. } | Stage::Freeing { assignment, .. } => Some(assignment),
            Stage::Launching { assignment, .. } | Stage::Ending { assignment, .. } => assignment.as_mut(),
            Stage::Idle { .. } | Stage::Retiring { .. } | Stage::Gone => None,
        }
    }

    /// How it is reached, once it has reported.
    pub(crate) fn contact(&self) -> Option<&Contact> {
        match self {
            Stage::Idle { contact, .. } | Stage::Leased { contact, .. } | Stage::Retiring { contact } => Some(contact),
            Stage::Ending { contact, .. } => contact.as_ref(),
            Stage::Launching { .. } | Stage::Freeing { .. } | Stage::Gone => None,
        }
    }

    pub(crate) fn is_launching(&self) -> bool {
        matches!(self, Stage::Launching { .. })
    }

    pub(crate) fn is_ending(&self) -> bool {
        matches!(self, Stage::Ending { .. } | Stage::Freeing { .. })
    }

    /// Whether it is gone, and only its devices are waited for.
    pub(crate) fn is_gone(&self) -> bool {
        matches!(self, Stage::Freeing { .. })
    }

    /// Whether it can take a lease.
    pub(crate) fn is_free(&self) -> bool {
        matches!(self, Stage::Idle { .. } | Stage::Launching { assignment: None, .. })
    }

    /// Every change of a stage. An event that means nothing in a stage changes nothing.
    pub(crate) fn after(self, event: Event, now: Millis) -> (Stage, Vec<Effect>) {
        match (self, event) {
            (Stage::Launching { since, with_guard, assignment: None }, Event::Assigned(assignment)) => {
                (Stage::Launching { since, with_guard, assignment: Some(*assignment) }, Vec::new())
            }
            (Stage::Idle { contact, .. }, Event::Assigned(assignment)) => {
                (Stage::Leased { assignment: *assignment, contact }, vec![Effect::HandOver])
            }
            (stage, Event::Assigned(assignment)) => {
                debug_assert!(false, "only a free worker process is assigned");
                (stage, vec![Effect::LeaseEnded(assignment.lease())])
            }

            (Stage::Launching { with_guard: false, assignment, .. }, Event::HandedToGuard) => {
                (Stage::Launching { since: now, with_guard: true, assignment }, Vec::new())
            }

            (Stage::Launching { with_guard: true, assignment, .. }, Event::Reported(contact)) => match assignment {
                Some(assignment) => (Stage::Leased { assignment, contact }, vec![Effect::HandOver]),
                None => (Stage::Idle { since: now, contact }, Vec::new()),
            },

            (
                Stage::Launching { since, with_guard, assignment: Some(assignment) },
                Event::LeaseOver { kill: false },
            ) => {
                let stage = Stage::Launching { since, with_guard, assignment: None };
                (stage, vec![Effect::LeaseEnded(assignment.lease())])
            }
            (Stage::Leased { assignment, contact }, Event::LeaseOver { kill: false }) => {
                let ended = Effect::LeaseEnded(assignment.lease());
                if contact.is_fit {
                    (Stage::Idle { since: now, contact }, vec![ended])
                } else {
                    (Stage::Retiring { contact }, vec![ended, Effect::AskToExit])
                }
            }
            (stage, Event::LeaseOver { kill: true }) => stage.end(true),
            (stage, Event::End { by_head }) => stage.end(by_head),

            (Stage::Idle { contact, .. } | Stage::Retiring { contact }, Event::Retire) => {
                (Stage::Retiring { contact }, vec![Effect::AskToExit])
            }
            (Stage::Retiring { contact }, Event::Stays) if contact.is_fit => {
                (Stage::Idle { since: now, contact }, Vec::new())
            }

            (Stage::Idle { contact, .. } | Stage::Retiring { contact }, Event::Unfit) => {
                (Stage::Retiring { contact: Contact { is_fit: false, ..contact } }, vec![Effect::AskToExit])
            }
            (Stage::Leased { assignment, contact }, Event::Unfit) => {
                (Stage::Leased { assignment, contact: Contact { is_fit: false, ..contact } }, Vec::new())
            }

            (Stage::Launching { assignment, .. }, Event::Exited(ended)) => {
                (Stage::Ending { assignment, contact: None, by_head: false, ended: Some(ended) }, Vec::new())
            }
            (Stage::Leased { assignment, contact }, Event::Exited(ended)) => {
                let (assignment, contact) = (Some(assignment), Some(contact));
                (Stage::Ending { assignment, contact, by_head: false, ended: Some(ended) }, Vec::new())
            }
            (Stage::Idle { contact, .. } | Stage::Retiring { contact }, Event::Exited(ended)) => {
                let (contact, ended) = (Some(contact), Some(ended));
                (Stage::Ending { assignment: None, contact, by_head: false, ended }, Vec::new())
            }
            (Stage::Ending { assignment, contact, by_head, ended: None }, Event::Exited(ended)) => {
                (Stage::Ending { assignment, contact, by_head, ended: Some(ended) }, Vec::new())
            }

            // Where it was told to end before, its lease is over already, or ends so.
            (Stage::Launching { assignment, .. }, Event::NotStarted) => {
                let effect = assignment.map_or(Effect::NeverReported, |it| Effect::NotStarted(it.lease()));
                (Stage::Gone, vec![effect])
            }
            (Stage::Ending { assignment, by_head, .. }, Event::NotStarted) => {
                let effect = match (assignment.map(|it| it.lease()), by_head) {
                    (Some(lease), true) => Some(Effect::LeaseEnded(lease)),
                    (Some(lease), false) => Some(Effect::NotStarted(lease)),
                    (None, true) => None,
                    (None, false) => Some(Effect::NeverReported),
                };
                (Stage::Gone, effect.into_iter().collect())
            }

            (
                Stage::Ending { assignment, contact, by_head, ended: Some(_) },
                Event::WoundUp { had_devices, failure },
            ) => {
                let mut effects = Vec::new();
                if contact.is_some() {
                    // Also of one that was idle: what it owned is nobody's from now on.
                    effects.push(Effect::Died(assignment.as_ref().map(Assignment::lease)));
                } else if assignment.is_none() && !by_head {
                    effects.push(Effect::NeverReported);
                }
                let failure = (contact.is_none() && !by_head).then_some(failure);
                match assignment {
                    // Devices are given on only when nothing of the last lease uses them.
                    Some(assignment) if had_devices => {
                        effects.push(Effect::FreeDevices);
                        (Stage::Freeing { assignment, failure }, effects)
                    }
                    assignment => {
                        effects.extend(assignment.map(|it| Effect::over(it.lease(), failure)));
                        (Stage::Gone, effects)
                    }
                }
            }
            (Stage::Freeing { assignment, failure }, Event::DevicesFree) => {
                (Stage::Gone, vec![Effect::over(assignment.lease(), failure)])
            }

            (
                stage,
                Event::HandedToGuard
                | Event::Reported(_)
                | Event::LeaseOver { kill: false }
                | Event::Retire
                | Event::Stays
                | Event::Unfit
                | Event::Exited(_)
                | Event::NotStarted
                | Event::WoundUp { .. }
                | Event::DevicesFree,
            ) => (stage, Vec::new()),
        }
    }

    fn end(self, by_head: bool) -> (Stage, Vec<Effect>) {
        match self {
            // The guard would not know whom to kill, and would start it afterwards.
            Stage::Launching { with_guard: false, assignment, .. } => {
                let ended = assignment.map(|assignment| Effect::LeaseEnded(assignment.lease()));
                (Stage::Gone, ended.into_iter().collect())
            }
            Stage::Launching { with_guard: true, assignment, .. } => {
                (Stage::Ending { assignment, contact: None, by_head, ended: None }, vec![Effect::Kill])
            }
            Stage::Leased { assignment, contact } => {
                let (assignment, contact) = (Some(assignment), Some(contact));
                (Stage::Ending { assignment, contact, by_head, ended: None }, vec![Effect::Kill])
            }
            Stage::Idle { contact, .. } | Stage::Retiring { contact } => {
                let contact = Some(contact);
                (Stage::Ending { assignment: None, contact, by_head, ended: None }, vec![Effect::Kill])
            }
            Stage::Ending { assignment, contact, by_head: before, ended } => {
                (Stage::Ending { assignment, contact, by_head: before || by_head, ended }, Vec::new())
            }
            stage @ (Stage::Freeing { .. } | Stage::Gone) => (stage, Vec::new()),
        }
    }
}

#[cfg(test)]
#[path = "stage_tests.rs"]
mod tests;
