//! What the macros' code refers to. Not for users.

use std::any::Any;
use std::future::Future;
use std::ops::Deref;
use std::pin::Pin;
use std::process::{ExitCode, Termination};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use futures::stream::BoxStream;
use parking_lot::Mutex;
use serde::Serialize;
use serde::de::DeserializeOwned;
use wingbeat_core::error::{Error, Result};
use wingbeat_process::registry::{Finished, Item, Outgoing, OutputValues, Turn, application_error};
use wingbeat_process::{Held, Session, with_state};

pub use futures::StreamExt;
pub use inventory;
pub use serde;
pub use wingbeat_process::Arguments;
pub use wingbeat_process::options::{Declared, RetryOn, UNLIMITED};
pub use wingbeat_process::registry::{Class, Constructing, Defaults, Entry, Function, Instance, Method, Running, one};

pub use crate::shape::{Items, Many, One};

/// An error whose type reaches the caller.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be encoded, so the error reaches the caller as its text",
    label = "no error of this type is ever seen",
    note = "say which texts are tried again: `retry_if = |text: &String| text.contains(\"busy\")`"
)]
pub trait Whole: DeserializeOwned + 'static {}

impl<E: DeserializeOwned + 'static> Whole for E {}

/// The name of a type of errors.
pub fn error_name<E: Whole>() -> &'static str {
    std::any::type_name::<E>()
}

/// Whether `holds` of the function's own error.
pub fn retry_if<E: DeserializeOwned + 'static>(error: &Error, holds: impl Fn(&E) -> bool) -> bool {
    error.application().is_some_and(|error| holds(&error))
}

/// The error of a function, on its way to the caller. Which of the traits below applies is chosen by the compiler: the one that needs no
/// further reference, if it can.
pub struct Failure<'a, E>(pub &'a E);

/// An error that holds any other, as `anyhow::Error` and `Box<dyn Error + Send + Sync>` do: its text is sent, since it cannot be encoded.
pub trait SentAsText {
    /// How it is sent.
    fn conversion(&self) -> ToText {
        ToText
    }
}

impl<E: Deref<Target = AnyError>> SentAsText for Failure<'_, E> {}

/// Any other error: it is encoded.
pub trait SentAsValue {
    /// How it is sent.
    fn conversion(&self) -> ToValue {
        ToValue
    }
}

impl<E> SentAsValue for &Failure<'_, E> {}

type AnyError = dyn std::error::Error + Send + Sync;

/// See [`SentAsText`].
pub struct ToText;

impl ToText {
    /// An application error with a `String`: the text of the error and of its causes, as anyhow's `{:#}` has it.
    pub fn converted<E: Deref<Target = AnyError>>(self, function: &str, error: &E) -> Error {
        let mut text = error.to_string();
        let mut cause = error.source();
        while let Some(error) = cause {
            text.push_str(": ");
            text.push_str(&error.to_string());
            cause = error.source();
        }
        application_error(function, &text)
    }
}

/// See [`SentAsValue`].
pub struct ToValue;

impl ToValue {
    /// An application error with the error itself.
    pub fn converted<E: Serialize + std::fmt::Display + 'static>(self, function: &str, error: &E) -> Error {
        application_error(function, error)
    }
}

/// The size of fields that lie one after another.
pub const fn sum(sizes: &[usize]) -> usize {
    match sizes {
        [] => 0,
        [first, rest @ ..] => *first + sum(rest),
    }
}

/// Boxes one output.
pub fn outgoing<T: Serialize + Send + 'static>(value: T) -> Box<dyn Outgoing> {
    Box::new(value)
}

/// Several outputs.
pub fn many<const N: usize>(values: [Box<dyn Outgoing>; N]) -> OutputValues {
    values.into_iter().collect()
}

/// Finds an actor of a class by name.
pub async fn find_actor<H: From<crate::ActorRef>>(
    class: &'static Class,
    name: &str,
    namespace: Option<&str>,
) -> Result<H> {
    let found = Session::current()?.find_actor(name, namespace, Some(class)).await?;
    Ok(H::from(crate::ActorRef::new(found)))
}

/// The cell of an actor.
pub fn cell<C: Any + Send + Sync>(instance: Instance, method: &str) -> Result<Arc<C>> {
    instance.downcast().map_err(|_| Error::InvalidArgument { what: format!("{method} was called on another class") })
}

/// The state of an actor that runs one call at a time.
pub struct Exclusive<T>(Arc<tokio::sync::Mutex<T>>);

impl<T: Send + 'static> Exclusive<T> {
    pub fn instance(value: T) -> Instance {
        Arc::new(Exclusive(Arc::new(tokio::sync::Mutex::new(value))))
    }
    pub async fn read(&self) -> Held<tokio::sync::MutexGuard<'_, T>> {
        self.write().await
    }
    pub async fn write(&self) -> Held<tokio::sync::MutexGuard<'_, T>> {
        match self.0.try_lock() {
            Ok(state) => Held::new(state),
            Err(_) => Held::after(self.0.lock()).await,
        }
    }
    pub fn run_read(self: Arc<Self>, call: impl FnOnce(&T) -> Finished + Send + 'static) -> Running {
        self.run_write(|state| call(state))
    }
    /// Runs a call that is not asynchronous. It waits for its turn without blocking the thread, which may be the one that
    /// the holder of the lock goes on with; the call itself runs outside of any runtime.
    pub fn run_write(self: Arc<Self>, call: impl FnOnce(&mut T) -> Finished + Send + 'static) -> Running {
        if let Ok(mut state) = self.0.try_lock() {
            return Running::Done(with_state(|| call(&mut state)));
        }
        let lock = self.0.clone().lock_owned();
        Running::Waiting(Box::pin(async move {
            let mut state = Held::after(lock).await;
            let turn: Turn = Box::new(move || call(&mut state));
            turn
        }))
    }
}

/// The state of an actor that runs several calls at a time.
pub struct Shared<T>(Arc<tokio::sync::RwLock<T>>);

impl<T: Send + Sync + 'static> Shared<T> {
    pub fn instance(value: T) -> Instance {
        Arc::new(Shared(Arc::new(tokio::sync::RwLock::new(value))))
    }
    pub async fn read(&self) -> Held<tokio::sync::RwLockReadGuard<'_, T>> {
        match self.0.try_read() {
            Ok(state) => Held::new(state),
            Err(_) => Held::after(self.0.read()).await,
        }
    }
    pub async fn write(&self) -> Held<tokio::sync::RwLockWriteGuard<'_, T>> {
        match self.0.try_write() {
            Ok(state) => Held::new(state),
            Err(_) => Held::after(self.0.write()).await,
        }
    }
    /// As [`Exclusive::run_write`], beside other readers.
    pub fn run_read(self: Arc<Self>, call: impl FnOnce(&T) -> Finished + Send + 'static) -> Running {
        if let Ok(state) = self.0.try_read() {
            return Running::Done(with_state(|| call(&state)));
        }
        let lock = self.0.clone().read_owned();
        Running::Waiting(Box::pin(async move {
            let state = Held::after(lock).await;
            let turn: Turn = Box::new(move || call(&state));
            turn
        }))
    }
    /// As [`Exclusive::run_write`].
    pub fn run_write(self: Arc<Self>, call: impl FnOnce(&mut T) -> Finished + Send + 'static) -> Running {
        if let Ok(mut state) = self.0.try_write() {
            return Running::Done(with_state(|| call(&mut state)));
        }
        let lock = self.0.clone().write_owned();
        Running::Waiting(Box::pin(async move {
            let mut state = Held::after(lock).await;
            let turn: Turn = Box::new(move || call(&mut state));
            turn
        }))
    }
}

#[derive(Default)]
struct Slot {
    item: Option<Item>,
    taken: Option<Waker>,
}

/// Where a [`yielding`] body sends its items.
pub struct Yield(Arc<Mutex<Slot>>);

impl Yield {
    /// Gives an item, and goes on when the next is wanted.
    pub async fn send(&mut self, item: Item) {
        self.0.lock().item = Some(item);
        std::future::poll_fn(|cx| {
            let mut slot = self.0.lock();
            if slot.item.is_none() {
                return Poll::Ready(());
            }
            slot.taken = Some(cx.waker().clone());
            Poll::Pending
        })
        .await;
    }
}

struct Yielding {
    body: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
    slot: Arc<Mutex<Slot>>,
}

impl futures::Stream for Yielding {
    type Item = Item;
    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Item>> {
        if let Some(body) = &mut self.body
            && body.as_mut().poll(cx).is_ready()
        {
            self.body = None;
        }
        match self.slot.lock().item.take() {
            Some(item) => Poll::Ready(Some(item)),
            None if self.body.is_none() => Poll::Ready(None),
            None => Poll::Pending,
        }
    }
}

/// A stream of what an asynchronous body sends; it may borrow from itself between items.
pub fn yielding<F, B>(body: F) -> BoxStream<'static, Item>
where
    F: FnOnce(Yield) -> B,
    B: Future<Output = ()> + Send + 'static,
{
    let slot = Arc::new(Mutex::new(Slot::default()));
    let body = body(Yield(slot.clone()));
    Box::pin(Yielding { body: Some(Box::pin(body)), slot })
}

/// Runs an async `main`, and leaves the cluster at its end, also when it fails or panics.
pub fn run_main<F: Future>(main: F) -> F::Output {
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("wingbeat: cannot start the runtime of main: {error}");
            std::process::exit(1);
        }
    };
    let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| runtime.block_on(main)));
    runtime.block_on(crate::shutdown());
    result.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// What an async `main` gave. Which of the traits below applies is chosen by the compiler: the one that needs no further
/// reference, if it can.
pub struct Main<T>(pub Option<T>);

/// The end of a `main` that gives a result: its error is printed as a sentence, not as Rust prints it from `main`.
pub trait ErrorOfMain {
    /// The exit code.
    fn exit(self) -> ExitCode;
}

impl<T: Termination, E: Into<Box<dyn std::error::Error>>> ErrorOfMain for &mut Main<Result<T, E>> {
    fn exit(self) -> ExitCode {
        match self.0.take() {
            Some(Err(error)) => {
                eprintln!("error: {}", sentence(&*error.into()));
                ExitCode::FAILURE
            }
            Some(Ok(value)) => value.report(),
            None => ExitCode::SUCCESS,
        }
    }
}

/// The end of any other `main`.
pub trait EndOfMain {
    /// The exit code.
    fn exit(self) -> ExitCode;
}

impl<T: Termination> EndOfMain for &mut &mut Main<T> {
    fn exit(self) -> ExitCode {
        self.0.take().map_or(ExitCode::SUCCESS, T::report)
    }
}

/// The error and its causes, each once.
fn sentence(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let also = error.to_string();
        if !text.contains(&also) {
            text.push_str(": ");
            text.push_str(&also);
        }
        cause = error.source();
    }
    text
}
