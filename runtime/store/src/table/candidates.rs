//! Which objects could leave memory for others: in the order of their use, and by where they lie. No question here takes
//! longer because there are more objects, but for the logarithm of their number.

use std::collections::{BTreeMap, BTreeSet};

use wingbeat_core::ObjectId;

use super::object::Object;
use crate::allocator::{Foresight, place_in, taken_for};
use crate::extent::Extent;
use crate::ranges::Ranges;

/// How many of the least recently used objects are looked at for a run of bytes that is long enough before any run is
/// taken that is: about a millisecond's worth.
pub(super) const EVICTIONS_TRIED: usize = 1024;

type Objects = BTreeMap<ObjectId, Object>;

/// What stands between the memory of an object and another one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Standing {
    /// It is read, or not complete, or on its way back from the disk.
    Held {
        /// Whether it is on disk, too.
        has_copy: bool,
    },
    /// Its copy is being written: it can leave when that is done.
    Writing,
    /// It is on disk, too: it can leave at once. With when it was used last.
    Clean(u64),
    /// It must be written before it can leave. With when it was used last.
    Dirty(u64),
}

/// All of them, over one arena.
#[derive(Debug)]
pub(super) struct Candidates {
    /// Least recently used first.
    clean: BTreeMap<u64, ObjectId>,
    /// Least recently used first.
    dirty: BTreeMap<u64, ObjectId>,
    /// Both, by the first byte that they take.
    places: BTreeMap<u64, ObjectId>,
    /// Those that are held, and of them those that have a copy.
    held: BTreeSet<ObjectId>,
    read: BTreeSet<ObjectId>,
    /// Bytes that belong to nothing, or to clean objects.
    at_once: Ranges,
    /// Bytes that belong to nothing, or to objects that are being written.
    soon: Ranges,
    /// Bytes that belong to nothing, or to objects that nobody reads.
    ever: Ranges,
    /// How many objects were looked at.
    #[cfg(test)]
    pub(super) steps: std::cell::Cell<u64>,
}

impl Candidates {
    pub(super) fn new(capacity: u64) -> Self {
        let mut all = Ranges::default();
        all.insert(Extent { offset: 0, len: capacity });
        Self {
            clean: BTreeMap::new(),
            dirty: BTreeMap::new(),
            places: BTreeMap::new(),
            held: BTreeSet::new(),
            read: BTreeSet::new(),
            at_once: all.clone(),
            soon: all.clone(),
            ever: all,
            #[cfg(test)]
            steps: std::cell::Cell::default(),
        }
    }

    /// An object, and with it what it takes of the arena, stands otherwise now. `None` is for an object without memory.
    pub(super) fn replace(
        &mut self,
        id: ObjectId,
        before: Option<(Extent, Standing)>,
        after: Option<(Extent, Standing)>,
    ) {
        if before == after {
            return;
        }
        match before {
            Some((_, Standing::Held { .. })) => _ = (self.held.remove(&id), self.read.remove(&id)),
            Some((taken, Standing::Clean(key))) => _ = (self.clean.remove(&key), self.places.remove(&taken.offset)),
            Some((taken, Standing::Dirty(key))) => _ = (self.dirty.remove(&key), self.places.remove(&taken.offset)),
            _ => {}
        }
        match after {
            Some((_, Standing::Held { has_copy })) => _ = (self.held.insert(id), has_copy && self.read.insert(id)),
            Some((taken, Standing::Clean(key))) => {
                _ = (self.clean.insert(key, id), self.places.insert(taken.offset, id));
            }
            Some((taken, Standing::Dirty(key))) => {
                _ = (self.dirty.insert(key, id), self.places.insert(taken.offset, id));
            }
            _ => {}
        }
        let at_once = |standing| matches!(standing, Standing::Clean(_));
        let soon = |standing| matches!(standing, Standing::Writing);
        let ever = |standing| !matches!(standing, Standing::Held { .. });
        change(&mut self.at_once, before, after, at_once);
        change(&mut self.soon, before, after, soon);
        change(&mut self.ever, before, after, ever);
    }

    /// Clean objects that make room for `size` bytes together, if there are any; `free` is what is free now.
    pub(super) fn clean_that_make_room(
        &self,
        size: u64,
        free: Foresight<'_>,
        objects: &Objects,
    ) -> Option<Vec<ObjectId>> {
        let hole = place_in(&self.at_once, size)?;
        Some(self.that_make_room(self.clean.values(), free, hole, objects))
    }

    /// Whether there is room for `size` bytes when all that is being written has left.
    pub(super) fn fits_soon(&self, size: u64) -> bool {
        place_in(&self.soon, size).is_some()
    }

    /// Objects that make room for `size` bytes together, with what is being written, if there are any.
    pub(super) fn that_make_room_in_the_end(&self, size: u64, objects: &Objects) -> Option<Vec<ObjectId>> {
        let hole = place_in(&self.ever, size)?;
        Some(self.that_make_room(self.oldest(), Foresight::over(&self.soon, size), hole, objects))
    }

    /// Whether there is room for `size` bytes if these objects are out of the way, too, and all that can leave has left: what must be
    /// written for that only if it `may_write`.
    pub(super) fn fits_without<'a>(
        &self,
        size: u64,
        may_write: bool,
        objects: impl Iterator<Item = &'a Object>,
    ) -> bool {
        let mut free = if may_write { self.ever.clone() } else { self.at_once.clone() };
        for extent in objects.filter_map(Object::extent) {
            free.insert(taken_for(extent));
        }
        place_in(&free, size).is_some()
    }

    /// The least recently used of these that make a hole; else, after some, those that lie in the `hole`.
    fn that_make_room<'a>(
        &self,
        oldest: impl Iterator<Item = &'a ObjectId>,
        mut foresight: Foresight<'_>,
        hole: Extent,
        objects: &Objects,
    ) -> Vec<ObjectId> {
        let mut tried = Vec::new();
        for &id in oldest.take(EVICTIONS_TRIED) {
            self.count_step();
            let Some(extent) = objects.get(&id).and_then(Object::extent) else { continue };
            tried.push((id, taken_for(extent)));
            if let Some(hole) = foresight.suppose_free(extent) {
                // Those that lie elsewhere would leave for nothing.
                tried.retain(|(_, taken)| taken.overlaps(hole));
                return tried.into_iter().map(|(id, _)| id).collect();
            }
        }
        self.within(hole, objects)
    }

    /// What lies in a hole, at least in part.
    fn within(&self, hole: Extent, objects: &Objects) -> Vec<ObjectId> {
        let before = self.places.range(..hole.offset).next_back().map(|(_, id)| *id);
        let reaches_in = |id: &ObjectId| {
            let extent = objects.get(id).and_then(Object::extent);
            extent.is_some_and(|extent| taken_for(extent).overlaps(hole))
        };
        let within = self.places.range(hole.offset..hole.end()).map(|(_, id)| *id);
        before.filter(reaches_in).into_iter().chain(within).inspect(|_| self.count_step()).collect()
    }

    /// All of them, least recently used first.
    fn oldest(&self) -> impl Iterator<Item = &ObjectId> {
        let (mut clean, mut dirty) = (self.clean.iter().peekable(), self.dirty.iter().peekable());
        std::iter::from_fn(move || {
            let is_clean = match (clean.peek(), dirty.peek()) {
                (Some((clean, _)), Some((dirty, _))) => clean < dirty,
                (clean, _) => clean.is_some(),
            };
            if is_clean { clean.next() } else { dirty.next() }.map(|(_, id)| id)
        })
    }

    /// The least recently used clean object.
    pub(super) fn oldest_clean(&self) -> Option<ObjectId> {
        self.clean.first_key_value().map(|(_, id)| *id)
    }

    /// Least recently used first.
    pub(super) fn dirty(&self) -> impl Iterator<Item = ObjectId> {
        self.dirty.values().copied()
    }

    /// When the least recently used dirty object was used last.
    pub(super) fn oldest_dirty(&self) -> Option<u64> {
        self.dirty.first_key_value().map(|(key, _)| *key)
    }

    /// What is held, by whomever.
    pub(super) fn held(&self) -> impl Iterator<Item = ObjectId> {
        self.held.iter().copied()
    }

    /// Objects in memory that are on disk, too: first those that will leave memory last.
    pub(super) fn copies(&self) -> impl Iterator<Item = ObjectId> {
        self.read.iter().chain(self.clean.values().rev()).copied()
    }

    #[cfg(not(test))]
    fn count_step(&self) {}

    #[cfg(test)]
    fn count_step(&self) {
        self.steps.set(self.steps.get() + 1);
    }
}

/// Keeps a set of bytes that belong to nothing, or to objects that stand so.
fn change(
    set: &mut Ranges,
    before: Option<(Extent, Standing)>,
    after: Option<(Extent, Standing)>,
    is_so: impl Fn(Standing) -> bool,
) {
    let others = |object: Option<(Extent, Standing)>| object.filter(|(_, standing)| !is_so(*standing));
    match (others(before), others(after)) {
        (Some((taken, _)), None) => _ = set.insert(taken),
        (None, Some((taken, _))) => set.remove(taken),
        // An object does not move, unless it is out of memory in between.
        (Some(_), Some(_)) | (None, None) => {}
    }
}

#[cfg(test)]
impl Candidates {
    /// That it is what it would be if it had been made of these objects only now.
    pub(super) fn check(&self, capacity: u64, objects: impl Iterator<Item = (ObjectId, Option<(Extent, Standing)>)>) {
        let mut anew = Candidates::new(capacity);
        objects.for_each(|(id, standing)| anew.replace(id, None, standing));
        assert_eq!((&self.clean, &self.dirty), (&anew.clean, &anew.dirty));
        assert_eq!((&self.places, &self.held, &self.read), (&anew.places, &anew.held, &anew.read));
        assert_eq!((&self.at_once, &self.soon, &self.ever), (&anew.at_once, &anew.soon, &anew.ever));
    }
}
