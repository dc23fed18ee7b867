//! What user code prints: to the driver's terminal, and its last lines for the error when it dies.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::net::unix::pipe;
use wingbeat_core::spec::Address;
use wingbeat_core::{JobId, ProcessId};
use wingbeat_net::address;
use wingbeat_net::handshake::Purpose;
use wingbeat_net::link::Link;
use wingbeat_net::messages::LogLine;
use wingbeat_net::mux::{self, Waiting};
use wingbeat_net::services::{NodeRequest, NodeResponse, ProcessRequest, ProcessResponse};

use super::Daemon;

/// Lines of standard error that an error shows.
const TAIL: usize = 20;
/// A longer line is cut: nobody reads it, and it would be held in memory.
const LINE: usize = 16 << 10;
/// Lines on their way to one driver. Beyond that the driver is slower than the output, and lines are dropped
/// with a note, so that user code is never held up by a terminal.
const QUEUED: usize = 10_000;

/// The last lines of a worker process's standard error.
#[derive(Clone, Default)]
pub(super) struct Tail {
    lines: Arc<Mutex<VecDeque<String>>>,
    readers: Arc<Mutex<Option<tokio::sync::watch::Receiver<u32>>>>,
    /// The pipes once more, to see whether they are empty.
    pipes: Arc<Mutex<Vec<OwnedFd>>>,
}

impl Tail {
    fn push(&self, line: &str) {
        let mut lines = self.lines.lock();
        if lines.len() == TAIL {
            lines.pop_front();
        }
        lines.push_back(line.to_owned());
    }

    pub(super) fn last_lines(&self) -> Vec<String> {
        self.lines.lock().iter().cloned().collect()
    }

    /// Whether everything that was printed has been read.
    fn is_read(&self) -> bool {
        self.pipes.lock().iter().all(|pipe| rustix::io::ioctl_fionread(pipe).is_ok_and(|left| left == 0))
    }

    /// Waits until both pipes have ended.
    pub(super) async fn complete(&self) {
        let readers = self.readers.lock().clone();
        if let Some(mut readers) = readers {
            let _ = readers.wait_for(|open| *open == 0).await;
        }
    }
}

impl Daemon {
    /// Reads both pipes of a worker process to their ends.
    pub(super) fn read_output(
        self: Arc<Self>,
        process: ProcessId,
        job: JobId,
        stdout: OwnedFd,
        stderr: OwnedFd,
    ) -> std::io::Result<Tail> {
        let tail = Tail::default();
        let (open, readers) = tokio::sync::watch::channel(2);
        *tail.readers.lock() = Some(readers);
        let open = Arc::new(open);
        for (fd, is_stderr) in [(stdout, false), (stderr, true)] {
            tail.pipes.lock().push(fd.try_clone()?);
            let pipe = pipe::Receiver::from_owned_fd(fd)?;
            let (daemon, tail, open) = (self.clone(), tail.clone(), open.clone());
            tokio::spawn(async move {
                daemon.read_pipe(process, job, pipe, is_stderr, &tail).await;
                open.send_modify(|open| *open -= 1);
            });
        }
        Ok(tail)
    }

    /// Waits until what the job's worker processes have printed so far was taken in by the driver.
    pub(super) async fn settle_output(&self, job: JobId) {
        let (tails, log) = {
            let pool = self.pool.lock();
            let tails: Vec<Tail> =
                pool.workers.values().filter(|worker| worker.job == job).map(|worker| worker.output.clone()).collect();
            (tails, pool.jobs.get(&job).map(|job| job.log.clone()))
        };
        // The readers run on this runtime: they get their turn while this sleeps.
        while !tails.iter().all(Tail::is_read) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        tokio::task::yield_now().await;
        if let Some(log) = log {
            log.flushed().await;
        }
    }

    async fn read_pipe(&self, process: ProcessId, job: JobId, pipe: pipe::Receiver, is_stderr: bool, tail: &Tail) {
        let mut reader = BufReader::new(pipe);
        let mut line = Vec::new();
        loop {
            line.clear();
            // A pipe that breaks has nothing more to say.
            match reader.read_until(b'\n', &mut line).await {
                Ok(0) | Err(_) => return,
                Ok(_) => {}
            }
            if line.last() == Some(&b'\n') {
                line.pop();
            }
            line.truncate(LINE);
            let text = String::from_utf8_lossy(&line).into_owned();
            if is_stderr {
                tail.push(&text);
            }
            let (log, pid, source) = {
                let pool = self.pool.lock();
                let Some(log) = pool.jobs.get(&job).filter(|job| !job.over).map(|job| job.log.clone()) else {
                    continue;
                };
                let worker = pool.workers.get(&process);
                (
                    log,
                    worker.map_or(0, |worker| worker.pid),
                    worker.map(|worker| worker.page.name()).unwrap_or_default(),
                )
            };
            if log.queued() < QUEUED {
                log.send(LogLine { pid, source, node: self.hostname.clone(), is_stderr, text });
            }
        }
    }

    /// Carries lines to a driver until it is gone.
    pub(super) async fn forward_output(self: Arc<Self>, driver: Address, log: Link<LogLine>) {
        let stream = match address::dial(&driver, "the driver", &self.token, self.hello(Purpose::Control)).await {
            Ok(stream) => stream,
            Err(error) => {
                tracing::debug!(%error, "output of a job has nowhere to go");
                return log.broke();
            }
        };
        let (connection, _, _) =
            mux::connect::<ProcessRequest, ProcessResponse, NodeRequest, NodeResponse>(stream, Waiting::Asleep);
        self.until_ended(log.run(&connection, |lines| ProcessRequest::Logs { lines })).await;
        connection.close();
        log.broke();
    }
}
