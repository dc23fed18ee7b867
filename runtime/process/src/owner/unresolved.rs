//! A call some of whose arguments are not there yet.

use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;
use smallvec::SmallVec;
use wingbeat_core::TaskId;
use wingbeat_core::error::Error;
use wingbeat_core::spec::Arg;

use crate::owner::name::Name;
use crate::owner::object::Handle;
use crate::owner::outbound::{Content, Outbound, PackedValue};
use crate::owner::waiters::Place;

/// What becomes of arguments once they are all there.
pub(super) type Then = Box<dyn FnOnce(Result<Vec<Arg>, Error>) + Send>;

/// The arguments, and what becomes of them.
pub(super) type Waiting = (SmallVec<[Outbound; 3]>, Then);

/// A call some of whose arguments are not there yet.
pub(crate) struct Unresolved {
    pub(super) id: TaskId,
    /// The task that submitted it.
    pub(super) parent: Option<TaskId>,
    pub(crate) name: Name,
    missing: AtomicUsize,
    parts: Mutex<Parts>,
    /// Where it waits. Its places hold it, and it holds what it waits for: who gives it up clears them.
    places: Mutex<SmallVec<[(Handle, Place); 3]>>,
}

enum Parts {
    Waiting(SmallVec<[Outbound; 3]>, Then),
    /// A thread has taken them, and is about to submit the call.
    Leaving {
        cancelled: bool,
    },
}

impl Unresolved {
    /// A call that waits for so many, and for [`Unresolved::arrives`] once more: nothing happens before all is in place.
    pub(super) fn new(
        (id, parent, name): (TaskId, Option<TaskId>, &Name),
        missing: usize,
        (args, then): Waiting,
    ) -> Unresolved {
        Unresolved {
            id,
            parent,
            name: name.clone(),
            missing: AtomicUsize::new(missing + 1),
            parts: Mutex::new(Parts::Waiting(args, then)),
            places: Mutex::default(),
        }
    }

    /// One of them is there. Answers with the arguments if it was the last, and nobody has taken them.
    pub(super) fn arrives(&self) -> Option<Waiting> {
        match self.missing.fetch_sub(1, Ordering::AcqRel) {
            1 => self.take(false),
            _ => None,
        }
    }

    /// Takes the arguments, unless somebody has; who has them learns whether the call was cancelled.
    pub(super) fn take(&self, cancelled: bool) -> Option<Waiting> {
        let mut parts = self.parts.lock();
        if let Parts::Leaving { cancelled: already } = &mut *parts {
            *already |= cancelled;
            return None;
        }
        match std::mem::replace(&mut *parts, Parts::Leaving { cancelled }) {
            Parts::Waiting(args, then) => Some((args, then)),
            Parts::Leaving { .. } => None,
        }
    }

    /// Whether it was cancelled after its arguments were taken.
    pub(super) fn is_cancelled(&self) -> bool {
        matches!(*self.parts.lock(), Parts::Leaving { cancelled: true })
    }

    /// It waits for this object, at this place.
    pub(super) fn waits_at(&self, handle: Handle, place: Place) {
        self.places.lock().push((handle, place));
    }

    /// It waits for nothing any more.
    pub(super) fn leave_places(&self) {
        let places = std::mem::take(&mut *self.places.lock());
        for (handle, place) in places {
            handle.object().forget(place);
        }
    }

    /// It has failed for another reason: what it waits for is not needed any more.
    pub(super) fn give_up(&self) {
        let parts = self.take(true);
        self.leave_places();
        drop(parts);
    }

    /// The arguments that are not there yet, and which each is.
    pub(crate) fn missing(&self) -> Vec<(usize, Handle)> {
        let parts = self.parts.lock();
        let args = match &*parts {
            Parts::Waiting(args, _) => args.as_slice(),
            Parts::Leaving { .. } => &[],
        };
        let args = args.iter().enumerate();
        let objects = args.filter_map(|(index, arg)| match arg {
            Outbound::Object(handle) => Some((index, handle.clone())),
            Outbound::Value(PackedValue { content: Content::Stored(handle), .. }) => Some((index, handle.clone())),
            Outbound::Value(_) => None,
        });
        objects.filter(|(_, handle)| !handle.is_ready()).collect()
    }
}
