//! Jobs: the sessions of drivers, and what is left of them.

use std::collections::BTreeSet;
use std::sync::Arc;

use wingbeat_core::spec::{Executable, JobSpec};
use wingbeat_core::{JobId, NodeId, ProcessId, ResourceSet};
use wingbeat_net::messages::NodeMessage;

use super::{Fact, Millis, State};

/// A driver's session.
pub(super) struct Job {
    pub(super) spec: Arc<JobSpec>,
    /// When this head first knew of it.
    pub(super) began: Millis,
    /// The driver is gone; it is known as long as something of it is left.
    pub(super) is_over: bool,
    /// Leases, living actors and placement groups.
    pub(super) holds: u32,
    /// Living detached actors, which need its program also when it is over.
    pub(super) detached: u32,
    /// Nodes that were told of its end, and may have kept it for a detached actor.
    pub(super) ended_on: BTreeSet<NodeId>,
    /// What its leases and placement groups hold, and how much of the cluster that is: see [`State::share_of`].
    pub(super) used: ResourceSet,
    pub(super) share: u64,
}

impl State {
    pub(super) fn job_joined(&mut self, spec: JobSpec) {
        let count = 4;
        let (id, driver, machine) = (spec.id, spec.driver.process, spec.driver.machine);
        self.record(Fact::Job(Box::new(spec.without_local()), true));
        self.insert_job(spec);
        for (node, cpus) in self.nodes.on_machine(machine) {
            if cpus > 0 {
                self.tell_of_job(node, id);
                self.order(node, NodeMessage::Prestart { job: id, count: cpus.min(count) });
            }
        }
        self.job_is_known(driver);
    }

    pub(super) fn insert_job(&mut self, spec: JobSpec) {
        self.drivers.insert(spec.driver.process, spec.id);
        let id = spec.id;
        let spec = Arc::new(spec);
        match self.jobs.get_mut(&id) {
            Some(job) => {
                (job.spec, job.is_over) = (spec, false);
                job.ended_on.clear();
            }
            None => {
                let job = Job {
                    spec,
                    began: self.now,
                    is_over: false,
                    holds: 0,
                    detached: 0,
                    ended_on: BTreeSet::new(),
                    used: ResourceSet::new(),
                    share: 0,
                };
                self.jobs.insert(id, job);
            }
        }
    }

    /// Since when a job's requests count as possible that a node could have held which is gone now.
    pub(super) fn job_began(&self, job: Option<JobId>) -> Millis {
        job.and_then(|job| self.jobs.get(&job)).map_or(0, |job| job.began)
    }

    /// A detached actor of a job began or ended.
    pub(super) fn job_detached(&mut self, id: JobId, change: i32) {
        let Some(job) = self.jobs.get_mut(&id) else { return };
        let before = job.detached;
        job.detached = before.saturating_add_signed(change);
        if (before == 0) != (job.detached == 0) {
            self.programs_version += 1;
        }
    }

    /// Changes whenever [`State::programs`] may have.
    pub fn programs_version(&self) -> u64 {
        self.programs_version
    }

    /// The hashes of the programs that detached actors need to live again.
    pub fn programs(&self) -> BTreeSet<String> {
        let recovering = self.recovering.iter().flat_map(|recovering| recovering.detached());
        let recovering = recovering.filter_map(|job| self.jobs.get(&job));
        let living = self.jobs.values().filter(|job| job.detached > 0);
        living.chain(recovering).map(|job| job.spec.executable.hash.clone()).collect()
    }

    /// The program of a job.
    pub fn program_of(&self, job: JobId) -> Option<Executable> {
        self.jobs.get(&job).map(|job| job.spec.executable.clone())
    }

    /// Whether the programs of two jobs differ, where both are known.
    pub(super) fn are_of_two_builds(&self, one: JobId, other: JobId) -> bool {
        let build = |job| self.jobs.get(&job).map(|job| &job.spec.executable.hash);
        matches!((build(one), build(other)), (Some(one), Some(other)) if one != other)
    }

    /// Whether the driver of a job is there, or may come back.
    pub(crate) fn is_job_running(&self, job: JobId) -> bool {
        self.jobs.get(&job).is_some_and(|job| !job.is_over)
    }

    pub(super) fn job_priority(&self, job: JobId) -> i32 {
        self.jobs.get(&job).map_or(0, |job| job.spec.priority)
    }

    /// Something of a job began or ended.
    pub(super) fn job_holds(&mut self, id: JobId, change: i32) {
        if let Some(job) = self.jobs.get_mut(&id) {
            job.holds = job.holds.saturating_add_signed(change);
        }
        self.forget_job_if_over(id);
    }

    pub(super) fn forget_job_if_over(&mut self, id: JobId) {
        if self.jobs.get(&id).is_some_and(|job| job.is_over && job.holds == 0)
            // What it holds may still come back.
            && self.recovering.is_none()
            && let Some(job) = self.jobs.remove(&id)
        {
            self.drivers.remove(&job.spec.driver.process);
            self.unfit.forget_job(id);
            self.record(Fact::JobGone(id));
            // Those that kept it for a detached actor, or heard of it only then.
            for node in self.nodes.ids() {
                let knows = self.nodes.get(node).is_some_and(|node| node.jobs.contains(&id));
                if knows {
                    self.nodes.change(node, |node| node.jobs.remove(&id));
                }
                if knows || job.ended_on.contains(&node) {
                    self.order(node, NodeMessage::EndJob { job: id });
                }
            }
        }
    }

    /// A node hears of a job before it hears of its first lease.
    pub(super) fn tell_of_job(&mut self, node: NodeId, job: JobId) {
        let is_new = self.nodes.get(node).is_some_and(|node| !node.jobs.contains(&job));
        if is_new && let Some(spec) = self.jobs.get(&job).map(|job| job.spec.clone()) {
            let is_local = self.nodes.get(node).is_some_and(|node| node.info.address.machine == spec.driver.machine);
            let spec = if is_local { spec } else { Arc::new(spec.without_local()) };
            self.nodes.change(node, |node| node.jobs.insert(job));
            self.order(node, NodeMessage::BeginJob(spec));
        }
    }

    /// The driver of a job.
    pub fn driver_of(&self, job: JobId) -> Option<ProcessId> {
        self.jobs.get(&job).map(|job| job.spec.driver.process)
    }

    /// Whether a process is the driver of a job that is over: what it had was ended.
    pub(crate) fn is_job_of_over(&self, driver: ProcessId) -> bool {
        let job = self.drivers.get(&driver).and_then(|job| self.jobs.get(job));
        job.is_some_and(|job| job.is_over)
    }
}
