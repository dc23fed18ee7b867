//! Why something waits: from what the scheduler itself looks at.
//!
//! - `subjects`: what an actor, a process, a lease or a node does, and where; `groups`: the same of a placement group.
//! - `waiting`: what somebody waits for who has no place.
//! - `titles`: what things are called, and who holds what.
//!
//! The line of `wingbeat status` for somebody who waits is made of the same reasons as the lines of `wingbeat why`.

use wingbeat_core::spec::Shape;
use wingbeat_core::{PlacementGroupId, ProcessId};
use wingbeat_net::messages::{Explanation, Subject};

use super::processes::the_one_with_pid;
use super::queue::{Hold, Waiter};
use super::shapes::ShapeId;
use super::{Millis, State};

mod groups;
mod subjects;
mod titles;
mod waiting;

pub(super) use titles::{suspicion, title};
use waiting::{USE_UNKNOWN, journal_fails};

impl State {
    /// Why something waits, or where it runs. None for what this head does not know.
    pub fn explain(&mut self, now: Millis, subject: Subject) -> Option<Explanation> {
        // Nothing may have happened for long.
        self.now = self.now.max(now);
        let mut explanation = match subject {
            Subject::Actor(id) => self.explain_actor(id)?,
            Subject::PlacementGroup(id) => self.explain_group(id)?,
            Subject::Node(id) => self.explain_node(id)?,
            Subject::Process(id) => self.explain_process(id)?,
            Subject::Pid(pid, node) => {
                self.explain_process(the_one_with_pid(pid, &self.processes_with_pid(pid, node)).ok()??.0)?
            }
            // Its owner knows it.
            Subject::Task(_) => return None,
        };
        explanation.since_ms = explanation.since_ms.map(|since| now.saturating_sub(since));
        Some(explanation)
    }

    /// Goes on explaining a task that waits for a lease of this shape.
    pub fn explain_demand(
        &mut self,
        now: Millis,
        process: ProcessId,
        shape: &Shape,
        mut so_far: Explanation,
    ) -> Explanation {
        self.now = self.now.max(now);
        let Some(id) = self.shapes.id_of(shape) else {
            so_far.reasons.push("the head has not heard of it yet; ask again".into());
            return so_far;
        };
        let waiter = Waiter::Tasks(process, id);
        if self.queue.contains(waiter) {
            so_far.since_ms = so_far.since_ms.or(self.queue.since(waiter).map(|since| now.saturating_sub(since)));
            self.explain_shape(waiter, shape, &mut so_far);
            return so_far;
        }
        match self.leases.demands.get(&(process, id)) {
            Some(demand) => {
                let starting = demand.held.iter().filter_map(|lease| self.leases.leases.get(lease));
                let starting = starting.filter(|lease| lease.server().is_none()).count();
                so_far.reasons.push(match starting {
                    0 => format!("{} leases were granted, and it is queued for one of them", demand.held.len()),
                    count => format!("{count} leases were granted, and their worker processes are being started"),
                });
            }
            None => so_far.reasons.push("the head has not heard of it yet; ask again".into()),
        }
        so_far
    }

    /// What holds a waiter back besides room, in one line; none if nothing does.
    pub(super) fn hold_in_short(&self, waiter: Waiter) -> Option<String> {
        if let Some(why) = &self.cannot_write {
            return Some(journal_fails(why));
        }
        match self.queue.held_back(waiter)? {
            Hold::Quota(_) if self.quotas.is_use_unknown => Some(USE_UNKNOWN.to_owned()),
            Hold::Quota(namespace) => {
                let quota = self.quotas.get(namespace)?;
                Some(format!("namespace `{namespace}` may hold {} at a time, and holds {}", quota.limit, quota.used))
            }
            Hold::UnknownJob(process) => Some(format!("the node of {process} has not yet said that it runs")),
        }
    }

    /// What those who ask for a shape wait for, in one line.
    pub(super) fn shape_in_short(&self, waiter: Waiter, shape: ShapeId) -> String {
        let Some(shape) = self.shapes.get(shape) else { return String::new() };
        let mut explanation = Explanation::default();
        match shape.bundle() {
            Some((group, index)) => {
                explanation.reasons.push(format!("asks for {shape}"));
                self.explain_bundle(group, index, shape, &mut explanation);
            }
            None => drop(self.explain_places(waiter, shape, &mut explanation)),
        }
        explanation.reasons.join("; ")
    }

    /// What a group waits for, in one line.
    pub(super) fn group_in_short(&self, id: PlacementGroupId) -> String {
        self.explain_group(id).unwrap_or_default().reasons.join("; ")
    }
}
