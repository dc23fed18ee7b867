//! A run, from its first attempt to its result.

use std::time::Instant;

use tokio::sync::mpsc;
use wingbeat::{Error, Session};

use crate::attempt::Finished;
use crate::error::TrainError;
use crate::group::{self, Group};
use crate::limits;
use crate::plan::Plan;
use crate::printer::{Message, Printer};
use crate::reservation::Patience;
use crate::result::TrainResult;
use crate::so_far::SoFar;
use crate::storage::{Checkpoint, Claim, Place, Storage};

/// How often a run looks for another port when rank 0 has found its own taken.
const PORTS_LOST: u32 = 5;

impl Plan {
    /// Refuses what makes no sense.
    pub(crate) fn check(&self) -> Result<(), TrainError> {
        self.scaling.check()?;
        if self.hang_timeout.is_zero() {
            return Err(TrainError::Invalid(
                "a hang timeout of 0 takes every run for one that hangs: give the silence after which a run hangs, as 10m; \
                 a long one, as 10years, turns it off"
                    .into(),
            ));
        }
        self.keep.check().map_err(TrainError::Invalid)
    }

    /// Runs it to its end.
    pub(crate) async fn fit(&self) -> Result<TrainResult, TrainError> {
        let storage = match &self.storage {
            Some(url) => Some(Storage::open(url).map_err(TrainError::Storage)?),
            None => None,
        };
        let run_id = self.run_id.clone().unwrap_or_else(|| format!("wingbeat-{:016x}", rand::random::<u64>()));
        let claim = match &storage {
            Some(storage) => {
                let claimed = tokio::select! {
                    claimed = self.claim(storage, &run_id) => claimed,
                    // The storage stands still.
                    () = self.stopped_for_a_while() => Err(TrainError::stopped()),
                };
                Some(claimed?)
            }
            None => None,
        };
        let place = Place::new(claim, &run_id, self.on_notice.clone());
        let printer = Printer::start((self.output)())
            .map_err(|error| Error::io("starting the thread that shows what ranks print", &error))?;
        let begun = Instant::now();
        let mut so_far = SoFar::default();
        let mut outcome = self.attempts(&mut so_far, &run_id, &place, printer.queue()).await;
        if let Some(shipped) = &self.shipment {
            group::forget_run(&shipped.run, std::mem::take(&mut so_far.left)).await;
        }
        let was_stopped = matches!(outcome, Err(TrainError::Stopped { .. }));
        printer.end(was_stopped, &self.stopper).await;
        if let Err(TrainError::Stopped { so_far: told }) = &mut outcome {
            so_far.tell(told);
            if let Some(claim) = place.claim() {
                // What was stored is what the caller may want to go on with; that it cannot be told is no reason to say more.
                let checkpoints = self.listed(claim).await;
                self.say_what_is_missing(&checkpoints);
                told.best_checkpoint = self.keep.best_of(&checkpoints).cloned();
                told.checkpoint = checkpoints.last().cloned();
                told.checkpoints = checkpoints;
            }
            told.elapsed = begun.elapsed();
        }
        if tokio::time::timeout(*limits::STORAGE, place.release()).await.is_err() {
            (self.on_notice)("the storage does not answer: others may use it in a minute");
        }
        outcome
    }

    /// Checks the storage and has it for this run.
    async fn claim(&self, storage: &Storage, run_id: &str) -> Result<Claim, TrainError> {
        storage.probe().await.map_err(TrainError::Storage)?;
        let claimed = Claim::new(storage, run_id, &*self.on_notice, self.stopper.stopped()).await;
        let claimed = claimed.map_err(TrainError::Storage)?.ok_or_else(TrainError::stopped)?;
        for damaged in storage.damaged().await.map_err(TrainError::Storage)? {
            (self.on_notice)(&format!("passing over a checkpoint that cannot be read: {damaged}"));
        }
        Ok(claimed)
    }

    /// Until it was stopped, and what waits for the storage has had a moment to hear of it.
    async fn stopped_for_a_while(&self) {
        self.stopper.stopped().await;
        tokio::time::sleep(*limits::STOPPED).await;
    }

    /// The checkpoints that are there when all is done. That they cannot be told makes no training a failure.
    async fn listed(&self, claim: &Claim) -> Vec<Checkpoint> {
        let listed = tokio::select! {
            listed = tokio::time::timeout(*limits::STORAGE, claim.storage().checkpoints()) => listed,
            () = self.stopped_for_a_while() => return Vec::new(),
        };
        let why = match listed {
            Ok(Ok(checkpoints)) => return checkpoints,
            Ok(Err(why)) => why,
            Err(_) => format!("the storage has said nothing for {} s", limits::STORAGE.as_secs()),
        };
        (self.on_notice)(&format!("the checkpoints cannot be listed: {why}"));
        Vec::new()
    }

    /// Of what these checkpoints were to be kept by.
    fn say_what_is_missing(&self, checkpoints: &[Checkpoint]) {
        if let Some(why) = self.keep.missing_best(checkpoints) {
            (self.on_notice)(&why);
        }
    }

    async fn attempts(
        &self,
        so_far: &mut SoFar,
        run_id: &str,
        place: &Place,
        output: &mpsc::Sender<Message>,
    ) -> Result<TrainResult, TrainError> {
        let begun = Instant::now();
        let session = Session::current().ok();
        loop {
            let error = match self.attempt(so_far, run_id, place, output).await {
                Ok(Finished { ranks, metrics, returned }) => {
                    let checkpoints = match place.claim() {
                        Some(claim) => self.listed(claim).await,
                        None => Vec::new(),
                    };
                    self.say_what_is_missing(&checkpoints);
                    return Ok(TrainResult {
                        ranks,
                        attempts: so_far.failures + 1,
                        elapsed: begun.elapsed(),
                        metrics,
                        best_checkpoint: self.keep.best_of(&checkpoints).cloned(),
                        checkpoint: checkpoints.last().cloned(),
                        checkpoints,
                        returned,
                    });
                }
                Err(error) => error,
            };
            if let Some(session) = session.as_ref().filter(|_| error.is_of_a_rank())
                && let Some(ended) = end_of(session).await
            {
                (self.on_notice)(&error.to_string());
                return Err(ended.into());
            }
            if !self.goes_on(&error, so_far) {
                return Err(error);
            }
            let notice = match &error {
                TrainError::PortTaken { .. } => {
                    so_far.ports_lost += 1;
                    format!("{error}; trying another port")
                }
                TrainError::Grows { .. } | TrainError::Moves { .. } => {
                    if let TrainError::Grows { ranks } = &error {
                        so_far.grows_to = Some(*ranks);
                    }
                    so_far.was_moved = true;
                    error.to_string()
                }
                error => {
                    so_far.failures += 1;
                    let (failures, of) = (so_far.failures, self.max_failures + 1);
                    format!("attempt {failures} of {of} failed, trying again: {error}")
                }
            };
            (self.on_notice)(&notice);
        }
    }

    /// Whether there is another attempt after this.
    fn goes_on(&self, error: &TrainError, so_far: &SoFar) -> bool {
        match error {
            // Nobody's fault, and soon seen: it is no failure of the run.
            TrainError::PortTaken { .. } => self.master_port.is_none() && so_far.ports_lost < PORTS_LOST,
            TrainError::Grows { .. } | TrainError::Moves { .. } => true,
            // Without the cluster there is no other attempt.
            _ if Session::current().is_ok_and(|session| session.is_over()) => false,
            error => error.may_pass(self.retry_exceptions) && so_far.failures < self.max_failures,
        }
    }

    async fn attempt(
        &self,
        so_far: &mut SoFar,
        run_id: &str,
        place: &Place,
        output: &mpsc::Sender<Message>,
    ) -> Result<Finished, TrainError> {
        let patience = Patience {
            limit: self.wait_for_room,
            // What was there may come back.
            for_nodes: so_far.failures > 0 || so_far.was_moved || self.wait_for_room.is_some(),
            for_journal: so_far.launches > 0 || self.wait_for_room.is_some(),
            notice: &*self.on_notice,
        };
        let group = tokio::select! {
            biased;
            () = self.stopper.stopped() => return Err(TrainError::stopped()),
            group = Group::place(self, &patience) => group?,
        };
        so_far.launch(group.ranks.len());
        let outcome = group.run(self, so_far, run_id, place, output).await;
        let again = outcome.as_ref().err().filter(|error| self.goes_on(error, so_far));
        let mut returns_to = again.map(|_| group.nodes()).unwrap_or_default();
        if let Some(TrainError::Moves { node, .. }) = again {
            returns_to.remove(&node.0);
        }
        group.release(&returns_to, &mut so_far.left).await;
        outcome
    }
}

/// Why there is no session any more, if that is so: ranks that it took along have failed of nothing else. What they had become of may be
/// known here before the head could say that it has given this program up, so it is asked.
async fn end_of(session: &Session) -> Option<Error> {
    let answer = tokio::time::timeout(*limits::SESSION, session.nodes()).await;
    // A head that is away for a moment is waited for. Whatever else this fails with is the end of the session, also where that is not yet said.
    answer.ok()?.err()
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::time::Duration;

    use super::*;
    use crate::plan::Program;
    use crate::process::Target;

    #[test]
    fn a_run_that_would_hang_at_once_is_refused_with_what_to_write_instead() {
        let plan = |hang_timeout| Plan {
            hang_timeout,
            ..Plan::new(Program::Process(Target::Script(PathBuf::from("train.py"))))
        };
        assert!(plan(Duration::from_millis(1)).check().is_ok());
        let refused = plan(Duration::ZERO).check().unwrap_err().to_string();
        assert!(refused.contains("10m") && refused.contains("10years"), "{refused}");
    }
}
