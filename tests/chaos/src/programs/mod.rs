//! What drivers run, and what may come of it.
//!
//! Each program chooses its work by chance, knows what is right, and judges errors by what `docs/guarantees.md` promises.

mod borrowed;
mod cancel;
mod counter;
mod group;
mod large;
mod leaves;
mod ledger;
mod memory;
mod once;
mod ranks;
mod stream;
mod tree;

use wingbeat::{Error, ErrorKind};
use wingbeat_shapes::Chance;

pub use ledger::close as close_ledger;

use crate::report::Outcome;

/// A program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Program {
    /// Tasks that call tasks.
    Tree,
    /// An actor with state.
    Counter,
    /// The same, detached, with a name, for all drivers.
    Ledger,
    /// A stream of a task.
    Stream,
    /// Objects that are larger than a store together.
    Large,
    /// Tasks in a placement group.
    Group,
    /// Two ranks that reduce.
    Ranks,
    /// Tasks that use much memory.
    Memory,
    /// Refs to what a task has put and submitted.
    Borrowed,
    /// Tasks that leave processes behind.
    Leaves,
    /// Tasks without retries.
    Once,
    /// Tasks that are cancelled.
    Cancel,
}

impl Program {
    /// All of them.
    pub const ALL: [Program; 12] = [
        Program::Tree,
        Program::Counter,
        Program::Ledger,
        Program::Stream,
        Program::Large,
        Program::Group,
        Program::Ranks,
        Program::Memory,
        Program::Borrowed,
        Program::Leaves,
        Program::Once,
        Program::Cancel,
    ];

    /// Its name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Program::Tree => "tree",
            Program::Counter => "counter",
            Program::Ledger => "ledger",
            Program::Stream => "stream",
            Program::Large => "large",
            Program::Group => "group",
            Program::Ranks => "ranks",
            Program::Memory => "memory",
            Program::Borrowed => "borrowed",
            Program::Leaves => "leaves",
            Program::Once => "once",
            Program::Cancel => "cancel",
        }
    }

    /// Runs it once, for the driver of this number among all that there ever are.
    pub async fn run(self, driver: u64, chance: &mut Chance) -> Outcome {
        let outcome = match self {
            Program::Tree => tree::run(chance).await,
            Program::Counter => counter::run(driver, chance).await,
            Program::Ledger => ledger::run(driver, chance).await,
            Program::Stream => stream::run(chance).await,
            Program::Large => large::run(chance).await,
            Program::Group => group::run(chance).await,
            Program::Ranks => ranks::run(chance).await,
            Program::Memory => memory::run(chance).await,
            Program::Borrowed => borrowed::run(chance).await,
            Program::Leaves => leaves::run(chance).await,
            Program::Once => once::run(driver, chance).await,
            Program::Cancel => cancel::run(chance).await,
        };
        match outcome {
            Ok(()) => Outcome::Right,
            Err(Failure::Wrong(why)) => Outcome::Wrong(why),
            Err(Failure::Error(error, _)) if is_over(&error) => Outcome::Over(error.to_string()),
            Err(Failure::Error(error, allowed)) if allowed.contains(&error.kind()) => Outcome::Excused(name(&error)),
            Err(Failure::Error(error, _)) => Outcome::Wrong(error.to_string()),
        }
    }
}

/// Why a program did not come to the right end.
pub(crate) enum Failure {
    /// A result is wrong.
    Wrong(String),
    /// An error, and of which kinds it may be.
    Error(Box<Error>, &'static [ErrorKind]),
}

/// The error of an operation that must succeed, whatever happens.
impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        Failure::Error(Box::new(error), &[])
    }
}

/// Says which errors an operation may end with.
pub(crate) trait MayFail<T> {
    /// With one of these kinds.
    fn may_be(self, kinds: &'static [ErrorKind]) -> Result<T, Failure>;
}

impl<T> MayFail<T> for wingbeat::Result<T> {
    fn may_be(self, kinds: &'static [ErrorKind]) -> Result<T, Failure> {
        self.map_err(|error| Failure::Error(Box::new(error), kinds))
    }
}

pub(crate) fn equal<T: PartialEq + std::fmt::Debug>(what: &str, value: T, expected: T) -> Result<(), Failure> {
    match value == expected {
        true => Ok(()),
        false => Err(Failure::Wrong(format!("{what} is {value:?} instead of {expected:?}"))),
    }
}

/// Retries that are never used up: what is tried again must succeed in the end.
pub(crate) const RETRIES: u32 = 100_000;

/// What must be written by the head is refused while its disk is full, and has no answer while it does not answer.
pub(crate) const REFUSED: &[ErrorKind] = &[ErrorKind::Full, ErrorKind::Session];

/// Whether the driver has lost its cluster.
fn is_over(error: &Error) -> bool {
    matches!(error, Error::SessionEnded { .. } | Error::NoSession)
}

/// The variant of an error; of one that a task has passed on, that.
fn name(error: &Error) -> String {
    if let Some(passed_on) = error.application::<Error>() {
        return name(&passed_on);
    }
    let text = format!("{error:?}");
    text.split([' ', '{', '(']).next().unwrap_or_default().to_owned()
}

/// Bytes that a number decides, and that can be checked.
pub(crate) fn bytes(number: u64, len: usize) -> Vec<u8> {
    vec![(number % 251) as u8 + 1; len]
}

/// Their sum.
pub(crate) fn sum(data: &[u8]) -> u64 {
    data.iter().map(|byte| u64::from(*byte)).sum()
}

/// What [`sum`] of [`bytes`] must be.
pub(crate) fn expected(number: u64, len: usize) -> u64 {
    (number % 251 + 1) * len as u64
}

/// Holds on to what there is for up to so long.
pub(crate) async fn hold(seconds: usize, chance: &mut Chance) {
    tokio::time::sleep(std::time::Duration::from_millis(chance.below(seconds * 1_000) as u64)).await;
}

/// Takes time in a task.
pub(crate) fn doze(milliseconds: u64) {
    std::thread::sleep(std::time::Duration::from_millis(milliseconds));
}
