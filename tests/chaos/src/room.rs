//! Memory of its own for a node: a control group with a limit, where the kernel and the user allow one. Whoever eats there what is
//! left makes the kernel kill processes of that node, and no others.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result};

/// A node with its processes takes half of it when it is busy.
const LIMIT: u64 = 1_536 << 20;

/// An eater eats so much more than there is.
const MORE: u64 = 64 << 20;

/// Prefix of the groups' names; the process that waits outside of a run's namespaces follows.
const NAME: &str = "wingbeat-chaos";

/// A group. Dropping it removes it, once its processes have ended.
pub struct Room {
    folder: PathBuf,
    usage: &'static str,
}

/// Where groups can be made, and the names of the files with the limit and the usage of one.
fn hierarchy() -> Option<(PathBuf, [&'static str; 2])> {
    let groups = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    let of = |prefix: &str| {
        let line = groups.lines().filter_map(|line| line.split_once(':')).find(|(_, line)| line.starts_with(prefix));
        line.map(|(_, line)| line[prefix.len()..].trim_start_matches('/').to_owned())
    };
    if let Some(path) = of("memory:") {
        let files = ["memory.limit_in_bytes", "memory.usage_in_bytes"];
        return Some((Path::new("/sys/fs/cgroup/memory").join(path), files));
    }
    Some((Path::new("/sys/fs/cgroup").join(of(":")?), ["memory.max", "memory.current"]))
}

impl Room {
    /// A group for a node of the run with this number; none where there cannot be one.
    pub fn new(run: u32, node: usize) -> Option<Room> {
        let (parent, [limit, usage]) = hierarchy()?;
        let folder = parent.join(format!("{NAME}-{run}-{node}"));
        std::fs::create_dir(&folder).ok()?;
        let room = Room { folder, usage };
        std::fs::write(room.folder.join(limit), LIMIT.to_string()).ok()?;
        Some(room)
    }

    /// The words that begin a command in it.
    pub fn enters(&self) -> Vec<String> {
        let text = format!("echo $$ > {}/cgroup.procs && exec \"$@\"", self.folder.display());
        ["sh".into(), "-c".into(), text, "sh".into()].into()
    }

    fn left(&self) -> u64 {
        let used = std::fs::read_to_string(self.folder.join(self.usage)).ok().and_then(|text| text.trim().parse().ok());
        LIMIT.saturating_sub(used.unwrap_or(LIMIT))
    }

    /// Starts a process that eats what is left and more, and holds it until it is killed.
    ///
    /// # Errors
    /// It does not start.
    pub fn eat(&self) -> Result<Child> {
        let bytes = self.left() + MORE;
        let enters = self.enters();
        let program = std::env::current_exe()?;
        let mut command = Command::new(&enters[0]);
        command.args(&enters[1..]).arg(program).args(["eat", "--bytes", &bytes.to_string()]);
        command.stdin(Stdio::null()).stdout(Stdio::null()).spawn().context("an eater")
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir(&self.folder);
    }
}

/// Removes the groups of a run that was killed.
pub fn remove_all(run: u32) {
    let Some((parent, _)) = hierarchy() else { return };
    let prefix = format!("{NAME}-{run}-");
    for entry in std::fs::read_dir(parent).into_iter().flatten().flatten() {
        if entry.file_name().to_string_lossy().starts_with(&prefix) {
            let _ = std::fs::remove_dir(entry.path());
        }
    }
}

/// Takes so much memory, and holds it. The kernel kills anybody else first, where it may be told so.
pub fn eat(bytes: u64) -> ! {
    let _ = std::fs::write("/proc/self/oom_score_adj", "-1000");
    let mut eaten = Vec::new();
    const PIECE: u64 = 4 << 20;
    for _ in 0..bytes / PIECE {
        eaten.push(vec![1u8; PIECE as usize]);
    }
    loop {
        std::thread::sleep(Duration::from_secs(1));
        std::hint::black_box(&eaten);
    }
}
