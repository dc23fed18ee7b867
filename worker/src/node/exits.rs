//! How worker processes end: with their lease or job, or by themselves.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::mpsc;
use wingbeat_core::error::Error;
use wingbeat_core::spec::Exit;
use wingbeat_core::{JobId, LeaseId, ProcessId};
use wingbeat_net::messages::{HeadMessage, WorkerCommand, WorkerDeath};

use super::Daemon;
use super::pool::{Assignment, Phase};
use crate::guard::Report;

/// How long the output of a dead process may take to arrive: a grandchild may hold the pipe open.
const OUTPUT_LIMIT: Duration = Duration::from_millis(300);

impl Daemon {
    /// The head has no more use for a lease.
    pub(super) fn end_lease(&self, lease: LeaseId, kill: Option<String>) {
        let mut pool = self.pool.lock();
        let found = pool
            .workers
            .iter_mut()
            .find(|(_, worker)| worker.assigned.as_ref().is_some_and(|assigned| assigned.lease() == lease));
        let Some((process, worker)) = found else {
            // Its process is gone already, and the head was told.
            drop(pool);
            self.head.send(HeadMessage::LeaseEnded(lease));
            return;
        };
        // Devices are given on only when the process that used them is gone.
        let reason = kill.or_else(|| (!worker.gpus.is_empty()).then(|| "its lease of devices is over".into()));
        match reason {
            None => {
                worker.assigned = None;
                if worker.address.is_some() {
                    worker.phase = Phase::Idle { since: Instant::now() };
                }
                drop(pool);
                self.head.send(HeadMessage::LeaseEnded(lease));
            }
            Some(reason) => {
                worker.lease_over = true;
                worker.reason = Some(reason);
                worker.phase = Phase::Ending;
                self.guard.kill(*process);
            }
        }
    }

    pub(super) fn drain(&self, lease: LeaseId, by: String) {
        let mut pool = self.pool.lock();
        for worker in pool.workers.values_mut() {
            if worker.assigned.as_ref().is_some_and(|assigned| assigned.lease() == lease)
                && let Some(commands) = &worker.commands
            {
                worker.reason = Some(by.clone());
                commands.send(WorkerCommand::Drain);
            }
        }
    }

    pub(super) fn end_job(&self, job: JobId) {
        let mut pool = self.pool.lock();
        let mut detached = false;
        for (process, worker) in &mut pool.workers {
            if worker.job != job {
                continue;
            }
            if worker.assigned.as_ref().is_some_and(Assignment::is_detached) {
                detached = true;
                continue;
            }
            worker.reason = Some("its job is over".into());
            worker.phase = Phase::Ending;
            self.guard.kill(*process);
        }
        if let Some(known) = pool.jobs.get_mut(&job) {
            known.over = true;
        }
        if !detached {
            pool.jobs.remove(&job);
            self.executables.keep_only(|hash| pool.jobs.values().any(|job| job.spec.executable.hash == hash));
        }
    }

    pub(super) fn kill_worker(&self, process: ProcessId, why: String) {
        if let Some(worker) = self.pool.lock().workers.get_mut(&process) {
            worker.reason = Some(why);
            self.guard.kill(process);
        }
    }

    /// Reports from the guard, in order, until it is gone.
    pub(super) async fn wind_up_exits(self: Arc<Self>, mut reports: mpsc::UnboundedReceiver<Report>) {
        while let Some(report) = reports.recv().await {
            match report {
                Report::Launched { process, pid } => {
                    if let Some(worker) = self.pool.lock().workers.get_mut(&process) {
                        worker.pid = pid;
                    }
                }
                Report::Failed { process, why } => {
                    let what = "starting a worker process".to_owned();
                    self.forget_unstarted(process, &Error::Io { what, why });
                }
                Report::Exited { process, code, signal } => {
                    let (daemon, gone) = (self.clone(), self.held.leaves(process));
                    // Its last output may still be on its way; others must not wait for it.
                    tokio::spawn(async move { daemon.exited(process, code, signal, gone).await });
                }
                Report::Gone { process } => self.held.is_gone(process),
            }
        }
        self.end("the guard of its worker processes is gone");
    }

    pub(super) async fn exited(
        self: Arc<Self>,
        process: ProcessId,
        code: Option<i32>,
        signal: Option<i32>,
        gone: tokio::sync::oneshot::Receiver<()>,
    ) {
        self.store.process_gone(process);
        let tail = {
            let mut pool = self.pool.lock();
            let Some(worker) = pool.workers.get_mut(&process) else { return };
            worker.phase = Phase::Ending;
            worker.output.clone()
        };
        let _ = tokio::time::timeout(OUTPUT_LIMIT, tail.complete()).await;
        let Some(worker) = self.pool.lock().workers.remove(&process) else { return };
        let exit = Exit { code, signal, stderr: tail.last_lines(), reason: worker.reason };
        let Some(assigned) = worker.assigned else {
            if worker.address.is_none() {
                tracing::warn!(%process, %exit, "a worker process ended before it reported");
            }
            return;
        };
        let lease = assigned.lease();
        if worker.address.is_none() {
            if !worker.gpus.is_empty() {
                self.devices_released(&worker.gpus, &worker.users_before, gone).await;
            }
            let error = Error::Io { what: "a worker process ended before it reported".into(), why: exit.to_string() };
            self.head.send(HeadMessage::LeaseFailed { lease, error });
            return;
        }
        self.head.send(HeadMessage::WorkerDied(WorkerDeath {
            process,
            pid: worker.pid,
            node: self.id,
            lease: Some(lease),
            exit,
            started: worker.page.started(),
        }));
        // Devices are given on only when nothing of the last lease uses them.
        if !worker.gpus.is_empty() {
            self.devices_released(&worker.gpus, &worker.users_before, gone).await;
        }
        self.head.send(HeadMessage::LeaseEnded(lease));
    }
}
