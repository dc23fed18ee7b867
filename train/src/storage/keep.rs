//! Which checkpoints are kept.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use super::Checkpoint;

/// Which checkpoints are kept.
///
/// ```
/// use wingbeat_train::{BestCheckpoints, ScoreOrder, CheckpointConfig};
/// let keep = CheckpointConfig::newest(1).best(BestCheckpoints::of("loss", ScoreOrder::Min).count(3));
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct CheckpointConfig {
    /// The newest of them: one or more, since a run that is started again goes on from the newest.
    pub newest: usize,
    /// And the best by this metric.
    pub best: Option<BestCheckpoints>,
}

/// What makes a checkpoint the best.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct BestCheckpoints {
    /// The metric.
    pub metric: String,
    /// Which values are better.
    pub order: ScoreOrder,
    /// How many of the best are kept: one or more.
    pub count: usize,
}

/// Which values of a metric are better.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum ScoreOrder {
    /// The largest, as of an accuracy.
    #[default]
    Max,
    /// The smallest, as of a loss.
    Min,
}

impl BestCheckpoints {
    /// The one best by this metric.
    pub fn of(metric: &str, order: ScoreOrder) -> BestCheckpoints {
        BestCheckpoints { metric: metric.to_owned(), order, count: 1 }
    }

    /// So many of the best: one or more.
    #[must_use]
    pub fn count(mut self, count: usize) -> BestCheckpoints {
        self.count = count;
        self
    }
}

impl Default for CheckpointConfig {
    fn default() -> Self {
        CheckpointConfig { newest: 2, best: None }
    }
}

impl CheckpointConfig {
    /// So many of the newest: one or more.
    pub fn newest(count: usize) -> CheckpointConfig {
        CheckpointConfig { newest: count, best: None }
    }

    /// And the best by a metric.
    #[must_use]
    pub fn best(mut self, best: BestCheckpoints) -> CheckpointConfig {
        self.best = Some(best);
        self
    }

    /// Refuses numbers that would keep nothing.
    pub(crate) fn check(&self) -> Result<(), String> {
        if self.newest == 0 {
            return Err(
                "to keep 0 of the newest checkpoints would lose the one that a run goes on from: keep 1 or more"
                    .to_owned(),
            );
        }
        match &self.best {
            Some(BestCheckpoints { metric, count: 0, .. }) => Err(format!(
                "to keep 0 of the best checkpoints by `{metric}` keeps none of them: keep 1 or more, or name no metric"
            )),
            _ => Ok(()),
        }
    }

    /// Why none of the checkpoints that a run has left is the best one, if it was to keep that.
    pub(crate) fn missing_best(&self, checkpoints: &[Checkpoint]) -> Option<String> {
        let metric = &self.best.as_ref()?.metric;
        if checkpoints.is_empty() || self.best_of(checkpoints).is_some() {
            return None;
        }
        let rest = "the newest were kept instead of the best";
        if checkpoints.iter().any(|checkpoint| checkpoint.metrics.contains_key(metric)) {
            return Some(format!("the metric `{metric}` is NaN in every checkpoint: {rest}"));
        }
        let known: BTreeSet<&str> =
            checkpoints.iter().flat_map(|checkpoint| checkpoint.metrics.keys()).map(String::as_str).collect();
        let known: Vec<&str> = known.into_iter().collect();
        let there = match known[..] {
            [] => "no metrics were reported with them".to_owned(),
            _ => format!("they have {}", known.join(", ")),
        };
        Some(format!("no checkpoint has the metric `{metric}`: {there}; {rest}"))
    }

    /// The best of these; none if no metric was named, or none has it.
    pub(crate) fn best_of<'a>(&self, checkpoints: &'a [Checkpoint]) -> Option<&'a Checkpoint> {
        self.ranked(checkpoints).into_iter().next()
    }

    /// Those that have the metric, the best first; of equal ones the newest.
    fn ranked<'a>(&self, checkpoints: &'a [Checkpoint]) -> Vec<&'a Checkpoint> {
        let Some(BestCheckpoints { metric, order, .. }) = self.best.as_ref() else { return Vec::new() };
        let value = |checkpoint: &Checkpoint| {
            let value = checkpoint.metrics.get(metric).copied().filter(|value| !value.is_nan())?;
            Some(if *order == ScoreOrder::Max { value } else { -value })
        };
        let mut ranked: Vec<(f64, &Checkpoint)> =
            checkpoints.iter().rev().filter_map(|checkpoint| Some((value(checkpoint)?, checkpoint))).collect();
        ranked.sort_by(|(one, _), (other, _)| other.total_cmp(one));
        ranked.into_iter().map(|(_, checkpoint)| checkpoint).collect()
    }

    /// Those that are not kept, of all, in the order of their numbers. The newest stand for the best as far as none has the metric, whose name may
    /// be mistyped: what is deleted is gone.
    pub(super) fn outdated<'a>(&self, checkpoints: &'a [Checkpoint]) -> Vec<&'a Checkpoint> {
        let count = self.best.as_ref().map_or(0, |best| best.count);
        let ranked = self.ranked(checkpoints);
        let best: Vec<u64> = ranked.iter().take(count).map(|best| best.number).collect();
        let newest = if ranked.is_empty() { self.newest.max(count) } else { self.newest };
        // A run refuses 0. Here, nothing is deleted by mistake.
        let old = checkpoints.len().saturating_sub(newest.max(1));
        checkpoints[..old].iter().filter(|checkpoint| !best.contains(&checkpoint.number)).collect()
    }
}
