//! When the reports of ranks are answered: `report` returns when every rank has come as far.
//!
//! Pure: it is told what ranks do, and answers what to tell them.

use std::collections::BTreeMap;

use crate::process::Report;

/// The barrier that reports are.
#[derive(Debug)]
pub(crate) struct Reports {
    /// What each rank waits with.
    waiting: BTreeMap<usize, Report>,
    /// Whether each rank has ended.
    ended: Vec<bool>,
}

/// What follows from what a rank has done.
#[derive(Debug, PartialEq)]
pub(crate) enum Step {
    /// Others are awaited.
    Wait,
    /// All have come: these are their reports, by rank.
    Complete(BTreeMap<usize, Report>),
    /// These will wait in vain: a rank that they wait for has ended.
    Refuse(BTreeMap<usize, Report>, String),
}

impl Reports {
    pub(crate) fn of(ranks: usize) -> Reports {
        Reports { waiting: BTreeMap::new(), ended: vec![false; ranks] }
    }

    /// A rank has reported. If it waits with another report already, nobody may: that is given back.
    pub(crate) fn report(&mut self, rank: usize, report: Report) -> (Step, Option<Report>) {
        let before = self.waiting.insert(rank, report);
        (self.step(), before)
    }

    /// A rank has ended.
    pub(crate) fn end(&mut self, rank: usize) -> Step {
        if let Some(ended) = self.ended.get_mut(rank) {
            *ended = true;
        }
        self.waiting.remove(&rank);
        self.step()
    }

    /// Who is waited for, while somebody waits.
    pub(crate) fn missing(&self) -> Vec<usize> {
        match self.waiting.is_empty() {
            true => Vec::new(),
            false => (0..self.ended.len()).filter(|rank| !self.waiting.contains_key(rank)).collect(),
        }
    }

    fn step(&mut self) -> Step {
        if self.waiting.is_empty() {
            return Step::Wait;
        }
        if self.waiting.len() == self.ended.len() {
            return Step::Complete(std::mem::take(&mut self.waiting));
        }
        let ended: Vec<usize> = (0..self.ended.len()).filter(|rank| self.ended[*rank]).collect();
        if ended.is_empty() {
            return Step::Wait;
        }
        let why =
            format!("{} ended without this report; every rank reports equally often", crate::shown::ranks(&ended));
        Step::Refuse(std::mem::take(&mut self.waiting), why)
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
        assert!(refused.contains_key(&0) && why.starts_with("rank 2 ended"), "{why}");
        assert!(matches!(reports.report(1, report(1)).0, Step::Refuse(..)), "and so does who comes later");
    }

    #[test]
    fn of_two_reports_of_one_rank_the_first_is_given_back() {
        let mut reports = Reports::of(2);
        assert_eq!(reports.report(0, report(1)), (Step::Wait, None));
        assert_eq!(reports.report(0, report(2)), (Step::Wait, Some(report(1))));
        assert_eq!(reports.report(1, report(3)).0, Step::Complete(BTreeMap::from([(0, report(2)), (1, report(3))])));
    }

    #[test]
    fn ranks_that_end_without_reports_disturb_nobody() {
        let mut reports = Reports::of(2);
        assert_eq!((reports.end(0), reports.end(1)), (Step::Wait, Step::Wait));
    }
}
