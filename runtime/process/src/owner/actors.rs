//! Actors whose handles somebody here holds, and what is known of those that were made here: a head that was started again may
//! not know them.

use std::sync::Arc;

use dashmap::DashMap;
use wingbeat_core::spec::{ActorSpec, ActorState};
use wingbeat_core::{ActorId, Incarnation, NodeId, ObjectId, ProcessId};

use crate::owner::object::{Handle, Object};

/// An actor that was made here, and is not known to be dead.
#[derive(Clone)]
pub(crate) struct OwnActor {
    pub spec: Arc<ActorSpec>,
    /// Its latest life, if any has begun.
    pub life: Option<Incarnation>,
    /// How many moves have cost it no restart.
    pub moves: u32,
    /// The node and the process of that life, unless it is known to be over.
    pub place: Option<(NodeId, ProcessId)>,
}

/// See the module.
#[derive(Default)]
pub(crate) struct Actors {
    /// By their handle object, whether that is ours or borrowed, until that is freed.
    held: DashMap<ObjectId, ActorId>,
    made: DashMap<ActorId, OwnActor>,
    /// Of detached ones that were made here, and are not known to be dead. Nobody counts these, but their arguments must outlive the interest of whoever has
    /// made them.
    detached: DashMap<ActorId, Handle>,
}

impl Actors {
    /// Somebody here holds a handle of this actor.
    pub(crate) fn holds(&self, handle: &Object, actor: ActorId) {
        handle.becomes_an_actors();
        self.held.insert(handle.id(), actor);
    }

    /// An actor is about to be made, which ends with its last handle.
    pub(crate) fn makes(&self, handle: &Object, spec: ActorSpec) {
        self.holds(handle, spec.id);
        self.made.insert(spec.id, OwnActor { spec: Arc::new(spec), life: None, moves: 0, place: None });
    }

    /// A detached actor was made.
    pub(crate) fn keeps(&self, actor: ActorId, handle: Handle) {
        self.detached.insert(actor, handle);
    }

    /// It needs its arguments no more.
    pub(super) fn has_ended(&self, actor: ActorId) {
        // Outside of the map: it may be the last to hold them.
        let kept = self.detached.remove(&actor);
        drop(kept);
    }

    /// The session is over.
    pub(super) fn clear(&self) {
        let detached: Vec<ActorId> = self.detached.iter().map(|kept| *kept.key()).collect();
        detached.into_iter().for_each(|actor| self.has_ended(actor));
    }

    /// Whether this is the handle of an actor.
    pub(crate) fn has(&self, handle: ObjectId) -> bool {
        !self.held.is_empty() && self.held.contains_key(&handle)
    }

    /// It was not made, or nobody holds it any more.
    pub(crate) fn forget(&self, handle: ObjectId) -> Option<ActorId> {
        let (_, actor) = self.held.remove(&handle)?;
        self.made.remove(&actor);
        Some(actor)
    }

    /// The head says what an actor is now.
    pub(super) fn is_now(&self, actor: ActorId, state: &ActorState) {
        match state {
            ActorState::Alive { incarnation: life, moves, .. } | ActorState::Restarting { life, moves, .. } => {
                // A head that was started again may know an earlier one only.
                if let Some(mut made) = self.made.get_mut(&actor).filter(|made| made.life <= Some(*life)) {
                    (made.life, made.moves) = (Some(*life), *moves);
                    made.place = match state {
                        ActorState::Alive { address, node, .. } => Some((node.node, address.process)),
                        _ => None,
                    };
                }
            }
            ActorState::Dead { .. } => {
                self.made.remove(&actor);
                self.has_ended(actor);
            }
            ActorState::Starting => {}
        }
    }

    /// Whether none was made here that may live.
    pub(super) fn makes_none(&self) -> bool {
        self.made.is_empty()
    }

    /// Those that were made here and somebody may hold, and of those the ones that are not known to be dead.
    pub(super) fn all_made(&self, by: impl Fn(ObjectId) -> bool) -> (Vec<ActorId>, Vec<OwnActor>) {
        // In this order: whoever is made meanwhile is held before.
        let mut made: Vec<OwnActor> = self.made.iter().map(|made| made.clone()).collect();
        let mut held: Vec<ActorId> =
            self.held.iter().filter(|held| by(*held.key())).map(|held| *held.value()).collect();
        // Simulated, the same seed must give the same run.
        made.sort_unstable_by_key(|made| made.spec.id);
        held.sort_unstable();
        (held, made)
    }

    #[cfg(test)]
    pub(super) fn what_is_left(&self) -> Vec<String> {
        self.held.iter().map(|held| format!("{} by {}", held.value(), held.key())).collect()
    }
}

#[cfg(test)]
mod tests {
    use wingbeat_core::error::Error;

    use super::*;

    #[test]
    fn the_arguments_of_a_detached_actor_are_kept_until_it_has_ended() {
        let actors = Actors::default();
        for id in [1, 2, 3].map(ActorId) {
            actors.keeps(id, Handle::failed(Error::NoSession));
        }
        let cause = Box::new(Error::ActorEnded { by: "a kill".into() });
        actors.is_now(ActorId(1), &ActorState::Dead { cause });
        actors.has_ended(ActorId(2));
        assert_eq!(actors.detached.iter().map(|kept| *kept.key()).collect::<Vec<_>>(), [ActorId(3)]);
        actors.clear();
        assert!(actors.detached.is_empty());
    }
}
