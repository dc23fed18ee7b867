//! Which machine this is, and listening and dialling.
//!
//! Unix sockets live in the abstract namespace: they vanish with their process, so that nothing can be
//! left behind after kill -9.

use std::future::Future;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::linux::net::SocketAddrExt;
use std::pin::Pin;
use std::sync::LazyLock;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use wingbeat_core::ProcessId;
use wingbeat_core::error::Error;
use wingbeat_core::spec::{Address, MachineId};

use crate::admission::{Admission, Refusals, Source};
use crate::handshake::{self, Failed, Hello, Token, Welcome};
use crate::limits::limits;

/// What stands in the way of dialling for a moment is waited for so long, twice as long each time.
const TRY_AGAIN: [Duration; 2] = [Duration::from_millis(5), Duration::from_millis(200)];

/// How long accepting rests when there are no descriptors and no handshake to end for one.
const OUT_OF_DESCRIPTORS: Duration = Duration::from_millis(50);

/// The machine and network namespace in which this process was when it first asked: two processes with the same id can
/// reach each other's abstract unix sockets.
pub fn this_machine() -> MachineId {
    static MACHINE: LazyLock<MachineId> = LazyLock::new(read_machine);
    *MACHINE
}

fn read_machine() -> MachineId {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id");
    // Two machines that do not say must not be taken for one.
    let boot = boot.unwrap_or_else(|_| rustix::system::uname().nodename().to_string_lossy().into_owned());
    let net = std::fs::read_link("/proc/self/ns/net").unwrap_or_default();
    let mut hash = blake3::Hasher::new();
    let mut half = |of: &[u8]| {
        hash.update(of);
        let mut first = [0; 4];
        first.copy_from_slice(&hash.finalize().as_bytes()[..4]);
        u64::from(u32::from_le_bytes(first))
    };
    let kernel = half(boot.trim().as_bytes());
    MachineId(kernel << 32 | half(net.as_os_str().as_encoded_bytes()))
}

/// A byte stream of either kind.
#[derive(Debug)]
pub enum Stream {
    /// On the same machine.
    Unix(UnixStream),
    /// Between machines.
    Tcp(TcpStream),
}

macro_rules! either {
    ($self:ident, $s:ident => $call:expr) => {
        match $self.get_mut() {
            Stream::Unix($s) => $call,
            Stream::Tcp($s) => $call,
        }
    };
}

impl AsyncRead for Stream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        either!(self, s => Pin::new(s).poll_read(cx, buf))
    }
}

impl AsyncWrite for Stream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        either!(self, s => Pin::new(s).poll_write(cx, buf))
    }
    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        either!(self, s => Pin::new(s).poll_flush(cx))
    }
    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        either!(self, s => Pin::new(s).poll_shutdown(cx))
    }
}

/// Listens on an abstract unix socket and, if asked to, on TCP.
#[derive(Debug)]
pub struct Listener {
    unix: UnixListener,
    tcp: Option<TcpListener>,
    address: Address,
}

impl Listener {
    /// Listens as `process`. With `tcp` port 0 the system chooses the port.
    ///
    /// # Errors
    /// When the TCP address is in use or not this machine's.
    pub async fn bind(process: ProcessId, tcp: Option<SocketAddr>) -> Result<Listener, Error> {
        let name = format!("wingbeat-{:016x}-{:08x}", process.0, rand::random::<u32>());
        let unix = std::os::unix::net::SocketAddr::from_abstract_name(&name)
            .and_then(|name| std::os::unix::net::UnixListener::bind_addr(&name))
            .and_then(|listener| {
                listener.set_nonblocking(true)?;
                UnixListener::from_std(listener)
            })
            .map_err(|error| Error::io("listening on a unix socket", &error))?;
        let tcp = match tcp {
            None => None,
            Some(address) => Some(TcpListener::bind(address).await.map_err(|error| Error::Io {
                what: format!("listening on {address}"),
                why: match error.kind() {
                    io::ErrorKind::AddrInUse => {
                        "the port is in use; is another head running there? Choose another with --port".into()
                    }
                    io::ErrorKind::AddrNotAvailable => "this machine has no such address".into(),
                    _ => error.to_string(),
                },
            })?),
        };
        let bound = tcp
            .as_ref()
            .map(TcpListener::local_addr)
            .transpose()
            .map_err(|error| Error::io("reading the port listened on", &error))?;
        let address = Address { process, machine: this_machine(), unix: name, tcp: bound };
        Ok(Listener { unix, tcp, address })
    }

    /// Where others reach this listener.
    pub fn address(&self) -> &Address {
        &self.address
    }
}

impl Listener {
    /// Accepts until the returned future is dropped. `accepted` is called with every connection that
    /// proved the token; others are refused and logged.
    pub async fn serve<F>(self, token: Token, welcome: Welcome, accepted: F)
    where
        F: Fn(Stream, Hello) + Clone + Send + 'static,
    {
        let mut admission = Admission::default();
        let mut refusals = Refusals::default();
        loop {
            let refused = tokio::select! {
                stream = self.accept() => match stream {
                    Ok((stream, from)) => {
                        let (token, welcome, accepted) = (token.clone(), welcome.clone(), accepted.clone());
                        admission.admit(from, async move {
                            let limit = match from {
                                Source::Local => limits().dial,
                                Source::Remote(_) => limits().proof,
                            };
                            match tokio::time::timeout(limit, handshake::accept(stream, &token, welcome)).await {
                                Ok(Ok((stream, hello))) => {
                                    accepted(stream, hello);
                                    None
                                }
                                Ok(Err(error)) if is_departure(&error) => {
                                    tracing::debug!(%error, "somebody left before the introduction");
                                    None
                                }
                                Ok(Err(error)) => Some(error.to_string()),
                                Err(_) => Some(format!("it did not introduce itself within {limit:?}")),
                            }
                        });
                        None
                    }
                    Err(error) => {
                        // Out of descriptors, most likely. Those who have not introduced themselves have some.
                        admission.make_room();
                        tokio::time::sleep(OUT_OF_DESCRIPTORS).await;
                        Some(format!("accepting failed: {error}"))
                    }
                },
                refused = admission.ended() => refused,
                more = refusals.unlogged() => {
                    tracing::warn!("refused {more} more connections");
                    None
                }
            };
            if let Some(why) = refused
                && refusals.note()
            {
                tracing::warn!(%why, "refused a connection");
            }
        }
    }

    async fn accept(&self) -> io::Result<(Stream, Source)> {
        let unix = async { self.unix.accept().await.map(|(stream, _)| (Stream::Unix(stream), Source::Local)) };
        let Some(tcp) = &self.tcp else { return unix.await };
        tokio::select! {
            stream = unix => stream,
            stream = tcp.accept() => {
                stream.and_then(|(stream, from)| Ok((tune(stream)?, Source::remote(from.ip()))))
            }
        }
    }
}

/// Whether whoever connected has left: to look whether somebody listens is no attack.
fn is_departure(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
    matches!(error.kind(), BrokenPipe | ConnectionReset | UnexpectedEof)
}

/// Sets what every TCP connection of ours has: no delay for small messages.
fn tune(stream: TcpStream) -> io::Result<Stream> {
    stream.set_nodelay(true)?;
    Ok(Stream::Tcp(stream))
}

/// A unix socket is connected without waiting: a queue that is full is an error, and not a thread that stands still.
fn open_unix(name: &str) -> io::Result<UnixStream> {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new_abstract_name(name.as_bytes())?)?;
    UnixStream::from_std(socket.into())
}

async fn open(address: &Address) -> Result<Stream, (String, io::Error)> {
    if address.machine == this_machine() {
        return open_unix(&address.unix).map(Stream::Unix).map_err(|error| (shown(address), error));
    }
    let Some(tcp) = address.tcp else {
        let shown = format!("unix:@{} on another machine", address.unix);
        return Err((shown, io::Error::other("it listens for its own machine only; start it with --host")));
    };
    connect(tcp).await.map_err(|error| (tcp.to_string(), error))
}

/// Connects over TCP. Where nobody listens on a port of this machine, the system may choose that very port for this side, and connect
/// it with itself.
async fn connect(to: impl tokio::net::ToSocketAddrs) -> io::Result<Stream> {
    let stream = TcpStream::connect(to).await?;
    if stream.local_addr()? == stream.peer_addr()? {
        return Err(io::ErrorKind::ConnectionRefused.into());
    }
    tune(stream)
}

/// Whether nobody listens there any more. A process listens as long as it lives.
fn means_gone(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound)
}

/// Whether this machine lacks something that it may have in a moment: descriptors, memory, ports, room in the queue of a
/// unix socket.
fn is_passing(error: &io::Error) -> bool {
    use rustix::io::Errno;
    let passing =
        [Errno::AGAIN, Errno::INTR, Errno::MFILE, Errno::NFILE, Errno::NOBUFS, Errno::NOMEM, Errno::ADDRNOTAVAIL];
    Errno::from_io_error(error).is_some_and(|error| passing.contains(&error))
}

/// Why a process could not be connected to.
#[derive(Debug, thiserror::Error)]
pub enum DialError {
    /// It is gone for good.
    #[error(transparent)]
    Gone(Error),
    /// It may live.
    #[error(transparent)]
    Failed(Error),
}

impl From<DialError> for Error {
    fn from(error: DialError) -> Error {
        match error {
            DialError::Gone(error) | DialError::Failed(error) => error,
        }
    }
}

/// Tries until it is done, it cannot be done, or the limit for dialling is over.
async fn attempts<T, E, F>(mut attempt: impl FnMut() -> F, timed_out: impl FnOnce(String) -> E) -> Result<T, E>
where
    F: Future<Output = Result<T, Attempt<E>>>,
{
    let limit = limits().dial;
    let mut last = None;
    let tried = tokio::time::timeout(limit, async {
        let [mut pause, longest] = TRY_AGAIN;
        loop {
            match attempt().await {
                Ok(done) => return Ok(done),
                Err(Attempt::Failed(error)) => return Err(error),
                Err(Attempt::Again(error)) => last = Some(error),
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(longest);
        }
    });
    match tried.await {
        Ok(tried) => tried,
        Err(_) => Err(last.unwrap_or_else(|| timed_out(format!("no answer within {limit:?}")))),
    }
}

/// How one attempt failed.
enum Attempt<E> {
    /// The next would, too.
    Failed(E),
    /// The next may not.
    Again(E),
}

/// Connects to a process and proves the token.
///
/// # Errors
/// [`Error::Unreachable`] when nobody answers within [`limits`]' `dial`, [`Error::Refused`] when somebody does
/// who will not have us.
pub async fn dial(address: &Address, what: &str, token: &Token, hello: Hello) -> Result<Stream, Error> {
    Ok(dial_known(address, what, token, hello).await?)
}

/// As [`dial`], for whoever needs to know whether the process is gone.
///
/// # Errors
/// As [`dial`].
pub async fn dial_known(address: &Address, what: &str, token: &Token, hello: Hello) -> Result<Stream, DialError> {
    let (stream, _) = dial_and_learn(address, what, token, hello).await?;
    Ok(stream)
}

/// As [`dial_known`], and answers also with what the process says of itself.
///
/// # Errors
/// As [`dial`].
pub async fn dial_and_learn(
    address: &Address,
    what: &str,
    token: &Token,
    hello: Hello,
) -> Result<(Stream, Welcome), DialError> {
    let unreachable = |address: String, why: String| Error::Unreachable { what: what.into(), address, why };
    let hello = Hello { to: Some(address.process), ..hello };
    let attempt = || async {
        let stream = open(address).await.map_err(|(shown, error)| {
            let (gone, passing) = (means_gone(&error), is_passing(&error));
            let error = unreachable(shown, error.to_string());
            match (gone, passing) {
                (true, _) => Attempt::Failed(DialError::Gone(error)),
                (_, true) => Attempt::Again(DialError::Failed(error)),
                _ => Attempt::Failed(DialError::Failed(error)),
            }
        })?;
        let (stream, welcome) =
            handshake::introduce(stream, token, hello.clone(), what).await.map_err(|failed| match failed {
                Failed::ForGood(error) => Attempt::Failed(DialError::Failed(error)),
                Failed::ForNow(error) => Attempt::Again(DialError::Failed(error)),
            })?;
        if welcome.address.process != address.process {
            let error = unreachable(shown(address), "another process has taken its place".into());
            return Err(Attempt::Failed(DialError::Gone(error)));
        }
        Ok((stream, welcome))
    };
    attempts(attempt, |why| DialError::Failed(unreachable(shown(address), why))).await
}

/// Whether the process is certainly gone: nobody listens where it did.
pub async fn is_gone(address: &Address) -> bool {
    for _ in 0..DYING_LOOKS {
        match tokio::time::timeout(limits().dial, open(address)).await {
            // A process that is about to be gone may still listen, and ends what it is sent.
            Ok(Ok(stream)) => {
                if !ends_at_once(stream).await {
                    return false;
                }
            }
            Ok(Err((_, error))) => return means_gone(&error),
            Err(_) => return false,
        }
    }
    false
}

/// How often [`is_gone`] looks, and how long it waits for the end of what it has opened. The kernel takes microseconds.
const DYING_LOOKS: usize = 5;
const DYING: Duration = Duration::from_millis(200);

async fn ends_at_once(mut stream: Stream) -> bool {
    let read = tokio::time::timeout(DYING, stream.read_u8()).await;
    matches!(read, Ok(Err(_)))
}

fn shown(address: &Address) -> String {
    match address.tcp {
        Some(tcp) if address.machine != this_machine() => tcp.to_string(),
        _ => format!("unix:@{}", address.unix),
    }
}

/// Connects to a `host:port` that a person gave, and learns who is there.
///
/// # Errors
/// As [`dial`].
pub async fn dial_text(text: &str, what: &str, token: &Token, hello: Hello) -> Result<(Stream, Welcome), Error> {
    let unreachable = |why: String| Error::Unreachable { what: what.into(), address: text.into(), why };
    let attempt = || async {
        let stream = connect(text).await.map_err(|error| {
            let hint = match error.kind() {
                io::ErrorKind::ConnectionRefused => "; is the head running, and is this its address?",
                io::ErrorKind::InvalidInput => "; an address is host:port",
                _ => "",
            };
            let told = unreachable(format!("{error}{hint}"));
            if is_passing(&error) { Attempt::Again(told) } else { Attempt::Failed(told) }
        })?;
        handshake::introduce(stream, token, hello.clone(), what).await.map_err(|failed| match failed {
            Failed::ForGood(error) => Attempt::Failed(error),
            Failed::ForNow(error) => Attempt::Again(error),
        })
    };
    attempts(attempt, &unreachable).await
}

/// This machine's address on the interface that leads to `peer`.
pub fn local_ip(stream: &Stream) -> Option<IpAddr> {
    match stream {
        Stream::Unix(_) => None,
        Stream::Tcp(stream) => stream.local_addr().ok().map(|address| address.ip()),
    }
}
