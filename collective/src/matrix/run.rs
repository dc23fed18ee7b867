//! One cell.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use super::cell::{Cell, Length, Operation, Type};
use super::value::{MIXES, Mix, Value};
use crate::local::results;
use crate::{Call, CollectiveError, Group, Op, bf16, f16};

/// A member has this many different values, again and again, so that what is right is computed for few. It is a prime, so that
/// no two parts look the same.
const COLUMNS: usize = 1009;
/// A cell takes seconds at most: whoever waits for so long would wait forever.
const LIMIT: Duration = Duration::from_secs(100);

/// What is wrong with a cell.
pub(super) fn run(cell: &Cell) -> Result<(), String> {
    match cell.element {
        Type::I8 => Run::<i8>::new(cell).check(),
        Type::U8 => Run::<u8>::new(cell).check(),
        Type::I16 => Run::<i16>::new(cell).check(),
        Type::U16 => Run::<u16>::new(cell).check(),
        Type::I32 => Run::<i32>::new(cell).check(),
        Type::U32 => Run::<u32>::new(cell).check(),
        Type::I64 => Run::<i64>::new(cell).check(),
        Type::U64 => Run::<u64>::new(cell).check(),
        Type::F16 => Run::<f16>::new(cell).check(),
        Type::Bf16 => Run::<bf16>::new(cell).check(),
        Type::F32 => Run::<f32>::new(cell).check(),
        Type::F64 => Run::<f64>::new(cell).check(),
    }
}

struct Run<'a, T> {
    cell: &'a Cell,
    members: usize,
    /// Elements of each part, or of all that a member has.
    length: usize,
    root: u32,
    /// What the members have, by rank.
    columns: Vec<Vec<T>>,
    /// How many have come to the barrier.
    came: AtomicU32,
    /// How many operations are before this one: memory that is shared has two halves.
    before: usize,
}

impl<'a, T: Value> Run<'a, T> {
    fn new(cell: &'a Cell) -> Self {
        let members = cell.members as usize;
        let length = match cell.length {
            Length::Elements(length) => length,
            Length::Bytes(bytes) if cell.operation.has_parts() => bytes / size_of::<T>() / members,
            Length::Bytes(bytes) => bytes / size_of::<T>(),
        };
        let mut chance = cell.chance();
        let root = chance.below(members) as u32;
        let before = chance.below(2);
        let mut columns = vec![Vec::with_capacity(COLUMNS); members];
        for column in 0..COLUMNS {
            let mix = MIXES[column % MIXES.len()];
            // What is odd often meets itself, and one other.
            let two = [T::any(mix, &mut chance), T::any(mix, &mut chance)];
            for columns in &mut columns {
                columns.push(if mix == Mix::Odd { two[chance.below(2)] } else { T::any(mix, &mut chance) });
            }
        }
        Run { cell, members, length, root, columns, came: AtomicU32::new(0), before }
    }

    fn check(&self) -> Result<(), String> {
        self.compare(&self.outputs()?)
    }

    /// What each member has afterwards.
    fn outputs(&self) -> Result<Vec<Vec<T>>, String> {
        let mut outputs = Vec::new();
        for (rank, result) in
            results(self.cell.members, self.cell.on, |group| self.operate(group)).into_iter().enumerate()
        {
            let result = result.map_err(|_| format!("rank {rank} has panicked"))?;
            outputs.push(result.map_err(|error| format!("at rank {rank}: {error}"))?);
        }
        Ok(outputs)
    }

    /// Elements of a member, from a place among all that it has.
    fn input(&self, rank: usize, from: usize, length: usize) -> Vec<T> {
        let mut input = Vec::with_capacity(length + COLUMNS);
        input.extend_from_slice(&self.columns[rank][from % COLUMNS..]);
        while input.len() < length {
            input.extend_from_slice(&self.columns[rank]);
        }
        input.truncate(length);
        input
    }

    fn operate(&self, group: &mut Group) -> Result<Vec<T>, CollectiveError> {
        group.set_timeout(LIMIT);
        for _ in 0..self.before {
            group.barrier()?;
        }
        let (rank, members) = (group.rank() as usize, self.members);
        let mut mine = self.input(rank, 0, self.length);
        let parts = || self.input(rank, 0, members * self.length);
        match self.cell.operation {
            Operation::AllReduce(op) => group.all_reduce(&mut mine, op)?,
            Operation::Reduce(op) => group.reduce(&mut mine, op, self.root)?,
            Operation::Broadcast => group.broadcast(&mut mine, self.root)?,
            Operation::ReduceScatter(op) => group.reduce_scatter(&parts(), &mut mine, op)?,
            Operation::AllGather => {
                // As if never written.
                let mut all = self.input(rank, 1, members * self.length);
                group.all_gather(&mine, &mut all)?;
                mine = all;
            }
            Operation::AllToAll => {
                let mut into = self.input(rank, 1, members * self.length);
                group.all_to_all(&parts(), &mut into)?;
                mine = into;
            }
            Operation::Send => self.send_around(group, &mut mine)?,
            Operation::Barrier => {
                self.came.fetch_add(1, Ordering::SeqCst);
                group.barrier()?;
                assert_eq!(self.came.load(Ordering::SeqCst), self.cell.members, "passed before all had come");
            }
            Operation::Agree => self.agree(group)?,
        }
        // The group is of use afterwards.
        let mut ranks = [group.rank()];
        group.all_reduce(&mut ranks, Op::Sum)?;
        assert_eq!(ranks, [(0..group.size()).sum::<u32>()]);
        Ok(mine)
    }

    /// All send before they receive.
    fn send_around(&self, group: &mut Group, mine: &mut [T]) -> Result<(), CollectiveError> {
        if group.size() == 1 {
            assert!(matches!(group.send(mine, 0), Err(CollectiveError::Invalid(_))));
            return Ok(());
        }
        let (rank, size) = (group.rank(), group.size());
        group.send(mine, (rank + 1) % size)?;
        group.recv(mine, (rank + size - 1) % size)
    }

    fn agree(&self, group: &mut Group) -> Result<(), CollectiveError> {
        let root = self.root;
        let calls = [Call::Broadcast(root), Call::AllGather, Call::AllToAll];
        let reductions = [Op::Sum, Op::Product, Op::Min, Op::Max, Op::Avg]
            .map(|op| [Call::AllReduce(op), Call::Reduce(op, root), Call::ReduceScatter(op)]);
        for call in reductions.into_iter().flatten().chain(calls) {
            group.agree::<T>(call, self.length)?;
        }
        match (group.rank(), group.size()) {
            (_, 1) => Ok(()),
            (0, _) => group.agree::<T>(Call::Send(1), self.length),
            (1, _) => group.agree::<T>(Call::Recv(0), self.length),
            _ => Ok(()),
        }
    }

    fn compare(&self, outputs: &[Vec<T>]) -> Result<(), String> {
        let (members, length) = (self.members, self.length);
        let is_each = |right: &dyn Fn(usize) -> Vec<T>| {
            outputs.iter().enumerate().try_for_each(|(rank, output)| is_same(rank, output, &right(rank)))
        };
        match self.cell.operation {
            Operation::AllReduce(op) => {
                is_each(&|_| outputs[0].clone())?;
                self.is_reduced(op, 0, &outputs[0])
            }
            Operation::Reduce(op) => {
                let root = self.root as usize;
                is_each(&|rank| if rank == root { outputs[root].clone() } else { self.input(rank, 0, length) })?;
                self.is_reduced(op, 0, &outputs[root])
            }
            Operation::ReduceScatter(op) => {
                outputs.iter().enumerate().try_for_each(|(rank, output)| self.is_reduced(op, rank * length, output))
            }
            Operation::Broadcast => is_each(&|_| self.input(self.root as usize, 0, length)),
            Operation::AllGather => is_each(&|_| (0..members).flat_map(|from| self.input(from, 0, length)).collect()),
            Operation::AllToAll => {
                is_each(&|rank| (0..members).flat_map(|from| self.input(from, rank * length, length)).collect())
            }
            Operation::Send => is_each(&|rank| self.input((rank + members - 1) % members, 0, length)),
            Operation::Barrier | Operation::Agree => is_each(&|rank| self.input(rank, 0, length)),
        }
    }

    /// That this is what the members' elements from a place on come to.
    fn is_reduced(&self, op: Op, from: usize, output: &[T]) -> Result<(), String> {
        if output.len() != self.length {
            return Err(format!("{} elements", output.len()));
        }
        // What was right for a column is right there again.
        let mut right: Vec<Option<u64>> = vec![None; COLUMNS];
        for (index, got) in output.iter().enumerate() {
            let column = (from + index) % COLUMNS;
            let bits = got.bits();
            if right[column] == Some(bits) {
                continue;
            }
            let values: Vec<T> = self.columns.iter().map(|columns| columns[column]).collect();
            let is_right = if values.len() == 1 { bits == values[0].bits() } else { got.is_right(op, &values) };
            if !is_right {
                return Err(format!("{op:?} of {values:?} became {got:?} at {index}"));
            }
            right[column] = Some(bits);
        }
        Ok(())
    }
}

/// That a member has these bits.
fn is_same<T: Value>(rank: usize, got: &[T], right: &[T]) -> Result<(), String> {
    if got.len() != right.len() {
        return Err(format!("rank {rank} has {} elements instead of {}", got.len(), right.len()));
    }
    if crate::element::bytes_of(got) == crate::element::bytes_of(right) {
        return Ok(());
    }
    let at = got.iter().zip(right).position(|(got, right)| got.bits() != right.bits());
    let shown = |index: usize| format!("{:?} instead of {:?} at {index}", got[index], right[index]);
    Err(format!("rank {rank} has {}", at.map_or_else(|| "other bits".to_owned(), shown)))
}
