//! Namespaces of its own for a whole run: processes, network, mounts, shared memory. Whatever is left in them when the run
//! ends is a leak, can be counted, and ends with them.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

/// Set inside, to the process that waits outside.
const INSIDE: &str = "WINGBEAT_CHAOS_INSIDE";

/// Where everything of a run lies, on a file system in memory that is not seen outside.
const FOLDER: &str = "/tmp";

/// The process that waits outside, if this one is inside.
pub fn outside() -> Option<u32> {
    std::env::var(INSIDE).ok()?.parse().ok()
}

/// Starts this program again with the same arguments in namespaces of its own, and waits for its end. When this process
/// is killed, everything inside ends. One that does not end by itself within `limit` is killed.
///
/// # Errors
/// The namespaces cannot be made, or what ran there has failed.
pub fn run_inside(env: &[(&str, String)], limit: Duration) -> Result<()> {
    let program = std::env::current_exe()?;
    if program.starts_with(FOLDER) {
        bail!("{} lies in {FOLDER}, which is hidden from it: build it elsewhere", program.display());
    }
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", "unshare", "--mount", "--net", "--pid", "--ipc", "--mount-proc"]);
    command.args(["--fork", "--kill-child"]).arg(program).args(std::env::args_os().skip(1));
    command.env(INSIDE, std::process::id().to_string()).envs(env.iter().map(|(name, value)| (name, value)));
    let mut child = command.spawn().context("`setpriv` and `unshare` (util-linux) are needed")?;
    let begun = Instant::now();
    loop {
        if let Some(status) = child.try_wait()? {
            return match status.success() {
                true => Ok(()),
                false => bail!("{status}"),
            };
        }
        if begun.elapsed() > limit {
            child.kill()?;
            bail!("it has not ended after {limit:?}, and was killed");
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Furnishes the namespaces: an empty `/tmp` and `/run/netns`, and a loopback device. Answers with an empty folder.
///
/// # Errors
/// One cannot be mounted.
pub fn furnish() -> Result<PathBuf> {
    mount(Path::new(FOLDER), "2g")?;
    std::fs::create_dir_all("/run/netns")?;
    mount(Path::new("/run/netns"), "1m")?;
    if !wingbeat_tests::hosts::ip("link set lo up") {
        bail!("`ip` cannot set up a loopback device");
    }
    let folder = Path::new(FOLDER).join("chaos");
    std::fs::create_dir(&folder)?;
    Ok(folder)
}

/// Mounts a file system in memory of this size.
///
/// # Errors
/// It cannot be mounted.
pub fn mount(at: &Path, size: &str) -> Result<()> {
    let options = format!("size={size}");
    let status = Command::new("mount").args(["-t", "tmpfs", "-o", &options, "tmpfs"]).arg(at).status()?;
    if !status.success() {
        bail!("cannot mount a tmpfs at {}", at.display());
    }
    Ok(())
}

/// Files in `/tmp` and `/dev/shm` that are not in the run's folder.
pub fn strange_files() -> Vec<PathBuf> {
    let of = |folder: &str| std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    of(FOLDER).chain(of("/dev/shm")).filter(|path| path != &Path::new(FOLDER).join("chaos")).collect()
}

/// All processes but this one, with their names.
pub fn processes() -> Vec<(u32, String)> {
    let Ok(entries) = std::fs::read_dir("/proc") else { return Vec::new() };
    let pids = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let others = pids.filter(|pid| *pid != std::process::id() && wingbeat_tests::is_alive(*pid));
    let line = |pid: u32| std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    others.map(|pid| (pid, String::from_utf8_lossy(&line(pid)).replace('\0', " "))).collect()
}

/// Takes leave of processes that have ended and whose parents had ended before. This one is the first process here, whose
/// children they have become; its own are waited for by whoever has started them.
pub fn reap_orphans(own: &[u32]) {
    let Ok(entries) = std::fs::read_dir("/proc") else { return };
    let pids = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    for pid in pids.filter(|pid| !own.contains(pid) && !wingbeat_tests::is_alive(*pid)) {
        let raw = i32::try_from(pid).ok().and_then(rustix::process::Pid::from_raw);
        if wingbeat_tests::parent(pid) == std::process::id()
            && let Some(raw) = raw
        {
            let _ = rustix::process::waitpid(Some(raw), rustix::process::WaitOptions::NOHANG);
        }
    }
}
