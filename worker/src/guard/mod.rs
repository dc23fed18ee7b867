//! The guard: one small process per node that starts all worker processes and outlives none of them.
//!
//! It is single-threaded and holds nothing, so starting a process from it is cheap, whatever the daemon's
//! size. When its socket closes, because the daemon ended in whatever way, it ends all descendants and
//! then itself. So a daemon that is embedded in a driver leaves nothing behind either, not even after kill -9.
//!
//! ```text
//!   daemon ── watch ── guard ─┬─ keeper ── worker process ── what user code starts
//!                             └─ keeper ── …
//! ```
//!
//! All between the daemon and a worker process are subreapers: whatever loses its parent falls to the nearest of them. So
//! nothing that user code starts leaves its keeper, which ends it after the worker process. Whichever of them is killed, the
//! one above it or the one below it ends the rest:
//!
//! | killed | who ends what is left |
//! |---|---|
//! | worker process | its keeper |
//! | keeper | the guard: what falls to it and is no keeper |
//! | guard | its parent (`watch`), and each keeper |
//! | watch | the guard |
//! | watch and guard | each keeper |
//! | all three at once | the daemon: what carries the mark of one of its worker processes ([`end_marked`]) |
//! | daemon, or daemon and guard | the guard and keepers, or watch and keepers. Also where what the daemon has forked goes on with its sockets |
//! | daemon, guard and watch | each keeper |
//!
//! A keeper is ended last of what is below the guard: whoever of those above is killed while it ends the rest, they go on.
//! When the guard or its parent is killed, the daemon's socket closes, and the daemon ends the node.
//!
//! All of them have the daemon's listening sockets, too: where the daemon was killed, its address refuses who dials only when the last of
//! them has ended, and with it what runs on the node. The head takes a refusal for the end of the node, and starts its actors elsewhere.
//!
//! The socket carries one datagram a message, except that a launch's content is in a memory file beside it.

mod keeper;
mod strays;

use std::collections::{BTreeMap, HashMap};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};
use rustix::process::{Pid, Signal, WaitOptions, WaitStatus};
use serde::{Deserialize, Serialize};
use wingbeat_core::ProcessId;
use wingbeat_net::descriptors;

#[cfg(feature = "testing")]
pub(crate) use self::keeper::kept_below;
use self::keeper::{Begun, Starting, Surroundings, end_all_by_keepers};
use self::strays::{NOT_PERMITTED_LIMIT, children_of, descendants_of, end_tree};
pub(crate) use self::strays::{end_marked, started_by};
use crate::start::{self, VARIABLE};

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
        /// But for these, which are another user's and may not be ended.
        left: Vec<u32>,
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

/// Whether what was asked of the guard has failed because it has not taken in what was asked before, or the kernel is short of memory.
pub(crate) fn takes_nothing_now(error: &io::Error) -> bool {
    use rustix::io::Errno;
    matches!(Errno::from_io_error(error), Some(Errno::AGAIN | Errno::NOBUFS | Errno::NOMEM))
}

impl Guard {
    /// Starts the guard of this daemon, which listens with `listening`. Reports are given to `report` on a thread of their own, until the
    /// guard ends.
    pub(crate) fn start(listening: &[BorrowedFd<'_>], report: impl Fn(Report) + Send + 'static) -> io::Result<Guard> {
        let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        let numbers: Vec<RawFd> =
            std::iter::once(theirs.as_raw_fd()).chain(listening.iter().map(AsRawFd::as_raw_fd)).collect();
        let mut command = Command::new("/proc/self/exe");
        command
            .arg0("wingbeat-guard")
            .env(VARIABLE, start::named("guard", &numbers))
            .envs(descriptors::usual_limit().map(|limit| (descriptors::USUAL, limit.to_string())))
            .stdin(Stdio::null())
            // A group of its own: Ctrl-C is for the driver, which then ends everything in order.
            .process_group(0);
        // SAFETY: between fork and exec only `fcntl` runs, which is safe there; the descriptors are open.
        unsafe {
            command.pre_exec(move || {
                for number in &numbers {
                    rustix::io::fcntl_setfd(BorrowedFd::borrow_raw(*number), rustix::io::FdFlags::empty())?;
                }
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
        send_as_with(self.socket.as_fd(), &[IN_FILE], &all.map(AsFd::as_fd), SendFlags::DONTWAIT)
    }

    /// Asks the guard to end a worker process; as often as one likes. Never waits.
    ///
    /// # Errors
    /// [`takes_nothing_now`]: it has not heard it, and is to be asked again.
    pub(crate) fn kill(&self, process: ProcessId) -> io::Result<()> {
        match send_as(self.socket.as_fd(), &Request::Kill(process), SendFlags::DONTWAIT) {
            // A guard that was told to stop ends everything by itself, and so does the parent of one that has ended.
            Err(error) if has_ended(&error) || self.is_stopping.load(Ordering::Acquire) => Ok(()),
            sent => sent,
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

    /// Ends every worker process and the guard, and waits for it; after [`STOP_LIMIT`] not any longer. Whether they have ended. Blocks.
    pub(crate) fn stop(&self) -> bool {
        self.is_stopping.store(true, Ordering::Release);
        let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Write);
        // Held while it ends, so that everybody who stops it waits for that.
        let mut child = self.child.lock();
        let Some(mut child) = child.take() else { return true };
        let has_ended = ends_within(&mut child, STOP_LIMIT);
        if !has_ended {
            let (guard, left) = (child.id(), descendants_of(child.id()));
            tracing::warn!(
                "these processes do not end, and wingbeat-guard (pid {guard}) waits for them: {left:?}. The kernel holds on \
                 to them, or they are another user's"
            );
        }
        has_ended
    }
}

/// Whether a child ends within the limit; then it is reaped.
pub(crate) fn ends_within(child: &mut std::process::Child, limit: Duration) -> bool {
    let begun = Instant::now();
    let fd = rustix::process::pidfd_open(Pid::from_child(child), rustix::process::PidfdFlags::empty());
    loop {
        // An error says that the kernel has reaped it, as where SIGCHLD is ignored.
        if !matches!(child.try_wait(), Ok(None)) {
            return true;
        }
        let left = limit.saturating_sub(begun.elapsed());
        if left.is_zero() {
            return false;
        }
        match &fd {
            Ok(fd) => {
                let left = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
                let _ = poll(&mut [PollFd::new(fd, PollFlags::IN)], Some(&left));
            }
            Err(_) => std::thread::sleep(Duration::from_millis(10)),
        }
    }
}

/// A guard that was told to stop has so long: more than the kernel needs for the memory of large processes.
const STOP_LIMIT: Duration = Duration::from_secs(10);

impl Drop for Guard {
    fn drop(&mut self) {
        self.stop();
    }
}

pub(crate) fn send_with(socket: BorrowedFd<'_>, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    send_as_with(socket, bytes, fds, SendFlags::empty())
}

fn send_as_with(socket: BorrowedFd<'_>, bytes: &[u8], fds: &[BorrowedFd<'_>], flags: SendFlags) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(io::Error::other("too many descriptors for one message"));
    }
    sendmsg(socket, &[IoSlice::new(bytes)], &mut ancillary, SendFlags::NOSIGNAL | flags)?;
    Ok(())
}

/// The first byte of a datagram: what follows is the message, or the message is in the first descriptor.
const INLINE: u8 = 1;
const IN_FILE: u8 = 0;
/// The longest datagram.
const DATAGRAM: usize = 4096;

/// Sends a short message. It needs no descriptors, of which only so many may be on their way.
pub(crate) fn send<T: Serialize>(socket: BorrowedFd<'_>, message: &T) -> io::Result<()> {
    send_as(socket, message, SendFlags::empty())
}

fn send_as<T: Serialize>(socket: BorrowedFd<'_>, message: &T, flags: SendFlags) -> io::Result<()> {
    let mut bytes = bytes::BytesMut::new();
    bytes.extend_from_slice(&[INLINE]);
    wingbeat_core::codec::encode_message(message, &mut bytes).map_err(io::Error::other)?;
    if bytes.len() > DATAGRAM {
        let content = start::to_memfd(message)?;
        return send_as_with(socket, &[IN_FILE], &[content.as_fd()], flags);
    }
    send_as_with(socket, &bytes, &[], flags)
}

/// As [`send`], where the kernel may be short of memory for a moment: nobody asks again for what was not said.
fn send_soon<T: Serialize>(socket: BorrowedFd<'_>, message: &T) -> io::Result<()> {
    for _ in 0..SEND_TRIES {
        match send(socket, message) {
            Err(error) if !has_ended(&error) => std::thread::sleep(SEND_PAUSE),
            sent => return sent,
        }
    }
    send(socket, message)
}

const SEND_TRIES: u32 = 100;
const SEND_PAUSE: Duration = Duration::from_millis(10);

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
pub(crate) fn receive<T: serde::de::DeserializeOwned>(socket: BorrowedFd<'_>) -> io::Result<Option<(T, Vec<OwnedFd>)>> {
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

/// The guard process. Returns when everything below it is gone. `_listening` are the daemon's sockets, which are held and not used.
pub(crate) fn main(socket: OwnedFd, _listening: Vec<OwnedFd>) -> io::Result<()> {
    // Who started the daemon may ignore SIGCHLD, which is inherited: the kernel would reap what ends, and say nothing of it.
    // SAFETY: sets what is usual; there is one thread.
    if unsafe { libc::signal(libc::SIGCHLD, libc::SIG_DFL) } == libc::SIG_ERR {
        return Err(io::Error::last_os_error());
    }
    // A supervisor sends such signals to all processes of a service or job. The daemon decides what they mean: this ends with it, and what
    // user code does about them is not cut short.
    keeper::block(&[libc::SIGTERM, libc::SIGINT, libc::SIGHUP, keeper::end_signal()])?;
    let Some(daemon) = daemon_at(&socket)? else { return Ok(()) };
    let score = keep_from_oom_killer();
    rustix::process::set_child_subreaper(Some(rustix::process::getpid()))?;
    let parent = rustix::process::pidfd_open(rustix::process::getpid(), rustix::process::PidfdFlags::empty())?;
    // SAFETY: this process has one thread, so that its copy is whole.
    match unsafe { libc::fork() } {
        ..0 => Err(io::Error::last_os_error()),
        0 => {
            rustix::process::set_child_subreaper(Some(rustix::process::getpid()))?;
            serve(&socket, [&daemon, &parent], &score)
        }
        child => {
            // The daemon must see the socket close with the child.
            drop((socket, daemon));
            watch(Pid::from_raw(child).ok_or_else(|| io::Error::other("fork answered with no process"))?)
        }
    }
}

/// The daemon, which has started this process and made the socket. None if it has ended.
///
/// Its end is not only that of the socket: what it had forked may go on as the same program, and hold that open.
fn daemon_at(socket: &OwnedFd) -> io::Result<Option<OwnedFd>> {
    let pid = rustix::net::sockopt::socket_peercred(socket)?.pid;
    match rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()) {
        // Opened before the look: what the descriptor names is no other process that has its number by now.
        Ok(daemon) => Ok((rustix::process::getppid() == Some(pid)).then_some(daemon)),
        Err(rustix::io::Errno::SRCH) => Ok(None),
        Err(error) => Err(error.into()),
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
                end_all_by_keepers();
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

/// The working guard; `above` are the daemon and the process that watches the guard. Nothing in here waits for a keeper: one may stand in a
/// file system that does not answer.
fn serve(socket: &OwnedFd, above: [&OwnedFd; 2], score: &[u8]) -> io::Result<()> {
    let exits = keeper::signals(&[libc::SIGCHLD])?;
    let guard = rustix::process::pidfd_open(rustix::process::getpid(), rustix::process::PidfdFlags::empty())?;
    let (said, reports) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    rustix::io::ioctl_fionbio(&said, true)?;
    let around = Surroundings {
        reports: &reports,
        guard: &guard,
        guard_pid: std::process::id(),
        score,
        not_inherited: &[socket.as_fd(), above[0].as_fd(), above[1].as_fd(), exits.as_fd(), said.as_fd()],
    };
    let mut keepers = Keepers::default();
    loop {
        let for_it = [socket, &exits, above[0], above[1], &said].map(AsFd::as_fd);
        let answers = keepers.starting().map(Starting::answers);
        let mut ready: Vec<PollFd<'_>> =
            for_it.into_iter().chain(answers).map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
        match poll(&mut ready, keepers.look_again_in().as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let [asked, exited, alone, unwatched] = [0, 1, 2, 3].map(|at| !ready[at].revents().is_empty());
        if alone || unwatched {
            break;
        }
        if exited {
            keeper::take(&exits)?;
        }
        // What a keeper has said before it ended is heard before its end.
        let ended = if exited || keepers.are_killed() { reap() } else { HashMap::new() };
        let mut heard = Vec::new();
        while let Ok(Some((report, _))) = receive::<Report>(said.as_fd()) {
            keepers.hear(&report);
            heard.push(report);
        }
        // What a keeper has started it has said before everything else.
        let mut reports = keepers.begun(&ended);
        reports.append(&mut heard);
        reports.extend(keepers.ended(&ended));
        if asked {
            match receive::<Request>(socket.as_fd()) {
                Ok(Some((Request::Launch(launch), fds))) => reports.extend(keepers.start(launch, fds, &around)),
                Ok(Some((Request::Kill(process), _))) => keepers.kill(process),
                Ok(None) | Err(_) => break,
            }
        }
        for report in reports {
            match send_soon(socket.as_fd(), &report) {
                Err(error) if !has_ended(&error) => return Err(error),
                // A daemon that is gone asks for nothing more.
                _ => {}
            }
        }
    }
    // Nobody hears keepers any more.
    drop(said);
    keepers.kill_starting();
    end_all_by_keepers();
    Ok(())
}

/// How often is looked whether what was told to end has ended, while there is some: what this process does not reap sends it
/// no signal.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Everything that has ended and had this process as its parent.
fn reap() -> HashMap<Pid, WaitStatus> {
    std::iter::from_fn(|| rustix::process::wait(WaitOptions::NOHANG).ok().flatten()).collect()
}

/// The keepers of a guard. Whatever else has it as its parent was below one that was killed.
#[derive(Default)]
struct Keepers {
    alive: HashMap<Pid, KeptProcess>,
    /// What keepers that were killed have left is being ended.
    killed: Vec<KeptProcess>,
    /// Since when nothing of that is left but what may not be ended.
    waiting: Option<Instant>,
}

/// A worker process, as its keeper reports.
struct KeptProcess {
    process: ProcessId,
    /// While its keeper has not said what it has started.
    starting: Option<Starting>,
    /// Its process id; none if it is not known to have begun.
    pid: Option<Pid>,
    has_exited: bool,
    is_gone: bool,
}

impl Keepers {
    /// Has a process started; why that has failed, if it has at once.
    fn start(&mut self, launch: Launch, fds: Vec<OwnedFd>, around: &Surroundings<'_>) -> Option<Report> {
        let process = launch.process;
        let others: Vec<BorrowedFd<'_>> = self.starting().map(Starting::answers).collect();
        match keeper::start(launch, fds, around, &others) {
            Ok((keeper, starting)) => {
                let starting = Some(starting);
                let kept = KeptProcess { process, starting, pid: None, has_exited: false, is_gone: false };
                self.alive.insert(keeper, kept);
                None
            }
            Err(error) => Some(Report::Failed { process, why: error.to_string() }),
        }
    }

    fn starting(&self) -> impl Iterator<Item = &Starting> {
        self.alive.values().filter_map(|kept| kept.starting.as_ref())
    }

    /// What keepers say that they have started, and which have not. These have ended.
    fn begun(&mut self, reaped: &HashMap<Pid, WaitStatus>) -> Vec<Report> {
        let mut reports = Vec::new();
        let failed = self.alive.extract_if(|keeper, kept| {
            let process = kept.process;
            let Some(starting) = &mut kept.starting else { return false };
            let failed = match starting.look(reaped.contains_key(keeper)) {
                Begun::NotYet => return false,
                Begun::Worker(pid) => {
                    kept.pid = Some(pid);
                    reports.push(Report::Launched { process, pid: pid.as_raw_nonzero().get() as u32 });
                    None
                }
                // Its end is reported when it has ended, with all that it may have started.
                Begun::Killed if starting.is_killed => None,
                Begun::Killed => Some("its keeper was killed".to_owned()),
                Begun::Failed(why) => Some(why),
                Begun::TooLate(why) => {
                    end_tree(keeper.as_raw_nonzero().get() as u32);
                    Some(why)
                }
            };
            kept.starting = None;
            let has_failed = failed.is_some();
            reports.extend(failed.map(|why| Report::Failed { process, why }));
            has_failed
        });
        // What such a keeper may have started falls to this process.
        let failed = failed.map(|(_, kept)| KeptProcess { has_exited: true, is_gone: true, ..kept });
        self.killed.extend(failed);
        reports
    }

    /// Has a keeper end its worker process, and ends one that has none yet. It cannot be another process by now: nobody else reaps it.
    fn kill(&mut self, process: ProcessId) {
        let Some((keeper, kept)) = self.alive.iter_mut().find(|(_, kept)| kept.process == process) else { return };
        let keeper = keeper.as_raw_nonzero().get();
        match &mut kept.starting {
            Some(starting) => {
                starting.is_killed = true;
                end_tree(keeper as u32);
            }
            // SAFETY: a plain call.
            None => drop(unsafe { libc::kill(keeper, keeper::end_signal()) }),
        }
    }

    /// Ends keepers that have no worker process yet, and may not hear that they are to end.
    fn kill_starting(&self) {
        for (keeper, _) in self.alive.iter().filter(|(_, kept)| kept.starting.is_some()) {
            end_tree(keeper.as_raw_nonzero().get() as u32);
        }
    }

    fn are_killed(&self) -> bool {
        !self.killed.is_empty()
    }

    /// When something is to be looked at of which nothing is heard.
    fn look_again_in(&self) -> Option<Timespec> {
        let until = self.starting().filter_map(Starting::until).min();
        let left = until.map(|until| until.saturating_duration_since(Instant::now()));
        let looks = self.are_killed().then_some(LOOK_EVERY);
        let next = left.into_iter().chain(looks).min()?;
        Some(Timespec { tv_sec: next.as_secs() as i64, tv_nsec: next.subsec_nanos().into() })
    }

    fn hear(&mut self, report: &Report) {
        let (Report::Exited { process, .. } | Report::Gone { process, .. }) = report else { return };
        if let Some(kept) = self.alive.values_mut().find(|kept| kept.process == *process) {
            kept.has_exited |= matches!(report, Report::Exited { .. });
            kept.is_gone |= matches!(report, Report::Gone { .. });
        }
    }

    /// These have ended. Ends what keepers have left that were killed, and answers with what they would have reported.
    fn ended(&mut self, reaped: &HashMap<Pid, WaitStatus>) -> Vec<Report> {
        let ended = reaped.keys().filter_map(|pid| self.alive.remove(pid));
        self.killed.extend(ended.filter(|kept| !kept.is_gone));
        if self.killed.is_empty() {
            return Vec::new();
        }
        let is_keeper = |pid: &u32| Pid::from_raw(*pid as i32).is_some_and(|pid| self.alive.contains_key(&pid));
        let strays: Vec<u32> = children_of(std::process::id()).into_iter().filter(|pid| !is_keeper(pid)).collect();
        let left: Vec<u32> = strays.iter().copied().filter(|pid| !end_tree(*pid)).collect();
        // A worker process has exited, whatever becomes of what it has started.
        let killed = self.killed.iter_mut().filter(|kept| !kept.has_exited);
        let mut reports: Vec<Report> = killed.filter_map(|kept| kept.exited(reaped)).collect();
        if left.len() < strays.len() {
            self.waiting = None;
            return reports;
        }
        if !left.is_empty() && self.waiting.get_or_insert_with(Instant::now).elapsed() < NOT_PERMITTED_LIMIT {
            return reports;
        }
        self.waiting = None;
        let gone = self.killed.extract_if(.., |kept| kept.has_exited).filter(|kept| !kept.is_gone);
        reports.extend(gone.map(|KeptProcess { process, .. }| Report::Gone { process, left: left.clone() }));
        reports
    }
}

impl KeptProcess {
    /// How a worker process whose keeper was killed has ended, once that is so.
    fn exited(&mut self, reaped: &HashMap<Pid, WaitStatus>) -> Option<Report> {
        let status = self.pid.and_then(|pid| reaped.get(&pid));
        if status.is_none() && self.pid.is_some_and(is_child) {
            return None;
        }
        self.has_exited = true;
        // Its keeper may have reaped it, and has not told how it had ended.
        let killed = Report::Exited { process: self.process, code: None, signal: Some(Signal::KILL.as_raw()) };
        Some(status.map_or(killed, |status| keeper::exited(self.process, *status)))
    }
}

/// Whether a process is a child of this one, and was not reaped.
fn is_child(pid: Pid) -> bool {
    use rustix::process::{WaitId, WaitIdOptions, waitid};
    let look = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    !matches!(waitid(WaitId::Pid(pid), look), Err(rustix::io::Errno::CHILD))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guard_that_takes_nothing_holds_up_nobody_who_asks_it() {
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        let guard = Guard { socket: ours, child: parking_lot::Mutex::new(None), is_stopping: AtomicBool::new(false) };
        let mut heard = 0;
        let error = loop {
            match guard.kill(ProcessId(7)) {
                Ok(()) => heard += 1,
                Err(error) => break error,
            }
        };
        assert!(takes_nothing_now(&error), "{error}");
        for _ in 0..heard {
            let request = receive::<Request>(theirs.as_fd()).unwrap().unwrap().0;
            assert!(matches!(request, Request::Kill(ProcessId(7))));
        }
        guard.kill(ProcessId(7)).unwrap();
        // One that has ended has ended them.
        drop(theirs);
        guard.kill(ProcessId(7)).unwrap();
    }
}
