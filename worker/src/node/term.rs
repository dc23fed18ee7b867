//! Until when a node may go on.
//!
//! The head gives a node up when it has heard nothing from it for [`wingbeat_net::limits::Limits::lost`], and then starts elsewhere
//! what ran there. Before that, the node's processes must be gone, whatever has become of the connection: packets may still arrive
//! in one direction, arrive late, or the machine may stand still. So the node asks the head again and again whether it is
//! known there. The head cannot have heard a question before it was asked: each answer gives the node time from the moment of its
//! question on, and from nothing else. How much time that is, is what the head that answered allows: one that was started again with other
//! times waits at least as long as the last one had promised.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use rustix::time::{ClockId, clock_gettime};
use wingbeat_core::spec::Address;
use wingbeat_net::address;
use wingbeat_net::limits::limits;

/// A time on the clock of a [`Term`].
#[derive(Clone, Copy)]
pub(super) struct Asked(Duration);

/// A question to which the head has answered that it knows the node.
#[derive(Clone, Copy, Default)]
struct Answered {
    /// When it was asked.
    at: Duration,
    /// How long the node may go on from then.
    allows: Duration,
}

/// How long the node may go on.
pub(super) struct Term {
    /// Whether the head stands still when the node's machine does.
    has_one_kernel: AtomicBool,
    /// Whether everybody does who may lead: a standby elsewhere goes on while this machine is suspended.
    all_stand_still: AtomicBool,
    /// The last question that the head has answered.
    answered: Mutex<Answered>,
    /// When this process was last found to have stood still itself.
    stood_still: Mutex<Option<Duration>>,
}

impl Term {
    /// With this head, from now on.
    pub(super) fn new(head: &Address) -> Term {
        let has_one_kernel = head.machine.shares_kernel(address::this_machine());
        let all_stand_still = AtomicBool::new(has_one_kernel);
        let has_one_kernel = AtomicBool::new(has_one_kernel);
        let term = Term { has_one_kernel, all_stand_still, answered: Mutex::default(), stood_still: Mutex::default() };
        term.is_known(term.now());
        term
    }

    fn has_one_kernel(&self) -> bool {
        self.has_one_kernel.load(Ordering::Acquire)
    }

    /// The head is at the first of these now, and the next one may be at any. How long ago its last answer was asked for stays the same, by
    /// whatever clock. They are read under the lock: of two who have changed them, the later one would else be outdone by the other.
    pub(super) fn is_with(&self, heads: impl FnOnce() -> Vec<Address>) {
        let mut last = self.answered.lock();
        let heads = heads();
        let ago = self.now().0.saturating_sub(last.at);
        let is_here = |head: &Address| head.machine.shares_kernel(address::this_machine());
        self.has_one_kernel.store(heads.first().is_some_and(is_here), Ordering::Release);
        self.all_stand_still.store(heads.iter().all(is_here), Ordering::Release);
        last.at = self.now().0.saturating_sub(ago);
    }

    /// Now, for a question that is asked next.
    pub(super) fn now(&self) -> Asked {
        // A machine that is suspended stands still with everything on it; others go on meanwhile.
        let all_stand_still = self.all_stand_still.load(Ordering::Acquire);
        let clock = if all_stand_still { ClockId::Monotonic } else { ClockId::Boottime };
        let now = clock_gettime(clock);
        Asked(Duration::new(now.tv_sec.unsigned_abs(), now.tv_nsec.unsigned_abs() as u32))
    }

    /// The head has answered a question of that time: it knows the node.
    pub(super) fn is_known(&self, asked: Asked) {
        let mut last = self.answered.lock();
        if asked.0 >= last.at {
            *last = Answered { at: asked.0, allows: whole() };
        }
    }

    /// How long the node may still go on.
    pub(super) fn left(&self) -> Duration {
        let last = *self.answered.lock();
        last.allows.saturating_sub(self.now().0.saturating_sub(last.at))
    }

    /// How long it may be slept until the next look: a clock that goes on while the machine stands still wakes nobody, and who wakes
    /// much too late has stood still.
    pub(super) fn look(&self) -> Duration {
        self.left().min(self.question())
    }

    /// It was to be slept for so long since then, and is over.
    pub(super) fn woke(&self, began: Asked, after: Duration) {
        let now = self.now().0;
        if now.saturating_sub(began.0 + after) > limits().margin / 2 {
            *self.stood_still.lock() = Some(now);
        }
    }

    /// How often the head is asked. Between machines, the questions take the place of probes.
    pub(super) fn question(&self) -> Duration {
        if self.has_one_kernel() { limits().silence / 4 } else { limits().probe }
    }

    /// How long the head may take to answer a last question when the term is over. Only of a node that has stood still itself since
    /// the last answer: a head on the same machine may have been stopped with it (a terminal's Ctrl-Z, a debugger, a paused
    /// container), and then has not given it up. One that was only cut off has to end at once.
    pub(super) fn last_question(&self) -> Option<Duration> {
        let stood_still = self.stood_still.lock().is_some_and(|at| at > self.answered.lock().at);
        (self.has_one_kernel() && stood_still).then(|| limits().margin)
    }
}

/// How long a node may go on from a question on.
pub(super) fn whole() -> Duration {
    let limits = limits();
    limits.lost.saturating_sub(limits.margin)
}

#[cfg(test)]
mod tests {
    use wingbeat_core::ProcessId;
    use wingbeat_core::spec::MachineId;

    use super::*;

    fn head_on(machine: MachineId) -> Address {
        Address { process: ProcessId(1), machine, unix: String::new(), tcp: None, steward: None }
    }

    #[test]
    fn of_two_who_say_where_the_head_may_be_the_later_list_counts() {
        let (here, elsewhere) = (head_on(address::this_machine()), head_on(MachineId(1)));
        let term = Term::new(&here);
        assert!(term.has_one_kernel() && term.all_stand_still.load(Ordering::Acquire));
        term.is_with(|| {
            assert!(term.answered.is_locked(), "another list may have been taken in between");
            vec![here.clone(), elsewhere.clone()]
        });
        assert!(term.has_one_kernel() && !term.all_stand_still.load(Ordering::Acquire));
        term.is_with(|| vec![elsewhere, here]);
        assert!(!term.has_one_kernel());
        assert!(term.left() > Duration::ZERO, "its time goes on by another clock");
    }
}
