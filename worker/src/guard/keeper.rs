//! A keeper: the parent of one worker process, which nothing that this starts can leave.
//!
//! The guard forks one for each worker process. It is a subreaper, so that whatever the worker process starts stays below it:
//! in another session or process group, with its parents dead, its environment cleared or in the middle of becoming another
//! program. It ends all of that when the worker process has ended, and says when it is gone; and also when the guard is gone.

use std::ffi::CStr;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};
use rustix::process::{Pid, Signal, WaitOptions, WaitStatus};
use wingbeat_core::ProcessId;
use wingbeat_core::limits::limit;
use wingbeat_net::descriptors;

use super::strays::{children_of, end_all, end_tree};
use super::{Launch, OOM_SCORE, Report, SEND_PAUSE, send_soon};
use crate::start::{self, BELONGS, TUNABLES, VARIABLE};

/// What a keeper has of its guard.
pub(super) struct Surroundings<'a> {
    /// Takes its reports.
    pub reports: &'a OwnedFd,
    /// The guard itself.
    pub guard: &'a OwnedFd,
    /// Its process id, from which alone a keeper takes orders.
    pub guard_pid: u32,
    /// Whether the kernel may choose a worker process when memory runs out.
    pub score: &'a [u8],
    /// What a keeper must not have: others wait for their end.
    pub not_inherited: &'a [BorrowedFd<'a>],
}

/// Starts a keeper, and does not wait until it has started its worker process: the folder in which that is to begin, or its program, may be
/// in a file system that does not answer. `others` are what else is being started.
pub(super) fn start(
    launch: Launch,
    fds: Vec<OwnedFd>,
    around: &Surroundings<'_>,
    others: &[BorrowedFd<'_>],
) -> io::Result<(Pid, Starting)> {
    let (answers, answer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
    rustix::io::ioctl_fionbio(&answers, true)?;
    let folder = launch.working_dir.clone();
    // SAFETY: this process has one thread, so that its copy is whole.
    match unsafe { libc::fork() } {
        ..0 => Err(io::Error::last_os_error()),
        0 => {
            drop(answers);
            for fd in around.not_inherited.iter().chain(others) {
                // SAFETY: this copy of the guard never returns to the code that owns it.
                unsafe { rustix::io::close(fd.as_raw_fd()) };
            }
            let is_in_order = keep(launch, fds, answer, around).is_ok();
            // SAFETY: ends this process, which has nothing to clean up.
            unsafe { libc::_exit(i32::from(!is_in_order)) }
        }
        keeper => {
            let keeper = Pid::from_raw(keeper).ok_or_else(|| io::Error::other("fork answered with no process"))?;
            drop(answer);
            let until = Instant::now() + *START_LIMIT;
            Ok((keeper, Starting { answers: File::from(answers), said: Vec::new(), until, folder, is_killed: false }))
        }
    }
}

/// A keeper has so long to start its worker process: 30 s, `WINGBEAT_SPAWN_MS`.
static START_LIMIT: LazyLock<Duration> = LazyLock::new(|| limit("WINGBEAT_SPAWN_MS", Duration::from_secs(30)));

/// A keeper that has not said yet what it has started.
pub(super) struct Starting {
    answers: File,
    /// What it has said so far.
    said: Vec<u8>,
    until: Instant,
    /// In which its worker process is to begin.
    folder: Option<String>,
    /// It was killed: nobody waits for a worker process any more.
    pub(super) is_killed: bool,
}

/// What became of such a keeper.
pub(super) enum Begun {
    NotYet,
    /// It has started this process.
    Worker(Pid),
    /// It has not, and ends.
    Failed(String),
    /// It was killed before it has answered.
    Killed,
    /// It does not answer.
    TooLate(String),
}

impl Starting {
    /// Readable when there is news.
    pub(super) fn answers(&self) -> BorrowedFd<'_> {
        self.answers.as_fd()
    }

    /// When it is too late; never, of one that was killed.
    pub(super) fn until(&self) -> Option<Instant> {
        (!self.is_killed).then_some(self.until)
    }

    /// What it has said. `has_ended` says that it will say no more, even where what it had forked still has its end of the pipe.
    pub(super) fn look(&mut self, has_ended: bool) -> Begun {
        let is_over = loop {
            let mut bytes = [0; 512];
            match self.answers.read(&mut bytes) {
                Ok(0) => break true,
                Ok(count) => self.said.extend_from_slice(&bytes[..count]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => break error.kind() != io::ErrorKind::WouldBlock,
            }
        };
        let said = String::from_utf8_lossy(&self.said);
        let worker = |pid: &str| pid.parse().ok().and_then(Pid::from_raw);
        match said.split_once(' ') {
            _ if !is_over && !has_ended => match self.until() {
                Some(until) if until <= Instant::now() => Begun::TooLate(self.why_too_late()),
                _ => Begun::NotYet,
            },
            Some(("pid", pid)) => worker(pid).map_or(Begun::Killed, Begun::Worker),
            Some(("error", why)) => Begun::Failed(why.to_owned()),
            _ => Begun::Killed,
        }
    }

    fn why_too_late(&self) -> String {
        let folder = self.folder.as_ref().map(|folder| format!("its working directory {folder}, or "));
        format!(
            "it has not begun after {:?}: {}its program is in a file system that does not answer",
            *START_LIMIT,
            folder.unwrap_or_default()
        )
    }
}

/// The keeper process.
fn keep(launch: Launch, fds: Vec<OwnedFd>, answer: OwnedFd, around: &Surroundings<'_>) -> io::Result<()> {
    use std::io::Write;
    let mut answer = File::from(answer);
    let process = launch.process;
    let started = begin().and_then(|signals| Ok((signals, spawn(launch, fds, around.score)?)));
    let (signals, worker) = match started {
        Ok(started) => started,
        Err(error) => {
            let _ = answer.write_all(format!("error {error}").as_bytes());
            return Ok(());
        }
    };
    // In one piece.
    let told = answer.write_all(format!("pid {worker}").as_bytes());
    drop(answer);
    let status = match told {
        Ok(()) => wait_for(worker, &signals, around)?,
        // The guard is gone.
        Err(_) => None,
    };
    let report = |report| send_soon(around.reports.as_fd(), &report);
    let told = status.map_or(Ok(()), |status| report(exited(process, status)));
    // Also when the guard is gone and hears nothing.
    let left = end_all();
    // The guard reports the end of a worker process whose keeper could not, and ended so.
    told?;
    report(Report::Gone { process, left })
}

/// How a worker process ended.
pub(super) fn exited(process: ProcessId, status: WaitStatus) -> Report {
    Report::Exited { process, code: status.exit_status(), signal: status.terminating_signal() }
}

fn begin() -> io::Result<OwnedFd> {
    rustix::process::set_child_subreaper(Some(rustix::process::getpid()))?;
    rustix::thread::set_name(KEEPER)?;
    signals(&[libc::SIGCHLD, end_signal()])
}

/// Whether a child of this process is a keeper, by its name.
fn is_keeper(pid: u32) -> bool {
    let name = std::fs::read(format!("/proc/{pid}/comm"));
    name.is_ok_and(|name| name.trim_ascii_end() == KEEPER.to_bytes())
}

/// The worker processes of the node daemon `pid`, and what they have started: all that is below its keepers.
#[cfg(feature = "testing")]
pub(crate) fn kept_below(pid: u32) -> Vec<u32> {
    use super::strays::descendants_of;
    descendants_of(pid).into_iter().filter(|pid| is_keeper(*pid)).flat_map(descendants_of).collect()
}

/// What a keeper calls itself, for the guard, for the guard's parent, and for whoever looks at `ps`.
const KEEPER: &CStr = c"wingbeat-keeper";

/// Ends every descendant, as [`end_all`], for the guard and its parent. Keepers are asked to, and end what is below them: if a keeper
/// were ended before that, and this process killed on its way, nobody would be left to do it.
pub(super) fn end_all_by_keepers() {
    let begun = Instant::now();
    let keepers = || children_of(std::process::id()).into_iter().partition::<Vec<u32>, _>(|pid| is_keeper(*pid));
    for keeper in keepers().0 {
        // SAFETY: plain calls on a child that nobody else reaps.
        unsafe {
            libc::kill(keeper as i32, end_signal());
            libc::kill(keeper as i32, libc::SIGCONT);
        }
    }
    loop {
        let (keepers, strays) = keepers();
        for stray in strays {
            end_tree(stray);
        }
        let left = KEEPERS_LIMIT.saturating_sub(begun.elapsed());
        let Some(keeper) = keepers.first().and_then(|pid| Pid::from_raw(*pid as i32)).filter(|_| !left.is_zero())
        else {
            break;
        };
        match rustix::process::pidfd_open(keeper, rustix::process::PidfdFlags::empty()) {
            Ok(end) => {
                let left = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
                let _ = poll(&mut [PollFd::new(&end, PollFlags::IN)], Some(&left));
            }
            // Descriptors are short.
            Err(_) => std::thread::sleep(SEND_PAUSE),
        }
        while let Ok(Some(_)) = rustix::process::wait(WaitOptions::NOHANG) {}
    }
    end_all();
}

/// So long keepers may take, of which each gives a second to what it may not end.
const KEEPERS_LIMIT: Duration = Duration::from_secs(5);

/// With this, the guard asks a keeper to end its worker process. Several that are pending are not merged, as two SIGTERM are: one
/// of somebody else cannot take the place of the guard's.
pub(super) fn end_signal() -> i32 {
    libc::SIGRTMIN()
}

/// Waits until the worker process has ended, and ends it if the guard asks for that. None if the guard is gone.
fn wait_for(worker: u32, signals: &OwnedFd, around: &Surroundings<'_>) -> io::Result<Option<WaitStatus>> {
    loop {
        let mut ready = [PollFd::new(signals, PollFlags::IN), PollFd::new(around.guard, PollFlags::IN)];
        match poll(&mut ready, None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let [signalled, alone] = ready.map(|fd| !fd.revents().is_empty());
        if alone {
            return Ok(None);
        }
        // A sender that the kernel does not know any more is 0.
        let is_order =
            |signal: &Signalled| signal.number == end_signal() && [around.guard_pid, 0].contains(&signal.sender);
        if signalled && take(signals)?.iter().any(is_order) {
            end(worker);
        }
        // Everything that has ended is reaped, also what has lost its parent.
        while let Ok(Some((pid, status))) = rustix::process::wait(WaitOptions::NOHANG) {
            if pid.as_raw_nonzero().get() as u32 == worker {
                return Ok(Some(status));
            }
        }
    }
}

/// Keeps these signals from this process until they are taken.
pub(super) fn block(numbers: &[i32]) -> io::Result<libc::sigset_t> {
    // SAFETY: plain calls on a local signal set; this process has one thread, whose mask this is.
    unsafe {
        let mut set = std::mem::zeroed::<libc::sigset_t>();
        libc::sigemptyset(&mut set);
        for number in numbers {
            libc::sigaddset(&mut set, *number);
        }
        if libc::sigprocmask(libc::SIG_BLOCK, &set, std::ptr::null_mut()) != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(set)
    }
}

/// A descriptor that is readable when one of these signals has come.
pub(super) fn signals(numbers: &[i32]) -> io::Result<OwnedFd> {
    let set = block(numbers)?;
    // SAFETY: the set is initialised, and a descriptor that the kernel has just made is nobody else's.
    unsafe {
        let fd = libc::signalfd(-1, &set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK);
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(OwnedFd::from_raw_fd(fd))
    }
}

/// A signal that has come, and from which process.
pub(super) struct Signalled {
    number: i32,
    sender: u32,
}

/// The signals that have come.
pub(super) fn take(signals: &OwnedFd) -> io::Result<Vec<Signalled>> {
    use std::mem::offset_of;
    const SIZE: usize = size_of::<libc::signalfd_siginfo>();
    const NUMBER: usize = offset_of!(libc::signalfd_siginfo, ssi_signo);
    const SENDER: usize = offset_of!(libc::signalfd_siginfo, ssi_pid);
    let mut bytes = [0; 4 * SIZE];
    let count = match rustix::io::read(signals, &mut bytes) {
        Ok(count) => count,
        Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => 0,
        Err(error) => return Err(error.into()),
    };
    let field = |info: &[u8], at: usize| u32::from_ne_bytes([info[at], info[at + 1], info[at + 2], info[at + 3]]);
    let signalled = |info| Signalled { number: field(info, NUMBER) as i32, sender: field(info, SENDER) };
    Ok(bytes[..count].chunks_exact(SIZE).map(signalled).collect())
}

fn spawn(launch: Launch, fds: Vec<OwnedFd>, score: &[u8]) -> io::Result<u32> {
    let [executable, start, arena, page, stdout, stderr] = <[OwnedFd; 6]>::try_from(fds)
        .map_err(|fds| io::Error::other(format!("a launch came with {} descriptors", fds.len())))?;
    let inherit = [start.as_raw_fd(), arena.as_raw_fd(), page.as_raw_fd()];
    let mut command = Command::new(format!("/proc/self/fd/{}", executable.as_raw_fd()));
    command
        .arg0(&launch.title)
        .env_clear()
        .env(TUNABLES.0, TUNABLES.1)
        .envs(&launch.env)
        .env(BELONGS, launch.process.to_string())
        .env(VARIABLE, start::named("worker", &inherit))
        .envs(descriptors::usual_limit().map(|limit| (descriptors::USUAL, limit.to_string())))
        .stdin(Stdio::null())
        .stdout(File::from(stdout))
        .stderr(File::from(stderr))
        .process_group(0);
    if let Some(dir) = launch.working_dir.filter(|dir| std::path::Path::new(dir).is_dir()) {
        command.current_dir(dir);
    }
    let score = score.to_vec();
    // SAFETY: between fork and exec only plain system calls run, on open descriptors, constants and a local set.
    unsafe {
        command.pre_exec(move || {
            for fd in inherit {
                rustix::io::fcntl_setfd(BorrowedFd::borrow_raw(fd), rustix::io::FdFlags::empty())?;
            }
            // User code is what the kernel should choose when memory runs out. Everybody may raise his own.
            if let Ok(file) = rustix::fs::open(OOM_SCORE, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty()) {
                let _ = rustix::io::write(&file, &score);
            }
            let mut set = std::mem::zeroed::<libc::sigset_t>();
            libc::sigemptyset(&mut set);
            libc::sigprocmask(libc::SIG_SETMASK, &set, std::ptr::null_mut());
            Ok(())
        });
    }
    let child = command.spawn()?;
    // Dropping a `Child` does not end it; this process reaps it by signal.
    Ok(child.id())
}

/// Ends a worker process that was not reaped, and whatever is in its process group.
fn end(pid: u32) {
    if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
        let _ = rustix::process::kill_process_group(pid, Signal::KILL);
        let _ = rustix::process::kill_process(pid, Signal::KILL);
    }
}
