//! What a child process finds on the descriptor that it inherited.

use std::fs::File;
use std::io::{Read, Seek, Write};
use std::os::fd::{FromRawFd, OwnedFd, RawFd};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use wingbeat_core::ProcessId;
use wingbeat_core::codec;
use wingbeat_core::spec::Address;

/// Names the inherited descriptors of a child: `guard:<socket>,<listening>…` or `worker:<start>,<arena>,<page>`.
pub(crate) const VARIABLE: &str = "WINGBEAT_CHILD";

/// What [`VARIABLE`] says to a child of this kind.
pub(crate) fn named(kind: &str, descriptors: &[RawFd]) -> String {
    let numbers: Vec<String> = descriptors.iter().map(RawFd::to_string).collect();
    format!("{kind}:{}", numbers.join(","))
}

/// Which worker process a descendant belongs to; inherited by everything that user code starts.
pub(crate) const BELONGS: &str = "WINGBEAT_PROCESS";

/// Has glibc's allocator ask for huge pages, so that memory for large values costs 512 times fewer page faults: filling
/// 256 MiB takes 30 ms instead of 130. Set for a worker process where the user has said nothing, and taken out again
/// before user code runs, so that its children do not inherit it.
pub(crate) const TUNABLES: (&str, &str) = ("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1");

/// What a worker process must know.
#[derive(Serialize, Deserialize)]
pub(crate) struct WorkerStartInfo {
    pub process: ProcessId,
    pub daemon: Address,
    pub token: String,
    /// Whether to listen for other machines, on the node's own interface.
    pub listen: Option<std::net::IpAddr>,
}

/// A memory file with `value` in it, its position at the start.
pub(crate) fn to_memfd<T: Serialize>(value: &T) -> std::io::Result<OwnedFd> {
    let mut bytes = bytes::BytesMut::new();
    codec::encode_message(value, &mut bytes).map_err(std::io::Error::other)?;
    let fd = rustix::fs::memfd_create("wingbeat-start", rustix::fs::MemfdFlags::CLOEXEC)?;
    let mut file = File::from(fd);
    file.write_all(&bytes)?;
    file.rewind()?;
    Ok(file.into())
}

/// Reads what [`to_memfd`] wrote.
pub(crate) fn from_memfd<T: DeserializeOwned>(fd: OwnedFd) -> std::io::Result<T> {
    let mut file = File::from(fd);
    file.rewind()?;
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes)?;
    codec::decode_message(bytes.into()).map_err(std::io::Error::other)
}

/// Takes ownership of an inherited descriptor, and keeps it from being inherited further.
pub(crate) fn inherited(fd: RawFd) -> std::io::Result<OwnedFd> {
    if fd < 3 {
        return Err(std::io::Error::other(format!("descriptor {fd} cannot be inherited")));
    }
    // SAFETY: the parent left this descriptor open for this process alone, and named it in a variable that
    // was read and removed just now, so that nothing else in this process owns it.
    let owned = unsafe { OwnedFd::from_raw_fd(fd) };
    rustix::io::fcntl_setfd(&owned, rustix::io::FdFlags::CLOEXEC)?;
    Ok(owned)
}
