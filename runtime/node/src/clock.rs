//! The time of a node, which it is told.

/// Milliseconds since the node started.
pub type Millis = u64;
