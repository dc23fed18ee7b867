//! From nothing to the first result, and what an idle cluster takes.

use std::io::{BufRead, BufReader};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::Figures;
use crate::limits::OTHER;
use crate::measure::REPEAT;
use crate::memory;
use crate::report::{Figure, Must};

#[wingbeat::remote]
fn pid(x: u64) -> (u64, u32) {
    (x, std::process::id())
}

/// What this program does as the driver that these rows start.
pub(crate) fn be_other() -> Option<Result<()>> {
    let what = std::env::var(OTHER).ok()?;
    Some(match what.as_str() {
        "start" => start(),
        "idle" => idle(),
        "one_by_one" => super::one_by_one::one_by_one(),
        "between_hosts" => super::hosts::between_hosts(),
        "to_eight_hosts" => super::hosts::to_eight_hosts(),
        other => Err(anyhow::anyhow!("{OTHER}={other}")),
    })
}

fn start() -> Result<()> {
    wingbeat::init_blocking()?;
    let (x, of) = pid::remote(7).get_blocking()?;
    ensure!(x == 7 && of != std::process::id());
    println!("ready");
    wingbeat::shutdown_blocking();
    Ok(())
}

fn idle() -> Result<()> {
    wingbeat::block_on(async { wingbeat::init().num_cpus(2).await.map(drop) })?;
    // Until both worker processes are there and have run something.
    let mut seen = std::collections::BTreeSet::new();
    while seen.len() < 2 {
        let refs: Vec<_> = (0..64u64).map(pid::remote).collect();
        for answer in refs {
            seen.insert(answer.get_blocking()?.1);
        }
    }
    println!("ready");
    std::io::stdin().read_line(&mut String::new())?;
    wingbeat::shutdown_blocking();
    Ok(())
}

/// Starts this program as `what`, and waits until it says that it is ready.
fn started(what: &str) -> Result<(Child, ChildStdin, Duration)> {
    let begun = Instant::now();
    let mut command = Command::new(std::env::current_exe()?);
    command.env(OTHER, what).env_remove("WINGBEAT_ADDRESS").stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn()?;
    let mut line = String::new();
    BufReader::new(child.stdout.take().context("no stdout")?).read_line(&mut line)?;
    let took = begun.elapsed();
    ensure!(line.trim() == "ready", "the driver said {line:?}");
    let stdin = child.stdin.take().context("no stdin")?;
    Ok((child, stdin, took))
}

pub(super) fn startup_to_first_task() -> Figures {
    let mut seconds = Vec::new();
    for _ in 0..=REPEAT {
        let (mut child, stdin, took) = started("start")?;
        drop(stdin);
        ensure!(child.wait()?.success(), "the driver failed");
        seconds.push(took.as_secs_f64());
    }
    seconds.remove(0);
    Ok(vec![Figure::of("startup_to_first_task", "s", true, seconds, Must::Reach(0.1))])
}

pub(super) fn idle_rss() -> Figures {
    let mut mebibytes = Vec::new();
    for _ in 0..3 {
        let (mut child, stdin, _) = started("idle")?;
        // What was freed is given back within a few seconds.
        let mut least = f64::INFINITY;
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_secs(3) {
            least = least.min(memory::of_all(&[child.id()]));
            std::thread::sleep(Duration::from_millis(200));
        }
        drop(stdin);
        ensure!(child.wait()?.success(), "the driver failed");
        mebibytes.push(least);
    }
    Ok(vec![Figure::of("idle_rss", "MiB", true, mebibytes, Must::Reach(60.0))])
}
