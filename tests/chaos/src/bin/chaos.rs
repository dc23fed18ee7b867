//! `cargo xtask chaos`: a cluster of several machines under load, while everything that can break is broken.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};
use wingbeat_chaos::schedule::Patience;
use wingbeat_chaos::{driver, room, run, world};

/// What the runtime may take after the last fault: to end programs, and to come to rest.
const AFTER: Duration = Duration::from_secs(900);

/// A cluster of several machines under load, while everything that can break is broken.
#[derive(Parser)]
struct Args {
    #[command(subcommand)]
    command: Option<Command>,
    /// Which faults and which programs: the same seed chooses the same. Every fourth seed has the usual times: who is silent is suspect after
    /// 5 s, and lost after 30 s. In the others it is 2 s and 7 s, so that what takes long happens more often.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// How long faults happen.
    #[arg(long, default_value_t = 10.0)]
    minutes: f64,
    /// Where logs go, which are kept when something is wrong; beside the program if nothing is said.
    #[arg(long)]
    logs: Option<PathBuf>,
    /// Keep the logs also when everything is right.
    #[arg(long)]
    keep: bool,
    /// Have every process write down what it takes in, beside the logs, for `wingbeat replay`. It takes gigabytes.
    #[arg(long)]
    record: bool,
}

#[derive(Subcommand)]
enum Command {
    /// What a run starts.
    #[command(hide = true)]
    Driver(driver::Args),
    /// Holds memory.
    #[command(hide = true)]
    Eat {
        /// How much.
        #[arg(long)]
        bytes: u64,
    },
}

fn main() -> ExitCode {
    let args = Args::parse();
    let done = match &args.command {
        Some(Command::Driver(args)) => driver::run(args),
        Some(Command::Eat { bytes }) => room::eat(*bytes),
        None => chaos(&args),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn chaos(args: &Args) -> Result<()> {
    let length = Duration::try_from_secs_f64(args.minutes * 60.0).context("--minutes")?;
    let patience = if args.seed.is_multiple_of(4) { Patience::USUAL } else { Patience::SHORT };
    let logs = match &args.logs {
        Some(logs) => logs.clone(),
        None => std::env::current_exe()?.with_file_name("chaos-logs").join(format!("seed-{}", args.seed)),
    };
    if let Some(number) = world::outside() {
        return run::run(&run::Options { number, seed: args.seed, length, patience, logs });
    }
    let _ = std::fs::remove_dir_all(&logs);
    std::fs::create_dir_all(&logs)?;
    let mut env = vec![("WINGBEAT_WAIT_TOLD_MS", "15000".into()), ("HOME", "/tmp/chaos".into())];
    if patience != Patience::USUAL {
        env.push(("WINGBEAT_SILENCE_MS", patience.silence.as_millis().to_string()));
    }
    let recordings = logs.join("recordings");
    if args.record {
        env.push(("WINGBEAT_RECORD", recordings.display().to_string()));
    }
    let done = world::run_inside(&env, length + AFTER);
    room::remove_all(std::process::id());
    match &done {
        Ok(()) => {
            if !args.keep {
                std::fs::remove_dir_all(&logs)?;
            }
            println!("chaos: ok");
        }
        Err(_) => {
            let recorded =
                if args.record { format!(", recordings in {}", recordings.display()) } else { String::new() };
            eprintln!("chaos: seed {} has failed; logs are in {}{recorded}", args.seed, logs.display());
        }
    }
    done
}
