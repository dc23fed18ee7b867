//! The turns of an actor's calls at its state. A call that waits for its turn waits for those that hold the state, and if they wait for others
//! themselves, the head is told: one of them may wait for this call.

use std::future::Future;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use parking_lot::Mutex;
use wingbeat_core::TaskId;

use crate::session::context::{self, Execution};
use crate::session::waiting::Waiting;
use crate::wire::executor::ForTurn;
use crate::wire::process::Process;

/// It is looked this often who holds the state, while anybody waits for it.
const LOOKED_EVERY: Duration = Duration::from_millis(100);

/// So many that hold the state are told of: the first ones, as of any tasks that a call waits for.
const TOLD: usize = 256;

/// Of so many that are left it is told at once.
const FEW: usize = 8;

/// A call that waits for its turn, until it has that, or is dropped.
struct Turn {
    execution: Arc<Execution>,
    state: Mutex<TurnState>,
}

#[derive(Default)]
struct TurnState {
    /// What the head was told, and of whom.
    told: Option<(Vec<TaskId>, Waiting)>,
    /// It has its turn: nothing is told any more.
    is_over: bool,
}

impl ForTurn for Turn {
    fn waits_for(&self, holders: &[TaskId]) {
        let mut state = self.state.lock();
        if state.is_over || state.told.as_ref().map_or(&[][..], |(told, _)| told) == holders {
            return;
        }
        // What was told before is over first.
        drop(state.told.take());
        state.told = self.execution.run(|| Waiting::for_turn(holders)).map(|waiting| (holders.to_vec(), waiting));
    }

    fn let_go(&self, by: TaskId) {
        let mut state = self.state.lock();
        if let Some((holders, waiting)) = state.told.take_if(|(holders, _)| holders.contains(&by)) {
            drop(waiting);
            let rest: Vec<TaskId> = holders.into_iter().filter(|holder| *holder != by).collect();
            // The next look tells of many.
            if rest.len() <= FEW {
                state.told = self.execution.run(|| Waiting::for_turn(&rest)).map(|waiting| (rest, waiting));
            }
        }
    }
}

impl Process {
    /// Has the head told of whom calls wait for that wait for their turn.
    fn look_at_turns(&self) {
        let any_wait = |process: &Process| !process.wire.turns.lock().is_empty();
        let (mut seen, mut told) = (Vec::<TaskId>::new(), Vec::<TaskId>::new());
        let look = move |process: &Process| {
            // Who has the state for a moment holds nobody up, nor does who waits for nothing. One of whom the head was told is one of them until it
            // lets the state go.
            let now = process.holders_of_state();
            let holds_up = |holder: &&TaskId| {
                let waits = || process.wire.waits.contains_key(*holder);
                seen.binary_search(holder).is_ok() && (told.binary_search(holder).is_ok() || waits())
            };
            let most = if any_wait(process) { TOLD } else { 0 };
            told = now.iter().filter(holds_up).take(most).copied().collect();
            seen = now;
            process.tell_of_turns(&told);
            // Of none if nobody waits any more.
            !told.is_empty() || any_wait(process)
        };
        self.look_every(LOOKED_EVERY, ("looking at turns", |wire| &wire.looks_at_turns), look, any_wait);
    }

    fn tell_of_turns(&self, holders: &[TaskId]) {
        if !holders.is_empty() {
            self.wire.turns_are_told.store(true, Ordering::SeqCst);
        }
        for turn in self.turns() {
            turn.waits_for(holders);
        }
        if holders.is_empty() {
            self.wire.turns_are_told.store(false, Ordering::SeqCst);
        }
        // Whoever has let it go meanwhile may have found that nobody was told.
        let still = self.holders_of_state();
        let gone = holders.iter().filter(|holder| still.binary_search(holder).is_err());
        gone.for_each(|holder| self.let_go_of_state(*holder));
    }

    /// A call holds the state no more. The head hears that nobody waits for it before it hears what this waits for next.
    pub(crate) fn let_go_of_state(&self, by: TaskId) {
        self.turns().iter().for_each(|turn| turn.let_go(by));
    }

    fn holders_of_state(&self) -> Vec<TaskId> {
        self.executor().map(|executor| executor.holders_of_state()).unwrap_or_default()
    }

    fn turns(&self) -> Vec<Arc<dyn ForTurn>> {
        self.wire.turns.lock().values().cloned().collect()
    }
}

/// While it lives, a call waits for its turn.
struct WaitsForTurn(Arc<Turn>);

impl WaitsForTurn {
    fn begin(execution: Arc<Execution>) -> WaitsForTurn {
        let turn = Arc::new(Turn { execution, state: Mutex::default() });
        let process = turn.execution.session.process();
        process.wire.turns.lock().insert(turn.execution.task, turn.clone());
        process.look_at_turns();
        WaitsForTurn(turn)
    }
}

impl Drop for WaitsForTurn {
    fn drop(&mut self) {
        let execution = &self.0.execution;
        let mut turns = execution.session.process().wire.turns.lock();
        // A later attempt may wait by now.
        let is_this =
            turns.get(&execution.task).is_some_and(|turn| std::ptr::addr_eq(Arc::as_ptr(turn), Arc::as_ptr(&self.0)));
        let removed = if is_this { turns.remove(&execution.task) } else { None };
        drop(turns);
        drop(removed);
        let mut state = self.0.state.lock();
        state.is_over = true;
        drop(state.told.take());
    }
}

/// Runs a call that is not asynchronous, and has the state of its actor meanwhile.
pub fn with_state<R>(call: impl FnOnce() -> R) -> R {
    struct LetsGo;
    impl Drop for LetsGo {
        fn drop(&mut self) {
            context::holds_state(false);
        }
    }
    context::holds_state(true);
    let _lets_go = LetsGo;
    call()
}

/// An actor's state, which a call has until this is dropped.
pub struct Held<G> {
    state: G,
    /// The call; none in no task.
    by: Option<Arc<Execution>>,
}

impl<G> Held<G> {
    /// The running call has the state from now on.
    pub fn new(state: G) -> Held<G> {
        let by = context::current();
        if let Some(by) = &by {
            by.holds_state(true);
        }
        Held { state, by }
    }

    /// The running call has the state when `lock` gives it.
    pub async fn after(lock: impl Future<Output = G>) -> Held<G> {
        let waits = context::current().map(WaitsForTurn::begin);
        let state = lock.await;
        drop(waits);
        Held::new(state)
    }
}

impl<G: Deref> Deref for Held<G> {
    type Target = G::Target;

    fn deref(&self) -> &G::Target {
        &self.state
    }
}

impl<G: DerefMut> DerefMut for Held<G> {
    fn deref_mut(&mut self) -> &mut G::Target {
        &mut self.state
    }
}

impl<G> Drop for Held<G> {
    fn drop(&mut self) {
        if let Some(by) = self.by.as_ref().filter(|by| by.holds_state(false)) {
            by.session.process().let_go_of_state(by.task);
        }
    }
}
