//! What the processes of a cluster hold.

use std::collections::BTreeMap;
use std::path::Path;

use rustix::process::{Pid, Signal, kill_process};

/// What one process holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Resident memory of its own, in bytes: without what it shares.
    pub private: u64,
    /// Open descriptors.
    pub descriptors: usize,
    /// Threads.
    pub threads: usize,
}

/// The parent of every living process, and of every zombie.
fn parents() -> BTreeMap<u32, (u32, bool)> {
    let Ok(entries) = std::fs::read_dir("/proc") else { return BTreeMap::new() };
    let pids = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter_map(|pid: u32| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        let mut rest = stat.rsplit_once(')')?.1.split_whitespace();
        let state = rest.next()?;
        Some((pid, (rest.next()?.parse().ok()?, state == "Z")))
    })
    .collect()
}

/// Everything below `roots`, without them; with whether it is a zombie.
fn descendants(roots: &[u32]) -> Vec<(u32, bool)> {
    let parents = parents();
    let is_below = |mut pid: u32| {
        while let Some((parent, _)) = parents.get(&pid) {
            if roots.contains(parent) {
                return true;
            }
            pid = *parent;
        }
        false
    };
    parents.iter().filter(|(pid, _)| is_below(**pid)).map(|(pid, (_, zombie))| (*pid, *zombie)).collect()
}

/// What a process has started itself.
pub fn children(pid: u32) -> Vec<u32> {
    parents().into_iter().filter(|(_, (parent, _))| *parent == pid).map(|(child, _)| child).collect()
}

fn is_guard(pid: u32) -> bool {
    std::fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| line.starts_with(b"wingbeat-guard"))
}

/// The keepers of the worker processes of these daemons, oldest ids first. What other daemons have started below one of them is
/// not theirs.
pub fn keepers(roots: &[u32]) -> Vec<u32> {
    let parents = parents();
    let parent = |pid: u32| parents.get(&pid).map_or(0, |(parent, _)| *parent);
    // The guard is two processes, one below the other, and a keeper for each worker process below those.
    let is_keeper = |pid: u32| {
        let above = [pid, parent(pid), parent(parent(pid))];
        above.into_iter().all(is_guard) && roots.contains(&parent(above[2]))
    };
    parents.keys().copied().filter(|pid| is_keeper(*pid)).collect()
}

/// The worker processes of these daemons, in the order of their keepers.
pub fn worker_processes(roots: &[u32]) -> Vec<u32> {
    let parents = parents();
    let living = |keeper: u32| {
        let children = parents.iter().filter(move |(_, (parent, zombie))| *parent == keeper && !zombie);
        children.map(|(pid, _)| *pid).filter(|pid| !is_guard(*pid))
    };
    keepers(roots).into_iter().flat_map(living).collect()
}

/// Processes below these daemons that have ended and that nobody has waited for.
pub fn zombies(roots: &[u32]) -> usize {
    descendants(roots).into_iter().filter(|(_, zombie)| *zombie).count()
}

/// The guards of these daemons: two each, one below the other.
pub fn guards(roots: &[u32]) -> Vec<u32> {
    let keepers = keepers(roots);
    let below = descendants(roots).into_iter().map(|(pid, _)| pid);
    below.filter(|pid| is_guard(*pid) && !keepers.contains(pid)).collect()
}

/// Ends a process with SIGKILL.
pub fn kill(pid: u32) {
    if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
        let _ = kill_process(pid, Signal::KILL);
    }
}

/// What a process holds, if it is there.
pub fn of(pid: u32) -> Option<Usage> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let field = |name: &str| {
        let line = status.lines().find(|line| line.starts_with(name))?;
        line.split_whitespace().nth(1)?.parse::<u64>().ok()
    };
    let descriptors = std::fs::read_dir(format!("/proc/{pid}/fd")).ok()?.count();
    Some(Usage { private: field("RssAnon:")? * 1024, descriptors, threads: field("Threads:")? as usize })
}

/// Files and folders below a folder.
pub fn files(folder: &Path) -> usize {
    let Ok(entries) = std::fs::read_dir(folder) else { return 0 };
    entries.flatten().map(|entry| 1 + files(&entry.path())).sum()
}

/// What this process holds; of memory, what its allocator has handed out. How much more is resident depends on how the
/// pieces lie.
pub fn of_this() -> Option<Usage> {
    let usage = of(std::process::id())?;
    #[cfg(target_env = "gnu")]
    {
        // SAFETY: it takes no pointers, and may be called at any time from any thread.
        let info = unsafe { libc::mallinfo2() };
        Some(Usage { private: (info.uordblks + info.hblkhd) as u64, ..usage })
    }
    #[cfg(not(target_env = "gnu"))]
    Some(usage)
}
