use std::fmt;
use std::future::{Future, IntoFuture};
use std::marker::PhantomData;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use wingbeat_core::ObjectId;
use wingbeat_core::codec::Number;
#[allow(unused_imports, reason = "named in the documentation")]
use wingbeat_core::error::Error;
use wingbeat_core::error::Result;
use wingbeat_process::{Handle, ObjectView, ValueFuture, block_on, values};

/// A value somewhere in the cluster that is there, or will be.
///
/// Clones refer to the same value; it is freed when nobody refers to it any more. A ref can be sent to other processes
/// inside arguments, results and other values of the cluster. A task runs also when nobody refers to its value; who drops a
/// stream cancels its task.
///
/// ```no_run
/// # #[wingbeat::remote] fn square(x: u64) -> u64 { x * x }
/// # async fn run() -> wingbeat::Result<()> {
/// let nine = square::remote(3);          // answers at once
/// let more = square::remote(&nine);      // runs when `nine` is there, wherever that is
/// assert_eq!(more.get().await? + nine.get().await?, 90);
/// # Ok(())
/// # }
/// ```
pub struct ObjectRef<T> {
    handle: Handle,
    value: PhantomData<fn() -> T>,
}

/// In place of the type of a value, where that is not known or does not matter: see [`AnyRef`].
#[derive(Debug)]
pub enum AnyValue {}

/// A ref to a value of whatever type: to wait for refs of several types together, and to cancel or keep them. [`ObjectRef::any`] makes it.
///
/// ```no_run
/// # #[wingbeat::remote] fn name() -> String { String::new() }
/// # #[wingbeat::remote] fn size() -> u64 { 0 }
/// # async fn run() -> wingbeat::Result<()> {
/// let (name, size) = (name::remote(), size::remote());
/// let (ready, _) = wingbeat::wait(vec![name.any(), size.any()], 1, None).await?;
/// if ready[0] == name.any() {
///     println!("the name is first: {}", name.get().await?);
/// }
/// # Ok(())
/// # }
/// ```
pub type AnyRef = ObjectRef<AnyValue>;

impl<T> ObjectRef<T> {
    /// A ref to the same object, without the type of its value.
    pub fn any(&self) -> AnyRef {
        AnyRef::new(self.handle.clone())
    }

    pub(crate) fn new(handle: Handle) -> Self {
        ObjectRef { handle, value: PhantomData }
    }

    pub(crate) fn handle(&self) -> &Handle {
        &self.handle
    }

    /// Its id.
    pub fn id(&self) -> ObjectId {
        self.handle.id()
    }

    /// Whether the value, or the reason why there is none, is known.
    pub fn is_ready(&self) -> bool {
        self.handle.is_ready()
    }

    /// Asks for the task that makes the value not to run, or to stop; see [`is_cancelled`](crate::is_cancelled). The
    /// tasks that it submitted are cancelled too. A finished task is left alone. One that goes on although it was asked
    /// to stop, or that handles the cancellation of what it waited for, may still answer with a value. Whoever has the
    /// ref can do this: a ref to an object of another process sends the request there.
    ///
    /// ```no_run
    /// # #[wingbeat::remote] fn search() -> u64 { 0 }
    /// # async fn run() -> wingbeat::Result<()> {
    /// let found = search::remote();
    /// if found.get_timeout(std::time::Duration::from_secs(5)).await.is_err() {
    ///     found.cancel();
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn cancel(&self) {
        if let Some(session) = self.handle.session() {
            session.cancel(&self.handle, false);
        }
    }

    /// As [`cancel`](Self::cancel), and if the task runs, its worker process ends. One that runs in the process of the task that submitted
    /// it is over for whoever waits, and its code runs on (see [`isolated`](crate::TaskOptions::isolated)).
    ///
    /// A call of an actor is not ended by force, since its process holds the state that others use: its result is
    /// [`Error::Cancelled`] at once, and the method is asked to stop, as by `cancel`. The actor lives on, busy for as long
    /// as the method runs; [`ActorRef::kill_may_restart`](crate::ActorRef::kill_may_restart) ends its process.
    pub fn cancel_force(&self) {
        if let Some(session) = self.handle.session() {
            session.cancel(&self.handle, true);
        }
    }

    fn pending(&self) -> ValueFuture {
        ValueFuture::new(&self.handle)
    }
}

impl<T: DeserializeOwned + 'static> ObjectRef<T> {
    /// The value, when it is there.
    ///
    /// # Errors
    /// Whatever kept the task from making it: its own error, a panic, a lost process, a cancellation; [`Error::kind`] says in one word which.
    ///
    /// ```no_run
    /// # #[wingbeat::remote] fn parse(text: String) -> Result<f64, String> { text.parse().map_err(|_| text) }
    /// # async fn run() -> wingbeat::Result<()> {
    /// match parse::remote("x".to_owned()).get().await {
    ///     Ok(number) => println!("{number}"),
    ///     Err(error) => match error.application::<String>() {
    ///         Some(its_own) => println!("the function says: {its_own}"),
    ///         None => println!("the cluster says: {error}"),
    ///     },
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn get(&self) -> GetFuture<T> {
        GetFuture { value: self.pending(), ty: PhantomData }
    }

    /// As [`get`](Self::get), by one that awaits others beside it, and sees itself to what the running task waits for.
    pub(crate) fn get_among_others(&self) -> GetFuture<T> {
        GetFuture { value: ValueFuture::among_others(&self.handle), ty: PhantomData }
    }

    /// As [`get`](Self::get), for at most `limit`.
    ///
    /// # Errors
    /// As `get`, or [`Error::TimedOut`]; the task goes on.
    pub async fn get_timeout(&self, limit: Duration) -> Result<T> {
        match self.handle.session() {
            Some(session) => {
                let what = || format!("getting {}", session.title(&self.handle));
                session.within(limit, what, self.get()).await
            }
            None => self.get().await,
        }
    }

    /// As [`get_timeout`](Self::get_timeout), blocking this thread.
    ///
    /// # Errors
    /// As `get_timeout`.
    pub fn get_timeout_blocking(&self, limit: Duration) -> Result<T> {
        block_on(self.get_timeout(limit))
    }

    /// As [`get`](Self::get), blocking this thread.
    ///
    /// # Errors
    /// As `get`.
    pub fn get_blocking(&self) -> Result<T> {
        self.pending().blocking()?.decode()
    }
}

impl<T: Number> ObjectRef<Vec<T>> {
    /// The elements, where they lie: a large vector is read in the node's shared memory, without a copy. One of `u128` or `i128` is
    /// copied, since it is not aligned there; a [`Buffer`](crate::Buffer) of them is not.
    ///
    /// ```no_run
    /// # #[wingbeat::remote] fn samples() -> Vec<f32> { vec![0.0; 1 << 20] }
    /// # async fn run() -> wingbeat::Result<()> {
    /// let view = samples::remote().view().await?;
    /// let mean = view.iter().sum::<f32>() / view.len() as f32;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`get`](Self::get).
    pub async fn view(&self) -> Result<ObjectView<T>> {
        self.pending().await?.view()
    }

    /// As [`view`](Self::view), for at most `limit`.
    ///
    /// # Errors
    /// As `view`, or [`Error::TimedOut`]; the task goes on.
    pub async fn view_timeout(&self, limit: Duration) -> Result<ObjectView<T>> {
        match self.handle.session() {
            Some(session) => {
                let what = || format!("viewing {}", session.title(&self.handle));
                session.within(limit, what, self.view()).await
            }
            None => self.view().await,
        }
    }

    /// As [`view`](Self::view), blocking this thread.
    ///
    /// # Errors
    /// As `get`.
    pub fn view_blocking(&self) -> Result<ObjectView<T>> {
        self.pending().blocking()?.view()
    }
}

/// The future of [`ObjectRef::get`].
pub struct GetFuture<T> {
    value: ValueFuture,
    ty: PhantomData<fn() -> T>,
}

impl<T: DeserializeOwned + 'static> Future for GetFuture<T> {
    type Output = Result<T>;
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<T>> {
        let value = ready!(Pin::new(&mut self.value).poll(cx));
        Poll::Ready(value.and_then(|value| value.decode()))
    }
}

impl<T: DeserializeOwned + 'static> IntoFuture for ObjectRef<T> {
    type Output = Result<T>;
    type IntoFuture = GetFuture<T>;
    fn into_future(self) -> GetFuture<T> {
        self.get()
    }
}

impl<T: DeserializeOwned + 'static> IntoFuture for &ObjectRef<T> {
    type Output = Result<T>;
    type IntoFuture = GetFuture<T>;
    fn into_future(self) -> GetFuture<T> {
        self.get()
    }
}

impl<T> Clone for ObjectRef<T> {
    fn clone(&self) -> Self {
        ObjectRef::new(self.handle.clone())
    }
}

/// Refs are equal that refer to the same object.
impl<T> PartialEq for ObjectRef<T> {
    fn eq(&self, other: &Self) -> bool {
        self.id() == other.id()
    }
}

impl<T> Eq for ObjectRef<T> {}

impl<T> std::hash::Hash for ObjectRef<T> {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        self.id().hash(state);
    }
}

impl<T> fmt::Debug for ObjectRef<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ObjectRef<{}>({})", std::any::type_name::<T>(), self.id())
    }
}

impl<T> Serialize for ObjectRef<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        values::serialize_handle(&self.handle, serializer)
    }
}

impl<'de, T> Deserialize<'de> for ObjectRef<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        values::deserialize_handle(deserializer).map(ObjectRef::new)
    }
}
