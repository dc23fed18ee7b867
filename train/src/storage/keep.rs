//! Which checkpoints are kept.

use serde::{Deserialize, Serialize};

use super::Checkpoint;

/// Which checkpoints are kept.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Keep {
    /// The newest of them, at least one.
    pub newest: usize,
    /// And the best one by this metric.
    pub best: Option<Best>,
}

/// What makes a checkpoint the best.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Best {
    /// The metric.
    pub metric: String,
    /// Whether more is better.
    pub more: bool,
}

impl Default for Keep {
    fn default() -> Self {
        Keep { newest: 2, best: None }
    }
}

impl Keep {
    /// The best of these; none if no metric was named, or none has it.
    pub(crate) fn best<'a>(&self, checkpoints: &'a [Checkpoint]) -> Option<&'a Checkpoint> {
        let Best { metric, more } = self.best.as_ref()?;
        let value = |checkpoint: &&Checkpoint| {
            let value = checkpoint.metrics.get(metric).copied().filter(|value| !value.is_nan())?;
            Some(if *more { value } else { -value })
        };
        let of = checkpoints.iter().filter(|checkpoint| value(checkpoint).is_some());
        of.max_by(|a, b| value(a).unwrap_or(f64::MIN).total_cmp(&value(b).unwrap_or(f64::MIN)))
    }

    /// Those that are not kept, of all, in the order of their numbers.
    pub(super) fn outdated<'a>(&self, checkpoints: &'a [Checkpoint]) -> Vec<&'a Checkpoint> {
        let best = self.best(checkpoints).map(|best| best.number);
        let old = checkpoints.len().saturating_sub(self.newest.max(1));
        checkpoints[..old].iter().filter(|checkpoint| Some(checkpoint.number) != best).collect()
    }
}
