//! Worker processes, and where they run.

use std::collections::{BTreeMap, BTreeSet};

use wingbeat_core::{ActorId, JobId, LeaseId, NodeId, ProcessId};

use super::State;
use super::actors::Standing;
use super::lease::Lease;

impl State {
    /// The worker process of a lease, once there is one, and its node.
    #[must_use]
    pub fn process_of_lease(&self, lease: LeaseId) -> Option<(ProcessId, NodeId)> {
        let lease = self.leases.leases.get(&lease)?;
        Some((lease.server()?.0, lease.taken.node))
    }

    /// The node of a worker process that serves a lease.
    #[must_use]
    pub fn node_of_process(&self, process: ProcessId) -> Option<NodeId> {
        let serves = |lease: &&Lease| lease.server().is_some_and(|(worker, _)| worker == process);
        self.leases.leases.values().find(serves).map(|lease| lease.taken.node)
    }

    /// The process of an actor that lives.
    #[must_use]
    pub fn process_of_actor(&self, actor: ActorId) -> Option<(ProcessId, NodeId)> {
        match self.actors.standing(actor)?.1 {
            Standing::Starting { lease, .. } | Standing::Alive { lease } => self.process_of_lease(lease),
            _ => None,
        }
    }

    /// The worker processes that run something of a job, but for those of its detached actors, which outlive it. None if there is no such job.
    #[must_use]
    pub fn processes_of_job(&self, id: JobId) -> Option<Vec<ProcessId>> {
        self.jobs.get(&id)?;
        let rows = self.actors.rows_after(None).filter(|row| row.spec.job == id && row.spec.detached);
        let detached = rows.filter_map(|row| self.process_of_actor(row.spec.id)).map(|(process, _)| process);
        let detached: BTreeSet<ProcessId> = detached.collect();
        let leases = self.leases.leases.values().filter(|lease| lease.job == id);
        let processes: BTreeSet<ProcessId> = leases.filter_map(|lease| Some(lease.server()?.0)).collect();
        Some(processes.difference(&detached).copied().collect())
    }

    /// The worker processes with this process id, which each machine gives out for itself, and their nodes.
    pub fn processes_with_pid(&self, pid: u32, on: Option<NodeId>) -> BTreeMap<ProcessId, NodeId> {
        let leases = self.leases.leases.values().filter(|lease| on.is_none_or(|node| lease.taken.node == node));
        let found = leases
            .filter_map(|lease| lease.server().filter(|(_, other)| *other == pid).map(|(process, _)| (process, lease)));
        found.map(|(process, lease)| (process, lease.taken.node)).collect()
    }
}

/// The only one of these, if there is one.
///
/// # Errors
/// There are several, on several nodes; in words.
pub(crate) fn the_one_with_pid(
    pid: u32,
    found: &BTreeMap<ProcessId, NodeId>,
) -> Result<Option<(ProcessId, NodeId)>, String> {
    if found.len() > 1 {
        let nodes: Vec<String> = found.values().map(|node| format!("{pid}@{node}")).collect();
        let which = nodes.join(" or ");
        return Err(format!("processes of several nodes have the process id {pid}; name one as {which}"));
    }
    Ok(found.iter().next().map(|(process, node)| (*process, *node)))
}
