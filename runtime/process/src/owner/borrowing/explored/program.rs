//! What user code does, and the programs that are explored.

use std::collections::BTreeMap;

use super::super::tests::{Pid, object};
use super::super::*;
use super::{Entry, Message, Pending, World};

/// What user code does, one after the other. Refs are in numbered places of the task.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(super) enum Op {
    /// A new object with these refs in its value, into a place.
    Make(usize, Vec<usize>),
    /// Calls a task with these refs; its results go into the places from the second on.
    Call {
        task: u64,
        args: Vec<usize>,
        into: usize,
    },
    /// Waits for the result of a call.
    Await(u64),
    /// Reads the value of a ref; the refs in it go into the places from the second on.
    Read(usize, usize),
    Drop(usize),
    /// Keeps a ref beyond the end of the task.
    Keep(usize),
    Return(Vec<usize>),
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(super) struct Task {
    pub(super) caller: Option<Pid>,
    pub(super) args: Vec<ObjectId>,
    pub(super) places: BTreeMap<usize, ObjectId>,
    pub(super) at: usize,
}

/// Who runs each task, and what it does. Task 0 is the driver's.
pub(super) struct Scenario {
    pub(super) tasks: BTreeMap<u64, (Pid, Vec<Op>)>,
}

impl World {
    pub(super) fn run(&mut self, pid: Pid, number: u64, scenario: &Scenario) {
        let process = self.of(pid);
        let task = process.tasks.get_mut(&number).unwrap();
        let op = scenario.tasks[&number].1[task.at].clone();
        task.at += 1;
        let places = task.places.clone();
        match op {
            Op::Make(place, contains) => {
                process.made += 1;
                let id = object(pid, process.made);
                task.places.insert(place, id);
                let value: Vec<ObjectId> = contains.iter().map(|place| places[place]).collect();
                for id in &value {
                    process.table.get_mut(id).unwrap().handles += 1;
                }
                process.table.insert(id, Entry { handles: 1, value: Some(value), ..Entry::default() });
            }
            Op::Call { task, args, into } => {
                let args: Vec<ObjectId> = args.iter().map(|place| places[place]).collect();
                for id in &args {
                    process.table.get_mut(id).unwrap().handles += 1;
                }
                process.calls.insert(task, Pending { held: args.clone(), into: (number, into), result: false });
                self.send(pid, scenario.tasks[&task].0, Message::Task { task, args });
            }
            Op::Await(call) => {
                process.calls.remove(&call);
            }
            Op::Read(place, into) => {
                let value = process.table[&places[&place]].value.clone().unwrap();
                for (place, id) in (into..).zip(value) {
                    self.hold(pid, id);
                    self.of(pid).tasks.get_mut(&number).unwrap().places.insert(place, id);
                }
            }
            Op::Drop(place) => {
                task.places.remove(&place);
                self.drop_handle(pid, places[&place]);
            }
            Op::Keep(place) => {
                task.places.remove(&place);
                process.kept.push(places[&place]);
            }
            Op::Return(refs) => {
                let refs: Vec<ObjectId> = refs.iter().map(|place| places[place]).collect();
                let task = process.tasks.remove(&number).unwrap();
                if !refs.is_empty() {
                    for id in &refs {
                        process.table.get_mut(id).unwrap().handles += 1;
                    }
                    process.returned.insert(number, refs.clone());
                }
                if let Some(caller) = task.caller {
                    self.confirm(pid, caller, &task.args, Message::Result { task: number, refs });
                }
                for id in task.places.into_values() {
                    self.drop_handle(pid, id);
                }
            }
        }
    }

    /// Whether a task can go on; one that reads asks for the value first.
    pub(super) fn can_run(&mut self, pid: Pid, number: u64, scenario: &Scenario) -> bool {
        let process = self.of(pid);
        let task = &process.tasks[&number];
        match &scenario.tasks[&number].1[task.at] {
            Op::Await(call) => process.calls[call].result,
            Op::Read(place, _) => {
                let id = task.places[place];
                let entry = process.table.get_mut(&id).unwrap();
                let (ready, must_ask) = (entry.value.is_some(), !entry.asked);
                if !ready && must_ask {
                    entry.asked = true;
                    self.send(pid, id.owner().0, Message::Subscribe(id));
                }
                ready
            }
            _ => true,
        }
    }
}

fn scenario(tasks: impl IntoIterator<Item = (u64, Pid, Vec<Op>)>) -> Scenario {
    Scenario { tasks: tasks.into_iter().map(|(task, pid, ops)| (task, (pid, ops))).collect() }
}

fn call(task: u64, args: &[usize], into: usize) -> Op {
    Op::Call { task, args: args.to_vec(), into }
}

/// The driver's ref goes down through `levels` tasks, each in a process of its own; the innermost makes an object, and its ref
/// comes up through all of them.
pub(super) fn down_and_up(levels: u64) -> Scenario {
    let driver =
        vec![Op::Make(0, vec![]), call(1, &[0], 10), Op::Await(1), Op::Drop(0), Op::Keep(10), Op::Return(vec![])];
    let mut tasks = vec![(0, 0, driver)];
    for level in 1..levels {
        let ops = vec![call(level + 1, &[0], 10), Op::Drop(0), Op::Await(level + 1), Op::Return(vec![10])];
        tasks.push((level, level, ops));
    }
    tasks.push((levels, levels, vec![Op::Make(10, vec![]), Op::Return(vec![10])]));
    scenario(tasks)
}

/// A ref of somebody else's is passed to an actor that keeps it, while the actor gives up another one.
pub(super) fn kept_by_an_actor() -> Scenario {
    scenario([
        (
            0,
            0,
            vec![
                call(1, &[], 10),
                Op::Await(1),
                Op::Make(0, vec![]),
                call(2, &[10, 0], 20),
                Op::Drop(0),
                Op::Drop(10),
                Op::Await(2),
                Op::Return(vec![]),
            ],
        ),
        (1, 1, vec![Op::Make(10, vec![]), Op::Return(vec![10])]),
        (2, 2, vec![Op::Drop(1), Op::Keep(0), Op::Return(vec![])]),
    ])
}

/// An actor is passed the same ref again and again, and keeps the last.
pub(super) fn borrowed_again_and_again() -> Scenario {
    scenario([
        (
            0,
            0,
            vec![
                Op::Make(0, vec![]),
                call(1, &[0], 10),
                Op::Await(1),
                call(2, &[0], 10),
                Op::Await(2),
                Op::Drop(0),
                Op::Return(vec![]),
            ],
        ),
        (1, 1, vec![Op::Drop(0), Op::Return(vec![])]),
        (2, 1, vec![Op::Keep(0), Op::Return(vec![])]),
    ])
}

/// A ref inside a value: one process owns the inner object, another the outer one; a third reads, keeps the inner ref and
/// drops the outer one.
pub(super) fn nested() -> Scenario {
    scenario([
        (
            0,
            0,
            vec![
                call(1, &[], 10),
                Op::Await(1),
                Op::Make(0, vec![10]),
                Op::Drop(10),
                call(2, &[0], 20),
                Op::Drop(0),
                Op::Await(2),
                Op::Return(vec![]),
            ],
        ),
        (1, 1, vec![Op::Make(10, vec![]), Op::Return(vec![10])]),
        (2, 2, vec![Op::Read(0, 1), Op::Drop(0), Op::Keep(1), Op::Return(vec![])]),
    ])
}

/// As [`nested`], but the reader is passed the outer ref twice at the same time.
pub(super) fn nested_and_passed_twice() -> Scenario {
    let mut scenario = nested();
    scenario.tasks.insert(
        0,
        (
            0,
            vec![
                call(1, &[], 10),
                Op::Await(1),
                Op::Make(0, vec![10]),
                Op::Drop(10),
                call(2, &[0], 20),
                call(3, &[0], 20),
                Op::Drop(0),
                Op::Await(2),
                Op::Await(3),
                Op::Return(vec![]),
            ],
        ),
    );
    scenario.tasks.insert(3, (2, vec![Op::Drop(0), Op::Return(vec![])]));
    scenario
}

/// The result of one call is passed to the next by a process in the middle, which keeps nothing.
pub(super) fn handed_on() -> Scenario {
    scenario([
        (
            0,
            0,
            vec![Op::Make(0, vec![]), call(1, &[0], 10), Op::Await(1), Op::Drop(0), Op::Keep(10), Op::Return(vec![])],
        ),
        (
            1,
            1,
            vec![
                Op::Drop(0),
                call(2, &[], 10),
                Op::Await(2),
                call(3, &[10], 20),
                Op::Drop(10),
                Op::Await(3),
                Op::Return(vec![20]),
            ],
        ),
        (2, 2, vec![Op::Make(10, vec![]), Op::Return(vec![10])]),
        (3, 0, vec![Op::Return(vec![0])]),
    ])
}
