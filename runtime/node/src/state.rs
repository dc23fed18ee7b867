//! What happens to the worker processes of a node, and what the node does about it.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use wingbeat_core::error::Error;
use wingbeat_core::memory::{EndedBy, MemoryShortage};
use wingbeat_core::spec::{Address, Exit, JobSpec};
use wingbeat_core::{JobId, LeaseId, NodeId, ProcessId};
use wingbeat_net::messages::{
    ENDED_UNREPORTED, HeadMessage, LeaseHolder, LeaseStart, NodeMessage, Running, RunningLease, StoreUse,
    WorkerCommand, WorkerDeath,
};

use wingbeat_net::recording::{Recorder, Redact};

use crate::clock::Millis;
use crate::memory::{User, Work};
use crate::stage::{Assignment, Contact, Effect, Ended, Event as Change, Stage};
use crate::workers::{Worker, Workers};

/// Of so many worker processes that have ended it is remembered of which job they were, for a head that is started again.
const REMEMBERED: usize = 4_096;

/// What a node is.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Config {
    /// Its id.
    pub node: NodeId,
    /// How many CPUs it has: that many idle worker processes of a job are kept.
    pub cpus: usize,
    /// Idle worker processes beyond that end after this long.
    pub idle: Millis,
    /// A worker process that has not reported so long after its start never will, and one that has not taken in the orders of a lease never will.
    pub start: Millis,
    /// The first worker process gets this id, the next one the next. Nobody else uses ids near it.
    pub first_process: ProcessId,
}

/// A job as the node knows it.
#[derive(Debug)]
pub struct Job {
    /// What it is.
    pub spec: Arc<JobSpec>,
    /// Ended by the head; only detached actors are left.
    pub is_over: bool,
}

/// Something that happened.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Event {
    /// A process says this; what is only the head's to say comes from the head.
    Says(ProcessId, NodeMessage),
    /// The guard was asked to start a worker process.
    HandedToGuard(ProcessId),
    /// A worker process could not be started.
    NotStarted {
        /// Which.
        process: ProcessId,
        /// Why not.
        error: Error,
    },
    /// The guard has started a worker process.
    Started {
        /// Which.
        process: ProcessId,
        /// Its process id on this machine.
        pid: u32,
    },
    /// A worker process says where it is reached.
    Reported {
        /// Which.
        process: ProcessId,
        /// Where.
        address: Address,
        /// Its process id on this machine.
        pid: u32,
    },
    /// A worker process has the orders of a lease; the answer to [`Action::Order`].
    OrdersTaken {
        /// Which.
        process: ProcessId,
        /// Of which lease.
        lease: LeaseId,
    },
    /// Memory is short: a worker process is to leave if it is idle, or end if it still serves this lease, or leaves and has been asked to
    /// long before. Or the kernel has ended it.
    MemoryRanOut {
        /// Which.
        process: ProcessId,
        /// Its lease; none if it is idle.
        lease: Option<LeaseId>,
        /// Whether it was found to leave for too long.
        is_leaving: bool,
        /// Who uses what.
        shortage: Box<MemoryShortage>,
    },
    /// A worker process has ended.
    Exited {
        /// Which.
        process: ProcessId,
        /// Its exit code, if it exited.
        code: Option<i32>,
        /// The signal that ended it, if one did.
        signal: Option<i32>,
    },
    /// What a worker process that has ended had printed was read; the answer to [`Action::ReadRest`].
    RestRead {
        /// Which.
        process: ProcessId,
        /// The last lines of its standard error.
        stderr: Vec<String>,
        /// See [`WorkerDeath::started`].
        started: u64,
    },
    /// The devices of a process that is gone can be given on, or the head knows which cannot; the answer to
    /// [`Action::FreeDevices`].
    DevicesFree(ProcessId),
    /// Time has passed.
    Tick,
}

/// What the daemon must do, in order.
#[derive(Clone, Debug)]
pub enum Action {
    /// Tell the head.
    ToHead(HeadMessage),
    /// Leases of this job may come: carry what its worker processes print to its driver.
    BeginJob(Arc<JobSpec>),
    /// Nothing is left of this job.
    ForgetJob(JobId),
    /// Get the program and ask the guard to start it, unless the process is not wanted any more by then
    /// ([`State::is_wanted`]); then say [`Event::HandedToGuard`] or [`Event::NotStarted`].
    Launch {
        /// Its id.
        process: ProcessId,
        /// Of which job.
        job: Arc<JobSpec>,
        /// The devices that it sees.
        gpus: Vec<u32>,
    },
    /// Ask the guard to end a worker process.
    Kill(ProcessId),
    /// Begin what counts as a lease's own, and give the process its orders; once it has them, say [`Event::OrdersTaken`].
    Order {
        /// Whom.
        process: ProcessId,
        /// Of which lease.
        lease: LeaseId,
        /// What.
        command: WorkerCommand,
        /// What the head hears once the process has them.
        then: Option<HeadMessage>,
    },
    /// Tell a worker process.
    Tell(ProcessId, WorkerCommand),
    /// Read what a worker process that has ended had printed; then say [`Event::RestRead`].
    ReadRest(ProcessId),
    /// Wait until nothing that a process had started uses its devices; then say [`Event::DevicesFree`].
    FreeDevices {
        /// Whose; it is forgotten next.
        process: ProcessId,
        /// Which.
        gpus: Vec<u32>,
    },
    /// Nothing is kept of a worker process.
    Forget(ProcessId),
    /// Something went wrong that nobody waits for.
    Warn(String),
}

/// The worker processes of a node, what they work for, and the jobs that they are of.
pub struct State {
    /// As the daemon has set it.
    config: Config,
    /// The time of the latest event.
    now: Millis,
    /// The id of the next worker process.
    next_process: ProcessId,
    /// From their launch until nothing of them is left.
    workers: Workers,
    /// From `BeginJob` until an `EndJob` that finds no detached actor. The head says that again after the last of them.
    jobs: BTreeMap<JobId, Job>,
    /// Worker processes that had reported and have ended, the latest last, as many as [`REMEMBERED`]. Until their job is over.
    ended: VecDeque<(ProcessId, JobId)>,
    /// What is to be done. Empty between two steps.
    actions: Vec<Action>,
    /// Is told of each step, if the daemon is recorded.
    recorder: Option<Box<dyn Recorder<Event, Action>>>,
}

impl State {
    /// A node without worker processes.
    #[must_use]
    pub fn new(config: Config) -> State {
        State {
            next_process: config.first_process,
            config,
            now: 0,
            workers: Workers::default(),
            jobs: BTreeMap::new(),
            ended: VecDeque::new(),
            actions: Vec::new(),
            recorder: None,
        }
    }

    /// From now on, somebody is told of each step.
    pub fn record_with(&mut self, recorder: Option<Box<dyn Recorder<Event, Action>>>) {
        self.recorder = recorder;
    }

    /// Takes in what happened. The time never goes back.
    pub fn step(&mut self, now: Millis, event: Event) -> Vec<Action> {
        self.now = self.now.max(now);
        let recorded = self.recorder.is_some().then(|| event.clone());
        self.take_in(event);
        let actions = std::mem::take(&mut self.actions);
        if let (Some(recorder), Some(event)) = (&mut self.recorder, recorded) {
            recorder.record(self.now, event, &actions);
        }
        actions
    }

    fn take_in(&mut self, event: Event) {
        match event {
            Event::Says(by, message) => self.hears(by, message),
            Event::HandedToGuard(process) => self.apply(process, Change::HandedToGuard),
            Event::NotStarted { process, error } => self.not_started(process, error),
            Event::Started { process, pid } => self.workers.note(process, |worker| worker.pid = pid),
            Event::Reported { process, address, pid } => {
                self.workers.note(process, |worker| worker.pid = pid);
                self.apply(process, Change::Reported(Contact { address, is_fit: true }));
            }
            Event::OrdersTaken { process, lease } => self.workers.note(process, |worker| {
                worker.ordered = worker.ordered.filter(|(ordered, _)| *ordered != lease);
            }),
            Event::MemoryRanOut { process, lease, is_leaving, shortage } => {
                self.memory_ran_out(process, lease, is_leaving, shortage);
            }
            Event::Exited { process, code, signal } => {
                if self.workers.get(process).is_some_and(|worker| !worker.stage().is_gone()) {
                    self.apply(process, Change::Exited(Ended { code, signal }));
                    self.actions.push(Action::ReadRest(process));
                }
            }
            Event::RestRead { process, stderr, started } => self.wind_up(process, stderr, started),
            Event::DevicesFree(process) => self.apply(process, Change::DevicesFree),
            Event::Tick => self.end_the_superfluous(),
        }
    }

    /// Whether a worker process that was to be launched still is.
    #[must_use]
    pub fn is_wanted(&self, process: ProcessId) -> bool {
        let worker = self.workers.get(process);
        worker.is_some_and(|worker| matches!(worker.stage(), Stage::Launching { with_guard: false, .. }))
    }

    /// Whether a worker process was started, and has not said where it is reached.
    #[must_use]
    pub fn is_starting(&self, process: ProcessId) -> bool {
        self.workers.get(process).is_some_and(|worker| worker.stage().is_launching())
    }

    /// A job, while something of it may run here.
    #[must_use]
    pub fn job(&self, job: JobId) -> Option<&Job> {
        self.jobs.get(&job)
    }

    /// All jobs.
    pub fn jobs(&self) -> impl Iterator<Item = &Job> {
        self.jobs.values()
    }

    /// The job of a worker process.
    #[must_use]
    pub fn job_of(&self, process: ProcessId) -> Option<JobId> {
        self.workers.get(process).map(|worker| worker.job)
    }

    /// The process id of a worker process on this machine; 0 before it has one.
    #[must_use]
    pub fn pid_of(&self, process: ProcessId) -> u32 {
        self.workers.get(process).map_or(0, |worker| worker.pid)
    }

    /// Where a worker process is reached, once it has said so.
    #[must_use]
    pub fn address_of(&self, process: ProcessId) -> Option<Address> {
        Some(self.workers.get(process)?.stage().contact()?.address.clone())
    }

    /// The worker processes that are not gone, each with its process id.
    pub fn processes(&self) -> impl Iterator<Item = (ProcessId, u32)> {
        let alive = self.workers.iter().filter(|(_, worker)| !worker.stage().is_gone());
        alive.map(|(process, worker)| (process, worker.pid))
    }

    /// The worker processes that are idle, leave or serve a lease, with their process ids, each with what it does. Whether the task that one
    /// runs is tried again is not known here.
    pub fn users_of_memory(&self) -> impl Iterator<Item = (User, u32)> {
        self.workers.iter().filter_map(|(process, worker)| {
            let (lease, work) = match worker.stage() {
                // It does not go when it is asked.
                Stage::Idle { .. } if worker.has_leftovers() => (None, Work::Leaving),
                Stage::Idle { .. } => (None, Work::Idle),
                Stage::Retiring { .. } => (None, Work::Leaving),
                Stage::Leased { assignment, .. } => (Some(assignment.lease()), assignment.work()),
                _ => return None,
            };
            Some((User { process, lease, work, started: 0, bytes: 0 }, worker.pid))
        })
    }

    /// Whether one that was ended because memory is short is not gone yet.
    #[must_use]
    pub fn is_ending_for_memory(&self) -> bool {
        self.workers.iter().any(|(_, worker)| worker.shortage.is_some() && !worker.stage().is_gone())
    }

    /// Whether a worker process ends, or was told to.
    #[must_use]
    pub fn is_ending(&self, process: ProcessId) -> bool {
        self.workers.get(process).is_none_or(|worker| worker.stage().is_ending())
    }

    /// Whether a worker process that is not gone may use a device.
    #[must_use]
    pub fn is_used(&self, device: u32) -> bool {
        self.workers.iter().any(|(_, worker)| !worker.stage().is_gone() && worker.gpus.contains(&device))
    }

    /// What runs here, for a head that was started again.
    #[must_use]
    pub fn running(&self) -> Running {
        let running = self.workers.iter().filter_map(|(_, worker)| {
            let assigned = worker.stage().assignment()?;
            let is_ending = worker.stage().is_ending();
            let address = worker.stage().contact().map(|contact| (contact.address.clone(), worker.pid));
            Some(RunningLease {
                start: assigned.start.clone(),
                worker: address,
                started: assigned.started.clone(),
                terminated: assigned.terminated.clone(),
                is_ending,
            })
        });
        let alive = self.workers.iter().filter(|(_, worker)| worker.stage().contact().is_some());
        Running {
            leases: running.collect(),
            jobs: self.jobs.keys().copied().collect(),
            workers: alive.map(|(process, worker)| (process, worker.job)).collect(),
            ended: self.ended.iter().copied().collect(),
            held: Vec::new(),
            memory_short: None,
            store: StoreUse::default(),
            kept: None,
        }
    }

    fn hears(&mut self, by: ProcessId, message: NodeMessage) {
        match message {
            NodeMessage::BeginJob(spec) => {
                if let Entry::Vacant(new) = self.jobs.entry(spec.id) {
                    new.insert(Job { spec: spec.clone(), is_over: false });
                    self.actions.push(Action::BeginJob(spec));
                }
            }
            NodeMessage::StartLease(start) => self.start_lease(*start),
            NodeMessage::EndLease { lease, kill } => self.end_lease(lease, kill),
            NodeMessage::DrainActor { lease, by } => self.drain(lease, by),
            NodeMessage::EndJob { job } => self.end_job(job),
            NodeMessage::Prestart { job, count } => self.prestart(job, count),
            NodeMessage::ActorStarted { actor, incarnation, outcome } => {
                // Of another actor, or without a lease, it has nothing to say: what it says late is known.
                if let Some(assigned) = self.workers.assignment_mut(by)
                    && matches!(&assigned.start.holder, LeaseHolder::Actor(spec, life, _) if spec.id == actor && *life == incarnation)
                {
                    assigned.started = Some(outcome.clone());
                    self.actions.push(Action::ToHead(HeadMessage::ActorStarted { actor, incarnation, outcome }));
                }
            }
            // Others may still read what it owns.
            NodeMessage::Stays => self.apply(by, Change::Stays),
            NodeMessage::LeftBehind(is_left) => self.workers.left_behind(by, is_left),
            // What it submits fails, so it takes no further leases.
            NodeMessage::LostHead => self.apply(by, Change::Unfit),
            NodeMessage::Stop(_)
            | NodeMessage::Unpin(_)
            | NodeMessage::Delete(_)
            | NodeMessage::NodeDied(_)
            | NodeMessage::OwnersGone { .. }
            | NodeMessage::Keep(_) => {}
        }
    }

    /// A lease to serve: an idle worker process takes it, or one that is starting, or a new one.
    fn start_lease(&mut self, start: LeaseStart) {
        let gpus: Vec<u32> = start.gpus.iter().map(|(device, _)| *device).collect();
        let Some(job) = self.jobs.get(&start.job).map(|job| job.spec.clone()) else {
            let what = format!("starting a worker process of {}", start.job);
            let error = Error::Failed { what, why: "the node was not told of the job".into() };
            return self.actions.push(Action::ToHead(HeadMessage::LeaseFailed { lease: start.lease, error }));
        };
        let assignment = Assignment { start, started: None, terminated: None };
        // One that has reported is ready now; one that is starting will be sooner than a new one.
        match self.workers.free_for(job.id, &gpus, assignment.is_actor()) {
            Some(process) => self.apply(process, Change::Assigned(Box::new(assignment))),
            None => self.launch(job, gpus, Some(assignment)),
        }
    }

    fn prestart(&mut self, job: JobId, count: u32) {
        let Some(job) = self.jobs.get(&job).map(|job| job.spec.clone()) else { return };
        let have = self.workers.iter().filter(|(_, worker)| worker.job == job.id && worker.gpus.is_empty()).count();
        for _ in have..count as usize {
            self.launch(job.clone(), Vec::new(), None);
        }
    }

    fn launch(&mut self, job: Arc<JobSpec>, gpus: Vec<u32>, assignment: Option<Assignment>) {
        let process = self.next_process;
        self.next_process = ProcessId(process.0.wrapping_add(1));
        self.workers.insert(process, Worker::new(self.now, job.id, gpus.clone(), assignment));
        self.actions.push(Action::Launch { process, job, gpus });
    }

    /// The head has no more use for a lease.
    fn end_lease(&mut self, lease: LeaseId, kill: Option<String>) {
        let Some(process) = self.workers.server_of(lease) else {
            // Its process is gone already, and the head was told.
            return self.actions.push(Action::ToHead(HeadMessage::LeaseEnded(lease)));
        };
        let mut must_kill = false;
        self.workers.note(process, |worker| {
            // Devices are given on only when the process that used them is gone.
            let reason = kill.or_else(|| (!worker.gpus.is_empty()).then(|| "its lease of devices is over".into()));
            must_kill = reason.is_some();
            if !worker.stage().is_ending() {
                worker.reason = reason.or(worker.reason.take());
            }
        });
        self.apply(process, Change::LeaseOver { kill: must_kill });
    }

    fn drain(&mut self, lease: LeaseId, by: String) {
        let Some(process) = self.workers.server_of(lease) else { return };
        if self.workers.get(process).is_some_and(|worker| matches!(worker.stage(), Stage::Leased { .. })) {
            if let Some(assigned) = self.workers.assignment_mut(process) {
                assigned.terminated = Some(by.clone());
            }
            self.workers.note(process, |worker| worker.reason = Some(by));
            self.actions.push(Action::Tell(process, WorkerCommand::Drain));
        }
    }

    fn end_job(&mut self, job: JobId) {
        let of_job = self.workers.iter().filter(|(_, worker)| worker.job == job);
        let (detached, ended): (Vec<_>, Vec<_>) = of_job
            .map(|(process, worker)| (process, worker.stage().assignment().is_some_and(Assignment::is_detached)))
            .partition(|(_, detached)| *detached);
        for (process, _) in ended {
            self.workers.note(process, |worker| {
                if !worker.stage().is_ending() {
                    worker.reason = Some("its job is over".into());
                }
            });
            self.apply(process, Change::End { by_head: true });
        }
        self.ended.retain(|(_, of)| *of != job);
        if let Some(known) = self.jobs.get_mut(&job) {
            known.is_over = true;
        }
        if detached.is_empty() && self.jobs.remove(&job).is_some() {
            self.actions.push(Action::ForgetJob(job));
        }
    }

    /// Ends idle processes that are not worth keeping, and those that were started and never reported, or were given a lease and never heard
    /// of it.
    fn end_the_superfluous(&mut self) {
        let mut idle_of: BTreeMap<JobId, usize> = BTreeMap::new();
        let mut superfluous = Vec::new();
        let mut silent = Vec::new();
        let limit = self.config.start;
        for (process, worker) in self.workers.iter() {
            match worker.stage() {
                Stage::Idle { since, .. } => {
                    let count = idle_of.entry(worker.job).or_default();
                    // What goes on there with what it was told to end serves nobody.
                    *count += usize::from(!worker.has_leftovers());
                    if (*count > self.config.cpus || worker.has_leftovers()) && self.now - since > self.config.idle {
                        superfluous.push(process);
                    }
                }
                // One that declined, and cannot serve anybody.
                Stage::Retiring { contact } if !contact.is_fit => superfluous.push(process),
                Stage::Launching { since, with_guard: true, .. } if self.now - since > limit => {
                    silent.push((process, "report"));
                }
                Stage::Leased { .. } if worker.ordered.is_some_and(|(_, since)| self.now - since > limit) => {
                    silent.push((process, "take its orders"));
                }
                _ => {}
            }
        }
        for process in superfluous {
            // It takes no lease from before it is asked on, so that no lease can meet its exit.
            self.apply(process, Change::Retire);
        }
        for (process, what) in silent {
            let why = format!("it did not {what} within {} s", limit as f64 / 1000.0);
            self.workers.note(process, |worker| worker.reason = Some(why));
            self.apply(process, Change::End { by_head: false });
        }
    }

    fn memory_ran_out(
        &mut self,
        process: ProcessId,
        lease: Option<LeaseId>,
        is_leaving: bool,
        shortage: Box<MemoryShortage>,
    ) {
        let Some(worker) = self.workers.get(process) else { return };
        let is_by_kernel = shortage.by == EndedBy::Kernel;
        match worker.stage() {
            Stage::Idle { .. } if lease.is_none() && !is_leaving && !is_by_kernel => {
                self.apply(process, Change::Retire)
            }
            // Its steward would keep what others refer to, and waits for somebody who is away: that may be lost now.
            Stage::Retiring { .. } if is_leaving => self.end_for_memory(process, shortage),
            // What an earlier task has left behind may have taken the memory.
            Stage::Idle { .. } if is_leaving && worker.has_leftovers() => self.end_for_memory(process, shortage),
            Stage::Leased { assignment, .. } if lease == Some(assignment.lease()) || is_by_kernel => {
                self.workers.note(process, |worker| worker.shortage = Some(shortage));
                if !is_by_kernel {
                    self.apply(process, Change::End { by_head: false });
                }
            }
            // It has ended since, or does something else.
            _ => {}
        }
    }

    fn end_for_memory(&mut self, process: ProcessId, shortage: Box<MemoryShortage>) {
        self.workers.note(process, |worker| worker.shortage = Some(shortage));
        self.apply(process, Change::End { by_head: false });
    }

    /// Changes the stage of a worker process, and says what follows.
    fn apply(&mut self, process: ProcessId, change: Change) {
        self.apply_knowing(process, change, End::default());
    }

    /// Changes the stage of a worker process, of whose end so much is known.
    fn apply_knowing(&mut self, process: ProcessId, change: Change, mut end: End) {
        let was_known = self.workers.get(process).is_some_and(|worker| !worker.stage().is_gone());
        for effect in self.workers.apply(process, change, self.now) {
            let action = match effect {
                Effect::HandOver => {
                    self.hand_over(process);
                    continue;
                }
                Effect::Kill => Action::Kill(process),
                Effect::AskToExit => Action::Tell(process, WorkerCommand::Exit),
                Effect::LeaseEnded(lease) => Action::ToHead(HeadMessage::LeaseEnded(lease)),
                Effect::LeaseFailed(lease, why) => {
                    let error = Error::Failed { what: ENDED_UNREPORTED.into(), why };
                    Action::ToHead(HeadMessage::LeaseFailed { lease, error })
                }
                Effect::NotStarted(lease) => {
                    let Some(error) = end.error.take() else { continue };
                    Action::ToHead(HeadMessage::LeaseFailed { lease, error })
                }
                Effect::Died(lease) => {
                    let Some(death) = end.death.take() else { continue };
                    self.remember_end(process, death.job);
                    Action::ToHead(HeadMessage::WorkerDied(WorkerDeath { lease, ..death }))
                }
                Effect::NeverReported => Action::Warn(std::mem::take(&mut end.warning)),
                Effect::FreeDevices => Action::FreeDevices { process, gpus: std::mem::take(&mut end.gpus) },
            };
            self.actions.push(action);
        }
        if was_known && self.workers.get(process).is_none_or(|worker| worker.stage().is_gone()) {
            self.actions.push(Action::Forget(process));
        }
    }

    /// Gives a worker process that has reported the orders of its lease.
    fn hand_over(&mut self, process: ProcessId) {
        let Some(worker) = self.workers.get(process) else { return };
        let Stage::Leased { assignment, contact } = worker.stage() else { return };
        let (lease, gpus, captures) = (assignment.lease(), worker.gpus.clone(), assignment.start.captures);
        let resources = assignment.start.resources.clone();
        let ready = HeadMessage::LeaseReady { lease, worker: contact.address.clone(), pid: worker.pid };
        let now = self.now;
        match &assignment.start.holder {
            LeaseHolder::Actor(spec, incarnation, _) => {
                let (spec, incarnation) = (spec.clone(), *incarnation);
                let command = WorkerCommand::StartActor { lease, spec, incarnation, gpus, resources, captures };
                // Said first: nobody calls the actor before its constructor has returned, which is said next.
                self.actions.push(Action::ToHead(ready));
                self.actions.push(Action::Order { process, lease, command, then: None });
            }
            LeaseHolder::Tasks(..) => {
                let command = WorkerCommand::Lease { lease, gpus, resources, captures };
                // The owner must not reach the process before its orders have.
                self.actions.push(Action::Order { process, lease, command, then: Some(ready) });
            }
        }
        self.workers.note(process, |worker| worker.ordered = Some((lease, now)));
    }

    fn not_started(&mut self, process: ProcessId, error: Error) {
        let warning = format!("cannot start a worker process ahead of need: {error}");
        self.apply_knowing(process, Change::NotStarted, End { error: Some(error), warning, ..End::default() });
    }

    fn remember_end(&mut self, process: ProcessId, job: JobId) {
        if self.jobs.get(&job).is_some_and(|job| !job.is_over) {
            self.ended.push_back((process, job));
            if self.ended.len() > REMEMBERED {
                self.ended.pop_front();
            }
        }
    }

    /// All is known of a worker process that has ended.
    fn wind_up(&mut self, process: ProcessId, stderr: Vec<String>, started: u64) {
        let Some(worker) = self.workers.get(process) else { return };
        let Stage::Ending { ended: Some(Ended { code, signal }), .. } = *worker.stage() else { return };
        let exit = Exit { code, signal, stderr, reason: worker.reason.clone(), memory: worker.shortage.clone() };
        let (pid, job, gpus) = (worker.pid, worker.job, worker.gpus.clone());
        let (node, lease, is_moved) = (self.config.node, None, false);
        let failure = exit.to_string();
        let warning = format!("worker process {process} ended before it reported: {failure}");
        let death = Some(WorkerDeath { process, pid, job, node, lease, exit, started, is_moved });
        let had_devices = !gpus.is_empty();
        self.apply_knowing(
            process,
            Change::WoundUp { had_devices, failure },
            End { death, error: None, warning, gpus },
        );
    }
}

/// What is known of the end of a worker process, for what is said of it.
#[derive(Default)]
struct End {
    /// But for the lease.
    death: Option<WorkerDeath>,
    /// Why it could not be started.
    error: Option<Error>,
    warning: String,
    /// The devices that it saw.
    gpus: Vec<u32>,
}

impl Redact for Config {
    fn redact(&mut self) {}
}

impl Redact for Event {
    fn redact(&mut self) {
        match self {
            Event::Says(_, message) => message.redact(),
            Event::RestRead { stderr, .. } => stderr.clear(),
            Event::NotStarted { error, .. } => error.redact(),
            Event::HandedToGuard(_)
            | Event::Started { .. }
            | Event::Reported { .. }
            | Event::OrdersTaken { .. }
            | Event::MemoryRanOut { .. }
            | Event::Exited { .. }
            | Event::DevicesFree(_)
            | Event::Tick => {}
        }
    }
}

impl Redact for Action {
    fn redact(&mut self) {
        match self {
            Action::ToHead(message) => message.redact(),
            // What a program has printed may be in it.
            Action::Warn(text) => text.clear(),
            Action::BeginJob(job) | Action::Launch { job, .. } => job.redact(),
            Action::Order { command, then, .. } => {
                command.redact();
                if let Some(then) = then {
                    then.redact();
                }
            }
            Action::Tell(_, command) => command.redact(),
            Action::ForgetJob(_)
            | Action::Kill(_)
            | Action::ReadRest(_)
            | Action::FreeDevices { .. }
            | Action::Forget(_) => {}
        }
    }
}
