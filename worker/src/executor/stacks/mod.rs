//! What the threads of this process do, for `wingbeat stack`, whatever user code does: it may spin, or block in a system call.
//!
//! - `sample`: a thread's registers and its stack, copied while the thread stands still.
//! - `names`: which functions those are.
//!
//! Nobody but the process itself can look without the rights of a debugger. So each thread gets a signal, and its handler does as
//! little as can be: it writes its registers down, and waits until another thread has copied its stack. That is followed and named
//! when the thread goes on already, on a thread that may allocate, lock and read files.

mod names;
mod sample;

use std::fs;
use std::io;

use wingbeat_net::messages::{ProcessStacks, StackFrame, ThreadStack};

use self::names::Program;
use self::sample::Sample;

/// Functions of a thread that are shown.
const FRAMES: usize = 40;
/// What is below these is the executor's own, and the same for every task.
const EXECUTOR: [&str; 5] = ["run::", "lanes::", "queue::", "threads::", "at_home::"];

/// A thread of tokio for what blocks: it lives for some seconds after its last piece of work.
const POOL: &str = "tokio::runtime::blocking::pool::Inner::run";
/// What such a thread is in while it waits for the next.
const WAITS: [&str; 8] = [
    "std::",
    "core::",
    "parking_lot",
    "tokio::loom::",
    "tokio::runtime::blocking::pool::Inner::",
    "syscall",
    "__",
    "pthread_",
];

/// Whether a thread, innermost function first, is one of the runtime's that waits for something to do.
fn is_idle(frames: &[StackFrame]) -> bool {
    let name = |frame: &StackFrame| frame.function.trim_start_matches('<').to_owned();
    let mut inner = frames.iter().map(name).take_while(|function| !function.starts_with(POOL));
    frames.iter().any(|frame| name(frame).starts_with(POOL))
        && inner.all(|function| WAITS.iter().any(|waits| function.starts_with(waits)))
}

fn is_executors(frame: &StackFrame) -> bool {
    let within = frame.function.trim_start_matches('<').strip_prefix("wingbeat_worker::executor::");
    within.is_some_and(|within| EXECUTOR.iter().any(|part| within.starts_with(part)))
}

/// The threads of this process, but for the one that asks, and of the programs that it sees through. Blocks for milliseconds, a second where names
/// must be read from a large program, and as long as the programs take.
pub(super) fn of_this_process(runs: String) -> io::Result<ProcessStacks> {
    let own = rustix::thread::gettid().as_raw_nonzero().get() as u32;
    let mut tids: Vec<u32> = fs::read_dir("/proc/self/task")?
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter(|tid| *tid != own)
        .collect();
    tids.sort_unstable();
    let sampled: Vec<(ThreadStack, Result<Sample, String>)> =
        tids.into_iter().filter_map(|tid| Some((described(tid)?, sample::of_thread(tid)))).collect();
    let program = Program::open();
    let mut idle = 0;
    let mut threads: Vec<(bool, ThreadStack)> = sampled
        .into_iter()
        .filter_map(|(mut thread, sample)| {
            let mut runs_tasks = false;
            match sample {
                Ok(sample) => {
                    let frames = program.frames_of(&sample);
                    if is_idle(&frames) {
                        idle += 1;
                        return None;
                    }
                    runs_tasks = frames.iter().any(is_executors);
                    thread.frames = shortened(frames);
                    if runs_tasks && thread.frames.is_empty() {
                        thread.note = Some("it waits for work".into());
                    }
                }
                Err(why) => thread.note = Some(why),
            }
            Some((runs_tasks, thread))
        })
        .collect();
    // User code first, and in each part in the order in which the threads began.
    threads.sort_by_key(|(runs_tasks, thread)| (!runs_tasks, thread.name.starts_with("wingbeat"), thread.tid));
    Ok(ProcessStacks {
        pid: std::process::id(),
        hostname: rustix::system::uname().nodename().to_string_lossy().into_owned(),
        runs,
        threads: threads.into_iter().map(|(_, thread)| thread).collect(),
        idle,
        programs: wingbeat_process::programs::stacks(),
    })
}

/// A thread as the kernel describes it; none if it has ended.
fn described(tid: u32) -> Option<ThreadStack> {
    let (name, state) = wingbeat_process::programs::doing(&format!("/proc/self/task/{tid}"))?;
    Some(ThreadStack { tid, name, state, ..ThreadStack::default() })
}

/// Without what is the same for every task, and no longer than people read.
fn shortened(mut frames: Vec<StackFrame>) -> Vec<StackFrame> {
    // While it waits for work, the thread does the IO.
    let does_io =
        |frame: &StackFrame| frame.function.trim_start_matches('<').starts_with("wingbeat_process::wire::io::");
    if let Some(below) = frames.iter().rposition(does_io) {
        frames.drain(..=below);
    }
    if let Some(below) = frames.iter().position(is_executors) {
        frames.truncate(below);
        // Those that lead from the executor to the function.
        let is_leading = |frame: &StackFrame| {
            [
                "core::ops::function::",
                "std::panicking::",
                "std::panic::",
                "core::panic::",
                "wingbeat_process::",
                "__rust",
            ]
            .iter()
            .any(|part| frame.function.trim_start_matches('<').starts_with(part))
        };
        while frames.last().is_some_and(is_leading) {
            frames.pop();
        }
    }
    frames.truncate(FRAMES);
    frames
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::{Arc, Mutex, mpsc};

    use super::*;

    #[inline(never)]
    fn spins_until(done: &AtomicBool, begun: &mpsc::Sender<()>) {
        begun.send(()).unwrap();
        while !done.load(Ordering::Relaxed) {
            std::hint::spin_loop();
        }
    }

    #[inline(never)]
    fn waits_for_a_lock(lock: &Mutex<u32>, begun: &mpsc::Sender<()>) -> u32 {
        begun.send(()).unwrap();
        *lock.lock().unwrap()
    }

    #[inline(never)]
    fn reads_from(mut from: io::PipeReader, begun: &mpsc::Sender<()>) -> usize {
        use std::io::Read;
        begun.send(()).unwrap();
        from.read(&mut [0; 8]).unwrap()
    }

    fn functions(thread: &str) -> (String, Vec<String>) {
        let stacks = of_this_process("a test".into()).unwrap();
        let thread = stacks.threads.into_iter().find(|known| known.name == thread).unwrap();
        (thread.state, thread.frames.into_iter().map(|frame| frame.function).collect())
    }

    /// The thread may not be there yet; it is soon.
    fn until_it_is_in(thread: &str, function: &str) -> String {
        loop {
            let (state, functions) = functions(thread);
            if functions.iter().any(|name| name.ends_with(function)) {
                return state;
            }
            std::thread::yield_now();
        }
    }

    #[test]
    fn the_function_of_a_thread_is_named_whether_it_spins_or_sleeps_or_reads_and_it_goes_on() {
        let (begun, begins) = mpsc::channel();
        let start = |name: &str, body: Box<dyn FnOnce() -> u32 + Send>| {
            let thread = std::thread::Builder::new().name(name.into()).spawn(body).unwrap();
            begins.recv().unwrap();
            thread
        };
        let done = Arc::new(AtomicBool::new(false));
        let (own, tell) = (done.clone(), begun.clone());
        let spinner = start(
            "spinner",
            Box::new(move || {
                spins_until(&own, &tell);
                1
            }),
        );
        let lock = Arc::new(Mutex::new(2));
        let held = lock.lock().unwrap();
        let (own, tell) = (lock.clone(), begun.clone());
        let waiter = start("waiter", Box::new(move || waits_for_a_lock(&own, &tell)));
        let (from, to) = io::pipe().unwrap();
        let reader = start("reader", Box::new(move || reads_from(from, &begun) as u32));

        until_it_is_in("spinner", "spins_until");
        until_it_is_in("waiter", "waits_for_a_lock");
        until_it_is_in("reader", "reads_from");
        let (_, all) = functions("waiter");
        assert!(all.iter().any(|name| name.contains("Mutex") && name.contains("lock")), "{all:?}");

        done.store(true, Ordering::Relaxed);
        drop(held);
        io::Write::write_all(&mut &to, b"abc").unwrap();
        assert_eq!([spinner, waiter, reader].map(|thread| thread.join().unwrap()), [1, 2, 3]);
    }

    #[test]
    fn threads_of_the_runtime_that_wait_for_work_are_counted_and_left_out() {
        let runtime = tokio::runtime::Builder::new_current_thread().thread_name("blocking").build().unwrap();
        let done = Arc::new(AtomicBool::new(false));
        let (begun, begins) = mpsc::channel();
        for _ in 0..2 {
            let (own, tell) = (done.clone(), begun.clone());
            runtime.spawn_blocking(move || spins_until(&own, &tell));
        }
        (0..2).for_each(|_| begins.recv().unwrap());
        let blocking = |stacks: &ProcessStacks| {
            let those = stacks.threads.iter().filter(|thread| thread.name == "blocking");
            those
                .map(|thread| thread.frames.iter().any(|frame| frame.function.ends_with("spins_until")))
                .collect::<Vec<_>>()
        };
        assert_eq!(blocking(&of_this_process(String::new()).unwrap()), [true, true], "they work");
        done.store(true, Ordering::Relaxed);
        // They go on to wait for the next piece of work.
        loop {
            let stacks = of_this_process(String::new()).unwrap();
            if blocking(&stacks).is_empty() && stacks.idle >= 2 {
                break;
            }
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_thread_that_blocks_the_signal_is_left_alone_and_says_so() {
        let (ready, is_ready) = mpsc::channel();
        let (leave, left) = mpsc::channel::<()>();
        let thread = std::thread::Builder::new().name("deaf".into()).spawn(move || {
            sample::block_here();
            ready.send(()).unwrap();
            let _ = left.recv();
        });
        is_ready.recv().unwrap();
        let stacks = of_this_process(String::new()).unwrap();
        let deaf = stacks.threads.iter().find(|thread| thread.name == "deaf").unwrap();
        assert!(deaf.frames.is_empty() && deaf.note.as_ref().is_some_and(|note| note.contains("blocks")), "{deaf:?}");
        drop(leave);
        thread.unwrap().join().unwrap();
    }
}
