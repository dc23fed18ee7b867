//! Unix sockets on one machine, and TCP between machines.
//!
//! Unix sockets live in the abstract namespace: they vanish with their process, so that nothing can be left behind after kill -9.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::linux::net::SocketAddrExt;
use std::sync::{Arc, LazyLock};

use futures::FutureExt;
use futures::future::BoxFuture;
use tokio::net::{TcpListener, TcpStream, ToSocketAddrs, UnixListener, UnixStream};
use wingbeat_core::ProcessId;
use wingbeat_core::error::Error;
use wingbeat_core::spec::Address;

use super::{Incoming, Listening, Transport};
use crate::admission::Source;
use crate::machine::this_machine;
use crate::staggered::first_of;
use crate::stream::Stream;

/// The system's sockets.
pub(crate) struct System;

pub(super) fn shared() -> Arc<dyn Transport> {
    static SHARED: LazyLock<Arc<dyn Transport>> = LazyLock::new(|| Arc::new(System));
    SHARED.clone()
}

impl Transport for System {
    fn open<'a>(&'a self, to: &'a Address) -> BoxFuture<'a, io::Result<Stream>> {
        async move {
            if to.machine == this_machine() {
                return open_unix(&to.unix).map(Stream::Unix);
            }
            let unreachable = || io::Error::other("it listens for its own machine only; start it with --host");
            connect(to.tcp.ok_or_else(unreachable)?).await
        }
        .boxed()
    }

    fn listen(&self, process: ProcessId, tcp: Option<SocketAddr>) -> BoxFuture<'_, Result<Listening, Error>> {
        listen(process, tcp).boxed()
    }
}

async fn listen(process: ProcessId, tcp: Option<SocketAddr>) -> Result<Listening, Error> {
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
            code: error.raw_os_error(),
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
    let address = Address { process, machine: this_machine(), unix: name, tcp: bound, steward: None };
    Ok(Listening { address, incoming: Box::new(Sockets { unix, tcp }) })
}

/// What listens for one machine and for others.
struct Sockets {
    unix: UnixListener,
    tcp: Option<TcpListener>,
}

impl Incoming for Sockets {
    fn next(&mut self) -> BoxFuture<'_, io::Result<(Stream, Source)>> {
        async {
            let unix = async { self.unix.accept().await.map(|(stream, _)| (Stream::Unix(stream), Source::Local)) };
            let Some(tcp) = &self.tcp else { return unix.await };
            tokio::select! {
                stream = unix => stream,
                stream = tcp.accept() => {
                    stream.and_then(|(stream, from)| Ok((tune(stream)?, Source::remote(from.ip()))))
                }
            }
        }
        .boxed()
    }

    fn sockets(&self) -> Vec<BorrowedFd<'_>> {
        std::iter::once(self.unix.as_fd()).chain(self.tcp.as_ref().map(AsFd::as_fd)).collect()
    }
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

/// Connects over TCP. Where nobody listens on a port of this machine, the system may choose that very port for this side, and connect
/// it with itself.
///
/// Of the addresses that a name has, one may be silent where another answers, as with both protocols of the internet.
pub(crate) async fn connect(to: impl ToSocketAddrs) -> io::Result<Stream> {
    let addresses: Vec<SocketAddr> = tokio::net::lookup_host(to).await?.collect();
    first_of(addresses.into_iter().map(connect_to)).await.map_err(|mut errors| {
        errors.pop().unwrap_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "the name has no address"))
    })
}

async fn connect_to(to: SocketAddr) -> io::Result<Stream> {
    let stream = TcpStream::connect(to).await?;
    if stream.local_addr()? == stream.peer_addr()? {
        return Err(io::ErrorKind::ConnectionRefused.into());
    }
    tune(stream)
}
