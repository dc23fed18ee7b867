//! What this process may use of its machine: memory and CPUs, less what the control groups of a container or a service
//! leave it.
//!
//! Both versions of cgroups are read: where a process is (`/proc/self/cgroup`), where that hierarchy is mounted
//! (`/proc/self/mountinfo`), and the limits there and in every group above, of which the least counts. Inside a cgroup
//! namespace what is above it cannot be seen; version 1 says what it is (`hierarchical_memory_limit`).

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

/// Bytes or more that version 1 writes for "no limit": the largest number of whole pages.
const UNLIMITED: u64 = 1 << 62;

/// Memory that must be left for everything but objects before the store takes more: a part of the limit, and at least
/// some.
const MARGIN: (u64, u64) = (32, 16 << 20);

/// The limits on this process. What is not limited is absent.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Limits {
    /// Bytes.
    memory: Option<u64>,
    /// CPUs' worth of time.
    cpus: Option<f64>,
}

impl Limits {
    fn tighten(&mut self, other: Limits) {
        self.memory = [self.memory, other.memory].into_iter().flatten().min();
        self.cpus = [self.cpus, other.cpus].into_iter().flatten().min_by(f64::total_cmp);
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Version {
    One,
    Two,
}

/// A control group whose limits hold for this process.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Group {
    version: Version,
    /// What version 1 limits there; version 2 limits all.
    controller: String,
    folder: PathBuf,
    /// Whether the process is in this one itself, and not only in one below it.
    is_own: bool,
}

/// A file of the kernel, whose size it does not tell: enough room from the start saves most of the calls.
fn text_of(path: &Path) -> Option<String> {
    let mut text = String::with_capacity(8 << 10);
    fs::File::open(path).ok()?.read_to_string(&mut text).ok()?;
    Some(text)
}

fn number(folder: &Path, file: &str) -> Option<u64> {
    let text = text_of(&folder.join(file))?;
    text.trim().parse().ok().filter(|number| *number < UNLIMITED)
}

/// A line `NAME NUMBER` of a file.
fn field(folder: &Path, file: &str, name: &str) -> Option<u64> {
    let text = text_of(&folder.join(file))?;
    let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.trim().parse().ok());
    value.filter(|number| *number < UNLIMITED)
}

impl Group {
    fn limits(&self) -> Limits {
        let folder = &self.folder;
        let share = |quota: f64, period: f64| (quota > 0.0 && period > 0.0).then(|| quota / period);
        match self.version {
            Version::Two => {
                let text = text_of(&folder.join("cpu.max")).unwrap_or_default();
                let mut parts = text.split_whitespace().map(|part| part.parse::<f64>().ok());
                let cpus = match (parts.next().flatten(), parts.next().flatten()) {
                    (Some(quota), Some(period)) => share(quota, period),
                    _ => None,
                };
                Limits { memory: number(folder, "memory.max"), cpus }
            }
            Version::One if self.controller == "memory" => {
                let own = number(folder, "memory.limit_in_bytes");
                // The least of all groups from here upwards. Slow to read.
                let above = || field(folder, "memory.stat", "hierarchical_memory_limit");
                let above = self.is_own.then(above).flatten();
                Limits { memory: [own, above].into_iter().flatten().min(), cpus: None }
            }
            Version::One => {
                // -1 for none, which is no `u64`.
                let quota = number(folder, "cpu.cfs_quota_us");
                let period = number(folder, "cpu.cfs_period_us");
                let cpus = quota.zip(period).and_then(|(quota, period)| share(quota as f64, period as f64));
                Limits { memory: None, cpus }
            }
        }
    }

    /// Bytes that this group may still take. The kernel drops what it only keeps of files when memory is short.
    fn memory_left(&self) -> Option<u64> {
        let folder = &self.folder;
        let (limit, used, prefix) = match self.version {
            Version::Two => (number(folder, "memory.max")?, number(folder, "memory.current")?, ""),
            Version::One if self.controller != "memory" => return None,
            Version::One => {
                (number(folder, "memory.limit_in_bytes")?, number(folder, "memory.usage_in_bytes")?, "total_")
            }
        };
        let of_files =
            ["inactive_file", "active_file"].map(|kind| field(folder, "memory.stat", &format!("{prefix}{kind}")));
        let kept: u64 = of_files.into_iter().flatten().sum();
        Some(limit.saturating_sub(used.saturating_sub(kept)).saturating_sub(margin(limit)))
    }
}

fn margin(limit: u64) -> u64 {
    (limit / MARGIN.0).max(MARGIN.1)
}

/// The groups that this process is in, for memory and for CPUs, and all above them. `root` is `/`.
fn groups(root: &Path) -> Vec<Group> {
    let memberships = text_of(&root.join("proc/self/cgroup")).unwrap_or_default();
    let mounts = text_of(&root.join("proc/self/mountinfo")).unwrap_or_default();
    let mut groups: Vec<Group> = Vec::new();
    for membership in memberships.lines() {
        let mut parts = membership.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) = (parts.next(), parts.next(), parts.next()) else { continue };
        let wanted = ["memory", "cpu"];
        let controllers: Vec<&str> =
            controllers.split(',').filter(|name| wanted.contains(name) || name.is_empty()).collect();
        for controller in controllers {
            let version = if controller.is_empty() { Version::Two } else { Version::One };
            let Some((mounted, at)) = mounts.lines().find_map(|line| mount_of(line, version, controller)) else {
                continue;
            };
            let top = root.join(at.trim_start_matches('/'));
            // The mount shows the hierarchy from `mounted` downwards: what is not below is seen as its top.
            let below = Path::new(path).strip_prefix(mounted).unwrap_or(Path::new(""));
            let usual = below.components().all(|part| matches!(part, std::path::Component::Normal(_)));
            let mut folder = if usual { top.join(below) } else { top.clone() };
            let mut is_own = true;
            loop {
                groups.push(Group { version, controller: controller.to_owned(), folder: folder.clone(), is_own });
                is_own = false;
                if folder == top || !folder.pop() {
                    break;
                }
            }
        }
    }
    groups
}

/// From a line of `mountinfo`: what part of the hierarchy is mounted where, if it is the one of this controller.
fn mount_of(line: &str, version: Version, controller: &str) -> Option<(String, String)> {
    let (mount, kind) = line.split_once(" - ")?;
    let mut mount = mount.split(' ').skip(3);
    let (root, at) = (mount.next()?, mount.next()?);
    let mut kind = kind.split(' ');
    let (name, options) = (kind.next()?, kind.nth(1)?);
    let fits = match version {
        Version::Two => name == "cgroup2",
        Version::One => name == "cgroup" && options.split(',').any(|option| option == controller),
    };
    // Spaces and the like are written in octal.
    let plain = |text: &str| text.replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\");
    fits.then(|| (plain(root), plain(at)))
}

/// In bytes, from `/proc/meminfo`.
fn meminfo(root: &Path, name: &str) -> Option<u64> {
    let text = text_of(&root.join("proc/meminfo"))?;
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    Some(line.split_whitespace().next()?.parse::<u64>().ok()? << 10)
}

/// What there is for this process and those that it starts, as it was when it was first asked for: reading all of it takes a
/// millisecond.
pub(crate) static HERE: LazyLock<Machine> = LazyLock::new(|| Machine::at(Path::new("/")));

pub(crate) struct Machine {
    root: PathBuf,
    groups: Vec<Group>,
    limits: Limits,
    /// Bytes of memory that the machine has.
    whole: u64,
}

impl Machine {
    fn at(root: &Path) -> Machine {
        let groups = groups(root);
        let mut limits = Limits::default();
        for group in &groups {
            limits.tighten(group.limits());
        }
        let whole = meminfo(root, "MemTotal").unwrap_or(4 << 30);
        Machine { root: root.to_owned(), groups, limits, whole }
    }

    /// Bytes of memory.
    pub(crate) fn memory(&self) -> u64 {
        self.limits.memory.map_or(self.whole, |limit| limit.min(self.whole))
    }

    /// CPUs: those of the affinity mask, and no more than the control groups leave time on.
    pub(crate) fn cpus(&self) -> u32 {
        let allowed = std::thread::available_parallelism().map_or(1, usize::from);
        self.cpus_of(u32::try_from(allowed).unwrap_or(u32::MAX))
    }

    fn cpus_of(&self, allowed: u32) -> u32 {
        // Less than a CPU still runs one thing at a time; a part of another one does not make it two.
        let limit = self.limits.cpus.map_or(u32::MAX, |cpus| cpus.max(1.0) as u32);
        allowed.min(limit).max(1)
    }

    /// How many more bytes the store may take now, until the kernel would kill a process instead.
    pub(crate) fn memory_left(&self) -> Option<u64> {
        let known = |name| meminfo(&self.root, name);
        let of_machine = known("MemAvailable").map(|left| left + known("SwapFree").unwrap_or(0));
        let of_machine = of_machine.map(|left| left.saturating_sub(MARGIN.1));
        self.groups.iter().map(Group::memory_left).chain([of_machine]).flatten().min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A machine of 64 GiB.
    struct Pretended(tempfile::TempDir);

    impl Pretended {
        fn new(cgroup: &str, mountinfo: &str) -> Pretended {
            let machine = Pretended(tempfile::tempdir().unwrap());
            machine.write("proc/self/cgroup", cgroup);
            machine.write("proc/self/mountinfo", mountinfo);
            machine.write("proc/meminfo", "MemTotal:       67108864 kB\nMemAvailable:   33554432 kB\n");
            machine
        }

        fn write(&self, path: &str, text: &str) {
            let path = self.0.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }

        fn look(&self) -> Machine {
            Machine::at(self.0.path())
        }

        fn memory(&self) -> u64 {
            self.look().memory()
        }

        fn cpus_of(&self, allowed: u32) -> u32 {
            self.look().cpus_of(allowed)
        }

        fn left(&self) -> Option<u64> {
            self.look().groups.iter().filter_map(Group::memory_left).min()
        }
    }

    const V2: &str = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n";
    const V1: &str = "31 30 0:27 / /sys/fs/cgroup/cpu,cpuacct rw shared:10 - cgroup cgroup rw,cpu,cpuacct\n\
                      32 30 0:28 / /sys/fs/cgroup/memory rw shared:11 - cgroup cgroup rw,memory\n";

    #[test]
    fn without_groups_the_machine_is_all_there_is() {
        let machine = Pretended::new("", "");
        assert_eq!(machine.memory(), 64 << 30);
        assert_eq!(machine.cpus_of(16), 16);
        let machine = Pretended::new("0::/user.slice\n", V2);
        machine.write("sys/fs/cgroup/user.slice/memory.max", "max\n");
        machine.write("sys/fs/cgroup/user.slice/cpu.max", "max 100000\n");
        assert_eq!((machine.memory(), machine.cpus_of(16)), (64 << 30, 16));
        assert_eq!(machine.left(), None);
    }

    #[test]
    fn the_least_limit_on_the_way_up_counts() {
        let machine = Pretended::new("0::/a.slice/b.service\n", V2);
        machine.write("sys/fs/cgroup/a.slice/b.service/memory.max", "8589934592\n");
        machine.write("sys/fs/cgroup/a.slice/b.service/cpu.max", "800000 100000\n");
        assert_eq!((machine.memory(), machine.cpus_of(16)), (8 << 30, 8));
        machine.write("sys/fs/cgroup/a.slice/memory.max", "4294967296\n");
        machine.write("sys/fs/cgroup/a.slice/cpu.max", "250000 100000\n");
        assert_eq!((machine.memory(), machine.cpus_of(16)), (4 << 30, 2));
        machine.write("sys/fs/cgroup/a.slice/cpu.max", "50000 100000\n");
        assert_eq!(machine.cpus_of(16), 1);
        assert_eq!(machine.cpus_of(1), 1);
    }

    #[test]
    fn version_1_has_a_hierarchy_for_each_resource() {
        let machine = Pretended::new("5:memory:/docker/x\n4:cpu,cpuacct:/docker/x\n1:name=systemd:/\n0::/\n", V1);
        machine.write("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
        assert_eq!(machine.memory(), 64 << 30);
        machine.write("sys/fs/cgroup/memory/docker/x/memory.limit_in_bytes", "314572800\n");
        machine.write("sys/fs/cgroup/cpu,cpuacct/docker/x/cpu.cfs_quota_us", "-1\n");
        machine.write("sys/fs/cgroup/cpu,cpuacct/docker/x/cpu.cfs_period_us", "100000\n");
        assert_eq!((machine.memory(), machine.cpus_of(16)), (300 << 20, 16));
        machine.write("sys/fs/cgroup/cpu,cpuacct/docker/cpu.cfs_quota_us", "300000\n");
        machine.write("sys/fs/cgroup/cpu,cpuacct/docker/cpu.cfs_period_us", "100000\n");
        assert_eq!(machine.cpus_of(16), 3);
    }

    #[test]
    fn version_1_says_what_holds_above_what_can_be_seen() {
        let mounts = "32 30 0:28 /docker/x /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n";
        let machine = Pretended::new("5:memory:/docker/x\n", mounts);
        machine.write("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
        machine.write("sys/fs/cgroup/memory/memory.stat", "cache 0\nhierarchical_memory_limit 1073741824\n");
        assert_eq!(machine.memory(), 1 << 30);
    }

    #[test]
    fn inside_a_namespace_its_own_group_is_the_top() {
        // Version 2 in a namespace; one that is mounted from outside, whose path is not below; one that was left.
        for (cgroup, mounts) in [
            ("0::/\n", V2),
            ("0::/../other\n", V2),
            ("0::/kubepods/pod7\n", "30 23 0:26 /kubepods/pod7 /sys/fs/cgroup ro - cgroup2 cgroup2 rw\n"),
            ("0::/elsewhere\n", "30 23 0:26 /kubepods/pod7 /sys/fs/cgroup ro - cgroup2 cgroup2 rw\n"),
        ] {
            let machine = Pretended::new(cgroup, mounts);
            machine.write("sys/fs/cgroup/memory.max", "536870912\n");
            assert_eq!(machine.memory(), 512 << 20, "{cgroup}{mounts}");
        }
    }

    #[test]
    fn what_is_left_is_the_limit_less_what_cannot_be_dropped() {
        let machine = Pretended::new("0::/x\n", V2);
        machine.write("sys/fs/cgroup/x/memory.max", "1073741824\n");
        machine.write("sys/fs/cgroup/x/memory.current", "536870912\n");
        machine.write("sys/fs/cgroup/x/memory.stat", "anon 1\nshmem 2\ninactive_file 104857600\nactive_file 4194304\n");
        assert_eq!(machine.left(), Some((512 << 20) + (104 << 20) - (32 << 20)));
        machine.write("sys/fs/cgroup/x/memory.current", "1073741824\n");
        machine.write("sys/fs/cgroup/x/memory.stat", "");
        assert_eq!(machine.left(), Some(0));
    }

    #[test]
    fn this_machine_has_memory_and_cpus() {
        assert!(HERE.memory() > 0 && HERE.cpus() > 0);
        assert!(HERE.memory_left().is_some());
    }
}
