//! The threads of a worker process that run user code.
//!
//! The main thread takes tasks. When the process becomes an actor, it takes the calls of the default
//! group; every further call that may run at the same time gets a lane: a thread that takes calls of one
//! group, in order. Asynchronous methods of a group with room for several do not occupy their lane: they go on
//! in the actor's tokio runtime, and the group's permits bound how many do.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use wingbeat_core::Incarnation;
use wingbeat_core::error::Error;
use wingbeat_core::spec::{ActorSpec, TaskSpec};
use wingbeat_net::messages::NodeMessage;
use wingbeat_process::context::Execution;
use wingbeat_process::registry::{Constructing, Instance, Running};
use wingbeat_process::{Arguments, Session};

use super::queue::{Become, Being, DEFAULT_GROUP, Next, Queue, task_name};
use super::run;

/// Threads of one group at most. Synchronous calls beyond that wait; asynchronous ones need no thread.
const LANES: u32 = 64;

/// Runs what the process is sent, until it ends.
pub(crate) fn main_loop(session: &Session, queue: &Arc<Queue>) {
    let Some(runtime) = user_runtime() else { return };
    loop {
        match queue.next() {
            Next::Task { lease, number, spec } => {
                let name = task_name(&spec);
                queue.page.start(number, &name);
                let execution = Execution::new(spec.id, name, None, Some(lease), session.clone());
                queue.started(&execution);
                runtime.block_on(run_task(queue, execution, &spec));
                queue.done(spec.id);
            }
            Next::Become(become_actor) => return live(session, queue, &runtime, *become_actor),
            Next::Call { .. } => {}
            Next::End => return,
        }
    }
}

/// A tokio runtime for user code, so that `tokio::time` and friends work in tasks.
fn user_runtime() -> Option<tokio::runtime::Runtime> {
    match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => Some(runtime),
        Err(error) => {
            eprintln!("wingbeat: cannot start a runtime for user code: {error}");
            None
        }
    }
}

async fn run_task(queue: &Queue, execution: Arc<Execution>, spec: &TaskSpec) {
    let function = wingbeat_process::registry::table().function(spec.function, spec.name.as_deref());
    match function {
        Ok(function) => run::to_result(queue, execution, spec, function.run, function.path).await,
        Err(error) => run::to_result(queue, execution, spec, |_| Err(error), "an unknown function").await,
    }
}

/// The life of an actor.
fn live(session: &Session, queue: &Arc<Queue>, runtime: &tokio::runtime::Runtime, become_actor: Become) {
    let Become { lease, spec, incarnation } = become_actor;
    queue.page.rename(&spec.class_name);
    let being = Being { actor: spec.id, incarnation, concurrency: spec.max_concurrency, lease };
    queue.be(being.clone());
    let instance = match construct(session, runtime, &spec, &being) {
        Ok(instance) => instance,
        Err(error) => {
            tell(session, &spec, incarnation, Err(error));
            // The daemon ends this process when the head has heard.
            while !matches!(queue.next_call(DEFAULT_GROUP), Next::End) {}
            return;
        }
    };
    tell(session, &spec, incarnation, Ok(()));
    let shared = Arc::new(Lanes {
        session: session.clone(),
        queue: queue.clone(),
        instance,
        being,
        class: spec.class_name.clone(),
    });
    let mut threads = Vec::new();
    for (group, most) in &spec.groups {
        threads.extend((0..(*most).min(LANES)).map(|_| shared.clone().start(group.clone(), *most)));
    }
    let concurrency = spec.max_concurrency;
    threads.extend((1..concurrency.min(LANES)).map(|_| shared.clone().start(DEFAULT_GROUP.to_owned(), concurrency)));
    shared.run(DEFAULT_GROUP, concurrency, runtime);
    for thread in threads {
        // Lanes catch user code's panics.
        let _ = thread.join();
    }
}

fn tell(session: &Session, spec: &ActorSpec, incarnation: Incarnation, outcome: Result<(), Error>) {
    session.process().tell_node(NodeMessage::ActorStarted { actor: spec.id, incarnation, outcome });
}

fn construct(
    session: &Session,
    runtime: &tokio::runtime::Runtime,
    spec: &ActorSpec,
    being: &Being,
) -> Result<Instance, Error> {
    let class = wingbeat_process::registry::table().class(spec.class, &spec.class_name)?;
    let actor = Some((being.actor, being.concurrency));
    let execution =
        Execution::new(spec.handle.task, spec.class_name.clone().into(), actor, Some(being.lease), session.clone());
    let constructing = async {
        let values = session.bring_in(&spec.args, true).await?;
        let arguments = Arguments::new(class.path, session.clone(), values);
        match execution.run(|| (class.construct)(arguments))? {
            Constructing::Done(instance) => instance,
            Constructing::Future(future) => execution.scope(future).await,
        }
    };
    catch_unwind(AssertUnwindSafe(|| runtime.block_on(constructing)))
        .unwrap_or_else(|payload| Err(run::panicked(&spec.class_name, &*payload)))
}

struct Lanes {
    session: Session,
    queue: Arc<Queue>,
    instance: Instance,
    being: Being,
    class: String,
}

impl Lanes {
    fn start(self: Arc<Self>, group: String, most: u32) -> std::thread::JoinHandle<()> {
        std::thread::spawn(move || {
            if let Some(runtime) = user_runtime() {
                self.run(&group, most, &runtime);
            }
        })
    }

    fn run(self: &Arc<Self>, group: &str, most: u32, runtime: &tokio::runtime::Runtime) {
        // With more permits than lanes, asynchronous calls share this lane's runtime.
        let share = most.div_ceil(most.clamp(1, LANES));
        if share <= 1 {
            while let Next::Call { spec } = self.queue.next_call(group) {
                runtime.block_on(self.call(&spec));
                self.queue.done(spec.id);
            }
            return;
        }
        let local = tokio::task::LocalSet::new();
        let (lanes, group) = (self.clone(), group.to_owned());
        local.block_on(runtime, async move {
            let permits = Arc::new(tokio::sync::Semaphore::new(share as usize));
            loop {
                let Ok(permit) = permits.clone().acquire_owned().await else { return };
                let (queue, wanted) = (lanes.queue.clone(), group.clone());
                // Taking waits on a condition, off this thread, so that calls under way go on.
                let Ok(next) = tokio::task::spawn_blocking(move || queue.next_call(&wanted)).await else { return };
                let Next::Call { spec } = next else { break };
                let lanes = lanes.clone();
                tokio::task::spawn_local(async move {
                    lanes.call(&spec).await;
                    lanes.queue.done(spec.id);
                    drop(permit);
                });
            }
        });
    }

    async fn call(&self, spec: &TaskSpec) {
        let name = task_name(spec);
        let actor = Some((self.being.actor, self.being.concurrency));
        let execution = Execution::new(spec.id, name, actor, Some(self.being.lease), self.session.clone());
        self.queue.started(&execution);
        let instance = self.instance.clone();
        match wingbeat_process::registry::table().method(spec.function, Some(&self.class)) {
            Ok(method) => {
                let start = |arguments| -> Result<Running, Error> { (method.run)(instance, arguments) };
                run::to_result(&self.queue, execution, spec, start, method.path).await;
            }
            Err(error) => run::to_result(&self.queue, execution, spec, |_| Err(error), "an unknown method").await,
        }
    }
}
