//! Tasks and calls one at a time, by a thread that blocks: another program, which may be told to wait asleep.

use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use super::Figures;
use super::actors::Counter;
use super::tasks::nop;
use crate::limits::OTHER;
use crate::measure::repeated_blocking;
use crate::report::{Figure, Must};

const COUNT: u64 = 5_000;

/// What that program does: it prints the seconds of each repetition, of tasks and of calls.
pub(super) fn one_by_one() -> Result<()> {
    wingbeat::block_on(async { wingbeat::init().num_cpus(2).await.map(drop) })?;
    let tasks = repeated_blocking(|| {
        for i in 0..COUNT {
            ensure!(nop::remote(i).get_blocking()? == i);
        }
        Ok(())
    })?;
    let counter = Counter::remote();
    let mut count = counter.incr().get_blocking()?;
    let calls = repeated_blocking(|| {
        for _ in 0..COUNT {
            count += 1;
            ensure!(counter.incr().get_blocking()? == count);
        }
        Ok(())
    })?;
    println!("{}", serde_json::to_string(&(tasks, calls))?);
    wingbeat::shutdown_blocking();
    Ok(())
}

fn measured(rows: [&'static str; 2], waits_awake: &str, must: f64) -> Figures {
    let mut command = Command::new(std::env::current_exe()?);
    command.env(OTHER, "one_by_one").env("WINGBEAT_WAIT_AWAKE", waits_awake).env_remove("WINGBEAT_ADDRESS");
    let output = command.stderr(Stdio::inherit()).output()?;
    ensure!(output.status.success(), "the driver failed");
    let line = String::from_utf8(output.stdout)?;
    let (tasks, calls): (Vec<f64>, Vec<f64>) = serde_json::from_str(line.trim()).context("what the driver printed")?;
    let figure = |row, seconds: &[f64]| Figure::rate(row, COUNT, seconds, Must::Of("limit_echo", must));
    Ok(vec![figure(rows[0], &tasks), figure(rows[1], &calls)])
}

pub(super) fn blocking() -> Figures {
    measured(["tasks_sync_blocking", "actor_sync_blocking"], "yes", 0.9)
}

pub(super) fn asleep() -> Figures {
    measured(["tasks_sync_asleep", "actor_sync_asleep"], "no", 0.7)
}
