//! After how long a node or process that says nothing is suspect, and after how long it is lost. The head decides this for its
//! cluster, and says it in every handshake ([`crate::handshake::Welcome`]).

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// The shortest time after which somebody may be lost: the processes of a node must have ended before, on a loaded machine, too.
const SHORTEST_LOST: Duration = Duration::from_secs(3);
/// The longest: whoever waits longer waits for ever.
const LONGEST_LOST: Duration = Duration::from_secs(24 * 60 * 60);
/// The shortest time after which somebody may be suspect: ten probes fit in, and a loaded machine is late by tenths of a second.
const SHORTEST_SUSPECT: Duration = Duration::from_millis(500);
/// A suspect has at least as long to come back as it took to become one.
const LEAST_RATIO: u32 = 2;
/// Whoever says only when somebody is lost means that suspicion comes in the first third.
const USUAL_RATIO: u32 = 3;

/// After how much silence somebody is suspect, and after how much it is lost.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
#[serde(try_from = "(u32, u32)", into = "(u32, u32)")]
pub struct Patience {
    suspect_ms: u32,
    lost_ms: u32,
}

/// Why two times are no [`Patience`].
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PatienceError {
    /// A loaded machine would be lost.
    #[error(
        "lost after {0:?} is too soon: a machine under load can be late by seconds; give at least {SHORTEST_LOST:?}"
    )]
    LostTooSoon(Duration),
    /// Nobody would ever be lost.
    #[error("lost after {0:?} is too late; give at most {LONGEST_LOST:?}")]
    LostTooLate(Duration),
    /// A loaded machine would be suspect again and again.
    #[error(
        "suspect after {0:?} is too soon: a machine under load can be late by that; give at least {SHORTEST_SUSPECT:?}"
    )]
    SuspectTooSoon(Duration),
    /// A suspect could not come back in time.
    #[error(
        "suspect after {suspect:?} and lost after {lost:?} are too close: a suspect needs time to come back; suspect after {:?} is the most, \
         or lost after {:?} the least", *lost / LEAST_RATIO, *suspect * LEAST_RATIO
    )]
    TooClose {
        /// When it would be suspect.
        suspect: Duration,
        /// When it would be lost.
        lost: Duration,
    },
}

impl Patience {
    /// Suspect after 5 s, lost after 30 s: a cut of 20 s costs nothing, and no loaded machine is late by so much.
    pub const USUAL: Patience = Patience { suspect_ms: 5_000, lost_ms: 30_000 };

    /// With these times, or the usual ones. If only the loss is given, suspicion comes in the first third of it, and after 5 s at the latest.
    ///
    /// ```
    /// use std::time::Duration;
    /// use wingbeat_net::patience::Patience;
    /// let soon = Patience::new(None, Some(Duration::from_secs(3))).unwrap();
    /// assert_eq!((soon.suspect_after(), soon.lost_after()), (Duration::from_secs(1), Duration::from_secs(3)));
    /// assert!(Patience::new(None, Some(Duration::from_secs(2))).is_err());
    /// ```
    ///
    /// # Errors
    /// A loaded machine would be taken for a dead one, or a suspect would have no time to come back.
    pub fn new(suspect: Option<Duration>, lost: Option<Duration>) -> Result<Patience, PatienceError> {
        let lost = lost.unwrap_or(Self::USUAL.lost_after());
        if lost < SHORTEST_LOST {
            return Err(PatienceError::LostTooSoon(lost));
        }
        if lost > LONGEST_LOST {
            return Err(PatienceError::LostTooLate(lost));
        }
        let suspect = suspect.unwrap_or_else(|| Self::USUAL.suspect_after().min(lost / USUAL_RATIO));
        if suspect < SHORTEST_SUSPECT {
            return Err(PatienceError::SuspectTooSoon(suspect));
        }
        if suspect > lost / LEAST_RATIO {
            return Err(PatienceError::TooClose { suspect, lost });
        }
        // Both are below a day by now.
        Ok(Patience { suspect_ms: suspect.as_millis() as u32, lost_ms: lost.as_millis() as u32 })
    }

    /// After so much silence nothing new is placed there.
    pub fn suspect_after(self) -> Duration {
        Duration::from_millis(self.suspect_ms.into())
    }

    /// After so much silence, what ran there may run elsewhere.
    pub fn lost_after(self) -> Duration {
        Duration::from_millis(self.lost_ms.into())
    }

    /// As one number.
    pub(crate) const fn bits(self) -> u64 {
        (self.suspect_ms as u64) << 32 | self.lost_ms as u64
    }

    /// From [`Patience::bits`].
    pub(crate) const fn from_bits(bits: u64) -> Patience {
        Patience { suspect_ms: (bits >> 32) as u32, lost_ms: bits as u32 }
    }
}

impl Default for Patience {
    fn default() -> Self {
        Self::USUAL
    }
}

impl TryFrom<(u32, u32)> for Patience {
    type Error = PatienceError;

    fn try_from((suspect_ms, lost_ms): (u32, u32)) -> Result<Patience, PatienceError> {
        let of = |ms: u32| Some(Duration::from_millis(ms.into()));
        Patience::new(of(suspect_ms), of(lost_ms))
    }
}

impl From<Patience> for (u32, u32) {
    fn from(patience: Patience) -> (u32, u32) {
        (patience.suspect_ms, patience.lost_ms)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn seconds(suspect: f64, lost: f64) -> Result<Patience, PatienceError> {
        Patience::new(Some(Duration::from_secs_f64(suspect)), Some(Duration::from_secs_f64(lost)))
    }

    #[test]
    fn what_is_not_given_is_usual_or_follows_from_the_loss() {
        assert_eq!(Patience::new(None, None), Ok(Patience::USUAL));
        assert_eq!(Patience::new(None, Some(Duration::from_secs(60))), seconds(5.0, 60.0));
        assert_eq!(Patience::new(None, Some(Duration::from_secs(6))), seconds(2.0, 6.0));
        assert_eq!(Patience::new(Some(Duration::from_secs(2)), None), seconds(2.0, 30.0));
    }

    #[test]
    fn times_that_take_a_busy_machine_for_a_dead_one_are_refused_with_what_to_give_instead() {
        let why = |suspect, lost| seconds(suspect, lost).unwrap_err().to_string();
        assert!(why(1.0, 2.9).contains("at least 3s"));
        assert!(why(0.4, 3.0).contains("at least 500ms"));
        assert!(why(5.0, 100_000.0).contains("at most"));
        let close = why(5.0, 8.0);
        assert!(
            close.contains("suspect after 4s is the most") && close.contains("lost after 10s the least"),
            "{close}"
        );
    }

    proptest! {
        #[test]
        fn whatever_is_taken_leaves_a_suspect_as_long_again_and_travels_as_it_is(suspect_ms: u32, lost_ms in 0..200_000_000u32) {
            let suspect_ms = suspect_ms % 100_000;
            if let Ok(taken) = Patience::try_from((suspect_ms, lost_ms)) {
                prop_assert!(taken.suspect_after() * 2 <= taken.lost_after());
                prop_assert_eq!(<(u32, u32)>::from(taken), (suspect_ms, lost_ms));
                prop_assert_eq!(Patience::from_bits(taken.bits()), taken);
            }
        }
    }
}
