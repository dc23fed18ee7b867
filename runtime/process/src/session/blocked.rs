//! Whether this thread does nothing else while it waits.

use std::cell::Cell;

thread_local! {
    static BLOCKS: Cell<bool> = const { Cell::new(false) };
}

/// Whether this thread does nothing else while it waits.
pub(crate) fn is_blocked() -> bool {
    BLOCKS.get()
}

/// While it lives, this thread does nothing else. Also where what is polled meanwhile panics.
pub(crate) struct Polls(bool);

impl Polls {
    pub(crate) fn begin() -> Polls {
        Polls(BLOCKS.replace(true))
    }
}

impl Drop for Polls {
    fn drop(&mut self) {
        BLOCKS.set(self.0);
    }
}
