//! Refs inside values: how they are written, found, and held until the receiver has registered.
//!
//! Whoever sends a ref holds a handle until the receiver is registered with the owner (or holds it by
//! other means: it *is* the owner, or it holds the object that contains the ref). While a value is being
//! encoded, a thread-local list collects handles of the refs in it; while one is being decoded, a
//! thread-local session says to whom they belong. Outside of both, refs refuse to be written or read.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::thread::LocalKey;

use bytes::Bytes;
use serde::de::{DeserializeOwned, Error as _};
use serde::ser::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use wingbeat_core::codec::{self, CodecError};
use wingbeat_core::error::Error;
use wingbeat_core::value::{INLINE_LIMIT, ObjectValue, Packed, Refs};
use wingbeat_core::{ActorId, FunctionId, ObjectId};
use wingbeat_net::messages::{MESSAGE_LIMIT, Weight};

use crate::actor::ActorHandle;
use crate::object::Handle;
use crate::registry::Outgoing;
use crate::session::Session;
use crate::view::Bits;

thread_local! {
    static ENCODING: RefCell<Option<Encoding>> = const { RefCell::new(None) };
    static DECODING: RefCell<Option<Session>> = const { RefCell::new(None) };
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
    session: Session,
    found: Vec<Handle>,
    /// A ref of another cluster; the error that it is.
    foreign: Option<Error>,
}

/// Why a value could not be made ready for sending.
#[derive(Debug)]
pub enum PackError {
    /// The type's serde implementation.
    Codec(CodecError),
    /// A foreign ref, or the store.
    Other(Error),
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

/// Runs `encode` and answers with what it gave and the refs that it met.
pub(crate) fn capture<R>(
    session: &Session,
    encode: impl FnOnce() -> Result<R, CodecError>,
) -> Result<(R, Vec<Handle>), PackError> {
    let outer = Outer::enter(&ENCODING, Encoding { session: session.clone(), found: Vec::new(), foreign: None });
    let encoded = encode();
    let met = ENCODING.take();
    drop(outer);
    let (found, foreign) = met.map(|met| (met.found, met.foreign)).unwrap_or_default();
    match (encoded, foreign) {
        (_, Some(foreign)) => Err(PackError::Other(foreign)),
        (Ok(encoded), None) => Ok((encoded, found)),
        (Err(error), None) => Err(PackError::Codec(error)),
    }
}

/// Encodes `value`; a large one goes straight into shared memory.
pub(crate) fn pack<T: Serialize + Send + 'static>(session: &Session, value: &T) -> Result<PackedValue, PackError> {
    let (encoded, held) = capture(session, || value.encode())?;
    if encoded.len() <= INLINE_LIMIT {
        return Ok(PackedValue { content: Content::Inline(encoded.into_bytes()), held });
    }
    let handle = session.process().put_encoded(session, &encoded, held).map_err(PackError::Other)?;
    Ok(PackedValue { content: Content::Stored(handle), held: Vec::new() })
}

/// The refs of `held` as they travel.
pub(crate) fn describe(session: &Session, held: &[Handle]) -> Option<Box<Refs>> {
    if held.is_empty() {
        return None;
    }
    let mut refs = Refs::default();
    let mut owners = BTreeSet::new();
    for handle in held {
        let id = handle.id();
        refs.ids.push(id);
        if owners.insert(id.owner())
            && let Some(address) = session.process().address_of(id.owner())
        {
            refs.owners.push(address);
        }
    }
    Some(Box::new(refs))
}

/// The encoded output of a task: inline, or in shared memory as the object `id`.
pub(crate) fn pack_output(
    session: &Session,
    id: ObjectId,
    value: &dyn Outgoing,
    replaces: bool,
) -> Result<(ObjectValue, Vec<Handle>), PackError> {
    let (encoded, held) = capture(session, || value.encode())?;
    let refs = describe(session, &held);
    if encoded.len() <= INLINE_LIMIT {
        let bytes = encoded.into_bytes().into();
        return Ok((ObjectValue::Inline(Packed { bytes, refs }), held));
    }
    let mut stored = session.process().store(id, &encoded, replaces).map_err(PackError::Other)?;
    stored.refs = refs;
    Ok((ObjectValue::Stored(stored), held))
}

/// Why a value cannot be sent, if it cannot: its own bytes are few or elsewhere, the refs in it are not.
pub(crate) fn too_many(value: &ObjectValue, what: impl FnOnce() -> String) -> Option<Error> {
    let weight = value.weight();
    (weight > MESSAGE_LIMIT).then(|| Error::InvalidArgument {
        what: format!(
            "the refs in {} need {weight} bytes in one message, over the limit of {MESSAGE_LIMIT}; spread them over several objects",
            what()
        ),
    })
}

/// Encodes a value that is kept for somebody else, such as an item of a queue. The handles are of the refs inside; they
/// must be kept with it.
///
/// # Errors
/// [`Error::Encode`], [`Error::ForeignRef`].
pub fn encode_kept<T: Serialize + 'static>(session: &Session, value: &T) -> Result<(Bytes, Vec<KeptRef>), Error> {
    let encoded = capture(session, || codec::encode_value(value).map(codec::Encoded::into_bytes));
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
    decode(session, &Bits::Inline(bytes))
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
pub(crate) fn decode<T: DeserializeOwned + 'static>(session: &Session, bits: &Bits) -> Result<T, CodecError> {
    let _outer = Outer::enter(&DECODING, session.clone());
    codec::decode_value(bits)
}

/// Decodes what is about to be sent, to see that it can be.
pub(crate) fn decode_packed<T: DeserializeOwned + 'static>(
    session: &Session,
    packed: &PackedValue,
) -> Result<(), CodecError> {
    match &packed.content {
        Content::Inline(bytes) => decode::<T>(session, &Bits::Inline(bytes.clone())).map(drop),
        // Too large to look at twice; the receiver will say.
        Content::Stored(_) => Ok(()),
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
}

/// Writes a ref.
///
/// # Errors
/// Outside of Wingbeat's own encoding: nobody would hold the object until the reader is there.
pub fn serialize_handle<S: Serializer>(handle: &Handle, serializer: S) -> Result<S::Ok, S::Error> {
    note(handle).map_err(S::Error::custom)?;
    handle.id().serialize(serializer)
}

fn note(handle: &Handle) -> Result<(), String> {
    ENCODING.with_borrow_mut(|encoding| {
        let Some(encoding) = encoding else {
            return Err("an object ref can be sent only through Wingbeat (as an argument, a result, or with put): \
                        anywhere else nobody would keep the object alive for the reader"
                .to_owned());
        };
        match encoding.session.check_ours(handle) {
            Ok(()) => {
                encoding.found.push(handle.clone());
                Ok(())
            }
            Err(error) => {
                let text = error.to_string();
                encoding.foreign = Some(error);
                Err(text)
            }
        }
    })
}

fn decoding_session() -> Result<Session, String> {
    DECODING.with_borrow(Clone::clone).ok_or_else(|| "an object ref can be read only through Wingbeat".to_owned())
}

/// Reads a ref; this process borrows the object from then on, if it is not the owner.
///
/// # Errors
/// Outside of Wingbeat's own decoding.
pub fn deserialize_handle<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Handle, D::Error> {
    let id = ObjectId::deserialize(deserializer)?;
    let session = decoding_session().map_err(D::Error::custom)?;
    Ok(session.process().borrow(&session, id))
}

/// Writes an actor handle.
///
/// # Errors
/// As [`serialize_handle`].
pub fn serialize_actor<S: Serializer>(actor: &ActorHandle, serializer: S) -> Result<S::Ok, S::Error> {
    note(actor.handle()).map_err(S::Error::custom)?;
    let wire = WireActor {
        id: actor.id(),
        class: actor.class(),
        class_name: actor.class_name().to_owned(),
        handle: actor.handle().id(),
        detached: actor.is_detached(),
        max_pending_calls: actor.max_pending_calls(),
    };
    wire.serialize(serializer)
}

/// Reads an actor handle of the class `class`.
///
/// # Errors
/// As [`deserialize_handle`]; or the actor is of another class.
pub fn deserialize_actor<'de, D: Deserializer<'de>>(
    deserializer: D,
    class: &'static crate::registry::Class,
) -> Result<ActorHandle, D::Error> {
    let wire = WireActor::deserialize(deserializer)?;
    if wire.class != class.id() {
        return Err(D::Error::custom(format!("this is a handle of {}, not of {}", wire.class_name, class.path)));
    }
    let session = decoding_session().map_err(D::Error::custom)?;
    let handle = session.process().borrow(&session, wire.handle);
    session.process().know_actor(handle.id(), wire.id);
    Ok(ActorHandle::new(handle, wire.id, wire.class, wire.class_name.into(), wire.detached)
        .with_limit(wire.max_pending_calls))
}
