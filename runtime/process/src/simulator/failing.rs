//! Tasks that fail by themselves, and those that take longer than they may.

use std::sync::Arc;

use rand::RngExt;
use rand::rngs::StdRng;
use wingbeat_core::TaskId;
use wingbeat_core::error::{ApplicationError, Error};

use super::value::Plan;
use crate::owner::retrying::RetryOn;

/// Of so many tasks one fails.
const FAILS: u64 = 30;
const BUSY: &str = "Busy";
const BROKEN: &str = "Broken";

/// How a task fails, as far as whoever submits it knows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Failing {
    /// Whether failures cost retries, of which there are so many.
    pub is_retried: bool,
    pub retries: u32,
    /// How many attempts fail.
    pub attempts: u32,
}

/// How many attempts at a task with this plan fail.
pub(super) fn failures(plan: &Plan) -> u32 {
    let seed = plan.seed / 8;
    if seed.is_multiple_of(FAILS) { 1 + (seed / FAILS % 2) as u32 } else { 0 }
}

/// What it fails with.
pub(super) fn failure(plan: &Plan, task: TaskId) -> Error {
    let type_name = if plan.seed.is_multiple_of(2) { BUSY } else { BROKEN };
    let error =
        ApplicationError { type_name: type_name.into(), message: "the simulation".into(), payload: Default::default() };
    Error::Application { task: task.to_string(), error, attempts: 1 }
}

/// Which errors of a task with this plan cost a retry, and whether what it fails with does.
pub(super) fn retry_on(random: &mut StdRng, plan: &Plan) -> (RetryOn, bool) {
    let is_busy = plan.seed.is_multiple_of(2);
    let is_broken = |error: &Error| error.is_of_type(BROKEN);
    match random.random_range(0..6) {
        0 => (RetryOn::Everything, true),
        1 => (RetryOn::Nothing.or_type(BUSY), is_busy),
        2 => (RetryOn::Nothing.or_if(Arc::new(is_broken)), !is_busy),
        3 => (RetryOn::Nothing.or_type(BUSY).or_if(Arc::new(is_broken)), true),
        _ => (RetryOn::Nothing, false),
    }
}
