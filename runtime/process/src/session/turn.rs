//! The turns of an actor's calls at its state. A call that waits for its turn waits for those that hold the state, and the head is told of that
//! when it lasts: one of them may wait for this call.

use std::future::Future;
use std::ops::{Deref, DerefMut};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures::future::{Either, select};
use wingbeat_core::TaskId;

use crate::session::context::{self, Execution};
use crate::session::waiting::Waiting;

/// It is looked after this long who holds the state, and each time after twice as long.
const LOOKED_AFTER: Duration = Duration::from_millis(100);
const LOOKED_AT_LEAST: Duration = Duration::from_secs(10);

/// An actor's state, which a call has until this is dropped.
pub struct Held<G> {
    state: G,
    /// The call; none in no task.
    by: Option<Arc<Execution>>,
}

impl<G> Held<G> {
    /// The running call has the state from now on.
    pub fn new(state: G) -> Held<G> {
        let by = context::current();
        if let Some(by) = &by {
            by.holds_state(true);
        }
        Held { state, by }
    }

    /// The running call has the state when `lock` gives it.
    pub async fn after(lock: impl Future<Output = G>) -> Held<G> {
        let mut lock = pin!(lock);
        let (mut seen, mut waiting, mut after) = (Vec::new(), None::<(Vec<TaskId>, Waiting)>, LOOKED_AFTER);
        let state = loop {
            let Some(execution) = context::current() else { break lock.await };
            let process = execution.session.process();
            match select(lock.as_mut(), process.timer(after)).await {
                Either::Left((state, _)) => break state,
                Either::Right(_) => after = (after * 2).min(LOOKED_AT_LEAST),
            }
            let holders = process.executor().map(|executor| executor.holders_of_state()).unwrap_or_default();
            // Where each has the state for a moment, none is told of.
            let stay: Vec<TaskId> = holders.iter().copied().filter(|holder| seen.contains(holder)).collect();
            seen = holders;
            if waiting.as_ref().map_or(&[][..], |(told, _)| told) != stay {
                // What was told before is over first.
                drop(waiting.take());
                waiting = Waiting::for_turn(&stay).map(|waiting| (stay, waiting));
            }
        };
        drop(waiting);
        Held::new(state)
    }
}

impl<G: Deref> Deref for Held<G> {
    type Target = G::Target;

    fn deref(&self) -> &G::Target {
        &self.state
    }
}

impl<G: DerefMut> DerefMut for Held<G> {
    fn deref_mut(&mut self) -> &mut G::Target {
        &mut self.state
    }
}

impl<G> Drop for Held<G> {
    fn drop(&mut self) {
        if let Some(by) = &self.by {
            by.holds_state(false);
        }
    }
}
