//! Refs that come up with results: to what a task has put, and to what it has submitted. They may end with its process.

use wingbeat::{Error, ErrorKind, ObjectRef, put};
use wingbeat_shapes::Chance;

use super::{Failure, MayFail, RETRIES, bytes, equal, expected, hold, sum};

/// What a task owns is lost with it, and what lies in a store with that.
const OWNER: &[ErrorKind] = &[ErrorKind::Lost, ErrorKind::Full];

#[wingbeat::remote(num_cpus = 0.5)]
fn makes(number: u64, len: usize) -> Vec<u8> {
    bytes(number, len)
}

#[wingbeat::remote(num_cpus = 0.5)]
fn lends(number: u64, len: usize) -> Result<Vec<ObjectRef<Vec<u8>>>, Error> {
    Ok(vec![put(&bytes(number, len))?, makes::options().max_retries(RETRIES).remote(number, len)])
}

#[wingbeat::remote(num_cpus = 0.5)]
fn reads(refs: Vec<ObjectRef<Vec<u8>>>) -> Result<u64, Error> {
    let mut total = 0;
    for object in refs {
        total += sum(&object.get_blocking()?);
    }
    Ok(total)
}

pub(super) async fn run(chance: &mut Chance) -> Result<(), Failure> {
    let (number, len) = (chance.below(1_000) as u64, [100, 50_000, 500_000][chance.below(3)]);
    let refs = lends::options().max_retries(RETRIES).remote(number, len).get().await.may_be(OWNER)?;
    let read = reads::options().max_retries(RETRIES).remote(refs.clone());
    equal("what was read of borrowed refs", read.get().await.may_be(OWNER)?, 2 * expected(number, len))?;
    hold(3, chance).await;
    for object in refs {
        equal("a borrowed ref", sum(&object.get().await.may_be(OWNER)?), expected(number, len))?;
    }
    Ok(())
}
