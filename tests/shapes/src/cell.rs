//! What a cell is.

use std::fmt;

/// What a cell does. Counts say how often, payloads with how much data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Operation {
    /// Independent tasks with the payload as their argument.
    Task,
    /// Tasks of which each passes the payload on to the next.
    Chain,
    /// One object that many tasks read.
    FanOut,
    /// Many objects that one task reads.
    FanIn,
    /// Tasks that call a task that calls a task.
    Nested,
    /// Refs that go down with the arguments of so many levels of tasks.
    RefsDown(u8),
    /// Refs that come up with the results of so many levels of tasks.
    RefsUp(u8),
    /// Actor handles that go down and come up again.
    HandleUp,
    /// Synchronous calls of an actor.
    Actor,
    /// Asynchronous calls of an actor that runs several at a time.
    AsyncActor,
    /// Values that are put and read.
    Put,
    /// Values that are put and read in place.
    View,
    /// A task that reads, puts, waits and submits all the time, without returning.
    Busy,
    /// A stream of a task.
    Stream,
    /// Tasks in a placement group.
    PlacementGroup,
    /// Tasks that are cancelled by who submitted them.
    Cancel,
    /// Tasks that are cancelled by a task which borrowed their refs.
    CancelBorrowed,
    /// Results in the order in which they come.
    Wait,
}

impl Operation {
    /// All of them.
    pub const ALL: [Operation; 24] = [
        Operation::Task,
        Operation::Chain,
        Operation::FanOut,
        Operation::FanIn,
        Operation::Nested,
        Operation::RefsDown(1),
        Operation::RefsDown(2),
        Operation::RefsDown(3),
        Operation::RefsDown(4),
        Operation::RefsUp(1),
        Operation::RefsUp(2),
        Operation::RefsUp(3),
        Operation::RefsUp(4),
        Operation::HandleUp,
        Operation::Actor,
        Operation::AsyncActor,
        Operation::Put,
        Operation::View,
        Operation::Busy,
        Operation::Stream,
        Operation::PlacementGroup,
        Operation::Cancel,
        Operation::CancelBorrowed,
        Operation::Wait,
    ];

    /// Each start of one costs processes, or a cell of it does its work one step after the other.
    pub(crate) fn most(self) -> usize {
        match self {
            Operation::RefsDown(_) | Operation::RefsUp(_) | Operation::Nested => 20,
            Operation::HandleUp => 5,
            Operation::Chain | Operation::Cancel | Operation::CancelBorrowed => 300,
            _ => usize::MAX,
        }
    }
}

/// How fast the two sides are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Pace {
    /// As fast as they can.
    AtOnce,
    /// Whoever takes results pauses now and then.
    SlowConsumer,
    /// Whoever makes them does.
    SlowProducer,
}

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fault {
    /// Nothing.
    None,
    /// A worker process is killed when some results are there.
    Kill,
}

/// Where the cluster is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Place {
    /// Inside the driver.
    Private,
    /// A head and a node of their own.
    Apart,
    /// A driver and two nodes on three machines that share nothing but a network.
    Machines,
}

/// One operation in one shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Cell {
    /// What is done.
    pub operation: Operation,
    /// Bytes of each value.
    pub payload: usize,
    /// How often.
    pub count: usize,
    /// How fast.
    pub pace: Pace,
    /// What goes wrong.
    pub fault: Fault,
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Cell { operation, payload, count, pace, fault } = self;
        write!(f, "{operation:?}, {count} of {payload} bytes, {pace:?}, fault: {fault:?}")
    }
}
