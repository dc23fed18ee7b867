//! The objects of a store: who made them, where they are, who reads them. Pure: no IO, no clock.
//!
//! ```text
//!            create          reserved         seal          write_started
//!  (nothing) ─────▶ Reserving ─────▶ Unsealed ─────▶ Sealed ─────────────▶ Writing
//!                       │               │            ▲    │ ◀─────────────────┘
//!                       ▼ reserve_failed▼ abort      │    │  written (it has a copy now), write_failed
//!                    (nothing)       (nothing)       │    │
//!                                                    │    ▼ evicted for others, if it has a copy
//!                                           restored │  Spilled ◀─┐
//!                                                    │    │       │ restore_failed
//!                                                    │    ▼       │
//!                                                    └─ Restoring ┘
//! ```
//!
//! Objects never change, so a copy on disk stays good when its object is in memory again: evicting that again writes
//! nothing. When room on disk is short, copies of objects that are in memory are given up first.
//!
//! Deleting dooms an object: it is gone for everybody at once, and its memory or file goes as soon
//! as it is idle, that is sealed or spilled with no pin and no IO under way.
//!
//! What costs time (backing pages, disk IO) is the caller's: an answer such as [`Created::Reserve`]
//! or [`Room::Write`] tells what to do, and the method named there is to be called when it is done.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use wingbeat_core::{ObjectId, ProcessId, TaskId};

use crate::allocator::{Allocation, Allocator, taken_for};
use crate::error::{AlreadyExists, CreateError, GetError, UnsealedError};
use crate::extent::Extent;

mod candidates;
mod object;
mod room;

use candidates::Candidates;
pub use object::SpillFile;
use object::{Object, State, Tally};
pub(crate) use room::BATCH;

/// Answer to [`ObjectTable::create`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Created {
    /// The memory is set aside. Reserve its cold pages, then call [`ObjectTable::reserved`] or
    /// [`ObjectTable::reserve_failed`].
    Reserve(Allocation),
    /// Do this, then create again.
    MakeRoom(Room),
}

/// Answer to [`ObjectTable::restore_started`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Restore {
    /// Reserve the cold pages and read the file into the extent, then call [`ObjectTable::restored`]
    /// or [`ObjectTable::restore_failed`].
    Read(Allocation, SpillFile),
    /// Do this, then start again.
    MakeRoom(Room),
}

/// How room can be made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Room {
    /// Write these objects, least recently used first: for each call [`ObjectTable::write_started`].
    Write(Vec<ObjectId>),
    /// Others are making enough of it: wait until one of them is done.
    Wait,
}

/// Answer to [`ObjectTable::pin`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pin {
    /// It is pinned, and lies here until it is unpinned.
    Located(Extent),
    /// It is on disk: call [`ObjectTable::restore_started`], and pin again when it is restored.
    Spilled,
    /// Somebody is restoring it: wait until that is done, and pin again.
    Restoring,
}

/// What a store holds, in bytes where not said otherwise.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct StoreStats {
    /// Size of the arena.
    pub capacity: u64,
    /// Given out to objects, rounding included.
    pub used: u64,
    /// With memory behind it: used, or freed a moment ago.
    pub backed: u64,
    /// Of objects that are being written.
    pub unsealed: u64,
    /// Of objects that somebody reads.
    pub pinned: u64,
    /// On disk only.
    pub spilled: u64,
    /// Of objects in memory that are on disk, too, or on their way there.
    pub copies: u64,
    /// How much may be on disk.
    pub spill_capacity: u64,
    /// Number of objects, wherever they are.
    pub objects: u64,
}

/// What an attached process would leave behind.
#[derive(Debug, Default)]
struct Holdings {
    unsealed: BTreeSet<ObjectId>,
    /// How often it has pinned what.
    pins: BTreeMap<ObjectId, u64>,
    /// For how many objects it waits for room: until then it will hardly let go of any.
    waits: u64,
}

impl Holdings {
    fn has(&self, id: &ObjectId) -> bool {
        self.unsealed.contains(id) || self.pins.contains_key(id)
    }
}

/// All objects of a store, and the map of its arena. The sums beside it are kept, and not counted anew, since each `put` asks for
/// them.
#[derive(Debug)]
pub struct ObjectTable {
    /// Which parts of the arena are given out.
    allocator: Allocator,
    /// Bytes that may be on disk; 0 for never.
    spill_capacity: u64,
    /// From their creation until they are deleted, and idle.
    objects: BTreeMap<ObjectId, Object>,
    /// The processes that may create and pin. An entry ends with [`ObjectTable::process_gone`];
    /// requests that come later are refused, so nothing can be left to a process that is gone.
    attached: BTreeMap<ProcessId, Holdings>,
    /// Sealed objects in memory that nobody reads.
    candidates: Candidates,
    /// When fewer bytes than this are free, the oldest objects are written until as many are free or can be.
    ahead: u64,
    /// Bytes of objects that have left memory before older ones, since those were not written. As much of those is to be
    /// written, so that their turn comes.
    overtaken: u64,
    /// No sooner is anything written ahead of need.
    rests_until: Duration,
    /// Files that are not needed any more.
    unneeded: Vec<SpillFile>,
    /// Sums over the objects, changed with each of them.
    tally: Tally,
    /// The key of order that the next object gets that nobody reads any more.
    next_use: u64,
    /// The number of the next copy on disk.
    next_file: u64,
    /// The latest time that [`ObjectTable::at`] was told.
    now: Duration,
}

impl ObjectTable {
    /// An empty table over an arena of `capacity` bytes (whole pages), which may spill up to
    /// `spill_capacity` bytes to disk: 0 for never. What is being restored does not count for the time
    /// that it takes.
    pub fn new(capacity: u64, spill_capacity: u64) -> Self {
        Self {
            allocator: Allocator::new(capacity),
            spill_capacity,
            objects: BTreeMap::new(),
            attached: BTreeMap::new(),
            candidates: Candidates::new(capacity),
            ahead: 0,
            overtaken: 0,
            rests_until: Duration::ZERO,
            unneeded: Vec::new(),
            tally: Tally::default(),
            next_use: 0,
            next_file: 0,
            now: Duration::ZERO,
        }
    }

    /// Writes objects ahead of need while more than `mark` bytes are used; see [`ObjectTable::ahead_of_need`].
    #[must_use]
    pub fn writing_ahead_above(self, mark: u64) -> Self {
        Self { ahead: self.allocator.capacity().saturating_sub(mark), ..self }
    }

    /// Says what time it is, as time since any fixed moment. What is freed from now on is as old.
    pub fn at(&mut self, now: Duration) -> &mut Self {
        self.now = self.now.max(now);
        self
    }

    /// Lets a process create and pin objects.
    pub fn attach(&mut self, process: ProcessId) {
        self.attached.entry(process).or_default();
    }

    /// A process waits for room, or does so no more, for one object.
    pub fn waits(&mut self, process: ProcessId, does: bool) {
        if let Some(holdings) = self.attached.get_mut(&process) {
            holdings.waits = if does { holdings.waits + 1 } else { holdings.waits.saturating_sub(1) };
        }
    }

    /// The processes that read or write objects here, and how many bytes these have; those with most first.
    pub fn holders(&self) -> Vec<(ProcessId, u64)> {
        let size = |id: &ObjectId| self.objects.get(id).map_or(0, |object| object.size);
        let held = self.attached.iter().map(|(process, holdings)| {
            (*process, holdings.unsealed.iter().chain(holdings.pins.keys()).map(size).sum())
        });
        let mut holders: Vec<(ProcessId, u64)> = held.filter(|(_, bytes)| *bytes > 0).collect();
        holders.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
        holders
    }

    /// Sets memory aside for an object.
    pub fn create(&mut self, id: ObjectId, size: u64, by: ProcessId) -> Result<Created, CreateError> {
        if !self.attached.contains_key(&by) {
            return Err(CreateError::NotAttached { by });
        }
        if let Some(object) = self.objects.get_mut(&id) {
            let state = match object {
                object if object.is_unsealed() && object.doomed => AlreadyExists::Deleting,
                object if object.is_unsealed() => AlreadyExists::Unsealed,
                object if object.size != size => AlreadyExists::Different,
                // Somebody still reads what was deleted, and here it is wanted again.
                object => {
                    object.doomed = false;
                    AlreadyExists::Sealed
                }
            };
            return Err(CreateError::AlreadyExists { id, state });
        }
        let capacity = self.allocator.capacity();
        if size > capacity {
            return Err(CreateError::TooLarge { id, size, capacity, spill_capacity: self.spill_capacity });
        }
        let allocation = match self.allocate(size, by, self.spill_capacity)? {
            Ok(allocation) => allocation,
            Err(room) => return Ok(Created::MakeRoom(room)),
        };
        self.attached.entry(by).or_default().unsealed.insert(id);
        self.objects.insert(id, Object { size, state: State::Nowhere, pins: 0, doomed: false, last_used: None });
        let extent = allocation.extent;
        self.transition(id, |object| object.state = State::Reserving { extent, by: Some(by) });
        Ok(Created::Reserve(allocation))
    }

    /// The pages of a [`Created::Reserve`] are there: the extent is its creator's to fill.
    pub fn reserved(&mut self, id: ObjectId, by: ProcessId, cold: &[Extent]) -> Result<Extent, CreateError> {
        self.allocator.backed(cold);
        match self.objects.get(&id).map(|object| object.state) {
            Some(State::Reserving { extent, by: Some(by) }) => {
                self.transition(id, |object| object.state = State::Unsealed { extent, by });
                Ok(extent)
            }
            Some(State::Reserving { by: None, .. }) => {
                self.transition(id, |object| object.state = State::Nowhere);
                Err(CreateError::NotAttached { by })
            }
            state => {
                debug_assert!(false, "{id} was not being reserved: {state:?}");
                Err(CreateError::NotAttached { by })
            }
        }
    }

    /// The pages of a [`Created::Reserve`] could not be had: there is no such object.
    pub fn reserve_failed(&mut self, id: ObjectId, by: ProcessId) {
        self.forget_unsealed(id, by);
        self.transition(id, |object| object.state = State::Nowhere);
    }

    /// Completes an object. From now on it can be pinned, and never changes.
    ///
    /// If it was deleted while it was written, this succeeds and the object is gone.
    pub fn seal(&mut self, id: ObjectId, by: ProcessId) -> Result<(), UnsealedError> {
        let extent = self.unsealed_extent(id, by)?;
        self.forget_unsealed(id, by);
        self.transition(id, |object| object.state = State::Sealed { extent, copy: None });
        Ok(())
    }

    /// Gives an unsealed object up.
    pub fn abort(&mut self, id: ObjectId, by: ProcessId) -> Result<(), UnsealedError> {
        self.unsealed_extent(id, by)?;
        self.forget_unsealed(id, by);
        self.transition(id, |object| object.state = State::Nowhere);
        Ok(())
    }

    /// Whether the object is complete here, in memory or on disk.
    pub fn contains(&self, id: ObjectId) -> bool {
        self.objects.get(&id).is_some_and(|object| !object.doomed && !object.is_unsealed())
    }

    /// Keeps an object that is complete here, also one that was deleted and is still read. Answers its size.
    pub fn keep(&mut self, id: ObjectId) -> Option<u64> {
        let object = self.objects.get_mut(&id).filter(|object| !object.is_unsealed())?;
        object.doomed = false;
        Some(object.size)
    }

    /// Whether the object was deleted and is still here.
    pub fn is_going(&self, id: ObjectId) -> bool {
        self.objects.get(&id).is_some_and(|object| object.doomed)
    }

    /// Pins an object for a process, once more for each call.
    pub fn pin(&mut self, id: ObjectId, by: ProcessId) -> Result<Pin, GetError> {
        let Some(holdings) = self.attached.get_mut(&by) else { return Err(GetError::NotAttached { by }) };
        let Some(object) = self.objects.get(&id).filter(|object| !object.doomed) else {
            return Err(GetError::Absent { id });
        };
        match object.state {
            State::Reserving { .. } | State::Unsealed { .. } => Err(GetError::Unsealed { id }),
            State::Nowhere => Err(GetError::Absent { id }),
            State::Spilled { .. } => Ok(Pin::Spilled),
            State::Restoring { .. } => Ok(Pin::Restoring),
            State::Sealed { extent, .. } | State::Writing { extent, .. } => {
                *holdings.pins.entry(id).or_default() += 1;
                self.transition(id, |object| object.pins += 1);
                Ok(Pin::Located(extent))
            }
        }
    }

    /// Takes one pin of a process back. Answers whether it had one.
    pub fn unpin(&mut self, id: ObjectId, by: ProcessId) -> bool {
        let Some(holdings) = self.attached.get_mut(&by) else { return false };
        let Some(pins) = holdings.pins.get_mut(&id) else { return false };
        *pins -= 1;
        if *pins == 0 {
            holdings.pins.remove(&id);
        }
        self.transition(id, |object| object.pins -= 1);
        true
    }

    /// Deletes an object: nobody can pin it any more, and its memory is free at the last unpin (at
    /// its seal or abort, if it is being written).
    pub fn delete(&mut self, id: ObjectId) {
        self.transition(id, |object| object.doomed = true);
    }

    /// The objects that a process owns, whoever made them.
    pub fn objects_of(&self, owner: ProcessId) -> impl Iterator<Item = ObjectId> {
        let of = |seq, index| ObjectId { task: TaskId { owner, seq }, index };
        self.objects.range(of(0, 0)..=of(u64::MAX, u32::MAX)).map(|(id, _)| *id)
    }

    /// Takes back all that a process has: its unsealed objects are gone, its pins are dropped, and
    /// it can neither create nor pin until it is attached again.
    pub fn process_gone(&mut self, process: ProcessId) {
        let Some(holdings) = self.attached.remove(&process) else { return };
        for id in holdings.unsealed {
            self.transition(id, |object| {
                object.state = match object.state {
                    State::Reserving { extent, .. } => State::Reserving { extent, by: None },
                    _ => State::Nowhere,
                }
            });
        }
        for (id, pins) in holdings.pins {
            self.transition(id, |object| object.pins -= pins);
        }
    }

    /// Begins to write a copy of an object, unless it has one, or is read. Answers what to write where; then call
    /// [`ObjectTable::written`] or [`ObjectTable::write_failed`].
    pub fn write_started(&mut self, id: ObjectId) -> Option<(Extent, SpillFile)> {
        let object = self.objects.get(&id).filter(|object| object.pins == 0)?;
        let State::Sealed { extent, copy: None } = object.state else { return None };
        let file = SpillFile { id, number: self.next_file };
        self.next_file += 1;
        if object.last_used == self.candidates.oldest_dirty() {
            self.overtaken = self.overtaken.saturating_sub(taken_for(extent).len);
        }
        self.transition(id, |object| object.state = State::Writing { extent, file });
        Some((extent, file))
    }

    /// The copy is written. The object stays in memory until others need the room.
    pub fn written(&mut self, id: ObjectId) {
        self.transition(id, |object| {
            if let State::Writing { extent, file } = object.state {
                object.state = State::Sealed { extent, copy: Some(file) };
            }
        });
    }

    /// The copy could not be written, and there is none.
    pub fn write_failed(&mut self, id: ObjectId) {
        let file = self.objects.get(&id).and_then(Object::file);
        self.transition(id, |object| {
            if let State::Writing { extent, .. } = object.state {
                object.state = State::Sealed { extent, copy: None };
            }
        });
        self.unneeded.pop_if(|unneeded| Some(*unneeded) == file);
    }

    /// How large an object is, and where its bytes are, if it is on disk only.
    pub fn spilled(&self, id: ObjectId) -> Option<(u64, SpillFile)> {
        match self.objects.get(&id)? {
            &Object { size, state: State::Spilled { file }, doomed: false, .. } => Some((size, file)),
            _ => None,
        }
    }

    /// Begins to bring a spilled object back, for a process that wants to pin it.
    pub fn restore_started(&mut self, id: ObjectId, by: ProcessId) -> Result<Restore, GetError> {
        let Some(&Object { size, state: State::Spilled { file }, doomed: false, .. }) = self.objects.get(&id) else {
            return Err(GetError::Absent { id });
        };
        // Its own file can go as soon as it is back. Without that credit, a full store and a full
        // disk could never exchange anything.
        let allocation = match self.allocate(size, by, self.spill_capacity.saturating_add(size))? {
            Ok(allocation) => allocation,
            Err(room) => return Ok(Restore::MakeRoom(room)),
        };
        let extent = allocation.extent;
        self.transition(id, |object| object.state = State::Restoring { extent, file });
        Ok(Restore::Read(allocation, file))
    }

    /// Pages of an allocation have memory now, whatever becomes of the rest.
    pub fn backed(&mut self, cold: &[Extent]) {
        self.allocator.backed(cold);
    }

    /// The object is back in memory. It keeps its copy, unless room on disk is short.
    pub fn restored(&mut self, id: ObjectId) {
        self.transition(id, |object| {
            if let State::Restoring { extent, file } = object.state {
                object.state = State::Sealed { extent, copy: Some(file) };
            }
        });
        self.give_up_copies(self.tally.files().saturating_sub(self.spill_capacity), &[]);
    }

    /// The object could not be brought back, and stays on disk.
    pub fn restore_failed(&mut self, id: ObjectId) {
        self.transition(id, |object| {
            if let State::Restoring { file, .. } = object.state {
                object.state = State::Spilled { file };
            }
        });
    }

    /// Whether there are files that nothing needs any more.
    pub fn has_unneeded(&self) -> bool {
        !self.unneeded.is_empty()
    }

    /// Files that nothing needs any more: they are to be removed.
    #[must_use = "the files are to be removed"]
    pub fn take_unneeded(&mut self) -> Vec<SpillFile> {
        std::mem::take(&mut self.unneeded)
    }

    /// Withdraws memory that has been free for `older_than`. Punch it out, then call
    /// [`ObjectTable::punched`] or [`ObjectTable::punch_failed`] for each extent.
    pub fn trim(&mut self, older_than: Duration) -> Vec<Extent> {
        self.allocator.trim(self.now, older_than)
    }

    /// An extent of [`ObjectTable::trim`] has no memory behind it any more.
    pub fn punched(&mut self, extent: Extent) {
        self.allocator.punched(extent);
    }

    /// An extent of [`ObjectTable::trim`] still has its memory.
    pub fn punch_failed(&mut self, extent: Extent) {
        self.allocator.punch_failed(extent, self.now);
    }

    /// What the store holds now.
    pub fn stats(&self) -> StoreStats {
        let capacity = self.allocator.capacity();
        StoreStats {
            capacity,
            used: capacity - self.allocator.free_bytes(),
            backed: self.allocator.backed_bytes(),
            unsealed: self.tally.unsealed,
            pinned: self.tally.pinned,
            spilled: self.tally.spilled,
            copies: self.tally.copies + self.tally.writing,
            spill_capacity: self.spill_capacity,
            objects: self.objects.len() as u64,
        }
    }

    fn unsealed_extent(&self, id: ObjectId, by: ProcessId) -> Result<Extent, UnsealedError> {
        match self.objects.get(&id).map(|object| object.state) {
            Some(State::Unsealed { extent, by: creator }) if creator == by => Ok(extent),
            Some(State::Unsealed { by: creator, .. }) => Err(UnsealedError::NotCreator { id, creator }),
            None | Some(State::Nowhere | State::Reserving { .. }) => Err(UnsealedError::Absent { id }),
            Some(_) => Err(UnsealedError::Sealed { id }),
        }
    }

    fn forget_unsealed(&mut self, id: ObjectId, by: ProcessId) {
        if let Some(holdings) = self.attached.get_mut(&by) {
            holdings.unsealed.remove(&id);
        }
    }

    /// Every change of an object goes through here, which keeps all that follows from its state:
    /// the sums, the order of use, and that memory and files go when nothing refers to them.
    fn transition(&mut self, id: ObjectId, change: impl FnOnce(&mut Object)) {
        let Some(object) = self.objects.get_mut(&id) else { return };
        let before = *object;
        change(object);
        if object.doomed && object.is_idle() {
            object.state = State::Nowhere;
        }
        object.last_used = object.is_unread().then(|| {
            before.last_used.unwrap_or_else(|| {
                self.next_use += 1;
                self.next_use
            })
        });
        let after = *object;

        self.tally.replace(Tally::of(&before), Tally::of(&after));
        self.candidates.replace(id, before.standing(), after.standing());
        if after.extent().is_none()
            && let Some(extent) = before.extent()
        {
            self.allocator.free(extent, self.now);
        }
        if let Some(file) = before.file().filter(|file| after.file() != Some(*file)) {
            self.unneeded.push(file);
        }
        if after.state == State::Nowhere {
            debug_assert_eq!(after.pins, 0, "{id} is read while its memory is freed");
            self.objects.remove(&id);
        }
    }
}

#[cfg(test)]
mod tests;
