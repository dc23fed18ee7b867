//! Tasks of this very process: while a task waits for what it has submitted, its process runs that.
//!
//! One begins when the task that was sent here waits, and so do all that have begun beside it. They run on threads of their own, so
//! that the task that was sent here goes on as soon as it can. A thread goes on with several asynchronous tasks; what would block it is
//! run by another. A task that goes on after it has waited does so at once, beside what has begun meanwhile.
//!
//! ```text
//!   a task waits ──▶ does its thread look for more? ── yes ──▶ it does, after this
//!                          │ no: it is blocked, or it is that of the task that was sent here
//!                          └──▶ wake_home: a thread that has room, one that is idle, or a new one
//!   nothing to run ──▶ after a moment the CPU is free for others (look_whether_all_wait)
//! ```
//!
//! Locks are taken in this order: waits of a task, [`Queue::state`], the owner's.

use std::cell::Cell;
use std::sync::{Arc, LazyLock};
use std::task::{Context, Poll};
use std::time::Duration;

use wingbeat_core::TaskId;
use wingbeat_core::spec::TaskSpec;
use wingbeat_net::messages::NodeMessage;
use wingbeat_process::context::Execution;
use wingbeat_process::{ForAnotherThread, note, registry};

use super::handover::SignalStack;
use super::lanes::user_runtime;
use super::queue::{Queue, State, task_name};
use super::run::Call;
use super::threads::{UnderWay, is_inside};

/// When all that runs here has waited for so long, its CPU is free for others: what is waited for may need that.
const IDLE_FOR: Duration = Duration::from_millis(2);
/// Threads that have nothing to do, beyond which they end.
const SPARE_THREADS: usize = 8;
/// Threads at most. Beyond that, tasks have processes of their own.
const THREADS: usize = 4_096;
/// Tasks that are under way on one thread at most.
const UNDER_WAY: usize = 256;

/// As much as a main thread has, where tasks run that were sent here: so a task that fits there fits here. Only what is used takes
/// memory.
static STACK: LazyLock<usize> = LazyLock::new(|| {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Stack).current;
    limit.and_then(|bytes| usize::try_from(bytes).ok()).unwrap_or(USUAL_STACK).clamp(USUAL_STACK, MOST_STACK)
});
const USUAL_STACK: usize = 8 << 20;
const MOST_STACK: usize = 64 << 20;

thread_local! {
    /// The number of this thread, if it is one of these.
    static NUMBER: Cell<Option<u64>> = const { Cell::new(None) };
}

/// What a thread does next.
enum Next {
    Run(Arc<TaskSpec>),
    End,
}

impl Queue {
    /// Has somebody run something at home, if there is anything. Answers whether somebody will.
    pub(super) fn goes_on_at_home(&self, state: &mut State) -> bool {
        state.work.takes_home() && self.session.process().asks_for_home() && self.wake_home(state)
    }

    fn wake_home(&self, state: &mut State) -> bool {
        // One whose tasks were all given up by force may not come back to look.
        if state.work.at_home() > 0
            && let Some((_, taker)) = state.at_home.takers.pop_first()
        {
            taker.wake();
            return true;
        }
        self.wake_idle(state)
    }

    /// Has a thread look that has nothing under way, or a new one.
    fn wake_idle(&self, state: &mut State) -> bool {
        if state.at_home.idle > 0 {
            self.at_home.notify_one();
            return true;
        }
        self.start_thread(state)
    }

    fn start_thread(&self, state: &mut State) -> bool {
        if state.at_home.threads >= THREADS {
            return false;
        }
        let Some(queue) = self.me.upgrade() else { return false };
        let started = user_runtime().map(|runtime| {
            state.at_home.last += 1;
            let number = state.at_home.last;
            let thread = std::thread::Builder::new().name("at home".into()).stack_size(*STACK);
            thread.spawn(move || {
                let _entered = runtime.enter();
                let running = || live(&queue, number, &runtime);
                queue.session.process().vital_thread("running tasks at home", running);
            })
        });
        match started {
            Some(Ok(_)) => {
                state.at_home.threads += 1;
                true
            }
            Some(Err(error)) => {
                note(format_args!("cannot start a thread for tasks of this process: {error}"));
                false
            }
            None => false,
        }
    }

    pub(super) fn wake_all_at_home(&self, state: &mut State) {
        self.at_home.notify_all();
        for taker in std::mem::take(&mut state.at_home.takers).into_values() {
            taker.wake();
        }
    }

    /// The next task for a thread that has none under way.
    fn next_at_home(&self, thread: u64) -> Next {
        let mut state = self.state.lock();
        state.at_home.takers.remove(&thread);
        loop {
            if let Ok(Some(spec)) = self.take_home(&mut state, false) {
                return Next::Run(spec);
            }
            self.look_whether_all_wait(&mut state);
            if state.work.has_ended() || state.at_home.idle >= SPARE_THREADS {
                state.at_home.threads -= 1;
                return Next::End;
            }
            state.at_home.idle += 1;
            self.at_home.wait(&mut state);
            state.at_home.idle -= 1;
        }
    }

    /// The same for one that has.
    fn poll_next_at_home(&self, thread: u64, has_room: bool, cx: &Context<'_>) -> Poll<Next> {
        let mut state = self.state.lock();
        state.at_home.takers.remove(&thread);
        if !has_room {
            if !self.goes_on_at_home(&mut state) {
                self.look_whether_all_wait(&mut state);
            }
            return Poll::Pending;
        }
        match self.take_home(&mut state, true) {
            Ok(Some(spec)) => return Poll::Ready(Next::Run(spec)),
            // It would hold up those that are under way here.
            Err(ForAnotherThread) if self.wake_idle(&mut state) => {}
            Err(ForAnotherThread) | Ok(None) => self.look_whether_all_wait(&mut state),
        }
        state.at_home.takers.insert(thread, cx.waker().clone());
        Poll::Pending
    }

    fn take_home(&self, state: &mut State, if_asynchronous: bool) -> Result<Option<Arc<TaskSpec>>, ForAnotherThread> {
        if !state.work.takes_home() {
            return Ok(None);
        }
        let taken = self.session.process().take_home(if_asynchronous)?;
        if let Some(spec) = &taken {
            state.work.took_home(spec.id);
            state.at_home.seems_stuck = false;
        }
        Ok(taken)
    }

    /// Something at home begins or goes on: the CPU is not free.
    fn uses_cpus(&self) {
        let base = self.state.lock().at_home.base.clone();
        if let Some(base) = base {
            base.cpus_are_free(false);
        }
    }

    /// If all wait, and that lasts, the CPU is free for others.
    pub(super) fn look_whether_all_wait(&self, state: &mut State) {
        if !state.work.all_wait() || std::mem::replace(&mut state.at_home.is_watched, true) {
            return;
        }
        let Some(queue) = self.me.upgrade() else { return };
        self.session.process().vital("looking whether all wait", async move {
            tokio::time::sleep(IDLE_FOR).await;
            let mut state = queue.state.lock();
            state.at_home.is_watched = false;
            let base = if state.work.all_wait() { state.at_home.base.clone() } else { None };
            drop(state);
            let Some(base) = base else { return };
            base.cpus_are_free(true);
            // Something may have begun in between.
            if !queue.state.lock().work.all_wait() {
                base.cpus_are_free(false);
            }
        });
    }

    /// A thread that was to go on with something else may be blocked after all, in a runtime of the user's: then another goes on.
    pub(super) fn look_for_stuck_threads(&self) {
        let mut state = self.state.lock();
        let has_work = state.work.takes_home() && self.session.process().asks_for_home();
        let was_stuck = std::mem::replace(&mut state.at_home.seems_stuck, has_work);
        if has_work {
            self.wake_all_at_home(&mut state);
        }
        if !(has_work && was_stuck && self.start_thread(&mut state)) {
            self.look_whether_all_wait(&mut state);
        }
    }

    pub(super) fn began_waiting_at_home(&self, task: TaskId, blocks: bool) {
        let mut state = self.state.lock();
        state.work.waits_at_home(task, true);
        if let Some(number) = NUMBER.get() {
            // It says itself when it would take something.
            state.at_home.takers.remove(&number);
        }
        // What is polled inside lets its thread look, after this, unless it runs another runtime there.
        if !blocks && is_inside() {
            return;
        }
        if !self.goes_on_at_home(&mut state) {
            self.look_whether_all_wait(&mut state);
        }
    }

    pub(super) fn ended_waiting_at_home(&self, task: TaskId) {
        let counts = self.state.lock().work.waits_at_home(task, false);
        if counts {
            self.uses_cpus();
        }
    }

    /// What has ended may have been the last of what was left of an earlier task.
    pub(super) fn done_at_home(&self, state: &mut State) {
        if let Some((owner, lease)) = state.work.ready_after_home() {
            self.session.process().say_ready(owner, lease);
        }
        self.look_for_leftovers(state);
        self.wake_main(state);
    }

    /// A task that was sent here has ended, or something that one has left behind, which keeps other leases away. Said under the lock, so that
    /// it is said in order.
    pub(super) fn look_for_leftovers(&self, state: &mut State) {
        if let Some(are_left) = state.work.leftovers(state.at_home.base.is_some()) {
            self.session.process().tell_node(NodeMessage::LeftBehind(are_left));
        }
    }

    /// A task that runs at home was cancelled by force: its owner, which is this process, has given it up. It is asked to stop, and
    /// holds nobody up meanwhile.
    pub(super) fn give_up_at_home(&self, execution: &Arc<Execution>) {
        self.session.process().cancel_with_children(execution, Execution::disown);
        let mut state = self.state.lock();
        self.done_at_home(&mut state);
        if !self.goes_on_at_home(&mut state) {
            self.look_whether_all_wait(&mut state);
        }
    }

    /// Whether it is worth looking again for threads that are stuck.
    pub(super) fn may_be_stuck(&self) -> bool {
        let state = self.state.lock();
        state.work.all_wait() && state.work.at_home() > 0
    }
}

/// The life of a thread.
fn live(queue: &Arc<Queue>, thread: u64, runtime: &tokio::runtime::Runtime) {
    NUMBER.set(Some(thread));
    let _stack = SignalStack::of_this_thread();
    let calls = Cell::default();
    let mut under_way = UnderWay::default();
    // Whether a stream is among them whose items block the thread while they are made.
    let mut blocks = false;
    loop {
        blocks &= !under_way.is_empty();
        let has_room = under_way.len() < UNDER_WAY && !blocks;
        let next = match under_way.is_empty() {
            true => Some(queue.next_at_home(thread)),
            false => under_way.go_on(runtime, |cx| queue.poll_next_at_home(thread, has_room, cx)),
        };
        match next {
            Some(Next::Run(spec)) => {
                queue.uses_cpus();
                let execution = Execution::at_home((spec.id, spec.attempt), task_name(&spec), queue.session.clone());
                queue.started(&execution);
                let function = registry::table().function(spec.function, spec.name.as_deref());
                let call = Call { queue, execution, spec, thread: &calls };
                blocks |= function.as_ref().is_ok_and(|function| !function.is_asynchronous);
                under_way.extend(match call.expects(function, |function| function.outputs) {
                    Ok(function) => call.begin(function.path, function.run),
                    Err(error) => call.begin("an unknown function", |_| Err(error)),
                });
            }
            Some(Next::End) => return,
            None => {}
        }
    }
}
