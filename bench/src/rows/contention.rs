//! What somebody gets beside others who want everything.

use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
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

/// How long a gang as large as the cluster waits beside drivers that keep it busy.
pub(super) fn gang_beside_streams() -> Figures {
    let mut cluster = TestCluster::start(0, 0)?;
    cluster.add_node(&["--num-cpus", &CPUS.to_string()])?;
    let (token, address) = (cluster.token()?, cluster.address().to_owned());
    let stop = Arc::new(AtomicBool::new(false));
    let streams: Vec<_> = (0..STREAMS)
        .map(|_| {
            let (stop, address, token) = (stop.clone(), address.clone(), token.clone());
            std::thread::spawn(move || {
                block_on(async {
                    let session = wingbeat::init_at(&address).token(&token).global(false).await?;
                    let entered = session.enter();
                    let mut running: FuturesUnordered<_> =
                        (0..2 * CPUS).map(|_| sleep::remote(TASK).into_future()).collect();
                    while let Some(done) = running.next().await {
                        done?;
                        if !stop.load(Ordering::Relaxed) {
                            running.push(sleep::remote(TASK).into_future());
                        }
                    }
                    drop(entered);
                    session.shutdown().await;
                    Ok(())
                })
            })
        })
        .collect();
    std::thread::sleep(Duration::from_secs(3));
    let seconds = block_on(async {
        let session = wingbeat::init_at(&address).token(&token).await?;
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
    for stream in streams {
        ensure!(stream.join().is_ok_and(|ended: Result<()>| ended.is_ok()), "a stream failed");
    }
    Ok(vec![Figure::of("gang_beside_streams", "s", true, seconds?, Must::Reach(1.5))])
}
