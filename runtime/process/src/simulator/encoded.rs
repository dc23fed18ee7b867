//! What becomes of a message on its way: it is encoded as real links do it, and what its receiver hears is what was decoded. So a field
//! that does not travel, or that comes back as something else, is one that the simulated cluster lacks, too.
//!
//! In every second seed ([`Config::encodes`](super::Config)): in all of them it would cost a sixth of the time.

use bytes::BytesMut;
use serde::Serialize;
use serde::de::DeserializeOwned;
use wingbeat_core::codec::{decode_message, encode_message};
use wingbeat_head::state::Event;
use wingbeat_net::messages::{HeadEvent, NodeMessage, WorkerCommand};
use wingbeat_net::services::{HeadRequest, NodeRequest, ProcessRequest};
use wingbeat_node as node;

use super::execution::Asked;
use super::side::Parcel;

/// What is left of a message when it has been bytes.
pub(super) fn through<T: Serialize + DeserializeOwned>(message: &T) -> T {
    let mut frame = BytesMut::with_capacity(1_024);
    encode_message(message, &mut frame).expect("it can be encoded");
    decode_message(frame.freeze()).expect("what was encoded can be decoded")
}

/// One request of a link that carries batches.
macro_rules! carried {
    ($request:ident::$variant:ident { $messages:ident $(, $number:ident: $value:expr)* }) => {
        match through(&$request::$variant { $messages $(, $number: $value)* }) {
            $request::$variant { $messages, .. } => $messages,
            other => panic!("it comes as another request: {other:?}"),
        }
    };
}

/// A batch as its receiver has it.
pub(super) fn parcel(parcel: &mut Parcel) {
    let Parcel { contact, batch, .. } = parcel;
    let messages = std::mem::take(&mut batch.messages);
    batch.messages = carried!(ProcessRequest::Deliver { messages, contact: *contact, number: batch.number });
}

/// What the head says to a process.
pub(super) fn event(event: HeadEvent) -> HeadEvent {
    let events = vec![event];
    carried!(ProcessRequest::HeadEvents { events, number: 0 }).pop().expect("it was one")
}

/// What the head says to a node.
pub(super) fn order(message: NodeMessage) -> NodeMessage {
    let messages = vec![message];
    carried!(NodeRequest::Orders { messages, number: 0 }).pop().expect("it was one")
}

/// What a node says to a worker process.
pub(super) fn command(command: WorkerCommand) -> WorkerCommand {
    let commands = vec![command];
    carried!(ProcessRequest::Commands { commands }).pop().expect("it was one")
}

/// What a node hears of its processes.
pub(super) fn of_process(event: node::Event) -> node::Event {
    match event {
        node::Event::Says(by, message) => {
            let messages: Vec<NodeMessage> = vec![message];
            let message = carried!(NodeRequest::Deliver { messages }).pop();
            node::Event::Says(by, message.expect("it was one"))
        }
        other => other,
    }
}

/// What the head hears.
pub(super) fn heard(event: Event) -> Event {
    match event {
        Event::Says(by, message) => {
            let messages = vec![message];
            let message = carried!(HeadRequest::Deliver { messages, number: 0 }).pop();
            Event::Says(by, message.expect("it was one"))
        }
        Event::NodeJoined(node, running) => match through(&HeadRequest::JoinNode { node: *node, running }) {
            HeadRequest::JoinNode { node, running } => Event::NodeJoined(Box::new(node), running),
            other => panic!("it comes as another request: {other:?}"),
        },
        Event::JobJoined(job) => match through(&HeadRequest::JoinJob { job: *job }) {
            HeadRequest::JoinJob { job } => Event::JobJoined(Box::new(job)),
            other => panic!("it comes as another request: {other:?}"),
        },
        other => other,
    }
}

/// What the head is asked.
pub(super) fn asked(asked: &Asked) -> Asked {
    match asked {
        Asked::Create(spec) => Asked::Create(Box::new(through(&**spec))),
        Asked::Find(name, asks) => Asked::Find(through(name), through(asks)),
        Asked::Reserve(spec) => Asked::Reserve(Box::new(through(&**spec))),
        Asked::GiveBack(group) => Asked::GiveBack(through(group)),
    }
}
