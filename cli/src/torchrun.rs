//! `wingbeat torchrun`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::PoisonError;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::Args;
use clap::builder::FalseyValueParser;
use wingbeat_train::{Layout, Scaling, TorchTrainer, TrainError};
use wingbeat_worker::aside::Aside;
use wingbeat_worker::join;

use crate::joining::Joining;
use crate::rank_logs::{self, ErrorFiles, RankLogs, Streams, Texts, Wanted};
use crate::say::{fail, note, notice};
use crate::signals::{self, Heard};
use crate::sizes;
use crate::train::{End, all_is_kept, run};

/// Run a script as torchrun does, with torchrun's own flags, on this machine or on a cluster.
///
/// On the cluster at --address or $WINGBEAT_ADDRESS, it is called once, and not on every node; without either, or with
/// --standalone, on this machine.
///
///     wingbeat torchrun --nproc-per-node 2 train.py --epochs 3
///     wingbeat torchrun --nnodes 2 --nproc-per-node gpu --address 10.0.0.1:6420 -m package.train
// A field for each option, of which torchrun has as many.
#[derive(Args)]
#[command(verbatim_doc_comment, infer_long_args = true)]
pub(crate) struct TorchrunArgs {
    /// Number of nodes; LEAST:MOST for as many as there are.
    #[arg(long, default_value = "1", value_parser = sizes::range, env = "PET_NNODES", hide_env = true)]
    nnodes: (u32, u32),
    /// Ranks on each node: a number, gpu, cpu, or auto for the GPUs if there are any and else the CPUs.
    #[arg(long, alias = "nproc_per_node", default_value = "1", env = "PET_NPROC_PER_NODE", hide_env = true)]
    nproc_per_node: String,
    /// The run's id, as TORCHELASTIC_RUN_ID.
    #[arg(long, alias = "rdzv_id", env = "PET_RDZV_ID", hide_env = true)]
    rdzv_id: Option<String>,
    /// Accepted for compatibility and ignored: Wingbeat does the rendezvous.
    #[arg(long, alias = "rdzv_backend", default_value = "c10d", value_parser = ["c10d", "static"], env = "PET_RDZV_BACKEND", hide_env = true)]
    rdzv_backend: String,
    /// Only this machine, as localhost:PORT; 0 for a free port.
    #[arg(long, alias = "rdzv_endpoint", env = "PET_RDZV_ENDPOINT", hide_env = true)]
    rdzv_endpoint: Option<String>,
    /// On this machine, also when $WINGBEAT_ADDRESS names a cluster.
    #[arg(long, env = "PET_STANDALONE", hide_env = true, value_parser = FalseyValueParser::new())]
    standalone: bool,
    /// How often the group may be started again after a failure.
    #[arg(long, alias = "max_restarts", default_value_t = 0, env = "PET_MAX_RESTARTS", hide_env = true)]
    max_restarts: u32,
    /// Taken, and not needed: Wingbeat hears at once when a rank ends.
    #[arg(
        long,
        alias = "monitor_interval",
        hide_default_value = true,
        default_value_t = 0.1,
        env = "PET_MONITOR_INTERVAL",
        hide_env = true
    )]
    monitor_interval: f64,
    /// Accepted for compatibility: scripts have no other method than spawn.
    #[arg(long, alias = "start_method", default_value = "spawn", value_parser = ["spawn"], env = "PET_START_METHOD", hide_env = true)]
    start_method: String,
    /// The name of the ranks' role.
    #[arg(long, default_value = "default", env = "PET_ROLE", hide_env = true)]
    role: String,
    /// Run SCRIPT as a module, as `python -m` does.
    #[arg(long, short = 'm', env = "PET_MODULE", hide_env = true, value_parser = FalseyValueParser::new())]
    module: bool,
    /// Run SCRIPT itself, without Python.
    #[arg(long, alias = "no_python", conflicts_with = "module", env = "PET_NO_PYTHON", hide_env = true, value_parser = FalseyValueParser::new())]
    no_python: bool,
    /// Taken for torchrun's sake: SCRIPT is run as __main__ anyway.
    #[arg(long, alias = "run_path", env = "PET_RUN_PATH", hide_env = true, value_parser = FalseyValueParser::new())]
    run_path: bool,
    /// Where to write what ranks print: DIR/RUN/attempt_N/RANK/stdout.log and stderr.log, and error.json of ranks that fail.
    /// Without it, a folder of this user, where runs are kept for 30 days.
    #[arg(long, alias = "log_dir", env = "PET_LOG_DIR", hide_env = true)]
    log_dir: Option<PathBuf>,
    /// What goes to files instead of the terminal: 0 nothing, 1 stdout, 2 stderr, 3 both; or by local rank, as 0:1,1:3.
    #[arg(long, short = 'r', default_value = "0", env = "PET_REDIRECTS", hide_env = true)]
    redirects: Streams,
    /// What goes to files and to the terminal, each line with its rank; as for --redirects.
    #[arg(long, short = 't', default_value = "0", env = "PET_TEE", hide_env = true)]
    tee: Streams,
    /// Only these local ranks' lines are shown, as 0,1.
    #[arg(long, alias = "local_ranks_filter", value_delimiter = ',', env = "PET_LOCAL_RANKS_FILTER", hide_env = true)]
    local_ranks_filter: Vec<u32>,
    /// Only 0: on a cluster, torchrun is called once.
    #[arg(long, alias = "node_rank", default_value_t = 0, value_parser = first_node, env = "PET_NODE_RANK", hide_env = true)]
    node_rank: u32,
    /// Only this machine: on a cluster, ranks are told where rank 0 is.
    #[arg(long, alias = "master_addr", default_value = "127.0.0.1", env = "PET_MASTER_ADDR", hide_env = true)]
    master_addr: String,
    /// The port where rank 0 listens; 0 for a free one.
    #[arg(long, alias = "master_port", default_value_t = 0, env = "PET_MASTER_PORT", hide_env = true)]
    master_port: u16,
    /// How long to wait for room, and for nodes that are not there yet. Without it, what others hold is waited for as long
    /// as it takes, and what no nodes could hold is an error at once.
    #[arg(long, value_parser = humantime::parse_duration)]
    wait_for_room: Option<Duration>,
    /// Each rank is LOCAL_RANK 0, and sees its own GPUs alone.
    #[arg(long, alias = "virtual_local_rank", env = "PET_VIRTUAL_LOCAL_RANK", hide_env = true, value_parser = FalseyValueParser::new())]
    virtual_local_rank: bool,
    /// The signals that are passed on to ranks.
    #[arg(long, alias = "signals_to_handle", default_value = "SIGTERM,SIGINT,SIGHUP,SIGQUIT", value_delimiter = ',', value_parser = signals::by_name, env = "PET_SIGNALS_TO_HANDLE", hide_env = true)]
    signals_to_handle: Vec<i32>,
    /// Taken, and not needed: ranks are told where rank 0 is.
    #[arg(long, alias = "rdzv_conf", env = "PET_RDZV_CONF", hide_env = true)]
    rdzv_conf: Option<String>,
    /// Taken, and not needed: a node tells the address by which others reach it.
    #[arg(long, alias = "local_addr", env = "PET_LOCAL_ADDR", hide_env = true)]
    local_addr: Option<String>,
    /// Taken for torchrun's sake: there are no events of its agent.
    #[arg(long, alias = "event_log_handler", env = "PET_EVENT_LOG_HANDLER", hide_env = true)]
    event_log_handler: Option<String>,
    /// Only `default`, which is what --log-dir, --redirects and --tee say.
    #[arg(long, alias = "logs_specs", value_parser = ["default"])]
    logs_specs: Option<String>,
    /// Of what --tee shows of stdout, the lines with one of these texts (with commas between; ,, is a comma) are written to
    /// DIR/RUN/attempt_N/filtered_stdout.log, too.
    #[arg(
        long,
        alias = "duplicate_stdout_filters",
        value_name = "TEXTS",
        env = "PET_DUPLICATE_STDOUT_FILTERS",
        hide_env = true
    )]
    duplicate_stdout_filters: Option<Texts>,
    /// The same of stderr, in filtered_stderr.log.
    #[arg(
        long,
        alias = "duplicate_stderr_filters",
        value_name = "TEXTS",
        env = "PET_DUPLICATE_STDERR_FILTERS",
        hide_env = true
    )]
    duplicate_stderr_filters: Option<Texts>,
    /// Not honoured.
    #[arg(long, alias = "numa_binding", hide = true, value_parser = not_honoured)]
    numa_binding: Option<String>,
    /// GPUs of each rank; else 1 where nodes have as many as ranks, and none where they have fewer.
    #[arg(long)]
    gpus_per_rank: Option<f64>,
    /// CPUs that each rank reserves; else 1, or its part of them where nodes have fewer than ranks.
    #[arg(long)]
    cpus_per_rank: Option<f64>,
    /// The interpreter; else $WINGBEAT_PYTHON, that of an activated environment, .venv/bin/python, or python3.
    #[arg(long)]
    python: Option<String>,
    /// Start every rank as a new process, instead of forking it from one that has torch imported.
    #[arg(long)]
    cold: bool,
    #[command(flatten)]
    cluster: Joining,
    /// The script, module or program, and its arguments.
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "SCRIPT [ARGS]")]
    command: Vec<String>,
}

/// Ranks on each node, and what each reserves.
#[derive(Debug, PartialEq)]
struct PerNode {
    ranks: u32,
    cpus: f64,
    gpus: f64,
}

impl PerNode {
    /// On nodes that have at least so many GPUs and CPUs.
    fn of(ranks: u32, gpus: u32, cpus: u32) -> PerNode {
        // Rounded down, to what resources are counted in.
        let part = (f64::from(cpus) / f64::from(ranks) * 10_000.0).floor() / 10_000.0;
        PerNode { ranks, cpus: part.clamp(0.0, 1.0), gpus: if gpus >= ranks { 1.0 } else { 0.0 } }
    }

    fn asked(self, args: &TorchrunArgs) -> PerNode {
        let (cpus, gpus) = (args.cpus_per_rank.unwrap_or(self.cpus), args.gpus_per_rank.unwrap_or(self.gpus));
        PerNode { cpus, gpus, ..self }
    }
}

pub(crate) async fn torchrun(args: TorchrunArgs) -> Result<ExitCode> {
    let Some((script, rest)) = args.command.split_first() else { bail!("there is nothing to run") };
    // Everything after the script is its own, so that what comes in its place is not seen as a flag.
    if script.starts_with('-') {
        let why = match script.as_str() {
            "-" => "a script is a file, which every rank reads; standard input is there for one alone".to_owned(),
            _ => format!(
                "unexpected argument {script}; `wingbeat torchrun --help` shows torchrun's flags that can be honoured"
            ),
        };
        fail!("{why}");
        // As for whatever else is wrong with a command line.
        return Ok(ExitCode::from(2));
    }
    let (least, nodes) = args.nnodes;
    let address = args.cluster.address.clone().filter(|_| !args.standalone);
    if address.is_none() && least != 1 {
        bail!("--nnodes {least} needs a cluster: name its head with --address or ${}", join::ADDRESS_VARIABLE);
    }
    let port = port(&args)?;
    let mut init = match args.standalone {
        true => args.cluster.alone("torchrun", Some(script))?.private(),
        false => args.cluster.init("torchrun", Some(script))?,
    };
    if address.is_none() {
        // On this machine, ranks are what the machine is for: as many as asked can run at once.
        let asked = args.nproc_per_node.parse::<u32>().unwrap_or(0);
        init = init.num_cpus(crate::train::cpus_for(asked, args.cpus_per_rank.unwrap_or(1.0))?);
    }
    let session = init.await?;
    let per_node = per_node(&args, &session, nodes).await;
    let per_node = match per_node {
        Ok(per_node) => per_node,
        Err(error) => {
            session.shutdown().await;
            return Err(error);
        }
    };
    let trainer = match (args.module, args.no_python) {
        (true, _) => TorchTrainer::module(script),
        (_, true) => TorchTrainer::program(script),
        _ => TorchTrainer::script(script),
    };
    let run_id = args.rdzv_id.clone().unwrap_or_else(|| format!("{:016x}", std::process::id()));
    let wanted = Wanted {
        redirects: args.redirects.clone(),
        tee: args.tee.clone(),
        only: args.local_ranks_filter.clone(),
        stdout_filters: args.duplicate_stdout_filters.clone(),
        stderr_filters: args.duplicate_stderr_filters.clone(),
    };
    let logs = RankLogs::new(args.log_dir.as_deref(), &run_id, per_node.ranks, wanted, args.role.clone())?;
    let errors = logs.errors();
    let dir = logs.dir().filter(|_| logs.has_files()).map(Path::to_owned);
    let notices = Aside::start(|text: String| notice!("wingbeat: {text}"))?;
    let told = notices.clone();
    let scaling = Scaling::nodes(nodes, per_node.ranks)
        .elastic(least..=nodes)
        .cpus_per_worker(per_node.cpus)
        .gpus_per_worker(per_node.gpus);
    let mut trainer = trainer
        .args(rest)
        .scaling(scaling)
        .max_failures(args.max_restarts)
        .role(&args.role)
        .run_id(&run_id)
        .on_notice(move |text| told.tell(text.to_owned()))
        .output(logs);
    if let Some(limit) = args.wait_for_room {
        trainer = trainer.wait_for_room(limit);
    }
    if let Some(port) = port {
        trainer = trainer.master_port(port);
    }
    if let Some(python) = &args.python {
        trainer = trainer.python(python);
    }
    if args.cold {
        trainer = trainer.cold();
    }
    if args.virtual_local_rank {
        trainer = trainer.layout(Layout::Virtual);
    }
    let outcome = run(trainer, &session, Heard(args.signals_to_handle.clone())).await;
    notices.end();
    if let End::Failed(TrainError::RankFailed { rank, .. }, _) = &outcome {
        tell_own_launcher(*rank, &errors);
    }
    all_is_kept();
    if let Some(dir) = dir {
        rank_logs::end_line();
        notice!("wingbeat torchrun: what ranks printed is in {}", dir.display());
    }
    let incomplete = rank_logs::is_incomplete();
    Ok(match outcome {
        End::Done(_) => match incomplete {
            Some(why) => {
                fail!("{why}");
                ExitCode::from(rank_logs::INCOMPLETE)
            }
            None => ExitCode::SUCCESS,
        },
        // As torchrun, which tells no more by its code.
        End::Failed(error, _) => {
            rank_logs::end_line();
            fail!("{error}");
            ExitCode::FAILURE
        }
    })
}

/// Writes the error of the rank that failed first where a launcher of this command looks for it, as torchrun does.
fn tell_own_launcher(rank: u32, errors: &ErrorFiles) {
    let Some(path) = std::env::var_os("TORCHELASTIC_ERROR_FILE").filter(|path| !path.is_empty()) else { return };
    if let Some(text) = errors.lock().unwrap_or_else(PoisonError::into_inner).get(&rank)
        && let Err(error) = std::fs::write(&path, text)
    {
        note!("wingbeat torchrun: cannot write {}: {error}", path.display());
    }
}

const ELSEWHERE: &str = "is for agents that are started on every node; here, `wingbeat worker` runs there, and torchrun is \
                         called once, with the head's --address";

/// Whether this machine goes by this name or address.
fn is_here(host: &str) -> bool {
    let host = host.trim_start_matches('[').trim_end_matches(']');
    let own = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let is_own_address = |address: std::net::IpAddr| std::net::UdpSocket::bind((address, 0)).is_ok();
    let named = || {
        std::net::ToSocketAddrs::to_socket_addrs(&(host, 0))
            .is_ok_and(|mut all| all.any(|one| is_own_address(one.ip())))
    };
    host == "localhost" || host == own || host.parse().is_ok_and(is_own_address) || named()
}

fn not_honoured(_: &str) -> Result<String, String> {
    Err("torchrun has this flag, and Wingbeat cannot do what it says; leave it out".to_owned())
}

fn first_node(text: &str) -> Result<u32, String> {
    match text.parse() {
        Ok(0) => Ok(0),
        Ok(_) => Err(ELSEWHERE.to_owned()),
        Err(_) => Err("it is not a number".to_owned()),
    }
}

fn port(args: &TorchrunArgs) -> Result<Option<u16>> {
    // A variable is of the pod, and may name what stands before it; a flag was meant.
    let is_variable = std::env::var("PET_MASTER_ADDR").is_ok_and(|set| set == args.master_addr);
    if !is_variable && !is_here(&args.master_addr) {
        bail!("--master-addr {} {ELSEWHERE}", args.master_addr);
    }
    let mut port = args.master_port;
    if let Some(endpoint) = &args.rdzv_endpoint {
        let (host, number) = endpoint.rsplit_once(':').unwrap_or((endpoint, "0"));
        if !host.is_empty() && !is_here(host) {
            bail!("--rdzv-endpoint {endpoint} {ELSEWHERE}");
        }
        port = number.parse().with_context(|| format!("--rdzv-endpoint {endpoint} has no port"))?;
    }
    Ok((port != 0).then_some(port))
}

/// GPUs and CPUs of the nodes with most of them. A program on a machine without a node brings one that has nothing.
fn largest<'a>(nodes: impl Iterator<Item = &'a BTreeMap<String, f64>>, most: u32) -> Vec<(u32, u32)> {
    let whole = |of: &BTreeMap<String, f64>, name| of.get(name).map_or(0, |amount| *amount as u32);
    let with_room = nodes.filter(|of| !of.is_empty());
    let mut there: Vec<(u32, u32)> = with_room.map(|of| (whole(of, "GPU"), whole(of, "CPU"))).collect();
    there.sort_unstable_by(|a, b| b.cmp(a));
    there.truncate(most as usize);
    there
}

/// What `--nproc-per-node` means on these nodes.
async fn per_node(args: &TorchrunArgs, session: &wingbeat::Session, nodes: u32) -> Result<PerNode> {
    let text = args.nproc_per_node.as_str();
    let number = text.parse::<u32>().ok();
    if number == Some(0) {
        bail!("--nproc-per-node 0 runs nothing");
    }
    let all = tokio::time::timeout(Duration::from_secs(30), session.nodes()).await??;
    let there = largest(all.iter().filter(|node| node.draining.is_none()).map(|node| &node.resources), nodes);
    let of = |kind: &str, counts: Vec<u32>| match counts.as_slice() {
        [first, rest @ ..] if rest.iter().all(|other| other == first) && *first > 0 => Ok(*first),
        [] | [0, ..] => bail!("--nproc-per-node {text}: there is no {kind} on nodes that take work"),
        counts => bail!("--nproc-per-node {text}: nodes differ, with {counts:?} {kind}s; name a number"),
    };
    let gpus: Vec<u32> = there.iter().map(|(gpus, _)| *gpus).collect();
    let cpus: Vec<u32> = there.iter().map(|(_, cpus)| *cpus).collect();
    let has_gpus = gpus.iter().any(|gpus| *gpus > 0);
    // Before the first node has joined, nobody knows.
    let least_gpus = gpus.iter().copied().min().unwrap_or(0);
    let least_cpus = cpus.iter().copied().min().unwrap_or(u32::MAX);
    let per_node = match (number, text) {
        (Some(ranks), _) => PerNode::of(ranks, least_gpus, least_cpus),
        (None, "gpu") => PerNode::of(of("GPU", gpus)?, least_gpus, least_cpus),
        (None, "auto") if has_gpus => PerNode::of(of("GPU", gpus)?, least_gpus, least_cpus),
        (None, "cpu" | "auto") => PerNode { gpus: 0.0, ..PerNode::of(of("CPU", cpus)?, 0, least_cpus) },
        _ => bail!("--nproc-per-node {text} is none of: a number, gpu, cpu, auto"),
    };
    if has_gpus && text != "cpu" && per_node.gpus == 0.0 && args.gpus_per_rank.is_none() {
        let ranks = per_node.ranks;
        notice!(
            "wingbeat torchrun: {ranks} ranks on a node with {least_gpus} GPUs see none; with --gpus-per-rank they share \
             them, which gloo can do and NCCL cannot"
        );
    }
    Ok(per_node.asked(args))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_that_a_program_brings_is_none_that_ranks_run_on() {
        let with = |gpus: f64, cpus: f64| BTreeMap::from([("GPU".to_owned(), gpus), ("CPU".to_owned(), cpus)]);
        let nodes = [BTreeMap::new(), with(8.0, 96.0), with(8.0, 64.0), BTreeMap::from([("CPU".to_owned(), 4.0)])];
        assert_eq!(largest(nodes.iter(), 2), [(8, 96), (8, 64)]);
        assert_eq!(largest(nodes.iter(), 9), [(8, 96), (8, 64), (0, 4)]);
        assert_eq!(largest(nodes[..1].iter(), 2), [], "before the first node has joined, nobody knows");
    }
}
