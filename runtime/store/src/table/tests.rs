use proptest::prelude::*;
use wingbeat_core::TaskId;

use super::*;
use crate::allocator::WARM_FOR;

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

    fn spill(&mut self, id: ObjectId) {
        self.spill_started(id).unwrap();
        assert_eq!(self.spilled(id), None);
    }

    fn restore(&mut self, id: ObjectId) -> Option<SpillFile> {
        let Ok(Restore::Read(allocation, _)) = self.restore_started(id) else { panic!("{id} cannot be restored") };
        self.backed(&allocation.cold);
        self.restored(id)
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
            assert_eq!(object.last_used.is_some(), object.is_evictable());
            assert_eq!(object.last_used.and_then(|key| self.evictable.get(&key)), object.last_used.map(|_| &id));
            assert_eq!(self.spilling.contains(&id), matches!(object.state, State::Spilling { .. }));
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
        assert_eq!(self.evictable_by_size.len(), self.evictable.len());
        assert!(self.evictable_by_size.iter().all(|(_, key)| self.evictable.contains_key(key)));
        assert_eq!(self.evictable.len(), self.objects.values().filter(|object| object.is_evictable()).count());
        assert_eq!(self.stats().used, used);
        // An object that is exchanged for another one is on disk for a moment longer.
        assert!(self.tally.spilled <= self.spill_capacity + CAPACITY);
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
    assert_eq!(table.delete(object(1)), None);
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
    assert_eq!(table.delete(object(1)), None);
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
    assert_eq!(table.delete(object(1)), None);
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
    assert_eq!(table.room(object(9), 256 * KIB), Room::Spill(vec![object(1)]));
    table.spill(object(1));
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
    assert_eq!(table.room(object(9), 512 * KIB), Room::Spill(vec![object(2), object(3)]));
}

#[test]
fn a_pinned_object_never_spills() {
    let mut table = table(CAPACITY);
    table.put(object(1), CAPACITY);
    table.pin(object(1), BOB).unwrap();
    assert_eq!(table.spill_started(object(1)), None);
    let Err(CreateError::Full(full)) = table.create(object(2), 64, ALICE) else { panic!("there is no room") };
    assert_eq!((full.needed, full.free, full.pinned), (64, 0, CAPACITY));
}

#[test]
fn an_object_that_is_pinned_while_it_spills_stays_in_memory() {
    let mut table = table(CAPACITY);
    let extent = table.put(object(1), CAPACITY);
    let (_, file) = table.spill_started(object(1)).unwrap();
    assert_eq!(table.pin(object(1), BOB).unwrap(), Pin::Located(extent));
    assert_eq!(table.spilled(object(1)), Some(file), "its file is not needed");
    assert_eq!(table.stats().used, CAPACITY);
    assert_eq!(table.stats().spilled, 0);
}

#[test]
fn unsealed_memory_is_never_spilled() {
    let mut table = table(CAPACITY);
    table.write(object(1), CAPACITY);
    assert!(matches!(table.create(object(2), 1, ALICE), Err(CreateError::Full(Full { unsealed: CAPACITY, .. }))));
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
    assert_eq!(table.room(object(2), KIB), Room::Spill(vec![object(1)]));
    table.spill_started(object(1)).unwrap();
    assert_eq!(table.room(object(3), KIB), Room::Wait);
    table.spill_failed(object(1));
    assert_eq!(table.room(object(3), KIB), Room::Spill(vec![object(1)]));
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
    table.spill(object(1));
    table.put(object(2), 600 * KIB);
    assert_eq!(table.restore_started(object(1)).unwrap(), Restore::MakeRoom(Room::Spill(vec![object(2)])));
    table.spill(object(2));
    assert!(table.restore(object(1)).is_some(), "its file is not needed any more");
    assert!(matches!(table.pin(object(1), BOB), Ok(Pin::Located(_))));
}

#[test]
fn a_deleted_object_is_gone_at_once_and_its_memory_at_the_last_unpin() {
    let mut table = table(0);
    table.put(object(1), CAPACITY);
    table.pin(object(1), ALICE).unwrap();
    table.pin(object(1), BOB).unwrap();
    assert_eq!(table.delete(object(1)), None);
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
    assert_eq!(table.delete(object(1)), None);
    table.seal(object(1), ALICE).unwrap();
    assert!(!table.contains(object(1)));

    table.put(object(2), KIB);
    let (_, file) = table.spill_started(object(2)).unwrap();
    assert_eq!(table.delete(object(2)), None);
    assert_eq!(table.spilled(object(2)), Some(file));

    table.put(object(3), KIB);
    table.spill(object(3));
    assert!(table.delete(object(3)).is_some());
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
    SpillDone { seq: u64, succeeds: bool },
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
        4 => (seq.clone(), prop::bool::weighted(0.8)).prop_map(|(seq, succeeds)| SpillDone { seq, succeeds }),
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
    fn remove(&mut self, file: Option<SpillFile>) {
        if let Some(file) = file {
            assert!(self.files.remove(&file), "{file:?} was removed twice, or never written");
        }
    }

    fn make_room(&mut self, table: &mut ObjectTable, room: Room) {
        match room {
            Room::Wait => assert!(!table.spilling.is_empty() || !self.withdrawn.is_empty(), "waits for nothing"),
            Room::Spill(victims) => {
                assert!(!victims.is_empty());
                for id in victims {
                    assert!(!self.located.keys().any(|(pinned, _)| *pinned == id), "{id} is pinned");
                    let (_, file) = table.spill_started(id).unwrap();
                    self.files.insert(file);
                }
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
                    if let Ok(Restore::MakeRoom(room)) = table.restore_started(object(seq)) {
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
            Operation::Delete { seq } => {
                let file = table.delete(object(seq));
                self.remove(file);
            }
            Operation::Gone { by } => {
                table.process_gone(ProcessId(by));
                self.located.retain(|(_, process), _| *process != ProcessId(by));
                table.attach(ProcessId(by));
            }
            Operation::SpillDone { seq, succeeds } => {
                if let Some(State::Spilling { file, .. }) = state(table, object(seq)) {
                    if succeeds {
                        let unwanted = table.spilled(object(seq));
                        self.remove(unwanted);
                    } else {
                        table.spill_failed(object(seq));
                        self.files.remove(&file);
                    }
                }
            }
            Operation::RestoreDone { seq, succeeds } => {
                if let Some(State::Restoring { .. }) = state(table, object(seq)) {
                    let id = object(seq);
                    let unwanted = if succeeds { table.restored(id) } else { table.restore_failed(id) };
                    self.remove(unwanted);
                }
            }
            Operation::Trim { after_ms } => {
                self.now += Duration::from_millis(after_ms);
                self.withdrawn.extend(table.at(self.now).trim(WARM_FOR));
            }
            Operation::Punched => self.withdrawn.drain(..).for_each(|extent| table.punched(extent)),
        }
    }

    fn check(&self, table: &ObjectTable) {
        table.check();
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
    fn whatever_happens_nothing_overlaps_moves_or_leaks(operations in prop::collection::vec(operation(), 1..300)) {
        let mut table = ObjectTable::new(CAPACITY, CAPACITY);
        (0..3).for_each(|by| table.attach(ProcessId(by)));
        let mut shell = Shell::default();
        for operation in operations {
            shell.apply(&mut table, operation);
            shell.check(&table);
        }
        // When every process is gone, all IO is over and everything is deleted, nothing is left.
        for seq in 0..12 {
            for succeeds in [true, false] {
                shell.apply(&mut table, Operation::SpillDone { seq, succeeds });
                shell.apply(&mut table, Operation::RestoreDone { seq, succeeds });
                shell.apply(&mut table, Operation::Reserved { seq, succeeds });
            }
            shell.apply(&mut table, Operation::Delete { seq });
        }
        (0..3).for_each(|by| shell.apply(&mut table, Operation::Gone { by }));
        shell.check(&table);
        prop_assert_eq!(shell.files.len(), 0);
        let stats = table.stats();
        prop_assert_eq!((stats.objects, stats.used, stats.pinned, stats.unsealed, stats.spilled), (0, 0, 0, 0, 0));
    }
}

/// So many small objects that are used least recently, and of which every second one is read: they free no long run.
fn scattered(table: &mut ObjectTable) {
    for n in 0..2 * EVICTIONS_TRIED as u64 + 2 {
        table.put(object(n), 64);
        if n % 2 == 0 {
            table.pin(object(n), BOB).unwrap();
        }
    }
}

#[test]
fn one_long_object_is_spilled_where_a_thousand_short_ones_make_no_room() {
    let mut table = table(CAPACITY);
    scattered(&mut table);
    let (long, rest) = (object(1_000_000), object(1_000_001));
    table.put(long, 512 * KIB);
    let free = table.allocator.free_bytes();
    table.put(rest, free);
    table.pin(rest, BOB).unwrap();
    assert_eq!(table.room(object(2_000_000), 400 * KIB), Room::Spill(vec![long]));
    table.check();
}

#[test]
fn a_store_without_hope_answers_at_once_until_something_changes() {
    let mut table = table(CAPACITY);
    scattered(&mut table);
    let rest = object(1_000_001);
    let free = table.allocator.free_bytes();
    table.put(rest, free);
    table.pin(rest, BOB).unwrap();
    let asked = |table: &mut ObjectTable| table.create(object(2_000_000), 64 * KIB, ALICE);
    assert!(matches!(asked(&mut table), Err(CreateError::Full(_))));
    assert_eq!(table.hopeless, Some((table.changes, 64 * KIB)));
    assert!(matches!(asked(&mut table), Err(CreateError::Full(_))));
    // What is shorter still has a chance.
    assert!(matches!(table.create(object(2_000_001), 64, ALICE), Ok(Created::MakeRoom(_))));
    table.unpin(rest, BOB);
    assert_eq!(table.room(object(2_000_000), 64 * KIB), Room::Spill(vec![rest]));
    table.check();
}
