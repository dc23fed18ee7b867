//! What tasks print, however they print it.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

/// Says which driver this program is to be, when the test starts itself again.
const DRIVER: &str = "WINGBEAT_TEST_DRIVER";
/// A file by which the test lets a task go on.
const GO_ON: &str = "WINGBEAT_TEST_GO_ON";

#[wingbeat::remote]
fn prints_an_unfinished_line() {
    print!("half a line");
}

#[wingbeat::remote]
fn asks(go_on: PathBuf) {
    print!("may I? ");
    std::io::stdout().flush().unwrap();
    while !go_on.exists() {
        std::thread::yield_now();
    }
    println!("thank you");
}

#[wingbeat::remote]
fn floods() {
    let line = vec![b'y'; 1 << 20];
    for _ in 0..64 {
        std::io::stdout().write_all(&line).unwrap();
    }
    println!();
    println!("the next line");
}

/// The most memory that this process has had, in KiB. A private cluster's node is a part of its driver.
fn peak() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

fn drive(what: &str) {
    let init = wingbeat::init().num_cpus(1);
    wingbeat::block_on(std::future::IntoFuture::into_future(init)).unwrap();
    match what {
        "unfinished" => prints_an_unfinished_line::remote().get_blocking().unwrap(),
        "asks" => asks::remote(PathBuf::from(std::env::var(GO_ON).unwrap())).get_blocking().unwrap(),
        "floods" => {
            let before = peak();
            floods::remote().get_blocking().unwrap();
            wingbeat::shutdown_blocking();
            println!("grew by {} KiB", peak() - before);
            return;
        }
        other => panic!("{other}"),
    }
    wingbeat::shutdown_blocking();
}

fn driver(test: &str, what: &str, go_on: Option<PathBuf>) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture"]).env(DRIVER, what).env_remove("WINGBEAT_ADDRESS");
    if let Some(go_on) = go_on {
        command.env(GO_ON, go_on);
    }
    command.stdout(Stdio::piped()).stderr(Stdio::inherit()).spawn().unwrap()
}

#[test]
fn a_line_that_a_task_did_not_finish_is_shown() {
    if let Ok(what) = std::env::var(DRIVER) {
        return drive(&what);
    }
    let output = driver("a_line_that_a_task_did_not_finish_is_shown", "unfinished", None).wait_with_output().unwrap();
    let out = String::from_utf8_lossy(&output.stdout);
    assert!(out.lines().any(|line| line.ends_with("half a line")), "{out}");
}

#[test]
fn a_question_is_shown_while_the_task_waits_for_the_answer() {
    if let Ok(what) = std::env::var(DRIVER) {
        return drive(&what);
    }
    let dir = tempfile::tempdir().unwrap();
    let go_on = dir.path().join("go_on");
    let mut child = driver("a_question_is_shown_while_the_task_waits_for_the_answer", "asks", Some(go_on.clone()));
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
    assert!(lines.any(|line| line.contains("may I?")));
    std::fs::write(go_on, "").unwrap();
    assert!(lines.any(|line| line.ends_with("thank you")));
    assert!(child.wait().unwrap().success());
}

#[test]
fn output_without_an_end_of_line_fills_no_memory() {
    if let Ok(what) = std::env::var(DRIVER) {
        return drive(&what);
    }
    let output = driver("output_without_an_end_of_line_fills_no_memory", "floods", None).wait_with_output().unwrap();
    let out = String::from_utf8_lossy(&output.stdout);
    let end = |line: &str| line.chars().rev().take(80).collect::<Vec<_>>().into_iter().rev().collect::<String>();
    let ends: Vec<String> = out.lines().map(end).collect();
    assert!(ends.iter().any(|line| line.contains("is not shown: it is longer than")), "{ends:?}");
    assert!(ends.iter().any(|line| line.ends_with("the next line")), "{ends:?}");
    let grew = ends.iter().find_map(|line| line.split("grew by ").nth(1)).unwrap();
    let grew: u64 = grew.trim_end_matches(" KiB").parse().unwrap();
    assert!(grew < 32 << 10, "the node's process grew by {grew} KiB");
}
