//! The process on the other side of a unix socket. What it has forked holds its sockets open when it has ended, and accepts whoever dials it.

use std::os::fd::OwnedFd;

use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use tokio::io::Interest;

use crate::socket::watch;
use crate::stream::Stream;

/// Waits until the process that has dialled has ended. For ever where the system does not say who that is, as between machines.
pub fn ended(stream: &Stream) -> impl Future<Output = ()> + use<> {
    let process = process_of(stream);
    async move {
        match process.map(|process| process.map(|process| watch(process, Interest::READABLE))) {
            // It has ended before this was asked.
            Some(Err(Errno::SRCH)) => {}
            Some(Ok(Ok(process))) if process.readable().await.is_ok() => {}
            _ => std::future::pending().await,
        }
    }
}

fn process_of(stream: &Stream) -> Option<rustix::io::Result<OwnedFd>> {
    let Stream::Unix(unix) = stream else { return None };
    // Of another namespace it is 0.
    let pid = Pid::from_raw(unix.peer_cred().ok()?.pid()?)?;
    Some(pidfd_open(pid, PidfdFlags::empty()))
}
