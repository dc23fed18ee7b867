//! How fast Wingbeat is on this machine: `cargo run --release -p wingbeat-bench`.
//!
//! Each row runs user code in worker processes, checks every result, and is repeated; shown are the median and the
//! range. Machines differ and drift: compare within one run only.

use std::time::Instant;

use anyhow::{Result, ensure};
use comfy_table::{Table, presets};
use wingbeat::get_all;

/// Repetitions of a row after one that warms up.
const REPEAT: usize = 5;

#[wingbeat::remote]
fn nop(x: u64) -> u64 {
    x
}

struct Counter {
    n: u64,
}

#[wingbeat::actor]
impl Counter {
    fn new() -> Self {
        Counter { n: 0 }
    }
    fn incr(&mut self) -> u64 {
        self.n += 1;
        self.n
    }
}

/// Seconds of each repetition, sorted.
async fn times(mut once: impl AsyncFnMut() -> Result<()>) -> Result<Vec<f64>> {
    once().await?;
    let mut seconds = Vec::new();
    for _ in 0..REPEAT {
        let begun = Instant::now();
        once().await?;
        seconds.push(begun.elapsed().as_secs_f64());
    }
    seconds.sort_by(f64::total_cmp);
    Ok(seconds)
}

fn rate(table: &mut Table, name: &str, count: u64, seconds: &[f64]) {
    let per_second = |i: usize| format!("{:.0}", count as f64 / seconds[i]);
    let (slowest, fastest) = (per_second(seconds.len() - 1), per_second(0));
    table.add_row([name.to_owned(), per_second(seconds.len() / 2), format!("{slowest} to {fastest}"), "/s".into()]);
}

/// Memory of this process and everything below it, shared pages divided among their users, in MiB.
fn memory_of_all() -> f64 {
    let mut left = vec![std::process::id()];
    let mut kib = 0;
    while let Some(pid) = left.pop() {
        let rollup = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap_or_default();
        let line = rollup.lines().find_map(|line| line.strip_prefix("Pss:"));
        kib += line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok()).unwrap_or(0);
        let Ok(tasks) = std::fs::read_dir(format!("/proc/{pid}/task")) else { continue };
        for task in tasks.flatten() {
            let children = std::fs::read_to_string(task.path().join("children")).unwrap_or_default();
            left.extend(children.split_whitespace().filter_map(|pid| pid.parse::<u32>().ok()));
        }
    }
    kib as f64 / 1024.0
}

#[wingbeat::main]
async fn main() -> Result<()> {
    let begun = Instant::now();
    wingbeat::init().num_cpus(2).await?;
    ensure!(nop::remote(7).get().await? == 7);
    let startup = begun.elapsed().as_secs_f64();
    let idle = memory_of_all();

    let mut table = Table::new();
    table.load_preset(presets::UTF8_HORIZONTAL_ONLY).set_header(["row", "median", "range", "unit"]);
    table.add_row(["init_to_first_task".to_owned(), format!("{:.1}", startup * 1000.0), "once".into(), "ms".into()]);
    table.add_row(["driver_head_node_2_workers".to_owned(), format!("{idle:.1}"), "once".into(), "MiB PSS".into()]);

    let seconds = times(async || {
        for i in 0..2_000u64 {
            ensure!(nop::remote(i).get().await? == i);
        }
        Ok(())
    })
    .await?;
    rate(&mut table, "tasks_sync", 2_000, &seconds);

    let seconds = times(async || {
        let refs: Vec<_> = (0..100_000u64).map(nop::remote).collect();
        let values = get_all(&refs).await?;
        ensure!(values.iter().enumerate().all(|(i, value)| i as u64 == *value));
        Ok(())
    })
    .await?;
    rate(&mut table, "tasks_async", 100_000, &seconds);

    let seconds = times(async || {
        let mut last = nop::remote(3);
        for _ in 0..100 {
            last = nop::remote(last);
        }
        ensure!(last.get().await? == 3);
        Ok(())
    })
    .await?;
    rate(&mut table, "task_chain_100", 1, &seconds);

    let counter = Counter::remote();
    let mut count = counter.incr().get().await?;
    let seconds = times(async || {
        for _ in 0..2_000 {
            count += 1;
            ensure!(counter.incr().get().await? == count);
        }
        Ok(())
    })
    .await?;
    rate(&mut table, "actor_sync", 2_000, &seconds);

    let seconds = times(async || {
        let refs: Vec<_> = (0..100_000).map(|_| counter.incr()).collect();
        for value in get_all(&refs).await? {
            count += 1;
            ensure!(value == count);
        }
        Ok(())
    })
    .await?;
    rate(&mut table, "actor_async", 100_000, &seconds);

    let seconds = times(async || {
        let counters: Vec<_> = (0..20).map(|_| Counter::remote()).collect();
        let first: Vec<_> = counters.iter().map(CounterHandle::incr).collect();
        ensure!(get_all(&first).await?.iter().all(|value| *value == 1));
        Ok(())
    })
    .await?;
    rate(&mut table, "actor_create_to_first_reply", 20, &seconds);

    println!("{table}");
    Ok(())
}
