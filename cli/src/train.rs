//! `wingbeat train`.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::Args;
use wingbeat::Session;
use wingbeat_train::{
    Backend, BestCheckpoints, Checkpoint, CheckpointConfig, Layout, Returns, Scaling, ScoreOrder, TorchTrainer,
    TrainError, TrainResult,
};
use wingbeat_worker::aside::Aside;

use crate::joining::Joining;
use crate::progress::{self, Progress};
use crate::rank_logs;
use crate::say::{fail, note, notice};
use crate::signals::{self, Heard};
use crate::sizes;

/// The exit code of a run that was stopped, as shells have it.
fn stopped_by(signal: Option<i32>) -> u8 {
    const SIGTERM: i32 = 15;
    u8::try_from(128 + signal.unwrap_or(SIGTERM)).unwrap_or(1)
}

/// Run a PyTorch script on several ranks, with the environment that torchrun gives.
///
/// On the cluster at --address or $WINGBEAT_ADDRESS; without either, on this machine, with a cluster that lives as long as
/// the command.
///
///     wingbeat train --workers 2 train.py --epochs 3
// A field for each option.
#[derive(Args)]
#[command(verbatim_doc_comment)]
pub(crate) struct TrainArgs {
    /// The script, on every node at this path; with --module, a module.
    script: String,
    /// Arguments of the script, from the first that is no option of this command; all that comes after --.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    args: Vec<String>,
    /// Number of ranks; LEAST:MOST for as many as fit. With --nodes, the number on each.
    #[arg(long, short = 'n', default_value = "1", value_parser = sizes::range)]
    workers: (u32, u32),
    /// CPUs of each rank.
    #[arg(long, default_value_t = 1.0)]
    cpus_per_worker: f64,
    /// GPUs of each rank.
    #[arg(long, default_value_t = 0.0)]
    gpus_per_worker: f64,
    /// The interpreter; else $WINGBEAT_PYTHON, that of an activated environment, .venv/bin/python, or python3.
    #[arg(long)]
    python: Option<String>,
    /// Run `python -m SCRIPT`.
    #[arg(long, short = 'm')]
    module: bool,
    /// A variable of every rank's environment, as KEY=VALUE; may be repeated.
    #[arg(long = "env", value_parser = sizes::pair)]
    env: Vec<(String, String)>,
    /// A file of 16 MiB at most that travels to every rank, as NAME=PATH; {file:NAME} in the script's arguments is where it lies there.
    #[arg(long = "file", value_parser = sizes::file, value_name = "NAME=PATH")]
    files: Vec<(String, String)>,
    /// Memory that is reserved for each rank, such as 16GiB.
    #[arg(long, value_parser = sizes::some_bytes, value_name = "SIZE")]
    memory_per_worker: Option<u64>,
    /// An amount of a custom resource that each rank holds, as NAME=AMOUNT; may be repeated.
    #[arg(long = "resource-per-worker", value_parser = sizes::resource, value_name = "NAME=AMOUNT")]
    resources_per_worker: Vec<(String, f64)>,
    /// Only on nodes whose labels meet these rules: zone=a, or "zone in (a, b), disk!=slow". Given again, where to look when there is no
    /// room there.
    #[arg(long = "labels", value_name = "RULES")]
    labels: Vec<String>,
    /// Spread ranks over as many nodes as there are, instead of keeping them close to each other.
    #[arg(long, conflicts_with = "nodes")]
    spread: bool,
    /// How often the group may be started again after a failure.
    #[arg(long, default_value_t = 0)]
    max_failures: u32,
    /// Start every rank as a new process, instead of forking it from one that has torch imported.
    #[arg(long)]
    cold: bool,
    /// How long ranks have to save what they have, if they handle the signal, when the run is stopped or moved, or another
    /// rank has failed. They get the signal that this command got, and else SIGTERM.
    #[arg(long, default_value = "30s", value_parser = humantime::parse_duration)]
    grace: Duration,
    /// How long to wait for room, and for nodes that are not there yet. Without it, what others hold is waited for as long
    /// as it takes, and what no nodes could hold is an error at once.
    #[arg(long, value_parser = humantime::parse_duration)]
    wait_for_room: Option<Duration>,
    /// If no rank prints or reports for this long, show every rank's stack and name the ranks that the others wait for.
    #[arg(long, default_value = "10m", value_parser = humantime::parse_duration)]
    hang_timeout: Duration,
    /// Treat a run that hangs as failed: it is started again, within --max-failures.
    #[arg(long)]
    restart_on_hang: bool,
    /// Where checkpoints are stored, and gone on from: a folder that all nodes share, or s3://…, gs://…, az://….
    #[arg(long)]
    storage: Option<String>,
    /// How many of the newest checkpoints are kept.
    #[arg(long, default_value_t = 2, value_parser = sizes::some)]
    keep: usize,
    /// Also keep the best by a metric: NAME for the largest, NAME:min for the smallest.
    #[arg(long, value_parser = best)]
    keep_best: Option<BestCheckpoints>,
    /// How many of the best are kept.
    #[arg(long, default_value_t = 1, requires = "keep_best", value_parser = sizes::some, value_name = "NUMBER")]
    keep_best_count: usize,
    /// Ship this folder to the nodes, and run there: for nodes that have no script at its path.
    #[arg(long)]
    working_dir: Option<PathBuf>,
    /// Number of nodes, with --workers ranks on each; LEAST:MOST for as many as there are.
    #[arg(long, value_parser = sizes::range)]
    nodes: Option<(u32, u32)>,
    /// How the ranks of a node are told apart: torchrun numbers them, and each sees all of their GPUs; virtual is as torchrun's
    /// --virtual-local-rank; with spark, each is the only one of a node, as pyspark's TorchDistributor has it on a cluster.
    #[arg(long, default_value = "torchrun", value_parser = ["torchrun", "virtual", "spark"])]
    layout: String,
    /// Show what ranks print without their numbers.
    #[arg(long)]
    unprefixed: bool,
    /// SCRIPT is a file with a pickled function, as `wingbeat.torch` writes it.
    #[arg(long, hide = true)]
    function: bool,
    /// Every rank of the function says what it returned; else the first one does.
    #[arg(long, hide = true, requires = "function")]
    all_return: bool,
    /// A JSON file with further variables of every rank's environment: others can read a command line.
    #[arg(long, hide = true)]
    env_file: Option<PathBuf>,
    /// The process that started this one, and with which it ends.
    #[arg(long, hide = true)]
    parent: Option<i32>,
    /// A dataset NAME=FOLDER, with an Arrow file 0.arrow, 1.arrow, … for each rank.
    #[arg(long, hide = true, value_parser = sizes::pair)]
    dataset: Vec<(String, String)>,
    /// A folder for what came of the run: what functions return, metrics and checkpoints, or why it failed.
    #[arg(long, hide = true)]
    results: Option<PathBuf>,
    /// Do not start again after a script's exception, only after crashes and lost nodes.
    #[arg(long)]
    fail_on_exception: bool,
    /// What carries tensors: auto, nccl or gloo.
    #[arg(long, default_value = "auto", value_parser = ["auto", "nccl", "gloo"])]
    backend: String,
    #[command(flatten)]
    cluster: Joining,
}

pub(crate) async fn train(args: TrainArgs) -> Result<ExitCode> {
    let parent = args.parent.map(Parent::watch).transpose()?;
    let results = args.results.clone();
    let outcome = train_to_the_end(args).await;
    if let (Err(error), Some(results)) = (&outcome, &results) {
        tell_in(results, "error.json", serde_json::json!({ "message": format!("{error:#}") }).to_string().as_bytes());
    }
    if let (Some(parent), Some(results)) = (parent, results)
        && parent.is_gone()
    {
        // Nobody else will remove it.
        let _ = std::fs::remove_dir_all(results);
    }
    outcome
}

/// The program that has started this one. When it ends, however that is, this process gets SIGTERM.
struct Parent(i32);

impl Parent {
    fn watch(pid: i32) -> Result<Parent> {
        rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::TERM))?;
        let parent = Parent(pid);
        if parent.is_gone() {
            bail!("the program that started this run has ended");
        }
        Ok(parent)
    }

    fn is_gone(&self) -> bool {
        rustix::process::getppid().map(|pid| pid.as_raw_nonzero().get()) != Some(self.0)
    }
}

/// `-n4`, `-n=4` or `-mn4` as the first word behind the script, where clap gives it to that. Behind a `--` it is the script's.
fn ours_in_one_word<'a>(args: &'a [String], given: &[OsString]) -> Option<&'a String> {
    let is_ours = |word: &&String| {
        let value = word.strip_prefix("-n").or_else(|| word.strip_prefix("-mn"));
        value.is_some_and(|value| value.strip_prefix('=').unwrap_or(value).starts_with(|at: char| at.is_ascii_digit()))
    };
    // Of the `--` on a command line, clap keeps those that stand behind the script's first word.
    let stands_behind_dashes =
        given.iter().filter(|word| *word == "--").count() > args.iter().filter(|word| *word == "--").count();
    args.first().filter(is_ours).filter(|_| !stands_behind_dashes)
}

async fn train_to_the_end(args: TrainArgs) -> Result<ExitCode> {
    if let Some(word) = ours_in_one_word(&args.args, &std::env::args_os().collect::<Vec<_>>()) {
        bail!("{word} stands behind the script: put it before that, or `--` before the script's own arguments");
    }
    // Ranks begin there.
    std::env::current_dir()
        .context("the working folder of this command is not there any more: change to one that is")?;
    let runs = (!args.function).then_some(args.script.as_str());
    let mut init = args.cluster.init("train", runs)?;
    // On this machine, ranks are what the machine is for: as many as asked can run at once.
    if args.cluster.address.is_none() {
        init = init.num_cpus(cpus_for(args.workers.1, args.cpus_per_worker)?);
    }
    let mut trainer = match (args.function, args.module) {
        (true, _) => {
            let pickled = std::fs::read(&args.script).with_context(|| format!("reading {}", args.script))?;
            TorchTrainer::python_function(pickled).returns(if args.all_return { Returns::All } else { Returns::First })
        }
        (false, true) => TorchTrainer::module(&args.script),
        (false, false) => TorchTrainer::script(&args.script),
    };
    let scaling = match (args.nodes, args.workers) {
        (Some(_), (least, most)) if least != most => {
            bail!("--workers {least}:{most} with --nodes: each node has the same number of ranks; let --nodes vary")
        }
        (Some((least, most)), (workers, _)) => Scaling::nodes(most, workers).elastic(least..=most),
        (None, (least, most)) => Scaling::workers(most).elastic(least..=most),
    };
    let mut keep = CheckpointConfig::newest(args.keep);
    if let Some(best) = &args.keep_best {
        keep = keep.best(best.clone().count(args.keep_best_count));
    }
    let mut scaling = scaling.cpus_per_worker(args.cpus_per_worker).gpus_per_worker(args.gpus_per_worker);
    if let Some(bytes) = args.memory_per_worker {
        scaling = scaling.memory_per_worker(bytes);
    }
    for (name, amount) in &args.resources_per_worker {
        scaling = scaling.resource_per_worker(name, *amount);
    }
    for rules in &args.labels {
        scaling = scaling.labels(rules);
    }
    if args.spread {
        scaling = scaling.spread();
    }
    trainer = trainer
        .args(args.args)
        .scaling(scaling)
        .checkpoints(keep)
        .max_failures(args.max_failures)
        .retry_exceptions(!args.fail_on_exception)
        .grace(args.grace)
        .layout(match args.layout.as_str() {
            "virtual" => Layout::Virtual,
            "spark" => Layout::Spark,
            _ => Layout::Torchrun,
        })
        .hang_timeout(args.hang_timeout)
        .backend(match args.backend.as_str() {
            "nccl" => Backend::Nccl,
            "gloo" => Backend::Gloo,
            _ => Backend::Auto,
        });
    if let Some(limit) = args.wait_for_room {
        trainer = trainer.wait_for_room(limit);
    }
    if let Some(url) = &args.storage {
        trainer = trainer.storage(url);
    }
    if let Some(folder) = &args.working_dir {
        trainer = trainer.working_dir(folder);
    }
    for (name, path) in &args.files {
        trainer = trainer.file(name, small_file(path)?);
    }
    let progress = Progress::new(!args.unprefixed)?;
    let (notices, told) = (progress.clone(), progress.clone());
    trainer = trainer
        .output(progress.clone())
        .on_notice(move |text| notices.notice(text))
        .on_progress(move |now| told.update(now));
    if args.restart_on_hang {
        trainer = trainer.restart_on_hang();
    }
    if args.cold {
        trainer = trainer.cold();
    }
    if let Some(python) = args.python {
        trainer = trainer.python(python);
    }
    if let Some(file) = &args.env_file {
        let text = std::fs::read_to_string(file).with_context(|| format!("reading {}", file.display()))?;
        let env: BTreeMap<String, String> =
            serde_json::from_str(&text).with_context(|| format!("reading {}", file.display()))?;
        for (name, value) in &env {
            trainer = trainer.env(name, value);
        }
    }
    for (name, value) in &args.env {
        if OF_EACH_RANK.contains(&name.as_str()) {
            progress.notice(&format!("--env {name}={value}: every rank gets this in place of its own {name}"));
        }
        trainer = trainer.env(name, value);
    }
    let session = init.await?;
    for (name, folder) in &args.dataset {
        let of_rank = |rank| {
            let path = Path::new(folder).join(format!("{rank}.arrow"));
            let bytes = std::fs::read(&path).with_context(|| format!("reading {}", path.display()))?;
            Ok(wingbeat::put(&bytes)?)
        };
        let ranks = args.workers.1 * args.nodes.map_or(1, |(_, most)| most);
        trainer = trainer.dataset(name, (0..ranks).map(of_rank).collect::<Result<Vec<_>>>()?);
    }
    let end = run(trainer, &session, Heard(signals::OF_RUN.to_vec())).await;
    progress.end();
    match end {
        End::Done(result) => {
            if let Some(dir) = &args.results {
                for (rank, pickled) in &result.returned {
                    tell_in(dir, &format!("returned-{rank}.pickle"), pickled);
                }
                tell_in(dir, "result.json", finished(&result).to_string().as_bytes());
            }
            all_is_kept();
            notice!(
                "wingbeat train: {} done in {:.1} s, attempt {}{}",
                progress::counted(result.ranks),
                result.elapsed.as_secs_f64(),
                result.attempts,
                progress::metrics(&result.metrics)
            );
            if let Some(checkpoint) = &result.checkpoint {
                notice!("wingbeat train: the newest checkpoint is {}", checkpoint.url);
            }
            if let Some(best) = &result.best_checkpoint {
                notice!("wingbeat train: the best is {}", best.url);
            }
            match rank_logs::is_incomplete() {
                Some(why) => {
                    fail!("{why}");
                    Ok(ExitCode::from(rank_logs::INCOMPLETE))
                }
                None => Ok(ExitCode::SUCCESS),
            }
        }
        End::Failed(error, signal) => {
            if let Some(dir) = &args.results {
                tell_in(dir, "error.json", described(&error).to_string().as_bytes());
                if let TrainError::RankFailed { python_error: Some(raised), .. } = &error
                    && let Some(pickled) = &raised.pickled
                {
                    tell_in(dir, "raised.pickle", pickled);
                }
            }
            all_is_kept();
            // Nobody may read any more, and whoever sent a signal wants this process to end.
            match signal.and_then(|_| Aside::start(|text: String| fail!("{text}")).ok()) {
                Some(aside) => {
                    aside.tell(error.to_string());
                    aside.end();
                }
                None => fail!("{error}"),
            }
            // The script's own exit code is what a caller of the script would see, unless this command says something else with it.
            let code = match &error {
                TrainError::RankFailed { code: Some(code), .. } => {
                    u8::try_from(*code).ok().filter(|code| *code != rank_logs::INCOMPLETE).unwrap_or(1)
                }
                TrainError::Stopped { .. } => stopped_by(signal),
                _ => 1,
            };
            Ok(ExitCode::from(code.max(1)))
        }
    }
}

/// What `--file` may hold: it travels in the message that starts a rank.
const SMALL_FILE: u64 = 16 << 20;
/// Variables that tell each rank something else, or where it finds the others.
const OF_EACH_RANK: [&str; 7] =
    ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"];

/// The file of a `--file`. A device or a pipe may have no end.
fn small_file(path: &str) -> Result<Vec<u8>> {
    let mut content = Vec::new();
    let file = File::open(path).with_context(|| format!("--file: opening {path}"))?;
    file.take(SMALL_FILE + 1).read_to_end(&mut content).with_context(|| format!("--file: reading {path}"))?;
    if content.len() as u64 > SMALL_FILE {
        bail!(
            "--file: {path} is larger than {}: give its path where every node has it, or ship its folder with --working-dir",
            sizes::shown(SMALL_FILE)
        );
    }
    Ok(content)
}

/// Writes a file for whoever has started this, whole or not at all. A run does not fail because a disk is full at its end: what came of
/// it is said here, too.
fn tell_in(folder: &Path, name: &str, bytes: &[u8]) {
    let (begun, path) = (folder.join(format!("{name}.part")), folder.join(name));
    if let Err(error) = std::fs::write(&begun, bytes).and_then(|()| std::fs::rename(&begun, &path)) {
        note!("wingbeat train: {} could not be written: {error}", path.display());
    }
}

/// The run is over, and what came of it is written where it was asked for: only what nobody may read is left.
static ALL_IS_KEPT: AtomicBool = AtomicBool::new(false);

/// From here on one signal is enough to end the command.
pub(crate) fn all_is_kept() {
    ALL_IS_KEPT.store(true, Ordering::Relaxed);
}

/// How a run has ended.
pub(crate) enum End {
    Done(Box<TrainResult>),
    /// With the signal that asked for it, if one did.
    Failed(TrainError, Option<i32>),
}

/// Runs it, stops it when the user or the system asks for that, and leaves the cluster.
pub(crate) async fn run(trainer: TorchTrainer, session: &Session, signals: Heard) -> End {
    let asked = Arc::new(AtomicI32::new(0));
    // On a thread of its own: this one may wait for somebody to read.
    let (told, stopper, heard) = (asked.clone(), trainer.stopper(), signals);
    let listens = std::thread::Builder::new().name("signals".into()).spawn(move || {
        heard.block_on_each(|signal, is_again| {
            if is_again || ALL_IS_KEPT.load(Ordering::Relaxed) {
                // Whoever sends a second one wants this process gone. Of a run that is over, only what nobody reads is left.
                std::process::exit(i32::from(stopped_by(Some(signal.number))));
            }
            told.store(signal.number, Ordering::Relaxed);
            stopper.stop_with(signal.number);
            let what = signal.what;
            let noted = std::thread::Builder::new();
            let _ = noted.spawn(move || notice!("wingbeat: {what}; ranks that run may save what they have"));
        })
    });
    if let Err(error) = listens {
        note!("wingbeat: nothing will be heard of signals: {error}");
    }
    let outcome = trainer.stdin().fit().await;
    session.shutdown().await;
    match outcome {
        Ok(result) => End::Done(Box::new(result)),
        Err(error) => End::Failed(error, Some(asked.load(Ordering::Relaxed)).filter(|signal| *signal != 0)),
    }
}

/// CPUs of a cluster for these ranks alone: those of the machine, or as many as they ask for.
///
/// # Errors
/// So many ranks are a mistake: a thousand Python processes with torch stop a machine for minutes.
pub(crate) fn cpus_for(ranks: u32, each: f64) -> Result<u32> {
    let there = std::thread::available_parallelism().map_or(1, |count| count.get() as u32);
    let most = LEAST_LIMIT.max(there.saturating_mul(RANKS_OF_A_CPU));
    if ranks > most {
        bail!(
            "{ranks} ranks are too many for this machine, which has {there} CPUs: at most {most} run without a cluster. If that is what you \
             want, start a cluster that offers as many CPUs (`wingbeat head`, `wingbeat worker --num-cpus {ranks}`)"
        );
    }
    Ok(there.max((f64::from(ranks) * each).ceil() as u32))
}

/// So many ranks may always run on this machine without a cluster.
const LEAST_LIMIT: u32 = 64;
/// And so many for each of its CPUs.
const RANKS_OF_A_CPU: u32 = 8;

fn best(text: &str) -> Result<BestCheckpoints, String> {
    match text.rsplit_once(':') {
        Some((metric, "min")) => Ok(BestCheckpoints::of(metric, ScoreOrder::Min)),
        Some((metric, "max")) => Ok(BestCheckpoints::of(metric, ScoreOrder::Max)),
        Some((_, other)) => Err(format!("{other:?} is neither min nor max")),
        None => Ok(BestCheckpoints::of(text, ScoreOrder::Max)),
    }
}

/// What came of a run, as `wingbeat.train` reads it.
fn finished(result: &TrainResult) -> serde_json::Value {
    let checkpoint =
        |checkpoint: &Checkpoint| serde_json::json!({ "url": checkpoint.url, "metrics": texts(&checkpoint.metrics) });
    serde_json::json!({
        "metrics": texts(&result.metrics),
        "checkpoints": result.checkpoints.iter().map(checkpoint).collect::<Vec<_>>(),
    })
}

/// Numbers as text: JSON has no infinity.
fn texts(metrics: &BTreeMap<String, f64>) -> BTreeMap<&String, String> {
    metrics.iter().map(|(name, value)| (name, value.to_string())).collect()
}

/// An error as `wingbeat.torch` reads it.
fn described(error: &TrainError) -> serde_json::Value {
    let rank = match error {
        TrainError::RankFailed { rank, .. } | TrainError::RankLost { rank, .. } => Some(*rank),
        _ => None,
    };
    let traceback = match error {
        TrainError::RankFailed { python_error: Some(raised), .. } => Some(&raised.traceback),
        _ => None,
    };
    serde_json::json!({ "message": error.to_string(), "rank": rank, "traceback": traceback })
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory, FromArgMatches};

    use super::*;

    /// What a command line gives the script, and the number of ranks.
    fn parsed(line: &str) -> Result<(String, u32), clap::Error> {
        let command = crate::Cli::command();
        let matches = command.try_get_matches_from(["wingbeat", "train"].into_iter().chain(line.split(' ')))?;
        let args = TrainArgs::from_arg_matches(matches.subcommand_matches("train").unwrap())?;
        Ok((args.args.join(" "), args.workers.0))
    }

    #[test]
    fn a_script_has_its_arguments_with_and_without_dashes_before_them() {
        let of = |line| parsed(line).unwrap();
        assert_eq!(of("-n 2 a.py"), (String::new(), 2));
        assert_eq!(of("-n 2 a.py --epochs 3 -x"), ("--epochs 3 -x".to_owned(), 2));
        assert_eq!(of("-n 2 a.py data --workers 4"), ("data --workers 4".to_owned(), 2), "it begins with its first");
        assert_eq!(of("-n 2 a.py -- --workers 4"), ("--workers 4".to_owned(), 2));
        assert_eq!(of("-n 2 a.py x -- y"), ("x -- y".to_owned(), 2));
        assert_eq!(of("a.py --workers 4"), (String::new(), 4), "an option of ours, as before");
        let ours = [
            ("-n4", true),
            ("-n=4", true),
            ("-n2:4", true),
            ("-mn2", true),
            ("-x4", false),
            ("-name", false),
            ("-model", false),
        ];
        for (word, is_ours) in ours.into_iter().chain([("-mode=2", false), ("--epochs", false), ("4", false)]) {
            for (line, is_ours) in [
                (format!("a.py {word} 1"), is_ours),
                (format!("a.py {word} -- 1"), is_ours),
                (format!("a.py -- {word} 1"), false),
                (format!("a.py -- {word} -- 1"), false),
            ] {
                let (args, _) = parsed(&line).unwrap();
                let args: Vec<String> = args.split(' ').map(str::to_owned).collect();
                assert_eq!(args[0], word, "{line}");
                let given: Vec<OsString> = line.split(' ').map(OsString::from).collect();
                assert_eq!(ours_in_one_word(&args, &given).is_some(), is_ours, "{line} is refused");
            }
        }
        assert!(
            parsed("--worker 4 a.py").unwrap_err().to_string().contains("--workers"),
            "a slip before the script is found"
        );
    }

    #[test]
    fn more_ranks_than_a_machine_can_hold_are_refused_with_what_to_do() {
        assert!(cpus_for(64, 1.0).unwrap() >= 64);
        assert!(cpus_for(2, 64.0).unwrap() >= 128, "few ranks may ask for much");
        let error = cpus_for(1_000_000, 1.0).unwrap_err().to_string();
        assert!(error.contains("at most") && error.contains("wingbeat worker --num-cpus 1000000"), "{error}");
    }
}
