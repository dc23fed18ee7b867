//! One task, from its arguments to its result.

use std::any::Any;
use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::task::Poll;
use std::time::Instant;

use futures::StreamExt;
use wingbeat_core::TaskId;
use wingbeat_core::error::Error;
use wingbeat_core::spec::{Outcome, Outputs, TaskSpec};
use wingbeat_process::context::Execution;
use wingbeat_process::registry::{Finished, Item, OutputValues, Running};
use wingbeat_process::{Arguments, Handle, Session};

use super::queue::{Credit, Queue};

/// Frames of a backtrace that are shown: user code is near the top.
const FRAMES: usize = 24;

thread_local! {
    /// What the panic hook saw on this thread.
    static PANIC: RefCell<Option<(String, String)>> = const { RefCell::new(None) };
}

/// Remembers message, place and backtrace of a panic for the error that the owner gets, and prints it too.
pub(crate) fn install_panic_hook() {
    let print = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        let message = match info.location() {
            Some(place) => format!("{}, at {place}", payload_text(info.payload())),
            None => payload_text(info.payload()),
        };
        let backtrace = std::backtrace::Backtrace::force_capture().to_string();
        PANIC.set(Some((message, shorten(&backtrace))));
        print(info);
    }));
}

fn payload_text(payload: &dyn Any) -> String {
    if let Some(text) = payload.downcast_ref::<&str>() {
        (*text).to_owned()
    } else if let Some(text) = payload.downcast_ref::<String>() {
        text.clone()
    } else {
        "a panic without a message".to_owned()
    }
}

/// Drops the frames of the panic machinery above and of the executor below.
fn shorten(backtrace: &str) -> String {
    let lines: Vec<&str> = backtrace.lines().collect();
    let first = lines
        .iter()
        .rposition(|line| {
            line.contains("core::panicking::")
                || line.contains("panic_unwind")
                || line.contains("std::panicking::begin_panic")
        })
        .map_or(0, |at| at + 1);
    let rest = &lines[first..];
    let last = rest.iter().position(|line| line.contains("wingbeat_worker::executor")).unwrap_or(rest.len());
    rest[..last].iter().take(FRAMES * 2).copied().collect::<Vec<_>>().join("\n")
}

/// What a panic becomes.
pub(crate) fn panicked(task: &str, payload: &(dyn Any + Send)) -> Error {
    let (message, backtrace) = PANIC.take().unwrap_or_else(|| (payload_text(payload), String::new()));
    Error::Panicked { task: task.to_owned(), message, backtrace }
}

/// Runs what `start` calls, in `execution`, to its end, and sends the result.
pub(crate) async fn to_result(
    queue: &Queue,
    execution: Arc<Execution>,
    spec: &TaskSpec,
    start: impl FnOnce(Arguments) -> Result<Running, Error>,
    function: &'static str,
) {
    let session = queue.session.clone();
    let begun = Instant::now();
    let running = match session.bring_in(&spec.args, execution.actor.is_some()).await {
        Err(error) => Err(error),
        Ok(_) if execution.is_cancelled() => Err(Error::Cancelled { task: execution.name.to_string() }),
        Ok(values) => {
            let arguments = Arguments::new(function, session.clone(), values);
            let started = catch_unwind(AssertUnwindSafe(|| execution.run(|| start(arguments))));
            started.unwrap_or_else(|payload| Err(panicked(&execution.name, &*payload)))
        }
    };
    let (outcome, held) = match running {
        Ok(Running::Done(finished)) => pack(&session, spec, &execution.name, finished),
        Ok(Running::Future(future)) => {
            let finished = guarded(&execution, execution.scope(future)).await;
            pack(&session, spec, &execution.name, finished.unwrap_or_else(Err))
        }
        Ok(Running::Items(items)) => {
            let mut items = items;
            let next = || catch_unwind(AssertUnwindSafe(|| execution.run(|| items.next())));
            let items = std::iter::from_fn(next_or_panic(next, execution.name.to_string()));
            (stream(queue, &execution, spec, futures::stream::iter(items)).await, Vec::new())
        }
        Ok(Running::Stream(items)) => {
            let scoped = futures::stream::unfold(Some(items), |items| {
                let execution = execution.clone();
                async move {
                    let mut items = items?;
                    match guarded(&execution, execution.scope(items.next())).await {
                        Ok(item) => item.map(|item| (item, Some(items))),
                        Err(error) => Some((Err(error), None)),
                    }
                }
            });
            (stream(queue, &execution, spec, Box::pin(scoped)).await, Vec::new())
        }
        Err(error) => (Outcome::Failed(Box::new(error)), Vec::new()),
    };
    queue.answer(spec, outcome, begun.elapsed().as_nanos() as u64, held);
}

/// Turns a panic of an iterator into its last item.
fn next_or_panic<F>(mut next: F, name: String) -> impl FnMut() -> Option<Item>
where
    F: FnMut() -> std::thread::Result<Option<Item>>,
{
    let mut over = false;
    move || {
        if over {
            return None;
        }
        next().unwrap_or_else(|payload| {
            over = true;
            Some(Err(panicked(&name, &*payload)))
        })
    }
}

/// A future of user code: its panics and its cancellation are errors, and it is dropped when cancelled.
async fn guarded<F: Future>(execution: &Arc<Execution>, future: F) -> Result<F::Output, Error> {
    let mut future = std::pin::pin!(future);
    let cancelled = execution.scope(wingbeat_process::context::cancelled());
    let mut cancelled = std::pin::pin!(cancelled);
    std::future::poll_fn(|cx| {
        match catch_unwind(AssertUnwindSafe(|| future.as_mut().poll(cx))) {
            Ok(Poll::Ready(done)) => return Poll::Ready(Ok(done)),
            Ok(Poll::Pending) => {}
            Err(payload) => return Poll::Ready(Err(panicked(&execution.name, &*payload))),
        }
        cancelled.as_mut().poll(cx).map(|()| Err(Error::Cancelled { task: execution.name.to_string() }))
    })
    .await
}

fn pack(session: &Session, spec: &TaskSpec, name: &str, finished: Finished) -> (Outcome, Vec<Handle>) {
    let failed = |error| (Outcome::Failed(Box::new(error)), Vec::new());
    let values: OutputValues = match finished {
        Ok(values) => values,
        Err(error) => return failed(named(error, name)),
    };
    let mut outputs = Vec::with_capacity(values.len());
    let mut held = Vec::new();
    for (index, value) in values.iter().enumerate() {
        match session.pack_output(spec.id.output(index as u32), &**value, name) {
            Ok((value, refs)) => {
                outputs.push(value);
                held.extend(refs);
            }
            Err(error) => return failed(error),
        }
    }
    if outputs.len() == 1
        && let Some(value) = outputs.pop()
    {
        return (Outcome::One(value), held);
    }
    (Outcome::Many(outputs), held)
}

/// The function's own error names the task as its caller called it.
fn named(error: Error, name: &str) -> Error {
    match error {
        Error::Application { error, .. } => Error::Application { task: name.to_owned(), error },
        other => other,
    }
}

async fn stream<S>(queue: &Queue, execution: &Arc<Execution>, spec: &TaskSpec, mut items: S) -> Outcome
where
    S: futures::Stream<Item = Item> + Unpin,
{
    let Outputs::Stream { ahead } = spec.outputs else {
        let what = format!("{} gives a stream, and its caller expects none", execution.name);
        return Outcome::Failed(Box::new(Error::InvalidArgument { what }));
    };
    let _credit = Registered::new(queue, spec.id);
    let mut index = 0;
    loop {
        let credit = _credit.0.clone();
        if let Err(error) = guarded(execution, credit.for_item(index, ahead)).await {
            return Outcome::Failed(Box::new(error));
        }
        let item = match items.next().await {
            None => return Outcome::StreamEnded(index),
            Some(Ok(item)) => queue.session.pack_output(spec.id.output(index), &*item, &execution.name),
            Some(Err(error)) => Err(named(error, &execution.name)),
        };
        match item {
            Ok((value, refs)) => {
                queue.hold_item(spec.id.output(index), refs);
                queue.session.process().send_item(spec.id, index, value);
            }
            Err(error) => return Outcome::Failed(Box::new(error)),
        }
        index += 1;
        if execution.is_cancelled() {
            let error = Error::Cancelled { task: execution.name.to_string() };
            return Outcome::Failed(Box::new(error));
        }
    }
}

/// The credit of a running stream, found by its task while this lives.
struct Registered<'a>(Arc<Credit>, &'a Queue, TaskId);

impl<'a> Registered<'a> {
    fn new(queue: &'a Queue, task: TaskId) -> Self {
        let credit = Arc::new(Credit::default());
        queue.streams.insert(task, credit.clone());
        Registered(credit, queue, task)
    }
}

impl Drop for Registered<'_> {
    fn drop(&mut self) {
        self.1.streams.remove(&self.2);
    }
}
