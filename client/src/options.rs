use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use serde::de::DeserializeOwned;
#[allow(unused_imports, reason = "named in the documentation")]
use wingbeat_core::error::Error;
use wingbeat_process::options::RetryOn;
use wingbeat_process::registry::{Function, Method};
use wingbeat_process::{CallArgs, Session, options, submit};

use crate::defaults;
use crate::placement::placement_options;
use crate::shape::{Shape, arities};
use crate::{ActorRef, IntoArg};

#[derive(Clone)]
#[allow(clippy::large_enum_variant, reason = "lives for the length of one call")]
enum Target {
    Function(&'static Function),
    Method(ActorRef, &'static Method),
}

/// Options of one call; `.remote(…)` makes it. What is impossible is the error of the ref that the call gives.
///
/// ```no_run
/// # #[wingbeat::remote] fn square(x: u64) -> u64 { x * x }
/// let nine = square::options().num_cpus(2.0).max_retries(5).name("three squared").remote(3);
///
/// let patient = square::options().max_retries(10);             // for several calls: each takes a clone
/// let squares: Vec<_> = (0..100u64).map(|x| patient.clone().remote(x)).collect();
/// ```
#[must_use = "options do nothing until `.remote(…)` makes the call"]
pub struct TaskOptions<Signature> {
    target: Target,
    options: options::TaskOptions,
    signature: PhantomData<Signature>,
}

impl<Signature> TaskOptions<Signature> {
    #[doc(hidden)]
    pub fn of(function: &'static Function) -> Self {
        TaskOptions { target: Target::Function(function), options: Default::default(), signature: PhantomData }
    }

    #[doc(hidden)]
    pub fn of_method(actor: &ActorRef, method: &'static Method) -> Self {
        let options = actor.call_options().clone();
        TaskOptions { target: Target::Method(actor.clone(), method), options, signature: PhantomData }
    }

    /// CPUs that the task holds while it runs; 1 if nothing is said. Fractions down to 1/10,000.
    pub fn num_cpus(mut self, cpus: f64) -> Self {
        self.options.num_cpus = Some(cpus);
        self
    }

    /// Attempts after the first that lost processes and nodes may cost; 3 if nothing is said, and
    /// [`UNLIMITED`](crate::UNLIMITED) for as many as it takes.
    pub fn max_retries(mut self, retries: u32) -> Self {
        self.options.max_retries = Some(retries);
        self
    }

    /// Attempts after the first that are made because an earlier one was ended for want of memory, each after a pause of 0.5 to
    /// 10 s; 8 if nothing is said, and none of a task with `max_retries(0)`, which may not run twice. They are counted apart from
    /// `max_retries`.
    pub fn max_memory_retries(mut self, retries: u32) -> Self {
        self.options.max_memory_retries = Some(retries);
        self
    }

    /// Whether the task has a process of its own. Otherwise it may run in the process of the task that has submitted it and waits, and
    /// its own process runs what it submits while it waits. That is a thousand times faster than another process, and what ends such a
    /// process, such as a crash, ends all that runs in it: they are tried again in processes of their own. A task that changes what
    /// belongs to its whole process, such as the working directory or a global variable, or that holds a lock of the process while it
    /// waits, is better isolated.
    ///
    /// ```no_run
    /// #[wingbeat::remote(isolated)]
    /// fn risky(x: u64) -> u64 { x }
    ///
    /// #[wingbeat::remote]
    /// fn plain(x: u64) -> u64 { x }
    ///
    /// let alone = (risky::remote(1), plain::options().isolated(true).remote(2));
    /// ```
    pub fn isolated(mut self, isolated: bool) -> Self {
        self.options.isolated = Some(isolated);
        self
    }

    /// Whether all of the function's own errors and panics are tried again too, within
    /// [`max_retries`](Self::max_retries): the first time at once, and then after a pause of 10 ms to 1 s. Of a stream, an error among its items is an item: only a panic is tried again.
    pub fn retry_errors(mut self, retry: bool) -> Self {
        self.options.retry_on = Some(if retry { RetryOn::Everything } else { RetryOn::Nothing });
        self
    }

    /// Tries the function's own errors of the type `E` again too, within [`max_retries`](Self::max_retries): the first time
    /// at once, and then after a pause of 10 ms to 1 s. May be said of several types. It takes the place of what the function's attribute says of errors.
    /// An `anyhow::Error`, and any other that cannot be encoded, reaches this process as its text: `retry_if(|text: &String| …)`.
    ///
    /// ```no_run
    /// # use serde::{Serialize, Deserialize};
    /// #[derive(Debug, Serialize, Deserialize, thiserror::Error)]
    /// #[error("{0} is busy")]
    /// struct Busy(String);
    ///
    /// #[wingbeat::remote]
    /// fn fetch(url: String) -> Result<Vec<u8>, Busy> { Err(Busy(url)) }
    ///
    /// let page = fetch::options().retry_on::<Busy>().max_retries(10).remote("a".to_owned());
    /// ```
    pub fn retry_on<E: DeserializeOwned + 'static>(mut self) -> Self {
        let chosen = self.options.retry_on.take().unwrap_or_default();
        self.options.retry_on = Some(chosen.or_type(std::any::type_name::<E>()));
        self
    }

    /// Tries those of the function's own errors again too of which `is_transient` holds, as with
    /// [`retry_on`](Self::retry_on). It is asked in this process, on a thread that asks one after another: it must not wait for tasks,
    /// since one of these may wait for the next answer. If it panics, or no thread can be started, the task fails.
    ///
    /// ```no_run
    /// # #[wingbeat::remote] fn fetch(url: String) -> Result<Vec<u8>, u16> { Err(503) }
    /// let page = fetch::options().retry_if(|status: &u16| *status >= 500).remote("a".to_owned());
    /// ```
    pub fn retry_if<E: DeserializeOwned + 'static>(
        mut self,
        is_transient: impl Fn(&E) -> bool + Send + Sync + 'static,
    ) -> Self {
        let chosen = self.options.retry_on.take().unwrap_or_default();
        let holds = move |error: &Error| error.application().is_some_and(|error| is_transient(&error));
        self.options.retry_on = Some(chosen.or_if(Arc::new(holds)));
        self
    }

    /// What to call the task in logs and errors.
    pub fn name(mut self, name: &str) -> Self {
        self.options.name = Some(name.to_owned());
        self
    }

    /// How long the task may take from this call to its result; then it is cancelled, and the result is
    /// [`Error::TimedOut`].
    ///
    /// A function that is not asynchronous is not interrupted: until it returns, it holds its process and its CPUs. Have
    /// it look at [`is_cancelled`](crate::is_cancelled) now and then, or end its process with
    /// [`cancel_force`](crate::ObjectRef::cancel_force).
    pub fn timeout(mut self, limit: Duration) -> Self {
        self.options.timeout = Some(limit);
        self
    }

    /// Items of a stream that may be on the way.
    pub fn stream_ahead(mut self, items: u32) -> Self {
        self.options.stream_ahead = Some(items);
        self
    }
}

impl<Signature> Clone for TaskOptions<Signature> {
    fn clone(&self) -> Self {
        TaskOptions { target: self.target.clone(), options: self.options.clone(), signature: PhantomData }
    }
}

impl<Signature> fmt::Debug for TaskOptions<Signature> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let called = match &self.target {
            Target::Function(function) => function.path,
            Target::Method(_, method) => method.path,
        };
        f.debug_struct("TaskOptions").field("called", &called).field("options", &self.options).finish()
    }
}

placement_options!(TaskOptions);

/// Options for the calls that are made through an actor handle; see the handle's `with`.
///
/// ```
/// use wingbeat::CallOptions;
/// let patient = CallOptions::new().timeout(std::time::Duration::from_secs(5)).max_retries(1);
/// ```
#[derive(Clone, Debug, Default)]
pub struct CallOptions {
    pub(crate) options: options::TaskOptions,
}

impl CallOptions {
    /// Nothing special.
    pub fn new() -> Self {
        Self::default()
    }

    /// How long a call may take; then it is cancelled, and its result is [`Error::TimedOut`]. A method that is not
    /// asynchronous is not interrupted, and later calls wait for it: have it look at
    /// [`is_cancelled`](crate::is_cancelled) now and then.
    pub fn timeout(mut self, limit: Duration) -> Self {
        self.options.timeout = Some(limit);
        self
    }

    /// Attempts after the first that restarts of the actor, or losses of contact with it, may cost; if nothing is said, the
    /// method's `max_retries` or the actor's [`max_task_retries`](crate::ActorOptions::max_task_retries). A call that is made again
    /// may have been carried out before, by the same actor if it was contact that was lost.
    pub fn max_retries(mut self, retries: u32) -> Self {
        self.options.max_retries = Some(retries);
        self
    }

    /// Items of a stream that may be on the way.
    pub fn stream_ahead(mut self, items: u32) -> Self {
        self.options.stream_ahead = Some(items);
        self
    }

    /// What to call the calls in logs and errors.
    pub fn name(mut self, name: &str) -> Self {
        self.options.name = Some(name.to_owned());
        self
    }
}

macro_rules! remote {
    ($($a:ident $arg:ident $n:tt),*) => {
        impl<$($a,)* S: Shape> TaskOptions<fn($($a),*) -> S> {
            /// Makes the call; answers at once.
            #[allow(clippy::too_many_arguments)]
            pub fn remote(self, $($arg: impl IntoArg<$a>),*) -> S::Refs {
                let submitted = match &self.target {
                    Target::Function(function) => match Session::current() {
                        Err(error) => submit::failed(function.outputs, error),
                        Ok(session) => {
                            #[allow(unused_mut)]
                            let mut args = CallArgs::new(&session, function.path, function.parameters, &function.checked);
                            $($arg.add_to(&mut args);)*
                            let args = args.finish();
                            session.submit(function, args, &defaults::filled(&self.options))
                        }
                    },
                    Target::Method(actor, method) => match actor.session_or_error() {
                        Err(error) => submit::failed(method.outputs, error),
                        Ok(session) => {
                            #[allow(unused_mut)]
                            let mut args = CallArgs::new(&session, method.path, method.parameters, &method.checked);
                            $($arg.add_to(&mut args);)*
                            let args = args.finish();
                            session.call(actor.handle(), method, args, &self.options)
                        }
                    },
                };
                S::refs(submitted)
            }
        }
    };
}
arities!(remote);
