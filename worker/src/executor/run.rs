//! One task, from its arguments to its result.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::io::Write;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use futures::future::LocalBoxFuture;
use futures::stream::BoxStream;
use futures::{FutureExt, StreamExt};
use wingbeat_core::TaskId;
use wingbeat_core::error::Error;
use wingbeat_core::spec::{Outcome, Outputs, TaskSpec};
use wingbeat_core::value::ObjectValue;
use wingbeat_net::limits::limits;
use wingbeat_net::messages::THEN_FAILED;
use wingbeat_net::moment::MOMENT;
use wingbeat_process::arguments::Incoming;
use wingbeat_process::context::{self, Execution};
use wingbeat_process::registry::{Finished, Item, OutputValues, Running};
use wingbeat_process::work::ThreadCalls;
use wingbeat_process::{Arguments, Handle, Session, UnderWay};

use super::queue::{Credit, Queue};
use super::threads::{inside, outside, polled_outside};

/// A consumer that makes room within this time is not worth lending the CPU meanwhile.
const PROMPT: Duration = Duration::from_millis(10);

/// Frames of a backtrace that are shown: user code is near the top.
const FRAMES: usize = 24;

/// How often an asynchronous task is polled, when it was cancelled, for what waits for that to hear of it: a collection of futures polls some of them each time.
const POLLS_TO_HEAR: u32 = 64;

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
    // Each frame has a line that says where it is.
    let first = first + lines[first..].iter().take_while(|line| line.trim_start().starts_with("at ")).count();
    let rest = &lines[first..];
    if !rest.is_empty() && rest.iter().all(|line| line.ends_with("<unknown>")) {
        return "without names: this machine has fetched the program, and only the driver's machine has its symbols"
            .to_owned();
    }
    let last = rest.iter().position(|line| line.contains("wingbeat_worker::executor")).unwrap_or(rest.len());
    rest[..last].iter().take(FRAMES * 2).copied().collect::<Vec<_>>().join("\n")
}

/// Calls user code; its panic is an error.
pub(crate) fn caught<T>(task: &str, body: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|payload| Err(panicked(task, &*payload)))
}

/// What a panic becomes. The last that was seen on this thread may be another, which user code has caught; one that was caught on
/// another thread and is continued here, as rayon does, was not seen.
fn panicked(task: &str, payload: &(dyn Any + Send)) -> Error {
    let text = payload_text(payload);
    let is_this =
        |message: &str| message.strip_prefix(&text).is_some_and(|rest| rest.is_empty() || rest.starts_with(", at "));
    let seen = PANIC.take().filter(|(message, _)| is_this(message));
    let (message, backtrace) = seen.unwrap_or_else(|| (text, String::new()));
    Error::Panicked { task: task.to_owned(), message, backtrace, attempts: 1 }
}

/// How a call ended, and handles of the refs in what it gave.
type Ended = (Outcome, Vec<Handle>);

fn failed(error: Error) -> Ended {
    (Outcome::Failed(Box::new(error)), Vec::new())
}

/// The result of what has taken so long may wait for others. Of shorter ones, many are there by the time that the first is sent; where the
/// next ones take longer, it waits in vain.
const WAITS: Range<Duration> = Duration::from_micros(20)..Duration::from_micros(MOMENT.as_micros() as u64 / 2);

/// A task, or a call of the actor.
pub(crate) struct Call<'a> {
    pub queue: &'a Queue,
    pub execution: Arc<Execution>,
    pub spec: Arc<TaskSpec>,
    /// What this thread has under way.
    pub thread: &'a Cell<ThreadCalls>,
}

impl<'a> Call<'a> {
    /// What is to be called, unless it gives something else than its caller expects, which may be of another build: it would wait for
    /// what does not come. Nothing has run then.
    pub(crate) fn expects<T>(
        &self,
        found: Result<T, Error>,
        outputs: impl FnOnce(&T) -> Option<u32>,
    ) -> Result<T, Error> {
        let found = found?;
        let said =
            |count: u32| if count == 1 { "one value".to_owned() } else { format!("{count} values (`num_returns`)") };
        let stream = || "a stream".to_owned();
        let (gives, expected) = match (outputs(&found), self.spec.outputs) {
            (Some(gives), Outputs::Fixed(expected)) if gives == expected => return Ok(found),
            (None, Outputs::Stream { .. }) => return Ok(found),
            (gives, Outputs::Fixed(expected)) => (gives.map_or_else(stream, said), said(expected)),
            (gives, Outputs::Stream { .. }) => (gives.map_or_else(stream, said), stream()),
        };
        let name = &self.execution.name;
        let what = format!(
            "{name} gives {gives}, and its caller, which is of another build, expects {expected}; it has not run"
        );
        Err(Error::InvalidArgument { what })
    }

    /// Begins the call with what `start` does, outside of the thread's runtime, and sends its result. Answers with what is
    /// left, if it is not done at once.
    pub(crate) fn begin(
        self,
        function: &'static str,
        start: impl FnOnce(Arguments) -> Result<Running, Error> + 'a,
    ) -> Option<LocalBoxFuture<'a, ()>> {
        self.thread.update(|thread| ThreadCalls { counted: thread.counted + 1, ..thread });
        let begun = Instant::now();
        if Session::is_at_hand(&self.spec.args)
            && let Some(values) = self.queue.session.bring_in(&self.spec.args, false).now_or_never()
        {
            return match self.start(function, values, start) {
                Ok(running) => {
                    let under_way = self.has_others_beside().then(|| UnderWay::begin(&self.execution));
                    Some(Box::pin(async move {
                        let ended = self.go_on(running).await;
                        drop(under_way);
                        self.answer(begun, ended);
                    }))
                }
                Err(ended) => {
                    self.answer(begun, ended);
                    None
                }
            };
        }
        let under_way = self.has_others_beside().then(|| UnderWay::begin(&self.execution));
        Some(Box::pin(async move {
            let patient = self.execution.place.is_some();
            let arriving = self.execution.scope(self.queue.session.bring_in(&self.spec.args, patient));
            let values = guarded(&self.execution, arriving).await.and_then(|values| values);
            let ended = match outside(|| self.start(function, values, start)).await {
                Ok(running) => self.go_on(running).await,
                Err(ended) => ended,
            };
            drop(under_way);
            self.answer(begun, ended);
        }))
    }

    /// Whether others may be under way on its thread. A task that was sent here has one for itself.
    fn has_others_beside(&self) -> bool {
        self.execution.place.is_some() || self.execution.at_home
    }

    fn answer(&self, begun: Instant, (mut outcome, held): Ended) {
        if let Outcome::Failed(error) = &mut outcome
            && self.is_without_head(error)
        {
            **error = self.without_head(error);
        }
        // What the task printed is shown before its result is there, also an unfinished line. A broken pipe has no reader. Not where another runs
        // beside it, which may have locked the output, and wait for this.
        let has_others = self.execution.place.as_ref().is_some_and(|place| place.has_others);
        if !self.execution.at_home && !has_others {
            let _ = std::io::stdout().flush();
        }
        // What an interrupted call fails with is not the result of the one that its caller may have made again, and a stream that
        // was interrupted has not come to its end. A value is told with its attempt, and its owner sees to what lies in the store.
        self.queue.ends(&self.execution);
        let waited = self.execution.end();
        let is_of_attempt = matches!(outcome, Outcome::Failed(_) | Outcome::StreamEnded(_));
        if !(self.execution.is_disowned() && is_of_attempt) {
            let ran = begun.elapsed().saturating_sub(waited);
            let may_wait = WAITS.contains(&ran) && self.queue.has_more_like(&self.execution, &self.spec);
            self.queue.answer(&self.spec, outcome, ran.as_nanos() as u64, held, may_wait);
        }
        self.thread.update(|thread| ThreadCalls { counted: thread.counted - 1, ..thread });
        self.queue.done(&self.execution, &self.spec, self.thread.get());
    }

    /// Calls the function. An error is the end: that of a function that was done at once.
    fn start(
        &self,
        function: &'static str,
        values: Result<Vec<Incoming>, Error>,
        start: impl FnOnce(Arguments) -> Result<Running, Error>,
    ) -> Result<Running, Ended> {
        let execution = &self.execution;
        let values = values.map_err(failed)?;
        if execution.is_cancelled() {
            return Err(failed(self.cancelled()));
        }
        let arguments = Arguments::new(function, self.queue.session.clone(), values);
        match caught(&execution.name, || execution.run(|| start(arguments))).map_err(failed)? {
            Running::Done(finished) => Err(self.pack(finished)),
            running => Ok(running),
        }
    }

    async fn go_on(&self, running: Running) -> Ended {
        let execution = &self.execution;
        match running {
            Running::Done(finished) => outside(|| self.pack(finished)).await,
            Running::Waiting(turn) => match guarded(execution, execution.scope(turn)).await {
                Ok(turn) => {
                    let run = || self.pack(caught(&execution.name, || execution.run(turn)));
                    outside(run).await
                }
                Err(error) => failed(error),
            },
            Running::Future(future) => {
                let finished = inside(guarded(execution, execution.scope(future))).await;
                outside(|| self.pack(finished.unwrap_or_else(Err))).await
            }
            Running::Items(items) => self.stream(Items::Iterator(items)).await,
            Running::ItemsOfActor(items) => self.stream(Items::OfActor(items)).await,
            Running::Stream(items) => self.stream(Items::Stream(items)).await,
        }
    }

    /// Whether it has failed of what it asked the cluster for since this process lost the head.
    fn is_without_head(&self, error: &Error) -> bool {
        match self.queue.session.process().ended() {
            Some(Error::SessionEnded { why }) => match error {
                // In its text, or in what it was made from.
                Error::Application { error, .. } => {
                    let occurs = || error.payload.0.windows(why.len()).any(|part| part == why.as_bytes());
                    error.message.contains(why) || occurs()
                }
                error => error.to_string().contains(why),
            },
            _ => false,
        }
    }

    /// That is no fault of the user's, and may be tried again.
    fn without_head(&self, error: &Error) -> Error {
        Error::ContactLost {
            what: self.execution.name.to_string(),
            who: format!("the head, in its worker process (pid {})", std::process::id()),
            why: format!(
                "the head is gone, or heard nothing from the process for {:?}, and {THEN_FAILED}{error}",
                limits().lost
            ),
            attempts: 1,
        }
    }

    fn cancelled(&self) -> Error {
        Error::Cancelled { task: self.execution.name.to_string() }
    }

    /// Encodes what the function gave, and drops it: both may call user code.
    fn pack(&self, finished: Finished) -> Ended {
        let name = &self.execution.name;
        let (mut outputs, mut held) = (Vec::new(), Vec::new());
        let packed = caught(name, || {
            let values: OutputValues = finished.map_err(|error| named(error, name))?;
            outputs.reserve_exact(values.len());
            for (index, value) in values.iter().enumerate() {
                if self.execution.is_disowned() {
                    // Stored now, it would take the place of what another attempt has given.
                    return Err(self.cancelled());
                }
                let output = self.spec.id.output(index as u32);
                let replaces = !self.spec.remakes;
                let (value, refs) = self.queue.session.pack_output(output, &**value, replaces, name)?;
                outputs.push(value);
                held.extend(refs);
            }
            Ok(())
        });
        if let Err(error) = packed {
            self.queue.session.process().discard(&self.spec, &outputs);
            return failed(error);
        }
        match outputs.pop() {
            Some(value) if outputs.is_empty() => (Outcome::One(value), held),
            last => {
                outputs.extend(last);
                (Outcome::Many(outputs), held)
            }
        }
    }

    fn pack_item(&self, index: u32, item: Item) -> Result<(ObjectValue, Vec<Handle>), Error> {
        let name = &self.execution.name;
        caught(name, || {
            let item = item.map_err(|error| named(error, name))?;
            if self.execution.is_disowned() {
                return Err(self.cancelled());
            }
            // The consumer may have it from an earlier attempt.
            self.queue.session.pack_output(self.spec.id.output(index), &*item, false, name)
        })
    }

    async fn stream(&self, mut items: Items) -> Ended {
        let Outputs::Stream { ahead } = self.spec.outputs else {
            let what = format!("{} gives a stream, and its caller expects none", self.execution.name);
            return failed(Error::InvalidArgument { what });
        };
        let sent = self.send_items(&mut items, ahead).await;
        let dropped = items.end(&self.execution).await;
        match sent.and_then(|count| dropped.map(|()| count)) {
            Ok(count) => (Outcome::StreamEnded(count), Vec::new()),
            Err(error) => failed(error),
        }
    }

    async fn send_items(&self, items: &mut Items, ahead: u32) -> Result<u32, Error> {
        if self.execution.is_disowned() {
            // A later attempt may have its credit by now.
            return Err(self.cancelled());
        }
        let registered = Registered::new(self.queue, self.spec.id);
        let mut index = 0;
        loop {
            self.consumer(&registered.0, index, ahead).await?;
            let Some(item) = items.next(&self.execution).await else { return Ok(index) };
            let pack = || self.pack_item(index, item);
            let (value, refs) = if items.is_asynchronous() { pack() } else { outside(pack).await }?;
            self.queue.send_item(self.spec.id, index, value, refs);
            index += 1;
            if self.execution.is_cancelled() {
                return Err(self.cancelled());
            }
        }
    }

    /// Waits until the consumer has room for an item. Meanwhile the call is not one of those that run at a time.
    async fn consumer(&self, credit: &Credit, index: u32, ahead: u32) -> Result<(), Error> {
        if credit.covers(index, ahead) {
            return Ok(());
        }
        self.pauses(true);
        let waited = guarded(&self.execution, pin!(self.room(credit, index, ahead))).await;
        self.pauses(false);
        waited
    }

    fn pauses(&self, pauses: bool) {
        let ThreadCalls { counted, paused } = self.thread.get();
        let beside = match pauses {
            true => ThreadCalls { counted: counted - 1, paused },
            false => ThreadCalls { counted, paused: paused - 1 },
        };
        if let Some(place) = &self.execution.place {
            self.execution.has_place(!pauses);
            self.queue.pauses(place, &self.spec, pauses, beside);
            if !pauses {
                self.execution.pauses(false);
            }
        }
        self.thread.set(match pauses {
            true => ThreadCalls { paused: beside.paused + 1, ..beside },
            false => ThreadCalls { counted: beside.counted + 1, ..beside },
        });
    }

    async fn room(&self, credit: &Credit, index: u32, ahead: u32) {
        let mut room = pin!(credit.for_item(index, ahead));
        if tokio::time::timeout(PROMPT, &mut room).await.is_err() {
            if self.execution.place.is_some() {
                self.execution.pauses(true);
            }
            // The consumer may itself wait for a task that needs the CPU.
            let waiting = self.execution.waits_for_others();
            room.await;
            drop(waiting);
        }
    }
}

/// The items of a stream, as user code makes them.
enum Items {
    Iterator(Box<dyn Iterator<Item = Item> + Send>),
    OfActor(BoxStream<'static, Item>),
    Stream(BoxStream<'static, Item>),
}

impl Items {
    fn is_asynchronous(&self) -> bool {
        matches!(self, Items::Stream(_))
    }

    /// The next item. An error is the last.
    async fn next(&mut self, execution: &Arc<Execution>) -> Option<Item> {
        match self {
            Items::Iterator(items) => {
                let next = || caught(&execution.name, || Ok(execution.run(|| items.next())));
                outside(next).await.unwrap_or_else(|error| Some(Err(error)))
            }
            Items::OfActor(items) => {
                // Code that is not asynchronous is never dropped: it hears of its cancellation as that does.
                let next = stoppable(execution, execution.scope(items.next()), |poll| poll());
                polled_outside(next).await.unwrap_or_else(|error| Some(Err(error)))
            }
            Items::Stream(items) => {
                let next = guarded(execution, execution.scope(items.next()));
                inside(next).await.unwrap_or_else(|error| Some(Err(error)))
            }
        }
    }

    /// Drops what makes the items.
    async fn end(self, execution: &Arc<Execution>) -> Result<(), Error> {
        let is_asynchronous = self.is_asynchronous();
        let end = || {
            caught(&execution.name, || {
                execution.run(|| drop(self));
                Ok(())
            })
        };
        if is_asynchronous { inside(async { end() }).await } else { outside(end).await }
    }
}

/// A future of user code: its panics and its cancellation are errors, and it is dropped when cancelled.
async fn guarded<F: Future + Unpin>(execution: &Arc<Execution>, future: F) -> Result<F::Output, Error> {
    stoppable(execution, future, |poll| context::guarded(poll)).await
}

/// As [`guarded`], polled by `by`. What waits for the cancellation of its task hears of it before it is dropped.
async fn stoppable<F: Future + Unpin>(
    execution: &Arc<Execution>,
    future: F,
    by: impl Fn(&mut dyn FnMut() -> Poll<F::Output>) -> Poll<F::Output>,
) -> Result<F::Output, Error> {
    let mut future = Some(future);
    let mut all_know = pin!(execution.clone().all_know_that_it_stops());
    let (mut do_know, mut polls_left) = (false, POLLS_TO_HEAR);
    let ended = std::future::poll_fn(|cx| {
        let Some(future) = &mut future else { return Poll::Pending };
        let stopped = || Poll::Ready(Err(Error::Cancelled { task: execution.name.to_string() }));
        if execution.is_to_be_dropped() {
            return stopped();
        }
        match catch_unwind(AssertUnwindSafe(|| by(&mut || future.poll_unpin(cx)))) {
            Ok(Poll::Ready(done)) => return Poll::Ready(Ok(done)),
            Ok(Poll::Pending) => {}
            Err(payload) => return Poll::Ready(Err(panicked(&execution.name, &*payload))),
        }
        do_know = do_know || all_know.as_mut().poll(cx).is_ready();
        if execution.is_to_be_dropped() || do_know && polls_left == 0 {
            return stopped();
        }
        if do_know {
            // A part of it waits for that, and others may be polled before.
            polls_left -= 1;
            cx.waker().wake_by_ref();
        }
        Poll::Pending
    })
    .await;
    let dropped = caught(&execution.name, || {
        execution.run(|| drop(future.take()));
        Ok(())
    });
    match dropped {
        Ok(()) => ended,
        Err(error) => ended.and(Err(error)),
    }
}

/// The function's own error names the task as its caller called it.
fn named(error: Error, name: &str) -> Error {
    match error {
        Error::Application { error, .. } => Error::Application { task: name.to_owned(), error, attempts: 1 },
        other => other,
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
        // A later attempt may have one by now.
        self.1.streams.remove_if(&self.2, |_, credit| Arc::ptr_eq(credit, &self.0));
    }
}
