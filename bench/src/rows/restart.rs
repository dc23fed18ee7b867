//! The head is killed under load, and started again.

use std::future::IntoFuture;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use anyhow::{Result, ensure};
use wingbeat::{block_on, init_at, shutdown_blocking};
use wingbeat_tests::TestCluster;

use super::Figures;
use super::tasks::{all_right, nop};
use crate::report::{Figure, Must};

/// From kill -9 of the head, which is started again at once with its journal, to the result of a task that needs a lease of the next
/// one; meanwhile a driver submits tasks without a pause. Each of those must give its result.
pub(super) fn head_restart_under_load() -> Figures {
    const TIMES: u32 = 10;
    let mut cluster = TestCluster::with_journal(2, 2)?;
    block_on(init_at(cluster.address()).token(&cluster.token()?).into_future())?;
    let is_over = AtomicBool::new(false);
    let seconds = std::thread::scope(|threads| {
        let load = threads.spawn(|| under_load(&is_over));
        let restarted = (0..TIMES).map(|number| restarted(&mut cluster, number)).collect::<Result<Vec<f64>>>();
        is_over.store(true, Ordering::Relaxed);
        let tasks = load.join().map_err(|_| anyhow::anyhow!("the load has panicked"))??;
        ensure!(tasks > 0, "there was no load");
        restarted
    });
    shutdown_blocking();
    cluster.stop()?;
    Ok(vec![Figure::of("head_restart_under_load", "s", true, seconds?, Must::Reach(2.0))])
}

/// Submits tasks and gets all of them, again and again. Answers with their number.
fn under_load(is_over: &AtomicBool) -> Result<u64> {
    const AT_A_TIME: u64 = 1_000;
    let mut count = 0;
    while !is_over.load(Ordering::Relaxed) {
        ensure!(block_on(all_right(AT_A_TIME))?, "a wrong result");
        count += AT_A_TIME;
    }
    Ok(count)
}

fn restarted(cluster: &mut TestCluster, number: u32) -> Result<f64> {
    let begun = Instant::now();
    cluster.kill_head()?;
    cluster.start_head()?;
    // A share that no task had before: only the head can say where it runs.
    let placed = nop::options().num_cpus(0.001 * f64::from(1 + number));
    ensure!(placed.remote(1).get_blocking()? == 1);
    Ok(begun.elapsed().as_secs_f64())
}
