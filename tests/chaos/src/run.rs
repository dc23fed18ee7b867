//! One run: a cluster, drivers, faults, and what is said about it.

use std::collections::{BTreeMap, VecDeque};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

use crate::drivers::{Drivers, Said};
use crate::fault::NODES;
use crate::injector::Injector;
use crate::machines::Machines;
use crate::recovery::Recoveries;
use crate::report::{Outcome, Report};
use crate::rest::{self, Fresh};
use crate::schedule::{Patience, Strike, schedule};
use crate::{signs, world};

/// A program takes seconds, and with every limit that there is it takes one or two minutes. Only one that hangs takes so
/// long.
pub const HANGS: Duration = Duration::from_secs(240);

/// Programs that take so long are shown.
const SLOW: Duration = Duration::from_secs(20);

/// How long the loop rests when nothing happens.
const TICK: Duration = Duration::from_millis(50);

/// How many of the last faults are shown.
const SHOWN: usize = 25;

/// What is run.
pub struct Options {
    /// Tells this run from others of this machine.
    pub number: u32,
    /// What decides everything.
    pub seed: u64,
    /// How long faults happen.
    pub length: Duration,
    /// How patient the cluster is.
    pub patience: Patience,
    /// Where logs go.
    pub logs: PathBuf,
}

/// Runs it, and prints what there was.
///
/// # Errors
/// Something is wrong; everything that helps to find out why is printed before.
pub fn run(options: &Options) -> Result<()> {
    let folder = world::furnish()?;
    signs::prepare()?;
    std::fs::create_dir_all(&options.logs)?;
    let (says, said) = channel();
    let mut run = Run {
        begun: Instant::now(),
        machines: Machines::start(options.number, &folder, &options.logs)?,
        drivers: Drivers::new(options.seed, &options.logs, says),
        injector: Injector::new(options.patience),
        said,
        open: BTreeMap::new(),
        recoveries: Recoveries::default(),
        outcomes: BTreeMap::new(),
        last: VecDeque::new(),
        reaped: Instant::now(),
    };
    let done = run.all(options);
    match &done {
        Ok(()) => run.summarize(),
        Err(_) => run.explain(),
    }
    done
}

struct Run {
    begun: Instant,
    machines: Machines,
    drivers: Drivers,
    injector: Injector,
    said: Receiver<Said>,
    /// Programs that run, by driver, and since when.
    open: BTreeMap<(usize, String), Instant>,
    recoveries: Recoveries,
    /// How often each program has ended right, and with which error.
    outcomes: BTreeMap<(String, String), usize>,
    /// The last faults, with their time.
    last: VecDeque<String>,
    /// When orphans were last looked for.
    reaped: Instant,
}

impl Run {
    fn all(&mut self, options: &Options) -> Result<()> {
        self.until("every node has joined", |run| {
            let state = run.machines.state();
            Ok(state.is_ok_and(|state| state["nodes"].as_array().is_some_and(|nodes| nodes.len() == NODES)))
        })?;
        let usages = rest::usages(&self.machines);
        let fresh: Fresh = usages.into_iter().map(|(machine, usage)| (machine == 0, usage)).collect();
        self.faults(&schedule(options.seed, options.length, options.patience))?;
        self.note("all faults have happened; everything is mended");
        self.injector.mend(&self.machines, true);
        self.drivers.tell_to_end();
        self.until("every driver has ended", |run| Ok(run.drivers.are_gone()))?;
        self.drivers.start_last(0, &self.machines)?;
        self.until("the last driver has ended", |run| Ok(run.drivers.are_gone()))?;
        self.note("no driver is left");
        rest::wait(&mut self.machines, &fresh)?;
        println!("memory at rest: {}", rest::memory(&self.machines, &fresh));
        self.machines.stop(rest::STOP)?;
        rest::after_the_end()
    }

    fn faults(&mut self, strikes: &[Strike]) -> Result<()> {
        let begun = Instant::now();
        for Strike { at, fault } in strikes {
            while begun.elapsed() < *at {
                self.drivers.start_all(&self.machines)?;
                self.tick((*at).saturating_sub(begun.elapsed()))?;
            }
            self.injector.mend(&self.machines, false);
            let is_done = self.injector.strike(fault, &mut self.machines, &mut self.drivers);
            if is_done {
                self.recoveries.struck(fault.kind(), self.begun.elapsed());
            }
            self.note(&format!("{fault}{}", if is_done { "" } else { " (there was none)" }));
        }
        Ok(())
    }

    fn note(&mut self, text: &str) {
        let line = format!("{:7.2} s  {text}", self.begun.elapsed().as_secs_f64());
        println!("{line}");
        self.last.push_back(line);
        if self.last.len() > SHOWN {
            self.last.pop_front();
        }
    }

    fn until(&mut self, what: &str, is_so: impl Fn(&Run) -> Result<bool>) -> Result<()> {
        let begun = Instant::now();
        while !is_so(self)? {
            self.tick(TICK)?;
            if begun.elapsed() > HANGS {
                bail!("it is not so that {what} after {HANGS:?}");
            }
        }
        Ok(())
    }

    /// Looks after everything, and waits for a moment.
    fn tick(&mut self, at_most: Duration) -> Result<()> {
        self.injector.mend(&self.machines, false);
        self.machines.supervise()?;
        if self.reaped.elapsed() > Duration::from_secs(1) {
            self.reaped = Instant::now();
            let drivers = (0..crate::fault::DRIVER_MACHINES.len()).filter_map(|driver| self.drivers.pid(driver));
            let own: Vec<u32> = self.machines.pids().into_iter().map(|(_, pid)| pid).chain(drivers).collect();
            world::reap_orphans(&own);
        }
        let mended = self.injector.next().map(|at| at.saturating_duration_since(Instant::now()));
        let pause = at_most.min(TICK).min(mended.unwrap_or(TICK));
        let mut next = self.said.recv_timeout(pause).ok();
        while let Some(said) = next {
            self.hear(said)?;
            next = self.said.try_recv().ok();
        }
        if let Some(wrong) = signs::look().first() {
            bail!("{wrong}");
        }
        for ((driver, program), since) in &self.open {
            if since.elapsed() > HANGS {
                bail!("{program} of driver {driver} hangs: no end after {:.0?}", since.elapsed());
            }
        }
        Ok(())
    }

    fn hear(&mut self, Said { driver, number, report }: Said) -> Result<()> {
        let at = self.begun.elapsed();
        match report {
            Some(Report::Joined | Report::Leaves) => {}
            Some(Report::Begins(program)) => {
                self.open.insert((driver, program.clone()), Instant::now());
                self.recoveries.began((driver, program));
            }
            Some(Report::Ended(program, outcome)) => {
                let lane = (driver, program);
                let took = self.open.remove(&lane).map(|since| since.elapsed()).unwrap_or_default();
                if took > SLOW {
                    self.note(&format!("{} of driver {driver} ({number}) took {took:.1?}: {outcome:?}", lane.1));
                }
                let how = match outcome {
                    Outcome::Right => {
                        self.recoveries.succeeded(&lane, at);
                        "right".to_owned()
                    }
                    Outcome::Excused(why) => why,
                    Outcome::Over(_) if self.drivers.had_reason(driver) => "the session has ended".to_owned(),
                    Outcome::Over(why) => bail!("driver {driver} ({number}) has lost its cluster for no reason: {why}"),
                    Outcome::Wrong(why) => bail!("{} of driver {driver} ({number}): {why}", lane.1),
                };
                *self.outcomes.entry((lane.1, how)).or_default() += 1;
            }
            None if self.drivers.number(driver) == Some(number) => {
                self.open.retain(|(other, _), _| *other != driver);
                let had_reason = self.drivers.had_reason(driver);
                if !self.drivers.ended(driver)? && !had_reason {
                    let log = self.drivers.log(driver);
                    bail!("driver {driver} ({number}) has failed:\n{}", last_lines(&log, 10));
                }
            }
            None => {}
        }
        Ok(())
    }

    fn summarize(&self) {
        println!("programs:");
        for ((program, how), count) in &self.outcomes {
            println!("  {program:10} {count:6}  {how}");
        }
        println!("faults:{:39} recovery, median and slowest (what was last)", "");
        for row in self.recoveries.rows() {
            let slowest =
                row.slowest.map(|(took, (driver, program))| format!("{took:6.1?} ({program} of driver {driver})"));
            println!("  {:4}  {:40} {:6.1?}  {}", row.count, row.kind, row.median, slowest.unwrap_or_default());
        }
    }

    /// What helps to find out why.
    fn explain(&self) {
        eprintln!("the last faults:");
        self.last.iter().for_each(|line| eprintln!("  {line}"));
        eprintln!("programs that run:");
        for ((driver, program), since) in &self.open {
            eprintln!("  {program} of driver {driver}, for {:.1?}", since.elapsed());
        }
        let status = self.machines.wingbeat(&["status"]);
        eprintln!("wingbeat status:\n{}", status.unwrap_or_else(|error| format!("{error:#}")));
        for id in self.machines.state().iter().flat_map(waiting) {
            let why = self.machines.wingbeat(&["why", &id]).unwrap_or_else(|error| format!("{error:#}"));
            eprintln!("wingbeat why {id}:\n{why}");
        }
    }
}

/// Actors and placement groups, by their ids.
fn waiting(state: &serde_json::Value) -> Vec<String> {
    let rows = ["actors", "placement_groups"].into_iter().flat_map(|what| state[what].as_array().into_iter().flatten());
    rows.filter_map(|row| row["id"].as_str().map(str::to_owned)).collect()
}

fn last_lines(file: &Path, count: usize) -> String {
    let text = std::fs::read_to_string(file).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(count)..].join("\n")
}
