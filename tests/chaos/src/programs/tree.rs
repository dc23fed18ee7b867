//! Tasks that call tasks that call tasks, and sum up.

use wingbeat::{Error, get_all_blocking};
use wingbeat_shapes::Chance;

use super::{Failure, RETRIES, doze, equal};

const CHILDREN: u64 = 3;

#[wingbeat::remote(num_cpus = 0.5)]
fn grows(number: u64, depth: u32) -> Result<u64, Error> {
    if depth == 0 {
        doze(number % 20);
        return Ok(leaf(number));
    }
    let children: Vec<_> = (0..CHILDREN)
        .map(|child| grows::options().max_retries(RETRIES).remote(number * CHILDREN + child, depth - 1))
        .collect();
    Ok(get_all_blocking(&children)?.iter().fold(number, |sum, child| sum.wrapping_add(*child)))
}

fn leaf(number: u64) -> u64 {
    number.wrapping_mul(number)
}

fn expected(number: u64, depth: u32) -> u64 {
    match depth {
        0 => leaf(number),
        _ => (0..CHILDREN).fold(number, |sum, child| sum.wrapping_add(expected(number * CHILDREN + child, depth - 1))),
    }
}

pub(super) async fn run(chance: &mut Chance) -> Result<(), Failure> {
    let (number, depth) = (chance.below(1_000) as u64, 1 + chance.below(3) as u32);
    let tree = grows::options().max_retries(RETRIES).remote(number, depth);
    equal("the sum of a tree", tree.get().await?, expected(number, depth))
}
