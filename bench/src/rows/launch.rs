//! Training: how long a launch takes, and a new start after a failure; beside torchrun, in the same run.

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use wingbeat_tests::TestCluster;

use super::Figures;
use crate::report::{Figure, Must};

/// The interpreter with torch.
pub(super) fn python() -> Result<PathBuf> {
    let python = match std::env::var_os("WINGBEAT_PYTHON") {
        Some(python) => PathBuf::from(python),
        None => std::path::absolute(".venv/bin/python")?,
    };
    ensure!(python.exists(), "{} is not there; `cargo xtask bench` makes it", python.display());
    Ok(python)
}

pub(super) fn script(name: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/scripts")).join(name)
}

/// torchrun, as its users call it.
pub(super) fn torchrun() -> Result<Command> {
    let mut command = Command::new(python()?.with_file_name("torchrun"));
    command.args(["--standalone", "--nproc-per-node", "2"]).env("OMP_NUM_THREADS", "1");
    // Else its restarts wait for the store of the attempt before.
    command.env("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1");
    // It leaves a folder for logs behind each time.
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../target/tmp");
    std::fs::create_dir_all(folder)?;
    command.env("TMPDIR", std::fs::canonicalize(folder)?);
    Ok(command)
}

/// The same, on a cluster.
fn ours(cluster: &TestCluster) -> Result<Command> {
    let mut command = cluster.command()?;
    // As `torchrun --nproc-per-node 2`, on as many nodes as it takes.
    command.args(["train", "--address", cluster.address(), "--workers", "2", "--unprefixed"]);
    command.env("WINGBEAT_PYTHON", python()?).env("OMP_NUM_THREADS", "1");
    Ok(command)
}

/// Runs a command to its end: its seconds, and what it printed.
pub(super) fn timed(mut command: Command) -> Result<(f64, String)> {
    let begun = Instant::now();
    let output = command.stdin(Stdio::null()).output()?;
    let seconds = begun.elapsed().as_secs_f64();
    ensure!(output.status.success(), "{command:?} failed: {}", String::from_utf8_lossy(&output.stderr));
    Ok((seconds, String::from_utf8_lossy(&output.stdout).into_owned()))
}

/// Seconds of so many launches, after one that warms up.
fn launches(count: usize, command: impl Fn() -> Result<Command>) -> Result<Vec<f64>> {
    let mut seconds = Vec::new();
    for _ in 0..=count {
        let mut command = command()?;
        command.arg(script("all_reduce.py"));
        seconds.push(timed(command)?.0);
    }
    seconds.remove(0);
    Ok(seconds)
}

pub(super) fn limit_torchrun() -> Figures {
    Ok(vec![Figure::of("limit_torchrun", "s", true, launches(5, torchrun)?, Must::Nothing)])
}

/// Seconds of the runs of a peer's script, but the first; nothing if the peer was not asked for.
pub(super) fn peer(name: &str, script: &str, row: &'static str) -> Figures {
    let wanted = std::env::var("WINGBEAT_BENCH_PEERS").unwrap_or_default();
    if !wanted.split(',').any(|wanted| wanted == name) {
        return Ok(Vec::new());
    }
    let mut command = Command::new(python()?);
    command.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/peers/").to_owned() + script + ".py");
    command.env("PYTHONPATH", std::env::var_os("WINGBEAT_BENCH_PACKAGES").unwrap_or_default());
    command.env("PYSPARK_PYTHON", python()?).env("PYSPARK_DRIVER_PYTHON", python()?).env("OMP_NUM_THREADS", "1");
    command.env("RAY_USAGE_STATS_ENABLED", "0").env("PYTHONWARNINGS", "ignore");
    let (_, printed) = timed(command)?;
    let seconds: Vec<f64> =
        printed.lines().filter_map(|line| line.strip_prefix("seconds ")?.parse().ok()).skip(1).collect();
    ensure!(!seconds.is_empty(), "the script printed {printed:?}");
    Ok(vec![Figure::of(row, "s", true, seconds, Must::Nothing)])
}

pub(super) fn limit_torch_distributor() -> Figures {
    peer("torch_distributor", "torch_distributor", "limit_torch_distributor")
}

pub(super) fn limit_ray_train() -> Figures {
    peer("ray_train", "ray_train", "limit_ray_train")
}

/// README's own command: no cluster is there, and no warm Python.
pub(super) fn launch_2_ranks_alone() -> Figures {
    let seconds = launches(5, || {
        let mut command = Command::new(wingbeat_tests::binary()?);
        command.args(["train", "--workers", "2", "--unprefixed"]).env_remove("WINGBEAT_ADDRESS");
        command.env("WINGBEAT_PYTHON", python()?).env("OMP_NUM_THREADS", "1");
        Ok(command)
    })?;
    Ok(vec![Figure::of("launch_2_ranks_alone", "s", true, seconds, Must::Of("limit_torchrun", 1.0))])
}

pub(super) fn launch_2_ranks_cold() -> Figures {
    let cluster = TestCluster::start(1, 2)?;
    let seconds = launches(5, || {
        let mut command = ours(&cluster)?;
        command.arg("--cold");
        Ok(command)
    })?;
    Ok(vec![Figure::of("launch_2_ranks_cold", "s", true, seconds, Must::Of("limit_torchrun", 1.0 / 1.1))])
}

pub(super) fn launch_2_ranks_warm() -> Figures {
    let cluster = TestCluster::start(1, 2)?;
    let seconds = launches(10, || ours(&cluster))?;
    Ok(vec![Figure::of("launch_2_ranks_warm", "s", true, seconds, Must::Reach(0.5))])
}

/// From the end of a rank to the first step of the next attempt, by the script's own clock.
fn relaunch(mut command: Command) -> Result<f64> {
    let dir = tempfile::tempdir()?;
    command.arg(script("relaunch.py")).arg("--").arg(dir.path()).arg("self");
    timed(command)?;
    let events = Events::read(dir.path())?;
    Ok(events.first("step", 1)? - events.first("kill", 0)?)
}

fn with(mut command: Command, options: [&str; 2]) -> Command {
    command.args(options);
    command
}

/// What the script told.
struct Events(String);

impl Events {
    fn read(dir: &std::path::Path) -> Result<Events> {
        Ok(Events(std::fs::read_to_string(dir.join("events"))?))
    }

    /// When something was first told of an attempt.
    fn first(&self, event: &str, attempt: u32) -> Result<f64> {
        let times = self.0.lines().filter_map(|line| {
            let [time, of, number] = line.split(' ').collect::<Vec<_>>().try_into().ok()?;
            (of == event && number == attempt.to_string()).then(|| time.parse::<f64>().ok()).flatten()
        });
        times.min_by(f64::total_cmp).with_context(|| format!("there was no {event} in attempt {attempt}"))
    }
}

pub(super) fn limit_torchrun_relaunch() -> Figures {
    let seconds = (0..3).map(|_| relaunch(with(torchrun()?, ["--max-restarts", "1"]))).collect::<Result<Vec<_>>>()?;
    Ok(vec![Figure::of("limit_torchrun_relaunch", "s", true, seconds, Must::Nothing)])
}

pub(super) fn relaunch_after_failure() -> Figures {
    let cluster = TestCluster::start(1, 2)?;
    // The warm Python is there.
    launches(0, || ours(&cluster))?;
    let warm = (0..5).map(|_| relaunch(with(ours(&cluster)?, ["--max-failures", "1"]))).collect::<Result<Vec<_>>>()?;
    let cold = (0..3).map(|_| {
        let mut command = with(ours(&cluster)?, ["--max-failures", "1"]);
        command.arg("--cold");
        relaunch(command)
    });
    let cold = cold.collect::<Result<Vec<_>>>()?;
    Ok(vec![
        Figure::of("relaunch_after_failure", "s", true, warm, Must::Reach(1.0)),
        Figure::of("relaunch_after_failure_cold", "s", true, cold, Must::Reach(3.0)),
    ])
}

/// From the end of a node to the first step of the next attempt, with a new node in its place, which has no warm Python.
pub(super) fn relaunch_after_node_loss() -> Figures {
    let mut seconds = Vec::new();
    for _ in 0..3 {
        let mut cluster = TestCluster::start(2, 1)?;
        launches(0, || ours(&cluster))?;
        let dir = tempfile::tempdir()?;
        let mut command = ours(&cluster)?;
        // A rank on each node.
        command.args(["--max-failures", "1"]).arg(script("relaunch.py")).arg("--").arg(dir.path()).arg("wait");
        let mut run = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;
        let steps = || Events::read(dir.path()).is_ok_and(|events| events.first("step", 0).is_ok());
        wait_for(Duration::from_secs(60), steps)?;
        cluster.add_node(&["--num-cpus", "1"])?;
        let killed = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH)?.as_secs_f64();
        cluster.kill_node(0)?;
        ensure!(run.wait()?.success(), "the run did not go on without the node");
        seconds.push(Events::read(dir.path())?.first("step", 1)? - killed);
    }
    Ok(vec![Figure::of("relaunch_after_node_loss", "s", true, seconds, Must::Reach(5.0))])
}

fn wait_for(limit: Duration, mut is_so: impl FnMut() -> bool) -> Result<()> {
    let begun = Instant::now();
    while !is_so() {
        if begun.elapsed() > limit {
            bail!("it took longer than {} s", limit.as_secs());
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

/// Whether steps are slower than torchrun's: pairs of runs, one after the other.
pub(super) fn steps_beside_torchrun() -> Figures {
    let cluster = TestCluster::start(1, 2)?;
    launches(0, || ours(&cluster))?;
    let steps = |mut command: Command| -> Result<f64> {
        command.arg(script("steps.py"));
        let (_, printed) = timed(command)?;
        let rate = printed.split("steps/s ").nth(1).and_then(|rest| rest.split_whitespace().next()?.parse().ok());
        rate.with_context(|| format!("the script printed {printed:?}"))
    };
    let mut ratios = Vec::new();
    for pair in 0..9 {
        // In turn, so that what drifts is on both sides.
        let (ours, theirs) = match pair % 2 {
            0 => (steps(ours(&cluster)?)?, steps(torchrun()?)?),
            _ => {
                let theirs = steps(torchrun()?)?;
                (steps(ours(&cluster)?)?, theirs)
            }
        };
        ratios.push(ours / theirs);
    }
    Ok(vec![Figure::of("steps_beside_torchrun", "×", false, ratios, Must::Reach(0.99))])
}
