//! What an execution waits for, and what that means for its process and for the head.
//!
//! An execution may wait for several things at once, as with `join!`. It waits as long as any of these waits lasts: its
//! process takes no tasks then, and its CPUs are free for others. The head is told of the first wait at once, of others
//! only if they last, since it needs them for deadlocks alone.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll};
use std::time::Duration;

use wingbeat_core::error::Error;
use wingbeat_core::{ActorId, TaskId};
use wingbeat_net::messages::{HeadMessage, Wait};

use crate::session::context::{self, Execution, Listener};

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

    fn add(&mut self, on: &[(TaskId, Option<ActorId>)]) {
        self.count += 1;
        for (task, actor) in on {
            self.on.entry(*task).or_insert((0, *actor)).0 += 1;
        }
    }

    fn remove(&mut self, on: &[(TaskId, Option<ActorId>)]) {
        self.count -= 1;
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
        if self.count > 0 {
            let message = HeadMessage::Waiting { lease: execution.lease, wait: self.describe(execution) };
            execution.session.process().tell_head(message);
        }
    }

    fn describe(&self, execution: &Execution) -> Wait {
        let on = self.on.iter().take(TOLD).map(|(task, (_, actor))| (*task, *actor)).collect();
        Wait { task: execution.task, name: execution.name.to_string(), actor: execution.actor, on }
    }

    fn changed(&mut self, execution: &Arc<Execution>) {
        self.changed = true;
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
        if waits.count == 0 || !std::mem::take(&mut waits.changed) {
            waits.is_told_later = false;
            return;
        }
        // Without a lease: that its CPUs are free is known already.
        let wait = waits.describe(&execution);
        execution.session.process().tell_head(HeadMessage::Waiting { lease: None, wait });
        after = (after * 2).min(TOLD_AT_LEAST);
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
        // Held while others are told, so that they hear of it in order.
        let mut waits = execution.waits.lock();
        waits.add(&on);
        if waits.count == 1 {
            if let Some(executor) = process.executor() {
                executor.begin_wait();
            }
            process.wire.waits.insert(execution.task, execution.clone());
            waits.changed = false;
            let wait = waits.describe(&execution);
            process.tell_head(HeadMessage::Waiting { lease: execution.lease, wait });
        } else {
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
        process.tell_head(HeadMessage::Resumed { lease: execution.lease, task: execution.task });
        if let Some(executor) = process.executor() {
            executor.end_wait();
        }
    }
}
