//! The worker processes of a node, what they work for, and the jobs that they are of.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use tokio::sync::OwnedSemaphorePermit;
use wingbeat_core::error::Error;
use wingbeat_core::limits::limit;
use wingbeat_core::spec::JobSpec;
use wingbeat_core::{ActorId, Incarnation, JobId, LeaseId, ProcessId};
use wingbeat_net::link::Link;
use wingbeat_net::messages::{HeadMessage, LeaseHolder, LogLine, RunningLease, WorkerCommand};

use super::lifecycle::{Assignment, Effect, Event, Stage};
use super::{Daemon, output};
use crate::page::Page;

/// Idle worker processes beyond the node's CPUs end after this long: starting one takes milliseconds,
/// and each holds a few megabytes. 20 s, `WINGBEAT_IDLE_MS`.
static IDLE_LIMIT: LazyLock<Duration> = LazyLock::new(|| limit("WINGBEAT_IDLE_MS", Duration::from_secs(20)));
/// How often idle processes and freed memory are looked at. Besides, only probes wake an idle daemon. 2 s,
/// `WINGBEAT_HOUSEKEEPING_MS`.
static HOUSEKEEPING: LazyLock<Duration> = LazyLock::new(|| limit("WINGBEAT_HOUSEKEEPING_MS", Duration::from_secs(2)));
/// A worker process that has not reported so long after its start never will: 60 s, `WINGBEAT_START_MS`.
static START_LIMIT: LazyLock<Duration> = LazyLock::new(|| limit("WINGBEAT_START_MS", Duration::from_secs(60)));

pub(super) struct Worker {
    pub job: JobId,
    pub gpus: Vec<u32>,
    /// Changed by [`Pool::apply`] alone, which keeps the indices of the pool right.
    stage: Stage,
    /// 0 until the guard has started it.
    pub pid: u32,
    /// Those who used its devices before it was started.
    pub users_before: BTreeSet<u32>,
    pub page: Arc<Page>,
    pub output: output::Tail,
    /// Why we ended it.
    pub reason: Option<String>,
    /// Its part of the launches that may be under way; until the guard has answered.
    pub launch: Option<OwnedSemaphorePermit>,
}

impl Worker {
    pub(super) fn new(job: JobId, gpus: Vec<u32>, assignment: Option<Assignment>, page: Arc<Page>) -> Worker {
        Worker {
            job,
            gpus,
            stage: Stage::launching(Instant::now(), assignment),
            pid: 0,
            users_before: BTreeSet::new(),
            page,
            output: output::Tail::default(),
            reason: None,
            launch: None,
        }
    }

    pub(super) fn stage(&self) -> &Stage {
        &self.stage
    }

    /// Its stage, once it is no part of a pool any more.
    pub(super) fn into_stage(self) -> Stage {
        self.stage
    }
}

/// What a lease asks of a worker process: its job, and the devices that it sees.
type Kind = (JobId, Vec<u32>);

#[derive(Default)]
pub(super) struct Pool {
    pub workers: BTreeMap<ProcessId, Worker>,
    pub jobs: BTreeMap<JobId, Job>,
    /// Who serves or will serve a lease. An entry stays until the end of the lease is reported, which is after its worker
    /// process was removed where devices must be waited for.
    by_lease: BTreeMap<LeaseId, ProcessId>,
    /// Who can take a lease of a job with these devices; first those that have reported, then those that are starting.
    free: BTreeMap<Kind, BTreeSet<(bool, ProcessId)>>,
}

pub(super) struct Job {
    pub spec: Arc<JobSpec>,
    /// Lines on their way to the driver; another after each connection that broke.
    pub log: Link<LogLine>,
    /// Ended by the head; only detached actors are left.
    pub over: bool,
}

impl Pool {
    pub(super) fn insert(&mut self, process: ProcessId, worker: Worker) {
        self.workers.insert(process, worker);
        self.index(process);
    }

    /// The worker process that can take a lease soonest.
    pub(super) fn free_for(&self, job: JobId, gpus: &[u32]) -> Option<ProcessId> {
        self.free.get(&(job, gpus.to_vec()))?.first().map(|(_, process)| *process)
    }

    /// Who serves the lease, which may have been removed already.
    pub(super) fn server_of(&self, lease: LeaseId) -> Option<ProcessId> {
        self.by_lease.get(&lease).copied()
    }

    /// Changes the stage of a worker process. One that is unknown has no stage.
    #[must_use]
    pub(super) fn apply(&mut self, process: ProcessId, event: Event) -> Vec<Effect> {
        self.unindex(process);
        let Some(worker) = self.workers.get_mut(&process) else { return Vec::new() };
        let stage = std::mem::replace(&mut worker.stage, Stage::Cancelled);
        let (stage, effects) = stage.after(event, Instant::now());
        if matches!(stage, Stage::Cancelled) {
            self.workers.remove(&process);
        } else {
            worker.stage = stage;
            self.index(process);
        }
        effects
    }

    pub(super) fn assignment_mut(&mut self, process: ProcessId) -> Option<&mut Assignment> {
        self.workers.get_mut(&process)?.stage.assignment_mut()
    }

    /// Takes a worker process out. Its lease stays known until [`Pool::lease_is_over`].
    pub(super) fn remove(&mut self, process: ProcessId) -> Option<Worker> {
        self.unindex(process);
        let worker = self.workers.remove(&process)?;
        if let Some(assignment) = worker.stage.assignment() {
            self.by_lease.insert(assignment.lease(), process);
        }
        Some(worker)
    }

    /// The end of a lease is being reported.
    pub(super) fn lease_is_over(&mut self, lease: LeaseId) {
        self.by_lease.remove(&lease);
    }

    fn index(&mut self, process: ProcessId) {
        let Some(worker) = self.workers.get(&process) else { return };
        if let Some(assignment) = worker.stage.assignment() {
            self.by_lease.insert(assignment.lease(), process);
        }
        if worker.stage.is_free() {
            let free = self.free.entry((worker.job, worker.gpus.clone())).or_default();
            free.insert((worker.stage.is_launching(), process));
        }
    }

    fn unindex(&mut self, process: ProcessId) {
        let Some(worker) = self.workers.get(&process) else { return };
        if let Some(assignment) = worker.stage.assignment() {
            self.by_lease.remove(&assignment.lease());
        }
        if worker.stage.is_free() {
            let key = (worker.job, worker.gpus.clone());
            if let Some(free) = self.free.get_mut(&key) {
                free.remove(&(worker.stage.is_launching(), process));
                if free.is_empty() {
                    self.free.remove(&key);
                }
            }
        }
    }
}

impl Daemon {
    /// Leases of a job may come.
    pub(super) fn begin_job(self: &Arc<Self>, spec: Arc<JobSpec>) {
        let mut pool = self.pool.lock();
        if pool.jobs.contains_key(&spec.id) {
            return;
        }
        let log = Link::new();
        tokio::spawn(self.clone().forward_output(spec.clone(), log.clone()));
        pool.jobs.insert(spec.id, Job { spec, log, over: false });
    }

    /// Changes the stage of a worker process, and does what follows.
    pub(super) fn apply(&self, pool: &mut Pool, process: ProcessId, event: Event) {
        for effect in pool.apply(process, event) {
            match effect {
                Effect::Kill => self.guard.kill(process),
                Effect::LeaseEnded(lease) => self.head.link.send(HeadMessage::LeaseEnded(lease)),
                Effect::HandOver => {
                    if let Some(worker) = pool.workers.get(&process) {
                        self.hand_over(worker);
                    }
                }
                Effect::AskToExit => {
                    if let Some(contact) = pool.workers.get(&process).and_then(|worker| worker.stage.contact()) {
                        contact.commands.send(WorkerCommand::Exit);
                    }
                }
            }
        }
    }

    /// What runs here, for a head that was started again.
    pub(super) fn running(&self) -> Vec<RunningLease> {
        let pool = self.pool.lock();
        let running = pool.workers.values().filter_map(|worker| {
            let assigned = worker.stage.assignment()?;
            let is_ending = worker.stage.is_ending();
            let address = worker.stage.contact().map(|contact| (contact.address.clone(), worker.pid));
            Some(RunningLease { start: assigned.start.clone(), worker: address, started: assigned.started, is_ending })
        });
        running.collect()
    }

    /// The constructor of an actor in this worker process has returned.
    pub(super) fn actor_started(
        &self,
        process: ProcessId,
        actor: ActorId,
        incarnation: Incarnation,
        outcome: Result<(), Error>,
    ) {
        if let Some(assigned) = self.pool.lock().assignment_mut(process)
            && matches!(&assigned.start.holder, LeaseHolder::Actor(spec, life) if spec.id == actor && *life == incarnation)
        {
            assigned.started = outcome.is_ok();
        }
        self.head.link.send(HeadMessage::ActorStarted { actor, incarnation, outcome });
    }

    /// A worker process was asked to exit, and others may still read what it owns.
    pub(super) fn stays(&self, process: ProcessId) {
        self.apply(&mut self.pool.lock(), process, Event::Stays);
    }

    /// A worker process has lost the head: what it submits fails, so it takes no further leases.
    pub(super) fn lost_its_head(&self, process: ProcessId) {
        self.apply(&mut self.pool.lock(), process, Event::Unfit);
    }

    /// Ends idle processes that are not worth keeping, and gives freed memory back.
    pub(super) async fn keep_house(self: Arc<Self>) {
        let mut ended = self.ending.ended.subscribe();
        loop {
            tokio::select! {
                () = tokio::time::sleep(*HOUSEKEEPING) => {}
                _ = ended.wait_for(Option::is_some) => return,
            }
            self.transfers.close_idle();
            let daemon = self.clone();
            // Giving gigabytes back takes a while. A panic there was printed there.
            let _ = tokio::task::spawn_blocking(move || daemon.store.trim(Instant::now())).await;
            self.end_the_superfluous();
        }
    }

    fn end_the_superfluous(&self) {
        let mut pool = self.pool.lock();
        let mut idle_of: BTreeMap<JobId, usize> = BTreeMap::new();
        let mut superfluous = Vec::new();
        let mut silent = Vec::new();
        for (process, worker) in &pool.workers {
            match &worker.stage {
                Stage::Idle { since, .. } => {
                    let count = idle_of.entry(worker.job).or_default();
                    *count += 1;
                    if *count > self.who.cpus && since.elapsed() > *IDLE_LIMIT {
                        superfluous.push(*process);
                    }
                }
                // One that declined, and cannot serve anybody.
                Stage::Retiring { contact } if !contact.is_fit => superfluous.push(*process),
                Stage::Launching { since, with_guard: true, .. } if since.elapsed() > *START_LIMIT => {
                    silent.push(*process);
                }
                _ => {}
            }
        }
        for process in superfluous {
            // It leaves the pool before it is asked, so that no lease can meet its exit.
            self.apply(&mut pool, process, Event::Retire);
        }
        for process in silent {
            if let Some(worker) = pool.workers.get_mut(&process) {
                worker.reason = Some(format!("it did not report within {} s", START_LIMIT.as_secs_f64()));
            }
            self.apply(&mut pool, process, Event::End { by_head: false });
        }
    }
}
