//! Ranks that are Rust functions.

use std::time::Duration;

use futures::stream::{FuturesUnordered, StreamExt};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use wingbeat::{Bundle, NodeId, ObjectRef, PlacementGroup, placement_group};
use wingbeat_collective::{CollectiveError, Group, Meeting, MeetingHandle};

use crate::error::TrainError;

/// How long a group may take to be placed.
const PLACE_LIMIT: Duration = Duration::from_secs(60);

/// What a rank knows of its group. It is an argument of the function that each rank is.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RankContext {
    /// Its number, from 0.
    pub rank: u32,
    /// How many there are.
    pub world_size: u32,
    /// Its number among the ranks of its node.
    pub local_rank: u32,
    /// How often the group has been started again.
    pub attempt: u32,
    /// Where it is.
    pub node: NodeId,
    meeting: MeetingHandle,
}

impl RankContext {
    /// Joins the group's collective operations; every rank does, once.
    ///
    /// # Errors
    /// As [`Group::join`].
    pub fn join(&self) -> Result<Group, CollectiveError> {
        Group::join(&self.meeting, self.rank)
    }
}

/// A group of ranks, each a call of a Rust function, all placed at once or not at all.
///
/// ```no_run
/// use wingbeat_collective::Op;
/// use wingbeat_train::{RankContext, Ranks};
///
/// #[wingbeat::remote]
/// fn train(context: RankContext, rate: f32) -> Result<f32, String> {
///     let mut group = context.join().map_err(|error| error.to_string())?;
///     let mut loss = [rate * context.rank as f32];
///     group.all_reduce(&mut loss, Op::Avg).map_err(|error| error.to_string())?;
///     Ok(loss[0])
/// }
///
/// # async fn run() -> Result<(), wingbeat_train::TrainError> {
/// wingbeat::init().await?;
/// let losses = Ranks::of(4)
///     .max_failures(1)
///     .run(|group, context| train::options().in_bundle(group, context.rank).remote(context, 0.1))
///     .await?;
/// assert!(losses.iter().all(|loss| *loss == losses[0]));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
#[must_use = "nothing runs until `run()`"]
pub struct Ranks {
    count: u32,
    cpus: f64,
    gpus: f64,
    max_failures: u32,
}

impl Ranks {
    /// As many ranks, with a CPU each.
    pub fn of(count: u32) -> Ranks {
        Ranks { count, cpus: 1.0, gpus: 0.0, max_failures: 0 }
    }

    /// CPUs that are reserved for each rank.
    pub fn cpus_per_rank(mut self, cpus: f64) -> Self {
        self.cpus = cpus;
        self
    }

    /// GPUs that are reserved for each rank; its call asks for them, too.
    pub fn gpus_per_rank(mut self, gpus: f64) -> Self {
        self.gpus = gpus;
        self
    }

    /// How often the group may be started again after a failure.
    pub fn max_failures(mut self, failures: u32) -> Self {
        self.max_failures = failures;
        self
    }

    /// Runs `start` for every rank, which calls the rank's function in its bundle of the group, and gives what the
    /// functions returned, in the order of ranks. The first that fails ends the others.
    ///
    /// # Errors
    /// The group cannot be placed, or a rank has failed more often than allowed.
    pub async fn run<T: DeserializeOwned + Send + 'static>(
        self,
        start: impl Fn(&PlacementGroup, RankContext) -> ObjectRef<T>,
    ) -> Result<Vec<T>, TrainError> {
        if self.count == 0 {
            return Err(TrainError::Invalid("a group needs at least one rank".into()));
        }
        let mut attempt = 0;
        loop {
            let mut bundle = Bundle::new().num_cpus(self.cpus);
            if self.gpus > 0.0 {
                bundle = bundle.num_gpus(self.gpus);
            }
            let group = placement_group(vec![bundle; self.count as usize]).await?;
            let outcome = self.attempt(&group, attempt, &start).await;
            // What is left of the ranks ends with it.
            let _ = group.remove().await;
            match outcome {
                Err(TrainError::FunctionFailed { .. }) if attempt < self.max_failures => attempt += 1,
                outcome => return outcome,
            }
        }
    }

    async fn attempt<T: DeserializeOwned + Send + 'static>(
        &self,
        group: &PlacementGroup,
        attempt: u32,
        start: &impl Fn(&PlacementGroup, RankContext) -> ObjectRef<T>,
    ) -> Result<Vec<T>, TrainError> {
        let nodes = group.ready().get_timeout(PLACE_LIMIT).await?;
        let meeting = Meeting::of(self.count);
        let mut running = FuturesUnordered::new();
        for (rank, node) in nodes.iter().enumerate() {
            let context = RankContext {
                rank: rank as u32,
                world_size: self.count,
                local_rank: nodes[..rank].iter().filter(|other| *other == node).count() as u32,
                attempt,
                node: *node,
                meeting: meeting.clone(),
            };
            let result = start(group, context);
            running.push(async move { (rank, result.get().await) });
        }
        let mut values: Vec<Option<T>> = nodes.iter().map(|_| None).collect();
        while let Some((rank, result)) = running.next().await {
            match result {
                Ok(value) => values[rank] = Some(value),
                Err(cause) => return Err(TrainError::FunctionFailed { rank: rank as u32, cause: Box::new(cause) }),
            }
        }
        Ok(values.into_iter().flatten().collect())
    }
}
