//! Until when this node may go on, by the clocks of this machine; what that means is in [`wingbeat_node::term`].

use std::time::Duration;

use parking_lot::Mutex;
use rustix::time::{ClockId, clock_gettime};
use wingbeat_core::spec::Address;
use wingbeat_net::address;
use wingbeat_net::limits::limits;
use wingbeat_node::term::{self, Asked, Heads, Moment};

/// How long the node may go on.
pub(super) struct Term(Mutex<term::Term>);

impl Term {
    /// With this head, from now on.
    pub(super) fn new(head: &Address) -> Term {
        Term(Mutex::new(term::Term::new(of(std::slice::from_ref(head)), moment(), &limits())))
    }

    /// The head is at the first of these now, and the next one may be at any. They are read under the lock: of two who have changed
    /// them, the later one would else be outdone by the other.
    pub(super) fn is_with(&self, heads: impl FnOnce() -> Vec<Address>) {
        let mut term = self.0.lock();
        let heads = of(&heads());
        term.is_with(heads, moment());
    }

    /// Now, for a question that is asked next.
    pub(super) fn now(&self) -> Asked {
        self.0.lock().now(moment())
    }

    /// The head has answered a question of that time: it knows the node.
    pub(super) fn is_known(&self, asked: Asked) {
        self.0.lock().is_known(asked, &limits());
    }

    /// How long the node may still go on.
    pub(super) fn left(&self) -> Duration {
        self.0.lock().left(moment())
    }

    /// How long it may be slept until the next look.
    pub(super) fn look(&self) -> Duration {
        self.0.lock().look(moment(), &limits())
    }

    /// It was to be slept for so long since then, and is over.
    pub(super) fn woke(&self, began: Asked, after: Duration) {
        self.0.lock().woke(began, after, moment(), &limits());
    }

    /// How often the head is asked.
    pub(super) fn question(&self) -> Duration {
        self.0.lock().question(&limits())
    }

    /// How long the head may take to answer a last question when the term is over, if one is asked.
    pub(super) fn last_question(&self) -> Option<Duration> {
        self.0.lock().last_question(&limits())
    }
}

/// How long a node may go on from a question on.
pub(super) fn whole() -> Duration {
    term::whole(&limits())
}

fn of(heads: &[Address]) -> Heads {
    let here = address::this_machine();
    let is_here = |head: &Address| head.machine.shares_kernel(here);
    Heads { present_is_here: heads.first().is_some_and(is_here), all_are_here: heads.iter().all(is_here) }
}

fn moment() -> Moment {
    let time = |clock| {
        let now = clock_gettime(clock);
        Duration::new(now.tv_sec.unsigned_abs(), now.tv_nsec.unsigned_abs() as u32)
    };
    Moment { running: time(ClockId::Monotonic), elapsed: time(ClockId::Boottime) }
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
        assert_eq!(of(std::slice::from_ref(&here)), Heads { present_is_here: true, all_are_here: true });
        let term = Term::new(&here);
        term.is_with(|| {
            assert!(term.0.is_locked(), "another list may have been taken in between");
            vec![here.clone(), elsewhere.clone()]
        });
        assert_eq!(term.question(), limits().silence / 4);
        term.is_with(|| vec![elsewhere, here]);
        assert_eq!(term.question(), limits().probe);
        assert!(term.left() > Duration::ZERO, "its time goes on by another clock");
    }
}
