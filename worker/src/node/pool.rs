//! The worker processes of a node: [`State`] decides about them, and this does what it says.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use parking_lot::MutexGuard;
use tokio::sync::{OwnedSemaphorePermit, oneshot};
use wingbeat_core::limits::limit;
use wingbeat_core::{JobId, LeaseId, NodeId, ProcessId};
use wingbeat_net::link::Link;
use wingbeat_net::messages::{HeadMessage, LogLine, WorkerCommand};
use wingbeat_net::recording::{Machine, Recording};
use wingbeat_node::{Action, Config, Event, State};

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

/// What the daemon has of a worker process, from its launch until it is forgotten.
pub(super) struct Process {
    pub job: JobId,
    pub page: Arc<Page>,
    pub output: output::Tail,
    /// Those who used its devices before it was started.
    pub users_before: BTreeSet<u32>,
    /// Its part of the launches that may be under way; until the guard has answered.
    pub launch: Option<OwnedSemaphorePermit>,
    /// What it is told; once it has reported.
    pub commands: Option<Link<WorkerCommand>>,
    /// Says when everything that it had started has ended; once it has itself.
    pub gone: Option<oneshot::Receiver<()>>,
}

/// The worker processes, and what is carried for their jobs.
pub(super) struct Pool {
    /// What is decided, and from what.
    pub state: State,
    pub processes: BTreeMap<ProcessId, Process>,
    /// Lines on their way to the driver of a job; another after each connection that broke.
    pub logs: BTreeMap<JobId, Link<LogLine>>,
    began: Instant,
}

impl Pool {
    pub(super) fn new(node: NodeId, cpus: usize) -> Pool {
        let millis = |limit: &Duration| u64::try_from(limit.as_millis()).unwrap_or(u64::MAX);
        let (idle, start) = (millis(&IDLE_LIMIT), millis(&START_LIMIT));
        let config = Config { node, cpus, idle, start, first_process: ProcessId::random() };
        let mut state = State::new(config.clone());
        state.record_with(Recording::asked_for(Machine::Node, &node.to_string(), config));
        Pool { state, processes: BTreeMap::new(), logs: BTreeMap::new(), began: Instant::now() }
    }

    fn now(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX)
    }
}

impl Daemon {
    /// Something happened: what follows from it is done before anything else happens.
    pub(super) fn step(self: &Arc<Self>, event: Event) {
        self.step_with(&mut self.pool.lock(), event);
    }

    pub(super) fn step_with(self: &Arc<Self>, pool: &mut MutexGuard<'_, Pool>, event: Event) {
        let now = pool.now();
        for action in pool.state.step(now, event) {
            self.perform(pool, action);
        }
    }

    fn perform(self: &Arc<Self>, pool: &mut Pool, action: Action) {
        match action {
            Action::ToHead(message) => self.head.link.send(message),
            Action::BeginJob(spec) => {
                let log = Link::new();
                pool.logs.insert(spec.id, log.clone());
                self.vital("passing output on", self.clone().forward_output(spec, log));
            }
            Action::ForgetJob(job) => {
                pool.logs.remove(&job);
                self.executables.keep_only(|hash| pool.state.jobs().any(|job| job.spec.executable.hash == hash));
            }
            Action::Launch { process, job, gpus } => self.launch(pool, process, job, gpus),
            Action::Kill(process) => {
                let asked = self.guard.kill(process);
                self.vital("seeing a process end", self.clone().follow_to_its_end(process, asked));
            }
            Action::Order { process: id, lease, command, then } => {
                if let Some(process) = pool.processes.get(&id) {
                    // It may be gone before it reads its orders: what it started earlier is not of this lease.
                    process.page.reset();
                    self.order(process, (id, lease), command, then);
                }
            }
            Action::Tell(process, command) => {
                if let Some(commands) = pool.processes.get(&process).and_then(|known| known.commands.as_ref()) {
                    commands.send(command);
                }
            }
            Action::ReadRest(process) => {
                if let Some(known) = pool.processes.get(&process) {
                    let reading = self.clone().read_rest(process, known.output.clone(), known.page.clone());
                    self.vital("reading output", reading);
                }
            }
            Action::FreeDevices { process, gpus } => {
                let known = pool.processes.get_mut(&process);
                let (before, gone) =
                    known.map(|known| (std::mem::take(&mut known.users_before), known.gone.take())).unwrap_or_default();
                let daemon = self.clone();
                self.vital("freeing devices", async move {
                    daemon.devices_released(&gpus, &before, gone).await;
                    daemon.step(Event::DevicesFree(process));
                });
            }
            Action::Forget(process) => {
                pool.processes.remove(&process);
                self.store.process_gone(process);
            }
            Action::Warn(text) => tracing::warn!("{text}"),
        }
    }

    /// Gives a worker process the orders of a lease, and tells the head something once the process has them.
    fn order(
        self: &Arc<Self>,
        process: &Process,
        (id, lease): (ProcessId, LeaseId),
        command: WorkerCommand,
        then: Option<HeadMessage>,
    ) {
        let Some(commands) = process.commands.clone() else { return };
        commands.send(command);
        let daemon = self.clone();
        self.vital("giving orders", async move {
            if commands.flushed().await {
                if let Some(then) = then {
                    daemon.head.link.send(then);
                }
                daemon.step(Event::OrdersTaken { process: id, lease });
            }
        });
    }

    /// Ends idle processes that are not worth keeping, gives freed memory back, and tells the head of the store.
    pub(super) async fn keep_house(self: Arc<Self>) {
        let mut ended = self.ending.ended.subscribe();
        loop {
            tokio::select! {
                () = tokio::time::sleep(*HOUSEKEEPING) => {}
                _ = ended.wait_for(Option::is_some) => return,
            }
            self.transfers.close_idle();
            // A disk may hang: nobody waits for it here.
            self.remove_unneeded_files();
            let daemon = self.clone();
            // Giving gigabytes back takes a while.
            let _ = self.on_disk("giving memory back", move || daemon.store.trim(Instant::now())).await;
            // A disk that has refused may have room now.
            self.write_ahead();
            self.tell_of_store();
            self.step(Event::Tick);
        }
    }
}
