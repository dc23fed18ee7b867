//! The errors that users see. They travel, so they are plain data.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::codec::{self, Payload};
use crate::ids::*;
use crate::memory::MemoryShortage;
use crate::spec::Exit;

/// What an operation of Wingbeat answers.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Everything that can go wrong between asking for a result and having it.
#[derive(Debug, Clone, Serialize, Deserialize, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The function returned an error of its own.
    #[error("{task} returned an error{:#}: {}", Attempts(*.attempts), .error.message)]
    Application {
        /// Which task.
        task: String,
        /// The error; [`Error::application`] gives it back as its type.
        error: ApplicationError,
        /// How often the task was tried.
        attempts: u32,
    },
    /// The function panicked.
    #[error("{task} panicked{:#}: {message}\n{backtrace}", Attempts(*.attempts))]
    Panicked {
        /// Which task.
        task: String,
        /// The panic's message and place.
        message: String,
        /// Where it came from.
        backtrace: String,
        /// How often the task was tried.
        attempts: u32,
    },
    /// The worker process ended while the task ran.
    #[error("the worker process {process} (pid {pid}) of {task} {}", .exit.after(*.attempts))]
    WorkerCrashed {
        /// Which task.
        task: String,
        /// Which process.
        process: ProcessId,
        /// Its process id.
        pid: u32,
        /// How it ended.
        exit: Exit,
        /// How often the task was tried.
        attempts: u32,
    },
    /// Memory ran out on the node of a task or actor, and its process was ended for that.
    #[error(
        "{task} (worker process {pid}) was ended{}: {shortage}\n  What helps: let less of it run at a time (`num_cpus`, or `memory`, which says \
         what each needs), give the node more memory, or give it less to do. `max_memory_retries` is how often a task is tried \
         again after this",
        Attempts(*.attempts)
    )]
    OutOfMemory {
        /// Which task or actor.
        task: String,
        /// Which process.
        process: ProcessId,
        /// Its process id.
        pid: u32,
        /// Who used what.
        shortage: Box<MemoryShortage>,
        /// How often the task was tried.
        attempts: u32,
    },
    /// The node of a task, actor or object is gone.
    #[error("{what} was lost with its node {node}{:#}: {why}", Attempts(*.attempts))]
    NodeDied {
        /// What was lost.
        what: String,
        /// Which node.
        node: NodeId,
        /// How that was found out.
        why: String,
        /// How often the task was tried.
        attempts: u32,
    },
    /// The connection to a process broke, and whether the process lives is not known.
    #[error("{what} failed{:#}: lost contact with {who}: {why}. Check the network between the two machines", Attempts(*.attempts))]
    ContactLost {
        /// The task or call, or what was asked for.
        what: String,
        /// The process on the other side, and where it is.
        who: String,
        /// How that was found out.
        why: String,
        /// How often the task was tried.
        attempts: u32,
    },
    /// The actor's process ended and it is being restarted, or contact with it was lost; calls made from now on may reach
    /// it.
    #[error("actor {class} ({actor}) became unavailable while the call ran: {cause}")]
    ActorUnavailable {
        /// Which actor.
        actor: ActorId,
        /// Its class.
        class: String,
        /// Why it ended.
        cause: Box<Error>,
    },
    /// The actor is gone for good.
    #[error("actor {class} ({actor}) is dead: {cause}")]
    ActorDied {
        /// Which actor.
        actor: ActorId,
        /// Its class.
        class: String,
        /// Why.
        cause: Box<Error>,
    },
    /// The actor has a limit on pending calls, and this process has made as many as that already.
    #[error(
        "actor {class} ({actor}) takes at most {limit} pending calls of a process; wait for results before you make more, \
         or raise max_pending_calls"
    )]
    TooManyPendingCalls {
        /// Which actor.
        actor: ActorId,
        /// Its class.
        class: String,
        /// Its `max_pending_calls`.
        limit: u32,
    },
    /// The actor was ended on purpose.
    #[error("it was ended by {by}")]
    ActorEnded {
        /// What ended it: `kill`, `terminate`, its own call of `exit_actor()`, the end of its creator, or that its last handle was dropped.
        by: String,
    },
    /// The process that owned the object is gone, and the object with it.
    #[error(
        "the owner of {object}, process {owner}, has ended, and the object with it; make such objects in the driver or in an actor, or submit the task again"
    )]
    OwnerDied {
        /// The object.
        object: ObjectId,
        /// Its owner.
        owner: ProcessId,
    },
    /// Every copy of the object was lost.
    #[error("{object} was lost: {why}")]
    ObjectLost {
        /// The object.
        object: ObjectId,
        /// How.
        why: String,
    },
    /// The task was cancelled.
    #[error("{task} was cancelled")]
    Cancelled {
        /// Which task.
        task: String,
    },
    /// A wait took longer than it was allowed to.
    #[error("{what} took longer than {limit_ms} ms")]
    TimedOut {
        /// What was waited for.
        what: String,
        /// How long was allowed.
        limit_ms: u64,
    },
    /// Executions wait for each other in a circle.
    #[error("deadlock: {}; make one of the calls without waiting, or let the actor run both (more concurrency, and `&self`)", .cycle.join(" waits for "))]
    Deadlock {
        /// The members of the circle, in order.
        cycle: Vec<String>,
    },
    /// No node could ever hold what was asked for.
    #[error("{what} can never be placed: it asks for {asked}, and {nearest}")]
    Infeasible {
        /// What was asked for it.
        what: String,
        /// The request.
        asked: String,
        /// The nearest node and what it lacks.
        nearest: String,
    },
    /// A placement group is not there any more, and what needed it cannot run.
    #[error("{what} cannot run: {group} {why}")]
    PlacementGroupGone {
        /// The task or actor, or what was asked of the group.
        what: String,
        /// The group, as people know it.
        group: String,
        /// What became of it.
        why: String,
    },
    /// No placement group has this name.
    #[error("no placement group is named `{name}` in namespace `{namespace}`")]
    PlacementGroupNotFound {
        /// The name.
        name: String,
        /// Where.
        namespace: String,
    },
    /// A placement group has this name already.
    #[error(
        "a placement group named `{name}` is in namespace `{namespace}` already; remove it first, or use another name"
    )]
    PlacementGroupNameTaken {
        /// The name.
        name: String,
        /// Where.
        namespace: String,
    },
    /// An option has a value that cannot be.
    #[error("option {option} of {what}: {why}")]
    InvalidOption {
        /// The task, actor or call.
        what: String,
        /// The option.
        option: String,
        /// What is wrong.
        why: String,
    },
    /// An argument or a result cannot be encoded.
    #[error(
        "{what} cannot be sent: {why}; use types with plain derived serde (no untagged, flatten, skip_serializing_if or serde_json::Value; skip of a variant only behind all others)"
    )]
    Encode {
        /// The function and argument.
        what: String,
        /// Why not.
        why: String,
    },
    /// Bytes are not the value that was expected.
    #[error("{what} cannot be decoded: {why}; are caller and callee built from the same source?")]
    Decode {
        /// What was decoded.
        what: String,
        /// Why not.
        why: String,
    },
    /// The worker's executable has no such function.
    #[error(
        "{function} is not in the executable of the worker process, which is of another build: its functions may have other \
         arguments or results. It has: {known}"
    )]
    FunctionNotFound {
        /// The function.
        function: String,
        /// Some that there are.
        known: String,
    },
    /// A value is larger than the node's store.
    #[error(
        "{what} needs {size} bytes, and the node's store has {store} bytes. A value is written to the store before it can \
         be spilled, so the {disk} bytes of spill space do not help: give the store more memory, or split the value"
    )]
    ObjectTooLarge {
        /// Which object.
        what: String,
        /// Its size.
        size: u64,
        /// The store's capacity.
        store: u64,
        /// The spill capacity.
        disk: u64,
    },
    /// The store has no room now.
    #[error("no room in the node's store for {what}: {why}")]
    StoreFull {
        /// Which object.
        what: String,
        /// What holds the memory.
        why: String,
    },
    /// Nobody answers at an address.
    #[error("cannot reach {what} at {address}: {why}")]
    Unreachable {
        /// Who should be there.
        what: String,
        /// What was tried.
        address: String,
        /// What happened.
        why: String,
    },
    /// The other side does not accept this one.
    #[error("refused by {who}: {why}")]
    Refused {
        /// Who refused.
        who: String,
        /// Why.
        why: String,
    },
    /// There is no session in this process.
    #[error("this process has joined no cluster; call wingbeat::init() first")]
    NoSession,
    /// The session was shut down.
    #[error("the session has ended: {why}")]
    SessionEnded {
        /// Why.
        why: String,
    },
    /// A ref or a handle belongs to another cluster.
    #[error("{what} belongs to {theirs}, and was used in a session of {ours}; get its value there, and pass that")]
    ForeignRef {
        /// The ref.
        what: String,
        /// Its cluster.
        theirs: ClusterId,
        /// The session's cluster.
        ours: ClusterId,
    },
    /// No actor has this name.
    #[error(
        "no actor is named `{name}` in namespace `{namespace}`; a program finds the actors of its own namespace only, which is a new one \
         unless it names one, as with `init().namespace(..)`"
    )]
    ActorNotFound {
        /// The name.
        name: String,
        /// Where.
        namespace: String,
    },
    /// An actor has this name already.
    #[error("an actor named `{name}` is in namespace `{namespace}` already; use get_or_create, or another name")]
    ActorNameTaken {
        /// The name.
        name: String,
        /// Where.
        namespace: String,
    },
    /// An argument of a call that makes no sense.
    #[error("{what}")]
    InvalidArgument {
        /// What is wrong and what would be right.
        what: String,
    },
    /// A process may have no more descriptors (open files and connections).
    #[error("{what}: {why}; some may be free again soon, and `ulimit -n` says how many there may be")]
    OutOfDescriptors {
        /// What was attempted.
        what: String,
        /// The system's answer.
        why: String,
    },
    /// The operating system has refused something: [`Error::os_error`] is its answer.
    #[error("{what}: {why}")]
    Io {
        /// What was attempted.
        what: String,
        /// The system's answer.
        why: String,
        /// The number of that, where it was one of the system's own.
        code: Option<i32>,
    },
    /// A part of the cluster has failed at what it should always be able to do. The log of that part says more, and if it comes again
    /// with nothing broken around it, it is a defect of Wingbeat that is worth a report.
    #[error("{what}: {why}")]
    Failed {
        /// What was attempted.
        what: String,
        /// What came of it.
        why: String,
    },
    /// The object exists, but cannot be read or written at this node now. It may work later, or at another node.
    #[error("{object} is not available here now: {why}; it was not lost: try again, or at another node")]
    ObjectUnavailable {
        /// The object.
        object: ObjectId,
        /// Who has it, and why that did not help.
        why: String,
    },
}

/// An error that a user's function returned.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ApplicationError {
    /// Its Rust type.
    pub type_name: String,
    /// Its text, for people.
    pub message: String,
    /// Its encoded value: see [`Error::application`].
    #[doc(hidden)]
    pub payload: Payload,
}

impl ApplicationError {
    /// The error that a function returned because another had failed.
    pub(crate) fn passed_on(&self) -> Option<Error> {
        let is_ours = self.type_name == std::any::type_name::<Error>();
        is_ours.then(|| codec::decode_value(&self.payload).ok()).flatten()
    }
}

impl Error {
    /// The function's own error, if that is what this is and its type is `E`. The causes of an actor's death are looked
    /// through, and so is an `Error` that a function returned because another had failed.
    pub fn application<E: DeserializeOwned + 'static>(&self) -> Option<E> {
        match self {
            Error::Application { error, .. } if error.type_name == std::any::type_name::<E>() => {
                codec::decode_value(&error.payload).ok()
            }
            Error::Application { error, .. } => error.passed_on()?.application(),
            Error::ActorDied { cause, .. } | Error::ActorUnavailable { cause, .. } => cause.application(),
            _ => None,
        }
    }

    /// Whether it is the function's own error and its type has this name, as [`std::any::type_name`] gives it; looked for as by
    /// [`application`](Self::application), without decoding the error.
    #[must_use]
    pub fn is_of_type(&self, name: &str) -> bool {
        match self {
            Error::Application { error, .. } => {
                error.type_name == name || error.passed_on().is_some_and(|error| error.is_of_type(name))
            }
            Error::ActorDied { cause, .. } | Error::ActorUnavailable { cause, .. } => cause.is_of_type(name),
            _ => false,
        }
    }

    /// For what is said of an object that has only a number, or of one task of many that ask for the same: the name by which people
    /// know it.
    #[must_use]
    pub fn about(self, name: impl FnOnce() -> String) -> Error {
        match self {
            Error::ObjectTooLarge { size, store, disk, .. } => {
                Error::ObjectTooLarge { what: name(), size, store, disk }
            }
            Error::StoreFull { why, .. } => Error::StoreFull { what: name(), why },
            Error::Infeasible { asked, nearest, .. } => Error::Infeasible { what: name(), asked, nearest },
            Error::PlacementGroupGone { group, why, .. } => Error::PlacementGroupGone { what: name(), group, why },
            other => other,
        }
    }

    /// For what the task of this name has failed with after several attempts: says how many.
    #[must_use]
    pub fn after_attempts(mut self, name: &str, attempts: u32) -> Error {
        match &mut self {
            _ if attempts <= 1 => {}
            Error::Application { task, attempts: tried, .. }
            | Error::Panicked { task, attempts: tried, .. }
            | Error::NodeDied { what: task, attempts: tried, .. }
            | Error::ContactLost { what: task, attempts: tried, .. }
            | Error::WorkerCrashed { task, attempts: tried, .. }
            | Error::OutOfMemory { task, attempts: tried, .. }
                // What has failed may be another task, whose error this one has passed on.
                if task == name =>
            {
                *tried = attempts;
            }
            _ => {}
        }
        self
    }

    /// Whether another attempt may succeed although nothing in the program changes: the machine failed
    /// and not the code.
    pub fn is_system_failure(&self) -> bool {
        matches!(
            self,
            Error::WorkerCrashed { .. }
                | Error::OutOfMemory { .. }
                | Error::NodeDied { .. }
                | Error::ContactLost { .. }
                | Error::ObjectLost { .. }
                | Error::ObjectUnavailable { .. }
                | Error::OutOfDescriptors { .. }
        )
    }

    /// What happened, for an IO error.
    pub fn io(what: impl Into<String>, why: &std::io::Error) -> Error {
        let (what, text) = (what.into(), why.to_string());
        match why.raw_os_error() {
            Some(EMFILE | ENFILE) => Error::OutOfDescriptors { what, why: text },
            code => Error::Io { what, why: text, code },
        }
    }

    /// What the operating system has answered, if that is what this says: of a machine of the cluster, which need not be this one.
    ///
    /// ```
    /// use std::io;
    /// use wingbeat_core::error::Error;
    ///
    /// let error = Error::io("opening the file", &io::Error::from_raw_os_error(2));
    /// assert_eq!(error.os_error().map(|error| error.kind()), Some(io::ErrorKind::NotFound));
    /// ```
    #[must_use]
    pub fn os_error(&self) -> Option<std::io::Error> {
        match self {
            Error::Io { code: Some(code), .. } => Some(std::io::Error::from_raw_os_error(*code)),
            Error::OutOfDescriptors { .. } => Some(std::io::Error::from_raw_os_error(EMFILE)),
            _ => None,
        }
    }
}

/// How often a task was tried, behind how it failed; in the middle of a sentence with `{:#}`. Nothing of the first attempt.
pub(crate) struct Attempts(pub u32);

impl std::fmt::Display for Attempts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            0 | 1 => Ok(()),
            attempts if f.alternate() => write!(f, " after {attempts} attempts"),
            attempts => write!(f, ", after {attempts} attempts"),
        }
    }
}

/// This process, and the whole system, have no descriptors left; the numbers are the same on every Linux.
const EMFILE: i32 = 24;
const ENFILE: i32 = 23;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_of_several_attempts_says_how_many_there_were() {
        let lost = |attempts| {
            let error = Error::NodeDied { what: "fetch".into(), node: NodeId(7), why: "a test".into(), attempts: 1 };
            error.after_attempts("fetch", attempts).to_string()
        };
        assert_eq!(lost(4), "fetch was lost with its node node-000000000007 after 4 attempts: a test");
        assert!(lost(1).ends_with(": a test"), "{}", lost(1));
        let of_another =
            Error::ContactLost { what: "parse".into(), who: "somebody".into(), why: "a test".into(), attempts: 1 };
        assert!(!of_another.after_attempts("fetch", 4).to_string().contains("attempts"));
    }

    #[test]
    fn the_task_of_an_error_stays_its_name_however_often_it_was_tried() {
        let exit = |memory| Exit { code: None, signal: Some(9), stderr: vec!["a line".into()], reason: None, memory };
        let crashed = exit(None).into_error("fetch".into(), ProcessId(7), 12).after_attempts("fetch", 4);
        assert_eq!(
            crashed.to_string(),
            "the worker process process-000000000007 (pid 12) of fetch was killed by signal 9 (SIGKILL), after 4 attempts; last lines \
             of its stderr:\n    a line"
        );
        assert!(matches!(&crashed, Error::WorkerCrashed { task, attempts: 4, .. } if task == "fetch"));
        let error = ApplicationError { type_name: "Busy".into(), message: "busy".into(), payload: Payload::default() };
        let failed = Error::Application { task: "fetch".into(), error, attempts: 1 }.after_attempts("fetch", 2);
        assert_eq!(failed.to_string(), "fetch returned an error after 2 attempts: busy");
        assert!(matches!(&failed, Error::Application { task, .. } if task == "fetch"));
    }

    #[test]
    fn running_out_of_descriptors_may_pass() {
        let error = Error::io("opening", &std::io::Error::from_raw_os_error(EMFILE));
        assert!(error.is_system_failure() && error.to_string().contains("ulimit"), "{error}");
        assert!(!Error::io("opening", &std::io::Error::from_raw_os_error(2)).is_system_failure());
    }
}
