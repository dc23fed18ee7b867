//! Whether the kernel has ended something for want of memory.

use std::path::PathBuf;

/// How often it has, as far as this process's rank can have been meant: in its own control group, or where there is none,
/// on the whole machine.
pub(super) fn kills() -> u64 {
    count(&of_group().unwrap_or_else(|| std::fs::read_to_string("/proc/vmstat").unwrap_or_default()))
}

/// What the control group says, of version 2 or 1. The root of version 2 says nothing.
fn of_group() -> Option<String> {
    let groups = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    let files = groups.lines().filter_map(|line| {
        let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
        let path = path.trim_start_matches('/');
        match controllers {
            "" => Some(PathBuf::from("/sys/fs/cgroup").join(path).join("memory.events")),
            _ if controllers.split(',').any(|one| one == "memory") => {
                Some(PathBuf::from("/sys/fs/cgroup/memory").join(path).join("memory.oom_control"))
            }
            _ => None,
        }
    });
    files.filter_map(|file| std::fs::read_to_string(file).ok()).next()
}

fn count(text: &str) -> u64 {
    text.lines().find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse().ok()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_count_is_found_in_what_the_kernel_says() {
        assert_eq!(count("low 0\noom 3\noom_kill 2\noom_group_kill 9\n"), 2);
        assert_eq!(count("oom_kill_disable 0\nunder_oom 0\noom_kill 7\n"), 7);
        assert_eq!(count("pgfault 1\n"), 0);
    }
}
