//! What an actor, a process, a lease or a node does, and where.

use wingbeat_core::{ActorId, LeaseId, NodeId, ProcessId};
use wingbeat_net::messages::{AwaitedTask, Explanation, Wait, WaitsFor};

use super::titles::{ago, first_of, suspicion, title};
use crate::state::actors::Standing;
use crate::state::queue::Waiter;
use crate::state::{Millis, State};

/// What an execution waits for that waits for no task.
const NO_TASK: &str = "whoever takes the items of its stream";

impl State {
    /// Which execution waits, and for what.
    pub(super) fn what_waits(&self, wait: &Wait) -> String {
        let on = wait.awaits.iter().flat_map(|one| &one.on).map(|AwaitedTask { task, callee, .. }| {
            match callee.as_ref().and_then(|callee| self.actors.spec(callee.actor)) {
                Some(spec) => {
                    let name = spec.name.as_ref().map(|name| format!(" `{}`", name.name)).unwrap_or_default();
                    format!("{task} (a call of actor {}{name})", spec.class_name)
                }
                None => task.to_string(),
            }
        });
        let on: Vec<String> = on.collect();
        let on = if on.is_empty() { NO_TASK.into() } else { first_of(on, "tasks").join(", ") };
        match wait.waits_for {
            WaitsFor::Turn => format!("{} waits for its turn at the state of its actor, which {on} has", wait.name),
            WaitsFor::Thread => format!("{} cannot go on, since {on} blocks its thread", wait.name),
            WaitsFor::Results => format!("{} waits for {on}", wait.name),
        }
    }

    /// Goes on explaining a task on a lease.
    pub fn explain_lease(&self, now: Millis, id: LeaseId, mut so_far: Explanation) -> Explanation {
        if let Some(lease) = self.leases.leases.get(&id) {
            let pid = lease.server().map_or_else(String::new, |(_, pid)| format!(", pid {pid}"));
            let held = lease.still_taken();
            so_far.reasons.push(format!(
                "{id} on {}{pid} holds {} for {}",
                self.node_title(lease.taken.node),
                self.held_by_lease(lease.taken.node, &held.resources, &held.devices),
                ago(now.saturating_sub(lease.since)),
            ));
            if let Some(node) = self.nodes.get(lease.taken.node)
                && let Some(suspicion) = suspicion(node, now)
            {
                so_far.reasons.push(format!(
                    "{} {suspicion}: what runs there is not started again before it is lost",
                    title(node)
                ));
            }
            if let Some((worker, _)) = lease.server().filter(|_| !lease.waiting.is_empty()) {
                let meanwhile = match lease.taken.bundle {
                    None => "others use its CPUs meanwhile",
                    Some(_) => "what else runs in its bundle uses its CPUs meanwhile, and nothing outside it",
                };
                let waits = self.waits.of(worker).map(|wait| format!("{}; {meanwhile}", self.what_waits(wait)));
                so_far.reasons.extend(first_of(waits.collect(), "executions"));
            }
        }
        so_far
    }

    pub(super) fn explain_actor(&self, id: ActorId) -> Option<Explanation> {
        let (spec, standing, since) = self.actors.standing(id)?;
        let name = spec.name.as_ref().map(|name| format!(" `{}`", name.name)).unwrap_or_default();
        let mut explanation = Explanation {
            subject: format!("actor {}{name} ({id})", spec.class_name),
            since_ms: Some(since),
            ..Explanation::default()
        };
        match standing {
            Standing::Pending { after } => {
                explanation.state = "waits to be placed".into();
                if let Some(cause) = after {
                    explanation.reasons.push(format!("its last life ended: {cause}"));
                }
                let shape = Self::placement_of(spec);
                self.explain_shape(Waiter::Actor(id), &shape, &mut explanation);
            }
            Standing::Awaiting { earlier } => {
                explanation.state = "waits until its last life has ended".into();
                explanation = self.explain_lease(self.now, earlier, explanation);
            }
            Standing::Resting { until, quick, after } => {
                explanation.state = format!("rests for another {}", ago(until.saturating_sub(self.now)));
                explanation.reasons.push(format!("it died {quick} times in a row soon after it was started"));
                explanation.reasons.extend(after.map(|cause| format!("its last life ended: {cause}")));
                explanation.help.push("mend what ends it; its last lines of stderr are in the cause above".into());
            }
            Standing::Starting { node, lease, has_process } => {
                explanation.state = if has_process {
                    "waits for its constructor to return".into()
                } else {
                    "waits for its worker process to start".into()
                };
                explanation = self.explain_lease(self.now, lease, explanation);
                if !has_process && self.nodes.get(node).is_some() {
                    let hint = "if it stays so, look at the log of that node's `wingbeat worker`";
                    explanation.help.push(hint.into());
                }
            }
            Standing::Alive { lease } => {
                explanation.state = "is alive".into();
                explanation = self.explain_lease(self.now, lease, explanation);
            }
            Standing::Dead { cause } => {
                explanation.state = "is dead".into();
                explanation.reasons.push(cause.to_string());
            }
        }
        Some(explanation)
    }

    pub(super) fn explain_process(&self, id: ProcessId) -> Option<Explanation> {
        let job = self.job_of(id).and_then(|job| self.jobs.get(&job));
        let name = job.map(|job| format!(" of job {}", job.spec.name)).unwrap_or_default();
        let mut explanation = Explanation { subject: format!("{id}{name}"), ..Explanation::default() };
        let mut waits = 0;
        for asker in self.leases.asked_by(id) {
            let waiter = Waiter::Tasks(asker.0, asker.1);
            let (Some(demand), Some(shape)) = (self.leases.demands.get(&asker), self.shapes.get(asker.1)) else {
                continue;
            };
            if self.queue.contains(waiter) {
                waits += 1;
                let more = demand.wanted - demand.held.len() as u32;
                explanation.reasons.push(format!("{} wants {more} more leases", demand.name));
                explanation.since_ms = explanation.since_ms.or(self.queue.since(waiter));
                self.explain_shape(waiter, shape, &mut explanation);
            } else {
                explanation.reasons.push(format!("{} has the {} leases that it wants", demand.name, demand.held.len()));
            }
        }
        explanation.state = match waits {
            0 if explanation.reasons.is_empty() => "asks for nothing".into(),
            0 => "has what it asks for".into(),
            _ => "waits for leases".into(),
        };
        (job.is_some() || self.connected.contains(&id)).then_some(explanation)
    }

    pub(super) fn explain_node(&self, id: NodeId) -> Option<Explanation> {
        let Some(node) = self.nodes.get(id) else { return self.explain_lost_node(id) };
        let mut explanation =
            Explanation { subject: title(node), state: "takes work".into(), ..Explanation::default() };
        if let Some(drain) = &node.draining {
            explanation.state = format!("is being drained ({})", drain.as_asked.why);
            explanation.reasons.push(match drain.deadline.checked_sub(self.now) {
                Some(left) if left > 0 => format!("what still runs is moved in {}", ago(left)),
                _ => "what still ran was told to end".into(),
            });
        }
        if let Some(suspicion) = suspicion(node, self.now) {
            explanation.state = suspicion;
            explanation
                .reasons
                .push("nothing new is placed there, and what runs there is not started again elsewhere yet".into());
        }
        for (device, who) in &node.held {
            explanation.reasons.push(format!("GPU {device} is given to nobody: {who}"));
        }
        explanation.holders = self.holders(&[node], &node.info.resources);
        Some(explanation)
    }

    fn explain_lost_node(&self, id: NodeId) -> Option<Explanation> {
        let lost = self.nodes.lost(id)?;
        let what_follows =
            "what ran there runs elsewhere, or has failed; a worker that is started again is another node";
        Some(Explanation {
            subject: format!("{} ({id})", lost.hostname),
            state: "is lost".into(),
            since_ms: Some(lost.at),
            reasons: vec![lost.why.clone(), what_follows.into()],
            ..Explanation::default()
        })
    }
}
