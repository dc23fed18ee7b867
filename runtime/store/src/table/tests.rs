use proptest::prelude::*;
use wingbeat_core::TaskId;

use super::candidates::EVICTIONS_TRIED;
use super::*;
use crate::allocator::WARM_FOR;
use crate::error::{Full, HeldBy};

const KIB: u64 = 1 << 10;
const CAPACITY: u64 = 1 << 20;
const ALICE: ProcessId = ProcessId(1);
const BOB: ProcessId = ProcessId(2);

fn object(seq: u64) -> ObjectId {
    ObjectId { task: TaskId { owner: ALICE, seq }, index: 0 }
}

fn table(spill_capacity: u64) -> ObjectTable {
    let mut table = ObjectTable::new(CAPACITY, spill_capacity);
    table.attach(ALICE);
    table.attach(BOB);
    table
}

impl ObjectTable {
    /// Creates an object for which there is room.
    fn write(&mut self, id: ObjectId, size: u64) -> Extent {
        match self.create(id, size, ALICE) {
            Ok(Created::Reserve(allocation)) => self.reserved(id, ALICE, &allocation.cold).unwrap(),
            other => panic!("no room for {id}: {other:?}"),
        }
    }

    fn put(&mut self, id: ObjectId, size: u64) -> Extent {
        let extent = self.write(id, size);
        self.seal(id, ALICE).unwrap();
        extent
    }

    fn room(&mut self, id: ObjectId, size: u64) -> Room {
        match self.create(id, size, ALICE) {
            Ok(Created::MakeRoom(room)) => room,
            other => panic!("expected to be told how to make room: {other:?}"),
        }
    }

    /// Writes a copy of it.
    fn copy(&mut self, id: ObjectId) -> SpillFile {
        let (_, file) = self.write_started(id).unwrap();
        self.written(id);
        file
    }

    fn spill(&mut self, id: ObjectId) -> SpillFile {
        let file = self.copy(id);
        assert!(self.evict(id) > 0);
        file
    }

    fn restore(&mut self, id: ObjectId) {
        let Ok(Restore::Read(allocation, _)) = self.restore_started(id, ALICE) else {
            panic!("{id} cannot be restored")
        };
        self.backed(&allocation.cold);
        self.restored(id);
    }

    fn read(&mut self, id: ObjectId) {
        assert!(matches!(self.pin(id, BOB), Ok(Pin::Located(_))), "{id} is not in memory");
        assert!(self.unpin(id, BOB));
    }

    fn is_spilled(&self, id: ObjectId) -> bool {
        matches!(self.objects[&id].state, State::Spilled { .. })
    }

    /// What must hold at any time.
    fn check(&self) {
        let mut tally = Tally::default();
        let mut used = 0;
        let mut extents: Vec<Extent> = Vec::new();
        for (&id, object) in &self.objects {
            tally.replace(Tally::default(), Tally::of(object));
            extents.extend(object.extent().map(taken_for));
            used += object.extent().map_or(0, |extent| taken_for(extent).len);
            assert_eq!(object.last_used.is_some(), object.is_unread());
            let pins: u64 = self.attached.values().filter_map(|holdings| holdings.pins.get(&id)).sum();
            assert_eq!(object.pins, pins, "{id} is pinned by nobody that could release it");
            let creators = self.attached.values().filter(|holdings| holdings.unsealed.contains(&id)).count();
            let orphan = matches!(object.state, State::Reserving { by: None, .. });
            assert_eq!(creators, usize::from(object.is_unsealed() && !orphan), "{id} is written by nobody");
            assert!(!(object.doomed && object.is_idle()), "{id} is deleted, idle, and still there");
        }
        extents.sort();
        assert!(extents.is_sorted_by(|a, b| a.end() <= b.offset), "objects overlap");
        assert_eq!(self.tally, tally);
        let objects = self.objects.iter().map(|(id, object)| (*id, object.standing()));
        self.candidates.check(self.allocator.capacity(), objects);
        assert_eq!(self.stats().used, used);
        // An object that is exchanged for another one is on disk for a moment longer.
        assert!(self.tally.files() <= self.spill_capacity + CAPACITY);
    }
}

#[test]
fn an_object_is_readable_only_once_it_is_sealed() {
    let mut table = table(0);
    let extent = table.write(object(1), 100);
    assert!(matches!(table.pin(object(1), BOB), Err(GetError::Unsealed { .. })));
    assert!(!table.contains(object(1)));
    table.seal(object(1), ALICE).unwrap();
    assert_eq!(table.pin(object(1), BOB).unwrap(), Pin::Located(extent));
    assert!(table.contains(object(1)));
}

#[test]
fn only_the_creator_seals_or_aborts() {
    let mut table = table(0);
    table.write(object(1), 100);
    assert_eq!(table.seal(object(1), BOB), Err(UnsealedError::NotCreator { id: object(1), creator: ALICE }));
    assert_eq!(table.abort(object(1), BOB), Err(UnsealedError::NotCreator { id: object(1), creator: ALICE }));
    table.seal(object(1), ALICE).unwrap();
    assert_eq!(table.abort(object(1), ALICE), Err(UnsealedError::Sealed { id: object(1) }));
    assert_eq!(table.seal(object(2), ALICE), Err(UnsealedError::Absent { id: object(2) }));
}

#[test]
fn a_deleted_object_that_is_still_read_is_there_again_when_it_is_made_again() {
    let mut table = table(0);
    table.write(object(1), 100);
    table.seal(object(1), ALICE).unwrap();
    table.pin(object(1), BOB).unwrap();
    table.delete(object(1));
    let again = table.create(object(1), 100, ALICE);
    assert!(matches!(again, Err(CreateError::AlreadyExists { state: AlreadyExists::Sealed, .. })), "{again:?}");
    table.unpin(object(1), BOB);
    assert!(table.contains(object(1)));
}

#[test]
fn a_deleted_object_that_is_still_read_can_be_kept_as_it_is() {
    let mut table = table(0);
    table.put(object(1), KIB);
    table.pin(object(1), BOB).unwrap();
    table.delete(object(1));
    assert_eq!(table.keep(object(1)), Some(KIB));
    table.unpin(object(1), BOB);
    assert!(table.contains(object(1)));
    table.write(object(2), KIB);
    assert_eq!(table.keep(object(2)), None, "it is not complete");
    assert_eq!(table.keep(object(3)), None);
    table.check();
}

#[test]
fn an_object_is_not_created_twice() {
    let mut table = table(0);
    let existing = |table: &mut ObjectTable, size: u64| match table.create(object(1), size, BOB) {
        Err(CreateError::AlreadyExists { state, .. }) => state,
        other => panic!("{other:?}"),
    };
    table.write(object(1), 100);
    assert_eq!(existing(&mut table, 100), AlreadyExists::Unsealed);
    table.seal(object(1), ALICE).unwrap();
    assert_eq!(existing(&mut table, 100), AlreadyExists::Sealed);
    assert_eq!(existing(&mut table, 99), AlreadyExists::Different);
    table.pin(object(1), BOB).unwrap();
    table.delete(object(1));
    assert!(!table.contains(object(1)));
    table.unpin(object(1), BOB);
    assert!(matches!(table.create(object(1), 1, BOB), Ok(Created::Reserve(_))));
}

#[test]
fn a_full_store_spills_the_least_recently_used_object() {
    let mut table = table(CAPACITY);
    for seq in 0..4 {
        table.put(object(seq), 256 * KIB);
    }
    // Reading it makes object 0 the most recently used one.
    table.pin(object(0), BOB).unwrap();
    table.unpin(object(0), BOB);
    assert_eq!(table.room(object(9), 256 * KIB), Room::Write(vec![object(1)]));
    table.copy(object(1));
    assert_eq!((table.stats().spilled, table.stats().copies), (0, 256 * KIB), "it is in memory, too");
    table.put(object(9), 256 * KIB);
    assert_eq!(table.pin(object(1), BOB).unwrap(), Pin::Spilled);
    assert!(table.contains(object(1)));
    assert_eq!(table.stats().spilled, 256 * KIB);
}

#[test]
fn only_what_makes_the_hole_is_spilled() {
    let mut table = table(CAPACITY);
    for seq in 0..4 {
        table.put(object(seq), 256 * KIB);
    }
    table.pin(object(1), BOB).unwrap();
    // 0 is older than 2 and 3, but lies alone behind the pinned 1.
    assert_eq!(table.room(object(9), 512 * KIB), Room::Write(vec![object(2), object(3)]));
}

#[test]
fn a_pinned_object_never_spills() {
    let mut table = table(CAPACITY);
    table.put(object(1), CAPACITY);
    table.pin(object(1), BOB).unwrap();
    assert_eq!(table.write_started(object(1)), None);
    let Err(CreateError::Full(full)) = table.create(object(2), 64, ALICE) else { panic!("there is no room") };
    assert_eq!((full.needed, full.free, full.pinned), (64, 0, CAPACITY));
}

#[test]
fn an_object_that_is_pinned_while_it_is_written_stays_in_memory_and_keeps_its_copy() {
    let mut table = table(CAPACITY);
    let extent = table.put(object(1), CAPACITY);
    table.write_started(object(1)).unwrap();
    assert_eq!(table.pin(object(1), BOB).unwrap(), Pin::Located(extent));
    table.written(object(1));
    assert!(!table.has_unneeded());
    assert!(matches!(table.create(object(2), 64, ALICE), Err(CreateError::Full(_))));
    assert_eq!((table.stats().used, table.stats().spilled, table.stats().copies), (CAPACITY, 0, CAPACITY));
    table.unpin(object(1), BOB);
    table.put(object(2), 64);
    assert!(table.is_spilled(object(1)));
}

#[test]
fn what_has_a_copy_leaves_memory_again_without_another_write() {
    let mut table = table(2 * CAPACITY);
    table.put(object(1), CAPACITY);
    let file = table.spill(object(1));
    table.put(object(2), CAPACITY);
    table.spill(object(2));
    for _ in 0..3 {
        table.restore(object(1));
        assert_eq!(table.objects[&object(1)].file(), Some(file));
        assert_eq!(table.write_started(object(1)), None);
        // Whoever needs the room has it at once.
        table.restore(object(2));
    }
    assert!(table.is_spilled(object(1)) && !table.has_unneeded());
    table.delete(object(1));
    assert_eq!(table.take_unneeded(), [file]);
}

#[test]
fn a_copy_that_costs_nothing_more_to_evict_goes_before_older_objects_that_must_be_written() {
    let mut table = table(CAPACITY);
    for seq in 0..4 {
        table.put(object(seq), 256 * KIB);
    }
    table.copy(object(2));
    table.put(object(9), 256 * KIB);
    assert!(table.is_spilled(object(2)));
    // Then it is the turn of the old ones.
    assert_eq!(table.room(object(10), 256 * KIB), Room::Write(vec![object(0)]));
}

#[test]
fn unsealed_memory_is_never_spilled() {
    let mut table = table(CAPACITY);
    table.write(object(1), CAPACITY);
    assert!(matches!(table.create(object(2), 1, ALICE), Err(CreateError::Full(Full { unsealed: CAPACITY, .. }))));
}

/// Whom a full table names to a process that wants so many bytes.
fn held_by(table: &mut ObjectTable, size: u64, asker: ProcessId) -> HeldBy {
    match table.create(object(99), size, asker) {
        Err(CreateError::Full(full)) => full.held_by,
        other => panic!("there is room: {other:?}"),
    }
}

#[test]
fn a_full_table_says_who_would_have_to_let_go() {
    let mut table = table(4 * CAPACITY);
    let (half, most) = (512 * KIB, 768 * KIB);
    table.put(object(1), half);
    table.pin(object(1), BOB).unwrap();
    assert_eq!(held_by(&mut table, most, ALICE), HeldBy::Others);
    assert_eq!(held_by(&mut table, most, BOB), HeldBy::Asker);
    // What both read is there until both are done.
    table.pin(object(1), ALICE).unwrap();
    assert_eq!(held_by(&mut table, most, ALICE), HeldBy::Asker);
    table.unpin(object(1), ALICE);
    // What is written is like what is read.
    table.write(object(2), half);
    assert_eq!(held_by(&mut table, half, BOB), HeldBy::Others);
    assert_eq!(held_by(&mut table, most, BOB), HeldBy::Asker);
    assert_eq!(held_by(&mut table, half, ALICE), HeldBy::Others);
    assert_eq!(held_by(&mut table, CAPACITY, ALICE), HeldBy::Asker);
}

#[test]
fn those_who_read_and_write_are_named_with_how_much() {
    let mut table = table(0);
    table.write(object(1), 64 * KIB);
    table.put(object(2), 128 * KIB);
    assert_eq!(table.holders(), [(ALICE, 64 * KIB)]);
    table.pin(object(2), BOB).unwrap();
    table.pin(object(2), BOB).unwrap();
    assert_eq!(table.holders(), [(BOB, 128 * KIB), (ALICE, 64 * KIB)]);
}

#[test]
fn who_waits_for_room_is_not_waited_for_as_others_are() {
    let mut table = table(4 * CAPACITY);
    table.put(object(1), 512 * KIB);
    table.pin(object(1), BOB).unwrap();
    assert_eq!(held_by(&mut table, CAPACITY, ALICE), HeldBy::Others);
    table.waits(BOB, true);
    assert_eq!(held_by(&mut table, CAPACITY, ALICE), HeldBy::Asker);
    table.waits(BOB, false);
    assert_eq!(held_by(&mut table, CAPACITY, ALICE), HeldBy::Others);
}

#[test]
fn what_comes_back_from_disk_is_held_by_others_until_it_can_leave_again() {
    let mut table = table(4 * CAPACITY);
    table.put(object(1), CAPACITY);
    table.spill(object(1));
    assert!(matches!(table.restore_started(object(1), ALICE), Ok(Restore::Read(..))));
    let full = table.create(object(2), 64, ALICE);
    assert!(matches!(full, Err(CreateError::Full(Full { held_by: HeldBy::Others, restoring: CAPACITY, .. }))));
    table.restored(object(1));
    table.put(object(2), 64);
}

#[test]
fn where_the_disk_is_what_lacks_room_nobody_holds_anything() {
    // Of three objects two would have to be written, and one can.
    let mut table = table(600 * KIB);
    table.put(object(1), 400 * KIB);
    table.put(object(2), 400 * KIB);
    assert_eq!(held_by(&mut table, 512 * KIB, ALICE), HeldBy::Nobody);
}

#[test]
fn what_could_not_be_spilled_is_held_by_nobody_but_what_goes_when_it_is_read_is() {
    let mut table = table(0);
    table.put(object(1), CAPACITY);
    assert_eq!(held_by(&mut table, 64, ALICE), HeldBy::Nobody);
    table.pin(object(1), BOB).unwrap();
    assert_eq!(held_by(&mut table, 64, ALICE), HeldBy::Nobody);
    table.delete(object(1));
    assert_eq!(held_by(&mut table, 64, ALICE), HeldBy::Others);
    table.unpin(object(1), BOB);
    table.put(object(2), CAPACITY);
}

#[test]
fn a_full_disk_ends_the_spilling() {
    let mut table = table(300 * KIB);
    table.put(object(1), 512 * KIB);
    table.put(object(2), 256 * KIB);
    table.put(object(3), 256 * KIB);
    let create = table.create(object(4), 512 * KIB, ALICE);
    assert!(matches!(create, Err(CreateError::Full(Full { spill_room, .. })) if spill_room == 300 * KIB));
}

#[test]
fn a_second_writer_waits_for_the_room_that_is_being_made() {
    let mut table = table(CAPACITY);
    table.put(object(1), CAPACITY);
    assert_eq!(table.room(object(2), KIB), Room::Write(vec![object(1)]));
    table.write_started(object(1)).unwrap();
    assert_eq!(table.room(object(3), KIB), Room::Wait);
    table.write_failed(object(1));
    assert!(!table.has_unneeded(), "there is no file");
    assert_eq!(table.room(object(3), KIB), Room::Write(vec![object(1)]));
}

#[test]
fn an_object_larger_than_the_store_is_refused_at_once() {
    let mut table = table(u64::MAX);
    for size in [CAPACITY + 1, u64::MAX] {
        assert!(matches!(table.create(object(1), size, ALICE), Err(CreateError::TooLarge { .. })));
    }
    table.put(object(1), CAPACITY);
}

#[test]
fn a_spilled_object_comes_back_even_if_the_disk_is_full() {
    let mut table = table(600 * KIB);
    table.put(object(1), 600 * KIB);
    let file = table.spill(object(1));
    table.put(object(2), 600 * KIB);
    assert_eq!(table.restore_started(object(1), ALICE).unwrap(), Restore::MakeRoom(Room::Write(vec![object(2)])));
    table.copy(object(2));
    table.restore(object(1));
    assert!(table.is_spilled(object(2)));
    assert_eq!(table.take_unneeded(), [file], "there is no room for it beside the other");
    assert!(matches!(table.pin(object(1), BOB), Ok(Pin::Located(_))));
}

#[test]
fn copies_of_what_is_in_memory_are_given_up_when_the_disk_is_short_of_room() {
    let mut table = table(512 * KIB);
    for seq in 0..4 {
        table.put(object(seq), 256 * KIB);
    }
    let (old, read) = (table.copy(object(1)), table.copy(object(2)));
    table.pin(object(1), BOB).unwrap();
    table.pin(object(2), BOB).unwrap();
    table.unpin(object(1), BOB);
    table.pin(object(1), BOB).unwrap();
    assert_eq!(table.room(object(9), 256 * KIB), Room::Write(vec![object(0)]));
    assert_eq!(table.take_unneeded(), [old], "one is enough");
    table.copy(object(0));
    table.put(object(9), 256 * KIB);
    // What leaves memory keeps its own.
    table.unpin(object(2), BOB);
    table.put(object(10), 256 * KIB);
    assert!(table.is_spilled(object(0)) && table.is_spilled(object(2)));
    assert_eq!(table.objects[&object(2)].file(), Some(read));
    assert!(matches!(table.create(object(11), 256 * KIB, ALICE), Err(CreateError::Full(Full { spill_room: 0, .. }))));
    table.check();
}

/// Has a mark at 3/4, and five objects of 128 KiB.
fn below_the_mark(spill_capacity: u64) -> ObjectTable {
    let mut table = table(spill_capacity).writing_ahead_above(768 * KIB);
    for seq in 0..5 {
        table.put(object(seq), 128 * KIB);
    }
    table
}

#[test]
fn nothing_is_written_ahead_below_the_mark() {
    let mut table = below_the_mark(CAPACITY);
    table.put(object(5), 128 * KIB);
    assert!(!table.is_behind() && table.ahead_of_need().is_empty());
}

#[test]
fn above_the_mark_the_oldest_objects_are_written_until_others_find_room_at_once() {
    let mut table = below_the_mark(CAPACITY);
    table.put(object(5), 128 * KIB);
    table.put(object(6), 64 * KIB);
    table.read(object(0));
    assert!(table.is_behind());
    assert_eq!(table.ahead_of_need()[..2], [object(1), object(2)]);
    table.write_started(object(1)).unwrap();
    assert!(!table.is_behind(), "what is being written counts");
    table.written(object(1));
    // 192 KiB are free, and 128 KiB can be.
    assert_eq!(table.ahead_of_need(), []);
    for seq in 10..12 {
        table.put(object(seq), 128 * KIB);
    }
    assert!(table.is_spilled(object(1)));
    assert!(table.is_behind());
    table.check();
}

#[test]
fn what_is_written_ahead_has_room_on_the_disk_and_costs_nobody_a_copy() {
    let mut table = below_the_mark(200 * KIB);
    table.put(object(5), 256 * KIB);
    assert_eq!(table.ahead_of_need(), [object(0)]);
    table.copy(object(0));
    assert!(!table.is_behind() && table.ahead_of_need().is_empty());
    assert!(!table.has_unneeded());
}

#[test]
fn a_disk_that_refuses_is_left_alone_for_a_while() {
    let mut table = below_the_mark(CAPACITY);
    table.put(object(5), 256 * KIB);
    table.rest();
    assert!(!table.is_behind() && table.ahead_of_need().is_empty());
    table.at(Duration::from_secs(60));
    assert!(table.is_behind());
}

#[test]
fn old_objects_are_written_when_younger_ones_have_left_memory_before_them() {
    let mut table = table(2 * CAPACITY).writing_ahead_above(768 * KIB);
    for seq in 0..4 {
        table.put(object(seq), 256 * KIB);
    }
    table.copy(object(3));
    assert!(!table.is_behind(), "a quarter can be free at once");
    table.put(object(4), 256 * KIB);
    assert!(table.is_spilled(object(3)));
    table.copy(object(4));
    // Otherwise those two would take turns for as long as they are used, beside others that nobody uses.
    assert_eq!(table.ahead_of_need()[..1], [object(0)]);
    table.copy(object(0));
    assert!(!table.is_behind());
    table.restore(object(3));
    assert!(table.is_spilled(object(0)));
    // Where there is room again, nobody is in anybody's way.
    table.restore(object(0));
    assert!(table.is_spilled(object(4)) && table.overtaken > 0);
    (1..4).for_each(|seq| table.delete(object(seq)));
    table.put(object(5), 64 * KIB);
    assert!(!table.is_behind());
}

#[test]
fn a_deleted_object_is_gone_at_once_and_its_memory_at_the_last_unpin() {
    let mut table = table(0);
    table.put(object(1), CAPACITY);
    table.pin(object(1), ALICE).unwrap();
    table.pin(object(1), BOB).unwrap();
    table.delete(object(1));
    assert!(matches!(table.pin(object(1), BOB), Err(GetError::Absent { .. })));
    assert!(table.unpin(object(1), ALICE));
    assert_eq!(table.stats().used, CAPACITY);
    assert!(table.unpin(object(1), BOB));
    assert_eq!(table.stats().used, 0);
    assert!(!table.unpin(object(1), BOB));
}

#[test]
fn deletion_waits_for_the_writer_and_for_the_disk() {
    let mut table = table(CAPACITY);
    table.write(object(1), KIB);
    table.delete(object(1));
    table.seal(object(1), ALICE).unwrap();
    assert!(!table.contains(object(1)));

    table.put(object(2), KIB);
    let (_, file) = table.write_started(object(2)).unwrap();
    table.delete(object(2));
    assert!(!table.has_unneeded());
    table.written(object(2));
    assert_eq!(table.take_unneeded(), [file]);

    table.put(object(3), KIB);
    let file = table.spill(object(3));
    table.delete(object(3));
    assert_eq!(table.take_unneeded(), [file]);
    assert_eq!(
        table.stats(),
        StoreStats { backed: table.stats().backed, ..super::ObjectTable::new(CAPACITY, CAPACITY).stats() }
    );
}

#[test]
fn a_gone_process_loses_its_unsealed_extents_and_pins() {
    let mut table = table(0);
    table.put(object(1), KIB);
    table.write(object(2), KIB);
    table.pin(object(1), ALICE).unwrap();
    table.pin(object(1), ALICE).unwrap();
    table.pin(object(1), BOB).unwrap();
    table.process_gone(ALICE);
    assert_eq!(table.stats().unsealed, 0);
    assert_eq!(table.seal(object(2), ALICE), Err(UnsealedError::Absent { id: object(2) }));
    assert!(table.contains(object(1)), "what it sealed is its owner's to delete");
    assert_eq!(table.stats().pinned, KIB);
    table.unpin(object(1), BOB);
    assert_eq!(table.stats().pinned, 0);
    table.check();
}

#[test]
fn a_gone_process_gets_nothing_more() {
    let mut table = table(0);
    table.put(object(1), KIB);
    let Ok(Created::Reserve(allocation)) = table.create(object(2), KIB, BOB) else { panic!() };
    table.process_gone(BOB);
    assert!(matches!(table.reserved(object(2), BOB, &allocation.cold), Err(CreateError::NotAttached { by: BOB })));
    assert!(matches!(table.create(object(3), KIB, BOB), Err(CreateError::NotAttached { by: BOB })));
    assert!(matches!(table.pin(object(1), BOB), Err(GetError::NotAttached { by: BOB })));
    assert_eq!(table.stats().used, KIB);
}

#[derive(Debug, Clone)]
enum Operation {
    Create { seq: u64, size: u64, by: u64 },
    Reserved { seq: u64, succeeds: bool },
    Seal { seq: u64, by: u64 },
    Abort { seq: u64, by: u64 },
    Pin { seq: u64, by: u64 },
    Unpin { seq: u64, by: u64 },
    Delete { seq: u64 },
    Gone { by: u64 },
    WriteDone { seq: u64, succeeds: bool },
    Ahead,
    NoRoom { bytes: u64 },
    Shed { bytes: u64 },
    RestoreDone { seq: u64, succeeds: bool },
    Trim { after_ms: u64 },
    Punched,
}

fn operation() -> impl Strategy<Value = Operation> {
    use Operation::*;
    let (seq, by) = (0..12u64, 0..3u64);
    let size = prop_oneof![Just(0), 1..10_000u64, 100_000..600_000u64, Just(CAPACITY)];
    prop_oneof![
        6 => (seq.clone(), size, by.clone()).prop_map(|(seq, size, by)| Create { seq, size, by }),
        6 => (seq.clone(), prop::bool::weighted(0.9)).prop_map(|(seq, succeeds)| Reserved { seq, succeeds }),
        6 => (seq.clone(), by.clone()).prop_map(|(seq, by)| Seal { seq, by }),
        1 => (seq.clone(), by.clone()).prop_map(|(seq, by)| Abort { seq, by }),
        4 => (seq.clone(), by.clone()).prop_map(|(seq, by)| Pin { seq, by }),
        4 => (seq.clone(), by.clone()).prop_map(|(seq, by)| Unpin { seq, by }),
        2 => seq.clone().prop_map(|seq| Delete { seq }),
        1 => by.prop_map(|by| Gone { by }),
        4 => (seq.clone(), prop::bool::weighted(0.8)).prop_map(|(seq, succeeds)| WriteDone { seq, succeeds }),
        2 => Just(Ahead),
        1 => (1..CAPACITY).prop_map(|bytes| NoRoom { bytes }),
        1 => (1..CAPACITY).prop_map(|bytes| Shed { bytes }),
        4 => (seq, prop::bool::weighted(0.8)).prop_map(|(seq, succeeds)| RestoreDone { seq, succeeds }),
        1 => (0..20_000u64).prop_map(|after_ms| Trim { after_ms }),
        1 => Just(Punched),
    ]
}

/// A shell that does what the table asks, though in any order, and watches the files and pins.
#[derive(Default)]
struct Shell {
    reserving: BTreeMap<ObjectId, (ProcessId, Allocation)>,
    files: BTreeSet<SpillFile>,
    withdrawn: Vec<Extent>,
    /// Where each process was told that an object lies, once for each pin.
    located: BTreeMap<(ObjectId, ProcessId), Vec<Extent>>,
    now: Duration,
}

impl Shell {
    fn remove_unneeded(&mut self, table: &mut ObjectTable) {
        for file in table.take_unneeded() {
            assert!(self.files.remove(&file), "{file:?} was removed twice, or never written");
        }
    }

    fn write(&mut self, table: &mut ObjectTable, objects: Vec<ObjectId>) {
        for id in objects {
            assert!(!self.located.keys().any(|(pinned, _)| *pinned == id), "{id} is pinned");
            let (_, file) = table.write_started(id).unwrap();
            self.files.insert(file);
        }
    }

    fn make_room(&mut self, table: &mut ObjectTable, room: Room) {
        match room {
            Room::Wait => {
                let is_written = |object: &Object| matches!(object.state, State::Writing { .. });
                let is_one_written = table.objects.values().any(is_written);
                assert!(is_one_written || !self.withdrawn.is_empty(), "waits for nothing");
            }
            Room::Write(objects) => {
                assert!(!objects.is_empty());
                self.write(table, objects);
            }
        }
    }

    fn apply(&mut self, table: &mut ObjectTable, operation: Operation) {
        let state = |table: &ObjectTable, id| table.objects.get(&id).map(|object| object.state);
        match operation {
            Operation::Create { seq, size, by } => match table.create(object(seq), size, ProcessId(by)) {
                Ok(Created::Reserve(allocation)) => {
                    self.reserving.insert(object(seq), (ProcessId(by), allocation));
                }
                Ok(Created::MakeRoom(room)) => self.make_room(table, room),
                Err(_) => {}
            },
            Operation::Reserved { seq, succeeds } => {
                let Some((by, allocation)) = self.reserving.remove(&object(seq)) else { return };
                if succeeds {
                    let _ = table.reserved(object(seq), by, &allocation.cold);
                } else {
                    table.reserve_failed(object(seq), by);
                }
            }
            Operation::Seal { seq, by } => drop(table.seal(object(seq), ProcessId(by))),
            Operation::Abort { seq, by } => drop(table.abort(object(seq), ProcessId(by))),
            Operation::Pin { seq, by } => match table.pin(object(seq), ProcessId(by)) {
                Ok(Pin::Located(extent)) => {
                    self.located.entry((object(seq), ProcessId(by))).or_default().push(extent);
                }
                Ok(Pin::Spilled) => {
                    if let Ok(Restore::MakeRoom(room)) = table.restore_started(object(seq), ALICE) {
                        self.make_room(table, room);
                    }
                }
                Ok(Pin::Restoring) | Err(_) => {}
            },
            Operation::Unpin { seq, by } => {
                let key = (object(seq), ProcessId(by));
                assert_eq!(table.unpin(key.0, key.1), self.located.contains_key(&key));
                if let Some(extents) = self.located.get_mut(&key) {
                    extents.pop();
                    if extents.is_empty() {
                        self.located.remove(&key);
                    }
                }
            }
            Operation::Delete { seq } => table.delete(object(seq)),
            Operation::Gone { by } => {
                table.process_gone(ProcessId(by));
                self.located.retain(|(_, process), _| *process != ProcessId(by));
                table.attach(ProcessId(by));
            }
            Operation::WriteDone { seq, succeeds } => {
                if let Some(State::Writing { file, .. }) = state(table, object(seq)) {
                    if succeeds {
                        table.written(object(seq));
                    } else {
                        table.write_failed(object(seq));
                        self.files.remove(&file);
                    }
                }
            }
            Operation::Ahead => {
                let objects = table.ahead_of_need();
                let files = table.tally.files();
                self.write(table, objects);
                assert!(table.tally.files() <= table.spill_capacity.max(files), "there is no room on the disk");
            }
            Operation::NoRoom { bytes } => {
                let copies = table.tally.copies;
                let is_given_up = table.give_up_copies(bytes, &[]);
                assert!(table.tally.copies <= copies.saturating_sub(bytes), "there is more to give up");
                assert!(is_given_up || table.tally.copies == copies);
            }
            Operation::Shed { bytes } => {
                let objects = table.shed(bytes);
                self.write(table, objects);
            }
            Operation::RestoreDone { seq, succeeds } => {
                if let Some(State::Restoring { .. }) = state(table, object(seq)) {
                    let id = object(seq);
                    if succeeds {
                        table.restored(id)
                    } else {
                        table.restore_failed(id)
                    };
                }
            }
            Operation::Trim { after_ms } => {
                self.now += Duration::from_millis(after_ms);
                self.withdrawn.extend(table.at(self.now).trim(WARM_FOR));
            }
            Operation::Punched => self.withdrawn.drain(..).for_each(|extent| table.punched(extent)),
        }
    }

    fn check(&mut self, table: &mut ObjectTable) {
        table.check();
        self.remove_unneeded(table);
        let needed: BTreeSet<_> = table.objects.values().filter_map(Object::file).collect();
        assert_eq!(self.files, needed);
        for (&(id, _), extents) in &self.located {
            for &extent in extents {
                assert_eq!(table.objects[&id].extent(), Some(extent), "{id} moved while it was pinned");
            }
        }
    }
}

proptest! {
    #[test]
    fn whatever_happens_nothing_overlaps_moves_or_leaks(
        mark in prop_oneof![Just(0), Just(CAPACITY / 2), Just(CAPACITY)],
        operations in prop::collection::vec(operation(), 1..if cfg!(miri) { 60 } else { 300 }),
    ) {
        let mut table = ObjectTable::new(CAPACITY, CAPACITY).writing_ahead_above(mark);
        (0..3).for_each(|by| table.attach(ProcessId(by)));
        let mut shell = Shell::default();
        for operation in operations {
            shell.apply(&mut table, operation);
            shell.check(&mut table);
        }
        // When every process is gone, all IO is over and everything is deleted, nothing is left.
        for seq in 0..12 {
            for succeeds in [true, false] {
                shell.apply(&mut table, Operation::WriteDone { seq, succeeds });
                shell.apply(&mut table, Operation::RestoreDone { seq, succeeds });
                shell.apply(&mut table, Operation::Reserved { seq, succeeds });
            }
            shell.apply(&mut table, Operation::Delete { seq });
        }
        (0..3).for_each(|by| shell.apply(&mut table, Operation::Gone { by }));
        shell.check(&mut table);
        prop_assert_eq!(shell.files.len(), 0);
        let stats = table.stats();
        prop_assert_eq!((stats.objects, stats.used, stats.pinned, stats.unsealed), (0, 0, 0, 0));
        prop_assert_eq!((stats.spilled, stats.copies), (0, 0));
    }
}

/// So many small objects that are used least recently, and of which every second one is read: they free no long run.
fn scattered(table: &mut ObjectTable) {
    for n in 0..2 * EVICTIONS_TRIED as u64 + 3 {
        table.put(object(n), 64);
        if n % 2 == 0 {
            table.pin(object(n), BOB).unwrap();
        }
    }
}

#[test]
#[cfg_attr(miri, ignore = "it writes thousands of objects")]
fn one_long_object_is_spilled_where_a_thousand_short_ones_make_no_room() {
    let mut table = table(CAPACITY);
    scattered(&mut table);
    let (long, rest) = (object(1_000_000), object(1_000_001));
    table.put(long, 512 * KIB);
    let free = table.allocator.free_bytes();
    table.put(rest, free);
    table.pin(rest, BOB).unwrap();
    assert_eq!(table.room(object(2_000_000), 400 * KIB), Room::Write(vec![long]));
    table.check();
}

/// How many objects are looked at meanwhile.
fn steps<R>(table: &mut ObjectTable, work: impl FnOnce(&mut ObjectTable) -> R) -> (R, u64) {
    table.candidates.steps.set(0);
    let result = work(table);
    (result, table.candidates.steps.get())
}

#[test]
#[cfg_attr(miri, ignore = "it writes thousands of objects")]
fn a_store_without_hope_looks_at_nothing() {
    let mut table = table(CAPACITY);
    scattered(&mut table);
    let rest = object(1_000_001);
    let free = table.allocator.free_bytes();
    table.put(rest, free);
    table.pin(rest, BOB).unwrap();
    let (asked, looked_at) = steps(&mut table, |table| table.create(object(2_000_000), 64 * KIB, ALICE));
    assert!(matches!(asked, Err(CreateError::Full(_))));
    assert_eq!(looked_at, 0);
    // What is shorter still has a chance.
    assert!(matches!(table.create(object(2_000_001), 64, ALICE), Ok(Created::MakeRoom(_))));
    table.unpin(rest, BOB);
    assert_eq!(table.room(object(2_000_000), 64 * KIB), Room::Write(vec![rest]));
    table.check();
}

/// 100,000 objects fill the store, were used in no order of their places, and every sixteenth is being written.
fn hundred_thousand() -> ObjectTable {
    // Under Miri each takes a tenth of a second.
    const COUNT: u64 = if cfg!(miri) { 1_000 } else { 100_000 };
    let mut table = ObjectTable::new(COUNT.next_multiple_of(1024) * 64, u64::MAX);
    table.attach(ALICE);
    (0..COUNT).for_each(|n| _ = table.write(object(n), 64));
    let free = table.allocator.free_bytes();
    table.write(object(COUNT), free);
    // A prime number that does not divide theirs visits each once.
    for n in (0..COUNT).map(|n| n * 7_919 % COUNT).filter(|n| n % 16 != 0) {
        table.seal(object(n), ALICE).unwrap();
    }
    table
}

#[test]
fn how_many_objects_are_looked_at_for_room_does_not_depend_on_how_many_there_are() {
    let mut table = hundred_thousand();
    // What lies between two that are read: one at a time is looked at, and then those that leave.
    let (hole, most) = (15 * 64, EVICTIONS_TRIED as u64 + 16);
    for n in 0..50 {
        let id = object(1_000_000 + n);
        let (room, looked_at) = steps(&mut table, |table| table.room(id, hole));
        assert!(looked_at <= most, "{looked_at} objects were looked at to write some");
        let Room::Write(leaving) = room else { panic!("{room:?}") };
        assert!(leaving.len() <= 15);
        leaving.into_iter().for_each(|id| _ = table.copy(id));
        let (_, looked_at) = steps(&mut table, |table| table.write(id, hole));
        assert!(looked_at <= most, "{looked_at} objects were looked at to evict some");
        assert!(steps(&mut table, |table| table.ahead_of_need().len()).1 <= most);
    }
}
