//! Every example runs to its end and says so.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::process::Command;

fn run(name: &str, args: &[&str]) -> String {
    let test = std::env::current_exe().unwrap();
    let example = test.parent().and_then(|deps| deps.parent()).unwrap().join("examples").join(name);
    if std::env::var_os("WINGBEAT_BIN").is_none() {
        // `cargo xtask test` has built them.
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let mut build = Command::new(cargo);
        build.args(["build", "--quiet", "-p", "wingbeat-examples", "--examples"]);
        assert!(build.current_dir(env!("CARGO_MANIFEST_DIR")).status().unwrap().success());
    }
    let output = Command::new(example).args(args).env_remove("WINGBEAT_ADDRESS").output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{text}\n{}", String::from_utf8_lossy(&output.stderr));
    text
}

#[test]
fn quickstart() {
    assert_eq!(run("quickstart", &[]), "385\n");
}

#[test]
fn word_count() {
    assert!(run("word_count", &["--limit-mb", "8", "--check"]).ends_with("word_count: ok\n"));
}

#[test]
fn parameter_server() {
    assert!(run("parameter_server", &[]).ends_with("parameter_server: ok\n"));
}

#[test]
fn pipeline() {
    assert!(run("pipeline", &[]).ends_with("pipeline: ok\n"));
}

#[test]
fn train_digits() {
    let python = wingbeat_tests::python().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let mut accuracies = Vec::new();
    for workers in ["1", "2"] {
        let report = dir.path().join(workers);
        let script = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/train_digits.py");
        let mut train = Command::new(wingbeat_tests::binary().unwrap());
        train.args(["train", "--workers", workers, "--python"]).arg(&python).arg(script);
        train.args(["--", "--metrics"]).arg(&report).env_remove("WINGBEAT_ADDRESS");
        let output = train.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let report: serde_json::Value = serde_json::from_slice(&std::fs::read(report).unwrap()).unwrap();
        accuracies.push(report["accuracy"].as_f64().unwrap());
    }
    // Real data, and the same result on one rank and on two, within noise.
    assert!(accuracies.iter().all(|accuracy| *accuracy >= 0.95), "{accuracies:?}");
    assert!((accuracies[0] - accuracies[1]).abs() < 0.03, "{accuracies:?}");
}
