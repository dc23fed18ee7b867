//! All worker processes of a node, by what can be asked of them.

use std::collections::{BTreeMap, BTreeSet};

use wingbeat_core::memory::MemoryShortage;
use wingbeat_core::{JobId, LeaseId, ProcessId};

use crate::clock::Millis;
use crate::stage::{Assignment, Effect, Event, Stage};

pub(crate) struct Worker {
    pub job: JobId,
    pub gpus: Vec<u32>,
    /// Changed by [`Workers::apply`] alone, which keeps the indices right.
    stage: Stage,
    /// 0 until the guard has started it.
    pub pid: u32,
    /// Whether it has served a lease of tasks: it may own objects that others read, and an actor ends with its process.
    has_worked: bool,
    /// Something runs on there that a task has left behind which is over.
    has_leftovers: bool,
    /// Since when it has not taken in the orders of this lease.
    pub ordered: Option<(LeaseId, Millis)>,
    /// Why we ended it.
    pub reason: Option<String>,
    /// That memory was short, if that is why it ends.
    pub shortage: Option<Box<MemoryShortage>>,
}

impl Worker {
    pub(crate) fn new(now: Millis, job: JobId, gpus: Vec<u32>, assignment: Option<Assignment>) -> Worker {
        let stage = Stage::launching(now, assignment);
        Worker {
            job,
            gpus,
            stage,
            pid: 0,
            has_worked: false,
            has_leftovers: false,
            ordered: None,
            reason: None,
            shortage: None,
        }
    }

    pub(crate) fn stage(&self) -> &Stage {
        &self.stage
    }

    pub(crate) fn has_leftovers(&self) -> bool {
        self.has_leftovers
    }

    fn is_free(&self) -> bool {
        self.stage.is_free() && !self.has_leftovers
    }
}

/// What a lease asks of a worker process: its job, and the devices that it sees.
type Kind = (JobId, Vec<u32>);

#[derive(Default)]
pub(crate) struct Workers {
    all: BTreeMap<ProcessId, Worker>,
    /// Who serves or will serve a lease, until the end of the lease is reported.
    by_lease: BTreeMap<LeaseId, ProcessId>,
    /// Who can take a lease of a job with these devices: whether it is still starting, and whether it has done nothing yet.
    free: BTreeMap<Kind, BTreeSet<Free>>,
}

type Free = (bool, bool, ProcessId);

impl Workers {
    pub(crate) fn insert(&mut self, process: ProcessId, worker: Worker) {
        self.all.insert(process, worker);
        self.index(process);
    }

    pub(crate) fn get(&self, process: ProcessId) -> Option<&Worker> {
        self.all.get(&process)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (ProcessId, &Worker)> {
        self.all.iter().map(|(process, worker)| (*process, worker))
    }

    /// Notes something of a worker process but its stage.
    pub(crate) fn note(&mut self, process: ProcessId, change: impl FnOnce(&mut Worker)) {
        if let Some(worker) = self.all.get_mut(&process) {
            change(worker);
        }
    }

    /// The worker process that can take a lease soonest. One that has done nothing yet is kept for an actor, if another can.
    pub(crate) fn free_for(&self, job: JobId, gpus: &[u32], is_actor: bool) -> Option<ProcessId> {
        let free = self.free.get(&(job, gpus.to_vec()))?;
        // Those that are starting have done nothing.
        let mut fit = free.range((false, is_actor, ProcessId(0))..);
        fit.next().map(|(_, _, process)| *process)
    }

    /// Who serves the lease, or has served it and its end is not reported yet.
    pub(crate) fn server_of(&self, lease: LeaseId) -> Option<ProcessId> {
        self.by_lease.get(&lease).copied()
    }

    /// A task that is over has left something behind there, or nothing of that is left.
    pub(crate) fn left_behind(&mut self, process: ProcessId, is_left: bool) {
        self.unindex(process);
        self.note(process, |worker| worker.has_leftovers = is_left);
        self.index(process);
    }

    /// Changes the stage of a worker process. One that is unknown has no stage.
    #[must_use]
    pub(crate) fn apply(&mut self, process: ProcessId, event: Event, now: Millis) -> Vec<Effect> {
        self.unindex(process);
        let Some(worker) = self.all.get_mut(&process) else { return Vec::new() };
        let stage = std::mem::replace(&mut worker.stage, Stage::Gone);
        let (stage, effects) = stage.after(event, now);
        if matches!(stage, Stage::Gone) {
            self.all.remove(&process);
        } else {
            let serves = matches!(&stage, Stage::Leased { assignment, .. } if !assignment.is_actor());
            worker.has_worked |= serves;
            worker.stage = stage;
            self.index(process);
        }
        effects
    }

    pub(crate) fn assignment_mut(&mut self, process: ProcessId) -> Option<&mut Assignment> {
        self.all.get_mut(&process)?.stage.assignment_mut()
    }

    fn index(&mut self, process: ProcessId) {
        let Some(worker) = self.all.get(&process) else { return };
        if let Some(assignment) = worker.stage.assignment() {
            self.by_lease.insert(assignment.lease(), process);
        }
        if worker.is_free() {
            let free = self.free.entry((worker.job, worker.gpus.clone())).or_default();
            free.insert((worker.stage.is_launching(), !worker.has_worked, process));
        }
    }

    fn unindex(&mut self, process: ProcessId) {
        let Some(worker) = self.all.get(&process) else { return };
        if let Some(assignment) = worker.stage.assignment() {
            self.by_lease.remove(&assignment.lease());
        }
        if worker.is_free() {
            let key = (worker.job, worker.gpus.clone());
            if let Some(free) = self.free.get_mut(&key) {
                free.remove(&(worker.stage.is_launching(), !worker.has_worked, process));
                if free.is_empty() {
                    self.free.remove(&key);
                }
            }
        }
    }
}
