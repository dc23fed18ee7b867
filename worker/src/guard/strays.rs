//! The end of what is below a process, and of what carries the mark of a worker process.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::process::{Pid, Signal, WaitOptions};
use wingbeat_core::ProcessId;

use crate::start::BELONGS;

/// Whose a process is, as its environment says, which it has from its parent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Mark {
    /// This worker process has started it or an ancestor of it.
    Of(ProcessId),
    Nobodys,
    /// Not now: it becomes another program, or descriptors are short.
    Unknown,
}

/// The worker process that has started a process or an ancestor of it, if its environment says so.
pub(crate) fn started_by(pid: u32) -> Option<ProcessId> {
    match mark_of(pid) {
        Mark::Of(process) => Some(process),
        Mark::Nobodys | Mark::Unknown => None,
    }
}

fn mark_of(pid: u32) -> Mark {
    let folder = format!("/proc/{pid}");
    match environ(&folder) {
        Ok(environ) if !environ.is_empty() => mark_in(&environ),
        Ok(_) if std::fs::read_link(format!("{folder}/exe")).is_ok() => Mark::Unknown,
        Ok(_) => mark_of_threads(&folder),
        Err(error) if means_gone(&error) => mark_of_threads(&folder),
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Mark::Nobodys,
        Err(_) => Mark::Unknown,
    }
}

/// One whose first thread has ended has an environment as long as another goes on.
fn mark_of_threads(folder: &str) -> Mark {
    let Ok(threads) = std::fs::read_dir(format!("{folder}/task")) else { return Mark::Nobodys };
    let environs = threads.flatten().filter_map(|thread| environ(thread.path().to_str()?).ok());
    environs.map(|environ| mark_in(&environ)).find(|mark| *mark != Mark::Nobodys).unwrap_or(Mark::Nobodys)
}

fn mark_in(environ: &[u8]) -> Mark {
    let mark = |entry| std::str::from_utf8(entry).ok()?.strip_prefix(BELONGS)?.strip_prefix('=')?.parse().ok();
    environ.split(|byte| *byte == 0).find_map(mark).map_or(Mark::Nobodys, Mark::Of)
}

/// The environment of a process or thread: read at once, because it may be cut off between two reads as the process becomes
/// another program. The rest of one of over a megabyte follows.
fn environ(folder: &str) -> io::Result<Vec<u8>> {
    let mut environ = vec![0; 1 << 20];
    let mut file = File::open(format!("{folder}/environ"))?;
    let count = file.read(&mut environ)?;
    let is_whole = count < environ.len();
    environ.truncate(count);
    if !is_whole {
        file.read_to_end(&mut environ)?;
    }
    Ok(environ)
}

/// Whether a process is of one of these.
fn is_of(pid: u32, workers: &BTreeMap<ProcessId, u32>) -> bool {
    for _ in 0..EXEC_LOOKS {
        match mark_of(pid) {
            Mark::Of(process) => return workers.contains_key(&process),
            Mark::Nobodys => return false,
            Mark::Unknown => std::thread::sleep(EXEC_PAUSE),
        }
    }
    false
}

/// How often [`is_of`] looks at a process of which it is unknown, and after how long again.
const EXEC_LOOKS: u32 = 20;
const EXEC_PAUSE: Duration = Duration::from_millis(1);

/// Ends these worker processes and all that they have started, when there is no guard and no keeper to do it: first what is below them,
/// then what carries their mark. Only what threw away its environment and its parents is not found.
pub(crate) fn end_marked(workers: &BTreeMap<ProcessId, u32>) {
    for pid in workers.values().filter(|pid| **pid != 0) {
        // It may be gone, and its number somebody else's.
        if is_of(*pid, workers) {
            end_tree(*pid);
        }
    }
    // What they start before they have ended is there the next time.
    for _ in 0..ROUNDS {
        let Ok(processes) = std::fs::read_dir("/proc") else { return };
        let mut are_all_gone = true;
        for pid in processes.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok()) {
            if is_of(pid, workers) {
                end_tree(pid);
                are_all_gone = false;
            }
        }
        if are_all_gone {
            return;
        }
    }
}

/// How often [`end_marked`] looks. A process that keeps starting others faster than this ends them cannot be ended so.
const ROUNDS: usize = 10;

pub(super) fn children_of(pid: u32) -> Vec<u32> {
    let Ok(tasks) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return Vec::new() };
    tasks
        .flatten()
        .filter_map(|task| std::fs::read_to_string(task.path().join("children")).ok())
        .flat_map(|list| list.split_whitespace().filter_map(|pid| pid.parse().ok()).collect::<Vec<u32>>())
        .collect()
}

fn means_gone(error: &io::Error) -> bool {
    matches!(Errno::from_io_error(error), Some(Errno::NOENT | Errno::SRCH))
}

/// Ends a process and all below it, as far as that is permitted. Whether it is of the process itself.
pub(super) fn end_tree(pid: u32) -> bool {
    // Parents first: a stopped or dead parent starts no more.
    let children = children_of(pid);
    let killed = match i32::try_from(pid).ok().and_then(Pid::from_raw) {
        Some(pid) => rustix::process::kill_process(pid, Signal::KILL),
        None => Ok(()),
    };
    for child in children {
        end_tree(child);
    }
    killed != Err(Errno::PERM)
}

/// All below a process.
pub(super) fn descendants_of(pid: u32) -> Vec<u32> {
    let children = children_of(pid);
    let below: Vec<u32> = children.iter().flat_map(|child| descendants_of(*child)).collect();
    [children, below].concat()
}

/// What may not be ended, since user code has started it as another user, has so long to end by itself.
pub(super) const NOT_PERMITTED_LIMIT: Duration = Duration::from_secs(1);
const NOT_PERMITTED_PAUSE: Duration = Duration::from_millis(20);

/// Ends every descendant. What loses its parent falls to this process, so that going round until there are
/// no children left reaches all. Answers with the children that may not be ended and are left.
pub(super) fn end_all() -> Vec<u32> {
    let mut since = None;
    loop {
        let children = children_of(std::process::id());
        let left: Vec<u32> = children.iter().copied().filter(|pid| !end_tree(*pid)).collect();
        // One that was killed ends some time, and is waited for.
        let will_any_end = children.is_empty() || left.len() < children.len();
        let options = if will_any_end { WaitOptions::empty() } else { WaitOptions::NOHANG };
        match rustix::process::wait(options) {
            Ok(Some(_)) | Err(Errno::INTR) => {}
            Ok(None) if since.get_or_insert_with(Instant::now).elapsed() > NOT_PERMITTED_LIMIT => return left,
            Ok(None) => std::thread::sleep(NOT_PERMITTED_PAUSE),
            Err(_) => return Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    /// Names a process whose first thread ends at once, while another goes on.
    const HEADLESS: &str = "WINGBEAT_TEST_HEADLESS";

    #[used]
    #[unsafe(link_section = ".init_array")]
    static BEFORE: extern "C" fn() = end_first_thread;

    extern "C" fn end_first_thread() {
        if std::env::var_os(HEADLESS).is_some() {
            std::thread::spawn(|| {
                loop {
                    std::thread::park();
                }
            });
            // SAFETY: ends the calling thread, which holds nothing.
            unsafe { libc::syscall(libc::SYS_exit, 0) };
        }
    }

    #[test]
    fn a_process_whose_first_thread_has_ended_keeps_its_mark() {
        let mut command = Command::new(std::env::current_exe().unwrap());
        let mut child = command.env(HEADLESS, "").env(BELONGS, ProcessId(7).to_string()).spawn().unwrap();
        let has_ended = |stat: String| stat.rsplit(')').next().unwrap().trim_start().starts_with('Z');
        while !has_ended(std::fs::read_to_string(format!("/proc/{}/stat", child.id())).unwrap()) {
            std::thread::yield_now();
        }
        assert_eq!(mark_of(child.id()), Mark::Of(ProcessId(7)));
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(mark_of(child.id()), Mark::Nobodys);
    }

    #[test]
    fn a_process_that_becomes_another_program_keeps_its_mark() {
        let folder = tempfile::tempdir().unwrap();
        let script = folder.path().join("again");
        std::fs::write(&script, "exec sh \"$0\"\n").unwrap();
        let mut child = Command::new("sh").arg(&script).env(BELONGS, ProcessId(7).to_string()).spawn().unwrap();
        let marks: Vec<_> = (0..5_000).map(|_| mark_of(child.id())).collect();
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(marks.iter().filter(|mark| **mark == Mark::Nobodys).count(), 0);
        assert!(marks.contains(&Mark::Of(ProcessId(7))));
    }
}
