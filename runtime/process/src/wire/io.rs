//! The thread on which everything of a process happens but user code, and who does its work for it.
//!
//! A thread that only waits for one thing may do the IO meanwhile ([`Io::drive`]): what comes is taken in where it is waited
//! for, and no other thread has to be woken for it, nor for what the thread has said before. When it goes on, nobody does the IO for
//! a moment, since the same thread mostly waits again at once. The IO thread stands by, and takes over when nobody is
//! back after one to two times [`GRACE`], or when somebody cannot wait for that ([`Io::attend`]).
//!
//! ```text
//!            drive: may I?        the IO thread lets go       done
//!      Own ───────────────▶ Asked ───────────────▶ Driven ◀────────▶ Free
//!       ▲ ▲                   │ done before          ▲     drive      │
//!       │ └───────────────────┘                      └────────────────┤
//!       └─────────────────────── the grace is over, or it is needed ──┘
//! ```

use std::cell::Cell;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::Poll;
use std::thread::Thread;
use std::time::{Duration, Instant};

use futures::task::AtomicWaker;
use parking_lot::{Mutex, RwLock};
use tokio::runtime::{Handle, Runtime};
use tokio::sync::Notify;
use wingbeat_core::error::Error;

/// How long nobody does the IO after the thread that did it has gone on; up to twice as long, since the IO thread may just have looked.
const GRACE: Duration = Duration::from_micros(500);
/// How often the IO thread looks at a thread that waits, before it sleeps for as long as that does.
const LOOKS: u32 = 8;
/// Who comes back too late each time asks again only after so many waits.
const MOST_SKIPPED: u32 = 256;
/// Every so often the IO thread goes on at once, with what has come for others.
const CATCHES_UP: u32 = 1_024;
/// At the end: connections that still have something to write get a moment, and no more.
const LAST_WORDS: Duration = Duration::from_millis(100);
/// At the end: how long a thread that does the IO may take to let go. It is told, and does no work of users then.
const LETS_GO: Duration = Duration::from_secs(2);

/// Who does the IO. See the picture above.
mod turn {
    pub(super) const OWN: u8 = 0;
    pub(super) const ASKED: u8 = 1;
    pub(super) const DRIVEN: u8 = 2;
    pub(super) const FREE: u8 = 3;
}

thread_local! {
    /// Whether this thread does the IO of some process.
    static DRIVES: Cell<bool> = const { Cell::new(false) };
}

/// A process's private tokio runtime, on a thread of its own.
pub struct Io {
    shared: Arc<Shared>,
    handle: Handle,
    thread: Mutex<Option<std::thread::JoinHandle<()>>>,
    started: Instant,
}

/// What the IO thread shares with threads that may do the IO in its place. Most of its many fields are set by one and read by the other, without
/// a lock.
struct Shared {
    /// Until the end.
    runtime: RwLock<Option<Runtime>>,
    turn: AtomicU8,
    /// How often a thread that did the IO has gone on.
    left: AtomicU32,
    /// Somebody waits for the IO besides who does it: it may not rest.
    is_crowded: AtomicBool,
    /// Somebody waits for the IO, which rests.
    is_needed: AtomicBool,
    /// Whether the IO thread sleeps until it is woken.
    is_asleep: AtomicBool,
    is_stopping: AtomicBool,
    /// The IO thread, once it runs.
    own: OnceLock<Thread>,
    /// The process. A forked child has its sockets and must leave them alone.
    pid: rustix::process::Pid,
    /// Has the IO thread look whether it is to let go.
    let_go: Notify,
    /// Has the thread that does the IO look whether it is to end that.
    driver: AtomicWaker,
    /// Waits for which the IO thread is not asked to let go.
    skipped: AtomicU32,
    /// As many were skipped the last time.
    skips: AtomicU32,
}

impl Io {
    /// Starts the thread.
    ///
    /// # Errors
    /// When the system has no thread or descriptor left.
    pub fn start() -> Result<Io, Error> {
        wingbeat_net::descriptors::raise_limit();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|error| Error::io("starting the IO runtime", &error))?;
        let handle = runtime.handle().clone();
        let shared = Arc::new(Shared {
            runtime: RwLock::new(Some(runtime)),
            turn: AtomicU8::new(turn::OWN),
            left: AtomicU32::new(0),
            is_crowded: AtomicBool::new(false),
            is_needed: AtomicBool::new(false),
            is_asleep: AtomicBool::new(false),
            is_stopping: AtomicBool::new(false),
            own: OnceLock::new(),
            pid: rustix::process::getpid(),
            let_go: Notify::new(),
            driver: AtomicWaker::new(),
            skipped: AtomicU32::new(0),
            skips: AtomicU32::new(0),
        });
        let own = shared.clone();
        let thread = std::thread::Builder::new()
            .name("wingbeat-io".into())
            .spawn(move || own.run())
            .map_err(|error| Error::io("starting the IO thread", &error))?;
        Ok(Io { shared, handle, thread: Mutex::new(Some(thread)), started: Instant::now() })
    }

    /// The runtime.
    pub fn handle(&self) -> &Handle {
        &self.handle
    }

    /// Milliseconds since it was started.
    pub(super) fn now_ms(&self) -> u64 {
        self.started.elapsed().as_millis() as u64
    }

    /// Runs `future` on the IO thread and waits for it, blocking this thread.
    pub fn run<F>(&self, future: F) -> Option<F::Output>
    where
        F: Future + Send + 'static,
        F::Output: Send + 'static,
    {
        let (send, receive) = std::sync::mpsc::sync_channel(1);
        self.handle.spawn(async move {
            let _ = send.send(future.await);
        });
        self.attend();
        receive.recv().ok()
    }

    /// Waits for `future`, and does the IO meanwhile. None if somebody else does it, or is to: then `future` goes on wherever it is polled.
    /// It is polled inside of the runtime, and must contain no user code; the thread must not poll for any other runtime.
    pub(crate) fn drive<F: Future>(&self, future: Pin<&mut F>) -> Option<F::Output> {
        let shared = &*self.shared;
        if rustix::process::getpid() != shared.pid || !shared.takes_turn() {
            return None;
        }
        let before = DRIVES.replace(true);
        let left = Left { shared, before };
        let runtime = shared.runtime.read();
        let done = runtime.as_ref().and_then(|runtime| shared.wait_inside(runtime, future));
        drop(runtime);
        drop(left);
        done
    }

    /// Somebody waits for the IO, or has something to say that cannot wait: it does not rest now.
    pub(crate) fn attend(&self) {
        match self.shared.turn.load(Ordering::SeqCst) {
            turn::FREE => {
                self.shared.is_needed.store(true, Ordering::SeqCst);
                self.shared.wake_own();
            }
            turn::DRIVEN | turn::ASKED if !DRIVES.get() => self.shared.is_crowded.store(true, Ordering::SeqCst),
            _ => {}
        }
    }

    /// Whether nobody does the IO now, for a moment.
    pub(crate) fn rests(&self) -> bool {
        self.shared.turn.load(Ordering::Relaxed) == turn::FREE
    }

    /// Ends the thread and waits for it, unless this is it.
    pub fn stop(&self) {
        self.shared.stop();
        let thread = self.thread.lock().take();
        let is_io = Handle::try_current().is_ok_and(|current| current.id() == self.handle.id());
        if let Some(thread) = thread
            && !is_io
        {
            // A panic there was printed there.
            let _ = thread.join();
        }
    }
}

impl Drop for Io {
    fn drop(&mut self) {
        self.shared.stop();
    }
}

/// Whether this thread does the IO of some process now, so that nobody else does it. May be asked in a signal handler.
pub fn does_io() -> bool {
    DRIVES.get()
}

impl Shared {
    /// The IO thread.
    fn run(&self) {
        let _ = self.own.set(std::thread::current());
        while !self.is_stopping() {
            self.tend();
            self.stand_by();
        }
        self.driver.wake();
        let runtime = self.runtime.try_write_for(LETS_GO).and_then(|mut runtime| runtime.take());
        if let Some(runtime) = runtime {
            runtime.shutdown_timeout(LAST_WORDS);
        }
    }

    fn stop(&self) {
        self.is_stopping.store(true, Ordering::SeqCst);
        self.driver.wake();
        self.let_go.notify_one();
        self.wake_own();
    }

    /// Does the IO until another thread is to do it.
    fn tend(&self) {
        let runtime = self.runtime.read();
        let Some(runtime) = &*runtime else { return };
        runtime.block_on(async {
            while !self.is_stopping() && !self.turns(turn::ASKED, turn::DRIVEN) {
                self.let_go.notified().await;
            }
        });
    }

    /// Waits until nobody else does the IO any more.
    fn stand_by(&self) {
        let (mut seen, mut looks) = (self.left.load(Ordering::SeqCst), 0);
        while !self.is_stopping() {
            if self.turn.load(Ordering::SeqCst) == turn::FREE {
                let left = self.left.load(Ordering::SeqCst);
                if !self.is_needed.swap(false, Ordering::SeqCst) {
                    std::thread::park_timeout(GRACE);
                }
                if self.left.load(Ordering::SeqCst) == left && self.turns(turn::FREE, turn::OWN) {
                    return;
                }
                continue;
            }
            let left = self.left.load(Ordering::SeqCst);
            looks = if left == seen { looks + 1 } else { 0 };
            seen = left;
            if looks < LOOKS {
                std::thread::park_timeout(GRACE);
                continue;
            }
            self.is_asleep.store(true, Ordering::SeqCst);
            if self.turn.load(Ordering::SeqCst) == turn::DRIVEN && !self.is_stopping() {
                std::thread::park();
            }
            self.is_asleep.store(false, Ordering::SeqCst);
        }
    }

    /// Whether this thread may wait inside: it does the IO, or will when the IO thread lets go.
    fn takes_turn(&self) -> bool {
        loop {
            match self.turn.compare_exchange(turn::FREE, turn::DRIVEN, Ordering::SeqCst, Ordering::SeqCst) {
                Ok(_) => {
                    self.skips.store(0, Ordering::Relaxed);
                    self.skipped.store(0, Ordering::Relaxed);
                    return true;
                }
                Err(turn::OWN) => {
                    let skipped = self.skipped.load(Ordering::Relaxed);
                    if skipped > 0 {
                        self.skipped.store(skipped - 1, Ordering::Relaxed);
                        return false;
                    }
                    if self.turns(turn::OWN, turn::ASKED) {
                        let skips = (2 * self.skips.load(Ordering::Relaxed)).clamp(1, MOST_SKIPPED);
                        self.skips.store(skips, Ordering::Relaxed);
                        self.skipped.store(skips, Ordering::Relaxed);
                        self.let_go.notify_one();
                        return true;
                    }
                }
                Err(_) => {
                    self.is_crowded.store(true, Ordering::SeqCst);
                    return false;
                }
            }
        }
    }

    fn wait_inside<F: Future>(&self, runtime: &Runtime, mut future: Pin<&mut F>) -> Option<F::Output> {
        runtime.block_on(std::future::poll_fn(|cx| {
            self.driver.register(cx.waker());
            match self.is_stopping() {
                true => Poll::Ready(None),
                false => future.as_mut().poll(cx).map(Some),
            }
        }))
    }

    fn turns(&self, from: u8, to: u8) -> bool {
        self.turn.compare_exchange(from, to, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }

    fn is_stopping(&self) -> bool {
        self.is_stopping.load(Ordering::SeqCst)
    }

    fn wake_own(&self) {
        if let Some(own) = self.own.get() {
            own.unpark();
        }
    }
}

/// A thread that did the IO goes on when this is dropped.
struct Left<'a> {
    shared: &'a Shared,
    /// Whether it does the IO of another process, too.
    before: bool,
}

impl Drop for Left<'_> {
    fn drop(&mut self) {
        let shared = self.shared;
        DRIVES.set(self.before);
        let left = shared.left.fetch_add(1, Ordering::SeqCst);
        // The IO thread may let go in this moment.
        while !shared.turns(turn::ASKED, turn::OWN) {
            if shared.turns(turn::DRIVEN, turn::FREE) {
                if shared.is_crowded.swap(false, Ordering::SeqCst) || left.is_multiple_of(CATCHES_UP) {
                    shared.is_needed.store(true, Ordering::SeqCst);
                    shared.wake_own();
                } else if shared.is_asleep.load(Ordering::SeqCst) {
                    shared.wake_own();
                }
                return;
            }
        }
    }
}

#[cfg(test)]
#[path = "io_tests.rs"]
mod tests;
