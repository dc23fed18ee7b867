//! Asynchronous executions that are under way beside each other on one thread. While one of them blocks that, the others do not go on, and the head
//! is told that they wait for it: it may wait for them.

use std::collections::BTreeMap;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use crate::session::context::Execution;
use crate::session::waiting::Waiting;
use crate::wire::executor::HoldsUp;
use crate::wire::process::Process;

/// It is looked this often which threads are blocked, while any is that others need and are not told of.
const LOOKED_EVERY: Duration = Duration::from_millis(100);

/// The others are told of after so many looks. Most threads go on before, and held up nobody.
const TOLD_AFTER: u32 = 5;

/// What is under way on a thread, by address.
type Beside = Mutex<BTreeMap<usize, Arc<Execution>>>;

thread_local! {
    static BESIDE: Arc<Beside> = Arc::default();
}

fn address(execution: &Arc<Execution>) -> usize {
    Arc::as_ptr(execution).addr()
}

/// While it lives, an execution is under way on this thread, and goes on only there.
pub struct UnderWay {
    address: usize,
    /// It is not sent to another thread.
    here: PhantomData<*const ()>,
}

impl UnderWay {
    /// It begins.
    pub fn begin(execution: &Arc<Execution>) -> UnderWay {
        let address = address(execution);
        BESIDE.with(|beside| beside.lock().insert(address, execution.clone()));
        UnderWay { address, here: PhantomData }
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        // A thread that ends has none any more.
        let removed = BESIDE.try_with(|beside| beside.lock().remove(&self.address));
        drop(removed);
    }
}

/// An execution that blocks a thread on which others are under way.
struct Blocked {
    by: Arc<Execution>,
    beside: Arc<Beside>,
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
        let others: Vec<_> = self.beside.lock().values().filter(is_other).cloned().collect();
        let wait = |other: &Arc<Execution>| other.run(|| Waiting::for_thread(self.by.task));
        state.waits = Some(others.iter().filter_map(wait).collect());
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
        let beside = BESIDE.with(Arc::clone);
        let any = beside.lock().keys().any(|other| *other != address(by));
        any.then(|| {
            let blocked = Arc::new(Blocked { by: by.clone(), beside, state: Mutex::default() });
            let process = by.session.process();
            process.wire.blocked_threads.lock().insert(Arc::as_ptr(&blocked).addr(), blocked.clone());
            process.look_at_blocked_threads();
            Blocks(blocked)
        })
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
