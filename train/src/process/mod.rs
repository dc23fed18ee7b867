//! One Python process, from its start to its end.
//!
//! It is forked from the node's warm Python, or spawned where there is none. A thread of its own sees it through: its
//! output, what it says over its socket, and its end arrive as events. Dropping the stream of events ends it and what
//! it has started.
//!
//! - `answers`: what it reports and asks, and who waits for an answer.
//! - `output`: what it prints.
//! - `spawned`: a new Python.
//! - `forked`: a fork of the warm one.
//! - `scratch`: files in memory; `stacks`: what a rank does now.
//! - `memory`: whether there was too little.
//! - `socket`: what a script says with `wingbeat.train`; `stdin`: what it reads.

mod answers;
mod forked;
mod memory;
mod output;
mod scratch;
mod socket;
mod spawned;
pub(crate) mod stacks;
mod stdin;

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::panic::AssertUnwindSafe;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use futures::Stream;
use rustix::process::{Pid, Signal};
use serde::{Deserialize, Serialize};
use serde_bytes::ByteBuf;
use tokio::sync::mpsc;
use wingbeat::ObjectRef;
use wingbeat_net::messages::ProgramStacks;
use wingbeat_process::programs::{self, Program};

pub(crate) use answers::{Answer, Answers, Report};
pub(crate) use forked::{Greeting, greet};
pub(crate) use spawned::as_outside;
pub(crate) use stdin::Stdin;

use crate::environment::Environment;
use crate::error::PythonError;
use crate::package;
use scratch::Scratch;
use stacks::{Seen, Stacks};

/// Events on the way to the driver. A full queue holds up the process's output, as a full pipe would: what is printed then
/// gathers in the pipe, and comes in larger parts.
const EVENTS: usize = 16;
/// The byte that makes a keeper ask its rank for its stacks.
const ASK_STACKS: u8 = 255;
const ERROR_FILE: &str = "TORCHELASTIC_ERROR_FILE";

/// What a rank runs.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Launch {
    pub python: String,
    pub target: Target,
    /// A script's path as the user has given it.
    pub as_given: Option<PathBuf>,
    pub args: Vec<String>,
    /// What it finds in memory, by name; `{file:NAME}` in its arguments becomes a path.
    pub files: BTreeMap<String, ByteBuf>,
    pub env: Environment,
    /// The socket of the node's warm Python, if it is to be forked from that.
    pub warm: Option<String>,
    /// What it runs in, if that was shipped.
    pub folder: Option<PathBuf>,
    /// What it reads; nothing if that cannot be had where it runs.
    pub stdin: Option<Stdin>,
}

impl Launch {
    fn stdin(&self) -> std::io::Result<OwnedFd> {
        match self.stdin.and_then(|stdin| stdin.open()) {
            Some(stdin) => Ok(stdin),
            None => Ok(File::open("/dev/null")?.into()),
        }
    }

    /// What it is to people.
    fn name(&self) -> String {
        let told = |name: &str| self.env.set.get(name).map_or("?", String::as_str);
        format!("rank {} of {}", told("RANK"), told("WORLD_SIZE"))
    }

    /// Where it runs.
    fn folder(&self) -> std::io::Result<PathBuf> {
        match &self.folder {
            Some(folder) => Ok(folder.clone()),
            None => std::env::current_dir(),
        }
    }
}

/// What to run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Target {
    Script(PathBuf),
    Module(String),
    /// Any executable.
    Program(String),
    /// A pickled Python function and its arguments.
    Function(#[serde(with = "serde_bytes")] Vec<u8>),
}

/// A rank's part of a dataset: bytes that its script sees as a file in memory.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Shard {
    pub dataset: String,
    pub bytes: ObjectRef<Vec<u8>>,
}

/// What a rank has printed since the last time.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Printed {
    /// Whether to standard error.
    pub is_stderr: bool,
    #[serde(with = "serde_bytes")]
    pub bytes: Vec<u8>,
}

/// How a process ended.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Outcome {
    pub code: Option<i32>,
    pub signal: Option<i32>,
    pub error: Option<PythonError>,
    /// What it wrote into torchelastic's error file.
    pub error_file: Option<String>,
    pub stderr: Vec<String>,
    /// Whether it had been asked to end: then its end says nothing about it.
    pub was_stopped: bool,
    /// Whether it was to say what its function returned, and had not: it has not come to its end then, whatever its exit code says.
    pub before_return: bool,
    /// Whether the kernel has ended a process for want of memory while it ran.
    pub out_of_memory: bool,
    /// Whether the warm Python from which it was forked had ended, and it with that.
    pub orphaned: bool,
    /// When it ended, in microseconds since the epoch by its node's clock; 0 if it could not be started.
    pub ended_us: u64,
    /// When what it raised had come out of the script, as `ended_us`.
    pub raised_us: Option<u64>,
}

impl Outcome {
    pub(crate) fn is_success(&self) -> bool {
        self.code == Some(0) && !self.before_return
    }

    pub(crate) fn shown(&self) -> String {
        match (self.code, self.signal) {
            (Some(0), None) if self.before_return => {
                "ended well before its function returned: by os._exit(0)?".into()
            }
            (_, Some(libc::SIGKILL)) if self.out_of_memory => {
                "was killed by signal 9, most likely because its node or its container was out of memory".into()
            }
            (_, Some(libc::SIGKILL)) if self.orphaned => {
                "was killed with what looks after it, its warm Python or its keeper (both are named _warm.py); who killed \
                 that? With --cold, ranks start without"
                    .into()
            }
            (_, Some(signal)) => format!("was killed by signal {signal}"),
            (Some(code), None) => format!("exited with code {code}"),
            (None, None) => "could not be started".into(),
        }
    }
}

/// What happens to a rank's process, or to the call that it is.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Event {
    /// Its process is there, or will be before that of any rank that is asked for now.
    Begins,
    Printed(Printed),
    /// It waits for an answer to its report.
    Report(Report),
    /// It does not wait for that answer any more.
    Withdrawn(u64),
    /// It waits to be told where the newest checkpoint is.
    Newest(u64),
    /// What its function gave, pickled.
    Returned(#[serde(with = "serde_bytes")] Vec<u8>),
    /// What its function raised, pickled.
    Raised(#[serde(with = "serde_bytes")] Vec<u8>),
    /// The devices of a function's process.
    Devices(Vec<u32>),
    Ended(Outcome),
    /// The call of its function has failed.
    Failed(wingbeat::Error),
}

/// The process of a rank, as those see it who may end it.
#[derive(Clone, Default)]
pub(crate) struct Running(Arc<Mutex<State>>);

/// Who can send signals to it.
enum Reach {
    /// Its process group, whose leader is not reaped yet: until then nobody else has its id.
    Group(Pid),
    /// Its keeper, which signals it, and reaps it.
    Keeper { socket: OwnedFd, keeper: i32, rank: i32 },
}

impl Reach {
    /// It may have ended just now, so that nobody is there any more.
    fn signal(&self, signal: Signal) {
        match self {
            Reach::Group(group) => drop(rustix::process::kill_process_group(*group, signal)),
            Reach::Keeper { socket, .. } => tell(socket, signal.as_raw() as u8),
        }
    }

    fn pid(&self) -> i32 {
        match self {
            Reach::Group(leader) => leader.as_raw_nonzero().get(),
            Reach::Keeper { rank, .. } => *rank,
        }
    }

    /// The process below which all of it is.
    fn uppermost(&self) -> i32 {
        match self {
            Reach::Group(leader) => leader.as_raw_nonzero().get(),
            Reach::Keeper { keeper, .. } => *keeper,
        }
    }

    /// Has the process itself, and nothing that it has started, write its stacks.
    fn ask_stacks(&self) {
        match self {
            // SAFETY: a call without memory. The process is not reaped yet.
            Reach::Group(leader) => unsafe {
                libc::kill(leader.as_raw_nonzero().get(), Stacks::signal());
            },
            Reach::Keeper { socket, .. } => tell(socket, ASK_STACKS),
        }
    }
}

/// A keeper that is gone needs to be told nothing.
fn tell(keeper: &OwnedFd, byte: u8) {
    let _ = rustix::net::send(keeper, &[byte], rustix::net::SendFlags::NOSIGNAL);
}

#[derive(Default)]
enum State {
    #[default]
    Starting,
    /// It was asked to end before it was there.
    Cancelled,
    Runs {
        reach: Reach,
        stacks: Arc<Stacks>,
        was_stopped: bool,
    },
    Ended,
}

impl Running {
    /// Asks the whole process group to end, by this signal.
    pub(crate) fn stop(&self, signal: Signal) {
        match &mut *self.state() {
            State::Runs { reach, was_stopped, .. } => {
                reach.signal(signal);
                *was_stopped = true;
            }
            state @ State::Starting => *state = State::Cancelled,
            State::Cancelled | State::Ended => {}
        }
    }

    /// What all threads of the process do now, as Python tells it. Says why where it does not, and first that it is stopped, if it is.
    pub(crate) fn stacks(&self) -> String {
        let pid = match &*self.state() {
            State::Starting | State::Cancelled => return "it has not begun yet".into(),
            State::Runs { reach, .. } => reach.pid(),
            State::Ended => return stacks::ENDED.into(),
        };
        let stopped = match stacks::is_stopped(pid) {
            true => format!("{}: SIGCONT to pid {pid} has it go on\n", stacks::STOPPED),
            false => String::new(),
        };
        // It may have ended since.
        Program::stacks(self).map_or_else(|| stacks::ENDED.into(), |known| stopped + &known.stacks)
    }

    fn started(&self, reach: Reach, stacks: Arc<Stacks>) {
        let mut state = self.state();
        let was_stopped = matches!(*state, State::Cancelled);
        if was_stopped {
            reach.signal(Signal::KILL);
        }
        // What a fork of the warm Python uses is not that one's.
        programs::runs_as(Some(reach.uppermost() as u32));
        *state = State::Runs { reach, stacks, was_stopped };
    }

    /// It has ended, and so does what is left of it. Answers whether it had been asked to.
    fn ended(&self) -> bool {
        programs::runs_as(None);
        match std::mem::replace(&mut *self.state(), State::Ended) {
            State::Runs { reach, was_stopped, .. } => {
                reach.signal(Signal::KILL);
                was_stopped
            }
            _ => false,
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Program for Running {
    fn stacks(&self) -> Option<ProgramStacks> {
        let (pid, stacks) = match &*self.state() {
            State::Runs { reach, stacks, .. } => (reach.pid(), stacks.clone()),
            _ => return None,
        };
        let name = stacks.name.clone();
        let said = |stacks: String| Some(ProgramStacks { pid: pid as u32, name, stacks });
        let go_on = || {
            // The process alone: what it has started may be stopped on purpose.
            if let (State::Runs { .. }, Some(pid)) = (&*self.state(), Pid::from_raw(pid)) {
                let _ = rustix::process::kill_process(pid, Signal::CONT);
            }
        };
        let before = match stacks.seen(pid, go_on) {
            Seen::Stacks(seen) => return said(seen),
            Seen::Nothing => String::new(),
            Seen::Late => Stacks::late(),
        };
        if !Stacks::listens(pid) {
            return said(before + stacks::DEAF);
        }
        let from = stacks.end();
        match &*self.state() {
            State::Runs { reach, .. } => reach.ask_stacks(),
            _ => return None,
        }
        said(before + &stacks.told(pid, from))
    }
}

struct KillOnDrop(Running);

impl Drop for KillOnDrop {
    fn drop(&mut self) {
        self.0.stop(Signal::KILL);
    }
}

/// Starts a process; [`Event::Ended`] is the last of its events.
pub(crate) fn start(
    launch: Launch,
    shards: Vec<Shard>,
    running: &Running,
    answers: &Answers,
) -> impl Stream<Item = Event> + Send + use<> {
    let (events, receiver) = mpsc::channel(EVENTS);
    let guard = KillOnDrop(running.clone());
    let (running, answers) = (running.clone(), answers.clone());
    let started = std::thread::Builder::new().name("rank".into()).spawn(move || {
        let program: Arc<dyn Program> = Arc::new(running.clone());
        programs::add(&program);
        let failed = |why: String| Outcome { stderr: vec![why], ..Outcome::default() };
        let supervised = || supervise(&launch, &shards, &running, &answers, &events);
        // Its end must be heard of whatever happens: others wait for it.
        let outcome = match std::panic::catch_unwind(AssertUnwindSafe(supervised)) {
            Ok(outcome) => outcome.unwrap_or_else(|error| failed(format!("cannot start a rank: {error}"))),
            Err(_) => {
                running.stop(Signal::KILL);
                failed("the thread that looks after this rank has panicked, which is a defect of Wingbeat's".into())
            }
        };
        // Nobody listens any more when the stream was dropped.
        let _ = events.blocking_send(Event::Ended(outcome));
    });
    let failed = started.err().map(|error| Outcome { stderr: vec![error.to_string()], ..Outcome::default() });
    futures::stream::unfold((receiver, guard, failed), |(mut receiver, guard, mut failed)| async move {
        let event = match failed.take() {
            Some(outcome) => Event::Ended(outcome),
            None => receiver.recv().await?,
        };
        Some((event, (receiver, guard, failed)))
    })
}

/// How a process ended, by whoever waited for it.
struct Exit {
    code: Option<i32>,
    signal: Option<i32>,
    stderr: Vec<String>,
    was_stopped: bool,
    orphaned: bool,
    ended_us: u64,
}

fn supervise(
    launch: &Launch,
    shards: &[Shard],
    running: &Running,
    answers: &Answers,
    events: &mpsc::Sender<Event>,
) -> std::io::Result<Outcome> {
    let mut env = launch.env.clone();
    let error = ErrorFile::of(&mut env)?;
    let stacks = Arc::new(Stacks::new(&launch.python, launch.name())?);
    env.set.insert(stacks::VARIABLE.into(), stacks.variable());
    let function = match &launch.target {
        Target::Function(pickled) => Some(Scratch::with("function", pickled)?),
        _ => None,
    };
    let shards = shards.iter().map(|shard| shard.open(&mut env)).collect::<std::io::Result<Vec<Scratch>>>()?;
    let (files, args) = files(launch)?;
    let command = command_line(launch, function.as_ref(), args)?;
    let socket = socket::Listener::bind()?;
    env.set.insert(socket::VARIABLE.into(), socket.name().to_owned());
    let folder = launch.folder()?;
    let kills = memory::kills();
    let exit = socket.serve(answers, events, || {
        let warm = launch
            .warm
            .as_deref()
            .map(|name| forked::Rank::fork(name, &command, &env, &folder, launch.stdin()?, events));
        match warm {
            Some(Ok(rank)) => rank.follow(running, stacks, events),
            Some(Err(why)) => {
                let bytes = format!("wingbeat: this rank starts cold: {why}\n").into_bytes();
                let _ = events.blocking_send(Event::Printed(Printed { is_stderr: true, bytes }));
                spawned::run(launch, &command, &env, running, stacks, events)
            }
            None => spawned::run(launch, &command, &env, running, stacks, events),
        }
    })?;
    drop((shards, files));
    let error_file = error.read();
    let (error, raised_us) = error_file.as_deref().and_then(parse_error).unzip();
    Ok(Outcome {
        before_return: false,
        code: exit.code,
        signal: exit.signal,
        error,
        error_file,
        raised_us: raised_us.flatten(),
        stderr: exit.stderr,
        was_stopped: exit.was_stopped,
        out_of_memory: memory::kills() > kills,
        orphaned: exit.orphaned,
        ended_us: exit.ended_us,
    })
}

impl Shard {
    /// Puts it where the script finds it.
    fn open(&self, env: &mut Environment) -> std::io::Result<Scratch> {
        let bytes = self.bytes.view_blocking().map_err(std::io::Error::other)?;
        let scratch = Scratch::with("shard", &bytes)?;
        env.set.insert(format!("WINGBEAT_SHARD_{}", self.dataset), scratch.path());
        Ok(scratch)
    }
}

/// What Python is to run, as it takes it; of a program, what it is to be called with.
fn command_line(launch: &Launch, function: Option<&Scratch>, args: Vec<String>) -> std::io::Result<Vec<String>> {
    let mut line = match (&launch.target, function) {
        (Target::Script(script), _) => {
            // As Python would have it, if that is the same file where the rank runs.
            let folder = launch.folder()?;
            let given = launch
                .as_given
                .as_ref()
                .filter(|given| std::path::absolute(folder.join(given)).is_ok_and(|path| path == *script));
            vec![given.unwrap_or(script).display().to_string()]
        }
        (Target::Module(module), _) => vec!["-m".into(), module.clone()],
        (Target::Program(program), _) => vec![program.clone()],
        (Target::Function(_), function) => {
            let script = package::folder()?.join("_function.py").display().to_string();
            [script].into_iter().chain(function.map(Scratch::path)).collect()
        }
    };
    line.extend(args);
    Ok(line)
}

/// The files that it finds, and its arguments with where they are.
fn files(launch: &Launch) -> std::io::Result<(Vec<Scratch>, Vec<String>)> {
    let (mut files, mut args) = (Vec::new(), launch.args.clone());
    for (name, content) in &launch.files {
        let file = Scratch::with("file", content)?;
        let (sign, path) = (format!("{{file:{name}}}"), file.path());
        args.iter_mut().for_each(|arg| *arg = arg.replace(&sign, &path));
        files.push(file);
    }
    Ok((files, args))
}

/// Where a rank tells its error: where the user wants it, or nowhere that anybody else sees.
enum ErrorFile {
    Users { path: PathBuf, before: Option<SystemTime> },
    Own(Scratch),
}

impl ErrorFile {
    fn of(env: &mut Environment) -> std::io::Result<ErrorFile> {
        if let Some(path) = env.set.get(ERROR_FILE).map(PathBuf::from) {
            return Ok(ErrorFile::Users { before: modified(&path), path });
        }
        let own = Scratch::new("error")?;
        env.set.insert(ERROR_FILE.into(), own.path());
        Ok(ErrorFile::Own(own))
    }

    fn read(&self) -> Option<String> {
        match self {
            ErrorFile::Users { path, before } if modified(path) != *before => std::fs::read_to_string(path).ok(),
            ErrorFile::Users { .. } => None,
            ErrorFile::Own(own) => own.read(0).ok().filter(|text| !text.is_empty()),
        }
    }
}

fn modified(path: &Path) -> Option<SystemTime> {
    std::fs::metadata(path).and_then(|metadata| metadata.modified()).ok()
}

fn now_us() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_micros() as u64
}

/// Reads torchelastic's error file, with the exception's type and time that `_rank_main` adds.
fn parse_error(text: &str) -> Option<(PythonError, Option<u64>)> {
    let json: serde_json::Value = serde_json::from_str(text).ok()?;
    let inner = &json["message"];
    let traceback = inner["extraInfo"]["py_callstack"].as_str().unwrap_or_default();
    // A script that writes the file itself may leave the text alone.
    let message = inner["message"].as_str().or(inner.as_str()).unwrap_or_default();
    let error = PythonError {
        kind: json["type"].as_str().unwrap_or("Exception").to_owned(),
        message: message.to_owned(),
        traceback: if traceback.is_empty() { message.to_owned() } else { traceback.to_owned() },
        pickled: None,
    };
    Some((error, json["raised_us"].as_u64()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_end_for_want_of_memory_is_said_so() {
        let killed = Outcome { signal: Some(9), ..Outcome::default() };
        assert_eq!(killed.shown(), "was killed by signal 9");
        let shown = Outcome { out_of_memory: true, ..killed }.shown();
        assert!(shown.contains("out of memory"), "{shown}");
    }

    #[test]
    fn what_is_said_of_a_rank_says_whether_it_is_stopped_or_has_ended() {
        use std::os::unix::process::CommandExt;
        let mut child = std::process::Command::new("sleep").arg("1000").process_group(0).spawn().unwrap();
        let leader = Pid::from_raw(child.id() as i32).unwrap();
        let running = Running::default();
        assert_eq!(running.stacks(), "it has not begun yet");
        let nowhere = Stacks::new("/nowhere/python", "rank 0 of 1".into()).unwrap();
        running.started(Reach::Group(leader), Arc::new(nowhere));
        rustix::process::kill_process(leader, Signal::STOP).unwrap();
        // It is there in a moment.
        while !stacks::is_stopped(child.id() as i32) {
            std::thread::yield_now();
        }
        let said = running.stacks();
        assert!(said.starts_with(&format!("{}: SIGCONT to pid {}", stacks::STOPPED, child.id())), "{said}");
        running.ended();
        assert_eq!(running.stacks(), stacks::ENDED);
        child.wait().unwrap();
    }

    #[test]
    fn torchelastics_error_file_is_understood() {
        let text = r#"{"message": {"message": "ValueError: no", "extraInfo": {"py_callstack": "Traceback…", "timestamp": "1"}}, "type": "ValueError", "raised_us": 1000007}"#;
        let (error, raised_us) = parse_error(text).unwrap();
        assert_eq!((error.kind.as_str(), error.message.as_str()), ("ValueError", "ValueError: no"));
        assert_eq!(raised_us, Some(1_000_007));
        let (plain, raised_us) = parse_error(r#"{"message": "plain words"}"#).unwrap();
        assert_eq!((plain.traceback.as_str(), raised_us), ("plain words", None));
        assert_eq!(parse_error("not json"), None);
    }
}
