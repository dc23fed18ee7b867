//! Handles of actors.

use std::sync::Arc;

use serde::de::Error as _;
use serde::ser::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use wingbeat_core::error::Error;
use wingbeat_core::{ActorId, FunctionId, ObjectId};

use crate::owner::object::Handle;
use crate::session::registry::Class;
use crate::session::session::Session;
use crate::session::values::{decoding_owner, note};

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
    max_task_retries: u32,
}

impl ActorHandle {
    pub(crate) fn new(handle: Handle, id: ActorId, class: FunctionId, class_name: Arc<str>, detached: bool) -> Self {
        ActorHandle { handle, id, class, class_name, detached, max_pending_calls: None, max_task_retries: 0 }
    }

    /// With so many calls of each process that may be pending.
    pub(crate) fn with_limit(self, max_pending_calls: Option<u32>) -> Self {
        ActorHandle { max_pending_calls, ..self }
    }

    /// How many calls of this process may be pending.
    pub(crate) fn max_pending_calls(&self) -> Option<u32> {
        self.max_pending_calls
    }

    /// With so many attempts after the first that restarts may cost a call.
    pub(crate) fn with_retries(self, max_task_retries: u32) -> Self {
        ActorHandle { max_task_retries, ..self }
    }

    /// Attempts after the first that restarts may cost a call that says nothing itself.
    pub(crate) fn max_task_retries(&self) -> u32 {
        self.max_task_retries
    }

    /// A handle of an actor that could not even be asked for.
    pub fn failed(class: &'static Class, error: Error) -> Self {
        Self::new(Handle::failed(error), ActorId::random(), class.id(), class.path.into(), false)
    }

    /// Why it could not be asked for.
    pub fn failure(&self) -> Error {
        self.handle.failure().unwrap_or(Error::NoSession)
    }

    /// The actor's id.
    pub fn id(&self) -> ActorId {
        self.id
    }

    /// The session that it belongs to; none for an actor that could not even be asked for.
    pub fn session(&self) -> Option<Session> {
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

#[derive(Serialize, Deserialize)]
struct WireActor {
    id: ActorId,
    class: FunctionId,
    class_name: String,
    handle: ObjectId,
    detached: bool,
    max_pending_calls: Option<u32>,
    max_task_retries: u32,
}

/// Writes an actor handle.
///
/// # Errors
/// As [`serialize_handle`](crate::values::serialize_handle).
pub fn serialize_actor<S: Serializer>(actor: &ActorHandle, serializer: S) -> Result<S::Ok, S::Error> {
    note(actor.handle()).map_err(S::Error::custom)?;
    let wire = WireActor {
        id: actor.id(),
        class: actor.class(),
        class_name: actor.class_name().to_owned(),
        handle: actor.handle().id(),
        detached: actor.is_detached(),
        max_pending_calls: actor.max_pending_calls(),
        max_task_retries: actor.max_task_retries(),
    };
    wire.serialize(serializer)
}

/// Reads an actor handle of the class `class`.
///
/// # Errors
/// As [`deserialize_handle`](crate::values::deserialize_handle); or the actor is of another class.
pub fn deserialize_actor<'de, D: Deserializer<'de>>(
    deserializer: D,
    class: &'static Class,
) -> Result<ActorHandle, D::Error> {
    let wire = WireActor::deserialize(deserializer)?;
    if wire.class != class.id() {
        return Err(D::Error::custom(format!("this is a handle of {}, not of {}", wire.class_name, class.path)));
    }
    let owner = decoding_owner().map_err(D::Error::custom)?;
    let handle = owner.borrow(wire.handle);
    owner.know_actor(&handle, wire.id);
    Ok(ActorHandle::new(handle, wire.id, wire.class, wire.class_name.into(), wire.detached)
        .with_limit(wire.max_pending_calls)
        .with_retries(wire.max_task_retries))
}
