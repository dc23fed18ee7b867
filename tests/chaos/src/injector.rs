//! Carries faults out, and mends what lasts.

use std::fs::File;
use std::io::Write;
use std::process::Child;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use wingbeat_shapes::usage;

use crate::drivers::Drivers;
use crate::fault::{DRIVER_MACHINES, Disk, Fault, NODES, Target};
use crate::machines::Machines;
use crate::schedule::Patience;

/// How long after a fault its consequences may still come.
const AFTER: Duration = Duration::from_secs(10);

/// A file that fills a disk.
const FILLER: &str = "filler";

/// What is out of order now.
pub struct Injector {
    patience: Patience,
    lasting: Vec<(Instant, Lasting)>,
}

/// What is mended when its time comes.
enum Lasting {
    Stopped(u32),
    Cut(usize),
    CutWay(usize, usize),
    Slow(usize),
    Full(Disk),
    Eaten(Child),
}

fn signal(pid: u32, signal: Signal) {
    if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
        // It may have ended by itself.
        let _ = kill_process(pid, signal);
    }
}

impl Injector {
    /// Nothing is out of order.
    pub fn new(patience: Patience) -> Injector {
        Injector { patience, lasting: Vec::new() }
    }

    /// When the next thing is mended.
    pub fn next(&self) -> Option<Instant> {
        self.lasting.iter().map(|(at, _)| *at).min()
    }

    /// Mends what has lasted long enough, or everything.
    pub fn mend(&mut self, machines: &Machines, everything: bool) {
        let now = Instant::now();
        for (_, lasting) in self.lasting.extract_if(.., |(at, _)| everything || *at <= now) {
            match lasting {
                Lasting::Stopped(pid) => signal(pid, Signal::CONT),
                Lasting::Cut(machine) => drop(machines.hosts().mend(machine)),
                Lasting::CutWay(from, to) => drop(machines.hosts().mend_way(from, to)),
                Lasting::Slow(machine) => drop(machines.hosts().quicken(machine)),
                Lasting::Eaten(mut eater) => {
                    let _ = eater.kill();
                    let _ = eater.wait();
                }
                Lasting::Full(disk) => drop(std::fs::remove_file(machines.disk(disk).join(FILLER))),
            }
        }
    }

    /// Carries a fault out. Whether there was anything to do it to.
    pub fn strike(&mut self, fault: &Fault, machines: &mut Machines, drivers: &mut Drivers) -> bool {
        let until = Instant::now() + fault.lasts();
        self.allow(fault, machines, drivers);
        let lasting = match *fault {
            Fault::Kill { target, .. } => {
                let Some(pid) = pid(target, machines, drivers) else { return false };
                signal(pid, Signal::KILL);
                return true;
            }
            Fault::Stop { target, .. } => {
                let Some(pid) = pid(target, machines, drivers) else { return false };
                signal(pid, Signal::STOP);
                Lasting::Stopped(pid)
            }
            Fault::Cut { machine, .. } => {
                if !machines.hosts().cut(machine) {
                    return false;
                }
                Lasting::Cut(machine)
            }
            Fault::CutWay { from, to, .. } => {
                if !machines.hosts().cut_way(from, to) {
                    return false;
                }
                Lasting::CutWay(from, to)
            }
            Fault::Slow { machine, .. } => {
                if !machines.hosts().slow(machine) {
                    return false;
                }
                Lasting::Slow(machine)
            }
            Fault::Eat { node, .. } => {
                let Some(eater) = machines.room(node).and_then(|room| room.eat().ok()) else { return false };
                Lasting::Eaten(eater)
            }
            Fault::Fill { disk, .. } => {
                let Ok(mut filler) = File::create(machines.disk(disk).join(FILLER)) else { return false };
                while filler.write_all(&[1; 64 << 10]).is_ok() {}
                while filler.write_all(&[1; 512]).is_ok() {}
                Lasting::Full(disk)
            }
        };
        self.lasting.push((until, lasting));
        true
    }

    /// Says which daemons and drivers may end of it.
    fn allow(&self, fault: &Fault, machines: &mut Machines, drivers: &mut Drivers) {
        // Others may have been silent for a while already, and a loaded machine takes its time.
        let is_long = fault.lasts() >= self.patience.lost / 2;
        let within = fault.lasts() + self.patience.lost + AFTER;
        let mut silent = |machine: usize| {
            if !is_long {
                return;
            }
            if (1..=NODES).contains(&machine) {
                machines.may_end(machine, within, Duration::ZERO);
            }
            for driver in (0..DRIVER_MACHINES.len()).filter(|driver| DRIVER_MACHINES[*driver] == machine) {
                drivers.may_end(driver, within, Duration::ZERO);
            }
        };
        match *fault {
            Fault::Kill { target, away } => match target {
                Target::Head => machines.may_end(0, AFTER, away),
                Target::Node(node) | Target::Guard { node, .. } => machines.may_end(node, AFTER, away),
                Target::Driver(driver) => drivers.may_end(driver, AFTER, away),
                Target::WorkerProcess { .. } => {}
            },
            Fault::Stop { target, .. } => match target {
                Target::Node(node) | Target::Guard { node, .. } if is_long => {
                    machines.may_end(node, within, Duration::ZERO);
                }
                Target::Driver(driver) if is_long => drivers.may_end(driver, within, Duration::ZERO),
                _ => {}
            },
            Fault::Cut { machine, .. } => silent(machine),
            Fault::CutWay { from, to, .. } => [from, to].into_iter().for_each(silent),
            // The kernel may choose any of its processes.
            Fault::Eat { node, .. } => machines.may_end(node, fault.lasts() + AFTER, Duration::ZERO),
            Fault::Slow { .. } | Fault::Fill { .. } => {}
        }
    }
}

/// The process that is meant, if it is there.
fn pid(target: Target, machines: &Machines, drivers: &Drivers) -> Option<u32> {
    match target {
        Target::Head => machines.pid(0),
        Target::Node(node) => machines.pid(node),
        Target::Driver(driver) => drivers.pid(driver),
        Target::Guard { node, outer } => {
            let daemon = machines.pid(node)?;
            usage::guards(&[daemon]).into_iter().find(|guard| (wingbeat_tests::parent(*guard) == daemon) == outer)
        }
        Target::WorkerProcess { node, pick } => {
            let processes = usage::worker_processes(&[machines.pid(node)?]);
            processes.get(pick % processes.len().max(1)).copied()
        }
    }
}
