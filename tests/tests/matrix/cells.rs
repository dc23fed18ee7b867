//! Cells of the matrix: a program of real processes, and what happens to its messages.

use std::fmt::Write as _;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group};

/// Which program the driver of a cell is to run.
pub(crate) const PROGRAM: &str = "WINGBEAT_MATRIX_PROGRAM";
/// Set if its fault ends a worker process.
pub(crate) const ENDS_PROCESS: &str = "WINGBEAT_MATRIX_ENDS_PROCESS";

/// Longer than every limit after which something is given up: a cell that takes so long hangs.
const LIMIT: Duration = Duration::from_secs(90);

/// As `wingbeat_net::faults` describes them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Fault {
    Lose,
    LoseAnswer,
    Repeat,
    Delay,
    Cut,
}

pub(crate) const FAULTS: [Fault; 5] = [Fault::Lose, Fault::LoseAnswer, Fault::Repeat, Fault::Delay, Fault::Cut];

impl Fault {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Fault::Lose => "lose",
            Fault::LoseAnswer => "lose-answer",
            Fault::Repeat => "repeat",
            Fault::Delay => "delay",
            Fault::Cut => "cut",
        }
    }

    fn ends_connection(self) -> bool {
        matches!(self, Fault::Lose | Fault::LoseAnswer | Fault::Cut)
    }
}

/// What goes over the connection of a worker process to its own node: a unix socket, with whose end the process ends, since nothing but
/// a death ends one.
const BY_THE_NODE: [&str; 16] = [
    "NodeRequest::RegisterWorker",
    "NodeRequest::Create",
    "NodeRequest::Seal",
    "NodeRequest::Fetch",
    "ProcessRequest::Stacks",
    "NodeMessage::Unpin",
    "NodeMessage::ActorStarted",
    "NodeMessage::Stays",
    "NodeMessage::LeftBehind",
    "NodeMessage::Delete",
    "WorkerCommand::Lease",
    "WorkerCommand::StartActor",
    "WorkerCommand::Drain",
    "WorkerCommand::Exit",
    "WorkerCommand::Heads",
    "WorkerCommand::Patience",
];

/// What depends on which of two processes is faster, also in many rounds.
const BY_CHANCE: [&str; 1] = ["Work::TakeBack"];

pub(crate) fn ends_process(fault: Fault, kind: &str) -> bool {
    fault.ends_connection() && BY_THE_NODE.contains(&kind)
}

/// A run of a program.
pub(crate) struct Cell {
    pub(crate) program: &'static str,
    pub(crate) faults: Vec<(Fault, &'static str)>,
    /// At which message of the kind, counted from 1. There is no later one for certain.
    pub(crate) at: u32,
}

impl Cell {
    pub(crate) fn ends_process(&self) -> bool {
        self.faults.iter().any(|(fault, kind)| ends_process(*fault, kind))
    }

    /// What the environment of its processes says of the faults.
    fn asks(&self) -> String {
        let asks: Vec<_> =
            self.faults.iter().map(|(fault, kind)| format!("{} {kind}@{}", fault.name(), self.at)).collect();
        asks.join(";")
    }

    /// How long it took; or what went wrong.
    fn run(&self, delay_ms: &str) -> Result<Duration, String> {
        let done = tempfile::tempdir().unwrap();
        let mut driver = Command::new(std::env::current_exe().unwrap());
        driver.args(["--exact", crate::DRIVER, "--nocapture"]).env(PROGRAM, self.program);
        let mut asks = self.asks();
        if self.program == "abandoned" {
            // The process must be away while it stands still.
            driver.env("WINGBEAT_CONTACT_MS", "1000").env("WINGBEAT_DIAL_MS", "1000");
            asks += ";cut Work::Cancel";
        }
        driver.env("WINGBEAT_FAULT", asks).env("WINGBEAT_FAULT_DIR", done.path()).env("WINGBEAT_FAULT_MS", delay_ms);
        if self.ends_process() {
            driver.env(ENDS_PROCESS, "1");
        }
        let output = tempfile::tempfile().unwrap();
        driver.stdin(Stdio::null()).stdout(output.try_clone().unwrap()).stderr(output.try_clone().unwrap());
        let begun = Instant::now();
        let mut driver = driver.process_group(0).spawn().unwrap();
        let group = Pid::from_child(&driver);
        let ended = loop {
            if let Some(status) = driver.try_wait().unwrap() {
                break Some(status);
            }
            if begun.elapsed() > LIMIT {
                break None;
            }
            std::thread::sleep(Duration::from_millis(10));
        };
        let took = begun.elapsed();
        // Its daemons, if it could not end them itself.
        let _ = kill_process_group(group, Signal::KILL);
        let _ = driver.wait();
        let failed = |why: &str| Err(format!("{} with {}: {why}\n{}", self.program, self.asks(), text_of(output)));
        match ended {
            None => failed("it hangs"),
            Some(status) if !status.success() => failed("it failed"),
            Some(_) => match self
                .faults
                .iter()
                .find(|(_, kind)| self.at == 1 && !BY_CHANCE.contains(kind) && !done.path().join(kind).exists())
            {
                Some((_, kind)) => failed(&format!("no process has sent {kind}")),
                None => Ok(took),
            },
        }
    }
}

fn text_of(mut output: std::fs::File) -> String {
    use std::io::{Read, Seek};
    let mut text = Vec::new();
    output.rewind().and_then(|()| output.read_to_end(&mut text)).unwrap();
    let text = String::from_utf8_lossy(&text).into_owned();
    let lines: Vec<_> = text.lines().filter(|line| !line.is_empty()).collect();
    // What the program has shown, and then why it has failed.
    let panicked = lines.iter().skip(12).skip_while(|line| !line.contains("panicked at")).take(12);
    lines.iter().take(12).chain(panicked).copied().collect::<Vec<_>>().join("\n")
}

/// Runs cells, so many at a time.
pub(crate) fn run_all(cells: &[Cell], jobs: usize, delay_ms: &str) -> Vec<Result<Duration, String>> {
    let results: Vec<_> = cells.iter().map(|_| Mutex::new(Err("it was not run".to_owned()))).collect();
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..jobs {
            scope.spawn(|| {
                while let Some(cell) = cells.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let at = cells.iter().position(|other| std::ptr::eq(other, cell)).unwrap();
                    let result = cell.run(delay_ms);
                    if let Err(why) = &result {
                        eprintln!("{why}\n");
                    }
                    *results[at].lock().unwrap() = result;
                }
            });
        }
    });
    results.into_iter().map(|result| result.into_inner().unwrap()).collect()
}

/// A line for each kind, with how long each fault took, or that it failed.
pub(crate) fn table(cells: &[Cell], results: &[Result<Duration, String>]) -> String {
    let mut table = format!("{:36} {:>10}", "", "program");
    for fault in FAULTS {
        let _ = write!(table, " {:>11}", fault.name());
    }
    let mut last = "";
    for (cell, result) in cells.iter().zip(results) {
        let (_, kind) = cell.faults[0];
        if last != kind {
            let _ = write!(table, "\n{kind:36} {:>10}", cell.program);
            last = kind;
        }
        let _ = match result {
            Ok(took) => write!(table, " {:>9.1} s", took.as_secs_f64()),
            Err(_) => write!(table, " {:>11}", "FAILED"),
        };
    }
    table
}
