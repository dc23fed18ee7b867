//! The shell around [`Dispatch`] and [`Calls`]: user threads queue, the IO thread decides and sends.
//!
//! ```text
//!   remote() ── encode ──▶ inbox ──▶ submission_loop ──▶ Dispatch / Calls ──▶ peers, head
//!                 │ an argument is not there yet
//!                 └──▶ Unresolved ── the last one arrives ──▶ inbox
//! ```

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use dashmap::DashMap;
use parking_lot::Mutex;
use smallvec::SmallVec;
use tokio::sync::Notify;
use wingbeat_core::error::Error;
use wingbeat_core::spec::{ActorState, Arg, Outcome, Outputs, TaskResult, TaskSpec};
use wingbeat_core::value::{ObjectValue, Packed};
use wingbeat_core::{ActorId, LeaseId, NodeId, ProcessId, TaskId};
use wingbeat_net::messages::{HeadEvent, HeadMessage, PeerMessage};

use crate::arguments::Outbound;
use crate::calls::{self, Call, Calls};
use crate::dispatch::{self, Dispatch, Grant, Settled, Task};
use crate::lineage::Recipe;
use crate::name::Name;
use crate::object::{Handle, Held};
use crate::process::Process;
use crate::refs::{Content, PackedValue};
use crate::session::Session;

/// What user threads ask for.
pub(crate) enum Request {
    Task(Task),
    Call { actor: ActorId, class_name: Arc<str>, call: Call },
    CallReady { actor: ActorId, id: TaskId, args: Result<Vec<Arg>, Error> },
    Cancel { task: TaskId, outputs: Outputs, force: bool },
    CancelChildren(TaskId),
    Forget(ActorId),
    Killed(ActorId),
    Terminate(ActorId),
}

/// Tasks and calls of this process that are not done.
#[derive(Default)]
pub(crate) struct Submission {
    inbox: Mutex<Vec<Request>>,
    wake: Notify,
    core: Mutex<Core>,
    /// Tasks and calls some of whose arguments are not there yet.
    pub(crate) unresolved: DashMap<TaskId, Arc<Unresolved>>,
}

struct Core {
    dispatch: Dispatch,
    calls: Calls,
    started: Instant,
}

impl Default for Core {
    fn default() -> Self {
        Core { dispatch: Dispatch::default(), calls: Calls::default(), started: Instant::now() }
    }
}

#[derive(Default)]
struct Todo {
    dispatch: Vec<dispatch::Action>,
    calls: Vec<calls::Action>,
}

impl Submission {
    /// Queues a request and wakes the IO thread if it is the first.
    pub(crate) fn request(&self, request: Request) {
        let mut inbox = self.inbox.lock();
        inbox.push(request);
        let first = inbox.len() == 1;
        drop(inbox);
        if first {
            self.wake.notify_one();
        }
    }

    /// Looks at what is not done.
    pub(crate) fn look<R>(&self, look: impl FnOnce(&Dispatch, &Calls) -> R) -> R {
        let core = self.core.lock();
        look(&core.dispatch, &core.calls)
    }

    fn with_core<R>(&self, process: &Arc<Process>, change: impl FnOnce(&mut Core, u64, &mut Todo) -> R) -> R {
        let mut todo = Todo::default();
        let mut core = self.core.lock();
        let now_ms = core.started.elapsed().as_millis() as u64;
        let result = change(&mut core, now_ms, &mut todo);
        core.dispatch.settle(now_ms, &mut todo.dispatch);
        drop(core);
        process.perform(todo);
        // A timer may be needed now.
        self.wake.notify_one();
        result
    }

    pub(crate) fn results(&self, process: &Arc<Process>, from: ProcessId, results: Vec<TaskResult>) {
        let mut done: Vec<(Arc<TaskSpec>, Outcome)> = Vec::with_capacity(results.len());
        // Those of which more than the spec is needed.
        let mut stored_or_lost: Vec<(Task, Outcome)> = Vec::new();
        let mut received = Vec::new();
        // Dropped after the lock: handles may free objects.
        let mut finished: Vec<Held> = Vec::new();
        self.with_core(process, |core, now, todo| {
            for result in results {
                // The items of a stream may have held refs, however it ended.
                if has_refs(&result.outcome) || is_failed_stream(process, &result) {
                    received.push(result.id);
                }
                if let Some((actor, call)) = core.calls.finished(from, result.id) {
                    core.calls.settle(actor, &mut todo.calls);
                    finished.push(call.held);
                    done.push((call.spec, result.outcome));
                    continue;
                }
                let failed = match &result.outcome {
                    Outcome::Failed(error) => Some(&**error),
                    _ => None,
                };
                match core.dispatch.finished(from, result.id, failed, result.ran_nanos, now, &mut todo.dispatch) {
                    Settled::Done(task) if has_stored(&result.outcome) || argument_lost(&task, &result.outcome) => {
                        stored_or_lost.push((task, result.outcome));
                    }
                    Settled::Done(task) => {
                        finished.push(task.held);
                        done.push((task.spec, result.outcome));
                    }
                    Settled::Retried | Settled::Unknown => {}
                }
            }
        });
        for (spec, outcome) in done {
            process.settle_outputs(&spec, outcome, None);
        }
        for (task, outcome) in stored_or_lost {
            if let Outcome::Failed(error) = &outcome
                && let Error::ObjectLost { object, why } = &**error
            {
                process.argument_lost(task, *object, why);
            } else {
                let recipe = process.recipe(&task);
                process.settle_outputs(&task.spec, outcome, recipe.as_ref());
            }
        }
        drop(finished);
        if !received.is_empty() {
            let process = process.clone();
            // The sender holds the refs until they are registered with their owners.
            process.io.clone().spawn(async move {
                process.peers.borrows_registered().await;
                process.send_to(from, PeerMessage::Received(received));
            });
        }
    }

    pub(crate) fn gave_back(&self, process: &Arc<Process>, lease: LeaseId, tasks: &[TaskId], waiting: bool) {
        self.with_core(process, |core, now, todo| {
            core.dispatch.gave_back(lease, tasks, waiting, now, &mut todo.dispatch);
        });
    }

    pub(crate) fn lease_ready(&self, process: &Arc<Process>, lease: LeaseId) {
        self.with_core(process, |core, _, _| core.dispatch.ready(lease));
    }

    pub(crate) fn connection_lost(&self, process: &Arc<Process>, peer: ProcessId) {
        self.with_core(process, |core, now, todo| {
            core.dispatch.connection_lost(peer, now, &mut todo.dispatch);
            core.calls.connection_lost(peer);
        });
    }

    pub(crate) fn node_died(&self, process: &Arc<Process>, node: NodeId, why: &str) {
        self.with_core(process, |core, _, todo| core.dispatch.node_died(node, why, &mut todo.dispatch));
    }

    pub(crate) fn head_event(&self, process: &Arc<Process>, event: HeadEvent) {
        self.with_core(process, |core, now, todo| match event {
            HeadEvent::Granted { shape, lease, worker, node, pid } => {
                let grant = Grant { shape, lease, worker, node, pid };
                core.dispatch.granted(grant, now, &mut todo.dispatch);
            }
            HeadEvent::Recall(lease) => core.dispatch.recalled(lease, &mut todo.dispatch),
            HeadEvent::Refused { shape, error } => core.dispatch.refused(&shape, &error, &mut todo.dispatch),
            HeadEvent::WorkerDied(death) => core.dispatch.worker_died(death, &mut todo.dispatch),
            HeadEvent::Actor { actor, state } => core.calls.actor_is(actor, state, &mut todo.calls),
            HeadEvent::NodeDied { .. }
            | HeadEvent::Deadlock { .. }
            | HeadEvent::Nodes(_)
            | HeadEvent::PlacementGroup { .. } => {}
        });
    }

    pub(crate) fn forget_actor(&self, actor: ActorId) {
        self.request(Request::Forget(actor));
    }

    pub(crate) fn end(&self, process: &Arc<Process>, error: &Error) {
        self.with_core(process, |core, _, todo| {
            core.dispatch.end(error, &mut todo.dispatch);
            core.calls.end(error, &mut todo.calls);
        });
        self.wake.notify_one();
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

fn is_failed_stream(process: &Process, result: &TaskResult) -> bool {
    matches!(result.outcome, Outcome::Failed(_)) && process.streams.is_known(result.id)
}

/// Whether its worker process holds refs until they are registered, or may do so.
fn has_refs(outcome: &Outcome) -> bool {
    match outcome {
        Outcome::One(value) => value.refs().is_some(),
        Outcome::Many(values) => values.iter().any(|value| value.refs().is_some()),
        Outcome::StreamEnded(_) => true,
        Outcome::Failed(_) => false,
    }
}

impl Process {
    /// Takes requests in and lets time pass, until the session is over.
    pub(crate) async fn submission_loop(self: Arc<Self>) {
        let mut next_tick: Option<u64> = None;
        loop {
            let woken = self.submission.wake.notified();
            match next_tick {
                None => woken.await,
                Some(ms) => {
                    let _ = tokio::time::timeout(Duration::from_millis(ms.max(1)), woken).await;
                }
            }
            if self.is_shut_down() {
                return;
            }
            let requests = std::mem::take(&mut *self.submission.inbox.lock());
            let mut todo = Todo::default();
            let mut core = self.submission.core.lock();
            let now_ms = core.started.elapsed().as_millis() as u64;
            let mut undecided = Vec::new();
            for request in requests {
                core.take_in(request, &mut todo, &mut undecided);
            }
            next_tick = core.dispatch.tick(now_ms, &mut todo.dispatch);
            core.dispatch.settle(now_ms, &mut todo.dispatch);
            drop(core);
            self.perform(todo);
            for (task, outputs) in undecided {
                // Its arguments are not there yet, so nobody else knows it.
                self.cancel_unresolved(task, outputs);
            }
        }
    }

    fn perform(self: &Arc<Self>, todo: Todo) {
        for action in todo.dispatch {
            match action {
                dispatch::Action::Push { worker, lease, first, tasks } => {
                    self.send(&worker, PeerMessage::Tasks { lease, first, tasks });
                }
                dispatch::Action::Demand { shape, wanted, name } => {
                    let shape = (*shape).clone();
                    self.tell_head(HeadMessage::Demand { shape, wanted, name: name.to_string() });
                }
                dispatch::Action::Return { lease } => self.tell_head(HeadMessage::ReturnLease(lease)),
                dispatch::Action::TakeBack { worker, lease, most } => {
                    self.send_to(worker, PeerMessage::TakeBack { lease, most });
                }
                dispatch::Action::Cancel { worker, task, force } => {
                    self.send_to(worker, PeerMessage::Cancel { task, force });
                }
                dispatch::Action::Fail { task, error } => {
                    self.settle_outputs(&task.spec, Outcome::Failed(Box::new(error)), None);
                }
            }
        }
        for action in todo.calls {
            match action {
                calls::Action::Push { worker, actor, incarnation, calls } => {
                    self.send(&worker, PeerMessage::Calls { actor, incarnation, calls });
                }
                calls::Action::Watch(actor) => self.tell_head(HeadMessage::WatchActor(actor)),
                calls::Action::Terminate(actor) => {
                    self.tell_head(HeadMessage::TerminateActor { actor, by: "terminate".into() });
                }
                calls::Action::Cancel { worker, task, force } => {
                    self.send_to(worker, PeerMessage::Cancel { task, force });
                }
                calls::Action::Fail { call, error } => {
                    self.settle_outputs(&call.spec, Outcome::Failed(Box::new(error)), None);
                }
            }
        }
    }

    /// Gives a task's outputs their values, and those in shared memory the recipe for making them again.
    fn settle_outputs(self: &Arc<Self>, spec: &TaskSpec, outcome: Outcome, recipe: Option<&Arc<Recipe>>) {
        if let Outputs::Stream { .. } = spec.outputs {
            match outcome {
                Outcome::StreamEnded(count) => self.streams.ended(spec.id, count),
                Outcome::Failed(error) => self.streams.failed(spec.id, *error),
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
                    refs => self.hold_refs(&Session::of(self), refs),
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

    fn cancel_unresolved(self: &Arc<Self>, task: TaskId, outputs: Outputs) {
        let error = Error::Cancelled { task: task.to_string() };
        match outputs {
            Outputs::Fixed(count) => {
                for index in 0..count {
                    if let Some(object) = self.objects.get(task.output(index)) {
                        self.resolve_object(&object, ObjectValue::Failed(Box::new(error.clone())), Vec::new());
                    }
                }
            }
            Outputs::Stream { .. } => self.streams.failed(task, error),
        }
    }

    /// Asks for a task or call to be cancelled with everything that it submitted here.
    pub fn cancel_children(&self, parent: TaskId) {
        self.submission.request(Request::CancelChildren(parent));
    }
}

impl Core {
    fn take_in(&mut self, request: Request, todo: &mut Todo, undecided: &mut Vec<(TaskId, Outputs)>) {
        match request {
            Request::Task(task) => self.dispatch.submit(task, &mut todo.dispatch),
            Request::Call { actor, class_name, call } => {
                self.calls.submit(actor, &class_name, call, &mut todo.calls);
                self.calls.settle(actor, &mut todo.calls);
            }
            Request::CallReady { actor, id, args } => {
                match args {
                    Ok(args) => self.calls.resolved(actor, id, |call| Arc::make_mut(&mut call.spec).args = args),
                    Err(error) => self.calls.fail_queued(actor, id, error, &mut todo.calls),
                }
                self.calls.settle(actor, &mut todo.calls);
            }
            Request::Cancel { task, outputs, force } => {
                if self.calls.cancel(task, force, &mut todo.calls) {
                    return;
                }
                let before = todo.dispatch.len();
                self.dispatch.cancel(task, force, &mut todo.dispatch);
                if todo.dispatch.len() == before {
                    undecided.push((task, outputs));
                }
            }
            Request::CancelChildren(parent) => {
                let mut children = self.dispatch.children_of(parent);
                children.extend(self.calls.children_of(parent));
                for task in children {
                    self.take_in(Request::Cancel { task, outputs: Outputs::Fixed(1), force: false }, todo, undecided);
                }
            }
            Request::Terminate(actor) => self.calls.terminate(actor, &mut todo.calls),
            Request::Forget(actor) => self.calls.forget(actor),
            Request::Killed(actor) => {
                let cause = Box::new(Error::ActorEnded { by: "kill".into() });
                self.calls.actor_is(actor, ActorState::Dead { cause }, &mut todo.calls);
            }
        }
    }
}

/// What becomes of arguments once they are all there.
type Then = Box<dyn FnOnce(&Session, Result<Vec<Arg>, Error>) + Send>;

/// A call some of whose arguments are not there yet.
pub(crate) struct Unresolved {
    session: Session,
    id: TaskId,
    pub(crate) name: Name,
    missing: AtomicUsize,
    parts: Mutex<Option<(SmallVec<[Outbound; 3]>, Then)>>,
}

impl Unresolved {
    fn arrived(&self) {
        if self.missing.fetch_sub(1, Ordering::AcqRel) == 1
            && let Some((args, then)) = self.parts.lock().take()
        {
            self.session.process().submission.unresolved.remove(&self.id);
            when_resolved(&self.session, (self.id, &self.name), args, then);
        }
    }

    /// The arguments that are not there yet, and which each is.
    pub(crate) fn missing(&self) -> Vec<(usize, Handle)> {
        let parts = self.parts.lock();
        let args = parts.iter().flat_map(|(args, _)| args.iter().enumerate());
        let objects = args.filter_map(|(index, arg)| match arg {
            Outbound::Object(handle) => Some((index, handle.clone())),
            Outbound::Value(PackedValue { content: Content::Stored(handle), .. }) => Some((index, handle.clone())),
            Outbound::Value(_) => None,
        });
        objects.filter(|(_, handle)| !handle.is_ready()).collect()
    }
}

/// The arguments as they are pushed; none while one is not there.
pub(crate) fn resolve_now(session: &Session, args: &[Outbound]) -> Option<Result<Vec<Arg>, Error>> {
    let mut resolved = Vec::with_capacity(args.len());
    let mut failed = None;
    for arg in args {
        match resolve_one(session, arg)? {
            Ok(arg) => resolved.push(arg),
            Err(error) => failed = failed.or(Some(error)),
        }
    }
    Some(failed.map_or(Ok(resolved), Err))
}

/// One argument as it is pushed; none while it is not there.
pub(crate) fn resolve_one(session: &Session, arg: &Outbound) -> Option<Result<Arg, Error>> {
    let handle = match arg {
        Outbound::Value(packed) => match &packed.content {
            Content::Inline(bytes) => {
                let refs = crate::refs::describe(session, &packed.held);
                return Some(Ok(Arg::Value(Packed { bytes: bytes.clone().into(), refs })));
            }
            Content::Stored(handle) => handle,
        },
        Outbound::Object(handle) => handle,
    };
    Some(match handle.object().value()? {
        ObjectValue::Inline(packed) => Ok(Arg::Value(packed)),
        ObjectValue::Stored(stored) => Ok(Arg::Stored(handle.id(), stored)),
        ObjectValue::Failed(error) => Err(*error),
    })
}

/// Calls `then` with the arguments when the last one is there; at once, and on this thread, if they are.
pub(crate) fn when_resolved(
    session: &Session,
    (id, name): (TaskId, &Name),
    args: SmallVec<[Outbound; 3]>,
    then: impl FnOnce(&Session, Result<Vec<Arg>, Error>) + Send + 'static,
) {
    if let Some(resolved) = resolve_now(session, &args) {
        return then(session, resolved);
    }
    let waiting = args.iter().filter_map(|arg| match arg {
        Outbound::Object(handle) if !handle.is_ready() => Some(handle.clone()),
        Outbound::Value(PackedValue { content: Content::Stored(handle), .. }) if !handle.is_ready() => {
            Some(handle.clone())
        }
        _ => None,
    });
    let waiting: SmallVec<[Handle; 3]> = waiting.collect();
    // One more than there are, so that nothing happens before all callbacks are in place.
    let unresolved = Arc::new(Unresolved {
        session: session.clone(),
        id,
        name: name.clone(),
        missing: AtomicUsize::new(waiting.len() + 1),
        parts: Mutex::new(Some((args, Box::new(then)))),
    });
    session.process().submission.unresolved.insert(id, unresolved.clone());
    let callback: Arc<dyn Fn() + Send + Sync> = {
        let unresolved = unresolved.clone();
        Arc::new(move || unresolved.arrived())
    };
    for handle in &waiting {
        session.process().subscribe(handle);
        if !handle.object().when_ready(&callback) {
            unresolved.arrived();
        }
    }
    unresolved.arrived();
}

/// The handles that must live until the call is done.
pub(crate) fn holds(args: &[Outbound]) -> Held {
    let mut held = Held::new();
    for arg in args {
        match arg {
            Outbound::Value(packed) => {
                held.extend(packed.held.iter().cloned());
                if let Content::Stored(handle) = &packed.content {
                    held.push(handle.clone());
                }
            }
            Outbound::Object(handle) => held.push(handle.clone()),
        }
    }
    held
}
