//! Steps in which cargo compiles: minutes on a fresh machine, so that they say how far they are.

use std::collections::HashSet;
use std::io::{BufRead, BufReader};
use std::process::{ChildStdout, Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::steps::{cargo, timed};

/// Between two lines about how far it is. A build with nothing to do ends before the first.
const EVERY: Duration = Duration::from_secs(10);

/// Runs a step of cargo that compiles. It shows warnings and errors as cargo does, and now and then how many crates are done.
pub(crate) fn compile(what: &str, command: &Command) -> Result<()> {
    timed(what, || {
        let all = crates(command);
        let mut cargo = with_messages(command);
        let mut child = cargo.stdout(Stdio::piped()).spawn().with_context(|| format!("{what}: cannot start cargo"))?;
        let messages = child.stdout.take().context("a pipe was asked for")?;
        let (done, progress) = mpsc::channel();
        let reader = std::thread::spawn(move || count(messages, &done));
        let begun = Instant::now();
        let (mut crates_done, mut next) = (0, begun + EVERY);
        loop {
            match progress.recv_timeout(next.saturating_duration_since(Instant::now())) {
                Ok(count) => crates_done = count,
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => {
                    let of_all = all.map(|all| format!(" of {}", all.max(crates_done))).unwrap_or_default();
                    eprintln!("   {what}: {crates_done}{of_all} crates after {} s", begun.elapsed().as_secs());
                    next += EVERY;
                }
            }
        }
        let _ = reader.join();
        let status = child.wait()?;
        if !status.success() {
            bail!("{what}: failed ({status})");
        }
        Ok(())
    })
}

/// Counts the crates of which something was compiled or found up to date, and sends each new count.
fn count(messages: ChildStdout, done: &mpsc::Sender<usize>) {
    let mut seen = HashSet::new();
    for line in BufReader::new(messages).lines().map_while(Result::ok) {
        let Ok(message) = serde_json::from_str::<serde_json::Value>(&line) else { continue };
        // A build script is compiled before the crate that it is for.
        let is_crate = message["reason"] == "compiler-artifact" && message["target"]["kind"][0] != "custom-build";
        if is_crate && let Some(package) = message["package_id"].as_str() {
            seen.insert(package.to_owned());
            let _ = done.send(seen.len());
        }
    }
}

/// The same command with a message on its standard output for each crate that is done.
fn with_messages(command: &Command) -> Command {
    let mut changed = Command::new(command.get_program());
    for (at, argument) in command.get_args().enumerate() {
        changed.arg(argument);
        if at == 0 {
            // Behind the name of the subcommand: what is behind a `--` goes to others.
            changed.arg("--message-format=json-render-diagnostics");
        }
    }
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => changed.env(name, value),
            None => changed.env_remove(name),
        };
    }
    if let Some(folder) = command.get_current_dir() {
        changed.current_dir(folder);
    }
    changed
}

/// How many crates the command needs, dependencies included; none if cargo does not say.
fn crates(command: &Command) -> Option<usize> {
    let arguments: Vec<&str> = command.get_args().filter_map(|argument| argument.to_str()).collect();
    let is_with_tests = arguments.contains(&"test") || arguments.contains(&"--all-targets");
    let edges = if is_with_tests { "normal,build,dev" } else { "normal,build" };
    let mut tree = cargo(&["tree", "--quiet", "--prefix", "none", "--format", "{p}", "--edges", edges]).ok()?;
    for (at, argument) in arguments.iter().enumerate() {
        match *argument {
            "--workspace" | "--no-default-features" => drop(tree.arg(argument)),
            "-p" | "--exclude" | "--features" => drop(tree.arg(argument).arg(arguments.get(at + 1)?)),
            _ => {}
        }
    }
    let listed = tree.stderr(Stdio::null()).output().ok().filter(|listed| listed.status.success())?;
    let listed = String::from_utf8(listed.stdout).ok()?;
    // A crate that was listed before is marked with (*).
    let names: HashSet<&str> = listed.lines().map(|line| line.trim_end_matches(" (*)")).collect();
    Some(names.len())
}
