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

/// How people are told of it.
pub fn defect(of: &str, part: &str, said: &str) -> String {
    format!("{of} panicked in {part} ({said}); this is a defect of Wingbeat's, please report it")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn what_a_task_says_when_it_panics_is_known() {
        assert_eq!(caught(async { 1 }).await, Ok(1));
        assert_eq!(caught(async { panic!("on purpose") }).await, Err::<(), _>("on purpose".into()));
        let number = 7;
        assert_eq!(caught(async { panic!("number {number}") }).await, Err::<(), _>("number 7".into()));
    }
}
