use proptest::prelude::*;

use super::*;

const MIB: u64 = 1 << 20;

fn at(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

impl Allocator {
    fn take(&mut self, size: u64) -> Extent {
        let allocation = self.allocate(size).unwrap();
        self.backed(&allocation.cold);
        allocation.extent
    }

    fn punch_all(&mut self, withdrawn: Vec<Extent>) {
        for extent in withdrawn {
            self.punched(extent);
        }
    }

    /// What must hold at any time.
    fn check(&self, live: &[Extent]) {
        let mut taken = Ranges::default();
        for &extent in live {
            // `insert` asserts that they are disjoint.
            taken.insert(taken_for(extent));
        }
        assert_eq!(taken.total() + self.free_bytes(), self.capacity, "a byte was lost or made");
        for extent in taken.iter() {
            assert!(!self.free.intersects(extent) && !self.withdrawn.intersects(extent));
        }
        assert_eq!(self.idle.len(), self.by_age.len());
        for (&start, idle) in &self.idle {
            let pages = Extent::between(start, idle.end);
            assert!(pages.len > 0 && pages == pages.pages_within());
            assert!(self.free.contains(pages) && self.backed.contains(pages));
            assert!(self.by_age.contains(&(idle.order, start)));
        }
        // Every page that is backed and free will be trimmed one day.
        for run in self.free.iter().map(Extent::pages_within) {
            for part in self.backed.within(run) {
                let idle: u64 = self
                    .idle
                    .iter()
                    .filter_map(|(&start, idle)| Extent::between(start, idle.end).intersection(part))
                    .map(|extent| extent.len)
                    .sum();
                assert_eq!(idle, part.len, "{part:?} is backed and free, and nothing knows since when");
            }
        }
    }
}

#[test]
fn freed_memory_is_reused_newest_first() {
    let mut allocator = Allocator::new(64 * MIB);
    let (a, b, c) = (allocator.take(2 * MIB), allocator.take(2 * MIB), allocator.take(2 * MIB));
    allocator.free(b, at(1));
    allocator.free(a, at(2));
    let again = allocator.allocate(2 * MIB).unwrap();
    assert_eq!(again, Allocation { extent: a, cold: vec![] });
    assert_eq!(allocator.allocate(2 * MIB).unwrap().extent, b);
    allocator.check(&[a, b, c]);
}

#[test]
fn what_is_warm_in_the_middle_of_a_free_run_is_left_there() {
    let mut allocator = Allocator::new(64 * MIB);
    let all: Vec<Extent> = (0..8).map(|_| allocator.take(7 * MIB)).collect();
    for (second, index) in (1..).zip([7, 0, 6, 1, 5, 2, 4, 3]) {
        allocator.free(all[index], at(second));
    }
    let again: Vec<Extent> = (0..8).map(|_| allocator.take(8 * MIB)).collect();
    allocator.check(&again);
}

#[test]
fn only_memory_that_was_free_for_long_enough_is_trimmed() {
    let mut allocator = Allocator::new(64 * MIB);
    let (a, b) = (allocator.take(2 * MIB), allocator.take(3 * MIB));
    allocator.free(a, at(0));
    allocator.free(b, at(5));
    assert_eq!(allocator.trim(at(9), WARM_FOR), []);
    assert_eq!(allocator.trim(at(10), WARM_FOR), [a]);
    assert_eq!(allocator.trim(at(15), WARM_FOR), [b]);
    assert_eq!(allocator.backed_bytes(), 0);
}

#[test]
fn memory_being_punched_out_is_not_given_to_anybody() {
    let mut allocator = Allocator::new(4 * MIB);
    let whole = allocator.take(4 * MIB);
    allocator.free(whole, at(0));
    let withdrawn = allocator.trim(at(10), WARM_FOR);
    assert_eq!(allocator.allocate(64), None);
    assert!(allocator.foresee(4 * MIB).fits(), "it will be there soon");
    allocator.punch_all(withdrawn);
    assert_eq!(allocator.allocate(4 * MIB).unwrap().cold, [whole]);
}

#[test]
fn a_page_is_trimmed_only_when_all_its_objects_are_free() {
    let mut allocator = Allocator::new(MIB);
    let (a, b) = (allocator.take(1000), allocator.take(1000));
    allocator.free(a, at(0));
    assert_eq!(allocator.trim(at(100), WARM_FOR), []);
    allocator.free(b, at(100));
    assert_eq!(allocator.trim(at(105), WARM_FOR), []);
    assert_eq!(allocator.trim(at(110), WARM_FOR), [Extent { offset: 0, len: PAGE }]);
}

#[test]
fn a_hole_within_a_used_page_is_not_idle() {
    let mut allocator = Allocator::new(MIB);
    let (left, middle, right) = (allocator.take(64), allocator.take(64), allocator.take(64));
    allocator.free(middle, at(0));
    allocator.check(&[left, right]);
    assert_eq!(allocator.trim(at(100), WARM_FOR), []);
}

#[test]
fn pages_that_were_never_reserved_stay_cold() {
    let mut allocator = Allocator::new(4 * MIB);
    let refused = allocator.allocate(2 * MIB).unwrap();
    allocator.free(refused.extent, at(0));
    assert_eq!(allocator.trim(at(100), WARM_FOR), []);
    assert_eq!(allocator.allocate(2 * MIB).unwrap().cold, refused.cold);
}

#[test]
fn sizes_beyond_all_bounds_are_refused() {
    let mut allocator = Allocator::new(MIB);
    assert_eq!(allocator.allocate(MIB + 1), None);
    assert_eq!(allocator.allocate(u64::MAX), None);
    assert_eq!(allocator.take(MIB).len, MIB);
}

#[derive(Debug, Clone)]
enum Operation {
    Allocate { size: u64, succeeds: bool },
    Free { which: prop::sample::Index },
    Trim { after_ms: u64 },
    Punched { which: prop::sample::Index, succeeds: bool },
}

fn operation() -> impl Strategy<Value = Operation> {
    let size = prop_oneof![Just(0), 1..300u64, 1..100_000u64, (LARGE - 5000)..(LARGE + 5000), LARGE..(3 * LARGE)];
    prop_oneof![
        4 => (size, prop::bool::weighted(0.9)).prop_map(|(size, succeeds)| Operation::Allocate { size, succeeds }),
        3 => any::<prop::sample::Index>().prop_map(|which| Operation::Free { which }),
        1 => (0..20_000u64).prop_map(|after_ms| Operation::Trim { after_ms }),
        1 => (any::<prop::sample::Index>(), prop::bool::weighted(0.9))
            .prop_map(|(which, succeeds)| Operation::Punched { which, succeeds }),
    ]
}

proptest! {
    #[test]
    fn extents_never_overlap_and_no_byte_is_lost(operations in prop::collection::vec(operation(), 1..200)) {
        let capacity = 16 * MIB;
        let mut allocator = Allocator::new(capacity);
        let mut now = Duration::ZERO;
        let mut live: Vec<Extent> = Vec::new();
        let mut withdrawn: Vec<Extent> = Vec::new();
        for operation in operations {
            match operation {
                Operation::Allocate { size, succeeds } => {
                    let foreseen = allocator.foresee(size).fits();
                    match allocator.allocate(size) {
                        Some(allocation) => {
                            prop_assert!(foreseen);
                            prop_assert_eq!(allocation.extent.len, size);
                            prop_assert!(allocation.extent.offset.is_multiple_of(alignment(size)));
                            if succeeds {
                                allocator.backed(&allocation.cold);
                            }
                            live.push(allocation.extent);
                        }
                        None => prop_assert!(!foreseen || !withdrawn.is_empty()),
                    }
                }
                Operation::Free { which } if !live.is_empty() => {
                    let extent = live.swap_remove(which.index(live.len()));
                    allocator.free(extent, now);
                }
                Operation::Trim { after_ms } => {
                    now += Duration::from_millis(after_ms);
                    withdrawn.extend(allocator.trim(now, WARM_FOR));
                }
                Operation::Punched { which, succeeds } if !withdrawn.is_empty() => {
                    let extent = withdrawn.swap_remove(which.index(withdrawn.len()));
                    if succeeds { allocator.punched(extent) } else { allocator.punch_failed(extent, now) }
                }
                Operation::Free { .. } | Operation::Punched { .. } => {}
            }
            allocator.check(&live);
        }
        for extent in live.drain(..) {
            allocator.free(extent, now);
        }
        allocator.punch_all(withdrawn);
        allocator.check(&[]);
        // However the memory was used before, it has room for as many of one size.
        let again: Vec<Extent> = (0..capacity / MIB).map(|_| allocator.take(MIB)).collect();
        allocator.check(&again);
        again.into_iter().for_each(|extent| allocator.free(extent, now));
        let rest = allocator.trim(now + WARM_FOR, WARM_FOR);
        allocator.punch_all(rest);
        prop_assert_eq!(allocator.backed_bytes(), 0);
        prop_assert_eq!(allocator.allocate(capacity).map(|all| all.extent.len), Some(capacity));
    }
}
