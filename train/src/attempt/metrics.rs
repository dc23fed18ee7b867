//! Metrics are written while the ranks go on.

use futures::stream::StreamExt;

use super::state::Attempt;
use crate::recorder::Recorded;

impl Attempt<'_> {
    /// Begins to write the metrics that are there; unless `all`, once they are many. Ranks are heard meanwhile.
    pub(super) fn record(&mut self, all: bool) {
        // Without a storage, there is one from the first checkpoint on.
        let Some(claim) = self.storage.claim() else { return };
        self.metrics.writing.extend(self.metrics.recorder.write(claim.clone(), all));
    }

    /// Metrics were written. That they cannot be is no reason to end a training.
    pub(super) fn recorded(&mut self, recorded: Recorded, is_last: bool) {
        match self.metrics.recorder.recorded(recorded) {
            Ok(()) => {
                // What has come meanwhile is not left until something else comes: somebody may wait for it before anything does. Where each write
                // makes an object, it is left until there is more of it, and what could not be written until something else comes.
                self.record(false);
                self.metrics.has_complained = false;
                let missed = self.metrics.recorder.take_missed();
                if missed > 0 {
                    (self.plan.on_notice)(&format!(
                        "metrics are stored again; those of {missed} reports are missing: too many waited"
                    ));
                }
            }
            Err(_) if self.metrics.has_complained && !is_last => {}
            Err(why) => {
                self.metrics.has_complained = true;
                let later = if is_last { "" } else { "; they are kept for now" };
                (self.plan.on_notice)(&format!("metrics cannot be stored: {why}{later}"));
            }
        }
    }

    /// Writes the metrics that are left.
    pub(super) async fn record_all(&mut self) {
        self.metrics.recorder.all_stored();
        if let Some(recorded) = self.metrics.writing.next().await {
            self.recorded(recorded, false);
        }
        self.record(true);
        if let Some(recorded) = self.metrics.writing.next().await {
            self.recorded(recorded, true);
        }
    }
}
