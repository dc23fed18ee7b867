//! The threads of a worker process that run user code.
//!
//! The main thread takes tasks. When the process becomes an actor, it takes the calls of the default
//! group; every further call that may run at the same time gets a lane: a thread that takes calls of one
//! group, in order. A lane starts when the last one that waited has taken a call, so that an actor has as many threads as calls
//! ran at once, and not as many as may. Where more calls may run than there are lanes, and no lane is idle, one takes another call beside those that it has:
//! asynchronous methods go on beside each other in its tokio runtime. How many run is counted for all lanes together, so that one which
//! blocks takes no room but its own. A stream that waits for its consumer takes no room.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::thread::JoinHandle;

use parking_lot::Mutex;
use tokio::runtime::RuntimeMetrics;
use wingbeat_core::error::Error;
use wingbeat_core::spec::{ActorSpec, TaskSpec};
use wingbeat_core::{Incarnation, LeaseId};
use wingbeat_net::messages::NodeMessage;
use wingbeat_process::context::Execution;
use wingbeat_process::registry::{self, Constructing, Instance};
use wingbeat_process::work::{Become, DEFAULT_GROUP, Next, Place, ThreadCalls};
use wingbeat_process::{Arguments, Session, note};

use super::queue::{Queue, task_name};
use super::run::{self, Call};
use super::threads::UnderWay;

/// How many calls a thread takes in place of others before those that it has under way have a turn in its runtime: as many as end after one,
/// and a few more.
const AT_HAND: u32 = 4;

/// Runs what the process is sent, until it ends.
pub(crate) fn main_loop(session: &Session, queue: &Arc<Queue>) {
    super::handover::watch_this_thread();
    let Some(runtime) = user_runtime() else { return };
    // User code that is not asynchronous may spawn, too.
    let _entered = runtime.enter();
    let metrics = runtime.metrics();
    let calls = Cell::default();
    let mut under_way = UnderWay::default();
    loop {
        let next = match has_left_something(&metrics) {
            false => queue.next(),
            true => beside_what_was_left(&runtime, |cx| queue.poll_next(cx)),
        };
        match next {
            Next::Task { lease, number, spec } => {
                let name = task_name(&spec);
                queue.page.start(number, &name, spec.yields_memory);
                let execution = Execution::new((spec.id, spec.attempt), name, None, Some(lease), session.clone());
                queue.started(&execution);
                let function = registry::table().function(spec.function, spec.name.as_deref());
                let call = Call { queue, execution, spec, thread: &calls };
                let left = match call.expects(function, |function| function.outputs) {
                    Ok(function) => call.begin(function.path, function.run),
                    Err(error) => call.begin("an unknown function", |_| Err(error)),
                };
                under_way.extend(left);
                under_way.finish(&runtime);
            }
            Next::Become(become_actor) => return live(session, queue, &runtime, *become_actor),
            Next::Call { .. } => {}
            Next::End => return,
        }
    }
}

/// A tokio runtime for user code, so that `tokio::time` and friends work in tasks.
pub(super) fn user_runtime() -> Option<tokio::runtime::Runtime> {
    match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => Some(runtime),
        Err(error) => {
            note(format_args!("cannot start a runtime for user code: {error}"));
            None
        }
    }
}

/// Whether user code has spawned something on this thread's runtime that is not done: it goes on while the thread waits.
fn has_left_something(runtime: &RuntimeMetrics) -> bool {
    runtime.num_alive_tasks() > 0
}

/// Waits for what comes next. What was spawned, and sockets, have a turn first: where much is queued, something is always there already.
fn beside_what_was_left<T>(runtime: &tokio::runtime::Runtime, mut next: impl FnMut(&Context<'_>) -> Poll<T>) -> T {
    let mut had_turn = false;
    runtime.block_on(std::future::poll_fn(|cx| {
        if !std::mem::replace(&mut had_turn, true) {
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        next(cx)
    }))
}

/// The life of an actor.
fn live(session: &Session, queue: &Arc<Queue>, runtime: &tokio::runtime::Runtime, become_actor: Become) {
    let Become { lease, spec, incarnation } = become_actor;
    queue.page.rename(&spec.class_name);
    let being = ActorHere { alone: Arc::new(Place::alone(spec.id)), lease };
    let instance = match construct(session, queue, runtime, &spec, &being) {
        Ok(instance) => instance,
        Err(error) => {
            tell(session, &spec, incarnation, Err(error));
            // The daemon ends this process when the head has heard.
            return queue.await_end();
        }
    };
    tell(session, &spec, incarnation, Ok(()));
    let shared = Arc::new(Lanes {
        session: session.clone(),
        queue: queue.clone(),
        instance,
        being,
        class: spec.class_name.clone(),
        threads: Mutex::default(),
    });
    let is_alone = spec.groups.is_empty() && spec.max_concurrency == 1;
    for (name, most) in &spec.groups {
        if queue.starts_thread(name) {
            let place = Place::of(spec.id, name, *most).beside_other_groups().into();
            shared.start(&Group { name: name.clone(), place, is_alone: false }.into());
        }
    }
    let place = Place::of(spec.id, DEFAULT_GROUP, spec.max_concurrency);
    let place = if spec.groups.is_empty() { place } else { place.beside_other_groups() }.into();
    shared.run(&Group { name: DEFAULT_GROUP.to_owned(), place, is_alone }.into(), runtime);
    loop {
        let Some(thread) = shared.threads.lock().pop() else { break };
        // Lanes catch user code's panics.
        let _ = thread.join();
    }
    // The actor's own `Drop` runs as one of its calls does. It may panic; that was printed, and there is nobody to tell.
    let place = Some(shared.being.alone.clone());
    let name = spec.class_name.clone().into();
    let execution = Execution::new((spec.handle.task, 0), name, place, Some(lease), session.clone());
    let _ = catch_unwind(AssertUnwindSafe(|| execution.run(|| drop(shared))));
}

fn tell(session: &Session, spec: &ActorSpec, incarnation: Incarnation, outcome: Result<(), Error>) {
    session.process().tell_node(NodeMessage::ActorStarted { actor: spec.id, incarnation, outcome });
}

fn construct(
    session: &Session,
    queue: &Queue,
    runtime: &tokio::runtime::Runtime,
    spec: &ActorSpec,
    being: &ActorHere,
) -> Result<Instance, Error> {
    let class = registry::table().class(spec.class, &spec.class_name)?;
    let execution = Execution::new(
        (spec.handle.task, 0),
        spec.class_name.clone().into(),
        Some(being.alone.clone()),
        Some(being.lease),
        session.clone(),
    );
    // As part of the execution: while an argument is not there, its CPUs are free for the task that makes it.
    let values = runtime.block_on(execution.scope(session.bring_in(&spec.args, true)))?;
    let arguments = Arguments::new(class.path, session.clone(), values);
    // From here on a death of this process is one of the actor's lives.
    queue.page.start(0, &spec.class_name, false);
    run::caught(&spec.class_name, || {
        // Outside of the runtime, as every call of user code that is not asynchronous.
        match execution.run(|| (class.construct)(arguments))? {
            Constructing::Done(instance) => instance,
            Constructing::Future(future) => runtime.block_on(execution.scope(future)),
        }
    })
}

/// The actor that the process is.
#[derive(Clone)]
struct ActorHere {
    /// Where its constructor runs, and its `Drop`.
    alone: Arc<Place>,
    lease: LeaseId,
}

/// Calls of an actor that count together.
struct Group {
    name: String,
    /// Where they run.
    place: Arc<Place>,
    /// Whether the actor has this group, and one lane.
    is_alone: bool,
}

/// What the threads of an actor share. Dropped after the last of them has ended.
struct Lanes {
    /// The process's.
    session: Session,
    /// Where calls come from.
    queue: Arc<Queue>,
    /// The actor's state, which is dropped with this.
    instance: Instance,
    /// Which actor it is.
    being: ActorHere,
    /// The name of its class.
    class: String,
    /// All but the main thread, until they are joined at the actor's end.
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Lanes {
    /// Starts another lane.
    fn start(self: &Arc<Self>, group: &Arc<Group>) {
        let (lanes, of) = (self.clone(), group.clone());
        let started = std::thread::Builder::new().name(format!("lane {}", group.name)).spawn(move || {
            super::handover::watch_this_thread();
            match user_runtime() {
                Some(runtime) => {
                    let _entered = runtime.enter();
                    lanes.session.process().vital_thread("running calls", || lanes.run(&of, &runtime));
                }
                None => lanes.not_started(&of),
            }
        });
        match started {
            Ok(thread) => {
                let mut threads = self.threads.lock();
                // One that found no runtime has ended.
                threads.retain(|thread| !thread.is_finished());
                threads.push(thread);
            }
            Err(error) => {
                note(format_args!("cannot start a thread for calls of {}: {error}", self.class));
                self.not_started(group);
            }
        }
    }

    /// The next call of the group tries again, if there is a lane to take it.
    fn not_started(&self, group: &Group) {
        if self.queue.has_no_thread(&group.name) == 0 {
            note(format_args!("nothing can run calls of {} in its group {}: it ends", self.class, group.name));
            std::process::exit(1);
        }
    }

    fn run(self: &Arc<Self>, group: &Arc<Group>, runtime: &tokio::runtime::Runtime) {
        let metrics = runtime.metrics();
        let calls = Cell::<ThreadCalls>::default();
        let mut under_way = UnderWay::default();
        let mut one_is_done = false;
        loop {
            let poll_next = |cx: &Context<'_>| self.queue.poll_next_call(&group.name, calls.get(), cx);
            let next = if under_way.is_empty() {
                // What one lane has opened, or the constructor, calls on others may use: sockets of this runtime are served while it waits.
                Some(match group.is_alone && !has_left_something(&metrics) {
                    true => self.queue.next_call_here(&group.name),
                    false => beside_what_was_left(runtime, poll_next),
                })
            } else if std::mem::take(&mut one_is_done)
                && let Some(next) = self.at_hand(group, &mut under_way, calls.get())
            {
                Some(next)
            } else {
                under_way.go_on(runtime, |cx| poll_next(cx))
            };
            match next {
                Some(Next::Call { spec, starts_thread }) => {
                    if starts_thread {
                        self.start(group);
                    }
                    let call = self.begin(spec, group, &calls);
                    one_is_done = call.is_none();
                    under_way.extend(call);
                }
                Some(_) => return under_way.finish(runtime),
                None => one_is_done = true,
            }
        }
    }

    /// What may begin in place of a call that is done, before others go on here, which may take long. So many, and then they have a turn.
    fn at_hand(&self, group: &Group, under_way: &mut UnderWay<'_>, calls: ThreadCalls) -> Option<Next> {
        if under_way.begun_since_turn >= AT_HAND {
            self.queue.leaves_to_others(&group.name);
            return None;
        }
        let next = self.queue.call_at_hand(&group.name, calls);
        under_way.begun_since_turn += u32::from(next.is_some());
        next
    }

    fn begin<'a>(
        &'a self,
        spec: Arc<TaskSpec>,
        group: &Group,
        thread: &'a Cell<ThreadCalls>,
    ) -> Option<futures::future::LocalBoxFuture<'a, ()>> {
        let execution = Execution::new(
            (spec.id, spec.attempt),
            task_name(&spec),
            Some(group.place.clone()),
            Some(self.being.lease),
            self.session.clone(),
        );
        self.queue.started(&execution);
        let instance = self.instance.clone();
        let method = registry::table().method(spec.function, &self.class);
        let call = Call { queue: &self.queue, execution, spec, thread };
        match call.expects(method, |method| method.outputs) {
            Ok(method) => call.begin(method.path, move |arguments| (method.run)(instance, arguments)),
            Err(error) => call.begin("an unknown method", |_| Err(error)),
        }
    }
}
