//! How large messages are, roughly, so that batches can be cut by bytes before they are encoded.

use std::mem::size_of;

use wingbeat_core::codec::Payload;
use wingbeat_core::error::Error;
use wingbeat_core::spec::*;
use wingbeat_core::value::{ObjectValue, Packed, Refs, Stored};

use super::{
    HeadEvent, HeadMessage, LeaseHolder, LogLine, NodeMessage, PeerMessage, Shadow, Wait, Work, WorkerCommand,
};

/// What a message costs beside what can grow in it.
const FIXED: usize = 128;

/// A task, call or result that weighs more is refused where it is made: half of what a frame can hold, so that nothing that
/// was accepted can fail on its way.
pub const MESSAGE_LIMIT: usize = 128 << 20;

/// Implemented for what links carry, and for tasks; used by links and by those who decide how much is in flight.
pub trait Weight {
    /// About how many bytes it has when it is encoded. What users can make large is counted exactly.
    fn weight(&self) -> usize;
}

fn address(of: &Address) -> usize {
    size_of::<Address>() + of.unix.len() + of.steward.as_ref().map_or(0, |steward| address(steward))
}

fn refs(refs: Option<&Refs>) -> usize {
    refs.map_or(0, |refs| refs.ids.len() * 20 + refs.owners.iter().map(address).sum::<usize>())
}

fn packed(packed: &Packed) -> usize {
    packed.bytes.len() + refs(packed.refs.as_deref())
}

fn stored(stored: &Stored) -> usize {
    let nodes: usize = stored.nodes.iter().map(|holder| 16 + address(&holder.address)).sum();
    nodes + refs(stored.refs.as_deref())
}

fn error(error: &Error) -> usize {
    FIXED
        + match error {
            Error::Application { task, error, .. } => task.len() + error.message.len() + error.payload.len(),
            Error::Panicked { task, message, backtrace, .. } => task.len() + message.len() + backtrace.len(),
            Error::WorkerCrashed { exit, .. } => exit.stderr.iter().map(String::len).sum(),
            Error::OutOfMemory { shortage, .. } => 2 * FIXED + shortage.largest.len() * FIXED,
            Error::ActorUnavailable { cause, .. } | Error::ActorDied { cause, .. } => self::error(cause),
            Error::Deadlock { cycle } => cycle.iter().map(String::len).sum(),
            _ => 2 * FIXED,
        }
}

fn shape(shape: &Shape) -> usize {
    // Labels and names of resources are what users write; they have few forms, and each says how long it is.
    FIXED + shape.to_string().len()
}

impl Weight for ObjectValue {
    fn weight(&self) -> usize {
        match self {
            ObjectValue::Inline(value) => packed(value),
            ObjectValue::Stored(value) => stored(value),
            ObjectValue::Failed(why) => error(why),
        }
    }
}

impl Weight for Arg {
    fn weight(&self) -> usize {
        match self {
            Arg::Value(value) => 16 + packed(value),
            Arg::Stored(_, value) => 32 + stored(value),
            Arg::Ref(_, owner) => 32 + address(owner),
        }
    }
}

impl Weight for TaskSpec {
    fn weight(&self) -> usize {
        let text = |text: &Option<Box<str>>| text.as_ref().map_or(0, |text| text.len());
        FIXED + text(&self.name) + text(&self.group) + self.args.iter().map(Weight::weight).sum::<usize>()
    }
}

impl Weight for TaskResult {
    fn weight(&self) -> usize {
        FIXED
            + match &self.outcome {
                Outcome::One(value) => value.weight(),
                Outcome::Many(values) => values.iter().map(|value| 8 + value.weight()).sum(),
                Outcome::StreamEnded(_) => 0,
                Outcome::Failed(why) => error(why),
            }
    }
}

impl Weight for Shadow {
    fn weight(&self) -> usize {
        24 + match self {
            Shadow::Kept(_, value) => value.as_ref().map_or(0, Weight::weight),
            Shadow::Freed(_) | Shadow::Again | Shadow::AllSaid | Shadow::Leaves => 0,
        }
    }
}

impl Weight for PeerMessage {
    fn weight(&self) -> usize {
        FIXED
            + match self {
                PeerMessage::Work(Work::Tasks { tasks: specs, .. } | Work::Calls { calls: specs, .. }) => {
                    specs.iter().map(|spec| spec.weight()).sum()
                }
                PeerMessage::Results(results) => results.iter().map(Weight::weight).sum(),
                PeerMessage::StreamItem { value, .. } => value.weight(),
                PeerMessage::Resolved(values) => values.iter().map(|(_, value)| 24 + value.weight()).sum(),
                PeerMessage::GaveBack { tasks, .. } | PeerMessage::Work(Work::Received(tasks)) => tasks.len() * 16,
                PeerMessage::Subscribe(ids) => ids.len() * 20,
                PeerMessage::Borrow(registrations) | PeerMessage::Release(registrations) => registrations.len() * 28,
                PeerMessage::Copied { at, .. } => address(&at.address),
                PeerMessage::Lost { at, why, .. } => at.len() * 8 + why.len(),
                PeerMessage::Shadows(shadows) => shadows.iter().map(Weight::weight).sum(),
                PeerMessage::Work(
                    Work::TakeBack { .. }
                    | Work::Cancel { .. }
                    | Work::StreamTaken { .. }
                    | Work::ItemReceived(_)
                    | Work::MayLeave,
                )
                | PeerMessage::Ready(_)
                | PeerMessage::CancelObject { .. } => 0,
            }
    }
}

impl Weight for ActorSpec {
    fn weight(&self) -> usize {
        let groups: usize = self.groups.keys().map(|name| 16 + name.len()).sum();
        let name = self.name.as_ref().map_or(0, |name| name.namespace.len() + name.name.len());
        let args: usize = self.args.iter().map(Weight::weight).sum();
        2 * FIXED + self.class_name.len() + shape(&self.placement) + groups + name + args
    }
}

impl Weight for Wait {
    fn weight(&self) -> usize {
        let tasks = self.awaits.iter().flat_map(|one| &one.on);
        let tasks: usize = tasks.map(|on| 32 + on.after.len() * 32).sum();
        FIXED + self.name.len() + self.awaits.len() * 16 + tasks
    }
}

impl Weight for HeadMessage {
    fn weight(&self) -> usize {
        FIXED
            + match self {
                HeadMessage::Demand { shape: asked, name, .. } => shape(asked) + name.len(),
                HeadMessage::Waiting { wait, .. } => wait.weight(),
                HeadMessage::SaidAgain { wait, .. } => wait.as_ref().map_or(0, Weight::weight),
                HeadMessage::LeaseFailed { error: why, .. } | HeadMessage::ActorStarted { outcome: Err(why), .. } => {
                    error(why)
                }
                HeadMessage::Owners(owners) => owners.values().map(|owners| 16 + owners.len() * 8).sum(),
                HeadMessage::MemoryShort(usage) => usage.as_ref().map_or(0, |usage| FIXED + usage.of.len()),
                HeadMessage::DevicesHeld(held) => held.iter().map(|(_, who)| 16 + who.len()).sum(),
                HeadMessage::WorkerDied(death) => death.exit.stderr.iter().map(String::len).sum(),
                HeadMessage::Holds { leases, actors, .. } => (leases.len() + actors.len()) * 8,
                HeadMessage::Made { spec, .. } => spec.weight(),
                _ => FIXED,
            }
    }
}

impl Weight for HeadEvent {
    fn weight(&self) -> usize {
        FIXED
            + match self {
                HeadEvent::Granted { shape: asked, worker, node, .. } => {
                    shape(asked) + address(worker) + address(&node.address)
                }
                HeadEvent::Starting { shape: asked, .. } => shape(asked),
                HeadEvent::Refused { shape: asked, error: why } => shape(asked) + error(why),
                HeadEvent::WorkerDied(death) => death.exit.stderr.iter().map(String::len).sum(),
                HeadEvent::Actor {
                    state: ActorState::Restarting { cause, .. } | ActorState::Dead { cause }, ..
                } => error(cause),
                HeadEvent::SayAgain { tasks, .. } => tasks.len() * 16,
                HeadEvent::Deadlock { cycle, .. } => cycle.iter().map(String::len).sum(),
                HeadEvent::PlacementGroup { .. } => 8 * FIXED,
                HeadEvent::Standby(Some(standby)) => address(standby),
                _ => FIXED,
            }
    }
}

impl Weight for NodeMessage {
    fn weight(&self) -> usize {
        FIXED
            + match self {
                NodeMessage::BeginJob(job) => {
                    job.env.iter().map(|(name, value)| 16 + name.len() + value.len()).sum::<usize>()
                        + job.working_dir.len()
                        + job.executable.path.len()
                }
                NodeMessage::StartLease(start) => match &start.holder {
                    LeaseHolder::Tasks(_, asked) => FIXED + shape(asked),
                    LeaseHolder::Actor(spec, ..) => FIXED + spec.weight(),
                },
                NodeMessage::Unpin(ids) | NodeMessage::Delete(ids) => ids.len() * 20,
                NodeMessage::OwnersGone { owners, .. } => owners.len() * 8,
                NodeMessage::Keep(keep) => {
                    let size = |fact: &Option<Payload>| fact.as_ref().map_or(0, |fact| fact.len());
                    keep.changes.iter().map(|(key, fact)| 16 + key.len() + size(fact)).sum()
                }
                NodeMessage::ActorStarted { outcome: Err(why), .. } => error(why),
                _ => FIXED,
            }
    }
}

impl Weight for WorkerCommand {
    fn weight(&self) -> usize {
        match self {
            WorkerCommand::Lease { resources, .. } => 2 * FIXED + resources.to_string().len(),
            WorkerCommand::StartActor { spec, resources, .. } => FIXED + spec.weight() + resources.to_string().len(),
            WorkerCommand::Heads(heads) => FIXED + heads.iter().map(address).sum::<usize>(),
            _ => 2 * FIXED,
        }
    }
}

impl Weight for LogLine {
    fn weight(&self) -> usize {
        FIXED + self.source.len() + self.node.len() + self.text.len()
    }
}

#[cfg(test)]
mod tests {
    use bytes::{Bytes, BytesMut};
    use wingbeat_core::codec;
    use wingbeat_core::{ActorId, FunctionId, Incarnation, LeaseId, ObjectId, ProcessId, TaskId};

    use super::*;
    use crate::messages::Registration;

    fn spec(args: usize, bytes: usize) -> std::sync::Arc<TaskSpec> {
        let value = || Arg::Value(Packed::plain(Bytes::from(vec![1; bytes])));
        std::sync::Arc::new(TaskSpec {
            id: TaskId { owner: ProcessId(1), seq: 1 },
            function: FunctionId(1),
            name: None,
            args: (0..args).map(|_| value()).collect(),
            outputs: Outputs::Fixed(1),
            attempt: 0,
            remakes: false,
            yields_memory: false,
            shares_process: false,
            group: None,
            parent: None,
        })
    }

    fn messages() -> Vec<PeerMessage> {
        let id = ObjectId { task: TaskId { owner: ProcessId(1), seq: 1 }, index: 0 };
        let owner = Address {
            process: ProcessId(1),
            machine: MachineId(1),
            unix: "wingbeat-0123456789abcdef".into(),
            tcp: None,
            steward: None,
        };
        let refs = Box::new(Refs { ids: vec![id; 10_000], owners: vec![owner] });
        let with_refs = ObjectValue::Inline(Packed { bytes: Bytes::new().into(), refs: Some(refs) });
        vec![
            Work::Tasks { lease: LeaseId(1), first: 0, tasks: vec![spec(3, 90_000); 100] }.into(),
            Work::Tasks { lease: LeaseId(1), first: 0, tasks: vec![spec(0, 0); 1000] }.into(),
            Work::Calls { actor: ActorId(1), incarnation: Incarnation(0), calls: vec![spec(1, 1000); 1000] }.into(),
            PeerMessage::Resolved(vec![(id, with_refs)]),
            PeerMessage::Release(vec![(id, Registration(u64::MAX)); 4096]),
            PeerMessage::Ready(LeaseId(1)),
        ]
    }

    #[test]
    fn a_weight_is_never_much_less_than_the_encoded_message() {
        for message in messages() {
            let mut encoded = BytesMut::new();
            codec::encode_message(&message, &mut encoded).unwrap();
            let weight = message.weight();
            assert!(weight * 5 / 4 >= encoded.len(), "{weight} for {} bytes", encoded.len());
            assert!(weight <= 4 * encoded.len() + 1024, "{weight} for {} bytes", encoded.len());
        }
    }
}
