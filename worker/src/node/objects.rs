//! What worker processes ask of the node's store: a place for an object that they write, and a copy of one that they read.

use std::sync::Arc;
use std::time::Instant;

use wingbeat_core::error::Error;
use wingbeat_core::value::Stored;
use wingbeat_core::{ObjectId, ProcessId};
use wingbeat_store::{AlreadyExists, CreateError, Extent, GetError, NodeStore};

use super::Daemon;
use super::room::NoRoom;

/// How often an object may vanish between its arrival and the look at it before it is given up: each time, somebody
/// must have deleted it.
const VANISHED: u32 = 8;

/// So many of those who hold most are named where there is no room.
const HOLDERS: usize = 3;

/// What becomes of an object that is here when it is to be written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Present {
    /// It goes: an earlier attempt whose result never arrived made it, perhaps of something else, with refs of a process that is gone.
    Replaced,
    /// It stays, whatever its size: somebody may have it already, and read it.
    Kept,
    /// It stays if it has the size of what is to be written.
    Same,
}

/// What there is for an object that is to be written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Destination {
    /// Nothing of it yet. It is to be written here.
    Free(Extent),
    /// The object, complete, of so many bytes.
    Taken(u64),
}

/// Why there is no place for an object that is to be written.
pub(super) enum NoPlace {
    /// There may be some soon.
    NoRoom(NoRoom),
    Failed(Error),
}

/// What the store did for a process on a thread that may block. It is undone if whoever has asked is gone when it is done: the
/// connection has ended, or the call was given up, and nobody would ever seal the extent or release the pin.
struct Unclaimed {
    daemon: Arc<Daemon>,
    object: ObjectId,
    by: ProcessId,
    extent: Extent,
    undo: fn(&NodeStore, ObjectId, ProcessId),
    is_claimed: bool,
}

impl Unclaimed {
    fn claim(mut self) -> Extent {
        self.is_claimed = true;
        self.extent
    }
}

impl Drop for Unclaimed {
    fn drop(&mut self) {
        if !self.is_claimed {
            (self.undo)(&self.daemon.store, self.object, self.by);
            self.daemon.transfers.object_settled();
        }
    }
}

impl Daemon {
    /// Gives a process a place for an object that it is to write, unless the object is `present` and stays. Waits for another
    /// process that is writing it, or still reads one that goes, and for room that others hold.
    ///
    /// # Errors
    /// There is no room, or others take too long.
    pub(super) async fn create(
        self: &Arc<Self>,
        object: ObjectId,
        size: u64,
        by: ProcessId,
        present: Present,
    ) -> Result<Destination, Error> {
        let mut wait = self.room.wait(by, &self.store);
        loop {
            let settled = self.transfers.settled.notified();
            match self.create_if_there_is_room(object, size, by, present).await {
                Ok(destination) => {
                    wait.got();
                    return Ok(destination);
                }
                Err(NoPlace::NoRoom(lacking)) => {
                    let changed = wait.until_changed(&lacking, settled).await;
                    changed.map_err(|why| self.store_full(object, why))?;
                }
                Err(NoPlace::Failed(error)) => return Err(error),
            }
        }
    }

    /// [`Daemon::create`], but for the wait for room.
    pub(super) async fn create_if_there_is_room(
        self: &Arc<Self>,
        object: ObjectId,
        size: u64,
        by: ProcessId,
        present: Present,
    ) -> Result<Destination, NoPlace> {
        let mut waiting_since = None;
        loop {
            // Before the look, so that nothing between the two is missed.
            let settled = self.transfers.settled.notified();
            let mut created = self.store.try_create(object, size, by);
            let is_replaced = match &created {
                Err(CreateError::AlreadyExists { state: AlreadyExists::Different, .. }) => present != Present::Kept,
                Err(CreateError::AlreadyExists { state: AlreadyExists::Sealed, .. }) => present == Present::Replaced,
                _ => false,
            };
            if is_replaced {
                self.delete(vec![object]);
                created = match self.store.is_going(object) {
                    // It is being read, or moved to disk or back. Asked for now, it would stay.
                    true => Err(CreateError::AlreadyExists { id: object, state: AlreadyExists::Deleting }),
                    false => self.store.try_create(object, size, by),
                };
            }
            if let Ok(None) = created {
                // Something must go to disk first.
                let daemon = self.clone();
                let creating = self.wait_for_disk("making room", move || {
                    let created = daemon.store.create(object, size, by);
                    if created.is_err() {
                        // Whoever waits for this writer has its turn, also when nobody waits for this answer any more.
                        daemon.object_settled();
                    }
                    let undo = |store: &NodeStore, object, by| {
                        let _ = store.abort(object, by);
                    };
                    created.map(|extent| Unclaimed { daemon, object, by, extent, undo, is_claimed: false })
                });
                let got = creating.await.map_err(|error| NoPlace::Failed(thread_failed("spilling objects", &error)))?;
                created = got.map(|got| Some(got.claim()));
            }
            match created {
                Ok(Some(extent)) => return Ok(Destination::Free(extent)),
                Ok(None) => {}
                Err(CreateError::AlreadyExists { state: AlreadyExists::Sealed, .. }) => {
                    return Ok(Destination::Taken(size));
                }
                Err(CreateError::AlreadyExists { state: AlreadyExists::Different, .. }) if present == Present::Kept => {
                    // It may be gone since.
                    if let Some(size) = self.store.keep(object) {
                        return Ok(Destination::Taken(size));
                    }
                }
                Err(CreateError::AlreadyExists { state, .. }) => {
                    let since = *waiting_since.get_or_insert_with(Instant::now);
                    let in_time = self.transfers.others_settle(state, since, settled).await;
                    let unavailable = |why| Error::ObjectUnavailable { object, why: format!("{}: {why}", self.who.id) };
                    in_time.map_err(|why| NoPlace::Failed(unavailable(why)))?;
                }
                Err(CreateError::Full(full)) => return Err(NoPlace::NoRoom(full.into())),
                Err(error @ CreateError::OutOfMemory { .. }) => {
                    return Err(NoPlace::NoRoom(NoRoom::in_memory(&error)));
                }
                Err(error) => return Err(NoPlace::Failed(create_error(object, &error))),
            }
        }
    }

    /// There is no room for an object, and who holds most.
    pub(super) fn store_full(&self, object: ObjectId, why: String) -> Error {
        let holders = self.store.holders();
        let pool = self.pool.lock();
        let named = holders.iter().take(HOLDERS).map(|(process, bytes)| match pool.processes.get(process) {
            Some(known) => {
                let name = known.page.name();
                let name = if name.is_empty() { "a worker process" } else { &name };
                format!("{name} (pid {}) {bytes} bytes", pool.state.pid_of(*process))
            }
            None if *process == self.who.process => format!("transfers between nodes {bytes} bytes"),
            None => format!("a program ({process}) {bytes} bytes"),
        });
        let named: Vec<String> = named.collect();
        let held = if named.is_empty() { String::new() } else { format!("; most is held by {}", named.join(", ")) };
        Error::StoreFull { what: object.to_string(), why: why + &held }
    }

    /// Deletes objects here. Their disk space is given back later.
    pub(super) fn delete(self: &Arc<Self>, objects: Vec<ObjectId>) {
        for object in objects {
            self.store.delete(object);
        }
        self.transfers.object_settled();
        self.remove_unneeded_files();
    }

    /// Pins an object for a process, and answers where it lies and whether a copy was made: from another node or from
    /// disk if need be.
    ///
    /// # Errors
    /// [`Error::ObjectLost`] when there is no copy at any of its holders, [`Error::ObjectUnavailable`] when there may be one
    /// that cannot be read from here now, [`Error::StoreFull`] when there is no room for it.
    pub(super) async fn read(
        self: &Arc<Self>,
        object: ObjectId,
        stored: Stored,
        by: ProcessId,
    ) -> Result<(Extent, bool), Error> {
        let (mut new, mut unreadable, mut vanished) = (false, None, 0);
        let mut wait = self.room.wait(by, &self.store);
        while vanished < VANISHED {
            let settled = self.transfers.settled.notified();
            let obtained = self.obtain(object, &stored).await;
            new |= obtained.map_err(|error| also_because(error, unreadable.take()))?;
            match self.pin(object, by).await? {
                Ok(extent) => {
                    wait.got();
                    return Ok((extent, new));
                }
                Err(GetError::Full(full)) => {
                    let changed = wait.until_changed(&full.into(), settled).await;
                    changed.map_err(|why| self.store_full(object, why))?;
                }
                Err(error @ GetError::OutOfMemory { .. }) => {
                    let changed = wait.until_changed(&NoRoom::in_memory(&error), settled).await;
                    changed.map_err(|why| self.store_full(object, why))?;
                }
                Err(error @ GetError::Spill(_)) => {
                    return Err(Error::StoreFull { what: object.to_string(), why: error.to_string() });
                }
                // This copy is of no use to anybody; perhaps there is another.
                Err(error @ GetError::Io { .. }) => {
                    tracing::warn!(%error, %object, "a copy on disk is lost");
                    self.delete(vec![object]);
                    unreadable = Some(error);
                    vanished += 1;
                }
                // Deleted in that moment.
                Err(GetError::Absent { .. } | GetError::Unsealed { .. }) => vanished += 1,
                Err(error) => return Err(Error::ObjectUnavailable { object, why: error.to_string() }),
            }
        }
        Err(Error::ObjectUnavailable { object, why: "its copy here was deleted whenever it had arrived".into() })
    }

    /// Pins an object that is here.
    pub(super) async fn pin(
        self: &Arc<Self>,
        object: ObjectId,
        by: ProcessId,
    ) -> Result<Result<Extent, GetError>, Error> {
        match self.store.try_get(object, by) {
            Ok(Some(extent)) => return Ok(Ok(extent)),
            Ok(None) => {}
            Err(error) => return Ok(Err(error)),
        }
        let daemon = self.clone();
        let got = self.wait_for_disk("reading a spilled object", move || {
            let undo = |store: &NodeStore, object, by| {
                store.release(object, by);
            };
            let got = daemon.store.get(object, by);
            if !matches!(got, Ok(_) | Err(GetError::Full(_))) {
                // The room that it would have come back to is for others.
                daemon.object_settled();
            }
            got.map(|extent| Unclaimed { daemon, object, by, extent, undo, is_claimed: false })
        });
        let got = got.await.map_err(|error| thread_failed("reading a spilled object", &error))?;
        Ok(got.map(Unclaimed::claim))
    }
}

/// What the store says when it has no room, for the user.
fn create_error(object: ObjectId, error: &CreateError) -> Error {
    let what = object.to_string();
    match error {
        CreateError::TooLarge { size, capacity, spill_capacity, .. } => {
            Error::ObjectTooLarge { what, size: *size, store: *capacity, disk: *spill_capacity }
        }
        other => Error::StoreFull { what, why: other.to_string() },
    }
}

pub(super) fn thread_failed(what: &str, error: &tokio::task::JoinError) -> Error {
    Error::Failed { what: what.into(), why: error.to_string() }
}

/// The loss of an object whose copy here could not be read.
fn also_because(error: Error, unreadable: Option<GetError>) -> Error {
    match (error, unreadable) {
        (Error::ObjectLost { object, why }, Some(unreadable)) => {
            Error::ObjectLost { object, why: format!("{why}, and that on this node's disk is lost: {unreadable}") }
        }
        (error, _) => error,
    }
}
