//! Tasks that use much memory, of which they say how much.

use wingbeat_shapes::Chance;

use super::{Failure, RETRIES, bytes, doze, equal, expected, sum};

#[wingbeat::remote(num_cpus = 0.5)]
fn eats(number: u64, len: usize, holds_ms: u64) -> u64 {
    let eaten = bytes(number, len);
    doze(holds_ms);
    sum(&eaten)
}

pub(super) async fn run(chance: &mut Chance) -> Result<(), Failure> {
    let len = (16 + chance.below(100)) << 20;
    let numbers: Vec<u64> = (0..1 + chance.below(3)).map(|_| chance.below(1_000) as u64).collect();
    let meals: Vec<_> = numbers
        .iter()
        .map(|number| {
            let options = eats::options().max_retries(RETRIES).memory(len as u64);
            options.remote(*number, len, chance.below(100) as u64)
        })
        .collect();
    for (meal, number) in meals.into_iter().zip(numbers) {
        equal("what a task with much memory has summed", meal.get().await?, expected(number, len))?;
    }
    Ok(())
}
