//! Somebody looks every so often, as long as there is something to look at, and nobody otherwise.

use std::sync::atomic::{AtomicBool, Ordering};

/// Whether somebody looks.
#[derive(Default)]
pub(crate) struct Looks(AtomicBool);

impl Looks {
    /// There is something to look at. Whether the caller is to begin.
    pub(crate) fn begin(&self) -> bool {
        !self.0.swap(true, Ordering::SeqCst)
    }

    /// Whoever looks has found nothing more, and ends, unless something `has_come` meanwhile for which nobody has begun.
    pub(crate) fn end(&self, has_come: impl FnOnce() -> bool) -> bool {
        self.0.store(false, Ordering::SeqCst);
        !(has_come() && self.begin())
    }
}
