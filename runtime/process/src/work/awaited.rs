//! What one wait of an execution is for.

use std::sync::Arc;

use wingbeat_core::TaskId;
use wingbeat_net::messages::{Await, AwaitedTask, Callee};

use super::waits::NEVER;
use crate::owner::Owner;
use crate::owner::object::{Handle, Object, Producer};
use crate::owner::streams::Cell;

/// Of so many tasks the head is told where one that is never done is enough: the first ones, which a deadlock leaves over when others are done.
const TOLD: usize = 256;

/// So many of which some are enough are told of only if the wait lasts.
const MANY: usize = 16;

/// A task that is waited for.
#[derive(Clone)]
pub(crate) struct On {
    pub task: TaskId,
    /// What it is a call of.
    producer: Option<Producer>,
    /// What is waited for of it, which may be here before whoever waits has looked.
    what: What,
}

#[derive(Clone)]
enum What {
    Value(Arc<Object>),
    NextItem(Arc<Cell>),
    /// That it goes on.
    Task,
}

impl On {
    /// The value of an object.
    pub(crate) fn value(of: &Handle) -> On {
        On { task: of.id().task, producer: of.producer(), what: What::Value(of.object().clone()) }
    }

    /// The next item of a stream.
    pub(crate) fn next_item(task: TaskId, producer: Option<Producer>, of: &Arc<Cell>) -> On {
        On { task, producer, what: What::NextItem(of.clone()) }
    }

    /// That a task goes on.
    pub(crate) fn task(task: TaskId) -> On {
        On { task, producer: None, what: What::Task }
    }

    /// What it waits for itself before it is submitted.
    fn after(&self) -> Vec<(TaskId, Option<Producer>)> {
        match &self.what {
            What::Value(object) => {
                Owner::of_object(object).map(|owner| owner.arguments_of(self.task)).unwrap_or_default()
            }
            What::NextItem(_) | What::Task => Vec::new(),
        }
    }

    fn is_here(&self) -> bool {
        match &self.what {
            What::Value(object) => object.is_ready(),
            What::NextItem(cell) => cell.lock().has_next(),
            What::Task => false,
        }
    }
}

/// What one wait is for: enough of these.
#[derive(Clone)]
pub(crate) struct Awaited {
    on: Arc<[On]>,
    /// It never ends if so many of them are never done.
    ends_without: usize,
}

impl Awaited {
    /// All of these.
    pub(crate) fn all(on: impl IntoIterator<Item = On>) -> Awaited {
        Awaited { on: on.into_iter().collect(), ends_without: 1 }
    }

    /// So many of these, whichever; nobody, if there are none.
    pub(crate) fn some(count: usize, on: impl IntoIterator<Item = On>) -> Awaited {
        let on: Arc<[On]> = on.into_iter().collect();
        let ends_without = (on.len() + 1).saturating_sub(count).max(1);
        Awaited { on, ends_without }
    }

    /// Somebody who is no task.
    pub(crate) fn nobody() -> Awaited {
        Awaited::all([])
    }

    /// Whether enough of it is here, which whoever waits has not looked at.
    pub(crate) fn is_here(&self) -> bool {
        !self.on.is_empty() && self.on.iter().filter(|on| !on.is_here()).count() < self.ends_without
    }

    /// Whether one of several is enough, and there are many: it is hardly ever in vain.
    pub(crate) fn is_for_some_of_many(&self) -> bool {
        self.ends_without > MANY
    }

    pub(crate) fn is_for(&self, task: TaskId) -> bool {
        self.on.iter().any(|on| on.task == task)
    }

    pub(crate) fn first(&self) -> Option<TaskId> {
        self.on.first().map(|on| on.task)
    }

    /// The first tasks, for people.
    pub(crate) fn first_few(&self) -> Await {
        Await { on: self.told(MANY).0.on, ends_without: NEVER }
    }

    /// As the head is told, without what is here, and with so many tasks at most; and whether these are all.
    pub(crate) fn told(&self, most: usize) -> (Await, bool) {
        // All are needed to know that none of them is done.
        let most = most.min(if self.ends_without > TOLD { usize::MAX } else { TOLD });
        let callee = |call: &Producer| Callee { actor: call.actor, group: call.group.into() };
        let call = |producer: Option<Producer>| producer.as_ref().map(callee);
        let mut missing = self.on.iter().filter(|on| !on.is_here());
        let on = missing.by_ref().take(most).map(|on| AwaitedTask {
            task: on.task,
            callee: call(on.producer),
            after: on.after().into_iter().map(|(task, producer)| (task, call(producer))).collect(),
        });
        let told = Await { on: on.collect(), ends_without: u32::try_from(self.ends_without).unwrap_or(NEVER) };
        (told, missing.next().is_none())
    }
}
