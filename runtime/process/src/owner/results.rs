//! Results of tasks and calls, what they mean for their outputs, and how an object gets its value.

use std::sync::Arc;

use wingbeat_core::error::Error;
use wingbeat_core::spec::{Arg, Outcome, Outputs, TaskResult, TaskSpec};
use wingbeat_core::value::ObjectValue;
use wingbeat_core::{ObjectId, ProcessId, TaskId};
use wingbeat_net::messages::{PeerMessage, Work};

use crate::owner::Owner;
use crate::owner::dispatch::{Settled, Task};
use crate::owner::object::{Handle, Held, Object};
use crate::owner::objects::too_many;
use crate::owner::recipe::Recipe;
use crate::owner::retrying::RetryOn;
use crate::owner::submission::Request;

impl Owner {
    /// Results have come from a worker process.
    pub(super) fn results(self: &Arc<Self>, from: ProcessId, results: Vec<TaskResult>) {
        let mut arrived = Arrived::default();
        arrived.done.reserve_exact(results.len());
        // Results whose sender holds refs, and those refs.
        let mut received: Vec<(TaskId, Vec<ObjectId>)> = Vec::new();
        self.with_core(|core, now, todo| {
            for mut result in results {
                if let Outcome::StreamEnded(count) = result.outcome
                    && !self.streams.has_all(result.id, count)
                {
                    // Contact was lost between its items and its end.
                    result.outcome = Outcome::Failed(Box::new(items_lost(result.id, from)));
                }
                if let Some(refs) = refs_of(&result.outcome) {
                    received.push((result.id, refs));
                }
                if let Some((actor, call)) = core.calls.finished(from, result.id, result.attempt) {
                    core.calls.settle(actor, &mut todo.calls);
                    arrived.finished.push(call.held);
                    arrived.done.push((call.spec, result.outcome));
                    continue;
                }
                let failed = match &result.outcome {
                    Outcome::Failed(error) => Some(&**error),
                    _ => None,
                };
                let settled =
                    core.dispatch.finished(from, result.id, failed, result.ran_nanos, now, &mut todo.dispatch);
                arrived.add(settled, result.id, result.outcome);
            }
        });
        self.settle_arrived(arrived);
        for (task, refs) in received {
            // The sender holds the refs until they are registered with their owners.
            self.confirm(from, &refs, Work::Received(vec![task]).into());
        }
    }

    /// A task of this process that runs in it has this result, without refs, and is no stream. Any thread may say so: for tasks
    /// and calls, nothing follows that is said to others. Answers with the result if it does not run here.
    pub(crate) fn result_at_home(self: &Arc<Self>, result: TaskResult) -> Result<(), TaskResult> {
        let now_ms = self.outside.now_ms();
        let failed = match &result.outcome {
            Outcome::Failed(error) => Some(&**error),
            _ => None,
        };
        let mut core = self.submission.core.lock();
        let settled = core.dispatch.finished_at_home(result.id, failed, result.ran_nanos, now_ms);
        drop(core);
        let Some(settled) = settled else { return Err(result) };
        if let Settled::Retried = settled {
            self.submission.wake.notify_one();
        }
        let mut arrived = Arrived::default();
        arrived.add(settled, result.id, result.outcome);
        self.settle_arrived(arrived);
        Ok(())
    }

    fn settle_arrived(self: &Arc<Self>, arrived: Arrived) {
        let Arrived { done, stored_or_lost, late, asked, finished } = arrived;
        for (spec, outcome) in done {
            self.settle_outputs(&spec, outcome, None);
        }
        for (task, outcome) in stored_or_lost {
            if let Outcome::Failed(error) = &outcome
                && let Error::ObjectLost { object, why } = &**error
            {
                self.argument_lost(task, *object, why);
            } else {
                let recipe = self.recipe(&task);
                self.settle_outputs(&task.spec, outcome, recipe.as_ref());
            }
        }
        drop(finished);
        for (task, outcome) in late {
            self.discard_late(task, outcome);
        }
        for (task, retry_on, error) in asked {
            self.ask_whether_again(task, retry_on, error);
        }
    }

    /// Has user code say whether a task that has failed is tried again.
    fn ask_whether_again(self: &Arc<Self>, task: TaskId, retry_on: RetryOn, error: Box<Error>) {
        let question = Question { owner: self.clone(), task, error: Some(error), again: false };
        self.outside.run(Box::new(move || question.ask(&retry_on)));
    }

    /// Gives a task's outputs their values, and those in shared memory the recipe for making them again.
    pub(super) fn settle_outputs(self: &Arc<Self>, spec: &TaskSpec, outcome: Outcome, recipe: Option<&Arc<Recipe>>) {
        self.submission.timeouts.end(spec.id);
        if let Outputs::Stream { .. } = spec.outputs {
            match outcome {
                Outcome::StreamEnded(count) => self.delete_left(spec.id, self.streams.ended(spec.id, count)),
                Outcome::Failed(error) => self.delete_left(spec.id, self.streams.failed(spec.id, *error)),
                Outcome::One(_) | Outcome::Many(_) => {}
            }
            return;
        }
        match outcome {
            Outcome::One(value) => self.settle_output(spec.id, 0, value, recipe),
            Outcome::Many(values) => {
                for (index, value) in values.into_iter().enumerate() {
                    self.settle_output(spec.id, index as u32, value, recipe);
                }
            }
            Outcome::Failed(error) => {
                let Outputs::Fixed(count) = spec.outputs else { return };
                for index in 0..count {
                    self.settle_output(spec.id, index, ObjectValue::Failed(error.clone()), None);
                }
            }
            Outcome::StreamEnded(_) => {}
        }
    }

    fn settle_output(self: &Arc<Self>, task: TaskId, index: u32, value: ObjectValue, recipe: Option<&Arc<Recipe>>) {
        let id = task.output(index);
        match self.objects.get(id) {
            Some(object) => {
                if let (ObjectValue::Stored(stored), Some(current)) = (&value, object.value()) {
                    // Another attempt's: the first value stands.
                    self.delete_other_copies(id, stored, &current);
                    return;
                }
                if let (ObjectValue::Stored(_), Some(recipe)) = (&value, recipe) {
                    object.set_recipe(recipe.clone());
                }
                let contained = match value.refs() {
                    None => Vec::new(),
                    refs => self.hold_refs(refs),
                };
                self.resolve_object(&object, value, contained);
            }
            // Nobody holds a ref any more.
            None => {
                if let ObjectValue::Stored(stored) = &value {
                    self.delete_stored(id, stored);
                }
            }
        }
    }

    /// Gives a task's outputs an error instead of values.
    pub(crate) fn fail_outputs(self: &Arc<Self>, task: TaskId, outputs: Outputs, error: &Error) {
        match outputs {
            Outputs::Stream { .. } => self.delete_left(task, self.streams.failed(task, error.clone())),
            Outputs::Fixed(count) => {
                for index in 0..count {
                    if let Some(object) = self.objects.get(task.output(index)) {
                        self.resolve_object(&object, ObjectValue::Failed(Box::new(error.clone())), Vec::new());
                    }
                }
            }
        }
    }
}

/// Results, and what is to be done with each after the lock is gone.
#[derive(Default)]
struct Arrived {
    done: Vec<(Arc<TaskSpec>, Outcome)>,
    /// Those of which more than the spec is needed.
    stored_or_lost: Vec<(Task, Outcome)>,
    /// What an attempt has stored that counts no more.
    late: Vec<(TaskId, Outcome)>,
    /// Of these, user code says whether they are tried again.
    asked: Vec<(TaskId, RetryOn, Box<Error>)>,
    /// Handles may free objects.
    finished: Vec<Held>,
}

impl Arrived {
    fn add(&mut self, settled: Settled, task: TaskId, outcome: Outcome) {
        let outcome = match (&settled, outcome) {
            (Settled::Done(task), Outcome::Failed(error)) => Outcome::Failed(Box::new(task.gives_up(*error))),
            (_, outcome) => outcome,
        };
        match settled {
            Settled::Done(task) if has_stored(&outcome) || argument_lost(&task, &outcome) => {
                self.stored_or_lost.push((task, outcome));
            }
            Settled::Done(task) => {
                self.finished.push(task.held);
                self.done.push((task.spec, outcome));
            }
            Settled::Unknown if has_stored(&outcome) => self.late.push((task, outcome)),
            Settled::Asks(retry_on) => {
                if let Outcome::Failed(error) = outcome {
                    self.asked.push((task, retry_on, error));
                }
            }
            Settled::Retried | Settled::Unknown => {}
        }
    }
}

/// Whether a task that has failed is tried again. Answered when it is dropped: with no where user code could not be asked.
struct Question {
    owner: Arc<Owner>,
    task: TaskId,
    error: Option<Box<Error>>,
    again: bool,
}

impl Question {
    fn ask(mut self, retry_on: &RetryOn) {
        self.again = self.error.as_ref().is_some_and(|error| retry_on.ask(error));
    }
}

impl Drop for Question {
    fn drop(&mut self) {
        if let Some(error) = self.error.take() {
            self.owner.submission.request(Request::Decided { task: self.task, again: self.again, error });
        }
    }
}

fn has_stored(outcome: &Outcome) -> bool {
    match outcome {
        Outcome::One(value) => matches!(value, ObjectValue::Stored(_)),
        Outcome::Many(values) => values.iter().any(|value| matches!(value, ObjectValue::Stored(_))),
        Outcome::StreamEnded(_) | Outcome::Failed(_) => false,
    }
}

/// Whether the task could not begin, because the copies of an argument that it was told of are gone.
fn argument_lost(task: &Task, outcome: &Outcome) -> bool {
    let Outcome::Failed(error) = outcome else { return false };
    let Error::ObjectLost { object, .. } = &**error else { return false };
    let known =
        task.spec.args.iter().any(|arg| matches!(arg, Arg::Stored(id, at) if id == object && !at.nodes.is_empty()));
    known && !task.cancelled
}

/// The refs in a result, if its sender waits to hear that they arrived.
fn refs_of(outcome: &Outcome) -> Option<Vec<ObjectId>> {
    let of = |value: &ObjectValue| value.refs().map(|refs| refs.ids.clone());
    match outcome {
        Outcome::One(value) => of(value),
        Outcome::Many(values) => values.iter().filter_map(of).reduce(|mut all, more| {
            all.extend(more);
            all
        }),
        Outcome::StreamEnded(_) | Outcome::Failed(_) => None,
    }
}

fn items_lost(task: TaskId, from: ProcessId) -> Error {
    Error::ContactLost {
        what: format!("the stream of {task}"),
        who: format!("its worker process, {from}"),
        why: "contact was lost before all items had arrived".into(),
        attempts: 1,
    }
}

impl Owner {
    /// Sets an object's value and tells everybody who waits for it.
    pub(crate) fn resolve_object(self: &Arc<Self>, object: &Object, value: ObjectValue, contained: Vec<Handle>) {
        let stored_at = match &value {
            ObjectValue::Stored(stored) => stored.nodes.clone(),
            ObjectValue::Inline(_) | ObjectValue::Failed(_) => Vec::new(),
        };
        self.objects.stored(object.id(), &stored_at);
        let announce = object.resolve(value, contained);
        if !stored_at.is_empty() {
            if let Some(value) = object.value() {
                // An earlier value may stand.
                let elsewhere = stored_at.into_iter().filter(|at| !value.is_stored_at(at.node));
                self.objects.not_stored(object.id(), &elsewhere.collect::<Vec<_>>());
            }
            if !self.objects.has(object) {
                // It was freed in the same moment, perhaps before its value was there to be deleted.
                self.freed_while_stored(object);
            }
        }
        self.value_is_known(object);
        self.shadow_changed(object);
        if announce.subscribers.is_empty() {
            return;
        }
        if let Some(value) = object.value() {
            for subscriber in announce.subscribers {
                self.send_value(subscriber, object.id(), value.clone());
            }
        }
    }

    /// Tells a borrower the value of an object of ours.
    pub(crate) fn send_value(self: &Arc<Self>, to: ProcessId, id: ObjectId, value: ObjectValue) {
        let value = match too_many(&value, || id.to_string()) {
            Some(error) => ObjectValue::Failed(Box::new(error)),
            None => value,
        };
        self.send_to(to, PeerMessage::Resolved(vec![(id, value)]));
    }
}
