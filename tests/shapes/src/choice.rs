//! Which cells are run.

use std::collections::BTreeSet;

use crate::cell::{Cell, Fault, Operation, Pace};

const PAYLOADS: [usize; 8] = [0, 1 << 10, 50_000, 99 << 10, 101 << 10, 1 << 20, 64 << 20, 300 << 20];
const COUNTS: [usize; 3] = [1, 100, 5_000];
const PACES: [Pace; 3] = [Pace::AtOnce, Pace::SlowConsumer, Pace::SlowProducer];
const FAULTS: [Fault; 2] = [Fault::None, Fault::Kill];

/// How many cells, and how large they may be.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    /// Every combination; otherwise as many as cover every pair of values.
    pub all: bool,
    /// Payload times count is cut to so many bytes, by the count.
    pub bytes: usize,
    /// Larger payloads are left out.
    pub payload: usize,
}

/// Numbers that look random and are the same for the same seed.
#[derive(Clone, Debug)]
pub struct Chance(u64);

impl Chance {
    /// From a seed.
    pub fn new(seed: u64) -> Chance {
        Chance(seed)
    }

    /// A number below `end`, which is not 0. (splitmix64, Steele, Lea and Flood 2014.)
    pub fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((x ^ (x >> 31)) % end.max(1) as u64) as usize
    }
}

/// Cells by a seed, in an order by the same seed.
pub fn cells(size: Size, chance: &mut Chance) -> Vec<Cell> {
    let mut all = Vec::new();
    for operation in Operation::ALL {
        for payload in PAYLOADS.into_iter().filter(|payload| *payload <= size.payload) {
            for count in COUNTS {
                for pace in PACES {
                    for fault in FAULTS {
                        all.push((Cell { operation, payload, count, pace, fault }, [payload, count]));
                    }
                }
            }
        }
    }
    for at in (1..all.len()).rev() {
        all.swap(at, chance.below(at + 1));
    }
    let mut covered = BTreeSet::new();
    let mut chosen = Vec::new();
    // First what covers most pairs that are new; a cell that covers none is left out.
    for least in if size.all { vec![0] } else { vec![9, 7, 5, 3, 1] } {
        all.retain(|(cell, _)| {
            let pairs = pairs(cell);
            let new = pairs.iter().filter(|pair| !covered.contains(*pair)).count();
            if new < least {
                return true;
            }
            covered.extend(pairs);
            chosen.push(fit(*cell, size));
            false
        });
    }
    chosen.dedup();
    chosen
}

/// Every two values of a cell, with the places of both in the cell.
fn pairs(cell: &Cell) -> Vec<[(usize, String); 2]> {
    let Cell { operation, payload, count, pace, fault } = cell;
    let values =
        [format!("{operation:?}"), payload.to_string(), count.to_string(), format!("{pace:?}"), format!("{fault:?}")];
    let mut pairs = Vec::new();
    for first in 0..values.len() {
        for second in first + 1..values.len() {
            pairs.push([(first, values[first].clone()), (second, values[second].clone())]);
        }
    }
    pairs
}

fn fit(mut cell: Cell, size: Size) -> Cell {
    let most = size.bytes.checked_div(cell.payload).unwrap_or(usize::MAX).max(1);
    cell.count = cell.count.min(most).min(cell.operation.most());
    cell
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMALL: Size = Size { all: false, bytes: 64 << 20, payload: 300 << 20 };

    #[test]
    fn the_same_seed_chooses_the_same_cells() {
        let chosen = |seed| cells(SMALL, &mut Chance::new(seed));
        assert_eq!(chosen(3), chosen(3));
        assert_ne!(chosen(3), chosen(4));
    }

    #[test]
    fn every_pair_of_values_is_covered_by_far_fewer_cells() {
        let unbounded = |all| Size { all, bytes: usize::MAX, payload: usize::MAX };
        let few = cells(unbounded(false), &mut Chance::new(1));
        let all = cells(unbounded(true), &mut Chance::new(1));
        assert!(few.len() * 10 < all.len(), "{} of {}", few.len(), all.len());
        // Counts of some operations are bounded, whatever the size says.
        let of = |cells: &[Cell]| -> BTreeSet<_> {
            let unbounded = |cell: &&Cell| cell.operation.most() == usize::MAX;
            cells.iter().filter(unbounded).flat_map(pairs).collect()
        };
        assert_eq!(of(&few), of(&all));
    }
}
