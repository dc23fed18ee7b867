//! Clusters of thousands of nodes: many drivers, whose programs follow one another until enough has happened.

use std::rc::Rc;
use std::time::Duration;

use wingbeat_core::spec::MachineId;
use wingbeat_core::{NodeId, ProcessId};

use super::Report;
use super::process::Process;
use super::world::World;

/// After so many happenings something may break.
const CHANCE_EVERY: u64 = 200;
/// After so many happenings a line on stderr says how far it is.
const SHOWN_EVERY: u64 = 100_000;
/// One driver of so many leaves after its program, and another joins.
const STAYS: u64 = 8;
impl Report {
    /// What happened in a large cluster, for people.
    pub(super) fn shown(&self, took: Duration) -> String {
        let seconds = took.as_secs_f64();
        format!(
            "{} events and {} notices of the head about nodes in {seconds:.1} s: {:.0} events/s, {} MiB at most\n\
             {} programs, {} worker processes, {} tasks, {} calls, {} items, {} values read, {} errors, {} cancels, {} deaths, \
             {} broken connections and lost contacts, {} full stores, {} restarts of the head",
            self.happenings,
            self.notices,
            self.happenings as f64 / seconds,
            most_memory_mib(),
            self.programs,
            self.workers,
            self.tasks,
            self.calls,
            self.items,
            self.values,
            self.errors,
            self.cancels,
            self.deaths,
            self.cuts,
            self.fills,
            self.restarts,
        )
    }
}

/// The most memory that this process has had so far, as the kernel says.
fn most_memory_mib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<u64>().ok()).unwrap_or(0) / 1024
}

impl World {
    /// The machine that a node is. In a small cluster they all are on one, so that each job has worker processes everywhere.
    pub(super) fn machine_of(&self, node: NodeId) -> MachineId {
        MachineId(self.shared.config.large().map_or(1, |_| node.0 + 1))
    }

    /// Whether new programs begin.
    fn goes_on(&self) -> bool {
        self.shared.config.large().is_some_and(|large| self.shared.report.borrow().happenings < large.events)
    }

    /// In a large cluster what breaks goes by what happens, and not by time.
    pub(super) fn keep_pace(&mut self) {
        if self.shared.config.large().is_none() {
            return;
        }
        let report = *self.shared.report.borrow();
        if report.happenings.is_multiple_of(CHANCE_EVERY) {
            match self.goes_on() {
                true => self.something_happens(),
                false => self.maybe_retire(),
            }
        }
        if report.happenings.is_multiple_of(SHOWN_EVERY) {
            eprintln!(
                "{:>10} events in {} s of the cluster's time: {} tasks, {} calls, {} values read, {} deaths; {} processes live, {} drivers have work",
                report.happenings,
                self.shared.now() / 1_000,
                report.tasks,
                report.calls,
                report.values,
                report.deaths,
                self.processes.len(),
                self.drivers.len(),
            );
        }
    }

    /// The program of a driver has ended.
    pub(super) fn program_ended(&mut self, process: &Rc<Process>) {
        self.program_ended_at = self.shared.now();
        self.shared.report.borrow_mut().programs += 1;
        if !self.goes_on() {
            self.drivers.remove(&process.id);
        } else if self.shared.config.faults && self.shared.below(STAYS) == 0 {
            self.driver_leaves(process.id);
        } else {
            self.begin_program(process);
        }
    }

    /// A driver is no more; in a large cluster another joins.
    pub(super) fn driver_leaves(&mut self, driver: ProcessId) {
        self.shared.report.borrow_mut().deaths += 1;
        self.dies(driver);
        if self.goes_on() {
            self.new_driver();
        }
    }
}
