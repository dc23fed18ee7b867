//! Objects that are larger than a store together, so that they are spilled, lost and made again.

use wingbeat::{ErrorKind, put};
use wingbeat_shapes::Chance;

use super::{Failure, MayFail, RETRIES, bytes, equal, expected, hold, sum};

/// No room, also because a disk is full, or nobody who has it can be reached.
const ROOM: &[ErrorKind] = &[ErrorKind::Full];
/// What was put is lost with its node.
const PUT: &[ErrorKind] = &[ErrorKind::Full, ErrorKind::Lost];

#[wingbeat::remote(num_cpus = 0.5)]
fn makes(number: u64, len: usize) -> Vec<u8> {
    bytes(number, len)
}

#[wingbeat::remote(num_cpus = 0.5)]
fn sums(data: Vec<u8>) -> u64 {
    sum(&data)
}

pub(super) async fn run(chance: &mut Chance) -> Result<(), Failure> {
    let number = chance.below(1_000) as u64;
    let len = (1 + chance.below(6)) << 20;
    let (count, is_put) = (2 + chance.below(8) as u64, chance.below(4) == 0);
    let allowed = if is_put { PUT } else { ROOM };
    let mut objects = Vec::new();
    for item in 0..count {
        objects.push(match is_put {
            true => put(&bytes(number + item, len)).may_be(PUT)?,
            false => makes::options().spread().max_retries(RETRIES).remote(number + item, len),
        });
    }
    let summed: Vec<_> =
        objects.iter().map(|object| sums::options().spread().max_retries(RETRIES).remote(object)).collect();
    for (item, summed) in (0u64..).zip(summed) {
        let summed = summed.get().await.may_be(allowed)?;
        equal("the sum of a large object", summed, expected(number + item, len))?;
    }
    // Some are lost meanwhile.
    hold(8, chance).await;
    let own = chance.below(count as usize);
    let data = objects[own].get().await.may_be(allowed)?;
    equal("a large object", sum(&data), expected(number + own as u64, len))
}
