//! How long things may take. Read once, when they are first needed.
//!
//! Each can be set in milliseconds by an environment variable, so that a test can outlive it. The variables are for tests
//! alone: all processes of a cluster should have the same. `docs/limits.md` lists all limits.

use std::sync::LazyLock;
use std::time::Duration;

use wingbeat_core::limits::set_to;

/// The limits of this process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// A TCP connection on which nothing was heard for so long is dead: 10 s, `WINGBEAT_SILENCE_MS`.
    pub silence: Duration,
    /// A TCP connection on which nothing else was sent for so long carries a probe: a tenth of `silence`, so that ten in a
    /// row must be lost.
    pub probe: Duration,
    /// A process that cannot be reached is looked for so long before what waits for it is told: four times `silence`, or
    /// `WINGBEAT_CONTACT_MS`.
    pub contact: Duration,
    /// A process or node whose connection to the head has ended, and that does not come back for so long, is lost: three and a half
    /// times `silence` since it was last heard, so that a cut of three times `silence` costs nothing, or `WINGBEAT_LOST_MS`. One whose machine says that nobody listens there any more is
    /// lost at once, unless it is a driver on another machine, which not everybody can dial.
    pub lost: Duration,
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
    /// A head that its standby has not heard for so long is taken over from, if its nodes have not heard it either: 4 s,
    /// `WINGBEAT_TAKEOVER_MS`. The head says every quarter of it that it is there.
    pub takeover: Duration,
    /// A head that may have a standby, and has heard for so long neither from that nor from enough nodes, ends: half as long again.
    pub fence: Duration,
    /// How long the objects of a process that has ended are kept for those who hold them and have not said so yet: a quarter longer
    /// than a process is looked for, or `WINGBEAT_ADOPTED_MS`.
    pub adopted: Duration,
}

impl Limits {
    fn read(variable: impl Fn(&str) -> Option<String>) -> Limits {
        let of = |name: &str, usual_ms: u64| set_to(variable(name), Duration::from_millis(usual_ms));
        let silence = of("WINGBEAT_SILENCE_MS", 10_000);
        let head = of("WINGBEAT_HEAD_MS", 30_000);
        let takeover = of("WINGBEAT_TAKEOVER_MS", 4_000);
        let contact = set_to(variable("WINGBEAT_CONTACT_MS"), 4 * silence);
        Limits {
            silence,
            probe: silence / 10,
            lost: set_to(variable("WINGBEAT_LOST_MS"), silence * 7 / 2),
            contact,
            dial: of("WINGBEAT_DIAL_MS", 10_000),
            proof: of("WINGBEAT_PROOF_MS", 2_000),
            head,
            written: head * 2,
            takeover,
            fence: takeover * 3 / 2,
            chunk: of("WINGBEAT_CHUNK_MS", 30_000),
            adopted: set_to(variable("WINGBEAT_ADOPTED_MS"), contact * 5 / 4),
        }
    }
}

/// The limits of this process.
pub fn limits() -> &'static Limits {
    static LIMITS: LazyLock<Limits> = LazyLock::new(|| Limits::read(|name| std::env::var(name).ok()));
    &LIMITS
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_is_what_its_variable_says_or_the_usual_one() {
        let usual = Limits::read(|_| None);
        assert_eq!((usual.silence, usual.probe), (Duration::from_secs(10), Duration::from_secs(1)));
        assert_eq!((usual.lost, usual.contact), (Duration::from_secs(35), Duration::from_secs(40)));
        assert_eq!(Limits::read(|_| Some("0".into())), usual);
        assert_eq!(Limits::read(|_| Some("soon".into())), usual);
        let short = Limits::read(|name| (name == "WINGBEAT_SILENCE_MS").then(|| "500".into()));
        assert_eq!((short.silence, short.probe), (Duration::from_millis(500), Duration::from_millis(50)));
        assert_eq!(short.dial, usual.dial);
    }
}
