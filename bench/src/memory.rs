//! How much memory processes have.

/// Memory of these processes and everything below them, shared pages divided among their users, in MiB.
pub(crate) fn of_all(roots: &[u32]) -> f64 {
    let mut left = roots.to_vec();
    let mut kib = 0;
    while let Some(pid) = left.pop() {
        kib += field(&format!("/proc/{pid}/smaps_rollup"), "Pss:");
        let Ok(tasks) = std::fs::read_dir(format!("/proc/{pid}/task")) else { continue };
        for task in tasks.flatten() {
            let children = std::fs::read_to_string(task.path().join("children")).unwrap_or_default();
            left.extend(children.split_whitespace().filter_map(|pid| pid.parse::<u32>().ok()));
        }
    }
    kib as f64 / 1024.0
}

/// Bytes that this process has for itself.
pub(crate) fn own() -> f64 {
    field("/proc/self/smaps_rollup", "Pss:") as f64 * 1024.0
}

fn field(file: &str, name: &str) -> u64 {
    let text = std::fs::read_to_string(file).unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    line.and_then(|line| line.split_whitespace().next()?.parse().ok()).unwrap_or(0)
}
