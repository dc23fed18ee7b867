//! What users read when something goes wrong: an example of every error.

use crate::error::{ApplicationError, Error};
use crate::ids::{ActorId, ClusterId, NodeId, ProcessId, TaskId};
use crate::memory::{EndedBy, MemoryShortage, MemoryUsage, MemoryUser};
use crate::spec::Exit;

const GIB: u64 = 1 << 30;

/// One of each variant; those of a task after several attempts.
fn examples() -> Vec<Error> {
    let (actor, class) = (ActorId(5), || "jobs::Tally".to_owned());
    let (task, attempts, why) = (|| "jobs::fetch".to_owned(), 4, || "the reason".to_owned());
    let object = TaskId { owner: ProcessId(7), seq: 3 }.output(0);
    let (name, namespace) = (|| "visits".to_owned(), || "team".to_owned());
    let stderr = vec!["a line".to_owned()];
    let exit = Exit { code: Some(9), signal: None, stderr, reason: None, memory: None };
    let used =
        MemoryUsage { of: "the machine".into(), limit: 16 * GIB, used: 15 * GIB, threshold: 15 * GIB, store: GIB };
    let largest = vec![MemoryUser { pid: 12, what: task(), bytes: 9 * GIB }];
    let shortage = MemoryShortage { node: NodeId(1), hostname: "a".into(), by: EndedBy::Node, usage: used, largest };
    let own = ApplicationError { type_name: "Busy".into(), message: "busy".into(), payload: Default::default() };
    let ended = || Box::new(Error::ActorEnded { by: "kill".into() });
    vec![
        Error::Application { task: task(), error: own, attempts },
        Error::Panicked { task: task(), message: "oh".into(), backtrace: "   0: jobs::fetch".into(), attempts },
        Error::WorkerCrashed { task: task(), process: ProcessId(7), pid: 12, exit, attempts },
        Error::OutOfMemory { task: task(), process: ProcessId(7), pid: 12, shortage: Box::new(shortage), attempts },
        Error::NodeDied { what: task(), node: NodeId(1), why: why(), attempts },
        Error::ContactLost { what: task(), who: "its worker process".into(), why: why(), attempts },
        Error::ActorUnavailable { actor, class: class(), cause: ended() },
        Error::ActorDied { actor, class: class(), cause: ended() },
        Error::TooManyPendingCalls { actor, class: class(), limit: 8 },
        Error::ActorEnded { by: "its own call of exit_actor()".into() },
        Error::OwnerDied { object, owner: ProcessId(7) },
        Error::ObjectLost { object, why: why() },
        Error::ObjectUnavailable { object, why: why() },
        Error::Cancelled { task: task() },
        Error::TimedOut { what: "getting jobs::fetch".into(), limit_ms: 500 },
        Error::Deadlock { cycle: vec!["A::call".into(), "B::call".into(), "A::call".into()] },
        Error::Infeasible { what: task(), asked: "9 CPU".into(), nearest: "no node has more than 8 CPU".into() },
        Error::PlacementGroupGone { what: task(), group: "group-5".into(), why: "was removed".into() },
        Error::PlacementGroupNotFound { name: name(), namespace: namespace() },
        Error::PlacementGroupNameTaken { name: name(), namespace: namespace() },
        Error::ActorNotFound { name: name(), namespace: namespace() },
        Error::ActorNameTaken { name: name(), namespace: namespace() },
        Error::InvalidOption { what: task(), option: "num_cpus".into(), why: why() },
        Error::InvalidArgument { what: "what is wrong with it".into() },
        Error::Encode { what: "argument x of jobs::fetch".into(), why: why() },
        Error::Decode { what: "argument x of jobs::fetch".into(), why: why() },
        Error::FunctionNotFound { function: task(), known: "jobs::parse".into() },
        Error::ForeignRef { what: "a ref".into(), theirs: ClusterId(1), ours: ClusterId(2) },
        Error::ObjectTooLarge { what: "the value".into(), size: 3 * GIB, store: GIB, disk: 9 * GIB },
        Error::StoreFull { what: "the value".into(), why: why() },
        Error::OutOfDescriptors { what: "opening a file".into(), why: why() },
        Error::Io { what: "opening a file".into(), why: why(), code: Some(2) },
        Error::Failed { what: "starting a worker process".into(), why: why() },
        Error::Unreachable { what: "the head".into(), address: "10.0.0.1:6420".into(), why: why() },
        Error::Refused { who: "the head".into(), why: why() },
        Error::NoSession,
        Error::SessionEnded { why: why() },
    ]
}

/// A new variant does not compile here: give it an example above, too.
fn has_an_example(error: &Error) {
    match error {
        Error::Application { .. }
        | Error::Panicked { .. }
        | Error::WorkerCrashed { .. }
        | Error::OutOfMemory { .. } => {}
        Error::NodeDied { .. }
        | Error::ContactLost { .. }
        | Error::ActorUnavailable { .. }
        | Error::ActorDied { .. } => {}
        Error::TooManyPendingCalls { .. } | Error::ActorEnded { .. } | Error::OwnerDied { .. } => {}
        Error::ObjectLost { .. } | Error::ObjectUnavailable { .. } | Error::Cancelled { .. } => {}
        Error::TimedOut { .. } | Error::Deadlock { .. } | Error::Infeasible { .. } => {}
        Error::PlacementGroupGone { .. } | Error::PlacementGroupNotFound { .. } => {}
        Error::PlacementGroupNameTaken { .. } | Error::ActorNotFound { .. } | Error::ActorNameTaken { .. } => {}
        Error::InvalidOption { .. } | Error::InvalidArgument { .. } | Error::Encode { .. } | Error::Decode { .. } => {}
        Error::FunctionNotFound { .. } | Error::ForeignRef { .. } | Error::ObjectTooLarge { .. } => {}
        Error::StoreFull { .. } | Error::OutOfDescriptors { .. } | Error::Io { .. } | Error::Failed { .. } => {}
        Error::Unreachable { .. } | Error::Refused { .. } | Error::NoSession | Error::SessionEnded { .. } => {}
    }
}

#[test]
fn every_error_says_what_failed_and_why() {
    let text = |error: &Error| {
        has_an_example(error);
        let variant: String = format!("{error:?}").chars().take_while(|letter| letter.is_alphanumeric()).collect();
        format!("{variant}, {:?}, retryable: {}\n    {error}", error.kind(), error.is_retryable())
    };
    insta::assert_snapshot!(examples().iter().map(text).collect::<Vec<_>>().join("\n"));
}
