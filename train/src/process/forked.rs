//! A fork of the node's warm Python (`python/wingbeat/_warm.py` has the protocol).

use std::fs::File;
use std::io::{BufRead, BufReader, Error, ErrorKind, IoSlice, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::ExitStatus;

use std::sync::{Arc, LazyLock};
use std::time::Duration;

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use rustix::pipe::{PipeFlags, pipe_with};
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;

use super::stacks::Stacks;
use super::{Event, Exit, Reach, Running, now_us, output};
use crate::environment::Environment;

/// What the warm Python and its keepers say.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct WarmMessage {
    python: Option<String>,
    refused: Option<String>,
    retires: bool,
    pid: Option<i32>,
    /// The process id of the keeper.
    keeper: Option<i32>,
    status: Option<i32>,
    ended_us: Option<u64>,
}

/// What a warm Python says to who greets it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Greeting {
    /// It forks ranks, and is of this version.
    Ready(String),
    /// It is there, and forks no rank; ranks start cold, and say why.
    Refuses,
    /// It is there, and says nothing: it is not asked again.
    Silent,
    /// It is not there, or is about to end.
    Gone,
}

/// How long a warm Python may say nothing to who connects: what it imports takes seconds. One that stands still is done
/// without: a minute, `WINGBEAT_WARM_ANSWER` seconds.
static ANSWER_LIMIT: LazyLock<Duration> = LazyLock::new(|| {
    let set = std::env::var("WINGBEAT_WARM_ANSWER").ok().and_then(|text| text.parse().ok());
    let set = set.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok()).filter(|limit| !limit.is_zero());
    set.unwrap_or(Duration::from_secs(60))
});

/// Greets the Python that listens there. Waits while it imports.
pub(crate) fn greet(name: &str) -> Greeting {
    match Warm::connect(name).and_then(|mut warm| warm.hear_soon()) {
        Err(error) if error.kind() == ErrorKind::TimedOut => Greeting::Silent,
        Ok(WarmMessage { python: Some(version), .. }) => Greeting::Ready(version),
        Ok(WarmMessage { refused: Some(_), retires: false, .. }) => Greeting::Refuses,
        _ => Greeting::Gone,
    }
}

/// A rank that has been forked.
pub(super) struct Rank {
    warm: Warm,
    pid: i32,
    keeper: i32,
    stdout: OwnedFd,
    stderr: OwnedFd,
}

impl Rank {
    pub(super) fn fork(
        name: &str,
        line: &[String],
        env: &Environment,
        cwd: &Path,
        stdin: OwnedFd,
        events: &mpsc::Sender<Event>,
    ) -> std::io::Result<Rank> {
        let mut warm = Warm::connect(name)?;
        // Whoever connects from now on comes behind this rank.
        let _ = events.blocking_send(Event::Begins);
        if let Some(why) = warm.hear_soon()?.refused {
            return Err(Error::other(why));
        }
        let (stdout, their_stdout) = pipe_with(PipeFlags::CLOEXEC)?;
        let (stderr, their_stderr) = pipe_with(PipeFlags::CLOEXEC)?;
        let request = serde_json::json!({ "args": line, "env": env.complete(), "cwd": cwd });
        warm.ask(&request, [stdin, their_stdout, their_stderr])?;
        let said = warm.hear_soon()?;
        match (said.pid, said.refused) {
            (Some(pid), _) => Ok(Rank { warm, pid, keeper: said.keeper.unwrap_or(pid), stdout, stderr }),
            (None, Some(why)) => Err(Error::other(why)),
            (None, None) => Err(Error::other("the warm Python did not fork a rank")),
        }
    }

    /// Sees it to its end.
    pub(super) fn follow(
        mut self,
        running: &Running,
        stacks: Arc<Stacks>,
        events: &mpsc::Sender<Event>,
    ) -> std::io::Result<Exit> {
        let socket = self.warm.stream.get_ref().as_fd().try_clone_to_owned()?;
        running.started(Reach::Keeper { socket, keeper: self.keeper, rank: self.pid }, stacks);
        output::follow(Some(File::from(self.stdout)), Some(File::from(self.stderr)), events, || {
            // A keeper that is gone took its rank with it.
            let said = self.warm.hear().unwrap_or_default();
            let orphaned = said.status.is_none();
            let (status, ended_us) = (said.status.unwrap_or(libc::SIGKILL), said.ended_us.unwrap_or_else(now_us));
            let was_stopped = running.ended();
            let status = ExitStatus::from_raw(status);
            let (code, signal) = (status.code(), status.signal());
            Ok(Exit { code, signal, stderr: Vec::new(), was_stopped, orphaned, ended_us })
        })
    }
}

/// An error as one of a warm Python that stands still, where it is that.
fn silent(error: Error) -> Error {
    match error.kind() {
        ErrorKind::WouldBlock => {
            let why = format!("the warm Python has said nothing for {} s", ANSWER_LIMIT.as_secs_f64());
            Error::new(ErrorKind::TimedOut, why)
        }
        _ => error,
    }
}

struct Warm {
    stream: BufReader<UnixStream>,
}

impl Warm {
    fn connect(name: &str) -> std::io::Result<Warm> {
        use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt};
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
        // Where it accepts nobody, connecting waits as sending does.
        sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, Some(*ANSWER_LIMIT))?;
        let address = SocketAddrUnix::new_abstract_name(name.as_bytes())?;
        rustix::net::connect(&socket, &address).map_err(|error| silent(error.into()))?;
        let stream = UnixStream::from(socket);
        // Anybody on the machine may have taken the name.
        if rustix::net::sockopt::socket_peercred(&stream)?.uid != rustix::process::geteuid() {
            return Err(Error::new(ErrorKind::PermissionDenied, "another user listens there"));
        }
        Ok(Warm { stream: BufReader::new(stream) })
    }

    /// What it says at once, unless it stands still.
    fn hear_soon(&mut self) -> std::io::Result<WarmMessage> {
        let stream = self.stream.get_ref().try_clone()?;
        stream.set_read_timeout(Some(*ANSWER_LIMIT))?;
        let heard = self.hear().map_err(silent);
        stream.set_read_timeout(None)?;
        heard
    }

    fn hear(&mut self) -> std::io::Result<WarmMessage> {
        let mut line = String::new();
        if self.stream.read_line(&mut line)? == 0 {
            return Err(Error::new(ErrorKind::UnexpectedEof, "the warm Python has ended"));
        }
        serde_json::from_str(&line).map_err(Error::other)
    }

    /// Sends a request, and its streams with the first byte.
    fn ask(&mut self, request: &serde_json::Value, streams: [OwnedFd; 3]) -> std::io::Result<()> {
        let mut text = serde_json::to_vec(request)?;
        text.push(b'\n');
        let fds = streams.each_ref().map(AsFd::as_fd);
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        ancillary.push(SendAncillaryMessage::ScmRights(&fds));
        let mut stream = self.stream.get_ref();
        let sent = rustix::net::sendmsg(stream, &[IoSlice::new(&text)], &mut ancillary, SendFlags::NOSIGNAL);
        let sent = sent.map_err(|error| silent(error.into()))?;
        stream.write_all(text.get(sent..).unwrap_or_default()).map_err(silent)
    }
}
