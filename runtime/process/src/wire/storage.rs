//! Values in the shared memory of this process's node.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use wingbeat_core::ObjectId;
use wingbeat_core::codec::Encoded;
use wingbeat_core::error::Error;
use wingbeat_core::spec::Address;
use wingbeat_core::value::{StoreNode, Stored};
use wingbeat_net::messages::{Fetch, Located, PeerMessage, Place};
use wingbeat_store::Extent;

use crate::note::note;
use crate::owner::Outside;
use crate::recorded::Event;
use crate::wire::node_link::NodeLink;
use crate::wire::process::Process;
use crate::wire::view::{Bits, Pinned};

/// After so long it is said that a value waits for room, once a minute.
const TOLD_AFTER: Duration = Duration::from_secs(5);

/// When that was said last.
static TOLD: Mutex<Option<Instant>> = Mutex::new(None);

/// The pause before an owner is told again of a copy, when contact with it was lost.
const TOLD_AGAIN: Duration = Duration::from_secs(1);

/// The thread that writes a value stands still meanwhile, and whoever looks on sees nothing happen.
fn say_that_it_waits(bytes: u64) {
    let mut told = TOLD.lock();
    if told.is_none_or(|told| told.elapsed() >= Duration::from_secs(60)) {
        *told = Some(Instant::now());
        note(format_args!(
            "a value of {bytes} bytes has waited for {} s for its node's object store: for room, until others drop values or are done with them, or for its disk",
            TOLD_AFTER.as_secs()
        ));
    }
}

impl Process {
    /// Attaches the store of a node, the first one or, after that one died, another.
    pub fn set_storage(&self, storage: NodeLink) {
        if self.is_shut_down() {
            storage.connection().close();
            return;
        }
        if let Some(steward) = storage.steward() {
            // A driver that moves to another node keeps that of its first.
            let _ = self.wire.steward.set(steward);
        }
        self.wire.record(|| Event::NodeAttached(storage.node()));
        self.wire.home.link.send_replace(Some(storage.recorded_by(self.wire.recorded())));
        // In contact before there is anything to say: what is said of a value is then with the steward when its ref is with others,
        // and outlives a kill of this process in the next moment.
        self.owner.greet_steward();
    }

    /// Somebody attaches another node when this one dies: who uses it meanwhile waits.
    pub fn will_move(&self) {
        self.wire.home.moves.store(true, Ordering::Release);
    }

    /// The node's store, if this process has a node.
    pub fn storage(&self) -> Option<NodeLink> {
        self.wire.home.link.borrow().clone()
    }

    /// Asks the node, or the one after it if it dies before it has answered.
    async fn ask_node<T, F>(&self, ask: impl Fn(NodeLink) -> F) -> Result<(NodeLink, T), Error>
    where
        F: Future<Output = Result<T, Error>>,
    {
        let mut homes = self.wire.home.link.subscribe();
        loop {
            let Some(node) = homes.borrow_and_update().clone() else {
                let what = "shared memory is of no use to a process that has joined no node".to_owned();
                return Err(Error::InvalidArgument { what });
            };
            match ask(node.clone()).await {
                Ok(answer) => return Ok((node, answer)),
                Err(_) if node.connection().is_closed() && self.wire.home.moves.load(Ordering::Acquire) => {
                    tokio::select! {
                        _ = homes.changed() => {}
                        () = self.over() => return Err(self.owner.over_error()),
                    }
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Writes an encoded value into the node's store. Blocks the calling thread for two round trips to the
    /// daemon and the copy. What an earlier attempt at the same task has left there is kept, unless this `replaces` it; the
    /// size in the answer is then that of what is there.
    pub(crate) fn store(&self, id: ObjectId, encoded: &Encoded<'_>, replaces: bool) -> Result<Stored, Error> {
        let size = encoded.len() as u64;
        loop {
            let process = self.clone();
            let steward = self.steward_of(id);
            let create = async move {
                let ask = move |node: NodeLink| {
                    let steward = steward.clone();
                    async move { node.create(id, size, replaces, steward).await }
                };
                let mut creating = std::pin::pin!(process.ask_node(ask));
                match tokio::time::timeout(TOLD_AFTER, &mut creating).await {
                    Ok(created) => created,
                    Err(_) => {
                        say_that_it_waits(size);
                        creating.await
                    }
                }
            };
            let (node, place) = self.on_io(create)?;
            let size = match place {
                Place::Free(_) => size,
                Place::Taken { len } => len,
            };
            let stored = Stored { size, nodes: vec![node.here()], refs: None };
            if let Place::Free(located) = place
                && let Err(error) = self.fill(&node, id, located, encoded)
            {
                match node.connection().is_closed() && self.wire.home.moves.load(Ordering::Acquire) {
                    true => continue,
                    false => return Err(error),
                }
            }
            self.wire.record(|| Event::Stored(id, size));
            return Ok(stored);
        }
    }

    fn fill(&self, node: &NodeLink, id: ObjectId, located: Located, encoded: &Encoded<'_>) -> Result<(), Error> {
        let extent = Extent { offset: located.offset, len: located.len };
        // SAFETY: the daemon answered the extent to `create` for this process; the object is sealed below, after the region
        // is dropped, and aborted nowhere while it lives.
        let region = unsafe { node.mapping().write_region(extent) };
        let mut region = region
            .map_err(|error| Error::Failed { what: "writing to the node's store".into(), why: error.to_string() })?;
        encoded.copy_to(&mut region);
        drop(region);
        let node = node.clone();
        self.on_io(async move { node.seal(id).await })
    }

    /// Brings a stored value into reach, from another node or disk if need be, and pins it.
    pub(crate) async fn fetch(&self, id: ObjectId, stored: Stored) -> Result<Bits, Error> {
        let steward = self.steward_of(id);
        let ask = move |node: NodeLink| {
            let what = Fetch { object: id, stored: stored.clone(), steward: steward.clone() };
            async move { node.fetch(what).await }
        };
        let (storage, (located, new)) = self.ask_node(ask).await?;
        self.wire.record(|| Event::Fetched(id, located.len));
        if new {
            let at = storage.here();
            if id.owner() == self.owner.id {
                self.owner.copied(id, at);
            } else {
                self.tell_of_copy(id, at);
            }
        }
        let extent = Extent { offset: located.offset, len: located.len };
        // SAFETY: the daemon answered the extent to `fetch`, with a pin for this process, which `Pinned` releases when the
        // region is dropped with it; it gives the region to nobody.
        let region = unsafe { storage.mapping().region(extent) };
        let region = region
            .map_err(|error| Error::Failed { what: "reading from the node's store".into(), why: error.to_string() })?;
        Ok(Bits::Shared(Arc::new(Pinned::new(region, id, storage.clone()))))
    }

    /// Who answers for an object when its owner is no more, as far as is known here.
    fn steward_of(&self, id: ObjectId) -> Option<Box<Address>> {
        self.wire.address_of(id.owner())?.steward
    }

    /// Tells the owner of an object that a node has a copy, over as many contacts as it takes: nobody else would ever have it
    /// deleted.
    fn tell_of_copy(&self, id: ObjectId, at: StoreNode) {
        let process = self.clone();
        let tell = move || process.send_to(id.owner(), PeerMessage::Copied { object: id, at: at.clone() });
        if !tell() {
            return;
        }
        let process = self.clone();
        self.vital("word of a copy", async move {
            while !process.wire.peers.flushed_to(id.owner()).await && !process.is_shut_down() {
                tokio::time::sleep(TOLD_AGAIN).await;
                if !tell() {
                    return;
                }
            }
        });
    }
}

#[cfg(test)]
#[path = "storage_tests.rs"]
mod tests;
