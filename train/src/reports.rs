//! When the reports of ranks are answered: `report` returns when every rank has come as far.
//!
//! Pure: it is told what ranks do, and answers what to tell them.

use std::collections::{BTreeMap, BTreeSet};

use crate::process::Report;

/// The barrier that reports are.
#[derive(Debug)]
pub(crate) struct Reports {
    /// What each rank waits with; the last of them counts. Others are those in the middle of which a signal's handler has
    /// reported.
    waiting: BTreeMap<usize, Vec<Report>>,
    /// Whether each rank has ended.
    ended: Vec<bool>,
    /// Those that have not ended by themselves: with their node, or their process.
    lost: BTreeSet<usize>,
    /// How many reports each rank has made that are complete.
    complete: u64,
}

/// What follows from what a rank has done.
#[derive(Debug, PartialEq)]
pub(crate) enum Step {
    /// Others are awaited.
    Wait,
    /// All have come: these are their reports, by rank. There may be another step after this.
    Complete(BTreeMap<usize, Report>),
    /// These will wait in vain: a rank that they wait for has ended.
    Refuse(Vec<(usize, Report)>, String),
}

impl Reports {
    pub(crate) fn of(ranks: usize) -> Reports {
        Reports { waiting: BTreeMap::new(), ended: vec![false; ranks], lost: BTreeSet::new(), complete: 0 }
    }

    /// A rank has reported. If it waits with another report already, and neither comes from the middle of the other, nobody
    /// may: that is given back.
    pub(crate) fn report(&mut self, rank: usize, report: Report) -> (Step, Vec<Report>) {
        let waiting = self.waiting.entry(rank).or_default();
        let mut before = Vec::new();
        if report.is_nested {
            waiting.push(report);
        } else {
            // What came from the middle of it may be heard before it; what came from the middle of another goes with that.
            if waiting.iter().any(|other| !other.is_nested) {
                before = std::mem::take(waiting);
            }
            waiting.insert(0, report);
        }
        (self.step(), before)
    }

    /// A rank does not wait with this report any more.
    pub(crate) fn withdraw(&mut self, rank: usize, id: u64) {
        if let Some(waiting) = self.waiting.get_mut(&rank) {
            waiting.retain(|report| report.id != id);
        }
        self.waiting.retain(|_, waiting| !waiting.is_empty());
    }

    /// What a rank still waits with: nobody answers it any more once the rank has ended.
    pub(crate) fn left(&mut self, rank: usize) -> Vec<Report> {
        self.waiting.remove(&rank).unwrap_or_default()
    }

    /// A rank has ended.
    pub(crate) fn end(&mut self, rank: usize) -> Step {
        if let Some(ended) = self.ended.get_mut(rank) {
            *ended = true;
        }
        self.waiting.remove(&rank);
        self.step()
    }

    /// A rank is gone, which is no fault of how it reports.
    pub(crate) fn lose(&mut self, rank: usize) -> Step {
        self.lost.insert(rank);
        self.end(rank)
    }

    /// Whether it has ended.
    pub(crate) fn has_ended(&self, rank: usize) -> bool {
        self.ended.get(rank).copied().unwrap_or(false)
    }

    /// Who is waited for, while somebody waits.
    pub(crate) fn missing(&self) -> Vec<usize> {
        match self.waiting.is_empty() {
            true => Vec::new(),
            false => (0..self.ended.len()).filter(|rank| !self.waiting.contains_key(rank)).collect(),
        }
    }

    /// What follows from what is waited for now.
    pub(crate) fn step(&mut self) -> Step {
        if self.waiting.is_empty() {
            return Step::Wait;
        }
        if self.waiting.len() == self.ended.len() {
            let last = self.waiting.iter_mut().filter_map(|(rank, waiting)| Some((*rank, waiting.pop()?)));
            let complete = last.collect();
            self.complete += 1;
            self.waiting.retain(|_, waiting| !waiting.is_empty());
            return Step::Complete(complete);
        }
        let ended: Vec<usize> = (0..self.ended.len()).filter(|rank| self.ended[*rank]).collect();
        if ended.is_empty() {
            return Step::Wait;
        }
        let why = match self.lost.is_empty() {
            false => {
                let lost: Vec<usize> = self.lost.iter().copied().collect();
                format!(
                    "{} was lost before this report: the run goes on without it, or ends",
                    crate::shown::ranks(&lost)
                )
            }
            true => format!(
                "{} ended without this report, after {} that every rank has made: that is where the fault is; every rank must report equally often",
                crate::shown::ranks(&ended),
                self.complete
            ),
        };
        let waiting = std::mem::take(&mut self.waiting);
        let refused =
            waiting.into_iter().flat_map(|(rank, reports)| reports.into_iter().map(move |report| (rank, report)));
        Step::Refuse(refused.collect(), why)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(id: u64) -> Report {
        Report { id, ..Report::default() }
    }

    #[test]
    fn a_report_is_complete_when_every_rank_has_come() {
        let mut reports = Reports::of(2);
        assert_eq!(reports.report(1, report(7)).0, Step::Wait);
        assert_eq!(reports.missing(), [0]);
        assert_eq!(reports.report(0, report(3)).0, Step::Complete(BTreeMap::from([(0, report(3)), (1, report(7))])));
        assert!(reports.missing().is_empty());
        assert_eq!(reports.report(0, report(4)).0, Step::Wait, "the next one begins anew");
    }

    #[test]
    fn who_waits_for_a_rank_that_has_ended_is_told() {
        let mut reports = Reports::of(3);
        assert_eq!(reports.report(0, report(1)).0, Step::Wait);
        let Step::Refuse(refused, why) = reports.end(2) else { panic!("it waits in vain") };
        assert!(refused == [(0, report(1))] && why.starts_with("rank 2 ended without this report, after 0 "), "{why}");
        assert!(matches!(reports.report(1, report(1)).0, Step::Refuse(..)), "and so does who comes later");
    }

    #[test]
    fn who_waits_for_a_rank_that_is_lost_is_not_told_that_the_script_is_at_fault() {
        let mut reports = Reports::of(2);
        assert_eq!(reports.report(0, report(1)).0, Step::Wait);
        let Step::Refuse(refused, why) = reports.lose(1) else { panic!("it waits in vain") };
        assert!(refused == [(0, report(1))] && why.starts_with("rank 1 was lost before this report"), "{why}");
    }

    #[test]
    fn of_two_reports_of_one_rank_the_first_is_given_back() {
        let mut reports = Reports::of(2);
        assert_eq!(reports.report(0, report(1)), (Step::Wait, vec![]));
        assert_eq!(reports.report(0, report(2)), (Step::Wait, vec![report(1)]));
        assert_eq!(reports.report(1, report(3)).0, Step::Complete(BTreeMap::from([(0, report(2)), (1, report(3))])));
    }

    #[test]
    fn what_a_rank_does_not_wait_with_any_more_is_no_part_of_what_comes_next() {
        let mut reports = Reports::of(2);
        assert_eq!(reports.report(0, report(1)).0, Step::Wait);
        reports.withdraw(0, 1);
        assert_eq!(reports.report(1, report(2)).0, Step::Wait);
        assert_eq!(reports.missing(), [0]);
        // One that was replaced is not the one that waits.
        reports.withdraw(1, 1);
        assert_eq!(reports.report(0, report(3)).0, Step::Complete(BTreeMap::from([(0, report(3)), (1, report(2))])));
    }

    #[test]
    fn a_report_in_the_middle_of_another_comes_first_and_the_other_goes_on() {
        let nested = |id| Report { is_nested: true, ..report(id) };
        let mut reports = Reports::of(2);
        assert_eq!(reports.report(0, report(1)).0, Step::Wait);
        assert_eq!(reports.report(0, nested(2)), (Step::Wait, vec![]));
        let (step, before) = reports.report(1, report(3));
        assert_eq!((step, before), (Step::Complete(BTreeMap::from([(0, nested(2)), (1, report(3))])), vec![]));
        assert_eq!(reports.step(), Step::Wait);
        assert_eq!(reports.missing(), [1]);
        assert_eq!(reports.report(1, report(4)).0, Step::Complete(BTreeMap::from([(0, report(1)), (1, report(4))])));
    }

    #[test]
    fn a_report_in_the_middle_of_another_may_be_heard_before_it() {
        let nested = Report { is_nested: true, ..report(2) };
        let mut reports = Reports::of(2);
        assert_eq!(reports.report(0, nested.clone()), (Step::Wait, vec![]));
        assert_eq!(reports.report(0, report(1)), (Step::Wait, vec![]));
        assert_eq!(reports.report(1, report(3)).0, Step::Complete(BTreeMap::from([(0, nested), (1, report(3))])));
        assert_eq!(reports.report(1, report(4)).0, Step::Complete(BTreeMap::from([(0, report(1)), (1, report(4))])));
    }

    #[test]
    fn what_came_from_the_middle_of_a_report_goes_with_it() {
        let nested = Report { is_nested: true, ..report(2) };
        let mut reports = Reports::of(2);
        assert_eq!(reports.report(0, report(1)), (Step::Wait, vec![]));
        assert_eq!(reports.report(0, nested.clone()), (Step::Wait, vec![]));
        assert_eq!(reports.report(0, report(3)), (Step::Wait, vec![report(1), nested]));
        assert_eq!(reports.report(1, report(4)).0, Step::Complete(BTreeMap::from([(0, report(3)), (1, report(4))])));
    }

    #[test]
    fn ranks_that_end_without_reports_disturb_nobody() {
        let mut reports = Reports::of(2);
        assert_eq!((reports.end(0), reports.end(1)), (Step::Wait, Step::Wait));
    }
}
