//! How many bytes of arguments wait with tasks and calls that are not done.

use std::sync::atomic::{AtomicUsize, Ordering};

use crate::owner::outbound::{Content, Outbound};

/// Arguments of fewer bytes count as nothing: whoever looks takes every task for larger than that, and the many small ones do not share
/// a counter with the thread that finishes them.
const SMALL: usize = 256;

/// Of all sessions of this process, which share its memory.
static WAITING: AtomicUsize = AtomicUsize::new(0);

/// The bytes of one submission, which count until this is dropped with it.
#[derive(Default)]
#[must_use = "it counts as long as it lives"]
pub(crate) struct ArgumentBytes(usize);

impl ArgumentBytes {
    /// Of these arguments, but for those that lie in shared memory.
    pub(crate) fn of(args: &[Outbound]) -> ArgumentBytes {
        let inline = args.iter().map(|arg| match arg {
            Outbound::Value(packed) => match &packed.content {
                Content::Inline(bytes) => bytes.len(),
                Content::Stored(_) => 0,
            },
            Outbound::Object(_) => 0,
        });
        ArgumentBytes::of_bytes(inline.sum())
    }

    fn of_bytes(bytes: usize) -> ArgumentBytes {
        if bytes < SMALL {
            return ArgumentBytes(0);
        }
        WAITING.fetch_add(bytes, Ordering::Relaxed);
        ArgumentBytes(bytes)
    }

    /// In bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.0
    }
}

impl Drop for ArgumentBytes {
    fn drop(&mut self) {
        if self.0 > 0 {
            WAITING.fetch_sub(self.0, Ordering::Relaxed);
        }
    }
}

/// The bytes of everything that is not done.
pub(crate) fn waiting() -> usize {
    WAITING.load(Ordering::Relaxed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_done_counts_no_more_and_small_arguments_never() {
        const LARGE: usize = 1 << 40;
        assert_eq!(ArgumentBytes::of_bytes(SMALL - 1).bytes(), 0);
        let (one, other) = (ArgumentBytes::of_bytes(LARGE), ArgumentBytes::of_bytes(2 * LARGE));
        // Other tests of this process submit little.
        assert_eq!(waiting() / LARGE, 3);
        drop(one);
        assert_eq!(waiting() / LARGE, 2);
        drop(other);
        assert_eq!(waiting() / LARGE, 0);
    }
}
