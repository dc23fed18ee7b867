//! Until when a node may go on.
//!
//! The head gives a node up when it has heard nothing from it for [`Limits::lost`], and then starts elsewhere what ran there. Before
//! that, the node's processes must be gone, whatever has become of the connection: packets may still arrive in one direction,
//! arrive late, or the machine may stand still. So the node asks the head again and again whether it is known there. The head cannot
//! have heard a question before it was asked: each answer gives the node time from the moment of its question on, and from nothing
//! else. How much time that is, is what the head that answered allows: one that was started again with other times waits at least as
//! long as the last one had promised.
//!
//! A machine that is suspended stands still with everything on it, and others go on meanwhile: a node lives by the clock that goes on,
//! unless everybody who may lead is on its own kernel.

use std::time::Duration;

use wingbeat_net::limits::Limits;

/// One moment, as the two clocks of a machine show it.
#[derive(Clone, Copy, Debug, Default)]
pub struct Moment {
    /// The clock that stands still while the machine is suspended (`CLOCK_MONOTONIC`).
    pub running: Duration,
    /// The clock that goes on meanwhile (`CLOCK_BOOTTIME`).
    pub elapsed: Duration,
}

/// A time on the clock by which a node lives. Of use only to the [`Term`] that gave it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Asked(Duration);

/// Where the heads are that a node may have to do with.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Heads {
    /// Whether the present one stands still when the node's machine does: it is on the same kernel.
    pub present_is_here: bool,
    /// Whether all do that may lead: a standby elsewhere goes on while this machine is suspended.
    pub all_are_here: bool,
}

/// How long a node may go on.
#[derive(Debug)]
pub struct Term {
    heads: Heads,
    /// When the last question was asked that the head has answered.
    asked_at: Asked,
    /// How long the node may go on from then.
    allows: Duration,
    /// When this process was last found to have stood still itself.
    stood_still: Option<Asked>,
}

/// How long a node may go on from a question on.
#[must_use]
pub fn whole(limits: &Limits) -> Duration {
    limits.lost.saturating_sub(limits.margin)
}

impl Term {
    /// A whole one, from now on.
    #[must_use]
    pub fn new(heads: Heads, now: Moment, limits: &Limits) -> Term {
        let mut term = Term { heads, asked_at: Asked::default(), allows: Duration::ZERO, stood_still: None };
        term.is_known(term.now(now), limits);
        term
    }

    /// The time of a question that is asked at this moment.
    #[must_use]
    pub fn now(&self, now: Moment) -> Asked {
        Asked(if self.heads.all_are_here { now.running } else { now.elapsed })
    }

    /// The heads are here from now on. How long ago the last answer was asked for stays the same, by whatever clock.
    pub fn is_with(&mut self, heads: Heads, now: Moment) {
        let ago = self.since_asked(now);
        self.heads = heads;
        self.asked_at = Asked(self.now(now).0.saturating_sub(ago));
    }

    /// The head has answered a question of that time: it knows the node.
    pub fn is_known(&mut self, asked: Asked, limits: &Limits) {
        if asked >= self.asked_at {
            (self.asked_at, self.allows) = (asked, whole(limits));
        }
    }

    /// How long the node may still go on.
    #[must_use]
    pub fn left(&self, now: Moment) -> Duration {
        self.allows.saturating_sub(self.since_asked(now))
    }

    fn since_asked(&self, now: Moment) -> Duration {
        self.now(now).0.saturating_sub(self.asked_at.0)
    }

    /// How long it may be slept until the next look: a clock that goes on while the machine stands still wakes nobody, and who wakes
    /// much too late has stood still.
    #[must_use]
    pub fn look(&self, now: Moment, limits: &Limits) -> Duration {
        self.left(now).min(self.question(limits))
    }

    /// It was to be slept for so long since then, and is over.
    pub fn woke(&mut self, began: Asked, after: Duration, now: Moment, limits: &Limits) {
        let now = self.now(now);
        if now.0.saturating_sub(began.0 + after) > limits.margin / 2 {
            self.stood_still = Some(now);
        }
    }

    /// How often the head is asked. Between machines, the questions take the place of probes.
    #[must_use]
    pub fn question(&self, limits: &Limits) -> Duration {
        if self.heads.present_is_here { limits.silence / 4 } else { limits.probe }
    }

    /// How long the head may take to answer a last question when the term is over. Only of a node that has stood still itself since
    /// the last answer: a head on the same machine may have been stopped with it (a terminal's Ctrl-Z, a debugger, a paused
    /// container), and then has not given it up. One that was only cut off has to end at once.
    #[must_use]
    pub fn last_question(&self, limits: &Limits) -> Option<Duration> {
        let stood_still = self.stood_still.is_some_and(|at| at > self.asked_at);
        (self.heads.present_is_here && stood_still).then_some(limits.margin)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HERE: Heads = Heads { present_is_here: true, all_are_here: true };
    const ELSEWHERE: Heads = Heads { present_is_here: false, all_are_here: false };
    const SECOND: Duration = Duration::from_secs(1);

    /// The machine was suspended for `suspended` seconds of those.
    fn after(seconds: u32, suspended: u32) -> Moment {
        Moment { running: SECOND * (1_000 + seconds - suspended), elapsed: SECOND * (5_000 + seconds) }
    }

    fn limits() -> Limits {
        wingbeat_net::limits::limits()
    }

    #[test]
    fn a_term_ends_before_the_head_gives_the_node_up_and_an_answer_counts_from_its_question() {
        let limits = limits();
        let mut term = Term::new(ELSEWHERE, after(0, 0), &limits);
        let asked = term.now(after(10, 0));
        assert_eq!(term.left(after(10, 0)), whole(&limits) - 10 * SECOND);
        // Answered late.
        term.is_known(asked, &limits);
        assert_eq!(term.left(after(20, 0)), whole(&limits) - 10 * SECOND);
        assert!(whole(&limits) < limits.lost);
        // An answer that was overtaken gives nothing, and takes nothing away.
        term.is_known(Asked(SECOND * 5_005), &limits);
        assert_eq!(term.left(after(20, 0)), whole(&limits) - 10 * SECOND);
        assert_eq!(term.left(after(1_000, 0)), Duration::ZERO);
    }

    #[test]
    fn a_suspended_machine_uses_its_term_up_unless_all_who_may_lead_are_suspended_with_it() {
        let limits = limits();
        let (alone, with_head) = (Term::new(ELSEWHERE, after(0, 0), &limits), Term::new(HERE, after(0, 0), &limits));
        assert_eq!(alone.left(after(3_600, 3_599)), Duration::ZERO);
        assert_eq!(with_head.left(after(3_600, 3_599)), whole(&limits) - SECOND);
        let standby = Heads { all_are_here: false, ..HERE };
        assert_eq!(Term::new(standby, after(0, 0), &limits).left(after(3_600, 3_599)), Duration::ZERO);
    }

    #[test]
    fn another_clock_changes_nothing_about_how_long_ago_an_answer_was_asked_for() {
        let limits = limits();
        let mut term = Term::new(HERE, after(0, 0), &limits);
        term.is_with(ELSEWHERE, after(7, 2));
        assert_eq!(term.left(after(7, 2)), whole(&limits) - 5 * SECOND);
        term.is_with(HERE, after(9, 2));
        assert_eq!(term.left(after(9, 2)), whole(&limits) - 7 * SECOND);
    }

    #[test]
    fn only_a_node_that_stood_still_beside_its_head_asks_a_last_time() {
        let limits = limits();
        let asks = |heads| {
            let mut term = Term::new(heads, after(0, 0), &limits);
            assert_eq!(term.last_question(&limits), None, "it has not stood still");
            let began = term.now(after(1, 0));
            term.woke(began, SECOND, after(2, 0), &limits);
            assert_eq!(term.last_question(&limits), None, "it has woken in time");
            term.woke(began, SECOND, after(100, 0), &limits);
            term.last_question(&limits)
        };
        assert_eq!(asks(HERE), Some(limits.margin));
        assert_eq!(asks(ELSEWHERE), None);
    }
}
