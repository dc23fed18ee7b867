//! A bulk connection: waited for on the IO thread, copied through on threads that may block.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::net::{RecvFlags, SendFlags, sockopt};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use wingbeat_net::address::Stream;

/// Bytes up to which a copy is made on the IO thread: it takes less time than waking another thread.
const SMALL: usize = 256 << 10;

/// Bytes that one system call of a copy takes at most, so that a connection that was cut is noticed soon.
const PIECE: usize = 4 << 20;

/// A connection over which one request after another is answered. Closed when the last user drops it.
///
/// Whoever waits for the other side to begin waits as a task; only what is already on its way is read or written by a
/// blocking thread. An idle connection costs a descriptor and no thread.
#[derive(Debug)]
pub(super) struct Wire {
    /// In blocking mode, with [`Wire::silence`] as its limit; waiting tasks pass `DONTWAIT`.
    fd: OwnedFd,
    /// How long the other side may neither send nor take a byte while a transfer is under way.
    silence: Duration,
}

impl AsRawFd for Wire {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

/// The error of a connection on which nothing moved for the limit.
fn silent(silence: Duration) -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, format!("not a byte in {silence:?}"))
}

impl Wire {
    /// Takes a connection over from tokio.
    pub(super) fn new(stream: Stream, silence: Duration) -> io::Result<Arc<Wire>> {
        let is_tcp = matches!(stream, Stream::Tcp(_));
        let fd: OwnedFd = match stream {
            Stream::Unix(stream) => stream.into_std()?.into(),
            Stream::Tcp(stream) => stream.into_std()?.into(),
        };
        rustix::io::ioctl_fionbio(&fd, false)?;
        sockopt::set_socket_timeout(&fd, sockopt::Timeout::Recv, Some(silence))?;
        sockopt::set_socket_timeout(&fd, sockopt::Timeout::Send, Some(silence))?;
        if is_tcp {
            // What the kernel still has to send after the connection was closed need not be kept for longer, either.
            sockopt::set_tcp_user_timeout(&fd, u32::try_from(silence.as_millis()).unwrap_or(u32::MAX))?;
        }
        Ok(Arc::new(Wire { fd, silence }))
    }

    /// How long the other side may be silent in mid-transfer.
    pub(super) fn silence(&self) -> Duration {
        self.silence
    }

    /// Receives exactly as many bytes, as soon as they arrive, on the IO thread.
    ///
    /// # Errors
    /// The connection ended, or nothing arrived for `limit`.
    pub(super) async fn receive(self: &Arc<Self>, mut into: &mut [u8], limit: Duration) -> io::Result<()> {
        let mut readable = None;
        while !into.is_empty() {
            match rustix::net::recv(&self.fd, &mut *into, RecvFlags::DONTWAIT) {
                Ok((_, 0)) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok((_, count)) => into = &mut into[count..],
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::WOULDBLOCK) => self.wait(&mut readable, Interest::READABLE, limit).await?,
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Sends all bytes, as fast as they are taken, on the IO thread.
    ///
    /// # Errors
    /// The connection ended, or nothing was taken for the limit of the connection.
    pub(super) async fn send(self: &Arc<Self>, mut bytes: &[u8]) -> io::Result<()> {
        let mut writable = None;
        while !bytes.is_empty() {
            match rustix::net::send(&self.fd, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
                Ok(count) => bytes = &bytes[count..],
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::WOULDBLOCK) => {
                    self.wait(&mut writable, Interest::WRITABLE, self.silence).await?;
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Waits until the kernel says that there is something to do again.
    async fn wait(
        self: &Arc<Self>,
        watched: &mut Option<AsyncFd<Arc<Wire>>>,
        interest: Interest,
        limit: Duration,
    ) -> io::Result<()> {
        let watched = match watched {
            Some(watched) => watched,
            None => {
                // SAFETY: a `Wire` has the same descriptor until it is dropped, and the `AsyncFd` keeps it alive.
                let watching = unsafe { AsyncFd::register_with_interest(self.clone(), interest) };
                watched.insert(watching?)
            }
        };
        let ready = tokio::time::timeout(limit, watched.ready(interest)).await;
        // Whatever it was, the next call looks; an event that follows is a new one.
        ready.map_err(|_| silent(limit))??.clear_ready();
        Ok(())
    }

    /// Whether the other side has closed the connection, or broken its protocol: an idle one has nothing to read.
    pub(super) fn is_stale(&self) -> bool {
        let looked = rustix::net::recv(&self.fd, &mut [0u8; 1][..], RecvFlags::DONTWAIT | RecvFlags::PEEK);
        !matches!(looked, Err(rustix::io::Errno::WOULDBLOCK | rustix::io::Errno::INTR))
    }

    /// Ends the connection for both sides: what waits for it, on whatever thread, fails.
    pub(super) fn cut(&self) {
        // It may have ended already.
        let _ = rustix::net::shutdown(&self.fd, rustix::net::Shutdown::Both);
    }

    fn fill(&self, mut into: &mut [u8]) -> io::Result<()> {
        while !into.is_empty() {
            let piece = into.len().min(PIECE);
            match rustix::net::recv(&self.fd, &mut into[..piece], RecvFlags::empty()) {
                Ok((_, 0)) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok((_, count)) => into = &mut into[count..],
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::WOULDBLOCK) => return Err(silent(self.silence)),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Sends all bytes, on a thread that may block.
    pub(super) fn drain(&self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let piece = bytes.len().min(PIECE);
            match rustix::net::send(&self.fd, &bytes[..piece], SendFlags::NOSIGNAL) {
                Ok(count) => bytes = &bytes[count..],
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::WOULDBLOCK) => return Err(silent(self.silence)),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }
}

/// Receives an object's bytes. `into` is given back only when nobody writes there any more, whatever happened.
///
/// # Errors
/// The connection ended, was cut, or nothing arrived for its limit.
pub(super) async fn receive_all<R>(wire: &Arc<Wire>, mut into: R) -> io::Result<()>
where
    R: AsMut<[u8]> + Send + 'static,
{
    if into.as_mut().len() <= SMALL {
        return wire.receive(into.as_mut(), wire.silence).await;
    }
    let wire = wire.clone();
    let filled = tokio::task::spawn_blocking(move || wire.fill(into.as_mut())).await;
    filled.unwrap_or_else(|error| Err(io::Error::other(error)))
}

/// Sends an object's bytes.
///
/// # Errors
/// The connection ended, was cut, or nothing was taken for its limit.
pub(super) async fn send_all<R>(wire: &Arc<Wire>, bytes: R) -> io::Result<()>
where
    R: AsRef<[u8]> + Send + 'static,
{
    if bytes.as_ref().len() <= SMALL {
        return wire.send(bytes.as_ref()).await;
    }
    let wire = wire.clone();
    let sent = tokio::task::spawn_blocking(move || wire.drain(bytes.as_ref())).await;
    sent.unwrap_or_else(|error| Err(io::Error::other(error)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    fn pair(silence: Duration) -> (Arc<Wire>, Arc<Wire>) {
        let (one, other) = tokio::net::UnixStream::pair().unwrap();
        (Wire::new(Stream::Unix(one), silence).unwrap(), Wire::new(Stream::Unix(other), silence).unwrap())
    }

    #[tokio::test]
    async fn objects_of_any_size_arrive_as_they_were_sent() {
        let (one, other) = pair(LONG);
        for size in [0, 1, SMALL, SMALL + 1, 20 << 20] {
            let sent: Vec<u8> = (0..size).map(|at| (at * 31) as u8).collect();
            let receiving = async {
                let mut received = vec![0; size];
                if size <= SMALL {
                    other.receive(&mut received, LONG).await.unwrap();
                } else {
                    let wire = other.clone();
                    received = tokio::task::spawn_blocking(move || {
                        wire.fill(&mut received).unwrap();
                        received
                    })
                    .await
                    .unwrap();
                }
                received
            };
            let (done, received) = futures::join!(send_all(&one, sent.clone()), receiving);
            done.unwrap();
            assert!(received == sent);
        }
    }

    #[tokio::test]
    async fn a_silent_other_side_ends_a_transfer_and_not_the_wait_of_an_idle_one() {
        let silence = Duration::from_millis(20);
        let (one, _other) = pair(silence);
        let error = receive_all(&one, vec![0; SMALL + 1]).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut, "{error}");
        let error = send_all(&one, vec![0; 64 << 20]).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut, "{error}");
        let (one, other) = pair(silence);
        let mut byte = [0];
        let (received, sent) = futures::join!(one.receive(&mut byte, LONG), async {
            tokio::time::sleep(2 * silence).await;
            other.send(b"x").await
        });
        received.unwrap();
        sent.unwrap();
    }

    #[tokio::test]
    async fn a_connection_that_is_cut_ends_what_waits_for_it() {
        let (one, other) = pair(LONG);
        assert!(!one.is_stale());
        let copying = tokio::spawn({
            let one = one.clone();
            async move { receive_all(&one, vec![0; SMALL + 1]).await }
        });
        one.cut();
        assert!(copying.await.unwrap().is_err());
        assert!(other.is_stale());
    }
}
