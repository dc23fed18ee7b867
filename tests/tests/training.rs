//! Training runs of a cluster whose nodes come and go, with scripts that need no torch.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use wingbeat_tests::TestCluster;

/// `wingbeat train` of a script, with its output.
struct Run {
    child: Child,
    lines: std::io::Lines<BufReader<std::process::ChildStdout>>,
    _dir: tempfile::TempDir,
}

impl Run {
    fn start(cluster: &TestCluster, options: &[&str], script: &str) -> Run {
        Run::start_with(cluster, options, script, &[])
    }

    /// And with these arguments of the script.
    fn start_with(cluster: &TestCluster, options: &[&str], script: &str, args: &[&str]) -> Run {
        let mut command: Command = cluster.command().unwrap();
        command.args(["train", "--address", cluster.address(), "--unprefixed", "--cold"]).args(options);
        Run::of(command, script, args)
    }

    /// Of a script, with these arguments.
    fn of(mut command: Command, script: &str, args: &[&str]) -> Run {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("script.py");
        std::fs::write(&file, script).unwrap();
        command.arg(file).arg("--").args(args);
        command.env("WINGBEAT_PYTHON", std::env::var("WINGBEAT_PYTHON").unwrap_or_else(|_| "python3".into()));
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Run { child, lines, _dir: dir }
    }

    fn line(&mut self) -> String {
        if let Some(line) = self.lines.next() {
            return line.unwrap();
        }
        let mut told = String::new();
        self.child.stderr.take().unwrap().read_to_string(&mut told).unwrap();
        panic!("it has ended: {told}");
    }

    /// What is left of its output, once it has succeeded.
    fn end(self) -> Vec<String> {
        self.end_with_notices().0
    }

    /// And what it said about itself.
    fn end_with_notices(mut self) -> (Vec<String>, String) {
        let left = self.lines.by_ref().map(Result::unwrap).collect();
        let mut told = String::new();
        self.child.stderr.take().unwrap().read_to_string(&mut told).unwrap();
        assert!(self.child.wait().unwrap().success(), "{told}");
        (left, told)
    }
}

/// Says how many ranks there are, and ends if there are as many as argv says; else waits to be stopped.
fn waits_unless(ranks: u32) -> String {
    format!(
        "import os, signal\nworld = os.environ['WORLD_SIZE']\nprint('of', world, flush=True)\nif world != '{ranks}':\n    signal.pause()\n"
    )
}

#[test]
fn a_group_goes_on_with_fewer_ranks_when_a_node_is_lost() {
    let mut cluster = TestCluster::start(2, 1).unwrap();
    let mut run = Run::start(&cluster, &["--workers", "1:2", "--max-failures", "1"], &waits_unless(1));
    assert_eq!((run.line(), run.line()), ("of 2".into(), "of 2".into()));
    cluster.kill_node(1).unwrap();
    let (left, told) = run.end_with_notices();
    assert_eq!(left, ["of 1"]);
    assert!(told.contains("was lost with its node"), "{told}");
}

#[test]
fn a_group_grows_when_there_is_room() {
    let mut cluster = TestCluster::start(1, 1).unwrap();
    let mut run = Run::start(&cluster, &["--workers", "1:2"], &waits_unless(2));
    assert_eq!(run.line(), "of 1");
    cluster.add_node(&["--num-cpus", "1"]).unwrap();
    assert_eq!(run.end(), ["of 2", "of 2"]);
}

#[test]
fn nodes_are_units_too_and_have_ranks_of_their_own() {
    let cluster = TestCluster::start(2, 2).unwrap();
    let script =
        "import os\nprint(*[os.environ[name] for name in ('RANK', 'LOCAL_RANK', 'GROUP_RANK', 'LOCAL_WORLD_SIZE')])\n";
    let mut lines = Run::start(&cluster, &["--nodes", "1:3", "--workers", "2"], script).end();
    lines.sort();
    assert_eq!(lines, ["0 0 0 2", "1 1 0 2", "2 0 1 2", "3 1 1 2"]);
}

#[test]
fn a_lost_rank_s_group_starts_again_elsewhere() {
    let mut cluster = TestCluster::start(2, 1).unwrap();
    let script = "import os, signal\nprint('attempt', os.environ['TORCHELASTIC_RESTART_COUNT'], flush=True)\nif os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n    signal.pause()\n";
    let mut run = Run::start(&cluster, &["--workers", "2", "--max-failures", "1"], script);
    assert_eq!((run.line(), run.line()), ("attempt 0".into(), "attempt 0".into()));
    cluster.add_node(&["--num-cpus", "1"]).unwrap();
    cluster.kill_node(0).unwrap();
    assert_eq!(run.end(), ["attempt 1", "attempt 1"]);
}

/// Takes steps until there is a file, and reports each. Rank 0 says before it reports that a step is the last: the others know when they
/// have reported it.
const STEPS: &str = "
import os, sys, time
from wingbeat import train
rank, attempt, step = os.environ['RANK'], os.environ['TORCHELASTIC_RESTART_COUNT'], 0
end, last = sys.argv[1], sys.argv[1] + '.last'
while not os.path.exists(last) or step != int(open(last).read()):
    step += 1
    if rank == '0' and os.path.exists(end):
        open(last + '.part', 'w').write(str(step))
        os.rename(last + '.part', last)
    train.report({'step': step})
    print('attempt', attempt, 'rank', rank, 'pid', os.getpid(), 'step', step, flush=True)
    time.sleep(0.01)
";

/// Its ranks take so many steps each while there is no head, and when it is back.
fn steps_while_the_head_is_away(workers: &str, count: usize) {
    let mut cluster = TestCluster::with_journal(2, 1).unwrap();
    let end = cluster.folder().join("end");
    let mut run = Run::start_with(&cluster, &["--workers", workers], STEPS, &[end.to_str().unwrap()]);
    let mut lines = Vec::new();
    // So many steps of each rank, from here.
    let mut steps = |run: &mut Run, count: usize| {
        let mut taken = [0; 2];
        while taken.iter().any(|taken| *taken < count) {
            let line = run.line();
            taken[usize::from(line.contains("rank 1"))] += 1;
            lines.push(line);
        }
    };
    steps(&mut run, 5);
    for _ in 0..2 {
        cluster.kill_head().unwrap();
        steps(&mut run, count);
        cluster.start_head().unwrap();
        steps(&mut run, count);
    }
    std::fs::write(&end, "").unwrap();
    let (left, told) = run.end_with_notices();
    lines.extend(left);
    for rank in ["rank 0", "rank 1"] {
        let of_rank: Vec<&str> = lines.iter().map(String::as_str).filter(|line| line.contains(rank)).collect();
        let (before, _) = of_rank[0].split_once("step").unwrap();
        assert!(before.starts_with("attempt 0 "), "{before}");
        for (step, line) in (1..).zip(&of_rank) {
            assert_eq!(*line, format!("{before}step {step}"), "the same process takes all steps: {told}");
        }
    }
}

#[test]
fn a_run_takes_its_steps_while_the_head_is_killed_and_started_again() {
    // More than what was on its way when the head was killed.
    steps_while_the_head_is_away("2", 100);
}

#[test]
fn a_run_that_could_be_larger_takes_its_steps_while_the_head_is_away() {
    // More than it takes in the time until it looks for room, which a step of 10 ms makes 2 s.
    steps_while_the_head_is_away("2:4", 300);
}

/// Reports until there is the file.
const REPORTS: &str = "
import os, sys
from wingbeat import train
step = 0
while not os.path.exists(sys.argv[1]):
    step += 1
    train.report({'step': step})
    print(f'process {os.getpid()} step {step}', flush=True)
";

/// A run without a cluster, whose command is stopped for longer than a head may be silent, as by Ctrl-Z, and goes on.
fn stopped_and_gone_on_with(options: &[&str]) {
    const SILENCE_MS: u64 = 1_000;
    let dir = tempfile::tempdir().unwrap();
    let end = dir.path().join("end");
    let mut command = Command::new(wingbeat_tests::binary().unwrap());
    command.args(["train", "--workers", "1", "--unprefixed"]).args(options);
    for variable in ["WINGBEAT_SILENCE_MS", "WINGBEAT_DIAL_MS"] {
        command.env(variable, SILENCE_MS.to_string());
    }
    command.env_remove("WINGBEAT_ADDRESS");
    let mut run = Run::of(command, REPORTS, &[end.to_str().unwrap()]);
    let mut lines: Vec<String> = (0..10).map(|_| run.line()).collect();
    let pid = Pid::from_child(&run.child);
    kill_process(pid, Signal::STOP).unwrap();
    // Everything that is given up after a while has been by then.
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_millis(8 * SILENCE_MS) {
        std::thread::yield_now();
    }
    kill_process(pid, Signal::CONT).unwrap();
    lines.extend((0..100).map(|_| run.line()));
    std::fs::write(&end, "").unwrap();
    let (left, told) = run.end_with_notices();
    lines.extend(left);
    let (before, _) = lines[0].split_once("step").unwrap();
    for (step, line) in (1..).zip(&lines) {
        assert_eq!(*line, format!("{before}step {step}"), "the same process goes on: {told}");
    }
}

#[test]
fn a_run_without_a_cluster_whose_command_was_stopped_goes_on() {
    stopped_and_gone_on_with(&["--cold"]);
}

#[test]
fn so_does_one_whose_rank_was_forked() {
    stopped_and_gone_on_with(&[]);
}
