//! Handles of actors.

use std::sync::Arc;

use wingbeat_core::error::Error;
use wingbeat_core::value::ObjectValue;
use wingbeat_core::{ActorId, FunctionId};

use crate::object::Handle;
use crate::registry::Class;
use crate::session::Session;

/// A handle of an actor. Handles are counted like refs of an object (the one in `handle`): when its owner
/// sees that nobody holds one any more, the actor ends.
#[derive(Clone, Debug)]
pub struct ActorHandle {
    handle: Handle,
    id: ActorId,
    class: FunctionId,
    class_name: Arc<str>,
    detached: bool,
    max_pending_calls: Option<u32>,
}

impl ActorHandle {
    pub(crate) fn new(handle: Handle, id: ActorId, class: FunctionId, class_name: Arc<str>, detached: bool) -> Self {
        ActorHandle { handle, id, class, class_name, detached, max_pending_calls: None }
    }

    /// With so many calls of each process that may be pending.
    pub(crate) fn with_limit(self, max_pending_calls: Option<u32>) -> Self {
        ActorHandle { max_pending_calls, ..self }
    }

    /// How many calls of this process may be pending.
    pub(crate) fn max_pending_calls(&self) -> Option<u32> {
        self.max_pending_calls
    }

    /// A handle of an actor that could not even be asked for.
    pub fn failed(class: &'static Class, error: Error) -> Self {
        Self::new(Handle::failed(error), ActorId::random(), class.id(), class.path.into(), false)
    }

    /// Why it could not be asked for.
    pub fn failure(&self) -> Error {
        match self.handle.object().value() {
            Some(ObjectValue::Failed(error)) => *error,
            _ => Error::NoSession,
        }
    }

    /// The actor's id.
    pub fn id(&self) -> ActorId {
        self.id
    }

    /// The session that it belongs to; none for an actor that could not even be asked for.
    pub fn session(&self) -> Option<&Session> {
        self.handle.session()
    }

    /// The class's name.
    pub fn class_name(&self) -> &str {
        &self.class_name
    }

    pub(crate) fn class_name_arc(&self) -> &Arc<str> {
        &self.class_name
    }

    pub(crate) fn class(&self) -> FunctionId {
        self.class
    }

    pub(crate) fn handle(&self) -> &Handle {
        &self.handle
    }

    pub(crate) fn is_detached(&self) -> bool {
        self.detached
    }
}
