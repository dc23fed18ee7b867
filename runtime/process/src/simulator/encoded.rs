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
use super::nodes::Machine;
use super::side::Parcel;
use super::world::Happening;

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

/// As it is when its receiver has it.
pub(super) fn received(what: Happening) -> Happening {
    match what {
        Happening::Deliver { from, to, mut parcel } => {
            let Parcel { contact, batch, .. } = &mut *parcel;
            let messages = std::mem::take(&mut batch.messages);
            batch.messages = carried!(ProcessRequest::Deliver { messages, contact: *contact, number: batch.number });
            Happening::Deliver { from, to, parcel }
        }
        Happening::ToProcess(to, event) => {
            let events: Vec<HeadEvent> = vec![*event];
            let event = carried!(ProcessRequest::HeadEvents { events, number: 0 }).pop();
            Happening::ToProcess(to, Box::new(event.expect("it was one")))
        }
        Happening::ToNode(to, message) => {
            let messages: Vec<NodeMessage> = vec![*message];
            let message = carried!(NodeRequest::Orders { messages, number: 0 }).pop();
            Happening::ToNode(to, Box::new(message.expect("it was one")))
        }
        Happening::Machine(at, Machine::Reads(to, command, then)) => {
            let commands: Vec<WorkerCommand> = vec![*command];
            let command = carried!(ProcessRequest::Commands { commands }).pop();
            Happening::Machine(at, Machine::Reads(to, Box::new(command.expect("it was one")), then))
        }
        Happening::Machine(at, Machine::Node(event)) => {
            let event = match *event {
                node::Event::Says(by, message) => {
                    let messages: Vec<NodeMessage> = vec![message];
                    let message = carried!(NodeRequest::Deliver { messages }).pop();
                    node::Event::Says(by, message.expect("it was one"))
                }
                other => other,
            };
            Happening::Machine(at, Machine::Node(Box::new(event)))
        }
        Happening::Told(question, answer) => Happening::Told(question, through(&answer)),
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
        Asked::Find(name) => Asked::Find(through(name)),
        Asked::Reserve(spec) => Asked::Reserve(Box::new(through(&**spec))),
        Asked::GiveBack(group) => Asked::GiveBack(through(group)),
    }
}
