//! What a task of this process waits for, or where it is.

use wingbeat_core::TaskId;
use wingbeat_core::value::ObjectValue;
use wingbeat_net::messages::{Explanation, TaskStanding};

use crate::owner::Owner;
use crate::owner::calls::CallStanding;
use crate::owner::dispatch::DispatchStanding;
use crate::owner::submission::Submission;
use crate::owner::unresolved::Unresolved;

fn about(task: TaskId, name: &str, state: String) -> Explanation {
    Explanation { subject: format!("{name} ({task})"), state, ..Explanation::default() }
}

fn behind(count: usize) -> String {
    match count {
        0 => "it is the next".into(),
        count => format!("{count} others are before it"),
    }
}

impl Owner {
    /// What a task that was submitted here waits for, or where it is.
    pub(crate) fn standing(&self, task: TaskId) -> TaskStanding {
        let unresolved = self.submission.unresolved.get(&task).map(|waiting| waiting.clone());
        match self.submission.standing_of_call(task) {
            Some((name, actor, CallStanding::Queued { before, is_resolved })) => {
                let mut explanation = about(task, &name, "waits to be sent to its actor".into());
                if let Some(waiting) = unresolved.filter(|_| !is_resolved) {
                    explanation.state = "waits for its arguments".into();
                    self.explain_missing(&waiting, &mut explanation);
                    return TaskStanding::Known(explanation);
                }
                explanation.reasons.push(format!("of this caller's calls, {}", behind(before)));
                return TaskStanding::WaitsForActor(explanation, actor);
            }
            Some((name, actor, CallStanding::Sent { before })) => {
                let mut explanation = about(task, &name, "was sent to its actor".into());
                explanation.reasons.push(format!("of this caller's unfinished calls, {}", behind(before)));
                return TaskStanding::WaitsForActor(explanation, actor);
            }
            None => {}
        }
        if let Some(waiting) = unresolved {
            let mut explanation = about(task, &waiting.name, "waits for its arguments".into());
            self.explain_missing(&waiting, &mut explanation);
            return TaskStanding::Known(explanation);
        }
        match self.submission.standing_of_task(task) {
            Some((name, DispatchStanding::Resting { why, pause_ms })) => {
                let state = format!("waits to be tried again, {pause_ms} ms after its last attempt ended");
                let mut explanation = about(task, &name, state);
                explanation.reasons.push(why);
                TaskStanding::Known(explanation)
            }
            Some((name, DispatchStanding::Ready { before, shape })) => {
                let mut explanation = about(task, &name, "waits for a lease".into());
                explanation.reasons.push(format!("of this process's tasks of the same shape, {}", behind(before)));
                TaskStanding::WaitsForLease(explanation, shape)
            }
            Some((name, DispatchStanding::Pushed { before, lease, pid })) => {
                let state = match before {
                    0 => format!("runs in the worker process with pid {pid}, or is about to"),
                    before => format!("is queued in the worker process with pid {pid}, behind {before} others"),
                };
                let mut explanation = about(task, &name, state);
                if before == 0 {
                    explanation.help.push(format!("`wingbeat stack {task}` shows which functions it is in"));
                }
                TaskStanding::OnLease(explanation, lease)
            }
            Some((name, DispatchStanding::AtHome)) => {
                let state = "runs in the process of the task that submitted it, which waits (isolated tasks do not), or is about to";
                let mut explanation = about(task, &name, state.into());
                explanation.help.push(format!("`wingbeat stack {task}` shows which functions it is in"));
                TaskStanding::InProcess(explanation, self.id)
            }
            Some((name, DispatchStanding::Undecided)) => {
                let state = "has failed, and waits for a `retry_if` of the program to say whether it runs again".into();
                TaskStanding::Known(about(task, &name, state))
            }
            None => TaskStanding::Known(self.explain_output(task)),
        }
    }

    fn explain_missing(&self, waiting: &Unresolved, explanation: &mut Explanation) {
        for (index, handle) in waiting.missing() {
            let id = handle.id();
            let whose = if id.owner() == self.id { String::new() } else { format!(", which {} owns", id.owner()) };
            explanation.reasons.push(format!("its argument {index} is {id}{whose}, and is not there yet"));
            explanation.help.push(format!("`wingbeat why {}` says what that waits for", id.task));
        }
    }

    fn explain_output(&self, task: TaskId) -> Explanation {
        let object = self.objects.get(task.output(0));
        match object.as_ref().map(|object| object.value()) {
            Some(Some(ObjectValue::Failed(error))) => {
                Explanation { reasons: vec![error.to_string()], ..about(task, "task", "failed".into()) }
            }
            Some(Some(_)) => about(task, "task", "is done".into()),
            Some(None) => about(task, "task", "is on its way to the queue; ask again".into()),
            None => about(task, "task", "is done, or was never submitted: nobody holds its result".into()),
        }
    }
}

impl Submission {
    fn standing_of_task(&self, task: TaskId) -> Option<(String, DispatchStanding)> {
        self.look(|dispatch, _| dispatch.standing(task))
    }

    fn standing_of_call(&self, task: TaskId) -> Option<(String, wingbeat_core::ActorId, CallStanding)> {
        self.look(|_, calls| calls.standing(task))
    }
}
