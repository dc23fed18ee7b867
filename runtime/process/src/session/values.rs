//! Values on their way into the cluster, inline or in shared memory, and out of it, and the refs inside them.
//!
//! Whoever sends a ref holds a handle until the receiver is registered with the owner (or holds it by
//! other means: it *is* the owner, or it holds the object that contains the ref). While a value is being
//! encoded, a thread-local list collects handles of the refs in it; while one is being decoded, a
//! thread-local session says to whom they belong. Outside of both, refs refuse to be written or read.

use std::cell::RefCell;
use std::sync::Arc;
use std::thread::LocalKey;

use bytes::Bytes;
use serde::de::{DeserializeOwned, Error as _};
use serde::ser::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use wingbeat_core::codec::{self, CodecError, Encoded};
use wingbeat_core::error::Error;
use wingbeat_core::value::{INLINE_LIMIT, ObjectValue, Packed};
use wingbeat_core::{ClusterId, ObjectId};

use crate::owner::Owner;
use crate::owner::object::Handle;
use crate::owner::outbound::{Content, PackedValue};
use crate::session::outgoing::Outgoing;
use crate::session::session::Session;
use crate::wire::process::Process;
use crate::wire::view::Bits;

thread_local! {
    static ENCODING: RefCell<Option<Encoding>> = const { RefCell::new(None) };
    static DECODING: RefCell<Option<Arc<Owner>>> = const { RefCell::new(None) };
}

/// What a thread was doing before; it does so again when this is dropped, also if a user's type has panicked.
struct Outer<T: 'static> {
    place: &'static LocalKey<RefCell<Option<T>>>,
    before: Option<T>,
}

impl<T> Outer<T> {
    fn enter(place: &'static LocalKey<RefCell<Option<T>>>, now: T) -> Self {
        Outer { place, before: place.replace(Some(now)) }
    }
}

impl<T> Drop for Outer<T> {
    fn drop(&mut self) {
        let ended = self.place.replace(self.before.take());
        drop(ended);
    }
}

struct Encoding {
    /// Whose refs may be in it.
    cluster: ClusterId,
    found: Vec<Handle>,
    /// A ref of another cluster; the error that it is. In a box: this struct is moved with each value, and errors are large.
    foreign: Option<Box<Error>>,
}

/// Why a value could not be made ready for sending.
#[derive(Debug)]
pub enum PackError {
    /// The type's serde implementation.
    Codec(CodecError),
    /// A foreign ref, or the store.
    Other(Error),
}

/// Runs `encode` and answers with what it gave and the refs that it met.
pub(crate) fn capture<R>(
    owner: &Arc<Owner>,
    encode: impl FnOnce() -> Result<R, CodecError>,
) -> Result<(R, Vec<Handle>), PackError> {
    let outer = Outer::enter(&ENCODING, Encoding { cluster: owner.cluster, found: Vec::new(), foreign: None });
    let encoded = encode();
    let met = ENCODING.take();
    drop(outer);
    let (found, foreign) = met.map(|met| (met.found, met.foreign)).unwrap_or_default();
    match (encoded, foreign) {
        (_, Some(foreign)) => Err(PackError::Other(*foreign)),
        (Ok(encoded), None) => Ok((encoded, found)),
        (Err(error), None) => Err(PackError::Codec(error)),
    }
}

/// Encodes a value that is kept for somebody else, such as an item of a queue. The handles are of the refs inside; they
/// must be kept with it.
///
/// # Errors
/// [`Error::Encode`], [`Error::ForeignRef`].
pub fn encode_kept<T: Serialize + 'static>(session: &Session, value: &T) -> Result<(Bytes, Vec<KeptRef>), Error> {
    let encoded = capture(session.owner(), || codec::encode_value(value).map(Encoded::into_bytes));
    match encoded {
        Ok((bytes, held)) => Ok((bytes, held.into_iter().map(KeptRef).collect())),
        Err(PackError::Other(error)) => Err(error),
        Err(PackError::Codec(error)) => {
            Err(Error::Encode { what: format!("a value of type {}", std::any::type_name::<T>()), why: error.0 })
        }
    }
}

/// Decodes what [`encode_kept`] made, while its refs are still kept.
///
/// # Errors
/// [`Error::Decode`].
pub fn decode_kept<T: DeserializeOwned + 'static>(session: &Session, bytes: Bytes) -> Result<T, Error> {
    decode(session.owner(), &Bits::Inline(bytes))
        .map_err(|error| Error::Decode { what: format!("a value as {}", std::any::type_name::<T>()), why: error.0 })
}

/// Keeps an object, whatever its type, for the reader of a value that refers to it. Can itself be sent.
pub struct KeptRef(Handle);

impl Serialize for KeptRef {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serialize_handle(&self.0, serializer)
    }
}

impl<'de> Deserialize<'de> for KeptRef {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserialize_handle(deserializer).map(KeptRef)
    }
}

/// Decodes a value that arrived.
pub(crate) fn decode<T: DeserializeOwned + 'static>(owner: &Arc<Owner>, bits: &Bits) -> Result<T, CodecError> {
    let _outer = Outer::enter(&DECODING, owner.clone());
    match bits {
        Bits::Inline(bytes) => codec::decode_value(bytes),
        Bits::Shared(pinned) => codec::decode_value_in_place(bits, &|| pinned.clone().into_bytes()),
    }
}

/// Decodes what is about to be sent, to see that it can be.
pub(crate) fn decode_packed<T: DeserializeOwned + 'static>(
    owner: &Arc<Owner>,
    packed: &PackedValue,
) -> Result<(), CodecError> {
    match &packed.content {
        Content::Inline(bytes) => decode::<T>(owner, &Bits::Inline(bytes.clone())).map(drop),
        // Too large to look at twice; the receiver will say.
        Content::Stored(_) => Ok(()),
    }
}

/// That a handle is of this cluster, and no error.
///
/// # Errors
/// [`Error::ForeignRef`], or the error that the handle is.
pub(crate) fn check_ours(cluster: ClusterId, handle: &Handle) -> Result<(), Error> {
    match Owner::of(handle) {
        None => Err(handle.failure().unwrap_or(Error::NoSession)),
        Some(theirs) if theirs.cluster == cluster => Ok(()),
        Some(theirs) => Err(Error::ForeignRef { what: handle.id().to_string(), theirs: theirs.cluster, ours: cluster }),
    }
}

/// Writes a ref.
///
/// # Errors
/// Outside of Wingbeat's own encoding: nobody would hold the object until the reader is there.
pub fn serialize_handle<S: Serializer>(handle: &Handle, serializer: S) -> Result<S::Ok, S::Error> {
    note(handle).map_err(S::Error::custom)?;
    handle.id().serialize(serializer)
}

pub(super) fn note(handle: &Handle) -> Result<(), String> {
    ENCODING.with_borrow_mut(|encoding| {
        let Some(encoding) = encoding else {
            return Err("an object ref can be sent only through Wingbeat (as an argument, a result, or with put): \
                        anywhere else nobody would keep the object alive for the reader"
                .to_owned());
        };
        match check_ours(encoding.cluster, handle) {
            Ok(()) => {
                encoding.found.push(handle.clone());
                Ok(())
            }
            Err(error) => {
                let text = error.to_string();
                encoding.foreign = Some(Box::new(error));
                Err(text)
            }
        }
    })
}

pub(super) fn decoding_owner() -> Result<Arc<Owner>, String> {
    DECODING.with_borrow(Clone::clone).ok_or_else(|| "an object ref can be read only through Wingbeat".to_owned())
}

/// Reads a ref; this process borrows the object from then on, if it is not the owner.
///
/// # Errors
/// Outside of Wingbeat's own decoding.
pub fn deserialize_handle<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Handle, D::Error> {
    let id = ObjectId::deserialize(deserializer)?;
    let owner = decoding_owner().map_err(D::Error::custom)?;
    Ok(owner.borrow(id))
}

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
                let value = Packed { bytes: bytes.into(), refs: owner.describe(&packed.held) };
                Ok(owner.new_inline(value, packed.held))
            }
        }
    }
}
