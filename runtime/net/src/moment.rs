//! What may wait a moment for company: links whose first such message came a moment ago are woken together.
//!
//! A timer of the kernel's, since tokio's are of whole milliseconds, and to set one of those the thread that does the IO would have to be
//! woken first.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use rustix::time::{Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec};
use tokio::io::Interest;

use crate::socket::watch;

/// How long a message may wait for others. A worker process has twice as much work ahead when it is refilled, so that it does not run
/// out of work meanwhile.
pub const MOMENT: Duration = Duration::from_micros(500);

/// Something with messages that have waited long enough.
pub(crate) trait Ripens: Send + Sync {
    fn ripen(&self);
}

/// The links of a process that wait.
pub struct Moment {
    timer: OwnedFd,
    waiting: Mutex<Vec<Arc<dyn Ripens>>>,
    /// Nobody hears the timer: nothing waits.
    is_broken: AtomicBool,
}

impl Moment {
    /// # Errors
    /// The system has no descriptor for it.
    pub fn new() -> io::Result<Moment> {
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        let timer = rustix::time::timerfd_create(TimerfdClockId::Monotonic, flags)?;
        Ok(Moment { timer, waiting: Mutex::default(), is_broken: AtomicBool::new(false) })
    }

    /// From now on it waits.
    pub(crate) fn add(&self, link: Arc<dyn Ripens>) {
        let mut waiting = self.waiting.lock();
        if self.is_broken.load(Ordering::Relaxed) {
            return link.ripen();
        }
        waiting.push(link);
        if waiting.len() == 1 {
            let once = Timespec { tv_sec: 0, tv_nsec: 0 };
            let after = Timespec { tv_sec: 0, tv_nsec: MOMENT.as_nanos() as i64 };
            let set = Itimerspec { it_interval: once, it_value: after };
            if rustix::time::timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &set).is_err() {
                Self::ripen(std::mem::take(&mut waiting));
            }
        }
    }

    fn ripen(links: Vec<Arc<dyn Ripens>>) {
        links.iter().for_each(|link| link.ripen());
    }

    /// Wakes those that wait. Must run on the thread that does the IO. Where the timer cannot be heard, nothing waits from then on.
    pub async fn run(&self) {
        if let Err(error) = self.hear().await {
            tracing::warn!(%error, "results do not wait for others: their timer cannot be heard");
        }
        let waiting = {
            let mut waiting = self.waiting.lock();
            self.is_broken.store(true, Ordering::Relaxed);
            std::mem::take(&mut *waiting)
        };
        Self::ripen(waiting);
    }

    async fn hear(&self) -> io::Result<()> {
        let timer = watch(self.timer.try_clone()?, Interest::READABLE)?;
        loop {
            let mut ready = timer.readable().await?;
            let expired = rustix::io::read(timer.get_ref(), &mut [0u8; 8]);
            ready.clear_ready();
            if expired.is_ok() {
                let waiting = std::mem::take(&mut *self.waiting.lock());
                Self::ripen(waiting);
            }
        }
    }
}
