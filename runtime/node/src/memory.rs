//! Who is ended when memory is short. Pure: samples in, verdict out.
//!
//! ```text
//!   used < threshold                    nothing
//!   the object store can give           it does, as long as there is room for that
//!   else                                somebody ends; one at a time
//! ```
//!
//! Who: first, those are looked for whose end would help, by what they have taken lately, or have if nobody takes much. Of these, who
//! loses least goes first: an idle process is asked to leave; then tasks that are tried again, of the owner who has most of them,
//! the newest first; then actors that live again; then who was asked to leave and has not for a while, since values that it owns may be
//! lost; then tasks that are not tried again, and other actors. So a task that takes more
//! and more is ended, and not those beside it; and of many that are alike, the one that has done the least.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use serde::{Deserialize, Serialize};
use wingbeat_core::memory::MemoryUsage;
use wingbeat_core::{LeaseId, ProcessId};

use crate::clock::Millis;

/// What somebody has taken within this time is what he takes now.
const LATELY: Millis = 10_000;
/// Who has less than this part of what the largest has, or has taken, is not why memory is short.
const SHARE: u64 = 4;
/// As long as nobody has taken this part of all memory lately, what each has counts.
const TAKEN: u64 = 128;
/// Bytes that a process takes in a millisecond, if it does nothing else.
const TAKEN_PER_MS: u64 = (1 << 30) / 1_000;
/// The end of who has less than this part of all memory never helps.
const TOO_SMALL: u64 = 1_024;
/// Nobody ends where all of the node have less than this part of what is used.
const OURS: u64 = 8;
/// The kernel takes the memory of a killed process back within this time; else another one must end.
const ENDING: Millis = 2_000;
/// Who was asked to leave has left within this time, or has said that it stays; else it waits for somebody who is away.
const LEAVING: Millis = 2_000;
/// A process ends later than the kernel says that it kills it: it may have much to give back.
const KILLING: Millis = 10_000;

/// What a worker process does, as far as its end is concerned.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Work {
    /// Nothing.
    Idle,
    /// It was asked to leave, and has not yet.
    Leaving,
    /// It runs tasks.
    Tasks {
        /// Of whom.
        owner: ProcessId,
        /// Whether the one that runs is tried again.
        yields: bool,
    },
    /// It is an actor.
    Actor {
        /// Whether that lives again.
        restarts: bool,
    },
}

/// A worker process that could be ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct User {
    /// Which.
    pub process: ProcessId,
    /// The lease that it serves.
    pub lease: Option<LeaseId>,
    /// What it does.
    pub work: Work,
    /// Another number for each task.
    pub started: u64,
    /// Bytes that its end would give back.
    pub bytes: u64,
}

/// What is used at a moment.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Sample {
    /// All of it.
    pub usage: MemoryUsage,
    /// By whom; none if nobody had a look, since there was enough, or the last look was just before.
    pub users: Option<Vec<User>>,
    /// Whether somebody who was ended for this is not gone yet.
    pub is_ending: bool,
    /// Whether the object store could give something back.
    pub store_gives: bool,
}

/// What is to be done.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// Nothing.
    Enough,
    /// The object store gives so many bytes back, or writes them to the disk.
    Relieve(u64),
    /// An idle process is asked to leave.
    Retire(ProcessId),
    /// A process is ended.
    End(ProcessId, Option<LeaseId>),
    /// Nobody is there whose end would help.
    Helpless,
}

/// For how long there must be enough before memory counts as short no more.
const CALM: Millis = 5_000;

/// Whether those who look after the cluster are to know that memory is short.
#[derive(Debug, Default)]
pub struct Strain {
    is_said: bool,
    enough_since: Option<Millis>,
}

impl Strain {
    /// So much is used: what is to be said, if anything is. That memory is short, or that it is not any more.
    pub fn look(&mut self, now: Millis, usage: &MemoryUsage) -> Option<bool> {
        if usage.threshold > 0 && usage.used >= usage.threshold {
            self.enough_since = None;
            return (!std::mem::replace(&mut self.is_said, true)).then_some(true);
        }
        if !self.is_said || now.saturating_sub(*self.enough_since.get_or_insert(now)) < CALM {
            return None;
        }
        *self = Strain::default();
        Some(false)
    }
}

/// A process as it was seen.
#[derive(Debug)]
struct SeenProcess {
    started: u64,
    /// When what it runs was seen first.
    since: Millis,
    /// Since when it leaves, if it does.
    leaves_since: Option<Millis>,
    /// What it had, oldest first, not longer ago than [`LATELY`].
    had: VecDeque<(Millis, u64)>,
}

/// Watches the memory of a node.
#[derive(Debug, Default)]
pub struct Watch {
    seen: BTreeMap<ProcessId, SeenProcess>,
    /// Whether the last sample said who uses what: who is new since then has taken all that it has.
    is_looking: bool,
    ended_at: Option<Millis>,
    /// Idle ones that were asked to leave since memory is short.
    asked: BTreeSet<ProcessId>,
}

impl Watch {
    /// Takes in a sample, and says what follows. The time never goes back.
    pub fn look(&mut self, now: Millis, sample: &Sample) -> Verdict {
        let usage = &sample.usage;
        self.note(now, sample);
        if usage.threshold == 0 || usage.used < usage.threshold {
            self.asked.clear();
            return Verdict::Enough;
        }
        if sample.is_ending && self.ended_at.is_some_and(|ended| now < ended + ENDING) {
            return Verdict::Enough;
        }
        let room = usage.limit.saturating_sub(usage.threshold) / 2;
        if sample.store_gives && usage.used < usage.threshold + room {
            return Verdict::Relieve(usage.used - usage.threshold + room);
        }
        let users = sample.users.as_deref().unwrap_or_default();
        let leaves = |user: &User| self.asked.contains(&user.process) && !self.is_stuck(user, now);
        let leaving: u64 = users.iter().filter(|user| is_leaving(user) && leaves(user)).map(|user| user.bytes).sum();
        let takes = |user: &User| !is_leaving(user) && self.taken(user) >= usage.limit / TAKEN;
        let somebody_takes = users.iter().any(takes);
        if usage.used.saturating_sub(leaving) < usage.threshold && !somebody_takes {
            // There will be enough in a moment.
            return Verdict::Enough;
        }
        let verdict = self.choose(now, usage, users);
        match verdict {
            Verdict::End(..) => self.ended_at = Some(now),
            Verdict::Retire(process) => drop(self.asked.insert(process)),
            Verdict::Enough | Verdict::Relieve(_) | Verdict::Helpless => {}
        }
        verdict
    }

    fn note(&mut self, now: Millis, sample: &Sample) {
        let Some(users) = &sample.users else {
            if !is_scarce(&sample.usage) {
                self.is_looking = false;
                self.seen.clear();
            }
            return;
        };
        let known: BTreeSet<ProcessId> = users.iter().map(|user| user.process).collect();
        self.seen.retain(|process, _| known.contains(process));
        for user in users {
            let was_looking = self.is_looking;
            let seen = self.seen.entry(user.process).or_insert_with(|| SeenProcess {
                started: user.started,
                since: now,
                leaves_since: None,
                had: was_looking.then_some((now, 0)).into_iter().collect(),
            });
            if seen.started != user.started {
                (seen.started, seen.since) = (user.started, now);
            }
            seen.leaves_since = (user.work == Work::Leaving).then(|| seen.leaves_since.unwrap_or(now));
            // One sample from before stays, against which the oldest of the others is measured.
            while seen.had.get(1).is_some_and(|(at, _)| at + LATELY <= now) {
                seen.had.pop_front();
            }
            seen.had.push_back((now, user.bytes));
        }
        self.is_looking = true;
    }

    /// What a process has taken lately.
    fn taken(&self, user: &User) -> u64 {
        let had = self.seen.get(&user.process).and_then(|seen| seen.had.iter().map(|(_, bytes)| *bytes).min());
        user.bytes.saturating_sub(had.unwrap_or(user.bytes))
    }

    /// Whether a process that was asked to leave has not for too long.
    fn is_stuck(&self, user: &User, now: Millis) -> bool {
        let since = self.seen.get(&user.process).and_then(|seen| seen.leaves_since);
        since.is_some_and(|since| now >= since + LEAVING)
    }

    fn choose(&self, now: Millis, usage: &MemoryUsage, users: &[User]) -> Verdict {
        let ours: u64 = users.iter().map(|user| user.bytes).sum();
        let may_go = |user: &&User| match user.work {
            Work::Idle => !self.asked.contains(&user.process),
            Work::Leaving => self.is_stuck(user, now),
            Work::Tasks { .. } | Work::Actor { .. } => true,
        };
        let users: Vec<&User> = users.iter().filter(may_go).collect();
        let taken = users.iter().map(|user| self.taken(user)).max().unwrap_or_default();
        let weigh = |user: &User| if taken >= usage.limit / TAKEN { self.taken(user) } else { user.bytes };
        let heaviest = users.iter().map(|user| weigh(user)).max().unwrap_or_default();
        // Others on the machine, or objects, are why memory is short.
        let is_ours = ours + usage.store >= usage.used / OURS && (taken >= usage.limit / TAKEN || ours >= usage.store);
        if !is_ours {
            return Verdict::Helpless;
        }
        let helps = |user: &&&User| user.bytes > usage.limit / TOO_SMALL && weigh(user) >= heaviest / SHARE;
        let mut running: BTreeMap<ProcessId, usize> = BTreeMap::new();
        for user in &users {
            if let Work::Tasks { owner, yields: true } = user.work {
                *running.entry(owner).or_default() += 1;
            }
        }
        let order = |user: &&&User| {
            let (rank, beside) = match user.work {
                Work::Idle => (0, 0),
                Work::Tasks { owner, yields: true } => (1, running.get(&owner).copied().unwrap_or_default()),
                Work::Actor { restarts: true } => (2, 0),
                Work::Leaving => (3, 0),
                Work::Tasks { yields: false, .. } => (4, 0),
                Work::Actor { restarts: false } => (5, 0),
            };
            let since = self.seen.get(&user.process).map_or(0, |seen| seen.since);
            // The first is chosen: the largest group, the latest begin, the most bytes.
            (rank, std::cmp::Reverse((beside, since, user.bytes, user.process)))
        };
        match users.iter().filter(helps).min_by_key(order) {
            Some(User { process, work: Work::Idle, .. }) => Verdict::Retire(*process),
            Some(User { process, lease, .. }) => Verdict::End(*process, *lease),
            None => Verdict::Helpless,
        }
    }
}

fn is_leaving(user: &User) -> bool {
    user.work == Work::Leaving
}

/// After how long the next look is due, if `interval` is usual where a quarter of all memory is left: the less is left, the sooner, and
/// before a process that takes memory as fast as it can has taken all of it.
#[must_use]
pub fn pause(usage: &MemoryUsage, interval: Millis) -> Millis {
    let left = usage.threshold.saturating_sub(usage.used);
    let of_all = left as f64 / usage.limit.max(1) as f64;
    let usual = (interval as f64 * (4.0 * of_all).min(4.0)) as Millis;
    usual.min(left / TAKEN_PER_MS).max(interval / 10)
}

/// Whether it is time to look who uses what.
#[must_use]
pub fn is_scarce(usage: &MemoryUsage) -> bool {
    usage.threshold > 0 && usage.used >= usage.threshold / 2
}

/// Which kills were the kernel's: its count of them in a control group, against the processes there that SIGKILL ended.
#[derive(Debug, Default)]
pub struct KernelKills {
    count: Option<u64>,
    /// When the count rose, for each kill that no process is known for yet.
    unexplained: VecDeque<Millis>,
}

impl KernelKills {
    /// The group's count is this now; none if it has none.
    pub fn counts(&mut self, now: Millis, count: Option<u64>) {
        let rise = self.count.zip(count).map_or(0, |(before, now)| now.saturating_sub(before));
        self.count = count.or(self.count);
        self.unexplained.extend((0..rise.min(64)).map(|_| now));
        while self.unexplained.front().is_some_and(|at| at + KILLING < now) {
            self.unexplained.pop_front();
        }
    }

    /// A process of the group was ended by a SIGKILL that nobody here has sent. Whether it was the kernel that did.
    pub fn explains(&mut self) -> bool {
        self.unexplained.pop_front().is_some()
    }
}

#[cfg(test)]
#[path = "memory_tests.rs"]
mod tests;
