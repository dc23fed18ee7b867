//! A thousand actors of one program on one machine.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use wingbeat::{Session, get_all};
use wingbeat_tests::TestCluster;

use super::Figures;
use crate::memory;
use crate::report::{Figure, Must};

const COUNT: usize = 1_000;
/// What was freed is given back within a few seconds.
const SETTLED: Duration = Duration::from_secs(3);

struct Resident;

#[wingbeat::actor(num_cpus = 0)]
impl Resident {
    fn new() -> Self {
        Resident
    }
    fn pid(&self) -> u32 {
        std::process::id()
    }
}

/// How long each `status` takes until it is to stop, in milliseconds.
async fn statuses(session: &Session, stop: &AtomicBool) -> Result<Vec<f64>> {
    let mut each = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        let begun = Instant::now();
        session.runtime().cluster_state().await?;
        each.push(begun.elapsed().as_secs_f64() * 1e3);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    Ok(each)
}

pub(super) fn actors_1000() -> Figures {
    let mut cluster = TestCluster::start(0, 0)?;
    cluster.add_node(&["--num-cpus", "2"])?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let (up, each, statuses) = runtime.block_on(async {
        let session = wingbeat::init_at(cluster.address()).token(&cluster.token()?).await?;
        let stop = AtomicBool::new(false);
        let making = async {
            let begun = Instant::now();
            let actors: Vec<_> = (0..COUNT).map(|_| Resident::remote()).collect();
            let pids = get_all(&actors.iter().map(ResidentHandle::pid).collect::<Vec<_>>()).await;
            let up = begun.elapsed().as_secs_f64();
            stop.store(true, Ordering::Relaxed);
            anyhow::Ok((actors, pids?, up))
        };
        let (made, statuses) = tokio::join!(making, statuses(&session, &stop));
        let (actors, pids, up) = made?;
        let distinct: std::collections::BTreeSet<u32> = pids.iter().copied().collect();
        ensure!(distinct.len() == COUNT, "{} processes for {COUNT} actors", distinct.len());
        tokio::time::sleep(SETTLED).await;
        let each = memory::of_all(&pids) / COUNT as f64;
        drop(actors);
        session.shutdown().await;
        anyhow::Ok((up, each, statuses?))
    })?;
    let slowest = statuses.into_iter().reduce(f64::max).context("no status was asked for")?;
    Ok(vec![
        Figure::of("actors_1000", "s", true, vec![up], Must::Reach(4.0)),
        Figure::of("actors_1000_each", "MiB", true, vec![each], Must::Reach(1.0)),
        Figure::of("actors_1000_status", "ms", true, vec![slowest], Must::Reach(50.0)),
    ])
}
