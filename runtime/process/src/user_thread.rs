//! A thread for user code that the runtime has to run on behalf of nobody's task: `retry_if` is asked there, and what such functions have
//! captured is dropped there.

use std::collections::VecDeque;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, LazyLock};
use std::thread::Builder;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};

pub(crate) type Code = Box<dyn FnOnce() + Send>;

/// Code that has run for so long while more waits keeps its thread, and the rest goes on with another. It should answer at once.
const LIMIT: Duration = Duration::from_secs(10);
/// So many threads may be kept in this way. Then what waits goes on waiting, until one of them is done.
const KEPT: usize = 16;

/// Runs user code: one piece after another, on one thread, however much there is. The thread begins with the first and ends when this
/// is dropped, after what was given until then. A piece that does not end holds up the others for a while only.
pub(crate) struct UserThread {
    shared: Arc<Shared>,
}

struct Shared {
    name: &'static str,
    limit: Duration,
    state: Mutex<State>,
    /// Told of all that a thread may wait for.
    changed: Condvar,
}

/// Bounded by who gives it something to run: tasks that have failed and wait for an answer, and predicates that are dropped.
#[derive(Default)]
struct State {
    waiting: VecDeque<Code>,
    /// The number of the thread whose turn it is. Others run one piece that takes too long.
    turn: usize,
    /// Whether there is such a thread.
    has_thread: bool,
    /// Since when that one runs what it runs.
    busy_since: Option<Instant>,
    /// Whether there is a thread that takes its place if that takes too long.
    has_watcher: bool,
    /// Threads that run a piece that takes too long.
    kept: usize,
    is_closed: bool,
}

/// Drops what user code has made, on a thread that the whole process has for that, and keeps as long as it lives.
pub(crate) fn drop_there(what: impl Send + 'static) {
    static DROPPER: LazyLock<UserThread> = LazyLock::new(|| UserThread::new("wingbeat-drop"));
    // Better kept than dropped here.
    if let Err((_, code)) = DROPPER.run(Box::new(move || drop(what))) {
        std::mem::forget(code);
    }
}

impl UserThread {
    pub(crate) fn new(name: &'static str) -> UserThread {
        UserThread::with_limit(name, LIMIT)
    }

    fn with_limit(name: &'static str, limit: Duration) -> UserThread {
        let shared = Shared { name, limit, state: Mutex::default(), changed: Condvar::new() };
        UserThread { shared: Arc::new(shared) }
    }

    /// Runs this after all that was given before.
    ///
    /// # Errors
    /// No thread can be started: gives the code back.
    pub(crate) fn run(&self, code: Code) -> Result<(), (io::Error, Code)> {
        let mut state = self.shared.state.lock();
        if !state.has_thread {
            let turn = state.turn;
            if let Err(error) = self.shared.start(move |shared| shared.work(turn)) {
                drop(state);
                return Err((error, code));
            }
            state.has_thread = true;
        }
        state.waiting.push_back(code);
        self.shared.watch(&mut state);
        self.shared.changed.notify_all();
        Ok(())
    }
}

impl Drop for UserThread {
    fn drop(&mut self) {
        self.shared.state.lock().is_closed = true;
        self.shared.changed.notify_all();
    }
}

impl Shared {
    fn start(self: &Arc<Shared>, work: impl FnOnce(Arc<Shared>) + Send + 'static) -> io::Result<()> {
        let shared = self.clone();
        Builder::new().name(self.name.into()).spawn(move || work(shared)).map(drop)
    }

    /// Has somebody look after the thread whose turn it is, if others wait for it.
    fn watch(self: &Arc<Shared>, state: &mut State) {
        if state.busy_since.is_none() || state.waiting.is_empty() || state.has_watcher {
            return;
        }
        match self.start(|shared| shared.look()) {
            Ok(()) => state.has_watcher = true,
            // The next piece tries again.
            Err(error) => tracing::warn!(%error, "no thread can be started that looks after user code"),
        }
    }

    /// What the thread of this number does.
    fn work(self: Arc<Shared>, number: usize) {
        let mut state = self.state.lock();
        while state.turn == number {
            let Some(code) = state.waiting.pop_front() else {
                if state.is_closed {
                    state.has_thread = false;
                    break;
                }
                self.changed.wait(&mut state);
                continue;
            };
            state.busy_since = Some(Instant::now());
            self.watch(&mut state);
            self.changed.notify_all();
            MutexGuard::unlocked(&mut state, || {
                // What was panicked with may panic, too.
                catch_unwind(AssertUnwindSafe(code)).unwrap_or_else(std::mem::forget);
            });
            match state.turn == number {
                true => state.busy_since = None,
                false => state.kept -= 1,
            }
        }
        self.changed.notify_all();
    }

    /// Waits until what runs takes too long while something waits for it, and goes on in the place of its thread.
    fn look(self: Arc<Shared>) {
        let mut state = self.state.lock();
        let number = loop {
            if !state.has_thread {
                state.has_watcher = false;
                return;
            }
            let since = state.busy_since.filter(|_| !state.waiting.is_empty() && state.kept < KEPT);
            match since.map(|since| since + self.limit) {
                Some(due) if due <= Instant::now() => {
                    (state.turn, state.kept) = (state.turn + 1, state.kept + 1);
                    (state.busy_since, state.has_watcher) = (None, false);
                    break state.turn;
                }
                Some(due) => drop(self.changed.wait_until(&mut state, due)),
                None => self.changed.wait(&mut state),
            }
        };
        let kept = state.kept;
        drop(state);
        let more =
            if kept < KEPT { "" } else { "; no further one is started, and what is next waits if it hangs, too" };
        tracing::warn!(
            "the user code of a `retry_if`, or the drop of what one has captured, has run for {:?} and keeps its thread ({kept} of \
             {KEPT}): the rest goes on without it{more}",
            self.limit,
        );
        self.work(number);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::thread::{ThreadId, current};

    use super::*;

    fn run(thread: &UserThread, code: impl FnOnce() + Send + 'static) {
        assert!(thread.run(Box::new(code)).is_ok());
    }

    #[test]
    fn what_is_given_runs_in_order_on_one_thread_that_ends_with_this() {
        let (thread, (ran, runs)) = (UserThread::new("test"), channel());
        run(&thread, || panic!("it takes nothing along"));
        for number in 0..1_000 {
            let ran = ran.clone();
            run(&thread, move || ran.send((number, current().id())).unwrap());
        }
        drop((thread, ran));
        let runs: Vec<(i32, ThreadId)> = runs.iter().collect();
        assert!(runs.iter().map(|(number, _)| *number).eq(0..1_000));
        assert!(runs.iter().all(|(_, thread)| *thread == runs[0].1));
    }

    #[test]
    fn code_that_hangs_holds_nothing_up_for_ever() {
        let thread = UserThread::with_limit("test", Duration::ZERO);
        let ((release, released), (ran, runs)) = (channel::<()>(), channel());
        let released = Arc::new(Mutex::new(released));
        for _ in 0..KEPT {
            let (released, ran) = (released.clone(), ran.clone());
            run(&thread, move || {
                ran.send("hangs").unwrap();
                let _ = released.lock().recv();
            });
        }
        for _ in 0..KEPT {
            assert_eq!(runs.recv(), Ok("hangs"), "each has a thread");
        }
        let after = ran.clone();
        run(&thread, move || after.send("after").unwrap());
        assert_eq!(runs.recv(), Ok("after"), "and so has what comes then");
        assert_eq!(thread.shared.state.lock().kept, KEPT);
        for _ in 0..KEPT {
            release.send(()).unwrap();
        }
        // All threads end: none holds what is shared.
        let shared = Arc::downgrade(&thread.shared);
        drop((thread, ran));
        assert!(runs.recv().is_err());
        while shared.upgrade().is_some() {
            std::thread::yield_now();
        }
    }

    #[test]
    fn no_more_threads_are_kept_than_may_be_and_the_rest_waits_for_one_of_them() {
        let thread = UserThread::with_limit("test", Duration::ZERO);
        let ((release, released), (ran, runs)) = (channel::<()>(), channel());
        let released = Arc::new(Mutex::new(released));
        for _ in 0..=KEPT {
            let (released, ran) = (released.clone(), ran.clone());
            run(&thread, move || {
                ran.send("hangs").unwrap();
                let _ = released.lock().recv();
            });
        }
        for _ in 0..=KEPT {
            assert_eq!(runs.recv(), Ok("hangs"));
        }
        let after = ran.clone();
        run(&thread, move || after.send("after").unwrap());
        assert!(runs.try_recv().is_err(), "nobody could run it");
        release.send(()).unwrap();
        assert_eq!(runs.recv(), Ok("after"));
        drop(release);
    }
}
