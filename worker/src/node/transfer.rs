//! Object bytes between nodes: raw, in one piece, from shared memory to shared memory.
//!
//! ```text
//! reader → holder   object id (fixed size)
//! holder → reader   length: u64, or u64::MAX when it has no copy;  then the bytes
//! ```
//!
//! Each transfer has a blocking thread and a connection of its own at both ends; connections are kept for the
//! next one. Several requests for one object wait for one transfer.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use futures::FutureExt;
use futures::future::{BoxFuture, Shared};
use parking_lot::Mutex;
use wingbeat_core::error::Error;
use wingbeat_core::value::{StoreNode, Stored};
use wingbeat_core::{ObjectId, ProcessId, TaskId};
use wingbeat_net::address::{self, Stream};
use wingbeat_net::handshake::Purpose;
use wingbeat_store::{CreateError, Extent, GetError};

use super::Daemon;

const ABSENT: u64 = u64::MAX;

type Fetching = Shared<BoxFuture<'static, Result<(), Error>>>;

/// Transfers under way, and connections between them.
#[derive(Default)]
pub(super) struct Transfers {
    under_way: Mutex<BTreeMap<ObjectId, Fetching>>,
    idle: Mutex<BTreeMap<ProcessId, Vec<Wire>>>,
}

/// A blocking connection of either kind.
enum Wire {
    Unix(UnixStream),
    Tcp(TcpStream),
}

impl Wire {
    fn from_stream(stream: Stream) -> std::io::Result<Wire> {
        match stream {
            Stream::Unix(stream) => {
                let stream = stream.into_std()?;
                stream.set_nonblocking(false)?;
                Ok(Wire::Unix(stream))
            }
            Stream::Tcp(stream) => {
                let stream = stream.into_std()?;
                stream.set_nonblocking(false)?;
                Ok(Wire::Tcp(stream))
            }
        }
    }
}

impl Read for Wire {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        match self {
            Wire::Unix(stream) => stream.read(buffer),
            Wire::Tcp(stream) => stream.read(buffer),
        }
    }
}

impl Write for Wire {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        match self {
            Wire::Unix(stream) => stream.write(bytes),
            Wire::Tcp(stream) => stream.write(bytes),
        }
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

fn encode(id: ObjectId) -> [u8; 20] {
    let mut bytes = [0; 20];
    bytes[..8].copy_from_slice(&id.task.owner.0.to_le_bytes());
    bytes[8..16].copy_from_slice(&id.task.seq.to_le_bytes());
    bytes[16..].copy_from_slice(&id.index.to_le_bytes());
    bytes
}

fn decode(bytes: [u8; 20]) -> ObjectId {
    let number = |at: usize| {
        let mut eight = [0; 8];
        eight.copy_from_slice(&bytes[at..at + 8]);
        u64::from_le_bytes(eight)
    };
    let index = u32::from_le_bytes([bytes[16], bytes[17], bytes[18], bytes[19]]);
    ObjectId { task: TaskId { owner: ProcessId(number(0)), seq: number(8) }, index }
}

/// What the store says when it has no room, for the user.
pub(super) fn create_error(what: String, error: &CreateError) -> Error {
    match error {
        CreateError::TooLarge { size, capacity, spill_capacity, .. } => {
            Error::ObjectTooLarge { what, size: *size, store: *capacity, disk: *spill_capacity }
        }
        CreateError::AlreadyExists { .. } => Error::InvalidArgument { what: format!("{what} is in the store already") },
        other => Error::StoreFull { what, why: other.to_string() },
    }
}

impl Daemon {
    /// Makes sure that an object can be read here. True when a copy was made.
    pub(super) async fn obtain(self: &Arc<Self>, object: ObjectId, stored: Stored) -> Result<bool, Error> {
        if self.store.contains(object) {
            return Ok(false);
        }
        let fetching = {
            let mut under_way = self.transfers.under_way.lock();
            match under_way.get(&object) {
                Some(fetching) => fetching.clone(),
                None => {
                    let daemon = self.clone();
                    let fetching = async move {
                        let result = daemon.clone().fetch_from_any(object, stored).await;
                        daemon.transfers.under_way.lock().remove(&object);
                        result
                    }
                    .boxed()
                    .shared();
                    under_way.insert(object, fetching.clone());
                    fetching
                }
            }
        };
        fetching.await.map(|()| true)
    }

    async fn fetch_from_any(self: Arc<Self>, object: ObjectId, stored: Stored) -> Result<(), Error> {
        let mut tried = Vec::new();
        for holder in stored.nodes.iter().filter(|holder| holder.node != self.id) {
            match self.clone().fetch_from(object, stored.size, holder.clone()).await {
                Ok(()) => return Ok(()),
                // Another holder would not help: the room is missing here.
                Err(error @ (Error::ObjectTooLarge { .. } | Error::StoreFull { .. })) => return Err(error),
                Err(error) => tried.push(format!("{}: {error}", holder.node)),
            }
        }
        let why = match tried.is_empty() {
            true => "no node has a copy of it".to_owned(),
            false => format!("none of its copies could be read ({})", tried.join("; ")),
        };
        Err(Error::ObjectLost { object, why })
    }

    async fn fetch_from(self: Arc<Self>, object: ObjectId, size: u64, holder: StoreNode) -> Result<(), Error> {
        let peer = holder.address.process;
        let idle = self.transfers.idle.lock().get_mut(&peer).and_then(Vec::pop);
        let wire = match idle {
            Some(wire) => wire,
            None => self.dial_bulk(&holder).await?,
        };
        let daemon = self.clone();
        let received = tokio::task::spawn_blocking(move || daemon.receive(object, size, wire)).await;
        let wire =
            received.map_err(|error| Error::Io { what: "receiving an object".into(), why: error.to_string() })??;
        self.transfers.idle.lock().entry(peer).or_default().push(wire);
        Ok(())
    }

    async fn dial_bulk(&self, holder: &StoreNode) -> Result<Wire, Error> {
        let stream =
            address::dial(&holder.address, "a node that holds an object", &self.token, self.hello(Purpose::Bulk))
                .await?;
        Wire::from_stream(stream).map_err(|error| Error::io("connecting to a node", &error))
    }

    fn receive(&self, object: ObjectId, size: u64, mut wire: Wire) -> Result<Wire, Error> {
        let broke = |error: std::io::Error| Error::io(format!("receiving {object}"), &error);
        wire.write_all(&encode(object)).map_err(broke)?;
        let mut head = [0; 8];
        wire.read_exact(&mut head).map_err(broke)?;
        let len = u64::from_le_bytes(head);
        if len == ABSENT {
            return Err(Error::ObjectLost { object, why: "the node has freed it".into() });
        }
        if len != size {
            return Err(Error::ObjectLost { object, why: format!("a copy of {len} bytes was offered for {size}") });
        }
        let extent = match self.store.create(object, size, self.process) {
            Ok(extent) => extent,
            Err(error) => return Err(create_error(object.to_string(), &error)),
        };
        let filled = self.fill(extent, &mut wire);
        match filled {
            Ok(()) => {
                let sealed = self.store.seal(object, self.process);
                sealed.map_err(|error| Error::Io { what: format!("sealing {object}"), why: error.to_string() })?;
                Ok(wire)
            }
            Err(error) => {
                let _ = self.store.abort(object, self.process);
                Err(broke(error))
            }
        }
    }

    fn fill(&self, extent: Extent, wire: &mut Wire) -> std::io::Result<()> {
        let mut region = self.store.write_region(extent).map_err(std::io::Error::other)?;
        wire.read_exact(&mut region)
    }

    /// Serves one bulk connection until the reader closes it.
    pub(super) async fn serve_bulk(self: Arc<Self>, stream: Stream) {
        let daemon = self.clone();
        let served = tokio::task::spawn_blocking(move || -> std::io::Result<()> {
            let mut wire = Wire::from_stream(stream)?;
            let mut asked = [0; 20];
            loop {
                wire.read_exact(&mut asked)?;
                daemon.send_object(decode(asked), &mut wire)?;
            }
        });
        // Ends with the reader's connection, which is how every transfer connection ends.
        let _ = served.await;
    }

    fn send_object(&self, object: ObjectId, wire: &mut Wire) -> std::io::Result<()> {
        let extent = match self.store.get(object, self.process) {
            Ok(extent) => extent,
            Err(GetError::Absent { .. }) => return wire.write_all(&ABSENT.to_le_bytes()),
            Err(error) => {
                tracing::warn!(%error, %object, "cannot send an object");
                return wire.write_all(&ABSENT.to_le_bytes());
            }
        };
        let sent = self.store.region(extent).map_err(std::io::Error::other).and_then(|region| {
            wire.write_all(&(region.len() as u64).to_le_bytes())?;
            wire.write_all(&region)
        });
        self.store.release(object, self.process);
        sent
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_object_id_crosses_the_wire_unchanged() {
        let id = TaskId { owner: ProcessId(0x0123_4567_89ab_cdef), seq: 42 }.output(7);
        assert_eq!(decode(encode(id)), id);
    }
}
