//! What must be gone at the end.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use serde_json::Value;
use wingbeat_shapes::usage::{self, Usage};

use crate::fault::{Disk, NODES};
use crate::machines::Machines;
use crate::world;

/// How long idle things may take to go: worker processes and freed memory some 20 s, and a node that was given up 30 s.
const SETTLE: Duration = Duration::from_secs(90);

/// How long the cluster may take to end.
pub const STOP: Duration = Duration::from_secs(30);

/// What a store keeps of memory: nothing but what it needs for itself.
const STORE_BYTES: u64 = 1 << 20;

/// A daemon may have so many more descriptors and threads than one that has just started: connections to drivers and other
/// nodes that are kept for a while, a spill file, and threads for blocking work.
const DESCRIPTORS: usize = 40;
const THREADS: usize = 8;
/// And so much more memory of its own: what the allocator keeps of its busiest moment.
const MEMORY: u64 = 32 << 20;

/// What daemons hold when they have just started, by whether it is the head.
pub type Fresh = BTreeMap<bool, Usage>;

/// What each of the running daemons holds.
pub fn usages(machines: &Machines) -> BTreeMap<usize, Usage> {
    machines.pids().into_iter().filter_map(|(machine, pid)| Some((machine, usage::of(pid)?))).collect()
}

/// Waits until the cluster holds nothing.
///
/// # Errors
/// It still does after a while; with what.
pub fn wait(machines: &mut Machines, fresh: &Fresh) -> Result<()> {
    let begun = Instant::now();
    loop {
        machines.supervise()?;
        let left = match machines.state() {
            Ok(state) => left(&state, machines, fresh),
            Err(error) => vec![format!("the head says nothing: {error:#}")],
        };
        if left.is_empty() {
            return Ok(());
        }
        if begun.elapsed() > SETTLE {
            bail!("after {SETTLE:?} without drivers there is still:\n{}", left.join("\n"));
        }
        std::thread::sleep(Duration::from_millis(500));
    }
}

/// What each daemon has of memory of its own, and had when it was new.
pub fn memory(machines: &Machines, fresh: &Fresh) -> String {
    let of = |machine: usize, usage: Usage| {
        let before = fresh.get(&(machine == 0)).copied().unwrap_or_default();
        let daemon = if machine == 0 { "head".to_owned() } else { format!("node {machine}") };
        format!("{daemon} {} MiB ({} when new)", usage.private >> 20, before.private >> 20)
    };
    usages(machines).into_iter().map(|(machine, usage)| of(machine, usage)).collect::<Vec<_>>().join(", ")
}

fn left(state: &Value, machines: &Machines, fresh: &Fresh) -> Vec<String> {
    let mut left = Vec::new();
    for what in ["absent", "jobs", "actors", "placement_groups", "pending"] {
        for row in state[what].as_array().into_iter().flatten() {
            left.push(format!("{what}: {row}"));
        }
    }
    let nodes = state["nodes"].as_array().map_or(&[][..], Vec::as_slice);
    if nodes.len() != NODES {
        left.push(format!("{} nodes instead of {NODES}", nodes.len()));
    }
    for node in nodes {
        let id = &node["info"]["id"];
        let is_free = node["available"] == node["info"]["resources"];
        if !is_free || node["leases"] != 0 || !node["suspect_secs"].is_null() || !node["draining"].is_null() {
            left.push(format!("node {id}: {node}"));
        }
        if node["held_devices"].as_array().is_some_and(|held| !held.is_empty()) {
            left.push(format!("node {id} holds devices: {}", node["held_devices"]));
        }
    }
    for (machine, pid) in machines.pids() {
        if machine > 0 {
            let stored = store_bytes(pid);
            if stored > STORE_BYTES {
                left.push(format!("the store of node {machine} has {stored} bytes"));
            }
            let spilled = used(&machines.disk(Disk::Spill(machine)));
            if spilled > 0 {
                left.push(format!("{spilled} bytes are on the spill disk of node {machine}"));
            }
            let processes = usage::worker_processes(&[pid]).len();
            if processes > 2 {
                left.push(format!("{processes} worker processes are on node {machine}"));
            }
        }
        let (usage, fresh) =
            (usage::of(pid).unwrap_or_default(), fresh.get(&(machine == 0)).copied().unwrap_or_default());
        let is_more = usage.descriptors > fresh.descriptors + DESCRIPTORS
            || usage.threads > fresh.threads + THREADS
            || usage.private > fresh.private + MEMORY;
        if is_more {
            left.push(format!("the daemon of machine {machine} holds {usage:?}, and {fresh:?} when it was new"));
        }
    }
    let zombies = usage::zombies(&machines.pids().iter().map(|(_, pid)| *pid).collect::<Vec<_>>());
    if zombies > 0 {
        left.push(format!("{zombies} zombies"));
    }
    left
}

/// Memory of the object store of a node's daemon.
fn store_bytes(pid: u32) -> u64 {
    let Ok(descriptors) = std::fs::read_dir(format!("/proc/{pid}/fd")) else { return 0 };
    let is_store =
        |path: &Path| std::fs::read_link(path).is_ok_and(|to| to.to_string_lossy().contains("wingbeat-store"));
    let blocks = |path: &Path| std::fs::metadata(path).map_or(0, |file| std::os::unix::fs::MetadataExt::blocks(&file));
    descriptors
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| is_store(path))
        .map(|path| blocks(&path) * 512)
        .max()
        .unwrap_or(0)
}

/// Bytes that are used on a disk, also by files without a name.
fn used(disk: &Path) -> u64 {
    rustix::fs::statvfs(disk).map_or(0, |disk| (disk.f_blocks - disk.f_bfree) * disk.f_frsize)
}

/// Waits until every process of a cluster that was stopped has ended, and looks for what it has left.
///
/// # Errors
/// There is something; with what.
pub fn after_the_end() -> Result<()> {
    let begun = Instant::now();
    loop {
        world::reap_orphans(&[]);
        let mut left: Vec<String> =
            world::processes().into_iter().map(|(pid, name)| format!("process {pid}: {name}")).collect();
        left.extend(world::strange_files().iter().map(|path| format!("file {}", path.display())));
        if left.is_empty() {
            return Ok(());
        }
        if begun.elapsed() > STOP {
            bail!("{STOP:?} after the end of the cluster there is still:\n{}", left.join("\n"));
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}
