//! A process that submits faster than the cluster works is slowed: what waits would fill its memory.
//!
//! The thread that submits looks now and then how much waits, and pauses while that is too much, for a limited time: nothing is refused,
//! and a program that submits all it has before it does what its tasks wait for goes on, slowly.

use std::cell::Cell;
use std::sync::{LazyLock, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::owner::argument_bytes::{self, ArgumentBytes};
use crate::owner::outbound::Outbound;
use crate::session::session::Session;

/// So many tasks and calls may wait in a process: 1,000,000, `WINGBEAT_PENDING`.
static LIMIT: LazyLock<usize> = LazyLock::new(|| {
    let said = std::env::var("WINGBEAT_PENDING").ok().and_then(|text| text.trim().parse().ok());
    said.filter(|limit| *limit > 0).unwrap_or(1_000_000)
});
/// So much memory they may take: a quarter of what this process may use.
static BYTES_LIMIT: LazyLock<usize> = LazyLock::new(|| {
    let whole = MEMORY.get().map_or_else(of_the_machine, |memory| usize::try_from(memory()).unwrap_or(usize::MAX));
    (whole / 4).max(1)
});
static MEMORY: OnceLock<fn() -> u64> = OnceLock::new();

/// How many bytes of memory this process may use: of whoever knows control groups. Asked once, when something is submitted.
pub fn memory_is(said_by: fn() -> u64) {
    let _ = MEMORY.set(said_by);
}

fn of_the_machine() -> usize {
    let info = rustix::system::sysinfo();
    usize::try_from(info.totalram).unwrap_or(usize::MAX).saturating_mul(info.mem_unit.max(1) as usize)
}

/// What one takes beside its arguments, or with small ones.
const EACH: usize = 750;
/// A thread looks after so many submissions, or so many bytes of arguments.
const LOOK_AT_MOST: usize = 1_024;
const LOOK_BYTES: usize = 16 << 20;
/// How long a thread pauses at most, at the limit; at twice as much, twice as long.
const PAUSE: Duration = Duration::from_secs(1);
/// How soon it is looked again meanwhile, and how often later: counting what waits holds up who works on it.
const LOOK_AGAIN: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(20));
/// A pause is said again when there was none for so long.
const SAY_AGAIN: Duration = Duration::from_secs(60);

thread_local! {
    /// What this thread has submitted since it looked last, and how many bytes of arguments that had.
    static SINCE: Cell<(usize, usize)> = const { Cell::new((0, 0)) };
}

/// After how many submissions a thread looks.
fn look_after(limit: usize) -> usize {
    (limit / 8).clamp(1, LOOK_AT_MOST)
}

/// How many times the limit waits, with so many bytes of arguments.
fn excess(pending: usize, bytes: usize, limit: usize, bytes_limit: usize) -> f64 {
    let bytes = pending.saturating_mul(EACH).saturating_add(bytes);
    (pending as f64 / limit as f64).max(bytes as f64 / bytes_limit as f64)
}

impl Session {
    /// Something with these arguments is about to be submitted. What is returned goes with it.
    pub(super) fn submits(&self, args: &[Outbound]) -> ArgumentBytes {
        let arguments = ArgumentBytes::of(args);
        let (count, bytes) = SINCE.get();
        let (count, bytes) = (count + 1, bytes + arguments.bytes());
        SINCE.set((count, bytes));
        if count >= LOOK_AT_MOST || bytes >= LOOK_BYTES || count >= look_after(*LIMIT) {
            SINCE.set((0, 0));
            self.pause_if_too_much_waits();
        }
        arguments
    }

    #[cold]
    fn pause_if_too_much_waits(&self) {
        let (began, mut pause) = (Instant::now(), LOOK_AGAIN.0);
        loop {
            let pending = self.owner().submission.pending();
            let excess = excess(pending, argument_bytes::waiting(), *LIMIT, *BYTES_LIMIT);
            if excess < 1.0 || began.elapsed() >= PAUSE.mul_f64(excess.min(60.0)) || self.process().ended().is_some() {
                return;
            }
            if is_news(&mut LAST.lock(), Instant::now()) {
                say(pending);
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(LOOK_AGAIN.1);
        }
    }
}

/// When a thread paused last.
static LAST: Mutex<Option<Instant>> = Mutex::new(None);

/// Whether a pause is said, after that one.
fn is_news(last: &mut Option<Instant>, now: Instant) -> bool {
    let before = last.replace(now);
    before.is_none_or(|before| now.saturating_duration_since(before) >= SAY_AGAIN)
}

fn say(pending: usize) {
    tracing::warn!(
        "{pending} tasks and calls of this process wait, and their arguments take memory: it submits more slowly now. Wait for results while \
         you submit"
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn too_much_is_too_many_or_too_large() {
        let of = |pending, bytes| excess(pending, bytes, 1_000, 1 << 30);
        assert!(of(999, 0) < 1.0 && of(1_000, 0) >= 1.0);
        assert!(of(10, 1_000 << 20) < 1.0 && of(11, 1_100 << 20) >= 1.0);
        assert!(of(2_000, 0) >= 2.0);
        assert!(of(usize::MAX, usize::MAX).is_finite());
    }

    #[test]
    fn a_pause_is_said_once_and_again_when_there_was_none_for_a_minute() {
        let (mut last, begun) = (None, Instant::now());
        let at = |seconds| begun + Duration::from_secs(seconds);
        assert!(is_news(&mut last, at(0)) && !is_news(&mut last, at(40)) && !is_news(&mut last, at(80)));
        assert!(is_news(&mut last, at(140)));
    }

    #[test]
    fn a_small_limit_is_looked_at_before_it_is_passed() {
        assert_eq!((look_after(1), look_after(80), look_after(1_000_000)), (1, 10, LOOK_AT_MOST));
    }
}
