//! What code that runs in a worker process can know of itself.

use wingbeat_core::{ActorId, TaskId};
use wingbeat_process::{Session, context};

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

/// Waits until the running task is asked to stop; for ever outside of a task.
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

/// The actor that this code runs in; see [`current_task`].
pub fn current_actor() -> Option<ActorId> {
    context::current_actor()
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
