//! Tasks without retries: each runs at most once, whatever is heard of it.

use wingbeat::ErrorKind;
use wingbeat_shapes::Chance;

use super::{Failure, MayFail, doze, equal};
use crate::signs;

#[wingbeat::remote(num_cpus = 0.5, max_retries = 0)]
fn happens(sign: String, number: u64, takes_ms: u64) -> u64 {
    signs::happens_once(&sign);
    doze(takes_ms);
    number + 1
}

pub(super) async fn run(driver: u64, chance: &mut Chance) -> Result<(), Failure> {
    let round = chance.below(u32::MAX as usize);
    let tasks: Vec<_> = (0..1 + chance.below(20) as u64)
        .map(|number| {
            let sign = format!("once-{driver}-{round}-{number}");
            (number, happens::remote(sign, number, chance.below(60) as u64))
        })
        .collect();
    let mut failed = None;
    for (number, task) in tasks {
        match task.get().await {
            Ok(value) => equal("the result of a task without retries", value, number + 1)?,
            Err(error) => failed = Some(error),
        }
    }
    // The kernel ends whom it will, where memory is eaten; and its node cannot tell one kill of its group from another.
    failed.map_or(Ok(()), Err).may_be(&[ErrorKind::Lost, ErrorKind::OutOfMemory])
}
