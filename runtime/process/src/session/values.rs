//! Values on their way into the cluster: inline, or in shared memory.

use serde::Serialize;
use wingbeat_core::ObjectId;
use wingbeat_core::codec::Encoded;
use wingbeat_core::error::Error;
use wingbeat_core::value::{INLINE_LIMIT, ObjectValue, Packed};

use crate::owner::object::Handle;
use crate::owner::outbound::{Content, PackedValue};
use crate::session::outgoing::Outgoing;
use crate::session::refs::{PackError, capture};
use crate::session::session::Session;
use crate::wire::process::Process;

/// Encodes `value`; a large one goes straight into shared memory.
pub(crate) fn pack<T: Serialize + Send + 'static>(process: &Process, value: &T) -> Result<PackedValue, PackError> {
    let (encoded, held) = capture(&process.owner, || value.encode())?;
    if encoded.len() <= INLINE_LIMIT {
        return Ok(PackedValue { content: Content::Inline(encoded.into_bytes()), held });
    }
    let handle = put_encoded(process, &encoded, held).map_err(PackError::Other)?;
    Ok(PackedValue { content: Content::Stored(handle), held: Vec::new() })
}

/// The encoded output of a task: inline, or in shared memory as the object `id`.
pub(crate) fn pack_output(
    process: &Process,
    id: ObjectId,
    value: &dyn Outgoing,
    replaces: bool,
) -> Result<(ObjectValue, Vec<Handle>), PackError> {
    let (encoded, held) = capture(&process.owner, || value.encode())?;
    let refs = process.owner.describe(&held);
    if encoded.len() <= INLINE_LIMIT {
        let bytes = encoded.into_bytes().into();
        return Ok((ObjectValue::Inline(Packed { bytes, refs }), held));
    }
    let mut stored = process.store(id, &encoded, replaces).map_err(PackError::Other)?;
    stored.refs = refs;
    Ok((ObjectValue::Stored(stored), held))
}

/// Stores an encoded value as a new object of ours.
fn put_encoded(process: &Process, encoded: &Encoded<'_>, held: Vec<Handle>) -> Result<Handle, Error> {
    let owner = &process.owner;
    let id = owner.next_task().output(0);
    let mut stored = process.store(id, encoded, false)?;
    stored.refs = owner.describe(&held);
    let handle = owner.new_object(id, None);
    owner.resolve_object(handle.object(), ObjectValue::Stored(stored), held);
    Ok(handle)
}

impl Session {
    /// Puts a value into the cluster; this process owns it.
    ///
    /// # Errors
    /// [`Error::Encode`], [`Error::ForeignRef`], or what the store answers.
    pub fn put<T: serde::Serialize + Send + 'static>(&self, value: &T) -> Result<Handle, Error> {
        if let Some(error) = self.owner().ended() {
            return Err(error.clone());
        }
        let packed = pack(self.process(), value).map_err(|error| match error {
            PackError::Codec(error) => {
                Error::Encode { what: format!("a value of type {}", std::any::type_name::<T>()), why: error.0 }
            }
            PackError::Other(error) => error,
        })?;
        match packed.content {
            Content::Stored(handle) => Ok(handle),
            Content::Inline(bytes) => {
                let owner = self.owner();
                let handle = owner.new_object(owner.next_task().output(0), None);
                let value = Packed { bytes: bytes.into(), refs: owner.describe(&packed.held) };
                owner.resolve_object(handle.object(), ObjectValue::Inline(value), packed.held);
                Ok(handle)
            }
        }
    }
}
