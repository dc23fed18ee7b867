//! The execution that the current thread or future belongs to.

use std::borrow::Cow;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use wingbeat_core::error::Error;
use wingbeat_core::{ActorId, LeaseId, TaskId};
use wingbeat_net::messages::HeadMessage;
use wingbeat_net::spin::Working;

use crate::session::actor::ActorHandle;
use crate::session::manner::is_blocked;
use crate::session::registry::Class;
use crate::session::session::Session;
use crate::session::waiting::Waiting;
use crate::wire::executor::Interrupt;
use crate::work::{Awaited, Doing, Place, Waiter, Waits};

thread_local! {
    static CURRENT: RefCell<Option<Arc<Execution>>> = const { RefCell::new(None) };
    static IS_WITHOUT_PARENT: Cell<bool> = const { Cell::new(false) };
    /// The poll on this thread of what is dropped if its execution was asked to stop; 0 outside of one.
    static GUARDED: Cell<u64> = const { Cell::new(0) };
    /// The last one.
    static LATEST: Cell<u64> = const { Cell::new(0) };
}

/// One run of a task or an actor call in a worker process.
pub struct Execution {
    /// The task.
    pub task: TaskId,
    /// How often it was tried before.
    pub attempt: u32,
    /// Its name, for people.
    pub name: Cow<'static, str>,
    /// Where it runs, if in an actor.
    pub place: Option<Arc<Place>>,
    /// The lease under which the process works.
    pub lease: Option<LeaseId>,
    /// Whether it runs in the process of the task that submitted it, which waits.
    pub at_home: bool,
    /// The session of the process.
    pub session: Session,
    /// What it waits for.
    pub(crate) waits: Mutex<Waits>,
    /// Whether anything was submitted that is cancelled with it.
    has_submitted: AtomicBool,
    /// Whether it has the state of its actor, for itself or with others.
    holds_state: AtomicBool,
    /// Whether its code is polled now, and how often it was.
    runs: AtomicBool,
    polls: AtomicU32,
    asked: Mutex<Requests>,
}

#[derive(Default)]
struct Requests {
    cancelled: bool,
    /// If it is, tasks with lower numbers were submitted before that.
    before: Option<u64>,
    /// Whether all who listened then were woken.
    all_were_woken: bool,
    /// How many futures wait for its being asked to stop, which hear of it before they are dropped.
    awaiting_that: usize,
    /// Contact with its caller was lost, which counts it as failed.
    disowned: bool,
    /// The waits up to this number can never end.
    deadlock: Option<(u64, Error)>,
    /// Those who listen, by their number.
    wakers: BTreeMap<u64, Waker>,
    latest: u64,
}

/// Hears what an execution is asked. Forgotten when dropped, since an execution may wait millions of times.
pub(crate) struct Listener {
    execution: Arc<Execution>,
    /// None until it has something to wait for.
    number: Option<u64>,
    gives_way: GivesWay,
}

impl Listener {
    pub(crate) fn new(execution: Arc<Execution>) -> Listener {
        Listener { execution, number: None, gives_way: GivesWay::default() }
    }

    pub(crate) fn execution(&self) -> &Arc<Execution> {
        &self.execution
    }

    /// What `heard` makes of what was asked; otherwise `cx` is woken when something else is asked.
    fn poll<T>(&mut self, cx: &Context<'_>, heard: impl FnOnce(&mut Requests) -> Option<T>) -> Poll<T> {
        let mut asked = self.execution.asked.lock();
        if let Some(answer) = heard(&mut asked) {
            return Poll::Ready(answer);
        }
        let number = *self.number.get_or_insert_with(|| {
            asked.latest += 1;
            asked.latest
        });
        let waker = asked.wakers.get(&number);
        let old = match waker.is_some_and(|waker| waker.will_wake(cx.waker())) {
            true => None,
            false => asked.wakers.insert(number, cx.waker().clone()),
        };
        drop(asked);
        drop(old);
        Poll::Pending
    }

    /// Why the wait with this number must end, if it must.
    pub(crate) fn poll_interrupted(&mut self, number: u64, cx: &Context<'_>) -> Poll<Error> {
        let execution = self.execution.clone();
        let interrupted = self.poll(cx, |asked| {
            let hopeless = asked.deadlock.take_if(|(up_to, _)| number <= *up_to);
            let cancelled = || asked.cancelled.then(|| Error::Cancelled { task: execution.name.to_string() });
            hopeless.map(|(_, error)| error).or_else(cancelled)
        });
        match interrupted {
            Poll::Ready(Error::Cancelled { .. }) if self.gives_way.poll(cx).is_pending() => Poll::Pending,
            interrupted => interrupted,
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        let forgotten = self.number.and_then(|number| self.execution.asked.lock().wakers.remove(&number));
        drop(forgotten);
    }
}

impl Execution {
    /// A run that begins now, of a task and how often that was tried before.
    pub fn new(
        (task, attempt): (TaskId, u32),
        name: Cow<'static, str>,
        place: Option<Arc<Place>>,
        lease: Option<LeaseId>,
        session: Session,
    ) -> Arc<Self> {
        let (waits, has_submitted, holds_state, runs, polls, asked) = Default::default();
        let at_home = false;
        Arc::new(Execution {
            task,
            attempt,
            name,
            place,
            lease,
            at_home,
            session,
            waits,
            has_submitted,
            holds_state,
            runs,
            polls,
            asked,
        })
    }

    /// A run of a task of this process that begins now, while the one that submitted it waits.
    pub fn at_home((task, attempt): (TaskId, u32), name: Cow<'static, str>, session: Session) -> Arc<Self> {
        let (place, lease, waits, has_submitted, holds_state, runs, polls, asked) = Default::default();
        let at_home = true;
        Arc::new(Execution {
            task,
            attempt,
            name,
            place,
            lease,
            at_home,
            session,
            waits,
            has_submitted,
            holds_state,
            runs,
            polls,
            asked,
        })
    }

    /// It is about to be asked to stop. If that is the first time, and it has submitted something, what `next` answers: that has lower numbers.
    pub(crate) fn first_told(&self, next: impl FnOnce() -> u64) -> Option<u64> {
        let mut asked = self.asked.lock();
        let is_first = asked.before.is_none();
        let before = is_first.then(|| *asked.before.insert(next()));
        before.filter(|_| self.has_submitted.load(Ordering::Acquire))
    }

    fn told_before(&self) -> Option<u64> {
        self.asked.lock().before
    }

    /// It has ended, and so has whatever it waits for. For how long it has waited for others.
    pub fn end(&self) -> Duration {
        if self.has_submitted.load(Ordering::Acquire)
            && let Some(before) = self.told_before()
        {
            // What had a number when it was asked to stop, and was not submitted yet, is there now.
            self.session.owner().cancel_children(self.task, before);
        }
        let (mut waits, now) = (self.waits.lock(), Instant::now());
        if let Some(left) = waits.end(&self.waiter(), now) {
            self.left(left);
        }
        waits.waited(now)
    }

    /// What it waits for, the CPUs of its process are used meanwhile, or are free.
    pub fn cpus_are_free(self: &Arc<Self>, are_free: bool) {
        // Said under the lock, in order.
        let mut waits = self.waits.lock();
        let messages = waits.cpus_are_free(&self.waiter(), are_free);
        if messages.is_empty() {
            return;
        }
        messages.into_iter().for_each(|message| self.session.process().tell_head(message));
        let later = waits.is_to_be_looked_at();
        self.is_told(waits, later);
    }

    pub(crate) fn waiter(&self) -> Waiter<'_> {
        let doing = Doing { runs: self.runs.load(Ordering::Relaxed), polls: self.polls.load(Ordering::Relaxed) };
        Waiter { task: self.task, name: &self.name, place: self.place.as_deref(), lease: self.lease, doing }
    }

    /// Asks the run to stop.
    pub fn cancel(&self) {
        self.tell(|asked| asked.cancelled = true);
    }

    /// Contact with its caller was lost: it is to stop, and its result is nobody's.
    pub fn disown(&self) {
        self.tell(|asked| (asked.cancelled, asked.disowned) = (true, true));
    }

    /// It has the state of its actor, or no longer: then whether `Process::let_go_of_state` is to follow.
    pub(crate) fn holds_state(&self, holds: bool) -> bool {
        self.holds_state.store(holds, Ordering::SeqCst);
        !holds && self.session.process().wire.turns_are_told.load(Ordering::SeqCst)
    }

    /// Whether it has the state of its actor.
    pub fn has_state(&self) -> bool {
        self.holds_state.load(Ordering::SeqCst)
    }

    /// Whether contact with its caller was lost, which counts it as failed.
    pub fn is_disowned(&self) -> bool {
        self.asked.lock().disowned
    }

    /// Whether it was asked to stop, and none of its futures waits for that.
    pub fn is_to_be_dropped(&self) -> bool {
        let asked = self.asked.lock();
        asked.cancelled && asked.awaiting_that == 0
    }

    /// Whether it is one of those that run at a time in its concurrency group: a stream that waits for its consumer is not.
    pub fn has_place(&self, has_place: bool) {
        self.waits.lock().has_place(has_place);
    }

    /// It waits for the consumer of its stream, and others run in its place, or it goes on. Meanwhile what else it waits for holds up nobody.
    pub fn pauses(self: &Arc<Self>, pauses: bool) {
        self.waits_at_the_head(|waits, waiter| waits.pauses(waiter, pauses));
    }

    fn waits_at_the_head(
        self: &Arc<Self>,
        change: impl FnOnce(&mut Waits, &Waiter<'_>) -> Option<(HeadMessage, bool)>,
    ) {
        let mut waits = self.waits.lock();
        if let Some((message, later)) = change(&mut waits, &self.waiter()) {
            self.session.process().tell_head(message);
            self.is_told(waits, later);
        }
    }

    /// Ready when it was asked to stop, and all who listen know.
    pub async fn all_know_that_it_stops(self: Arc<Self>) {
        let mut listener = Listener::new(self);
        std::future::poll_fn(|cx| listener.poll(cx, |asked| asked.all_were_woken.then_some(()))).await;
    }

    /// Whether it was asked to stop.
    pub fn is_cancelled(&self) -> bool {
        self.asked.lock().cancelled
    }

    fn tell(&self, change: impl FnOnce(&mut Requests)) {
        self.wakes_all(change);
        self.wakes_all(|asked| asked.all_were_woken = asked.cancelled);
    }

    /// It waits no more for what was told to be in vain: a later wait may not be.
    pub(crate) fn forgets_deadlock(&self) {
        let forgotten = self.asked.lock().deadlock.take();
        drop(forgotten);
    }

    /// Has it polled: it looks at what it waits for.
    pub(crate) fn wakes(&self) {
        self.wakes_all(|_| {});
    }

    fn wakes_all(&self, change: impl FnOnce(&mut Requests)) {
        let mut asked = self.asked.lock();
        change(&mut asked);
        let wakers = std::mem::take(&mut asked.wakers);
        drop(asked);
        wakers.into_values().for_each(Waker::wake);
    }

    /// While the answer lives, the execution waits for somebody who is no task: its CPUs are free for others.
    pub fn waits_for_others(self: &Arc<Self>) -> Option<Waiting> {
        self.run(|| Waiting::begin(Awaited::nobody()))
    }

    /// Runs `body` as part of this execution.
    pub fn run<R>(self: &Arc<Self>, body: impl FnOnce() -> R) -> R {
        let _entered = self.session.enter();
        let _working = Working::begin();
        let outer = CURRENT.replace(Some(self.clone()));
        let restore = Restore(outer);
        let result = body();
        drop(restore);
        result
    }

    /// A future all of whose polls are part of this execution.
    pub fn scope<F: Future>(self: &Arc<Self>, future: F) -> InExecution<F> {
        InExecution { execution: self.clone(), future: Box::pin(future) }
    }
}

impl Interrupt for Execution {
    fn deadlocked(&self, on: TaskId, error: Error) {
        let mut waits = self.waits.lock();
        let Some(up_to) = waits.is_hopeless(on) else { return };
        // Under the lock: when these waits are over, it is forgotten.
        self.asked.lock().deadlock = Some((up_to, error));
        drop(waits);
        self.tell(|_| {});
    }

    fn has_less_room(self: Arc<Self>) {
        self.waits_at_the_head(Waits::has_less_room);
    }

    fn say_again(self: Arc<Self>, question: u64) {
        let mut waits = self.waits.lock();
        let Some((wait, later)) = waits.asked_again(&self.waiter()) else { return };
        self.session.process().tell_head(HeadMessage::SaidAgain { question, wait: Some(wait) });
        self.is_told(waits, later);
    }

    fn tell_anew(self: Arc<Self>) {
        self.waits_at_the_head(Waits::told_anew);
    }

    fn tell_if_it_lasts(self: Arc<Self>) -> bool {
        let mut waits = self.waits.lock();
        let (told, again) = waits.told_if_it_lasts(&self.waiter());
        if let Some((message, later)) = told {
            self.session.process().tell_head(message);
            self.is_told(waits, later);
        }
        again
    }
}

/// An asynchronous execution that was asked to stop is dropped where it waits: one that goes on after each error would never come to an
/// end. So whatever tells that it was gives way before. Where another runtime is between, it is polled again at once, and tells. Remembers the poll
/// in which it gave way last.
#[derive(Default)]
pub struct GivesWay(u64);

impl GivesWay {
    /// Pending once, if what is polled here is dropped then.
    pub fn poll(&mut self, cx: &Context<'_>) -> Poll<()> {
        let guarded = GUARDED.get();
        if guarded == 0 || is_blocked() || std::mem::replace(&mut self.0, guarded) == guarded {
            return Poll::Ready(());
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }
}

/// Polls what is dropped if its execution was asked to stop.
pub fn guarded<R>(poll: impl FnOnce() -> R) -> R {
    struct Before(u64);
    impl Drop for Before {
        fn drop(&mut self) {
            GUARDED.set(self.0);
        }
    }
    LATEST.set(LATEST.get() + 1);
    let _before = Before(GUARDED.replace(LATEST.get()));
    poll()
}

struct Restore(Option<Arc<Execution>>);

impl Drop for Restore {
    fn drop(&mut self) {
        CURRENT.set(self.0.take());
    }
}

/// See [`Execution::scope`].
pub struct InExecution<F> {
    execution: Arc<Execution>,
    future: Pin<Box<F>>,
}

impl<F: Future> Future for InExecution<F> {
    type Output = F::Output;
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        struct Polled<'a>(&'a AtomicBool);
        impl Drop for Polled<'_> {
            fn drop(&mut self) {
                self.0.store(false, Ordering::Relaxed);
            }
        }
        let execution = self.execution.clone();
        // Nobody else polls it.
        execution.polls.store(execution.polls.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
        execution.runs.store(true, Ordering::Relaxed);
        let _polled = Polled(&execution.runs);
        execution.run(|| self.future.as_mut().poll(cx))
    }
}

pub(crate) fn current() -> Option<Arc<Execution>> {
    CURRENT.with_borrow(Clone::clone)
}

/// Whether this is code of a task.
pub(crate) fn is_in_task() -> bool {
    CURRENT.with_borrow(Option::is_some)
}

pub(crate) fn is_current(execution: &Arc<Execution>) -> bool {
    CURRENT.with_borrow(|current| current.as_ref().is_some_and(|current| Arc::ptr_eq(current, execution)))
}

/// The running call has the state of its actor, or no longer.
pub(crate) fn holds_state(holds: bool) {
    let is_told = |execution: &&Arc<Execution>| execution.holds_state(holds);
    // Outside of the borrow: others are told as parts of their executions.
    if let Some(execution) = CURRENT.with_borrow(|current| current.as_ref().filter(is_told).cloned()) {
        execution.session.process().let_go_of_state(execution.task);
    }
}

/// Whether the running task was asked to stop. Long computations should look now and then.
pub fn is_cancelled() -> bool {
    current().is_some_and(|execution| execution.is_cancelled())
}

/// What the running task's waits fail with if it was asked to stop.
pub fn cancellation() -> Option<Error> {
    let execution = current().filter(|execution| execution.is_cancelled())?;
    Some(Error::Cancelled { task: execution.name.to_string() })
}

/// Waits until the running task is asked to stop; for ever outside of a task. An asynchronous one is polled until this has told it.
pub async fn cancelled() {
    struct Awaiting<'a>(&'a Execution);
    impl Drop for Awaiting<'_> {
        fn drop(&mut self) {
            self.0.asked.lock().awaiting_that -= 1;
        }
    }
    let Some(execution) = current() else { return std::future::pending().await };
    execution.asked.lock().awaiting_that += 1;
    let _awaiting = Awaiting(&execution);
    let mut listener = Listener::new(execution.clone());
    std::future::poll_fn(|cx| listener.poll(cx, |asked| asked.cancelled.then_some(()))).await;
}

/// The running task.
pub fn current_task() -> Option<TaskId> {
    current().map(|execution| execution.task)
}

/// The task to which what is submitted here belongs: it is cancelled with that.
pub(crate) fn parent() -> Option<TaskId> {
    if IS_WITHOUT_PARENT.get() {
        return None;
    }
    let execution = current()?;
    execution.has_submitted.store(true, Ordering::Release);
    Some(execution.task)
}

/// What `submit` submits belongs to no task: it outlives the running one.
pub fn without_parent<R>(submit: impl FnOnce() -> R) -> R {
    struct Before(bool);
    impl Drop for Before {
        fn drop(&mut self) {
            IS_WITHOUT_PARENT.set(self.0);
        }
    }
    let _before = Before(IS_WITHOUT_PARENT.replace(true));
    submit()
}

/// How often the running task was tried before.
pub fn current_attempt() -> Option<u32> {
    current().map(|execution| execution.attempt)
}

/// The actor that this code runs in.
pub fn current_actor() -> Option<ActorId> {
    current().and_then(|execution| execution.place.as_ref().map(|place| place.actor))
}

/// A handle of the actor that this code runs in.
///
/// # Errors
/// [`Error::InvalidArgument`] outside of an actor, or if it is of another class.
pub fn current_handle(class: &'static Class) -> Result<ActorHandle, Error> {
    let execution = current().filter(|execution| execution.place.is_some());
    let outside = || Error::InvalidArgument {
        what:
            "current_handle() was called outside of an actor; call it in a method, on the thread or future of the call"
                .into(),
    };
    execution.ok_or_else(outside)?.session.own_handle(class)
}

/// Ends the actor that this code runs in after the calls that run: no other call begins, and it is not restarted.
///
/// # Errors
/// [`Error::InvalidArgument`] outside of an actor.
pub fn exit_actor() -> Result<(), Error> {
    let outside = || Error::InvalidArgument {
        what: "exit_actor() was called outside of an actor; call it in a method, on the thread or future of the call"
            .into(),
    };
    let execution = current().ok_or_else(outside)?;
    let actor = execution.place.as_ref().ok_or_else(outside)?.actor;
    let process = execution.session.process();
    if let Some(executor) = process.executor() {
        executor.exit_actor(actor);
    }
    process.actor_exits(actor);
    Ok(())
}

#[cfg(test)]
mod tests {
    use wingbeat_core::{ClusterId, JobId, ProcessId};
    use wingbeat_net::handshake::{Role, Token};

    use super::*;
    use crate::wire::io::Io;
    use crate::wire::process::{Config, Prepared};

    fn session() -> Session {
        let io = Arc::new(Io::start().unwrap());
        let id = ProcessId::random();
        let config = Config { id, token: Token::new("a token of a test"), role: Role::Worker, listen: None };
        let prepared = io.run(Prepared::bind(config)).unwrap().unwrap();
        prepared.start(&io, JobId::random(), String::new(), ClusterId::random())
    }

    #[test]
    fn an_execution_that_has_waited_often_keeps_no_wakers() {
        let session = session();
        let task = TaskId { owner: ProcessId::random(), seq: 1 };
        let execution = Execution::new((task, 0), "f".into(), None, None, session.clone());
        for _ in 0..1_000 {
            // Each wait of a blocked thread has a waker of its own, and each future among several, too.
            let waker = Waker::from(Arc::new(Woken));
            let mut cx = Context::from_waker(&waker);
            let mut waiting = std::pin::pin!(execution.scope(cancelled()));
            let mut interrupted = Listener::new(execution.clone());
            for _ in 0..3 {
                assert!(waiting.as_mut().poll(&mut cx).is_pending());
                assert!(interrupted.poll_interrupted(1, &cx).is_pending());
            }
            assert_eq!(execution.asked.lock().wakers.len(), 2);
        }
        assert!(execution.asked.lock().wakers.is_empty());
        execution.cancel();
        let mut cx = Context::from_waker(Waker::noop());
        assert!(std::pin::pin!(execution.scope(cancelled())).as_mut().poll(&mut cx).is_ready());
        session.process().shut_down("the test is over");
    }

    struct Woken;

    impl std::task::Wake for Woken {
        fn wake(self: Arc<Self>) {}
    }
}
