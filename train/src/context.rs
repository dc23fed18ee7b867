//! What the function of a rank is given: who it is, and its way to the run; and what its call is to the run.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use futures::future::BoxFuture;
use serde::{Deserialize, Serialize};
use wingbeat::{AnyRef, Error, NodeId, ObjectRef};
use wingbeat_collective::{CollectiveError, Group, MeetingHandle};

use crate::error::ReportError;
use crate::rank::RankHandle;

/// Makes the call of a rank.
pub(crate) type MakeCall = Arc<dyn Fn(RankContext) -> Called + Send + Sync>;

/// A call that was made.
pub(crate) struct Called {
    pub call: AnyRef,
    /// Waits for its value, and keeps that.
    pub ended: BoxFuture<'static, wingbeat::Result<()>>,
}

/// What a rank knows of its group, and its way to the run. It is an argument of the function that each rank is.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[non_exhaustive]
pub struct RankContext {
    /// Its number, from 0.
    pub rank: u32,
    /// How many there are.
    pub world_size: u32,
    /// Its number among the ranks of its node.
    pub local_rank: u32,
    /// How often the group has been started again after a failure.
    pub attempt: u32,
    /// Where it is.
    pub node: NodeId,
    pub(crate) meeting: MeetingHandle,
    /// What looks after the rank, on the same node.
    pub(crate) actor: RankHandle,
    /// Where the checkpoint lies with which the group has begun.
    pub(crate) checkpoint: Option<String>,
    /// Ready once the rank is to end, from when on somebody has asked.
    #[serde(skip)]
    pub(crate) stopped: Arc<OnceLock<ObjectRef<()>>>,
}

impl RankContext {
    /// Joins the group's collective operations; every rank does, once.
    ///
    /// # Errors
    /// As [`Group::join`].
    pub fn join(&self) -> Result<Group, CollectiveError> {
        Group::join(&self.meeting, self.rank)
    }

    /// Reports metrics, and perhaps a checkpoint: a folder or a file of this machine. What scripts do with `wingbeat.train.report`.
    ///
    /// Every rank calls it, equally often. It blocks this thread until all have called it and the checkpoint is stored. Several ranks may
    /// give files for the same checkpoint; of files with equal names, the lowest rank's is taken. Rank 0's metrics are the run's.
    ///
    /// # Errors
    /// The checkpoint is not there or cannot be stored, a rank ended without this report, or the run is over.
    pub fn report<N: Into<String>>(
        &self,
        metrics: impl IntoIterator<Item = (N, f64)>,
        checkpoint: Option<&Path>,
    ) -> Result<(), ReportError> {
        if let Some(checkpoint) = checkpoint {
            self.on_its_node(&format!("the checkpoint {}", checkpoint.display()))?;
        }
        let checkpoint = checkpoint.map(local).transpose()?;
        let metrics: BTreeMap<String, f64> = metrics.into_iter().map(|(name, value)| (name.into(), value)).collect();
        self.actor.report(metrics, checkpoint, wingbeat::gpu_ids()).get_blocking().map_err(refused)
    }

    /// The newest complete checkpoint, to go on from: of this run, or of an earlier one with the same storage. It lies in a folder of this
    /// machine, which nobody may change. After a report, it may be another than before.
    ///
    /// # Errors
    /// It cannot be read, or the run is over.
    pub fn checkpoint(&self) -> Result<Option<PathBuf>, ReportError> {
        self.on_its_node("the newest checkpoint")?;
        let newest = self.actor.newest().get_blocking().map_err(refused)?;
        Ok(newest.or_else(|| self.checkpoint.clone()).map(PathBuf::from))
    }

    /// A path means something on the rank's node alone, and its context may have gone elsewhere as an argument.
    fn on_its_node(&self, what: &str) -> Result<(), ReportError> {
        match wingbeat::current_node() {
            Some(here) if here != self.node => Err(ReportError::Invalid(format!(
                "{what} is of the rank's node, {}, and this runs on {here}: report where the rank runs",
                self.node
            ))),
            _ => Ok(()),
        }
    }

    /// Whether the rank is to end: the run is stopped, moves to another node, or another rank has failed. What SIGTERM is to scripts.
    ///
    /// A function that asks has the run's [`grace`](crate::Ranks::grace) from then on to save what it has, and to return; one that has never
    /// asked is ended at once. It costs nothing to ask often. Ranks hear of it one after another: where all must do the same, they agree,
    /// for instance by an `all_reduce` with `Op::Max`.
    pub fn should_stop(&self) -> bool {
        self.stopped.get_or_init(|| self.actor.stopped()).is_ready()
    }
}

/// Where it is, whatever the working directory of who stores it.
fn local(checkpoint: &Path) -> Result<String, ReportError> {
    let invalid = |why: String| ReportError::Invalid(format!("the checkpoint {}: {why}", checkpoint.display()));
    let path = std::path::absolute(checkpoint).map_err(|error| invalid(error.to_string()))?;
    if !path.exists() {
        let node = rustix::system::uname().nodename().to_string_lossy().into_owned();
        return Err(ReportError::CheckpointMissing { path: path.display().to_string(), node });
    }
    path.into_os_string().into_string().map_err(|_| invalid("its path is not UTF-8".into()))
}

/// What a rank's actor has answered, or why it does not.
fn refused(error: Error) -> ReportError {
    match error.application() {
        Some(refused) => refused,
        None if matches!(error, Error::ActorDied { .. } | Error::SessionEnded { .. }) => ReportError::Over,
        None => ReportError::Unreachable(error.to_string()),
    }
}
