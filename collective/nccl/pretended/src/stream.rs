//! What runs on devices, in its order.

use std::ffi::c_void;

use parking_lot::{Condvar, Mutex};

/// Work that is run one after the other.
#[derive(Default)]
pub(crate) struct Stream {
    /// How much was given, and how much has been run.
    state: Mutex<(u64, u64)>,
    changed: Condvar,
}

static DEFAULT: Stream = Stream { state: Mutex::new((0, 0)), changed: Condvar::new() };

impl Stream {
    pub(crate) unsafe fn of(handle: *mut c_void) -> &'static Stream {
        if handle.is_null() { &DEFAULT } else { &*handle.cast::<Stream>() }
    }

    /// How much has been given so far.
    pub(crate) fn given(&self) -> u64 {
        self.state.lock().0
    }

    pub(crate) fn has_run(&self, given: u64) -> bool {
        self.state.lock().1 >= given
    }

    pub(crate) fn wait(&self, given: u64) {
        self.changed.wait_while(&mut self.state.lock(), |(_, run)| *run < given);
    }

    /// Runs this after what was given before.
    pub(crate) fn give(&'static self, work: impl FnOnce() + Send + 'static) {
        let mut state = self.state.lock();
        let before = state.0;
        state.0 += 1;
        drop(state);
        std::thread::spawn(move || {
            self.wait(before);
            work();
            self.state.lock().1 += 1;
            self.changed.notify_all();
        });
    }
}
