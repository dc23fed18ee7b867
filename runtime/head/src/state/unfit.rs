//! Nodes on which the program of a job cannot be started, as it seems: a library is missing there, or it has no room for more processes. If
//! another could serve what has failed there, such a node is given nothing of the job for some time, so that it does not fail what others run well.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use wingbeat_core::error::Error;
use wingbeat_core::{JobId, NodeId};

use super::nodes::{Node, requirements_of};
use super::queue::Waiter;
use super::{Millis, State};

/// Failures to start a worker process, one after another, after which a node rests, or where no other could serve, what was to run there fails.
pub(super) const GIVE_UP_AFTER: u32 = 3;
/// Failures since the last start that succeeded, wherever they were, after which what was to run fails: nowhere may it start, or those that
/// could serve it are busy for long.
const MOST_TRIES: u32 = 10;
/// For how long a node is given nothing of a job. Then it is tried again, and one failure is enough.
const REST: Millis = 30_000;

/// A node and a job, since a start has failed and until one succeeds.
struct Trouble {
    failures: u32,
    /// Until when it is given nothing.
    rests_until: Option<Millis>,
    why: String,
}

/// All of them. They end with the node or the job, or when a worker process is ready there.
#[derive(Default)]
pub(super) struct Unfit {
    troubles: BTreeMap<(JobId, NodeId), Trouble>,
    rests: BTreeSet<(Millis, JobId, NodeId)>,
}

impl Unfit {
    /// Whether nobody is kept from any node.
    pub(super) fn is_empty(&self) -> bool {
        self.rests.is_empty()
    }

    /// Whether a node is given nothing of a job for now.
    pub(super) fn rests(&self, node: NodeId, job: JobId) -> bool {
        self.troubles.get(&(job, node)).is_some_and(|trouble| trouble.rests_until.is_some())
    }

    /// One more failure: how many there were.
    fn fails(&mut self, node: NodeId, job: JobId, error: &Error) -> u32 {
        let none = || Trouble { failures: 0, rests_until: None, why: String::new() };
        let trouble = self.troubles.entry((job, node)).or_insert_with(none);
        trouble.failures += 1;
        trouble.why = error.to_string();
        trouble.failures
    }

    fn rest(&mut self, node: NodeId, job: JobId, until: Millis) {
        if let Some(trouble) = self.troubles.get_mut(&(job, node))
            && trouble.rests_until.is_none()
        {
            trouble.rests_until = Some(until);
            self.rests.insert((until, job, node));
        }
    }

    /// A worker process of the job is ready there. Whether the node rested for it until now.
    fn works(&mut self, node: NodeId, job: JobId) -> bool {
        let rests_until = self.troubles.remove(&(job, node)).and_then(|trouble| trouble.rests_until);
        rests_until.is_some_and(|until| self.rests.remove(&(until, job, node)))
    }

    pub(super) fn forget_node(&mut self, node: NodeId) {
        self.troubles.retain(|(_, at), _| *at != node);
        self.rests.retain(|(_, _, at)| *at != node);
    }

    pub(super) fn forget_job(&mut self, job: JobId) {
        self.troubles.retain(|(of, _), _| *of != job);
        self.rests.retain(|(_, of, _)| *of != job);
    }

    /// When the next may be tried again.
    pub(super) fn rest_ends(&self) -> Option<Millis> {
        self.rests.first().map(|(until, ..)| *until)
    }

    /// Those that may be tried again by now.
    fn rested(&mut self, now: Millis) -> Vec<NodeId> {
        let mut nodes = Vec::new();
        while let Some((_, job, node)) = self.rests.first().copied().filter(|(until, ..)| *until <= now) {
            self.rests.pop_first();
            if let Some(trouble) = self.troubles.get_mut(&(job, node)) {
                trouble.rests_until = None;
            }
            nodes.push(node);
        }
        nodes
    }
}

impl State {
    /// In whose name somebody waits for a process.
    pub(super) fn job_of_waiter(&self, waiter: Waiter) -> Option<JobId> {
        match waiter {
            // Of a process whose node is lost the job is known no more, and what it has asked for still waits in its name.
            Waiter::Tasks(process, _) => {
                self.job_of(process).or_else(|| self.queue.standing(waiter).and_then(|standing| standing.job))
            }
            Waiter::Actor(actor) => self.actors.spec(actor).map(|spec| spec.job),
            // Nothing is started for it.
            Waiter::Group(_) => None,
        }
    }

    /// Whether a node is given nothing of the waiter's job for now.
    pub(super) fn is_unfit(&self, node: &Node, waiter: Waiter) -> bool {
        !self.unfit.is_empty() && self.job_of_waiter(waiter).is_some_and(|job| self.unfit.rests(node.info.id, job))
    }

    /// Whether a start that has failed was under way when its node began to rest, and says nothing that was not known: so many may have been at a
    /// time that nothing was ready elsewhere before they had failed.
    pub(super) fn was_under_way(&self, node: NodeId, waiter: Waiter) -> bool {
        let rests = self.job_of_waiter(waiter).is_some_and(|job| self.unfit.rests(node, job));
        rests && self.another_could_serve(node, waiter)
    }

    /// A worker process could not be started for a waiter, which has seen so many failures since the last that could be. Whether it is tried
    /// again, here or elsewhere.
    pub(super) fn start_failed(&mut self, node: NodeId, waiter: Waiter, seen: u32, error: &Error) -> bool {
        let Some(job) = self.job_of_waiter(waiter) else { return seen < GIVE_UP_AFTER };
        if self.unfit.fails(node, job, error) < GIVE_UP_AFTER {
            return seen < MOST_TRIES;
        }
        let may_go_elsewhere = self.another_could_serve(node, waiter);
        if may_go_elsewhere {
            self.unfit.rest(node, job, self.now + REST);
        }
        seen < if may_go_elsewhere { MOST_TRIES } else { GIVE_UP_AFTER }
    }

    /// Whether there is another node that could serve it, and does not rest for it.
    pub(super) fn another_could_serve(&self, node: NodeId, waiter: Waiter) -> bool {
        let shape = match waiter {
            Waiter::Tasks(_, id) => self.shapes.get(id).cloned(),
            Waiter::Actor(actor) => self.actors.spec(actor).map(|spec| Arc::new(Self::placement_of(spec))),
            Waiter::Group(_) => None,
        };
        let Some(shape) = shape.filter(|shape| shape.bundle().is_none()) else { return false };
        let requirements = requirements_of(&shape);
        let could = |other: &Node| other.could_serve(&shape, requirements.iter()) && !self.is_unfit(other, waiter);
        self.nodes.iter().any(|other| other.info.id != node && could(other))
    }

    /// A worker process of the job is ready on the node: it may have more.
    pub(super) fn starts_on(&mut self, node: NodeId, job: JobId) {
        if self.unfit.works(node, job) {
            self.freed_on(node);
        }
    }

    /// What has rested for long enough is tried again.
    pub(super) fn end_rests_of_nodes(&mut self) {
        for node in self.unfit.rested(self.now) {
            self.freed_on(node);
        }
    }

    /// Why a node is given nothing of the waiter's job, in words.
    pub(super) fn why_unfit(&self, node: &Node, waiter: Waiter) -> Option<String> {
        let trouble = self.unfit.troubles.get(&(self.job_of_waiter(waiter)?, node.info.id))?;
        let until = trouble.rests_until?;
        Some(format!(
            "could not start the program, {} times, and is tried again in {} s: {}",
            trouble.failures,
            until.saturating_sub(self.now).div_ceil(1_000),
            trouble.why
        ))
    }
}
