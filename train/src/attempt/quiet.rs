//! What is done when nothing has been heard for long: who is waited for is named.

use std::time::{Duration, Instant};

use super::state::Attempt;
use crate::error::TrainError;
use crate::ras::Status;
use crate::{hang, limits, shown};

impl Attempt<'_> {
    /// How long it may be quiet before somebody looks.
    pub(super) fn patience(&self) -> Duration {
        const FOREVER: Duration = Duration::from_secs(u32::MAX as u64);
        let hang = if self.quiet.was_hanging { FOREVER } else { self.plan.hang_timeout };
        let is_named = self.reports.missing().is_empty() || self.quiet.was_named;
        let report = if is_named { FOREVER } else { *limits::REPORT };
        // What NCCL does from then on shows whether it hangs.
        let nccl =
            if self.quiet.ras.is_some() && self.quiet.nccl.is_none() { self.plan.hang_timeout / 2 } else { FOREVER };
        hang.min(report).min(nccl)
    }

    /// Nothing has been heard for long: says who is waited for.
    pub(super) async fn look(&mut self) -> Result<(), TrainError> {
        let missing = self.reports.missing();
        let quiet = self.quiet.since.elapsed();
        if !missing.is_empty() && !self.quiet.was_named {
            self.quiet.was_named = true;
            let seconds = quiet.as_secs();
            (self.plan.on_notice)(&format!(
                "the others have waited {seconds} s for the report of {}",
                shown::ranks(&missing)
            ));
        }
        if self.quiet.nccl.is_none() && quiet >= self.plan.hang_timeout / 2 {
            self.quiet.nccl = self.ask_nccl().await;
        }
        if quiet < self.plan.hang_timeout || self.quiet.was_hanging {
            return Ok(());
        }
        let nccl = self.ask_nccl().await;
        if let (Some(before), Some(now)) = (&self.quiet.nccl, &nccl)
            && now.has_moved_since(before)
        {
            // It says nothing, and works.
            (self.quiet.since, self.quiet.nccl) = (Instant::now(), nccl);
            return Ok(());
        }
        self.quiet.was_hanging = true;
        let asked: Vec<_> = self.group.ranks.iter().map(|rank| rank.handle.stacks()).collect();
        let told = futures::future::join_all(asked.iter().map(|asked| asked.get_timeout(*limits::KILLED))).await;
        let stacks: Vec<_> =
            told.into_iter().map(|told| told.unwrap_or_else(|error| format!("no stacks: {error}"))).collect();
        let described = hang::describe(&stacks, &missing, nccl.as_ref(), quiet);
        (self.plan.on_notice)(&described.text);
        match self.plan.restart_on_hang {
            true => Err(TrainError::Hangs { seconds: quiet.as_secs(), lagging: shown::ranks(&described.lagging) }),
            false => Ok(()),
        }
    }

    /// How far NCCL is, if ranks use it: one process gathers it from all. Empty if it does not answer.
    pub(super) async fn ask_nccl(&mut self) -> Option<Status> {
        let (port, first) = (self.quiet.ras?, self.group.ranks.first()?);
        Some(first.handle.ras(port).get_timeout(*limits::KILLED * 2).await.unwrap_or_default())
    }
}
