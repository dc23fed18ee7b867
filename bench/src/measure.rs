//! Timing something several times.

use std::time::Instant;

use anyhow::Result;

/// Repetitions after one that warms up.
pub(crate) const REPEAT: usize = 5;

/// Seconds of each repetition.
pub(crate) async fn repeated(once: impl AsyncFnMut() -> Result<()>) -> Result<Vec<f64>> {
    times(REPEAT, once).await
}

/// Seconds of so many repetitions after one that warms up.
pub(crate) async fn times(count: usize, mut once: impl AsyncFnMut() -> Result<()>) -> Result<Vec<f64>> {
    once().await?;
    let mut seconds = Vec::new();
    for _ in 0..count {
        let begun = Instant::now();
        once().await?;
        seconds.push(begun.elapsed().as_secs_f64());
    }
    Ok(seconds)
}

/// As [`repeated`], without a runtime.
pub(crate) fn repeated_blocking(mut once: impl FnMut() -> Result<()>) -> Result<Vec<f64>> {
    once()?;
    let mut seconds = Vec::new();
    for _ in 0..REPEAT {
        let begun = Instant::now();
        once()?;
        seconds.push(begun.elapsed().as_secs_f64());
    }
    Ok(seconds)
}
