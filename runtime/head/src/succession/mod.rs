//! Which of a head and its standby leads: every decision, without IO or clock.
//!
//! - [`leading`]: the head: which standby may take over by whose votes, when it may do without it, and when it must end itself.
//! - [`standing_by`]: the standby: when it asks for votes, and when it leads.
//!
//! What a node decides is in `wingbeat_node::voter`. The argument why there is one head is in `docs/protocol.md`.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

pub(crate) mod leading;
#[cfg(feature = "journal")]
pub(crate) mod standing_by;

/// Milliseconds on the clock of whoever decides.
pub(crate) type Millis = u64;

/// The clock of a head or a standby. It goes on while the machine is suspended, as others do: they may have taken over by then.
#[cfg_attr(not(feature = "journal"), allow(dead_code, reason = "only a head with a journal has a standby"))]
pub(crate) struct Clock {
    began: Duration,
}

#[cfg_attr(not(feature = "journal"), allow(dead_code, reason = "only a head with a journal has a standby"))]
impl Clock {
    pub(crate) fn start() -> Clock {
        Clock { began: Clock::time() }
    }

    pub(crate) fn now(&self) -> Millis {
        millis(Clock::time().saturating_sub(self.began))
    }

    fn time() -> Duration {
        let now = clock_gettime(ClockId::Boottime);
        Duration::new(now.tv_sec.unsigned_abs(), now.tv_nsec.unsigned_abs() as u32)
    }
}

pub(crate) fn millis(duration: Duration) -> Millis {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// Votes that a standby needs.
pub(crate) fn majority(voters: usize) -> usize {
    voters / 2 + 1
}

/// Votes without which no standby has a majority.
pub(crate) fn blocking(voters: usize) -> usize {
    voters - voters / 2
}

#[cfg(all(test, feature = "journal"))]
mod simulation;
