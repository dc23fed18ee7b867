//! How fast Wingbeat is on this machine: `cargo xtask bench`.
//!
//! Each row is repeated after a warm-up; shown are the median and the range. Rows of tasks and actors run user code in other processes
//! than this, and check every result. What the machine itself can do is measured in the same run (`limits.rs`), and so are
//! peers, if their figures are given. Machines differ and drift: compare within one run only.

mod growth;
mod head;
mod limits;
mod measure;
mod memory;
mod performance;
mod plot;
mod pretended;
mod report;
mod rows;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Result, bail};
use clap::Parser;
use report::Report;
use rows::{ROWS, Run};

/// No row takes so long, unless it hangs.
const ROW_LIMIT: Duration = Duration::from_secs(240);

/// How fast Wingbeat is on this machine.
#[derive(Parser)]
struct Arguments {
    /// Only these rows, and the limits that they are compared with.
    #[arg(long, value_delimiter = ',')]
    rows: Vec<String>,
    /// Also write a line of JSON a row to this file.
    #[arg(long)]
    json: Option<PathBuf>,
    /// Figures of a peer from the same machine and hour: a line of JSON a row.
    #[arg(long)]
    peer: Option<PathBuf>,
    /// Also measure how costs grow, and write docs/performance.md and its plots into this folder.
    #[arg(long)]
    docs: Option<PathBuf>,
}

fn main() -> ExitCode {
    match bench() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn bench() -> Result<()> {
    if let Some(done) = limits::be_other().or_else(rows::be_other) {
        return done;
    }
    let arguments = Arguments::parse();
    for wanted in &arguments.rows {
        if !ROWS.iter().any(|row| row.name == wanted) {
            let known: Vec<&str> = ROWS.iter().map(|row| row.name).collect();
            bail!("there is no row {wanted}; there are {}", known.join(", "));
        }
    }
    let mut report = Report::default();
    if let Some(file) = &arguments.peer {
        report.read_peer(file)?;
    }
    run(&arguments.rows, &mut report)?;
    println!("{}", report.table());
    if let Some(file) = &arguments.json {
        report.write_json(file)?;
    }
    if let Some(dir) = &arguments.docs {
        performance::write(dir, &report)?;
    }
    match report.failures() {
        [] => Ok(()),
        [(row, why)] => bail!("{row} failed: {why}"),
        failed => bail!("{} rows failed, the first of them {}: {}", failed.len(), failed[0].0, failed[0].1),
    }
}

fn run(wanted: &[String], report: &mut Report) -> Result<()> {
    let is_wanted = |name: &str| {
        let needed_by = |row: &&rows::Row| wanted.iter().any(|wanted| wanted == row.name) && row.limits.contains(&name);
        wanted.is_empty() || wanted.iter().any(|wanted| wanted == name) || ROWS.iter().any(|row| needed_by(&row))
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let mut joined = false;
    for row in ROWS.iter().filter(|row| is_wanted(row.name)) {
        let figures = match row.run {
            Run::Alone(run) => {
                if std::mem::take(&mut joined) {
                    runtime.block_on(wingbeat::shutdown());
                }
                run()
            }
            Run::InCluster(run) => runtime.block_on(async {
                if !std::mem::replace(&mut joined, true) {
                    wingbeat::init().num_cpus(2).object_store_memory(3 << 30).await?;
                }
                match tokio::time::timeout(ROW_LIMIT, run()).await {
                    Ok(figures) => figures,
                    Err(_) => bail!("it took longer than {} s", ROW_LIMIT.as_secs()),
                }
            }),
        };
        match figures {
            Ok(figures) => figures.into_iter().for_each(|figure| report.add(figure)),
            Err(error) => report.fail(row.name, format!("{error:#}")),
        }
    }
    if joined {
        runtime.block_on(wingbeat::shutdown());
    }
    Ok(())
}
