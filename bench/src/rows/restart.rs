//! The head is killed under load, and started again.

use std::future::IntoFuture;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use futures::future::try_join_all;
use futures::stream::{self, StreamExt, TryStreamExt};
use wingbeat::{block_on, init_at, shutdown_blocking};
use wingbeat_core::JobId;
use wingbeat_net::Token;
use wingbeat_tests::TestCluster;

use super::Figures;
use super::tasks::{all_right, nop};
use crate::pretended::{Cluster, PretendedDriver, PretendedNode};
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

/// From the start of a head with a journal of 100,000 named actors, after kill -9 of the last one, until it knows all of them to live
/// where they did: 100 nodes come back, each with 1,000 of them. Nodes and the driver are pretended, so no actor has a process.
pub(super) fn head_restart_100k_actors() -> Figures {
    const NODES: u64 = 100;
    const ACTORS: u64 = 100_000;
    const TIMES: usize = 3;
    let mut real = TestCluster::with_journal(0, 0)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let job = JobId(1);
    let mut driver = runtime.block_on(PretendedDriver::new(job))?;
    let mut cluster = Cluster { address: real.address().to_owned(), token: Token::new(&real.token()?) };
    let nodes = (1..=NODES).map(|number| PretendedNode::new(number, cluster.token.clone()));
    let mut nodes = runtime.block_on(try_join_all(nodes))?;
    runtime.block_on(async {
        driver.join(&cluster).await?;
        for node in &mut nodes {
            node.join(&cluster, job).await?;
        }
        stream::iter(0..ACTORS).map(Ok).try_for_each_concurrent(1_000, |number| driver.make(number)).await
    })?;
    let mut seconds = Vec::new();
    for _ in 0..TIMES {
        real.kill_head()?;
        driver.leave();
        nodes.iter_mut().for_each(PretendedNode::leave);
        let begun = Instant::now();
        real.start_head()?;
        cluster.address = real.address().to_owned();
        runtime.block_on(async {
            let client = driver.join(&cluster).await?;
            try_join_all(nodes.iter_mut().map(|node| node.join(&cluster, job))).await?;
            loop {
                let state = cluster.state(&client).await?;
                let living = state.actors.iter().filter(|actor| actor.state == "alive").count() as u64;
                if living == ACTORS {
                    return anyhow::Ok(());
                }
                ensure!(begun.elapsed() < Duration::from_secs(60), "{living} of {ACTORS} are back");
            }
        })?;
        seconds.push(begun.elapsed().as_secs_f64());
    }
    runtime.shutdown_background();
    real.stop()?;
    Ok(vec![Figure::of("head_restart_100k_actors", "s", true, seconds, Must::Reach(5.0))])
}
