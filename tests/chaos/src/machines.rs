//! A head with a journal and nodes, each a machine of its own, and what starts them again when they end.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use wingbeat_tests::hosts::Hosts;

use crate::fault::{Disk, MACHINES, NODES};
use crate::room::Room;
use crate::world;

/// CPUs of a node.
const CPUS: &str = "2";

/// Smaller than what programs make together, so that they spill.
const STORE: &str = "32MiB";

/// The head's.
const PORT: u16 = 6420;

/// Where nodes spill; full when that many bytes lie there.
const SPILL_DISK: &str = "192m";

/// A daemon, its log, and whether it may end.
struct Daemon {
    child: Option<Child>,
    log: PathBuf,
    /// The length of the log when this process was started.
    log_begins: u64,
    /// Why it may end: it was killed, or was away for long enough to be given up.
    may_end: Option<Instant>,
    /// When it is started again.
    starts: Option<Instant>,
}

/// The machines of a run. Dropping it ends everything there.
pub struct Machines {
    hosts: Hosts,
    address: String,
    binary: PathBuf,
    folder: PathBuf,
    /// By machine: the head's is 0.
    daemons: BTreeMap<usize, Daemon>,
    /// The memory of each node, where that can be limited.
    rooms: BTreeMap<usize, Room>,
}

impl Machines {
    /// Makes the machines of the run of this number, and starts a head and nodes.
    ///
    /// # Errors
    /// They cannot be made or started.
    pub fn start(run: u32, folder: &Path, logs: &Path) -> Result<Machines> {
        let hosts = Hosts::new(MACHINES)?.context("only root can make machines")?;
        let address = format!("{}:{PORT}", hosts.address(0));
        let (binary, folder) = (wingbeat_tests::binary()?, folder.to_owned());
        let rooms = (1..=NODES).filter_map(|node| Some((node, Room::new(run, node)?))).collect();
        let mut machines = Machines { hosts, address, binary, folder, daemons: BTreeMap::new(), rooms };
        // The journal's disk also holds the programs of detached actors.
        let program = std::fs::metadata(std::env::current_exe()?)?.len() >> 20;
        std::fs::create_dir(machines.disk(Disk::Journal))?;
        world::mount(&machines.disk(Disk::Journal), &format!("{}m", 2 * program + 64))?;
        for machine in 0..=NODES {
            if machine > 0 {
                std::fs::create_dir(machines.disk(Disk::Spill(machine)))?;
                world::mount(&machines.disk(Disk::Spill(machine)), SPILL_DISK)?;
            }
            let log = logs.join(if machine == 0 { "head.log".into() } else { format!("node-{machine}.log") });
            let daemon = Daemon { child: None, log, log_begins: 0, may_end: None, starts: Some(Instant::now()) };
            machines.daemons.insert(machine, daemon);
        }
        Ok(machines)
    }

    /// Where a disk is mounted.
    pub fn disk(&self, disk: Disk) -> PathBuf {
        match disk {
            Disk::Journal => self.folder.join("journal"),
            Disk::Spill(node) => self.folder.join(format!("spill-{node}")),
        }
    }

    /// The machines' network.
    pub fn hosts(&self) -> &Hosts {
        &self.hosts
    }

    /// The memory of a node, where that is limited.
    pub fn room(&self, node: usize) -> Option<&Room> {
        self.rooms.get(&node)
    }

    /// A program on a machine, with the way to the cluster.
    pub fn on(&self, machine: usize, program: &Path) -> Command {
        let mut command = self.hosts.on(machine, program);
        self.hosts.join(&mut command, &self.address);
        command
    }

    /// What a `wingbeat` command on the head's machine prints.
    ///
    /// # Errors
    /// It fails; with what it said.
    pub fn wingbeat(&self, arguments: &[&str]) -> Result<String> {
        let output = self.on(0, &self.binary).args(arguments).output()?;
        if !output.status.success() {
            bail!("wingbeat {}: {}", arguments.join(" "), String::from_utf8_lossy(&output.stderr).trim());
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// What the head knows.
    ///
    /// # Errors
    /// It does not answer.
    pub fn state(&self) -> Result<serde_json::Value> {
        Ok(serde_json::from_str(&self.wingbeat(&["status", "--json"])?)?)
    }

    /// The process id of the daemon of a machine, if it runs.
    pub fn pid(&self, machine: usize) -> Option<u32> {
        self.daemons.get(&machine)?.child.as_ref().map(Child::id)
    }

    /// The daemons that run, by machine.
    pub fn pids(&self) -> Vec<(usize, u32)> {
        let pid = |(machine, daemon): (&usize, &Daemon)| Some((*machine, daemon.child.as_ref()?.id()));
        self.daemons.iter().filter_map(pid).collect()
    }

    /// The daemon of a machine may end within this time, and is then started again after `away`.
    pub fn may_end(&mut self, machine: usize, within: Duration, away: Duration) {
        if let Some(daemon) = self.daemons.get_mut(&machine) {
            let until = Instant::now() + within;
            daemon.may_end = Some(daemon.may_end.map_or(until, |other| other.max(until)));
            daemon.starts = Some(Instant::now() + away);
        }
    }

    /// Starts daemons again that have ended.
    ///
    /// # Errors
    /// One has ended and had no reason to; with its last words.
    pub fn supervise(&mut self) -> Result<()> {
        let now = Instant::now();
        for machine in 0..=NODES {
            let Some(daemon) = self.daemons.get_mut(&machine) else { continue };
            if let Some(child) = &mut daemon.child
                && let Some(status) = child.try_wait()?
            {
                daemon.child = None;
                let said = daemon.said();
                let has_joined = machine == 0 || said.contains(" joined ");
                if has_joined && daemon.may_end.is_none_or(|until| now > until) {
                    let words: Vec<&str> = said.lines().rev().take(10).collect();
                    let words: Vec<&str> = words.into_iter().rev().collect();
                    bail!("{} has ended by itself ({status}):\n{}", daemon.log.display(), words.join("\n"));
                }
                daemon.starts = daemon.starts.or(Some(now));
                if !has_joined {
                    daemon.starts = Some(now + Duration::from_millis(200));
                }
            }
            if daemon.child.is_none() && daemon.starts.is_none_or(|at| now >= at) {
                daemon.starts = None;
                daemon.log_begins = std::fs::metadata(&daemon.log).map_or(0, |log| log.len());
                let log = OpenOptions::new().create(true).append(true).open(&daemon.log)?;
                let child = self.spawn(machine, log)?;
                if let Some(daemon) = self.daemons.get_mut(&machine) {
                    daemon.child = Some(child);
                    // What was allowed to the last process is not to this one, unless it is still going on.
                    daemon.may_end = daemon.may_end.filter(|until| *until > now);
                }
            }
        }
        Ok(())
    }

    fn spawn(&self, machine: usize, log: File) -> Result<Child> {
        let mut command = match self.rooms.get(&machine) {
            None => self.on(machine, &self.binary),
            // `ip netns exec` would hide the control groups, from which a node knows how much memory it has.
            Some(room) => {
                let mut command = Command::new("nsenter");
                command.arg(format!("--net=/run/netns/{}", self.hosts.names[machine])).args(room.enters());
                self.hosts.join(command.arg(&self.binary), &self.address);
                command
            }
        };
        match machine {
            0 => {
                command.args(["head", "--host", &self.hosts.address(0), "--port", &PORT.to_string(), "--journal"]);
                command.arg(self.disk(Disk::Journal).join("journal"));
            }
            _ => {
                // A GPU that is only pretended is accounted for as any other.
                command.args([
                    "worker",
                    "--num-cpus",
                    CPUS,
                    "--pretend-gpus",
                    "1",
                    "--object-store-memory",
                    STORE,
                    "--spill-dir",
                ]);
                command.arg(self.disk(Disk::Spill(machine)));
            }
        }
        let errors = log.try_clone()?;
        Ok(command.stdin(std::process::Stdio::null()).stdout(log).stderr(errors).spawn()?)
    }

    /// Ends the cluster in order, and waits for every daemon.
    ///
    /// # Errors
    /// A daemon does not end within `limit`.
    pub fn stop(&mut self, limit: Duration) -> Result<()> {
        self.wingbeat(&["stop"])?;
        let begun = Instant::now();
        for (machine, daemon) in &mut self.daemons {
            while let Some(child) = &mut daemon.child {
                if child.try_wait()?.is_some() {
                    daemon.child = None;
                } else if begun.elapsed() > limit {
                    bail!("the daemon of machine {machine} does not end");
                } else {
                    std::thread::sleep(Duration::from_millis(10));
                }
            }
        }
        Ok(())
    }
}

impl Daemon {
    /// What this process has said.
    fn said(&self) -> String {
        let all = std::fs::read(&self.log).unwrap_or_default();
        String::from_utf8_lossy(all.get(self.log_begins as usize..).unwrap_or_default()).into_owned()
    }
}

impl Drop for Machines {
    fn drop(&mut self) {
        for daemon in self.daemons.values_mut() {
            if let Some(child) = &mut daemon.child {
                let _ = child.kill();
                let _ = child.wait();
            }
        }
    }
}
