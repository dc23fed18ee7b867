//! What user code prints: to the driver's terminal, and its last lines for the error when it dies.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::io::AsyncReadExt;
use tokio::net::unix::pipe;
use tokio::sync::Notify;
use wingbeat_core::spec::JobSpec;
use wingbeat_core::{JobId, ProcessId};
use wingbeat_net::address::{self, DialError, Stream};
use wingbeat_net::handshake::Purpose;
use wingbeat_net::link::Link;
use wingbeat_net::messages::LogLine;
use wingbeat_net::mux::{self, Waiting};
use wingbeat_net::services::{NodeRequest, NodeResponse, ProcessRequest, ProcessResponse};

use super::Daemon;
use super::pool::Pool;

/// Lines of standard error that an error shows.
const TAIL: usize = 20;
/// A longer line is cut: nobody reads it, and it would be held in memory.
const LINE: usize = 16 << 10;
/// Lines on their way to one driver. Beyond that the driver is slower than the output, and lines are dropped
/// with a note, so that user code is never held up by a terminal.
const QUEUED: usize = 10_000;
/// A line without an end is shown as it is when nothing more came for so long: a prompt, or a bar that grows.
const PAUSE: Duration = Duration::from_millis(200);
/// What is read at a time; a pipe holds four times as much.
const CHUNK: usize = 16 << 10;

/// The first pause before a driver that may live is dialled again, and the longest.
const REDIAL: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(10));

/// Cuts output into lines, none of which is longer than [`LINE`] and a note.
#[derive(Default)]
struct Lines {
    line: Vec<u8>,
    /// The line was too long, and was shown as far as it goes.
    skips: bool,
}

impl Lines {
    /// More output came. `show` gets every line that is complete, or too long.
    fn take(&mut self, output: &[u8], mut show: impl FnMut(String)) {
        for part in output.split_inclusive(|byte| *byte == b'\n') {
            let (text, ends) = part.strip_suffix(b"\n").map_or((part, false), |text| (text, true));
            if !self.skips {
                let room = LINE - self.line.len();
                self.line.extend_from_slice(&text[..text.len().min(room)]);
                if text.len() > room {
                    self.skips = true;
                    let begun = self.show_begun().unwrap_or_default();
                    show(format!("{begun} … (the rest of this line is not shown: it is longer than {LINE} bytes)"));
                } else if ends {
                    show(self.show_begun().unwrap_or_default());
                }
            }
            self.skips &= !ends;
        }
    }

    fn has_begun(&self) -> bool {
        !self.line.is_empty()
    }

    /// What there is of a line that has no end yet; what follows is a line of its own.
    fn show_begun(&mut self) -> Option<String> {
        let text = self.has_begun().then(|| String::from_utf8_lossy(&self.line).into_owned());
        self.line.clear();
        text
    }
}

/// The last lines of a worker process's standard error.
#[derive(Clone, Default)]
pub(super) struct Tail {
    /// Each with what its process had started last when it was read.
    lines: Arc<Mutex<VecDeque<(u64, String)>>>,
    readers: Arc<Mutex<Option<tokio::sync::watch::Receiver<u32>>>>,
    /// The pipes once more, to see whether they are empty.
    pipes: Arc<Mutex<Vec<OwnedFd>>>,
    /// Number of pipes whose last line has begun, and is not shown yet.
    begun: Arc<AtomicUsize>,
    /// Such lines are to be shown now.
    settling: Arc<Notify>,
    /// Lines of stdout and of stderr for which the driver had no room, until their number is told.
    dropped: Arc<[AtomicUsize; 2]>,
}

impl Tail {
    fn push(&self, started: u64, line: &str) {
        let mut lines = self.lines.lock();
        if lines.len() == TAIL {
            lines.pop_front();
        }
        lines.push_back((started, line.to_owned()));
    }

    /// Those since the process started what it has started last.
    pub(super) fn last_lines(&self, started: u64) -> Vec<String> {
        let lines = self.lines.lock();
        lines.iter().filter(|(at, _)| *at == started).map(|(_, line)| line.clone()).collect()
    }

    /// Whether everything that was printed has been read and shown; if not, it is to be soon.
    fn is_read(&self) -> bool {
        self.settling.notify_waiters();
        let is_empty = |pipe: &OwnedFd| rustix::io::ioctl_fionread(pipe).is_ok_and(|left| left == 0);
        self.pipes.lock().iter().all(is_empty) && self.begun.load(Ordering::Relaxed) == 0
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
            self.vital("reading output", async move {
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
            let of_job = pool.processes.iter().filter(|(_, known)| known.job == job);
            let tails: Vec<(ProcessId, Tail)> = of_job.map(|(id, known)| (*id, known.output.clone())).collect();
            (tails, pool.logs.get(&job).cloned())
        };
        // The readers run on this runtime: they get their turn while this sleeps.
        while !tails.iter().all(|(_, tail)| tail.is_read()) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        tokio::task::yield_now().await;
        for (process, tail) in &tails {
            [false, true].into_iter().for_each(|is_stderr| self.tell_dropped(*process, job, is_stderr, tail));
        }
        if let Some(log) = log {
            log.flushed().await;
        }
    }

    async fn read_pipe(&self, process: ProcessId, job: JobId, mut pipe: pipe::Receiver, is_stderr: bool, tail: &Tail) {
        let mut lines = Lines::default();
        let mut chunk = vec![0; CHUNK];
        let mut show = |text: String| self.show(process, job, is_stderr, tail, text);
        loop {
            let has_begun = lines.has_begun();
            let read = tokio::select! {
                // A pipe that breaks has nothing more to say.
                read = pipe.read(&mut chunk) => Some(read.unwrap_or(0)),
                () = tokio::time::sleep(PAUSE), if has_begun => None,
                () = tail.settling.notified(), if has_begun => None,
            };
            match read {
                Some(count) if count > 0 => lines.take(&chunk[..count], &mut show),
                _ => lines.show_begun().into_iter().for_each(&mut show),
            }
            match (has_begun, lines.has_begun()) {
                (false, true) => drop(tail.begun.fetch_add(1, Ordering::Relaxed)),
                (true, false) => drop(tail.begun.fetch_sub(1, Ordering::Relaxed)),
                _ => {}
            }
            if read == Some(0) {
                return self.tell_dropped(process, job, is_stderr, tail);
            }
        }
    }

    /// Sends a line to the driver of the job, if it has room, with a note of those before for which it had none.
    fn show(&self, process: ProcessId, job: JobId, is_stderr: bool, tail: &Tail, text: String) {
        let pool = self.pool.lock();
        if is_stderr {
            tail.push(pool.processes.get(&process).map_or(0, |known| known.page.started()), &text);
        }
        let Some((log, line)) = self.way_to_driver(&pool, process, job, is_stderr) else { return };
        drop(pool);
        if log.queued() >= QUEUED {
            tail.dropped[usize::from(is_stderr)].fetch_add(1, Ordering::Relaxed);
            return;
        }
        self.send_dropped(&log, &line, tail);
        log.send(LogLine { text, ..line });
    }

    /// Sends the number of lines for which there was no room: no other may follow.
    fn tell_dropped(&self, process: ProcessId, job: JobId, is_stderr: bool, tail: &Tail) {
        let pool = self.pool.lock();
        let Some((log, line)) = self.way_to_driver(&pool, process, job, is_stderr) else { return };
        drop(pool);
        self.send_dropped(&log, &line, tail);
    }

    fn send_dropped(&self, log: &Link<LogLine>, line: &LogLine, tail: &Tail) {
        let dropped = tail.dropped[usize::from(line.is_stderr)].swap(0, Ordering::Relaxed);
        if dropped > 0 {
            let text = format!("({dropped} lines were dropped here: they came faster than the driver took them)");
            log.send(LogLine { text, ..line.clone() });
        }
    }

    /// Where lines of a process go as long as its job goes on, and one of them without its text.
    fn way_to_driver(
        &self,
        pool: &Pool,
        process: ProcessId,
        job: JobId,
        is_stderr: bool,
    ) -> Option<(Link<LogLine>, LogLine)> {
        pool.state.job(job).filter(|job| !job.is_over)?;
        let log = pool.logs.get(&job)?.clone();
        let pid = pool.state.pid_of(process);
        let source = pool.processes.get(&process).map(|known| known.page.name()).unwrap_or_default();
        let (node, text) = (self.who.hostname.clone(), String::new());
        Some((log, LogLine { pid, source, node, is_stderr, text }))
    }

    /// Carries lines to the driver of a job, over one connection after the other, until it is gone or the job is over.
    pub(super) async fn forward_output(self: Arc<Self>, job: Arc<JobSpec>, mut log: Link<LogLine>) {
        let mut pause = REDIAL.0;
        while let Some(next) = self.log_of(&job, &log) {
            log = next;
            let begun = Instant::now();
            match address::dial_known(&job.driver, "the driver", &self.who.token, self.hello(Purpose::Control)).await {
                Ok(stream) => self.send_lines(stream, &log).await,
                Err(DialError::Failed(error)) => tracing::debug!(%error, "output of a job does not arrive"),
                Err(DialError::Gone(error)) => {
                    tracing::debug!(%error, "output of a job has nowhere to go");
                    break;
                }
            }
            if begun.elapsed() > REDIAL.1 {
                pause = REDIAL.0;
            }
            self.until_ended(tokio::time::sleep(pause)).await;
            pause = (pause * 2).min(REDIAL.1);
        }
        log.broke();
    }

    async fn send_lines(&self, stream: Stream, log: &Link<LogLine>) {
        let (connection, _, _) =
            mux::connect::<ProcessRequest, ProcessResponse, NodeRequest, NodeResponse>(stream, Waiting::Asleep);
        self.until_ended(log.run(&connection, |lines| ProcessRequest::Logs { lines })).await;
        connection.close();
        log.broke();
    }

    /// Where lines of the job are queued: in what they were, unless that broke. None when there will be no more.
    fn log_of(&self, spec: &Arc<JobSpec>, last: &Link<LogLine>) -> Option<Link<LogLine>> {
        if self.ending.ended.borrow().is_some() {
            return None;
        }
        let mut pool = self.pool.lock();
        // The job may have ended, and begun anew with a driver of its own.
        pool.state.job(spec.id).filter(|job| Arc::ptr_eq(&job.spec, spec) && !job.is_over)?;
        let log = pool.logs.get_mut(&spec.id)?;
        if last.is_broken() {
            *log = Link::new();
            let text = "(the connection to this node broke: lines are missing here)".to_owned();
            let (pid, node) = (std::process::id(), self.who.hostname.clone());
            log.send(LogLine { pid, source: "wingbeat".into(), node, is_stderr: true, text });
        }
        Some(log.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(lines: &mut Lines, output: &[u8]) -> Vec<String> {
        let mut shown = Vec::new();
        lines.take(output, |line| shown.push(line));
        shown
    }

    #[test]
    fn lines_are_whole_however_they_arrive() {
        let mut lines = Lines::default();
        assert_eq!(shown(&mut lines, b"one\ntwo\n\nthr"), ["one", "two", ""]);
        assert!(lines.has_begun());
        assert_eq!(shown(&mut lines, b"ee\n"), ["three"]);
        assert!(!lines.has_begun());
    }

    #[test]
    fn a_line_without_an_end_can_be_shown_and_the_rest_is_another() {
        let mut lines = Lines::default();
        assert!(shown(&mut lines, b"Password: ").is_empty());
        assert_eq!(lines.show_begun().as_deref(), Some("Password: "));
        assert_eq!(lines.show_begun(), None);
        assert_eq!(shown(&mut lines, b"ok\n"), ["ok"]);
    }

    #[test]
    fn a_line_that_never_ends_takes_no_memory() {
        let mut lines = Lines::default();
        let mut all = Vec::new();
        for _ in 0..1_000 {
            all.extend(shown(&mut lines, &[b'y'; CHUNK]));
            assert!(lines.line.len() <= LINE);
        }
        assert_eq!(all.len(), 1, "it is shown once, as far as it goes");
        assert!(
            all[0].starts_with("yyyy")
                && all[0].ends_with("(the rest of this line is not shown: it is longer than 16384 bytes)")
        );
        assert_eq!(shown(&mut lines, b"yyy\nnext\n"), ["next"]);
    }

    #[test]
    fn a_line_of_just_the_limit_is_not_cut() {
        let mut lines = Lines::default();
        let mut line = vec![b'x'; LINE];
        line.push(b'\n');
        let all = shown(&mut lines, &line);
        assert_eq!((all.len(), all[0].len()), (1, LINE));
    }
}
