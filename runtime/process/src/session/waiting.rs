//! What an execution waits for, and what that means for its process and for the head.
//!
//! While an execution waits, its process takes no tasks of others, and goes on with what it has submitted itself, or its CPUs are free.
//! What the head is told is decided in [`Waits`](crate::work::Waits).

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use wingbeat_core::TaskId;
use wingbeat_core::error::Error;
use wingbeat_net::messages::WaitsFor;

use crate::owner::object::Handle;
use crate::session::blocked::is_blocked;
use crate::session::context::{self, Execution, Listener};
use crate::wire::process::Process;
use crate::work::{Later, Left, On, RoomNews};

/// What an execution waits for is looked at this often while it changes. What the head was told and is over is taken back then.
const TOLD_AFTER: Duration = Duration::from_millis(100);

/// What is new is told after one of these looks, and each time after twice as many, so that one that waits for many thousand results at a time does
/// not tell of each.
const LOOKS_AT_MOST: u32 = 100;

fn tell_later(execution: &Arc<Execution>) {
    // A deadlock that the head is not told of would last for ever.
    execution.session.process().vital("telling what waits", telling(Arc::downgrade(execution)));
}

async fn telling(execution: Weak<Execution>) {
    let (mut looks, mut due_after) = (0, 1);
    loop {
        tokio::time::sleep(TOLD_AFTER).await;
        looks += 1;
        let is_due = looks >= due_after;
        let Some(execution) = execution.upgrade() else { return };
        let mut waits = execution.waits.lock();
        match waits.told_later(&execution.waiter(), is_due) {
            Later::Tell(message) => execution.session.process().tell_head(message),
            Later::Ask => continue,
            Later::Nothing => return,
        }
        if is_due {
            (looks, due_after) = (0, (due_after * 2).min(LOOKS_AT_MOST));
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

    /// There is room for more or fewer calls in a group of the actor: the head is told, for those that wait.
    pub fn room_has_changed(&self, news: RoomNews) {
        match news {
            RoomNews::None => {}
            RoomNews::AtOnce => self.tell_of_room(),
            RoomNews::Soon => {
                self.wire.has_less_room.store(true, Ordering::SeqCst);
                self.look_at_room();
            }
        }
    }

    fn look_at_room(&self) {
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
        waits.iter().for_each(|waiting| waiting.room_has_changed());
    }

    /// Whether some have not lasted yet, and are to be looked at again.
    fn tell_of_waits_that_last(&self) -> bool {
        let waits: Vec<_> = self.wire.waits.iter().map(|waiting| waiting.clone()).collect();
        waits.iter().filter(|waiting| waiting.tell_if_it_lasts()).count() > 0
    }
}

/// While it lives, the execution waits.
pub struct Waiting {
    listener: Listener,
    on: Vec<On>,
    /// Whether a thread is blocked for it.
    blocks: bool,
    waits_for: WaitsFor,
}

impl Waiting {
    /// Has the current execution wait for these objects while `kept` lives, if it does not wait already. Whoever keeps it may outlive the execution, and be
    /// polled by the next one, or blocking: then that waits.
    pub fn keep(kept: &mut Option<Waiting>, objects: &[&Handle]) {
        Waiting::keep_on(kept, || objects.iter().map(|handle| (handle.id().task, handle.producer())).collect());
    }

    /// As [`Waiting::keep`], for tasks.
    pub(crate) fn keep_on(kept: &mut Option<Waiting>, on: impl FnOnce() -> Vec<On>) {
        let goes_on =
            |waiting: &Waiting| context::is_current(waiting.listener.execution()) && waiting.blocks == is_blocked();
        if kept.as_ref().is_some_and(goes_on) {
            return;
        }
        *kept = None;
        *kept = Waiting::begin(on());
    }

    /// The current execution waits for these tasks; none outside of a task.
    pub(crate) fn begin(on: Vec<On>) -> Option<Waiting> {
        Waiting::begin_as(on, WaitsFor::Results)
    }

    /// The current execution, which waits for nothing else, waits for its turn at the state that these have. It cannot be told that it does so in
    /// vain.
    pub(crate) fn for_turn(holders: &[TaskId]) -> Option<Waiting> {
        let on = holders.iter().map(|task| (*task, None)).collect();
        if holders.is_empty() { None } else { Waiting::begin_as(on, WaitsFor::Turn) }
    }

    /// The current execution waits for its thread, whatever else it waits for, since this one blocks that. It cannot be told that it does so in vain.
    pub(crate) fn for_thread(by: TaskId) -> Option<Waiting> {
        Waiting::begin_as(vec![(by, None)], WaitsFor::Thread)
    }

    fn begin_as(on: Vec<On>, waits_for: WaitsFor) -> Option<Waiting> {
        let execution = context::current()?;
        let process = execution.session.process();
        process.attend();
        // Held while others are told, so that they hear of it in order.
        let mut waits = execution.waits.lock();
        if waits.is_over() {
            return None;
        }
        let is_for_results = waits_for == WaitsFor::Results;
        let blocks = is_blocked() && is_for_results;
        let is_first = waits.add(&on, blocks, Instant::now());
        waits.waits_for(waits_for, &on, true);
        if is_first {
            process.wire.waits.insert(execution.task, execution.clone());
            if execution.at_home {
                if let Some(executor) = process.executor() {
                    executor.begin_wait_at_home(execution.task, blocks);
                }
                waits.begun_at_home();
                process.look_at_waits();
            } else {
                // Who has the state, or the thread, uses the CPUs.
                let goes_on = process.executor().is_some_and(|executor| executor.begin_wait()) || !is_for_results;
                process.tell_head(waits.begun(&execution.waiter(), goes_on));
            }
        } else {
            if execution.at_home
                && blocks
                && let Some(executor) = process.executor()
            {
                executor.begin_wait_at_home(execution.task, true);
            }
            if waits.has_changed() {
                tell_later(&execution);
            }
        }
        drop(waits);
        Some(Waiting { listener: Listener::new(execution), on, blocks, waits_for })
    }

    /// Why it must end, if it must; otherwise `cx` is woken when it must.
    pub fn poll_interrupted(&mut self, cx: &Context<'_>) -> Poll<Error> {
        self.listener.poll_interrupted(&self.on, cx)
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let execution = self.listener.execution();
        // Held while others are told, so that they hear of it in order.
        let mut waits = execution.waits.lock();
        waits.waits_for(self.waits_for, &self.on, false);
        match waits.remove(&execution.waiter(), &self.on, self.blocks, Instant::now()) {
            Left::Some(true) => tell_later(execution),
            left => execution.left(left),
        }
    }
}

impl Execution {
    /// Its thread does nothing else, or goes on.
    pub(crate) fn thread_is_blocked(self: &Arc<Self>, is_blocked: bool) {
        if self.waits.lock().thread_is_blocked(is_blocked) {
            tell_later(self);
        }
    }

    /// Does what follows from the end of a wait, under the lock of its waits.
    pub(crate) fn left(&self, left: Left) {
        let Left::None(resumed) = left else { return };
        let process = self.session.process();
        process.wire.waits.remove(&self.task);
        if let Some(resumed) = resumed {
            process.tell_head(resumed);
        }
        match process.executor() {
            Some(executor) if self.at_home => executor.end_wait_at_home(self.task),
            Some(executor) => executor.end_wait(),
            None => {}
        }
    }
}
