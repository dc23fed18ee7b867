//! Tasks that go on until they are cancelled.

use wingbeat::{ErrorKind, ObjectRef};
use wingbeat_shapes::Chance;

use super::{Failure, RETRIES, doze, hold};

#[wingbeat::remote(num_cpus = 0.25)]
fn lingers() {
    while !wingbeat::is_cancelled() {
        doze(1);
    }
}

pub(super) async fn run(chance: &mut Chance) -> Result<(), Failure> {
    let tasks: Vec<_> = (0..1 + chance.below(4)).map(|_| lingers::options().max_retries(RETRIES).remote()).collect();
    hold(2, chance).await;
    tasks.iter().for_each(ObjectRef::cancel);
    for task in tasks {
        match task.get().await {
            // One that runs ends by itself when it is asked to.
            Ok(()) => {}
            Err(error) if error.kind() == ErrorKind::Cancelled => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}
