//! Which bytes of the arena are free, and which have memory behind them. Pure: no IO, no clock.
//!
//! Freed memory stays backed for [`WARM_FOR`] and is given out again newest first, because pages
//! that are already there cost no faults and no zeroing; but nothing is given out in the middle of a
//! free run, of which then two parts would be left that are too short for the next. What stays free longer is *withdrawn* by
//! [`Allocator::trim`]: the caller punches it out, without a lock if it likes since nobody else can
//! be given it meanwhile, and hands it back with [`Allocator::punched`].

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::extent::{Extent, PAGE};
use crate::ranges::Ranges;

/// How long freed memory keeps its pages before it is punched out.
///
/// Long enough that a loop which makes and drops an object per step reuses the same pages; short
/// enough that an idle node soon gives back what a burst took.
pub const WARM_FOR: Duration = Duration::from_secs(10);

/// Objects of this many bytes or more start on a page and own their pages whole, so that they can
/// be backed and punched alone; at this size the rounding costs little.
pub const LARGE: u64 = 1 << 20;

/// Alignment of everything else: a cache line, which is also what SIMD loads and Arrow ask for.
pub const SMALL_ALIGN: u64 = 64;

/// How many recently freed runs are tried before best fit: in the loops that profit from warmth the
/// first one fits, and a long search would cost more than the faults it saves.
const NEWEST_TRIED: usize = 32;

/// Where something that was asked for lies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Allocation {
    /// The bytes; exactly as many as were asked for.
    pub extent: Extent,
    /// The pages of it that have no memory yet. They must be reserved before use, and
    /// [`Allocator::backed`] be told.
    pub cold: Vec<Extent>,
}

/// Pages that are free and still backed.
#[derive(Debug, Clone, Copy)]
struct Idle {
    end: u64,
    since: Duration,
    /// Running number of the free that made them idle: larger is newer.
    order: u64,
}

/// The map of an arena.
#[derive(Debug)]
pub struct Allocator {
    capacity: u64,
    /// Bytes that may be given out.
    free: Ranges,
    /// Pages with memory behind them, used or free.
    backed: Ranges,
    /// The pages that are backed and wholly free, by start; disjoint, cut where their ages differ.
    idle: BTreeMap<u64, Idle>,
    /// (order, start) of every entry of `idle`.
    by_age: BTreeSet<(u64, u64)>,
    /// Free bytes that are being punched out and must not be given out until that is done.
    withdrawn: Ranges,
    /// The order that the next free gets.
    next_order: u64,
}

/// What an object of `size` bytes takes of the arena.
fn footprint(size: u64) -> u64 {
    size.max(1).next_multiple_of(alignment(size))
}

fn alignment(size: u64) -> u64 {
    if size >= LARGE { PAGE } else { SMALL_ALIGN }
}

/// Where something of `size` bytes would lie in a free run, if it fits.
fn place(run: Extent, size: u64) -> Option<Extent> {
    let offset = run.offset.next_multiple_of(alignment(size));
    (offset.checked_add(footprint(size))? <= run.end()).then_some(Extent { offset, len: size })
}

/// All bytes that something of `size` bytes would take of the shortest run where it fits.
pub(crate) fn place_in(runs: &Ranges, size: u64) -> Option<Extent> {
    runs.at_least(footprint(size)).find_map(|run| place(run, size)).map(taken_for)
}

/// All bytes that were taken for an extent.
pub(crate) fn taken_for(extent: Extent) -> Extent {
    Extent { offset: extent.offset, len: footprint(extent.len) }
}

impl Allocator {
    /// An allocator of `capacity` bytes (a multiple of the page size), all free and cold.
    pub fn new(capacity: u64) -> Self {
        debug_assert!(capacity.is_multiple_of(PAGE), "an arena consists of whole pages");
        let mut free = Ranges::default();
        free.insert(Extent { offset: 0, len: capacity });
        Self {
            capacity,
            free,
            backed: Ranges::default(),
            idle: BTreeMap::new(),
            by_age: BTreeSet::new(),
            withdrawn: Ranges::default(),
            next_order: 0,
        }
    }

    /// Size of the arena in bytes.
    pub fn capacity(&self) -> u64 {
        self.capacity
    }

    /// Bytes that belong to nothing, those being punched out included.
    pub fn free_bytes(&self) -> u64 {
        self.free.total() + self.withdrawn.total()
    }

    /// Bytes that have memory behind them, used or still warm.
    pub fn backed_bytes(&self) -> u64 {
        self.backed.total()
    }

    /// Gives out `size` bytes, or nothing if no free run is long enough.
    pub fn allocate(&mut self, size: u64) -> Option<Allocation> {
        if size > self.capacity {
            return None;
        }
        let extent = self.newest_warm(size).or_else(|| self.best_fit(size))?;
        let taken = taken_for(extent);
        self.free.remove(taken);
        let pages = taken.pages_touched();
        self.not_idle(pages);
        Some(Allocation { extent, cold: self.backed.gaps(pages) })
    }

    /// Records that pages have memory now: those that an [`Allocation`] called cold.
    pub fn backed(&mut self, cold: &[Extent]) {
        for &pages in cold {
            for gap in self.backed.gaps(pages) {
                self.backed.insert(gap);
            }
        }
    }

    /// Takes back an extent that [`Allocator::allocate`] gave out.
    pub fn free(&mut self, extent: Extent, now: Duration) {
        self.add_free(taken_for(extent), now);
    }

    /// Withdraws the pages that have been free for `older_than`, to be punched out by the caller.
    pub fn trim(&mut self, now: Duration, older_than: Duration) -> Vec<Extent> {
        let mut old = Ranges::default();
        while let Some(&(order, start)) = self.by_age.first() {
            let Some(&idle) = self.idle.get(&start) else { break };
            if now.saturating_sub(idle.since) < older_than {
                break;
            }
            self.by_age.remove(&(order, start));
            self.idle.remove(&start);
            let pages = Extent::between(start, idle.end);
            self.free.remove(pages);
            self.backed.remove(pages);
            self.withdrawn.insert(pages);
            old.insert(pages);
        }
        old.iter().collect()
    }

    /// Takes back an extent that [`Allocator::trim`] withdrew, now cold.
    pub fn punched(&mut self, extent: Extent) {
        self.withdrawn.remove(extent);
        self.free.insert(extent);
    }

    /// Takes back an extent that [`Allocator::trim`] withdrew and that could not be punched out.
    pub fn punch_failed(&mut self, extent: Extent, now: Duration) {
        self.withdrawn.remove(extent);
        self.backed.insert(extent);
        self.add_free(extent, now);
    }

    /// What if other extents were free too? See [`Foresight`].
    pub fn foresee(&self, size: u64) -> Foresight<'_> {
        let mut foresight = Foresight::over(&self.free, size);
        for extent in self.withdrawn.iter() {
            foresight.join(extent);
        }
        foresight
    }

    fn add_free(&mut self, taken: Extent, now: Duration) {
        let run = self.free.insert(taken);
        // A page is idle once its last byte is free, so only pages that `taken` touches are new.
        let Some(pages) = taken.pages_touched().intersection(run.pages_within()) else { return };
        let order = self.next_order;
        self.next_order += 1;
        for part in self.backed.within(pages) {
            self.idle.insert(part.offset, Idle { end: part.end(), since: now, order });
            self.by_age.insert((order, part.offset));
        }
    }

    /// Takes pages out of `idle`, cutting the runs that reach beyond them.
    fn not_idle(&mut self, pages: Extent) {
        while let Some((&start, &idle)) = self.idle.range(..pages.end()).next_back() {
            if idle.end <= pages.offset {
                break;
            }
            self.idle.remove(&start);
            self.by_age.remove(&(idle.order, start));
            if start < pages.offset {
                self.idle.insert(start, Idle { end: pages.offset, ..idle });
                self.by_age.insert((idle.order, start));
            }
            if pages.end() < idle.end {
                self.idle.insert(pages.end(), idle);
                self.by_age.insert((idle.order, pages.end()));
            }
        }
    }

    fn newest_warm(&self, size: u64) -> Option<Extent> {
        self.by_age.iter().rev().take(NEWEST_TRIED).find_map(|&(_, start)| {
            let extent = Extent { offset: start, len: size };
            let taken = taken_for(extent);
            let run = self.free.run_around(taken)?;
            let splits = taken.offset - run.offset >= PAGE && taken.end() < run.end();
            (!splits && self.backed.contains(taken.pages_touched())).then_some(extent)
        })
    }

    fn best_fit(&self, size: u64) -> Option<Extent> {
        self.free.at_least(footprint(size)).find_map(|run| place(run, size))
    }
}

/// Answers where something would fit if more were free. Built up one extent after another; what that costs does not
/// depend on how much is free.
#[derive(Debug)]
pub struct Foresight<'a> {
    free: &'a Ranges,
    /// What is supposed to be free, with the free runs beside it.
    supposed: Ranges,
    size: u64,
}

impl<'a> Foresight<'a> {
    /// Where something of `size` bytes would fit if these bytes were free.
    pub(crate) fn over(free: &'a Ranges, size: u64) -> Self {
        Self { free, supposed: Ranges::default(), size }
    }

    /// Whether it fits without anything more.
    pub fn fits(&self) -> bool {
        let needed = footprint(self.size);
        let mut runs = self.supposed.at_least(needed).chain(self.free.at_least(needed));
        runs.any(|run| place(run, self.size).is_some())
    }

    /// Supposes that an allocated extent were free. Answers the bytes that would be taken, if it
    /// fits around there now.
    pub fn suppose_free(&mut self, extent: Extent) -> Option<Extent> {
        let run = self.join(taken_for(extent));
        place(run, self.size).map(taken_for)
    }

    fn join(&mut self, extent: Extent) -> Extent {
        let mut run = self.supposed.insert(extent);
        // A free run that is supposed already is part of `run` by now, and so is not beside it.
        for beside in self.free.beside(run).into_iter().flatten() {
            run = self.supposed.insert(beside);
        }
        run
    }
}

#[cfg(test)]
mod tests;
