//! What processes say they have when they come back. What nobody says he has is ended.

use std::collections::BTreeSet;

use wingbeat_core::spec::ActorSpec;
use wingbeat_core::{ActorId, LeaseId, ProcessId};
use wingbeat_net::messages::{HeadEvent, WorkerDeath};

use super::Recovering;
use crate::state::State;

/// Why an actor ends that its creator does not know any more.
pub(super) const DROPPED: &str = "the drop of its last handle";

/// What a process has. All else that was its own is ended: the news of a grant, of a return, or of the drop of a last handle
/// was lost.
#[derive(Default)]
pub(super) struct Claim {
    pub(super) leases: BTreeSet<LeaseId>,
    pub(super) actors: BTreeSet<ActorId>,
    pub(super) is_complete: bool,
}

impl Recovering {
    pub(super) fn has_spoken(&self, process: ProcessId) -> bool {
        self.claims.get(&process).is_some_and(|claim| claim.is_complete)
    }
}

impl State {
    /// A process says what it has.
    pub(in crate::state) fn holds(
        &mut self,
        process: ProcessId,
        leases: Vec<LeaseId>,
        actors: Vec<ActorId>,
        is_all: bool,
    ) {
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
    pub(in crate::state) fn has_claimed(&self, process: ProcessId) -> bool {
        self.claim_of(process).is_some()
    }

    fn claim_of(&self, process: ProcessId) -> Option<&Claim> {
        self.recovering.as_ref()?.claims.get(&process).filter(|claim| claim.is_complete)
    }

    pub(super) fn is_claimed_by_nobody(&self, owner: ProcessId, lease: LeaseId) -> bool {
        self.claim_of(owner).is_some_and(|claim| !claim.leases.contains(&lease))
    }

    pub(super) fn is_held_by_nobody(&self, spec: &ActorSpec) -> bool {
        let claim = self.claim_of(spec.owner.process);
        !spec.detached && claim.is_some_and(|claim| !claim.actors.contains(&spec.id))
    }
}
