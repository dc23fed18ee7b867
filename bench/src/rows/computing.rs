//! Tasks that compute: what part of the CPUs' time goes into users' code.

use std::time::Instant;

use anyhow::ensure;
use wingbeat::get_all;

use super::Figures;
use super::mixed::work;
use crate::report::{Figure, Must};

/// The CPUs of the cluster in which the rows run.
const CPUS: f64 = 2.0;

/// Tasks that compute for so many microseconds each.
async fn share(micros: u64, count: u64) -> anyhow::Result<Vec<f64>> {
    let mut shares = Vec::new();
    for round in 0..4 {
        let begun = Instant::now();
        let refs: Vec<_> = (0..count).map(|_| work::remote(micros)).collect();
        let answers = get_all(&refs).await?;
        let seconds = begun.elapsed().as_secs_f64();
        ensure!(answers.iter().all(|answer| answer[3] >= micros * 1_000));
        let worked: u64 = answers.iter().map(|answer| answer[3]).sum();
        if round > 0 {
            shares.push(worked as f64 / 1e9 / (CPUS * seconds) * 100.0);
        }
    }
    Ok(shares)
}

pub(super) async fn cpu() -> Figures {
    Ok(vec![
        Figure::of("cpu_10ms", "%", false, share(10_000, 400).await?, Must::Reach(98.0)),
        Figure::of("cpu_1ms", "%", false, share(1_000, 4_000).await?, Must::Reach(95.0)),
        Figure::of("cpu_100us", "%", false, share(100, 40_000).await?, Must::Reach(85.0)),
    ])
}
