//! What is known of an attempt while it runs, by subject.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use futures::future::BoxFuture;
use futures::stream::FuturesUnordered;
use tokio::sync::mpsc;
use wingbeat::{AnyRef, Drained, Error};

use super::Finished;
use super::slow::Reminders;
use crate::group::Group;
use crate::launch::Stored;
use crate::plan::Plan;
use crate::printer::Message;
use crate::process::{Answer, Outcome, Report};
use crate::progress::Progress;
use crate::ras::Status;
use crate::recorder::{Recorded, Recorder};
use crate::reports::Reports;
use crate::storage::Place;

/// How often an elastic group that could be larger looks whether there is room; and twice as long each time that there was none for it after
/// all, which costs the run a start: up to 2^8 times.
pub(super) const GROWTH_LOOK: Duration = Duration::from_secs(2);
const GROWTH_DOUBLED: u32 = 8;

/// What is known while it runs.
pub(super) struct Attempt<'a> {
    pub plan: &'a Plan,
    pub group: &'a Group,
    /// Where checkpoints and metrics go to.
    pub storage: &'a Place,
    pub showing: Showing<'a>,
    pub metrics: Metrics,
    pub checkpoints: Checkpoints,
    pub quiet: Quiet,
    pub moves: Moves<'a>,
    pub ranks: Ranks,
    pub reports: Reports,
    pub progress: Progress,
    pub finished: Finished,
}

/// What ranks print, on its way to who shows it.
pub(super) struct Showing<'a> {
    pub output: &'a mpsc::Sender<Message>,
    /// What is to be shown next: nothing more is heard until it is taken.
    pub unshown: Option<Message>,
    /// When what shows it is told that nothing came since, and how often still.
    pub pause: Instant,
    pub pauses: u32,
}

/// Why the attempt may end although nothing has failed.
pub(super) struct Moves<'a> {
    /// How often an elastic group looks whether there is room for more ranks.
    pub growth_look: Duration,
    /// And when next.
    pub next_growth: Instant,
    /// The look that is under way: for how many ranks there is room, if for more. The head may be away meanwhile.
    pub looks: FuturesUnordered<BoxFuture<'a, Option<u32>>>,
    /// How many ranks it is to have when its next checkpoint is there, if there is still room then.
    pub grows_to: Option<u32>,
    /// The node that it must leave.
    pub drained: Option<Drained>,
    /// When its ranks are asked to end, if no checkpoint has come by then.
    pub asked_at: Option<Instant>,
    /// It has a checkpoint to go on from elsewhere, or with more ranks, and goes then: what is reported now waits. It may have been the
    /// last, so ranks that have nothing left to do may end until then.
    pub leaves_at: Option<Instant>,
}

impl Moves<'_> {
    /// Of a run that has left to grow so often in a row, and found no room.
    pub(super) fn new(failed_growths: u32) -> Self {
        let growth_look = GROWTH_LOOK * (1 << failed_growths.min(GROWTH_DOUBLED));
        Moves {
            growth_look,
            next_growth: Instant::now() + growth_look,
            looks: FuturesUnordered::new(),
            grows_to: None,
            drained: None,
            asked_at: None,
            leaves_at: None,
        }
    }
}

/// What came of writing a checkpoint, and the reports that are answered with it.
type Saved = (BTreeMap<usize, Report>, Result<(), String>);

/// The checkpoints of an attempt: those that are reported, written, looked for and removed.
pub(super) struct Checkpoints {
    /// The number of the next.
    pub next: u64,
    /// Whether ranks began with one.
    pub began_with_one: bool,
    /// Whether there is a newer one than that which ranks began with.
    pub has_stored: bool,
    /// When the newest was stored, or when the ranks began.
    pub stored_at: Instant,
    /// The one that is being written, and who waits for it.
    pub saves: FuturesUnordered<BoxFuture<'static, Saved>>,
    /// When that began, or the one before it.
    pub save_began: Instant,
    /// Reports with the next ones, which wait for that: ranks have only so many calls at a time, and must hear of a stop.
    pub held: VecDeque<BTreeMap<usize, Report>>,
    /// Why one that ranks did not wait for could not be stored while they ended.
    pub not_stored: Option<String>,
    /// Whether what an earlier run has left was looked at.
    pub has_made_room: bool,
    /// What is stored now is the last: there is no time to make room for it.
    pub is_ending: bool,
    pub removals: Removals,
    pub lookups: Lookups,
}

/// Old checkpoints that are being removed, one removal at a time.
#[derive(Default)]
pub(super) struct Removals {
    pub running: FuturesUnordered<BoxFuture<'static, Result<(), String>>>,
    /// Since when, while one is under way.
    pub since: Option<Instant>,
    /// Whether there are more by now.
    pub is_outdated: bool,
    /// What was said of those that cannot be removed.
    pub complaints: BTreeSet<String>,
}

/// Ranks that look for the newest checkpoint.
#[derive(Default)]
pub(super) struct Lookups {
    /// Where it is, for a node.
    pub running: FuturesUnordered<BoxFuture<'static, (u64, Answer)>>,
    /// Since when there has been one under way, while there is.
    pub began: Option<Instant>,
    /// Ranks of each node that have asked for that: with the lookup that is under way, and since.
    pub asked: BTreeMap<u64, [Vec<(usize, u64)>; 2]>,
}

impl Checkpoints {
    /// None of this attempt's own yet.
    pub(super) fn from(stored: &Stored) -> Checkpoints {
        Checkpoints {
            next: stored.next,
            began_with_one: stored.checkpoints.iter().any(|at| !at.is_empty()),
            has_stored: false,
            stored_at: Instant::now(),
            saves: FuturesUnordered::new(),
            save_began: Instant::now(),
            held: VecDeque::new(),
            not_stored: None,
            has_made_room: false,
            is_ending: false,
            removals: Removals::default(),
            lookups: Lookups::default(),
        }
    }

    /// Whether ranks make any, as far as they have shown.
    pub(super) fn are_made(&self) -> bool {
        self.began_with_one || self.has_stored || !self.saves.is_empty() || !self.held.is_empty()
    }
}

/// The metrics of an attempt.
pub(super) struct Metrics {
    pub recorder: Recorder,
    /// Those that are being written.
    pub writing: FuturesUnordered<BoxFuture<'static, Recorded>>,
    /// It was said that they cannot be stored.
    pub has_complained: bool,
}

impl Metrics {
    /// Of a launch: of the attempt's number, and of how many were before it.
    pub(super) fn new(attempt: u32, launch: u32) -> Metrics {
        Metrics { recorder: Recorder::new(attempt, launch), writing: FuturesUnordered::new(), has_complained: false }
    }
}

/// How long nothing has been heard, and what was done about it.
pub(super) struct Quiet {
    /// Since when nobody has done anything that can be seen.
    pub since: Instant,
    /// Those for whom others wait were named.
    pub was_named: bool,
    pub was_hanging: bool,
    /// Where NCCL tells how far it is, if ranks use it.
    pub ras: Option<u16>,
    /// How far it was when nothing had been heard for half the time that makes a hang.
    pub nccl: Option<Status>,
    /// What was said of a storage for which ranks wait.
    pub slow: Reminders,
}

impl Quiet {
    pub(super) fn new(ras: Option<u16>) -> Quiet {
        Quiet {
            since: Instant::now(),
            was_named: false,
            was_hanging: false,
            ras,
            nccl: None,
            slow: Reminders::default(),
        }
    }
}

/// How the ranks of an attempt have ended.
pub(super) struct Ranks {
    /// How many have not.
    pub left: usize,
    pub failures: Vec<(usize, Outcome)>,
    /// Whether a process was asked to end before it did.
    pub was_stopped: bool,
    /// Those whose calls have failed, as it was heard.
    pub failed_calls: Vec<(usize, Error)>,
    /// Those whose actors are gone.
    pub lost: Vec<(usize, Error)>,
    /// What functions raised.
    pub raised: BTreeMap<usize, Vec<u8>>,
    /// By rank, if they are calls.
    pub calls: Vec<AnyRef>,
}

impl Ranks {
    pub(super) fn new(count: usize, calls: Vec<AnyRef>) -> Ranks {
        Ranks {
            left: count,
            failures: Vec::new(),
            was_stopped: false,
            failed_calls: Vec::new(),
            lost: Vec::new(),
            raised: BTreeMap::new(),
            calls,
        }
    }

    /// Whether none has failed.
    pub(super) fn are_well(&self) -> bool {
        self.failures.is_empty() && self.failed_calls.is_empty() && self.lost.is_empty()
    }
}
