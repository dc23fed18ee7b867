//! Every operation with every type, length, number of members and way between them. The cells are chosen by the seed
//! `WINGBEAT_MATRIX_SEED`, so that every two values meet, and every operation every group. `WINGBEAT_MATRIX=large` adds 64 MiB
//! to the lengths, and `WINGBEAT_MATRIX=all` runs every cell there is, for hours in a debug build.
//!
//! - `cell`: what a cell is, and which are run.
//! - `run`: one cell.
//! - `value`: the types, and what is right for each.
//! - `faults`: members that do not do their part.

mod cell;
mod faults;
mod run;
mod value;

use cell::{Choice, chosen};

use crate::local::On;

/// Numbers that look random and are the same for the same seed.
#[derive(Clone, Debug)]
pub(crate) struct Chance(u64);

impl Chance {
    /// Any number. (splitmix64, Steele, Lea and Flood 2014.)
    fn any(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        x ^ (x >> 31)
    }

    /// A number below `end`, which is not 0.
    fn below(&mut self, end: usize) -> usize {
        (self.any() % end as u64) as usize
    }
}

/// Runs the cells of one way; every failure is named, and not only the first.
fn run_all(on: On) {
    let choice = match std::env::var("WINGBEAT_MATRIX").as_deref() {
        Ok("all") => Choice::All,
        Ok("large") => Choice::Large,
        _ => Choice::Small,
    };
    let seed = std::env::var("WINGBEAT_MATRIX_SEED").map_or(1, |seed| seed.parse().unwrap());
    let cells: Vec<_> = chosen(choice, seed).into_iter().filter(|cell| cell.on == on).collect();
    let mut failed = Vec::new();
    for cell in &cells {
        if std::env::var_os("WINGBEAT_MATRIX_TRACE").is_some() {
            eprintln!("{cell}");
        }
        if let Err(error) = run::run(cell) {
            eprintln!("FAILED {cell}: {error}");
            failed.push(cell.to_string());
        }
    }
    assert!(failed.is_empty(), "{} of {} cells failed:\n{}", failed.len(), cells.len(), failed.join("\n"));
}

#[test]
fn every_operation_in_shared_memory() {
    run_all(On::One);
}

#[test]
fn every_operation_over_tcp() {
    run_all(On::Each);
}

#[test]
fn every_operation_over_both() {
    run_all(On::Two);
}
