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
/// Has that program and its workers share a core.
const ONE_CORE: &str = "WINGBEAT_BENCH_ONE_CORE";

/// What that program does: it prints the seconds of each repetition, of tasks and of calls.
pub(super) fn one_by_one() -> Result<()> {
    if std::env::var_os(ONE_CORE).is_some() {
        let mut first = rustix::thread::CpuSet::new();
        let allowed = rustix::thread::sched_getaffinity(None)?;
        let core = (0..rustix::thread::CpuSet::MAX_CPU).find(|core| allowed.is_set(*core));
        first.set(core.context("no core is allowed")?);
        rustix::thread::sched_setaffinity(None, &first)?;
    }
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

fn program() -> Result<Command> {
    let mut command = Command::new(std::env::current_exe()?);
    command.env(OTHER, "one_by_one").env_remove("WINGBEAT_ADDRESS").stderr(Stdio::inherit());
    Ok(command)
}

fn measured(rows: [&'static str; 2], command: &mut Command, must: Must) -> Figures {
    let output = command.output()?;
    ensure!(output.status.success(), "the driver failed");
    let line = String::from_utf8(output.stdout)?;
    let (tasks, calls): (Vec<f64>, Vec<f64>) = serde_json::from_str(line.trim()).context("what the driver printed")?;
    let figure = |row, seconds: &[f64]| Figure::rate(row, COUNT, seconds, must);
    Ok(vec![figure(rows[0], &tasks), figure(rows[1], &calls)])
}

pub(super) fn blocking() -> Figures {
    let rows = ["tasks_sync_blocking", "actor_sync_blocking"];
    measured(rows, program()?.env("WINGBEAT_WAIT_AWAKE", "yes"), Must::Of("limit_echo", 0.9))
}

pub(super) fn asleep() -> Figures {
    let rows = ["tasks_sync_asleep", "actor_sync_asleep"];
    measured(rows, program()?.env("WINGBEAT_WAIT_AWAKE", "no"), Must::Of("limit_echo", 0.7))
}

/// How long the way of a task is: what all processes do for it together. On several cores, how quickly these wake each other says as
/// much, and that depends on where the kernel puts threads.
pub(super) fn one_core() -> Figures {
    let rows = ["tasks_sync_one_core", "actor_sync_one_core"];
    measured(rows, program()?.env("WINGBEAT_WAIT_AWAKE", "no").env(ONE_CORE, "yes"), Must::Nothing)
}
