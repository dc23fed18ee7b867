//! Two ranks that train together: Rust functions that reduce, started again as often as one is lost.

use wingbeat_collective::Op;
use wingbeat_shapes::Chance;
use wingbeat_train::{RankContext, Scaling, TorchTrainer, TrainError};

use super::{Failure, MayFail, REFUSED, RETRIES, doze, equal};

const RANKS: u32 = 2;

#[wingbeat::remote]
fn trains(context: RankContext, steps: u64, len: usize) -> Result<f64, String> {
    let mut group = context.join().map_err(|error| error.to_string())?;
    let mut total = 0.0;
    for step in 0..steps {
        let mut data = vec![(step + u64::from(context.rank)) as f64; len];
        group.all_reduce(&mut data, Op::Sum).map_err(|error| error.to_string())?;
        total += data[len - 1];
        doze(20);
    }
    Ok(total)
}

pub(super) async fn run(chance: &mut Chance) -> Result<(), Failure> {
    let (steps, len) = (5 + chance.below(40) as u64, [1, 10_000, 100_000][chance.below(3)]);
    let trainer = TorchTrainer::function(move |context| trains::remote(context, steps, len));
    let scaling = Scaling::workers(RANKS).cpus_per_worker(0.5);
    let wait = std::time::Duration::from_secs(600);
    let returned = match trainer.scaling(scaling).max_failures(RETRIES).wait_for_room(wait).fit().await {
        Ok(returned) => returned,
        Err(TrainError::Runtime(error)) => return Err(error).may_be(REFUSED),
        Err(error) => return Err(Failure::Wrong(error.to_string())),
    };
    // In each step the ranks have the step's number, and one more.
    let expected = (0..steps).map(|step| (2 * step + 1) as f64).sum::<f64>();
    equal("what ranks have reduced", returned.values, vec![expected; RANKS as usize])
}
