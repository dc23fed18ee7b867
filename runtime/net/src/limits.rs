//! How long things may take.
//!
//! How long silence is borne is the head's to say ([`Patience`]): every process of a cluster learns it when it joins, and again from a
//! head that was started again with other times. The rest is usual, and follows from that. A process that is in several clusters has the
//! times that it was told last.
//!
//! Each limit can be set in milliseconds by an environment variable, which goes before, so that a test can outlive it. The variables
//! are for tests alone. `docs/limits.md` lists all limits.

use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use wingbeat_core::limits::set_to;

use crate::patience::Patience;

/// The limits of this process. A field for each; all follow from [`Patience`] and the environment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// A TCP connection on which nothing was heard for so long is dead, and who was behind it suspect: [`Patience::suspect_after`], 5 s,
    /// or `WINGBEAT_SILENCE_MS`.
    pub silence: Duration,
    /// A TCP connection on which nothing else was sent for so long carries a probe: a tenth of `silence`, so that ten in a
    /// row must be lost.
    pub probe: Duration,
    /// A process or node whose connection to the head has ended, and that does not come back for so long since it was last heard, is lost:
    /// [`Patience::lost_after`], 30 s, or `WINGBEAT_LOST_MS`. One whose machine says that nobody listens there any more is
    /// lost at once, unless it is a driver on another machine, which not everybody can dial.
    pub lost: Duration,
    /// What a node has between the end of its term and the moment in which the head gives it up, for ending its processes: a tenth of
    /// `lost`, so that a cut of two thirds of it costs nothing.
    pub margin: Duration,
    /// A process that cannot be reached is looked for so long before what waits for it is told: `silence` longer than `lost`, so that the
    /// head says before whether it is, or `WINGBEAT_CONTACT_MS`.
    pub contact: Duration,
    /// How long dialling somebody may take who was there a moment ago: 2 s, and less where little time is left for it.
    pub redial: Duration,
    /// Dialling and the handshake together: 10 s, `WINGBEAT_DIAL_MS`. A live peer answers in milliseconds; this allows for a
    /// loaded machine and a few lost packets.
    pub dial: Duration,
    /// Between accepting a TCP connection and the proof of the token: 2 s, `WINGBEAT_PROOF_MS`. A process on this machine,
    /// which its user is known of, has as long as for dialling.
    pub proof: Duration,
    /// How long the head may take to answer: 30 s, `WINGBEAT_HEAD_MS`. It answers in microseconds; this allows for a loaded
    /// machine.
    pub head: Duration,
    /// The same, for what it writes to its disk first: twice as long.
    pub written: Duration,
    /// How long a driver or the head may take to give a megabyte of a program: 30 s, `WINGBEAT_CHUNK_MS`. Over the slowest
    /// links that anybody computes on it takes seconds.
    pub chunk: Duration,
    /// A head that its standby has not heard for so long is taken over from, if its nodes have not heard it either: 4 s, or a
    /// quarter of `lost` if that is less, 2 s at least, or `WINGBEAT_TAKEOVER_MS`. The head says every quarter of it that it is there.
    pub takeover: Duration,
    /// A head that may have a standby, and has heard for so long neither from that nor from enough nodes, ends: half as long again.
    pub fence: Duration,
    /// How long the objects of a process that has ended are kept for those who hold them and have not said so yet: a quarter longer
    /// than a process is looked for, or `WINGBEAT_ADOPTED_MS`.
    pub adopted: Duration,
    /// How long a head waits for those that knew an earlier one, when it does not know what that promised them: as long as a head with
    /// the usual times would have, or as long as this one does.
    pub unknown: Duration,
}

/// What the environment says.
#[derive(Clone, Copy, Default)]
struct Variables {
    silence: Option<Duration>,
    lost: Option<Duration>,
    contact: Option<Duration>,
    dial: Option<Duration>,
    proof: Option<Duration>,
    head: Option<Duration>,
    chunk: Option<Duration>,
    adopted: Option<Duration>,
    takeover: Option<Duration>,
}

impl Variables {
    fn read(variable: impl Fn(&str) -> Option<String>) -> Variables {
        let of = |name: &str| Some(set_to(variable(name), Duration::ZERO)).filter(|limit| !limit.is_zero());
        Variables {
            silence: of("WINGBEAT_SILENCE_MS"),
            lost: of("WINGBEAT_LOST_MS"),
            contact: of("WINGBEAT_CONTACT_MS"),
            dial: of("WINGBEAT_DIAL_MS"),
            proof: of("WINGBEAT_PROOF_MS"),
            head: of("WINGBEAT_HEAD_MS"),
            chunk: of("WINGBEAT_CHUNK_MS"),
            adopted: of("WINGBEAT_ADOPTED_MS"),
            takeover: of("WINGBEAT_TAKEOVER_MS"),
        }
    }
}

impl Limits {
    #[inline]
    fn of(patience: Patience, set: &Variables) -> Limits {
        const SECOND: Duration = Duration::from_secs(1);
        let silence = set.silence.unwrap_or(patience.suspect_after());
        // A test that sets the silence alone means that the rest follows.
        let of_silence = set.silence.map(|silence| silence * 7 / 2);
        let lost = set.lost.or(of_silence).unwrap_or(patience.lost_after());
        let contact = set.contact.unwrap_or(lost + silence);
        let head = set.head.unwrap_or(30 * SECOND);
        let takeover = set.takeover.unwrap_or((4 * SECOND).min(lost / 4).max(2 * SECOND));
        let is_usual = set.lost.or(of_silence).is_none();
        Limits {
            silence,
            probe: silence / 10,
            lost,
            margin: lost / 10,
            contact,
            redial: (2 * SECOND).min(lost / 4),
            dial: set.dial.unwrap_or(10 * SECOND),
            proof: set.proof.unwrap_or(2 * SECOND),
            head,
            written: head * 2,
            takeover,
            fence: takeover * 3 / 2,
            chunk: set.chunk.unwrap_or(30 * SECOND),
            adopted: set.adopted.unwrap_or(contact * 5 / 4),
            unknown: if is_usual { lost.max(Patience::USUAL.lost_after()) } else { lost },
        }
    }
}

/// What the head has said.
static PATIENCE: AtomicU64 = AtomicU64::new(Patience::USUAL.bits());

static SET: LazyLock<Variables> = LazyLock::new(|| Variables::read(|name| std::env::var(name).ok()));

/// The limits of this process, as of now.
#[inline]
pub fn limits() -> Limits {
    Limits::of(patience(), &SET)
}

/// [`Limits::silence`] alone, for whoever asks with every message.
#[inline]
pub(crate) fn silence() -> Duration {
    SET.silence.unwrap_or(patience().suspect_after())
}

/// What the head of this process's cluster has said last.
pub fn patience() -> Patience {
    Patience::from_bits(PATIENCE.load(Ordering::Relaxed))
}

/// The head has said this: from now on it holds in this process.
pub fn take(patience: Patience) {
    PATIENCE.store(patience.bits(), Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    fn with(variables: &[(&str, &str)]) -> Limits {
        let of = |name: &str| variables.iter().find(|(known, _)| *known == name).map(|(_, text)| (*text).to_owned());
        Limits::of(Patience::USUAL, &Variables::read(of))
    }

    #[test]
    fn a_limit_is_what_its_variable_says_or_follows_from_what_the_head_says() {
        let usual = with(&[]);
        assert_eq!((usual.silence, usual.probe), (ms(5_000), ms(500)));
        assert_eq!((usual.lost, usual.margin, usual.contact), (ms(30_000), ms(3_000), ms(35_000)));
        assert_eq!(with(&[("WINGBEAT_SILENCE_MS", "0"), ("WINGBEAT_LOST_MS", "soon")]), usual);
        let short = with(&[("WINGBEAT_SILENCE_MS", "500")]);
        assert_eq!((short.silence, short.probe, short.lost), (ms(500), ms(50), ms(1_750)));
        assert_eq!(short.dial, usual.dial);
        let both = with(&[("WINGBEAT_SILENCE_MS", "500"), ("WINGBEAT_LOST_MS", "9000")]);
        assert_eq!((both.lost, both.contact), (ms(9_000), ms(9_500)));
    }

    proptest! {
        #[test]
        fn every_limit_leaves_time_for_what_must_come_before_it(suspect in 500..100_000u32, lost in 3_000..1_000_000u32) {
            let Ok(patience) = Patience::try_from((suspect, lost)) else { return Ok(()) };
            let limits = Limits::of(patience, &Variables::default());
            // A node ends itself before the head gives it up, and has at least three dials for coming back.
            prop_assert!(limits.lost - limits.margin >= limits.silence * 9 / 5);
            prop_assert!(limits.redial * 3 <= limits.lost - limits.margin);
            // The head knows whether somebody is lost before those do who look for it, and they know before its values go.
            prop_assert!(limits.contact > limits.lost && limits.adopted > limits.contact);
            prop_assert!(limits.unknown >= limits.lost);
        }
    }
}
