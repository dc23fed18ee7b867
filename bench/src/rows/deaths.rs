//! How soon the end of a worker process, of a node and of a head is acted upon. Each is killed with SIGKILL.

use std::future::IntoFuture;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::process::{Pid, Signal, kill_process};
use wingbeat::{Error, ObjectRef, block_on, init_at, shutdown_blocking};
use wingbeat_tests::{TestCluster, poll};

use super::Figures;
use super::tasks::nop;
use crate::report::{Figure, Must};

/// Only something that hangs takes so long.
const LIMIT: Duration = Duration::from_secs(60);

/// Leaves the process id of each attempt, and stays.
#[wingbeat::remote]
fn stays(dir: PathBuf) {
    let file = dir.join(wingbeat::current_attempt().unwrap_or_default().to_string());
    let part = file.with_extension("part");
    // Whoever finds the file finds all of it.
    let left = std::fs::write(&part, std::process::id().to_string()).and_then(|()| std::fs::rename(part, file));
    while left.is_ok() {
        std::thread::park();
    }
}

/// The process of an attempt, once it runs.
fn process_of(dir: &Path, attempt: u32) -> Result<Pid> {
    let file = dir.join(attempt.to_string());
    let left = poll(LIMIT, || std::fs::read_to_string(&file).ok()).context("a task has not begun")?;
    Pid::from_raw(left.parse()?).context("no process id")
}

fn join(cluster: &TestCluster) -> Result<()> {
    block_on(init_at(cluster.address()).token(&cluster.token()?).into_future())?;
    Ok(())
}

/// From the death until the driver has the error.
fn until_it_fails(task: &ObjectRef<()>, begun: Instant) -> Result<f64> {
    let failed = task.get_timeout_blocking(LIMIT);
    let seconds = begun.elapsed().as_secs_f64();
    ensure!(matches!(&failed, Err(error) if !matches!(error, Error::TimedOut { .. })), "{failed:?}");
    Ok(seconds)
}

/// From the death of a worker process until the caller of its task has the error, and until the next attempt at a task that has retries
/// runs.
pub(super) fn worker_death() -> Figures {
    const TIMES: u32 = 20;
    let cluster = TestCluster::start(1, 2)?;
    join(&cluster)?;
    let (mut errors, mut retries) = (Vec::new(), Vec::new());
    for number in 0..2 * TIMES {
        let dir = tempfile::tempdir()?;
        let is_retried = number % 2 == 0;
        let task = stays::options().max_retries(u32::from(is_retried)).remote(dir.path().to_owned());
        let process = process_of(dir.path(), 0)?;
        let begun = Instant::now();
        kill_process(process, Signal::KILL)?;
        if is_retried {
            process_of(dir.path(), 1)?;
            retries.push(begun.elapsed().as_secs_f64());
            task.cancel_force();
        } else {
            errors.push(until_it_fails(&task, begun)?);
        }
    }
    shutdown_blocking();
    Ok(vec![
        Figure::of("worker_death", "s", true, errors, Must::Reach(0.1)),
        Figure::of("worker_death_retry", "s", true, retries, Must::Reach(0.1)),
    ])
}

/// From the death of a node's daemon until the caller of a task that ran there has the error: its guard has ended all that ran there.
pub(super) fn node_death() -> Figures {
    const TIMES: usize = 10;
    let mut cluster = TestCluster::start(1, 1)?;
    join(&cluster)?;
    let mut seconds = Vec::new();
    for _ in 0..TIMES {
        let node = cluster.add_node(&["--num-cpus", "1", "--resource", "mortal=1"])?;
        let dir = tempfile::tempdir()?;
        let task = stays::options().max_retries(0).resource("mortal", 1.0).remote(dir.path().to_owned());
        process_of(dir.path(), 0)?;
        let begun = Instant::now();
        cluster.kill_node(node)?;
        seconds.push(until_it_fails(&task, begun)?);
    }
    shutdown_blocking();
    Ok(vec![Figure::of("node_death", "s", true, seconds, Must::Reach(1.0))])
}

/// From the death of a head with a standby until a task has its result that needs a lease of the standby, which leads by then.
pub(super) fn takeover() -> Figures {
    const TIMES: u32 = 3;
    let mut seconds = Vec::new();
    for _ in 0..TIMES {
        let mut cluster = TestCluster::with_journal(2, 1)?;
        cluster.start_standby("second")?;
        join(&cluster)?;
        ensure!(nop::remote(1).get_blocking()? == 1);
        let begun = Instant::now();
        cluster.kill_head()?;
        // A share that no task had before: only a head can say where it runs.
        ensure!(nop::options().num_cpus(0.5).remote(2).get_timeout_blocking(LIMIT)? == 2);
        seconds.push(begun.elapsed().as_secs_f64());
        cluster.wait_for_takeover()?;
        shutdown_blocking();
        cluster.stop()?;
    }
    Ok(vec![Figure::of("takeover", "s", true, seconds, Must::Reach(10.0))])
}
