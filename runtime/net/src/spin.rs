//! Waiting awake for a moment, where that is quicker than to sleep.
//!
//! To wake an idle core costs 25 to 60 µs, which is more than everything else that happens to a small task; but on a busy machine, who waits
//! awake is in the way of whoever makes what it waits for. So each connection finds out which is quicker on it (`Habit`): whoever
//! reads from it looks for the next message before it sleeps, but only
//! - on connections that carry tasks and calls,
//! - after messages in quick succession,
//! - while that brings messages sooner than sleeping does, as measured on the same connection a moment ago,
//! - while no task or call runs in the process, which needs the core more (of a driver's own threads nobody knows),
//! - giving way to whatever else can run on the core, and never on a machine with one,
//! - and not at all with `WINGBEAT_WAIT_AWAKE=no`.

use std::sync::LazyLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// Messages that are further apart are not waited for awake: one wake-up more or less does not matter to them.
const LONG: Duration = Duration::from_millis(1);
/// It is looked no shorter than this: many messages come sooner, and now and then one needs a little longer.
const SHORT: Duration = Duration::from_micros(100);
/// A thread polls its socket only after this many messages in quick succession, as in a ping-pong. Among tasks of mixed lengths,
/// a polling thread would take the core from user code.
const STREAK: u32 = 16;
/// So many after a miss among many that came.
const SHORT_STREAK: u32 = 4;
/// As many after trials that were in vain.
const LONGEST_STREAK: u32 = 4_096;
/// So many messages are waited for awake before it is compared.
const TRIAL: u32 = 32;
/// After so many, some are waited for asleep again, to compare with.
const COMPARED_AFTER: u32 = 4_096;
/// Waiting awake takes a core: it must take less of the time than this.
const WORTH: f64 = 0.9;

/// Threads that run user code.
static WORKING: AtomicUsize = AtomicUsize::new(0);

/// Whether it is ever worth it.
static MAY: LazyLock<bool> = LazyLock::new(|| {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    cores > 1 && !std::env::var("WINGBEAT_WAIT_AWAKE").is_ok_and(|said| said.trim() == "no")
});

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

/// How one connection waits.
#[derive(Debug, Default)]
pub(crate) struct Spin {
    habit: Mutex<Habit>,
}

impl Spin {
    /// Calls `look` until it has found something, while that is worth it.
    pub(crate) async fn look<T>(&self, mut look: impl FnMut() -> Option<T>) -> Option<T> {
        let window = self.habit.lock().window()?;
        let begun = Instant::now();
        loop {
            let waited = begun.elapsed();
            if waited >= window || WORKING.load(Ordering::Relaxed) > 0 {
                self.habit.lock().missed();
                return None;
            }
            if let Some(found) = look() {
                self.habit.lock().found(waited);
                return Some(found);
            }
            std::thread::yield_now();
            tokio::task::yield_now().await;
        }
    }

    /// Something came, after so long a sleep.
    pub(crate) fn slept(&self, time: Duration) {
        if *MAY {
            self.habit.lock().slept(time);
        }
    }
}

/// Which way of waiting is quicker on a connection, as its own messages show.
#[derive(Debug)]
struct Habit {
    /// Seconds until the next message came, while it was waited for asleep; the latest count most.
    asleep: f64,
    /// The same of the messages of this trial, while it was waited for awake.
    awake: f64,
    /// Messages in quick succession that were waited for asleep; when awake, all that were waited for so.
    count: u32,
    /// So many in quick succession are waited for asleep before it is tried awake.
    needed: u32,
    is_awake: bool,
}

impl Default for Habit {
    fn default() -> Self {
        Habit { asleep: 0.0, awake: 0.0, count: 0, needed: STREAK, is_awake: false }
    }
}

impl Habit {
    /// How long to look before sleeping, if at all.
    fn window(&self) -> Option<Duration> {
        self.is_awake.then(|| Duration::from_secs_f64(2.0 * self.asleep).clamp(SHORT, LONG))
    }

    fn slept(&mut self, time: Duration) {
        if self.is_awake {
            return;
        }
        if time >= LONG {
            self.count = 0;
            return;
        }
        self.asleep = mean(self.asleep, time, self.count.min(7));
        self.count += 1;
        if self.count >= self.needed {
            (self.is_awake, self.count) = (true, 0);
        }
    }

    fn found(&mut self, time: Duration) {
        self.awake = mean(self.awake, time, self.count.min(TRIAL - 1));
        self.count += 1;
        if !self.count.is_multiple_of(TRIAL) {
            return;
        }
        if self.awake > WORTH * self.asleep {
            self.sleeps_for(2 * self.needed);
        } else if self.count >= COMPARED_AFTER {
            self.sleeps_for(STREAK);
        } else {
            self.needed = STREAK;
        }
    }

    fn missed(&mut self) {
        // Where it has been worth it, one miss says little: another program had the core for a moment.
        let needed = if self.count >= TRIAL { SHORT_STREAK } else { 2 * self.needed };
        self.sleeps_for(needed);
    }

    fn sleeps_for(&mut self, messages: u32) {
        (self.is_awake, self.count) = (false, 0);
        self.needed = messages.min(LONGEST_STREAK);
    }
}

/// The mean of as many values as were `before`, and another.
fn mean(of: f64, with: Duration, before: u32) -> f64 {
    of + (with.as_secs_f64() - of) / f64::from(before + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: u32 = 100_000;

    /// How many of [`ALL`] messages are waited for awake that come after so many microseconds, if they are.
    fn awake(asleep: u64, awake: u64) -> u32 {
        let mut habit = Habit::default();
        (0..ALL)
            .filter(|_| match habit.window() {
                Some(window) if Duration::from_micros(awake) < window => {
                    habit.found(Duration::from_micros(awake));
                    true
                }
                Some(_) => {
                    habit.missed();
                    true
                }
                None => {
                    habit.slept(Duration::from_micros(asleep));
                    false
                }
            })
            .count() as u32
    }

    #[test]
    fn the_quicker_way_is_found_on_slow_machines_and_on_fast_ones() {
        for (fast, slow) in [(10, 25), (40, 80), (300, 600)] {
            assert!(awake(slow, fast) > ALL / 100 * 98, "{fast} µs awake, {slow} µs asleep");
            assert!(awake(fast, slow) < ALL / 100 * 2, "{slow} µs awake, {fast} µs asleep");
        }
    }

    #[test]
    fn what_takes_long_is_never_waited_for_awake() {
        assert_eq!(awake(1_000, 900), 0);
        // Nor what comes quickly by chance, now and then.
        let mut habit = Habit::default();
        for number in 0..10_000u64 {
            habit.slept(Duration::from_micros(if number % 10 == 9 { 5_000 } else { 50 }));
            assert_eq!(habit.window(), None);
        }
    }

    #[test]
    fn it_is_looked_in_vain_ever_more_seldom() {
        // Sixteen come quickly, and the next does not.
        let mut habit = Habit::default();
        let mut looked = 0;
        for _ in 0..10_000 {
            for _ in 0..20 {
                if habit.window().is_some() {
                    looked += 1;
                    habit.missed();
                } else {
                    habit.slept(Duration::from_micros(50));
                }
            }
            habit.slept(Duration::from_millis(10));
        }
        assert_eq!(looked, 1);
    }

    #[test]
    fn when_the_machine_changes_its_mood_so_does_the_connection() {
        let mut habit = Habit::default();
        let mut waits = |asleep: u64, awake: u64| {
            let ways: Vec<bool> = (0..20_000)
                .map(|_| {
                    let is_awake = habit.window().is_some();
                    match is_awake {
                        true => habit.found(Duration::from_micros(awake)),
                        false => habit.slept(Duration::from_micros(asleep)),
                    }
                    is_awake
                })
                .collect();
            ways[10_000..].iter().filter(|is_awake| **is_awake).count()
        };
        assert!(waits(60, 30) > 9_500);
        assert!(waits(30, 60) < 500);
        assert!(waits(60, 30) > 9_500);
    }
}
