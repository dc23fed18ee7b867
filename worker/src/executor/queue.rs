//! The unstarted tasks and calls of a worker process, and who they are for.
//!
//! The IO thread puts in, takes back and cancels; executing threads take out. Whatever is answered with
//! "given up" was not started and never will be here.

use std::borrow::Cow;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use dashmap::DashMap;
use parking_lot::{Condvar, Mutex};
use wingbeat_core::error::Error;
use wingbeat_core::spec::{ActorSpec, Outcome, TaskResult, TaskSpec};
use wingbeat_core::{ActorId, Incarnation, LeaseId, ProcessId, TaskId};
use wingbeat_net::messages::{NodeMessage, WorkerCommand};
use wingbeat_process::context::Execution;
use wingbeat_process::{Executor, Handle, Session, Work};

use crate::page::Page;

/// The default concurrency group.
pub(crate) const DEFAULT_GROUP: &str = "";

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
    /// Executions that wait in user code.
    waiting: u32,
    draining: bool,
    ended: bool,
    /// Nothing is started meanwhile: it may have been started elsewhere.
    held: bool,
}

/// The queue; it is what the process's IO side calls.
pub(crate) struct Queue {
    pub session: Session,
    pub page: Arc<Page>,
    state: Mutex<State>,
    arrived: Condvar,
    /// Handles of refs in results, until the owner has registered them.
    returned: DashMap<TaskId, Vec<Handle>>,
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
    /// Waits until item `index` may be sent, `ahead` of what was taken.
    pub(crate) async fn for_item(&self, index: u32, ahead: u32) {
        loop {
            let more = self.more.notified();
            if index < *self.taken.lock() + ahead {
                return;
            }
            more.await;
        }
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
            if state.held {
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
            if state.ended {
                return Next::End;
            }
            if state.held {
                self.arrived.wait(&mut state);
                continue;
            }
            if let Some(spec) = state.calls.get_mut(group).and_then(VecDeque::pop_front) {
                self.busy.fetch_add(1, Ordering::Relaxed);
                return Next::Call { spec };
            }
            if state.draining && self.busy.load(Ordering::Relaxed) == 0 && state.calls.values().all(VecDeque::is_empty)
            {
                state.ended = true;
                self.arrived.notify_all();
                return Next::End;
            }
            self.arrived.wait(&mut state);
        }
    }

    /// What a thread took out is done.
    pub(crate) fn done(&self, task: TaskId) {
        let mut state = self.state.lock();
        state.running.remove(&task);
        self.busy.fetch_sub(1, Ordering::Relaxed);
        if state.draining {
            self.arrived.notify_all();
        }
    }

    /// Something runs: cancelling finds it from now on.
    pub(crate) fn started(&self, execution: &Arc<Execution>) {
        self.state.lock().running.insert(execution.task, execution.clone());
    }

    /// The process is an actor from now on.
    pub(crate) fn be(&self, being: Being) {
        self.state.lock().being = Some(being);
    }

    /// Starts nothing while `held`; what arrives waits.
    pub(crate) fn hold(&self, held: bool) {
        self.state.lock().held = held;
        self.arrived.notify_all();
    }

    /// Ends the main loop.
    pub(crate) fn end(&self) {
        self.state.lock().ended = true;
        self.arrived.notify_all();
    }

    /// Sends a result; refs in it live until the owner has registered them.
    pub(crate) fn answer(&self, spec: &TaskSpec, outcome: Outcome, ran_nanos: u64, held: Vec<Handle>) {
        if !held.is_empty() {
            self.returned.insert(spec.id, held);
        }
        let result = TaskResult { id: spec.id, attempt: spec.attempt, outcome, ran_nanos };
        self.session.process().send_result(spec.id.owner, result);
    }

    fn refuse(&self, spec: &TaskSpec, error: Error) {
        self.answer(spec, Outcome::Failed(Box::new(error)), 0, Vec::new());
    }

    fn bounce(&self, owner: ProcessId, lease: LeaseId, tasks: &[Arc<TaskSpec>]) {
        let ids = tasks.iter().map(|task| task.id).collect();
        self.session.process().give_back(owner, lease, ids, true);
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
        drop(state);
        if let Some(spec) = taken {
            self.refuse(&spec, Error::Cancelled { task: task_name(&spec).into() });
        }
        let Some(execution) = running else { return };
        self.session.process().cancel_children(task);
        execution.cancel();
        if force {
            eprintln!("wingbeat: this process ends because the running task {} was cancelled by force", execution.name);
            let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
        }
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
                    drop(state);
                    self.bounce(from, lease, &tasks);
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
                if !ours || state.ended {
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
                drop(state);
                self.arrived.notify_all();
                for spec in unknown {
                    let option = "group".to_owned();
                    let why =
                        "the actor has no such concurrency group; declare it with the class or its options".into();
                    self.refuse(&spec, Error::InvalidOption { what: task_name(&spec).into(), option, why });
                }
            }
            Work::TakeBack(lease, most) => {
                let mut state = self.state.lock();
                let keep = state.tasks.len().saturating_sub(most as usize);
                let back: Vec<TaskId> =
                    state.tasks.split_off(keep).into_iter().map(|(_, _, _, spec)| spec.id).collect();
                let waiting = state.waiting > 0;
                drop(state);
                self.session.process().give_back(from, lease, back, waiting);
            }
            Work::Cancel(task, force) => self.cancel(task, force),
            Work::StreamTaken(task, count) => {
                if let Some(credit) = self.streams.get(&task) {
                    let mut taken = credit.taken.lock();
                    *taken = (*taken).max(count);
                    drop(taken);
                    credit.more.notify_waiters();
                }
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
            execution.cancel();
        }
        let gone: Vec<TaskId> =
            self.returned.iter().map(|entry| *entry.key()).filter(|task| task.owner == peer).collect();
        for task in gone {
            let held = self.returned.remove(&task);
            drop(held);
        }
    }

    fn command(&self, command: WorkerCommand) {
        match command {
            WorkerCommand::Lease { lease, gpus, captures } => {
                self.page.reset();
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
                drop(state);
                self.arrived.notify_all();
            }
            WorkerCommand::Drain => {
                self.state.lock().draining = true;
                self.arrived.notify_all();
            }
            WorkerCommand::Exit => {
                // Somebody may still read what this process owns.
                if self.session.process().live_objects() == 0 {
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
        let (owner, lease) = (state.owner, state.lease);
        drop(state);
        if let (Some(owner), Some(lease)) = (owner, lease) {
            self.session.process().give_back(owner, lease, back, true);
        }
    }

    fn end_wait(&self) {
        let mut state = self.state.lock();
        if state.being.is_some() {
            return;
        }
        state.waiting -= 1;
        let ready = state.waiting == 0;
        let (owner, lease) = (state.owner, state.lease);
        drop(state);
        if let (true, Some(owner), Some(lease)) = (ready, owner, lease) {
            self.session.process().say_ready(owner, lease);
        }
    }
}
