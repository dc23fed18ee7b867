//! Why an attempt has failed: the cause, and not what followed from it.

use wingbeat::Error;

use super::state::Attempt;
use crate::error::{TrainError, is_loss};
use crate::process::Outcome;

impl Attempt<'_> {
    /// A rank that was lost is why others then fail; but not one that was ended because its group has no place any more.
    /// What ended because it was asked to is no cause. Nodes' clocks differ by less than ranks usually do.
    pub(super) fn first_failure(&mut self, port: u16) -> TrainError {
        let ended_with_group = |error: &Error| match error {
            Error::ActorDied { cause, .. } => matches!(**cause, Error::PlacementGroupGone { .. }),
            _ => false,
        };
        self.ranks.lost.sort_by_key(|(_, error)| ended_with_group(error));
        if let Some((rank, error)) = self.ranks.lost.drain(..).next() {
            let node = self.group.hostname(rank);
            return TrainError::RankLost { rank: rank as u32, node, cause: Box::new(error) };
        }
        let calls = self.ranks.failed_calls.drain(..);
        if let Some((rank, cause)) = calls.min_by_key(|(_, cause)| consequence(cause)) {
            return TrainError::FunctionFailed { rank: rank as u32, cause: Box::new(cause) };
        }
        let failures = std::mem::take(&mut self.ranks.failures);
        let Some((rank, outcome)) = first(failures) else { return TrainError::stopped() };
        // The exception itself: a library may print the words about something optional.
        let no_torch = "ModuleNotFoundError: No module named 'torch'";
        let lacks_torch = match &outcome.error {
            Some(error) => error.message == no_torch,
            None => outcome.stderr.last().is_some_and(|line| line == no_torch),
        };
        if lacks_torch {
            return TrainError::TorchMissing { rank: rank as u32, python: self.plan.python.clone() };
        }
        // Where torch's store of rank 0 was to listen.
        let is_taken = |text: &str| text.contains("EADDRINUSE") && text.contains(&port.to_string());
        if rank == 0 && outcome.error.as_ref().is_some_and(|error| is_taken(&error.message)) {
            return TrainError::PortTaken { port, node: self.group.hostname(0) };
        }
        let python_error = outcome.error.clone().map(|mut error| {
            error.pickled = self.ranks.raised.remove(&rank);
            Box::new(error)
        });
        TrainError::RankFailed {
            rank: rank as u32,
            node: self.group.hostname(rank),
            exit: outcome.shown(),
            code: outcome.code,
            python_error,
            stderr: outcome.stderr,
        }
    }
}

/// How likely it is that a call has failed because another has: a function fails that waits for one whose process is gone, and those that
/// are left are then cancelled.
fn consequence(cause: &Error) -> u8 {
    match cause {
        Error::Cancelled { .. } => 2,
        cause if is_loss(cause) => 0,
        _ => 1,
    }
}

/// Which failed first. Exceptions are compared by when they came out of the script: what one lets go of on its way out can
/// make another rank fail and end before its own process has ended, which may even be asked to end before that. With all
/// else it is when they ended that counts, and whether they had been asked to.
fn first(failures: Vec<(usize, Outcome)>) -> Option<(usize, Outcome)> {
    let (raised, others): (Vec<_>, Vec<_>) = failures.into_iter().partition(|(_, outcome)| outcome.raised_us.is_some());
    let raised = raised.into_iter().min_by_key(|(_, outcome)| outcome.raised_us);
    raised.into_iter().chain(others).min_by_key(|(_, outcome)| (outcome.was_stopped, outcome.ended_us))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cause_is_first_though_its_consequence_ends_before_it() {
        let raised = |at, ended_us| Outcome { raised_us: Some(at), ended_us, ..Outcome::default() };
        let killed = |ended_us| Outcome { signal: Some(9), ended_us, ..Outcome::default() };
        let of = |outcomes: Vec<Outcome>| first(outcomes.into_iter().enumerate().collect()).map(|(rank, _)| rank);
        assert_eq!(of(vec![raised(12, 20), raised(10, 30)]), Some(1));
        // Its connections close before it can be seen that it has ended.
        assert_eq!(of(vec![raised(10, 30), killed(11)]), Some(1));
        assert_eq!(of(vec![raised(10, 30), killed(40)]), Some(0));
        let stopped = |outcome| Outcome { was_stopped: true, ..outcome };
        assert_eq!(of(vec![raised(12, 20), stopped(raised(10, 30))]), Some(1), "it was asked on its way out");
        assert_eq!(of(vec![raised(10, 20), stopped(raised(12, 30))]), Some(0));
        assert_eq!(of(vec![stopped(raised(12, 20)), killed(30)]), Some(1), "it raised because it was asked");
        assert_eq!(of(vec![]), None);
    }
}
