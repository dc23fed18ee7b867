//! What freeing or resolving an object causes in turn: one after the other, and not one inside the other. Values are nested
//! and tasks are chained as deeply as users like, and a stack is not.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::mem::ManuallyDrop;
use std::sync::Arc;

use crate::owner::object::Handle;

/// Something that may cause more of its kind.
pub(crate) enum Step {
    /// The refs in the value of an object that is freed.
    Drop(Vec<Handle>),
    /// Somebody waits for an object that became ready.
    Call(Arc<dyn Fn() + Send + Sync>),
}

struct Steps {
    running: bool,
    /// What the running step has caused.
    caused: VecDeque<Step>,
}

thread_local! {
    // Without a destructor, so that handles can be dropped while a thread ends; it is empty between steps.
    static STEPS: RefCell<ManuallyDrop<Steps>> =
        const { RefCell::new(ManuallyDrop::new(Steps { running: false, caused: VecDeque::new() })) };
}

/// Takes a step and then all that it has caused; within a step of this thread, after that one.
pub(crate) fn take(step: Step) {
    let first = STEPS.with_borrow_mut(|steps| {
        if steps.running {
            steps.caused.push_back(step);
            return None;
        }
        steps.running = true;
        Some(step)
    });
    let Some(step) = first else { return };
    let _done = Done;
    perform(step);
    while let Some(step) = STEPS.with_borrow_mut(|steps| steps.caused.pop_front()) {
        perform(step);
    }
}

fn perform(step: Step) {
    match step {
        Step::Drop(handles) => drop(handles),
        Step::Call(then) => then(),
    }
}

/// Ends the steps of this thread, also when one panics: what is left then is taken with the next.
struct Done;

impl Drop for Done {
    fn drop(&mut self) {
        STEPS.with_borrow_mut(|steps| {
            steps.running = false;
            if steps.caused.is_empty() {
                steps.caused = VecDeque::new();
            }
        });
    }
}
