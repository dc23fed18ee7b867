//! Remote tasks and actors.
//!
//! ```no_run
//! use wingbeat::prelude::*;
//!
//! #[wingbeat::remote]
//! fn square(x: u64) -> u64 { x * x }
//!
//! #[wingbeat::main]
//! async fn main() -> wingbeat::Result<()> {
//!     wingbeat::init().await?;              // a private cluster on this machine, or $WINGBEAT_ADDRESS
//!     let sixteen = square::remote(4);      // runs in a worker process
//!     let more = square::remote(sixteen);   // a ref is an argument
//!     println!("{}", more.get().await?);    // 256
//!     Ok(())
//! }
//! ```
//!
//! A worker process is this program's own executable, started in another mode: nothing is registered by hand,
//! and it works the same in a binary, an example and a test. The feature `testing` has clusters of several processes for tests.

extern crate self as wingbeat;

#[doc(hidden)]
pub mod __private;
mod actor;
mod args;
#[cfg(feature = "ndarray")]
mod array;
mod blocking;
pub mod buffer;
mod cluster;
mod defaults;
mod get;
mod init;
mod map;
mod named;
mod object_ref;
mod options;
mod placement;
mod placement_group;
mod pool;
mod queue;
mod running;
mod session;
mod shape;
mod stream;
#[cfg(feature = "testing")]
pub mod testing;

pub use actor::{ActorHandle, ActorOptions, ActorRef};
pub use args::IntoArg;
#[cfg(feature = "ndarray")]
pub use array::ArrayBuffer;
pub use blocking::block_on;
pub use cluster::{Explanation, Node, Subject};
#[doc(hidden)]
pub use defaults::with_defaults;
pub use get::{Waited, get_all, get_all_blocking, get_all_timeout, put, wait, wait_blocking};
pub use init::{Init, init, init_at, init_blocking, shutdown, shutdown_blocking};
pub use map::{Map, map};
pub use named::{NamedActor, list_named_actors, list_named_actors_everywhere};
pub use object_ref::{AnyRef, AnyValue, GetFuture, ObjectRef};
pub use options::{CallOptions, TaskOptions};
pub use placement_group::{Bundle, PlacementGroup, PlacementGroupBuilder, placement_group};
pub use pool::{ActorPool, PoolWork};
pub use queue::{Queue, QueueError};
pub use running::{
    assigned_resources, cancelled, current_actor, current_attempt, current_handle, current_node, current_task,
    exit_actor, gpu_ids, is_cancelled,
};
pub use session::{Scope, Session, SessionGuard};
pub use stream::ObjectStream;
pub use wingbeat_core::codec::{Number, Plain};
pub use wingbeat_core::error::{ApplicationError, Error, Result};
pub use wingbeat_core::memory::{EndedBy, MemoryShortage, MemoryUsage, MemoryUser};
pub use wingbeat_core::spec::Exit;
pub use wingbeat_core::spec::PlacementStrategy;
pub use wingbeat_core::{ActorId, ClusterId, JobId, NodeId, ObjectId, PlacementGroupId, TaskId};
pub use wingbeat_core::{Buffer, ByteSize, ErrorKind, InvalidByteSize, ProcessId};
pub use wingbeat_process::ObjectView;
pub use wingbeat_process::groups::Drained;
pub use wingbeat_process::options::{UNLIMITED, without_retries};

/// Makes a struct of numbers [`Plain`](trait@Plain), so that a [`Buffer`] of them goes into shared memory and is read there.
///
/// The struct has `#[repr(C)]`, plain fields (numbers, arrays of them, other plain structs), and no padding between or after
/// them, which is checked when it is compiled. It also needs serde, since a buffer is a sequence to other serializers. In a crate
/// that calls this one otherwise, `#[plain(crate = "path")]` says how.
///
/// ```
/// use wingbeat::Buffer;
///
/// #[derive(Clone, Copy, serde::Serialize, serde::Deserialize, wingbeat::Plain)]
/// #[repr(C)]
/// struct Particle {
///     position: [f32; 3],
///     mass: f32,
///     id: u64,
/// }
///
/// let particles: Buffer<Particle> = vec![Particle { position: [0.0; 3], mass: 1.0, id: 7 }; 1000].into();
/// assert_eq!(particles[999].id, 7);
/// ```
pub use wingbeat_macros::Plain;
/// Makes a type an actor: an instance of it lives in a worker process of its own, and is called through a handle.
///
/// Goes on the type's `impl` block, which stays as it is. The type gets `remote(…)` (and `options()`, `named(name)`,
/// `named_in(namespace, name)`), and a handle type `…Handle` gets its methods, with refs for results.
///
/// ```no_run
/// struct Tally { n: u64 }
///
/// #[wingbeat::actor]
/// impl Tally {
///     fn new(start: u64) -> Self { Tally { n: start } }
///     fn add(&mut self, by: u64) -> u64 { self.n += by; self.n }
/// }
///
/// # async fn run() -> wingbeat::Result<()> {
/// let tally = Tally::remote(40);
/// assert_eq!(tally.add(2).get().await?, 42);
/// # Ok(())
/// # }
/// ```
///
/// The constructor may be fallible and asynchronous: `async fn new(…) -> Result<Self, E>`. It runs in the actor's process, and again after each
/// restart. Calls wait until it is done, and fail with its error.
///
/// ```no_run
/// # #[wingbeat::remote] fn download(url: String) -> wingbeat::Result<Vec<u8>> { Ok(Vec::new()) }
/// struct Model { weights: Vec<u8> }
///
/// #[wingbeat::actor]
/// impl Model {
///     async fn new(url: String) -> wingbeat::Result<Self> {
///         Ok(Model { weights: download::remote(url).await? })
///     }
///     fn size(&self) -> u64 { self.weights.len() as u64 }
/// }
/// ```
///
/// Options: `num_cpus`, `num_gpus`, `gpu_memory`, `memory`, `resources(…)`, `labels`, `spread` and `wait_until_feasible` as of [`remote`](macro@crate::remote), `max_restarts` and `max_task_retries` (numbers or `unlimited`), `max_pending_calls`, `max_concurrency`,
/// `concurrency_groups(io = 2)`, `crate = "…"` as of `remote`; a method takes `#[method(group = "io")]`, `#[method(timeout = "30s")]`, `#[method(max_retries = 3)]`, `#[method(stream_ahead = 4)]` and `#[method(num_returns = 2)]` (8 at most). Methods that may run at the same time take `&self`; `&mut self` excludes all others.
///
/// The calls of one caller run one after another, in the order in which it made them. With `max_concurrency` above 1 or with
/// concurrency groups, calls run beside each other, and a later one may come first, also where `&mut self` lets one run at a
/// time.
pub use wingbeat_macros::actor;
/// Runs an `async fn main` on a tokio runtime, and leaves the cluster at its end, so that nothing is left behind. Takes `crate = "…"` as
/// [`remote`](macro@crate::remote) does.
pub use wingbeat_macros::main;
/// Makes a function callable on other processes.
///
/// The function stays as it is. A struct of the same name has `remote(…)`, which answers at once with a ref, and
/// `options()`. Arguments, results and errors are types with plain derived serde (no `untagged`, `tag`, `flatten`,
/// `skip_serializing_if` or `serde_json::Value`, and `skip` of a variant only behind all others); an argument may also be a ref
/// to one, whose value is then resolved before the call. `impl Iterator` and `impl Stream` come back as an [`ObjectStream`], and the
/// `E` of a `Result<T, E>` through [`Error::application`]; that of [`wingbeat::Result<T>`](Result) is an [`Error`], and of `anyhow::Result<T>` the caller gets the text (below). A tuple is one value; with `num_returns = 2` its two parts are two objects:
///
/// ```no_run
/// #[wingbeat::remote(num_returns = 2)]
/// fn split(mut rows: Vec<f64>) -> (Vec<f64>, Vec<f64>) {
///     let test = rows.split_off(rows.len() * 4 / 5);
///     (rows, test)
/// }
///
/// # async fn run() {
/// let (train, test) = split::remote(vec![0.0; 100]);   // a ref each: either can be passed on without the other
/// # }
/// ```
///
/// A task that waits for a ref gives its CPUs to others meanwhile, and its process to the tasks that it has submitted, unless one of
/// the two is `isolated`. Only its own thread counts: one that joins threads which
/// wait for refs keeps its CPUs, and hangs where those refs need them.
///
/// Options: `num_cpus`, `num_gpus`, `gpu_memory` and `memory` (`"8GiB"`, or bytes), `resources(license = 1)`, `labels = "zone=a"`, `spread`, `wait_until_feasible`, `timeout = "30s"` (also `ms`, `min`, `h`), `max_retries` (a number or `unlimited`), `max_memory_retries`, `retry_errors`, `retry_on(A, B)`,
/// `retry_if = f`, `isolated`, `num_returns`, `stream_ahead`, `instances(f32, f64)`, and `crate = "path::of::wingbeat"` where no dependency is named `wingbeat`, as
/// where another crate has it for its users.
///
/// ```no_run
/// #[wingbeat::remote(num_cpus = 2, max_retries = 5)]
/// fn parse(text: String) -> Result<f64, String> {
///     text.parse().map_err(|_| format!("not a number: {text}"))
/// }
///
/// # async fn run() {
/// let error = parse::remote("x".to_owned()).get().await.unwrap_err();
/// assert_eq!(error.application::<String>().unwrap(), "not a number: x");
/// # }
/// ```
///
/// `anyhow::Error` and `Box<dyn Error + Send + Sync>` can hold any error, and cannot be sent as what they hold. They arrive as a `String`: the
/// text of the error and of its causes, as `{:#}` prints it. To match on an error, return its own type.
///
/// ```no_run
/// use anyhow::Context;
///
/// #[wingbeat::remote]
/// fn line_count(path: String) -> anyhow::Result<usize> {
///     let text = std::fs::read_to_string(&path).with_context(|| format!("reading {path}"))?;
///     Ok(text.lines().count())
/// }
///
/// # async fn run() {
/// let error = line_count::remote("/none").get().await.unwrap_err();
/// assert_eq!(error.application::<String>().unwrap(), "reading /none: No such file or directory (os error 2)");
/// # }
/// ```
///
/// What an attribute says, `options()` says otherwise for one call, but for `spread` and `wait_until_feasible`, which no call takes back; each option is explained at [`TaskOptions`] and [`ActorOptions`].
///
/// ```no_run
/// #[wingbeat::remote(spread, wait_until_feasible, resources(license = 1), timeout = "5min")]
/// fn solve(model: String) -> f64 { model.len() as f64 }
/// ```
///
/// A task whose process or node is lost is tried again, up to `max_retries` times: at once the first time, then after a pause of
/// 10 ms, doubled each time up to 1 s. One that returns an error is not, unless
/// `retry_errors` says so of all errors and panics, `retry_on` of types of errors, or `retry_if` of those of which a function holds:
///
/// ```no_run
/// # use serde::{Serialize, Deserialize};
/// #[derive(Debug, Serialize, Deserialize, thiserror::Error)]
/// #[error("{0} is busy")]
/// struct Busy(String);
///
/// #[wingbeat::remote(max_retries = 10, retry_on(Busy))]
/// fn fetch(url: String) -> Result<Vec<u8>, Busy> {
///     Err(Busy(url))
/// }
///
/// #[wingbeat::remote(retry_if = |status: &u16| *status >= 500)]
/// fn status(url: String) -> Result<(), u16> {
///     Err(503)
/// }
/// ```
///
/// Another process can run those instances of a generic function that are named: by types and constants, in parentheses where there are
/// several parameters. To call another one is an error of the compiler's.
///
/// ```no_run
/// #[wingbeat::remote(instances(f32, f64))]
/// fn largest<T: PartialOrd>(values: Vec<T>) -> Option<T> {
///     values.into_iter().max_by(|a, b| a.partial_cmp(b).unwrap())
/// }
///
/// #[wingbeat::remote(instances((u64, 2), (String, 3)))]
/// fn first<T: Clone, const N: usize>(values: Vec<T>) -> Vec<T> {
///     values[..N].to_vec()
/// }
///
/// # async fn run() -> wingbeat::Result<()> {
/// assert_eq!(largest::<f32>::remote(vec![1.0, 3.0, 2.0]).get().await?, Some(3.0));
/// assert_eq!(first::<u64, 2>::remote(vec![4, 5, 6]).get().await?, [4, 5]);
/// # Ok(())
/// # }
/// ```
pub use wingbeat_macros::remote;

/// What most programs need.
///
/// It brings the crate's own name along, so that `use wingbeat::prelude::*` is never an unused import. `wingbeat::Error` and
/// `wingbeat::Result` are written so: the names alone are also those of other crates.
pub mod prelude {
    pub use crate as wingbeat;
    pub use crate::{
        ActorPool, Buffer, Bundle, ByteSize, IntoArg, ObjectRef, ObjectStream, ObjectView, Queue, Session, get_all,
        get_all_blocking, placement_group, put, wait,
    };
}
