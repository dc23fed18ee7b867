//! What is taken out of a recording before it is written.

use std::sync::Arc;

use wingbeat_core::codec::Payload;
use wingbeat_core::error::Error;
use wingbeat_core::spec::{ActorSpec, ActorState, Arg, JobSpec, Outcome, PlacementGroupState, TaskResult, TaskSpec};
use wingbeat_core::value::{ObjectValue, Packed};

use crate::messages::{
    ENDED_UNREPORTED, HeadEvent, HeadMessage, LeaseHolder, NodeMessage, PeerMessage, Running, RunningLease, Shadow,
    THEN_FAILED, Work, WorkerCommand,
};

/// Takes out what nobody else is to see: values of users' programs, what they print, and environments. Ids, names and sizes
/// stay. Before a step is written, and before actions are compared.
pub trait Redact {
    /// Takes it out.
    fn redact(&mut self);
}

impl Redact for () {
    fn redact(&mut self) {}
}

impl<T: Redact> Redact for Vec<T> {
    fn redact(&mut self) {
        self.iter_mut().for_each(Redact::redact);
    }
}

impl Redact for Payload {
    fn redact(&mut self) {
        *self = self.left_out();
    }
}

impl Redact for Packed {
    fn redact(&mut self) {
        self.bytes.redact();
    }
}

impl Redact for ObjectValue {
    fn redact(&mut self) {
        match self {
            ObjectValue::Inline(packed) => packed.redact(),
            ObjectValue::Stored(_) => {}
            ObjectValue::Failed(error) => error.redact(),
        }
    }
}

impl Redact for Arg {
    fn redact(&mut self) {
        match self {
            Arg::Value(packed) => packed.redact(),
            Arg::Stored(..) | Arg::Ref(..) => {}
        }
    }
}

impl Redact for TaskSpec {
    fn redact(&mut self) {
        self.args.redact();
    }
}

impl Redact for TaskResult {
    fn redact(&mut self) {
        match &mut self.outcome {
            Outcome::One(value) => value.redact(),
            Outcome::Many(values) => values.redact(),
            Outcome::StreamEnded(_) => {}
            Outcome::Failed(error) => error.redact(),
        }
    }
}

impl Redact for PeerMessage {
    fn redact(&mut self) {
        match self {
            PeerMessage::Work(work) => work.redact(),
            PeerMessage::Results(results) => results.redact(),
            PeerMessage::StreamItem { value, .. } => value.redact(),
            PeerMessage::Resolved(values) => values.iter_mut().for_each(|(_, value)| value.redact()),
            PeerMessage::Shadows(shadows) => {
                for shadow in shadows {
                    if let Shadow::Kept(_, Some(value)) = shadow {
                        value.redact();
                    }
                }
            }
            PeerMessage::GaveBack { .. }
            | PeerMessage::Ready(_)
            | PeerMessage::CancelObject { .. }
            | PeerMessage::Subscribe(_)
            | PeerMessage::Borrow(_)
            | PeerMessage::Release(_)
            | PeerMessage::Copied { .. }
            | PeerMessage::Lost { .. } => {}
        }
    }
}

impl Redact for Work {
    fn redact(&mut self) {
        match self {
            Work::Tasks { tasks: specs, .. } | Work::Calls { calls: specs, .. } => specs.redact(),
            Work::TakeBack { .. }
            | Work::Cancel { .. }
            | Work::StreamTaken { .. }
            | Work::Received(_)
            | Work::ItemReceived(_)
            | Work::MayLeave => {}
        }
    }
}

impl Redact for JobSpec {
    fn redact(&mut self) {
        self.env.clear();
        self.local_env.clear();
    }
}

impl Redact for ActorSpec {
    fn redact(&mut self) {
        self.args.redact();
    }
}

impl<T: Redact + Clone> Redact for Arc<T> {
    fn redact(&mut self) {
        Arc::make_mut(self).redact();
    }
}

impl Redact for Error {
    fn redact(&mut self) {
        match self {
            Error::Application { error, .. } => {
                error.message.clear();
                error.payload.redact();
            }
            Error::Panicked { message, backtrace, .. } => {
                message.clear();
                backtrace.clear();
            }
            Error::ContactLost { why, .. } => {
                if let Some(at) = why.find(THEN_FAILED) {
                    why.truncate(at + THEN_FAILED.len());
                }
            }
            // What serde says of a value may quote it.
            Error::Encode { why, .. } | Error::Decode { why, .. } => why.clear(),
            Error::ActorDied { cause, .. } | Error::ActorUnavailable { cause, .. } => cause.redact(),
            Error::WorkerCrashed { exit, .. } => exit.stderr.clear(),
            Error::Failed { what, why } if what == ENDED_UNREPORTED => why.clear(),
            // The others say what Wingbeat says. They may become more (`non_exhaustive`).
            _ => {}
        }
    }
}

fn redact_error(outcome: &mut Result<(), Error>) {
    if let Err(error) = outcome {
        error.redact();
    }
}

impl Redact for LeaseHolder {
    fn redact(&mut self) {
        match self {
            LeaseHolder::Actor(spec, ..) => spec.redact(),
            LeaseHolder::Tasks(..) => {}
        }
    }
}

impl Redact for Running {
    fn redact(&mut self) {
        self.leases.iter_mut().for_each(Redact::redact);
    }
}

impl Redact for RunningLease {
    fn redact(&mut self) {
        self.start.holder.redact();
        if let Some(outcome) = &mut self.started {
            redact_error(outcome);
        }
    }
}

impl Redact for NodeMessage {
    fn redact(&mut self) {
        match self {
            NodeMessage::BeginJob(spec) => spec.redact(),
            NodeMessage::StartLease(start) => start.holder.redact(),
            NodeMessage::Keep(keep) => keep.changes.clear(),
            NodeMessage::ActorStarted { outcome, .. } => redact_error(outcome),
            NodeMessage::EndLease { .. }
            | NodeMessage::DrainActor { .. }
            | NodeMessage::EndJob { .. }
            | NodeMessage::Stop(_)
            | NodeMessage::Prestart { .. }
            | NodeMessage::Unpin(_)
            | NodeMessage::Delete(_)
            | NodeMessage::NodeDied(_)
            | NodeMessage::OwnersGone { .. }
            | NodeMessage::Stays
            | NodeMessage::LeftBehind(_)
            | NodeMessage::LostHead => {}
        }
    }
}

impl Redact for HeadMessage {
    fn redact(&mut self) {
        match self {
            HeadMessage::ActorStarted { outcome, .. } => redact_error(outcome),
            HeadMessage::LeaseFailed { error, .. } => error.redact(),
            // What a program has printed.
            HeadMessage::WorkerDied(death) => death.exit.stderr.clear(),
            HeadMessage::Made { spec, .. } => spec.redact(),
            HeadMessage::Demand { .. }
            | HeadMessage::ReturnLease(_)
            | HeadMessage::AbandonLease(_)
            | HeadMessage::Waiting { .. }
            | HeadMessage::Resumed { .. }
            | HeadMessage::SaidAgain { .. }
            | HeadMessage::WatchActor(_)
            | HeadMessage::WatchPlacementGroup(_)
            | HeadMessage::KillActor { .. }
            | HeadMessage::TerminateActor { .. }
            | HeadMessage::LeaseReady { .. }
            | HeadMessage::LeaseEnded(_)
            | HeadMessage::DevicesHeld(_)
            | HeadMessage::MemoryShort(_)
            | HeadMessage::StoreUsed(_)
            | HeadMessage::Owners(_)
            | HeadMessage::NodeEnds(_)
            | HeadMessage::Leaves
            | HeadMessage::Holds { .. }
            | HeadMessage::LifeOver { .. } => {}
        }
    }
}

impl Redact for WorkerCommand {
    fn redact(&mut self) {
        match self {
            WorkerCommand::StartActor { spec, .. } => spec.redact(),
            WorkerCommand::Lease { .. }
            | WorkerCommand::Drain
            | WorkerCommand::Exit
            | WorkerCommand::Patience(_)
            | WorkerCommand::Heads(_) => {}
        }
    }
}

impl Redact for HeadEvent {
    fn redact(&mut self) {
        match self {
            HeadEvent::WorkerDied(death) => death.exit.stderr.clear(),
            HeadEvent::Actor { state, .. } => match state {
                ActorState::Restarting { cause, .. } | ActorState::Dead { cause } => cause.redact(),
                ActorState::Starting | ActorState::Alive { .. } => {}
            },
            HeadEvent::PlacementGroup { state, .. } => match state {
                PlacementGroupState::Gone { cause } => cause.redact(),
                PlacementGroupState::Pending | PlacementGroupState::Placed { .. } => {}
            },
            HeadEvent::Refused { error, .. } => error.redact(),
            HeadEvent::Granted { .. }
            | HeadEvent::Starting { .. }
            | HeadEvent::Recall(_)
            | HeadEvent::Nodes(_)
            | HeadEvent::Stops
            | HeadEvent::Standby(_)
            | HeadEvent::NodeDied { .. }
            | HeadEvent::SayAgain { .. }
            | HeadEvent::Deadlock { .. } => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use bytes::{Bytes, BytesMut};
    use wingbeat_core::error::ApplicationError;
    use wingbeat_core::spec::{Address, MachineId, Outputs};
    use wingbeat_core::value::{Refs, StoreNode, Stored};
    use wingbeat_core::{
        ActorId, FunctionId, Incarnation, LeaseId, NodeId, ObjectId, PlacementGroupId, ProcessId, TaskId, codec,
    };

    use super::*;
    use crate::messages::Registration;

    const SECRET: &[u8] = b"xyzzy-7";
    const TASK: TaskId = TaskId { owner: ProcessId(0xabc), seq: 5 };
    const OBJECT: ObjectId = ObjectId { task: TASK, index: 1 };

    fn packed() -> Packed {
        let owner = Address {
            process: ProcessId(0xabc),
            machine: MachineId(1),
            unix: "wingbeat-1".into(),
            tcp: None,
            steward: None,
        };
        let refs = Some(Box::new(Refs { ids: vec![OBJECT], owners: vec![owner] }));
        Packed { bytes: Bytes::from_static(SECRET).into(), refs }
    }

    fn application() -> Box<Error> {
        let error = ApplicationError {
            type_name: "Fault".into(),
            message: "it failed".into(),
            payload: Bytes::from_static(SECRET).into(),
        };
        let cause = Error::Application { task: "job::task".into(), error, attempts: 1 };
        Box::new(Error::ActorDied { actor: ActorId(9), class: "Counter".into(), cause: Box::new(cause) })
    }

    fn at() -> StoreNode {
        let address = Address {
            process: ProcessId(3),
            machine: MachineId(1),
            unix: "wingbeat-3".into(),
            tcp: None,
            steward: None,
        };
        StoreNode { node: NodeId(4), address }
    }

    fn values() -> Vec<ObjectValue> {
        let stored = Stored { size: 1 << 20, nodes: vec![at()], refs: None };
        vec![ObjectValue::Inline(packed()), ObjectValue::Stored(stored), ObjectValue::Failed(application())]
    }

    fn spec() -> Arc<TaskSpec> {
        let stored = Stored { size: 1 << 20, nodes: vec![at()], refs: None };
        Arc::new(TaskSpec {
            id: TASK,
            function: FunctionId(1),
            name: Some("prepare".into()),
            args: vec![Arg::Value(packed()), Arg::Stored(OBJECT, stored), Arg::Ref(OBJECT, at().address)],
            outputs: Outputs::Fixed(1),
            attempt: 0,
            remakes: false,
            yields_memory: false,
            shares_process: false,
            group: Some("io".into()),
            parent: Some(TASK),
        })
    }

    fn results() -> Vec<TaskResult> {
        let outcomes = [
            Outcome::One(ObjectValue::Inline(packed())),
            Outcome::Many(values()),
            Outcome::StreamEnded(3),
            Outcome::Failed(application()),
        ];
        outcomes.map(|outcome| TaskResult { id: TASK, attempt: 0, outcome, ran_nanos: 7 }).into()
    }

    /// One of each kind; whoever adds a kind is sent here by the match below.
    fn messages() -> Vec<PeerMessage> {
        let (lease, actor, incarnation) = (LeaseId(1), ActorId(9), Incarnation(0));
        vec![
            Work::Tasks { lease, first: 0, tasks: vec![spec(), spec()] }.into(),
            Work::Calls { actor, incarnation, calls: vec![spec()] }.into(),
            Work::TakeBack { lease, most: 1, recalled: false }.into(),
            Work::Cancel { task: TASK, force: true }.into(),
            Work::StreamTaken { task: TASK, count: 1 }.into(),
            Work::Received(vec![TASK]).into(),
            Work::ItemReceived(OBJECT).into(),
            Work::MayLeave.into(),
            PeerMessage::Results(results()),
            PeerMessage::GaveBack { lease, tasks: vec![TASK], waiting: false },
            PeerMessage::Ready(lease),
            PeerMessage::CancelObject { object: OBJECT, force: false },
            PeerMessage::StreamItem { task: TASK, index: 1, value: ObjectValue::Inline(packed()) },
            PeerMessage::Subscribe(vec![OBJECT]),
            PeerMessage::Resolved(values().into_iter().map(|value| (OBJECT, value)).collect()),
            PeerMessage::Borrow(vec![(OBJECT, Registration(1))]),
            PeerMessage::Release(vec![(OBJECT, Registration(1))]),
            PeerMessage::Copied { object: OBJECT, at: at() },
            PeerMessage::Lost { object: OBJECT, at: vec![NodeId(4)], why: "nobody answers".into() },
            PeerMessage::Shadows(values().into_iter().map(|value| Shadow::Kept(OBJECT, Some(value))).collect()),
        ]
    }

    fn kind(message: &PeerMessage) -> usize {
        match message {
            PeerMessage::Work(Work::Tasks { .. }) => 0,
            PeerMessage::Work(Work::Calls { .. }) => 1,
            PeerMessage::Work(Work::TakeBack { .. }) => 2,
            PeerMessage::Work(Work::Cancel { .. }) => 3,
            PeerMessage::Work(Work::StreamTaken { .. }) => 4,
            PeerMessage::Work(Work::Received(_)) => 5,
            PeerMessage::Work(Work::ItemReceived(_)) => 6,
            PeerMessage::Work(Work::MayLeave) => 7,
            PeerMessage::Results(_) => 8,
            PeerMessage::GaveBack { .. } => 9,
            PeerMessage::Ready(_) => 10,
            PeerMessage::CancelObject { .. } => 11,
            PeerMessage::StreamItem { .. } => 12,
            PeerMessage::Subscribe(_) => 13,
            PeerMessage::Resolved(_) => 14,
            PeerMessage::Borrow(_) => 15,
            PeerMessage::Release(_) => 16,
            PeerMessage::Copied { .. } => 17,
            PeerMessage::Lost { .. } => 18,
            PeerMessage::Shadows(_) => 19,
        }
    }

    fn encoded(message: &PeerMessage) -> BytesMut {
        let mut bytes = BytesMut::new();
        codec::encode_message(message, &mut bytes).unwrap();
        bytes
    }

    fn holds_secret(message: &PeerMessage) -> bool {
        encoded(message).windows(SECRET.len()).any(|bytes| bytes == SECRET)
    }

    #[test]
    fn no_message_between_processes_keeps_a_value_and_each_keeps_all_else() {
        let messages = messages();
        assert_eq!(messages.iter().map(kind).collect::<Vec<_>>(), (0..=19).collect::<Vec<_>>());
        let with_values: Vec<_> = messages.iter().filter(|message| holds_secret(message)).map(kind).collect();
        assert_eq!(with_values, [0, 1, 8, 12, 14, 19], "the test has something to find");
        for mut message in messages {
            let had = encoded(&message);
            // What an error of a user says goes, too.
            let was = format!("{message:?}").replace("it failed", "");
            message.redact();
            assert!(!holds_secret(&message), "{was}");
            assert_eq!(format!("{message:?}"), was, "ids, names and sizes stay");
            let again: PeerMessage = codec::decode_message(encoded(&message).freeze()).unwrap();
            assert_eq!(format!("{again:?}"), was);
            assert!(with_values.contains(&kind(&message)) || encoded(&message) == had);
        }
    }

    #[test]
    fn what_others_still_use_is_not_changed() {
        let shared = spec();
        let mut message = PeerMessage::from(Work::Tasks { lease: LeaseId(1), first: 0, tasks: vec![shared.clone()] });
        message.redact();
        assert!(matches!(&shared.args[0], Arg::Value(packed) if &*packed.bytes == SECRET));
    }

    #[test]
    fn the_end_of_a_group_keeps_no_value_either() {
        let state = PlacementGroupState::Gone { cause: application() };
        let mut event = HeadEvent::PlacementGroup { group: PlacementGroupId(1), state };
        event.redact();
        let mut bytes = BytesMut::new();
        codec::encode_message(&event, &mut bytes).unwrap();
        assert!(!bytes.windows(SECRET.len()).any(|bytes| bytes == SECRET));
    }
}
