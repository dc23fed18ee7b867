//! How long a run waits for what it does not do itself. A test sets it in milliseconds.

use std::sync::LazyLock;
use std::time::Duration;

use wingbeat_core::limits::limit;

/// How long a rank may keep others waiting in a report before it is named: a minute.
pub(crate) static REPORT: LazyLock<Duration> = LazyLock::new(|| seconds("WINGBEAT_REPORT_LIMIT_MS", 60));
/// How long a storage may take at the end of an attempt, or of the run: half a minute.
pub(crate) static STORAGE: LazyLock<Duration> = LazyLock::new(|| seconds("WINGBEAT_STORAGE_LIMIT_MS", 30));
/// What was not said again of a storage for so long is no longer true: a minute.
pub(crate) static STALE: LazyLock<Duration> = LazyLock::new(|| seconds("WINGBEAT_STORAGE_STALE_MS", 60));
/// How long a storage may take when the run was stopped: at its beginning, and to say what it holds when it is over.
pub(crate) static STOPPED: LazyLock<Duration> = LazyLock::new(|| seconds("WINGBEAT_STOPPED_LIMIT_MS", 5));
/// How long ranks that were killed may take to be gone, and to say what they do now.
pub(crate) static KILLED: LazyLock<Duration> = LazyLock::new(|| seconds("WINGBEAT_KILL_LIMIT_MS", 10));
/// How long a rank may take to remove what was made for it.
pub(crate) static CLEAN: LazyLock<Duration> = LazyLock::new(|| seconds("WINGBEAT_CLEAN_LIMIT_MS", 1));
/// As [`CLEAN`], where a worker process must be started for it.
pub(crate) static FORGET: LazyLock<Duration> = LazyLock::new(|| seconds("WINGBEAT_FORGET_LIMIT_MS", 5));
/// How long ranks may at least work on after a checkpoint with which the run is to go elsewhere: it may be their last.
pub(crate) static LAST: LazyLock<Duration> = LazyLock::new(|| seconds("WINGBEAT_LAST_CHECKPOINT_MS", 5));
/// How long the head may take to say that it has given this program up, when a rank has failed.
pub(crate) static SESSION: LazyLock<Duration> = LazyLock::new(|| seconds("WINGBEAT_SESSION_LIMIT_MS", 2));
/// How long an elastic group waits for what is not free now.
pub(crate) static ELASTIC: LazyLock<Duration> = LazyLock::new(|| seconds("WINGBEAT_ELASTIC_LIMIT_MS", 3));

fn seconds(variable: &str, usual: u64) -> Duration {
    limit(variable, Duration::from_secs(usual))
}
