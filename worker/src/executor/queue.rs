//! The threads of a worker process and what they take out of its queue.
//!
//! The IO thread puts in, takes back and cancels; executing threads take out. What becomes of it is decided in
//! [`wingbeat_process::work`].

use std::borrow::Cow;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use dashmap::DashMap;
use futures::future::BoxFuture;
use parking_lot::{Condvar, Mutex, MutexGuard};
use wingbeat_core::error::Error;
use wingbeat_core::spec::{Outcome, TaskResult, TaskSpec};
use wingbeat_core::value::ObjectValue;
use wingbeat_core::{ActorId, ProcessId, TaskId};
use wingbeat_net::limits;
use wingbeat_net::messages::{NodeMessage, ProcessStacks, WorkerCommand};
use wingbeat_net::threads::on_a_thread;
use wingbeat_process::context::Execution;
use wingbeat_process::work::{
    self, Actor, Become, ByGroup, Cancelled, GaveBack, Held, Next, Place, Refused, Takes, ThreadCalls,
};
use wingbeat_process::{Assigned, EXITS, Executor, Handle, Process, Session, Work, note};

use super::home_threads::AtHome;
use super::stacks;
use crate::page::Page;

/// How long a forced cancel waits for owners to take in the results of other tasks. Those that read at all take less.
const FORCED_LIMIT: Duration = Duration::from_millis(500);

/// What a lock guards.
#[derive(Default)]
pub(super) struct State {
    /// Decides.
    pub work: work::Queue<Arc<Execution>>,
    /// The threads that run tasks of this very process.
    pub at_home: AtHome,
    /// Threads that wait otherwise than for [`Queue::arrived`], in a runtime: of users, or of the IO. Until they are woken.
    takers: Vec<Waker>,
    /// Threads of an actor that wait in their runtimes, by concurrency group.
    lanes: ByGroup<Waiting>,
}

/// Threads of a concurrency group that wait for a call, by what they have under way. Until they are woken.
#[derive(Default)]
struct Waiting {
    empty: Vec<Waker>,
    idle: Vec<Waker>,
    busy: Vec<Waker>,
}

impl Waiting {
    fn those(&mut self, take: Takes) -> &mut Vec<Waker> {
        match take {
            Takes::Empty => &mut self.empty,
            Takes::Idle => &mut self.idle,
            Takes::Busy => &mut self.busy,
        }
    }
}

impl State {
    fn waits_to_take(&mut self, cx: &Context<'_>) {
        remember(&mut self.takers, cx);
    }

    /// Who is to look for a call of a group, if there is one that may begin.
    fn wanted(&mut self, group: &str) -> Vec<Waker> {
        // An actor with one thread has none of them, and looks at each call.
        let Some(waiting) = self.lanes.get_mut(group) else { return Vec::new() };
        self.work.wants(group).map(|takes| std::mem::take(waiting.those(takes))).unwrap_or_default()
    }

    /// Who is to look, of all groups, since calls have come.
    fn takers_of_calls(&mut self) -> Vec<Waker> {
        let mut takers = std::mem::take(&mut self.takers);
        for (group, waiting) in self.lanes.iter_mut() {
            if let Some(takes) = self.work.wants(group) {
                takers.append(waiting.those(takes));
            }
        }
        takers
    }
}

fn remember(takers: &mut Vec<Waker>, cx: &Context<'_>) {
    if !takers.iter().any(|taker| taker.will_wake(cx.waker())) {
        takers.push(cx.waker().clone());
    }
}

/// The queue; it is what the process's IO side calls. Lives as long as the process.
pub(crate) struct Queue {
    /// The process's.
    pub session: Session,
    /// Where the daemon reads what was started last.
    pub page: Arc<Page>,
    /// This queue, for the threads that it starts.
    pub(super) me: Weak<Queue>,
    /// What there is to do.
    pub(super) state: Mutex<State>,
    /// Told when there may be something to take out of what was sent here.
    pub(super) arrived: Condvar,
    /// Told when a task may begin at home.
    pub(super) at_home: Condvar,
    /// Handles of the refs in results and items, until their receivers have registered them or are lost.
    held: Arc<Held>,
    /// Credit of streams that run here, until they end.
    pub streams: DashMap<TaskId, Arc<Credit>>,
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
    pub(crate) fn new(session: Session, page: Arc<Page>) -> Arc<Self> {
        Arc::new_cyclic(|me| Queue {
            session,
            page,
            me: me.clone(),
            state: Mutex::default(),
            arrived: Condvar::new(),
            at_home: Condvar::new(),
            held: Arc::default(),
            streams: DashMap::new(),
        })
    }

    /// The next thing for the main thread of a process that is no actor (yet).
    pub(crate) fn next(&self) -> Next {
        self.next_here(|state| state.work.next_task(), |state| state.work.has_tasks())
    }

    /// As [`Queue::next`], of a thread that runs something else until it comes.
    pub(crate) fn poll_next(&self, cx: &Context<'_>) -> Poll<Next> {
        let mut state = self.state.lock();
        if let Some(next) = state.work.next_task() {
            return Poll::Ready(next);
        }
        state.waits_to_take(cx);
        Poll::Pending
    }

    /// Waits until there will be nothing more, or the process is to end when its calls are done, and takes nothing.
    pub(crate) fn await_end(&self) {
        let mut state = self.state.lock();
        while !state.work.has_ended() && !state.work.is_draining() {
            self.arrived.wait(&mut state);
        }
    }

    /// The next call of a concurrency group, for an actor that has one thread.
    pub(crate) fn next_call_here(&self, group: &str) -> Next {
        self.next_here(
            |state| self.take_call(state, group, ThreadCalls::default()),
            |state| state.work.has_calls(group),
        )
    }

    /// What `take` finds. This thread does the IO while there is nothing, so that nobody has to wake it for what comes, nor the IO
    /// thread for what it sends. With more to run it would send nothing for too long, and the IO thread does.
    fn next_here(&self, mut take: impl FnMut(&mut State) -> Option<Next>, has_more: impl Fn(&State) -> bool) -> Next {
        let mut look = |state: &mut State| {
            let next = take(state);
            if next.is_some() && has_more(state) {
                self.session.process().attend();
            }
            next
        };
        if let Some(next) = look(&mut self.state.lock()) {
            return next;
        }
        let next = self.session.process().drive(|cx| {
            let mut state = self.state.lock();
            match look(&mut state) {
                Some(next) => Poll::Ready(next),
                None => {
                    state.waits_to_take(cx);
                    Poll::Pending
                }
            }
        });
        if let Some(next) = next {
            // This thread was to do the IO then.
            if has_more(&self.state.lock()) {
                self.session.process().attend();
            }
            return next;
        }
        let mut state = self.state.lock();
        loop {
            if let Some(next) = look(&mut state) {
                return next;
            }
            self.arrived.wait(&mut state);
        }
    }

    /// As [`Queue::next_call_here`], of a thread whose runtime has something to do meanwhile, with what it has under way.
    pub(crate) fn poll_next_call(&self, group: &str, thread: ThreadCalls, cx: &Context<'_>) -> Poll<Next> {
        let mut state = self.state.lock();
        if let Some(next) = self.take_call(&mut state, group, thread) {
            return Poll::Ready(next);
        }
        if state.lanes.get(group).is_none() {
            state.lanes.insert(group, Waiting::default());
        }
        if let Some(waiting) = state.lanes.get_mut(group) {
            remember(waiting.those(thread.takes()), cx);
        }
        Poll::Pending
    }

    /// As [`Queue::poll_next_call`], of a thread that does not wait.
    pub(crate) fn call_at_hand(&self, group: &str, thread: ThreadCalls) -> Option<Next> {
        self.take_call(&mut self.state.lock(), group, thread)
    }

    fn take_call(&self, state: &mut State, group: &str, thread: ThreadCalls) -> Option<Next> {
        let next = state.work.next_call(group, thread);
        match next {
            Some(Next::End) => self.wake_all(state),
            // Where it was the last idle thread that has taken one, the next is for those that are busy; and who is busy leaves it to an idle one.
            _ => state.wanted(group).into_iter().for_each(Waker::wake),
        }
        next
    }

    /// Has others look for a call: a thread goes on with what it has, which may take long.
    pub(crate) fn leaves_to_others(&self, group: &str) {
        let takers = self.state.lock().wanted(group);
        takers.into_iter().for_each(Waker::wake);
    }

    /// Has another thread take calls of a group, if one is to be started.
    pub(crate) fn starts_thread(&self, group: &str) -> bool {
        self.state.lock().work.starts_thread(group)
    }

    /// That thread cannot be had. How many the group has.
    pub(crate) fn has_no_thread(&self, group: &str) -> u32 {
        let mut state = self.state.lock();
        let left = state.work.has_no_thread(group);
        let takers = state.wanted(group);
        drop(state);
        takers.into_iter().for_each(Waker::wake);
        left
    }

    /// A call begins to wait for the consumer of its stream, or goes on; `beside`: what else its thread has under way, which may take long.
    pub(crate) fn pauses(&self, place: &Place, call: &TaskSpec, pauses: bool, beside: ThreadCalls) {
        let mut state = self.state.lock();
        let beyond = state.work.pauses(call, pauses, beside);
        let has_less_room = beyond.is_some_and(|beyond| place.runs_beyond(beyond));
        let takers = state.wanted(work::group_of(call));
        drop(state);
        takers.into_iter().for_each(Waker::wake);
        if has_less_room {
            self.session.process().has_less_room();
        }
    }

    /// Has every thread look again.
    fn wake_all(&self, state: &mut State) {
        self.wake_main(state);
        self.wake_all_at_home(state);
    }

    /// Has every thread look again that takes what was sent here.
    pub(super) fn wake_main(&self, state: &mut State) {
        self.arrived.notify_all();
        state.takers.drain(..).for_each(Waker::wake);
        for waiting in state.lanes.values_mut() {
            let Waiting { empty, idle, busy } = std::mem::take(waiting);
            empty.into_iter().chain(idle).chain(busy).for_each(Waker::wake);
        }
    }

    /// Changes what every thread is to see.
    fn change(&self, change: impl FnOnce(&mut work::Queue<Arc<Execution>>)) {
        let mut state = self.state.lock();
        change(&mut state.work);
        self.wake_all(&mut state);
    }

    /// What was sent here has come to its end, and its result is yet to be sent.
    pub(crate) fn ends(&self, execution: &Arc<Execution>) {
        if !execution.at_home && execution.place.is_none() {
            let mut state = self.state.lock();
            // Whoever says this holds it, too: it is not dropped under the lock.
            state.at_home.base = None;
            self.look_for_leftovers(&mut state);
        }
    }

    /// What a thread took out is done; `beside`: what else the thread has under way. It looks for the next call itself.
    pub(crate) fn done(&self, execution: &Arc<Execution>, spec: &TaskSpec, beside: ThreadCalls) {
        let mut state = self.state.lock();
        let place = execution.place.as_deref();
        let beyond = place.and_then(|_| state.work.call_done(spec, beside));
        let has_less_room = place.zip(beyond).is_some_and(|(place, beyond)| place.runs_beyond(beyond));
        state.work.done(execution.task, |running| Arc::ptr_eq(running, execution));
        if state.work.ends_now() {
            self.wake_all(&mut state);
        }
        match execution.at_home {
            true => self.done_at_home(&mut state),
            false => state.at_home.base = None,
        }
        drop(state);
        if has_less_room {
            self.session.process().has_less_room();
        }
    }

    /// Something runs: cancelling finds it from now on.
    pub(crate) fn started(&self, execution: &Arc<Execution>) {
        let mut state = self.state.lock();
        if execution.place.is_none() && !execution.at_home {
            state.at_home.base = Some(execution.clone());
        }
        let cancelled = state.work.started(execution.task, execution.clone());
        drop(state);
        match cancelled {
            Some(true) if execution.at_home => self.give_up_at_home(execution),
            Some(force) => self.stop(execution, force),
            None => {}
        }
    }

    /// Starts nothing while `held`; what arrives waits.
    pub(crate) fn hold(&self, held: bool) {
        self.change(|work| work.hold(held));
    }

    /// Before the process ends: waits until every result so far was taken in, with the refs in it, and whatever else was
    /// queued for others. Bounded by who waits.
    pub(crate) fn handed_over(&self) -> impl Future<Output = ()> + use<> {
        let (held, process) = (self.held.clone(), self.session.process().clone());
        async move {
            tokio::join!(held.settled(), process.results_taken_in());
        }
    }

    /// Nothing is started any more: the threads end when what they run is done.
    pub(crate) fn end(&self) {
        self.change(work::Queue::end);
    }

    /// It was asked to end, and does not.
    fn stays(&self) {
        self.state.lock().work.stays();
        self.session.process().tell_node(NodeMessage::Stays);
    }

    /// Whether what ends now is followed by something that was sent here to run as it did.
    pub(crate) fn has_more_like(&self, execution: &Execution, spec: &TaskSpec) -> bool {
        let state = self.state.lock();
        match &execution.place {
            _ if execution.at_home => false,
            Some(_) => state.work.has_calls(work::group_of(spec)),
            None => state.work.has_tasks(),
        }
    }

    /// Sends a result; refs in it live until the owner has registered them. With `may_wait`, another follows soon.
    pub(crate) fn answer(
        &self,
        spec: &TaskSpec,
        outcome: Outcome,
        ran_nanos: u64,
        mut held: Vec<Handle>,
        may_wait: bool,
    ) {
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
        let send = || process.send_result(spec, result, may_wait);
        self.held.result(spec.id, held, send, || process.can_reach(spec.id.owner));
    }

    /// Sends an item of a stream; refs in it live until the consumer has registered them.
    pub(crate) fn send_item(&self, task: TaskId, index: u32, value: ObjectValue, held: Vec<Handle>) {
        let process = self.session.process();
        let send = || process.send_item(task, index, value);
        self.held.item(task.output(index), held, send, || process.can_reach(task.owner));
    }

    fn refuse(&self, spec: &TaskSpec, error: Error) {
        self.answer(spec, Outcome::Failed(Box::new(error)), 0, Vec::new(), false);
    }

    fn refuse_calls(&self, refused: Refused, actor: Actor) {
        match refused {
            Refused::Another(calls) => {
                for spec in calls {
                    let class = task_name(&spec);
                    let cause = Box::new(Error::ActorEnded { by: "a restart".into() });
                    let error = Error::ActorUnavailable { actor: actor.id, class: class.into(), cause };
                    self.refuse(&spec, error);
                }
            }
            Refused::Exits(calls) => self.refuse_calls_of_one_that_exits(calls, actor.id),
            Refused::UnknownGroup(calls) => {
                for spec in calls {
                    let option = "group".to_owned();
                    let why =
                        "the actor has no such concurrency group; declare it with the class or its options".into();
                    self.refuse(&spec, Error::InvalidOption { what: task_name(&spec).into(), option, why });
                }
            }
        }
    }

    /// They fail at once: the calls that still run may wait for these.
    fn refuse_calls_of_one_that_exits(&self, calls: Vec<Arc<TaskSpec>>, actor: ActorId) {
        for spec in calls {
            let cause = Box::new(Error::ActorEnded { by: EXITS.into() });
            self.refuse(&spec, Error::ActorDied { actor, class: task_name(&spec).into(), cause });
        }
    }

    /// Says that tasks go back. Called under the lock: that the process waits must not be said after it is ready again.
    fn say(&self, _locked: &MutexGuard<'_, State>, gave: GaveBack) {
        self.session.process().give_back(gave.to, gave.lease, gave.tasks, gave.waiting);
    }

    fn cancel(&self, task: TaskId, force: bool) {
        let cancelled = self.state.lock().work.cancel(task, force);
        match cancelled {
            Cancelled::Nothing => {}
            Cancelled::Unstarted(spec) => {
                self.refuse(&spec, Error::Cancelled { task: task_name(&spec).into() });
            }
            // Its owner has given it up, and lives here itself.
            Cancelled::Running(execution) if execution.at_home && force => self.give_up_at_home(&execution),
            Cancelled::Running(execution) => self.stop(&execution, force),
        }
    }

    /// Asks what runs to stop; with `force`, ends it with the process.
    fn stop(&self, execution: &Execution, force: bool) {
        if !force {
            return self.session.process().cancel_with_children(execution, Execution::cancel);
        }
        // It is not asked: woken with an error, it might go on with that. What it has started ends with its owner, which is
        // this process.
        note(format_args!("this process ends because the running task {} was cancelled by force", execution.name));
        // What else was finished here is handed over first, on the IO thread, which user code cannot hold up.
        let (handed_over, process) = (self.handed_over(), self.session.process().clone());
        self.session.process().vital("a forced cancel", async move {
            let _ = tokio::time::timeout(FORCED_LIMIT, handed_over).await;
            process.end_recording();
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
    fn stacks(&self) -> BoxFuture<'static, Result<ProcessStacks, Error>> {
        let runs = self.page.name();
        Box::pin(async move {
            let looked = on_a_thread("wingbeat-stacks", move || stacks::of_this_process(runs)).await.flatten();
            looked.map_err(|error| Error::io("looking at the threads of this process", &error))
        })
    }

    fn deliver(&self, from: ProcessId, work: Work) {
        match work {
            Work::Tasks { lease, first, tasks } => {
                let mut state = self.state.lock();
                match state.work.add_tasks(from, lease, first, tasks) {
                    Some(gave) => self.say(&state, gave),
                    None => {
                        let takers = std::mem::take(&mut state.takers);
                        drop(state);
                        self.arrived.notify_one();
                        takers.into_iter().for_each(Waker::wake);
                    }
                }
            }
            Work::Calls { actor: id, incarnation, calls } => {
                let actor = Actor { id, incarnation };
                let mut state = self.state.lock();
                let added = state.work.add_calls(actor, calls);
                let takers = state.takers_of_calls();
                drop(state);
                self.arrived.notify_all();
                takers.into_iter().for_each(Waker::wake);
                if let Err(refused) = added {
                    self.refuse_calls(refused, actor);
                }
            }
            Work::TakeBack { lease, most, recalled } => {
                let mut state = self.state.lock();
                if recalled {
                    state.work.recalled(lease);
                    self.session.process().closes_home();
                    self.look_whether_all_wait(&mut state);
                }
                let gave = state.work.take_back(from, lease, most);
                self.say(&state, gave);
            }
            Work::Cancel { task, force } => self.cancel(task, force),
            Work::StreamTaken { task, count } => {
                if let Some(credit) = self.streams.get(&task) {
                    credit.taken(count);
                }
            }
            Work::ItemReceived(item) => self.held.item_received(item),
            Work::Received(tasks) => self.held.results_received(tasks),
            Work::MayLeave => {
                if !self.state.lock().work.stays() {
                    return;
                }
                match self.session.process().may_leave() {
                    true => self.end(),
                    false => self.stays(),
                }
            }
        }
    }

    fn peer_lost(&self, peer: ProcessId) {
        let running = self.state.lock().work.peer_lost(peer);
        for execution in running {
            self.session.process().cancel_with_children(&execution, Execution::disown);
        }
        self.held.peer_lost(peer);
        // It will not hear whether it may end.
        if self.session.process().is_steward(peer) && self.state.lock().work.stays() {
            self.stays();
        }
    }

    fn command(&self, command: WorkerCommand) {
        match command {
            WorkerCommand::Lease { lease, gpus, resources, captures } => {
                self.session.process().assign(Assigned { gpus, resources, captures, actor: None });
                self.state.lock().work.lease(lease);
            }
            WorkerCommand::StartActor { lease, spec, incarnation, gpus, resources, captures } => {
                let actor = Some(spec.clone());
                self.session.process().assign(Assigned { gpus, resources, captures, actor });
                self.change(|work| work.start_actor(Become { lease, spec, incarnation }));
            }
            WorkerCommand::Drain => self.change(work::Queue::drain),
            WorkerCommand::Patience(patience) => limits::take(patience),
            // Of the process, which has taken it in.
            WorkerCommand::Heads(_) => {}
            WorkerCommand::Exit => {
                let process = self.session.process();
                // Somebody may still read what this process owns, or run something for it.
                if process.is_done() {
                    self.end();
                } else if process.may_leave() && process.asks_to_leave() {
                    self.state.lock().work.would_leave();
                } else {
                    self.stays();
                }
            }
        }
    }

    fn begin_wait(&self) -> bool {
        let mut state = self.state.lock();
        if let Some(gave) = state.work.begin_wait() {
            self.say(&state, gave);
        }
        state.work.computes_at_home() || self.goes_on_at_home(&mut state)
    }

    fn end_wait(&self) {
        self.session.process().closes_home();
        let mut state = self.state.lock();
        // Under the lock, as what goes back.
        if let Some((owner, lease)) = state.work.end_wait() {
            self.session.process().say_ready(owner, lease);
        }
        self.look_for_leftovers(&mut state);
    }

    fn begin_wait_at_home(&self, task: TaskId, blocks: bool) {
        self.began_waiting_at_home(task, blocks);
    }

    fn end_wait_at_home(&self, task: TaskId) {
        self.ended_waiting_at_home(task);
    }

    fn has_work_at_home(&self) {
        let mut state = self.state.lock();
        if state.work.takes_home() {
            self.goes_on_at_home(&mut state);
        } else {
            // Whoever waited goes on, and others are to run it.
            self.session.process().closes_home();
        }
    }

    fn exit_actor(&self, actor: ActorId) {
        let mut waiting = Vec::new();
        self.change(|work| waiting = work.exit_actor());
        self.refuse_calls_of_one_that_exits(waiting, actor);
    }

    fn holders_of_state(&self) -> Vec<TaskId> {
        let state = self.state.lock();
        state.work.running().filter(|execution| execution.has_state()).map(|execution| execution.task).collect()
    }

    fn look_at_home(&self) -> bool {
        self.look_for_stuck_threads();
        self.may_be_stuck()
    }
}
