//! `wingbeat train`.

use std::process::ExitCode;

use anyhow::Result;
use clap::Args;
use wingbeat_train::{Backend, TorchTrainer, TrainError};
use wingbeat_worker::{join, token};

use crate::sizes;

/// Run a PyTorch script on several ranks, with the environment that torchrun gives.
///
/// On the cluster at --address or $WINGBEAT_ADDRESS; without either, on this machine, with a cluster that lives as long as
/// the command.
///
///     wingbeat train --workers 2 train.py -- --epochs 3
#[derive(Args)]
#[command(verbatim_doc_comment)]
pub(crate) struct TrainArgs {
    /// The script, on every node at this path; with --module, a module.
    script: String,
    /// Arguments of the script, after --.
    #[arg(last = true)]
    args: Vec<String>,
    /// Number of ranks.
    #[arg(long, short = 'n', default_value_t = 1)]
    workers: u32,
    /// CPUs of each rank.
    #[arg(long, default_value_t = 1.0)]
    cpus_per_worker: f64,
    /// GPUs of each rank.
    #[arg(long, default_value_t = 0.0)]
    gpus_per_worker: f64,
    /// The interpreter; else $WINGBEAT_PYTHON, .venv/bin/python, or python3.
    #[arg(long)]
    python: Option<String>,
    /// Run `python -m SCRIPT`.
    #[arg(long, short = 'm')]
    module: bool,
    /// A variable of every rank's environment, as KEY=VALUE; may be repeated.
    #[arg(long = "env", value_parser = sizes::pair)]
    env: Vec<(String, String)>,
    /// How often the group may be started again after a failure.
    #[arg(long, default_value_t = 0)]
    max_failures: u32,
    /// What carries tensors: auto, nccl or gloo.
    #[arg(long, default_value = "auto", value_parser = ["auto", "nccl", "gloo"])]
    backend: String,
    /// The head of a cluster, as host:port.
    #[arg(long, env = join::ADDRESS_VARIABLE)]
    address: Option<String>,
    /// File with the cluster's token; else as for `wingbeat head`.
    #[arg(long)]
    token_file: Option<std::path::PathBuf>,
}

pub(crate) async fn train(args: TrainArgs) -> Result<ExitCode> {
    let mut init = match &args.address {
        Some(address) => wingbeat::init_at(address),
        None => wingbeat::init(),
    };
    if let Some(token) = token::given(args.token_file.as_deref())? {
        init = init.token(token.reveal());
    }
    // On this machine, ranks are what the machine is for: as many as asked can run at once.
    if args.address.is_none() {
        let cpus = std::thread::available_parallelism().map_or(1, |count| count.get() as u32);
        init = init.num_cpus(cpus.max((f64::from(args.workers) * args.cpus_per_worker).ceil() as u32));
        init = init.num_gpus((f64::from(args.workers) * args.gpus_per_worker).ceil() as u32);
    }
    let session = init.name("wingbeat train").await?;
    let mut trainer = if args.module { TorchTrainer::module(&args.script) } else { TorchTrainer::script(&args.script) };
    trainer = trainer
        .args(args.args)
        .workers(args.workers)
        .cpus_per_worker(args.cpus_per_worker)
        .gpus_per_worker(args.gpus_per_worker)
        .max_failures(args.max_failures)
        .backend(match args.backend.as_str() {
            "nccl" => Backend::Nccl,
            "gloo" => Backend::Gloo,
            _ => Backend::Auto,
        });
    if let Some(python) = args.python {
        trainer = trainer.python(python);
    }
    for (name, value) in &args.env {
        trainer = trainer.env(name, value);
    }
    let outcome = trainer.fit().await;
    session.shutdown().await;
    match outcome {
        Ok(result) => {
            eprintln!(
                "wingbeat train: {} ranks done in {:.1} s, attempt {}",
                result.ranks, result.seconds, result.attempts
            );
            Ok(ExitCode::SUCCESS)
        }
        Err(error) => {
            eprintln!("error: {error}");
            // The script's own exit code is what a caller of the script would see.
            let code = match &error {
                TrainError::RankFailed { code: Some(code), .. } => u8::try_from(*code).unwrap_or(1),
                _ => 1,
            };
            Ok(ExitCode::from(code.max(1)))
        }
    }
}
