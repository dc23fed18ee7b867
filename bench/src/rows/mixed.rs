//! Short and long tasks together.

use std::collections::BTreeMap;
use std::time::Instant;

use anyhow::ensure;
use wingbeat::get_all;

use super::Figures;
use crate::report::{Figure, Must};

/// Works for so many microseconds of CPU time. Answers where, and from when to when by the machine's clock, in
/// nanoseconds, and how much CPU time it took.
#[wingbeat::remote]
pub(super) fn work(micros: u64) -> Vec<u64> {
    let clock = |id| {
        let time = rustix::time::clock_gettime(id);
        time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
    };
    let (started, begun) = (clock(rustix::time::ClockId::Monotonic), clock(rustix::time::ClockId::ThreadCPUTime));
    while clock(rustix::time::ClockId::ThreadCPUTime) - begun < micros * 1_000 {
        std::hint::spin_loop();
    }
    let worked = clock(rustix::time::ClockId::ThreadCPUTime) - begun;
    vec![u64::from(std::process::id()), started, clock(rustix::time::ClockId::Monotonic), worked]
}

pub(super) async fn mixed() -> Figures {
    const COUNT: u64 = 2_000;
    let micros = |i: u64| match (i * 7_919) % 100 {
        0..70 => 0,
        70..95 => 1_000,
        _ => 50_000,
    };
    let (mut shares, mut gaps) = (Vec::new(), Vec::new());
    for round in 0..4 {
        let begun = Instant::now();
        let refs: Vec<_> = (0..COUNT).map(|i| work::remote(micros(i))).collect();
        let answers = get_all(&refs).await?;
        let seconds = begun.elapsed().as_secs_f64();
        ensure!(answers.iter().enumerate().all(|(i, answer)| answer[3] >= micros(i as u64) * 1_000));
        let worked: u64 = answers.iter().map(|answer| answer[3]).sum();
        // No process may idle while a task waits, which is until the last one starts.
        let mut of_process: BTreeMap<u64, Vec<(u64, u64)>> = BTreeMap::new();
        for answer in &answers {
            of_process.entry(answer[0]).or_default().push((answer[1], answer[2]));
        }
        let last_start = answers.iter().map(|answer| answer[1]).max().unwrap_or_default();
        let mut longest = 0;
        for times in of_process.values_mut() {
            times.sort_unstable();
            for pair in times.windows(2) {
                longest = longest.max(pair[1].0.min(last_start).saturating_sub(pair[0].1));
            }
            let end = times[times.len() - 1].1;
            longest = longest.max(last_start.saturating_sub(end));
        }
        if round > 0 {
            shares.push(worked as f64 / 1e9 / (2.0 * seconds) * 100.0);
            gaps.push(longest as f64 / 1e9);
        }
    }
    Ok(vec![
        Figure::of("mixed", "%", false, shares, Must::Reach(95.0)),
        Figure::of("mixed_longest_idle", "s", true, gaps, Must::Nothing),
    ])
}
