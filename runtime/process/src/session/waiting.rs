//! What an execution waits for, and what that means for its process and for the head.
//!
//! An execution may wait for several things at once, as with `join!`. It waits as long as any of these waits lasts: its
//! process takes no tasks of others then, and goes on with what it has submitted itself, or its CPUs are free. The head is told of the
//! first wait of a task that was sent here at once. It is told of others only if they last, since it needs them for deadlocks alone.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use wingbeat_core::error::Error;
use wingbeat_core::{ActorId, TaskId};
use wingbeat_net::messages::{HeadMessage, Wait};

use crate::session::blocking::is_blocked;
use crate::session::context::{self, Execution, Listener};
use crate::wire::process::Process;

/// Changes in what an execution waits for are told after this long, and each time after twice as long, so that one that
/// waits for many thousand results at a time does not tell of each.
const TOLD_AFTER: Duration = Duration::from_millis(100);
const TOLD_AT_LEAST: Duration = Duration::from_secs(10);

/// The head is told of so many tasks at most: the first ones, which a deadlock leaves over when others are done.
const TOLD: usize = 256;

/// The waits of an execution.
#[derive(Default)]
pub(crate) struct Waits {
    count: usize,
    /// Since when there is any.
    since: Option<Instant>,
    /// For how long there was, before.
    waited: Duration,
    /// Whether the head counts the CPUs as free.
    frees_cpus: bool,
    /// Whether the head was told of any of them.
    is_told: bool,
    /// Of one at home that was not told: whether it was looked at before.
    was_seen: bool,
    /// How many of them are for each task, and the actor that it was sent to.
    on: BTreeMap<TaskId, (usize, Option<ActorId>)>,
    /// Whether the head does not know all of this.
    changed: bool,
    /// Whether somebody will tell it.
    is_told_later: bool,
}

impl Waits {
    pub(crate) fn is_for(&self, task: TaskId) -> bool {
        self.on.contains_key(&task)
    }

    pub(crate) fn waited(&self) -> Duration {
        self.waited + self.since.map_or(Duration::ZERO, |since| since.elapsed())
    }

    fn add(&mut self, on: &[(TaskId, Option<ActorId>)]) {
        self.count += 1;
        if self.count == 1 {
            self.since = Some(Instant::now());
        }
        for (task, actor) in on {
            self.on.entry(*task).or_insert((0, *actor)).0 += 1;
        }
    }

    fn remove(&mut self, on: &[(TaskId, Option<ActorId>)]) {
        self.count -= 1;
        if self.count == 0 {
            self.waited = self.waited();
            self.since = None;
        }
        for (task, _) in on {
            if let Some((count, _)) = self.on.get_mut(task) {
                *count -= 1;
                if *count == 0 {
                    self.on.remove(task);
                }
            }
        }
    }

    /// Tells the head what is waited for, as if it began now.
    pub(crate) fn tell_anew(&self, execution: &Execution) {
        if self.count > 0 && self.is_told {
            self.tell(execution);
        }
    }

    fn tell(&self, execution: &Execution) {
        let lease = execution.lease.filter(|_| self.frees_cpus);
        let message = HeadMessage::Waiting { lease, wait: self.describe(execution) };
        execution.session.process().tell_head(message);
    }

    /// As [`Interrupt::tell_if_it_lasts`](crate::wire::executor::Interrupt::tell_if_it_lasts).
    pub(crate) fn tell_if_it_lasts(&mut self, execution: &Execution) -> bool {
        if self.count == 0 || self.is_told {
            return false;
        }
        if !std::mem::replace(&mut self.was_seen, true) {
            return true;
        }
        self.is_told = true;
        self.changed = false;
        self.tell(execution);
        false
    }

    /// While all of this is waited for, the process runs something else, or no longer.
    pub(crate) fn cpus_are_free(&mut self, execution: &Execution, are_free: bool) {
        if self.count == 0 || self.frees_cpus == are_free {
            return;
        }
        self.frees_cpus = are_free;
        if !are_free {
            let resumed = HeadMessage::Resumed { lease: execution.lease, task: execution.task };
            execution.session.process().tell_head(resumed);
        }
        self.tell(execution);
    }

    fn describe(&self, execution: &Execution) -> Wait {
        let on = self.on.iter().take(TOLD).map(|(task, (_, actor))| (*task, *actor)).collect();
        Wait { task: execution.task, name: execution.name.to_string(), actor: execution.actor, on }
    }

    fn changed(&mut self, execution: &Arc<Execution>) {
        self.changed = true;
        if !self.is_told {
            return;
        }
        if !std::mem::replace(&mut self.is_told_later, true) {
            let telling = tell_later(Arc::downgrade(execution));
            drop(execution.session.process().io().spawn(telling));
        }
    }
}

async fn tell_later(execution: Weak<Execution>) {
    let mut after = TOLD_AFTER;
    loop {
        tokio::time::sleep(after).await;
        let Some(execution) = execution.upgrade() else { return };
        let mut waits = execution.waits.lock();
        if waits.count == 0 || !waits.is_told || !std::mem::take(&mut waits.changed) {
            waits.is_told_later = false;
            return;
        }
        // Without a lease: that its CPUs are free is known already.
        let wait = waits.describe(&execution);
        execution.session.process().tell_head(HeadMessage::Waiting { lease: None, wait });
        after = (after * 2).min(TOLD_AT_LEAST);
    }
}

impl Process {
    /// Has the head told of the waits at home that last: a deadlock may be among them.
    fn look_at_waits(&self) {
        if self.wire.looks_at_waits.swap(true, Ordering::SeqCst) {
            return;
        }
        let process = self.clone();
        self.vital("looking at what waits", async move {
            loop {
                tokio::time::sleep(TOLD_AFTER).await;
                let waits: Vec<_> = process.wire.waits.iter().map(|waiting| waiting.clone()).collect();
                let is_untold = waits.iter().filter(|waiting| waiting.tell_if_it_lasts()).count() > 0;
                let may_be_stuck = process.executor().is_some_and(|executor| executor.look_at_home());
                let go_on = is_untold || may_be_stuck;
                if !go_on && !process.has_news_after_looking() {
                    return;
                }
            }
        });
    }

    /// Nobody looks any more. Whether something has begun to wait meanwhile, which has found that somebody does.
    fn has_news_after_looking(&self) -> bool {
        self.wire.looks_at_waits.store(false, Ordering::SeqCst);
        let waits: Vec<_> = self.wire.waits.iter().map(|waiting| waiting.clone()).collect();
        let has_news = waits.iter().filter(|waiting| waiting.tell_if_it_lasts()).count() > 0;
        has_news && !self.wire.looks_at_waits.swap(true, Ordering::SeqCst)
    }
}

/// While it lives, the execution waits.
pub struct Waiting {
    listener: Listener,
    on: Vec<(TaskId, Option<ActorId>)>,
}

impl Waiting {
    /// The current execution waits for these tasks; none outside of a task.
    pub(crate) fn begin(on: Vec<(TaskId, Option<ActorId>)>) -> Option<Waiting> {
        let execution = context::current()?;
        let process = execution.session.process();
        process.attend();
        // Held while others are told, so that they hear of it in order.
        let mut waits = execution.waits.lock();
        waits.add(&on);
        if waits.count == 1 {
            process.wire.waits.insert(execution.task, execution.clone());
            waits.changed = false;
            if execution.at_home {
                if let Some(executor) = process.executor() {
                    executor.begin_wait_at_home(execution.task, is_blocked());
                }
                // Most of these are over at once.
                (waits.is_told, waits.was_seen) = (false, false);
                process.look_at_waits();
            } else {
                let goes_on = process.executor().is_some_and(|executor| executor.begin_wait());
                waits.is_told = true;
                waits.frees_cpus = !goes_on;
                waits.tell(&execution);
            }
        } else {
            if execution.at_home
                && is_blocked()
                && let Some(executor) = process.executor()
            {
                executor.begin_wait_at_home(execution.task, true);
            }
            waits.changed(&execution);
        }
        drop(waits);
        Some(Waiting { listener: Listener::new(execution), on })
    }

    /// Why it must end, if it must; otherwise `cx` is woken when it must.
    pub(crate) fn poll_interrupted(&mut self, cx: &Context<'_>) -> Poll<Error> {
        self.listener.poll_interrupted(&self.on, cx)
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let execution = self.listener.execution();
        let process = execution.session.process();
        let mut waits = execution.waits.lock();
        waits.remove(&self.on);
        if waits.count > 0 {
            return waits.changed(execution);
        }
        process.wire.waits.remove(&execution.task);
        if waits.is_told {
            process.tell_head(HeadMessage::Resumed { lease: execution.lease, task: execution.task });
        }
        match process.executor() {
            Some(executor) if execution.at_home => executor.end_wait_at_home(execution.task),
            Some(executor) => executor.end_wait(),
            None => {}
        }
    }
}
