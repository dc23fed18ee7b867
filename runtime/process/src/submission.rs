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
use tokio::task::AbortHandle;
use wingbeat_core::error::Error;
use wingbeat_core::spec::{ActorState, Arg, Outcome, Outputs, TaskResult, TaskSpec};
use wingbeat_core::value::{ObjectValue, Packed};
use wingbeat_core::{ActorId, LeaseId, NodeId, ObjectId, ProcessId, TaskId};
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
use crate::waiters::Place;
use crate::wanted::Wanted;

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
    Call { actor: ActorId, class_name: Arc<str>, call: Call },
    CallReady { actor: ActorId, id: TaskId, args: Result<Vec<Arg>, Error> },
    Cancel(Cancel),
    CancelChildren { parent: TaskId, again: bool },
    Forget(ActorId),
    Killed { actor: ActorId, may_restart: bool },
    Terminate(ActorId),
}

/// Tasks and calls of this process that are not done.
#[derive(Default)]
pub(crate) struct Submission {
    inbox: Mutex<Inbox>,
    wake: Notify,
    core: Mutex<Core>,
    /// Tasks and calls some of whose arguments are not there yet.
    pub(crate) unresolved: DashMap<TaskId, Arc<Unresolved>>,
    /// Tasks and calls that may take a limited time.
    pub(crate) timeouts: Timeouts,
}

/// The timers of tasks and calls that are not done. Each ends with its task.
#[derive(Default)]
pub(crate) struct Timeouts {
    timers: DashMap<TaskId, AbortHandle>,
    /// As many as there are, for results that have none.
    count: AtomicUsize,
}

impl Timeouts {
    /// `start` starts the timer of a task that was not submitted yet. The timer cannot end before it is known here.
    pub(crate) fn begin(&self, task: TaskId, start: impl FnOnce() -> AbortHandle) {
        self.count.fetch_add(1, Ordering::Release);
        self.timers.entry(task).or_insert_with(start);
    }

    /// The task is done, or its time is over. Whether its timer still ran.
    pub(crate) fn end(&self, task: TaskId) -> bool {
        if self.count.load(Ordering::Acquire) == 0 {
            return false;
        }
        let Some((_, timer)) = self.timers.remove(&task) else { return false };
        self.count.fetch_sub(1, Ordering::Release);
        timer.abort();
        true
    }
}

#[derive(Default)]
struct Inbox {
    requests: Vec<Request>,
    /// Set at the end: a request holds handles, and so the session, and nobody would take it out any more.
    closed: bool,
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
    /// Tasks that are cancelled before their arguments are there.
    unresolved: Vec<Arc<Unresolved>>,
}

impl Submission {
    /// Cancels a task or call. At once if it waits for its arguments: they may come before a request is taken in.
    pub(crate) fn cancel(&self, cancel: Cancel) {
        let waiting = self.unresolved.get(&cancel.task).map(|waiting| waiting.clone());
        if !waiting.is_some_and(|waiting| waiting.cancel()) {
            self.request(Request::Cancel(cancel));
        }
    }

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

    /// Takes no more requests. Whoever waits for what they ask for has been told that the session is over.
    pub(crate) fn close(&self) {
        let mut inbox = self.inbox.lock();
        inbox.closed = true;
        let requests = std::mem::take(&mut inbox.requests);
        drop(inbox);
        drop(requests);
        self.wake.notify_one();
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
        // Results whose sender holds refs, and those refs.
        let mut received: Vec<(TaskId, Vec<ObjectId>)> = Vec::new();
        // What an attempt has stored that counts no more.
        let mut late: Vec<(TaskId, Outcome)> = Vec::new();
        // Dropped after the lock: handles may free objects.
        let mut finished: Vec<Held> = Vec::new();
        self.with_core(process, |core, now, todo| {
            for result in results {
                if let Some(refs) = refs_of(&result.outcome) {
                    received.push((result.id, refs));
                }
                if let Some((actor, call)) = core.calls.finished(from, result.id, result.attempt) {
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
                    Settled::Unknown if has_stored(&result.outcome) => late.push((result.id, result.outcome)),
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
        for (task, outcome) in late {
            process.discard_late(task, outcome);
        }
        for (task, refs) in received {
            // The sender holds the refs until they are registered with their owners.
            process.confirm(from, &refs, PeerMessage::Received(vec![task]));
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
            core.calls.connection_lost(peer, now);
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
            let requests = std::mem::take(&mut self.submission.inbox.lock().requests);
            let unresolved = &self.submission.unresolved;
            let mut todo = Todo::default();
            let mut core = self.submission.core.lock();
            let now_ms = core.started.elapsed().as_millis() as u64;
            let mut not_found = Vec::new();
            let mut cancels = Vec::new();
            for request in requests {
                match request {
                    Request::Cancel(cancel) => cancels.push(cancel),
                    other => {
                        core.cancel(std::mem::take(&mut cancels), unresolved, &mut todo, &mut not_found);
                        core.take_in(other, unresolved, &mut todo, &mut not_found);
                    }
                }
            }
            core.cancel(cancels, unresolved, &mut todo, &mut not_found);
            next_tick = core.dispatch.tick(now_ms, &mut todo.dispatch);
            if let Some(ms) = core.calls.tick(now_ms, &mut todo.calls) {
                next_tick = Some(next_tick.map_or(ms, |sooner| sooner.min(ms)));
            }
            core.dispatch.settle(now_ms, &mut todo.dispatch);
            drop(core);
            self.perform(todo);
            for request in not_found {
                match request {
                    Request::Cancel(Cancel { task, outputs, again: true, .. }) => {
                        let error = Error::Cancelled { task: task.to_string() };
                        self.fail_outputs(task, outputs, &error);
                    }
                    request => self.submission.request(request),
                }
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
                dispatch::Action::Left { task, outputs, at } => {
                    // Of a stream, at most the item that was not announced: nobody knows which.
                    let Outputs::Fixed(count) = outputs else { continue };
                    for index in 0..count {
                        self.left_over(task.output(index), &at);
                    }
                }
                dispatch::Action::Return { lease } => self.tell_head(HeadMessage::ReturnLease(lease)),
                dispatch::Action::Abandon { lease } => self.tell_head(HeadMessage::AbandonLease(lease)),
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
        for unresolved in todo.unresolved {
            unresolved.cancel();
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
                    if let Some((_, unresolved)) = self.submission.unresolved.remove(&call.spec.id) {
                        unresolved.give_up();
                    }
                    self.settle_outputs(&call.spec, Outcome::Failed(Box::new(error)), None);
                }
                calls::Action::Answer { spec, error } => {
                    self.settle_outputs(&spec, Outcome::Failed(Box::new(error)), None);
                }
            }
        }
    }

    /// Gives a task's outputs their values, and those in shared memory the recipe for making them again.
    fn settle_outputs(self: &Arc<Self>, spec: &TaskSpec, outcome: Outcome, recipe: Option<&Arc<Recipe>>) {
        self.submission.timeouts.end(spec.id);
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

    /// Asks for a task or call to be cancelled with everything that it submitted here.
    pub fn cancel_children(&self, parent: TaskId) {
        self.submission.request(Request::CancelChildren { parent, again: false });
    }
}

impl Core {
    /// Cancels what is found; the rest is looked for once more.
    fn cancel(
        &mut self,
        cancels: Vec<Cancel>,
        unresolved: &DashMap<TaskId, Arc<Unresolved>>,
        todo: &mut Todo,
        not_found: &mut Vec<Request>,
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
                None if cancel.again => not_found.push(Request::Cancel(cancel)),
                None => not_found.push(Request::Cancel(Cancel { again: true, ..cancel })),
            }
        }
    }

    fn take_in(
        &mut self,
        request: Request,
        unresolved: &DashMap<TaskId, Arc<Unresolved>>,
        todo: &mut Todo,
        not_found: &mut Vec<Request>,
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
            Request::Cancel(cancel) => self.cancel(vec![cancel], unresolved, todo, not_found),
            Request::CancelChildren { parent, again } => {
                let mut children = self.dispatch.children_of(parent);
                children.extend(self.calls.children_of(parent));
                let waiting = unresolved.iter().filter(|waiting| waiting.parent == Some(parent));
                children.extend(waiting.map(|waiting| *waiting.key()));
                children.sort_unstable();
                children.dedup();
                let cancel = |task| Cancel { task, outputs: Outputs::Fixed(1), force: false, again: false };
                self.cancel(children.into_iter().map(cancel).collect(), unresolved, todo, not_found);
                if !again {
                    not_found.push(Request::CancelChildren { parent, again: true });
                }
            }
            Request::Terminate(actor) => self.calls.terminate(actor, &mut todo.calls),
            Request::Forget(actor) => self.calls.forget(actor),
            Request::Killed { actor, may_restart } => {
                let cause = Box::new(Error::ActorEnded { by: "kill".into() });
                let state = if may_restart { ActorState::Restarting { cause } } else { ActorState::Dead { cause } };
                self.calls.actor_is(actor, state, &mut todo.calls);
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
    /// The task that submitted it.
    parent: Option<TaskId>,
    pub(crate) name: Name,
    missing: AtomicUsize,
    parts: Mutex<Parts>,
    /// Where it waits. Its places hold it, and it holds what it waits for: who gives it up clears them.
    places: Mutex<SmallVec<[(Handle, Place); 3]>>,
}

enum Parts {
    Waiting(SmallVec<[Outbound; 3]>, Then),
    /// A thread has taken them, and is about to submit the call.
    Leaving {
        cancelled: bool,
    },
}

impl Unresolved {
    fn take(&self, cancelled: bool) -> Option<(SmallVec<[Outbound; 3]>, Then)> {
        let mut parts = self.parts.lock();
        if let Parts::Leaving { cancelled: already } = &mut *parts {
            *already |= cancelled;
            return None;
        }
        match std::mem::replace(&mut *parts, Parts::Leaving { cancelled }) {
            Parts::Waiting(args, then) => Some((args, then)),
            Parts::Leaving { .. } => None,
        }
    }

    fn arrived(&self) {
        if self.missing.fetch_sub(1, Ordering::AcqRel) != 1 {
            return;
        }
        let Some((args, then)) = self.take(false) else { return };
        let submission = &self.session.process().submission;
        // If one that was there is lost again, a new entry takes the place of this one.
        when_resolved(&self.session, (self.id, self.parent, &self.name), args, then);
        // Only after it was submitted, so that who cancels it finds it here or there.
        submission.unresolved.remove_if(&self.id, |_, entry| std::ptr::eq(&**entry, self));
        if matches!(*self.parts.lock(), Parts::Leaving { cancelled: true }) {
            let outputs = Outputs::Fixed(1);
            submission.request(Request::Cancel(Cancel { task: self.id, outputs, force: false, again: false }));
        }
    }

    /// It is not submitted any more. False if it is, or is about to be; then that is followed by its cancellation.
    fn cancel(&self) -> bool {
        let Some((args, then)) = self.take(true) else { return false };
        self.session.process().submission.unresolved.remove(&self.id);
        self.leave_places();
        drop(args);
        then(&self.session, Err(Error::Cancelled { task: self.name.to_string() }));
        true
    }

    /// It has failed for another reason: what it waits for is not needed any more.
    fn give_up(&self) {
        let parts = self.take(true);
        self.leave_places();
        drop(parts);
    }

    fn leave_places(&self) {
        let places = std::mem::take(&mut *self.places.lock());
        for (handle, place) in places {
            handle.object().forget(place);
        }
    }

    /// The arguments that are not there yet, and which each is.
    pub(crate) fn missing(&self) -> Vec<(usize, Handle)> {
        let parts = self.parts.lock();
        let args = match &*parts {
            Parts::Waiting(args, _) => args.as_slice(),
            Parts::Leaving { .. } => &[],
        };
        let args = args.iter().enumerate();
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
        ObjectValue::Stored(mut stored) => {
            let owner = handle.id().owner();
            // The reader tells the owner of its copy, or that it found none, and may never have heard of it.
            if owner != session.process().id
                && let Some(address) = session.process().address_of(owner)
            {
                let refs = stored.refs.get_or_insert_default();
                if !refs.owners.iter().any(|known| known.process == owner) {
                    refs.owners.push(address);
                }
            }
            Ok(Arg::Stored(handle.id(), stored))
        }
        ObjectValue::Failed(error) => Err(*error),
    })
}

/// Calls `then` with the arguments when the last one is there; at once, and on this thread, if they are.
pub(crate) fn when_resolved(
    session: &Session,
    (id, parent, name): (TaskId, Option<TaskId>, &Name),
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
        parent,
        name: name.clone(),
        missing: AtomicUsize::new(waiting.len() + 1),
        parts: Mutex::new(Parts::Waiting(args, Box::new(then))),
        places: Mutex::default(),
    });
    session.process().submission.unresolved.insert(id, unresolved.clone());
    let callback: Arc<dyn Fn() + Send + Sync> = {
        let unresolved = unresolved.clone();
        Arc::new(move || unresolved.arrived())
    };
    for handle in waiting {
        session.process().subscribe(&handle);
        match handle.object().when_ready(&callback) {
            Some(place) => unresolved.places.lock().push((handle, place)),
            None => unresolved.arrived(),
        }
    }
    if matches!(*unresolved.parts.lock(), Parts::Leaving { cancelled: true }) {
        // It was given up meanwhile.
        unresolved.leave_places();
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
