//! Tasks in a placement group, whose bundles move when their node is lost.

use wingbeat::{Bundle, PlacementStrategy, placement_group};
use wingbeat_shapes::Chance;

use super::{Failure, MayFail, REFUSED, RETRIES, doze, equal};

#[wingbeat::remote(num_cpus = 0.5)]
fn triples(number: u64, takes_ms: u64) -> u64 {
    doze(takes_ms);
    number * 3
}

pub(super) async fn run(chance: &mut Chance) -> Result<(), Failure> {
    let strategies = [PlacementStrategy::Pack, PlacementStrategy::Spread, PlacementStrategy::StrictSpread];
    let bundles = vec![Bundle::new().num_cpus(0.5); 2];
    let group =
        placement_group(bundles).strategy(strategies[chance.below(3)]).wait_until_feasible().await.may_be(REFUSED)?;
    let numbers: Vec<u64> = (0..2 + chance.below(10)).map(|_| chance.below(1_000) as u64).collect();
    let tasks: Vec<_> = numbers
        .iter()
        .map(|number| {
            let options = triples::options().max_retries(RETRIES).in_bundle(&group, (number % 2) as u32);
            options.remote(*number, chance.below(30) as u64)
        })
        .collect();
    let mut done = Ok(());
    for (task, number) in tasks.into_iter().zip(numbers) {
        done = done.and(match task.get().await {
            Ok(value) => equal("the result of a task in a group", value, number * 3),
            Err(error) => Err(error.into()),
        });
    }
    group.remove().await.may_be(REFUSED)?;
    done
}
