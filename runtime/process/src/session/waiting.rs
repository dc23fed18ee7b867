//! What an execution waits for, and what that means for its process and for the head.
//!
//! While an execution waits, its process takes no tasks of others, and goes on with what it has submitted itself, or its CPUs are free.
//! What the head is told is decided in [`Waits`](crate::work::Waits).

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use parking_lot::MutexGuard;
use wingbeat_core::TaskId;
use wingbeat_core::error::Error;
use wingbeat_net::messages::WaitsFor;

use crate::owner::object::Handle;
use crate::session::context::{self, Execution, Listener};
use crate::session::manner::manner_of_waiting;
use crate::wire::executor::Interrupt;
use crate::wire::process::Process;
use crate::work::{Awaited, Coming, Later, Left, Manner, On, Waits};

/// What an execution waits for is looked at this often while it changes. What has not changed from one look to the next is told.
const TOLD_AFTER: Duration = Duration::from_millis(100);

impl Execution {
    /// Has somebody look at what it waits for, until all is told.
    pub(crate) fn tell_later(self: &Arc<Self>) {
        // A deadlock that the head is not told of would last for ever.
        self.session.process().vital("telling what waits", telling(Arc::downgrade(self)));
    }

    /// Does what follows from what the head was told, under the lock of its waits until now: somebody looks `later`, or it is polled.
    pub(crate) fn is_told(self: &Arc<Self>, mut waits: MutexGuard<'_, Waits>, later: bool) {
        let is_to_be_polled = waits.is_to_be_polled();
        drop(waits);
        if later {
            self.tell_later();
        }
        if is_to_be_polled {
            self.wakes();
        }
    }
}

async fn telling(execution: Weak<Execution>) {
    let mut after = TOLD_AFTER;
    loop {
        tokio::time::sleep(after).await;
        let Some(execution) = execution.upgrade() else { return };
        let mut waits = execution.waits.lock();
        match waits.told_later(&execution.waiter()) {
            Later::Tell(message) => {
                execution.session.process().tell_head(message);
                execution.is_told(waits, false);
                after = TOLD_AFTER;
            }
            Later::Ask(again) => after = again,
            Later::Nothing => return,
        }
    }
}

impl Process {
    /// Has the head told of the waits at home that last: a deadlock may be among them.
    fn look_at_waits(&self) {
        let look = |process: &Process| {
            let is_untold = process.tell_of_waits_that_last();
            let may_be_stuck = process.executor().is_some_and(|executor| executor.look_at_home());
            is_untold || may_be_stuck
        };
        let lasting = Process::tell_of_waits_that_last;
        self.look_every(TOLD_AFTER, ("looking at what waits", |wire| &wire.looks_at_waits), look, lasting);
    }

    /// There is room for fewer calls in a group of the actor: the head is told soon, for those that wait. Streams go on and pause many times a second,
    /// and a circle stays.
    pub fn has_less_room(&self) {
        self.wire.has_less_room.store(true, Ordering::SeqCst);
        let look = |process: &Process| {
            let has_less = process.wire.has_less_room.swap(false, Ordering::SeqCst);
            if has_less {
                process.tell_of_room();
            }
            has_less
        };
        let has_less = |process: &Process| process.wire.has_less_room.load(Ordering::SeqCst);
        self.look_every(TOLD_AFTER, ("looking at room", |wire| &wire.looks_at_room), look, has_less);
    }

    fn tell_of_room(&self) {
        let waits: Vec<_> = self.wire.waits.iter().map(|waiting| waiting.clone()).collect();
        waits.into_iter().for_each(|waiting| waiting.has_less_room());
    }

    /// Whether some have not lasted yet, and are to be looked at again.
    fn tell_of_waits_that_last(&self) -> bool {
        let waits: Vec<_> = self.wire.waits.iter().map(|waiting| waiting.clone()).collect();
        waits.into_iter().filter(|waiting| waiting.clone().tell_if_it_lasts()).count() > 0
    }
}

/// While it lives, the execution waits.
pub struct Waiting {
    listener: Listener,
    awaited: Awaited,
    /// Among the waits of the execution.
    number: u64,
    manner: Manner,
    waits_for: WaitsFor,
}

impl Waiting {
    /// Has the current execution wait for these objects while `kept` lives, if it does not wait already. Whoever keeps it may outlive the execution, and be
    /// polled by the next one, or blocking: then that waits.
    pub fn keep(kept: &mut Option<Waiting>, objects: &[&Handle]) {
        Waiting::keep_on(kept, || Awaited::all(objects.iter().map(|handle| On::value(handle))));
    }

    /// As [`Waiting::keep`], for whichever of these objects comes first.
    pub fn keep_for_one<'a>(kept: &mut Option<Waiting>, objects: impl IntoIterator<Item = &'a Handle>) {
        Waiting::keep_on(kept, || Awaited::some(1, objects.into_iter().map(On::value)));
    }

    /// As [`Waiting::keep`].
    pub(crate) fn keep_on(kept: &mut Option<Waiting>, awaited: impl FnOnce() -> Awaited) {
        let goes_on = |waiting: &Waiting| {
            context::is_current(waiting.listener.execution()) && waiting.manner == manner_of_waiting()
        };
        if kept.as_ref().is_some_and(goes_on) {
            return;
        }
        *kept = None;
        if context::is_in_task() {
            *kept = Waiting::begin(awaited());
        }
    }

    /// The current execution waits for this; none outside of a task.
    pub(crate) fn begin(awaited: Awaited) -> Option<Waiting> {
        Waiting::begin_as(awaited, WaitsFor::Results)
    }

    /// The current execution, which waits for nothing else, waits for its turn at the state that these have. It cannot be told that it does so in
    /// vain.
    pub(crate) fn for_turn(holders: &[TaskId]) -> Option<Waiting> {
        let all = || Awaited::all(holders.iter().map(|task| On::task(*task)));
        if holders.is_empty() { None } else { Waiting::begin_as(all(), WaitsFor::Turn) }
    }

    /// The current execution waits for its thread, whatever else it waits for, since this one blocks that. It cannot be told that it does so in vain.
    pub(crate) fn for_thread(by: TaskId) -> Option<Waiting> {
        Waiting::begin_as(Awaited::all([On::task(by)]), WaitsFor::Thread)
    }

    fn begin_as(awaited: Awaited, waits_for: WaitsFor) -> Option<Waiting> {
        let execution = context::current()?;
        let process = execution.session.process();
        process.attend();
        // Held while others are told, so that they hear of it in order.
        let mut waits = execution.waits.lock();
        if waits.is_over() {
            return None;
        }
        let is_for_results = waits_for == WaitsFor::Results;
        let manner = if is_for_results { manner_of_waiting() } else { Manner::default() };
        let (number, is_first) = waits.add(awaited.clone(), manner, Instant::now());
        waits.waits_for(waits_for, &awaited, true);
        if is_first {
            process.wire.waits.insert(execution.task, execution.clone());
            if execution.at_home {
                if let Some(executor) = process.executor() {
                    executor.begin_wait_at_home(execution.task, manner.blocks);
                }
                waits.begun_at_home();
                process.look_at_waits();
            } else {
                // Who has the state, or the thread, uses the CPUs.
                let goes_on = process.executor().is_some_and(|executor| executor.begin_wait()) || !is_for_results;
                let (message, later) = waits.begun(&execution.waiter(), goes_on);
                process.tell_head(message);
                if later {
                    execution.tell_later();
                }
            }
        } else {
            if execution.at_home
                && manner.blocks
                && let Some(executor) = process.executor()
            {
                executor.begin_wait_at_home(execution.task, true);
            }
            if waits.has_changed() {
                execution.tell_later();
            }
        }
        drop(waits);
        Some(Waiting { listener: Listener::new(execution), awaited, number, manner, waits_for })
    }

    /// Why it must end, if it must; otherwise `cx` is woken when it must.
    pub fn poll_interrupted(&mut self, cx: &Context<'_>) -> Poll<Error> {
        self.listener.poll_interrupted(self.number, cx)
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let execution = self.listener.execution();
        // Held while others are told, so that they hear of it in order.
        let mut waits = execution.waits.lock();
        waits.waits_for(self.waits_for, &self.awaited, false);
        match waits.remove(&execution.waiter(), self.number, Instant::now()) {
            Left::Some(true) => execution.tell_later(),
            left => execution.left(left),
        }
        if waits.is_hopeless_no_more() {
            execution.forgets_deadlock();
        }
    }
}

/// A value is on its way to the current execution from now on, which goes on when that is here; none outside of a task.
pub(crate) fn begins_to_come() -> Option<Arc<Coming>> {
    let execution = context::current()?;
    let coming = Arc::new(Coming::new(manner_of_waiting()));
    if execution.waits.lock().begins_to_come(&coming) {
        execution.tell_later();
    }
    Some(coming)
}

impl Execution {
    /// Its thread does nothing else, or goes on.
    pub(crate) fn thread_is_blocked(self: &Arc<Self>, is_blocked: bool) {
        if self.waits.lock().thread_is_blocked(is_blocked) {
            self.tell_later();
        }
    }

    /// Does what follows from the end of a wait, under the lock of its waits.
    pub(crate) fn left(&self, left: Left) {
        let Left::None(resumed) = left else { return };
        let process = self.session.process();
        // A later attempt may wait by now.
        let is_this = |_: &TaskId, waiting: &Arc<dyn Interrupt>| std::ptr::addr_eq(Arc::as_ptr(waiting), self);
        let was_known = process.wire.waits.remove_if(&self.task, is_this).is_some();
        if let Some(resumed) = resumed.filter(|_| was_known) {
            process.tell_head(resumed);
        }
        match process.executor() {
            Some(executor) if self.at_home => executor.end_wait_at_home(self.task),
            Some(executor) => executor.end_wait(),
            None => {}
        }
    }
}
