//! Asynchronous executions that are under way beside each other on one thread. While one of them blocks that, the others do not go on, and the head
//! is told that they wait for it: it may wait for them.

use std::cell::RefCell;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use slab::Slab;

use crate::session::context::Execution;
use crate::session::waiting::Waiting;
use crate::wire::executor::HoldsUp;
use crate::wire::process::Process;

/// It is looked this often which threads are blocked, while any is that others need and are not told of.
const LOOKED_EVERY: Duration = Duration::from_millis(100);

/// The others are told of after so many looks. Most threads go on before, and held up nobody.
const TOLD_AFTER: u32 = 5;

thread_local! {
    /// What is under way on this thread.
    static BESIDE: RefCell<Slab<Arc<Execution>>> = const { RefCell::new(Slab::new()) };
}

/// While it lives, an execution is under way on this thread, and goes on only there.
pub struct UnderWay {
    key: usize,
    /// It is not sent to another thread.
    here: PhantomData<*const ()>,
}

impl UnderWay {
    /// It begins.
    pub fn begin(execution: &Arc<Execution>) -> UnderWay {
        let key = BESIDE.with_borrow_mut(|beside| beside.insert(execution.clone()));
        UnderWay { key, here: PhantomData }
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        // A thread that ends has none any more.
        let removed = BESIDE.try_with(|beside| beside.borrow_mut().try_remove(self.key));
        drop(removed);
    }
}

/// An execution that blocks a thread on which others are under way.
struct Blocked {
    by: Arc<Execution>,
    /// None of them begins or ends meanwhile.
    others: Vec<Arc<Execution>>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// How often it was looked at.
    looks: u32,
    /// What the others wait for, if they were told of.
    waits: Option<Vec<Waiting>>,
    /// The thread goes on.
    is_over: bool,
}

impl HoldsUp for Blocked {
    fn look(&self) -> bool {
        let mut state = self.state.lock();
        if state.is_over || state.waits.is_some() {
            return false;
        }
        state.looks += 1;
        if state.looks < TOLD_AFTER {
            return true;
        }
        // An earlier attempt that has not ended yet is none of them. It is told of all others: none of them ends meanwhile.
        let is_other = |other: &&Arc<Execution>| other.task != self.by.task && !other.is_disowned();
        let wait = |other: &Arc<Execution>| other.run(|| Waiting::for_thread(self.by.task));
        state.waits = Some(self.others.iter().filter(is_other).filter_map(wait).collect());
        false
    }

    fn is_looked_at(&self) -> bool {
        let state = self.state.lock();
        !state.is_over && state.waits.is_none()
    }
}

/// While it lives, the current execution blocks its thread.
pub(crate) struct Blocks(Arc<Blocked>);

impl Blocks {
    /// Begins, if others are under way on this thread.
    pub(crate) fn begin(by: &Arc<Execution>) -> Option<Blocks> {
        let is_other = |other: &&Arc<Execution>| !Arc::ptr_eq(other, by);
        let all =
            |beside: &Slab<Arc<Execution>>| beside.iter().map(|(_, other)| other).filter(is_other).cloned().collect();
        let others: Vec<Arc<Execution>> = BESIDE.with_borrow(all);
        if others.is_empty() {
            return None;
        }
        let blocked = Arc::new(Blocked { by: by.clone(), others, state: Mutex::default() });
        let process = by.session.process();
        process.wire.blocked_threads.lock().insert(Arc::as_ptr(&blocked).addr(), blocked.clone());
        process.look_at_blocked_threads();
        Some(Blocks(blocked))
    }
}

impl Drop for Blocks {
    fn drop(&mut self) {
        let process = self.0.by.session.process();
        let removed = process.wire.blocked_threads.lock().remove(&Arc::as_ptr(&self.0).addr());
        drop(removed);
        let mut state = self.0.state.lock();
        state.is_over = true;
        let waits = state.waits.take();
        drop(state);
        drop(waits);
    }
}

impl Process {
    /// Has the head told of what does not go on since its thread is blocked.
    fn look_at_blocked_threads(&self) {
        let look = |process: &Process| {
            let blocked: Vec<_> = process.wire.blocked_threads.lock().values().cloned().collect();
            blocked.iter().filter(|blocked| blocked.look()).count() > 0
        };
        let any = |process: &Process| {
            let blocked: Vec<_> = process.wire.blocked_threads.lock().values().cloned().collect();
            blocked.iter().any(|blocked| blocked.is_looked_at())
        };
        self.look_every(LOOKED_EVERY, ("looking at blocked threads", |wire| &wire.looks_at_blocked_threads), look, any);
    }
}
