//! What a cell is, and which are run.

use std::collections::HashSet;
use std::fmt;

use super::Chance;
use crate::Op;
use crate::local::{ALL, On};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Operation {
    AllReduce(Op),
    Reduce(Op),
    ReduceScatter(Op),
    Broadcast,
    AllGather,
    AllToAll,
    /// Around the ring, all at once.
    Send,
    Barrier,
    /// What is to be done on devices.
    Agree,
}

const OPERATIONS: [Operation; 21] = [
    Operation::AllReduce(Op::Sum),
    Operation::AllReduce(Op::Product),
    Operation::AllReduce(Op::Min),
    Operation::AllReduce(Op::Max),
    Operation::AllReduce(Op::Avg),
    Operation::Reduce(Op::Sum),
    Operation::Reduce(Op::Product),
    Operation::Reduce(Op::Min),
    Operation::Reduce(Op::Max),
    Operation::Reduce(Op::Avg),
    Operation::ReduceScatter(Op::Sum),
    Operation::ReduceScatter(Op::Product),
    Operation::ReduceScatter(Op::Min),
    Operation::ReduceScatter(Op::Max),
    Operation::ReduceScatter(Op::Avg),
    Operation::Broadcast,
    Operation::AllGather,
    Operation::AllToAll,
    Operation::Send,
    Operation::Barrier,
    Operation::Agree,
];

impl Operation {
    /// Whether a member has, or gets, one part for each member.
    pub(super) fn has_parts(self) -> bool {
        matches!(self, Operation::ReduceScatter(_) | Operation::AllGather | Operation::AllToAll)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Type {
    I8,
    U8,
    I16,
    U16,
    I32,
    U32,
    I64,
    U64,
    F16,
    Bf16,
    F32,
    F64,
}

const TYPES: [Type; 12] = [
    Type::I8,
    Type::U8,
    Type::I16,
    Type::U16,
    Type::I32,
    Type::U32,
    Type::I64,
    Type::U64,
    Type::F16,
    Type::Bf16,
    Type::F32,
    Type::F64,
];

/// How much a member has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Length {
    /// Of elements, in each part.
    Elements(usize),
    /// Of all parts together.
    Bytes(usize),
}

/// More than one part of what goes through shared memory, whatever the type, and no multiple of anything.
pub(super) const LARGE: usize = (1 << 20) + 3;
const LENGTHS: [Length; 6] = [
    Length::Elements(0),
    Length::Elements(1),
    Length::Elements(7),
    Length::Elements(1_000),
    Length::Elements(LARGE),
    Length::Bytes(64 << 20),
];
const MEMBERS: [u32; 5] = [1, 2, 3, 5, 8];

/// One operation in one shape.
#[derive(Clone, Debug)]
pub(super) struct Cell {
    pub operation: Operation,
    pub element: Type,
    pub length: Length,
    pub members: u32,
    pub on: On,
    /// What all cells were chosen by.
    seed: u64,
    /// The places of its values among all values.
    places: [u8; 5],
}

impl Cell {
    /// Of this cell, whichever others are run.
    pub(super) fn chance(&self) -> Chance {
        Chance(self.places.iter().fold(self.seed, |seed, place| seed.wrapping_mul(31).wrapping_add(u64::from(*place))))
    }
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Cell { operation, element, length, members, on, seed, .. } = self;
        let way = match on {
            On::One => "in shared memory",
            On::Two => "on two machines",
            On::Each => "over TCP",
        };
        write!(f, "{operation:?} of {length:?} of {element:?}, {members} members {way}, seed {seed}")
    }
}

/// How many cells are run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Choice {
    /// So that every two values meet, and every operation with every group.
    Small,
    /// And with the largest length.
    Large,
    All,
}

/// Cells by a seed, in an order by the same seed.
pub(super) fn chosen(choice: Choice, seed: u64) -> Vec<Cell> {
    let mut chance = Chance(seed);
    let mut all: Vec<Cell> = every(seed)
        .into_iter()
        .filter(|cell| choice != Choice::Small || matches!(cell.length, Length::Elements(_)))
        .collect();
    for at in (1..all.len()).rev() {
        all.swap(at, chance.below(at + 1));
    }
    if choice == Choice::All {
        return all;
    }
    let mut covered = HashSet::new();
    let mut chosen = Vec::new();
    // First what covers most that is new; a cell that covers none is left out.
    for least in [11, 8, 6, 4, 2, 1] {
        all.retain(|cell| {
            let meetings = meetings(cell);
            if meetings.iter().filter(|meeting| !covered.contains(*meeting)).count() < least {
                return true;
            }
            covered.extend(meetings);
            chosen.push(cell.clone());
            false
        });
    }
    chosen
}

fn every(seed: u64) -> Vec<Cell> {
    let mut all = Vec::new();
    for (o, operation) in OPERATIONS.into_iter().enumerate() {
        for (e, element) in TYPES.into_iter().enumerate() {
            for (l, length) in LENGTHS.into_iter().enumerate() {
                // A barrier has no data.
                if operation == Operation::Barrier && (e, l) != (0, 0) {
                    continue;
                }
                for (m, members) in MEMBERS.into_iter().enumerate() {
                    for (w, on) in ALL.into_iter().enumerate() {
                        let places = [o, e, l, m, w].map(|place| place as u8);
                        all.push(Cell { operation, element, length, members, on, seed, places });
                    }
                }
            }
        }
    }
    all
}

/// What of a cell is to be in one that is run: every two values, and every operation with every group.
fn meetings(cell: &Cell) -> Vec<[(usize, u8); 3]> {
    let places: Vec<_> = cell.places.into_iter().enumerate().collect();
    let pairs = (0..places.len()).flat_map(|first| (0..first).map(move |second| [first, second, second]));
    pairs.chain([[0, 3, 4]]).map(|meeting| meeting.map(|at| places[at])).collect()
}

#[test]
fn every_two_values_meet_in_far_fewer_cells() {
    let of = |cells: &[Cell]| cells.iter().flat_map(meetings).collect::<HashSet<_>>();
    let (few, all) = (chosen(Choice::Large, 1), chosen(Choice::All, 1));
    assert!(few.len() * 10 < all.len(), "{} of {}", few.len(), all.len());
    assert!(of(&few) == of(&all));
}
