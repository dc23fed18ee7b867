//! Tasks and calls that were submitted and are not done: what user threads have asked for, and the decisions.
//!
//! ```text
//!   remote() ── encode ──▶ inbox ──▶ take_requests ──▶ Dispatch / Calls ──▶ peers, head
//!                 │ an argument is not there yet
//!                 └──▶ Unresolved ── the last one arrives ──▶ inbox
//! ```

use std::sync::Arc;
use std::sync::atomic::AtomicU32;

use dashmap::DashMap;
use parking_lot::Mutex;
use tokio::sync::Notify;
use wingbeat_core::error::Error;
use wingbeat_core::spec::{ActorState, Arg, Outputs};
use wingbeat_core::{ActorId, TaskId};

use crate::owner::calls::{self, Call, Calls};
use crate::owner::dispatch::{self, Dispatch, Task};
use crate::owner::recipe::Recipe;
use crate::owner::timeouts::Timeouts;
use crate::owner::unresolved::Unresolved;
use crate::owner::wanted::Wanted;

/// A task or call that is not to run.
#[derive(Clone, Copy)]
pub(crate) struct Cancel {
    pub task: TaskId,
    pub outputs: Outputs,
    pub force: bool,
    /// It was found nowhere. It may have been on its way from [`Unresolved`] into the inbox, which was already emptied; the
    /// second look comes after it.
    pub again: bool,
}

/// What user threads ask for.
pub(crate) enum Request {
    Task(Task),
    Call {
        actor: ActorId,
        class_name: Arc<str>,
        call: Call,
    },
    CallReady {
        actor: ActorId,
        id: TaskId,
        args: Result<Vec<Arg>, Error>,
    },
    Cancel(Cancel),
    CancelChildren {
        parent: TaskId,
        again: bool,
    },
    Forget(ActorId),
    Killed {
        actor: ActorId,
        may_restart: bool,
    },
    Terminate(ActorId),
    /// All copies of outputs of this task are lost. Taken in by the thread that also takes in results: a task that makes
    /// another output of the same task again is then either under way or over, and not in between.
    MakeAgain(Arc<Recipe>, String),
}

/// Tasks and calls of this process that are not done.
#[derive(Default)]
pub(crate) struct Submission {
    inbox: Mutex<Inbox>,
    /// Told when there is something to take in, or a timer may be needed.
    pub(crate) wake: Notify,
    pub(super) core: Mutex<Core>,
    /// Tasks and calls some of whose arguments are not there yet.
    pub(crate) unresolved: DashMap<TaskId, Arc<Unresolved>>,
    /// Tasks and calls that may take a limited time.
    pub(crate) timeouts: Timeouts,
    /// How many nodes there are, as far as the head has said.
    pub(super) nodes: AtomicU32,
}

#[derive(Default)]
struct Inbox {
    requests: Vec<Request>,
    /// Set at the end: a request holds handles, and so the session, and nobody would take it out any more.
    closed: bool,
}

/// What is decided under one lock.
#[derive(Default)]
pub(super) struct Core {
    pub dispatch: Dispatch,
    pub calls: Calls,
}

/// What is to be done after the lock is gone.
#[derive(Default)]
pub(super) struct Todo {
    pub dispatch: Vec<dispatch::Action>,
    pub calls: Vec<calls::Action>,
    /// Tasks that are cancelled before their arguments are there.
    pub unresolved: Vec<Arc<Unresolved>>,
    /// Objects that were lost, and why.
    pub lost: Vec<(Arc<Recipe>, String)>,
    /// What was found nowhere, to be looked for once more.
    pub not_found: Vec<Request>,
}

impl Submission {
    /// Queues a request and wakes the IO thread if it is the first.
    pub(crate) fn request(&self, request: Request) {
        let mut inbox = self.inbox.lock();
        if inbox.closed {
            drop(inbox);
            return drop(request);
        }
        inbox.requests.push(request);
        let first = inbox.requests.len() == 1;
        drop(inbox);
        if first {
            self.wake.notify_one();
        }
    }

    /// What was asked for since the last time, in order.
    pub(super) fn take(&self) -> Vec<Request> {
        std::mem::take(&mut self.inbox.lock().requests)
    }

    /// Whether it takes no more requests.
    pub(super) fn is_closed(&self) -> bool {
        self.inbox.lock().closed
    }

    /// Takes no more requests. Whoever waits for what they ask for has been told that the session is over.
    pub(crate) fn close(&self) {
        let mut inbox = self.inbox.lock();
        inbox.closed = true;
        let requests = std::mem::take(&mut inbox.requests);
        drop(inbox);
        drop(requests);
        self.wake.notify_one();
    }

    #[cfg(test)]
    pub(crate) fn what_is_left(&self) -> Vec<String> {
        let mut left: Vec<String> =
            self.unresolved.iter().map(|waiting| format!("{} unresolved", waiting.key())).collect();
        let core = self.core.lock();
        left.extend(core.dispatch.what_is_left());
        left.extend(core.calls.what_is_left());
        let asked = self.inbox.lock().requests.len();
        left.extend((asked > 0).then(|| format!("{asked} requests")));
        left
    }

    /// Looks at what is not done.
    pub(crate) fn look<R>(&self, look: impl FnOnce(&Dispatch, &Calls) -> R) -> R {
        let core = self.core.lock();
        look(&core.dispatch, &core.calls)
    }
}

impl Core {
    /// Cancels what is found; the rest is looked for once more.
    pub(super) fn cancel(
        &mut self,
        cancels: Vec<Cancel>,
        unresolved: &DashMap<TaskId, Arc<Unresolved>>,
        todo: &mut Todo,
    ) {
        if cancels.is_empty() {
            return;
        }
        let mut wanted = Wanted::default();
        for cancel in &cancels {
            wanted.insert(cancel.task, cancel.force);
        }
        self.calls.cancel(&mut wanted, &mut todo.calls);
        self.dispatch.cancel(&mut wanted, &mut todo.dispatch);
        for cancel in cancels.into_iter().filter(|cancel| wanted.contains(cancel.task)) {
            match unresolved.get(&cancel.task) {
                Some(waiting) => todo.unresolved.push(waiting.clone()),
                None if cancel.again => todo.not_found.push(Request::Cancel(cancel)),
                None => todo.not_found.push(Request::Cancel(Cancel { again: true, ..cancel })),
            }
        }
    }

    pub(super) fn take_in(&mut self, request: Request, unresolved: &DashMap<TaskId, Arc<Unresolved>>, todo: &mut Todo) {
        match request {
            Request::Task(task) => self.dispatch.submit(task, &mut todo.dispatch),
            Request::Call { actor, class_name, call } => {
                self.calls.submit(actor, &class_name, call, &mut todo.calls);
                self.calls.settle(actor, &mut todo.calls);
            }
            Request::CallReady { actor, id, args } => {
                match args {
                    Ok(args) => self.calls.resolved(actor, id, args),
                    Err(error) => self.calls.fail_unresolved(actor, id, error, &mut todo.calls),
                }
                self.calls.settle(actor, &mut todo.calls);
            }
            Request::Cancel(cancel) => self.cancel(vec![cancel], unresolved, todo),
            Request::CancelChildren { parent, again } => {
                let mut children = self.dispatch.children_of(parent);
                children.extend(self.calls.children_of(parent));
                let waiting = unresolved.iter().filter(|waiting| waiting.parent == Some(parent));
                children.extend(waiting.map(|waiting| *waiting.key()));
                children.sort_unstable();
                children.dedup();
                let cancel = |task| Cancel { task, outputs: Outputs::Fixed(1), force: false, again: false };
                self.cancel(children.into_iter().map(cancel).collect(), unresolved, todo);
                if !again {
                    todo.not_found.push(Request::CancelChildren { parent, again: true });
                }
            }
            Request::Terminate(actor) => self.calls.terminate(actor, &mut todo.calls),
            Request::Forget(actor) => self.calls.forget(actor),
            Request::MakeAgain(recipe, why) => todo.lost.push((recipe, why)),
            Request::Killed { actor, may_restart } => {
                let cause = Error::ActorEnded { by: "kill".into() };
                match may_restart {
                    true => self.calls.life_ended(actor, &cause, &mut todo.calls),
                    false => {
                        let state = ActorState::Dead { cause: Box::new(cause) };
                        self.calls.actor_is(actor, state, &mut todo.calls);
                    }
                }
            }
        }
    }
}
