//! Tasks and calls that were submitted and are not done: what user threads have asked for, and the decisions.
//!
//! ```text
//!   remote() ── encode ──▶ inbox ──▶ take_requests ──▶ Dispatch / Calls ──▶ peers, head
//!                 │ an argument is not there yet
//!                 └──▶ Unresolved ── the last one arrives ──▶ inbox
//! ```

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use dashmap::DashMap;
use parking_lot::Mutex;
use tokio::sync::Notify;
use wingbeat_core::error::Error;
use wingbeat_core::spec::{ActorState, Arg, Outcome, Outputs, TaskSpec};
use wingbeat_core::{ActorId, Incarnation, LeaseId, NodeId, ObjectId, ProcessId, TaskId};
use wingbeat_net::messages::{HeadEvent, HeadMessage, Work};

use crate::owner::Owner;
use crate::owner::calls::{self, Call, Calls};
use crate::owner::dispatch::{self, Dispatch, Grant, TakenHome, Task};
use crate::owner::locality::near_data;
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
    /// User code has said whether a task that has failed with this is tried again.
    Decided {
        task: TaskId,
        again: bool,
        error: Box<Error>,
    },
    Cancel(Cancel),
    /// Those that were submitted before this number was given.
    CancelChildren {
        parent: TaskId,
        before: u64,
        again: bool,
    },
    Forget(ActorId),
    /// The user has killed an actor in this life, if it was known.
    Killed {
        actor: ActorId,
        life: Option<Incarnation>,
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

/// Of so many actors it is looked whether calls to them are under way; each takes a few nanoseconds of each call that is waited for alone.
const ACTORS_LOOKED_AT: usize = 1_000;

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
    /// Queues a request, and has the first of them taken in. Where the IO rests, that is when somebody does it again.
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

    /// How many tasks and calls are not done.
    pub(crate) fn pending(&self) -> usize {
        let asked = self.inbox.lock().requests.len();
        let core = self.core.lock();
        asked + core.dispatch.pending() + core.calls.pending() + self.unresolved.len()
    }

    /// Whether one task or call at most is not done. With very many actors nobody looks, and there may be more.
    pub(crate) fn is_at_most_one(&self) -> bool {
        self.look(|_, calls| calls.actors() <= ACTORS_LOOKED_AT) && self.pending() <= 1
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
    /// Whether the head is to say why contact with somebody was lost.
    fn waits_for_causes(&self) -> bool {
        self.dispatch.waits_for_causes() || self.calls.waits_for_causes()
    }

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

    pub(super) fn take_in(
        &mut self,
        request: Request,
        unresolved: &DashMap<TaskId, Arc<Unresolved>>,
        now_ms: u64,
        todo: &mut Todo,
    ) {
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
            Request::Decided { task, again, error } => {
                self.dispatch.decided(task, again, *error, now_ms, &mut todo.dispatch);
            }
            Request::Cancel(cancel) => self.cancel(vec![cancel], unresolved, todo),
            Request::CancelChildren { parent, before, again } => {
                let mut children = self.dispatch.children_of(parent);
                children.extend(self.calls.children_of(parent));
                let waiting = unresolved.iter().filter(|waiting| waiting.parent == Some(parent));
                children.extend(waiting.map(|waiting| *waiting.key()));
                children.retain(|child| child.seq < before);
                children.sort_unstable();
                children.dedup();
                let cancel = |task| Cancel { task, outputs: Outputs::Fixed(1), force: false, again: false };
                self.cancel(children.into_iter().map(cancel).collect(), unresolved, todo);
                if !again {
                    todo.not_found.push(Request::CancelChildren { parent, before, again: true });
                }
            }
            Request::Terminate(actor) => self.calls.terminate(actor, &mut todo.calls),
            Request::Forget(actor) => self.calls.forget(actor),
            Request::MakeAgain(recipe, why) => todo.lost.push((recipe, why)),
            Request::Killed { actor, life, may_restart } => {
                let cause = Error::ActorEnded { by: "kill".into() };
                match may_restart {
                    true => self.calls.killed(actor, life, &cause, &mut todo.calls),
                    false => {
                        let state = ActorState::Dead { cause: Box::new(cause) };
                        self.calls.actor_is(actor, state, &mut todo.calls);
                    }
                }
            }
        }
    }
}

/// How often is looked whether there is a head again, while something waits for its word.
const HELD_LOOK_MS: u64 = 250;

/// What is decided under the lock is done after it.
impl Owner {
    pub(super) fn with_core<R>(self: &Arc<Self>, change: impl FnOnce(&mut Core, u64, &mut Todo) -> R) -> R {
        let mut todo = Todo::default();
        let mut core = self.submission.core.lock();
        let now_ms = self.outside.now_ms();
        let result = change(&mut core, now_ms, &mut todo);
        core.dispatch.settle(now_ms, &mut todo.dispatch);
        drop(core);
        self.perform(todo);
        // A timer may be needed now.
        self.submission.wake.notify_one();
        result
    }

    /// Takes in what user threads have asked for, and lets time pass. Answers in how many milliseconds it wants to be called
    /// again if nobody asks for anything.
    pub(crate) fn take_requests(self: &Arc<Self>) -> Option<u64> {
        let requests = self.submission.take();
        let unresolved = &self.submission.unresolved;
        let mut todo = Todo::default();
        let mut core = self.submission.core.lock();
        let now_ms = self.outside.now_ms();
        let mut cancels = Vec::new();
        for request in requests {
            match request {
                Request::Cancel(cancel) => cancels.push(cancel),
                other => {
                    core.cancel(std::mem::take(&mut cancels), unresolved, &mut todo);
                    core.take_in(other, unresolved, now_ms, &mut todo);
                }
            }
        }
        core.cancel(cancels, unresolved, &mut todo);
        let waits_for_causes = core.waits_for_causes();
        if waits_for_causes && !self.outside.has_head() {
            // What follows when the head tells no cause of a lost connection does not follow while there is no head.
            core.dispatch.no_cause_is_told(now_ms);
            core.calls.no_cause_is_told(now_ms);
        }
        core.dispatch.tick(now_ms, &mut todo.dispatch);
        let is_gone = |process| self.outside.is_gone(process);
        let next_call = core.calls.tick(now_ms, is_gone, &mut todo.calls);
        core.dispatch.settle(now_ms, &mut todo.dispatch);
        let next_task = core.dispatch.next_tick(now_ms);
        drop(core);
        self.perform(todo);
        // The head that comes back has about all of the time.
        let next_cause = waits_for_causes.then_some(HELD_LOOK_MS);
        [next_task, next_call, next_cause].into_iter().flatten().min()
    }

    /// The next task to run in this process while the one that submitted it waits, if `accepts` takes it. Whoever takes it sends its
    /// result.
    pub(crate) fn take_home(&self, accepts: impl Fn(&TaskSpec) -> bool) -> TakenHome {
        let now_ms = self.outside.now_ms();
        let mut core = self.submission.core.lock();
        let taken = core.dispatch.take_home(&mut self.submission.inbox.lock().requests, now_ms, accepts);
        drop(core);
        if let TakenHome::Task { opens: true, .. } = taken {
            self.submission.wake.notify_one();
        }
        taken
    }

    /// Whether [`Owner::take_home`] would answer with something. If not, [`Outside::has_work_at_home`](crate::owner::Outside) is told.
    pub(crate) fn asks_for_home(&self) -> bool {
        let mut core = self.submission.core.lock();
        core.dispatch.asks_for_home(&self.submission.inbox.lock().requests)
    }

    /// Nothing more is taken by [`Owner::take_home`] for now.
    pub(crate) fn closes_home(&self) {
        self.submission.core.lock().dispatch.home_is_closed();
    }

    fn perform(self: &Arc<Self>, todo: Todo) {
        for action in todo.dispatch {
            match action {
                dispatch::Action::Push { worker, lease, first, tasks } => {
                    self.outside.send(self, &worker, Work::Tasks { lease, first, tasks }.into());
                }
                dispatch::Action::Demand { shape, wanted, name } => {
                    let shape = (*shape).clone();
                    self.tell_head(HeadMessage::Demand { shape, wanted, name: name.to_string() });
                }
                dispatch::Action::Left { task, outputs, at } => self.outputs_left_over(task, outputs, &at),
                dispatch::Action::Return { lease } => self.tell_head(HeadMessage::ReturnLease(lease)),
                dispatch::Action::Abandon { lease } => self.tell_head(HeadMessage::AbandonLease(lease)),
                dispatch::Action::TakeBack { worker, lease, most, recalled } => {
                    self.send_to(worker, Work::TakeBack { lease, most, recalled }.into());
                }
                dispatch::Action::Cancel { worker, task, force } => {
                    self.send_to(worker, Work::Cancel { task, force }.into());
                }
                dispatch::Action::CancelAtHome { task, force } => {
                    self.send_to(self.id, Work::Cancel { task, force }.into());
                }
                dispatch::Action::AtHome => self.outside.has_work_at_home(),
                dispatch::Action::ArgumentLost { task, argument } => {
                    self.argument_lost(task, argument, "the nodes that had a copy of it have died");
                }
                dispatch::Action::Fail { task, error } => {
                    let error = self.for_want_of_descriptors(task.gives_up(error));
                    self.settle_outputs(&task.spec, Outcome::Failed(Box::new(error)), None);
                }
            }
        }
        for unresolved in todo.unresolved {
            self.cancel_unresolved(&unresolved);
        }
        for action in todo.calls {
            match action {
                calls::Action::Push { worker, actor, incarnation, calls } => {
                    self.outside.send(self, &worker, Work::Calls { actor, incarnation, calls }.into());
                }
                calls::Action::Watch(actor) => self.tell_head(HeadMessage::WatchActor(actor)),
                calls::Action::Over(actor, life) => self.tell_head(HeadMessage::LifeOver { actor, life }),
                calls::Action::Kill(actor) => self.tell_head(HeadMessage::KillActor { actor, may_restart: false }),
                calls::Action::Terminate(actor) => {
                    self.tell_head(HeadMessage::TerminateActor { actor, by: "terminate".into() });
                }
                calls::Action::Cancel { worker, task, force } => {
                    self.send_to(worker, Work::Cancel { task, force }.into());
                }
                calls::Action::Left { task, outputs, at } => self.outputs_left_over(task, outputs, &at),
                calls::Action::Fail { call, error } => {
                    if let Some((_, unresolved)) = self.submission.unresolved.remove(&call.spec.id) {
                        unresolved.give_up();
                    }
                    let error = self.for_want_of_descriptors(error);
                    self.settle_outputs(&call.spec, Outcome::Failed(Box::new(error)), None);
                }
                calls::Action::Answer { spec, error } => {
                    self.settle_outputs(&spec, Outcome::Failed(Box::new(error)), None);
                }
            }
        }
        for (recipe, why) in todo.lost {
            self.make_again(recipe, &why);
        }
        for request in todo.not_found {
            match request {
                Request::Cancel(Cancel { task, outputs, again: true, .. }) => {
                    let error = Error::Cancelled { task: task.to_string() };
                    self.fail_outputs(task, outputs, &error);
                }
                request => self.submission.request(request),
            }
        }
    }

    pub(crate) fn gave_back(self: &Arc<Self>, lease: LeaseId, tasks: &[TaskId], waiting: bool) {
        self.with_core(|core, now, todo| {
            core.dispatch.gave_back(lease, tasks, waiting, now, &mut todo.dispatch);
        });
    }

    pub(crate) fn lease_ready(self: &Arc<Self>, lease: LeaseId) {
        self.with_core(|core, _, _| core.dispatch.ready(lease));
    }

    /// Where contact was lost because this process can open no connection, that is why.
    fn for_want_of_descriptors(&self, error: Error) -> Error {
        match error {
            Error::ContactLost { what, who, why, attempts } => match self.outside.lacks_descriptors() {
                Some(why) => Error::OutOfDescriptors { what: format!("{what}: connecting to {who}"), why },
                None => Error::ContactLost { what, who, why, attempts },
            },
            Error::ActorUnavailable { actor, class, cause } => {
                Error::ActorUnavailable { actor, class, cause: Box::new(self.for_want_of_descriptors(*cause)) }
            }
            error => error,
        }
    }

    pub(crate) fn connection_lost(self: &Arc<Self>, peer: ProcessId) {
        self.with_core(|core, now, todo| {
            core.dispatch.connection_lost(peer, now, &mut todo.dispatch);
            core.calls.connection_lost(peer, now, &mut todo.calls);
        });
    }

    /// A node is gone with everything in its store, and with its worker processes.
    pub(crate) fn node_died(self: &Arc<Self>, node: NodeId, why: &str) {
        self.copies_lost_with(node, why);
        self.with_core(|core, now, todo| core.dispatch.node_died(node, why, now, &mut todo.dispatch));
    }

    /// The process is about to end: the worker processes that it has for nothing stay, with what they own.
    /// Whether there were any.
    pub(crate) fn return_idle_leases(self: &Arc<Self>) -> bool {
        self.with_core(|core, _, todo| core.dispatch.return_idle(&mut todo.dispatch))
    }

    /// Takes in what the head says of leases, worker processes, actors and nodes.
    pub(crate) fn hears_head(self: &Arc<Self>, event: HeadEvent) {
        if let HeadEvent::Actor { actor, state } = &event {
            self.actors.is_now(*actor, state);
        }
        self.with_core(|core, now, todo| match event {
            HeadEvent::Granted { shape, lease, worker, node, pid } => {
                let grant = Grant { shape, lease, worker, node, pid };
                core.dispatch.granted(grant, now, &mut todo.dispatch);
            }
            HeadEvent::Recall(lease) => core.dispatch.recalled(lease, &mut todo.dispatch),
            HeadEvent::Refused { shape, error } => core.dispatch.refused(&shape, &error, &mut todo.dispatch),
            HeadEvent::WorkerDied(death) => core.dispatch.worker_died(death, now, &mut todo.dispatch),
            HeadEvent::Actor { actor, state } => core.calls.actor_is(actor, state, &mut todo.calls),
            HeadEvent::Nodes(count) => {
                self.submission.nodes.store(count, Ordering::Relaxed);
                core.dispatch.nodes_are(count);
            }
            HeadEvent::Starting { shape, wanted, leases } => core.dispatch.starting(&shape, wanted, leases),
            HeadEvent::NodeDied { .. }
            | HeadEvent::SayAgain { .. }
            | HeadEvent::Deadlock { .. }
            | HeadEvent::PlacementGroup { .. }
            | HeadEvent::Standby(_)
            | HeadEvent::Stops => {}
        });
    }

    /// Ends an actor at once; it may live again. Of a life that is known, the head is told that this one is over: however often it
    /// hears that, no later life ends for it.
    pub(crate) fn kill_actor(self: &Arc<Self>, actor: ActorId, may_restart: bool) {
        let life = self.submission.look(|_, calls| calls.life_of(actor)).filter(|_| may_restart);
        if !may_restart {
            self.actors.has_ended(actor);
        }
        self.tell_head(match life {
            Some(life) => HeadMessage::LifeOver { actor, life },
            None => HeadMessage::KillActor { actor, may_restart },
        });
        // Calls that this process makes from now on must not reach this life, however long the head's word takes.
        self.submission.request(Request::Killed { actor, life, may_restart });
    }

    /// Fails all tasks and calls that are not done.
    pub(super) fn end_submissions(self: &Arc<Self>, error: &Error) {
        self.with_core(|core, _, todo| {
            core.dispatch.end(error, &mut todo.dispatch);
            core.calls.end(error, &mut todo.calls);
        });
    }

    /// Submits a task whose arguments are all there, or fails it.
    pub(crate) fn submit_resolved(self: &Arc<Self>, mut task: Task, args: Result<Vec<Arg>, Error>) {
        match args {
            Ok(args) => {
                let nodes = self.submission.nodes.load(Ordering::Relaxed);
                if let Some(near) = near_data(&task.shape, &args, nodes) {
                    task.shape = near;
                }
                // Nobody else has seen the spec yet, so that nothing is copied here.
                Arc::make_mut(&mut task.spec).args = args;
                self.submission.request(Request::Task(task));
            }
            Err(error) => {
                self.submission.timeouts.end(task.spec.id);
                self.fail_outputs(task.spec.id, task.spec.outputs, &error);
            }
        }
    }

    /// Cancels the task or call that makes an object of ours.
    pub(crate) fn cancel_object(&self, object: ObjectId, force: bool) {
        // A ref that is not counted here has been freed, and nobody waits for it.
        if self.objects.get(object).is_some_and(|object| !object.is_ready()) {
            let outputs = Outputs::Fixed(object.index + 1);
            self.cancel(Cancel { task: object.task, outputs, force, again: false });
        }
    }

    /// Asks for everything to be cancelled that a task or call has submitted here before this number was given.
    pub(crate) fn cancel_children(&self, parent: TaskId, before: u64) {
        self.submission.request(Request::CancelChildren { parent, before, again: false });
    }
}
