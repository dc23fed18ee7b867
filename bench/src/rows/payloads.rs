//! Tasks with arguments that are not empty.

use anyhow::ensure;
use wingbeat::get_all;

use super::Figures;
use crate::measure::repeated;
use crate::report::{Figure, Must};

#[wingbeat::remote]
fn sum(bytes: Vec<u8>) -> u64 {
    bytes.iter().map(|byte| u64::from(*byte)).sum()
}

async fn tasks_with(row: &'static str, count: u64, bytes: usize, must: f64) -> Figures {
    let seconds = repeated(async || {
        let refs: Vec<_> = (0..count).map(|_| sum::remote(vec![1u8; bytes])).collect();
        let sums = get_all(&refs).await?;
        ensure!(sums.len() as u64 == count && sums.iter().all(|sum| *sum == bytes as u64));
        Ok(())
    })
    .await?;
    Ok(vec![Figure::of(row, "s", true, seconds, Must::Reach(must))])
}

pub(super) async fn tasks_1k_of_50kb() -> Figures {
    tasks_with("tasks_1k_of_50kb", 1_000, 50_000, 0.5).await
}

pub(super) async fn tasks_100k_of_1kb() -> Figures {
    tasks_with("tasks_100k_of_1kb", 100_000, 1_000, 1.5).await
}
