//! What a process hears and says, as it is recorded and shown. Users' threads enter a process at any time, so this is no
//! input from which the same would follow again: it is shown, and not checked.

use std::time::Instant;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use wingbeat_core::error::Error;
use wingbeat_core::spec::{ActorSpec, PlacementGroupSpec};
use wingbeat_core::{ClusterId, JobId, NodeId, ObjectId, PlacementGroupId, ProcessId};
use wingbeat_net::messages::{HeadEvent, HeadMessage, NodeMessage, PeerMessage, WorkerCommand};
use wingbeat_net::recording::{Machine, Recorder, Recording, Redact};

/// Whose recording it is.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Beginning {
    /// The process.
    pub process: ProcessId,
    /// Whether it is a driver; else it is a worker process.
    pub is_driver: bool,
    /// Its job.
    pub job: JobId,
    /// Its cluster.
    pub cluster: ClusterId,
}

/// What a process heard, said, or noticed of its connections.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Event {
    /// A process said this, in one batch.
    FromProcess(ProcessId, Vec<PeerMessage>),
    /// This is queued for a process.
    ToProcess(ProcessId, PeerMessage),
    /// The last message to this process was dropped: it is gone, or nobody knows where it is.
    Unsent(ProcessId),
    /// The head said this, in one batch.
    FromHead(Vec<HeadEvent>),
    /// This is queued for the head.
    ToHead(HeadMessage),
    /// The head is asked to make an actor, or for the one of its name.
    CreateActor(Box<ActorSpec>),
    /// The head is asked to make a placement group.
    CreateGroup(Box<PlacementGroupSpec>),
    /// The head is asked to remove a placement group.
    RemoveGroup(PlacementGroupId),
    /// The node of this process gave these orders, in one batch.
    FromNode(Vec<WorkerCommand>),
    /// This is queued for a node.
    ToNode(NodeId, NodeMessage),
    /// A value of so many bytes was written into the node's store.
    Stored(ObjectId, u64),
    /// A value of so many bytes is read from the node's store.
    Fetched(ObjectId, u64),
    /// There is a connection with a process, in the contact of this number.
    Connected(ProcessId, u64),
    /// A connection with a process has ended. The contact goes on.
    Disconnected(ProcessId),
    /// The contact of this number with a process was lost.
    ContactLost(ProcessId, u64),
    /// There is a connection with the head.
    HeadConnected,
    /// The connection with the head has ended.
    HeadDisconnected,
    /// There is a new head, which is told what this process has.
    HeadRestarted,
    /// The process uses the store of this node from now on.
    NodeAttached(NodeId),
    /// The session is over, for this reason.
    Ended(Error),
}

impl Redact for Beginning {
    fn redact(&mut self) {}
}

impl Redact for Event {
    fn redact(&mut self) {
        match self {
            Event::FromProcess(_, messages) => messages.redact(),
            Event::ToProcess(_, message) => message.redact(),
            Event::FromHead(events) => events.redact(),
            Event::ToHead(message) => message.redact(),
            Event::CreateActor(spec) => spec.redact(),
            Event::FromNode(commands) => commands.redact(),
            Event::ToNode(_, message) => message.redact(),
            Event::Ended(error) => error.redact(),
            Event::Unsent(_)
            | Event::CreateGroup(_)
            | Event::RemoveGroup(_)
            | Event::Stored(..)
            | Event::Fetched(..)
            | Event::Connected(..)
            | Event::Disconnected(_)
            | Event::ContactLost(..)
            | Event::HeadConnected
            | Event::HeadDisconnected
            | Event::HeadRestarted
            | Event::NodeAttached(_) => {}
        }
    }
}

/// The recording of a process, until its end.
pub(crate) struct Recorded {
    recording: Mutex<Option<Recording<Event, ()>>>,
    begun: Instant,
}

impl Recorded {
    /// Begins a recording, if the environment asks for one. What keeps it from being written is no reason not to go on.
    pub(crate) fn begin(with: Beginning) -> Option<Recorded> {
        let kind = if with.is_driver { "driver" } else { "worker" };
        let name = format!("{kind}-{}", with.process);
        match Recording::begin_if_asked(Machine::Process, &name, with) {
            Ok(recording) => Some(Recorded { recording: Mutex::new(Some(recording?)), begun: Instant::now() }),
            Err(error) => {
                // Few programs show what is traced.
                eprintln!("wingbeat: {error}");
                None
            }
        }
    }

    /// Writes down what happened.
    pub(crate) fn record(&self, event: Event) {
        if let Some(recording) = &mut *self.recording.lock() {
            recording.record(self.begun.elapsed().as_millis() as u64, event, &[]);
        }
    }

    /// Writes what is left, and nothing more. Waits for a slow disk, for two seconds at most.
    pub(crate) fn end(&self) {
        let recording = self.recording.lock().take();
        drop(recording);
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use proptest::prelude::*;
    use wingbeat_core::codec::decode_message;

    proptest! {
        #[test]
        fn whatever_lies_in_a_recording_is_a_step_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
            let bytes = Bytes::from(bytes);
            let _ = decode_message::<wingbeat_head::state::Beginning>(bytes.clone());
            let _ = decode_message::<wingbeat_head::state::Input>(bytes.clone());
            let _ = decode_message::<wingbeat_node::Config>(bytes.clone());
            let _ = decode_message::<wingbeat_node::Event>(bytes.clone());
            let _ = decode_message::<super::Beginning>(bytes.clone());
            let _ = decode_message::<super::Event>(bytes);
        }
    }
}
