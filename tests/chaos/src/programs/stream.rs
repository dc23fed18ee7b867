//! A stream: every item comes once, in its place, and right, however often its producer dies.

use wingbeat::{ErrorKind, ObjectStream};
use wingbeat_shapes::Chance;

use super::{Failure, MayFail, RETRIES, bytes, doze, equal, expected, sum};

/// Above it, items lie in the store of their node, and are lost with that.
const INLINE: usize = 100 << 10;

#[wingbeat::remote(num_cpus = 0.5)]
fn flows(number: u64, count: u64, len: usize, pause_ms: u64) -> impl Iterator<Item = Vec<u8>> {
    (0..count).map(move |item| {
        doze(pause_ms);
        bytes(number + item, len)
    })
}

pub(super) async fn run(chance: &mut Chance) -> Result<(), Failure> {
    let number = chance.below(1_000) as u64;
    let len = [10, 10_000, 200_000][chance.below(3)];
    let count = [20, 100][chance.below(2)];
    let mut stream: ObjectStream<Vec<u8>> =
        flows::options().max_retries(RETRIES).remote(number, count, len, chance.below(10) as u64);
    let allowed: &[ErrorKind] = if len > INLINE { &[ErrorKind::Lost, ErrorKind::Full] } else { &[] };
    let mut item = 0;
    while let Some(next) = stream.next().await {
        let next = next.may_be(allowed)?;
        equal("the length of an item", next.len(), len)?;
        equal(&format!("item {item} of a stream"), sum(&next), expected(number + item, len))?;
        item += 1;
    }
    equal("the number of items", item, count)
}
