//! `cargo xtask bench`: the bench in release, and its peers beside it.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Result, bail};
use clap::Args;

use crate::compiling::compile;
use crate::python;
use crate::steps::{cargo, root, step};

#[derive(Args)]
pub(crate) struct Bench {
    /// Only these rows, and the limits that they are compared with.
    #[arg(long, value_delimiter = ',')]
    rows: Vec<String>,
    /// Measure these peers too, in an environment that is made for it (.venv-bench). Known: ray; for launches
    /// torchrun (which is always measured), torch_distributor and ray_train; for estimators pyspark. Spark's need a JVM.
    #[arg(long, value_delimiter = ',')]
    peers: Vec<String>,
    /// Also write a line of JSON a row to this file.
    #[arg(long)]
    json: Option<PathBuf>,
    /// Also write docs/performance.md.
    #[arg(long)]
    docs: bool,
}

pub(crate) fn run(bench: &Bench) -> Result<()> {
    let root = root()?;
    const KNOWN: [&str; 5] = ["ray", "torchrun", "torch_distributor", "ray_train", "pyspark"];
    if let Some(unknown) = bench.peers.iter().find(|peer| !KNOWN.contains(&peer.as_str())) {
        bail!("unknown peer {unknown}; known: {}", KNOWN.join(", "));
    }
    let is_wanted = |name: &str| bench.peers.iter().any(|peer| peer == name);
    compile(
        "release build",
        &cargo(&["build", "--release", "--quiet", "-p", "wingbeat-cli", "-p", "wingbeat-bench"])?,
    )?;
    let mut command = Command::new(root.join("target/release/wingbeat-bench"));
    command
        .env("WINGBEAT_CONTEXT", "none")
        .env("WINGBEAT_BIN", root.join("target/release/wingbeat"))
        .env("WINGBEAT_PYTHON", python::interpreter()?);
    let dir = tempfile::tempdir()?;
    if ["torch_distributor", "ray_train", "pyspark"].into_iter().any(is_wanted) {
        python::environment(".venv-bench", "bench/peers/requirements.txt", true)?;
        let packages = root.join(".venv-bench/lib/python3.11/site-packages");
        command.env("WINGBEAT_BENCH_PEERS", bench.peers.join(",")).env("WINGBEAT_BENCH_PACKAGES", packages);
    }
    if is_wanted("ray") {
        let python = python::environment(".venv-bench", "bench/peers/requirements.txt", true)?;
        let figures = dir.path().join("ray.jsonl");
        let mut peer = Command::new(python);
        peer.arg(root.join("bench/peers/ray_rows.py")).arg(&figures);
        step("ray", peer.env("RAY_USAGE_STATS_ENABLED", "0").current_dir(dir.path()))?;
        command.arg("--peer").arg(figures);
    }
    if !bench.rows.is_empty() {
        command.arg("--rows").arg(bench.rows.join(","));
    }
    if let Some(json) = &bench.json {
        command.arg("--json").arg(json);
    }
    if bench.docs {
        command.arg("--docs").arg(root.join("docs"));
    }
    step("bench", &mut command)
}
