//! What somebody gets beside others who want everything.

use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use futures::stream::{FuturesUnordered, StreamExt};
use wingbeat::{Bundle, placement_group};
use wingbeat_tests::TestCluster;

use super::Figures;
use crate::report::{Figure, Must};

/// Connections to the head that never say anything.
const HALF_OPEN: usize = 10_000;
/// CPUs that the head counts. Tasks sleep.
const CPUS: usize = 16;
/// Drivers that keep them all busy, and how long their tasks take.
const STREAMS: usize = 4;
const TASK: Duration = Duration::from_millis(20);

#[wingbeat::remote]
fn sleep(time: Duration) {
    std::thread::sleep(time);
}

fn block_on<T>(future: impl Future<Output = Result<T>>) -> Result<T> {
    tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?.block_on(future)
}

/// How long a driver takes to join, run a task and leave while as many connections are half open as the descriptors
/// allow; they are opened again as the head drops them.
pub(super) fn driver_beside_half_open() -> Figures {
    let cluster = TestCluster::start(1, 1)?;
    let token = cluster.token()?;
    let address = cluster.address().to_owned();
    let stop = Arc::new(AtomicBool::new(false));
    let flooding = {
        let (stop, address) = (stop.clone(), address.clone());
        std::thread::spawn(move || {
            let mut open = std::collections::VecDeque::new();
            while !stop.load(Ordering::Relaxed) {
                if let Ok(stream) = TcpStream::connect(&address) {
                    open.push_back(stream);
                }
                if open.len() > HALF_OPEN {
                    open.pop_front();
                }
            }
        })
    };
    std::thread::sleep(Duration::from_secs(2));
    let seconds = (0..5).map(|_| {
        let begun = Instant::now();
        block_on(async {
            let session = wingbeat::init_at(&address).token(&token).await?;
            super::nop::remote(1).get().await?;
            session.shutdown().await;
            Ok(begun.elapsed().as_secs_f64())
        })
    });
    let seconds: Result<Vec<f64>> = seconds.collect();
    stop.store(true, Ordering::Relaxed);
    ensure!(flooding.join().is_ok(), "the flood failed");
    Ok(vec![Figure::of("driver_beside_half_open", "s", true, seconds?, Must::Reach(1.0))])
}

/// A driver that keeps `at_a_time` tasks of each kind in flight until it is told to stop, and counts those that ended.
fn stream(
    cluster: &TestCluster,
    stop: &Arc<AtomicBool>,
    at_a_time: usize,
    kinds: Vec<f64>,
) -> Result<(Arc<AtomicU64>, JoinHandle<Result<()>>)> {
    let (stop, address, token) = (stop.clone(), cluster.address().to_owned(), cluster.token()?);
    let ended = Arc::new(AtomicU64::new(0));
    let count = ended.clone();
    let running = std::thread::spawn(move || {
        block_on(async {
            let session = wingbeat::init_at(&address).token(&token).global(false).await?;
            let entered = session.enter();
            let start = |cpus: f64| async move { (cpus, sleep::options().num_cpus(cpus).remote(TASK).await) };
            let of_each = kinds.iter().flat_map(|cpus| std::iter::repeat_n(*cpus, at_a_time));
            let mut running: FuturesUnordered<_> = of_each.map(start).collect();
            while let Some((cpus, done)) = running.next().await {
                done?;
                count.fetch_add(1, Ordering::Relaxed);
                if !stop.load(Ordering::Relaxed) {
                    running.push(start(cpus));
                }
            }
            drop(entered);
            session.shutdown().await;
            Ok(())
        })
    });
    Ok((ended, running))
}

fn joined(streams: impl IntoIterator<Item = JoinHandle<Result<()>>>) -> Result<()> {
    for stream in streams {
        ensure!(stream.join().is_ok_and(|ended| ended.is_ok()), "a stream failed");
    }
    Ok(())
}

/// What the smaller of two equal jobs gets of all tasks, in percent: one asks for one shape, the other for 32.
pub(super) fn equal_jobs() -> Figures {
    let mut cluster = TestCluster::start(0, 0)?;
    cluster.add_node(&["--num-cpus", &CPUS.to_string()])?;
    let stop = Arc::new(AtomicBool::new(false));
    let (plain, first) = stream(&cluster, &stop, 2 * CPUS, vec![1.0])?;
    let shapes: Vec<f64> = (0..32).map(|number| 1.0 - f64::from(number) / 10_000.0).collect();
    let (varied, second) = stream(&cluster, &stop, 2, shapes)?;
    std::thread::sleep(Duration::from_secs(3));
    let parts = (0..5).map(|_| {
        let before = [&plain, &varied].map(|count| count.load(Ordering::Relaxed));
        std::thread::sleep(Duration::from_secs(2));
        let after = [&plain, &varied].map(|count| count.load(Ordering::Relaxed));
        let (one, other) = (after[0] - before[0], after[1] - before[1]);
        100.0 * one.min(other) as f64 / (one + other).max(1) as f64
    });
    let parts = parts.collect();
    stop.store(true, Ordering::Relaxed);
    joined([first, second])?;
    Ok(vec![Figure::of("equal_jobs", "%", false, parts, Must::Reach(45.0))])
}

/// How long a task of a shape that was never seen takes beside 1,000 shapes that wait for more than there is: the 99th of
/// 100 of them, five times.
pub(super) fn new_shape_among_1k() -> Figures {
    const WAITING: u32 = 1_000;
    const NEW: u32 = 100;
    let mut cluster = TestCluster::start(0, 0)?;
    cluster.add_node(&["--num-cpus", "1"])?;
    let seconds = block_on(async {
        let session = wingbeat::init_at(cluster.address()).token(&cluster.token()?).await?;
        let large = |number: u32| {
            let cpus = 2.0 + f64::from(number) / 10_000.0;
            sleep::options().num_cpus(cpus).wait_until_feasible().remote(TASK)
        };
        let waiting: Vec<_> = (0..WAITING).map(large).collect();
        let mut seconds = Vec::new();
        let mut new = 0;
        for _ in 0..5 {
            let mut each = Vec::new();
            for _ in 0..NEW {
                new += 1;
                let begun = Instant::now();
                let cpus = 0.1 - f64::from(new) / 10_000.0;
                super::nop::options().num_cpus(cpus).remote(1).await?;
                each.push(begun.elapsed().as_secs_f64());
            }
            each.sort_by(f64::total_cmp);
            seconds.push(each[each.len() - 2]);
        }
        drop(waiting);
        session.shutdown().await;
        Ok(seconds)
    })?;
    Ok(vec![Figure::of("new_shape_among_1k", "s", true, seconds, Must::Reach(0.05))])
}

/// How long a gang as large as the cluster waits beside drivers that keep it busy.
pub(super) fn gang_beside_streams() -> Figures {
    let mut cluster = TestCluster::start(0, 0)?;
    cluster.add_node(&["--num-cpus", &CPUS.to_string()])?;
    let stop = Arc::new(AtomicBool::new(false));
    let streams: Result<Vec<_>> = (0..STREAMS).map(|_| stream(&cluster, &stop, 2 * CPUS, vec![1.0])).collect();
    let streams = streams?;
    std::thread::sleep(Duration::from_secs(3));
    let seconds = block_on(async {
        let session = wingbeat::init_at(cluster.address()).token(&cluster.token()?).await?;
        let mut seconds = Vec::new();
        for _ in 0..5 {
            let begun = Instant::now();
            let group = placement_group(vec![Bundle::new().num_cpus(1.0); CPUS]).await?;
            group.ready().await?;
            seconds.push(begun.elapsed().as_secs_f64());
            group.remove().await?;
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        session.shutdown().await;
        Ok(seconds)
    });
    stop.store(true, Ordering::Relaxed);
    joined(streams.into_iter().map(|(_, running)| running))?;
    Ok(vec![Figure::of("gang_beside_streams", "s", true, seconds?, Must::Reach(1.5))])
}
