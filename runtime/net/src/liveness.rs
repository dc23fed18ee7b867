//! Whether somebody who has to be heard again and again is alive: samples in, verdict out.
//!
//! ```text
//!   alive ──suspect_after──▶ suspect ──lost_after──▶ lost
//!     ▲                         │
//!     └──────── heard ──────────┘
//! ```
//!
//! A suspect may live: nothing new is begun there, and nothing is begun anew elsewhere. Whoever listens may stand still itself (a
//! stopped process, a suspended or overloaded machine), and then has not listened: it says for how long it meant to listen, and how
//! long that took. What is beyond that is not the other's silence.

use std::time::Duration;

/// What is known of somebody.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Verdict {
    /// It was heard a moment ago.
    Alive,
    /// It was not heard for so long that it may be gone.
    Suspect,
    /// It is treated as gone.
    Lost,
}

/// How long somebody was listened to in vain.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Liveness {
    silent: Duration,
}

impl Liveness {
    /// Of somebody who was not heard for so long.
    pub fn silent_for(silent: Duration) -> Liveness {
        Liveness { silent }
    }

    /// It was heard.
    pub fn heard(&mut self) {
        self.silent = Duration::ZERO;
    }

    /// It was to be listened to for `planned`, and nothing was heard; that was over after `took`. Whoever is late has stood still.
    pub fn heard_nothing(&mut self, planned: Duration, took: Duration) {
        self.silent += planned.min(took);
    }

    /// What follows, with these times.
    pub fn verdict(&self, suspect_after: Duration, lost_after: Duration) -> Verdict {
        match self.silent {
            silent if silent >= lost_after => Verdict::Lost,
            silent if silent >= suspect_after => Verdict::Suspect,
            _ => Verdict::Alive,
        }
    }

    /// How much more silence makes it lost.
    pub fn left(&self, lost_after: Duration) -> Duration {
        lost_after.saturating_sub(self.silent)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SUSPECT: Duration = Duration::from_secs(5);
    const LOST: Duration = Duration::from_secs(30);

    /// What a listener goes through, in milliseconds.
    #[derive(Clone, Copy, Debug)]
    enum Sample {
        Heard,
        Nothing { planned: u64, late: u64 },
    }

    fn samples() -> impl Strategy<Value = Vec<Sample>> {
        let sample = prop_oneof![
            1 => Just(Sample::Heard),
            6 => (1..1_000u64, prop_oneof![Just(0), 0..100_000u64])
                .prop_map(|(planned, late)| Sample::Nothing { planned, late }),
        ];
        prop::collection::vec(sample, 0..200)
    }

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn silence_makes_a_suspect_then_a_loss_and_a_word_ends_suspicion() {
        let mut liveness = Liveness::default();
        let mut verdicts = Vec::new();
        for _ in 0..60 {
            liveness.heard_nothing(ms(500), ms(500));
            verdicts.push(liveness.verdict(SUSPECT, LOST));
        }
        assert!(verdicts.is_sorted());
        let count = |verdict| verdicts.iter().filter(|other| **other == verdict).count();
        assert_eq!([Verdict::Alive, Verdict::Suspect, Verdict::Lost].map(count), [9, 50, 1]);
        let mut suspect = Liveness::silent_for(ms(29_999));
        assert_eq!(suspect.verdict(SUSPECT, LOST), Verdict::Suspect);
        suspect.heard();
        assert_eq!(suspect.verdict(SUSPECT, LOST), Verdict::Alive);
    }

    proptest! {
        #[test]
        fn a_verdict_follows_from_the_silence_that_was_listened_to_since_the_last_word(samples in samples()) {
            let (mut liveness, mut listened) = (Liveness::default(), 0);
            for sample in samples {
                match sample {
                    Sample::Heard => {
                        liveness.heard();
                        listened = 0;
                    }
                    // However late: no time counts in which the listener stood still.
                    Sample::Nothing { planned, late } => {
                        liveness.heard_nothing(ms(planned), ms(planned + late));
                        listened += planned;
                    }
                }
                let expected = match listened {
                    30_000.. => Verdict::Lost,
                    5_000.. => Verdict::Suspect,
                    _ => Verdict::Alive,
                };
                prop_assert_eq!(liveness.verdict(SUSPECT, LOST), expected);
                prop_assert_eq!(liveness.left(LOST), ms(30_000u64.saturating_sub(listened)));
            }
        }

        #[test]
        fn whoever_is_heard_in_every_third_of_the_time_is_never_suspect_however_late_the_listener_is(lates in prop::collection::vec(0..1_000_000u64, 1..100)) {
            let mut liveness = Liveness::default();
            for late in lates {
                liveness.heard_nothing(SUSPECT / 3, SUSPECT / 3 + ms(late));
                liveness.heard_nothing(SUSPECT / 3, SUSPECT / 3 + ms(late));
                prop_assert_eq!(liveness.verdict(SUSPECT, LOST), Verdict::Alive);
                liveness.heard();
            }
        }
    }
}
