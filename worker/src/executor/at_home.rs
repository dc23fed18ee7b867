//! Tasks of this very process: while a task waits for what it has submitted, its process runs that.
//!
//! They run on threads of their own, so that the task that waits goes on as soon as it can. One begins when all others wait. A thread
//! goes on with several asynchronous tasks; while a task blocks its thread, another thread takes the next. A task that goes on after
//! it has waited does so at once, beside what has begun meanwhile.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use wingbeat_core::spec::TaskSpec;
use wingbeat_process::context::Execution;
use wingbeat_process::registry;

use super::lanes::user_runtime;
use super::queue::{Queue, State, task_name};
use super::run::Call;
use super::threads::UnderWay;

/// When all that runs here has waited for so long, its CPU is free for others: what is waited for may need that.
const IDLE_FOR: Duration = Duration::from_millis(2);
/// Threads that have nothing to do, beyond which they end.
const SPARE_THREADS: usize = 8;
/// Threads at most. Beyond that, tasks have processes of their own.
const THREADS: usize = 4_096;

/// What of the queue concerns tasks at home.
#[derive(Default)]
pub(super) struct AtHome {
    /// Threads, and those of them that wait for a task.
    threads: usize,
    idle: usize,
    /// The number of the next thread.
    next: u64,
    /// Those that have tasks under way and would take another, by number, and how each is told.
    takers: BTreeMap<u64, Waker>,
    /// The task that was sent here, while it runs.
    base: Option<Arc<Execution>>,
    /// Somebody looks in a moment whether all wait.
    is_watched: bool,
}

/// What a thread does next.
enum Next {
    Run(Arc<TaskSpec>),
    End,
}

impl Queue {
    /// This task was sent here, and runs from now on.
    pub(super) fn base(&self, execution: Option<&Arc<Execution>>) {
        let before = std::mem::replace(&mut self.state.lock().at_home.base, execution.cloned());
        drop(before);
    }

    /// Something may begin at home: has a thread look. Answers whether there is one that does.
    pub(super) fn wake_home(&self, state: &mut State) -> bool {
        let home = &mut state.at_home;
        if let Some((_, taker)) = home.takers.pop_first() {
            taker.wake();
            return true;
        }
        if home.idle > 0 {
            self.at_home.notify_one();
            return true;
        }
        if home.threads >= THREADS {
            return false;
        }
        let Some(queue) = self.me.upgrade() else { return false };
        home.next += 1;
        let number = home.next;
        let started = std::thread::Builder::new().name("at home".into()).spawn(move || live(&queue, number));
        match started {
            Ok(_) => home.threads += 1,
            Err(error) => eprintln!("wingbeat: cannot start a thread for tasks of this process: {error}"),
        }
        home.threads > 0
    }

    /// The next task for a thread that has none under way.
    fn next_at_home(&self, thread: u64) -> Next {
        self.session.process().take_news();
        let mut state = self.state.lock();
        state.at_home.takers.remove(&thread);
        loop {
            if let Some(spec) = self.take_home(&mut state) {
                return Next::Run(spec);
            }
            if state.work.has_ended() || state.at_home.idle >= SPARE_THREADS {
                state.at_home.threads -= 1;
                return Next::End;
            }
            self.look_whether_all_wait(&mut state);
            state.at_home.idle += 1;
            self.at_home.wait(&mut state);
            state.at_home.idle -= 1;
        }
    }

    /// The same for one that has.
    fn poll_next_at_home(&self, thread: u64, cx: &Context<'_>) -> Poll<Next> {
        self.session.process().take_news();
        let mut state = self.state.lock();
        if let Some(spec) = self.take_home(&mut state) {
            state.at_home.takers.remove(&thread);
            return Poll::Ready(Next::Run(spec));
        }
        self.look_whether_all_wait(&mut state);
        if !state.at_home.takers.get(&thread).is_some_and(|taker| taker.will_wake(cx.waker())) {
            state.at_home.takers.insert(thread, cx.waker().clone());
        }
        Poll::Pending
    }

    fn take_home(&self, state: &mut State) -> Option<Arc<TaskSpec>> {
        if !state.work.takes_home() {
            return None;
        }
        let spec = self.session.process().take_home()?;
        state.work.took_home();
        Some(spec)
    }

    /// Runs while something at home begins or goes on: the CPU is not free.
    fn uses_cpus(&self) {
        let base = self.state.lock().at_home.base.clone();
        if let Some(base) = base {
            base.cpus_are_free(false);
        }
    }

    /// All wait: if that lasts, the CPU is free for others.
    fn look_whether_all_wait(&self, state: &mut State) {
        if !state.work.all_wait() || std::mem::replace(&mut state.at_home.is_watched, true) {
            return;
        }
        let Some(queue) = self.me.upgrade() else { return };
        let process = self.session.process();
        process.vital("looking whether all wait", async move {
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

    pub(super) fn began_waiting_at_home(&self, blocks: bool) {
        if blocks {
            self.session.process().take_news();
        }
        let mut state = self.state.lock();
        state.work.waits_at_home(true);
        // A thread that is not blocked looks itself, after this.
        if blocks && state.work.takes_home() {
            match self.session.process().has_work_at_home() {
                true => drop(self.wake_home(&mut state)),
                false => self.look_whether_all_wait(&mut state),
            }
        }
    }

    pub(super) fn ended_waiting_at_home(&self) {
        self.state.lock().work.waits_at_home(false);
        self.uses_cpus();
    }

    fn done_at_home(&self, execution: &Arc<Execution>) {
        // Its thread looks for another, after this.
        self.state.lock().work.done_at_home(execution.task, |running| Arc::ptr_eq(running, execution));
    }
}

/// The life of a thread.
fn live(queue: &Arc<Queue>, thread: u64) {
    super::handover::watch_this_thread();
    let Some(runtime) = user_runtime() else { return };
    let _entered = runtime.enter();
    let paused = Cell::new(0);
    let mut under_way = UnderWay::default();
    loop {
        let next = match under_way.is_empty() {
            true => Some(queue.next_at_home(thread)),
            false => under_way.go_on(&runtime, |cx| queue.poll_next_at_home(thread, cx)),
        };
        match next {
            Some(Next::Run(spec)) => {
                queue.uses_cpus();
                let execution = Execution::at_home(spec.id, task_name(&spec), queue.session.clone());
                queue.started(&execution);
                let function = registry::table().function(spec.function, spec.name.as_deref());
                let call = Call { queue, execution, spec, paused: &paused };
                under_way.extend(match function {
                    Ok(function) => call.begin(function.path, function.run),
                    Err(error) => call.begin("an unknown function", |_| Err(error)),
                });
            }
            Some(Next::End) => return,
            None => {}
        }
    }
}

impl Queue {
    /// What was taken out is done, wherever it ran.
    pub(crate) fn done(&self, execution: &Arc<Execution>) {
        match execution.at_home {
            true => self.done_at_home(execution),
            false => self.done_here(execution),
        }
    }
}
