//! Ranks that are Rust functions.

use std::time::{Duration, Instant};

use futures::stream::{FuturesUnordered, StreamExt};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use wingbeat::{Drained, Error, NodeId, ObjectRef, PlacementGroup};
use wingbeat_collective::{CollectiveError, Group, Meeting, MeetingHandle};

use crate::error::TrainError;
use crate::reservation::{Patience, Reservation};
use crate::scaling::Scaling;
use crate::shown::notice;
use crate::trainer::TorchTrainer;

/// How long before its deadline a drained node is left.
const BEFORE: Duration = Duration::from_millis(500);

/// What a rank knows of its group. It is an argument of the function that each rank is.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[non_exhaustive]
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
    /// Its bundle of the group.
    pub bundle: u32,
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

/// A group of ranks, each a call of a Rust function, all placed at once or not at all: see [`TorchTrainer::function`].
#[derive(Clone, Debug)]
#[must_use = "nothing runs until `fit()`"]
pub struct Ranks<F> {
    start: F,
    scaling: Scaling,
    max_failures: u32,
    wait_for_room: Option<Duration>,
}

/// What Rust functions have returned, and what it took.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Returned<T> {
    /// In the order of ranks.
    pub values: Vec<T>,
    /// Attempts that it took; 1 if nothing failed.
    pub attempts: u32,
    /// From `fit()` to its end.
    pub elapsed: Duration,
}

impl TorchTrainer {
    /// Calls a Rust function on every rank. `start` calls it for one, in the rank's bundle of the group.
    ///
    /// ```no_run
    /// use wingbeat_collective::Op;
    /// use wingbeat_train::{RankContext, Scaling, TorchTrainer};
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
    /// let trainer = TorchTrainer::function(|group, context| {
    ///     train::options().in_bundle(group, context.bundle).remote(context, 0.1)
    /// });
    /// let losses = trainer.scaling(Scaling::workers(4)).max_failures(1).fit().await?.values;
    /// assert!(losses.iter().all(|loss| *loss == losses[0]));
    /// # Ok(())
    /// # }
    /// ```
    pub fn function<T, F>(start: F) -> Ranks<F>
    where
        T: DeserializeOwned + Send + 'static,
        F: Fn(&PlacementGroup, RankContext) -> ObjectRef<T>,
    {
        Ranks { start, scaling: Scaling::workers(1), max_failures: 0, wait_for_room: None }
    }
}

impl<F> Ranks<F> {
    /// How many ranks there are, and what is reserved for each; one, if nothing is said. Its call asks for the same.
    pub fn scaling(mut self, scaling: Scaling) -> Self {
        self.scaling = scaling;
        self
    }

    /// How often the group may be started again after a failure; never if nothing is said.
    pub fn max_failures(mut self, failures: u32) -> Self {
        self.max_failures = failures;
        self
    }

    /// As [`TorchTrainer::wait_for_room`].
    pub fn wait_for_room(mut self, limit: Duration) -> Self {
        self.wait_for_room = Some(limit);
        self
    }

    /// Runs it, and gives what the functions returned. The first that fails ends the others. A call is not made again by
    /// itself, whatever its options say: see [`Ranks::max_failures`]. When a drained node ends the calls that still run there
    /// at its deadline, all start again elsewhere, and that is no failure. If this is dropped, the calls are ended.
    ///
    /// # Errors
    /// The group cannot be placed, or a rank has failed more often than allowed.
    pub async fn fit<T: DeserializeOwned + Send + 'static>(self) -> Result<Returned<T>, TrainError>
    where
        F: Fn(&PlacementGroup, RankContext) -> ObjectRef<T>,
    {
        self.scaling.check()?;
        let (begun, mut attempt, mut failures) = (Instant::now(), 0, 0);
        loop {
            let patience = Patience {
                limit: self.wait_for_room,
                for_nodes: attempt > 0 || self.wait_for_room.is_some(),
                for_journal: attempt > 0 || self.wait_for_room.is_some(),
                notice: &|text| notice(text),
            };
            let reserved = Reservation::make(&self.scaling, &patience).await?;
            let outcome = self.attempt(&reserved, attempt).await;
            // What is left of the ranks ends with it.
            reserved.release().await;
            match outcome {
                Ok(values) => {
                    return Ok(Returned { values, attempts: attempt + 1, elapsed: begun.elapsed() });
                }
                Err(TrainError::FunctionFailed { .. }) if failures < self.max_failures => failures += 1,
                // No failure of the run.
                Err(error @ TrainError::Moves { .. }) => notice(&error.to_string()),
                Err(error) => return Err(error),
            }
            attempt += 1;
        }
    }

    async fn attempt<T: DeserializeOwned + Send + 'static>(
        &self,
        reserved: &Reservation,
        attempt: u32,
    ) -> Result<Vec<T>, TrainError>
    where
        F: Fn(&PlacementGroup, RankContext) -> ObjectRef<T>,
    {
        let world_size = self.scaling.ranks_of(reserved.units);
        let meeting = Meeting::of(world_size);
        let bundles: Vec<u32> = (0..world_size).map(|rank| self.scaling.bundle_of(rank)).collect();
        let nodes: Vec<NodeId> = bundles.iter().map(|bundle| reserved.nodes[*bundle as usize]).collect();
        let mut running = FuturesUnordered::new();
        for (rank, (node, bundle)) in nodes.iter().zip(bundles).enumerate() {
            let context = RankContext {
                rank: rank as u32,
                world_size,
                local_rank: nodes[..rank].iter().filter(|other| *other == node).count() as u32,
                attempt,
                node: *node,
                bundle,
                meeting: meeting.clone(),
            };
            // One alone must not be made again: the others would wait for the first.
            let result = wingbeat::without_retries(|| (self.start)(&reserved.bundles, context));
            running.push(async move { (rank, result.get().await) });
        }
        let mut values: Vec<Option<T>> = nodes.iter().map(|_| None).collect();
        let mut drained: Option<Drained> = None;
        loop {
            let next = tokio::select! {
                biased;
                now = reserved.bundles.draining(drained.as_ref()) => {
                    drained = now;
                    continue;
                }
                // A call of the drained node would be made again by itself, without the others.
                Drained { node, why, .. } = due(drained.clone()) => return Err(TrainError::Moves { node, why }),
                next = running.next() => next,
            };
            match (next, &drained) {
                (None, _) => break,
                (Some((rank, Ok(value))), _) => values[rank] = Some(value),
                (Some((rank, Err(cause))), Some(Drained { node, why, .. }))
                    if nodes[rank] == *node && !is_own(&cause) =>
                {
                    return Err(TrainError::Moves { node: *node, why: why.clone() });
                }
                (Some((rank, Err(cause))), _) => {
                    return Err(TrainError::FunctionFailed { rank: rank as u32, cause: Box::new(cause) });
                }
            }
        }
        Ok(values.into_iter().flatten().collect())
    }
}

/// Waits until a drained node must be left.
async fn due(drained: Option<Drained>) -> Drained {
    match drained {
        Some(drained) => {
            let left = drained.deadline.saturating_duration_since(Instant::now()).saturating_sub(BEFORE);
            // By the session's own timer: there may be no tokio here.
            if let Ok(session) = wingbeat::Session::current() {
                let never = std::future::pending::<Result<(), Error>>();
                let _ = session.runtime().within(left, || "the deadline of a drain".into(), never).await;
            }
            drained
        }
        None => std::future::pending().await,
    }
}

/// Whether a call has failed by itself, and not because its process was ended.
fn is_own(cause: &Error) -> bool {
    matches!(cause, Error::Application { .. } | Error::Panicked { .. })
}
