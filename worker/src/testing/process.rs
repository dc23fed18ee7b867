//! One process of a test cluster, as the test has it.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use wingbeat_core::error::Error;
use wingbeat_net::Token;

use super::log::Log;
use super::network::Machine;
use super::{Ready, Role, Start, Started, entry};
use crate::{guard, join, start, token};

/// How long a head or node may take to start. Only one that hangs takes so long.
const START_LIMIT: Duration = Duration::from_secs(60);
/// How long everything below a daemon may take to end once that was killed: as long as a guard takes at most.
const END_LIMIT: Duration = Duration::from_secs(20);

/// The pipe of a process that is gone is closed; only a process that could not be ended keeps one open.
pub const LAST_LINES: Duration = Duration::from_secs(2);

/// A head or node with its supervisor. Dropping it ends them and everything below, and waits for that.
pub struct TestProcess {
    name: Arc<str>,
    log: Arc<Log>,
    /// The test's end; none once the process was told to end.
    lifeline: Mutex<Option<OwnedFd>>,
    /// None once it has ended.
    supervisor: Mutex<Option<Child>>,
    /// The daemon, which cannot become another process of the same number.
    daemon: Option<(u32, OwnedFd)>,
}

/// How processes start.
pub struct Surroundings<'a> {
    /// The token of the cluster.
    pub token: &'a Token,
    /// Further variables.
    pub env: &'a [(String, String)],
    /// Takes what they write.
    pub log: &'a Arc<Log>,
}

impl TestProcess {
    /// Starts a process. It is there when [`TestProcess::wait_for_start`] has said so.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn start(
        name: &str,
        role: Role,
        machine: Option<&Machine>,
        around: &Surroundings<'_>,
    ) -> Result<TestProcess, Error> {
        entry::linked();
        let started = spawn(role, machine, around, &Arc::from(name));
        let (lifeline, child) =
            started.map_err(|error| Error::io(format!("starting the {name} of a test cluster"), &error))?;
        Ok(TestProcess {
            name: name.into(),
            log: around.log.clone(),
            lifeline: Mutex::new(Some(lifeline)),
            supervisor: Mutex::new(Some(child)),
            daemon: None,
        })
    }

    /// Waits until it is there.
    ///
    /// # Errors
    /// It has failed or hangs; the error has what it wrote.
    pub fn wait_for_start(&mut self) -> Result<Ready, Error> {
        let why = match self.hear() {
            Ok(Some(Started::Ready { pid, ready })) => match pidfd(pid) {
                Ok(fd) => {
                    self.daemon = Some((pid, fd));
                    return Ok(ready);
                }
                Err(error) => error.to_string(),
            },
            Ok(Some(Started::Failed(why))) => why,
            Ok(None) => "it has ended".to_owned(),
            Err(error) => error.to_string(),
        };
        // Then it has written everything.
        self.end();
        self.log.wait_for_end(Some(&self.name), LAST_LINES);
        let wrote = self.log.text(Some(&self.name));
        let wrote = if wrote.is_empty() { String::new() } else { format!("; it wrote:\n{}", wrote.trim_end()) };
        Err(Error::Failed {
            what: format!("starting the {} of a test cluster", self.name),
            why: format!("{why}{wrote}"),
        })
    }

    fn hear(&self) -> io::Result<Option<Started>> {
        let lifeline = self.lifeline.lock();
        let lifeline = lifeline.as_ref().ok_or_else(|| io::Error::other("it was ended"))?;
        let begun = Instant::now();
        loop {
            let left = START_LIMIT.saturating_sub(begun.elapsed());
            if left.is_zero() {
                return Err(io::Error::other(format!("it has said nothing for {} s", START_LIMIT.as_secs())));
            }
            let left = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
            match poll(&mut [PollFd::new(lifeline, PollFlags::IN)], Some(&left)) {
                Ok(0) | Err(rustix::io::Errno::INTR) => {}
                Ok(_) => return guard::receive(lifeline.as_fd()).map(|heard| heard.map(|(started, _)| started)),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// The daemon's process id.
    pub fn pid(&self) -> Option<u32> {
        self.daemon.as_ref().map(|(pid, _)| *pid)
    }

    /// Whether it was ended.
    pub fn has_ended(&self) -> bool {
        self.lifeline.lock().is_none()
    }

    /// Has the daemon killed with SIGKILL, and what is below it ended. [`TestProcess::end`] waits for that.
    pub fn begin_to_end(&self) {
        if let Some(lifeline) = self.lifeline.lock().take() {
            // To close it would not be enough: a process that the test has forked has it open, too.
            let _ = rustix::net::shutdown(&lifeline, rustix::net::Shutdown::Both);
        }
    }

    /// Kills the daemon with SIGKILL, and waits until everything below it is gone.
    pub fn end(&self) {
        self.begin_to_end();
        let Some(mut supervisor) = self.supervisor.lock().take() else { return };
        if !guard::ends_within(&mut supervisor, END_LIMIT) {
            let pid = supervisor.id();
            self.log.add(&self.name, &format!("(what it has started does not end; process {pid} waits for it)"));
        }
    }

    /// Stops the daemon and the worker processes, until the result is dropped.
    ///
    /// # Errors
    /// It has ended.
    pub fn pause(&self) -> Result<Paused, Error> {
        let failed =
            |error: rustix::io::Errno| Error::io(format!("pausing the {} of a test cluster", self.name), &error.into());
        let (pid, daemon) = self.daemon.as_ref().ok_or_else(|| failed(rustix::io::Errno::SRCH))?;
        let mut paused = Paused { processes: Vec::new() };
        // First: it starts no more worker processes then.
        paused.stop(daemon.try_clone().map_err(|error| Error::io("pausing", &error))?).map_err(failed)?;
        for pid in guard::kept_below(*pid) {
            // What has ended meanwhile needs not be stopped.
            if let Ok(process) = pidfd(pid) {
                let _ = paused.stop(process);
            }
        }
        Ok(paused)
    }
}

impl Drop for TestProcess {
    fn drop(&mut self) {
        self.end();
    }
}

/// Processes that stand still (SIGSTOP) until this is dropped.
#[must_use = "the node goes on when this is dropped"]
pub struct Paused {
    processes: Vec<OwnedFd>,
}

impl Paused {
    fn stop(&mut self, process: OwnedFd) -> rustix::io::Result<()> {
        pidfd_send_signal(&process, Signal::STOP)?;
        self.processes.push(process);
        Ok(())
    }
}

impl Drop for Paused {
    fn drop(&mut self) {
        for process in &self.processes {
            // One that has ended stands still no more.
            let _ = pidfd_send_signal(process, Signal::CONT);
        }
    }
}

impl std::fmt::Debug for Paused {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Paused({} processes)", self.processes.len())
    }
}

fn pidfd(pid: u32) -> rustix::io::Result<OwnedFd> {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or(rustix::io::Errno::SRCH)?;
    pidfd_open(pid, PidfdFlags::empty())
}

fn spawn(
    role: Role,
    machine: Option<&Machine>,
    around: &Surroundings<'_>,
    name: &Arc<str>,
) -> io::Result<(OwnedFd, Child)> {
    let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    let title = match role {
        Role::Head { .. } => "wingbeat-head",
        Role::Node { .. } => "wingbeat-node",
    };
    let start = start::to_memfd(&Start { role, token: around.token.reveal().to_owned() })?;
    let (output, written) = io::pipe()?;
    let inherit = [start.as_raw_fd(), theirs.as_raw_fd()];
    let machine = machine.map(Machine::namespace);
    let mut command = Command::new("/proc/self/exe");
    command
        .arg0(title)
        .env(entry::VARIABLE, format!("daemon:{},{}", inherit[0], inherit[1]))
        // Those of another cluster.
        .env_remove(join::ADDRESS_VARIABLE)
        .env_remove(token::TOKEN_VARIABLE)
        .env_remove(token::TOKEN_FILE_VARIABLE)
        .envs(around.env.iter().map(|(name, value)| (name, value)))
        .stdin(Stdio::null())
        .stdout(written.try_clone()?)
        .stderr(written)
        // A group of its own: Ctrl-C is for the test, whose end the supervisor sees.
        .process_group(0);
    // SAFETY: between fork and exec only plain system calls run, on open descriptors.
    unsafe {
        command.pre_exec(move || {
            for fd in inherit {
                rustix::io::fcntl_setfd(BorrowedFd::borrow_raw(fd), rustix::io::FdFlags::empty())?;
            }
            machine.map_or(Ok(()), |namespace| super::network::enter(BorrowedFd::borrow_raw(namespace)))
        });
    }
    let child = command.spawn()?;
    // It has the ends of the pipe that are written to.
    drop(command);
    around.log.follow(name, output)?;
    Ok((ours, child))
}
