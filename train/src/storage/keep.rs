//! Which checkpoints are kept.

use serde::{Deserialize, Serialize};

use super::Checkpoint;

/// Which checkpoints are kept.
///
/// ```
/// use wingbeat_train::{Best, BestOrder, Keep};
/// let keep = Keep::newest(1).best(Best::of("loss", BestOrder::Min).count(3));
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Keep {
    /// The newest of them, at least one.
    pub newest: usize,
    /// And the best by this metric.
    pub best: Option<Best>,
}

/// What makes a checkpoint the best.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Best {
    /// The metric.
    pub metric: String,
    /// Which values are better.
    pub order: BestOrder,
    /// How many of the best are kept, at least one.
    pub count: usize,
}

/// Which values of a metric are better.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum BestOrder {
    /// The largest, as of an accuracy.
    #[default]
    Max,
    /// The smallest, as of a loss.
    Min,
}

impl Best {
    /// The one best by this metric.
    pub fn of(metric: &str, order: BestOrder) -> Best {
        Best { metric: metric.to_owned(), order, count: 1 }
    }

    /// So many of the best.
    #[must_use]
    pub fn count(mut self, count: usize) -> Best {
        self.count = count;
        self
    }
}

impl Default for Keep {
    fn default() -> Self {
        Keep { newest: 2, best: None }
    }
}

impl Keep {
    /// So many of the newest, at least one.
    pub fn newest(count: usize) -> Keep {
        Keep { newest: count, best: None }
    }

    /// And the best by a metric.
    #[must_use]
    pub fn best(mut self, best: Best) -> Keep {
        self.best = Some(best);
        self
    }

    /// The best of these; none if no metric was named, or none has it.
    pub(crate) fn best_of<'a>(&self, checkpoints: &'a [Checkpoint]) -> Option<&'a Checkpoint> {
        self.ranked(checkpoints).into_iter().next()
    }

    /// Those that have the metric, the best first; of equal ones the newest.
    fn ranked<'a>(&self, checkpoints: &'a [Checkpoint]) -> Vec<&'a Checkpoint> {
        let Some(Best { metric, order, .. }) = self.best.as_ref() else { return Vec::new() };
        let value = |checkpoint: &Checkpoint| {
            let value = checkpoint.metrics.get(metric).copied().filter(|value| !value.is_nan())?;
            Some(if *order == BestOrder::Max { value } else { -value })
        };
        let mut ranked: Vec<(f64, &Checkpoint)> =
            checkpoints.iter().rev().filter_map(|checkpoint| Some((value(checkpoint)?, checkpoint))).collect();
        ranked.sort_by(|(one, _), (other, _)| other.total_cmp(one));
        ranked.into_iter().map(|(_, checkpoint)| checkpoint).collect()
    }

    /// Those that are not kept, of all, in the order of their numbers. The newest stand for the best as far as none has the metric, whose name may
    /// be mistyped: what is deleted is gone.
    pub(super) fn outdated<'a>(&self, checkpoints: &'a [Checkpoint]) -> Vec<&'a Checkpoint> {
        let count = self.best.as_ref().map_or(0, |best| best.count.max(1));
        let ranked = self.ranked(checkpoints);
        let best: Vec<u64> = ranked.iter().take(count).map(|best| best.number).collect();
        let newest = if ranked.is_empty() { self.newest.max(count) } else { self.newest };
        let old = checkpoints.len().saturating_sub(newest.max(1));
        checkpoints[..old].iter().filter(|checkpoint| !best.contains(&checkpoint.number)).collect()
    }
}
