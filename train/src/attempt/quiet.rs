//! What is done when nothing has been heard for long: who is waited for is named.

use std::time::{Duration, Instant};

use super::state::{Attempt, Quiet};
use crate::error::TrainError;
use crate::ras::Status;
use crate::{hang, limits, shown};

/// As good as never.
const FOREVER: Duration = Duration::from_secs(u32::MAX as u64);

impl Quiet {
    /// When somebody looks next. `hang`: the silence that makes a hang; `waits_for_report`: whether ranks do; `storage`: since when it does
    /// something for which ranks may wait. That is no hang, but something is said of it after the same time.
    pub(super) fn next_look(&self, hang: Duration, waits_for_report: bool, storage: Option<Instant>) -> Instant {
        let is_named = !waits_for_report || self.was_named;
        let report = self.since + if is_named { FOREVER } else { *limits::REPORT };
        if let Some(began) = storage {
            return report.min(began + self.slow.due(began, hang).min(FOREVER));
        }
        let silent = if self.was_hanging { FOREVER } else { hang };
        // What NCCL does from then on shows whether it hangs.
        let nccl = if self.ras.is_some() && self.nccl.is_none() { hang / 2 } else { FOREVER };
        report.min(self.since + silent.min(nccl).min(FOREVER))
    }
}

impl Attempt<'_> {
    /// When somebody looks next why nothing is heard.
    pub(super) fn next_look(&self) -> Instant {
        let storage = self.storage_work().map(|(began, _)| began);
        self.quiet.next_look(self.plan.hang_timeout, !self.reports.missing().is_empty(), storage)
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
        if let Some((began, what)) = self.storage_work() {
            // It has limits of its own.
            let took = began.elapsed();
            if took >= self.quiet.slow.due(began, self.plan.hang_timeout) {
                self.quiet.slow.said(began, took);
                let (storage, seconds) = (self.storage.name(), took.as_secs());
                (self.plan.on_notice)(&format!("{storage} has taken {seconds} s so far to {what}"));
            }
            return Ok(());
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_storage_that_takes_long_is_no_hang_of_the_ranks() {
        let (minute, hang) = (Duration::from_secs(60), Duration::from_secs(600));
        let mut quiet = Quiet::new(Some(29500));
        let silent = quiet.since;
        assert_eq!(quiet.next_look(hang, false, None), silent + hang / 2, "NCCL is asked first");
        quiet.nccl = Some(Status::default());
        assert_eq!(quiet.next_look(hang, false, None), silent + hang);
        assert_eq!(quiet.next_look(hang, true, None), silent + *limits::REPORT);
        let began = silent + minute;
        assert_eq!(quiet.next_look(hang, false, Some(began)), began + hang, "it is said that it takes long");
        quiet.slow.said(began, hang);
        assert_eq!(quiet.next_look(hang, false, Some(began)), began + hang * 2);
        assert_eq!(quiet.next_look(hang, false, Some(began + hang)), began + hang * 2, "of the next checkpoint");
        // The ranks are heard, or the storage is done.
        quiet.since = began + hang * 3;
        assert_eq!(quiet.next_look(hang, false, None), quiet.since + hang);
        assert_eq!(quiet.next_look(Duration::MAX, false, None), quiet.since + FOREVER, "no time is too long");
        assert_eq!(quiet.next_look(Duration::MAX, false, Some(silent)), silent + FOREVER);
    }
}
