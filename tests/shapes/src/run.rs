//! Running one cell, and judging it.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use wingbeat::{Error, Session};

use crate::cell::{Cell, Fault, Operation, Pace};
use crate::operations;
use crate::usage;

/// How long freed objects may take to be gone everywhere. Only a leak takes so long.
const SETTLE: Duration = Duration::from_secs(60);

/// The results of a cell.
pub(crate) struct Tally<'a> {
    pause: bool,
    /// When so many results were noted, a process is killed.
    kill_at: Option<usize>,
    roots: &'a [u32],
    noted: usize,
    wrong: Vec<String>,
    failed: Vec<Error>,
}

impl Tally<'_> {
    /// A result that must be `expected`.
    pub(crate) async fn note(&mut self, result: Result<u64, Error>, expected: u64) {
        match result {
            Ok(value) if value == expected => {}
            Ok(value) => self.wrong.push(format!("result {} is {value} instead of {expected}", self.noted)),
            Err(error) => self.failed.push(error),
        }
        self.one_more().await;
    }

    /// A result that must be a cancellation.
    pub(crate) async fn note_cancelled(&mut self, result: Result<u64, Error>) {
        match result {
            // One that had begun may end by itself when it is asked to.
            Ok(_) | Err(Error::Cancelled { .. }) => {}
            Err(error) => self.failed.push(error),
        }
        self.one_more().await;
    }

    async fn one_more(&mut self) {
        self.noted += 1;
        if self.pause && self.noted.is_multiple_of(16) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        if self.kill_at == Some(self.noted) {
            self.kill();
        }
    }

    fn kill(&mut self) {
        self.kill_at = None;
        if let Some(pid) = usage::worker_processes(self.roots).into_iter().next_back() {
            usage::kill(pid);
        }
    }
}

/// Runs a cell in the session of this thread's runtime; `roots` are the process ids of the cluster's daemons, or of this
/// process if the cluster is inside it.
///
/// # Errors
/// A wrong result, an error where none is allowed, or objects that are not freed.
pub async fn run(session: &Session, cell: Cell, roots: &[u32]) -> Result<()> {
    let before = session.runtime().process().live_objects();
    let kill_at = match cell.fault {
        Fault::None => None,
        // Of one result, nothing is left after it; then the process is killed while that is made.
        Fault::Kill => Some(cell.count / 3),
    };
    let pause = cell.pace == Pace::SlowConsumer;
    let mut tally = Tally { pause, kill_at, roots, noted: 0, wrong: Vec::new(), failed: Vec::new() };
    if kill_at == Some(0) {
        tally.kill();
    }
    if let Err(error) = operations::perform(cell, &mut tally).await {
        tally.failed.push(error);
    }
    if let Some(wrong) = tally.wrong.first() {
        bail!("{cell}: {wrong} ({} wrong)", tally.wrong.len());
    }
    if let Some(error) = tally.failed.first()
        && !may_fail(&cell, error)
    {
        bail!("{cell}: {error} ({} of {} failed)", tally.failed.len(), tally.noted);
    }
    let begun = Instant::now();
    while session.runtime().process().live_objects() > before {
        if begun.elapsed() > SETTLE {
            bail!(
                "{cell}: {} objects are still there; {before} were before",
                session.runtime().process().live_objects()
            );
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    Ok(())
}

/// Whether a cell may end with this error.
fn may_fail(cell: &Cell, error: &Error) -> bool {
    if cell.fault == Fault::None {
        return false;
    }
    match cell.operation {
        // These run again by themselves.
        Operation::Task | Operation::FanOut | Operation::PlacementGroup | Operation::Wait | Operation::Chain => false,
        // An actor without restarts, what the killed process owned, and what waited for it (its error as text).
        _ => !matches!(error, Error::TimedOut { .. } | Error::SessionEnded { .. } | Error::Decode { .. }),
    }
}
