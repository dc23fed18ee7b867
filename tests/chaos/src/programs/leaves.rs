//! Tasks that start processes and leave them behind, also in a session of their own. They end with their task's process, and only then
//! is its half of a GPU free.

use std::process::{Command, Stdio};

use wingbeat_shapes::Chance;

use super::{Failure, RETRIES, doze, equal};

#[wingbeat::remote(num_cpus = 0.5, num_gpus = 0.5)]
fn leaves(number: u64, takes_ms: u64) -> Result<u64, String> {
    if wingbeat::gpu_ids() != [0] {
        return Err(format!("the task has the GPUs {:?}", wingbeat::gpu_ids()));
    }
    let mut sleep = Command::new("setsid");
    sleep.args(["sh", "-c", "sleep 3600 & sleep 3600"]).stdin(Stdio::null()).stdout(Stdio::null());
    sleep.stderr(Stdio::null()).spawn().map_err(|error| error.to_string())?;
    doze(takes_ms);
    Ok(number + 1)
}

pub(super) async fn run(chance: &mut Chance) -> Result<(), Failure> {
    let number = chance.below(1_000) as u64;
    let task = leaves::options().max_retries(RETRIES).remote(number, chance.below(500) as u64);
    equal("the result of a task that has left processes", task.get().await?, number + 1)
}
