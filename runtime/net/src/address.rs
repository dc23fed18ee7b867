//! Which machine this is, and listening and dialling: who may come in, and whom one has reached.

use std::future::Future;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::io::AsyncReadExt;
use wingbeat_core::ProcessId;
use wingbeat_core::error::Error;
use wingbeat_core::spec::Address;

use crate::admission::{Admission, Refusals, Source};
use crate::handshake::{self, Failed, Hello, Token, Welcome};
use crate::limits::limits;
pub use crate::machine::this_machine;
pub use crate::stream::Stream;
use crate::transport::system::{self, System};
use crate::transport::{self, Incoming, Listening, Transport};

/// What stands in the way of dialling for a moment is waited for so long, twice as long each time.
const TRY_AGAIN: [Duration; 2] = [Duration::from_millis(5), Duration::from_millis(200)];

/// How long accepting rests when there are no descriptors and no handshake to end for one.
const OUT_OF_DESCRIPTORS: Duration = Duration::from_millis(50);

/// Listens for other processes.
pub struct Listener {
    incoming: Box<dyn Incoming>,
    address: Address,
}

impl Listener {
    /// Listens as `process` on an abstract unix socket and, if asked to, on TCP. With port 0 the system chooses the port.
    ///
    /// # Errors
    /// When the TCP address is in use or not this machine's.
    pub async fn bind(process: ProcessId, tcp: Option<SocketAddr>) -> Result<Listener, Error> {
        Self::bind_in(&System, process, tcp).await
    }

    /// As [`Listener::bind`], in a network that may be pretended.
    ///
    /// # Errors
    /// As [`Listener::bind`].
    pub async fn bind_in(
        transport: &dyn Transport,
        process: ProcessId,
        tcp: Option<SocketAddr>,
    ) -> Result<Listener, Error> {
        let Listening { address, incoming } = transport.listen(process, tcp).await?;
        Ok(Listener { incoming, address })
    }

    /// The same for another process: who it is may depend on where it listens.
    #[must_use]
    pub fn of_process(mut self, process: ProcessId) -> Listener {
        self.address.process = process;
        self
    }

    /// The sockets that listen. As long as any process has them, who dials here is not refused.
    pub fn sockets(&self) -> Vec<BorrowedFd<'_>> {
        self.incoming.sockets()
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
        self.serve_with(token, move || welcome.clone(), accepted).await;
    }

    /// As [`Listener::serve`], for somebody who says something else of itself with time.
    pub async fn serve_with<W, F>(mut self, token: Token, welcome: W, accepted: F)
    where
        W: Fn() -> Welcome,
        F: Fn(Stream, Hello) + Clone + Send + 'static,
    {
        let mut admission = Admission::default();
        let mut refusals = Refusals::default();
        loop {
            let refused = tokio::select! {
                stream = self.incoming.next() => match stream {
                    Ok((stream, from)) => {
                        let (token, welcome, accepted) = (token.clone(), welcome(), accepted.clone());
                        let peer = handshake::peer_of(&stream);
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
                                Ok(Err(error)) => Some(format!("{peer}: {error}")),
                                Err(_) => Some(format!("{peer}: it did not introduce itself within {limit:?}")),
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
}

/// Whether whoever connected has left: to look whether somebody listens is no attack.
fn is_departure(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
    matches!(error.kind(), BrokenPipe | ConnectionReset | UnexpectedEof)
}

async fn open(address: &Address) -> Result<Stream, (String, io::Error)> {
    transport::of(address.machine).open(address).await.map_err(|error| (shown(address), error))
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
            // If this one is not answered, that is why, and not what came of the one before.
            let tried = attempt();
            last = None;
            match tried.await {
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
            let error = match Error::io(format!("connecting to {what} at {shown}"), &error) {
                lacking @ Error::OutOfDescriptors { .. } => lacking,
                _ => unreachable(shown, error.to_string()),
            };
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
        None if address.machine != this_machine() => format!("unix:@{} on another machine", address.unix),
        _ => format!("unix:@{}", address.unix),
    }
}

/// Connects to a `host:port` that a person gave, and learns who is there.
///
/// # Errors
/// As [`dial`].
pub async fn dial_text(text: &str, what: &str, token: &Token, hello: Hello) -> Result<(Stream, Welcome), Error> {
    let unreachable = |why: String| Error::Unreachable { what: what.into(), address: text.into(), why };
    if let Some((scheme, rest)) = text.split_once("://") {
        return Err(unreachable(format!(
            "an address is host:port; leave `{scheme}://` out: {}",
            rest.trim_end_matches('/')
        )));
    }
    let is_connected = AtomicBool::new(false);
    let attempt = || async {
        let stream = system::connect(text).await.map_err(|error| {
            let hint = match error.kind() {
                io::ErrorKind::ConnectionRefused => "; is the head running, and is this its address?",
                io::ErrorKind::InvalidInput => "; an address is host:port",
                _ => "",
            };
            let told = unreachable(format!("{error}{hint}"));
            if is_passing(&error) { Attempt::Again(told) } else { Attempt::Failed(told) }
        })?;
        is_connected.store(true, Ordering::Relaxed);
        handshake::introduce(stream, token, hello.clone(), what).await.map_err(|failed| match failed {
            Failed::ForGood(error) => Attempt::Failed(error),
            Failed::ForNow(error) => Attempt::Again(error),
        })
    };
    // A head speaks first, and most servers wait for what a client says.
    let silent = |why| match is_connected.load(Ordering::Relaxed) {
        true => unreachable(format!(
            "{why} from what listens there: either it is another program's server and not {what} (is the port right?), or it \
             stands still (stopped, or its machine has no memory left)"
        )),
        false => unreachable(format!("{why}: the machine is away, or a firewall drops what is sent to this port")),
    };
    attempts(attempt, silent).await
}

/// This machine's address on the interface that leads to `peer`.
pub fn local_ip(stream: &Stream) -> Option<IpAddr> {
    match stream {
        Stream::Unix(_) => None,
        Stream::Tcp(stream) => stream.local_addr().ok().map(|address| address.ip()),
    }
}
