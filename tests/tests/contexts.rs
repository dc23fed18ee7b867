//! Which cluster the command talks to, and what it shows again and again.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use wingbeat_tests::{Daemon, TestCluster, binary};

/// Nobody listens there.
const NOWHERE: &str = "127.0.0.1:9";

/// The command with a configuration of its own, and nothing else that names a cluster.
fn command(folder: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(binary().unwrap());
    command.args(args).env("XDG_CONFIG_HOME", folder);
    for name in ["WINGBEAT_ADDRESS", "WINGBEAT_TOKEN", "WINGBEAT_TOKEN_FILE", "WINGBEAT_CONTEXT", "WINGBEAT_NAMESPACE"]
    {
        command.env_remove(name);
    }
    command
}

fn configured(cluster: &TestCluster) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let own = folder.path().join("wingbeat");
    std::fs::create_dir(&own).unwrap();
    let token = own.join("lab-token");
    std::fs::write(&token, cluster.token().unwrap()).unwrap();
    std::fs::set_permissions(&token, std::fs::Permissions::from_mode(0o600)).unwrap();
    let text = format!(
        "[context.lab]\naddress = \"{}\"\ntoken_file = \"lab-token\"\n\n[context.away]\naddress = \"{NOWHERE}\"\n",
        cluster.address()
    );
    std::fs::write(own.join("config.toml"), text).unwrap();
    folder
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

#[test]
fn a_cluster_is_named_by_option_variable_and_the_context_in_use_in_this_order() {
    let cluster = TestCluster::start(1, 1).unwrap();
    let folder = configured(&cluster);
    let run = |args: &[&str], env: &[(&str, &str)]| {
        let output = command(folder.path(), args).envs(env.iter().copied()).output().unwrap();
        (output.status.code(), said(&output))
    };
    let is_there = |(code, text): (Option<i32>, String)| code == Some(0) && text.contains("1 node");
    let is_away = |(code, text): (Option<i32>, String)| code == Some(1) && text.contains(NOWHERE);
    assert!(is_there(run(&["--context", "lab", "status"], &[])));
    assert!(is_there(run(&["status", "--context=lab"], &[("WINGBEAT_ADDRESS", NOWHERE)])), "an option goes before");
    assert!(is_away(run(&["status", "--context=lab", "--address", NOWHERE], &[])), "and this one before that");
    assert!(is_there(run(&["status"], &[("WINGBEAT_CONTEXT", "lab")])));
    assert!(is_away(run(&["status"], &[("WINGBEAT_CONTEXT", "lab"), ("WINGBEAT_ADDRESS", NOWHERE)])));
    let (code, text) = run(&["status", "--context=labb"], &[]);
    assert!(code == Some(1) && text.contains("no context is named `labb`") && text.contains("away, lab"), "{text}");
    assert_eq!(run(&["context", "use", "lab"], &[]), (Some(0), "lab is in use\n".into()));
    assert!(is_there(run(&["status"], &[])));
    assert!(is_away(run(&["status"], &[("WINGBEAT_CONTEXT", "away")])));
    assert!(run(&["context", "list"], &[]).1.contains("*  lab"));
    let (code, text) = run(&["stop"], &[]);
    assert!(code == Some(1) && text.contains("`lab`") && text.contains("wingbeat --context lab stop"), "{text}");
    assert!(is_there(run(&["status"], &[])), "it runs on");
    // None: a head on this machine is looked for.
    let is_here = |(_, text): (Option<i32>, String)| !text.contains(cluster.address()) && !text.contains(NOWHERE);
    assert!(is_here(run(&["status"], &[("WINGBEAT_CONTEXT", "none")])));
    assert_eq!(run(&["context", "use", "none"], &[]), (Some(0), "no context is in use\n".into()));
    assert!(is_here(run(&["status"], &[])));
    // Without a folder for it there is no such context, and no other cluster instead.
    let nobody = command(folder.path(), &["--context", "lab", "status"])
        .env_remove("XDG_CONFIG_HOME")
        .env_remove("HOME")
        .output();
    assert!(said(&nobody.unwrap()).contains("neither XDG_CONFIG_HOME nor HOME"));
}

#[test]
fn an_error_names_the_context_that_the_command_used() {
    let cluster = TestCluster::start(1, 1).unwrap();
    let folder = configured(&cluster);
    let error = |args: &[&str], env: &[(&str, &str)]| {
        let output = command(folder.path(), args).envs(env.iter().copied()).output().unwrap();
        assert!(!output.status.success(), "{args:?}");
        said(&output)
    };
    let away = format!("error: context `away` ({NOWHERE}): ");
    for args in [&["--context", "away", "status"][..], &["train", "--context=away", "train.py"]] {
        let text = error(args, &[]);
        assert!(text.starts_with(&away) && text.contains("cannot reach"), "{text}");
    }
    assert!(error(&["status"], &[("WINGBEAT_CONTEXT", "away")]).starts_with(&away));
    let lab = format!("error: context `lab` ({}): ", cluster.address());
    let text = error(&["--context", "lab", "why", "node-00000000000000ff"], &[]);
    assert!(text.starts_with(&lab) && text.contains("not known"), "{text}");
    let text = error(&["--context", "lab", "status", "--address", NOWHERE], &[]);
    assert!(!text.contains("context"), "the option --address goes before: {text}");
}

#[test]
fn a_worker_joins_the_head_of_a_context_and_a_head_has_none() {
    let cluster = TestCluster::start(0, 0).unwrap();
    let folder = configured(&cluster);
    let mut command_line = command(folder.path(), &["--context", "lab", "worker", "--num-cpus", "3"]);
    let worker = Daemon::start(command_line.stdin(Stdio::null())).unwrap();
    let said_so = worker.wait_for("joined").unwrap();
    assert!(said_so.contains(cluster.address()), "{said_so}");
    assert_eq!(cluster.state().unwrap()["nodes"].as_array().unwrap().len(), 1);
    drop(worker);
    let refused = |args: &[&str]| said(&command(folder.path(), args).output().unwrap());
    let text = refused(&["worker", "--num-cpus", "3"]);
    assert!(text.contains("no head is named") && text.contains("--context NAME"), "{text}");
    let text = refused(&["--context", "lab", "head"]);
    assert!(text.contains("takes no --context") && text.contains("--host"), "{text}");
}

#[test]
fn a_token_in_the_configuration_is_no_part_of_the_error() {
    let folder = tempfile::tempdir().unwrap();
    let own = folder.path().join("wingbeat");
    std::fs::create_dir(&own).unwrap();
    std::fs::write(own.join("config.toml"), "[context.lab]\naddress = \"a:1\"\ntoken = \"secret-word\"\n").unwrap();
    let text = said(&command(folder.path(), &["--context", "lab", "status"]).output().unwrap());
    assert!(text.contains("line 3") && text.contains("token_file") && !text.contains("secret-word"), "{text}");
}

#[test]
fn what_is_watched_is_shown_again_until_ctrl_c() {
    let cluster = TestCluster::start(1, 1).unwrap();
    let folder = configured(&cluster);
    let mut command = command(folder.path(), &["--context", "lab", "list", "nodes", "--watch=0.1"]);
    let mut watching = command.stdout(Stdio::piped()).spawn().unwrap();
    // Read from to the end: without a reader it would end by itself.
    let mut lines = BufReader::new(watching.stdout.take().unwrap()).lines().map(Result::unwrap);
    let shown = lines.by_ref().filter(|line| line.contains("node-")).take(3).count();
    assert_eq!(shown, 3);
    assert!(watching.try_wait().unwrap().is_none(), "it has ended by itself");
    kill_process(Pid::from_child(&watching), Signal::INT).unwrap();
    lines.for_each(drop);
    assert!(watching.wait().unwrap().success());
}
