//! Which kinds of messages there are, and which of them a frame carries. A new variant that is not listed here does not compile,
//! and one that is listed needs a row in the matrix of faults (`tests/matrix`).

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::messages::{HeadEvent, HeadMessage, NodeMessage, PeerMessage, Work, WorkerCommand};
use crate::services::{HeadRequest, NodeRequest, ProcessRequest, StandbyRequest};

/// What one side of a connection asks of the other: a request, or a batch of one-way messages.
pub trait Carries: Serialize + DeserializeOwned + Send + 'static {
    /// The kinds in it, such as `HeadMessage::Demand` or `HeadRequest::JoinNode`.
    fn kinds(&self) -> Vec<&'static str>;
}

/// One message, of one kind.
trait Kind {
    /// All that there are.
    const ALL: &'static [&'static str];
    fn kind(&self) -> &'static str;
}

/// The kinds of an enum are its variants, but for those that only carry others.
macro_rules! kinds {
    ($enum:ident { $($variant:ident),* $(,)? } $(carries { $($carrier:pat => $carried:expr),* $(,)? })?) => {
        impl Kind for $enum {
            const ALL: &'static [&'static str] = &[$(concat!(stringify!($enum), "::", stringify!($variant))),*];
            fn kind(&self) -> &'static str {
                match self {
                    $($enum::$variant { .. } => concat!(stringify!($enum), "::", stringify!($variant)),)*
                    $($($carrier => $carried,)*)?
                }
            }
        }
    };
}

kinds!(HeadMessage {
    Demand,
    ReturnLease,
    AbandonLease,
    Waiting,
    Resumed,
    SaidAgain,
    WatchActor,
    WatchPlacementGroup,
    KillActor,
    TerminateActor,
    LeaseReady,
    LeaseFailed,
    LeaseEnded,
    DevicesHeld,
    MemoryShort,
    StoreUsed,
    WorkerDied,
    Owners,
    NodeEnds,
    Leaves,
    Holds,
    LifeOver,
    Made,
    ActorStarted,
});
kinds!(HeadEvent {
    Granted,
    Starting,
    Recall,
    Refused,
    Nodes,
    Stops,
    WorkerDied,
    NodeDied,
    Actor,
    PlacementGroup,
    SayAgain,
    Deadlock,
    Standby
});
kinds!(NodeMessage {
    BeginJob,
    StartLease,
    EndLease,
    DrainActor,
    EndJob,
    Stop,
    Prestart,
    Unpin,
    Delete,
    ActorStarted,
    NodeDied,
    OwnersGone,
    Stays,
    LeftBehind,
    LostHead,
    Keep,
});
kinds!(WorkerCommand { Lease, StartActor, Drain, Exit, Patience, Heads });
kinds!(Work { Tasks, Calls, TakeBack, Cancel, StreamTaken, Received, ItemReceived, MayLeave });
kinds!(PeerMessage {
    Results, GaveBack, Ready, CancelObject, StreamItem, Subscribe, Resolved, Borrow, Release, Copied, Lost, Shadows,
} carries { PeerMessage::Work(work) => work.kind() });

/// The kinds of requests, and the batches among them.
macro_rules! requests {
    ($enum:ident { $($variant:ident),* $(,)? } batches { $($batch:ident { $messages:ident } of $of:ty),* $(,)? }) => {
        impl Carries for $enum {
            fn kinds(&self) -> Vec<&'static str> {
                match self {
                    $($enum::$variant { .. } => vec![concat!(stringify!($enum), "::", stringify!($variant))],)*
                    $($enum::$batch { $messages, .. } => $messages.iter().map(<$of>::kind).collect(),)*
                }
            }
        }

        impl $enum {
            const KINDS: &'static [&'static str] = &[$(concat!(stringify!($enum), "::", stringify!($variant))),*];
        }
    };
}

requests!(HeadRequest {
    Resume, JoinNode, JoinJob, CreateActor, FindActor, CreatePlacementGroup, RemovePlacementGroup, FindPlacementGroup, SetQuota,
    DrainNode, Explain, SettleOutput, KnowsNode, HasEnded, ReadProgram, State, Stacks, ProcessesOfJob, Follow, Stop,
} batches { Deliver { messages } of HeadMessage });
requests!(NodeRequest {
    RegisterWorker, Create, Seal, SettleOutput, Fetch, Stacks, ProcessAbove, ReadKept, Support, Elect,
} batches { Deliver { messages } of NodeMessage, Orders { messages } of NodeMessage });
requests!(ProcessRequest {
    Logs, ExplainTask, ReadExecutable, Stacks, Keeps,
} batches {
    Deliver { messages } of PeerMessage, HeadEvents { events } of HeadEvent, Commands { commands } of WorkerCommand,
});

impl Carries for StandbyRequest {
    fn kinds(&self) -> Vec<&'static str> {
        match self {
            StandbyRequest::MayLead { .. } => vec![StandbyRequest::KINDS[0]],
        }
    }
}

impl StandbyRequest {
    const KINDS: &'static [&'static str] = &["StandbyRequest::MayLead"];
}

/// Every kind that there is.
pub fn all() -> Vec<&'static str> {
    [
        HeadMessage::ALL,
        HeadEvent::ALL,
        NodeMessage::ALL,
        WorkerCommand::ALL,
        Work::ALL,
        PeerMessage::ALL,
        HeadRequest::KINDS,
        NodeRequest::KINDS,
        ProcessRequest::KINDS,
        StandbyRequest::KINDS,
    ]
    .concat()
}
