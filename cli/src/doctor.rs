//! `wingbeat doctor`.

use std::process::ExitCode;

use anyhow::{Result, bail};
use clap::Args;
use comfy_table::{Table, presets};
use wingbeat_train::{Diagnosis, default_python, doctor};

use crate::joining::Joining;
use crate::say::say;
use crate::sizes;

/// Check a cluster's nodes before training: whether each reaches every other, and their versions, clocks and shared memory.
///
/// A run on several machines makes the same checks before it starts. The exit code is 1 if a check has failed.
#[derive(Args)]
#[command(verbatim_doc_comment)]
pub(crate) struct DoctorArgs {
    #[command(flatten)]
    cluster: Joining,
    /// The interpreter that training is to use; else that which `wingbeat train` would use.
    #[arg(long, env = "WINGBEAT_PYTHON")]
    python: Option<String>,
}

pub(crate) async fn run(args: DoctorArgs) -> Result<ExitCode> {
    let init = args.cluster.init("doctor", None)?;
    let session = init.await?;
    let diagnosis = doctor(&args.python.unwrap_or_else(default_python)).await;
    session.shutdown().await;
    let diagnosis = diagnosis?;
    if diagnosis.nodes.is_empty() {
        bail!("the cluster has no node that could be looked at; `wingbeat status` shows which there are");
    }
    say!("{}", table(&diagnosis));
    for problem in &diagnosis.problems {
        say!("{}: {}", if problem.is_fatal { "error" } else { "warning" }, problem.text);
    }
    match diagnosis.problems.iter().any(|problem| problem.is_fatal) {
        true => Ok(ExitCode::FAILURE),
        false => {
            if diagnosis.problems.is_empty() {
                say!("nothing is wrong");
            }
            Ok(ExitCode::SUCCESS)
        }
    }
}

fn table(diagnosis: &Diagnosis) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING);
    table.set_header(["node", "address", "interface", "python", "torch", "NCCL", "/dev/shm free"]);
    for report in &diagnosis.nodes {
        let version = |name: &str| report.versions.get(name).cloned().unwrap_or_else(|| "-".into());
        table.add_row([
            report.node.clone(),
            report.ip.map_or_else(|| "this machine alone".into(), |ip| ip.to_string()),
            report.interface.clone().unwrap_or_else(|| "-".into()),
            version("python"),
            version("torch"),
            version("nccl"),
            sizes::shown(report.shm_free),
        ]);
    }
    table
}
