//! The worker processes of a node, what they work for, and the jobs that they are of.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use wingbeat_core::error::Error;
use wingbeat_core::spec::{Address, JobSpec};
use wingbeat_core::{ActorId, Incarnation, JobId, LeaseId, ProcessId};
use wingbeat_net::link::Link;
use wingbeat_net::messages::{HeadMessage, LeaseHolder, LeaseStart, LogLine, RunningLease, WorkerCommand};

use super::{Daemon, output};
use crate::page::Page;

/// Idle worker processes beyond the node's CPUs end after this long: starting one takes milliseconds,
/// and each holds a few megabytes.
const IDLE_LIMIT: Duration = Duration::from_secs(20);
/// How often idle processes and freed memory are looked at. Nothing else wakes an idle daemon.
const HOUSEKEEPING: Duration = Duration::from_secs(2);
/// A worker process that has not reported so long after its start never will.
const START_LIMIT: Duration = Duration::from_secs(60);

pub(super) enum Phase {
    /// Started, and not heard of yet.
    Starting { since: Instant },
    /// It can take a lease.
    Idle { since: Instant },
    /// It works for somebody.
    Leased,
    /// It was told to end, or its exit is being wound up.
    Ending,
}

pub(super) struct Assignment {
    /// As the head granted it.
    pub start: LeaseStart,
    /// For an actor, whether its constructor has returned.
    pub started: bool,
}

impl Assignment {
    pub(super) fn lease(&self) -> LeaseId {
        self.start.lease
    }

    pub(super) fn is_detached(&self) -> bool {
        matches!(&self.start.holder, LeaseHolder::Actor(spec, _) if spec.detached)
    }
}

pub(super) struct Worker {
    pub job: JobId,
    pub gpus: Vec<u32>,
    pub phase: Phase,
    pub assigned: Option<Assignment>,
    pub pid: u32,
    pub address: Option<Address>,
    pub commands: Option<Link<WorkerCommand>>,
    /// Those who used its devices when it was started.
    pub users_before: BTreeSet<u32>,
    pub page: Arc<Page>,
    pub output: output::Tail,
    /// Why we ended it.
    pub reason: Option<String>,
    /// Whether the head no longer expects the lease.
    pub lease_over: bool,
}

#[derive(Default)]
pub(super) struct Pool {
    pub workers: BTreeMap<ProcessId, Worker>,
    pub jobs: BTreeMap<JobId, Job>,
}

pub(super) struct Job {
    pub spec: Arc<JobSpec>,
    pub log: Link<LogLine>,
    /// Ended by the head; only detached actors are left.
    pub over: bool,
}

impl Daemon {
    /// Leases of a job may come.
    pub(super) fn begin_job(self: &Arc<Self>, spec: Arc<JobSpec>) {
        let mut pool = self.pool.lock();
        if pool.jobs.contains_key(&spec.id) {
            return;
        }
        let log = Link::new();
        tokio::spawn(self.clone().forward_output(spec.driver.clone(), log.clone()));
        pool.jobs.insert(spec.id, Job { spec, log, over: false });
    }

    /// What runs here, for a head that was started again.
    pub(super) fn running(&self) -> Vec<RunningLease> {
        let pool = self.pool.lock();
        let running = pool.workers.values().filter_map(|worker| {
            let assigned = worker.assigned.as_ref()?;
            let is_ending = matches!(worker.phase, Phase::Ending);
            let worker = worker.address.clone().map(|address| (address, worker.pid));
            Some(RunningLease { start: assigned.start.clone(), worker, started: assigned.started, is_ending })
        });
        running.collect()
    }

    /// The constructor of an actor here has returned.
    pub(super) fn actor_started(&self, actor: ActorId, incarnation: Incarnation, outcome: Result<(), Error>) {
        for worker in self.pool.lock().workers.values_mut() {
            if let Some(assigned) = &mut worker.assigned
                && matches!(&assigned.start.holder, LeaseHolder::Actor(spec, _) if spec.id == actor)
            {
                assigned.started = outcome.is_ok();
            }
        }
        self.head.send(HeadMessage::ActorStarted { actor, incarnation, outcome });
    }

    /// Ends idle processes that are not worth keeping, and gives freed memory back.
    pub(super) async fn keep_house(self: Arc<Self>) {
        let mut ended = self.ended.subscribe();
        loop {
            tokio::select! {
                () = tokio::time::sleep(HOUSEKEEPING) => {}
                _ = ended.wait_for(Option::is_some) => return,
            }
            self.transfers.close_idle();
            let daemon = self.clone();
            // Giving gigabytes back takes a while. A panic there was printed there.
            let _ = tokio::task::spawn_blocking(move || daemon.store.trim(Instant::now())).await;
            let mut pool = self.pool.lock();
            let mut idle_of: BTreeMap<JobId, usize> = BTreeMap::new();
            for (process, worker) in &mut pool.workers {
                match worker.phase {
                    Phase::Idle { since } => {
                        let count = idle_of.entry(worker.job).or_default();
                        *count += 1;
                        if *count > self.cpus
                            && since.elapsed() > IDLE_LIMIT
                            && let Some(commands) = &worker.commands
                        {
                            commands.send(WorkerCommand::Exit);
                        }
                    }
                    Phase::Starting { since } if since.elapsed() > START_LIMIT && worker.pid != 0 => {
                        worker.reason = Some(format!("it did not report within {} s", START_LIMIT.as_secs()));
                        worker.phase = Phase::Ending;
                        self.guard.kill(*process);
                    }
                    _ => {}
                }
            }
        }
    }
}
