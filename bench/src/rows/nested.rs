//! Tasks that submit tasks and wait for them.

use std::collections::BTreeSet;
use std::hint::black_box;

use anyhow::ensure;
use rayon::iter::{IntoParallelRefIterator, ParallelIterator};

use super::Figures;
use super::exchange::{MAPPED, MAPPED_SIZE, plus_one_of};
use crate::measure::{repeated_blocking, times};
use crate::report::{Figure, Must};

/// A task for each call of the naive recursion.
#[wingbeat::remote]
async fn fib(n: u64) -> Result<u64, String> {
    if n < 2 {
        return Ok(n);
    }
    let (a, b) = (fib::remote(n - 1), fib::remote(n - 2));
    let (a, b) = (a.get().await, b.get().await);
    Ok(a.map_err(|error| error.to_string())? + b.map_err(|error| error.to_string())?)
}

/// The same, which tells the processes in which it ran.
#[wingbeat::remote]
async fn fib_processes(n: u64) -> Result<BTreeSet<u32>, String> {
    let mut processes = BTreeSet::from([std::process::id()]);
    if n >= 2 {
        let (a, b) = (fib_processes::remote(n - 1), fib_processes::remote(n - 2));
        for below in [a.get().await, b.get().await] {
            processes.extend(below.map_err(|error| error.to_string())?);
        }
    }
    Ok(processes)
}

/// The same, which blocks its thread.
#[wingbeat::remote]
fn fib_sync(n: u64) -> Result<u64, String> {
    if n < 2 {
        return Ok(n);
    }
    let (a, b) = (fib_sync::remote(n - 1), fib_sync::remote(n - 2));
    let (a, b) = (a.get_blocking(), b.get_blocking());
    Ok(a.map_err(|error| error.to_string())? + b.map_err(|error| error.to_string())?)
}

/// The same on the threads of one process.
fn fib_rayon(n: u64) -> u64 {
    if n < 2 {
        return n;
    }
    let (a, b) = rayon::join(|| fib_rayon(n - 1), || fib_rayon(n - 2));
    a + b
}

/// How many tasks `fib(n)` is, itself included.
fn tasks(n: u64) -> u64 {
    if n < 2 { 1 } else { 1 + tasks(n - 1) + tasks(n - 2) }
}

/// What distribution costs: the recursion of `nested_fib18` and the map of `map_1000x1MiB`, inside of one process with two threads.
pub(super) fn limit_rayon() -> Figures {
    let threads = rayon::ThreadPoolBuilder::new().num_threads(2).build()?;
    let seconds = repeated_blocking(|| {
        ensure!(threads.install(|| black_box(fib_rayon(black_box(18)))) == 2_584);
        Ok(())
    })?;
    let mut figures = vec![Figure::rate("limit_rayon_fib18", tasks(18), &seconds, Must::Nothing)];
    let seconds = repeated_blocking(|| {
        let inputs: Vec<Vec<u8>> = (0..MAPPED).map(|i| vec![i as u8; MAPPED_SIZE]).collect();
        let mapped: Vec<Vec<u8>> = threads.install(|| inputs.par_iter().map(|bytes| plus_one_of(bytes)).collect());
        ensure!(mapped.iter().enumerate().all(|(i, bytes)| bytes[MAPPED_SIZE - 1] == (i as u8).wrapping_add(1)));
        Ok(())
    })?;
    let bytes = 2 * (MAPPED * MAPPED_SIZE) as u64;
    figures.push(Figure::bandwidth("limit_rayon_map", bytes, &seconds, Must::Nothing));
    Ok(figures)
}

pub(super) async fn nested_fib18() -> Figures {
    let seconds = times(5, async || {
        ensure!(fib::remote(18).get().await? == 2_584);
        Ok(())
    })
    .await?;
    let processes = fib_processes::remote(18).get().await?.len() as f64;
    // Twice the CPUs of the bench's cluster.
    Ok(vec![
        Figure::rate("nested_fib18", tasks(18), &seconds, Must::Reach(20_000.0)),
        Figure::of("nested_fib18_processes", "processes", true, vec![processes], Must::Reach(4.0)),
    ])
}

pub(super) async fn nested_sync_fib14() -> Figures {
    let seconds = times(5, async || {
        ensure!(fib_sync::remote(14).get().await? == 377);
        Ok(())
    })
    .await?;
    Ok(vec![Figure::rate("nested_sync_fib14", tasks(14), &seconds, Must::Reach(3_000.0))])
}
