//! The leases of an owner: each of them, when something follows from one alone, and what those of one shape come to.
//!
//! Decisions are made from sums and orders that are kept as leases change, so that a message costs what it has touched, however
//! many leases there are. Whoever changes a lease takes it from [`Leases::change`]; before the next decision, [`Leases::changed`]
//! says whose entries are to be renewed.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

use wingbeat_core::LeaseId;
use wingbeat_net::messages::WorkerDeath;

use super::{CAUSE_LIMIT_MS, Grant, IDLE_KEEP_MS, STUCK_MS, Task};

/// A lease that has delivered nothing for so long is not about to be done by itself.
const QUIET_MS: u64 = 2;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Phase {
    Open,
    /// The worker process waits in user code, and takes no tasks.
    Waiting,
    /// The head wants it back; what runs finishes.
    Recalled,
    /// The connection to the worker process ended; its cause is not known yet.
    Lost {
        since_ms: u64,
    },
}

/// A lease, from the head's word until it is given up.
pub(super) struct Lease {
    /// As the head has granted it. Nothing of it changes.
    pub grant: Grant,
    /// Changed by what the head and the worker process say, and by [`Leases::lose`]; who is lost stays so.
    pub phase: Phase,
    /// In order of pushing. `next - in_flight.len()` is not the first's number: tasks leave in any order.
    pub in_flight: VecDeque<(u64, Task)>,
    /// What those weigh.
    pub bytes: usize,
    /// The number of the next task that is pushed.
    pub next: u64,
    /// Tasks were asked back, until the answer to that.
    pub taking_back: bool,
    /// Of a shape that is to be spread: which push to any of its leases the last one to this lease was.
    pub turn: u64,
    /// Since when nothing is in flight, while nothing is. Counted anew while it is kept for tasks that wait.
    pub idle_since_ms: u64,
    /// When it last delivered, or got its first task.
    pub last_result_ms: u64,
    /// The news of its end, if it came before the end of the connection.
    pub death: Option<WorkerDeath>,
    /// How it was entered last; none before the first time.
    entry: Option<Entry>,
    /// It is among those that were changed since.
    is_changed: bool,
}

impl Lease {
    pub(super) fn new(grant: Grant, now_ms: u64) -> Lease {
        Lease {
            grant,
            phase: Phase::Open,
            in_flight: VecDeque::new(),
            bytes: 0,
            next: 0,
            taking_back: false,
            turn: 0,
            idle_since_ms: now_ms,
            last_result_ms: now_ms,
            death: None,
            entry: None,
            is_changed: false,
        }
    }

    fn entry(&self, now_ms: u64) -> Entry {
        let in_flight = self.in_flight.len();
        let silent_ms = if in_flight == 0 { 0 } else { now_ms.saturating_sub(self.last_result_ms) };
        let silence = match silent_ms {
            STUCK_MS.. => Silence::Stuck,
            QUIET_MS.. => Silence::Quiet,
            _ => Silence::Delivers,
        };
        let ages_at = match silence {
            Silence::Delivers if in_flight > 0 => Some(self.last_result_ms + QUIET_MS),
            Silence::Quiet => Some(self.last_result_ms + STUCK_MS),
            Silence::Delivers | Silence::Stuck => None,
        };
        let wakes_at = match self.phase {
            Phase::Lost { since_ms } => Some(since_ms + CAUSE_LIMIT_MS),
            // Where something waits that has nothing in flight, an earlier task has left something behind.
            Phase::Open | Phase::Waiting if in_flight == 0 => Some(self.idle_since_ms + IDLE_KEEP_MS),
            // What stands behind a task that turns out to be long is to start elsewhere.
            Phase::Open if in_flight > 1 && silence != Silence::Stuck => Some(self.last_result_ms + STUCK_MS),
            _ => None,
        };
        let (phase, taking_back, turn) = (self.phase, self.taking_back, self.turn);
        let place = Place { phase, in_flight, silence, taking_back, turn };
        Entry { place, ages_at, wakes_at }
    }
}

/// How long a lease with tasks has delivered nothing.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Silence {
    Delivers,
    Quiet,
    /// What runs there is no short task.
    Stuck,
}

/// What decisions about others need to know of a lease.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Place {
    phase: Phase,
    in_flight: usize,
    silence: Silence,
    taking_back: bool,
    turn: u64,
}

impl Place {
    fn unstarted(&self) -> usize {
        self.in_flight.saturating_sub(1)
    }

    /// Whether it takes more tasks.
    fn is_open(&self) -> bool {
        self.phase == Phase::Open && self.silence != Silence::Stuck
    }

    /// Whether others may have what it has not started.
    fn may_give(&self) -> bool {
        let is_there = matches!(self.phase, Phase::Open | Phase::Waiting);
        is_there && !self.taking_back && self.in_flight > 1 && self.silence >= Silence::Quiet
    }
}

/// How a lease is entered.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Entry {
    place: Place,
    /// When its silence means more, if nothing happens.
    ages_at: Option<u64>,
    /// When it asks for time to pass.
    wakes_at: Option<u64>,
}

/// A lease that takes tasks, in the order in which they get some: how many it has, its turn, and which it is.
pub(super) type OpenLease = (usize, u64, LeaseId);

/// What the leases of one shape come to.
#[derive(Default)]
#[cfg_attr(test, derive(PartialEq, Debug))]
pub(super) struct Standings {
    pub held: usize,
    /// Those whose process waits.
    pub waiting: usize,
    /// Others that have tasks.
    pub busy: usize,
    /// Tasks behind the first one of a lease: of those that may deliver soon ...
    pub unstarted: usize,
    /// ... and of those that are stuck.
    pub unstarted_behind_stuck: usize,
    /// Leases with more than one task.
    stacked: usize,
    /// Those that take tasks, by how many they have.
    open: BTreeSet<OpenLease>,
    /// How many of them have so many.
    levels: BTreeMap<usize, usize>,
    /// Those that may give tasks to others, by how many they have.
    givers: BTreeSet<(usize, Reverse<LeaseId>)>,
}

impl Standings {
    /// How many open leases have at most so many tasks, and how many tasks those have together.
    pub(super) fn open_up_to(&self, most: usize) -> (usize, usize) {
        let levels = self.levels.range(..=most);
        levels.fold((0, 0), |(leases, tasks), (level, count)| (leases + count, tasks + level * count))
    }

    /// The open lease with the fewest tasks that comes after another in this order.
    pub(super) fn open_after(&self, after: Option<OpenLease>) -> Option<OpenLease> {
        use std::ops::Bound::{Excluded, Unbounded};
        match after {
            None => self.open.first().copied(),
            Some(after) => self.open.range((Excluded(after), Unbounded)).next().copied(),
        }
    }

    /// How many tasks are with them.
    pub(super) fn tasks(&self) -> usize {
        self.busy + self.unstarted + self.unstarted_behind_stuck
    }

    pub(super) fn has_idle(&self) -> bool {
        self.levels.contains_key(&0)
    }

    /// The lease that has most of those that may give tasks to others.
    pub(super) fn fullest(&self) -> Option<LeaseId> {
        self.givers.last().map(|(_, Reverse(id))| *id)
    }

    /// Somebody has nothing to do, and somebody else more than one task.
    fn is_uneven(&self) -> bool {
        self.stacked > 0 && self.has_idle()
    }

    fn add(&mut self, id: LeaseId, place: Place) {
        self.held += 1;
        match place.phase {
            Phase::Waiting => self.waiting += 1,
            _ => self.busy += usize::from(place.in_flight > 0),
        }
        *self.unstarted_of(place) += place.unstarted();
        self.stacked += usize::from(place.in_flight > 1);
        if place.is_open() {
            self.open.insert((place.in_flight, place.turn, id));
            *self.levels.entry(place.in_flight).or_default() += 1;
        }
        if place.may_give() {
            self.givers.insert((place.in_flight, Reverse(id)));
        }
    }

    fn remove(&mut self, id: LeaseId, place: Place) {
        self.held -= 1;
        match place.phase {
            Phase::Waiting => self.waiting -= 1,
            _ => self.busy -= usize::from(place.in_flight > 0),
        }
        *self.unstarted_of(place) -= place.unstarted();
        self.stacked -= usize::from(place.in_flight > 1);
        if place.is_open() {
            self.open.remove(&(place.in_flight, place.turn, id));
            if let Some(count) = self.levels.get_mut(&place.in_flight) {
                *count -= 1;
                if *count == 0 {
                    self.levels.remove(&place.in_flight);
                }
            }
        }
        if place.may_give() {
            self.givers.remove(&(place.in_flight, Reverse(id)));
        }
    }

    fn unstarted_of(&mut self, place: Place) -> &mut usize {
        if place.silence == Silence::Stuck { &mut self.unstarted_behind_stuck } else { &mut self.unstarted }
    }
}

/// All leases.
#[derive(Default)]
pub(super) struct Leases {
    all: BTreeMap<LeaseId, Lease>,
    /// Those that were changed since they were entered.
    changed: Vec<LeaseId>,
    /// When the silence of each means more.
    ages: BTreeSet<(u64, LeaseId)>,
    /// When each asks for time to pass.
    wakes: BTreeSet<(u64, LeaseId)>,
    /// Those whose connection is lost.
    lost: BTreeSet<LeaseId>,
    /// Shapes of which one lease has nothing to do, and another more than one task.
    uneven: usize,
    /// How often a lease was looked at.
    #[cfg(test)]
    pub looks: usize,
}

impl Leases {
    pub(super) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    pub(super) fn get(&self, id: LeaseId) -> Option<&Lease> {
        self.all.get(&id)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Lease> {
        self.all.values()
    }

    /// All tasks that were pushed, to be marked: how many there are where does not change.
    pub(super) fn tasks_mut(&mut self) -> impl Iterator<Item = (&Grant, &mut Task)> {
        let leases = self.all.values_mut();
        leases.flat_map(|lease| lease.in_flight.iter_mut().map(|(_, task)| (&lease.grant, task)))
    }

    pub(super) fn insert(&mut self, lease: Lease) {
        let id = lease.grant.lease;
        self.all.insert(id, lease);
        self.change(id);
    }

    /// A lease, to be changed.
    pub(super) fn change(&mut self, id: LeaseId) -> Option<&mut Lease> {
        let lease = self.all.get_mut(&id)?;
        if !std::mem::replace(&mut lease.is_changed, true) {
            self.changed.push(id);
        }
        Some(lease)
    }

    /// Its connection is lost.
    pub(super) fn lose(&mut self, id: LeaseId, now_ms: u64) {
        let Some(lease) = self.change(id) else { return };
        if !matches!(lease.phase, Phase::Lost { .. }) {
            lease.phase = Phase::Lost { since_ms: now_ms };
            self.lost.insert(id);
        }
    }

    /// The next lease whose entry is to be renewed.
    pub(super) fn changed(&mut self, now_ms: u64) -> Option<LeaseId> {
        if let Some(id) = self.changed.pop() {
            return Some(id);
        }
        let (_, id) = self.ages.first().copied().filter(|(at, _)| *at <= now_ms)?;
        self.ages.pop_first();
        if let Some(entry) = self.all.get_mut(&id).and_then(|lease| lease.entry.as_mut()) {
            entry.ages_at = None;
        }
        Some(id)
    }

    /// Changes a lease, and renews its entry at once.
    pub(super) fn change_now<R>(
        &mut self,
        id: LeaseId,
        standings: &mut Standings,
        now_ms: u64,
        change: impl FnOnce(&mut Lease) -> R,
    ) -> Option<R> {
        let done = change(self.all.get_mut(&id)?);
        self.enter(id, standings, now_ms);
        Some(done)
    }

    /// Renews the entry of a lease. Whether that matters for others of its shape, whose `standings` are these.
    pub(super) fn enter(&mut self, id: LeaseId, standings: &mut Standings, now_ms: u64) -> bool {
        #[cfg(test)]
        {
            self.looks += 1;
        }
        let Some(lease) = self.all.get_mut(&id) else { return false };
        lease.is_changed = false;
        let after = lease.entry(now_ms);
        let before = lease.entry.replace(after);
        if before == Some(after) {
            return false;
        }
        renew(&mut self.ages, id, before.and_then(|entry| entry.ages_at), after.ages_at);
        renew(&mut self.wakes, id, before.and_then(|entry| entry.wakes_at), after.wakes_at);
        if before.is_some_and(|before| before.place == after.place) {
            return false;
        }
        let was_uneven = standings.is_uneven();
        if let Some(before) = before {
            standings.remove(id, before.place);
        }
        standings.add(id, after.place);
        self.uneven = self.uneven + usize::from(standings.is_uneven()) - usize::from(was_uneven);
        true
    }

    /// Takes out a lease of the shape whose `standings` are these.
    pub(super) fn remove(&mut self, id: LeaseId, standings: Option<&mut Standings>) -> Option<Lease> {
        let lease = self.all.remove(&id)?;
        self.lost.remove(&id);
        if let Some(entry) = lease.entry {
            renew(&mut self.ages, id, entry.ages_at, None);
            renew(&mut self.wakes, id, entry.wakes_at, None);
            if let Some(standings) = standings {
                let was_uneven = standings.is_uneven();
                standings.remove(id, entry.place);
                self.uneven = self.uneven + usize::from(standings.is_uneven()) - usize::from(was_uneven);
            }
        }
        Some(lease)
    }

    pub(super) fn take_all(&mut self) -> impl Iterator<Item = Lease> + use<> {
        std::mem::take(self).all.into_values()
    }

    /// Those from which something follows now, by id; all have to be entered.
    pub(super) fn due(&self, now_ms: u64) -> Vec<LeaseId> {
        let mut due: Vec<LeaseId> = self.wakes.range(..=(now_ms, LeaseId(u64::MAX))).map(|(_, id)| *id).collect();
        due.sort_unstable();
        due
    }

    /// When something follows next.
    pub(super) fn next_due(&self) -> Option<u64> {
        self.wakes.first().map(|(at, _)| *at)
    }

    /// Whether somebody has nothing to do while another lease of its shape has more than one task.
    pub(super) fn are_uneven(&self) -> bool {
        self.uneven > 0
    }

    /// Those whose connection is lost, and of whose end nothing is known.
    pub(super) fn lost(&self) -> &BTreeSet<LeaseId> {
        &self.lost
    }
}

#[cfg(all(test, debug_assertions))]
impl Leases {
    /// What all leases of a shape come to, from each of them. All have to be entered.
    pub(super) fn counted(&self, shape: &std::sync::Arc<wingbeat_core::spec::Shape>, now_ms: u64) -> Standings {
        let mut counted = Standings::default();
        for (id, lease) in self.all.iter().filter(|(_, lease)| lease.grant.shape == *shape) {
            let entry = lease.entry(now_ms);
            assert!(lease.entry == Some(entry), "{id} was changed unseen");
            assert!(entry.ages_at.is_none_or(|at| self.ages.contains(&(at, *id))));
            assert!(entry.wakes_at.is_none_or(|at| self.wakes.contains(&(at, *id))));
            assert_eq!(self.lost.contains(id), matches!(lease.phase, Phase::Lost { .. }));
            counted.add(*id, entry.place);
        }
        counted
    }

    /// Nothing is kept of leases that are gone, or twice of one.
    pub(super) fn audit<'a>(&self, all: impl Iterator<Item = &'a Standings>) {
        let entries = || self.all.values().filter_map(|lease| lease.entry);
        assert_eq!(self.ages.len(), entries().filter(|entry| entry.ages_at.is_some()).count());
        assert_eq!(self.wakes.len(), entries().filter(|entry| entry.wakes_at.is_some()).count());
        assert_eq!(self.uneven, all.filter(|standings| standings.is_uneven()).count());
        assert!(self.lost.iter().all(|id| self.all.contains_key(id)));
    }
}

fn renew(times: &mut BTreeSet<(u64, LeaseId)>, id: LeaseId, before: Option<u64>, after: Option<u64>) {
    if before == after {
        return;
    }
    if let Some(before) = before {
        times.remove(&(before, id));
    }
    if let Some(after) = after {
        times.insert((after, id));
    }
}
