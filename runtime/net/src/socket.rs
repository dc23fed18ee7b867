//! A connected socket as a connection uses it: one task reads, one writes.
//!
//! It is registered for reading alone. With both directions registered, as tokio's own streams are, the kernel wakes the
//! sender's IO thread whenever the receiver has read something: two needless wake-ups a round trip.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use bytes::{BufMut, BytesMut};
use rustix::net::{RecvFlags, SendFlags, Shutdown};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::spin::Spin;
use crate::stream::Stream;

#[derive(Debug)]
pub(crate) struct Socket {
    /// None when the system would not watch it: then it counts as broken.
    fd: Option<AsyncFd<OwnedFd>>,
    /// Where answers are worth waiting for awake.
    spin: Option<Spin>,
}

impl Socket {
    /// Takes the descriptor over from tokio. Must be called on a tokio runtime.
    pub(crate) fn new(stream: Stream, spins: bool) -> Socket {
        let fd: io::Result<OwnedFd> = match stream {
            Stream::Unix(stream) => stream.into_std().map(Into::into),
            Stream::Tcp(stream) => stream.into_std().map(Into::into),
        };
        let fd = fd.and_then(|fd| watch(fd, Interest::READABLE));
        if let Err(error) = &fd {
            tracing::warn!(%error, "cannot watch a connection");
        }
        Socket { fd: fd.ok(), spin: spins.then(Spin::default) }
    }

    fn fd(&self) -> io::Result<&AsyncFd<OwnedFd>> {
        self.fd.as_ref().ok_or_else(|| io::ErrorKind::BrokenPipe.into())
    }

    /// Appends what has arrived, waiting for some. 0 is the end.
    pub(crate) async fn read(&self, buffer: &mut BytesMut) -> io::Result<usize> {
        let fd = self.fd()?;
        if let Some(spin) = &self.spin
            && let Some(read) = spin.look(|| receive(fd.get_ref(), buffer).transpose()).await
        {
            return read;
        }
        let asleep = self.spin.as_ref().map(|_| Instant::now());
        loop {
            let mut ready = fd.readable().await?;
            let size = buffer.capacity() - buffer.len();
            let read = receive(fd.get_ref(), buffer)?;
            if read.is_none_or(|count| 0 < count && count < size) {
                // That was all; the next arrival is a new event.
                ready.clear_ready();
            }
            let Some(count) = read else { continue };
            if let (Some(spin), Some(asleep)) = (&self.spin, asleep) {
                spin.slept(asleep.elapsed());
            }
            return Ok(count);
        }
    }

    /// Writes what the kernel takes at once.
    pub(crate) fn try_write(&self, bytes: &[u8]) -> io::Result<usize> {
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        let fd = self.fd()?.get_ref();
        Ok(rustix::io::retry_on_intr(|| rustix::net::send(fd, bytes, flags))?)
    }

    /// Waits until the kernel takes more, or may.
    pub(crate) async fn writable(&self) -> io::Result<()> {
        let also = match self.fd()?.get_ref().as_fd().try_clone_to_owned() {
            Err(error) if lacks_descriptors(&error) => {
                tokio::time::sleep(WITHOUT_DESCRIPTORS).await;
                return Ok(());
            }
            also => also?,
        };
        match watch(also, Interest::WRITABLE) {
            Err(error) if lacks_descriptors(&error) => tokio::time::sleep(WITHOUT_DESCRIPTORS).await,
            also => also?.writable().await?.retain_ready(),
        }
        Ok(())
    }

    /// Says that nothing more is written.
    pub(crate) fn shutdown(&self) -> io::Result<()> {
        Ok(rustix::net::shutdown(self.fd()?.get_ref(), Shutdown::Write)?)
    }
}

/// How often a socket that is full is tried while there is no descriptor, or no memory, by which to wait for it.
const WITHOUT_DESCRIPTORS: Duration = Duration::from_millis(10);

fn lacks_descriptors(error: &io::Error) -> bool {
    use rustix::io::Errno;
    matches!(Errno::from_io_error(error), Some(Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::NOSPC))
}

pub(crate) fn watch(fd: OwnedFd, interest: Interest) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an `OwnedFd` stays the same open descriptor until it is dropped, and the `AsyncFd` owns it.
    let watched = unsafe { AsyncFd::register_with_interest(fd, interest) };
    Ok(watched?)
}

/// What has arrived, if anything has.
fn receive(fd: &OwnedFd, buffer: &mut BytesMut) -> io::Result<Option<usize>> {
    // SAFETY: recv only ever writes to the slice.
    let room = unsafe { buffer.chunk_mut().as_uninit_slice_mut() };
    let receive = || rustix::net::recv(fd, &mut *room, RecvFlags::DONTWAIT).map(|(_, count)| count);
    match rustix::io::retry_on_intr(receive) {
        Ok(count) => {
            // SAFETY: the kernel has written so many bytes.
            unsafe { buffer.advance_mut(count) };
            Ok(Some(count))
        }
        Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
        Err(error) => Err(error.into()),
    }
}
