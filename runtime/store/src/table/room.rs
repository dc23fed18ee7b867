//! How objects make room for others: who leaves memory, what is written for that, also ahead of need, and which copies are
//! given up when the disk is short of room.

use std::collections::BTreeSet;
use std::time::Duration;

use wingbeat_core::{ObjectId, ProcessId};

use super::candidates::{EVICTIONS_TRIED, Standing};
use super::object::{Object, State};
use super::{Holdings, ObjectTable, Room};
use crate::allocator::Allocation;
use crate::error::{Full, HeldBy};

/// How much is written at once where objects are smaller, in bytes: large enough that a disk is as fast as it can be.
pub(crate) const BATCH: u64 = 8 << 20;

/// How long nothing is written ahead of need after a disk has refused that.
const REST: Duration = Duration::from_secs(10);

impl ObjectTable {
    /// The least recently used objects without a copy, as many as are to be written now so that whoever needs room later
    /// does not wait for the disk: about `BATCH` bytes. None while there is room, or no disk to write to.
    pub fn ahead_of_need(&self) -> Vec<ObjectId> {
        let mut room = self.spill_capacity.saturating_sub(self.tally.files());
        let mut bytes = 0;
        let fits = |id: &ObjectId| {
            let size = self.objects.get(id).map_or(0, |object| object.size);
            let is_one_more = size <= room && (bytes == 0 || bytes + size <= BATCH);
            room = room.saturating_sub(size);
            bytes += size;
            is_one_more
        };
        match self.is_behind() {
            true => self.candidates.dirty().take_while(fits).collect(),
            false => Vec::new(),
        }
    }

    /// Whether something is to be written ahead of need, as far as there is room for it.
    pub fn is_behind(&self) -> bool {
        let free = self.allocator.free_bytes();
        let lacks = free + self.tally.clean + self.tally.writing < self.ahead;
        let oldest = self.candidates.dirty().next().and_then(|id| self.objects.get(&id));
        let room = self.spill_capacity.saturating_sub(self.tally.files());
        let may_write = room > 0 && self.now >= self.rests_until && oldest.is_some_and(|object| object.size <= room);
        may_write && (lacks || self.overtaken > 0)
    }

    /// The disk has refused what was written ahead of need: that rests for a while.
    pub fn rest(&mut self) {
        self.rests_until = self.now + REST;
    }

    /// Evicts objects that have together `bytes`, wherever in the arena they lie, since the machine lacks memory. Answers
    /// which ones to write, and then to try again, if there are too few that have a copy.
    pub fn shed(&mut self, bytes: u64) -> Vec<ObjectId> {
        let mut lacks = bytes;
        while lacks > 0 {
            let Some(id) = self.candidates.oldest_clean() else { break };
            lacks = lacks.saturating_sub(self.evict(id));
        }
        let mut room = self.spill_room(self.spill_capacity);
        let mut dirty = Vec::new();
        for id in self.candidates.dirty().take(EVICTIONS_TRIED) {
            if lacks == 0 || room == 0 {
                break;
            }
            let size = self.objects.get(&id).map_or(0, |object| object.size);
            if (1..=room).contains(&size) {
                (room, lacks) = (room - size, lacks.saturating_sub(size));
                dirty.push(id);
            }
        }
        self.give_up_for(&dirty, self.spill_capacity, &dirty);
        dirty
    }

    /// Gives up copies of objects that are in memory, but for these objects, until their files have `bytes`. Answers
    /// whether there were any.
    pub fn give_up_copies(&mut self, bytes: u64, but: &[ObjectId]) -> bool {
        if bytes == 0 {
            return false;
        }
        let but: BTreeSet<&ObjectId> = but.iter().collect();
        let mut given_up = 0;
        let enough = |id: &ObjectId| {
            let is_one_more = given_up < bytes;
            given_up += self.objects.get(id).map_or(0, |object| object.size);
            is_one_more
        };
        let copies = self.candidates.copies().filter(|id| !but.contains(id)).take_while(enough);
        let copies: Vec<ObjectId> = copies.collect();
        for &id in &copies {
            self.transition(id, |object| {
                if let State::Sealed { extent, .. } = object.state {
                    object.state = State::Sealed { extent, copy: None };
                }
            });
        }
        !copies.is_empty()
    }

    /// Takes memory for `size` bytes, from objects that have copies if there is not enough. Else answers what makes room.
    pub(super) fn allocate(
        &mut self,
        size: u64,
        by: ProcessId,
        spill_capacity: u64,
    ) -> Result<Result<Allocation, Room>, Full> {
        if let Some(allocation) = self.allocator.allocate(size) {
            if self.allocator.free_bytes() >= self.ahead {
                self.overtaken = 0;
            }
            return Ok(Ok(allocation));
        }
        let foresight = self.allocator.foresee(size);
        if foresight.fits() {
            return Ok(Err(Room::Wait));
        }
        let leaving = match self.candidates.clean_that_make_room(size, foresight, &self.objects) {
            Some(clean) => clean,
            None if self.candidates.fits_soon(size) => return Ok(Err(Room::Wait)),
            None => match self.leaving_for(size, by, spill_capacity)? {
                Ok(clean) => clean,
                Err(room) => return Ok(Err(room)),
            },
        };
        for id in leaving {
            self.evict(id);
        }
        // Part of the room may just be punched out, or written.
        Ok(self.allocator.allocate(size).ok_or(Room::Wait))
    }

    /// Those that leave memory so that `size` bytes fit, if all can at once; else those to write first. Nothing is written
    /// unless that will make it fit.
    fn leaving_for(
        &mut self,
        size: u64,
        by: ProcessId,
        spill_capacity: u64,
    ) -> Result<Result<Vec<ObjectId>, Room>, Full> {
        let spill_room = self.spill_room(spill_capacity);
        let full = || Full {
            needed: size,
            capacity: self.allocator.capacity(),
            free: self.allocator.free_bytes(),
            pinned: self.tally.pinned,
            unsealed: self.tally.unsealed,
            restoring: self.tally.restoring,
            spill_room,
            held_by: self.held_by(size, by, spill_room >= size),
        };
        // What is being written can be given up when it is.
        let if_written = || if self.tally.writing > 0 { Ok(Err(Room::Wait)) } else { Err(full()) };
        if self.spill_capacity == 0 {
            return Err(full());
        }
        if spill_room == 0 {
            return if_written();
        }
        let leaving = self.candidates.that_make_room_in_the_end(size, &self.objects).ok_or_else(full)?;
        let has_copy = |id: &&ObjectId| self.objects.get(id).is_some_and(|object| object.file().is_some());
        let (clean, dirty): (Vec<&ObjectId>, Vec<&ObjectId>) = leaving.iter().partition(has_copy);
        if dirty.is_empty() {
            return Ok(Ok(leaving));
        }
        let bytes = |ids: &[&ObjectId]| -> u64 {
            ids.iter().filter_map(|id| self.objects.get(id)).map(|object| object.size).sum()
        };
        if bytes(&clean) + bytes(&dirty) > spill_room {
            return if_written();
        }
        let dirty: Vec<ObjectId> = dirty.into_iter().copied().collect();
        self.give_up_for(&dirty, spill_capacity, &leaving);
        Ok(Err(Room::Write(dirty)))
    }

    /// Who would have to let go so that `size` bytes fit; `may_write` if there is room on the disk for what is let go.
    fn held_by(&self, size: u64, asker: ProcessId, may_write: bool) -> HeldBy {
        // If it would fit with what nobody holds, it is the disk that has too little room for that.
        let may_write = may_write && !self.candidates.fits_without(size, true, std::iter::empty());
        let wait = self.attached.iter().filter(|(process, holdings)| **process == asker || holdings.waits > 0);
        let wait: Vec<&Holdings> = wait.map(|(_, holdings)| holdings).collect();
        let is_askers = |id: &ObjectId| wait.iter().any(|holdings| holdings.has(id));
        let can_leave = |object: &Object| may_write || object.doomed || object.file().is_some();
        let held = self.candidates.held().filter_map(|id| self.objects.get(&id).map(|object| (id, object)));
        let (of_asker, of_others): (Vec<_>, Vec<_>) =
            held.filter(|(_, object)| can_leave(object)).partition(|(id, _)| is_askers(id));
        let of_others = of_others.iter().map(|(_, object)| *object);
        if self.candidates.fits_without(size, may_write, of_others.clone()) {
            HeldBy::Others
        } else if self.candidates.fits_without(
            size,
            may_write,
            of_others.chain(of_asker.iter().map(|(_, object)| *object)),
        ) {
            HeldBy::Asker
        } else {
            HeldBy::Nobody
        }
    }

    /// What could be written to disk if no object in memory had a copy there.
    fn spill_room(&self, spill_capacity: u64) -> u64 {
        spill_capacity.saturating_sub(self.tally.spilled + self.tally.writing)
    }

    /// Gives up copies, though none of those that are `leaving`, so that these objects can be written.
    fn give_up_for(&mut self, dirty: &[ObjectId], spill_capacity: u64, leaving: &[ObjectId]) {
        let bytes: u64 = dirty.iter().filter_map(|id| self.objects.get(id)).map(|object| object.size).sum();
        let files = self.tally.files() + bytes;
        self.give_up_copies(files.saturating_sub(spill_capacity), leaving);
    }

    /// Frees the memory of an object that has a copy. Answers how many bytes.
    pub(super) fn evict(&mut self, id: ObjectId) -> u64 {
        let Some((taken, Standing::Clean(key))) = self.objects.get(&id).and_then(Object::standing) else { return 0 };
        match self.candidates.oldest_dirty() {
            Some(oldest) if oldest < key => self.overtaken += taken.len,
            Some(_) => {}
            None => self.overtaken = 0,
        }
        self.transition(id, |object| {
            if let State::Sealed { copy: Some(file), .. } = object.state {
                object.state = State::Spilled { file };
            }
        });
        taken.len
    }
}
