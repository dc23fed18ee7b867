//! How worker processes end: with their lease or job, or by themselves.

use std::collections::BTreeMap;
use std::os::unix::process::ExitStatusExt;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use wingbeat_core::error::Error;
use wingbeat_core::spec::Exit;
use wingbeat_core::{JobId, LeaseId, ProcessId};
use wingbeat_net::messages::{HeadMessage, WorkerCommand, WorkerDeath};

use super::Daemon;
use super::lifecycle::{Assignment, Event, Stage};
use crate::guard::{self, Report};

/// How long the output of a dead process may take to arrive: a grandchild may hold the pipe open.
const OUTPUT_LIMIT: Duration = Duration::from_millis(300);

/// How the guard ended is known when what it left behind has ended: at once, but for processes that the kernel holds on to.
const STATUS_EVERY: Duration = Duration::from_millis(10);
const STATUS_LOOKS: u32 = 200;

impl Daemon {
    /// The head has no more use for a lease.
    pub(super) fn end_lease(&self, lease: LeaseId, kill: Option<String>) {
        let mut pool = self.pool.lock();
        let Some(process) = pool.server_of(lease) else {
            // Its process is gone already, and the head was told.
            drop(pool);
            self.head.link.send(HeadMessage::LeaseEnded(lease));
            return;
        };
        // One that was removed waits for its devices, and its end is reported after that.
        let Some(worker) = pool.workers.get_mut(&process) else { return };
        // Devices are given on only when the process that used them is gone.
        let reason = kill.or_else(|| (!worker.gpus.is_empty()).then(|| "its lease of devices is over".into()));
        let kill = reason.is_some();
        if !worker.stage().is_ending() {
            worker.reason = reason.or(worker.reason.take());
        }
        self.apply(&mut pool, process, Event::LeaseOver { kill });
    }

    pub(super) fn drain(&self, lease: LeaseId, by: String) {
        let mut pool = self.pool.lock();
        let Some(worker) = pool.server_of(lease).and_then(|process| pool.workers.get_mut(&process)) else { return };
        if let Stage::Leased { contact, .. } = worker.stage() {
            contact.commands.send(WorkerCommand::Drain);
            worker.reason = Some(by);
        }
    }

    pub(super) fn end_job(&self, job: JobId) {
        let mut pool = self.pool.lock();
        let (detached, ended): (Vec<_>, Vec<_>) = pool
            .workers
            .iter()
            .filter(|(_, worker)| worker.job == job)
            .map(|(process, worker)| (*process, worker.stage().assignment().is_some_and(Assignment::is_detached)))
            .partition(|(_, detached)| *detached);
        for (process, _) in ended {
            if let Some(worker) = pool.workers.get_mut(&process) {
                worker.reason = Some("its job is over".into());
            }
            self.apply(&mut pool, process, Event::End { by_head: true });
        }
        if let Some(known) = pool.jobs.get_mut(&job) {
            known.over = true;
        }
        if detached.is_empty() {
            pool.jobs.remove(&job);
            self.executables.keep_only(|hash| pool.jobs.values().any(|job| job.spec.executable.hash == hash));
        }
    }

    pub(super) fn kill_worker(&self, process: ProcessId, why: String) {
        let mut pool = self.pool.lock();
        let Some(worker) = pool.workers.get_mut(&process) else { return };
        worker.reason = Some(why);
        self.apply(&mut pool, process, Event::End { by_head: false });
    }

    /// Reports from the guard, in order, until it is gone.
    pub(super) async fn wind_up_exits(self: Arc<Self>, mut reports: mpsc::UnboundedReceiver<Report>) {
        while let Some(report) = reports.recv().await {
            match report {
                Report::Launched { process, pid } => {
                    if let Some(worker) = self.pool.lock().workers.get_mut(&process) {
                        worker.pid = pid;
                        worker.launch = None;
                    }
                }
                Report::Failed { process, why } => {
                    let what = "starting a worker process".to_owned();
                    self.forget_unstarted(process, &Error::Io { what, why });
                }
                Report::Exited { process, code, signal } => {
                    let (daemon, gone) = (self.clone(), self.devices.held.leaves(process));
                    // Its last output may still be on its way; others must not wait for it.
                    tokio::spawn(async move { daemon.exited(process, code, signal, gone).await });
                }
                Report::Gone { process } => self.devices.held.is_gone(process),
            }
        }
        self.guard_is_gone().await;
    }

    /// Nobody starts and ends worker processes any more: the node ends, and leaves nothing behind.
    async fn guard_is_gone(self: Arc<Self>) {
        if self.ending.ended.borrow().is_some() {
            // It was told to end.
            return;
        }
        let pid = self.guard.pid().unwrap_or_default();
        let workers: BTreeMap<ProcessId, u32> = {
            let pool = self.pool.lock();
            let leaving = self.devices.held.leaving().into_iter().map(|process| (process, 0));
            leaving.chain(pool.workers.iter().map(|(process, worker)| (*process, worker.pid))).collect()
        };
        // Usually the half of the guard that was left has done it already.
        let _ = tokio::task::spawn_blocking(move || guard::end_marked(&workers)).await;
        let mut status = self.guard.exit_status();
        for _ in 0..STATUS_LOOKS {
            if status.is_some() {
                break;
            }
            tokio::time::sleep(STATUS_EVERY).await;
            status = self.guard.exit_status();
        }
        let signal = status.and_then(|status| status.signal().or_else(|| status.code().map(|code| code - 128)));
        let how = match signal {
            Some(9) => "was killed by signal 9 (by a person, or by the kernel because memory ran out)".to_owned(),
            Some(signal) if signal > 0 => format!("was killed by signal {signal}"),
            _ => "ended unexpectedly".to_owned(),
        };
        self.end(&format!(
            "wingbeat-guard (pid {pid}), the process that starts and ends the worker processes of this node, {how}; \
             all of them were ended"
        ));
    }

    pub(super) async fn exited(
        self: Arc<Self>,
        process: ProcessId,
        code: Option<i32>,
        signal: Option<i32>,
        gone: tokio::sync::oneshot::Receiver<()>,
    ) {
        self.store.process_gone(process);
        self.transfers.object_settled();
        let tail = {
            let mut pool = self.pool.lock();
            let Some(worker) = pool.workers.get(&process) else { return };
            let tail = worker.output.clone();
            self.apply(&mut pool, process, Event::Exited);
            tail
        };
        let _ = tokio::time::timeout(OUTPUT_LIMIT, tail.complete()).await;
        let Some(mut worker) = self.pool.lock().remove(process) else { return };
        let (gpus, users_before) = (std::mem::take(&mut worker.gpus), std::mem::take(&mut worker.users_before));
        let (pid, started) = (worker.pid, worker.page.started());
        let exit = Exit { code, signal, stderr: tail.last_lines(started), reason: worker.reason.take() };
        let Stage::Ending { assignment, contact, by_head } = worker.into_stage() else { return };
        if self.ending.ended.borrow().is_some() {
            // It ended with its node, which is what the head is told.
            return;
        }
        let lease = assignment.map(|assignment| assignment.lease());
        let is_reported = contact.is_some();
        if is_reported {
            // Also of one that was idle: what it owned is nobody's from now on.
            let (node, exit) = (self.who.id, exit.clone());
            self.head.link.send(HeadMessage::WorkerDied(WorkerDeath { process, pid, node, lease, exit, started }));
        }
        let Some(lease) = lease else {
            if !is_reported && !by_head {
                tracing::warn!(%process, %exit, "a worker process ended before it reported");
            }
            return;
        };
        // Devices are given on only when nothing of the last lease uses them.
        if !gpus.is_empty() {
            self.devices_released(&gpus, &users_before, gone).await;
        }
        self.pool.lock().lease_is_over(lease);
        self.head.link.send(if is_reported || by_head {
            HeadMessage::LeaseEnded(lease)
        } else {
            let error = Error::Io { what: "a worker process ended before it reported".into(), why: exit.to_string() };
            HeadMessage::LeaseFailed { lease, error }
        });
    }
}
