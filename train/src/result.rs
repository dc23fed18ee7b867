//! What came of a run.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::storage::Checkpoint;

/// What came of a run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct TrainResult {
    /// Number of ranks.
    pub ranks: u32,
    /// Attempts that it took; 1 if nothing failed.
    pub attempts: u32,
    /// From `fit()` to its end.
    pub elapsed: Duration,
    /// The last metrics that rank 0 reported.
    pub metrics: BTreeMap<String, f64>,
    /// The checkpoints that the run's storage has kept, in the order of their reports.
    pub checkpoints: Vec<Checkpoint>,
    /// The newest checkpoint of the run's storage.
    pub checkpoint: Option<Checkpoint>,
    /// The best one, where [`TorchTrainer::checkpoints`](crate::TorchTrainer::checkpoints) says what that is.
    pub best_checkpoint: Option<Checkpoint>,
    /// What a Python function returned, pickled, by rank; see [`TorchTrainer::python_function`](crate::TorchTrainer::python_function).
    pub returned: BTreeMap<u32, Vec<u8>>,
}
