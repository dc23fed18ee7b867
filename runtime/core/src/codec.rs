//! The one codec: bincode with fixed-width little-endian integers, and byte payloads beside it.
//!
//! A message is a body and, after it, the bytes of every [`Payload`] in the body, in order. So large
//! byte strings never pass through serde: encoding copies each once into the send buffer, and
//! decoding hands out slices of the receive buffer.
//!
//! Fixed-width integers make a `Vec<f32>` on the wire an eight-byte length and then the floats as
//! they lie in memory, which is what lets [`encode_value`] copy it in one piece and a reader view it
//! in place.
//!
//! A user's value has the same form, written and read here (`encode`, `decode`). The [`Buffer`](crate::buffer::Buffer)s in
//! it that are not small come after it, in order, each at a multiple of 64 bytes from its start, and the value says where: so
//! they are written straight into shared memory, and are read there.

mod decode;
mod encode;

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::fmt;
use std::marker::PhantomData;

use bincode::enc::write;
use bincode::error::EncodeError;
use bytes::{Buf, BufMut, Bytes, BytesMut};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::checked::Checked;
use crate::plain::numbers;
use decode::Reader;
use encode::Writer;

pub use crate::plain::{Number, Plain, decode_plain, plain_bytes, plain_content, plain_slice};
pub use decode::Keeper;
pub(crate) use decode::deserialize_buffer;
pub(crate) use encode::serialize_buffer;

/// The most that one decoded body may claim to hold. Payload bytes are not counted: they are there
/// already, in the frame.
pub const BODY_LIMIT: usize = 256 << 20;

fn body_config() -> impl bincode::config::Config {
    bincode::config::standard().with_fixed_int_encoding().with_limit::<BODY_LIMIT>()
}

/// Why something could not be encoded or decoded.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[error("{0}")]
pub struct CodecError(pub String);

/// Bytes that travel beside the body of a message, and not through serde. Inside a user's value (an error of Wingbeat's that
/// a task returns) they are a part of it.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Payload(pub Bytes);

/// Stands before the number of bytes that were left out of a [`Payload`].
const LEFT_OUT: &[u8] = b"wingbeat: bytes left out";

impl Payload {
    /// What stands for these bytes where nobody else is to see them: how many they are. It is shown as they would be.
    #[must_use]
    pub fn left_out(&self) -> Payload {
        match self.length_left_out() {
            Some(_) => self.clone(),
            None => Payload([LEFT_OUT, &(self.0.len() as u64).to_le_bytes()].concat().into()),
        }
    }

    fn length_left_out(&self) -> Option<u64> {
        let length = self.0.strip_prefix(LEFT_OUT)?;
        length.try_into().ok().map(u64::from_le_bytes)
    }
}

impl fmt::Debug for Payload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.length_left_out().unwrap_or(self.0.len() as u64))
    }
}

impl std::ops::Deref for Payload {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.0
    }
}

impl From<Bytes> for Payload {
    fn from(bytes: Bytes) -> Self {
        Self(bytes)
    }
}

thread_local! {
    /// Payloads met while the current message is encoded.
    static OUTGOING: RefCell<Vec<Bytes>> = const { RefCell::new(Vec::new()) };
    /// What is left of the payload bytes of the message that is being decoded.
    static INCOMING: RefCell<Bytes> = const { RefCell::new(Bytes::new()) };
    /// Whether it is a message that this thread encodes or decodes.
    static IS_MESSAGE: Cell<bool> = const { Cell::new(false) };
}

/// While this lives, payloads travel beside the body.
struct InMessage;

impl InMessage {
    fn enter() -> Self {
        IS_MESSAGE.set(true);
        InMessage
    }
}

impl Drop for InMessage {
    fn drop(&mut self) {
        IS_MESSAGE.set(false);
    }
}

impl Serialize for Payload {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if !IS_MESSAGE.get() {
            return serializer.serialize_bytes(&self.0);
        }
        OUTGOING.with_borrow_mut(|out| out.push(self.0.clone()));
        serializer.serialize_u64(self.0.len() as u64)
    }
}

impl<'de> Deserialize<'de> for Payload {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        if !IS_MESSAGE.get() {
            return serde_bytes::ByteBuf::deserialize(deserializer).map(|bytes| Payload(bytes.into_vec().into()));
        }
        let len = u64::deserialize(deserializer)? as usize;
        INCOMING.with_borrow_mut(|rest| {
            if len > rest.len() {
                let missing = len - rest.len();
                return Err(serde::de::Error::custom(format!("payload is cut short by {missing} bytes")));
            }
            Ok(Payload(rest.split_to(len)))
        })
    }
}

struct BufWriter<'a>(&'a mut BytesMut);

impl write::Writer for BufWriter<'_> {
    fn write(&mut self, bytes: &[u8]) -> Result<(), EncodeError> {
        self.0.extend_from_slice(bytes);
        Ok(())
    }
}

/// Appends `message` to `out`: four bytes of body length, the body, the payloads.
///
/// # Errors
/// When serde refuses, or the body is longer than [`BODY_LIMIT`]; `out` is then as it was.
pub fn encode_message<T: Serialize>(message: &T, out: &mut BytesMut) -> Result<(), CodecError> {
    let start = out.len();
    out.put_u32_le(0);
    OUTGOING.with_borrow_mut(Vec::clear);
    let encoded = {
        let _within = InMessage::enter();
        bincode::serde::encode_into_writer(message, BufWriter(out), body_config())
    };
    let payloads = OUTGOING.with_borrow_mut(std::mem::take);
    let body = out.len() - start - 4;
    if let Err(error) = encoded {
        out.truncate(start);
        return Err(CodecError(error.to_string()));
    }
    if body > BODY_LIMIT {
        out.truncate(start);
        return Err(CodecError(format!("a message body of {body} bytes is over the limit of {BODY_LIMIT}")));
    }
    out[start..start + 4].copy_from_slice(&(body as u32).to_le_bytes());
    for payload in &payloads {
        out.extend_from_slice(payload);
    }
    // The vector's memory is kept for the next message of this thread.
    OUTGOING.with_borrow_mut(|slot| {
        *slot = payloads;
        slot.clear();
    });
    Ok(())
}

/// Reads what [`encode_message`] wrote. Payloads are slices of `frame`.
///
/// # Errors
/// When the bytes are no such message.
pub fn decode_message<T: DeserializeOwned>(mut frame: Bytes) -> Result<T, CodecError> {
    if frame.len() < 4 {
        return Err(CodecError("a message is cut short".into()));
    }
    let body_len = frame.get_u32_le() as usize;
    if body_len > frame.len() {
        return Err(CodecError("a message body is cut short".into()));
    }
    let body = frame.split_to(body_len);
    INCOMING.with_borrow_mut(|slot| *slot = frame);
    let decoded = {
        let _within = InMessage::enter();
        bincode::serde::seed_decode_from_slice(Checked(PhantomData::<T>), &body, body_config())
    };
    INCOMING.with_borrow_mut(|slot| *slot = Bytes::new());
    decoded.map(|(message, _)| message).map_err(|error| CodecError(error.to_string()))
}

/// The encoded form of a user's value, as long as it is being built.
pub enum Encoded<'a> {
    /// A length and then plain bytes that can be copied from where they are.
    Plain(&'a [u8], u64),
    /// Encoded bytes.
    Bytes(Vec<u8>),
    /// Encoded bytes in several parts, and the buffers that come after them, each at the next multiple of 64 bytes.
    Parts(Vec<Vec<u8>>, Vec<Bytes>),
}

impl Encoded<'_> {
    /// The length on the wire, in bytes.
    pub fn len(&self) -> usize {
        match self {
            Encoded::Plain(bytes, _) => 8 + bytes.len(),
            Encoded::Bytes(bytes) => bytes.len(),
            Encoded::Parts(parts, buffers) => {
                let end = parts.iter().map(Vec::len).sum();
                buffers.iter().fold(end, |end, buffer| align(end) + buffer.len())
            }
        }
    }

    /// Whether there is nothing (the encoding of `()`).
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Copies the encoded form into `out`, which must be exactly [`Encoded::len`] long.
    pub fn copy_to(&self, out: &mut [u8]) {
        match self {
            Encoded::Plain(bytes, count) => {
                out[..8].copy_from_slice(&count.to_le_bytes());
                copy(bytes, &mut out[8..]);
            }
            Encoded::Bytes(bytes) => copy(bytes, out),
            Encoded::Parts(parts, buffers) => {
                let mut end = 0;
                for part in parts {
                    copy(part, &mut out[end..end + part.len()]);
                    end += part.len();
                }
                for buffer in buffers {
                    let start = align(end);
                    // What was there before is nobody's business.
                    out[end..start].fill(0);
                    end = start + buffer.len();
                    copy(buffer, &mut out[start..end]);
                }
            }
        }
    }

    /// The encoded form as bytes of its own.
    pub fn into_bytes(self) -> Bytes {
        match self {
            Encoded::Plain(bytes, count) => {
                let mut out = Vec::with_capacity(8 + bytes.len());
                out.extend_from_slice(&count.to_le_bytes());
                out.extend_from_slice(bytes);
                out.into()
            }
            Encoded::Bytes(bytes) => bytes.into(),
            Encoded::Parts(..) => {
                let mut out = vec![0; self.len()];
                self.copy_to(&mut out);
                out.into()
            }
        }
    }
}

/// From so many bytes on, two threads copy faster than one, although it costs to start the other.
const COPY_BY_TWO: usize = 64 << 20;

fn copy(from: &[u8], to: &mut [u8]) {
    if from.len() < COPY_BY_TWO {
        return to.copy_from_slice(from);
    }
    let half = from.len() / 2;
    let helped = std::thread::scope(|scope| {
        let (first, rest) = to.split_at_mut(half);
        let other = std::thread::Builder::new().spawn_scoped(scope, || rest.copy_from_slice(&from[half..]));
        first.copy_from_slice(&from[..half]);
        other.is_ok()
    });
    if !helped {
        to[half..].copy_from_slice(&from[half..]);
    }
}

/// From so many bytes on, a buffer is written beside the value that it is a part of.
pub const BESIDE_FROM: usize = 4 << 10;

/// Where buffers start, from the start of the encoded value: the store places values so, too.
const BESIDE_ALIGN: usize = 64;

/// In the place of a length: a buffer follows, in a form of its own. No sequence is so long.
const RAW: u64 = 1 << 63;

/// The next place where a buffer may start.
fn align(offset: usize) -> usize {
    offset.checked_next_multiple_of(BESIDE_ALIGN).unwrap_or(usize::MAX)
}

/// Encodes a user's value. Vectors of numbers, and buffers, are not copied yet.
///
/// # Errors
/// When the type's serde implementation refuses, or has maps or sequences of unknown length (`flatten`).
pub fn encode_value<T: Serialize + 'static>(value: &T) -> Result<Encoded<'_>, CodecError> {
    let any: &dyn Any = value;
    macro_rules! try_plain {
        ($($t:ty),*) => {$(
            if let Some(vec) = any.downcast_ref::<Vec<$t>>() {
                return Ok(Encoded::Plain(plain_bytes(vec.as_slice()), vec.len() as u64));
            }
        )*};
    }
    if std::mem::size_of::<T>() == std::mem::size_of::<Vec<u8>>() {
        numbers!(try_plain);
        if let Some(text) = any.downcast_ref::<String>() {
            return Ok(Encoded::Plain(text.as_bytes(), text.len() as u64));
        }
    }
    if let Some(bytes) = any.downcast_ref::<Bytes>() {
        return Ok(Encoded::Plain(bytes, bytes.len() as u64));
    }
    let mut writer = Writer::with_capacity(std::mem::size_of::<T>().min(256));
    value.serialize(&mut writer)?;
    Ok(writer.finish())
}

/// Decodes a user's value. What is large is copied out of `bytes`.
///
/// # Errors
/// When the bytes are no such value, some are left over, or the type needs a self-describing format
/// (untagged enums, `serde_json::Value`).
pub fn decode_value<T: DeserializeOwned + 'static>(bytes: &[u8]) -> Result<T, CodecError> {
    decode(bytes, None)
}

/// As [`decode_value`], where buffers and `Bytes` in the value may stay where they are, as slices of what `keeper` answers: the
/// same bytes, kept for as long as somebody has them.
///
/// # Errors
/// As [`decode_value`].
pub fn decode_value_in_place<T: DeserializeOwned + 'static>(bytes: &[u8], keeper: Keeper<'_>) -> Result<T, CodecError> {
    decode(bytes, Some(keeper))
}

fn decode<T: DeserializeOwned>(bytes: &[u8], keeper: Option<Keeper<'_>>) -> Result<T, CodecError> {
    let mut reader = Reader::new(bytes, keeper);
    let value = T::deserialize(&mut reader)?;
    reader.finish()?;
    Ok(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Serialize, Deserialize, PartialEq, Debug)]
    struct Message {
        a: u32,
        first: Payload,
        b: String,
        second: Payload,
    }

    #[test]
    fn bytes_that_are_left_out_are_shown_as_before() {
        let secret = Payload(Bytes::from_static(b"a secret"));
        let left_out = secret.left_out();
        assert_eq!(format!("{secret:?} {left_out:?} {:?}", left_out.left_out()), "8 bytes 8 bytes 8 bytes");
        assert!(!left_out.windows(6).any(|bytes| bytes == b"secret"));
    }

    #[test]
    fn a_payload_in_a_value_is_a_part_of_it() {
        let value = Some(Payload(Bytes::from_static(b"seven")));
        let encoded = encode_value(&value).unwrap();
        assert_eq!(decode_value::<Option<Payload>>(&encoded.into_bytes()).unwrap(), value);
        let mut message = BytesMut::new();
        encode_message(&value, &mut message).unwrap();
        assert_eq!(decode_message::<Option<Payload>>(message.freeze()).unwrap(), value);
    }

    #[test]
    fn payloads_travel_beside_the_body_and_come_back_as_slices() {
        let message = Message {
            a: 7,
            first: Payload(Bytes::from_static(b"one")),
            b: "text".into(),
            second: Payload(Bytes::from_static(b"two!")),
        };
        let mut out = BytesMut::new();
        encode_message(&message, &mut out).unwrap();
        assert!(out.ends_with(b"onetwo!"));
        assert_eq!(decode_message::<Message>(out.freeze()).unwrap(), message);
    }

    #[test]
    fn a_cut_message_is_an_error() {
        let mut out = BytesMut::new();
        encode_message(&Payload(Bytes::from_static(b"payload")), &mut out).unwrap();
        for len in 0..out.len() {
            assert!(decode_message::<Payload>(Bytes::copy_from_slice(&out[..len])).is_err());
        }
    }

    #[test]
    fn plain_vectors_have_the_same_form_as_serde_gives_them() {
        let value = vec![1.5f32, -2.0, 3.25];
        let fast = encode_value(&value).unwrap().into_bytes();
        let config = bincode::config::standard().with_fixed_int_encoding();
        let slow = bincode::serde::encode_to_vec(&value, config).unwrap();
        assert_eq!(fast, slow);
        assert_eq!(decode_value::<Vec<f32>>(&fast).unwrap(), value);
        assert_eq!(decode_value::<String>(&encode_value(&"héllo".to_owned()).unwrap().into_bytes()).unwrap(), "héllo");
    }

    #[derive(Serialize, Deserialize, PartialEq, Debug, Clone)]
    enum Shape {
        Unit,
        New(String),
        Tuple(u8, Option<String>),
        Struct { bytes: serde_bytes_like::Bytes, map: std::collections::BTreeMap<String, Vec<Shape>> },
    }

    mod serde_bytes_like {
        /// Bytes that ask for a buffer of their own, as those of the crate `serde_bytes` do.
        #[derive(PartialEq, Debug, Clone)]
        pub(super) struct Bytes(pub(super) Vec<u8>);

        impl serde::Serialize for Bytes {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_bytes(&self.0)
            }
        }

        impl<'de> serde::Deserialize<'de> for Bytes {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                struct Visitor;
                impl serde::de::Visitor<'_> for Visitor {
                    type Value = Bytes;
                    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                        f.write_str("bytes")
                    }
                    fn visit_bytes<E>(self, bytes: &[u8]) -> Result<Bytes, E> {
                        Ok(Bytes(bytes.to_vec()))
                    }
                }
                deserializer.deserialize_byte_buf(Visitor)
            }
        }
    }

    fn shapes() -> Vec<Shape> {
        let inner =
            vec![Shape::Unit, Shape::New("héllo".into()), Shape::Tuple(7, None), Shape::Tuple(8, Some("x".into()))];
        let map = std::collections::BTreeMap::from([("a".to_owned(), inner.clone()), (String::new(), Vec::new())]);
        let mut all = inner;
        all.push(Shape::Struct { bytes: serde_bytes_like::Bytes(vec![1, 2, 3]), map });
        all
    }

    #[test]
    fn every_form_of_data_comes_back_as_it_was() {
        let value = shapes();
        let bytes = encode_value(&value).unwrap().into_bytes();
        assert_eq!(decode_value::<Vec<Shape>>(&bytes).unwrap(), value);
    }

    #[test]
    fn what_claims_to_be_longer_than_what_is_there_is_an_error_and_asks_for_no_memory() {
        // As two small numbers: they claim 43 GB, and the next as much as one value may.
        for claim in [10u64 << 32 | 3, 1 << 39, 1 << 40, u64::MAX] {
            let mut bytes = claim.to_le_bytes().to_vec();
            bytes.extend_from_slice(b"abc");
            assert!(decode_value::<String>(&bytes).is_err());
            assert!(decode_value::<serde_bytes_like::Bytes>(&bytes).is_err());
            assert!(decode_value::<(String, u8)>(&bytes).is_err());
            let mut message = (bytes.len() as u32).to_le_bytes().to_vec();
            message.extend_from_slice(&bytes);
            assert!(decode_message::<String>(message.into()).is_err());
        }
    }

    #[test]
    fn a_value_that_is_cut_short_is_an_error() {
        let bytes = encode_value(&shapes()).unwrap().into_bytes();
        for len in 0..bytes.len() {
            assert!(decode_value::<Vec<Shape>>(&bytes[..len]).is_err());
        }
    }

    #[test]
    fn bytes_left_over_are_an_error() {
        assert!(decode_value::<u8>(&[1, 2]).is_err());
        assert!(decode_value::<Vec<u32>>(&[9, 0, 0, 0, 0, 0, 0, 0, 1]).is_err());
    }
}
