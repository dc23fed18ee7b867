use std::fmt;
use std::marker::PhantomData;

use serde::{Deserializer, Serializer};
use wingbeat_core::ActorId;
#[allow(unused_imports, reason = "named in the documentation")]
use wingbeat_core::error::Error;
use wingbeat_core::error::Result;
use wingbeat_process::registry::Class;
use wingbeat_process::{CallArgs, Session, actor, options};

use crate::placement::placement_options;
use crate::shape::arities;
use crate::{CallOptions, IntoArg};

/// An actor, whatever its class: its id, and ways to end it. Handles of classes are made of it.
///
/// An actor ends when nobody has a handle of it any more. Two actors that have handles of each other keep each other alive,
/// until their creator or job ends, or one is killed or terminated.
///
/// ```no_run
/// # struct Tally { n: u64 }
/// # #[wingbeat::actor] impl Tally { fn new(n: u64) -> Self { Tally { n } } fn add(&mut self, by: u64) -> u64 { self.n += by; self.n } }
/// # async fn run() -> wingbeat::Result<()> {
/// let tally = Tally::remote(0);
/// let last = tally.add(1);
/// tally.actor().terminate();             // after the call above
/// assert_eq!(last.get().await?, 1);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct ActorRef {
    handle: wingbeat_process::ActorHandle,
    options: options::TaskOptions,
}

impl ActorRef {
    pub(crate) fn new(handle: wingbeat_process::ActorHandle) -> Self {
        ActorRef { handle, options: Default::default() }
    }

    /// The actor of this name in the session's namespace, whatever its class: also of one that this program does not have. It cannot be
    /// called; a handle for that is `Class::named(name)`.
    ///
    /// ```no_run
    /// # async fn run() -> wingbeat::Result<()> {
    /// use wingbeat::ActorRef;
    /// let old = ActorRef::named("jobs").await?;
    /// println!("ending a {}", old.class_name());
    /// old.terminate();
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::ActorNotFound`] if there is none, or there is no session.
    pub async fn named(name: &str) -> Result<ActorRef> {
        Session::current()?.find_actor(name, None, None).await.map(ActorRef::new)
    }

    /// As [`named`](Self::named), in another namespace.
    ///
    /// # Errors
    /// As `named`.
    pub async fn named_in(namespace: &str, name: &str) -> Result<ActorRef> {
        Session::current()?.find_actor(name, Some(namespace), None).await.map(ActorRef::new)
    }

    pub(crate) fn handle(&self) -> &wingbeat_process::ActorHandle {
        &self.handle
    }

    pub(crate) fn call_options(&self) -> &options::TaskOptions {
        &self.options
    }

    /// The actor's id.
    pub fn id(&self) -> ActorId {
        self.handle.id()
    }

    /// Crate, modules and name of its class.
    pub fn class_name(&self) -> &str {
        self.handle.class_name()
    }

    /// Ends the actor at once, without restart. Calls that run or wait fail with [`Error::ActorDied`].
    pub fn kill(&self) {
        if let Some(session) = self.handle.session() {
            session.kill(&self.handle, false);
        }
    }

    /// Ends the actor's process at once; it is restarted within its budget.
    pub fn kill_may_restart(&self) {
        if let Some(session) = self.handle.session() {
            session.kill(&self.handle, true);
        }
    }

    /// Lets the actor finish the calls that this process has made, and those that it has been sent by others, and ends
    /// it: its value is dropped, and its `Drop` runs. Later calls fail with [`Error::ActorDied`]. An actor ends itself with
    /// [`exit_actor`](crate::exit_actor).
    pub fn terminate(&self) {
        if let Some(session) = self.handle.session() {
            session.terminate(&self.handle);
        }
    }

    #[doc(hidden)]
    pub fn with(&self, options: CallOptions) -> ActorRef {
        ActorRef { handle: self.handle.clone(), options: options.options }
    }

    #[doc(hidden)]
    pub fn serialize_for<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        actor::serialize_actor(&self.handle, serializer)
    }

    #[doc(hidden)]
    pub fn deserialize_as<'de, D: Deserializer<'de>>(deserializer: D, class: &'static Class) -> Result<Self, D::Error> {
        actor::deserialize_actor(deserializer, class).map(ActorRef::new)
    }

    /// The session, or why the actor could not even be asked for.
    pub(crate) fn session_or_error(&self) -> Result<Session> {
        self.handle.session().ok_or_else(|| self.handle.failure())
    }
}

/// The handle type of an actor class, `TallyHandle` of `Tally`. The attribute [`actor`](macro@crate::actor) implements it.
pub trait ActorHandle: From<ActorRef> {
    #[doc(hidden)]
    fn class() -> &'static Class;
}

/// Options of one actor; `.remote(…)` makes it.
///
/// ```no_run
/// # struct Tally; #[wingbeat::actor] impl Tally { fn new(start: u64) -> Self { Tally } fn add(&mut self, by: u64) {} }
/// let tally = Tally::options().name("tally").max_restarts(3).remote(0);
/// ```
#[must_use = "options do nothing until `.remote(…)` makes the actor"]
pub struct ActorOptions<Signature> {
    class: &'static Class,
    options: options::ActorOptions,
    signature: PhantomData<Signature>,
}

impl<Signature> ActorOptions<Signature> {
    #[doc(hidden)]
    pub fn of(class: &'static Class) -> Self {
        ActorOptions { class, options: Default::default(), signature: PhantomData }
    }

    /// A name, by which others find it with `named`. Unique within its namespace.
    pub fn name(mut self, name: &str) -> Self {
        self.options.name = Some(name.to_owned());
        self
    }

    /// The namespace of the name; the session's if nothing is said.
    pub fn namespace(mut self, namespace: &str) -> Self {
        self.options.namespace = Some(namespace.to_owned());
        self
    }

    /// It outlives its creator and its job, until it is killed or terminated. It needs a name.
    pub fn detached(mut self) -> Self {
        self.options.detached = true;
        self
    }

    /// A node that is drained (`wingbeat drain --stop`) may end as soon as nothing else is left on it, whatever this actor
    /// does: for caches and other helpers of one node.
    pub fn yields_to_drain(mut self) -> Self {
        self.options.yields_to_drain = true;
        self
    }

    /// CPUs that it holds while it lives. If nothing is said, it needs 1 to be placed and holds none.
    pub fn num_cpus(mut self, cpus: f64) -> Self {
        self.options.num_cpus = Some(cpus);
        self
    }

    /// How often it is started again when its process or node is lost; never if nothing is said. A process that is killed
    /// from outside counts, and so does [`kill_may_restart`](crate::ActorRef::kill_may_restart); one that was gone before
    /// the constructor began does not. After a life shorter than a second it starts again at once, and after each further
    /// one in a row it rests before: 0.1 s, 0.2 s and so on, up to 10 s. [`UNLIMITED`](crate::UNLIMITED) is as often as it takes.
    pub fn max_restarts(mut self, restarts: u32) -> Self {
        self.options.max_restarts = Some(restarts);
        self
    }

    /// Attempts after the first that restarts of the actor, or losses of contact with it, may cost a call; none if nothing is said.
    /// The calls of a process that were in flight when the actor's process ended are made again in its next life, in the order in
    /// which they were made and before later ones. They may have been carried out before. Each end of the process costs all of them
    /// a retry, also those that waited behind others and had not begun: with many calls in flight and a method that ends the process
    /// again and again, calls behind it fail unrun when theirs are used up. What a method's `max_retries` or
    /// [`CallOptions::max_retries`] says goes before.
    ///
    /// ```no_run
    /// # struct Tally; #[wingbeat::actor] impl Tally { fn new(start: u64) -> Self { Tally } fn add(&mut self, by: u64) {} }
    /// use wingbeat::UNLIMITED;
    /// let tally = Tally::options().max_restarts(UNLIMITED).max_task_retries(UNLIMITED).remote(0);
    /// ```
    pub fn max_task_retries(mut self, retries: u32) -> Self {
        self.options.max_task_retries = Some(retries);
        self
    }

    /// Calls of one process that may wait or run; the next one fails with [`Error::TooManyPendingCalls`]. Without limit if
    /// nothing is said: then what does not fit into the actor waits in the memory of its caller.
    ///
    /// ```no_run
    /// # struct Tally; #[wingbeat::actor] impl Tally { fn new(start: u64) -> Self { Tally } fn add(&mut self, by: u64) {} }
    /// let tally = Tally::options().max_pending_calls(1000).remote(0);
    /// ```
    pub fn max_pending_calls(mut self, calls: u32) -> Self {
        self.options.max_pending_calls = Some(calls);
        self
    }

    /// Calls that run at a time, of a class whose attribute says more than one: `#[wingbeat::actor(max_concurrency = 8)]`.
    /// Methods that take `&mut self` still exclude all others. For other classes, more than one is
    /// [`Error::InvalidOption`](crate::Error::InvalidOption).
    pub fn max_concurrency(mut self, calls: u32) -> Self {
        self.options.max_concurrency = Some(calls);
        self
    }
}

impl<Signature> Clone for ActorOptions<Signature> {
    fn clone(&self) -> Self {
        ActorOptions { class: self.class, options: self.options.clone(), signature: PhantomData }
    }
}

impl<Signature> fmt::Debug for ActorOptions<Signature> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ActorOptions").field("class", &self.class.path).field("options", &self.options).finish()
    }
}

placement_options!(ActorOptions);

macro_rules! create {
    ($($a:ident $arg:ident $n:tt),*) => {
        impl<$($a,)* H: From<ActorRef>> ActorOptions<fn($($a),*) -> H> {
            /// Makes the actor. What goes wrong is what its calls give.
            #[allow(clippy::too_many_arguments)]
            pub fn remote(self, $($arg: impl IntoArg<$a>),*) -> H {
                let class = self.class;
                let session = match Session::current() {
                    Ok(session) => session,
                    Err(error) => return H::from(ActorRef::new(wingbeat_process::ActorHandle::failed(class, error))),
                };
                #[allow(unused_mut)]
                let mut args = CallArgs::new(&session, class.path, class.parameters, &class.checked);
                $($arg.add_to(&mut args);)*
                let args = args.finish();
                H::from(ActorRef::new(session.create_actor(class, args, &self.options)))
            }

            /// The actor of this name, or a new one if there is none; of callers that race, one makes it.
            ///
            /// # Errors
            /// The actor of this name is of another class, or no new one can be made.
            #[allow(clippy::too_many_arguments)]
            pub async fn get_or_create(self, $($arg: impl IntoArg<$a>),*) -> Result<H> {
                let class = self.class;
                let session = Session::current()?;
                let creating = {
                    #[allow(unused_mut)]
                    let mut args = CallArgs::new(&session, class.path, class.parameters, &class.checked);
                    $($arg.add_to(&mut args);)*
                    let args = args.finish();
                    session.get_or_create_actor(class, args, &self.options)
                };
                creating.await.map(|actor| H::from(ActorRef::new(actor)))
            }
        }
    };
}
arities!(create);
