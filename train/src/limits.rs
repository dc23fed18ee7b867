//! How long a run waits for what it does not do itself. A test sets it in milliseconds.

use std::sync::LazyLock;
use std::time::Duration;

/// How long a rank may keep others waiting in a report before it is named: a minute.
pub(crate) static REPORT: LazyLock<Duration> = LazyLock::new(|| limit("WINGBEAT_REPORT_LIMIT_MS", 60));
/// How long a storage may take at the end of an attempt, or of the run: half a minute.
pub(crate) static STORAGE: LazyLock<Duration> = LazyLock::new(|| limit("WINGBEAT_STORAGE_LIMIT_MS", 30));
/// What was not said again of a storage for so long is no longer true: a minute.
pub(crate) static STALE: LazyLock<Duration> = LazyLock::new(|| limit("WINGBEAT_STORAGE_STALE_MS", 60));

fn limit(variable: &str, usual_seconds: u64) -> Duration {
    let set = std::env::var(variable).ok().and_then(|text| text.trim().parse().ok()).filter(|ms| *ms > 0);
    set.map_or(Duration::from_secs(usual_seconds), Duration::from_millis)
}
