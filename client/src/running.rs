//! What code that runs in a worker process can know of itself.

use std::collections::BTreeMap;

#[allow(unused_imports, reason = "named in the documentation")]
use wingbeat_core::error::Error;
use wingbeat_core::error::Result;
use wingbeat_core::{ActorId, NodeId, TaskId};
use wingbeat_process::{Session, context};

use crate::{ActorHandle, ActorRef};

/// Whether the running task was asked to stop. Long computations should look now and then.
///
/// ```
/// #[wingbeat::remote]
/// fn sum(numbers: Vec<u64>) -> Result<u64, String> {
///     let mut sum = 0;
///     for part in numbers.chunks(10_000) {
///         if wingbeat::is_cancelled() {
///             return Err("cancelled".into());
///         }
///         sum += part.iter().sum::<u64>();
///     }
///     Ok(sum)
/// }
/// ```
pub fn is_cancelled() -> bool {
    context::is_cancelled()
}

/// Waits until the running task is asked to stop; for ever outside of a task. What an asynchronous task does then must not wait: the task
/// is dropped at its next `.await` that has to, and so is a stream that waits for its consumer.
///
/// ```
/// #[wingbeat::remote]
/// async fn serve() {
///     tokio::select! {
///         () = wingbeat::cancelled() => println!("asked to stop"),
///         _ = std::future::pending::<()>() => {}
///     }
/// }
/// ```
pub async fn cancelled() {
    context::cancelled().await;
}

/// The running task; none outside of one.
///
/// ```
/// #[wingbeat::remote]
/// fn where_am_i() -> String {
///     format!("{:?} in {:?}", wingbeat::current_task(), wingbeat::current_actor())
/// }
/// ```
pub fn current_task() -> Option<TaskId> {
    context::current_task()
}

/// How often the running task or call was tried before: 0 the first time; none outside of one.
///
/// ```
/// #[wingbeat::remote(max_retries = 5)]
/// fn fetch(url: String) -> Vec<u8> {
///     let mirror = wingbeat::current_attempt().unwrap_or(0) % 2;   // another one after each loss
///     format!("{url} from mirror {mirror}").into_bytes()
/// }
/// ```
pub fn current_attempt() -> Option<u32> {
    context::current_attempt()
}

/// The node of this process, whose shared memory it uses: of a task or actor where it runs, of a driver that of its machine, if it
/// has one; none without a session.
///
/// ```
/// #[wingbeat::remote]
/// fn place() -> Option<wingbeat::NodeId> {
///     wingbeat::current_node()
/// }
/// ```
pub fn current_node() -> Option<NodeId> {
    Some(Session::current().ok()?.process().storage()?.node())
}

/// The actor that this code runs in; see [`current_task`].
pub fn current_actor() -> Option<ActorId> {
    context::current_actor()
}

/// A handle of the actor that this code runs in, to be given to others, who call it back.
///
/// It is a handle as any other: an actor that keeps one of itself never ends by itself, and one that waits for its own call waits for
/// ever, or fails with [`Error::Deadlock`].
///
/// ```no_run
/// struct Shop;
/// struct Supplier;
///
/// #[wingbeat::actor]
/// impl Shop {
///     fn new() -> Self { Shop }
///     fn order(&self, supplier: SupplierHandle) -> wingbeat::Result<()> {
///         drop(supplier.deliver(wingbeat::current_handle::<ShopHandle>()?));   // the answer comes as a call
///         Ok(())
///     }
///     fn receive(&mut self, goods: u64) {}
/// }
///
/// #[wingbeat::actor]
/// impl Supplier {
///     fn new() -> Self { Supplier }
///     fn deliver(&self, to: ShopHandle) { drop(to.receive(3)); }
/// }
/// ```
///
/// # Errors
/// [`Error::InvalidArgument`] outside of an actor, or if it is of another class.
pub fn current_handle<H: ActorHandle>() -> Result<H> {
    Ok(H::from(ActorRef::new(context::current_handle(H::class())?)))
}

/// Ends the actor that this code runs in, without restart: from inside what [`terminate`](crate::ActorRef::terminate) is from outside.
///
/// The call that asks goes on to its end and gives its result, and so do other calls that run. No other call begins: those that wait, and
/// all later ones, fail with [`Error::ActorDied`] at once. After the last call the value is dropped, its `Drop` runs, and the process ends
/// when the head knows of it: a call that never ends, such as a loop, has to look for that itself.
///
/// ```no_run
/// struct Batch { left: u64 }
///
/// #[wingbeat::actor(max_restarts = 3)]
/// impl Batch {
///     fn new(items: u64) -> Self { Batch { left: items } }
///     fn take(&mut self) -> wingbeat::Result<u64> {
///         self.left -= 1;
///         if self.left == 0 {
///             wingbeat::exit_actor()?;   // its work is done
///         }
///         Ok(self.left)
///     }
/// }
///
/// impl Drop for Batch {
///     fn drop(&mut self) { println!("closing the files") }
/// }
///
/// # async fn run() -> wingbeat::Result<()> {
/// let batch = Batch::remote(1);
/// assert_eq!(batch.take().get().await?, 0);
/// let error = batch.take().get().await.unwrap_err();   // "… is dead: it was ended by its own call of exit_actor()"
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// [`Error::InvalidArgument`] outside of an actor.
pub fn exit_actor() -> Result<()> {
    context::exit_actor()
}

/// The devices that were assigned to this worker process, by number on the node.
///
/// ```
/// #[wingbeat::remote(num_gpus = 1)]
/// fn device() -> Vec<u32> {
///     wingbeat::gpu_ids()
/// }
/// ```
pub fn gpu_ids() -> Vec<u32> {
    Session::current().map(|session| session.gpu_ids()).unwrap_or_default()
}

/// What the running task or actor holds, by the names of the resources: `CPU`, `GPU`, `memory` in bytes, and custom ones. `gpu_memory` is
/// here the fraction of a GPU that it is of the node's devices. An actor that names no CPUs holds none. Empty in a driver.
///
/// ```no_run
/// #[wingbeat::remote(num_cpus = 4, resources(license = 1))]
/// fn threads() -> usize {
///     wingbeat::assigned_resources()["CPU"] as usize
/// }
/// ```
pub fn assigned_resources() -> BTreeMap<String, f64> {
    let held = Session::current().map(|session| session.assigned_resources()).unwrap_or_default();
    held.iter().map(|(name, amount)| (name.to_owned(), amount.as_f64())).collect()
}
