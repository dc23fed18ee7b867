//! The slowest of many: what one task takes at worst, alone and beside another job that keeps every CPU busy.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use anyhow::{Result, ensure};
use futures::stream::{FuturesUnordered, StreamExt};
use wingbeat_tests::TestCluster;

use super::Figures;
use super::mixed::work;
use super::tasks::nop;
use crate::measure::REPEAT;
use crate::report::{Figure, Must};

/// The middle of these, and that which one in a hundred is not quicker than.
fn median_and_p99(mut seconds: Vec<f64>) -> (f64, f64) {
    seconds.sort_by(f64::total_cmp);
    (seconds[seconds.len() / 2], seconds[seconds.len() * 99 / 100])
}

/// What each of so many tasks takes, one at a time.
async fn one_by_one(count: u64) -> Result<Vec<f64>> {
    let mut each = Vec::new();
    for i in 0..count {
        let begun = Instant::now();
        ensure!(nop::remote(i).get().await? == i);
        each.push(begun.elapsed().as_secs_f64());
    }
    Ok(each)
}

pub(super) async fn tasks_sync_p99() -> Figures {
    const COUNT: u64 = 20_000;
    let mut times = Vec::new();
    for _ in 0..=REPEAT {
        let (median, p99) = median_and_p99(one_by_one(COUNT).await?);
        times.push(p99 / median);
    }
    times.remove(0);
    Ok(vec![Figure::of("tasks_sync_p99", "× the median", true, times, Must::Reach(4.0))])
}

const CPUS: usize = 2;
/// What the tasks of the busy job compute.
const BUSY_MICROS: u64 = 10_000;
/// Tasks that it has under way for each CPU.
const AHEAD: usize = 4;

fn runtime() -> Result<tokio::runtime::Runtime> {
    Ok(tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?)
}

/// A driver that keeps all CPUs busy until it is to stop.
fn keep_busy(address: &str, token: &str, stop: &AtomicBool) -> Result<()> {
    runtime()?.block_on(async {
        let session = wingbeat::init_at(address).token(token).global(false).await?;
        let entered = session.enter();
        let mut running: FuturesUnordered<_> = (0..CPUS * AHEAD).map(|_| work::remote(BUSY_MICROS).get()).collect();
        while let Some(done) = running.next().await {
            done?;
            if !stop.load(Ordering::Relaxed) {
                running.push(work::remote(BUSY_MICROS).get());
            }
        }
        drop(entered);
        session.shutdown().await;
        Ok(())
    })
}

pub(super) fn short_beside_busy() -> Figures {
    const COUNT: u64 = 300;
    let mut cluster = TestCluster::start(0, 0)?;
    cluster.add_node(&["--num-cpus", &CPUS.to_string()])?;
    let (address, token) = (cluster.address().to_owned(), cluster.token()?);
    let stop = Arc::new(AtomicBool::new(false));
    let busy = {
        let (stop, address, token) = (stop.clone(), address.clone(), token.clone());
        std::thread::spawn(move || keep_busy(&address, &token, &stop))
    };
    let measured = runtime()?.block_on(async {
        let session = wingbeat::init_at(&address).token(&token).await?;
        let (mut medians, mut slowest) = (Vec::new(), Vec::new());
        // Once until both have what they get.
        for _ in 0..=REPEAT {
            let (median, p99) = median_and_p99(one_by_one(COUNT).await?);
            medians.push(median);
            slowest.push(p99);
        }
        session.shutdown().await;
        anyhow::Ok((medians.split_off(1), slowest.split_off(1)))
    });
    stop.store(true, Ordering::Relaxed);
    ensure!(busy.join().is_ok_and(|ended| ended.is_ok()), "the busy job failed");
    let (medians, slowest) = measured?;
    Ok(vec![
        Figure::of("short_beside_busy", "s", true, medians, Must::Nothing),
        Figure::of("short_beside_busy_p99", "s", true, slowest, Must::Reach(0.015)),
    ])
}
