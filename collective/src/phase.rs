//! How far a member has come, in memory that all members share: a number that only it changes, and on which the others can sleep.
//!
//! `cargo xtask loom` runs this with every order in which threads may see each other's writes.

use std::time::Duration;

use self::sync::{AtomicU32, Ordering, fence};

/// In memory that begins as zeros, nobody has come through any phase.
#[repr(C)]
pub(crate) struct Phase {
    number: AtomicU32,
    /// How many sleep until `number` changes.
    sleepers: AtomicU32,
}

impl Phase {
    /// Its member comes into this phase. What it wrote before, whoever sees that reads.
    pub(crate) fn enter(&self, phase: u32) {
        self.number.store(phase, Ordering::SeqCst);
        // Whoever counts as a sleeper after this look sees the new number before it sleeps.
        fence(Ordering::SeqCst);
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            sync::wake(&self.number);
        }
    }

    /// Whether its member has come into this phase.
    pub(crate) fn is_in(&self, phase: u32) -> bool {
        self.number.load(Ordering::Acquire).wrapping_sub(phase) as i32 >= 0
    }

    /// Sleeps until its member has come into another phase, if it is not in this one by now. Whether `limit` was over first; there are
    /// wake-ups without a reason, too.
    pub(crate) fn sleep_before(&self, phase: u32, limit: Duration) -> bool {
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        let seen = self.number.load(Ordering::SeqCst);
        let is_in = seen.wrapping_sub(phase) as i32 >= 0;
        let is_late = !is_in && sync::wait(&self.number, seen, limit);
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
        is_late
    }
}

#[cfg(not(feature = "loom"))]
mod sync {
    pub(super) use std::sync::atomic::{AtomicU32, Ordering, fence};
    use std::time::Duration;

    use rustix::io::Errno;
    use rustix::thread::futex;

    /// Sleeps while the number is `seen`. Whether the limit was over.
    pub(super) fn wait(number: &AtomicU32, seen: u32, limit: Duration) -> bool {
        let limit = futex::Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: limit.subsec_nanos().into() };
        futex::wait(number, futex::Flags::empty(), seen, Some(&limit)) == Err(Errno::TIMEDOUT)
    }

    pub(super) fn wake(number: &AtomicU32) {
        let _ = futex::wake(number, futex::Flags::empty(), u32::MAX >> 1);
    }
}

/// The kernel's futex as it is documented: it compares under a lock, and whoever wakes takes the same lock. No limit is ever over.
#[cfg(feature = "loom")]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
mod sync {
    use std::time::Duration;

    pub(super) use loom::sync::atomic::{AtomicU32, Ordering, fence};
    use loom::sync::{Condvar, Mutex};

    loom::lazy_static! {
        static ref SLEEPERS: (Mutex<()>, Condvar) = (Mutex::new(()), Condvar::new());
    }

    pub(super) fn wait(number: &AtomicU32, seen: u32, _: Duration) -> bool {
        let guard = SLEEPERS.0.lock().unwrap();
        if number.load(Ordering::SeqCst) == seen {
            drop(SLEEPERS.1.wait(guard).unwrap());
        }
        false
    }

    pub(super) fn wake(_: &AtomicU32) {
        let _guard = SLEEPERS.0.lock().unwrap();
        SLEEPERS.1.notify_all();
    }
}

#[cfg(all(test, feature = "loom"))]
mod tests {
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;
    use loom::thread;

    use super::*;

    struct Slot {
        phase: Phase,
        data: UnsafeCell<u32>,
    }

    // SAFETY: for the tests to find out: loom reports a race.
    unsafe impl Sync for Slot {}

    fn slot() -> Arc<Slot> {
        let phase = Phase { number: AtomicU32::new(0), sleepers: AtomicU32::new(0) };
        Arc::new(Slot { phase, data: UnsafeCell::new(0) })
    }

    fn wait_for(slot: &Slot, phase: u32) {
        while !slot.phase.is_in(phase) {
            slot.phase.sleep_before(phase, Duration::MAX);
        }
    }

    #[test]
    fn nobody_sleeps_through_a_phase_and_what_was_written_before_it_is_read() {
        for waiters in 1..=2 {
            loom::model(move || {
                let slot = slot();
                let waiting: Vec<_> = (0..waiters)
                    .map(|_| {
                        let slot = slot.clone();
                        thread::spawn(move || {
                            wait_for(&slot, 1);
                            // SAFETY: its member writes nothing more in this phase.
                            assert_eq!(slot.data.with(|data| unsafe { *data }), 7);
                        })
                    })
                    .collect();
                // SAFETY: nobody reads it before the phase.
                slot.data.with_mut(|data| unsafe { *data = 7 });
                slot.phase.enter(1);
                waiting.into_iter().for_each(|waiting| waiting.join().unwrap());
            });
        }
    }

    #[test]
    fn two_members_come_through_phases_together() {
        loom::model(|| {
            let slots = [slot(), slot()];
            let [ours, theirs] = slots.clone();
            let other = thread::spawn(move || {
                for phase in 1..=2 {
                    theirs.phase.enter(phase);
                    wait_for(&ours, phase);
                }
            });
            let [ours, theirs] = slots;
            for phase in 1..=2 {
                ours.phase.enter(phase);
                wait_for(&theirs, phase);
            }
            other.join().unwrap();
        });
    }
}
