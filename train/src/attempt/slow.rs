//! A storage that takes long: what is said of it, and when.

use std::convert::Infallible;
use std::time::{Duration, Instant};

use super::state::Attempt;

/// When it is said that something takes long: after a while, and again each time that it has taken twice as long.
#[derive(Debug, Default)]
pub(super) struct Reminders {
    /// When that began of which something was said last, and how long it had taken then.
    said: Option<(Instant, Duration)>,
}

impl Reminders {
    /// How long something takes that began then, when there is more to be said of it; the first time after `first`.
    pub(super) fn due(&self, began: Instant, first: Duration) -> Duration {
        match self.said {
            Some((of, took)) if of == began => took * 2,
            _ => first,
        }
    }

    pub(super) fn said(&mut self, began: Instant, took: Duration) {
        self.said = Some((began, took));
    }
}

/// Says, for as long as it is polled, how long something has taken: after `first`, and each time that twice as long has passed.
pub(super) async fn remind(first: Duration, say: impl Fn(Duration)) -> Infallible {
    let (began, mut after) = (tokio::time::Instant::now(), first.max(Duration::from_millis(1)));
    loop {
        tokio::time::sleep_until(began + after).await;
        say(began.elapsed());
        after *= 2;
    }
}

impl Attempt<'_> {
    /// What the storage does that ranks may wait for, and since when.
    pub(super) fn storage_work(&self) -> Option<(Instant, &'static str)> {
        let checkpoints = &self.checkpoints;
        if !checkpoints.saves.is_empty() {
            return Some((checkpoints.save_began, "store a checkpoint"));
        }
        if let Some(since) = checkpoints.removals.since.filter(|_| !checkpoints.held.is_empty()) {
            return Some((since, "remove old checkpoints, for which the next one waits"));
        }
        checkpoints.lookups.began.map(|began| (began, "give the newest checkpoint"))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    #[test]
    fn more_is_said_of_the_same_when_it_has_taken_twice_as_long() {
        let (began, first, mut reminders) = (Instant::now(), Duration::from_secs(600), Reminders::default());
        assert_eq!(reminders.due(began, first), first);
        reminders.said(began, Duration::from_secs(601));
        assert_eq!(reminders.due(began, first), Duration::from_secs(1202));
        assert_eq!(reminders.due(began + first, first), first, "that is the next checkpoint");
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_waited_for_is_said_more_and_more_rarely() {
        let said = Mutex::new(Vec::new());
        let waits = remind(Duration::from_secs(30), |took| said.lock().unwrap().push(took.as_secs()));
        assert!(tokio::time::timeout(Duration::from_secs(300), waits).await.is_err());
        assert_eq!(*said.lock().unwrap(), [30, 60, 120, 240]);
    }
}
