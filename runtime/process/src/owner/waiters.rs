//! Those that wait for one object, in the order in which they came. 100,000 tasks may wait for one: who leaves is not searched.

use std::sync::Arc;
use std::task::{Context, Waker};

use smallvec::SmallVec;

use crate::owner::worklist::{self, Step};

/// Names a waiter of an object, so that one who does not wait any more can be forgotten.
pub(crate) type Place = u64;

/// What to do when an object becomes ready.
enum Waiter {
    /// Wake whoever polls.
    Waker(Waker),
    /// One of the arguments of a call is there.
    Dependent(Arc<dyn Fn() + Send + Sync>),
}

/// Somebody who does not wait any more. Drop it outside of locks: it may be the last that holds what waited.
#[must_use]
#[derive(Default)]
pub(crate) struct Left(#[expect(dead_code, reason = "it is only dropped")] Option<Waiter>);

#[derive(Default)]
pub(crate) struct Waiters {
    /// By place, which ascends. None has left; when half of them have, they are taken out.
    all: SmallVec<[(Place, Option<Waiter>); 1]>,
    left: usize,
    latest: Place,
}

impl Waiters {
    fn add(&mut self, waiter: Waiter) -> Place {
        self.latest += 1;
        self.all.push((self.latest, Some(waiter)));
        self.latest
    }

    fn at(&self, place: Place) -> Option<usize> {
        self.all.binary_search_by_key(&place, |(place, _)| *place).ok()
    }

    /// Has `cx` woken: from the place that it has already, or from a new one.
    pub(crate) fn wake(&mut self, place: &mut Option<Place>, cx: &Context<'_>) -> Left {
        let at = place.and_then(|place| self.at(place));
        match at.and_then(|at| self.all[at].1.as_mut()) {
            Some(Waiter::Waker(waker)) if waker.will_wake(cx.waker()) => Left(None),
            Some(mine) => Left(Some(std::mem::replace(mine, Waiter::Waker(cx.waker().clone())))),
            None => {
                *place = Some(self.add(Waiter::Waker(cx.waker().clone())));
                Left(None)
            }
        }
    }

    /// Whether user code waits, and not only what depends on the object.
    pub(crate) fn is_polled(&self) -> bool {
        self.all.iter().any(|(_, waiter)| matches!(waiter, Some(Waiter::Waker(_))))
    }

    /// Has `then` called.
    pub(crate) fn call(&mut self, then: &Arc<dyn Fn() + Send + Sync>) -> Place {
        self.add(Waiter::Dependent(then.clone()))
    }

    pub(crate) fn forget(&mut self, place: Place) -> Left {
        let Some(waiter) = self.at(place).and_then(|at| self.all[at].1.take()) else { return Left(None) };
        self.left += 1;
        if 2 * self.left > self.all.len() {
            self.all.retain(|(_, waiter)| waiter.is_some());
            self.left = 0;
        }
        Left(Some(waiter))
    }

    /// Takes them all out. Their places stay theirs: who is called may wait again, or be told apart from who does, when the
    /// value is lost.
    pub(crate) fn take(&mut self) -> Waiters {
        let latest = self.latest;
        std::mem::replace(self, Waiters { latest, ..Waiters::default() })
    }

    /// What they wait for has come. Outside of locks.
    pub(crate) fn call_all(self) {
        for waiter in self.all.into_iter().filter_map(|(_, waiter)| waiter) {
            match waiter {
                Waiter::Waker(waker) => waker.wake(),
                Waiter::Dependent(then) => worklist::take(Step::Call(then)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn those_that_stay_are_called_once_each_and_in_order() {
        static CALLED: AtomicUsize = AtomicUsize::new(0);
        let mut waiters = Waiters::default();
        let places: Vec<Place> = (0..100_000)
            .map(|number| {
                let then: Arc<dyn Fn() + Send + Sync> = Arc::new(move || {
                    assert!(CALLED.swap(number, Ordering::Relaxed) < number, "{number} is late");
                });
                waiters.call(&then)
            })
            .collect();
        for place in places.iter().filter(|place| *place % 1_000 != 0) {
            drop(waiters.forget(*place));
            drop(waiters.forget(*place));
        }
        assert!(waiters.all.len() <= 200, "{} are kept for 100", waiters.all.len());
        waiters.call_all();
        assert_eq!(CALLED.load(Ordering::Relaxed), 99_999);
    }

    #[test]
    fn the_place_of_one_who_was_called_is_never_anybody_else_s() {
        let mut waiters = Waiters::default();
        let then: Arc<dyn Fn() + Send + Sync> = Arc::new(|| ());
        let before = waiters.call(&then);
        waiters.take().call_all();
        // The value is lost, and another waits for it.
        let after = waiters.call(&then);
        drop(waiters.forget(before));
        assert_eq!(waiters.all.len(), 1, "who waits now was forgotten instead");
        let mut mine = Some(before);
        drop(waiters.wake(&mut mine, &Context::from_waker(Waker::noop())));
        assert!(mine.is_some_and(|mine| mine != before && mine != after), "{mine:?}");
        assert_eq!(waiters.all.len(), 2);
    }

    #[test]
    fn who_polls_again_keeps_its_place() {
        let mut waiters = Waiters::default();
        let cx = Context::from_waker(Waker::noop());
        let (mut mine, mut other) = (None, None);
        for _ in 0..3 {
            drop(waiters.wake(&mut mine, &cx));
            drop(waiters.wake(&mut other, &cx));
        }
        assert_eq!((mine, other, waiters.all.len()), (Some(1), Some(2), 2));
        drop(waiters.forget(1));
        drop(waiters.wake(&mut mine, &cx));
        assert_eq!(mine, Some(3), "who was forgotten waits again");
    }
}
