//! The guard: one small process per node that starts all worker processes and outlives none of them.
//!
//! It is single-threaded and holds nothing, so starting a process from it is cheap, whatever the daemon's
//! size. It is the subreaper of everything below it: children of a dead worker process fall to it, and it
//! ends them. When its socket closes, because the daemon ended in whatever way, it ends all descendants and
//! then itself. So a daemon that is embedded in a driver leaves nothing behind either, not even after kill -9.
//!
//! It forks once at its start, so that its own death leaves nothing behind: the child does the work, and the parent
//! (`watch`) only waits for it. Both are subreapers. When the child is killed, all that it had started falls to the
//! parent, which ends it; when the parent is killed, the child ends all. Either way the daemon's socket closes, and the
//! daemon ends the node. Should both be killed at once, the daemon looks for what carries the mark of one of its worker
//! processes ([`end_marked`]).
//!
//! The socket carries one datagram a message, except that a launch's content is in a memory file beside it.

mod strays;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};
use rustix::process::{Pid, Signal, WaitOptions};
use serde::{Deserialize, Serialize};
use wingbeat_core::ProcessId;
use wingbeat_net::descriptors;

use self::strays::{DOUBT, Ended, Orphans, end_all, end_tree, is_left};
pub(crate) use self::strays::{end_marked, started_by};
use crate::start::{self, BELONGS, TUNABLES, VARIABLE};

/// A worker process to start.
#[derive(Serialize, Deserialize)]
pub(crate) struct Launch {
    pub process: ProcessId,
    /// Shown by `ps`.
    pub title: String,
    /// The whole environment.
    pub env: BTreeMap<String, String>,
    pub working_dir: Option<String>,
}

/// The descriptors of a launch, in the order in which they travel.
pub(crate) struct LaunchFds {
    /// The executable.
    pub executable: OwnedFd,
    /// What the process is told.
    pub start: OwnedFd,
    pub arena: OwnedFd,
    pub page: OwnedFd,
    pub stdout: OwnedFd,
    pub stderr: OwnedFd,
}

#[derive(Serialize, Deserialize)]
enum Request {
    Launch(Launch),
    /// End a worker process and its process group.
    Kill(ProcessId),
}

/// What the guard reports.
#[derive(Serialize, Deserialize, Debug)]
pub(crate) enum Report {
    Launched {
        process: ProcessId,
        pid: u32,
    },
    Failed {
        process: ProcessId,
        why: String,
    },
    Exited {
        process: ProcessId,
        code: Option<i32>,
        signal: Option<i32>,
    },
    /// Everything that the process had started is gone too; comes after its exit.
    Gone {
        process: ProcessId,
    },
}

/// The daemon's end.
pub(crate) struct Guard {
    socket: OwnedFd,
    child: parking_lot::Mutex<Option<std::process::Child>>,
    is_stopping: AtomicBool,
}

/// Whether what was asked of the guard has failed because it is not there any more.
pub(crate) fn has_ended(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset | io::ErrorKind::ConnectionRefused
    )
}

impl Guard {
    /// Starts the guard of this daemon. Reports are given to `report` on a thread of their own, until the
    /// guard ends.
    pub(crate) fn start(report: impl Fn(Report) + Send + 'static) -> io::Result<Guard> {
        let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        let number = theirs.as_raw_fd();
        let mut command = Command::new("/proc/self/exe");
        command
            .arg0("wingbeat-guard")
            .env(VARIABLE, format!("guard:{number}"))
            .envs(descriptors::usual_limit().map(|limit| (descriptors::USUAL, limit.to_string())))
            .stdin(Stdio::null())
            // A group of its own: Ctrl-C is for the driver, which then ends everything in order.
            .process_group(0);
        // SAFETY: between fork and exec only one `fcntl` runs, which is safe there; the descriptor is open.
        unsafe {
            command.pre_exec(move || {
                let fd = BorrowedFd::borrow_raw(number);
                rustix::io::fcntl_setfd(fd, rustix::io::FdFlags::empty())?;
                Ok(())
            });
        }
        let child = command.spawn()?;
        drop(theirs);
        let reading = ours.try_clone()?;
        std::thread::Builder::new().name("wingbeat-guard".into()).spawn(move || {
            while let Ok(Some((message, _))) = receive::<Report>(reading.as_fd()) {
                report(message);
            }
        })?;
        Ok(Guard { socket: ours, child: parking_lot::Mutex::new(Some(child)), is_stopping: AtomicBool::new(false) })
    }

    pub(crate) fn launch(&self, launch: Launch, fds: LaunchFds) -> io::Result<()> {
        // An environment can be larger than a datagram.
        let content = start::to_memfd(&Request::Launch(launch))?;
        let all = [&content, &fds.executable, &fds.start, &fds.arena, &fds.page, &fds.stdout, &fds.stderr];
        send_with(self.socket.as_fd(), &[IN_FILE], &all.map(AsFd::as_fd))
    }

    pub(crate) fn kill(&self, process: ProcessId) {
        let sent = send(self.socket.as_fd(), &Request::Kill(process));
        // A guard that was told to stop ends everything by itself.
        if let Err(error) = sent
            && !self.is_stopping.load(Ordering::Acquire)
        {
            tracing::warn!(%error, %process, "cannot ask the guard to end a worker process");
        }
    }

    /// How the guard ended by itself, if it did.
    pub(crate) fn exit_status(&self) -> Option<ExitStatus> {
        self.child.lock().as_mut()?.try_wait().ok()?
    }

    /// Its process id, while it was not told to stop.
    pub(crate) fn pid(&self) -> Option<u32> {
        self.child.lock().as_ref().map(std::process::Child::id)
    }

    /// Ends every worker process and the guard, and waits for it.
    pub(crate) fn stop(&self) {
        self.is_stopping.store(true, Ordering::Release);
        let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Write);
        // Held while it ends, so that everybody who stops it waits for that.
        let mut child = self.child.lock();
        if let Some(mut child) = child.take() {
            let _ = child.wait();
        }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.stop();
    }
}

pub(crate) fn send_with(socket: BorrowedFd<'_>, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(io::Error::other("too many descriptors for one message"));
    }
    sendmsg(socket, &[IoSlice::new(bytes)], &mut ancillary, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// The first byte of a datagram: what follows is the message, or the message is in the first descriptor.
const INLINE: u8 = 1;
const IN_FILE: u8 = 0;
/// The longest datagram.
const DATAGRAM: usize = 4096;

/// Sends a short message. It needs no descriptors, of which only so many may be on their way.
fn send<T: Serialize>(socket: BorrowedFd<'_>, message: &T) -> io::Result<()> {
    let mut bytes = bytes::BytesMut::new();
    bytes.extend_from_slice(&[INLINE]);
    wingbeat_core::codec::encode_message(message, &mut bytes).map_err(io::Error::other)?;
    if bytes.len() > DATAGRAM {
        let content = start::to_memfd(message)?;
        return send_with(socket, &[IN_FILE], &[content.as_fd()]);
    }
    send_with(socket, &bytes, &[])
}

/// The descriptor that comes with the next byte.
pub(crate) fn receive_fd(socket: &impl AsFd) -> io::Result<OwnedFd> {
    let mut byte = [0];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    recvmsg(socket, &mut [IoSliceMut::new(&mut byte)], &mut ancillary, RecvFlags::CMSG_CLOEXEC)?;
    let fd = ancillary.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
        _ => None,
    });
    fd.ok_or_else(|| io::Error::other("no descriptor came"))
}

/// The next message and the descriptors that came with it; none when the other side is gone.
fn receive<T: serde::de::DeserializeOwned>(socket: BorrowedFd<'_>) -> io::Result<Option<(T, Vec<OwnedFd>)>> {
    let mut bytes = [0; DATAGRAM];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let read = loop {
        match recvmsg(socket, &mut [IoSliceMut::new(&mut bytes)], &mut ancillary, RecvFlags::CMSG_CLOEXEC) {
            Err(rustix::io::Errno::INTR) => {}
            other => break other?,
        }
    };
    let mut fds: Vec<OwnedFd> = ancillary
        .drain()
        .filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(fds) => Some(fds),
            _ => None,
        })
        .flatten()
        .collect();
    match bytes[..read.bytes].split_first() {
        None => Ok(None),
        Some((&INLINE, rest)) => {
            let message = bytes::Bytes::copy_from_slice(rest);
            Ok(Some((wingbeat_core::codec::decode_message(message).map_err(io::Error::other)?, fds)))
        }
        Some(_) if fds.is_empty() => Err(io::Error::other("a message without content")),
        Some(_) => {
            let content = fds.remove(0);
            Ok(Some((start::from_memfd(content)?, fds)))
        }
    }
}

/// The guard process. Returns when everything below it is gone.
pub(crate) fn main(socket: OwnedFd) -> io::Result<()> {
    let score = keep_from_oom_killer();
    rustix::process::set_child_subreaper(Some(rustix::process::getpid()))?;
    let parent = rustix::process::pidfd_open(rustix::process::getpid(), rustix::process::PidfdFlags::empty())?;
    // SAFETY: this process has one thread, so that its copy is whole.
    match unsafe { libc::fork() } {
        0 => {
            // Inherited by no child of this one.
            rustix::process::set_child_subreaper(Some(rustix::process::getpid()))?;
            serve(&socket, &parent, &score)
        }
        child => {
            let child = Pid::from_raw(child).filter(|pid| pid.as_raw_nonzero().get() > 0);
            // The daemon must see the socket close with the child.
            drop(socket);
            watch(child.ok_or_else(io::Error::last_os_error)?)
        }
    }
}

/// Keeps the kernel from choosing the guard when memory runs out, where that is permitted. Answers with what worker processes get: the
/// kernel chooses them before those that are kept from it.
fn keep_from_oom_killer() -> Vec<u8> {
    let before = std::fs::read_to_string(OOM_SCORE).ok().and_then(|text| text.trim().parse::<i32>().ok());
    // Only root may.
    let _ = std::fs::write(OOM_SCORE, "-1000");
    // What the daemon has lowered for itself is not theirs.
    before.unwrap_or_default().max(0).to_string().into_bytes()
}

/// Has the kernel choose another process than this when memory runs out, as long as there is one. Where that is not permitted,
/// nothing changes.
pub fn spare_this_process() {
    let _ = std::fs::write(OOM_SCORE, "-900");
}

const OOM_SCORE: &str = "/proc/self/oom_score_adj";

/// Waits for the working guard, and ends what it leaves behind if it is killed.
fn watch(child: Pid) -> io::Result<()> {
    loop {
        match rustix::process::wait(WaitOptions::empty()) {
            Ok(Some((pid, status))) if pid == child => {
                if status.exit_status() == Some(0) {
                    return Ok(());
                }
                end_all();
                // As a shell has it, for the daemon to tell.
                let code = status.terminating_signal().map_or(1, |signal| 128 + signal);
                // SAFETY: ends this process, which has nothing to clean up.
                unsafe { libc::_exit(code) }
            }
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// The working guard; `parent` is the process that watches it.
fn serve(socket: &OwnedFd, parent: &OwnedFd, score: &[u8]) -> io::Result<()> {
    let exits = child_signals()?;
    let mut workers: BTreeMap<u32, ProcessId> = BTreeMap::new();
    let (mut leaving, mut orphans) = (Leaving::new(), Orphans::default());
    loop {
        let mut ready = [
            PollFd::new(socket, PollFlags::IN),
            PollFd::new(&exits, PollFlags::IN),
            PollFd::new(parent, PollFlags::IN),
        ];
        // What this process does not reap sends it no signal.
        let limit = (!leaving.is_empty()).then_some(&LOOK_EVERY);
        match poll(&mut ready, limit) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let [asked, exited, alone] = ready.map(|fd| !fd.revents().is_empty());
        if alone {
            break;
        }
        if exited {
            let mut drained = [0u8; 128];
            let _ = rustix::io::read(&exits, &mut drained);
        }
        if exited || !leaving.is_empty() {
            reap(&mut workers, &mut leaving, &mut orphans, socket);
        }
        if asked {
            match receive::<Request>(socket.as_fd()) {
                Ok(Some((Request::Launch(launch), fds))) => start_worker(launch, fds, score, &mut workers, socket),
                Ok(Some((Request::Kill(process), _))) => {
                    for (pid, _) in workers.iter().filter(|(_, known)| **known == process) {
                        end(*pid);
                    }
                }
                Ok(None) | Err(_) => break,
            }
        }
    }
    end_all();
    Ok(())
}

/// How often is looked whether what was told to end has ended, while there is some.
const LOOK_EVERY: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };

/// A descriptor that is readable when a child has ended.
fn child_signals() -> io::Result<OwnedFd> {
    use std::os::fd::FromRawFd;
    // SAFETY: plain calls on a local signal set; this process has one thread, whose mask this is.
    unsafe {
        let mut set = std::mem::zeroed::<libc::sigset_t>();
        libc::sigemptyset(&mut set);
        libc::sigaddset(&mut set, libc::SIGCHLD);
        if libc::sigprocmask(libc::SIG_BLOCK, &set, std::ptr::null_mut()) != 0 {
            return Err(io::Error::last_os_error());
        }
        let fd = libc::signalfd(-1, &set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK);
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(OwnedFd::from_raw_fd(fd))
    }
}

fn start_worker(
    launch: Launch,
    fds: Vec<OwnedFd>,
    score: &[u8],
    workers: &mut BTreeMap<u32, ProcessId>,
    socket: &OwnedFd,
) {
    let process = launch.process;
    let report = match spawn(launch, fds, score) {
        Ok(pid) => {
            workers.insert(pid, process);
            Report::Launched { process, pid }
        }
        Err(error) => Report::Failed { process, why: error.to_string() },
    };
    let _ = send(socket.as_fd(), &report);
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
        .env(VARIABLE, format!("worker:{},{},{}", inherit[0], inherit[1], inherit[2]))
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

/// Worker processes that have ended, and what they left behind and has been told to end.
type Leaving = BTreeMap<ProcessId, (Ended, Instant)>;

fn reap(workers: &mut BTreeMap<u32, ProcessId>, leaving: &mut Leaving, orphans: &mut Orphans, socket: &OwnedFd) {
    // Everything that has ended is reaped, orphans too.
    while let Ok(Some((pid, status))) = rustix::process::wait(WaitOptions::NOHANG) {
        let pid = pid.as_raw_nonzero().get() as u32;
        for (ended, _) in leaving.values_mut() {
            ended.remove(&pid);
        }
        if let Some(process) = workers.remove(&pid) {
            leaving.insert(process, (Ended::new(), Instant::now()));
            let status = std::process::ExitStatus::from_raw(status.as_raw());
            let report = Report::Exited { process, code: status.code(), signal: status.signal() };
            let _ = send(socket.as_fd(), &report);
        }
    }
    // Not everything falls to this process: the kernel reaps what was in a PID namespace, and the children of those that
    // ignore SIGCHLD, and a parent may have been faster than its end.
    for (ended, since) in leaving.values_mut() {
        if !ended.is_empty() {
            // What these have started is in doubt from now on, and not from the end of the worker process.
            *since = Instant::now();
        }
        ended.retain(|pid, began| is_left(*pid, *began));
    }
    if !leaving.values().any(|(ended, _)| ended.is_empty()) {
        return;
    }
    // What was started while the others were being ended.
    let (mut left, is_in_doubt) = orphans.by_process(workers);
    leaving.retain(|process, (ended, since)| {
        if ended.is_empty() {
            for pid in left.remove(process).unwrap_or_default() {
                *since = Instant::now();
                end_tree(pid, ended);
            }
        }
        // Others may leave new ones behind for ever, of which it is unknown whose they are.
        let is_gone = ended.is_empty() && (!is_in_doubt || since.elapsed() > DOUBT);
        if is_gone {
            let _ = send(socket.as_fd(), &Report::Gone { process: *process });
        }
        !is_gone
    });
}

/// Ends a worker process and whatever is in its process group.
fn end(pid: u32) {
    if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
        let _ = rustix::process::kill_process_group(pid, Signal::KILL);
        let _ = rustix::process::kill_process(pid, Signal::KILL);
    }
}
