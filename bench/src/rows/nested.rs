//! Tasks that submit tasks and wait for them.

use anyhow::ensure;

use super::Figures;
use crate::measure::times;
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

/// How many tasks `fib(n)` is, itself included.
fn tasks(n: u64) -> u64 {
    if n < 2 { 1 } else { 1 + tasks(n - 1) + tasks(n - 2) }
}

pub(super) async fn nested_fib18() -> Figures {
    let seconds = times(5, async || {
        ensure!(fib::remote(18).get().await? == 2_584);
        Ok(())
    })
    .await?;
    Ok(vec![Figure::rate("nested_fib18", tasks(18), &seconds, Must::Reach(20_000.0))])
}

pub(super) async fn nested_sync_fib14() -> Figures {
    let seconds = times(5, async || {
        ensure!(fib_sync::remote(14).get().await? == 377);
        Ok(())
    })
    .await?;
    Ok(vec![Figure::rate("nested_sync_fib14", tasks(14), &seconds, Must::Reach(3_000.0))])
}
