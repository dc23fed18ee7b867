use std::fs;
use std::thread;

use wingbeat_core::TaskId;

use super::*;

const MIB: u64 = 1 << 20;
const DAEMON: ProcessId = ProcessId(1);
const WORKER: ProcessId = ProcessId(2);

fn object(seq: u64) -> ObjectId {
    ObjectId { task: TaskId { owner: WORKER, seq }, index: 0 }
}

fn spilling_store(capacity: u64) -> (NodeStore, tempfile::TempDir) {
    spilling_store_above(capacity, capacity)
}

/// One that writes ahead of need above a mark.
fn spilling_store_above(mark: u64, capacity: u64) -> (NodeStore, tempfile::TempDir) {
    let disk = tempfile::tempdir().unwrap();
    let config =
        StoreConfig { capacity, spill_dir: Some(disk.path().into()), spill_capacity: 1 << 30, write_ahead_above: mark };
    let store = NodeStore::new(config).unwrap();
    store.attach(DAEMON);
    store.attach(WORKER);
    (store, disk)
}

fn memory_store(capacity: u64) -> NodeStore {
    let store =
        NodeStore::new(StoreConfig { capacity, spill_dir: None, spill_capacity: 0, write_ahead_above: u64::MAX })
            .unwrap();
    store.attach(DAEMON);
    store.attach(WORKER);
    store
}

/// Content that tells objects, and their bytes, apart.
fn content(seq: u64, size: u64) -> Vec<u8> {
    (0..size).map(|at| (at.wrapping_mul(31) ^ seq.wrapping_mul(97) ^ (at >> 8)) as u8).collect()
}

impl NodeStore {
    fn put(&self, seq: u64, size: u64) -> Result<(), CreateError> {
        let extent = self.create(object(seq), size, DAEMON)?;
        // SAFETY: it was created a line above, and is sealed in the next.
        unsafe { self.write_region(extent) }.unwrap().copy_from_slice(&content(seq, size));
        self.seal(object(seq), DAEMON).unwrap();
        Ok(())
    }

    fn assert_intact(&self, seq: u64, size: u64) {
        let extent = self.get(object(seq), DAEMON).unwrap();
        assert!(*self.pinned(extent) == content(seq, size), "object {seq} has changed");
        assert!(self.release(object(seq), DAEMON));
    }

    fn pinned(&self, extent: Extent) -> Region {
        // SAFETY: the tests drop it before they release the object.
        unsafe { self.region(extent) }.unwrap()
    }

    fn resident_bytes(&self) -> u64 {
        self.arena.resident_bytes().unwrap()
    }
}

#[test]
fn what_one_process_seals_another_reads_in_place() {
    let store = memory_store(8 * MIB);
    let worker = Mapping::open(store.attach(WORKER).try_clone_to_owned().unwrap(), store.capacity()).unwrap();
    let extent = store.create(object(1), 2 * MIB, WORKER).unwrap();
    // SAFETY: as in `put`.
    unsafe { worker.write_region(extent) }.unwrap().copy_from_slice(&content(1, 2 * MIB));
    store.seal(object(1), WORKER).unwrap();
    store.assert_intact(1, 2 * MIB);
}

#[test]
fn a_store_holds_more_than_its_memory_by_spilling() {
    let (store, disk) = spilling_store(4 * MIB);
    for seq in 0..12 {
        store.put(seq, MIB).unwrap();
    }
    assert_eq!(store.stats().spilled, 8 * MIB);
    for seq in 0..12 {
        store.assert_intact(seq, MIB);
    }
    for seq in 0..12 {
        store.delete(object(seq));
    }
    let stats = store.stats();
    assert_eq!((stats.used, stats.spilled, stats.objects), (0, 0, 0));
    assert!(store.spill.disk_bytes() > 0 && store.has_unneeded_files(), "deleting touches no disk");
    store.remove_unneeded_files();
    assert_eq!((store.spill.disk_bytes(), store.has_unneeded_files()), (0, false));
    assert_eq!(fs::read_dir(disk.path()).unwrap().count(), 0, "nothing has a name");
}

#[test]
fn what_was_read_back_is_not_written_again() {
    let (store, _disk) = spilling_store(4 * MIB);
    for seq in 0..12 {
        store.put(seq, MIB).unwrap();
    }
    let read_all = || {
        for seq in 0..12 {
            store.assert_intact(seq, MIB);
            while store.write_ahead() {}
        }
    };
    read_all();
    let files = store.spill.files();
    assert_eq!(files.len(), 12);
    read_all();
    assert_eq!(store.spill.files(), files);
    let stats = store.stats();
    assert_eq!((stats.spilled, stats.copies), (8 * MIB, 4 * MIB));
}

#[test]
fn what_was_written_ahead_makes_room_without_the_disk() {
    let (store, _disk) = spilling_store_above(3 * MIB, 4 * MIB);
    store.put(0, 2 * MIB).unwrap();
    (1..8).for_each(|seq| store.put(seq, 100_000).unwrap());
    assert!(!store.is_behind() && !store.write_ahead());
    store.put(8, MIB).unwrap();
    while store.write_ahead() {}
    assert!(!store.is_behind());
    let extent = store.try_create(object(9), 2 * MIB, DAEMON).unwrap();
    assert!(extent.is_some(), "there is room at once");
    store.abort(object(9), DAEMON).unwrap();
    store.assert_intact(0, 2 * MIB);
}

#[test]
fn small_objects_are_written_ahead_together() {
    let (store, _disk) = spilling_store_above(0, 4 * MIB);
    let size = |seq: u64| 10_000 + seq * 77;
    (0..100).for_each(|seq| store.put(seq, size(seq)).unwrap());
    assert!(!store.write_ahead(), "once is enough");
    assert_eq!(store.spill.files().len(), 100);
    store.put(101, 4 * MIB).unwrap();
    store.delete(object(101));
    (0..100).for_each(|seq| store.assert_intact(seq, size(seq)));
}

fn on_a_disk_that_refuses() -> NodeStore {
    let store = NodeStore::new(StoreConfig {
        capacity: 2 * MIB,
        spill_dir: Some("/proc/wingbeat-cannot-be-made".into()),
        spill_capacity: 1 << 30,
        write_ahead_above: MIB,
    })
    .unwrap();
    store.attach(DAEMON);
    store
}

#[test]
fn a_disk_that_refuses_what_is_written_ahead_is_nobodys_error() {
    let store = on_a_disk_that_refuses();
    store.put(1, MIB).unwrap();
    store.put(2, MIB).unwrap();
    assert!(store.is_behind());
    assert!(!store.write_ahead() && !store.is_behind(), "it rests");
    store.assert_intact(1, MIB);
    assert_eq!((store.stats().spilled, store.stats().copies), (0, 0));
}

#[test]
fn without_a_disk_a_full_store_says_so() {
    let store = memory_store(4 * MIB);
    store.put(1, 4 * MIB).unwrap();
    let error = store.put(2, MIB).unwrap_err();
    assert!(matches!(error, CreateError::Full(_)), "{error}");
    assert!(error.to_string().contains("Drop references"), "{error}");
    store.delete(object(1));
    store.put(2, MIB).unwrap();
}

#[test]
fn pinned_objects_keep_their_place_while_everything_else_spills() {
    let (store, _disk) = spilling_store(4 * MIB);
    store.put(0, MIB).unwrap();
    let pinned = store.get(object(0), WORKER).unwrap();
    for seq in 1..10 {
        store.put(seq, MIB).unwrap();
    }
    assert_eq!(store.get(object(0), WORKER).unwrap(), pinned);
    assert!(*store.pinned(pinned) == content(0, MIB));
}

#[test]
fn freed_memory_stays_warm_for_a_while_and_is_then_given_back() {
    let store = memory_store(64 * MIB);
    store.put(1, 16 * MIB).unwrap();
    store.delete(object(1));
    let freed = Instant::now();
    assert_eq!(store.trim(freed), 0);
    assert_eq!(store.resident_bytes(), 16 * MIB);
    store.put(2, 16 * MIB).unwrap();
    assert_eq!(store.resident_bytes(), 16 * MIB, "warm memory is used again");
    store.delete(object(2));
    assert_eq!(store.trim(Instant::now() + WARM_FOR), 16 * MIB);
    assert_eq!(store.resident_bytes(), 0);
    store.put(3, 16 * MIB).unwrap();
    store.assert_intact(3, 16 * MIB);
}

#[test]
fn a_killed_writer_leaves_nothing() {
    let store = memory_store(4 * MIB);
    store.create(object(1), 4 * MIB, WORKER).unwrap();
    assert!(matches!(store.put(2, MIB), Err(CreateError::Full(_))));
    store.process_gone(WORKER);
    store.put(2, 4 * MIB).unwrap();
    assert!(matches!(store.get(object(2), WORKER), Err(GetError::NotAttached { .. })));
}

#[test]
fn a_copy_on_disk_that_is_lost_is_an_error_that_names_it() {
    let (store, disk) = spilling_store(2 * MIB);
    store.put(1, 2 * MIB).unwrap();
    store.put(2, MIB).unwrap();
    store.spill.lose_everything();
    store.delete(object(2));
    let error = store.get(object(1), DAEMON).unwrap_err();
    assert!(matches!(error, GetError::Io { .. }), "{error}");
    assert!(error.to_string().contains("object-000000000002.1.0"), "{error}");
    assert!(error.to_string().contains(disk.path().to_str().unwrap()), "{error}");
    assert_eq!(store.stats().used, 0);
}

#[test]
fn a_copy_on_disk_that_has_changed_there_is_an_error_and_the_others_are_fine() {
    let (store, _disk) = spilling_store(2 * MIB);
    store.put(1, MIB).unwrap();
    store.put(2, MIB).unwrap();
    store.put(3, 2 * MIB).unwrap();
    store.spill.flip_a_bit(object(1), MIB / 2);
    store.delete(object(3));
    let error = store.get(object(1), DAEMON).unwrap_err();
    assert!(matches!(error, GetError::Io { .. }), "{error}");
    store.assert_intact(2, MIB);
}

#[test]
fn a_disk_that_refuses_loses_no_object() {
    let store = on_a_disk_that_refuses();
    store.put(1, 2 * MIB).unwrap();
    let error = store.put(2, MIB).unwrap_err();
    assert!(matches!(error, CreateError::Spill(_)), "{error}");
    assert!(error.to_string().contains("/proc/wingbeat-cannot-be-made"), "{error}");
    store.assert_intact(1, 2 * MIB);
    assert_eq!(store.stats().spilled, 0);
}

#[test]
fn what_needs_no_disk_is_answered_without_blocking() {
    let (store, _disk) = spilling_store(4 * MIB);
    let extent = store.try_create(object(0), 3 * MIB, DAEMON).unwrap().unwrap();
    store.seal(object(0), DAEMON).unwrap();
    assert_eq!(store.try_get(object(0), DAEMON).unwrap(), Some(extent));
    store.release(object(0), DAEMON);

    assert_eq!(store.try_create(object(1), 2 * MIB, DAEMON).unwrap(), None, "something must be spilled");
    assert_eq!(store.stats().unsealed, 0);
    store.put(1, 2 * MIB).unwrap();
    assert_eq!(store.try_get(object(0), DAEMON).unwrap(), None, "it must be restored");
}

#[test]
fn many_threads_share_a_store_that_is_too_small_for_them() {
    const THREADS: u64 = 4;
    const OBJECTS: u64 = 30;
    let (store, _disk) = spilling_store_above(2 * MIB, 3 * MIB);
    let size = |seq: u64| if seq.is_multiple_of(8) { MIB } else { 16 * 1024 + (seq * 7919) % (200 * 1024) };
    thread::scope(|scope| {
        for thread in 0..THREADS {
            let store = &store;
            scope.spawn(move || {
                for n in 0..OBJECTS {
                    let seq = thread * OBJECTS + n;
                    // Full is right when all the others hold something at the moment.
                    while let Err(error) = store.put(seq, size(seq)) {
                        assert!(matches!(error, CreateError::Full(_)), "{error}");
                        thread::yield_now();
                    }
                    // Its own older ones, and the others' if they are there.
                    for other in [seq, thread * OBJECTS + n / 2, (seq * 31) % (THREADS * OBJECTS)] {
                        match store.get(object(other), DAEMON) {
                            Ok(extent) => {
                                assert!(*store.pinned(extent) == content(other, size(other)));
                                assert!(store.release(object(other), DAEMON));
                            }
                            Err(GetError::Full(_) | GetError::Unsealed { .. }) => {}
                            Err(GetError::Absent { .. }) => assert_ne!(other, seq),
                            Err(error) => panic!("{error}"),
                        }
                    }
                    if n % 3 == 2 {
                        store.delete(object(seq - 1));
                    }
                    if thread == 0 {
                        while store.write_ahead() {}
                    }
                    if n % 10 == 0 {
                        store.trim(Instant::now() + WARM_FOR);
                    }
                }
            });
        }
    });
    for seq in 0..THREADS * OBJECTS {
        store.delete(object(seq));
    }
    let stats = store.stats();
    assert_eq!((stats.used, stats.pinned, stats.spilled, stats.copies, stats.objects), (0, 0, 0, 0, 0));
}

/// As if the machine had so many bytes of memory for the store.
fn with_memory(store: NodeStore, bytes: u64) -> Arc<NodeStore> {
    let fd = store.arena.fd().try_clone_to_owned().unwrap();
    let taken = move || u64::try_from(rustix::fs::fstat(&fd).unwrap().st_blocks).unwrap() * 512;
    Arc::new(store.limited_by(move || Some(bytes.saturating_sub(taken()))))
}

#[test]
fn a_store_that_is_larger_than_the_memory_spills_when_that_is_short() {
    let (store, _disk) = spilling_store(64 * MIB);
    let store = with_memory(store, 4 * MIB);
    for seq in 0..12 {
        store.put(seq, MIB).unwrap();
        assert!(store.resident_bytes() <= 4 * MIB);
    }
    for seq in 0..12 {
        store.assert_intact(seq, MIB);
        assert!(store.resident_bytes() <= 4 * MIB);
    }
}

#[test]
fn without_a_disk_memory_that_is_short_is_an_error_that_says_so() {
    let store = with_memory(memory_store(64 * MIB), 4 * MIB);
    store.put(1, 3 * MIB).unwrap();
    assert_eq!(store.try_create(object(2), 2 * MIB, DAEMON).unwrap(), None);
    let error = store.put(2, 2 * MIB).unwrap_err();
    assert!(matches!(error, CreateError::OutOfMemory { .. }), "{error}");
    assert!(error.to_string().contains("bytes left"), "{error}");
    store.delete(object(1));
    store.put(2, 2 * MIB).unwrap();
}

#[test]
fn what_is_on_disk_is_read_in_pieces_without_room_in_memory() {
    let size = 20 * MIB + 5;
    let (store, _disk) = spilling_store(24 * MIB);
    store.put(1, size).unwrap();
    assert_eq!(store.spilled(object(1)), None, "it is in memory");
    store.put(2, size).unwrap();
    let spilled = store.spilled(object(1)).unwrap();
    let mut bytes = Vec::new();
    let all = |bytes: &mut Vec<u8>, piece: &[u8]| {
        bytes.extend_from_slice(piece);
        true
    };
    store.read_spilled(spilled, |piece| all(&mut bytes, piece)).unwrap();
    assert!(spilled.size == size && bytes == content(1, size));
    // Who has had enough gets no more.
    let mut pieces = 0;
    let enough = |_: &[u8]| {
        pieces += 1;
        false
    };
    store.read_spilled(spilled, enough).unwrap();
    assert_eq!(pieces, 1);
    store.spill.flip_a_bit(object(1), size - 1);
    let mut read = 0;
    let count = |read: &mut u64, piece: &[u8]| {
        *read += piece.len() as u64;
        true
    };
    assert!(store.read_spilled(spilled, |piece| count(&mut read, piece)).unwrap_err().is_some(), "the disk has failed");
    assert!(read < size, "nobody takes that for the object");
    store.delete(object(1));
    store.remove_unneeded_files();
    assert!(store.read_spilled(spilled, |_| true).unwrap_err().is_none(), "it was deleted");
}
