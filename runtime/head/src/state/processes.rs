//! Drivers and worker processes: who is connected, what they work for, where they run, and what ends with them.

use std::collections::{BTreeMap, BTreeSet};

use wingbeat_core::{ActorId, JobId, LeaseId, NodeId, ProcessId};
use wingbeat_net::messages::NodeMessage;

use super::actors::Standing;
use super::lease::Lease;
use super::queue::Hold;
use super::{Fact, State};

impl State {
    pub(super) fn worker_known(&mut self, worker: ProcessId, job: JobId, node: NodeId) {
        if self.worker_jobs.insert(worker, (job, node)).is_none() {
            self.job_is_known(worker);
        }
    }

    /// For which job a process works is known now.
    pub(super) fn job_is_known(&mut self, process: ProcessId) {
        self.queue.unpark(&Hold::UnknownJob(process));
        for asker in self.leases.asked_by(process) {
            self.requeue(&asker);
        }
    }

    pub(super) fn job_of(&self, process: ProcessId) -> Option<JobId> {
        self.drivers.get(&process).copied().or_else(|| self.worker_jobs.get(&process).map(|(job, _)| *job))
    }

    pub(super) fn process_lost(&mut self, process: ProcessId, job: Option<JobId>) {
        self.connected.remove(&process);
        self.waits.forget_process(process);
        self.actors.unwatch(process);
        self.groups.unwatch(process);
        if let Some(recovering) = &mut self.recovering {
            recovering.process_lost(process);
        }
        if let Some(unheard) = &mut self.unheard {
            unheard.process_lost(process);
        }
        for asker in self.leases.asked_by(process) {
            let Some(demand) = self.leases.demands.get_mut(&asker) else { continue };
            demand.wanted = 0;
            let held = demand.held.clone();
            for lease in held {
                // Under one that was never granted nothing runs, and its process may own what others need.
                let is_granted = self.leases.leases.get(&lease).is_some_and(|lease| lease.server().is_some());
                self.end_lease(lease, is_granted.then(|| "its owner is gone".into()));
            }
            self.requeue(&asker);
        }
        self.actors_orphaned_by(process);
        self.groups_orphaned_by(process);
        let Some(id) = job else { return };
        if self.jobs.get(&id).is_none_or(|job| job.spec.driver.process != process || job.is_over) {
            return;
        }
        self.departed.insert(process, Some(id));
        self.actors_of_job_end(id);
        self.groups_of_job_end(id);
        let mut ended_on = BTreeSet::new();
        for node in self.nodes.ids() {
            let knows = self.nodes.get(node).is_some_and(|node| node.jobs.contains(&id));
            if knows {
                self.nodes.change(node, |node| node.jobs.remove(&id));
                self.order(node, NodeMessage::EndJob { job: id });
                ended_on.insert(node);
            }
        }
        if let Some(job) = self.jobs.get_mut(&id) {
            job.is_over = true;
            job.ended_on = ended_on;
            let spec = Box::new(job.spec.without_local());
            self.record(Fact::Job(spec, false));
        }
        self.forget_job_if_over(id);
    }

    /// Whether a process has a connection to this head.
    pub fn is_connected(&self, process: ProcessId) -> bool {
        self.connected.contains(&process)
    }

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
