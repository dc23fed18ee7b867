//! Where an object lies in the arena.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The unit in which memory is reserved and punched out, in bytes: the largest page that a kernel of
/// the architecture may use. With a smaller one, two objects that seem to have no page in common
/// could share one in truth.
pub(crate) const PAGE: u64 = if cfg!(target_arch = "aarch64") { 64 << 10 } else { 4 << 10 };

/// A run of bytes in a node's arena.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Extent {
    /// Bytes from the arena's start.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
}

impl Extent {
    /// The extent of the bytes from `start` up to, not including, `end`.
    pub(crate) fn between(start: u64, end: u64) -> Self {
        debug_assert!(start <= end, "an extent ends before it starts: {start}..{end}");
        Self { offset: start, len: end - start }
    }

    /// The first byte behind the extent.
    pub fn end(self) -> u64 {
        self.offset.saturating_add(self.len)
    }

    /// Whether the two share a byte. Empty extents share none.
    pub fn overlaps(self, other: Extent) -> bool {
        self.offset.max(other.offset) < self.end().min(other.end())
    }

    /// The pages that the extent touches.
    pub(crate) fn pages_touched(self) -> Self {
        Self::between(self.offset / PAGE * PAGE, self.end().next_multiple_of(PAGE))
    }

    /// The pages that lie wholly within the extent.
    pub(crate) fn pages_within(self) -> Self {
        let start = self.offset.next_multiple_of(PAGE);
        Self::between(start, (self.end() / PAGE * PAGE).max(start))
    }

    /// The bytes that both have, if any.
    pub(crate) fn intersection(self, other: Extent) -> Option<Self> {
        self.overlaps(other).then(|| Self::between(self.offset.max(other.offset), self.end().min(other.end())))
    }
}

impl fmt::Debug for Extent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}+{}", self.offset, self.len)
    }
}
