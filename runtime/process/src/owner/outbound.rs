//! Arguments on their way to a task or an actor.

use bytes::Bytes;

use crate::owner::object::{Handle, Held};

/// An argument of a call that is being made.
pub enum Outbound {
    /// A value: its encoded form, and handles of the refs inside it.
    Value(PackedValue),
    /// The value of an object, resolved before the call.
    Object(Handle),
}

/// A value that is ready to be sent.
#[derive(Default)]
pub struct PackedValue {
    pub(crate) content: Content,
    /// Handles of the refs inside.
    pub(crate) held: Vec<Handle>,
}

/// Where the encoded bytes of a [`PackedValue`] are.
pub(crate) enum Content {
    Inline(Bytes),
    /// Large values become objects of their own, in shared memory.
    Stored(Handle),
}

impl Default for Content {
    fn default() -> Self {
        Content::Inline(Bytes::new())
    }
}

/// The handles that must live until the call is done.
pub(crate) fn holds(args: &[Outbound]) -> Held {
    let mut held = Held::new();
    for arg in args {
        match arg {
            Outbound::Value(packed) => {
                held.extend(packed.held.iter().cloned());
                if let Content::Stored(handle) = &packed.content {
                    held.push(handle.clone());
                }
            }
            Outbound::Object(handle) => held.push(handle.clone()),
        }
    }
    held
}
