//! What becomes of tasks in flight when their process, the contact with it, or its node is gone.

use std::collections::HashSet;

use wingbeat_core::error::Error;
use wingbeat_core::spec::{Arg, TaskSpec};
use wingbeat_core::{LeaseId, NodeId, ObjectId, ProcessId};
use wingbeat_net::messages::WorkerDeath;

use super::attempts::After;
use super::leases::Phase;
use super::{Action, Dispatch};

/// When contact with a worker process is lost and no exit is reported within this time, the connection broke and the process
/// may live: its lease is returned, and its tasks are tried again elsewhere.
pub(crate) const CAUSE_LIMIT_MS: u64 = 5_000;

/// An argument of which the task knows dead nodes alone.
pub(super) fn lost_argument(spec: &TaskSpec, dead: &HashSet<NodeId>) -> Option<ObjectId> {
    if dead.is_empty() {
        return None;
    }
    spec.args.iter().find_map(|arg| match arg {
        Arg::Stored(id, stored) if !stored.nodes.is_empty() => {
            stored.nodes.iter().all(|holder| dead.contains(&holder.node)).then_some(*id)
        }
        _ => None,
    })
}

impl Dispatch {
    /// The connection to a process ended.
    pub(crate) fn connection_lost(&mut self, worker: ProcessId, now_ms: u64, out: &mut Vec<Action>) {
        let Some(id) = self.by_worker.get(&worker).copied() else { return };
        let Some(lease) = self.leases.change(id) else { return };
        let death = lease.death.take();
        self.leases.lose(id, now_ms);
        if let Some(death) = death {
            self.bury(id, Some(death), now_ms, out);
        }
    }

    /// The head says how a worker process ended. Acted upon once the connection has ended too, so that
    /// results which are still on their way count.
    pub(crate) fn worker_died(&mut self, death: WorkerDeath, now_ms: u64, out: &mut Vec<Action>) {
        let Some(id) = self.by_worker.get(&death.process).copied() else { return };
        let Some(lease) = self.leases.change(id) else { return };
        if matches!(lease.phase, Phase::Lost { .. }) {
            self.bury(id, Some(death), now_ms, out);
        } else {
            lease.death = Some(death);
        }
    }

    /// Settles all tasks in flight on a lost lease: unstarted ones are queued again for free, the others cost a retry or
    /// fail. Without a reported death the process may live, and the head still counts the lease: it is returned, and where
    /// something may still run there, the process is to end, or the next owner's tasks would wait behind that.
    pub(super) fn bury(&mut self, id: LeaseId, death: Option<WorkerDeath>, now_ms: u64, out: &mut Vec<Action>) {
        let Some(lease) = self.give_up(id) else { return };
        if death.is_none() {
            out.push(match lease.in_flight.is_empty() {
                true => Action::Return { lease: id },
                false => Action::Abandon { lease: id },
            });
        }
        let started = death.as_ref().map_or(u64::MAX, |death| death.started);
        let is_moved = death.as_ref().is_some_and(|death| death.is_moved);
        for (seq, task) in lease.in_flight.into_iter().rev() {
            if seq < started {
                out.push(Action::Left { task: task.spec.id, outputs: task.spec.outputs, at: lease.grant.node.clone() });
            }
            if task.cancelled {
                let error = Error::Cancelled { task: task.name.to_string() };
                out.push(Action::Fail { task, error });
                continue;
            }
            let has_begun = seq < started;
            if self.session_over.is_none() && (!has_begun || is_moved && !task.runs_at_most_once()) {
                self.again(task, if has_begun { After::Move } else { After::Nothing });
                continue;
            }
            let error = match &death {
                Some(death) => death.exit.clone().into_error(task.name.to_string(), death.process, death.pid),
                None => Error::ContactLost {
                    what: task.name.to_string(),
                    who: format!("worker process {} on {}", lease.grant.pid, lease.grant.node.node),
                    why: format!("no exit was reported within {} s", CAUSE_LIMIT_MS / 1000),
                    attempts: 1,
                },
            };
            if self.may_retry(&task, &error) {
                self.failed(task, error, now_ms);
            } else {
                out.push(Action::Fail { task, error });
            }
        }
    }

    /// A node is gone with all its leases. Where a worker process is known to have ended before, that is the cause, and it
    /// is acted upon as soon as the connection has ended: what was moved away from the node has not failed.
    pub(crate) fn node_died(&mut self, node: NodeId, why: &str, now_ms: u64, out: &mut Vec<Action>) {
        self.dead_nodes.insert(node);
        let there = self.leases.iter().filter(|lease| lease.grant.node.node == node && lease.death.is_none());
        let lost: Vec<LeaseId> = there.map(|lease| lease.grant.lease).collect();
        for id in lost {
            let Some(lease) = self.give_up(id) else { continue };
            for (_, task) in lease.in_flight.into_iter().rev() {
                let error = match task.cancelled {
                    true => Error::Cancelled { task: task.name.to_string() },
                    false => Error::NodeDied { what: task.name.to_string(), node, why: why.to_owned(), attempts: 1 },
                };
                if self.may_retry(&task, &error) {
                    self.failed(task, error, now_ms);
                } else {
                    out.push(Action::Fail { task, error });
                }
            }
        }
    }

    /// Whether it waits for the cause of a lost connection.
    pub(crate) fn waits_for_causes(&self) -> bool {
        !self.leases.lost().is_empty()
    }

    /// There is no head that could have told a cause: the time for that begins anew.
    pub(crate) fn no_cause_is_told(&mut self, now_ms: u64) {
        for id in self.leases.lost().clone() {
            if let Some(lease) = self.leases.change(id) {
                lease.phase = Phase::Lost { since_ms: now_ms };
            }
        }
    }
}
