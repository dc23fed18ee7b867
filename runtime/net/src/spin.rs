//! Waiting awake for a moment, where an answer is likely to come at once.
//!
//! Waking an idle core costs 25 to 60 µs, which is more than everything else that happens to a small task. So an IO thread
//! looks for the next message for `WINDOW` before it sleeps, but only
//! - on connections that carry tasks and calls,
//! - after `STREAK` messages in quick succession: one miss, and it sleeps until there have been as many again,
//! - while no user code runs in the process, which needs the core more,
//! - giving way to whatever else can run on the core, and never on a machine with one.

use std::sync::LazyLock;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// How long to look.
const WINDOW: Duration = Duration::from_micros(100);
/// Messages that are no further apart come in quick succession. More than the window, since whoever sleeps is woken late.
const QUICK: Duration = Duration::from_micros(200);

/// So many messages come in quick succession where one side waits for the other, and seldom by chance: among tasks of mixed
/// lengths, a thread that looks is in the way of one that works.
const STREAK: u32 = 16;

/// Threads that run user code.
static WORKING: AtomicUsize = AtomicUsize::new(0);

static CORES: LazyLock<usize> = LazyLock::new(|| std::thread::available_parallelism().map_or(1, usize::from));

/// While it lives, a thread runs user code.
pub struct Working(());

impl Working {
    /// From now on.
    pub fn begin() -> Working {
        WORKING.fetch_add(1, Ordering::Relaxed);
        Working(())
    }
}

impl Drop for Working {
    fn drop(&mut self) {
        WORKING.fetch_sub(1, Ordering::Relaxed);
    }
}

/// While it lives, a thread that runs user code waits.
pub struct Resting(());

impl Resting {
    /// From now on. For a thread that has a [`Working`].
    pub fn begin() -> Resting {
        WORKING.fetch_sub(1, Ordering::Relaxed);
        Resting(())
    }
}

impl Drop for Resting {
    fn drop(&mut self) {
        WORKING.fetch_add(1, Ordering::Relaxed);
    }
}

/// What one connection knows of its messages' succession.
#[derive(Debug, Default)]
pub(crate) struct Spin {
    /// Messages in quick succession, up to now.
    quick: AtomicU32,
}

impl Spin {
    /// Calls `look` until it has found something, while that is worth it.
    pub(crate) async fn look<T>(&self, mut look: impl FnMut() -> Option<T>) -> Option<T> {
        if self.quick.load(Ordering::Relaxed) < STREAK {
            return None;
        }
        let begun = Instant::now();
        while begun.elapsed() < WINDOW && WORKING.load(Ordering::Relaxed) == 0 {
            if let Some(found) = look() {
                return Some(found);
            }
            std::thread::yield_now();
            tokio::task::yield_now().await;
        }
        self.quick.store(0, Ordering::Relaxed);
        None
    }

    /// Something came, after so long a sleep.
    pub(crate) fn slept(&self, time: Duration) {
        let quick = if time < QUICK && *CORES > 1 { self.quick.load(Ordering::Relaxed).saturating_add(1) } else { 0 };
        self.quick.store(quick, Ordering::Relaxed);
    }
}
