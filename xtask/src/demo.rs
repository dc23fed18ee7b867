//! `cargo xtask demo`: a head and two nodes as processes of their own, and real work on them.

use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, bail};
use comfy_table::{Table, presets};
use wingbeat_tests::TestCluster;

use crate::compiling::compile;
use crate::python;
use crate::steps::{cargo, root};

pub(crate) fn run() -> Result<()> {
    let built =
        ["build", "--release", "--quiet", "-p", "wingbeat-cli", "-p", "wingbeat-examples", "--bins", "--examples"];
    compile("build", &cargo(&built)?)?;
    let python = python::interpreter()?;
    let release = root()?.join("target/release");
    let out = tempfile::tempdir()?;

    eprintln!("── a head and two nodes");
    let begun = Instant::now();
    let mut cluster = TestCluster::with_binary(release.join("wingbeat"), 2, 1)?;
    let up = begun.elapsed();
    eprintln!("   head at {}, up in {:.0} ms", cluster.address(), up.as_secs_f64() * 1000.0);

    let mut table = Table::new();
    table.load_preset(presets::UTF8_HORIZONTAL_ONLY).set_header(["what", "result", "seconds"]);
    table.add_row(["head and 2 nodes up".to_owned(), cluster.address().to_owned(), format!("{:.2}", up.as_secs_f64())]);

    let report = out.path().join("words.json");
    let mut words = Command::new(release.join("examples/word_count"));
    words.args(["--check", "--json"]).arg(&report);
    let seconds = on_cluster("word_count", &cluster, &mut words)?;
    let counted = read(&report)?;
    table.add_row([
        format!("word_count: {:.0} MB of Rust in {} files", number(&counted, "mb"), number(&counted, "files")),
        format!("{} words, {} distinct", number(&counted, "words"), number(&counted, "distinct")),
        format!("{seconds:.2}"),
    ]);

    let report = out.path().join("digits.json");
    let mut train = cluster.command()?;
    train.args(["train", "--workers", "2", "--python"]).arg(&python).arg(root()?.join("examples/train_digits.py"));
    train.arg("--").arg("--metrics").arg(&report);
    let seconds = on_cluster("train_digits", &cluster, &mut train)?;
    let trained = read(&report)?;
    let accuracy = number(&trained, "accuracy");
    if accuracy < 0.95 {
        bail!("train_digits reached {accuracy}, and 0.95 is expected");
    }
    table.add_row([
        format!("train_digits: DDP on {} ranks", number(&trained, "world_size")),
        format!("test accuracy {accuracy:.3}"),
        format!("{seconds:.2}"),
    ]);

    let daemons = cluster.pids();
    cluster.stop()?;
    if let Some(left) = daemons.into_iter().find(|pid| wingbeat_tests::is_alive(*pid)) {
        bail!("process {left} is still there");
    }
    println!("{table}");
    println!("demo: ok");
    Ok(())
}

/// Runs a program as a driver of the cluster; answers with how long it took.
fn on_cluster(name: &str, cluster: &TestCluster, program: &mut Command) -> Result<f64> {
    eprintln!("── {name}");
    let begun = Instant::now();
    program.env("WINGBEAT_ADDRESS", cluster.address()).env("WINGBEAT_TOKEN", cluster.token()?).stdin(Stdio::null());
    let status = program.status().with_context(|| format!("cannot start {name}"))?;
    if !status.success() {
        bail!("{name} failed ({status})");
    }
    Ok(begun.elapsed().as_secs_f64())
}

fn read(file: &std::path::Path) -> Result<serde_json::Value> {
    let text = std::fs::read_to_string(file).with_context(|| format!("reading {}", file.display()))?;
    Ok(serde_json::from_str(&text)?)
}

fn number(report: &serde_json::Value, key: &str) -> f64 {
    report[key].as_f64().unwrap_or(f64::NAN)
}
