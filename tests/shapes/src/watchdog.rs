//! Ends a program that hangs or eats the machine, with the reason.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use crate::usage;

/// What a program of cells may use; more is what this guards against.
const MEMORY: u64 = 6 << 30;

/// While it lives, a thread looks whether the program goes on. A runtime that is stuck cannot see that it is.
pub struct Watchdog {
    fed: Option<Sender<String>>,
    thread: Option<std::thread::JoinHandle<()>>,
    over: Arc<AtomicBool>,
}

impl Watchdog {
    /// Ends the process when it is not fed for `limit`.
    pub fn new(limit: Duration) -> Watchdog {
        let (fed, hungry) = channel::<String>();
        let over = Arc::new(AtomicBool::new(false));
        let is_over = over.clone();
        let thread = std::thread::spawn(move || {
            let mut doing = "the start".to_owned();
            let mut since = Instant::now();
            while !is_over.load(Ordering::Acquire) {
                match hungry.recv_timeout(Duration::from_millis(100)) {
                    Ok(next) => (doing, since) = (next, Instant::now()),
                    Err(RecvTimeoutError::Disconnected) => return,
                    Err(RecvTimeoutError::Timeout) => {}
                }
                let used = usage::of(std::process::id()).unwrap_or_default().private;
                if since.elapsed() > limit || used > MEMORY {
                    eprintln!("{doing}: no end after {:.0?}, {} MiB of memory", since.elapsed(), used >> 20);
                    // Nothing is dropped from here on: the daemons of a cluster would outlive this process.
                    usage::children(std::process::id()).into_iter().for_each(usage::kill);
                    std::process::abort();
                }
            }
        });
        Watchdog { fed: Some(fed), thread: Some(thread), over }
    }

    /// Says what is done now, and that the last thing has ended.
    pub fn feed(&self, doing: impl ToString) {
        if let Some(fed) = &self.fed {
            let _ = fed.send(doing.to_string());
        }
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Release);
        self.fed = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
