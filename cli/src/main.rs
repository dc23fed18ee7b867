//! The `wingbeat` command.

mod cluster;
mod completions;
mod context;
mod daemons;
mod devices;
mod doctor;
#[cfg(test)]
mod help_tests;
mod joining;
mod named;
mod progress;
mod rank_logs;
mod replay;
mod say;
mod signals;
mod sizes;
mod stack;
mod status;
mod torchrun;
mod train;
mod watch;
mod why;

use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};

use say::fail;

/// Remote tasks, actors and distributed training.
///
/// On one machine nothing needs to be started: a program that calls `wingbeat::init()` brings its own cluster. For
/// several machines, start one head, a worker on every machine, and point programs at the head:
///
///     wingbeat head --host 10.0.0.1 --token-file token
///     wingbeat worker --head 10.0.0.1:6420 --token-file token      (on every machine)
///     WINGBEAT_ADDRESS=10.0.0.1:6420 WINGBEAT_TOKEN_FILE=token ./my-program
#[derive(Parser)]
#[command(name = "wingbeat", version, verbatim_doc_comment)]
struct Cli {
    /// The cluster of this name in the configuration; see `wingbeat context --help`.
    #[arg(long, global = true, value_name = "NAME", env = context::CONTEXT_VARIABLE)]
    context: Option<String>,
    #[command(flatten)]
    shown: say::Shown,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Head(daemons::HeadArgs),
    Worker(daemons::WorkerArgs),
    Status(cluster::StatusArgs),
    List(cluster::ListArgs),
    Why(why::WhyArgs),
    Stack(stack::StackArgs),
    Drain(why::DrainArgs),
    Quota(why::QuotaArgs),
    Stop(cluster::StopArgs),
    Devices(devices::DevicesArgs),
    Doctor(doctor::DoctorArgs),
    Train(train::TrainArgs),
    Torchrun(torchrun::TorchrunArgs),
    Replay(replay::ReplayArgs),
    Context(context::ContextArgs),
    Completions(completions::CompletionsArgs),
}

fn main() -> ExitCode {
    wingbeat_worker::entry::linked();
    for (name, value) in std::env::vars_os() {
        // torchrun's variables, for which the empty text is nothing, and ours, as compose files write them.
        let is_ours =
            [wingbeat_worker::join::ADDRESS_VARIABLE, context::NAMESPACE_VARIABLE].iter().any(|ours| name == *ours);
        if value.is_empty() && (is_ours || name.to_string_lossy().starts_with("PET_")) {
            // SAFETY: no other thread has been started.
            unsafe { std::env::remove_var(name) };
        }
    }
    let matches = Cli::command().get_matches();
    let context = match context::used(&matches) {
        Ok(used) => {
            for (name, value) in used.variables {
                // SAFETY: no other thread has been started.
                unsafe {
                    match value {
                        Some(value) => std::env::set_var(name, value),
                        None => std::env::remove_var(name),
                    }
                }
            }
            used.prefix
        }
        Err(error) => {
            fail!("{error:#}");
            return ExitCode::FAILURE;
        }
    };
    // Options that were not given are read from the environment again.
    let cli = Cli::parse();
    wingbeat_net::memory::give_back_large_buffers();
    let is_daemon = matches!(cli.command, Command::Head(_) | Command::Worker(_));
    let begun = cli.shown.begin().and_then(|()| if is_daemon { say::begin_daemon() } else { Ok(()) });
    if let Err(error) = begun {
        fail!("cannot start: {error}");
        return ExitCode::FAILURE;
    }
    let mut builder = tokio::runtime::Builder::new_current_thread();
    // Housekeeping uses a thread every second: whichever did not do that for longer is not needed.
    let runtime = match builder.enable_all().thread_keep_alive(std::time::Duration::from_secs(2)).build() {
        Ok(runtime) => runtime,
        Err(error) => {
            fail!("cannot start: {error}");
            return ExitCode::FAILURE;
        }
    };
    let outcome = runtime.block_on(async {
        if is_daemon {
            tokio::spawn(wingbeat_net::memory::give_back_now_and_then());
        }
        match cli.command {
            Command::Head(args) => daemons::head(args).await,
            Command::Worker(args) => daemons::worker(args).await,
            Command::Status(args) => cluster::status(args).await,
            Command::List(args) => cluster::list(args).await,
            Command::Why(args) => why::why(args).await,
            Command::Stack(args) => stack::stack(args).await,
            Command::Drain(args) => why::drain(args).await,
            Command::Quota(args) => why::quota(args).await,
            Command::Stop(args) => cluster::stop(args).await,
            Command::Devices(args) => devices::devices(&args),
            Command::Replay(args) => replay::replay(&args),
            Command::Context(args) => context::run(&args),
            Command::Completions(args) => completions::print(&args, &mut Cli::command()),
            Command::Doctor(args) => return doctor::run(args).await,
            Command::Train(args) => return train::train(args).await,
            Command::Torchrun(args) => return torchrun::torchrun(args).await,
        }
        .map(|()| ExitCode::SUCCESS)
    });
    runtime.shutdown_timeout(std::time::Duration::from_millis(200));
    let code = match outcome {
        Ok(code) => code,
        Err(error) => {
            // What others said may be in it.
            fail!("{}", wingbeat_core::names::printable_lines(&format!("{context}{error:#}")));
            ExitCode::FAILURE
        }
    };
    say::end();
    code
}
