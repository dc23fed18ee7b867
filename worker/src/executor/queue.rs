//! The unstarted tasks and calls of a worker process, and who they are for.
//!
//! The IO thread puts in, takes back and cancels; executing threads take out. Whatever is answered with
//! "given up" was not started and never will be here.

use std::borrow::Cow;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use dashmap::DashMap;
use parking_lot::{Condvar, Mutex};
use wingbeat_core::error::Error;
use wingbeat_core::spec::{ActorSpec, Outcome, TaskResult, TaskSpec};
use wingbeat_core::value::ObjectValue;
use wingbeat_core::{ActorId, Incarnation, LeaseId, ObjectId, ProcessId, TaskId};
use wingbeat_net::messages::{NodeMessage, WorkerCommand};
use wingbeat_process::context::Execution;
use wingbeat_process::{Executor, Handle, Process, Session, Work};

use crate::page::Page;

/// The default concurrency group.
pub(crate) const DEFAULT_GROUP: &str = "";

/// How long a forced cancel waits for owners to take in the results of other tasks. Those that read at all take less.
const FORCED_LIMIT: Duration = Duration::from_millis(500);

/// Something to start.
pub(crate) enum Next {
    Task {
        lease: LeaseId,
        number: u64,
        spec: Arc<TaskSpec>,
    },
    Call {
        spec: Arc<TaskSpec>,
    },
    Become(Box<Become>),
    /// There will be nothing more.
    End,
}

/// An actor to become.
pub(crate) struct Become {
    pub lease: LeaseId,
    pub spec: Arc<ActorSpec>,
    pub incarnation: Incarnation,
}

/// The actor that the process is.
#[derive(Clone)]
pub(crate) struct Being {
    pub actor: ActorId,
    pub incarnation: Incarnation,
    pub concurrency: u32,
    pub lease: LeaseId,
}

#[derive(Default)]
struct State {
    tasks: VecDeque<(ProcessId, LeaseId, u64, Arc<TaskSpec>)>,
    calls: BTreeMap<String, VecDeque<Arc<TaskSpec>>>,
    become_actor: Option<Box<Become>>,
    being: Option<Being>,
    lease: Option<LeaseId>,
    /// The owner that sent the last tasks, to whom readiness is told.
    owner: Option<ProcessId>,
    running: BTreeMap<TaskId, Arc<Execution>>,
    /// What was cancelled, with or without force, while a thread had taken something out and not begun it: it may have
    /// been this.
    cancelled_early: Vec<(TaskId, bool)>,
    /// Executions that wait in user code.
    waiting: u32,
    draining: bool,
    ended: bool,
    /// Nothing is started meanwhile: it may have been started elsewhere.
    held: bool,
    /// The process is about to be killed, and nothing is started any more: it would be killed with it.
    killed: bool,
    /// Threads that would take another call while some are under way.
    takers: Vec<Waker>,
}

/// The queue; it is what the process's IO side calls.
pub(crate) struct Queue {
    pub session: Session,
    pub page: Arc<Page>,
    state: Mutex<State>,
    arrived: Condvar,
    /// Handles of refs in results, until the owner has registered them.
    returned: DashMap<TaskId, Vec<Handle>>,
    /// The same for items of streams.
    sent_items: DashMap<ObjectId, Vec<Handle>>,
    /// Credit of streams that run here.
    pub streams: DashMap<TaskId, Arc<Credit>>,
    busy: AtomicUsize,
}

/// How many items of a stream the consumer has taken.
#[derive(Default)]
pub(crate) struct Credit {
    taken: Mutex<u32>,
    more: tokio::sync::Notify,
}

impl Credit {
    /// Whether item `index` may be sent, `ahead` of what was taken.
    pub(crate) fn covers(&self, index: u32, ahead: u32) -> bool {
        index < self.taken.lock().saturating_add(ahead)
    }

    /// Waits until item `index` may be sent.
    pub(crate) async fn for_item(&self, index: u32, ahead: u32) {
        loop {
            let more = self.more.notified();
            if self.covers(index, ahead) {
                return;
            }
            more.await;
        }
    }

    /// The consumer has taken so many in all.
    fn taken(&self, count: u32) {
        let mut taken = self.taken.lock();
        *taken = (*taken).max(count);
        drop(taken);
        self.more.notify_waiters();
    }
}

impl Queue {
    pub(crate) fn new(session: Session, page: Arc<Page>) -> Self {
        Queue {
            session,
            page,
            state: Mutex::default(),
            arrived: Condvar::new(),
            returned: DashMap::new(),
            sent_items: DashMap::new(),
            streams: DashMap::new(),
            busy: AtomicUsize::new(0),
        }
    }

    /// The next thing for the main thread of a process that is no actor (yet).
    pub(crate) fn next(&self) -> Next {
        let mut state = self.state.lock();
        loop {
            if state.ended {
                return Next::End;
            }
            if state.held || state.killed {
                self.arrived.wait(&mut state);
                continue;
            }
            if let Some(actor) = state.become_actor.take() {
                return Next::Become(actor);
            }
            if let Some((_, lease, number, spec)) = state.tasks.pop_front() {
                self.busy.fetch_add(1, Ordering::Relaxed);
                return Next::Task { lease, number, spec };
            }
            self.arrived.wait(&mut state);
        }
    }

    /// The next call of a concurrency group.
    pub(crate) fn next_call(&self, group: &str) -> Next {
        let mut state = self.state.lock();
        loop {
            if let Some(next) = self.take_call(&mut state, group) {
                return next;
            }
            self.arrived.wait(&mut state);
        }
    }

    /// As [`Queue::next_call`], for a thread that has others under way.
    pub(crate) fn poll_next_call(&self, group: &str, cx: &Context<'_>) -> Poll<Next> {
        let mut state = self.state.lock();
        if let Some(next) = self.take_call(&mut state, group) {
            return Poll::Ready(next);
        }
        if !state.takers.iter().any(|taker| taker.will_wake(cx.waker())) {
            state.takers.push(cx.waker().clone());
        }
        Poll::Pending
    }

    fn take_call(&self, state: &mut State, group: &str) -> Option<Next> {
        if state.ended {
            return Some(Next::End);
        }
        if state.held || state.killed {
            return None;
        }
        if let Some(spec) = state.calls.get_mut(group).and_then(VecDeque::pop_front) {
            self.busy.fetch_add(1, Ordering::Relaxed);
            return Some(Next::Call { spec });
        }
        if state.draining && self.busy.load(Ordering::Relaxed) == 0 && state.calls.values().all(VecDeque::is_empty) {
            state.ended = true;
            self.wake_all(state);
            return Some(Next::End);
        }
        None
    }

    /// Has every thread look again.
    fn wake_all(&self, state: &mut State) {
        self.arrived.notify_all();
        for taker in state.takers.drain(..) {
            taker.wake();
        }
    }

    /// What a thread took out is done.
    pub(crate) fn done(&self, execution: &Arc<Execution>) {
        let mut state = self.state.lock();
        // A later attempt may have begun since.
        if state.running.get(&execution.task).is_some_and(|running| Arc::ptr_eq(running, execution)) {
            state.running.remove(&execution.task);
        }
        let busy = self.busy.fetch_sub(1, Ordering::Relaxed) - 1;
        if busy == state.running.len() {
            state.cancelled_early.clear();
        }
        if state.draining {
            self.wake_all(&mut state);
        }
    }

    /// Something runs: cancelling finds it from now on.
    pub(crate) fn started(&self, execution: &Arc<Execution>) {
        let mut state = self.state.lock();
        state.running.insert(execution.task, execution.clone());
        let early = state.cancelled_early.iter().position(|(task, _)| *task == execution.task);
        let early = early.map(|at| state.cancelled_early.swap_remove(at));
        drop(state);
        if let Some((_, force)) = early {
            self.stop(execution, force);
        }
    }

    /// The process is an actor from now on.
    pub(crate) fn be(&self, being: Being) {
        self.state.lock().being = Some(being);
    }

    /// Starts nothing while `held`; what arrives waits.
    pub(crate) fn hold(&self, held: bool) {
        let mut state = self.state.lock();
        state.held = held;
        self.wake_all(&mut state);
    }

    /// Nothing is started any more: the threads end when what they run is done.
    pub(crate) fn end(&self) {
        let mut state = self.state.lock();
        state.ended = true;
        self.wake_all(&mut state);
    }

    /// Sends a result; refs in it live until the owner has registered them.
    pub(crate) fn answer(&self, spec: &TaskSpec, outcome: Outcome, ran_nanos: u64, mut held: Vec<Handle>) {
        let process = self.session.process();
        let mut result = TaskResult { id: spec.id, attempt: spec.attempt, outcome, ran_nanos };
        if let Some(error) = Process::too_large(&result) {
            match std::mem::replace(&mut result.outcome, Outcome::Failed(Box::new(error))) {
                Outcome::One(output) => process.discard(spec, &[output]),
                Outcome::Many(outputs) => process.discard(spec, &outputs),
                Outcome::StreamEnded(_) | Outcome::Failed(_) => {}
            }
            held = Vec::new();
        }
        let holds = !held.is_empty();
        if holds {
            self.returned.insert(spec.id, held);
        }
        process.send_result(&spec.args, result);
        if holds && !process.can_reach(spec.id.owner) {
            // It will never say that it has them.
            let unwanted = self.returned.remove(&spec.id);
            drop(unwanted);
        }
    }

    /// Sends an item of a stream; refs in it live until the consumer has registered them.
    pub(crate) fn send_item(&self, task: TaskId, index: u32, value: ObjectValue, held: Vec<Handle>) {
        let (process, item, holds) = (self.session.process(), task.output(index), !held.is_empty());
        if holds {
            self.sent_items.insert(item, held);
        }
        process.send_item(task, index, value);
        if holds && !process.can_reach(task.owner) {
            let unwanted = self.sent_items.remove(&item);
            drop(unwanted);
        }
    }

    fn refuse(&self, spec: &TaskSpec, error: Error) {
        self.answer(spec, Outcome::Failed(Box::new(error)), 0, Vec::new());
    }

    /// Gives unstarted tasks back. Called under the lock: that the process waits must not be said after it is ready again.
    fn give_back(&self, state: &State, owner: ProcessId, lease: LeaseId, tasks: Vec<TaskId>) {
        // One that is no longer leased, or is about to end, takes nothing either.
        let waiting = state.waiting > 0 || state.lease != Some(lease) || state.ended;
        self.session.process().give_back(owner, lease, tasks, waiting);
    }

    fn cancel(&self, task: TaskId, force: bool) {
        let mut state = self.state.lock();
        let queued = state.tasks.iter().position(|(_, _, _, spec)| spec.id == task);
        let mut taken = queued.and_then(|at| state.tasks.remove(at)).map(|(_, _, _, spec)| spec);
        for calls in state.calls.values_mut() {
            if let Some(at) = calls.iter().position(|spec| spec.id == task) {
                taken = calls.remove(at);
            }
        }
        let running = state.running.get(&task).cloned();
        if taken.is_none() && running.is_none() && self.busy.load(Ordering::Relaxed) > state.running.len() {
            state.cancelled_early.push((task, force));
        }
        drop(state);
        if let Some(spec) = taken {
            self.refuse(&spec, Error::Cancelled { task: task_name(&spec).into() });
        }
        if let Some(execution) = running {
            self.stop(&execution, force);
        }
    }

    /// Asks what runs to stop; with `force`, ends it with the process.
    fn stop(&self, execution: &Execution, force: bool) {
        let process = self.session.process().clone();
        if !force {
            process.cancel_children(execution.task);
            return execution.cancel();
        }
        // It is not asked: woken with an error, it might go on with that. What it has started ends with its owner, which is
        // this process.
        self.state.lock().killed = true;
        eprintln!("wingbeat: this process ends because the running task {} was cancelled by force", execution.name);
        // What else was finished here is handed over first. This is the IO thread, which user code cannot hold up.
        self.session.process().io().spawn(async move {
            let _ = tokio::time::timeout(FORCED_LIMIT, process.results_taken_in()).await;
            let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
        });
    }
}

/// What to call a task, in messages.
pub(crate) fn task_name(spec: &TaskSpec) -> Cow<'static, str> {
    match (&spec.name, wingbeat_process::registry::table().path(spec.function)) {
        (Some(name), _) => name.to_string().into(),
        (None, Some(path)) => path.into(),
        (None, None) => spec.id.to_string().into(),
    }
}

impl Executor for Queue {
    fn deliver(&self, from: ProcessId, work: Work) {
        match work {
            Work::Tasks(lease, first, tasks) => {
                let mut state = self.state.lock();
                if state.waiting > 0 || state.lease != Some(lease) || state.ended {
                    self.give_back(&state, from, lease, tasks.iter().map(|task| task.id).collect());
                    return;
                }
                state.owner = Some(from);
                for (number, spec) in (first..).zip(tasks) {
                    state.tasks.push_back((from, lease, number, spec));
                }
                drop(state);
                self.arrived.notify_one();
            }
            Work::Calls(actor, incarnation, calls) => {
                let mut state = self.state.lock();
                let ours =
                    state.being.as_ref().is_some_and(|being| being.actor == actor && being.incarnation == incarnation);
                if ours && state.ended {
                    // The process is about to end, and the head says what becomes of the actor and of these calls.
                    return;
                }
                if !ours {
                    drop(state);
                    for spec in calls {
                        let class = task_name(&spec);
                        let cause = Box::new(Error::ActorEnded { by: "a restart".into() });
                        self.refuse(&spec, Error::ActorUnavailable { actor, class: class.into(), cause });
                    }
                    return;
                }
                let mut unknown = Vec::new();
                for spec in calls {
                    let group = spec.group.as_deref().unwrap_or(DEFAULT_GROUP);
                    match state.calls.get_mut(group) {
                        Some(queue) => queue.push_back(spec),
                        None => unknown.push(spec),
                    }
                }
                self.wake_all(&mut state);
                drop(state);
                for spec in unknown {
                    let option = "group".to_owned();
                    let why =
                        "the actor has no such concurrency group; declare it with the class or its options".into();
                    self.refuse(&spec, Error::InvalidOption { what: task_name(&spec).into(), option, why });
                }
            }
            Work::TakeBack(lease, most) => {
                let mut state = self.state.lock();
                // Of this lease: a late message must not take another owner's.
                let of_lease = state.tasks.iter().filter(|(_, of, ..)| *of == lease).count();
                let mut kept = of_lease.saturating_sub(most as usize);
                let mut back = Vec::new();
                state.tasks.retain(|(_, of, _, spec)| {
                    if *of != lease {
                        return true;
                    }
                    if kept == 0 {
                        back.push(spec.id);
                        return false;
                    }
                    kept -= 1;
                    true
                });
                self.give_back(&state, from, lease, back);
            }
            Work::Cancel(task, force) => self.cancel(task, force),
            Work::StreamTaken(task, count) => {
                if let Some(credit) = self.streams.get(&task) {
                    credit.taken(count);
                }
            }
            Work::ItemReceived(item) => {
                let held = self.sent_items.remove(&item);
                drop(held);
            }
            Work::Received(tasks) => {
                for task in tasks {
                    let held = self.returned.remove(&task);
                    drop(held);
                }
            }
        }
    }

    fn peer_lost(&self, peer: ProcessId) {
        let mut state = self.state.lock();
        state.tasks.retain(|(owner, ..)| *owner != peer);
        for calls in state.calls.values_mut() {
            calls.retain(|spec| spec.id.owner != peer);
        }
        let running: Vec<Arc<Execution>> =
            state.running.values().filter(|execution| execution.task.owner == peer).cloned().collect();
        drop(state);
        for execution in running {
            self.session.process().cancel_children(execution.task);
            execution.disown();
        }
        let gone: Vec<TaskId> =
            self.returned.iter().map(|entry| *entry.key()).filter(|task| task.owner == peer).collect();
        for task in gone {
            let held = self.returned.remove(&task);
            drop(held);
        }
        let items: Vec<ObjectId> =
            self.sent_items.iter().map(|entry| *entry.key()).filter(|item| item.owner() == peer).collect();
        for item in items {
            let held = self.sent_items.remove(&item);
            drop(held);
        }
    }

    fn command(&self, command: WorkerCommand) {
        match command {
            WorkerCommand::Lease { lease, gpus, captures } => {
                self.session.process().set_gpus(gpus);
                self.session.process().set_captures(captures);
                self.state.lock().lease = Some(lease);
            }
            WorkerCommand::StartActor { lease, spec, incarnation, gpus, captures } => {
                self.session.process().set_gpus(gpus);
                self.session.process().set_captures(captures);
                let mut state = self.state.lock();
                state.lease = Some(lease);
                state.calls.insert(DEFAULT_GROUP.to_owned(), VecDeque::new());
                for group in spec.groups.keys() {
                    state.calls.insert(group.clone(), VecDeque::new());
                }
                // Calls that come while the constructor runs wait in their queues.
                state.being = Some(Being { actor: spec.id, incarnation, concurrency: spec.max_concurrency, lease });
                state.become_actor = Some(Box::new(Become { lease, spec, incarnation }));
                self.wake_all(&mut state);
            }
            WorkerCommand::Drain => {
                let mut state = self.state.lock();
                state.draining = true;
                self.wake_all(&mut state);
            }
            WorkerCommand::Exit => {
                // Somebody may still read what this process owns, or run something for it.
                if self.session.process().is_done() {
                    self.end();
                } else {
                    self.session.process().tell_node(NodeMessage::Stays);
                }
            }
        }
    }

    fn begin_wait(&self) {
        let mut state = self.state.lock();
        if state.being.is_some() {
            return;
        }
        state.waiting += 1;
        if state.waiting > 1 {
            return;
        }
        let back: Vec<TaskId> = state.tasks.drain(..).map(|(_, _, _, spec)| spec.id).collect();
        if let (Some(owner), Some(lease)) = (state.owner, state.lease) {
            self.give_back(&state, owner, lease, back);
        }
    }

    fn end_wait(&self) {
        let mut state = self.state.lock();
        if state.being.is_some() {
            return;
        }
        state.waiting -= 1;
        // Under the lock, as what it takes back.
        if let (0, Some(owner), Some(lease)) = (state.waiting, state.owner, state.lease) {
            self.session.process().say_ready(owner, lease);
        }
    }
}
