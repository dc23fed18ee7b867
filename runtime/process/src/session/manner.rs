//! Manner what is polled on this thread waits.

use std::cell::Cell;

use crate::work::Manner;

thread_local! {
    static WAITS: Cell<Manner> = const { Cell::new(Manner { blocks: false, has_limit: false }) };
}

/// Manner what is polled on this thread waits.
pub(crate) fn manner_of_waiting() -> Manner {
    WAITS.get()
}

/// Whether this thread does nothing else while it waits.
pub(crate) fn is_blocked() -> bool {
    WAITS.get().blocks
}

/// While it lives, what is polled on this thread waits in another way. Also where that panics.
pub(crate) struct Polls {
    before: Manner,
}

impl Polls {
    /// The thread does nothing else meanwhile. A limit of whoever polls that does not end it.
    pub(crate) fn blocking() -> Polls {
        Polls::with(|_| Manner { blocks: true, has_limit: false })
    }

    /// The wait ends after some time by itself.
    pub(crate) fn with_limit() -> Polls {
        Polls::with(|before| Manner { has_limit: true, ..before })
    }

    fn with(change: impl FnOnce(Manner) -> Manner) -> Polls {
        let before = WAITS.get();
        WAITS.set(change(before));
        Polls { before }
    }
}

impl Drop for Polls {
    fn drop(&mut self) {
        WAITS.set(self.before);
    }
}
