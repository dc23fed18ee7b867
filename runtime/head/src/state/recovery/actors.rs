//! Actors of which a head that was started again does not know where they are, or whether: whoever comes back brings one, or the news
//! of its end; what nobody brings lives again, or is dead.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use wingbeat_core::error::Error;
use wingbeat_core::spec::{ActorSpec, ScopedName};
use wingbeat_core::{ActorId, Incarnation, LeaseId, NodeId, ProcessId};
use wingbeat_net::messages::WorkerDeath;

use crate::state::actors::ToEnd;
use crate::state::facts::{Fact, KeptActor};
use crate::state::{Millis, State};

/// An actor that may be somewhere.
#[derive(Clone)]
pub(in crate::state) struct Absent {
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
    pub(super) fn fact(&self) -> Fact {
        let (life, moves, ends) = (self.life, self.moves, self.ends.clone());
        Fact::Actor(KeptActor { spec: Box::new((*self.spec).clone()), life, moves, ends })
    }
}

/// What was said of actors of which a head that was started again knows nothing else. Whoever made one may be waited for by nobody,
/// and say what it was when the rest has gone on already.
pub(in crate::state) struct Unheard {
    /// When whoever has not come back has ended by itself.
    pub(super) until: Millis,
    /// Who wants to know what becomes of them.
    pub(super) watchers: BTreeMap<ActorId, BTreeSet<ProcessId>>,
    /// Lives that are over, as somebody knows.
    pub(super) over: BTreeMap<ActorId, KnownEnd>,
}

/// What is known of the end of an actor that is not known.
#[derive(Clone, Copy, Default)]
pub(super) struct KnownEnd {
    /// This life, and those before it.
    life: Option<Incarnation>,
    /// Whichever comes back, was killed by somebody who did not know which it was.
    is_killed: bool,
}

impl Unheard {
    /// Notes who wants to know about an actor: it may still be heard of.
    pub(in crate::state) fn watch(&mut self, process: ProcessId, actor: ActorId) {
        self.watchers.entry(actor).or_default().insert(process);
    }

    pub(in crate::state) fn process_lost(&mut self, process: ProcessId) {
        for watchers in self.watchers.values_mut() {
            watchers.remove(&process);
        }
    }
}

impl State {
    /// Whether a life that a node reports was over when the last head died: the actor is written down, and not as that; or it is not
    /// written down any more. A node that was away then may not have heard of it. Where nothing is known of the last head, it is not.
    pub(super) fn is_stale(&self, spec: &ActorSpec, life: Incarnation) -> bool {
        let Some(recovering) = &self.recovering else { return false };
        match recovering.actors.get(&spec.id) {
            Some(absent) => absent.life.is_some_and(|latest| life < latest),
            None => recovering.knows_who && spec.is_kept() && !self.actors.knows(spec.id),
        }
    }

    /// A node has brought a life back that was over when the last head died. It is told to end, and the next one begins when it has.
    pub(super) fn has_earlier_life(&mut self, id: ActorId, lease: LeaseId) {
        let absent = self.recovering.as_mut().and_then(|recovering| recovering.actors.get_mut(&id));
        if let Some(absent) = absent {
            absent.earlier = Some(lease);
        }
    }

    /// An actor is known now: what was said of it before counts.
    pub(super) fn heard_of(&mut self, id: ActorId) {
        let Some(unheard) = &mut self.unheard else { return };
        let (over, watchers) = (unheard.over.remove(&id), unheard.watchers.remove(&id));
        match over {
            Some(KnownEnd { is_killed: true, .. }) => self.kill_actor(id, true),
            Some(KnownEnd { life: Some(life), .. }) => self.life_over(id, life),
            Some(KnownEnd { life: None, .. }) | None => {}
        }
        for watcher in watchers.unwrap_or_default() {
            self.watch(watcher, id);
        }
    }

    /// An actor that may still come back is to end in order. False if nothing is known of it.
    pub(in crate::state) fn absent_actor_ends(&mut self, id: ActorId, by: &str) -> bool {
        let absent = self.recovering.as_mut().and_then(|recovering| recovering.actors.get_mut(&id));
        let Some(absent) = absent else { return false };
        absent.ends = Some(by.to_owned());
        if absent.spec.is_kept() {
            let fact = absent.fact();
            self.record(fact);
        }
        true
    }

    /// An actor that may still come back is to end. If it comes, its life is over.
    pub(in crate::state) fn end_absent_actor(&mut self, id: ActorId, cause: Error) {
        let Some(recovering) = &mut self.recovering else { return };
        let Some(Absent { spec, life, moves, .. }) = recovering.actors.remove(&id) else { return };
        self.insert_actor((*spec).clone(), life.unwrap_or(Incarnation(0)), moves, None);
        self.bury_actor(id, cause);
        self.heard_of(id);
    }

    /// A life of an actor is over.
    pub(in crate::state) fn life_over(&mut self, id: ActorId, life: Incarnation) {
        match self.actors.life_of(id) {
            Some(known) if known == life && self.recovering.is_none() => self.kill_actor(id, true),
            // Its next life may have begun.
            Some(known) if known <= life => {
                if let Some((spec, moves)) = self.actors.spec(id).cloned().zip(Some(self.actors.moves_of(id))) {
                    let (life, place, ends, earlier) = (Some(life), None, None, None);
                    self.has_later_life(Absent { spec, life, moves, place, ends, earlier });
                }
            }
            Some(_) | None => {}
        }
        if let Some(unheard) = self.unheard.as_mut().filter(|_| !self.actors.knows(id)) {
            let over = unheard.over.entry(id).or_default();
            over.life = over.life.max(Some(life));
        }
    }

    /// Somebody ends the life of an actor that is not known, whichever it is. One that never comes back has ended.
    pub(in crate::state) fn unheard_is_killed(&mut self, id: ActorId) {
        if let Some(unheard) = &mut self.unheard {
            unheard.over.entry(id).or_default().is_killed = true;
        }
    }

    /// Why a life is over that no node has.
    fn ended_meanwhile(&self, absent: &Absent, deaths: &BTreeMap<LeaseId, WorkerDeath>) -> Error {
        let by = "the end of its process";
        let Some((node, process)) = absent.place else {
            return Error::ActorEnded { by: format!("{by} while the head was away") };
        };
        let what = format!("actor {}", absent.spec.class_name);
        let death = deaths.values().find(|death| death.process == process);
        let lost = self.never_back.iter().find(|(lost, _)| *lost == node);
        match (death, lost) {
            (Some(WorkerDeath { pid, exit, .. }), _) => exit.clone().into_error(what, process, *pid),
            (None, Some((_, why))) => Error::NodeDied { what, node, why: why.clone(), attempts: 1 },
            (None, None) => Error::ActorEnded { by: format!("{by} on {node} while the head was away") },
        }
    }

    /// An actor that no node has begins its next life, or its first one, or is dead.
    pub(super) fn lives_again(&mut self, absent: Absent, deaths: &BTreeMap<LeaseId, WorkerDeath>) {
        let cause = self.ended_meanwhile(&absent, deaths);
        let Absent { spec, life, moves, ends, earlier, .. } = absent;
        let id = spec.id;
        let over = self.unheard.as_mut().and_then(|unheard| unheard.over.remove(&id));
        let life = life.max(over.and_then(|over| over.life));
        // Its last life ended with its node.
        let next = life.map_or(Incarnation(0), |life| Incarnation(life.0.saturating_add(1)));
        let cost = next.0.saturating_sub(moves);
        let may_live = life.is_none() || spec.max_restarts == u32::MAX || cost <= spec.max_restarts;
        let mut spec = Arc::unwrap_or_clone(spec);
        if !self.jobs.contains_key(&spec.job) {
            self.record(Fact::ActorGone(id));
        } else if self.actors.is_taken(&spec)
            && let Some(ScopedName { namespace, name }) = spec.name.take()
        {
            self.record(Fact::ActorGone(id));
            self.insert_actor(spec, life.unwrap_or(next), moves, None);
            self.bury_actor(id, Error::ActorNameTaken { namespace, name });
        } else if !spec.detached && !self.is_job_running(spec.job) {
            // What else there is of the job are detached actors.
            self.insert_actor(spec, life.unwrap_or(next), moves, None);
            self.bury_actor(id, Error::ActorEnded { by: "the end of its job".into() });
        } else if let Some(end) = self.is_to_end(id).or(ends.map(ToEnd::Terminate)) {
            self.insert_actor(spec, life.unwrap_or(next), moves, None);
            self.bury_actor(id, Error::ActorEnded { by: end.by() });
        } else if may_live {
            self.insert_actor(spec, next, moves, life.map(|_| cause));
            self.next_life_waits_for(id, earlier);
        } else {
            self.insert_actor(spec, life.unwrap_or(next), moves, Some(cause.clone()));
            self.bury_actor(id, cause);
        }
        self.refuse_actor_if_infeasible(id);
        self.heard_of(id);
    }

    /// Whoever made an actor says what it was.
    pub(in crate::state) fn actor_was_made(&mut self, said: Absent) {
        let id = said.spec.id;
        if self.actors.knows(id) {
            if said.life > self.actors.latest_life_of(id) {
                self.has_later_life(said);
            }
            return;
        }
        match &mut self.recovering {
            // Also where nobody has told of its job yet.
            Some(recovering) => {
                let known = recovering.actors.entry(id).or_insert_with(|| said.clone());
                if known.life <= said.life {
                    let (ends, earlier) = (known.ends.take(), known.earlier);
                    *known = Absent { moves: known.moves.max(said.moves), ends, earlier, ..said };
                }
            }
            // It was not waited for, since nothing of it was known.
            None if self.jobs.contains_key(&said.spec.job) => self.lives_again(said, &BTreeMap::new()),
            None => {}
        }
    }

    /// A node that was away has brought an actor back of which a later life has begun. That may still come back, and is started again
    /// if it does not.
    pub(super) fn has_later_life(&mut self, later: Absent) {
        let id = later.spec.id;
        if self.recovering.is_none() {
            let cause = self.ended_meanwhile(&later, &BTreeMap::new());
            return self.later_life_ended(id, later.life.unwrap_or(Incarnation(0)), later.moves, cause);
        }
        let Some((watchers, left)) = self.unknow_actor(id) else { return };
        let later = Absent { ends: later.ends.or(left.ends), earlier: left.earlier, ..later };
        if later.spec.is_kept() {
            self.record(later.fact());
        }
        if let Some(recovering) = &mut self.recovering {
            recovering.actors.insert(id, later);
        }
        for watcher in watchers {
            self.watch(watcher, id);
        }
    }
}
