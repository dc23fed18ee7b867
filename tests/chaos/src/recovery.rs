//! How long faults are felt. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// A kind of programs of one driver.
pub type Lane = (usize, String);

/// Faults, and what has not succeeded since.
#[derive(Debug, Default)]
pub struct Recoveries {
    /// Every lane that has begun.
    lanes: BTreeSet<Lane>,
    felt: Vec<Felt>,
    by_kind: BTreeMap<&'static str, Kind>,
}

#[derive(Debug)]
struct Felt {
    kind: &'static str,
    at: Duration,
    by: BTreeSet<Lane>,
}

#[derive(Debug, Default)]
struct Kind {
    count: usize,
    took: Vec<(Duration, Lane)>,
}

/// A row of the summary.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// The kind of fault.
    pub kind: &'static str,
    /// How many there were.
    pub count: usize,
    /// The median time until everything that ran has succeeded since.
    pub median: Duration,
    /// The longest, and what was last.
    pub slowest: Option<(Duration, Lane)>,
}

impl Recoveries {
    /// A fault has happened.
    pub fn struck(&mut self, kind: &'static str, at: Duration) {
        self.by_kind.entry(kind).or_default().count += 1;
        self.felt.push(Felt { kind, at, by: self.lanes.clone() });
    }

    /// A program of a lane has begun.
    pub fn began(&mut self, lane: Lane) {
        self.lanes.insert(lane);
    }

    /// A program of a lane has succeeded.
    pub fn succeeded(&mut self, lane: &Lane, at: Duration) {
        let by_kind = &mut self.by_kind;
        self.felt.retain_mut(|felt| {
            if felt.by.remove(lane) && felt.by.is_empty() {
                let kind = by_kind.entry(felt.kind).or_default();
                kind.took.push((at.saturating_sub(felt.at), lane.clone()));
            }
            !felt.by.is_empty()
        });
    }

    /// What there is to say at the end.
    pub fn rows(&self) -> Vec<Row> {
        let row = |(kind, of): (&&'static str, &Kind)| {
            let mut took = of.took.clone();
            took.sort();
            let median = took.get(took.len() / 2).map(|(took, _)| *took).unwrap_or_default();
            Row { kind, count: of.count, median, slowest: took.pop() }
        };
        self.by_kind.iter().map(row).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_is_over_when_everything_has_succeeded_since() {
        let lane = |name: &str| (0, name.to_owned());
        let at = Duration::from_secs;
        let mut recoveries = Recoveries::default();
        recoveries.began(lane("tree"));
        recoveries.began(lane("stream"));
        recoveries.struck("node killed", at(1));
        recoveries.succeeded(&lane("tree"), at(2));
        recoveries.succeeded(&lane("tree"), at(3));
        assert_eq!(recoveries.rows()[0].slowest, None);
        recoveries.succeeded(&lane("stream"), at(5));
        recoveries.struck("node killed", at(6));
        recoveries.succeeded(&lane("stream"), at(7));
        recoveries.succeeded(&lane("tree"), at(7));
        let expected = Row { kind: "node killed", count: 2, median: at(4), slowest: Some((at(4), lane("stream"))) };
        assert_eq!(recoveries.rows(), [expected]);
    }
}
