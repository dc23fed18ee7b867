//! How long members wait for each other before a group works. A test sets it in milliseconds.

use std::sync::LazyLock;
use std::time::Duration;

use wingbeat_core::limits::limit;

/// How long members that have come wait for the others: a minute, in the process of the meeting.
pub(crate) static MEETING: LazyLock<Duration> = LazyLock::new(|| limit("WINGBEAT_MEETING_MS", Duration::from_secs(60)));
/// How long the connections may take once all members are there: 20 s.
pub(crate) static CONNECT: LazyLock<Duration> = LazyLock::new(|| limit("WINGBEAT_CONNECT_MS", Duration::from_secs(20)));
/// How long a member that is gone may still be heard of, if only what it sent before is on its way: as long as another machine
/// may leave probes without an answer, 11 s.
pub(crate) static GIVEN_UP: LazyLock<Duration> =
    LazyLock::new(|| limit("WINGBEAT_PEER_GONE_MS", Duration::from_secs(11)));
