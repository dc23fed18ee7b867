//! A process that submits faster than the cluster works is slowed: what waits would fill its memory.
//!
//! The thread that submits looks now and then how much waits, and pauses while that is too much, for a limited time: nothing is refused,
//! and a program that submits all it has before it does what its tasks wait for goes on, slowly.

use std::cell::Cell;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::owner::outbound::{Content, Outbound};
use crate::session::session::Session;

/// So many tasks and calls may wait in a process: 1,000,000, `WINGBEAT_PENDING`.
static LIMIT: LazyLock<usize> = LazyLock::new(|| {
    let said = std::env::var("WINGBEAT_PENDING").ok().and_then(|text| text.trim().parse().ok());
    said.filter(|limit| *limit > 0).unwrap_or(1_000_000)
});
/// So much memory they may take: a quarter of the machine's.
static BYTES_LIMIT: LazyLock<usize> = LazyLock::new(|| {
    let (pages, page) = (rustix::param::page_size(), rustix::system::sysinfo());
    let whole = usize::try_from(page.totalram).unwrap_or(usize::MAX).saturating_mul(page.mem_unit.max(1) as usize);
    (whole / 4).max(pages)
});
/// What one takes beside its arguments.
const EACH: usize = 750;
/// A thread looks after so many submissions, or so many bytes of arguments.
const LOOK_AT_MOST: usize = 1_024;
const LOOK_BYTES: usize = 16 << 20;
/// How long a thread pauses at most, at the limit; at twice as much, twice as long.
const PAUSE: Duration = Duration::from_secs(1);
/// How often it is looked meanwhile.
const LOOK_AGAIN: Duration = Duration::from_millis(1);

thread_local! {
    /// What this thread has submitted since it looked last, and how many bytes of arguments that had.
    static SINCE: Cell<(usize, usize)> = const { Cell::new((0, 0)) };
}

/// After how many submissions a thread looks.
fn look_after(limit: usize) -> usize {
    (limit / 8).clamp(1, LOOK_AT_MOST)
}

/// How many times the limit waits, where each has so many bytes of arguments.
fn excess(pending: usize, bytes_each: usize, limit: usize, bytes_limit: usize) -> f64 {
    let bytes = pending.saturating_mul(bytes_each.saturating_add(EACH));
    (pending as f64 / limit as f64).max(bytes as f64 / bytes_limit as f64)
}

/// The inline bytes of these arguments.
fn bytes_of(args: &[Outbound]) -> usize {
    let inline = args.iter().map(|arg| match arg {
        Outbound::Value(packed) => match &packed.content {
            Content::Inline(bytes) => bytes.len(),
            Content::Stored(_) => 0,
        },
        Outbound::Object(_) => 0,
    });
    inline.sum()
}

impl Session {
    /// Something with these arguments is about to be submitted.
    pub(super) fn submits(&self, args: &[Outbound]) {
        let (count, bytes) = SINCE.get();
        let (count, bytes) = (count + 1, bytes + bytes_of(args));
        SINCE.set((count, bytes));
        if count >= LOOK_AT_MOST || bytes >= LOOK_BYTES || count >= look_after(*LIMIT) {
            SINCE.set((0, 0));
            self.pause_if_too_much_waits(bytes / count);
        }
    }

    #[cold]
    fn pause_if_too_much_waits(&self, bytes_each: usize) {
        let began = Instant::now();
        loop {
            let pending = self.owner().submission.pending();
            let excess = excess(pending, bytes_each, *LIMIT, *BYTES_LIMIT);
            if excess < 1.0 || began.elapsed() >= PAUSE.mul_f64(excess.min(60.0)) || self.process().ended().is_some() {
                return;
            }
            say_once(pending);
            std::thread::sleep(LOOK_AGAIN);
        }
    }
}

fn say_once(pending: usize) {
    static WAS_SAID: AtomicBool = AtomicBool::new(false);
    if !WAS_SAID.swap(true, Ordering::Relaxed) {
        tracing::warn!(
            "{pending} tasks and calls of this process wait, and their arguments take memory: it submits more slowly now. Wait for \
             results while you submit"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn too_much_is_too_many_or_too_large() {
        let of = |pending, bytes_each| excess(pending, bytes_each, 1_000, 1 << 30);
        assert!(of(999, 0) < 1.0 && of(1_000, 0) >= 1.0);
        assert!(of(10, 100 << 20) < 1.0 && of(11, 100 << 20) >= 1.0);
        assert!(of(2_000, 0) >= 2.0);
        assert!(of(usize::MAX, usize::MAX).is_finite());
    }

    #[test]
    fn a_small_limit_is_looked_at_before_it_is_passed() {
        assert_eq!((look_after(1), look_after(80), look_after(1_000_000)), (1, 10, LOOK_AT_MOST));
    }
}
