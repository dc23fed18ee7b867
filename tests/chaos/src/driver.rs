//! A driver: programs of every kind beside each other, until it is told to end.

use std::future::IntoFuture;
use std::io::BufRead;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::Parser;
use wingbeat::{ErrorKind, Session};
use wingbeat_shapes::Chance;

use crate::programs::{self, Program};
use crate::report::{Outcome, Report};

/// The namespace of all drivers' actors.
const NAMESPACE: &str = "chaos";

/// How long freed objects may take to be gone. Only a leak takes so long.
const SETTLE: Duration = Duration::from_secs(60);

/// The handle of the detached actor, which its creator keeps.
const KEPT: usize = 1;

/// How long a driver may take to find the cluster, whose head may be away.
const JOIN: Duration = Duration::from_secs(60);

/// A driver of the cluster at `WINGBEAT_ADDRESS`.
#[derive(Parser)]
pub struct Args {
    /// Its number among all that there ever are.
    #[arg(long)]
    number: u64,
    /// What decides its programs.
    #[arg(long)]
    seed: u64,
    /// Runs every program once, ends what others have left on purpose, and ends.
    #[arg(long)]
    closes: bool,
}

fn say(report: &Report) {
    println!("{report}");
}

/// Runs programs, and reports them.
///
/// # Errors
/// The cluster cannot be joined, or objects are not freed.
pub fn run(args: &Args) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let over = Arc::new(AtomicBool::new(args.closes));
    ends_with_stdin(over.clone());
    runtime.block_on(async {
        let session = join(args.number).await?;
        say(&Report::Joined);
        let lanes = Program::ALL.map(|program| {
            let chance = Chance::new(args.seed ^ (program as u64 + 1) << 40);
            tokio::spawn(lane(program, args.number, chance, over.clone()))
        });
        for lane in lanes {
            lane.await?;
        }
        if args.closes {
            programs::close_ledger().await?;
        }
        settle(&session).await?;
        drop(session);
        wingbeat::shutdown().await;
        say(&Report::Leaves);
        Ok(())
    })
}

/// Whoever has started it tells it to end by closing its standard input.
fn ends_with_stdin(over: Arc<AtomicBool>) {
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines() {
            if line.is_err() {
                break;
            }
        }
        over.store(true, Ordering::Release);
    });
}

async fn join(number: u64) -> Result<Session> {
    let begun = Instant::now();
    let address = std::env::var("WINGBEAT_ADDRESS").context("WINGBEAT_ADDRESS")?;
    loop {
        let init = wingbeat::init_at(&address).namespace(NAMESPACE).name(&format!("driver-{number}"));
        match init.into_future().await {
            Ok(session) => return Ok(session),
            Err(error) if !matches!(error.kind(), ErrorKind::Session | ErrorKind::Full) => {
                bail!("cannot join: {error}")
            }
            Err(error) if begun.elapsed() > JOIN => bail!("cannot join for {JOIN:?}: {error}"),
            Err(_) => tokio::time::sleep(Duration::from_millis(200)).await,
        }
    }
}

/// One program, again and again.
async fn lane(program: Program, driver: u64, mut chance: Chance, over: Arc<AtomicBool>) {
    loop {
        say(&Report::Begins(program.name().into()));
        let outcome = program.run(driver, &mut chance).await;
        let is_last = matches!(outcome, Outcome::Over(_)) || over.load(Ordering::Acquire);
        say(&Report::Ended(program.name().into(), outcome));
        if is_last {
            return;
        }
        tokio::time::sleep(Duration::from_millis(chance.below(300) as u64)).await;
    }
}

/// Waits until everything that programs made is free.
async fn settle(session: &Session) -> Result<()> {
    let begun = Instant::now();
    while session.runtime().process().live_objects() > KEPT {
        if begun.elapsed() > SETTLE {
            bail!("{} objects are still there", session.runtime().process().live_objects());
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    Ok(())
}
