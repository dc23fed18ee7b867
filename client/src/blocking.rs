//! Threads of users that wait for any future.

use std::future::{Future, pending};
use std::sync::{Mutex, OnceLock, PoisonError, mpsc};

use tokio::runtime::{Builder, EnterGuard, Handle, RuntimeFlavor};

/// Blocks this thread until `future` is done, and gives what it gives. Works inside and outside of any tokio runtime.
///
/// In a task, in any runtime of one thread, and in what was given to `tokio::spawn`, `future` may wait for timers, sockets and what it spawns itself: a
/// thread serves these that the process has for that from then on. What is spawned there must not block, and a task that waits for it keeps its CPUs
/// meanwhile. What was made before, such as a socket of an asynchronous constructor, is still served by this thread alone, and a future that waits for it
/// never ends. What else is under way on this thread does not go on meanwhile, so asynchronous code should await instead.
///
/// Elsewhere in a runtime of several threads, these serve what `future` waits for. Outside of a runtime, tokio's timers and sockets panic.
///
/// ```no_run
/// use std::time::Duration;
///
/// #[wingbeat::remote]
/// fn answers_within_a_second(of: Vec<wingbeat::ObjectRef<u32>>) -> Option<u32> {
///     let answer = async { tokio::time::timeout(Duration::from_secs(1), of[0].get()).await.ok() };
///     wingbeat::block_on(answer)?.ok()
/// }
/// # fn main() {}
/// ```
pub fn block_on<F: Future>(future: F) -> F::Output {
    let _elsewhere = served_elsewhere();
    wingbeat_process::block_on(future)
}

/// Where this thread may be the one that serves timers and sockets, and spawned tasks: while the answer lives, another serves those that begin here.
fn served_elsewhere() -> Option<EnterGuard<'static>> {
    let current = Handle::try_current().ok()?;
    // What a worker of a runtime spawns last waits for that very worker.
    let is_this_thread = current.runtime_flavor() == RuntimeFlavor::CurrentThread || tokio::task::try_id().is_some();
    is_this_thread.then(serving)?.map(Handle::enter)
}

/// The runtime of that other thread. None where the system has no thread or descriptor for it now.
fn serving() -> Option<&'static Handle> {
    static SERVING: OnceLock<Handle> = OnceLock::new();
    static STARTING: Mutex<()> = Mutex::new(());
    if SERVING.get().is_none() {
        let _one_starts_it = STARTING.lock().unwrap_or_else(PoisonError::into_inner);
        if SERVING.get().is_none() {
            let (tell, told) = mpsc::sync_channel(1);
            // Made there: where there is no thread for it, a runtime could not be dropped here.
            let serves = move || {
                let Ok(runtime) = Builder::new_current_thread().enable_all().build() else { return };
                let _ = tell.send(runtime.handle().clone());
                runtime.block_on(pending::<()>());
            };
            std::thread::Builder::new().name("wingbeat-serve".into()).spawn(serves).ok()?;
            let _ = SERVING.set(told.recv().ok()?);
        }
    }
    SERVING.get()
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::time::Duration;

    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    const MOMENT: Duration = Duration::from_millis(5);

    /// Waits for a timer, a socket, a spawned task and a blocking one.
    async fn waits() -> String {
        tokio::time::sleep(MOMENT).await;
        let echo = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = echo.local_addr().unwrap();
        let echoes = tokio::task::spawn_blocking(move || {
            let (mut stream, mut word) = (echo.accept().unwrap().0, [0; 4]);
            stream.read_exact(&mut word).unwrap();
            stream.write_all(&word).unwrap();
        });
        let asks = tokio::spawn(async move {
            let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
            stream.write_all(b"echo").await.unwrap();
            let mut answer = String::new();
            stream.read_to_string(&mut answer).await.unwrap();
            answer
        });
        echoes.await.unwrap();
        asks.await.unwrap()
    }

    #[test]
    fn timers_sockets_and_spawned_tasks_go_on_in_whatever_runtime_the_thread_is() {
        for mut runtime in [Builder::new_current_thread(), Builder::new_multi_thread()] {
            let runtime = runtime.enable_all().build().unwrap();
            assert_eq!(runtime.block_on(async { block_on(waits()) }), "echo");
        }
    }

    #[test]
    fn what_is_spawned_goes_on_though_the_worker_that_spawned_it_is_blocked() {
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let spawned = runtime.spawn(async { block_on(waits()) });
        assert_eq!(runtime.block_on(spawned).unwrap(), "echo");
    }

    #[test]
    fn what_belongs_to_the_threads_own_runtime_is_as_before_afterwards() {
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let own = Handle::current().id();
            assert_ne!(block_on(async { Handle::current().id() }), own);
            assert_eq!(Handle::current().id(), own);
            tokio::time::sleep(MOMENT).await;
        });
    }

    #[test]
    fn outside_of_a_runtime_none_is_begun() {
        assert!(block_on(async { Handle::try_current().is_err() }));
    }
}
