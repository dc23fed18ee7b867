//! Work that may block, on a thread of its own.

use std::io;

use tokio::sync::oneshot;

/// Does it on a thread that is started for it. `tokio::task::spawn_blocking` panics where the system gives it none.
///
/// # Errors
/// There is no thread for it, or it has panicked.
pub async fn on_a_thread<T: Send + 'static>(name: &str, work: impl FnOnce() -> T + Send + 'static) -> io::Result<T> {
    let (done, result) = oneshot::channel();
    std::thread::Builder::new().name(name.to_owned()).spawn(move || done.send(work()))?;
    result.await.map_err(|_| io::Error::other(format!("the thread {name} has panicked")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn what_the_work_gives_is_there_and_a_panic_is_an_error() {
        assert_eq!(on_a_thread("adds", || 1 + 2).await.unwrap(), 3);
        let panics = on_a_thread("panics", || panic!("on purpose")).await;
        assert!(panics.unwrap_err().to_string().contains("the thread panics has panicked"));
    }
}
