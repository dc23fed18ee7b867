//! The store that a node daemon holds: memory, table and files behind one lock.

use std::io;
use std::os::fd::BorrowedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};
use wingbeat_core::{ObjectId, ProcessId};

use crate::allocator::{Allocation, LARGE, WARM_FOR};
use crate::arena::Arena;
use crate::error::{CreateError, GetError, RegionError, SpillError, UnsealedError};
use crate::extent::Extent;
use crate::mapping::{Mapping, Region, WriteRegion};
use crate::spill::SpillSpace;
use crate::table::{BATCH, Created, ObjectTable, Pin, Restore, Room, SpillFile, StoreStats};

/// How much memory [`NodeStore::try_create`] reserves itself: about a millisecond's worth.
const QUICK_RESERVE: u64 = 4 << 20;

/// How large a node's store is, and where it spills to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoreConfig {
    /// Bytes of shared memory, rounded up to whole pages. They are taken when they are used.
    pub capacity: u64,
    /// Where to spill; `None` for never.
    pub spill_dir: Option<PathBuf>,
    /// How many bytes may be spilled.
    pub spill_capacity: u64,
    /// Where more bytes than this are used, objects are written to disk [ahead of need](NodeStore::write_ahead); the
    /// capacity for not before the store is full.
    pub write_ahead_above: u64,
}

/// The object store of a node. All methods may be called from any thread.
///
/// `create` and `get` may touch the disk and wait for other calls that do: call them where blocking
/// is fine, after `try_create` and `try_get` answered that they must. They last as long as the IO that they
/// wait for, which is long on a disk that hangs. So do `write_ahead`, `remove_unneeded_files`, and `trim`, which punches memory out. The others
/// only take the lock, which nobody holds during IO.
///
/// The spill file has no name and ends with the store. The memory lives on in the processes that
/// still map it, and ends with them.
#[derive(Debug)]
pub struct NodeStore {
    arena: Arena,
    /// The daemon's own view, for spilling, restoring and the data plane.
    mapping: Arc<Mapping>,
    spill: SpillSpace,
    /// How much memory the machine has left for the arena.
    budget: Option<Budget>,
    table: Mutex<ObjectTable>,
    /// Notified when something that others may wait for is done: a spill, a restore, a punch.
    done: Condvar,
    /// The table's time is counted from here.
    started: Instant,
}

/// An object on disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Spilled {
    /// Its bytes.
    pub size: u64,
    file: SpillFile,
}

/// How long an answer of a [`Budget`] is trusted, unless it is used up earlier: others take memory, too.
const BUDGET_TRUSTED: Duration = Duration::from_millis(10);

/// How often [`NodeStore::create`] makes memory free before it gives up: each time, others may take what was freed.
const RELIEFS: u32 = 16;

/// Answers how many more bytes of memory may be taken, as far as that is known.
type Left = Box<dyn Fn() -> Option<u64> + Send + Sync>;

/// Memory that the arena may still take. Beyond it the kernel would not refuse, but kill a process.
struct Budget {
    left: Left,
    /// Bytes that were left when that was asked, less those that were taken since.
    known: Mutex<Option<(u64, Instant)>>,
}

impl std::fmt::Debug for Budget {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Budget").field("known", &self.known).finish_non_exhaustive()
    }
}

impl Budget {
    fn take(&self, bytes: u64) -> io::Result<()> {
        let mut known = self.known.lock();
        let left = match *known {
            Some((left, asked)) if left >= bytes && asked.elapsed() < BUDGET_TRUSTED => left,
            _ => {
                let left = (self.left)().unwrap_or(u64::MAX);
                *known = Some((left, Instant::now()));
                left
            }
        };
        if left < bytes {
            let why = format!("the machine or its memory limit (cgroup) has {left} bytes left");
            return Err(io::Error::new(io::ErrorKind::OutOfMemory, why));
        }
        if let Some((left, _)) = &mut *known {
            *left -= bytes;
        }
        Ok(())
    }
}

impl NodeStore {
    /// Makes a store.
    pub fn new(config: StoreConfig) -> io::Result<Self> {
        let arena = Arena::create(config.capacity)?;
        let mapping = Mapping::open(arena.fd().try_clone_to_owned()?, arena.capacity())?;
        let (spill, spill_capacity) = match config.spill_dir {
            Some(parent) => (SpillSpace::new(parent), config.spill_capacity),
            // With no capacity the table never asks for a spill, so this is never made.
            None => (SpillSpace::new(std::env::temp_dir()), 0),
        };
        let table = ObjectTable::new(arena.capacity(), spill_capacity).writing_ahead_above(config.write_ahead_above);
        let table = Mutex::new(table);
        Ok(Self { arena, mapping, spill, budget: None, table, done: Condvar::new(), started: Instant::now() })
    }

    /// Takes no more memory than `left` answers, in bytes; nothing if it does not know. It is asked often: it must not
    /// block. Where less is left than an object needs, others are spilled, or it is refused.
    #[must_use]
    pub fn limited_by(self, left: impl Fn() -> Option<u64> + Send + Sync + 'static) -> Self {
        Self { budget: Some(Budget { left: Box::new(left), known: Mutex::default() }), ..self }
    }

    /// Size of the arena in bytes, as [`Mapping::open`] wants it.
    pub fn capacity(&self) -> u64 {
        self.arena.capacity()
    }

    /// Lets a process use the store, and answers the descriptor to send it. The daemon attaches
    /// itself too, for objects that it transfers.
    ///
    /// Every attached process ends with [`NodeStore::process_gone`].
    pub fn attach(&self, process: ProcessId) -> BorrowedFd<'_> {
        self.lock().attach(process);
        self.arena.fd()
    }

    /// Takes back all that a process has: its unsealed objects are gone, its pins are dropped.
    /// What it still asks for is refused, also what is under way.
    pub fn process_gone(&self, process: ProcessId) {
        self.change(|table| table.process_gone(process));
    }

    /// Gives a process an extent of `size` bytes to fill, then to [seal](NodeStore::seal). Spills
    /// other objects if it must.
    pub fn create(&self, id: ObjectId, size: u64, by: ProcessId) -> Result<Extent, CreateError> {
        let mut table = self.lock();
        let mut reliefs = 0;
        loop {
            match table.create(id, size, by)? {
                Created::MakeRoom(room) => self.make_room(&mut table, room).map_err(CreateError::Spill)?,
                Created::Reserve(allocation) => match self.reserve(&mut table, &allocation) {
                    Ok(()) => return table.reserved(id, by, &allocation.cold),
                    Err(error) => {
                        table.reserve_failed(id, by);
                        if reliefs == RELIEFS || !self.relieve(&mut table, size) {
                            return Err(CreateError::OutOfMemory { size, error });
                        }
                        reliefs += 1;
                    }
                },
            }
        }
    }

    /// [`NodeStore::create`] for threads that must not block. `None` if it would have to spill, wait
    /// or reserve much: then create it on a thread that may.
    pub fn try_create(&self, id: ObjectId, size: u64, by: ProcessId) -> Result<Option<Extent>, CreateError> {
        let mut table = self.lock();
        let Created::Reserve(allocation) = table.create(id, size, by)? else { return Ok(None) };
        let cold: u64 = allocation.cold.iter().map(|cold| cold.len).sum();
        if cold <= QUICK_RESERVE && self.reserve(&mut table, &allocation).is_ok() {
            return table.reserved(id, by, &allocation.cold).map(Some);
        }
        table.reserve_failed(id, by);
        Ok(None)
    }

    /// Completes an object that the process created and filled. It can be read from now on.
    pub fn seal(&self, id: ObjectId, by: ProcessId) -> Result<(), UnsealedError> {
        self.change(|table| table.seal(id, by))
    }

    /// Gives up an object that the process created.
    pub fn abort(&self, id: ObjectId, by: ProcessId) -> Result<(), UnsealedError> {
        self.change(|table| table.abort(id, by))
    }

    /// Pins an object for a process and answers where it lies, until [`NodeStore::release`].
    /// Restores it if it is spilled, and spills others for it if it must.
    pub fn get(&self, id: ObjectId, by: ProcessId) -> Result<Extent, GetError> {
        let mut table = self.lock();
        let mut reliefs = 0;
        loop {
            match table.pin(id, by)? {
                Pin::Located(extent) => return Ok(extent),
                Pin::Restoring => self.wait(&mut table),
                Pin::Spilled => match table.restore_started(id, by)? {
                    Restore::MakeRoom(room) => {
                        self.make_room(&mut table, room).map_err(GetError::Spill)?;
                    }
                    Restore::Read(allocation, file) => match self.reserve(&mut table, &allocation) {
                        Ok(()) => {
                            table.backed(&allocation.cold);
                            if let Some(extent) = self.restore(&mut table, allocation.extent, file, by)? {
                                return Ok(extent);
                            }
                        }
                        Err(error) => {
                            table.restore_failed(id);
                            self.done.notify_all();
                            self.remove_unneeded(&mut table);
                            let size = allocation.extent.len;
                            if reliefs == RELIEFS || !self.relieve(&mut table, size) {
                                return Err(GetError::OutOfMemory { size, error });
                            }
                            reliefs += 1;
                        }
                    },
                },
            }
        }
    }

    /// [`NodeStore::get`] for threads that must not block. `None` if it is not in memory: then get
    /// it on a thread that may.
    pub fn try_get(&self, id: ObjectId, by: ProcessId) -> Result<Option<Extent>, GetError> {
        match self.lock().pin(id, by)? {
            Pin::Located(extent) => Ok(Some(extent)),
            Pin::Spilled | Pin::Restoring => Ok(None),
        }
    }

    /// An object that is on disk only, so that it can be read [without room in memory](NodeStore::read_spilled).
    pub fn spilled(&self, id: ObjectId) -> Option<Spilled> {
        let (size, file) = self.lock().spilled(id)?;
        Some(Spilled { size, file })
    }

    /// Reads an object's bytes from disk one piece after the other, until one is refused. Whoever was given all of them has what was
    /// written. Touches the disk.
    ///
    /// # Errors
    /// The disk fails. `None` if the object was deleted or has come back to memory meanwhile.
    pub fn read_spilled(&self, spilled: Spilled, take: impl FnMut(&[u8]) -> bool) -> Result<(), Option<SpillError>> {
        let read = self.spill.read_pieces(spilled.file, take);
        read.map_err(|error| self.spilled(spilled.file.id).filter(|still| *still == spilled).map(|_| error))
    }

    /// The processes that read or write objects here, and how many bytes these have; those with most first.
    pub fn holders(&self) -> Vec<(ProcessId, u64)> {
        self.lock().holders()
    }

    /// A process waits for room, or does so no more, for one object: so others know that it will hardly let go of what it has.
    pub fn waits_for_room(&self, process: ProcessId, does: bool) {
        self.lock().waits(process, does);
    }

    /// Takes one pin of a process back. Answers whether it had one.
    pub fn release(&self, id: ObjectId, by: ProcessId) -> bool {
        self.change(|table| table.unpin(id, by))
    }

    /// Whether the object is complete here, in memory or on disk.
    pub fn contains(&self, id: ObjectId) -> bool {
        self.lock().contains(id)
    }

    /// Keeps an object that is complete here, also one that was deleted and is still read. Answers its size.
    pub fn keep(&self, id: ObjectId) -> Option<u64> {
        self.lock().keep(id)
    }

    /// Whether the object was deleted and is still here, because somebody reads it or it is moved to disk or back.
    pub fn is_going(&self, id: ObjectId) -> bool {
        self.lock().is_going(id)
    }

    /// Deletes an object: nobody can get it any more, and its memory is free at the last release.
    /// Deleting what is not here is fine. What it has on disk stays there until [`NodeStore::remove_unneeded_files`].
    pub fn delete(&self, id: ObjectId) {
        self.change(|table| table.delete(id));
    }

    /// The objects that a process owns, complete or not.
    pub fn objects_of(&self, owner: ProcessId) -> Vec<ObjectId> {
        self.lock().objects_of(owner).collect()
    }

    /// Whether there are any.
    pub fn has_objects_of(&self, owner: ProcessId) -> bool {
        self.lock().objects_of(owner).next().is_some()
    }

    /// Whether deletions left something on disk.
    pub fn has_unneeded_files(&self) -> bool {
        self.lock().has_unneeded()
    }

    /// Gives disk space that deletions left back. Touches the disk.
    pub fn remove_unneeded_files(&self) {
        self.remove_unneeded(&mut self.lock());
    }

    /// Whether so much is used that objects are to be written [ahead of need](NodeStore::write_ahead).
    pub fn is_behind(&self) -> bool {
        self.lock().is_behind()
    }

    /// Writes some of the least recently used objects to disk, so that whoever needs room later only frees their memory.
    /// Answers whether there is more to write. Touches the disk; a few threads at once keep it busy.
    ///
    /// A disk that refuses is left alone for a while. That is nobody's error: whoever needs room has one then.
    pub fn write_ahead(&self) -> bool {
        let mut table = self.lock();
        let objects = table.ahead_of_need();
        if objects.is_empty() {
            return false;
        }
        if let Err(error) = self.write(&mut table, objects, Shortage::Accepted) {
            tracing::warn!(%error, "cannot spill ahead of need");
            table.rest();
        }
        table.is_behind()
    }

    /// Gives memory that has been free for [`WARM_FOR`] back to the system. Answers how many bytes.
    /// To be called about once a second, where blocking is fine.
    pub fn trim(&self, now: Instant) -> u64 {
        let mut table = self.table.lock();
        table.at(now.saturating_duration_since(self.started));
        self.punch_out(&mut table, WARM_FOR)
    }

    /// Gives so many bytes of memory back to the system, of what is free and then of objects that can be spilled. False if there was
    /// nothing of either. Blocks.
    pub fn give_back(&self, bytes: u64) -> bool {
        self.relieve(&mut self.lock(), bytes)
    }

    /// What the store holds now.
    pub fn stats(&self) -> StoreStats {
        self.lock().stats()
    }

    /// The daemon's view of a sealed object.
    ///
    /// # Safety
    /// The daemon has [pinned](NodeStore::get) the object that lies there, and releases it only after the last clone of
    /// the region is dropped.
    pub unsafe fn region(&self, extent: Extent) -> Result<Region, RegionError> {
        // SAFETY: the caller's promise is the mapping's.
        unsafe { self.mapping.region(extent) }
    }

    /// The daemon's view of an extent that it is to fill.
    ///
    /// # Safety
    /// The extent was the answer to a [`create`](NodeStore::create) for the daemon, which seals or aborts the object only
    /// after the region is dropped.
    pub unsafe fn write_region(&self, extent: Extent) -> Result<WriteRegion, RegionError> {
        // SAFETY: the caller's promise is the mapping's.
        unsafe { self.mapping.write_region(extent) }
    }

    fn lock(&self) -> MutexGuard<'_, ObjectTable> {
        let mut table = self.table.lock();
        table.at(self.started.elapsed());
        table
    }

    /// Something that may make room: whoever waits for that looks again, and not only when a slow disk is done.
    fn change<R>(&self, change: impl FnOnce(&mut ObjectTable) -> R) -> R {
        let changed = change(&mut self.lock());
        self.done.notify_all();
        changed
    }

    /// Does something slow without the lock.
    fn unlocked<R>(&self, table: &mut MutexGuard<'_, ObjectTable>, work: impl FnOnce() -> R) -> R {
        let result = MutexGuard::unlocked(table, work);
        table.at(self.started.elapsed());
        result
    }

    fn wait(&self, table: &mut MutexGuard<'_, ObjectTable>) {
        self.done.wait(table);
        table.at(self.started.elapsed());
    }

    /// Puts memory behind an allocation, or behind none of it.
    fn reserve(&self, table: &mut MutexGuard<'_, ObjectTable>, allocation: &Allocation) -> io::Result<()> {
        if allocation.cold.is_empty() {
            return Ok(());
        }
        if let Some(budget) = &self.budget {
            budget.take(allocation.cold.iter().map(|cold| cold.len).sum())?;
        }
        let reserve = || {
            let reserved = allocation.cold.iter().try_for_each(|&cold| self.arena.reserve(cold));
            if reserved.is_err() {
                for &cold in &allocation.cold {
                    let _ = self.arena.punch(cold);
                }
            }
            reserved
        };
        if allocation.extent.len < LARGE {
            // Small objects share pages. A failure here must not take a page from under a neighbour
            // that is being reserved at the same time; and it takes microseconds.
            reserve()
        } else {
            self.unlocked(table, reserve)
        }
    }

    /// Gives memory back to the machine: what is kept warm, and then that of objects that can be spilled. False if there
    /// is none of either.
    fn relieve(&self, table: &mut MutexGuard<'_, ObjectTable>, bytes: u64) -> bool {
        let mut freed = self.punch_out(table, Duration::ZERO);
        // What was written in the first round leaves in the second.
        for _ in 0..2 {
            if freed >= bytes {
                break;
            }
            let dirty = table.shed(bytes - freed);
            freed += self.punch_out(table, Duration::ZERO);
            if freed < bytes
                && !dirty.is_empty()
                && let Err(error) = self.write(table, dirty, Shortage::Relieved)
            {
                tracing::warn!(%error, "memory is short");
            }
        }
        if let Some(budget) = &self.budget {
            *budget.known.lock() = None;
        }
        freed > 0
    }

    fn make_room(&self, table: &mut MutexGuard<'_, ObjectTable>, room: Room) -> Result<(), SpillError> {
        match room {
            Room::Wait => {
                self.wait(table);
                Ok(())
            }
            Room::Write(objects) => self.write(table, objects, Shortage::Relieved),
        }
    }

    /// Writes copies of objects.
    fn write(
        &self,
        table: &mut MutexGuard<'_, ObjectTable>,
        objects: Vec<ObjectId>,
        shortage: Shortage,
    ) -> Result<(), SpillError> {
        // All are marked before the lock is given up, so that others wait instead of writing more.
        let mut left: Vec<_> = objects.iter().filter_map(|id| table.write_started(*id)).collect();
        // Copies that were given up make room for these.
        self.remove_unneeded(table);
        let mut result = Ok(());
        while !left.is_empty() {
            let count = of_a_batch(&left);
            let batch: Vec<_> = left.drain(..count).collect();
            while result.is_ok() {
                result = self.unlocked(table, || self.write_out(&batch));
                let bytes = batch.iter().map(|(extent, _)| extent.len).sum();
                let is_full = result.as_ref().is_err_and(SpillError::is_full) && shortage == Shortage::Relieved;
                if !is_full || !table.give_up_copies(bytes, &objects) {
                    break;
                }
                self.remove_unneeded(table);
                result = Ok(());
            }
            for (extent, file) in batch {
                match result {
                    Ok(()) => {
                        tracing::debug!(object = %file.id, bytes = extent.len, "spilled");
                        table.written(file.id);
                    }
                    Err(_) => table.write_failed(file.id),
                }
            }
            self.done.notify_all();
        }
        self.remove_unneeded(table);
        result
    }

    fn write_out(&self, batch: &[(Extent, SpillFile)]) -> Result<(), SpillError> {
        let regions = batch.iter().map(|(extent, file)| {
            // SAFETY: a sealed object that is being written keeps its place until `written` or `write_failed`.
            let region = unsafe { self.mapping.region(*extent) }.map_err(|error| not_viewed("spill from", error))?;
            Ok((*file, region))
        });
        let regions = regions.collect::<Result<Vec<(SpillFile, Region)>, SpillError>>()?;
        let bytes: Vec<(SpillFile, &[u8])> = regions.iter().map(|(file, region)| (*file, &**region)).collect();
        self.spill.write(&bytes)
    }

    /// Reads an object back and pins it. `None` if it must be tried again.
    fn restore(
        &self,
        table: &mut MutexGuard<'_, ObjectTable>,
        extent: Extent,
        file: SpillFile,
        by: ProcessId,
    ) -> Result<Option<Extent>, GetError> {
        let id = file.id;
        let read = self.unlocked(table, || {
            // SAFETY: the table gave the extent to this restoration alone, until `restored` or `restore_failed`.
            let mut region =
                unsafe { self.mapping.write_region(extent) }.map_err(|error| not_viewed("restore to", error))?;
            self.spill.read(file, &mut region)
        });
        let pinned = match read {
            // Pinned before the lock is given up: otherwise it could be evicted again at once.
            Ok(()) => {
                table.restored(id);
                table.pin(id, by)
            }
            Err(error) => {
                table.restore_failed(id);
                Err(GetError::Io { id, error })
            }
        };
        self.done.notify_all();
        self.remove_unneeded(table);
        match pinned? {
            Pin::Located(extent) => Ok(Some(extent)),
            Pin::Spilled | Pin::Restoring => Ok(None),
        }
    }

    fn remove_unneeded(&self, table: &mut MutexGuard<'_, ObjectTable>) {
        let unneeded = table.take_unneeded();
        if !unneeded.is_empty() {
            self.unlocked(table, || unneeded.into_iter().for_each(|file| self.spill.remove(file)));
        }
    }

    fn punch_out(&self, table: &mut MutexGuard<'_, ObjectTable>, older_than: Duration) -> u64 {
        let withdrawn = table.trim(older_than);
        if withdrawn.is_empty() {
            return 0;
        }
        let punched: Vec<_> =
            self.unlocked(table, || withdrawn.into_iter().map(|extent| (extent, self.arena.punch(extent))).collect());
        let mut bytes = 0;
        for (extent, result) in punched {
            match result {
                Ok(()) => {
                    table.punched(extent);
                    bytes += extent.len;
                }
                Err(error) => {
                    tracing::warn!(?extent, %error, "cannot give memory of the object store back");
                    table.punch_failed(extent);
                }
            }
        }
        self.done.notify_all();
        bytes
    }
}

/// What becomes of a write that finds the disk full.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Shortage {
    /// Copies of objects that are in memory make room for it.
    Relieved,
    Accepted,
}

/// How many of these to write at once.
fn of_a_batch(objects: &[(Extent, SpillFile)]) -> usize {
    let mut bytes = 0;
    let fits = |(extent, _): &&(Extent, SpillFile)| {
        bytes += extent.len;
        bytes <= BATCH
    };
    objects.iter().take_while(fits).count().max(1)
}

/// The daemon itself still writes where it has sealed: a bug, and yet no reason to lose the node.
fn not_viewed(doing: &'static str, error: RegionError) -> SpillError {
    SpillError { doing, path: PathBuf::from("the object store"), error: io::Error::other(error) }
}

#[cfg(test)]
mod tests;
