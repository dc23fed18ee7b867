//! Which machine this is, and listening and dialling.
//!
//! Unix sockets live in the abstract namespace: they vanish with their process, so that nothing can be
//! left behind after kill -9.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::linux::net::SocketAddrExt;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use wingbeat_core::ProcessId;
use wingbeat_core::error::Error;
use wingbeat_core::spec::{Address, MachineId};

use crate::handshake::{self, Hello, Token, Welcome};

/// How long dialling and the handshake may take together. A live peer answers in milliseconds; this
/// allows for a loaded machine and a few lost packets.
pub const DIAL_LIMIT: Duration = Duration::from_secs(10);

/// Handshakes under way at a listener; more wait in the kernel's queue.
const HANDSHAKES: usize = 256;

/// The machine and network namespace of this process: two processes with the same id can reach each
/// other's abstract unix sockets.
pub fn this_machine() -> MachineId {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let net = std::fs::read_link("/proc/self/ns/net").unwrap_or_default();
    let mut hash = blake3::Hasher::new();
    hash.update(boot.trim().as_bytes());
    hash.update(net.as_os_str().as_encoded_bytes());
    let mut first = [0; 8];
    first.copy_from_slice(&hash.finalize().as_bytes()[..8]);
    MachineId(u64::from_le_bytes(first))
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
        let slots = std::sync::Arc::new(tokio::sync::Semaphore::new(HANDSHAKES));
        let mut handshakes = tokio::task::JoinSet::new();
        loop {
            let Ok(slot) = slots.clone().acquire_owned().await else { return };
            let stream = match self.accept().await {
                Ok(stream) => stream,
                Err(error) => {
                    // Out of descriptors, most likely: wait until some are closed.
                    tracing::warn!(%error, "cannot accept a connection");
                    tokio::time::sleep(Duration::from_millis(50)).await;
                    continue;
                }
            };
            while handshakes.try_join_next().is_some() {}
            let (token, welcome, accepted) = (token.clone(), welcome.clone(), accepted.clone());
            handshakes.spawn(async move {
                let _slot = slot;
                match tokio::time::timeout(DIAL_LIMIT, handshake::accept(stream, &token, welcome)).await {
                    Ok(Ok((stream, hello))) => accepted(stream, hello),
                    Ok(Err(error)) => tracing::warn!(%error, "refused a connection"),
                    Err(_) => tracing::warn!("a connection did not introduce itself in time"),
                }
            });
        }
    }

    async fn accept(&self) -> io::Result<Stream> {
        let unix = async { self.unix.accept().await.map(|(stream, _)| Stream::Unix(stream)) };
        let Some(tcp) = &self.tcp else { return unix.await };
        tokio::select! {
            stream = unix => stream,
            stream = tcp.accept() => stream.and_then(|(stream, _)| tune(stream)),
        }
    }
}

/// Sets what every TCP connection of ours has: no delay for small messages.
fn tune(stream: TcpStream) -> io::Result<Stream> {
    stream.set_nodelay(true)?;
    Ok(Stream::Tcp(stream))
}

async fn open(address: &Address) -> Result<Stream, (String, io::Error)> {
    if address.machine == this_machine() {
        let shown = format!("unix:@{}", address.unix);
        return std::os::unix::net::SocketAddr::from_abstract_name(&address.unix)
            .and_then(|name| std::os::unix::net::UnixStream::connect_addr(&name))
            .and_then(|stream| {
                stream.set_nonblocking(true)?;
                UnixStream::from_std(stream)
            })
            .map(Stream::Unix)
            .map_err(|error| (shown, error));
    }
    let Some(tcp) = address.tcp else {
        let shown = format!("unix:@{} on another machine", address.unix);
        return Err((shown, io::Error::other("it listens for its own machine only; start it with --host")));
    };
    TcpStream::connect(tcp).await.and_then(tune).map_err(|error| (tcp.to_string(), error))
}

/// Connects to a process and proves the token.
///
/// # Errors
/// [`Error::Unreachable`] when nobody answers within [`DIAL_LIMIT`], [`Error::Refused`] when somebody does
/// who will not have us.
pub async fn dial(address: &Address, what: &str, token: &Token, hello: Hello) -> Result<Stream, Error> {
    let unreachable = |address: String, why: String| Error::Unreachable { what: what.into(), address, why };
    let attempt = async {
        let stream = open(address).await.map_err(|(shown, error)| unreachable(shown, error.to_string()))?;
        handshake::introduce(stream, token, hello, what).await
    };
    match tokio::time::timeout(DIAL_LIMIT, attempt).await {
        Ok(Ok((stream, welcome))) if welcome.address.process == address.process => Ok(stream),
        Ok(Ok(_)) => Err(unreachable(shown(address), "another process has taken its place".into())),
        Ok(Err(error)) => Err(error),
        Err(_) => Err(unreachable(shown(address), format!("no answer within {} s", DIAL_LIMIT.as_secs()))),
    }
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
    let attempt = async {
        let stream = TcpStream::connect(text).await.and_then(tune).map_err(|error| {
            let hint = match error.kind() {
                io::ErrorKind::ConnectionRefused => "; is the head running, and is this its address?",
                io::ErrorKind::InvalidInput => "; an address is host:port",
                _ => "",
            };
            unreachable(format!("{error}{hint}"))
        })?;
        handshake::introduce(stream, token, hello, what).await
    };
    match tokio::time::timeout(DIAL_LIMIT, attempt).await {
        Ok(result) => result,
        Err(_) => Err(unreachable(format!("no answer within {} s", DIAL_LIMIT.as_secs()))),
    }
}

/// This machine's address on the interface that leads to `peer`.
pub fn local_ip(stream: &Stream) -> Option<IpAddr> {
    match stream {
        Stream::Unix(_) => None,
        Stream::Tcp(stream) => stream.local_addr().ok().map(|address| address.ip()),
    }
}
