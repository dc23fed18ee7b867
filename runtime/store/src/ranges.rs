//! A set of bytes, kept as maximal runs.

use std::collections::{BTreeMap, BTreeSet};

use crate::extent::Extent;

/// A set of bytes. Runs that touch are one run, so there is one way to write each set.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Ranges {
    /// Start → end of every run.
    runs: BTreeMap<u64, u64>,
    /// The same runs as (length, start), for best fit.
    by_len: BTreeSet<(u64, u64)>,
    /// How many bytes are in the set.
    total: u64,
}

impl Ranges {
    pub(crate) fn total(&self) -> u64 {
        self.total
    }

    /// Adds bytes, none of which may be in the set. Answers the run that they are part of now.
    pub(crate) fn insert(&mut self, extent: Extent) -> Extent {
        if extent.len == 0 {
            return extent;
        }
        debug_assert!(!self.intersects(extent), "{extent:?} is in the set already");
        let (mut start, mut end) = (extent.offset, extent.end());
        if let Some((&left, &left_end)) = self.runs.range(..start).next_back()
            && left_end == start
        {
            self.remove_run(left, left_end);
            start = left;
        }
        if let Some(&right_end) = self.runs.get(&end) {
            self.remove_run(end, right_end);
            end = right_end;
        }
        self.add_run(start, end);
        Extent::between(start, end)
    }

    /// Takes bytes out, all of which must be in the set.
    pub(crate) fn remove(&mut self, extent: Extent) {
        if extent.len == 0 {
            return;
        }
        let Some(run) = self.run_around(extent) else {
            debug_assert!(false, "{extent:?} is not in the set");
            return;
        };
        self.remove_run(run.offset, run.end());
        if run.offset < extent.offset {
            self.add_run(run.offset, extent.offset);
        }
        if extent.end() < run.end() {
            self.add_run(extent.end(), run.end());
        }
    }

    /// Whether all of the extent is in the set.
    pub(crate) fn contains(&self, extent: Extent) -> bool {
        extent.len == 0 || self.run_around(extent).is_some()
    }

    /// Whether any of the extent is in the set.
    pub(crate) fn intersects(&self, extent: Extent) -> bool {
        self.within(extent).next().is_some()
    }

    /// The parts of the extent that are in the set, in order.
    pub(crate) fn within(&self, extent: Extent) -> impl Iterator<Item = Extent> {
        let first = self.runs.range(..=extent.offset).next_back().map_or(extent.offset, |(&start, _)| start);
        self.runs
            .range(first..extent.end().max(first))
            .filter_map(move |(&start, &end)| Extent::between(start, end).intersection(extent))
    }

    /// The parts of the extent that are not in the set, in order.
    pub(crate) fn gaps(&self, extent: Extent) -> Vec<Extent> {
        let mut gaps = Vec::new();
        let mut at = extent.offset;
        for part in self.within(extent) {
            if at < part.offset {
                gaps.push(Extent::between(at, part.offset));
            }
            at = part.end();
        }
        if at < extent.end() {
            gaps.push(Extent::between(at, extent.end()));
        }
        gaps
    }

    /// All runs, in order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = Extent> {
        self.runs.iter().map(|(&start, &end)| Extent::between(start, end))
    }

    /// The runs of `len` bytes or more, shortest first.
    pub(crate) fn at_least(&self, len: u64) -> impl Iterator<Item = Extent> {
        self.by_len.range((len, 0)..).map(|&(len, offset)| Extent { offset, len })
    }

    /// The run that ends where the extent begins, and the one that begins where it ends.
    pub(crate) fn beside(&self, extent: Extent) -> [Option<Extent>; 2] {
        let left = self.runs.range(..extent.offset).next_back().filter(|(_, end)| **end == extent.offset);
        let right = self.runs.get_key_value(&extent.end());
        [left, right].map(|run| run.map(|(&start, &end)| Extent::between(start, end)))
    }

    /// The run that all of the extent is part of.
    pub(crate) fn run_around(&self, extent: Extent) -> Option<Extent> {
        let (&start, &end) = self.runs.range(..=extent.offset).next_back()?;
        (extent.end() <= end).then(|| Extent::between(start, end))
    }

    fn add_run(&mut self, start: u64, end: u64) {
        self.runs.insert(start, end);
        self.by_len.insert((end - start, start));
        self.total += end - start;
    }

    fn remove_run(&mut self, start: u64, end: u64) {
        self.runs.remove(&start);
        self.by_len.remove(&(end - start, start));
        self.total -= end - start;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(runs: &[(u64, u64)]) -> Ranges {
        let mut set = Ranges::default();
        for &(start, end) in runs {
            set.insert(Extent::between(start, end));
        }
        set
    }

    #[test]
    fn runs_that_touch_become_one() {
        assert_eq!(set(&[(0, 10), (20, 30), (10, 20)]), set(&[(0, 30)]));
    }

    #[test]
    fn gaps_and_parts_complement_each_other() {
        let set = set(&[(10, 20), (30, 40), (60, 70)]);
        let looked_at = Extent::between(15, 65);
        let parts: Vec<_> = set.within(looked_at).collect();
        assert_eq!(parts, [Extent::between(15, 20), Extent::between(30, 40), Extent::between(60, 65)]);
        assert_eq!(set.gaps(looked_at), [Extent::between(20, 30), Extent::between(40, 60)]);
    }

    #[test]
    fn taking_from_the_middle_leaves_both_ends() {
        let mut whole = set(&[(0, 100)]);
        whole.remove(Extent::between(40, 60));
        assert_eq!(whole, set(&[(0, 40), (60, 100)]));
        assert!(!whole.contains(Extent::between(30, 50)));
        assert!(whole.intersects(Extent::between(30, 50)));
    }
}
