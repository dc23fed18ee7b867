//! How worker processes end, as the guard says.

use std::collections::BTreeMap;
use std::os::unix::process::ExitStatusExt;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use wingbeat_core::ProcessId;
use wingbeat_core::error::Error;
use wingbeat_node::Event;

use super::{Daemon, output};
use crate::guard::{self, Report};
use crate::page::Page;

/// How long the output of a dead process may take to arrive: a grandchild may hold the pipe open.
const OUTPUT_LIMIT: Duration = Duration::from_millis(300);

/// The kernel's own, where memory is short, and that of who kills a process.
const SIGKILL: i32 = 9;

/// How the guard ended is known when what it left behind has ended: at once, but for processes that the kernel holds on to.
const STATUS_EVERY: Duration = Duration::from_millis(10);
const STATUS_LOOKS: u32 = 200;

impl Daemon {
    /// Reports from the guard, in order, until it is gone.
    pub(super) async fn hear_guard(self: Arc<Self>, mut reports: mpsc::UnboundedReceiver<Report>) {
        while let Some(report) = reports.recv().await {
            match report {
                Report::Launched { process, pid } => {
                    let mut pool = self.pool.lock();
                    if let Some(known) = pool.processes.get_mut(&process) {
                        known.launch = None;
                    }
                    self.step_with(&mut pool, Event::Started { process, pid });
                }
                Report::Failed { process, why } => {
                    let error = Error::Failed { what: "starting a worker process".to_owned(), why };
                    self.step(Event::NotStarted { process, error });
                }
                Report::Exited { process, code, signal } => {
                    let gone = self.devices.held.leaves(process);
                    self.store.process_gone(process);
                    self.object_settled();
                    let mut pool = self.pool.lock();
                    if let Some(known) = pool.processes.get_mut(&process) {
                        known.gone = Some(gone);
                    }
                    if signal == Some(SIGKILL) {
                        let was_told = pool.state.is_ending(process);
                        if let Some(event) = self.killed_for_memory(process, was_told) {
                            self.step_with(&mut pool, event);
                        }
                    }
                    self.step_with(&mut pool, Event::Exited { process, code, signal });
                }
                Report::Gone { process, left } => {
                    if !left.is_empty() {
                        tracing::warn!(
                            %process,
                            "these processes, which user code has started, are another user's, may not be ended, and are left: \
                             {left:?}"
                        );
                    }
                    self.devices.held.is_gone(process);
                }
            }
        }
        self.guard_is_gone().await;
    }

    /// The last output of a process that has ended may still be on its way; others do not wait for it.
    pub(super) async fn read_rest(self: Arc<Self>, process: ProcessId, tail: output::Tail, page: Arc<Page>) {
        let _ = tokio::time::timeout(OUTPUT_LIMIT, tail.complete()).await;
        // Where it ended with its node, the head is told that.
        if self.ending.ended.borrow().is_none() {
            let started = page.started();
            self.step(Event::RestRead { process, stderr: tail.last_lines(started), started });
        }
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
            leaving.chain(pool.state.processes()).collect()
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
}
