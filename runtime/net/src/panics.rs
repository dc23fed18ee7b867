//! Panics of the runtime's own tasks. One that nobody hears of leaves something that never happens, and whoever waits for it
//! waits for ever; so each long-lived process hears of all of its own, and ends with that as the reason.

use std::any::Any;
use std::panic::AssertUnwindSafe;

use futures::FutureExt as _;

/// What became of a task: its value, or what it said when it panicked.
///
/// # Errors
/// It panicked.
pub async fn caught<T>(running: impl Future<Output = T>) -> Result<T, String> {
    AssertUnwindSafe(running).catch_unwind().await.map_err(|panic| said(&*panic).to_owned())
}

/// The text of a panic.
pub fn said(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("without a message")
}

/// What tokio says where the system gives it no thread for blocking work.
const NO_THREAD: &str = "OS can't spawn worker thread";

/// How people are told of it.
pub fn defect(of: &str, part: &str, said: &str) -> String {
    if said.starts_with(NO_THREAD) {
        return format!(
            "{of} could start no thread in {part} ({said}); allow its user more processes (`ulimit -u`), or its container (`pids.max`)"
        );
    }
    format!("{of} panicked in {part} ({said}); this is a defect of Wingbeat's, please report it")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn what_a_task_says_when_it_panics_is_known() {
        assert_eq!(caught(async { 1 }).await, Ok(1));
        assert_eq!(caught(async { panic!("on purpose") }).await, Err::<(), _>("on purpose".into()));
        assert!(defect("this node", "looking", "on purpose").contains("a defect of Wingbeat's"));
        let no_thread = "OS can't spawn worker thread: Resource temporarily unavailable (os error 11)";
        assert!(defect("this node", "looking", no_thread).contains("`ulimit -u`"));
        let number = 7;
        assert_eq!(caught(async { panic!("number {number}") }).await, Err::<(), _>("number 7".into()));
    }
}
