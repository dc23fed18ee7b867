//! What the threads of a process do, for people: the answer of `wingbeat stack`.

use serde::{Deserialize, Serialize};

/// The threads of a worker process.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessStacks {
    /// Its process id.
    pub pid: u32,
    /// The name of its machine.
    pub hostname: String,
    /// The task or actor that runs in it, or ran last.
    pub runs: String,
    /// Those that run user code first.
    pub threads: Vec<ThreadStack>,
    /// Threads of the runtime that wait for something to do, and are left out.
    pub idle: u32,
    /// Programs that it sees through and that say this themselves: the Python of a rank.
    pub programs: Vec<ProgramStacks>,
}

/// A program that a worker process has started, in words of its own.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProgramStacks {
    /// Its process id.
    pub pid: u32,
    /// What it is to people, such as `rank 1 of 2`; empty if it has no name.
    pub name: String,
    /// What its threads do, or why it does not say.
    pub stacks: String,
}

/// A thread.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ThreadStack {
    /// Its number, which for the first thread is the process id.
    pub tid: u32,
    /// Its name.
    pub name: String,
    /// What the kernel says that it does: `runs`, or `sleeps in futex_do_wait`.
    pub state: String,
    /// Where it is, innermost first: a function, and its file and line if they are known.
    pub frames: Vec<StackFrame>,
    /// Why there are no frames.
    pub note: Option<String>,
}

/// A function that a thread is in.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StackFrame {
    /// Its name, or its address in hex.
    pub function: String,
    /// `src/jobs.rs:12`.
    pub place: Option<String>,
}
