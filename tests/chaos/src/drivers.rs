//! Drivers, as whoever starts them sees them: processes that report.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Stdio};
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use crate::fault::DRIVER_MACHINES;
use crate::machines::Machines;
use crate::report::Report;

/// What a driver has said, or that it is gone.
pub struct Said {
    /// Which driver.
    pub driver: usize,
    /// Its number among all that there ever are.
    pub number: u64,
    /// What; nothing at the end.
    pub report: Option<Report>,
}

/// A driver.
struct Driver {
    child: Child,
    /// It ends when this is closed.
    stdin: Option<ChildStdin>,
    number: u64,
    /// When it may have been given up, or was killed.
    may_end: Option<Instant>,
}

/// The drivers of a run. Dropping it kills them.
pub struct Drivers {
    seed: u64,
    logs: PathBuf,
    said: Sender<Said>,
    drivers: Vec<Option<Driver>>,
    starts: Vec<Option<Instant>>,
    started: u64,
}

impl Drivers {
    /// None yet; what they say is sent there.
    pub fn new(seed: u64, logs: &Path, said: Sender<Said>) -> Drivers {
        let count = DRIVER_MACHINES.len();
        let drivers = (0..count).map(|_| None).collect();
        Drivers { seed, logs: logs.to_owned(), said, drivers, starts: vec![Some(Instant::now()); count], started: 0 }
    }

    /// The process id of a driver, if it runs.
    pub fn pid(&self, driver: usize) -> Option<u32> {
        self.drivers.get(driver)?.as_ref().map(|driver| driver.child.id())
    }

    /// Where a driver logs.
    pub fn log(&self, driver: usize) -> PathBuf {
        self.logs.join(format!("driver-{driver}.log"))
    }

    /// The number of the driver that runs as this one.
    pub fn number(&self, driver: usize) -> Option<u64> {
        self.drivers.get(driver)?.as_ref().map(|driver| driver.number)
    }

    /// A driver may end within this time, and is then started again after `away`.
    pub fn may_end(&mut self, driver: usize, within: Duration, away: Duration) {
        self.starts[driver] = Some(Instant::now() + away);
        if let Some(driver) = self.drivers.get_mut(driver).and_then(Option::as_mut) {
            let until = Instant::now() + within;
            driver.may_end = Some(driver.may_end.map_or(until, |other| other.max(until)));
        }
    }

    /// Whether a driver that has ended had a reason to.
    pub fn had_reason(&self, driver: usize) -> bool {
        let driver = self.drivers.get(driver).and_then(Option::as_ref);
        driver.is_some_and(|driver| driver.may_end.is_some_and(|until| Instant::now() <= until))
    }

    /// Starts drivers that are not there.
    ///
    /// # Errors
    /// One does not start.
    pub fn start_all(&mut self, machines: &Machines) -> Result<()> {
        for driver in 0..self.drivers.len() {
            let is_due = self.starts[driver].is_none_or(|at| Instant::now() >= at);
            if self.drivers[driver].is_none() && is_due {
                self.starts[driver] = None;
                self.start(driver, machines, false)?;
            }
        }
        Ok(())
    }

    /// Starts the last driver, which runs every program once, as this one.
    ///
    /// # Errors
    /// It does not start.
    pub fn start_last(&mut self, driver: usize, machines: &Machines) -> Result<()> {
        self.start(driver, machines, true)
    }

    fn start(&mut self, driver: usize, machines: &Machines, closes: bool) -> Result<()> {
        let number = self.started;
        self.started += 1;
        let log = std::fs::OpenOptions::new().create(true).append(true).open(self.log(driver))?;
        let seed = self.seed.wrapping_mul(1_000).wrapping_add(number).to_string();
        let mut command = machines.on(DRIVER_MACHINES[driver], &std::env::current_exe()?);
        command.args(["driver", "--number", &number.to_string(), "--seed", &seed]);
        if closes {
            command.arg("--closes");
        }
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(log).spawn()?;
        let stdin = child.stdin.take();
        let stdout = child.stdout.take().context("no stdout")?;
        let said = self.said.clone();
        std::thread::spawn(move || {
            let reports = BufReader::new(stdout).lines().map_while(Result::ok).filter_map(|line| Report::parse(&line));
            for report in reports.map(Some).chain([None]) {
                if said.send(Said { driver, number, report }).is_err() {
                    return;
                }
            }
        });
        self.drivers[driver] = Some(Driver { child, stdin, number, may_end: None });
        Ok(())
    }

    /// Takes leave of one that has ended; whether it ended in order.
    ///
    /// # Errors
    /// The kernel does not answer.
    pub fn ended(&mut self, driver: usize) -> Result<bool> {
        let Some(mut ended) = self.drivers[driver].take() else { return Ok(true) };
        Ok(ended.child.wait()?.success())
    }

    /// Tells all to end their programs.
    pub fn tell_to_end(&mut self) {
        self.drivers.iter_mut().flatten().for_each(|driver| driver.stdin = None);
    }

    /// Whether none is left.
    pub fn are_gone(&self) -> bool {
        self.drivers.iter().all(Option::is_none)
    }
}

impl Drop for Drivers {
    fn drop(&mut self) {
        for driver in self.drivers.iter_mut().flatten() {
            let _ = driver.child.kill();
            let _ = driver.child.wait();
        }
    }
}
