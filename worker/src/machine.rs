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

/// The sum of lines `NAME NUMBER` of a file.
fn sum_of(folder: &Path, file: &str, names: &[&str]) -> u64 {
    let text = text_of(&folder.join(file)).unwrap_or_default();
    let lines = text.lines().filter_map(|line| line.split_once(' ')).filter(|(name, _)| names.contains(name));
    lines.filter_map(|(_, number)| number.trim().parse::<u64>().ok()).sum()
}

/// A line `NAME NUMBER` of a file.
fn field(folder: &Path, file: &str, name: &str) -> Option<u64> {
    let text = text_of(&folder.join(file))?;
    let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.trim().parse().ok());
    value.filter(|number| *number < UNLIMITED)
}

/// Bytes that a group of version two may take before the kernel ends something there, or makes all there wait for memory.
fn memory_of_two(folder: &Path) -> Option<u64> {
    ["memory.max", "memory.high"].into_iter().filter_map(|file| number(folder, file)).min()
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
                Limits { memory: memory_of_two(folder), cpus }
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

    /// What is used of the memory that this group may take. The kernel drops what it only keeps of files, and their names, when memory is short.
    fn memory(&self) -> Option<Memory> {
        let folder = &self.folder;
        let (limit, used, dropped): (_, _, &[&str]) = match self.version {
            Version::Two => {
                let used = number(folder, "memory.current")?;
                (memory_of_two(folder)?, used, &["inactive_file", "active_file", "slab_reclaimable"])
            }
            Version::One if self.controller != "memory" => return None,
            Version::One => {
                let used = number(folder, "memory.usage_in_bytes")?;
                (number(folder, "memory.limit_in_bytes")?, used, &["total_inactive_file", "total_active_file"])
            }
        };
        let used = used.saturating_sub(sum_of(folder, "memory.stat", dropped));
        Some(Memory { limit, used, group: Some(folder.clone()) })
    }

    /// How many processes of this group itself the kernel has killed because memory ran out, there or in the whole machine.
    fn kernel_kills(&self) -> Option<u64> {
        let file = match self.version {
            Version::Two => "memory.events.local",
            Version::One if self.controller == "memory" => "memory.oom_control",
            Version::One => return None,
        };
        field(&self.folder, file, "oom_kill")
    }
}

/// What is used of the memory that there is for something.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Memory {
    /// Bytes.
    pub limit: u64,
    /// Bytes.
    pub used: u64,
    /// The control group that has the limit; none for the machine.
    pub group: Option<PathBuf>,
}

impl Memory {
    /// Bytes that objects may still take, of a group below this part of its limit. A machine that others have filled is no reason to
    /// refuse objects before it is full.
    fn left(&self, part: f64) -> u64 {
        let most = match self.group {
            Some(_) => ((self.limit as f64 * part) as u64).saturating_sub(margin(self.limit)),
            None => self.limit.saturating_sub(MARGIN.1),
        };
        most.saturating_sub(self.used)
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

/// In bytes, from the text of `/proc/meminfo`.
fn bytes_of(text: &str, name: &str) -> Option<u64> {
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
        let text = text_of(&root.join("proc/meminfo")).unwrap_or_default();
        let whole = bytes_of(&text, "MemTotal").unwrap_or(4 << 30);
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

    /// How many more bytes the store may take now, below this part of what there is: above it a process would be ended instead, by
    /// the node or the kernel.
    pub(crate) fn memory_left(&self, part: f64) -> Option<u64> {
        self.memories().map(|memory| memory.left(part)).min()
    }

    /// What is used of the memory of which least is left: that of the machine, or of a control group.
    pub(crate) fn scarcest(&self) -> Option<Memory> {
        let share = |memory: &Memory| memory.used as f64 / memory.limit.max(1) as f64;
        self.memories().max_by(|one, other| share(one).total_cmp(&share(other)))
    }

    fn memories(&self) -> impl Iterator<Item = Memory> {
        self.groups.iter().filter_map(Group::memory).chain(self.of_machine())
    }

    fn of_machine(&self) -> Option<Memory> {
        let text = text_of(&self.root.join("proc/meminfo"))?;
        let known = |name| bytes_of(&text, name);
        let limit = known("MemTotal")? + known("SwapTotal").unwrap_or(0);
        let left = known("MemAvailable")? + known("SwapFree").unwrap_or(0);
        Some(Memory { limit, used: limit.saturating_sub(left), group: None })
    }

    /// How many processes of the control group of this process the kernel has killed because memory ran out, if it counts them.
    pub(crate) fn kernel_kills(&self) -> Option<u64> {
        self.groups.iter().filter(|group| group.is_own).find_map(Group::kernel_kills)
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
            self.look().groups.iter().filter_map(Group::memory).map(|memory| memory.left(1.0)).min()
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
    fn where_the_kernel_makes_all_wait_is_a_limit() {
        let machine = Pretended::new("0::/x\n", V2);
        machine.write("sys/fs/cgroup/x/memory.max", "max\n");
        machine.write("sys/fs/cgroup/x/memory.high", "2147483648\n");
        machine.write("sys/fs/cgroup/x/memory.current", "1610612736\n");
        assert_eq!(machine.memory(), 2 << 30);
        assert_eq!(machine.look().scarcest().unwrap().limit, 2 << 30);
        machine.write("sys/fs/cgroup/x/memory.max", "1610612736\n");
        assert_eq!(machine.memory(), 1536 << 20);
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
        let stat =
            "anon 1\ninactive_file 104857600\nactive_file 4194304\nslab_reclaimable 67108864\nslab_unreclaimable 9\n";
        machine.write("sys/fs/cgroup/x/memory.stat", stat);
        assert_eq!(machine.left(), Some((512 << 20) + (168 << 20) - (32 << 20)));
        machine.write("sys/fs/cgroup/x/memory.current", "1073741824\n");
        machine.write("sys/fs/cgroup/x/memory.stat", "");
        assert_eq!(machine.left(), Some(0));
    }

    #[test]
    fn what_is_scarcest_is_found_and_the_kernels_kills_are_counted() {
        let machine = Pretended::new("0::/x\n", V2);
        assert_eq!(machine.look().scarcest().unwrap(), Memory { limit: 64 << 30, used: 32 << 30, group: None });
        assert_eq!(machine.look().kernel_kills(), None);
        machine.write("sys/fs/cgroup/x/memory.max", "1073741824\n");
        machine.write("sys/fs/cgroup/x/memory.current", "1073741824\n");
        machine.write("sys/fs/cgroup/x/memory.stat", "inactive_file 104857600\nactive_file 0\n");
        machine.write("sys/fs/cgroup/x/memory.events.local", "oom 3\noom_kill 2\noom_group_kill 0\n");
        let memory = machine.look().scarcest().unwrap();
        assert_eq!((memory.limit, memory.used), (1 << 30, (1 << 30) - (100 << 20)));
        assert!(memory.group.unwrap().ends_with("sys/fs/cgroup/x"));
        assert_eq!(machine.look().kernel_kills(), Some(2));
        let machine = Pretended::new("5:memory:/docker/x\n0::/\n", &format!("{V1}{V2}"));
        machine
            .write("sys/fs/cgroup/memory/docker/x/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 7\n");
        assert_eq!(machine.look().kernel_kills(), Some(7));
    }

    #[test]
    fn this_machine_has_memory_and_cpus() {
        assert!(HERE.memory() > 0 && HERE.cpus() > 0);
        assert!(HERE.memory_left(1.0).is_some());
    }
}
