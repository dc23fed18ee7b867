//! How connections between processes are made: over the system's sockets, or through a pretended network inside one process.
//!
//! All else is the same over both, since both give a [`Stream`]: a socket that is connected. Which one carries a connection, the address
//! says: each pretended network is a machine of its own.

pub mod memory;
pub(crate) mod system;

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use futures::future::BoxFuture;
use parking_lot::RwLock;
use wingbeat_core::ProcessId;
use wingbeat_core::error::Error;
use wingbeat_core::spec::{Address, MachineId};

pub use crate::admission::Source;
use crate::stream::Stream;

/// Makes connections.
pub trait Transport: Send + Sync + 'static {
    /// Connects with whoever listens there.
    ///
    /// # Errors
    /// [`io::ErrorKind::ConnectionRefused`] means that nobody does, and so that the process is gone.
    fn open<'a>(&'a self, to: &'a Address) -> BoxFuture<'a, io::Result<Stream>>;

    /// Listens as `process`; if asked to, for other machines too. With port 0 the system chooses the port.
    ///
    /// # Errors
    /// The address is in use, or not this machine's.
    fn listen(&self, process: ProcessId, tcp: Option<SocketAddr>) -> BoxFuture<'_, Result<Listening, Error>>;
}

/// Where a process listens, and what comes in there.
pub struct Listening {
    /// Where others reach it.
    pub address: Address,
    /// Who connects.
    pub incoming: Box<dyn Incoming>,
}

/// Connections that come in.
pub trait Incoming: Send {
    /// The next one, and where it comes from.
    ///
    /// # Errors
    /// When this machine lacks something; more may come.
    fn next(&mut self) -> BoxFuture<'_, io::Result<(Stream, Source)>>;

    /// The sockets that listen. As long as any process has them, who dials is not refused.
    fn sockets(&self) -> Vec<BorrowedFd<'_>> {
        Vec::new()
    }
}

/// The transports of machines that are not reached over the system's sockets.
static OTHERS: RwLock<BTreeMap<MachineId, Arc<dyn Transport>>> = RwLock::new(BTreeMap::new());

/// How a machine is reached.
pub(crate) fn of(machine: MachineId) -> Arc<dyn Transport> {
    OTHERS.read().get(&machine).cloned().unwrap_or_else(system::shared)
}
